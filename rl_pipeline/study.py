"""A multirun as one study: a parent run in the store, a table at the end, an honest exit code."""

from __future__ import annotations

import atexit
import json
import os
import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from rl_pipeline.config import refusing, sweep_settings, varied_keys
from rl_pipeline.runs import has_run
from rl_pipeline.settings import ConfigError


class Study(Callback):
    """Hydra callback around a multirun, whatever launcher runs its jobs."""

    def __init__(self) -> None:
        self._parent: dict[str, Any] | None = None
        self._open = False

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Create the parent run and tell the jobs about it."""
        # Hydra turns exceptions of callbacks into warnings; the SystemExit of refusing() passes.
        with refusing():
            settings = sweep_settings(config)[0]
            folder = Path(str(config.hydra.sweep.dir))
            _check_folder(config, folder)
        varied = varied_keys(config)
        name = settings.study.name or " x ".join(varied) or "multirun"
        if settings.tracking.name != "none":
            from rl_pipeline.telemetry import tracker

            self._parent = tracker.create_parent(
                settings.tracking, name,
                tags={"study": name, "run_folder": str(folder.resolve())},
                params={"varied": ",".join(varied), "command": " ".join(sys.argv[1:])},
                cwd=Path.cwd(),
            )  # fmt: skip
        self._open = True
        # An interrupted or crashed sweep never reaches on_multirun_end.
        atexit.register(self._end, "killed")
        study = {"name": name, "varied": varied, "folder": str(folder)}
        if self._parent:
            study["parent_run_id"] = self._parent["run_id"]
        os.environ["RL_PIPELINE_STUDY"] = json.dumps(study)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Show the table, close the parent run, and fail if a job did."""
        from rl_pipeline import report

        folder = Path(str(config.hydra.sweep.dir))
        results = report.load_results(folder)
        print()
        table = report.print_sweep(results, varied_keys(config))
        (folder / "table.md").write_text(table)
        (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        failed = sum(r["status"] != "finished" for r in results)
        self._end(
            "failed" if failed else "finished", [folder / "table.md", folder / "results.json"]
        )
        print(f"folder  {folder}")
        if self._parent:
            print(f"mlflow  {report.how_to_open(self._parent['uri'])}")
        if failed:
            print(f"{failed} of {len(results)} jobs did not finish", file=sys.stderr)
            # Hydra turns exceptions of callbacks into warnings; SystemExit passes.
            raise SystemExit(1)

    def _end(self, status: str, artifacts: list[Path] | None = None) -> None:
        if not self._open:
            return
        self._open = False
        if self._parent:
            from rl_pipeline.telemetry import tracker

            tracker.end_parent(self._parent, status, artifacts or [], {})


def _check_folder(config: DictConfig, folder: Path) -> None:
    if any(has_run(job) for job in folder.glob("*") if job.is_dir()):
        raise ConfigError(
            f"hydra.sweep.dir={folder} already holds the runs of a sweep; choose another folder"
        )
    subdir = OmegaConf.to_container(config.hydra.sweep, resolve=False)["subdir"]  # type: ignore
    if subdir != "${hydra.job.num}":
        raise ConfigError(
            "hydra.sweep.subdir has no effect: a job's folder is its number; use hydra.sweep.dir"
        )
