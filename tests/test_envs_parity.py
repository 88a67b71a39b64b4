"""The parity guard finds planted differences and leaves equal tasks alone."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from conftest import settings

from rl_pipeline.envs.differences import KNOWN, known_differences
from rl_pipeline.envs.parity import Sample, _kinds_p, _ks, compare, sample
from rl_pipeline.run.build import make_envs
from tests import counting

LEVEL = 1e-3


def sample_of(*overrides, games=24, starts=64):
    checked = settings(*overrides)

    def make(env, num_envs, seed):
        return make_envs(checked.model_copy(update={"env": env}), num_envs, seed, 1)

    return sample(make, checked.env, games, starts, num_envs=4)


@pytest.fixture(scope="module")
def breakout():
    return sample_of("env=breakout", "backend=envpool", games=8, starts=24)


@pytest.mark.parametrize("task", ["cartpole", pytest.param("pendulum", marks=pytest.mark.slow)])
def test_the_same_task_on_two_backends_is_the_same(task):
    games = 240 if task == "cartpole" else 40
    ours, pool = (
        sample_of(f"env={task}", f"backend={b}", games=games) for b in ("gymnasium", "envpool")
    )
    verdict = compare(ours, pool)
    assert verdict.differs(LEVEL) == []
    assert len(ours.lengths) == len(ours.returns) == games and len(ours.starts) == 64
    assert ours.facts["time limit in"] == "agent steps" and set(verdict.p_values) == {
        "starts", "length", "return",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("env.max_episode_steps=400", {"time limit"}),
        ("env.id=CartPole-v0", {"time limit"}),
        ("env.flatten_obs=true", set()),
        ("env.wrappers=[tests.planted:Longer]", {"length", "return"}),
        ("env.wrappers=[tests.planted:Richer]", {"return"}),
        ("env.wrappers=[tests.planted:Shifted]", {"starts"}),
    ],
)
def test_planted_differences_are_found(change, found):
    assert counting  # the tests are importable from here
    plain = sample_of("env=cartpole", "backend=gymnasium", games=120, starts=200)
    other = sample_of("env=cartpole", "backend=gymnasium", change, games=120, starts=200)
    assert set(compare(plain, other).differs(LEVEL)) == found


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("env.atari.sticky_actions=0.25", "frames"),
        ("env.atari.frame_skip=2", "frame skip"),
        ("env.atari.episodic_life=false", "life ends episode"),
        pytest.param("env.atari.frame_stack=2", "observations", marks=pytest.mark.slow),
        pytest.param("env.atari.screen_size=80", "observations", marks=pytest.mark.slow),
        pytest.param("env.atari.fire_reset=false", "frames", marks=pytest.mark.slow),
    ],
)
def test_planted_differences_in_the_preprocessing_are_found(breakout, change, found):
    other = sample_of("env=breakout", "backend=envpool", change, games=8, starts=24)
    assert found in compare(breakout, other).differs(LEVEL)


def test_games_on_two_backends_are_the_same_to_the_pixel(breakout):
    ours = sample_of("env=breakout", "backend=gymnasium", games=8, starts=24)
    assert compare(ours, breakout).differs(LEVEL) == []
    assert breakout.facts["life ends episode"] == "yes"
    assert breakout.facts["frame skip"] == "4"


def test_clipped_rewards_are_told_where_they_can_be():
    one = sample_of("env=pendulum", "backend=gymnasium", games=4, starts=8)
    assert one.facts["reward clipped"] == "no"
    other = replace(one, facts={**one.facts, "reward clipped": "yes"})
    assert compare(one, other).differs(LEVEL) == ["reward clipped"]
    signs = sample_of("env=cartpole", "backend=gymnasium", games=4, starts=8)
    assert "reward clipped" not in signs.facts


@pytest.mark.slow
def test_ale_s_own_vector_form_is_found_to_differ_as_the_table_says():
    native, plain = (
        sample_of("env=pong", f"backend={b}", "env.max_episode_steps=9", games=4, starts=120)
        for b in ("gymnasium_native", "gymnasium")
    )
    assert {"frames", "starts"} <= set(compare(plain, native).differs(LEVEL))
    assert "black" in known_differences("ALE/Pong-v5", "gymnasium", "gymnasium_native")[0]
    assert not native.starts[:, :-1].any() and plain.starts[:, :-1].any()


def test_no_op_starts_are_compared():
    line = ("env=pong", "backend=envpool", "env.max_episode_steps=9")
    few = sample_of(*line, "env.atari.noop_max=3", games=4, starts=120)
    many = sample_of(*line, games=4, starts=120)
    assert compare(few, many).p_values["starts"] < LEVEL


def test_the_tests_raise_few_false_alarms():
    rng = np.random.default_rng(0)
    p = [_ks(rng.poisson(20, 60), rng.poisson(20, 60)) for _ in range(600)]
    assert np.mean(np.array(p) < 0.05) < 0.08
    kinds = [[bytes([k]) for k in rng.integers(0, 12, 200)] for _ in range(400)]
    p = [_kinds_p(a, b) for a, b in zip(kinds[::2], kinds[1::2], strict=True)]
    assert 0.005 < np.mean(np.array(p) < 0.05) < 0.11
    assert _kinds_p([b"a"] * 50, [b"b"] * 50) < 1e-9 and _ks(np.ones(9), np.ones(9)) == 1


def test_shapes_that_differ_are_a_difference():
    facts = {"observations": "x"}
    one = Sample(facts, np.zeros((9, 4), np.float32), np.ones(9), np.ones(9))
    other = Sample(facts, np.zeros((9, 5), np.float32), np.ones(9), np.ones(9))
    assert compare(one, other).p_values["starts"] == 0


def test_what_becomes_of_a_fall_in_the_limit_s_step_is_measured_and_named():
    told = {
        backend: sample_of("env=cartpole", f"backend={backend}", games=4, starts=4).at_limit
        for backend in ("gymnasium", "gymnasium_async", "gymnasium_native", "envpool")
    }
    assert told.pop("envpool") == "truncated only" and set(told.values()) == {"terminated"}
    for backend in told:
        named = known_differences("CartPole-v1", backend, "envpool")
        assert "exactly the step of its time limit" in named[-1], backend
    assert sample_of("env=pendulum", "backend=gymnasium", games=4, starts=4).at_limit == ""


def test_known_differences_are_told_both_ways_round():
    (core,) = known_differences("ALE/Pong-v5", "gymnasium", "envpool")
    assert "ALE 0.11.2" in core
    assert known_differences("ALE/Pong-v5", "envpool_async", "gymnasium") == [core]
    assert known_differences("ALE/Pong-v5", "envpool", "envpool_async") == []
    assert known_differences("Pendulum-v1", "gymnasium", "envpool") == []
    assert all(backends and text for _, backends, text in KNOWN)
    code = (
        "import sys, rl_pipeline.envs.differences\n"
        "print([m for m in ('numpy', 'gymnasium', 'torch') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
