"""Run folders: where a new run goes, which one `resume=` means, and whether it can go on."""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from rl_pipeline.settings import ConfigError, Settings
from rl_pipeline.telemetry.tracker import read_json

FIXED_ON_RESUME = (
    "seed", "env", "backend.name", "backend.num_envs", "buffer.name", "buffer.capacity",
    "buffer.alpha", "buffer.beta", "network", "algo",
)  # fmt: skip
"""What makes a run the run it is. Where the replay's bytes live is not part of it."""


def check_folder(settings: Settings, folder: Path) -> None:
    """Refuse to mix two runs in one folder, and a resume that cannot be one; raises ConfigError."""
    if not settings.resume:
        if has_run(folder):
            raise ConfigError(
                f"hydra.run.dir={folder} already holds a run; choose another folder, or continue "
                f"that run with resume={folder}"
            )
        return
    if folder.resolve() != find_run(settings.resume).resolve():
        raise ConfigError("hydra.run.dir goes with new runs; a resumed run stays in its folder")
    check_resumed(settings, json.loads((folder / "run.json").read_text())["settings"])
    done = max((int(p.stem[5:]) for p in folder.glob("checkpoints/step-*.pt")), default=0)
    if done >= settings.total_steps:
        raise ConfigError(
            f"resume={settings.resume}: the run already has {done:,} env steps of "
            f"total_steps={settings.total_steps:,}; give a larger total_steps to go on"
        )


def has_run(folder: Path) -> bool:
    """Whether a run wrote into `folder`."""
    return any((folder / name).exists() for name in ("run.json", "result.json", "metrics.jsonl"))


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


def find_run(name: str) -> Path:
    """The folder of a run: itself, or by its run id or MLflow run id below outputs/, multirun/.

    Raises ConfigError where there is none.
    """
    if (Path(name) / "run.json").exists():
        return Path(name)
    for folder in _run_folders():
        # A damaged file is no reason not to find another run.
        records = (read_json(folder / file) for file in ("run.json", "mlflow.json"))
        if any(record.get("run_id") == name for record in records):
            return folder
    raise ConfigError(
        f"resume={name}: no such run; give a run folder (it holds run.json) or the id of a run "
        "below outputs/ or multirun/ of the working directory"
    )


def _run_folders() -> Iterator[Path]:
    for root in ("outputs", "multirun"):
        yield from (p.parent for p in Path(root).rglob("run.json"))


def with_resumed_overrides(argv: list[str]) -> list[str]:
    """Put the overrides of the run that `resume=` names before those given now, which win."""
    given = [o.value() for o in parse_overrides([a for a in argv if a.startswith("resume=")])]
    if not given or given[-1] is None:
        return argv
    if {"-m", "--multirun"} & set(argv):
        raise ConfigError("resume continues one run; leave out -m")
    folder = find_run(str(given[-1]))
    record = json.loads((folder / "run.json").read_text())
    saved = [_as_chosen(override, record["settings"]) for override in record["overrides"]]
    first = next(i for i, a in enumerate(argv) if "=" in a and not a.startswith("-"))
    return [*argv[:first], *saved, *argv[first:]]


def _as_chosen(override: str, settings: dict[str, Any]) -> str:
    """What `auto` chose when the run began holds for its rest, also on another machine."""
    key, _, value = override.partition("=")
    if value == "auto" and key in ("backend.num_envs", "backend.lanes"):
        return f"{key}={_get(settings, key)}"
    return override


# -- multiruns ------------------------------------------------------------------------------------

STUDY_FILE = "study.json"


