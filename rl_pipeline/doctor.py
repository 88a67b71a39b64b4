"""The door: `python -m rl_pipeline.doctor` mends what dead processes left, and says what it did.

Looks at the store (`uri=`) and at the run folders below outputs/ and multirun/ of the working
directory. It ends runs and sweeps whose processes on this machine are dead, puts a half-made store
aside, and removes temporary files of ours. What lives or belongs to others is left alone.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rl_pipeline import machine
from rl_pipeline.config import cli
from rl_pipeline.config.app import refusing
from rl_pipeline.config.settings import Frozen
from rl_pipeline.errors import ConfigError
from rl_pipeline.files import Claim, damage, read_json

_TEMPORARY = ("*.tmp", "checkpoints/*.tmp", ".room", ".writer.lock")


class DoctorSettings(Frozen):
    """Arguments of the door."""

    uri: str | None = None
    """Store; default: MLFLOW_TRACKING_URI, else mlflow.db here."""
    fix: bool = True
    """Mend what can be mended; false only tells."""


@dataclass(frozen=True)
class Finding:
    """Something that was found, and what was done about it."""

    what: str
    where: str
    done: str
    well: bool = True
    """Nothing is left to do about it here."""


def examine(settings: DoctorSettings) -> Iterator[Finding]:
    """Look at everything, mending on the way; raises ConfigError for a store that cannot be."""
    uri = cli.store_uri(settings.uri)
    yield from _store(uri, settings.fix)
    yield from _folders(settings.fix)


def _store(uri: str, fix: bool) -> Iterator[Finding]:
    from rl_pipeline.config import stores
    from rl_pipeline.redaction import redact
    from rl_pipeline.tracking import databases

    database = stores.database_of(uri)
    if database is not None:
        yield from _leftovers(database, fix)
        try:
            stores.check_database(database)
        except stores.HalfMade as error:
            yield _put_aside(database, fix) or Finding(
                "half-made store", str(database), str(error), False
            )
            return
        except stores.StoreError as error:
            yield Finding("store", str(database), str(error), False)
            return
        if not database.exists():
            yield Finding("store", str(database), "none yet: the first run makes it")
            return
        if fix and (moved := databases.follow_artifacts(database)):
            yield Finding("moved artifacts", str(database), f"{moved} places are found again")

    from rl_pipeline.tracking.store import Store, one_line, quiet, trouble_kinds

    quiet()
    try:
        yield from _running(Store(uri, must_exist=True, tidy=fix), fix)
        yield Finding("store", redact(uri, uri), "is sound")
    except trouble_kinds() as error:
        yield Finding("store", redact(uri, uri), one_line(error, uri), False)


def _leftovers(database: Path, fix: bool) -> Iterator[Finding]:
    from rl_pipeline.tracking import databases

    for path, dead in databases.leftovers(database):
        if not dead:
            yield Finding("store in the making", str(path), "its process lives: left alone")
        elif fix:
            path.unlink(missing_ok=True)
            yield Finding("half-made store", str(path), "its process died: removed")
        else:
            yield Finding("half-made store", str(path), "its process died: fix=true removes it",
                          False)  # fmt: skip


def _put_aside(database: Path, fix: bool) -> Finding | None:
    """Rename a half-made store, where no run is in it; None where that is not ours to do."""
    from rl_pipeline.tracking import databases

    what, where = "half-made store", str(database)
    if runs := databases.num_runs(database):
        return Finding(what, where, f"holds {runs} runs: restore it from a backup", False)
    if not fix:
        return Finding(what, where, "holds no runs: fix=true puts it aside", False)
    names = (database.with_name(f"{database.name}.half-made{i or ''}") for i in range(10**6))
    aside = next(name for name in names if not name.exists())
    try:
        with databases.lock_of(database):
            for ending in ("-journal", "-wal", "-shm", ""):
                if (part := Path(f"{database}{ending}")).exists():
                    part.rename(f"{aside}{ending}")
    except OSError as error:
        return Finding(what, where, f"cannot be put aside: {error.strerror or error}", False)
    return Finding(what, where, f"put aside as {aside.name}; the next run makes a new one")


def _running(store: object, fix: bool) -> Iterator[Finding]:
    from rl_pipeline.tracking import orphans
    from rl_pipeline.tracking.store import Store

    assert isinstance(store, Store)
    for run in orphans.find(store):
        what = "sweep" if run.is_study else "run"
        where = f"{run.name} ({run.run_id})"
        if run.lives:
            yield Finding(f"living {what}", where, "left alone")
        elif fix:
            yield Finding(f"orphaned {what}", where, f"closed: {orphans.end(store, run)}")
        else:
            yield Finding(f"orphaned {what}", where, "its process died: fix=true closes it", False)


def _folders(fix: bool) -> Iterator[Finding]:
    from rl_pipeline.config.folders import REQUEST_FILE

    signs = ("run.json", REQUEST_FILE, ".room")
    places = [Path(root) for root in ("outputs", "multirun")]
    folders = {p.parent for root in places for sign in signs for p in root.rglob(sign)}
    for folder in sorted(folders):
        try:
            claim = Claim(folder)
        except ConfigError:
            continue  # a run is being trained there
        claim.begun = True
        if not _ships(folder):
            yield from _unshipped(folder)
            yield from _temporary(folder, fix)
            yield from _unborn(folder, fix)
        claim.release()


def _unshipped(folder: Path) -> Iterator[Finding]:
    from rl_pipeline.config.folders import REQUEST_FILE

    path = folder / REQUEST_FILE
    if not path.exists():
        return
    if damage(path):
        yield Finding("damaged file", str(path), "resuming its run writes it anew", False)
    elif not _is_shipped(folder):
        line = f"python -m rl_pipeline.tracking.writer {shlex.quote(str(folder))}"
        yield Finding("unshipped rows", str(folder), f"ship them: {line}")


def _unborn(folder: Path, fix: bool) -> Iterator[Finding]:
    """A start that was killed before its run existed."""
    if {path.name for path in folder.iterdir()} - {".hydra", ".room"}:
        return
    if fix:
        shutil.rmtree(folder / ".hydra", ignore_errors=True)
        folder.rmdir()
    done = "removed" if fix else "fix=true removes it"
    yield Finding("killed start", str(folder), done, fix)


def _ships(folder: Path) -> bool:
    """Whether a writer still works there."""
    from rl_pipeline.config.folders import STATE_FILE

    writer = machine.process_of(read_json(folder / STATE_FILE).get("writer"))
    return writer is not None and not machine.died_here(writer)


def _is_shipped(folder: Path) -> bool:
    """Whether a writer came to the end of everything that the run left."""
    from rl_pipeline.config.folders import STATE_FILE

    state, rows = read_json(folder / STATE_FILE), folder / "metrics.jsonl"
    size = rows.stat().st_size if rows.is_file() else 0
    return state.get("finished") is True and state.get("offset") == size


def _temporary(folder: Path, fix: bool) -> Iterator[Finding]:
    """The finding of files that a killed process was writing; `fix` removes them."""
    found = [p for pattern in _TEMPORARY for p in folder.glob(pattern) if p.is_file()]
    if not found:
        return
    names = ", ".join(str(path.relative_to(folder)) for path in found)
    if fix:
        for path in found:
            path.unlink(missing_ok=True)
    done = "of dead processes: removed" if fix else "of dead processes: fix=true removes them"
    yield Finding("stale files", f"{folder}: {names}", done, fix)


def run(settings: DoctorSettings) -> int:
    """Examine and print what was found; 0 where all is well or mended, else 1."""
    findings = list(examine(settings))
    for finding in findings:
        # No table: it would break paths and commands, which are there to be pasted.
        print(f"{finding.what}: {finding.where}\n    {finding.done}")
    left = [finding for finding in findings if not finding.well]
    print(f"{len(left)} of {len(findings)} need you" if left else "all is well")
    return 1 if left else 0


def main() -> None:
    """Entry point."""
    with refusing("--help lists the arguments"):
        if {"-h", "--help"} & set(sys.argv[1:]):
            print(f"{__doc__}\n{cli.usage(DoctorSettings)}")
            return
        sys.exit(run(cli.parse(DoctorSettings, sys.argv[1:])))


if __name__ == "__main__":
    main()
