"""Networks, action distributions, and parameters as one flat vector that the modules view."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rl_pipeline.settings import NetworkSettings
from rl_pipeline.types import (
    ActionSpace,
    Continuous,
    Discrete,
    EnvSpec,
    MultiBinary,
    MultiDiscrete,
)


class FlatParameters:
    """All parameters of a module in `values` [P] and their gradients in `grads` [P].

    The module's parameters become views of the two vectors: autograd accumulates straight into
    `grads`, one optimizer kernel moves `values`, and one tensor is the whole network.
    """

    def __init__(self, module: nn.Module) -> None:
        params = list(module.parameters())
        self.values = torch.cat([p.detach().reshape(-1) for p in params])
        self.grads = torch.zeros_like(self.values)
        start = 0
        for p in params:
            view = slice(start, start + p.numel())
            p.data = self.values[view].view_as(p)
            p.grad = self.grads[view].view_as(p)
            start += p.numel()

    def load(self, values: Tensor) -> None:
        """Copy `values` [P] in; raises ValueError when they belong to another network."""
        if values.shape != self.values.shape:
            raise ValueError(
                f"these weights have {values.numel()} parameters, the network "
                f"{self.values.numel()}: they belong to another network or environment"
            )
        self.values.copy_(values)


def _orthogonal(layer: nn.Linear | nn.Conv2d, gain: float, generator: torch.Generator) -> None:
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)


def _linear(inputs: int, outputs: int, gain: float, generator: torch.Generator) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    _orthogonal(layer, gain, generator)
    return layer


def _conv(
    inputs: int, outputs: int, size: int, stride: int, generator: torch.Generator
) -> nn.Conv2d:
    layer = nn.Conv2d(inputs, outputs, size, stride)
    _orthogonal(layer, math.sqrt(2), generator)
    return layer


class Floats(nn.Module):
    """Observations of any numeric kind as flat float32 vectors."""

    def forward(self, x: Tensor) -> Tensor:
        """x [B, ...] -> float32 [B, D]."""
        return x.flatten(1).float()


class Pixels(nn.Module):
    """uint8 images to [0, 1]."""

    def forward(self, x: Tensor) -> Tensor:
        """x [B, C, H, W] uint8 -> float32."""
        return x.float() * (1 / 255)


def _mlp(
    inputs: int, hidden: Sequence[int], activation: str, generator: torch.Generator
) -> tuple[list[nn.Module], int]:
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [_linear(inputs, width, math.sqrt(2), generator)]
        layers += [nn.Tanh() if activation == "tanh" else nn.ReLU()]
        inputs = width
    return layers, inputs


def make_trunk(
    network: NetworkSettings, obs_shape: tuple[int, ...], generator: torch.Generator
) -> tuple[nn.Module, int]:
    """Features of an observation, and their number.

    nature_cnn: Mnih et al. 2015 (doi:10.1038/nature14236), table of methods.
    """
    match network.name:
        case "mlp":
            layers, width = _mlp(
                math.prod(obs_shape), network.hidden, network.activation, generator
            )
            return nn.Sequential(Floats(), *layers), width
        case "nature_cnn":
            if len(obs_shape) != 3 or min(obs_shape[1:]) < 36:
                raise ValueError(
                    f"network=nature_cnn needs images [channels, height, width] of at least 36x36, "
                    f"the environment observes {list(obs_shape)}; use network=mlp, a wrapper that "
                    "puts channels first, or a larger env.atari.screen_size"
                )
            convs = nn.Sequential(
                Pixels(),
                _conv(obs_shape[0], 32, 8, 4, generator),
                nn.ReLU(),
                _conv(32, 64, 4, 2, generator),
                nn.ReLU(),
                _conv(64, 64, 3, 1, generator),
                nn.ReLU(),
                nn.Flatten(),
            )
            with torch.no_grad():
                inputs = convs(torch.zeros(1, *obs_shape, dtype=torch.uint8)).shape[1]
            layers, width = _mlp(inputs, network.hidden, network.activation, generator)
            return nn.Sequential(convs, *layers), width


class Categorical:
    """Distribution over Discrete actions; parameters are logits [B, A]."""

    def __init__(self, action: Discrete) -> None:
        self.num_params = action.num_actions

    def sample(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """Actions [B]."""
        # Gumbel-max: argmax(logits - log(-log(u))) without building a distribution object.
        u = torch.empty_like(logits).exponential_(generator=generator)
        return (logits.float() - u.log()).argmax(-1)

    def mode(self, logits: Tensor) -> Tensor:
        """The most likely actions [B]."""
        return logits.argmax(-1)

    def log_prob(self, logits: Tensor, action: Tensor) -> Tensor:
        """log pi(a|s) [B]."""
        return torch.log_softmax(logits.float(), -1).gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def log_prob_entropy(self, logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """log pi(a|s) [B] and the entropy [B] in nats."""
        log_p = torch.log_softmax(logits.float(), -1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return log_p.gather(-1, action.unsqueeze(-1)).squeeze(-1), entropy


class Gaussian:
    """Diagonal normal; parameters [B, 2D] are means and log standard deviations.

    Actions are unbounded here; the environment's adapter clips what it executes to the box.
    """

    def __init__(self, action: Continuous) -> None:
        self.action_shape = action.shape
        self.num_params = math.prod(action.shape)

    def sample(self, params: Tensor, generator: torch.Generator) -> Tensor:
        """Actions [B, *action_shape]."""
        mean, log_std = params.float().chunk(2, -1)
        noise = torch.empty_like(mean).normal_(generator=generator)
        return torch.addcmul(mean, noise, log_std.exp()).unflatten(-1, self.action_shape)

    def mode(self, params: Tensor) -> Tensor:
        """The means [B, *action_shape]."""
        return params.float().chunk(2, -1)[0].unflatten(-1, self.action_shape)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        """Log density [B], summed over action dimensions."""
        mean, log_std = params.float().chunk(2, -1)
        z = (action.flatten(1) - mean) * torch.exp(-log_std)
        return (-0.5 * z * z - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)

    def log_prob_entropy(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Log density [B] and the entropy [B] in nats."""
        log_std = params.float().chunk(2, -1)[1]
        entropy = (log_std + 0.5 * (1 + math.log(2 * math.pi))).sum(-1)
        return self.log_prob(params, action), entropy


