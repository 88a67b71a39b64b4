"""compile=auto: graphs come from the cache or from beside the training, and cost nothing else."""

from __future__ import annotations

import os
import sys

import psutil
import pytest
import torch
from conftest import settings
from waiting import until

from rl_pipeline.engine import background, compilers, graphs
from rl_pipeline.engine.background import Background
from rl_pipeline.engine.compilers import choose_plan
from rl_pipeline.engine.graphs import CompileLog, GraphFunction

CPU = torch.device("cpu")


class Waiting:
    """A function that takes its graph, and says so."""

    name = "update"

    def __init__(self, faster=True):
        self.settled, self.faster = 0, faster

    def settle(self, inputs):
        self.settled += 1
        return self.faster


def started(code, said, function):
    def request(forms):
        assert forms == [("update", [((2, 3), (3, 1), "torch.float32")])]
        return b"forms"

    builder = Background([sys.executable, "-c", code], dict(os.environ), request, said.append)
    builder.want(function, [torch.zeros(2, 3)])
    assert not builder.poll(60.0)
    return builder


def poll_to_the_end(builder):
    taken = []
    until(lambda: taken.append(builder.poll(60.0)) or builder._over, what="the builder's end")
    return any(taken)


def test_what_was_built_is_taken_once():
    said, function = [], Waiting()
    builder = started("import sys; assert sys.stdin.buffer.read(5) == b'forms'", said, function)
    assert poll_to_the_end(builder) and function.settled == 1
    assert not builder.poll(60.0) and not builder.note


@pytest.mark.parametrize(
    ("code", "faster", "note"),
    [("raise SystemExit('no compiler')", True, "no compiler"), ("", False, "not faster")],
)
def test_a_run_whose_graphs_fail_or_are_slower_stays_eager_and_says_so(code, faster, note):
    said, function = [], Waiting(faster)
    builder = started(code, said, function)
    assert not poll_to_the_end(builder)
    assert note in builder.note and said[-1] == f"compile=auto: {builder.note}"


def test_a_builder_that_hangs_is_ended_and_so_are_its_compilers(monkeypatch):
    code = "import subprocess, time; subprocess.Popen(['sleep', '300']); time.sleep(300)"
    said, function = [], Waiting()
    builder = started(code, said, function)
    child = psutil.Process(builder._process.pid)
    until(child.children, what="the builder's own child")
    brood = [child, *child.children()]
    monkeypatch.setattr(background, "LIMIT_S", 0.0)
    assert not builder.poll(60.0)
    assert "took over" in builder.note and function.settled == 0
    psutil.wait_procs(brood, timeout=20)
    assert not any(p.is_running() and p.status() != "zombie" for p in brood)
    builder.close()


def test_a_run_that_is_nearly_over_keeps_its_form():
    said, function = [], Waiting()
    builder = started("import sys; sys.stdin.buffer.read(5)", said, function)
    until(lambda: builder._process.poll() is not None, what="the builder's end")
    assert not builder.poll(1.0) and function.settled == 0
    assert "the next run begins with the graphs" in builder.note


def test_too_short_a_run_builds_nothing():
    said = []
    builder = Background(["false"], {}, lambda forms: b"", said.append)
    assert not builder.poll(1.0), "nothing is missing"
    builder.want(Waiting(), [torch.zeros(1)])
    assert not builder.poll(1.0)
    assert builder._process is None and "1 s are left" in said[0]


def test_auto_is_eager_where_it_must_be(monkeypatch):
    wanted = settings().compile
    assert wanted.name == "auto"
    plan, _ = choose_plan(wanted, CPU)
    assert plan.name == "auto" and plan.later
    plan, why = choose_plan(wanted, CPU, alone=False)
    assert plan.name == "eager" and "all jobs of a sweep are alike" in why
    monkeypatch.setattr(compilers.shutil, "which", lambda name: None)
    plan, why = choose_plan(wanted, CPU)
    assert plan.name == "eager" and "no C++ compiler" in why


def test_only_packages_of_the_default_compiler_are_looked_up():
    """What another backend builds is another graph under the same settings of the run."""
    kept = {
        name: choose_plan(settings("compile=default", *more).compile, CPU)[0].kept
        for name, more in {"inductor": (), "other": ("compile.backend=aot_eager",)}.items()
    }
    assert kept == {"inductor": True, "other": False}


class Kept:
    """An index that has the graph from a moment on."""

    def __init__(self):
        self.there, self.noted = False, []

    def find(self, name, args):
        return (lambda *a: (a[0].mul_(2) + a[1],), {"nodes": 3}) if self.there else None

    def note(self, *args, **facts):
        self.noted.append(facts)


def test_a_function_changes_its_form_only_when_told(monkeypatch):
    """Eager until `settle`; the state goes on from where it was, and timing moves nothing."""
    monkeypatch.setattr(graphs, "TIMING_S", 0.0)
    state, x = torch.ones(1, 1), torch.zeros(1, 1)
    calls = []

    def eager(x):
        calls.append("eager")
        return (state.mul_(2) + x,)

    index, later, log = Kept(), Background(["false"], {}, lambda f: b"", str), CompileLog()
    function = GraphFunction(
        "update", None, eager, [state], 1, None, log, True, index=index, later=later
    )
    assert len(function(x)) == 1 and calls == ["eager"]
    index.there = True
    function(x)
    assert calls == ["eager"] * 2 and log.update_form == "eager"
    monkeypatch.setattr(GraphFunction, "_is_faster", lambda self: True)
    before = state.clone()
    assert function.settle([x])
    assert torch.equal(state, before)
    seen = len(calls)
    assert function(x)[0].item() == 2 * before.item() and len(calls) == seen
    assert log.update_form == "default"


@pytest.mark.slow
def test_a_run_goes_over_to_its_graphs_and_the_next_begins_with_them(cli, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "graphs"))
    line = ("seed=1", "tracking=none", "eval.episodes=0", "total_steps=1e9")
    out = cli(*line, "max_wall_s=90")
    assert out.returncode == 0, out.stderr
    out = cli(*line, "max_wall_s=5")
    assert out.returncode == 0, out.stderr
    first, second = sorted((r["effective"]["compile"] for r in cli.results()), key=len)[::-1]
    assert first.startswith("eager until step ") and first.endswith(", then default")
    assert second == "default"
    assert not [p for p in psutil.process_iter(["cmdline"])
                if "rl_pipeline.run.prebuild" in (p.info["cmdline"] or [])]  # fmt: skip
