"""Tracking without a store: which store it would be, and what would be sent to it."""

import base64
import json
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_pipeline.config.settings import TrackingSettings
from rl_pipeline.tracking import views
from rl_pipeline.tracking.final import final_metrics, machine_of
from rl_pipeline.tracking.notes import State
from rl_pipeline.tracking.tracker import NullTracker, redact, resolve
from rl_pipeline.tracking.writer import Store, Tail

CWD = Path("/home/me/work")


def where(name="mlflow", uri=None, experiment=None, **environ):
    return resolve(TrackingSettings(name=name, uri=uri, experiment=experiment), CWD, environ)


def test_the_default_store_is_a_database_in_the_working_directory():
    root = CWD / "mlartifacts"
    assert where() == (f"sqlite:///{CWD}/mlflow.db", "rl_pipeline", root)
    assert where(MLFLOW_TRACKING_URI="")[0] == f"sqlite:///{CWD}/mlflow.db"


def test_settings_win_over_the_environment_which_wins_over_defaults():
    environ = {"MLFLOW_TRACKING_URI": "http://there:5000", "MLFLOW_EXPERIMENT_NAME": "theirs"}
    assert where(**environ) == ("http://there:5000", "theirs", None)
    assert where("server", **environ)[0] == "http://there:5000"
    uri, experiment, root = where(uri="sqlite:///mine/a.db", experiment="mine", **environ)
    assert (uri, experiment) == (f"sqlite:///{CWD}/mine/a.db", "mine")
    assert root == CWD / "mine" / "mlartifacts"


@pytest.mark.parametrize(
    "uri",
    ["databricks", "databricks://profile", "postgresql+psycopg2://me:pw@host/db", "https://x"],
)
def test_servers_and_databases_are_taken_as_they_are(uri):
    assert where("server", uri)[0] == uri


def test_a_server_without_an_address_names_both_ways_to_give_it():
    with pytest.raises(ValueError, match="tracking.uri.*MLFLOW_TRACKING_URI"):
        where("server")


@pytest.mark.parametrize("uri", ["file:///data/mlruns", "/data/mlruns", "./mlruns"])
@pytest.mark.parametrize("name", ["mlflow", "server"])
def test_a_file_store_is_refused_with_the_spelling_that_works(name, uri):
    with pytest.raises(ValueError, match=r"sqlite:////\S+/mlruns/mlflow.db"):
        where(name, uri)
    with pytest.raises(ValueError, match="MLFLOW_TRACKING_URI=.*dropped"):
        where(name, MLFLOW_TRACKING_URI=uri)


@pytest.mark.parametrize("uri", ["htp://host", "sqlite://", "sqlite:///:memory:"])
def test_a_store_that_cannot_be_is_refused(uri):
    with pytest.raises(ValueError, match="tracking.uri="):
        where("server", uri)


def test_passwords_are_not_shown():
    assert redact("http://me:secret@host:5000") == "http://me:***@host:5000"
    assert redact("sqlite:////a/b.db") == "sqlite:////a/b.db"


def row(step, **metrics):
    return json.dumps({"step": step, "time": 1.0, "metrics": metrics or {"a": 1.0}}) + "\n"


def steps_of(batch):
    return [value[3] for value in batch.values]


def test_the_tail_waits_for_whole_lines_and_steps_over_torn_ones(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(row(1) + row(2) + row(3)[:20])
    tail = Tail(path, 0, 0)
    assert steps_of(tail.next()) == [1, 2] and tail.next() is None
    with open(path, "a") as file:  # the trainer died in the middle of step 3 and was resumed
        file.write(row(4) + row(5))
    batch = tail.next()
    assert steps_of(batch) == [5] and tail.skipped == 1
    assert batch.offset == path.stat().st_size


def test_the_tail_goes_on_from_an_offset_and_remembers_what_went_before(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(row(1) + row(2) + row(2, a=9.0, b=1.0) + row(3))
    first = Tail(path, 0, 0).next()
    assert [value[:2] for value in first.values] == [("a", 1.0), ("a", 1.0), ("b", 1.0), ("a", 1.0)]
    with open(path, "a") as file:
        file.write(row(3) + row(4))
    assert steps_of(Tail(path, first.offset, 0).next()) == [4]


def test_the_tail_cleans_names_that_the_store_would_refuse_with_their_batch(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(row(1, **{"loss//a": 1, "../b": 2, "q[0]": 3, "/": 4, "ok/name c:d": 5}))
    names = [value[0] for value in Tail(path, 0, 0).next().values]
    assert names == ["loss/a", "b", "q_0_", "_", "ok/name c:d"]


def test_a_batch_that_can_never_be_stored_is_refused_once_unless_the_run_is_deleted():
    from mlflow.exceptions import INVALID_PARAMETER_VALUE, MlflowException

    class Client:
        stage, code = "active", INVALID_PARAMETER_VALUE

        def log_batch(self, run_id, **batch):
            raise MlflowException("no", error_code=self.code)

        def get_run(self, run_id):
            return SimpleNamespace(info=SimpleNamespace(lifecycle_stage=self.stage))

    store = object.__new__(Store)
    store._client, store.calls = Client(), 0
    assert store.log("run") == "MlflowException: no"
    Client.stage = "deleted"
    with pytest.raises(MlflowException):
        store.log("run")
    Client.stage, Client.code = "active", 4  # TEMPORARILY_UNAVAILABLE, or any other
    with pytest.raises(MlflowException):
        store.log("run")


def test_without_tracking_the_same_calls_do_nothing():
    tracker = NullTracker()
    tracker.start()
    assert tracker.ready and tracker.state() == tracker.finish(1.0) == State()


def test_a_prepared_view_fits_into_a_tag_and_names_metrics_that_exist():
    packed = views.view_state(views.jobs_of("a" * 32), ["backend.name", "algo.horizon"])
    assert packed.startswith("deflate;") and len(packed) < 5000
    state = json.loads(zlib.decompress(base64.b64decode(packed.removeprefix("deflate;"))))
    assert [k["groupByData"] for k in state["groupBy"]["groupByKeys"]] == [
        "backend.name", "algo.horizon",
    ]  # fmt: skip
    result = {
        "throughput": {"env_steps_per_s": 1.0, "warmup_s": 1.0, "wall_s": 1.0, "steady": True},
        "returns": {"eval_mean": 1.0}, "bottleneck": {"upper_bound_speedup": 2.0},
    }  # fmt: skip
    final = {f"metrics.`result/{name}`" for name in final_metrics(result)}
    shown = {column for column in state["selectedColumns"] if column.startswith("metrics")}
    assert shown <= final
    sections = {section["uuid"] for section in state["compareRunSections"]}
    assert {chart["metricSectionId"] for chart in state["compareRunCharts"]} == sections


def test_what_a_run_came_to_is_finite_numbers_only():
    assert final_metrics({}) == {} and machine_of({}) == ""
    found = final_metrics({"returns": {"eval_mean": float("nan"), "train_mean": 3}})
    assert found == {"train_mean": 3.0}
    hardware = {"cpu_model": "a CPU", "cpu_budget": 2, "gpus": []}
    assert machine_of({"hardware": hardware}) == "a CPU, 2 cores, no GPU"
