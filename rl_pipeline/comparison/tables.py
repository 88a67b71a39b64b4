"""A comparison as tables: on the terminal, in Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rl_pipeline.comparison.columns import COLUMNS, Column
from rl_pipeline.comparison.findings import in_one_line
from rl_pipeline.comparison.groups import Comparison, Group
from rl_pipeline.comparison.stats import SURE, Estimate
from rl_pipeline.terminal import in_a_row, plain, wide_console


def _figure(column: Column, group: Group) -> str:
    return column.shown(group.figures.get(column.name, math.nan))


_COLUMNS: dict[str, Callable[[Group], str]] = {
    "runs": lambda g: str(len(g.runs)),
    "env steps/s": lambda g: _estimate(g.speed, ",.0f") + ("" if g.steady or not g.speed else "*"),
    "speed-up": lambda g: g.verdict,
    "return": lambda g: _estimate(g.returns, ".1f"),
    "learning": lambda g: _parity(g),
    "reached": lambda g: f"{g.reached}/{len(g.done)}",
    "steps to it": lambda g: _number(g.steps_to, ",.0f"),
    "seconds to it": lambda g: _number(g.seconds_to, ",.1f"),
    **{column.title: partial(_figure, column) for column in COLUMNS},
    "failed": lambda g: str(len(g.failures) or ""),
}
_SHORT = ("runs", "env steps/s", "speed-up", "return", "learning", "failed")
_WITH_THRESHOLD = ("reached", "steps to it", "seconds to it")


def comparison_rows(
    found: Comparison, columns: Sequence[str] | None = None
) -> tuple[list[str], list[list[str]]]:
    """Header and rows, one per setting; columns that have nothing to say are left out."""
    wanted = [
        c for c in columns or _COLUMNS
        if not (c in _WITH_THRESHOLD and found.threshold is None)
    ]  # fmt: skip
    cells = {c: [_COLUMNS[c](g) for g in found.groups] for c in wanted}
    cells = {c: texts for c, texts in cells.items() if any(texts)}
    rows = [[g.name, *(cells[c][i] for c in cells)] for i, g in enumerate(found.groups)]
    return ["setting", *cells], rows


def comparison_caption(found: Comparison) -> str:
    """Caption with the meaning of the columns."""
    lines = [
        "env steps/s: median over runs [95 % bootstrap]; speed-up: ratio of geometric means "
        "[95 % Welch on log rates, all together]; an interval that holds 1 is no difference"
    ]
    if any(g.returns for g in found.groups):
        lines.append(
            f"return: {found.return_metric}, IQM at {found.at_steps:,.0f} env steps [95 % "
            f"bootstrap]; learning: not worse if, of {SURE} runs a side or more, the mean's loss "
            "is below the margin with 95 % confidence (Welch, the worst run counted twice); a "
            "collapse of less than every fourth run may go unseen"
        )
    if any(x and x.is_range for g in found.groups for x in (g.speed, g.returns)):
        lines.append("(a to b): the range of a setting with too few runs for an interval")
    if found.threshold is not None:
        lines.append(
            f"it: a training return of {found.threshold:g}, which lags behind what the greedy "
            "policy reaches; medians over runs"
        )
    if any(g.speed and not g.steady for g in found.groups):
        lines.append(
            "* no steady state was reached: runs that train on for some 10 s after their warm-up "
            "(total_steps) can be compared"
        )
    return "\n".join(lines)


def _estimate(value: Estimate | None, form: str) -> str:
    if value is None:
        return ""
    text = f"{value.value:{form}}"
    if not value.known:
        return text
    if value.is_range:
        return f"{text} ({value.low:{form}} to {value.high:{form}})"
    return f"{text} [{value.low:{form}}, {value.high:{form}}]"


def _parity(group: Group) -> str:
    parity = group.parity
    if parity is None:
        return ""
    words = {
        "open": "open: more seeds", "unknown": "too few runs",
        "incomplete": "open: runs without a return", "identical": "identical, seed by seed",
    }.get(parity.verdict, parity.verdict)  # fmt: skip
    told = math.isnan(parity.margin) or parity.verdict == "identical"
    return words if told else f"{words} (margin {parity.margin:.1f})"


def _number(value: float, form: str) -> str:
    if math.isinf(value):
        return "not reached"
    return "" if math.isnan(value) else f"{value:{form}}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; what its cells hold is text."""
    lines = [[_in_markdown(cell) for cell in cells] for cells in (header, *rows)]
    lines.insert(1, ["---"] * len(header))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def _in_markdown(text: str) -> str:
    """No tag, no entity, no cell of its own, no link and no formula."""
    text = re.sub(r"&(?=[#\w])", "&amp;", in_a_row(text))
    text = re.sub(r"<(?=[\w/!?])", "&lt;", text)
    for mark, written in (("|", r"\|"), ("](", r"]\("), ("$", r"\$"), ("`", r"\`")):
        text = text.replace(mark, written)
    return text


