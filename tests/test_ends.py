"""How a run ends, and what it leaves: true exit codes, one owner per folder, nothing lost."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import Cli
from waiting import finish, until

from rl_pipeline.files import Claim
from rl_pipeline.run.session import Evaluation

slow = pytest.mark.slow


def first(*cases: object) -> list:
    """Cases of a test: the first always, the others with the slow ones."""
    return [cases[0], *(pytest.param(case, marks=slow) for case in cases[1:])]


QUICK = ("tracking=none", "log_every_s=0.2", "seed=1", "eval.every_steps=0", "eval.episodes=2")
ENDLESS = (*QUICK, "total_steps=1e9")

THEIRS = """
import os, sys, time
import gymnasium as gym, numpy as np

class Env(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (3,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, how=""):
        self.how, self.steps = how, 0
        if how == "dict":
            self.observation_space = gym.spaces.Dict({"a": gym.spaces.Box(-1, 1, (3,))})
        if how == "exit at once":
            sys.exit(0)
        if how == "swallow" and not os.path.exists("inside"):
            open("inside", "w").close()
            try:
                time.sleep(600)
            except BaseException:
                pass

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.how == "chdir":
            os.chdir("/")
        if self.how == "exit" and self.steps == 9:
            sys.exit(0)
        return np.zeros(3, np.float32), 1.0, False, self.steps >= 20, {}

    def close(self):
        if self.how == "close":
            raise OSError("the simulator was gone")

gym.register("Env-v0", Env)
"""


@pytest.fixture
def theirs(cli: Cli) -> Cli:
    (cli.cwd / "theirs.py").write_text(THEIRS)
    return cli


def their(how: str) -> tuple[str, ...]:
    return ("env=gym", "env.id=theirs:Env-v0", f"+env.kwargs.how={how}", *QUICK)


def result(cli: Cli) -> dict:
    (found,) = cli.results()
    return found


# -- owning the folder ----------------------------------------------------------------------------


def test_a_run_neither_deletes_nor_overwrites_what_it_did_not_make(theirs):
    mine = ["a/replay/x", "b/.hydra/config.yaml", "c/checkpoints/x", "d/result.json"]
    for file in map(theirs.cwd.joinpath, mine):
        file.parent.mkdir(parents=True)
        file.write_text("mine")
        place = file.relative_to(theirs.cwd).parts[0]
        out = theirs(*their("dict"), f"hydra.run.dir={place}", "total_steps=300")
        assert out.returncode == 2, out.stderr
        assert "hydra.run.dir" in out.stderr
        assert [p for p in (theirs.cwd / place).rglob("*") if p.is_file()] == [file]
        assert file.read_text() == "mine"


def test_a_refusal_leaves_nothing_and_keeps_what_lay_beside(theirs):
    out = theirs(*their("dict"), "total_steps=300")
    assert out.returncode == 2
    assert "flatten_obs" in out.stderr
    assert sorted(p.name for p in theirs.cwd.iterdir() if p.name != "__pycache__") == ["theirs.py"]
    kept = theirs.cwd / "mine" / "notes.txt"
    kept.parent.mkdir()
    kept.write_text("mine")
    assert theirs(*their("dict"), "hydra.run.dir=mine/deep/run").returncode == 2
    assert theirs(*their("dict"), "hydra.run.dir=mine").returncode == 2
    assert [p.name for p in kept.parent.iterdir()] == ["notes.txt"]


def test_a_refused_resume_takes_nothing_that_the_tracker_wrote_meanwhile(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    claim = Claim(tmp_path)
    (tmp_path / "mlflow.json").write_text("{}")
    claim.release()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mlflow.json", "run.json"]


def test_a_run_folder_has_one_trainer(cli):
    first = cli.training(*ENDLESS, "hydra.run.dir=here")
    pid = str(first.pid)
    for line in (["resume=here"], [*QUICK, "hydra.run.dir=here"]):
        out = cli(*line)
        assert out.returncode == 2
        assert pid in out.stderr
    before = (cli.cwd / "here" / ".hydra" / "overrides.yaml").read_text()
    assert "total_steps" in before
    first.send_signal(signal.SIGTERM)
    finish(first)
    assert first.returncode == 143
    steps = [json.loads(x)["step"] for x in (cli.cwd / "here" / "metrics.jsonl").open()]
    assert steps == sorted(set(steps))
    assert not list((cli.cwd / "here").rglob("*.tmp")) + list((cli.cwd / "here").glob(".room"))


# -- signals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", first("SIGHUP", "SIGTERM", "SIGINT"))
def test_a_signal_saves_and_the_exit_code_says_which(cli, name):
    process = cli.training(*ENDLESS)
    process.send_signal(signal.Signals[name])
    _, err = finish(process)
    assert process.returncode == 128 + signal.Signals[name]
    assert (result(cli)["status"], result(cli)["reason"]) == ("killed", name)
    line = next(x for x in err.splitlines() if "resume=" in x)
    assert "Traceback" not in err
    again = shlex.split(line)[3:]
    done = result(cli)["counters"]["env_steps"]
    out = cli(*again, f"total_steps={done + 500}")
    assert out.returncode == 0, out.stderr


def test_a_signal_whose_exception_is_swallowed_is_not_lost(theirs):
    process = theirs.start(*their("swallow"), "total_steps=1e9", "backend.num_envs=1")
    until((theirs.cwd / "inside").exists, what="the constructor")
    process.send_signal(signal.SIGTERM)
    finish(process)
    assert process.returncode == 143
    assert (result(theirs)["status"], result(theirs)["reason"]) == ("killed", "SIGTERM")


def test_an_ignored_signal_stays_ignored(cli):
    def ignore() -> None:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)

    process = cli.training(*QUICK, "total_steps=30_000", preexec_fn=ignore)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
    _, err = finish(process)
    assert process.returncode == 0, err
    assert result(cli)["counters"]["env_steps"] >= 30_000


@pytest.mark.slow
def test_a_run_stopped_in_its_last_evaluation_is_finished_by_resume(cli):
    long = ("eval.episodes=100000", "eval.num_envs=1", "eval.max_steps=1000000")
    process = cli.start(*QUICK, "total_steps=512", *long)
    until(lambda: list(cli.cwd.rglob("step-*.pt")), what="the last checkpoint")
    process.send_signal(signal.SIGINT)
    _, err = finish(process)
    assert process.returncode == 130
    line = next(x for x in err.splitlines() if "resume=" in x)
    out = cli(*shlex.split(line)[3:], "eval.episodes=3")
    assert out.returncode == 0, out.stderr
    found = result(cli)
    assert found["status"] == "finished"
    assert found["returns"]["episodes"] == 3
    assert found["counters"]["updates"] > 0
    out = cli(*shlex.split(line)[3:])
    assert out.returncode == 2
    assert "has finished" in out.stderr


# -- showing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("lines", first(1, 0, 9))
def test_a_reader_that_goes_away_ends_nothing(cli, lines):
    read, write = os.pipe()
    process = cli.start(*QUICK, "total_steps=3000", stdout=write, stderr=write)
    os.close(write)
    with open(read) as reader:
        for _ in range(lines):
            reader.readline()
    process.wait(120)
    assert process.returncode == 0
    assert result(cli)["status"] == "finished"


@pytest.mark.parametrize("closing", first(">&- 2>&- <&-", ">&-", "2>&-", ">/dev/full 2>/dev/full"))
def test_closed_and_full_outputs_end_nothing(cli, closing):
    line = shlex.join([sys.executable, "-m", "rl_pipeline.train", *QUICK, "total_steps=600"])
    process = subprocess.Popen(
        ["sh", "-c", f"{line} {closing}"], cwd=cli.cwd, env=cli.brood.environ
    )
    process.wait(120)
    assert process.returncode == 0
    assert result(cli)["status"] == "finished"
    for row in (cli.folders()[0] / "metrics.jsonl").read_text().splitlines():
        json.loads(row)


# -- what others raise ----------------------------------------------------------------------------


def test_a_close_that_raises_is_told_and_nothing_more(theirs):
    out = theirs(*their("close"), "total_steps=900", "eval.every_steps=300")
    assert out.returncode == 0, out.stderr
    assert "the simulator was gone" in out.stderr
    found = result(theirs)
    assert found["status"] == "finished"
    assert found["counters"]["env_steps"] >= 900
    assert "run         ppo on theirs:Env-v0" in out.stdout


@pytest.mark.parametrize("how", ["exit", "exit at once"])
def test_only_a_finished_run_exits_with_0(theirs, how):
    out = theirs(*their(how), "total_steps=900")
    assert out.returncode == 1
    assert "sys.exit(0)" in out.stderr
    if how == "exit":
        assert result(theirs)["status"] == "failed"
    else:
        assert not list(theirs.cwd.rglob("outputs"))


def test_an_environment_that_changes_directory_moves_nothing(theirs):
    tracked = [x for x in their("chdir") if x != "tracking=none"]
    out = theirs(*tracked, "total_steps=600", "tracking.flush_s=1")
    assert out.returncode == 0, out.stderr
    assert (theirs.cwd / "mlflow.db").exists()
    assert "make ui" in out.stdout
    assert "folder      outputs/" in out.stdout


@slow
def test_hydra_may_change_directory_too(cli):
    out = cli("debug=short", "total_steps=600", "seed=1", "hydra.job.chdir=true")
    assert out.returncode == 0, out.stderr
    assert (cli.cwd / "mlflow.db").exists()
    assert "make ui" in out.stdout


# -- damage ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A run with two checkpoints, cut short."""
    cli = Cli(tmp_path_factory.mktemp("stopped"))
    out = cli(*QUICK, "total_steps=2048", "checkpoint.every_steps=1024", "eval.every_steps=1024")
    assert out.returncode == 0, out.stderr
    (folder,) = cli.folders()
    assert len(list(folder.glob("checkpoints/step-*.pt"))) == 2
    return folder


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


DAMAGES = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "random": lambda data: os.urandom(500),
    "one bit": flipped,
}


