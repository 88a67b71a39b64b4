"""Multiruns as studies: order, what is missing, jobs that die, launchers and sweepers of others."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import sqlite3
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import waiting
from conftest import Cli
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import OmegaConf

from rl_pipeline import machine
from rl_pipeline.comparison.groups import telling
from rl_pipeline.config import folders, resume
from rl_pipeline.config.origins import CONF
from rl_pipeline.errors import ConfigError
from rl_pipeline.study import grid, jobs
from rl_pipeline.study.callback import Study
from rl_pipeline.study.launcher import ProcessLauncher, interleaved

QUICK = ("debug=short", "tracking=none", "total_steps=300", "eval.episodes=0")


def test_interleaving_repeats_the_grid_seed_by_seed_in_an_order_of_its_own():
    grid = [[f"backend={b}", f"seed={s}"] for b in range(8) for s in (1, 2, 3)]
    orders = set()
    for _ in range(20):
        order = interleaved(grid)
        assert sorted(order) == list(range(24))
        seeds = [grid[i][1] for i in order]
        assert seeds == ["seed=1"] * 8 + ["seed=2"] * 8 + ["seed=3"] * 8
        rounds = [tuple(grid[i][0] for i in order[n : n + 8]) for n in (0, 8, 16)]
        orders.update(rounds)
    assert len(orders) > 30  # of 8! each


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["-m", "backend=gymnasium,envpool", "study.interleave=true"], "add seed=1,2,3"),
        (["study.interleave=true"], "study.interleave has no effect on a single run"),
        (["-m", "seed=1,2", "study.resume=nowhere"], "study.resume=nowhere: no such multirun"),
        (["-m", "seed=1,2", "study.baseline='backed=gymnasium'"], "did you mean backend"),
        (["-m", "seed=1,2", "study.baseline=a=b"], "quotes of its own: \"study.baseline='a=b'\""),
        (["-m", "seed=1,2", "study.baseline=gymnasium"], "give settings, e.g."),
        (["-m", "seed=1,2", "hydra.launcher.n_jobs=0"], "hydra.launcher.n_jobs=0 must be"),
        (["-m", "seed=1,2", "hydra.launcher.n_job=2"], "did you mean hydra.launcher.n_jobs"),
        (["-m", "seed=1,2", "study.interleave=true", "hydra.launcher.shuffle=true"],
         "hydra.launcher.shuffle has no effect"),
    ],
)  # fmt: skip
def test_what_a_sweep_cannot_do_is_refused_before_it_starts(cli, overrides, words):
    out = cli(*overrides, *QUICK)
    assert out.returncode == 2
    assert words in out.stderr
    assert not cli.folders()


def of_a_sweep(*overrides: str) -> tuple[list, list[str]]:
    """The settings of a sweep's jobs, and what varies."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        composed = hydra.compose_config("config", list(overrides), RunMode.MULTIRUN)
        return grid.sweep_settings(composed), grid.varied_keys(composed)


@pytest.mark.parametrize(
    ("overrides", "values"),
    [
        (["backend=glob(gymnasium_*)", "env=lunarlander"], ["gymnasium_async", "gymnasium_native"]),
        (["backend=glob(gymnasium*,exclude=*_*)"], ["gymnasium"]),
        (["backend=glob([gymnasium,envpool])"], ["envpool", "gymnasium"]),
        (["backend=choice(envpool,gymnasium)"], ["envpool", "gymnasium"]),
        (["seed=range(1,4)"], [1, 2, 3]),
        (["seed=sort(3,1,2)"], [1, 2, 3]),
        (["seed=sort(range(1,4),reverse=true)"], [3, 2, 1]),
        (["seed=tag(a,b,choice(4,5))"], [4, 5]),
        (["algo.gamma=range(0.5,0.75,0.1)"], [0.5, 0.6, 0.7]),
        (["network.hidden=[64],[32,32]"], [(64,), (32, 32)]),
        (["network.hidden=choice([64],[])"], [(64,), ()]),
        (["+env.kwargs={a:1},{a:2,b:[x]}", "env=gym", "env.id=X-v0"],
         [{"a": 1}, {"a": 2, "b": ["x"]}]),
        (["+env.kwargs.a='b,c','d=e'", "env=gym", "env.id=X-v0"], ["b,c", "d=e"]),
        (["total_steps=1e4,2e4"], [10_000, 20_000]),
        (["+hydra.sweeper.params.seed='1,2'", "total_steps=9000"], [1, 2]),
        (["+hydra.sweeper.params={seed:'range(1,3)',total_steps:9000}"], [1, 2]),
        (["+hydra.sweeper.params.backend='glob(gymnasium_*)'", "env=lunarlander"],
         ["gymnasium_async", "gymnasium_native"]),
        (["+hydra.sweeper.params.seed='1,2'", "seed=3,4"], [3, 4]),
    ],
)  # fmt: skip
def test_hydra_s_forms_of_a_sweep_are_understood(overrides, values):
    jobs_settings, (key,) = of_a_sweep(*overrides)
    found = [getattr_of(s, key) for s in jobs_settings]
    assert found == pytest.approx(values) if key == "algo.gamma" else found == values


