"""From the command line to `Settings`: composition errors in plain words, values checked, resume.

Together with build.py the only place that sees a DictConfig.
"""

from __future__ import annotations

import ctypes
import difflib
import math
import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from rl_pipeline import files, memory, origins, stop, terminal
from rl_pipeline.errors import ConfigError
from rl_pipeline.files import working_directory
from rl_pipeline.origins import CONF, parse_overrides
from rl_pipeline.runs import (
    check_resume,
    claim_folder,
    find_run,
    is_done,
    is_unshipped,
    run_dir,
    with_resumed_overrides,
    with_resumed_sweep,
)
from rl_pipeline.settings import Settings
from rl_pipeline.telemetry.stores import check_no_secrets

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
    try:
        missing = sorted(OmegaConf.missing_keys(cfg))
        values: Any = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        where = _unresolved(cfg) or error.full_key
        raise ConfigError(f"{where}: {str(error).splitlines()[0]}") from None
    if missing:
        raise ConfigError("\n".join(f"{key} must be given, e.g. {key}=..." for key in missing))
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        lines = [_explain(e, values) for e in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def _unresolved(cfg: DictConfig, prefix: str = "") -> str | None:
    """The first key whose interpolation leads nowhere."""
    for key in cfg:
        try:
            value = cfg[key]
        except OmegaConfBaseException:
            return f"{prefix}{key!s}"
        if isinstance(value, DictConfig) and (found := _unresolved(value, f"{prefix}{key!s}.")):
            return found
    return None


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
                if str(given) in PLANNED.get(group, ()):
                    return _planned(group, str(given))
                return f"{key}={given}: {_options(group, str(given))}"
    if error["type"] == "int_parsing_size":
        return f"{key}={error['input']}: is beyond what can be counted"
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
        line = terminal.in_shell(f"{key}={terminal.quoted(value, interpolating=True)}")
        hint = f"; such a value needs quotes of its own: {line}" if value else ""
        why = next(line for line in text.splitlines() if not line.startswith("Error parsing"))
        if homes := [group for group in groups() if not value and _option_file(group, key)]:
            hint = f"; did you mean {homes[0]}={key}?"
        return f"{error.override}: {why}{hint}"
    if found := re.search(r"Ambiguous value for argument '([^=']+)=(.*?)'\n", text):
        key, value = found.groups()
        return f"{key}={value}: several values make a sweep, add -m; one list is {key}=[{value}]"
    if found := re.search(r"Could not find '([\w/]+)/([^'/]*)'", text):
        group, option = found.groups()
        if option in PLANNED.get(group, ()):
            return _planned(group, option)
        return f"{group}={option} does not exist here; {_options(group, option)}"
    if found := re.search(r"Could not override '([^']+)'", text):
        key = found.group(1).split("@")[0]
        if key == "env.kwargs":
            return f"{key} gets new arguments with a plus: +{key}=..., or +{key}.name=..."
        if key in groups():
            return f"{key} cannot be overridden there: {cause or text}"
        if key in known_keys():
            group = key.split(".")[0]
            return f"{key} is no setting of the {group} chosen here, only of others; leave it out"
        hint = near(key, known_keys() + groups() + launcher_keys())
        if key.startswith("env.kwargs.") or "kwargs" in key:
            hint = f"; a new constructor argument is added with a plus: +{key}=..."
        return f"{key} is not a setting{hint}"
    if "recipe_of" in text:
        return "env and algo must each be one option of theirs, e.g. env=cartpole algo=ppo"
    words = "\n".join(part for part in (text, cause) if part)
    words = re.split(r"\n\s*(?:Config search path|Search path|Available options)", words)[0]
    lines = re.sub(r"\n\s*(?:full_key|object_type|reference_type)[^\n]*", "", words)
    of = getattr(error, "full_key", None)
    return f"{of}: {lines}" if of else lines


def one_line(error: object) -> str:
    """The words of another's error, on a line."""
    return " ".join(str(error).split())[:500]


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


def _printable(line: str) -> str:
    # What was given may be of any length and hold any character.
    text = line if line.isprintable() else repr(line)[1:-1]
    return text if len(text) < 2000 else f"{text[:1000]} ... {text[-100:]}"


def _composing(error: Exception) -> str | None:
    """The file that Hydra read when it raised an error of another's, as a prefix of a message.

    Empty where it composed without a file, None where it did not compose.
    """
    place, code = None, _composing.__code__
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if code.co_name == "run_job":
            return None
        if code.co_name in ("load_configuration", "_get_rerun_conf"):
            place = ""
        if code.co_name == "parse_overrides" and "override" in frame.f_locals:
            place = f"{frame.f_locals['override']}: "
        if code.co_name == "load_config" and "full_path" in frame.f_locals:
            place = f"{frame.f_locals['full_path']} is no configuration: "
    # Flags that do not go together.
    return "" if code.co_name == "_run_hydra" else place


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
    except (Exception, RecursionError) as error:
        where = _composing(error)
        if where is None:
            raise
        message = where + (one_line(error) or type(error).__name__)
    lines = (_printable(line) for line in message.splitlines() if line.strip())
    terminal.say("\n".join(f"error: {line}" for line in lines))
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
            _check_arguments(sys.argv[1:])
            sys.argv[1:] = with_resumed_overrides(sys.argv[1:])
            sys.argv[1:] = with_resumed_sweep(sys.argv[1:])
            check_no_secrets(sys.argv[1:])
            main()
        code = 0
    except (stop.Killed, KeyboardInterrupt) as error:
        killed = error if isinstance(error, stop.Killed) else stop.Killed("SIGINT")
        terminal.say(f"stopped by {killed}")
        code = killed.exit_code
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            terminal.say(error.code)
    except OSError as error:
        if not files.of_the_disk(error):
            raise
        terminal.say(f"error: {files.why_not(error)}")
    finally:
        files.end_claims()
    stop.leave_with(code)


_MAY_BE_NONE = ("debug", "experiment", "local", "sweep")
"""Groups without an option of their own accord."""


def _check_arguments(argv: list[str]) -> None:
    if not (str(Path.cwd()) + "".join(argv)).isascii():
        for text in (str(Path.cwd()), *argv):
            try:
                text.encode()
            except UnicodeEncodeError:
                raise ConfigError(f"{text!r} is not UTF-8, which Hydra's files are") from None
    for argument in argv:
        if not argument or argument.startswith("="):
            raise ConfigError(f"'{argument}' is no key=value")
        key = argument.lstrip("-").split("=")[0]
        if argument.startswith("--") and "=" in argument and key in known_keys() + groups():
            raise ConfigError(f"{argument}: settings have no dashes; use {argument.lstrip('-')}")
        _check_option(argument)


def _check_option(argument: str) -> None:
    """Refuse what is no name where a group's option is chosen; Hydra would not say which group."""
    with suppress(HydraException):  # explained where it composes
        (override,) = OverridesParser.create().parse_overrides([argument])
        group, given = override.key_or_group, override.value()
        if override.is_delete() or not (group in groups() or "/" in group or group == "hydra"):
            return
        if given is None and group in _MAY_BE_NONE:
            raise ConfigError(f"{argument} is what holds without it; leave it out")
        if given is None or given == "" or isinstance(given, int | float):
            names = f"; {_options(group)}" if group in groups() else ""
            raise ConfigError(f"{argument}: the name of an option is meant{names}")


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
            check_place("hydra.run.dir", str(config.hydra.run.dir))
            if subdir and (Path(subdir).is_absolute() or ".." in Path(subdir).parts):
                raise ConfigError(
                    f"hydra.output_subdir={subdir}: must be a folder inside that of the run"
                )
            claim_folder(settings, folder, subdir and str(subdir))


def ship(folder: Path) -> int:
    """Do what is left of a finished run: bring its rows to the store; returns the exit code."""
    from rl_pipeline import report

    command = [sys.executable, "-m", "rl_pipeline.telemetry.writer", str(folder)]
    code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.__stderr__).returncode
    tracked = files.read_json(folder / "mlflow.json")
    report.print_summary(files.read_json(folder / "result.json") | {"tracking": tracked})
    others = 4  # another process ships it: nothing is left to do here
    return 0 if code == others else code


