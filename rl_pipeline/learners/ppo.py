"""Proximal policy optimisation, discrete and Gaussian (Schulman et al. 2017, arXiv:1707.06347)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_pipeline.buffers.rollout import Rollout
from rl_pipeline.config.settings import NetworkSettings, PPOSettings
from rl_pipeline.engine.flat import FlatParameters
from rl_pipeline.engine.phases import NullPhases, Phases
from rl_pipeline.engine.runtime import Runtime
from rl_pipeline.errors import ConfigError
from rl_pipeline.learners.distributions import Gaussian, make_distribution
from rl_pipeline.learners.losses import PPOTerms, gae, ppo_loss, row_weights
from rl_pipeline.learners.networks import ActorCritic
from rl_pipeline.learners.normalizers import Identity, ObsNormalizer, RawReward, RewardNormalizer
from rl_pipeline.learners.policies import ActorCriticPolicy
from rl_pipeline.types import EnvSpec, Metrics

APPROX_KL = PPOTerms._fields.index("approx_kl")
MAX_ABS_LOG_RATIO = PPOTerms._fields.index("max_abs_log_ratio")


class PPO:
    """Owns the network, the optimizer, the normalisers and two random streams."""

    def __init__(
        self,
        settings: PPOSettings,
        network: NetworkSettings,
        spec: EnvSpec,
        runtime: Runtime,
        phases: Phases | NullPhases,
    ) -> None:
        """Raise ValueError for a setting that these actions give no meaning."""
        self._cfg, self._runtime = settings, runtime
        self._device = runtime.device
        self._dist = make_distribution(spec.action)
        if settings.log_std_init and not isinstance(self._dist, Gaussian):
            raise ConfigError(
                f"algo.log_std_init={settings.log_std_init:g} has no effect on the discrete "
                f"actions of {spec.id}; leave it out"
            )
        init = torch.Generator().manual_seed(runtime.generator("init").initial_seed())
        self._net = ActorCritic(
            network, spec, self._dist, settings.log_std_init, init, runtime.arithmetic
        ).to(self._device)
        self.params = FlatParameters(self._net)
        self._update_rng = runtime.generator("update")
        self._normalize_obs: ObsNormalizer | Identity = Identity()
        self._normalize_reward: RewardNormalizer | RawReward = RawReward()
        if settings.normalize_obs:
            self._normalize_obs = ObsNormalizer(spec.obs_shape, self._device)
        if settings.normalize_reward:
            self._normalize_reward = RewardNormalizer(spec.num_envs, settings.gamma, self._device)
        self.policy = ActorCriticPolicy(
            self._net, self.params, self._dist, self._normalize_obs, runtime, phases
        )
        self._score = runtime.compile("score", self._log_prob_value, [self.params])
        self._advantage = runtime.capture_once("advantage", self._advantage_target)
        self._gradient_step = runtime.gradient_step(
            "update", self._loss, self.params, settings.adam_eps, settings.max_grad_norm
        )

    # -- learning -------------------------------------------------------------------------------

    def update(self, rollout: Rollout, progress: float) -> tuple[Metrics, int]:
        """All epochs over one rollout; `progress` in [0, 1] anneals the learning rate.

        Metrics are tensors: reading them is the caller's moment to wait for the device. They are
        means over the minibatches that had a valid row; a rollout without one teaches nothing.
        """
        cfg, before = self._cfg, self._gradient_step.attempted
        rate = cfg.learning_rate * (1 - progress if cfg.anneal_lr else 1.0)
        if not rollout.env_steps:
            return {"loss/learning_rate": rate}, 0
        batch, explained_variance = self._prepare(rollout)
        terms: list[Tensor] = []
        norms: list[Tensor] = []
        counted: list[Tensor] = []
        for _ in range(cfg.num_epochs):
            order = self._order(len(batch[0]))
            epoch, norm = self._gradient_step(rate, order, *batch)
            # 1 for minibatches with a valid row, 0 for others.
            counted.append((batch[-1] if order is None else batch[-1][order]).amax(-1).view(-1))
            # Nothing is read back until the log tick.
            terms.append(epoch)
            norms.append(norm)
            if cfg.target_kl is not None and epoch[-1, APPROX_KL].item() > 1.5 * cfg.target_kl:
                break
        # The statistics move last, so that acting and learning shared one normalisation.
        self._normalize_obs.update(rollout.obs[:-1].flatten(0, 1), rollout.valid.flatten())
        said = torch.cat(terms)
        share = row_weights(torch.cat(counted))
        means = share @ said
        metrics: dict[str, Tensor | float] = {
            f"loss/{name.removesuffix('_loss')}": mean
            for name, mean in zip(PPOTerms._fields, means.unbind(), strict=True)
            if name != "max_abs_log_ratio"
        }
        metrics["loss/total"] = metrics.pop("loss/loss")
        metrics["health/max_abs_log_ratio_first_minibatch"] = terms[0][0, MAX_ABS_LOG_RATIO]
        metrics["loss/approx_kl_max"] = said[:, APPROX_KL].max()
        metrics["loss/grad_norm"] = share @ torch.cat(norms)
        metrics["loss/explained_variance"] = explained_variance
        metrics["loss/learning_rate"] = rate
        self.policy.version = self._gradient_step.attempted
        return metrics, self._gradient_step.attempted - before

    def skipped_updates(self) -> int:
        """See `types.Learner`."""
        return self._gradient_step.skipped()

    def _order(self, rows: int) -> Tensor | None:
        """All rows once in random order, as minibatches [K, M]; None for a single one."""
        if self._cfg.num_minibatches == 1:
            return None  # the order of a sum does not matter: no gather
        order = torch.randperm(rows, generator=self._update_rng, device=self._device)
        return order.view(self._cfg.num_minibatches, -1)

    @torch.no_grad()
    def _prepare(self, rollout: Rollout) -> tuple[tuple[Tensor, ...], Tensor]:
        """Flat rows [T*N] of all that the loss takes; explained variance of the old values."""
        obs = self._normalize_obs(rollout.obs[:-1].flatten(0, 1))
        action = rollout.action.flatten(0, 1)
        if not self._runtime.arithmetic.exact:
            # In low precision a row's log-prob depends on the shape of the batch it came in: those
            # of the behaviour policy are taken again as the update will, in its own batches.
            size = len(obs) // self._cfg.num_minibatches
            parts = zip(obs.split(size), action.split(size), strict=True)
            scores = [self._score(*part) for part in parts]
            log_prob, value = (torch.cat(x) for x in zip(*scores, strict=True))
        elif rollout.extras:
            log_prob, value = rollout.extras["log_prob"], rollout.extras["value"]
        else:
            # All rows at once cost less than the critic does at every step.
            log_prob, value = self._log_prob_value(obs, action)
        value = value.view_as(rollout.reward)
        last = self._net.value(self._normalize_obs(rollout.obs[-1]))
        reward = self._normalize_reward(rollout.reward, rollout.ended, rollout.valid)
        advantage, target, valid, explained_variance = self._advantage(
            reward, rollout.discount, rollout.ended, rollout.valid, value, last
        )
        batch = (obs, action, log_prob.flatten(), value.flatten(), advantage, target, valid)
        return batch, explained_variance

    def _log_prob_value(self, obs: Tensor, action: Tensor) -> tuple[Tensor, ...]:
        params, value = self._net(obs)
        return self._dist.log_prob(params, action), value

    def _advantage_target(
        self,
        reward: Tensor,
        discount: Tensor,
        ended: Tensor,
        valid: Tensor,
        value: Tensor,
        last: Tensor,
    ) -> tuple[Tensor, ...]:
        values = torch.cat([value, last.unsqueeze(0)])
        advantage = gae(
            reward, discount, ended, valid, values, self._cfg.gamma, self._cfg.gae_lambda
        ).flatten()
        value, mask = value.flatten(), valid.flatten().to(value.dtype)
        target, weight = advantage + value, row_weights(mask)
        spread = torch.dot((target - torch.dot(target, weight)) ** 2, weight)
        residual = torch.dot((target - value) ** 2, weight)
        # Targets that do not vary have no variance to explain.
        explained = 1 - residual / torch.where(spread > 1e-12, spread, torch.nan)
        return advantage, target, mask, explained

    def _loss(
        self,
        obs: Tensor,
        action: Tensor,
        old_log_prob: Tensor,
        old_value: Tensor,
        advantage: Tensor,
        target: Tensor,
        valid: Tensor,
    ) -> tuple[Tensor, ...]:
        cfg = self._cfg
        params, value = self._net(obs)
        log_prob, entropy = self._dist.log_prob_entropy(params, action)
        terms = ppo_loss(
            log_prob, entropy, value, old_log_prob, old_value, advantage, target, valid,
            cfg.ratio_clip, cfg.value_clip, cfg.value_coef, cfg.entropy_coef,
            cfg.normalize_advantage,
        )  # fmt: skip
        return terms.loss, torch.stack(terms).detach()

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Weights, moments, statistics and random streams, on the CPU."""
        return {
            "device": self._device.type,
            "params": self.params.values.detach().cpu().clone(),
            "optimizer": self._gradient_step.adam.state_dict(),
            "normalize_obs": self._normalize_obs.state_dict(),
            "normalize_reward": self._normalize_reward.state_dict(),
            "act_rng": self.policy.rng.get_state(),
            "update_rng": self._update_rng.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Strict inverse of `state_dict`.

        False on another kind of device: its random streams cannot go on and begin anew, from
        seeds that the run has not used before.
        """
        self.params.load(state["params"].to(self._device))
        self._gradient_step.adam.load_state_dict(state["optimizer"])
        self._normalize_obs.load_state_dict(state["normalize_obs"])
        self._normalize_reward.load_state_dict(state["normalize_reward"])
        exact = state["device"] == self._device.type
        steps = int(state["optimizer"]["steps"])
        for rng, name in ((self.policy.rng, "act_rng"), (self._update_rng, "update_rng")):
            if exact:
                rng.set_state(state[name])
            else:
                rng.manual_seed(rng.initial_seed() + 1 + steps)
        return exact
