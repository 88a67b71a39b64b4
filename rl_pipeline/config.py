"""From the command line to `Settings`: composition errors in plain words, values checked, resume.

Together with build.py the only place that sees a DictConfig.
"""

from __future__ import annotations

import ctypes
import difflib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.errors import HydraException, OverrideParseException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from rl_pipeline import files, stop, terminal
from rl_pipeline.files import working_directory
from rl_pipeline.runs import (
    check_resume,
    claim_folder,
    find_run,
    is_done,
    is_unshipped,
    parse_overrides,
    run_dir,
    with_resumed_overrides,
    with_resumed_sweep,
)
from rl_pipeline.settings import ConfigError, Settings
from rl_pipeline.telemetry.stores import check_no_secrets

PACKAGE = Path(__file__).parent
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"

# Options that DESIGN names and a later version brings: answered plainly, not as a misspelling.
PLANNED = {
    "algo": {"sac"},
    "network": {"impala_cnn", "lstm"},
    "mode": {"overlap", "apex", "seed"},
    "profile": {"cprofile", "trace"},
}


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
    option = None
    if error["type"] == "union_tag_invalid":
        path.append("name")
    elif path[:1] == ["algo"] and path[1:]:
        option = path.pop(1)  # which algorithm's settings: a step of pydantic's too
    path = _trim(path, values)
    key = ".".join(path)
    match error["type"]:
        case "extra_forbidden":
            known = known_keys()
            if option and key in known:
                return f"{key} is not a setting of algo={option}; leave it out"
            return f"{key} is not a setting{near(key, known + groups())}"
        case "missing":
            return f"{key} must be given, e.g. {key}=..."
        case "value_error":
            message = error["msg"].removeprefix("Value error, ")
            # Of a whole group the message itself says which of its settings is meant.
            single = key and not isinstance(error["input"], dict)
            return f"{key}={error['input']}: {message}" if single else message
        case "literal_error" | "union_tag_invalid":
            group, given = path[0], _get(values, path)
            if key == f"{group}.name":
                if given in PLANNED.get(group, ()):
                    return _planned(group, given)
                return f"{key}={given}: {_options(group, str(given))}"
    if error["type"] == "tuple_type":
        return f"{key}={error['input']}: must be a list, e.g. {key}=[{error['input']}]"
    message = error["msg"][0].lower() + error["msg"][1:]
    return f"{key}={error['input']}: {message.replace('input should be', 'must be')}"


def _get(values: Any, path: list[str]) -> Any:
    for part in path:
        values = values[part]
    return values


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


def near(word: str, valid: list[str]) -> str:
    """`; did you mean a, b?`: by the whole key, by its last part, or by initials (lr)."""
    parent, _, tail = word.rpartition(".")

    def closeness(key: str) -> float:
        key_parent, _, key_tail = key.rpartition(".")
        initials = "".join(part[0] for part in key_tail.split("_") if part)
        last = difflib.SequenceMatcher(None, tail, key_tail).ratio()
        # enviroment for env, lr for learning_rate
        longer = "." not in word and len(key) > 2 and word.startswith(key)
        if longer or (len(initials) > 1 and tail == initials):
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
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        hint = f"; such a value needs quotes of its own: \"{key}='{value}'\"" if value else ""
        why = next(line for line in text.splitlines() if not line.startswith("Error parsing"))
        if homes := [group for group in groups() if not value and _option_file(group, key)]:
            hint = f"; did you mean {homes[0]}={key}?"
        return f"{error.override}: {why}{hint}"
    if found := re.search(r"Ambiguous value for argument '([^=']+)=(.*?)'\n", text):
        key, value = found.groups()
        return f"{key}={value}: several values make a sweep, add -m; one list is {key}=[{value}]"
    if found := re.search(r"Could not find '([\w/]+)/([^'/]+)'", text):
        group, option = found.groups()
        if option in PLANNED.get(group, ()):
            return _planned(group, option)
        return f"{group}={option} does not exist here; {_options(group, option)}"
    if found := re.search(r"Could not override '([^']+)'", text):
        key = found.group(1).split("@")[0]
        if key in groups():
            return f"{key} cannot be overridden there: {cause or text}"
        if key in known_keys():
            group = key.split(".")[0]
            return f"{key} is no setting of the {group} chosen here, only of others; leave it out"
        hint = near(key, known_keys() + groups() + launcher_keys())
        if key.startswith("env.kwargs.") or "kwargs" in key:
            hint = f"; a new constructor argument is added with a plus: +{key}=..."
        return f"{key} is not a setting{hint}"
    return "\n".join(part for part in (text, cause) if part)


def _planned(group: str, option: str) -> str:
    return f"{group}={option} is planned but not in this version; {_options(group)}"


def groups() -> list[str]:
    """The configuration groups."""
    return sorted(p.name for p in CONF.iterdir() if p.is_dir() and not p.name.startswith("."))


