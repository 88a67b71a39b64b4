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
            case "text":
                self.observation_space = gym.spaces.Dict(
                    a=gym.spaces.Box(0, 3, (1,)), b=gym.spaces.Tuple([gym.spaces.Text(9)])
                )
            case "grid":
                self.action_space = gym.spaces.MultiDiscrete([[2, 2], [2, 2]])
            case "integers":
                self.action_space = gym.spaces.Box(0, 9, (2,), np.int32)
            case "several":
                self.action_space = gym.spaces.Dict(a=gym.spaces.Discrete(2))


class Parts(Counting):
    """A Counting whose count is seen in parts of every kind, nested."""

    def __init__(self):
        super().__init__()
        self.observation_space = gym.spaces.Dict(
            box=gym.spaces.Box(-9, 9, (2, 1), np.float64),
            one=gym.spaces.Discrete(4, start=-1),
            rest=gym.spaces.Tuple(
                [gym.spaces.MultiBinary(2), gym.spaces.MultiDiscrete([2, 4], start=[0, 5])]
            ),
        )

    def _observe(self):
        n = self._count
        box = np.array([[n], [-n]], np.float64)
        bits = np.array([n & 1, n >> 1], np.int8)
        return {"box": box, "one": np.int64(n - 1), "rest": (bits, np.array([n % 2, n + 5]))}


class Match(gym.Env):
    """Rewards each place of the action that is what the observation says; ends after 8 steps."""

    def __init__(self, space: str):
        match space:
            case "multi":
                self.action_space = gym.spaces.MultiDiscrete([3, 4], start=[0, 2])
                self._choices = np.array([3, 4])
            case "binary":
                self.action_space = gym.spaces.MultiBinary(3)
                self._choices = np.array([2, 2, 2])
            case "start":
                self.action_space = gym.spaces.Discrete(3, start=-1)
                self._choices = np.array([3])
        self._first = getattr(self.action_space, "start", 0)
        self.observation_space = gym.spaces.MultiDiscrete(self._choices)

    def _observe(self):
        self._wanted = self.np_random.integers(self._choices)
        return self._wanted

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._count = 0
        return self._observe(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        reward = float(np.mean(action - self._first == self._wanted))
        self._count += 1
        return self._observe(), reward, False, self._count >= 8, {}


class Doubled(gym.ObservationWrapper):
    """Observes twice as much, plus `more`."""

    def __init__(self, env: gym.Env, more: float = 0):
        super().__init__(env)
        self.observation_space = gym.spaces.Box(0, 99, (1,), np.float32)
        self._more = more

    def observation(self, obs):
        return obs * np.float32(2) + np.float32(self._more)


def not_a_wrapper(env: gym.Env) -> int:
    return 3


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


for _env in (Counting, Scripted, Odd, Parts, Match, Reach, Pickles, Faulty):
    gym.register(f"{_env.__name__}-v0", entry_point=_env)


class Clock:
    """Time that moves only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def ns(self) -> int:
        return round(self.now * 1e9)
