"""The inner loops of replay, compiled by numba once and cached on disk; no GIL while they run.

Words used here: row `k` of environment `e` counts that environment's rows since the run began; it
lives in slot `(k % T) * N + e` of a ring of T rows x N environments; its id is `k * N + e`. Ids
are never used twice, so a late priority finds out by itself that its transition is gone.

`meta[slot]` is one small record of 32-bit words: reward, flags and history, action. `history` is
how many earlier rows the frame stack of a row reaches back to (0: filled with its own frame).
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

from rl_pipeline.buffers.layout import FANOUT

VALID, TERMINATED, TRUNCATED, DRAWABLE = 1, 2, 4, 8
"""Flags of a row; DRAWABLE: valid, its successor is here, and so is all that its stack reaches."""
REWARD, FLAGS, HISTORY, ACTION = 0, 1, 2, 3
"""Words of a row's record."""
COUNT, BROKEN, SIZE = 0, 1, 2
"""The books [3, N]: rows written, whether the stream begins anew, and drawable rows in all."""

AHEAD = 16
"""Rows whose cache lines are asked for before they are copied."""

BAD_ENV, BAD_START, BAD_STACK = -1, -2, -3
"""Refusals of `append`: an id out of range, a valid row right after an end, a broken stack."""

compiled = njit(nogil=True, cache=True, error_model="numpy")


@intrinsic
def _copy_words(typing, to, to_first, source, first, count):
    """Words `first` to `first + count` of `source`, counted over all axes, to `to_first` of `to`.

    By memcpy: a loop over the words of a frame takes 1.7 times as long.
    """
    if (to.layout, source.layout) != ("C", "C") or to.dtype != source.dtype:
        raise TypingError("_copy_words is for contiguous arrays of one dtype")

    def generate(context, builder, signature, args):
        a, a_first, b, b_first, num = args
        a = context.make_array(signature.args[0])(context, builder, a)
        b = context.make_array(signature.args[2])(context, builder, b)
        places = builder.gep(a.data, [a_first]), builder.gep(b.data, [b_first])
        cgutils.raw_memcpy(builder, *places, num, a.itemsize)
        return context.get_dummy_value()

    return types.void(to, types.int64, source, types.int64, types.int64), generate


