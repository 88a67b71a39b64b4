"""From seconds by phase to a sentence: what bounds a run, and what it could gain at most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WORDS = {
    "env": "the environments",
    "act": "acting",
    "preprocess": "laying out observations",
    "store": "storing",
    "sample": "drawing from replay",
    "learn": "learning",
    "h2d": "copies to the device",
    "d2h": "copies from the device",
    "log": "logging",
    "eval": "evaluations",
    "checkpoint": "checkpoints",
    "compile": "compilation",
    "other": "Python between the phases",
}
"""Phases as a reader knows them."""
ASIDE = ("eval", "checkpoint", "compile")
"""Phases that are no part of the steady rate."""
WAITS = 0.3
"""A part with fewer CPU seconds per second waits, for I/O, a timer or another machine."""
EVEN = 1.15
"""Two phases whose shares are that close bound a run together."""


@dataclass(frozen=True)
class Share:
    """One phase of the training time."""

    phase: str
    share: float
    bound: float
    """How many times as fast the run would be if the phase cost nothing (Amdahl)."""

    @property
    def words(self) -> str:
        """Its name in a sentence."""
        return WORDS.get(self.phase, self.phase)


def shares(seconds: Mapping[str, float]) -> list[Share]:
    """Phases of training by their share, the largest first; `seconds` by phase."""
    training = {name: s for name, s in seconds.items() if name not in ASIDE and s > 0}
    total = sum(training.values())
    found = [
        Share(name, s / total, 1 / (1 - s / total) if s < total else float("inf"))
        for name, s in training.items()
    ]
    return sorted(found, key=lambda x: -x.share)


def sentence(
    found: list[Share], busy: Mapping[str, float] | None = None, efficiency: float | None = None
) -> str:
    """The verdict; `busy` are CPU seconds per second of parts, where they were measured alone."""
    if not found:
        return "nothing was measured: the run was too short"
    first, *rest = found
    said = f"bound by {first.words}: {first.share:.0%} of the time"
    if rest and rest[0].share * EVEN >= first.share:
        said = (
            f"bound by {first.words} and {rest[0].words}: {first.share:.0%} and "
            f"{rest[0].share:.0%} of the time"
        )
    if (busy or {}).get(first.phase, 1.0) < WAITS:
        said += ", nearly all of which it waits and does not compute"
    said += f"; were that free, at most {first.bound:.1f}x as fast"
    if efficiency is not None:
        said += f". The run reaches {efficiency:.0%} of what its parts reach alone"
    return said
