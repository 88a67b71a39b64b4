"""Phases of the wall time: `with phases("env"):`, nested, exclusive, cheap.

Host time comes from one clock. On an accelerator the host only launches work, so each phase also
leaves a pair of device events; they are resolved at the log tick, never inside a phase.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

NAMES = (
    "act", "d2h", "env", "preprocess", "store", "sample", "h2d", "learn",
    "sync_weights", "wait", "compile", "log", "eval", "checkpoint",
)  # fmt: skip


class _Phase:
    __slots__ = ("name", "ns", "_owner", "_events", "_begin")

    def __init__(self, name: str, owner: Phases) -> None:
        self.name, self.ns, self._owner = name, 0, owner
        self._begin: Any = None
        self._events: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        owner = self._owner
        now = owner._clock()
        stack = owner._stack
        if stack:
            stack[-1].ns += now - owner._mark
            if owner._new_event:
                stack[-1]._stop_device()
        stack.append(self)
        owner._mark = now
        if owner._new_event:
            self._start_device()

    def __exit__(self, *_: object) -> None:
        owner = self._owner
        stack = owner._stack
        if owner._new_event:
            self._stop_device()
        now = owner._clock()
        self.ns += now - owner._mark
        stack.pop()
        owner._mark = now
        owner.entries += 1
        if owner._new_event and stack:
            stack[-1]._start_device()

    # Device time is exclusive like host time: a nested phase ends its parent's piece.
    def _start_device(self) -> None:
        assert self._owner._new_event is not None
        self._begin = self._owner._new_event()
        self._begin.record()

    def _stop_device(self) -> None:
        assert self._owner._new_event is not None
        end = self._owner._new_event()
        end.record()
        self._events.append((self._begin, end))

    def pop_device_s(self) -> float:
        """Device seconds of the finished pieces since the last call; waits for the last one."""
        done, self._events = self._events, []
        if done:
            done[-1][1].synchronize()
        return sum(begin.elapsed_time(end) for begin, end in done) / 1e3


class Phases:
    """Exclusive wall seconds per phase name; a nested phase's time is not its parent's.

    `new_event` makes objects like `torch.cuda.Event(enable_timing=True)`; None on the CPU.
    """

    def __init__(
        self,
        clock: Callable[[], int] = time.perf_counter_ns,
        new_event: Callable[[], Any] | None = None,
    ) -> None:
        self._clock, self._new_event = clock, new_event
        self._stack: list[_Phase] = []
        self._mark = 0
        self._phases = {name: _Phase(name, self) for name in NAMES}
        self._seen_ns = dict.fromkeys(NAMES, 0)
        self.entries = 0
        """Phases entered and left so far; times `cost_s` it is what the accounting costs."""

    def __call__(self, name: str) -> _Phase:
        """The context manager of a canonical phase name."""
        return self._phases[name]

    @property
    def current(self) -> str:
        """The innermost phase that is open, else `other`."""
        return self._stack[-1].name if self._stack else "other"

    def window(self) -> dict[str, float]:
        """Seconds per phase since the last call, without phases that never ran."""
        # An open phase (the tick itself may run inside one) is brought up to date first.
        if self._stack:
            now = self._clock()
            self._stack[-1].ns += now - self._mark
            self._mark = now
        seconds = {}
        for name, phase in self._phases.items():
            seconds[name] = (phase.ns - self._seen_ns[name]) / 1e9
            self._seen_ns[name] = phase.ns
        if self._new_event:
            self._charge_device_time(seconds)
        return {name: s for name, s in seconds.items() if s > 0}

    def _charge_device_time(self, seconds: dict[str, float]) -> None:
        """Move the time that the host spent waiting in d2h to the phases that launched the work.

        Between two ticks nothing but the copy of actions to the host blocks the loop, so what a
        phase's device time exceeds its host time by was paid for there. The sum stays the wall
        time. The caller drains the device inside `learn` before a tick.
        """
        for name, phase in self._phases.items():
            hidden = phase.pop_device_s() - seconds[name]
            if name != "d2h" and hidden > 0:
                moved = min(hidden, seconds["d2h"])
                seconds[name] += moved
                seconds["d2h"] -= moved

    def cost_s(self, rounds: int = 2000) -> float:
        """Seconds that entering and leaving one phase costs on this machine now."""
        return self._cost_s(Phases(new_event=self._new_event), rounds)

    @staticmethod
    def _cost_s(phases: Phases, rounds: int) -> float:
        begin = time.perf_counter()
        for _ in range(rounds):
            with phases("act"):
                pass
        return (time.perf_counter() - begin) / rounds


class _SerialPhase(_Phase):
    """The device is empty when it begins and when it ends."""

    __slots__ = ("_drain",)

    def __init__(self, name: str, owner: Phases, drain: Callable[[], None]) -> None:
        super().__init__(name, owner)
        self._drain = drain

    def __enter__(self) -> None:
        self._drain()
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        self._drain()
        super().__exit__(*error)


class SerialisedPhases(Phases):
    """Waits for the device at both ends of each phase: exact, and slower than the run it explains.

    With one thing after the other no device event is needed, and a wait of the host inside a phase
    is one that its code asks for (see `transfers.HiddenWaits`).
    """

    def __init__(
        self, drain: Callable[[], None], clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        super().__init__(clock)
        self._drain = drain
        self._phases = {name: _SerialPhase(name, self, drain) for name in NAMES}

    def cost_s(self, rounds: int = 2000) -> float:
        """The window of plain phases; the device has nothing to do in it."""
        return self._cost_s(SerialisedPhases(self._drain), rounds)


class _NullPhase:
    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class NullPhases:
    """Phases that measure nothing."""

    entries = 0

    def cost_s(self) -> float:
        """Nothing."""
        return 0.0

    _null = _NullPhase()

    def __call__(self, name: str) -> _NullPhase:
        """A context manager that does nothing."""
        return self._null

    def window(self) -> dict[str, float]:
        """No phase was measured."""
        return {}
