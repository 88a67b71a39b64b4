"""Kernels in a row: bit for bit what autograd gives, taken once they pay, and never in doubt."""

from __future__ import annotations

import pytest
import torch
from agents import BOX, CPU, learner, random_rollout
from conftest import settings
from torch.nn.functional import relu

from rl_pipeline.engine import unroll
from rl_pipeline.engine.graphs import CompileLog, trace
from rl_pipeline.engine.precision import Arithmetic
from rl_pipeline.engine.runtime import Runtime, ThreadPlan
from rl_pipeline.engine.unroll import Unrolled, in_a_row
from rl_pipeline.types import Discrete


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """In a row from the third call on."""
    monkeypatch.setattr(unroll, "AFTER", 2)


def weights_after(agent, action, updates=12):
    for seed in range(updates):
        agent.update(random_rollout(agent, action=action, seed=seed), 0.0)
    return agent.params.values.clone()


@pytest.mark.parametrize("action", [Discrete(2), BOX])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_ppo_learns_bit_for_bit_the_same(action, dtype, monkeypatch):
    arithmetic = Arithmetic("", "cpu", dtype)
    eager = Runtime(CPU, "", ThreadPlan(1, 1, 1, 1), seed=3, arithmetic=arithmetic)
    options = {"action": action, "normalize_obs": True, "learning_rate": 1e-3}
    row = learner(**options, runtime=eager)
    moved = weights_after(row, action)
    assert eager.compile_log.unroll_s > 0
    assert None not in row._gradient_step._gradients._calls.values()
    monkeypatch.setattr(unroll, "AFTER", 10**9)
    plain = learner(**options, runtime=Runtime(CPU, "", eager.threads, 3, arithmetic))
    assert torch.equal(moved, weights_after(plain, action))


def numbers(x, w, scale=2.0):
    """(gradient of a loss in w, a detached output)."""
    y = relu(x @ w.view(3, 2).t())
    return torch.func.grad(lambda w: relu(x @ w.view(3, 2).t()).sum() * scale)(w), y.detach()


def test_views_of_the_state_are_taken_once_and_follow_it():
    w, x = torch.randn(6), torch.randn(4, 2)
    graph = trace(lambda w, x: numbers(x, w), (w, x))
    call = in_a_row(graph, [w])
    assert not [n for n in graph.graph.nodes if n.target is torch.ops.aten.view.default]
    assert len(graph.graph.find_nodes(op="placeholder")) == 1
    for _ in range(2):
        for got, expected in zip(call(x), numbers(x, w), strict=True):
            assert torch.equal(got, expected)
        w += 1  # in place, as an optimizer does


def unrolled(eager, pure, w, log=None):
    grads = torch.zeros(6)
    return Unrolled(eager, pure, [w], grads, log or CompileLog()), grads


def test_another_result_by_one_bit_leaves_it_to_autograd():
    w, calls = torch.randn(6), []

    def eager(x):
        calls.append(len(x))
        grads.add_(numbers(x, w)[0])
        return (numbers(x, w)[1],)

    def off(w, x):
        g, y = numbers(x, w)
        return g * (1 + 2e-7), y

    step, grads = unrolled(eager, off, w)
    for _ in range(4):
        grads.zero_()
        x = torch.randn(4, 2)
        step(x)
        assert torch.equal(grads, numbers(x, w)[0])
    assert len(calls) == 5  # four, and one to compare with
    assert list(step._calls.values()) == [None]


def test_what_cannot_be_traced_and_what_has_many_forms_goes_through_autograd():
    w, log = torch.randn(6), CompileLog()

    def eager(x):
        grads.add_(numbers(x, w)[0])
        return (numbers(x, w)[1],)

    step, grads = unrolled(eager, lambda w, x: numbers(x + torch.rand(1), w), w, log)
    for rows in (4, 4, 4, 5, 6, 7, 8, 9, 10):
        grads.zero_()
        x = torch.randn(rows, 2)
        assert torch.equal(step(x)[0], numbers(x, w)[1])
        assert torch.equal(grads, numbers(x, w)[0])
    assert len(step._calls) == 7 and set(step._calls.values()) == {None}
    assert 0 < log.unroll_s == log.aside_s


def test_a_run_says_what_tracing_took_and_keeps_it_out_of_its_rate(tmp_path):
    from rl_pipeline.run import build

    lines = [
        "env=cartpole", "algo=ppo", "debug=short", "total_steps=4000", "tracking=none", "seed=1",
        "compile=eager",
    ]  # fmt: skip
    session, _ = build.make_session(settings(*lines), tmp_path, lines)
    result = session.run()
    assert result["compile"]["unroll_s"] > 0
    assert result["throughput"]["compile_s"] == pytest.approx(result["compile"]["unroll_s"])
    assert result["effective"]["compile"] == "eager"
