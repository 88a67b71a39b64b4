"""Replay in host memory: a ring [time, env] that stores each observation once.

Row k of an environment holds what was seen, done and earned there; where it led is row k + 1. A
row that only resets is never drawn: its observation is the true last one of the episode before.
n-step returns and frame stacks are put together when drawn. The inner loops are in `kernels.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from threading import RLock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_pipeline.buffers import kernels, layout
from rl_pipeline.types import Batch, Continuous, EnvSpec, SequenceBatch, Step


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
        """As float64; raises ValueError unless all are finite and above 0."""
        if isinstance(priorities, Tensor):
            priorities = priorities.detach().cpu().numpy()
        values = np.asarray(priorities, np.float64).reshape(-1)
        # One comparison each also catches NaN.
        if len(values) and not (values.min() > 0.0 and values.max() < math.inf):
            raise ValueError("priorities must be finite and above 0 (add a small constant)")
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
        """Rows from the begin of a sequence to that of the next."""
        if not 0 <= self.overlap < self.span:
            raise ValueError(f"overlap={self.overlap} must be in 0 .. {self.span - 1}")
        return self.span - self.overlap

    @property
    def state_bytes(self) -> int:
        """Bytes of all states of one row (float32)."""
        return 4 * sum(math.prod(shape) for shape in self.state.values())


class Draw(NamedTuple):
    """What was drawn, not yet copied out."""

    ids: np.ndarray  # [B] int64
    slots: np.ndarray  # [B] int64: where they are in the ring
    ends: np.ndarray  # [B] int64: slots of the rows that their n-step windows bootstrap from
    spans: np.ndarray  # [B] int64: rows in their windows
    weight: np.ndarray  # [B] float32


class Replay:
    """Uniform or prioritized replay of transitions or sequences; see `types.ReplayBuffer`.

    Every method may be called from any thread. Draws are with replacement; prioritized draws take
    one transition from each of B equal parts of the sum, as in the paper.
    """

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
        self.layout = layout.plan(
            spec, capacity, frame_stack=frame_stack, prioritized=priorities is not None,
            span=sequences.span if sequences else n_step,
            stride=sequences.stride if sequences else 1,
            state_bytes=sequences.state_bytes if sequences else 0,
        )  # fmt: skip
        self.spec, self.n_step, self.gamma = spec, n_step, float(gamma)
        self._priorities, self._sequences = priorities, sequences
        # A transition is drawable once its successor is here, a sequence once it is whole.
        self._span = sequences.span if sequences else 1
        self._lock = RLock()
        # 64 bits of seed whatever the seed.
        self._rng = np.random.SeedSequence(seed).generate_state(1, np.uint64)
        self._allocate()

    def _allocate(self) -> None:
        plan, box = self.layout, self.spec.action
        self._box = box if isinstance(box, Continuous) else None
        self._action_dtype = np.dtype(np.float32 if self._box else np.int64)
        self._action_shape = self._box.shape if self._box else ()
        # Rows are moved in words of 4 bytes where they divide evenly.
        self._word = np.dtype(np.uint32 if plan.frame_bytes % 4 == 0 else np.uint8)
        words = plan.frame_bytes // self._word.itemsize
        self._frames = self._allocate_frames((plan.capacity, words))
        self._meta = np.zeros((plan.capacity, layout.META_WORDS + plan.action_words), np.uint32)
        self._meta_f = self._meta.view(np.float32)
        self._counts = np.zeros(plan.num_envs, np.int64)
        self._broken = np.ones(plan.num_envs, np.uint8)
        self._last = np.zeros((plan.num_envs, words * plan.depth * (plan.depth > 1)), self._word)
        self._size = np.zeros(1, np.int64)
        self._starts, self._mass, self._tree = np.zeros(0, np.int64), np.zeros(0), np.zeros(0)
        if plan.prioritized:
            self._starts = layout.tree_starts(plan.capacity)
            self._mass = np.zeros(plan.capacity)
            self._tree = np.zeros(int(self._starts[-1]) + layout.FANOUT)
        self._max_priority = 1.0
        states = self._sequences.state if self._sequences else {}
        places = (plan.rows // plan.stride, plan.num_envs)
        self._states = {k: np.zeros((*places, *shape), np.float32) for k, shape in states.items()}
        self._scratch: tuple[np.ndarray, ...] = (np.zeros(0, np.int64),) * 4

    def _allocate_frames(self, shape: tuple[int, int]) -> np.ndarray:
        layout.refuse_if_too_large(self.layout, layout.available_memory(), "of memory")
        return np.zeros(shape, self._word)

    @property
    def size(self) -> int:
        """Transitions (begins of sequences) that can be drawn now."""
        return int(self._size[0])

    @property
    def nbytes(self) -> int:
        """Bytes of storage."""
        arrays = (self._frames, self._meta, self._counts, self._broken, self._last, self._mass)
        return sum(a.nbytes for a in (*arrays, self._tree, *self._states.values()))

    # -- writing -----------------------------------------------------------------------------

    def add(
        self, obs: np.ndarray, action: np.ndarray, extras: Mapping[str, Tensor], step: Step
    ) -> None:
        """Store the next row of the step's environments; see `types.ReplayBuffer.add`."""
        self._append(
            obs[None], action[None], step.reward[None], step.terminated[None],
            step.truncated[None], step.valid[None], step.env_ids, None, extras,
        )  # fmt: skip

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
        if not follows:
            self.cut(steps.env_ids)
        given = None
        if priorities is not None:
            if self._priorities is None:
                raise ValueError("priorities have no effect on buffer=uniform")
            given = self._priorities.checked(priorities)
        self._append(
            obs, action, steps.reward, steps.terminated, steps.truncated, steps.valid,
            steps.env_ids, given, extras or {},
        )  # fmt: skip

    def cut(self, env_ids: np.ndarray | None = None) -> None:
        """Say that the next row of these environments (all) does not follow their newest.

        After environments were restarted, for example: the newest row, whose outcome is unknown,
        only remains as the successor of the one before.
        """
        with self._lock:
            ids = np.arange(self.layout.num_envs) if env_ids is None else env_ids.astype(np.int64)
            changed, written, source, which = self._outputs(len(ids))
            num_changed, num_written = kernels.cut(
                ids, self.layout.rows, self._span, self.layout.stride, self._meta, self._counts,
                self._broken, self._size, changed, written,
            )  # fmt: skip
            self._masses(written, source, 0, _NONE, changed, num_changed)

    def _append(
        self,
        obs: np.ndarray,
        action: np.ndarray,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        valid: np.ndarray,
        env_ids: np.ndarray,
        priorities: np.ndarray | None,
        extras: Mapping[str, Tensor],
    ) -> None:
        rows = (len(obs), len(env_ids))
        if obs.dtype != self.spec.obs_dtype or obs.shape != (*rows, *self.spec.obs_shape):
            raise ValueError(
                f"observations {obs.dtype} {obs.shape} do not fit {self.spec.id}'s "
                f"{self.spec.obs_dtype} {(*rows, *self.spec.obs_shape)}"
            )
        if extras.keys() != self._states.keys():
            raise ValueError(f"extras {sorted(extras)} given, {sorted(self._states)} are stored")
        plan = self.layout
        action = np.ascontiguousarray(action, self._action_dtype).reshape(*rows, -1)
        with self._lock:
            changed, written, source, which = self._outputs(rows[0] * rows[1])
            num_changed, num_written = kernels.append(
                np.ascontiguousarray(obs).reshape(*rows, -1).view(self._word),
                action.view(np.uint32), reward, terminated, truncated, valid, env_ids,
                plan.rows, plan.depth, self._span, plan.stride, True,
                self._frames, self._meta, self._meta_f, self._counts, self._broken, self._last,
                self._size, changed, written, source, which,
            )  # fmt: skip
            if num_changed < 0:
                raise self._refusal(num_changed, num_written)
            given = _NONE
            if priorities is not None and self._priorities is not None:
                given = priorities**self._priorities.alpha
                self._max_priority = max(self._max_priority, float(priorities.max()))
            if self._states:
                self._keep_states(written[:num_written], source, which, extras)
            self._masses(written, source, num_written, given, changed, num_changed)

    def _masses(
        self,
        written: np.ndarray,
        source: np.ndarray,
        num_written: int,
        given: np.ndarray,
        changed: np.ndarray,
        num_changed: int,
    ) -> None:
        if self._priorities is not None:
            usual = self._max_priority**self._priorities.alpha
            kernels.weigh(
                written, source, num_written, given, usual, changed, num_changed, self._meta,
                self._mass, self._tree, self._starts,
            )  # fmt: skip

    def _keep_states(
        self,
        written: np.ndarray,
        source: np.ndarray,
        which: np.ndarray,
        extras: Mapping[str, Tensor],
    ) -> None:
        """Store the states that rows at the begin of a sequence came with."""
        plan, num = self.layout, len(written)
        time = written // plan.num_envs
        begins = (time % plan.stride == 0) & (which[:num] == plan.depth - 1)
        place = (time[begins] // plan.stride, written[begins] % plan.num_envs)
        for name, state in self._states.items():
            given = extras[name].detach().cpu().numpy().reshape(-1, *state.shape[2:])
            state[place] = given[source[:num][begins]]

    def _outputs(self, rows: int) -> tuple[np.ndarray, ...]:
        """Room for what the kernels report: changed, written, source, which."""
        # Each row may need the older frames of its stack; each written one may change the rows
        # whose stacks reach into its slot, and those it completes.
        written = rows * self.layout.depth
        changed = written * (self.layout.depth + self._span)
        if len(self._scratch[0]) < changed:
            sizes = (changed, written, written, written)
            self._scratch = tuple(np.empty(size, np.int64) for size in sizes)
        return self._scratch

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

    # -- drawing -----------------------------------------------------------------------------

    def sample(self, batch_size: int, progress: float = 0.0) -> Batch:
        """Draw with replacement; `progress` in [0, 1] anneals beta.

        Raises ValueError while nothing can be drawn.
        """
        with self._lock:
            return self.gather(self.draw(batch_size, progress))

    def draw(self, batch_size: int, progress: float = 0.0, rng: np.ndarray | None = None) -> Draw:
        """The first half of `sample`; `rng` (a copy of the state) leaves the buffer's alone."""
        rng = self._rng if rng is None else rng
        ids, slots, ends, spans = np.empty((4, batch_size), np.int64)
        with self._lock:
            if not self._size[0]:
                raise ValueError("nothing can be drawn yet: the buffer holds no transition")
            if self._priorities is None:
                kernels.draw_uniform(
                    rng, self.layout.rows, self.n_step, self._meta, self._counts,
                    ids, slots, ends, spans,
                )  # fmt: skip
                return Draw(ids, slots, ends, spans, np.ones(batch_size, np.float32))
            mass = np.empty(batch_size)
            kernels.draw_prioritized(
                rng, self.layout.rows, self.n_step, self._meta, self._counts, self._tree,
                self._starts, ids, slots, ends, spans, mass,
            )  # fmt: skip
        # (size P(i))^-beta over the batch's largest: size and sum cancel out.
        weight = (mass.min() / mass) ** self._priorities.beta_at(progress)
        return Draw(ids, slots, ends, spans, weight.astype(np.float32))

    def gather(self, draw: Draw) -> Batch:
        """The second half of `sample`: copy the rows out; none may be overwritten between."""
        plan, size = self.layout, len(draw.ids)
        words = self._frames.shape[1] * plan.depth
        obs, next_obs = np.empty((size, words), self._word), np.empty((size, words), self._word)
        action = np.empty((size, plan.action_words), np.uint32)
        reward, discount = np.empty((2, size), np.float32)
        with self._lock:
            kernels.gather(
                draw.slots, draw.ends, draw.spans, plan.num_envs, plan.depth, self.gamma,
                self._frames, self._meta, self._meta_f, obs, next_obs, action, reward, discount,
            )  # fmt: skip
        tensor = torch.from_numpy
        shape = (size, *self.spec.obs_shape)
        return Batch(
            obs=tensor(obs.view(self.spec.obs_dtype).reshape(shape)),
            action=tensor(action.view(self._action_dtype).reshape(size, *self._action_shape)),
            reward=tensor(reward),
            discount=tensor(discount),
            next_obs=tensor(next_obs.view(self.spec.obs_dtype).reshape(shape)),
            weight=tensor(draw.weight),
            ids=draw.ids,
        )

    def sample_sequences(self, batch_size: int, progress: float = 0.0) -> SequenceBatch:
        """Draw whole sequences, time-major; see `types.SequenceBatch`."""
        if self._sequences is None:
            raise ValueError("this buffer was built for transitions: give it `sequences`")
        plan, span = self.layout, self._sequences.span
        rows = (span, batch_size)
        words = self._frames.shape[1] * plan.depth
        obs = np.empty((span + 1, batch_size, words), self._word)
        action = np.empty((*rows, plan.action_words), np.uint32)
        reward, discount, mask = (np.empty(rows, np.float32) for _ in range(3))
        with self._lock:
            ids, slots, _, _, weight = self.draw(batch_size, progress)
            kernels.gather_sequences(
                slots, plan.num_envs, plan.depth, self.gamma, self._frames, self._meta,
                self._meta_f, obs, action, reward, discount, mask,
            )  # fmt: skip
            time = slots // plan.num_envs // plan.stride
            states = {k: state[time, ids % plan.num_envs] for k, state in self._states.items()}
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
            raise ValueError("priorities have no effect on buffer=uniform")
        values = self._priorities.checked(priorities)
        ids = np.ascontiguousarray(ids, np.int64)
        if ids.shape != values.shape:
            raise ValueError(f"{len(values)} priorities for {len(ids)} transitions")
        mass = values**self._priorities.alpha
        with self._lock:
            if len(values):
                self._max_priority = max(self._max_priority, float(values.max()))
            return kernels.set_masses(
                ids, mass, self.layout.rows, self._meta, self._counts, self._mass, self._tree,
                self._starts, np.empty(len(ids), np.int64),
            )  # fmt: skip

    # -- saving ------------------------------------------------------------------------------

    def _arrays(self) -> dict[str, np.ndarray]:
        """What is saved slot by slot."""
        arrays = {"frames": self._frames, "meta": self._meta}
        if self._priorities is not None:
            arrays["mass"] = self._mass
        return arrays

    def state_dict(self) -> dict[str, Any]:
        """Contents, cursors, priorities and random state.

        What is stored slot by slot is not copied: save it before the next `add`.
        """
        plan = self.layout
        with self._lock:
            used = min(int(self._counts.max()), plan.rows)
            tensors = {
                name: _saved(a[: used * plan.num_envs]) for name, a in self._arrays().items()
            }
            for name in ("counts", "broken", "last", "rng"):
                tensors[name] = _saved(getattr(self, f"_{name}").copy())
            states = {k: _saved(a[: -(-used // plan.stride)]) for k, a in self._states.items()}
        return {
            **tensors, "states": states, "rows": plan.rows, "frame_stack": plan.depth,
            "max_priority": self._max_priority,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`, into a buffer of at least that capacity.

        Raises ValueError where the capacity is smaller or the contents are of another kind.
        """
        self._check_state(state)
        plan, rows = self.layout, int(state["rows"])
        with self._lock:
            for name in ("counts", "broken", "last", "rng"):
                ours = getattr(self, f"_{name}")
                ours[...] = state[name].numpy().view(ours.dtype)
            self._max_priority = float(state["max_priority"])
            # Row k lives in slot k % rows: elsewhere in a larger ring.
            time = np.arange(len(state["meta"]) // plan.num_envs)[:, None]
            number = self._counts - 1 - (self._counts - 1 - time) % rows
            exists = number >= 0
            env = np.nonzero(exists)[1]
            old = (time * plan.num_envs + np.arange(plan.num_envs))[exists]
            new = number[exists] % plan.rows * plan.num_envs + env
            for name, ours in self._arrays().items():
                theirs = state[name].numpy().view(ours.dtype)
                if rows == plan.rows:
                    ours[: len(theirs)] = theirs
                else:
                    ours[new] = theirs[old]
            begins = exists[:: plan.stride]
            at = number[:: plan.stride][begins] % plan.rows // plan.stride
            for name, ours in self._states.items():
                ours[at, np.nonzero(begins)[1]] = state["states"][name].numpy()[begins]
            self._recount()

    def _recount(self) -> None:
        """Count the drawable rows and sum their masses anew."""
        drawable = (self._meta[:, kernels.FLAGS] & kernels.DRAWABLE) != 0
        self._size[0] = np.count_nonzero(drawable)
        if self._priorities is not None:
            self._tree[: len(drawable)] = np.where(drawable, self._mass, 0.0)
            kernels.tree_refresh(self._tree, self._starts, np.arange(len(drawable)), len(drawable))

    def _check_state(self, state: dict[str, Any]) -> None:
        plan = self.layout
        if len(state["counts"]) != plan.num_envs:
            raise ValueError(
                f"the saved replay is of backend.num_envs={len(state['counts'])}, not "
                f"{plan.num_envs}"
            )
        if state["rows"] > plan.rows:
            raise ValueError(
                f"the saved replay has {state['rows'] * plan.num_envs} rows and does not fit into "
                f"buffer.capacity={plan.capacity}; use buffer.capacity="
                f"{state['rows'] * plan.num_envs}, or buffer.save=false to begin with an empty one"
            )
        wanted = {**self._arrays(), "last": self._last}
        same = state["frame_stack"] == plan.depth and all(
            name in state
            and state[name].shape[1:] == ours.shape[1:]
            and state[name].numpy().dtype.itemsize == ours.dtype.itemsize
            for name, ours in wanted.items()
        )
        if not same or ("mass" in state) != (self._priorities is not None):
            raise ValueError("the saved replay holds other observations, actions or priorities")
        if state["states"].keys() != self._states.keys():
            raise ValueError("the saved replay holds other recurrent states")


_NONE = np.zeros(0)


def _saved(array: np.ndarray) -> Tensor:
    """The same bytes as a tensor that torch can save."""
    size = array.dtype.itemsize
    return torch.from_numpy(
        array.view(f"i{size}") if array.dtype.kind == "u" and size > 1 else array
    )
