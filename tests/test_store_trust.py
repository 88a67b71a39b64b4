"""A store is whole or not there, is found again, is named in words, and shows no password."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from trust import DEAD, LONG_S, ask, half_made, track, tracker_for, until

from rl_pipeline import machine
from rl_pipeline.comparison import records, tables
from rl_pipeline.config import resume, stores
from rl_pipeline.config.settings import TrackingSettings
from rl_pipeline.config.stores import kept_uri
from rl_pipeline.errors import ConfigError
from rl_pipeline.redaction import redact, secrets_of
from rl_pipeline.tracking.notes import StoredRun, request_of
from rl_pipeline.tracking.tracker import create_parent

QUICK = ("debug=short", "total_steps=300", "eval.episodes=0", "tracking.flush_s=1")
PASSWORD = "hunter2/with?odd#marks@all"


# -- stores are made whole ------------------------------------------------------------------------


def test_a_store_whose_making_was_killed_is_made_by_the_next_run(tmp_path, trainer):
    database = tmp_path / "store" / "mlflow.db"
    uri = f"sqlite:///{database}"
    first = trainer(tmp_path / "a", uri)

    def in_making():
        names = {p.name for p in database.parent.iterdir()} if database.parent.exists() else set()
        return names - {"mlflow.db.lock"}

    until(in_making, "a store in the making")
    first.kill()
    assert not database.exists(), "what stands in its place is whole"
    state = track(tmp_path / "b", uri)
    assert state.status == "FINISHED" and not state.trouble
    left = {p.name for p in database.parent.iterdir()}
    assert left == {"mlflow.db", "mlflow.db.lock", "mlartifacts"}


@pytest.mark.slow
def test_what_living_processes_and_other_machines_make_is_left_alone(tmp_path):
    host, pid, started = machine.myself()
    database = tmp_path / "mlflow.db"
    names = [
        f".mlflow.db.{host}.{pid}.{int(started)}.new",
        f".mlflow.db.else.where.{pid}.1.new",
        f".other.db.{host}.{2**22 + 7}.1.new",
        ".mlflow.db.theirs.new",
    ]
    dead = f".mlflow.db.{host}.{2**22 + 7}.1.new"
    for name in [*names, dead, f"{dead}-journal"]:
        (tmp_path / name).touch()
    state = track(tmp_path / "run", f"sqlite:///{database}")
    assert state.status == "FINISHED"
    assert {p.name for p in tmp_path.glob(".*.new*")} == set(names)


KINDS = {
    "folder": "is a folder", "text": "is no database", "empty": "half-made", "torn": "half-made",
    "unversioned": "half-made", "without version": "half-made", "foreign": "another program's",
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_no_store_is_named_and_left_as_it_is(tmp_path, kind):
    path = tmp_path / "mlflow.db"
    half_made(path, kind)
    before = None if kind == "folder" else path.read_bytes()
    with pytest.raises(stores.StoreError, match=KINDS[kind]) as told:
        stores.check_database(path)
    assert str(path) in str(told.value)
    assert before is None or path.read_bytes() == before


@pytest.mark.parametrize("kind", ["torn", "foreign"])
def test_a_run_on_what_is_no_store_is_refused_at_once_with_the_way_out(cli, kind):
    half_made(cli.cwd / "mlflow.db", kind)
    out = cli(*QUICK)
    assert out.returncode == 2 and "Traceback" not in out.stderr
    assert KINDS[kind] in out.stderr and str(cli.cwd / "mlflow.db") in out.stderr
    assert "tracking" in out.stderr and not cli.folders()
    out = cli("study=x", module="rl_pipeline.compare")
    assert out.returncode == 2 and KINDS[kind] in out.stderr and "Traceback" not in out.stderr


@pytest.mark.parametrize("kind", ["torn", "only version"])
def test_a_store_that_breaks_keeps_no_run_waiting_and_says_why(tmp_path, kind):
    half_made(tmp_path / "mlflow.db", kind)
    state = track(tmp_path / "run", f"sqlite:///{tmp_path / 'mlflow.db'}", drain_s=10 * LONG_S)
    assert state.pending and "half-made" in state.trouble
    log = (tmp_path / "run" / "tracking.log").read_text()
    assert "rl_pipeline.doctor" in log and "gave up" in log and "Traceback" not in log


@pytest.mark.slow
def test_a_silent_store_keeps_a_finished_run_a_few_seconds_only(tmp_path):
    with socket.socket() as silent:  # takes what is sent, and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen(50)
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        tracker = tracker_for(tmp_path / "run", uri, drain_s=10 * LONG_S)
        tracker.start()
        until(lambda: (tmp_path / "run" / "mlflow.json").exists(), "the first question")
        begin = time.monotonic()
        state = tracker.finish(10 * LONG_S)
        assert state.pending and time.monotonic() - begin < LONG_S
        tracker._process.kill()
        tracker._process.wait()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_named(tmp_path):
    place = tmp_path / "place"
    place.mkdir(mode=0o500)
    with pytest.raises(stores.StoreError, match="may not write"):
        stores.check_database(place / "mlflow.db")


# -- no password leaves ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:secret@host:5000", "http://me:***@host:5000"),
        ("postgresql://me:a/b?c#d@e@host/db", "postgresql://me:***@host/db"),
        ("http://ghp_0123456789abcdefghij@host", "http://***@host"),
        ("http://token:@host", "http://***@host"),
        ("https://h/x?password=abc&q=1", "https://h/x?password=***&q=1"),
        ("https://h/x?q=1&API_KEY=abc", "https://h/x?q=1&API_KEY=***"),
        ("https://h/x?pass%77ord=abc", "https://h/x?pass%77ord=***"),
        ("postgresql://h/db?sslmode=require&sslpassword=abc",
         "postgresql://h/db?sslmode=require&sslpassword=***"),
        ("a http://u:pw1@h1 b https://v:pw2@h2/p c", "a http://u:***@h1 b https://v:***@h2/p c"),
        (r"http\://me\:pw@h sqlite:///a,http://u:pw@h", r"http\://***@h sqlite:///a,http://u:***@h"),
        ("sqlite:////home/me@work/a:b.db", "sqlite:////home/me@work/a:b.db"),
        ("nothing to hide at http://host:5000/#/x", "nothing to hide at http://host:5000/#/x"),
        ("password=abc in words", "password=*** in words"),
    ],
)  # fmt: skip
def test_passwords_tokens_and_keys_are_hidden_and_nothing_else(text, shown):
    assert redact(text, environ={}) == shown


def test_a_password_that_stands_alone_in_an_error_is_hidden_in_every_form():
    uri = f"postgresql://me:{PASSWORD}@host/db?token=t0ps3cret"
    environ = {"MLFLOW_TRACKING_URI": uri, "MLFLOW_TRACKING_PASSWORD": "other-word"}
    assert secrets_of(uri) == [PASSWORD, "t0ps3cret"]
    for shown in (
        PASSWORD, "hunter2%2Fwith%3Fodd%23marks%40all", "hunter2%2fwith%3fodd%23marks%40all",
        "hunter2", "with?odd#marks", "t0ps3cret", "other-word",
    ):  # fmt: skip
        text = redact(f"ValueError: port '{shown}' is none", environ=environ)
        assert text == "ValueError: port '***' is none"
    assert "hunter2" not in redact(f"cannot parse {uri!r}", environ=environ)


@pytest.mark.parametrize(
    "line",
    [
        ["tracking.uri=http://me:s3cr3tw0rd@127.0.0.1:9"],
        ["tracking.uri=http://s3cr3tw0rd@127.0.0.1:9", "tracking=none"],
        ["tracking.uri='postgresql://127.0.0.1:9/db?sslpassword=s3cr3tw0rd'"],
        ["-m", "seed=1,2", "tracking.uri=http://me:s3cr3tw0rd@127.0.0.1:9"],
        ["-m", "tracking.uri=sqlite:///a.db,http://me:s3cr3tw0rd@127.0.0.1:9"],
        ["-m", "seed=1,2", "+hydra.sweeper.params={tracking.uri:'http://me:s3cr3tw0rd@h:9'}"],
        ["seed=1", "+hydra.job.env_set.MLFLOW_TRACKING_URI=http://me:s3cr3tw0rd@127.0.0.1:9"],
    ],
)  # fmt: skip
def test_a_password_in_an_override_is_refused_and_never_repeated(cli, line):
    out = cli(*line, *QUICK)
    assert out.returncode == 2, out.stdout + out.stderr
    assert "MLFLOW_TRACKING_URI" in out.stderr
    assert "s3cr3tw0rd" not in out.stdout + out.stderr
    assert not [p for p in cli.cwd.rglob("*") if p.is_file()]


def test_a_password_of_an_earlier_sweep_or_in_a_comparison_is_refused(cli):
    folder = cli.cwd / "multirun" / "a"
    folder.mkdir(parents=True)
    uri = "http://me:s3cr3tw0rd@127.0.0.1:9"
    study = {"name": "n", "overrides": [f"tracking.uri={uri}", "seed=1,2"]}
    (folder / "study.json").write_text(json.dumps(study))
    for out in (
        cli("study.resume=n", *QUICK), cli("study=x", f"uri={uri}", module="rl_pipeline.compare"),
    ):  # fmt: skip
        assert out.returncode == 2 and "MLFLOW_TRACKING_URI" in out.stderr
        assert "s3cr3tw0rd" not in out.stdout + out.stderr


@pytest.mark.slow
def test_a_password_of_the_environment_is_in_no_file_but_the_request(cli):
    environ = {"MLFLOW_TRACKING_URI": "http://me:s3cr3tw0rd@127.0.0.1:9/x?token=t0ps3cret"}
    single = cli(*QUICK, "seed=1", env=environ)
    sweep = cli("-m", *QUICK, "seed=1", env=environ)
    compared = cli("study=x", module="rl_pipeline.compare", env=environ)
    assert single.returncode == 0, single.stderr
    assert compared.returncode == 2 and "MlflowException" in compared.stderr
    for out in (single, sweep, compared):
        assert "s3cr3tw0rd" not in out.stdout + out.stderr
        assert "t0ps3cret" not in out.stdout + out.stderr
    holders = [
        path for path in cli.cwd.rglob("*") if path.is_file()
        and any(word in path.read_bytes() for word in (b"s3cr3tw0rd", b"t0ps3cret"))
    ]  # fmt: skip
    assert {p.name for p in holders} == {"tracking.json"}
    assert all(p.stat().st_mode & 0o077 == 0 for p in holders)
    states = [json.loads(p.read_text()) for p in cli.cwd.rglob("mlflow.json")]
    told = [state["trouble"] for state in states if state["trouble"]]
    assert any("Exception" in text or "Error" in text for text in told)
    for state in states:  # they would drain for a minute
        if machine.alive(*state["writer"]):
            psutil.Process(state["writer_pid"]).kill()


@pytest.mark.slow
def test_the_request_is_for_its_owner_only_also_over_what_a_killed_run_left(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "tracking.json.tmp").write_text("left behind")
    (run / "tracking.json.tmp").chmod(0o644)
    tracker = tracker_for(run, f"http://me:{'x' * 9}@127.0.0.1:9", drain_s=0.1)
    tracker.start()
    assert (run / "tracking.json").stat().st_mode & 0o777 == 0o600
    tracker.finish(LONG_S)


# -- what died is ended ---------------------------------------------------------------------------


def statuses(database):
    return dict(ask(database, "SELECT name, status FROM runs"))


def test_a_run_whose_trainer_and_writer_died_is_ended_by_the_next_start(tmp_path, trainer):
    database = tmp_path / "mlflow.db"
    uri = f"sqlite:///{database}"
    one = trainer(tmp_path / "died", uri)
    until(lambda: one.state().values, "its first row in the store")
    living = trainer(tmp_path / "lives", uri)
    until(lambda: living.state().values, "the other's first row")
    one.kill()
    run_id, living_id = one.state().run_id, living.state().run_id
    foreign(database)
    track(tmp_path / "next", uri)
    status = dict(ask(database, "SELECT run_uuid, status FROM runs"))
    assert status[run_id] == "KILLED" and status[living_id] == "RUNNING"
    tags = dict(ask(database, "SELECT key, value FROM tags WHERE run_uuid = ?", run_id))
    assert tags["reason"] == "the training process died without ending the run"
    assert {status[name] for name in FOREIGN} == {"RUNNING"}


@pytest.mark.slow
def test_a_run_that_died_after_its_result_ends_as_that_says(tmp_path, trainer):
    database = tmp_path / "mlflow.db"
    uri = f"sqlite:///{database}"
    one = trainer(tmp_path / "died", uri)
    until(lambda: one.state().values, "its first row in the store")
    writer = psutil.Process(one.state().writer_pid)
    writer.kill()
    record = {"status": "failed", "reason": "no luck", "run_id": "r01234567"}
    (tmp_path / "died" / "result.json").write_text(json.dumps(record))
    one.kill()
    track(tmp_path / "next", uri)
    query = "SELECT r.status, t.value FROM runs r JOIN tags t ON t.run_uuid = r.run_uuid"
    query += " WHERE t.key = 'reason' AND r.run_uuid = ?"
    assert ask(database, query, one.state().run_id) == [("FAILED", "no luck")]


@pytest.mark.slow
def test_a_run_that_its_writer_still_drains_is_alive(tmp_path, trainer):
    from rl_pipeline.tracking import orphans
    from rl_pipeline.tracking.store import Store

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    one = trainer(tmp_path / "drains", uri)
    until(lambda: one.state().values, "its first row in the store")
    writer = psutil.Process(one.state().writer_pid)
    writer.suspend()
    try:
        one.kill(writer=False)
        (found,) = orphans.find(Store(uri))
        assert found.lives
    finally:
        writer.kill()
    psutil.wait_procs([writer], timeout=LONG_S)
    (found,) = orphans.find(Store(uri))
    assert not found.lives


GARBAGE = ["42", "null", "[]", '["h", 1]', '{"a": 1}', '["h", "x", 1.0]', "[" * 9000, "[1, 2, 3]",
           f'["{socket.gethostname()}", -5, 1e400]', f'["{socket.gethostname()}", true, 1.0]',
           f'["{socket.gethostname()}", {10**30}, 1.0]']  # fmt: skip
FOREIGN: dict[str, dict[str, str]] = {
    **{f"{n:032x}": {"kind": "study", "study": "theirs", "process": text, "run_folder": "/x"}
       for n, text in enumerate(GARBAGE)},
    "f" * 32: {"kind": "study", "process": DEAD},  # the same words, and nothing else of ours
    "e" * 32: {"process": DEAD},
    "d" * 32: {"kind": "study", "study": "far", "run_folder": "/x",
               "process": '["another-host", 99999, 1.0]'},
}  # fmt: skip


def foreign(database):
    """Runs that another tool or another machine has there, all RUNNING."""
    row = ask(database, "SELECT * FROM runs LIMIT 1")[0]
    columns = [c[1] for c in ask(database, "PRAGMA table_info(runs)")]
    for run_id, tags in FOREIGN.items():
        values = dict(zip(columns, row, strict=True)) | {
            "run_uuid": run_id, "status": "RUNNING", "name": "theirs", "lifecycle_stage": "active",
        }  # fmt: skip
        marks = ", ".join("?" for _ in columns)
        ask(database, f"INSERT INTO runs VALUES ({marks})", *values.values())
        for key, value in tags.items():
            query = "INSERT INTO tags (key, value, run_uuid) VALUES (?, ?, ?)"
            ask(database, query, key, value, run_id)


def test_foreign_runs_with_our_words_harm_no_comparison_and_stay_as_they_are(cli):
    uri = f"sqlite:///{cli.cwd / 'mlflow.db'}"
    settings = TrackingSettings(name="server", uri=uri, experiment="trust")
    tags = {"study": "dead", "kind": "study", "run_folder": "/x", "process": DEAD}
    parent = create_parent(settings, "dead", tags, {}, cli.cwd)
    assert parent is not None
    foreign(cli.cwd / "mlflow.db")
    out = cli("study=theirs", module="rl_pipeline.compare")
    assert out.returncode == 2 and "no such study" in out.stderr, out.stderr
    assert "there are: dead" in out.stderr
    status = dict(ask(cli.cwd / "mlflow.db", "SELECT run_uuid, status FROM runs"))
    assert status.pop(parent["run_id"]) == "KILLED", "ours is ended"
    assert set(status.values()) == {"RUNNING"} and len(status) == len(FOREIGN)


def stored_run(name, **more):
    params = {"uri": "", "experiment": "trust", "params": {}, "tags": {}, "started": 1.0}
    return StoredRun(run_name=name, **params, **more)


def test_jobs_that_failed_or_were_killed_are_in_no_average(tmp_path):
    from rl_pipeline.tracking import views
    from rl_pipeline.tracking.store import Store

    store = Store(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = store.experiment_id("trust", None)
    parent = store.run_id(experiment, stored_run("study"))
    names = {}
    for status in ("finished", "failed", "killed", None):
        job = stored_run(str(status), parent_run_id=parent)
        names[store.run_id(experiment, job)] = str(status)
        if status:
            store.end(list(names)[-1], status, 2.0, {})
    found = {names[run.info.run_id] for run in store.search(views.jobs_of(parent))}
    assert found == {"finished", "None"}, "what still runs is seen, too"


# -- a store that moved is found ------------------------------------------------------------------


def test_a_project_that_moved_keeps_its_store_and_its_artifacts(tmp_path, monkeypatch):
    old, new = tmp_path / "proj", tmp_path / "proj2"
    old.mkdir()
    monkeypatch.chdir(old)
    first = track(Path("outputs") / "run", f"sqlite:///{old / 'mlflow.db'}")
    monkeypatch.chdir(tmp_path)
    old.rename(new)
    uri = kept_uri(new / "outputs" / "run")
    assert uri == f"sqlite:///{new / 'mlflow.db'}"
    monkeypatch.chdir(new)
    (new / "outputs" / "run" / "metrics.jsonl").open("a").write(
        '{"step": 16, "time": 2.0, "metrics": {"a": 3.0}}\n'
    )
    again = track(new / "outputs" / "run", uri)
    assert again.run_id == first.run_id and again.status == "FINISHED"
    assert not old.exists(), "nothing is made anew where it was"
    assert list(new.glob(f"mlartifacts/*/{first.run_id}/artifacts/result.json"))
    rows = ask(new / "mlflow.db", "SELECT step, value FROM metrics ORDER BY step")
    assert rows == [(8, 2.0), (16, 3.0)]
    for table, column in (("experiments", "artifact_location"), ("runs", "artifact_uri")):
        places = [uri for (uri,) in ask(new / "mlflow.db", f"SELECT {column} FROM {table}")]
        assert all(place.startswith((new / "mlartifacts").as_uri()) for place in places)


def test_a_store_that_is_gone_is_asked_for_and_not_made_anew(tmp_path, monkeypatch):
    proj, run = tmp_path / "proj", tmp_path / "proj" / "outputs" / "run"
    proj.mkdir()
    monkeypatch.chdir(proj)
    track(run, f"sqlite:///{proj / 'mlflow.db'}")
    (proj / "mlflow.db").rename(tmp_path / "elsewhere.db")
    with pytest.raises(stores.StoreError, match="tracking.uri=") as told:
        kept_uri(run)
    assert str(proj / "mlflow.db") in str(told.value)
    command = [sys.executable, "-m", "rl_pipeline.tracking.writer", str(run)]
    out = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S)
    assert out.returncode == 2 and "tracking.uri=" in out.stdout + out.stderr
    assert not (proj / "mlflow.db").exists()


def test_a_run_that_never_reached_its_store_begins_it_where_it_is_now(tmp_path):
    run = tmp_path / "proj2" / "outputs" / "run"
    run.mkdir(parents=True)
    request = {"uri": f"sqlite:///{tmp_path / 'proj' / 'mlflow.db'}", "store": "../../mlflow.db"}
    (run / "tracking.json").write_text(json.dumps(request))
    assert kept_uri(run) == f"sqlite:///{tmp_path / 'proj2' / 'mlflow.db'}"
    # One of an earlier version has no such hint, but the folder that it was in.
    folder = str(tmp_path / "proj" / "outputs" / "run")
    request = {"uri": request["uri"], "tags": {"run_folder": folder}, "cwd": "/somewhere"}
    (run / "tracking.json").write_text(json.dumps(request))
    assert kept_uri(run) == f"sqlite:///{tmp_path / 'proj2' / 'mlflow.db'}"


@pytest.mark.slow
def test_a_resumed_run_of_a_moved_project_goes_on_in_the_moved_store(cli, tmp_path):
    from conftest import Cli

    (tmp_path / "proj").mkdir()
    assert Cli(tmp_path / "proj")(*QUICK, "seed=1").returncode == 0
    (tmp_path / "proj").rename(tmp_path / "proj2")
    moved = Cli(tmp_path / "proj2")
    (folder,) = moved.folders()
    out = moved(f"resume={folder.relative_to(moved.cwd)}", "total_steps=900")
    assert out.returncode == 0, out.stderr
    assert not (tmp_path / "proj").exists()
    ((steps, count),) = ask(
        tmp_path / "proj2" / "mlflow.db", "SELECT MAX(step), COUNT(DISTINCT run_uuid) FROM metrics"
    )
    assert steps >= 900 and count == 1
    (tmp_path / "proj2" / "mlflow.db").unlink()
    out = moved(f"resume={folder.relative_to(moved.cwd)}", "total_steps=1500")
    assert out.returncode == 2 and "tracking.uri" in out.stderr and "mlflow.db" in out.stderr
    assert not (tmp_path / "proj2" / "mlflow.db").exists()


# -- paths and addresses --------------------------------------------------------------------------

ODD = "a?b #ü%41 x'y"


def test_a_store_lies_in_its_folder_whatever_is_in_the_path(tmp_path, monkeypatch):
    from rl_pipeline.config.stores import how_to_open
    from rl_pipeline.tracking.store import Store

    folder = tmp_path / ODD
    folder.mkdir()
    monkeypatch.chdir(folder)
    uri, _, artifacts = stores.resolve(TrackingSettings(name="mlflow"), folder, {})
    assert stores.database_of(uri) == folder / "mlflow.db" and artifacts == folder / "mlartifacts"
    state = track(folder / "run", uri)
    assert state.status == "FINISHED"
    assert [p.name for p in tmp_path.iterdir()] == [ODD], "nothing beside the project"
    assert list(folder.glob("mlartifacts/*/*/artifacts/result.json"))
    assert Store(uri, must_exist=True).client.get_run(state.run_id).info.status == "FINISHED"
    assert "make ui" in how_to_open(uri)
    monkeypatch.chdir(tmp_path)
    assert how_to_open(uri).startswith("cd ") and how_to_open(uri).endswith("sqlite:///mlflow.db")


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("http://", "names no host"),
        ("https:///x", "names no host"),
        ("http://127.0.0.1:99999", "port"),
        ("http://host:port", "port"),
        ("http://[::1", "no address"),
        ("http://a b", "no address"),
        ("http://u:p/w@host", "percent-encoded"),
        ("postgres://h/db", "postgresql:"),
        ("postgresql://h:abc/db", "no database address"),
        ("postgresql+nonsense://h/db", "no database address"),
        ("sqlite:////tmp/a?b/mlflow.db", "%3F"),
        ("sqlite:///file:/tmp/a.db?uri=true", "name the file itself"),
        ("sqlite://x", "names no file"),
        ("garbage:", "no store of kind"),
        ("%%%", "is a folder"),
    ],
)
@pytest.mark.parametrize("key", ["tracking.uri", "MLFLOW_TRACKING_URI"])
def test_an_address_that_cannot_be_is_refused_with_the_key_that_holds_it(uri, words, key):
    environ = {} if key == "tracking.uri" else {key: uri}
    settings = TrackingSettings(name="server", uri=None if environ else uri)
    with pytest.raises(ValueError, match="://|tracking.uri|MLFLOW_TRACKING_URI") as told:
        stores.check_driver(stores.resolve(settings, Path("/home/me"), environ)[0])
    assert words in str(told.value) and ":p/w" not in str(told.value)


@pytest.mark.parametrize(
    "uri",
    ["http://host", "https://host/a/path", "http://[::1]:5000", "http://a_b.c:80", "http://ü"],
)
def test_addresses_that_can_be_are_taken(uri):
    assert stores.resolve(TrackingSettings(name="server", uri=uri), Path("/"), {})[0] == uri


@pytest.mark.parametrize(
    "name", ["%", "it's", '"', "[", "@x", "*x", "2024", "1e5", "a: b", "{", "\\"]
)
def test_any_name_of_a_study_is_looked_for_as_it_is(name):
    from rl_pipeline.compare import CompareSettings
    from rl_pipeline.config import cli as command_line

    found = command_line.parse(CompareSettings, [f"study={name}", "threshold=1e2"])
    assert found.study == name and found.threshold == 100.0
    assert command_line.parse(CompareSettings, ["study=x", "uri=null"]).uri is None


@pytest.mark.slow
def test_a_comparison_says_what_is_wrong_before_it_reads_the_store(cli):
    settings = TrackingSettings(name="server", uri=f"sqlite:///{cli.cwd / 'mlflow.db'}")
    assert create_parent(settings, "s", {"study": "s"}, {}, cli.cwd)
    (cli.cwd / "file").touch()
    for arguments, words in (
        (['study=it\'s % "x"'], "no such study"),
        (["study=x", "out=/dev/null"], "out=/dev/null"),
        (["study=x", "out=file"], "out=file"),
        (["study=x", "out=file/below"], "out=file/below"),
        (["study=x", "uri=http://127.0.0.1:99999"], "uri=http://127.0.0.1:99999"),
        (["study=x", "uri=sqlite:///none.db"], "there is no store"),
        (["study=x", "threshold=%"], "threshold=%"),
    ):
        out = cli(*arguments, module="rl_pipeline.compare")
        assert out.returncode == 2, (arguments, out.stderr)
        assert words in out.stderr and "Traceback" not in out.stderr, out.stderr


# -- damaged files --------------------------------------------------------------------------------

TORN = {
    "empty": "", "half": '{"uri": "sqlite', "list": "[]", "number": "42", "null": "null",
    "zeros": "\0" * 64, "types": '{"run_id": 5, "offset": "x", "uri": []}', "deep": "[" * 99999,
    "part": '{"uri": "sqlite:///x.db"}', "folder": "folder",
}  # fmt: skip
DAMAGE = [pytest.param(text, id=kind) for kind, text in TORN.items()]


def damage(path, text):
    path.unlink(missing_ok=True)
    if text == "folder":
        path.mkdir()
    else:
        path.write_text(text)


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "text", ["{", slow('{"run_id": 5, "offset": "x", "uri": []}'), slow("folder")]
)
def test_a_damaged_state_costs_only_itself(tmp_path, text):
    """The run is found again by its key, and its rows are one row each."""
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    first = track(tmp_path / "run", uri)
    damage(tmp_path / "run" / "mlflow.json", text)
    again = track(tmp_path / "run", uri)
    assert again.run_id == first.run_id and again.status == "FINISHED", again
    assert ask(tmp_path / "mlflow.db", "SELECT step, value FROM metrics") == [(8, 2.0)]


@pytest.mark.parametrize("text", DAMAGE)
def test_a_damaged_request_is_named(tmp_path, text):
    damage(tmp_path / "tracking.json", text)
    kept_uri(tmp_path)  # raises nothing
    with pytest.raises(stores.StoreError, match="tracking.json"):
        request_of(tmp_path)


@pytest.mark.slow
def test_a_damaged_request_is_written_anew_by_the_next_session(tmp_path, caplog):
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    first = track(tmp_path / "run", uri)
    damage(tmp_path / "run" / "tracking.json", "folder")
    assert kept_uri(tmp_path / "run") == uri
    command = [sys.executable, "-m", "rl_pipeline.tracking.writer", str(tmp_path / "run")]
    out = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S)
    assert out.returncode == 2 and "tracking.json" in out.stdout + out.stderr
    assert "Traceback" not in out.stderr
    again = track(tmp_path / "run", uri)
    assert again.status == "FINISHED" and again.run_id == first.run_id
    assert "tracking.json is damaged" in caplog.text


def test_bad_rows_cost_only_themselves(tmp_path):
    from rl_pipeline.tracking.tail import Tail

    good = '{"step": %d, "time": 1.0, "metrics": {"a": 2.0}}\n'
    bad = ["[1]", "5", "null", '{"step": 1}', '{"step": 1, "time": 1, "metrics": [1]}', "\0" * 40,
           '{"step": 1e400, "time": 1, "metrics": {"a": 1}}', "{", "[" * 99999,
           '{"step": 1%s, "time": 1, "metrics": {"a": 1}}' % ("0" * 30),
           '{"step": 1, "time": 1e300, "metrics": {"a": 1}}',
           '{"step": 1, "time": 1, "metrics": {"a": {}}}']  # fmt: skip
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        (good % 8).encode() + "\n".join(bad).encode() + b"\n\xff\xfe\n" + (good % 16).encode()
    )
    tail = Tail(path, 0, 0)
    batch = tail.next()
    assert [value[3] for value in batch.values] == [8, 16] and tail.skipped == len(bad) + 1
    path.unlink()
    path.mkdir()
    assert Tail(path, 0, 0).next() is None


@pytest.mark.parametrize("text", DAMAGE)
def test_a_damaged_study_is_named_where_it_is_resumed(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    for folder in ("multirun/a", "multirun/good"):
        Path(folder).mkdir(parents=True)
    damage(Path("multirun/a/study.json"), text)
    good = {"name": "n", "overrides": ["seed=1,2"]}
    Path("multirun/good/study.json").write_text(json.dumps(good))
    with pytest.raises(ConfigError, match=r"multirun/a.study\.json"):
        resume.with_resumed_sweep(["study.resume=multirun/a"])
    assert "seed=1,2" in resume.with_resumed_sweep(["study.resume=n"]), "it costs only itself"


ODD_TYPES = (
    '{"status": 5, "reason": [], "effective": 7, "overrides": 3, "throughput": [], '
    '"returns": "x", "hardware": 1, "provenance": [], "settings": 8, "run_id": [], "name": {}}'
)
ODD_VALUES = (
    '{"status": "finished", "throughput": {"env_steps_per_s": "fast", "steady": {}}, '
    '"returns": {"eval_mean": []}, "hardware": {"gpus": 3}, "counters": {"env_steps": "1"}, '
    '"overrides": [1, null], "bottleneck": [1], "startup": 5, "provenance": {"git": 7}, '
    '"varied": 5, "baseline": [], "threshold": "x", "settings": {"seed": {}}}'
)


@pytest.mark.parametrize("text", [*DAMAGE, ODD_TYPES, ODD_VALUES])
def test_a_damaged_job_costs_a_comparison_of_folders_only_itself(tmp_path, text):
    good = {"status": "finished", "seed": 1, "overrides": ["seed=1"], "run_id": "r1"}
    for job in ("0", "1"):
        folder = tmp_path / job
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(
            '[1]\n{"step": 1}\n{"metrics": 3}\n\0\0\n'
            '{"step": "x", "metrics": {"return/train": []}}\n'
            '{"step": 8, "metrics": {"return/train": 2.0}}\n'
        )
        if job == "0":
            (folder / "result.json").write_text(json.dumps(good))
        else:
            damage(folder / "result.json", text)
            damage(folder / "run.json", text)
    damage(tmp_path / "study.json", text)
    study = records.from_sweep(tmp_path)
    assert [run.id for run in study.runs][0] == "r1" and len(study.runs) == 2
    assert study.runs[0].finished and study.runs[0].curves["return/train"][1].tolist() == [2.0]
    comparison_of(study)


def comparison_of(study):
    from rl_pipeline.comparison import measure

    try:
        found = measure.compare(study)
    except (ConfigError, ValueError):
        return
    tables.comparison_rows(found)
