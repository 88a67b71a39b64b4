"""Rules over several settings: choices that do not go together, figures that never meet."""

from __future__ import annotations

from typing import Any

from rl_pipeline.config.backends import those
from rl_pipeline.config.settings import PPOSettings, ReplayAlgorithm, Settings
from rl_pipeline.errors import ConfigError


def check(settings: Settings) -> None:
    """Refuse what cannot take effect together; raises ConfigError."""
    _backend(settings)
    _env(settings)
    _rest(settings)
    if isinstance(settings.algo, ReplayAlgorithm):
        _replay(settings, settings.algo)
    else:
        _rollout(settings, settings.algo)
    _buffer(settings)


def _backend(settings: Settings) -> None:
    backend, env = settings.backend, settings.env
    name, traits, lanes = backend.name, backend.traits, backend.lanes
    if lanes > (traits.most_lanes or lanes):
        raise ConfigError(
            f"backend.lanes={lanes} has no effect on backend={name}, which steps while the policy "
            f"waits; use {those(lambda b: b.most_lanes is None)}"
        )
    if lanes < traits.least_lanes:
        raise ConfigError(
            f"backend={name} needs backend.lanes of 2 or more, not {lanes}; for one lane use "
            "backend=envpool"
        )
    if backend.num_envs % lanes:
        raise ConfigError(f"backend.lanes={lanes} must divide backend.num_envs={backend.num_envs}")
    if traits.own_ids and env.envpool_id is None:
        raise ConfigError(
            f"backend={name} does not have env={env.name} ({env.id}); use backend=gymnasium"
        )
    if env.kind not in traits.threaded and backend.num_threads != "auto":
        raise ConfigError(
            f"backend.num_threads has no effect on backend={name} here, which has no worker "
            "threads; leave it out or use backend=envpool"
        )
    if (traits.steps == "processes") != (backend.step_timeout_s is not None):
        raise ConfigError(
            "backend.step_timeout_s goes with backend=gymnasium_async, whose workers can hang, and "
            f"with no other; it is {backend.step_timeout_s} on backend={name}"
        )
    if traits.own_ids and env.kwargs.keys() & {"num_envs", "seed"}:
        raise ConfigError("env.kwargs cannot set num_envs or seed; use backend.num_envs and seed")
    if env.wrappers and not traits.wrappers:
        raise ConfigError(
            f"env.wrappers are Gymnasium's, backend={name} cannot apply them; use "
            f"{those(lambda b: b.wrappers)}"
        )


def _env(settings: Settings) -> None:
    env, network = settings.env, settings.network
    if env.wrappers and env.kind == "atari":
        raise ConfigError(
            f"env.wrappers have no effect under the preprocessing of env={env.name}; use "
            f"env=gym env.id=ale_py:{env.id} with wrappers that do all of it"
        )
    if (env.kind == "atari") != (env.atari is not None):
        raise ConfigError("env.kind=atari and the env.atari block go together")
    if network.name == "nature_cnn" and env.kind in ("classic", "mujoco"):
        raise ConfigError(
            f"network=nature_cnn needs images, env={env.name} has none; use network=mlp"
        )
    if network.name == "nature_cnn" and getattr(settings.algo, "normalize_obs", False):
        raise ConfigError(
            "algo.normalize_obs=true does not go with network=nature_cnn, which scales images by "
            "the bounds of their space; leave it out, or use network=mlp"
        )


def _rest(settings: Settings) -> None:
    tracking = settings.tracking
    if tracking.name == "none" and (tracking.uri or tracking.experiment):
        raise ConfigError(
            "tracking.uri and tracking.experiment have no effect with tracking=none; use "
            "tracking=mlflow or tracking=server"
        )
    if settings.eval.every_steps and not settings.eval.episodes:
        raise ConfigError("eval.every_steps has no effect with eval.episodes=0")


def _rollout(settings: Settings, algo: PPOSettings) -> None:
    buffer, num_envs = settings.buffer, settings.backend.num_envs
    if buffer.name != "rollout":
        raise ConfigError(
            f"buffer={buffer.name} does not go with algo={algo.name}, which learns only from what "
            "its present policy has done; use buffer=rollout or algo=dqn"
        )
    rows = algo.horizon * num_envs
    if rows % algo.num_minibatches:
        raise ConfigError(
            f"algo.num_minibatches={algo.num_minibatches} must divide algo.horizon x "
            f"backend.num_envs = {algo.horizon} x {num_envs} = {rows}"
        )
    if rows == algo.num_minibatches:
        why = "its normalised advantage is always 0, so that the policy never moves"
        if not algo.normalize_advantage:
            why = "it is empty where that row only resets an environment"
        raise ConfigError(
            f"algo.num_minibatches={algo.num_minibatches} leaves one row a minibatch "
            f"(algo.horizon x backend.num_envs = {algo.horizon} x {num_envs} = {rows} rows), and "
            f"{why}; use a longer algo.horizon, more backend.num_envs or fewer "
            "algo.num_minibatches"
        )


def _replay(settings: Settings, algo: ReplayAlgorithm) -> None:
    buffer, capacity = settings.buffer, settings.buffer.capacity
    if buffer.name == "rollout":
        raise ConfigError(
            f"buffer=rollout does not go with algo={settings.algo.name}, which learns from old "
            "steps; use buffer=uniform or buffer=prioritized"
        )
    if capacity is None:
        raise ConfigError(f"buffer.capacity must be given with buffer={buffer.name}")
    # One row per environment waits for its successor, n_step of them for a whole window.
    waiting = algo.n_step * settings.backend.num_envs
    for key, least in {
        "algo.learning_starts": algo.learning_starts,
        "algo.batch_size": algo.batch_size + waiting,
    }.items():
        if capacity < least:
            raise ConfigError(
                f"buffer.capacity={capacity:,} is less than {key} needs ({least:,}): learning "
                "would never begin; make it larger"
            )
    if algo.learning_starts >= settings.total_steps:
        raise ConfigError(
            f"algo.learning_starts={algo.learning_starts:,} is not reached in total_steps="
            f"{settings.total_steps:,}; lower it, or give more steps"
        )


_PLAIN: dict[str, dict[str, Any]] = {
    "rollout": {"capacity": None, "placement": "cpu", "prefetch": False, "save": True},
    "deque": {"placement": "cpu", "prefetch": False},
    # Its draws change with every priority: nothing can be copied ahead.
    "prioritized": {"prefetch": False},
    "memmap": {"placement": "cpu"},
}
"""Settings that a buffer gives no other meaning than these."""


def _buffer(settings: Settings) -> None:
    buffer = settings.buffer
    for key in ("alpha", "beta"):
        value = getattr(buffer, key)
        if (buffer.name == "prioritized") != (value is not None):
            raise ConfigError(
                f"buffer.{key} goes with buffer=prioritized and with no other; it is {value} on "
                f"buffer={buffer.name}"
            )
    if buffer.placement == "cuda" and buffer.prefetch:
        raise ConfigError(
            "buffer.prefetch has no effect with buffer.placement=cuda, where nothing is copied; "
            "leave it out"
        )
    for key, only in _PLAIN.get(buffer.name, {}).items():
        value = getattr(buffer, key)
        if value != only:
            raise ConfigError(
                f"buffer.{key}={value} has no effect on buffer={buffer.name}; leave it out"
            )
    if buffer.placement != "cpu" and settings.device.name == "cpu":
        raise ConfigError(
            f"buffer.placement={buffer.placement} is for a GPU and device=cpu has none; use "
            "buffer.placement=cpu or device=cuda"
        )
