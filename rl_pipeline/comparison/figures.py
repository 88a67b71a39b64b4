"""Pictures of a comparison; matplotlib only here."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rl_pipeline.comparison import stats
from rl_pipeline.comparison.columns import seconds_of, trained
from rl_pipeline.comparison.groups import Comparison, Group, short
from rl_pipeline.terminal import plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 60


def _drawn(text: str) -> str:
    """For pictures, where a dollar would begin a formula and a first `_` hide a legend's line."""
    text = plain(text).replace("\n", " ").replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


class Picture(NamedTuple):
    """One drawing in both forms, and what it shows."""

    svg: str
    png: bytes
    caption: str


def pictures(comparison: Comparison) -> dict[str, Picture]:
    """By name: pareto, curves, effects; those for which there is data."""
    drawn: dict[str, Picture] = {}
    placed = [g for g in comparison.groups if g.speed and g.returns]
    if placed:
        drawn["pareto"] = Picture(
            *_draw(lambda axes: _pareto(axes[0], placed, comparison), 1),
            f"Speed against return ({comparison.return_metric}, IQM at {comparison.at_steps:,.0f} "
            "env steps); bars are 95 % intervals (of few runs the range), the line joins what "
            "nothing else of its recipe beats in both. Hollow: too short for a steady state.",
        )
    if any(trained(run) for g in comparison.groups for run in g.done):
        drawn["curves"] = Picture(
            *_draw(lambda axes: _curves(axes, comparison), 2),
            "Training return (last 100 games), IQM over runs with its 95 % bootstrap band (of few "
            "runs their range), against env steps and against seconds of training (evaluation and "
            "start-up are not in them).",
        )
    if comparison.effects:
        drawn["effects"] = Picture(
            *_draw(
                lambda axes: _effect_plot(axes[0], comparison),
                1,
                0.5 + 0.32 * len(comparison.effects),
            ),
            "What each choice does to the speed, as a ratio; the intervals hold together at 95 %. "
            "Indented: where an effect depends on another choice. Grey: no difference.",
        )
    return drawn


def _draw(draw: Callable[[Any], None], columns: int, height: float = 3.6) -> tuple[str, bytes]:
    """The picture as SVG and as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "rl_pipeline"  # the same picture is the same file
    figure, axes = plt.subplots(
        1, columns, figsize=(9.5, height), squeeze=False, layout="constrained"
    )
    draw(axes[0])
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
    text, image = io.StringIO(), io.BytesIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    figure.savefig(image, format="png", dpi=110)
    plt.close(figure)
    return text.getvalue()[text.getvalue().index("<svg") :], image.getvalue()


def _pareto(axis: Axes, groups: Sequence[Group], comparison: Comparison) -> None:
    recipes: dict[tuple[tuple[str, str], ...], list[Group]] = {}
    for i, group in enumerate(groups):
        assert group.speed and group.returns
        x, y = group.speed, group.returns
        axis.errorbar(
            x.value, y.value, color=f"C{i % 10}", marker="o", capsize=3,
            xerr=_bars(x), yerr=_bars(y), markerfacecolor=None if group.steady else "none",
            label=_drawn(group.label),
        )  # fmt: skip
        recipes.setdefault(tuple(sorted(group.recipe.items())), []).append(group)
    for members in recipes.values():
        front = pareto_front(
            [(g.speed.value, g.returns.value) for g in members if g.speed and g.returns]
        )
        if len(front) > 1:
            axis.plot(*zip(*front, strict=True), color="0.6", linewidth=1, zorder=0)
    axis.set_xscale("log")
    axis.set_xlabel("env steps/s (median over runs)")
    axis.set_ylabel(_drawn(comparison.return_metric))
    axis.margins(x=0.1, y=0.15)
    axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    _plain_log(axis)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats in both coordinates, from left to right."""
    front: list[tuple[float, float]] = []
    for point in sorted(set(points), reverse=True):
        if not front or point[1] > front[-1][1]:
            front.append(point)
    return front[::-1]


def _bars(estimate: stats.Estimate) -> list[list[float]] | None:
    if not estimate.known:
        return None
    return [[estimate.value - estimate.low], [estimate.high - estimate.value]]


def _plain_log(axis: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
    low, high = axis.get_xlim()
    if high / low > 30:
        axis.xaxis.set_minor_formatter(NullFormatter())
    else:
        axis.xaxis.set_minor_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
        axis.tick_params(axis="x", which="minor", labelsize=8, rotation=30)


def _curves(axes: Sequence[Axes], comparison: Comparison) -> None:
    for i, group in enumerate(comparison.groups):
        runs = [run for run in group.done if trained(run)]
        if not runs:
            continue
        color, curves = f"C{i % 10}", [run.curves["return/train"] for run in runs]
        begin = max(steps[0] for steps, _ in curves)
        end = min(steps[-1] for steps, _ in curves)
        steps = np.linspace(begin, end, POINTS)
        values = np.array([np.interp(steps, *curve) for curve in curves])
        seconds = np.median([seconds_of(run, steps) for run in runs], axis=0)
        for axis, x in zip(axes, (steps, seconds), strict=True):
            axis.plot(x, stats.iqm(values), color=color, label=_drawn(group.label))
            if len(runs) > 1:
                few = len(runs) < stats.FEW
                band = (values.min(0), values.max(0)) if few else stats.bootstrap(values, stats.iqm)
                axis.fill_between(x, *band, color=color, alpha=0.18)
    axes[0].set_xlabel("env steps")
    axes[1].set_xlabel("seconds of training")
    axes[0].set_ylabel("return/train")
    for axis in axes:
        if comparison.threshold is not None:
            axis.axhline(comparison.threshold, color="0.5", linestyle=":", linewidth=1)
    axes[0].legend(frameon=False, fontsize=8)


def _effect_plot(axis: Axes, comparison: Comparison) -> None:
    names = []
    for row, effect in enumerate(comparison.effects):
        given = f"    with {short(*effect.given)}" if effect.given else ""
        against = short(effect.factor, effect.base)
        names.append(given or f"{short(effect.factor, effect.level)} against {against}")
        color = "C0" if effect.ratio.excludes(1) else "0.6"
        axis.errorbar(
            effect.ratio.value, row, xerr=_bars(effect.ratio), color=color, marker="o", capsize=3
        )
    axis.axvline(1, color="0.5", linewidth=1)
    axis.set_yticks(range(len(names)), [_drawn(name) for name in names])
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.set_xscale("log")
    axis.set_xlabel("env steps/s as a ratio (log scale)")
    _plain_log(axis)


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
                color=colour, label=_drawn(label),
            )  # fmt: skip
            if faint := panel.get("faint", {}).get(label):
                axis.plot(at, [point[1] for point in faint], "--", color=colour, alpha=0.5)
        if "bar" in panel:
            axis.axhline(panel["bar"], color="grey", linestyle=":", linewidth=1)
        axis.set_title(_drawn(panel.get("title", "")))
        axis.set_xlabel(_drawn(panel.get("xlabel", "")))
        axis.set_ylabel(_drawn(panel.get("ylabel", "")))
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
