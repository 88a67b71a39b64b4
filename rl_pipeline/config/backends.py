"""Traits of the backends: the one table that rules, `auto` and the thread plan read.

A new backend is a line here, an adapter in envs/, a branch of `make_envs` and an option file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

BackendName = Literal[
    "gymnasium", "gymnasium_async", "gymnasium_native", "envpool", "envpool_async"
]
KINDS = ("classic", "mujoco", "atari", "other")


@dataclass(frozen=True)
class Backend:
    """Traits of a backend."""

    steps: Literal["loop", "processes", "vector"]
    """One environment after the other, each in a process of its own, or all by one library call."""
    package: str | None = None
    """Package that must be installed besides Gymnasium."""
    own_ids: bool = False
    """It knows tasks by names of its own (`env.envpool_id`) and refuses others."""
    threaded: tuple[str, ...] = ()
    """Kinds of environment that it steps in threads of its own (`backend.num_threads`)."""
    wrappers: bool = False
    """It can apply `env.wrappers`."""
    least_lanes: int = 1
    most_lanes: int | None = 1
    """None: as many as there are environments."""


BACKENDS: dict[BackendName, Backend] = {
    "gymnasium": Backend("loop", wrappers=True),
    "gymnasium_async": Backend("processes", wrappers=True, most_lanes=None),
    "gymnasium_native": Backend("vector", threaded=("atari",)),
    "envpool": Backend("vector", "envpool", own_ids=True, threaded=KINDS),
    "envpool_async": Backend(
        "vector", "envpool", own_ids=True, threaded=KINDS, least_lanes=2, most_lanes=None
    ),
}


def those(which: Callable[[Backend], bool]) -> str:
    """The options that have a trait, for the end of a message."""
    return " or ".join(f"backend={name}" for name, traits in BACKENDS.items() if which(traits))
