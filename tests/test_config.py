"""Bad input is answered in words, before any run exists."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import ale_py
import envpool
import gymnasium as gym
import pytest
from conftest import compose, settings
from omegaconf import OmegaConf
from pydantic import ValidationError

from rl_pipeline import config
from rl_pipeline.config import ConfigError

SAMPLES = "cartpole lunarlander halfcheetah pong atari gym envpool dm_control minigrid procgen"
OPTIONS = [
    f"{group.name}={option.stem}"
    for group in sorted(config.CONF.iterdir())
    if group.is_dir() and group.name not in ("hydra", "recipe", "sweep", "local")
    for option in sorted(group.glob("*.yaml"))
    if group.name != "env" or option.stem in SAMPLES.split()
]


@pytest.mark.parametrize("override", OPTIONS)
def test_every_option_composes_to_valid_settings(override):
    group, option = override.split("=")
    text = (config.CONF / group / f"{option}.yaml").read_text()
    extra = ["env.id=CartPole-v1"] if "id: ???" in text else []
    if override == "env=atari":
        extra += ["env.envpool_id=Pong-v5"]
    if override == "network=nature_cnn":
        extra = ["env=pong"]
    if override.startswith("buffer=") and override != "buffer=rollout":
        extra = ["algo=dqn"]
    if override == "tracking=server":
        extra = ["tracking.uri=http://127.0.0.1:1"]
    checked = settings(override, *extra)
    if hasattr(checked, group):
        assert getattr(checked, group).name == option


@pytest.mark.parametrize(
    ("env", "recipe"),
    [
        ("cartpole", "ppo_cartpole"),
        ("lunarlander", "ppo_lunarlander"),
        ("pong", "ppo_atari"),
        ("seaquest", "ppo_atari"),
        ("halfcheetah", "ppo_mujoco"),
        ("walker2d", "ppo_mujoco"),
    ],
)
def test_recipes_apply_and_the_command_line_wins_over_them(env, recipe):
    """The task's own where there is one, else its family's, else none."""
    assert config.recipe_of("ppo", env) == recipe
    plain, none = settings(f"env={env}"), settings(f"env={env}", "recipe=none")
    given = OmegaConf.load(config.CONF / "recipe" / f"{recipe}.yaml")
    for key, value in given.algo.items():
        assert getattr(plain.algo, key) == value
    assert plain.algo != none.algo == settings("env=gym", "env.id=CartPole-v1").algo
    assert settings(f"env={env}", "algo.gamma=0.5").algo.gamma == 0.5
    other = settings(f"env={env}", "recipe=ppo_pendulum")
    assert other.algo == settings("env=pendulum").algo


def test_the_57_games_and_the_mujoco_tasks_go_by_name():
    files = {file.stem: OmegaConf.load(file) for file in (config.CONF / "env").glob("*.yaml")}
    tasks = {name: task for name, task in files.items() if not OmegaConf.is_missing(task, "id")}
    games = {name: task for name, task in tasks.items() if "base/atari@_here_" in task.defaults}
    assert len(games) == 57
    for name, task in tasks.items():
        words = "".join(word.capitalize() for word in name.split("_"))
        if name in games:
            assert (task.id, task.envpool_id) == (f"ALE/{words}-v5", f"{words}-v5")
        assert task.name == name
        # What differs is all that a file says; SAMPLES of them are composed.
        assert task.keys() == {"name", "id", "envpool_id", "defaults"}
    assert sum("base/mujoco@_here_" in task.defaults for task in tasks.values()) == 11
    gym.register_envs(ale_py)
    assert {task.id for task in tasks.values()} <= gym.registry.keys()
    assert {task.envpool_id for task in tasks.values()} <= set(envpool.list_all_envs())


def test_a_recipe_of_ones_own_wins_over_the_family_s(tmp_path, monkeypatch):
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    (tmp_path / "conf" / "recipe" / "ppo_pong.yaml").write_text("# @package _global_\n")
    monkeypatch.chdir(tmp_path)
    assert config.recipe_of("ppo", "pong") == "ppo_pong"
    assert config.recipe_of("ppo", "breakout") == "ppo_atari"
    assert config.recipe_of("ppo", "mine") == "ppo_mine"


@pytest.mark.parametrize("env", ["cartpole", "acrobot", "lunarlander", "pong"])
def test_dqn_has_recipes_too(env):
    plain = settings("algo=dqn", f"env={env}")
    bare = settings("algo=dqn", f"env={env}", "recipe=none")
    assert plain.algo != bare.algo
    assert plain.buffer.capacity != bare.buffer.capacity
    assert settings("algo=dqn", f"env={env}", "algo.gamma=0.5").algo.gamma == 0.5


def test_an_environment_chooses_network_and_backend_and_the_command_line_wins():
    assert settings("env=pong").network.name == "nature_cnn"
    assert settings("env=gym", "env.id=X-v0").backend.name == "gymnasium"
    assert settings("env=pong", "backend=gymnasium").backend.name == "gymnasium"


def test_integral_floats_are_integers_and_others_are_refused():
    assert settings("total_steps=1e6").total_steps == 1_000_000
    assert isinstance(settings("total_steps=1e6").total_steps, int)
    with pytest.raises(ConfigError, match="total_steps=1000.5: must be a valid integer"):
        settings("total_steps=1000.5")


def test_settings_are_frozen():
    with pytest.raises(ValidationError):
        settings().total_steps = 3


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["seed=abc"], ["seed=abc", "integer"]),
        (["seed=true"], ["seed=True", "number"]),
        (["+algo.lr=0.5"], ["algo.lr is not a setting", "algo.learning_rate"]),
        (["algo.gamma=1.5"], ["algo.gamma=1.5", "less than or equal to 1"]),
        (["network.hidden=64"], ["network.hidden", "[64]"]),
        (["env=gym"], ["env.id must be given"]),
        (["env=gym", "env.id=X-v0", "backend=envpool"], ["backend=envpool", "backend=gymnasium"]),
        (["backend=gymnasium", "backend.num_threads=2"], ["backend.num_threads", "no effect"]),
        (["network=nature_cnn"], ["network=nature_cnn", "network=mlp"]),
        (["algo.num_minibatches=7"], ["algo.num_minibatches=7", "divide", "256"]),
        (["tracking=none", "tracking.uri=x"], ["tracking.uri", "no effect"]),
        (["eval.episodes=0", "eval.every_steps=9"], ["eval.every_steps", "no effect"]),
        (["backend.lanes=2"], ["backend.lanes=2", "no effect", "backend=envpool_async"]),
        (["backend=envpool_async", "backend.num_envs=7"], ["backend.lanes=2", "divide"]),
        (["backend=envpool_async", "backend.lanes=1"], ["backend=envpool"]),
        (["backend.step_timeout_s=3"], ["backend.step_timeout_s", "gymnasium_async"]),
        (["compile.fallback=true"], ["compile.fallback has no effect", "compile=default"]),
        (["algo.learning_rate=1", "total_steps=0"], ["total_steps=0", "greater than 0"]),
    ],
)
def test_bad_values_name_the_setting_and_the_way_out(overrides, words):
    with pytest.raises(ConfigError) as error:
        settings(*overrides)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("backend.num_env=3", ["backend.num_env is not", "backend.num_envs"]),
        ("precision=fp61", ["precision can be bf16, fp16, fp32, tf32"]),
        ("mode=overlap", ["planned", "sync"]),
        ("algo=sac", ["planned", "ppo"]),
        ("env=pnog", ["did you mean pong"]),
        ("env.kwargs.size=3", ["+env.kwargs.size=..."]),
        ("enviroment=pong", ["did you mean env?"]),
        ("env.atari.episodic_life=false", ["no setting of the env chosen here", "leave it out"]),
        ("cartpole", ["did you mean env=cartpole?"]),
    ],
)
def test_composition_errors_are_explained(override, words):
    with pytest.raises(Exception) as error:  # noqa: B017, PT011 - any of Hydra's
        compose(override)
    text = config.explain_composition(error.value)
    for word in words:
        assert word in text


def cpu_s(call):
    """CPU seconds of the processes that a call starts, and its value."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    value = call()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, value


