"""Environments whose every number is known: import this module to register them."""

from __future__ import annotations

import os
import signal
import threading
import time

import gymnasium as gym
import numpy as np


class Counting(gym.Env):
    """Observes the number of steps since reset, rewards 1 each, ends at step 3."""

    def __init__(self, terminates: bool = False, same_array: bool = False, dtype: str = "float32"):
        """`terminates`: the end is a termination; `same_array`: returns and mutates one array."""
        self.observation_space = gym.spaces.Box(0, 3, (1,), dtype)
        self.action_space = gym.spaces.Discrete(2)
        self._terminates = terminates
        self._same_array = same_array
        self._obs = np.zeros(1, dtype)
        self._count = 0

    def _observe(self) -> np.ndarray:
        self._obs[:] = self._count
        return self._obs if self._same_array else self._obs.copy()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._count = 0
        return self._observe(), {}

    def step(self, action):
        self._count += 1
        end = self._count >= 3
        return self._observe(), 1.0, end and self._terminates, end and not self._terminates, {}


class Scripted(Counting):
    """A Counting whose rewards, and so its length, are given."""

    def __init__(self, rewards: tuple[float, ...] = (5, -3, 10), nan_obs_at: int | None = None):
        super().__init__()
        self._rewards = rewards
        self._nan_obs_at = nan_obs_at

    def _observe(self) -> np.ndarray:
        obs = super()._observe()
        return obs * np.nan if self._count == self._nan_obs_at else obs

    def step(self, action):
        reward = self._rewards[self._count]
        self._count += 1
        return self._observe(), reward, self._count >= len(self._rewards), False, {}


class Odd(Counting):
    """A Counting with spaces of another kind."""

    def __init__(self, space: str = "obs"):
        super().__init__()
        match space:
            case "obs":
                self.observation_space = gym.spaces.Dict(a=gym.spaces.Box(0, 3, (1,)))
            case "multi":
                self.action_space = gym.spaces.MultiDiscrete([2, 2])
            case "start":
                self.action_space = gym.spaces.Discrete(2, start=1)


class Reach(Counting):
    """Moves by its action, which lies in [-0.5, 1]; rewards what it was really given."""

    def __init__(self):
        super().__init__()
        self.action_space = gym.spaces.Box(-0.5, 1.0, (1,), np.float64)

    def step(self, action):
        assert action.dtype == np.float64
        return self._observe(), float(action[0]), False, False, {}


class Pickles(Counting, gym.utils.EzPickle):
    """A Counting that pickles by its constructor's arguments, so loses its count."""

    def __init__(self):
        Counting.__init__(self)
        gym.utils.EzPickle.__init__(self)


class Faulty(gym.Env):
    """Fails at its third step if that is action 1: raises, dies, or hangs."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, how: str = "raise"):
        self._how = how
        self._steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self._steps += 1
        if self._steps == 3 and action == 1:
            if self._how == "raise":
                error = RuntimeError("the simulator lost its mind")
                error.lock = threading.Lock()  # does not pickle
                raise error
            if self._how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)
        return np.zeros(1, np.float32), 1.0, False, False, {}


for _env in (Counting, Scripted, Odd, Reach, Pickles, Faulty):
    gym.register(f"{_env.__name__}-v0", entry_point=_env)
