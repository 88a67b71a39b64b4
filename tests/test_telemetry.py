"""Tracking: the trainer's rows reach MLflow whole, once, in few calls, whatever happens."""

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import waiting

from rl_pipeline.config.settings import TrackingSettings
from rl_pipeline.tracking.notes import State
from rl_pipeline.tracking.tracker import Tracker, create_parent, end_parent

ROOT = Path(__file__).resolve().parents[1]
WAIT_S = 600.0
LONG = "x" * 7000

# A trainer that tracks, forks a worker (which inherits the pipe to the writer), and never ends.
TRAINER = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from rl_pipeline.config.settings import TrackingSettings
from rl_pipeline.tracking.tracker import Tracker
run_dir = Path({run_dir!r})
settings = dict(name="server", uri={uri!r}, experiment="telemetry", flush_s=0.5)
settings = TrackingSettings(**settings, system_metrics=False)
tracker = Tracker(run_dir, settings, run_name="died", params={{}}, tags={{}})
tracker.start()
(run_dir / "metrics.jsonl").write_text('{{"step": 8, "time": 1.0, "metrics": {{"a": 2.0}}}}\\n')
worker = os.fork()
if worker == 0:
    time.sleep(120)
    os._exit(0)
while not tracker.state().values:
    time.sleep(0.05)
