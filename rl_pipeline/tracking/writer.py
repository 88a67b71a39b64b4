"""The tracking child: tails a run's metrics.jsonl and ships it to MLflow in batches.

    python -m rl_pipeline.tracking.writer <run_dir>

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
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rl_pipeline import machine
from rl_pipeline.config.folders import REQUEST_FILE, STATE_FILE
from rl_pipeline.config.stores import StoreError, database_of
from rl_pipeline.files import write_json
from rl_pipeline.redaction import redact
from rl_pipeline.tracking import orphans, views
from rl_pipeline.tracking.final import final_metrics, machine_of
from rl_pipeline.tracking.notes import End, State, StoredRun, request_of
from rl_pipeline.tracking.store import (
    TAG_CHARS,
    Store,
    load_client,
    one_line,
    quiet,
    say,
    trouble_kinds,
)
from rl_pipeline.tracking.tail import CALL_VALUES, Batch, Tail

LOCK_FILE = ".writer.lock"


class Shipper:
    """Ships one run folder; `run()` returns an exit code."""

    def __init__(self, run_dir: Path, follow: bool) -> None:
        self._dir, self._follow, request = run_dir, follow, request_of(run_dir)
        writer = machine.myself()
        tags = request.tags | {"writer": json.dumps(writer)}
        self._request = request.model_copy(update={"tags": tags})
        uri = redact(request.uri, request.uri)
        earlier = State.read(run_dir)
        same = earlier.uri == uri
        # One that had this run and is gone was moved: an empty one would have nothing of it.
        self._must_exist = same and earlier.run_id is not None
        self._state = State(
            uri=uri, run_id=earlier.run_id, writer_pid=os.getpid(), writer=tuple(writer)
        )
        if same and earlier.run_id:
            # It is not known which of the rows another store has.
            self._note(
                offset=earlier.offset,
                nonfinite=earlier.nonfinite,
                nonfinite_keys=earlier.nonfinite_keys,
            )
        # The trainer's launch counts, where there is one: the interpreter's own start is in it.
        self._began = request.started if follow else time.time()
        self._ended, self._deadline = False, float("inf")
        self._store: Store | None = None
        self._run_id = ""
        self._calls_before = 0
        self._tidied = False
        self._tail: Tail | None = None
        self._pending: Batch | None = None
        self._monitor: Any = None
        self._sampled: list[tuple[str, float, int, int]] = []

    @property
    def uri(self) -> str:
        """The store."""
        return self._request.uri

    def _note(self, **changes: Any) -> None:
        self._state = self._state.model_copy(update=changes)

    def run(self) -> int:
        """Ship until the trainer has ended and everything is in the store, or `drain_s` passed."""
        backoff_s = 1.0
        trouble = trouble_kinds()
        hopeless = False
        while True:
            try:
                if self._store is None:
                    self._open()
                self._ship()
                if not self._tidied:
                    self._tidy()
                if self._ended:
                    self._finish()
                    return 0
                pause_s, backoff_s, hopeless = self._request.flush_s, 1.0, False
            except trouble as error:
                self._note_trouble(error)
                pause_s = min(backoff_s, 5.0 if self._ended else 60.0)
                backoff_s *= 2
                hopeless = isinstance(error, StoreError)
            # What cannot work is not waited for, once nobody can mend it meanwhile.
            if time.monotonic() > self._deadline or (hopeless and self._over()):
                say(f"gave up; the rest is in {self._dir}, ship it with this same command later")
                return 3
            self._wait(pause_s)
            self._sample()

    def _open(self) -> None:
        request = self._request
        load_client(request.uri)
        # To make a database, or to wait for whoever makes it, is the machine's work and no silence.
        self._ask(60.0 if database_of(request.uri) else 0.0)
        store = Store(request.uri, self._must_exist)
        self._must_exist = False
        experiment_id = store.experiment_id(request.experiment, request.artifact_root)
        known = self._state.run_id
        resumed = known is not None and store.reopen(known, request.tags)
        run_id = known if known and resumed else store.run_id(experiment_id, request)
        if not resumed:
            self._note(offset=0, nonfinite=0, nonfinite_keys={})
            self._tail = self._pending = None
        self._note(run_id=run_id, experiment_id=experiment_id, status="RUNNING")
        self._run_id = run_id
        self._store = store
        self._ask()
        store.describe(run_id, request)
        self._tail = self._tail or Tail(
            self._dir / "metrics.jsonl", self._state.offset, self._state.nonfinite
        )
        self._note_ready()
        self._ship_config()
        if request.system_metrics and not self._ended:
            from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

            self._monitor = SystemMetricsMonitor(
                run_id, resume_logging=resumed, tracking_uri=request.uri
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
        """Keep a sample of MLflow's monitor, which calls this to log it."""
        now_ms = int(time.time() * 1000)
        self._sampled += [(name, float(v), now_ms, step) for name, v in metrics.items()]

    def _ship(self) -> None:
        assert self._store is not None and self._tail is not None
        more = True
        while more:
            batch = self._pending = self._pending or self._tail.next() or self._no_rows()
            if batch is not None:
                self._ask()
                self._send(batch)
                self._note(offset=batch.offset, nonfinite=batch.count)
            if self._state.trouble:
                say("the store answers again")
            self._note(trouble=None, skipped_rows=self._tail.skipped)
            self._rest()
            self._pending, more = None, batch is not None

    def _tidy(self) -> None:
        """End what died on this machine without a word; a courtesy to others, tried once."""
        self._tidied = True
        assert self._store is not None
        self._ask()
        try:
            for run in orphans.find(self._store):
                if not run.lives:
                    say(f"{run.name} ({run.run_id}) died: {orphans.end(self._store, run)}")
        except trouble_kinds() as error:
            say(f"runs that died were not looked for: {one_line(error, self.uri)}")
        self._rest()

    def _ask(self, extra_s: float = 0.0) -> None:
        """Note that the store is asked now: who waits can tell a slow one from a silent one."""
        self._note(asked_at=time.time() + extra_s)
        self._publish()

    def _rest(self) -> None:
        self._note(asked_at=None)
        self._publish()

    def _no_rows(self) -> Batch | None:
        """A batch that carries samples where training writes nothing for a while."""
        return Batch(self._state.offset, self._state.nonfinite) if self._sampled else None

    def _send(self, batch: Batch) -> None:
        from mlflow.entities import Metric, RunTag

        known = self._state.nonfinite_keys
        first = {**batch.nonfinite, **known}
        tags = (
            [RunTag("nonfinite", "; ".join(first.values())[:TAG_CHARS])] if first != known else []
        )
        sampled = self._sampled[: max(0, CALL_VALUES - len(batch.values))]
        metrics = [Metric(*value) for value in batch.values + sampled]
        assert self._store is not None
        refusal = self._store.log(self._run_id, metrics=metrics, tags=tags)
        del self._sampled[: len(sampled)]
        count = len(batch.values)
        if refusal:
            self._note(nonfinite_keys=first, refused=self._state.refused + count)
            say(f"the store refused {len(metrics)} values: {refusal}")
        else:
            self._note(nonfinite_keys=first, values=self._state.values + count)

    def _ship_config(self) -> None:
        for path in sorted(self._dir.glob(".hydra/*.yaml")):
            self._artifact(path, "config")

    def _artifact(self, path: Path, folder: str | None = None) -> None:
        assert self._store is not None
        # A large file is not silence: a megabyte a second.
        self._ask(path.stat().st_size / 1e6)
        self._store.client.log_artifact(self._run_id, str(path), folder)

    def _finish(self) -> None:
        assert self._store is not None
        result = self._result()
        self._ship_config()
        for name in ("result.json", "metrics.jsonl"):
            if (self._dir / name).is_file():
                self._artifact(self._dir / name)
        died: dict[str, Any] = {
            "status": "failed",
            "reason": "the training process ended without writing a result",
        }
        last_words = self._dir / ("result.json" if result else "metrics.jsonl")
        # The run ended with its last words, however much later they are shipped.
        end_s = last_words.stat().st_mtime if last_words.exists() else time.time()
        result = result or died
        tags = {"reason": str(result["reason"])} if result.get("reason") else {}
        tags |= {"machine": machine_of(result)} | self._ship_model()
        # What took effect is known for sure at the end only (compile.fallback).
        effective = result.get("effective")
        if compiled := effective.get("compile") if isinstance(effective, dict) else None:
            tags["effective.compile"] = compiled
        if "resume" in result:
            tags["resumed"] = "true"
        tags = {key: redact(str(value), self.uri) for key, value in tags.items()}
        self._ask()
        self._store.log_final(self._run_id, final_metrics(result), int(end_s * 1000))
        status = self._store.end(self._run_id, result.get("status"), end_s, tags)
        self._note(status=status, finished=True)
        self._publish()

    def _ship_model(self) -> dict[str, str]:
        """The best checkpoint as an artifact; a tag that says so where it is too large for one."""
        best, limit = self._dir / "checkpoints" / "best.pt", self._request.max_artifact_bytes
        if not best.is_file() or not limit:
            return {}
        size = best.stat().st_size
        if size > limit:
            return {"model_not_logged": f"{size:,} bytes, tracking.max_artifact_bytes={limit:,}"}
        self._artifact(best, "model")
        return {}

    def _result(self) -> dict[str, Any]:
        """This session's result.json; {} before it is written."""
        return orphans.result_of(self._dir, self._request)

    def _wait(self, seconds: float) -> None:
        """Sleep, but wake at once when the trainer ends."""
        if self._ended:
            time.sleep(seconds)
        elif not self._over(seconds if self._follow else 0.0) and not self._follow:
            time.sleep(seconds)

    def _over(self, seconds: float = 0.0) -> bool:
        """Whether the trainer has ended, or does within `seconds`."""
        if not self._ended:
            if self._follow:
                over = bool(select.select([sys.stdin], [], [], seconds)[0])
            else:
                over = bool(self._result())
            if over or not self._request.trains:
                self._ended, self._deadline = True, time.monotonic() + self._request.drain_s
        return self._ended

    def _note_ready(self) -> None:
        if not self._state.ready:
            # MLflow's modules stay; every full collection would walk them again, mid-training.
            gc.freeze()
            startup_s = round(time.time() - self._began, 3)
            self._note(startup_s=startup_s, startup_cpu_s=time.process_time(), ready=True)
        self._publish()

    def _note_trouble(self, error: BaseException) -> None:
        text = one_line(error, self.uri)
        if not self._state.trouble:
            say(f"{text}; trying again until it works, rows stay in {self._dir}")
        self._note(trouble=text, asked_at=None)
        self._stop_monitor()
        if self._store is not None:
            self._calls_before += self._store.calls
            self._store = None
        # Whoever waits for the start-up to be over must not wait for a store that is away.
        with suppress(OSError):
            self._note_ready()

    def _stop_monitor(self) -> None:
        # A monitor that goes on after trouble counts from what the store has.
        self._monitor, self._sampled = None, []

    def _publish(self) -> None:
        calls = self._calls_before + (self._store.calls if self._store else 0)
        cpu_s = time.process_time() - (self._state.startup_cpu_s or time.process_time())
        self._note(calls=calls, cpu_s=round(cpu_s, 4))
        write_json(self._dir / STATE_FILE, self._state.model_dump(), sync=False)


