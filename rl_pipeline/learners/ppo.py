"""Proximal policy optimisation, discrete and Gaussian (Schulman et al. 2017, arXiv:1707.06347)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_pipeline.buffers.rollout import Rollout
from rl_pipeline.learners.normalizers import (
    Identity,
    ObsNormalizer,
    RawReward,
    RewardNormalizer,
)
from rl_pipeline.losses import PPOTerms, gae, ppo_loss, row_weights
from rl_pipeline.models import ActorCritic, FlatParameters, make_distribution
from rl_pipeline.phases import NullPhases, Phases
from rl_pipeline.runtime import Runtime
from rl_pipeline.settings import NetworkSettings, PPOSettings
from rl_pipeline.types import EnvSpec, Metrics


class PPO:
    """Owns the network, the optimizer, the normalisers and two random streams."""

    extras: tuple[str, ...] = ("log_prob", "value")
    """What `act` wants stored beside each step."""

    def __init__(
        self,
        settings: PPOSettings,
        network: NetworkSettings,
        spec: EnvSpec,
        runtime: Runtime,
        phases: Phases | NullPhases,
    ) -> None:
        self._cfg, self._runtime, self._phases = settings, runtime, phases
        self._device = runtime.device
        self._dist = make_distribution(spec.action)
        init = torch.Generator().manual_seed(runtime.generator("init").initial_seed())
        self._net = ActorCritic(network, spec, self._dist, settings.log_std_init, init)
        self._net.to(self._device)
        self.params = FlatParameters(self._net)
        self._optimizer = runtime.optimizer(
            self.params.values, self.params.grads, settings.adam_eps, settings.max_grad_norm
        )
        self._act_rng = runtime.generator("act")
        self._update_rng = runtime.generator("update")
        self._normalize_obs: ObsNormalizer | Identity = Identity()
        self._normalize_reward: RewardNormalizer | RawReward = RawReward()
        if settings.normalize_obs:
            self._normalize_obs = ObsNormalizer(spec.obs_shape, self._device)
        if settings.normalize_reward:
            self._normalize_reward = RewardNormalizer(spec.num_envs, settings.gamma, self._device)
        self._sample = runtime.compile(self._sample_eager)
        self._loss = runtime.compile(self._loss_eager)

    # -- acting ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def act(self, obs: np.ndarray) -> tuple[np.ndarray, dict[str, Tensor]]:
        """Sample actions for obs [N, ...]; log-probs and values [N] stay on the device."""
        action, log_prob, value = self._sample(self._to_device(obs))
        with self._phases("d2h"):
            host = action.cpu().numpy()
        return host, {"log_prob": log_prob, "value": value}

    @torch.inference_mode()
    def act_greedy(self, obs: np.ndarray) -> np.ndarray:
        """Mode of the policy for obs [N, ...]."""
        params = self._net.policy(self._normalize_obs(self._to_device(obs)))
        return self._dist.mode(params).cpu().numpy()

    def _to_device(self, obs: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(obs)
        if self._device.type == "cpu":
            return tensor
        with self._phases("h2d"):
            return tensor.to(self._device, non_blocking=True)

    def _sample_eager(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with self._runtime.autocast():
            params, value = self._net(self._normalize_obs(obs))
        action = self._dist.sample(params, self._act_rng)
        return action, self._dist.log_prob(params, action), value.float()

    # -- learning -------------------------------------------------------------------------------

    def update(self, rollout: Rollout, progress: float) -> Metrics:
        """All epochs over one rollout; `progress` in [0, 1] anneals the learning rate.

        Metrics are tensors: reading them is the caller's moment to wait for the device.
        """
        cfg = self._cfg
        rate = cfg.learning_rate * (1 - progress if cfg.anneal_lr else 1.0)
        batch, explained_variance = self._prepare(rollout)
        terms: list[PPOTerms] = []
        norms: list[Tensor] = []
        for _ in range(cfg.num_epochs):
            for minibatch in self._minibatches(batch):
                loss = self._loss(minibatch)
                loss.loss.backward()
                norms.append(self._optimizer.step(rate))
                # Kept without its graph; nothing is read back until the log tick.
                terms.append(loss._replace(loss=loss.loss.detach()))
            if cfg.target_kl is not None and terms[-1].approx_kl.item() > 1.5 * cfg.target_kl:
                break
        # The statistics move last, so that acting and learning shared one normalisation.
        self._normalize_obs.update(rollout.obs[:-1].flatten(0, 1), rollout.valid.flatten())
        means = [torch.stack(column).mean() for column in zip(*terms, strict=True)]
        metrics: dict[str, Tensor | float] = {
            f"loss/{name.removesuffix('_loss')}": mean
            for name, mean in zip(PPOTerms._fields, means, strict=True)
            if name != "max_abs_log_ratio"
        }
        metrics["loss/total"] = metrics.pop("loss/loss")
        metrics["health/max_abs_log_ratio_first_minibatch"] = terms[0].max_abs_log_ratio
        metrics["loss/grad_norm"] = torch.stack(norms).mean()
        metrics["loss/explained_variance"] = explained_variance
        metrics["loss/learning_rate"] = rate
        metrics["updates"] = float(len(terms))
        return metrics

    def _minibatches(self, batch: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """The rows of `batch` once, in random order, in equal parts."""
        if self._cfg.num_minibatches == 1:
            yield batch  # the order of a sum does not matter: no gather
            return
        rows = batch["valid"].shape[0]
        order = torch.randperm(rows, generator=self._update_rng, device=self._device)
        for index in order.view(self._cfg.num_minibatches, -1):
            yield {name: x[index] for name, x in batch.items()}

    @torch.no_grad()
    def _prepare(self, rollout: Rollout) -> tuple[dict[str, Tensor], Tensor]:
        """Flat rows [T*N] of everything the loss needs; explained variance of the old values."""
        cfg = self._cfg
        value = rollout.extras["value"]
        with self._runtime.autocast():
            last = self._net.value(self._normalize_obs(rollout.obs[-1])).float()
        values = torch.cat([value, last.unsqueeze(0)])
        reward = self._normalize_reward(rollout.reward, rollout.ended, rollout.valid)
        advantage = gae(
            reward, rollout.discount, rollout.ended, rollout.valid, values,
            cfg.gamma, cfg.gae_lambda,
        )  # fmt: skip
        batch = {
            "obs": self._normalize_obs(rollout.obs[:-1].flatten(0, 1)),
            "action": rollout.action.flatten(0, 1),
            "log_prob": rollout.extras["log_prob"].flatten(),
            "value": value.flatten(),
            "advantage": advantage.flatten(),
            "target": (advantage + value).flatten(),
            "valid": rollout.valid.flatten().float(),
        }
        target, weight = batch["target"], row_weights(batch["valid"])
        spread = torch.dot((target - torch.dot(target, weight)) ** 2, weight)
        residual = torch.dot((target - batch["value"]) ** 2, weight)
        return batch, 1 - residual / spread.clamp(min=1e-12)

    def _loss_eager(self, batch: dict[str, Tensor]) -> PPOTerms:
        cfg = self._cfg
        with self._runtime.autocast():
            params, value = self._net(batch["obs"])
        log_prob, entropy = self._dist.log_prob_entropy(params, batch["action"])
        return ppo_loss(
            log_prob, entropy, value.float(), batch["log_prob"], batch["value"],
            batch["advantage"], batch["target"], batch["valid"],
            cfg.ratio_clip, cfg.value_clip, cfg.value_coef, cfg.entropy_coef,
            cfg.normalize_advantage,
        )  # fmt: skip

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Weights, moments, statistics and random streams, on the CPU."""
        return {
            "device": self._device.type,
            "params": self.params.values.detach().cpu().clone(),
            "optimizer": self._optimizer.state_dict(),
            "normalize_obs": self._normalize_obs.state_dict(),
            "normalize_reward": self._normalize_reward.state_dict(),
            "act_rng": self._act_rng.get_state(),
            "update_rng": self._update_rng.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Strict inverse of `state_dict`.

        False on another kind of device: its random streams cannot go on and begin anew, from
        seeds that the run has not used before.
        """
        self.params.load(state["params"].to(self._device))
        self._optimizer.load_state_dict(state["optimizer"])
        self._normalize_obs.load_state_dict(state["normalize_obs"])
        self._normalize_reward.load_state_dict(state["normalize_reward"])
        exact = state["device"] == self._device.type
        steps = int(state["optimizer"]["steps"])
        for rng, name in ((self._act_rng, "act_rng"), (self._update_rng, "update_rng")):
            if exact:
                rng.set_state(state[name])
            else:
                rng.manual_seed(rng.initial_seed() + 1 + steps)
        return exact
