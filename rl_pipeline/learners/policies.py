"""Policies: networks and exploration that act, apart from what learns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rl_pipeline.engine.flat import FlatParameters, LowCopy
from rl_pipeline.engine.phases import NullPhases, Phases
from rl_pipeline.engine.runtime import Runtime
from rl_pipeline.learners.distributions import Distribution
from rl_pipeline.learners.networks import ActorCritic, Floats, QNetwork, Trunk
from rl_pipeline.learners.normalizers import Identity, ObsNormalizer
from rl_pipeline.types import Extras


class NetworkPolicy:
    """Base of the policies that have a network; the parameters may be the learner's own."""

    extras: tuple[str, ...] = ()

    def __init__(self, params: FlatParameters, runtime: Runtime, phases: Phases | NullPhases):
        self.params, self.version = params, 0
        self._runtime, self._phases = runtime, phases

    def pull(self, values: Tensor, version: int) -> None:
        """Act with a copy of `values` [P] from now on, which `version` updates made."""
        self.params.load(values)
        self.version = version

    def _low_trunk(self, net: nn.Module) -> LowCopy | None:
        """The trunks' parameters in the type that they compute in; the heads are float32."""
        names = [
            f"{name}.{part}" for name, module in net.named_modules() if isinstance(module, Trunk)
            for part, _ in module.named_parameters()
        ]  # fmt: skip
        return self._runtime.low_copy(self.params, names)

    def _to_device(self, obs: np.ndarray) -> Tensor:
        if self._runtime.device.type == "cpu":
            return torch.from_numpy(obs)
        with self._phases("h2d"):
            return self._runtime.transfers.to_device(obs)

    def _to_host(self, action: Tensor) -> np.ndarray:
        with self._phases("d2h"):
            return self._runtime.transfers.to_host(action)


class ActorCriticPolicy(NetworkPolicy):
    """Samples from the distribution that an actor-critic network gives.

    A small network acts in numpy on the CPU, its actor alone; who learns takes log-probs and
    values of all rows at once then, so there are no `extras`.
    """

    def __init__(
        self,
        net: ActorCritic,
        params: FlatParameters,
        dist: Distribution,
        normalize: ObsNormalizer | Identity,
        runtime: Runtime,
        phases: Phases | NullPhases,
    ) -> None:
        """`params` are those of `net`."""
        super().__init__(params, runtime, phases)
        self._net, self._dist, self._normalize = net, dist, normalize
        self.rng = runtime.generator("act")
        self._forward, self._log_std = None, None
        if runtime.device.type == "cpu":
            self._forward = numpy_forward(net.policy_trunk, net.policy_head)
            self._log_std = None if net.log_std is None else net.log_std.detach().numpy()
        self.extras = ("log_prob", "value") if self._forward is None else ()
        self._noise = torch.empty(0)
        self._low = self._low_trunk(net)
        self._act = runtime.compile("act", self._sample, [params], self._low)

    def act(self, obs: np.ndarray, progress: float) -> tuple[np.ndarray, Extras]:
        """Sample actions for obs [N, ...]; `extras` [N] each stay on the device."""
        if self._forward is None:
            return self._act_torch(obs)
        params = self._forward(self._normalize.numpy(obs))
        if len(self._noise) != len(obs):
            self._noise = torch.empty(params.shape)
            self._noise_array = self._noise.numpy()
        self._dist.draw(self._noise, self.rng)
        return self._dist.sample_numpy(params, self._noise_array, self._log_std), {}

    @torch.inference_mode()
    def _act_torch(self, obs: np.ndarray) -> tuple[np.ndarray, Extras]:
        noise = self._dist.noise(len(obs), self.rng)
        if self._low is not None:
            self._low.follow(self.version)
        action, log_prob, value = self._act(self._to_device(obs), noise, *self._normalize.tensors)
        return self._to_host(action), {"log_prob": log_prob, "value": value}

    @torch.inference_mode()
    def act_greedy(self, obs: np.ndarray) -> np.ndarray:
        """Mode of the policy for obs [N, ...]."""
        if self._forward is not None:
            return self._dist.mode_numpy(self._forward(self._normalize.numpy(obs)))
        params = self._net.policy(self._normalize(self._to_device(obs)))
        return self._dist.mode(params).cpu().numpy()

    def _sample(self, obs: Tensor, noise: Tensor, *stats: Tensor) -> tuple[Tensor, ...]:
        params, value = self._net(self._normalize.apply(obs, *stats))
        action = self._dist.sample(params, noise)
        return action, self._dist.log_prob(params, action), value


