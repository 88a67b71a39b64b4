"""Builders of traced graphs: by a registered compiler, ahead of time, or captured."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rl_pipeline.config.settings import CompileSettings
from rl_pipeline.engine.cache import Package, cache_dir, machine_facts
from rl_pipeline.engine.graphs import Builder, Call
from rl_pipeline.errors import ConfigError

WARMUPS = 3
"""Calls before a capture: libraries choose algorithms and allocate in the first ones."""


# -- compilers ----------------------------------------------------------------------------------


def dynamo(backend: str, options: dict[str, Any] | None = None) -> Builder:
    """torch.compile with a registered backend; a graph that it would break is an error."""

    def build(
        graph: torch.fx.GraphModule, state: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> Call:
        return torch.compile(
            graph, backend=backend, fullgraph=True, dynamic=False, options=options or None
        )

    return build


QUICK = {"cpp.vec_isa_ok": True, "aot_inductor.precompile_headers": False}
"""Two thirds of a first build's time were ten trial compilations that ask what the CPU says of
itself (7 s), and precompiled headers (7 s), which pay from the eighth graph on."""


def ahead_of_time(options: dict[str, Any]) -> Builder:
    """AOTInductor packages, kept by what they compute, on what, and by which compiler."""

    def build(
        graph: torch.fx.GraphModule, state: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> Call:
        example = (*state, *inputs)
        path = cache_dir() / "packages" / f"{package_key(graph, example, options)}.pt2"
        if path.exists():
            try:
                return Package(path, cached=True)
            except RuntimeError:  # torn by a full disk, say: built again
                path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            tempfile.TemporaryDirectory(dir=path.parent) as folder,
        ):
            plain = tuple(torch.empty_strided(
                x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in example)  # fmt: skip
            program = torch.export.export(graph, plain, strict=False)
            target = str(Path(folder) / "graph.pt2")
            try:
                fresh = _packaged(program, target, _known(QUICK) | options)
            except Exception:  # a compiler that knows less than the CPU: let inductor try it out
                fresh = _packaged(program, target, options)
            # Jobs of a sweep build the same graph at once: the last whole one stays.
            os.replace(fresh, path)
        return Package(path, cached=False)

    return build


def _packaged(program: Any, target: str, options: dict[str, Any]) -> str:
    package = torch._inductor.aoti_compile_and_package
    return package(program, package_path=target, inductor_configs=options)


def _known(options: dict[str, Any]) -> dict[str, Any]:
    """The options that this version of inductor has."""
    from torch._inductor import config

    return {key: value for key, value in options.items() if key in config.get_config_copy()}


def package_key(
    graph: torch.fx.GraphModule, example: Sequence[Tensor], options: dict[str, Any]
) -> str:
    """Digest of what a package depends on: code, forms of its arguments, and this machine."""
    facts = (
        graph.code,
        [(tuple(x.shape), x.stride(), str(x.dtype), str(x.device)) for x in example],
        sorted(options.items()),
        *machine_facts(),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


# -- capture ------------------------------------------------------------------------------------


class Capture(Protocol):
    """Recorder of a call, which also repeats it: CUDA, or a stand-in in the tests."""

    def warm_up(self, run: Callable[[], Any], times: int) -> None:
        """Call `run` where capturing it later is allowed."""

    def record(
        self, run: Callable[[], tuple[Tensor, ...]]
    ) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
        """(what repeats it, the outputs' memory, the same at each repetition)."""


class CudaCapture:
    """torch.cuda.CUDAGraph; all graphs of a run share one memory pool."""

    def __init__(self) -> None:
        self._pool: Any = None

    def warm_up(self, run: Callable[[], Any], times: int) -> None:
        """On a side stream, as capturing demands."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(times):
                run()
        torch.cuda.current_stream().wait_stream(side)

    def record(
        self, run: Callable[[], tuple[Tensor, ...]]
    ) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
        """Nothing runs while recording."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = run()
        self._pool = graph.pool()
        return graph.replay, outputs


class Captured:
    """One recorded call: inputs copied into its memory, outputs cloned out of it."""

    def __init__(
        self, call: Call, state: Sequence[Tensor], inputs: Sequence[Tensor], capture: Capture
    ) -> None:
        """Raises whatever the call or the capture raises; the warm-up moves `state`."""
        self._num_state = len(state)
        self._inputs = [x.clone() for x in inputs]
        self._seen: list[tuple[Tensor, int] | None] = [None] * len(inputs)
        run = lambda: call(*state, *self._inputs)  # noqa: E731
        capture.warm_up(run, WARMUPS)
        self._replay, self._outputs = capture.record(run)

    def __call__(self, *args: Tensor) -> tuple[Tensor, ...]:
        """State (where it was recorded) and inputs -> outputs that belong to the caller."""
        for i, x in enumerate(args[self._num_state :]):
            # The rows of a rollout come once per epoch, unchanged: they are copied once.
            version = None if x.is_inference() else x._version
            seen = self._seen[i]
            if version is None or seen is None or seen[0] is not x or seen[1] != version:
                self._inputs[i].copy_(x, non_blocking=True)
                self._seen[i] = None if version is None else (x, version)
        self._replay()
        return tuple(x.clone() for x in self._outputs)


def captured(build: Builder | None, capture: Capture) -> Builder:
    """Capture what `build` makes, or the graph as it is."""

    def build_and_capture(
        graph: torch.fx.GraphModule, state: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> Call:
        call = build(graph, state, inputs) if build else graph
        return Captured(call, state, inputs, capture)

    return build_and_capture


# -- choice -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompilePlan:
    """The way that `compile` builds and captures functions here."""

    name: str = "eager"
    build: Builder | None = None
    """None runs every function as it is."""
    capture: Capture | None = None
    """Recorder of calls, all minibatches of an epoch in one; None: each minibatch is a call."""
    fallback: bool = False
    kept: bool = False
    """Graphs are packages that later runs find by an index."""
    later: bool = False
    """What is not in the cache runs eagerly until another process has built it."""


def choose_plan(
    settings: CompileSettings, device: torch.device, alone: bool = True
) -> tuple[CompilePlan, str]:
    """The way functions are compiled on this device, and why; `alone` is no job of a sweep.

    Raises ConfigError for what this machine cannot do, naming what it can.
    """
    name, cuda = settings.name, device.type == "cuda"
    if name == "eager":
        return CompilePlan(), "compile=eager"
    if name == "auto":
        if why := _why_eager(cuda, alone):
            return CompilePlan(), f"eager (compile=auto: {why})"
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir()))
        plan = CompilePlan("auto", ahead_of_time({}), fallback=True, kept=True, later=True)
        return plan, "graphs of the cache at once, others once they are built beside the training"
    if not cuda and name in ("reduce_overhead", "cudagraphs"):
        raise ConfigError(
            f"compile={name} captures CUDA graphs, and the device is a CPU; use compile=default, "
            "whose whole-update graph has no per-kernel overhead either, or compile=eager"
        )
    backend = settings.backend or (None if name == "cudagraphs" else "inductor")
    if backend not in (None, "inductor"):
        check_backend(backend)
    options: dict[str, Any] = {"max_autotune": True} if name == "max_autotune" else {}
    if options and backend != "inductor":
        raise ConfigError("compile=max_autotune is inductor's; leave compile.backend out")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir()))
    build: Builder | None
    if backend == "inductor" and not cuda:
        check_compiler()
        build, form = ahead_of_time(options), "built ahead of time by inductor (AOTInductor)"
    elif backend is not None:
        build, form = dynamo(backend, options), f"built by torch.compile, backend {backend}"
    else:
        build, form = None, "kernels as eager launches them"
    capture: Capture | None = None
    if cuda and name != "default":
        capture = CudaCapture()
        build, form = captured(build, capture), f"{form}, captured as a CUDA graph"
    what = "an epoch's updates" if capture else "each update"
    kept = name == "default" and backend == "inductor" and not cuda
    plan = CompilePlan(name, build, capture, settings.fallback, kept)
    return plan, f"{what} and each act as one graph, {form}"


