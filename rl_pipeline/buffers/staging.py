"""Batches on their way to a GPU: put together in pinned memory, copied while the learner works."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rl_pipeline.buffers.replay import Draw, Replay
from rl_pipeline.types import Batch, EnvSpec


class Event(Protocol):
    """Something a device does later."""

    def synchronize(self) -> None:
        """Wait until it is done."""


class Transfer(Protocol):
    """Copies to a device that finish later than they are started."""

    def pin(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory that can be copied from."""

    def start(self, host: Sequence[Tensor]) -> tuple[list[Tensor], Event]:
        """Start copying; the tensors are safe to use on the device, the event guards `host`."""


class CudaTransfer:
    """On a stream of its own, so that copies overlap with the learner's kernels."""

    def __init__(
        self, device: torch.device, sent: Callable[[int, float], None] = lambda nbytes, begin: None
    ) -> None:
        """`sent(nbytes, begin)` is told of every copy, `begin` as of perf_counter."""
        self._device, self._stream, self._sent = device, torch.cuda.Stream(device), sent

    def pin(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Page-locked memory."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def start(self, host: Sequence[Tensor]) -> tuple[list[Tensor], Event]:
        """The learner's stream waits for the copies, the host does not."""
        learner = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            copies = []
            for x in host:
                begin = time.perf_counter()
                copies.append(x.to(self._device, non_blocking=True))
                self._sent(x.nbytes, begin)
            done = torch.cuda.Event()
            done.record(self._stream)
        learner.wait_event(done)
        for copy in copies:
            copy.record_stream(learner)  # its memory must outlive the learner's kernels
        return copies, done


class StagedReplay(Replay):
    """`replay.Replay` with batches on a GPU; `buffer.placement=pinned`.

    Batches are put together in turn in `num_slots` places of pinned memory. A place is written
    again only once its last copy has arrived: else the device would see rows of the next batch.
    """

    def __init__(
        self,
        spec: EnvSpec,
        capacity: int,
        *,
        transfer: Transfer,
        num_slots: int = 2,
        **options: Any,
    ) -> None:
        """`options` are those of `Ring`."""
        if num_slots < 2:
            raise ValueError(
                f"num_slots={num_slots}: one place cannot be filled while it is copied"
            )
        self._transfer, self._next = transfer, 0
        self._places: list[list[Tensor]] = [[] for _ in range(num_slots)]
        self._arrived: list[Event | None] = [None] * num_slots
        super().__init__(spec, capacity, **options)

    def _room(self, size: int) -> tuple[np.ndarray, ...]:
        self._next = (self._next + 1) % len(self._places)
        if (arrived := self._arrived[self._next]) is not None:
            arrived.synchronize()
        place = self._places[self._next]
        if not place or len(place[0]) != size:
            place = self._places[self._next] = self._pin(size)
        obs, next_obs, action, reward, discount, _ = (x.numpy() for x in place)
        return (
            obs.reshape(size, -1).view(self._word),
            next_obs.reshape(len(next_obs), math.prod(self.spec.obs_shape)).view(self._word),
            action.reshape(size, -1).view(np.uint32),
            reward,
            discount,
        )

    def _pin(self, size: int) -> list[Tensor]:
        dtype = torch.from_numpy(np.empty(0, self.spec.obs_dtype)).dtype
        depth, *rest = self.spec.obs_shape
        obs = ((size, depth + self._shares_frames, *rest), dtype)
        next_obs = ((0 if self._shares_frames else size, depth, *rest), dtype)
        action = ((size, *self._action_shape), torch.float32 if self._box else torch.int64)
        number = ((size,), torch.float32)
        wanted = (obs, next_obs, action, number, number, number)
        return [self._transfer.pin(shape, dtype) for shape, dtype in wanted]

    def _deliver(self, draw: Draw, room: tuple[np.ndarray, ...]) -> Batch:
        place = self._places[self._next]
        place[-1].copy_(torch.from_numpy(draw.weight))
        copies, self._arrived[self._next] = self._transfer.start(place)
        obs, next_obs, action, reward, discount, weight = copies
        if self._shares_frames:
            obs, next_obs = obs[:, :-1], obs[:, 1:]
        return Batch(obs, action, reward, discount, next_obs, weight, draw.ids)
