# ruff: noqa: D102 (what the methods do is said at `Contender`)
"""The replay buffers that `bench.py` compares, each used as its own documentation shows.

Everybody gets the same steps of `NUM_ENVS` environments and must hand out torch tensors.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

import numpy as np
import torch

from rl_pipeline.buffers.replay import Priorities, Replay
from rl_pipeline.types import Continuous, Discrete, EnvSpec, Step

NUM_ENVS = 8
ALPHA, BETA = 0.6, 0.4


class Task:
    """Steps of one kind of observations."""

    def __init__(self, name: str) -> None:
        self.name, self.depth = name, 1
        rng = np.random.default_rng(0)
        if name == "atari":
            self.depth = 4
            action: Any = Discrete(6)
            self.spec = EnvSpec("atari", "b", NUM_ENVS, (4, 84, 84), np.dtype(np.uint8), action)
            frames = rng.integers(0, 255, (67, NUM_ENVS, 84, 84), np.uint8)
            self._obs = np.stack([frames[i : i + 64] for i in range(4)], 2)
        else:
            action = Continuous(-np.ones(6, np.float32), np.ones(6, np.float32))
            self.spec = EnvSpec("vector", "b", NUM_ENVS, (17,), np.dtype(np.float32), action)
            self._obs = rng.standard_normal((64, NUM_ENVS, 17)).astype(np.float32)
        self.ids = np.arange(NUM_ENVS, dtype=np.int32)
        self._rewards = rng.standard_normal((64, NUM_ENVS)).astype(np.float32)
        if name == "atari":
            self._actions = rng.integers(0, 6, (64, NUM_ENVS))
        else:
            self._actions = rng.standard_normal((64, NUM_ENVS, 6)).astype(np.float32)
        self.no, self.yes = np.zeros(NUM_ENVS, bool), np.ones(NUM_ENVS, bool)

    def step(self, t: int):
        """obs, action, reward, next_obs of step t: one endless game, frames in a cycle of 64."""
        i = t % 63
        return self._obs[i], self._actions[i], self._rewards[i], self._obs[i + 1]


class NotHere(Exception):
    """A contender that this machine's packages cannot run: why."""


