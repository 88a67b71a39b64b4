"""What could be set otherwise: the table that a new option extends by one entry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rl_pipeline.config.backends import BACKENDS, BackendName
from rl_pipeline.config.settings import PPOSettings, ReplayAlgorithm, Settings

Overrides = tuple[str, ...]
"""As on the command line; NAME=value in capitals is an environment variable before it."""


@dataclass(frozen=True)
class Machine:
    """What there is to choose from."""

    cores: int
    bf16: bool
    """The CPU multiplies bf16 by itself."""
    cuda: bool
    compiler: bool
    """A C++ compiler is here."""
    torch_threads: int = 0
    env_threads: int = 0
    """Those that the run takes of itself; 0: not known."""


@dataclass(frozen=True)
class Candidate:
    """One kind of change."""

    name: str
    options: Callable[[Settings, Machine], Iterator[Overrides]]
    """Those that differ from the settings and are worth a try on the machine."""
    recipe: bool = False
    """It changes what is learned, not only how fast."""


def _backends(settings: Settings, machine: Machine) -> Iterator[Overrides]:
    now, env = settings.backend, settings.env
    names: list[BackendName] = ["gymnasium_native", "envpool", "gymnasium"]
    if env.kind != "classic":
        names += ["envpool_async", "gymnasium_async"]  # processes and lanes only cost cheap tasks
    for name in names:
        if name != now.name and (env.envpool_id or not BACKENDS[name].own_ids):
            yield (f"backend={name}", f"backend.num_envs={now.num_envs}")


def _env_threads(settings: Settings, machine: Machine) -> Iterator[Overrides]:
    backend = settings.backend
    if settings.env.kind in backend.traits.threaded and backend.num_envs > 1:
        for threads in sorted({1, machine.cores} - {machine.env_threads}):
            yield (f"backend.num_threads={threads}",)


def _torch_threads(settings: Settings, machine: Machine) -> Iterator[Overrides]:
    for threads in sorted({1, machine.cores} - {machine.torch_threads}):
        yield (f"OMP_NUM_THREADS={threads}",)


def _lanes(settings: Settings, machine: Machine) -> Iterator[Overrides]:
    backend = settings.backend
    if backend.traits.most_lanes is None:
        for lanes in sorted({backend.traits.least_lanes, 2}):
            if lanes != backend.lanes and backend.num_envs % lanes == 0:
                yield (f"backend.lanes={lanes}",)


def _compile(settings: Settings, machine: Machine) -> Iterator[Overrides]:
    if machine.compiler and settings.compile.name in ("eager", "auto"):
        yield ("compile=default",)
    if machine.cuda and settings.compile.name != "cudagraphs":
        yield ("compile=cudagraphs",)


def _precision(settings: Settings, machine: Machine) -> Iterator[Overrides]:
    images = settings.network.name != "mlp"  # small matrices gain nothing from fewer bits
    if images and (machine.bf16 or machine.cuda) and settings.precision.name == "fp32":
        form = ("compile=default",) if machine.compiler else ()
        yield ("precision=bf16", *form)
    if settings.precision.name == "bf16" and not (machine.bf16 or machine.cuda):
        yield ("precision=fp32",)


def _device(settings: Settings, machine: Machine) -> Iterator[Overrides]:
    if machine.cuda:
        yield ("device=cpu",)
        yield ("device=cuda",)


def _buffer(settings: Settings, machine: Machine) -> Iterator[Overrides]:
    buffer = settings.buffer
    if buffer.name in ("deque", "memmap"):
        yield ("buffer=uniform", f"buffer.capacity={buffer.capacity}")
    if buffer.prefetch:
        yield ("buffer.prefetch=false",)
    if machine.cuda and isinstance(settings.algo, ReplayAlgorithm) and buffer.placement == "cpu":
        yield ("buffer.placement=cuda",)
        yield ("buffer.placement=pinned",)


def _allocator(settings: Settings, machine: Machine) -> Iterator[Overrides]:
    if not settings.memory.keep_freed:
        yield ("memory.keep_freed=true",)


def _num_envs(settings: Settings, machine: Machine) -> Iterator[Overrides]:
    num, algo = 4 * settings.backend.num_envs, settings.algo
    if isinstance(algo, PPOSettings) and algo.horizon % 4 == 0:
        # As many rows an update as before.
        yield (f"backend.num_envs={num}", f"algo.horizon={algo.horizon // 4}")
    else:
        yield (f"backend.num_envs={num}",)


def _minibatches(settings: Settings, machine: Machine) -> Iterator[Overrides]:
    algo = settings.algo
    if isinstance(algo, PPOSettings) and algo.num_minibatches % 2 == 0:
        yield (f"algo.num_minibatches={algo.num_minibatches // 2}",)


def _burst(settings: Settings, machine: Machine) -> Iterator[Overrides]:
    algo = settings.algo
    if isinstance(algo, ReplayAlgorithm) and algo.update_burst == 1:
        yield ("algo.update_burst=8",)


CANDIDATES = (
    Candidate("backend", _backends),
    Candidate("environment threads", _env_threads),
    Candidate("torch threads", _torch_threads),
    Candidate("lanes", _lanes),
    Candidate("compile", _compile),
    Candidate("precision", _precision),
    Candidate("device", _device),
    Candidate("buffer", _buffer),
    Candidate("allocator", _allocator),
    Candidate("environments", _num_envs, recipe=True),
    Candidate("minibatches", _minibatches, recipe=True),
    Candidate("updates together", _burst, recipe=True),
)


def proposals(settings: Settings, machine: Machine) -> Iterator[tuple[Candidate, Overrides]]:
    """Everything worth a try, those that keep the recipe first."""
    for candidate in CANDIDATES:
        for overrides in candidate.options(settings, machine):
            yield candidate, overrides
