"""This machine: its cores and memory, and which process is which. Imports nothing heavy."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

from rl_pipeline.errors import ConfigError


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
        raise ConfigError(f"the environment variable {name}={text} must be a positive integer")
    return int(text)


def module_environment() -> dict[str, str]:
    """Environment variables of a child that runs a module of this package, wherever it runs."""
    environment = dict(os.environ)
    # `-m` puts the working directory first on sys.path: a `types.py` there would break the child.
    environment["PYTHONSAFEPATH"] = "1"
    root = Path(__file__).resolve().parents[1]
    if "site-packages" not in root.parts:
        earlier = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{earlier}" if earlier else str(root)
    return environment


def myself() -> list[Any]:
    """This process, as `alive` asks for it."""
    import psutil

    me = psutil.Process()
    return [socket.gethostname(), me.pid, me.create_time()]


def alive(host: str, pid: int, started: float) -> bool:
    """Whether a process runs, on this machine."""
    import psutil

    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - started) < 1
        return same and process.status() != "zombie" and host == socket.gethostname()
    except psutil.Error:
        return False


def process_of(value: object) -> tuple[str, int, float] | None:
    """A process as `myself` writes it, also as JSON; None for anything else."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, list | tuple) or len(value) != 3:
        return None
    host, pid, started = value
    numbers = [x for x in (pid, started) if isinstance(x, int | float) and type(x) is not bool]
    if not isinstance(host, str) or len(numbers) != 2 or not isinstance(pid, int):
        return None
    if not 0 < pid < 2**31 or not 0 <= started < 1e11:
        return None
    return host, pid, float(started)


def died_here(value: object) -> bool:
    """Whether a value is a process of this machine that is dead."""
    process = process_of(value)
    return process is not None and process[0] == socket.gethostname() and not alive(*process)


def available_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes this process may still use: of the machine, and of its cgroup (v2 or v1).

    What the kernel can drop (inactive file pages) counts as available.
    """
    import psutil

    available = psutil.virtual_memory().available
    files = (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    )
    for limit, usage, droppable in files:
        path = cgroup / limit
        if path.exists() and (text := path.read_text().strip()) != "max":
            stat = (path.parent / "memory.stat").read_text().split()
            inactive = int(stat[stat.index(droppable) + 1]) if droppable in stat else 0
            left = int(text) - int((cgroup / usage).read_text()) + inactive
            available = min(available, max(left, 0))
    return available


def has_bf16_units(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU multiplies bf16 by itself."""
    words = cpuinfo.read_text().split() if cpuinfo.exists() else []
    return "avx512_bf16" in words or "amx_bf16" in words


def available_disk(folder: Path) -> int:
    """Bytes free where `folder` is or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
