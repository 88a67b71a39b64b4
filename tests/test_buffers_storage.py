"""Where replay lives: sizes known before, saved and restored, files, pinned memory, threads."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from replaying import (
    KINDS,
    Model,
    add_row,
    check_batch,
    make,
    make_spec,
    outcome,
    play,
    scalar_spec,
    tree_of,
)

from rl_pipeline import machine
from rl_pipeline.buffers import layout
from rl_pipeline.buffers.memmap import MemmapReplay
from rl_pipeline.buffers.prefetch import Prefetch
from rl_pipeline.buffers.replay import Priorities, Replay, Sequences
from rl_pipeline.buffers.staging import StagedReplay
from rl_pipeline.types import Discrete, EnvSpec

each_kind = pytest.mark.parametrize("kind", KINDS)
ATARI = EnvSpec("pong", "x", 8, (4, 84, 84), np.dtype(np.uint8), Discrete(6))


def same(a, b) -> bool:
    """Two batches agree in everything."""
    return all(
        torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in zip(a, b, strict=True)
    )


# -- sizes ---------------------------------------------------------------------------------------


def test_a_million_atari_transitions_fit_into_7_3_gb():
    for prioritized in (False, True):
        plan = layout.make_layout(ATARI, 1_000_000, frame_stack=4, prioritized=prioritized)
        assert plan.capacity == 1_000_000
        assert 7.056e9 < plan.nbytes <= 7.3e9
    with pytest.raises(ValueError) as error:
        layout.refuse_if_too_large(plan, 3_650_000_000, "of memory")
    text = str(error.value)
    assert "7.09 GB of memory, 3.65 GB" in text and "buffer=memmap" in text
    fits = int(text.split("capacity that fits is ")[1].split(",")[0])
    least = layout.make_layout(ATARI, fits, frame_stack=4, prioritized=True).nbytes
    assert 0.98 * 3.65e9 < least <= 3.65e9


@each_kind
@pytest.mark.parametrize("prioritized", [False, True])
def test_the_figure_of_the_plan_is_what_is_allocated(kind, prioritized):
    options = {"frame_stack": 4, "priorities": Priorities() if prioritized else None}
    buffer = make(kind, ATARI, 1000, **options)
    assert buffer.nbytes == pytest.approx(buffer.layout.nbytes, rel=0.05)
    frames = 1000 * 84 * 84
    assert buffer.nbytes <= 1.05 * frames + 8 * 4 * 84 * 84
    vectors = make(kind, scalar_spec(), 1000, sequences=Sequences(2, 4, 3, {"h": (5,)}))
    assert vectors.nbytes == pytest.approx(vectors.layout.nbytes, rel=0.1)


def test_too_large_is_refused_before_anything_is_allocated():
    with pytest.raises(ValueError, match="needs .* GB of memory, .* largest capacity that fits"):
        Replay(ATARI, 10**9, frame_stack=4)
    with pytest.raises(ValueError, match="leaves 2 rows for each"):
        Replay(ATARI, 16, frame_stack=4)


def test_a_container_s_limit_counts(tmp_path):
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("2500000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 100000\n")
    assert machine.available_memory(tmp_path) == 600_000
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.available_memory(tmp_path) > 10_000_000
    old = tmp_path / "memory"
    old.mkdir()
    (old / "memory.limit_in_bytes").write_text("1000")
    (old / "memory.usage_in_bytes").write_text("400")
    (old / "memory.stat").write_text("total_inactive_file 0")
    assert machine.available_memory(tmp_path) == 600


def test_the_figure_needs_no_torch():
    code = (
        "import sys; from rl_pipeline.buffers import layout; "
        "assert not {'torch', 'numba'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- saving --------------------------------------------------------------------------------------


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


@each_kind
@pytest.mark.parametrize("prioritized", [False, True])
def test_a_restored_replay_goes_on_as_if_nothing_had_happened(kind, prioritized):
    options = {"frame_stack": 3, "n_step": 2, "seed": 5}
    options["priorities"] = Priorities() if prioritized else None
    first, second = (make(kind, make_spec(2, 3), 60, **options) for _ in "ab")
    model = Model(2, 30, 3, 2, 0.99)
    play(first, model, 50)
    for _ in range(3):
        ids = first.sample(8).ids
        if prioritized:
            first.update_priorities(ids, np.random.default_rng(0).random(8) + 0.1)
    second.load_state_dict(through_a_file(first.state_dict()))
    second.load_state_dict(through_a_file(first.state_dict()))  # nothing is there twice
    assert second.size == first.size and second.nbytes == first.nbytes
    for i in range(5):
        assert same(first.sample(16), second.sample(16))
        replicas = [model.__class__(2, 30, 3, 2, 0.99) for _ in "ab"]
        for buffer, replica in zip((first, second), replicas, strict=True):
            buffer.cut()
            play(buffer, replica, 7, seed=i)
    if prioritized:
        np.testing.assert_array_equal(tree_of(first)[0], tree_of(second)[0])


@each_kind
def test_other_contents_are_refused_with_a_way_out(kind):
    state = make(kind, scalar_spec(2), 40).state_dict()
    with pytest.raises(ValueError, match="use buffer.capacity=40, or buffer.save=false"):
        make(kind, scalar_spec(2), 30).load_state_dict(state)
    with pytest.raises(ValueError, match="backend.num_envs=2, not 4"):
        make(kind, scalar_spec(4), 80).load_state_dict(state)
    with pytest.raises(ValueError, match="other observations"):
        make(kind, make_spec(2, 1), 40).load_state_dict(state)
    with pytest.raises(ValueError, match="priorities"):
        make(kind, scalar_spec(2), 40, priorities=Priorities()).load_state_dict(state)


def test_another_placement_is_refused():
    state = make("host", scalar_spec(2), 40).state_dict()
    with pytest.raises(ValueError, match="buffer.placement"):
        make("device", scalar_spec(2), 40).load_state_dict(state)


# -- files ---------------------------------------------------------------------------------------


def test_observations_in_a_file_are_the_same_replay(tmp_path):
    options = {"frame_stack": 3, "n_step": 2, "priorities": Priorities()}
    memory = Replay(make_spec(2, 3), 60, **options)
    disk = MemmapReplay(make_spec(2, 3), 60, folder=tmp_path / "replay", **options)
    for buffer in (memory, disk):
        play(buffer, Model(2, 30, 3, 2, 0.99), 100)
    for _ in range(5):
        assert same(memory.sample(32), disk.sample(32))
    assert (tmp_path / "replay" / "observations.bin").stat().st_size == 60 * 4
    assert "frames" not in disk.state_dict()
    disk.close()
    disk.close()


def test_one_process_owns_a_file(tmp_path):
    owner = MemmapReplay(scalar_spec(), 16, folder=tmp_path)
    with pytest.raises(ValueError, match="of a process that still runs"):
        MemmapReplay(scalar_spec(), 16, folder=tmp_path)
    owner.close()
    MemmapReplay(scalar_spec(), 16, folder=tmp_path).close()


@pytest.mark.parametrize("later", [0, 3, 100])
def test_a_killed_run_goes_on_with_the_observations_that_are_left(tmp_path, later):
    """`later` rows were written after the checkpoint, over its oldest ones."""
    run = MemmapReplay(scalar_spec(), 20, folder=tmp_path)
    for number in range(50):
        add_row(run, number)
    state = through_a_file(run.state_dict())
    for number in range(later):
        add_row(run, -1 - number)
    run.close()
    again = MemmapReplay(scalar_spec(), 20, folder=tmp_path)
    again.load_state_dict(state)
    assert again.lost == min(later, 19) and again.size == 19 - again.lost
    if again.size:
        batch = again.sample(256)
        assert set(batch.obs[:, 0].tolist()) == set(range(30 + later, 49))
        assert torch.equal(batch.next_obs, batch.obs + 1)
    for number in range(50, 60):
        add_row(again, number)
    batch = again.sample(256)
    assert batch.obs.min() == (40 if later < 20 else 50)
    assert torch.equal(batch.next_obs, batch.obs + 1)
    again.close()


def test_files_of_another_run_are_refused(tmp_path):
    here = MemmapReplay(scalar_spec(), 16, folder=tmp_path / "a")
    there = MemmapReplay(scalar_spec(), 16, folder=tmp_path / "b")
    with pytest.raises(ValueError, match="resume the run in its own folder"):
        there.load_state_dict(here.state_dict())
    with pytest.raises(ValueError, match="resume the run in its own folder"):
        there.load_state_dict(Replay(scalar_spec(), 16).state_dict())
    here.close()
    there.close()


# -- pinned memory -------------------------------------------------------------------------------


class SlowDevice:
    """Copies arrive 5 ms after they were started, on a thread of their own."""

    def __init__(self) -> None:
        self.waits = True
        self.copying: list[threading.Thread] = []

    def settle(self) -> None:
        for thread in list(self.copying):
            thread.join()

    def pin(self, shape, dtype):
        return torch.empty(tuple(shape), dtype=dtype)

    def start(self, host):
        copies, arrived = [torch.empty_like(x) for x in host], threading.Event()

        def copy() -> None:
            time.sleep(0.005)
            for target, source in zip(copies, host, strict=True):
                target.copy_(source)
            arrived.set()

        thread = threading.Thread(target=copy)
        thread.start()
        self.copying.append(thread)
        device = self

        class Event:
            def synchronize(self) -> None:
                if device.waits:
                    arrived.wait()

        return copies, Event()


def staged(guarded: bool, n_step: int = 2):
    """100 batches through two places; what arrived and what was drawn."""
    device = SlowDevice()
    device.waits = guarded
    options = {"frame_stack": 3, "n_step": n_step, "priorities": Priorities(), "seed": 1}
    plain = Replay(make_spec(2, 3), 60, **options)
    through = StagedReplay(make_spec(2, 3), 60, transfer=device, **options)
    for buffer in (plain, through):
        play(buffer, Model(2, 30, 3, 2, 0.99), 50)
    expected = [plain.sample(16 + i // 50) for i in range(100)]
    got = [through.sample(16 + i // 50) for i in range(100)]
    device.settle()
    return got, expected


@pytest.mark.parametrize("n_step", [1, 2])
def test_a_place_is_not_overwritten_while_it_is_copied(n_step):
    got, expected = staged(guarded=True, n_step=n_step)
    assert all(same(a, b) for a, b in zip(got, expected, strict=True))


def test_without_the_guard_that_test_would_fail():
    got, expected = staged(guarded=False)
    assert not all(same(a, b) for a, b in zip(got, expected, strict=True))


def test_one_place_is_refused():
    with pytest.raises(ValueError, match="num_slots=1"):
        StagedReplay(scalar_spec(), 16, transfer=SlowDevice(), num_slots=1)


# -- prefetch ------------------------------------------------------------------------------------


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("pinned", [False, True])
def test_prefetch_never_changes_what_is_drawn(prioritized, pinned):
    """Interleaved with new rows, priorities, a restore; n-step windows that grow meanwhile."""
    options = {"frame_stack": 3, "n_step": 3, "seed": 3}
    options["priorities"] = Priorities() if prioritized else None
    plain = Replay(make_spec(2, 3), 600, **options)
    extra = {"transfer": SlowDevice(), "num_slots": 3} if pinned else {}
    ahead = Prefetch((StagedReplay if pinned else Replay)(make_spec(2, 3), 600, **extra, **options))
    models = [Model(2, 300, 3, 3, 0.99) for _ in "ab"]
    rng = np.random.default_rng(0)
    for i in range(120):
        if i % 4 == 0:
            for buffer, model in zip((plain, ahead), models, strict=True):
                play(buffer, model, 2 if i else 20, seed=i)
        if i == 60:
            ahead.load_state_dict(through_a_file(ahead.state_dict()))
        a, b = plain.sample(8, i / 120), ahead.sample(8, i / 120)
        if pinned:
            extra["transfer"].settle()
        assert same(a, b)
        check_batch(a, models[0], None if not prioritized else options["priorities"], i / 120)
        if prioritized and i % 3:
            new = rng.random(8) + 0.1
            for buffer in (plain, ahead):
                buffer.update_priorities(a.ids, new)
            for model in models:
                model.take_priorities(a.ids, new)
    assert ahead.hits + ahead.misses == 119
    # A few new rows hardly move uniform draws.
    assert prioritized or ahead.hits > 70
    ahead.close()
    ahead.close()


# -- threads -------------------------------------------------------------------------------------


def write_and_sample(seconds: float, kind: str) -> None:
    """A row's numbers all say its number: a torn one would disagree with itself."""
    spec = EnvSpec("t", "t", 2, (64,), np.dtype(np.float32), Discrete(2**40))
    buffer = make(kind, spec, 500, priorities=Priorities(alpha=1.0), n_step=1)
    errors, stop, written = [], threading.Event(), [0]

    def write() -> None:
        number = 0
        while not stop.is_set():
            obs = np.full((2, 64), number, np.float32)
            buffer.add(obs, np.full(2, number), {}, outcome(2, reward=number))
            number = (number + 1) % 2**23
            written[0] += 1

    def learn(worker: int) -> None:
        rng = np.random.default_rng(worker)
        while not stop.is_set():
            if buffer.size < 100:
                continue
            batch = buffer.sample(32)
            first = batch.obs[:, :1]
            assert (batch.obs == first).all() and (batch.next_obs == first + 1).all()
            assert (batch.action == first[:, 0]).all() and (batch.reward == first[:, 0]).all()
            # The priority says whose it is.
            time.sleep(rng.random() * 1e-3)
            buffer.update_priorities(batch.ids, torch.as_tensor(batch.ids).double() + 2.0)

    def guarded(work, *args) -> None:
        try:
            work(*args)
        except BaseException as error:
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=guarded, args=(learn, i)) for i in range(2)]
    threads.append(threading.Thread(target=guarded, args=(write,)))
    for thread in threads:
        thread.start()
    stop.wait(seconds)
    while written[0] <= 300 and not stop.wait(0.1):  # a busy machine takes longer
        pass
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert written[0] > 300
    leaves, root = tree_of(buffer)
    assert abs(float(root) - leaves.sum()) <= 1e-9 * leaves.sum()
    # Every mass is the row's own number or a largest one that was there when it was written:
    # none may exceed what any id so far could have given.
    newest = 2 * written[0] + 2
    assert leaves.max() <= newest
    state = buffer.state_dict()
    counts = state["counts"].numpy()
    slots = np.nonzero(leaves)[0]
    time_of, env = slots // 2, slots % 2
    ids = (counts[env] - 1 - (counts[env] - 1 - time_of) % 250) * 2 + env
    assert (leaves[slots] <= newest).all() and len(ids) > 300
    own = leaves[slots] == ids + 2.0
    larger_before = leaves[slots] < ids + 2.0  # the largest priority when it was written
    assert (own | larger_before).all()


@each_kind
def test_a_writer_and_samplers_at_once(kind):
    write_and_sample(1.0, kind)


@pytest.mark.slow
@each_kind
def test_a_writer_and_samplers_at_once_for_longer(kind):
    write_and_sample(10.0, kind)
