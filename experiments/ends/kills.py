"""200 kills at random moments: does every run go on, with nothing lost, doubled or left behind?

Run by `make try-ends`. A kill that has its line in results/kills.jsonl is skipped, so the gauge
can be stopped and continued. Each starts a run, ends it by a signal in a chosen stage, resumes it
(a third of them are killed once more), and looks at everything that is left.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "kills.jsonl"
RUNS = HERE / "runs"
SIGNALS = ("SIGINT", "SIGTERM", "SIGKILL")
STAGES = ("start-up", "training", "checkpoint", "flush", "evaluation", "end")
COMMON = (
    "backend=gymnasium", "env=cartpole", "log_every_s=0.2", "eval.episodes=4", "eval.num_envs=2",
    "tracking.flush_s=0.5",
)  # fmt: skip
KINDS = {
    "ppo": ("total_steps=12000", "checkpoint.every_steps=3000", "eval.every_steps=3000"),
    "dqn": (
        "algo=dqn", "buffer=prioritized", "buffer.capacity=4000", "total_steps=6000",
        "checkpoint.every_steps=1500", "eval.every_steps=1500", "algo.learning_starts=500",
    ),
}  # fmt: skip
SEEDS = (1, 2, 3)
GIVE_UP_S = 600.0
MARK = "RL_PIPELINE_GAUGE"


class Trial:
    """One kill and what came of it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.chance = random.Random(number)
        self.kind = self.chance.choice(list(KINDS))
        self.seed = self.chance.choice(SEEDS)
        self.signal = SIGNALS[number % len(SIGNALS)]
        self.stage = STAGES[number // len(SIGNALS) % len(STAGES)]
        # A fresh store is made in the start-up: that is when its making can be cut short.
        lane = f"fresh-{number}" if self.stage == "start-up" else f"lane-{number % 8}"
        self.cwd = RUNS / lane
        self.folder = self.cwd / "outputs" / f"run-{number}"
        self.trouble: list[str] = []
        self.env = os.environ | {MARK: str(number)}

    def run(self) -> dict[str, Any]:
        """Kill, resume, look; returns the line that is kept."""
        self.cwd.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        first = [*KINDS[self.kind], *COMMON, f"seed={self.seed}", f"hydra.run.dir={self.folder}"]
        ended = self._kill(first, self.stage)
        again = self.chance.random() < 1 / 3
        said = None
        for attempt in range(4):
            if not (self.folder / "run.json").exists():
                said = "left nothing" if not self.folder.exists() else "left no run"
                break
            if self._result().get("status") == "finished" and attempt == 0 and ended == 0:
                break  # the signal came after the end
            line = [f"resume={self.folder}"]
            if attempt == 0 and again and self._result().get("status") != "finished":
                self._kill(line, "training")
                continue
            code, text = self._train(line)
            if code == 0:
                break
            last = next((x for x in text.splitlines() if x.startswith("error: ")), "")
            if code == 2 and ("left no checkpoint" in last or "has finished" in last):
                said = last
                break
            self.trouble.append(f"resume ended with {code}: {text[-400:]}")
            break
        return self._look(ended, said)

    def _kill(self, overrides: list[str], stage: str) -> int:
        process = subprocess.Popen(
            [sys.executable, "-m", "rl_pipeline.train", *overrides], cwd=self.cwd, env=self.env,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._await(stage, process)
        over = process.poll() is not None or self._is_over()
        process.send_signal(signal.Signals[self.signal])
        asked = time.monotonic()
        _, text = process.communicate()
        took, code = time.monotonic() - asked, process.returncode
        number = signal.Signals[self.signal].value
        expected = (0, -9) if self.signal == "SIGKILL" else (0, 128 + number)
        if code not in expected:
            self.trouble.append(f"exit code {code} after {self.signal}: {text[-300:]}")
        status = self._result().get("status")
        if code == 0 and status != "finished" or code == 128 + number and status == "finished":
            self.trouble.append(f"exit code {code}, status {status}")
        if code == 0 and not over:
            self.trouble.append(f"{self.signal} changed nothing")
        if took > 10:
            self.trouble.append(f"took {took:.0f} s to end")
        if code == 128 + number and "resume=" in text:
            line = next(x for x in text.splitlines() if "resume=" in x)
            shown = shlex.split(line)[-1].removeprefix("resume=")
            if (self.cwd / shown).resolve() != self.folder.resolve():
                self.trouble.append(f"the line to continue is wrong: {line}")
        if "Traceback" in text:
            self.trouble.append(f"a traceback: {text[-400:]}")
        return code

    def _await(self, stage: str, process: subprocess.Popen[str]) -> None:
        """Wait for a moment of the stage, or for the end of the process."""
        checkpoints = self.folder / "checkpoints"
        begin = time.monotonic()

        def until(ready: Any) -> None:
            while not ready() and process.poll() is None and time.monotonic() - begin < GIVE_UP_S:
                time.sleep(0.0005)

        def size(name: str) -> int:
            path = self.folder / name
            return path.stat().st_size if path.exists() else 0

        match stage:
            case "start-up":
                time.sleep(self.chance.uniform(0.2, 6))
            case "training":
                until(lambda: size("metrics.jsonl"))
                time.sleep(self.chance.uniform(0, 2))
            case "checkpoint":
                for _ in range(self.chance.randint(1, 3)):
                    until(lambda: not any(checkpoints.glob("*.tmp")))
                    until(lambda: any(checkpoints.glob("*.tmp")))
            case "flush":
                until(lambda: size("metrics.jsonl"))
                before = (
                    (self.folder / "mlflow.json").stat().st_mtime_ns if size("mlflow.json") else 0
                )
                until(
                    lambda: (
                        size("mlflow.json")
                        and (self.folder / "mlflow.json").stat().st_mtime_ns != before
                    )
                )
                time.sleep(self.chance.uniform(0, 0.02))
            case "evaluation":
                done = len(list(checkpoints.glob("step-*.pt")))
                until(lambda: len(list(checkpoints.glob("step-*.pt"))) > done)
                time.sleep(self.chance.uniform(0, 0.1))
            case "end":
                until(lambda: size("result.json"))
                time.sleep(self.chance.uniform(0, 1))

    def _train(self, overrides: list[str]) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "rl_pipeline.train", *overrides], cwd=self.cwd, env=self.env,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=GIVE_UP_S,
        )  # fmt: skip
        return done.returncode, done.stderr

    def _is_over(self) -> bool:
        """Whether the run has had its last env step."""
        steps = [int(p.stem[5:]) for p in self.folder.glob("checkpoints/step-*.pt")]
        total = next(x for x in KINDS[self.kind] if x.startswith("total_steps="))
        return max(steps, default=0) >= int(total[12:]) or (self.folder / "result.json").exists()

    def _result(self) -> dict[str, Any]:
        path = self.folder / "result.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def _look(self, ended: int, said: str | None) -> dict[str, Any]:
        result = self._result()
        if said == "left no run" and self.signal == "SIGKILL":
            # Nothing can clean up after itself then: that is what the doctor is for.
            line = [sys.executable, "-m", "rl_pipeline.doctor"]
            subprocess.run(line, cwd=self.cwd, env=self.env, capture_output=True, check=False)
        self._leftovers()
        exact = None
        if self.folder.exists() and (self.folder / "run.json").exists():
            self._rows()
            if said is None or "has finished" in said:
                if result.get("status") != "finished":
                    self.trouble.append(f"status {result.get('status')}")
                exact = self._equal()
                if self.kind == "ppo" and not exact:
                    self.trouble.append("the weights differ from the uninterrupted run's")
        elif self.folder.exists():
            self.trouble.append(f"a folder without a run: {os.listdir(self.folder)}")
        return {
            "number": self.number, "kind": self.kind, "signal": self.signal, "stage": self.stage,
            "exit_code": ended, "said": said, "exact": exact, "trouble": self.trouble,
        }  # fmt: skip

    def _rows(self) -> None:
        """Every value once in the local record, and the same ones in the store."""
        rows = [json.loads(x) for x in (self.folder / "metrics.jsonl").read_text().splitlines()]
        points = [(row["step"], name) for row in rows for name in row["metrics"]]
        if twice := len(points) - len(set(points)):
            self.trouble.append(f"{twice} doubled values in metrics.jsonl")
        path = self.folder / "mlflow.json"
        state = json.loads(path.read_text()) if path.exists() else {}
        if not state.get("finished"):
            self.trouble.append(f"not shipped: {state.get('trouble')}")
            return
        with sqlite3.connect(f"file:{self.cwd / 'mlflow.db'}?mode=ro", uri=True, timeout=60) as db:
            stored = db.execute(
                "select step, key from metrics where run_uuid = ? and key not like 'system/%' "
                "and key not like 'result/%' and key not like 'nonfinite/%'", (state["run_id"],),
            ).fetchall()  # fmt: skip
        if len(stored) != len(set(stored)):
            self.trouble.append("doubled values in the store")
        if lost := set(points) - set(stored):
            self.trouble.append(f"{len(lost)} values are not in the store, e.g. {min(lost)}")

    def _equal(self) -> bool:
        last = max((self.folder / "checkpoints").glob("step-*.pt"))
        mine = torch.load(last, weights_only=True)["learner"]["params"]
        return torch.equal(mine, reference(self.kind, self.seed))

    def _leftovers(self) -> None:
        deadline = time.monotonic() + 60
        while (left := self._processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        if left:
            self.trouble.append(f"processes are left: {left}")
        if self.folder.exists():
            names = [p.name for p in self.folder.rglob("*")]
            bad = [n for n in names if re.search(r"\.tmp$|\.lock$|^\.room$", n)]
            if bad:
                self.trouble.append(f"left in the folder: {bad}")

    def _processes(self) -> list[str]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(self.number):
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:
                pass
        return found


def reference(kind: str, seed: int) -> torch.Tensor:
    """The final weights of the uninterrupted run."""
    folder = RUNS / "reference" / f"{kind}-{seed}"
    if not (folder / "result.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        line = [*KINDS[kind], *COMMON[:-1], f"seed={seed}", "tracking=none"]
        subprocess.run(
            [sys.executable, "-m", "rl_pipeline.train", *line, f"hydra.run.dir={folder}"],
            check=True, capture_output=True,
        )  # fmt: skip
    last = max((folder / "checkpoints").glob("step-*.pt"))
    return torch.load(last, weights_only=True)["learner"]["params"]


def main(count: int = 200, at_once: int = 2) -> int:
    """Run what is missing; prints the tally, returns the number of kills that left trouble."""
    RESULTS.parent.mkdir(exist_ok=True)
    # A shell ignores it for what it starts in the background, and that is passed on.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    done = {entry["number"]: entry for entry in map(json.loads, lines)}
    for kind in KINDS:
        for seed in SEEDS:
            reference(kind, seed)
    missing = [n for n in range(count) if n not in done]
    with ThreadPoolExecutor(at_once) as pool, RESULTS.open("a", buffering=1) as file:
        # Two of one lane never run at once: they share a store, as two runs of a user do.
        for entry in pool.map(lambda n: Trial(n).run(), missing):
            done[entry["number"]] = entry
            file.write(json.dumps(entry) + "\n")
            told = "; ".join(entry["trouble"]) or entry["said"] or "went on"
            head = f"{entry['number']:4} {entry['kind']} {entry['signal']:8}{entry['stage']:11}"
            print(head, told, flush=True)
            if not entry["trouble"]:
                shutil.rmtree(Trial(entry["number"]).folder, ignore_errors=True)
    return sum(bool(done[n]["trouble"]) for n in range(count))
