"""The door end to end: a real store, real environments, real processes."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from conftest import Cli
from waiting import finish, until

from rl_pipeline.run.evaluation import evaluate
from rl_pipeline.run.result import Result
from rl_pipeline.types import Discrete, EnvSpec, Episode, Step

HERE = Path(__file__).parent
SHORT = ("debug=short", "tracking=none", "total_steps=1500")


def query(cli: Cli, sql: str) -> list[tuple]:
    # Read only: to look must not make a store.
    with sqlite3.connect(f"file:{cli.cwd / 'mlflow.db'}?mode=ro", uri=True) as db:
        return db.execute(sql).fetchall()


def weights(folder: Path) -> torch.Tensor:
    last = max((folder / "checkpoints").glob("step-*.pt"))
    return torch.load(last, weights_only=True)["learner"]["params"]


def test_a_run_leaves_a_complete_record(cli):
    out = cli("debug=short", "total_steps=3000", "seed=1", "eval.every_steps=1500")
    assert out.returncode == 0, out.stderr
    (result,) = cli.results()
    (folder,) = cli.folders()
    assert Result.model_validate(result).model_dump(exclude_unset=True) == result
    counters = result["counters"]
    assert result["status"] == "finished"
    assert counters["env_steps"] >= 3000
    assert counters["frames"] == counters["env_steps"]
    assert counters["updates"] >= 3000 // 256 * 5  # target_kl may end epochs
    assert counters["episodes"] > 0
    assert result["returns"]["episodes"] == 4
    assert result["throughput"]["env_steps_per_s"] > 0
    assert result["effective"]["device"] in ("cpu", "cuda")
    assert result["requested"]["device"] == "auto"
    assert {"act", "env", "store", "learn", "other"} <= result["phases"].keys()
    assert sum(p["share"] for p in result["phases"].values()) == pytest.approx(1, abs=0.02)
    assert result["bottleneck"]["upper_bound_speedup"] > 1
    assert result["startup"]["until_first_step_s"] > 0
    assert result["provenance"]["versions"]["torch"]
    # The command works in a directory of its own; the commit is that of the code.
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE)
    assert result["provenance"]["git"] == (head.stdout.strip() or None)
    assert (folder / ".hydra" / "config.yaml").exists()
    assert "gpu/util_pct" not in (folder / "metrics.jsonl").read_text()
    assert "not named: most of so short a run is its beginning" in out.stdout
    for word in ("return", "env steps/s", "bottleneck", "folder", "mlflow ui"):
        assert word in out.stdout

    # The store holds the same run: params, metrics on the env-step axis, a true status.
    ((status, name),) = query(cli, "select status, name from runs")
    assert status == "FINISHED"
    assert name.startswith("cartpole ppo envpool s1 r")
    params = dict(query(cli, "select key, value from params"))
    assert params["algo.learning_rate"] == "0.001"
    assert params["seed"] == "1"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    logged = {(k, r["step"]) for r in rows for k in r["metrics"]}
    every = query(cli, "select key, step, value from metrics where key not like 'system/%'")
    assert logged == {(key, step) for key, step, _ in every if not key.startswith("result/")}
    # What the run came to, as columns of the list of runs; its best weights, as an artifact.
    final = {key: value for key, _, value in every if key.startswith("result/")}
    assert final["result/eval_mean"] == result["returns"]["eval_mean"]
    assert final["result/env_steps_per_s"] == result["throughput"]["env_steps_per_s"]
    assert list((cli.cwd / "mlartifacts").rglob("model/best.pt"))
    evals = [r["step"] for r in rows if "return/eval" in r["metrics"]]
    assert len(evals) == 2
    assert 1500 <= evals[0] < 2000
    # The best checkpoint holds the weights that were evaluated, not later ones.
    best = torch.load(folder / "checkpoints" / "best.pt", weights_only=True)
    top = max(r["metrics"]["return/eval"] for r in rows if "return/eval" in r["metrics"])
    assert best["score"] == top
    assert best["counters"]["env_steps"] in [
        r["step"] for r in rows if r["metrics"].get("return/eval") == top
    ]
    artifacts = {p.name for p in (cli.cwd / "mlartifacts").rglob("*") if p.is_file()}
    assert {"config.yaml", "result.json", "metrics.jsonl"} <= artifacts
    assert not (cli.cwd / "mlruns").exists()


def test_a_resumed_run_equals_an_uninterrupted_one(cli):
    """Gymnasium on the CPU: weights, counters and episodes go on exactly."""
    line = ("backend=gymnasium", "seed=5", "eval.episodes=0", "algo.anneal_lr=false", *SHORT)
    assert cli(*line, "total_steps=2000").returncode == 0
    (straight,) = cli.folders()
    assert cli(*line, "total_steps=1000").returncode == 0
    (cut,) = set(cli.folders()) - {straight}
    run_id = json.loads((cut / "run.json").read_text())["run_id"]
    assert run_id.startswith("r")
    out = cli(f"resume={run_id}", "total_steps=2000")
    assert out.returncode == 0, out.stderr
    # What the resume changed is part of the run from now on.
    assert "total_steps=2000" in json.loads((cut / "run.json").read_text())["overrides"]
    assert torch.equal(weights(straight), weights(cut))
    first, second = (json.loads((f / "result.json").read_text()) for f in (straight, cut))
    assert first["counters"] == second["counters"]
    assert first["counters"]["updates"] > 0
    assert second["provenance"]["resume_command"].endswith(f"total_steps=2000 resume={run_id}")
    assert "resume_command" not in first["provenance"]
    assert second["resume"] == {"from_env_steps": pytest.approx(1000, abs=300), "exact": True}
    assert first["returns"]["train_mean"] == second["returns"]["train_mean"]


@pytest.mark.slow
def test_a_run_resumed_from_elsewhere_stays_in_its_store(cli):
    home, elsewhere = Cli(cli.cwd / "home"), Cli(cli.cwd / "elsewhere")
    for place in (home, elsewhere):
        place.cwd.mkdir()
    line = ("debug=short", "seed=1", "eval.episodes=0")
    assert home(*line, "total_steps=600").returncode == 0
    (folder,) = home.folders()
    out = elsewhere(f"resume={folder}", "total_steps=1200")
    assert out.returncode == 0, out.stderr
    assert not (elsewhere.cwd / "mlflow.db").exists()
    assert query(home, "select status from runs") == [("FINISHED",)]
    ((last,),) = query(home, "select max(step) from metrics where key = 'count/updates'")
    assert last >= 1200


def test_resume_refuses_what_would_be_another_run(cli):
    assert cli(*SHORT, "seed=1", "total_steps=500").returncode == 0
    (folder,) = cli.folders()
    before = weights(folder)
    out = cli(f"resume={folder}", "algo.gamma=0.5")
    assert out.returncode == 2
    assert "algo.gamma from 0.98 to 0.5" in out.stderr
    config_file = folder / ".hydra" / "config.yaml"
    assert "gamma: 0.98" in config_file.read_text()
    out = cli(f"resume={folder}")
    assert out.returncode == 2
    assert "the run has finished" in out.stderr
    assert "total_steps" in out.stderr
    for line in (["-m", f"resume={folder}"], [f"resume={folder}", "hydra.run.dir=elsewhere"]):
        out = cli(*line, "total_steps=900")
        assert out.returncode == 2
        assert "Traceback" not in out.stderr
    assert cli("--cfg", "job", f"resume={folder}").returncode == 0
    out = cli(f"hydra.run.dir={folder}", *SHORT)
    assert out.returncode == 2
    assert "already holds a run" in out.stderr
    out = cli("resume=nowhere")
    assert out.returncode == 2
    assert "resume=nowhere" in out.stderr
    assert torch.equal(before, weights(folder))
    assert cli.results()[0]["status"] == "finished"


def test_ctrl_c_saves_and_says_how_to_go_on_in_the_same_mlflow_run(cli):
    process = cli.training(
        "seed=1", "eval.episodes=0", "log_every_s=0.2", "total_steps=1e7", "tracking.flush_s=0.5"
    )
    process.send_signal(signal.SIGINT)
    _, err = finish(process)
    assert process.returncode == 130
    (folder,) = cli.folders()
    assert f"resume={folder.relative_to(cli.cwd)}" in err or f"resume={folder}" in err
    (result,) = cli.results()
    assert (result["status"], result["reason"]) == ("killed", "SIGINT")
    # A stopped run does not wait for its tracker, which goes on alone.
    until(lambda: not cli.brood.alive(), 60, "the end of the tracker")
    assert query(cli, "select status from runs") == [("KILLED",)]
    done = result["counters"]["env_steps"]
    out = cli(f"resume={folder}", f"total_steps={done + 1000}")
    assert out.returncode == 0, out.stderr
    assert f"resumed at {done:,} env steps" in out.stdout + out.stderr
    assert query(cli, "select status from runs") == [("FINISHED",)]
    assert cli.results()[0]["counters"]["env_steps"] >= done + 1000
    twice = query(cli, "select key, step from metrics group by key, step having count(*) > 1")
    assert not [row for row in twice if not row[0].startswith("system/")]


def test_an_error_in_the_loop_is_a_failed_run_everywhere(cli):
    out = cli("debug=short", "seed=1", "algo.learning_rate=1e30")
    assert out.returncode == 1
    assert "FloatingPointError" in out.stderr
    (result,) = cli.results()
    assert result["status"] == "failed"
    assert "algo.learning_rate" in result["reason"]
    assert query(cli, "select status from runs") == [("FAILED",)]


def test_a_multirun_is_a_parent_with_named_children_and_one_bad_job_stays_alone(cli):
    out = cli(
        "-m", "backend=gymnasium,envpool", "algo.learning_rate=1e-3,1e30", "seed=1",
        "debug=short", "total_steps=1000", "hydra.launcher.n_jobs=2",
    )  # fmt: skip
    assert out.returncode == 1
    runs = query(cli, "select run_uuid, name, status from runs")
    parents = dict(query(cli, "select run_uuid, value from tags where key='mlflow.parentRunId'"))
    (parent,) = [r for r in runs if r[0] not in parents]
    children = [r for r in runs if r[0] in parents]
    assert set(parents.values()) == {parent[0]}
    assert parent[2] == "FAILED"
    assert len({c[1] for c in children}) == 4
    assert sorted(c[2] for c in children) == ["FAILED", "FAILED", "FINISHED", "FINISHED"]
    assert "backend=envpool algo.learning_rate=0.001" in {c[1] for c in children}
    assert "FAILED" in out.stdout
    assert "FloatingPointError" in out.stdout
    assert "speed-up" in out.stdout
    assert "too short" in out.stdout
    assert "2 of 4 jobs did not finish" in out.stderr
    assert f"again   python -m rl_pipeline.compare study={parent[0]}" in out.stdout
    results = cli.results()
    assert len(results) == 4
    # Two jobs at once share the machine.
    budgets = {r["effective"]["threads"]["budget"] for r in results}
    assert budgets == {max(1, len(os.sched_getaffinity(0)) // 2)}
    (table,) = (cli.cwd / "multirun").rglob("comparison/table.md")
    assert table.read_text().count("\n| backend=") == 4
    assert list((cli.cwd / "mlartifacts").rglob("comparison/index.html"))


def test_a_sweep_that_is_told_to_end_takes_its_jobs_along(cli):
    sweep = cli.training("-m", "seed=1,2", "total_steps=1e9", "tracking.flush_s=0.5")
    sweep.terminate()
    _, err = finish(sweep)
    assert sweep.returncode == 143
    assert "Traceback" not in err
    assert "study.resume=multirun" in err
    assert [r["status"] for r in cli.results()] == ["killed"]
    until(lambda: not cli.brood.alive(), 60, "the end of the trackers")
    assert set(query(cli, "select status from runs")) == {("KILLED",)}


@pytest.mark.slow
def test_a_sweep_folder_is_used_once(cli):
    line = ("-m", "seed=1", *SHORT, "total_steps=300", "eval.episodes=0", "hydra.sweep.dir=s")
    assert cli(*line).returncode == 0
    out = cli(*line)
    assert out.returncode == 2
    assert "hydra.sweep.dir=s already holds" in out.stderr
    assert len(cli.folders()) == 1


@pytest.mark.slow
def test_a_sweep_passes_on_where_its_options_live(cli):
    (cli.cwd / "more" / "experiment").mkdir(parents=True)
    (cli.cwd / "more" / "experiment" / "far.yaml").write_text(
        "# @package _global_\nalgo:\n  gamma: 0.5\n"
    )
    out = cli(
        "--config-dir", "more", "-m", "experiment=far", "seed=1", *SHORT, "total_steps=300",
        "eval.episodes=0",
    )  # fmt: skip
    assert out.returncode == 0, out.stderr + out.stdout
    (folder,) = cli.folders()
    assert json.loads((folder / "run.json").read_text())["settings"]["algo"]["gamma"] == 0.5


def test_an_environment_s_own_error_keeps_its_traceback_and_leaves_a_result(cli):
    (cli.cwd / "theirs.py").write_text(
        "import gymnasium as gym, numpy as np\n"
        "class Env(gym.Env):\n"
        "    observation_space = gym.spaces.Box(-1, 1, (3,), np.int64)\n"
        "    action_space = gym.spaces.Discrete(2)\n"
        "    def __init__(self, how='close'):\n"
        "        self.how = how\n"
        "        if how == 'init': a, b = (1, 2, 3)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        return np.zeros(3, np.int64), {}\n"
        "    def step(self, action):\n"
        "        return np.zeros(3, np.int64), 1.0, False, False, {}\n"
        "    def close(self):\n"
        "        raise OSError('the simulator was gone')\n"
        "gym.register('Env-v0', Env)\n"
    )
    line = ("env=gym", "env.id=theirs:Env-v0", "tracking=none", "total_steps=500")
    out = cli(*line, "+env.kwargs.how=init", "eval.episodes=0")
    assert out.returncode == 1
    assert "theirs.py" in out.stderr
    # Integer observations train; a close that fails is told and is no error of the work.
    out = cli(*line, "eval.episodes=0")
    assert out.returncode == 0
    assert "the simulator was gone" in out.stderr
    (result,) = cli.results()
    assert result["counters"]["updates"] > 0


def test_a_job_that_hangs_is_stopped_and_reported(cli):
    out = cli("-m", "seed=1", *SHORT, "total_steps=1e8", "hydra.launcher.timeout_s=8")
    assert out.returncode == 1
    assert "hydra.launcher.timeout_s=8" in out.stdout
    (result,) = cli.results()
    assert (result["status"], result["reason"]) == ("killed", "SIGTERM")
    alive = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"]]
    assert not [words for words in alive if any(result["folder"] in word for word in words)]


def test_pixels_train_on_the_real_game(cli):
    out = cli(
        "env=pong", "total_steps=300", "backend.num_envs=4", "algo.horizon=32", "seed=1",
        "eval.episodes=0", "tracking=none", "algo.num_epochs=1",
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    (result,) = cli.results()
    assert result["counters"]["frames"] == 4 * result["counters"]["env_steps"]
    assert result["counters"]["updates"] == 3 * 4
    rows = [json.loads(x) for p in cli.cwd.rglob("metrics.jsonl") for x in p.open()]
    assert all(np.isfinite(r["metrics"]["loss/total"]) for r in rows)
    assert any(r["metrics"]["loss/approx_kl"] > 0 for r in rows), "an update moves the policy"


@pytest.mark.slow
def test_the_wall_clock_ends_a_run_and_an_unmeasured_one_has_no_phases(cli):
    out = cli("tracking=none", "profile=none", "max_wall_s=1", "total_steps=1e9", "eval.episodes=0")
    assert out.returncode == 0, out.stderr
    (result,) = cli.results()
    assert result["status"] == "finished"
    assert result["reason"] == "max_wall_s=1 reached"
    assert 0 < result["counters"]["env_steps"] < 1e9
    assert result["throughput"]["wall_s"] < 30
    assert "phases" not in result
    assert "bottleneck" not in result


def test_two_runs_started_together_have_two_folders(cli):
    line = [sys.executable, "-m", "rl_pipeline.train", *SHORT, "total_steps=300", "eval.episodes=0"]
    both = [
        subprocess.Popen(line, cwd=cli.cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(2)
    ]
    assert [p.wait(60) for p in both] == [0, 0]
    seeds = {r["seed"] for r in cli.results()}
    assert len(cli.folders()) == len(seeds) == 2


class Scripted:
    """Environment i plays games of length i + 1 with score 10 * i, for ever."""

    def __init__(self, num_envs: int) -> None:
        action = Discrete(2)
        self.spec = EnvSpec("s", "s", num_envs, (1,), np.dtype(np.float32), action)
        self.games: list[Episode] = []

    def reset(self):
        self.age = np.zeros(self.spec.num_envs, int)
        return np.zeros((self.spec.num_envs, 1), np.float32)

    def step(self, action):
        n = self.spec.num_envs
        valid = self.age >= 0
        self.age += 1
        end = self.age == np.arange(n) + 1
        reward = np.where(end, 10.0 * np.arange(n), 0).astype(np.float32)
        self.games += [Episode(i, 10.0 * i, 0.0, i + 1) for i in np.flatnonzero(end)]
        self.age[end] = -1
        obs, ids = np.zeros((n, 1), np.float32), np.arange(n, dtype=np.int32)
        return Step(obs, reward, reward, end, np.zeros(n, bool), valid, ids)

    def pop_episodes(self):
        games, self.games = self.games, []
        return games


def test_evaluation_gives_every_environment_its_share():
    scores = evaluate(Scripted(3), lambda obs: np.zeros(3, int), 7, 1000)
    # Taking the first seven to finish would favour the short games of environment 0.
    assert sorted(scores) == [0, 0, 0, 10, 10, 20, 20]


def test_evaluation_cuts_endless_games_and_repeats_no_score():
    # Environment 2 needs three steps for a game: its share of two is cut to one piece.
    scores = evaluate(Scripted(3), lambda obs: np.zeros(3, int), 6, 2)
    assert sorted(scores) == [0, 0, 0, 10, 10]


def test_evaluation_stops_when_told():
    assert evaluate(Scripted(3), lambda obs: np.zeros(3, int), 6, 99, lambda: True) is None
