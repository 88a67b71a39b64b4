"""Spaces of every kind, wrappers, and other people's environments."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import settings as compose_settings
from gymnasium import spaces
from torch.distributions import Bernoulli, Categorical

from rl_pipeline.buffers.rollout import RolloutBuffer
from rl_pipeline.config.settings import EnvSettings, NetworkSettings, PPOSettings
from rl_pipeline.engine.phases import NullPhases
from rl_pipeline.engine.runtime import Runtime, ThreadPlan
from rl_pipeline.envs.gymnasium import GymnasiumVecEnv
from rl_pipeline.envs.gymnasium_async import GymnasiumAsyncVecEnv
from rl_pipeline.envs.spaces import Flattener
from rl_pipeline.errors import ConfigError
from rl_pipeline.learners.distributions import make_distribution
from rl_pipeline.learners.ppo import PPO
from rl_pipeline.loops.sync import Counters, run
from rl_pipeline.types import Discrete, MultiBinary, MultiDiscrete
from tests import counting


@pytest.fixture(autouse=True)
def _importable_tests(monkeypatch):
    monkeypatch.syspath_prepend(str(counting.__file__).removesuffix("/tests/counting.py"))


def make(name, backend="gymnasium", num_envs=2, wrappers=(), flatten=False, **kwargs):
    env = EnvSettings(
        name="gym", id=f"tests.counting:{name}-v0", kwargs=kwargs, wrappers=wrappers,
        flatten_obs=flatten,
    )  # fmt: skip
    if backend == "gymnasium_async":
        return GymnasiumAsyncVecEnv(env, num_envs, 0, step_timeout_s=20)
    return GymnasiumVecEnv(env, num_envs, 0)


# --- observations


@pytest.mark.parametrize("backend", ["gymnasium", "gymnasium_async"])
def test_nested_observations_become_one_vector(backend):
    vec = make("Parts", backend, flatten=True)
    assert vec.spec.obs_shape == (14,) and vec.spec.obs_dtype == np.float32
    observed = [vec.reset(), *(vec.step([0, 1]).obs for _ in range(4))]
    kept = [obs.copy() for obs in observed]
    env, space = counting.Parts(), counting.Parts().observation_space
    for obs, count in zip(observed, (0, 1, 2, 3, 0), strict=True):
        env._count = count
        expected = spaces.flatten(space, env._observe())
        assert obs.dtype == np.float32
        np.testing.assert_array_equal(obs, np.stack([expected, expected]))
    vec.step([0, 0])
    np.testing.assert_array_equal(observed, kept)
    vec.close()


def test_flattening_agrees_with_gymnasium_on_random_points():
    space = spaces.Dict(
        a=spaces.Tuple([spaces.Box(-1, 1, (2, 3)), spaces.Discrete(5, start=2)]),
        b=spaces.Dict(c=spaces.MultiBinary([2, 2]), d=spaces.MultiDiscrete([[2, 3], [4, 1]])),
    )
    flatten, points = Flattener(space, "x"), [space.sample() for _ in range(20)]
    parts = [
        np.stack([p["a"][0] for p in points]), np.stack([p["a"][1] for p in points]),
        np.stack([p["b"]["c"] for p in points]), np.stack([p["b"]["d"] for p in points]),
    ]  # fmt: skip
    expected = np.stack([spaces.flatten(space, p) for p in points])
    np.testing.assert_array_equal(flatten(parts), expected.astype(np.float32))
    with pytest.raises(ValueError, match="outside its Discrete space"):
        flatten([parts[0], parts[1] + 5, *parts[2:]])


def test_infinite_parts_still_stop_the_run():
    vec = make("Parts", flatten=True)
    vec.reset()
    broken = counting.Parts()._observe() | {"box": np.array([[np.nan], [0.0]])}
    vec._vec.envs[1].unwrapped._observe = lambda: broken
    with pytest.raises(ValueError, match="observation of environment 1 is nan"):
        vec.step([0, 0])


@pytest.mark.parametrize(
    ("space", "flatten", "words"),
    [
        ("obs", False, ["Dict", "env.flatten_obs=true"]),
        ("text", True, ["Text", "b.0", "env.wrappers"]),
        ("grid", False, ["MultiDiscrete([[2 2]", "env.wrappers"]),
        ("integers", False, ["int32", "env.wrappers"]),
        ("several", False, ["Dict('a': Discrete(2))", "env.wrappers"]),
    ],
)
def test_other_spaces_are_refused_by_name(space, flatten, words):
    with pytest.raises(ValueError) as error:
        make("Odd", space=space, flatten=flatten)
    assert all(word in str(error.value) for word in words)


# --- actions


@pytest.mark.parametrize(
    ("space", "good", "bad", "words"),
    [
        ("multi", [[0, 0], [2, 3]], [[0, 0], [3, 0]], "environment 1 is .3 0.*0 to .2 3."),
        ("multi", [[0, 0], [2, 3]], [[0, -1], [0, 0]], "environment 0 is . 0 -1."),
        ("binary", [[0, 1, 0], [1, 1, 1]], [[0, 1, 2], [0, 0, 0]], "environment 0.*0 to 1$"),
        ("start", [0, 2], [0, 3], "environment 1 is 3 .*from 0 to 2"),
        ("start", [0, 2], [-1, 0], "environment 0 is -1"),
    ],
)
def test_discrete_actions_of_every_kind_are_checked_and_shifted(space, good, bad, words):
    vec = make("Match", space=space, flatten=True)
    vec.reset()
    assert vec.step(good).valid.all()
    with pytest.raises(ValueError, match=words):
        vec.step(bad)
    for wrong in (np.array(good, float), np.array(good, bool)):
        with pytest.raises(ValueError, match=f"{wrong.dtype}"):
            vec.step(wrong)
    with pytest.raises(ValueError, match="shape"):
        vec.step(good[:1])
    # What arrives is what was meant: the right answers are rewarded in full.
    wanted = np.stack([env.unwrapped._wanted for env in vec._vec.envs])
    right = wanted if vec.spec.action.shape else wanted[:, 0]
    assert vec.step(right).reward.tolist() == [1, 1]


def reference(action, logits):
    """The same distribution by torch's own classes."""
    match action:
        case MultiDiscrete():
            parts = logits.split(list(action.num_actions), -1)
            return [Categorical(logits=part) for part in parts]
        case MultiBinary():
            return [Bernoulli(logits=logits[:, k]) for k in range(action.num_bits)]


