"""From the command to the result: what compile=auto costs and gives, with all start-up.

    python -m experiments.bench.start steps=150000,500000 repeats=5

The CartPole recipe as `make train` runs it, each time a whole process: eager, compile=auto with an
empty cache of graphs, and again with the cache that this run left. In turns.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from experiments import frame
from experiments.bench.study import whole
from experiments.envs.bench import machine_facts
from rl_pipeline.comparison import tables
from rl_pipeline.config import cli
from rl_pipeline.config.app import refusing
from rl_pipeline.config.settings import Frozen, PositiveInt

HERE = Path(__file__).parent
FORMS = ("eager", "auto, empty cache", "auto, second run")


class Options(Frozen):
    """What to run."""

    steps: Annotated[tuple[str, ...], BeforeValidator(cli.names)] = ("150000", "500000")
    repeats: PositiveInt = 5


def train(form: str, steps: str, seed: int, cache: Path) -> dict[str, Any]:
    """One run: its seconds as a process, its steady rate, how it was compiled."""
    folder = HERE / "runs" / "start"
    shutil.rmtree(folder, ignore_errors=True)
    if form != FORMS[2]:
        shutil.rmtree(cache, ignore_errors=True)
    compiled = "eager" if form == "eager" else "auto"
    command = [
        sys.executable, "-m", "rl_pipeline.train", "experiment=cartpole_ppo", f"seed={seed}",
        f"compile={compiled}", f"total_steps={steps}", "tracking=none", f"hydra.run.dir={folder}",
    ]  # fmt: skip
    found = whole(command, {"TORCHINDUCTOR_CACHE_DIR": str(cache)})
    result = json.loads((folder / "result.json").read_text())
    return {
        "total_s": found["total_s"], "rate": result["throughput"]["env_steps_per_s"],
        "training_s": result["throughput"]["wall_s"], "compile": result["effective"]["compile"],
    }  # fmt: skip


def main() -> None:
    """Run in turns, write the table."""
    frame.refuse_changes()
    with refusing("see the head of experiments/bench/start.py"):
        options = cli.parse(Options, sys.argv[1:])
    facts, rows = machine_facts(), []
    kept: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for steps in options.steps:
            runs: dict[str, list[dict[str, Any]]] = {form: [] for form in FORMS}
            for repeat in range(options.repeats):
                # A second run follows its first one.
                order = FORMS if repeat % 2 == 0 else (*FORMS[1:], FORMS[0])
                for form in order:
                    run = train(form, steps, repeat + 1, Path(scratch) / "cache")
                    runs[form].append(run)
                    print(f"{steps} {form}: {run['total_s']:.1f} s, {run['compile']}", flush=True)
            kept[steps] = runs
            for form, found in runs.items():
                seconds = [run["total_s"] for run in found]
                ratios = [
                    eager["total_s"] / run["total_s"]
                    for eager, run in zip(runs["eager"], found, strict=True)
                ]
                rows.append([
                    f"{int(steps):,}", form,
                    f"{statistics.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})",
                    f"{statistics.median(ratios):.2f}x",
                    f"{statistics.median(run['rate'] for run in found):,.0f}",
                    found[-1]["compile"],
                ])  # fmt: skip
    header = ["env steps", "form", "command to end, s", "eager over it", "env steps/s", "compile"]
    text = tables.markdown(header, rows)
    note = f"Medians of {options.repeats} runs in turns; commit {(facts['git'] or 'none')[:7]}."
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    (results / "start.md").write_text(f"{text}\n{note}\n")
    (results / "start.json").write_text(json.dumps({"facts": facts, "runs": kept}) + "\n")
    print(text, note, sep="\n")


if __name__ == "__main__":
    main()
