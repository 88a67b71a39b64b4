"""The store that a run is recorded in: its URI, its file, and whether that is one at all."""

from __future__ import annotations

import os
import re
import shlex
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from rl_pipeline.config.folders import REQUEST_FILE, STATE_FILE
from rl_pipeline.config.settings import TrackingSettings
from rl_pipeline.errors import ConfigError
from rl_pipeline.files import read_json, working_directory
from rl_pipeline.redaction import HIDDEN, redact
from rl_pipeline.terminal import in_shell

_SCHEMES = {"http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks"}
_DATABASES = ("postgresql", "mysql", "mssql")


class StoreError(ValueError):
    """The store cannot work however often one tries; the message says what to do."""


class HalfMade(StoreError):
    """The file was left by a process that died while it made the store."""


# -- the name of a store --------------------------------------------------------------------------


def resolve(
    settings: TrackingSettings, cwd: Path, environ: Mapping[str, str]
) -> tuple[str, str, Path | None]:
    """The store's URI, the experiment's name, and the artifact folder where the store has none.

    Raises ConfigError for a store that cannot work, before any work starts.
    """
    assert settings.name != "none", "tracking=none has no store"
    experiment = settings.experiment or environ.get("MLFLOW_EXPERIMENT_NAME") or "rl_pipeline"
    uri = settings.uri or environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        if settings.name == "server":
            raise ConfigError(
                "tracking=server needs an address: set tracking.uri=http://host:5000 or "
                "the environment variable MLFLOW_TRACKING_URI, or use tracking=mlflow"
            )
        uri = uri_of(cwd / "mlflow.db")
    key = "tracking.uri" if settings.uri else "MLFLOW_TRACKING_URI"
    origin = f"{key}={redact(uri, uri, environ=environ)}"
    # `postgresql+psycopg2://` names a driver behind the plus.
    scheme = uri.split(":", 1)[0].split("+")[0].lower() if ":" in uri else uri
    if scheme == "file" or not (":" in uri or scheme == "databricks"):
        folder = cwd / urlsplit(uri).path
        raise ConfigError(
            f"{origin} is a folder, and MLflow dropped its file stores; keep a database in it "
            f"instead: tracking.uri={uri_of(folder / 'mlflow.db')}"
        )
    if scheme == "postgres":
        raise ConfigError(f"{origin}: MLflow calls this kind `postgresql:`, not `postgres:`")
    plugins = {point.name for point in entry_points(group="mlflow.tracking_store")}
    if scheme not in _SCHEMES | plugins:
        raise ConfigError(
            f"{origin}: MLflow has no store of kind `{scheme}:`; the kinds here are "
            f"{', '.join(sorted(_SCHEMES | plugins))}"
        )
    if scheme == "sqlite":
        path, options = _sqlite_parts(uri, origin)
        database = Path(os.path.normpath(cwd / path))
        return uri_of(database, options), experiment, database.parent / "mlartifacts"
    if scheme in _DATABASES:
        return uri, experiment, cwd / "mlartifacts"
    if scheme in ("http", "https"):
        _check_address(uri, origin)
    return uri, experiment, None


def _check_address(uri: str, origin: str) -> None:
    user, at, place = uri.partition("://")[2].rpartition("@")
    if at and re.search(r"[/?#@\s]", user):
        raise ConfigError(
            f"{origin}: the characters / ? # @ of a user name or password are percent-encoded in "
            "an address (%2F %3F %23 %40); or give them as MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD"
        )
    try:
        address = urlsplit(f"http://{place}")
        host, port = address.hostname, address.port
    except ValueError:
        wrong = "its host or port cannot be read (a port is a number from 1 to 65535)"
    else:
        if host and port != 0 and re.fullmatch(r"[\w.-]+|[0-9a-fA-F:.%]+", host):
            return
        wrong = "it names no host" if not host else "its host or port cannot be"
    raise ConfigError(f"{origin} is no address: {wrong}; write it as http://host:5000")


def check_driver(uri: str, key: str = "tracking.uri") -> None:
    """Raise ValueError if the package that talks to this database is not installed."""
    if not uri.startswith(_DATABASES):
        return
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        make_url(uri).get_dialect().import_dbapi()
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{key}={redact(uri, uri)} needs the package {error.name}; for PostgreSQL: "
            "pip install 'rl_pipeline[postgres]'"
        ) from None
    except (ArgumentError, ValueError):  # an unknown driver is an ArgumentError, too
        raise ConfigError(
            f"{key}={redact(uri, uri)} is no database address; write it as "
            "postgresql://user@host:5432/database"
        ) from None


