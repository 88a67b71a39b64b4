"""Checkpoints of a run: written whole or not at all, a few kept, loadable on any device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

FORMAT = 1


class Checkpoints:
    """`<folder>/step-<env steps>.pt`, the last few of them, and `best.pt`.

    A replay buffer's contents can be a thousand times larger than all else: `replay-<env steps>.pt`
    is kept beside the newest checkpoint only.
    """

    def __init__(self, folder: Path, keep_last: int, keep_best: bool) -> None:
        self._folder, self._keep_last, self._keep_best = folder, keep_last, keep_best
        self._best = float("-inf")
        best = folder / "best.pt"
        if best.exists():
            self._best = load(best)["score"]

    def save(
        self, env_steps: int, state: dict[str, Any], replay: dict[str, Any] | None = None
    ) -> Path:
        """Write one checkpoint, with the replay buffer's contents, and drop the oldest."""
        path = self._folder / f"step-{env_steps:012d}.pt"
        kept = _replay_of(path)
        # The contents come first: a run killed in between has its previous checkpoint whole.
        if replay is not None:
            self._write(kept, replay)
        self._write(path, state)
        for other in self._folder.glob("replay-*.pt"):
            if other != kept:
                other.unlink()
        for old in self._all()[: -self._keep_last]:
            old.unlink()
        return path

    def offer_best(self, state: dict[str, Any], score: float) -> None:
        """Keep `state` as the best if its own score, higher is better, beats all before."""
        if self._keep_best and score > self._best:
            self._best = score
            self._write(self._folder / "best.pt", {**state, "score": score})

    def _write(self, path: Path, state: dict[str, Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        _write(path, {**state, "format": FORMAT})

    def latest(self) -> Path | None:
        """The newest checkpoint, or None."""
        return max(self._all(), default=None)

    def _all(self) -> list[Path]:
        return sorted(self._folder.glob("step-*.pt"))


def _write(path: Path, state: dict[str, Any]) -> None:
    """Through a temporary file: a run killed while saving keeps its previous checkpoint."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _replay_of(path: Path) -> Path:
    return path.with_name(path.name.replace("step-", "replay-"))


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU, under `replay` the buffer's contents or None.

    Raises ValueError for one of another format.
    """
    state = _load(path)
    replay = _replay_of(path)
    # Mapped, not read: a large buffer is copied once, into the arrays that it comes back to.
    state["replay"] = _load(replay, True) if replay != path and replay.exists() else None
    return state


def _load(path: Path, mapped: bool = False) -> dict[str, Any]:
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    if state.get("format") != FORMAT:
        raise ValueError(
            f"{path} has checkpoint format {state.get('format')}, this version reads {FORMAT}"
        )
    return state
