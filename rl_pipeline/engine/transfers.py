"""Between host and device: every copy that training makes is on one ledger.

An act is one copy of observations in and one of actions out; then come a rollout's rows or a
replay's batches, what a replay on the device is given, and the priorities that one on the host gets
back. Evaluation, checkpoints and the log tick are not training.
"""

from __future__ import annotations

import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor

SLOTS = 2
"""Staging buffers per form of array: one is filled while the copy of the other is under way."""


@dataclass
class Direction:
    """Copies in one direction so far."""

    copies: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """Host time: launching the copy, and waiting where it must be waited for."""


class StagingRing:
    """Pinned buffers guarded by events: no slot is written before its copy has left it."""

    def __init__(
        self,
        pinned: Callable[[np.ndarray], Tensor],
        launch: Callable[[Tensor], tuple[Tensor, Any]],
        slots: int = SLOTS,
    ) -> None:
        """`pinned(array)` makes page-locked memory of its form; `launch(slot)` starts the copy and
        returns (device tensor, event), where `event.synchronize()` waits for the copy's end."""
        self._pinned, self._launch, self._num_slots = pinned, launch, slots
        self._rings: dict[tuple[Any, ...], list[tuple[Tensor, Any]]] = {}

    def __call__(self, array: np.ndarray) -> Tensor:
        """`array` on the device, in stream order; the array may change at once."""
        ring = self._rings.setdefault((array.shape, array.dtype.str), [])
        if len(ring) < self._num_slots:
            slot = self._pinned(array)
        else:
            slot, event = ring.pop(0)
            event.synchronize()
        slot.numpy()[...] = array
        tensor, event = self._launch(slot)
        ring.append((slot, event))
        return tensor


class Transfers:
    """The copies of a run; on the CPU there are none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.to_device_total, self.to_host_total = Direction(), Direction()
        self._stage = StagingRing(self._pin, self._launch)

    @staticmethod
    def _pin(array: np.ndarray) -> Tensor:
        return torch.empty_like(torch.from_numpy(array), pin_memory=True)

    def _launch(self, slot: Tensor) -> tuple[Tensor, Any]:
        tensor = slot.to(self._device, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return tensor, event

    def to_device(self, array: np.ndarray) -> Tensor:
        """`array` as a tensor on the device; on the CPU a view of it."""
        if self._device.type == "cpu":
            return torch.from_numpy(array)
        begin = time.perf_counter()
        tensor = self._stage(array)
        self._note(self.to_device_total, array.nbytes, begin)
        return tensor

    def send(self, array: np.ndarray) -> Tensor:
        """Like `to_device`, for arrays of ever new shapes: without a staging buffer for each."""
        if self._device.type == "cpu":
            return torch.from_numpy(array)
        begin = time.perf_counter()
        tensor = torch.from_numpy(array).to(self._device)
        self._note(self.to_device_total, array.nbytes, begin)
        return tensor

    def to_host(self, tensor: Tensor) -> np.ndarray:
        """`tensor` as an array, complete when this returns; on the CPU a view of it."""
        if self._device.type == "cpu":
            return tensor.detach().numpy()
        begin = time.perf_counter()
        array = tensor.detach().cpu().numpy()
        self._note(self.to_host_total, array.nbytes, begin)
        return array

    def sent(self, nbytes: int, begin: float) -> None:
        """Note a copy to the device that somebody else started, `begin` as of perf_counter."""
        self._note(self.to_device_total, nbytes, begin)

    @staticmethod
    def _note(total: Direction, nbytes: int, begin: float) -> None:
        total.copies += 1
        total.bytes += nbytes
        total.seconds += time.perf_counter() - begin

    def report(self, env_steps: int) -> dict[str, dict[str, float]]:
        """Bytes and host seconds per env step each way; empty where nothing was copied."""
        both = {"to_device": self.to_device_total, "to_host": self.to_host_total}
        return {
            name: {
                "copies": total.copies,
                "bytes_per_env_step": total.bytes / max(env_steps, 1),
                "seconds_per_env_step": total.seconds / max(env_steps, 1),
            }
            for name, total in both.items()
            if total.copies
        }


class HiddenWaits:
    """Places where the host waits for the device unasked: `.item()`, `if tensor:`.

    torch warns of each while its sync-debug mode is on. The copy of actions to the host (`d2h`)
    is meant, and so is what logging, evaluation and saving read.
    """

    MEANT = ("d2h", "log", "eval", "checkpoint")

    def __init__(self, phase: Callable[[], str]) -> None:
        """`phase()` names the phase that is open."""
        self._phase = phase
        self.found: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def watching(
        self, set_mode: Callable[[str], None] = torch.cuda.set_sync_debug_mode
    ) -> Iterator[None]:
        """Counts inside; other warnings are shown as ever."""
        with warnings.catch_warnings():
            warnings.filterwarnings("always", message=".*synchronizing CUDA operation")
            show = warnings.showwarning

            def count(
                message: Warning | str, category: type[Warning], filename: str, lineno: int,
                file: TextIO | None = None, line: str | None = None,
            ) -> None:  # fmt: skip
                if "synchronizing CUDA operation" not in str(message):
                    show(message, category, filename, lineno, file, line)
                elif (phase := self._phase()) not in self.MEANT:
                    place = os.sep.join(filename.split(os.sep)[-2:])
                    self.found[phase, f"{place}:{lineno}"] += 1

            warnings.showwarning = count
            set_mode("warn")
            try:
                yield
            finally:
                set_mode("default")

    def report(self) -> list[dict[str, Any]]:
        """By count, the most frequent first."""
        return [
            {"phase": phase, "where": where, "count": count}
            for (phase, where), count in self.found.most_common()
        ]
