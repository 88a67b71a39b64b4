"""Runs and sweeps that a store calls RUNNING although their processes died: they are ended."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_pipeline import machine
from rl_pipeline.files import read_json
from rl_pipeline.tracking.notes import Request, State, run_key_of

if TYPE_CHECKING:
    from rl_pipeline.tracking.store import Store

DIED = "the training process died without ending the run"
SWEEP_DIED = "the sweep died"
_ENDS = ("finished", "failed", "killed")


@dataclass(frozen=True)
class Running:
    """A run of ours that began on this machine and has no end in the store."""

    run_id: str
    name: str
    lives: bool
    tags: Mapping[str, str]

    @property
    def folder(self) -> Path:
        """The folder that it ran in."""
        return Path(self.tags.get("run_folder", ""))

    @property
    def is_study(self) -> bool:
        """Whether it is the parent of a sweep's jobs."""
        return self.tags.get("kind") == "study"


def is_study(tags: Mapping[str, str]) -> bool:
    """Whether a run is the parent of a sweep of ours: others may use the same words."""
    process = tags.get("process")
    plain = process is None or machine.process_of(process) is not None
    return tags.get("kind") == "study" and "study" in tags and plain


def _is_ours(tags: Mapping[str, str]) -> bool:
    return is_study(tags) or (run_key_of(tags) is not None and "run_folder" in tags)


def find(store: Store) -> list[Running]:
    """The runs of this machine that the store calls RUNNING, living and dead."""
    found = []
    # A JSON list: most foreign runs stay in the store. (A `[` is special to one of the databases.)
    for run in store.search("attributes.status = 'RUNNING' and tags.process LIKE '%]'"):
        tags = run.data.tags
        process = machine.process_of(tags.get("process"))
        if process and _is_ours(tags) and process[0] == socket.gethostname():
            found.append(Running(run.info.run_id, run.info.run_name, _lives(tags), tags))
    return found


def _lives(tags: Mapping[str, str]) -> bool:
    """Whether its trainer or sweep runs, or a writer still ships what it left."""
    if any(not _dead(tags.get(key)) for key in ("process", "writer")):
        return True
    folder = Path(tags.get("run_folder", ""))
    request = _request_of(folder, tags)
    # Resumed a moment ago, the store does not know of it yet.
    return request is not None and (request.trains or not _dead(State.read(folder).writer))


def _request_of(folder: Path, tags: Mapping[str, str]) -> Request | None:
    """The request of the folder that a run's tags name, if that holds the same run."""
    request, key = Request.read(folder), run_key_of(tags)
    return request if request and key and request.run_key == key else None


def _dead(process: object) -> bool:
    return process is None or machine.died_here(process) or machine.process_of(process) is None


def end(store: Store, run: Running) -> str:
    """End a run that is dead as its own last words say, else as killed; returns the reason."""
    request = _request_of(run.folder, run.tags)
    result = result_of(run.folder, request) if request else {}
    status, reason = "killed", SWEEP_DIED if run.is_study else DIED
    if result.get("status") in _ENDS and result.get("run_id") == run.tags.get("run_id"):
        status, reason = result["status"], str(result.get("reason") or "")
    words = run.folder / ("result.json" if result else "metrics.jsonl")
    end_s = words.stat().st_mtime if request and words.is_file() else time.time()
    store.end(run.run_id, status, end_s, {"reason": reason} if reason else {})
    return reason or str(status)


def end_dead(store: Store) -> list[Running]:
    """End all that are dead; returns them."""
    dead = [run for run in find(store) if not run.lives]
    for run in dead:
        end(store, run)
    return dead


def result_of(folder: Path, request: Request) -> dict[str, Any]:
    """result.json of the session that wrote `request`; {} before it is written."""
    path = folder / "result.json"
    if not path.is_file() or path.stat().st_mtime_ns == request.stale_result_ns:
        return {}
    return read_json(path)
