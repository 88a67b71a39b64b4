"""Provenance of a result: code, versions, machine, command."""

from __future__ import annotations

import platform
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = (
    "rl_pipeline", "torch", "numpy", "gymnasium", "envpool", "mlflow", "hydra-core", "ale-py",
    "mujoco", "ray",
)  # fmt: skip
_DIRTY_FILES = 20
_NO_CODE = re.compile(r"experiments/.*(\.jsonl?|/)$|.*\.(md|csv|png|log|db)$")


def provenance(cwd: Path) -> dict[str, Any]:
    """Facts for result.json's `provenance`; `git` is the commit, null outside a repository.

    `dirty` tells of any change against that commit, `dirty_files` names the first of them.
    """
    commit = _git(cwd, "rev-parse", "HEAD")
    changes = _git(cwd, "status", "--porcelain", "--untracked-files=normal") if commit else None
    files = [line[3:] for line in changes.splitlines()] if changes is not None else None
    if files is not None and len(files) > _DIRTY_FILES:
        files = [*files[:_DIRTY_FILES], f"and {len(files) - _DIRTY_FILES} more"]
    return {
        "git": commit.strip() if commit else None,
        "dirty": bool(files) if files is not None else None,
        "dirty_files": files,
        "versions": {name: _version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hostname": socket.gethostname(),
        "command": _command(),
    }


def changed_code(facts: Mapping[str, Any]) -> list[str]:
    """The changed files that are code: results, texts and logs in `dirty_files` are not."""
    files = facts.get("dirty_files")
    names = map(str, files) if isinstance(files, list) else ()
    return [name for name in names if not _NO_CODE.match(name)]


def _git(cwd: Path, *arguments: str) -> str | None:
    try:
        # Optional locks off: a status call must not fight with the user's own git over the index.
        done = subprocess.run(
            ["git", "--no-optional-locks", *arguments],
            cwd=cwd,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _command() -> str:
    """The command line as one can paste it, also where it was started with `-m`."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    program = ["-m", spec.name.removesuffix(".__main__")] if spec else [sys.argv[0]]
    return shlex.join(["python", *program, *sys.argv[1:]])
