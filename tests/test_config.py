"""Bad input is answered in words, before any run exists."""

from __future__ import annotations

import copy
import io
import json
import math
import resource
import subprocess
import sys
from contextlib import redirect_stderr, suppress
from pathlib import Path
from zipfile import ZipFile

import ale_py
import envpool
import gymnasium as gym
import pytest
from conftest import compose, settings
from omegaconf import OmegaConf
from pydantic import ValidationError

from rl_pipeline.config import app, checks, explain, load, memory, options, resume
from rl_pipeline.config.origins import CONF
from rl_pipeline.config.settings import (
    BackendSettings,
    CheckpointSettings,
    DQNSettings,
    EvalSettings,
    NetworkSettings,
    PPOSettings,
    Settings,
    StudySettings,
    TrackingSettings,
)
from rl_pipeline.errors import ConfigError

SAMPLES = "cartpole lunarlander halfcheetah pong atari gym envpool dm_control minigrid procgen"
OPTIONS = [
    f"{group.name}={option.stem}"
    for group in sorted(CONF.iterdir())
    if group.is_dir() and group.name not in ("hydra", "recipe", "sweep", "local")
    for option in sorted(group.glob("*.yaml"))
    if group.name != "env" or option.stem in SAMPLES.split()
]


@pytest.mark.parametrize("override", OPTIONS)
def test_every_option_composes_to_valid_settings(override):
    group, option = override.split("=")
    text = (CONF / group / f"{option}.yaml").read_text()
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
    assert options.recipe_of("ppo", env) == recipe
    plain, none = settings(f"env={env}"), settings(f"env={env}", "recipe=none")
    given = OmegaConf.load(CONF / "recipe" / f"{recipe}.yaml")
    for key, value in given.algo.items():
        assert getattr(plain.algo, key) == value
    assert plain.algo != none.algo == settings("env=gym", "env.id=CartPole-v1").algo
    assert settings(f"env={env}", "algo.gamma=0.5").algo.gamma == 0.5
    other = settings(f"env={env}", "recipe=ppo_pendulum")
    assert other.algo == settings("env=pendulum").algo


def test_the_57_games_and_the_mujoco_tasks_go_by_name():
    files = {file.stem: OmegaConf.load(file) for file in (CONF / "env").glob("*.yaml")}
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
    assert options.recipe_of("ppo", "pong") == "ppo_pong"
    assert options.recipe_of("ppo", "breakout") == "ppo_atari"
    assert options.recipe_of("ppo", "mine") == "ppo_mine"


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
        ("env.atari.episodic_life=false", ["not a setting of the chosen env", "leave it out"]),
        ("cartpole", ["did you mean env=cartpole?"]),
    ],
)
def test_composition_errors_are_explained(override, words):
    with pytest.raises(Exception) as error:  # noqa: B017, PT011 - any of Hydra's
        compose(override)
    text = explain.explain_composition(error.value)
    for word in words:
        assert word in text


