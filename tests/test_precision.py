"""Precision: float32 where it matters, ratios of one, and what this machine cannot do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from agents import BOX, CPU, learner, random_rollout
from conftest import settings

from rl_pipeline.config.settings import NetworkSettings
from rl_pipeline.engine.flat import FlatParameters
from rl_pipeline.engine.graphs import CompileLog
from rl_pipeline.engine.optim import Adam, GradientStep
from rl_pipeline.engine.precision import (
    JUDGED_UPDATES,
    Arithmetic,
    LossScale,
    choose_arithmetic,
    move_scale,
)
from rl_pipeline.engine.runtime import Runtime, ThreadPlan
from rl_pipeline.learners.distributions import make_distribution
from rl_pipeline.learners.networks import ActorCritic
from rl_pipeline.types import Discrete, EnvSpec

BF16 = Arithmetic("bf16", "cpu", torch.bfloat16)
FP16 = Arithmetic("fp16", "cpu", torch.float16, loss_scale=65536.0)
LOW = [BF16, FP16]
ACTIONS = [Discrete(2), BOX]


def runtime(arithmetic: Arithmetic, **fields) -> Runtime:
    return Runtime(CPU, "", ThreadPlan(1, 1, 1, 1), 3, arithmetic, **fields)


@pytest.mark.parametrize("arithmetic", LOW, ids=lambda a: a.name)
@pytest.mark.parametrize("action", ACTIONS, ids=["discrete", "gaussian"])
def test_the_first_ratio_is_one_in_low_precision(arithmetic, action):
    agent = learner(action=action, normalize_obs=True, runtime=runtime(arithmetic))
    for seed in range(3):
        rollout = random_rollout(agent, action=action, seed=seed)
        metrics, updates = agent.update(rollout, 0.0)
        assert float(metrics["health/max_abs_log_ratio_first_minibatch"]) < 1e-6
        assert updates == 8
        assert rollout.extras["log_prob"].dtype == torch.float32
    if action is BOX:
        assert rollout.action.dtype == torch.float32
        # Not a float32 that holds a rounded number.
        assert not torch.equal(rollout.action, rollout.action.bfloat16().float())


@pytest.mark.parametrize(("arithmetic", "gap"), [(BF16, 0.0), (Arithmetic(), 0.01)])
def test_behaviour_log_probs_are_taken_again_only_in_low_precision(arithmetic, gap):
    agent = learner(runtime=runtime(arithmetic))
    rollout = random_rollout(agent)
    rollout.extras["log_prob"] += 0.01  # as if acting had computed differently
    metrics, updates = agent.update(rollout, 0.0)
    found = float(metrics["health/max_abs_log_ratio_first_minibatch"])
    assert found == pytest.approx(gap, abs=1e-6)


@pytest.mark.parametrize("arithmetic", LOW, ids=lambda a: a.name)
def test_logits_values_and_losses_are_float32_and_every_parameter_learns(arithmetic):
    image = EnvSpec("t", "t", 2, (4, 84, 84), np.dtype(np.uint8), Discrete(3))
    network = NetworkSettings(name="nature_cnn", hidden=(16,), activation="relu", shared=True)
    if arithmetic is FP16:  # its convolutions have no fast form on a CPU
        image = EnvSpec("t", "t", 2, (4,), np.dtype(np.uint8), Discrete(3))
        network = NetworkSettings(name="mlp", hidden=(16,))
    dist = make_distribution(image.action)
    net = ActorCritic(network, image, dist, 0.0, torch.Generator().manual_seed(0), arithmetic)
    flat = FlatParameters(net)
    rng = torch.Generator().manual_seed(0)
    obs = torch.randint(0, 4, (2, *image.obs_shape), dtype=torch.uint8, generator=rng)
    with torch.no_grad():
        net(obs)  # must leave no cast of a weight behind that has no gradient
    params, value = net(obs)
    assert params.dtype == value.dtype == torch.float32
    assert dist.log_prob(params, torch.zeros(2, dtype=torch.int64)).dtype == torch.float32
    (params.pow(2).sum() + value.sum()).backward()
    assert all(grad.abs().sum() > 0 for grad in flat.views(flat.grads).values())


def test_bf16_really_computes_in_bf16_and_stays_near_float32():
    low, full = learner(runtime=runtime(BF16)), learner()
    obs = torch.randn(64, 3)
    (a, _), (b, _) = low._net(obs), full._net(obs)
    assert torch.equal(low.params.values, full.params.values)
    assert 0 < (a - b).abs().max() < 0.05


# -- the loss scale ------------------------------------------------------------------------------


def test_the_loss_scale_moves_as_torch_s_does():
    ours = (torch.tensor(1024.0), torch.zeros(()), torch.zeros(()))
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0)
    theirs.scale(torch.ones(()))
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for i in range(2100):
        parameter.grad = torch.tensor(float("inf") if i in (3, 4, 50) else 1.0)
        theirs.step(optimizer)
        theirs.update()
        ours = move_scale(ours, parameter.grad.isfinite())
        assert float(ours[0]) == theirs.get_scale()
    assert float(ours[2]) == 3
    assert float(ours[0]) == 1024 / 8 * 2


@pytest.fixture(params=["eager", "graph"])
def fp16_step(request):
    """A step whose gradient is its argument, and its parameters."""
    net = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    flat = FlatParameters(net)
    adam = Adam(flat.values, flat.grads, 1e-8, 1.0, loss_scale=65536.0)

    def build(name, pure, eager, state, moves):
        if request.param == "eager":
            return eager
        return lambda *inputs: pure(*state, *inputs)

    def loss(x):
        return net(x).sum(), x.detach().sum()

    return GradientStep("t", loss, flat, adam, (), build, False, CompileLog()), flat


def test_a_skipped_update_changes_nothing_and_is_counted(fp16_step):
    step, flat = fp16_step
    after = []
    for x in ([0.3, 0.4], [float("inf"), 0.4], [0.3, 0.4]):
        (_, norm) = step(0.1, None, torch.tensor([x]))
        after.append(flat.values.clone())
    assert torch.equal(after[0], after[1])
    assert not torch.equal(after[1], after[2])
    assert (step.attempted, step.skipped()) == (3, 1)
    assert (
        float(step.adam.state.steps) == 2
    )  # Adam's own count: bias corrections know no skipped step
    assert float(step.adam.scale.scale) == 32768
    # Unscaled before clipping: the true norm is 0.5, below the limit of 1.
    assert float(norm[0]) == pytest.approx(0.5, rel=1e-5)
    expected = torch.nn.Parameter(torch.zeros(1, 2))
    reference = torch.optim.Adam([expected], lr=0.1, eps=1e-8)
    for _ in range(2):
        expected.grad = torch.tensor([[0.3, 0.4]])
        reference.step()
    torch.testing.assert_close(flat.values.view(1, 2), expected.detach())


def test_too_many_skipped_updates_stop_the_run():
    scale = LossScale(65536.0, CPU)
    scale.skipped.fill_(JUDGED_UPDATES // 2 + 1)
    with pytest.raises(FloatingPointError, match="11 of the last 20 updates.*bf16"):
        scale.check(JUDGED_UPDATES)
    floor = LossScale(65536.0, CPU)
    floor.scale.fill_(0.5)
    with pytest.raises(FloatingPointError, match="loss scale 0.5"):
        floor.check(3)


def test_large_value_targets_are_finite_in_fp16():
    agent = learner(runtime=runtime(FP16), value_clip=None)
    rollout = random_rollout(agent)
    rollout.reward.fill_(1e5)  # beyond fp16's 65504
    metrics, updates = agent.update(rollout, 0.0)
    assert np.isfinite(float(metrics["loss/value"]))
    assert float(metrics["loss/value"]) > 1e9
    assert updates == 8


# -- what machines can do ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tf32", "fp16"])
def test_a_cpu_refuses_what_it_cannot_do_well(name):
    with pytest.raises(ValueError, match=f"precision={name}.*precision=bf16"):
        choose_arithmetic(settings(f"precision={name}").precision, CPU)


def test_an_old_gpu_refuses_bf16_and_a_new_one_takes_all():
    cuda = torch.device("cuda")
    with pytest.raises(ValueError, match="7.5; use precision=fp16"):
        choose_arithmetic(settings("precision=bf16").precision, cuda, (7, 5))
    for name in ("fp32", "tf32", "bf16", "fp16"):
        arithmetic, reason = choose_arithmetic(
            settings(f"precision={name}").precision, cuda, (9, 0)
        )
        assert arithmetic.name == name
        assert reason
        assert arithmetic.exact == (name == "fp32")


def test_precision_is_stated_never_inherited():
    torch.set_float32_matmul_precision("medium")
    Arithmetic().apply()
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cudnn.allow_tf32
    Arithmetic(matmul="high").apply()
    assert torch.backends.cudnn.allow_tf32
    Arithmetic().apply()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["precision.autocast=float16"], "belong to precision=fp32"),
        (["precision=bf16", "precision.loss_scale=8"], "goes with precision=fp16"),
        (["compile.backend=aot_eager"], "no effect with compile=auto"),
    ],
)
def test_bundles_that_contradict_their_name_are_refused(overrides, words):
    with pytest.raises(ValueError, match=words):
        settings(*overrides)
