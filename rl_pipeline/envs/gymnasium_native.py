"""The environment's own vectorised form (`vector_entry_point`): CartPole in numpy, Atari in C++."""

from __future__ import annotations

import difflib
from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np

from rl_pipeline.config.settings import EnvSettings
from rl_pipeline.envs import randomness
from rl_pipeline.envs.base import BaseVecEnv, RawStep, env_seeds
from rl_pipeline.errors import ConfigError


class GymnasiumNativeVecEnv(BaseVecEnv):
    """Tasks whose registration names a vector environment of their own."""

    def __init__(
        self, env: EnvSettings, num_envs: int, seed: int, num_threads: int, wide_obs: bool = False
    ) -> None:
        """Raise ValueError for a task that has none, or arguments that do not fit it."""
        self._atari = env.kind == "atari"
        seeds = env_seeds(seed, num_envs)
        # Only ALE's takes one seed per environment; elsewhere one generator serves all.
        self._seed: Any = np.array(seeds) if self._atari else seeds[0]
        # An evaluation leaves the process's generators as training had them.
        self._outside = randomness.capture()
        randomness.seed_process(seeds[0])
        try:
            self._start(env, num_envs, num_threads, wide_obs)
        except BaseException:
            randomness.restore(self._outside)
            raise
        for space in (self._vec.action_space, self._vec.single_action_space):
            space.seed(seeds[0])
        # CartPole's own check of actions, which ours has made already, is a tenth of its step.
        self._vec.action_space.contains = lambda action: True

    def _start(self, env: EnvSettings, num_envs: int, num_threads: int, wide_obs: bool) -> None:
        self._vec = _make(env, num_envs, num_threads)
        if env.atari is not None and env.atari.episodic_life:
            _refuse_lives(env, self._vec)
        limit = getattr(self._vec, "max_episode_steps", None)
        super().__init__(
            env,
            backend="gymnasium_native",
            num_envs=num_envs,
            observation_space=self._vec.single_observation_space,
            action_space=self._vec.single_action_space,
            metadata=self._vec.metadata,
            max_episode_steps=_atari_limit(env) if self._atari else limit,
            reuses_obs=True,
            wide_obs=wide_obs,
        )

    def _reset(self) -> np.ndarray:
        seed, self._seed = self._seed, None
        return self._vec.reset(seed=seed)[0]

    def _send(self, action: np.ndarray) -> None:
        self._action = action

    def _recv(self) -> RawStep:
        obs, reward, terminated, truncated, _ = self._vec.step(self._action)
        return obs, reward, terminated, truncated, None

    def _close(self) -> None:
        try:
            self._vec.close()
        finally:
            randomness.restore(self._outside)


def _refuse_lives(env: EnvSettings, vec: Any) -> None:
    """ALE's vector environment starts a new game after every lost life: another task."""
    if vec.reset()[1]["lives"].any():
        vec.close()
        raise ConfigError(
            f"env={env.name} has lives, and backend=gymnasium_native would start a new game after "
            "each; set env.atari.episodic_life=false, or use another backend"
        )


def _atari_limit(env: EnvSettings) -> int:
    assert env.atari is not None
    return env.max_episode_steps or 108_000 // env.atari.frame_skip


def _make(env: EnvSettings, num_envs: int, num_threads: int) -> Any:
    if env.kind == "atari":
        try:
            import ale_py
        except ImportError as error:
            raise ConfigError(
                f"env.id={env.id} on backend=gymnasium_native needs ale-py: pip install it, or use "
                f"backend=envpool ({error})"
            ) from error
        gym.register_envs(ale_py)
    try:
        spec = gym.spec(env.id)
    except (gym.error.Error, ModuleNotFoundError) as error:
        near = difflib.get_close_matches(env.id, gym.registry, n=3)
        hint = f"; near matches: {', '.join(near)}" if near else ""
        raise ConfigError(
            f"backend=gymnasium_native finds no vectorised form of env.id={env.id} "
            f"({error}){hint}; use backend=gymnasium"
        ) from error
    if spec.vector_entry_point is None:
        raise ConfigError(
            f"env={env.name} ({env.id}) has no vectorised form of its own (vector_entry_point); "
            "use backend=gymnasium, or backend=envpool where it has the task"
        )
    arguments: dict[str, Any] = {}
    if env.max_episode_steps is not None:
        arguments["max_episode_steps"] = env.max_episode_steps
    if env.kind == "atari":
        arguments = _atari_arguments(env, num_threads)
    if clash := arguments.keys() & env.kwargs.keys():
        raise ConfigError(f"env.kwargs cannot set {', '.join(sorted(clash))}; use env.* for it")
    kwargs = deepcopy(env.kwargs)
    try:
        return gym.make_vec(
            spec,
            num_envs,
            vectorization_mode="vector_entry_point",
            **arguments,
            **kwargs,
        )
    except TypeError as error:
        raise ConfigError(
            f"the vectorised form of env.id={env.id} does not take these arguments: {error}"
        ) from error


def _atari_arguments(env: EnvSettings, num_threads: int) -> dict[str, Any]:
    atari = env.atari
    assert atari is not None
    return {
        "num_threads": num_threads,
        "max_num_frames_per_episode": _atari_limit(env) * atari.frame_skip,
        "repeat_action_probability": atari.sticky_actions,
        "frameskip": atari.frame_skip,
        "stack_num": atari.frame_stack,
        "img_height": atari.screen_size,
        "img_width": atari.screen_size,
        "noop_max": atari.noop_max,
        "use_fire_reset": atari.fire_reset,
        "episodic_life": False,
        "reward_clipping": False,  # clipped in base.py, where the raw reward is kept
    }
