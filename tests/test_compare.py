"""`compare` on real stores filled with runs whose truth is known."""

from __future__ import annotations

import csv
import json
import math
import re
import socket
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Cli, settings
from scipy.stats import binom

from rl_pipeline import compare as compare_door
from rl_pipeline.comparison import figures, findings, records, tables
from rl_pipeline.comparison.groups import Comparison
from rl_pipeline.comparison.measure import compare
from rl_pipeline.comparison.records import RunRecord, StudyRecord
from rl_pipeline.config.folders import flatten
from rl_pipeline.errors import ConfigError
from rl_pipeline.tracking import orphans, tracker

STEPS = 100_000
NO_GPU = "a CPU, 2 cores, no GPU"


def record(seed=1, speed=1000.0, final_return=400.0, learned=0.5, steps=STEPS, **settings):
    """A finished run; its return rises from 20 and is there after `learned` of the run."""
    x = np.linspace(steps / 40, steps, 40)
    returns = 20 + (final_return - 20) * np.minimum(1, x / (learned * steps))
    base = {"algo": "ppo", "backend": "gymnasium", "precision": "fp32", "compile": "eager",
            "device": "cpu", "backend.num_envs": "8", "algo.horizon": "32"}  # fmt: skip
    settings = {k.replace("__", "."): str(v) for k, v in settings.items()}
    return RunRecord(
        id=f"{seed}-{speed}", name=f"run {seed}", status="finished", settings=base | settings,
        seed=str(seed), machine=NO_GPU, commit="abc1234",
        final={"env_steps_per_s": speed, "steady": 1.0, "env_steps": steps, "compile_s": 2.0},
        curves={
            "return/train": (x, returns),
            "throughput/env_steps_per_s": (x, np.full(40, speed)),
            "cpu/rss_bytes": (x, np.linspace(1e8, 5e8, 40)),
        },
    )  # fmt: skip


def noisy(rng, mean, n, **kwargs):
    return [record(seed, mean * math.exp(rng.normal(0, 0.02)), **kwargs) for seed in range(n)]


def study(*runs, **kwargs):
    return StudyRecord("s", [r for group in runs for r in group], **kwargs)


def by_name(found, name):
    (group,) = [g for g in found.groups if g.name == name]
    return group


def test_groups_are_made_by_what_took_effect_and_the_difference_is_told():
    rng = np.random.default_rng(0)
    refused = [
        RunRecord(**{**vars(r), "requested": {"precision": "bf16"}}) for r in noisy(rng, 1000, 3)
    ]
    found = compare(study(refused, noisy(rng, 2000, 3, backend="envpool")))
    assert [g.name for g in found.groups] == ["backend=gymnasium", "backend=envpool"]
    assert "precision=bf16 was asked for and precision=fp32 took effect" in found.notes
    asked, other = records.canonical(
        {"precision.name": "bf16", "device.name": "auto", "seed": 3, "eval.episodes": 20,
         "backend.num_threads": "auto"},
        {"precision": "fp32", "device": "cpu", "threads.envs": 2, "num_envs": 8},
    )  # fmt: skip
    assert asked == {
        "precision": "fp32", "device": "cpu", "threads.envs": "2", "backend.num_envs": "8",
    }  # fmt: skip
    assert other == {"precision": "bf16"}


def test_of_many_settings_that_are_alike_one_is_called_faster_in_one_sweep_of_twenty_at_most():
    rng, trials, backends = np.random.default_rng(17), 60, ("gymnasium", *"abcdef")
    wrong = 0
    for _ in range(trials):
        found = compare(study(*(noisy(rng, 1000, 5, backend=b) for b in backends)))
        wrong += any(g.speedup and g.speedup.excludes(1) for g in found.groups)
        assert [e.ratio for e in found.effects] == [g.speedup for g in found.groups[1:]]
    assert wrong <= binom.ppf(0.999, trials, 0.05)


def test_recipes_are_never_ranked_against_each_other():
    rng = np.random.default_rng(1)
    runs = [noisy(rng, 1000, 3), noisy(rng, 3000, 3, backend__num_envs=64),
            noisy(rng, 1500, 3, backend="envpool"),
            noisy(rng, 6000, 3, backend="envpool", backend__num_envs=64)]  # fmt: skip
    for by in (None, ["backend"]):  # also where the user's grouping would mix them
        found = compare(study(*runs), by=by)
        assert {len(g.runs) for g in found.groups} == {3}
        other = by_name(found, "backend=gymnasium backend.num_envs=64")
        assert other.verdict == "recipe differs" and other.speedup is None and other.parity is None
        assert by_name(found, "backend=envpool backend.num_envs=8").speedup.excludes(1)
        assert found.factors == ["backend"]
        assert any("recipe differs (backend.num_envs=64)" in note for note in found.notes)
        # With a baseline that leaves the recipe open, each recipe has its own.
        found = compare(study(*runs), by=by, baseline={"backend": "gymnasium"})
        assert not by_name(found, "backend=envpool backend.num_envs=64").speedup.excludes(2)
        assert by_name(found, "backend=gymnasium backend.num_envs=64").verdict == "1"


