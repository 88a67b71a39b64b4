"""DQN against hand computation and an independent reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rl_pipeline.buffers.deque import DequeBuffer
from rl_pipeline.config.settings import DQNSettings, NetworkSettings
from rl_pipeline.engine.phases import NullPhases
from rl_pipeline.engine.runtime import Runtime, ThreadPlan
from rl_pipeline.learners.dqn import DQN
from rl_pipeline.learners.losses import PRIORITY_EPS, dqn_loss, td_target
from rl_pipeline.learners.networks import QNetwork
from rl_pipeline.learners.policies import EpsilonGreedy, numpy_forward
from rl_pipeline.types import Batch, Continuous, Discrete, EnvSpec, Step

CPU = torch.device("cpu")
SPEC = EnvSpec("test", "test", 2, (3,), np.dtype(np.float32), Discrete(4))


def learner(spec: EnvSpec = SPEC, activation: str = "relu", **cfg) -> DQN:
    network = NetworkSettings(name="mlp", hidden=(16, 8), activation=activation)
    runtime = Runtime(CPU, "", ThreadPlan(1, 1, 1, 1), seed=3)
    return DQN(DQNSettings(name="dqn", **cfg), network, spec, runtime, NullPhases())


def batch(seed: int = 0, size: int = 8) -> Batch:
    g = torch.Generator().manual_seed(seed)
    return Batch(
        obs=torch.randn(size, 3, generator=g),
        action=torch.randint(0, 4, (size,), generator=g),
        reward=3 * torch.randn(size, generator=g),
        discount=torch.where(torch.rand(size, generator=g) < 0.3, 0.0, 0.97),
        next_obs=torch.randn(size, 3, generator=g),
        weight=torch.rand(size, generator=g),
        ids=np.arange(size),
    )


# -- targets and loss -----------------------------------------------------------------------------


def test_targets_by_hand():
    # Rows: mid-episode, terminated, truncated after 1 step, 3-step window with gamma = 0.5.
    reward = torch.tensor([1.0, 1.0, 1.0, 3.0])
    discount = torch.tensor([0.9, 0.0, 0.9, 0.125])
    next_q = torch.tensor([[4.0, 10.0]] * 4)
    assert td_target(reward, discount, next_q).tolist() == pytest.approx([10, 1, 10, 4.25])
    # Double: the online network prefers action 0, which the target network values at 4.
    online = torch.tensor([[2.0, 1.0]] * 4)
    doubled = td_target(reward, discount, next_q, online)
    assert doubled.tolist() == pytest.approx([4.6, 1, 4.6, 3.5])


def test_huber_and_weights_by_hand():
    q = torch.tensor([[0.0, 5.0], [3.0, 0.0]], requires_grad=True)
    terms = dqn_loss(
        q, torch.tensor([1, 0]), torch.tensor([4.5, 0.0]), torch.tensor([1.0, 0.5]), 1.0
    )  # fmt: skip
    # Errors 0.5 and 3: 0.5 * 0.25, and 3 - 0.5 at half weight.
    assert terms.loss.item() == pytest.approx((0.125 + 0.5 * 2.5) / 2)
    assert terms.priority.tolist() == pytest.approx([0.5 + PRIORITY_EPS, 3 + PRIORITY_EPS])
    terms.loss.backward()
    # The gradient of a large error is clipped at 1; actions not taken have none.
    assert torch.allclose(q.grad, torch.tensor([[0.0, 0.25], [0.25, 0.0]]))


def test_without_error_clip_the_loss_is_half_the_square():
    terms = dqn_loss(
        torch.tensor([[5.0]]), torch.tensor([0]), torch.tensor([2.0]), torch.ones(1), None
    )
    assert terms.loss.item() == 4.5


@pytest.mark.parametrize("double", [False, True])
def test_an_update_equals_a_textbook_one(double):
    """Plain modules, autograd, clip_grad_norm_ and torch.optim.Adam, over target copies."""
    dqn = learner(double=double, target_every=3, max_grad_norm=0.5, learning_rate=1e-2)
    network = NetworkSettings(name="mlp", hidden=(16, 8), activation="relu")
    online, target = (QNetwork(network, SPEC, 4, torch.Generator()) for _ in range(2))
    for net in (online, target):
        net.load_state_dict(dqn._net.state_dict())
    adam = torch.optim.Adam(online.parameters(), lr=1e-2, eps=1e-8)
    for i in range(7):
        b = batch(i)
        with torch.no_grad():
            values = target(b.next_obs)
            best = (online if double else target)(b.next_obs).argmax(1)
            goal = b.reward + b.discount * values[torch.arange(8), best]
        error = online(b.obs)[torch.arange(8), b.action] - goal
        huber = torch.where(error.abs() < 1, 0.5 * error**2, error.abs() - 0.5)
        adam.zero_grad()
        (huber * b.weight).mean().backward()
        torch.nn.utils.clip_grad_norm_(online.parameters(), 0.5)
        adam.step()
        priorities = dqn.update(b, 0.0)
        assert torch.allclose(priorities, error.detach().abs() + PRIORITY_EPS, atol=1e-5)
        if i % 3 == 2:
            target.load_state_dict(online.state_dict())
    ours = dqn.params.values
    theirs = torch.cat([p.detach().flatten() for p in online.parameters()])
    assert torch.allclose(ours, theirs, atol=1e-5)
    start = learner().params.values
    assert (theirs - start).norm() > 0.1


def test_the_learning_rate_anneals_where_asked():
    plain, annealed = learner(), learner(anneal_lr=True)
    start = plain.params.values.clone()
    for dqn in (plain, annealed):
        dqn.update(batch(), 0.75)
    moved = [dqn.params.values - start for dqn in (plain, annealed)]
    assert torch.allclose(moved[1], moved[0] / 4, atol=1e-7)
    assert annealed.metrics(0.75)["loss/learning_rate"] == 0.25e-4


def test_the_target_is_copied_on_time_or_follows_slowly():
    dqn = learner(target_every=2)
    before = dqn.target.values.clone()
    dqn.update(batch(0), 0.0)
    assert torch.equal(dqn.target.values, before)
    assert not torch.equal(dqn.params.values, before)
    dqn.update(batch(1), 0.0)
    assert torch.equal(dqn.target.values, dqn.params.values)
    slow = learner(target_every=1, tau=0.25)
    slow.update(batch(0), 0.0)
    assert torch.allclose(slow.target.values, before + 0.25 * (slow.params.values - before))


# -- acting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_numpy_acts_on_the_weights_of_now_and_equals_torch(activation):
    dqn = learner(activation=activation, learning_rate=0.1)
    obs = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    assert dqn.policy._forward is not None
    for i in range(3):
        with torch.no_grad():
            expected = dqn._net(torch.from_numpy(obs)).numpy()
        np.testing.assert_allclose(dqn.policy._forward(obs), expected, rtol=1e-4, atol=1e-5)
        dqn.update(batch(i), 0.0)
    assert (dqn.policy.act_greedy(obs) == dqn.policy._forward(obs).argmax(1)).all()
    assert (
        dqn.policy._best(torch.from_numpy(obs))[0].numpy() == dqn.policy.act_greedy(obs)
    ).mean() > 0.9


def test_images_act_through_torch():
    spec = EnvSpec("t", "t", 2, (4, 84, 84), np.dtype(np.uint8), Discrete(3))
    network = NetworkSettings(name="nature_cnn", hidden=(8,), activation="relu")
    runtime = Runtime(CPU, "", ThreadPlan(1, 1, 1, 1), seed=3)
    dqn = DQN(DQNSettings(name="dqn"), network, spec, runtime, NullPhases())
    assert numpy_forward(dqn._net) is None
    obs = np.random.default_rng(0).integers(0, 256, (64, 4, 84, 84), np.uint8)
    with torch.no_grad():
        expected = dqn._net(torch.from_numpy(obs)).argmax(1)
    assert dqn.policy.act_greedy(obs).tolist() == expected.tolist()
    assert len(set(expected.tolist())) > 1


def test_epsilon_falls_linearly_then_stays():
    explore = EpsilonGreedy(4, 1.0, 0.1, 0.5, np.random.default_rng(0))
    assert [explore.epsilon(p) for p in (0, 0.25, 0.5, 1)] == pytest.approx([1, 0.55, 0.1, 0.1])
    assert EpsilonGreedy(4, 1.0, 0.1, 0, np.random.default_rng(0)).epsilon(0) == 0.1


def test_exploration_is_uniform_at_its_rate_and_spares_the_network():
    explore = EpsilonGreedy(4, 1.0, 0.4, 1.0, np.random.default_rng(0))
    asked = []

    def greedy(obs):
        asked.append(len(obs))
        return np.full(len(obs), 3)

    obs = np.zeros((50_000, 1))
    at_random = explore(obs, 0.0, greedy)
    assert not asked  # epsilon 1: no forward pass
    counts = np.bincount(at_random, minlength=4)
    assert abs(counts - 12_500).max() < 5 * np.sqrt(50_000 * 0.25 * 0.75)
    mixed = explore(obs, 1.0, greedy)
    assert asked == [50_000]
    counts = np.bincount(mixed, minlength=4)
    expected = 50_000 * np.array([0.1, 0.1, 0.1, 0.7])
    assert abs(counts - expected).max() < 5 * np.sqrt(50_000 * 0.7 * 0.3)


def test_real_actions_are_refused_by_name():
    box = Continuous(np.full(2, -1, np.float32), np.full(2, 1, np.float32))
    spec = EnvSpec("Pendulum-v1", "t", 2, (3,), np.dtype(np.float32), box)
    with pytest.raises(
        ValueError,
        match="those of Pendulum-v1 are Continuous.*use algo=ppo",
    ):
        learner(spec)


def test_metrics_are_tensors_until_read():
    dqn = learner()
    assert dqn.metrics(0.0) == {"explore/epsilon": 1.0}
    dqn.update(batch(), 0.0)
    metrics = dqn.metrics(1.0)
    assert isinstance(metrics["loss/total"], torch.Tensor)
    assert {"loss/q", "loss/grad_norm"} <= metrics.keys()
    assert metrics["explore/epsilon"] == 0.05


def test_state_continues_exactly():
    first, second = learner(target_every=3), learner(target_every=3)
    obs = np.zeros((2, 3), np.float32)
    for i in range(4):
        first.update(batch(i), 0.0)
        first.policy.act(obs, 0.0)
    second.load_state_dict(first.state_dict())
    for i in range(4, 8):
        first.update(batch(i), 0.0)
        second.update(batch(i), 0.0)
        assert (first.policy.act(obs, 0.2)[0] == second.policy.act(obs, 0.2)[0]).all()
    assert torch.equal(first.params.values, second.params.values)
    assert torch.equal(first.target.values, second.target.values)


# -- the textbook buffer --------------------------------------------------------------------------


def fill(buffer: DequeBuffer, rows) -> None:
    """rows: (obs, action, reward, terminated, truncated, valid, next obs) of one environment."""
    for obs, action, reward, terminated, truncated, valid, after in rows:
        r = np.array([reward], np.float32)
        step = Step(
            np.array([[after] * 3], np.float32), r, r, np.array([terminated]),
            np.array([truncated]), np.array([valid]), np.array([0], np.int32),
        )  # fmt: skip
        buffer.add(np.array([[obs] * 3], np.float32), np.array([action]), {}, step)


def contents(buffer: DequeBuffer) -> set[tuple]:
    b = buffer.sample(500)
    columns = (b.obs[:, 0], b.action, b.reward, b.discount, b.next_obs[:, 0])
    return {tuple(round(float(x), 4) for x in row) for row in zip(*columns, strict=True)}


def deque_buffer(capacity: int = 10, n_step: int = 1, gamma: float = 0.5) -> DequeBuffer:
    return DequeBuffer(SPEC, capacity, n_step, gamma, 0, CPU)


def test_the_deque_holds_steps_and_never_reset_rows():
    buffer = deque_buffer()
    fill(buffer, [(0, 1, 1, 0, 0, 1, 1), (1, 2, 2, 0, 1, 1, 2), (2, 3, 9, 0, 0, 0, 0)])
    fill(buffer, [(0, 0, 4, 1, 0, 1, 5)])
    # Truncation keeps its discount and the true last observation.
    assert contents(buffer) == {(0, 1, 1, 0.5, 1), (1, 2, 2, 0.5, 2), (0, 0, 4, 0.0, 5)}
    assert buffer.size == 3


def test_n_step_windows_end_where_their_episode_ends():
    for terminated in (True, False):
        buffer = deque_buffer(n_step=3)
        ends = (terminated, not terminated)
        fill(buffer, [(0, 0, 1, 0, 0, 1, 1), (1, 0, 2, *ends, 1, 2), (2, 0, 9, 0, 0, 0, 0)])
        keep = 0.0 if terminated else 1.0
        assert contents(buffer) == {(0, 0, 2, 0.25 * keep, 2), (1, 0, 2, 0.5 * keep, 2)}
    buffer = deque_buffer(n_step=3)
    fill(buffer, [(0, 0, 1, 0, 0, 1, 1), (1, 0, 2, 0, 0, 1, 2), (2, 0, 4, 0, 0, 1, 3)])
    assert contents(buffer) == {(0, 0, 3, 0.125, 3)}
    buffer.cut()
    fill(buffer, [(7, 0, 1, 1, 0, 1, 8)])
    assert contents(buffer) == {(0, 0, 3, 0.125, 3), (7, 0, 1, 0.0, 8)}


def test_the_oldest_leave_and_ids_are_never_reused():
    buffer = deque_buffer(capacity=3)
    fill(buffer, [(i, 0, i, 0, 0, 1, i + 1) for i in range(5)])
    b = buffer.sample(200)
    assert set(b.reward.tolist()) == {2, 3, 4}
    assert (b.ids == b.reward.numpy()).all()


def test_the_deque_s_state_continues_exactly():
    first, second = deque_buffer(n_step=2), deque_buffer(n_step=2)
    fill(first, [(i, i % 4, i, 0, 0, 1, i + 1) for i in range(5)])
    first.sample(7)
    second.load_state_dict(first.state_dict())
    for buffer in (first, second):
        fill(buffer, [(5, 1, 5, 1, 0, 1, 6)])
    a, b = first.sample(50), second.sample(50)
    assert (a.ids == b.ids).all()
    for x, y in zip(a[:6], b[:6], strict=True):
        assert torch.equal(x, y)
