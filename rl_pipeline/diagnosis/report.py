"""A diagnosis on one screen."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from rl_pipeline.diagnosis.candidates import Overrides
from rl_pipeline.diagnosis.diagnose import Diagnosis, Finding, changed_by
from rl_pipeline.diagnosis.trial import Trial
from rl_pipeline.diagnosis.verdict import WORDS
from rl_pipeline.terminal import plain, shell_line, wide_console

RUNGS = {
    "env": "environments only",
    "act": "+ acting",
    "store": "+ storing",
    "learn": "+ learning",
    "run": "the whole run",
}
BAR = 24


def print_diagnosis(diagnosis: Diagnosis, console: Console | None = None) -> None:
    """Verdict, ladder, parts and prescriptions."""
    console = console or wide_console()
    console.print(f"{diagnosis.task}: {diagnosis.rate:,.0f} env steps/s", style="bold")
    console.print(f"{diagnosis.verdict}.\n", highlight=False)
    console.print(_ladder(diagnosis))
    console.print()
    console.print(_parts(diagnosis))
    console.print()
    worth = diagnosis.prescriptions
    if not worth:
        console.print(
            f"nothing worth changing: {len(_tried(diagnosis))} changes were measured, and none is "
            "surely faster"
        )
        return
    console.print(_prescriptions(worth))
    best = diagnosis.best
    if best is not None:
        console.print(f"\nthe same recipe at {best.ratio:.2f}x:", highlight=False)
        console.print(f"  {command(diagnosis.overrides, best.overrides)}", highlight=False)


def print_finding(finding: Finding, console: Console | None = None) -> None:
    """What a finished run's records tell, and how to learn more."""
    console = console or wide_console()
    console.print(f"{finding.task}: {finding.rate:,.0f} env steps/s", style="bold")
    console.print(f"{finding.verdict}.", highlight=False)
    if not finding.steady:
        console.print("The run was too short for a steady state: most of it is its beginning.")
    table = Table(box=None, padding=(0, 2))
    for heading in ("part", "of the time", "if it were free"):
        table.add_column(heading, justify="left" if heading == "part" else "right")
    for share in finding.shares:
        table.add_row(share.words, f"{share.share:.0%}", f"{share.bound:.2f}x")
    console.print()
    console.print(table)
    same = [" ".join(change) for change, recipe in finding.worth_trying if not recipe]
    if same:
        console.print(f"\nnot measured, worth a try: {plain('; '.join(same))}", highlight=False)
    line = plain(shell_line("diagnose", *finding.overrides))
    console.print(f"measure them with\n  {line}", highlight=False)


def command(overrides: list[str], change: Overrides) -> str:
    """The training's line with a change, to paste."""
    environ = " ".join(o for o in change if o.split("=")[0].isupper())
    line = shell_line("train", *changed_by(overrides, change))
    return plain(f"{environ} {line}" if environ else line)


def costs(trial: Trial) -> str:
    """What a change costs besides: seconds of compilation, memory."""
    found = []
    if trial.compile_s >= 1:
        found.append(f"{trial.compile_s:.0f} s to build, once")
    if trial.memory_bytes > 50e6:
        found.append(f"{trial.memory_bytes / 1e6:,.0f} MB")
    return ", ".join(found)


def _tried(diagnosis: Diagnosis) -> list[Trial]:
    return [trial for trial in diagnosis.trials if not trial.refused]


def _ladder(diagnosis: Diagnosis) -> Table:
    table = Table(box=None, padding=(0, 2))
    for heading in ("ladder", "env steps/s", ""):
        table.add_column(heading, justify="right" if heading == "env steps/s" else "left")
    top = max(diagnosis.ladder.values())
    for name, rate in diagnosis.ladder.items():
        bar = "#" * max(1, round(BAR * rate / top))
        table.add_row(RUNGS[name], f"{rate:,.0f}", bar)
    return table


def _parts(diagnosis: Diagnosis) -> Table:
    table = Table(box=None, padding=(0, 2))
    headings = ("part", "of the time", "us a step", "alone", "CPUs busy", "if it were free")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "part" else "right")
    for share in diagnosis.shares:
        alone, busy = diagnosis.alone.get(share.phase), diagnosis.busy.get(share.phase)
        table.add_row(
            WORDS.get(share.phase, share.phase), f"{share.share:.0%}",
            f"{1e6 * diagnosis.together[share.phase]:,.1f}",
            "" if alone is None else f"{1e6 * alone:,.1f}", "" if busy is None else f"{busy:.1f}",
            f"{share.bound:.2f}x",
        )  # fmt: skip
    return table


def _prescriptions(worth: list[Trial]) -> Table:
    table = Table(box=None, padding=(0, 2))
    for heading in ("worth changing", "speed", "95 %", "recipe", "costs"):
        table.add_column(heading, justify="right" if heading in ("speed", "95 %") else "left")
    for trial in worth:
        table.add_row(
            plain(" ".join(trial.overrides)), f"{trial.ratio:.2f}x",
            f"{trial.low:.2f} to {trial.high:.2f}", "changed" if trial.recipe else "same",
            costs(trial),
        )  # fmt: skip
    return table
