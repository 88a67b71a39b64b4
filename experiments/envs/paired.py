"""Several ways to do the same, timed in turns, and what their repeats say.

A machine's speed drifts by more than an adapter costs. So the contenders of a cell take turns of a
tenth of a second in random order, and ratios and differences are taken within a repeat, never
across. Shorter turns favour the contender with less code, which is sooner warm after a switch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Advance = Callable[[int], object]
"""Makes that many steps of all environments."""

MIN_TURNS, MAX_TURNS = 5, 12
KEPT_BAR, ADDED_BAR_US = 0.95, 15.0


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    task: str
    backend: str
    num_envs: int
    threads: int | None
    """Worker threads of each pool; None where the backend has none."""

    def __str__(self) -> str:
        threads = f", {self.threads} threads" if self.threads else ""
        return f"{self.task} {self.backend} {self.num_envs}{threads}"


def take_turns(
    contenders: Mapping[str, Advance],
    seconds: float,
    rng: np.random.Generator,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Seconds that one step takes each contender: the median of its turns.

    Turns end after about `seconds` of each contender, or `MIN_TURNS` where a step is long.
    """
    steps = {name: _steps_in(run, seconds / MAX_TURNS, clock) for name, run in contenders.items()}
    took: dict[str, list[float]] = {name: [] for name in contenders}
    names, start = list(contenders), clock()
    for turn in range(MAX_TURNS):
        if turn >= MIN_TURNS and clock() - start >= seconds * len(names):
            break
        for i in rng.permutation(len(names)):
            name = names[i]
            begin = clock()
            contenders[name](steps[name])
            took[name].append((clock() - begin) / steps[name])
    # A median, since whatever else the machine does falls on some turns only.
    return {name: statistics.median(times) for name, times in took.items()}


def _steps_in(run: Advance, seconds: float, clock: Callable[[], float]) -> int:
    """How many steps last about `seconds`; finding that out is the warm-up.

    Twice in a row: the first call may take a hundred times as long as a warm one.
    """
    steps, confirmed = 1, 0
    while confirmed < 2:
        begin = clock()
        run(steps)
        took = clock() - begin
        confirmed = confirmed + 1 if took >= seconds / 2 else 0
        steps = max(1, min(round(steps * seconds / max(took, 1e-9)), 4 * steps))
    return steps


def bar_of(cell: Cell) -> tuple[str, float] | None:
    """What the issue asks of a cell: (`kept` at least, or `added_us` at most), or None."""
    if cell.task in ("pong", "halfcheetah") and cell.num_envs >= 8:
        return "kept", KEPT_BAR
    if cell.task == "cartpole":
        return ("kept", KEPT_BAR) if cell.num_envs >= 256 else ("added_us", ADDED_BAR_US)
    return None


def summarize(
    cell: Cell, repeats: Sequence[Mapping[str, float]], valid_share: float, lanes: int = 1
) -> dict[str, Any]:
    """One row: medians over repeats, the range of what was paired, the verdict.

    `repeats`: seconds a step of `ours` and `raw`. A step of a cell is one of all its environments;
    `added_us` is for each call of the library, of which lanes make one each.
    """
    speeds = {
        name: [cell.num_envs * valid_share / r[name] for r in repeats] for name in ("ours", "raw")
    }
    kept = [r["raw"] / r["ours"] for r in repeats]
    added = [(r["ours"] - r["raw"]) / lanes * 1e6 for r in repeats]
    row: dict[str, Any] = {
        "task": cell.task, "backend": cell.backend, "num_envs": cell.num_envs,
        "threads": cell.threads,
        "env_steps_per_s": statistics.median(speeds["ours"]),
        "spread": _spread(speeds["ours"]),
        "raw_env_steps_per_s": statistics.median(speeds["raw"]),
        "raw_spread": _spread(speeds["raw"]),
        "kept": statistics.median(kept), "kept_low": min(kept), "kept_high": max(kept),
        "added_us": statistics.median(added), "added_us_low": min(added),
        "added_us_high": max(added),
        "valid_share": valid_share, "repeats": len(repeats), "verdict": "",
    }  # fmt: skip
    if bar := bar_of(cell):
        row["verdict"] = _verdict(*bar, row)
    return row


def _verdict(what: str, bar: float, row: Mapping[str, Any]) -> str:
    """`yes` or `no` by the median; within noise where the repeats lie on both sides."""
    sign = 1 if what == "kept" else -1
    holds = sign * row[what] >= sign * bar
    text = "yes" if holds else "no"
    if row[f"{what}_low"] < bar < row[f"{what}_high"]:
        text += ", within noise"
    return text


def _spread(values: Sequence[float]) -> float:
    """Half the range between the quartiles, as a share of the median."""
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return float((high - low) / 2 / middle)
