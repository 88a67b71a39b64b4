"""The words that all rooms share: a step, an episode, an environment's spec, and the seams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Discrete:
    """Actions 0 .. num_actions - 1, whatever the library starts to count at."""

    num_actions: int
    shape = ()
    """Shape of one action; each kind has one, and the dtype in which its actions are kept."""
    dtype = np.dtype(np.int64)


@dataclass(frozen=True)
class MultiDiscrete:
    """Several independent choices: the i-th is one of 0 .. num_actions[i] - 1."""

    num_actions: tuple[int, ...]
    dtype = np.dtype(np.int64)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one action."""
        return (len(self.num_actions),)


@dataclass(frozen=True)
class MultiBinary:
    """Independent bits, each 0 or 1."""

    num_bits: int
    dtype = np.dtype(np.int64)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one action."""
        return (self.num_bits,)


@dataclass(frozen=True)
class Continuous:
    """Actions in a box; `low` and `high` have the shape of one action."""

    low: np.ndarray
    high: np.ndarray
    dtype = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one action."""
        return self.low.shape


class StateError(ValueError):
    """A saved state that environments cannot continue from; they are as they were before."""


ActionSpace = Discrete | MultiDiscrete | MultiBinary | Continuous


@dataclass(frozen=True)
class EnvSpec:
    """Outside view of a vector of identical environments."""

    id: str
    backend: str
    num_envs: int
    obs_shape: tuple[int, ...]
    obs_dtype: np.dtype
    action: ActionSpace
    frame_skip: int = 1
    """Emulator frames per agent step (4 for the standard Atari preprocessing, else 1)."""
    max_episode_steps: int | None = None
    """Time limit in agent steps."""
    obs_bounds: tuple[np.ndarray, np.ndarray] | None = field(default=None, compare=False)
    """Lowest and highest observation that the space allows, [*obs_shape] each; None: unknown."""


class Step(NamedTuple):
    """The answer of N environments to one action each (NEXT_STEP autoreset).

    At an end, `obs` is the true last observation. The environment's next row only resets: its
    action was ignored, its reward is 0, `valid` is False and `obs` is the first of a new episode.
    """

    obs: np.ndarray  # [N, *obs_shape]; never overwritten by a later step
    reward: np.ndarray  # [N] float32, what the learner sees (sign-clipped on Atari)
    raw_reward: np.ndarray  # [N] float32, what the environment gave
    terminated: np.ndarray  # [N] bool; on Atari also the loss of a life
    truncated: np.ndarray  # [N] bool
    valid: np.ndarray  # [N] bool
    env_ids: np.ndarray  # [N] int32


class Episode(NamedTuple):
    """One finished full game (all lives)."""

    env_id: int
    return_raw: float
    """Sum of the untransformed rewards: the score."""
    return_train: float
    """Sum of the rewards that the learner saw."""
    length: int
    """Agent steps."""


Metrics = Mapping[str, "torch.Tensor | float"]
Extras = dict[str, "torch.Tensor"]
"""Tensors that a policy wants stored beside a step, [n] each."""


class Batch(NamedTuple):
    """B transitions drawn from replay, on the learner's device.

    With n-step returns a transition spans k <= n steps: fewer where its episode or the data ended.
    Frame stacks of obs and next_obs may share memory: they are for reading.
    """

    obs: torch.Tensor  # [B, *obs_shape], as stored
    action: torch.Tensor  # [B, *action_shape], int64 or float32
    reward: torch.Tensor  # [B] float32: sum of gamma^i r_i over the k steps
    discount: torch.Tensor  # [B] float32: gamma^k, or 0 where the episode terminated
    next_obs: torch.Tensor  # [B, *obs_shape]: k steps on; the true last observation at an end
    weight: torch.Tensor  # [B] float32 importance weights; 1 for uniform sampling
    ids: np.ndarray | torch.Tensor
    """[B] int64, never used twice in a run: a priority for a transition that has been overwritten
    meanwhile is recognised and dropped."""


class SequenceBatch(NamedTuple):
    """B sequences of L rows drawn from replay, time-major, for recurrent learners.

    A sequence stays within its episode: from the row after an end, `mask` is 0 and all else 0.
    """

    obs: torch.Tensor  # [L + 1, B, *obs_shape]; obs[t + 1] is where row t led
    action: torch.Tensor  # [L, B, *action_shape], int64 or float32
    reward: torch.Tensor  # [L, B] float32
    discount: torch.Tensor  # [L, B] float32: gamma, or 0 where the episode terminated
    mask: torch.Tensor  # [L, B] float32: 1 on rows of the sequence; multiply the loss by it
    state: dict[str, torch.Tensor]  # [B, ...] each: recurrent state stored with the first row
    burn_in: int
    """The first rows warm up the state and are not learnt from."""
    weight: torch.Tensor  # [B] float32 importance weights
    ids: np.ndarray | torch.Tensor  # [B] int64, of the first rows


