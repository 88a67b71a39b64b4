"""The tracking child: tails a run's metrics.jsonl and ships it to MLflow in batches.

    python -m rl_pipeline.telemetry.writer <run_dir>

ships what a run left unshipped, and ends its run; the trainer starts the same with `--follow`.
`mlflow.json` in the run folder says how far it came.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rl_pipeline.telemetry import views
from rl_pipeline.telemetry.final import final_metrics, machine_of
from rl_pipeline.telemetry.store import TAG_CHARS, Store, one_line, quiet, say, trouble_kinds
from rl_pipeline.telemetry.tail import CALL_VALUES, Batch, Tail
from rl_pipeline.telemetry.tracker import (
    REQUEST_FILE,
    STATE_FILE,
    read_json,
    redact,
    trains,
    write_json,
)


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
        self._sampled: list[tuple[str, float, int, int]] = []

    def run(self) -> int:
        """Ship until the trainer has ended and everything is in the store, or `drain_s` passed."""
        backoff_s = 1.0
        trouble = trouble_kinds()
        while True:
            try:
                if self._store is None:
                    self._open()
                self._ship()
                if self._ended:
                    self._finish()
                    return 0
                pause_s, backoff_s = self._request["flush_s"], 1.0
            except trouble as error:
                self._note_trouble(error)
                pause_s = min(backoff_s, 5.0 if self._ended else 60.0)
                backoff_s *= 2
            if time.monotonic() > self._deadline:
                say(f"gave up; the rest is in {self._dir}, ship it with this same command later")
                return 3
            self._wait(pause_s)
            self._sample()

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
            # Not started: its thread reads the whole run back and sends a batch of its own for
            # every sample, half of what tracking costs. Ours travel with the rows.
            self._monitor.mlflow_logger = self

    def _sample(self) -> None:
        """MLflow's own metrics of the machine, for the next batch."""
        if self._monitor is None:
            return
        try:
            self._monitor.collect_metrics()
            self._monitor.publish_metrics(self._monitor.aggregate_metrics())
        except Exception as error:  # context only, from drivers of any kind
            say(f"no more system metrics: {one_line(error)}")
            self._stop_monitor()

    def record_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """What MLflow's monitor calls to log a sample."""
        now_ms = int(time.time() * 1000)
        self._sampled += [(name, float(v), now_ms, step) for name, v in metrics.items()]

    def _ship(self) -> None:
        assert self._store is not None and self._tail is not None
        more = True
        while more:
            batch = self._pending = self._pending or self._tail.next() or self._no_rows()
            if batch is not None:
                self._send(batch)
                self._state |= {"offset": batch.offset, "nonfinite": batch.count}
            if self._state["trouble"]:
                say("the store answers again")
            self._state |= {"trouble": None, "skipped_rows": self._tail.skipped}
            self._publish()
            self._pending, more = None, batch is not None

    def _no_rows(self) -> Batch | None:
        """What carries samples where training writes nothing for a while."""
        return Batch(self._state["offset"], self._state["nonfinite"]) if self._sampled else None

    def _send(self, batch: Batch) -> None:
        from mlflow.entities import Metric, RunTag

        known = self._state["nonfinite_keys"]
        first = {**batch.nonfinite, **known}
        tags = (
            [RunTag("nonfinite", "; ".join(first.values())[:TAG_CHARS])] if first != known else []
        )
        sampled = self._sampled[: max(0, CALL_VALUES - len(batch.values))]
        metrics = [Metric(*value) for value in batch.values + sampled]
        assert self._store is not None
        refusal = self._store.log(self._state["run_id"], metrics=metrics, tags=tags)
        del self._sampled[: len(sampled)]
        self._state["nonfinite_keys"] = first
        self._state["refused" if refusal else "values"] += len(batch.values)
        if refusal:
            say(f"the store refused {len(metrics)} values: {refusal}")

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
        died: dict[str, Any] = {
            "status": "failed",
            "reason": "the training process died without a word",
        }
        last_words = self._dir / ("result.json" if result else "metrics.jsonl")
        # The run ended with its last words, however much later they are shipped.
        end_s = last_words.stat().st_mtime if last_words.exists() else time.time()
        result = result or died
        tags = {"reason": str(result["reason"])} if result.get("reason") else {}
        tags |= {"machine": machine_of(result)} | self._ship_model(run_id)
        # What took effect is known for sure at the end only (compile.fallback).
        if compiled := result.get("effective", {}).get("compile"):
            tags["effective.compile"] = compiled
        if "resume" in result:
            tags["resumed"] = "true"
        self._store.log_final(run_id, final_metrics(result), int(end_s * 1000))
        status = self._store.end(run_id, result.get("status"), end_s, tags)
        self._state |= {"status": status, "finished": True}
        self._publish()

    def _ship_model(self, run_id: str) -> dict[str, str]:
        """The best checkpoint as an artifact; a tag that says so where it is too large for one."""
        best, limit = self._dir / "checkpoints" / "best.pt", self._request["max_artifact_bytes"]
        if not best.exists() or not limit:
            return {}
        assert self._store is not None
        size = best.stat().st_size
        if size > limit:
            return {"model_not_logged": f"{size:,} bytes, tracking.max_artifact_bytes={limit:,}"}
        self._store.client.log_artifact(run_id, str(best), "model")
        return {}

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
        over = over or not trains(self._request)
        if over:
            self._ended, self._deadline = True, time.monotonic() + self._request["drain_s"]
        elif not self._follow:
            time.sleep(seconds)

    def _note_ready(self) -> None:
        if not self._state["ready"]:
            # MLflow's modules stay; every full collection would walk them again, mid-training.
            gc.freeze()
            self._state["startup_s"] = round(time.time() - self._began, 3)
            self._state["startup_cpu_s"] = time.process_time()
            self._state["ready"] = True
        self._publish()

    def _note_trouble(self, error: BaseException) -> None:
        text = one_line(error).replace(self._request["uri"], self._state["uri"])
        if not self._state["trouble"]:
            say(f"{text}; trying again until it works, rows stay in {self._dir}")
        self._state["trouble"] = text
        self._stop_monitor()
        if self._store is not None:
            self._calls_before += self._store.calls
            self._store = None
        # Who waits for the start-up to be over must not wait for a store that is away.
        with suppress(OSError):
            self._note_ready()

    def _stop_monitor(self) -> None:
        # A monitor that goes on after trouble counts from what the store has.
        self._monitor, self._sampled = None, []

    def _publish(self) -> None:
        calls = self._calls_before + (self._store.calls if self._store else 0)
        cpu_s = time.process_time() - (self._state["startup_cpu_s"] or time.process_time())
        self._state |= {"calls": calls, "cpu_s": round(cpu_s, 4)}
        write_json(self._dir / STATE_FILE, self._state)