def getattr_of(of: object, key: str) -> object:
    for part in key.split("."):
        of = of[part] if isinstance(of, dict) else getattr(of, part)
    return getattr(of, "name", of)


def test_a_shuffled_sweep_has_all_its_values():
    assert {s.seed for s in of_a_sweep("seed=shuffle(range(1,4))")[0]} == {1, 2, 3}


def test_a_preset_varies_what_it_sweeps_over_and_not_what_it_sets():
    preset = ("sweep=threads", "+hydra.sweeper.params.total_steps=9000", "seed=1")
    jobs_settings, varied = of_a_sweep(*preset)
    assert varied == ["backend.num_threads"]
    assert {(s.total_steps, s.seed) for s in jobs_settings} == {(9000, 1)}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algo.gamma=interval(0,1)"], "algo.gamma=choice(...)"),
        (["seed=glob(*)"], "nothing to sweep over"),
        (["backend=glob(nope*)"], "nothing to sweep over"),
        (["seed=range(3,1)"], "nothing to sweep over"),
        (["seed=range(1,3,0)"], "seed=range(1,3,0): range() arg 3"),
        (["seed=range(0,1000000000000)"], "more than 10,000 jobs"),
        (["seed=range(0,1000)", "total_steps=range(1,1000)"], "more than 10,000 jobs"),
        (["seed=1,2", "hydra.sweeper.max_batch_size=0"], "hydra.sweeper.max_batch_size=0"),
        (["seed=1,2", "env.kwargs={a:1},{a:2}"], "+env.kwargs="),
    ],
)
def test_a_sweep_without_jobs_or_with_too_many_is_refused_in_words(overrides, words):
    with pytest.raises(ConfigError) as error:
        of_a_sweep(*overrides)
    assert words in str(error.value)


@pytest.mark.slow
def test_a_sweep_over_options_and_lists_runs_and_is_resumed_by_the_printed_line(cli):
    line = ("-m", "backend=glob(gymnasium_*)", "network.hidden=[8]", "seed=range(1,3)",
            "study.interleave=true", "hydra.sweep.dir='a sweep, [1]=${seed}'",
            "backend.num_envs=2", "algo.horizon=64", *QUICK)  # fmt: skip
    out = cli(*line, "+env.kwargs.nonsense=1")
    assert out.returncode == 1, out.stderr
    printed = next(x for x in out.stderr.splitlines() if "study.resume=" in x)
    assert len(list(cli.cwd.glob("a sweep, [[]1]=None/[0-3]/output.log"))) == 4
    (log, *_) = cli.cwd.glob("a sweep*/0/output.log")
    command = shlex.split(log.read_text().splitlines()[0][2:])
    assert command[1:3] == ["-m", "rl_pipeline.train"] and "hydra.mode=RUN" in command
    out = cli(*shlex.split(printed)[3:], "~env.kwargs.nonsense")
    assert out.returncode == 0, out.stdout + out.stderr


def test_jobs_that_finished_are_known_by_their_overrides_and_the_others_put_aside(tmp_path):
    for number, status in enumerate(["finished", "failed", "finished"]):
        (tmp_path / str(number)).mkdir()
        result = {"status": status, "overrides": [f"seed={number}", "backend=envpool"]}
        (tmp_path / str(number) / "result.json").write_text(json.dumps(result))
    (tmp_path / "3").mkdir()  # killed before its first word
    done = folders.finished_jobs(tmp_path)
    assert set(done) == {frozenset([f"seed={n}", "backend=envpool"]) for n in (0, 2)}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1.failed", "2", "3.failed"]
    assert [folders.free_number(tmp_path, n, [1]) for n in (0, 1, 5)] == [3, 3, 5]
    assert set(folders.finished_jobs(tmp_path)) == set(done)


