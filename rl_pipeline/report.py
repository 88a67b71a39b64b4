"""What people read: the summary of a run and the table of a sweep."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

CAPTION = (
    "median env steps/s, mean return over runs (min - max); ranges that overlap are no difference;"
    "\n* no steady state was reached: longer runs (total_steps) can be compared"
)


def objective(result: dict[str, Any]) -> float:
    """What a sweep maximises: the evaluated return, else that of training, else NaN."""
    if result.get("status") != "finished":
        return math.nan
    returns = result["returns"]
    values = (returns["eval_mean"], returns["train_mean"])
    return next((float(v) for v in values if v is not None), math.nan)


def wide_console() -> Console:
    """The terminal; elsewhere wide enough that tables in logs are not folded."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=140)


def print_summary(result: dict[str, Any], console: Console | None = None) -> None:
    """A finished run on one screen."""
    console = console or wide_console()
    returns, rate, counters = result["returns"], result["throughput"], result["counters"]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    task = result["task"]
    grid.add_row(
        "run", f"{task['algo']} on {task['id']}, seed {result['seed']}, {result['status']}"
    )
    if result["reason"]:
        grid.add_row("", str(result["reason"]))
    if returns["eval_mean"] is not None:
        grid.add_row(
            "return",
            f"{returns['eval_mean']:.1f} +- {returns['eval_std']:.1f}  (greedy policy, "
            f"{returns['episodes']} full games on fresh seeds)",
        )
    if returns["train_mean"] is not None:
        grid.add_row("", f"{returns['train_mean']:.1f}  (last training episodes)")
    over = f"steady state of {rate['steady_s']:.0f} s"
    if not rate["steady"]:
        over = "whole run with its warm-up: too short for a steady state"
    elif rate["window_spread"] is not None:
        over += f", spread {rate['window_spread']:.0%}"
    grid.add_row(
        "speed",
        f"{rate['env_steps_per_s']:,.0f} env steps/s, {rate['updates_per_s']:,.0f} updates/s  "
        f"({over})",
    )
    before = result.get("resume", {}).get("from_env_steps", 0)
    resumed = f"{counters['env_steps'] - before:,} of " if before else ""
    grid.add_row(
        "work",
        f"{resumed}{counters['env_steps']:,} env steps, {counters['updates']:,} updates, "
        f"{counters['episodes']:,} games in {rate['wall_s']:.1f} s "
        f"(of it warm-up {rate['warmup_s']:.1f} s; start-up before it {_startup(result)} s)",
    )
    if line := compile_line(result["compile"]):
        grid.add_row("compile", line)
    if skipped := counters["skipped_updates"]:
        grid.add_row("", f"{skipped:,} updates skipped: their fp16 gradients were not finite")
    if "phases" in result:
        shares = [f"{name} {p['share']:.0%}" for name, p in result["phases"].items()]
        grid.add_row("time", "  ".join(shares[:8]))
        if found := result["bottleneck"]:
            bound = found["upper_bound_speedup"]
            gain = f"at most {bound:.1f}x faster if it were free" if bound else ""
            grid.add_row(
                "bottleneck", f"{found['phase']} ({found['share']:.0%} of training): {gain}"
            )
    grid.add_row("folder", shown_path(result["folder"]))
    tracked = result.get("tracking", {})
    if tracked.get("run_id"):
        if tracked.get("trouble"):
            grid.add_row("mlflow", f"store trouble: {tracked['trouble']}; the rows are kept")
        grid.add_row("mlflow", how_to_open(tracked["uri"]))
        page = f"#/experiments/{tracked['experiment_id']}/runs/{tracked['run_id']}"
        server = tracked["uri"] if tracked["uri"].startswith("http") else "http://127.0.0.1:5000"
        grid.add_row("", f"{server}/{page}")
    elif tracked.get("trouble") or tracked.get("pending"):
        grid.add_row("mlflow", f"not reached ({tracked.get('trouble')}); rows in metrics.jsonl")
        folder = shown_path(result["folder"])
        grid.add_row("", f"ship them later: python -m rl_pipeline.telemetry.writer {folder}")
    console.print()
    console.print(grid)


def compile_line(found: dict[str, Any]) -> str:
    """What compiling took and whether it pays; empty where nothing was compiled."""
    if not found.get("graphs") and not found.get("graph_breaks"):
        return ""
    line = f"{found['seconds']:.1f} s for {found['graphs']} graphs"
    if found["recompiles"]:
        line += f", {found['recompiles']} of them recompiled for other shapes"
    if found["graph_breaks"]:
        line += f"; eager instead: {', '.join(found['fallbacks'])}"
    if "update_speedup" in found:
        eager, compiled = found["eager_update_s"] * 1e6, found["compiled_update_s"] * 1e6
        line += f"; an update {eager:,.0f} -> {compiled:,.0f} us ({found['update_speedup']:.2f}x)"
        pays = found["pays_back_after_updates"]
        line += f", pays back after {pays:,} updates" if pays is not None else ", never pays back"
    return line


