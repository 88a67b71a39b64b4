"""What a learner is shown and what it says: scales, large offsets, numbers, and honest figures."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from agents import CPU, learner, random_rollout
from agents import runtime as compiled
from conftest import settings

from rl_pipeline.buffers.deque import DequeBuffer
from rl_pipeline.buffers.device import DeviceReplay
from rl_pipeline.buffers.rollout import RolloutBuffer
from rl_pipeline.config.settings import DQNSettings, EnvSettings, NetworkSettings, PPOSettings
from rl_pipeline.engine.phases import NullPhases
from rl_pipeline.engine.precision import Arithmetic
from rl_pipeline.engine.runtime import Runtime, ThreadPlan
from rl_pipeline.engine.transfers import Transfers
from rl_pipeline.envs.gymnasium import GymnasiumVecEnv
from rl_pipeline.envs.gymnasium_async import GymnasiumAsyncVecEnv
from rl_pipeline.errors import ConfigError
from rl_pipeline.learners.dqn import DQN
from rl_pipeline.learners.networks import make_trunk
from rl_pipeline.learners.normalizers import ObsNormalizer
from rl_pipeline.learners.ppo import APPROX_KL, PPO
from rl_pipeline.loops.sync import Counters, run
from rl_pipeline.run.parts import make_replay
from rl_pipeline.telemetry.window import Window
from rl_pipeline.types import Discrete, EnvSpec, Step

ROOT = str(Path(__file__).resolve().parents[1])


@pytest.fixture(autouse=True)
def _importable_tests(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)


def envs(name, num_envs=2, wide_obs=False, backend="gymnasium", flatten_obs=False, **kwargs):
    id_ = f"tests.foreign:{name}-v0"
    env = EnvSettings(name="gym", id=id_, kwargs=kwargs, flatten_obs=flatten_obs)
    if backend == "gymnasium":
        return GymnasiumVecEnv(env, num_envs, 0, wide_obs)
    return GymnasiumAsyncVecEnv(env, num_envs, 0, 20, wide_obs)


def eager(**options):
    return Runtime(CPU, "", ThreadPlan(1, 1, 1, 1), 3, **options)


# --- scales of images (Box bounds and dtype decide)

CNN = NetworkSettings(name="nature_cnn", hidden=(32,))
SAME = {  # the same picture in other words
    "bytes": ("uint8", 0, 255),
    "unit": ("float32", 0, 1),
    "double": ("float64", 0, 1),
    "signed": ("float32", -1, 1),
    "shifted": ("float32", 100, 200),
    "floats of bytes": ("float32", 0, 255),
    "words": ("uint16", 0, 65535),
    "integers": ("int32", 0, 255),
    "long": ("int64", 10**12, 10**12 + 255),
}


def acting(kind, form, runtime):
    """What a fresh network says of the picture."""
    dtype, low, high = SAME[form]
    vec = envs("Picture", dtype=dtype, low=low, high=high)
    obs = vec.reset()
    if kind == "ppo":
        learner = PPO(PPOSettings(name="ppo"), CNN, vec.spec, runtime, NullPhases())
        return learner.policy.act(obs, 0.0)[1]["value"]
    cfg = DQNSettings(name="dqn", epsilon_start=0.0, epsilon_end=0.0)
    dqn = DQN(cfg, CNN, vec.spec, runtime, NullPhases())
    assert dqn.policy.act(obs, 0.0)[0].tolist() == dqn.policy.act_greedy(obs).tolist()
    return dqn._net(torch.from_numpy(obs))


@pytest.mark.parametrize("form", list(SAME)[1:])
def test_one_picture_is_one_picture_whatever_its_space_counts_in(form):
    for kind in ("ppo", "dqn"):
        expected = acting(kind, "bytes", eager())
        assert expected.abs().max() > 1e-3
        assert torch.allclose(acting(kind, form, eager()), expected, rtol=1e-4, atol=1e-5), kind
    if form != "long":  # of one dtype each
        assert torch.allclose(acting("ppo", form, compiled()), acting("ppo", "bytes", eager()),
                              rtol=1e-4, atol=1e-5)  # fmt: skip


def test_channels_of_different_ranges_are_each_scaled_by_their_own():
    low = np.stack([np.zeros((36, 36)), np.full((36, 36), -2.0)]).astype(np.float32)
    high = np.stack([np.full((36, 36), 4.0), np.full((36, 36), 2.0)]).astype(np.float32)
    spec = EnvSpec("t", "t", 1, (2, 36, 36), np.dtype(np.float32), Discrete(2),
                   obs_bounds=(low, high))  # fmt: skip
    trunk, _ = make_trunk(CNN, spec, torch.Generator().manual_seed(0))
    shown = trunk[0](torch.tensor([[1.0, 1.0]]).view(1, 2, 1, 1).expand(1, 2, 36, 36))
    assert shown[0, :, 0, 0].tolist() == [0.25, 0.75]
    half = Arithmetic(autocast=torch.float16)
    words = EnvSpec("t", "t", 1, (1, 36, 36), np.dtype(np.uint16), Discrete(2),
                    obs_bounds=(np.zeros((1, 36, 36)), np.full((1, 36, 36), 65535)))  # fmt: skip
    shown = make_trunk(CNN, words, torch.Generator(), half)[0][0](torch.full((1, 1, 36, 36), 65535))
    assert shown.dtype == torch.float16 and shown.max() == 1  # 65535 itself is none in fp16


@pytest.mark.parametrize(
    "dtype, low, high, words",
    [
        ("float32", -np.inf, np.inf, "-inf and inf"),
        ("float32", 0, np.inf, "0 and inf"),
        ("float32", -3e38, 3e38, "-3e\\+38"),
        ("int32", -(2**31), 2**31 - 1, "-2.14748e\\+09"),
    ],
)
def test_images_without_bounds_are_refused_by_name(dtype, low, high, words):
    spec = envs("Picture", dtype=dtype, low=low, high=high).spec
    with pytest.raises(ValueError, match=f"nature_cnn scales images.*{dtype}.*{words}.*finite low"):
        make_trunk(CNN, spec, torch.Generator())


def test_normalised_images_are_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="algo.normalize_obs=true does not go with.*nature_cnn"):
        settings("env=pong", "algo.normalize_obs=true")


# --- large offsets


def practise(vec, steps=6_000, num_envs=8, **cfg):
    """PPO's mean training return over the last rollout."""
    cfg = PPOSettings(
        name="ppo", horizon=64, num_minibatches=4, learning_rate=3e-3, gamma=0.0, entropy_coef=0,
        **cfg,
    )  # fmt: skip
    learner = PPO(cfg, NetworkSettings(name="mlp", hidden=(32,)), vec.spec, eager(), NullPhases())
    buffer = RolloutBuffer(vec.spec, cfg.horizon, learner.policy.extras, CPU)
    counters, returns = Counters(), []

    def after_update(obs, metrics):
        returns.append(np.mean([game.return_raw for game in vec.pop_episodes()]))
        return counters.env_steps >= steps

    run(vec, buffer, learner, NullPhases(), counters, steps, vec.reset(), after_update)
    vec.close()
    return returns[-1]


