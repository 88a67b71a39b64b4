"""MLflow's client; the tracking child and `compare` import mlflow from here only."""

from __future__ import annotations

import getpass
import logging
import os
import re
import time
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rl_pipeline.config.stores import StoreError, check_database, database_of
from rl_pipeline.redaction import redact
from rl_pipeline.tracking import databases, views
from rl_pipeline.tracking.notes import StoredRun
from rl_pipeline.tracking.tail import store_name

PARAM_CHARS, TAG_CHARS, PARAMS_PER_CALL = 6000, 5000, 100
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}


_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_CONFIGURE_LOGGING": "false",
    # The writer's loop retries by itself, without end and with a state that others can read.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}


def quiet() -> None:
    """Call before mlflow is imported: no telemetry, no log lines, no waiting of its own."""
    os.environ.update({**_ENVIRONMENT, **os.environ})
    warnings.simplefilter("ignore")
    for name in ("mlflow", "alembic", "urllib3", "py.warnings"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def load_client(uri: str) -> None:
    """Import what opens a store: seconds, in which no store is asked."""
    import mlflow.tracking.client  # noqa: F401

    if database_of(uri):
        import mlflow.store.tracking.sqlalchemy_store  # noqa: F401


class Store:
    """MLflow's client, opened safely; counts its calls.

    A database file that is not there is made, unless it `must_exist`. Raises StoreError for one
    that cannot work. `tidy`: what dead processes left beside it is removed.
    """

    def __init__(self, uri: str, must_exist: bool = False, tidy: bool = True) -> None:
        quiet()
        load_client(uri)
        from mlflow.tracking.client import MlflowClient

        self.calls = 0
        self._lock: Any = nullcontext()
        database = database_of(uri)
        if database is not None:
            check_database(database)
            # Children that meet on a fresh database would all make it.
            self._lock = databases.lock_of(database)
        with self._lock:
            if database is not None:
                databases.prepare(uri, database, must_exist, tidy)
            self._client = MlflowClient(tracking_uri=uri)

    @property
    def client(self) -> Any:
        """The client, for one call."""
        self.calls += 1
        return self._client

    def experiment_id(self, name: str, artifact_root: str | None) -> str:
        """Id of the experiment `name`, made if it is not there."""
        from mlflow.exceptions import MlflowException

        with self._lock:
            found = self.client.get_experiment_by_name(name)
            if found is None:
                folder = re.sub(r"[^\w.-]+", "_", name)
                location = (Path(artifact_root) / folder).as_uri() if artifact_root else None
                try:
                    # The UI then opens the experiment on its training runs, not on GenAI pages.
                    tags = {"mlflow.experimentKind": "custom_model_development"}
                    tags[views.TAG + views.KEY] = views.view_state(views.TRAINING_RUNS)
                    return str(self.client.create_experiment(name, location, tags))
                except MlflowException:
                    # Another machine was faster: a server knows no lock of ours.
                    found = self.client.get_experiment_by_name(name)
                    if found is None:
                        raise
            return str(found.experiment_id)

    def run_id(self, experiment_id: str, run: StoredRun) -> str:
        """Id of the run, made if an earlier writer did not make it already."""
        if key := run.run_key:
            found = self.client.search_runs([experiment_id], f"tags.run_key = '{key}'")
            if found and self.reopen(found[0].info.run_id, run.tags):
                return str(found[0].info.run_id)
        started_ms = int(run.started * 1000)
        made = self.client.create_run(experiment_id, started_ms, _tags(run), run.run_name)
        return str(made.info.run_id)

    def describe(self, run_id: str, run: StoredRun) -> None:
        """Log params and tags; a param that the run already has keeps its first value."""
        from mlflow.entities import Param, RunTag

        params = {store_name(key): _text(value) for key, value in run.params.items()}
        cut = [key for key, value in params.items() if len(value) > PARAM_CHARS]
        params |= {key: params[key][: PARAM_CHARS - 3] + "..." for key in cut}
        known = self.client.get_run(run_id).data.params
        changed = [key for key in params if key in known and known[key] != params[key]]
        tags = _tags(run)
        tags |= {"params_cut": ", ".join(cut)[:TAG_CHARS]} if cut else {}
        tags |= {"params_changed": ", ".join(changed)[:TAG_CHARS]} if changed else {}
        new = [Param(key, value) for key, value in params.items() if key not in known]
        run_tags = [RunTag(key, value) for key, value in tags.items()]
        for start in range(0, max(len(new), 1), PARAMS_PER_CALL):
            part = new[start : start + PARAMS_PER_CALL]
            refusal = self.log(run_id, params=part, tags=run_tags if start == 0 else [])
            if refusal:
                say(f"the store refused parameters, they are in config/ only: {refusal}")

    def log(self, run_id: str, **batch: Any) -> str | None:
        """Log a batch; returns the store's words if it refuses the content itself.

        Sent again, such a batch would be refused for ever. But a run that was deleted meanwhile can
        be restored, so that is trouble like any other, and its values wait.
        """
        from mlflow.exceptions import MlflowException

        try:
            self.client.log_batch(run_id, **batch)
        except MlflowException as error:
            active = self.client.get_run(run_id).info.lifecycle_stage == "active"
            if error.error_code != "INVALID_PARAMETER_VALUE" or not active:
                raise
            return one_line(error)
        return None

    def log_final(self, run_id: str, values: Mapping[str, float], time_ms: int) -> None:
        """Log what the run came to as `result/*`, on the axis of its env steps."""
        from mlflow.entities import Metric

        step = int(values.get("env_steps", 0))
        metrics = [Metric(f"result/{k}", v, time_ms, step) for k, v in values.items()]
        if metrics:
            self.log(run_id, metrics=metrics)

    def reopen(self, run_id: str, tags: Mapping[str, str]) -> bool:
        """Set the run RUNNING again; False if the store does not have it (any more)."""
        from mlflow.exceptions import MlflowException

        try:
            # First who runs it now: others end what runs without a living process.
            for key in ("process", "writer"):
                if key in tags:
                    self.client.set_tag(run_id, key, tags[key])
            self.client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise
        return True

    def search(self, condition: str) -> list[Any]:
        """All runs that meet a condition, over all experiments."""
        experiments = [e.experiment_id for e in self.client.search_experiments()]
        found: list[Any] = []
        token = None
        while True:
            page = self.client.search_runs(
                experiments, condition, max_results=1000, page_token=token
            )
            found += page
            token = page.token
            if not token:
                return found

    def end(self, run_id: str, status: object, end_s: float, tags: Mapping[str, str]) -> str:
        """Set the run's last tags and its final status; returns the latter."""
        for key, value in tags.items():
            self.client.set_tag(run_id, key, str(value)[:TAG_CHARS])
        final = _STATUS.get(str(status), "FAILED")
        self.client.set_terminated(run_id, final, int(end_s * 1000))
        return final


def trouble_kinds() -> tuple[type[BaseException], ...]:
    """Errors that a store raises when it is away, locked, full or of another version."""
    from alembic.util import CommandError
    from mlflow.exceptions import MlflowException
    from requests import RequestException
    from sqlalchemy.exc import SQLAlchemyError

    return MlflowException, RequestException, SQLAlchemyError, CommandError, OSError, StoreError


def _tags(run: StoredRun) -> dict[str, str]:
    tags = {"mlflow.user": _user(), **run.tags}
    own = {"run_key": run.run_key, "mlflow.parentRunId": run.parent_run_id}
    tags |= {tag: value for tag, value in own.items() if value}
    return {store_name(key): str(value)[:TAG_CHARS] for key, value in tags.items()}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a passwd entry
        return "unknown"


def _text(value: object) -> str:
    """A parameter as one types it on the command line."""
    return (
        str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
    )


def one_line(error: BaseException, *uris: str) -> str:
    """An error in at most 400 characters, without the passwords of `uris` or of any other."""
    # SQLAlchemy adds its whole statement to what went wrong.
    text = " ".join(redact(str(error), *uris).split()).split(" [SQL:")[0]
    return f"{type(error).__name__}: {text}"[:400]


def say(text: str) -> None:
    """One dated line in tracking.log."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", flush=True)
