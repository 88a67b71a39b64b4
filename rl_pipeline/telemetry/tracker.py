"""The training side of tracking: names the store, starts the shipping child, never waits for it.

The trainer appends rows to `metrics.jsonl`, the record that survives everything. A child process
(`rl_pipeline.telemetry.writer`) tails that file and ships it to MLflow, so that MLflow's import,
its threads and every trouble of the store stay out of the training process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rl_pipeline.processes import alive, myself
from rl_pipeline.settings import TrackingSettings

REQUEST_FILE = "tracking.json"
LOST = "lost_jobs"
"""Tag of a study: how many jobs ended before they had a run; `<LOST>.<n>` describes each."""
STATE_FILE = "mlflow.json"
LOG_FILE = "tracking.log"
_WRITER = "rl_pipeline.telemetry.writer"
_SCHEMES = {"http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks"}
_log = logging.getLogger(__name__)

Params = Mapping[str, "str | int | float | bool | None"]


def resolve(
    settings: TrackingSettings, cwd: Path, environ: Mapping[str, str]
) -> tuple[str, str, Path | None]:
    """The store's URI, the experiment's name, and the artifact folder where the store has none.

    Raises ValueError for a store that cannot work, before any work starts.
    """
    assert settings.name != "none", "tracking=none has no store"
    experiment = settings.experiment or environ.get("MLFLOW_EXPERIMENT_NAME") or "rl_pipeline"
    uri = settings.uri or environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        if settings.name == "server":
            raise ValueError(
                "tracking=server does not know its server: set tracking.uri=http://host:5000 or "
                "the environment variable MLFLOW_TRACKING_URI, or use tracking=mlflow"
            )
        uri = f"sqlite:///{cwd / 'mlflow.db'}"
    origin = f"tracking.uri={uri}" if settings.uri else f"MLFLOW_TRACKING_URI={uri}"
    # `postgresql+psycopg2://` names a driver behind the plus.
    scheme = uri.split(":", 1)[0].split("+")[0] if ":" in uri else uri
    if scheme == "file" or not (":" in uri or scheme == "databricks"):
        folder = cwd / urlsplit(uri).path
        raise ValueError(
            f"{origin} is a folder, and MLflow dropped its file stores; keep a database in it "
            f"instead: tracking.uri=sqlite:///{folder / 'mlflow.db'}"
        )
    plugins = {point.name for point in entry_points(group="mlflow.tracking_store")}
    if scheme not in _SCHEMES | plugins:
        raise ValueError(
            f"{origin}: MLflow has no store of kind `{scheme}:`; the kinds here are "
            f"{', '.join(sorted(_SCHEMES | plugins))}"
        )
    if scheme == "sqlite":
        path = uri.split(":///", 1)[-1]
        if not path or ":memory:" in path or "///" not in uri:
            raise ValueError(f"{origin} names no file; use tracking.uri=sqlite:////path/mlflow.db")
        database = Path(os.path.normpath(cwd / path))
        return f"{uri.split(':', 1)[0]}:///{database}", experiment, database.parent / "mlartifacts"
    if scheme in ("postgresql", "mysql", "mssql"):
        return uri, experiment, cwd / "mlartifacts"
    return uri, experiment, None


def check_driver(uri: str) -> None:
    """Raise ValueError if the package that talks to this database is not installed."""
    if not uri.startswith(("postgresql", "mysql", "mssql")):
        return
    from sqlalchemy.engine import make_url

    try:
        make_url(uri).get_dialect().import_dbapi()
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{redact(uri)} needs the package {error.name}; for PostgreSQL: "
            "pip install 'rl_pipeline[postgres]'"
        ) from None


def redact(uri: str) -> str:
    """`uri` without its password, for everything that is shown or published."""
    password = urlsplit(uri).password
    return uri.replace(f":{password}@", ":***@") if password else uri


class NullTracker:
    """tracking=none: the interface of `Tracker`, doing nothing."""

    ready = True

    def start(self) -> None:
        """Nothing to start."""

    def state(self) -> dict[str, Any]:
        """Nothing was shipped."""
        return {}

    def finish(self, timeout_s: float) -> dict[str, Any]:
        """Nothing to end."""
        return {}


class Tracker:
    """Ships `run_dir` to MLflow through a child process; the store's trouble is never raised."""

    def __init__(
        self,
        run_dir: Path,
        settings: TrackingSettings,
        *,
        run_name: str,
        params: Params,
        tags: Mapping[str, str],
        parent_run_id: str | None = None,
        drain_s: float = 60.0,
    ) -> None:
        self._run_dir = Path(run_dir).absolute()
        self._process: subprocess.Popen[bytes] | None = None
        self._start_trouble: str | None = None
        self._request = _request(settings, run_name, tags, params, Path.cwd()) | {
            "parent_run_id": parent_run_id,
            "flush_s": settings.flush_s,
            "drain_s": drain_s,
            "system_metrics": settings.system_metrics,
            "max_artifact_bytes": settings.max_artifact_bytes,
        }

    def start(self) -> None:
        """Write the request and launch the child; takes milliseconds, `ready` follows later."""
        result = self._run_dir / "result.json"
        earlier = read_json(self._run_dir / REQUEST_FILE)
        host, pid, started = myself()
        self._request |= {
            "host": host,
            "pid": pid,
            "pid_started": started,
            "started": time.time(),
            # The run is found by this key again if the child dies before it could note the run id.
            "run_key": earlier.get("run_key", uuid.uuid4().hex),
            # A result left by the session that is being resumed says nothing about this one.
            "stale_result_ns": result.stat().st_mtime_ns if result.exists() else None,
        }
        # Only for its owner: the URI may carry a password.
        write_json(self._run_dir / REQUEST_FILE, self._request, mode=0o600)
        try:
            with open(self._run_dir / LOG_FILE, "ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", _WRITER, str(self._run_dir), "--follow"],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=self._run_dir,
                    env=_child_environment(),
                    # Ctrl-C in the terminal is for the trainer; the child then ships how it ended.
                    start_new_session=True,
                )
        except OSError as error:
            self._start_trouble = f"the tracking process did not start: {error}"
            _log.warning(self._start_trouble)

    @property
    def ready(self) -> bool:
        """Whether the child's costly start-up is over (the store is open, or out of reach)."""
        if self._process is None:
            return self._start_trouble is not None
        return self._process.poll() is not None or bool(self.state().get("ready"))

    def state(self) -> dict[str, Any]:
        """What the child last published; {} until then."""
        if self._process is None:
            return {"trouble": self._start_trouble} if self._start_trouble else {}
        state = read_json(self._run_dir / STATE_FILE)
        # A resumed run folder still holds the state of the session before.
        return state if state.get("writer_pid") == self._process.pid else {}

    def finish(self, timeout_s: float) -> dict[str, Any]:
        """Let the child drain and end; call once result.json is written.

        `pending` is True in the returned state if it still drains in the background after
        `timeout_s`, or ended without having shipped everything.
        """
        if self._process is None:
            return self.state()
        assert self._process.stdin is not None
        # The word besides the closing: a forked environment worker may hold a copy of the pipe.
        with contextlib.suppress(OSError, ValueError):  # the child is gone; a second call
            self._process.stdin.write(b"end\n")
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        state = self.state()
        state["pending"] = not state.get("finished", False)
        if state["pending"]:
            drains = self._process.poll() is None
            otherwise = "it still drains" if drains else f"see {self._run_dir / LOG_FILE}"
            trouble = state["trouble"] = state.get("trouble") or otherwise
            _log.warning(
                "MLflow does not have all of this run yet (%s); everything is in %s. "
                "Ship the rest with: python -m %s %s",
                *(trouble, self._run_dir, _WRITER, self._run_dir),
            )
        return state


