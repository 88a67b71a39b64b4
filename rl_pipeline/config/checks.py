"""Checks before a run begins: places, secrets, and what this machine cannot do."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from rl_pipeline.config import memory
from rl_pipeline.config.folders import find_run
from rl_pipeline.config.settings import Settings
from rl_pipeline.errors import ConfigError
from rl_pipeline.files import working_directory
from rl_pipeline.redaction import holds_secret


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


def check_machine(settings: Settings, here: bool = True) -> None:
    """Refuse what this machine cannot do, as far as that is known without heavy imports.

    `here`: the run is for this machine and not for one of a cluster. Raises ConfigError.
    """
    from importlib.metadata import version
    from importlib.util import find_spec

    from rl_pipeline.config import stores
    from rl_pipeline.config.stores import kept_uri

    package = settings.backend.traits.package
    if package and find_spec(package) is None:
        raise ConfigError(
            f"backend={settings.backend.name} needs the {package} package; use backend=gymnasium"
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
        check_no_secret("tracking.uri", tracking.uri)
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


def check_no_secret(key: str, text: str | None) -> None:
    """Raise ConfigError for a password or token in a setting: all of them are recorded."""
    if text and holds_secret(text):
        raise ConfigError(
            f"{key} holds a password, token or key, which would be recorded with every run; set "
            "the address as the environment variable MLFLOW_TRACKING_URI and leave it out here"
        )


def check_no_secrets(overrides: Iterable[str]) -> None:
    """The same for a command line, or for the lines of a configuration."""
    for override in overrides:
        key = re.split("[=:]", override, maxsplit=1)[0].strip().lstrip("+~- ")
        check_no_secret(key, override)
