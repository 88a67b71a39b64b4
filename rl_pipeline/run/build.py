"""Assembles a run from its settings: one plain match per choice, imports inside the branch."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from rl_pipeline import stop
from rl_pipeline.config import folders, load, origins
from rl_pipeline.config.settings import PPOSettings, Settings
from rl_pipeline.config.stores import kept_uri
from rl_pipeline.engine.runtime import make_runtime, stream_seed
from rl_pipeline.errors import ConfigError
from rl_pipeline.files import Claim, told, write_json
from rl_pipeline.run import checkpoint
from rl_pipeline.run.evaluation import evaluate
from rl_pipeline.run.facts import describe, make_facts
from rl_pipeline.run.parts import make_training
from rl_pipeline.run.prebuild import with_cache
from rl_pipeline.run.result import Facts
from rl_pipeline.run.session import Session
from rl_pipeline.telemetry.hardware import HardwareSampler
from rl_pipeline.telemetry.progress import Progress
from rl_pipeline.telemetry.provenance import changed_code
from rl_pipeline.telemetry.recorder import Recorder
from rl_pipeline.terminal import say
from rl_pipeline.tracking.tracker import NullTracker, Tracker
from rl_pipeline.types import Learner, VecEnv


def make_envs(settings: Settings, num_envs: int, seed: int, num_threads: int) -> VecEnv:
    """The environments of a run or of its evaluation."""
    # A normaliser takes the mean away before anything is rounded to float32.
    wide = isinstance(settings.algo, PPOSettings) and settings.algo.normalize_obs
    match settings.backend.name:
        case "gymnasium":
            from rl_pipeline.envs.gymnasium import GymnasiumVecEnv

            return GymnasiumVecEnv(settings.env, num_envs, seed, wide)
        case "gymnasium_async":
            from rl_pipeline.envs.gymnasium_async import GymnasiumAsyncVecEnv

            timeout_s = settings.backend.step_timeout_s
            assert timeout_s is not None
            return GymnasiumAsyncVecEnv(settings.env, num_envs, seed, timeout_s, wide)
        case "gymnasium_native":
            from rl_pipeline.envs.gymnasium_native import GymnasiumNativeVecEnv

            return GymnasiumNativeVecEnv(settings.env, num_envs, seed, num_threads, wide)
        case "envpool" | "envpool_async":
            from rl_pipeline.envs.envpool import EnvPoolVecEnv

            return EnvPoolVecEnv(settings.env, num_envs, seed, num_threads, wide)


def make_training_envs(
    settings: Settings,
    seed: int,
    num_threads: int,
    overlap: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> VecEnv:
    """The environments to train in, in lanes where the backend has them."""
    backend = settings.backend
    if backend.lanes == 1:
        return make_envs(settings, backend.num_envs, seed, num_threads)
    from rl_pipeline.envs.lanes import Lanes

    share = backend.num_envs // backend.lanes
    seeds = np.random.SeedSequence(seed).generate_state(backend.lanes)
    # Each lane may use all threads: while it steps, the others mostly wait for the policy.
    lanes = [make_envs(settings, share, int(s), min(num_threads, share)) for s in seeds]
    return Lanes(lanes, backend.name, overlap)


def make_tracker(settings: Settings, folder: Path, facts: Facts) -> Tracker | NullTracker:
    """The tracker that `tracking` names."""
    if settings.tracking.name == "none":
        return NullTracker()
    study, git = facts.study, facts.provenance["git"]
    tracking = settings.tracking
    if not (tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")):
        # A run stays where it began, also when it is resumed from another directory.
        tracking = tracking.model_copy(update={"uri": kept_uri(folder)})
    tags = {
        "run_id": facts.run_id,
        "run_folder": str(folder.resolve()),
        "mlflow.source.name": "rl_pipeline.train",
        "mlflow.source.type": "LOCAL",
        "mlflow.note.content": describe(settings, facts),
        **{f"effective.{k}": str(v) for k, v in folders.flatten(facts.effective).items()},
    }
    if name := settings.study.name or study.get("name"):
        tags["study"] = name
    if study:
        tags["job"] = folders.digest(facts.overrides)
    if git:
        tags["mlflow.source.git.commit"] = git
    if changed := changed_code(facts.provenance):
        tags["changed_code"] = ", ".join(changed)
    params = folders.flatten(settings.model_dump(mode="json")) | {"seed": facts.seed}
    return Tracker(
        folder, tracking, run_name=facts.name, params=params, tags=tags,
        parent_run_id=study.get("parent_run_id"),
    )  # fmt: skip


def make_evaluation(
    settings: Settings, learner: Learner, seed: int, num_threads: int
) -> Callable[[int, Callable[[], object]], np.ndarray | None]:
    """The n-th evaluation of a run: the greedy policy in fresh environments of fresh seeds."""
    wanted = settings.eval

    def evaluation(index: int, stop: Callable[[], object]) -> np.ndarray | None:
        num_envs = min(wanted.num_envs, wanted.episodes)
        envs = make_envs(settings, num_envs, stream_seed(seed, "eval", index), num_threads)
        try:
            act = learner.policy.act_greedy
            return evaluate(envs, act, wanted.episodes, wanted.max_steps, stop)
        finally:
            told("the environments of the evaluation", envs.close, say)

    return evaluation


def make_session(
    settings: Settings,
    folder: Path,
    overrides: list[str],
    composed_from: dict[str, Any] | None = None,
) -> tuple[Session, dict[str, Any] | None]:
    """Build every part of a run; also the checkpoint to continue from, or None.

    `composed_from` is what origins.origin tells of the configuration.
    """
    saved, state = None, None
    if settings.resume:
        saved = folders.record_of(folder)
        state = load_checkpoint(folder)
    run_id = saved["run_id"] if saved else folders.run_id_of(folder)
    if settings.seed is not None:
        seed = settings.seed
    else:
        seed = saved["seed"] if saved else secrets.randbits(31)
    in_sweep = bool(folders.multirun_of(overrides)[0])
    runtime = make_runtime(settings, seed, alone=not in_sweep)
    facts = make_facts(settings, folder, overrides, runtime, run_id, composed_from or {})
    threads = runtime.threads.env_threads
    phases = runtime.make_phases(settings.profile.name)
    compile_log = runtime.compile_log
    compile_log.phase = lambda: phases("compile")
    envs = make_training_envs(settings, stream_seed(seed, "envs"), threads, runtime.beside_envs)
    runtime = with_cache(runtime, settings, envs.spec, say)
    training = make_training(settings, envs, runtime, phases, folder)
    facts = facts.model_copy(update={"buffer": training.buffer_facts})

    # From here on nothing in the settings can be wrong: the run exists.
    record = saved or {
        "run_id": run_id,
        "seed": seed,
        "settings": settings.model_copy(update={"seed": seed}).model_dump(mode="json"),
    }
    # Store what composes the run now: a later resume starts from it.
    record |= {"overrides": overrides, "composed_from": composed_from}
    if claim := Claim.held.get(folder):
        claim.begun = True
    write_json(folder / "run.json", record)
    tracker = make_tracker(settings, folder, facts)
    tracker.start()
    hardware = HardwareSampler(cpu_budget=runtime.threads.budget)
    recorder = Recorder(
        folder / "metrics.jsonl", settings.log_every_s, envs.spec.frame_skip,
        phases.window, lambda: hardware.window() | compile_log.metrics(), lambda: tracker.ready,
        compile_seconds=lambda: compile_log.aside_s,
    )  # fmt: skip
    session = Session(
        settings=settings, folder=folder, facts=facts, envs=envs, learner=training.learner,
        loop=training.loop, replay=training.replay, phases=phases, recorder=recorder,
        tracker=tracker, hardware=hardware,
        progress=Progress(settings.total_steps),
        checkpoints=checkpoint.Checkpoints(
            folder / "checkpoints", settings.checkpoint.keep_last, settings.checkpoint.keep_best,
            say,
        ),
        evaluate=make_evaluation(settings, training.learner, seed, threads),
        synchronize=runtime.synchronize, compile_log=compile_log, transfers=runtime.transfers,
        background=runtime.background,
    )  # fmt: skip
    return session, state


def load_checkpoint(folder: Path) -> dict[str, Any]:
    """The newest whole checkpoint of a run; raises ConfigError where it left none."""
    try:
        state = checkpoint.Checkpoints(folder / "checkpoints", 1, False, say).load_latest()
    except checkpoint.Damaged as error:
        raise ConfigError(f"resume={folder}: {error}; start a new run") from None
    if state is None:
        raise ConfigError(
            f"resume={folder}: the run left no checkpoint (it stopped before "
            "checkpoint.every_steps); start a new run"
        )
    return state


def train(cfg: DictConfig) -> dict[str, Any]:
    """Run one job of a Hydra app; returns result.json's object."""
    hydra = HydraConfig.get()
    settings = load.load(cfg, list(hydra.overrides.task))
    overrides = [o for o in hydra.overrides.task if not o.startswith("resume=")]
    folder = Path(hydra.runtime.output_dir)
    session, state = make_session(settings, folder, overrides, origins.origin(hydra))
    session.stop.reason = stop.asked()
    for what, why in session.facts.reasons.items():
        session.progress.message(f"{what}: {why}")
    return session.run(state)
