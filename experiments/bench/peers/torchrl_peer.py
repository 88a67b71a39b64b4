"""Trains with TorchRL as its own examples do (sota-implementations/ppo and dqn), on a CPU.

    python torchrl_peer.py '{"algo": "ppo", ...}'

The last line that it prints is a JSON object: env_steps, updates, marks, returns, learn_s.
"vec" is "serial" (one environment, or gymnasium's SyncVectorEnv, faster than SerialEnv), "compiled"
(the same with torch.compile) or "parallel" (ParallelEnv).
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections import deque
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict.nn import AddStateIndependentNormalScale, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl import modules
from torchrl._utils import compile_with_warmup
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import GymWrapper, ParallelEnv
from torchrl.objectives import ClipPPOLoss, DQNLoss, HardUpdate
from torchrl.objectives.value.advantages import GAE


def make_gym(w: dict[str, Any]) -> Any:
    """One environment of gymnasium."""
    env = gym.make(w["env"])
    if w["kind"] == "mujoco":
        env = gym.wrappers.DtypeObservation(gym.wrappers.ClipAction(env), np.float32)
    return env


def make_env(w: dict[str, Any], n: int) -> Any:
    """N environments, or a single one without a batch dimension."""
    if w["vec"] == "parallel":
        one = functools.partial(make_env, w | {"vec": "serial"}, 1)
        return ParallelEnv(n, one, num_threads=w["threads"], mp_start_method="fork")
    make, none = functools.partial(make_gym, w), AutoresetMode.DISABLED  # TorchRL resets
    env = SyncVectorEnv([make] * n, autoreset_mode=none) if n > 1 else make()
    return GymWrapper(env, categorical_action_encoding=True)


def make_mlp(w: dict[str, Any], inputs: int, outputs: int, gain: float) -> nn.Module:
    """An MLP with orthogonal weights."""
    kind = nn.Tanh if w["activation"] == "tanh" else nn.ReLU
    net = modules.MLP(inputs, outputs, num_cells=w["hidden"], activation_class=kind)
    for layer in filter(lambda layer: isinstance(layer, nn.Linear), net):
        nn.init.orthogonal_(layer.weight, gain if layer is net[-1] else 2**0.5)
        nn.init.zeros_(layer.bias)
    return net


def make_collector(w: dict[str, Any], env: Any, policy: Any, frames: int, **more: Any) -> Any:
    """The collector; it gives whole batches of frames, total_steps rounded up to them."""
    total = -(-w["total_steps"] // frames) * frames
    more |= {"frames_per_batch": frames, "total_frames": total, "trust_policy": True}
    env.set_seed(w["seed"])
    return Collector(env, policy, track_traj_ids=False, **more)


class Log:
    """When which step was done, and how the last games went."""

    def __init__(self, num_envs: int, every: int) -> None:
        self.steps = self.updates = 0
        self.marks, self.returns = list[Any](), list[Any]()
        self._games, self._sums = deque[float](maxlen=100), np.zeros(num_envs)
        self._every, self._begin = every, time.perf_counter()

    def watch(self, collector: Any) -> Any:
        """The collector's batches; what is done with one is in the time of its mark."""
        for data in collector:
            self.steps += data.numel()
            pair = (data["next", key].reshape(len(self._sums), -1) for key in ("reward", "done"))
            for reward, done in zip(*(x.T.numpy() for x in pair), strict=True):
                self._sums += reward
                self._games.extend(self._sums[done].tolist())
                self._sums[done] = 0.0
            yield data
            if self.steps // self._every > len(self.marks):
                self.marks.append((self.steps, time.perf_counter() - self._begin))
                if self._games:
                    self.returns.append((*self.marks[-1], float(np.mean(self._games))))
        self.learn_s = time.perf_counter() - self._begin