@contextmanager
def told_without_secrets(uri: str) -> Iterator[None]:
    """An error of an unexpected kind is shown as Python shows it, without the passwords in it."""
    try:
        yield
    except Exception:
        print(redact(traceback.format_exc(), uri), file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)


def create_parent(request: StoredRun) -> dict[str, str]:
    """Create a sweep's run, or go on in the one it has: {run_id, experiment_id}."""
    store = Store(request.uri)
    experiment_id = store.experiment_id(request.experiment, request.artifact_root)
    orphans.end_dead(store)
    known = request.known
    goes_on = known is not None and store.reopen(known, request.tags)
    run_id = known if known and goes_on else store.run_id(experiment_id, request)
    store.describe(run_id, request)
    groups = str(request.params.get("grouped_by") or "")
    view = views.view_state(views.jobs_of(run_id), groups.split(",") if groups else ())
    store.client.set_experiment_tag(experiment_id, views.TAG + run_id, view)
    return {"run_id": run_id, "experiment_id": str(experiment_id)}


def end_run(request: End) -> dict[str, str]:
    """Log the last tags and artifacts of a sweep's run; end it, if `status` says how."""
    store, run_id = Store(request.uri, must_exist=True), request.run_id
    for path in request.artifacts:
        store.client.log_artifact(run_id, path, request.artifact_path)
    for key, value in request.tags.items():
        store.client.set_tag(run_id, key, str(value)[:TAG_CHARS])
    if request.status:
        store.end(run_id, request.status, time.time(), {})
    return {"run_id": run_id}


