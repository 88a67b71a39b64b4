"""The off-policy loop: exact pacing, the same transitions with and without lanes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rl_pipeline.buffers.deque import DequeBuffer
from rl_pipeline.engine.phases import NullPhases, Phases
from rl_pipeline.envs.lanes import Lanes
from rl_pipeline.loops import sync
from rl_pipeline.loops.schedule import Pace
from rl_pipeline.loops.sync import Counters
from rl_pipeline.types import Discrete, EnvSpec, Step


@pytest.mark.parametrize("num_envs", [1, 7, 64])
@pytest.mark.parametrize(
    ("batch", "ratio", "starts"), [(128, 12.8, 100), (32, 8, 0), (32, 0.1, 50), (16, 256, 1000)]
)
@pytest.mark.parametrize("burst", [1, 8])
def test_the_replay_ratio_is_held_at_every_turn(num_envs, batch, ratio, starts, burst):
    pace, updates, steps, most = Pace(batch, ratio, starts, burst), 0, 0, 0
    begun = starts
    while steps < 20_000:
        steps += num_envs
        due = pace.due(steps, size=steps)
        if steps < batch:
            begun = max(starts, steps)
        updates, most = updates + due, max(most, due)
        earned = max(steps - begun, 0) * ratio / batch
        assert -1e-6 <= earned - updates < burst + 1e-6
        assert due % burst == 0
    assert updates > 0
    # One turn's steps earn one turn's updates, or a burst.
    assert most <= np.ceil(num_envs * ratio / batch / burst) * burst


def test_learning_waits_for_one_batch_without_saving_up_updates():
    pace = Pace(batch_size=32, replay_ratio=32, learning_starts=0)
    assert [pace.due(steps, size=steps - 10) for steps in range(1, 42)] == [0] * 41
    assert [pace.due(steps, size=steps - 10) for steps in (42, 43, 44)] == [1, 1, 1]


def test_a_resume_does_its_next_updates_on_time():
    straight = Pace(32, 8, 100)
    done = sum(straight.due(steps, steps) for steps in range(1, 1002))
    resumed = Pace(32, 8, 100)
    resumed.load_state_dict(straight.state_dict())
    assert done == 225
    after = [(straight.due(s, s), resumed.due(s, s)) for s in range(1002, 1010)]
    assert after == [(0, 0), (0, 0), (1, 1), (0, 0), (0, 0), (0, 0), (1, 1), (0, 0)]
    # Without the buffer's contents it fills anew first, and nothing is made up for.
    empty = Pace(32, 8, 100)
    empty.begin_anew(1001)
    updates = [empty.due(s, s - 1001) for s in range(1002, 1110)]
    assert updates[:100] == [0] * 100
    assert updates[100:] == [0, 0, 0, 1, 0, 0, 0, 1]
    assert empty.ratio(1109) == 8


class Clock:
    """Two environments that observe their own number and time, and end every fifth step."""

    def __init__(self, first: int = 0) -> None:
        self.spec = EnvSpec("c", "c", 2, (1,), np.dtype(np.float32), Discrete(1000))
        self.first, self.t, self.sent = first, 0, False

    def obs(self) -> np.ndarray:
        return (self.first + 10.0 * self.t + np.arange(2, dtype=np.float32))[:, None]

    def reset(self) -> np.ndarray:
        return self.obs()

    def send(self, action) -> None:
        assert not self.sent
        self.sent, self.action = True, action

    def recv(self) -> Step:
        assert self.sent
        self.sent = False
        self.t += 1
        reward = self.action.astype(np.float32)
        ended, valid = np.full(2, self.t % 5 == 0), np.full(2, self.t % 5 != 1 or self.t == 1)
        ids = np.arange(2, dtype=np.int32)
        return Step(self.obs(), reward, reward, ended, ended & False, valid, ids)

    def step(self, action) -> Step:
        self.send(action)
        return self.recv()

    close = None


class Learner:
    """Acts with the observation's own number; notes what it is given."""

    def __init__(self) -> None:
        self.policy = self
        self.batches: list = []
        self.progress: list[float] = []

    def act(self, obs, progress):
        self.progress.append(progress)
        return obs[:, 0].astype(np.int64), {}

    def update(self, batch, progress):
        self.batches.append(batch)
        return batch.reward.abs() + 1

    def metrics(self, progress):
        return {"explore/epsilon": 1 - progress}


class Noting(DequeBuffer):
    """Notes the priorities it is given."""

    prioritized = True

    def update_priorities(self, ids, priorities):
        assert len(ids) == len(priorities) == 4
        self.given = getattr(self, "given", 0) + 1
        return 4


def run(envs, steps: int = 60):
    buffer = Noting(envs.spec, 1000, 1, 0.5, 0, torch.device("cpu"))
    learner, counters, phases = Learner(), Counters(), Phases()
    pace, turns = Pace(4, 2.0, 10), []

    def hook(obs, metrics):
        turns.append((counters.env_steps, counters.updates, dict(metrics())))
        return counters.env_steps >= steps

    sync.run_replay(envs, buffer, learner, phases, pace, counters, steps, envs.reset(), hook)
    return buffer, learner, counters, phases, turns


def test_the_loop_stores_what_happened_and_learns_at_its_pace():
    buffer, learner, counters, phases, turns = run(Clock())
    assert counters.env_steps == 60
    assert counters.updates == len(learner.batches) == buffer.given == (60 - 10) * 2 // 4
    for batch in learner.batches:
        # Each transition is a step of one environment to its next time, never one across a reset.
        assert torch.equal(batch.next_obs, batch.obs + 10)
        assert torch.equal(batch.action.float(), batch.obs[:, 0])
        ends = batch.next_obs[:, 0] // 10 % 5 == 0
        assert torch.equal(batch.discount, torch.where(ends, 0.0, 0.5))
        assert not ((batch.obs[:, 0] // 10 % 5 == 0) & (batch.obs[:, 0] >= 10)).any()
    assert learner.progress[0] == 0
    assert learner.progress[-1] < 1
    assert turns[0] == (2, 0, {"explore/epsilon": 1 - 2 / 60, "replay/size": 2, "replay/ratio": 0})
    assert turns[-1][2]["replay/ratio"] == 2
    seconds = phases.window()
    assert {"act", "env", "store", "sample", "learn"} <= seconds.keys()


def test_lanes_store_the_same_steps_and_overlap():
    lanes = Lanes([Clock(0), Clock(2)], "x")
    buffer, learner, counters, _, _ = run(lanes)
    assert counters.updates == len(learner.batches) >= (60 - 10) * 2 // 4
    wide = {tuple(map(float, (o[0], a, n[0]))) for o, a, _, _, n in buffer._items}
    plain = set()
    for first in (0, 2):
        one, *_ = run(Clock(first), steps=counters.env_steps // 2)
        plain |= {tuple(map(float, (o[0], a, n[0]))) for o, a, _, _, n in one._items}
    assert wide == plain
    # Both lanes are under way whenever the hook runs.
    assert all(lane._envs.sent for lane in lanes.lanes)


def test_without_a_profile_the_loop_runs_the_same():
    envs = Clock()
    buffer = DequeBuffer(envs.spec, 1000, 1, 0.5, 0, torch.device("cpu"))
    counters = Counters()
    sync.run_replay(
        envs, buffer, Learner(), NullPhases(), Pace(4, 2.0, 10), counters, 60, envs.reset(),
        lambda obs, metrics: counters.env_steps >= 60,
    )  # fmt: skip
    assert counters.updates == 25
