"""The tracking child: tails a run's metrics.jsonl and ships it to MLflow in batches.

    python -m rl_pipeline.telemetry.writer <run_dir>

ships what a run left unshipped, and ends its run; the trainer starts the same with `--follow`.
The only module that imports mlflow. `mlflow.json` in the run folder says how far it came.
"""

from __future__ import annotations

import argparse
import getpass
import json
import logging
import os
import re
import select
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from rl_pipeline.telemetry.tracker import REQUEST_FILE, STATE_FILE, read_json, redact, write_json

# MLflow takes 1,000 values a call; the room left is for the tag that may travel along.
BATCH_VALUES = 990
PARAM_CHARS, TAG_CHARS, PARAMS_PER_CALL = 6000, 5000, 100
# MLflow stores +inf as 1.8e308, which ruins every plot; what is beyond this counts as non-finite.
LARGEST = 1e300
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_CONFIGURE_LOGGING": "false",
    # The loop below retries by itself, without end and with a state that others can read.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}


@dataclass
class Batch:
    """Rows for one call of the store; values are (name, value, time in ms, step)."""

    offset: int
    """Byte of metrics.jsonl behind the last row in here."""
    count: int
    """Non-finite values of the run up to here."""
    values: list[tuple[str, float, int, int]] = field(default_factory=list)
    nonfinite: dict[str, str] = field(default_factory=dict)


class Tail:
    """Reads whole rows of `path` from a byte offset on; each (name, step) goes out once."""

    def __init__(self, path: Path, offset: int, count: int) -> None:
        self._path, self.skipped = path, 0
        self._names: dict[str, int] = {}
        self._seen: dict[int, int] = {}  # step -> one bit per name
        # A file shorter than what was shipped was replaced: begin again.
        begin = offset if path.exists() and path.stat().st_size >= offset else 0
        self._last = Batch(begin, count)
        # A resumed trainer repeats the steps after its checkpoint; the store must not have both.
        for line, _ in self._lines(0, begin):
            self._take(line, Batch(0, 0))

    def next(self) -> Batch | None:
        """The next rows, about BATCH_VALUES values at most; None if there is nothing new."""
        batch = Batch(self._last.offset, self._last.count)
        for line, end in self._lines(batch.offset):
            taken = self._take(line, batch)
            batch.offset = end
            if len(batch.values) + taken > BATCH_VALUES:
                break
        if batch.offset == self._last.offset:
            return None
        self._last = batch
        return batch

    def _lines(self, start: int, stop: float = float("inf")) -> Iterator[tuple[bytes, int]]:
        if not self._path.exists():
            return
        with open(self._path, "rb") as file:
            file.seek(start)
            # The last line may still be in writing.
            while start < stop and (line := file.readline()).endswith(b"\n"):
                start += len(line)
                yield line, start

    def _take(self, line: bytes, batch: Batch) -> int:
        try:
            row = json.loads(line)
            step, time_ms = int(row["step"]), int(row["time"] * 1000)
            # float() also reads the words inf, -inf and nan; null means that there is no value.
            values = {_name(k): float(v) for k, v in row["metrics"].items() if v is not None}
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            self.skipped += 1  # torn by a killed trainer; the rows around it are good
            return 0
        bad = {name: value for name, value in values.items() if not abs(value) <= LARGEST}
        if bad:
            batch.count += len(bad)
            batch.nonfinite |= {
                name: f"{name}={value} at step {step}" for name, value in bad.items()
            }
            values = {name: value for name, value in values.items() if name not in bad}
            values["nonfinite/count"] = float(batch.count)
        for name, value in values.items():
            bit = 1 << self._names.setdefault(name, len(self._names))
            if not self._seen.get(step, 0) & bit:
                self._seen[step] = self._seen.get(step, 0) | bit
                batch.values.append((name, value, time_ms, step))
        return len(values)


