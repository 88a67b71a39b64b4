"""A multirun as one study: a parent run, a comparison at the end, an honest exit code."""

from __future__ import annotations

import atexit
import json
import os
import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict

from rl_pipeline.config import refusing, sweep_settings, varied_keys
from rl_pipeline.runs import STUDY_FILE, flatten, has_run, parse_overrides, quote
from rl_pipeline.settings import ConfigError, Settings

_HANDED_ON = ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME")


class Study(Callback):
    """Hydra callback around a multirun, whatever launcher runs its jobs."""

    def __init__(self) -> None:
        self._parent: dict[str, Any] | None = None
        self._open = False

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Create the parent run and tell the jobs about it."""
        # Hydra turns exceptions of callbacks into warnings; the SystemExit of refusing() passes.
        with refusing():
            grid = sweep_settings(config)
            folder = Path(str(config.hydra.sweep.dir)).resolve()
            _check(config, grid, folder)
        with open_dict(config):
            # Jobs of other processes and machines have another working directory.
            config.hydra.sweep.dir = str(folder)
            # Launchers that compose a job's configuration again know only the overrides.
            config.hydra.overrides.hydra.append(f"hydra.sweep.dir={quote(folder)}")
            if str(config.hydra.launcher._target_).endswith("RayLauncher"):
                _prepare_ray(config.hydra.launcher.ray)
        varied = varied_keys(config)
        self._settings = grid[0].study
        name = self._settings.name or " x ".join(varied) or "multirun"
        folder.mkdir(parents=True, exist_ok=True)
        study = _json(folder / STUDY_FILE) | {
            "name": name, "varied": varied, "folder": str(folder), "cwd": str(Path.cwd()),
            "overrides": [a for a in sys.argv[1:] if not a.startswith("-")],
        }  # fmt: skip
        if grid[0].tracking.name != "none":
            from rl_pipeline.telemetry import tracker

            self._parent = tracker.create_parent(
                grid[0].tracking, name, _tags(name, folder, grid, varied),
                _params(config, grid, varied), Path.cwd(), study.get("parent_run_id"),
            )  # fmt: skip
        if self._parent:
            study["parent_run_id"] = self._parent["run_id"]
        (folder / STUDY_FILE).write_text(json.dumps(study, indent=1) + "\n")
        self._open = True
        # An interrupted or crashed sweep never reaches on_multirun_end.
        atexit.register(self._end, "killed")
        os.environ["RL_PIPELINE_STUDY"] = json.dumps(study)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Compare, show and keep the answer, close the parent run, and fail if a job did."""
        from rl_pipeline import records, report
        from rl_pipeline.telemetry.tracker import redact

        folder = Path(str(config.hydra.sweep.dir))
        study = records.from_sweep(folder)
        print()
        files, answer = self._compare(study, folder)
        failed = [run for run in study.runs if not run.finished]
        # Known to the parent only: they ended before they had a run of their own.
        lost = [
            {"overrides": run.name.split(), "reason": run.reason}
            for run in failed if not run.tracked
        ]  # fmt: skip
        tags = {"jobs_without_run": json.dumps(lost), "answer": answer}
        self._end("failed" if failed else "finished", files, tags)
        print(f"folder  {report.shown_path(str(folder))}")
        if self._parent:
            print(f"mlflow  {report.how_to_open(redact(self._parent['uri']))}")
            server = report.server_of(redact(self._parent["uri"]))
            page = f"{server}/#/experiments/{self._parent['experiment_id']}/runs"
            print(f"        {page}/{self._parent['run_id']}/artifacts  (the answer)")
            print(f"        {page}?viewStateShareKey={self._parent['run_id']}  (the jobs)")
            print(f"again   python -m rl_pipeline.compare study={self._parent['run_id']}")
        if failed:
            print(f"{len(failed)} of {len(study.runs)} jobs did not finish", file=sys.stderr)
            if _ordered_by_us(config) and config.hydra.sweeper._target_.endswith("BasicSweeper"):
                line = f"python -m rl_pipeline.train study.resume={report.shown_path(str(folder))}"
                print(f"run what is missing with\n  {line}", file=sys.stderr)
            # Hydra turns exceptions of callbacks into warnings; SystemExit passes.
            raise SystemExit(1)

    def _compare(self, study: Any, folder: Path) -> tuple[list[Path], str]:
        from rl_pipeline import comparison, report
        from rl_pipeline.compare import levels

        try:
            found = comparison.compare(
                study, baseline=levels(self._settings.baseline or {}),
                threshold=self._settings.threshold,
            )  # fmt: skip
        except (ConfigError, ValueError) as error:
            # The jobs are done: what cannot be compared is told, and lost is nothing.
            print(f"not compared: {error}")
            for run in study.runs:
                if not run.finished:
                    print(f"{run.status} {run.name}\n    {run.reason}")
            return [], ""
        report.print_comparison(found)
        files = report.write_comparison(found, folder / "comparison")
        print(f"page    {report.shown_path(str(folder / 'comparison' / 'index.html'))}")
        return files, "; ".join(found.answer)

    def _end(
        self, status: str, artifacts: Sequence[Path] = (), tags: dict[str, str] | None = None
    ) -> None:
        if not self._open:
            return
        self._open = False
        if self._parent:
            from rl_pipeline.telemetry import tracker

            tracker.end_parent(
                self._parent, status, list(artifacts), tags=tags, artifact_path="comparison"
            )