print(worker, flush=True)
time.sleep(120)
"""


def rows(run_dir, steps, **metrics):
    with open(run_dir / "metrics.jsonl", "a") as file:
        for step in steps:
            row = {"step": step, "time": 1.7e9 + step, "metrics": metrics or {"a": step / 2}}
            file.write(json.dumps(row) + "\n")


def result(run_dir, status, reason=None):
    effective = {"compile": "eager for update"}  # which a run knows at its end only
    record = {"status": status, "reason": reason, "effective": effective}
    (run_dir / "result.json").write_text(json.dumps(record))


def until(condition, what):
    waiting.until(condition, 90, what, every_s=0.05)


def ask(database, query, *values):
    with sqlite3.connect(database, timeout=20) as connection:
        return connection.execute(query, values).fetchall()


def tracker_for(run_dir, uri, name="run", params=None, **kwargs):
    run_dir.mkdir(parents=True, exist_ok=True)
    settings = {"flush_s": 0.5, "system_metrics": False, **kwargs.pop("settings", {})}
    settings = TrackingSettings(name="server", uri=uri, experiment="telemetry", **settings)
    return Tracker(run_dir, settings, run_name=name, params=params or {}, tags={}, **kwargs)


class Lab:
    """One fresh store, and what all kinds of runs left in it."""

    def __init__(self, root):
        self.root, self.database = root, root / "the store" / "mlflow.db"
        self.uri = f"sqlite:///{self.database}"
        self.first, self.second = {}, {}

    def dir(self, name):
        return self.root / "runs" / name

    def state(self, name):
        return State.read(self.dir(name))

    def run_id(self, name):
        return self.state(name).run_id

    def metrics(self, name, like="%"):
        query = "SELECT key, step, value FROM metrics WHERE run_uuid = ? AND key LIKE ?"
        return ask(self.database, query, self.run_id(name), like)

    def mapping(self, name, table):
        return dict(
            ask(self.database, f"SELECT key, value FROM {table} WHERE run_uuid = ?",
                self.run_id(name))
        )  # fmt: skip

    def status(self, name):
        return ask(self.database, "SELECT status FROM runs WHERE run_uuid = ?", self.run_id(name))[
            0
        ][0]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("lab"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(lab.root)
        patch.setenv("MLFLOW_RUN_ID", "0" * 32)
        first_session(lab)
        second_session(lab)
    return lab


def first_session(lab):
    """Four trackers, a trainer to be killed and a sweep meet on a store that is not there yet."""
    big = lab.dir("big")
    (big / ".hydra").mkdir(parents=True)
    (big / ".hydra" / "config.yaml").write_text(f"long: {LONG}\n")
    params = {"long": LONG, "none": None, "flag": True, "lr": 0.1}
    trackers = {
        "big": tracker_for(big, lab.uri, params=params, settings={"system_metrics": True}),
        "failed": tracker_for(lab.dir("failed"), lab.uri),
        "killed": tracker_for(lab.dir("killed"), lab.uri),
        "stale": tracker_for(lab.dir("stale"), lab.uri),
    }
    for tracker in trackers.values():
        tracker.start()
    lab.dir("died").mkdir(parents=True)
    script = TRAINER.format(root=str(ROOT), run_dir=str(lab.dir("died")), uri=lab.uri)
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    settings = TrackingSettings(name="server", uri=lab.uri, experiment="telemetry")
    parent = create_parent(settings, "sweep", {"kind": "sweep"}, {"jobs": 1}, lab.root)
    assert parent is not None
    trackers["child"] = tracker_for(lab.dir("child"), lab.uri, parent_run_id=parent["run_id"])
    trackers["child"].start()

    rows(big, range(1000), **{f"m/{i}": 0.5 * i for i in range(10)})
    rows(big, [1000], **{"loss/value": "inf", "m/0": 7.0, "unknown": None})
    for name in ("failed", "killed", "stale"):
        rows(lab.dir(name), range(0, 80, 8))
    until(lambda: all(tracker.ready for tracker in trackers.values()), "all ready")
    os.kill(lab.state("big").writer_pid, signal.SIGINT)
    worker = int(trainer.stdout.readline())
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    until(lambda: lab.metrics("big", "system/%"), "MLflow's system metrics")
    for name, status in {"failed": "failed", "killed": "killed"}.items():
        result(lab.dir(name), status, f"it was {status}")
    for name in ("big", "stale", "child"):
        result(lab.dir(name), "finished")
    lab.first = {name: tracker.finish(WAIT_S) for name, tracker in trackers.items()}
    until(lambda: lab.state("died").finished, "the orphan's end")
    os.kill(worker, signal.SIGKILL)
    (lab.root / "table.md").write_text("| a |\n")
    assert end_parent(parent, "finished", [lab.root / "table.md"], {"won": "a"})
    lab.parent = parent["run_id"]


def second_session(lab):
    """Two of the runs are resumed; one trainer dies this time, and its writer forgot its place."""
    lab.config_artifact = lab.root.glob("the store/mlartifacts/**/config/config.yaml")
    state = lab.state("stale")
    (lab.dir("stale") / "mlflow.json").write_text(json.dumps(state.dump() | {"offset": 0}))
    params = {"lr": 0.2, "new": 1}
    big = tracker_for(lab.dir("big"), lab.uri, params=params, settings={"system_metrics": True})
    stale = tracker_for(lab.dir("stale"), lab.uri)
    for tracker in (big, stale):
        assert tracker.state() == State() and not tracker.ready
        tracker.start()
        assert tracker.state() == State(), "the earlier session's state is not this one's"
    rows(lab.dir("big"), range(990, 1100), **{f"m/{i}": 1.5 for i in range(10)})
    rows(lab.dir("stale"), range(80, 160, 8))
    until(lambda: big.ready and stale.ready, "ready again")
    before = len(lab.metrics("big", "system/%"))
    until(lambda: len(lab.metrics("big", "system/%")) > before, "system metrics again")
    result(lab.dir("big"), "finished")
    lab.second = {"big": big.finish(WAIT_S), "stale": stale.finish(WAIT_S)}


def test_a_thousand_rows_reach_the_store_whole_in_few_calls(lab):
    stored = [r for r in lab.metrics("big", "m/%") if r[1] < 1000]
    expected = {(f"m/{i}", step, 0.5 * i) for i in range(10) for step in range(1000)}
    assert len(stored) == 10_000 and set(stored) == expected
    assert lab.first["big"].values >= 10_000
    assert 10 <= lab.first["big"].calls <= 50
    assert lab.first["big"].pending is False and lab.first["big"].trouble is None
    assert 0 < lab.first["big"].cpu_s < 10 and lab.first["big"].startup_s > 0


def test_infinity_is_counted_and_named_never_stored(lab):
    assert max(abs(r[2]) for r in lab.metrics("big")) < 1e300
    assert lab.metrics("big", "nonfinite/count") == [("nonfinite/count", 1000, 1.0)]
    assert lab.metrics("big", "loss/value") == [] and lab.metrics("big", "unknown") == []
    assert ("m/0", 1000, 7.0) in lab.metrics("big", "m/0"), "its neighbours are stored"
    assert lab.mapping("big", "tags")["nonfinite"] == "loss/value=inf at step 1000"


def test_a_long_param_is_cut_knowingly_and_whole_in_the_config(lab):
    params, tags = lab.mapping("big", "params"), lab.mapping("big", "tags")
    assert params["long"] == LONG[:5997] + "..." and tags["params_cut"] == "long"
    assert params["none"] == "null" and params["flag"] == "true"
    (config,) = lab.config_artifact
    assert config.read_text() == f"long: {LONG}\n"


def test_artifacts_lie_beside_the_database_and_nothing_in_mlruns(lab):
    names = {p.name for p in lab.root.glob("the store/mlartifacts/*/*/artifacts/*")}
    assert names == {"config", "result.json", "metrics.jsonl", "table.md"}
    assert not list(lab.root.rglob("mlruns"))


def test_the_run_ends_as_the_trainer_did(lab):
    expected = {"failed": "FAILED", "killed": "KILLED", "died": "FAILED", "big": "FINISHED"}
    assert {name: lab.status(name) for name in expected} == expected
    assert lab.mapping("killed", "tags")["reason"] == "it was killed"
    assert lab.mapping("killed", "tags")["effective.compile"] == "eager for update"
    assert (
        lab.mapping("died", "tags")["reason"]
        == "the training process ended without writing a result"
    )
    assert lab.metrics("died") == [("a", 8, 2.0)]


def test_trackers_that_meet_on_a_fresh_store_share_one_experiment(lab):
    experiments = ask(lab.database, "SELECT name FROM experiments ORDER BY experiment_id")
    assert experiments == [("Default",), ("telemetry",)]
    # big, failed, killed, stale, died, child, sweep: nobody wrote into another's run.
    assert ask(lab.database, "SELECT COUNT(*) FROM runs") == [(7,)]


def test_a_resumed_run_stays_one_run_and_sends_nothing_twice(lab):
    assert lab.second["big"].run_id == lab.first["big"].run_id
    assert lab.second["big"].values == 999  # ten each of steps 1000 to 1099, less the one known
    for name in ("big", "stale"):
        pairs = [row[:2] for row in lab.metrics(name)]
        assert len(pairs) == len(set(pairs)) > 0
    assert {r[1] for r in lab.metrics("big", "m/3")} == set(range(1100))
    assert len(lab.metrics("stale", "a")) == 20, "rows sent again after a lost place are one row"


def test_a_resumed_run_keeps_its_first_params(lab):
    params, tags = lab.mapping("big", "params"), lab.mapping("big", "tags")
    assert params["lr"] == "0.1" and tags["params_changed"] == "lr"
    assert params["new"] == "1"


def test_a_result_of_the_session_before_says_nothing_about_this_one(lab):
    assert lab.first["stale"].status == "FINISHED"
    assert lab.second["stale"].status == lab.status("stale") == "FAILED"


def test_a_sweep_is_the_parent_of_its_jobs(lab):
    assert lab.mapping("child", "tags")["mlflow.parentRunId"] == lab.parent
    query = "SELECT status, name FROM runs WHERE run_uuid = ?"
    assert ask(lab.database, query, lab.parent) == [("FINISHED", "sweep")]
    tags = dict(ask(lab.database, "SELECT key, value FROM tags WHERE run_uuid = ?", lab.parent))
    assert tags["kind"] == "sweep" and tags["won"] == "a"


def closed_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_store_out_of_reach_stops_nothing_and_is_served_later(lab, tmp_path, caplog):
    uri = f"http://me:secret@127.0.0.1:{closed_port()}"
    tracker = tracker_for(tmp_path / "run", uri, drain_s=0.5)
    tracker.start()
    rows(tmp_path / "run", range(30))
    until(lambda: tracker.ready, "the end of the start-up")
    assert "ConnectionError" in tracker.state().trouble or "HTTP" in tracker.state().trouble
    result(tmp_path / "run", "finished")
    assert tracker.finish(0.0).pending, "it is left to drain in the background"
    state = tracker.finish(WAIT_S)
    assert state.pending and state.values == 0
    assert "rl_pipeline.tracking.writer" in caplog.text
    log = (tmp_path / "run" / "tracking.log").read_text()
    assert log.count("trying again") == 1 and "Traceback" not in log
    assert "secret" not in log + (tmp_path / "run" / "mlflow.json").read_text()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 30

    request = json.loads((tmp_path / "run" / "tracking.json").read_text())
    request["uri"] = lab.uri
    (tmp_path / "run" / "tracking.json").write_text(json.dumps(request))
    command = [sys.executable, "-m", "rl_pipeline.tracking.writer", str(tmp_path / "run")]
    subprocess.run(command, check=True, cwd=ROOT, timeout=WAIT_S)
    state = json.loads((tmp_path / "run" / "mlflow.json").read_text())
    assert state["values"] == 30 and state["status"] == "FINISHED"
    query = "SELECT step FROM metrics WHERE run_uuid = ? ORDER BY step"
    assert ask(lab.database, query, state["run_id"]) == [(step,) for step in range(30)]


def test_a_sweep_without_its_store_goes_on(tmp_path, caplog):
    uri = f"http://127.0.0.1:{closed_port()}"
    settings = TrackingSettings(name="server", uri=uri)
    assert create_parent(settings, "sweep", {}, {}, tmp_path) is None
    assert uri in caplog.text


@pytest.mark.slow
def test_a_server_that_comes_up_late_gets_everything(tmp_path):
    port = closed_port()
    tracker = tracker_for(tmp_path / "run", f"http://127.0.0.1:{port}")
    tracker.start()
    rows(tmp_path / "run", range(50))
    until(lambda: tracker.state().trouble, "trouble")
    store = ["--backend-store-uri", f"sqlite:///{tmp_path / 'mlflow.db'}"]
    store += ["--artifacts-destination", str(tmp_path / "mlartifacts"), "--workers", "1"]
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), *store]
    server = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        until(lambda: tracker.state().values == 50, "values")
        assert tracker.state().trouble is None
        result(tmp_path / "run", "finished")
        state = tracker.finish(WAIT_S)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()
    assert state.status == "FINISHED" and not state.pending
    assert len(ask(tmp_path / "mlflow.db", "SELECT step FROM metrics WHERE key = 'a'")) == 50
    assert list((tmp_path / "mlartifacts").rglob("result.json"))
