"""Phases: exclusive wall time, and device time without waiting for it."""

from __future__ import annotations

import timeit
from contextlib import nullcontext

import pytest
import torch
from counting import Clock

from rl_pipeline.engine.phases import NullPhases, Phases, SerialisedPhases
from rl_pipeline.engine.runtime import Runtime, ThreadPlan


def test_nested_phases_are_exclusive_and_add_up():
    clock = Clock()
    phases = Phases(clock.ns)
    for _ in range(2):
        with phases("act"):
            clock.now += 1
            with phases("d2h"):
                clock.now += 2
            clock.now += 4
        with phases("env"):
            clock.now += 8
    assert phases.window() == {"act": 10, "d2h": 4, "env": 16}
    assert phases.window() == {}
    assert phases.entries == 6


def test_an_open_phase_is_counted_up_to_the_tick():
    clock = Clock()
    phases = Phases(clock.ns)
    with phases("log"):
        clock.now += 3
        assert phases.window() == {"log": 3}
        clock.now += 1
    assert phases.window() == {"log": 1}


def test_an_exception_leaves_the_stack_whole():
    clock = Clock()
    phases = Phases(clock.ns)
    with pytest.raises(KeyError), phases("env"):
        clock.now += 1
        raise KeyError
    with phases("learn"):
        clock.now += 1
    assert phases.window() == {"env": 1, "learn": 1}


class FakeDevice:
    """Work finishes `delay` seconds after its launch; only synchronising waits for it."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.free_at = clock, 0.0

    def launch(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.clock.now) + seconds

    def wait(self) -> None:
        self.clock.now = max(self.clock.now, self.free_at)

    def event(self):
        device = self

        class Event:
            def record(self) -> None:
                self.at = max(device.free_at, device.clock.now)

            def synchronize(self) -> None:
                device.clock.now = max(device.clock.now, self.at)

            def elapsed_time(self, end) -> float:
                return (end.at - self.at) * 1e3

        return Event()


def test_device_time_is_charged_to_the_phase_that_launched_it():
    """As the loop runs: nested copies, and a drain inside `learn` before the tick."""
    clock = Clock()
    device = FakeDevice(clock)
    phases = Phases(clock.ns, device.event)
    for _ in range(4):
        for _ in range(3):
            with phases("act"):
                clock.now += 0.001
                with phases("h2d"):
                    clock.now += 0.001
                    device.launch(0.002)
                device.launch(0.004)
                with phases("d2h"):
                    device.wait()
        with phases("learn"):
            clock.now += 0.001
            device.launch(0.100)
    with phases("learn"):
        device.wait()
    with phases("log"):
        clock.now += 0.001
    seconds = phases.window()
    assert seconds["learn"] == pytest.approx(4 * 0.100, abs=0.006)
    assert seconds["act"] == pytest.approx(12 * 0.004, abs=0.014)
    assert seconds["h2d"] == pytest.approx(12 * 0.002, abs=0.014)
    assert seconds["log"] == pytest.approx(0.001)
    assert sum(seconds.values()) == pytest.approx(clock.now)


def test_serialised_phases_hold_all_that_they_launched():
    """Without events: each phase waits for its own work, and none pays for another's."""
    clock = Clock()
    device = FakeDevice(clock)
    phases = SerialisedPhases(device.wait, clock.ns)
    for _ in range(3):
        with phases("act"):
            clock.now += 1
            device.launch(4)
            with phases("d2h"):
                clock.now += 0.5
        with phases("learn"):
            device.launch(16)
        with phases("env"):
            clock.now += 2
    assert phases.window() == {"act": 15, "d2h": 1.5, "learn": 48, "env": 6}
    assert phases.current == "other"
    with pytest.raises(ValueError, match="profile=serialised .* use that"):
        Runtime(torch.device("cpu"), "", ThreadPlan(1, 1, 1, 1), 0).make_phases("serialised")


def test_without_a_profile_phases_are_absent():
    phases = NullPhases()
    with phases("act"):
        pass
    assert phases.window() == {}


def test_entering_a_phase_costs_little_more_than_a_with():
    timer = timeit.Timer("with nothing: pass", globals={"nothing": nullcontext()})
    least = min(timer.repeat(5, 1000)) / 1000
    assert 0 < Phases().cost_s() < 100 * least
    assert NullPhases().cost_s() == 0
