"""The page of a diagnosis: one HTML file that needs nothing else, no script and no network."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from rl_pipeline.diagnosis.diagnose import Diagnosis
from rl_pipeline.diagnosis.report import RUNGS, command, costs
from rl_pipeline.terminal import plain

COLORS = (
    "#3b6fd4", "#e07b39", "#2a9d74", "#b65fcf", "#d4a72c", "#5f6b7a", "#c94f4f", "#4aa3c7",
)  # fmt: skip


def page(diagnosis: Diagnosis) -> str:
    """All of it; every text is escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["plain"] = plain
    environment.filters["capitalize_first"] = lambda text: text[:1].upper() + text[1:]
    trials, best = diagnosis.trials, diagnosis.best
    tried = sorted((t for t in trials if not t.refused), key=lambda t: (t.recipe, -t.ratio))
    return environment.get_template("page.html.j2").render(
        d=diagnosis, best=best, worth=diagnosis.prescriptions, tried=tried, costs=costs,
        refused=[t for t in trials if t.refused], rungs=RUNGS, colors=COLORS,
        top=max(diagnosis.ladder.values()), command=command(diagnosis.overrides, ()),
        best_command=command(diagnosis.overrides, best.overrides) if best else "",
    )  # fmt: skip