def test_thread_plans_that_follow_from_the_backend_make_no_groups_of_their_own():
    rng = np.random.default_rng(2)
    found = compare(study(
        noisy(rng, 1000, 2, threads__envs=1),
        noisy(rng, 2000, 2, backend="envpool", threads__envs=2),
    ))  # fmt: skip
    assert found.by == ["backend"]
    one, two = (noisy(rng, 1000 * n, 2, threads__envs=n) for n in (1, 2))
    found = compare(study(one, two))
    assert found.by == ["threads.envs"]
    assert found.groups[1].recipe == {}


def test_what_is_too_short_or_of_another_machine_is_not_compared():
    rng = np.random.default_rng(3)
    short = [
        RunRecord(**{**vars(r), "final": {**r.final, "steady": 0.0}})
        for r in noisy(rng, 2000, 3, backend="envpool")
    ]
    far = [
        RunRecord(**{**vars(r), "machine": "another"})
        for r in noisy(rng, 4000, 3, backend="envpool_async")
    ]
    found = compare(study(noisy(rng, 1000, 3), short, far))
    assert [g.verdict for g in found.groups] == ["1", "too short", "machine differs"]
    assert found.effects == [] and all(g.speedup is None for g in found.groups)


def test_failures_are_counted_where_they_belong_and_never_compared():
    rng = np.random.default_rng(4)
    lost = RunRecord("lost-0", "backend=envpool seed=4", "failed", {"backend": "envpool"},
                     reason="killed by signal 9", whole=False)  # fmt: skip
    found = compare(study(noisy(rng, 1000, 3), noisy(rng, 2000, 3, backend="envpool"), [lost]))
    group = by_name(found, "backend=envpool")
    assert [run.reason for run in group.failures] == ["killed by signal 9"]
    assert len(group.runs) == 4 and len(group.done) == 3
    assert not group.speedup.excludes(2)
    with pytest.raises(ConfigError, match="none of its 1 runs has finished"):
        compare(study([lost]))


def test_returns_are_compared_at_equal_steps_with_the_margin_stated():
    rng = np.random.default_rng(5)

    def learned(backend, mean, steps):
        return [
            record(seed, final_return=mean + rng.normal(0, 2), steps=steps, backend=backend)
            for seed in range(10)
        ]

    found = compare(study(learned("gymnasium", 400, STEPS), learned("envpool", 402, STEPS),
                          learned("envpool_async", 300, STEPS)))  # fmt: skip
    base, same, worse = found.groups
    assert base.returns.value == pytest.approx(400, abs=3)
    assert same.parity.verdict == "not worse" and worse.parity.verdict == "worse"
    # 10 % of what was learned from the first logged return on.
    first = base.runs[0].curves["return/train"][1][0]
    assert same.parity.margin == pytest.approx(0.1 * (400 - first), abs=0.5)
    assert compare(study(learned("gymnasium", 400, STEPS)), margin=3.0).groups[0].parity is None
    found = compare(study(learned("gymnasium", 400, STEPS), learned("envpool", 400, 2 * STEPS)))
    # Half of the longer run: its curve is read there, not at its end. And it is another recipe
    # only if total_steps says so.
    assert found.at_steps == STEPS


def test_nothing_learned_is_no_parity():
    flat = [record(s, final_return=20, backend=b) for b in ("gymnasium", "envpool") for s in (1, 2)]
    assert compare(study(flat)).groups[1].parity.verdict == "nothing learned"


def test_time_and_steps_to_a_threshold_memory_compile_and_energy():
    runs = [record(s, speed=1000, learned=0.5) for s in (1, 2, 3)]
    x = runs[0].curves["return/train"][0]
    for run in runs:
        run.curves["gpu/power_w"] = (x, np.full(40, 200.0))
    never = [record(s, final_return=100, backend="envpool") for s in (1, 2, 3)]
    found = compare(study(runs, never), threshold=390)
    group, other = found.groups
    assert group.reached == 3
    assert group.steps_to == pytest.approx(50_000, abs=2500)
    assert group.seconds_to == pytest.approx(group.steps_to / 1000)
    assert group.figures["memory_bytes"] == 5e8 and group.figures["compile_s"] == 2.0
    assert group.figures["joules_per_step"] == pytest.approx(0.2)  # 200 W at 1,000 steps/s
    assert other.reached == 0 and math.isinf(other.steps_to)
    assert math.isnan(other.figures["joules_per_step"])


def test_known_differences_of_the_compared_backends_are_named():
    rng = np.random.default_rng(8)
    pong = {"env.id": "ALE/Pong-v5"}
    runs = [noisy(rng, 1000, 2), noisy(rng, 1000, 2, backend="envpool")]
    for run in (run for group in runs for run in group):
        run.settings.update(pong)
    (note,) = [n for n in compare(study(*runs)).notes if "ALE" in n]
    assert note.startswith("ALE/Pong-v5: EnvPool")
    assert not any("ALE" in note for note in compare(study(runs[0])).notes)


