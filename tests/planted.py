"""Wrappers that each change a task in one way."""

from __future__ import annotations

import gymnasium as gym
import numpy as np


class Longer(gym.Wrapper):
    """Ignores the agent: pushes so that the pole stays up longer."""

    def step(self, action):
        angle, speed = self.unwrapped.state[2:]
        return self.env.step(int(angle + speed > 0))


class Richer(gym.RewardWrapper):
    """Pays half as much again."""

    def reward(self, reward):
        return 1.5 * reward


class Shifted(gym.Wrapper):
    """Starts a little further to the right, and says nothing of it later."""

    def reset(self, **options):
        obs, info = self.env.reset(**options)
        return obs + np.float32([0.05, 0, 0, 0]), info
