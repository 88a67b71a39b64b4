"""Device, arithmetic, compilation, random streams and threads; says why it chose."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_pipeline.config.settings import Settings
from rl_pipeline.engine.background import Background
from rl_pipeline.engine.cache import Index
from rl_pipeline.engine.compilers import Builder, CompilePlan, captured, choose_plan
from rl_pipeline.engine.flat import FlatParameters, LowCopy
from rl_pipeline.engine.graphs import Call, CompileLog, GraphFunction, calling
from rl_pipeline.engine.optim import Adam, GradientStep, Loss
from rl_pipeline.engine.phases import NullPhases, Phases, SerialisedPhases
from rl_pipeline.engine.precision import FP32, Arithmetic, choose_arithmetic
from rl_pipeline.engine.transfers import Transfers
from rl_pipeline.errors import ConfigError
from rl_pipeline.machine import cpu_budget, positive_int

STREAMS = ("envs", "eval", "init", "act", "update")
"""Independent random streams of a run; the order is part of what a seed means."""


def stream_seed(seed: int, stream: str, index: int = 0) -> int:
    """A 31-bit seed of one named stream, independent of the other streams of the same run."""
    words = np.random.SeedSequence([seed, STREAMS.index(stream), index]).generate_state(1)
    return int(words[0] >> 1)


@dataclass(frozen=True)
class ThreadPlan:
    """The shares of the CPU budget, in threads."""

    budget: int
    torch_threads: int
    env_threads: int
    act_threads: int
    """Threads of torch while lanes of environments step beside it."""
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
        # Small matrix products lose more to waking a second thread than they gain. Measured on two
        # cores with two layers of 64: minibatches of 512 rows 1.0x, of 1,024 1.18x, of 2,048 1.41x.
        rows = settings.minibatch_rows
        torch_threads = min(budget, max(1, rows * sum(settings.network.hidden) // (512 * 128)))
        why = "large enough to share" if torch_threads > 1 else "faster on one thread"
        reasons["torch"] = f"{torch_threads} (minibatches of {rows:,} rows, a small MLP: {why})"
    else:
        torch_threads = budget
        reasons["torch"] = f"{budget} (convolutions use the whole budget)"
    backend = settings.backend
    if backend.traits.steps == "processes":
        env_threads = settings.backend.num_envs
        reasons["envs"] = f"{env_threads} processes (backend={backend.name}: one per environment)"
    elif settings.env.kind not in backend.traits.threaded:
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
        # Measured on Pong, 8 environments, 2 cores: 0.95 of one vector's speed so, 0.76 with torch
        # on all cores (experiments/envs/lanes.md), whose threads spin while they wait.
        act_threads = max(1, budget // 2)
        reasons["act"] = f"{act_threads} (half of the budget: the other lane steps meanwhile)"
    return ThreadPlan(budget, torch_threads, env_threads, act_threads, reasons)


def choose_device(name: str) -> tuple[torch.device, str]:
    """The device and the reason for it.

    Raises ConfigError for device=cuda where torch sees no CUDA device.
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
        raise ConfigError(f"device=cuda cannot run here: {why}; use device=cpu or device=auto")
    return torch.device("cpu"), f"cpu (device=auto: {why})"


