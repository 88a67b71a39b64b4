"""How runs end: 200 kills and 100 bad inputs, and their tallies. Run by `make try-ends`."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

from experiments import frame
from experiments.ends import inputs, kills

HERE = Path(__file__).parent


def tally(path: Path, key: str) -> str:
    """One row a kind, in Markdown: how many, how many were clean."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    clean = Counter(entry[key].split(",")[0] for entry in entries if not entry["trouble"])
    every = Counter(entry[key].split(",")[0] for entry in entries)
    rows = [f"| {name} | {clean[name]} of {every[name]} |" for name in sorted(every)]
    return "\n".join([f"| {key} | as promised |", "| --- | --- |", *rows]) + "\n"


def tell() -> None:
    """Write the tallies into README.md."""
    body = ""
    if kills.RESULTS.exists():
        entries = [json.loads(line) for line in kills.RESULTS.read_text().splitlines()]
        exact = [entry for entry in entries if entry["kind"] == "ppo" and entry["exact"]]
        ended = Counter(
            entry["said"].split(": ")[-1].split(" (")[0] if entry["said"] else "went on to the end"
            for entry in entries
        )
        body += (
            f"{len(entries)} kills, {sum(not e['trouble'] for e in entries)} as promised; "
            f"{len(exact)} PPO runs ended bit for bit as the uninterrupted one.\n\n"
            f"{tally(kills.RESULTS, 'stage')}\n{tally(kills.RESULTS, 'signal')}\n"
            + "\n".join(f"- {n} x {what}" for what, n in ended.most_common())
            + "\n\n"
        )
    if inputs.RESULTS.exists():
        body += f"{tally(inputs.RESULTS, 'kind')}"
    frame.tell(HERE, body)


def main() -> None:
    """Run what is missing of both, write the tallies; exit code 1 if one was not as promised."""
    frame.refuse_changes()
    at_once = int(os.environ.get("JOBS", "2"))
    if frame.QUICK:
        for module in (kills, inputs):
            module.RESULTS = module.RUNS / f"quick-{module.RESULTS.name}"
            module.RESULTS.unlink(missing_ok=True)
        sys.exit(bool(kills.main(18, at_once) + inputs.main(21, at_once)))
    bad = kills.main(at_once=at_once) + inputs.main(at_once=at_once)
    tell()
    print(f"{bad} of 300 were not as promised; tallies in {HERE / 'README.md'}")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
