"""Groups of runs that are alike: by the settings that took effect, never across recipes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rl_pipeline.comparison.records import RunRecord
from rl_pipeline.comparison.stats import Effect, Estimate, Interaction, Parity
from rl_pipeline.config.options import near
from rl_pipeline.errors import ConfigError

SAME_RECIPE = (
    "backend", "backend.num_threads", "backend.lanes", "backend.step_timeout_s", "threads",
    "buffer.placement", "buffer.prefetch", "buffer.save", "memory.keep_freed", "precision",
    "compile", "device", "mode", "profile",
)  # fmt: skip
"""Settings that change how fast the same learning runs; every other one belongs to the recipe."""
_GROUPS_OF_CHOICES = ("threads", "precision", "compile", "device", "mode", "profile")
# Buffers that draw alike differ in where they keep their rows only.
_SAMPLER = {"uniform": "uniform", "deque": "uniform", "memmap": "uniform"}


@dataclass
class Group:
    """Runs alike in all but their seed, and what came of them."""

    levels: dict[str, str]
    runs: list[RunRecord]
    recipe: dict[str, str] = field(default_factory=dict)
    """Recipe settings that differ from the baseline group's; {} for the same recipe."""
    speed: Estimate | None = None
    """Env steps/s, median over runs."""
    steady: bool = False
    speedup: Estimate | None = None
    """Against the baseline group of the same recipe and machine; those of all groups hold together
    at 95 %."""
    verdict: str = ""
    """The speed-up in words, or why there is none."""
    returns: Estimate | None = None
    """IQM at equal steps."""
    parity: Parity | None = None
    below: int = 0
    """Runs below the baseline's return by more than the margin, if a larger part than of its own:
    the interquartile mean of the column before passes over one of five."""
    reached: int = 0
    """Runs that reached the threshold."""
    steps_to: float = math.nan
    """Env steps to the threshold, median over runs; inf unless more than half of them reach it."""
    seconds_to: float = math.nan
    figures: dict[str, float] = field(default_factory=dict)
    """Medians over runs of what `columns` names; NaN where no run has one."""

    @property
    def name(self) -> str:
        """The levels as overrides."""
        return " ".join(f"{k}={v}" for k, v in self.levels.items()) or "all"

    @property
    def label(self) -> str:
        """The levels, short."""
        return " ".join(short(k, v) for k, v in self.levels.items()) or "all"

    @property
    def done(self) -> list[RunRecord]:
        """Runs that finished."""
        return [run for run in self.runs if run.finished]

    @property
    def rates(self) -> list[float]:
        """Steady env steps/s of the runs that finished."""
        return [r.final["env_steps_per_s"] for r in self.done if r.final.get("env_steps_per_s")]

    @property
    def machine(self) -> str:
        """Machines on which its runs finished."""
        return " | ".join(sorted({run.machine for run in self.done}))

    @property
    def one_machine(self) -> bool:
        """Whether they all ran on one machine: else the group has no comparable rate."""
        return len({run.machine for run in self.done}) < 2

    @property
    def ended(self) -> list[RunRecord]:
        """Runs that do not run any more."""
        return [run for run in self.runs if run.status != "running"]

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
    """Effect of each choice on the speed, one phrase each."""
    notes: list[str] = field(default_factory=list)
    """Warnings that a reader must know before believing the rest."""


def short(factor: str, level: str) -> str:
    """`envpool` for an option, `backend.num_threads=2` for a value."""
    says_it_all = "." not in factor and not _number(level) and level not in ("default", "none")
    return level if says_it_all else f"{factor}={level}"


def _number(text: str) -> bool:
    return text.lstrip("-").replace(".", "", 1).isdigit()


def is_recipe(key: str) -> bool:
    """Whether a setting belongs to the recipe: two values of it are two ways to learn."""
    return key not in SAME_RECIPE and key.split(".")[0] not in _GROUPS_OF_CHOICES


