"""Parts of the chosen algorithm: learner, buffer and loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_pipeline.buffers.rollout import RolloutBuffer
from rl_pipeline.config.settings import DQNSettings, PPOSettings, ReplayAlgorithm, Settings
from rl_pipeline.engine.phases import NullPhases, Phases
from rl_pipeline.engine.runtime import Runtime, stream_seed
from rl_pipeline.errors import ConfigError
from rl_pipeline.loops import sync
from rl_pipeline.loops.schedule import Pace
from rl_pipeline.types import EnvSpec, Learner, ReplayBuffer, ReplayLearner, RolloutLearner, VecEnv

if TYPE_CHECKING:
    from rl_pipeline.buffers.replay import Replay


@dataclass
class OffPolicy:
    """Parts that an off-policy run has beside its learner."""

    buffer: ReplayBuffer
    pace: Pace
    save: bool
    """The buffer's contents go into checkpoints."""


@dataclass(frozen=True)
class Training:
    """The algorithm's parts of a session."""

    learner: Learner
    loop: Callable[[sync.Counters, np.ndarray, sync.Hook], None]
    replay: OffPolicy | None
    buffer: RolloutBuffer | ReplayBuffer
    """Where rows go: `add` is all that both have."""
    buffer_facts: dict[str, Any]
    """For result.json: bytes needed, and how much memory was free before."""


def make_training(
    settings: Settings,
    envs: VecEnv,
    runtime: Runtime,
    phases: Phases | NullPhases,
    folder: Path,
) -> Training:
    """Learner, buffer and loop of the algorithm that `algo` names."""
    steps = settings.total_steps
    if settings.mode.name != "sync":
        raise NotImplementedError(f"mode={settings.mode.name} has no loop here")
    match settings.algo:
        case PPOSettings() as algo:
            ppo: RolloutLearner = make_learner(settings, envs.spec, runtime, phases)
            extras, send = ppo.policy.extras, runtime.transfers.to_device
            rollout = RolloutBuffer(envs.spec, algo.horizon, extras, runtime.device, send)

            def on_policy(counters: sync.Counters, obs: np.ndarray, hook: sync.Hook) -> None:
                sync.run(envs, rollout, ppo, phases, counters, steps, obs, hook)

            return Training(ppo, on_policy, None, rollout, {"bytes": rollout.nbytes})
        case ReplayAlgorithm() as algo:
            from rl_pipeline.machine import available_memory

            learner: ReplayLearner = make_learner(settings, envs.spec, runtime, phases)
            free = available_memory()
            buffer = make_replay(settings, algo, envs.spec, runtime, folder)
            pace = Pace(
                algo.batch_size, algo.replay_ratio, algo.learning_starts, algo.update_burst
            )  # fmt: skip

            def off_policy(counters: sync.Counters, obs: np.ndarray, hook: sync.Hook) -> None:
                sync.run_replay(envs, buffer, learner, phases, pace, counters, steps, obs, hook)

            replay = OffPolicy(buffer, pace, settings.buffer.save)
            facts = {"bytes": buffer.nbytes, "available_bytes": free} | settings.buffer.model_dump()
            return Training(learner, off_policy, replay, buffer, facts)


def make_learner(
    settings: Settings, spec: EnvSpec, runtime: Runtime, phases: Phases | NullPhases
) -> Any:
    """The learner that `algo` names: a RolloutLearner, or for a ReplayAlgorithm a ReplayLearner."""
    match settings.algo:
        case PPOSettings() as algo:
            from rl_pipeline.learners.ppo import PPO

            return PPO(algo, settings.network, spec, runtime, phases)
        case DQNSettings() as algo:
            from rl_pipeline.learners.dqn import DQN

            return DQN(algo, settings.network, spec, runtime, phases)


def make_replay(
    settings: Settings, algo: ReplayAlgorithm, spec: EnvSpec, runtime: Runtime, folder: Path
) -> ReplayBuffer:
    """The replay buffer that `buffer` names; raises ConfigError where it cannot be or does not fit.

    `folder` is the run's: a memory-mapped one lives there.
    """
    wanted, device, ledger = settings.buffer, runtime.device, runtime.transfers
    if wanted.placement != "cpu" and device.type == "cpu":
        raise ConfigError(
            f"buffer.placement={wanted.placement} is for a GPU and this run is on the CPU "
            f"({runtime.device_reason}); use buffer.placement=cpu"
        )
    capacity, atari = wanted.capacity, settings.env.atari
    assert capacity is not None
    options: dict[str, Any] = {
        "n_step": algo.n_step, "gamma": algo.gamma, "seed": stream_seed(runtime.seed, "update"),
    }  # fmt: skip
    if wanted.name == "deque":
        from rl_pipeline.buffers.deque import DequeBuffer

        return DequeBuffer(spec, capacity, device=device, send=ledger.send, **options)

    from rl_pipeline.buffers.ring import Priorities

    options["frame_stack"] = atari.frame_stack if atari else 1
    if wanted.alpha is not None and wanted.beta is not None:
        options["priorities"] = Priorities(wanted.alpha, wanted.beta)
    match wanted.name, wanted.placement:
        case "memmap", _:
            from rl_pipeline.buffers.memmap import MemmapReplay

            replay: Replay = MemmapReplay(spec, capacity, folder=folder / "replay", **options)
        case _, "cuda":
            from rl_pipeline.buffers.device import DeviceReplay

            return DeviceReplay(spec, capacity, device=device, send=ledger.send, **options)
        case _, "pinned":
            from rl_pipeline.buffers.staging import CudaTransfer, StagedReplay

            transfer = CudaTransfer(device, ledger.sent)
            replay = StagedReplay(spec, capacity, transfer=transfer, **options)
        case _:
            from rl_pipeline.buffers.replay import Replay

            replay = Replay(spec, capacity, **options)
    replay.fetch = ledger.to_host
    if not wanted.prefetch:
        return replay
    from rl_pipeline.buffers.prefetch import Prefetch

    return Prefetch(replay)
