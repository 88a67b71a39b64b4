"""The whole diagnosis of one configuration: measure, judge, try what could be otherwise."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rl_pipeline import machine
from rl_pipeline.config import folders
from rl_pipeline.config.settings import Settings
from rl_pipeline.diagnosis.candidates import Candidate, Machine, Overrides, proposals
from rl_pipeline.diagnosis.trial import Budget, Trial, try_out
from rl_pipeline.diagnosis.verdict import Share, sentence, shares
from rl_pipeline.diagnosis.worker import Worker
from rl_pipeline.errors import ConfigError

FULL_S = 8.0
"""Seconds of the real run."""
PART_S = 0.5
"""Seconds of each part alone."""
SURE_GAIN = 1.02
"""A change whose gain is surely below this is not worth a line."""


@dataclass(frozen=True)
class Diagnosis:
    """What was found; JSON by `asdict`."""

    task: str
    overrides: list[str]
    rate: float
    """Env steps/s of the real run."""
    ladder: dict[str, float]
    """Env steps/s of the environments, with acting, with storing, with learning, of the run."""
    alone: dict[str, float]
    """Seconds an env step of each part alone."""
    together: dict[str, float]
    """Seconds an env step of each phase in the run."""
    busy: dict[str, float]
    """CPU seconds per second of each part alone."""
    shares: list[Share]
    verdict: str
    efficiency: float
    """Speed over that of a run whose parts cost no more than alone."""
    trials: list[Trial]
    best: Trial | None
    """All changes that keep the recipe and are surely faster, together."""
    machine: dict[str, Any] = field(default_factory=dict)

    @property
    def prescriptions(self) -> list[Trial]:
        """What is worth changing, the largest gain first; those that keep the recipe lead."""
        worth = [t for t in self.trials if t.better and t.high > SURE_GAIN]
        return sorted(worth, key=lambda t: (t.recipe, -t.ratio))


def real_run(overrides: list[str], folder: Path) -> dict[str, Any]:
    """result.json of `rl_pipeline.train` with these overrides, cut after FULL_S seconds."""
    command = [
        sys.executable, "-m", "rl_pipeline.train", *overrides, f"max_wall_s={FULL_S}",
        "tracking=none", "eval.episodes=0", "checkpoint.every_steps=0", "log_every_s=0.5",
        f"hydra.run.dir={folder}",
    ]  # fmt: skip
    done = subprocess.run(command, env=machine.module_environment(), capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(done.stderr.strip() or f"the run ended with code {done.returncode}")
    return json.loads((folder / "result.json").read_text())


def here(threads: dict[str, int]) -> Machine:
    """The machine as the candidates ask for it; `threads` are those of a run's result."""
    import torch

    from rl_pipeline.engine.compilers import check_compiler

    try:
        check_compiler()
        compiler = True
    except ConfigError:
        compiler = False
    cores = machine.cpu_budget()[0]
    return Machine(
        cores, machine.has_bf16_units(), torch.cuda.is_available(), compiler,
        threads.get("torch", 0), threads.get("envs", 0),
    )  # fmt: skip


def diagnose(
    settings: Settings,
    overrides: list[str],
    load: Callable[[list[str]], Settings],
    budget_s: float,
    say: Callable[[str], None],
) -> Diagnosis:
    """Measure and try; `load` gives the settings of other overrides or raises ConfigError.

    What does not fit into `budget_s` seconds is not tried.
    """
    budget = Budget(budget_s)
    say("the run as it is")
    with tempfile.TemporaryDirectory() as folder:
        result = real_run(overrides, Path(folder) / "run")
    rate = result["throughput"]["env_steps_per_s"]
    base = Worker(settings)
    try:
        memory = base.ready()["memory"]
        say("its parts, each alone")
        turn_s = max(0.5, 2.0 * _round_s(settings, rate))
        ladder = base.ask("ladder", turn_s) | {"run": rate}
        parts = base.ask("parts", PART_S)
        stretch = base.ask("run", turn_s)
        changes = list(proposals(settings, here(result["effective"]["threads"])))
        trials = _try_all(base, memory, changes, overrides, load, turn_s, budget, say)
        best = _together(base, memory, trials, overrides, load, turn_s, say)
    finally:
        base.close()
    steps = stretch["env_steps"]
    together = {name: s / steps for name, s in stretch["phases"].items()}
    alone = {name: cost["median_s"] for name, cost in parts.items()}
    busy = {name: cost["busy"] for name, cost in parts.items()}
    found = shares(stretch["phases"])
    efficiency = rate * sum(alone.values())
    return Diagnosis(
        task=f"{settings.algo.name} on {settings.env.id}", overrides=overrides, rate=rate,
        ladder=ladder, alone=alone, together=together, busy=busy, shares=found,
        verdict=sentence(found, busy, efficiency), efficiency=efficiency, trials=trials, best=best,
        machine=result["hardware"] | {"threads": result["effective"]["threads"]},
    )  # fmt: skip