@pytest.mark.parametrize("how", first(*reversed(DAMAGES)))
def test_a_damaged_checkpoint_costs_itself_and_is_named(cli, stopped, how):
    subprocess.run(["cp", "-r", str(stopped), str(cli.cwd / "run")], check=True)
    newest = max((cli.cwd / "run" / "checkpoints").glob("step-*.pt"))
    for path in (newest, newest.with_name("best.pt")):
        path.write_bytes(DAMAGES[how](path.read_bytes()))
    out = cli("resume=run", "total_steps=4000")
    assert out.returncode == 0, out.stderr
    assert newest.name in out.stderr
    assert "best.pt" in out.stderr
    assert "Traceback" not in out.stderr
    assert result(cli)["resume"]["from_env_steps"] < int(newest.stem[5:])
    rows = [json.loads(x) for x in (cli.cwd / "run" / "metrics.jsonl").open()]
    points = [(row["step"], name) for row in rows for name in row["metrics"]]
    assert len(points) == len(set(points))
    assert not list((cli.cwd / "run" / "checkpoints").glob("*.tmp"))


def test_checkpoints_that_are_all_damaged_are_refused_by_name(cli, stopped):
    subprocess.run(["cp", "-r", str(stopped), str(cli.cwd / "run")], check=True)
    paths = list((cli.cwd / "run" / "checkpoints").glob("step-*.pt"))
    paths[0].unlink()
    paths[0].mkdir()
    torch.save(["no", "checkpoint"], paths[1])
    composed = (cli.cwd / "run" / ".hydra" / "config.yaml").read_bytes()
    out = cli("resume=run", "total_steps=4000")
    assert out.returncode == 2, out.stderr
    assert (cli.cwd / "run" / ".hydra" / "config.yaml").read_bytes() == composed
    assert all(path.name in out.stderr for path in paths)
    assert "Traceback" not in out.stderr
    assert json.loads((cli.cwd / "run" / "result.json").read_text())["status"] == "finished"


