"""Replay: what users of other libraries were bitten by, and what each placement promises."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from replaying import (
    Model,
    add_row,
    each_kind,
    make,
    make_spec,
    outcome,
    scalar_spec,
    tree_of,
)

from rl_pipeline.buffers.replay import Priorities, Replay, Sequences
from rl_pipeline.types import Continuous, EnvSpec, Step

# -- n-step windows ------------------------------------------------------------------------------


def drawn(buffer, number: float):
    """Return, discount and next observation of the transition that began at `number`."""
    batch = buffer.sample(256)
    at = int((batch.obs[:, 0] == number).nonzero()[0, 0])
    return batch.reward[at].item(), batch.discount[at].item(), batch.next_obs[at, 0].item()


@each_kind
@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ({"terminated": True}, (2.0, 0.0, 2.0)),
        ({"truncated": True}, (2.0, 0.25, 2.0)),
        ({}, (3.0, 0.125, 3.0)),
    ],
)
def test_three_steps_stop_at_an_end(kind, end, expected):
    buffer = make(kind, scalar_spec(), 16, n_step=3, gamma=0.5)
    add_row(buffer, 0, reward=1)
    add_row(buffer, 1, reward=2, **end)
    add_row(buffer, 2, reward=4, valid=not end)
    add_row(buffer, 3, reward=100)
    add_row(buffer, 4, reward=100)
    assert drawn(buffer, 0) == expected


@each_kind
def test_windows_stop_at_the_newest_row_and_never_cross_the_seam(kind):
    buffer = make(kind, scalar_spec(), 8, n_step=3, gamma=0.5)
    for number in range(11):
        add_row(buffer, number, reward=1)
    batch = buffer.sample(512)
    first, last = batch.obs[:, 0], batch.next_obs[:, 0]
    assert set(first.tolist()) == set(range(3, 10))  # row 10 has no successor yet
    assert (last == torch.minimum(first + 3, torch.tensor(10.0))).all()
    assert torch.equal(batch.discount, 0.5 ** (last - first))


@each_kind
def test_reset_rows_are_never_drawn(kind):
    buffer = make(kind, scalar_spec(), 64)
    for number in range(20):  # 0 1 2 (3: the true last one) 0 1 2 (3) ...
        add_row(buffer, number % 4, truncated=number % 4 == 2, valid=number % 4 != 3)
    batch = buffer.sample(512)
    pairs = set(zip(batch.obs[:, 0].tolist(), batch.next_obs[:, 0].tolist(), strict=True))
    assert pairs == {(0, 1), (1, 2), (2, 3)}
    assert buffer.size == 15


# -- what was stored stays as it was -------------------------------------------------------------


@each_kind
def test_arrays_that_the_environment_reuses_are_copied(kind):
    buffer, obs = make(kind, scalar_spec(), 32), np.zeros((1, 1), np.float32)
    action, step = np.zeros(1, int), outcome(1)
    for number in range(6):
        obs[:], action[:], step.reward[:] = number, number, number
        buffer.add(obs, action, {}, step)
    obs[:], action[:], step.reward[:] = -1, -1, -1
    batch = buffer.sample(256)
    assert torch.equal(batch.next_obs, batch.obs + 1)
    assert torch.equal(batch.action, batch.obs[:, 0].long())
    assert torch.equal(batch.reward, batch.obs[:, 0])
    assert set(batch.action.tolist()) == set(range(5))


@each_kind
def test_what_was_drawn_is_the_learner_s_own(kind):
    buffer = make(kind, scalar_spec(), 32)
    for number in range(6):
        add_row(buffer, number)
    batch = buffer.sample(64)
    before = batch.obs.clone()
    for _ in range(64):
        add_row(buffer, -1)
    buffer.sample(64)
    assert torch.equal(batch.obs, before)


@each_kind
def test_continuous_actions_and_odd_bytes_come_back_exactly(kind):
    box = Continuous(-np.ones((2, 3), np.float32), np.ones((2, 3), np.float32))
    spec = EnvSpec("s", "s", 2, (7,), np.dtype(np.uint8), box)
    buffer, rng, seen = make(kind, spec, 64), np.random.default_rng(0), {}
    for _ in range(12):
        obs = rng.integers(0, 255, (2, 7), np.uint8)
        action = rng.standard_normal((2, 2, 3)).astype(np.float32)
        seen |= {o.tobytes(): a for o, a in zip(obs, action, strict=True)}
        buffer.add(obs, action, {}, outcome(2))
    batch = buffer.sample(64)
    assert batch.action.shape == (64, 2, 3)
    for obs, action in zip(batch.obs, batch.action, strict=True):
        np.testing.assert_array_equal(action, seen[obs.numpy().tobytes()])


def test_what_does_not_fit_is_refused():
    buffer = Replay(scalar_spec(), 16)
    good = np.zeros((1, 1), np.float32)
    with pytest.raises(ValueError, match="float64"):
        buffer.add(good.astype(np.float64), np.zeros(1, int), {}, outcome(1))
    with pytest.raises(ValueError, match="observations"):
        buffer.add(np.zeros((1, 2), np.float32), np.zeros(1, int), {}, outcome(1))
    with pytest.raises(ValueError, match="env_ids"):
        buffer.add(good, np.zeros(1, int), {}, outcome(1, ids=[1]))
    with pytest.raises(ValueError, match="extras"):
        buffer.add(good, np.zeros(1, int), {"log_prob": torch.zeros(1)}, outcome(1))
    with pytest.raises(ValueError, match="nothing can be drawn"):
        buffer.sample(4)
    add_row(buffer, 0, terminated=True)
    with pytest.raises(ValueError, match="must only reset"):
        add_row(buffer, 1)
    with pytest.raises(ValueError, match="takes no priorities"):
        buffer.update_priorities(np.zeros(1, np.int64), np.ones(1))
    with pytest.raises(ValueError, match="does not fit"):
        fragment = outcome(16)._replace(env_ids=np.zeros(1, np.int32))
        buffer.add_fragment(np.zeros((16, 1, 1), np.float32), np.zeros((16, 1)), fragment)


# -- frame stacks --------------------------------------------------------------------------------


def test_a_broken_stack_is_refused_by_name():
    spec = make_spec(1, 3)
    buffer = Replay(spec, 64, frame_stack=3)
    rng = np.random.default_rng(0)

    def add(**step) -> None:
        obs = rng.integers(0, 255, (1, *spec.obs_shape), np.uint8)
        buffer.add(obs, np.zeros(1, int), {}, outcome(1, **step))

    add()  # a stream may begin anywhere
    with pytest.raises(ValueError, match="environment 0.*env.atari.frame_stack=1"):
        # Full stacks are trusted until the next begin of an episode.
        add(terminated=True)
        add(valid=False)
        add()
    with pytest.raises(ValueError, match="first axis must be the stack"):
        Replay(make_spec(1, 3), 64, frame_stack=4)


@pytest.mark.parametrize("backend", ["gymnasium", "envpool"])
def test_stacks_of_a_real_game_come_back_exactly(backend):
    """Breakout by random play: games and lives begin and end, the ring wraps."""
    from conftest import settings

    from rl_pipeline.run.build import make_envs

    envs = make_envs(settings("env=breakout", f"backend={backend}"), 2, 1, 1)
    buffer = Replay(envs.spec, 700, frame_stack=4, n_step=2)
    rng, obs, seen, begins = np.random.default_rng(1), envs.reset(), {}, 0
    for t in range(500):
        action = rng.integers(0, 4, 2)
        step = envs.step(action)
        buffer.add(obs, action, {}, step)
        seen |= {(t, e): obs[e].copy() for e in range(2)}
        begins += int((~step.valid).sum())
        obs = step.obs
    envs.close()
    assert begins >= 6
    assert buffer.nbytes <= 1.05 * 84 * 84 * 700 + 700 * 32
    for _ in range(8):
        batch = buffer.sample(64)
        for b, number in enumerate(batch.ids.tolist()):
            t, e = divmod(number, 2)
            np.testing.assert_array_equal(batch.obs[b], seen[t, e])
            steps = 2 if batch.discount[b] == np.float32(0.99**2) else None
            if steps:
                np.testing.assert_array_equal(batch.next_obs[b], seen[t + steps, e])


# -- priorities ----------------------------------------------------------------------------------


@each_kind
def test_draws_follow_the_priorities(kind):
    """Observed frequencies within 5 sigma of p^alpha, also of the oldest and the newest."""
    buffer = make(kind, scalar_spec(), 64, priorities=Priorities(alpha=0.6, beta=0.4))
    for number in range(65):
        add_row(buffer, number)
    rng = np.random.default_rng(0)
    priorities = 10.0 ** rng.uniform(-3, 2, 64)
    priorities[0] = 1e3  # the oldest, overwritten by row 64: too late
    ids = np.arange(64)
    assert int(buffer.update_priorities(ids, priorities)) == 63
    draws = np.concatenate([np.asarray(buffer.sample(100).ids) for _ in range(1000)])
    share = np.where(ids > 0, priorities**0.6, 0.0)
    share /= share.sum()
    observed = np.bincount(draws, minlength=64)
    sigma = np.sqrt(len(draws) * share * (1 - share))
    assert (np.abs(observed - len(draws) * share) <= 5 * sigma + 1e-9).all()
    assert observed[0] == 0 and (observed[[1, 63]] > 0).all()


@each_kind
def test_uniform_draws_are_uniform(kind):
    buffer = make(kind, scalar_spec(), 40)
    for number in range(55):
        add_row(buffer, number, truncated=number % 5 == 3, valid=number % 5 != 4)
    draws = np.concatenate([np.asarray(buffer.sample(100).ids) for _ in range(500)])
    numbers, observed = np.unique(draws, return_counts=True)
    assert len(numbers) == buffer.size
    expected = len(draws) / len(numbers)
    assert (np.abs(observed - expected) < 5 * np.sqrt(expected)).all()


@each_kind
def test_sums_do_not_drift(kind):
    """200,000 updates; the root stays the sum of the leaves."""
    capacity = 1024
    buffer = make(kind, scalar_spec(), capacity, priorities=Priorities())
    obs = np.zeros((1000, 1, 1), np.float32)
    step = Step(*(x[None].repeat(1000, 0) for x in outcome(1)[:-1]), env_ids=np.zeros(1, np.int32))
    buffer.add_fragment(obs, np.zeros((1000, 1), int), step)
    rng = np.random.default_rng(0)
    for _ in range(100):
        ids = rng.integers(0, 999, 2000)
        buffer.update_priorities(ids, 10.0 ** rng.uniform(-6, 6, 2000))
    leaves, root = tree_of(buffer)
    assert abs(float(root) - leaves.sum()) / leaves.sum() < 1e-9
    assert np.count_nonzero(leaves) == 999
    batch = buffer.sample(512)
    assert np.isfinite(batch.weight).all() and (np.asarray(batch.ids) < 999).all()
    assert batch.weight.max() == 1


def test_a_draw_at_the_very_end_finds_a_row_with_mass():
    from rl_pipeline.buffers import kernels, layout

    starts = layout.tree_starts(100)
    tree = np.zeros(layout.tree_size(starts))
    tree[[3, 40, 41]] = 0.1, 0.7, 0.2
    kernels.tree_refresh(tree, starts, np.arange(100), 100)
    values = np.array([0.0, 0.1, tree[starts[-1]], 2.0, np.nextafter(0.1, 0)])
    leaves = np.empty(5, np.int64)
    kernels.tree_find(tree, starts, values, leaves)
    assert leaves.tolist() == [3, 40, 41, 41, 3]


@each_kind
@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_priorities_are_refused_and_change_nothing(kind, bad):
    buffer = make(kind, scalar_spec(), 16, priorities=Priorities())
    for number in range(5):
        add_row(buffer, number)
    before = tree_of(buffer)[0].copy()
    with pytest.raises(ValueError, match="finite and above 0"):
        buffer.update_priorities(np.array([0, 1]), np.array([1.0, bad]))
    np.testing.assert_array_equal(tree_of(buffer)[0], before)
    assert buffer.state_dict()["max_priority"] == 1.0


@each_kind
def test_a_late_priority_never_lands_on_a_newer_row(kind):
    buffer = make(kind, scalar_spec(), 8, priorities=Priorities(alpha=1.0))
    for number in range(8):
        add_row(buffer, number)
    ids = np.asarray(buffer.sample(32).ids)
    for number in range(8, 16):
        add_row(buffer, number)
    assert int(buffer.update_priorities(ids, np.full(32, 1e6))) == 0
    leaves, _ = tree_of(buffer)
    assert set(leaves.tolist()) == {0.0, 1.0}
    add_row(buffer, 16)  # the largest priority ever given counts for new rows
    add_row(buffer, 17)
    assert tree_of(buffer)[0].max() == 1e6


def test_beta_reaches_one_at_the_end():
    priorities = Priorities(alpha=1.0, beta=0.4)
    assert [priorities.beta_at(p) for p in (-1, 0, 0.5, 1, 2)] == [0.4, 0.4, 0.7, 1.0, 1.0]
    buffer = Replay(scalar_spec(), 8, priorities=priorities)
    for number in range(3):
        add_row(buffer, number)
    buffer.update_priorities(np.array([0, 1]), np.array([1.0, 4.0]))
    batch = buffer.sample(64, progress=1.0)
    assert set(batch.weight.tolist()) == {1.0, 0.25}


# -- fragments -----------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("depth", [1, 3])
def test_a_fragment_is_its_steps_one_by_one(kind, depth):
    spec, options = make_spec(3, depth), {"frame_stack": depth, "n_step": 2}
    options["priorities"] = Priorities(alpha=0.5)
    single, whole = (make(kind, spec, 60, **options) for _ in "ab")
    model, rng = Model(3, 20, depth, 2, 0.99), np.random.default_rng(0)
    for length in (1, 7, 12, 3, 15):
        ids = rng.permutation(3)[:2].tolist()
        rows = []
        for _ in range(length):
            ends = rng.choice([None, "terminated", "truncated", "life"], 2, p=[0.7, 0.1, 0.1, 0.1])
            obs, action, step = model.step(ids, ends.tolist(), rng.random(2).tolist())
            single.add(obs, action, {}, step)
            rows.append((obs, action, *step[1:-1]))
        obs, action, *fields = (np.stack(column) for column in zip(*rows, strict=True))
        step = Step(obs, *fields, env_ids=np.array(ids, np.int32))
        whole.add_fragment(obs, action, step)
    a, b = single.state_dict(), whole.state_dict()
    assert a.keys() == b.keys()
    for key, value in a.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, b[key]), key
    assert single.size == whole.size > 20
    np.testing.assert_array_equal(tree_of(single)[0], tree_of(whole)[0])


@each_kind
def test_fragments_come_with_priorities_and_may_have_gaps(kind):
    buffer = make(kind, scalar_spec(2), 40, priorities=Priorities(alpha=0.5))
    no = np.zeros((4, 2), bool)
    zero = np.zeros((4, 2), np.float32)
    step = Step(zero, zero, zero, no, no, ~no, np.array([1, 0], np.int32))
    obs = np.arange(8, dtype=np.float32).reshape(4, 2, 1)
    priorities = 1.0 + np.arange(8.0).reshape(4, 2)
    buffer.add_fragment(obs, np.zeros((4, 2), int), step, priorities)
    buffer.add_fragment(100 + obs, np.zeros((4, 2), int), step, priorities, follows=False)
    # Rows 3 of both fragments: no outcome yet, and none will ever come for the first one.
    leaves = tree_of(buffer)[0].reshape(-1, 2)
    expected = np.sqrt(priorities)[:, ::-1].copy()
    expected[3] = 0
    np.testing.assert_allclose(leaves[:8], np.concatenate([expected, expected]))
    batch = buffer.sample(64)
    assert (batch.next_obs - batch.obs == 2).all()
    with pytest.raises(ValueError, match="takes no priorities"):
        make(kind, scalar_spec(2), 40).add_fragment(obs, np.zeros((4, 2), int), step, priorities)


# -- sequences -----------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("prioritized", [False, True])
def test_sequences_stay_in_their_episode_and_bring_their_state(kind, prioritized):
    sequences = Sequences(burn_in=2, length=4, overlap=4, state={"h": (3,)})
    buffer = make(
        kind, scalar_spec(2), 80, gamma=0.5, sequences=sequences,
        priorities=Priorities() if prioritized else None,
    )  # fmt: skip
    lengths, number, left = (9, 5, 14), [0, 1000], [9, 9]
    games, seen = [0, 0], {0.0, 1000.0}
    for _ in range(120):
        obs = np.array(number, np.float32)[:, None]
        valid = np.array([n > 0 for n in left])
        terminated = np.array([n == 1 and g % 2 == 0 for n, g in zip(left, games, strict=True)])
        truncated = np.array([n == 1 and g % 2 == 1 for n, g in zip(left, games, strict=True)])
        reward = np.where(valid, obs[:, 0] + 1, 0).astype(np.float32)
        step = Step(obs, reward, reward, terminated, truncated, valid, np.arange(2, dtype=np.int32))
        state = torch.from_numpy(np.repeat(obs, 3, 1) + 0.5)
        buffer.add(obs, np.arange(2), {"h": state}, step)
        for e in range(2):
            number[e] += 1
            left[e] -= 1
            if left[e] < 0:
                games[e] += 1
                left[e] = lengths[games[e] % 3]
                seen.add(float(number[e]))
    batch = buffer.sample_sequences(200, progress=1.0)
    assert batch.obs.shape == (7, 200, 1) and batch.mask.shape == (6, 200)
    first = batch.obs[0, :, 0]
    assert torch.equal(batch.state["h"], (first + 0.5)[:, None].expand(-1, 3))
    assert (np.asarray(batch.ids) // 2 % 2 == 0).all()  # neighbours begin two rows apart
    begins = torch.tensor(sorted(seen))
    lasts = set()
    for b in range(200):
        rows = int(batch.mask[:, b].sum())
        assert rows > 0 and batch.mask[:rows, b].all()
        assert torch.equal(batch.obs[: rows + 1, b, 0], first[b] + torch.arange(rows + 1.0))
        assert torch.equal(batch.reward[:rows, b], first[b] + 1 + torch.arange(float(rows)))
        assert (batch.obs[rows + 1 :, b] == 0).all() and (batch.reward[rows:, b] == 0).all()
        # No begin of an episode inside: the next one after `first` is behind the true last row.
        following = begins[begins > first[b]]
        assert len(following) == 0 or first[b] + rows < following[0]
        if rows < 6:
            lasts.add(batch.discount[rows - 1, b].item())
        assert (batch.discount[: rows - 1, b] == 0.5).all()
    assert lasts == {0.0, 0.5}  # terminated, truncated
    if prioritized:
        ids = np.asarray(batch.ids)
        assert int(buffer.update_priorities(ids, np.full(200, 3.0))) == 200
    with pytest.raises(ValueError, match="built for transitions"):
        make(kind, scalar_spec(), 16).sample_sequences(1)
