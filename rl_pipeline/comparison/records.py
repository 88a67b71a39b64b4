"""Finished runs as comparisons see them, read from run folders or from any MLflow store."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_pipeline.comparison import shapes
from rl_pipeline.config.folders import STUDY_FILE, flatten, sweeps_elsewhere
from rl_pipeline.config.options import near
from rl_pipeline.errors import ConfigError
from rl_pipeline.telemetry.provenance import changed_code
from rl_pipeline.tracking import orphans
from rl_pipeline.tracking.final import final_metrics, machine_of
from rl_pipeline.tracking.tracker import LOST

if TYPE_CHECKING:
    from rl_pipeline.tracking.store import Store

# What was asked for and what came of it: the key of result.json's `effective` to the setting's own.
_EFFECTIVE = {
    "num_envs": "backend.num_envs", "lanes": "backend.lanes", "placement": "buffer.placement",
    "compile_backend": "compile.backend",
}  # fmt: skip
# Settings of how a run is kept and watched; the seed makes a repetition.
_PROTOCOL = (
    "seed", "resume", "max_wall_s", "log_every_s", "tracking", "study", "eval", "checkpoint",
)  # fmt: skip
CURVES = (
    "return/train", "return/eval", "throughput/env_steps_per_s", "cpu/rss_bytes",
    "gpu/mem_used_bytes", "gpu/power_w",
)  # fmt: skip


NO_RESULT = "no result.json"


@dataclass(frozen=True)
class RunRecord:
    """One run: its effective settings and what it left in its record."""

    id: str
    name: str
    status: str
    """finished, failed, killed or running."""
    settings: dict[str, str]
    """Effective values by setting; an option's name under its group (`backend`)."""
    requested: dict[str, str] = field(default_factory=dict)
    """The same where something else was asked for."""
    reason: str = ""
    seed: str = ""
    machine: str = ""
    commit: str = ""
    started: float = 0.0
    """Unix time."""
    tracked: bool = True
    """It has a run in a store."""
    whole: bool = True
    """Its settings are known in full, not from its overrides only."""
    overrides: tuple[str, ...] = ()
    """The overrides as the sweep gave them; known from run folders only."""
    job: str = ""
    """The same for all tries of one job of a sweep; of stores only."""
    resumed: bool = False
    """Its rates are those of its last session."""
    final: dict[str, float] = field(default_factory=dict)
    """The `result/*` metrics, without the prefix."""
    curves: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    """(env steps, values) by metric, of CURVES those that the run has."""
    damage: tuple[str, ...] = ()
    """Files of its folder that could not be read, and why."""

    @property
    def finished(self) -> bool:
        """Ended by itself, with a result."""
        return self.status == "finished"


@dataclass(frozen=True)
class StudyRecord:
    """The runs that one comparison reads, and their parent in the store."""

    name: str
    runs: list[RunRecord]
    parent_id: str | None = None
    varied: tuple[str, ...] = ()
    baseline: str | None = None
    threshold: float | None = None
    """Return that its sweep asked to reach; `baseline` is the setting that it compared with."""
    damage: tuple[str, ...] = ()
    """Parts of its own record that could not be read, and why."""


def canonical(
    params: dict[str, Any], effective: dict[str, Any]
) -> tuple[dict[str, str], dict[str, str]]:
    """Settings that took effect, and those that were asked for otherwise; both by setting.

    `params` are the flat settings of a run, `effective` the flat object of result.json.
    """
    asked = {
        key.removesuffix(".name"): _text(value)
        for key, value in params.items()
        if key.split(".")[0] not in _PROTOCOL
    }
    # What the thread plan made of it stands in `threads.*`.
    asked.pop("backend.num_threads", None)
    got = {_EFFECTIVE.get(key, key): _text(value) for key, value in effective.items()}
    if got.get("compile", "").startswith("eager until step"):
        # At which step is another matter in each run (compile=auto).
        got["compile"] = "eager, then default"
    other = {k: asked[k] for k in got if asked.get(k, got[k]) not in (got[k], "auto")}
    return asked | got, other


def _of_overrides(overrides: Iterable[str]) -> dict[str, str]:
    """Settings of a job that left only its overrides."""
    pairs = (o.lstrip("+").partition("=") for o in overrides)
    return {key: value for key, _, value in pairs if key.split(".")[0] not in _PROTOCOL}


def _text(value: Any) -> str:
    """The value as the command line has it; a store's tags hold Python's words."""
    return {"True": "true", "False": "false", "None": "null"}.get(str(value), str(value))


# -- from run folders -----------------------------------------------------------------------------


