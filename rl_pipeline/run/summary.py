"""A finished run on one screen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rl_pipeline.config import folders
from rl_pipeline.config.stores import how_to_open, server_of
from rl_pipeline.terminal import plain, shell_line, shown_path, wide_console


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
        grid.add_row("", plain(result["reason"]))
    if returns["eval_mean"] is not None:
        grid.add_row(
            "return",
            f"{returns['eval_mean']:.1f} +- {returns['eval_std']:.1f}  (greedy policy, "
            f"{returns['episodes']} full games on fresh seeds)",
        )
    if returns["train_mean"] is not None:
        grid.add_row("", f"{returns['train_mean']:.1f}  (last training episodes)")
    if (best := returns.get("best")) and best["fell"]:
        grid.add_row(
            "",
            f"fell from {best['eval_mean']:.1f} at {best['env_steps']:,} env steps{_kept(result)}",
        )
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
        f"(warm-up {rate['warmup_s']:.1f} s of it{_evaluating(result)}; start-up "
        f"{_startup(result)} s before)",
    )
    if line := compile_line(result["compile"]):
        grid.add_row("compile", line)
    if skipped := counters["skipped_updates"]:
        grid.add_row("", f"{skipped:,} updates skipped: their fp16 gradients were not finite")
    if "phases" in result:
        shares = [f"{name} {p['share']:.0%}" for name, p in result["phases"].items()]
        grid.add_row("time", "  ".join(shares[:8]))
        if not rate["steady"]:
            grid.add_row("bottleneck", "not named: most of so short a run is its beginning")
        elif found := result["bottleneck"]:
            bound = found["upper_bound_speedup"]
            gain = f"at most {bound:.1f}x faster if it were free" if bound else ""
            grid.add_row(
                "bottleneck", f"{found['phase']} ({found['share']:.0%} of training): {gain}"
            )
            line = shell_line("diagnose", *folders.own_overrides(result["overrides"]))
            grid.add_row("", f"{plain(line)}  says what to change")
    for wait in result.get("transfers", {}).get("hidden_waits", [])[:3]:
        grid.add_row("waits", f"{wait['phase']} waits for the GPU at {wait['where']}, "
                     f"{wait['count']:,} times")  # fmt: skip
    grid.add_row("folder", shown_path(result["folder"]))
    tracked, later = result.get("tracking", {}), ""
    if tracked.get("run_id"):
        if tracked.get("trouble"):
            grid.add_row("mlflow", f"store trouble: {tracked['trouble']}; the rows are kept")
        grid.add_row("mlflow", how_to_open(tracked["uri"]))
        page = f"{server_of(tracked['uri'])}/#/experiments/{tracked['experiment_id']}/runs"
        grid.add_row("", f"{page}/{tracked['run_id']}")
        grid.add_row("", f"{page}?viewStateShareKey=rl_pipeline  (all runs)")
    elif tracked.get("trouble") or tracked.get("pending"):
        grid.add_row("mlflow", f"not reached ({tracked.get('trouble')}); rows in metrics.jsonl")
        later = shell_line("tracking.writer", shown_path(result["folder"]))
    console.print()
    console.print(grid)
    if later:  # outside of the table, which folds what is long
        console.print(f"ship the rows later with\n  {later}", soft_wrap=True)


def compile_line(found: dict[str, Any]) -> str:
    """The cost of compiling and whether it pays, in words; empty where nothing was compiled."""
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


def _kept(result: dict[str, Any]) -> str:
    best = Path(result["folder"]) / "checkpoints" / "best.pt"
    return f", kept in {shown_path(str(best))}" if best.exists() else ""


def _evaluating(result: dict[str, Any]) -> str:
    seconds = result.get("phases", {}).get("eval", {}).get("seconds")
    return f", evaluation {seconds:.1f} s" if seconds else ""


def _startup(result: dict[str, Any]) -> str:
    seconds = result["startup"].get("until_first_step_s")
    return "?" if seconds is None else f"{seconds:.1f}"
