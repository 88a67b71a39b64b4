"""The benchmarks of environments: pairing, verdicts, and that every cell is measured."""

from __future__ import annotations

import csv
import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from experiments import frame  # noqa: E402
from experiments.envs import bench, steppers  # noqa: E402
from experiments.envs.paired import Cell, summarize, take_turns  # noqa: E402
from experiments.learning import study as learning  # noqa: E402
from experiments.vectorization import study  # noqa: E402
from experiments.vectorization.naive import NaiveEnvs  # noqa: E402
from rl_pipeline.config import cli  # noqa: E402
from rl_pipeline.errors import ConfigError  # noqa: E402


class Machine:
    """A clock that only work moves, at a speed that drifts: each turn is slower than the last."""

    def __init__(self) -> None:
        self.now, self.slowness = 0.0, 1.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float):
        def advance(steps: int) -> None:
            self.now += steps * seconds * self.slowness
            self.slowness *= 1.01

        return advance


def test_turns_recover_a_ratio_that_the_drift_of_the_machine_would_hide():
    ratios = []
    for seed in range(20):
        machine = Machine()
        contenders = {"ours": machine.work(1.1e-5), "raw": machine.work(1.0e-5)}
        timing = take_turns(contenders, 0.1, np.random.default_rng(seed), machine)
        ratios.append(timing["raw"] / timing["ours"])
    assert np.mean(ratios) == pytest.approx(1 / 1.1, rel=0.01)
    assert machine.slowness > 1.3


def test_one_disturbed_turn_does_not_count():
    machine = Machine()
    steady = machine.work(1e-3)
    turns = 0

    def disturbed(steps: int) -> None:
        nonlocal turns
        turns += 1
        steady(steps)
        machine.now += 50.0 if turns == 4 else 0.0
        machine.slowness = 1.0

    timing = take_turns({"raw": disturbed}, 1000.0, np.random.default_rng(0), machine)
    assert timing["raw"] == pytest.approx(1e-3)


def test_a_cold_first_call_does_not_set_the_length_of_the_turns():
    machine, steps = Machine(), []

    def cold(count: int) -> None:
        machine.now += count * 1e-4 + (0.0 if steps else 0.5)
        steps.append(count)

    take_turns({"raw": cold}, 1.2, np.random.default_rng(0), machine)
    assert steps[-1] == pytest.approx(1000, rel=0.1)  # a tenth of a second


def repeats(ours_us, raw_us):
    return [{"ours": a * 1e-6, "raw": b * 1e-6} for a, b in zip(ours_us, raw_us, strict=True)]


def test_a_row_pairs_within_repeats():
    """The machine halves its speed between repeats; the adapter always keeps 80 %."""
    cell = Cell("pong", "envpool", 8, 2)
    row = summarize(cell, repeats([100, 200, 400], [80, 160, 320]), valid_share=0.5)
    assert row["kept"] == pytest.approx(0.8)
    assert (row["kept_low"], row["kept_high"]) == pytest.approx((0.8, 0.8))
    assert row["added_us"] == pytest.approx(40)
    assert row["env_steps_per_s"] == pytest.approx(8 * 0.5 / 200e-6)
    assert row["verdict"] == "no"


@pytest.mark.parametrize(
    ("cell", "ours", "raw", "lanes", "verdict"),
    [
        (Cell("pong", "envpool", 8, 1), [100, 101, 102], [99, 100, 101], 1, "yes"),
        (Cell("pong", "envpool", 8, 1), [100, 100, 100], [99, 96, 90], 1, "yes, within noise"),
        (Cell("cartpole", "envpool", 8, 1), [50, 50, 50], [40, 41, 39], 1, "yes"),
        (Cell("cartpole", "envpool", 8, 1), [70, 60, 70], [50, 50, 50], 1, "no, within noise"),
        (Cell("cartpole", "envpool_async", 8, 1), [70, 70, 70], [50, 50, 50], 2, "yes"),
        (Cell("cartpole", "envpool", 256, 1), [50, 50, 50], [40, 41, 39], 1, "no"),
        (Cell("pendulum", "envpool", 8, 1), [50, 50, 50], [1, 1, 1], 1, ""),
    ],
)
def test_verdicts(cell, ours, raw, lanes, verdict):
    assert summarize(cell, repeats(ours, raw), 1.0, lanes)["verdict"] == verdict


