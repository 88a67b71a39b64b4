"""The bench's tasks: what we are told and what the peers are told, number for number the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Task:
    """One row of the table."""

    name: str
    title: str
    ours: tuple[str, ...]
    """Overrides; those of precision and compilation come beside them."""
    peer: dict[str, Any]
    """Settings in the peers' own words."""
    steps: int
    """Environment steps of a run, about 10 s for the best peer."""
    bar: float
    """The least ratio that is wanted of the fastest form."""
    against: tuple[str, ...] = ("sb3", "sbx")
    """The peers, to the best of which that is."""
    rivals: tuple[str, ...] = ("sb3", "sbx", "torchrl")
    fast: tuple[str, ...] = ("compile=default",)
    """The fastest form on a CPU with bf16 units."""
    fast_plain: tuple[str, ...] = ("compile=default",)
    """The fastest form on other CPUs."""
    vecs: tuple[str, ...] = field(default=("serial",))
    """The peers' kinds of vector environment that are tried."""


_PPO = {
    "algo": "ppo", "hidden": [64, 64], "activation": "tanh", "gae_lambda": 0.95, "gamma": 0.99,
    "max_grad_norm": 0.5, "value_coef": 0.5, "clip": 0.2, "entropy_coef": 0.0,
    "normalize_advantage": True, "anneal_lr": False,
}  # fmt: skip
# SB3 weighs the squared error of values by 0.5, we weigh half of it: 1.0 is the same.
_OUR_PPO = (
    "algo=ppo", "recipe=none", "algo.anneal_lr=false", "algo.value_clip=null",
    "algo.target_kl=null", "algo.gae_lambda=0.95", "algo.gamma=0.99", "algo.max_grad_norm=0.5",
    "algo.value_coef=1.0", "algo.normalize_obs=false", "algo.normalize_reward=false",
)  # fmt: skip
_MLP = ("network=mlp", "network.hidden=[64,64]", "network.activation=tanh", "network.shared=false")


def _ppo(horizon: int, epochs: int, minibatches: int, rate: float, entropy: float = 0.0) -> Any:
    ours = (
        *_OUR_PPO, f"algo.horizon={horizon}", f"algo.num_epochs={epochs}",
        f"algo.num_minibatches={minibatches}", f"algo.learning_rate={rate}",
        "algo.ratio_clip=0.2", f"algo.entropy_coef={entropy}",
    )  # fmt: skip
    peer = _PPO | {
        "horizon": horizon, "num_epochs": epochs, "num_minibatches": minibatches,
        "learning_rate": rate, "entropy_coef": entropy,
    }  # fmt: skip
    return ours, peer


def _dqn(batch: int, every: int, starts: int, capacity: int, target: int, rate: float) -> Any:
    ours = (
        "algo=dqn", "recipe=none", "buffer=uniform", f"buffer.capacity={capacity}",
        f"algo.batch_size={batch}", f"algo.replay_ratio={batch / every}", "algo.n_step=1",
        "algo.double=false", "algo.error_clip=1", f"algo.learning_rate={rate}",
        "algo.anneal_lr=false", f"algo.learning_starts={starts}",
        f"algo.target_every={max(target // every, 1)}", "algo.epsilon_end=0.05",
        "algo.epsilon_fraction=0.5", "algo.gamma=0.99",
    )  # fmt: skip
    peer = {
        "algo": "dqn", "batch_size": batch, "train_every": every, "learning_starts": starts,
        "buffer_size": capacity, "target_every": target, "learning_rate": rate, "gamma": 0.99,
        "epsilon_start": 1.0, "epsilon_end": 0.05, "epsilon_fraction": 0.5,
        "hidden": [120, 84], "activation": "relu",
    }  # fmt: skip
    return ours, peer


def _task(name: str, title: str, made: Any, env: Any, peer: Any, steps: int, **more: Any) -> Task:
    ours, theirs = made
    return Task(name, title, (*env, *ours), peer | theirs, steps, **more)


def _cartpole(num_envs: int, backend: str) -> tuple[Any, Any]:
    env = ("env=cartpole", f"backend={backend}", f"backend.num_envs={num_envs}")
    return env, {"env": "CartPole-v1", "kind": "classic", "num_envs": num_envs}


_CHEETAH = ("env=halfcheetah", "backend=gymnasium", "backend.num_envs=1", *_MLP)
_PONG: dict[str, Any] = {"env": "ALE/Pong-v5", "kind": "atari", "episodic_life": True}
_QNET = ("network=mlp", "network.hidden=[120,84]", "network.activation=relu")
_BF16 = ("compile=default", "precision=bf16")
_BOTH = ("serial", "processes")


def _pong(num_envs: int, backend: str) -> tuple[Any, Any]:
    env = ("env=pong", f"backend={backend}", f"backend.num_envs={num_envs}")
    return env, _PONG | {"num_envs": num_envs}


def _with(pair: tuple[Any, Any], more: tuple[str, ...]) -> tuple[Any, Any]:
    return (*pair[0], *more), pair[1]


TASKS = [
    _task("ppo_cartpole_4", "PPO CartPole, 4 envs, 128 x 4 x 4", _ppo(128, 4, 4, 2.5e-4),
          *_with(_cartpole(4, "gymnasium_native"), _MLP), 60_000, bar=4.0),
    _task("ppo_cartpole_64", "PPO CartPole, 64 envs, 128 x 4 x 4", _ppo(128, 4, 4, 2.5e-4),
          *_with(_cartpole(64, "gymnasium_native"), _MLP), 400_000, bar=4.0),
    _task("dqn_cartpole_1", "DQN CartPole, 1 env, batch 128 every 10 steps",
          _dqn(128, 10, 1_000, 10_000, 500, 2.5e-4),
          *_with(_cartpole(1, "gymnasium"), _QNET), 30_000, bar=3.0),
    _task("dqn_cartpole_8", "DQN CartPole, 8 envs, batch 128 every 10 steps",
          _dqn(128, 10, 1_000, 10_000, 500, 2.5e-4),
          *_with(_cartpole(8, "gymnasium_native"), (*_QNET, "algo.update_burst=8")), 80_000,
          bar=4.0, against=("sb3",)),
    _task("ppo_halfcheetah_1", "PPO HalfCheetah, 1 env, 2,048 x 10 x 32",
          _ppo(2048, 10, 32, 3e-4), _CHEETAH,
          {"env": "HalfCheetah-v5", "kind": "mujoco", "num_envs": 1}, 20_480, bar=4.0),
    _task("ppo_pong_8", "PPO Pong, 8 envs, 128 x 4 x 4", _ppo(128, 4, 4, 2.5e-4, 0.01),
          *_with(_pong(8, "envpool"), ("network.shared=true",)), 8_192, bar=3.5,
          rivals=("sb3", "sbx"), fast=_BF16, fast_plain=(), vecs=_BOTH),
    _task("dqn_pong_1", "DQN Pong, 1 env, batch 32 every 4 steps",
          _dqn(32, 4, 1_000, 10_000, 1_000, 1e-4), *_pong(1, "gymnasium"), 4_000, bar=3.0,
          rivals=("sb3", "sbx"), fast=_BF16, fast_plain=()),
]  # fmt: skip
