"""DQN through the door: every buffer trains, a resumed run equals an uninterrupted one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import settings

from rl_pipeline.errors import ConfigError
from rl_pipeline.run import build, checkpoint

SHORT = (
    "algo=dqn", "env=cartpole", "backend=gymnasium", "backend.num_envs=1", "tracking=none",
    "log_every_s=0.2", "total_steps=2000", "eval.episodes=2", "seed=5", "buffer.capacity=1500",
    "algo.learning_starts=200", "algo.target_every=100", "network.hidden=[32]", "recipe=none",
)  # fmt: skip


def train(folder: Path, *overrides: str) -> dict:
    """A run in this process whose updates move the network; returns result.json's object."""
    session, _ = build.make_session(settings(*overrides), folder, list(overrides))
    before = session.learner.state_dict()["params"].clone()
    result = session.run()
    assert not torch.equal(session.learner.state_dict()["params"], before)
    return result


def only(folder: Path, name: str) -> Path:
    (path,) = folder.glob(f"checkpoints/{name}")
    return path


def last(folder: Path) -> dict:
    return checkpoint.load(max((folder / "checkpoints").glob("step-*.pt")))


@pytest.mark.parametrize(
    "buffer",
    [
        ["buffer=deque"],
        ["buffer=memmap"],
        ["buffer=uniform", "buffer.prefetch=true"],
        ["buffer=uniform", "algo.n_step=3"],
        ["buffer=prioritized", "algo.double=true"],
    ],
)
def test_every_buffer_trains(tmp_path, buffer):
    result = train(tmp_path, *SHORT, *buffer, "backend.num_envs=2")
    assert 2000 <= result["counters"]["env_steps"] <= 2001
    assert result["counters"]["updates"] == pytest.approx((2000 - 200) * 8 / 32, abs=1)
    assert result["effective"]["buffer"] == buffer[0].split("=")[1]
    assert 0 < result["buffer"]["bytes"] < result["buffer"]["available_bytes"]
    assert {"act", "env", "store", "sample", "learn"} <= result["phases"].keys()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    final = {k: v for row in rows for k, v in row["metrics"].items()}
    assert final["explore/epsilon"] == 0.05
    assert final["replay/ratio"] == pytest.approx(8, rel=0.03)
    assert 1300 <= final["replay/size"] <= 1500
    assert {"loss/total", "loss/q", "loss/grad_norm"} <= final.keys()


def test_a_resumed_run_equals_an_uninterrupted_one(cli):
    # Exploration is a fraction of total_steps: the whole run's length from the start.
    line = (*SHORT, "eval.episodes=0", "buffer=deque", "algo.epsilon_fraction=0")
    assert cli(*line).returncode == 0
    (straight,) = cli.folders()
    assert cli(*line, "total_steps=1000").returncode == 0
    (cut,) = set(cli.folders()) - {straight}
    # One file holds the replay, beside the newest checkpoint; the others stay small.
    assert only(cut, "replay-*.pt").name == "replay-000000001000.pt"
    before = last(cut)
    out = cli(f"resume={cut}", "total_steps=2000")
    assert out.returncode == 0, out.stderr
    a, b = last(straight), last(cut)
    assert torch.equal(a["learner"]["params"], b["learner"]["params"])
    assert torch.equal(a["learner"]["target"], b["learner"]["target"])
    assert not torch.equal(before["learner"]["params"], b["learner"]["params"])
    for x, y in zip(a["replay"]["items"], b["replay"]["items"], strict=True):
        assert torch.equal(x, y)
    assert a["replay"]["rng"] == b["replay"]["rng"]  # so the same ids were drawn
    results = [json.loads((f / "result.json").read_text()) for f in (straight, cut)]
    assert results[0]["counters"] == results[1]["counters"]
    assert results[1]["resume"] == {"from_env_steps": 1000, "exact": True, "replay": "restored"}
    assert only(cut, "replay-*.pt").name == "replay-000000002000.pt"


@pytest.mark.slow
def test_without_a_saved_replay_a_resumed_run_fills_it_anew(cli):
    line = (*SHORT, "eval.episodes=0", "buffer=deque", "buffer.save=false")
    assert cli(*line, "total_steps=1000").returncode == 0
    (folder,) = cli.folders()
    assert not list(folder.glob("checkpoints/replay-*"))
    done = last(folder)["counters"]["updates"]
    out = cli(f"resume={folder}", "total_steps=2000")
    assert out.returncode == 0, out.stderr
    (result,) = cli.results()
    assert result["resume"] == {"from_env_steps": 1000, "exact": False, "replay": "begun anew"}
    # learning_starts more steps without an update, and no burst afterwards.
    assert result["counters"]["updates"] - done == (1000 - 200) * 8 // 32