def test_cells_that_cannot_be_are_left_out():
    cells = bench.cells_of(bench.Options(), budget=2)
    assert len(cells) == len(set(cells))
    assert {c.threads for c in cells if c.backend.startswith("envpool")} == {1, 2}
    assert {c.task for c in cells if c.backend == "gymnasium_native"} == {"cartpole", "pong"}
    assert not [c for c in cells if c.num_envs > 64 and c.backend == "gymnasium_async"]
    assert {c.threads for c in bench.cells_of(bench.Options(), budget=1)} == {None, 1}


def test_a_wrong_option_is_named():
    with pytest.raises(ConfigError, match="did you mean tasks"):
        cli.parse(bench.Options, ["task=pong"])
    assert cli.parse(bench.Options, [*bench.SHORT, "num_envs=4,8"]).num_envs == (4, 8)


def test_a_failed_cell_says_why_and_leaves_the_others(monkeypatch, tmp_path):
    def visit(cell, seconds, seed):
        if cell.backend == "envpool":
            raise ValueError("no such package")
        return {"ours": 2e-5, "raw": 1e-5, "valid": 1.0}

    monkeypatch.setattr(bench, "visit", visit)
    options = bench.Options(tasks=("cartpole",), num_envs=(8,), repeats=2, out=str(tmp_path))
    cells = bench.cells_of(options, 1)
    rows = bench.measure(options, cells)
    assert len(rows) == len(cells)
    assert [r["backend"] for r in rows if "failed" in r] == ["envpool"]
    files = bench.write(options, rows, bench.machine_facts())
    assert "failed: ValueError: no such package" in files[0].read_text()


def test_lanes_leave_nothing_under_way():
    log = []
    pairs = [(lambda a, i=i: log.append(("send", i, a)), lambda i=i: log.append(("recv", i)))
             for i in "ab"]  # fmt: skip
    steppers.in_lanes(pairs, [list(range(64)), list(range(64))])(3)
    assert log[:2] == [("send", "a", 0), ("send", "b", 0)]
    assert log[2:4] == [("recv", "a"), ("send", "a", 1)]
    assert log[-2:] == [("recv", "a"), ("recv", "b")]
    assert len(log) == 12


