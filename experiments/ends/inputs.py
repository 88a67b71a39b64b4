"""100 generated bad inputs: each is refused in a plain sentence, and nothing is half-written.

Run by `make try-ends`. Wrong types and sizes, values that are no numbers, paths, stores, and the
records and checkpoints of runs that are cut, foreign or hostile.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "inputs.jsonl"
RUNS = HERE / "runs"
QUICK_RUN = ("tracking=none", "eval.episodes=0", "total_steps=600", "seed=1")
NUMBERS = (
    "total_steps", "log_every_s", "max_wall_s", "eval.episodes", "eval.every_steps", "seed",
    "eval.num_envs", "checkpoint.every_steps", "checkpoint.keep_last", "backend.num_envs",
    "env.max_episode_steps", "network.hidden", "algo.horizon", "algo.num_epochs",
    "algo.num_minibatches", "algo.learning_rate", "algo.gamma", "algo.gae_lambda",
    "algo.ratio_clip", "algo.entropy_coef", "algo.max_grad_norm", "tracking.flush_s",
)  # fmt: skip
WRONG = ("abc", "-1", "nan", "inf", "-inf", "[]", "{a: 1}", "true", "1.5e", "0x", "''", "1,2")
HUGE = {
    "backend.num_envs": "1e9", "algo.horizon": "1e12", "network.hidden": "[1e9]",
    "backend.lanes": "1e9", "algo.num_minibatches": "1e9",
}  # fmt: skip
OPTIONS = ("env", "backend", "algo", "network", "buffer", "device", "precision", "compile", "mode",
           "profile", "tracking", "recipe", "experiment", "debug", "sweep")  # fmt: skip
PATHS = {
    "hydra.run.dir": ("/proc/run", "/dev/null", "/dev/null/run", "/sys/run", "taken"),
    "resume": ("nowhere", "/", "taken", "run/run.json", "x" * 5000, "'\\0'"),
    "tracking.uri": ("file:///x", "ftp://h", "http://", "http://127.0.0.1:99999", "http://[::1",
                     "sqlite://", "postgresql://u:PW@h/db", "x", "http://u:PW@h", "sqlite:///taken/x"),
}  # fmt: skip


class Hostile:
    """Writes a file if anything ever unpickles it."""

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {RUNS / 'pwned'}",))


def _cut(path: Path, chance: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data))])


def _noise(path: Path, chance: random.Random) -> None:
    path.write_bytes(chance.randbytes(chance.randrange(1, 3000)))


def _flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    # In the middle: an archive's padding and dates may change without harm.
    place = chance.randrange(len(data) // 3, len(data) // 2)
    data[place] ^= 1 << chance.randrange(8)
    path.write_bytes(bytes(data))


def _foreign(path: Path, chance: random.Random) -> None:
    if path.suffix == ".pt":
        torch.save(chance.choice([[1, 2], {"a": 1}, {"format": 99}, torch.zeros(3)]), path)
    else:
        path.write_text(json.dumps(chance.choice([[], {}, {"run_id": 3}, {"settings": 1}, "x"])))


def _hostile(path: Path, chance: random.Random) -> None:
    if chance.random() < 0.5:
        path.write_bytes(pickle.dumps(Hostile()))
    else:
        torch.save({"format": 1, "learner": Hostile()}, path)


def _folder(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path, random.Random], None]] = {
    "cut": _cut, "noise": _noise, "flipped": _flip, "foreign": _foreign, "hostile": _hostile,
    "a folder": _folder,
}  # fmt: skip


def generate(number: int, folder: Path) -> tuple[str, list[str], list[str]]:
    """The number-th input, made in `folder`: its kind, the overrides, words one must be told."""
    chance = random.Random(1000 + number)
    kind = ("type", "size", "option", "path", "checkpoint", "record", "key")[number % 7]
    match kind:
        case "type":
            key = chance.choice(NUMBERS)
            wrong = [w for w in WRONG if not (key == "network.hidden" and w in ("[]", "{a: 1}"))]
            return kind, [*QUICK_RUN, f"{key}={chance.choice(wrong)}"], [key]
        case "size":
            key = chance.choice(list(HUGE))
            return kind, [*QUICK_RUN, f"{key}={HUGE[key]}"], [key]
        case "option":
            group = chance.choice(OPTIONS)
            return kind, [f"{group}=nonesuch"], [group]
        case "key":
            key = chance.choice(("algo.lr", "env.nothing", "hidden", "backend.threads", "eval.x"))
            return kind, [*QUICK_RUN, f"{chance.choice(('', '+'))}{key}=1"], [key]
        case "path":
            key = chance.choice(list(PATHS))
            (folder / "taken").write_text("mine")
            line = [x for x in QUICK_RUN if not (key == "tracking.uri" and "tracking" in x)]
            return kind, [*line, f"{key}={chance.choice(PATHS[key])}"], [key, "tracking.uri"]
    run = folder / "run"
    shutil.copytree(RUNS / "stopped", run)
    names = ["run.json"] if kind == "record" else [p.name for p in run.glob("checkpoints/step-*")]
    how = chance.choice(
        [h for h in DAMAGE if kind == "checkpoint" or h not in ("flipped", "hostile")]
    )
    for path in [p for p in run.rglob("*") if p.name in names]:
        DAMAGE[how](path, chance)
    return f"{kind}, {how}", ["resume=run", "total_steps=2000"], names


def try_one(number: int) -> dict[str, Any]:
    """Give the product one bad input, and look at its answer."""
    folder = RUNS / f"input-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    kind, line, words = generate(number, folder)
    before = _snapshot(folder)
    environ = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")}
    done = subprocess.run(
        [sys.executable, "-m", "rl_pipeline.train", *line], cwd=folder, capture_output=True,
        text=True, stdin=subprocess.DEVNULL, timeout=600, env=environ,
    )  # fmt: skip
    trouble = []
    if done.returncode == 0:
        trouble.append("accepted")
    if "Traceback" in done.stderr:
        trouble.append(f"a traceback: {done.stderr.strip().splitlines()[-1][:200]}")
    if not any(word in done.stderr for word in words):
        trouble.append(f"names none of {words}: {done.stderr[-200:]}")
    if "PW" in done.stderr + done.stdout:
        trouble.append("shows a password")
    if changed := before ^ _snapshot(folder):
        trouble.append(f"wrote {sorted(name for name, _ in changed)[:4]}")
    if (RUNS / "pwned").exists():
        (RUNS / "pwned").unlink()
        trouble.append("RAN CODE")
    said = next((x for x in done.stderr.splitlines() if x.startswith("error")), "")
    if not trouble:
        shutil.rmtree(folder)
    return {
        "number": number, "kind": kind, "line": " ".join(line)[:200], "exit_code": done.returncode,
        "said": said[:300], "trouble": trouble,
    }  # fmt: skip


def _snapshot(folder: Path) -> set[tuple[str, str]]:
    files = [p for p in folder.rglob("*") if ".damaged" not in p.name]
    return {
        (str(p.relative_to(folder)),
         hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else "")
        for p in files
    }  # fmt: skip


def main(count: int = 100, at_once: int = 2) -> int:
    """Try what is missing; prints the answers, returns how many were bad."""
    RESULTS.parent.mkdir(exist_ok=True)
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    done = {entry["number"]: entry for entry in map(json.loads, lines)}
    stopped = RUNS / "stopped"
    if not (stopped / "result.json").exists():
        subprocess.run(
            [sys.executable, "-m", "rl_pipeline.train", "tracking=none", "total_steps=1500",
             "seed=1", "checkpoint.every_steps=700", f"hydra.run.dir={stopped}"],
            check=True, capture_output=True,
        )  # fmt: skip
    missing = [n for n in range(count) if n not in done]
    with ThreadPoolExecutor(at_once) as pool, RESULTS.open("a", buffering=1) as file:
        for entry in pool.map(try_one, missing):
            done[entry["number"]] = entry
            file.write(json.dumps(entry) + "\n")
            print(f"{entry['number']:4} {'; '.join(entry['trouble']) or entry['said']}", flush=True)
    return sum(bool(done[n]["trouble"]) for n in range(count))
