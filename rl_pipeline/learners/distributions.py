"""Distributions of actions: what a policy's network parametrises."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from rl_pipeline.types import ActionSpace, Continuous, Discrete, MultiBinary, MultiDiscrete


class Categorical:
    """Distribution over Discrete actions; parameters are logits [B, A]."""

    def __init__(self, action: Discrete) -> None:
        self.num_params = action.num_actions

    def noise(self, rows: int, generator: torch.Generator) -> Tensor:
        """Random numbers for `sample`, [rows, A]; drawn outside of any graph, fresh every time."""
        shape = (rows, self.num_params)
        return torch.empty(shape, device=generator.device).exponential_(generator=generator)

    def sample(self, logits: Tensor, noise: Tensor) -> Tensor:
        """Actions [B]."""
        # Gumbel-max: argmax(logits - log(-log(u))) without building a distribution object.
        return (logits - noise.log()).argmax(-1)

    def mode(self, logits: Tensor) -> Tensor:
        """The most likely actions [B]."""
        return logits.argmax(-1)

    def log_prob(self, logits: Tensor, action: Tensor) -> Tensor:
        """log pi(a|s) [B]."""
        return torch.log_softmax(logits, -1).gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def log_prob_entropy(self, logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """log pi(a|s) [B] and the entropy [B] in nats."""
        log_p = torch.log_softmax(logits, -1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return log_p.gather(-1, action.unsqueeze(-1)).squeeze(-1), entropy


class Gaussian:
    """Diagonal normal; parameters [B, 2D] are means and log standard deviations.

    Actions are unbounded here; the environment's adapter clips what it executes to the box.
    """

    def __init__(self, action: Continuous) -> None:
        self.action_shape = action.shape
        self.num_params = math.prod(action.shape)

    def noise(self, rows: int, generator: torch.Generator) -> Tensor:
        """Random numbers for `sample`, [rows, D]; drawn outside of any graph, fresh every time."""
        shape = (rows, self.num_params)
        return torch.empty(shape, device=generator.device).normal_(generator=generator)

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        """Actions [B, *action_shape]."""
        mean, log_std = params.chunk(2, -1)
        return self._shaped(torch.addcmul(mean, noise, log_std.exp()))

    def mode(self, params: Tensor) -> Tensor:
        """The means [B, *action_shape]."""
        return self._shaped(params.chunk(2, -1)[0])

    def _shaped(self, flat: Tensor) -> Tensor:
        return flat.reshape(len(flat), *self.action_shape)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        """Log density [B], summed over action dimensions."""
        mean, log_std = params.chunk(2, -1)
        z = (action.reshape(mean.shape) - mean) * torch.exp(-log_std)
        return (-0.5 * z * z - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)

    def log_prob_entropy(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Log density [B] and the entropy [B] in nats."""
        log_std = params.chunk(2, -1)[1]
        entropy = (log_std + 0.5 * (1 + math.log(2 * math.pi))).sum(-1)
        return self.log_prob(params, action), entropy


class MultiCategorical:
    """Independent Categoricals; parameters are their logits side by side [B, sum of A_k]."""

    def __init__(self, action: MultiDiscrete) -> None:
        self._sizes = list(action.num_actions)
        self._parts = [Categorical(Discrete(size)) for size in self._sizes]
        self.num_params = sum(self._sizes)

    def noise(self, rows: int, generator: torch.Generator) -> Tensor:
        """Random numbers for `sample`, [rows, sum of A_k]."""
        return torch.cat([part.noise(rows, generator) for part in self._parts], -1)

    def sample(self, logits: Tensor, noise: Tensor) -> Tensor:
        """Actions [B, K]."""
        pairs = zip(self._split(logits), noise.split(self._sizes, -1), strict=True)
        return torch.stack([part.sample(x, part_noise) for (part, x), part_noise in pairs], -1)

    def mode(self, logits: Tensor) -> Tensor:
        """The most likely actions [B, K]."""
        return torch.stack([part.mode(x) for part, x in self._split(logits)], -1)

    def log_prob(self, logits: Tensor, action: Tensor) -> Tensor:
        """log pi(a|s) [B]."""
        return self.log_prob_entropy(logits, action)[0]

    def log_prob_entropy(self, logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """log pi(a|s) [B] and the entropy [B] in nats: the sums over the parts."""
        pairs = zip(self._split(logits), action.unbind(-1), strict=True)
        terms = [part.log_prob_entropy(x, a) for (part, x), a in pairs]
        log_probs, entropies = zip(*terms, strict=True)
        return torch.stack(log_probs).sum(0), torch.stack(entropies).sum(0)

    def _split(self, logits: Tensor) -> list[tuple[Categorical, Tensor]]:
        return list(zip(self._parts, logits.split(self._sizes, -1), strict=True))


class Bernoulli:
    """Independent bits; parameters are the logits [B, K] of a 1."""

    def __init__(self, action: MultiBinary) -> None:
        self.num_params = action.num_bits

    def noise(self, rows: int, generator: torch.Generator) -> Tensor:
        """Random numbers for `sample`, [rows, K]."""
        shape = (rows, self.num_params)
        return torch.empty(shape, device=generator.device).uniform_(generator=generator)

    def sample(self, logits: Tensor, noise: Tensor) -> Tensor:
        """Actions [B, K]."""
        return (noise < logits.sigmoid()).long()

    def mode(self, logits: Tensor) -> Tensor:
        """The most likely actions [B, K]."""
        return (logits > 0).long()

    def log_prob(self, logits: Tensor, action: Tensor) -> Tensor:
        """log pi(a|s) [B]."""
        # A bit's log-probability is logsigmoid(logit), with the logit's sign flipped for a 0.
        return F.logsigmoid(logits * (2 * action - 1)).sum(-1)

    def log_prob_entropy(self, logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """log pi(a|s) [B] and the entropy [B] in nats: the sums over the bits."""
        entropy = F.softplus(logits) - logits * logits.sigmoid()
        return self.log_prob(logits, action), entropy.sum(-1)


Distribution = Categorical | MultiCategorical | Bernoulli | Gaussian


def make_distribution(action: ActionSpace) -> Distribution:
    """The action distribution of a space."""
    match action:
        case Discrete():
            return Categorical(action)
        case MultiDiscrete():
            return MultiCategorical(action)
        case MultiBinary():
            return Bernoulli(action)
        case Continuous():
            return Gaussian(action)