def shown_path(path: str) -> str:
    """`path` as one types it from here."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def _startup(result: dict[str, Any]) -> str:
    seconds = result["startup"].get("until_first_step_s")
    return "?" if seconds is None else f"{seconds:.1f}"


def how_to_open(uri: str) -> str:
    """How to look at a store."""
    if uri.startswith("http"):
        return f"open {uri}"
    if uri.startswith("sqlite:///") and uri == f"sqlite:///{Path.cwd() / 'mlflow.db'}":
        return "make ui  (or: mlflow ui --backend-store-uri sqlite:///mlflow.db)"
    return f"mlflow ui --backend-store-uri {uri}"


def load_results(sweep_dir: Path) -> list[dict[str, Any]]:
    """result.json of every job of a sweep, in job order."""
    jobs = [p for p in sweep_dir.iterdir() if p.name.isdigit()] if sweep_dir.is_dir() else []
    results = []
    for job in sorted(jobs, key=lambda p: int(p.name)):
        path = job / "result.json"
        if path.exists():
            results.append(json.loads(path.read_text()))
        else:
            results.append({"status": "failed", "reason": "no result.json", "overrides": []})
    return results


def group(results: Sequence[dict[str, Any]], varied: Sequence[str]) -> dict[str, list[dict]]:
    """Results by what varied, the seed aside; in order of appearance."""
    groups: dict[str, list[dict]] = {}
    for result in results:
        parts = [
            o for o in result["overrides"]
            if o.split("=")[0].lstrip("+") in varied and not o.startswith("seed=")
        ]  # fmt: skip
        groups.setdefault(" ".join(parts) or "all", []).append(result)
    return groups


def sweep_rows(
    results: Sequence[dict[str, Any]], varied: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a sweep's table: one row per setting, over its seeds."""
    header = ["setting", "runs", "env steps/s", "vs first", "return", "failed"]
    rows: list[list[str]] = []
    baseline: tuple[list[float], bool] | None = None
    for name, members in group(results, varied).items():
        done = [r for r in members if r["status"] == "finished"]
        failed = len(members) - len(done)
        if not done:
            rows.append([name, str(len(members)), "-", "-", "-", str(failed)])
            continue
        rates = [r["throughput"]["env_steps_per_s"] for r in done]
        returns = [objective(r) for r in done]
        steady = all(r["throughput"]["steady"] for r in done)
        baseline = baseline or (rates, steady)
        speed = _with_range(statistics.median(rates), rates, ",.0f") + ("" if steady else "*")
        rows.append([
            name, str(len(members)), speed, _ratio(rates, baseline[0], steady and baseline[1]),
            _with_range(statistics.mean(returns), returns, ".1f"), str(failed or ""),
        ])  # fmt: skip
    return header, rows


def _ratio(rates: list[float], first: list[float], steady: bool) -> str:
    """Speed against the first setting, as far as these runs can tell."""
    if rates is first:
        return "1"
    if not steady:
        return "too short"
    ratio = f"{statistics.median(rates) / statistics.median(first):.2f}x"
    if min(len(rates), len(first)) < 2:
        return f"{ratio} (one run)"
    if min(rates) <= max(first) and min(first) <= max(rates):
        return "no difference"
    return ratio


def _with_range(middle: float, values: Sequence[float], form: str) -> str:
    text = f"{middle:{form}}"
    if len(values) > 1:
        text += f" ({min(values):{form}} - {max(values):{form}})"
    return text


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def print_sweep(
    results: Sequence[dict[str, Any]], varied: Sequence[str], console: Console | None = None
) -> str:
    """Print a sweep's table and its failures; returns the table as Markdown."""
    console = console or wide_console()
    header, rows = sweep_rows(results, varied)
    table = Table(caption=CAPTION)
    for i, title in enumerate(header):
        table.add_column(title, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for result in results:
        if result["status"] != "finished":
            name = " ".join(result["overrides"])
            console.print(f"[red]{result['status']}[/] {name}\n    {result['reason']}")
    return markdown(header, rows)


def line_panels(path: Path, panels: Sequence[dict[str, Any]], rows: int = 2) -> None:
    """A picture of panels in `rows` rows, over a logarithmic x axis of counts.

    A panel: `title`, `xlabel`, `ylabel`, `log` (y axis), `lines` {label: [(x, y, low, high)]},
    `faint` {label: [(x, y)]} drawn dashed in the colour of the line of that label, `bar` (a level).
    Labels that share what stands before the comma share a colour.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = math.ceil(len(panels) / rows)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4.6 * columns, 3.6 * rows), squeeze=False, sharex="col"
    )
    labels = list(dict.fromkeys(label for panel in panels for label in panel["lines"]))
    kinds = list(dict.fromkeys(label.split(",")[0] for label in labels))
    for axis, panel in zip(axes.flat, panels, strict=False):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log" if panel.get("log") else "linear")
        counts = sorted({point[0] for points in panel["lines"].values() for point in points})
        axis.set_xticks(counts, [str(count) for count in counts])
        for i, (label, points) in enumerate(panel["lines"].items()):
            x, y, low, high = (np.array(column) for column in zip(*points, strict=True))
            # Side by side: ranges at the same count would hide each other.
            at = x * 2 ** (0.06 * (i - (len(panel["lines"]) - 1) / 2))
            kind = label.split(",")[0]
            same = [other for other in labels if other.split(",")[0] == kind]
            colour, marker = f"C{kinds.index(kind)}", "osD^"[same.index(label) % 4]
            axis.errorbar(
                at, y, [y - low, high - y], marker=marker, markersize=4, linewidth=1.2, capsize=2,
                color=colour, label=label,
            )  # fmt: skip
            if faint := panel.get("faint", {}).get(label):
                axis.plot(at, [point[1] for point in faint], "--", color=colour, alpha=0.5)
        if "bar" in panel:
            axis.axhline(panel["bar"], color="grey", linestyle=":", linewidth=1)
        axis.set_title(panel.get("title", ""))
        axis.set_xlabel(panel.get("xlabel", ""))
        axis.set_ylabel(panel.get("ylabel", ""))
        axis.grid(alpha=0.25)
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.tight_layout(rect=(0, 0.03 + 0.03 * math.ceil(len(handles) / (2 * columns)), 1, 1))
    figure.legend(
        list(handles.values()), list(handles), loc="lower center", ncols=2 * columns, frameon=False,
        fontsize=8,
    )  # fmt: skip
    figure.savefig(path, dpi=110)
    plt.close(figure)
