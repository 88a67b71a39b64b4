"""Live progress: a bar on a terminal, sparse plain lines elsewhere."""

import io

from rl_pipeline.telemetry.progress import Progress, ProgressView

PHASES = {"act": 0.34, "env": 0.22, "learn": 0.4, "log": 0.001}


def view(steps, **kwargs):
    return ProgressView(steps, 12_345.4, **{"eta_s": 7.2, "phases": PHASES, **kwargs})


def test_plain_lines_come_first_then_every_ten_seconds_then_last():
    now, stream = [0.0], io.StringIO()
    progress = Progress(150_000, stream=stream, clock=lambda: now[0])
    for second in range(25):
        now[0] = float(second)
        progress.update(view(second * 1000))
    progress.close()
    progress.close()
    lines = stream.getvalue().splitlines()
    assert [line.split("/")[0].strip() for line in lines] == ["0", "10,000", "20,000", "24,000"]


def test_a_plain_line_says_it_all():
    stream = io.StringIO()
    progress = Progress(150_000, stream=stream)
    progress.update(view(42_000, return_mean=123.44, note="warming up"))
    progress.message("evaluated: 200")
    assert stream.getvalue().splitlines() == [
        "   42,000/150,000   28%  12,345 env steps/s  return 123.4  left 0:07"
        "  act 34% env 22% learn 40%  warming up",
        "evaluated: 200",
    ]
    assert progress.cpu_s > 0


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_few_frames_and_messages_stay(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    now, stream = [0.0], Terminal()
    progress = Progress(150_000, stream=stream, clock=lambda: now[0])
    for tick in range(100):
        now[0] = tick / 100
        progress.update(view(tick))
    progress.message("evaluated: 200 [20 episodes]")
    frames = stream.getvalue().count("env steps/s")
    progress.close()
    assert 4 <= frames <= 5, "one at once, then four a second; the message draws the last again"
    assert "■ learn" in stream.getvalue() and "evaluated: 200 [20 episodes]" in stream.getvalue()
    progress.close()
