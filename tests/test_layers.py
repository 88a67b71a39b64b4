"""The plan of the house: which room may import which. CONTRIBUTING.md draws it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import rl_pipeline

FLOORS = [
    {"errors", "types", "machine", "files", "redaction", "stop", "terminal"},
    {"config", "buffers", "telemetry"},
    {"envs", "engine", "tracking"},
    {"learners", "loops", "comparison"},
    {"run", "study"},
    {"diagnosis"},
    {"train", "compare", "diagnose", "doctor", "hydra_plugins"},
]
"""A room imports from lower floors only. On the ground floor, files have an order instead."""
GROUND = ["errors", "types", "machine", "redaction", "stop", "files", "terminal"]
PACKAGE = Path(rl_pipeline.__file__).parent


def rooms() -> Iterator[tuple[str, Path]]:
    """Every file of the package and of its plugins, with its room."""
    for path in PACKAGE.rglob("*.py"):
        yield path.relative_to(PACKAGE).parts[0].removesuffix(".py"), path
    for path in (PACKAGE.parent / "hydra_plugins").rglob("*.py"):
        yield "hydra_plugins", path


def modules(path: Path) -> Iterator[str]:
    """The modules that a file imports, wherever in it, as dotted names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def arrows() -> Iterator[tuple[str, Path, str, str]]:
    """(room, file, imported room, imported name) of every import that leaves its room."""
    for room, path in rooms():
        for name in modules(path):
            first, _, rest = name.partition(".")
            other = rest.split(".")[0] if first == "rl_pipeline" else first
            if first in ("rl_pipeline", "hydra_plugins") and other != room:
                yield room, path, other, name


def test_a_room_imports_only_from_lower_floors():
    floor = {room: i for i, rooms in enumerate(FLOORS) for room in rooms}
    checked = 0
    for room, path, other, name in arrows():
        assert room in floor and other in floor, f"{path} imports {name}: a room without a floor"
        if floor[room] == floor[other] == 0:
            below = GROUND.index(other) < GROUND.index(room)
        else:
            below = floor[other] < floor[room]
        assert below, f"{path} imports {name}, which is not below it"
        checked += 1
    assert checked > 200
    assert {room for room, path in rooms() if room != "__init__"} == set(floor)


def test_no_file_imports_in_a_circle():
    """Also inside a room: what a file imports never leads back to it."""
    files = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
        for _, path in rooms()
    }
    graph = {
        name: {
            target
            for imported in modules(path)
            for target in (imported, imported.rpartition(".")[0])
            if target in files and target != name
        }
        for name, path in files.items()
    }
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, f"{' -> '.join((*way, name))}"
        if name not in done:
            for other in graph[name]:
                visit(other, (*way, name))
            done.add(name)

    for name in graph:
        visit(name, ())
    assert sum(map(len, graph.values())) > 200


def test_what_trains_and_what_measures_never_sees_a_dictconfig():
    users = {room for room, path in rooms() if "DictConfig" in path.read_text()}
    assert users == {"config", "run", "study", "train"}
    # Those that Hydra calls, and the one that hands the settings on.
    assert {
        path.name for room, path in rooms() if room == "run" and "DictConfig" in path.read_text()
    } == {
        "gate.py",
        "build.py",
    }


def test_no_target_outside_hydra_s_own_folder():
    conf = Path(rl_pipeline.__file__).parent.parent / "conf"
    files = [p for p in conf.rglob("*.yaml") if "hydra" not in p.relative_to(conf).parts]
    assert len(files) > 20
    assert not [p for p in files if "_target_" in p.read_text()]
