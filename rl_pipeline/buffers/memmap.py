"""Replay larger than memory: observations in a file of the run's folder, owned by one process."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from rl_pipeline import machine
from rl_pipeline.buffers import kernels
from rl_pipeline.buffers.layout import refuse_if_too_large
from rl_pipeline.buffers.replay import Replay
from rl_pipeline.errors import ConfigError
from rl_pipeline.types import EnvSpec


class MemmapReplay(Replay):
    """`replay.Replay` of which only cursors, actions, rewards and priorities are in memory.

    Checkpoints hold those; the observations stay in `folder`, where a restored run goes on with
    them. Rows that were overwritten between its checkpoint and its end are recognised and never
    drawn (`lost`). Raises ValueError where another process owns the folder, or it does not fit.
    """

    _announces = True
    lost: int = 0
    """Transitions of the restored checkpoint whose observations had been overwritten since."""

    def __init__(self, spec: EnvSpec, capacity: int, *, folder: Path, **options: Any) -> None:
        """`options` are those of `Ring`."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._owner = FileLock(folder / "replay.lock")
        try:
            self._owner.acquire(timeout=0)
        except Timeout:
            raise ConfigError(f"{folder} holds the replay of a process that still runs") from None
        try:
            super().__init__(spec, capacity, **options)
        except BaseException:
            self._owner.release()
            raise

    def _allocate_frames(self, shape: tuple[int, int]) -> np.ndarray:
        memory = machine.available_memory()
        refuse_if_too_large(self.layout, memory, "of memory", counts="small")
        about, path = self._folder / "replay.json", self._folder / "observations.bin"
        kind = {"rows": list(shape), "word": self._word.name}
        known = json.loads(about.read_text()) if about.exists() else {}
        if any(known.get(key) != value for key, value in kind.items()):
            if not path.exists():
                free = machine.available_disk(self._folder)
                refuse_if_too_large(self.layout, free, "of disk", counts="frames")
            known = {**kind, "id": uuid.uuid4().hex}
            with path.open("wb") as file:
                # Reserved now: a full disk must not end the run in the middle.
                os.posix_fallocate(file.fileno(), 0, self.layout.frames_bytes)
            np.zeros(self.layout.num_envs, np.int64).tofile(self._folder / "written.bin")
            about.write_text(json.dumps(known))
        self._id = known["id"]
        # The kernel wants plain arrays; the maps live as long as these.
        self._map = np.memmap(path, self._word, "r+", shape=shape)
        written = self._folder / "written.bin"
        self._reached = np.memmap(written, np.int64, "r+", shape=(self.layout.num_envs,))
        return np.asarray(self._map)

    def _announce(self, env_ids: np.ndarray, rows: int) -> None:
        """Before they are written: a killed run must not leave a row that it half replaced."""
        most = self._counts[env_ids] + rows * self.layout.depth
        self._reached[env_ids] = np.maximum(self._reached[env_ids], most)

    def _contents(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        arrays, states = super()._contents()
        del arrays["frames"]
        return arrays, states

    def state_dict(self) -> dict[str, Any]:
        """`Replay.state_dict` with the observations left in the folder."""
        self._map.flush()
        return {**super().state_dict(), "observations": self._id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`, in the same folder and with the same capacity."""
        if state.get("observations") != self._id or state["rows"] != self.layout.rows:
            raise ConfigError(
                f"the saved replay's observations are not those in {self._folder}: resume the run "
                "in its own folder with its buffer.capacity, or use buffer.save=false"
            )
        super().load_state_dict(state)

    def _install(self, arrays: dict[str, np.ndarray], states: dict[str, np.ndarray]) -> None:
        layout = self.layout
        time = np.arange(layout.rows)[:, None]
        row = self._counts - 1 - (self._counts - 1 - time) % layout.rows  # [rows, num_envs]
        meta = self._meta.reshape(*row.shape, -1)
        reaches = row - meta[..., kernels.HISTORY]
        gone = (row >= 0) & (reaches < self._reached - layout.rows)
        self.lost = int(np.count_nonzero(gone & (self._drawable().reshape(row.shape))))
        meta[gone, kernels.FLAGS] = 0
        # Where the newest row is gone, what comes next cannot go on from it.
        self._broken[(gone & (row == self._counts - 1)).any(0)] = 1
        self._size[0] -= self.lost
        super()._install(arrays, states)

    def close(self) -> None:
        """Write out and give the folder up."""
        if self._owner.is_locked:
            self._map.flush()
            self._owner.release()
