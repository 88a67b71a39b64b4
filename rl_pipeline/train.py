"""The door: `python -m rl_pipeline.train env=pong backend=envpool seed=1`."""

from __future__ import annotations

from rl_pipeline import stop

if __name__ == "__main__":
    stop.answer_early()

# ruff: noqa: E402 - what is imported from here on takes a second
import sys
import traceback
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from rl_pipeline import files, terminal
from rl_pipeline.config import app, folders
from rl_pipeline.config.origins import CONF
from rl_pipeline.errors import ConfigError


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def _train(cfg: DictConfig) -> float:
    """Train once; the objective of a sweep is the evaluated return."""
    hydra_config = HydraConfig.get()
    if hydra_config.mode == RunMode.MULTIRUN:
        from rl_pipeline.study import jobs

        own = list(hydra_config.overrides.hydra)
        return jobs.run_here(list(hydra_config.overrides.task), hydra_config.job.num, own)
    folder = Path(hydra_config.runtime.output_dir)
    try:
        with stop.no_exit():
            # Heavy imports only here: --help, --cfg and a bad setting answer at once.
            from rl_pipeline.run import build, summary

            result = build.train(cfg)
    except stop.Killed:
        if any(folder.glob("checkpoints/step-*.pt")):
            line = terminal.command("train", resume=terminal.shown_path(str(folder)))
            terminal.say(f"continue with\n  {line}")
        raise
    except ConfigError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and files.of_the_disk(error):
            terminal.say(f"failed: {files.why_not(error)}")
        else:
            terminal.say(traceback.format_exc())
            terminal.say(f"failed: {type(error).__name__}: {error}")
        if (folder / "run.json").exists():
            terminal.say(f"folder: {terminal.shown_path(str(folder))}")
        sys.exit(1)
    summary.print_summary(result)
    return folders.objective(result)


def main() -> None:
    """Entry point."""
    app.run_main(_train)


if __name__ == "__main__":
    main()