# -- stores that are files ------------------------------------------------------------------------


def uri_of(database: Path, options: str = "") -> str:
    """The URI of a database file, whatever characters are in its path."""
    path = str(database)
    if re.search(r"[^\w./ +-]", path):
        from sqlalchemy.engine import URL

        uri = URL.create("sqlite", database=path).render_as_string(hide_password=False)
    else:
        uri = f"sqlite:///{path}"
    return f"{uri}?{options}" if options else uri


def database_of(uri: str) -> Path | None:
    """The file of a store; None where it is a server's."""
    if not uri.lower().startswith("sqlite"):
        return None
    return Path(_sqlite_parts(uri, redact(uri))[0])


def _sqlite_parts(uri: str, origin: str) -> tuple[str, str]:
    """(path, options) as the library that opens it reads them; raises ValueError."""
    if plain := re.fullmatch(r"sqlite:///([\w./ +-]*[\w+-])", uri):
        return plain[1], ""  # without the import
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    options = uri.partition("?")[2]
    if not re.fullmatch(r"([\w.]+=[^&=/?]*(&|$))*", options):
        raise ConfigError(
            f"{origin}: in an address `?` begins its options; one in a path is written %3F"
        )
    try:
        url = make_url(uri)
    except (ArgumentError, ValueError):
        raise ConfigError(
            f"{origin} cannot be read; use tracking.uri=sqlite:////path/mlflow.db"
        ) from None
    path = url.database or ""
    if path.startswith("file:") or "uri=" in options:
        raise ConfigError(f"{origin}: name the file itself: tracking.uri=sqlite:////path/mlflow.db")
    if not path or path.endswith("/") or path == ":memory:" or "///" not in uri or "\0" in path:
        raise ConfigError(f"{origin} names no file; use tracking.uri=sqlite:////path/mlflow.db")
    return path, options


def check_database(database: Path, tables: Iterable[str] = ()) -> None:
    """Raise StoreError where a file is no store of MLflow, or one that cannot be written.

    A file that is not there yet is made later. `tables`: what the MLflow that is installed has.
    """
    try:
        _check_place(database)
        if database.exists():
            _check_contents(database, set(tables))
    except OSError as error:
        raise StoreError(f"{database} cannot be opened: {error.strerror or error}") from None


def _check_place(database: Path) -> None:
    if database.is_dir():
        raise StoreError(f"{database} is a folder; name a file in it: {database / 'mlflow.db'}")
    if database.exists():
        if not database.is_file():
            raise StoreError(f"{database} is no file; choose another")
        if not os.access(database, os.R_OK | os.W_OK) or not os.access(database.parent, os.W_OK):
            raise StoreError(
                f"{database} may not be written by you, or lies in a read-only folder; choose a "
                "store of your own"
            )
        return
    above = next(p for p in database.parents if p.exists())
    if not above.is_dir():
        raise StoreError(f"{database} cannot be created: {above} is a file; choose another path")
    if not os.access(above, os.W_OK | os.X_OK):
        raise StoreError(f"{database} cannot be created: you may not write to {above}")


def _check_contents(database: Path, expected: set[str]) -> None:
    try:
        found, version, rows = _look_into(database)
    except sqlite3.OperationalError as error:
        if "locked" in str(error) or "busy" in str(error):
            return  # somebody works with it, who knows what it is
        raise StoreError(f"{database} cannot be opened: {error}") from None
    except sqlite3.DatabaseError as error:
        raise StoreError(f"{database} is no database of SQLite ({error}); choose another") from None
    if found and not found & {"experiments", "alembic_version"}:
        if not any(table.startswith("_alembic_tmp") for table in found):
            raise StoreError(
                f"{database} is another program's database and no store of MLflow; choose another"
            )
    torn = not version or any(table.startswith("_alembic_tmp") for table in found)
    missing = expected - found
    if torn or (missing and not rows):
        raise HalfMade(
            f"{database} is half-made: the process that made the store died. Put it aside with "
            f"`python -m rl_pipeline.doctor {shlex.quote(f'uri={uri_of(database)}')}`, or move it"
        )
    if missing:
        raise StoreError(
            f"{database} was made by an older MLflow; back it up, then: "
            f"mlflow db upgrade {shlex.quote(uri_of(database))}"
        )