def create_parent(request: Mapping[str, Any]) -> dict[str, str]:
    """Create a sweep's run, or go on in the one it has: {run_id, experiment_id, uri}."""
    store = Store(request["uri"])
    experiment_id = store.experiment_id(request["experiment"], request["artifact_root"])
    store.end_dead_studies()
    known = request["known"]
    run_id = known if known and store.reopen(known) else store.run_id(experiment_id, request)
    store.describe(run_id, request)
    groups = request["params"].get("grouped_by", "")
    view = views.view_state(views.jobs_of(run_id), groups.split(",") if groups else ())
    store.client.set_experiment_tag(experiment_id, views.TAG + run_id, view)
    return {"run_id": run_id, "experiment_id": experiment_id, "uri": request["uri"]}


def end_run(request: Mapping[str, Any]) -> dict[str, str]:
    """Log the last tags and artifacts of a sweep's run; end it, if `status` says how."""
    store, run_id = Store(request["uri"]), request["run_id"]
    for path in request["artifacts"]:
        store.client.log_artifact(run_id, path, request["artifact_path"])
    for key, value in request["tags"].items():
        store.client.set_tag(run_id, key, str(value)[:TAG_CHARS])
    if request["status"]:
        store.end(run_id, request["status"], time.time(), {})
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
    quiet()
    if options.create_parent or options.end_run:
        answer = create_parent if options.create_parent else end_run
        try:
            print(json.dumps(answer(json.load(sys.stdin))))
        except trouble_kinds() as error:
            print(one_line(error), file=sys.stderr)
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
        say(f"another process is shipping {run_dir} already")
        return 4
    with lock:
        return Shipper(run_dir, options.follow).run()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Everything was sent synchronously; to take down MLflow's modules would cost 0.6 s more.
    os._exit(code)
