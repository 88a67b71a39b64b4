"""Graphs kept between runs: packages by what they compute, and an index to find them untraced."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_pipeline.files import read_json, write_json


def cache_dir() -> Path:
    """Where graphs are kept between runs: TORCHINDUCTOR_CACHE_DIR, else the user's cache."""
    if chosen := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rl_pipeline"


class Package:
    """A graph built ahead of time and loaded; the least overhead per call that torch has."""

    def __init__(self, path: Path, cached: bool) -> None:
        # What torch._inductor.aoti_load_package does, without importing the compiler (1.2 s).
        # One thread calls it at a time: no locks.
        self._run = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, -1).boxed_run
        self.path, self.cached = path, cached

    def __call__(self, *args: Tensor) -> tuple[Tensor, ...]:
        """State and inputs -> outputs."""
        return tuple(self._run(list(args)))


class Index:
    """Finds a package by what leads to it: the code here, the run's settings, the form of a call.

    To trace a function takes a second and imports the compiler; to look it up takes neither.
    """

    def __init__(self, identity: str) -> None:
        """`identity`: all that the functions depend on beside this package's own code."""
        self._identity = identity

    def find(self, name: str, args: Sequence[Tensor]) -> tuple[Package, dict[str, Any]] | None:
        """The package of `name(*args)` and what was noted of it; None if it must be built."""
        entry = self._entry(name, args)
        noted = read_json(entry)
        path = cache_dir() / "packages" / str(noted.get("package"))
        if not noted or not path.exists():
            return None
        try:
            return Package(path, cached=True), noted
        except RuntimeError:  # torn by a full disk, say: built again
            path.unlink(missing_ok=True)
            return None

    def note(self, name: str, args: Sequence[Tensor], package: Package, **facts: Any) -> None:
        """Remember where the package of `name(*args)` is."""
        entry = self._entry(name, args)
        entry.parent.mkdir(parents=True, exist_ok=True)
        write_json(entry, {"package": package.path.name, **facts}, sync=False)

    def _entry(self, name: str, args: Sequence[Tensor]) -> Path:
        forms = [(tuple(x.shape), x.stride(), str(x.dtype), str(x.device)) for x in args]
        facts = (self._identity, name, forms, machine_facts(), _code())
        digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
        return cache_dir() / "index" / f"{digest}.json"


def machine_facts() -> tuple[Any, ...]:
    """What a built graph depends on besides its code and its arguments."""
    return (
        torch.__version__,
        torch.get_num_threads(),  # baked into the loops
        torch.backends.cpu.get_cpu_capability(),
        _cpu_flags(),
    )


@functools.cache
def _cpu_flags() -> str:
    """The instructions that -march=native may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


@functools.cache
def _code() -> str:
    """Digest of the code that graphs are traced from."""
    root = Path(__file__).resolve().parents[1]
    files = sorted(path for room in ("engine", "learners") for path in (root / room).glob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()
