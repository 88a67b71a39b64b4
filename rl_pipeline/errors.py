"""The error that every room raises for the user, and every door answers."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting that cannot be: the message names it and the way out."""
