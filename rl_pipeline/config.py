"""From the command line to `Settings`: composition errors in plain words, values checked, resume.

Together with build.py the only place that sees a DictConfig.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from rl_pipeline.settings import Settings

PACKAGE = Path(__file__).parent
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"

# Options that DESIGN names and a later version brings: answered plainly, not as a misspelling.
PLANNED = {
    "backend": {"envpool_async"},
    "algo": {"dqn", "sac"},
    "network": {"impala_cnn", "lstm"},
    "buffer": {"uniform", "prioritized", "deque", "memmap"},
    "precision": {"tf32", "bf16", "fp16"},
    "compile": {"default", "reduce_overhead", "max_autotune", "cudagraphs"},
    "mode": {"overlap", "apex", "seed"},
    "profile": {"cprofile", "trace", "serialised"},
}
FIXED_ON_RESUME = ("seed", "env", "backend.name", "backend.num_envs", "buffer", "network", "algo")


class ConfigError(ValueError):
    """A setting that cannot be: the message names it and the way out."""


# -- reading ------------------------------------------------------------------------------------


def load(cfg: DictConfig) -> Settings:
    """Check the composed configuration.

    Raises ConfigError naming every bad key, its nearest valid ones, and what was expected.
    """
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise ConfigError("\n".join(f"{key} must be given, e.g. {key}=..." for key in missing))
    values: Any = OmegaConf.to_container(cfg, resolve=True)
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        lines = [_explain(e, values) for e in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def _explain(error: Any, values: dict[str, Any]) -> str:
    # Union members and tuple indices are pydantic's own path steps, not keys that users type.
    path = [p for p in error["loc"] if isinstance(p, str) and not re.search(r"[\[\]()]", p)]
    path = _trim(path, values)
    key = ".".join(path)
    match error["type"]:
        case "extra_forbidden":
            return f"{key} is not a setting{_near(key, known_keys())}"
        case "missing":
            return f"{key} must be given, e.g. {key}=..."
        case "value_error":
            message = error["msg"].removeprefix("Value error, ")
            return f"{key}={error['input']}: {message}" if key else message
        case "literal_error":
            group = path[0]
            if key == f"{group}.name" and error["input"] in PLANNED.get(group, ()):
                return _planned(group, error["input"])
    if error["type"] == "tuple_type":
        return f"{key}={error['input']}: must be a list, e.g. {key}=[{error['input']}]"
    message = error["msg"][0].lower() + error["msg"][1:]
    return f"{key}={error['input']}: {message.replace('input should be', 'must be')}"


def _trim(path: list[str], values: Any) -> list[str]:
    """The longest head of `path` that the given values have, plus at most one new key."""
    head: list[str] = []
    for part in path:
        if not isinstance(values, dict):
            break
        head.append(part)
        if part not in values:
            break
        values = values[part]
    return head


def known_keys(model: type[BaseModel] = Settings, prefix: str = "") -> list[str]:
    """All dotted keys of the settings."""
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                keys += known_keys(kind, f"{prefix}{name}.")
    return keys


def _near(word: str, valid: list[str]) -> str:
    """`; did you mean a, b?`: by the whole key, by its last part, or by initials (lr)."""
    parent, _, tail = word.rpartition(".")

    def closeness(key: str) -> float:
        key_parent, _, key_tail = key.rpartition(".")
        initials = "".join(part[0] for part in key_tail.split("_") if part)
        last = difflib.SequenceMatcher(None, tail, key_tail).ratio()
        if len(initials) > 1 and tail == initials:
            last = 1.0
        same = key_parent == parent
        return max(
            last - (0 if same else 0.1), difflib.SequenceMatcher(None, word, key).ratio() - 0.1
        )

    ranked = sorted(set(valid), key=closeness, reverse=True)[:3]
    best = [key for key in ranked if closeness(key) >= max(0.65, closeness(ranked[0]) - 0.15)]
    return f"; did you mean {', '.join(best)}?" if best else ""


# -- errors of the composition --------------------------------------------------------------------


def explain_composition(error: Exception) -> str:
    """Hydra's composition errors in the user's words, with the nearest valid ones."""
    text = str(error)
    cause = str(error.__cause__ or "")
    if found := re.search(r"Could not find '([\w/]+)/([^'/]+)'", text):
        group, option = found.groups()
        if option in PLANNED.get(group, ()):
            return _planned(group, option)
        return f"{group}={option} does not exist; {_options(group, option)}"
    if found := re.search(r"Could not override '([^']+)'", text):
        key = found.group(1).split("@")[0]
        if key in groups():
            return f"{key} cannot be overridden there: {cause or text}"
        hint = _near(key, known_keys() + groups())
        if key.startswith("env.kwargs.") or "kwargs" in key:
            hint = f"; a new constructor argument is added with a plus: +{key}=..."
        return f"{key} is not a setting{hint}"
    return "\n".join(part for part in (text, cause) if part)


def _planned(group: str, option: str) -> str:
    return f"{group}={option} is planned but not in this version; {_options(group)}"


def groups() -> list[str]:
    """The configuration groups."""
    return sorted(p.name for p in CONF.iterdir() if p.is_dir() and not p.name.startswith("."))


def _options(group: str, near: str | None = None) -> str:
    valid = sorted(p.stem for p in (CONF / group).glob("*.yaml"))
    hint = _near(near, valid) if near else ""
    return f"{group} can be {', '.join(valid)}" + hint if valid else f"{group} has no options yet"


@contextmanager
def refusing() -> Iterator[None]:
    """Answer bad input inside the block in a line or two on stderr, with exit code 2."""
    try:
        yield
        return
    except ConfigError as error:
        message = str(error)
    except (HydraException, OmegaConfBaseException) as error:
        message = explain_composition(error)
    print("\n".join(f"error: {line}" for line in message.splitlines() if line), file=sys.stderr)
    print("       --cfg job --resolve prints the settings, --help the groups", file=sys.stderr)
    sys.exit(2)


def run_main(main: Callable[[], Any]) -> None:
    """Call a Hydra entrypoint."""
    OmegaConf.register_new_resolver("run_dir", _run_dir, replace=True)
    # Hydra would print composition errors itself, in its own words.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        with refusing():
            sys.argv[1:] = with_resumed_overrides(sys.argv[1:])
            main()
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)


class Gate(Callback):
    """Hydra callback: a bad configuration ends the program before any folder or run exists."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Validate before Hydra makes the run folder."""
        # Hydra turns exceptions of callbacks into warnings; the SystemExit of refusing() passes.
        with refusing():
            check_machine(load(job_config(config)))