def test_runs_that_shared_the_machine_are_told():
    def at(start, **kwargs):
        run = record(**kwargs)
        return RunRecord(**{**vars(run), "started": start, "final": {**run.final, "wall_s": 10.0}})

    apart = compare(study([at(0.0), at(11.0), at(22.0)]))
    assert not any("at once" in note for note in apart.notes)
    together = compare(study([at(0.0), at(5.0), at(9.0)]))
    assert any("up to 3 runs ran at once" in note for note in together.notes)


def test_a_lost_job_joins_the_group_that_its_overrides_mean():
    rng = np.random.default_rng(10)
    for rate in ("0.001", "0.0003"):
        known = {"algo": "ppo", "algo.learning_rate": f"{float(rate):e}"}
        lost = RunRecord("lost-0", "", "failed", known, whole=False)
        runs = [noisy(rng, 1000, 3, algo__learning_rate=r) for r in ("0.001", "0.0003")]
        found = compare(study(*runs, [lost]))
        assert found.by == ["algo.learning_rate"] and len(found.groups) == 2
        assert len(by_name(found, f"algo.learning_rate={rate}").failures) == 1


def test_a_choice_of_which_all_jobs_were_lost_is_a_group_of_failures():
    rng = np.random.default_rng(15)
    lost = RunRecord("lost-0", "", "failed", {"device": "cuda"}, whole=False, reason="no CUDA")
    found = compare(study(noisy(rng, 1000, 3), [lost], varied=("device",)),
                    baseline={"device": "cpu"})  # fmt: skip
    assert [g.name for g in found.groups] == ["device=cpu", "device=cuda"]
    assert found.groups[1].verdict == "no run finished"


def test_the_same_return_from_every_seed_is_identical():
    """Independent samples that scatter so would leave it open."""
    runs = [[record(s, final_return=100 * (s + 1), buffer=b) for s in range(5)]
            for b in ("uniform", "memmap")]  # fmt: skip
    assert compare(study(*runs)).groups[1].parity.verdict == "identical"
    runs[1][4] = record(4, final_return=499, buffer="memmap")
    assert compare(study(*runs)).groups[1].parity.verdict == "open"
    top = [[record(s, final_return=500, buffer=b) for s in range(9)] for b in ("uniform", "memmap")]
    assert compare(study(*top)).groups[1].parity.verdict == "open"
    for group in top:
        group.append(replace(group[0], seed="9"))
    assert compare(study(*top)).groups[1].parity.verdict == "not worse"
    for group in top:
        group[3] = replace(group[3], status="failed")
    assert compare(study(*top)).groups[1].parity.verdict == "incomplete"


def test_seeds_without_a_return_leave_the_learning_open():
    good = [record(s) for s in range(12)]
    failed = [replace(record(s, precision="bf16"), status="failed") for s in (10, 11)]
    ten = [record(s, precision="bf16") for s in range(10)]
    assert compare(study(good, ten)).groups[1].parity.verdict == "not worse"
    found = compare(study(good, ten, failed))
    assert found.groups[1].parity.verdict == "incomplete"
    rows = tables.comparison_rows(found)[1]
    assert any("open: runs without a return" in cell for cell in rows[1])


def test_a_collapsed_seed_leaves_the_learning_open_and_is_told():
    good = [record(s) for s in range(10)]
    one_bad = [record(s, precision="bf16", final_return=400 if s else 20) for s in range(10)]
    found = compare(study(good, one_bad))
    assert found.groups[1].parity.verdict == "open"
    assert any("1 of 10 runs end below the baseline" in note for note in found.notes)
    assert not any("end below" in note for note in compare(study(one_bad, good)).notes)


def test_nothing_is_said_against_a_baseline_that_was_too_short():
    rng = np.random.default_rng(11)
    backends = ("envpool", "gymnasium", "gymnasium_async")
    runs = [noisy(rng, 1000 * n, 3, backend=b) for n, b in enumerate(backends, start=1)]
    runs[0] = [replace(r, final={**r.final, "steady": 0.0}) for r in runs[0]]
    found = compare(study(*runs), baseline={"backend": "envpool"})
    assert found.effects == [] and found.answer == []
    assert [g.verdict for g in found.groups] == ["1", "baseline too short", "baseline too short"]
    assert findings.in_one_line(found) == (
        "no verdict on speed: the baseline reached no steady state"
    )


def test_recipes_are_told_against_the_baseline_whichever_ran_first():
    rng = np.random.default_rng(12)
    small, large = (noisy(rng, 1000 * n, 3, backend__num_envs=n) for n in (8, 64))
    large = [replace(r, settings={**r.settings, "env.kwargs.size": "2"}) for r in large]
    found = compare(study(small, large), baseline={"backend.num_envs": "64"})
    assert found.groups[0].recipe == {}
    # A setting that only one side has makes another recipe as well.
    assert found.groups[1].recipe == {"backend.num_envs": "8", "env.kwargs.size": "-"}
    (note,) = [n for n in found.notes if "recipe differs" in n]
    assert note.startswith("backend.num_envs=8: ")


