"""Are the backends the same task? Run by `make parity`; prints the table of README.md.

Arguments: names of tasks; none means those of GAMES.
"""

from __future__ import annotations

import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path

from hydra import compose, initialize_config_dir

from experiments import frame
from rl_pipeline.config import load
from rl_pipeline.config.origins import CONF
from rl_pipeline.config.settings import EnvSettings, Settings
from rl_pipeline.envs.differences import known_differences
from rl_pipeline.envs.parity import Sample, Verdict, sample
from rl_pipeline.envs.parity import compare as compare_samples
from rl_pipeline.errors import ConfigError
from rl_pipeline.machine import cpu_budget
from rl_pipeline.run.build import make_training_envs
from rl_pipeline.telemetry.provenance import changed_code, provenance
from rl_pipeline.types import VecEnv

REFERENCE = "gymnasium"
BACKENDS = ("gymnasium", "gymnasium_async", "gymnasium_native", "envpool", "envpool_async")
GAMES = {"cartpole": 800, "pendulum": 400, "halfcheetah": 64, "pong": 48, "breakout": 160}
"""Full games of each backend by task; 64 where a task is not listed."""
NUM_STARTS = 400
LEVEL = 0.01
"""Chance that one table of equal tasks shows any difference (Bonferroni over its tests)."""


def settings_of(task: str, backend: str) -> Settings:
    """As `python -m rl_pipeline.train env=... backend=...` composes them."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return load.load(compose("config", overrides=[f"env={task}", f"backend={backend}"]))


def sample_of(task: str, backend: str) -> Sample | str:
    """The sample, or why the backend cannot run the task."""
    try:
        settings = settings_of(task, backend)
    except ConfigError as error:
        return str(error)

    def make(env: EnvSettings, num_envs: int, seed: int) -> VecEnv:
        lanes = min(settings.backend.lanes, num_envs)
        chosen = settings.backend.model_copy(update={"num_envs": num_envs, "lanes": lanes})
        return make_training_envs(
            settings.model_copy(update={"env": env, "backend": chosen}), seed, num_threads=1
        )

    try:
        return sample(make, settings.env, GAMES.get(task, 64), NUM_STARTS)
    except ValueError as error:
        return str(error)


def main() -> None:
    """Measure, then print one table for the tasks and one for their facts."""
    frame.refuse_changes()
    tasks = sys.argv[1:] or list(GAMES)
    samples: dict[tuple[str, str], Sample | str] = {}
    for task in tasks:
        for backend in BACKENDS:
            begin = time.monotonic()
            samples[task, backend] = sample_of(task, backend)
            print(f"{task} {backend} {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    print(render(tasks, samples))


def facts_of(found: Sample) -> dict[str, str]:
    """What was measured to be one thing or another."""
    if not found.at_limit:
        return found.facts
    return found.facts | {"a termination in the limit's step is": found.at_limit}


def commit() -> str:
    """Of the code that measured."""
    git = provenance(Path(__file__).parent)
    changed = " with changes" if changed_code(git) else ""
    return f"`{git['git'][:7]}`{changed}" if git["git"] else "?"


def render(tasks: list[str], samples: dict[tuple[str, str], Sample | str]) -> str:
    """The answer as Markdown."""
    verdicts: dict[tuple[str, str], Verdict] = {}
    for task in tasks:
        reference = samples[task, REFERENCE]
        assert isinstance(reference, Sample), reference
        for backend in BACKENDS:
            other = samples[task, backend]
            if backend != REFERENCE and isinstance(other, Sample):
                verdicts[task, backend] = compare_samples(reference, other)
    level = LEVEL / max(1, sum(len(v.p_values) for v in verdicts.values()))
    packages = ", ".join(f"{p} {version(p)}" for p in ("gymnasium", "envpool", "ale-py", "mujoco"))
    columns = ["task", "backend", "verdict", "starts p", "length", "p", "return", "p"]
    lines = [
        f"{packages}; {platform.machine()}, {cpu_budget()[0]} cores, commit {commit()}. "
        f"Tests at {level:.1e} each, {LEVEL:g} in all.",
        "",
        "| " + " | ".join([*columns, "known difference"]) + " |",
        "| --- " * (len(columns) + 1) + "|",
    ]
    for task in tasks:
        task_id = settings_of(task, REFERENCE).env.id
        for backend in BACKENDS:
            found = samples[task, backend]
            if isinstance(found, str):
                lines.append(f"| {task} | {backend} | cannot run: {found} | | | | | | |")
                continue
            cells = [task, backend]
            means = [f"{found.lengths.mean():.4g}", f"{found.returns.mean():.4g}"]
            if backend == REFERENCE:
                cells += [f"reference, {len(found.lengths)} games", "", means[0], "", means[1], ""]
            else:
                verdict = verdicts[task, backend]
                differs = verdict.differs(level)
                p = [f"{verdict.p_values[name]:.2g}" for name in ("starts", "length", "return")]
                cells += ["DIFFERS: " + ", ".join(differs) if differs else "same"]
                cells += [p[0], means[0], p[1], means[1], p[2]]
            known = known_differences(task_id, REFERENCE, backend)
            lines.append("| " + " | ".join([*cells, "; ".join(known)]) + " |")
    lines += [
        "",
        "Facts as measured, equal or named above as a known difference:",
        "",
    ]
    for task in tasks:
        reference = samples[task, REFERENCE]
        assert isinstance(reference, Sample)
        facts = ", ".join(f"{key} {value}" for key, value in facts_of(reference).items())
        lines.append(f"- {task}: {facts}")
        for backend in BACKENDS:
            other = samples[task, backend]
            if isinstance(other, Sample):
                ours, theirs = facts_of(reference), facts_of(other)
                unequal = {k: v for k, v in theirs.items() if ours.get(k, v) != v}
                if unequal:
                    lines.append(f"  - {backend}: {unequal}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
