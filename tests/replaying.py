"""Replay as a slow, obviously right model, and environments that fill both it and the real one."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from rl_pipeline.buffers.device import DeviceReplay
from rl_pipeline.buffers.replay import Priorities, Replay
from rl_pipeline.types import Discrete, EnvSpec, Step

FRAME = (2, 2)


def make_spec(num_envs: int, depth: int) -> EnvSpec:
    """Observations: one number, or `depth` tiny frames."""
    if depth == 1:
        return EnvSpec("model", "model", num_envs, (3,), np.dtype(np.float32), Discrete(1000))
    return EnvSpec("model", "model", num_envs, (depth, *FRAME), np.dtype(np.uint8), Discrete(1000))


@dataclass
class Row:
    """One row; `reach` earlier rows carry older frames of its stack."""

    obs: np.ndarray
    action: int = 0
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    valid: bool = False
    reach: int = 0
    priority: float = 1.0


@dataclass
class Env:
    """Frames are numbers that do not repeat; `resets` says how the next row begins."""

    depth: int
    obs: np.ndarray = field(init=False)
    resets: str | None = None
    frames: int = 0

    def __post_init__(self) -> None:
        self.begin()

    def frame(self) -> np.ndarray:
        self.frames += 1
        if self.depth == 1:
            return np.full(3, self.frames, np.float32)
        return np.frombuffer(np.array([self.frames], np.uint32).tobytes(), np.uint8).reshape(FRAME)

    def begin(self) -> None:
        """A new game: a stack filled with its first frame."""
        frame = self.frame()
        self.obs = frame if self.depth == 1 else np.stack([frame] * self.depth)

    def go_on(self) -> None:
        frame = self.frame()
        self.obs = frame if self.depth == 1 else np.concatenate([self.obs[1:], frame[None]])

    def jump(self) -> None:
        """Somewhere else, in the middle of a game."""
        for _ in range(self.depth):
            self.go_on()
        self.resets = None


class Model:
    """Every row ever written, and the rules spelt out one row at a time."""

    def __init__(self, num_envs: int, rows: int, depth: int, n_step: int, gamma: float) -> None:
        self.rows, self.depth, self.n_step, self.gamma = rows, depth, n_step, gamma
        self.envs = [Env(depth) for _ in range(num_envs)]
        self.history: list[list[Row]] = [[] for _ in range(num_envs)]
        self.broken = [True] * num_envs
        self.lost = [0] * num_envs  # rows before this one are gone whatever the capacity
        self.max_priority = 1.0

    def step(self, ids: list[int], ends: list[str | None], rewards: list[float]):
        """What `add` is given: obs, action and the outcome of one step of some environments.

        An end is terminated, truncated or life: after the last the stack goes on.
        """
        obs, out, action = [], [], []
        for e, end, reward in zip(ids, ends, rewards, strict=True):
            env, valid = self.envs[e], self.envs[e].resets is None
            obs.append(env.obs)
            action.append(env.frames % 1000)
            if not valid:
                reward, end = 0.0, None
                env.go_on() if env.resets == "life" else env.begin()
                env.resets = None
            else:
                env.go_on()
                env.resets = end
            out.append((env.obs, reward, end in ("terminated", "life"), end == "truncated", valid))
            self.write(e, Row(obs[-1], action[-1], reward, out[-1][2], out[-1][3], valid))
        next_obs, reward, terminated, truncated, valid = (
            np.array(x) for x in zip(*out, strict=True)
        )
        reward = reward.astype(np.float32)
        step = Step(next_obs, reward, reward, terminated, truncated, valid, np.array(ids, np.int32))
        return np.stack(obs), np.array(action), step

    def write(self, e: int, row: Row) -> None:
        history = self.history[e]
        row.priority = self.max_priority
        fresh = all(np.array_equal(f, row.obs[-1]) for f in row.obs) if self.depth > 1 else True
        if self.depth > 1 and self.broken[e] and not fresh:
            for i, frame in enumerate(row.obs[:-1]):
                history.append(Row(np.stack([frame] * self.depth), reach=i))
            row.reach = self.depth - 1
        elif self.depth > 1 and not fresh:
            row.reach = min(history[-1].reach + 1, self.depth - 1)
        self.broken[e] = False
        history.append(row)

    def cut(self, e: int) -> None:
        """The environment was restarted."""
        if not self.broken[e]:
            newest = self.history[e][-1]
            newest.valid = newest.terminated = newest.truncated = False
        self.broken[e] = True

    def take_priorities(self, ids, priorities) -> None:
        """As `update_priorities`."""
        new: dict[int, float] = {}
        for i, p in zip(np.asarray(ids).tolist(), np.asarray(priorities).tolist(), strict=True):
            new[i] = max(new.get(i, 0.0), p)
            self.max_priority = max(self.max_priority, p)
        drawable = set(self.drawable())
        for i, p in new.items():
            k, e = divmod(i, len(self.envs))
            if (e, k) in drawable:
                self.history[e][k].priority = p

    def enlarge(self, rows: int) -> None:
        """More room from now on."""
        self.lost = [
            max(lost, len(history) - self.rows)
            for lost, history in zip(self.lost, self.history, strict=True)
        ]
        self.rows = rows

    def drawable(self) -> list[tuple[int, int]]:
        """(environment, row) of all that may be drawn."""
        found = []
        for e, history in enumerate(self.history):
            oldest = max(self.lost[e], len(history) - self.rows)
            for k in range(oldest, len(history) - 1):
                if history[k].valid and k - history[k].reach >= oldest:
                    found.append((e, k))
        return found

    def transition(self, e: int, k: int):
        """obs, action, return, discount, next obs of the n-step window from row k."""
        history, total = self.history[e], 0.0
        for i in range(self.n_step):
            row = history[k + i]
            total += self.gamma**i * row.reward
            last = k + i + 1 == len(history) - 1
            if row.terminated or row.truncated or last or not history[k + i + 1].valid:
                break
        discount = 0.0 if row.terminated else self.gamma ** (i + 1)
        first = history[k]
        return first.obs, first.action, total, discount, history[k + i + 1].obs


KINDS = ["host", "device"]


def make(kind: str, spec, capacity, **options):
    if kind == "device":  # the code of placement=cuda, on the CPU
        return DeviceReplay(spec, capacity, device=torch.device("cpu"), **options)
    return Replay(spec, capacity, **options)


def check_batch(batch, model: Model, priorities: Priorities | None, progress: float) -> None:
    """Every drawn transition is the model's, and its weight follows from its probability."""
    num_envs = len(model.envs)
    drawable = set(model.drawable())
    masses = []
    for b, number in enumerate(np.asarray(batch.ids).tolist()):
        k, e = divmod(number, num_envs)
        assert (e, k) in drawable
        obs, action, reward, discount, next_obs = model.transition(e, k)
        np.testing.assert_array_equal(batch.obs[b], obs)
        np.testing.assert_array_equal(batch.next_obs[b], next_obs)
        assert batch.action[b] == action
        assert batch.reward[b] == pytest.approx(reward)
        assert batch.discount[b] == pytest.approx(discount)
        if priorities:
            masses.append(model.history[e][k].priority ** priorities.alpha)
    if priorities:
        weights = (min(masses) / np.array(masses)) ** priorities.beta_at(progress)
        np.testing.assert_allclose(batch.weight, weights, rtol=1e-5)
    else:
        assert (batch.weight == 1).all()


