"""Whole functions as one graph: traced, built by a compiler or captured, counted and timed.

A function is pure in its tensor arguments: `state` (flat vectors with a storage of their own that
it may move in place) and inputs. It is traced once per form of its inputs into a single graph of
ATen calls, backward pass included, and that graph is built in one of several ways. What a graph
must not contain is found when it is traced: tensors that are no argument (their values would be
frozen) and random numbers (so would they; noise is an argument).
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rl_pipeline.engine.background import Background
from rl_pipeline.engine.cache import Index, Package

Call = Callable[..., tuple[Tensor, ...]]
Builder = Callable[[torch.fx.GraphModule, Sequence[Tensor], Sequence[Tensor]], Call]
"""(graph, state, inputs) -> the built graph, called with state and inputs."""

MAX_GRAPHS = 8
"""Forms of input that one function may have: more means that shapes are not fixed."""
TIMING_S = 0.3
"""Seconds spent on timing eager updates, and as many on compiled ones."""


class CompileError(RuntimeError):
    """A function that could not be compiled: names it, the cause and the way out."""


def calling(modules: Sequence[nn.Module], function: Call) -> Callable[..., tuple[Tensor, ...]]:
    """`function(*args)` with the modules' parameters taken from elsewhere.

    Returns f(parameters, *args), where `parameters` is one dict of tensors by name per module.
    """

    class Bound(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.owners = nn.ModuleList(modules)

        def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
            return function(*args)

    bound = Bound()

    def call(parameters: Sequence[dict[str, Tensor]], *args: Tensor) -> tuple[Tensor, ...]:
        named = {f"owners.{i}.{n}": x for i, p in enumerate(parameters) for n, x in p.items()}
        return torch.func.functional_call(bound, named, args)

    return call


def trace(function: Call, args: Sequence[Tensor]) -> torch.fx.GraphModule:
    """`function` on tensors of the form of `args` as one graph of ATen calls.

    Raises ValueError for what a graph would freeze, and whatever the function raises.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # half a second to import

    with torch.inference_mode(False), torch.no_grad():
        example = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in args
        ]
        graph = make_fx(
            lambda *args: function(*args), tracing_mode="fake", _allow_non_fake_inputs=True
        )(*example)
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            raise ValueError(f"it reads a tensor that is not an argument ({node.target})")
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags:
            raise ValueError(f"it draws random numbers ({node.target}), which would be frozen")
    return graph


@dataclass
class Entry:
    """One graph that was built."""

    name: str
    seconds: float
    nodes: int
    cached: bool
    """Taken from an earlier run."""


