"""The process's own random generators, which environments may draw from: random, numpy, torch."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np


def seed_process(seed: int) -> None:
    """Seed the generators of `random`, `numpy.random` and, where it is loaded, torch."""
    words = [int(word) for word in np.random.SeedSequence([seed, 1]).generate_state(3)]
    random.seed(words[0])
    np.random.seed(words[1])
    if torch := sys.modules.get("torch"):  # a worker that never imports it need not wait for it
        torch.default_generator.manual_seed(words[2])


def seed_spaces(env: gym.Env, seed: int) -> None:
    """Seed the spaces of an environment and its wrappers, whose `sample` they may use.

    A space that belongs to the class is copied first: others of its environments draw from it too.
    """
    inner = env.unwrapped
    for name in ("action_space", "observation_space"):
        if isinstance(getattr(type(inner), name, None), gym.Space) and name not in vars(inner):
            setattr(inner, name, deepcopy(getattr(inner, name)))
    words = [int(word) >> 1 for word in np.random.SeedSequence([seed, 2]).generate_state(2)]
    for layer in layers(env):
        layer.action_space.seed(words[0])
        layer.observation_space.seed(words[1])


def layers(env: gym.Env) -> list[gym.Env]:
    """The environment and all that it wraps, outermost first."""
    found = [env]
    while isinstance(found[-1], gym.Wrapper):
        found.append(found[-1].env)
    return found


def capture() -> list[Any]:
    """States of the process's generators, as plain data and arrays."""
    torch = sys.modules.get("torch")
    state = None if torch is None else torch.default_generator.get_state().numpy().copy()
    return [random.getstate(), np.random.get_state(), state]


def restore(state: list[Any]) -> None:
    """Put the process's generators where `capture` found them.

    Raises TypeError, ValueError or RuntimeError for anything else; then nothing has moved.
    """
    before = capture()
    try:
        of_random, of_numpy, of_torch = state
        random.setstate(of_random)
        np.random.set_state(of_numpy)
        torch = sys.modules.get("torch")
        if torch is not None and of_torch is not None:
            torch.default_generator.set_state(torch.from_numpy(of_torch.copy()))
    except Exception:
        restore(before)
        raise


@contextmanager
def preserved() -> Iterator[None]:
    """Leave the process's generators as they were, whatever the block draws or seeds."""
    before = capture()
    try:
        yield
    finally:
        restore(before)