def check_place(key: str, folder: str) -> None:
    """Refuse a folder that Hydra cannot work in; raises ConfigError."""
    if not folder.strip():
        raise ConfigError(f"{key} is empty; a dot means the working directory: {key}=.")
    if "\0" in folder:
        raise ConfigError(f"{key}={folder!r}: holds a NUL, as no folder's name does")
    if "${" in os.path.abspath(folder):
        raise ConfigError(
            f"{key}={os.path.abspath(folder)}: Hydra reads ${{ in a path as an interpolation; "
            "choose or rename the folder"
        )


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
    task = OmegaConf.load(file)
    defaults = task.get("defaults") if isinstance(task, DictConfig) else None
    for default in defaults if isinstance(defaults, ListConfig) else ():
        if found := re.fullmatch(r"base/(\w+)@_here_", str(default)):
            return f"{algo}_{found.group(1)}"
    return own


def _option_file(group: str, option: str) -> Path | None:
    """Where an option of a group is written down, ours or the user's."""
    files = (folder / group / f"{option}.yaml" for folder in (CONF, origins.conf_folder()))
    return next((file for file in files if file.exists()), None)


# Hydra resolves it while it composes the defaults list.
OmegaConf.register_new_resolver("recipe_of", recipe_of, replace=True)


def sweep_settings(config: DictConfig) -> list[Settings]:
    """The settings of every job of a grid sweep, checked; raises ConfigError naming the job.

    Other sweepers decide while they run: for them only the base configuration is checked.
    """
    from hydra.core.global_hydra import GlobalHydra

    for part in ("sweeper", "launcher"):
        if "_target_" not in (config.hydra[part] or {}):
            raise ConfigError(f"hydra.{part} must be one; leave it out")
    if not str(config.hydra.sweeper._target_).endswith("BasicSweeper"):
        return [load(job_config(config))]
    here = not str(config.hydra.launcher._target_).endswith("RayLauncher")
    loader = GlobalHydra.instance().config_loader()
    settings = []
    for job in _grid(config, loader):
        try:
            check_recipe(job)
            cfg = loader.load_sweep_config(config, job)
            settings.append(load(job_config(cfg)))
            check_machine(settings[-1], here)
            if again := settings[-1].study.resume:
                origins.check_same(cfg, config, f"study.resume={again}")
            if settings[-1].resume:
                raise ConfigError("resume continues one run and cannot be swept")
        except (ConfigError, HydraException) as error:
            why = str(error) if isinstance(error, ConfigError) else explain_composition(error)
            raise ConfigError(f"job {' '.join(job)}: {why}") from None
    return settings