def from_folder(folder: Path) -> RunRecord:
    """The run in a run folder, or the job that left no more than its failure there.

    A damaged file costs what it held: without result.json the run has failed, without run.json its
    settings are unknown, without metrics.jsonl it has no curves.
    """
    result, broken = shapes.read(folder / "result.json", shapes.Result)
    begin = folder / "run.json"
    start, unknown = shapes.read(begin, shapes.Begin)
    points, lines = _rows(folder / "metrics.jsonl")
    settings = start.get("settings")
    if settings:
        asked, other = canonical(flatten(settings), flatten(result.get("effective") or {}))
    elif unknown and result.get("status") == "finished":
        asked, other = {}, {}
    else:
        asked, other = _of_overrides(result.get("overrides", [])), {}
    reason, source = result.get("reason") or broken or "", result.get("provenance") or {}
    return RunRecord(
        id=result.get("run_id") or folder.name,
        name=result.get("name") or " ".join(result.get("overrides", [])) or folder.name,
        status=result.get("status", "failed"), reason=reason if result or broken else NO_RESULT,
        settings=asked, requested=other, seed=str(result.get("seed", "")),
        machine=machine_of(result),
        commit=_short(source.get("git") or "", bool(changed_code(source))),
        started=begin.stat().st_mtime if begin.exists() else 0.0,
        tracked=(folder / "mlflow.json").exists(), whole=bool(settings),
        overrides=tuple(result.get("overrides", ())), resumed="resume" in result,
        final=final_metrics(result), curves=_curves(points),
        damage=tuple(f"{folder.name}/{words}" for words in (broken, unknown, lines) if words),
    )  # fmt: skip


def from_sweep(folder: Path) -> StudyRecord:
    """The jobs of a multirun folder; raises ConfigError where there is none.

    Of a sweep that another process still runs, jobs without a result are running.
    """
    there = folder.iterdir() if folder.is_dir() else []
    jobs = [p for p in there if p.name.isdecimal() and p.is_dir()]
    if not jobs:
        raise ConfigError(f"folder={folder} holds no jobs of a multirun")
    study, broken = shapes.read(folder / STUDY_FILE, shapes.Study)
    runs = [from_folder(job) for job in sorted(jobs, key=lambda p: int(p.name))]
    if study.get("process") and sweeps_elsewhere(study):
        runs = [replace(r, status="running") if r.reason == NO_RESULT else r for r in runs]
    if (folder / STUDY_FILE).exists() and not study:
        print(f"{folder / STUDY_FILE} is damaged: what its sweep asked is not known")

    def known(key: str, kind: Any) -> Any:
        return study[key] if isinstance(study.get(key), kind) else None

    return StudyRecord(
        study.get("name") or folder.name, runs, study.get("parent_run_id"),
        tuple(study.get("varied", ())), study.get("baseline"), study.get("threshold"),
        (broken,) if broken else (),
    )  # fmt: skip


def _rows(path: Path) -> tuple[list[tuple[str, int, float]], str]:
    """(metric, env steps, value) of a metrics.jsonl, and what is wrong with it, in words."""
    try:
        lines = path.read_bytes().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return [], ""
    except OSError as error:
        return [], f"{path.name} is damaged ({error.strerror})"
    found, bad = [], []
    for number, line in enumerate(lines):
        try:
            found += _points(json.loads(line))
        except (ValueError, OverflowError, RecursionError):
            bad.append(number)
    if bad == [len(lines) - 1]:
        bad = []  # torn by a kill
    return found, f"{path.name}: {len(bad)} of {len(lines)} rows are damaged" if bad else ""


def _points(row: Any) -> list[tuple[str, int, float]]:
    """(metric, env step, value) of CURVES in a row; raises ValueError where it is none."""
    metrics = row.get("metrics") if isinstance(row, dict) else None
    if not isinstance(metrics, dict):
        raise ValueError("no row")
    named = {name: value for name, value in metrics.items() if name in CURVES}
    for value in (row.get("step"), *named.values()) if named else ():
        if type(value) not in (int, float):
            raise ValueError("no number")
    return [(name, int(row["step"]), float(value)) for name, value in named.items()]


