"""Facts about a run before its first step, as result.json and the store have them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rl_pipeline.config import folders, origins
from rl_pipeline.config.settings import Settings
from rl_pipeline.engine.runtime import Runtime
from rl_pipeline.files import working_directory
from rl_pipeline.run.result import Facts
from rl_pipeline.telemetry.provenance import provenance
from rl_pipeline.terminal import quoted, shell_line


def describe(settings: Settings, facts: Facts) -> str:
    """A run's description as a person reads it in the MLflow UI."""
    e = facts.effective
    return (
        f"{settings.algo.name} on {settings.env.id}, {settings.total_steps:,} env steps, "
        f"{settings.backend.num_envs} environments on {e['backend']}, {e['device']}, "
        f"{e['precision']}, {e['compile']}, {e['mode']}, seed {facts.seed}.\n\n"
        f"    {facts.provenance['command']}\n\nFolder: `{facts.folder}`"
    )


def requested(settings: Settings) -> dict[str, Any]:
    """The choices a comparison groups by, as asked for."""
    auto = dict.fromkeys(settings.chosen, "auto")
    return {
        "backend": settings.backend.name,
        "num_envs": auto.get("backend.num_envs", settings.backend.num_envs),
        "lanes": auto.get("backend.lanes", settings.backend.lanes),
        "buffer": settings.buffer.name,
        "placement": settings.buffer.placement,
        "precision": settings.precision.name,
        "compile": settings.compile.name,
        "compile_backend": settings.compile.backend,
        "device": settings.device.name,
        "mode": settings.mode.name,
        "threads": settings.backend.num_threads,
        "keep_freed": settings.memory.keep_freed,
    }


def make_facts(
    settings: Settings,
    folder: Path,
    overrides: list[str],
    runtime: Runtime,
    run_id: str,
    composed_from: dict[str, Any],
) -> Facts:
    """The facts about a run in result.json that are known before its first step."""
    study, name = folders.multirun_of(overrides)
    plan = runtime.threads
    effective = requested(settings) | {
        "num_envs": settings.backend.num_envs,
        "lanes": settings.backend.lanes,
        "device": str(runtime.device),
        "compile": runtime.plan.name,
        "keep_freed": runtime.keeps_freed,
        "threads": {
            "budget": plan.budget,
            "torch": plan.torch_threads,
            "act": plan.act_threads,
            "envs": plan.env_threads,
        },
    }
    reasons = {
        **settings.chosen,
        **{f"threads.{k}": v for k, v in plan.reasons.items()},
        "device": runtime.device_reason,
        **runtime.reasons,
    }
    plain = not any(o.startswith(("backend=", "experiment=")) for o in overrides)
    if plain and settings.env.envpool_id is None and settings.backend.name == "gymnasium":
        reasons["backend"] = f"gymnasium (no EnvPool task is known for env={settings.env.name})"
    if settings.seed is None:
        reasons["seed"] = f"{runtime.seed} (drawn, none was given)"
    arguments = [*origins.flags(composed_from), *overrides, *origins.search_path(composed_from)]
    commands = {"command": shell_line("train", *arguments)}
    if settings.resume:
        resume = f"resume={quoted(settings.resume)}"
        commands["resume_command"] = shell_line("train", *arguments, resume)
    task = settings.env
    return Facts(
        run_id=run_id,
        name=name
        or f"{task.name} {settings.algo.name} {settings.backend.name} s{runtime.seed} {run_id}",
        experiment=settings.tracking.experiment
        or os.environ.get("MLFLOW_EXPERIMENT_NAME", "rl_pipeline"),
        folder=str(folder),
        seed=runtime.seed,
        task={"env": task.name, "id": task.id, "algo": settings.algo.name},
        total_steps=settings.total_steps,
        overrides=overrides,
        study=study,
        requested=requested(settings),
        effective=effective,
        reasons=reasons,
        provenance=_provenance() | commands,
    )


def _provenance() -> dict[str, Any]:
    """Provenance of the code that runs; of the working directory for an installed copy."""
    ours = provenance(origins.PACKAGE)
    return ours if ours["git"] else provenance(working_directory())