class Store:
    """MLflow's client, opened safely; counts its calls."""

    def __init__(self, uri: str) -> None:
        from mlflow.tracking.client import MlflowClient

        for name in ("mlflow", "alembic", "urllib3", "py.warnings"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self.calls = 0
        self._lock: Any = nullcontext()
        if uri.startswith("sqlite"):
            import mlflow.store.tracking.sqlalchemy_store  # noqa: F401  (slow: before the lock)

            database = Path(uri.split(":///", 1)[1])
            database.parent.mkdir(parents=True, exist_ok=True)
            # Children that meet on a fresh database would all migrate it, and all but one fail.
            self._lock = FileLock(f"{database}.lock", timeout=120)
        with self._lock:
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
                    return str(self.client.create_experiment(name, artifact_location=location))
                except MlflowException:
                    # Another machine was faster: a server knows no lock of ours.
                    found = self.client.get_experiment_by_name(name)
                    if found is None:
                        raise
            return str(found.experiment_id)

    def run_id(self, experiment_id: str, request: Mapping[str, Any]) -> str:
        """Id of the request's run, made if an earlier writer did not make it already."""
        key = request.get("run_key")
        if key:
            found = self.client.search_runs([experiment_id], f"tags.run_key = '{key}'")
            if found and self.reopen(found[0].info.run_id):
                return str(found[0].info.run_id)
        started_ms = int(request["started"] * 1000)
        run = self.client.create_run(experiment_id, started_ms, _tags(request), request["run_name"])
        return str(run.info.run_id)

    def describe(self, run_id: str, request: Mapping[str, Any]) -> None:
        """Log params and tags; a param that the run already has keeps its first value."""
        from mlflow.entities import Param, RunTag

        params = {_name(key): _text(value) for key, value in request["params"].items()}
        cut = [key for key, value in params.items() if len(value) > PARAM_CHARS]
        params |= {key: params[key][: PARAM_CHARS - 3] + "..." for key in cut}
        known = self.client.get_run(run_id).data.params
        changed = [key for key in params if key in known and known[key] != params[key]]
        tags = _tags(request)
        tags |= {"params_cut": ", ".join(cut)[:TAG_CHARS]} if cut else {}
        tags |= {"params_changed": ", ".join(changed)[:TAG_CHARS]} if changed else {}
        new = [Param(key, value) for key, value in params.items() if key not in known]
        run_tags = [RunTag(key, value) for key, value in tags.items()]
        for start in range(0, max(len(new), 1), PARAMS_PER_CALL):
            part = new[start : start + PARAMS_PER_CALL]
            refusal = self.log(run_id, params=part, tags=run_tags if start == 0 else [])
            if refusal:
                _say(f"the store refused parameters, they are in config/ only: {refusal}")

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
            return _one_line(error)
        return None

    def reopen(self, run_id: str) -> bool:
        """Set the run RUNNING again; False if the store does not have it (any more)."""
        from mlflow.exceptions import MlflowException

        try:
            self.client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise
        return True

    def end(self, run_id: str, status: object, end_s: float, tags: Mapping[str, str]) -> str:
        """Set the run's last tags and its final status; returns the latter."""
        for key, value in tags.items():
            self.client.set_tag(run_id, key, str(value)[:TAG_CHARS])
        final = _STATUS.get(str(status), "FAILED")
        self.client.set_terminated(run_id, final, int(end_s * 1000))
        return final


class Shipper:
    """Ships one run folder; `run()` returns an exit code."""

    def __init__(self, run_dir: Path, follow: bool) -> None:
        self._dir, self._follow = run_dir, follow
        self._request = read_json(run_dir / REQUEST_FILE)
        self._state = read_json(run_dir / STATE_FILE)
        if self._state.get("uri") != redact(self._request["uri"]):
            self._state = {}  # another store has nothing of this run yet
        self._state |= {"uri": redact(self._request["uri"]), "writer_pid": os.getpid()}
        self._state |= {"ready": False, "finished": False, "trouble": None, "calls": 0, "values": 0}
        self._state |= {"startup_s": None, "startup_cpu_s": None, "cpu_s": 0.0, "refused": 0}
        # The trainer's launch counts, where there is one: the interpreter's own start is in it.
        self._began = self._request["started"] if follow else time.time()
        self._ended, self._deadline = False, float("inf")
        self._store: Store | None = None
        self._calls_before = 0
        self._tail: Tail | None = None
        self._pending: Batch | None = None
        self._monitor: Any = None

    def run(self) -> int:
        """Ship until the trainer has ended and everything is in the store, or `drain_s` passed."""
        backoff_s = 1.0
        trouble_kinds = _trouble_kinds()
        while True:
            try:
                if self._store is None:
                    self._open()
                self._ship()
                if self._ended:
                    self._finish()
                    return 0
                pause_s, backoff_s = self._request["flush_s"], 1.0
            except trouble_kinds as error:
                self._note_trouble(error)
                pause_s = min(backoff_s, 5.0 if self._ended else 60.0)
                backoff_s *= 2
            if time.monotonic() > self._deadline:
                _say(f"gave up; the rest is in {self._dir}, ship it with this same command later")
                return 3
            self._wait(pause_s)

    def _open(self) -> None:
        request = self._request
        store = Store(request["uri"])
        experiment_id = store.experiment_id(request["experiment"], request["artifact_root"])
        known: str | None = self._state.get("run_id")
        resumed = known is not None and store.reopen(known)
        run_id = known if known and resumed else store.run_id(experiment_id, request)
        if not resumed:
            self._state |= {"offset": 0, "nonfinite": 0, "nonfinite_keys": {}}
            self._tail = self._pending = None
        self._state |= {"run_id": run_id, "experiment_id": experiment_id, "status": "RUNNING"}
        self._store = store
        self._publish()
        store.describe(run_id, request)
        self._tail = self._tail or Tail(
            self._dir / "metrics.jsonl", self._state["offset"], self._state["nonfinite"]
        )
        self._note_ready()
        self._ship_config()
        if request["system_metrics"] and not self._ended:
            from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

            self._monitor = SystemMetricsMonitor(
                run_id, resume_logging=resumed, tracking_uri=request["uri"]
            )
            self._monitor.start()

    def _ship(self) -> None:
        assert self._store is not None and self._tail is not None
        more = True
        while more:
            batch = self._pending = self._pending or self._tail.next()
            if batch is not None:
                self._send(batch)
                self._state |= {"offset": batch.offset, "nonfinite": batch.count}
            if self._state["trouble"]:
                _say("the store answers again")
            self._state |= {"trouble": None, "skipped_rows": self._tail.skipped}
            self._publish()
            self._pending, more = None, batch is not None

    def _send(self, batch: Batch) -> None:
        from mlflow.entities import Metric, RunTag

        known = self._state["nonfinite_keys"]
        first = {**batch.nonfinite, **known}
        tags = (
            [RunTag("nonfinite", "; ".join(first.values())[:TAG_CHARS])] if first != known else []
        )
        metrics = [Metric(*value) for value in batch.values]
        assert self._store is not None
        refusal = self._store.log(self._state["run_id"], metrics=metrics, tags=tags)
        self._state["nonfinite_keys"] = first
        self._state["refused" if refusal else "values"] += len(metrics)
        if refusal:
            _say(f"the store refused {len(metrics)} values: {refusal}")

    def _ship_config(self) -> None:
        assert self._store is not None
        for path in sorted(self._dir.glob(".hydra/*.yaml")):
            self._store.client.log_artifact(self._state["run_id"], str(path), "config")

    def _finish(self) -> None:
        assert self._store is not None
        run_id, result = self._state["run_id"], self._result()
        self._ship_config()
        for name in ("result.json", "metrics.jsonl"):
            if (self._dir / name).exists():
                self._store.client.log_artifact(run_id, str(self._dir / name))
        died = {"status": "failed", "reason": "the training process died without a word"}
        last_words = self._dir / ("result.json" if result else "metrics.jsonl")
        # The run ended with its last words, however much later they are shipped.
        end_s = last_words.stat().st_mtime if last_words.exists() else time.time()
        result = result or died
        tags = {"reason": str(result["reason"])} if result.get("reason") else {}
        self._stop_monitor()
        status = self._store.end(run_id, result.get("status"), end_s, tags)
        self._state |= {"status": status, "finished": True}
        self._publish()

    def _result(self) -> dict[str, Any]:
        """This session's result.json; {} before it is written."""
        path = self._dir / "result.json"
        if not path.exists() or path.stat().st_mtime_ns == self._request["stale_result_ns"]:
            return {}
        return read_json(path)

    def _wait(self, seconds: float) -> None:
        """Sleep, but wake at once when the trainer ends."""
        if self._ended:
            time.sleep(seconds)
            return
        if self._follow:
            over = bool(select.select([sys.stdin], [], [], seconds)[0])
        else:
            over = bool(self._result())
        over = over or not _alive(self._request)
        if over:
            self._ended, self._deadline = True, time.monotonic() + self._request["drain_s"]
        elif not self._follow:
            time.sleep(seconds)

    def _note_ready(self) -> None:
        if not self._state["ready"]:
            self._state["startup_s"] = round(time.time() - self._began, 3)
            self._state["startup_cpu_s"] = time.process_time()
            self._state["ready"] = True
        self._publish()

    def _note_trouble(self, error: BaseException) -> None:
        text = _one_line(error).replace(self._request["uri"], self._state["uri"])
        if not self._state["trouble"]:
            _say(f"{text}; trying again until it works, rows stay in {self._dir}")
        self._state["trouble"] = text
        self._stop_monitor()
        if self._store is not None:
            self._calls_before += self._store.calls
            self._store = None
        # Who waits for the start-up to be over must not wait for a store that is away.
        with suppress(OSError):
            self._note_ready()

    def _stop_monitor(self) -> None:
        if self._monitor is not None:
            self._monitor.finish()
            self._monitor = None

    def _publish(self) -> None:
        calls = self._calls_before + (self._store.calls if self._store else 0)
        cpu_s = time.process_time() - (self._state["startup_cpu_s"] or time.process_time())
        self._state |= {"calls": calls, "cpu_s": round(cpu_s, 4)}
        write_json(self._dir / STATE_FILE, self._state)


def create_parent(request: Mapping[str, Any]) -> dict[str, str]:
    """Create a sweep's run: {run_id, experiment_id, uri}."""
    store = Store(request["uri"])
    experiment_id = store.experiment_id(request["experiment"], request["artifact_root"])
    run_id = store.run_id(experiment_id, request)
    store.describe(run_id, request)
    return {"run_id": run_id, "experiment_id": experiment_id, "uri": request["uri"]}


def end_run(request: Mapping[str, Any]) -> dict[str, str]:
    """Log the last metrics and artifacts of a sweep's run and end it."""
    from mlflow.entities import Metric

    store, run_id, now_ms = Store(request["uri"]), request["run_id"], int(time.time() * 1000)
    finite = {k: float(v) for k, v in request["metrics"].items() if abs(float(v)) <= LARGEST}
    metrics = [Metric(_name(key), value, now_ms, 0) for key, value in finite.items()]
    if metrics:
        store.client.log_batch(run_id, metrics=metrics)
    for path in request["artifacts"]:
        store.client.log_artifact(run_id, path)
    store.end(run_id, request["status"], time.time(), request["tags"])
    return {"run_id": run_id}


def main() -> int:
    """Command line of the child; 0 done, 1 store trouble, 3 gave up, 4 another one is at it."""
    parser = argparse.ArgumentParser(prog="python -m rl_pipeline.telemetry.writer")
    parser.add_argument("run_dir", nargs="?", type=Path)
    parser.add_argument("--follow", action="store_true", help="until standard input ends")
    parser.add_argument("--create-parent", action="store_true", help="request on standard input")
    parser.add_argument("--end-run", action="store_true", help="request on standard input")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(10)
    os.environ.update({**_ENVIRONMENT, **os.environ})
    warnings.simplefilter("ignore")
    if options.create_parent or options.end_run:
        answer = create_parent if options.create_parent else end_run
        try:
            print(json.dumps(answer(json.load(sys.stdin))))
        except _trouble_kinds() as error:
            print(_one_line(error), file=sys.stderr)
            return 1
        return 0
    if options.run_dir is None or not (options.run_dir / REQUEST_FILE).exists():
        parser.error(f"give a run folder with {REQUEST_FILE} in it")
    run_dir = options.run_dir.absolute()
    lock = FileLock(run_dir / ".writer.lock")
    try:
        # The writer of the session before may still drain.
        lock.acquire(timeout=120 if options.follow else 0)
    except Timeout:
        _say(f"another process is shipping {run_dir} already")
        return 4
    with lock:
        return Shipper(run_dir, options.follow).run()


def _trouble_kinds() -> tuple[type[BaseException], ...]:
    """What a store that is away, locked, full or of another version raises."""
    from alembic.util import CommandError
    from mlflow.exceptions import MlflowException
    from requests import RequestException
    from sqlalchemy.exc import SQLAlchemyError

    return MlflowException, RequestException, SQLAlchemyError, CommandError, OSError


def _alive(request: Mapping[str, Any]) -> bool:
    """Whether the training process runs, on this machine."""
    try:
        process = psutil.Process(request["pid"])
        same = abs(process.create_time() - request["pid_started"]) < 1
        return same and process.status() != "zombie" and request["host"] == socket.gethostname()
    except psutil.Error:
        return False


def _tags(request: Mapping[str, Any]) -> dict[str, str]:
    tags = {"mlflow.user": _user(), **request["tags"]}
    own = {"run_key": "run_key", "mlflow.parentRunId": "parent_run_id"}
    tags |= {tag: request[key] for tag, key in own.items() if request.get(key)}
    return {_name(key): str(value)[:TAG_CHARS] for key, value in tags.items()}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a passwd entry
        return "unknown"


@lru_cache(maxsize=4096)
def _name(key: str) -> str:
    """`key` as MLflow accepts it; one bad name would have its whole batch refused."""
    parts = re.sub(r"[^\w\-. :/]", "_", key).split("/")
    return "/".join(part for part in parts if part not in ("", ".", ".."))[:250] or "_"


def _text(value: object) -> str:
    """A parameter as one types it on the command line."""
    return (
        str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
    )


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def _say(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Everything was sent synchronously; to take down MLflow's modules would cost 0.6 s more.
    os._exit(code)