class Contender(ABC):
    """One buffer under test."""

    @abstractmethod
    def add(self, t: int) -> None:
        """Store step t of all environments."""

    @abstractmethod
    def sample(self, batch: int) -> Any:
        """Torch tensors; what `update` needs."""

    def update(self, drawn: Any, priorities: np.ndarray) -> None:
        """New priorities of what was drawn."""
        raise NotImplementedError

    def fill(self, rows: int) -> None:
        """The first `rows` transitions."""
        for t in range(-(-rows // NUM_ENVS)):
            self.add(t)

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of what is stored."""


class Ours(Contender):
    """rl_pipeline."""

    def __init__(self, task: Task, capacity: int, prioritized: bool) -> None:
        priorities = Priorities(ALPHA, BETA) if prioritized else None
        self._rows = []
        for t in range(63):
            obs, action, reward, next_obs = task.step(t)
            step = Step(next_obs, reward, reward, task.no, task.no, task.yes, task.ids)
            self._rows.append((obs, action, step))
        self._buffer = Replay(
            task.spec, capacity, frame_stack=task.depth, priorities=priorities, seed=0
        )

    def add(self, t: int) -> None:
        obs, action, step = self._rows[t % 63]
        self._buffer.add(obs, action, {}, step)

    def fill(self, rows: int) -> None:
        for t in range(-(-rows // NUM_ENVS) + 1):
            if t % 63 == 0:
                self._buffer.cut()  # the cycle of frames begins anew
            self.add(t)

    def sample(self, batch: int) -> Any:
        return self._buffer.sample(batch)

    def update(self, drawn: Any, priorities: np.ndarray) -> None:
        self._buffer.update_priorities(drawn.ids, priorities)

    def nbytes(self) -> int:
        return self._buffer.nbytes


class Textbook(Contender):
    """A deque of tuples: what tutorials use. Only a baseline."""

    def __init__(self, task: Task, capacity: int, prioritized: bool) -> None:
        assert not prioritized
        self._task, self._rows = task, deque(maxlen=capacity)
        random.seed(0)

    def add(self, t: int) -> None:
        obs, action, reward, next_obs = self._task.step(t)
        for e in range(NUM_ENVS):
            self._rows.append(
                (obs[e].copy(), action[e].copy(), reward[e], next_obs[e].copy(), False)
            )

    def sample(self, batch: int) -> Any:
        rows = random.sample(self._rows, batch)
        return [torch.from_numpy(np.array(column)) for column in zip(*rows, strict=True)]

    def nbytes(self) -> int:
        obs, action, *_ = self._rows[0]
        return len(self._rows) * (2 * obs.nbytes + action.nbytes + 4 + 1)


class StableBaselines3(Contender):
    """stable_baselines3.common.buffers.ReplayBuffer, in numpy; it has no priorities."""

    def __init__(self, task: Task, capacity: int, prioritized: bool) -> None:
        from gymnasium import spaces
        from stable_baselines3.common.buffers import ReplayBuffer

        assert not prioritized
        spec = task.spec
        low, high = (0, 255) if spec.obs_dtype == np.uint8 else (-np.inf, np.inf)
        action = (
            spaces.Discrete(spec.action.num_actions)
            if isinstance(spec.action, Discrete)
            else spaces.Box(spec.action.low, spec.action.high)
        )
        self._task = task
        self._buffer = ReplayBuffer(
            capacity, spaces.Box(low, high, spec.obs_shape, spec.obs_dtype.type), action,
            device="cpu", n_envs=NUM_ENVS,
        )  # fmt: skip
        self._infos: list[dict] = [{} for _ in range(NUM_ENVS)]

    def add(self, t: int) -> None:
        obs, action, reward, next_obs = self._task.step(t)
        self._buffer.add(obs, next_obs, action, reward, self._task.no, self._infos)

    def sample(self, batch: int) -> Any:
        return self._buffer.sample(batch)

    def nbytes(self) -> int:
        buffer = self._buffer
        parts = (buffer.observations, buffer.next_observations, buffer.actions, buffer.rewards)
        return sum(x.nbytes for x in (*parts, buffer.dones, buffer.timeouts))


class TorchRL(Contender):
    """torchrl.data's TensorDict buffers on a LazyTensorStorage; its sum tree is C++."""

    def __init__(self, task: Task, capacity: int, prioritized: bool) -> None:
        from torchrl import data

        self._task = task
        storage = data.LazyTensorStorage(capacity)
        if prioritized:
            try:
                import torchrl._torchrl  # noqa: F401
            except ImportError as error:
                text = str(error).partition(": ")[2][:40]
                raise NotHere(
                    f"its compiled sum tree does not load with this torch ({text})"
                ) from error
            self._buffer = data.TensorDictPrioritizedReplayBuffer(
                alpha=ALPHA, beta=BETA, storage=storage, priority_key="td_error"
            )
        else:
            self._buffer = data.TensorDictReplayBuffer(storage=storage)

    def _rows(self, t: int) -> Any:
        from tensordict import TensorDict

        obs, action, reward, next_obs = (torch.from_numpy(x) for x in self._task.step(t))
        done = torch.from_numpy(self._task.no)
        fields = {"obs": obs, "action": action, "reward": reward, "next_obs": next_obs}
        return TensorDict({**fields, "done": done}, batch_size=[NUM_ENVS])

    def add(self, t: int) -> None:
        self._buffer.extend(self._rows(t))

    def fill(self, rows: int) -> None:
        size = 100 if self._task.name == "atari" else 2000
        done, total = 0, -(-rows // NUM_ENVS)
        block = torch.cat([self._rows(t) for t in range(min(size, total))])
        while done < total:
            self._buffer.extend(block[: (total - done) * NUM_ENVS])
            done += size

    def sample(self, batch: int) -> Any:
        return self._buffer.sample(batch)

    def update(self, drawn: Any, priorities: np.ndarray) -> None:
        self._buffer.update_priority(drawn["index"], torch.from_numpy(priorities))

    def nbytes(self) -> int:
        storage = self._buffer._storage._storage
        return sum(x.nbytes for x in storage.values(True, True))


class Cpprb(Contender):
    """cpprb, in Cython and C++."""

    def __init__(self, task: Task, capacity: int, prioritized: bool) -> None:
        import cpprb

        spec = task.spec
        discrete = isinstance(spec.action, Discrete)
        obs = {"shape": spec.obs_shape, "dtype": spec.obs_dtype}
        fields = {
            "obs": obs,
            "act": {"dtype": np.int64} if discrete else {"shape": spec.action.shape},
            "rew": {},
            "next_obs": obs,
            "done": {},
        }
        self._task = task
        if prioritized:
            self._buffer = cpprb.PrioritizedReplayBuffer(capacity, fields, alpha=ALPHA)
        else:
            self._buffer = cpprb.ReplayBuffer(capacity, fields)
        self._fields = fields
        self._extra = {"beta": BETA} if prioritized else {}

    def add(self, t: int) -> None:
        obs, action, reward, next_obs = self._task.step(t)
        self._buffer.add(obs=obs, act=action, rew=reward, next_obs=next_obs, done=self._task.no)

    def sample(self, batch: int) -> Any:
        drawn = self._buffer.sample(batch, **self._extra)
        tensors = {k: torch.from_numpy(v) for k, v in drawn.items() if k != "indexes"}
        return tensors, drawn.get("indexes")

    def update(self, drawn: Any, priorities: np.ndarray) -> None:
        self._buffer.update_priorities(drawn[1], priorities)

    def nbytes(self) -> int:
        one = {k: v for k, v in self._buffer.sample(1, **self._extra).items() if k in self._fields}
        return self._buffer.get_buffer_size() * sum(x.nbytes for x in one.values())


CONTENDERS: dict[str, type[Contender]] = {
    "rl_pipeline": Ours,
    "deque": Textbook,
    "sb3": StableBaselines3,
    "torchrl": TorchRL,
    "cpprb": Cpprb,
}
HAVE_PRIORITIES = ("rl_pipeline", "torchrl", "cpprb")