def _round_s(settings: Settings, rate: float) -> float:
    """Seconds of what the loop does as a whole: a rollout with its update."""
    horizon = getattr(settings.algo, "horizon", 1)
    return horizon * settings.backend.num_envs / rate


def _try_all(
    base: Worker,
    memory: int,
    changes: list[tuple[Candidate, Overrides]],
    overrides: list[str],
    load: Callable[[list[str]], Settings],
    turn_s: float,
    budget: Budget,
    say: Callable[[str], None],
) -> list[Trial]:
    trials = []
    for candidate, change in changes:
        if budget.left_s < 0:
            say(f"no time left for {' '.join(change)}: give budget=<seconds>")
            continue
        try:
            changed = load(changed_by(overrides, change))
        except ConfigError:
            continue  # impossible with these settings
        say(" ".join(change))
        trials.append(
            try_out(base, memory, candidate.name, change, candidate.recipe, changed, turn_s)
        )
    return trials


def _together(
    base: Worker,
    memory: int,
    trials: list[Trial],
    overrides: list[str],
    load: Callable[[list[str]], Settings],
    turn_s: float,
    say: Callable[[str], None],
) -> Trial | None:
    """The best of each kind that keeps the recipe, at once."""
    kinds: dict[str, Trial] = {}
    for trial in sorted(trials, key=lambda t: -t.ratio):
        if trial.better and not trial.recipe:
            kinds.setdefault(trial.change, trial)
    if len(kinds) < 2:
        return next(iter(kinds.values()), None)
    change = tuple(dict.fromkeys(o for trial in kinds.values() for o in trial.overrides))
    try:
        changed = load(changed_by(overrides, change))
    except ConfigError:
        return max(kinds.values(), key=lambda t: t.ratio)
    say(" ".join(change))
    found = try_out(base, memory, "together", change, False, changed, turn_s)
    return max((found, *kinds.values()), key=lambda t: t.low)


def changed_by(overrides: list[str], change: Overrides) -> list[str]:
    """The command line with a change: what it sets anew is taken out before."""
    settings = [o for o in change if not o.split("=")[0].isupper()]
    keys = {o.split("=")[0] for o in settings}
    return [o for o in overrides if o.lstrip("+").split("=")[0] not in keys] + settings


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """For diagnosis.json."""
    prescribed = [asdict(t) for t in diagnosis.prescriptions]
    return asdict(diagnosis) | {"prescriptions": prescribed}


@dataclass(frozen=True)
class Finding:
    """What a finished run's own records tell."""

    task: str
    rate: float
    steady: bool
    """The run was long enough for a steady state."""
    shares: list[Share]
    verdict: str
    worth_trying: list[tuple[Overrides, bool]]
    """Changes that the table has for it, none of them measured; True where the recipe changes."""
    overrides: list[str]


def from_records(folder: Path) -> Finding:
    """The verdict of a finished run; raises ConfigError where it left too little."""
    record, path = folders.record_of(folder), folder / "result.json"
    if not path.exists():
        raise ConfigError(f"run={folder}: it left no result.json; it did not come to its end")
    result = json.loads(path.read_text())
    phases = {name: p["seconds"] for name, p in result.get("phases", {}).items()}
    if not phases:
        raise ConfigError(
            f"run={folder}: its time was not told apart by phase (profile=none); diagnose its "
            "settings instead"
        )
    found, throughput = shares(phases), result["throughput"]
    threads = result["effective"]["threads"]
    changes = proposals(Settings.model_validate(record["settings"]), here(threads))
    return Finding(
        task=f"{result['task']['algo']} on {result['task']['id']}",
        rate=throughput["env_steps_per_s"], steady=throughput["steady"], shares=found,
        verdict=sentence(found),
        worth_trying=[(change, candidate.recipe) for candidate, change in changes],
        overrides=record["overrides"],
    )  # fmt: skip
