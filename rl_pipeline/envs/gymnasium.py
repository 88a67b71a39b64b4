"""Gymnasium's environments in a loop, made and reset by its synchronous vector environment."""

from __future__ import annotations

import difflib
import importlib
import pickle
import sys
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import EzPickle
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rl_pipeline.envs.base import BaseVecEnv, RawStep, env_seeds
from rl_pipeline.settings import EnvSettings, WrapperSettings


class GymnasiumVecEnv(BaseVecEnv):
    """Any Gymnasium id, also `package.module:Id`, stepped in a loop in this process.

    `state()` continues exactly for environments that pickle with their state (classic control,
    plain Python ones).
    """

    def __init__(self, env: EnvSettings, num_envs: int, seed: int):
        """Raise ValueError for an id, package or constructor argument that does not work here."""
        self._atari = env.kind == "atari"
        self._seeds: list[int | None] | None = [*env_seeds(seed, num_envs)]
        make = partial(make_env, env)
        self._vec = SyncVectorEnv(
            [make] * num_envs, copy=False, autoreset_mode=AutoresetMode.NEXT_STEP
        )
        # Gymnasium's own step also gathers infos, which nobody reads.
        self._loop = isinstance(self._vec.single_observation_space, gym.spaces.Box)
        first: Any = self._vec.envs[0]
        limit = first.spec.max_episode_steps if first.spec else None
        super().__init__(
            env,
            backend="gymnasium",
            num_envs=num_envs,
            observation_space=self._vec.single_observation_space,
            action_space=self._vec.single_action_space,
            metadata=self._vec.metadata,
            max_episode_steps=first.max_episode_steps if self._atari else limit,
            reuses_obs=not self._loop,
        )

    def state(self) -> bytes | None:
        """Everything needed to continue exactly, or None where an environment does not pickle."""
        # EzPickle brings an environment back as constructed, not as it was.
        if any(isinstance(layer, EzPickle) for env in self._vec.envs for layer in _layers(env)):
            return None
        try:
            return pickle.dumps(
                {
                    "envs": self._vec.envs,
                    "resets_next": self._vec._autoreset_envs,
                    "obs": self._vec._observations,
                    "seeds": self._seeds,
                    "accounts": self._accounts(),
                }
            )
        except Exception:  # whatever a user's object raises: it does not pickle
            return None

    def load_state(self, state: bytes) -> np.ndarray:
        """Continue from `state`; returns the current obs [N, *obs_shape]."""
        saved = pickle.loads(state)
        if len(saved["envs"]) != self.spec.num_envs:
            raise ValueError(
                f"{self._name}: the saved state has {len(saved['envs'])} environments, "
                f"backend.num_envs={self.spec.num_envs}"
            )
        for env in self._vec.envs:
            env.close()
        self._vec.envs = saved["envs"]
        self._vec._autoreset_envs = saved["resets_next"]
        self._vec._observations = saved["obs"]
        self._seeds = saved["seeds"]
        vars(self).update(saved["accounts"])
        return self._own(self._vec._observations)

    def _reset(self) -> np.ndarray:
        # Seeded once: later resets go on with the environments' own generators.
        seeds, self._seeds = self._seeds, None
        if self._loop:  # it writes where it wrote before, and that was given away
            self._vec._observations = np.empty_like(self._vec._observations)
        options = {"new_game": True} if self._atari else None
        return self._vec.reset(seed=seeds, options=options)[0]

    def _send(self, action: np.ndarray) -> None:
        self._action = action

    def _recv(self) -> RawStep:
        step: Any = self._step_each if self._loop else self._vec.step
        obs, reward, terminated, truncated, *_ = step(self._action)
        game_ended = None
        if self._atari:
            games: list[Any] = self._vec.envs
            game_ended = np.array([game.game_ended for game in games])
        return obs, reward, terminated, truncated, game_ended

    def _step_each(self, action: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray]:
        """`SyncVectorEnv.step` in mode NEXT_STEP, without infos, into arrays of their own."""
        num_envs = len(self._vec.envs)
        reward = np.zeros(num_envs)
        terminated, truncated = np.zeros(num_envs, bool), np.zeros(num_envs, bool)
        observations: list[Any] = []
        resets: list[bool] = self._vec._autoreset_envs.tolist()
        for i, env in enumerate(self._vec.envs):
            if resets[i]:
                observations.append(env.reset()[0])
            else:
                obs, reward[i], terminated[i], truncated[i], _ = env.step(action[i])
                observations.append(obs)
        self._vec._autoreset_envs = terminated | truncated
        # Refuses what is not of the space's shape and kind, as Gymnasium's step does.
        obs = np.stack(observations, out=np.empty_like(self._vec._observations))
        self._vec._observations = obs
        return obs, reward, terminated, truncated

    def _close(self) -> None:
        self._vec.close()


