"""The textbook way to step several environments: the measured baseline, used nowhere else."""

from __future__ import annotations

from typing import Any

import numpy as np

from rl_pipeline.config.settings import EnvSettings
from rl_pipeline.envs.base import env_seeds
from rl_pipeline.envs.gymnasium import make_env
from rl_pipeline.types import Episode, Step


class NaiveEnvs:
    """A Python loop over single environments, each accounted for on its own (NEXT_STEP).

    What it returns is a `Step` like that of every backend; it checks nothing.
    """

    def __init__(self, env: EnvSettings, num_envs: int, seed: int) -> None:
        self.envs: list[Any] = [make_env(env, informs=True) for _ in range(num_envs)]
        self.atari = env.kind == "atari"
        self.clip = env.atari is not None and env.atari.clip_reward
        self.seeds: list[int | None] = [*env_seeds(seed, num_envs)]
        self.episodes: list[Episode] = []

    def reset(self) -> np.ndarray:
        """Start all episodes anew; returns obs [N, *obs_shape]."""
        num_envs = len(self.envs)
        self.done = [False] * num_envs
        self.return_raw, self.return_train = [0.0] * num_envs, [0.0] * num_envs
        self.length = [0] * num_envs
        observations = []
        for env, seed in zip(self.envs, self.seeds, strict=True):
            obs, _ = env.reset(seed=seed)
            observations.append(np.array(obs))
        self.seeds = [None] * num_envs
        return self._stack(observations)

    def step(self, actions: np.ndarray) -> Step:
        """One step of each environment, one after the other."""
        observations, rewards, raw_rewards = [], [], []
        terminations, truncations, valid = [], [], []
        for i, env in enumerate(self.envs):
            if self.done[i]:
                obs, info = env.reset()
                raw_reward, terminated, truncated = 0.0, False, False
                game_ended = info.get("game_ended", False)
                valid.append(False)
            else:
                obs, raw_reward, terminated, truncated, info = env.step(actions[i])
                self.length[i] += 1
                game_ended = info.get("game_ended", terminated or truncated)
                valid.append(True)
            reward = float(np.sign(raw_reward)) if self.clip else float(raw_reward)
            self.return_raw[i] += float(raw_reward)
            self.return_train[i] += reward
            self.done[i] = terminated or truncated
            if game_ended:
                game = Episode(i, self.return_raw[i], self.return_train[i], self.length[i])
                self.episodes.append(game)
                self.return_raw[i], self.return_train[i], self.length[i] = 0.0, 0.0, 0
            observations.append(np.array(obs))
            rewards.append(reward)
            raw_rewards.append(raw_reward)
            terminations.append(terminated)
            truncations.append(truncated)
        return Step(
            self._stack(observations),
            np.array(rewards, np.float32), np.array(raw_rewards, np.float32),
            np.array(terminations), np.array(truncations), np.array(valid),
            np.arange(len(self.envs), dtype=np.int32),
        )  # fmt: skip

    def pop_episodes(self) -> list[Episode]:
        """The full games that ended since the last call."""
        episodes, self.episodes = self.episodes, []
        return episodes

    def close(self) -> None:
        """Close every environment."""
        for env in self.envs:
            env.close()

    def _stack(self, observations: list[np.ndarray]) -> np.ndarray:
        stacked = np.stack(observations)
        return stacked.astype(np.float32) if stacked.dtype == np.float64 else stacked