def test_a_sweep_that_launches_in_batches_knows_what_it_ran_itself(tmp_path, monkeypatch):
    """What failed a batch ago must not be put aside as of another session (Optuna launches so)."""
    for number, status in enumerate(["finished", "failed"]):
        (tmp_path / str(number)).mkdir()
        result = {"status": status, "overrides": [f"seed={number}"],
                  "returns": {"eval_mean": 7.0, "train_mean": None}}  # fmt: skip
        (tmp_path / str(number) / "result.json").write_text(json.dumps(result))
    ran = []

    def run(job, _):
        job.folder.mkdir()
        failed = {"status": "failed", "overrides": job.overrides}
        (job.folder / "result.json").write_text(json.dumps(failed))
        ran.append((job.overrides, job.number))
        return math.nan

    monkeypatch.setattr(jobs, "run", run)
    launcher = ProcessLauncher()
    launcher.config = OmegaConf.create(
        {"study": {"resume": "it", "interleave": False},
         "hydra": {"sweep": {"dir": str(tmp_path)}, "overrides": {"hydra": []},
                   "sweeper": {"_target_": "BasicSweeper"}}}
    )  # fmt: skip
    first = launcher.launch([["seed=0"], ["seed=1"]], 0)
    launcher.launch([["seed=2"], ["seed=3"]], 2)
    assert first[0].return_value == 7.0
    assert ran == [([f"seed={n}"], n) for n in (1, 2, 3)]
    assert {p.name for p in tmp_path.iterdir()} == {"0", "1", "1.failed", "2", "3"}


def test_views_group_by_what_tells_jobs_apart_and_by_nothing_twice():
    """`backend` alone tells these apart; `num_envs`, which follows from it, would add nothing."""
    jobs_of_a_sweep = [
        {"backend.name": b, "backend.num_envs": n, "precision.name": p}
        for b, n in (("gymnasium", "8"), ("envpool", "16"))
        for p in ("fp32", "bf16")
    ]
    assert telling(["backend.name", "backend.num_envs"], jobs_of_a_sweep, []) == ["backend.name"]
    keys = ["backend.num_envs", "backend.name", "precision.name"]
    assert telling(keys, jobs_of_a_sweep, []) == ["backend.num_envs", "precision.name"]
    assert telling(keys, jobs_of_a_sweep, ["precision.name"]) == ["backend.num_envs"]
    assert telling(keys, jobs_of_a_sweep[:1], []) == []


@pytest.mark.slow
def test_a_resumed_study_runs_only_what_is_missing_in_the_same_parent(cli):
    """One job of the first session fails for a reason that the second one does not have."""
    (cli.cwd / "theirs.py").write_text(
        "import os, gymnasium as gym\n"
        "class Env(gym.Wrapper):\n"
        "    def __init__(self, render_mode=None, size=1):\n"
        "        super().__init__(gym.make('CartPole-v1'))\n"
        "        if size == 2 and 'BROKEN' in os.environ: raise RuntimeError('not today')\n"
        "gym.register('Theirs-v0', entry_point='theirs:Env')\n"
    )
    line = ("env=gym", "env.id=theirs:Theirs-v0", "+env.kwargs.size=1,2", "seed=1",
            "debug=short", "total_steps=300", "eval.episodes=0", "study.name=mended")  # fmt: skip
    path = {"PYTHONPATH": os.pathsep.join([str(cli.cwd), os.environ.get("PYTHONPATH", "")])}
    out = cli("-m", *line, env={**path, "BROKEN": "1"})
    assert out.returncode == 1, out.stdout
    assert "not today" in out.stdout  # when it happened, and in the table
    assert "study.resume=multirun" in out.stderr
    (folder,) = (p.parent for p in (cli.cwd / "multirun").rglob("study.json"))
    first = json.loads((folder / "0" / "result.json").read_text())

    out = cli("study.resume=mended", env=path)
    assert out.returncode == 0, out.stdout + out.stderr
    assert "[1/2] done" in out.stdout and "[2/2] finished" in out.stdout
    assert json.loads((folder / "0" / "result.json").read_text()) == first
    assert (folder / "1.failed").is_dir()
    with sqlite3.connect(cli.cwd / "mlflow.db") as db:
        found = db.execute(
            "select r.status, p.value from runs r left join tags p on p.run_uuid = r.run_uuid"
            " and p.key = 'mlflow.parentRunId'"
        ).fetchall()
    # One parent for both sessions, now finished; a job that failed before it had a run has none.
    assert [status for status, parent in found if parent is None] == ["FINISHED"]
    assert len({parent for _, parent in found if parent}) == 1
    # Extended by a seed: the earlier jobs are known, the new ones find numbers of their own.
    out = cli("study.resume=mended", "seed=1,2", env=path)
    assert out.returncode == 0, out.stdout + out.stderr
    assert out.stdout.count(" done ") == 2 and out.stdout.count(" finished ") == 2
    assert len(list(folder.glob("[0-9]/result.json"))) == 4


