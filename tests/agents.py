"""Small agents for tests, and rollouts to feed them with."""

from __future__ import annotations

import numpy as np
import torch
from standin import as_traced

from rl_pipeline.buffers.rollout import Rollout, RolloutBuffer
from rl_pipeline.config.settings import NetworkSettings, PPOSettings
from rl_pipeline.engine.compilers import CompilePlan, captured
from rl_pipeline.engine.graphs import CompileLog
from rl_pipeline.engine.phases import NullPhases
from rl_pipeline.engine.precision import Arithmetic
from rl_pipeline.engine.runtime import Runtime, ThreadPlan
from rl_pipeline.learners.ppo import PPO
from rl_pipeline.types import Continuous, Discrete, EnvSpec, Step

CPU = torch.device("cpu")


BOX = Continuous(np.full(2, -1, np.float32), np.full(2, 1, np.float32))


def spec(num_envs: int = 4, action: Discrete | Continuous | None = None) -> EnvSpec:
    return EnvSpec("test", "test", num_envs, (3,), np.dtype(np.float32), action or Discrete(2))


def learner(
    num_envs: int = 4,
    action: Discrete | Continuous | None = None,
    runtime: Runtime | None = None,
    in_numpy: bool = False,
    **cfg,
) -> PPO:
    """A small PPO; it acts through torch, as large networks do, unless `in_numpy`."""
    runtime = runtime or Runtime(CPU, "", ThreadPlan(1, 1, 1, 1), seed=3)
    options = {"name": "ppo", "horizon": 8, "num_minibatches": 2} | cfg
    network = NetworkSettings(name="mlp", hidden=(16,))
    agent = PPO(PPOSettings(**options), network, spec(num_envs, action), runtime, NullPhases())
    if not in_numpy:
        agent.policy._forward, agent.policy.extras = None, ("log_prob", "value")
    return agent


def random_rollout(agent: PPO, num_envs=4, horizon=8, action=None, seed=0) -> Rollout:
    """A rollout acted by `agent`, with one termination, one truncation and their reset rows."""
    rng = np.random.default_rng(seed)
    buffer = RolloutBuffer(spec(num_envs, action), horizon, agent.policy.extras, CPU)
    obs = rng.normal(size=(num_envs, 3)).astype(np.float32)
    ended = np.zeros(num_envs, bool)
    for t in range(horizon):
        acted, extras = agent.policy.act(obs, 0.0)
        terminated, truncated = np.zeros(num_envs, bool), np.zeros(num_envs, bool)
        terminated[0], truncated[1] = t == 2, t == 4
        valid, reward = ~ended, rng.normal(size=num_envs).astype(np.float32) * ~ended
        following = rng.normal(size=(num_envs, 3)).astype(np.float32)
        step = Step(
            following, reward, reward, terminated, truncated, valid,
            np.arange(num_envs, dtype=np.int32),
        )  # fmt: skip
        buffer.add(obs, acted, extras, step)
        obs, ended = following, terminated | truncated
    return buffer.take(obs)


def runtime(build=as_traced, capture=None, arithmetic=None, **plan) -> Runtime:
    build = captured(build, capture) if capture else build
    plan = CompilePlan("default", build, capture, **plan)
    return Runtime(
        CPU, "", ThreadPlan(1, 1, 1, 1), 3, arithmetic or Arithmetic(), plan, CompileLog()
    )