def find_sweep(name: str) -> Path:
    """The folder of a multirun: itself, or by its name (the latest) or its MLflow run id.

    Raises ConfigError where there is none.
    """
    if (Path(name) / STUDY_FILE).exists():
        return Path(name)
    found = []
    for path in Path("multirun").rglob(STUDY_FILE):
        # A damaged one is no reason not to find another.
        study = read_json(path)
        if name in (study.get("name"), study.get("parent_run_id")):
            found.append((path.stat().st_mtime, path.parent))
    if found:
        return max(found)[1]
    raise ConfigError(
        f"study.resume={name}: no such multirun; give its folder (it holds {STUDY_FILE}), or the "
        "name or MLflow run id of one below multirun/ of the working directory"
    )


def with_resumed_sweep(argv: list[str]) -> list[str]:
    """Put the overrides of the multirun that `study.resume=` names before those given now."""
    given = [o.value() for o in parse_overrides([a for a in argv if a.startswith("study.resume=")])]
    if not given or given[-1] is None or "hydra.mode=RUN" in argv:
        return argv
    folder = find_sweep(str(given[-1]))
    study, place = read_json(folder / STUDY_FILE), config_dir(argv)
    saved, kept_place = study.get("overrides"), study.get("config_dir", [])
    if not all(isinstance(x, list) and all(isinstance(o, str) for o in x)
               for x in (saved, kept_place)):  # fmt: skip
        raise ConfigError(
            f"study.resume={given[-1]}: {folder / STUDY_FILE} is damaged, so its settings are not "
            "known; begin the sweep anew in another folder"
        )
    assert isinstance(saved, list)
    argv = [a for a in argv if a not in place]
    flags = [*(place or kept_place), *(a for a in argv if a.startswith("-"))]
    now = [a for a in argv if not a.startswith("-")]
    keys = {_key(a) for a in now}
    # Given twice, a swept key would be crossed with itself.
    kept = [o for o in saved if _key(o) not in keys | {"study.resume", "hydra.sweep.dir"}]
    if "-m" not in flags and "--multirun" not in flags:
        flags = ["-m", *flags]
    return [*flags, *kept, *now, f"hydra.sweep.dir={quote(folder)}"]


def quote(path: Path) -> str:
    """A path as a Hydra override value."""
    text = str(path).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"


def config_dir(argv: list[str]) -> list[str]:
    """The flag that adds a configuration folder, as it was given."""
    for i, argument in enumerate(argv):
        if argument.startswith("--config-dir="):
            return [argument]
        if argument in ("--config-dir", "-cd"):
            return argv[i : i + 2]
    return []


def _key(override: str) -> str:
    return override.split("=")[0].lstrip("+~")


def finished_jobs(folder: Path) -> dict[frozenset[str], dict[str, Any]]:
    """result.json of the jobs of a multirun that finished, by their overrides.

    Folders of those that did not are put aside (`3.failed`), so that the job can run again.
    """
    done = {}
    for job in sorted(p for p in folder.iterdir() if p.name.isdigit()):
        result = read_json(job / "result.json")
        overrides = result.get("overrides")
        if result.get("status") == "finished" and isinstance(overrides, list):
            done[frozenset(map(str, overrides))] = result
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


def check_resumed(now: Settings, then: dict[str, Any]) -> None:
    """Refuse a resume that would make another run of it; raises ConfigError naming the key."""
    current = now.model_dump(mode="json")
    for key in FIXED_ON_RESUME:
        old, new = _get(then, key), _get(current, key)
        if key == "seed" and new is None:
            continue
        if old != new:
            changed = key
            if isinstance(old, dict):
                changed = next(f"{key}.{k}" for k in old if old[k] != new.get(k))
                old, new = _get(then, changed), _get(current, changed)
            raise ConfigError(
                f"resume cannot change {changed} from {old} to {new}: the run would not be the "
                f"same; leave it out, or start a new run"
            )


def _get(values: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        values = values[part]
    return values


def parse_overrides(overrides: list[str]) -> list[Any]:
    """Hydra's own reading of overrides; raises ConfigError."""
    try:
        return OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise ConfigError(str(error).replace("\n", " ")) from None


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys; lists as text."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = str(value) if isinstance(value, list | dict) else value
    return flat
