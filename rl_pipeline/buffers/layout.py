"""The layout of replay, what it costs, and whether it fits. Imports nothing heavy."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rl_pipeline.errors import ConfigError
from rl_pipeline.types import Continuous, EnvSpec

FANOUT = 8
"""Children of a node of the sum tree: the eight doubles of one cache line."""
META_WORDS = 3
"""32-bit words of a row besides its action: reward, flags, history."""
CACHE_LINE, HUGE_PAGE = 64, 2 << 20
"""Bytes."""


def zeros(shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
    """Zeros that begin with a cache line, in huge pages where the system has them.

    Draws read all over memory, and without huge pages most reads look their page up first. numpy
    asks for them too, but not where the allocator serves it from memory it holds already.
    """
    count, kind = math.prod(shape), np.dtype(dtype)
    nbytes = count * kind.itemsize
    if nbytes >= 2 * HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole, unit = np.frombuffer(memory, np.uint8), HUGE_PAGE
    else:
        whole, unit = np.zeros(nbytes + CACHE_LINE, np.uint8), CACHE_LINE
    first = -whole.ctypes.data % unit
    return whole[first : first + nbytes].view(kind).reshape(shape)


@dataclass(frozen=True)
class Layout:
    """A ring of `rows` x `num_envs` rows, each observation stored once in its own dtype."""

    num_envs: int
    rows: int
    """Rows per environment."""
    depth: int
    """Frames in an observation's stack; 1 where observations are stored whole."""
    frame_bytes: int
    """Bytes of what one row stores: an observation, or its newest frame."""
    action_words: int
    """32-bit words of an action."""
    prioritized: bool
    state_bytes: int
    """Recurrent state stored with a row that begins a sequence."""
    stride: int
    """Rows between the starts of sequences; 1 for transitions."""
    fanout: int = FANOUT
    """Children of a node of the sum tree."""

    @property
    def capacity(self) -> int:
        """Rows in all."""
        return self.rows * self.num_envs

    @property
    def frames_bytes(self) -> int:
        """Bytes of all observations: what `buffer=memmap` keeps on disk."""
        return self.capacity * self.frame_bytes

    @property
    def small_bytes(self) -> int:
        """Bytes of everything else."""
        small = self.capacity * 4 * (META_WORDS + self.action_words)
        small += self.rows // self.stride * self.num_envs * self.state_bytes
        small += self.num_envs * (24 + self.depth * self.frame_bytes * (self.depth > 1))
        if self.prioritized:
            small += 8 * (self.capacity + tree_size(tree_starts(self.capacity, self.fanout)))
        return small

    @property
    def nbytes(self) -> int:
        """Bytes of storage."""
        return self.frames_bytes + self.small_bytes


def tree_starts(leaves: int, fanout: int = FANOUT) -> np.ndarray:
    """First index of each level of the sum tree, leaves first; levels are padded to whole nodes."""
    starts = [0]
    while leaves > 1:
        starts.append(starts[-1] + math.ceil(leaves / fanout) * fanout)
        leaves = math.ceil(leaves / fanout)
    return np.array(starts, np.int64)


def tree_size(starts: np.ndarray) -> int:
    """Nodes of the tree."""
    return int(starts[-1]) + 1


def make_layout(
    spec: EnvSpec,
    capacity: int,
    *,
    frame_stack: int = 1,
    prioritized: bool = False,
    span: int = 1,
    stride: int = 1,
    state_bytes: int = 0,
    fanout: int = FANOUT,
) -> Layout:
    """The layout of `capacity` rows; `span` is how many rows a draw must find after its first.

    Raises ConfigError where the first axis of an observation is not a stack of `frame_stack`
    frames, or where a draw would not fit into the rows of one environment.
    """
    depth = frame_stack
    if depth > 1 and (len(spec.obs_shape) < 2 or spec.obs_shape[0] != depth):
        raise ConfigError(
            f"env.atari.frame_stack={depth} does not fit observations {spec.obs_shape} of "
            f"{spec.id}: their first axis must be the stack"
        )
    rows = capacity // spec.num_envs // stride * stride
    least = (span // stride + 1) * stride + depth
    if rows < least:
        raise ConfigError(
            f"buffer.capacity={capacity} leaves {rows} rows for each of backend.num_envs="
            f"{spec.num_envs} environments; it needs at least {least * spec.num_envs}"
        )
    box = spec.action if isinstance(spec.action, Continuous) else None
    return Layout(
        num_envs=spec.num_envs,
        rows=rows,
        depth=depth,
        frame_bytes=math.prod(spec.obs_shape) * spec.obs_dtype.itemsize // depth,
        action_words=math.prod(box.shape) if box else 2,  # discrete actions are int64
        prioritized=prioritized,
        state_bytes=state_bytes,
        stride=stride,
        fanout=fanout,
    )


def refuse_if_too_large(
    layout: Layout,
    available: int,
    where: str,
    counts: Literal["all", "frames", "small"] = "all",
) -> None:
    """Raise ValueError with what is needed, what there is, and the largest capacity that fits.

    `available` bytes `where` ("of memory", ...), `counts` says what has to go there.
    """
    needed = {
        "all": layout.nbytes, "frames": layout.frames_bytes, "small": layout.small_bytes
    }[counts]  # fmt: skip
    if needed <= available:
        return
    # A hundredth less: levels of the sum tree do not grow evenly.
    fits = int(0.99 * layout.capacity * available / needed) // layout.num_envs * layout.num_envs
    raise ConfigError(
        f"buffer.capacity={layout.capacity} needs {_gb(needed)} {where}, {_gb(available)} are "
        f"available; the largest capacity that fits is {fits}"
        + (", or use buffer=memmap, which keeps observations on disk" if counts == "all" else "")
    )


def _gb(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e7 else f"{count:,} bytes"
