"""Is it the fastest that one can install? `make bench`: against SB3, SBX and TorchRL.

    python -m experiments.bench.study tasks=ppo_cartpole_4,dqn_cartpole_1 repeats=5

Every contender trains the same task with the same hyperparameters and as many updates, as a whole
process of its own, in turns whose order changes; a peer first finds its best number of threads and
kind of vector environment. QUICK=1 takes three tasks once, keeps nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import psutil
from pydantic import BeforeValidator

from experiments import frame
from experiments.bench.tasks import TASKS, Task
from experiments.envs.bench import machine_facts
from rl_pipeline.comparison import tables
from rl_pipeline.config import cli
from rl_pipeline.config.app import refusing
from rl_pipeline.config.settings import Frozen, PositiveInt
from rl_pipeline.machine import has_bf16_units

HERE = Path(__file__).parent
PEERS = HERE / "peers"
SCRIPTS = {"sb3": "sb3_peer.py", "sbx": "sb3_peer.py", "torchrl": "torchrl_peer.py"}
ENVIRONMENTS = {"sb3": "sbx", "sbx": "sbx", "torchrl": "torchrl"}
NAMES = {
    "fast": "ours, fastest", "eager": "ours, eager", "sb3": "Stable-Baselines3",
    "sbx": "SBX (JAX)", "torchrl": "TorchRL",
}  # fmt: skip
HOPELESS = 0.4
"""A peer that is slower than this share of the best, while it looks for its form, does not race."""


class Options(Frozen):
    """What to run."""

    tasks: Annotated[tuple[str, ...], BeforeValidator(cli.names)] = tuple(t.name for t in TASKS)
    repeats: PositiveInt = 5
    peers: Annotated[tuple[str, ...], BeforeValidator(cli.names)] = ("sb3", "sbx", "torchrl")


def whole(command: list[str], environ: dict[str, str]) -> dict[str, Any]:
    """A process from start to end: seconds, peak memory of it and its children, what it printed.

    Memory is what they do not share (PSS where the kernel tells it, else RSS).
    """
    begin = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = psutil.Popen(command, stdout=out, stderr=err, env=os.environ | environ)
        peak = 0
        while process.poll() is None:
            peak = max(peak, memory_of(process))
            time.sleep(0.2)
        seconds = time.perf_counter() - begin
        out.seek(0)
        err.seek(0)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command[:4])}: {err.read()[-800:]}")
        return {"total_s": seconds, "peak_mb": peak / 1e6, "said": out.read()}


def memory_of(process: psutil.Process) -> int:
    """Bytes of a process and its children."""
    total = 0
    for part in (process, *_children(process)):
        try:
            info = part.memory_full_info()
        except psutil.Error:
            continue
        total += getattr(info, "pss", info.rss)
    return total


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def overrides_of(task: Task, form: str) -> list[str]:
    """The command line of ours."""
    fast = task.fast if has_bf16_units() else task.fast_plain
    return [*task.ours, *(fast if form == "fast" else ("compile=eager",))]


def measure_parts(task: Task, form: str) -> dict[str, float]:
    """Seconds an env step of each part of ours alone, and the ceiling in env steps/s."""
    command = [sys.executable, "-m", "experiments.bench.ceiling", *overrides_of(task, form)]
    return json.loads(whole(command, {})["said"].splitlines()[-1])


def train_ours(
    task: Task, form: str, steps: int, seed: int, place: str = "", cpus: int = 0
) -> dict[str, Any]:
    """One run of ours in runs/`place`, on so many cores (0: all)."""
    line = overrides_of(task, form)
    folder = HERE / "runs" / (place or f"{task.name}-{form}")
    shutil.rmtree(folder, ignore_errors=True)
    command = [
        sys.executable, "-m", "rl_pipeline.train", *line, f"total_steps={steps}", f"seed={seed}",
        "tracking=none", "eval.episodes=0", "checkpoint.every_steps=0", "log_every_s=0.5",
        f"hydra.run.dir={folder}",
    ]  # fmt: skip
    found = whole(command, {"RL_PIPELINE_CPUS": str(cpus)} if cpus else {})
    result = json.loads((folder / "result.json").read_text())
    rows = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    first = rows[0]["time"]
    curve = [
        (r["step"], r["time"] - first, r["metrics"]["return/train"])
        for r in rows if "return/train" in r["metrics"]
    ]  # fmt: skip
    throughput = result["throughput"]
    return {
        "rate": throughput["env_steps_per_s"], "updates": result["counters"]["updates"],
        "env_steps": result["counters"]["env_steps"], "returns": curve,
        "compile_s": throughput["compile_s"], "steady": throughput["steady"],
        "total_s": found["total_s"], "peak_mb": found["peak_mb"],
        "overrides": line, "threads": result["effective"]["threads"],
    }  # fmt: skip


def train_peer(task: Task, name: str, steps: int, seed: int, threads: int, vec: str) -> Any:
    """One run of a peer; its steady rate is that of the last three quarters of its steps."""
    wanted = task.peer | {
        "library": name, "total_steps": steps, "seed": seed, "threads": threads, "vec": vec,
    }  # fmt: skip
    python = PEERS / ".venvs" / ENVIRONMENTS[name] / "bin" / "python"
    found = whole(
        [str(python), str(PEERS / SCRIPTS[name]), json.dumps(wanted)],
        {"OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore"},
    )
    said = json.loads(found["said"].strip().splitlines()[-1])
    marks = said["marks"]
    start = next(mark for mark in marks if mark[0] >= steps / 4)
    rate = (marks[-1][0] - start[0]) / (marks[-1][1] - start[1])
    return {
        "rate": rate, "updates": said["updates"], "env_steps": said["env_steps"],
        "returns": said["returns"], "total_s": found["total_s"], "peak_mb": found["peak_mb"],
        "threads": threads, "vec": vec,
    }  # fmt: skip


def best_form(task: Task, name: str, cores: int) -> tuple[int, str, float]:
    """The peer's best threads and vector environments in short runs, and its rate there."""
    vecs = ("serial", "compiled") if name == "torchrl" else task.vecs
    forms = [(threads, vec) for threads in sorted({1, cores}) for vec in vecs]
    steps = max(task.steps // 4, 2 * task.peer.get("horizon", 0) * task.peer["num_envs"])
    steps = max(steps, 2 * task.peer.get("learning_starts", 0))
    rates = {}
    for form in forms:
        rates[form] = train_peer(task, name, steps, 0, *form)["rate"]
        print(f"  {name} threads={form[0]} {form[1]}: {rates[form]:,.0f}", flush=True)
    chosen = max(rates, key=lambda form: rates[form])
    return (*chosen, rates[chosen])


def race(task: Task, options: Options, cores: int) -> dict[str, Any]:
    """All contenders of a task, in turns whose order is reversed each time."""
    forms = {name: best_form(task, name, cores) for name in task.rivals if name in options.peers}
    best = max(rate for *_, rate in forms.values())
    out = {name: rate for name, (*_, rate) in forms.items() if rate < HOPELESS * best}
    contenders = ["fast", "eager", *(name for name in forms if name not in out)]
    # Graphs are in the cache from here on: what building them costs is another table's matter.
    warm = max(task.steps // 4, 2 * task.peer.get("learning_starts", 0))
    train_ours(task, "fast", warm, 0)
    runs: dict[str, list[Any]] = {name: [] for name in contenders}
    for repeat in range(options.repeats):
        for name in contenders if repeat % 2 == 0 else reversed(contenders):
            if name in ("fast", "eager"):
                run = train_ours(task, name, task.steps, repeat + 1)
                run["parts"] = measure_parts(task, name)
            else:
                run = train_peer(task, name, task.steps, repeat + 1, *forms[name][:2])
            runs[name].append(run)
            print(f"  {name}: {run['rate']:,.0f} env steps/s, {run['updates']:,} updates, "
                  f"{run['total_s']:.1f} s, {run['peak_mb']:.0f} MB", flush=True)  # fmt: skip
    return {
        "task": task.name, "title": task.title, "bar": task.bar, "against": task.against,
        "runs": runs, "out": out,
    }  # fmt: skip


def ratios(row: dict[str, Any], ours: str, against: Sequence[str] = ("sb3", "sbx")) -> list[float]:
    """Rates of ours over those of the best peer in the same repeat."""
    peers = [name for name in row["runs"] if name in against]
    return [
        mine["rate"] / max(row["runs"][name][i]["rate"] for name in peers)
        for i, mine in enumerate(row["runs"][ours])
    ]


def lines(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The table's cells: medians, and the range of the paired ratios."""
    found = []
    for row in rows:
        for name, runs in row["runs"].items():
            middle = {
                key: statistics.median(run[key] for run in runs)
                for key in ("rate", "updates", "total_s", "peak_mb")
            }
            ratio = efficiency = ""
            if name in ("fast", "eager"):
                pairs = ratios(row, name)
                ratio = f"{statistics.median(pairs):.2f}x ({min(pairs):.2f} to {max(pairs):.2f})"
                ceiling = statistics.median(run["parts"]["ceiling"] for run in runs)
                share = statistics.median(run["rate"] / run["parts"]["ceiling"] for run in runs)
                efficiency = f"{share:.0%} of {ceiling:,.0f}"
            rate_s = [run["updates"] / run["env_steps"] * run["rate"] for run in runs]
            how = runs[0].get("vec", "")
            form = f"{runs[0]['threads']} threads, {how}" if how else ""
            found.append([
                row["title"], NAMES[name], f"{middle['rate']:,.0f}",
                f"{statistics.median(rate_s):,.0f}", ratio, efficiency, f"{middle['total_s']:.1f}",
                f"{middle['peak_mb']:.0f}", form,
            ])  # fmt: skip
        for name, rate in row["out"].items():
            cells = [row["title"], NAMES[name], f"{rate:,.0f}", *[""] * 5, "short run"]
            found.append(cells)
    return found


HEADER = [
    "task", "contender", "env steps/s", "updates/s", "to the best of SB3, SBX",
    "of its ceiling", "command to end, s", "peak MB", "form",
]  # fmt: skip


def write(rows: list[dict[str, Any]], facts: dict[str, Any], folder: Path) -> None:
    """Table, numbers and picture."""
    folder.mkdir(parents=True, exist_ok=True)
    text = tables.markdown(HEADER, lines(rows))
    commit = f"{(facts['git'] or 'none')[:7]}{'+' if facts['dirty'] else ''}"
    bf16 = "with" if has_bf16_units() else "without"
    note = f"Machine: {facts['cores']} cores ({facts['cpu']}, {bf16} bf16 units); commit {commit}."
    (folder / "table.md").write_text(f"{text}\n{note}\n")
    content = {"facts": facts, "rows": rows}
    (folder / "results.json").write_text(json.dumps(content) + "\n")
    draw(rows, folder / "curves.png")
    if folder == HERE / "results":
        frame.tell(HERE, f"{text}\n{note}")
    print(text, note, sep="\n")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Return against time, one panel a task, one line a run."""
    from matplotlib.figure import Figure

    figure = Figure((4.2 * min(len(rows), 4), 3.2 * -(-len(rows) // 4)), layout="constrained")
    axes = figure.subplots(-(-len(rows) // 4), min(len(rows), 4), squeeze=False).ravel()
    for axis, row in zip(axes, rows, strict=False):
        for i, (name, runs) in enumerate(row["runs"].items()):
            for k, run in enumerate(runs):
                curve = [point for point in run["returns"] if point[2] is not None]
                axis.plot([p[1] for p in curve], [p[2] for p in curve], color=f"C{i}", alpha=0.6,
                          linewidth=1, label=NAMES[name] if k == 0 else None)  # fmt: skip
        axis.set(title=row["title"], xlabel="seconds of training", ylabel="return")
        axis.title.set_fontsize(8)
    for axis in axes[len(rows) :]:
        axis.remove()
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Race, write; exit code 1 where a bar is missed."""
    frame.refuse_changes()
    with refusing("see the head of experiments/bench/study.py"):
        quick = ["tasks=ppo_cartpole_4,dqn_cartpole_8,ppo_halfcheetah_1", "repeats=1"]
        options = cli.parse(Options, [*(quick if frame.QUICK else []), *sys.argv[1:]])
    facts = machine_facts()
    known = {task.name: task for task in TASKS}
    if wrong := [name for name in options.tasks if name not in known]:
        raise SystemExit(f"tasks={wrong[0]}: choose from {', '.join(known)}")
    folder = HERE / ("runs/quick" if frame.QUICK else "results")
    rows = []
    for name in options.tasks:
        print(known[name].title, flush=True)
        rows.append(race(known[name], options, facts["cores"]))
        write(rows, facts, folder)
    missed = [
        f"{row['title']}: {reached:.2f}x of {row['bar']}x"
        for row in rows
        if (reached := statistics.median(ratios(row, "fast", row["against"]))) < row["bar"]
    ]
    if missed:
        print("below their bars: " + "; ".join(missed))
        sys.exit(1)


if __name__ == "__main__":
    main()
