"""Every learner under every precision and compile mode, on the GPU if there is one.

`make gpu-check`; not part of the default tests. Without a GPU the same checks run on the CPU, with
a stand-in for CUDA graphs and traced graphs instead of compiled ones, and the report says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from conftest import settings
from standin import StandIn, as_traced

from rl_pipeline.buffers.rollout import RolloutBuffer
from rl_pipeline.engine import graphs
from rl_pipeline.engine.compilers import CompilePlan, captured, choose_plan
from rl_pipeline.engine.graphs import CompileLog
from rl_pipeline.engine.phases import NullPhases
from rl_pipeline.engine.precision import Arithmetic, choose_arithmetic
from rl_pipeline.engine.runtime import Runtime, ThreadPlan
from rl_pipeline.learners.dqn import DQN
from rl_pipeline.learners.ppo import PPO
from rl_pipeline.types import Batch, Continuous, Discrete, EnvSpec, Step

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
HORIZON, NUM_ENVS, BATCH = 8, 4, 16
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
COMPILES = ("eager", "default", "reduce_overhead", "max_autotune", "cudagraphs")
LEARNERS = ("ppo-mlp", "ppo-gaussian", "ppo-cnn", "dqn-mlp", "dqn-cnn")


@pytest.fixture(autouse=True, scope="session")
def say_where(request: Any):
    """On the first line, so that no table is mistaken for a GPU's."""
    where = torch.cuda.get_device_name() if CUDA else "no GPU here: CPU with stand-ins"
    reporter = request.config.pluginmanager.getplugin("terminalreporter")
    if reporter:
        reporter.write_line(f"gpu-check on {where}")


def make_runtime(precision: str, compiled: str) -> Runtime:
    """As a run would be built on the GPU; stand-ins where there is none."""
    wanted = settings(f"precision={precision}", f"compile={compiled}")
    if CUDA:
        arithmetic, _ = choose_arithmetic(
            wanted.precision, DEVICE, torch.cuda.get_device_capability()
        )
        plan, _ = choose_plan(wanted.compile, DEVICE)
    else:
        p = wanted.precision
        dtype = None if p.autocast is None else getattr(torch, p.autocast)
        arithmetic = Arithmetic(precision, "cpu", dtype, p.matmul, p.loss_scale)
        plan = CompilePlan()
        if compiled == "default":
            plan = CompilePlan(compiled, as_traced)
        elif compiled != "eager":
            capture = StandIn()
            plan = CompilePlan(compiled, captured(as_traced, capture), capture)
    arithmetic.apply()
    return Runtime(DEVICE, "", ThreadPlan(1, 1, 1, 1), 3, arithmetic, plan, CompileLog())