def launcher_keys() -> list[str]:
    """What the launchers here understand."""
    files = [OmegaConf.load(path) for path in (CONF / "hydra" / "launcher").glob("*.yaml")]
    return [f"hydra.launcher.{key!s}" for file in files for key in file if key != "_target_"]


def _options(group: str, word: str | None = None) -> str:
    if group.startswith("hydra/"):
        return f"is its package installed? ({group}=optuna: pip install 'rl_pipeline[sweep]')"
    valid = sorted(p.stem for p in (CONF / group).glob("*.yaml"))
    hint = near(word, valid) if word else ""
    if hint and len(valid) > 30:
        return f"--help lists the {len(valid)} options of {group}{hint}"
    return f"{group} can be {', '.join(valid)}" + hint if valid else f"{group} has no options yet"


class Refused(SystemExit):
    """Bad input was answered; the exit code is 2."""


@contextmanager
def refusing(
    hint: str = "--cfg job --resolve prints the settings, --help the groups",
) -> Iterator[None]:
    """Answer bad input inside the block in a line or two on stderr, with exit code 2."""
    try:
        yield
        return
    except ConfigError as error:
        message = str(error)
    except (HydraException, OmegaConfBaseException) as error:
        message = explain_composition(error)
    terminal.say("\n".join(f"error: {line}" for line in message.splitlines() if line))
    terminal.say(f"       {hint}")
    raise Refused(2)


def run_main(main: Callable[[], Any]) -> None:
    """Call a Hydra entrypoint; its exit code says how it ended, whoever raised what."""
    terminal.steady_streams()
    working_directory(fix=True)
    OmegaConf.register_new_resolver("run_dir", run_dir, replace=True)
    # Hydra would print composition errors itself, in its own words.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    code = 1
    try:
        # A sweep that is told to end must end its jobs, as with Ctrl-C.
        with stop.handling(stop.interrupt), refusing():
            _die_with_the_sweep()
            _check_dashes(sys.argv[1:])
            sys.argv[1:] = with_resumed_sweep(with_resumed_overrides(sys.argv[1:]))
            check_no_secrets(sys.argv[1:])
            main()
        code = 0
    except (stop.Killed, KeyboardInterrupt) as error:
        killed = error if isinstance(error, stop.Killed) else stop.Killed("SIGINT")
        terminal.say(f"stopped by {killed}")
        code = killed.exit_code
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
        if isinstance(error.code, str):
            terminal.say(error.code)
    except OSError as error:
        if not files.of_the_disk(error):
            raise
        terminal.say(f"error: {files.why_not(error)}")
    finally:
        files.end_claims()
    stop.leave_with(code)


def _check_dashes(argv: list[str]) -> None:
    for argument in argv:
        key = argument.lstrip("-").split("=")[0]
        if argument.startswith("--") and "=" in argument and key in known_keys() + groups():
            raise ConfigError(f"{argument}: settings have no dashes; use {argument.lstrip('-')}")


def _die_with_the_sweep() -> None:
    """In a sweep's job: be told to end when the sweep is killed without a chance to say so."""
    parent = os.environ.pop("RL_PIPELINE_SWEEP_PID", None)
    if parent and sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG, prctl(2)
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
        if os.getppid() != int(parent):
            sys.exit("the sweep of this job is gone")


class Gate(Callback):
    """Hydra callback: a bad configuration ends the program before any folder or run exists."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Validate before Hydra makes the run folder."""
        # Hydra turns exceptions of callbacks into warnings; the SystemExit of refusing() passes.
        with refusing():
            check_recipe(list(config.hydra.overrides.task))
            check_no_secrets(OmegaConf.to_yaml(config).splitlines())
            settings = load(job_config(config))
            check_machine(settings)
            check_study(settings)
            folder = Path(str(config.hydra.run.dir))
            if settings.resume and is_done(settings, folder) and is_unshipped(folder):
                check_resume(settings, folder)
                raise SystemExit(ship(folder))
            subdir = config.hydra.output_subdir
            claim_folder(settings, folder, subdir and str(subdir))


def ship(folder: Path) -> int:
    """Do what is left of a finished run: bring its rows to the store; returns the exit code."""
    from rl_pipeline import report

    command = [sys.executable, "-m", "rl_pipeline.telemetry.writer", str(folder)]
    code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.__stderr__).returncode
    tracked = files.read_json(folder / "mlflow.json")
    report.print_summary(files.read_json(folder / "result.json") | {"tracking": tracked})
    return code


def check_study(settings: Settings) -> None:
    """Refuse a single run what only a multirun can do; raises ConfigError."""
    if "RL_PIPELINE_STUDY" in os.environ:
        return  # a job: these mean its sweep
    for key in ("interleave", "resume", "baseline", "threshold"):
        if getattr(settings.study, key) != getattr(type(settings.study)(), key):
            raise ConfigError(f"study.{key} has no effect on a single run; add -m or sweep=...")


