"""Base of every replay: which row lives where, what can be drawn, writing and saving.

A ring [time, env]. Row k of an environment holds what was seen, done and earned there; where it
led is row k + 1. A row that only resets is never drawn: its observation is the true last one of
the episode before. The books are kept on the host; the inner loops are in `kernels.py`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import RLock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_pipeline.buffers import kernels
from rl_pipeline.buffers.layout import FANOUT, META_WORDS, make_layout, tree_starts, zeros
from rl_pipeline.types import Continuous, EnvSpec, Step

UNPRIORITIZED = "this buffer draws uniformly and takes no priorities; use buffer=prioritized"
BAD_PRIORITIES = "priorities must be finite and above 0 (add a small constant)"


def to_host(values: Tensor) -> np.ndarray:
    """The tensor as an array, wherever it lives."""
    return values.detach().cpu().numpy()


def as_float64(
    values: np.ndarray | Tensor, fetch: Callable[[Tensor], np.ndarray] = to_host
) -> np.ndarray:
    """The ids as one contiguous axis on the host."""
    if isinstance(values, Tensor):
        values = fetch(values)
    return np.ascontiguousarray(values, np.float64).reshape(-1)


@dataclass(frozen=True)
class Priorities:
    """Proportional prioritized replay (Schaul et al. 2016, arXiv:1511.05952).

    P(i) = p_i^alpha / sum p^alpha. Importance weights (1 / (size P(i)))^beta are divided by the
    largest of their batch; beta goes linearly to 1 with progress. New rows get the largest
    priority seen so far, 1 at first.
    """

    alpha: float = 0.6
    beta: float = 0.4

    def beta_at(self, progress: float) -> float:
        """The exponent of the importance weights at `progress` in [0, 1]."""
        return self.beta + (1.0 - self.beta) * min(max(progress, 0.0), 1.0)

    def checked(self, priorities: np.ndarray | Tensor) -> np.ndarray:
        """The priorities in float64; raises ValueError unless all are finite and above 0."""
        values = as_float64(priorities)
        # One comparison each also catches NaN.
        if len(values) and not (values.min() > 0.0 and values.max() < math.inf):
            raise ValueError(BAD_PRIORITIES)
        return values


@dataclass(frozen=True)
class Sequences:
    """Sequences for recurrent learners (R2D2, Kapturowski et al. 2019).

    A sequence is `burn_in` rows to warm the state up and `length` rows to learn from; neighbours
    overlap by `overlap` rows. `state` names the recurrent states, with the shape of one, that
    `add` gets among its extras and stores where sequences begin.
    """

    burn_in: int
    length: int
    overlap: int
    state: Mapping[str, tuple[int, ...]]

    @property
    def span(self) -> int:
        """Rows of a sequence."""
        return self.burn_in + self.length

    @property
    def stride(self) -> int:
        """Rows from the start of a sequence to that of the next."""
        if not 0 <= self.overlap < self.span:
            raise ValueError(f"overlap={self.overlap} must be in 0 .. {self.span - 1}")
        return self.span - self.overlap

    @property
    def state_bytes(self) -> int:
        """Bytes of all states of one row (float32)."""
        return 4 * sum(math.prod(shape) for shape in self.state.values())


NO_PRIORITIES = np.zeros(0)


class Ring(ABC):
    """Base of replay buffers: a ring of rows per environment, and which can be drawn.

    Subclasses say where the bytes live and draw from them.

    Every method may be called from any thread.
    """

    _keeps_frames = True
    """The kernel that keeps the books also writes the frames."""
    _fanout = FANOUT
    """Children of a node of the sum tree."""
    _announces = False
    """`_announce` has something to do."""
    _stores = True
    """`_store` has something to do."""
    _always_weighs = False
    """Uniform draws use the sum tree too."""
    fetch: Callable[[Tensor], np.ndarray] = staticmethod(to_host)
    """Copies what a learner hands over to the host; a run puts its ledger's here."""

    def __init__(
        self,
        spec: EnvSpec,
        capacity: int,
        *,
        n_step: int = 1,
        gamma: float = 0.99,
        seed: int = 0,
        frame_stack: int = 1,
        priorities: Priorities | None = None,
        sequences: Sequences | None = None,
    ) -> None:
        """`capacity` counts rows over all environments.

        With `frame_stack` > 1 observations [frame_stack, ...] are stacks, newest frame last, and
        only the newest is stored. Raises ValueError where that or the capacity cannot be, or
        where it does not fit into memory.
        """
        self.layout = make_layout(
            spec, capacity, frame_stack=frame_stack,
            prioritized=priorities is not None or self._always_weighs,
            span=sequences.span if sequences else n_step,
            stride=sequences.stride if sequences else 1,
            state_bytes=sequences.state_bytes if sequences else 0,
            fanout=self._fanout,
        )  # fmt: skip
        self.spec, self.n_step, self.gamma = spec, n_step, float(gamma)
        self._priorities, self._sequences = priorities, sequences
        self.prioritized = priorities is not None
        # A transition is drawable once its successor is here, a sequence once it is whole.
        self._span = sequences.span if sequences else 1
        self._state_shapes = dict(sequences.state) if sequences else {}
        self.lock = RLock()
        self._seed = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])
        self._allocate_books()
        self._allocate()
        # Put together once: at a few microseconds an `add` every look-up shows.
        layout = self.layout
        geometry = np.array(
            [layout.rows, layout.depth, self._span, layout.stride, self._keeps_frames]
        )
        self._ring = (geometry, self._frames, self._meta, self._books, self._last)
        self._room_for = 0
        self._accepted: tuple | None = None
        """Shapes and dtypes of the last rows, where nothing had to be converted."""

    def _allocate_books(self) -> None:
        layout, box = self.layout, self.spec.action
        self._box = box if isinstance(box, Continuous) else None
        self._action_dtype = np.dtype(np.float32 if self._box else np.int64)
        self._action_shape = self._box.shape if self._box else ()
        # Rows are moved in words of 4 bytes where they divide evenly.
        self._word = np.dtype(np.uint32 if layout.frame_bytes % 4 == 0 else np.uint8)
        self._words = layout.frame_bytes // self._word.itemsize
        self._frames = np.zeros((0, self._words), self._word)
        self._meta = zeros((layout.capacity, META_WORDS + layout.action_words), np.uint32)
        self._meta_f = self._meta.view(np.float32)
        self._books = np.zeros((3, layout.num_envs), np.int64)
        self._counts, self._broken, self._size = self._books
        self._broken[:] = 1
        words = self._words * layout.depth * (layout.depth > 1)
        self._last = np.zeros((layout.num_envs, words), self._word)
        self._max_priority: Any = 1.0  # a tensor where priorities are on a device
        self._starts = tree_starts(layout.capacity, layout.fanout)
        self._reported = np.empty((4, 0), np.int64)

    @abstractmethod
    def _allocate(self) -> None:
        """Make room for frames, states and masses."""

    @property
    def size(self) -> int:
        """Transitions (starts of sequences) that can be drawn now."""
        return int(self._size[0])

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of storage."""

    lost: int = 0
    """Transitions that `load_state_dict` could not bring back."""

    def close(self) -> None:  # noqa: B027, most hold nothing
        """Free what is held outside memory; a second call does nothing."""

    # -- writing -----------------------------------------------------------------------------

    def add(
        self, obs: np.ndarray, action: np.ndarray, extras: Mapping[str, Tensor], step: Step
    ) -> None:
        """Store the next row of the step's environments; see `types.ReplayBuffer.add`."""
        self._append(obs, action, step, None, extras)

    def add_fragment(
        self,
        obs: np.ndarray,
        action: np.ndarray,
        steps: Step,
        priorities: np.ndarray | None = None,
        extras: Mapping[str, Tensor] | None = None,
        follows: bool = True,
    ) -> None:
        """Store L rows of n environments at once: all but `steps.env_ids` [n] is [L, n, ...].

        `priorities` [L, n] are the first ones of the transitions, else they get the largest.
        `follows=False` where rows between the last fragment and this one are missing.
        """
        if len(obs) + self.layout.depth > self.layout.rows:
            raise ValueError(
                f"a fragment of {len(obs)} rows does not fit into buffer.capacity="
                f"{self.layout.capacity}: {self.layout.rows} rows for each environment"
            )
        if not follows:
            self.cut(steps.env_ids)
        given = None
        if priorities is not None:
            if self._priorities is None:
                raise ValueError(
                    "this buffer draws uniformly and takes no priorities; use buffer=prioritized"
                )
            given = self._priorities.checked(priorities)
        self._append(
            obs.reshape(-1, *obs.shape[2:]),
            action.reshape(-1, *action.shape[2:]),
            Step._make([steps.obs, *(x.reshape(-1) for x in steps[1:-1]), steps.env_ids]),
            given,
            {name: x.reshape(-1, *x.shape[2:]) for name, x in (extras or {}).items()},
        )

    def cut(self, env_ids: np.ndarray | None = None) -> None:
        """Say that the next row of these environments (all) does not follow their newest.

        After environments were restarted, for example: the newest row, whose outcome is unknown,
        only remains as the successor of the one before.
        """
        with self.lock:
            ids = np.arange(self.layout.num_envs) if env_ids is None else env_ids.astype(np.int64)
            outputs = self._outputs(len(ids))
            num_changed, num_written = kernels.cut(
                ids, self.layout.rows, self._span, self.layout.stride, self._meta, self._books,
                outputs,
            )  # fmt: skip
            self._store(None, NO_PRIORITIES, {}, outputs, num_changed, num_written)

    def _append(
        self,
        obs: np.ndarray,
        action: np.ndarray,
        step: Step,
        priorities: np.ndarray | None,
        extras: Mapping[str, Tensor],
    ) -> None:
        """L rows of n environments, all but `step.env_ids` [n] as [L * n, ...]."""
        rows = len(step.reward)
        # `add` takes microseconds, so the shape check is skipped for a shape accepted before.
        form = (rows, obs.shape, obs.dtype, action.shape, action.dtype)
        if form != self._accepted or extras or self._state_shapes:
            action = self._check(rows, obs, action, extras)
            self._accepted = form if action.dtype is form[-1] else None
        if not action.flags.c_contiguous:
            action = np.ascontiguousarray(action)
        with self.lock:
            outputs = self._outputs(rows) if rows > self._room_for else self._reported
            if self._announces:
                self._announce(step.env_ids, rows)
            num_changed, num_written = kernels.append(
                obs.ravel().view(self._word), action.view(np.uint32), step.reward,
                step.terminated, step.truncated, step.valid, step.env_ids,
                *self._ring, outputs,
            )  # fmt: skip
            if num_changed < 0:
                raise self._refusal(num_changed, num_written)
            given = NO_PRIORITIES
            if priorities is not None and self._priorities is not None:
                given = priorities**self._priorities.alpha
                self._raise_largest(priorities)
            if self._stores:
                self._store(obs, given, extras, outputs, num_changed, num_written)

    def _check(
        self, rows: int, obs: np.ndarray, action: np.ndarray, extras: Mapping[str, Tensor]
    ) -> np.ndarray:
        """The action in the dtype that is stored; raises ValueError for what does not fit."""
        spec = self.spec
        if obs.dtype != spec.obs_dtype or obs.shape[1:] != spec.obs_shape or len(obs) != rows:
            raise ValueError(
                f"observations {obs.dtype} {obs.shape} do not fit {spec.id}'s {spec.obs_dtype} "
                f"{(rows, *spec.obs_shape)}"
            )
        if len(action) != rows or action.shape[1:] != self._action_shape:
            raise ValueError(f"actions {action.shape} do not fit {(rows, *self._action_shape)}")
        if extras.keys() != self._state_shapes.keys():
            raise ValueError(f"extras {sorted(extras)} given, {sorted(self._state_shapes)} stored")
        return action.astype(self._action_dtype, copy=False)

    def _announce(self, env_ids: np.ndarray, rows: int) -> None:  # noqa: B027, for memmap
        """Up to `rows` observations of these environments are about to be written."""

    def _raise_largest(self, priorities: np.ndarray) -> None:
        if len(priorities):
            self._max_priority = max(self._max_priority, float(priorities.max()))

    @abstractmethod
    def _store(
        self,
        obs: np.ndarray | None,
        given: np.ndarray,
        extras: Mapping[str, Tensor],
        reported: np.ndarray,
        num_changed: int,
        num_written: int,
    ) -> None:
        """Carry out what the books say, after a block `obs` [L * n, ...] or a cut (None).

        `reported` is what `kernels.append` said; `given` [L * n] are
        masses of the rows, or empty: then all get that of the largest priority.
        """

    def _outputs(self, rows: int) -> np.ndarray:
        """Room for what the kernels report, see `kernels.append`."""
        # Each row may need the older frames of its stack; each written one may change the rows
        # whose stacks reach into its slot, and those it completes.
        if rows > self._room_for:
            most = rows * self.layout.depth * (self.layout.depth + self._span)
            self._reported, self._room_for = np.empty((4, most), np.int64), rows
        return self._reported

    def _refusal(self, code: int, env: int) -> ValueError:
        if code == kernels.BAD_ENV:
            return ValueError(f"env_ids holds {env}, not in 0 .. {self.layout.num_envs - 1}")
        if code == kernels.BAD_START:
            return ValueError(
                f"environment {env}: the row after an end must only reset (valid=False)"
            )
        return ValueError(
            f"environment {env}: its observation is no stack of {self.layout.depth} frames that "
            "goes on from the one before or is filled with one frame; use env.atari.frame_stack=1 "
            "to store observations whole"
        )

    # -- saving ------------------------------------------------------------------------------

    @abstractmethod
    def _contents(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Arrays that are stored slot by slot, and the states, all on the host."""

    @abstractmethod
    def _install(self, arrays: dict[str, np.ndarray], states: dict[str, np.ndarray]) -> None:
        """Take over `_contents` that were filled, and sum the masses of drawable rows anew."""

    @abstractmethod
    def _random_state(self) -> Tensor:
        """State of the generator, as a copy."""

    @abstractmethod
    def _set_random_state(self, state: Tensor) -> None:
        """Inverse of `_random_state`."""

    def state_dict(self) -> dict[str, Any]:
        """Contents, cursors, priorities and random state.

        What host memory stores slot by slot is not copied: save it before the next `add`.
        """
        layout = self.layout
        with self.lock:
            used = min(int(self._counts.max()), layout.rows)
            arrays, states = self._contents()
            return {
                **{k: _saved(a[: used * layout.num_envs]) for k, a in arrays.items()},
                **{k: _saved(getattr(self, f"_{k}").copy()) for k in _BOOKS},
                "states": {k: _saved(a[: -(-used // layout.stride)]) for k, a in states.items()},
                "rng": self._random_state(),
                "rows": layout.rows,
                "frame_stack": layout.depth,
                "max_priority": float(self._max_priority),
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`, into a buffer of at least that capacity.

        Raises ValueError where the capacity is smaller or the contents are of another kind.
        """
        layout, rows = self.layout, int(state["rows"])
        with self.lock:
            arrays, states = self._contents()
            self._check_state(state, arrays, states)
            for name in _BOOKS:
                ours = getattr(self, f"_{name}")
                ours[...] = state[name].numpy().view(ours.dtype)
            self._set_random_state(state["rng"])
            self._max_priority = state["max_priority"]
            # Row k lives in slot k % rows: elsewhere in a larger ring.
            time = np.arange(len(state["meta"]) // layout.num_envs)[:, None]
            number = self._counts - 1 - (self._counts - 1 - time) % rows
            exists = number >= 0
            env = np.nonzero(exists)[1]
            old = (time * layout.num_envs + np.arange(layout.num_envs))[exists]
            new = number[exists] % layout.rows * layout.num_envs + env
            for name, ours in arrays.items():
                theirs = state[name].numpy().view(ours.dtype)
                if rows == layout.rows:
                    ours[: len(theirs)] = theirs
                else:
                    ours[new] = theirs[old]
            begins = exists[:: layout.stride]
            at = number[:: layout.stride][begins] % layout.rows // layout.stride
            for name, ours in states.items():
                ours[at, np.nonzero(begins)[1]] = state["states"][name].numpy()[begins]
            self._size[0] = np.count_nonzero(self._drawable())
            self._install(arrays, states)

    def _drawable(self) -> np.ndarray:
        return (self._meta[:, kernels.FLAGS] & kernels.DRAWABLE) != 0

    def _check_state(
        self, state: dict[str, Any], arrays: dict[str, np.ndarray], states: dict[str, np.ndarray]
    ) -> None:
        layout = self.layout
        if len(state["counts"]) != layout.num_envs:
            raise ValueError(
                f"the saved replay is of backend.num_envs={len(state['counts'])}, not "
                f"{layout.num_envs}"
            )
        if state["rows"] > layout.rows:
            raise ValueError(
                f"the saved replay has {state['rows'] * layout.num_envs} rows and does not fit "
                f"into buffer.capacity={layout.capacity}; use buffer.capacity="
                f"{state['rows'] * layout.num_envs}, or buffer.save=false to begin with an empty "
                "one"
            )
        wanted = {**arrays, "last": self._last}
        same = state["frame_stack"] == layout.depth and all(
            name in state
            and state[name].shape[1:] == ours.shape[1:]
            and state[name].numpy().dtype.itemsize == ours.dtype.itemsize
            for name, ours in wanted.items()
        )
        if not same or ("mass" in state) != (self._priorities is not None):
            raise ValueError("the saved replay holds other observations, actions or priorities")
        if state["states"].keys() != states.keys():
            raise ValueError("the saved replay holds other recurrent states")


_BOOKS = ("counts", "broken", "last")


def _saved(array: np.ndarray) -> Tensor:
    """The same bytes as a tensor that torch can save."""
    size = array.dtype.itemsize
    return torch.from_numpy(
        array.view(f"i{size}") if array.dtype.kind == "u" and size > 1 else array
    )
