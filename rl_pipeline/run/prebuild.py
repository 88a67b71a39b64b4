"""The builder of compile=auto: builds into the cache what a run that trains eagerly misses.

Reads a pickled Order from standard input; when that ends, so does everything here.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rl_pipeline import machine
from rl_pipeline.config.settings import CompileSettings, Settings
from rl_pipeline.engine.background import Background, Form
from rl_pipeline.engine.cache import Index
from rl_pipeline.engine.runtime import Runtime
from rl_pipeline.types import EnvSpec


@dataclass(frozen=True)
class Order:
    """All that a builder needs."""

    settings: dict[str, Any]
    spec: EnvSpec
    seed: int
    forms: list[Form]


def with_cache(
    runtime: Runtime, settings: Settings, spec: EnvSpec, say: Callable[[str], None]
) -> Runtime:
    """The runtime that finds graphs of earlier runs, and has missing ones built (compile=auto)."""
    if not runtime.plan.kept:
        return runtime
    parts = [settings.algo, settings.network, settings.precision]
    identity = repr([p.model_dump(mode="json") for p in parts] + [
        spec.id, spec.obs_shape, str(spec.obs_dtype), spec.action, spec.num_envs,
    ])  # fmt: skip
    index = Index(identity)
    if not runtime.plan.later:
        return replace(runtime, index=index)

    def request(forms: list[Form]) -> bytes:
        return pickle.dumps(Order(settings.model_dump(mode="json"), spec, runtime.seed, forms))

    command = [sys.executable, "-m", "rl_pipeline.run.prebuild"]
    background = Background(command, machine.module_environment(), request, say)
    return replace(runtime, index=index, background=background)


def build(order: Order) -> None:
    """Build every graph of an order."""
    import torch

    from rl_pipeline.engine.phases import NullPhases
    from rl_pipeline.engine.runtime import make_runtime
    from rl_pipeline.run.parts import make_learner

    settings = Settings.model_validate(order.settings)
    settings = settings.model_copy(update={"compile": CompileSettings(name="default")})
    runtime = with_cache(make_runtime(settings, order.seed), settings, order.spec, print)
    make_learner(settings, order.spec, runtime, NullPhases())
    for name, inputs in order.forms:
        made = []
        for shape, stride, dtype in inputs:
            kind = getattr(torch, dtype.removeprefix("torch."))
            made.append(torch.empty_strided(shape, stride, dtype=kind).zero_())
        runtime.functions[name].prepare(made)


def main() -> None:
    """Entry point."""
    os.nice(19)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order = pickle.load(sys.stdin.buffer)

    def watch() -> None:
        sys.stdin.buffer.read()
        # The run is over, however it ended: no compiler outlives it.
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    build(order)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