class VecEnv(Protocol):
    """N environments stepped together."""

    spec: EnvSpec

    def reset(self) -> np.ndarray:
        """Start all episodes anew; returns obs [N, *obs_shape]."""

    def send(self, action: np.ndarray) -> None:
        """Start a step with action [N, *action_shape]: integers, or floats that are clipped."""

    def recv(self) -> Step:
        """Wait for the step that was sent."""

    def step(self, action: np.ndarray) -> Step:
        """`send` and `recv`."""

    def pop_episodes(self) -> list[Episode]:
        """The full games that ended since the last call."""

    def state(self) -> bytes | None:
        """Everything needed to continue exactly, or None where the backend cannot say."""

    def load_state(self, state: bytes) -> np.ndarray:
        """Continue from `state`; returns the current obs.

        Raises StateError, with nothing changed and nothing executed, where that cannot be.
        """

    def close(self) -> None:
        """Free all resources; a second call does nothing."""


class ReplayBuffer(Protocol):
    """Transitions of many past policies, drawn at random."""

    @property
    def prioritized(self) -> bool:
        """It draws by priorities, and wants the new ones of what it drew."""

    @property
    def nbytes(self) -> int:
        """Bytes of storage."""

    @property
    def size(self) -> int:
        """Transitions that can be drawn now."""

    def add(self, obs: np.ndarray, action: np.ndarray, extras: Extras, step: Step) -> None:
        """Store the next row of the step's environments (`step.env_ids`, in any order).

        obs [n, ...] and action [n, ...] are what was done, `step` its outcome. Rows whose `valid`
        is False only reset; their obs is the true last observation of the episode before.
        """

    def cut(self, env_ids: np.ndarray | None = None) -> None:
        """Say that the next row of these environments (all) does not follow their newest."""

    def sample(self, batch_size: int, progress: float = 0.0) -> Batch:
        """Draw with replacement; `progress` in [0, 1] of the run drives schedules (beta)."""

    def update_priorities(
        self, ids: np.ndarray | torch.Tensor, priorities: np.ndarray | torch.Tensor
    ) -> int | torch.Tensor:
        """Set the priorities [B] of drawn transitions; returns how many still existed."""

    @property
    def lost(self) -> int:
        """Transitions that `load_state_dict` could not bring back (overwritten files)."""

    def state_dict(self) -> dict[str, Any]:
        """Contents, cursors, priorities and random state, on the CPU."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Strict inverse of `state_dict`."""

    def close(self) -> None:
        """Free threads and files; a second call does nothing."""


class Policy(Protocol):
    """Acts: with the learner's own parameters where both take turns, else with a copy of them."""

    @property
    def extras(self) -> tuple[str, ...]:
        """Names of what `act` wants stored beside each step."""

    @property
    def version(self) -> int:
        """Number of this session's updates that made the parameters it acts with."""

    def act(self, obs: np.ndarray, progress: float) -> tuple[np.ndarray, Extras]:
        """Actions [N, ...] for obs [N, ...], with exploration, and what is stored beside them.

        `progress` in [0, 1] of the run drives schedules.
        """

    def act_greedy(self, obs: np.ndarray) -> np.ndarray:
        """Best actions for obs [N, ...], as evaluation uses them."""


class Learner(Protocol):
    """Owns parameters, optimizer and normalisers."""

    @property
    def policy(self) -> Policy:
        """Acts with what was learnt last."""

    def skipped_updates(self) -> int:
        """Updates of this run refused for gradients that were not finite; waits for the device.

        Raises FloatingPointError where most of them are.
        """

    def state_dict(self) -> dict[str, Any]:
        """All that training needs to continue, on the CPU."""

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Strict inverse of `state_dict`; False where random streams had to begin anew."""


class RolloutLearner(Learner, Protocol):
    """Learns from what its present policy has just done."""

    def update(self, batch: Any, progress: float) -> tuple[Metrics, int]:
        """Learn from one batch; returns what it said and how many optimizer steps it took.

        `progress` in [0, 1] drives the schedules.
        """


class ReplayLearner(Learner, Protocol):
    """Learns from what any policy has done."""

    def update(self, batch: Batch, progress: float) -> torch.Tensor:
        """One optimizer step; returns the new priorities [B] of the batch."""

    def metrics(self, progress: float) -> Metrics:
        """Means over the updates since the last call; called at the log tick only."""
