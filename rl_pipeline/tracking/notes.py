"""Messages between a trainer and its writer: two files of a run folder, as types.

The trainer writes `tracking.json` (a Request) once, the writer `mlflow.json` (a State) again and
again. Both may be damaged or of another version: keys that are not known here are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from rl_pipeline import machine
from rl_pipeline.config.folders import REQUEST_FILE, STATE_FILE
from rl_pipeline.config.stores import StoreError, database_of, kept_uri
from rl_pipeline.files import read_json
from rl_pipeline.tracking.databases import ARTIFACTS

Param = str | int | float | bool | None


class Note(BaseModel):
    """Immutable; `model_copy(update=...)` makes the next one."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


class StoredRun(Note):
    """The run that a store shall have, and which store."""

    uri: str
    """MLflow's address of the store, with its password."""
    experiment: str
    artifact_root: str | None = None
    """Place for artifacts; None: the store's own choice."""
    run_name: str
    params: dict[str, Param]
    tags: dict[str, str]
    cwd: str = ""
    """The working directory of the trainer or sweep."""
    started: float
    """Seconds since the epoch."""
    run_key: str | None = None
    """The run is found by it again if the writer dies before it could note the run id."""
    parent_run_id: str | None = None
    known: str | None = None
    """Run id of an earlier session, which goes on in that run (a sweep's own run)."""


class Request(StoredRun):
    """tracking.json: what the trainer asks of its writer. Only its owner can read it."""

    store: str | None = None
    """Path of the database, seen from the run folder, if both are moved together."""
    flush_s: float
    """Seconds between two batches."""
    drain_s: float
    """Seconds that the writer tries on after the trainer has ended."""
    system_metrics: bool = False
    max_artifact_bytes: int
    host: str | None = None
    pid: int | None = None
    pid_started: float | None = None
    """The trainer's process, by which it is known to live."""
    stale_result_ns: int | None = None
    """Time of the result.json that the session before left: it says nothing about this one."""

    @classmethod
    def read(cls, folder: Path) -> Request | None:
        """The request in a run folder; None where there is none or it is damaged."""
        try:
            return cls.model_validate(read_json(folder / REQUEST_FILE))
        except ValidationError:
            return None

    @property
    def trains(self) -> bool:
        """Whether the process that wrote it still runs, on this machine."""
        process = machine.process_of([self.host, self.pid, self.pid_started])
        return process is not None and machine.alive(*process)


class End(Note):
    """The end of a sweep's run."""

    uri: str
    run_id: str
    status: str | None
    """finished, failed or killed, as in result.json; None leaves it as it is."""
    artifacts: list[str]
    artifact_path: str | None
    tags: dict[str, str]


class State(Note):
    """mlflow.json: how far the writer came, with the address of the store but not its password."""

    uri: str = ""
    run_id: str | None = None
    experiment_id: str | None = None
    status: str | None = None
    """MLflow's word for how the run stands."""
    ready: bool = False
    """The start-up is over: the store is open, or out of reach."""
    finished: bool = False
    """Everything is in the store, and the run has its end there."""
    pending: bool = False
    """The trainer did not wait longer: the writer still drains, or ended too early."""
    trouble: str | None = None
    """Why the store does not take anything now."""
    asked_at: float | None = None
    """Since when the store is being asked something; seconds since the epoch."""
    offset: int = 0
    """Bytes of metrics.jsonl that are in the store."""
    values: int = 0
    """Values that the store took in this session."""
    refused: int = 0
    calls: int = 0
    skipped_rows: int = 0
    """Rows that were damaged."""
    nonfinite: int = 0
    nonfinite_keys: dict[str, str] = {}
    """First value of a metric that was not finite, and its step, in words; by its name."""
    startup_s: float | None = None
    startup_cpu_s: float | None = None
    cpu_s: float = 0.0
    """CPU seconds of the writer since its start-up."""
    writer_pid: int | None = None
    writer: tuple[str, int, float] | None = None
    """The writer's process, by which it is known to live: host, pid, start."""

    def dump(self) -> dict[str, Any]:
        """Known fields, as a part of result.json."""
        return self.model_dump(exclude_unset=True)

    @classmethod
    def read(cls, folder: Path) -> State:
        """The state in a run folder; of a damaged one, the run id alone."""
        found = read_json(folder / STATE_FILE)
        try:
            return cls.model_validate(found)
        except ValidationError:
            run_id = found.get("run_id")
            return cls(run_id=run_id) if isinstance(run_id, str) else cls()


def request_of(run_dir: Path) -> Request:
    """The request of a run folder, whole; raises StoreError naming the file that is damaged."""
    path = run_dir / REQUEST_FILE
    try:
        request = Request.model_validate(read_json(path))
    except ValidationError as error:
        raise StoreError(
            f"{path} is damaged (its {error.errors()[0]['loc'][0]}), so nobody can tell where this "
            "run belongs: resume the run, which writes the file anew"
        ) from None
    uri = kept_uri(run_dir) or request.uri
    if uri != request.uri and (database := database_of(uri)):
        return request.model_copy(
            update={"uri": uri, "artifact_root": str(database.parent / ARTIFACTS)}
        )
    return request


def run_key_of(found: Mapping[str, object]) -> str | None:
    """The key by which a store knows a run, from a run's tags or a REQUEST_FILE."""
    key = found.get("run_key")
    return key if isinstance(key, str) and re.fullmatch("[0-9a-f]{32}", key) else None
