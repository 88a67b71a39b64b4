"""What the studies share: a sweep preset with the comparison it ends in, or single runs kept.

SEEDS, STEPS and DEVICE in the environment change a study that trains and are refused by the others;
QUICK=1 makes it a matter of minutes whose results are shown and not kept. A study that was stopped
goes on where it was.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_pipeline.comparison import stats
from rl_pipeline.telemetry.provenance import changed_code

QUICK = os.environ.get("QUICK", "") not in ("", "0")
"""Whether minutes must do: nothing that is kept may come of it."""
KEPT = ("comparison.json", "groups.csv", "pareto.png", "curves.png", "effects.png")
BEGIN, END = "<!-- results: written by its make target -->", "<!-- end of results -->"


def run(folder: Path, sweep: str, quick: Sequence[str] = (), full: Sequence[str] = ()) -> None:
    """Run `sweep=<sweep>`, then write results/ and the results part of README.md.

    `quick` and `full` are overrides of the two sizes; the environment wins over both.
    """
    runs = folder / "runs" / named("quick" if QUICK else "full", changes())
    overrides = [*(quick if QUICK else full), *changes()]
    if (runs / "study.json").exists() and not (runs / "kept").exists():
        command = [f"study.resume={runs}"]
    else:
        shutil.rmtree(runs, ignore_errors=True)
        command = [f"sweep={sweep}", *overrides, f"hydra.sweep.dir={runs}",
                   f"tracking.experiment={folder.name}"]  # fmt: skip
    print(" ".join(["python -m rl_pipeline.train", *command]), flush=True)
    done = subprocess.run([sys.executable, "-m", "rl_pipeline.train", *command])
    if done.returncode:
        sys.exit(done.returncode)
    table = (runs / "comparison" / "table.md").read_text()
    if QUICK:
        (runs / "kept").touch()
        print("QUICK=1: nothing is kept")
        return
    results = folder / "results"
    results.mkdir(exist_ok=True)
    for name in KEPT:
        (results / name).unlink(missing_ok=True)
        if (runs / "comparison" / name).exists():
            shutil.copy(runs / "comparison" / name, results / name)
    tell(folder, table)
    (runs / "kept").touch()


def seeds(default: Sequence[int] = ()) -> Sequence[int]:
    """As many as SEEDS says, from 1 on."""
    number = os.environ.get("SEEDS")
    return range(1, int(number) + 1) if number else default


def refuse_changes() -> None:
    """Of a study in which they cannot take effect; raises SystemExit."""
    if found := [name for name in ("SEEDS", "STEPS", "DEVICE") if os.environ.get(name)]:
        raise SystemExit(f"{', '.join(found)}: no effect on this study; leave it out")


def changes() -> list[str]:
    """What SEEDS, STEPS and DEVICE ask for, as overrides."""
    found = []
    if chosen := seeds():
        found.append("seed=" + ",".join(map(str, chosen)))
    if steps := os.environ.get("STEPS"):
        found.append(f"total_steps={steps}")
    if device := os.environ.get("DEVICE"):
        found.append(f"device={device}")
    return found


def named(size: str, changed: Sequence[str]) -> str:
    """A folder's name: another size or device is another study, which never goes on in this one."""
    return "-".join([size, *changed]).replace("=", "_").replace(",", "_")


def tell(folder: Path, table: str) -> None:
    """Put table, answer, notes (machine, commit) and pictures into the study's README."""
    readme = folder / "README.md"
    text = readme.read_text()
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    pictures = [
        f"![{name}](results/{name}.png)"
        for name in ("pareto", "effects", "curves")
        if (folder / "results" / f"{name}.png").exists()
    ]
    body = "\n\n".join([table.strip(), *pictures])
    readme.write_text(f"{head}{BEGIN}\n\n{body}\n\n{END}{tail}")


def train(
    folder: Path, cell: str, overrides: Sequence[str], environ: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train in a fresh process under `folder`/runs: the part of the record to keep, the rows."""
    run = folder / "runs" / cell
    shutil.rmtree(run, ignore_errors=True)  # a cell that was stopped begins anew
    print(" ".join(overrides), flush=True)
    subprocess.run(
        [sys.executable, "-m", "rl_pipeline.train", *overrides, f"hydra.run.dir={run}"],
        check=True, stdout=subprocess.DEVNULL, env=os.environ | dict(environ or {}),
    )  # fmt: skip
    result = json.loads((run / "result.json").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = ("status", "seed", "overrides", "effective", "counters", "returns", "throughput")
    record = {key: result[key] for key in (*kept, "compile")} | {
        "git": result["provenance"]["git"],
        "dirty": changed_code(result["provenance"]),
        "cpu": result["hardware"]["cpu_model"],
    }
    return record, rows


def interval(values: np.ndarray) -> tuple[float, float]:
    """95 % bootstrap interval of the mean over seeds; values [seeds]."""
    if len(values) < 2 or np.ptp(values) == 0:
        return float(values[0]), float(values[0])
    low, high = stats.bootstrap(values, np.mean, resamples=10_000)
    return float(low), float(high)