class QPolicy(NetworkPolicy):
    """The action of the highest value, or, by exploration, another."""

    def __init__(
        self,
        net: QNetwork,
        params: FlatParameters,
        explore: EpsilonGreedy,
        runtime: Runtime,
        phases: Phases | NullPhases,
    ) -> None:
        """`params` are those of `net`."""
        super().__init__(params, runtime, phases)
        self._net, self.explore = net, explore
        # A small network acts in float32 on the CPU whatever the precision of the updates.
        self._forward = numpy_forward(net) if runtime.device.type == "cpu" else None
        self._low = self._low_trunk(net)
        self._act = runtime.compile("act", self._best, [params], self._low)

    def act(self, obs: np.ndarray, progress: float) -> tuple[np.ndarray, Extras]:
        """Epsilon-greedy actions [N] for obs [N, ...] at `progress` in [0, 1] of the run."""
        return self.explore(obs, progress, self._act_best), {}

    def _act_best(self, obs: np.ndarray) -> np.ndarray:
        if self._forward is not None:
            return self._forward(obs).argmax(-1)
        if self._low is not None:
            self._low.follow(self.version)
        with torch.inference_mode():
            (action,) = self._act(self._to_device(obs))
            return self._to_host(action)

    @torch.inference_mode()
    def act_greedy(self, obs: np.ndarray) -> np.ndarray:
        """The actions [N] of highest value for obs [N, ...]: epsilon is 0."""
        if self._forward is not None:
            return self._forward(obs).argmax(-1)
        return self._best(self._to_device(obs))[0].cpu().numpy()

    def _best(self, obs: Tensor) -> tuple[Tensor, ...]:
        return (self._net(obs).argmax(-1),)


def numpy_forward(*modules: nn.Module) -> Callable[[np.ndarray], np.ndarray] | None:
    """The forward pass of MLPs in a row in numpy, or None where one has other layers.

    It reads the parameters in place (they must live on the CPU): nothing is copied, and the next
    call sees the next update. One observation: 7 microseconds, 36 through torch. Equal to torch's
    result up to rounding.
    """
    layers: list[Any] = []
    for layer in (layer for module in modules for layer in module.modules()):
        match layer:
            case nn.Linear():
                layers.append((layer.weight.detach().numpy().T, layer.bias.detach().numpy()))
            case nn.ReLU():
                layers.append("relu")
            case nn.Tanh():
                layers.append("tanh")
            case Floats():
                pass
            case _ if not list(layer.children()):
                return None

    def forward(obs: np.ndarray) -> np.ndarray:
        x = obs.reshape(len(obs), -1).astype(np.float32, copy=False)
        for layer in layers:
            if layer == "relu":
                np.maximum(x, 0, out=x)
            elif layer == "tanh":
                np.tanh(x, out=x)
            else:
                weight, bias = layer
                x = x @ weight
                x += bias
        return x

    return forward


class EpsilonGreedy:
    """The best action, or with probability epsilon any: epsilon falls linearly, then stays."""

    def __init__(
        self,
        num_actions: int,
        start: float,
        end: float,
        fraction: float,
        rng: np.random.Generator,
    ) -> None:
        """`fraction`: progress at which epsilon has gone from `start` to `end`."""
        self._num_actions, self._start, self._end = num_actions, start, end
        self._fraction = fraction
        self.rng = rng

    def epsilon(self, progress: float) -> float:
        """The probability of a random action at `progress` in [0, 1] of the run."""
        if progress >= self._fraction:
            return self._end
        return self._start + (self._end - self._start) * (progress / self._fraction)

    def __call__(
        self, obs: np.ndarray, progress: float, greedy: Callable[[np.ndarray], np.ndarray]
    ) -> np.ndarray:
        """Actions [N] for obs [N, ...]; `greedy` is not asked where all actions are random."""
        epsilon = self.epsilon(progress)
        draw = self.rng.random(len(obs))
        explore = draw < epsilon
        count = np.count_nonzero(explore)
        if not count:
            return greedy(obs)
        # Below epsilon the same number is uniform once more: it also chooses the action.
        any_action = (draw * (self._num_actions / epsilon)).astype(np.int64)
        np.minimum(any_action, self._num_actions - 1, out=any_action)
        if count == len(obs):
            return any_action
        return np.where(explore, any_action, greedy(obs))