@pytest.mark.slow
def test_environments_that_restart_cut_the_replay(cli):
    line = (*SHORT, "eval.episodes=0", "buffer=deque", "backend=envpool", "algo.n_step=3")
    assert cli(*line, "total_steps=1000").returncode == 0
    (folder,) = cli.folders()
    out = cli(f"resume={folder}", "total_steps=1100")
    assert out.returncode == 0, out.stderr
    (result,) = cli.results()
    assert result["resume"] == {"from_env_steps": 1000, "exact": False, "replay": "restored"}
    obs, _, _, discount, after = last(folder)["replay"]["items"]
    # CartPole moves by velocity / 50 a step: no window leads from one episode into another.
    steps = torch.where(discount > 0, torch.log(discount) / torch.log(torch.tensor(0.99)), 3)
    assert ((after[:, 0] - obs[:, 0]).abs() < 0.02 * 4 * steps.round()).all()


def test_evaluations_without_games_are_never_due(tmp_path):
    """They would be at every turn, and close a window of the log each time."""
    train(tmp_path, *SHORT, "buffer=uniform", "eval.episodes=0")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) < 15


def test_lanes_train(tmp_path):
    result = train(
        tmp_path, *SHORT, "buffer=uniform", "backend=envpool_async", "backend.num_envs=4"
    )  # fmt: skip
    assert result["counters"]["updates"] == pytest.approx((2000 - 200) * 8 / 32, abs=2)


def test_real_actions_end_before_the_run_exists(cli):
    out = cli("algo=dqn", "env=pendulum", "buffer=deque", "tracking=none")
    assert out.returncode == 2
    assert "algo=dqn needs discrete actions" in out.stderr
    assert "Traceback" not in out.stderr
    assert cli.folders() == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algo=ppo", "buffer=uniform"], ["buffer=uniform", "algo=ppo", "buffer=rollout"]),
        (["algo=dqn", "buffer=rollout"], ["buffer=rollout", "algo=dqn", "buffer=uniform"]),
        (["algo=dqn", "buffer.alpha=0.5"], ["buffer.alpha", "buffer=prioritized"]),
        (["algo=dqn", "buffer=prioritized", "buffer.beta=null"], ["buffer.beta"]),
        (["algo=ppo", "buffer.capacity=100"], ["buffer.capacity=100", "no effect"]),
        (["algo=ppo", "buffer.save=false"], ["buffer.save=False", "no effect"]),
        (["algo=dqn", "buffer.capacity=null"], ["buffer.capacity must be given"]),
        (["algo=dqn", "buffer.capacity=500", "algo.learning_starts=501"], ["learning_starts"]),
        (["algo=dqn", "buffer.capacity=100", "algo.learning_starts=0", "algo.batch_size=128"],
         ["buffer.capacity=100", "algo.batch_size"]),
        (["algo=dqn", "total_steps=900", "algo.learning_starts=1000"], ["learning_starts=1,000"]),
        (["algo=dqn", "buffer=deque", "buffer.prefetch=true"], ["buffer.prefetch", "no effect"]),
        (["algo=dqn", "buffer.placement=cuda", "device=cpu"], ["buffer.placement=cuda"]),
        (["algo=dqn", "+algo.horizon=3"], ["algo.horizon is not a setting of algo=dqn"]),
        (["algo=dqn", "+algo.lr=3"], ["algo.lr is not a setting", "algo.learning_rate"]),
        (["algo=dqn", "algo.batch_size=0"], ["algo.batch_size=0", "greater than 0"]),
        (["algo.name=sac"], ["algo=sac is planned", "dqn"]),
        (["algo.name=dnq"], ["algo.name=dnq", "did you mean dqn"]),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(overrides, words):
    with pytest.raises(ConfigError) as error:
        settings(*overrides)
    for word in words:
        assert word in str(error.value)


def test_the_algorithm_chooses_its_buffer_and_the_command_line_wins():
    assert settings("algo=ppo").buffer.name == "rollout"
    assert settings("algo=dqn").buffer.name == "uniform"
    assert settings("algo=dqn", "buffer=prioritized").buffer.name == "prioritized"
    given = settings("algo=dqn", "buffer=prioritized", "buffer.capacity=200000", "total_steps=1e6")
    assert (given.buffer.capacity, given.buffer.alpha) == (200_000, 0.6)
