"""Checkpoints of a run: written whole or not at all, a few kept, loadable on any device.

Nothing is loaded on trust: every part is read against its checksum, and a damaged file costs only
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from rl_pipeline.files import check_zip, replacing

FORMAT = 1


class Damaged(ValueError):
    """A checkpoint's file that cannot be used: the message names it and says why."""


class Checkpoints:
    """`<folder>/step-<env steps>.pt`, the last few of them, and `best.pt`.

    A replay buffer's contents can be a thousand times larger than all else: `replay-<env steps>.pt`
    is kept beside the newest checkpoint only.
    """

    def __init__(
        self,
        folder: Path,
        keep_last: int,
        keep_best: bool,
        say: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._folder, self._keep_last, self._keep_best = folder, keep_last, keep_best
        self._say = say
        self._best = float("-inf")
        best = folder / "best.pt"
        if best.exists():
            try:
                self._best = float(load(best)["score"])
            except (Damaged, KeyError, TypeError, ValueError) as error:
                say(f"{_reason(best, error)}; it was put aside, the next best takes its place")
                _put_aside(best)

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
        for old in _all(self._folder)[: -self._keep_last]:
            old.unlink()
        return path

    def offer_best(self, state: dict[str, Any], score: float) -> None:
        """Keep `state` as the best if its own score, higher is better, beats all before."""
        if self._keep_best and score > self._best:
            self._best = score
            self._write(self._folder / "best.pt", {**state, "score": score})

    def load_latest(self) -> dict[str, Any] | None:
        """The newest checkpoint that is whole, under `replay` the buffer's contents or None.

        Damaged ones are named and put aside. None where there was none; raises Damaged where none
        is whole.
        """
        wrong: dict[Path, str] = {}
        for path in reversed(_all(self._folder)):
            try:
                state = _load(path)
            except Damaged as error:
                wrong[path] = str(error)
                continue
            if trouble := _lacks(state):
                wrong[path] = f"{path} is no checkpoint of a run: {trouble}"
                continue
            state["replay"], trouble = _load_replay(path)
            for other, why in wrong.items():
                self._say(f"{why}; it was put aside, an older checkpoint is used: {path.name}")
                _put_aside(other)
            if trouble:
                self._say(f"{trouble}; it was put aside, the replay begins anew")
                _put_aside(_replay_of(path))
            return state
        if wrong:
            raise Damaged("; ".join(wrong.values()))
        return None

    def latest(self) -> Path | None:
        """The newest checkpoint, or None."""
        return max(_all(self._folder), default=None)

    def _write(self, path: Path, state: dict[str, Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            told = _Told(file)
            try:
                torch.save({**state, "format": FORMAT}, told)  # type: ignore[arg-type]
            except RuntimeError as error:
                # What torch says of a full disk is about its own archive.
                raise told.error or error from None


class _Told:
    """A file to write that remembers what went wrong."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of it."""
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Flush the file."""
        self._file.flush()


def _all(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.pt"))


def _replay_of(path: Path) -> Path:
    return path.with_name(path.name.replace("step-", "replay-"))


def _put_aside(path: Path) -> None:
    with suppress(OSError):  # a folder that cannot be written keeps it where it is
        path.rename(path.with_name(f"{path.name}.damaged"))


def _reason(path: Path, error: BaseException) -> str:
    return str(error) if isinstance(error, Damaged) else f"{path} is no checkpoint of a run"


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU, under `replay` the buffer's contents or None.

    Raises Damaged for one that is not whole or of another format.
    """
    state = _load(path)
    state["replay"], trouble = _load_replay(path)
    if trouble:
        raise Damaged(trouble)
    return state


def _load_replay(path: Path) -> tuple[dict[str, Any] | None, str]:
    """The contents beside a checkpoint or None, and what is wrong with them in words."""
    replay = _replay_of(path)
    if replay == path or not replay.exists():
        return None, ""
    try:
        # Mapped, not read: a large buffer is copied once, into the arrays that it comes back to.
        return _load(replay, True), ""
    except Damaged as error:
        return None, str(error)


def _load(path: Path, mapped: bool = False) -> dict[str, Any]:
    if trouble := check_zip(path):
        raise Damaged(f"{path} is damaged: {trouble}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # torch raises errors of many kinds on bytes it did not write
        first = (str(error).strip().splitlines() or [""])[0]
        raise Damaged(f"{path} is no checkpoint of a run: {first[:200]}") from None
    if not isinstance(state, dict):
        raise Damaged(f"{path} is no checkpoint of a run: it holds a {type(state).__name__}")
    if state.get("format") != FORMAT:
        raise Damaged(
            f"{path} has checkpoint format {state.get('format')}, this version reads {FORMAT}"
        )
    return state


def _lacks(state: Mapping[str, Any]) -> str:
    """The fault for which a state is no checkpoint, in words; empty where it is one."""
    kinds: dict[str, tuple[type, ...]] = {
        "learner": (dict,), "counters": (dict,), "evals": (int,), "recent": (list,),
        "obs": (torch.Tensor,), "env_state": (torch.Tensor, type(None)),
        "pace": (dict, type(None)),
    }  # fmt: skip
    for name, kind in kinds.items():
        if name not in state or not isinstance(state[name], kind):
            return f"its `{name}` is missing or of another kind"
    if not all(isinstance(n, int) and n >= 0 for n in state["counters"].values()):
        return "its counters are no counts"
    return ""