def group_keys(
    runs: Sequence[RunRecord], by: Sequence[str] | None, varied: Sequence[str]
) -> list[str]:
    """The settings that make the groups: `by` and what makes recipes, or all that differ."""
    whole = [run.settings for run in _whole(runs)]
    keys = list(dict.fromkeys(key for settings in whole for key in settings))
    # Of jobs that ended before they had settings, what their overrides say.
    lost = [run.settings for run in runs if not run.whole]
    levels = {k: {settings.get(k) for settings in whole} for k in keys}
    for k, known in levels.items():
        texts = [text for text in known if text is not None]
        known |= {_as_written(settings[k], texts) for settings in lost if k in settings}
    differ = [k for k in keys if len(levels[k]) > 1]
    if by is not None:
        unknown = [key for key in by if key not in keys]
        if unknown:
            raise unknown_key("by", unknown[0], keys)
        # Never mixed: what makes another recipe is a group of its own.
        rest = telling([k for k in differ if is_recipe(k)], whole, known=list(by))
        return list(by) + rest
    # What the sweep names, then options before their details, thread plans last.
    named = [k for k in differ if k in varied]
    order = sorted(differ, key=lambda k: (k.startswith("threads"), "." in k, keys.index(k)))
    return named + telling(order, whole, known=named)


def _whole(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Runs whose settings are known in full, those that finished first."""
    known = [run for run in runs if run.whole]
    return sorted(known, key=lambda run: not run.finished) or list(runs)


def telling(keys: Iterable[str], settings: Sequence[dict[str, str]], known: list[str]) -> list[str]:
    """The keys that tell runs apart which `known` and the keys before them do not."""
    chosen: list[str] = []
    for key in keys:
        now = {tuple(s.get(k) for k in known + chosen) for s in settings}
        more = {tuple(s.get(k) for k in [*known, *chosen, key]) for s in settings}
        if len(more) > len(now):
            chosen.append(key)
    return chosen


def unknown_key(argument: str, key: str, valid: list[str]) -> ConfigError:
    """A setting that no run has."""
    return ConfigError(f"{argument}={key}: no run has that setting{near(key, valid)}")


def make_groups(runs: Sequence[RunRecord], keys: Sequence[str]) -> list[Group]:
    """Groups in the order of their first run; jobs without a run go where their overrides say."""
    whole = _whole(runs)
    same = {
        k: v for k, v in whole[0].settings.items()
        if all(r.settings.get(k) == v for r in whole)
    }  # fmt: skip
    written = {k: {str(r.settings[k]) for r in whole if k in r.settings} for k in keys}
    found: dict[tuple[str, ...], list[RunRecord]] = {}
    for run in runs:
        settings = same | run.settings
        cell = (settings.get(k, "?") for k in keys)
        if not run.whole:
            cell = (_as_written(v, written[k]) for k, v in zip(keys, cell, strict=True))
        found.setdefault(tuple(cell), []).append(run)
    return [
        Group(dict(zip(keys, cell, strict=True)), members) for cell, members in found.items()
    ]  # fmt: skip


def _as_written(text: str, known: Iterable[str]) -> str:
    """The level that an override means: it may say 1e-3 or 60_000 where settings do not."""

    def number(text: str) -> float | str:
        try:
            return float(text)
        except ValueError:
            return text

    return next((level for level in known if number(level) == number(text)), text)


def tell_recipes(groups: Sequence[Group], first: Group) -> None:
    """Say of each group in which recipe settings it differs from `first`."""
    base = _recipe(first)
    for group in groups:
        mine = _recipe(group) or base
        keys = [*mine, *(k for k in base if k not in mine)]
        group.recipe = {k: mine.get(k, "-") for k in keys if mine.get(k) != base.get(k)}


def _recipe(group: Group) -> dict[str, str]:
    """{} where no run's settings are known in full."""
    settings = next((run.settings for run in _whole(group.runs) if run.whole), {})
    return {
        k: _SAMPLER.get(v, v) if k == "buffer" else v for k, v in settings.items() if is_recipe(k)
    }
