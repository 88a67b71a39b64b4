"""Replay on the learner's device: storage, draws and all that is put together, in torch only.

The books stay on the host (`ring.py`), where the environments are; they say which rows to write
and which masses change. Nothing here waits for the device, except saving.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_pipeline.buffers.kernels import (
    ACTION,
    DRAWABLE,
    FLAGS,
    HISTORY,
    REWARD,
    TERMINATED,
    TRUNCATED,
    VALID,
)
from rl_pipeline.buffers.layout import refuse_if_too_large, tree_size
from rl_pipeline.buffers.ring import Ring
from rl_pipeline.types import Batch, EnvSpec, SequenceBatch


class DeviceReplay(Ring):
    """`replay.Replay` on a GPU, with the same rules; `buffer.placement=cuda`.

    The sum tree has wide nodes, so that a draw is a handful of kernels; uniform draws use it with
    equal masses. Random numbers are the device's own: draws differ from those of `Replay`.
    """

    _keeps_frames = False
    _fanout = 128
    _always_weighs = True

    def __init__(
        self,
        spec: EnvSpec,
        capacity: int,
        *,
        device: torch.device,
        send: Callable[[np.ndarray], Tensor] | None = None,
        **options: Any,
    ) -> None:
        """`send` copies an array to the device; `options` are those of `Ring`."""
        self._device = device
        self._send = send or (lambda array: torch.from_numpy(array).to(device))
        super().__init__(spec, capacity, **options)

    def _allocate(self) -> None:
        layout, spec = self.layout, self.spec
        if self._device.type == "cuda":
            free = torch.cuda.mem_get_info(self._device)[0]
            refuse_if_too_large(layout, free, f"of memory on {self._device}")
        self._generator = torch.Generator(self._device).manual_seed(self._seed >> 1)
        frame = spec.obs_shape[1:] if layout.depth > 1 else spec.obs_shape
        dtype = torch.from_numpy(np.zeros(0, spec.obs_dtype)).dtype
        self._rows = self._zeros(layout.capacity, *frame, dtype=dtype)
        self._records = self._zeros(*self._meta.shape, dtype=torch.int32)
        self._written = self._zeros(layout.num_envs, dtype=torch.int64)
        self._mass = self._zeros(layout.capacity, dtype=torch.float64)
        self._tree = self._zeros(tree_size(self._starts) + layout.fanout, dtype=torch.float64)
        self._max_priority = self._zeros(dtype=torch.float64) + 1.0
        places = (layout.rows // layout.stride, layout.num_envs)
        self._states = {
            name: self._zeros(*places, *shape, dtype=torch.float32)
            for name, shape in self._state_shapes.items()
        }
        self._children = torch.arange(layout.fanout, device=self._device)

    def _zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    @property
    def nbytes(self) -> int:
        """Bytes of storage on the device; the books on the host are small."""
        tensors = (self._rows, self._records, self._written, self._mass, self._tree)
        return sum(x.nbytes for x in (*tensors, *self._states.values()))

    # -- writing -----------------------------------------------------------------------------

    def _store(
        self,
        obs: np.ndarray | None,
        given: np.ndarray,
        extras: Mapping[str, Tensor],
        reported: np.ndarray,
        num_changed: int,
        num_written: int,
    ) -> None:
        layout = self.layout
        changed = reported[0, :num_changed].copy()
        written, source, which = reported[1:, :num_written].copy()
        slots = self._send(written)
        self._records[slots] = self._send(self._meta[written].view(np.int32))
        self._written.copy_(self._send(self._counts.copy()))
        if obs is not None:
            stacks = obs.reshape(-1, layout.depth, *self._rows.shape[1:])
            self._rows[slots] = self._send(stacks[source, which])
            self._mass[slots] = self._send(given[source]) if len(given) else self._usual()
            self._keep_states(written, source, which, extras)
        drawable = self._meta[changed, FLAGS] & DRAWABLE != 0
        leaves = self._send(changed)
        # A slot that changed twice is here twice, with one and the same mass.
        self._tree[leaves] = self._mass[leaves] * self._send(drawable)
        self._refresh(leaves)

    def _usual(self) -> Tensor:
        return self._max_priority ** (self._priorities.alpha if self._priorities else 0.0)

    def _raise_largest(self, priorities: np.ndarray | Tensor) -> None:
        if len(priorities):
            largest = torch.as_tensor(priorities, dtype=torch.float64, device=self._device).max()
            self._max_priority = torch.maximum(self._max_priority, largest)

    def _keep_states(
        self,
        written: np.ndarray,
        source: np.ndarray,
        which: np.ndarray,
        extras: Mapping[str, Tensor],
    ) -> None:
        layout = self.layout
        time, env = written // layout.num_envs, written % layout.num_envs
        begins = (time % layout.stride == 0) & (which == layout.depth - 1)
        place = (self._send(time[begins] // layout.stride), self._send(env[begins]))
        for name, state in self._states.items():
            given = extras[name].to(self._device).reshape(-1, *state.shape[2:])
            state[place] = given[self._send(source[begins])]

    # -- the sum tree ------------------------------------------------------------------------

    def _refresh(self, nodes: Tensor) -> None:
        """Sum the ancestors of these leaves anew: equal nodes get equal sums, in any order."""
        fanout = self.layout.fanout
        for below, level in zip(self._starts[:-1].tolist(), self._starts[1:].tolist(), strict=True):
            nodes = nodes // fanout
            children = below + nodes[:, None] * fanout + self._children
            self._tree[level + nodes] = self._tree[children].sum(1)

    def _find(self, values: Tensor) -> Tensor:
        """The leaf whose share of [0, root) holds each value; never one without mass."""
        fanout = self.layout.fanout
        nodes = torch.zeros_like(values, dtype=torch.int64)
        for start in reversed(self._starts[:-1].tolist()):
            mass = self._tree[start + nodes[:, None] * fanout + self._children]
            upto = mass.cumsum(1)
            has_mass = mass > 0
            last = (has_mass * self._children).argmax(1)
            fits = has_mass & (upto > values[:, None])
            child = torch.where(fits.any(1), fits.to(torch.uint8).argmax(1), last)
            at = child[:, None]
            values = (values - (upto.gather(1, at) - mass.gather(1, at))[:, 0]).clamp(min=0.0)
            nodes = nodes * fanout + child
        return nodes

    # -- drawing -----------------------------------------------------------------------------

    def sample(self, batch_size: int, progress: float = 0.0) -> Batch:
        """See `replay.Replay.sample`."""
        with self.lock:
            slots, ids, newest, weight = self._draw(batch_size, progress)
            return self._gather(slots, ids, newest, weight)

    def _draw(self, size: int, progress: float) -> tuple[Tensor, ...]:
        if not self._size[0]:
            raise ValueError("nothing can be drawn yet: the buffer holds no transition")
        layout = self.layout
        u = torch.rand(size, generator=self._generator, device=self._device, dtype=torch.float64)
        parts = torch.arange(size, device=self._device) if self._priorities else 0
        part = self._tree[int(self._starts[-1])] / (size if self._priorities else 1)
        slots = self._find((parts + u) * part)
        mass = self._tree[slots]
        beta = self._priorities.beta_at(progress) if self._priorities else 0.0
        weight = ((mass.min() / mass) ** beta).to(torch.float32)
        env = slots % layout.num_envs
        newest = self._written[env] - 1
        row = newest - (newest - slots // layout.num_envs) % layout.rows
        return slots, row * layout.num_envs + env, newest - row, weight

    def _after(self, slots: Tensor, rows: int | Tensor) -> Tensor:
        return (slots + rows * self.layout.num_envs) % self.layout.capacity

    def _gather(self, slots: Tensor, ids: Tensor, later: Tensor, weight: Tensor) -> Batch:
        record = self._records[slots]
        total, factor = _reward(record).double(), torch.full_like(weight, self.gamma).double()
        ended, end = record[:, FLAGS] & TERMINATED != 0, self._after(slots, 1)
        goes_on = torch.ones_like(ended)
        for i in range(1, self.n_step):
            following = self._records[end]
            goes_on = goes_on & (later > i) & (following[:, FLAGS] & VALID != 0)
            total += torch.where(goes_on, factor * _reward(following), 0.0)
            ended |= goes_on & (following[:, FLAGS] & TERMINATED != 0)
            factor = torch.where(goes_on, factor * self.gamma, factor)
            end = torch.where(goes_on, self._after(end, 1), end)
        return Batch(
            obs=self._observe(slots),
            action=self._action(record),
            reward=total.float(),
            discount=torch.where(ended, 0.0, factor).float(),
            next_obs=self._observe(end),
            weight=weight,
            ids=ids,
        )

    def _observe(self, slots: Tensor) -> Tensor:
        """Observations of rows [...], their frame stacks rebuilt."""
        depth = self.layout.depth
        if depth == 1:
            return self._rows[slots]
        history = self._records[slots][..., HISTORY, None]
        back = torch.minimum(torch.arange(depth - 1, -1, -1, device=self._device), history)
        return self._rows[self._after(slots[..., None], -back)]

    def _action(self, record: Tensor) -> Tensor:
        dtype = torch.float32 if self._box else torch.int64
        words = record[..., ACTION:].clone(memory_format=torch.contiguous_format).view(dtype)
        return words.reshape(*record.shape[:-1], *self._action_shape)

    def sample_sequences(self, batch_size: int, progress: float = 0.0) -> SequenceBatch:
        """See `replay.Replay.sample_sequences`."""
        if self._sequences is None:
            raise ValueError("this buffer was built for transitions: give it `sequences`")
        layout, span = self.layout, self._sequences.span
        with self.lock:
            slots, ids, _, weight = self._draw(batch_size, progress)
            steps = torch.arange(span + 1, device=self._device)[:, None]
            at = self._after(slots, steps)
            record = self._records[at[:-1]]
            flags = record[..., FLAGS]
            ended = flags & (TERMINATED | TRUNCATED) != 0
            # A row is of the sequence if it is valid and nothing ended before it.
            broken = (flags & VALID == 0).int()
            broken[1:] += ended[:-1]
            mask = broken.cumsum(0) == 0
            obs = self._observe(at)
            seen = torch.cat([torch.ones_like(mask[:1]), mask])
            discount = torch.where(flags & TERMINATED != 0, 0.0, self.gamma) * mask
            action = self._action(record)
            place = (slots // layout.num_envs // layout.stride, slots % layout.num_envs)
            return SequenceBatch(
                obs=torch.where(_like(seen, obs), obs, obs.new_zeros(())),
                action=torch.where(_like(mask, action), action, action.new_zeros(())),
                reward=_reward(record) * mask,
                discount=discount,
                mask=mask.float(),
                state={name: state[place] for name, state in self._states.items()},
                burn_in=self._sequences.burn_in,
                weight=weight,
                ids=ids,
            )

    def update_priorities(
        self, ids: np.ndarray | Tensor, priorities: np.ndarray | Tensor
    ) -> Tensor:
        """See `replay.Replay.update_priorities`; how many existed stays on the device.

        On a GPU, where checking would wait for it, priorities that are not finite and above 0
        stop the program at the device's next synchronisation.
        """
        if self._priorities is None:
            raise ValueError(
                "this buffer draws uniformly and takes no priorities; use buffer=prioritized"
            )
        ids = torch.as_tensor(ids, device=self._device)
        values = torch.as_tensor(priorities, dtype=torch.float64, device=self._device).reshape(-1)
        if ids.shape != values.shape:
            raise ValueError(f"{len(values)} priorities for {len(ids)} transitions")
        fine = ((values > 0) & (values < torch.inf)).all()
        if self._device.type == "cuda":
            torch._assert_async(fine, "priorities must be finite and above 0")
        elif not fine:
            raise ValueError("priorities must be finite and above 0 (add a small constant)")
        layout = self.layout
        with self.lock:
            self._raise_largest(values)
            env, row = ids % layout.num_envs, ids // layout.num_envs
            slots = row % layout.rows * layout.num_envs + env
            written = self._written[env]
            alive = (ids >= 0) & (row >= written - layout.rows) & (row < written)
            alive &= self._tree[slots] > 0
            new = torch.where(alive, values**self._priorities.alpha, 0.0)
            # First to 0 where something new comes, then up to the largest of it: the same
            # whatever the order, and a late id leaves the newer row in its slot alone.
            erase = torch.full_like(new, torch.inf).masked_fill(alive, 0.0)
            for masses in (self._mass, self._tree):
                masses.scatter_reduce_(0, slots, erase, "amin")
                masses.scatter_reduce_(0, slots, new, "amax")
            self._refresh(slots)
            return alive.sum()

    # -- saving ------------------------------------------------------------------------------

    def _contents(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        frames = self._rows.cpu().numpy().reshape(self.layout.capacity, -1).view(self._word)
        arrays = {"frames": frames, "meta": self._meta}
        if self._priorities is not None:
            arrays["mass"] = self._mass.cpu().numpy()
        return arrays, {name: state.cpu().numpy() for name, state in self._states.items()}

    def _install(self, arrays: dict[str, np.ndarray], states: dict[str, np.ndarray]) -> None:
        frames = arrays["frames"].view(self.spec.obs_dtype).reshape(self._rows.shape)
        self._rows.copy_(torch.from_numpy(frames))
        self._records.copy_(torch.from_numpy(self._meta.view(np.int32)))
        self._written.copy_(torch.from_numpy(self._counts))
        for name, state in self._states.items():
            state.copy_(torch.from_numpy(states[name]))
        if self._priorities is not None:
            self._mass.copy_(torch.from_numpy(arrays["mass"]))
        else:
            self._mass.fill_(1.0)
        self._max_priority = torch.tensor(self._max_priority, dtype=torch.float64)
        self._max_priority = self._max_priority.to(self._device)
        leaves = torch.arange(self.layout.capacity, device=self._device)
        self._tree[leaves] = self._mass * self._send(self._drawable())
        self._refresh(leaves)

    def _random_state(self) -> Tensor:
        return self._generator.get_state()

    def _set_random_state(self, state: Tensor) -> None:
        if state.shape != self._generator.get_state().shape:
            raise ValueError(
                "the saved replay had another buffer.placement: its draws cannot go on"
            )
        self._generator.set_state(state)


def _reward(record: Tensor) -> Tensor:
    return record[..., REWARD].clone().view(torch.float32)


def _like(mask: Tensor, values: Tensor) -> Tensor:
    """`mask` with as many axes as `values`."""
    return mask.reshape(*mask.shape, *(1,) * (values.dim() - mask.dim()))