def sweep_settings(config: DictConfig) -> list[Settings]:
    """The settings of every job of a grid sweep, checked; raises ConfigError naming the job.

    Other sweepers decide while they run: for them only the base configuration is checked.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.global_hydra import GlobalHydra

    if not str(config.hydra.sweeper._target_).endswith("BasicSweeper"):
        return [load(job_config(config))]
    params = OmegaConf.select(config, "hydra.sweeper.params") or {}
    arguments = [f"{k}={v}" for k, v in params.items()] + list(config.hydra.overrides.task)
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    settings = []
    for batch in BasicSweeper.split_arguments(_parse(arguments), max_batch_size=None):
        for job in batch:
            try:
                cfg = hydra.config_loader.load_sweep_config(config, list(job))
                settings.append(load(job_config(cfg)))
                check_machine(settings[-1])
            except (ConfigError, HydraException) as error:
                why = str(error) if isinstance(error, ConfigError) else explain_composition(error)
                raise ConfigError(f"job {' '.join(job)}: {why}") from None
    return settings


def varied_keys(config: DictConfig) -> list[str]:
    """The keys that a sweep varies, from the command line and from hydra.sweeper.params."""
    overrides = _parse(list(config.hydra.overrides.task))
    swept = [o.key_or_group for o in overrides if o.is_sweep_override()]
    params = OmegaConf.select(config, "hydra.sweeper.params") or {}
    return swept + [str(k).lstrip("+") for k in params if str(k).lstrip("+") not in swept]


def job_config(config: DictConfig) -> DictConfig:
    """`config` without Hydra's own node."""
    plain = OmegaConf.masked_copy(config, [str(k) for k in config if k != "hydra"])
    assert isinstance(plain, DictConfig)
    return plain


def check_machine(settings: Settings) -> None:
    """Refuse what this machine cannot do, as far as that is known without heavy imports.

    Raises ConfigError.
    """
    from importlib.util import find_spec

    from rl_pipeline.telemetry.tracker import resolve

    if settings.backend.name == "envpool" and find_spec("envpool") is None:
        raise ConfigError("backend=envpool needs the envpool package; use backend=gymnasium")
    if settings.tracking.name == "none":
        return
    try:
        resolve(settings.tracking, Path.cwd(), dict(os.environ))
    except ValueError as error:
        raise ConfigError(str(error)) from None


# -- run folders and resume -----------------------------------------------------------------------


@functools.cache
def _run_dir(root: str, resume: str | None) -> str:
    """A folder that no other run has (time + short id), or the one being resumed.

    One answer per process: Hydra resolves the same interpolation in several copies of the config.
    """
    if resume:
        return str(find_run(resume))
    now = datetime.now()
    return f"{root}/{now:%Y-%m-%d}/{now:%H-%M-%S}-{secrets.token_hex(4)}"


def find_run(name: str) -> Path:
    """The folder of a run: itself, or by its run id or MLflow run id below outputs/, multirun/.

    Raises ConfigError where there is none.
    """
    if (Path(name) / "run.json").exists():
        return Path(name)
    for folder in _run_folders():
        if json.loads((folder / "run.json").read_text())["run_id"] == name:
            return folder
        mlflow = folder / "mlflow.json"
        if mlflow.exists() and json.loads(mlflow.read_text()).get("run_id") == name:
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
    given = [o.value() for o in _parse([a for a in argv if a.startswith("resume=")])]
    if not given or given[-1] is None:
        return argv
    folder = find_run(str(given[-1]))
    saved = yaml.safe_load((folder / "run.json").read_text())["overrides"]
    # The seed may have been drawn: it is part of the run, whatever the overrides said.
    return [*saved, *argv]


def _parse(overrides: list[str]) -> list[Any]:
    try:
        return OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise ConfigError(str(error).replace("\n", " ")) from None


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
