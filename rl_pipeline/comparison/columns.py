"""Costs of runs besides time: one line a figure, read by measure, tables, CSV and JSON."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rl_pipeline.comparison import stats
from rl_pipeline.comparison.records import RunRecord


def trained(run: RunRecord) -> bool:
    """Whether it has the curves of a training."""
    return {"return/train", "throughput/env_steps_per_s"} <= run.curves.keys()


def seconds_of(run: RunRecord, steps: np.ndarray) -> np.ndarray:
    """Seconds of training at the given env steps of a run."""
    x, rates = run.curves["throughput/env_steps_per_s"]
    return np.interp(steps, x, stats.training_seconds(x, rates))


def _peak(metric: str) -> Callable[[RunRecord], float]:
    """The largest value of a curve (one of `records.CURVES`)."""
    return lambda run: float(run.curves[metric][1].max()) if metric in run.curves else math.nan


def _joules_per_step(run: RunRecord) -> float:
    """GPU energy: mean power of each window times its seconds, over the env steps."""
    if "gpu/power_w" not in run.curves or not trained(run):
        return math.nan
    steps, watts = run.curves["gpu/power_w"]
    seconds = np.diff(seconds_of(run, steps), prepend=0.0)
    return float((watts * seconds).sum() / steps[-1])


@dataclass(frozen=True)
class Column:
    """A figure of a run, whose median over a group's runs is shown."""

    name: str
    """In CSV and JSON, in SI units."""
    title: str
    """Heading of the table's column."""
    of_run: Callable[[RunRecord], float]
    """NaN where a run has none."""
    form: str = ",.0f"
    scale: float = 1.0
    """From SI units to the title's."""

    def shown(self, value: float) -> str:
        """A cell of the table; empty where there is nothing to say."""
        return f"{value * self.scale:{self.form}}" if not math.isnan(value) else ""


COLUMNS = (
    Column("memory_bytes", "memory MB", _peak("cpu/rss_bytes"), scale=1e-6),
    Column("gpu_bytes", "GPU MB", _peak("gpu/mem_used_bytes"), scale=1e-6),
    Column("compile_s", "compile s", lambda run: run.final.get("compile_s") or math.nan, ",.1f"),
    Column("joules_per_step", "GPU J/1k steps", _joules_per_step, ",.2f", 1e3),
)
