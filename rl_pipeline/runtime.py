"""Device, arithmetic, optimizer step, random streams and threads; says why it chose."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from rl_pipeline.cpus import cpu_budget, positive_int
from rl_pipeline.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])

STREAMS = ("envs", "eval", "init", "act", "update")
"""Independent random streams of a run; the order is part of what a seed means."""


def stream_seed(seed: int, stream: str, index: int = 0) -> int:
    """A 31-bit seed of one named stream, independent of the other streams of the same run."""
    words = np.random.SeedSequence([seed, STREAMS.index(stream), index]).generate_state(1)
    return int(words[0] >> 1)


@dataclass(frozen=True)
class ThreadPlan:
    """How the CPU budget is shared out."""

    budget: int
    torch_threads: int
    env_threads: int
    act_threads: int
    """Of torch while lanes of environments step beside it."""
    reasons: dict[str, str] = field(default_factory=dict)


def thread_plan(settings: Settings, budget: int, reason: str) -> ThreadPlan:
    """Share `budget` cores between torch and EnvPool, which take turns in mode=sync.

    The user's OMP_NUM_THREADS and backend.num_threads win.
    """
    reasons = {"budget": f"{budget} cores ({reason})"}
    if user := os.environ.get("OMP_NUM_THREADS"):
        # OpenMP takes a list, one number per nesting level: the first is ours.
        torch_threads = positive_int("OMP_NUM_THREADS", user.split(",")[0])
        reasons["torch"] = f"{user} (OMP_NUM_THREADS)"
    elif settings.network.name == "mlp":
        # Small matrix products lose more to waking a second thread than they gain.
        torch_threads = 1
        reasons["torch"] = "1 (a small MLP is faster on one thread)"
    else:
        torch_threads = budget
        reasons["torch"] = f"{budget} (convolutions use the whole budget)"
    if settings.backend.name == "gymnasium_async":
        env_threads = settings.backend.num_envs
        reasons["envs"] = f"{env_threads} processes (backend=gymnasium_async: one per environment)"
    elif settings.backend.name == "gymnasium" or (
        settings.backend.name == "gymnasium_native" and settings.env.kind != "atari"
    ):
        env_threads = 1
        reasons["envs"] = f"1 (backend={settings.backend.name} steps in the training thread)"
    elif settings.backend.num_threads != "auto":
        env_threads = settings.backend.num_threads
        reasons["envs"] = f"{env_threads} (backend.num_threads)"
    elif settings.env.kind == "classic" and settings.backend.num_envs < 256:
        # Measured: below about 256 environments the hand-off to a second thread costs more than
        # it saves on tasks of a microsecond a step.
        env_threads = 1
        reasons["envs"] = "1 (a second thread slows cheap environments below 256)"
    else:
        env_threads = min(budget, settings.backend.num_envs)
        reasons["envs"] = f"{env_threads} (the budget, at most one per environment)"
    act_threads = torch_threads
    if settings.backend.lanes > 1 and torch_threads > 1 and not user:
        # Threads of torch that wait for each other spin, and take the cores from the lane that
        # steps meanwhile; one that is kept off its core stops all of them.
        act_threads = max(1, budget // 2)
        reasons["act"] = f"{act_threads} (half of the budget: the other lane steps meanwhile)"
    return ThreadPlan(budget, torch_threads, env_threads, act_threads, reasons)


def choose_device(name: str) -> tuple[torch.device, str]:
    """The device and the reason for it.

    Raises ValueError for device=cuda where torch sees no CUDA device.
    """
    if name == "cpu":
        return torch.device("cpu"), "device=cpu"
    if torch.cuda.is_available():
        return torch.device("cuda"), f"{torch.cuda.get_device_name()} (device={name})"
    why = (
        "this torch is built without CUDA"
        if torch.version.cuda is None
        else "torch sees no CUDA device"
    )
    if name == "cuda":
        raise ValueError(f"device=cuda cannot run here: {why}; use device=cpu or device=auto")
    return torch.device("cpu"), f"cpu (device=auto: {why})"


class Adam:
    """Global-norm clipping and Adam (Kingma & Ba 2015, arXiv:1412.6980) on one flat vector."""

    def __init__(
        self, params: torch.Tensor, grads: torch.Tensor, eps: float, max_grad_norm: float
    ) -> None:
        self._params, self._grads = params, grads
        self._eps, self._max_norm = eps, max_grad_norm
        self._mean, self._square = torch.zeros_like(params), torch.zeros_like(params)
        self._steps = torch.zeros((), device=params.device)

    def step(self, learning_rate: float) -> torch.Tensor:
        """Apply the gradients once and zero them; returns their global norm before clipping."""
        norm = torch.linalg.vector_norm(self._grads)
        self._steps += 1
        # torch.optim.Adam's own fused kernel, called directly: the class around it costs more than
        # the kernel on small networks, and imports the compiler (a second) at its first step.
        torch._fused_adam_(
            [self._params], [self._grads], [self._mean], [self._square], [], [self._steps],
            lr=learning_rate, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=self._eps,
            amsgrad=False, maximize=False,
            # The kernel divides the gradients by this: clipping without a pass of its own.
            grad_scale=((norm + 1e-6) / self._max_norm).clamp(min=1.0), found_inf=None,
        )  # fmt: skip
        self._grads.zero_()
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Moments and step count, as a copy on the CPU."""
        state = {"mean": self._mean, "square": self._square, "steps": self._steps}
        return {name: x.to("cpu", copy=True) for name, x in state.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self._mean.copy_(state["mean"])
        self._square.copy_(state["square"])
        self._steps.copy_(state["steps"])


@dataclass(frozen=True)
class Runtime:
    """What the networks run on and with. One form so far: fp32, eager."""

    device: torch.device
    device_reason: str
    threads: ThreadPlan
    seed: int

    def compile(self, function: F) -> F:
        """`function` as compile=eager runs it: unchanged."""
        return function

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of one forward pass; does nothing in fp32."""
        return nullcontext()

    def optimizer(
        self, params: torch.Tensor, grads: torch.Tensor, eps: float, max_grad_norm: float
    ) -> Adam:
        """The optimizer step over the flat vectors."""
        return Adam(params, grads, eps, max_grad_norm)

    def generator(self, stream: str) -> torch.Generator:
        """A fresh generator of one of the run's streams, on the device."""
        return torch.Generator(self.device).manual_seed(stream_seed(self.seed, stream))

    def synchronize(self) -> None:
        """Wait for the device's queued work; nothing to wait for on the CPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextmanager
    def beside_envs(self) -> Iterator[None]:
        """Inside, torch leaves cores to environments that step at the same time."""
        torch.set_num_threads(self.threads.act_threads)
        try:
            yield
        finally:
            torch.set_num_threads(self.threads.torch_threads)

    def new_event(self) -> Callable[[], Any] | None:
        """Factory of timing events where work is asynchronous, else None."""
        if self.device.type == "cpu":
            return None
        return lambda: torch.cuda.Event(enable_timing=True)


def keep_freed_memory() -> bool:
    """Let glibc keep large blocks that are freed; False where there is no glibc.

    By default it returns them to the kernel at every free, so that each convolution pays the page
    faults of its activations again: measured 1.2x on a Nature CNN update of 256 on the CPU.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # malloc.h
    settings = {mmap_threshold: 1 << 30, trim_threshold: 2**31 - 1, top_pad: 64 << 20}
    return all([mallopt(option, value) for option, value in settings.items()])


def make_runtime(settings: Settings, seed: int) -> Runtime:
    """Choose device, threads and allocator and apply them to this process."""
    device, reason = choose_device(settings.device.name)
    plan = thread_plan(settings, *cpu_budget())
    torch.set_num_threads(plan.torch_threads)
    if device.type == "cpu" and settings.network.name != "mlp":
        keep_freed_memory()
    # precision=fp32 says fp32: a TF32 default of the library must not slip in.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    return Runtime(device, reason, plan, seed)
