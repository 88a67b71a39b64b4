"""Which process is which: by host, id and start, since ids are used again."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

import psutil


def myself() -> list[Any]:
    """This process, as `alive` asks for it."""
    me = psutil.Process()
    return [socket.gethostname(), me.pid, me.create_time()]


def alive(host: str, pid: int, started: float) -> bool:
    """Whether a process runs, on this machine."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - started) < 1
        return same and process.status() != "zombie" and host == socket.gethostname()
    except psutil.Error:
        return False


def read(value: object) -> tuple[str, int, float] | None:
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
    process = read(value)
    return process is not None and process[0] == socket.gethostname() and not alive(*process)


def sweeps_elsewhere(study: dict[str, Any]) -> bool:
    """Whether another process of this machine still runs the sweep that a study.json tells of."""
    process = read(study.get("process"))
    return process is not None and process[1] != os.getpid() and alive(*process)
