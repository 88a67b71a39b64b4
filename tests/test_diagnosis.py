"""Diagnosis: parts are named right, changes are worth a try, ratios mean something."""

from __future__ import annotations

import time

import numpy as np
import pytest
from conftest import settings

from rl_pipeline.diagnosis import rig as rigs
from rl_pipeline.diagnosis.candidates import CANDIDATES, Machine, proposals
from rl_pipeline.diagnosis.diagnose import changed_by
from rl_pipeline.diagnosis.parts import Parts, ceiling
from rl_pipeline.diagnosis.rig import Rig
from rl_pipeline.diagnosis.trial import ratio_of, take_turns
from rl_pipeline.diagnosis.verdict import Share, sentence, shares
from rl_pipeline.diagnosis.worker import Worker, WorkerError

PPO = ("env=cartpole", "algo=ppo", "backend=gymnasium", "compile=eager", "seed=1")
DQN = (
    "env=cartpole", "algo=dqn", "backend=gymnasium", "backend.num_envs=2", "compile=eager",
    "seed=1", "algo.learning_starts=100",
)  # fmt: skip
PLAIN = Machine(cores=2, bf16=False, cuda=False, compiler=True)


# -- candidates ----------------------------------------------------------------------------------


def tried(*overrides, machine=PLAIN):
    return {change: c.recipe for c, change in proposals(settings(*overrides), machine)}


def test_a_poor_configuration_is_offered_what_helps_and_no_more_of_the_same():
    found = tried(
        "env=pong", "algo=dqn", "backend=gymnasium_async", "backend.num_envs=4", "buffer=deque",
        "compile=eager", "buffer.capacity=5000", "algo.learning_starts=1000",
        machine=Machine(2, True, False, True),
    )  # fmt: skip
    assert ("backend=envpool", "backend.num_envs=4") in found
    assert ("compile=default",) in found
    assert ("precision=bf16", "compile=default") in found
    assert ("buffer=uniform", "buffer.capacity=5000") in found
    assert not any("gymnasium_async" in o for change in found for o in change)
    assert found[("algo.update_burst=8",)] and not found[("compile=default",)]


def test_nothing_is_offered_that_the_machine_has_not():
    found = tried(*PPO, machine=Machine(cores=1, bf16=False, cuda=False, compiler=False))
    words = " ".join(o for change in found for o in change)
    assert not any(w in words for w in ("compile=", "precision", "device", "cuda"))
    gpu = tried(*DQN, machine=Machine(2, False, True, True))
    assert {("device=cpu",), ("compile=cudagraphs",), ("buffer.placement=cuda",)} <= set(gpu)


def test_more_environments_learn_from_as_many_rows_and_are_another_recipe():
    found = tried(*PPO, "backend.num_envs=4", "algo.horizon=128")
    assert found[("backend.num_envs=16", "algo.horizon=32")] is True
    assert {c.name for c in CANDIDATES if c.recipe} == {
        "environments", "minibatches", "updates together",
    }  # fmt: skip


def test_a_change_replaces_what_it_sets_anew():
    line = ["env=pong", "backend=envpool", "+backend.num_envs=4", "seed=1"]
    change = ("OMP_NUM_THREADS=1", "backend=gymnasium", "backend.num_envs=8")
    assert changed_by(line, change) == [
        "env=pong", "seed=1", "backend=gymnasium", "backend.num_envs=8",
    ]  # fmt: skip


# -- verdicts ------------------------------------------------------------------------------------


def test_shares_and_bounds_by_hand():
    found = shares({"env": 3.0, "learn": 6.0, "act": 1.0, "eval": 50.0, "compile": 9.0})
    assert [(x.phase, x.share) for x in found] == [("learn", 0.6), ("env", 0.3), ("act", 0.1)]
    assert found[0].bound == pytest.approx(2.5)
    assert "bound by learning: 60% of the time; were that free, at most 2.5x" in sentence(found)