@dataclass
class CompileLog:
    """All that compiling did in this process, and whether it pays."""

    entries: list[Entry] = field(default_factory=list)
    fallbacks: dict[str, str] = field(default_factory=dict)
    """Functions that run eagerly although they should not, and why."""
    eager_update_s: float | None = None
    compiled_update_s: float | None = None
    timing_s: float = 0.0
    """Spent on measuring these two."""
    unroll_s: float = 0.0
    """Spent on tracing eager updates (`unroll`)."""
    phase: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered while anything of this happens."""
    update_form: str = "eager"
    """How updates run now: eager or default (compile=auto)."""

    @property
    def seconds(self) -> float:
        """Tracing, building and loading, all graphs."""
        return sum(e.seconds for e in self.entries)

    @property
    def aside_s(self) -> float:
        """All time that is not training: building, measuring, tracing."""
        return self.seconds + self.timing_s + self.unroll_s

    @property
    def recompiles(self) -> int:
        """Graphs beyond the first of each function."""
        return len(self.entries) - len({e.name for e in self.entries})

    def metrics(self) -> dict[str, float]:
        """For the log tick; empty before the first graph."""
        if not self.entries and not self.fallbacks:
            return {}
        row = {
            "compile/seconds": self.seconds,
            "compile/graphs": float(len(self.entries)),
            "compile/recompiles": float(self.recompiles),
            "compile/graph_breaks": float(len(self.fallbacks)),
        }
        if self.eager_update_s and self.compiled_update_s:
            row["compile/update_speedup"] = self.eager_update_s / self.compiled_update_s
            payback = break_even(self.seconds, self.eager_update_s, self.compiled_update_s, 0)
            if payback["pays_back_after_updates"] is not None:
                row["compile/pays_back_after_updates"] = payback["pays_back_after_updates"]
        return row

    def report(self, updates: int) -> dict[str, Any]:
        """For result.json, after `updates` updates of this session."""
        found: dict[str, Any] = {
            "seconds": self.seconds,
            "graphs": len(self.entries),
            "recompiles": self.recompiles,
            "graph_breaks": len(self.fallbacks),
        }
        if self.entries:
            found["functions"] = [vars(e) for e in self.entries]
        if self.fallbacks:
            found["fallbacks"] = dict(self.fallbacks)
        if self.unroll_s:
            found["unroll_s"] = self.unroll_s
        if self.eager_update_s and self.compiled_update_s:
            found |= break_even(self.seconds, self.eager_update_s, self.compiled_update_s, updates)
        return found


def break_even(compile_s: float, eager_s: float, compiled_s: float, updates: int) -> dict[str, Any]:
    """When `compile_s` is earned back at `eager_s` against `compiled_s` an update.

    The net gain counts all of `updates`; `verdict` is what this run should have chosen.
    """
    gain = eager_s - compiled_s
    net = updates * gain - compile_s
    return {
        "eager_update_s": eager_s,
        "compiled_update_s": compiled_s,
        "update_speedup": eager_s / compiled_s,
        "pays_back_after_updates": round(compile_s / gain) if gain > 0 else None,
        "net_s": net,
        "verdict": "on" if net > 0 else "off",
    }


@contextmanager
def preserved(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Put the values of `tensors` back at the end of the block."""
    before = [x.detach().clone() for x in tensors]
    yield
    with torch.no_grad():
        for x, old in zip(tensors, before, strict=True):
            x.copy_(old)


