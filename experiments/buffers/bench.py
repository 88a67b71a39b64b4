"""How fast and how large is replay, against others' in the same run? Run by `make bench-buffers`.

All contenders of a cell take turns in random order; a figure is the median over the turns of the
microseconds of one call, with the quartiles beside it. QUICK=1 takes fewer turns and smaller fills.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from experiments.buffers.contenders import CONTENDERS, HAVE_PRIORITIES, Contender, NotHere, Task
from experiments.frame import QUICK, refuse_changes
from rl_pipeline.comparison import figures, tables
from rl_pipeline.engine.runtime import keep_freed_memory
from rl_pipeline.machine import cpu_budget
from rl_pipeline.telemetry.provenance import changed_code, provenance

HERE = Path(__file__).parent
OUT = HERE / "quick" if QUICK else HERE
"""A short run must not take the place of a full one's results."""
BATCHES = (32, 256, 512)
FILLS = {
    "vector": (2_000, 100_000, 1_000_000),
    "atari": (2_000,) if QUICK else (2_000, 20_000),
}
TURNS = 7 if QUICK else 21
TURN_S = 0.01 if QUICK else 0.03
"""Least seconds of one turn."""
WARM_S = 2.0
"""Most seconds of draws before the first turn of a fill, for each contender."""

ABSENT: dict[str, str] = {}
"""Contenders that cannot run here, and why."""


def timed(call: Callable[[], Any], calls: int) -> float:
    """Microseconds of one call."""
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls * 1e6


def calls_in(seconds: float, call: Callable[[], Any]) -> int:
    """How many calls last that long; the first ones, which are cold, do not decide."""
    call()
    count = 1
    while (took := min(timed(call, count) for _ in range(3)) * count / 1e6) < seconds / 2:
        count *= 2
    return max(1, round(count * seconds / took))


