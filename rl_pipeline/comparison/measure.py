"""From the records of runs to an answer: speeds, speed-ups, returns and parity by group.

What changes learning (environments, horizon, batch, learning rate, steps, ...) makes another
recipe, whose speed is no speed-up. See `groups` for who is compared, `stats` for how, `findings`
for the words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from rl_pipeline.comparison import stats
from rl_pipeline.comparison.columns import COLUMNS, seconds_of, trained
from rl_pipeline.comparison.findings import add_effects, damaged, in_words, make_notes
from rl_pipeline.comparison.groups import (
    Comparison,
    Group,
    group_keys,
    make_groups,
    tell_recipes,
    unknown_key,
)
from rl_pipeline.comparison.records import RunRecord, StudyRecord
from rl_pipeline.comparison.stats import Estimate, Parity
from rl_pipeline.errors import ConfigError

PARITY_SHARE = 0.1
"""Default margin: this share of the return that the baseline gained by learning."""


def compare(
    study: StudyRecord,
    by: Sequence[str] | None = None,
    baseline: dict[str, str] | None = None,
    threshold: float | None = None,
    margin: float | None = None,
    at_steps: float | None = None,
) -> Comparison:
    """Compare the runs of a study.

    `by` are the settings that make the groups, by default those that differ; recipe settings that
    differ are always among them. `baseline` picks the group that counts as 1; settings left out
    are held equal. `margin` is the loss of return that parity allows, by default 10 % of what the
    baseline learned. Raises ConfigError for keys and baselines that no run has.
    """
    runs = [run for run in study.runs if run.settings or not run.finished]
    if not any(run.finished for run in runs):
        ended = any(run.finished for run in study.runs)
        has = "has settings that are known" if ended else "has finished"
        words = f"study={study.name}: none of its {len(study.runs)} runs {has}"
        raise ConfigError("\n".join([words, *damaged(study)]))
    keys = group_keys(runs, by, study.varied)
    groups = make_groups(runs, keys)
    base = baseline or {}
    _check_baseline(base, groups)
    first = next((g for g in groups if _matches(g, base) and g.done), groups[0])
    groups.sort(key=lambda group: group is not first)
    tell_recipes(groups, first)
    last = [run.curves["return/train"][0][-1] for run in runs if run.finished and trained(run)]
    steps = at_steps or (min(last) if last else math.nan)
    metric = _return_metric(runs, steps)
    comparison = Comparison(
        study.name, keys, groups, base or dict(first.levels), steps, metric, threshold
    )
    for group in groups:
        _measure(group, steps, metric, threshold)
    against = [_base_of(group, groups, base, first) for group in groups]
    level = stats.together(sum(map(_ranked, groups, against)))
    for group, other in zip(groups, against, strict=True):
        _against(group, other, steps, metric, margin, level)
    add_effects(comparison, first)
    comparison.notes = make_notes(comparison, study)
    return comparison


# -- one group ------------------------------------------------------------------------------------


def _return_metric(runs: Sequence[RunRecord], steps: float) -> str:
    """Evaluations where every run has one at these steps, else the running training return."""
    done = [run for run in runs if run.finished]
    near = all(not math.isnan(_return_at(run, steps, "return/eval")) for run in done)
    return "return/eval" if done and near else "return/train"


def _return_at(run: RunRecord, steps: float, metric: str) -> float:
    if metric not in run.curves:
        return math.nan
    x, y = run.curves[metric]
    if metric == "return/eval":
        nearest = int(np.argmin(np.abs(x - steps)))
        return float(y[nearest]) if abs(x[nearest] - steps) <= 0.05 * steps else math.nan
    return stats.at_step(x, y, steps)


def _by_seed(group: Group, steps: float, metric: str) -> dict[str, float]:
    return {run.seed: _return_at(run, steps, metric) for run in group.ended}


def _returns(group: Group, steps: float, metric: str) -> list[float]:
    values = [_return_at(run, steps, metric) for run in group.done]
    return [v for v in values if not math.isnan(v)]


def _measure(group: Group, steps: float, metric: str, threshold: float | None) -> None:
    rates = group.rates
    if rates:
        group.speed = stats.middle(rates, np.median)
        group.steady = all(run.final.get("steady") == 1 for run in group.done)
    returns = _returns(group, steps, metric)
    if returns:
        group.returns = stats.middle(returns, stats.iqm)
    group.figures = {c.name: _median(map(c.of_run, group.done)) for c in COLUMNS}
    if threshold is not None:
        reached = [_reach(run, threshold) for run in group.done if trained(run)]
        group.reached = sum(math.isfinite(s) for s, _ in reached)
        if reached:
            group.steps_to, group.seconds_to = (
                float(np.median(column)) for column in zip(*reached, strict=True)
            )


def _reach(run: RunRecord, threshold: float) -> tuple[float, float]:
    steps = stats.first_reach(*run.curves["return/train"], threshold)
    if not math.isfinite(steps):
        return math.inf, math.inf
    return steps, float(seconds_of(run, np.array([steps]))[0])


def _median(values: Iterable[float]) -> float:
    known = [v for v in values if not math.isnan(v)]
    return float(np.median(known)) if known else math.nan


# -- against the baseline -------------------------------------------------------------------------


def _check_baseline(base: dict[str, str], groups: Sequence[Group]) -> None:
    keys = list(groups[0].levels)
    for key in base:
        if key not in keys:
            raise unknown_key("baseline", key, keys)
    if not any(_matches(group, base) for group in groups):
        wanted = ",".join(f"{k}={v}" for k, v in base.items())
        there = "; ".join(group.name for group in groups)
        raise ConfigError(f"baseline={wanted}: no such group; there are {there}")


def _matches(group: Group, levels: dict[str, str]) -> bool:
    return all(group.levels[k] == v for k, v in levels.items())


def _base_of(
    group: Group, groups: Sequence[Group], base: dict[str, str], first: Group
) -> Group | str:
    """The group to compare with, all that `base` leaves open held equal; or why there is none."""
    wanted = {k: v for k, v in group.levels.items() if k not in base} | base if base else {}
    found = [g for g in groups if _matches(g, wanted)] if base else [first]
    comparable = [g for g in found if g.recipe == group.recipe]
    if not comparable:
        return "recipe differs" if found or group.recipe != first.recipe else "no baseline"
    if comparable[0].machine != group.machine or not group.one_machine:
        return "machine differs"
    return comparable[0]


def _ranked(group: Group, base: Group | str) -> bool:
    """Whether there is a speed-up to tell."""
    if isinstance(base, str) or group is base:
        return False
    return all(g.steady and g.rates for g in (group, base))


def _against(
    group: Group, base: Group | str, steps: float, metric: str, margin: float | None, level: float
) -> None:
    """Fill in speed-up and parity; the speed-ups of all groups hold together at `level` each."""
    if not group.done:
        group.verdict = "no run finished"
    elif isinstance(base, str):
        group.verdict = base
    elif group is base:
        group.verdict = "1"
    else:
        rates, of_base = group.rates, base.rates
        if not (rates and of_base):
            group.verdict = "no baseline"
        elif not _ranked(group, base):
            group.verdict = "baseline too short" if group.steady else "too short"
        else:
            group.speedup = stats.speedup(rates, of_base, level)
            group.verdict = in_words(group.speedup)
        returns, others = _returns(group, steps, metric), _returns(base, steps, metric)
        if returns and others:
            allowed = _gained(base, float(stats.iqm(others))) if margin is None else margin
            if allowed is None:
                group.parity = Parity(Estimate(math.nan), math.nan, "nothing learned")
                return
            group.parity = stats.parity(returns, others, allowed)
            seeds = _by_seed(group, steps, metric)
            # Where all seeds reach a task's maximum, equal ones say nothing.
            whole = len(seeds) == len(returns) == len(group.ended)
            if whole and seeds == _by_seed(base, steps, metric) and len(set(returns)) > 1:
                nothing = Estimate(0.0, 0.0, 0.0)
                group.parity = Parity(nothing, allowed, "identical")
                return
            # Of seeds that failed or have no return nobody knows what they would have reached.
            missing = len(returns) < len(group.ended) or len(others) < len(base.ended)
            if missing and group.parity.verdict != "worse":
                group.parity = group.parity._replace(verdict="incomplete")
            floor = float(stats.iqm(others)) - allowed
            group.below, expected = (sum(r < floor for r in x) for x in (returns, others))
            if group.below * len(others) <= expected * len(returns):
                group.below = 0


def _gained(base: Group, reached: float) -> float | None:
    """The default margin, from the first training return to the one reached; None for no gain."""
    first = _median(run.curves["return/train"][1][0] for run in base.done if trained(run))
    return PARITY_SHARE * (reached - first) if reached > first else None
