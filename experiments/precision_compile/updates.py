"""Updates per second of every learner, eager against compiled, float32 against bf16.

Interleaved: each round runs every cell once, so that a machine that drifts slows all alike; the
ratio is taken within rounds. Arguments: names of cases; none means all. QUICK=1 takes fewer rounds,
and of the cases PPO CartPole where none is named, without compiled bf16. On the CPU.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from hydra import compose, initialize_config_dir

from experiments import frame
from rl_pipeline.buffers.rollout import Rollout
from rl_pipeline.config import load
from rl_pipeline.config.origins import CONF
from rl_pipeline.config.settings import Settings
from rl_pipeline.engine.phases import NullPhases
from rl_pipeline.engine.runtime import Runtime, make_runtime
from rl_pipeline.learners.dqn import DQN
from rl_pipeline.learners.ppo import PPO
from rl_pipeline.telemetry.provenance import changed_code, provenance
from rl_pipeline.types import Batch, Continuous, Discrete, EnvSpec

HERE = Path(__file__).parent
OUT = HERE / "quick" if frame.QUICK else HERE
ROUNDS = 5 if frame.QUICK else 15
CELLS = {
    "fp32 eager": ["precision=fp32", "compile=eager"],
    "bf16 eager": ["precision=bf16", "compile=eager"],
    "fp32 default": ["precision=fp32", "compile=default"],
    "bf16 default": ["precision=bf16", "compile=default"],
}
if frame.QUICK:
    del CELLS["bf16 default"]  # building graphs takes most of the time
FIXED = ["device=cpu", "tracking=none"]
BOX = Continuous(-np.ones(6, np.float32), np.ones(6, np.float32))
CASES: dict[str, tuple[list[str], tuple[int, ...], type, Discrete | Continuous]] = {
    # overrides, shape and type of an observation, actions. All epochs: under bf16 an update begins
    # with a forward pass of its own.
    "ppo_cartpole": (["env=cartpole"], (4,), np.float32, Discrete(2)),
    "ppo_halfcheetah": (["env=halfcheetah"], (17,), np.float32, BOX),
    "ppo_pong": (["env=pong"], (4, 84, 84), np.uint8, Discrete(6)),
    "dqn_cartpole": (
        ["algo=dqn", "env=cartpole", "algo.batch_size=128"], (4,), np.float32, Discrete(2),
    ),
    "dqn_pong": (["algo=dqn", "env=pong"], (4, 84, 84), np.uint8, Discrete(6)),
}  # fmt: skip
Updates = Callable[[], float]
"""Does some updates and returns how many."""


def observations(rows: tuple[int, ...], shape: tuple[int, ...], dtype: type) -> torch.Tensor:
    """Random observations [*rows, *shape]."""
    rng = np.random.default_rng(0)
    if dtype is np.uint8:
        return torch.from_numpy(rng.integers(0, 255, (*rows, *shape), dtype=np.uint8))
    return torch.from_numpy(rng.normal(size=(*rows, *shape)).astype(dtype))


def ppo(settings: Settings, spec: EnvSpec, runtime: Runtime) -> Updates:
    """Whole PPO updates, advantages included, on one random rollout."""
    learner = PPO(settings.algo, settings.network, spec, runtime, NullPhases())
    rows = (settings.algo.horizon, spec.num_envs)
    rng = torch.Generator().manual_seed(0)
    box = isinstance(spec.action, Continuous)
    action = (
        torch.randn(*rows, 6, generator=rng)
        if box
        else torch.randint(0, spec.action.num_actions, rows, generator=rng)
    )
    ended = torch.rand(rows, generator=rng) < 0.01
    rollout = Rollout(
        observations((rows[0] + 1, rows[1]), spec.obs_shape, spec.obs_dtype.type),
        action, torch.randn(rows, generator=rng), (~ended).float(), ended, torch.ones(rows).bool(),
        {"log_prob": torch.full(rows, -8.5 if box else -1.0), "value": torch.zeros(rows)},
        rows[0] * rows[1],
    )  # fmt: skip
    # At rate 0 the policy stays where it is, and every round does the same work.
    return lambda: float(learner.update(rollout, 1.0)[1])


def dqn(settings: Settings, spec: EnvSpec, runtime: Runtime) -> Updates:
    """DQN updates on one random batch; nothing is sampled."""
    learner = DQN(settings.algo, settings.network, spec, runtime, NullPhases())
    size, rng = settings.algo.batch_size, torch.Generator().manual_seed(0)
    obs, next_obs = (observations((size,), spec.obs_shape, spec.obs_dtype.type) for _ in range(2))
    action = torch.randint(0, spec.action.num_actions, (size,), generator=rng)
    batch = Batch(
        obs, action, torch.randn(size, generator=rng), torch.full((size,), 0.99), next_obs,
        torch.ones(size), np.arange(size),
    )  # fmt: skip

    def some() -> float:
        for _ in range(8):
            learner.update(batch, 0.0)
        return 8.0

    return some


def build(case: str, cell: str) -> tuple[Updates, Runtime]:
    """The learner of one cell; compiles at its first call."""
    overrides, shape, dtype, action = CASES[case]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        settings = load.load(compose("config", [*overrides, *CELLS[cell], *FIXED]))
    runtime = make_runtime(settings, seed=1)
    spec = EnvSpec(case, "random", settings.backend.num_envs, shape, np.dtype(dtype), action)
    make = dqn if settings.algo.name == "dqn" else ppo
    return make(settings, spec, runtime), runtime


def measure(case: str) -> dict:
    """All cells of a case, in turns."""
    cells = {name: build(case, name) for name in CELLS}
    for update, _ in cells.values():
        update()
        update()
    rates: dict[str, list[float]] = {name: [] for name in cells}
    for _ in range(ROUNDS):
        for name, (update, _) in cells.items():
            begin, done = time.perf_counter(), 0.0
            while (seconds := time.perf_counter() - begin) < 0.2:
                done += update()
            rates[name].append(done / seconds)
    base = np.array(rates["fp32 eager"])
    record = {"threads": torch.get_num_threads(), "rounds": ROUNDS, "cells": {}}
    for name, values in rates.items():
        log = cells[name][1].log
        record["cells"][name] = {
            "updates_per_s": np.percentile(values, [25, 50, 75]).tolist(),
            "vs_fp32_eager": np.percentile(np.array(values) / base, [25, 50, 75]).tolist(),
            "compile_s": log.seconds,
            "cached": bool(log.entries) and all(e.cached for e in log.entries),
            "pays_back_after_updates": log.report(0).get("pays_back_after_updates"),
        }
    return record


def table(records: dict[str, dict]) -> str:
    """Markdown: one row per case and cell."""
    lines = [
        "| learner | cell | updates/s (quartiles) | vs fp32 eager (quartiles) | compile s |",
        "| --- | --- | --- | --- | --- |",
    ]
    for case, record in records.items():
        for name, cell in record["cells"].items():
            low, middle, high = cell["updates_per_s"]
            a, b, c = cell["vs_fp32_eager"]
            compiled = f"{cell['compile_s']:.1f}{' (cached)' if cell['cached'] else ''}"
            lines.append(
                f"| {case} | {name} | {middle:,.0f} ({low:,.0f} - {high:,.0f}) | "
                f"{b:.2f}x ({a:.2f} - {c:.2f}) | {compiled if cell['compile_s'] else '-'} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, then write updates.json and updates.md."""
    if (os.environ.get("DEVICE") or "cpu") != "cpu":
        # A GPU returns from an update before it is done.
        print("updates alone are timed on the CPU only")
        return
    wanted = sys.argv[1:] or (["ppo_cartpole"] if frame.QUICK else list(CASES))
    if unknown := set(wanted) - CASES.keys():
        raise SystemExit(f"no such case: {', '.join(sorted(unknown))}")
    records = {}
    for case in wanted:
        records[case] = measure(case)
        print(table({case: records[case]}), flush=True)
    facts = provenance(HERE)
    OUT.mkdir(exist_ok=True)
    (OUT / "updates.md").write_text(table(records))
    (OUT / "updates.json").write_text(
        json.dumps({"git": facts["git"], "dirty": changed_code(facts), "cases": records}, indent=1)
        + "\n"
    )


if __name__ == "__main__":
    main()
