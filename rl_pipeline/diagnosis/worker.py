"""A process of its own for one configuration, measured when it is told to.

Threads, allocator and caches are a process's own, so that configurations are compared between
processes; they take turns, second by second, so that what disturbs one disturbs both.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl_pipeline import machine
from rl_pipeline.config.settings import Settings


class WorkerError(RuntimeError):
    """A configuration that does not run here, with the reason."""


class Worker:
    """The parent's side: starts the process, asks, ends it."""

    def __init__(self, settings: Settings, environ: dict[str, str] | None = None) -> None:
        """Start building; `ready` waits for it."""
        self._said = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rl_pipeline.diagnosis.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said,
            env=machine.module_environment() | (environ or {}), start_new_session=True,
        )  # fmt: skip
        self._write(pickle.dumps(settings.model_dump(mode="json")))

    def ready(self) -> dict[str, Any]:
        """Facts about what was built; raises WorkerError where it could not be."""
        return self._answer()

    def ask(self, what: str, seconds: float) -> Any:
        """`run`, `parts` or `ladder` for so many seconds; raises WorkerError where it fails."""
        self._write(f"{what} {seconds}\n".encode())
        return self._answer()

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(self._why()) from None

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(self._why())
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    def _why(self) -> str:
        code = self._process.wait()
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip().splitlines()
        return said[-1] if said else f"it ended with code {code}"

    def close(self) -> None:
        """End it; a second call does nothing."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._said):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


def serve(settings: Settings, folder: Path) -> None:
    """The child's side: answer line by line until the parent closes the pipe."""
    import psutil

    from rl_pipeline.diagnosis.parts import Parts
    from rl_pipeline.diagnosis.rig import Rig

    rig = Rig(settings, folder)
    try:
        rig.warm()
        parts: Parts | None = None
        log = rig.runtime.compile_log
        _say({
            "memory": psutil.Process().memory_info().rss, "compile_s": log.seconds,
            "compile": rig.runtime.plan.name if not log.fallbacks else "eager",
            "reasons": rig.runtime.reasons,
        })  # fmt: skip
        for line in sys.stdin:
            what, seconds = line.split()
            if what == "run":
                _say(asdict(rig.run(float(seconds))))
                continue
            parts = parts or Parts(rig)
            if what == "ladder":
                _say(parts.ladder(float(seconds)))
            else:
                _say({n: asdict(c) for n, c in parts.measure(float(seconds)).items()})
    finally:
        rig.close()


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=_OUT, flush=True)


_OUT = sys.stdout


def main() -> None:
    """Entry point of the child."""
    global _OUT
    _OUT, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    settings = Settings.model_validate(pickle.load(sys.stdin.buffer))
    with tempfile.TemporaryDirectory() as folder:
        try:
            serve(settings, Path(folder))
        except Exception as error:
            _say({"error": f"{type(error).__name__}: {error}".splitlines()[0]})


if __name__ == "__main__":
    main()
