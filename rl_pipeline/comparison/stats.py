"""Statistics of comparisons on plain arrays; the methods are scipy's.

Speeds are compared as ratios, that is on log rates. Their intervals are Welch's: with the two to
five runs of a usual sweep a percentile or BCa bootstrap calls 35 % (n=2), 21 % (n=3) and 11 %
(n=5) of comparisons without any difference different, Welch about 5 % (tests/test_stats.py).
Returns are shown by the interquartile mean (Agarwal et al. 2021, arXiv:2108.13264). Whether
learning suffered is asked of the mean: a trimmed one passes over the rare collapse that must count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from scipy import special, stats

LEVEL = 0.95
TRIM = 0.25
RESAMPLES = 2000
FEW = 5
"""Below this many runs a bootstrap interval of one group is little more than their range."""
LEAST = 3
"""Runs on each side below which nothing is said about learning."""
SURE = 10
"""Runs on each side below which learning is never called not worse: what happens to every fourth
run (26 %) is missing from ten of them in 5 % of cases, from five in 22 %, from three in 41 %."""


class Estimate(NamedTuple):
    """A value with its interval; without one (`low` and `high` NaN) it rests on too few runs."""

    value: float
    low: float = math.nan
    high: float = math.nan

    @property
    def is_range(self) -> bool:
        """Whether `low` and `high` are the least and the largest of few runs, no interval."""
        return False

    @property
    def known(self) -> bool:
        """Whether there is an interval."""
        return not math.isnan(self.low)

    def excludes(self, value: float) -> bool:
        """Whether the interval is there and `value` lies outside."""
        return self.known and not self.low <= value <= self.high

    def exp(self) -> Estimate:
        """From a difference of logarithms to a ratio."""
        return Estimate(*(math.exp(x) for x in self))


class Range(Estimate):
    """A value with the range of its runs, which are too few for an interval."""

    @property
    def is_range(self) -> bool:
        """They are."""
        return True


def bootstrap(
    values: np.ndarray, statistic: Any, axis: int = 0, resamples: int = RESAMPLES
) -> tuple[np.ndarray, np.ndarray]:
    """95 % percentile bootstrap interval of `statistic(x, axis=)` over runs, along `axis`.

    Percentile, as in rliable: with few seeds near a task's maximum BCa degenerates.
    """
    estimate = stats.bootstrap(
        (values,), statistic, axis=axis, n_resamples=resamples, method="percentile",
        confidence_level=LEVEL, rng=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    return estimate.low, estimate.high


def iqm(values: Any, axis: int = 0) -> Any:
    """Interquartile mean: the mean without the lowest and the highest quarter."""
    return stats.trim_mean(values, TRIM, axis=axis)


def middle(values: Sequence[float], statistic: Any) -> Estimate:
    """`statistic` (np.median, iqm) of runs with its bootstrap interval, or of FEW their range.

    There is none for a single run.
    """
    array = np.asarray(values, float)
    value = float(statistic(array, axis=0))
    if len(array) < 2:
        return Estimate(value)
    if len(array) < FEW:
        return Range(value, float(array.min()), float(array.max()))
    low, high = bootstrap(array, statistic)
    return Estimate(value, float(low), float(high))


def difference(values: Sequence[float], base: Sequence[float], level: float = LEVEL) -> Estimate:
    """Difference of means with the interval of Welch's t test (Welch 1947)."""
    sides = [np.asarray(x, float) for x in (values, base)]
    value = float(sides[0].mean() - sides[1].mean())
    if min(map(len, sides)) < 2:
        return Estimate(value)
    squares = [x.var(ddof=1) / len(x) for x in sides]
    if not sum(squares):
        return Estimate(value, value, value)  # all runs alike: below, zero by zero
    df = sum(squares) ** 2 / sum(s**2 / (len(x) - 1) for s, x in zip(squares, sides, strict=True))
    half = float(special.stdtrit(df, (1 + level) / 2) * math.sqrt(sum(squares)))
    return Estimate(value, value - half, value + half)


def together(number: int) -> float:
    """The level of each of `number` intervals that hold together at 95 % (Bonferroni)."""
    return 1 - (1 - LEVEL) / max(number, 1)


def speedup(rates: Sequence[float], base: Sequence[float], level: float = LEVEL) -> Estimate:
    """Ratio of the geometric mean rates of two independent groups of runs."""
    return difference(np.log(rates).tolist(), np.log(base).tolist(), level).exp()


class Parity(NamedTuple):
    """Whether learning suffered: `verdict` is not worse, worse, open or unknown (and, from a
    comparison, identical, incomplete or nothing learned)."""

    difference: Estimate
    """Mean minus the baseline's, in return; two-sided 90 %, so 95 % on the side that matters."""
    margin: float
    verdict: str


def parity(returns: Sequence[float], base: Sequence[float], margin: float) -> Parity:
    """Non-inferiority of the mean: not worse if its loss is surely below `margin`.

    That takes SURE runs a side, and that the loss stays below although the worst run came once more
    and the baseline's best as well: of skewed returns Welch's interval alone is too narrow. At most
    5 % of losses as large as the margin pass then (6 % of ten runs against twenty), be the returns
    normal, capped, of two gaits or heavy-tailed (tests/test_stats.py). Not held are losses by less
    than a quarter of the runs, which ten may not show (24 % pass where one of 7.5 collapses), and
    of returns that one side alone has strongly skewed (13 %). To be worse takes LEAST
    runs: three that differ in all from three have 1 chance in 20.
    """
    level = 2 * LEVEL - 1
    estimate = difference(returns, base, level)
    runs = min(len(returns), len(base))
    if runs < LEAST:
        return Parity(estimate, margin, "unknown")
    again = difference([*returns, min(returns)], [*base, max(base)], level)
    estimate = estimate._replace(low=min(estimate.low, again.low))
    if estimate.low > -margin and runs >= SURE:
        return Parity(estimate, margin, "not worse")
    return Parity(estimate, margin, "worse" if estimate.high < -margin else "open")


