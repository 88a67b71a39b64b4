"""The synchronous loops: act, step, store, and learn from a full horizon or from replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from rl_pipeline.buffers.rollout import RolloutBuffer
from rl_pipeline.engine.phases import NullPhases, Phases
from rl_pipeline.envs.lanes import as_lanes
from rl_pipeline.loops.schedule import Pace
from rl_pipeline.telemetry.window import Window
from rl_pipeline.types import (
    Extras,
    Metrics,
    Policy,
    ReplayBuffer,
    ReplayLearner,
    RolloutLearner,
    Step,
    VecEnv,
)

Hook = Callable[[np.ndarray, Callable[[], Metrics]], bool]
"""`hook(obs, metrics)` runs where everything is consistent: the place to log, evaluate, save and
stop. `obs` [N, ...] is where the environments stand; True stops the loop."""
Store = Callable[[np.ndarray, np.ndarray, Extras, Step], None]
"""`add` of a buffer: obs [n, ...], what was done there [n, ...], what goes with it, its outcome."""


@dataclass
class Counters:
    """Three separate counts of work, and what came of it."""

    env_steps: int = 0
    """Valid agent steps summed over environments."""
    updates: int = 0
    """Optimizer steps applied; those that were refused leave it at the next log tick."""
    episodes: int = 0
    """Full games."""
    skipped_updates: int = 0
    """Optimizer steps refused because of non-finite gradients (precision=fp16)."""
    rollouts: int = 0

    def note_skipped(self, total: int) -> None:
        """Take `total` refused updates off the count, which only the device could tell."""
        self.updates -= total - self.skipped_updates
        self.skipped_updates = total


class Turns:
    """Act, step and store: the one source of rows, which every loop learns from.

    A turn is a row of one lane. A plain vector of environments is one lane: the policy acts at the
    start of a turn, with all that was learnt from the one before. With more (`backend.lanes`) it
    acts for a lane again as soon as its row is stored, and the lane steps while the others have
    their turns and the loop learns.
    """

    def __init__(
        self,
        envs: VecEnv,
        policy: Policy,
        store: Store,
        phases: Phases | NullPhases,
        counters: Counters,
        total_steps: int,
        obs: np.ndarray,
        lay_out: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> None:
        """`obs` [N, ...] is where the environments stand; schedules run over `total_steps`.

        `lay_out(obs)` gives observations as policy and buffer want them to lie in memory.
        """
        self._envs, self._policy, self._store = as_lanes(envs), policy, store
        self._phases, self._counters, self._total_steps = phases, counters, total_steps
        self._lay_out = lay_out
        seen = [obs[lane.columns] for lane in self._envs.lanes]
        self._seen = seen if lay_out is None else [lay_out(x) for x in seen]
        self._acted: list[tuple[np.ndarray, Extras]] = [(obs, {})] * len(self._seen)

    @property
    def progress(self) -> float:
        """Share of the run that is done, in [0, 1]."""
        return min(self._counters.env_steps / self._total_steps, 1.0)

    @property
    def obs(self) -> np.ndarray:
        """Current observations, [N, ...]; as a whole only between rounds."""
        return self._seen[0] if len(self._seen) == 1 else np.concatenate(self._seen)

    def take(self, rounds: int | None = None) -> Iterator[bool]:
        """Play `rounds` rows of every lane, or rows without end; yields after each turn.

        True where it was the last of its round: every lane has had its turn. After the last round
        nothing is under way.
        """
        ahead = len(self._seen) > 1
        if ahead:
            for i in range(len(self._seen)):
                self._act(i)
        for left in repeat(1) if rounds is None else reversed(range(rounds)):
            for i, lane in enumerate(self._envs.lanes):
                if ahead:
                    with self._phases("env"):
                        step = lane.recv()
                else:
                    # As `_act` does, with one phase less: a turn of a single lane costs 3 us.
                    with self._phases("act"):
                        acted = self._acted[i] = self._policy.act(self._seen[i], self.progress)
                    with self._phases("env"):
                        lane.send(acted[0])
                        step = lane.recv()
                with self._phases("store"):
                    self._store(self._seen[i], *self._acted[i], step)
                self._seen[i] = step.obs
                if self._lay_out is not None:
                    with self._phases("preprocess"):
                        self._seen[i] = self._lay_out(step.obs)
                self._counters.env_steps += int(np.count_nonzero(step.valid))
                if ahead and left:
                    self._act(i)
                yield lane is self._envs.lanes[-1]

    def _act(self, i: int) -> None:
        with self._phases("act"), self._envs.overlap():
            self._acted[i] = self._policy.act(self._seen[i], self.progress)
        with self._phases("env"):
            self._envs.lanes[i].send(self._acted[i][0])


def run(
    envs: VecEnv,
    buffer: RolloutBuffer,
    learner: RolloutLearner,
    phases: Phases | NullPhases,
    counters: Counters,
    total_steps: int,
    obs: np.ndarray,
    after_update: Hook,
) -> None:
    """Train on rollouts until `after_update` says stop; schedules run over `total_steps`.

    `obs` [N, ...] is where the environments stand; the hook runs between rollouts, each of which
    is acted with one policy.
    """
    turns = Turns(
        envs, learner.policy, buffer.add, phases, counters, total_steps, obs,
        buffer.laid_out if buffer.images else None,
    )  # fmt: skip
    window = Window()
    while True:
        # As of the rollout's start: the first update gets the full rate, the last one not 0.
        progress = turns.progress
        for _ in turns.take(buffer.horizon):
            pass
        with phases("h2d"):
            rollout = buffer.take(turns.obs)
        with phases("learn"):
            metrics, updates = learner.update(rollout, progress)
        counters.rollouts += 1
        counters.updates += updates
        window.add(metrics)
        if after_update(turns.obs, window.read):
            return


def run_replay(
    envs: VecEnv,
    buffer: ReplayBuffer,
    learner: ReplayLearner,
    phases: Phases | NullPhases,
    pace: Pace,
    counters: Counters,
    total_steps: int,
    obs: np.ndarray,
    after_round: Hook,
) -> None:
    """Train on replay until `after_round` says stop: play a turn, and learn what is due.

    `obs` [N, ...] is where the environments stand; the hook runs when every lane has had its turn;
    schedules run over `total_steps`.
    """
    turns = Turns(envs, learner.policy, buffer.add, phases, counters, total_steps, obs)

    def metrics() -> Metrics:
        return {
            **learner.metrics(turns.progress),
            "replay/size": float(buffer.size),
            "replay/ratio": pace.ratio(counters.env_steps),
        }

    for round_ends in turns.take():
        for _ in range(pace.due(counters.env_steps, buffer.size)):
            with phases("sample"):
                batch = buffer.sample(pace.batch_size, turns.progress)
            with phases("learn"):
                priorities = learner.update(batch, turns.progress)
            if buffer.prioritized:
                with phases("store"):
                    buffer.update_priorities(batch.ids, priorities)
            counters.updates += 1
        if round_ends and after_round(turns.obs, metrics):
            return
