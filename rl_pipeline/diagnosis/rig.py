"""A run without its surroundings, for measuring: the same parts in the same loop, in stretches.

Nothing is logged, evaluated or saved. What `rl_pipeline.train` adds to it is measured there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from rl_pipeline.config.settings import ReplayAlgorithm, Settings
from rl_pipeline.engine.phases import Phases
from rl_pipeline.engine.runtime import make_runtime, stream_seed
from rl_pipeline.run.build import make_training_envs
from rl_pipeline.run.parts import make_training
from rl_pipeline.run.prebuild import with_cache
from rl_pipeline.terminal import say

WARM_UPDATES = 40
WARM_S = 2.0
"""Seconds of training before anything is measured."""


@dataclass(frozen=True)
class Stretch:
    """Some time of training."""

    env_steps: int
    updates: int
    seconds: float
    cpu_s: float
    """Of all threads and child processes."""
    phases: dict[str, float]
    """Seconds by phase; what they leave of `seconds` is Python between them."""

    @property
    def rate(self) -> float:
        """Env steps/s."""
        return self.env_steps / self.seconds


class Rig:
    """Environments, policy, buffer and learner of one run, built as the run builds them."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        """A memory-mapped replay lives in `folder`."""
        from rl_pipeline.loops.sync import Counters

        seed = settings.seed or 0
        if isinstance(settings.algo, ReplayAlgorithm):
            # Exploration is over when learning begins: random actions cost less than chosen ones.
            short = max(settings.algo.learning_starts, 1)
            settings = settings.model_copy(update={"total_steps": short})
        self.settings = settings
        # What a run comes to later is measured from the start.
        runtime = replace(make_runtime(settings, seed), unroll_after=0)
        self.phases = Phases(new_event=runtime.new_event())
        runtime.compile_log.phase = lambda: self.phases("compile")
        threads = runtime.threads.env_threads
        self.envs = make_training_envs(
            settings, stream_seed(seed, "envs"), threads, runtime.beside_envs
        )
        self.runtime = with_cache(runtime, settings, self.envs.spec, say)
        self.training = make_training(settings, self.envs, self.runtime, self.phases, folder)
        self.counters = Counters()
        self.obs = self.envs.reset()

    @property
    def on_policy(self) -> bool:
        """It learns from rollouts."""
        return self.training.replay is None

    def warm(self, seconds: float = WARM_S) -> None:
        """Train until learning has begun and for so long: what is built once is built then."""
        while self.counters.updates < WARM_UPDATES:
            self._loop(lambda: self.counters.updates >= WARM_UPDATES)
        self.run(seconds)

    def run(self, seconds: float) -> Stretch:
        """Train for so long; ends with a rollout, or with a turn."""
        steps, updates = self.counters.env_steps, self.counters.updates
        self.phases.window()
        cpu, begin = cpu_seconds(), time.perf_counter()
        self._loop(lambda: time.perf_counter() - begin >= seconds)
        self.runtime.synchronize()
        passed = time.perf_counter() - begin
        return Stretch(
            self.counters.env_steps - steps, self.counters.updates - updates, passed,
            cpu_seconds() - cpu, self.phases.window(),
        )  # fmt: skip

    def _loop(self, enough: Callable[[], bool]) -> None:
        def hook(obs: np.ndarray, metrics: Callable[[], Any]) -> bool:
            self.obs = obs
            self.envs.pop_episodes()
            return enough()

        self.training.loop(self.counters, self.obs, hook)

    def close(self) -> None:
        """Free environments, threads and files."""
        self.envs.close()
        if self.training.replay is not None:
            self.training.replay.buffer.close()
        if self.runtime.background is not None:
            self.runtime.background.close()


def cpu_seconds() -> float:
    """CPU time of this process and its children so far."""
    own = time.process_time()
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:
            continue
        own += times.user + times.system
    return own
