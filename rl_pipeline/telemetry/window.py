"""Metrics of all updates since the last log tick, as tensors until they are read."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_pipeline.types import Metrics

UNDEFINED = ("loss/explained_variance",)
"""Statistics that some data have none of: there they are NaN, and left out. NaN elsewhere stays."""
FOLD_AT = 64
"""Values kept apart: adding them up costs the device's time, keeping them its memory."""


class Window:
    """Means over the updates since the last `read`, and maxima of what is called a maximum.

    Plain numbers (the learning rate) count as of the last update.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = {}
        self._folded: dict[str, tuple[Tensor, Tensor | int]] = {}
        self._last: dict[str, float] = {}

    def add(self, metrics: Metrics) -> None:
        """Take in one update's metrics; nothing is computed and nothing waited for."""
        for name, value in metrics.items():
            if not isinstance(value, Tensor):
                self._last[name] = value
                continue
            values = self._values.setdefault(name, [])
            values.append(value)
            if len(values) >= FOLD_AT:
                self._fold(name)

    def read(self) -> Metrics:
        """The metrics of the window, which begins anew; absent where nothing was said."""
        for name in list(self._values):
            self._fold(name)
        metrics: dict[str, Tensor | float] = dict(self._last)
        for name, (total, count) in self._folded.items():
            if isinstance(count, int):
                metrics[name] = total
            elif count:  # read off the device: this is the log tick
                metrics[name] = total / count
        self._folded, self._last = {}, {}
        return metrics

    def _fold(self, name: str) -> None:
        values = torch.stack(self._values.pop(name))
        if name.endswith("_max") or "/max_" in name:
            before = self._folded.get(name)
            top = values.max()
            self._folded[name] = (top if before is None else top.maximum(before[0])), 1
            return
        known = torch.ones_like(values, dtype=torch.bool)
        if name in UNDEFINED:
            known = ~values.isnan()
        total, count = self._folded.get(name, (0, 0))
        self._folded[name] = (total + torch.where(known, values, 0).sum(), count + known.sum())
