"""Between host and device: hidden waits, late copies."""

from __future__ import annotations

import threading
import time
import warnings

import numpy as np
import pytest
import torch

from rl_pipeline.engine.phases import Phases
from rl_pipeline.engine.transfers import HiddenWaits, StagingRing


def test_hidden_waits_are_counted_by_phase_and_line(recwarn):
    """A stand-in for torch's sync-debug mode: the very warning, where a device would give it."""
    phases, modes = Phases(), []
    waits = HiddenWaits(lambda: phases.current)

    def wait() -> None:
        warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)

    with waits.watching(modes.append):
        for _ in range(5):
            with phases("learn"):
                wait()
                with phases("d2h"):
                    wait()
        with phases("env"):
            wait()
            warnings.warn("something else", stacklevel=1)
    assert modes == ["warn", "default"]
    assert [(w["phase"], w["count"]) for w in waits.report()] == [("learn", 5), ("env", 1)]
    assert all(w["where"].startswith("tests/test_transfers.py:") for w in waits.report())
    assert [str(w.message) for w in recwarn] == ["something else"]


class LateCopies:
    """A device whose copies read their source some milliseconds after they were launched."""

    def __init__(self, guarded: bool) -> None:
        self.guarded, self.waits = guarded, 0
        self.events: list = []

    def pin(self, array: np.ndarray) -> torch.Tensor:
        return torch.empty_like(torch.from_numpy(array))

    def launch(self, slot: torch.Tensor):
        arrived, copied, device = torch.empty_like(slot), threading.Event(), self

        def copy() -> None:
            time.sleep(0.005)
            arrived.copy_(slot)
            copied.set()

        threading.Thread(target=copy).start()

        class Event:
            def synchronize(self) -> None:
                device.waits += 1
                if device.guarded:
                    copied.wait()

            finish = copied.wait

        self.events.append(Event())
        return arrived, self.events[-1]


@pytest.mark.parametrize("guarded", [True, False])
def test_no_observation_changes_on_its_way_to_the_device(guarded: bool):
    """100 copies through two slots; with the guard taken out the device sees the next one's."""
    device = LateCopies(guarded)
    stage = StagingRing(device.pin, device.launch)
    host = np.empty(1000, np.float32)
    arrived = []
    for i in range(100):
        host[:] = i  # the array is the environment's own and changes at once
        arrived.append(stage(host))
    for event in device.events:
        event.finish()
    right = [bool((x == i).all()) for i, x in enumerate(arrived)]
    assert all(right) == guarded
    assert device.waits == 98
