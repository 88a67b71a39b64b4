"""Sources of a configuration besides its overrides, and what a saved one may say.

A run and a sweep record where their options came from; a resume puts that back. It never obeys a
file in what Hydra itself does: such a file may come from anywhere.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from rl_pipeline.errors import ConfigError
from rl_pipeline.terminal import quoted, say

PACKAGE = Path(__file__).parents[1]
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"
_CONF = "RL_PIPELINE_CONF"
OF_HYDRA = (
    "callbacks", "job_logging", "hydra_logging", "run", "sweep", "output_subdir", "job.chdir",
    "job.env_set", "job.env_copy", "launcher._target_", "sweeper._target_",
)  # fmt: skip
"""Keys that decide which code Hydra runs and where it writes."""


def conf_folder() -> Path:
    """`./conf` of the working directory, or of the one that a resumed run was started in."""
    return Path(os.environ.get(_CONF) or Path.cwd() / "conf")


def parse_overrides(overrides: list[str]) -> list[Any]:
    """Hydra's own reading of overrides; raises ConfigError."""
    try:
        return OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise ConfigError(str(error).replace("\n", " ")) from None


def key_of(override: str) -> str:
    """The key that an override is about."""
    return override.split("=")[0].lstrip("+~")


def flags_of(argv: list[str]) -> argparse.Namespace:
    """Hydra's own reading of a command line; its `overrides` are all but the flags."""
    from hydra._internal.utils import get_args_parser

    return get_args_parser().parse_known_args(argv)[0]


# -- recording ------------------------------------------------------------------------------------


def origin(hydra: Any) -> dict[str, Any]:
    """Sources of a composed configuration, in absolute paths, by Hydra's node of it."""
    found: dict[str, Any] = {"working_directory": str(hydra.runtime.cwd), "search_path": []}
    for source in hydra.runtime.config_sources:
        folder = _folder(source.schema, source.path)
        match source.provider:
            case "command-line":
                found["config_dir"] = folder
            case "working-directory":
                found["conf"] = folder
            case "main" if folder and Path(folder).resolve() != CONF.resolve():
                found["config_path"] = folder
            case "hydra.searchpath in command-line" if folder:
                found["search_path"].append(folder)
    if hydra.job.config_name != "config":
        found["config_name"] = hydra.job.config_name
    return found


def _folder(schema: str, path: str) -> str | None:
    if schema == "file":
        return os.path.abspath(path)
    if schema == "pkg":  # as a folder: to look into a package later would run its code
        top, *rest = path.replace("/", ".").split(".")
        spec = find_spec(top) if top else None
        places = list(spec.submodule_search_locations or []) if spec else []
        return str(Path(places[0], *rest)) if places else None
    return None


def flags(found: dict[str, Any]) -> list[str]:
    """The flags that lead to an origin."""
    names = ("config_dir", "config_path", "config_name")
    return [f"--{n.replace('_', '-')}={found[n]}" for n in names if found.get(n)]


def search_path(found: dict[str, Any]) -> list[str]:
    """The override that leads to an origin's further folders, if it has such."""
    folders = ",".join(quoted(folder) for folder in found.get("search_path", []))
    return [f"hydra.searchpath=[{folders}]"] if folders else []


# -- putting back ---------------------------------------------------------------------------------


def put_back(found: Any, argv: list[str], what: str) -> tuple[list[str], list[str]]:
    """Flags and overrides for the origin `found` of what is resumed; those of `argv` win.

    `what` is resumed, for messages. Raises ConfigError naming a folder that is no more.
    """
    if found is None:  # recorded by an earlier version
        return [], []
    if not _is_origin(found):
        raise ConfigError(f"{what}: what it says of its origin (composed_from) is damaged")
    given = flags_of(argv)
    found = {k: v for k, v in found.items() if getattr(given, k, None) is None}
    if any(key_of(text) == "hydra.searchpath" for text in given.overrides):
        found["search_path"] = []
    for key in ("config_dir", "config_path"):
        if key in found and not Path(found[key]).is_dir():
            flag = f"--{key.replace('_', '-')}"
            raise ConfigError(
                f"{what}: its options are in {found[key]}, which is no folder now; give "
                f"{flag}=<where they are>"
            )
    for folder in found["search_path"]:
        if not Path(folder).is_dir():
            raise ConfigError(
                f"{what}: some of its options are in {folder}, which is no folder now; give "
                "hydra.searchpath=[<where they are>]"
            )
    conf = Path(found["working_directory"]) / "conf"
    if conf.is_dir():
        os.environ[_CONF] = str(conf)
    elif "conf" in found and not conf_folder().is_dir():
        raise ConfigError(
            f"{what}: some of its options are in {conf}, which is no folder now; start where "
            "./conf holds them"
        )
    return flags(found), search_path(found)


