"""What environments share with us, draw from, and continue from: nothing leaks, nothing runs."""

from __future__ import annotations

import functools
import json
import os
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_pipeline.buffers.rollout import RolloutBuffer
from rl_pipeline.config.settings import EnvSettings
from rl_pipeline.envs import randomness, snapshot
from rl_pipeline.envs.gymnasium import GymnasiumVecEnv
from rl_pipeline.envs.gymnasium_async import GymnasiumAsyncVecEnv
from rl_pipeline.types import StateError

ROOT = str(Path(__file__).resolve().parents[1])
BOTH = pytest.mark.parametrize("backend", ["gymnasium", "gymnasium_async"])


@pytest.fixture(autouse=True)
def _importable_tests(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)


def make(name, backend="gymnasium", num_envs=2, seed=0, **kwargs):
    flat = kwargs.get("obs") == "dict"
    id_ = name if name.startswith("Cart") else f"tests.foreign:{name}-v0"
    env = EnvSettings(name="gym", id=id_, kwargs=kwargs, flatten_obs=flat)
    if backend == "gymnasium":
        return GymnasiumVecEnv(env, num_envs, seed)
    return GymnasiumAsyncVecEnv(env, num_envs, seed, step_timeout_s=20)


# --- arrays


@BOTH
@pytest.mark.parametrize("obs", ["box", "dict"])
@pytest.mark.parametrize("actions", ["discrete", "multi", "binary", "box", "number"])
def test_what_an_environment_writes_into_is_never_what_is_stored(backend, actions, obs):
    vec = make("Greedy", backend, actions=actions, obs=obs)
    action = vec.spec.action
    buffer = RolloutBuffer(vec.spec, 5, (), torch.device("cpu"))
    seen, given = [vec.reset()], []
    kind = action.dtype
    for t in range(5):
        wanted = np.full((2, *action.shape), t % 2, kind)
        wanted[1] = (t + 1) % 2
        mine = wanted.copy()
        step = vec.step(mine)
        assert np.array_equal(mine, wanted)
        buffer.add(seen[-1], mine, {}, step)
        given.append(wanted)
        seen.append(step.obs)
    expected = [[[t, a.reshape(2, -1)[i, 0]] for i in (0, 1)] for t, a in enumerate(given, 1)]
    assert np.array_equal(seen[1:], np.array(expected, np.float32))
    rollout = buffer.take(seen[-1])
    assert np.array_equal(rollout.action.numpy(), np.stack(given))
    assert np.array_equal(rollout.obs.numpy(), np.stack(seen))
    vec.close()


@pytest.mark.parametrize("obs", ["box", "dict"])
def test_environments_that_share_one_array_are_told_apart(obs):
    vec = make("Greedy", actions="discrete", obs=obs, shared=True)
    vec.reset()
    assert vec.step(np.array([2, 1])).obs[:, 1].tolist() == [2, 1]


def test_environments_cannot_change_the_settings_they_were_made_from():
    env = EnvSettings(name="gym", id="tests.counting:Scripted-v0", kwargs={"rewards": [1.0, 2.0]})
    vec = GymnasiumVecEnv(env, 2, 0)
    first, second = (made.unwrapped._rewards for made in vec._vec.envs)
    first.append(3.0)
    assert second == env.kwargs["rewards"] == [1.0, 2.0]


# --- randomness


def play(vec, num_steps=9):
    return np.stack([vec.reset(), *(vec.step(np.zeros(2, int)).obs for _ in range(num_steps))])


@BOTH
def test_an_environment_that_draws_from_the_process_repeats_with_the_seed(backend):
    runs = []
    for seed in (1, 1, 2):
        vec = make("Chance", backend, seed=seed)
        runs.append(play(vec))
        vec.close()
        random.random(), np.random.rand(), torch.rand(())
    assert np.array_equal(runs[0], runs[1])
    for column in range(6):
        assert not np.isin(runs[0][..., column], runs[2][..., column]).any(), column
    if backend == "gymnasium_async":  # no worker has another's numbers
        assert not np.isin(runs[0][:, 0], runs[0][:, 1]).any()


@BOTH
def test_an_evaluation_does_not_move_what_training_draws(backend):
    training = make("Chance", seed=1)
    undisturbed = play(training)
    training.close()
    training = make("Chance", seed=1)
    first = training.reset()
    evaluation = make("Chance", backend, seed=7)
    play(evaluation)
    evaluation.close()
    rest = [training.step(np.zeros(2, int)).obs for _ in range(9)]
    assert np.array_equal(np.stack([first, *rest]), undisturbed)
    training.close()


def test_closing_gives_the_process_its_own_generators_back():
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    expected = random.random(), np.random.rand(), torch.rand(()).item()
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    vec = make("Chance", seed=1)
    play(vec)
    vec.close()
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected


# --- state


@pytest.mark.parametrize("name", ["Chance", "Rich"])
def test_environments_that_are_data_continue_exactly(name):
    def go_on(vec):
        return np.stack([vec.step(np.array([t % 2, 1])).obs for t in range(30)])

    vec = make(name, seed=1)
    vec.reset()
    go_on(vec)
    state = vec.state()
    assert state is not None
    expected, games = go_on(vec), vec.pop_episodes()
    other = make(name, seed=2)
    other.reset()
    go_on(other)
    for again in (make(name, seed=3), other, vec):
        again.load_state(state)
        assert np.array_equal(go_on(again), expected)
        assert again.pop_episodes() == games
        again.close()


@pytest.mark.parametrize("kind", ["iterator", "view", "objects", "file"])
def test_an_environment_that_is_more_than_data_has_no_state(kind):
    vec = make("Handles", kind=kind)
    vec.reset()
    assert vec.state() is None


class Bomb:
    def __init__(self, *call):
        self._call = call

    def __reduce__(self):
        return self._call[0], self._call[1:]


def hostile(flag):
    """Pickles of every way to run code, each of which would make `flag`."""
    touch = f"open({str(flag)!r}, 'w').close()"
    calls = {
        "os.system": (os.system, f"touch {flag}"),
        "eval": (eval, touch),
        "exec": (exec, touch),
        "partial": (functools.partial(exec, touch),),
        "getattr": (eval, f"__import__('os').system('touch {flag}')"),
    }
    pickles = {
        f"{name}, protocol {protocol}": pickle.dumps({"envs": [Bomb(*call)]}, protocol)
        for name, call in calls.items()
        for protocol in (0, 2, 4)
    }
    inner = pickle.dumps(Bomb(os.system, f"touch {flag}"))
    array = np.empty(1, object)
    array[0] = Bomb(os.system, f"touch {flag}")
    # numpy.load and torch.load unpickle what they read; a dotted name reaches what a module holds.
    pickles["object array"] = pickle.dumps({"envs": array})
    pickles["pickle in a pickle"] = pickle.dumps(Bomb(pickle.loads, inner))
    system = b"os.system"
    pickles["dotted"] = b"\x80\x04\x8c\x07pathlib\x8c" + bytes([len(system)]) + system + b"\x93\x8c"
    pickles["dotted"] += bytes([len(f"touch {flag}")]) + f"touch {flag}".encode() + b"\x85R."
    return pickles


def test_a_hostile_pickle_never_runs_and_is_refused_by_name(tmp_path):
    flag = tmp_path / "ran"
    vec = make("CartPole-v1")
    before = vec.reset()
    found = hostile(flag)
    pickle.loads(found["dotted"])  # it is what it says
    assert flag.exists()
    flag.unlink()
    for name, state in found.items():
        with pytest.raises(StateError, match="CartPole-v1.*saved state is not used"):
            vec.load_state(state)
        assert not flag.exists(), name
    assert vec.step(np.array([0, 0])).obs.shape == before.shape  # it goes on as it was


def changed(state, where, value):
    """`state` with `value` in the place that the keys `where` lead to."""
    parsed = json.loads(state)
    node = parsed["value"]
    for key in where[:-1]:
        node = at(node, key)
    put(node, where[-1], value)
    return json.dumps(parsed).encode()


def at(node, key):
    if isinstance(key, int):
        return node[1][key]
    pairs = node[2] if node[0] == "object" else node[1]
    return next(value for name, value in pairs if name == key)


def put(node, key, value):
    pairs = node[2] if node[0] == "object" else node[1]
    pair = next((pair for pair in pairs if pair[0] == key), None)
    pair[1] = value


ENV = ("envs", 0, 0)


