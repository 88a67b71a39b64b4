"""The textbook replay buffer, a deque of transitions: a baseline that exists to be measured.

Every observation is stored twice, and reaching into the middle of a deque takes time in proportion
to its length. Use buffer=uniform.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_pipeline.types import Batch, Continuous, EnvSpec, Step

# obs, action, reward summed over the window, discount, next_obs
Transition = tuple[np.ndarray, np.ndarray, float, float, np.ndarray]


class DequeBuffer:
    """`types.ReplayBuffer`; each of the last `capacity` transitions is equally likely.

    With `n_step` > 1 a transition is stored once its window is complete or its episode has ended.
    """

    lost = 0
    prioritized = False

    def __init__(
        self,
        spec: EnvSpec,
        capacity: int,
        n_step: int,
        gamma: float,
        seed: int,
        device: torch.device,
        send: Callable[[np.ndarray], Tensor] | None = None,
    ) -> None:
        """`send` copies an array to the device; on the CPU it may be a view."""
        self._send = send or (lambda array: torch.from_numpy(array).to(device))
        self._items: deque[Transition] = deque(maxlen=capacity)
        self._added = 0
        self._n_step, self._gamma, self._device = n_step, gamma, device
        self._open: list[deque[tuple[np.ndarray, np.ndarray, float]]] = [
            deque() for _ in range(spec.num_envs)
        ]
        """Per environment the steps whose windows are not complete."""
        self._rng = np.random.default_rng(seed)
        box = spec.action if isinstance(spec.action, Continuous) else None
        self._action_dtype = np.float32 if box else np.int64
        obs_bytes = int(np.prod(spec.obs_shape)) * np.dtype(spec.obs_dtype).itemsize
        action_bytes = 4 * int(np.prod(box.shape)) if box else 8
        self.nbytes = capacity * (2 * obs_bytes + action_bytes + 8)

    @property
    def size(self) -> int:
        """Transitions that can be drawn now."""
        return len(self._items)

    def add(
        self, obs: np.ndarray, action: np.ndarray, extras: dict[str, Tensor], step: Step
    ) -> None:
        """Store what became of obs [n, ...] and action [n, ...]; rows that only reset are not."""
        for row, env in enumerate(step.env_ids.tolist()):
            if not step.valid[row]:
                continue
            window = self._open[env]
            window.append((obs[row].copy(), action[row].copy(), float(step.reward[row])))
            terminated = bool(step.terminated[row])
            if terminated or step.truncated[row]:
                while window:
                    self._close(window, step.obs[row], terminated)
            elif len(window) == self._n_step:
                self._close(window, step.obs[row], False)

    def _close(self, window: deque, next_obs: np.ndarray, terminated: bool) -> None:
        """The transition from the window's first step to `next_obs`."""
        reward = sum(self._gamma**i * r for i, (_, _, r) in enumerate(window))
        discount = 0.0 if terminated else self._gamma ** len(window)
        obs, action, _ = window.popleft()
        self._items.append((obs, action, reward, discount, next_obs.copy()))
        self._added += 1

    def cut(self, env_ids: np.ndarray | None = None) -> None:
        """The next row of these environments (all) does not follow their newest."""
        for env in range(len(self._open)) if env_ids is None else env_ids.tolist():
            self._open[env].clear()

    def sample(self, batch_size: int, progress: float = 0.0) -> Batch:
        """Draw with replacement."""
        places = self._rng.integers(len(self._items), size=batch_size)
        columns = list(zip(*[self._items[i] for i in places.tolist()], strict=True))
        obs, action, next_obs = (np.stack(columns[i]) for i in (0, 1, 4))

        return Batch(
            obs=self._send(obs),
            action=self._send(action.astype(self._action_dtype, copy=False)),
            reward=self._send(np.array(columns[2], np.float32)),
            discount=self._send(np.array(columns[3], np.float32)),
            next_obs=self._send(next_obs),
            weight=torch.ones(batch_size, device=self._device),
            ids=places + (self._added - len(self._items)),
        )

    def update_priorities(self, ids: np.ndarray | Tensor, priorities: np.ndarray | Tensor) -> int:
        """Raise ValueError: all transitions are equally likely."""
        raise ValueError("priorities have no effect on buffer=deque")

    def close(self) -> None:
        """Nothing to free."""

    def state_dict(self) -> dict[str, Any]:
        """Contents, open windows and random state."""
        return {
            "items": _stack(list(self._items)),
            "open": [_stack(list(window)) for window in self._open],
            "added": self._added,
            "rng": self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Strict inverse of `state_dict`."""
        self._items.clear()
        self._items.extend(_unstack(state["items"]))
        for window, saved in zip(self._open, state["open"], strict=True):
            window.clear()
            window.extend(_unstack(saved))
        self._added = state["added"]
        self._rng.bit_generator.state = state["rng"]


def _stack(rows: list[tuple]) -> list[Tensor]:
    """Rows of arrays and floats as one tensor per column, which loads without running code."""
    return [torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True)]


def _unstack(columns: list[Tensor]) -> list[tuple]:
    arrays = [column.numpy() for column in columns]
    return [
        tuple(x[i].item() if x.ndim == 1 and x.dtype == np.float64 else x[i] for x in arrays)
        for i in range(len(arrays[0]) if arrays else 0)
    ]
