"""A comparison in words: effects of choices, and what to know before believing them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rl_pipeline.comparison import stats
from rl_pipeline.comparison.groups import Comparison, Group, short
from rl_pipeline.comparison.records import RunRecord, StudyRecord
from rl_pipeline.comparison.stats import Effect, Estimate
from rl_pipeline.envs.differences import known_differences


def in_words(ratio: Estimate) -> str:
    """A speed-up as the tables say it."""
    if not ratio.known:
        return f"{ratio.value:.3g}x (one run)"
    interval = f"[{ratio.low:.3g}, {ratio.high:.3g}]"
    return f"{ratio.value:.3g}x {interval}" if ratio.excludes(1) else f"no difference {interval}"


# -- effects of a factorial sweep -----------------------------------------------------------------


def add_effects(comparison: Comparison, first: Group) -> None:
    """Fill in effects, interactions and the answer, from the runs of the baseline's recipe."""
    alike = [
        g for g in comparison.groups
        if g.recipe == first.recipe and g.machine == first.machine and g.steady and g.rates
    ]  # fmt: skip
    levels = {k: {g.levels[k] for g in alike} for k in comparison.by}
    factors = [k for k in comparison.by if len(levels[k]) > 1]
    # Against another level than the baseline's nothing is said.
    bases = all(first.levels[k] in levels[k] for k in factors)
    if not factors or not bases or not first.one_machine:
        return
    cells = {tuple(g.levels[k] for k in factors): g.rates for g in alike}
    design = stats.Factorial(factors, cells, first.levels)
    comparison.factors, comparison.effects = factors, design.main_effects()
    if len(factors) == 1:
        # The table's own speed-ups: a second interval for the same ratio would only confuse.
        ratios = {g.levels[factors[0]]: g.speedup for g in alike}
        comparison.effects = [
            e._replace(ratio=ratio) for e in comparison.effects if (ratio := ratios[e.level])
        ]
    comparison.interactions = [i for i in design.interactions() if i.ratio.excludes(1)]
    for effect in list(comparison.effects):
        phrase, conditional = _phrase(effect, comparison, design)
        comparison.answer.append(phrase)
        comparison.effects += conditional


def _phrase(
    effect: Effect, comparison: Comparison, design: stats.Factorial
) -> tuple[str, list[Effect]]:
    """One level's effect in words; where it depends on a factor of greater effect, by that one."""
    name, ratio = short(effect.factor, effect.level), effect.ratio
    main = [e for e in comparison.effects if not e.given]
    sizes = {(e.factor, e.level): abs(math.log(e.ratio.value)) for e in main}
    mine = sizes[effect.factor, effect.level]
    for interaction in comparison.interactions:
        pair = [interaction.first[:2], interaction.second[:2]]
        if (effect.factor, effect.level) not in pair:
            continue
        other = pair[1 - pair.index((effect.factor, effect.level))]
        if sizes.get(other, 0.0) <= mine:
            continue
        factor = other[0]
        by_level = [
            e for level in design.levels[factor]
            if (e := design.effect(effect.factor, effect.level, (factor, level)))
        ]  # fmt: skip
        moving = [e for e in by_level if e.ratio.excludes(1)]
        told = moving or by_level
        parts = [
            f"{_times(e.ratio) if moving else 'no difference'} with {short(*e.given)}"
            for e in told if e.given
        ]  # fmt: skip
        if len(moving) == 1 < len(by_level) and moving[0].given:
            parts = [f"{_times(moving[0].ratio)}, only with {short(*moving[0].given)}"]
        return f"{name} {', '.join(parts)}", by_level
    if not ratio.known:
        return f"{name} x{ratio.value:.2g} (one run each)", []
    if ratio.excludes(1):
        return f"{name} {_times(ratio)}", []
    return f"{name} no difference [{ratio.low:.3g}, {ratio.high:.3g}]", []


def _times(ratio: Estimate) -> str:
    return f"x{ratio.value:.3g} [{ratio.low:.3g}, {ratio.high:.3g}]"


# -- what to know before believing ----------------------------------------------------------------


