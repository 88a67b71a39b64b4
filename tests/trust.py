"""What the tests of the store and of the doctor share: real trackers, trainers that are killed."""

from __future__ import annotations

import json
import socket
import sqlite3
import subprocess
import sys
import time

import psutil

from rl_pipeline.config.settings import TrackingSettings
from rl_pipeline.tracking.notes import State
from rl_pipeline.tracking.tracker import Tracker

LONG_S = 240.0
"""Only so long that a hang ends: a busy machine is no failure."""
DEAD = json.dumps([socket.gethostname(), 2**22 + 7, 1.0])


def until(condition, what):
    end = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.02)


def ask(database, query, *values):
    connection = sqlite3.connect(database, timeout=20)
    try:
        with connection:
            return connection.execute(query, values).fetchall()
    finally:
        connection.close()


def tracker_for(run_dir, uri, tags=None, **options):
    run_dir.mkdir(parents=True, exist_ok=True)
    settings = TrackingSettings(
        name="server", uri=uri, experiment="trust", flush_s=0.5, system_metrics=False
    )
    return Tracker(run_dir, settings, run_name="run", params={}, tags=tags or {}, **options)


def track(run_dir, uri, **options):
    """One whole tracked run; what its tracker says at the end."""
    tracker = tracker_for(run_dir, uri, **options)
    tracker.start()
    row = {"step": 8, "time": 1.0, "metrics": {"a": 2.0}}
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    (run_dir / "result.json").write_text(json.dumps({"status": "finished", "reason": None}))
    return tracker.finish(LONG_S)


TRAINER = """
import json, sys, time
from pathlib import Path
from rl_pipeline.config.settings import TrackingSettings
from rl_pipeline.errors import ConfigError
from rl_pipeline.tracking.tracker import Tracker
run_dir = Path({run_dir!r})
run_dir.mkdir(parents=True, exist_ok=True)
settings = TrackingSettings(name="server", uri={uri!r}, experiment="trust", flush_s=0.5,
                            system_metrics=False)
tags = {{"run_id": "r01234567", "run_folder": str(run_dir)}}
tracker = Tracker(run_dir, settings, run_name="died", params={{}}, tags=tags)
tracker.start()
(run_dir / "metrics.jsonl").write_text('{{"step": 8, "time": 1.0, "metrics": {{"a": 2.0}}}}\\n')
time.sleep(600)
"""


class Trainer:
    """A process that tracks and never ends, with its writer."""

    def __init__(self, run_dir, uri):
        self.dir = run_dir
        code = TRAINER.format(run_dir=str(run_dir), uri=uri)
        self.process = subprocess.Popen([sys.executable, "-c", code])

    def state(self):
        return State.read(self.dir)

    def kill(self, writer=True):
        """SIGKILL for the trainer and its writer, at once."""
        family = psutil.Process(self.process.pid).children() if writer else []
        for process in [psutil.Process(self.process.pid), *family]:
            process.kill()
        self.process.wait()
        psutil.wait_procs(family, timeout=LONG_S)


def half_made(path, kind):
    """A file at `path` that is no whole store of MLflow."""
    if kind == "folder":
        path.mkdir()
    elif kind == "text":
        path.write_text("these are my notes, and no database at all\n" * 50)
    elif kind == "empty":
        path.touch()
    else:
        tables = {
            "torn": ["experiments (id)", "alembic_version (version_num)",
                     "_alembic_tmp_params (key)"],
            "unversioned": ["experiments (id)", "runs (id)", "alembic_version (version_num)"],
            "without version": ["experiments (id)", "runs (id)"],
            "only version": ["alembic_version (version_num)"],
            "foreign": ["customers (name)"],
        }  # fmt: skip
        for table in tables[kind]:
            ask(path, f"CREATE TABLE {table}")
        if kind in ("torn", "only version"):
            ask(path, "INSERT INTO alembic_version VALUES ('451aebb31d03')")
