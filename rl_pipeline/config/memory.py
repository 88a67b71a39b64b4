"""Whether a run can fit into memory at all, by its settings alone. Imports nothing heavy.

Every figure is a lower bound, so that only what surely does not fit is refused: an observation of
unknown shape counts as one number.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise

from rl_pipeline.config.settings import ReplayAlgorithm, Settings
from rl_pipeline.errors import ConfigError

_ENV, _GAME, _PROCESS, _THREAD = 1_000, 100_000, 2_000_000, 16_000
"""Bytes of an environment, an Atari emulator, a worker process, a thread: all need more."""
_ROW = 16
"""Bytes of a row besides its observation: action, reward, flags, estimates."""
_GPU = 2_000_000_000_000
"""Bytes that no GPU has: how much it has is known only once torch is imported."""
_COUNTABLE = 2**63 - 1


@dataclass(frozen=True)
class Part:
    """A part of a run that needs memory: its name, its least bytes, the settings behind it."""

    what: str
    nbytes: int
    keys: tuple[str, ...]


def parts(settings: Settings) -> list[Part]:
    """The parts of a run that need memory, each with the least that it needs."""
    env, algo, backend = settings.env, settings.algo, settings.backend
    atari = env.atari
    obs = atari.frame_stack * atari.screen_size**2 if atari else 4
    image = ("env.atari.frame_stack", "env.atari.screen_size") if atari else ()
    one = (_GAME if env.kind == "atari" else _ENV) + obs
    one += _PROCESS if backend.traits.steps == "processes" else 0
    evaluating = min(settings.eval.num_envs, settings.eval.episodes)
    found = [
        Part("environments", backend.num_envs * one, ("backend.num_envs", *image)),
        Part("the evaluation's environments", evaluating * one,
             ("eval.num_envs", "eval.episodes", *image)),
    ]  # fmt: skip
    if backend.num_threads != "auto":
        found.append(Part("threads", backend.num_threads * _THREAD, ("backend.num_threads",)))
    weights = _weights(settings)
    acts = sum(settings.network.hidden) * 4 + obs
    if not isinstance(algo, ReplayAlgorithm):
        rows = algo.horizon * backend.num_envs
        keys = ("algo.horizon", "backend.num_envs")
        found.append(Part("the rollout", rows * (obs + _ROW), (*keys, *image)))
        batch, of_batch = rows // algo.num_minibatches, [*keys, "algo.num_minibatches"]
        networks = weights * 16 * (1 if settings.network.shared else 2)
    else:
        capacity, frame = settings.buffer.capacity or 0, obs // (atari.frame_stack if atari else 1)
        stored = _ROW + (0 if settings.buffer.name == "memmap" else frame)
        found.append(Part("the replay", capacity * stored, ("buffer.capacity", *image[1:])))
        batch, of_batch = algo.batch_size, ["algo.batch_size"]
        networks = weights * 20  # the target's parameters too
    found.append(Part("a minibatch", batch * acts, (*of_batch, "network.hidden")))
    sides = image[1:] if settings.network.name == "nature_cnn" else ()
    # Parameters, gradients, and the optimizer's two moments.
    found.append(Part("the networks", networks, ("network.hidden", *sides)))
    return found


def _weights(settings: Settings) -> int:
    """Parameters of one network, without what depends on unknown shapes."""
    first = 1
    if settings.network.name == "nature_cnn" and settings.env.atari:
        side = settings.env.atari.screen_size
        for kernel, stride in ((8, 4), (4, 2), (3, 1)):
            side = max(1, (side - kernel) // stride + 1)
        first = 64 * side**2
    return sum(a * b for a, b in pairwise([first, *settings.network.hidden, 1]))


def check(settings: Settings, available: int | None = None) -> None:
    """Refuse what surely does not fit into the memory of this machine, and numbers beyond count.

    `available` bytes: default those of the machine and its cgroup. Raises ConfigError.
    """
    for key, value in _numbers(settings.model_dump()):
        if value > _COUNTABLE:
            raise ConfigError(f"{key}={float(min(value, 10**300)):g} is beyond what can be counted")
    found = parts(settings)
    needed = sum(part.nbytes for part in found)
    if available is None:
        if needed < 100_000_000:
            return
        from rl_pipeline.machine import available_memory

        available = available_memory()
        if settings.device.name != "cpu" and not version("torch").endswith("+cpu"):
            available += _GPU
    if needed <= available:
        return
    largest = max(found, key=lambda part: part.nbytes)
    values = " x ".join(f"{key}={_at(settings, key)}" for key in largest.keys)
    raise ConfigError(
        f"{values}: {largest.what} would need at least {largest.nbytes / 1e9:,.1f} GB of memory, "
        f"{available / 1e9:,.1f} GB are available for all the run needs; "
        + ("lower one of them" if len(largest.keys) > 1 else "lower it")
    )


def _numbers(values: object, prefix: str = "") -> list[tuple[str, int]]:
    """The whole numbers among the settings, by their keys; those of env.kwargs are others'."""
    if isinstance(values, dict):
        return [
            pair for key, value in values.items() if key != "kwargs"
            for pair in _numbers(value, f"{prefix}.{key}" if prefix else str(key))
        ]  # fmt: skip
    if isinstance(values, list | tuple):
        return [pair for value in values for pair in _numbers(value, prefix)]
    return [(prefix, values)] if isinstance(values, int) else []


def _at(settings: object, key: str) -> object:
    for name in key.split("."):
        settings = getattr(settings, name)
    return list(settings) if isinstance(settings, tuple) else settings
