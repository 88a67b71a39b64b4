"""Replay in host memory; what was drawn is put together by compiled loops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_pipeline import machine
from rl_pipeline.buffers import kernels
from rl_pipeline.buffers.layout import refuse_if_too_large, tree_size, zeros
from rl_pipeline.buffers.ring import (
    BAD_PRIORITIES,
    Priorities,
    Ring,
    Sequences,
    as_float64,
)
from rl_pipeline.types import Batch, SequenceBatch

__all__ = ["Draw", "Priorities", "Replay", "Sequences"]


class Draw(NamedTuple):
    """Rows that were drawn, not yet copied out."""

    ids: np.ndarray  # [B] int64
    slots: np.ndarray  # [B] int64: where they are in the ring
    ends: np.ndarray  # [B] int64: slots of the rows that their n-step windows bootstrap from
    spans: np.ndarray  # [B] int64: rows in their windows
    weight: np.ndarray  # [B] float32


class Replay(Ring):
    """Uniform or prioritized replay of transitions or sequences; see `types.ReplayBuffer`.

    Draws are with replacement; prioritized draws take one transition from each of B equal parts
    of the sum, as in the paper.
    """

    def _allocate(self) -> None:
        layout = self.layout
        self._rng = np.array([self._seed], np.uint64)
        self._frames = self._allocate_frames((layout.capacity, self._words))
        leaves, nodes = layout.capacity, tree_size(self._starts)
        self._mass = zeros((leaves if layout.prioritized else 0,), np.float64)
        self._tree = zeros((nodes if layout.prioritized else 0,), np.float64)
        places = (layout.rows // layout.stride, layout.num_envs)
        self._states = {
            name: np.zeros((*places, *shape), np.float32)
            for name, shape in self._state_shapes.items()
        }

        self._stores = bool(self._states) or layout.prioritized

    def _allocate_frames(self, shape: tuple[int, int]) -> np.ndarray:
        refuse_if_too_large(self.layout, machine.available_memory(), "of memory")
        return zeros(shape, self._word)

    @property
    def nbytes(self) -> int:
        """Bytes of storage."""
        arrays = (self._frames, self._meta, self._books, self._last, self._mass)
        return sum(a.nbytes for a in (*arrays, self._tree, *self._states.values()))

    def _store(
        self,
        obs: np.ndarray | None,
        given: np.ndarray,
        extras: Mapping[str, Tensor],
        reported: np.ndarray,
        num_changed: int,
        num_written: int,
    ) -> None:
        if self._states and obs is not None:
            _, written, source, which = reported[:, :num_written]
            self._keep_states(written, source, which, extras)
        if self._priorities is not None:
            usual = self._max_priority**self._priorities.alpha
            kernels.weigh(
                reported, num_changed, num_written if obs is not None else 0, given, usual,
                self._meta, self._mass, self._tree, self._starts,
            )  # fmt: skip

    def _keep_states(
        self,
        written: np.ndarray,
        source: np.ndarray,
        which: np.ndarray,
        extras: Mapping[str, Tensor],
    ) -> None:
        """Store the states that rows at the begin of a sequence came with."""
        layout = self.layout
        time = written // layout.num_envs
        begins = (time % layout.stride == 0) & (which == layout.depth - 1)
        place = (time[begins] // layout.stride, written[begins] % layout.num_envs)
        for name, state in self._states.items():
            given = self.fetch(extras[name]).reshape(-1, *state.shape[2:])
            state[place] = given[source[begins]]

    # -- drawing -----------------------------------------------------------------------------

    def sample(self, batch_size: int, progress: float = 0.0) -> Batch:
        """Draw with replacement; `progress` in [0, 1] anneals beta.

        Raises ValueError while nothing can be drawn.
        """
        with self.lock:
            return self.gather(self.draw(batch_size, progress))

    def draw(self, batch_size: int, progress: float = 0.0, rng: np.ndarray | None = None) -> Draw:
        """The first half of `sample`; `rng` (a copy of the state) leaves the buffer's alone."""
        rng = self._rng if rng is None else rng
        ids, slots, ends, spans = np.empty((4, batch_size), np.int64)
        with self.lock:
            if not self._size[0]:
                raise ValueError("nothing can be drawn yet: the buffer holds no transition")
            if self._priorities is None:
                kernels.draw_uniform(
                    rng, self.layout.rows, self.n_step, self._meta, self._counts,
                    ids, slots, ends, spans,
                )  # fmt: skip
                return Draw(ids, slots, ends, spans, np.ones(batch_size, np.float32))
            weight = np.empty(batch_size, np.float32)
            kernels.draw_prioritized(
                rng, self.layout.rows, self.n_step, self._meta, self._counts, self._tree,
                self._starts, self._priorities.beta_at(progress), ids, slots, ends, spans, weight,
            )  # fmt: skip
        return Draw(ids, slots, ends, spans, weight)

    def gather(self, draw: Draw) -> Batch:
        """The second half of `sample`: copy the rows out; none may be overwritten between."""
        layout = self.layout
        room = self._room(len(draw.ids))
        with self.lock:
            kernels.gather(
                draw.slots, draw.ends, draw.spans, layout.num_envs, layout.depth, self.gamma,
                self._frames, self._meta, self._meta_f, *room,
            )  # fmt: skip
        return self._deliver(draw, room)

    @property
    def _shares_frames(self) -> bool:
        """One step on, a stack has all but one frame in common with the one before."""
        return self.layout.depth > 1 and self.n_step == 1

    def _room(self, size: int) -> tuple[np.ndarray, ...]:
        """Arrays for putting a batch together: obs, next_obs, action (words), reward, discount."""
        words, shares = self._words * self.layout.depth, self._shares_frames
        return (
            np.empty((size, words + self._words * shares), self._word),
            np.empty((0 if shares else size, words), self._word),
            np.empty((size, self.layout.action_words), np.uint32),
            *np.empty((2, size), np.float32),
        )

    def _deliver(self, draw: Draw, room: tuple[np.ndarray, ...]) -> Batch:
        """The same memory as tensors."""
        obs, next_obs, action, reward, discount = room
        tensor, dtype, size = torch.from_numpy, self.spec.obs_dtype, len(draw.ids)
        if self._shares_frames:
            frames = tensor(obs.view(dtype).reshape(size, -1, *self.spec.obs_shape[1:]))
            seen, following = frames[:, :-1], frames[:, 1:]
        else:
            shape = (size, *self.spec.obs_shape)
            seen = tensor(obs.view(dtype).reshape(shape))
            following = tensor(next_obs.view(dtype).reshape(shape))
        return Batch(
            obs=seen,
            action=tensor(action.view(self._action_dtype).reshape(size, *self._action_shape)),
            reward=tensor(reward),
            discount=tensor(discount),
            next_obs=following,
            weight=tensor(draw.weight),
            ids=draw.ids,
        )

    def sample_sequences(self, batch_size: int, progress: float = 0.0) -> SequenceBatch:
        """Draw whole sequences, time-major; see `types.SequenceBatch`."""
        if self._sequences is None:
            raise ValueError("this buffer was built for transitions: give it `sequences`")
        layout, span = self.layout, self._sequences.span
        rows = (span, batch_size)
        words = self._frames.shape[1] * layout.depth
        obs = np.empty((span + 1, batch_size, words), self._word)
        action = np.empty((*rows, layout.action_words), np.uint32)
        reward, discount, mask = (np.empty(rows, np.float32) for _ in range(3))
        with self.lock:
            ids, slots, _, _, weight = self.draw(batch_size, progress)
            kernels.gather_sequences(
                slots, layout.num_envs, layout.depth, self.gamma, self._frames, self._meta,
                self._meta_f, obs, action, reward, discount, mask,
            )  # fmt: skip
            time = slots // layout.num_envs // layout.stride
            states = {k: state[time, ids % layout.num_envs] for k, state in self._states.items()}
        tensor = torch.from_numpy
        return SequenceBatch(
            obs=tensor(obs.view(self.spec.obs_dtype).reshape(*obs.shape[:2], *self.spec.obs_shape)),
            action=tensor(action.view(self._action_dtype).reshape(*rows, *self._action_shape)),
            reward=tensor(reward),
            discount=tensor(discount),
            mask=tensor(mask),
            state={name: tensor(state) for name, state in states.items()},
            burn_in=self._sequences.burn_in,
            weight=tensor(weight),
            ids=ids,
        )

    def update_priorities(self, ids: np.ndarray | Tensor, priorities: np.ndarray | Tensor) -> int:
        """Set the priorities of drawn transitions; returns how many still existed.

        Of equal ids the largest priority counts. Raises ValueError unless all are finite and
        above 0.
        """
        if self._priorities is None:
            raise ValueError(
                "this buffer draws uniformly and takes no priorities; use buffer=prioritized"
            )
        values, ids = as_float64(priorities, self.fetch), np.ascontiguousarray(ids, np.int64)
        if ids.shape != values.shape:
            raise ValueError(f"{len(values)} priorities for {len(ids)} transitions")
        with self.lock:
            existed, largest = kernels.set_priorities(
                ids, values, self._priorities.alpha, self.layout.rows, self._meta, self._counts,
                self._mass, self._tree, self._starts,
            )  # fmt: skip
            if existed < 0:
                raise ValueError(BAD_PRIORITIES)
            self._max_priority = max(self._max_priority, largest)
        return existed

    def random_state(self) -> np.ndarray:
        """A copy, as `draw` takes it."""
        return self._rng.copy()

    # -- saving ------------------------------------------------------------------------------

    def _contents(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        arrays = {"frames": self._frames, "meta": self._meta}
        if self._priorities is not None:
            arrays["mass"] = self._mass
        return arrays, self._states

    def _install(self, arrays: dict[str, np.ndarray], states: dict[str, np.ndarray]) -> None:
        if self._priorities is not None:
            drawable = self._drawable()
            self._tree[: len(drawable)] = np.where(drawable, self._mass, 0.0)
            leaves = np.arange(len(drawable))
            kernels.tree_refresh(self._tree, self._starts, leaves, len(leaves))

    def _random_state(self) -> Tensor:
        return torch.from_numpy(self._rng.copy().view(np.int64))

    def _set_random_state(self, state: Tensor) -> None:
        if state.shape != self._rng.shape:
            raise ValueError(
                "the saved replay had another buffer.placement: its draws cannot go on"
            )
        self._rng[:] = state.numpy().view(np.uint64)