def _layers(env: gym.Env) -> list[gym.Env]:
    layers = [env]
    while isinstance(layers[-1], gym.Wrapper):
        layers.append(layers[-1].env)
    return layers


def _make(env: EnvSettings, **fixed) -> gym.Env:
    """One environment of the task; `fixed` arguments come before `env.kwargs`."""
    if "max_episode_steps" in env.kwargs:
        raise ValueError("env.kwargs.max_episode_steps cannot be set; use env.max_episode_steps")
    limit = {} if env.max_episode_steps is None else {"max_episode_steps": env.max_episode_steps}
    try:
        # Our own checks replace the passive checker's.
        made = gym.make(env.id, disable_env_checker=True, **limit, **{**fixed, **env.kwargs})
    except gym.error.DependencyNotInstalled as error:
        raise ValueError(
            f"env.id={env.id} needs a package that is not installed: {error}"
        ) from error
    except (gym.error.Error, ModuleNotFoundError) as error:
        near = difflib.get_close_matches(env.id, gym.registry, n=3)
        hint = f"; near matches: {', '.join(near)}" if near else ""
        if env.id.startswith("ALE/"):
            hint = f"; use env=pong and the like, or env.id=ale_py:{env.id}"
        elif env.envpool_id is not None:
            hint += "; or use backend=envpool"
        if isinstance(error, ModuleNotFoundError):
            hint = "; pip install the package that registers it into this environment" + hint
        raise ValueError(f"Gymnasium cannot make env.id={env.id}: {error}{hint}") from error
    except TypeError as error:
        if not env.kwargs:
            raise
        raise ValueError(f"env.kwargs={env.kwargs} do not fit env.id={env.id}: {error}") from error
    for wrapper in env.wrappers:
        made = _wrapped(made, wrapper)
    return made


def _wrapped(env: gym.Env, wrapper: WrapperSettings) -> gym.Env:
    module, name = wrapper.name.split(":")
    try:
        kind = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ValueError(f"env.wrappers: {wrapper.name} does not import: {error}") from error
    except AttributeError as error:
        near = difflib.get_close_matches(name, dir(sys.modules[module]), n=3)
        hint = f"; near matches: {', '.join(near)}" if near else ""
        raise ValueError(f"env.wrappers: {module} has no {name}{hint}") from error
    try:
        made = kind(env, **wrapper.kwargs)
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(
            f"env.wrappers: {wrapper.name} does not take this environment with "
            f"kwargs={wrapper.kwargs}: {error}"
        ) from error
    if not isinstance(made, gym.Env):
        raise ValueError(f"env.wrappers: {wrapper.name} gives no Gymnasium environment: {made!r}")
    return made


def make_env(env: EnvSettings, informs: bool = False) -> gym.Env:
    """One environment of the task; `informs`: a game's end is also told by `info`.

    Raises ValueError for an id, package or constructor argument that does not work here.
    """
    return _make_atari(env, informs) if env.kind == "atari" else _make(env)


def _make_atari(env: EnvSettings, informs: bool) -> gym.Env:
    try:
        from rl_pipeline.envs.atari import AtariEnv, emulator_settings
    except ImportError as error:
        raise ValueError(
            f"env.id={env.id} on backend=gymnasium needs ale-py and opencv-python-headless: "
            f"pip install them, or use backend=envpool ({error})"
        ) from error
    fixed = emulator_settings(env)
    game = _make(env.model_copy(update={"max_episode_steps": None}), **fixed)
    return AtariEnv(game, env, informs)
