"""From the composed configuration to `Settings`: values checked, errors in plain words."""

from __future__ import annotations

import re
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from rl_pipeline.config import auto, resume, rules
from rl_pipeline.config.options import PLANNED, groups, known_keys, near, options_of, planned
from rl_pipeline.config.settings import Settings
from rl_pipeline.errors import ConfigError


def load(cfg: DictConfig, overrides: list[str] | None = None) -> Settings:
    """Check the composed configuration; `overrides` are those that it was composed with.

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
    if values.get("resume") and overrides is not None:
        resume.as_begun(values, overrides)
    try:
        values, chosen = auto.resolve(values)
        settings = Settings.chosen_by(chosen, values)
    except ValidationError as error:
        lines = [_explain(e, values) for e in error.errors()]
        raise ConfigError("\n".join(lines)) from None
    rules.check(settings)
    return settings


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
                    return planned(group, str(given))
                return f"{key}={given}: {options_of(group, str(given))}"
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


def job_config(config: DictConfig) -> DictConfig:
    """`config` without Hydra's own node."""
    plain = OmegaConf.masked_copy(config, [str(k) for k in config if k != "hydra"])
    assert isinstance(plain, DictConfig)
    return plain