def check_recipe(overrides: list[str]) -> None:
    """Refuse a recipe that does not exist: as an optional default Hydra would pass over it."""
    for override in parse_overrides([o for o in overrides if o.startswith("recipe=")]):
        if (name := override.value()) and not _option_file("recipe", str(name)):
            raise ConfigError(f"recipe={name} does not exist here; {_options('recipe', str(name))}")


def recipe_of(algo: str, env: str) -> str:
    """The recipe that applies by itself: the task's own, else its family's (`conf/env/base`)."""
    own = f"{algo}_{env}"
    file = _option_file("env", env)
    if file is None or _option_file("recipe", own):
        return own
    for default in OmegaConf.select(OmegaConf.load(file), "defaults", default=()):
        if found := re.fullmatch(r"base/(\w+)@_here_", str(default)):
            return f"{algo}_{found.group(1)}"
    return own


def _option_file(group: str, option: str) -> Path | None:
    """Where an option of a group is written down, ours or the user's."""
    files = (folder / group / f"{option}.yaml" for folder in (CONF, working_directory() / "conf"))
    return next((file for file in files if file.exists()), None)


# Hydra resolves it while it composes the defaults list.
OmegaConf.register_new_resolver("recipe_of", recipe_of, replace=True)


def sweep_settings(config: DictConfig) -> list[Settings]:
    """The settings of every job of a grid sweep, checked; raises ConfigError naming the job.

    Other sweepers decide while they run: for them only the base configuration is checked.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.global_hydra import GlobalHydra

    if not str(config.hydra.sweeper._target_).endswith("BasicSweeper"):
        return [load(job_config(config))]
    here = not str(config.hydra.launcher._target_).endswith("RayLauncher")
    params = OmegaConf.select(config, "hydra.sweeper.params") or {}
    arguments = [f"{k}={v}" for k, v in params.items()] + list(config.hydra.overrides.task)
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    settings = []
    for batch in BasicSweeper.split_arguments(parse_overrides(arguments), max_batch_size=None):
        for job in batch:
            try:
                check_recipe(list(job))
                cfg = hydra.config_loader.load_sweep_config(config, list(job))
                settings.append(load(job_config(cfg)))
                check_machine(settings[-1], here)
                if settings[-1].resume:
                    raise ConfigError("resume continues one run and cannot be swept")
            except (ConfigError, HydraException) as error:
                why = str(error) if isinstance(error, ConfigError) else explain_composition(error)
                raise ConfigError(f"job {' '.join(job)}: {why}") from None
    return settings


def varied_keys(config: DictConfig) -> list[str]:
    """The keys that a sweep varies, from the command line and from hydra.sweeper.params."""
    overrides = parse_overrides(list(config.hydra.overrides.task))
    swept = [o.key_or_group for o in overrides if o.is_sweep_override()]
    params = OmegaConf.select(config, "hydra.sweeper.params") or {}
    return swept + [str(k).lstrip("+") for k in params if str(k).lstrip("+") not in swept]


def job_config(config: DictConfig) -> DictConfig:
    """`config` without Hydra's own node."""
    plain = OmegaConf.masked_copy(config, [str(k) for k in config if k != "hydra"])
    assert isinstance(plain, DictConfig)
    return plain


def check_machine(settings: Settings, here: bool = True) -> None:
    """Refuse what this machine cannot do, as far as that is known without heavy imports.

    `here`: the run is for this machine and not for one of a cluster. Raises ConfigError.
    """
    from importlib.metadata import version
    from importlib.util import find_spec

    from rl_pipeline.telemetry import stores
    from rl_pipeline.telemetry.tracker import kept_uri

    if settings.backend.name.startswith("envpool") and find_spec("envpool") is None:
        raise ConfigError(
            f"backend={settings.backend.name} needs the envpool package; use backend=gymnasium"
        )
    if here and settings.device.name == "cuda" and version("torch").endswith("+cpu"):
        raise ConfigError(
            "device=cuda cannot run here: this torch is built without CUDA; use device=cpu or "
            "device=auto"
        )
    tracking, environ = settings.tracking, os.environ.get("MLFLOW_TRACKING_URI")
    key = "MLFLOW_TRACKING_URI" if environ and not tracking.uri else "tracking.uri"
    try:
        stores.check_no_secret("tracking.uri", tracking.uri)
        if tracking.name == "none":
            return
        if settings.resume and not (tracking.uri or environ):
            kept = kept_uri(find_run(settings.resume))
            tracking = tracking.model_copy(update={"uri": kept})
        uri = stores.resolve(tracking, working_directory(), dict(os.environ))[0]
        stores.check_driver(uri, key)
        if database := stores.database_of(uri):
            stores.check_database(database)
    except ValueError as error:
        told = str(error)
        if isinstance(error, stores.StoreError):
            told = f"{key}: {told}; tracking=none trains without a store"
        raise ConfigError(told) from None
