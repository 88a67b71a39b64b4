"""Single numbers of a finished run's result.json: columns of the store's run list."""

from __future__ import annotations

from typing import Any, TypeGuard

_THROUGHPUT = (
    "env_steps_per_s", "updates_per_s", "window_spread", "warmup_s", "compile_s", "wall_s",
)  # fmt: skip


def final_metrics(result: dict[str, Any]) -> dict[str, float]:
    """Finite numbers by name, stored as `result/<name>`; `steady` is 1 where rates compare."""
    throughput, returns = part(result, "throughput"), part(result, "returns")
    found = {name: throughput.get(name) for name in _THROUGHPUT}
    if throughput.get("steady") in (True, False):
        found["steady"] = float(throughput["steady"])
    found |= {name: returns.get(name) for name in ("eval_mean", "eval_std", "train_mean")}
    found["env_steps"] = part(result, "counters").get("env_steps")
    found["startup_s"] = part(result, "startup").get("until_first_step_s")
    found["bottleneck_speedup"] = part(result, "bottleneck").get("upper_bound_speedup")
    return {k: float(v) for k, v in found.items() if is_number(v)}


def machine_of(result: dict[str, Any]) -> str:
    """The machine and the run's share of it, in words: rates of two machines do not compare."""
    hardware = part(result, "hardware")
    if not {"cpu_model", "cpu_budget"} <= set(hardware):
        return ""
    gpus = hardware.get("gpus")
    names = ", ".join(map(str, gpus)) if isinstance(gpus, list) else ""
    return f"{hardware['cpu_model']}, {hardware['cpu_budget']} cores, {names or 'no GPU'}"


def part(result: dict[str, Any], key: str) -> dict[str, Any]:
    """An object within the record of a run; {} where it is none, as in a damaged record."""
    value = result.get(key)
    return value if isinstance(value, dict) else {}


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number that any store takes."""
    return isinstance(value, int | float) and abs(value) < 1e300
