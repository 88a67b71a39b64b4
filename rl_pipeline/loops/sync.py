"""The synchronous loop: act, step, store, and learn whenever the buffer holds a horizon."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_pipeline.buffers.rollout import RolloutBuffer
from rl_pipeline.envs.lanes import Lanes
from rl_pipeline.phases import NullPhases, Phases
from rl_pipeline.types import Learner, Metrics, VecEnv


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
    learner: Learner,
    phases: Phases | NullPhases,
    counters: Counters,
    total_steps: int,
    obs: np.ndarray,
    after_update: Callable[[np.ndarray, Metrics], bool],
) -> None:
    """Train until `after_update` says stop; `total_steps` is what the schedules run over.

    `obs` [N, ...] is where the environments stand. `after_update(obs, metrics)` runs between
    rollouts, where everything is consistent: the place to log, evaluate, save and stop.
    """
    progress = min(counters.env_steps / total_steps, 1.0)
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
        if after_update(obs, metrics):
            return


def collect(
    envs: VecEnv,
    buffer: RolloutBuffer,
    learner: Learner,
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
    learner: Learner,
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
