"""Parameters as one flat vector that the modules view."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rl_pipeline.errors import ConfigError


class FlatParameters:
    """All parameters of a module in `values` [P] and their gradients in `grads` [P].

    The module's parameters become views of the two vectors: autograd accumulates straight into
    `grads`, one optimizer kernel moves `values`, and one tensor is the whole network.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        params = list(module.parameters())
        self.values = torch.cat([p.detach().reshape(-1) for p in params])
        self.grads = torch.zeros_like(self.values)
        self._shapes = {name: p.shape for name, p in module.named_parameters()}
        grads = self.views(self.grads)
        for name, view in self.views(self.values).items():
            p = module.get_parameter(name)
            p.data, p.grad = view, grads[name]

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """`vector` [P] as the module's parameters, by name."""
        parts = vector.split([shape.numel() for shape in self._shapes.values()])
        shapes = self._shapes.items()
        return {name: x.view(shape) for (name, shape), x in zip(shapes, parts, strict=True)}

    def load(self, values: Tensor) -> None:
        """Copy `values` [P] in; raises ValueError when they belong to another network."""
        if values.shape != self.values.shape:
            raise ConfigError(
                f"these weights have {values.numel()} parameters, the network "
                f"{self.values.numel()}: they belong to another network or environment"
            )
        self.values.copy_(values)
