"""A study is a sweep preset and the comparison it ends in; this runs one and keeps its results.

SEEDS, STEPS and DEVICE in the environment change a study, QUICK=1 makes it a matter of minutes
whose results are shown and not kept. A study that was stopped goes on where it was.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

KEPT = ("comparison.json", "groups.csv", "pareto.png", "curves.png", "effects.png")
BEGIN, END = "<!-- results: written by make repro -->", "<!-- end of results -->"


def run(folder: Path, sweep: str, quick: Sequence[str] = (), full: Sequence[str] = ()) -> None:
    """Run `sweep=<sweep>`, then write results/ and the results part of README.md.

    `quick` and `full` are overrides of the two sizes; the environment wins over both.
    """
    is_quick = os.environ.get("QUICK", "") not in ("", "0")
    runs = folder / "runs" / ("quick" if is_quick else "full")
    overrides = [*(quick if is_quick else full), *_from_environment()]
    if (runs / "study.json").exists() and not (runs / "comparison").exists():
        command = [f"study.resume={runs}"]
    else:
        shutil.rmtree(runs, ignore_errors=True)
        command = [f"sweep={sweep}", *overrides, f"hydra.sweep.dir={runs}",
                   f"tracking.experiment={folder.name}"]  # fmt: skip
    print(" ".join(["python -m rl_pipeline.train", *command]), flush=True)
    done = subprocess.run([sys.executable, "-m", "rl_pipeline.train", *command])
    if done.returncode:
        sys.exit(done.returncode)
    if is_quick:
        print("QUICK=1: nothing is kept")
        return
    results = folder / "results"
    results.mkdir(exist_ok=True)
    for name in KEPT:
        if (runs / "comparison" / name).exists():
            shutil.copy(runs / "comparison" / name, results / name)
    _tell(folder, (runs / "comparison" / "table.md").read_text())


def _from_environment() -> list[str]:
    found = []
    if seeds := os.environ.get("SEEDS"):
        found.append("seed=" + ",".join(str(n + 1) for n in range(int(seeds))))
    if steps := os.environ.get("STEPS"):
        found.append(f"total_steps={steps}")
    if device := os.environ.get("DEVICE"):
        found.append(f"device={device}")
    return found


def _tell(folder: Path, table: str) -> None:
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
