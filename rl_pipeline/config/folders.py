"""Folders of runs and multiruns: where a new one goes, which one is meant, what its files say."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rl_pipeline.config.settings import Settings
from rl_pipeline.errors import ConfigError
from rl_pipeline.files import RUN_FILES, damage, read_json
from rl_pipeline.machine import alive, process_of


def is_done(settings: Settings, folder: Path) -> bool:
    """Whether a run has all its env steps and its last words."""
    steps = [p.stem[5:] for p in folder.glob("checkpoints/step-*.pt")]
    done = max((int(step) for step in steps if step.isdecimal()), default=0)
    finished = read_json(folder / "result.json").get("status") == "finished"
    return finished and done >= settings.total_steps


def is_unshipped(folder: Path) -> bool:
    """Whether rows of a run are not in its store yet."""
    tracked = (folder / "tracking.json").exists()
    return tracked and read_json(folder / "mlflow.json").get("finished") is not True


def record_of(folder: Path) -> dict[str, Any]:
    """run.json of a run; raises ConfigError where it is damaged."""
    path = folder / "run.json"
    trouble = damage(path)
    record = read_json(path)
    kinds = {"run_id": str, "seed": int, "settings": dict, "overrides": list}
    if not trouble and not all(isinstance(record.get(k), kind) for k, kind in kinds.items()):
        trouble = f"{path} is damaged: it does not say what the run was"
    if not trouble and not all(isinstance(text, str) for text in record["overrides"]):
        trouble = f"{path} is damaged: its overrides are no texts"
    if trouble:
        raise ConfigError(
            f"resume={folder}: {trouble}; the run cannot be continued, start a new one "
            "(its checkpoints stay)"
        )
    return record


def has_run(folder: Path) -> bool:
    """Whether a run wrote into `folder`."""
    return any((folder / name).exists() for name in RUN_FILES)


@functools.cache
def run_dir(root: str, resume: str | None) -> str:
    """A folder that no other run has (time + short id), or the one being resumed.

    One answer per process: Hydra resolves the same interpolation in several copies of the config.
    """
    if resume:
        return str(find_run(resume))
    now = datetime.now()
    return f"{root}/{now:%Y-%m-%d}/{now:%H-%M-%S}-{_new_id()}"


def _new_id() -> str:
    # The letter keeps it from reading as a number (12e45678) on the command line.
    return f"r{secrets.token_hex(4)}"


def run_id_of(folder: Path) -> str:
    """The id in a run folder's name, or a fresh one for a folder that was named otherwise."""
    last = folder.name.rsplit("-", 1)[-1]
    return last if re.fullmatch("r[0-9a-f]{8}", last) else _new_id()


def find_run(name: str, key: str = "resume") -> Path:
    """The folder of a run: itself, or by its run id or MLflow run id below outputs/, multirun/.

    Raises ConfigError, naming the argument `key`, where there is none.
    """
    if _holds(name, "run.json"):
        return Path(name)
    for folder in _run_folders():
        if name in (read_json(folder / file).get("run_id") for file in ("run.json", "mlflow.json")):
            return folder
    raise ConfigError(
        f"{key}={name}: no such run; give a run folder (it holds run.json) or the id of a run "
        "below outputs/ or multirun/ of the working directory"
    )


def _holds(folder: str, file: str) -> bool:
    try:
        return (Path(folder) / file).exists()
    except (OSError, ValueError):  # too long, or with a NUL: no path at all
        return False


def _run_folders() -> Iterator[Path]:
    for root in ("outputs", "multirun"):
        yield from (p.parent for p in Path(root).rglob("run.json"))


# -- multiruns ------------------------------------------------------------------------------------

STUDY_FILE = "study.json"