def _why_eager(cuda: bool, alone: bool) -> str:
    """What keeps compile=auto from building graphs; empty where nothing does."""
    if cuda:
        return "graphs are built beside the training on CPUs only; see compile=cudagraphs"
    if not alone:
        return "all jobs of a sweep are alike; see compile=default"
    try:
        check_compiler()
    except ConfigError:
        return "no C++ compiler is here"
    return ""


def check_backend(name: str) -> None:
    """Raises ConfigError for a torch.compile backend that is not registered or not installed."""
    import torch._dynamo

    known = torch._dynamo.list_backends(exclude_tags=())
    packages = {"tvm": "tvm", "openxla": "torch_xla", "openxla_eval": "torch_xla"}
    missing = {n for n, package in packages.items() if find_spec(package) is None}
    if name not in known or name in missing:
        why = "its package is not installed" if name in missing else "torch does not know it"
        usable = [n for n in known if n not in missing and "TESTING" not in n]
        raise ConfigError(f"compile.backend={name}: {why}; use one of: {', '.join(usable)}")


def check_compiler() -> None:
    """Raises ConfigError where inductor finds no C++ compiler."""
    names = [os.environ.get("CXX", ""), "g++", "clang++"]
    if not any(n and shutil.which(n) for n in names):
        raise ConfigError(
            "compile needs a C++ compiler on the CPU, and neither g++ nor clang++ is here; install "
            "one, or use compile=eager"
        )
