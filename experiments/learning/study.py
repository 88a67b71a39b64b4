"""Do PPO and DQN learn what they should, equally on every backend? Run by `make learn`.

Every cell (task, backend, seed) that has a result under results/ is skipped, so that the study can
be stopped and continued. Arguments: names of tasks to run; none means all.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments import frame
from rl_pipeline.comparison import stats

HERE = Path(__file__).parent
RESULTS = HERE / "results"


@dataclass(frozen=True)
class Task:
    """One line of the study."""

    env: str
    backends: tuple[str, ...]
    """With further choices, if any, as on the command line; the first is what others agree with."""
    seeds: tuple[int, ...]
    total_steps: int
    bar: float
    """Greedy evaluation return that counts as learned."""
    rule: str
    """`most`: all but one seed reach the bar; `mean`: the mean over seeds does."""
    algo: str = "ppo"

    @property
    def name(self) -> str:
        """As on the command line and in file names; PPO goes without saying."""
        return self.env if self.algo == "ppo" else f"{self.algo}-{self.env}"


BACKENDS = ("envpool", "gymnasium", "envpool_async")
HALFCHEETAH = (
    "envpool", "envpool_async", "envpool compile=default", "envpool precision=bf16 compile=default",
)  # fmt: skip
PONG = "envpool precision=bf16 compile=default algo.learning_rate=5e-4"
"""The fastest form on a CPU with bf16 units; twice the recipe's learning rate, annealed sooner."""
TASKS = [
    Task("cartpole", BACKENDS, (1, 2, 3, 4, 5), 150_000, 475, "most"),
    Task("acrobot", ("envpool",), (1, 2, 3), 300_000, -100, "mean"),
    Task("pendulum", ("envpool",), (1, 2, 3), 500_000, -300, "mean"),
    Task("halfcheetah", HALFCHEETAH, (1, 2, 3), 1_000_000, 1200, "mean"),
    Task("cartpole", ("gymnasium",), (1, 2, 3, 4, 5), 80_000, 475, "most", "dqn"),
    Task("acrobot", ("gymnasium",), (1, 2, 3), 100_000, -100, "mean", "dqn"),
    Task("pong", (PONG,), (1,), 3_000_000, 18, "mean"),
]


def path_of(task: Task, backend: str, seed: int) -> Path:
    """The file of one cell's result."""
    choices = backend.replace(" ", "-").replace("=", "_")
    return RESULTS / f"{task.name}-{choices}-{seed}.json"


def run_cell(task: Task, backend: str, seed: int) -> None:
    """Train one cell and keep the part of its record that the study needs."""
    path = path_of(task, backend, seed)
    if path.exists():
        return
    name, *choices = backend.split()
    overrides = [
        f"algo={task.algo}", f"env={task.env}", f"backend={name}", *choices, f"seed={seed}",
        f"total_steps={task.total_steps}", f"eval.every_steps={task.total_steps // 10}",
        "tracking=none", "checkpoint.every_steps=0",
    ]  # fmt: skip
    record, rows = frame.train(HERE, path.stem, overrides)
    evaluations = [(r["step"], r["metrics"].get("return/eval")) for r in rows]
    record["curve"] = [point for point in evaluations if point[1] is not None]
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def load(task: Task, backend: str) -> list[dict]:
    """The results of a task on a backend, by seed; also of further seeds that lie there."""
    stem = path_of(task, backend, 0).stem.removesuffix("0")
    paths = [p for p in RESULTS.glob(f"{stem}*.json") if p.stem.removeprefix(stem).isdigit()]
    found = [json.loads(p.read_text()) for p in paths]
    return sorted(found, key=lambda result: result["seed"])


def curves(results: list[dict]) -> np.ndarray:
    """Evaluations [seeds, points] at the tenths of the run."""
    return np.array([[value for _, value in r["curve"]] for r in results])


