"""The synchronous loops: act, step, store, and learn from a full horizon or from replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_pipeline.buffers.rollout import RolloutBuffer
from rl_pipeline.engine.phases import NullPhases, Phases
from rl_pipeline.envs.lanes import Lanes
from rl_pipeline.loops.schedule import Pace
from rl_pipeline.telemetry.window import Window
from rl_pipeline.types import Metrics, ReplayBuffer, ReplayLearner, RolloutLearner, Step, VecEnv

Hook = Callable[[np.ndarray, Callable[[], Metrics]], bool]
"""`hook(obs, metrics)` runs where everything is consistent: the place to log, evaluate, save and
stop. `obs` [N, ...] is where the environments stand; True stops the loop."""


@dataclass
class Counters:
    """Three separate counts of work, and what came of it."""

    env_steps: int = 0
    """Valid agent steps summed over environments."""
    updates: int = 0
    """Optimizer steps applied."""
    episodes: int = 0
    """Full games."""
    skipped_updates: int = 0
    """Optimizer steps refused because of non-finite gradients (precision=fp16)."""
    rollouts: int = 0


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

    `obs` [N, ...] is where the environments stand; the hook runs between rollouts.
    """
    progress, window = min(counters.env_steps / total_steps, 1.0), Window()
    while True:
        obs = collect(envs, buffer, learner, phases, counters, obs)
        with phases("h2d"):
            rollout = buffer.take(obs)
        with phases("learn"):
            metrics = learner.update(rollout, progress)
        # As of the rollout's begin: the first update gets the full rate, the last one not 0.
        progress = min(counters.env_steps / total_steps, 1.0)
        counters.rollouts += 1
        counters.updates += int(metrics["updates"])
        counters.skipped_updates += int(metrics.get("skipped_updates", 0))
        window.add(metrics)
        if after_update(obs, window.read):
            return


def collect(
    envs: VecEnv,
    buffer: RolloutBuffer,
    learner: RolloutLearner,
    phases: Phases | NullPhases,
    counters: Counters,
    obs: np.ndarray,
) -> np.ndarray:
    """Fill the buffer with one policy; returns obs [N, ...] after its last row.

    With lanes (`envs.lanes`), one half of the environments steps while the policy acts for the
    other; each row is still acted on with the weights that collect all of them.
    """
    if isinstance(envs, Lanes):
        with envs.overlap():
            return _collect_in_lanes(envs, buffer, learner, phases, counters, obs)
    while not buffer.full:
        with phases("act"):
            action, extras = learner.act(obs)
        with phases("env"):
            step = envs.step(action)
        with phases("store"):
            buffer.add(obs, action, extras, step)
        obs = step.obs
        counters.env_steps += int(np.count_nonzero(step.valid))
    return obs


def _collect_in_lanes(
    envs: Lanes,
    buffer: RolloutBuffer,
    learner: RolloutLearner,
    phases: Phases | NullPhases,
    counters: Counters,
    obs: np.ndarray,
) -> np.ndarray:
    seen = [obs[lane.columns] for lane in envs.lanes]
    acted: list[tuple[np.ndarray, dict[str, Any]]] = [(obs, {})] * len(seen)

    def act(i: int) -> None:
        with phases("act"):
            acted[i] = learner.act(seen[i])
        with phases("env"):
            envs.lanes[i].send(acted[i][0])

    for i in range(len(seen)):
        act(i)
    for row in reversed(range(buffer.horizon)):
        for i, lane in enumerate(envs.lanes):
            with phases("env"):
                step = lane.recv()
            with phases("store"):
                action, extras = acted[i]
                buffer.add(seen[i], action, extras, step)
            seen[i] = step.obs
            counters.env_steps += int(np.count_nonzero(step.valid))
            if row:
                act(i)
    return np.concatenate(seen)


def run_replay(
    envs: VecEnv,
    buffer: ReplayBuffer,
    learner: ReplayLearner,
    phases: Phases | NullPhases,
    pace: Pace,
    counters: Counters,
    total_steps: int,
    prioritized: bool,
    obs: np.ndarray,
    after_turn: Hook,
) -> None:
    """Train on replay until `after_turn` says stop: act, step, store, and learn what is due.

    `obs` [N, ...] is where the environments stand; the hook runs after every turn; schedules run
    over `total_steps`. A `prioritized` buffer is given the new priorities of what it drew.
    """
    learn = _Learning(buffer, learner, phases, pace, counters, total_steps, prioritized)
    if isinstance(envs, Lanes):
        return _run_replay_in_lanes(envs, learn, obs, after_turn)
    while True:
        with phases("act"):
            action = learner.act(obs, learn.progress)
        with phases("env"):
            step = envs.step(action)
        with phases("store"):
            buffer.add(obs, action, {}, step)
        obs = step.obs
        counters.env_steps += int(np.count_nonzero(step.valid))
        learn()
        if after_turn(obs, learn.metrics):
            return


@dataclass
class _Learning:
    """The half of a turn that needs no environment."""

    buffer: ReplayBuffer
    learner: ReplayLearner
    phases: Phases | NullPhases
    pace: Pace
    counters: Counters
    total_steps: int
    prioritized: bool

    @property
    def progress(self) -> float:
        """Of the run, in [0, 1]."""
        return min(self.counters.env_steps / self.total_steps, 1.0)

    def __call__(self) -> None:
        """Do the updates that are due."""
        progress = self.progress
        for _ in range(self.pace.due(self.counters.env_steps, self.buffer.size)):
            with self.phases("sample"):
                batch = self.buffer.sample(self.pace.batch_size, progress)
            with self.phases("learn"):
                priorities = self.learner.update(batch, progress)
            if self.prioritized:
                with self.phases("store"):
                    self.buffer.update_priorities(batch.ids, priorities)
            self.counters.updates += 1

    def metrics(self) -> Metrics:
        """Read at the log tick; the moment to find out which updates were skipped (fp16)."""
        metrics = dict(self.learner.metrics(self.progress))
        skipped = int(metrics.pop("skipped_updates", 0))
        self.counters.updates -= skipped - self.counters.skipped_updates
        self.counters.skipped_updates = skipped
        return {
            **metrics,
            "replay/size": float(self.buffer.size),
            "replay/ratio": self.pace.ratio(self.counters.env_steps),
        }


def _run_replay_in_lanes(envs: Lanes, learn: _Learning, obs: np.ndarray, after_turn: Hook) -> None:
    """One lane is acted on, and learning is done, while the others step."""
    buffer, learner, phases, counters = learn.buffer, learn.learner, learn.phases, learn.counters
    seen = [obs[lane.columns] for lane in envs.lanes]
    acted: list[np.ndarray] = []
    for i, lane in enumerate(envs.lanes):
        with phases("act"):
            acted.append(learner.act(seen[i], learn.progress))
        with phases("env"):
            lane.send(acted[i])
    while True:
        for i, lane in enumerate(envs.lanes):
            with phases("env"):
                step: Step = lane.recv()
            with phases("store"):
                buffer.add(seen[i], acted[i], {}, step)
            seen[i] = step.obs
            counters.env_steps += int(np.count_nonzero(step.valid))
            with phases("act"), envs.overlap():
                acted[i] = learner.act(seen[i], learn.progress)
            with phases("env"):
                lane.send(acted[i])
            learn()
        if after_turn(np.concatenate(seen), learn.metrics):
            return
