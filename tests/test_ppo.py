"""PPO against hand computation and independent formulas."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from agents import BOX, CPU, learner, random_rollout, spec
from torch.distributions import Categorical, Independent, Normal

from rl_pipeline.buffers.rollout import RolloutBuffer
from rl_pipeline.engine.flat import FlatParameters
from rl_pipeline.learners.distributions import make_distribution
from rl_pipeline.learners.losses import gae, masked_standardize, ppo_loss, row_weights
from rl_pipeline.learners.normalizers import ObsNormalizer, RewardNormalizer
from rl_pipeline.types import Continuous, Discrete, MultiBinary, MultiDiscrete, Step


def estimate(reward, discount, ended, valid, values, gamma=0.9, lam=1.0):
    def column(x, dtype=torch.float32):
        return torch.tensor(x, dtype=dtype).unsqueeze(1)

    out = gae(
        column(reward), column(discount), column(ended, torch.bool), column(valid, torch.bool),
        column(values), gamma, lam,
    )  # fmt: skip
    return out.squeeze(1).tolist()


def test_truncation_bootstraps_from_the_true_last_observation_and_termination_does_not():
    # One step, r = 1, V(s0) = 4, V(last) = 10, gamma = 0.9. Target = advantage + V(s0).
    truncated = estimate([1.0], [1.0], [True], [True], [4.0, 10.0])[0] + 4
    terminated = estimate([1.0], [0.0], [True], [True], [4.0, 10.0])[0] + 4
    assert truncated == pytest.approx(10.0)
    assert terminated == pytest.approx(1.0)


def test_gae_by_hand_with_a_reset_row_in_the_middle():
    # Rows: step, step that truncates, reset row, step of the next episode.
    # values: V(0), V(1), V(last of episode 1) at the reset row, V(first of episode 2), V(after).
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    out = estimate([1, 1, 0, 1], [1, 1, 1, 1], [0, 1, 0, 0], [1, 1, 0, 1], values, 0.5, 0.5)
    d3 = 1 + 0.5 * 5 - 4  # -0.5
    d1 = 1 + 0.5 * 3 - 2  # 0.5: bootstraps from the row that holds the last observation
    d0 = 1 + 0.5 * 2 - 1  # 1.0
    assert out == pytest.approx([d0 + 0.25 * d1, d1, 0.0, d3])


def test_an_episode_cannot_change_the_advantages_of_the_one_before():
    args = ([1.0, 1.0, 0.0, 2.0], [1, 0, 1, 1], [0, 1, 0, 0], [1, 1, 0, 1])
    first = estimate(*args, [1.0, 2.0, 3.0, 4.0, 5.0])
    changed = estimate([1.0, 1.0, 0.0, 99.0], *args[1:], [1.0, 2.0, 3.0, -7.0, 50.0])
    assert first[:2] == changed[:2]
    assert first[3] != changed[3]


def test_gae_matches_the_textbook_sum_on_one_long_episode():
    rng = np.random.default_rng(0)
    reward, values = rng.normal(size=20), rng.normal(size=21)
    gamma, lam = 0.97, 0.9
    delta = reward + gamma * values[1:] - values[:-1]
    expected = [
        sum((gamma * lam) ** k * delta[t + k] for k in range(20 - t)) for t in range(20)
    ]  # fmt: skip
    ones = np.ones(20)
    out = estimate(reward, ones, ones * 0, ones, values, gamma, lam)
    assert out == pytest.approx(expected, rel=1e-5, abs=1e-6)


def loss_of(ratio: list[float], advantage: list[float], weight=None, value=None, **options):
    n = len(ratio)
    zeros = torch.zeros(n)
    defaults = {
        "ratio_clip": 0.2, "value_clip": None, "value_coef": 0.0, "entropy_coef": 0.0,
        "normalize_advantage": False,
    }  # fmt: skip
    return ppo_loss(
        torch.tensor(ratio).log(), zeros + 0.7, zeros if value is None else torch.tensor(value),
        zeros, zeros, torch.tensor(advantage), zeros + 1.0,
        torch.ones(n) if weight is None else torch.tensor(weight), **(defaults | options),
    )  # fmt: skip


def test_ratio_clipping_by_hand():
    # min(r A, clip(r, 0.8, 1.2) A): 1.2*1, 0.5*1, 1.5*-1, 0.8*-1
    terms = loss_of([1.5, 0.5, 1.5, 0.5], [1.0, 1.0, -1.0, -1.0])
    assert float(terms.loss) == pytest.approx(-(1.2 + 0.5 - 1.5 - 0.8) / 4)
    assert float(terms.clip_fraction) == 1.0
    kl = np.mean([r - 1 - np.log(r) for r in (1.5, 0.5, 1.5, 0.5)])
    assert float(terms.approx_kl) == pytest.approx(kl, rel=1e-5)


def test_value_clipping_and_entropy_by_hand():
    # Old value 0, target 1. New 0.5 is clipped to 0.2: max(0.25, 0.64); new -0.1: 1.21.
    terms = loss_of(
        [1.0, 1.0], [0.0, 0.0], value=[0.5, -0.1], value_clip=0.2, value_coef=1.0,
        entropy_coef=0.1,
    )  # fmt: skip
    assert float(terms.value_loss) == pytest.approx(0.5 * (0.64 + 1.21) / 2)
    assert float(terms.loss) == pytest.approx(0.5 * (0.64 + 1.21) / 2 - 0.1 * 0.7)


def test_masked_rows_change_nothing():
    kept = loss_of([1.1, 0.9], [1.0, -2.0], normalize_advantage=True, value_coef=1.0)
    masked = loss_of(
        [1.1, 40.0, 0.9], [1.0, 1e6, -2.0], [1.0, 0.0, 1.0], [0.0, 1e6, 0.0],
        normalize_advantage=True, value_coef=1.0,
    )  # fmt: skip
    for a, b in zip(kept, masked, strict=True):
        assert float(a) == pytest.approx(float(b), rel=1e-6, abs=1e-7)


def test_standardize_matches_numpy():
    x = torch.tensor([1.0, 5.0, 2.0, 100.0])
    valid = torch.tensor([1.0, 1.0, 1.0, 0.0])
    out = masked_standardize(x, valid, row_weights(valid))[:3]
    ref = np.array([1.0, 5.0, 2.0])
    assert out.numpy() == pytest.approx((ref - ref.mean()) / ref.std(ddof=1), rel=1e-5)


@pytest.mark.parametrize("action", [Discrete(2), BOX], ids=["discrete", "gaussian"])
def test_reset_rows_cannot_change_an_update(action):
    """Rewards, values and log-probs of reset rows may hold anything finite."""
    outcome = []
    for poison in (False, True):
        agent = learner(action=action, normalize_obs=True, normalize_reward=True)
        before = agent.params.values.clone()
        rollout = random_rollout(agent, action=action)
        assert rollout.env_steps == 8 * 4 - 2
        if poison:
            reset = ~rollout.valid
            assert reset.sum() == 2
            rollout.reward[reset] = 1e6
            # A reset row's value is what the row before bootstraps from: a termination must not
            # use it, a truncation must (that one is the true last observation), so it stays.
            rollout.extras["value"][3, 0] = 1e6
            rollout.extras["log_prob"][reset] = -40.0
        agent.update(rollout, 0.0)
        assert not torch.equal(before, agent.params.values)
        outcome.append(agent.params.values.clone())
    assert torch.equal(*outcome)


@pytest.mark.parametrize("action", [Discrete(2), BOX], ids=["discrete", "gaussian"])
def test_the_first_minibatch_has_ratio_one(action):
    agent = learner(action=action, normalize_obs=True)
    for seed in range(3):  # also after the statistics and the weights have moved
        metrics, updates = agent.update(random_rollout(agent, action=action, seed=seed), 0.0)
        assert float(metrics["health/max_abs_log_ratio_first_minibatch"]) < 1e-6
        assert updates == 8
        assert float(metrics["loss/grad_norm"]) > 0


def test_the_learning_rate_anneals_to_zero():
    agent = learner()
    metrics, updates = agent.update(random_rollout(agent), 0.75)
    assert metrics["loss/learning_rate"] == pytest.approx(2.5e-4 / 4)
    before = agent.params.values.clone()
    agent.update(random_rollout(agent), 1.0)
    assert torch.equal(before, agent.params.values)


def test_target_kl_stops_the_epochs():
    full = learner(learning_rate=0.05, num_epochs=10)
    short = learner(learning_rate=0.05, num_epochs=10, target_kl=1e-4)
    assert full.update(random_rollout(full), 0.0)[1] == 20
    assert short.update(random_rollout(short), 0.0)[1] == 2


def test_the_update_equals_a_plain_autograd_reference():
    """The same minibatch through modules, torch's own clipping and a per-tensor Adam."""
    agent = learner(num_minibatches=1, num_epochs=1, learning_rate=1e-2, max_grad_norm=0.05)
    rollout = random_rollout(agent)
    reference = learner(num_minibatches=1, num_epochs=1)._net
    assert agent.update(rollout, 0.0)[1] == 1

    params, value = reference(rollout.obs[:-1].flatten(0, 1))
    dist = Categorical(logits=params)
    valid = rollout.valid.flatten()
    with torch.no_grad():
        last = reference.value(rollout.obs[-1])
    values = torch.cat([rollout.extras["value"], last[None]])
    advantage = torch.zeros(9, 4)
    for t in reversed(range(8)):
        for n in range(4):
            if rollout.valid[t, n]:
                delta = rollout.reward[t, n] - values[t, n]
                delta += 0.99 * rollout.discount[t, n] * values[t + 1, n]
                carry = 0 if rollout.ended[t, n] else advantage[t + 1, n]
                advantage[t, n] = delta + 0.99 * 0.95 * carry
    advantage = advantage[:8].flatten()[valid]
    target = advantage + rollout.extras["value"].flatten()[valid]
    ratio = (
        dist.log_prob(rollout.action.flatten())[valid] - rollout.extras["log_prob"].flatten()[valid]
    ).exp()
    normal = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    loss = -torch.min(ratio * normal, ratio.clamp(0.8, 1.2) * normal).mean()
    loss = loss + 0.5 * 0.5 * ((value[valid] - target) ** 2).mean()
    loss = loss - 0.01 * dist.entropy()[valid].mean()
    plain = list(reference.parameters())
    for p in plain:
        p.grad = None
    loss.backward()
    torch.nn.utils.clip_grad_norm_(plain, 0.05)
    torch.optim.Adam(plain, lr=1e-2, eps=1e-5, foreach=False).step()
    expected = torch.cat([p.detach().flatten() for p in plain])
    torch.testing.assert_close(agent.params.values, expected, rtol=1e-4, atol=1e-6)


