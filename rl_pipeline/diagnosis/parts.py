"""The parts of a run, each alone: what it costs there is the least that it costs in a run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_pipeline.config.settings import ReplayAlgorithm
from rl_pipeline.diagnosis.rig import Rig, cpu_seconds
from rl_pipeline.engine.phases import NullPhases
from rl_pipeline.envs.lanes import as_lanes
from rl_pipeline.loops.sync import Store, Turns

CHUNK_S = 0.03
"""Seconds that a part runs before the next one has its turn: what disturbs one disturbs all."""
ROWS = 64
"""Turns that are played to have something to act on and to store."""


@dataclass(frozen=True)
class Cost:
    """Of one part, in seconds an env step."""

    median_s: float
    low_s: float
    high_s: float
    """Quartiles over chunks."""
    calls: float
    """Per env step."""
    busy: float
    """CPU seconds per second, of all threads and child processes: near 0 where it only waits."""


class Parts:
    """Each part of a rig in a loop of its own, fed with what the run meets."""

    def __init__(self, rig: Rig) -> None:
        """Play some turns, which go into no buffer."""
        buffer: Any = rig.training.buffer
        self._rig, self._buffer = rig, buffer
        self._learner: Any = rig.training.learner
        images = rig.on_policy and self._buffer.images
        self._lay_out = self._buffer.laid_out if images else None
        self._played: list[Any] = []
        self._rows = rows = self._buffer.horizon if rig.on_policy else ROWS
        turns = self._turns(lambda *row: self._played.append(row))
        for _ in turns.take(rows):
            pass
        rig.obs = turns.obs
        lanes = as_lanes(rig.envs).lanes
        self._stored = 0 if rig.on_policy else len(self._played)
        self._at = itertools.cycle(self._played)
        self._progress = itertools.cycle(np.linspace(0, 1, 33).tolist())
        self._lanes = itertools.cycle(lanes)
        turn_steps = rig.envs.spec.num_envs / len(lanes)
        self._runs: dict[str, tuple[Callable[[], object], float]] = {
            "env": (self._step, 1 / turn_steps),
            "act": (self._act, 1 / turn_steps),
            "store": (self._store, 1 / turn_steps),
        }
        if images:
            self._runs["preprocess"] = (self._prepare, 1 / turn_steps)
        updates = 1 / (rows * rig.envs.spec.num_envs)
        if rig.on_policy:
            for row in self._played:
                self._buffer.add(*row)
            self._batch = self._buffer.take(turns.obs)
        else:
            algo = rig.settings.algo
            assert isinstance(algo, ReplayAlgorithm)
            self._batch_size = algo.batch_size
            updates = algo.replay_ratio / self._batch_size
            self._batch = self._buffer.sample(self._batch_size, 0.5)
            self._runs["sample"] = (self._sample, updates)
        self._runs["learn"] = (self._learn, updates)

    def _turns(self, store: Store) -> Turns:
        rig = self._rig
        return Turns(
            rig.envs, self._learner.policy, store, NullPhases(), rig.counters,
            rig.settings.total_steps, rig.obs, self._lay_out,
        )  # fmt: skip

    def _step(self) -> None:
        lane = next(self._lanes)
        lane.send(next(self._at)[1])
        lane.recv()

    def _act(self) -> None:
        self._learner.policy.act(next(self._at)[0], next(self._progress))

    def _prepare(self) -> None:
        self._buffer.laid_out(next(self._at)[-1].obs)

    def _store(self) -> None:
        if self._stored == len(self._played):
            self._stored = 0
            if self._rig.on_policy:
                self._buffer.take(self._rig.obs)
            else:
                self._buffer.cut()  # the first row does not follow the last one
        self._buffer.add(*self._played[self._stored])
        self._stored += 1

    def _sample(self) -> None:
        self._batch = self._buffer.sample(self._batch_size, next(self._progress))
        if self._buffer.prioritized:
            self._buffer.update_priorities(self._batch.ids, self._batch.weight)

    def _learn(self) -> None:
        self._learner.update(self._batch, 0.5)

    def measure(self, seconds: float, names: Sequence[str] = ()) -> dict[str, Cost]:
        """Cost of every part, or of those named, in turns, about `seconds` for each."""
        runs = {n: run for n, run in self._runs.items() if not names or n in names}
        state = self._learner.state_dict()
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        begin = time.perf_counter()
        while time.perf_counter() - begin < seconds * len(runs) or (
            min(map(len, found.values())) < 3
        ):
            for name, (run, _) in runs.items():
                found[name].append(_chunk(run))
                self._rig.envs.pop_episodes()
            # Learning the same rows over and over leads where no run goes.
            self._learner.load_state_dict(state)
            self._rig.runtime.synchronize()
        self._empty()
        costs = {}
        for name, (_, calls) in runs.items():
            a_call, busy = np.array(found[name]).T
            low, median, high = np.percentile(a_call, (25, 50, 75)) * calls
            costs[name] = Cost(
                float(median), float(low), float(high), calls, float(np.median(busy))
            )
        return costs

    def ladder(self, seconds: float) -> dict[str, float]:
        """Env steps/s of the environments, and with each further part, each for `seconds`.

        The last rung is the whole loop.
        """
        begin, turns = time.perf_counter(), 0
        while (passed := time.perf_counter() - begin) < seconds:
            self._step()
            turns += 1
            self._rig.envs.pop_episodes()
        rungs = {"env": turns / passed / self._runs["env"][1]}
        rungs["act"] = self._climb(seconds, lambda *row: None)
        rungs["store"] = self._climb(seconds, self._buffer.add)
        rungs["learn"] = self._rig.run(seconds).rate
        return rungs

    def _climb(self, seconds: float, store: Store) -> float:
        """Env steps/s of playing turns, and storing them."""
        rig, turns = self._rig, self._turns(store)
        steps, begin = rig.counters.env_steps, time.perf_counter()
        while (passed := time.perf_counter() - begin) < seconds:
            for _ in turns.take(self._rows):
                pass
            rig.envs.pop_episodes()
            if rig.on_policy and self._buffer.full:
                self._buffer.take(turns.obs)
        rig.obs = turns.obs
        if not rig.on_policy:
            self._buffer.cut()
        return (rig.counters.env_steps - steps) / passed

    def _empty(self) -> None:
        """Leave the buffer as the loop expects it."""
        if not self._rig.on_policy:
            self._buffer.cut()
        elif self._stored:
            for row in self._played[self._stored :]:
                self._buffer.add(*row)
            self._buffer.take(self._rig.obs)
            self._stored = 0


def _chunk(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds a call over `CHUNK_S` of them, and CPU seconds per second."""
    calls, cpu, begin = 0, cpu_seconds(), time.perf_counter()
    while (passed := time.perf_counter() - begin) < CHUNK_S:
        run()
        calls += 1
    return passed / calls, (cpu_seconds() - cpu) / passed


def ceiling(costs: dict[str, Cost]) -> float:
    """Env steps/s of a run that costs no more than its parts alone, one after another."""
    return 1 / sum(cost.median_s for cost in costs.values())
