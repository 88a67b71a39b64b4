"""The CPU budget of this process. Imports nothing heavy: sweeps ask before any job starts."""

from __future__ import annotations

import os
from pathlib import Path


def cpu_budget(
    cgroup: Path = Path("/sys/fs/cgroup"),
    affinity: int | None = None,
    environ: dict[str, str] | None = None,
) -> tuple[int, str]:
    """Cores this process may use, and why: min(affinity, cgroup quota, RL_PIPELINE_CPUS).

    Quotas are rounded down, to at least 1. Reads cgroup v2 (`cpu.max`) and v1 files.
    """
    environ = dict(os.environ) if environ is None else environ
    limits = {"affinity": affinity or len(os.sched_getaffinity(0))}
    v2, v1 = cgroup / "cpu.max", cgroup / "cpu" / "cpu.cfs_quota_us"
    quota = period = "max"
    if v2.exists():
        quota, period = v2.read_text().split()
    elif v1.exists():
        quota, period = v1.read_text(), (v1.parent / "cpu.cfs_period_us").read_text()
    if quota.strip() not in ("max", "-1"):
        limits["cgroup quota"] = max(1, int(quota) // int(period))
    if user := environ.get("RL_PIPELINE_CPUS"):
        limits["RL_PIPELINE_CPUS"] = positive_int("RL_PIPELINE_CPUS", user)
    reason = min(limits, key=lambda name: limits[name])
    return limits[reason], reason


def positive_int(name: str, text: str) -> int:
    """The number in an environment variable; raises ValueError naming it."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(f"the environment variable {name}={text} must be a positive integer")
    return int(text)
