"""Parameters as one flat vector that the modules view."""

from __future__ import annotations

from collections.abc import Sequence

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


class LowCopy:
    """Parameters of some modules in a lower type, for graphs that run often between two updates."""

    def __init__(self, params: FlatParameters, names: Sequence[str], dtype: torch.dtype) -> None:
        """`names` of the parameters that are taken in `dtype`."""
        self._params, self._names = params, tuple(names)
        self.values = params.values.to(dtype)
        self._seen: tuple[int, int] | None = None

    def follow(self, version: int) -> None:
        """Take the parameters over if they moved; `version` counts updates of them."""
        # Graphs move them unseen by torch, whatever else loads them does not.
        seen = (version, self._params.values._version)
        if seen != self._seen:
            self.values.copy_(self._params.values)
            self._seen = seen

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """The named parameters as views of `vector` [P]."""
        views = self._params.views(vector)
        return {name: views[name] for name in self._names}
