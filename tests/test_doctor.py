"""`python -m rl_pipeline.doctor`: mends what the dead left, and touches nothing else."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from trust import DEAD, LONG_S, ask, half_made, track, tracker_for, until

from rl_pipeline import machine
from rl_pipeline.config.settings import TrackingSettings
from rl_pipeline.tracking.tracker import create_parent

DOCTOR = "rl_pipeline.doctor"


def status_of(database: Path, run_id: str) -> str:
    return str(ask(database, "SELECT status FROM runs WHERE run_uuid = ?", run_id)[0][0])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fix=perhaps"], "fix=perhaps"),
        (["store=x"], "store is not an argument"),
        (["uri=http://"], "names no host"),
        (["uri=http://me:s3cr3tw0rd@h"], "MLFLOW_TRACKING_URI"),
        (["fix"], "not key=value"),
    ],
)
def test_bad_input_is_refused(cli, arguments, words):
    out = cli(*arguments, module=DOCTOR)
    assert out.returncode == 2 and words in out.stderr and "s3cr3tw0rd" not in out.stderr
    assert "Traceback" not in out.stderr


def test_where_nothing_is_all_is_well_and_nothing_is_made(cli):
    out = cli(module=DOCTOR)
    assert out.returncode == 0 and "all is well" in out.stdout
    assert not list(cli.cwd.iterdir())
    assert "fix=" in cli("--help", module=DOCTOR).stdout


@pytest.mark.slow
def test_what_died_is_closed_and_its_rows_have_a_line_that_ships_them(cli, trainer):
    database = cli.cwd / "mlflow.db"
    uri = f"sqlite:///{database}"
    dead = trainer(cli.cwd / "outputs" / "a day" / "dead", uri)
    until(lambda: dead.state().values, "its first row in the store")
    living = trainer(cli.cwd / "outputs" / "a day" / "lives", uri)
    until(lambda: living.state().values, "the other's first row")
    settings = TrackingSettings(name="server", uri=uri, experiment="trust")
    tags = {"study": "s", "kind": "study", "run_folder": "/x"}
    mine = tags | {"process": json.dumps(machine.myself())}
    own = create_parent(settings, "own", mine, {}, cli.cwd)
    study = create_parent(settings, "s", tags | {"process": DEAD}, {}, cli.cwd)
    psutil.Process(dead.state().writer_pid).suspend()
    with open(dead.dir / "metrics.jsonl", "a") as file:
        file.write('{"step": 16, "time": 2.0, "metrics": {"a": 3.0}}\n')
    dead.kill()
    (dead.dir / "mlflow.json.tmp").write_text("half")
    run_id = dead.state().run_id

    told = cli("fix=false", module=DOCTOR)
    assert told.returncode == 1 and "fix=true closes it" in told.stdout
    assert status_of(database, run_id) == status_of(database, study["run_id"]) == "RUNNING"
    assert (dead.dir / "mlflow.json.tmp").exists()

    out = cli(module=DOCTOR)
    assert out.returncode == 0, out.stdout + out.stderr
    assert status_of(database, run_id) == status_of(database, study["run_id"]) == "KILLED"
    for alive in (living.state().run_id, own["run_id"]):
        assert status_of(database, alive) == "RUNNING"
    assert out.stdout.count("orphaned") == 2 and out.stdout.count("living") == 2
    assert not (dead.dir / "mlflow.json.tmp").exists()
    (line,) = [x for x in out.stdout.splitlines() if "ship them: " in x]
    _, *arguments = shlex.split(line.split("ship them: ")[1])
    subprocess.run([sys.executable, *arguments], cwd=cli.cwd, check=True, timeout=LONG_S)
    query = "SELECT step FROM metrics WHERE run_uuid = ? ORDER BY step"
    assert ask(database, query, run_id) == [(8,), (16,)]

    again = cli(module=DOCTOR)
    assert again.returncode == 0 and "orphaned" not in again.stdout
    assert "unshipped" not in again.stdout


@pytest.mark.parametrize("kind", ["torn", "empty", "without version"])
def test_a_half_made_store_is_put_aside_and_the_next_run_makes_a_whole_one(cli, kind):
    half_made(cli.cwd / "mlflow.db", kind)
    told = cli("fix=false", module=DOCTOR)
    assert told.returncode == 1 and "half-made" in told.stdout
    assert [p.name for p in cli.cwd.iterdir()] == ["mlflow.db"]
    out = cli(module=DOCTOR)
    assert out.returncode == 0, out.stdout + out.stderr
    assert (cli.cwd / "mlflow.db.half-made").exists() and not (cli.cwd / "mlflow.db").exists()
    if kind == "torn":
        state = track(cli.cwd / "run", f"sqlite:///{cli.cwd / 'mlflow.db'}")
        assert state.status == "FINISHED"


def test_a_half_made_store_that_holds_runs_is_left_to_its_owner(cli):
    half_made(cli.cwd / "mlflow.db", "torn")
    ask(cli.cwd / "mlflow.db", "CREATE TABLE runs (run_uuid)")
    ask(cli.cwd / "mlflow.db", "INSERT INTO runs VALUES ('a')")
    out = cli(module=DOCTOR)
    assert out.returncode == 1 and "backup" in out.stdout
    assert (cli.cwd / "mlflow.db").exists()


@pytest.mark.parametrize("kind", ["foreign", "text", "folder"])
def test_what_is_no_store_is_told_and_left_as_it_is(cli, kind):
    half_made(cli.cwd / "mlflow.db", kind)
    out = cli(module=DOCTOR)
    assert out.returncode == 1 and "mlflow.db" in out.stdout and "Traceback" not in out.stderr
    assert [p.name for p in cli.cwd.iterdir()] == ["mlflow.db"]


def test_what_a_killed_making_left_is_removed(cli):
    host, pid, started = machine.myself()
    dead, lives = (
        f".mlflow.db.{host}.{2**22 + 7}.1.new",
        f".mlflow.db.{host}.{pid}.{int(started)}.new",
    )
    for name in (dead, lives):
        (cli.cwd / name).touch()
    assert cli("fix=false", module=DOCTOR).returncode == 1
    assert (cli.cwd / dead).exists()
    out = cli(module=DOCTOR)
    assert out.returncode == 0 and "removed" in out.stdout
    assert [p.name for p in cli.cwd.iterdir()] == [lives]


def test_a_server_that_does_not_answer_needs_its_owner(cli):
    out = cli("uri=http://127.0.0.1:9", module=DOCTOR)
    assert out.returncode == 1 and "127.0.0.1:9" in out.stdout and "Traceback" not in out.stderr


@pytest.mark.slow
def test_a_finished_project_is_well(cli):
    uri = f"sqlite:///{cli.cwd / 'mlflow.db'}"
    tracker = tracker_for(cli.cwd / "outputs" / "run", uri)
    tracker.start()
    (cli.cwd / "outputs" / "run" / "result.json").write_text('{"status": "finished"}')
    assert tracker.finish(LONG_S).status == "FINISHED"
    out = cli("fix=false", module=DOCTOR)
    assert out.returncode == 0 and "is sound" in out.stdout, out.stdout
