"""Accounting: phases, throughput windows and the CPU budget."""

from __future__ import annotations

import json
import threading
import time
import timeit
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_pipeline.buffers.rollout import RolloutBuffer
from rl_pipeline.engine.phases import NullPhases, Phases, SerialisedPhases
from rl_pipeline.engine.runtime import STREAMS, Runtime, ThreadPlan, stream_seed, thread_plan
from rl_pipeline.engine.transfers import HiddenWaits, StagingRing
from rl_pipeline.envs.lanes import Lanes
from rl_pipeline.loops import sync
from rl_pipeline.loops.sync import Counters
from rl_pipeline.machine import cpu_budget
from rl_pipeline.telemetry.recorder import Recorder, bottleneck
from rl_pipeline.types import Discrete, EnvSpec, Episode, Step


class Clock:
    """Time that moves only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def ns(self) -> int:
        return round(self.now * 1e9)


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


def test_hidden_waits_are_counted_by_phase_and_line(recwarn):
    """A stand-in for torch's sync-debug mode: the very warning, where a device would give it."""
    phases, modes = Phases(), []
    waits = HiddenWaits(lambda: phases.current)

    def wait() -> None:
        warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)

    with waits.watching(modes.append):
        for _ in range(5):
            with phases("learn"):
                wait()
                with phases("d2h"):
                    wait()
        with phases("env"):
            wait()
            warnings.warn("something else", stacklevel=1)
    assert modes == ["warn", "default"]
    assert [(w["phase"], w["count"]) for w in waits.report()] == [("learn", 5), ("env", 1)]
    assert all(w["where"].startswith("tests/test_phases.py:") for w in waits.report())
    assert [str(w.message) for w in recwarn] == ["something else"]


class LateCopies:
    """A device whose copies read their source some milliseconds after they were launched."""

    def __init__(self, guarded: bool) -> None:
        self.guarded, self.waits = guarded, 0
        self.events: list = []

    def pin(self, array: np.ndarray) -> torch.Tensor:
        return torch.empty_like(torch.from_numpy(array))

    def launch(self, slot: torch.Tensor):
        arrived, copied, device = torch.empty_like(slot), threading.Event(), self

        def copy() -> None:
            time.sleep(0.005)
            arrived.copy_(slot)
            copied.set()

        threading.Thread(target=copy).start()

        class Event:
            def synchronize(self) -> None:
                device.waits += 1
                if device.guarded:
                    copied.wait()

            finish = copied.wait

        self.events.append(Event())
        return arrived, self.events[-1]


@pytest.mark.parametrize("guarded", [True, False])
def test_no_observation_changes_on_its_way_to_the_device(guarded: bool):
    """100 copies through two slots; with the guard taken out the device sees the next one's."""
    device = LateCopies(guarded)
    stage = StagingRing(device.pin, device.launch)
    host = np.empty(1000, np.float32)
    arrived = []
    for i in range(100):
        host[:] = i  # the array is the environment's own and changes at once
        arrived.append(stage(host))
    for event in device.events:
        event.finish()
    right = [bool((x == i).all()) for i, x in enumerate(arrived)]
    assert all(right) == guarded
    assert device.waits == 98


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


@pytest.mark.parametrize(
    ("quota", "budget"),
    [("400000 100000", 4), ("765000 100000", 7), ("50000 100000", 1), ("max 100000", 12)],
)
def test_cpu_budget_reads_cgroup_v2(tmp_path, quota, budget):
    (tmp_path / "cpu.max").write_text(quota + "\n")
    assert cpu_budget(tmp_path, 12, {})[0] == budget