def tree_of(buffer) -> tuple[np.ndarray, float]:
    """Leaves and root."""
    tree = np.asarray(buffer._tree)
    return tree[: buffer.layout.capacity], tree[int(buffer._starts[-1])]


each_kind = pytest.mark.parametrize("kind", KINDS)


def outcome(n, reward=0.0, terminated=False, truncated=False, valid=True, ids=None) -> Step:
    """A step of n environments, all alike."""
    full = lambda value, dtype: np.full(n, value, dtype)  # noqa: E731
    return Step(
        np.zeros((n, 1)), full(reward, np.float32), full(reward, np.float32),
        full(terminated, bool), full(truncated, bool), full(valid, bool),
        np.arange(n, dtype=np.int32) if ids is None else np.asarray(ids, np.int32),
    )  # fmt: skip


def scalar_spec(num_envs=1) -> EnvSpec:
    return EnvSpec("s", "s", num_envs, (1,), np.dtype(np.float32), Discrete(10))


def add_row(buffer, number: float, **step) -> None:
    """One row of environment 0 whose observation is `number`."""
    buffer.add(np.full((1, 1), number, np.float32), np.zeros(1, int), {}, outcome(1, **step))


def play(buffer, model: Model, steps: int, seed: int = 0) -> None:
    """Fill both with the same games, all environments at once."""
    rng = np.random.default_rng(seed)
    n = len(model.envs)
    for _ in range(steps):
        ends = rng.choice([None, "terminated", "truncated", "life"], n, p=[0.85, 0.05, 0.05, 0.05])
        rewards = rng.integers(-5, 6, n).astype(float).tolist()
        obs, action, step = model.step(list(range(n)), ends.tolist(), rewards)
        buffer.add(obs, action, {}, step)
