"""Pacing: how many updates the environment steps so far have earned."""

from __future__ import annotations

from fractions import Fraction
from typing import Any


class Pace:
    """updates x batch_size = replay_ratio x env steps since learning began, at every turn.

    Held in whole numbers: never more than one update (with a burst: one burst) behind, whatever the
    number of environments and after every resume.
    """

    def __init__(
        self, batch_size: int, replay_ratio: float, learning_starts: int, burst: int = 1
    ) -> None:
        self.batch_size, self._learning_starts = batch_size, learning_starts
        self._burst = burst
        per_step = Fraction(str(replay_ratio)) / batch_size
        self._updates, self._steps = per_step.numerator, per_step.denominator
        self._begin, self._given = learning_starts, 0

    def due(self, env_steps: int, size: int) -> int:
        """Updates to do now; `size` is what the replay buffer can draw from.

        Learning begins at `learning_starts`, or later with the first full batch in the buffer.
        """
        if env_steps <= self._begin:
            return 0
        if size < self.batch_size and not self._given:
            self._begin = env_steps
            return 0
        due = (env_steps - self._begin) * self._updates // self._steps - self._given
        due -= due % self._burst
        self._given += due
        return due

    def ratio(self, env_steps: int) -> float:
        """Transitions drawn per env step since learning began."""
        return self._given * self.batch_size / max(env_steps - self._begin, 1)

    def state_dict(self) -> dict[str, Any]:
        """When learning began and what it has been given since."""
        return {"begin": self._begin, "given": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self._begin, self._given = state["begin"], state["given"]

    def begin_anew(self, env_steps: int) -> None:
        """The replay buffer is empty: learning begins `learning_starts` from now."""
        self._begin, self._given = env_steps + self._learning_starts, 0
