"""Spaces: which actions are understood, and observations of several parts as one vector."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from rl_pipeline.errors import ConfigError
from rl_pipeline.types import ActionSpace, Continuous, Discrete, MultiBinary, MultiDiscrete


def read_actions(space: Space, name: str) -> tuple[ActionSpace, Any]:
    """The action space in our words, and where its integers start (added to ours).

    Raises ValueError naming a space that is not supported.
    """
    kind = np.dtype(space.dtype).kind if space.dtype is not None else ""
    match space:
        case spaces.Discrete():
            return Discrete(int(space.n)), int(space.start)
        case spaces.MultiDiscrete() if space.nvec.ndim == 1:
            return MultiDiscrete(tuple(space.nvec.tolist())), space.start
        case spaces.MultiBinary() if len(space.shape) == 1:
            return MultiBinary(space.shape[0]), 0
        case spaces.Box() if kind == "f":
            return Continuous(space.low.astype(np.float32), space.high.astype(np.float32)), 0
    raise ConfigError(
        f"{name} takes actions of {space}; only Discrete, MultiDiscrete and MultiBinary of one "
        "dimension, and Box of floats are supported: use env.wrappers to change it"
    )


class Flattener:
    """Observations of a nested space as vectors [N, size], for all environments at once.

    The parts follow each other as in `gymnasium.spaces.flatten`: boxes and bits as they are,
    Discrete and MultiDiscrete one-hot.
    """

    def __init__(self, space: Space, name: str, dtype: Any = np.float32) -> None:
        """Raise ValueError naming the part whose kind is not supported."""
        self._dtype = dtype
        self._leaves = list(_leaves(space))
        for path, leaf in self._leaves:
            if not isinstance(
                leaf, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
            ):
                where = f" at {'.'.join(map(str, path))}" if path else ""
                raise ConfigError(
                    f"{name} observes a {type(leaf).__name__} space{where}, which cannot be "
                    "flattened; remove it with env.wrappers"
                )
        self.paths = [path for path, _ in self._leaves]
        """Keys and indices that lead to each part, in order."""
        sizes = [spaces.flatdim(leaf) for _, leaf in self._leaves]
        ends = np.cumsum(sizes).tolist()
        self._columns = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        self.size = ends[-1]

    def name_of(self, column: int) -> str:
        """The path of the part that a place in the vector belongs to."""
        found = next(i for i, place in enumerate(self._columns) if column < place.stop)
        return ".".join(map(str, self.paths[found])) or "its only part"

    def parts(self, obs: Any) -> list[np.ndarray]:
        """The parts of one environment's observation, in order, copied."""
        return [np.array(_at(obs, path)) for path in self.paths]

    def __call__(self, obs: Any) -> np.ndarray:
        """obs: nested dicts and tuples of [N, ...], or a list of the parts in order."""
        parts = obs if isinstance(obs, list) else [_at(obs, path) for path in self.paths]
        num_envs = len(parts[0])
        flat = np.zeros((num_envs, self.size), self._dtype)
        for (_, leaf), part, columns in zip(self._leaves, parts, self._columns, strict=True):
            values = part.reshape(num_envs, -1)
            if isinstance(leaf, spaces.Discrete):
                _one_hot(values - leaf.start, np.array([leaf.n]), flat[:, columns])
            elif isinstance(leaf, spaces.MultiDiscrete):
                start = leaf.start.reshape(-1)
                _one_hot(values - start, leaf.nvec.reshape(-1), flat[:, columns])
            else:
                flat[:, columns] = values
        return flat


def _one_hot(values: np.ndarray, sizes: np.ndarray, out: np.ndarray) -> None:
    """Set a one in `out` [N, sum of sizes] for each of `values` [N, K]."""
    if ((values < 0) | (values >= sizes)).any():
        raise ValueError(f"an observation of {values.tolist()} lies outside its Discrete space")
    firsts = np.cumsum(sizes) - sizes
    np.put_along_axis(out, (values + firsts).astype(np.int64), 1, axis=1)


def _leaves(space: Space, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Space]]:
    if isinstance(space, spaces.Dict):
        parts: Any = space.spaces.items()
    elif isinstance(space, spaces.Tuple):
        parts = enumerate(space.spaces)
    else:
        yield path, space
        return
    for key, part in parts:
        yield from _leaves(part, (*path, key))


def _at(obs: Any, path: tuple[Any, ...]) -> np.ndarray:
    for key in path:
        obs = obs[key]
    return obs
