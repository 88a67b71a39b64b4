"""From the records of runs to an answer: groups, speed-ups, effects, parity of learning.

Runs are grouped by the settings that took effect, never by what was asked for, and never across
recipes: what changes learning (environments, horizon, batch, learning rate, steps, ...) makes
another recipe, whose speed is no speed-up. See `stats` for the methods.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rl_pipeline import stats
from rl_pipeline.records import RunRecord, StudyRecord
from rl_pipeline.settings import ConfigError
from rl_pipeline.stats import Effect, Estimate, Interaction, Parity

SAME_RECIPE = (
    "backend", "backend.num_threads", "backend.lanes", "backend.step_timeout_s", "threads",
    "buffer.placement", "buffer.prefetch", "buffer.save", "precision", "compile", "device", "mode",
    "profile",
)  # fmt: skip
"""Settings that change how fast the same learning runs; every other one belongs to the recipe."""
_GROUPS_OF_CHOICES = ("threads", "precision", "compile", "device", "mode", "profile")
# Buffers that draw alike differ in where they keep their rows only.
_SAMPLER = {"uniform": "uniform", "deque": "uniform", "memmap": "uniform"}
PARITY_SHARE = 0.1
"""Default margin: this share of the return that the baseline gained by learning."""


@dataclass
class Group:
    """Runs alike in all but their seed, and what came of them."""

    levels: dict[str, str]
    runs: list[RunRecord]
    recipe: dict[str, str]
    """Recipe settings that differ from the first group's; {} for the same recipe."""
    machine: str
    speed: Estimate | None = None
    """Env steps/s, median over runs."""
    steady: bool = False
    speedup: Estimate | None = None
    """Against the baseline group of the same recipe and machine."""
    speedup_bootstrap: Estimate | None = None
    verdict: str = ""
    """The speed-up in words, or why there is none."""
    returns: Estimate | None = None
    """IQM at equal steps."""
    parity: Parity | None = None
    reached: int = 0
    """Runs that reached the threshold."""
    steps_to: float = math.nan
    """Env steps to the threshold, median over runs; inf if less than half of them reach it."""
    seconds_to: float = math.nan
    memory_bytes: float = math.nan
    gpu_bytes: float = math.nan
    compile_s: float = math.nan
    joules_per_step: float = math.nan

    @property
    def name(self) -> str:
        """The levels as overrides."""
        return " ".join(f"{k}={v}" for k, v in self.levels.items()) or "all"

    @property
    def done(self) -> list[RunRecord]:
        """Runs that finished."""
        return [run for run in self.runs if run.finished]

    @property
    def failures(self) -> list[RunRecord]:
        """Runs that did not, those still running aside."""
        return [run for run in self.runs if run.status in ("failed", "killed")]


@dataclass
class Comparison:
    """The whole answer."""

    name: str
    by: list[str]
    groups: list[Group]
    baseline: dict[str, str]
    at_steps: float
    return_metric: str
    threshold: float | None
    factors: list[str] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    interactions: list[Interaction] = field(default_factory=list)
    answer: list[str] = field(default_factory=list)
    """What each choice does to the speed, one phrase each."""
    notes: list[str] = field(default_factory=list)
    """What a reader must know before believing the rest."""


def is_recipe(key: str) -> bool:
    """Whether a setting belongs to the recipe: two values of it are two ways to learn."""
    return key not in SAME_RECIPE and key.split(".")[0] not in _GROUPS_OF_CHOICES


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
        raise ConfigError(f"study={study.name}: none of its {len(runs)} runs has finished")
    keys = _group_keys(runs, by, study.varied)
    groups = _groups(runs, keys)
    base = baseline or {}
    _check_baseline(base, groups)
    first = next((g for g in groups if _matches(g, base) and g.done), groups[0])
    groups.sort(key=lambda group: group is not first)
    last = [run.curves["return/train"][0][-1] for run in runs if run.finished and _trained(run)]
    steps = at_steps or (min(last) if last else math.nan)
    metric = _return_metric(runs, steps)
    found = Comparison(
        study.name, keys, groups, base or dict(first.levels), steps, metric, threshold
    )
    for group in groups:
        _measure(group, steps, metric, threshold)
    for group in groups:
        _against(group, _base_of(group, groups, base, first), steps, metric, margin)
    _effects(found, first)
    found.notes = _notes(found, study) + _pooled(found)
    return found


