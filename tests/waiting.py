"""Waiting for real processes on a machine of any speed, and leaving none behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable

import psutil

PROBE = "import numpy, hydra, gymnasium"
PROBE_S = 0.7
"""What the probe takes on a quiet machine of the kind that the waits were written on."""
MARK = "RL_PIPELINE_TEST"


def slowness() -> float:
    """How many times longer than on a quiet machine things take just now, at least 1."""
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", PROBE], check=True)
    return max(1.0, (time.monotonic() - begin) / PROBE_S)


def until(ready: Callable[[], object], seconds: float = 60, what: str = "it", every_s: float = 0.1):
    """The first true value of `ready()`; AssertionError if it does not come.

    `seconds` are those of a quiet machine: when they are over, the machine is measured, and a slow
    or busy one is given the more.
    """
    begin = time.monotonic()
    end = begin + seconds
    while True:
        if value := ready():
            return value
        if time.monotonic() > end:
            allowed = begin + seconds * slowness()
            assert time.monotonic() < allowed, f"never: {what}"
            end = allowed
        time.sleep(every_s)


def finish(process: subprocess.Popen, seconds: float = 120) -> tuple[str, str]:
    """Output and errors of a process that ends by itself; it is killed if it does not."""
    begin = time.monotonic()
    allowed = seconds
    while True:
        try:
            return process.communicate(timeout=max(0.1, begin + allowed - time.monotonic()))
        except subprocess.TimeoutExpired:
            allowed = seconds * slowness()
            if time.monotonic() - begin > allowed:
                process.kill()
                raise


class Brood:
    """All processes that a test starts and those they start, found by a mark they inherit."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")}
        self.environ[MARK] = self.mark

    def alive(self) -> list[psutil.Process]:
        """Those that still run."""
        found = []
        for process in psutil.process_iter():
            try:
                marked = process.environ().get(MARK) == self.mark
                if marked and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                pass
        return found

    def end(self) -> None:
        """Kill what still runs."""
        while running := self.alive():
            for process in running:
                try:
                    process.kill()
                except psutil.Error:
                    pass
            psutil.wait_procs(running, timeout=5)
