"""Around a door that is a Hydra app: arguments checked, bad input refused, true exit codes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_pipeline import files, stop, terminal
from rl_pipeline.config.checks import check_no_secrets
from rl_pipeline.config.explain import explain_composition, one_line
from rl_pipeline.config.folders import run_dir
from rl_pipeline.config.options import groups, known_keys, options_of
from rl_pipeline.config.resume import with_resumed_overrides, with_resumed_sweep
from rl_pipeline.errors import ConfigError
from rl_pipeline.files import working_directory


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
            raise ConfigError(f"'{argument}' is not key=value")
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
            raise ConfigError(f"{argument} is the default already; leave it out")
        if given is None or given == "" or isinstance(given, int | float):
            names = f"; {options_of(group)}" if group in groups() else ""
            raise ConfigError(f"{argument}: expected the name of an option{names}")


def _die_with_the_sweep() -> None:
    """In a sweep's job: be told to end when the sweep is killed without a chance to say so."""
    parent = os.environ.pop("RL_PIPELINE_SWEEP_PID", None)
    if parent and sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG, prctl(2)
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
        if os.getppid() != int(parent):
            sys.exit("the sweep of this job is gone")
