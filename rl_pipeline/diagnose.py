"""The door: `python -m rl_pipeline.diagnose <any override of a training> budget=120 out=diagnosis`.

Says where the time of a run goes, what bounds it, and what to change: each change as an override to
paste, with its speed-up and interval, measured in turns with what is. Writes index.html and
diagnosis.json to `out`. `budget` are seconds; what does not fit in is not tried.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hydra import compose, initialize_config_dir
from pydantic import Field

from rl_pipeline.config import cli, folders, load
from rl_pipeline.config.app import refusing
from rl_pipeline.config.origins import CONF
from rl_pipeline.config.settings import Frozen, PositiveFloat, Settings
from rl_pipeline.errors import ConfigError
from rl_pipeline.files import write_json
from rl_pipeline.terminal import say


class DiagnoseSettings(Frozen):
    """Arguments of the door besides those of the training."""

    budget: PositiveFloat = Field(120.0, description="Seconds after which nothing more is tried.")
    run: str | None = Field(
        None, description="A finished run (folder, run id or MLflow id): nothing is run."
    )
    out: Path = Field(Path("diagnosis"), description="Folder for index.html and diagnosis.json.")


def load_overrides(overrides: list[str]) -> Settings:
    """Checked settings of a command line; raises ConfigError or Hydra's errors."""
    return load.load(compose("config", overrides=overrides), overrides)


def run(argv: list[str]) -> None:
    """Diagnose, print, write."""
    own = [a for a in argv if a.split("=")[0] in DiagnoseSettings.model_fields]
    asked, overrides = cli.parse(DiagnoseSettings, own), [a for a in argv if a not in own]
    if asked.run is not None:
        if len(own) < len(argv) or len(own) > 1:
            raise ConfigError("run= stands alone: the run has its settings")
        from rl_pipeline.diagnosis.diagnose import from_records
        from rl_pipeline.diagnosis.report import print_finding

        print_finding(from_records(folders.find_run(asked.run, "run")))
        return
    with initialize_config_dir(str(CONF), version_base="1.3"):
        settings = load_overrides(overrides)
        if settings.resume:
            raise ConfigError("resume= does not go with a diagnosis: give the run's settings")
        from rl_pipeline.diagnosis.diagnose import as_json, diagnose
        from rl_pipeline.diagnosis.page import page
        from rl_pipeline.diagnosis.report import print_diagnosis

        found = diagnose(settings, overrides, load_overrides, asked.budget, say)
    print_diagnosis(found)
    asked.out.mkdir(parents=True, exist_ok=True)
    write_json(asked.out / "diagnosis.json", json.loads(json.dumps(as_json(found), default=str)))
    (asked.out / "index.html").write_text(page(found))
    print(f"\npage    {asked.out / 'index.html'}")


def main() -> None:
    """Entry point."""
    with refusing():
        if {"-h", "--help"} & set(sys.argv[1:]):
            print(f"{__doc__}\n{cli.usage(DiagnoseSettings)}")
            return
        run(sys.argv[1:])


if __name__ == "__main__":
    main()
