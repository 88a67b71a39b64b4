"""Plain `key=value` command lines of the doors that are no Hydra apps."""

from __future__ import annotations

import os
from typing import Any, TypeVar

from pydantic import ValidationError

from rl_pipeline.config import checks
from rl_pipeline.config.options import near
from rl_pipeline.config.settings import Frozen
from rl_pipeline.errors import ConfigError
from rl_pipeline.files import working_directory


def usage(model: type[Frozen]) -> str:
    """One argument per line."""
    lines = [
        f"  {name + '=':11} {' '.join((field.description or '').split())}"
        for name, field in model.model_fields.items()
    ]
    return "\n".join(lines)


Model = TypeVar("Model", bound=Frozen)


def parse(model: type[Model], argv: list[str]) -> Model:
    """Checked arguments; raises ConfigError naming bad keys with the nearest valid ones."""
    valid = list(model.model_fields)
    values: dict[str, str | None] = {}
    for argument in argv:
        key, equals, value = argument.partition("=")
        if not equals:
            raise ConfigError(f"{argument} is not key=value")
        if key not in valid:
            raise ConfigError(f"{key} is not an argument{near(key, valid)}")
        # The text that it is, so that any name or path is one: no grammar, no quotes of its own.
        values[key] = None if value == "null" else value
    try:
        return model.model_validate(values)
    except ValidationError as error:
        lines = [
            (f"{e['loc'][0]}={e['input']}: " if e["loc"] else "")
            + e["msg"].removeprefix("Value error, ")
            for e in error.errors()
        ]
        raise ConfigError("\n".join(lines)) from None


def store_uri(given: str | None) -> str:
    """The store that a door reads; raises ConfigError for one that cannot be."""
    from rl_pipeline.config import stores
    from rl_pipeline.config.settings import TrackingSettings

    try:
        checks.check_no_secret("uri", given)
        store = TrackingSettings(name="mlflow", uri=given)
        uri = stores.resolve(store, working_directory(), dict(os.environ))[0]
        stores.check_driver(uri, "tracking.uri" if given else "MLFLOW_TRACKING_URI")
        return uri
    except ValueError as error:
        raise ConfigError(str(error).replace("tracking.uri", "uri")) from None


def names(value: Any) -> Any:
    """`a,b` or `[a,b]` as a list; anything else as it is."""
    if not isinstance(value, str):
        return value
    return [v.strip() for v in value.removeprefix("[").removesuffix("]").split(",") if v.strip()]


def levels(value: Any) -> Any:
    """`backend=gymnasium,precision=fp32` as a dict; raises ValueError."""
    if not isinstance(value, str):
        return value
    pairs = [part.partition("=") for part in value.split(",")]
    if not all(equals for _, equals, _ in pairs):
        raise ValueError("give settings, e.g. baseline=backend=gymnasium")
    return {key.strip(): level.strip() for key, _, level in pairs}