MOST_JOBS = 10_000
"""More are a slip of the pen."""


def _grid(config: DictConfig, loader: ConfigLoader) -> list[list[str]]:
    """The overrides of every job, as Hydra's own sweeper will make them; raises ConfigError."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    if (size := config.hydra.sweeper.max_batch_size) is not None and size < 1:
        raise ConfigError(f"hydra.sweeper.max_batch_size={size}: must be at least 1")
    arguments = [f"{k}={v}" for k, v in _params(config).items()]
    arguments += list(config.hydra.overrides.task)
    # The loader knows the options that glob() chooses from.
    overrides = OverridesParser.create(config_loader=loader).parse_overrides(arguments)
    sizes = {o.get_key_element(): _size(o) for o in overrides if o.is_sweep_override()}
    if math.prod(sizes.values()) > MOST_JOBS:
        raise ConfigError(
            f"{' x '.join(sizes)} are more than {MOST_JOBS:,} jobs; sweep over fewer values"
        )
    batches = BasicSweeper.split_arguments(overrides, max_batch_size=None)
    return [job for batch in batches for job in batch]


def _size(override: Override) -> int:
    """How many values a key is swept over, up to one more than may be; raises ConfigError."""
    line = override.input_line
    if override.is_interval_sweep():
        key = override.get_key_element()
        raise ConfigError(
            f"{line}: a grid needs single values, e.g. {key}=choice(...) or {key}=range(...); an "
            "interval is for hydra/sweeper=optuna"
        )
    try:
        size = sum(1 for _ in islice(override.sweep_string_iterator(), MOST_JOBS + 1))
    except (ValueError, ArithmeticError, HydraException) as error:
        raise ConfigError(f"{line}: {error}") from None
    if not size:
        raise ConfigError(f"{line}: there is nothing to sweep over")
    return size


def _params(config: DictConfig) -> dict[str, Any]:
    return dict((OmegaConf.select(config, "hydra.sweeper.params") or {}).items())


def varied_keys(config: DictConfig) -> list[str]:
    """The keys that a sweep varies, from hydra.sweeper.params and the command line."""
    preset = [f"{k}={v}" for k, v in _params(config).items()]
    overrides = parse_overrides(preset + list(config.hydra.overrides.task))
    last = {o.key_or_group: o for o in overrides}
    return [key for key, override in last.items() if override.is_sweep_override()]


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
    if here:
        memory.check(settings)
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
