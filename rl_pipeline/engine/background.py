"""compile=auto: another process builds the graphs that are missing while training runs eagerly."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

WORTH_S = 12.0
"""What is left of a run must be longer: that long the quickest build takes on two cores."""
LATE_S = 5.0
"""With less left, a change of form gains little and leaves no steady state to measure."""
LIMIT_S = 600.0
"""A builder that takes longer hangs, and is ended."""


class Waiting(Protocol):
    """A function whose graph is missing."""

    name: str

    def settle(self, inputs: Sequence[Tensor]) -> bool:
        """Take the graph for calls like `inputs`, if it is there and faster."""


Form = tuple[str, list[tuple[tuple[int, ...], tuple[int, ...], str]]]
"""A function's name; shape, stride and type of each input of a call."""


class Background:
    """Starts one builder, waits for it without blocking, and hands over what it built."""

    def __init__(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        request: Callable[[list[Form]], bytes],
        say: Callable[[str], None],
    ) -> None:
        """`command` reads `request(forms)` from its standard input, whose end tells it to stop."""
        self._command, self._environment = list(command), environment
        self._request, self._say = request, say
        self._waiting: list[tuple[Waiting, Sequence[Tensor]]] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._began, self._over = 0.0, False
        self.note = ""
        """Why the run stays eager, in words."""

    def want(self, function: Waiting, inputs: Sequence[Tensor]) -> None:
        """Note a call that has no graph yet."""
        self._waiting.append((function, inputs))

    def poll(self, remaining_s: float) -> bool:
        """Start the builder, or take what it built; call where the functions may change.

        `remaining_s` is about what is left of the run. True if a function is compiled from now on.
        """
        if self._over or not self._waiting:
            return False
        if self._process is None:
            if remaining_s < WORTH_S:
                self._end(f"eager to the end: about {remaining_s:.0f} s are left, too few to build")
                return False
            self._start()
            return False
        code = self._process.poll()
        if code is None:
            if time.monotonic() - self._began > LIMIT_S:
                self._end(f"eager to the end: building graphs took over {LIMIT_S:.0f} s")
            return False
        if code:
            self._end(f"eager to the end: building graphs failed ({self._last_words()})")
            return False
        if remaining_s < LATE_S:
            self._end("eager to the end, which is near; the next run begins with the graphs")
            return False
        waiting, self._waiting = self._waiting, []
        done = [function.settle(inputs) for function, inputs in waiting]
        self._end("" if any(done) else "eager to the end: the graphs are not faster here")
        return any(done)

    def close(self) -> None:
        """End the builder, if it still works; a second call does nothing."""
        if self._process is not None:
            # The builder and its compilers are a group of their own.
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            if self._process.stdin:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()
            self._process.wait()
            self._process = None
        self._waiting.clear()
        self._over = True

    def _start(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                stderr=self._errors, start_new_session=True, env=self._environment,
            )  # fmt: skip
            assert self._process.stdin is not None
            forms = [
                (function.name, [(tuple(x.shape), x.stride(), str(x.dtype)) for x in inputs])
                for function, inputs in self._waiting
            ]
            self._process.stdin.write(self._request(forms))
            self._process.stdin.flush()
        except OSError as error:
            self._end(f"eager to the end: the builder did not start ({error})")
            return
        self._began = time.monotonic()
        self._say("compile=auto: graphs are built in the background; eager until they are there")

    def _end(self, note: str) -> None:
        self.close()
        self.note = note
        if note:
            self._say(f"compile=auto: {note}")

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "no message"
