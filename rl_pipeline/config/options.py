"""Valid choices: groups, options and keys, and the nearest ones to a misspelt word."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf
from pydantic import BaseModel

from rl_pipeline.config import origins
from rl_pipeline.config.origins import CONF, parse_overrides
from rl_pipeline.config.settings import Settings
from rl_pipeline.errors import ConfigError

# Options that a later version brings: answered plainly, not as a misspelling.
PLANNED = {
    "algo": {"sac"},
    "network": {"impala_cnn", "lstm"},
    "mode": {"overlap", "apex", "seed"},
    "profile": {"cprofile", "trace"},
}


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


def planned(group: str, option: str) -> str:
    """The answer to an option of PLANNED."""
    return f"{group}={option} is planned but not in this version; {options_of(group)}"


def groups() -> list[str]:
    """The configuration groups."""
    return sorted(p.name for p in CONF.iterdir() if p.is_dir() and not p.name.startswith("."))


def launcher_keys() -> list[str]:
    """Keys that the launchers here understand."""
    files = [OmegaConf.load(path) for path in (CONF / "hydra" / "launcher").glob("*.yaml")]
    return [f"hydra.launcher.{key!s}" for file in files for key in file if key != "_target_"]


def options_of(group: str, word: str | None = None) -> str:
    """The end of a message: the options of `group`, and the one perhaps meant by `word`."""
    if group.startswith("hydra/"):
        return f"is its package installed? ({group}=optuna: pip install 'rl_pipeline[sweep]')"
    valid = sorted(p.stem for p in (CONF / group).glob("*.yaml"))
    hint = near(word, valid) if word else ""
    if hint and len(valid) > 30:
        return f"--help lists the {len(valid)} options of {group}{hint}"
    return f"{group} can be {', '.join(valid)}" + hint if valid else f"{group} has no options yet"


def check_recipe(overrides: list[str]) -> None:
    """Refuse a recipe that does not exist: as an optional default Hydra would pass over it."""
    for override in parse_overrides([o for o in overrides if o.startswith("recipe=")]):
        if (name := override.value()) and not option_file("recipe", str(name)):
            raise ConfigError(
                f"recipe={name} does not exist here; {options_of('recipe', str(name))}"
            )


def recipe_of(algo: str, env: str) -> str:
    """The recipe that applies by itself: the task's own, else its family's (`conf/env/base`)."""
    own = f"{algo}_{env}"
    file = option_file("env", env)
    if file is None or option_file("recipe", own):
        return own
    task = OmegaConf.load(file)
    defaults = task.get("defaults") if isinstance(task, DictConfig) else None
    for default in defaults if isinstance(defaults, ListConfig) else ():
        if found := re.fullmatch(r"base/(\w+)@_here_", str(default)):
            return f"{algo}_{found.group(1)}"
    return own


def option_file(group: str, option: str) -> Path | None:
    """File of an option of a group, ours or the user's; None where there is none."""
    files = (folder / group / f"{option}.yaml" for folder in (CONF, origins.conf_folder()))
    return next((file for file in files if file.exists()), None)


# Hydra resolves it while it composes the defaults list.
OmegaConf.register_new_resolver("recipe_of", recipe_of, replace=True)