# -- a factorial sweep ----------------------------------------------------------------------------


class Effect(NamedTuple):
    """Effect on the speed, as a ratio, of changing `factor` from `base` to `level`."""

    factor: str
    level: str
    base: str
    ratio: Estimate
    given: tuple[str, str] | None = None
    """(other factor, its level) where the effect holds; None for the mean over all of them."""


class Interaction(NamedTuple):
    """By how much the effect of one factor depends on another: the ratio of its two effects."""

    first: tuple[str, str, str]
    """Factor, level, base."""
    second: tuple[str, str, str]
    ratio: Estimate


Cell = tuple[str, ...]


class Factorial:
    """Effects on the log rates of a crossed design, as contrasts of cell means, pooled variance.

    `cells` maps the levels of the factors, in their order, to the rates of the runs. The first
    level of a factor (or the one in `bases`) is what its others are compared with. Cells that are
    missing are left out of the means on both sides.
    """

    def __init__(
        self, factors: Sequence[str], cells: Mapping[Cell, Sequence[float]],
        bases: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.factors = list(factors)
        self._logs = {cell: np.log(rates) for cell, rates in cells.items() if len(rates)}
        self.levels: dict[str, list[str]] = {}
        for i, factor in enumerate(self.factors):
            seen = list(dict.fromkeys(cell[i] for cell in self._logs))
            base = (bases or {}).get(factor)
            self.levels[factor] = sorted(seen, key=lambda x: x != base) if base in seen else seen
        self._df = sum(len(x) - 1 for x in self._logs.values())
        squares = sum(float(((x - x.mean()) ** 2).sum()) for x in self._logs.values())
        self._variance = squares / self._df if self._df else math.nan

    def _contrast(self, parts: Sequence[Mapping[Cell, int]], level: float) -> Estimate | None:
        """Mean over `parts` of their signed sums of cell means; parts that lack a cell fall out."""
        whole = [p for p in parts if all(cell in self._logs for cell in p)]
        if not whole:
            return None
        value = sum(s * self._logs[c].mean() for p in whole for c, s in p.items()) / len(whole)
        if not self._df:
            return Estimate(float(value)).exp()
        spread = sum(1 / len(self._logs[c]) for p in whole for c in p) / len(whole) ** 2
        half = stats.t.ppf((1 + level) / 2, self._df) * math.sqrt(self._variance * spread)
        return Estimate(float(value), float(value - half), float(value + half)).exp()

    def _contexts(self, without: Sequence[str]) -> list[dict[str, str]]:
        free = [f for f in self.factors if f not in without]
        return [dict(zip(free, x, strict=True)) for x in product(*(self.levels[f] for f in free))]

    def _cell(self, levels: Mapping[str, str]) -> Cell:
        return tuple(levels[f] for f in self.factors)

    def effect(
        self, factor: str, level: str, given: tuple[str, str] | None = None
    ) -> Effect | None:
        """Effect of one level against the factor's base; None where no cells match.

        The intervals of all levels hold together, and so do those under every level of `given`.
        """
        base = self.levels[factor][0]
        number = sum(len(levels) - 1 for levels in self.levels.values())
        number *= len(self.levels[given[0]]) if given else 1
        fixed = dict([given]) if given else {}
        parts = [
            {self._cell(c | fixed | {factor: level}): 1, self._cell(c | fixed | {factor: base}): -1}
            for c in self._contexts([factor, *fixed])
        ]
        found = self._contrast(parts, together(number))
        return Effect(factor, level, base, found, given) if found else None

    def main_effects(self) -> list[Effect]:
        """Each level against its factor's base, averaged over the other factors."""
        found = [self.effect(f, level) for f in self.factors for level in self.levels[f][1:]]
        return [effect for effect in found if effect]

    def interactions(self) -> list[Interaction]:
        """Interactions of all pairs of factors; the intervals hold together."""
        pairs = [
            (f, a, g, c)
            for i, f in enumerate(self.factors) for g in self.factors[i + 1 :]
            for a in self.levels[f][1:] for c in self.levels[g][1:]
        ]  # fmt: skip
        found = []
        for f, a, g, c in pairs:
            b, d = self.levels[f][0], self.levels[g][0]
            parts = [
                {
                    self._cell(x | {f: left, g: right}): sign
                    for left, right, sign in ((a, c, 1), (b, c, -1), (a, d, -1), (b, d, 1))
                }
                for x in self._contexts([f, g])
            ]
            ratio = self._contrast(parts, together(len(pairs)))
            if ratio:
                found.append(Interaction((f, a, b), (g, c, d), ratio))
        return found


# -- curves ---------------------------------------------------------------------------------------


def at_step(steps: np.ndarray, values: np.ndarray, at: float) -> float:
    """A curve's value at env step `at`, between its points; NaN where it does not reach so far."""
    if not len(steps) or at > steps[-1] or at < steps[0]:
        return math.nan
    return float(np.interp(at, steps, values))


def first_reach(x: np.ndarray, values: np.ndarray, threshold: float) -> float:
    """The first `x` (env steps, seconds) at which `values` is `threshold` or more; inf for none."""
    reached = np.flatnonzero(values >= threshold)
    return float(x[reached[0]]) if len(reached) else math.inf


def training_seconds(steps: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """Seconds of training at each logged row, from the rows' env steps per second.

    Evaluation, checkpoints and the gap before a resume are no training and not in it.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds = np.diff(steps, prepend=0.0) / rates
    return np.cumsum(np.where(np.isfinite(seconds), seconds, 0.0))
