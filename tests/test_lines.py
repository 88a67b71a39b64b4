"""Lines that are printed or recorded run as they stand; a saved line is obeyed in its run alone."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from conftest import Cli
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from omegaconf import OmegaConf
from waiting import finish

from rl_pipeline import terminal
from rl_pipeline.compare import CompareSettings
from rl_pipeline.config import cli as plain
from rl_pipeline.config import resume
from rl_pipeline.config.origins import parse_overrides
from rl_pipeline.errors import ConfigError

ODD = "ab1e_ \\'\"${}=,[]():~%#;\n\té.-+*@?|!&<>/`日"
QUICK = ("tracking=none", "eval.episodes=0", "eval.every_steps=0", "log_every_s=0.2", "seed=1",
         "backend=gymnasium")  # fmt: skip


@pytest.fixture(autouse=True)
def _options_of_here(monkeypatch):
    # A resume sets it for its own process.
    monkeypatch.setenv("RL_PIPELINE_CONF", "")


@examples(max_examples=300, deadline=None)
@given(
    st.text(st.sampled_from(ODD), max_size=9) | st.text(st.characters(codec="utf-8"), max_size=9)
)
@example("runs/a=b,c=[d]/${x}'\\")
@example("\\${")
@example("ends in \\\n")
@example("null")
@example("1e6")
@example("")
def test_hydra_reads_back_what_was_quoted(value):
    quoted = terminal.quoted(value)
    assert resume._named([f"resume={quoted}"], "resume") == value
    config = OmegaConf.create({"a": {"b": None}})
    OmegaConf.update(config, "a.b", parse_overrides([f"a.b={quoted}"])[0].value(), merge=True)
    assert config.a.b == value


@examples(max_examples=30, deadline=None)
@given(st.lists(st.text(st.sampled_from(ODD), max_size=9), min_size=1, max_size=20))
@example(["~", "-x", "a b ", "!!", "it's", "'\"", "%1", "#", "a;b", "", "$(date)", "{a,b}", "*"])
def test_a_shell_reads_back_what_was_printed(words):
    line = " ".join(terminal.in_shell(word) for word in words)
    out = subprocess.run(["sh", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True)
    assert out.stdout.decode().split("\0")[:-1] == words


@pytest.mark.parametrize(
    "name", ["12345678e12", "1" * 32, "[a]", "{a: b}", "${x}", "it's", "#", ""]
)
def test_the_comparison_takes_any_name_as_it_stands(name):
    line = terminal.shell_line("compare", f"study={name}")
    assert plain.parse(CompareSettings, shlex.split(line)[3:]).study == name
    assert plain.parse(CompareSettings, [f"runs={name or 'x'},b", "margin=1e-1"]).margin == 0.1


def test_a_folder_that_looks_like_a_flag_is_shown_as_a_folder():
    assert terminal.shown_path(str(terminal.working_directory() / "-x")) == "./-x"


TASK = "name: mytask\nid: CartPole-v1\nenvpool_id: null\nkind: classic\n"
FAR = "# @package _global_\nalgo:\n  gamma: 0.5\n"


def test_the_printed_line_continues_a_run_whatever_it_is_called_and_composed_of(cli, tmp_path):
    """Its options are in --config-dir, in ./conf and on hydra.searchpath."""
    home = Cli(tmp_path / "proj é=[1], it's")
    home.cwd.mkdir()
    for file, text in (
        ("mine/env/mytask.yaml", TASK),
        ("conf/extra/far.yaml", FAR),
        ("more/debug/slow.yaml", "# @package _global_\nmax_wall_s: 9000\n"),
    ):
        (home.cwd / file).parent.mkdir(parents=True)
        (home.cwd / file).write_text(text)
    process = home.training(
        "--config-dir", "mine", "env=mytask", "+extra=far", "debug=slow",
        "+env.kwargs.sutton_barto_reward=true", "hydra.searchpath=[more]", *QUICK,
        "total_steps=1e9", "hydra.run.dir=runs/${hydra.job.override_dirname}",
    )  # fmt: skip
    process.send_signal(signal.SIGTERM)
    _, err = finish(process)
    assert process.returncode == 143
    line = next(x for x in err.splitlines() if "resume=" in x)
    (result,) = home.results()
    done = result["counters"]["env_steps"]
    out = home(*shlex.split(line)[3:], f"total_steps={done + 300}")
    assert out.returncode == 0, out.stderr
    (result,) = home.results()
    assert result["resume"]["from_env_steps"] == done
    recorded = result["provenance"]["resume_command"]
    assert home(*shlex.split(recorded)[3:]).stderr.count("has finished") == 1
    # From another directory, which has a ./conf of its own.
    (folder,) = home.folders()
    (cli.cwd / "conf" / "local").mkdir(parents=True)
    (cli.cwd / "conf" / "local" / "default.yaml").write_text("max_wall_s: 1\n")
    resume = f"resume={terminal.quoted(str(folder))}"
    out = cli(resume, "--cfg", "job")
    for words in ("name: mytask", "gamma: 0.5", "max_wall_s: 9000", "sutton_barto_reward: true"):
        assert words in out.stdout, out.stderr
    for name, way in (("mine", "--config-dir=<"), ("more", "hydra.searchpath=[<")):
        (home.cwd / name).rename(home.cwd / "away")
        out = cli(resume)
        assert out.returncode == 2
        assert f"{name}, which is no folder now" in out.stderr and way in out.stderr
        (home.cwd / "away").rename(home.cwd / name)
    (home.cwd / "mine").rename(cli.cwd / "away")
    out = cli("--config-dir", "away", resume, "--cfg", "job")
    assert "name: mytask" in out.stdout, out.stderr


# -- what a saved line may say --------------------------------------------------------------------


def saved(folder: Path, *overrides: str, file: str = "run.json", **more: object) -> list[str]:
    """A resumed line of a run or sweep that recorded these overrides."""
    folder.mkdir(exist_ok=True)
    record = {"run_id": "r1", "name": "n", "seed": 1, "settings": {}, "overrides": overrides}
    (folder / file).write_text(json.dumps(record | more))
    if file == "run.json":
        return resume.with_resumed_overrides([f"resume={terminal.quoted(str(folder))}"])
    return resume.with_resumed_sweep([f"study.resume={terminal.quoted(str(folder))}"])


HOSTILE = [
    "+hydra.callbacks.x._target_=os.system",
    "++hydra.callbacks={x:{_target_:os.system}}",
    "hydra.run.dir=/home/me",
    "hydra.output_subdir=/home/me",
    "hydra.job_logging.root.handlers=[file]",
    "hydra/job_logging=default",
    "hydra/launcher=basic",
    "hydra.launcher._target_=os.system",
    "hydra.mode=MULTIRUN",
    "~hydra.callbacks.gate",
    "+env@hydra.callbacks.x=cartpole",
    "hydra={callbacks:{}}",
    "={hydra:{callbacks:{}}}",
    "--config-dir=/home/me",
    "-m",
    "--experimental-rerun=/home/me/evil.pickle",
    "+env.kwargs.x={_target_:os.system}",
    "tracking.experiment=${oc.env:SECRET}",
    "+hydra.sweeper.params.hydra.mode=RUN",
    "+hydra.sweeper.params={'hydra.run.dir':'/home/me'}",
    "no override",
    "hydra.searchpath=[/home/me]",
    "hydra.job.chdir=true",
    "\x1b[2Jhydra.job.chdir=true",
]


@pytest.mark.parametrize("file", ["run.json", "study.json"])
def test_a_saved_line_decides_nothing_that_hydra_does(tmp_path, capsys, file):
    own = ["env=pong", "+env.kwargs.a='b=c'", "algo.gamma=0.9"]
    allowed = ["hydra.launcher.n_jobs=2", "+hydra.sweeper.params.seed='1,2'"]
    allowed = allowed if file == "study.json" else []
    hostile = [x for x in HOSTILE if file == "run.json" or x != "hydra.mode=MULTIRUN"]
    line = saved(tmp_path / "run", *own, *hostile, *allowed, file=file)
    assert not set(hostile) & set(line[1:])
    assert [x for x in line if x in own + allowed] == own + allowed
    err = capsys.readouterr().err
    assert err.count("is not taken on trust") == len(hostile)
    assert all(x in err for x in hostile if x.isprintable()) and "\x1b" not in err


CALLS = """# @package _global_
hydra:
  callbacks:
    evil:
      _target_: os.system
