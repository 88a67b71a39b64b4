"""Differences between backends on one task that nobody can remove: for every comparison to name.

Imports nothing heavy. `make parity` measures what is the same; this table says what is not.
"""

from __future__ import annotations

import re

from rl_pipeline.config.backends import BACKENDS

_ENVPOOL = {str(name) for name, traits in BACKENDS.items() if traits.package == "envpool"}

# Task ids (a pattern), the backends that differ from all others, and how.
# A task that never terminates has no such end.
_TERMINATES = r"(?!ALE/|Pendulum-|HalfCheetah-|HumanoidStandup-|Swimmer-|Reacher-|Pusher-).*"
KNOWN: tuple[tuple[str, set[str], str], ...] = (
    (r"ALE/.*", _ENVPOOL, "EnvPool 1.2 carries ALE 0.11.2, the others run the installed ale-py"),
    (
        r"ALE/.*",
        {"gymnasium_native"},
        "gymnasium_native (ALE's own vector form) fills a new episode's frame stack with black, "
        "the others with its first frame; it draws about one no-op less",
    ),
    (
        r"CartPole-.*",
        {"gymnasium_native"},
        "one random generator serves all environments of gymnasium_native",
    ),
    (
        _TERMINATES,
        _ENVPOOL,
        "an episode that terminates in exactly the step of its time limit counts as truncated on "
        "EnvPool, which does not tell, so that a learner bootstraps there; elsewhere it terminated",
    ),
)


def known_differences(task_id: str, backend_a: str, backend_b: str) -> list[str]:
    """Differences of the task of Gymnasium id `task_id` between two backends, in words."""
    return [
        text
        for pattern, backends, text in KNOWN
        if re.fullmatch(pattern, task_id) and (backend_a in backends) != (backend_b in backends)
    ]