@pytest.mark.parametrize("text", first('{"run_id": "r', "", "[]", '{"run_id": 3}', "\0\0"))
def test_a_damaged_record_is_named_and_stops_only_its_own_run(cli, stopped, text):
    for name in ("run", "outputs/a/other"):
        (cli.cwd / name).parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-r", str(stopped), str(cli.cwd / name)], check=True)
    other = cli.cwd / "outputs" / "a" / "other"
    run_id = json.loads((other / "run.json").read_text())["run_id"]
    (cli.cwd / "run" / "run.json").write_text(text)
    out = cli("resume=run", "total_steps=3000")
    assert out.returncode == 2
    assert "run.json" in out.stderr
    assert "Traceback" not in out.stderr
    broken = cli.cwd / "outputs" / "a" / "broken"
    subprocess.run(["cp", "-r", str(cli.cwd / "run"), str(broken)], check=True)
    (other / "metrics.jsonl").open("ab").write(b'nonsense\n\0\0\n{"step": "x"}\n[]\n{"step": 9')
    out = cli(f"resume={run_id}", "total_steps=3000")
    assert out.returncode == 0, out.stderr


# -- disks ----------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 300 kB; needs root, as CI is."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs to mount a file system")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_disk_that_fills_up_ends_the_run_with_its_last_words(cli, small_disk):
    out = cli(
        *QUICK, "total_steps=200_000", f"hydra.run.dir={small_disk}/run", "network.hidden=[64,64]",
        "checkpoint.every_steps=1000", "checkpoint.keep_last=9",
    )  # fmt: skip
    assert out.returncode == 1, out.stderr
    assert "No space left on device" in out.stderr
    assert "Traceback" not in out.stderr
    found = json.loads((small_disk / "run" / "result.json").read_text())
    assert found["status"] == "failed"
    assert "No space left" in found["reason"]
    assert not list((small_disk / "run").rglob("*.tmp"))


