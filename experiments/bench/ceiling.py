"""What a run could reach if its parts cost no more than each costs alone.

    python -m experiments.bench.ceiling env=cartpole algo=ppo compile=default

Prints a JSON object: seconds an env step of every part, and env steps/s of their sum.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from hydra import compose, initialize_config_dir

from rl_pipeline.config import load
from rl_pipeline.config.origins import CONF
from rl_pipeline.diagnosis.parts import Parts, ceiling
from rl_pipeline.diagnosis.rig import Rig

SECONDS = 0.6
"""For each part."""


def main() -> None:
    """Measure and print."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        settings = load.load(compose("config", overrides=sys.argv[1:]))
    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(settings, Path(folder))
        rig.warm()
        costs = Parts(rig).measure(SECONDS)
        rig.close()
    found = {name: cost.median_s for name, cost in costs.items()}
    print(json.dumps(found | {"ceiling": ceiling(costs)}))


if __name__ == "__main__":
    main()
