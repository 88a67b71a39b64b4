"""Statistics on arrays with known truth: what is planted is found, what is not is not."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import scipy.stats
from scipy.stats import binom, ttest_ind

from rl_pipeline.comparison import stats
from rl_pipeline.comparison.stats import Estimate

NOISE = 0.05


def rates(rng, mean, n, noise=NOISE):
    return mean * np.exp(rng.normal(0, noise, n))


def within_nominal(hits: int, trials: int, rate: float) -> bool:
    """Whether `hits` is what `rate` gives, in all but one of 10,000 cases."""
    low, high = binom.interval(0.9999, trials, rate)
    return low <= hits <= high


@pytest.mark.parametrize("n", [3, 5, 10])
def test_no_difference_is_called_different_at_the_nominal_rate(n):
    rng, trials = np.random.default_rng(n), 1000
    wrong = sum(
        stats.speedup(rates(rng, 100, n), rates(rng, 100, n)).excludes(1) for _ in range(trials)
    )
    assert within_nominal(wrong, trials, 0.05)


def test_two_runs_each_err_on_the_careful_side():
    rng = np.random.default_rng(0)
    wrong = sum(
        stats.speedup(rates(rng, 100, 2), rates(rng, 100, 2)).excludes(1) for _ in range(500)
    )
    assert wrong <= binom.ppf(0.9999, 500, 0.05)


def test_the_bootstrap_of_few_runs_is_not_what_the_verdict_rests_on():
    """The reason for Welch: with three runs the bootstrap sees a difference in every fifth pair."""
    rng, trials = np.random.default_rng(1), 200

    def excludes_one() -> bool:
        low, high = scipy.stats.bootstrap(
            [np.log(rates(rng, 100, 3)), np.log(rates(rng, 100, 3))],
            lambda x, y, axis: x.mean(axis) - y.mean(axis), n_resamples=2000,
            method="percentile", rng=np.random.default_rng(0),
        ).confidence_interval  # fmt: skip
        return bool(low > 0 or high < 0)

    wrong = sum(excludes_one() for _ in range(trials))
    assert wrong > binom.ppf(0.9999, trials, 0.05)


def test_a_planted_speedup_lies_in_its_interval_at_the_nominal_rate():
    rng, trials = np.random.default_rng(2), 1000
    found = [stats.speedup(rates(rng, 290, 4), rates(rng, 100, 4)) for _ in range(trials)]
    assert within_nominal(sum(e.excludes(2.9) for e in found), trials, 0.05)
    assert sum(e.excludes(1) for e in found) == trials
    assert np.mean([e.value for e in found]) == pytest.approx(2.9, rel=0.01)


def test_a_single_run_has_no_interval_and_so_no_verdict():
    ratio = stats.speedup([300.0], [100.0, 101.0])
    assert ratio.value == pytest.approx(2.985, rel=1e-3)
    assert not ratio.known and not ratio.excludes(1)
    assert not stats.middle([3.0], np.median).known


def test_runs_that_are_all_alike_have_an_interval_of_no_width():
    assert stats.difference([500.0] * 3, [500.0] * 3) == Estimate(0, 0, 0)
    assert stats.middle([500.0] * 3, stats.iqm) == Estimate(500, 500, 500)


def test_the_iqm_ignores_the_outer_quarters():
    assert stats.iqm([-1000, 1, 2, 3, 4, 5, 6, 9000]) == 3.5
    estimate = stats.middle([1, 2, 3, 4, 5, 6, 7, 8], stats.iqm)
    assert estimate.low < 4.5 == estimate.value < estimate.high


@pytest.mark.parametrize(
    ("shift", "verdict"), [(0, "not worse"), (-50, "worse"), (-10, "open"), (60, "not worse")]
)
def test_parity_is_a_matter_of_the_margin(shift, verdict):
    rng = np.random.default_rng(3)
    base = rng.normal(400, 5, 10)
    assert stats.parity(rng.normal(400 + shift, 5, 10), base, 10.0).verdict == verdict
    assert stats.parity([400.0], [400.0], 10.0).verdict == "unknown"


def test_the_interval_of_a_difference_is_the_one_of_welch():
    rng = np.random.default_rng(3)
    a, b = rng.normal(1, 5, 7), rng.normal(0, 1, 4)
    found = ttest_ind(a, b, equal_var=False).confidence_interval(0.9)
    assert stats.difference(a, b, 0.9)[1:] == pytest.approx((found.low, found.high))


def two(high, low, share, noise=0.0):
    """`low` in a share of the runs, `high` in the others."""
    return lambda rng, n: np.where(rng.random(n) < share, low, high) + rng.normal(0, noise, n)


def normal(mean, spread):
    return lambda rng, n: rng.normal(mean, spread, n)


def capped(mean):
    """Of a game that ends at 500."""
    return lambda rng, n: np.minimum(500, rng.normal(mean, 100, n))


def heavy(mean, df):
    return lambda rng, n: mean + 23 * rng.standard_t(df, n)


def skewed(mean):
    return lambda rng, n: mean - 30 * (rng.lognormal(0, 1, n) - math.exp(0.5))


def granted(worse, base, margin, sizes, trials) -> int:
    """How often the one is called not worse than the other."""
    rng = np.random.default_rng(4)
    return sum(
        stats.parity(worse(rng, sizes[0]), base(rng, sizes[1]), margin).verdict == "not worse"
        for _ in range(trials)
    )


# What is tried, what it is compared with, and a margin that the true means differ by, or more.
LOSSES = {
    "normal": (normal(-47, 47), normal(0, 47), 47),
    "spread alike in neither": (normal(-47, 140), normal(0, 15), 47),
    "capped": (capped(472.2), capped(600), 47),
    "heavy-tailed": (heavy(-47, 2), heavy(0, 2), 47),
    "skewed": (skewed(-47), skewed(0), 47),
    "good gait in 25 %": (two(4000, 1900, 0.842, 120), two(4000, 1900, 0.75, 120), 192),
    "good gait in half": (two(4000, 1900, 0.592, 120), two(4000, 1900, 0.5, 120), 192),
    "good gait in 75 %": (two(4000, 1900, 0.342, 120), two(4000, 1900, 0.25, 120), 192),
    "collapse, by 105": (two(500, 150, 0.3), two(500, 150, 0), 47),
    "collapse of noisy runs, by 105": (two(400, 50, 0.3, 5), two(400, 50, 0, 5), 47),
    "collapses on both sides, by 105": (two(500, 150, 0.4), two(500, 150, 0.1), 47),
    "half a collapse, at the margin": (two(500, 330, 0.277), two(500, 330, 0), 47),
}


@pytest.mark.parametrize("shape", LOSSES)
def test_a_loss_passes_for_none_in_one_case_of_twenty_at_most(shape):
    """3, 5 and 8 runs prove nothing: a collapse of every third run misses 3 runs in 30 %."""
    worse, base, margin = LOSSES[shape]
    for few in ((3, 3), (5, 5), (8, 8), (20, 8)):
        assert granted(worse, base, margin, few, 20) == 0
    for sizes in ((10, 10), (10, 20), (20, 10)):
        assert granted(worse, base, margin, sizes, 1000) <= binom.ppf(0.9999, 1000, 0.05)


def test_a_collapse_rarer_than_every_fourth_run_may_pass_for_none():
    """The limit that is told beside the verdict: nobody sees in ten runs what hits one of eight."""
    rare = granted(two(500, 150, 0.134), two(500, 150, 0), 47, (10, 10), 400)
    assert within_nominal(rare, 400, (1 - 0.134) ** 10)
    assert (1 - 0.26) ** stats.SURE < 0.05
    # The other one: a long tail of bad runs on one side alone, at the margin; half as much again
    # is seen.
    assert granted(skewed(-47), normal(0, 5), 47, (10, 10), 1000) < 180
    assert granted(skewed(-71), normal(0, 5), 47, (10, 10), 1000) < 50


@pytest.mark.parametrize(
    ("draw", "margin"),
    [
        (normal(400, 30), 47),
        (capped(600), 47),
        (capped(500), 100),
        (heavy(400, 3), 69),
        (skewed(400), 94),
        (two(500, 480, 0.2), 47),
        (two(500, 150, 0), 0.1),
    ],
)
def test_equal_groups_of_ten_are_mostly_not_worse(draw, margin):
    assert granted(draw, draw, margin, (10, 10), 200) > 100


def test_an_interval_without_width_proves_nothing():
    assert stats.parity([500, 500, 500, 500, 154], [500.0] * 5, 47.0).verdict == "open"
    assert stats.parity([500.0] * 5, [500.0] * 5, 47.0).verdict == "open"
    # Ten without one collapse are what proves something.
    assert stats.parity([500.0] * 10, [500.0] * 10, 47.0).verdict == "not worse"
    assert stats.parity([500.0] * 9 + [154], [500.0] * 10, 47.0).verdict == "open"


def test_what_is_not_worse_by_the_margin_is_called_worse_in_one_case_of_twenty_at_most():
    rng, trials = np.random.default_rng(8), 300
    for worse, base, margin in (LOSSES[name] for name in ("normal", "heavy-tailed", "skewed")):
        for n in (3, 5, 10):
            found = sum(
                stats.parity(worse(rng, n), base(rng, n), margin).verdict == "worse"
                for _ in range(trials)
            )
            assert found <= binom.ppf(0.9999, trials, 0.05)


def design(rng, n=4, compile_with_envpool=1.4, noise=0.03):
    """envpool x2.9, bf16 nothing, compile only with envpool."""
    cells = {}
    for backend in ("gymnasium", "envpool"):
        for precision in ("fp32", "bf16"):
            for compiled in ("eager", "default"):
                mean = 1000 * (2.9 if backend == "envpool" else 1)
                if backend == "envpool" and compiled == "default":
                    mean *= compile_with_envpool
                cells[backend, precision, compiled] = rates(rng, mean, n, noise)
    return stats.Factorial(["backend", "precision", "compile"], cells)


def test_a_factorial_sweep_gives_back_its_effects():
    found = design(np.random.default_rng(5))
    backend, bf16, compiled = found.main_effects()
    # Averaged over compile on the log scale.
    assert not backend.ratio.excludes(2.9 * math.sqrt(1.4)) and backend.ratio.excludes(2.9)
    assert not bf16.ratio.excludes(1)
    assert not compiled.ratio.excludes(math.sqrt(1.4)) and compiled.ratio.excludes(1)
    (depends,) = [i for i in found.interactions() if i.ratio.excludes(1)]
    assert {depends.first[0], depends.second[0]} == {"backend", "compile"}
    assert not depends.ratio.excludes(1.4)
    inside = found.effect("compile", "default", ("backend", "envpool"))
    outside = found.effect("compile", "default", ("backend", "gymnasium"))
    assert not inside.ratio.excludes(1.4) and not outside.ratio.excludes(1)


def test_effects_that_are_not_there_are_seen_at_the_nominal_rate():
    """At most 5 % of sweeps have one among all their effects, and among their interactions."""
    rng, trials = np.random.default_rng(6), 400
    mains = inside = pairs = 0
    for _ in range(trials):
        cells = {cell: rates(rng, 100, 3) for cell in product("ab", "cd", "ef")}
        found = stats.Factorial(["x", "y", "z"], cells)
        mains += any(e.ratio.excludes(1) for e in found.main_effects())
        pairs += any(i.ratio.excludes(1) for i in found.interactions())
        given = [found.effect(f, b, ("z", z)) for f, b in ("xb", "yd") for z in "ef"]
        inside += any(e.ratio.excludes(1) for e in given)
    for wrong in (mains, inside, pairs):
        assert wrong <= binom.ppf(0.9999, trials, 0.05)
    assert mains >= binom.ppf(0.0001, trials, 0.03)


def test_a_missing_cell_is_left_out_on_both_sides():
    cells = {("a", "x"): [100.0, 101], ("b", "x"): [200.0, 202], ("b", "y"): [900.0, 909]}
    found = stats.Factorial(["f", "g"], cells)
    f, g = found.main_effects()
    assert f.ratio.value == pytest.approx(2.0, rel=1e-3)
    assert g.ratio.value == pytest.approx(4.5, rel=1e-3)
    assert found.interactions() == []


def test_one_run_per_cell_has_effects_without_intervals():
    cells = {("a", "x"): [100.0], ("b", "x"): [200.0], ("a", "y"): [100.0], ("b", "y"): [200.0]}
    effect = stats.Factorial(["f", "g"], cells).main_effects()[0]
    assert effect.ratio.value == pytest.approx(2) and not effect.ratio.known


def test_curves_are_read_at_equal_steps_and_never_beyond_their_end():
    steps, values = np.array([100.0, 200, 300]), np.array([1.0, 3, 4])
    assert stats.at_step(steps, values, 150) == 2
    assert math.isnan(stats.at_step(steps, values, 301))
    assert stats.first_reach(steps, values, 3) == 200
    assert stats.first_reach(steps, values, 5) == math.inf


def test_training_seconds_come_from_the_windows_rates():
    seconds = stats.training_seconds(np.array([100.0, 300, 400]), np.array([100.0, 50, 100]))
    assert seconds.tolist() == [1, 5, 6]


def test_few_runs_have_a_range_and_no_say_about_learning():
    assert stats.middle([3.0, 1.0, 2.0], np.median) == (2.0, 1.0, 3.0)
    five = stats.middle([3.0, 1.0, 2.0, 5.0, 4.0], np.median)
    assert 1.0 <= five.low < 3.0 < five.high <= 5.0
    # Two runs that agree by chance would pass any test.
    assert stats.parity([126.5, 148.4], [500.0, 500.0], 10.0).verdict == "unknown"
    assert stats.parity([126.5, 148.4, 150.0], [500.0] * 3, 10.0).verdict == "worse"
