"""`resume=` and `study.resume=`: what made the run comes first, what is given now wins."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_pipeline.config import origins
from rl_pipeline.config.folders import (
    STUDY_FILE,
    find_run,
    find_sweep,
    is_done,
    is_unshipped,
    read_study,
    record_of,
)
from rl_pipeline.config.options import groups
from rl_pipeline.config.origins import key_of, parse_overrides
from rl_pipeline.config.settings import Settings
from rl_pipeline.errors import ConfigError
from rl_pipeline.terminal import in_shell, quoted

FIXED_ON_RESUME = (
    "seed", "env", "backend.name", "backend.num_envs", "buffer.name", "buffer.capacity",
    "buffer.alpha", "buffer.beta", "network", "algo",
)  # fmt: skip
"""Settings that make a run the run it is; the place of the replay's bytes is none of them."""


def check_resume(settings: Settings, folder: Path) -> None:
    """Refuse a resume that cannot be one; raises ConfigError."""
    assert settings.resume is not None
    if folder.resolve() != find_run(settings.resume).resolve():
        raise ConfigError("hydra.run.dir goes with new runs; a resumed run stays in its folder")
    check_resumed(settings, record_of(folder)["settings"])
    if is_done(settings, folder) and not is_unshipped(folder):
        raise ConfigError(
            f"resume={settings.resume}: the run has finished, with all of "
            f"total_steps={settings.total_steps:,}; give a larger total_steps to go on"
        )


def with_resumed_overrides(argv: list[str]) -> list[str]:
    """Put what made the run that `resume=` names before what is given now, which wins.

    Raises ConfigError.
    """
    name = _named(argv, "resume")
    if name is None:
        return argv
    args = origins.flags_of(argv)
    if args.multirun:
        raise ConfigError("resume continues one run; leave out -m")
    folder = find_run(name)
    record, what = record_of(folder), f"resume={name}"
    flags, places = origins.put_back(record.get("composed_from"), argv, what)
    keys = _new_values(args.overrides)
    saved = [
        _as_chosen(text, record["settings"])
        for text in record["overrides"] if key_of(text) not in keys
    ]  # fmt: skip
    kept = origins.trusted(saved, folder / "run.json")
    first = argv.index(args.overrides[0])
    # A sweep's preset among its options would sweep again.
    mode = [] if "hydra.mode" in keys else ["hydra.mode=RUN"]
    place = [] if "hydra.run.dir" in keys else [f"hydra.run.dir={quoted(str(folder))}"]
    line = [*flags, *argv[:first], *places, *kept, *mode, *place, *argv[first:]]
    origins.check_trust(line, argv, what)
    return line


def _new_values(overrides: list[str]) -> set[str]:
    # What is deleted must have been there.
    return {key_of(text) for text in overrides if not text.startswith("~")}


def _named(argv: list[str], key: str) -> str | None:
    """Value of `resume=` or `study.resume=`, None where there is none; raises ConfigError."""
    texts = [a for a in argv if re.match(rf"\+{{0,2}}{re.escape(key)}=", a)]
    if not texts:
        return None
    value = parse_overrides(texts)[-1].value()
    if value is None:
        return None
    if not isinstance(value, str):
        given = texts[-1].split("=", 1)[1]
        raise ConfigError(
            f"{texts[-1]}: expected a folder, a name or an id; a name that reads as something else "
            f"needs quotes of its own: {in_shell(f'{key}={quoted(given)}')}"
        )
    try:
        return str(OmegaConf.create([value])[0])
    except OmegaConfBaseException as error:
        raise ConfigError(f"{texts[-1]}: {str(error).splitlines()[0]}") from None


def _as_chosen(override: str, settings: dict[str, Any]) -> str:
    """`auto` is resolved once: a resumed run keeps the first choice, also on another machine."""
    key, _, value = override.partition("=")
    if value == "auto" and key in ("backend.num_envs", "backend.lanes"):
        chosen = settings.get("backend")
        number = chosen.get(key.split(".")[1]) if isinstance(chosen, dict) else None
        return f"{key}={number}" if isinstance(number, int) else override
    return override


def with_resumed_sweep(argv: list[str]) -> list[str]:
    """Put what made the multirun that `study.resume=` names before what is given now.

    Raises ConfigError.
    """
    name = _named(argv, "study.resume")
    if name is None or "hydra.mode=RUN" in argv:
        return argv
    args = origins.flags_of(argv)
    folder = find_sweep(name)
    study, what = read_study(folder), f"study.resume={name}"
    flags, places = origins.put_back(study.get("composed_from"), argv, what)
    keys = _new_values(args.overrides)
    # Given twice, a swept key would be crossed with itself.
    left = [o for o in study["overrides"]
            if key_of(o) not in keys | {"study.resume", "hydra.sweep.dir"}]  # fmt: skip
    kept = origins.trusted(left, folder / STUDY_FILE, origins.of_a_grid)
    if not args.multirun:
        flags = ["-m", *flags]
    first = argv.index(args.overrides[0])
    place = f"hydra.sweep.dir={quoted(str(folder))}"
    line = [*flags, *argv[:first], *places, *kept, *argv[first:], place]
    origins.check_trust(line, argv, what)
    return line


def as_begun(values: dict[str, Any], overrides: list[str]) -> None:
    """Put the numbers that a run began with in place of what no override sets.

    Recipes and defaults of another version do not make another run of it. `values` is the plain
    configuration; what is another choice (of a recipe, say) is left for `check_resumed` to name.
    """
    record = record_of(find_run(values["resume"]))
    chosen = {text for text in overrides if key_of(text) in groups()}
    if chosen - set(record["overrides"]):
        return
    then = record["settings"]
    given = {key_of(text) for text in overrides}
    for key in FIXED_ON_RESUME:
        group, _, leaf = key.partition(".")
        old, new = then.get(group), values.get(group)
        if group in ("seed", "env") or not isinstance(old, dict) or not isinstance(new, dict):
            continue
        if old.get("name") != new.get("name"):
            continue
        for name in [leaf] if leaf else list(old):
            if name in old and name in new and f"{group}.{name}" not in given:
                new[name] = old[name]


def check_resumed(now: Settings, then: dict[str, Any]) -> None:
    """Refuse a resume that would make another run of it; raises ConfigError naming the key."""
    current = now.model_dump(mode="json")
    for key in FIXED_ON_RESUME:
        try:
            old, new = _get(then, key), _get(current, key)
        except (KeyError, TypeError):
            continue  # a run of a version that did not have this setting yet
        if key == "seed" and new is None:
            continue
        if old != new:
            changed = key
            if isinstance(old, dict):
                differ = [k for k in old if old[k] != (new or {}).get(k)]
                if not differ:
                    continue  # settings that came after the run's version
                changed = f"{key}.{differ[0]}"
                old, new = old[differ[0]], (new or {}).get(differ[0])
            raise ConfigError(
                f"resume cannot change {changed} from {old} to {new}: the run would not be the "
                f"same; leave it out, or start a new run"
            )


def _get(values: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        values = values[part]
    return values
