"""Is training in lanes not slower? PPO on Pong, whole runs in turns.

    python -m experiments.envs.lanes num_envs=8,16,64 repeats=4 wall_s=20 env=pong

Each repeat trains every arm once, in random order, each in a fresh process; ratios are taken within
a repeat. The batch stays at 1,024 rows, so that arms of one size do equal work per update. The
load while it runs should be nothing else: `load` is printed with every run.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from experiments.envs.bench import machine, machine_facts
from rl_pipeline.comparison import tables

HERE = Path(__file__).parent
ROWS = 1024
ARMS = {
    "envpool": ["backend=envpool"],
    "lanes": ["backend=envpool_async"],
    "lanes, one thread each": ["backend=envpool_async", "backend.num_threads=1"],
    # As it was before torch left cores to the environments: OpenMP's number wins over the plan.
    "lanes, torch on all cores": ["backend=envpool_async"],
}
HEADER = "env | envs | arm | env steps/s (range) | of envpool (range) | act, env share".split(" | ")


def train(env: str, num_envs: int, arm: str, wall_s: float, cores: int) -> dict[str, Any]:
    """One run's throughput and phases."""
    environ = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    if arm.endswith("all cores"):
        environ["OMP_NUM_THREADS"] = str(cores)
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "rl_pipeline.train", f"env={env}", *ARMS[arm],
            f"backend.num_envs={num_envs}", f"algo.horizon={ROWS // num_envs}", "seed=1",
            f"max_wall_s={wall_s}", "total_steps=100_000_000", "eval.episodes=0",
            "tracking=none", "checkpoint.every_steps=0", f"hydra.run.dir={folder}/run",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, env=environ)
        if done.returncode:
            raise SystemExit(done.stderr)
        result = json.loads(Path(folder, "run", "result.json").read_text())
    shares = {name: phase["share"] for name, phase in result["phases"].items()}
    return {
        "rate": result["throughput"]["env_steps_per_s"],
        "steady": result["throughput"]["steady"],
        "shares": shares,
        "threads": result["effective"]["threads"],
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """Run, then write lanes.md and lanes.json."""
    options = {"num_envs": "8,16,64", "repeats": "4", "wall_s": "20", "env": "pong", "out": HERE}
    for argument in sys.argv[1:]:
        key, _, value = argument.partition("=")
        if key not in options or not value:
            raise SystemExit(f"{argument}: options are {', '.join(f'{k}=...' for k in options)}")
        options[key] = value
    sizes, repeats = [int(n) for n in str(options["num_envs"]).split(",")], int(options["repeats"])
    facts, order = machine_facts(), np.random.default_rng(0)
    runs: dict[tuple[int, str], list[dict[str, Any]]] = {(n, a): [] for n in sizes for a in ARMS}
    keys = list(runs)
    for _ in range(repeats):
        for i in order.permutation(len(keys)):
            num_envs, arm = keys[i]
            wall_s, env = float(options["wall_s"]), str(options["env"])
            run = train(env, num_envs, arm, wall_s, facts["cores"])
            runs[keys[i]].append(run)
            steady = "" if run["steady"] else ", not steady"
            print(
                f"{num_envs} {arm}: {run['rate']:.0f} (load {run['load']:.1f}{steady})", flush=True
            )
    rows = []
    for (num_envs, arm), mine in runs.items():
        rates = [run["rate"] for run in mine]
        base = [run["rate"] for run in runs[num_envs, "envpool"]]
        ratios = [a / b for a, b in zip(rates, base, strict=True)]
        share = {
            p: statistics.median(run["shares"].get(p, 0) for run in mine) for p in ("act", "env")
        }
        rows.append([
            str(options["env"]), str(num_envs), arm,
            f"{statistics.median(rates):,.0f} ({min(rates):,.0f} - {max(rates):,.0f})",
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} - {max(ratios):.3f})",
            f"{share['act']:.0%}, {share['env']:.0%}",
        ])  # fmt: skip
    text = f"{tables.markdown(HEADER, rows)}\nMachine: {machine(facts)}\n"
    out = Path(str(options["out"]))
    out.mkdir(parents=True, exist_ok=True)
    (out / "lanes.md").write_text(text)
    content = {
        "facts": facts,
        "runs": [{"num_envs": n, "arm": a, "runs": r} for (n, a), r in runs.items()],
    }
    (out / "lanes.json").write_text(json.dumps(content, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
