"""One change against what is: two processes that take turns, and the ratio of their speeds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from rl_pipeline.config.settings import Settings
from rl_pipeline.diagnosis.candidates import Overrides
from rl_pipeline.diagnosis.worker import Worker, WorkerError

PAIRS = 5
"""Pairs of turns, and as many again where the interval holds 1 and the ratio looks like more."""
HOPE = 1.03


@dataclass(frozen=True)
class Trial:
    """What a change gives to the loop, by measurement."""

    change: str
    """The candidate's name."""
    overrides: Overrides
    recipe: bool
    ratio: float
    low: float
    high: float
    """Speed over the speed before, and its 95 % interval."""
    pairs: int
    compile_s: float
    """Seconds that building graphs took here; later runs find them in the cache."""
    memory_bytes: int
    """More than before; of the process, without its children."""
    refused: str = ""
    """Why it does not run here; the figures are 0 then."""

    @property
    def better(self) -> bool:
        """Surely faster."""
        return not self.refused and self.low > 1.0


def ratio_of(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean of paired ratios and its 95 % interval (Student's t on the logarithms)."""
    logs = np.log(ratios)
    reach = np.inf
    if len(logs) > 1:
        reach = float(stats.t.ppf(0.975, len(logs) - 1) * stats.sem(logs))
    mean, low, high = (float(np.exp(logs.mean() + d)) for d in (0.0, -reach, reach))
    return mean, low, high


def take_turns(base: Worker, other: Worker, seconds: float, pairs: int) -> list[float]:
    """Ratios of rates, other over base, of pairs whose order changes."""
    ratios = []
    for pair in range(pairs):
        rates = {}
        for worker in (base, other) if pair % 2 == 0 else (other, base):
            stretch = worker.ask("run", seconds)
            rates[worker] = stretch["env_steps"] / stretch["seconds"]
        ratios.append(rates[other] / rates[base])
    return ratios


def try_out(
    base: Worker,
    memory_bytes: int,
    change: str,
    overrides: Overrides,
    recipe: bool,
    settings: Settings,
    seconds: float,
    pairs: int = PAIRS,
) -> Trial:
    """Measure `settings`, which are those of `base` with `overrides`; `memory_bytes` is base's.

    Each turn is `seconds` long.
    """
    environ = {o.split("=")[0]: o.split("=")[1] for o in overrides if o.split("=")[0].isupper()}
    worker = Worker(settings, environ)
    try:
        facts = worker.ready()
        ratios = take_turns(base, worker, seconds, pairs)
        ratio, low, _ = ratio_of(ratios)
        if ratio > HOPE and low <= 1:
            ratios += take_turns(base, worker, seconds, pairs)
        memory = facts["memory"] - memory_bytes
        return Trial(
            change, overrides, recipe, *ratio_of(ratios), len(ratios), facts["compile_s"], memory
        )
    except WorkerError as error:
        return Trial(change, overrides, recipe, 0.0, 0.0, 0.0, 0, 0.0, 0, str(error))
    finally:
        worker.close()


class Budget:
    """Seconds that are left."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Below 0 where it is used up."""
        return self._end - time.monotonic()
