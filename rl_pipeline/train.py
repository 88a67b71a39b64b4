"""The door: `python -m rl_pipeline.train env=pong backend=envpool seed=1`."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from rl_pipeline import config


@hydra.main(version_base="1.3", config_path=str(config.CONF), config_name="config")
def _train(cfg: DictConfig) -> float:
    """Train once; the objective of a sweep is the evaluated return."""
    hydra_config = HydraConfig.get()
    if hydra_config.mode == RunMode.MULTIRUN:
        from rl_pipeline import jobs

        own = list(hydra_config.overrides.hydra)
        return jobs.run_here(list(hydra_config.overrides.task), hydra_config.job.num, own)
    # Heavy imports only here: --help, --cfg and a bad setting answer at once.
    from rl_pipeline import build, report
    from rl_pipeline.session import Killed

    try:
        with config.refusing():
            result = build.train(cfg)
    except (Killed, KeyboardInterrupt) as stopped:
        name = str(stopped) or "SIGINT"
        print(f"stopped by {name}", file=sys.stderr)
        folder = Path(HydraConfig.get().runtime.output_dir)
        if any(folder.glob("checkpoints/step-*.pt")):
            resume = report.shown_path(str(folder))
            print(f"continue with\n  python -m rl_pipeline.train resume={resume}", file=sys.stderr)
        sys.exit(143 if name == "SIGTERM" else 130)
    except Exception as error:
        traceback.print_exc()
        where = report.shown_path(HydraConfig.get().runtime.output_dir)
        print(f"failed: {type(error).__name__}: {error}\nfolder: {where}", file=sys.stderr)
        sys.exit(1)
    report.print_summary(result)
    return report.objective(result)


def main() -> None:
    """Entry point."""
    config.run_main(_train)


if __name__ == "__main__":
    main()
