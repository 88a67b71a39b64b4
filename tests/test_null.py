"""Null objects: whoever holds one need not know it."""

from __future__ import annotations

import inspect

import pytest

from rl_pipeline.engine.phases import NullPhases, Phases
from rl_pipeline.engine.precision import LossScale, NoScale
from rl_pipeline.learners.normalizers import (
    Identity,
    ObsNormalizer,
    RawReward,
    RewardNormalizer,
)
from rl_pipeline.telemetry.progress import NullProgress, Progress
from rl_pipeline.tracking.tracker import NullTracker, Tracker

PAIRS = [
    (NullPhases, Phases), (NoScale, LossScale), (Identity, ObsNormalizer),
    (RawReward, RewardNormalizer), (NullProgress, Progress), (NullTracker, Tracker),
]  # fmt: skip


@pytest.mark.parametrize(("null", "real"), PAIRS, ids=lambda kind: kind.__name__)
def test_a_null_object_takes_every_call_of_the_real_one(null, real):
    methods = [(n, f) for n, f in inspect.getmembers(real, inspect.isfunction) if n[0] != "_"]
    assert methods
    for name, method in methods:
        # What follows has a default, or is of the real one's statistics (`apply(obs, *stats)`).
        taken = list(inspect.signature(getattr(null, name)).parameters)
        assert taken == list(inspect.signature(method).parameters)[: len(taken)], name