def _curves(
    points: Iterable[tuple[str, int, float]],
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Curves of finite values in the order of their steps."""
    found: dict[str, dict[int, float]] = {}
    for name, step, value in points:
        if np.isfinite(value):
            found.setdefault(name, {})[step] = value
    return {
        name: (np.array(sorted(curve), float), np.array([curve[s] for s in sorted(curve)]))
        for name, curve in found.items()
    }


def _short(commit: str, changed: bool) -> str:
    """With a `+` if the code was changed since."""
    return f"{commit[:7]}{'+' if changed else ''}" if commit else ""


# -- from a store ---------------------------------------------------------------------------------


def find_study(store: Store, study: str) -> tuple[str, list[Any], dict[str, str]]:
    """(name, MLflow runs, tags and params of the parent) of a study by the name or id of its run.

    Of several studies of one name the latest is meant. Raises ConfigError naming those there are.
    """
    orphans.end_dead(store)
    parents = [p for p in store.search("tags.kind = 'study'") if orphans.is_study(p.data.tags)]
    named = [p for p in parents if study in (p.info.run_id, p.data.tags.get("study"))]
    if not named:
        # Single runs may belong to a study by study.name alone.
        loose = store.search(f"tags.study = '{_quoted(study)}'")
        loose = [run for run in loose if run.data.tags.get("kind") != "study"]
        if loose:
            return study, loose, {}
        names = sorted({p.data.tags.get("study", p.info.run_id) for p in parents})
        raise ConfigError(
            f"study={study}: no such study in this store{near(study, names)}; there are: "
            f"{', '.join(names[:10]) or 'none'}"
        )
    latest = max(named, key=lambda p: p.info.start_time)
    if len(named) > 1:
        others = ", ".join(p.info.run_id for p in named if p is not latest)
        print(f"{len(named)} studies are called {study}: the latest is taken; others: {others}")
    of_parent = f"tags.`mlflow.parentRunId` = '{latest.info.run_id}'"
    facts = {**latest.data.params, **latest.data.tags, "run_id": latest.info.run_id}
    name = latest.data.tags.get("study", latest.info.run_name)
    return name, store.search(of_parent), facts


def from_store(store: Store, study: str | None, run_ids: Iterable[str] = ()) -> StudyRecord:
    """The runs of a study, or those with the given MLflow ids."""
    if study is None:
        facts: dict[str, str] = {}
        name, found = "runs", [store.client.get_run(i) for i in run_ids]
    else:
        name, found, facts = find_study(store, study)
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda run: _record(store, run), found))
    runs = _without_replaced(sorted(runs, key=lambda run: run.started))
    # Jobs that ended before they had a run of their own are known to their parent only.
    damage = []
    for tag in (k for k in facts if k.startswith(f"{LOST}.")):
        try:
            lost = shapes.Lost.model_validate_json(facts[tag])
        except ValueError:
            damage.append(f"tag {tag} of the study's run is damaged")
            continue
        runs.append(RunRecord(
            tag, " ".join(lost.overrides), "failed",
            _of_overrides(lost.overrides), reason=lost.reason, whole=False,
        ))  # fmt: skip
    varied = tuple(k for k in facts.get("varied", "").split(",") if k)
    known = {k.removeprefix("study."): v for k, v in facts.items() if v != "null"}
    asked = {k: known[k] for k in ("baseline", "threshold") if k in known}
    try:
        of_sweep = shapes.Study.model_validate_strings(asked)
    except ValueError:
        of_sweep = shapes.Study()
        damage.append(f"{asked} of the study's run are damaged")
    return StudyRecord(
        name, runs, facts.get("run_id"), varied, of_sweep.baseline, of_sweep.threshold,
        tuple(damage),
    )  # fmt: skip


def _without_replaced(runs: list[RunRecord]) -> list[RunRecord]:
    """Without failures that a later run of the same job (study.resume) made good."""

    def job(run: RunRecord) -> Any:
        return run.job or (run.name, run.seed)

    good = {(run.name, run.seed): run.started for run in runs if run.finished}
    good |= {job(run): run.started for run in runs if run.finished}
    return [run for run in runs if run.finished or run.started > good.get(job(run), 0)]


def _record(store: Store, run: Any) -> RunRecord:
    params, tags, metrics = run.data.params, run.data.tags, run.data.metrics
    effective = {
        k.removeprefix("effective."): v for k, v in tags.items() if k.startswith("effective.")
    }
    settings, other = canonical(params, effective)
    points = (
        (name, point.step, point.value)
        for name in CURVES
        if name in metrics
        for point in store.client.get_metric_history(run.info.run_id, name)
    )
    final = {k.removeprefix("result/"): v for k, v in metrics.items() if k.startswith("result/")}
    return RunRecord(
        id=run.info.run_id, name=run.info.run_name, status=run.info.status.lower(),
        settings=settings, requested=other, reason=tags.get("reason", ""),
        seed=params.get("seed", ""), machine=tags.get("machine", ""),
        commit=_short(tags.get("mlflow.source.git.commit", ""), "changed_code" in tags),
        started=run.info.start_time / 1000,
        final=final, curves=_curves(points), whole=bool(params), resumed="resumed" in tags,
        job=tags.get("job", ""),
    )  # fmt: skip


def _quoted(text: str) -> str:
    return text.replace("'", "\\'")
