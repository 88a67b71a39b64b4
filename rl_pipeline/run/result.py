"""result.json as types: one object, documented where it is defined, stable.

`python -m rl_pipeline.run.result` prints the README's list of it.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict

Status = Literal["finished", "failed", "killed"]


class Part(BaseModel):
    """Immutable; a key that is not named here is an error, one that is not given is left out."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Counters(Part):
    """Work done, over all sessions of the run."""

    env_steps: int
    """Valid agent steps, summed over environments."""
    frames: int
    """env_steps x frame skip."""
    updates: int
    """Optimizer steps applied."""
    episodes: int
    """Full games."""
    skipped_updates: int
    """Optimizer steps refused, as their fp16 gradients were not finite."""


class Throughput(Part):
    """Rates of the steady state: log windows after the warm-up."""

    env_steps_per_s: float
    frames_per_s: float
    updates_per_s: float
    window_median: float
    """Median of the windows' env steps/s."""
    window_spread: float | None
    """Their interquartile range over the median."""
    windows: int
    steady: bool
    """False: the run was too short, and all is of the whole run."""
    steady_s: float
    warmup_s: float
    """Until the first update, without compile_s."""
    compile_s: float
    wall_s: float
    """Seconds of training, without evaluation."""


class Phase(Part):
    """Exclusive wall time of a part of the loop."""

    seconds: float
    share: float


class Bottleneck(Part):
    """The largest phase of training, and what the loop would gain if it cost nothing (Amdahl)."""

    phase: str
    share: float
    upper_bound_speedup: float | None


class Best(Part):
    """The best evaluation of the run."""

    eval_mean: float
    env_steps: int
    fell: bool
    """The last one is below it by more than two standard errors."""


class Returns(Part):
    """Returns in training and evaluation, in raw rewards."""

    train_mean: float | None
    """Mean of the last 100 training games."""
    eval_mean: float | None
    """Mean of the last evaluation: greedy policy, full games, fresh seeds."""
    eval_std: float | None
    episodes: int
    eval_scores: list[float]
    best: Best | None


class Resume(Part):
    """The point that the run went on from."""

    from_env_steps: int
    exact: bool
    """It goes on as if it had not been stopped."""
    replay: Literal["begun anew", "restored"] | None = None
    lost_transitions: int = 0


class Startup(Part):
    """Before the first step."""

    until_first_step_s: float | None = None
    """Since the process began."""


class Facts(Part):
    """Facts that are known before the first step."""

    run_id: str
    name: str
    experiment: str
    folder: str
    seed: int
    task: dict[str, str]
    """env, id, algo."""
    total_steps: int
    overrides: list[str]
    study: dict[str, Any]
    """The multirun it is a job of, if it is."""
    requested: dict[str, Any]
    """backend, num_envs, lanes, buffer, placement, precision, compile, compile_backend, device,
    mode, threads: as asked for."""
    effective: dict[str, Any]
    """The same as they took effect."""
    reasons: dict[str, str]
    """Why, for every automatic choice."""
    buffer: dict[str, Any] = {}
    """bytes, available_bytes, and a replay buffer's settings."""
    provenance: dict[str, Any]
    """Commit, changed files, versions, machine, command."""


class Result(Facts):
    """The end of a run, and what came of it."""

    status: Status
    reason: str | None
    """Why it did not finish, or finished early."""
    startup: Startup
    resume: Resume | None = None
    counters: Counters
    throughput: Throughput
    phases: dict[str, Phase] = {}
    """By name; absent with profile=none."""
    bottleneck: Bottleneck | None = None
    returns: Returns
    compile: dict[str, Any]
    """seconds, graphs, recompiles, graph_breaks, functions, fallbacks, and whether it pays."""
    transfers: dict[str, Any] = {}
    """Copies to the device and back per env step, and the lines that wait for it unasked."""
    accounting: dict[str, float]
    """Seconds that the measuring itself cost."""
    hardware: dict[str, Any]
    tracking: dict[str, Any]
    """The tracker's last state."""


def listing() -> str:
    """The keys in Markdown, a line each."""
    lines = []
    order = ["status", "reason", *Facts.model_fields]
    fields = Result.model_fields
    for name in [*order, *(n for n in fields if n not in order)]:
        kinds = (fields[name].annotation, *get_args(fields[name].annotation))
        kinds += tuple(inner for kind in kinds for inner in get_args(kind))
        part = next((k for k in kinds if isinstance(k, type) and issubclass(k, Part)), None)
        keys = f"{{{', '.join(part.model_fields)}}}" if part else ""
        said = fields[name].description or (part.__doc__ if part else "") or ""
        lines.append(f"- `{name}{keys}`" + (f": {' '.join(said.split())}" if said else ""))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(listing(), end="")