@pytest.mark.parametrize("action", [MultiDiscrete((3, 2, 4)), MultiBinary(5)])
def test_distributions_agree_with_torch_s(action):
    dist = make_distribution(action)
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(7, dist.num_params, generator=generator)
    parts = reference(action, logits)
    taken = dist.sample(logits, dist.noise(7, generator))
    assert taken.shape == (7, *action.shape) and taken.dtype == torch.int64
    log_prob = sum(part.log_prob(taken[:, k].to(logits.dtype)) for k, part in enumerate(parts))
    entropy = sum(part.entropy() for part in parts)
    torch.testing.assert_close(dist.log_prob(logits, taken), log_prob)
    torch.testing.assert_close(dist.log_prob_entropy(logits, taken), (log_prob, entropy))
    many = isinstance(action, MultiDiscrete)
    best = [part.probs.argmax(-1) if many else (part.probs > 0.5).long() for part in parts]
    assert torch.equal(dist.mode(logits), torch.stack(best, -1))
    # Far beyond float32's exponent nothing becomes NaN.
    extreme = 200.0 * (torch.arange(dist.num_params) % 2 * 2 - 1).unsqueeze(0)
    assert all(x.isfinite().all() for x in dist.log_prob_entropy(extreme, taken[:1]))


@pytest.mark.parametrize("action", [MultiDiscrete((3, 2)), MultiBinary(2)])
def test_samples_follow_the_probabilities(action):
    dist = make_distribution(action)
    logits = torch.tensor([[0.3, -1.2, 1.0, 0.4, -0.7][: dist.num_params]])
    n = 40_000
    noise = dist.noise(n, torch.Generator().manual_seed(1))
    taken = dist.sample(logits.expand(n, -1), noise)
    places = np.prod([3, 2] if isinstance(action, MultiDiscrete) else [2, 2])
    index = taken[:, 0] * 2 + taken[:, 1]
    counts = torch.bincount(index, minlength=int(places)) / n
    points = torch.tensor([[a, b] for a in range(places // 2) for b in range(2)])
    probs = dist.log_prob(logits.expand(len(points), -1), points).exp()
    assert float(probs.sum()) == pytest.approx(1)
    sigma = (probs * (1 - probs) / n).sqrt()
    assert ((counts - probs).abs() < 5 * sigma).all()


@pytest.mark.parametrize("space", ["multi", "binary", "start"])
def test_ppo_learns_with_every_kind_of_discrete_action(space):
    vec = make("Match", num_envs=8, space=space, flatten=True)
    kinds = {"multi": MultiDiscrete((3, 4)), "binary": MultiBinary(3), "start": Discrete(3)}
    assert vec.spec.action == kinds[space]
    runtime = Runtime(torch.device("cpu"), "", ThreadPlan(1, 1, 1, 1), seed=3)
    cfg = PPOSettings(
        name="ppo", horizon=64, num_minibatches=4, learning_rate=3e-3, gamma=0.0, entropy_coef=0
    )
    network = NetworkSettings(name="mlp", hidden=(32,))
    learner = PPO(cfg, network, vec.spec, runtime, NullPhases())
    buffer = RolloutBuffer(vec.spec, cfg.horizon, learner.policy.extras, runtime.device)
    counters, returns = Counters(), []

    def after_update(obs, metrics):
        returns.append(np.mean([game.return_raw for game in vec.pop_episodes()]))
        return counters.env_steps >= 12_000

    run(vec, buffer, learner, NullPhases(), counters, 12_000, vec.reset(), after_update)
    assert counters.updates > 100
    assert returns[0] < 5 and returns[-1] > 7.2, returns  # of 8


# --- wrappers


@pytest.mark.parametrize("backend", ["gymnasium", "gymnasium_async"])
def test_wrappers_apply_in_order(backend):
    doubled = "tests.counting:Doubled"
    one = [doubled, {"name": doubled, "kwargs": {"more": 1}}]  # 2 (2n) + 1
    for wrappers, first in ((one, [1, 5, 9]), (one[::-1], [2, 6, 10])):
        vec = make("Counting", backend, wrappers=wrappers)
        observed = [vec.reset(), vec.step([0, 0]).obs, vec.step([0, 0]).obs]
        assert [obs[0, 0] for obs in observed] == first
        assert vec.step([0, 0]).truncated.all()
        vec.close()


def test_a_wrapper_s_time_limit_is_the_task_s():
    limit = {"name": "gymnasium.wrappers:TimeLimit", "kwargs": {"max_episode_steps": 2}}
    vec = make("Counting", wrappers=[limit])
    assert vec.spec.max_episode_steps == 2
    vec.reset()
    assert [vec.step([0, 0]).truncated.all() for _ in range(2)] == [False, True]


@pytest.mark.parametrize(
    ("wrapper", "words"),
    [
        ("nowhere.at_all:Wrapper", ["nowhere"]),
        ("gymnasium.wrappers:FlattenObs", ["FlattenObs", "near matches", "FlattenObservation"]),
        ({"name": "tests.counting:Doubled", "kwargs": {"les": 1}}, ["Doubled", "les"]),
        ("gymnasium.wrappers:GrayscaleObservation", ["does not take this environment"]),
        ("tests.counting:not_a_wrapper", ["no Gymnasium environment", "3"]),
    ],
)
def test_wrong_wrappers_are_named(wrapper, words):
    with pytest.raises(ValueError) as error:
        make("Counting", wrappers=[wrapper])
    assert all(word in str(error.value) for word in ["env.wrappers", *words])


def test_wrappers_and_flattening_are_set_on_the_command_line():
    line = ["env=gym", "env.id=X-v0"]
    checked = compose_settings(
        *line, "env.flatten_obs=true",
        "env.wrappers=[gymnasium.wrappers:FlattenObservation,"
        "{name: 'gymnasium.wrappers:TimeLimit', kwargs: {max_episode_steps: 9}}]",
    )  # fmt: skip
    assert checked.env.flatten_obs
    first, second = checked.env.wrappers
    assert (first.name, first.kwargs) == ("gymnasium.wrappers:FlattenObservation", {})
    assert second.kwargs == {"max_episode_steps": 9}
    wrappers = "env.wrappers=[gymnasium.wrappers:FlattenObservation]"
    for overrides, words in (
        (["env=cartpole", wrappers], ["env.wrappers", "backend=envpool", "backend=gymnasium"]),
        (["env=pong", "backend=gymnasium", wrappers], ["env=pong", "env=gym", "ale_py:ALE/Pong"]),
        ([*line, "env.wrappers=[Flatten]"], ["env.wrappers", "Flatten"]),
    ):
        with pytest.raises(ConfigError) as error:
            compose_settings(*overrides)
        assert all(word in str(error.value) for word in words)