def test_a_killed_job_is_told_with_its_signal(tmp_path, capsys, monkeypatch):
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    monkeypatch.setattr(jobs.Job, "command", [sys.executable, "-c", code])
    job = jobs.Job(["seed=1"], 0, tmp_path / "0", "[1/1]", [], environ=dict(os.environ))
    assert math.isnan(jobs.run(job))
    assert "killed by signal 9" in capsys.readouterr().out
    assert json.loads((tmp_path / "0" / "result.json").read_text())["overrides"] == ["seed=1"]


def test_a_job_that_was_stopped_has_not_failed_by_itself(tmp_path, capsys, monkeypatch):
    record = {"status": "killed", "reason": "SIGTERM"}
    path = tmp_path / "0" / "result.json"
    code = f"import sys; open({str(path)!r}, 'w').write({json.dumps(record)!r}); sys.exit(143)"
    monkeypatch.setattr(jobs.Job, "command", [sys.executable, "-c", code])
    job = jobs.Job(["seed=1"], 0, tmp_path / "0", "[1/1]", [], environ=dict(os.environ))
    assert math.isnan(jobs.run(job))
    out = capsys.readouterr().out
    assert "[1/1] stopped   seed=1\n    SIGTERM" in out and "FAILED" not in out


def test_a_job_that_finished_counts_although_its_process_ended_badly(tmp_path, capsys, monkeypatch):
    """Its record is whole; study.resume would not run it again either."""
    result = {"status": "finished", "throughput": {"env_steps_per_s": 5.0},
              "returns": {"eval_mean": 3.0, "train_mean": None}}  # fmt: skip
    code = f"import sys; open('result.json', 'w').write({json.dumps(result)!r}); sys.exit(9)"
    folder = tmp_path / "0"
    code = f"import os; os.chdir({str(folder)!r}); {code}"
    monkeypatch.setattr(jobs.Job, "command", [sys.executable, "-c", code])
    job = jobs.Job(["seed=1"], 0, folder, "[1/1]", [], environ=dict(os.environ))
    assert jobs.run(job) == 3.0
    out = capsys.readouterr().out
    assert "finished  seed=1" in out and "ended badly: exit code 9" in out and "FAILED" not in out


def test_what_goes_wrong_at_the_end_of_a_sweep_fails_it(monkeypatch, capsys):
    """Hydra would turn it into a warning and the exit code into 0."""
    ends: list[str] = []
    study = Study()
    monkeypatch.setattr(study, "_end", lambda status: ends.append(status))
    with pytest.raises(SystemExit) as stopped:
        study.on_multirun_end(None)  # no configuration: an error of any kind
    assert stopped.value.code == 1 and ends == ["failed"]
    assert "Traceback" in capsys.readouterr().err


def test_a_sweep_that_still_runs_is_not_resumed(cli):
    folder = cli.cwd / "multirun" / "a"
    folder.mkdir(parents=True)
    study = {"name": "n", "overrides": ["seed=1,2"], "process": machine.myself()}
    (folder / "study.json").write_text(json.dumps(study))
    out = cli("study.resume=n", *QUICK)
    assert out.returncode == 2 and "its sweep still runs" in out.stderr


def long_sweep(cli: Cli, until: str) -> subprocess.Popen[str]:
    """A sweep that would take a day, once there is a file `until`."""
    sweep = cli.start("-m", "seed=1,2", "total_steps=1e9")
    waiting.until(lambda: list(cli.cwd.glob(f"multirun/*/*/{until}")), 90, until)
    return sweep


