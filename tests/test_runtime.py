"""Cores, threads and random streams of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rl_pipeline.engine.runtime import STREAMS, Runtime, stream_seed, thread_plan
from rl_pipeline.machine import cpu_budget


@pytest.mark.parametrize(
    ("quota", "budget"),
    [("400000 100000", 4), ("765000 100000", 7), ("50000 100000", 1), ("max 100000", 12)],
)
def test_cpu_budget_reads_cgroup_v2(tmp_path, quota, budget):
    (tmp_path / "cpu.max").write_text(quota + "\n")
    assert cpu_budget(tmp_path, 12, {})[0] == budget


def test_cpu_budget_reads_cgroup_v1_and_the_user(tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("300000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_budget(tmp_path, 12, {}) == (3, "cgroup quota")
    assert cpu_budget(tmp_path, 12, {"RL_PIPELINE_CPUS": "2"}) == (2, "RL_PIPELINE_CPUS")


def test_the_user_s_threads_win(monkeypatch):
    from conftest import settings

    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    plan = thread_plan(settings("env=pong", "backend.num_threads=5"), 2, "affinity")
    assert (plan.torch_threads, plan.env_threads) == (3, 5)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert thread_plan(settings("env=pong"), 2, "affinity").torch_threads == 2
    assert thread_plan(settings(), 8, "affinity").env_threads == 1


def test_a_small_network_shares_out_large_minibatches_only(monkeypatch):
    from conftest import settings

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    line = ("backend.num_envs=64", "algo.horizon=128", "network.hidden=[64,64]")
    assert thread_plan(settings(*line, "algo.num_minibatches=4"), 2, "x").torch_threads == 2
    assert thread_plan(settings(*line, "algo.num_minibatches=16"), 2, "x").torch_threads == 1
    assert thread_plan(settings("algo=dqn"), 8, "x").torch_threads == 1


def test_beside_a_stepping_lane_torch_takes_half_of_the_cores(monkeypatch):
    from conftest import settings

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    plan = thread_plan(settings("env=pong", "backend=envpool_async"), 4, "affinity")
    assert (plan.torch_threads, plan.act_threads) == (4, 2)
    assert "half of the budget" in plan.reasons["act"]
    assert thread_plan(settings("env=pong"), 4, "affinity").act_threads == 4
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert thread_plan(settings("env=pong", "backend=envpool_async"), 4, "x").act_threads == 3

    before = torch.get_num_threads()
    runtime = Runtime(torch.device("cpu"), "", replace(plan, torch_threads=before), 0)
    with runtime.beside_envs():
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == before


def test_thread_variables_are_read_with_care(monkeypatch):
    from conftest import settings

    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    assert thread_plan(settings(), 2, "affinity").torch_threads == 4
    with pytest.raises(ValueError, match="RL_PIPELINE_CPUS=half"):
        cpu_budget(environ={"RL_PIPELINE_CPUS": "half"})


def test_random_streams_differ_by_name_seed_and_index():
    seeds = {stream_seed(s, name, i) for s in range(3) for name in STREAMS for i in range(3)}
    assert len(seeds) == 3 * len(STREAMS) * 3
    assert stream_seed(1, "act") == stream_seed(1, "act")