@intrinsic
def _prefetch(typing, array, place):
    """Ask for the cache line of a word, counted over all axes; there is nothing to wait for."""
    if array.layout != "C":
        raise TypingError("_prefetch is for contiguous arrays")

    def generate(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        address = builder.bitcast(builder.gep(data, [args[1]]), byte)
        # To read, into all levels, as data.
        builder.call(function, [address, word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


# -- random numbers ------------------------------------------------------------------------------


@compiled
def _uniform(rng):
    """Next number in [0, 1) of splitmix64 (Steele et al. 2014), 53 bits."""
    rng[0] += np.uint64(0x9E3779B97F4A7C15)
    z = rng[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return np.float64(z >> np.uint64(11)) * (1.0 / 9007199254740992.0)


# -- the sum tree --------------------------------------------------------------------------------
# Level 0 is the leaves; `starts[i]` is where level i begins in `tree`; the last level is the root.
# A parent is always summed anew from its children: sums do not drift, whatever the history.


@compiled
def tree_refresh(tree, starts, leaves, count):
    """Sum the ancestors of `leaves[:count]` anew, level by level; overwrites `leaves`."""
    for level in range(1, starts.shape[0]):
        kept, last = 0, -1
        below = starts[level - 1]
        for i in range(count):
            parent = leaves[i] // FANOUT
            if parent == last:
                continue
            last = parent
            leaves[kept] = parent
            kept += 1
            first = below + parent * FANOUT
            total = 0.0
            for c in range(FANOUT):
                total += tree[first + c]
            tree[starts[level] + parent] = total
        count = kept


@compiled
def tree_find(tree, starts, values, nodes):
    """For each of `values` the leaf whose share of [0, root) holds it, into `nodes`.

    Rounding, or a value at or beyond the root, ends in the last leaf with mass: never in one
    without. Level by level, so that the cache misses of all values overlap. Overwrites `values`.
    """
    for b in range(nodes.shape[0]):
        nodes[b] = 0
    for level in range(starts.shape[0] - 2, -1, -1):
        for b in range(nodes.shape[0]):
            first = starts[level] + nodes[b] * FANOUT
            value, upto, below, child = values[b], 0.0, 0.0, 0
            for c in range(FANOUT - 1):  # without branches: which way is a coin toss
                upto += tree[first + c]
                beyond = value >= upto
                child += beyond
                below = upto if beyond else below
            value -= below
            if tree[first + child] <= 0.0:
                while tree[first + child] <= 0.0:
                    child -= 1
                value = tree[first + child]
            values[b] = value
            nodes[b] = nodes[b] * FANOUT + child


# -- writing -------------------------------------------------------------------------------------


@compiled
def _same_words(a, a_first, b, b_first, count):
    """Whether `count` words of two flat arrays agree."""
    for w in range(count):
        if a[a_first + w] != b[b_first + w]:
            return False
    return True


@compiled
def _filled(words, first, frame, depth):
    """Whether all frames of the stack that begins at `first` are its newest."""
    newest = first + (depth - 1) * frame
    for i in range(depth - 1):
        if not _same_words(words, first + i * frame, words, newest, frame):
            return False
    return True


@compiled
def _mark(k, slot, head, T, stride, meta, size, changed, num):
    """Row `k` becomes drawable, if its stack is still whole with `head` rows written."""
    flags = meta[slot, FLAGS]
    if not flags & VALID or flags & DRAWABLE or (stride > 1 and k % stride):
        return num
    if k - np.int64(meta[slot, HISTORY]) < head - T:
        return num
    meta[slot, FLAGS] = flags | np.uint32(DRAWABLE)
    size[0] += 1
    changed[num] = slot
    return num + 1


@compiled
def _complete(k, slot, T, N, span, stride, meta, size, changed, num):
    """Row `k` was written (or made a reset row): which rows before it are complete now?"""
    whole = (meta[slot, FLAGS] & VALID) != 0
    for j in range(1, min(span, k) + 1):
        slot -= N
        if slot < 0:
            slot += meta.shape[0]
        if whole and j < span:
            continue  # complete with `span` rows after it, or at an end
        if not meta[slot, FLAGS] & VALID:
            break
        num = _mark(k - j, slot, k + 1, T, stride, meta, size, changed, num)
    return num


@compiled
def _free(k, slot, T, N, depth, meta, size, changed, num):
    """Row `k` takes the slot of row `k - T`: that row, and those whose stack reaches it, go."""
    for j in range(min(depth, T)):
        if k - T + j >= 0 and meta[slot, FLAGS] & DRAWABLE:
            if np.int64(meta[slot, HISTORY]) >= j:
                meta[slot, FLAGS] -= np.uint32(DRAWABLE)
                size[0] -= 1
                changed[num] = slot
                num += 1
        slot += N
        if slot >= meta.shape[0]:
            slot -= meta.shape[0]
    return num


@compiled
def append(
    obs, action, reward, terminated, truncated, valid, env_ids,  # L rows of n environments
    geometry, frames, meta, books, last,  # the ring
    out,  # slots whose DRAWABLE changed; slots written, from which row, with which frame
):  # fmt: skip
    """Write a block; returns (changed, written) or (error, environment).

    obs [L * n, ...] and action [L * n, ...] are words, frames [T * N, W] too; `geometry`
    is T, depth, span, stride and whether frames are kept here (each argument costs a call its
    time). `out` [4, ...] says what was done: the frame `out[3, i]` of row `out[2, i]` of the
    block went to slot `out[1, i]`. A stack that can go on from the rows before it costs one frame;
    at the begin of a stream whose first stack is neither that nor filled, its older frames are
    stored first, as rows that only carry them.
    """
    T, depth, span, stride = geometry[0], geometry[1], geometry[2], geometry[3]
    keep_frames = geometry[4]
    counts, broken, size = books[COUNT], books[BROKEN], books[SIZE]
    N, n, W = counts.shape[0], env_ids.shape[0], frames.shape[1]
    obs, action = obs.ravel(), action.ravel()  # views of what is contiguous
    words = action.shape[0] // reward.shape[0]
    older = (depth - 1) * W
    changed, written, source, which = out[0], out[1], out[2], out[3]
    num_changed, num_written = 0, 0
    for row in range(reward.shape[0]):
        e = np.int64(env_ids[row % n])
        if e < 0 or e >= N:
            return BAD_ENV, e
        k = counts[e]
        slot = (k % T) * N + e
        before = slot - N if slot >= N else slot - N + meta.shape[0]
        begins = broken[e] != 0
        follows_reset = not begins and not meta[before, FLAGS] & VALID
        if not begins and valid[row] and meta[before, FLAGS] & (TERMINATED | TRUNCATED):
            return BAD_START, e
        history, pads, stack = np.int64(0), 0, row * depth * W
        if depth > 1:
            known = np.int64(0) if begins else np.int64(meta[before, HISTORY])
            if begins or follows_reset or known < depth - 1:
                if (begins or follows_reset) and _filled(obs, stack, W, depth):
                    history = 0
                elif begins:
                    pads, history = depth - 1, depth - 1
                elif _same_words(obs, stack, last[e], W, older):
                    history = min(known + 1, depth - 1)
                else:
                    return BAD_STACK, e
            else:
                history = depth - 1
        for p in range(pads + 1):
            num_changed = _free(k, slot, T, N, depth, meta, size, changed, num_changed)
            frame = depth - 1 - (pads - p)
            if keep_frames:
                _copy_words(frames, slot * W, obs, stack + frame * W, W)
            real = p == pads
            flags = np.uint32(0)
            if real:
                if valid[row]:
                    flags |= np.uint32(VALID)
                if terminated[row]:
                    flags |= np.uint32(TERMINATED)
                if truncated[row]:
                    flags |= np.uint32(TRUNCATED)
            meta[slot, REWARD] = np.float32(reward[row]).view(np.uint32) if real else np.uint32(0)
            meta[slot, FLAGS] = flags
            meta[slot, HISTORY] = np.uint32(history) if real else np.uint32(p)
            for w in range(words):
                meta[slot, ACTION + w] = action[row * words + w] if real else np.uint32(0)
            num_changed = _complete(k, slot, T, N, span, stride, meta, size, changed, num_changed)
            written[num_written], source[num_written], which[num_written] = slot, row, frame
            num_written += 1
            k += 1
            slot = slot + N if slot + N < meta.shape[0] else slot + N - meta.shape[0]
        counts[e] = k
        broken[e] = 0
        # Only where the next row will be compared with this one.
        if depth > 1 and (not valid[row] or history < depth - 1):
            _copy_words(last, e * depth * W, obs, stack, depth * W)
    return num_changed, num_written


@compiled
def cut(env_ids, T, span, stride, meta, books, out):
    """The next row of these environments does not follow their newest, which loses its outcome.

    Returns (changed, written) as `append`.
    """
    counts, broken, size = books[COUNT], books[BROKEN], books[SIZE]
    N, changed, written = counts.shape[0], out[0], out[1]
    num_changed, num_written = 0, 0
    for e in env_ids:
        if broken[e]:
            continue
        broken[e] = 1
        k = counts[e] - 1
        slot = (k % T) * N + e
        meta[slot, FLAGS] = np.uint32(0)
        num_changed = _complete(k, slot, T, N, span, stride, meta, size, changed, num_changed)
        written[num_written] = slot
        num_written += 1
    return num_changed, num_written


@compiled
def weigh(out, num_changed, num_written, given, usual, meta, mass, tree, starts):
    """Give new rows their mass, and the tree that of the rows that can be drawn.

    `given` [L * n] or empty: then all get the `usual` one; `out` as `append` left it, its first
    row is overwritten.
    """
    changed, written, source = out[0], out[1], out[2]
    for i in range(num_written):
        mass[written[i]] = given[source[i]] if given.shape[0] else usual
    for i in range(num_changed):
        slot = changed[i]
        tree[slot] = mass[slot] if meta[slot, FLAGS] & DRAWABLE else 0.0
    tree_refresh(tree, starts, changed, num_changed)


# -- drawing -------------------------------------------------------------------------------------


@compiled
def _identify(slots, num_rows, n_step, meta, counts, ids, ends, spans):
    """Ids of the rows in `slots`, and where their n-step windows end.

    A window stops at an end, at the newest row and before a row that only resets: the slot that it
    bootstraps from goes to `ends`, its length to `spans`.
    """
    N = counts.shape[0]
    for b in range(slots.shape[0]):
        slot = slots[b]
        t = slot // N
        e = slot - t * N
        newest = counts[e] - 1
        # The row in slot t: its number is t modulo T, and at most T - 1 behind the newest.
        k = newest - newest % num_rows + t
        if k > newest:
            k -= num_rows
        span, most, end = 1, min(n_step, newest - k), slot + N
        if end >= meta.shape[0]:
            end -= meta.shape[0]
        while span < most and meta[end, FLAGS] & VALID:
            span += 1
            end += N
            if end >= meta.shape[0]:
                end -= meta.shape[0]
        ids[b], ends[b], spans[b] = k * N + e, end, span


@compiled
def draw_uniform(rng, num_rows, n_step, meta, counts, ids, slots, ends, spans):
    """Draw drawable rows, each equally likely, with replacement.

    By rejection over the least power of two of slots that holds all rows written: while the ring
    fills, most draws do not notice that it has grown (the prefetched batch then stays right).
    """
    rows = np.int64(0)
    for e in range(counts.shape[0]):
        rows = max(rows, min(counts[e], num_rows))
    used = rows * counts.shape[0]
    bound = np.int64(1)
    while bound < used:
        bound *= 2
    for b in range(ids.shape[0]):
        slot = np.int64(_uniform(rng) * bound)
        while slot >= used or not meta[slot, FLAGS] & DRAWABLE:
            slot = np.int64(_uniform(rng) * bound)
        slots[b] = slot
    _identify(slots, num_rows, n_step, meta, counts, ids, ends, spans)


@compiled
def draw_prioritized(
    rng, num_rows, n_step, meta, counts, tree, starts, beta, ids, slots, ends, spans, weight
):
    """Draw rows in proportion to their mass, one from each of B equal parts of the sum.

    `weight` is (size P(i))^-beta over the batch's largest: size and sum cancel out.
    """
    size = ids.shape[0]
    part = tree[starts[starts.shape[0] - 1]] / size
    mass = np.empty(size)
    for b in range(size):
        mass[b] = (b + _uniform(rng)) * part
    tree_find(tree, starts, mass, slots)
    least = np.inf
    for b in range(size):
        mass[b] = tree[slots[b]]
        least = min(least, mass[b])
    for b in range(size):
        weight[b] = (least / mass[b]) ** beta
    _identify(slots, num_rows, n_step, meta, counts, ids, ends, spans)


@compiled
def set_priorities(ids, priorities, alpha, num_rows, meta, counts, mass, tree, starts):
    """Set the priorities of the rows that still exist; of equal ids the largest counts.

    Returns how many of `ids` still existed, and the largest priority; or -1, with nothing done,
    unless all are finite and above 0.
    """
    largest = 0.0
    for b in range(priorities.shape[0]):
        if not (0.0 < priorities[b] < np.inf):
            return -1, 0.0
        largest = max(largest, priorities[b])
    slots, new = np.empty(ids.shape[0], np.int64), np.empty(ids.shape[0])
    N = counts.shape[0]
    alive = 0
    for b in range(ids.shape[0]):
        k = ids[b] // N
        e = ids[b] - k * N
        if ids[b] < 0 or k < counts[e] - num_rows or k >= counts[e]:
            continue
        slot = (k % num_rows) * N + e
        if not meta[slot, FLAGS] & DRAWABLE:
            continue
        tree[slot] = 0.0
        slots[alive] = slot
        new[alive] = priorities[b] ** alpha
        alive += 1
    for i in range(alive):
        slot = slots[i]
        tree[slot] = max(tree[slot], new[i])
        mass[slot] = tree[slot]
    tree_refresh(tree, starts, slots, alive)
    return alive, largest


# -- gathering -----------------------------------------------------------------------------------


@compiled
def _copy_rows(slots, ends, frames, meta, obs, next_obs):
    """Rows and their successors one by one; the cache misses of AHEAD rows overlap."""
    size, width, words = slots.shape[0], frames.shape[1], meta.shape[1]
    for b in range(-AHEAD, size):
        if b + AHEAD < size:
            slot, end = slots[b + AHEAD], ends[b + AHEAD]
            _prefetch(frames, slot * width)
            _prefetch(frames, slot * width + width - 1)
            _prefetch(frames, end * width)
            _prefetch(frames, end * width + width - 1)
            _prefetch(meta, slot * words)
            _prefetch(meta, slot * words + words - 1)
        if b >= 0:
            slot, end = slots[b], ends[b]
            for w in range(width):
                obs[b, w] = frames[slot, w]
            for w in range(width):
                next_obs[b, w] = frames[end, w]


@compiled
def _copy_stack(slot, N, depth, frames, meta, out, b, first):
    """The observation in `slot` into `out[b, first:]`, its frame stack rebuilt."""
    width = frames.shape[1]
    history = np.int64(meta[slot, HISTORY]) if depth > 1 else 0
    first += b * out.shape[1]
    for i in range(depth):
        source = slot - min(depth - 1 - i, history) * N
        if source < 0:
            source += frames.shape[0]
        _copy_words(out, first + i * width, frames, source * width, width)


@compiled
def gather(
    slots, ends, spans, N, depth, gamma, frames, meta, meta_f,
    obs, next_obs, action, reward, discount,
):  # fmt: skip
    """Copy the drawn transitions out: obs and next_obs [B, depth * W], action [B, A] as words.

    Where next_obs is empty, obs is [B, (depth + 1) * W]: one step on, a stack shares all but one
    frame with the one before.
    """
    width = frames.shape[1]
    if depth == 1:
        _copy_rows(slots, ends, frames, meta, obs, next_obs)
    elif next_obs.shape[0]:
        for b in range(slots.shape[0]):
            _copy_stack(slots[b], N, depth, frames, meta, obs, b, 0)
            _copy_stack(ends[b], N, depth, frames, meta, next_obs, b, 0)
    else:
        for b in range(slots.shape[0]):
            oldest = slots[b] - np.int64(meta[slots[b], HISTORY]) * N
            if oldest < 0:
                oldest += frames.shape[0]
            _copy_words(obs, b * obs.shape[1], frames, oldest * width, width)
            _copy_stack(ends[b], N, depth, frames, meta, obs, b, width)
    for b in range(slots.shape[0]):
        slot = slots[b]
        for w in range(action.shape[1]):
            action[b, w] = meta[slot, ACTION + w]
        total, factor, last = 0.0, 1.0, slot
        for _ in range(spans[b]):
            total += factor * meta_f[slot, REWARD]
            factor *= gamma
            last = slot
            slot += N
            if slot >= meta.shape[0]:
                slot -= meta.shape[0]
        reward[b] = total
        discount[b] = 0.0 if meta[last, FLAGS] & TERMINATED else factor


@compiled
def gather_sequences(
    slots, N, depth, gamma, frames, meta, meta_f, obs, action, reward, discount, mask
):
    """Copy sequences out, time-major: obs [L + 1, B, ...], the rest [L, B]; zeros after an end."""
    for b in range(slots.shape[0]):
        slot, alive = slots[b], True
        _copy_stack(slot, N, depth, frames, meta, obs[0], b, 0)
        for t in range(mask.shape[0]):
            flags = meta[slot, FLAGS]
            following = slot + N
            if following >= meta.shape[0]:
                following -= meta.shape[0]
            alive = alive and (flags & VALID) != 0
            mask[t, b] = 1.0 if alive else 0.0
            if alive:
                _copy_stack(following, N, depth, frames, meta, obs[t + 1], b, 0)
                for w in range(action.shape[2]):
                    action[t, b, w] = meta[slot, ACTION + w]
                reward[t, b] = meta_f[slot, REWARD]
                discount[t, b] = 0.0 if flags & TERMINATED else gamma
                alive = not flags & (TERMINATED | TRUNCATED)
            else:
                obs[t + 1, b, :] = 0
                action[t, b, :] = 0
                reward[t, b] = discount[t, b] = 0.0
            slot = following