def test_parameters_and_gradients_are_views_of_flat_vectors():
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    flat = FlatParameters(net)
    assert flat.values.numel() == sum(p.numel() for p in net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    assert flat.grads.abs().sum() > 0
    flat.values.zero_()
    assert net(torch.ones(1, 3)).abs().sum() == 0
    with pytest.raises(ValueError, match="another network"):
        flat.load(torch.zeros(3))


def test_distributions_match_torch():
    params, rng = torch.randn(50, 3), torch.Generator().manual_seed(0)
    ours = make_distribution(Discrete(3))
    action = ours.sample(params, ours.noise(50, rng))
    log_prob, entropy = ours.log_prob_entropy(params, action)
    reference = Categorical(logits=params)
    torch.testing.assert_close(log_prob, reference.log_prob(action))
    torch.testing.assert_close(entropy, reference.entropy())

    params = torch.randn(50, 4)
    gaussian = make_distribution(BOX)
    action = gaussian.sample(params, gaussian.noise(50, rng))
    log_prob, entropy = gaussian.log_prob_entropy(params, action)
    mean, log_std = params.chunk(2, -1)
    normal = Independent(Normal(mean, log_std.exp()), 1)
    torch.testing.assert_close(log_prob, normal.log_prob(action))
    torch.testing.assert_close(entropy, normal.entropy())


def test_the_spread_of_a_normal_has_no_meaning_for_discrete_actions():
    box = Continuous(np.full(2, -1, np.float32), np.full(2, 1, np.float32))
    assert learner(action=box, log_std_init=-1.0)._net.log_std.tolist() == [-1, -1]
    with pytest.raises(ValueError, match="algo.log_std_init=-1 has no effect.*leave it out"):
        learner(log_std_init=-1.0)


def test_sampling_follows_the_distribution():
    rng = torch.Generator().manual_seed(0)
    probs = torch.tensor([0.1, 0.6, 0.3])
    ours = make_distribution(Discrete(3))
    draws = ours.sample(probs.log().expand(20_000, 3), ours.noise(20_000, rng))
    counts = torch.bincount(draws, minlength=3) / 20_000
    sigma = (probs * (1 - probs) / 20_000).sqrt()
    assert ((counts - probs).abs() < 5 * sigma).all()
    params = torch.tensor([0.5, -2.0, 0.0, -1.0]).expand(20_000, 4)
    gaussian = make_distribution(BOX)
    actions = gaussian.sample(params, gaussian.noise(20_000, rng))
    assert actions.mean(0).tolist() == pytest.approx([0.5, -2.0], abs=0.04)
    assert actions.std(0).tolist() == pytest.approx([1.0, np.exp(-1)], rel=0.04)


def test_obs_normalizer_matches_numpy():
    rng = np.random.default_rng(0)
    x = rng.normal(3, 5, (90, 3)).astype(np.float32)
    valid = rng.random(90) < 0.8
    normalizer = ObsNormalizer((3,), CPU)
    for part in np.split(np.arange(90), [1, 30, 31]):
        normalizer.update(torch.tensor(x[part]), torch.tensor(valid[part]))
    kept = x[valid].astype(np.float64)
    expected = np.clip((x - kept.mean(0)) / np.sqrt(kept.var(0) + 1e-8), -10, 10)
    assert normalizer(torch.tensor(x)).numpy() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_reward_normalizer_matches_a_plain_loop_and_ignores_reset_rows():
    rng = np.random.default_rng(0)
    reward = rng.normal(size=(40, 2)).astype(np.float32)
    ended, valid = np.zeros((40, 2), bool), np.ones((40, 2), bool)
    ended[10, 0], ended[20, 1], valid[11, 0], valid[21, 1] = True, True, False, False
    reward[~valid] = 0
    normalizer = RewardNormalizer(2, 0.9, CPU)
    halves = [
        normalizer(*(torch.tensor(x[part]) for x in (reward, ended, valid)))
        for part in (slice(0, 25), slice(25, 40))
    ]
    returns, seen = np.zeros(2), []
    for t in range(40):
        returns = 0.9 * returns + reward[t]
        seen += [r for r, ok in zip(returns, valid[t], strict=True) if ok]
        returns = np.where(ended[t], 0, returns)
        if t in (24, 39):
            part = slice(0, 25) if t == 24 else slice(25, 40)
            expected = np.clip(reward[part] / np.sqrt(np.var(seen) + 1e-8), -10, 10)
            assert halves[t == 39].numpy() == pytest.approx(expected, rel=1e-4)


def test_a_learner_restored_from_its_state_continues_identically():
    first = learner(action=BOX, normalize_obs=True, normalize_reward=True)
    first.update(random_rollout(first, action=BOX), 0.0)
    state = first.state_dict()
    second = learner(action=BOX, normalize_obs=True, normalize_reward=True)
    assert second.load_state_dict(state)
    for agent in (first, second):
        agent.update(random_rollout(agent, action=BOX, seed=9), 0.3)
    assert torch.equal(first.params.values, second.params.values)
    with pytest.raises(ValueError, match="another network"):
        learner(action=Discrete(5)).load_state_dict(state)


def test_a_policy_apart_acts_with_what_it_pulled_last():
    """As an actor or a sampling thread does, while the learner's own parameters move."""
    agent, twin = learner(), learner()
    apart = twin.policy  # of the same seed, and with parameters of its own
    obs = np.ones((4, 3), np.float32)

    def values(policy):
        return policy.act(obs, 0.0)[1]["value"]

    before = values(apart)
    agent.update(random_rollout(agent), 0.0)
    assert agent.policy.version == 8 and apart.version == 0
    assert torch.equal(values(apart), before) and not torch.equal(values(agent.policy), before)
    apart.pull(agent.params.values, agent.policy.version)
    assert apart.version == 8 and torch.equal(values(apart), values(agent.policy))


def test_a_state_from_another_kind_of_device_says_that_it_is_not_exact():
    first, second = learner(), learner()
    first.update(random_rollout(first), 0.0)
    state = first.state_dict() | {"device": "cuda", "act_rng": torch.zeros(16, dtype=torch.uint8)}
    assert not second.load_state_dict(state)
    assert torch.equal(first.params.values, second.params.values)
    fresh = learner().policy.rng.get_state()
    assert not torch.equal(second.policy.rng.get_state(), fresh)


def test_stored_rows_do_not_change_when_the_environment_reuses_its_array():
    agent = learner(num_envs=1)
    buffer = RolloutBuffer(spec(1), 3, agent.policy.extras, CPU)
    reused = np.zeros((1, 3), np.float32)
    no, yes = np.zeros(1, bool), np.ones(1, bool)
    step = Step(reused, np.ones(1, np.float32), np.ones(1), no, no, yes, np.zeros(1, np.int32))
    for t in range(3):
        reused[:] = t
        action, extras = agent.policy.act(reused, 0.0)
        buffer.add(reused, action, extras, step)
    reused[:] = 3
    rollout = buffer.take(reused)
    assert rollout.obs[:, 0, 0].tolist() == [0, 1, 2, 3]


def test_specs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec().num_envs = 3


# -- acting in numpy -------------------------------------------------------------------------------

KINDS = {
    "discrete": Discrete(3), "gaussian": BOX,
    "multi": MultiDiscrete((2, 3)), "bits": MultiBinary(3),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("normalized", [False, True])
def test_numpy_acts_as_torch_does_on_the_same_noise(kind, normalized):
    options = {"action": KINDS[kind], "normalize_obs": normalized}
    fast, plain = learner(**options, in_numpy=True), learner(**options)
    rng = np.random.default_rng(0)
    for agent in (fast, plain):
        torch.manual_seed(0)
        agent.params.values.add_(torch.randn_like(agent.params.values) * 0.3)
        agent._normalize_obs.update(torch.randn(50, 3) * 3 + 1, torch.ones(50, dtype=torch.bool))
    for _ in range(20):
        obs = rng.normal(size=(4, 3)).astype(np.float32)
        mine, extras = fast.policy.act(obs, 0.0)
        theirs, _ = plain.policy.act(obs, 0.0)
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            fast.policy.act_greedy(obs), plain.policy.act_greedy(obs), rtol=1e-5, atol=1e-6
        )
        assert extras == {} and mine.dtype == theirs.dtype and mine.shape == theirs.shape
    assert fast.policy.extras == ()


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_ratio_is_one_where_numpy_acted(kind):
    """Log-probs and values come from the learner's own forward pass over the whole rollout."""
    agent = learner(action=KINDS[kind], in_numpy=True, normalize_obs=True, learning_rate=1e-3)
    for seed in range(5):
        rollout = random_rollout(agent, action=KINDS[kind], seed=seed)
        assert rollout.extras == {}
        metrics, updates = agent.update(rollout, 0.0)
        assert updates == 8
        assert float(metrics["health/max_abs_log_ratio_first_minibatch"]) < 1e-6


def test_an_update_does_not_depend_on_who_acted():
    fast, plain = learner(in_numpy=True), learner()
    mine, theirs = random_rollout(fast), random_rollout(plain)
    assert torch.equal(mine.action, theirs.action)
    for agent, rollout in ((fast, mine), (plain, theirs)):
        agent.update(rollout, 0.0)
    torch.testing.assert_close(fast.params.values, plain.params.values, rtol=1e-5, atol=1e-6)
