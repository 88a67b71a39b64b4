"""Did this checkout become slower than another commit? `make perf-gate BASE=<commit>`.

    python -m experiments.perf_gate.study base=main~3 pairs=8 cases=ppo_eager,dqn

Whole runs of both in pairs whose order changes, each in a process of its own and of equal seed; the
interval is that of the mean log ratio (95 %, Student's t). Slower: the interval lies below 0.97.
Not slower: it lies above. Open: it holds 0.97; more pairs will tell. Exit code 1 if a case is
slower, 3 if one is open.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator

from rl_pipeline.comparison import tables
from rl_pipeline.config import cli
from rl_pipeline.config.app import refusing
from rl_pipeline.config.settings import Frozen, PositiveInt
from rl_pipeline.diagnosis.trial import ratio_of
from rl_pipeline.errors import ConfigError
from rl_pipeline.machine import module_environment

ROOT = Path(__file__).resolve().parents[2]
RULE = 0.97
CASES = {
    "ppo_eager": ("experiment=speed_cartpole_ppo", "compile=eager"),
    "ppo": ("experiment=speed_cartpole_ppo", "compile=default", "total_steps=200000"),
    "dqn": ("experiment=speed_cartpole_dqn", "compile=eager", "total_steps=30000"),
    "pong": ("experiment=speed_pong_ppo", "compile=eager", "total_steps=8192"),
}


class Options(Frozen):
    """What to compare."""

    base: str
    """Any name that git has for a commit."""
    pairs: PositiveInt = 6
    """Pairs of runs a case; 2 are the least that have an interval."""
    cases: Annotated[tuple[str, ...], BeforeValidator(cli.names)] = ("ppo_eager", "ppo", "dqn")
    """Of ppo_eager, ppo, dqn, pong."""


def rate(code: Path, overrides: tuple[str, ...], seed: int, folder: Path) -> float:
    """Steady env steps/s of one run of the code in a checkout."""
    shutil.rmtree(folder, ignore_errors=True)
    environment = module_environment() | {"PYTHONPATH": str(code)}
    command = [
        sys.executable, "-m", "rl_pipeline.train", *overrides, f"seed={seed}", "tracking=none",
        "eval.episodes=1", f"hydra.run.dir={folder}",
    ]  # fmt: skip
    out = subprocess.run(command, env=environment, cwd=folder.parent, capture_output=True)
    if out.returncode:
        raise ConfigError(f"{code}: {out.stderr.decode(errors='replace').strip()[-600:]}")
    return float(json.loads((folder / "result.json").read_text())["throughput"]["env_steps_per_s"])


def verdict(low: float, high: float) -> str:
    """slower, not slower or open, by the rule."""
    if high < RULE:
        return "slower"
    return "not slower" if low > RULE else "open"


def main() -> None:
    """Run the pairs and judge."""
    with refusing("see the head of experiments/perf_gate/study.py"):
        options = cli.parse(Options, sys.argv[1:])
        if wrong := [name for name in options.cases if name not in CASES]:
            raise ConfigError(f"cases={wrong[0]}: choose from {', '.join(CASES)}")
        git = ["git", "-C", str(ROOT)]
        known = subprocess.run(
            [*git, "rev-parse", "--verify", "--quiet", f"{options.base}^{{commit}}"],
            capture_output=True, text=True,
        )  # fmt: skip
        if known.returncode:
            raise ConfigError(f"base={options.base} is no commit here; give one that git knows")
    verdicts, rows = [], []
    with tempfile.TemporaryDirectory() as scratch:
        base, folder = Path(scratch) / "base", Path(scratch) / "run"
        archive = subprocess.run([*git, "archive", known.stdout.strip()], capture_output=True)
        base.mkdir()
        subprocess.run(["tar", "x", "-C", str(base)], input=archive.stdout, check=True)
        for name in options.cases:
            # Each builds what it compiles once, before it is measured.
            for code in (base, ROOT):
                rate(code, CASES[name], 0, folder)
            ratios = []
            for pair in range(options.pairs):
                order = (base, ROOT) if pair % 2 == 0 else (ROOT, base)
                rates = {code: rate(code, CASES[name], pair + 1, folder) for code in order}
                ratios.append(rates[ROOT] / rates[base])
                print(f"{name}, pair {pair + 1}: {ratios[-1]:.3f}", flush=True)
            mean, low, high = ratio_of(ratios)
            verdicts.append(verdict(low, high))
            rows.append([
                name, f"{mean:.3f}x", f"{low:.3f} to {high:.3f}", str(len(ratios)), verdicts[-1],
            ])  # fmt: skip
    print(f"this checkout over {options.base}, env steps/s:\n")
    print(tables.markdown(["case", "ratio", "95 % interval", "pairs", "verdict"], rows))
    if os.getloadavg()[0] > (os.cpu_count() or 1):
        print("the machine was busy: measure again on a quiet one")
    sys.exit(1 if "slower" in verdicts else 3 if "open" in verdicts else 0)


if __name__ == "__main__":
    main()
