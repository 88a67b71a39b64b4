"""Environments that do what foreign code may do: import this module to register them."""

from __future__ import annotations

import random
from collections import deque

import gymnasium as gym
import numpy as np
import torch

SHARED = np.zeros(2, np.float32)


class Greedy(gym.Env):
    """Writes into the actions it gets and the observations it gave, and keeps both.

    It observes (its number of steps, the action it got, of its first place).
    """

    def __init__(self, actions: str = "multi", obs: str = "box", shared: bool = False):
        self.action_space = {
            "discrete": gym.spaces.Discrete(3),
            "multi": gym.spaces.MultiDiscrete([3, 3]),
            "binary": gym.spaces.MultiBinary(2),
            "box": gym.spaces.Box(-1, 1, (2,), np.float32),
            "number": gym.spaces.Box(-1, 1, (), np.float32),
        }[actions]
        box = gym.spaces.Box(-100, 100, (2,), np.float32)
        self.observation_space = gym.spaces.Dict(a=box) if obs == "dict" else box
        self._nested = obs == "dict"
        self._given: list[np.ndarray] = []
        self._taken: list[np.ndarray] = []
        self._shared = shared

    def _observe(self, action):
        for old in self._given:
            old[...] = -99
        for old in self._taken:
            old[...] = 0
        obs = SHARED if self._shared else np.zeros(2, np.float32)
        obs[:] = self._count, np.ravel(action)[0]
        self._given = [obs]
        return {"a": obs} if self._nested else obs

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._count = 0
        return self._observe(0), {}

    def step(self, action):
        self._count += 1
        obs = self._observe(action)
        if isinstance(action, np.ndarray):
            action[...] = 1 - action
            self._taken = [action]
        return obs, 1.0, False, self._count >= 5, {}


class Chance(gym.Env):
    """Draws from every generator that it does not own; observes what it drew."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (6,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        self._made = random.random()

    def _observe(self):
        drawn = [random.random(), np.random.rand(), torch.rand(()).item(), self._made]
        drawn += [float(self.observation_space.sample()[0]), self.np_random.random()]
        return np.array(drawn)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._count = 0
        return self._observe(), {}

    def step(self, action):
        self._count += 1
        return self._observe(), 0.0, False, self._count >= 4, {}


class Thing:
    """Something an episode makes."""

    def __init__(self, value):
        self.value = value


class Rich(gym.Env):
    """Holds one of each kind of thing that is still data, some of it made by its episodes."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        self._own = np.random.default_rng(3)
        self._old = np.random.RandomState(4)
        self._plain = random.Random(5)
        total = 0.0

        def add(x):
            nonlocal total
            total = 0.5 * total + x
            return total

        self._add = add
        self._method = self._plain.random

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._things = [Thing(self._old.rand()), None]
        self._things[1] = self._things[0]
        self._line = deque([1.0, float("nan"), float("inf")], maxlen=3)
        self._table = {(1, 2): {3, 4}, "x": b"\x00\xff", None: np.float32(0.1), 7: (1, [2])}
        self._grid = np.asfortranarray(np.arange(6.0).reshape(2, 3))
        return self._observe(0.0), {}

    def _observe(self, x):
        self._things[0].value += self._own.random()
        self._line.append(x)
        self._grid *= 1.01
        both = self._things[1].value + self._grid.sum()
        return np.array([self._add(x), both, self._plain.random()], np.float32)

    def step(self, action):
        return self._observe(float(action)), 0.0, self._old.rand() < 0.1, False, {}


class Handles(gym.Env):
    """Holds something that is more than data."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, kind: str):
        first = np.zeros(3)
        self._held = {
            "iterator": iter([1, 2]),
            "view": (first, first[1:]),
            "objects": np.array([object()]),
            "file": open(__file__),  # noqa: SIM115
        }[kind]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}


class Tell(gym.Env):
    """Rewards the action that is what the observation says over its offset; 8 steps a game."""

    def __init__(self, offset: float = 0.0, dtype: str = "float64", shape: str = "vector"):
        self._dtype = np.dtype(dtype)
        places: tuple[int, ...] = () if shape == "number" else (2,)
        low, high = (-np.inf, np.inf) if self._dtype.kind == "f" else (0, 2**40)
        box = gym.spaces.Box(low, high, places, dtype)
        self.observation_space = gym.spaces.Dict(a=box) if shape == "dict" else box
        self._nested = shape == "dict"
        self.action_space = gym.spaces.Discrete(2)
        self._offset = offset

    def _observe(self):
        self._told = int(self.np_random.integers(2))
        space = self.observation_space["a"] if self._nested else self.observation_space
        obs = np.full(space.shape, self._offset, self._dtype)
        obs[...] = obs + self._told
        return {"a": obs} if self._nested else obs

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._count = 0
        return self._observe(), {}

    def _right(self, action):
        return float(action == self._told)

    def step(self, action):
        reward = self._right(action)
        self._count += 1
        return self._observe(), reward, False, self._count >= 8, {}


class Aim(Tell):
    """A Tell whose action is a number in [-1, 1]: right is the sign."""

    def __init__(self, shape: str = "number"):
        super().__init__(shape=shape)
        self.action_space = gym.spaces.Box(-1, 1, (), np.float32)

    def _right(self, action):
        assert isinstance(action, np.ndarray) and action.shape == ()
        assert self.action_space.contains(action)
        return float((action > 0) == bool(self._told))


class Picture(gym.Env):
    """Shows one image [1, 36, 36] of noise, always the same, in the range of its space."""

    def __init__(self, dtype: str, low: float, high: float):
        self.observation_space = gym.spaces.Box(low, high, (1, 36, 36), dtype)
        self.action_space = gym.spaces.Discrete(3)

    def _observe(self):
        share = np.random.default_rng(0).integers(0, 256, (1, 36, 36)) / 255
        low, high = self.observation_space.low, self.observation_space.high
        exact = low.astype(np.float64) + share * (high.astype(np.float64) - low)
        if self.observation_space.dtype.kind != "f":
            exact = exact.round()
        return exact.astype(self.observation_space.dtype)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action):
        return self._observe(), 0.0, False, False, {}


for _env in (Tell, Aim, Picture, Greedy, Chance, Rich, Handles):
    gym.register(f"{_env.__name__}-v0", entry_point=_env)