@pytest.mark.parametrize(
    "where, value",
    [
        ((*ENV, "env"), ["object", "subprocess:Popen", [], 999]),
        ((*ENV, "env"), ["object", "gymnasium.core:Wrapper", [["env", None]], 999]),
        ((*ENV, "env"), ["object", "gymnasium.envs.registration:EnvSpec", [], 999]),
        ((*ENV, "env"), ["object", "os:_wrap_close", [["_proc", 1]], 999]),
        ((*ENV, "env"), ["object", "gymnasium.core:os.system", [], 999]),
        ((*ENV, "env"), ["object", "rl_pipeline.run.session:Session", [], 999]),
        ((*ENV, "_elapsed_steps"), ["fixed", "os:system"]),
        ((*ENV, "_elapsed_steps"), ["function", "os:system", [], 999]),
        ((*ENV, "_elapsed_steps"), ["method", "os:system", None, 999]),
        ((*ENV, "_elapsed_steps"), ["enum", "gymnasium.vector.vector_env:AutoresetMode", "X"]),
        ((*ENV, "_elapsed_steps"), ["enum", "signal:Signals", "SIGKILL"]),
        ((*ENV, "_elapsed_steps"), ["dtype", "O"]),
        ((*ENV, "_elapsed_steps"), ["array", "|O", [1], "C", "AAAAAAAAAAA=", True, 999]),
        ((*ENV, "_elapsed_steps"), ["generator", "Generator", {}, [], 999]),
        ((*ENV, "_elapsed_steps"), ["again", 10**9]),
        ((*ENV, "_elapsed_steps"), ["pickle", "x", 999]),
        ((*ENV, "_elapsed_steps"), {}),
        (("resets_next",), ["list", [True], 999]),
        (("obs",), ["array", "<f4", [1], "C", "AAAAAA==", True, 999]),
        (("accounts",), ["dict", [["_ended", 3], ["close", 4]], 999]),
        (("process",), ["list", [1, 2, 3], 999]),
        (("seeds",), "now"),
    ],
    ids=str,
)  # fmt: skip
def test_a_forged_snapshot_is_refused_and_changes_nothing(where, value):
    vec, other = make("CartPole-v1", seed=1), make("CartPole-v1", seed=1)
    for one in (vec, other):
        one.reset()
        one.step(np.array([0, 1]))
    forged = changed(vec.state(), where, value)
    generators = randomness.capture()
    with pytest.raises(StateError):
        vec.load_state(forged)
    assert repr(randomness.capture()) == repr(generators)
    for _ in range(20):
        a, b = (one.step(np.array([0, 1])) for one in (vec, other))
        assert np.array_equal(a.obs, b.obs)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"nonsense", b"[" * 100_000, b"\xff\xfe"])
def test_nonsense_is_no_state(data):
    with pytest.raises(StateError, match="saved state"):
        make("CartPole-v1").load_state(data)


def test_a_class_that_does_something_when_it_is_freed_is_never_made_from_data():
    class Frees(type(make("Rich")._vec.envs[0].unwrapped)):
        def __del__(self):
            raise AssertionError

    import tests.foreign

    tests.foreign.Frees, Frees.__module__, Frees.__qualname__ = Frees, "tests.foreign", "Frees"
    env = make("Rich")._vec.envs[0]
    parsed = {"value": ["list", [["object", "tests.foreign:Frees", [], 1]], 0]}
    with pytest.raises(snapshot.SnapshotError, match="cannot be made from data"):
        snapshot.read(parsed, [[], env])


@pytest.mark.parametrize("every", [0, pytest.param(512, marks=pytest.mark.slow)])
def test_a_run_that_draws_from_the_process_resumes_exactly(tmp_path, cli, every):
    """Also with evaluations between, whose environments draw from the process as well."""
    plain = (
        "env=gym", "env.id=tests.foreign:Chance-v0", "backend=gymnasium", "tracking=none", "seed=1",
        "backend.num_envs=2", "algo.horizon=64", "checkpoint.every_steps=256", "eval.episodes=2",
        f"eval.every_steps={every}",
    )  # fmt: skip
    path = {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    weights = []
    for name, parts in {"whole": (1536,), "parts": (768, 1536)}.items():
        folder = tmp_path / name
        for i, steps in enumerate(parts):
            where = f"resume={folder}" if i else f"hydra.run.dir={folder}"
            # Schedules run over total_steps: it is told apart only by where the run stops.
            done = cli(*plain, "algo.anneal_lr=false", f"total_steps={steps}", where, env=path)
            assert done.returncode == 0, done.stderr
        result = json.loads((folder / "result.json").read_text())
        assert name == "whole" or result["resume"]["exact"]
        newest = max((folder / "checkpoints").glob("step-*.pt"))
        weights.append(torch.load(newest, weights_only=True)["learner"]["params"])
    assert torch.equal(*weights)


def test_a_run_with_a_hostile_state_begins_its_games_anew_and_says_so(tmp_path, cli):
    plain = ("total_steps=600", "backend=gymnasium", "tracking=none", "eval.episodes=0")
    done = cli(*plain, "checkpoint.every_steps=256", f"hydra.run.dir={tmp_path / 'a'}")
    assert done.returncode == 0, done.stderr
    flag, newest = tmp_path / "ran", max((tmp_path / "a/checkpoints").glob("step-*.pt"))
    state = torch.load(newest, weights_only=True)
    data = pickle.dumps(Bomb(os.system, f"touch {flag}"))
    state["env_state"] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    torch.save(state, newest)
    again = cli(*plain, "total_steps=1200", f"resume={tmp_path / 'a'}")
    result = json.loads((tmp_path / "a/result.json").read_text())
    assert not flag.exists()
    if again.returncode == 0:  # else the file was refused as changed
        assert "begin anew" in again.stderr and "pickle" in again.stderr
        assert result["resume"]["exact"] is False and result["status"] == "finished"
