"""Live progress for people: a bar on a terminal, sparse plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

FRAME_S = 0.25
LINE_S = 10.0
_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red", "bright_cyan", "bright_magenta")
_PHASE_CELLS = 40


@dataclass(frozen=True)
class ProgressView:
    """The figures to show at one moment."""

    env_steps: int
    env_steps_per_s: float
    return_mean: float | None = None
    """None until a game has ended."""
    episodes: int = 0
    elapsed_s: float = 0.0
    eta_s: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    """Share of the wall time by phase name."""
    note: str = ""


class NullProgress:
    """The interface of `Progress`, showing nothing."""

    cpu_s = 0.0

    def update(self, view: ProgressView) -> None:
        """Show nothing."""

    def message(self, text: str) -> None:
        """Say nothing."""

    def close(self) -> None:
        """Nothing to close."""


class Progress:
    """Shows views as they come, a few frames a second at most; draws on the calling thread."""

    def __init__(
        self,
        total_steps: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        begin = time.thread_time()
        self._total, self._clock = total_steps, clock
        self._stream = stream or sys.stderr
        self._view: ProgressView | None = None
        self._shown: ProgressView | None = None
        self._shown_at = float("-inf")
        self._colours: dict[str, str] = {}
        self._live: Live | None = None
        console = Console(file=self._stream)
        if self._stream.isatty() and not console.is_dumb_terminal:
            # No refresh thread: it would take the interpreter from the training at any moment.
            self._live = Live(console=console, auto_refresh=False, transient=True)
            self._live.start()
        self.cpu_s = time.thread_time() - begin
        """CPU seconds that the drawing itself took."""

    def update(self, view: ProgressView) -> None:
        """Take `view`, and show it if the last frame or line is old enough."""
        self._view = view
        if self._clock() - self._shown_at >= (FRAME_S if self._live else LINE_S):
            self._show(view)

    def message(self, text: str) -> None:
        """Print a line that stays, above the bar."""
        begin = time.thread_time()
        if self._live:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)
        self.cpu_s += time.thread_time() - begin

    def close(self) -> None:
        """Take the bar away, or print the last line; a second call does nothing."""
        if self._live:
            self._live.stop()
            self._live = None
        elif self._view is not self._shown and self._view is not None:
            self._show(self._view)
        self._view = self._shown

    def _show(self, view: ProgressView) -> None:
        begin = time.thread_time()
        self._shown, self._shown_at = view, self._clock()
        if self._live:
            self._live.update(self._frame(view, self._live.console.width), refresh=True)
        else:
            print(self._line(view), file=self._stream, flush=True)
        self.cpu_s += time.thread_time() - begin

    def _facts(self, view: ProgressView) -> list[str]:
        facts = [f"{_number(view.env_steps_per_s)} env steps/s"]
        if view.return_mean is not None:
            facts.append(f"return {_number(view.return_mean)}")
        if view.eta_s is not None:
            facts.append(f"left {_duration(view.eta_s)}")
        return facts

    def _line(self, view: ProgressView) -> str:
        done = f"{view.env_steps:>{len(f'{self._total:,}')},}/{self._total:,}"
        shares = " ".join(f"{name} {share:.0%}" for name, share in _large(view.phases))
        head = [done, f"{self._share(view):>4.0%}", *self._facts(view)]
        return "  " + "  ".join(filter(None, [*head, shares, view.note]))

    def _frame(self, view: ProgressView, width: int) -> Text:
        """Two or three lines; one Text, since rich's tables and bars take three times as long."""
        head = f" {view.env_steps:,}/{self._total:,}  "
        tail = "  " + "  ".join([f"{self._share(view):.0%}", *self._facts(view)])
        cells = max(width - len(head) - len(tail) - 1, 8)
        full = round(cells * self._share(view))
        frame = Text(no_wrap=True, overflow="ellipsis")
        frame.append(head, "bold").append("━" * full, "bright_green")
        frame.append("━" * (cells - full), "bright_black").append(tail)
        if view.phases:
            self._append_phases(frame, view.phases, width)
        if view.note:
            frame.append(f"\n {view.note}", "dim")
        return frame

    def _append_phases(self, frame: Text, phases: Mapping[str, float], width: int) -> None:
        """One coloured stretch per phase, as long as its share, and what the colours mean."""
        for name in phases:
            # A phase keeps its colour for the whole run.
            self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
        legend = [(f"  ■ {name}", f" {share:.0%}", name) for name, share in _large(phases)]
        room = width - sum(len(label) + len(share) for label, share, _ in legend) - 2
        cells = min(max(room, 10), _PHASE_CELLS)
        frame.append("\n ")
        total, end = 0.0, 0
        for name, share in phases.items():
            total += share
            begin, end = end, round(cells * min(total, 1.0))
            frame.append("█" * (end - begin), self._colours[name])
        frame.append("░" * (cells - end), "dim")
        for label, share_text, name in legend:
            frame.append(label, self._colours[name]).append(share_text)

    def _share(self, view: ProgressView) -> float:
        return min(view.env_steps / self._total, 1.0)


def _large(phases: Mapping[str, float]) -> list[tuple[str, float]]:
    """The phases worth naming."""
    return [(name, share) for name, share in phases.items() if share >= 0.005]


def _number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 1 or value == 0 else f"{value:.3g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
