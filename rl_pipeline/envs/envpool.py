"""EnvPool's C++ thread pool, in its synchronous mode."""

from __future__ import annotations

import difflib
import warnings
from copy import deepcopy
from typing import Any

import numpy as np

from rl_pipeline.config.settings import EnvSettings
from rl_pipeline.envs.base import BaseVecEnv, RawStep, env_seeds
from rl_pipeline.errors import ConfigError

# Where an argument of EnvPool's is set in our configuration.
_OURS = {
    "num_envs": "backend.num_envs",
    "batch_size": "backend.num_envs",
    "num_threads": "backend.num_threads",
    "seed": "seed",
    "env_seed": "seed",
    "max_episode_steps": "env.max_episode_steps",
}
_OURS_ATARI = {
    "frame_skip": "env.atari.frame_skip",
    "stack_num": "env.atari.frame_stack",
    "img_height": "env.atari.screen_size",
    "img_width": "env.atari.screen_size",
    "noop_max": "env.atari.noop_max",
    "use_fire_reset": "env.atari.fire_reset",
    "episodic_life": "env.atari.episodic_life",
    "reward_clip": "env.atari.clip_reward",
    "repeat_action_probability": "env.atari.sticky_actions",
}
_NO_LIMIT = 2**31 - 1


class EnvPoolVecEnv(BaseVecEnv):
    """EnvPool tasks. Its arrays are handed over, never written again, so nothing is copied.

    EnvPool cannot export its state: `state()` is None.
    """

    def __init__(
        self, env: EnvSettings, num_envs: int, seed: int, num_threads: int, wide_obs: bool = False
    ) -> None:
        """Raise ValueError for an id, package or constructor argument that does not work here."""
        self._atari = env.kind == "atari"
        self._episodic_life = env.atari is not None and env.atari.episodic_life
        with warnings.catch_warnings():
            # EnvPool declares its bounds in float64 and its spaces in float32.
            warnings.filterwarnings("ignore", message=".*Box (low|high)'s precision lowered")
            self._pool = _make(env, num_envs, seed, num_threads)
            limit = int(self._pool.config["max_episode_steps"])
            super().__init__(
                env,
                backend="envpool",
                num_envs=num_envs,
                observation_space=self._pool.observation_space,
                action_space=self._pool.action_space,
                metadata=self._pool.metadata,
                max_episode_steps=limit if 0 < limit < _NO_LIMIT else None,
                reuses_obs=False,
                wide_obs=wide_obs,
            )
        # EnvPool's Python layer around these two calls costs 20 microseconds a step. `_send` does
        # not copy the actions: it is given an array that nobody else has.
        self._pool_send, self._pool_recv = self._pool._send, self._pool._recv
        assert self._pool._spec._action_keys[:2] == ["env_id", "players.env_id"]
        self._pool_ids = np.arange(num_envs, dtype=np.int32)
        self._action_dtype = np.dtype(self._pool._spec._action_spec[-1][0])
        names: list[str] = list(self._pool._state_keys)
        wanted = ["reward", "done", "trunc"]
        if self._atari:
            wanted += ["info:lives", "info:reward", "info:terminated"]
        self._first_part = len(wanted) - 3
        # A lone part has a name of its own that its space does not tell.
        lone = next(name for name in names if name.startswith("obs"))
        paths = self._flatten.paths if self._flatten is not None else [()]
        wanted += [f"obs:{'.'.join(path)}" if path else lone for path in paths]
        self._places = tuple(names.index(name) for name in wanted)

    def _reset(self) -> np.ndarray:
        obs, info = self._pool.reset()
        if self._atari:
            self._lives = info["lives"]
        return obs

    def _send(self, action: np.ndarray) -> None:
        self._sent_action = np.ascontiguousarray(action)  # EnvPool reads it while it steps
        self._pool_send([self._pool_ids, self._pool_ids, self._sent_action])

    def _recv(self) -> RawStep:
        state = self._pool_recv()
        reward, done, truncated, *rest = [state[place] for place in self._places]
        terminated = done & ~truncated
        obs: Any = rest[self._first_part :]
        if self._flatten is None:
            obs = obs[0]
        if not self._atari:
            return obs, reward, terminated, truncated, None
        lives, raw_reward, game_over = rest[:3]
        # A game can also end in the no-ops after a life: only the new lives tell.
        unseen = self._ended & (lives > self._lives) & (self._started <= self._num_steps)
        # An end in exactly the limit's step is a truncation to EnvPool: the infos tell of it.
        terminated |= game_over != 0
        if self._episodic_life:
            terminated |= truncated & (lives > 0) & (lives < self._lives)
        self._lives = lives
        return obs, raw_reward, terminated, truncated, (game_over != 0) | truncated | unseen

    def _close(self) -> None:
        self._pool.close()
        del self._pool, self._pool_send, self._pool_recv  # joins its threads


