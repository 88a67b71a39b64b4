"""Gymnasium's environments in a loop, made and reset by its synchronous vector environment."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import EzPickle
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rl_pipeline.config.settings import EnvSettings, WrapperSettings
from rl_pipeline.envs import randomness, snapshot
from rl_pipeline.envs.base import BaseVecEnv, RawStep, env_seeds
from rl_pipeline.errors import ConfigError
from rl_pipeline.types import Continuous, StateError


class GymnasiumVecEnv(BaseVecEnv):
    """Any Gymnasium id, also `package.module:Id`, stepped in a loop in this process.

    `state()` continues exactly for environments that are plain Python objects, numbers and arrays
    (classic control, plain Python ones), with the random generators of the process.
    """

    def __init__(self, env: EnvSettings, num_envs: int, seed: int, wide_obs: bool = False) -> None:
        """Raise ValueError for an id, package or constructor argument that does not work here."""
        self._atari = env.kind == "atari"
        self._make_one = partial(make_env, env)
        seeds = env_seeds(seed, num_envs)
        self._seeds: list[int | None] | None = [*seeds]
        # An evaluation leaves the process's generators as training had them.
        self._outside = randomness.capture()
        try:
            randomness.seed_process(seeds[0])
            # Only its constructor is used: it checks that all environments have the same spaces.
            self._vec = SyncVectorEnv(
                [self._make_one] * num_envs, copy=False, autoreset_mode=AutoresetMode.NEXT_STEP
            )
            for made, its_seed in zip(self._vec.envs, seeds, strict=True):
                randomness.seed_spaces(made, its_seed)
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
                reuses_obs=False,
                wide_obs=wide_obs,
            )
        except BaseException:
            randomness.restore(self._outside)
            raise
        self._resets_next = [False] * num_envs
        self._obs = np.zeros((num_envs, *self.spec.obs_shape), self._obs_dtype)
        # A number as an action stays an array where the space is a box.
        box = isinstance(self.spec.action, Continuous) and not self.spec.action.shape
        self._rest: Any = (...,) if box else ()
        self._comes_back: bool | None = None

    def state(self) -> bytes | None:
        """Everything needed to continue exactly, or None where an environment is more than data."""
        every = [layer for env in self._vec.envs for layer in randomness.layers(env)]
        # EzPickle says that an environment is more than its attributes.
        if self._comes_back is False or any(isinstance(layer, EzPickle) for layer in every):
            return None
        parts = {
            "envs": _whole(self._vec.envs),
            "resets_next": self._resets_next,
            "obs": self._obs,
            "seeds": self._seeds,
            "accounts": self._accounts(),
            "process": randomness.capture(),
        }
        try:
            state = snapshot.save(parts, num_envs=self.spec.num_envs)
            if self._comes_back is None:
                self._comes_back = self._tried_out()
        except Exception:  # whatever a user's object raises: it is more than data
            return None
        return state if self._comes_back else None

    def _tried_out(self) -> bool:
        """A fresh environment that is given the state of the first one has it: tried once."""
        saved = snapshot.save(_whole(self._vec.envs[:1]))
        with randomness.preserved():
            fresh = self._make_one()
            randomness.seed_spaces(fresh, 0)
            try:
                _, apply = snapshot.read(snapshot.parse(saved), _whole([fresh]))
                apply()
                return snapshot.save(_whole([fresh])) == saved
            finally:
                fresh.close()

    def load_state(self, state: bytes) -> np.ndarray:
        """Continue from `state`; returns the current obs [N, *obs_shape].

        Raises StateError, with nothing changed and nothing executed, for what is no state of these
        environments.
        """
        try:
            parsed = snapshot.parse(state)
            if parsed.get("num_envs") != self.spec.num_envs:
                raise ValueError(
                    f"{self._name}: the saved state has {parsed.get('num_envs')} environments, "
                    f"backend.num_envs={self.spec.num_envs}"
                )
            saved, apply = snapshot.read(parsed, {"envs": _whole(self._vec.envs)})
            self._check_saved(saved)
            randomness.restore(saved["process"])
        except snapshot.SnapshotError as error:
            raise StateError(f"{self._name}: its saved state is not used: {error}") from error
        except (KeyError, TypeError, RuntimeError) as error:
            raise StateError(
                f"{self._name}: its saved state is damaged ({type(error).__name__}: {error})"
            ) from error
        apply()
        self._resets_next, self._obs = saved["resets_next"], saved["obs"]
        self._seeds = saved["seeds"]
        vars(self).update(saved["accounts"])
        return self._obs

    def _check_saved(self, saved: Any) -> None:
        """Raise SnapshotError where the part of a state that is ours has another form."""
        num_envs = self.spec.num_envs
        shape, seeds = (num_envs, *self.spec.obs_shape), saved["seeds"]
        wrong = [
            name for name, value in self._accounts().items()
            if _form(saved["accounts"].get(name)) != _form(value)
        ]  # fmt: skip
        if len(saved["accounts"]) != len(self._accounts()):
            wrong.append("accounts")
        if [type(x) for x in saved["resets_next"]] != [bool] * num_envs:
            wrong.append("resets_next")
        if _form(saved["obs"]) != (shape, self._obs_dtype):
            wrong.append("obs")
        if seeds is not None and [type(x) for x in seeds] != [int] * num_envs:
            wrong.append("seeds")
        if wrong:
            raise snapshot.SnapshotError(f"{', '.join(wrong)} cannot be what was saved")

    def _reset(self) -> Any:
        # Seeded once: later resets go on with the environments' own generators.
        seeds, self._seeds = self._seeds, None
        options = {"new_game": True} if self._atari else None
        rows = self._new_rows()
        for i, env in enumerate(self._vec.envs):
            seed = None if seeds is None else seeds[i]
            self._put(rows, i, env.reset(seed=seed, options=options)[0])
        self._resets_next = [False] * len(self._vec.envs)
        return self._joined(rows)

    # What an environment returns is copied before another one steps: they may share an array.

    def _new_rows(self) -> Any:
        space = self._vec.single_observation_space
        if self._flatten is not None:
            return []
        return np.empty((self.spec.num_envs, *self.spec.obs_shape), space.dtype)

    def _put(self, rows: Any, i: int, obs: Any) -> None:
        if self._flatten is not None:
            rows.append(self._flatten.parts(obs))
            return
        if np.shape(obs) != self.spec.obs_shape:
            raise ValueError(
                f"{self._name}: environment {i} observed shape {np.shape(obs)}, its space says "
                f"{self.spec.obs_shape}"
            )
        np.copyto(rows[i, ...], obs)  # refuses another kind of number

    def _joined(self, rows: Any) -> Any:
        return rows if self._flatten is None else [np.stack(x) for x in zip(*rows, strict=True)]

    def _own(self, obs: Any) -> np.ndarray:
        self._obs = super()._own(obs)
        return self._obs

    def _send(self, action: np.ndarray) -> None:
        self._action = action

    def _recv(self) -> RawStep:
        """`SyncVectorEnv.step` in mode NEXT_STEP, without infos, which nobody reads."""
        envs: list[Any] = self._vec.envs
        num_envs, rest, action = len(envs), self._rest, self._action
        reward = np.zeros(num_envs)
        terminated, truncated = np.zeros(num_envs, bool), np.zeros(num_envs, bool)
        rows = self._new_rows()
        for i, env in enumerate(envs):
            if self._resets_next[i]:
                self._put(rows, i, env.reset()[0])
            else:
                obs, reward[i], terminated[i], truncated[i], _ = env.step(action[(i, *rest)])
                self._put(rows, i, obs)
        self._resets_next = (terminated | truncated).tolist()
        game_ended = np.array([game.game_ended for game in envs]) if self._atari else None
        return self._joined(rows), reward, terminated, truncated, game_ended

    def _close(self) -> None:
        try:
            self._vec.close()
        finally:
            randomness.restore(self._outside)


def _form(value: Any) -> Any:
    """Shape and dtype of an array, else the type: a saved value and ours must agree in it."""
    return (value.shape, value.dtype) if isinstance(value, np.ndarray) else type(value)


def _whole(envs: Sequence[gym.Env]) -> list[Any]:
    """Environments with their spaces, which may belong to the class, and whose `sample` draws."""
    layers = [layer for env in envs for layer in randomness.layers(env)]
    return [list(envs), [[layer.action_space, layer.observation_space] for layer in layers]]


def _make(env: EnvSettings, **fixed) -> gym.Env:
    """One environment of the task; `fixed` arguments come before `env.kwargs`."""
    if "max_episode_steps" in env.kwargs:
        raise ConfigError("env.kwargs.max_episode_steps cannot be set; use env.max_episode_steps")
    limit = {} if env.max_episode_steps is None else {"max_episode_steps": env.max_episode_steps}
    try:
        # Our own checks replace the passive checker's.
        made = gym.make(
            env.id, disable_env_checker=True, **limit, **{**fixed, **deepcopy(env.kwargs)}
        )
    except gym.error.DependencyNotInstalled as error:
        raise ConfigError(
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
        raise ConfigError(f"Gymnasium cannot make env.id={env.id}: {error}{hint}") from error
    except TypeError as error:
        if not env.kwargs:
            raise
        raise ConfigError(f"env.kwargs={env.kwargs} do not fit env.id={env.id}: {error}") from error
    for wrapper in env.wrappers:
        made = _wrapped(made, wrapper)
    return made


def _wrapped(env: gym.Env, wrapper: WrapperSettings) -> gym.Env:
    module, name = wrapper.name.split(":")
    try:
        kind = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigError(f"env.wrappers: {wrapper.name} does not import: {error}") from error
    except AttributeError as error:
        near = difflib.get_close_matches(name, dir(sys.modules[module]), n=3)
        hint = f"; near matches: {', '.join(near)}" if near else ""
        raise ConfigError(f"env.wrappers: {module} has no {name}{hint}") from error
    try:
        made = kind(env, **deepcopy(wrapper.kwargs))
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"env.wrappers: {wrapper.name} does not take this environment with "
            f"kwargs={wrapper.kwargs}: {error}"
        ) from error
    if not isinstance(made, gym.Env):
        raise ConfigError(f"env.wrappers: {wrapper.name} gives no Gymnasium environment: {made!r}")
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
        raise ConfigError(
            f"env.id={env.id} on backend=gymnasium needs ale-py and opencv-python-headless: "
            f"pip install them, or use backend=envpool ({error})"
        ) from error
    fixed = emulator_settings(env)
    game = _make(env.model_copy(update={"max_episode_steps": None}), **fixed)
    return AtariEnv(game, env, informs)