def train_ppo(w: dict[str, Any], env: Any) -> tuple[Log, Any]:
    """PPO; as in SB3, advantages are those of the rollout, not computed anew each epoch."""
    inputs, normal = env.observation_spec["observation"].shape[-1], w["kind"] == "mujoco"
    outputs = env.action_spec.shape[-1] if normal else env.action_spec.space.n
    keys, kind = ["logits"], torch.distributions.Categorical
    net = make_mlp(w, inputs, outputs, 0.01)
    if normal:
        keys, kind = ["loc", "scale"], modules.IndependentNormal
        net = nn.Sequential(net, AddStateIndependentNormalScale(outputs, scale_lb=1e-8))
    body, spec = TensorDictModule(net, ["observation"], keys), env.full_action_spec
    more = {"distribution_class": kind, "return_log_prob": True}
    actor = modules.ProbabilisticActor(body, keys, spec=spec, **more)
    critic = modules.ValueOperator(make_mlp(w, inputs, 1, 1.0), ["observation"])
    gae = GAE(gamma=w["gamma"], lmbda=w["gae_lambda"], value_network=critic)
    loss_module = ClipPPOLoss(
        actor, critic, clip_epsilon=w["clip"], entropy_bonus=bool(w["entropy_coef"]),
        entropy_coeff=w["entropy_coef"], critic_coeff=w["value_coef"], loss_critic_type="l2",
        normalize_advantage=w["normalize_advantage"], functional=False,
    )  # fmt: skip
    params, rate = list(loss_module.parameters()), torch.tensor(w["learning_rate"])
    optimizer = torch.optim.Adam(params, lr=rate, eps=1e-5, fused=True)
    frames = w["horizon"] * w["num_envs"]
    size, sampler = frames // w["num_minibatches"], SamplerWithoutReplacement(drop_last=True)
    batches = ReplayBuffer(storage=LazyTensorStorage(frames), sampler=sampler, batch_size=size)
    used = "observation", "action", "action_log_prob", "advantage", "value_target"

    def update(batch: Any) -> None:
        optimizer.zero_grad(set_to_none=True)
        sum(v for key, v in loss_module(batch).items() if key.startswith("loss_")).backward()
        nn.utils.clip_grad_norm_(params, w["max_grad_norm"])
        optimizer.step()

    compiled = {"warmup": 1} if w["vec"] == "compiled" else False
    update = compile_with_warmup(update, warmup=1) if compiled else update
    collector = make_collector(w, env, actor, frames, compile_policy=compiled)
    log = Log(w["num_envs"], frames)
    for data in log.watch(collector):
        if w["anneal_lr"]:
            rate.fill_(w["learning_rate"] * (1 - (log.steps - frames) / collector.total_frames))
        with torch.no_grad():
            batches.extend(gae(data).select(*used).reshape(-1))
        for batch in (batch for _ in range(w["num_epochs"]) for batch in batches):
            update(batch)
            log.updates += 1
        collector.update_policy_weights_()
    return log, collector


def train_dqn(w: dict[str, Any], env: Any) -> tuple[Log, Any]:
    """DQN; num_envs updates after train_every steps of each env; a compiled policy is no faster."""
    inputs, actions = env.observation_spec["observation"].shape[-1], env.action_spec.space.n
    spec, space, net = env.full_action_spec, "categorical", make_mlp(w, inputs, actions, 1.0)
    model = modules.QValueActor(net, spec=spec, in_keys=["observation"], action_space=space)
    frames = w["train_every"] * w["num_envs"]
    falls = max(int(w["epsilon_fraction"] * w["total_steps"] / frames), 1)  # one each batch
    greedy = modules.EGreedyModule(spec, w["epsilon_start"], w["epsilon_end"], falls)
    loss_module = DQNLoss(model, loss_function="smooth_l1", action_space=space)
    loss_module.make_value_estimator(gamma=w["gamma"])
    target = HardUpdate(loss_module, value_network_update_interval=0)  # at each of its steps
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=w["learning_rate"], fused=True)
    replay = ReplayBuffer(storage=LazyTensorStorage(w["buffer_size"]), batch_size=w["batch_size"])
    used = [("next", key) for key in ("observation", "reward", "done", "terminated")]

    def update(batch: Any) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_module(batch)["loss"].backward()
        optimizer.step()

    update = compile_with_warmup(update, warmup=1) if w["vec"] == "compiled" else update
    policy, starts = TensorDictSequential(model, greedy), w["learning_starts"]
    collector = make_collector(w, env, policy, frames, init_random_frames=starts)
    log = Log(w["num_envs"], 1000)
    for data in log.watch(collector):
        greedy.step()
        replay.extend(data.select("observation", "action", *used).reshape(-1))
        if log.steps > starts:
            for _ in range(w["num_envs"]):
                update(replay.sample())
                log.updates += 1
            if log.steps % w["target_every"] < frames:
                target.step()
    return log, collector


def main() -> None:
    """Train and tell."""
    w = json.loads(sys.argv[1])
    torch.set_num_threads(w["threads"])
    torch.manual_seed(w["seed"])
    env = make_env(w, w["num_envs"])
    log, collector = train_ppo(w, env) if w["algo"] == "ppo" else train_dqn(w, env)
    said = {"env_steps": log.steps, "updates": log.updates, "marks": log.marks}
    print(json.dumps(said | {"returns": log.returns, "learn_s": log.learn_s}), flush=True)
    collector.shutdown()


if __name__ == "__main__":
    main()
