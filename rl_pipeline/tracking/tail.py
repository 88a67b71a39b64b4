"""Reads a run's metrics.jsonl from where the last reader stopped, in batches for the store."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

# What MLflow takes in a call, with the tag that may travel along.
CALL_VALUES = 999
# The room left is for samples of the machine.
BATCH_VALUES = 960
# MLflow stores +inf as 1.8e308, which ruins every plot; what is beyond this counts as non-finite.
LARGEST = 1e300
LARGEST_INT = 2**63


@dataclass
class Batch:
    """Rows for one call of the store; values are (name, value, time in ms, step)."""

    offset: int
    """Byte of metrics.jsonl behind the last row in here."""
    count: int
    """Non-finite values of the run up to here."""
    values: list[tuple[str, float, int, int]] = field(default_factory=list)
    nonfinite: dict[str, str] = field(default_factory=dict)


class Tail:
    """Reads whole rows of `path` from a byte offset on; each (name, step) goes out once."""

    def __init__(self, path: Path, offset: int, count: int) -> None:
        self._path, self.skipped = path, 0
        self._names: dict[str, int] = {}
        self._seen: dict[int, int] = {}  # step -> one bit per name
        # A file shorter than what was shipped was replaced: begin again.
        begin = offset if path.is_file() and path.stat().st_size >= offset >= 0 else 0
        self._last = Batch(begin, count)
        # A resumed trainer repeats the steps after its checkpoint; the store must not have both.
        for line, _ in self._lines(0, begin):
            self._take(line, Batch(0, 0))

    def next(self) -> Batch | None:
        """The next rows, about BATCH_VALUES values at most; None if there is nothing new."""
        batch = Batch(self._last.offset, self._last.count)
        for line, end in self._lines(batch.offset):
            taken = self._take(line, batch)
            batch.offset = end
            if len(batch.values) + taken > BATCH_VALUES:
                break
        if batch.offset == self._last.offset:
            return None
        self._last = batch
        return batch

    def _lines(self, start: int, stop: float = float("inf")) -> Iterator[tuple[bytes, int]]:
        if not self._path.is_file():
            return
        with open(self._path, "rb") as file:
            file.seek(start)
            # The last line may still be in writing.
            while start < stop and (line := file.readline()).endswith(b"\n"):
                start += len(line)
                yield line, start

    def _take(self, line: bytes, batch: Batch) -> int:
        try:
            row = json.loads(line)
            step, time_ms = int(row["step"]), int(row["time"] * 1000)
            if not (abs(step) < LARGEST_INT and abs(time_ms) < LARGEST_INT):
                raise ValueError("more than a database's integer")
            # float() also reads the words inf, -inf and nan; null means that there is no value.
            values = {store_name(k): float(v) for k, v in row["metrics"].items() if v is not None}
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            self.skipped += 1  # torn by a killed trainer; the rows around it are good
            return 0
        bad = {name: value for name, value in values.items() if not abs(value) <= LARGEST}
        if bad:
            batch.count += len(bad)
            batch.nonfinite |= {
                name: f"{name}={value} at step {step}" for name, value in bad.items()
            }
            values = {name: value for name, value in values.items() if name not in bad}
            values["nonfinite/count"] = float(batch.count)
        for name, value in values.items():
            bit = 1 << self._names.setdefault(name, len(self._names))
            if not self._seen.get(step, 0) & bit:
                self._seen[step] = self._seen.get(step, 0) | bit
                batch.values.append((name, value, time_ms, step))
        return len(values)


@lru_cache(maxsize=4096)
def store_name(key: str) -> str:
    """`key` as MLflow accepts it; one bad name would have its whole batch refused."""
    parts = re.sub(r"[^\w\-. :/]", "_", key).split("/")
    return "/".join(part for part in parts if part not in ("", ".", ".."))[:250] or "_"
