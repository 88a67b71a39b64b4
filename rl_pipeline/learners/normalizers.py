"""Running statistics of observations and returns."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

CLIP = 10.0


class RunningMoments:
    """Mean and variance of a stream, merged batch by batch in float64 (Chan et al. 1983)."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.mean = torch.zeros(shape, dtype=torch.float64, device=device)
        self.m2 = torch.zeros(shape, dtype=torch.float64, device=device)
        self.count = torch.zeros((), dtype=torch.float64, device=device)

    def update(self, x: Tensor, valid: Tensor) -> None:
        """Merge the rows of x [B, *shape] whose `valid` [B] is True."""
        weight = valid.double().view(-1, *[1] * self.mean.dim())
        x = torch.where(weight > 0, x.double(), 0)
        count = weight.sum().clamp(min=1e-12)
        mean = x.sum(0) / count
        m2 = (weight * (x - mean) ** 2).sum(0)
        total = self.count + count
        delta = mean - self.mean
        self.m2 += m2 + delta**2 * self.count * count / total
        self.mean += delta * count / total
        self.count += weight.sum()

    @property
    def variance(self) -> Tensor:
        """Population variance; 1 before the first row, so that nothing is scaled yet."""
        return torch.where(self.count > 0, self.m2 / self.count.clamp(min=1), 1.0)

    def state_dict(self) -> dict[str, Tensor]:
        """Moments."""
        return {n: getattr(self, n).to("cpu", copy=True) for n in ("mean", "m2", "count")}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Inverse of `state_dict`."""
        for name in ("mean", "m2", "count"):
            getattr(self, name).copy_(state[name])


class ObsNormalizer:
    """(obs - mean) / std, clipped to +-10.

    The statistics move only in `update`, between gradient updates: acting and learning on one
    rollout see the same ones, so that the first importance ratio is exactly 1. The sources move
    them at every step. The true last observation of an episode never enters them, as in
    Stable-Baselines3's VecNormalize; CleanRL's wrapper takes it in. Measured under a random policy,
    that shifts a mean by at most 0.02 standard deviations and a standard deviation by at most 1 %
    on HalfCheetah, Acrobot and MountainCar, but 0.09 and 8 % on Hopper, and up to 20 % in one
    dimension of BipedalWalker, whose episodes end in unusual places.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.moments = RunningMoments(shape, device)
        self._refresh()

    def _refresh(self) -> None:
        self._mean = self.moments.mean.clone()
        self._scale = (self.moments.variance + 1e-8).rsqrt().float()
        if self._mean.device.type == "cpu":
            self._arrays = self._mean.numpy(), self._scale.numpy()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that `apply` needs beside obs; arguments of graphs, so that they can move."""
        return (self._mean, self._scale)

    @staticmethod
    def apply(obs: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        """obs [B, *shape] -> float32 of the same shape."""
        # The mean is in float64, and so is the difference: 1.7e9 + 1 is 1.7e9 in float32.
        return ((obs - mean).float() * scale).clamp(-CLIP, CLIP)

    def __call__(self, obs: Tensor) -> Tensor:
        """`apply` with the statistics of now."""
        return self.apply(obs, *self.tensors)

    def numpy(self, obs: np.ndarray) -> np.ndarray:
        """The same in numpy, where the statistics are on the CPU."""
        mean, scale = self._arrays
        x = (obs - mean).astype(np.float32)
        x *= scale
        return np.minimum(np.maximum(x, -CLIP, out=x), CLIP, out=x)

    def update(self, obs: Tensor, valid: Tensor) -> None:
        """Take in the rows of obs [B, *shape] that are valid."""
        self.moments.update(obs, valid)
        self._refresh()

    def state_dict(self) -> dict[str, Tensor]:
        """Moments."""
        return self.moments.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Inverse of `state_dict`."""
        self.moments.load_state_dict(state)
        self._refresh()


class Identity:
    """The normaliser that does nothing."""

    tensors: tuple[Tensor, ...] = ()

    @staticmethod
    def apply(obs: Tensor) -> Tensor:
        """obs as it is."""
        return obs

    def __call__(self, obs: Tensor) -> Tensor:
        """obs as it is."""
        return obs

    def numpy(self, obs: np.ndarray) -> np.ndarray:
        """obs as it is."""
        return obs

    def update(self, obs: Tensor, valid: Tensor) -> None:
        """Nothing to learn."""

    def state_dict(self) -> dict[str, Tensor]:
        """No state."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """No state."""


class RewardNormalizer:
    """Rewards over the running standard deviation of each environment's discounted return.

    A rollout's own rewards move the deviation before all of them are divided by it; the sources
    move it at every step, beginning from next to nothing: their first rewards are clipped at 10.
    Measured under a random policy, the two scales differ by a factor of 2 to 80 on average in the
    first rollout, by 4 to 15 % in the second (MountainCar 30 %) and by 3 % or less from the tenth.
    """

    def __init__(self, num_envs: int, gamma: float, device: torch.device) -> None:
        self.moments = RunningMoments((), device)
        self._gamma = gamma
        self._returns = torch.zeros(num_envs, dtype=torch.float64, device=device)

    def __call__(self, reward: Tensor, ended: Tensor, valid: Tensor) -> Tensor:
        """reward, ended, valid [T, N] -> scaled rewards [T, N], clipped to +-10."""
        reward = torch.where(valid, reward, 0)
        returns, rows = self._returns, []
        for t in range(reward.shape[0]):
            returns = returns * self._gamma + reward[t]
            rows.append(returns)
            returns = torch.where(ended[t], 0, returns)
        self._returns = returns
        self.moments.update(torch.stack(rows).flatten(), valid.flatten())
        scale = (self.moments.variance + 1e-8).rsqrt().float()
        return (reward * scale).clamp(-CLIP, CLIP)

    def state_dict(self) -> dict[str, Tensor]:
        """Moments and the running returns."""
        return {**self.moments.state_dict(), "returns": self._returns.to("cpu", copy=True)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Inverse of `state_dict`."""
        self.moments.load_state_dict(state)
        self._returns = state["returns"].to(self._returns.device, copy=True)


class RawReward:
    """The reward normaliser that does nothing."""

    def __call__(self, reward: Tensor, ended: Tensor, valid: Tensor) -> Tensor:
        """Reward as it is."""
        return reward

    def state_dict(self) -> dict[str, Tensor]:
        """No state."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """No state."""
