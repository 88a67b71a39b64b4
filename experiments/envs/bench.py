"""How fast are environments alone, and what does our adapter cost? Run by `make bench-envs`.

    python -m experiments.envs.bench tasks=pong,cartpole num_envs=8,64 repeats=5

Options are `key=value`, lists with commas; QUICK=1 in the environment takes the small set. Every
repeat visits all cells in a new random order and builds their environments anew.
"""

from __future__ import annotations

import csv
import json
import os
import sys
import time
import uuid
import warnings
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator

from experiments import frame
from experiments.envs import steppers
from experiments.envs.paired import Cell, bar_of, summarize, take_turns
from rl_pipeline.comparison import figures, tables
from rl_pipeline.config import cli, stores
from rl_pipeline.config.app import refusing
from rl_pipeline.config.settings import Frozen, PositiveInt, TrackingSettings
from rl_pipeline.machine import cpu_budget
from rl_pipeline.telemetry.hardware import HardwareSampler
from rl_pipeline.telemetry.provenance import changed_code, provenance
from rl_pipeline.terminal import shown_path
from rl_pipeline.tracking import tracker

HERE = Path(__file__).parent
MAX_PROCESSES = 64
HEADER = (
    "task | backend | envs | threads | env steps/s (spread) | raw library (spread) | kept of raw "
    "(range) | added us/step (range) | bar | holds"
).split(" | ")


BACKENDS = ("gymnasium", "gymnasium_async", "gymnasium_native", "envpool", "envpool_async")


Names = Annotated[tuple[str, ...], BeforeValidator(cli.names)]
Counts = Annotated[tuple[PositiveInt, ...], BeforeValidator(cli.names)]


class Options(Frozen):
    """What to measure."""

    tasks: Names = ("cartpole", "pong", "halfcheetah")
    backends: Names = BACKENDS
    num_envs: Counts = (8, 64, 256)
    """Above 64 only CartPole, and no backend with a process per environment."""
    threads: Counts = (1, 2)
    """Worker threads; more than the CPU budget are left out."""
    repeats: int = 5
    seconds: float = 1.2
    """Of each contender in each repeat."""
    seed: int = 0
    """Of the order, the actions and the environments."""
    tracking: str = "mlflow"
    """`none` keeps the store out."""
    out: str = str(HERE)


SHORT = [
    "num_envs=8,256",
    "threads=2",
    "repeats=3",
    "seconds=0.3",
    f"out={HERE / 'runs' / 'quick'}",
]


def asked(defaults: list[str]) -> Options:
    """The command line's options over `defaults`; a wrong one ends the program with code 2."""
    with refusing("see the head of experiments/envs/bench.py"):
        return cli.parse(Options, [*defaults, *sys.argv[1:]])


def cells_of(options: Options, budget: int) -> list[Cell]:
    """All cells that exist, in the table's order."""
    threads = [t for t in options.threads if t <= budget] or [budget]
    cells = []
    for task in options.tasks:
        for num_envs in options.num_envs:
            if num_envs > 64 and task != "cartpole":
                continue
            for backend in options.backends:
                if backend == "gymnasium_async" and num_envs > MAX_PROCESSES:
                    continue
                if backend == "gymnasium_native" and task not in ("cartpole", "pong"):
                    continue
                native_threads = backend == "gymnasium_native" and task == "pong"
                has_threads = backend.startswith("envpool") or native_threads
                for number in threads if has_threads else [None]:
                    cells.append(Cell(task, backend, num_envs, number))
    return cells


def visit(cell: Cell, seconds: float, seed: int) -> dict[str, float]:
    """One repeat of one cell: seconds a step of `ours` and `raw`, and the share of valid rows."""
    rng = np.random.default_rng(seed)
    actions = steppers.draw_actions(steppers.spec_of(cell), rng)
    with ExitStack() as stack:
        contenders, envs = {}, None
        # Of two equal ones the first that is built is often the slower one (Pong's native form: by
        # a quarter), so chance decides who that is.
        for name in rng.permutation(["ours", "raw"]):
            if name == "raw":
                contenders[name] = steppers.raw(cell, actions, stack)
                continue
            envs = steppers.make_ours(cell, seed)
            stack.callback(envs.close)
            contenders[name] = steppers.advance_ours(envs, actions)
        assert envs is not None
        timing = take_turns(contenders, seconds, rng)
        return timing | {"valid": steppers.valid_share(envs, actions)}


