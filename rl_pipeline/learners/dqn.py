"""Deep Q-learning (Mnih et al. 2015, doi:10.1038/nature14236) on any replay buffer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_pipeline.losses import DQNTerms, dqn_loss, td_target
from rl_pipeline.models import FlatParameters, QNetwork
from rl_pipeline.phases import NullPhases, Phases
from rl_pipeline.policies import EpsilonGreedy, numpy_forward
from rl_pipeline.runtime import Runtime, stream_seed
from rl_pipeline.settings import DQNSettings, NetworkSettings
from rl_pipeline.types import Batch, Discrete, EnvSpec, Metrics


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
        """Raise ValueError for actions that are not Discrete."""
        if not isinstance(spec.action, Discrete):
            raise ValueError(
                f"algo=dqn needs discrete actions, {spec.id} takes {spec.action.shape} real "
                "numbers; use algo=ppo"
            )
        self._cfg, self._runtime, self._phases = settings, runtime, phases
        self._device = runtime.device
        init = torch.Generator().manual_seed(runtime.generator("init").initial_seed())
        self._net = QNetwork(network, spec, spec.action.num_actions, init).to(self._device)
        self._target_net = QNetwork(network, spec, spec.action.num_actions, init)
        self._target_net.to(self._device).requires_grad_(False)
        self.params, self.target = FlatParameters(self._net), FlatParameters(self._target_net)
        self.target.values.copy_(self.params.values)
        self._optimizer = runtime.optimizer(
            self.params.values, self.params.grads, settings.adam_eps, settings.max_grad_norm
        )
        self._explore = EpsilonGreedy(
            spec.action.num_actions, settings.epsilon_start, settings.epsilon_end,
            settings.epsilon_fraction,
            np.random.default_rng(stream_seed(runtime.seed, "act")),
        )  # fmt: skip
        self._forward = numpy_forward(self._net) if self._device.type == "cpu" else None
        self._updates = 0
        self._last: tuple[DQNTerms, Tensor, float] | None = None
        self._q = runtime.compile(self._q_eager)
        self._loss = runtime.compile(self._loss_eager)

    # -- acting ---------------------------------------------------------------------------------

    def act(self, obs: np.ndarray, progress: float) -> np.ndarray:
        """Epsilon-greedy actions [N] for obs [N, ...] at `progress` in [0, 1] of the run."""
        return self._explore(obs, progress, self.act_greedy)

    def act_greedy(self, obs: np.ndarray) -> np.ndarray:
        """The actions [N] of highest value: epsilon is 0."""
        if self._forward is not None:
            return self._forward(obs).argmax(-1)
        return self._act_on_device(obs)

    @torch.inference_mode()
    def _act_on_device(self, obs: np.ndarray) -> np.ndarray:
        tensor = torch.from_numpy(obs)
        if self._device.type != "cpu":
            with self._phases("h2d"):
                tensor = tensor.to(self._device, non_blocking=True)
        action = self._q(tensor)
        with self._phases("d2h"):
            return action.cpu().numpy()

    def _q_eager(self, obs: Tensor) -> Tensor:
        with self._runtime.autocast():
            q = self._net(obs)
        return q.argmax(-1)

    # -- learning -------------------------------------------------------------------------------

    def update(self, batch: Batch, progress: float) -> Tensor:
        """One optimizer step; returns the new priorities [B] on the device.

        `progress` in [0, 1] of the run anneals the learning rate.
        """
        cfg = self._cfg
        rate = cfg.learning_rate * (1 - progress if cfg.anneal_lr else 1.0)
        terms = self._loss(
            batch.obs, batch.action, batch.reward, batch.discount, batch.next_obs, batch.weight
        )
        terms.loss.backward()
        norm = self._optimizer.step(rate)
        self._updates += 1
        if self._updates % cfg.target_every == 0:
            self._move_target()
        # Nothing is read back until the log tick.
        self._last = terms._replace(loss=terms.loss.detach()), norm, rate
        return terms.priority

    @torch.no_grad()
    def _move_target(self) -> None:
        if self._cfg.tau == 1:
            self.target.values.copy_(self.params.values)
        else:
            self.target.values.lerp_(self.params.values, self._cfg.tau)

    def _loss_eager(
        self,
        obs: Tensor,
        action: Tensor,
        reward: Tensor,
        discount: Tensor,
        next_obs: Tensor,
        weight: Tensor,
    ) -> DQNTerms:
        with torch.no_grad(), self._runtime.autocast():
            next_q = self._target_net(next_obs).float()
            next_q_online = self._net(next_obs).float() if self._cfg.double else None
        target = td_target(reward, discount, next_q, next_q_online)
        with self._runtime.autocast():
            q = self._net(obs)
        return dqn_loss(q.float(), action, target, weight, self._cfg.error_clip)

    def metrics(self, progress: float) -> Metrics:
        """Of the last update, none before the first; and the exploration now."""
        metrics: dict[str, Tensor | float] = {"explore/epsilon": self._explore.epsilon(progress)}
        if self._last is not None:
            terms, norm, rate = self._last
            metrics |= {
                "loss/total": terms.loss,
                "loss/q": terms.q.mean(),
                "loss/td_error": terms.priority.mean(),
                "loss/grad_norm": norm,
                "loss/learning_rate": rate,
            }
        return metrics

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Weights, target, moments, exploration stream and update count, on the CPU."""
        return {
            "params": self.params.values.detach().cpu().clone(),
            "target": self.target.values.detach().cpu().clone(),
            "optimizer": self._optimizer.state_dict(),
            "explore_rng": self._explore.rng.bit_generator.state,
            "updates": self._updates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Strict inverse of `state_dict`; exact on every device: exploration is drawn in numpy."""
        self.params.load(state["params"].to(self._device))
        self.target.load(state["target"].to(self._device))
        self._optimizer.load_state_dict(state["optimizer"])
        self._explore.rng.bit_generator.state = state["explore_rng"]
        self._updates = state["updates"]
        return True
