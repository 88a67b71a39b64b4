"""Database files of MLflow: made aside and put in place whole, tidied, followed when they move."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from filelock import FileLock

from rl_pipeline.config.stores import StoreError, check_database, connect, uri_of
from rl_pipeline.machine import alive, myself

ARTIFACTS = "mlartifacts"
_ENDINGS = ("", "-journal", "-wal", "-shm")


def lock_of(database: Path) -> Any:
    """Lock that one process at a time holds while it opens or changes a store's schema."""
    if database.exists() and not os.access(database.parent, os.W_OK):
        return nullcontext()  # nothing can be made there, only read
    try:
        database.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{database.parent} cannot be made: {error.strerror}") from None
    return FileLock(f"{database}.lock", timeout=120)


def prepare(uri: str, database: Path, must_exist: bool = False, tidy: bool = True) -> None:
    """Have a sound store there; call while holding `lock_of(database)`, after importing mlflow.

    `tidy`: what others left is mended on the way. Raises StoreError where no store can be.
    """
    from mlflow.store.db.base_sql_model import Base

    for path, dead in leftovers(database):
        if dead and tidy:
            path.unlink(missing_ok=True)
    if must_exist and not database.exists():
        raise StoreError(
            f"there is no store {database} (any more); where it is now, say with "
            "tracking.uri=sqlite:////folder/mlflow.db"
        )
    check_database(database, Base.metadata.tables)
    if not database.exists():
        _make(database)
    _open_engine(uri)
    if tidy:
        with suppress(sqlite3.Error, OSError):  # a store that may only be read stays as it is
            follow_artifacts(database)


def _make(database: Path) -> None:
    """Make a store beside its place and link it there: it is whole, or not there at all."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    host, pid, started = myself()
    aside = database.with_name(f".{database.name}.{host}.{pid}.{int(started)}.new")
    try:
        with _in_words(database):
            try:
                _open_engine(uri_of(aside))
                SqlAlchemyStore(uri_of(aside), (database.parent / ARTIFACTS).as_uri())
            finally:
                _close_engine(uri_of(aside))
            _flush(aside)
            try:
                os.link(aside, database)
            except FileExistsError:
                pass  # made by a machine that does not see our lock
            except OSError:  # a file system without links
                if not database.exists():
                    os.rename(aside, database)
            _flush(database.parent)
    finally:
        for ending in _ENDINGS:
            Path(f"{aside}{ending}").unlink(missing_ok=True)


@contextmanager
def _in_words(database: Path) -> Iterator[None]:
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, OSError) as error:
        why = " ".join(str(error).split()).split(" [SQL:")[0]
        if re.search("disk is full|No space left|disk I/O error", why):
            why = "the disk is full"
        # It may be free again later: no StoreError.
        raise OSError(f"{database} cannot be made: {why}") from None


def _open_engine(uri: str) -> None:
    # MLflow itself tries ten times in 100 s, and makes folders from the quoted path of a URI.
    from mlflow.store.db.utils import create_sqlalchemy_engine
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    engines = getattr(SqlAlchemyStore, "_engine_map", {})
    if uri not in engines:
        engines[uri] = create_sqlalchemy_engine(uri)


def _close_engine(uri: str) -> None:
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    # One that stayed would go on in a file that has no name any more.
    if engine := getattr(SqlAlchemyStore, "_engine_map", {}).pop(uri, None):
        engine.dispose()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def leftovers(database: Path) -> list[tuple[Path, bool]]:
    """Half-made stores beside a store, and whether the process of this machine is dead."""
    name = re.escape(database.name)
    form = re.compile(rf"\.{name}\.(.+)\.(\d{{1,9}})\.(\d+)\.new(-journal|-wal|-shm)?")
    found = []
    for path in sorted(database.parent.iterdir()) if database.parent.is_dir() else ():
        if (parts := form.fullmatch(path.name)) and parts[1] == myself()[0]:
            found.append((path, not alive(parts[1], int(parts[2]), int(parts[3]))))
    return found


def num_runs(database: Path) -> int:
    """Number of runs that a store holds; 0 where it is not even that far."""
    try:
        with closing(connect(database, "ro")) as connection:
            return int(connection.execute("SELECT COUNT(*) FROM runs").fetchone()[0])
    except sqlite3.Error:
        return 0


def follow_artifacts(database: Path) -> int:
    """Have a store that was moved with its artifacts look for them beside it.

    MLflow keeps absolute folders, and would make the old ones anew. Returns how many experiments.
    """
    new, changed = database.parent / ARTIFACTS, 0
    with closing(connect(database, "rw")) as connection, connection:
        query = "SELECT DISTINCT artifact_location FROM experiments"
        for (location,) in connection.execute(query).fetchall():
            parts = urlsplit(location or "")
            root = Path(url2pathname(parts.path)).parent
            if parts.scheme != "file" or root.name != ARTIFACTS or root.exists() or root == new:
                continue
            old = location.rsplit("/", 1)[0]
            for table, column in (
                ("experiments", "artifact_location"), ("runs", "artifact_uri"),
                ("logged_models", "artifact_location"),
            ):  # fmt: skip
                with suppress(sqlite3.OperationalError):  # a version without that table
                    connection.execute(
                        f"UPDATE {table} SET {column} = ? || substr({column}, ?)"
                        f" WHERE substr({column}, 1, ?) = ?",
                        (new.as_uri(), len(old) + 1, len(old) + 1, f"{old}/"),
                    )
            changed += 1
    return changed
