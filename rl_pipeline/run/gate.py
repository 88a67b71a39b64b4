"""Hydra's callback of a single run: a bad configuration ends it before any folder exists."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from rl_pipeline import files
from rl_pipeline.config.app import refusing
from rl_pipeline.config.checks import check_machine, check_no_secrets, check_place, check_study
from rl_pipeline.config.folders import has_run, is_done, is_unshipped
from rl_pipeline.config.load import job_config, load
from rl_pipeline.config.options import check_recipe
from rl_pipeline.config.resume import check_resume
from rl_pipeline.config.settings import Settings
from rl_pipeline.errors import ConfigError
from rl_pipeline.files import OURS, Claim
from rl_pipeline.terminal import quoted


class Gate(Callback):
    """Hydra callback: a bad configuration ends the program before any folder or run exists."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Validate before Hydra makes the run folder."""
        # Hydra turns exceptions of callbacks into warnings; the SystemExit of refusing() passes.
        with refusing():
            check_recipe(list(config.hydra.overrides.task))
            check_no_secrets(OmegaConf.to_yaml(config).splitlines())
            settings = load(job_config(config), list(config.hydra.overrides.task))
            check_machine(settings)
            check_study(settings)
            folder = Path(str(config.hydra.run.dir))
            if settings.resume and is_done(settings, folder) and is_unshipped(folder):
                check_resume(settings, folder)
                raise SystemExit(ship(folder))
            subdir = config.hydra.output_subdir
            check_place("hydra.run.dir", str(config.hydra.run.dir))
            if subdir and (Path(subdir).is_absolute() or ".." in Path(subdir).parts):
                raise ConfigError(
                    f"hydra.output_subdir={subdir}: must be a folder inside that of the run"
                )
            claim_folder(settings, folder, subdir and str(subdir))


def ship(folder: Path) -> int:
    """Do what is left of a finished run: bring its rows to the store; returns the exit code."""
    from rl_pipeline.run import summary

    command = [sys.executable, "-m", "rl_pipeline.tracking.writer", str(folder)]
    code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.__stderr__).returncode
    tracked = files.read_json(folder / "mlflow.json")
    summary.print_summary(files.read_json(folder / "result.json") | {"tracking": tracked})
    others = 4  # another process ships it: nothing is left to do here
    return 0 if code == others else code


def claim_folder(settings: Settings, folder: Path, subdir: str | None) -> None:
    """Take hold of the folder of a run, which stays free of mixtures; raises ConfigError.

    `subdir` is where Hydra keeps the composed configuration, below the folder.
    """
    if settings.resume:
        check_resume(settings, folder)
    claim = Claim(folder)
    claim.also = (subdir,) if subdir else ()
    # Looked at under the lock: whoever had it may have left a run.
    if not settings.resume:
        if has_run(folder):
            raise ConfigError(
                f"hydra.run.dir={folder} already holds a run; choose another folder, or continue "
                f"that run with resume={quoted(str(folder))}"
            )
        if taken := [name for name in (*OURS, subdir) if name and (folder / name).exists()]:
            raise ConfigError(
                f"hydra.run.dir={folder} holds {taken[0]}, which the run would write over; choose "
                "another folder"
            )
    claim.keep_room()