@dataclass(frozen=True)
class Runtime:
    """The base that the networks run on: device, arithmetic, and how functions are compiled."""

    device: torch.device
    device_reason: str
    threads: ThreadPlan
    seed: int
    arithmetic: Arithmetic = FP32
    plan: CompilePlan = CompilePlan()
    compile_log: CompileLog = field(default_factory=CompileLog)
    index: Index | None = None
    """Where graphs of earlier runs are found."""
    unroll_after: int | None = None
    """Eager updates before they lose their Python (`unroll`); None: as many as pay for it."""
    keeps_freed: bool = False
    """The C library keeps what is freed."""
    background: Background | None = None
    """What builds graphs beside the training (compile=auto)."""
    reasons: dict[str, str] = field(default_factory=dict)
    functions: dict[str, GraphFunction] = field(default_factory=dict)
    """What is built as graphs, by name."""

    @cached_property
    def transfers(self) -> Transfers:
        """Copies between host and device, and their ledger."""
        return Transfers(self.device)

    def build(
        self,
        name: str,
        pure: Call,
        eager: Call,
        state: Sequence[Tensor],
        moves: int,
        builder: Builder | None = None,
    ) -> Call:
        """The function that takes the inputs: `pure(*state, *inputs)` as one graph, or `eager`.

        `pure` may move the first `moves` tensors of `state` in place, and `eager(*inputs)` does
        the same to them. Raises CompileError at the first call where that cannot be.
        """
        builder = builder or self.plan.build
        if builder is None:
            return eager
        function = self.functions[name] = GraphFunction(
            name, pure, eager, state, moves, builder, self.compile_log, self.plan.fallback,
            self.synchronize, self.index, self.background,
        )  # fmt: skip
        return function

    def capture_once(self, name: str, function: Call) -> Call:
        """`function(*tensors)`, called once per rollout: captured where graphs are, else as it is.

        Measured on the CPU: compiling the advantages takes seconds and saves 0.1 ms a rollout.
        """
        if self.plan.capture is None:
            return function
        return self.build(name, function, function, (), 0, captured(None, self.plan.capture))

    def compile(
        self,
        name: str,
        function: Call,
        reads: Sequence[FlatParameters] = (),
        low: LowCopy | None = None,
    ) -> Call:
        """`function(*tensors)`, which calls the modules that own `reads`, as `compile` says.

        It returns a tuple of tensors, draws no random numbers and reads no tensor that is neither
        an argument nor a parameter of `reads`. A graph takes those of the first one that `low` has
        from there.
        """
        call = calling([p.module for p in reads], function)
        copies = [] if low is None else [low.values]

        def pure(*tensors: Tensor) -> tuple[Tensor, ...]:
            flat, args = tensors[: len(reads)], tensors[len(reads) + len(copies) :]
            named = [p.views(x) for p, x in zip(reads, flat, strict=True)]
            if low is not None:
                named[0] |= low.views(tensors[len(reads)])
            return call(named, *args)

        return self.build(name, pure, function, [*(p.values for p in reads), *copies], 0)

    def low_copy(self, params: FlatParameters, names: Sequence[str]) -> LowCopy | None:
        """Parameters in the type of the matrix products, where a graph would cast them each time.

        Measured on the CPU: casts are a quarter of acting for 8 images with a Nature CNN in bf16.
        """
        dtype = self.arithmetic.autocast
        if dtype is None or self.plan.build is None or self.device.type != "cpu":
            return None
        return LowCopy(params, names, dtype)

    def gradient_step(
        self,
        name: str,
        loss: Loss,
        params: FlatParameters,
        eps: float,
        max_grad_norm: float,
        frozen: Sequence[FlatParameters] = (),
    ) -> GradientStep:
        """Forward, backward, clipping and Adam as one step; see `optim.GradientStep`."""
        adam = Adam(params.values, params.grads, eps, max_grad_norm, self.arithmetic.loss_scale)
        return GradientStep(
            name, loss, params, adam, frozen, self.build, self.plan.capture is not None,
            self.compile_log, self.unroll_after,
        )  # fmt: skip

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

    def make_phases(self, profile: str) -> Phases | NullPhases:
        """The phases that `profile` names.

        Raises ConfigError for profile=serialised without an asynchronous device.
        """
        if profile == "none":
            return NullPhases()
        if profile == "phases":
            return Phases(new_event=self.new_event())
        if self.device.type == "cpu":
            raise ConfigError(
                "profile=serialised waits for a GPU around each phase and has no effect on the "
                "CPU, where profile=phases is exact; use that"
            )
        return SerialisedPhases(self.synchronize)

    def new_event(self) -> Callable[[], Any] | None:
        """Factory of timing events where work is asynchronous, else None."""
        if self.device.type == "cpu":
            return None
        return lambda: torch.cuda.Event(enable_timing=True)


def keep_freed_memory() -> bool:
    """Let glibc keep large blocks that are freed; False where there is no glibc.

    By default it returns them to the kernel at every free, so that each convolution pays the page
    faults of its activations again: measured 1.2x on a Nature CNN update of 256 on the CPU, and
    1.15x on an update of two layers of 120 and 84 with 128 rows.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # malloc.h
    settings = {mmap_threshold: 1 << 30, trim_threshold: 2**31 - 1, top_pad: 64 << 20}
    return all([mallopt(option, value) for option, value in settings.items()])


def make_runtime(settings: Settings, seed: int, alone: bool = True) -> Runtime:
    """Choose device, arithmetic, compilation, threads and allocator; apply them to this process.

    `alone`: it is no job of a sweep. Raises ConfigError for what this machine cannot do.
    """
    device, device_reason = choose_device(settings.device.name)
    cuda = device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if cuda else None
    arithmetic, why = choose_arithmetic(settings.precision, device, capability)
    plan, how = choose_plan(settings.compile, device, alone)
    threads = thread_plan(settings, *cpu_budget())
    torch.set_num_threads(threads.torch_threads)
    keeps = settings.memory.keep_freed and not cuda and keep_freed_memory()
    arithmetic.apply()
    reasons = {"precision": why, "compile": how, "optimizer": "Adam on one flat vector, "}
    graph, fused = "inside the graph", "torch's fused kernel, clipping folded in"
    forms = {"eager": fused, "auto": f"{graph} once there is one, {fused} before"}
    reasons["optimizer"] += forms.get(plan.name, graph)
    if settings.network.name != "mlp":
        reasons["memory_format"] = "channels last (measured 1.2-1.3x on a Nature CNN update)"
    if settings.memory.keep_freed and not keeps:
        reasons["keep_freed"] = f"no: {'on a GPU it changes little' if cuda else 'no glibc here'}"
    return Runtime(
        device, device_reason, threads, seed, arithmetic, plan, reasons=reasons, keeps_freed=keeps
    )  # fmt: skip
