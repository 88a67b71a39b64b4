"""Deep Q-learning (Mnih et al. 2015, doi:10.1038/nature14236) on any replay buffer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_pipeline.config.settings import DQNSettings, NetworkSettings
from rl_pipeline.engine.flat import FlatParameters
from rl_pipeline.engine.phases import NullPhases, Phases
from rl_pipeline.engine.runtime import Runtime, stream_seed
from rl_pipeline.errors import ConfigError
from rl_pipeline.learners.losses import DQNTerms, dqn_loss, td_target
from rl_pipeline.learners.networks import QNetwork
from rl_pipeline.learners.policies import EpsilonGreedy, QPolicy
from rl_pipeline.telemetry.window import Window
from rl_pipeline.types import Batch, Discrete, EnvSpec, Metrics

LOGGED = (*(f"loss/{name}" for name in DQNTerms._fields[2:]), "loss/grad_norm")


class DQN:
    """Owns the network, its frozen copy (the target), the optimizer and the exploration."""

    def __init__(
        self,
        settings: DQNSettings,
        network: NetworkSettings,
        spec: EnvSpec,
        runtime: Runtime,
        phases: Phases | NullPhases,
    ) -> None:
        """Raise ConfigError for actions that are not Discrete."""
        if not isinstance(spec.action, Discrete):
            raise ConfigError(
                f"algo=dqn needs discrete actions, those of {spec.id} are "
                f"{type(spec.action).__name__} {spec.action.shape}; use algo=ppo"
            )
        num_actions = spec.action.num_actions
        self._cfg, self._runtime, self._phases = settings, runtime, phases
        self._device = runtime.device
        init = torch.Generator().manual_seed(runtime.generator("init").initial_seed())
        self._net, self._target_net = (
            QNetwork(network, spec, num_actions, init, runtime.arithmetic).to(self._device)
            for _ in range(2)
        )
        self.params, self.target = FlatParameters(self._net), FlatParameters(self._target_net)
        self.target.values.copy_(self.params.values)
        explore = EpsilonGreedy(
            num_actions, settings.epsilon_start, settings.epsilon_end, settings.epsilon_fraction,
            np.random.default_rng(stream_seed(runtime.seed, "act")),
        )  # fmt: skip
        self.policy = QPolicy(self._net, self.params, explore, runtime, phases)
        self._gradient_step = runtime.gradient_step(
            "update", self._loss, self.params, settings.adam_eps, settings.max_grad_norm,
            frozen=[self.target],
        )  # fmt: skip
        self._updates = 0
        self._window = Window()

    # -- learning -------------------------------------------------------------------------------

    def update(self, batch: Batch, progress: float) -> Tensor:
        """One optimizer step; returns the new priorities [B] on the device.

        `progress` in [0, 1] of the run anneals the learning rate.
        """
        cfg = self._cfg
        rate = cfg.learning_rate * (1 - progress if cfg.anneal_lr else 1.0)
        priority, *scalars = self._gradient_step(rate, None, *self._tensors(batch))
        self._updates += 1
        self.policy.version = self._gradient_step.attempted
        if self._updates % cfg.target_every == 0:
            self._move_target()
        # Nothing is read back until the log tick.
        said: dict[str, Tensor | float] = {name: x[0] for name, x in zip(LOGGED, scalars)}  # noqa: B905
        said["loss/learning_rate"] = rate
        self._window.add(said)
        return priority[0]

    def _tensors(self, batch: Batch) -> list[Tensor]:
        """All but the ids, on the device."""
        tensors = list(batch[:-1])
        if batch.obs.device.type == self._device.type:
            return tensors
        with self._phases("h2d"):
            return [self._runtime.transfers.to_device(x.numpy()) for x in tensors]

    def _move_target(self) -> None:
        if self._cfg.tau == 1:
            self.target.values.copy_(self.params.values)
        else:
            self.target.values.lerp_(self.params.values, self._cfg.tau)

    def _loss(
        self,
        obs: Tensor,
        action: Tensor,
        reward: Tensor,
        discount: Tensor,
        next_obs: Tensor,
        weight: Tensor,
    ) -> tuple[Tensor, ...]:
        with torch.no_grad():
            next_q = self._target_net(next_obs)
            next_q_online = self._net(next_obs) if self._cfg.double else None
            target = td_target(reward, discount, next_q, next_q_online)
        terms = dqn_loss(self._net(obs), action, target, weight, self._cfg.error_clip)
        return tuple(terms)

    def metrics(self, progress: float) -> Metrics:
        """Means over the updates since the last call, and the exploration now."""
        return {"explore/epsilon": self.policy.explore.epsilon(progress), **self._window.read()}

    def skipped_updates(self) -> int:
        """See `types.Learner`."""
        return self._gradient_step.skipped()

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Weights, target, moments, exploration stream and update count, on the CPU."""
        return {
            "params": self.params.values.detach().cpu().clone(),
            "target": self.target.values.detach().cpu().clone(),
            "optimizer": self._gradient_step.adam.state_dict(),
            "explore_rng": self.policy.explore.rng.bit_generator.state,
            "updates": self._updates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Strict inverse of `state_dict`; exact on every device: exploration is drawn in numpy."""
        self.params.load(state["params"].to(self._device))
        self.target.load(state["target"].to(self._device))
        self._gradient_step.adam.load_state_dict(state["optimizer"])
        self.policy.explore.rng.bit_generator.state = state["explore_rng"]
        self._updates = state["updates"]
        return True