def find_sweep(name: str) -> Path:
    """The folder of a multirun: itself, or by its name (the latest) or its MLflow run id.

    Raises ConfigError where there is none.
    """
    if _holds(name, STUDY_FILE):
        return Path(name)
    found = []
    for path in Path("multirun").rglob(STUDY_FILE):
        study = read_json(path)
        if name in (study.get("name"), study.get("parent_run_id")):
            found.append((path.stat().st_mtime, path.parent))
    if found:
        return max(found)[1]
    raise ConfigError(
        f"study.resume={name}: no such multirun; give its folder (it holds {STUDY_FILE}), or the "
        "name or MLflow run id of one below multirun/ of the working directory"
    )


def read_study(folder: Path) -> dict[str, Any]:
    """study.json of a multirun; raises ConfigError where it is damaged."""
    path = folder / STUDY_FILE
    trouble = damage(path)
    study = read_json(path)
    lists = [study.get("overrides"), study.setdefault("config_dir", [])]
    if not trouble and not all(isinstance(x, list) and all(map(_is_text, x)) for x in lists):
        trouble = f"{path} is damaged: it does not say what the sweep was"
    if trouble:
        raise ConfigError(f"study.resume={folder}: {trouble}; start a new sweep")
    return study


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def finished_jobs(folder: Path) -> dict[frozenset[str], dict[str, Any]]:
    """result.json of the jobs of a multirun that finished, by their overrides.

    Folders of those that did not are put aside (`3.failed`), so that the job can run again.
    """
    done = {}
    for job in sorted(p for p in folder.iterdir() if p.name.isdigit()):
        result = read_json(job / "result.json")
        overrides: Any = result.get("overrides")
        whole = isinstance(overrides, list) and all(isinstance(o, str) for o in overrides)
        if result.get("status") == "finished" and whole:
            done[frozenset(overrides)] = result
            continue
        aside = (folder / f"{job.name}.failed{i or ''}" for i in range(10**6))
        job.rename(next(p for p in aside if not p.exists()))
    return done


def free_number(folder: Path, wanted: int, taken: Iterable[int]) -> int:
    """`wanted`, or the next number that no job of the multirun has."""
    used = {int(p.name) for p in folder.iterdir() if p.name.isdigit()} | set(taken)
    while wanted in used:
        wanted += 1
    return wanted


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys; lists as text."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = str(value) if isinstance(value, list | dict) else value
    return flat


def multirun_of(overrides: list[str]) -> tuple[dict[str, Any], str]:
    """The multirun this job belongs to, and the job's name: what varied."""
    study = json.loads(os.environ.get("RL_PIPELINE_STUDY", "{}"))
    varied = [o for o in overrides if o.split("=")[0].lstrip("+") in study.get("varied", ())]
    return study, " ".join(varied)


def digest(overrides: Sequence[str]) -> str:
    """A few characters that a job and its second try share: a digest of their overrides."""
    return hashlib.sha256("\n".join(sorted(own_overrides(overrides))).encode()).hexdigest()[:16]


def own_overrides(overrides: Sequence[str]) -> list[str]:
    """A job's overrides without those that address the sweep."""
    return [o for o in overrides if not o.lstrip("+~").startswith("study.")]


def passed_on(overrides: Sequence[str]) -> list[str]:
    """Hydra overrides that also apply to each job, such as hydra.searchpath."""
    own = ("hydra.mode", "hydra.sweep", "hydra.sweeper", "hydra.launcher", "hydra/", "hydra.run")
    return [o for o in overrides if not o.lstrip("+~").startswith(own)]


def objective(result: dict[str, Any]) -> float:
    """The value that a sweep maximises: the evaluated return, else that of training, else NaN."""
    if result.get("status") != "finished":
        return math.nan
    returns = result["returns"]
    values = (returns["eval_mean"], returns["train_mean"])
    return next((float(v) for v in values if v is not None), math.nan)


def sweeps_elsewhere(study: dict[str, Any]) -> bool:
    """Whether another process of this machine still runs the sweep that a study.json tells of."""
    process = process_of(study.get("process"))
    return process is not None and process[1] != os.getpid() and alive(*process)


REQUEST_FILE = "tracking.json"
STATE_FILE = "mlflow.json"
