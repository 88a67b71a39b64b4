"""A multirun as one study: a parent run, a comparison at the end, an honest exit code."""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict

from rl_pipeline.config import origins, stores
from rl_pipeline.config.app import refusing
from rl_pipeline.config.checks import check_no_secrets, check_place
from rl_pipeline.config.folders import STUDY_FILE, flatten, has_run, sweeps_elsewhere
from rl_pipeline.config.options import near
from rl_pipeline.config.origins import parse_overrides
from rl_pipeline.config.settings import Settings
from rl_pipeline.errors import ConfigError
from rl_pipeline.files import read_json, working_directory, write_json
from rl_pipeline.machine import myself
from rl_pipeline.redaction import redact
from rl_pipeline.study.grid import sweep_settings, varied_keys
from rl_pipeline.terminal import command, in_shell, plain, quoted, say, shell_line, shown_path
from rl_pipeline.tracking.notes import Request
from rl_pipeline.tracking.tracker import LOST

_HANDED_ON = ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME")


def _fatal(method: Callable[..., None]) -> Callable[..., None]:
    """Hydra turns exceptions of callbacks into warnings; SystemExit passes."""

    @functools.wraps(method)
    def told(self: Study, config: DictConfig, **_: Any) -> None:
        try:
            method(self, config)
        except Exception:
            print(redact(traceback.format_exc()), file=sys.stderr)
            self._end("failed")
            raise SystemExit(1) from None

    return told


class Study(Callback):
    """Hydra callback around a multirun, whatever launcher runs its jobs."""

    def __init__(self) -> None:
        self._parent: dict[str, Any] | None = None
        self._open = self._resumable = False

    @_fatal
    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Create the parent run and tell the jobs about it."""
        with refusing():
            # Hydra keeps all of it in multirun.yaml.
            check_no_secrets(OmegaConf.to_yaml(config).splitlines())
            check_place("hydra.sweep.dir", str(config.hydra.sweep.dir))
            grid = sweep_settings(config)
            folder = Path(str(config.hydra.sweep.dir)).resolve()
            _check(config, grid, folder)
        with open_dict(config):
            # Jobs of other processes and machines have another working directory.
            config.hydra.sweep.dir = str(folder)
            # Launchers that compose a job's configuration again know only the overrides.
            config.hydra.overrides.hydra.append(f"hydra.sweep.dir={quoted(str(folder))}")
            if str(config.hydra.launcher._target_).endswith("RayLauncher"):
                _prepare_ray(config.hydra.launcher.ray)
        varied = varied_keys(config)
        self._settings = grid[0].study
        name = self._settings.name or " x ".join(varied) or "multirun"
        folder.mkdir(parents=True, exist_ok=True)
        study = read_json(folder / STUDY_FILE) | {
            "name": name, "varied": varied, "folder": str(folder), "cwd": str(working_directory()),
            "overrides": origins.flags_of(sys.argv[1:]).overrides,
            "composed_from": origins.origin(config.hydra), "process": myself(),
            "baseline": self._settings.baseline, "threshold": self._settings.threshold,
        }  # fmt: skip
        if grid[0].tracking.name != "none":
            from rl_pipeline.tracking import tracker

            self._parent = tracker.create_parent(
                grid[0].tracking, name, _tags(name, folder, _jobs(config, grid), varied),
                _params(config, grid, varied), working_directory(), study.get("parent_run_id"),
            )  # fmt: skip
        if self._parent:
            study["parent_run_id"] = self._parent["run_id"]
        write_json(folder / STUDY_FILE, study)
        self._open, self._folder = True, folder
        self._resumable = _ordered_by_us(config) and _is_grid(config)
        # An interrupted or crashed sweep never reaches on_multirun_end.
        atexit.register(self._end, "killed")
        os.environ["RL_PIPELINE_STUDY"] = json.dumps(study)

    @_fatal
    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Compare, show and keep the answer, close the parent run, and fail if a job did."""
        from rl_pipeline.comparison import records

        folder = Path(str(config.hydra.sweep.dir))
        study = records.from_sweep(folder)
        print()
        files, tags = self._compare(study, folder)
        failed = [run for run in study.runs if not run.finished]
        # Known to the parent only: they ended before they had a run of their own.
        lost = [
            json.dumps({"overrides": run.overrides or [run.name], "reason": run.reason[:300]})
            for run in failed if not run.tracked
        ]  # fmt: skip
        tags |= {LOST: str(len(lost))}
        tags |= {f"{LOST}.{n}": job for n, job in enumerate(lost)}
        self._end("failed" if failed else "finished", files, tags)
        print(f"folder  {shown_path(str(folder))}")
        if self._parent:
            print(f"mlflow  {stores.how_to_open(redact(self._parent['uri']))}")
            server = stores.server_of(redact(self._parent["uri"]))
            page = f"{server}/#/experiments/{self._parent['experiment_id']}/runs"
            run_id = self._parent["run_id"]
            print(f"        {page}/{run_id}/artifacts/comparison/index.html  (the answer)")
            print(f"        {page}?viewStateShareKey={run_id}  (the jobs)")
            print(f"again   {shell_line('compare', f'study={run_id}')}")
        if failed:
            print(f"{len(failed)} of {len(study.runs)} jobs did not finish", file=sys.stderr)
            self._say_resume()
            # Hydra turns exceptions of callbacks into warnings; SystemExit passes.
            raise SystemExit(1)

    def _compare(self, study: Any, folder: Path) -> tuple[list[Path], dict[str, str]]:
        """Its files, and what the parent's tags say of it."""
        from rl_pipeline.comparison import findings, measure, tables
        from rl_pipeline.config.cli import levels

        try:
            comparison = measure.compare(
                study, baseline=levels(self._settings.baseline or {}),
                threshold=self._settings.threshold,
            )  # fmt: skip
        except (ConfigError, ValueError) as error:
            # The jobs are done: report why it cannot be compared; the runs are kept.
            print(plain(f"not compared: {error}"))
            for run in study.runs:
                if not run.finished:
                    print(plain(f"{run.status} {run.name}\n    {run.reason}"))
            return [], {}
        tables.print_comparison(comparison)
        files = tables.write_comparison(comparison, folder / "comparison")
        print(f"page    {shown_path(str(folder / 'comparison' / 'index.html'))}")
        tags = {"answer": findings.in_one_line(comparison)}
        # For a later comparison: the first to run, where none was named, is known only here.
        base = ",".join(f"{k}={v}" for k, v in comparison.baseline.items())
        if base.count("=") == base.count(",") + 1:  # as it can be read again
            tags["baseline"] = base
        return files, tags

    def _say_resume(self) -> None:
        if self._resumable:
            again = command("train", study__resume=shown_path(str(self._folder)))
            say(f"run what is missing with\n  {again}")

    def _end(
        self, status: str, artifacts: Sequence[Path] = (), tags: dict[str, str] | None = None
    ) -> None:
        if not self._open:
            return
        self._open = False
        if status == "killed":
            self._say_resume()
        if self._parent:
            from rl_pipeline.tracking import tracker

            tracker.end_parent(
                self._parent, status, list(artifacts), tags=tags, artifact_path="comparison"
            )


