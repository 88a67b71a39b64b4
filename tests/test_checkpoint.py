"""Checkpoints: which are kept, and that a torn write costs nothing."""

from __future__ import annotations

import pytest
import torch

from rl_pipeline.run import checkpoint
from rl_pipeline.run.checkpoint import Checkpoints


def state(value: float) -> dict[str, torch.Tensor]:
    return {"weights": torch.full((3,), value)}


def names(folder) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_the_last_few_and_the_best_are_kept(tmp_path):
    kept = Checkpoints(tmp_path, keep_last=2, keep_best=True)
    for step, score in [(10, 1.0), (20, 5.0), (30, 2.0), (40, None)]:
        kept.save(step, state(step))
        if score is not None:
            kept.offer_best(state(step), score)
    assert names(tmp_path) == ["best.pt", "step-000000000030.pt", "step-000000000040.pt"]
    assert checkpoint.load(tmp_path / "best.pt")["weights"][0] == 20
    assert kept.latest() == tmp_path / "step-000000000040.pt"
    # A resumed run knows the best so far.
    Checkpoints(tmp_path, 2, True).offer_best(state(50), 4.0)
    assert checkpoint.load(tmp_path / "best.pt")["weights"][0] == 20


def test_without_keep_best_there_is_none(tmp_path):
    kept = Checkpoints(tmp_path, 1, False)
    kept.save(10, state(1))
    kept.offer_best(state(1), 1.0)
    assert names(tmp_path) == ["step-000000000010.pt"]


def test_a_failed_write_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    kept = Checkpoints(tmp_path, 1, False)
    kept.save(10, state(1))

    def torn(value, file):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(OSError, match="disk full"):
        kept.save(20, state(2))
    latest = kept.latest()
    assert latest is not None
    assert checkpoint.load(latest)["weights"][0] == 1


def test_another_format_is_refused(tmp_path):
    torch.save({"format": 99}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="format 99"):
        checkpoint.load(tmp_path / "x.pt")