def test_cpu_budget_reads_cgroup_v1_and_the_user(tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("300000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_budget(tmp_path, 12, {}) == (3, "cgroup quota")
    assert cpu_budget(tmp_path, 12, {"RL_PIPELINE_CPUS": "2"}) == (2, "RL_PIPELINE_CPUS")


def test_the_user_s_threads_win(monkeypatch):
    from conftest import settings

    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    plan = thread_plan(settings("env=pong", "backend.num_threads=5"), 2, "affinity")
    assert (plan.torch_threads, plan.env_threads) == (3, 5)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert thread_plan(settings("env=pong"), 2, "affinity").torch_threads == 2
    assert thread_plan(settings(), 8, "affinity").env_threads == 1


def test_beside_a_stepping_lane_torch_takes_half_of_the_cores(monkeypatch):
    from conftest import settings

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    plan = thread_plan(settings("env=pong", "backend=envpool_async"), 4, "affinity")
    assert (plan.torch_threads, plan.act_threads) == (4, 2)
    assert "half of the budget" in plan.reasons["act"]
    assert thread_plan(settings("env=pong"), 4, "affinity").act_threads == 4
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert thread_plan(settings("env=pong", "backend=envpool_async"), 4, "x").act_threads == 3

    before = torch.get_num_threads()
    runtime = Runtime(torch.device("cpu"), "", replace(plan, torch_threads=before), 0)
    with runtime.beside_envs():
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == before


def test_thread_variables_are_read_with_care(monkeypatch):
    from conftest import settings

    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    assert thread_plan(settings(), 2, "affinity").torch_threads == 4
    with pytest.raises(ValueError, match="RL_PIPELINE_CPUS=half"):
        cpu_budget(environ={"RL_PIPELINE_CPUS": "half"})


class CountingLearner:
    """Notes the progress that each update is told."""

    extras = ()

    def __init__(self) -> None:
        self.policy = self
        self.progress: list[float] = []

    def act(self, obs, progress):
        return np.zeros(2, np.int64), {}

    def update(self, rollout, progress):
        self.progress.append(progress)
        return {}, 1


class TwoEnvs:
    """Never ends."""

    spec = EnvSpec("t", "t", 2, (1,), np.dtype(np.float32), Discrete(2))

    def reset(self):
        raise NotImplementedError

    close = reset

    def send(self, action):
        pass

    def recv(self):
        zero, no = np.zeros(2, np.float32), np.zeros(2, bool)
        return Step(np.zeros((2, 1), np.float32), zero, zero, no, no, ~no, np.arange(2))


def test_the_first_update_has_the_full_rate_and_the_last_one_not_zero():
    learner, counters = CountingLearner(), Counters()
    buffer = RolloutBuffer(TwoEnvs.spec, 5, (), torch.device("cpu"))
    obs = np.zeros((2, 1), np.float32)
    sync.run(
        TwoEnvs(), buffer, learner, NullPhases(), counters, 30, obs,
        lambda obs, metrics: counters.env_steps >= 30,
    )  # fmt: skip
    assert learner.progress == [0, 1 / 3, 2 / 3]
    assert (counters.env_steps, counters.updates, counters.rollouts) == (30, 3, 3)


class Clockwork:
    """Lane of two environments whose obs and reward tell who stepped when."""

    def __init__(self, first: int, log: list[str]) -> None:
        action = Discrete(100)
        self.spec = EnvSpec("c", "c", 2, (1,), np.dtype(np.float32), action)
        self.first, self.log, self.t = first, log, 0

    def obs(self) -> np.ndarray:
        return (self.first + 10 * self.t + np.arange(2, dtype=np.float32))[:, None]

    def send(self, action) -> None:
        self.log.append(f"send {self.first}")
        self.action = action

    def recv(self) -> Step:
        self.log.append(f"recv {self.first}")
        self.t += 1
        no = np.zeros(2, bool)
        reward = self.action.astype(np.float32)
        return Step(self.obs(), reward, reward, no, no, ~no, np.arange(2, dtype=np.int32))

    reset = close = None


class Echo:
    """Acts with the observation's own number; counts its updates."""

    extras = ("log_prob",)
    updates = 0

    def __init__(self) -> None:
        self.policy = self

    def act(self, obs, progress):
        return obs[:, 0].astype(np.int64), {"log_prob": torch.full((len(obs),), self.updates)}

    def update(self, rollout, progress):
        self.rollout = [x.clone() for x in rollout[:3]] + [rollout.extras["log_prob"].clone()]
        self.updates += 1
        return {}, 1


def test_lanes_fill_the_same_rows_as_one_vector_and_stay_on_policy():
    log: list[str] = []

    @contextmanager
    def overlap():
        log.append("begin")
        yield
        log.append("end")

    lanes = Lanes([Clockwork(0, log), Clockwork(2, log)], "x", overlap)
    learner, counters = Echo(), Counters()
    buffer = RolloutBuffer(lanes.spec, 3, learner.extras, torch.device("cpu"))
    obs = np.concatenate([lane._envs.obs() for lane in lanes.lanes])
    for update in range(2):
        sync.run(lanes, buffer, learner, NullPhases(), counters, 1000, obs, lambda o, m: True)
        seen, action, reward, log_prob = learner.rollout
        t = torch.arange(3 * update, 3 * update + 4).view(4, 1)
        expected = torch.arange(4).float() + 10 * t
        assert torch.equal(seen[..., 0], expected)
        assert torch.equal(action.float(), expected[:3])
        assert torch.equal(reward, expected[:3])
        assert (log_prob == update).all()  # no row was acted on with older weights
        obs = seen[-1].numpy()
    assert counters.env_steps == 24
    # One lane is always under way while the other is acted on.
    moves = [line for line in log if line not in ("begin", "end")]
    assert moves[:6] == ["send 0", "send 2", "recv 0", "send 0", "recv 2", "send 2"]
    # torch leaves cores to them while it acts, and takes them back before anything is learnt.
    assert log.count("begin") == log.count("end") == sum("send" in line for line in log)
    assert all(log[i + 1] == "end" for i, line in enumerate(log) if line == "begin")


def test_random_streams_differ_by_name_seed_and_index():
    seeds = {stream_seed(s, name, i) for s in range(3) for name in STREAMS for i in range(3)}
    assert len(seeds) == 3 * len(STREAMS) * 3
    assert stream_seed(1, "act") == stream_seed(1, "act")