def make_notes(comparison: Comparison, study: StudyRecord) -> list[str]:
    """One line each."""
    notes = []
    runs = study.runs
    for group in comparison.groups:
        if group.verdict == "recipe differs":
            changed = ", ".join(f"{k}={v}" for k, v in group.recipe.items())
            notes.append(f"{group.name}: recipe differs ({changed}); its speed is no speed-up")
        if group.below:
            notes.append(
                f"{group.name}: {group.below} of {len(group.done)} runs end below the baseline's "
                "return by more than the margin"
            )
    notes += damaged(study)
    notes += _backend_differences(comparison)
    asked = {
        f"{key}={value} was asked for and {key}={run.settings[key]} took effect"
        for run in runs for key, value in run.requested.items()
    }  # fmt: skip
    notes += sorted(asked)
    if machines := sorted({run.machine for run in runs if run.machine}):
        notes.append("machine: " + "; ".join(machines))
        if len(machines) > 1:
            notes.append("rates of different machines are not compared")
    if commits := sorted({run.commit for run in runs if run.commit}):
        plus = " (+: with changes that are in no commit)" if "+" in "".join(commits) else ""
        notes.append(f"commit: {', '.join(commits)}{plus}")
        if len(commits) > 1:
            notes.append("the runs are of different commits")
    running = sum(run.status == "running" for run in runs)
    if running:
        notes.append(f"{running} runs have not ended and are left out")
    if unknown := sum(run.finished and not run.settings for run in runs):
        notes.append(f"{unknown} finished runs without settings are left out")
    if resumed := sum(run.finished and run.resumed for run in runs):
        notes.append(f"{resumed} runs were resumed: their rates are those of the last session")
    together = _at_once(runs)
    if together > 1:
        notes.append(
            f"up to {together} runs ran at once and shared the machine: rates are lower and less "
            "certain than alone"
        )
    few = min(len(group.done) for group in comparison.groups if group.done)
    if few < 3:
        runs_ = "run" if few == 1 else "runs"
        notes.append(f"some settings have {few} {runs_} only: more seeds narrow the intervals")
    return notes + _pooled(comparison)


def damaged(study: StudyRecord) -> list[str]:
    """The files that could not be read."""
    return [*study.damage, *(text for run in study.runs for text in run.damage)]


def _backend_differences(comparison: Comparison) -> list[str]:
    """What is known to differ between the backends that are compared, on each task."""
    pairs = dict.fromkeys(
        (run.settings["env.id"], run.settings["backend"])
        for group in comparison.groups for run in group.done if "env.id" in run.settings
    )  # fmt: skip
    return list(dict.fromkeys(
        f"{task}: {text}"
        for i, (task, first) in enumerate(pairs) for other, second in list(pairs)[i + 1 :]
        if other == task for text in known_differences(task, first, second)
    ))  # fmt: skip


def _at_once(runs: Sequence[RunRecord]) -> int:
    """Most runs that trained at the same time on one machine."""
    spans = [(r.started, r.started + r.final.get("wall_s", 0.0), r.machine) for r in runs]
    return max(
        (sum(s <= t < e and m == machine for s, e, m in spans) for t, _, machine in spans),
        default=0,
    )


def _pooled(comparison: Comparison) -> list[str]:
    """What `by` leaves out although it differs inside a group."""
    pooled: dict[str, set[str]] = {}
    for group in comparison.groups:
        settings = [run.settings for run in group.done]
        for key in settings[0] if settings else ():
            values = {s.get(key, "") for s in settings}
            if len(values) > 1 and not key.startswith("threads"):
                pooled.setdefault(key, set()).update(values)
    return [f"groups pool over {key}: {', '.join(sorted(v))}" for key, v in pooled.items()]


def in_one_line(comparison: Comparison) -> str:
    """The answer; where runs are too short for one, that."""
    if not comparison.answer and len(comparison.groups) > 1 and not comparison.groups[0].steady:
        if any(g.steady for g in comparison.groups):
            return "no verdict on speed: the baseline reached no steady state"
        return "no verdict on speed: no run reached a steady state"
    return "; ".join(comparison.answer)


def what_ran(comparison: Comparison) -> str:
    """Task, algorithm and length, where all runs have them in common."""
    runs = [run.settings for group in comparison.groups for run in group.runs]

    def common(key: str) -> str:
        values = {settings[key] for settings in runs if key in settings}
        return values.pop() if len(values) == 1 else ""

    told = [common("algo"), common("env.id")]
    if (steps := common("total_steps")).isdecimal():
        told.append(f"for {int(steps):,} env steps")
    return " ".join(filter(None, told))
