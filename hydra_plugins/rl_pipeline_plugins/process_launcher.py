"""`hydra/launcher=process`: each job of a sweep in a fresh process, none takes others along."""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from rl_pipeline import report
from rl_pipeline.cpus import cpu_budget
from rl_pipeline.settings import ConfigError

GRACE_S = 60.0
"""Between asking a job to stop and ending it."""


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

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Remember the sweep's configuration."""
        self.config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run all jobs; results in the order of `job_overrides`."""
        sweep_dir = Path(str(self.config.hydra.sweep.dir))
        self._passed_on = _passed_on(list(self.config.hydra.overrides.hydra))
        sweep_dir.mkdir(parents=True, exist_ok=True)
        slots = list(range(self.n_jobs))
        order = list(range(len(job_overrides)))
        if self.shuffle:
            random.shuffle(order)
        returns: dict[int, JobReturn] = {}

        def one(index: int) -> None:
            slot = slots.pop()
            try:
                returns[index] = self._job(
                    list(job_overrides[index]), initial_job_idx + index, sweep_dir, slot,
                    f"[{index + 1}/{len(order)}]",
                )  # fmt: skip
            finally:
                slots.append(slot)

        pool = ThreadPoolExecutor(self.n_jobs)
        try:
            list(pool.map(one, order))
        except BaseException:
            self._stop()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        return [returns[i] for i in range(len(job_overrides))]

    def _job(
        self, overrides: list[str], number: int, sweep_dir: Path, slot: int, label: str
    ) -> JobReturn:
        folder = sweep_dir / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable, "-m", _app(), *_config_dir(sys.argv), *overrides, *self._passed_on,
            # Without it a sweep preset would sweep again without end.
            "hydra.mode=RUN", f"hydra.run.dir={_quote(folder)}", f"hydra.job.num={number}",
        ]  # fmt: skip
        begin = time.monotonic()
        log = folder / "output.log"
        name = " ".join(overrides)
        print(f"{label} start     {name}\n", end="", flush=True)
        result: dict[str, Any] = {}
        cause = ""
        if not self._stopping:
            cause = self._run(command, log, slot)
        with suppress(FileNotFoundError):
            result = json.loads((folder / "result.json").read_text())
        seconds = time.monotonic() - begin
        objective = report.objective(result)
        if result.get("status") == "finished" and not cause:
            rate = result["throughput"]["env_steps_per_s"]
            print(
                f"{label} finished  {name}  return {objective:.1f}  {rate:,.0f} env steps/s  "
                f"({seconds:.0f} s)",
                flush=True,
            )
        else:
            cause = cause or result.get("reason") or _last_line(log)
            if "status" not in result:
                # The job ended before it could write its own: the final table must know.
                record = {"status": "failed", "reason": cause, "overrides": overrides}
                (folder / "result.json").write_text(json.dumps(record) + "\n")
            print(f"{label} FAILED    {name}\n    {cause}\n    log: {log}", flush=True)
        job = JobReturn(overrides=overrides, status=JobStatus.COMPLETED)
        job.return_value = objective
        return job

    def _run(self, command: list[str], log: Path, slot: int) -> str:
        """Run one job to its end; returns the cause of an end that was not its own, or ''."""
        with log.open("wb") as output:
            output.write(f"$ {shlex.join(command)}\n".encode())
            output.flush()
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env=self._environment(slot), start_new_session=True,
            )  # fmt: skip
            self._running.add(process)
            try:
                process.wait(self.timeout_s)
            except subprocess.TimeoutExpired:
                process.terminate()
                try:
                    process.wait(GRACE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                return f"stopped after hydra.launcher.timeout_s={self.timeout_s:g}"
            finally:
                self._running.discard(process)
        if process.returncode < 0:
            return f"killed by signal {-process.returncode}"
        return "" if process.returncode == 0 else _last_line(log)

    def _environment(self, slot: int) -> dict[str, str]:
        """The job's share of the machine."""
        env = dict(os.environ)
        # An id in the environment would make the children write into the parent's run.
        env.pop("MLFLOW_RUN_ID", None)
        budget, _ = cpu_budget()
        env["RL_PIPELINE_SWEEP_PID"] = str(os.getpid())
        env["RL_PIPELINE_CPUS"] = str(max(1, budget // self.n_jobs))
        gpus = _visible_gpus(env)
        if gpus and self.n_jobs > 1:
            env["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
        return env

    def _stop(self) -> None:
        """Ask all running jobs to stop, end those that do not."""
        self._stopping = True
        running = list(self._running)
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _app() -> str:
    """The module that was started: the same one runs the jobs."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec is not None else "rl_pipeline.train"


def _passed_on(overrides: list[str]) -> list[str]:
    """Hydra overrides that mean the jobs too, such as hydra.searchpath."""
    own = ("hydra.mode", "hydra.sweep", "hydra.sweeper", "hydra.launcher", "hydra/", "hydra.run")
    return [o for o in overrides if not o.lstrip("+~").startswith(own)]


def _config_dir(argv: list[str]) -> list[str]:
    """The flag that adds a configuration folder, as it was given to the sweep."""
    for i, argument in enumerate(argv):
        if argument.startswith("--config-dir="):
            return [argument]
        if argument in ("--config-dir", "-cd"):
            return argv[i : i + 2]
    return []


def _quote(path: Path) -> str:
    """A path as a Hydra override value."""
    text = str(path).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"


def _visible_gpus(env: dict[str, str]) -> list[str]:
    if "CUDA_VISIBLE_DEVICES" in env:
        return [g for g in env["CUDA_VISIBLE_DEVICES"].split(",") if g.strip()]
    return [p.name.removeprefix("nvidia") for p in sorted(Path("/dev").glob("nvidia[0-9]*"))]


def _last_line(log: Path) -> str:
    lines = [x for x in log.read_text(errors="replace").splitlines() if x.strip()]
    errors = [x for x in lines if x.startswith("error: ")]
    return (errors or lines or ["no output"])[-1]