"""


@pytest.mark.parametrize("file", ["run.json", "study.json"])
@pytest.mark.parametrize("how", ["config_dir", "search_path", "working_directory", "..", "name"])
def test_options_of_a_saved_folder_decide_nothing_that_hydra_does(tmp_path, file, how):
    conf = tmp_path / "conf" / "experiment"
    conf.mkdir(parents=True)
    (conf / "evil.yaml").write_text(CALLS)
    found = {"working_directory": "/", "search_path": [], "config_dir": str(conf.parent)}
    option = "experiment=evil"
    match how:
        case "search_path":
            found = {"working_directory": "/", "search_path": [found.pop("config_dir")]}
        case "working_directory":
            found = {"working_directory": str(tmp_path), "search_path": []}
        case "..":
            del found["config_dir"]
            option = f"experiment={'../' * 20}{str(conf)[1:]}/evil"
        case "name":
            (conf.parent / "evil.yaml").write_text(f"{CALLS}defaults: [config]\n")
            found["config_name"], option = "evil", "seed=1"
    with pytest.raises(ConfigError, match="set hydra.callbacks, which is not taken on trust"):
        saved(tmp_path / "run", option, file=file, composed_from=found)


@pytest.mark.parametrize("found", [3, [], {}, {"working_directory": 3}, {"search_path": ["\0"]}])
def test_a_damaged_origin_is_named(tmp_path, found):
    with pytest.raises(ConfigError, match="composed_from"):
        saved(tmp_path / "run", "seed=1", composed_from=found)