def print_comparison(found: Comparison, console: Console | None = None) -> None:
    """The short table, the failures with their causes, and the answer."""
    console = console or wide_console()
    header, rows = comparison_rows(found, _SHORT + _WITH_THRESHOLD)
    table = Table(caption=comparison_caption(found), caption_justify="left")
    for i, title in enumerate(header):
        # Folded where the terminal is narrow, never cut.
        table.add_column(title, justify="right" if i else "left", overflow="fold")
    for group, row in zip(found.groups, rows, strict=True):
        table.add_row(in_a_row(group.label), *map(in_a_row, row[1:]))
    console.print(table)
    for group in found.groups:
        for run in group.failures:
            console.print(run.status, style="red", end=" ")
            console.print(plain(f"{run.name}\n    {run.reason}"))
    if answer := in_one_line(found):
        console.print(plain(answer), style="bold")
    for note in found.notes:
        console.print(plain(f"- {note}"))


def write_comparison(found: Comparison, folder: Path) -> list[Path]:
    """table.md, groups.csv, comparison.json, index.html and the pictures; returns their paths."""
    from rl_pipeline.comparison import figures, page

    folder.mkdir(parents=True, exist_ok=True)
    header, rows = comparison_rows(found)
    caption = comparison_caption(found)
    drawn = figures.pictures(found)
    answer = _in_markdown(in_one_line(found))
    notes = "\n".join(f"- {_in_markdown(note)}" for note in found.notes)
    files: dict[str, str | bytes] = {
        "table.md": f"{markdown(header, rows)}\n{answer}\n\n{caption}\n\n{notes}\n",
        "groups.csv": _csv(found),
        "comparison.json": json.dumps(as_object(found), indent=1) + "\n",
        "index.html": page.page(found, header, rows, caption, drawn),
    }
    files |= {f"{name}.png": picture.png for name, picture in drawn.items()}
    for name, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(data)
    return [folder / name for name in files]


def as_object(found: Comparison) -> dict[str, Any]:
    """The comparison as plain JSON values; NaN and infinity as null."""
    groups = []
    for group in found.groups:
        values = {k: v for k, v in vars(group).items() if k not in ("runs", "figures")}
        values |= group.figures
        runs = [
            {"id": r.id, "name": r.name, "seed": r.seed, "status": r.status, "reason": r.reason,
             "commit": r.commit, **r.final}
            for r in group.runs
        ]  # fmt: skip
        groups.append({"name": group.name, "machine": group.machine, **values, "runs": runs})
    values = {k: v for k, v in vars(found).items() if k != "groups"}
    plain: dict[str, Any] = _plain({**values, "groups": groups})
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        own = value._asdict()
        return _plain(own | {"is_range": value.is_range} if hasattr(value, "is_range") else own)
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def _csv(found: Comparison) -> str:
    """One row per group, numbers in full; empty where there is none."""
    text = io.StringIO()
    estimates = ("speed", "speedup", "returns")
    figures = [column.name for column in COLUMNS]
    writer = csv.writer(text, lineterminator="\n")
    ends = ("", "_low", "_high", "_interval")
    writer.writerow([
        *map(_in_csv, found.by), "runs", "finished", "recipe", "steady", "verdict",
        *(name + end for name in estimates for end in ends), "steps_to", "seconds_to",
        *figures, "parity", "margin",
    ])  # fmt: skip
    for g in found.groups:
        recipe = " ".join(f"{k}={v}" for k, v in g.recipe.items())
        cells = [cell for name in estimates for cell in _cells(g, name)]
        cells += [g.steps_to, g.seconds_to, *(g.figures.get(n, math.nan) for n in figures)]
        cells += [g.parity.verdict, g.parity.margin] if g.parity else ["", ""]
        writer.writerow([
            *map(_in_csv, g.levels.values()), len(g.runs), len(g.done), _in_csv(recipe), g.steady,
            g.verdict,
            *("" if x != x else x for x in cells),
        ])  # fmt: skip
    return text.getvalue()


def _in_csv(text: str) -> str:
    """A text that no spreadsheet takes for a formula; numbers stay numbers."""
    text = plain(text)
    try:
        float(text)
    except ValueError:
        return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\n")) else text
    return text


def _cells(group: Group, name: str) -> list[str | float]:
    """Value, low, high, and what these two are."""
    value: Estimate | None = getattr(group, name)
    if value is None or not value.known:
        return [value.value if value else "", "", "", ""]
    interval = "95 % together" if name == "speedup" else "95 %"
    return [*value, "range" if value.is_range else interval]
