"""The recorder: warm-up and steady state, rows, phases' shares."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from counting import Clock

from rl_pipeline.engine.phases import NullPhases, Phases
from rl_pipeline.loops.sync import Counters
from rl_pipeline.telemetry.recorder import Recorder, bottleneck
from rl_pipeline.types import Episode


def make_recorder(path: Path, clock: Clock, warm=lambda: True, phases=None) -> Recorder:
    window = (phases or NullPhases()).window
    recorder = Recorder(path, 1.0, 4, window, dict, warm, clock)
    recorder.start(Counters())
    return recorder


def test_warm_up_stays_out_of_the_steady_rate(tmp_path):
    clock, counters, ready = Clock(), Counters(), [False]
    recorder = make_recorder(tmp_path / "m.jsonl", clock, lambda: ready[0])
    for second, steps in enumerate([10, 10, 100, 100, 100]):
        ready[0] = second >= 1
        clock.now += 1
        counters.env_steps += steps
        counters.updates += 1
        recorder.tick(counters, {})
    rate = recorder.throughput()
    assert rate["env_steps_per_s"] == 100
    assert rate["frames_per_s"] == 400
    assert rate["warmup_s"] == 2
    assert rate["steady_s"] == 3
    assert rate["wall_s"] == 5
    assert rate["steady"]


def test_a_run_too_short_for_a_steady_state_says_so(tmp_path):
    clock, counters = Clock(), Counters(env_steps=0, updates=1)
    recorder = make_recorder(tmp_path / "m.jsonl", clock)
    clock.now, counters.env_steps = 2.0, 50
    recorder.tick(counters, {})
    assert recorder.throughput()["env_steps_per_s"] == 25
    assert not recorder.throughput()["steady"]
    assert recorder.throughput()["window_spread"] is None  # of one window: unknown, not 0


def test_evaluation_time_is_not_training_time(tmp_path):
    clock, counters = Clock(), Counters(updates=1)
    recorder = make_recorder(tmp_path / "m.jsonl", clock)
    for _ in range(3):
        clock.now += 1
        counters.env_steps += 100
        with recorder.excluded():
            clock.now += 9
        recorder.tick(counters, {})
    assert recorder.throughput()["env_steps_per_s"] == 100


def test_shares_and_rows_add_up(tmp_path):
    clock, counters = Clock(), Counters(updates=1)
    phases = Phases(clock.ns)
    recorder = make_recorder(tmp_path / "m.jsonl", clock, phases=phases)
    with phases("env"):
        clock.now += 3
    with phases("learn"):
        clock.now += 6
    clock.now += 1
    counters.env_steps = 50
    recorder.episodes([Episode(0, 12.0, 1.0, 3), Episode(1, 14.0, 3.0, 5)])
    row = recorder.tick(counters, {"loss/total": 0.5, "updates": 8.0})
    assert row["phase/env_share"] == pytest.approx(0.3)
    assert row["phase/other_share"] == pytest.approx(0.1)
    assert (row["return/train"], row["return/train_learner"], row["episode/length"]) == (13, 2, 4)
    assert sum(p["share"] for p in recorder.phases().values()) == pytest.approx(1)
    found = bottleneck(recorder.phases())
    assert found == {"phase": "learn", "share": pytest.approx(0.6), "upper_bound_speedup": 2.5}
    recorder.close()
    (line,) = (tmp_path / "m.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 50
    assert json.loads(line)["metrics"] == row


def test_a_loss_that_is_not_finite_stops_the_run_and_is_on_record(tmp_path):
    clock = Clock()
    recorder = make_recorder(tmp_path / "m.jsonl", clock)
    clock.now = 1.0
    with pytest.raises(FloatingPointError, match="loss/value became inf at env step 7"):
        recorder.tick(Counters(env_steps=7), {"loss/value": np.inf})
    assert json.loads((tmp_path / "m.jsonl").read_text())["metrics"]["loss/value"] == "inf"


def test_a_resumed_record_repeats_no_step(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 5, "time": 0, "metrics": {}}\n{"step": 9, "ti')  # torn by a kill
    recorder = make_recorder(path, Clock())
    for step in (4, 5, 6):
        recorder.write(step, {"x": 1.0})
    recorder.close()
    rows = path.read_text().splitlines()
    assert [json.loads(r)["step"] for r in (rows[0], rows[-1])] == [5, 6]
