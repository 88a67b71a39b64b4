"""The loop: what it feeds to a learner, with one vector and with lanes."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import torch

from rl_pipeline.buffers.rollout import RolloutBuffer
from rl_pipeline.engine.phases import NullPhases
from rl_pipeline.envs.lanes import Lanes
from rl_pipeline.loops import sync
from rl_pipeline.loops.sync import Counters
from rl_pipeline.types import Discrete, EnvSpec, Step


class CountingLearner:
    """Notes the progress that each update is told."""

    extras = ()

    def __init__(self) -> None:
        self.policy = self
        self.progress: list[float] = []

    def act(self, obs, progress):
        return np.zeros(2, np.int64), {}

    def update(self, rollout, progress):
        self.progress.append(progress)
        return {}, 1


class TwoEnvs:
    """Never ends."""

    spec = EnvSpec("t", "t", 2, (1,), np.dtype(np.float32), Discrete(2))

    def reset(self):
        raise NotImplementedError

    close = reset

    def send(self, action):
        pass

    def recv(self):
        zero, no = np.zeros(2, np.float32), np.zeros(2, bool)
        return Step(np.zeros((2, 1), np.float32), zero, zero, no, no, ~no, np.arange(2))


def test_the_first_update_has_the_full_rate_and_the_last_one_not_zero():
    learner, counters = CountingLearner(), Counters()
    buffer = RolloutBuffer(TwoEnvs.spec, 5, (), torch.device("cpu"))
    obs = np.zeros((2, 1), np.float32)
    sync.run(
        TwoEnvs(), buffer, learner, NullPhases(), counters, 30, obs,
        lambda obs, metrics: counters.env_steps >= 30,
    )  # fmt: skip
    assert learner.progress == [0, 1 / 3, 2 / 3]
    assert (counters.env_steps, counters.updates, counters.rollouts) == (30, 3, 3)


class Clockwork:
    """Lane of two environments whose obs and reward tell who stepped when."""

    def __init__(self, first: int, log: list[str]) -> None:
        action = Discrete(100)
        self.spec = EnvSpec("c", "c", 2, (1,), np.dtype(np.float32), action)
        self.first, self.log, self.t = first, log, 0

    def obs(self) -> np.ndarray:
        return (self.first + 10 * self.t + np.arange(2, dtype=np.float32))[:, None]

    def send(self, action) -> None:
        self.log.append(f"send {self.first}")
        self.action = action

    def recv(self) -> Step:
        self.log.append(f"recv {self.first}")
        self.t += 1
        no = np.zeros(2, bool)
        reward = self.action.astype(np.float32)
        return Step(self.obs(), reward, reward, no, no, ~no, np.arange(2, dtype=np.int32))

    reset = close = None


class Echo:
    """Acts with the observation's own number; counts its updates."""

    extras = ("log_prob",)
    updates = 0

    def __init__(self) -> None:
        self.policy = self

    def act(self, obs, progress):
        return obs[:, 0].astype(np.int64), {"log_prob": torch.full((len(obs),), self.updates)}

    def update(self, rollout, progress):
        self.rollout = [x.clone() for x in rollout[:3]] + [rollout.extras["log_prob"].clone()]
        self.updates += 1
        return {}, 1


def test_lanes_fill_the_same_rows_as_one_vector_and_stay_on_policy():
    log: list[str] = []

    @contextmanager
    def overlap():
        log.append("begin")
        yield
        log.append("end")

    lanes = Lanes([Clockwork(0, log), Clockwork(2, log)], "x", overlap)
    learner, counters = Echo(), Counters()
    buffer = RolloutBuffer(lanes.spec, 3, learner.extras, torch.device("cpu"))
    obs = np.concatenate([lane._envs.obs() for lane in lanes.lanes])
    for update in range(2):
        sync.run(lanes, buffer, learner, NullPhases(), counters, 1000, obs, lambda o, m: True)
        seen, action, reward, log_prob = learner.rollout
        t = torch.arange(3 * update, 3 * update + 4).view(4, 1)
        expected = torch.arange(4).float() + 10 * t
        assert torch.equal(seen[..., 0], expected)
        assert torch.equal(action.float(), expected[:3])
        assert torch.equal(reward, expected[:3])
        assert (log_prob == update).all()  # no row was acted on with older weights
        obs = seen[-1].numpy()
    assert counters.env_steps == 24
    # One lane is always under way while the other is acted on.
    moves = [line for line in log if line not in ("begin", "end")]
    assert moves[:6] == ["send 0", "send 2", "recv 0", "send 0", "recv 2", "send 2"]
    # torch leaves cores to them while it acts, and takes them back before anything is learnt.
    assert log.count("begin") == log.count("end") == sum("send" in line for line in log)
    assert all(log[i + 1] == "end" for i, line in enumerate(log) if line == "begin")


class Pictures(TwoEnvs):
    """Observes noise; every fourth step ends an episode."""

    spec = EnvSpec("p", "p", 2, (4, 12, 8), np.dtype(np.uint8), Discrete(2))

    def __init__(self) -> None:
        self.rng, self.seen = np.random.default_rng(0), []

    def recv(self):
        self.seen.append(self.rng.integers(0, 255, (2, *self.spec.obs_shape), np.uint8))
        return super().recv()._replace(obs=self.seen[-1])


def test_images_lie_channels_last_for_policy_and_learner_and_are_the_same_images():
    envs, learner, acted_on = Pictures(), CountingLearner(), []
    first = envs.recv().obs
    learner.act = lambda obs, progress: (acted_on.append(obs), (np.zeros(2, np.int64), {}))[1]
    learner.update = lambda rollout, progress: (learner.progress.append(rollout), ({}, 1))[1]
    buffer = RolloutBuffer(envs.spec, 3, (), torch.device("cpu"))
    sync.run(
        envs, buffer, learner, NullPhases(), Counters(), 6, first, lambda obs, metrics: True,
    )  # fmt: skip
    (rollout,) = learner.progress
    for obs, seen, row in zip(
        [*acted_on, rollout.obs[3].numpy()], envs.seen, rollout.obs, strict=True
    ):
        assert np.array_equal(obs, seen) and np.array_equal(row.numpy(), seen)
        assert row.is_contiguous(memory_format=torch.channels_last)
        assert torch.from_numpy(obs).is_contiguous(memory_format=torch.channels_last)