def test_bad_lines_end_fast_with_code_2_and_leave_nothing(cli):
    torch_s, _ = cpu_s(lambda: subprocess.run([sys.executable, "-c", "import torch"], check=True))
    for line, words in (
        (["env.bakend=envpool"], "is not a setting"),
        (["seed=abc"], "integer"),
        (["recipe=ppo_cartpol"], "did you mean ppo_cartpole?"),
        (["-m", "seed=1,2", "precision=fp32,fp61"], "precision can be"),
        (["seed=1,2"], "add -m; one list is seed=[1,2]"),
        (["--total_steps=1000"], "use total_steps=1000"),
    ):
        used, out = cpu_s(lambda line=line: cli(*line))
        assert used < torch_s, "nothing heavy was imported"
        assert out.returncode == 2
        assert out.stderr.startswith("error: ")
        assert words in out.stderr
        assert "Traceback" not in out.stderr
    assert list(cli.cwd.iterdir()) == []


def test_an_unknown_environment_and_a_missing_gpu_leave_nothing(cli):
    out = cli("env=gym", "env.id=Nonsense-v9")
    assert out.returncode == 2
    assert "Nonsense-v9" in out.stderr
    assert "Traceback" not in out.stderr
    out = cli("device=cuda", env={"CUDA_VISIBLE_DEVICES": ""})
    assert out.returncode == 2
    assert "device=cuda" in out.stderr
    assert "device=cpu" in out.stderr
    assert cli.folders() == []
    assert not (cli.cwd / "mlflow.db").exists()


def test_hydra_s_own_flags_work(cli):
    for line in (["--cfg", "job", "--resolve"], ["--info", "defaults-tree"], ["--help"]):
        out = cli(*line)
        assert out.returncode == 0
        assert "cartpole" in out.stdout


def test_importing_the_package_and_the_door_imports_nothing_heavy():
    code = (
        "import sys, rl_pipeline, rl_pipeline.train, rl_pipeline.study\n"
        "heavy = {'torch', 'mlflow', 'envpool', 'gymnasium', 'ray', 'ale_py', 'cv2', 'pynvml'}\n"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    out = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_working_directory_adds_options(cli):
    (cli.cwd / "conf" / "experiment").mkdir(parents=True)
    (cli.cwd / "conf" / "experiment" / "mine.yaml").write_text(
        "# @package _global_\nalgo:\n  gamma: 0.123\n"
    )
    out = cli("experiment=mine", "--cfg", "job")
    assert "gamma: 0.123" in out.stdout


def test_the_configuration_ships_with_the_package():
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert '"conf" = "rl_pipeline/conf"' in text