@dataclass
class Case:
    """A learner and how to feed it."""

    learner: Any
    spec: EnvSpec
    runtime: Runtime

    def obs(self, seed: int) -> np.ndarray:
        """[N, ...]"""
        rng = np.random.default_rng(seed)
        shape = (self.spec.num_envs, *self.spec.obs_shape)
        if self.spec.obs_dtype == np.uint8:
            return rng.integers(0, 255, shape, dtype=np.uint8)
        return rng.normal(size=shape).astype(np.float32)

    def act(self, seed: int) -> np.ndarray:
        """Actions [N]."""
        return self.learner.policy.act(self.obs(seed), 1.0)[0]

    def update(self, seed: int) -> dict[str, float]:
        """Collect and learn; returns metrics."""
        if isinstance(self.learner, DQN):
            return self._update_dqn(seed)
        buffer = RolloutBuffer(self.spec, HORIZON, self.learner.policy.extras, DEVICE)
        no, rng = np.zeros(NUM_ENVS, bool), np.random.default_rng(seed)
        for t in range(HORIZON):
            obs = self.obs(seed + t)
            action, extras = self.learner.policy.act(obs, 0.0)
            reward = rng.normal(size=NUM_ENVS).astype(np.float32)
            ids = np.arange(NUM_ENVS, dtype=np.int32)
            buffer.add(obs, action, extras, Step(obs, reward, reward, no, no, ~no, ids))
        metrics, _ = self.learner.update(buffer.take(self.obs(seed + HORIZON)), 0.0)
        return {name: float(value) for name, value in metrics.items()}

    def _update_dqn(self, seed: int) -> dict[str, float]:
        rng = torch.Generator().manual_seed(seed)
        rows = [torch.from_numpy(self.obs(seed + i)) for i in range(BATCH // NUM_ENVS + 1)]
        batch = Batch(
            torch.cat(rows[:-1]), torch.randint(0, 3, (BATCH,), generator=rng),
            torch.randn(BATCH, generator=rng), torch.full((BATCH,), 0.99), torch.cat(rows[1:]),
            torch.ones(BATCH), np.arange(BATCH),
        )  # fmt: skip
        fields = [x.to(DEVICE) if torch.is_tensor(x) else x for x in batch]
        self.learner.update(Batch(*fields), 0.0)
        return {name: float(value) for name, value in self.learner.metrics(1.0).items()}


def make_case(learner: str, precision: str, compiled: str) -> Case:
    """Raises ValueError for what this device refuses."""
    algo, kind = learner.split("-")
    runtime = make_runtime(precision, compiled)
    wanted = settings(
        f"algo={algo}", "env=pong" if kind == "cnn" else "env=cartpole", "tracking=none",
        *(["algo.num_minibatches=2", "algo.num_epochs=2", f"algo.horizon={HORIZON}"]
          if algo == "ppo" else [f"algo.batch_size={BATCH}"]),
        *(["network.hidden=[16]"]), f"backend.num_envs={NUM_ENVS}",
    )  # fmt: skip
    action: Discrete | Continuous = Discrete(3)
    if kind == "gaussian":
        action = Continuous(np.full(2, -1, np.float32), np.full(2, 1, np.float32))
    shape, dtype = ((4, 84, 84), np.uint8) if kind == "cnn" else ((4,), np.float32)
    spec = EnvSpec("t", "t", NUM_ENVS, shape, np.dtype(dtype), action)
    make = PPO if algo == "ppo" else DQN
    return Case(make(wanted.algo, wanted.network, spec, runtime, NullPhases()), spec, runtime)


@pytest.mark.parametrize("compiled", COMPILES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("learner", LEARNERS)
def test_cell(learner: str, precision: str, compiled: str, monkeypatch: Any):
    """Learns like eager float32, compiles once, draws fresh noise, copies once each way."""
    monkeypatch.setattr(graphs, "TIMING_S", 0.0)
    if not CUDA and precision == "fp16" and learner.endswith("cnn"):
        pytest.skip("fp16 convolutions have no fast form on a CPU")
    try:
        case = make_case(learner, precision, compiled)
    except ValueError as error:
        pytest.skip(f"refused: {error}")
    plain = make_case(learner, "fp32", "eager")
    start = case.learner.params.values.clone()
    assert torch.equal(start, plain.learner.params.values)

    for seed in (0, 100):
        metrics = case.update(seed)
        plain.update(seed)
    built = len(case.runtime.compile_log.entries)
    assert (built > 0) == (compiled != "eager")
    for seed in (200, 300, 400):
        metrics = case.update(seed)
        plain.update(seed)
    assert all(np.isfinite(value) for value in metrics.values())
    assert len(case.runtime.compile_log.entries) == built, "recompiled after warm-up"
    assert case.runtime.compile_log.recompiles == 0

    moved = plain.learner.params.values - start
    gap = (case.learner.params.values - start - moved).norm() / moved.norm()
    assert moved.norm() > 0
    if precision == "fp32":
        assert gap < 1e-2  # five updates in other kernels; a wrong form is off by 1
    else:
        assert gap < 1.0
    if learner.startswith("ppo"):
        assert metrics["health/max_abs_log_ratio_first_minibatch"] < 1e-6
        same = np.stack([case.act(7) for _ in range(100)])
        assert same.std(0).max() > 0, "frozen noise"
        assert len(np.unique(same.reshape(100, -1), axis=0)) > 1
    check_transfers(case)


def check_transfers(case: Case) -> None:
    """One copy of observations in and one of actions out for each act; none on the CPU."""
    ledger = case.runtime.transfers
    before = (ledger.to_device_total.copies, ledger.to_host_total.copies)
    bytes_before = ledger.to_device_total.bytes
    case.act(1)
    after = (ledger.to_device_total.copies, ledger.to_host_total.copies)
    assert [b - a for a, b in zip(before, after, strict=True)] == ([1, 1] if CUDA else [0, 0])
    if not CUDA:
        return
    assert ledger.to_device_total.bytes - bytes_before == case.obs(0).nbytes
    # The copy of actions is the one synchronisation of an act.
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchroniz") as caught:
            case.act(2)
        assert len(caught) == 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
