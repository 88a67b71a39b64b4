"""What precision and compilation give in whole training runs. Run by `make precision-compile`.

Every cell (task, precision, compile mode, seed) that has a result is skipped, so that the study
can be stopped and continued. QUICK=1 runs short ones once, into a folder of their own, and of the
tasks PPO CartPole where none is named, without compiled bf16. Arguments: names of tasks; none
means all.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from experiments import frame

HERE = Path(__file__).parent
CHANGES = [change for change in frame.changes() if not change.startswith("seed=")]
SIZE = "quick" if frame.QUICK else "results"
RESULTS = HERE / SIZE
if CHANGES:  # other cells than those kept
    RESULTS = HERE / "runs" / frame.named(SIZE, CHANGES)
TASKS = {  # seeds; steps of the quick form
    "cartpole_ppo": ((1, 2, 3), 10_000),
    "pong_ppo": ((1, 2), 2_048),
    "halfcheetah_ppo": ((1, 2), 10_240),
    "cartpole_dqn": ((1, 2, 3), 4_000),
}
CELLS = [("fp32", "eager"), ("bf16", "eager"), ("fp32", "default"), ("bf16", "default")]
if frame.QUICK:
    del CELLS[-1]  # building graphs takes most of the time


def run_cell(task: str, precision: str, compiled: str, seed: int) -> None:
    """Train one cell in a fresh process and keep the part of its record that the table needs."""
    path = RESULTS / f"{task}-{precision}-{compiled}-{seed}.json"
    if path.exists():
        return
    overrides = [
        f"experiment=speed_{task}", f"precision={precision}", f"compile={compiled}",
        f"seed={seed}", "tracking=none",
    ]  # fmt: skip
    if frame.QUICK:
        overrides += [f"total_steps={TASKS[task][1]}", "eval.episodes=0", "log_every_s=0.3"]
    overrides += CHANGES
    # Their own, so that the first seed of a cell builds its graphs and the others load them.
    cache = {} if frame.QUICK else {"TORCHINDUCTOR_CACHE_DIR": str(HERE / "runs" / "cache")}
    record, rows = frame.train(HERE, path.stem, overrides, cache)
    key = "health/max_abs_log_ratio_first_minibatch"
    ratios = [r["metrics"][key] for r in rows if key in r["metrics"]]
    record["max_abs_log_ratio"] = max(ratios, default=None)
    RESULTS.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def load(task: str, precision: str, compiled: str) -> list[dict]:
    """The results of a cell, by seed."""
    seeds = sorted({*TASKS[task][0], *frame.seeds()})
    paths = [RESULTS / f"{task}-{precision}-{compiled}-{seed}.json" for seed in seeds]
    return [json.loads(p.read_text()) for p in paths if p.exists()]


def score(result: dict) -> float:
    """Greedy evaluation, else the last training episodes, else NaN."""
    returns = result["returns"]
    value = returns["eval_mean"] if returns["eval_mean"] is not None else returns["train_mean"]
    return float("nan") if value is None else value


def table() -> str:
    """One row per task and cell, in Markdown."""
    lines = [
        "| task | precision | compile | env steps/s | updates/s | vs fp32 eager | compile s "
        "(cold, cached) | pays back after | return at equal steps (range) | max abs log ratio |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for task in TASKS:
        base: float | None = None
        for precision, compiled in CELLS:
            results = load(task, precision, compiled)
            if not results:
                continue
            steps, updates = (
                np.array([r["throughput"][key] for r in results])
                for key in ("env_steps_per_s", "updates_per_s")
            )
            base = base or float(np.median(updates))
            returns = np.array([score(r) for r in results])
            note = "" if all(r["throughput"]["steady"] for r in results) else "*"
            ratios = [r["max_abs_log_ratio"] for r in results if r["max_abs_log_ratio"] is not None]
            lines.append(
                f"| {task} | {precision} | {compiled} | {np.median(steps):,.0f}{note} | "
                f"{np.median(updates):,.0f} | {np.median(updates) / base:.2f}x | "
                f"{compile_cost(results)} | {pays_back(results)} | "
                f"{returns.mean():.1f} ({returns.min():.1f} to {returns.max():.1f}) | "
                f"{f'{max(ratios):.1e}' if ratios else '-'} |"
            )
    return "\n".join(lines) + "\n\n\\* no steady state was reached\n"


def compile_cost(results: list[dict]) -> str:
    """Seconds of the first run, which builds, and of the later ones, which load."""
    found = [r["compile"] for r in results if r["compile"]["graphs"]]
    if not found:
        return "-"
    cold = [c["seconds"] for c in found if not all(f["cached"] for f in c["functions"])]
    warm = [c["seconds"] for c in found if all(f["cached"] for f in c["functions"])]
    return ", ".join(f"{np.median(x):.1f}" if x else "-" for x in (cold, warm))


def pays_back(results: list[dict]) -> str:
    """Updates until compiling has paid, from the run that built the graphs."""
    found = [r["compile"] for r in results if "update_speedup" in r["compile"]]
    if not found:
        return "-"
    first = max(found, key=lambda c: c["seconds"])["pays_back_after_updates"]
    return "never" if first is None else f"{first:,} updates"


def main() -> None:
    """Run what is missing, then write the table."""
    wanted = sys.argv[1:] or (["cartpole_ppo"] if frame.QUICK else list(TASKS))
    if unknown := set(wanted) - TASKS.keys():
        raise SystemExit(f"no such task: {', '.join(sorted(unknown))}")
    for task in wanted:
        for seed in frame.seeds(TASKS[task][0][: 1 if frame.QUICK else None]):
            for precision, compiled in CELLS:
                run_cell(task, precision, compiled, seed)
    text = table()
    (RESULTS / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
