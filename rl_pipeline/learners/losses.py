"""Pure functions of tensors: what is estimated and what is minimised."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def gae(
    reward: Tensor,
    discount: Tensor,
    ended: Tensor,
    valid: Tensor,
    values: Tensor,
    gamma: float,
    lam: float,
) -> Tensor:
    """Generalised advantage estimates [T, N] (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

    reward, discount, ended, valid [T, N]; values [T+1, N], where row t+1 is V of the state that
    row t led to: after an end that is the true last observation, because the next row holds it.
    `discount` is 0 at a termination, else 1, so that a truncation bootstraps. `ended` cuts the
    recursion at both. Rows that are not valid (resets) get 0 and pass nothing on.
    """
    # A reset row may hold anything; multiplying by a mask would let a NaN or inf through.
    zero = torch.zeros((), dtype=values.dtype, device=values.device)
    delta = torch.where(valid, reward + gamma * discount * values[1:] - values[:-1], zero)
    decay = torch.where(valid & ~ended, gamma * lam, zero)
    # a[t] = delta[t] + decay[t] a[t+1] by doubling (Hillis & Steele 1986): log2(T) steps over all
    # rows instead of T small ones.
    advantage, span, rows = delta, 1, len(delta)
    while span < rows:
        head = torch.addcmul(advantage[:-span], decay[: rows - span], advantage[span:])
        advantage = torch.cat([head, advantage[-span:]])
        decay = decay[:-span] * decay[span:]
        span *= 2
    return advantage


def row_weights(valid: Tensor) -> Tensor:
    """valid [B], 1 or 0 -> weights [B] that sum to 1, so that a mean is one dot product."""
    return valid / valid.sum().clamp(min=1)


def masked_standardize(x: Tensor, valid: Tensor, weight: Tensor) -> Tensor:
    """x [B] with mean 0 and standard deviation 1 (unbiased) over the rows whose valid [B] is 1.

    `weight` is `row_weights(valid)`.
    """
    centred = x - torch.dot(x, weight)
    count = valid.sum()
    variance = torch.dot(centred * centred, weight) * (count / (count - 1).clamp(min=1))
    return centred / (variance.sqrt() + 1e-8)


class PPOTerms(NamedTuple):
    """Scalars of one PPO loss; over no valid row all are 0 and mean nothing."""

    loss: Tensor
    policy_loss: Tensor
    value_loss: Tensor
    entropy: Tensor
    approx_kl: Tensor
    clip_fraction: Tensor
    max_abs_log_ratio: Tensor


def ppo_loss(
    log_prob: Tensor,
    entropy: Tensor,
    value: Tensor,
    old_log_prob: Tensor,
    old_value: Tensor,
    advantage: Tensor,
    value_target: Tensor,
    valid: Tensor,
    ratio_clip: float,
    value_clip: float | None,
    value_coef: float,
    entropy_coef: float,
    normalize_advantage: bool,
) -> PPOTerms:
    """Clipped surrogate loss (Schulman et al. 2017, arXiv:1707.06347, eq. 7 and 9).

    All inputs [B] float32 and finite; `valid` is 1, or 0 for reset rows, which have no influence.
    The value loss is half the squared error, clipped around the old value as in openai/baselines
    where `value_clip` is given. approx_kl is E[(r - 1) - log r], the low-variance estimator
    (Schulman 2020). Small batches cost what their kernels cost to launch, hence the dot products.
    """
    weight = row_weights(valid)
    if normalize_advantage:
        advantage = masked_standardize(advantage, valid, weight)
    # Masked before exp: a reset row must not overflow.
    log_ratio = (log_prob - old_log_prob) * valid
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - ratio_clip, 1 + ratio_clip)
    weighted = advantage * weight
    policy_loss = -torch.minimum(ratio * weighted, clipped * weighted).sum()

    error = value - value_target
    squared = error * error
    if value_clip is not None:
        near = old_value + (value - old_value).clamp(-value_clip, value_clip) - value_target
        squared = torch.maximum(squared, near * near)
    value_loss = 0.5 * torch.dot(squared, weight)

    mean_entropy = torch.dot(entropy, weight)
    loss = policy_loss + value_coef * value_loss - entropy_coef * mean_entropy
    with torch.no_grad():
        approx_kl = torch.dot((ratio - 1) - log_ratio, weight)
        clip_fraction = torch.dot((ratio != clipped).to(weight.dtype), weight)
        max_abs_log_ratio = log_ratio.abs().max()
    return PPOTerms(
        loss, policy_loss.detach(), value_loss.detach(), mean_entropy.detach(),
        approx_kl, clip_fraction, max_abs_log_ratio,
    )  # fmt: skip


def td_target(
    reward: Tensor, discount: Tensor, next_q: Tensor, next_q_online: Tensor | None = None
) -> Tensor:
    """n-step targets [B] of Q-learning: reward + discount * Q'(s', a*).

    reward, discount [B] as in `types.Batch` (the discount is 0 after a termination only); next_q
    [B, A] of the target network. a* is its own best action (Mnih et al. 2015,
    doi:10.1038/nature14236), or, given `next_q_online` [B, A], the best one of the network that
    learns: double Q-learning (van Hasselt et al. 2016, arXiv:1509.06461).
    """
    if next_q_online is None:
        best = next_q.amax(-1)
    else:
        best = next_q.gather(-1, next_q_online.argmax(-1, keepdim=True)).squeeze(-1)
    return torch.addcmul(reward, discount, best)


PRIORITY_EPS = 1e-6
"""Keeps every transition's probability above 0 (Schaul et al. 2016, sec. 3.3)."""


class DQNTerms(NamedTuple):
    """A DQN loss, the new priorities, and scalars that are logged as `loss/<name>`."""

    loss: Tensor
    priority: Tensor  # [B] |TD error| + PRIORITY_EPS
    total: Tensor
    q: Tensor
    """Mean value of the actions taken."""


def dqn_loss(
    q: Tensor, action: Tensor, target: Tensor, weight: Tensor, error_clip: float | None
) -> DQNTerms:
    """Mean Huber loss of Q [B, A] at action [B] to target [B], weighted by weight [B].

    It is quadratic up to `error_clip` (1 is Mnih et al.'s clipping of the error term) and linear
    beyond; half the squared error without. The weights are the importance weights of prioritized
    replay (Schaul et al. 2016, arXiv:1511.05952), 1 elsewhere.
    """
    chosen = q.gather(-1, action.unsqueeze(-1)).squeeze(-1)
    if error_clip is None:
        error = 0.5 * (chosen - target).square()
    else:
        error = F.huber_loss(chosen, target, reduction="none", delta=error_clip)
    loss = torch.dot(error, weight) / len(weight)
    chosen = chosen.detach()
    priority = (chosen - target).abs() + PRIORITY_EPS
    return DQNTerms(loss, priority, total=loss.detach(), q=chosen.mean())
