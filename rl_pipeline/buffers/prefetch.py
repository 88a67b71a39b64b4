"""The next batch put together on a thread of its own while the learner works on this one."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from rl_pipeline.buffers.replay import Draw, Replay
from rl_pipeline.types import Batch


class Prefetch:
    """A `ReplayBuffer` that never changes which transitions `replay` would draw, and when.

    `sample` draws as always: with the contents and priorities of that moment. Only the copying is
    done ahead, for a guess: what would be drawn next if nothing changed. Where the guess was right
    the batch is ready, else it is copied now. Uniform draws are hardly moved by a few new rows;
    prioritized ones move with every update of the priorities, so that they gain nothing.
    """

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._thread = ThreadPoolExecutor(1, "replay-prefetch")
        self._ahead: Future[tuple[Draw, Batch] | None] | None = None
        self.hits = 0
        """Batches that were ready."""
        self.misses = 0
        """Batches that were guessed wrong."""
        self.add, self.add_fragment, self.cut = replay.add, replay.add_fragment, replay.cut
        self.update_priorities = replay.update_priorities
        self.prioritized = replay.prioritized
        self.state_dict, self.load_state_dict = replay.state_dict, replay.load_state_dict

    @property
    def size(self) -> int:
        """Transitions that can be drawn now."""
        return self._replay.size

    @property
    def lost(self) -> int:
        """Transitions that could not be brought back."""
        return self._replay.lost

    @property
    def nbytes(self) -> int:
        """Bytes of storage."""
        return self._replay.nbytes

    def sample(self, batch_size: int, progress: float = 0.0) -> Batch:
        """See `Replay.sample`."""
        guess = self._ahead.result() if self._ahead else None
        with self._replay.lock:
            draw = self._replay.draw(batch_size, progress)
            if guess is not None and _same(guess[0], draw):
                self.hits += 1
                batch = guess[1]
            else:
                self.misses += guess is not None
                batch = self._replay.gather(draw)
            rng = self._replay.random_state()
        self._ahead = self._thread.submit(self._guess, batch_size, progress, rng)
        return batch

    def _guess(
        self, batch_size: int, progress: float, rng: np.ndarray
    ) -> tuple[Draw, Batch] | None:
        with self._replay.lock:  # nothing may be overwritten between the halves
            if not self._replay.size:
                return None
            draw = self._replay.draw(batch_size, progress, rng)
            return draw, self._replay.gather(draw)

    def close(self) -> None:
        """Stop the thread and close the replay; a second call does nothing."""
        self._thread.shutdown()
        self._replay.close()


def _same(guess: Draw, draw: Draw) -> bool:
    """The same rows, which cannot have changed under one id, over the same windows."""
    return (
        np.array_equal(guess.ids, draw.ids)
        and np.array_equal(guess.spans, draw.spans)
        and np.array_equal(guess.weight, draw.weight)
    )