def table() -> str:
    """One row per task and backend, in Markdown."""
    lines = [
        "| task | backend | env steps | return per seed | mean [95 %] | bar | learned |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for task in TASKS:
        for backend in task.backends:
            results = load(task, backend)
            if not results:
                continue
            final = np.array([r["returns"]["eval_mean"] for r in results])
            low, high = frame.interval(final)
            reached = int((final >= task.bar).sum())
            if task.rule == "most":
                verdict = reached >= max(len(task.seeds), len(final)) - 1
                bar = f">= {task.bar:g} in {len(task.seeds) - 1} of {len(task.seeds)}"
            else:
                verdict = len(final) >= len(task.seeds) and final.mean() >= task.bar
                bar = f"mean >= {task.bar:g}"
            lines.append(
                f"| {task.name} | {backend} | {task.total_steps:,} | "
                f"{', '.join(f'{x:.0f}' for x in final)} | "
                f"{final.mean():.1f} [{low:.1f}, {high:.1f}] | {bar} | "
                f"{'yes' if verdict else 'NO'} ({reached}/{len(final)}) |"
            )
    return "\n".join(lines) + "\n"


def below() -> str:
    """One row per task, in Markdown: of all its runs those that ended below the bar, those of them
    that had reached it before, those that reached it, fell and ended above, and the worst end."""
    lines = [
        "| task | bar | runs | ended below | fell below to the end | in between only | worst end |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for task in TASKS:
        found = [values for backend in task.backends for values in curves(load(task, backend))]
        if not found:
            continue
        worst = min(values[-1] for values in found)
        ended = sum(values[-1] < task.bar for values in found)
        # After its first evaluation at the bar or above.
        later = [(values[(values >= task.bar).argmax() :] < task.bar) for values in found]
        fell = [x for x, values in zip(later, found, strict=True) if values.max() >= task.bar]
        to_the_end = sum(x[-1] for x in fell)
        between = sum(x.any() and not x[-1] for x in fell)
        lines.append(
            f"| {task.name} | {task.bar:g} | {len(found)} | {ended} | {to_the_end} | {between} | "
            f"{worst:.0f} |"
        )
    return "\n".join(lines) + "\n"


def agreement(task: Task, backend: str) -> str:
    """Whether a backend's curve agrees with that of the task's first one."""
    base = task.backends[0]
    both = [load(task, name) for name in (base, backend)]
    if any(len(results) < len(task.seeds) for results in both):
        return ""
    first, second = (curves(results) for results in both)
    lines = [
        f"### {task.name}: {backend} against {base}\n",
        f"| tenth of the run | {base} [95 %] | {backend} [95 %] | overlap |",
        "| --- | --- | --- | --- |",
    ]
    overlaps = 0
    for point in range(first.shape[1]):
        a, b = frame.interval(first[:, point]), frame.interval(second[:, point])
        overlap = a[0] <= b[1] and b[0] <= a[1]
        overlaps += overlap
        lines.append(
            f"| {point + 1} | {first[:, point].mean():.0f} [{a[0]:.0f}, {a[1]:.0f}] | "
            f"{second[:, point].mean():.0f} [{b[0]:.0f}, {b[1]:.0f}] | "
            f"{'yes' if overlap else 'NO'} |"
        )
    area = stats.difference(second.mean(1).tolist(), first.mean(1).tolist())
    # As a comparison's verdict: at the end, a loss surely below a tenth of what the first gained.
    margin = abs(first[:, -1].mean() - first[:, 0].mean()) / 10
    end = stats.parity(second[:, -1].tolist(), first[:, -1].tolist(), margin)
    change = end.difference
    lines.append(
        f"\nThe intervals overlap at {overlaps} of {first.shape[1]} points. "
        f"{backend} minus {base}: mean return over the whole run {area.value:+.1f} "
        f"[{area.low:.1f}, {area.high:.1f}] (95 %, Welch); at the end {change.value:+.1f} "
        f"[{change.low:.1f}, {change.high:.1f}] (two-sided 90 %, margin {margin:.1f}): "
        f"{end.verdict}."
    )
    return "\n".join(lines) + "\n"


def picture() -> None:
    """Learning curves with bands."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tasks = [task for task in TASKS if any(load(task, backend) for backend in task.backends)]
    figure, axes = plt.subplots(1, len(tasks), figsize=(4 * len(tasks), 3.2))
    for axis, task in zip(axes, tasks, strict=True):
        for backend in task.backends:
            results = load(task, backend)
            if not results:
                continue
            values = curves(results)
            steps = np.mean([[s for s, _ in r["curve"]] for r in results], axis=0)
            bands = np.array([frame.interval(column) for column in values.T])
            axis.plot(steps, values.mean(0), marker="o", markersize=3, label=backend)
            axis.fill_between(steps, bands[:, 0], bands[:, 1], alpha=0.2)
        axis.axhline(task.bar, color="grey", linestyle=":", linewidth=1)
        axis.set_title(task.name)
        axis.set_xlabel("env steps")
        axis.ticklabel_format(axis="x", style="sci", scilimits=(0, 0))
        axis.legend(frameon=False, fontsize=8)
    axes[0].set_ylabel("greedy evaluation return")
    figure.tight_layout()
    figure.savefig(HERE / "curves.png", dpi=110)


def main() -> None:
    """Run what is missing, then write the table and the picture."""
    frame.refuse_changes()
    wanted = set(sys.argv[1:]) or {task.name for task in TASKS}
    if unknown := wanted - {task.name for task in TASKS}:
        raise SystemExit(f"no such task: {', '.join(sorted(unknown))}")
    for task in TASKS:
        if task.name in wanted:
            for seed in task.seeds:
                for backend in task.backends:
                    run_cell(task, backend, seed)
    pairs = [agreement(task, other) for task in TASKS for other in task.backends[1:]]
    text = "\n".join([table(), below(), *filter(None, pairs)])
    (HERE / "table.md").write_text(text)
    picture()
    print(text)


if __name__ == "__main__":
    main()
