"""What a finished run's result.json says in single numbers: columns of the store's run list."""

from __future__ import annotations

import math
from typing import Any

_THROUGHPUT = (
    "env_steps_per_s", "updates_per_s", "window_spread", "warmup_s", "compile_s", "wall_s",
)  # fmt: skip


def final_metrics(result: dict[str, Any]) -> dict[str, float]:
    """Finite numbers by name, stored as `result/<name>`; `steady` is 1 where rates compare."""
    throughput, returns = result.get("throughput", {}), result.get("returns", {})
    found = {name: throughput.get(name) for name in _THROUGHPUT}
    found["steady"] = float(throughput["steady"]) if throughput else None
    found |= {name: returns.get(name) for name in ("eval_mean", "eval_std", "train_mean")}
    found["env_steps"] = result.get("counters", {}).get("env_steps")
    found["startup_s"] = result.get("startup", {}).get("until_first_step_s")
    found["bottleneck_speedup"] = (result.get("bottleneck") or {}).get("upper_bound_speedup")
    return {k: float(v) for k, v in found.items() if v is not None and math.isfinite(v)}


def machine_of(result: dict[str, Any]) -> str:
    """The machine and the run's share of it, in words: rates of two machines do not compare."""
    hardware = result.get("hardware")
    if not hardware:
        return ""
    gpus = ", ".join(hardware.get("gpus") or []) or "no GPU"
    return f"{hardware['cpu_model']}, {hardware['cpu_budget']} cores, {gpus}"
