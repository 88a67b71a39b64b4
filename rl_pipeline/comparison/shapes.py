"""Shapes that the files of run folders must have before a comparison believes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

Finite = Annotated[float, Field(allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0)]


class _Shape(BaseModel):
    # Only what a comparison reads; versions before and after may hold more.
    model_config = ConfigDict(strict=True, extra="ignore")


class _Throughput(_Shape):
    steady: bool
    env_steps_per_s: Rate | None = None
    updates_per_s: Rate | None = None
    window_spread: float | None = None
    warmup_s: float | None = None
    compile_s: float | None = None
    wall_s: float | None = None


class _Returns(_Shape):
    eval_mean: float | None = None
    eval_std: float | None = None
    train_mean: float | None = None


class _Counters(_Shape):
    env_steps: float | None = None


class _Startup(_Shape):
    until_first_step_s: float | None = None


class _Bottleneck(_Shape):
    upper_bound_speedup: float | None = None


class _Hardware(_Shape):
    cpu_model: str | None
    cpu_budget: float
    gpus: list[str] | None = None


class _Provenance(_Shape):
    git: str | None = None
    dirty_files: list[str] | None = None


class Result(_Shape):
    """result.json."""

    status: Literal["finished", "failed", "killed"]
    run_id: str | None = None
    name: str | None = None
    reason: str | None = None
    seed: int | str | None = None
    overrides: list[str] = []
    effective: dict[str, Any] = {}
    provenance: _Provenance = _Provenance()
    hardware: _Hardware | None = None
    throughput: _Throughput | None = None
    returns: _Returns = _Returns()
    counters: _Counters = _Counters()
    startup: _Startup = _Startup()
    bottleneck: _Bottleneck | None = None


class Begin(_Shape):
    """run.json."""

    settings: dict[str, Any]


class Lost(_Shape):
    """A tag of a study's run, of a job that has none of its own."""

    overrides: list[str]
    reason: str


class Study(_Shape):
    """study.json."""

    name: str | None = None
    parent_run_id: str | None = None
    varied: list[str] = []
    baseline: str | None = None
    threshold: Finite | None = None
    process: list[Any] = []

    @field_validator("process")
    @classmethod
    def _one(cls, value: list[Any]) -> list[Any]:
        host, pid, started = value or ("", 0, 0.0)
        if not (isinstance(host, str) and type(pid) is int and isinstance(started, int | float)):
            raise ValueError("no process")
        return value

    @field_validator("baseline")
    @classmethod
    def _levels(cls, value: str | None) -> str | None:
        from rl_pipeline.config.cli import levels

        levels(value or {})
        return value


def read(path: Path, shape: type[_Shape]) -> tuple[dict[str, Any], str]:
    """The object in a file, {} for none, and what is wrong with the file, in words."""
    try:
        value = json.loads(path.read_bytes())
        shape.model_validate(value)
        return value, ""
    except (FileNotFoundError, NotADirectoryError):
        return {}, ""
    except OSError as error:
        why = str(error.strerror)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        why = f"{where}: {first['msg']}" if where else first["msg"]
    except (ValueError, RecursionError):
        why = "no JSON"
    return {}, f"{path.name} is damaged ({why})"