# -- groups ---------------------------------------------------------------------------------------


def _group_keys(
    runs: Sequence[RunRecord], by: Sequence[str] | None, varied: Sequence[str]
) -> list[str]:
    whole = [run.settings for run in _whole(runs)]
    keys = list(dict.fromkeys(key for settings in whole for key in settings))
    differ = [k for k in keys if len({settings.get(k) for settings in whole}) > 1]
    if by is not None:
        unknown = [key for key in by if key not in keys]
        if unknown:
            raise UnknownKey("by", unknown[0], keys)
        # Never mixed: what makes another recipe is a group of its own.
        rest = _telling([k for k in differ if is_recipe(k)], whole, known=list(by))
        return list(by) + rest
    # What the sweep names, then options before their details, thread plans last.
    named = [k for k in differ if k in varied]
    order = sorted(differ, key=lambda k: (k.startswith("threads"), "." in k, keys.index(k)))
    return named + _telling(order, whole, known=named)


def _whole(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Runs whose settings are known in full, those that finished first."""
    known = [run for run in runs if "algo" in run.settings]
    return sorted(known, key=lambda run: not run.finished) or list(runs)


def _telling(
    keys: Iterable[str], settings: Sequence[dict[str, str]], known: list[str]
) -> list[str]:
    """Of `keys` those that tell runs apart which `known` and the keys before do not."""
    chosen: list[str] = []
    for key in keys:
        now = {tuple(s.get(k) for k in known + chosen) for s in settings}
        more = {tuple(s.get(k) for k in [*known, *chosen, key]) for s in settings}
        if len(more) > len(now):
            chosen.append(key)
    return chosen


class UnknownKey(ConfigError):
    """A setting that no run has; carries those there are."""

    def __init__(self, argument: str, key: str, valid: list[str]) -> None:
        super().__init__(f"{argument}={key}: no run has that setting")
        self.key, self.valid = key, valid


def _groups(runs: Sequence[RunRecord], keys: Sequence[str]) -> list[Group]:
    """Groups in the order of their first run; jobs without a run go where their overrides say."""
    whole = _whole(runs)
    same = {
        k: v for k, v in whole[0].settings.items()
        if all(r.settings.get(k) == v for r in whole)
    }  # fmt: skip
    found: dict[tuple[str, ...], list[RunRecord]] = {}
    for run in runs:
        settings = same | run.settings
        found.setdefault(tuple(settings.get(k, "?") for k in keys), []).append(run)
    first = _recipe(whole[0].settings)
    groups = []
    for cell, members in found.items():
        recipe = _recipe(members[0].settings) if members[0] in whole else first
        differs = {k: v for k, v in recipe.items() if first.get(k) != v}
        machines = dict.fromkeys(m.machine for m in members if m.finished)
        groups.append(
            Group(dict(zip(keys, cell, strict=True)), members, differs, " | ".join(machines))
        )
    return groups


def _recipe(settings: dict[str, str]) -> dict[str, str]:
    return {
        k: _SAMPLER.get(v, v) if k == "buffer" else v for k, v in settings.items() if is_recipe(k)
    }


# -- one group ------------------------------------------------------------------------------------


def _trained(run: RunRecord) -> bool:
    return "return/train" in run.curves


def _rates(group: Group) -> list[float]:
    return [run.final["env_steps_per_s"] for run in group.done if run.final.get("env_steps_per_s")]


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


def _returns(group: Group, steps: float, metric: str) -> list[float]:
    values = [_return_at(run, steps, metric) for run in group.done]
    return [v for v in values if not math.isnan(v)]


def seconds_of(run: RunRecord, steps: np.ndarray) -> np.ndarray:
    """Seconds of training at the given env steps of a run."""
    x, rates = run.curves["throughput/env_steps_per_s"]
    return np.interp(steps, x, stats.training_seconds(x, rates))


def _measure(group: Group, steps: float, metric: str, threshold: float | None) -> None:
    rates = _rates(group)
    if rates:
        group.speed = stats.middle(rates, np.median)
        group.steady = all(run.final.get("steady") == 1 for run in group.done)
    returns = _returns(group, steps, metric)
    if returns:
        group.returns = stats.middle(returns, stats.iqm)
    group.memory_bytes = _median(_peak(run, "cpu/rss_bytes") for run in group.done)
    group.gpu_bytes = _median(_peak(run, "gpu/mem_used_bytes") for run in group.done)
    group.compile_s = _median(run.final.get("compile_s", math.nan) for run in group.done)
    group.joules_per_step = _median(map(_joules_per_step, group.done))
    if threshold is not None:
        reached = [_reach(run, threshold) for run in group.done if _trained(run)]
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


def _peak(run: RunRecord, metric: str) -> float:
    return float(run.curves[metric][1].max()) if metric in run.curves else math.nan


def _joules_per_step(run: RunRecord) -> float:
    """GPU energy: mean power of each window times its seconds, over the env steps."""
    if "gpu/power_w" not in run.curves:
        return math.nan
    steps, watts = run.curves["gpu/power_w"]
    seconds = np.diff(seconds_of(run, steps), prepend=0.0)
    return float((watts * seconds).sum() / steps[-1])


def _median(values: Iterable[float]) -> float:
    known = [v for v in values if not math.isnan(v)]
    return float(np.median(known)) if known else math.nan


# -- against the baseline -------------------------------------------------------------------------


def _check_baseline(base: dict[str, str], groups: Sequence[Group]) -> None:
    keys = list(groups[0].levels)
    for key in base:
        if key not in keys:
            raise UnknownKey("baseline", key, keys)
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
    if comparable[0].machine != group.machine:
        return "machine differs"
    return comparable[0]


def _against(
    group: Group, base: Group | str, steps: float, metric: str, margin: float | None
) -> None:
    if not group.done:
        group.verdict = "no run finished"
    elif isinstance(base, str):
        group.verdict = base
    elif group is base:
        group.verdict = "1"
    else:
        rates, of_base = _rates(group), _rates(base)
        if not (rates and of_base):
            group.verdict = "no baseline"
        elif not (group.steady and base.steady):
            group.verdict = "too short"
        else:
            group.speedup = stats.speedup(rates, of_base)
            group.speedup_bootstrap = stats.bootstrap_speedup(rates, of_base)
            group.verdict = in_words(group.speedup)
        returns, others = _returns(group, steps, metric), _returns(base, steps, metric)
        if returns and others:
            allowed = _gained(base, float(stats.iqm(others))) if margin is None else margin
            if allowed is None:
                group.parity = Parity(Estimate(math.nan), math.nan, "nothing learned")
            else:
                group.parity = stats.parity(returns, others, allowed)


def _gained(base: Group, reached: float) -> float | None:
    """The default margin, from the first training return to the one reached; None for no gain."""
    first = _median(run.curves["return/train"][1][0] for run in base.done if _trained(run))
    return PARITY_SHARE * (reached - first) if reached > first else None


def in_words(ratio: Estimate) -> str:
    """A speed-up as the tables say it."""
    if not ratio.known:
        return f"{ratio.value:.3g}x (one run)"
    interval = f"[{ratio.low:.3g}, {ratio.high:.3g}]"
    return f"{ratio.value:.3g}x {interval}" if ratio.excludes(1) else f"no difference {interval}"


# -- effects of a factorial sweep -----------------------------------------------------------------


def _effects(found: Comparison, first: Group) -> None:
    alike = [
        g for g in found.groups
        if g.recipe == first.recipe and g.machine == first.machine and g.steady and _rates(g)
    ]  # fmt: skip
    factors = [k for k in found.by if len({g.levels[k] for g in alike}) > 1]
    if not factors:
        return
    cells = {tuple(g.levels[k] for k in factors): _rates(g) for g in alike}
    design = stats.Factorial(factors, cells, first.levels)
    found.factors, found.effects = factors, design.main_effects()
    if len(factors) == 1:
        # The table's own speed-ups: a second interval for the same ratio would only confuse.
        ratios = {g.levels[factors[0]]: g.speedup for g in alike}
        found.effects = [
            e._replace(ratio=ratio) for e in found.effects if (ratio := ratios[e.level])
        ]
    found.interactions = [i for i in design.interactions() if i.ratio.excludes(1)]
    for effect in list(found.effects):
        phrase, conditional = _phrase(effect, found, design)
        found.answer.append(phrase)
        found.effects += conditional


def _phrase(effect: Effect, found: Comparison, design: stats.Factorial) -> tuple[str, list[Effect]]:
    """One level's effect in words; where it depends on a factor of greater effect, by that one."""
    name, ratio = short(effect.factor, effect.level), effect.ratio
    sizes = {(e.factor, e.level): abs(math.log(e.ratio.value)) for e in found.effects}
    mine = sizes[effect.factor, effect.level]
    for interaction in found.interactions:
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


def short(factor: str, level: str) -> str:
    """`envpool` for an option, `backend.num_threads=2` for a value."""
    says_it_all = "." not in factor and not _number(level) and level not in ("default", "none")
    return level if says_it_all else f"{factor}={level}"


def _number(text: str) -> bool:
    return text.lstrip("-").replace(".", "", 1).isdigit()


# -- what to know before believing ----------------------------------------------------------------


def _notes(found: Comparison, study: StudyRecord) -> list[str]:
    notes = []
    runs = study.runs
    for group in found.groups:
        if group.recipe:
            changed = ", ".join(f"{k}={v}" for k, v in group.recipe.items())
            notes.append(f"{group.name}: recipe differs ({changed}); its speed is no speed-up")
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
        notes.append(f"commit: {', '.join(commits)}")
        if len(commits) > 1:
            notes.append("the runs are of different commits")
    running = sum(run.status == "running" for run in runs)
    if running:
        notes.append(f"{running} runs have not ended and are left out")
    together = _at_once(runs)
    if together > 1:
        notes.append(
            f"up to {together} runs ran at once and shared the machine: rates are lower and less "
            "certain than alone"
        )
    few = min(len(group.done) for group in found.groups if group.done)
    if few < 3:
        runs_ = "run" if few == 1 else "runs"
        notes.append(f"some settings have {few} {runs_} only: more seeds narrow the intervals")
    return notes


def _at_once(runs: Sequence[RunRecord]) -> int:
    """Most runs that trained at the same time on one machine."""
    spans = [(r.started, r.started + r.final.get("wall_s", 0.0), r.machine) for r in runs]
    return max(
        (sum(s <= t < e and m == machine for s, e, m in spans) for t, _, machine in spans),
        default=0,
    )


def _pooled(found: Comparison) -> list[str]:
    """What `by` leaves out although it differs inside a group."""
    pooled: dict[str, set[str]] = {}
    for group in found.groups:
        settings = [run.settings for run in group.done]
        for key in settings[0] if settings else ():
            values = {s.get(key, "") for s in settings}
            if len(values) > 1 and not key.startswith("threads"):
                pooled.setdefault(key, set()).update(values)
    return [f"groups pool over {key}: {', '.join(sorted(v))}" for key, v in pooled.items()]
