"""Other people's environments: each family of EnvPool by id, and a package of one's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import envpool
import numpy as np
import pytest
from conftest import settings

from rl_pipeline.run.build import make_envs
from rl_pipeline.types import Continuous, Discrete

FAMILIES = {  # EnvPool's module: option, task, obs shape
    "atari": ("atari", "Adventure-v5", (4, 84, 84)),
    "box2d": ("bipedalwalker", "BipedalWalker-v3", (24,)),
    "classic_control": ("mountaincar_continuous", "MountainCarContinuous-v0", (2,)),
    "gfootball": ("envpool", "gfootball/academy_empty_goal-v1", (72, 96, 4)),
    "highway": ("envpool", "highway-v0", (5, 5)),
    "jumanji": ("envpool", "Game2048-v1", (20,)),
    "minigrid": ("minigrid", "MiniGrid-DoorKey-5x5-v0", (247,)),
    "mujoco.dmc": ("dm_control", "CheetahRun-v1", (17,)),
    "mujoco.gym": ("ant", "Ant-v5", (105,)),
    "mujoco.metaworld": ("envpool", "MetaWorld/Assembly-v3", (39,)),
    "mujoco.myosuite": ("envpool", "MyoHandAirplaneFly-v0", (142,)),
    "mujoco.playground": ("envpool", "PandaPickCube-v1", (66,)),
    "mujoco.robotics": ("envpool", "FetchReach-v4", (16,)),
    "pgx": ("envpool", "TicTacToe-v1", "refused: two players a game"),
    "procgen": ("procgen", "CoinrunEasy-v0", (3, 64, 64)),
    "toy_text": ("envpool", "FrozenLake-v1", (16,)),
    "vizdoom": ("envpool", "Basic-v1", "not tried: its engine does not answer here"),
}
NESTED = ("jumanji", "mujoco.robotics", "toy_text", "pgx")


def family_settings(family):
    option, task, _ = FAMILIES[family]
    line = [f"env={option}", "backend=envpool", "backend.num_envs=2"]
    if option in ("envpool", "dm_control", "minigrid", "procgen"):
        line.append(f"env.id={task}")
    if option == "atari":
        line += [f"env.id=ALE/{task}", f"env.envpool_id={task}"]
    if family in NESTED:
        line.append("env.flatten_obs=true")
    return settings(*line)


def test_every_family_of_envpool_is_accounted_for():
    from envpool.registration import registry

    assert {path.removeprefix("envpool.") for path, *_ in registry.specs.values()} == set(FAMILIES)
    assert {task for _, task, _ in FAMILIES.values()} <= set(envpool.list_all_envs())


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_task_of_each_envpool_family_steps(family):
    *_, shape = FAMILIES[family]
    checked = family_settings(family)
    if family == "vizdoom":
        pytest.skip(shape)
    if family == "pgx":
        vec = make_envs(checked, 2, 0, 1)
        with pytest.raises(ValueError, match="observed shape .4, 18., its space says .2, 18."):
            vec.reset()
        return
    try:
        vec = make_envs(checked, 2, 0, 1)
    except ValueError as error:  # the refusal in words is what a machine without Qt shows
        assert family == "procgen" and "Qt 5" in str(error) and "CoinrunEasy-v0" in str(error)
        return
    assert vec.spec.obs_shape == shape
    action, rng = vec.spec.action, np.random.default_rng(0)
    assert isinstance(action, Discrete | Continuous)
    first, rewards = vec.reset(), []
    assert first.dtype == vec.spec.obs_dtype
    for _ in range(20):
        if isinstance(action, Discrete):
            step = vec.step(rng.integers(0, action.num_actions, 2))
        else:
            step = vec.step(rng.uniform(action.low, action.high, (2, *action.shape)))
        rewards.append(step.raw_reward)
        assert step.obs.shape == (2, *shape) and step.obs.dtype == vec.spec.obs_dtype
    assert step.valid.any() and np.isfinite(rewards).all()
    vec.close()


PACKAGE = {
    "pyproject.toml": """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "their_pkg"
version = "1.0"
""",
    "their_pkg/__init__.py": """
import gymnasium as gym

gym.register("Their-v0", entry_point="their_pkg.corridor:Corridor", max_episode_steps=50)
""",
    "their_pkg/corridor.py": '''
import gymnasium as gym
import numpy as np


class Corridor(gym.Env):
    """Walk `size` steps to the right."""

    def __init__(self, size=4):
        self.size = size
        self.observation_space = gym.spaces.Box(0, size, (1,), np.float32)
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = 0
        return np.array([self.place], np.float32), {}

    def step(self, action):
        self.place = max(self.place + (1 if action else -1), 0)
        there = self.place == self.size
        return np.array([self.place], np.float32), float(there), there, False, {}
''',
}


def test_an_environment_of_a_package_of_ones_own_trains(cli, tmp_path):
    for name, text in PACKAGE.items():
        file = tmp_path / "source" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    pip += ["--no-build-isolation", "--target", str(site), str(tmp_path / "source")]
    subprocess.run(pip, check=True, cwd=tmp_path, timeout=100)
    assert (site / "their_pkg-1.0.dist-info").is_dir()
    (cli.cwd / "elsewhere").mkdir()
    cli.cwd = cli.cwd / "elsewhere"
    out = cli(
        "env=gym", "env.id=their_pkg:Their-v0", "+env.kwargs.size=8", "tracking=none",
        "total_steps=600", "backend.num_envs=2", "algo.horizon=64", "eval.episodes=2",
        env={"PYTHONPATH": os.pathsep.join([str(site), *sys.path])},
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    (result,) = cli.results()
    assert result["status"] == "finished" and result["counters"]["updates"] > 0
    assert result["task"]["id"] == "their_pkg:Their-v0"
    assert len(result["returns"]["eval_scores"]) == 2
    composed = json.loads((cli.folders()[0] / "run.json").read_text())["settings"]["env"]
    assert composed["kwargs"] == {"size": 8}
