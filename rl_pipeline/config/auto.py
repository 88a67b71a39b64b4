"""`auto` for the number of environments and of lanes. Imports nothing heavy.

Resolved on the plain configuration before it is checked, so that every check sees numbers.
"""

from __future__ import annotations

import math
from typing import Any

from rl_pipeline.config.backends import BACKENDS, BackendName
from rl_pipeline.machine import cpu_budget

# Environments per core of the budget, or in all, by what steps them. Measured on 2 cores
# (experiments/envs/table.md):
# - EnvPool: CartPole 329k steps/s with 64 environments, 623k with 256; HalfCheetah 30k with 8, 48k
#   with 64; Pong 5.2k with 8, 5.5k with 64, and a Nature CNN acts on 16 observations in 1.4x the
#   time of 8: beyond that only memory grows.
# - Gymnasium's native CartPole: 0.15M steps/s with 8, 2.8M with 256: a step costs nearly the same.
# - Gymnasium's loop: 76k steps/s with 8 CartPoles, 107k with 64, where learning takes most time.
# - Gymnasium's processes: 12k steps/s with 8 CartPoles, 9k with 64.
_CLASSIC, _LOOP = 256, 8
_PER_CORE = {"mujoco": 32, "atari": 8, "other": 8}


def resolve(
    values: dict[str, Any], budget: tuple[int, str] | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """`values` with numbers for `auto` in `backend`, and the reason for each by setting.

    Values that are no settings are passed on as they are: the checks that follow name them.
    """
    backend = values.get("backend")
    if not isinstance(backend, dict) or "auto" not in (
        backend.get("num_envs"), backend.get("lanes")
    ):  # fmt: skip
        return values, {}
    cores, limit = budget or cpu_budget()
    chosen: dict[str, str] = {}
    backend, name = dict(backend), backend.get("name")
    if not isinstance(name, str) or name not in BACKENDS:
        # Numbers all the same, so that the name alone is refused.
        return {**values, "backend": {k: 1 if v == "auto" else v for k, v in backend.items()}}, {}
    has_lanes = BACKENDS[name].most_lanes is None
    if backend.get("num_envs") == "auto":
        kind = str((values.get("env") or {}).get("kind", "other"))
        wanted, why = _wanted_envs(name, kind, cores, limit)
        lanes = backend.get("lanes")
        lanes = _number(lanes, 2 if has_lanes and lanes == "auto" else 1)
        backend["num_envs"] = num = _fitting(wanted, lanes, values.get("algo"))
        if num != wanted:
            why += f"; {wanted} would not divide into lanes and minibatches"
        chosen["backend.num_envs"] = f"{num} ({why})"
    if backend.get("lanes") == "auto":
        lanes, why = _lanes(name, _number(backend.get("num_envs"), 1), cores, limit)
        backend["lanes"] = lanes
        chosen["backend.lanes"] = f"{lanes} ({why})"
    return {**values, "backend": backend}, chosen


def _wanted_envs(name: BackendName, kind: str, cores: int, limit: str) -> tuple[int, str]:
    budget, steps = f"{cores} cores by {limit}", BACKENDS[name].steps
    if steps == "loop":
        return _LOOP, "auto: a loop gains little from more"
    if steps == "processes":
        return 2 * cores, f"auto: two processes per core, {budget}"
    if kind == "classic":
        return _CLASSIC, "auto: a step of cheap environments costs little more than its overhead"
    per_core = _PER_CORE.get(kind, _PER_CORE["other"])
    return per_core * cores, f"auto: {per_core} per core for env.kind={kind}, {budget}"


def _fitting(wanted: int, lanes: int, algo: Any) -> int:
    """The first number from `wanted` up that lanes and minibatches divide."""
    algo = algo if isinstance(algo, dict) else {}
    horizon = _number(algo.get("horizon"), 1)
    minibatches = _number(algo.get("num_minibatches"), 1)
    unit = math.lcm(lanes, minibatches // math.gcd(horizon, minibatches))
    return math.ceil(wanted / unit) * unit


def _lanes(name: BackendName, num_envs: int, cores: int, limit: str) -> tuple[int, str]:
    if BACKENDS[name].most_lanes is not None:
        return 1, f"auto: backend={name} steps while the policy waits"
    if BACKENDS[name].least_lanes == 1 and cores == 1:
        return 1, f"auto: one core by {limit} leaves nothing to overlap"
    lanes = next((n for n in range(2, num_envs + 1) if num_envs % n == 0), 1)
    return lanes, "auto: the fewest that divide the environments, so that batches stay large"


def _number(value: Any, otherwise: int) -> int:
    """A positive whole number as the settings take it (`1e3` too), else `otherwise`."""
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 1:
        return int(value) if value == int(value) else otherwise
    return otherwise
