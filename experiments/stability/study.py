"""Does the default recipe end well, whatever the seed and the machine's rounding? `make stability`.

60 seeds of what `make train` runs, in four forms of rounding in turn (eager and compiled, one and
two threads), then seeds 1 to 10 as `make train` runs them, and again with the kernels of a CPU
without AVX-512. A run that has its line in results.jsonl is skipped.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from experiments import frame

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
BAR = 475.0
JOBS = int(os.environ.get("JOBS", "1"))
FORMS: dict[str, tuple[tuple[str, ...], Mapping[str, str]]] = {
    "eager, 1 thread": ((), {"OMP_NUM_THREADS": "1"}),
    "eager, 2 threads": ((), {"OMP_NUM_THREADS": "2"}),
    "compiled, 1 thread": (("compile=default",), {"OMP_NUM_THREADS": "1"}),
    "compiled, 2 threads": (("compile=default",), {"OMP_NUM_THREADS": "2"}),
}
AS_MADE, AVX2 = "make train", "make train, AVX2 kernels"
OTHERS: dict[str, tuple[tuple[str, ...], Mapping[str, str]]] = {
    AS_MADE: ((), {}),
    AVX2: ((), {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}),
}


def cells() -> list[tuple[str, int]]:
    """(form, seed) of every run: 60 seeds over the four forms, ten of each other one."""
    forms = list(FORMS)
    return [
        *((forms[seed % len(forms)], seed) for seed in range(1, 61)),
        *((name, seed) for name in OTHERS for seed in range(1, 11)),
    ]


def run(form: str, seed: int) -> dict[str, Any]:
    """Train one cell; what is kept of it."""
    overrides, environ = (FORMS | OTHERS)[form]
    if JOBS > 1:
        # Threads that spin while they wait starve those of the other run.
        environ = {**environ, "OMP_WAIT_POLICY": "PASSIVE"}
    name = f"{form}-{seed}".replace(" ", "_").replace(",", "")
    line = ["experiment=cartpole_ppo", f"seed={seed}", "tracking=none", *overrides]
    record, rows = frame.train(HERE, name, line, environ)
    curve = [(r["step"], r["metrics"].get("return/eval")) for r in rows]
    return {
        "form": form, "seed": seed, "curve": [point for point in curve if point[1] is not None],
        "end": record["returns"]["eval_mean"],
        **{key: record[key] for key in ("git", "dirty", "cpu")},
    }  # fmt: skip


def row(name: str, runs: list[dict[str, Any]]) -> str:
    """One line of the table."""
    ends = [r["end"] for r in runs]
    below = [r for r in runs if r["end"] < BAR]
    fell = [r for r in below if max(value for _, value in r["curve"]) >= BAR]
    between = [
        r for r in runs
        if r["end"] >= BAR and any(
            value < BAR and any(v >= BAR for _, v in r["curve"][:i])
            for i, (_, value) in enumerate(r["curve"])
        )
    ]  # fmt: skip
    return (
        f"| {name} | {len(runs)} | {len(below)} | {len(fell)} | {len(between)} | {min(ends):.0f} | "
        f"{min(ends):.0f} to {max(ends):.0f} |"
    )


def tell(done: list[dict[str, Any]]) -> None:
    """Write the table into README.md."""
    groups = {"**60 seeds**": [r for r in done if r["form"] in FORMS]}
    groups |= {name: [r for r in done if r["form"] == name] for name in (*FORMS, *OTHERS)}
    lines = [
        "| runs of | runs | ended below 475 | of them fallen | in between only | worst | ends |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(row(name, runs) for name, runs in groups.items() if runs),
    ]
    commits = sorted({f"{r['git'][:7]}{'+' if r['dirty'] else ''}" for r in done})
    cpus = sorted({r["cpu"] for r in done})
    lines += ["", f"Commit {', '.join(commits)}; {', '.join(cpus)}."]
    body = "\n".join(lines)
    frame.tell(HERE, body)
    print(body)


def main() -> None:
    """Run what is missing; exit code 1 if more than 2 of 60 seeds end below the bar."""
    frame.refuse_changes()
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    done = {(r["form"], r["seed"]): r for r in map(json.loads, lines)}
    missing = [cell for cell in cells() if cell not in done]
    if frame.QUICK:
        missing = [(AS_MADE, 1), ("compiled, 2 threads", 2)]
    with ThreadPoolExecutor(JOBS) as pool:
        for result in pool.map(lambda cell: run(*cell), missing):
            done[result["form"], result["seed"]] = result
            print(f"{result['form']}, seed {result['seed']}: {result['end']:.1f}", flush=True)
            if not frame.QUICK:
                with RESULTS.open("a") as file:
                    file.write(json.dumps(result) + "\n")
    if frame.QUICK:
        print("QUICK=1: nothing is kept")
        return
    tell(list(done.values()))
    sys.exit(sum(r["end"] < BAR for r in done.values() if r["form"] in FORMS) > 2)


if __name__ == "__main__":
    main()
