"""Shared helpers: settings by overrides, runs in-process, and the command line as users type it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import Brood, finish, until

from rl_pipeline.config import load
from rl_pipeline.config.origins import CONF

# A shell ignores it for what it starts in the background, and that is passed on to every child.
signal.signal(signal.SIGINT, signal.default_int_handler)
if "PYTEST_XDIST_WORKER" in os.environ and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup make test
# Two test workers on two cores: one thread each, before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Graphs that other runs of this user left would change what is tested.
_CACHE = tempfile.TemporaryDirectory(prefix="graphs")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _CACHE.name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share a costly fixture come first.

    xdist hands out large chunks in the beginning: one worker gets them all and builds it once.
    """
    costly = {"lab", "planted"}
    items.sort(key=lambda item: costly.isdisjoint(getattr(item, "fixturenames", ())))


def compose(*overrides: str) -> Any:
    """The composed configuration without Hydra's node."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    with initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra_compose("config", overrides=list(overrides))


def settings(*overrides: str) -> Any:
    """Checked settings."""

    return load.load(compose(*overrides))


class Cli:
    """Runs the command line in a working directory of its own."""

    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd
        self.brood = Brood()

    def start(
        self,
        *args: str,
        module: str = "rl_pipeline.train",
        env: dict[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[str]:
        """Start a command; both outputs are pipes unless `options` of Popen say otherwise."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(
            [sys.executable, "-m", module, *args], cwd=self.cwd, text=True,
            env=self.brood.environ | (env or {}), **(pipes | options),
        )  # fmt: skip

    def __call__(
        self, *args: str, module: str = "rl_pipeline.train", env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        process = self.start(*args, module=module, env=env)
        out, err = finish(process)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def training(self, *args: str, **options: Any) -> subprocess.Popen[str]:
        """Start a run, and wait until it has logged a row."""
        before = self._rows()
        process = self.start(*args, **options)
        until(lambda: self._rows() > before or process.poll() is not None, 60, "a row")
        assert process.poll() is None, process.communicate()
        return process

    def _rows(self) -> int:
        return sum(p.stat().st_size for p in self.cwd.rglob("metrics.jsonl"))

    def results(self) -> list[dict[str, Any]]:
        """Every result.json below, oldest first."""
        found = [f / "result.json" for f in self.folders() if (f / "result.json").exists()]
        paths = sorted(found, key=lambda p: p.stat().st_mtime)
        return [json.loads(p.read_text()) for p in paths]

    def folders(self) -> list[Path]:
        """Every run folder below."""
        return sorted(p.parent for p in self.cwd.rglob("run.json"))


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    cli = Cli(tmp_path)
    try:
        yield cli
        until(lambda: not cli.brood.alive(), 15, "the end of all that the test started")
    finally:
        cli.brood.end()


@pytest.fixture
def trainer() -> Any:
    """Starts processes that track and never end, and leaves none behind."""
    from trust import Trainer

    started: list[Trainer] = []

    def start(run_dir: Path, uri: str) -> Trainer:
        started.append(Trainer(run_dir, uri))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.kill()
