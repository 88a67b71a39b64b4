"""What is stepping many environments at once worth? Run by `make repro-vectorization`.

    python -m experiments.vectorization.study tasks=pong num_envs=8 repeats=7

Options as in experiments/envs/bench.py. Each way takes turns with the naive loop.
"""

from __future__ import annotations

import json
import statistics
import time
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from experiments import frame
from experiments.envs import bench, steppers
from experiments.envs.paired import Advance, Cell, take_turns
from experiments.vectorization.naive import NaiveEnvs
from rl_pipeline.comparison import figures, tables
from rl_pipeline.terminal import shown_path

HERE = Path(__file__).parent
FULL = ["threads=2", "repeats=3", f"out={HERE}"]
SHORT = [*bench.SHORT, "repeats=1", f"out={HERE / 'runs' / 'quick'}"]
HEADER = "task | envs | way | env steps/s (spread) | times the naive loop (range)".split(" | ")


def visit(cell: Cell, seconds: float, seed: int) -> dict[str, float]:
    """Seconds a step of the naive loop and of one way, and the share of valid rows.

    A pair at a time: with all ways built at once, processes that were idle for their turns took
    five times as long.
    """
    rng = np.random.default_rng(seed)
    actions = steppers.draw_actions(steppers.spec_of(cell), rng)
    with ExitStack() as stack:
        contenders: dict[str, Advance] = {}
        # The first that is built is often slower, so chance decides who that is.
        for way in rng.permutation(["naive", cell.backend]):
            if way == "naive":
                naive = NaiveEnvs(steppers.settings_of(cell).env, cell.num_envs, seed)
                stack.callback(naive.close)
                contenders["naive"] = advance_naive(naive, actions)
                continue
            envs = steppers.make_ours(cell, seed)
            stack.callback(envs.close)
            contenders["way"] = steppers.advance_ours(envs, actions)
        timing = take_turns(contenders, seconds, rng)
        valid = np.mean([naive.step(action).valid.mean() for action in actions])
        return timing | {"valid": float(valid)}


def advance_naive(naive: NaiveEnvs, actions: list[np.ndarray]) -> Advance:
    """Steps of the loop with its accounts, as `steppers.advance_ours` makes the others'."""
    naive.reset()
    step = steppers.one_by_one(naive.step, actions)

    def advance(num_steps: int) -> None:
        step(num_steps)
        naive.pop_episodes()

    return advance


def rows_of(cells: list[Cell], timings: dict[Cell, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """One row per way to step one task at one size: its speed, and its speed-up within pairs."""
    pairs = [pair for cell in cells for pair in timings[cell]]
    share = statistics.mean(pair["valid"] for pair in pairs)
    task, num_envs = cells[0].task, cells[0].num_envs
    rows = []
    for way, mine in [("naive", pairs)] + [(cell.backend, timings[cell]) for cell in cells]:
        seconds = [pair["naive" if way == "naive" else "way"] for pair in mine]
        low, middle, high = np.quantile([num_envs * share / s for s in seconds], [0.25, 0.5, 0.75])
        ratios = [pair["naive"] / s for pair, s in zip(mine, seconds, strict=True)]
        rows.append({
            "task": task, "num_envs": num_envs, "way": way,
            "env_steps_per_s": float(middle), "spread": float((high - low) / 2 / middle),
            "speedup": statistics.median(ratios), "speedup_low": min(ratios),
            "speedup_high": max(ratios), "seconds_per_step": seconds,
        })  # fmt: skip
    return rows


def answer(rows: list[dict[str, Any]]) -> str:
    """One sentence per task: the fastest way against the loop."""
    sentences = []
    for task in dict.fromkeys(row["task"] for row in rows):
        mine = [row for row in rows if row["task"] == task]
        best = max(mine, key=lambda row: row["env_steps_per_s"])
        loop = max((r for r in mine if r["way"] == "naive"), key=lambda r: r["env_steps_per_s"])
        times = best["env_steps_per_s"] / loop["env_steps_per_s"]
        if best is loop:
            sentences.append(f"{task}: nothing beats the naive loop.")
            continue
        sentences.append(
            f"{task}: {best['way']} with {best['num_envs']} environments makes "
            f"{best['env_steps_per_s']:,.0f} env steps/s, {times:.1f} times the naive loop at its "
            f"best ({loop['num_envs']} environments)."
        )
    return " ".join(sentences) + "\n"


def write(out: Path, rows: list[dict[str, Any]], facts: dict[str, Any], options: Any) -> None:
    """Answer and table, everything as JSON, and the picture."""
    out.mkdir(parents=True, exist_ok=True)
    lines = [
        [
            row["task"], str(row["num_envs"]), row["way"],
            f"{row['env_steps_per_s']:,.0f} ({row['spread']:.0%})",
            f"{row['speedup']:.2f} ({row['speedup_low']:.2f} - {row['speedup_high']:.2f})",
        ]
        for row in rows
    ]  # fmt: skip
    text = f"{answer(rows)}\n{tables.markdown(HEADER, lines)}\nMachine: {bench.machine(facts)}\n"
    (out / "table.md").write_text(text)
    content = {"facts": facts, "options": options.model_dump() | {"out": ""}, "rows": rows}
    (out / "results.json").write_text(json.dumps(content, indent=1) + "\n")
    above, below = [], []
    for task in dict.fromkeys(row["task"] for row in rows):
        speeds: dict[str, list] = {}
        ratios: dict[str, list] = {}
        for row in (row for row in rows if row["task"] == task):
            x, speed = row["num_envs"], row["env_steps_per_s"]
            half = speed * row["spread"]
            speeds.setdefault(row["way"], []).append((x, speed, speed - half, speed + half))
            points = (x, row["speedup"], row["speedup_low"], row["speedup_high"])
            ratios.setdefault(row["way"], []).append(points)
        above.append({"title": task, "ylabel": "env steps/s", "log": True, "lines": speeds})
        below.append({
            "xlabel": "environments", "ylabel": "times the naive loop", "log": True,
            "lines": ratios, "bar": 1.0,
        })  # fmt: skip
    figures.line_panels(out / "vectorization.png", above + below)


def main() -> None:
    """Measure and write."""
    warnings.filterwarnings("ignore", message=".*precision lowered by casting")
    frame.refuse_changes()
    options = bench.asked(SHORT if frame.QUICK else FULL)
    if len(options.threads) > 1:
        raise SystemExit("threads=... takes one number here: a way is one line of the picture")
    facts = bench.machine_facts()
    cells = bench.cells_of(options, facts["cores"])
    timings: dict[Cell, list[dict[str, float]]] = {cell: [] for cell in cells}
    order = np.random.default_rng(options.seed)
    for repeat in range(options.repeats):
        began = time.perf_counter()
        for i in order.permutation(len(cells)):
            timings[cells[i]].append(visit(cells[i], options.seconds, int(order.integers(2**31))))
        took = time.perf_counter() - began
        print(f"repeat {repeat + 1} of {options.repeats}: {took:.0f} s", flush=True)
    groups: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.task, cell.num_envs), []).append(cell)
    rows = [row for group in groups.values() for row in rows_of(group, timings)]
    write(Path(options.out), rows, facts, options)
    print((Path(options.out) / "table.md").read_text())
    print("folder ", shown_path(options.out))


if __name__ == "__main__":
    main()
