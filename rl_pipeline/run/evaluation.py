"""Greedy policy on fresh seeds: full games, raw rewards."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rl_pipeline.types import VecEnv


def evaluate(
    envs: VecEnv,
    act: Callable[[np.ndarray], np.ndarray],
    episodes: int,
    max_steps: int,
    stop: Callable[[], object] = lambda: False,
) -> np.ndarray | None:
    """Scores of `episodes` full games, raw rewards; None once `stop()` is true.

    Every environment plays a share fixed beforehand: taking the first games to finish would count
    short ones too often. A game that runs longer than `max_steps` agent steps counts with the
    score it has then, and is its environment's last: fewer scores come back.
    """
    num_envs = envs.spec.num_envs
    share = np.full(num_envs, episodes // num_envs)
    share[: episodes % num_envs] += 1
    scores: list[float] = []
    running, length = np.zeros(num_envs), np.zeros(num_envs, int)
    obs = envs.reset()
    while share.any():
        if stop():
            return None
        step = envs.step(act(obs))
        obs = step.obs
        running += step.raw_reward * step.valid
        length += step.valid
        for game in envs.pop_episodes():
            if share[game.env_id] > 0:
                scores.append(game.return_raw)
                share[game.env_id] -= 1
            running[game.env_id] = length[game.env_id] = 0
        for i in np.flatnonzero((length >= max_steps) & (share > 0)):
            scores.append(float(running[i]))
            share[i] = 0
    return np.array(scores)