def main() -> int:
    """Command line of the child; 0 done, 1 store trouble, 3 gave up, 4 another one is at it."""
    parser = argparse.ArgumentParser(prog="python -m rl_pipeline.tracking.writer")
    parser.add_argument("run_dir", nargs="?", type=Path)
    parser.add_argument("--follow", action="store_true", help="until standard input ends")
    parser.add_argument("--create-parent", action="store_true", help="request on standard input")
    parser.add_argument("--end-run", action="store_true", help="request on standard input")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(10)
    quiet()
    if options.create_parent or options.end_run:
        asked = sys.stdin.read()
        request = (End if options.end_run else StoredRun).model_validate_json(asked)
        with told_without_secrets(request.uri):
            try:
                answer = end_run(request) if isinstance(request, End) else create_parent(request)
                print(json.dumps(answer))
            except trouble_kinds() as error:
                print(one_line(error, request.uri), file=sys.stderr)
                return 1
        return 0
    if options.run_dir is None or not (options.run_dir / REQUEST_FILE).exists():
        parser.error(f"give a run folder with {REQUEST_FILE} in it")
    run_dir = options.run_dir.absolute()
    lock = FileLock(run_dir / LOCK_FILE)
    try:
        # The writer of the session before may still drain.
        lock.acquire(timeout=120 if options.follow else 0)
    except Timeout:
        say(f"another process is shipping {run_dir} already")
        return 4
    try:
        shipper = Shipper(run_dir, options.follow)
        with told_without_secrets(shipper.uri):
            return shipper.run()
    except StoreError as error:
        say(str(error))
        return 2
    finally:
        (run_dir / LOCK_FILE).unlink(missing_ok=True)  # while it is held: nobody takes it for free
        lock.release()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Everything was sent synchronously; to take down MLflow's modules would cost 0.6 s more.
    os._exit(code)
