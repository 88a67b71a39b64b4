"""The training side of tracking: names the store, starts the shipping child, never waits for it.

The trainer appends rows to `metrics.jsonl`, the record that survives everything. A child process
(`rl_pipeline.tracking.writer`) tails that file and ships it to MLflow, so that MLflow's import,
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
from pathlib import Path

from rl_pipeline import machine
from rl_pipeline.config.folders import REQUEST_FILE, STATE_FILE
from rl_pipeline.config.settings import TrackingSettings
from rl_pipeline.config.stores import database_of, hint_of, resolve
from rl_pipeline.files import read_json, working_directory, write_json
from rl_pipeline.redaction import redact
from rl_pipeline.terminal import shell_line
from rl_pipeline.tracking.notes import End, Param, Request, State, StoredRun, run_key_of

LOST = "lost_jobs"
"""Tag of a study: how many jobs ended before they had a run; `<LOST>.<n>` describes each."""
LOG_FILE = "tracking.log"
_WRITER = "rl_pipeline.tracking.writer"
PATIENCE_S = 8.0
"""Seconds that a store in trouble, or one that does not answer, keeps a finished run."""
_log = logging.getLogger(__name__)

Params = Mapping[str, Param]


class NullTracker:
    """tracking=none: the interface of `Tracker`, doing nothing."""

    ready = True

    def start(self) -> None:
        """Nothing to start."""

    def state(self) -> State:
        """Nothing was shipped."""
        return State()

    def finish(self, timeout_s: float) -> State:
        """Nothing to end."""
        return State()


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
        run = _stored_run(settings, run_name, tags, params, working_directory())
        self._request = Request(
            **dict(run),
            store=hint_of(database_of(run.uri), self._run_dir, working_directory()),
            flush_s=settings.flush_s,
            drain_s=drain_s,
            system_metrics=settings.system_metrics,
            max_artifact_bytes=settings.max_artifact_bytes,
        ).model_copy(update={"parent_run_id": parent_run_id})

    def start(self) -> None:
        """Write the request and launch the child; takes milliseconds, `ready` follows later."""
        result = self._run_dir / "result.json"
        stale = result.stat().st_mtime_ns if result.exists() else None
        earlier = read_json(path := self._run_dir / REQUEST_FILE)
        if path.exists() and run_key_of(earlier) is None:
            _log.warning("%s is damaged and written anew", path)
        host, pid, started = machine.myself()
        tags = {"run_folder": str(self._run_dir), **self._request.tags}
        self._request = self._request.model_copy(
            update={
                "host": host,
                "pid": pid,
                "pid_started": started,
                "started": time.time(),
                "run_key": run_key_of(earlier) or uuid.uuid4().hex,
                "stale_result_ns": stale,
                "tags": tags | {"process": json.dumps([host, pid, started])},
            }
        )
        for name in (REQUEST_FILE, STATE_FILE):
            _clear(self._run_dir / name)
        # Only for its owner: the URI may carry a password.
        write_json(self._run_dir / REQUEST_FILE, self._request.model_dump(), mode=0o600)
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
            self._start_trouble = redact(f"the tracking process did not start: {error}")
            _log.warning(self._start_trouble)

    @property
    def ready(self) -> bool:
        """Whether the child's costly start-up is over (the store is open, or out of reach)."""
        if self._process is None:
            return self._start_trouble is not None
        return self._process.poll() is not None or self.state().ready

    def state(self) -> State:
        """The State that the child last published; an empty one until then."""
        if self._process is None:
            return State(trouble=self._start_trouble) if self._start_trouble else State()
        state = State.read(self._run_dir)
        # A resumed run folder still holds the state of the session before.
        return state if state.writer_pid == self._process.pid else State()

    def finish(self, timeout_s: float) -> State:
        """Let the child drain and end; call once result.json is written.

        `pending` is True in the returned state if it still drains in the background after
        `timeout_s`, or ended without having shipped everything.
        """
        if self._process is None:
            return self.state()
        assert self._process.stdin is not None
        # Send "end" as well as closing the pipe: a forked environment worker may hold a copy.
        with contextlib.suppress(OSError, ValueError):  # the child is gone; a second call
            self._process.stdin.write(b"end\n")
            self._process.stdin.close()
        self._wait(timeout_s)
        state = self.state()
        if state.finished:
            return state.model_copy(update={"pending": False})
        drains = self._process.poll() is None
        otherwise = "it still drains" if drains else f"see {self._run_dir / LOG_FILE}"
        trouble = state.trouble or otherwise
        _log.warning(
            "MLflow does not have all of this run yet (%s); everything is in %s. "
            "Ship the rest with: %s",
            *(trouble, self._run_dir, shell_line("tracking.writer", str(self._run_dir))),
        )
        return state.model_copy(update={"pending": True, "trouble": trouble})

    def _wait(self, timeout_s: float) -> None:
        """Until the child has ended, `timeout_s` passed, or the store was given its chance."""
        assert self._process is not None
        begin = time.monotonic()
        while (passed := time.monotonic() - begin) < timeout_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(min(0.5, timeout_s - passed))
                return
            state = self.state()
            silent = time.time() - (state.asked_at or time.time()) > PATIENCE_S
            if (state.trouble or silent) and passed > PATIENCE_S:
                return