def measure(options: Options, cells: list[Cell]) -> list[dict[str, Any]]:
    """One row per cell; a cell that fails says why in `failed`."""
    order = np.random.default_rng(options.seed)
    timings: dict[Cell, list[dict[str, float]]] = {cell: [] for cell in cells}
    failed: dict[Cell, str] = {}
    for repeat in range(options.repeats):
        began = time.perf_counter()
        for i in order.permutation(len(cells)):
            cell = cells[i]
            seed = int(order.integers(2**31))
            if cell in failed:
                continue
            try:
                timings[cell].append(visit(cell, options.seconds, seed))
            except (ValueError, ImportError, OSError) as error:
                failed[cell] = f"{type(error).__name__}: {error}"
                print(f"{cell}: {failed[cell]}", file=sys.stderr)
        took = time.perf_counter() - began
        print(f"repeat {repeat + 1} of {options.repeats}: {took:.0f} s", flush=True)
    rows = []
    for cell in cells:
        if cell in failed:
            rows.append(asdict(cell) | {"failed": failed[cell]})
            continue
        share = float(np.mean([timing["valid"] for timing in timings[cell]]))
        lanes = steppers.settings_of(cell).backend.lanes
        row = summarize(cell, timings[cell], share, lanes)
        pairs = [{k: t[k] for k in ("ours", "raw")} for t in timings[cell]]
        rows.append(row | {"lanes": lanes, "seconds_per_step": pairs})
    return rows


# -- what is left behind --------------------------------------------------------------------------


def table_row(row: dict[str, Any]) -> list[str]:
    """A row as people read it."""
    cell = Cell(row["task"], row["backend"], row["num_envs"], row["threads"])
    head = [cell.task, cell.backend, str(cell.num_envs), str(cell.threads or "-")]
    if "failed" in row:
        return [*head, f"failed: {row['failed']}", "", "", "", "", ""]
    bar = bar_of(cell)
    words = ""
    if bar:
        words = f">= {bar[1]:.0%}" if bar[0] == "kept" else f"<= {bar[1]:g} us"
    return [
        *head,
        f"{row['env_steps_per_s']:,.0f} ({row['spread']:.0%})",
        f"{row['raw_env_steps_per_s']:,.0f} ({row['raw_spread']:.0%})",
        f"{row['kept']:.1%} ({row['kept_low']:.1%} - {row['kept_high']:.1%})",
        f"{row['added_us']:+.1f} ({row['added_us_low']:+.1f} - {row['added_us_high']:+.1f})",
        words, row["verdict"],
    ]  # fmt: skip


def verdicts(rows: list[dict[str, Any]]) -> str:
    """How many of the bars hold, and which do not."""
    judged = [row for row in rows if row.get("verdict")]
    missed = [row for row in judged if row["verdict"].startswith("no")]
    text = f"{len(judged) - len(missed)} of {len(judged)} bars hold."
    if missed:
        names = (Cell(r["task"], r["backend"], r["num_envs"], r["threads"]) for r in missed)
        text += f" Not: {'; '.join(map(str, names))}."
    return text + "\n"


