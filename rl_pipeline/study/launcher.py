"""`hydra/launcher=process`: each job of a sweep in a fresh process, none takes others along."""

from __future__ import annotations

import math
import random
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from rl_pipeline.config import folders
from rl_pipeline.config.folders import finished_jobs, free_number
from rl_pipeline.config.origins import parse_overrides
from rl_pipeline.errors import ConfigError
from rl_pipeline.machine import cpu_budget
from rl_pipeline.study import jobs


class ProcessLauncher(Launcher):
    """Runs `python -m <this app> <overrides>` per job, `n_jobs` at once.

    A job that fails, hangs past `timeout_s` or is killed is shown when it happens, returns NaN as
    its objective, and leaves the others alone.
    """

    def __init__(self, n_jobs: int = 1, timeout_s: float | None = None, shuffle: bool = False):
        if not isinstance(n_jobs, int) or n_jobs < 1:
            raise ConfigError(f"hydra.launcher.n_jobs={n_jobs} must be a positive integer")
        if timeout_s is not None and not (isinstance(timeout_s, int | float) and timeout_s > 0):
            raise ConfigError(f"hydra.launcher.timeout_s={timeout_s} must be a number of seconds")
        self.n_jobs, self.timeout_s, self.shuffle = n_jobs, timeout_s, bool(shuffle)
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopping = False
        self._done: dict[frozenset[str], dict[str, Any]] | None = None

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Remember the sweep's configuration."""
        self.config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run all jobs that have not finished before; results in the order of `job_overrides`."""
        sweep_dir = Path(str(self.config.hydra.sweep.dir))
        sweep_dir.mkdir(parents=True, exist_ok=True)
        if self._done is None:  # once: a sweep may launch in batches
            self._done = finished_jobs(sweep_dir) if self.config.study.resume else {}
        returns: dict[int, float] = {}
        waiting: list[jobs.Job] = []
        for i, given in enumerate(job_overrides):
            overrides = folders.own_overrides(given)
            label = f"[{i + 1}/{len(job_overrides)}]"
            number = free_number(sweep_dir, initial_job_idx + i, [j.number for j in waiting])
            job = jobs.Job(
                overrides, number, sweep_dir / str(number), label,
                folders.passed_on(list(self.config.hydra.overrides.hydra)), self.timeout_s,
            )  # fmt: skip
            if earlier := self._done.get(frozenset(overrides)):
                returns[i] = folders.objective(earlier)
                print(f"{label} done      {job.name}", flush=True)
            else:
                waiting.append(job)
        places = [i for i in range(len(job_overrides)) if i not in returns]
        order = self._order(waiting)
        for place, objective in zip(places, self._run_all(waiting, order), strict=True):
            returns[place] = objective
        # Hydra's grid stops at a job that raises; Optuna's sweeper stops at NaN and takes a job
        # that raises for a failed trial.
        raises = str(self.config.hydra.sweeper._target_).endswith("OptunaSweeper")
        return [_returned(o, returns[i], raises) for i, o in enumerate(job_overrides)]

    def _order(self, waiting: list[jobs.Job]) -> list[int]:
        order = list(range(len(waiting)))
        if self.config.study.interleave:
            return interleaved([job.overrides for job in waiting])
        if self.shuffle:
            random.shuffle(order)
        return order

    def _run_all(self, waiting: list[jobs.Job], order: list[int]) -> list[float]:
        slots = list(range(min(self.n_jobs, max(1, len(waiting)))))
        results = [float("nan")] * len(waiting)

        def one(index: int) -> None:
            slot = slots.pop()
            try:
                if not self._stopping:
                    job = replace(waiting[index], environ=self._environment(slot))
                    results[index] = jobs.run(job, self._running.add)
            finally:
                slots.append(slot)

        pool = ThreadPoolExecutor(len(slots))
        try:
            list(pool.map(one, order))
        except BaseException:
            self._stopping = True
            jobs.stop(p for p in self._running if p.poll() is None)
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        return results

    def _environment(self, slot: int) -> dict[str, str]:
        """The job's share of the machine."""
        env = jobs.environment(cpu_budget()[0] // self.n_jobs)
        gpus = _visible_gpus(env)
        if gpus and self.n_jobs > 1:
            env["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
        return env


def interleaved(grid: Sequence[Sequence[str]]) -> list[int]:
    """Indices of jobs seed by seed, those of each seed in a random order of its own."""
    rounds: dict[str, list[int]] = {}
    for i, overrides in enumerate(grid):
        seeds = [
            str(o.value()) for o in parse_overrides(list(overrides)) if o.key_or_group == "seed"
        ]
        rounds.setdefault(seeds[-1] if seeds else "", []).append(i)
    for members in rounds.values():
        random.shuffle(members)
    return [i for members in rounds.values() for i in members]


def _returned(overrides: Sequence[str], objective: float, raises: bool) -> JobReturn:
    job = JobReturn(overrides=overrides, status=JobStatus.COMPLETED)
    job.return_value = objective
    if raises and math.isnan(objective):
        job.status = JobStatus.FAILED
        job.return_value = RuntimeError("the job has no return to maximise")
    return job


def _visible_gpus(env: dict[str, str]) -> list[str]:
    if "CUDA_VISIBLE_DEVICES" in env:
        return [g for g in env["CUDA_VISIBLE_DEVICES"].split(",") if g.strip()]
    return [p.name.removeprefix("nvidia") for p in sorted(Path("/dev").glob("nvidia[0-9]*"))]