def create_parent(
    settings: TrackingSettings, name: str, tags: Mapping[str, str], params: Params, cwd: Path,
    known: str | None = None,
) -> dict[str, str] | None:  # fmt: skip
    """Create the parent run of a sweep: {run_id, experiment_id, uri}, or None with a warning.

    `known` is the run id of an earlier session of the same sweep, which goes on in that run.
    """
    run = _stored_run(settings, name, tags, params, cwd)
    return _ask_writer("--create-parent", run.model_copy(update={"known": known}))


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
    request = End(
        uri=ref["uri"],
        run_id=ref["run_id"],
        status=status,
        artifacts=[str(Path(path).absolute()) for path in artifacts or []],
        artifact_path=artifact_path,
        tags=dict(tags or {}),
    )
    return _ask_writer("--end-run", request) is not None


def _stored_run(
    settings: TrackingSettings, name: str, tags: Mapping[str, str], params: Params, cwd: Path
) -> StoredRun:
    uri, experiment, artifact_root = resolve(settings, cwd, os.environ)
    return StoredRun(
        uri=uri,
        experiment=experiment,
        artifact_root=str(artifact_root) if artifact_root else None,
        run_name=name,
        params={k: redact(v, uri) if isinstance(v, str) else v for k, v in params.items()},
        tags={key: redact(value, uri) for key, value in tags.items()},
        cwd=str(cwd),
        started=time.time(),
    )


def _ask_writer(option: str, request: StoredRun | End) -> dict[str, str] | None:
    command, uri = [sys.executable, "-m", _WRITER, option], request.uri
    try:
        answer = subprocess.run(
            command,
            input=request.model_dump_json().encode(),
            capture_output=True,
            timeout=180,
            cwd=os.path.abspath(os.sep),
            env=_child_environment(),
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        # The error of a child that took too long has the command, and not what it was asked.
        _log.warning("MLflow (%s): %s", redact(uri, uri), redact(str(error), uri))
        return None
    if answer.returncode:
        lines = answer.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        _log.warning("MLflow (%s): %s", redact(uri, uri), redact(lines[-1], uri))
        return None
    reply: dict[str, str] = json.loads(answer.stdout.decode().splitlines()[-1])
    return reply | {"uri": uri}


def _child_environment() -> dict[str, str]:
    environment = machine.module_environment()
    # An inherited run id would make the child write into the parent's run.
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "PYTEST_CURRENT_TEST"):
        environment.pop(name, None)
    for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "VECLIB_MAXIMUM"):
        environment[f"{name}_NUM_THREADS"] = "1"
    # The child sleeps between batches and wakes with its memory cold: on huge pages a batch costs
    # a quarter of the CPU time. Both are needed: Python's own allocator would not ask for them.
    environment.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    environment.setdefault("PYTHONMALLOC", "malloc")
    return environment


def _clear(path: Path) -> None:
    """Put a folder aside that stands in a file's place."""
    if path.is_dir() and not path.is_symlink():
        aside = (path.with_name(f"{path.name}.damaged{i or ''}") for i in range(10**6))
        path.rename(free := next(p for p in aside if not p.exists()))
        _log.warning("%s is a folder; it was put aside as %s", path, free.name)