def test_the_verdict_tells_waiting_from_computing_and_a_tie_from_a_winner():
    found = [Share("env", 0.8, 5.0), Share("learn", 0.2, 1.25)]
    assert "waits and does not compute" in sentence(found, {"env": 0.05})
    assert "waits" not in sentence(found, {"env": 0.97})
    assert "bound by the environments and learning" in sentence(
        [Share("env", 0.5, 2.0), Share("learn", 0.45, 1.8)]
    )
    assert "too short" in sentence([])


def test_ratios_of_pairs_by_hand():
    mean, low, high = ratio_of([2.0, 2.0 * 1.1, 2.0 / 1.1])
    assert mean == pytest.approx(2.0)
    reach = 4.302653 * np.log(1.1) / np.sqrt(3)  # t of 2 degrees, spread of the three logarithms
    assert (low, high) == pytest.approx((2 * np.exp(-reach), 2 * np.exp(reach)))
    assert ratio_of([1.5])[1:] == (0.0, np.inf)


class Fake:
    """A worker of a steady speed on a machine that slows down."""

    clock = 0.0

    def __init__(self, rate):
        self.rate = rate

    def ask(self, what, seconds):
        Fake.clock += 1
        return {"env_steps": self.rate * seconds * 0.9**Fake.clock, "seconds": seconds}


def test_turns_cancel_a_machine_that_slows_down():
    ratios = take_turns(Fake(100), Fake(150), 1.0, 8)
    assert ratio_of(ratios)[0] == pytest.approx(1.5, rel=0.01)


# -- measured ------------------------------------------------------------------------------------


class Slow:
    """Environments with a known cost in each step."""

    def __init__(self, envs, cost):
        self._envs, self._cost = envs, cost

    def recv(self):
        self._cost()
        return self._envs.recv()

    def __getattr__(self, name):
        return getattr(self._envs, name)


def spin(seconds):
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        pass


@pytest.mark.parametrize("algo", [PPO, DQN])
@pytest.mark.parametrize("cost", [time.sleep, spin])
def test_an_injected_cost_is_found_where_it_is_and_for_what_it_is(
    algo, cost, tmp_path, monkeypatch
):
    make = rigs.make_training_envs
    monkeypatch.setattr(
        rigs, "make_training_envs", lambda *a: Slow(make(*a), lambda: cost(0.005))
    )  # fmt: skip
    monkeypatch.setattr(rigs, "WARM_UPDATES", 4)
    rig = Rig(settings(*algo, "algo.horizon=32" if algo is PPO else "algo.batch_size=32"), tmp_path)
    try:
        rig.warm(0.0)
        stretch = rig.run(0.3)
        parts = Parts(rig)
        alone, rungs = parts.measure(0.05), parts.ladder(0.1)
        again = rig.run(0.1)
    finally:
        rig.close()
    found = shares(stretch.phases)
    assert found[0].phase == "env" and found[0].share > 0.5
    assert alone["env"].median_s > 0.004 / rig.envs.spec.num_envs
    assert ("waits" in sentence(found, {n: c.busy for n, c in alone.items()})) == (
        cost is time.sleep
    )
    assert {"env", "act", "store", "learn"} <= set(alone)
    assert list(rungs) == ["env", "act", "store", "learn"] and min(rungs.values()) > 0
    assert 0 < ceiling(alone) < rungs["env"] * 1.5
    assert again.env_steps > 0


def test_a_worker_measures_says_why_it_cannot_and_leaves_nothing_behind():
    worker = Worker(settings(*DQN))
    bad = Worker(settings("env=gym", "env.id=NoSuchTask-v0", "backend=gymnasium", "algo=ppo"))
    try:
        assert worker.ready()["memory"] > 1e7
        stretch = worker.ask("run", 0.1)
        assert stretch["env_steps"] > 0 and stretch["updates"] > 0
        with pytest.raises(WorkerError, match="NoSuchTask"):
            bad.ready()
    finally:
        worker.close()
        bad.close()
    assert worker._process.returncode is not None and bad._process.returncode is not None