def cpu_s(call):
    """CPU seconds of the processes that a call starts, and its value."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    value = call()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, value


FILES = {
    "broken": b"name: x\n  id: [\n",
    "list": b"- a\n- b\n",
    "empty": b"",
    "binary": b"\xc0\x00\xff",
    "nul": b"\0",
    "two": b"name: 1\n---\nname: 2\n",
    "header": b"# @package a b c\n",
    "defaults": b"defaults: 3\n",
    "missing": b"defaults: [nope]\n",
    "lost": b"name: ${nope}\nid: x\n",
    "endless": b"a: &a [*a]\n",
    "code": b"name: !!python/object/apply:os.system [ls]\n",
}


def refused(*overrides: str) -> str:
    """What is said of a line that is refused."""
    said = io.StringIO()
    with pytest.raises(app.Refused), redirect_stderr(said), app.refusing():
        app._check_arguments(list(overrides))
        checks.check_machine(settings(*overrides))
    assert len(said.getvalue()) < 5000 and said.getvalue().isprintable() is False
    return said.getvalue()


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_configuration_is_named(tmp_path, monkeypatch, name):
    (tmp_path / "conf" / "env").mkdir(parents=True)
    (tmp_path / "conf" / "env" / f"{name}.yaml").write_bytes(FILES[name])
    monkeypatch.chdir(tmp_path)
    said = refused(f"env={name}", "backend=gymnasium")
    words = {"list": "env=", "empty": "env.id must be given", "lost": "env.name: Interpolation"}
    assert words.get(name, f"env/{name}") in said


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("=5", "'=5' is not key=value"),
        ("", "'' is not key=value"),
        ("+", "+: mismatched"),
        ("++x", "++x: missing"),
        ("a.b.c=1", "a.b.c is not a setting"),
        ("seed=${nope}", "seed: Interpolation key 'nope' not found"),
        ("seed=${seed}", "seed: Recursive"),
        ("algo.gamma=${algo.horizon}${algo.gamma}", "algo.gamma: Recursive"),
        ("env=", "env=: expected the name of an option"),
        ("env=null", "env=null: expected the name of an option"),
        ("network=3", "network=3: expected the name of an option"),
        ("hydra/launcher=null", "hydra/launcher=null: expected the name"),
        ("experiment=null", "leave it out"),
        ("~env", "env=cartpole algo=ppo"),
        ("algo=[ppo]", "env=cartpole algo=ppo"),
        ("seed=" + "9" * 5000, "seed="),
        ("seed=1e30", "seed=1e+30: is beyond"),
        ("total_steps=1e300", "total_steps=1e+300: is beyond"),
        ("study.name='a\x1b[2Jb", "\\x1b"),
        ("tracking.experiment=" + "a" * 9000 + "'", " ... "),
    ],
)
def test_odd_overrides_are_answered_by_name(override, words):
    assert words in refused(override)


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (["backend.num_envs=1e9"], "backend.num_envs=1000000000"),
        (["backend=gymnasium_async", "backend.num_envs=1e6"], "backend.num_envs=1000000"),
        (["algo.horizon=1e12"], "algo.horizon=1000000000000"),
        (["network.hidden=[1000000000]"], "network.hidden=[1000000000]"),
        (["network.hidden=[100000,100000,100000]"], "network.hidden=[100000, 100000, 100000]"),
        (["algo=dqn", "buffer.capacity=1e15"], "buffer.capacity=1000000000000000"),
        (["algo=dqn", "buffer=memmap", "buffer.capacity=1e15"], "buffer.capacity="),
        (["algo=dqn", "algo.batch_size=1e9", "buffer.capacity=2e9"], "algo.batch_size=1000000000"),
        (["eval.num_envs=1e9", "eval.episodes=1e9"], "eval.num_envs=1000000000"),
        (["backend.num_threads=1e9"], "backend.num_threads=1000000000"),
        (["env=pong", "env.atari.frame_stack=1e6"], "env.atari.frame_stack=1000000"),
        (["env=pong", "env.atari.screen_size=1e5"], "env.atari.screen_size=100000"),
    ],
)
def test_what_surely_does_not_fit_into_memory_is_refused(overrides, word):
    checked = settings(*overrides)
    with pytest.raises(ConfigError, match="GB of memory") as error:
        memory.check(checked, 10**11)
    assert word in str(error.value)


def test_what_may_fit_into_memory_is_not_refused():
    for line in ([], ["env=pong"], ["env=pong", "algo=dqn"], ["eval.num_envs=1e9"],
                 ["env=pong", "backend.num_envs=512"], ["env=halfcheetah"]):  # fmt: skip
        memory.check(settings(*line), 8 * 10**9)


ODD = [None, "", math.nan, -math.inf, -1, 0, 1e300, True, [], [1, [2]], {}, {"name": 3}, "\0",
       "${x}", 10**400, [None], {"a": {"b": None}}]  # fmt: skip


def test_no_value_of_a_setting_raises_anything_but_an_answer():
    values = OmegaConf.to_container(compose("env=pong"))
    for number, key in enumerate(options.known_keys() * 3):
        *parents, last = key.split(".")
        trial = copy.deepcopy(values)
        place = trial
        for name in parents:
            place[name] = place.get(name) if isinstance(place.get(name), dict) else {}
            place = place[name]
        place[last] = ODD[number * 5 % len(ODD)]
        with suppress(ConfigError):
            checks.check_machine(load.load(OmegaConf.create(trial)))


@pytest.mark.parametrize("place", ["", " ", "a\0", "a/${b}"])
def test_a_folder_that_hydra_cannot_work_in_is_refused(place):
    with pytest.raises(ConfigError, match=r"hydra\.run\.dir"):
        checks.check_place("hydra.run.dir", place)


def test_bad_lines_end_fast_with_code_2_and_leave_nothing(cli):
    torch_s, _ = cpu_s(lambda: subprocess.run([sys.executable, "-c", "import torch"], check=True))
    for line, words in (
        (["env.bakend=envpool"], "is not a setting"),
        (["seed=abc"], "integer"),
        (["recipe=ppo_cartpol"], "did you mean ppo_cartpole?"),
        (["-m", "seed=1,2", "precision=fp32,fp61"], "precision can be"),
        (["seed=1,2"], "add -m; one list is seed=[1,2]"),
        (["--total_steps=1000"], "use total_steps=1000"),
        (["backend.num_envs=1e9"], "GB of memory"),
        (["hydra.run.dir="], "hydra.run.dir is empty"),
        (["hydra.run.dir=a\udcff"], "is not UTF-8"),
        (["hydra.output_subdir=../../x"], "hydra.output_subdir=../../x"),
        (["--resolve"], "--resolve"),
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
        "import sys, rl_pipeline.train, rl_pipeline.study.callback, rl_pipeline.run.gate\n"
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


@pytest.mark.slow
def test_what_the_code_reads_ships_in_the_wheel(tmp_path):
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, check=True, cwd=root, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    shipped = set(ZipFile(wheel).namelist())
    read = [p.relative_to(root) for p in (root / "conf").rglob("*.yaml")]
    assert read and {f"rl_pipeline/{path}" for path in read} <= shipped
    package = [p for kind in ("*.py", "*.j2") for p in (root / "rl_pipeline").rglob(kind)]
    assert {str(p.relative_to(root)) for p in package} <= shipped


def test_a_default_in_yaml_is_the_default_of_its_model():
    """Which both have: whoever reads either is told the same."""
    plain = {
        "algo": {"ppo": PPOSettings, "dqn": DQNSettings}, "network": {"mlp": NetworkSettings},
        "backend": {"gymnasium": BackendSettings}, "tracking": {"mlflow": TrackingSettings},
        "eval": EvalSettings, "checkpoint": CheckpointSettings, "study": StudySettings,
    }  # fmt: skip
    root = OmegaConf.load(CONF / "config.yaml")
    checked = 0
    for group, models in plain.items():
        for option, model in models.items() if isinstance(models, dict) else [(None, models)]:
            given = (
                root[group] if option is None else OmegaConf.load(CONF / group / f"{option}.yaml")
            )
            for key, field in model.model_fields.items():
                if key in given and not field.is_required():
                    value = OmegaConf.to_container(given)[key]
                    default = (
                        list(field.default) if isinstance(field.default, tuple) else field.default
                    )
                    assert value == default, (
                        f"{group}.{key}: {value} in YAML, {default} in settings.py"
                    )
                    checked += 1
    for key in ("seed", "total_steps", "log_every_s", "max_wall_s", "resume"):
        assert root[key] == Settings.model_fields[key].default, key
    assert checked > 50


def test_a_recipe_of_another_version_does_not_stop_a_resume(tmp_path):
    begun = settings("env=cartpole", "backend.num_envs=4").model_dump(mode="json")
    begun["algo"]["num_epochs"] = 33
    record = {"run_id": "r1", "seed": 1, "settings": begun, "overrides": ["backend.num_envs=4"]}
    (tmp_path / "run.json").write_text(json.dumps(record))
    line = ["backend.num_envs=4", f"resume={tmp_path}"]
    now = load.load(compose(*line), line)
    assert now.algo.num_epochs == 33
    resume.check_resumed(now, begun)
    # What is given now is what is asked for, and refused.
    line = ["backend.num_envs=4", "algo.num_epochs=5", f"resume={tmp_path}"]
    with pytest.raises(ConfigError, match=r"algo.num_epochs from 33 to 5"):
        resume.check_resumed(load.load(compose(*line), line), begun)
    # So is another choice, whose settings would else be dropped without a word.
    line = ["backend.num_envs=4", "recipe=ppo_acrobot", f"resume={tmp_path}"]
    with pytest.raises(ConfigError, match="resume cannot change algo"):
        resume.check_resumed(load.load(compose(*line), line), begun)
