"""The door: `python -m rl_pipeline.compare study=<name or id> by=backend,precision`.

Reads any MLflow store (or a multirun folder), says which choice won, by how much, and whether
learning suffered; writes the tables and the page, and logs them to the study's parent run.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, model_validator

from rl_pipeline.config import cli
from rl_pipeline.config.app import refusing
from rl_pipeline.config.settings import Float, Frozen, PositiveFloat
from rl_pipeline.errors import ConfigError
from rl_pipeline.terminal import plain


class CompareSettings(Frozen):
    """Arguments of the door."""

    study: str | None = None
    """Name or MLflow run id of a multirun (its parent run), or a study.name of single runs."""
    runs: Annotated[list[str], BeforeValidator(cli.names)] = []
    """MLflow ids of single runs, instead of a study."""
    folder: Path | None = None
    """A multirun folder, instead of a store."""
    by: Annotated[list[str] | None, BeforeValidator(cli.names)] = None
    """Settings that make the groups, e.g. backend,precision; default: those that differ."""
    baseline: Annotated[dict[str, str] | None, BeforeValidator(cli.levels)] = None
    """The group that counts as 1, e.g. backend=gymnasium; default: the study's, else the first."""
    threshold: Float | None = None
    """A return: env steps and seconds until it is reached are told; default: the study's."""
    margin: PositiveFloat | None = None
    """Loss of return that still counts as not worse; default: 10 % of what the baseline learned."""
    steps: PositiveFloat | None = None
    """Env steps at which returns are compared; default: the least that all runs reached."""
    uri: str | None = None
    """Store; default: MLFLOW_TRACKING_URI, else mlflow.db here."""
    out: Path = Path("comparison")
    """Folder for table.md, groups.csv, comparison.json, index.html and the pictures."""

    @model_validator(mode="after")
    def _one_source(self) -> CompareSettings:
        if sum([self.study is not None, bool(self.runs), self.folder is not None]) != 1:
            raise ValueError("give one of study=<name or id>, runs=<ids>, folder=<multirun folder>")
        return self


def run(settings: CompareSettings) -> None:
    """Compare, print, write, log."""
    _check_out(settings.out)
    uri = cli.store_uri(settings.uri)

    from rl_pipeline.comparison import findings, measure, records, tables
    from rl_pipeline.tracking import tracker
    from rl_pipeline.tracking.store import quiet

    if settings.folder is not None:
        study = records.from_sweep(settings.folder)
    else:
        quiet()
        study = _read(uri, settings)
    baseline, threshold = settings.baseline, settings.threshold
    if baseline is None and study.baseline:
        own: dict[str, str] = cli.levels(study.baseline)
        baseline = {k: v for k, v in own.items() if settings.by is None or k in settings.by} or None
    threshold = study.threshold if threshold is None else threshold
    comparison = measure.compare(
        study, settings.by, baseline, threshold, settings.margin, settings.steps
    )
    tables.print_comparison(comparison)
    try:
        files = tables.write_comparison(comparison, settings.out)
    except OSError as error:
        raise ConfigError(f"out={settings.out}: {error.strerror or error}") from None
    print(f"page    {settings.out / 'index.html'}")
    parent = {"uri": uri, "run_id": study.parent_id or ""}
    ours = settings.folder is None and study.parent_id
    place = _place(settings)
    tags = {"answer": findings.in_one_line(comparison)} if place == "comparison" else {}
    if ours and tracker.end_parent(parent, None, files, tags, artifact_path=place):
        print(f"mlflow  artifacts of run {study.parent_id}, {place}/index.html")


def _place(settings: CompareSettings) -> str:
    """Folder for the artifacts: another question never replaces the answer of the sweep."""
    asked = settings.model_dump(include={"by", "baseline", "threshold", "margin", "steps"})
    words = [f"{key}={value}" for key, value in asked.items() if value is not None]
    return "-".join(["comparison", *re.findall(r"[\w.]+", " ".join(words))])


def _read(uri: str, settings: CompareSettings) -> Any:
    from rl_pipeline.config import stores
    from rl_pipeline.redaction import redact

    path = stores.database_of(uri)
    if path is not None:
        if not path.exists():
            raise ConfigError(f"there is no store {path}; give uri=... or folder=<multirun folder>")
        try:
            stores.check_database(path)
        except stores.StoreError as error:
            raise ConfigError(f"uri: {error}") from None

    from rl_pipeline.comparison import records
    from rl_pipeline.tracking.store import Store, one_line, trouble_kinds

    try:
        return records.from_store(Store(uri, must_exist=True), settings.study, settings.runs)
    except ConfigError:
        raise
    except trouble_kinds() as error:
        raise ConfigError(f"uri={redact(uri, uri)}: {one_line(error, uri)}") from None


def _check_out(out: Path) -> None:
    """Refuse a folder that cannot be one, before the reading: it takes a while."""
    above = next((p for p in (out.absolute(), *out.absolute().parents) if p.exists()), out)
    if not above.is_dir():
        raise ConfigError(f"out={out}: {above} is no folder; give the name of a folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"out={out}: you may not write in {above}; choose another folder")


def main() -> None:
    """Entry point."""
    with refusing("--help lists the arguments"):
        if {"-h", "--help"} & set(sys.argv[1:]):
            print(f"{__doc__}\n{cli.usage(CompareSettings)}")
            return
        try:
            run(cli.parse(CompareSettings, sys.argv[1:]))
        except ConfigError as error:
            raise ConfigError(plain(error)) from None  # it may name what lies in the store


if __name__ == "__main__":
    main()
