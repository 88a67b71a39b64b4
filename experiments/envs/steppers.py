"""The two contenders of a cell: our adapter, and the library as its own documentation uses it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import gymnasium as gym
import numpy as np
from hydra import compose, initialize_config_dir

from experiments.envs.paired import Advance, Cell
from rl_pipeline.config import load
from rl_pipeline.config.origins import CONF
from rl_pipeline.config.settings import EnvSettings, Settings
from rl_pipeline.envs.lanes import Lanes
from rl_pipeline.run import build
from rl_pipeline.types import Discrete, EnvSpec, VecEnv

NUM_ACTIONS = 64
"""Batches of actions drawn beforehand and used in turn."""
HORIZON = 128
"""Steps between two readings of the finished games, as a training loop makes them."""


@cache
def settings_of(cell: Cell) -> Settings:
    """The cell as a run would configure it."""
    overrides = [
        f"env={cell.task}", f"backend={cell.backend}", f"backend.num_envs={cell.num_envs}",
        "algo.num_minibatches=1",
    ]  # fmt: skip
    if cell.threads:
        overrides.append(f"backend.num_threads={cell.threads}")
    if cell.backend == "gymnasium_native" and cell.task == "pong":
        overrides.append("env.atari.episodic_life=false")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return load.load(compose("config", overrides=overrides))


@cache
def spec_of(cell: Cell) -> EnvSpec:
    """What its environments observe and take."""
    envs = make_ours(cell, seed=0)
    envs.close()
    return envs.spec


def draw_actions(spec: EnvSpec, rng: np.random.Generator) -> list[np.ndarray]:
    """Random actions [N] or [N, *action_shape], as a policy would give them."""
    num, action = spec.num_envs, spec.action
    if isinstance(action, Discrete):
        return [rng.integers(0, action.num_actions, num) for _ in range(NUM_ACTIONS)]
    shape = (num, *action.shape)
    draws = (rng.uniform(action.low, action.high, shape) for _ in range(NUM_ACTIONS))
    return [draw.astype(np.float32) for draw in draws]


def make_ours(cell: Cell, seed: int) -> VecEnv:
    """The environments exactly as training builds them."""
    return build.make_training_envs(settings_of(cell), seed, cell.threads or 1)


def advance_ours(envs: VecEnv, actions: Sequence[np.ndarray]) -> Advance:
    """Steps of our adapter, finished games read once a horizon."""
    envs.reset()
    if isinstance(envs, Lanes):
        pairs = [(lane.send, lane.recv) for lane in envs.lanes]
        columns = [lane.columns for lane in envs.lanes]
        steps = in_lanes(pairs, [[a[c] for a in actions] for c in columns])
    else:
        steps = one_by_one(envs.step, actions)

    def advance(num_steps: int) -> None:
        for first in range(0, num_steps, HORIZON):
            steps(min(HORIZON, num_steps - first))
            envs.pop_episodes()

    return advance


def valid_share(envs: VecEnv, actions: Sequence[np.ndarray]) -> float:
    """Part of the rows that are agent steps; the others only reset."""
    return float(np.mean([envs.step(action).valid.mean() for action in actions]))


def one_by_one(step: Callable[[np.ndarray], Any], actions: Sequence[np.ndarray]) -> Advance:
    """A bare loop."""

    def advance(num_steps: int) -> None:
        for i in range(num_steps):
            step(actions[i % NUM_ACTIONS])

    return advance


def in_lanes(
    pairs: Sequence[tuple[Callable[[np.ndarray], Any], Callable[[], Any]]],
    actions: Sequence[Sequence[np.ndarray]],
) -> Advance:
    """Lanes in turn as a training loop drives them; nothing is under way before or after."""

    def advance(num_steps: int) -> None:
        for i in range(num_steps):
            for (send, recv), drawn in zip(pairs, actions, strict=True):
                if i:
                    recv()
                send(drawn[i % NUM_ACTIONS])
        for _, recv in pairs:
            recv()

    return advance


def raw(cell: Cell, actions: Sequence[np.ndarray], stack: ExitStack) -> Advance:
    """A bare step loop of the cell's library; `stack` closes its environments."""
    settings = settings_of(cell)
    lanes = settings.backend.lanes
    share = cell.num_envs // lanes
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision lowered")
        vecs = [_make_raw(settings, share, min(cell.threads or 1, share)) for _ in range(lanes)]
    for vec in vecs:
        stack.callback(vec.close)
        vec.reset()
    if lanes == 1:
        return one_by_one(vecs[0].step, actions)
    if cell.backend == "gymnasium_async":
        pairs = [(vec.step_async, vec.step_wait) for vec in vecs]
    else:
        pairs = [(vec.send, vec.recv) for vec in vecs]
    parts = [[a[i * share : (i + 1) * share] for a in actions] for i in range(lanes)]
    return in_lanes(pairs, parts)


def _make_raw(settings: Settings, num_envs: int, threads: int) -> Any:
    env, backend = settings.env, settings.backend.name
    if backend.startswith("envpool"):
        import envpool

        atari = {}
        if env.kind == "atari":  # its defaults are the standard preprocessing otherwise
            atari = {"episodic_life": True, "use_fire_reset": True}
        return envpool.make(
            env.envpool_id, env_type="gymnasium", num_envs=num_envs, num_threads=threads, **atari
        )
    if env.kind == "atari":
        import ale_py

        gym.register_envs(ale_py)
    if backend == "gymnasium_native":
        atari = _native_atari(threads) if env.kind == "atari" else {}
        return gym.make_vec(env.id, num_envs, vectorization_mode="vector_entry_point", **atari)
    mode = "async" if backend == "gymnasium_async" else "sync"
    return gym.make_vec(env.id, num_envs, vectorization_mode=mode, **_wrapped(env))


def _native_atari(threads: int) -> dict[str, Any]:
    return {"num_threads": threads, "repeat_action_probability": 0.0, "use_fire_reset": True}


def _wrapped(env: EnvSettings) -> dict[str, Any]:
    """Gymnasium's own preprocessing, where ours has its own (envs/atari.py)."""
    if env.kind != "atari":
        return {}
    return {"wrappers": [_preprocessed], "frameskip": 1, "repeat_action_probability": 0.0}


def _preprocessed(game: gym.Env) -> gym.Env:
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    return FrameStackObservation(AtariPreprocessing(game, noop_max=30, frame_skip=4), 4)
