"""Arithmetic of the networks: what runs in low precision, and what keeps fp16 gradients alive."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_pipeline.config.settings import PrecisionSettings
from rl_pipeline.errors import ConfigError

GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0, 0.5, 2000
"""Rule of the loss scale, as in torch.amp.GradScaler."""
MIN_SCALE = 1.0
"""Gradients that overflow unscaled are not a matter of the scale any more."""
JUDGED_UPDATES = 20
"""Most of this many updates skipped is a run that does not learn; the first few always are."""


@dataclass(frozen=True)
class Arithmetic:
    """Arithmetic of a network's trunk; its features, and all that follows, are in `wide`."""

    name: str = "fp32"
    device: str = "cpu"
    autocast: torch.dtype | None = None
    """Type of matrix products and convolutions; None leaves them in `wide`."""
    matmul: str = "highest"
    """torch's float32 matmul precision: `high` allows TF32."""
    loss_scale: float | None = None
    """Initial loss scale; None does without one."""
    wide: torch.dtype = torch.float32
    """Type of parameters, features, logits, distributions and losses; float64 in tests only."""

    def context(self) -> AbstractContextManager[Any]:
        """Autocast for one forward pass of a trunk: no cast of a weight outlives an update."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device, self.autocast)

    @property
    def exact(self) -> bool:
        """Two forwards of a row agree to float32 rounding, whatever batch it comes in."""
        return self.autocast is None and self.matmul == "highest"

    def apply(self) -> None:
        """Set the library's global switches: precision is stated, never inherited."""
        torch.set_float32_matmul_precision(self.matmul)
        torch.backends.cudnn.allow_tf32 = self.matmul == "high"


FP32 = Arithmetic()


def choose_arithmetic(
    settings: PrecisionSettings, device: torch.device, capability: tuple[int, int] | None = None
) -> tuple[Arithmetic, str]:
    """The arithmetic that `precision` means on this device, and why.

    `capability` is the CUDA device's. Raises ConfigError for what it cannot do or only at a loss.
    """
    dtype = None if settings.autocast is None else getattr(torch, settings.autocast)
    arithmetic = Arithmetic(
        settings.name, device.type, dtype, settings.matmul, settings.loss_scale
    )  # fmt: skip
    works = "precision=fp32 or precision=bf16"
    if device.type == "cpu":
        if settings.name == "tf32":
            raise ConfigError(
                f"precision=tf32 is a format of CUDA devices, not of this CPU: {works}"
            )
        if settings.name == "fp16":
            # Measured: torch's fp16 convolution needs 100x the time of fp32 going backward.
            raise ConfigError(
                f"precision=fp16 is for CUDA devices and slower than fp32 on a CPU; use {works}"
            )
        if settings.name == "bf16":
            fast = torch.backends.cpu.get_cpu_capability().startswith(("AVX512", "AMX")) and (
                torch.ops.mkldnn._is_mkldnn_bf16_supported()
            )
            how = "in hardware" if fast else "emulated: slower than fp32"
            return arithmetic, f"bf16 matrix products on this CPU, {how}; losses in float32"
        return arithmetic, "float32 throughout"
    if settings.name in ("tf32", "bf16") and capability is not None and capability < (8, 0):
        raise ConfigError(
            f"precision={settings.name} needs compute capability 8.0, this device has "
            f"{capability[0]}.{capability[1]}; use precision=fp16 or precision=fp32"
        )
    return arithmetic, {
        "fp32": "float32 throughout, TF32 off",
        "tf32": "float32 with TF32 matrix products and convolutions",
        "bf16": "bf16 matrix products and convolutions; losses in float32",
        "fp16": "fp16 matrix products and convolutions with a loss scale; losses in float32",
    }[settings.name]


