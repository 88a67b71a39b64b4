"""What a learner is shown and what it says: scales, large offsets, numbers, and honest figures."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import settings
from test_compile import runtime as compiled
from test_ppo import CPU

from rl_pipeline.buffers.rollout import RolloutBuffer
from rl_pipeline.envs.gymnasium import GymnasiumVecEnv
from rl_pipeline.envs.gymnasium_async import GymnasiumAsyncVecEnv
from rl_pipeline.learners.dqn import DQN
from rl_pipeline.learners.normalizers import ObsNormalizer
from rl_pipeline.learners.ppo import PPO
from rl_pipeline.loops.sync import Counters, run
from rl_pipeline.models import make_trunk
from rl_pipeline.phases import NullPhases
from rl_pipeline.precision import Arithmetic
from rl_pipeline.runtime import Runtime, ThreadPlan
from rl_pipeline.settings import ConfigError, DQNSettings, EnvSettings, NetworkSettings, PPOSettings
from rl_pipeline.types import Discrete, EnvSpec

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
        return learner.act(obs)[1]["value"]
    cfg = DQNSettings(name="dqn", epsilon_start=0.0, epsilon_end=0.0)
    dqn = DQN(cfg, CNN, vec.spec, runtime, NullPhases())
    assert dqn.act(obs, 0.0).tolist() == dqn.act_greedy(obs).tolist()
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


def learn(vec, steps=6_000, num_envs=8, **cfg):
    """PPO's mean training return over the last rollout."""
    cfg = PPOSettings(
        name="ppo", horizon=64, num_minibatches=4, learning_rate=3e-3, gamma=0.0, entropy_coef=0,
        **cfg,
    )  # fmt: skip
    learner = PPO(cfg, NetworkSettings(name="mlp", hidden=(32,)), vec.spec, eager(), NullPhases())
    buffer = RolloutBuffer(vec.spec, cfg.horizon, learner.extras, CPU)
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
        assert learn(vec, normalize_obs=True) > 7  # of 8


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
        assert learn(vec, normalize_obs=shape == "number") > 7
        return
    vec.reset()
    step = vec.step(np.array([0.5, -0.5], np.float32))
    assert step.obs.shape == (2, *vec.spec.obs_shape)
    vec.close()
