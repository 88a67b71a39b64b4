"""`auto` picks numbers that fit, and says why."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from conftest import settings

from rl_pipeline.config.auto import resolve
from rl_pipeline.errors import ConfigError
from rl_pipeline.run import facts


def pick(name, kind, cores, num_envs="auto", lanes=1, **algo):
    values = {
        "backend": {"name": name, "num_envs": num_envs, "lanes": lanes},
        "env": {"kind": kind},
        "algo": {"horizon": 128, "num_minibatches": 4} | algo,
    }
    resolved, chosen = resolve(values, (cores, "affinity"))
    assert values["backend"]["num_envs"] == num_envs, "the input is left alone"
    backend = resolved["backend"]
    return backend["num_envs"], backend["lanes"], chosen


@pytest.mark.parametrize(
    ("name", "kind", "two", "eight"),
    [
        ("envpool", "atari", 16, 64),
        ("envpool", "mujoco", 64, 256),
        ("envpool", "classic", 256, 256),
        ("gymnasium_native", "classic", 256, 256),
        ("gymnasium", "classic", 8, 8),
        ("gymnasium_async", "mujoco", 4, 16),
        ("envpool", "other", 16, 64),
    ],
)
def test_environments_by_task_backend_and_cores(name, kind, two, eight):
    assert pick(name, kind, 2)[0] == two
    assert pick(name, kind, 8)[0] == eight


def test_the_reason_names_the_number_and_the_limit():
    *_, chosen = pick("envpool", "atari", 3)
    assert chosen["backend.num_envs"].startswith("24 (auto: 8 per core")
    assert "3 cores by affinity" in chosen["backend.num_envs"]


def test_environments_divide_into_lanes_and_minibatches():
    assert pick("gymnasium_async", "other", 3, lanes=4)[0] == 8
    num, _, chosen = pick("gymnasium", "classic", 2, horizon=5, num_minibatches=12)
    assert num == 12 and "8 would not divide" in chosen["backend.num_envs"]
    assert pick("gymnasium", "classic", 2, horizon=6, num_minibatches=12)[0] == 8


def test_lanes():
    assert pick("envpool_async", "atari", 2, lanes="auto")[:2] == (16, 2)
    assert pick("envpool_async", "atari", 2, num_envs=9, lanes="auto")[1] == 3
    assert pick("gymnasium_async", "other", 1, num_envs=8, lanes="auto")[1] == 1
    assert pick("gymnasium_async", "other", 2, num_envs=8, lanes="auto")[1] == 2
    _, lanes, chosen = pick("envpool", "atari", 2, num_envs=8, lanes="auto")
    assert lanes == 1 and "waits" in chosen["backend.lanes"]


def test_the_command_line_wins_over_the_recipe_and_checks_see_the_number(monkeypatch):
    monkeypatch.setenv("RL_PIPELINE_CPUS", "1")
    assert settings("env=pong").backend.num_envs == 8
    auto = settings("env=pong", "backend.num_envs=auto", "backend=envpool_async",
                    "backend.lanes=auto", "algo.num_minibatches=48")  # fmt: skip
    assert (auto.backend.num_envs, auto.backend.lanes) == (12, 2)
    assert set(auto.chosen) == {"backend.num_envs", "backend.lanes"}
    assert settings("env=pong").chosen == {}
    with pytest.raises(ConfigError, match="backend=envpool_async needs backend.lanes of 2"):
        settings("backend=envpool_async", "backend.num_envs=1", "backend.lanes=auto")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("backend.lanes=many", "backend.lanes=many"),
        ("algo.horizon=x", "algo.horizon=x"),
        ("algo.num_minibatches=0", "algo.num_minibatches=0"),
    ],
)
def test_bad_values_beside_auto_are_still_named(override, words):
    with pytest.raises(ConfigError, match=words):
        settings("backend.num_envs=auto", override)


def test_auto_imports_nothing_heavy():
    heavy = "{'torch', 'numpy', 'hydra'}"
    code = f"import sys, rl_pipeline.config.auto; print({heavy} & sys.modules.keys())"
    out = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert out.stdout.strip() == "set()"


def test_what_was_asked_and_what_was_chosen_are_both_known():

    auto = settings("env=pong", "backend.num_envs=auto")
    assert facts.requested(auto)["num_envs"] == "auto"
    assert facts.requested(settings("env=pong"))["num_envs"] == 8


def test_a_resume_keeps_what_was_chosen(tmp_path):
    from rl_pipeline.config.resume import with_resumed_overrides

    record = {
        "run_id": "r1",
        "seed": 1,
        "overrides": ["env=pong", "backend.num_envs=auto"],
        "settings": {"backend": {"num_envs": 24, "lanes": 1}},
    }
    (tmp_path / "run.json").write_text(json.dumps(record))
    line = with_resumed_overrides([f"resume={tmp_path}", "total_steps=9"])
    assert line[:2] == ["env=pong", "backend.num_envs=24"]


@pytest.mark.slow
def test_a_run_records_what_was_asked_and_what_was_chosen_and_keeps_it_on_resume(cli):
    line = ("backend.num_envs=auto", "total_steps=300", "eval.episodes=0", "tracking=none",
            "backend=gymnasium_async", "backend.lanes=auto")  # fmt: skip
    out = cli(*line, env={"RL_PIPELINE_CPUS": "1"})
    assert out.returncode == 0, out.stderr
    (result,) = cli.results()
    assert (result["requested"]["num_envs"], result["requested"]["lanes"]) == ("auto", "auto")
    assert (result["effective"]["num_envs"], result["effective"]["lanes"]) == (2, 1)
    assert "two processes per core" in result["reasons"]["backend.num_envs"]
    assert "backend.num_envs: 2 (auto" in out.stdout + out.stderr
    (folder,) = cli.folders()
    out = cli(f"resume={folder}", "total_steps=600", env={"RL_PIPELINE_CPUS": "2"})
    assert out.returncode == 0, out.stderr
    result = json.loads((folder / "result.json").read_text())
    assert result["effective"]["num_envs"] == 2
    assert result["counters"]["env_steps"] >= 600