def _is_origin(found: Any) -> bool:
    if not isinstance(found, dict):
        return False
    folders = found.get("search_path")
    texts = [value for key, value in found.items() if key != "search_path"]
    return (
        isinstance(folders, list)
        and "working_directory" in found
        and all(isinstance(t, str) and "\0" not in t for t in [*texts, *folders])
    )


# -- trust ----------------------------------------------------------------------------------------

# They call code of Hydra and OmegaConf, read the environment or name a class.
_CALLS = re.compile(r"_target_|\$\{[^{}]*:")


def trusted(
    saved: Iterable[str], file: Path, allowed: Callable[[str], bool] = lambda _: False
) -> list[str]:
    """The saved overrides that concern the run alone; the others are named and left out."""
    kept = []
    for text in saved:
        if _of_the_run(text) or (allowed(text) and not _CALLS.search(text)):
            kept.append(text)
        else:
            shown = text if text.isprintable() and len(text) < 300 else repr(text)[:300]
            say(f"{file}: {shown} is not taken on trust from a file; give it again if it is meant")
    return kept


def _of_the_run(text: str) -> bool:
    if text.startswith("-") or _CALLS.search(text):
        return False
    try:
        (override,) = OverridesParser.create().parse_overrides([text])
    except HydraException:
        return False
    names = (override.key_or_group, override.package or "run")
    return not any(re.match(r"$|hydra\b", name) for name in names)


def of_a_grid(text: str) -> bool:
    """Whether an override of Hydra's says what a grid's jobs are, or how many run at once."""
    key, _, value = text.partition("=")
    key = key.lstrip("+")
    if text in ("hydra/launcher=process", "hydra/sweeper=basic", "hydra.mode=MULTIRUN"):
        return True
    if key in ("hydra.launcher.n_jobs", "hydra.launcher.timeout_s", "hydra.launcher.shuffle",
               "hydra.sweeper.max_batch_size"):  # fmt: skip
        return True
    # A grid over Hydra's own settings would hand them to the jobs.
    params = key.removeprefix("hydra.sweeper.params")
    return params != key and "hydra" not in params + value


def check_trust(argv: list[str], before: list[str], what: str) -> None:
    """Compose the line `argv` without running anything: Hydra's own part must be what it is anyway.

    `before` is the line as it was given. Options of a saved folder, or of a path in a saved
    override, could set it. Raises ConfigError.
    """
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.utils import create_config_search_path
    from hydra.core.config_search_path import SearchPathQuery
    from hydra.types import RunMode

    args, given = flags_of(argv), flags_of(before).overrides
    # As Hydra's own main does.
    folders = create_config_search_path(args.config_path or str(CONF))
    if args.config_dir:
        place = f"file://{os.path.abspath(args.config_dir)}"
        folders.prepend("command-line", place, SearchPathQuery(provider="schema"))
    loader = ConfigLoaderImpl(folders)
    mode = RunMode.MULTIRUN if args.multirun else RunMode.RUN
    own = [t for t in args.overrides if key_of(t) == "hydra.searchpath"]
    own += [t for t in given if key_of(t).startswith("hydra") and t not in own]
    whole, plain = (
        loader.load_configuration(name, overrides, mode, validate_sweep_overrides=False)
        for name, overrides in (
            (args.config_name or "config", args.overrides),
            (flags_of(before).config_name or "config", own),
        )
    )
    check_same(whole, plain, what)


def check_same(whole: DictConfig, plain: DictConfig, what: str) -> None:
    """Raise ConfigError where two configurations differ in what Hydra itself would do."""
    for key in OF_HYDRA:
        values = [_plain(OmegaConf.select(c.hydra, key)) for c in (whole, plain)]
        for value in values:
            if key in ("run", "sweep") and isinstance(value, dict):
                value.pop("dir", None)  # given with the resume
        if values[0] != values[1]:
            raise ConfigError(
                f"{what}: its options set hydra.{key}, which is not taken on trust from a file; "
                f"give hydra.{key} again if it is meant"
            )


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=False) if OmegaConf.is_config(value) else value