def _make(env: EnvSettings, num_envs: int, seed: int, num_threads: int) -> Any:
    try:
        import envpool
    except ImportError as error:
        raise ConfigError(
            f"backend=envpool needs the package envpool (Linux only), which does not import here "
            f"({error}): pip install envpool, or use backend=gymnasium"
        ) from error
    task = env.envpool_id
    known = envpool.list_all_envs()
    if task not in known:
        near = difflib.get_close_matches(str(task), known, n=3)
        hint = f"near matches: {', '.join(near)}" if near else "see envpool.list_all_envs()"
        raise ConfigError(
            f"env.envpool_id={task} does not exist in EnvPool; {hint}; or use backend=gymnasium"
        )
    arguments = {
        "num_envs": num_envs,
        "seed": env_seeds(seed, num_envs),
        "num_threads": num_threads,
    }
    if env.max_episode_steps is not None:
        arguments["max_episode_steps"] = env.max_episode_steps
    ours = dict(_OURS)
    if env.kind == "atari":
        arguments |= _atari_arguments(env)
        ours |= _OURS_ATARI
    if env.kwargs:
        accepted = set(envpool.make_spec(task).config._fields) - ours.keys()
        for key in env.kwargs:
            if key in ours:
                raise ConfigError(f"env.kwargs.{key} cannot be set; use {ours[key]}")
            if key not in accepted:
                raise ConfigError(
                    f"env.kwargs.{key} is not known to EnvPool's {task}; it accepts "
                    f"{', '.join(sorted(accepted))}"
                )
    try:
        return envpool.make(task, env_type="gymnasium", **arguments, **deepcopy(env.kwargs))
    except ImportError as error:  # a system library: Procgen wants Qt
        raise ConfigError(f"EnvPool's {task} does not start here: {error}") from error
    except TypeError as error:
        if not env.kwargs:
            raise
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"env.kwargs={env.kwargs} do not fit EnvPool's {task}: {reason}"
        ) from error


def _atari_arguments(env: EnvSettings) -> dict[str, Any]:
    atari = env.atari
    assert atari is not None
    if atari.noop_max == 0:
        # Its distribution over an empty range is undefined behaviour.
        raise ConfigError(
            "env.atari.noop_max=0 does not work on backend=envpool; use 1 (FIRE counts as one) or "
            "backend=gymnasium"
        )
    return {
        "max_episode_steps": env.max_episode_steps or 108_000 // atari.frame_skip,
        "frame_skip": atari.frame_skip,
        "stack_num": atari.frame_stack,
        "img_height": atari.screen_size,
        "img_width": atari.screen_size,
        "noop_max": atari.noop_max,
        "use_fire_reset": atari.fire_reset,
        "episodic_life": atari.episodic_life,
        "reward_clip": False,  # clipped in base.py, where the raw reward is kept
        "repeat_action_probability": atari.sticky_actions,
    }
