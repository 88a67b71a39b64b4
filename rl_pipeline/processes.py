"""Which process is which: by host, id and start, since ids are used again."""

from __future__ import annotations

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


def sweeps_elsewhere(study: dict[str, Any]) -> bool:
    """Whether another process of this machine still runs the sweep that a study.json tells of."""
    host, pid, started = study.get("process", ("", 0, 0.0))
    return pid != os.getpid() and alive(host, pid, started)