def test_a_group_of_several_machines_has_no_speed_up():
    rng = np.random.default_rng(13)
    runs = [noisy(rng, 1000, 4), noisy(rng, 2000, 4, backend="envpool")]
    mixed = [[replace(r, machine=f"m{i % 2}") for i, r in enumerate(group)] for group in runs]
    found = compare(study(*mixed))
    assert found.groups[1].verdict == "machine differs" and found.answer == []


def test_what_stores_write_of_an_option_is_what_folders_say():
    folder, _ = records.canonical({"compile.backend": None}, {"compile_backend": None})
    store, other = records.canonical({"compile.backend": "null"}, {"compile_backend": "None"})
    assert folder == store == {"compile.backend": "null"} and other == {}


def test_brackets_in_a_reason_are_printed_as_they_are(capsys):
    reason = "RuntimeError: [enforce fail at alloc_cpu.cpp:117] . [/opt/x] not there"
    bad = replace(record(9), status="failed", reason=reason, name="env.kwargs=[a]")
    tables.print_comparison(compare(study([record(1), bad])))
    out = capsys.readouterr().out
    assert reason in out and "env.kwargs=[a]" in out


HOSTILE = "$\\frac{$ <b>|</b> \x1b[31m=\u202e`x` &lt; :boom: \ud800"


def test_a_name_or_a_reason_is_shown_everywhere_and_obeyed_nowhere(capsys, tmp_path):
    """Formulas, tags, cells, ANSI sequences, turned writing, emoji, half of a character."""
    rng = np.random.default_rng(16)
    key = "env.kwargs.x"
    runs = [noisy(rng, 1000, 3, **{key: level}) for level in (HOSTILE, "=1+1", "_x", "-0.5")]
    runs[1] = [replace(run, settings={**run.settings, "compile": HOSTILE}) for run in runs[1]]
    bad = record(9, **{key: HOSTILE})
    bad = replace(bad, status="failed", reason=f"a\n{HOSTILE}", name=HOSTILE)
    found = compare(replace(study(*runs, [bad]), name=HOSTILE), by=[key])
    found.notes.append(HOSTILE)
    tables.print_comparison(found)
    files = tables.write_comparison(found, tmp_path)
    out = capsys.readouterr().out
    texts = {p.name: p.read_text() for p in files if p.suffix in (".md", ".csv", ".html")}
    for text in (out, *texts.values()):
        assert "\x1b" not in text and "\u202e" not in text
        assert r"\x1b" in text and r"\u202e" in text
    assert ":boom:" in out
    page, table = texts["index.html"], texts["table.md"]
    assert "<b>" not in page and "&lt;b&gt;" in page and "&amp;lt;" in page
    assert "<b>" not in table and "$" not in table.replace(r"\$", "") and "&amp;lt;" in table
    cells = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()[:6]}
    assert len(cells) == 1
    levels = [row[key] for row in csv.DictReader(texts["groups.csv"].splitlines())]
    assert levels[1:] == ["'=1+1", "_x", "-0.5"]
    assert {p.name for p in files} >= {"pareto.png", "curves.png"}


def test_a_level_with_a_formula_in_it_is_drawn_in_every_picture(tmp_path):
    rng = np.random.default_rng(16)
    levels = ("eager", HOSTILE, "_x")
    runs = [noisy(rng, 1000 * i, 3, compile=x) for i, x in enumerate(levels, start=1)]
    drawn = figures.pictures(compare(study(*runs)))
    assert list(drawn) == ["pareto", "curves", "effects"]
    # Letter by letter, with the dollars: as a comment of the text in the drawing.
    assert all(r"$\frac{$" in picture.svg and "_x" in picture.svg for picture in drawn.values())
    points = [(1, 1.0, 1.0, 1.0), (2, 2.0, 2.0, 2.0)]
    panel = {"title": HOSTILE, "xlabel": HOSTILE, "ylabel": HOSTILE, "lines": {HOSTILE: points}}
    figures.line_panels(tmp_path / "panels.png", [panel], rows=1)


def test_the_csv_tells_ranges_from_intervals():
    rng = np.random.default_rng(14)
    found = compare(study(noisy(rng, 1000, 5), noisy(rng, 2000, 3, backend="envpool")))
    base, few = csv.DictReader(tables._csv(found).splitlines())
    assert (base["speed_interval"], few["speed_interval"]) == ("95 %", "range")
    assert few["speedup_interval"] == "95 % together" and base["speedup_interval"] == ""
    ranges = [g["speed"]["is_range"] for g in tables.as_object(found)["groups"]]
    assert ranges == [False, True]