def test_every_cell_is_measured(tmp_path):
    """On every backend: rows of true measurements, table, CSV and picture."""
    options = cli.parse(
        bench.Options,
        ["tasks=cartpole", "num_envs=2", "repeats=1", "seconds=0.01", f"out={tmp_path}"],
    )
    rows = bench.measure(options, bench.cells_of(options, budget=1))
    bench.write(options, rows, bench.machine_facts())
    assert [row["backend"] for row in rows] == list(bench.Options().backends)
    for row in rows:
        assert row["env_steps_per_s"] > 0 and row["raw_env_steps_per_s"] > 0
        assert 0.8 < row["valid_share"] < 1
    table = (tmp_path / "table.md").read_text()
    assert all(f"| cartpole | {row['backend']} | 2 |" in table for row in rows)
    with open(tmp_path / "table.csv") as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    assert json.loads((tmp_path / "results.json").read_text())["rows"] == rows
    assert (tmp_path / "envs.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_sweep_is_logged(tmp_path):
    """As users call it: one child run per row, exit code 0."""
    arguments = ["backends=gymnasium,envpool", "num_envs=2", "repeats=2", "seconds=0.01"]
    out = subprocess.run(
        [sys.executable, "-m", "experiments.envs.bench", *arguments, f"out={tmp_path}"],
        cwd=ROOT, text=True, capture_output=True, timeout=300,
        env=bench.os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/m.db", "QUICK": ""},
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert {row["task"] for row in rows} == {"cartpole", "pong", "halfcheetah"}
    counts = []
    with sqlite3.connect(tmp_path / "m.db") as store:
        for query in (
            "tags where key = 'mlflow.parentRunId'",
            "latest_metrics where key = 'kept'",
            "runs where status = 'FINISHED'",
        ):
            counts += store.execute(f"select count(*) from {query}").fetchone()
    assert counts == [len(rows), len(rows), len(rows) + 1]


# -- the vectorization study ----------------------------------------------------------------------


@pytest.mark.parametrize("task", ["cartpole", "pendulum", "breakout"])
def test_the_naive_loop_gives_the_same_as_backend_gymnasium(task):
    cell = Cell(task, "gymnasium", 2, None)
    ours = steppers.make_ours(cell, 5)
    naive = NaiveEnvs(steppers.settings_of(cell).env, 2, 5)
    assert np.array_equal(ours.reset(), naive.reset())
    games = 0
    for action in steppers.draw_actions(ours.spec, np.random.default_rng(0)) * 4:
        for mine, theirs in zip(ours.step(action), naive.step(action), strict=True):
            assert mine.dtype == theirs.dtype and np.array_equal(mine, theirs)
        episodes = ours.pop_episodes()
        games += len(episodes)
        assert [e._replace(return_raw=pytest.approx(e.return_raw, rel=1e-6),
                           return_train=pytest.approx(e.return_train, rel=1e-6))
                for e in naive.pop_episodes()] == episodes  # fmt: skip
    assert games > 0
    ours.close()
    naive.close()


def test_the_study_measures_every_way(monkeypatch, tmp_path):
    arguments = ["tasks=cartpole", "num_envs=2", "threads=1", "repeats=2", "seconds=0.01"]
    monkeypatch.setattr(sys, "argv", ["study", *arguments, f"out={tmp_path}"])
    study.main()
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["way"] for row in rows] == ["naive", *bench.Options().backends]
    assert all(row["env_steps_per_s"] > 0 for row in rows)
    assert (rows[0]["speedup"], rows[0]["speedup_low"]) == (1, 1)
    assert (tmp_path / "vectorization.png").stat().st_size > 10_000


def test_speed_ups_are_paired_and_the_answer_follows_from_the_rows():
    cell = Cell("pong", "envpool", 8, 1)
    timings = [{"naive": 4e-5 * s, "way": 1e-5 * s, "valid": 1.0} for s in (1, 2, 10)]
    rows = study.rows_of([cell], {cell: timings})
    assert (rows[1]["speedup_low"], rows[1]["speedup_high"]) == pytest.approx((4, 4))
    assert "envpool with 8 environments makes 400,000 env steps/s, 4.0 times" in study.answer(rows)
    slower = study.rows_of([cell], {cell: [{"naive": 1e-5, "way": 2e-5, "valid": 1.0}]})
    assert "nothing beats the naive loop" in study.answer(slower)


def test_what_cannot_take_effect_on_a_study_is_refused(monkeypatch):
    for name in ("SEEDS", "STEPS", "DEVICE"):
        monkeypatch.delenv(name, raising=False)
    frame.refuse_changes()
    assert frame.changes() == []
    monkeypatch.setenv("SEEDS", "3")
    monkeypatch.setenv("DEVICE", "cpu")
    with pytest.raises(SystemExit, match="SEEDS, DEVICE: no effect on this study"):
        frame.refuse_changes()
    assert frame.changes() == ["seed=1,2,3", "device=cpu"]


def test_runs_that_end_below_the_bar_and_runs_that_fall_are_counted(monkeypatch):
    """One that never reached it, one that fell to the end, one in between, one that stayed."""
    ends = [[0, 1, 2], [0, 9, 3], [9, 4, 9], [0, 9, 9]]
    runs = [{"curve": list(enumerate(values))} for values in ends]
    monkeypatch.setattr(learning, "load", lambda task, backend: runs)
    monkeypatch.setattr(learning, "TASKS", [learning.Task("t", ("a", "b"), (1,), 10, 5, "mean")])
    assert learning.below().splitlines()[-1] == "| t | 5 | 8 | 4 | 2 | 2 | 2 |"
