"""Plain `key=value` command lines of the doors that are no Hydra apps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from rl_pipeline.config import near
from rl_pipeline.files import working_directory
from rl_pipeline.settings import ConfigError, Frozen


def usage(model: type[Frozen]) -> str:
    """One argument per line."""
    lines = [
        f"  {name + '=':11} {' '.join((field.description or '').split())}"
        for name, field in model.model_fields.items()
    ]
    return "\n".join(lines)


def _value(text: str, kind: Any) -> Any:
    """As Hydra reads numbers and null; a name stays the text it is: `%`, `2024` and `it's` too."""
    if text == "null":
        return None
    if kind in (str, str | None, Path, Path | None):
        return text
    try:
        return OmegaConf.from_dotlist([f"value={text}"])["value"]
    except (yaml.YAMLError, OmegaConfBaseException):
        return text


Model = TypeVar("Model", bound=Frozen)


def parse(model: type[Model], argv: list[str]) -> Model:
    """Checked arguments; raises ConfigError naming bad keys with the nearest valid ones."""
    valid = list(model.model_fields)
    values = {}
    for argument in argv:
        key, equals, value = argument.partition("=")
        if not equals:
            raise ConfigError(f"{argument} is no key=value")
        if key not in valid:
            raise ConfigError(f"{key} is no argument here{near(key, valid)}")
        values[key] = _value(value, model.model_fields[key].annotation)
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
    from rl_pipeline.settings import TrackingSettings
    from rl_pipeline.telemetry import stores

    try:
        stores.check_no_secret("uri", given)
        store = TrackingSettings(name="mlflow", uri=given)
        uri = stores.resolve(store, working_directory(), dict(os.environ))[0]
        stores.check_driver(uri, "tracking.uri" if given else "MLFLOW_TRACKING_URI")
        return uri
    except ValueError as error:
        raise ConfigError(str(error).replace("tracking.uri", "uri")) from None
