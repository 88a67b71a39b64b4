"""Replay against a slow model that is obviously right."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from replaying import KINDS, Model, check_batch, make, make_spec, tree_of

from rl_pipeline.buffers.replay import Priorities

END = st.sampled_from([None, None, None, "terminated", "truncated", "life"])
PRIORITY = st.floats(1e-6, 1e6)


@st.composite
def scripts(draw):
    num_envs = draw(st.integers(1, 3))
    envs = st.lists(st.integers(0, num_envs - 1), min_size=1, max_size=num_envs, unique=True)
    add = st.tuples(
        st.just("add"), envs, st.lists(END, min_size=3, max_size=3),
        st.lists(st.integers(-5, 5), min_size=3, max_size=3),
    )  # fmt: skip
    rest = st.one_of(
        st.tuples(st.just("sample"), st.integers(1, 5)),
        st.tuples(st.just("update"), st.lists(PRIORITY, min_size=4, max_size=4)),
        st.tuples(st.just("cut"), st.integers(0, num_envs - 1), st.booleans()),
        st.tuples(st.just("save"), st.integers(0, 5)),
    )
    ops = draw(st.lists(st.one_of(add, add, add, add, rest), min_size=25, max_size=70))
    depth = draw(st.sampled_from([1, 3]))
    n_step = draw(st.integers(1, 3))
    rows = draw(st.integers(n_step + 2 + depth, 12))
    return num_envs, depth, n_step, rows, draw(st.booleans()), ops


@pytest.mark.parametrize("kind", KINDS)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(script=scripts())
def test_any_history_gives_the_model_s_answer(kind, script):
    num_envs, depth, n_step, rows, prioritized, ops = script
    priorities = Priorities(alpha=0.7, beta=0.3) if prioritized else None
    spec, gamma = make_spec(num_envs, depth), 0.5
    options = dict(n_step=n_step, gamma=gamma, frame_stack=depth, priorities=priorities)
    buffer = make(kind, spec, rows * num_envs, **options)
    model = Model(num_envs, rows, depth, n_step, gamma)
    drawn: list[int] = []
    for op, *args in ops:
        if op == "add":
            ids, ends, rewards = args
            obs, action, step = model.step(ids, ends[: len(ids)], rewards[: len(ids)])
            buffer.add(obs, action, {}, step)
        elif op == "sample" and model.drawable():
            batch = buffer.sample(args[0], progress=0.5)
            check_batch(batch, model, priorities, 0.5)
            drawn += np.asarray(batch.ids).tolist()
        elif op == "update" and prioritized and drawn:
            ids = (drawn * 4)[-4:]
            alive = buffer.update_priorities(np.array(ids), np.array(args[0], np.float64))
            expected = [divmod(i, num_envs)[::-1] in model.drawable() for i in ids]
            assert alive == sum(expected)
            model.take_priorities(ids, args[0])
        elif op == "cut":
            e, moves = args
            buffer.cut(np.array([e]))
            model.cut(e)
            if moves:
                model.envs[e].jump()
        elif op == "save":
            state = buffer.state_dict()
            model.enlarge(model.rows + args[0])
            buffer = make(kind, spec, model.rows * num_envs, **options)
            buffer.load_state_dict(state)
        assert buffer.size == len(model.drawable())
        if prioritized:
            leaves, root = tree_of(buffer)
            masses = sorted(model.history[e][k].priority ** 0.7 for e, k in model.drawable())
            np.testing.assert_allclose(np.sort(leaves[leaves > 0]), masses, rtol=1e-6)
            assert root == pytest.approx(leaves.sum(), rel=1e-9)