def _check(config: DictConfig, grid: list[Settings], folder: Path) -> None:
    study = grid[0].study
    if not study.resume and any(has_run(job) for job in folder.glob("*") if job.is_dir()):
        raise ConfigError(
            f"hydra.sweep.dir={config.hydra.sweep.dir} already holds the runs of a sweep; choose "
            "another folder, or run what is missing in it with study.resume=<folder>"
        )
    subdir = OmegaConf.to_container(config.hydra.sweep, resolve=False)["subdir"]  # type: ignore
    if subdir != "${hydra.job.num}":
        raise ConfigError(
            "hydra.sweep.subdir has no effect: a job's folder is its number; use hydra.sweep.dir"
        )
    for key in ("interleave", "resume"):
        if getattr(study, key) and not _ordered_by_us(config):
            raise ConfigError(f"study.{key} needs hydra/launcher=process, which orders the jobs")
    if study.interleave and len({s.seed for s in grid}) < 2:
        raise ConfigError("study.interleave=true repeats the grid over seeds: add seed=1,2,3")
    if study.interleave and config.hydra.launcher.shuffle:
        raise ConfigError("hydra.launcher.shuffle has no effect with study.interleave=true")
    sweeper = config.hydra.sweeper
    if str(sweeper._target_).endswith("OptunaSweeper") and "min" in str(sweeper.direction):
        raise ConfigError(
            f"hydra.sweeper.direction={sweeper.direction}: the objective is the return, which is "
            "to be large; use hydra.sweeper.direction=maximize"
        )


def _prepare_ray(ray: DictConfig) -> None:
    # Ray would run a job again whose worker died, in the folder of the first try.
    ray.remote.setdefault("max_retries", 0)
    if ray.init.get("address"):
        # The launcher's default size of the object store is refused by a cluster that has one.
        ray.init.setdefault("object_store_memory", None)
    # Workers of a cluster that runs already do not inherit our environment. By name, resolved when
    # Ray starts: a URI may hold a password, and multirun.yaml keeps this configuration.
    names = ["RL_PIPELINE_STUDY", *(name for name in _HANDED_ON if name in os.environ)]
    variables = {name: "${oc.env:" + name + "}" for name in names}
    OmegaConf.update(ray, "init.runtime_env.env_vars", variables, force_add=True)


def _ordered_by_us(config: DictConfig) -> bool:
    return str(config.hydra.launcher._target_).endswith("ProcessLauncher")


def _params(config: DictConfig, grid: list[Settings], varied: list[str]) -> dict[str, Any]:
    """What the study varies, how, and what all its jobs have in common."""
    flat = [flatten(settings.model_dump(mode="json")) for settings in grid]
    common = {k: v for k, v in flat[0].items() if all(f.get(k) == v for f in flat)}
    swept = {
        o.key_or_group: o.input_line.split("=", 1)[1]
        for o in parse_overrides(list(config.hydra.overrides.task)) if o.is_sweep_override()
    }  # fmt: skip
    params = OmegaConf.select(config, "hydra.sweeper.params") or {}
    values = {str(k).lstrip("+"): str(v) for k, v in params.items()} | swept
    launcher = {
        f"hydra.launcher.{k}": v for k, v in flatten(
            OmegaConf.to_container(config.hydra.launcher, resolve=False)  # type: ignore
        ).items() if k != "_target_" and "runtime_env" not in k
    }  # fmt: skip
    return {
        "varied": ",".join(varied), "command": " ".join(sys.argv[1:]), "jobs": len(grid),
        **{f"sweep.{key}": values[key] for key in varied}, **launcher,
        **{k: v for k, v in common.items() if k not in varied},
    }  # fmt: skip


def _tags(name: str, folder: Path, grid: list[Settings], varied: list[str]) -> dict[str, str]:
    me = psutil.Process()
    command = shlex.join(["python", "-m", "rl_pipeline.train", *sys.argv[1:]])
    return {
        "study": name, "kind": "study", "run_folder": str(folder),
        # Who could tell that the sweep was killed: see Store.end_dead_studies.
        "process": json.dumps([socket.gethostname(), me.pid, me.create_time()]),
        "mlflow.source.name": "rl_pipeline.train",
        "mlflow.source.type": "LOCAL",
        "mlflow.note.content": (
            f"{len(grid)} jobs over {' x '.join(varied)}.\n\n    {command}\n\n"
            f"The answer is in the artifacts: `comparison/index.html`.\n\nFolder: `{folder}`"
        ),
    }  # fmt: skip


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}