def race(calls: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Quartiles of the microseconds of one call, all taking turns."""
    counts = {name: calls_in(TURN_S, call) for name, call in calls.items()}
    measured: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    gc.disable()
    for _ in range(TURNS):
        random.shuffle(order)
        for name in order:
            measured[name].append(timed(calls[name], counts[name]))
    gc.enable()
    return {name: statistics.quantiles(values, n=4) for name, values in measured.items()}


def warm(buffer: Contender, fill: int) -> None:
    """Draw about twice what is stored, so that no cell pays for memory that lay idle.

    What was filled before the others is slow to read at first (here by ten times at 1M rows): the
    system takes pages that nobody touches for cold.
    """
    until = time.perf_counter() + WARM_S
    for _ in range(2 * fill // BATCHES[-1]):
        buffer.sample(BATCHES[-1])
        if time.perf_counter() > until:
            return


def adding(buffer: Contender) -> Callable[[], None]:
    """Steps one after the other."""
    t = [0]

    def call() -> None:
        # Not over the seam of the cycle of frames, where no stack goes on.
        buffer.add(t[0])
        t[0] = (t[0] + 1) % 63

    return call


def updating(buffer: Contender, batch: int) -> Callable[[], None]:
    """A draw and new priorities for it."""
    priorities = np.random.default_rng(0).random((64, batch)) + 0.01
    turn = [0]

    def call() -> None:
        turn[0] = (turn[0] + 1) % 64
        buffer.update(buffer.sample(batch), priorities[turn[0]])

    return call


def measure(task: Task, prioritized: bool, fill: int) -> list[dict[str, Any]]:
    """All cells of one fill."""
    names = [n for n in CONTENDERS if not prioritized or n in HAVE_PRIORITIES]
    buffers: dict[str, Contender] = {}
    for name in names:
        try:
            buffers[name] = CONTENDERS[name](task, fill, prioritized)
        except NotHere as error:
            ABSENT[f"{name}, {'prioritized' if prioritized else 'uniform'}"] = str(error)
            continue
        buffers[name].fill(fill)
    for buffer in list(buffers.values()) * 2:
        warm(buffer, fill)
    cells = []
    cell = {"task": task.name, "sampler": "prioritized" if prioritized else "uniform", "fill": fill}

    def add(operation: str, batch: int, calls: dict[str, Callable[[], Any]]) -> None:
        quartiles = race(calls)
        cells.append({**cell, "operation": operation, "batch": batch, "us": quartiles})
        line = "  ".join(f"{n} {q[1]:.1f}" for n, q in quartiles.items())
        print(f"{task.name} {cell['sampler']} {fill:,} {operation} {batch}: {line}", flush=True)

    for batch in BATCHES:
        add("sample", batch, {n: lambda b=b, k=batch: b.sample(k) for n, b in buffers.items()})
        if prioritized:
            add("sample+update", batch, {n: updating(b, batch) for n, b in buffers.items()})
    add("add", 8, {n: adding(b) for n, b in buffers.items()})
    cells[-1]["bytes"] = {n: b.nbytes() / fill for n, b in buffers.items()}
    return cells


def verdict(cell: dict[str, Any]) -> dict[str, Any]:
    """Ours against the fastest in Python and the fastest compiled one; > 1: ours is faster."""
    us = {name: q[1] for name, q in cell["us"].items()}
    ours = us.pop("rl_pipeline")
    compiled = {"cpprb"} | ({"torchrl"} if cell["sampler"] == "prioritized" else set())
    found: dict[str, Any] = {}
    for kind, names in (("python", us.keys() - compiled), ("compiled", us.keys() & compiled)):
        if names:
            best = min(names, key=us.__getitem__)
            found[kind] = (best, us[best] / ours)
    return found


def passes(cell: dict[str, Any]) -> bool:
    """At least as fast as each, or at batch 32 (and one step) at most 1.5x slower than C++."""
    found = verdict(cell)
    bars = {"python": 1.0, "compiled": 1.0 if cell["batch"] >= 256 else 1 / 1.5}
    return all(ratio >= bars[kind] for kind, (_, ratio) in found.items())


def growth(cells: list[dict[str, Any]]) -> list[str]:
    """How ours slows down with its fill, against the bars."""
    lines = []
    for sampler, base, bar in (("uniform", 100_000, 1.5), ("prioritized", 2_000, 2.5)):
        for batch in BATCHES:
            us = {
                c["fill"]: c["us"]["rl_pipeline"][1] for c in cells
                if (c["task"], c["sampler"], c["operation"], c["batch"])
                == ("vector", sampler, "sample", batch)
            }  # fmt: skip
            if base in us and 1_000_000 in us:
                ratio = us[1_000_000] / us[base]
                lines.append(
                    f"{sampler}, batch {batch}: 1M rows {ratio:.2f}x the time of {base:,} "
                    f"(bar {bar}): {'yes' if ratio <= bar else 'NO'}"
                )
    return lines


def summary(cells: list[dict[str, Any]]) -> str:
    """Markdown: every cell with its verdict, growth with the fill, bytes."""
    names = list(CONTENDERS)
    rows = []
    for cell in cells:
        found = verdict(cell)
        shown = [
            f"{cell['us'][n][1]:.1f} ({cell['us'][n][0]:.1f} - {cell['us'][n][2]:.1f})"
            if n in cell["us"] else "-" for n in names
        ]  # fmt: skip
        against = [
            f"{found[kind][1]:.2f}x {found[kind][0]}" if kind in found else "-"
            for kind in ("python", "compiled")
        ]
        rows.append([
            cell["task"], cell["sampler"], f"{cell['fill']:,}", cell["operation"],
            str(cell["batch"]), *shown, *against, "yes" if passes(cell) else "NO",
        ])  # fmt: skip
    header = ["task", "sampler", "rows", "operation", "batch", *names]
    header += ["vs Python", "vs compiled", "bar"]
    memory = []
    for cell in cells:
        if "bytes" in cell:
            sizes = [cell["bytes"].get(n) for n in names]
            shown = ["-" if s is None else f"{s:,.0f}" for s in sizes]
            memory.append([cell["task"], cell["sampler"], f"{cell['fill']:,}", *shown])
    twice = sum(verdict(c)["python"][1] >= 2 for c in cells if "python" in verdict(c))
    against = sum("python" in verdict(c) for c in cells)
    return "\n".join([
        "Microseconds of one call: median (quartiles). Ratios above 1: rl_pipeline is faster.\n",
        tables.markdown(header, rows),
        f"{sum(map(passes, cells))} of {len(cells)} cells meet their bar; at least 2x the fastest "
        f"Python peer in {twice} of {against}.\n",
        *(f"- {line}" for line in growth(cells)),
        *(f"- {name} is missing: {why}" for name, why in ABSENT.items()),
        "\nBytes stored for a transition, without the interpreter's own (a deque's are many).\n",
        tables.markdown(["task", "sampler", "rows", *names], memory),
    ])  # fmt: skip


def facts() -> dict[str, Any]:
    """Machine, commit, versions."""
    source = provenance(HERE)
    where = {key: source[key] for key in ("git", "python", "platform")}
    where["dirty"] = bool(changed_code(source))
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
         if line.startswith("model name")), platform.processor(),
    )  # fmt: skip
    packages = ("torch", "numpy", "numba", "stable-baselines3", "torchrl", "tensordict", "cpprb")
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        **where, "cpu": model, "cores": cpu_budget()[0], "load_before": os.getloadavg()[0],
        "memory_gb": round(psutil.virtual_memory().total / 1e9), "versions": versions,
        "quick": QUICK, "turns": TURNS,
    }  # fmt: skip


def draw(cells: list[dict[str, Any]], path: Path) -> None:
    """Latency by fill, batch 256, and bytes."""
    panels = []
    for task, sampler in (("vector", "uniform"), ("vector", "prioritized"), ("atari", "uniform")):
        lines: dict[str, list[tuple[float, float, float, float]]] = {}
        for cell in cells:
            at = (cell["task"], cell["sampler"], cell["operation"], cell["batch"])
            if at == (task, sampler, "sample", 256):
                for name, (low, middle, high) in cell["us"].items():
                    lines.setdefault(name, []).append((cell["fill"], middle, low, high))
        title = f"{task}, {sampler}, batch 256"
        panels.append({
            "title": title, "lines": lines, "log": True, "xlabel": "transitions stored",
            "ylabel": "microseconds a sample",
        })  # fmt: skip
    figures.line_panels(path, panels, rows=1)


def main() -> None:
    """Measure everything and write bench.json, table.md and bench.png."""
    refuse_changes()
    random.seed(0)
    about, cells = facts(), []
    for name, fills in FILLS.items():
        # As a run of that kind sets it: a small MLP one thread, a CNN the whole budget.
        torch.set_num_threads(1 if name == "vector" else cpu_budget()[0])
        if name == "atari":
            keep_freed_memory()
        for prioritized in (False, True):
            for fill in fills:
                cells += measure(Task(name), prioritized, fill)
                gc.collect()
    OUT.mkdir(exist_ok=True)
    (OUT / "bench.json").write_text(
        json.dumps({"facts": about, "absent": ABSENT, "cells": cells}, indent=1) + "\n"
    )
    text = summary(cells)
    lines = [f"- {key}: {value}" for key, value in about.items()]
    (OUT / "table.md").write_text(text + "\nMeasured on:\n\n" + "\n".join(lines) + "\n")
    draw(cells, OUT / "bench.png")
    print(text)


if __name__ == "__main__":
    main()
