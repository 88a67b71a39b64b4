"""One job of a sweep in a fresh process, whatever launcher runs it: its end is always told."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_pipeline.config import folders, origins
from rl_pipeline.config.folders import multirun_of, own_overrides, passed_on
from rl_pipeline.terminal import plain, quoted

GRACE_S = 60.0
"""Between asking a job to stop and ending it."""


@dataclass(frozen=True)
class Job:
    """One job of a sweep, and how long it may take."""

    overrides: list[str]
    number: int
    folder: Path
    label: str
    passed_on: list[str]
    """Hydra overrides that also apply to each job, such as hydra.searchpath."""
    timeout_s: float | None = None
    environ: dict[str, str] | None = None

    @property
    def name(self) -> str:
        """The job's name in the lines of the sweep."""
        return multirun_of(self.overrides)[1] or " ".join(self.overrides)

    @property
    def command(self) -> list[str]:
        """The same app for this one job."""
        return [
            sys.executable, "-m", _app(), *_flags(), *self.overrides, *self.passed_on,
            # Without it a sweep preset would sweep again without end.
            "hydra.mode=RUN", f"hydra.run.dir={quoted(str(self.folder))}",
            f"hydra.job.num={self.number}",
        ]  # fmt: skip


def run(job: Job, started: Callable[[subprocess.Popen[bytes]], Any] = lambda _: None) -> float:
    """Run a job to its end and say how it ended; returns its objective, NaN if it failed."""
    job.folder.mkdir(parents=True, exist_ok=True)
    begin, log = time.monotonic(), job.folder / "output.log"
    print(f"{job.label} start     {job.name}\n", end="", flush=True)
    code, forced = _run(job, log, started)
    result: dict[str, Any] = {}
    with suppress(FileNotFoundError):
        result = json.loads((job.folder / "result.json").read_text())
    objective = folders.objective(result)
    if result.get("status") == "finished":
        rate, seconds = result["throughput"]["env_steps_per_s"], time.monotonic() - begin
        after = f"; its process then ended badly: {forced or f'exit code {code}'}" if code else ""
        won = "no game ended" if math.isnan(objective) else f"return {objective:.1f}"
        print(
            f"{job.label} finished  {job.name}  {won}  {rate:,.0f} env steps/s  "
            f"({seconds:.0f} s{after})",
            flush=True,
        )
        return objective
    cause = forced or result.get("reason") or last_line(log)
    if "status" not in result:
        # The job ended before it could write its own: the final table must know.
        record = {"status": "failed", "reason": cause, "overrides": job.overrides}
        (job.folder / "result.json").write_text(json.dumps(record) + "\n")
    overrides = " ".join(job.overrides)
    word = "stopped" if result.get("status") == "killed" and not forced else "FAILED "
    print(plain(f"{job.label} {word}   {overrides}\n    {cause}\n    log: {log}"), flush=True)
    return objective


def _run(job: Job, log: Path, started: Callable[[subprocess.Popen[bytes]], Any]) -> tuple[int, str]:
    """Run one job to its end; returns its exit code and the cause of an end not its own, or ''."""
    with log.open("wb") as output:
        output.write(f"$ {shlex.join(job.command)}\n".encode())
        output.flush()
        process = subprocess.Popen(
            job.command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            env=job.environ, start_new_session=True,
        )  # fmt: skip
        started(process)
        try:
            process.wait(job.timeout_s)
        except subprocess.TimeoutExpired:
            stop([process])
            return 1, f"stopped after hydra.launcher.timeout_s={job.timeout_s:g}"
    code = process.returncode
    return code, f"killed by signal {-code}" if code < 0 else ""


def stop(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Ask all of them to stop, end those that do not."""
    running = list(processes)
    for process in running:
        process.terminate()
    for process in running:
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def environment(cpus: int) -> dict[str, str]:
    """A job's environment: its share of the cores, its sweep, and no run to write into."""
    env = dict(os.environ)
    # An id in the environment would make the children write into the parent's run.
    env.pop("MLFLOW_RUN_ID", None)
    env["RL_PIPELINE_SWEEP_PID"] = str(os.getpid())
    env["RL_PIPELINE_CPUS"] = str(max(1, cpus))
    return env


def run_here(overrides: list[str], number: int, hydra_overrides: list[str]) -> float:
    """The job of a launcher that runs jobs inside its own processes (ray, basic, joblib, slurm).

    Such processes are reused and a job's end would be theirs: it gets a fresh one all the same.
    """
    from rl_pipeline.machine import cpu_budget

    study = json.loads(os.environ["RL_PIPELINE_STUDY"])
    with suppress(OSError):  # another machine may not have that folder
        os.chdir(study["cwd"])
    cpus = cpu_budget()[0]
    if (ray := sys.modules.get("ray")) and ray.is_initialized():
        assigned = ray.get_runtime_context().get_assigned_resources()
        cpus = int(assigned.get("CPU", cpus))
    job = Job(
        own_overrides(overrides), number, Path(study["folder"]) / str(number), f"[{number}]",
        passed_on(hydra_overrides), environ=environment(cpus),
    )  # fmt: skip
    return run(job)


def _flags() -> list[str]:
    """Flags that the sweep was composed with; its own command line is not that of Ray's workers."""
    study = json.loads(os.environ.get("RL_PIPELINE_STUDY", "{}"))
    return origins.flags(study.get("composed_from", {}))


def _app() -> str:
    """The module that was started: the same one runs the jobs."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = spec.name if spec is not None else ""
    return name if name.startswith("rl_pipeline.") else "rl_pipeline.train"


def last_line(log: Path) -> str:
    """The last line of a log, an error line of ours before all else."""
    lines = [x for x in log.read_text(errors="replace").splitlines() if x.strip()]
    errors = [x for x in lines if x.startswith(("error: ", "failed: "))]
    return (errors or lines or ["no output"])[-1]