def test_a_full_disk_is_told_before_work_starts(cli, small_disk):
    subprocess.run(["dd", "if=/dev/zero", f"of={small_disk}/filler"], capture_output=True)
    out = cli(*QUICK, "total_steps=500", f"hydra.run.dir={small_disk}/run")
    assert out.returncode == 2
    assert "hydra.run.dir" in out.stderr
    assert "Traceback" not in out.stderr
    assert [p.name for p in small_disk.iterdir()] == ["filler"]


def test_a_folder_that_cannot_be_made_is_told_before_work_starts(cli):
    (cli.cwd / "file").write_text("mine")
    for place in ("file/run", "file", "/proc/run"):
        out = cli(*QUICK, "total_steps=500", f"hydra.run.dir={place}")
        assert out.returncode == 2, out.stderr
        assert "hydra.run.dir" in out.stderr
        assert "Traceback" not in out.stderr
    assert (cli.cwd / "file").read_text() == "mine"


# -- evaluation -----------------------------------------------------------------------------------


def test_ten_evaluations_are_the_default_and_a_fall_is_told(cli):
    out = cli("tracking=none", "total_steps=2560", "seed=1", "eval.episodes=1", "eval.num_envs=1")
    assert out.returncode == 0, out.stderr
    (folder,) = cli.folders()
    rows = [json.loads(x) for x in (folder / "metrics.jsonl").open()]
    curve = {r["step"]: r["metrics"]["return/eval"] for r in rows if "return/eval" in r["metrics"]}
    assert len(curve) == 10
    found = result(cli)
    assert found["counters"]["updates"] > 0
    best = found["returns"]["best"]
    assert best["eval_mean"] == max(curve.values()) == curve[best["env_steps"]]
    assert found["throughput"]["env_steps_per_s"] > 0
    assert ("fell from" in out.stdout) == best["fell"]


def test_a_fall_is_more_than_the_scatter_of_the_games():
    best = Evaluation(60_000, 441.0, 100.0, 20)
    assert Evaluation(150_000, 154.0, 20.0, 20).surely_below(best)
    assert not Evaluation(150_000, 430.0, 100.0, 20).surely_below(best)
    assert not best.surely_below(best)


@slow
def test_a_finished_run_whose_rows_are_not_shipped_is_finished_by_resume(cli):
    out = cli("debug=short", "seed=1", "total_steps=600", "tracking.uri=http://127.0.0.1:9")
    assert out.returncode == 0, out.stderr
    (folder,) = cli.folders()
    request = json.loads((folder / "tracking.json").read_text())
    request["uri"] = f"sqlite:///{cli.cwd / 'mlflow.db'}"
    until(lambda: not cli.brood.alive(), 120, "the end of the tracker")
    (folder / "tracking.json").write_text(json.dumps(request))
    out = cli(f"resume={folder}")
    assert out.returncode == 0, out.stderr
    assert "finished" in out.stdout
    assert json.loads((folder / "mlflow.json").read_text())["finished"]
    out = cli(f"resume={folder}")
    assert out.returncode == 2
    assert "has finished" in out.stderr
