"""Replay as a slow, obviously right model, and environments that fill both it and the real one."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

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