def create_parent(
    settings: TrackingSettings, name: str, tags: Mapping[str, str], params: Params, cwd: Path,
    known: str | None = None,
) -> dict[str, str] | None:  # fmt: skip
    """Create the parent run of a sweep: {run_id, experiment_id, uri}, or None with a warning.

    `known` is the run id of an earlier session of the same sweep, which goes on in that run.
    """
    request = _request(settings, name, tags, params, cwd) | {"started": time.time()}
    request["known"] = known
    return _ask_writer("--create-parent", request)


def end_parent(
    ref: Mapping[str, str],
    status: str | None = "finished",
    artifacts: list[Path] | None = None,
    tags: Mapping[str, str] | None = None,
    artifact_path: str | None = None,
) -> bool:
    """End the run that `create_parent` made; False (and a warning) if the store was in trouble.

    `status` is finished, failed or killed, as in result.json; None leaves it as it is.
    """
    request = {
        "uri": ref["uri"],
        "run_id": ref["run_id"],
        "status": status,
        "artifacts": [str(Path(path).absolute()) for path in artifacts or []],
        "artifact_path": artifact_path,
        "tags": dict(tags or {}),
    }
    return _ask_writer("--end-run", request) is not None


def _request(
    settings: TrackingSettings, name: str, tags: Mapping[str, str], params: Params, cwd: Path
) -> dict[str, Any]:
    uri, experiment, artifact_root = resolve(settings, cwd, os.environ)
    return {
        "uri": uri,
        "experiment": experiment,
        "artifact_root": str(artifact_root) if artifact_root else None,
        "run_name": name,
        "params": dict(params),
        "tags": dict(tags),
        "cwd": str(cwd),
    }


def _ask_writer(option: str, request: dict[str, Any]) -> dict[str, str] | None:
    command = [sys.executable, "-m", _WRITER, option]
    try:
        answer = subprocess.run(
            command,
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=180,
            cwd=os.path.abspath(os.sep),
            env=_child_environment(),
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.warning("MLflow (%s): %s", redact(request["uri"]), error)
        return None
    if answer.returncode:
        lines = answer.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        _log.warning("MLflow (%s): %s", redact(request["uri"]), lines[-1])
        return None
    reply: dict[str, str] = json.loads(answer.stdout.decode().splitlines()[-1])
    return reply


def _child_environment() -> dict[str, str]:
    environment = dict(os.environ)
    # An inherited run id would make the child write into the parent's run.
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "PYTEST_CURRENT_TEST"):
        environment.pop(name, None)
    for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "VECLIB_MAXIMUM"):
        environment[f"{name}_NUM_THREADS"] = "1"
    # The child sleeps between batches and wakes with its memory cold: on huge pages a batch costs
    # a quarter of the CPU time. Both are needed: Python's own allocator would not ask for them.
    environment.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    environment.setdefault("PYTHONMALLOC", "malloc")
    # `-m` puts the working directory first on sys.path: a `types.py` there would break the child.
    environment["PYTHONSAFEPATH"] = "1"
    root = Path(__file__).resolve().parents[2]
    if "site-packages" not in root.parts:
        earlier = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{earlier}" if earlier else str(root)
    return environment


def trains(request: Mapping[str, Any]) -> bool:
    """Whether the process that wrote this REQUEST_FILE still runs, on this machine."""
    return bool(request) and alive(*(request[k] for k in ("host", "pid", "pid_started")))


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; {} if there is none."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_json(path: Path, value: dict[str, Any], mode: int = 0o644) -> None:
    """Replace `path` at once; a reader sees the old or the new text, never half of one."""
    partial = path.with_name(f"{path.name}.tmp")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
        json.dump(value, file, indent=1)
    os.replace(partial, path)
