"""Every backend gives the same steps, episodes and refusals for the same task."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import envpool
import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from waiting import slowness

from rl_pipeline.config.settings import AtariSettings, EnvSettings
from rl_pipeline.envs.envpool import EnvPoolVecEnv
from rl_pipeline.envs.gymnasium import GymnasiumVecEnv
from rl_pipeline.envs.gymnasium_async import GymnasiumAsyncVecEnv, WorkerError
from rl_pipeline.envs.gymnasium_native import GymnasiumNativeVecEnv
from rl_pipeline.envs.lanes import Lanes
from rl_pipeline.types import Continuous, Discrete, Episode

ROOT = str(Path(__file__).resolve().parents[1])
BACKENDS = ("gymnasium", "envpool")
TASKS = {  # name: Gymnasium id, EnvPool id, kind, obs shape, time limit
    "cartpole": ("CartPole-v1", "CartPole-v1", "classic", (4,), 500),
    "acrobot": ("Acrobot-v1", "Acrobot-v1", "classic", (6,), 500),
    "pendulum": ("Pendulum-v1", "Pendulum-v1", "classic", (3,), 200),
    "pong": ("ALE/Pong-v5", "Pong-v5", "atari", (4, 84, 84), 27_000),
    "breakout": ("ALE/Breakout-v5", "Breakout-v5", "atari", (4, 84, 84), 27_000),
    "halfcheetah": ("HalfCheetah-v5", "HalfCheetah-v5", "mujoco", (17,), 1000),
    "lunarlander": ("LunarLander-v3", "LunarLander-v3", "other", (8,), 1000),
}
SAMPLES = ("cartpole", "pendulum", "pong", "halfcheetah")
# The others where they exist, on enough tasks to meet every kind.
PAIRS = [
    *((backend, task) for task in TASKS for backend in BACKENDS),
    *(("gymnasium_async", task) for task in (*SAMPLES, "lunarlander")),
    *(("gymnasium_native", task) for task in ("cartpole", "pong")),
    *(("envpool_async", task) for task in (*SAMPLES, "lunarlander")),
]
on_contract = pytest.mark.parametrize("backend, task", PAIRS)
on_both = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def _importable_tests(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)


def settings(task, *, atari=None, **changes):
    """The task as `conf/env` gives it, with `atari` a dict of changed preprocessing."""
    gym_id, pool_id, kind, _, limit = TASKS[task]
    if kind == "atari":
        changes = {"max_episode_steps": limit, "atari": AtariSettings(**(atari or {})), **changes}
    return EnvSettings(name=task, id=gym_id, envpool_id=pool_id, kind=kind, **changes)


def make(backend, env, num_envs=2, seed=0):
    if backend == "gymnasium":
        return GymnasiumVecEnv(env, num_envs, seed)
    if backend == "gymnasium_async":
        return GymnasiumAsyncVecEnv(env, num_envs, seed, step_timeout_s=20)
    if backend == "envpool_async":  # in two lanes, the last one smaller
        first = num_envs - num_envs // 2
        seeds = np.random.SeedSequence(seed).generate_state(2)
        sizes = [n for n in (first, num_envs - first) if n]
        lanes = [EnvPoolVecEnv(env, n, int(s), 1) for n, s in zip(sizes, seeds, strict=False)]
        return Lanes(lanes, backend)
    if backend == "gymnasium_native":
        return GymnasiumNativeVecEnv(env, num_envs, seed, num_threads=1)
    assert backend == "envpool", "make() does not know this backend"
    return EnvPoolVecEnv(env, num_envs, seed, num_threads=1)


def counting(name="Counting", num_envs=2, backend="gymnasium", **kwargs):
    env = EnvSettings(name="gym", id=f"tests.counting:{name}-v0", kwargs=kwargs)
    return make(backend, env, num_envs)


def actions(spec, rng):
    if isinstance(spec.action, Discrete):
        return rng.integers(0, spec.action.num_actions, spec.num_envs)
    return rng.uniform(spec.action.low, spec.action.high, (spec.num_envs, *spec.action.shape))


def rollout(vec, num_steps, seed=0):
    """Reset and step with random actions; returns the first obs and the steps."""
    rng = np.random.default_rng(seed)
    first = vec.reset()
    return first, [vec.step(actions(vec.spec, rng)) for _ in range(num_steps)]


class StubPool:
    """An EnvPool of scripted rows: (obs, reward, done, trunc, lives, raw reward, game over)."""

    observation_space = gym.spaces.Box(-9, 9, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    config = {"max_episode_steps": 100}

    def __init__(self, *rows):
        self._rows = iter(rows)

    def _row(self):
        obs, reward, done, trunc, lives, raw, over = (np.asarray(x) for x in next(self._rows))
        info = {"lives": lives, "reward": raw.astype(np.float32), "terminated": over}
        flags = done.astype(bool), trunc.astype(bool)
        return (obs.astype(np.float32).reshape(-1, 1), reward.astype(np.float32), *flags, info)

    def reset(self):
        obs, *_, info = self._row()
        return obs, info

    _state_keys = "obs reward done trunc info:lives info:reward info:terminated".split()

    class _spec:
        _action_keys = ["env_id", "players.env_id", "action"]
        _action_spec = [(np.int32, [-1])]

    def _send(self, actions):
        assert actions[2].dtype == np.int32

    def _recv(self):
        obs, reward, done, trunc, info = self._row()
        return obs, reward, done, trunc, info["lives"], info["reward"], info["terminated"]

    def close(self):
        pass


@pytest.fixture
def stubbed(monkeypatch):
    def make_stubbed(*rows, task="breakout", num_envs=1, **attributes):
        pool = StubPool(*rows)
        for key, value in attributes.items():
            setattr(pool, key, value)
        monkeypatch.setattr(envpool, "make", lambda *args, **kwargs: pool)
        return make("envpool", settings(task), num_envs)

    return make_stubbed


# --- the contract, on every backend and task


@on_contract
def test_spec_shapes_and_dtypes(backend, task):
    _, _, kind, shape, limit = TASKS[task]
    vec = make(backend, settings(task), num_envs=3)
    spec = vec.spec
    assert (spec.backend, spec.num_envs, spec.obs_shape) == (backend, 3, shape)
    assert spec.obs_dtype == (np.uint8 if kind == "atari" else np.float32)
    assert spec.max_episode_steps == limit
    assert spec.frame_skip == (4 if kind == "atari" else 1)
    if task in ("pendulum", "halfcheetah"):
        assert isinstance(spec.action, Continuous)
        assert spec.action.low.dtype == spec.action.high.dtype == np.float32
        assert spec.action.shape == ((1,) if task == "pendulum" else (6,))
    else:
        counts = {"cartpole": 2, "acrobot": 3, "pong": 6, "breakout": 4, "lunarlander": 4}
        assert spec.action == Discrete(counts[task])
    obs, steps = rollout(vec, 3)
    assert obs.shape == (3, *shape) and obs.dtype == spec.obs_dtype and obs.any()
    for step in steps:
        assert step.obs.shape == obs.shape and step.obs.dtype == spec.obs_dtype
        assert step.reward.dtype == step.raw_reward.dtype == np.float32
        assert step.terminated.dtype == step.truncated.dtype == step.valid.dtype == bool
        assert all(field.shape == (3,) for field in step[1:])
        assert step.env_ids.dtype == np.int32 and step.env_ids.tolist() == [0, 1, 2]
    assert not np.array_equal(steps[-1].obs, obs)
    vec.close()
    vec.close()
    with pytest.raises(RuntimeError):
        vec.step(actions(spec, np.random.default_rng(0)))


@on_contract
def test_seeds_reproduce_and_differ(backend, task):
    def late_obs(seed):
        vec = make(backend, settings(task), num_envs=3, seed=seed)
        action = np.repeat(actions(vec.spec, np.random.default_rng(0))[:1], 3, axis=0)
        vec.reset()
        obs = np.stack([vec.step(action).obs for _ in range(30)])
        vec.close()
        return obs

    a, again, b = late_obs(5), late_obs(5), late_obs(6)
    assert np.array_equal(a, again)
    assert not np.array_equal(a, b)
    assert len({a[:, i].tobytes() for i in range(3)}) > 1
    # Neighbouring seeds share no environment.
    assert not np.array_equal(a[:, 1:], b[:, :-1])


@on_contract
def test_truncation_reset_rows_and_accounts(backend, task):
    vec = make(backend, settings(task, max_episode_steps=5), num_envs=2)
    obs, steps = rollout(vec, 17)
    assert vec.spec.max_episode_steps == 5
    for t, step in enumerate(steps):
        assert step.truncated.all() == (t % 6 == 4) and not step.terminated.any()
        reset_row = t % 6 == 5
        assert step.valid.all() != reset_row and step.valid.any() != reset_row
        if reset_row:
            assert not step.reward.any() and not step.raw_reward.any()
            # The row before showed the last observation, not this first one.
            assert not np.array_equal(step.obs, steps[t - 1].obs)
            assert step.obs.shape == obs.shape
    # In order for each environment; lanes tell theirs one after the other.
    episodes = sorted(vec.pop_episodes(), key=lambda e: e.env_id)
    assert [e.env_id for e in episodes] == [0] * 3 + [1] * 3
    assert {e.length for e in episodes} == {5}
    raw = np.stack([s.raw_reward for s in steps])
    train = np.stack([s.reward for s in steps])
    expected = [
        (raw[k : k + 5, i].sum(), train[k : k + 5, i].sum()) for i in (0, 1) for k in (0, 6, 12)
    ]
    got = [(e.return_raw, e.return_train) for e in episodes]
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert vec.pop_episodes() == []
    vec.close()


@on_contract
@pytest.mark.parametrize("after", [2, 3], ids=["mid-episode", "after an end"])
def test_reset_in_the_middle(backend, task, after):
    vec = make(backend, settings(task, max_episode_steps=3), num_envs=2)
    _, steps = rollout(vec, after)
    vec.pop_episodes()
    first, steps = rollout(vec, 3, seed=1)
    # The first step is a real one: the library kept no pending reset, and so did not we.
    assert all(step.valid.all() for step in steps)
    assert [step.truncated.all() for step in steps] == [False, False, True]
    assert not np.array_equal(steps[0].obs, first)
    assert [e.length for e in vec.pop_episodes()] == [3, 3]
    vec.close()


@pytest.mark.parametrize("backend", [*BACKENDS, "gymnasium_async", "gymnasium_native"])
def test_termination_shows_the_true_last_observation(backend):
    vec = make(backend, settings("cartpole"), num_envs=4)
    _, steps = rollout(vec, 120)
    ends = 0
    for step, following in zip(steps, steps[1:], strict=False):
        fallen = (np.abs(step.obs[:, 0]) > 2.4) | (np.abs(step.obs[:, 2]) > 0.2094)
        assert np.array_equal(step.terminated, fallen) and not step.truncated.any()
        assert np.array_equal(following.valid, ~step.terminated)
        assert (np.abs(following.obs[step.terminated]) <= 0.05).all()
        ends += step.terminated.sum()
    assert ends >= 8
    vec.close()


@pytest.mark.parametrize(
    "backend, task",
    [
        *((backend, task) for backend, task in PAIRS if backend.startswith("gymnasium_")),
        *((b, task) for b in BACKENDS for task in ("cartpole", "halfcheetah", "breakout")),
    ],
)
def test_observations_and_rewards_are_never_overwritten(backend, task):
    vec = make(backend, settings(task, max_episode_steps=7), num_envs=2)
    first, steps = rollout(vec, 40)
    kept = [(first, first.copy())]
    vec.reset()
    rng = np.random.default_rng(3)
    for _ in range(40):
        step = vec.step(actions(vec.spec, rng))
        kept += [(field, field.copy()) for field in step[:6]]
    vec.close()
    assert all(np.array_equal(now, then) for now, then in kept)
    assert not np.shares_memory(step.obs, steps[-1].obs)
    assert not np.shares_memory(step.reward, step.raw_reward)


# --- what only a known environment can show


@pytest.mark.parametrize("terminates", [True, False])
@pytest.mark.parametrize("same_array", [True, False])
@pytest.mark.parametrize(
    "backend, dtype",
    [("gymnasium", "float32"), ("gymnasium", "float64"), ("gymnasium_async", "float64")],
)
def test_counting_environment_yields_only_real_transitions(terminates, same_array, backend, dtype):
    vec = counting(backend=backend, terminates=terminates, same_array=same_array, dtype=dtype)
    first, steps = rollout(vec, 20)
    assert first.dtype == np.float32
    observed = [first, *(step.obs for step in steps)]
    pairs = []
    for before, step in zip(observed, steps, strict=False):
        for i in np.flatnonzero(step.valid):
            pairs.append((int(before[i, 0]), int(step.obs[i, 0])))
            assert step.reward[i] == 1
            end = pairs[-1] == (2, 3)
            assert (step.terminated[i], step.truncated[i]) == (
                end and terminates,
                end and not terminates,
            )
    assert len(pairs) == 30 and set(pairs) == {(0, 1), (1, 2), (2, 3)}
    assert vec.pop_episodes() == [Episode(i, 3.0, 3.0, 3) for _ in range(5) for i in (0, 1)]


@pytest.mark.parametrize("backend", [*BACKENDS, "gymnasium_async", "gymnasium_native"])
def test_a_step_is_sent_once_and_received_once(backend):
    vec = make(backend, settings("cartpole", max_episode_steps=3))
    with pytest.raises(RuntimeError, match="reset"):
        vec.send([0, 0])
    vec.reset()
    with pytest.raises(RuntimeError, match="call send.. before"):
        vec.recv()
    vec.send([0, 0])
    with pytest.raises(RuntimeError, match="call recv.. before"):
        vec.send([0, 0])
    # A reset in between ends the episode under way, and what was sent with it.
    vec.reset()
    steps = [vec.step([0, 1]) for _ in range(3)]
    assert [s.truncated.all() for s in steps] == [False, False, True]
    assert [e.length for e in vec.pop_episodes()] == [3, 3]
    vec.close()


def test_lanes_step_apart_and_together():
    """Each lane equals the same environments alone, however the lanes interleave."""
    seeds = (3, 4)
    alone = [make("envpool", settings("cartpole"), num_envs=2, seed=s) for s in seeds]
    lanes = Lanes([make("envpool", settings("cartpole"), num_envs=2, seed=s) for s in seeds], "x")
    assert lanes.spec.num_envs == 4
    assert np.array_equal(lanes.reset(), np.concatenate([vec.reset() for vec in alone]))
    rng = np.random.default_rng(0)
    for _ in range(60):
        action = rng.integers(0, 2, 4)
        for lane in lanes.lanes:  # both are under way at once
            lane.send(action[lane.columns])
        for i in (1, 0):
            step, expected = lanes.lanes[i].recv(), alone[i].step(action[2 * i : 2 * i + 2])
            assert step.env_ids.tolist() == [2 * i, 2 * i + 1]
            for field, other in zip(step[:-1], expected[:-1], strict=True):
                assert np.array_equal(field, other)
    expected = [e for vec in alone for e in vec.pop_episodes()]
    games = lanes.pop_episodes()
    assert [(g.return_raw, g.length) for g in games] == [(e.return_raw, e.length) for e in expected]
    assert {g.env_id for g in games} == {0, 1, 2, 3}
    lanes.close()


@pytest.mark.parametrize(
    "how, words",
    [
        ("raise", ["environment 1 raised RuntimeError: the simulator lost its mind"]),
        ("die", ["process of environment 1 ended by signal 9"]),
        ("hang", ["environment 1 did not answer", "backend.step_timeout_s=2"]),
    ],
)
def test_a_worker_that_fails_is_named_and_nothing_is_left(how, words):
    env = EnvSettings(name="gym", id="tests.counting:Faulty-v0", kwargs={"how": how})
    vec = GymnasiumAsyncVecEnv(env, 3, seed=0, step_timeout_s=2)
    workers = list(vec._vec.processes)
    vec.reset()
    vec.step([1, 1, 1])
    vec.step([1, 1, 1])
    begin = time.monotonic()
    with pytest.raises(WorkerError) as error:
        vec.step([0, 1, 0])
    took_s = time.monotonic() - begin
    assert took_s < 10 or took_s < 10 * slowness()
    for word in ["env=gym", *words]:
        assert word in str(error.value)
    assert not any(worker.is_alive() for worker in workers)
    vec.close()


def test_workers_leave_ctrl_c_to_the_trainer():
    vec = counting(backend="gymnasium_async")
    vec.reset()
    for worker in vec._vec.processes:
        os.kill(worker.pid, signal.SIGINT)
    time.sleep(0.2)
    assert vec.step([0, 0]).valid.all()
    vec.close()


def test_a_task_without_a_native_form_is_refused():
    with pytest.raises(ValueError, match="vector_entry_point.*backend=gymnasium"):
        make("gymnasium_native", settings("pendulum"))


def test_native_games_with_lives_are_refused_unless_full_games_are_meant():
    with pytest.raises(ValueError, match="env.atari.episodic_life=false"):
        make("gymnasium_native", settings("breakout"))
    vec = make("gymnasium_native", settings("breakout", atari={"episodic_life": False}))
    _, steps = rollout(vec, 400)
    episodes = vec.pop_episodes()
    assert len(episodes) == sum(step.terminated.sum() for step in steps) >= 2
    vec.close()


def test_envpool_reset_rows_are_never_valid(monkeypatch):
    real_make, elapsed = envpool.make, []

    def recording_make(*args, **kwargs):
        pool = real_make(*args, **kwargs)
        recv, place = pool._recv, pool._state_keys.index("elapsed_step")

        def recording_recv():
            answer = recv()
            elapsed.append(answer[place].copy())
            return answer

        pool.reset()
        pool._recv = recording_recv
        pool.reset = lambda: (pool._reset(pool.all_env_ids), (recv()[-1], {}))[1]
        return pool

    monkeypatch.setattr(envpool, "make", recording_make)
    vec = make("envpool", settings("cartpole", max_episode_steps=3), num_envs=3)
    _, steps = rollout(vec, 20)
    valid = np.stack([step.valid for step in steps])
    assert np.array_equal(valid, np.stack(elapsed) != 0) and valid.sum() == 45
    assert np.stack([step.truncated for step in steps]).sum() == 15
    assert not any(step.terminated.any() for step in steps)
    assert [e.length for e in vec.pop_episodes()] == [3] * 15
    vec.close()


def test_clipping_keeps_the_score():
    env = EnvSettings(name="gym", id="tests.counting:Scripted-v0", atari=AtariSettings())
    vec = GymnasiumVecEnv(env, 1, seed=0)
    _, steps = rollout(vec, 5)
    assert [step.reward[0] for step in steps] == [1, -1, 1, 0, 1]
    assert [step.raw_reward[0] for step in steps] == [5, -3, 10, 0, 5]
    assert vec.pop_episodes() == [Episode(0, return_raw=12.0, return_train=1.0, length=3)]


def test_clipping_keeps_the_score_on_envpool(stubbed):
    vec = stubbed(  # the library's own reward is not the raw one: info's is
        ([0], [0], [0], [0], [1], [0], [0]),
        ([1], [1], [0], [0], [1], [5], [0]),
        ([2], [-1], [0], [0], [1], [-3], [0]),
        ([3], [1], [1], [0], [0], [10], [1]),
    )
    vec.reset()
    steps = [vec.step([0]) for _ in range(3)]
    assert [step.reward[0] for step in steps] == [1, -1, 1]
    assert [step.raw_reward[0] for step in steps] == [5, -3, 10]
    assert vec.pop_episodes() == [Episode(0, return_raw=12.0, return_train=1.0, length=3)]


def test_unclipped_where_switched_off():
    atari = AtariSettings(clip_reward=False)
    env = EnvSettings(name="gym", id="tests.counting:Scripted-v0", atari=atari)
    vec = GymnasiumVecEnv(env, 1, seed=0)
    _, steps = rollout(vec, 3)
    assert [step.reward[0] for step in steps] == [5, -3, 10]
    assert vec.pop_episodes() == [Episode(0, 12.0, 12.0, 3)]


# --- Atari


@pytest.mark.parametrize("backend", [*BACKENDS, "gymnasium_async"])
def test_a_life_is_not_a_game(backend):
    vec = make(backend, settings("breakout"), num_envs=2)
    _, steps = rollout(vec, 500)
    episodes = vec.pop_episodes()
    ends = np.stack([step.terminated for step in steps])
    valid = np.stack([step.valid for step in steps])
    raw = np.stack([step.raw_reward for step in steps])
    assert len(episodes) >= 2
    for i in range(2):
        games = [e for e in episodes if e.env_id == i]
        lives = np.flatnonzero(ends[:, i])
        start = 0
        for game, last in zip(games, lives[4::5], strict=False):  # five lives a game
            assert game.return_raw == raw[start : last + 1, i].sum()
            assert game.length == valid[start : last + 1, i].sum()
            start = last + 1
        assert len(games) == len(lives) // 5
    assert sum(e.return_raw for e in episodes) > 0
    vec.close()


@on_both
def test_games_without_episodic_life_end_once(backend):
    vec = make(backend, settings("breakout", atari={"episodic_life": False}), num_envs=2)
    _, steps = rollout(vec, 400)
    ends = int(sum(step.terminated.sum() for step in steps))
    assert ends == len(vec.pop_episodes()) >= 2
    assert ends == sum((~step.valid).sum() for step in steps) + steps[-1].terminated.sum()
    vec.close()


@pytest.mark.parametrize(
    "task, atari, limit, num_steps",
    [
        ("breakout", {}, 27_000, 300),
        ("breakout", {"fire_reset": False, "episodic_life": False}, 27_000, 200),
        ("breakout", {"frame_skip": 1, "frame_stack": 2, "screen_size": 64}, 27_000, 150),
        ("breakout", {}, 40, 150),
        ("pong", {}, 27_000, 100),
    ],
)
def test_both_backends_see_the_same_pixels(task, atari, limit, num_steps):
    # Without sticky actions the emulator is deterministic; one no-op at most leaves no chance.
    env = settings(task, atari={"noop_max": 1, **atari}, max_episode_steps=limit)
    ours, pool = make("gymnasium", env), make("envpool", env)
    first, steps = rollout(ours, num_steps)
    expected_first, expected = rollout(pool, num_steps)
    assert np.array_equal(first, expected_first)
    for step, reference in zip(steps, expected, strict=True):
        for field, other in zip(step, reference, strict=True):
            assert np.array_equal(field, other)
    episodes = ours.pop_episodes()
    assert episodes == pool.pop_episodes()
    assert task == "pong" or any((step.terminated | step.truncated).any() for step in steps)
    pool.close()


@pytest.mark.parametrize("episodic_life", [True, False])
@pytest.mark.parametrize("backend", [*BACKENDS, "gymnasium_async"])
def test_an_end_in_exactly_the_limit_s_step_is_a_termination_too(backend, episodic_life):
    atari = {"noop_max": 1, "episodic_life": episodic_life}

    def play(limit):
        vec = make(backend, settings("breakout", atari=atari, max_episode_steps=limit), 1)
        rng = np.random.default_rng(0)
        vec.reset()
        taken, over = 0, False
        while not over:
            step = vec.step(rng.integers(0, 4, 1))
            taken, over = taken + 1, step.terminated[0] or step.truncated[0]
        after = vec.step(rng.integers(0, 4, 1))
        games = vec.pop_episodes()
        vec.close()
        return taken, bool(step.terminated[0]), bool(step.truncated[0]), bool(after.valid[0]), games

    t, terminated, truncated, _, games = play(27_000)
    assert terminated and not truncated and len(games) == (not episodic_life)
    at, terminated, truncated, valid, games = play(t)
    assert (at, terminated, truncated, valid) == (t, True, True, False)
    assert [game.length for game in games] == [t]


@on_both
def test_noops_and_sticky_actions_vary_games(backend):
    def screens(**atari):
        vec = make(backend, settings("breakout", atari=atari), num_envs=4)
        vec.reset()
        obs = np.stack([vec.step([2, 2, 2, 2]).obs for _ in range(12)])
        vec.close()
        return len({obs[:, i].tobytes() for i in range(4)})

    assert screens(noop_max=1) == 1
    assert screens(noop_max=30) > 1
    assert screens(noop_max=1, sticky_actions=0.25) > 1


def test_a_game_that_ends_in_the_noops_after_a_life_is_closed():
    env = settings("breakout")
    vec = GymnasiumVecEnv(env, 1, seed=0)
    game = vec._vec.envs[0]
    _, steps = rollout(vec, 100)
    while not steps[-1].terminated[0]:
        steps.append(vec.step([2]))
    assert vec.pop_episodes() == [] and len(steps) < 150
    game._num_noops = lambda: 10  # and the next of them ends the game
    ale, calls = game._ale, iter([False, True])

    class Emulator:
        def __getattr__(self, name):
            return getattr(ale, name)

        def game_over(self):
            return next(calls, False)

    game._ale = Emulator()
    steps.append(vec.step([0]))
    assert not steps[-1].valid[0]
    (episode,) = vec.pop_episodes()
    assert episode.length == sum(step.valid[0] for step in steps)
    vec.reset()
    vec.step([2])
    assert vec.pop_episodes() == []


def test_a_game_that_ends_in_envpools_noops_is_closed(stubbed):
    vec = stubbed(
        ([0], [0], [0], [0], [1], [0], [0]),
        ([1], [0], [0], [0], [2], [4], [0]),
        ([2], [0], [1], [0], [1], [1], [0]),  # a life is lost
        ([0], [0], [0], [0], [3], [0], [0]),  # reset row: three lives again, a new game
        ([1], [0], [1], [0], [0], [7], [1]),
        ([0], [0], [0], [0], [3], [0], [0]),
    )
    vec.reset()
    for _ in range(5):
        vec.step([0])
    assert vec.pop_episodes() == [Episode(0, 5.0, 2.0, 2), Episode(0, 7.0, 1.0, 1)]


# --- actions


@on_both
def test_wrong_discrete_actions_are_refused(backend):
    vec = make(backend, settings("cartpole"))
    with pytest.raises(RuntimeError, match="reset"):
        vec.step([0, 1])
    vec.reset()
    before = vec.step([0, 1])
    for action in ([0], [0, 1, 1], [[0], [1]], 0, np.zeros((2, 1), int)):
        with pytest.raises(ValueError, match="shape"):
            vec.step(action)
    for action, where in (
        ([0, 7], "environment 1 is 7 "),
        ([-1, 0], "environment 0 is -1 "),
        ([2**40, 0], "environment 0 is 1099511627776 "),
        ([0, 0.5], "environment 1 is 0.5 "),
        ([0, np.nan], "environment 1 is nan "),
        ([True, False], "bool"),
        (np.array([0.0, 1.0]), "float64"),
    ):
        with pytest.raises(ValueError, match=f"{where}.*"):
            vec.step(action)
    # Alive, and nothing was stepped meanwhile: the pole moved by one step.
    after = vec.step(np.array([1, 0], dtype=np.uint8))
    assert np.abs(after.obs - before.obs).max() < 0.5 and after.valid.all()
    vec.close()


@on_both
def test_wrong_continuous_actions_are_refused_and_others_clipped(backend):
    obs = {}
    for push in (2.0, 100.0, 1.0):
        vec = make(backend, settings("pendulum"), seed=4)
        vec.reset()
        for bad in (np.nan, np.inf, -np.inf):
            with pytest.raises(ValueError, match=f"environment 1 is {bad}"):
                vec.step([[0.0], [bad]])
        with pytest.raises(ValueError, match="shape"):
            vec.step([0.0, 0.0])
        with pytest.raises(ValueError, match="dtype"):
            vec.step([["a"], ["b"]])
        obs[push] = vec.step([[push], [-push]]).obs
        vec.close()
    assert np.array_equal(obs[2.0], obs[100.0]) and not np.array_equal(obs[2.0], obs[1.0])


def test_continuous_actions_arrive_in_the_box_and_dtype_of_the_environment():
    vec = counting("Reach", num_envs=3)
    vec.reset()
    assert vec.step(np.array([[-9], [0.25], [9]], np.float32)).reward.tolist() == [-0.5, 0.25, 1.0]
    assert vec.spec.action.low.tolist() == [-0.5]


# --- values that are not finite


def test_nonfinite_rewards_and_observations_stop_the_run(stubbed):
    for bad in (np.nan, np.inf):
        vec = counting("Scripted", rewards=[1.0, bad, 1.0])
        vec.reset()
        vec.step([0, 0])
        with pytest.raises(ValueError, match=f"reward of environment 0 is {bad} at step 2"):
            vec.step([0, 0])
    vec = counting("Scripted", nan_obs_at=3)
    vec.reset()
    vec.step([0, 0]), vec.step([0, 0])
    with pytest.raises(ValueError, match="observation of environment 0 is nan.* at step 3"):
        vec.step([0, 0])
    with pytest.raises(ValueError, match="observation of environment 0 is nan"):
        counting("Scripted", nan_obs_at=0).reset()
    zero = [0, 0]
    vec = stubbed(
        (zero, zero, zero, zero, zero, zero, zero),
        (zero, zero, zero, zero, zero, [0, -np.inf], zero),
        num_envs=2,
    )
    vec.reset()
    with pytest.raises(ValueError, match="reward of environment 1 is -inf at step 1"):
        vec.step(zero)


def test_large_finite_values_pass():
    vec = counting("Scripted", num_envs=3, rewards=[3e38, 3e38])
    vec.reset()
    assert (vec.step([0, 0, 0]).reward == np.float32(3e38)).all()


# --- state


def test_continued_run_is_bit_identical():
    def play(vec, seed):
        rng = np.random.default_rng(seed)
        return [vec.step(rng.integers(0, 2, 3)) for _ in range(80)]

    vec = make("gymnasium", settings("cartpole"), num_envs=3, seed=1)
    _, steps = rollout(vec, 80)
    while not steps[-1].terminated.any():  # an end pending is the hardest place to continue from
        steps.append(vec.step([1, 1, 1]))
    state = vec.state()
    expected, episodes = play(vec, 7), vec.pop_episodes()
    assert len(episodes) > 8
    other = make("gymnasium", settings("cartpole"), num_envs=3, seed=2)
    for again in (other, vec):
        obs = again.load_state(state)
        assert np.array_equal(obs, steps[-1].obs) and obs.dtype == np.float32
        continued = play(again, 7)
        for step, reference in zip(continued, expected, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(step, reference, strict=True))
        assert again.pop_episodes() == episodes
    with pytest.raises(ValueError, match="num_envs=2"):
        make("gymnasium", settings("cartpole"), num_envs=2).load_state(state)


def test_state_is_none_where_continuing_would_not_be_exact():
    for vec in (
        make("envpool", settings("cartpole")),
        make("gymnasium", settings("halfcheetah")),
        counting("Pickles"),
    ):
        vec.reset()
        assert vec.state() is None
        vec.close()
    with pytest.raises(ValueError, match="cannot continue"):
        make("envpool", settings("cartpole")).load_state(b"")


# --- refusals at construction


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"id": "CartPol-v1"}, ["env.id=CartPol-v1", "CartPole-v1"]),
        ({"id": "nowhere.at_all:Env-v0"}, ["env.id=nowhere.at_all:Env-v0", "nowhere"]),
        ({"id": "not an id"}, ["env.id=not an id"]),
        ({"kwargs": {"colour": 3}}, ["env.kwargs", "colour"]),
        ({"kwargs": {"max_episode_steps": 3}}, ["use env.max_episode_steps"]),
    ],
)
def test_gymnasium_answers_unknown_ids_and_kwargs(changes, words):
    env = settings("cartpole").model_copy(update=changes)
    with pytest.raises(ValueError) as error:
        make("gymnasium", env)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    "task, changes, words",
    [
        ("cartpole", {"envpool_id": "CartPol-v1"}, ["env.envpool_id=CartPol-v1", "CartPole-v1"]),
        ("cartpole", {"envpool_id": None}, ["env.envpool_id=None", "backend=gymnasium"]),
        ("halfcheetah", {"kwargs": {"ctrl_wt": 3}}, ["env.kwargs.ctrl_wt", "ctrl_cost_weight"]),
        ("halfcheetah", {"kwargs": {"frame_skip": "x"}}, ["env.kwargs", "frame_skip"]),
        ("cartpole", {"kwargs": {"batch_size": 1}}, ["env.kwargs.batch_size", "backend.num_envs"]),
        ("pong", {"kwargs": {"stack_num": 2}}, ["env.kwargs.stack_num", "env.atari.frame_stack"]),
        ("pong", {"atari": AtariSettings(noop_max=0)}, ["env.atari.noop_max=0"]),
    ],
)
def test_envpool_answers_unknown_ids_and_kwargs(task, changes, words):
    with pytest.raises(ValueError) as error:
        make("envpool", settings(task).model_copy(update=changes))
    assert all(word in str(error.value) for word in words)


@on_both
def test_known_kwargs_take_effect(backend):
    rewards = []
    for cost in (0.1, 50.0):
        vec = make(backend, settings("halfcheetah", kwargs={"ctrl_cost_weight": cost}))
        rewards.append(rollout(vec, 1)[1][0].raw_reward.sum())
        vec.close()
    assert rewards[1] < rewards[0] - 10
    vec = make(backend, settings("pong", kwargs={"full_action_space": True}))
    assert vec.spec.action == Discrete(18)
    rollout(vec, 3)
    vec.close()


def test_atari_kwargs_cannot_undo_the_preprocessing():
    with pytest.raises(ValueError, match="frameskip; use env.atari"):
        make("gymnasium", settings("pong", kwargs={"frameskip": 2}))


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED, None])
def test_other_autoreset_modes_are_refused(stubbed, mode):
    with pytest.raises(ValueError, match=getattr(mode, "name", "None")):
        stubbed(metadata={"autoreset_mode": mode})


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(ValueError, match="backend=envpool.*backend=gymnasium"):
        make("envpool", settings("cartpole"))
    monkeypatch.setitem(sys.modules, "rl_pipeline.envs.atari", None)
    with pytest.raises(ValueError, match="env.id=ALE/Pong-v5.*ale-py"):
        make("gymnasium", settings("pong"))


def test_backends_import_only_what_they_use():
    code = (
        "import sys; from rl_pipeline.envs.gymnasium import GymnasiumVecEnv as V\n"
        "from rl_pipeline.config.settings import EnvSettings as S\n"
        "V(S(name='c', id='CartPole-v1'), 1, 0).reset()\n"
        "print([m for m in ('envpool', 'ale_py', 'cv2', 'mujoco', 'torch') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