@pytest.mark.slow
def test_an_interrupted_sweep_says_how_to_go_on(cli):
    sweep = long_sweep(cli, "0/metrics.jsonl")
    sweep.send_signal(signal.SIGINT)
    out, err = waiting.finish(sweep)
    assert sweep.returncode == 130
    assert "[1/2] stopped " in out and "[2/2]" not in out
    (folder,) = (p.parent for p in (cli.cwd / "multirun").rglob("study.json"))
    assert "stopped by SIGINT\nrun what is missing with" in err
    assert f"study.resume={folder.relative_to(cli.cwd)}" in err


@pytest.mark.slow
def test_a_killed_sweep_is_marked_by_the_next_one(cli):
    sweep = long_sweep(cli, "0/output.log")
    sweep.send_signal(signal.SIGKILL)
    sweep.communicate()
    assert cli("-m", "seed=1", "debug=short", "total_steps=300", "eval.episodes=0").returncode == 0
    with sqlite3.connect(cli.cwd / "mlflow.db") as db:
        parents = db.execute(
            "select r.status from runs r join tags t on t.run_uuid = r.run_uuid"
            " where t.key = 'kind' order by r.start_time"
        ).fetchall()
    assert parents == [("KILLED",), ("FINISHED",)]


def test_a_sweep_is_resumed_with_its_own_overrides_and_those_of_now_win(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("multirun/a")
    folder.mkdir(parents=True)
    saved = {"name": "n", "overrides": ["backend=a,b", "seed=1", "study.resume=old"]}
    (folder / "study.json").write_text(json.dumps(saved))
    found = resume.with_resumed_sweep(["study.resume=n", "seed=1,2"])
    assert found == ["-m", "backend=a,b", "study.resume=n", "seed=1,2",
                     "hydra.sweep.dir=multirun/a"]  # fmt: skip
    assert resume.with_resumed_sweep(["seed=1"]) == ["seed=1"]
    for name in ("mine", "other"):
        Path(name).mkdir()
    mine = str(Path("mine").absolute())
    saved["composed_from"] = {"working_directory": "/", "search_path": [], "config_dir": mine}
    (folder / "study.json").write_text(json.dumps(saved))
    line = resume.with_resumed_sweep(["study.resume=n"])
    assert line[:2] == ["-m", f"--config-dir={mine}"]
    line = resume.with_resumed_sweep(["--config-dir", "other", "study.resume=n"])
    assert line[:3] == ["-m", "--config-dir", "other"]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra `cluster`")
@pytest.mark.skipif(
    find_spec("hydra_plugins.hydra_ray_launcher") is None, reason="needs hydra-ray-launcher"
)
def test_jobs_on_ray_have_their_share_and_a_bad_one_stays_alone(tmp_path):
    cli = Cli(tmp_path)
    out = cli(
        "-m", "hydra/launcher=ray", "+hydra.launcher.ray.remote.num_cpus=1",
        "algo.learning_rate=1e-3,1e30", "backend=envpool,gymnasium", "seed=1", "debug=short",
        "total_steps=600", "eval.episodes=0",
    )  # fmt: skip
    assert out.returncode == 1, out.stdout + out.stderr
    assert "2 of 4 jobs did not finish" in out.stderr
    results = cli.results()
    assert sorted(r["status"] for r in results) == ["failed", "failed", "finished", "finished"]
    assert {r["effective"]["threads"]["budget"] for r in results} == {1}
    with sqlite3.connect(tmp_path / "mlflow.db") as db:
        parents = db.execute("select value from tags where key = 'mlflow.parentRunId'").fetchall()
    assert len(parents) == 4 and len(set(parents)) == 1


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("hydra_plugins.hydra_optuna_sweeper") is None, reason="needs the extra `sweep`"
)
def test_optuna_maximises_the_return_and_passes_over_a_job_that_failed(tmp_path):
    cli = Cli(tmp_path)
    line = ("-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=1",
            "hydra.sweeper.max_failure_rate=1.0", "algo.learning_rate=choice(1e-3,1e30)",
            "seed=1", *QUICK[:3])  # fmt: skip
    out = cli(*line, "hydra.sweeper.sampler.seed=1", "hydra.sweeper.direction=maximize")
    assert "Traceback" not in out.stderr, out.stderr
    statuses = [r["status"] for r in cli.results()]
    assert len(statuses) == 4 and set(statuses) == {"finished", "failed"}
    (best,) = tmp_path.rglob("optimization_results.yaml")
    assert "algo.learning_rate: 0.001" in best.read_text()
    out = cli(*line, "hydra.sweeper.direction=minimize")
    assert out.returncode == 2 and "use hydra.sweeper.direction=maximize" in out.stderr
