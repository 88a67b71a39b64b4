"""Hydra's errors in the user's words."""

from __future__ import annotations

import re

from hydra.errors import OverrideParseException

from rl_pipeline import terminal
from rl_pipeline.config.options import (
    PLANNED,
    groups,
    known_keys,
    launcher_keys,
    near,
    option_file,
    options_of,
    planned,
)

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
        if homes := [group for group in groups() if not value and option_file(group, key)]:
            hint = f"; did you mean {homes[0]}={key}?"
        return f"{error.override}: {why}{hint}"
    if found := re.search(r"Ambiguous value for argument '([^=']+)=(.*?)'\n", text):
        key, value = found.groups()
        return f"{key}={value}: several values make a sweep, add -m; one list is {key}=[{value}]"
    if found := re.search(r"Could not find '([\w/]+)/([^'/]*)'", text):
        group, option = found.groups()
        if option in PLANNED.get(group, ()):
            return planned(group, option)
        return f"{group}={option} does not exist here; {options_of(group, option)}"
    if found := re.search(r"Could not override '([^']+)'", text):
        key = found.group(1).split("@")[0]
        if key == "env.kwargs":
            return f"{key} gets new arguments with a plus: +{key}=..., or +{key}.name=..."
        if key in groups():
            return f"{key} cannot be overridden there: {cause or text}"
        if key in known_keys():
            group = key.split(".")[0]
            return f"{key} is not a setting of the chosen {group}, only of others; leave it out"
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
