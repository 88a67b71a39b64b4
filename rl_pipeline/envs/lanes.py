"""Several vectors of environments as one: while one lane steps, the policy acts for another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np

from rl_pipeline.types import Episode, Step, VecEnv


class Lanes:
    """Lanes of equal environments side by side; environment ids count through all lanes.

    `lanes[i].send(...)` and `.recv()` step one lane; the rest of the contract (`reset`, `step`,
    `pop_episodes`, `close`) covers all of them. Lanes that step in the calling thread gain nothing.
    """

    def __init__(
        self,
        lanes: Sequence[VecEnv],
        backend: str,
        overlap: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`overlap` is entered while one lane steps and the policy acts for another."""
        self.overlap = overlap
        first, total = 0, sum(lane.spec.num_envs for lane in lanes)
        self.lanes = []
        for lane in lanes:
            self.lanes.append(_Lane(lane, first))
            first += lane.spec.num_envs
        self.spec = replace(lanes[0].spec, num_envs=total, backend=backend)

    def reset(self) -> np.ndarray:
        """Start all episodes anew; returns obs [N, *obs_shape]."""
        return np.concatenate([lane.reset() for lane in self.lanes])

    def send(self, action: np.ndarray) -> None:
        """Start a step of all lanes with action [N, ...]."""
        for lane in self.lanes:
            lane.send(action[lane.columns])

    def recv(self) -> Step:
        """Wait for the step of all lanes."""
        steps = [lane.recv() for lane in self.lanes]
        return Step._make(np.concatenate(column) for column in zip(*steps, strict=True))

    def step(self, action: np.ndarray) -> Step:
        """`send` and `recv`."""
        self.send(action)
        return self.recv()

    def pop_episodes(self) -> list[Episode]:
        """The full games that ended since the last call."""
        return [game for lane in self.lanes for game in lane.pop_episodes()]

    def state(self) -> bytes | None:
        """None: lanes run on backends that cannot say where they are."""
        return None

    def load_state(self, state: bytes) -> np.ndarray:
        """Refused where `state` is None."""
        raise ValueError(f"{self.spec.backend} cannot continue from a saved state")

    def close(self) -> None:
        """Free all resources; a second call does nothing."""
        for lane in self.lanes:
            lane.close()


def as_lanes(envs: VecEnv) -> Lanes:
    """A plain vector of environments is one lane."""
    return envs if isinstance(envs, Lanes) else Lanes([envs], envs.spec.backend)


class _Lane:
    """One lane under the ids it has among all."""

    def __init__(self, envs: VecEnv, first: int) -> None:
        self._envs, self._first = envs, first
        self.columns = slice(first, first + envs.spec.num_envs)
        self._env_ids = np.arange(self.columns.start, self.columns.stop, dtype=np.int32)
        self._env_ids.flags.writeable = False
        self.reset, self.send, self.close = envs.reset, envs.send, envs.close
        self.recv = envs.recv if first == 0 else self._recv

    def _recv(self) -> Step:
        return self._envs.recv()._replace(env_ids=self._env_ids)

    def pop_episodes(self) -> list[Episode]:
        games = self._envs.pop_episodes()
        return [game._replace(env_id=game.env_id + self._first) for game in games]
