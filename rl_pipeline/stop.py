"""The end of a run on request: signals as requests, and exit codes that are true."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Killed(BaseException):
    """The run was told to stop; carries the signal's name."""

    @property
    def exit_code(self) -> int:
        """128 and the signal's number, as shells count."""
        return 128 + signal.Signals[str(self)].value


class StopRequest:
    """SIGINT, SIGTERM and SIGHUP as a request, honoured between updates, where the state is whole.

    A second signal interrupts at once.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._answer: Callable[[str], None] = self._note

    def _on_signal(self, number: int, _: object) -> None:
        self._answer(signal.Signals(number).name)

    def _note(self, name: str) -> None:
        if self.reason:
            raise Killed(name)
        self.reason = name

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals inside the block, where this is the main thread."""
        with handling(self._on_signal):
            yield

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Nothing interrupts the block, which takes milliseconds."""
        with self._answering(lambda name: None):
            yield

    @contextmanager
    def cutting(self, otherwise: Callable[[], object]) -> Iterator[None]:
        """A signal cuts the block short, and `otherwise` is called; the run's end stays what it is.

        For what may take long once the last words are written.
        """

        def cut(name: str) -> None:
            raise Killed(name)

        try:
            with self._answering(cut):
                yield
        except (KeyboardInterrupt, Killed):
            with self.ignored():
                otherwise()

    @contextmanager
    def _answering(self, answer: Callable[[str], None]) -> Iterator[None]:
        earlier, self._answer = self._answer, answer
        try:
            yield
        finally:
            self._answer = earlier


def answer_early() -> None:
    """Answer signals while the program is still being imported: nothing has begun, so it leaves."""

    def leave(number: int, _: object) -> None:
        os.write(2, f"stopped by {signal.Signals(number).name}\n".encode())
        os._exit(128 + number)

    _handle(leave)


def leave_with(code: int) -> NoReturn:
    """Exit; from here on a signal only makes it quicker, and changes nothing about the code."""
    _handle(lambda *_: os._exit(code))
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    # The interpreter's own end takes half a second with torch, in which signals have their default
    # effect again, and waits for threads that an environment may have left.
    os._exit(code)


def _handle(handler: Any) -> dict[int, Any]:
    """Give the signals to `handler`, returning their earlier handlers.

    One that was ignored before stays so: `nohup` and shells mean it.
    """
    caught = [s for s in SIGNALS if signal.getsignal(s) != signal.SIG_IGN]
    return {s: signal.signal(s, handler) for s in caught}


_asked: list[str] = []


def interrupt(number: int, _: object) -> None:
    """A signal's handler that stops at once."""
    _asked.append(signal.Signals(number).name)
    raise Killed(_asked[-1])


def asked() -> str | None:
    """The last signal that `interrupt` answered, also where somebody swallowed its exception."""
    return _asked[-1] if _asked else None


@contextmanager
def handling(handler: Any) -> Iterator[None]:
    """Give the signals that end a program to `handler` inside the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = _handle(handler)
    try:
        yield
    finally:
        for number, earlier in previous.items():
            signal.signal(number, earlier)


@contextmanager
def no_exit() -> Iterator[None]:
    """Nobody inside the block ends the program: only a finished run may exit with 0."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"sys.exit({error.code}) was called by a part of the run") from error
