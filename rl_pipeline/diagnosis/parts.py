"""The parts of a run, each alone: what it costs there is the least that it costs in a run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_pipeline.config.settings import ReplayAlgorithm, Settings
from rl_pipeline.engine.phases import NullPhases
from rl_pipeline.engine.runtime import make_runtime, stream_seed
from rl_pipeline.envs.lanes import as_lanes
from rl_pipeline.loops.sync import Counters, Turns
from rl_pipeline.run.build import make_training_envs
from rl_pipeline.run.parts import make_training
from rl_pipeline.run.prebuild import with_cache
from rl_pipeline.terminal import say

CHUNK_S = 0.03
"""Seconds that a part runs before the next one has its turn: what disturbs one disturbs all."""
ROWS = 64
"""Turns that are played to have something to act on and to store."""
WARM_UPDATES = 40
WARM_S = 2.0
"""Seconds of learning before anything is measured: small eager updates become faster."""


@dataclass(frozen=True)
class Cost:
    """Of one part, in seconds an env step."""

    median_s: float
    low_s: float
    high_s: float
    """Quartiles over chunks."""
    calls: float
    """Per env step."""


class Parts:
    """The parts of one run, built as the run builds them and fed with what it meets."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        """Play and learn until all is warm; a memory-mapped replay lives in `folder`."""
        seed = settings.seed or 0
        runtime = make_runtime(settings, seed)
        threads = runtime.threads.env_threads
        self.envs = make_training_envs(
            settings, stream_seed(seed, "envs"), threads, runtime.beside_envs
        )
        self._built = with_cache(runtime, settings, self.envs.spec, say)
        training = make_training(settings, self.envs, self._built, NullPhases(), folder)
        self.learner: Any = training.learner
        self._replay = training.replay
        counters, obs = Counters(), self.envs.reset()
        seen = [obs]

        def enough(obs: np.ndarray, metrics: Callable[[], Any]) -> bool:
            seen[0] = obs
            self.envs.pop_episodes()
            return counters.updates >= WARM_UPDATES

        training.loop(counters, obs, enough)
        buffer: Any = training.buffer
        self._buffer = buffer
        self._on_policy = training.replay is None
        rows = buffer.horizon if self._on_policy else ROWS
        self._played: list[Any] = []

        def store(*row: Any) -> None:
            self._played.append(row)

        turns = Turns(
            self.envs, self.learner.policy, store, NullPhases(), counters, settings.total_steps,
            seen[0], buffer.laid_out if self._on_policy and buffer.images else None,
        )  # fmt: skip
        for _ in turns.take(rows):
            pass
        self._last = turns.obs
        self._stored = 0 if self._on_policy else len(self._played)
        self._at = itertools.cycle(self._played)
        self._progress = itertools.cycle(np.linspace(0, 1, 33).tolist())
        self._lanes = itertools.cycle(as_lanes(self.envs).lanes)
        turn_steps = self.envs.spec.num_envs / len(as_lanes(self.envs).lanes)
        self._runs: dict[str, tuple[Callable[[], object], float]] = {
            "env": (self._step, 1 / turn_steps),
            "act": (self._act, 1 / turn_steps),
            "store": (self._store, 1 / turn_steps),
        }
        if self._on_policy and buffer.images:
            self._runs["preprocess"] = (self._lay_out, 1 / turn_steps)
        updates = 1 / (rows * self.envs.spec.num_envs)
        if self._on_policy:
            for row in self._played:
                self._buffer.add(*row)
            self._batch = self._buffer.take(self._last)
        else:
            assert isinstance(settings.algo, ReplayAlgorithm)
            self._batch_size = settings.algo.batch_size
            updates = settings.algo.replay_ratio / self._batch_size
            self._batch = self._buffer.sample(self._batch_size, 0.5)
            self._runs["sample"] = (self._sample, updates)
        self._runs["learn"] = (self._learn, updates)
        self._state = self.learner.state_dict()
        begin = time.perf_counter()
        while time.perf_counter() - begin < WARM_S:
            self._learn()

    def _step(self) -> None:
        lane = next(self._lanes)
        lane.send(next(self._at)[1])
        lane.recv()

    def _act(self) -> None:
        self.learner.policy.act(next(self._at)[0], next(self._progress))

    def _lay_out(self) -> None:
        self._buffer.laid_out(next(self._at)[-1].obs)

    def _store(self) -> None:
        if self._stored == len(self._played):
            self._stored = 0
            if self._on_policy:
                self._buffer.take(self._last)
            else:
                self._buffer.cut()  # the first row does not follow the last one
        self._buffer.add(*self._played[self._stored])
        self._stored += 1

    def _sample(self) -> None:
        self._batch = self._buffer.sample(self._batch_size, next(self._progress))
        if self._buffer.prioritized:
            self._buffer.update_priorities(self._batch.ids, self._batch.weight)

    def _learn(self) -> None:
        self.learner.update(self._batch, 0.5)

    def measure(self, seconds: float) -> dict[str, Cost]:
        """Cost of every part, in turns, about `seconds` for each."""
        state = self._state
        found: dict[str, list[float]] = {name: [] for name in self._runs}
        begin = time.perf_counter()
        while time.perf_counter() - begin < seconds * len(found) or len(found["learn"]) < 3:
            for name, (run, _) in self._runs.items():
                found[name].append(_chunk(run))
                self.envs.pop_episodes()
            # Learning the same rows over and over leads where no run goes.
            self.learner.load_state_dict(state)
            self._built.synchronize()
        costs = {}
        for name, (_, calls) in self._runs.items():
            low, median, high = np.percentile(found[name], (25, 50, 75)) * calls
            costs[name] = Cost(float(median), float(low), float(high), calls)
        return costs

    def close(self) -> None:
        """Free environments, threads and files."""
        self.envs.close()
        if self._replay is not None:
            self._replay.buffer.close()
        if self._built.background is not None:
            self._built.background.close()


def _chunk(run: Callable[[], object]) -> float:
    """Seconds a call, over `CHUNK_S` of them."""
    calls, begin = 0, time.perf_counter()
    while (passed := time.perf_counter() - begin) < CHUNK_S:
        run()
        calls += 1
    return passed / calls


def ceiling(costs: dict[str, Cost]) -> float:
    """Env steps/s of a run that costs no more than its parts alone, one after another."""
    return 1 / sum(cost.median_s for cost in costs.values())