def _check(config: DictConfig, grid: list[Settings], folder: Path) -> None:
    study = grid[0].study
    if sweeps_elsewhere(read_json(folder / STUDY_FILE)):
        raise ConfigError(f"hydra.sweep.dir={config.hydra.sweep.dir}: its sweep still runs")
    for job in folder.glob("*[0-9]"):
        request = Request.read(job)
        if request and request.trains:
            raise ConfigError(f"job {job} still runs (process {request.pid}); let it end first")
    _check_baseline(study.baseline, grid)
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
    if _ordered_by_us(config):
        from rl_pipeline.study.launcher import ProcessLauncher

        own = {str(k): v for k, v in config.hydra.launcher.items() if k != "_target_"}
        try:
            ProcessLauncher(**own)
        except TypeError as error:
            raise ConfigError(f"hydra.launcher: {error}") from None
    sweeper = config.hydra.sweeper
    if study.resume and not _is_grid(config):
        raise ConfigError(
            "study.resume runs what is missing of a grid; a sweeper that chooses its trials begins "
            "them anew: leave it out"
        )
    if str(sweeper._target_).endswith("OptunaSweeper") and "min" in str(sweeper.direction):
        raise ConfigError(
            f"hydra.sweeper.direction={sweeper.direction}: the objective is the return, which is "
            "to be large; use hydra.sweeper.direction=maximize"
        )


def _check_baseline(baseline: str | None, grid: list[Settings]) -> None:
    """Before the jobs run and not after: its form, and that its settings exist."""
    from rl_pipeline.config.cli import levels

    try:
        keys = list(levels(baseline or {}))
    except ValueError as error:
        raise ConfigError(f"study.baseline={baseline}: {error}") from None
    flats = [flatten(settings.model_dump(mode="json")) for settings in grid]
    known = sorted({key.removesuffix(".name") for flat in flats for key in flat})
    for key in keys:
        if key not in known and not key.startswith("threads."):
            raise ConfigError(
                f"study.baseline={baseline}: {key} is not a setting{near(key, known)}"
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


def _is_grid(config: DictConfig) -> bool:
    return str(config.hydra.sweeper._target_).endswith("BasicSweeper")


def _params(config: DictConfig, grid: list[Settings], varied: list[str]) -> dict[str, Any]:
    """Settings that the study varies, how, and those that all its jobs have in common."""
    from rl_pipeline.comparison.groups import telling

    flat = [flatten(settings.model_dump(mode="json")) for settings in grid]
    common = {k: v for k, v in flat[0].items() if all(f.get(k) == v for f in flat)}
    differ = [k for k in flat[0] if k not in common and k != "seed"]
    # Options by their names, and the values that are varied by themselves.
    chosen = [k for k in differ if k.endswith(".name") or k in varied]
    texts = [{k: str(v) for k, v in values.items()} for values in flat]
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
        "varied": ",".join(varied), "grouped_by": ",".join(telling(chosen, texts, [])),
        "command": " ".join(map(in_shell, sys.argv[1:])), "jobs": _jobs(config, grid),
        **{f"sweep.{key}": values[key] for key in varied}, **launcher,
        **{k: v for k, v in common.items() if k not in varied},
    }  # fmt: skip


def _jobs(config: DictConfig, grid: list[Settings]) -> int:
    """Number of jobs that there will be; a sweeper that chooses its trials says so itself."""
    return int(config.hydra.sweeper.get("n_trials") or len(grid))


def _tags(name: str, folder: Path, jobs: int, varied: list[str]) -> dict[str, str]:
    command = shell_line("train", *sys.argv[1:])
    return {
        "study": name, "kind": "study", "run_folder": str(folder),
        # By it others can tell that the sweep was killed: see orphans.py.
        "process": json.dumps(myself()),
        "mlflow.source.name": "rl_pipeline.train",
        "mlflow.source.type": "LOCAL",
        "mlflow.note.content": (
            f"{jobs} jobs over {' x '.join(varied)}.\n\n    {command}\n\n"
            f"The answer is in the artifacts: `comparison/index.html`.\n\nFolder: `{folder}`"
        ),
    }  # fmt: skip
