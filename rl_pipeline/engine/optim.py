"""One optimizer step on a pure loss: eager into gradient views, or as part of one whole graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad

from rl_pipeline.engine.flat import FlatParameters
from rl_pipeline.engine.graphs import Call, CompileLog, calling
from rl_pipeline.engine.precision import LossScale, NoScale
from rl_pipeline.engine.unroll import Unrolled

BETA1, BETA2 = 0.9, 0.999

Loss = Callable[..., tuple[Tensor, ...]]
"""rows -> (scalar loss, further outputs without gradients). Calls its networks as modules and
reads no other tensor than its arguments."""


class AdamState(NamedTuple):
    """All tensors that a step moves."""

    params: Tensor  # [P]
    mean: Tensor  # [P]
    square: Tensor  # [P]
    steps: Tensor  # scalar
    scale: tuple[Tensor, ...]
    """State of the loss scale; empty without one."""

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> AdamState:
        """Inverse of `flat`."""
        params, mean, square, steps, *scale = tensors
        return cls(params, mean, square, steps, tuple(scale))

    @property
    def flat(self) -> tuple[Tensor, ...]:
        """The tensors in a row, as a graph takes them."""
        return (*self[:4], *self.scale)


class Adam:
    """Global-norm clipping and Adam (Kingma & Ba 2015, arXiv:1412.6980) on one flat vector.

    With a loss scale, gradients are unscaled before they are clipped, and a step whose gradients
    are not finite is skipped and counted.
    """

    def __init__(
        self,
        params: Tensor,
        grads: Tensor,
        eps: float,
        max_grad_norm: float,
        loss_scale: float | None = None,
    ) -> None:
        self._params, self._grads = params, grads
        self._eps, self._max_norm = eps, max_grad_norm
        self._mean, self._square = torch.zeros_like(params), torch.zeros_like(params)
        self._steps = torch.zeros((), device=params.device)
        self.scale: LossScale | NoScale = NoScale()
        if loss_scale is not None:
            self.scale = LossScale(loss_scale, params.device)

    @property
    def state(self) -> AdamState:
        """The tensors themselves, moved in place."""
        return AdamState(self._params, self._mean, self._square, self._steps, self.scale.state)

    def step(self, learning_rate: float | Tensor) -> Tensor:
        """Apply the gradients once and zero them; returns their global norm before clipping."""
        norm, counts, scale, found_inf = self.scale.judge(torch.linalg.vector_norm(self._grads))
        self._steps += counts
        # The kernel divides the gradients by this: clipping without a pass of its own.
        divisor = self.scale.on(((norm + 1e-6) / self._max_norm).clamp(min=1.0), scale)
        # torch.optim.Adam's own fused kernel, called directly: the class around it costs more than
        # the kernel on small networks, and imports the compiler (a second) at its first step.
        torch._fused_adam_(
            [self._params], [self._grads], [self._mean], [self._square], [], [self._steps],
            lr=learning_rate, beta1=BETA1, beta2=BETA2, weight_decay=0.0, eps=self._eps,
            amsgrad=False, maximize=False, grad_scale=divisor.float(), found_inf=found_inf,
        )  # fmt: skip
        self._grads.zero_()
        return norm

    def pure_step(self, state: AdamState, grads: Tensor, rate: Tensor) -> tuple[AdamState, Tensor]:
        """The same step as a function; `grads` [P] are still scaled.

        Returns the state after it and the norm.
        """
        grads = self.scale.unscaled(grads, state.scale)
        norm = torch.linalg.vector_norm(grads)
        grads = grads / ((norm + 1e-6) / self._max_norm).clamp(min=1.0)
        steps = state.steps + 1
        mean = torch.lerp(state.mean, grads, 1 - BETA1)
        square = state.square + (grads * grads - state.square) * (1 - BETA2)
        # 1 - beta^t by expm1: in float32 the plain form loses digits.
        count = steps.to(state.params.dtype)
        bias1, bias2 = (-torch.expm1(count * math.log(beta)) for beta in (BETA1, BETA2))
        params = state.params - (rate / bias1) * mean / ((square / bias2).sqrt() + self._eps)
        new = (params, mean, square, steps)
        settled, scale = self.scale.settle(state.scale, norm, state[:4], new)
        return AdamState.of((*settled, *scale)), norm

    def state_dict(self) -> dict[str, Any]:
        """Moments, step count and loss scale, as a copy on the CPU."""
        state = {"mean": self._mean, "square": self._square, "steps": self._steps}
        copies: dict[str, Any] = {name: x.to("cpu", copy=True) for name, x in state.items()}
        return copies | {"loss_scale": self.scale.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self._mean.copy_(state["mean"])
        self._square.copy_(state["square"])
        self._steps.copy_(state["steps"])
        self.scale.load_state_dict(state["loss_scale"])


class GradientStep:
    """Forward, backward, clipping and Adam for one or more minibatches, one meaning in every form.

    Eager, autograd accumulates into the gradient views and the fused kernel moves the parameters.
    Compiled or captured, all of it is one graph over the flat vectors: no autograd engine, no
    optimizer loop and no Python between the kernels.
    """

    def __init__(
        self,
        name: str,
        loss: Loss,
        params: FlatParameters,
        adam: Adam,
        frozen: Sequence[FlatParameters],
        build: Callable[[str, Call, Call, Sequence[Tensor], int], Call],
        whole_epochs: bool,
        log: CompileLog,
        unroll_after: int | None = None,
    ) -> None:
        """`frozen` are networks that the loss reads and the step leaves alone.

        `build(name, pure, eager, state, moves)`, `log` and `unroll_after` are the runtime's.
        """
        self.adam, self._loss, self._owners = adam, loss, (params, *frozen)
        self._call = calling([p.module for p in self._owners], loss)
        self._whole_epochs = whole_epochs
        self._rate = torch.zeros((), dtype=params.values.dtype, device=params.values.device)
        self._all_rows = torch.empty(0, dtype=torch.int64, device=params.values.device)
        self.attempted = 0
        """Minibatches so far, those that a loss scale skipped included."""
        moved = adam.state.flat
        fixed = [p.values for p in frozen]
        self._gradients = Unrolled(
            self._backward, self._pure_gradients, (params.values, *adam.scale.state, *fixed),
            params.grads, log, unroll_after,
        )  # fmt: skip
        self._run = build(name, self._pure, self._eager, (*moved, *fixed), len(moved))

    def __call__(self, rate: float, index: Tensor | None, *rows: Tensor) -> tuple[Tensor, ...]:
        """Steps on the minibatches rows[..][index[k]], index [K, M], at learning rate `rate`.

        `index` None takes the rows as they are, as one minibatch. Returns what the loss returns
        after its scalar, and the gradient norm before clipping, each stacked over minibatches.
        """
        # Moments of weights that rarely get a gradient shrink until they are denormal, and stay so,
        # each at a hundred cycles: flushed to zero a DQN update on CartPole takes 188 us, not 225.
        # Only here: environments compute as they do elsewhere.
        torch.set_flush_denormal(True)
        try:
            return self._step(rate, index, rows)
        finally:
            torch.set_flush_denormal(False)

    def _step(
        self, rate: float, index: Tensor | None, rows: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        self._rate.fill_(rate)
        if index is None:
            self.attempted += 1
            return self._run(self._rate, self._all_rows, *rows)
        self.attempted += len(index)
        if self._whole_epochs:
            return self._run(self._rate, index, *rows)
        parts = [self._run(self._rate, one, *rows) for one in index.unsqueeze(1)]
        return tuple(torch.cat(outputs) for outputs in zip(*parts, strict=True))

    def _eager(self, rate: Tensor, index: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        done = []
        for minibatch in _minibatches(index, rows):
            outputs = self._gradients(*minibatch)
            done.append((*outputs, self.adam.step(rate)))
        return tuple(torch.stack(outputs) for outputs in zip(*done, strict=True))

    def _backward(self, *minibatch: Tensor) -> tuple[Tensor, ...]:
        loss, *outputs = self._loss(*minibatch)
        self.adam.scale.scaled(loss, self.adam.scale.state).backward()
        return tuple(outputs)

    def _pure(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        moved, owned = len(self.adam.state.flat), len(self._owners) - 1
        start, frozen = tensors[:moved], tensors[moved : moved + owned]
        rate, index, *rows = tensors[moved + owned :]
        state, done = AdamState.of(start), []
        for minibatch in _minibatches(index, rows):
            grads, *outputs = self._pure_gradients(state.params, *state.scale, *frozen, *minibatch)
            state, norm = self.adam.pure_step(state, grads, rate)
            done.append((*outputs, norm))
        for tensor, value in zip(start, state.flat, strict=True):
            tensor.copy_(value)
        return tuple(torch.stack(outputs) for outputs in zip(*done, strict=True))

    def _pure_gradients(self, params: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """(gradients [P], what the loss returns after its scalar) of scale, frozen, minibatch."""
        scales, owned = len(self.adam.scale.state), len(self._owners) - 1
        scale, tensors = tensors[:scales], tensors[scales:]
        frozen, minibatch = tensors[:owned], tensors[owned:]
        fixed = [p.views(x) for p, x in zip(self._owners[1:], frozen, strict=True)]

        def loss(flat: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            loss, *outputs = self._call([self._owners[0].views(flat), *fixed], *minibatch)
            return self.adam.scale.scaled(loss, scale), tuple(outputs)

        grads, outputs = grad(loss, has_aux=True)(params)
        return grads, *outputs

    def skipped(self) -> int:
        """Updates refused because of non-finite gradients; waits for the device.

        Raises FloatingPointError when most of them are.
        """
        return self.adam.scale.check(self.attempted)


def _minibatches(index: Tensor, rows: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """rows[..][index[k]] for each k of index [K, M]; all rows once where the index is empty."""
    if index.numel() == 0:
        yield list(rows)
    else:
        for one in index:
            yield [x[one] for x in rows]