def test_wrong_names_are_told():
    runs = study(noisy(np.random.default_rng(6), 1000, 2))
    with pytest.raises(ConfigError, match="by=bakend: .* did you mean backend"):
        compare(runs, by=["bakend"])
    two = study(runs.runs, noisy(np.random.default_rng(6), 1000, 2, backend="envpool"))
    with pytest.raises(ConfigError, match="baseline=precision: no run has that setting"):
        compare(two, baseline={"precision": "fp32"})
    with pytest.raises(ConfigError, match="no such group; there are backend=gymnasium"):
        compare(two, baseline={"backend": "isaac"})


# -- folders, damaged ones too ---------------------------------------------------------------------


def job(folder: Path, number: int, backend: str) -> None:
    """A finished run as it lies in the folder of its sweep."""
    there = folder / str(number)
    there.mkdir(parents=True)
    run = {"settings": {"backend": {"name": backend}, "env": {"id": "CartPole-v1"}, "seed": number}}
    result = {
        "status": "finished", "run_id": f"r{number}", "seed": number, "reason": None,
        "overrides": [f"backend={backend}", f"seed={number}"], "effective": {"backend": backend},
        "hardware": {"cpu_model": "a CPU", "cpu_budget": 2, "gpus": None},
        "provenance": {"git": "abc", "dirty_files": []}, "bottleneck": None,
        "throughput": {"steady": True, "env_steps_per_s": 1000.0 + number, "compile_s": 0},
        "returns": {"eval_mean": 500.0, "train_mean": None}, "counters": {"env_steps": 2000},
    }  # fmt: skip
    rows = [
        {"step": step, "metrics": {"return/train": step, "throughput/env_steps_per_s": 1000,
                                   "gpu/power_w": 100.0}}
        for step in range(100, 2100, 100)
    ]  # fmt: skip
    (there / "run.json").write_text(json.dumps(run))
    (there / "result.json").write_text(json.dumps(result))
    (there / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def sweep(tmp_path) -> Path:
    folder = tmp_path / "sweep"
    for number in range(8):
        job(folder, number, "envpool" if number > 3 else "gymnasium")
    asked = {"name": "s", "varied": ["backend"], "baseline": "backend=gymnasium"}
    (folder / "study.json").write_text(json.dumps(asked | {"threshold": 900.0}))
    return folder


def changed(path: Path, **values: Any) -> bytes:
    return json.dumps(json.loads(path.read_text()) | values).encode()


BROKEN: list[Any] = [b"", b"{", b"[]", b"3", b"\xff\x00", b'"' * 9, b"[" * 100_000, None]
ODD: dict[str, list[dict[str, Any]]] = {
    "5/result.json": [
        {"status": 5}, {"status": "no word"}, {"overrides": "backend=envpool"}, {"overrides": [1]},
        {"effective": []}, {"provenance": []}, {"provenance": {"git": 1}}, {"hardware": {}},
        {"provenance": {"dirty_files": 1}}, {"hardware": {"cpu_model": "", "cpu_budget": "x"}},
        {"throughput": {"env_steps_per_s": 5}}, {"throughput": []}, {"returns": {"eval_mean": "5"}},
        {"throughput": {"steady": True, "env_steps_per_s": -5}}, {"counters": 3}, {"startup": "no"},
        {"throughput": {"steady": True, "wall_s": {}}}, {"bottleneck": 3}, {"reason": ["a"]},
        {"run_id": {}}, {"name": 3}, {"seed": []}, {"counters": {"env_steps": 10**400}},
    ],
    "5/run.json": [{"settings": 3}, {"settings": [1]}, {"settings": None}],
    "study.json": [
        {"name": 3}, {"varied": "backend"}, {"varied": [3]}, {"baseline": 3}, {"baseline": "x"},
        {"threshold": "900"}, {"threshold": math.nan}, {"process": 3}, {"process": [1]},
        {"process": ["a", "b", "c"]}, {"parent_run_id": 3},
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_a_damaged_file_costs_itself_and_is_named(sweep, name):
    """Empty, half, of another kind, unreadable, a folder; or whole with values of odd types."""
    path = sweep / name
    whole = path.read_bytes()
    for content in [*BROKEN, *(changed(path, **odd) for odd in ODD[name])]:
        path.unlink()
        path.mkdir() if content is None else path.write_bytes(content)
        found = compare(records.from_sweep(sweep))
        (note,) = [note for note in found.notes if f"{name} is damaged" in note]
        base, other = found.groups
        lost = name != "study.json"
        assert (len(base.done), len(other.done)) == (4, 3 if lost else 4)
        assert [run.reason for run in other.failures] == (
            [note.removeprefix("5/")] if "result" in name else []
        )
        path.rmdir() if content is None else path.unlink()
        path.write_bytes(whole)
    assert not any("damaged" in note for note in compare(records.from_sweep(sweep)).notes)


def test_damaged_rows_cost_themselves_and_are_counted(sweep):
    path = sweep / "5" / "metrics.jsonl"
    whole = path.read_bytes()
    odd = [b"{", b"[]", b"3", b"\0\0", b"\xff", b'{"metrics": {"return/train": 1}}',
           b'{"step": 1, "metrics": 3}', b'{"step": "1", "metrics": {"return/train": 1}}',
           b'{"step": 1, "metrics": {"return/train": "1"}}',
           b'{"step": NaN, "metrics": {"return/train": 1}}',
           b'{"step": 1, "metrics": {"return/train": true}}',
           b'{"step": 1, "metrics": {"return/train": 1%s}}' % (b"0" * 400)]  # fmt: skip
    path.write_bytes(b"\n".join(odd) + b"\n" + whole)
    found = compare(records.from_sweep(sweep), threshold=900)
    assert "5/metrics.jsonl: 12 of 32 rows are damaged" in found.notes
    assert found.groups[1].reached == 4
    path.write_bytes(whole + b'{"step": 1')  # torn by a kill
    assert not any("damaged" in note for note in compare(records.from_sweep(sweep)).notes)
    # Without the rows of speed there is no time, and without time no energy.
    path.write_bytes(b'{"step": 100, "metrics": {"gpu/power_w": 1}}\n')
    assert len(compare(records.from_sweep(sweep)).groups[1].done) == 4
    path.unlink()
    path.mkdir()
    (note,) = [n for n in compare(records.from_sweep(sweep)).notes if "metrics.jsonl" in n]
    assert note == "5/metrics.jsonl is damaged (Is a directory)"


def test_where_nothing_whole_is_left_the_door_says_so(sweep, monkeypatch, capsys):
    for file, has in (("run", "settings that are known"), ("result", "finished")):
        for number in range(8):
            (sweep / str(number) / f"{file}.json").write_text("[")
        monkeypatch.setattr("sys.argv", ["compare", f"folder={sweep}"])
        with pytest.raises(SystemExit) as stopped:
            compare_door.main()
        told = capsys.readouterr().err
        assert stopped.value.code == 2 and f"none of its 8 runs has {has}" in told
        assert f"0/{file}.json is damaged (no JSON)" in told


# -- a real store ---------------------------------------------------------------------------------


class Planted:
    """A store with one factorial study: envpool x2.9, bf16 nothing, compile x1.4 with envpool."""

    def __init__(self, root: Path) -> None:
        from rl_pipeline.tracking.store import Store, quiet

        quiet()
        self.root = root
        self.uri = f"sqlite:///{root / 'mlflow.db'}"
        self.store = Store(self.uri)
        self.client = self.store.client
        self.experiment = self.store.experiment_id("synthetic", str(root / "artifacts"))
        self.params = flatten(settings("total_steps=100_000").model_dump(mode="json"))
        self.parent = self.create("planted", {"kind": "study", "study": "planted"})
        self.rng = np.random.default_rng(7)
        for backend in ("gymnasium", "envpool"):
            for precision in ("fp32", "bf16"):
                for mode in ("eager", "default"):
                    speed = 1000 * (2.9 if backend == "envpool" else 1)
                    speed *= 1.4 if (backend, mode) == ("envpool", "default") else 1
                    for seed in (1, 2, 3):
                        self.run(speed, seed, backend, precision, mode)
        failed = self.create("failed", {"mlflow.parentRunId": self.parent, "reason": "a NaN"})
        self.describe(failed, 9, "envpool", "fp32", "eager")
        self.client.set_terminated(failed, "FAILED")
        lost = {"overrides": ["backend=envpool", "precision=fp32", "compile=eager", "seed=8"],
                "reason": "killed by signal 9"}  # fmt: skip
        self.client.set_tag(self.parent, "lost_jobs", "1")
        self.client.set_tag(self.parent, "lost_jobs.0", json.dumps(lost))
        self.client.set_terminated(self.parent, "FAILED")

    def create(self, name, tags):
        return self.client.create_run(self.experiment, tags=tags, run_name=name).info.run_id

    def describe(self, run, seed, backend, precision, mode):
        from mlflow.entities import Param, RunTag

        asked = {**self.params, "backend.name": backend, "precision.name": precision,
                 "compile.name": mode, "seed": seed}  # fmt: skip
        effective = {"backend": backend, "precision": precision, "compile": mode, "device": "cpu",
                     "num_envs": "8", "threads.envs": "1"}  # fmt: skip
        tags = {f"effective.{k}": v for k, v in effective.items()} | {"machine": NO_GPU}
        self.client.log_batch(
            run, params=[Param(k, str(v)) for k, v in asked.items()],
            tags=[RunTag(k, v) for k, v in tags.items()],
        )  # fmt: skip

    def run(self, speed, seed, backend, precision, mode):
        from mlflow.entities import Metric

        name = f"{backend} {precision} {mode} {seed}"
        run = self.create(name, {"mlflow.parentRunId": self.parent, "study": "planted"})
        self.describe(run, seed, backend, precision, mode)
        speed *= math.exp(self.rng.normal(0, 0.02))
        steps = np.linspace(5000, STEPS, 20).astype(int)
        points = [
            Metric(key, float(value), int(1000 * step / speed), int(step))
            for step in steps
            for key, value in {
                "return/train": 20 + 480 * step / STEPS, "throughput/env_steps_per_s": speed,
            }.items()
        ]  # fmt: skip
        final = {"env_steps_per_s": speed, "steady": 1, "env_steps": STEPS, "eval_mean": 500}
        points += [Metric(f"result/{k}", v, 0, STEPS) for k, v in final.items()]
        points.append(Metric("return/eval", 500.0 - seed, 0, STEPS))
        self.client.log_batch(run, metrics=points)
        self.client.set_terminated(run, "FINISHED")


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> Planted:
    return Planted(tmp_path_factory.mktemp("planted"))


def test_a_planted_truth_is_recovered_from_a_store(planted):
    found = compare(records.from_store(planted.store, "planted"))
    assert found.by == ["backend", "precision", "compile"]
    assert len(found.groups) == 8
    assert found.return_metric == "return/eval"
    truth = {"envpool": 2.9, "gymnasium": 1.0}
    for group in found.groups[1:]:
        expected = truth[group.levels["backend"]]
        if group.levels["backend"] == "envpool" and group.levels["compile"] == "default":
            expected *= 1.4
        assert group.speedup.value == pytest.approx(expected, rel=0.06)
        # By seed the same was planted; of jobs that failed nobody knows.
        assert group.parity.verdict == ("incomplete" if group.failures else "identical")
    answer = "; ".join(found.answer)
    assert answer.startswith("envpool x3.")
    assert "bf16 no difference" in answer
    assert "default x1.4" in answer and answer.endswith("only with envpool")
    (depends,) = found.interactions
    assert not depends.ratio.excludes(1.4)
    failures = by_name(found, "backend=envpool precision=fp32 compile=eager").failures
    assert sorted(run.reason for run in failures) == ["a NaN", "killed by signal 9"]


def test_a_study_is_found_by_name_and_by_id_and_its_latest_is_meant(planted, capsys):
    assert records.from_store(planted.store, planted.parent).name == "planted"
    with pytest.raises(ConfigError, match="did you mean planted.; there are: planted"):
        records.from_store(planted.store, "plantd")
    one = records.from_store(planted.store, "planted").runs[0]
    assert records.from_store(planted.store, None, [one.id]).runs[0].settings == one.settings


def test_changed_code_is_told_of_runs_in_a_store(planted):
    run_id = records.from_store(planted.store, "planted").runs[0].id

    def commit() -> str:
        return records.from_store(planted.store, None, [run_id]).runs[0].commit

    planted.client.set_tag(run_id, "mlflow.source.git.commit", "0123456789")
    assert commit() == "0123456"
    planted.client.set_tag(run_id, "changed_code", "a.py")
    assert commit() == "0123456+"
    planted.client.delete_tag(run_id, "changed_code")
    planted.client.delete_tag(run_id, "mlflow.source.git.commit")


def test_damaged_tags_of_a_study_cost_themselves_and_are_named(planted):
    """A threshold that is no number, a lost job in half."""
    client = planted.client
    client.set_tag(planted.parent, "study.threshold", "high")
    client.set_tag(planted.parent, "lost_jobs.1", '{"overrides": 3')
    client.set_tag(planted.parent, "lost_jobs", "many")
    try:
        found = records.from_store(planted.store, "planted")
        assert found.threshold is None and len(found.runs) == 26
        assert [text for text in compare(found).notes if "damaged" in text] == list(found.damage)
        assert "lost_jobs.1" in found.damage[0] and "'threshold': 'high'" in found.damage[1]
    finally:
        client.set_tag(planted.parent, "lost_jobs", "1")
        for tag in ("study.threshold", "lost_jobs.1"):
            client.delete_tag(planted.parent, tag)


def test_a_run_that_was_made_good_later_is_no_failure():
    good, bad = record(1), record(1)
    bad = RunRecord(**{**vars(bad), "status": "failed", "started": 1.0})
    good = RunRecord(**{**vars(good), "started": 2.0})
    other = RunRecord(**{**vars(bad), "name": "another job"})
    assert records._without_replaced([bad, other, good]) == [other, good]
    # A seed that is drawn anew changes neither the job nor its overrides.
    bad, good = (replace(run, job="a", seed=run.status) for run in (bad, good))
    assert records._without_replaced([bad, good]) == [good]


def test_the_door_writes_the_page_and_logs_it_to_the_parent(planted, tmp_path):
    cli = Cli(tmp_path)
    out = cli(
        "study=planted", "by=backend,precision,compile", "baseline=backend=gymnasium",
        f"uri={planted.uri}", "threshold=300", "margin=25", module="rl_pipeline.compare",
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    for words in ("envpool bf16", "only with envpool", "killed by signal 9", "margin 25.0"):
        assert words in out.stdout
    folder = tmp_path / "comparison"
    page = (folder / "index.html").read_text()
    for words in ("<svg", "id=pareto", "id=curves", "id=effects", "only with envpool", "a NaN"):
        assert words in page
    # Self-contained: nothing is fetched.
    assert "<script" not in page and "src=" not in page and 'href="http' not in page
    rows = list(csv.DictReader((folder / "groups.csv").open()))
    assert len(rows) == 8 and float(rows[-1]["steps_to"]) > 50_000
    # Against the same precision and compile on gymnasium.
    fast = [r for r in rows if r["backend"] == "envpool" and r["compile"] == "default"]
    assert all(float(r["speedup"]) == pytest.approx(2.9 * 1.4, rel=0.06) for r in fast)
    found = json.loads((folder / "comparison.json").read_text())
    assert len(found["groups"]) == 8 and found["groups"][0]["runs"][0]["env_steps_per_s"] > 900
    assert (folder / "table.md").read_text().startswith("| setting |")
    # Beside the sweep's answer and not in its place.
    place = "comparison-by-backend-precision-compile-baseline-backend-gymnasium-threshold-300.0"
    place += "-margin-25.0"
    names = {a.path for a in planted.client.list_artifacts(planted.parent, place)}
    assert {f"{place}/index.html", f"{place}/table.md", f"{place}/groups.csv"} <= names
    assert not planted.client.list_artifacts(planted.parent, "comparison")
    assert "answer" not in planted.client.get_run(planted.parent).data.tags


def test_a_study_is_compared_as_its_sweep_did_where_nothing_else_is_asked(planted, monkeypatch):
    """The door itself, up to the files and their way into the store (see the test before)."""
    logged: list[tuple[Any, ...]] = []

    def ask(**question: Any) -> Comparison:
        found: list[Comparison] = []
        monkeypatch.setattr(tables, "write_comparison", lambda c, _: found.append(c) or [])
        monkeypatch.setattr(
            tracker, "end_parent", lambda *a, artifact_path: logged.append((artifact_path, a[3]))
        )
        compare_door.run(compare_door.CompareSettings(study="planted", uri=planted.uri, **question))
        return found[0]

    client = planted.client
    client.set_tag(planted.parent, "baseline", "backend=envpool,precision=bf16")
    client.set_tag(planted.parent, "study.threshold", "300.0")
    try:
        found = ask()
        assert found.groups[0].name.startswith("backend=envpool precision=bf16 ")
        assert found.threshold == 300
        assert logged[-1][0] == "comparison" and logged[-1][1]["answer"]
        # What is asked now wins; of a baseline the part that makes groups here.
        found = ask(by="backend", threshold=200)
        assert found.groups[0].name == "backend=envpool"
        assert found.threshold == 200
        assert logged[-1] == ("comparison-by-backend-threshold-200.0", {})
    finally:
        for tag in ("baseline", "study.threshold"):
            client.delete_tag(planted.parent, tag)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["studdy=planted"], "studdy is not an argument; did you mean study?"),
        (["study=plantd"], "no such study in this store; did you mean planted?"),
        (
            ["study=planted", "by=bakend"],
            "by=bakend: no run has that setting; did you mean backend",
        ),
        (["study=planted", "margin=-1"], "margin=-1: "),
        (["study=planted", "by=\x1b[31m"], r"by=\x1b[31m: no run has that setting"),
        (["study=planted", "by=[a"], "by=a: no run has that setting"),
        (["study=${a}"], "study=${a}: no such study"),
        ([], "give one of study="),
    ],
)
def test_misspelt_arguments_get_the_nearest_valid_ones(
    planted, monkeypatch, capsys, arguments, words
):
    from rl_pipeline import compare as door

    monkeypatch.setattr("sys.argv", ["compare", f"uri={planted.uri}", *arguments])
    with pytest.raises(SystemExit) as stopped:
        door.main()
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def test_a_study_whose_sweep_died_is_marked_when_the_store_is_read_next(planted):
    tags = {"kind": "study", "study": "dead"}
    process = json.dumps([socket.gethostname(), 2**22 + 1, 0.0])
    dead = planted.create("dead", {**tags, "process": process})
    far = planted.create("far", {**tags, "study": "far", "process": '["elsewhere", 1, 0.0]'})
    orphans.end_dead(planted.store)
    with sqlite3.connect(planted.root / "mlflow.db") as db:
        status = dict(db.execute("select run_uuid, status from runs").fetchall())
    assert status[dead] == "KILLED" and status[far] == "RUNNING"
    planted.client.delete_run(dead)
    planted.client.delete_run(far)


def test_the_front_of_speed_and_return_has_no_point_that_another_beats():
    from rl_pipeline.comparison.figures import pareto_front

    points = [(1.0, 5.0), (2.0, 4.0), (2.0, 3.0), (3.0, 1.0), (0.5, 4.5)]
    assert pareto_front(points) == [(1.0, 5.0), (2.0, 4.0), (3.0, 1.0)]