def _form(inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    """Built graphs trust their inputs: another shape, stride or type is another graph."""
    return tuple([(x.shape, x.stride(), x.dtype) for x in inputs])


class GraphFunction:
    """A function whose every call runs one built graph; one graph per form of its inputs."""

    def __init__(
        self,
        name: str,
        pure: Call,
        eager: Call,
        state: Sequence[Tensor],
        moves: int,
        build: Builder,
        log: CompileLog,
        fallback: bool,
        synchronize: Callable[[], None] = lambda: None,
        index: Index | None = None,
        later: Background | None = None,
    ) -> None:
        """`pure(*state, *inputs)` may move the first `moves` tensors of `state` in place;
        `eager(*inputs)` does the same to the same tensors by other means. `index` finds graphs of
        earlier runs; with `later`, what it does not find runs eagerly until `settle`."""
        self._index, self._later = index, later
        self.name, self._pure, self._eager = name, pure, eager
        self._state, self._moves = tuple(state), moves
        self._build, self._log, self._fallback = build, log, fallback
        self._synchronize = synchronize
        self._calls: dict[tuple[Any, ...], Call] = {}

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs; they belong to the caller."""
        form = _form(inputs)
        call = self._calls.get(form)
        if call is None:
            with self._log.phase():
                call = self._calls[form] = self._add(inputs)
        return call(*self._state, *inputs)

    def settle(self, inputs: Sequence[Tensor]) -> bool:
        """Take the graph for calls like `inputs` if it was built meanwhile and is faster."""
        with self._log.phase():
            call = self._find(inputs)
            if call is None:
                return False
            if self._moves:
                self._time(call, self._run_eagerly, inputs)
                self._note(call, inputs, self._log.entries[-1].nodes)
            if not self._is_faster():
                return False
            self._calls[_form(inputs)] = call
            self._note_form()
        return True

    def _note_form(self) -> None:
        if self._moves:
            self._log.update_form = "default"

    def _is_faster(self) -> bool:
        log = self._log
        if not self._moves or not log.eager_update_s or not log.compiled_update_s:
            return True
        return log.compiled_update_s < log.eager_update_s

    def _find(self, inputs: Sequence[Tensor]) -> Call | None:
        """A graph that an earlier run built, found without tracing."""
        begin = time.perf_counter()
        args = (*self._state, *inputs)
        found = self._index.find(self.name, args) if self._index else None
        if found is None:
            return None
        call, noted = found
        with preserved(self._state[: self._moves]):
            call(*args)
        seconds = time.perf_counter() - begin
        self._log.entries.append(Entry(self.name, seconds, noted.get("nodes", 0), True))
        if self._moves and self._log.eager_update_s is None:
            self._log.eager_update_s = noted.get("eager_s")
            self._log.compiled_update_s = noted.get("compiled_s")
        return call

    def _run_eagerly(self, *args: Tensor) -> tuple[Tensor, ...]:
        return self._eager(*args[len(self._state) :])

    def prepare(self, inputs: Sequence[Tensor]) -> None:
        """Build the graph for calls like `inputs`, without timing it."""
        self._add(inputs, timed=False)

    def _add(self, inputs: Sequence[Tensor], timed: bool = True) -> Call:
        eager: Call = self._run_eagerly
        if self.name in self._log.fallbacks:
            return eager
        found = self._find(inputs)
        if self._later is not None:
            if found is not None and self._is_faster():
                self._note_form()
                return found
            if found is None:
                self._later.want(self, inputs)
            return eager
        if found is not None:
            if timed and self._moves and self._log.eager_update_s is None:
                self._time(found, eager, inputs)
            return found
        begin = time.perf_counter()
        try:
            if len(self._calls) >= MAX_GRAPHS:
                raise ValueError(f"its inputs have more than {MAX_GRAPHS} forms")
            graph = trace(self._pure, (*self._state, *inputs))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the compiler's own making
                with preserved(self._state[: self._moves]):
                    call = self._build(graph, self._state, inputs)
                    call(*self._state, *inputs)  # some compile at their first call
                    self._synchronize()
        except Exception as error:
            cause = f"{type(error).__name__}: {error}".splitlines()[0]
            if not self._fallback:
                raise CompileError(
                    f"'{self.name}' cannot be compiled: {cause}; use compile=eager, another "
                    "compile.backend, or compile.fallback=true to run it eagerly"
                ) from error
            self._log.fallbacks[self.name] = cause
            return eager
        self._log.entries.append(
            Entry(
                self.name, time.perf_counter() - begin, len(graph.graph.nodes),
                getattr(call, "cached", False),
            )
        )  # fmt: skip
        if timed and self._moves and self._log.eager_update_s is None:
            self._time(call, eager, inputs)
        self._note(call, inputs, len(graph.graph.nodes))
        return call

    def _note(self, call: Call, inputs: Sequence[Tensor], nodes: int) -> None:
        """Let later runs find the graph; how fast it is, they take from here."""
        if self._index is None or not isinstance(call, Package):
            return
        facts: dict[str, float | None] = {"nodes": nodes}
        if self._moves:
            facts |= {"eager_s": self._log.eager_update_s}
            facts |= {"compiled_s": self._log.compiled_update_s}
        self._index.note(self.name, (*self._state, *inputs), call, **facts)

    def _time(self, call: Call, eager: Call, inputs: Sequence[Tensor]) -> None:
        """Seconds of one update, eager and compiled, in turns; nothing moves."""
        seconds: dict[str, list[float]] = {"eager": [], "compiled": []}
        begin = time.perf_counter()
        with preserved(self._state[: self._moves]):
            outputs = call(*self._state, *inputs)
            eager(*self._state, *inputs)  # warm
            while time.perf_counter() - begin < 2 * TIMING_S or len(seconds["eager"]) < 3:
                for name, run in (("eager", eager), ("compiled", call)):
                    self._synchronize()
                    start = time.perf_counter()
                    run(*self._state, *inputs)
                    self._synchronize()
                    seconds[name].append(time.perf_counter() - start)
        self._log.timing_s += time.perf_counter() - begin
        minibatches = len(outputs[0])
        self._log.eager_update_s = statistics.median(seconds["eager"]) / minibatches
        self._log.compiled_update_s = statistics.median(seconds["compiled"]) / minibatches
