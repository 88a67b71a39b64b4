"""Turns counters, phases and metrics into rows at the log tick, and into the run's summary."""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rl_pipeline.types import Episode, Metrics

RETURN_WINDOW = 100
"""Episodes in the running mean of the training return."""
STEADY_WINDOWS = 3
"""Fewer than this after the warm-up are no steady state."""
WARMUP_CAP_S = 30.0
"""The steady state begins no later than this after the first update."""

NOT_TRAINING = ("compile", "eval", "checkpoint")
"""Phases that no bottleneck is looked for in."""


class Counts(Protocol):
    """The loop's counters that the recorder reads."""

    env_steps: int
    updates: int
    episodes: int
    skipped_updates: int


class Recorder:
    """One row per tick in `metrics.jsonl`, on the env-step axis; nothing else on the hot path.

    Warm-up lasts until the first update is done and the tracker has opened its store: imports,
    first calls and store creation are not part of the steady rate.
    """

    def __init__(
        self,
        path: Path,
        every_s: float,
        frame_skip: int,
        phase_window: Callable[[], dict[str, float]],
        hardware_window: Callable[[], dict[str, float]],
        warm: Callable[[], bool],
        clock: Callable[[], float] = time.perf_counter,
        compile_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._every_s, self._frame_skip, self._clock = every_s, frame_skip, clock
        self._phase_window, self._hardware_window, self._warm = (
            phase_window, hardware_window, warm,
        )  # fmt: skip
        self._logged_step = _last_step(path)
        self._file = path.open("a", buffering=1)
        self.recent: deque[Episode] = deque(maxlen=RETURN_WINDOW)
        """The last finished games."""
        self._begin = self._tick_at = clock()
        self._tick_steps = self._tick_updates = 0
        self._excluded_s = 0.0
        self._compile_seconds, self._compiled_s = compile_seconds, 0.0
        self.phase_s: dict[str, float] = {}
        self.wall_s = 0.0
        """Since `start`, all included."""
        self.windows: list[tuple[float, int, int]] = []
        """(seconds, env steps, updates) of each steady tick."""
        self._warmup_windows: list[tuple[float, int, int]] = []
        self.warmup_s: float | None = None
        self.cpu_s = 0.0
        """CPU seconds that this object used itself."""

    def start(self, counts: Counts) -> None:
        """The loop begins now."""
        self._begin = self._tick_at = self._clock()
        self._tick_steps, self._tick_updates = counts.env_steps, counts.updates
        self._phase_window()

    def begin_anew(self) -> None:
        """Count all until now as warm-up: from here on training runs in another form."""
        self._warmup_windows += self.windows
        self.windows = []
        if self.warmup_s is not None:
            self.warmup_s = self.wall_s - self._compiled_s

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Time that is not training (evaluation, checkpoints): kept out of the throughput.

        The caller drains the device first: queued updates are training.
        """
        begin = self._clock()
        yield
        self._excluded_s += self._clock() - begin

    @property
    def elapsed_s(self) -> float:
        """Seconds since `start`."""
        return self._clock() - self._begin

    @property
    def due(self) -> bool:
        """A tick is due."""
        return self._clock() - self._tick_at >= self._every_s

    @property
    def return_mean(self) -> float | None:
        """Mean score of the last full games, or None before the first."""
        return float(np.mean([e.return_raw for e in self.recent])) if self.recent else None

    def episodes(self, games: Iterable[Episode]) -> None:
        """Take in finished games."""
        self.recent.extend(games)

    def tick(self, counts: Counts, metrics: Metrics) -> dict[str, float]:
        """Close the window and write its row; returns the row's metrics.

        Raises FloatingPointError when a loss is not finite: training on is waste.
        """
        used = time.thread_time()
        now = self._clock()
        # Graphs may be built at any time: what that took is not training either.
        compiled = self._compile_seconds() - self._compiled_s
        self._compiled_s += compiled
        seconds = max(now - self._tick_at - self._excluded_s - compiled, 1e-9)
        steps, updates = counts.env_steps - self._tick_steps, counts.updates - self._tick_updates
        phases = self._phase_window()
        wall = now - self._tick_at
        for name, s in phases.items():
            self.phase_s[name] = self.phase_s.get(name, 0.0) + s
        self.wall_s = now - self._begin
        windows = self._warmup_windows if self.warmup_s is None else self.windows
        windows.append((seconds, steps, updates))
        if (
            self.warmup_s is None
            and counts.updates
            and (self._warm() or self.wall_s > WARMUP_CAP_S)
        ):
            self.warmup_s = self.wall_s - self._compiled_s
        row = {
            "throughput/env_steps_per_s": steps / seconds,
            "throughput/frames_per_s": steps * self._frame_skip / seconds,
            "throughput/updates_per_s": updates / seconds,
            "count/updates": float(counts.updates),
            "count/episodes": float(counts.episodes),
        }
        if counts.skipped_updates:
            row["count/skipped_updates"] = float(counts.skipped_updates)
        row |= {f"phase/{name}_share": s / wall for name, s in phases.items()}
        if phases:
            row["phase/other_share"] = max(0.0, 1 - sum(phases.values()) / wall)
        # The one moment at which metrics are read off the device.
        row |= {name: float(value) for name, value in metrics.items()}
        if self.recent:
            row["return/train"] = float(np.mean([e.return_raw for e in self.recent]))
            row["return/train_learner"] = float(np.mean([e.return_train for e in self.recent]))
            row["episode/length"] = float(np.mean([e.length for e in self.recent]))
        row |= self._hardware_window()
        self._tick_at, self._excluded_s = now, 0.0
        self._tick_steps, self._tick_updates = counts.env_steps, counts.updates
        self.write(counts.env_steps, row)
        self.cpu_s += time.thread_time() - used
        bad = [name for name, value in row.items() if not math.isfinite(value)]
        if any(name.startswith("loss/") for name in bad):
            raise FloatingPointError(
                f"{bad[0]} became {row[bad[0]]} at env step {counts.env_steps:,}; lower "
                "algo.learning_rate or algo.max_grad_norm, or check the environment's rewards"
            )
        return row

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Append one row, unless a run that was resumed has logged this step before."""
        if step <= self._logged_step:
            return
        values = {k: v if math.isfinite(v) else str(v) for k, v in metrics.items()}
        self._file.write(json.dumps({"step": step, "time": time.time(), "metrics": values}) + "\n")

    def throughput(self) -> dict[str, Any]:
        """Steady-state rates; of the whole run, with `steady: false`, where it was too short."""
        steady = len(self.windows) >= STEADY_WINDOWS
        windows = self.windows if steady else self._warmup_windows + self.windows
        seconds = sum(w[0] for w in windows) or 1e-9
        steps, updates = (sum(w[i] for w in windows) for i in (1, 2))
        rates = [w[1] / w[0] for w in windows] or [0.0]
        q25, median, q75 = np.percentile(rates, [25, 50, 75])
        return {
            "env_steps_per_s": steps / seconds,
            "frames_per_s": steps * self._frame_skip / seconds,
            "updates_per_s": updates / seconds,
            "window_median": float(median),
            "window_spread": float((q75 - q25) / median) if median and len(windows) > 1 else None,
            "windows": len(windows),
            "steady": steady,
            "steady_s": seconds if steady else 0.0,
            "warmup_s": self.wall_s - self._compiled_s if self.warmup_s is None else self.warmup_s,
            "compile_s": self._compiled_s,
            "wall_s": self.wall_s,
        }

    def phases(self) -> dict[str, dict[str, float]]:
        """Seconds and share of the loop's wall time per phase; empty with profile=none."""
        if not self.phase_s:
            return {}
        seconds = {**self.phase_s, "other": max(0.0, self.wall_s - sum(self.phase_s.values()))}
        return {
            name: {"seconds": s, "share": s / self.wall_s}
            for name, s in sorted(seconds.items(), key=lambda item: -item[1])
        }

    def close(self) -> None:
        """Flush the local record."""
        self._file.close()


def bottleneck(phases: dict[str, dict[str, float]]) -> dict[str, Any] | None:
    """The largest training phase and what the loop would gain if it cost nothing (Amdahl)."""
    training = {n: p["seconds"] for n, p in phases.items() if n not in NOT_TRAINING}
    total = sum(training.values())
    if not total:
        return None
    name = max(training, key=lambda n: training[n])
    share = training[name] / total
    bound = 1 / (1 - share) if share < 1 else None
    return {"phase": name, "share": share, "upper_bound_speedup": bound}


def _last_step(path: Path) -> int:
    """The last step logged in an existing record, -1 for a fresh one.

    Cuts off the torn last line of a killed run, so that the next row starts a line of its own.
    """
    if not path.exists():
        return -1
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return max((_step_of(line) for line in whole.splitlines()), default=-1)


def _step_of(line: bytes) -> int:
    """The step of a row; -1 for a line that is none: one damaged line costs only itself."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return -1
    return step if isinstance(step, int) else -1