class MultiCategorical:
    """Independent Categoricals; parameters are their logits side by side [B, sum of A_k]."""

    def __init__(self, action: MultiDiscrete) -> None:
        self._sizes = list(action.num_actions)
        self._parts = [Categorical(Discrete(size)) for size in self._sizes]
        self.num_params = sum(self._sizes)

    def sample(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """Actions [B, K]."""
        pairs = self._split(logits)
        return torch.stack([part.sample(x, generator) for part, x in pairs], -1)

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

    def sample(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """Actions [B, K]."""
        u = torch.empty_like(logits, dtype=torch.float32).uniform_(generator=generator)
        return (u < logits.float().sigmoid()).long()

    def mode(self, logits: Tensor) -> Tensor:
        """The most likely actions [B, K]."""
        return (logits > 0).long()

    def log_prob(self, logits: Tensor, action: Tensor) -> Tensor:
        """log pi(a|s) [B]."""
        # A bit's log-probability is logsigmoid(logit), with the logit's sign flipped for a 0.
        return F.logsigmoid(logits.float() * (2 * action - 1)).sum(-1)

    def log_prob_entropy(self, logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """log pi(a|s) [B] and the entropy [B] in nats: the sums over the bits."""
        logits = logits.float()
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


class ActorCritic(nn.Module):
    """obs -> (distribution parameters, value), with one trunk or two."""

    def __init__(
        self,
        network: NetworkSettings,
        spec: EnvSpec,
        distribution: Distribution,
        log_std_init: float,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.policy_trunk, width = make_trunk(network, spec.obs_shape, generator)
        # A small last layer starts the policy near uniform (Andrychowicz et al. 2021, sec. 3.2).
        self.policy_head = _linear(width, distribution.num_params, 0.01, generator)
        self.value_trunk: nn.Module | None = None
        if not network.shared:
            self.value_trunk, _ = make_trunk(network, spec.obs_shape, generator)
        self.value_head = _linear(width, 1, 1.0, generator)
        self.log_std: nn.Parameter | None = None
        if isinstance(distribution, Gaussian):
            self.log_std = nn.Parameter(torch.full((distribution.num_params,), log_std_init))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """obs [B, ...] -> distribution parameters [B, K], values [B]."""
        features = self.policy_trunk(obs)
        value_features = self.value_trunk(obs) if self.value_trunk is not None else features
        return self._policy(features), self.value_head(value_features).squeeze(-1)

    def policy(self, obs: Tensor) -> Tensor:
        """Distribution parameters [B, K] alone."""
        return self._policy(self.policy_trunk(obs))

    def value(self, obs: Tensor) -> Tensor:
        """Values [B] alone."""
        trunk = self.policy_trunk if self.value_trunk is None else self.value_trunk
        return self.value_head(trunk(obs)).squeeze(-1)

    def _policy(self, features: Tensor) -> Tensor:
        params = self.policy_head(features)
        if self.log_std is None:
            return params
        return torch.cat([params, self.log_std.expand_as(params)], -1)