def panels(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For `figures.line_panels`: above the speeds of each task, below what the adapters keep."""
    done = [row for row in rows if "failed" not in row]
    tasks = list(dict.fromkeys(row["task"] for row in done))
    above, below = [], []
    for task in tasks:
        speeds: dict[str, list] = {}
        raws: dict[str, list] = {}
        kept: dict[str, list] = {}
        for row in (row for row in done if row["task"] == task):
            name = row["backend"] + (f", {row['threads']} threads" if row["threads"] else "")
            x, speed = row["num_envs"], row["env_steps_per_s"]
            half = speed * row["spread"]
            speeds.setdefault(name, []).append((x, speed, speed - half, speed + half))
            raws.setdefault(name, []).append((x, row["raw_env_steps_per_s"]))
            kept.setdefault(name, []).append((x, row["kept"], row["kept_low"], row["kept_high"]))
        above.append({
            "title": task, "ylabel": "env steps/s (dashed: raw library)", "log": True,
            "lines": speeds, "faint": raws,
        })  # fmt: skip
        below.append({
            "title": "", "xlabel": "environments", "ylabel": "kept of raw (range of repeats)",
            "lines": kept, "bar": 0.95,
        })  # fmt: skip
    return above + below


def write(options: Options, rows: list[dict[str, Any]], facts: dict[str, Any]) -> list[Path]:
    """Table (Markdown, CSV), everything (JSON) and the picture; returns the files."""
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    files = [out / name for name in ("table.md", "table.csv", "results.json", "envs.png")]
    text = verdicts(rows) + "\n" + tables.markdown(HEADER, [table_row(row) for row in rows])
    files[0].write_text(text + f"\nMachine: {machine(facts)}\n")
    names = list(dict.fromkeys(k for row in rows for k in row if k != "seconds_per_step"))
    with open(files[1], "w", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    content = {"facts": facts, "options": options.model_dump() | {"out": ""}, "rows": rows}
    files[2].write_text(json.dumps(content, indent=1) + "\n")
    if any("failed" not in row for row in rows):
        figures.line_panels(files[3], panels(rows))
    return [path for path in files if path.exists()]


def machine_facts() -> dict[str, Any]:
    """Where and with what the numbers were measured."""
    cores, reason = cpu_budget()
    source = provenance(HERE)
    kept = ("git", "versions", "python", "platform", "command")
    facts = {key: source[key] for key in kept} | {"dirty": bool(changed_code(source))}
    hardware = HardwareSampler(cpu_budget=cores)
    return facts | {
        "cpu": hardware.facts()["cpu_model"],
        "cores": cores,
        "cores_reason": reason,
        "load_before": os.getloadavg()[0],
    }


def machine(facts: dict[str, Any]) -> str:
    """The facts in one line."""
    versions = facts["versions"]
    names = ("gymnasium", "envpool", "ale-py", "mujoco", "numpy")
    return (
        f"{facts['cores']} cores ({facts['cpu']}), Python {facts['python']}, "
        + ", ".join(f"{name} {versions[name]}" for name in names)
        + f"; commit `{(facts['git'] or 'none')[:7]}`{' with changes' if facts['dirty'] else ''}; "
        f"load before {facts['load_before']:.1f}"
    )


def log_sweep(
    rows: list[dict[str, Any]], name: str, facts: dict[str, Any], files: list[Path]
) -> str | None:
    """A parent run and one child per row in MLflow; returns how to look at it."""
    settings = TrackingSettings(name="mlflow")
    commit = {"mlflow.source.git.commit": facts["git"]} if facts["git"] else {}
    parent = tracker.create_parent(
        settings, name, tags={"study": name} | commit, cwd=Path.cwd(),
        params={"cpu": facts["cpu"], "cores": facts["cores"], "command": facts["command"]},
    )  # fmt: skip
    if parent is None:
        return None
    from mlflow.entities import Metric

    from rl_pipeline.tracking.notes import StoredRun
    from rl_pipeline.tracking.store import Store

    store = Store(parent["uri"])
    for row in rows:
        kinds: dict[bool, dict[str, Any]] = {True: {}, False: {}}
        for key, value in row.items():
            if not isinstance(value, list):
                number = isinstance(value, float) and key not in ("threads", "num_envs")
                kinds[number][key] = value
        key_words = [row[k] for k in ("task", "backend", "num_envs", "threads") if row.get(k)]
        run = StoredRun(
            uri=parent["uri"], experiment=name, params=kinds[False],
            run_name=" ".join(map(str, key_words)), tags={"study": name} | commit,
            started=time.time(), run_key=uuid.uuid4().hex, parent_run_id=parent["run_id"],
        )  # fmt: skip
        run_id = store.run_id(parent["experiment_id"], run)
        store.describe(run_id, run)
        now = int(time.time() * 1000)
        metrics = [Metric(key, value, now, 0) for key, value in kinds[True].items()]
        for step, pair in enumerate(row.get("seconds_per_step", [])):
            metrics += [Metric(f"seconds_per_step/{k}", v, now, step) for k, v in pair.items()]
        store.log(run_id, metrics=metrics)
        store.end(run_id, "failed" if "failed" in row else "finished", time.time(), {})
    failed = any("failed" in row for row in rows)
    tracker.end_parent(parent, "failed" if failed else "finished", files)
    return stores.how_to_open(parent["uri"])


def main() -> None:
    """Measure, write, log; exit code 1 if a cell failed."""
    warnings.filterwarnings("ignore", message=".*precision lowered by casting")
    frame.refuse_changes()
    options = asked(SHORT if frame.QUICK else [])
    facts = machine_facts()
    cells = cells_of(options, facts["cores"])
    rows = measure(options, cells)
    files = write(options, rows, facts)
    print((Path(options.out) / "table.md").read_text())
    print("folder ", shown_path(options.out))
    if options.tracking != "none":
        print("mlflow ", log_sweep(rows, "bench-envs", facts, files))
    if any("failed" in row for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
