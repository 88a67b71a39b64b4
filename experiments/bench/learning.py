"""Do we learn as much at equal steps? `make bench-learning`: against Stable-Baselines3.

    python -m experiments.bench.learning tasks=ppo_cartpole_4:150000 seeds=10

The bench's tasks with the bench's settings, ours in the fastest form; two runs at a time, one
thread each (no speed is measured here). A run's score is the mean of its last 100 training games.
The verdict is a comparison's: the margin is a tenth of what the baseline gained.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator

from experiments import frame
from experiments.bench.study import NAMES, train_ours, train_peer
from experiments.bench.tasks import TASKS
from experiments.envs.bench import machine_facts
from rl_pipeline.comparison import stats, tables
from rl_pipeline.config import cli
from rl_pipeline.config.app import refusing
from rl_pipeline.config.settings import Frozen, PositiveInt

HERE = Path(__file__).parent
RESULTS = HERE / "results"
POINTS = 40


class Options(Frozen):
    """What to run."""

    tasks: Annotated[tuple[str, ...], BeforeValidator(cli.names)] = (
        "ppo_cartpole_4:150000", "ppo_halfcheetah_1:300000",
    )  # fmt: skip
    """name:env steps."""
    seeds: PositiveInt = 10


def train(name: str, contender: str, steps: int, seed: int) -> list[list[float]]:
    """The curve of one run: (env steps, mean return of the last 100 games), kept on the disk."""
    path = HERE / "runs" / f"learning-{name}-{contender}-{steps}-{seed}.json"
    if path.exists():
        return json.loads(path.read_text())
    (task,) = (task for task in TASKS if task.name == name)
    if contender == "fast":
        run = train_ours(task, "fast", steps, seed, f"{name}-fast-{seed}", cpus=1)
    else:
        run = train_peer(task, contender, steps, seed, 1, "serial")
    curve = [[step, value] for step, _, value in run["returns"]]
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(curve))
    print(f"  {name} {contender} seed {seed}: {curve[-1][1]:.1f}", flush=True)
    return curve


def compare(name: str, steps: int, seeds: int) -> dict[str, Any]:
    """All runs of a task, and the verdict."""
    jobs = [(c, seed) for seed in range(1, seeds + 1) for c in ("fast", "sb3")]
    with ThreadPoolExecutor(2) as pool:
        curves = list(pool.map(lambda job: train(name, job[0], steps, job[1]), jobs))
    found: dict[str, list[list[list[float]]]] = {"fast": [], "sb3": []}
    for (contender, _), curve in zip(jobs, curves, strict=True):
        found[contender].append(curve)
    ends = {c: [curve[-1][1] for curve in runs] for c, runs in found.items()}
    begin = float(np.mean([curve[0][1] for curve in found["sb3"]]))
    margin = abs(float(np.mean(ends["sb3"])) - begin) / 10
    parity = stats.parity(ends["fast"], ends["sb3"], margin)
    return {
        "task": name, "steps": steps, "curves": found, "ends": ends, "margin": margin,
        "difference": list(parity.difference), "verdict": parity.verdict,
    }  # fmt: skip


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Mean return at equal steps, and the range over seeds."""
    from matplotlib.figure import Figure

    figure = Figure((4.6 * len(rows), 3.4), layout="constrained")
    axes = figure.subplots(1, len(rows), squeeze=False)[0]
    for axis, row in zip(axes, rows, strict=True):
        at = np.linspace(row["steps"] / POINTS, row["steps"], POINTS)
        for i, (contender, runs) in enumerate(row["curves"].items()):
            values = np.array([np.interp(at, *np.transpose(curve)) for curve in runs])
            axis.plot(at, values.mean(0), color=f"C{2 * i}", label=NAMES[contender])
            axis.fill_between(at, values.min(0), values.max(0), color=f"C{2 * i}", alpha=0.2)
        axis.set(title=row["task"], xlabel="env steps", ylabel="return of the last 100 games")
        axis.ticklabel_format(axis="x", style="sci", scilimits=(0, 0))
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Train what is missing, tell."""
    frame.refuse_changes()
    with refusing("see the head of experiments/bench/learning.py"):
        options = cli.parse(Options, sys.argv[1:])
    facts = machine_facts()
    rows = []
    for entry in options.tasks:
        name, _, steps = entry.partition(":")
        rows.append(compare(name, int(steps), options.seeds))
    header = ["task", "env steps", "ours, fastest", "Stable-Baselines3", "difference", "verdict"]
    cells = [
        [
            row["task"], f"{row['steps']:,}",
            *(f"{np.mean(e):.1f} ({min(e):.0f} to {max(e):.0f})" for e in row["ends"].values()),
            "{:+.1f} [{:.1f}, {:.1f}]".format(*row["difference"][:3]),
            f"{row['verdict']} (margin {row['margin']:.1f})",
        ]
        for row in rows
    ]  # fmt: skip
    text = tables.markdown(header, cells)
    note = f"{options.seeds} seeds a side; commit {(facts['git'] or 'none')[:7]}."
    (RESULTS / "learning.md").write_text(f"{text}\n{note}\n")
    (RESULTS / "learning.json").write_text(json.dumps({"facts": facts, "rows": rows}) + "\n")
    draw(rows, RESULTS / "learning.png")
    print(text, note, sep="\n")


if __name__ == "__main__":
    main()
