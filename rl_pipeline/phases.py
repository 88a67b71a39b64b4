"""Where the wall time goes: `with phases("env"):`, nested, exclusive, cheap.

Host time comes from one clock. On an accelerator the host only launches work, so each phase also
leaves a pair of device events; they are resolved at the log tick, never inside a phase.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

NAMES = (
    "act", "d2h", "env", "preprocess", "store", "sample", "h2d", "learn",
    "sync_weights", "wait", "log", "eval", "checkpoint",
)  # fmt: skip


class _Phase:
    __slots__ = ("name", "ns", "_owner", "_events")

    def __init__(self, name: str, owner: Phases) -> None:
        self.name, self.ns, self._owner = name, 0, owner
        self._events: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        owner = self._owner
        now = owner._clock()
        stack = owner._stack
        if stack:
            stack[-1].ns += now - owner._mark
        stack.append(self)
        owner._mark = now
        if owner._new_event:
            begin = owner._new_event()
            begin.record()
            self._events.append((begin, None))

    def __exit__(self, *_: object) -> None:
        owner = self._owner
        if owner._new_event:
            end = owner._new_event()
            end.record()
            self._events[-1] = (self._events[-1][0], end)
        now = owner._clock()
        self.ns += now - owner._mark
        owner._stack.pop()
        owner._mark = now
        owner.entries += 1

    def pop_device_s(self) -> float:
        """Device seconds between the event pairs since the last call; waits for the last one."""
        done = [pair for pair in self._events if pair[1] is not None]
        self._events = [pair for pair in self._events if pair[1] is None]
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

        Nothing but the copy of actions to the host blocks the loop, so what a phase's device time
        exceeds its host time by was paid for there. The sum stays the wall time.
        """
        for name, phase in self._phases.items():
            hidden = phase.pop_device_s() - seconds[name]
            if name != "d2h" and hidden > 0:
                moved = min(hidden, seconds["d2h"])
                seconds[name] += moved
                seconds["d2h"] -= moved

    @staticmethod
    def cost_s(rounds: int = 2000) -> float:
        """Seconds that entering and leaving one phase costs on this machine now."""
        phases = Phases()
        begin = time.perf_counter()
        for _ in range(rounds):
            with phases("act"):
                pass
        return (time.perf_counter() - begin) / rounds


class _NullPhase:
    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class NullPhases:
    """Phases that measure nothing."""

    entries = 0
    _null = _NullPhase()

    def __call__(self, name: str) -> _NullPhase:
        """A context manager that does nothing."""
        return self._null

    def window(self) -> dict[str, float]:
        """No phase was measured."""
        return {}
