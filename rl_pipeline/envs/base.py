"""The half that all adapters share: one transition format, episode accounting, refusals."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode

from rl_pipeline.config.settings import EnvSettings
from rl_pipeline.envs.spaces import Flattener, read_actions
from rl_pipeline.errors import ConfigError
from rl_pipeline.types import Discrete, EnvSpec, Episode, MultiDiscrete, Step


def env_seeds(seed: int, num_envs: int) -> list[int]:
    """One independent 31-bit seed per environment (seed + i would share some between runs)."""
    return [int(s) >> 1 for s in np.random.SeedSequence(seed).generate_state(num_envs)]


# obs (nested, or a list of its parts, where it is flattened), reward, terminated, truncated as the
# library gave them, and where a full game ended: None is at every end; in a reset row it is a game
# that ended unseen before it.
RawStep = tuple[Any, np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]


LARGE = 2.0**20
"""Observations beyond this are warned of: float32 resolves them to 1/8 or worse."""


class BaseVecEnv(ABC):
    """`types.VecEnv` over a library that resets on the step after an end (NEXT_STEP).

    Raises ValueError for other autoreset modes, unsupported spaces, wrong actions and observations
    or rewards that are not finite.
    """

    spec: EnvSpec
    _ended: np.ndarray  # [N] bool, on the previous step
    _return_raw: np.ndarray
    _return_train: np.ndarray
    _started: np.ndarray
    """A game's length is the steps since it started; an end pushes that past the row that only
    resets."""

    def __init__(
        self,
        env: EnvSettings,
        *,
        backend: str,
        num_envs: int,
        observation_space: Space,
        action_space: Space,
        metadata: Mapping[str, Any],
        max_episode_steps: int | None,
        reuses_obs: bool,
        wide_obs: bool,
    ):
        """Spaces are those of one environment; `reuses_obs`: the library keeps its arrays;
        `wide_obs`: observations in float64 stay so, else they become float32."""
        task = env.envpool_id if backend == "envpool" else env.id
        self._name = f"env={env.name} ({task}, backend={backend})"
        mode = metadata.get("autoreset_mode")
        if mode != AutoresetMode.NEXT_STEP:
            raise ConfigError(
                f"{self._name} resets in mode {getattr(mode, 'name', mode)}; only NEXT_STEP is "
                "understood, where the step after an end resets"
            )
        self._flatten = None
        if env.flatten_obs:
            flat = np.float64 if wide_obs else np.float32
            self._flatten = Flattener(observation_space, self._name, flat)
            observation_space = spaces.Box(-np.inf, np.inf, (self._flatten.size,), flat)
        if not isinstance(observation_space, spaces.Box):
            raise ConfigError(
                f"{self._name} observes a {type(observation_space).__name__} space; only Box is "
                "supported: set env.flatten_obs=true to observe its parts as one vector"
            )
        dtype = observation_space.dtype
        narrowed = dtype == np.float64 and not wide_obs
        self._obs_dtype = np.dtype(np.float32) if narrowed else np.dtype(dtype)
        self._float_obs = self._obs_dtype.kind == "f"
        # Networks compute in float32: only a normaliser can make use of more.
        self._watches_size = not wide_obs and self._obs_dtype.itemsize >= 4
        action, self._first_action = read_actions(action_space, self._name)
        self._bounds = None
        if isinstance(action_space, spaces.Box):  # in the library's dtype: ours may round outwards
            self._bounds = action_space.low, action_space.high
        self._counts: Any = 2  # choices in each place of a discrete action
        if isinstance(action, Discrete | MultiDiscrete):
            self._counts = np.array(action.num_actions)
        few = isinstance(action, Discrete) and action.num_actions <= 4096
        self._legal = frozenset(range(self._counts)) if few else None
        self._action_shape = (num_envs, *action.shape)
        self._action_dtype = np.dtype(action_space.dtype)
        self._starts_at_zero = not np.any(self._first_action)
        self._reuses_obs = reuses_obs
        self.spec = EnvSpec(
            id=task or env.id,
            backend=backend,
            num_envs=num_envs,
            obs_shape=tuple(observation_space.shape),
            obs_dtype=self._obs_dtype,
            action=action,
            frame_skip=env.atari.frame_skip if env.atari else 1,
            max_episode_steps=max_episode_steps,
            obs_bounds=(observation_space.low.copy(), observation_space.high.copy()),
        )
        self._clip_reward = env.atari is not None and env.atari.clip_reward
        self._env_ids = np.arange(num_envs, dtype=np.int32)
        self._env_ids.flags.writeable = False  # every Step shares it
        self._ready = False
        self._sent = False
        self._closed = False
        self._num_steps = 0
        self._ends: list[tuple[np.ndarray, ...]] = []
        """Games that ended, one column per field of `Episode` and step; read by `pop_episodes`."""
        num_values = num_envs * math.prod(self.spec.obs_shape)
        # A dot product with ones costs half of a sum. Beyond 10,000 numbers BLAS would wake its
        # threads beside those of the environments.
        self._ones = np.ones(num_values if num_values <= 10_000 else 0, self._obs_dtype)
        self._ones_reward = np.ones(num_envs, np.float32)
        self._start_accounts()

    def reset(self) -> np.ndarray:
        """Start all episodes anew; returns obs [N, *obs_shape]. Unfinished games are forgotten."""
        if self._closed:
            raise RuntimeError(f"{self._name} is closed")
        if self._sent:
            self.recv()  # what is under way belongs to the episodes that end here
        obs = self._own(self._reset())
        expected = (self.spec.num_envs, *self.spec.obs_shape)
        if obs.shape != expected:
            raise ValueError(f"{self._name} observed shape {obs.shape}, its space says {expected}")
        if self._float_obs and not math.isfinite(np.add.reduce(obs, axis=None)):
            self._refuse_nonfinite("observation", obs)
        if self._watches_size:
            self._warn_of_size(obs)
        self._start_accounts()
        self._ready = True
        return obs

    def step(self, action: np.ndarray) -> Step:
        """`send` and `recv` in one."""
        self.send(action)
        return self.recv()

    def send(self, action: np.ndarray) -> None:
        """Start a step with one action each, [N, *action_shape]: integers from 0 on, or floats.

        Floats are clipped to the box. Raises ValueError for actions of another shape or kind, out
        of range or not finite; RuntimeError before the first `reset` or before the last step was
        received.
        """
        if not self._ready:
            raise RuntimeError(f"{self._name}: call reset() before step()")
        if self._sent:
            raise RuntimeError(f"{self._name}: call recv() before the next send()")
        self._send(self._checked(action))
        self._sent = True

    def recv(self) -> Step:
        """Wait for the step that was sent.

        Raises ValueError for observations or rewards that are not finite; RuntimeError without a
        step to wait for.
        """
        if not self._sent:
            raise RuntimeError(f"{self._name}: call send() before recv()")
        self._sent = False
        obs, given, terminated, truncated, game_ended = self._recv()
        self._num_steps += 1
        obs = self._own(obs)
        if self._reuses_obs:
            terminated, truncated = terminated.astype(bool), truncated.astype(bool)
        raw_reward = given.astype(np.float32)
        # A sum is finite where its terms are (where only the sum overflows, nothing is refused).
        total = raw_reward.dot(self._ones_reward)
        if self._float_obs:
            flat = obs.ravel("K")
            total += flat.dot(self._ones) if len(self._ones) else np.add.reduce(flat)
        if not math.isfinite(total):
            self._refuse_nonfinite("reward", raw_reward)
            self._refuse_nonfinite("observation", obs)
        if self._watches_size and (not self._float_obs or abs(total) > LARGE):
            self._warn_of_size(obs)
        # The call after an end only reset: its action was ignored and its reward is 0.
        valid = ~self._ended
        self._return_raw += given
        if self._clip_reward:
            reward = np.sign(raw_reward)
            self._return_train += reward
        else:
            reward = raw_reward.copy()
        self._ended = terminated | truncated
        # Looking for a 1 among the bytes costs a third of `any()`.
        any_ended = b"\1" in self._ended.tobytes()
        if game_ended is None:
            if any_ended:
                self._close_games(self._ended, self._num_steps + 1)
        else:
            if b"\1" in game_ended.tobytes():
                self._close_games(game_ended, self._num_steps)
            if any_ended:
                self._started += self._ended
        return Step(obs, reward, raw_reward, terminated, truncated, valid, self._env_ids)

    def pop_episodes(self) -> list[Episode]:
        """The full games that ended since the last call."""
        ends, self._ends = self._ends, []
        columns = ([column.tolist() for column in end] for end in ends)
        return [Episode(*game) for end in columns for game in zip(*end, strict=True)]

    def state(self) -> bytes | None:
        """None: this backend cannot say where its environments are."""
        return None

    def load_state(self, state: bytes) -> np.ndarray:
        """Refused where `state` is None."""
        raise ValueError(f"{self._name} cannot continue from a saved state")

    def close(self) -> None:
        """Free all resources; a second call does nothing."""
        if not self._closed:
            self._closed, self._ready = True, False
            self._close()

    @abstractmethod
    def _reset(self) -> np.ndarray:
        """Start new games everywhere; returns the library's own obs."""

    @abstractmethod
    def _send(self, action: np.ndarray) -> None:
        """Start the library's step with a checked action, if it can; else keep the action."""

    @abstractmethod
    def _recv(self) -> RawStep:
        """The library's step."""

    @abstractmethod
    def _close(self) -> None:
        """Free the library's resources; called once."""

    def _start_accounts(self) -> None:
        num_envs = self.spec.num_envs
        self._ended = np.zeros(num_envs, dtype=bool)
        self._return_raw = np.zeros(num_envs)
        self._return_train = np.zeros(num_envs) if self._clip_reward else self._return_raw
        self._started = np.full(num_envs, self._num_steps)

    def _accounts(self) -> dict[str, Any]:
        """The attributes that a saved state brings back."""
        names = "_ended _return_raw _return_train _started _num_steps _ends _ready"
        return {name: getattr(self, name) for name in names.split()}

    def _close_games(self, game_ended: np.ndarray, next_start: int) -> None:
        ids = game_ended.nonzero()[0]
        length = self._num_steps - self._started[ids]
        self._ends.append((ids, self._return_raw[ids], self._return_train[ids], length))
        self._return_raw[ids] = 0
        if self._clip_reward:
            self._return_train[ids] = 0
        self._started[ids] = next_start

    def _own(self, obs: Any) -> np.ndarray:
        """The library's obs in the learner's dtype, as an array that nobody else writes to."""
        if self._flatten is not None:
            return self._flatten(obs)
        return obs.astype(self._obs_dtype, copy=self._reuses_obs)

    def _checked(self, action: np.ndarray) -> np.ndarray:
        """A copy of the action in the library's dtype: an environment may write into its own.

        A wrong one would step silently, or abort EnvPool.
        """
        action = np.asarray(action)
        if action.shape != self._action_shape:
            raise ValueError(
                f"{self._name}: action has shape {action.shape}, expected {self._action_shape}"
            )
        if self._bounds is None:
            if action.dtype.kind not in "iu" or not self._in_range(action):
                self._refuse_discrete(action)
            if self._starts_at_zero:
                return action.astype(self._action_dtype)
            return (action + self._first_action).astype(self._action_dtype)
        if action.dtype.kind not in "fiu":
            raise ValueError(f"{self._name}: action has dtype {action.dtype}, expected floats")
        if not math.isfinite(np.add.reduce(action, axis=None)):
            self._refuse_nonfinite("action", action)
        low, high = self._bounds
        return np.minimum(np.maximum(action, low), high).astype(self._action_dtype, copy=False)

    def _in_range(self, action: np.ndarray) -> bool:
        if self._legal is None:
            return bool(((action >= 0) & (action < self._counts)).all())
        if len(action) <= 64:  # numpy is slower on so few numbers
            return self._legal.issuperset(action.tolist())
        # Seen as unsigned, a negative number is too large.
        unsigned = action.view(np.dtype(f"u{action.itemsize}"))
        return bool(np.maximum.reduce(unsigned) < len(self._legal))

    def _refuse_discrete(self, action: np.ndarray) -> NoReturn:
        bad = np.zeros(action.shape, dtype=bool)
        if action.dtype.kind in "iuf":
            bad = ~((action >= 0) & (action < self._counts) & (action == np.floor(action)))
        env = int(bad.reshape(len(action), -1).any(1).argmax())  # 0 where only the dtype is wrong
        raise ValueError(
            f"{self._name}: action of environment {env} is {action[env]} ({action.dtype}), "
            f"expected an integer from 0 to {self._counts - 1}"
        )

    def _warn_of_size(self, obs: np.ndarray) -> None:
        """Say once which observation is so large that float32 loses what changes in it."""
        if obs.max(initial=0) <= LARGE and obs.min(initial=0) >= -LARGE:
            return
        self._watches_size = False
        env, *place = np.argwhere((obs > LARGE) | (obs < -LARGE))[0].tolist()
        value = obs[(env, *place)]
        where = f"dimension {place[0] if len(place) == 1 else place}" if place else "value"
        if self._flatten is not None:
            where += f" ({self._flatten.name_of(place[0])})"
        warnings.warn(
            f"{self._name}: observation {where} is {value:.9g}; in float32, in which networks "
            f"compute, changes below {np.spacing(np.float32(abs(value))):.3g} are lost there. Set "
            "algo.normalize_obs=true (algo=ppo), or subtract its offset in env.wrappers",
            stacklevel=4,
        )

    def _refuse_nonfinite(self, what: str, values: np.ndarray) -> None:
        """Raise where a value is NaN or infinite; return where only the sum overflowed."""
        bad = np.argwhere(~np.isfinite(values))
        if len(bad):
            env, *place = bad[0].tolist()
            where = f" (at {place})" if place else ""
            raise ValueError(
                f"{self._name}: {what} of environment {env} is {values[tuple(bad[0])]}{where} at "
                f"step {self._num_steps} of the run; it must be finite"
                + ("; a policy that diverges does this" if what == "action" else "")
            )
