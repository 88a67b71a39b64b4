"""Trains with Stable-Baselines3, or with SBX (its form in JAX), in an environment of its own.

    python sb3_peer.py '{"library": "sb3", "algo": "ppo", ...}'

The last line that it prints is a JSON object: env_steps, updates, marks, returns, learn_s.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from typing import Any

WANTED: dict[str, Any] = json.loads(sys.argv[1])
if WANTED["library"] == "sbx":
    # JAX asks for its threads when it is imported.
    one = WANTED["threads"] == 1
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1" if one else ""
    os.environ["XLA_FLAGS"] = flags

import numpy as np  # noqa: E402
import torch  # noqa: E402
from stable_baselines3.common.atari_wrappers import AtariWrapper  # noqa: E402
from stable_baselines3.common.callbacks import BaseCallback  # noqa: E402
from stable_baselines3.common.env_util import make_vec_env  # noqa: E402
from stable_baselines3.common.vec_env import (  # noqa: E402
    DummyVecEnv,
    SubprocVecEnv,
    VecFrameStack,
    VecTransposeImage,
)


class Marks(BaseCallback):
    """Notes when which step was done, and how the last games went."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.marks: list[tuple[int, float]] = []
        self.returns: list[tuple[int, float, float]] = []
        self.games: deque[float] = deque(maxlen=100)
        self._every, self._due = every, 0

    def _on_training_start(self) -> None:
        self.begin = time.perf_counter()

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            if "episode" in info:
                self.games.append(info["episode"]["r"])
        if self.num_timesteps >= self._due:
            self._due = self.num_timesteps + self._every
            now = time.perf_counter() - self.begin
            self.marks.append((self.num_timesteps, now))
            if self.games:
                self.returns.append((self.num_timesteps, now, float(np.mean(self.games))))
        return True


def make_envs() -> Any:
    """The vectorised environments."""
    kind = SubprocVecEnv if WANTED["vec"] == "processes" else DummyVecEnv
    if WANTED["kind"] != "atari":
        return make_vec_env(WANTED["env"], WANTED["num_envs"], WANTED["seed"], vec_env_cls=kind)
    import gymnasium as gym

    def make() -> Any:
        import ale_py

        gym.register_envs(ale_py)  # in each process
        env = gym.make(WANTED["env"], frameskip=1, repeat_action_probability=0.0)
        return AtariWrapper(env, terminal_on_life_loss=WANTED["episodic_life"])

    envs = make_vec_env(make, WANTED["num_envs"], WANTED["seed"], vec_env_cls=kind)
    return VecTransposeImage(VecFrameStack(envs, 4))


def make_model(envs: Any) -> Any:
    """The learner, with the settings of the task."""
    w = WANTED
    if w["library"] == "sbx":
        from flax import linen as nn
        from sbx import DQN, PPO

        activation: Any = nn.tanh if w["activation"] == "tanh" else nn.relu
    else:
        from stable_baselines3 import DQN, PPO

        activation = torch.nn.Tanh if w["activation"] == "tanh" else torch.nn.ReLU
    images = w["kind"] == "atari"
    shared = {"learning_rate": w["learning_rate"], "gamma": w["gamma"], "seed": w["seed"]}
    if w["library"] == "sb3":
        shared["device"] = "cpu"
    if w["algo"] == "ppo":
        batch = w["horizon"] * w["num_envs"] // w["num_minibatches"]
        policy: dict[str, Any] = {} if images else {
            "net_arch": {"pi": w["hidden"], "vf": w["hidden"]}, "activation_fn": activation,
        }  # fmt: skip
        return PPO(
            "CnnPolicy" if images else "MlpPolicy", envs, n_steps=w["horizon"], batch_size=batch,
            n_epochs=w["num_epochs"], gae_lambda=w["gae_lambda"], clip_range=w["clip"],
            ent_coef=w["entropy_coef"], vf_coef=w["value_coef"],
            max_grad_norm=w["max_grad_norm"], policy_kwargs=policy, **shared,
        )  # fmt: skip
    policy = {} if images else {"net_arch": w["hidden"], "activation_fn": activation}
    # train_freq counts steps of the vector: as many env steps per update whatever num_envs is.
    frequency = w["train_every"]
    return DQN(
        "CnnPolicy" if images else "MlpPolicy", envs, buffer_size=w["buffer_size"],
        learning_starts=w["learning_starts"], batch_size=w["batch_size"], train_freq=frequency,
        gradient_steps=w["num_envs"], target_update_interval=w["target_every"],
        exploration_fraction=w["epsilon_fraction"], exploration_initial_eps=w["epsilon_start"],
        exploration_final_eps=w["epsilon_end"], policy_kwargs=policy,
        **({"optimize_memory_usage": False} if w["library"] == "sb3" else {}), **shared,
    )  # fmt: skip


def main() -> None:
    """Train and tell."""
    torch.set_num_threads(WANTED["threads"])
    envs = make_envs()
    model = make_model(envs)
    marks = Marks(max(WANTED["total_steps"] // 200, 1))
    begin = time.perf_counter()
    model.learn(WANTED["total_steps"], callback=marks)
    learn_s = time.perf_counter() - begin
    marks.marks.append((model.num_timesteps, time.perf_counter() - marks.begin))
    updates = int(model._n_updates)
    if WANTED["algo"] == "ppo":
        # It counts epochs.
        updates *= WANTED["num_minibatches"]
    said = {"env_steps": model.num_timesteps, "updates": updates, "marks": marks.marks}
    print(json.dumps(said | {"returns": marks.returns, "learn_s": learn_s}))
    sys.stdout.flush()
    envs.close()


if __name__ == "__main__":
    main()
