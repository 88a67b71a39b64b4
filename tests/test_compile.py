"""Compilation: the same numbers in every form, fresh noise, counted graphs, honest break-even."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from agents import BOX, CPU, learner, random_rollout, runtime
from conftest import settings
from standin import StandIn, as_traced

from rl_pipeline.engine import compilers, graphs
from rl_pipeline.engine.compilers import Captured, choose_plan, dynamo
from rl_pipeline.engine.flat import FlatParameters
from rl_pipeline.engine.graphs import CompileError, CompileLog, GraphFunction, break_even, trace
from rl_pipeline.engine.precision import Arithmetic
from rl_pipeline.engine.runtime import Runtime
from rl_pipeline.types import Discrete

DOUBLE = Arithmetic(wide=torch.float64)
ACTIONS = [Discrete(2), BOX]


@pytest.fixture(autouse=True)
def quick_timing(monkeypatch):
    """Three updates each way are enough to time here."""
    monkeypatch.setattr(graphs, "TIMING_S", 0.0)


def train(agent, updates=20, action=None):
    for seed in range(updates):
        metrics, updates = agent.update(random_rollout(agent, action=action, seed=seed), 0.0)
    assert updates == 8
    return agent.params.values.clone()


FORMS = {
    "traced": lambda: runtime(),
    "captured": lambda: runtime(capture=StandIn()),
    "aot_eager": lambda: runtime(dynamo("aot_eager")),
}


@pytest.mark.parametrize(
    ("form", "action"),
    [("traced", BOX), ("captured", BOX), ("captured", ACTIONS[0]), ("aot_eager", ACTIONS[0])],
)
def test_compiled_equals_eager_over_twenty_updates(form, action):
    options = {"action": action, "normalize_obs": True, "learning_rate": 1e-3}
    eager, compiled = learner(**options), learner(**options, runtime=FORMS[form]())
    start = eager.params.values.clone()
    moved = train(eager, action=action) - start
    difference = train(compiled, action=action) - start - moved
    assert moved.norm() > 0.1
    assert difference.norm() / moved.norm() <= 1e-4
    log = compiled._runtime.compile_log
    assert {e.name for e in log.entries} >= {"act", "update"}
    assert log.recompiles == 0


@pytest.mark.parametrize("form", ["traced", "captured"])
def test_compiled_equals_eager_in_double_precision(form):
    """The same pure update in float64, where only a different meaning makes a difference."""
    plans = {"eager": None, **FORMS}
    values = []
    for name in ("eager", form):
        base = plans[name]() if plans[name] else runtime(None)
        agent = learner(
            learning_rate=1e-2,
            runtime=Runtime(CPU, "", base.threads, 3, DOUBLE, base.plan, CompileLog()),
        )
        rng = torch.Generator().manual_seed(0)
        for _ in range(5):
            rows = [torch.randn(32, 3, generator=rng, dtype=torch.float64)]
            rows += [torch.randint(0, 2, (32,), generator=rng)]
            rows += [torch.randn(32, generator=rng, dtype=torch.float64) for _ in range(4)]
            valid = (torch.rand(32, generator=rng) < 0.9).double()
            order = torch.randperm(32, generator=rng).view(4, 8)
            terms, norms = agent._gradient_step(1e-2, order, *rows, valid)
            assert terms.shape == (4, 7)
            assert norms.dtype == torch.float64
        values.append(agent.params.values)
    assert (values[0] - values[1]).abs().max() < 1e-8


# -- randomness and memory (TRAPS: CUDA graphs) --------------------------------------------------


@pytest.mark.parametrize("action", ACTIONS, ids=["discrete", "gaussian"])
def test_noise_is_fresh_at_every_replay(action):
    agents = [learner(action=action), learner(action=action, runtime=FORMS["captured"]())]
    obs = np.ones((4, 3), np.float32)
    draws = [np.stack([a.policy.act(obs, 0.0)[0] for _ in range(200)]) for a in agents]
    assert draws[1].std(0).min() > 0
    assert draws[1].std() == pytest.approx(draws[0].std(), rel=0.2)
    assert np.array_equal(draws[0], draws[1]) or np.allclose(draws[0], draws[1], atol=1e-5)


def test_what_left_a_captured_graph_does_not_change():
    agent = learner(runtime=FORMS["captured"]())
    _, first = agent.policy.act(np.ones((4, 3), np.float32), 0.0)
    kept = {name: x.clone() for name, x in first.items()}
    agent.policy.act(np.full((4, 3), -5, np.float32), 0.0)
    assert all(torch.equal(first[name], kept[name]) for name in kept)


def test_a_captured_graph_sees_new_inputs_new_weights_and_changed_rows():
    flat = FlatParameters(torch.nn.Linear(2, 1, bias=False))
    capture = StandIn()
    compiled = runtime(capture=capture).compile("f", lambda x: (flat.module(x),), [flat])
    rows = torch.ones(1, 2)
    with torch.no_grad():
        flat.values.fill_(1.0)
        assert compiled(rows)[0].item() == 2
        rows.fill_(3.0)  # in place: the same tensor, another content
        assert compiled(rows)[0].item() == 6
        flat.values.zero_()
        assert compiled(rows)[0].item() == 0
    assert capture.warm == compilers.WARMUPS
    assert capture.replays >= 3


def test_one_replay_takes_a_whole_epoch_and_rows_are_copied_once(monkeypatch):
    capture = StandIn()
    agent = learner(num_epochs=3, runtime=runtime(capture=capture))
    agent.update(random_rollout(agent), 0.0)
    copies = []
    plain = torch.Tensor.copy_
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda x, y, *a, **k: copies.append(x.shape) or plain(x, y, *a, **k)
    )
    before = capture.replays
    rollout = random_rollout(agent, seed=1)
    copies.clear()
    agent.update(rollout, 0.0)
    assert capture.replays - before == 8 + 3 + 1  # acts, epochs and the advantages
    assert copies.count(torch.Size([32, 3])) == 1  # the observations


# -- weights and checkpoints ---------------------------------------------------------------------


def test_a_compiled_policy_takes_new_weights():
    agent = learner(runtime=FORMS["traced"]())
    obs = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    values = agent.policy.act(obs, 0.0)[1]["value"]
    assert values.std() > 0
    agent.params.load(torch.zeros_like(agent.params.values))
    assert agent.policy.act(obs, 0.0)[1]["value"].abs().max() == 0


def test_checkpoints_know_neither_precision_nor_compile_mode():
    cells = {
        "eager": lambda: runtime(None),
        "bf16": lambda: runtime(None, arithmetic=Arithmetic("bf16", "cpu", torch.bfloat16)),
        "fp16": lambda: runtime(
            None, arithmetic=Arithmetic("fp16", "cpu", torch.float16, loss_scale=1024.0)
        ),
        "graph": FORMS["traced"],
        "captured": FORMS["captured"],
    }
    saved = {}
    for name, make in cells.items():
        agent = learner(normalize_obs=True, runtime=make())
        agent.update(random_rollout(agent), 0.0)
        saved[name] = agent.state_dict()
    for (one, state), other in itertools.product(saved.items(), cells):
        agent = learner(normalize_obs=True, runtime=cells[other]())
        assert agent.load_state_dict(state)
        again = agent.state_dict()
        flat, kept = _flatten(again), _flatten(state)
        assert flat.keys() == kept.keys()
        assert not [k for k in flat if "_orig_mod" in k]
        for key, value in kept.items():
            same = torch.equal(flat[key], value) if torch.is_tensor(value) else flat[key] == value
            assert same, f"{key} from {one} under {other}"


def _flatten(state, prefix=""):
    found = {}
    for key, value in state.items():
        found |= (
            _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return found


# -- what a graph must not contain ---------------------------------------------------------------


def test_a_graph_that_would_freeze_something_is_refused():
    hidden = torch.ones(2)
    with pytest.raises(ValueError, match="not an argument"):
        trace(lambda x: (x + hidden,), [torch.ones(2)])
    with pytest.raises(ValueError, match="random numbers"):
        trace(lambda x: (x + torch.empty(2).normal_(),), [torch.ones(2)])


def function(build=as_traced, fallback=False, pure=lambda x: (x * 2,)):
    log = CompileLog()
    return GraphFunction("f", pure, pure, (), 0, build, log, fallback), log


def broken(graph, state, inputs):
    raise RuntimeError("no such instruction\nand more")


def test_a_failed_compilation_is_an_error_or_on_record():
    call, _ = function(broken)
    with pytest.raises(CompileError, match=r"'f' cannot be compiled.*no such instruction.*eager"):
        call(torch.ones(2))
    call, log = function(broken, fallback=True)
    assert call(torch.ones(2))[0].tolist() == [2, 2]
    assert call(torch.ones(3))[0].tolist() == [2, 2, 2]
    report = log.report(0)
    assert (report["graphs"], report["graph_breaks"]) == (0, 1)
    assert "no such instruction" in report["fallbacks"]["f"]


def test_values_that_steer_python_are_a_break():
    def steered(x):
        return (x if x.sum() > 0 else -x,)

    call, _ = function(pure=steered)
    with pytest.raises(CompileError, match="'f' cannot be compiled"):
        call(torch.ones(2))


def test_twelve_numbers_of_valid_rows_are_one_compilation():
    agent = learner(num_minibatches=1, runtime=FORMS["traced"]())
    for seed in range(12):
        rollout = random_rollout(agent, seed=seed)
        rollout.valid[:] = True
        rollout.valid.view(-1)[: seed * 2] = False
        agent.update(rollout, 0.0)
    log = agent._runtime.compile_log
    assert sum(e.name == "update" for e in log.entries) == 1
    assert log.report(0)["recompiles"] == 0


def test_other_shapes_are_counted_and_too_many_refused():
    call, log = function()
    for rows in range(1, 9):
        assert call(torch.ones(rows))[0].sum() == 2 * rows
        call(torch.ones(rows))
    assert (len(log.entries), log.recompiles) == (8, 7)
    assert log.metrics()["compile/recompiles"] == 7
    with pytest.raises(CompileError, match="more than 8 forms"):
        call(torch.ones(20))


def test_another_stride_or_type_is_another_graph():
    call, log = function()
    call(torch.ones(2, 3))
    call(torch.ones(3, 2).t())
    call(torch.ones(2, 3, dtype=torch.float64))
    assert len(log.entries) == 3


def test_compiling_and_timing_move_nothing():
    plain, timed = learner(num_epochs=1), learner(num_epochs=1, runtime=FORMS["traced"]())
    rollout = random_rollout(plain)
    timed.policy.act(np.zeros((4, 3), np.float32), 0.0)
    for agent in (plain, timed):
        agent.update(rollout, 0.0)
    assert timed._runtime.compile_log.eager_update_s is not None
    assert (
        float(timed._gradient_step.adam.state.steps)
        == float(plain._gradient_step.adam.state.steps)
        == 2
    )
    torch.testing.assert_close(plain.params.values, timed.params.values, rtol=1e-5, atol=1e-7)


def test_break_even_is_arithmetic():
    found = break_even(30.0, 5e-3, 4e-3, 1000)
    assert found["net_s"] == pytest.approx(-29)
    assert found["pays_back_after_updates"] == 30_000
    assert found["verdict"] == "off"
    assert break_even(30.0, 5e-3, 4e-3, 40_000)["verdict"] == "on"
    assert break_even(30.0, 4e-3, 5e-3, 10**9)["pays_back_after_updates"] is None


# -- choices -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cudagraphs", "reduce_overhead"])
def test_a_cpu_refuses_cuda_graphs(name):
    with pytest.raises(ValueError, match=f"compile={name}.*compile=default"):
        choose_plan(settings(f"compile={name}").compile, CPU)


def test_an_unknown_or_absent_backend_is_refused_with_those_that_are_here():
    with pytest.raises(ValueError, match="compile.backend=inductr.*aot_eager"):
        choose_plan(settings("compile=default", "compile.backend=inductr").compile, CPU)
    with pytest.raises(ValueError, match="tvm: its package is not installed"):
        choose_plan(settings("compile=default", "compile.backend=tvm").compile, CPU)


def test_plans_on_both_devices():
    plan, reason = choose_plan(settings("compile=default").compile, CPU)
    assert plan.build is not None
    assert plan.capture is None
    assert "ahead of time" in reason
    for name in ("cudagraphs", "reduce_overhead", "max_autotune"):
        plan, reason = choose_plan(settings(f"compile={name}").compile, torch.device("cuda"))
        assert plan.capture is not None
        assert "captured as a CUDA graph" in reason
    plan, reason = choose_plan(settings("compile=default").compile, torch.device("cuda"))
    assert plan.capture is None
    assert "backend inductor" in reason


def test_a_missing_compiler_is_answered_before_the_first_step(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ValueError, match="needs a C\\+\\+ compiler"):
        choose_plan(settings("compile=default").compile, CPU)


def test_packages_are_kept_by_what_they_compute(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compilers.cache_dir() == tmp_path / "rl_pipeline"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    assert compilers.cache_dir() == tmp_path / "mine"
    x, y = torch.ones(2), torch.ones(3)
    key = compilers.package_key
    twice, thrice = (trace(lambda x, k=k: (x * k,), [x]) for k in (2, 3))
    keys = {
        key(twice, [x], {}), key(thrice, [x], {}), key(twice, [y], {}),
        key(twice, [x], {"max_autotune": True}),
    }  # fmt: skip
    assert len(keys) == 4
    assert key(twice, [x], {}) == key(trace(lambda x: (x * 2,), [x]), [x], {})


# -- a real compiler -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "arithmetic"),
    [(BOX, Arithmetic()), (Discrete(2), Arithmetic("bf16", "cpu", torch.bfloat16))],
)
def test_ahead_of_time_equals_eager_and_is_cached(action, arithmetic, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    options = {"action": action, "normalize_obs": True, "learning_rate": 1e-3}

    def make(build):
        return learner(**options, runtime=runtime(build, arithmetic=arithmetic))

    eager, compiled = make(None), make(compilers.ahead_of_time({}))
    start = eager.params.values.clone()
    moved = train(eager, action=action) - start
    difference = train(compiled, action=action) - start - moved
    if arithmetic.exact:
        assert difference.norm() / moved.norm() <= 1e-4
    else:  # bf16 roundings differ between kernels, what is learned must not
        assert difference.norm() / moved.norm() <= 0.2
    metrics, _ = compiled.update(random_rollout(compiled, action=action, seed=99), 0.0)
    assert float(metrics["health/max_abs_log_ratio_first_minibatch"]) < 1e-6
    again = make(compilers.ahead_of_time({}))
    again.update(random_rollout(again, action=action), 0.0)
    assert all(e.cached for e in again._runtime.compile_log.entries)
    assert not any(e.cached for e in compiled._runtime.compile_log.entries)


@pytest.mark.slow
def test_a_torn_package_is_built_again(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    call, _ = function(compilers.ahead_of_time({}))
    assert call(torch.ones(2))[0].tolist() == [2, 2]
    (package,) = (tmp_path / "packages").glob("*.pt2")
    package.write_bytes(package.read_bytes()[:100])
    call, log = function(compilers.ahead_of_time({}))
    assert call(torch.ones(2))[0].tolist() == [2, 2]
    assert not log.entries[0].cached


def test_captured_takes_inference_tensors():
    capture = StandIn()
    with torch.inference_mode():
        x = torch.ones(2)
        call = Captured(lambda x: (x * 2,), (), [x], capture)
        assert call(x)[0].tolist() == [2, 2]
        x.fill_(3)
        assert call(x)[0].tolist() == [6, 6]


def test_a_graph_acts_in_bf16_with_the_weights_of_now():
    bf16 = Arithmetic("bf16", "cpu", torch.bfloat16)
    agent = learner(runtime=runtime(arithmetic=bf16))
    plain = learner(runtime=runtime(None, arithmetic=bf16))
    assert agent.policy._low.values.dtype == torch.bfloat16
    assert all("trunk" in name for name in agent.policy._low._names)
    obs = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)

    def acts_alike():
        plain.policy.rng.set_state(agent.policy.rng.get_state())
        (action, extras), (other, others) = (a.policy.act(obs, 0.0) for a in (agent, plain))
        assert np.array_equal(action, other)
        assert torch.equal(extras["value"], others["value"])
        return extras["value"]

    begin = acts_alike()
    first = agent.state_dict()
    agent.update(random_rollout(agent), 0.0)
    plain.params.load(agent.params.values)
    moved = acts_alike()
    assert not torch.equal(begin, moved)
    # Loaded, without an update in between.
    agent.load_state_dict(first)
    plain.params.load(agent.params.values)
    assert torch.equal(acts_alike(), begin)