class NoScale:
    """Every precision but fp16: `LossScale`, doing nothing.

    It hands on the scale of a checkpoint, so that precisions can follow one another.
    """

    state: tuple[Tensor, ...] = ()

    def __init__(self) -> None:
        self._kept = {n: torch.tensor(x) for n, x in zip(_NAMES, _INITIAL, strict=True)}

    def scaled(self, loss: Tensor, state: Sequence[Tensor]) -> Tensor:
        """The loss."""
        return loss

    def unscaled(self, grads: Tensor, state: Sequence[Tensor]) -> Tensor:
        """The gradients."""
        return grads

    def judge(self, norm: Tensor) -> tuple[Tensor, Tensor | int, Tensor | None, Tensor | None]:
        """Every step is applied."""
        return norm, 1, None, None

    def on(self, divisor: Tensor, scale: Tensor | None) -> Tensor:
        """The divisor of the gradients."""
        return divisor

    def settle(
        self, state: Sequence[Tensor], norm: Tensor, old: Sequence[Tensor], new: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], tuple[Tensor, ...]]:
        """The new tensors."""
        return new, ()

    def check(self, attempted: int) -> int:
        """No update is skipped here; those of the session before stay counted."""
        return int(self._kept["skipped"])

    def state_dict(self) -> dict[str, Tensor]:
        """The state that was loaded."""
        return self._kept

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Keep it."""
        self._kept = state


_NAMES = ("scale", "streak", "skipped")
_INITIAL = (65536.0, 0.0, 0.0)


class LossScale:
    """Dynamic loss scale as tensors, so that no update waits for the host (TRAPS: fp16 scaler).

    The rule is torch.amp.GradScaler's: halve after gradients that are not finite, double after
    2,000 good steps in a row.
    """

    def __init__(self, initial: float, device: torch.device) -> None:
        self.scale = torch.tensor(initial, device=device)
        self.streak = torch.zeros((), device=device)
        self.skipped = torch.zeros((), device=device)
        self._judged = (0, 0)

    @property
    def state(self) -> tuple[Tensor, ...]:
        """The tensors that an update moves: scale, streak, skipped."""
        return (self.scale, self.streak, self.skipped)

    def scaled(self, loss: Tensor, state: Sequence[Tensor]) -> Tensor:
        """The loss whose gradients are taken."""
        return loss * state[0]

    def unscaled(self, grads: Tensor, state: Sequence[Tensor]) -> Tensor:
        """The gradients [P] of the loss itself."""
        return grads / state[0]

    def judge(self, norm: Tensor) -> tuple[Tensor, Tensor | int, Tensor | None, Tensor | None]:
        """Judge gradients whose norm, still scaled, is `norm`; moves the scale.

        The norm unscaled, 1 for a step that is applied (else 0), the scale that is on the
        gradients, and 1.0 for a step that is refused, as torch's fused optimizers take it.
        """
        norm, before = norm / self.scale, self.scale.clone()
        finite = norm.isfinite()
        moved = move_scale(self.state, finite)
        for tensor, value in zip(self.state, moved, strict=True):
            tensor.copy_(value)
        return norm, finite, before, (~finite).to(torch.float32)

    def on(self, divisor: Tensor, scale: Tensor | None) -> Tensor:
        """The divisor of the scaled gradients; `scale` as `judge` told it."""
        assert scale is not None
        return divisor * scale

    def settle(
        self, state: Sequence[Tensor], norm: Tensor, old: Sequence[Tensor], new: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], tuple[Tensor, ...]]:
        """`new`, or `old` where `norm` is not finite; and the state after it, as a function."""
        finite = norm.isfinite()
        kept = [torch.where(finite, n, o) for n, o in zip(new, old, strict=True)]
        return kept, move_scale(state, finite)

    def check(self, attempted: int) -> int:
        """Updates skipped so far, read off the device; `attempted` counts all of them.

        Raises FloatingPointError when most updates are skipped or the scale is at its floor.
        """
        skipped = int(self.skipped)
        if float(self.scale) < MIN_SCALE:
            raise FloatingPointError(
                f"precision=fp16: gradients overflow even at loss scale {float(self.scale):g}, "
                f"{skipped} of {attempted} updates were skipped; use precision=bf16 or fp32, or a "
                "lower algo.learning_rate"
            )
        before, then = self._judged
        if attempted - before >= JUDGED_UPDATES:
            if 2 * (skipped - then) > attempted - before:
                raise FloatingPointError(
                    f"precision=fp16: {skipped - then} of the last {attempted - before} updates "
                    "were skipped because their gradients were not finite; use precision=bf16 or "
                    "precision=fp32"
                )
            self._judged = (attempted, skipped)
        return skipped

    def state_dict(self) -> dict[str, Tensor]:
        """The scale travels with every checkpoint, so that precisions can follow one another."""
        return {n: x.to("cpu", copy=True) for n, x in zip(_NAMES, self.state, strict=True)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Inverse of `state_dict`."""
        self.scale.copy_(state["scale"])
        self.streak.copy_(state["streak"])
        self.skipped.copy_(state["skipped"])
        self._judged = (0, int(self.skipped))


def move_scale(state: Sequence[Tensor], finite: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scale, streak and skipped count, all scalars, after one attempted update."""
    scale, streak, skipped = state
    grown = streak + 1
    full = grown >= GROWTH_INTERVAL
    return (
        torch.where(finite, torch.where(full, scale * GROWTH, scale), scale * BACKOFF),
        torch.where(finite & ~full, grown, torch.zeros_like(grown)),
        torch.where(finite, skipped, skipped + 1),
    )