@pytest.mark.parametrize("dtype, shape", [("float64", "vector"), ("int64", "vector"),
                                          ("float64", "dict")])  # fmt: skip
def test_a_small_signal_on_a_large_offset_is_learnt_from_when_normalised(dtype, shape):
    flat = shape == "dict"
    vec = envs("Tell", 8, True, offset=1.7e9, dtype=dtype, shape=shape, flatten_obs=flat)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert practise(vec, normalize_obs=True) > 7  # of 8


@pytest.mark.parametrize("backend", ["gymnasium", "gymnasium_async"])
@pytest.mark.parametrize("dtype", ["float64", "int64", "float32"])
def test_a_large_offset_that_is_not_normalised_is_warned_of_once(backend, dtype):
    vec = envs("Tell", backend=backend, offset=1.7e9, dtype=dtype)
    with pytest.warns(UserWarning, match="observation dimension 0 is 1.7e\\+?0?9|170000000") as all:
        vec.reset()
        vec.step(np.array([0, 1]))
        vec.reset()
    assert len(all) == 1 and "algo.normalize_obs=true" in str(all[0].message)
    vec.close()


def test_an_offset_that_comes_later_in_one_part_is_named():
    vec = envs("Tell", offset=5.0, shape="dict", flatten_obs=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vec.reset()
    vec._vec.envs[1].unwrapped._offset = -3e7
    with pytest.warns(UserWarning, match="dimension 0 .a. is -3000000.*changes below 2"):
        vec.step(np.array([0, 1]))


def test_normalised_observations_are_what_float64_says():
    rng = np.random.default_rng(0)
    rows = 1.7e9 + rng.integers(0, 2, (256, 3)) + np.array([0.0, 1e-3, 5.0]) * rng.random((256, 3))
    normalizer = ObsNormalizer((3,), CPU)
    normalizer.update(torch.from_numpy(rows), torch.ones(256, dtype=torch.bool))
    shown = normalizer(torch.from_numpy(rows))
    assert shown.dtype == torch.float32
    assert np.allclose(shown.numpy(), (rows - rows.mean(0)) / rows.std(0), atol=1e-4)


# --- numbers as observations and actions


@pytest.mark.parametrize("backend", ["gymnasium", "gymnasium_async"])
@pytest.mark.parametrize("shape", ["number", "vector"])
def test_a_number_can_be_observed_and_be_the_action(backend, shape):
    vec = envs("Aim", 8 if backend == "gymnasium" else 2, backend=backend, shape=shape)
    assert vec.spec.action.shape == () and vec.spec.obs_shape == (() if shape == "number" else (2,))
    if backend == "gymnasium":
        assert practise(vec, normalize_obs=shape == "number") > 7
        return
    vec.reset()
    step = vec.step(np.array([0.5, -0.5], np.float32))
    assert step.obs.shape == (2, *vec.spec.obs_shape)
    vec.close()


# --- figures of updates


@pytest.mark.parametrize(
    "overrides, why",
    [
        (("algo.horizon=4", "backend.num_envs=1"), "normalised advantage is always 0"),
        (("algo.horizon=1", "backend.num_envs=4"), "normalised advantage is always 0"),
        (("algo.horizon=2", "backend.num_envs=2", "algo.normalize_advantage=false"), "empty"),
    ],
)
def test_minibatches_of_one_row_are_refused_with_the_way_out(overrides, why):
    with pytest.raises(ConfigError, match=f"(?s)algo.num_minibatches=4 leaves one row.*{why}.*use"):
        settings("env=acrobot", "algo.num_minibatches=4", *overrides)
    settings("env=acrobot", "algo.num_minibatches=2", *overrides)


def test_a_batch_smaller_than_its_minibatches_is_refused():
    with pytest.raises(ConfigError, match="num_minibatches=8 must divide"):
        settings("env=acrobot", "algo.horizon=2", "backend.num_envs=2", "algo.num_minibatches=8")


def with_validity(rollout, valid):
    return rollout._replace(valid=valid, env_steps=int(valid.sum()))


def test_statistics_are_over_rows_and_never_over_none():
    """Half of the minibatches hold reset rows only: they must not count as zeros, or as -1."""
    agent = learner(horizon=8, num_minibatches=16, num_epochs=1, learning_rate=1e-9)
    rollout = random_rollout(agent)
    valid = torch.zeros_like(rollout.valid)
    valid[3, 2] = valid[5, 1] = True
    metrics, updates = agent.update(with_validity(rollout, valid), 0.0)
    assert abs(float(metrics["loss/approx_kl"])) < 1e-6
    assert float(metrics["loss/entropy"]) == pytest.approx(np.log(2), abs=0.01)
    everything = learner(horizon=8, num_minibatches=1, num_epochs=1, learning_rate=1e-9)
    one, _ = everything.update(with_validity(random_rollout(everything), valid), 0.0)
    assert float(metrics["loss/value"]) == pytest.approx(float(one["loss/value"]), rel=1e-3)


def test_a_rollout_without_a_row_teaches_nothing_and_says_nothing():
    agent = learner(normalize_obs=True, normalize_reward=True)
    before = agent.params.values.clone()
    rollout = random_rollout(agent)
    metrics, updates = agent.update(with_validity(rollout, torch.zeros_like(rollout.valid)), 0.0)
    assert updates == 0 and torch.equal(agent.params.values, before)
    assert set(metrics) == {"loss/learning_rate"}


def test_targets_that_do_not_vary_have_no_explained_variance():
    agent, window = learner(gamma=0.0, gae_lambda=0.0), Window()
    rollout = random_rollout(agent)
    rollout.reward.zero_()
    window.add(agent.update(rollout, 0.0)[0])
    assert "loss/explained_variance" not in window.read()
    window.add(agent.update(rollout, 0.0)[0])
    window.add(agent.update(random_rollout(agent, seed=1), 0.0)[0])
    assert -10 < float(window.read()["loss/explained_variance"]) <= 1


def test_a_row_of_metrics_is_the_mean_and_the_maximum_of_its_window():
    agent, window, each = learner(learning_rate=0.02), Window(), []
    for seed in range(150):  # more than are kept apart
        each.append(agent.update(random_rollout(agent, seed=seed % 7), seed / 200)[0])
        window.add(each[-1])
    found = window.read()
    for name in ("loss/approx_kl", "loss/policy", "loss/grad_norm", "loss/explained_variance"):
        expected = np.mean([float(m[name]) for m in each])
        assert float(found[name]) == pytest.approx(expected, rel=1e-4, abs=1e-7), name
    for name in ("loss/approx_kl_max", "health/max_abs_log_ratio_first_minibatch"):
        assert float(found[name]) == max(float(m[name]) for m in each), name
    assert float(found["loss/approx_kl_max"]) > 2 * float(found["loss/approx_kl"])
    assert found["loss/learning_rate"] == each[-1]["loss/learning_rate"]
    assert not window.read()  # each update counts in one row


def test_the_largest_kl_is_that_of_any_minibatch():
    agent = learner(learning_rate=0.02, num_epochs=3)
    kept = []
    step = agent._gradient_step

    def spy(*args):
        kept.append(step(*args))
        return kept[-1]

    spy.attempted, spy.skipped = 0, step.skipped
    agent._gradient_step = spy
    metrics, updates = agent.update(random_rollout(agent), 0.0)
    every = torch.cat([terms for terms, _ in kept])[:, APPROX_KL]
    assert len(every) == 6 and float(metrics["loss/approx_kl_max"]) == float(every.max())
    assert float(metrics["loss/approx_kl"]) == pytest.approx(float(every.mean()), rel=1e-5)


def test_what_diverged_is_not_taken_for_absent():
    window = Window()
    window.add({"loss/policy": torch.tensor(1.0), "loss/explained_variance": torch.tensor(0.5)})
    window.add(
        {"loss/policy": torch.tensor(torch.nan), "loss/explained_variance": torch.tensor(1.0)}
    )
    found = window.read()
    assert np.isnan(float(found["loss/policy"])) and float(found["loss/explained_variance"]) == 0.75


@pytest.mark.parametrize("log_every_s", [0.0, 1e9])
def test_the_loop_hands_over_all_updates_since_it_was_last_asked(log_every_s):
    vec, seen = envs("Tell", 2), []
    cfg = PPOSettings(name="ppo", horizon=8, num_minibatches=2)
    agent = PPO(cfg, NetworkSettings(name="mlp"), vec.spec, eager(), NullPhases())
    update, said = agent.update, []

    def spy(rollout, progress):
        metrics, updates = update(rollout, progress)
        said.append(metrics)
        return metrics, updates

    agent.update = spy
    counters = Counters()

    def hook(obs, metrics):
        if log_every_s == 0 or counters.rollouts == 6:
            seen.append(metrics())
        return counters.rollouts == 6

    buffer = RolloutBuffer(vec.spec, 8, agent.policy.extras, CPU)
    run(vec, buffer, agent, NullPhases(), counters, 96, vec.reset(), hook)
    assert len(seen) == (6 if log_every_s == 0 else 1) and counters.updates == 48
    top = max(float(m["loss/approx_kl_max"]) for m in said)
    assert max(float(m["loss/approx_kl_max"]) for m in seen) == top
    assert float(seen[-1]["loss/entropy"]) == pytest.approx(
        np.mean([float(m["loss/entropy"]) for m in (said if log_every_s else said[-1:])])
    )


# --- the ledger of copies

ELSEWHERE = torch.device("meta")  # a device as far as copies go, on every machine


@pytest.fixture
def ledger():
    kept = Transfers(ELSEWHERE)
    kept._stage = lambda array: torch.from_numpy(array).to(ELSEWHERE)  # pinning needs a GPU
    return kept


def test_a_rollout_s_way_to_the_device_is_on_the_ledger(ledger):
    spec = EnvSpec("t", "t", 4, (3,), np.dtype(np.float32), Discrete(2))
    buffer = RolloutBuffer(spec, 8, (), CPU, ledger.to_device)
    row = np.zeros(4, np.float32)
    flags = np.zeros(4, bool)
    for _ in range(8):
        step = Step(np.zeros((4, 3)), row, row, flags, flags, ~flags, np.arange(4, dtype=np.int32))
        buffer.add(np.zeros((4, 3)), np.zeros(4, int), {}, step)
    rollout = buffer.take(np.zeros((4, 3)))
    assert rollout.obs.device == ELSEWHERE
    assert ledger.to_device_total.copies == 6 and ledger.to_device_total.bytes == buffer.nbytes


def test_a_batch_s_way_there_and_its_priorities_way_back_are_on_the_ledger(ledger):
    spec = EnvSpec("t", "t", 2, (3,), np.dtype(np.float32), Discrete(2))
    runtime = eager()
    cfg = settings("env=cartpole", "algo=dqn", "buffer=prioritized", "buffer.capacity=1000")
    vars(runtime)["transfers"] = ledger
    agent = DQN(cfg.algo, NetworkSettings(name="mlp"), spec, runtime, NullPhases())
    ring = make_replay(cfg, cfg.algo, spec, runtime, Path("."))
    row, flags = np.zeros(2, np.float32), np.zeros(2, bool)
    for t in range(40):
        obs = np.full((2, 3), t, np.float32)
        step = Step(obs + 1, row, row, flags, flags, ~flags, np.arange(2, dtype=np.int32))
        ring.add(obs, np.zeros(2, int), {}, step)
    batch = ring.sample(8)
    agent._device = ELSEWHERE
    sent = agent._tensors(batch)
    assert all(x.device == ELSEWHERE for x in sent)
    assert ledger.to_device_total.copies == 6
    assert ledger.to_device_total.bytes == sum(x.nbytes for x in batch[:-1])
    ring.update_priorities(batch.ids, torch.ones(8))
    assert ledger.to_host_total.copies == 1 and ledger.to_host_total.bytes == 32


def test_what_buffers_on_the_device_send_is_on_the_ledger(ledger):
    spec = EnvSpec("t", "t", 2, (3,), np.dtype(np.float32), Discrete(2))
    sent = []

    def send(array):
        sent.append(ledger.send(array))
        return torch.from_numpy(array)

    row, flags = np.zeros(2, np.float32), np.zeros(2, bool)
    for buffer in (
        DeviceReplay(spec, 100, device=CPU, send=send),
        DequeBuffer(spec, 100, 1, 0.9, 0, CPU, send),
    ):
        for t in range(9):
            obs = np.full((2, 3), t, np.float32)
            step = Step(obs + 1, row, row, flags, flags, ~flags, np.arange(2, dtype=np.int32))
            buffer.add(obs, np.zeros(2, int), {}, step)
        buffer.sample(4)
        assert len(sent) == ledger.to_device_total.copies > 0
        assert sum(x.nbytes for x in sent) == ledger.to_device_total.bytes
        before = len(sent)
        buffer.sample(4)
        # Nothing more goes there where the contents already are.
        assert len(sent) - before == (0 if isinstance(buffer, DeviceReplay) else 5)