def _look_into(database: Path) -> tuple[set[str], str, int]:
    """Its tables, the version of its schema, and how many experiments it has."""
    # Never made anew: `mode=rw` opens what is there.
    where = f"file:{quote(str(database))}?mode=rw"
    with closing(sqlite3.connect(where, uri=True, timeout=5)) as connection:

        def ask(query: str) -> list[Any]:
            return connection.execute(query).fetchall()

        found = {name for (name,) in ask("SELECT name FROM sqlite_master WHERE type = 'table'")}
        versions = ask("SELECT * FROM alembic_version") if "alembic_version" in found else []
        rows = ask("SELECT COUNT(*) FROM experiments") if "experiments" in found else [(0,)]
    return found, str(versions[0][0] or "") if versions else "", int(rows[0][0])


# -- where a run's store is -----------------------------------------------------------------------


def hint_of(database: Path | None, run_dir: Path, cwd: Path) -> str | None:
    """The way from a run's folder to its store, where both would be moved together."""
    if database is None:
        return None
    together = database.parent in run_dir.parents or (
        cwd in database.parents and cwd in run_dir.parents
    )
    return os.path.relpath(database, run_dir) if together else None


def kept_uri(run_dir: Path) -> str | None:
    """The store that a run began in, found again where both were moved; None if that is unknown.

    Raises StoreError where the store is gone: a new and empty one in its place would have nothing
    of the run.
    """
    request, run_dir = read_json(run_dir / REQUEST_FILE), run_dir.absolute()
    state = read_json(run_dir / STATE_FILE)
    uri, run_id = request.get("uri"), state.get("run_id")
    if not isinstance(uri, str):
        # The other file shows it without its password, if it had one.
        uri = state.get("uri")
        if not isinstance(uri, str) or HIDDEN in uri:
            return None
    try:
        database = database_of(uri)
    except ValueError:
        return None
    if database is None:
        return uri
    options = uri.partition("?")[2]
    places = [database]
    if isinstance(hint := _hint(request, database), str):
        places.insert(0, Path(os.path.normpath(run_dir / hint)))
    there = [place for place in places if place.is_file()]
    ours = [place for place in there if isinstance(run_id, str) and has_run(place, run_id)]
    if found := ours or there:
        return uri_of(found[0], options)
    if not run_id:  # it never came so far
        return uri_of(next((p for p in places if p.parent.is_dir()), database), options)
    raise StoreError(
        f"the store of this run, {database}, is not there (any more), nor beside the run; where "
        "it is now, say with tracking.uri=sqlite:////folder/mlflow.db"
    )


def _hint(request: Mapping[str, Any], database: Path) -> object:
    if "store" in request:
        return request["store"]
    # A run of an earlier version knows where it was itself.
    tags = request.get("tags")
    folder = tags.get("run_folder") if isinstance(tags, dict) else None
    cwd = request.get("cwd")
    if not isinstance(folder, str) or not isinstance(cwd, str):
        return None
    return hint_of(database, Path(folder), Path(cwd))


def has_run(database: Path, run_id: str) -> bool:
    """Whether a store knows a run."""
    query = "SELECT 1 FROM runs WHERE run_uuid = ?"
    try:
        with closing(connect(database, "ro")) as connection:
            return bool(connection.execute(query, (run_id,)).fetchall())
    except sqlite3.Error:
        return False


def connect(database: Path, mode: str) -> sqlite3.Connection:
    """A database file, opened by `mode` (ro, rw) and never made."""
    where = f"file:{quote(str(database))}?mode={mode}"
    return sqlite3.connect(where, uri=True, timeout=5)


def how_to_open(uri: str) -> str:
    """The command or address with which to look at a store."""
    if uri.startswith("http"):
        return f"open {uri}"
    if uri == uri_of(working_directory() / "mlflow.db"):
        return "make ui  (or: mlflow ui --backend-store-uri sqlite:///mlflow.db)"
    database = database_of(uri)
    if database and "%" in uri and re.fullmatch(r"[\w.-]+", database.name):
        # MLflow's server makes a folder of the quoted path: better none is in it.
        folder = in_shell(str(database.parent))
        return f"cd {folder} && mlflow ui --backend-store-uri sqlite:///{database.name}"
    return f"mlflow ui --backend-store-uri {in_shell(uri)}"


def server_of(uri: str) -> str:
    """Address of a store's pages: its own server, or the one that `make ui` starts."""
    return uri if uri.startswith("http") else "http://127.0.0.1:5000"
