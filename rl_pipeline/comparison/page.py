"""The page of a comparison: one HTML file that needs nothing else, no script and no network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from rl_pipeline.comparison.figures import Picture
from rl_pipeline.comparison.findings import in_one_line, what_ran
from rl_pipeline.comparison.groups import Comparison, short
from rl_pipeline.comparison.records import RunRecord
from rl_pipeline.terminal import plain


def page(
    comparison: Comparison,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    caption: str,
    drawn: dict[str, Picture],
) -> str:
    """The table of `header` and `rows`, the pictures, and every run; all text is escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["plain"] = plain
    pairs = [
        [f"{short(*i.first[:2])} and {short(*i.second[:2])}",
         f"{i.ratio.value:.2f} [{i.ratio.low:.2f}, {i.ratio.high:.2f}]"]
        for i in comparison.interactions
    ]  # fmt: skip
    return environment.get_template("page.html.j2").render(
        comparison=comparison, ran=what_ran(comparison), answer=in_one_line(comparison),
        header=header, rows=rows, caption=caption, drawn=drawn, pairs=pairs,
        runs=[_row(run) for group in comparison.groups for run in group.runs],
    )  # fmt: skip


def _row(run: RunRecord) -> list[str]:
    def number(key: str, form: str) -> str:
        value = run.final.get(key, math.nan)
        return "" if math.isnan(value) else f"{value:{form}}"

    end = number("eval_mean", ".1f") or number("train_mean", ".1f")
    return [
        run.name, run.seed, run.status, number("env_steps_per_s", ",.0f"),
        number("window_spread", ".1%"), end, run.id,
    ]  # fmt: skip
