"""Environments as data: what they hold goes out as JSON and comes back into ones freshly made.

Nothing here unpickles, imports or calls what a file names. A snapshot holds numbers, strings,
arrays, containers and generators' states; they are put into environments that the run has built
itself. Objects come back in the place of an object of the same class, or, where an episode made
them, as bare instances of a class that the environment's own package has loaded already.
"""

from __future__ import annotations

import base64
import enum
import json
import logging
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np
from gymnasium import Env
from gymnasium.envs.registration import EnvSpec

_PLAIN = (bool, int, float, str)
_LISTS: dict[str, Any] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset, bytearray, bytes)
}
_DICTS: dict[str, Any] = {kind.__name__: kind for kind in (dict, OrderedDict)}
_BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
_NUMBERS = "biufcSUMm"
"""Kinds of arrays that are nothing but bytes."""
# Constant for our purposes: they are never saved, but must be found where they were.
_FIXED = (type, types.BuiltinFunctionType, types.ModuleType, np.ufunc, logging.Logger)
_NONE = object()
"""Stands for: there is nothing in this place."""


class SnapshotError(ValueError):
    """The contents of an environment cannot be data, or data does not fit the environment."""


class _Plain:
    """Its instances have what every Python object has, and no memory of C code behind it."""


def save(value: Any, **labels: int) -> bytes:
    """`value`, a container of environments and data, as a snapshot; `labels` stand beside it.

    Raises SnapshotError where something in it is more than data: handles, C memory, iterators.
    """
    try:
        written = {"snapshot": 1, **labels, "value": _Writer().write(value)}
        return json.dumps(written).encode()
    except RecursionError as error:
        raise SnapshotError("it is nested too deeply") from error


def parse(data: bytes) -> dict[str, Any]:
    """The snapshot's labels and its unread value; raises SnapshotError for anything else."""
    if data[:1] == b"\x80":
        raise SnapshotError("it is a pickle of an earlier version, and a pickle can run code")
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"it is damaged ({error})") from error
    if not isinstance(parsed, dict) or parsed.get("snapshot") != 1 or "value" not in parsed:
        raise SnapshotError("it is no snapshot of this version")
    return parsed


def read(parsed: dict[str, Any], template: Any) -> tuple[Any, Callable[[], None]]:
    """The value that was saved, in the environments of `template`, which has its form.

    They change only when the function that comes with it is called. Raises SnapshotError for data
    that does not fit them.
    """
    try:
        reader = _Reader(_packages(template))
        return reader.read(parsed["value"], template), reader.apply
    except SnapshotError:
        raise
    except Exception as error:  # any nonsense may stand in a file
        raise SnapshotError(f"it is damaged ({type(error).__name__}: {error})") from error


def _packages(template: Any) -> set[str]:
    """Top-level packages of the objects in `template` and of what they wrap."""
    found: set[str] = set()
    waiting, seen = [template], set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
        elif _is_object(value):
            found.add(type(value).__module__.split(".")[0])
            waiting += [x for name, x in vars(value).items() if name == "env"]
    return found - {"builtins", "numpy", "torch", "gymnasium"}


def _name(thing: Any) -> str:
    module = getattr(thing, "__module__", None)
    return f"{module}:{getattr(thing, '__qualname__', getattr(thing, '__name__', '?'))}"


def _is_object(value: Any) -> bool:
    """All of it is its `__dict__`."""
    kind = type(value)
    return (
        hasattr(value, "__dict__")
        and kind.__basicsize__ <= _Plain.__basicsize__
        and not kind.__itemsize__
        and not isinstance(value, type | enum.Enum)
    )


def _root(array: np.ndarray) -> Any:
    """The object that owns the memory of an array."""
    owner: Any = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return owner


class _Writer:
    """Turns a value into JSON; what is met again becomes a reference."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # alive, so that no id is used twice
        self._roots: dict[int, Any] = {}

    def write(self, value: Any) -> Any:
        if value is None or isinstance(value, EnvSpec):
            return None  # how it was made is known, and some wrappers look it up only when asked
        if type(value) in _PLAIN:
            return value
        if isinstance(value, np.generic):
            return ["scalar", *self._array(np.asarray(value))]
        if isinstance(value, np.dtype):
            return ["dtype", self._dtype(value)]
        if isinstance(value, enum.Enum):
            return ["enum", _name(type(value)), value.name]
        if isinstance(value, _FIXED):
            return ["fixed", _name(value)]
        if id(value) in self._seen:
            return ["again", self._seen[id(value)]]
        number = self._seen[id(value)] = len(self._kept)
        self._kept.append(value)
        return [*self._write_new(value), number]

    def _write_new(self, value: Any) -> list[Any]:
        kind = type(value)
        if kind in (bytes, bytearray):
            return [kind.__name__, base64.b64encode(value).decode()]
        if kind.__name__ in _LISTS and kind is _LISTS[kind.__name__]:
            return [kind.__name__, [self.write(x) for x in value]]
        if kind is deque:
            return ["deque", [self.write(x) for x in value], value.maxlen]
        if kind.__name__ in _DICTS and kind is _DICTS[kind.__name__]:
            return [kind.__name__, self._pairs(value)]
        if kind is np.ndarray:
            root = _root(value)
            if not isinstance(root, bytes) and not (
                isinstance(root, np.ndarray) and root.flags.owndata
            ):
                raise SnapshotError("an array's memory is not Python's")
            if self._roots.setdefault(id(root), value) is not value:
                raise SnapshotError("two arrays share memory")
            return ["array", *self._array(value), bool(value.flags.writeable)]
        if kind is np.random.Generator:
            return ["generator", *self._bits(value.bit_generator)]
        if kind is np.random.RandomState:
            return ["legacy", self.write(value.get_state())]
        if kind is random.Random:
            return ["random", self.write(value.getstate())]
        if kind is types.FunctionType:
            cells = value.__closure__ or ()
            return ["function", _name(value), [self.write(cell.cell_contents) for cell in cells]]
        if kind is types.MethodType:
            return ["method", _name(value.__func__), self.write(value.__self__)]
        if _is_object(value):
            return ["object", _name(kind), self._pairs(vars(value))]
        raise SnapshotError(f"{_name(kind)} is more than data")

    def _pairs(self, items: dict[Any, Any]) -> list[Any]:
        return [[self.write(key), self.write(x)] for key, x in items.items()]

    def _bits(self, bits: Any) -> list[Any]:
        kind, seeds = type(bits).__name__, bits.seed_seq
        if kind not in _BIT_GENERATORS or type(seeds) is not np.random.SeedSequence:
            raise SnapshotError(f"{_name(type(bits))} is not one of numpy's generators")
        lineage = [seeds.entropy, seeds.spawn_key, seeds.n_children_spawned]
        return [kind, self.write(bits.state), self.write(lineage)]

    @staticmethod
    def _dtype(dtype: np.dtype) -> str:
        if dtype.kind not in _NUMBERS or dtype.names is not None:
            raise SnapshotError(f"an array of {dtype} is more than numbers")
        return dtype.str

    def _array(self, array: np.ndarray) -> list[Any]:
        order: Literal["F", "C"] = "F" if array.flags.fnc else "C"
        data = base64.b64encode(array.tobytes(order)).decode()
        return [self._dtype(array.dtype), list(array.shape), order, data]


class _Reader:
    """Turns JSON back into values; environments change only in `apply`."""

    def __init__(self, packages: set[str]) -> None:
        self._packages = packages
        self._made: dict[int, Any] = {}
        self._changes: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._cells: list[tuple[Any, Any]] = []

    def apply(self) -> None:
        """Move the environments to the state that was read."""
        for target, attributes in self._changes.values():
            vars(target).clear()
            vars(target).update(attributes)
        for cell, value in self._cells:
            cell.cell_contents = value

    def read(self, node: Any, template: Any = _NONE) -> Any:
        """The value of `node`; `template` is what stands in its place in the new environment."""
        if node is None:
            return template if isinstance(template, EnvSpec) else None
        if type(node) in _PLAIN:
            return node
        kind, *rest = node
        match kind:
            case "scalar":
                return self._array(*rest)[()]
            case "dtype":
                return self._dtype(*rest)
            case "enum":
                return self._enum(*rest)
            case "fixed":
                return self._fixed(template, _FIXED, *rest)
            case "again":
                return self._made[rest[0]]
        *rest, number = rest
        if kind in ("list", "dict", "OrderedDict", "deque", "object"):
            return self._read_shared(kind, rest, number, template)
        value = self._made[number] = self._read_whole(kind, rest, template)
        return value

    def _read_whole(self, kind: str, rest: list[Any], template: Any) -> Any:
        match kind:
            case "bytes" | "bytearray":
                return _LISTS[kind](base64.b64decode(rest[0], validate=True))
            case "tuple" | "set" | "frozenset":
                old = template if isinstance(template, tuple) else ()
                return _LISTS[kind](self._each(rest[0], old))
            case "array":
                *form, writeable = rest
                array = self._array(*form)
                array.flags.writeable = bool(writeable)
                return array
            case "generator":
                return np.random.Generator(self._bits(*rest))
            case "legacy":
                legacy = np.random.RandomState(0)
                legacy.set_state(self.read(rest[0]))
                return legacy
            case "random":
                plain = random.Random(0)
                plain.setstate(self.read(rest[0]))
                return plain
            case "function":
                name, values = rest
                function = self._fixed(template, types.FunctionType, name)
                for cell, value in zip(function.__closure__ or (), values, strict=True):
                    self._cells.append((cell, self.read(value, cell.cell_contents)))
                return function
            case "method":
                name, owner = rest
                if not isinstance(template, types.MethodType) or _name(template.__func__) != name:
                    raise SnapshotError(f"{name} is not where it was")
                if self.read(owner, template.__self__) is not template.__self__:
                    raise SnapshotError(f"{name} belongs to another object than it did")
                return template
        raise SnapshotError(f"{kind!r} is no kind of value")

    def _read_shared(self, kind: str, rest: list[Any], number: int, template: Any) -> Any:
        """A value that may hold itself: it exists before what is in it."""
        if kind == "object":
            return self._object(number, template, *rest)
        if kind == "deque":
            items, maxlen = rest
            line: deque[Any] = deque(maxlen=maxlen)
            self._made[number] = line
            line.extend(self._each(items, template if isinstance(template, deque) else ()))
            return line
        if kind == "list":
            row: list[Any] = []
            self._made[number] = row
            row.extend(self._each(rest[0], template if isinstance(template, list) else ()))
            return row
        table = self._made[number] = _DICTS[kind]()
        table.update(self._pairs(rest[0], template if isinstance(template, dict) else {}))
        return table

    def _object(self, number: int, template: Any, name: str, pairs: list[Any]) -> Any:
        target, old = template, {}
        if template is not _NONE and _is_object(template) and _name(type(template)) == name:
            old = vars(template)
        else:
            target = self._bare(name)
        if id(target) in self._changes:
            raise SnapshotError(f"two objects of {name} have become one")
        self._made[number] = target
        change: dict[str, Any] = {}
        self._changes[id(target)] = target, change
        attributes = self._pairs(pairs, old)
        if not all(type(key) is str for key in attributes):
            raise SnapshotError(f"an attribute of {name} has no name")
        change.update(attributes)
        return target

    def _bare(self, name: str) -> Any:
        """An instance without attributes, of a class that the environment's package has."""
        kind = self._known(name)
        # An environment or wrapper is one that the run has made, and nothing else steps.
        if issubclass(kind, Env) or hasattr(kind, "__del__"):
            raise SnapshotError(f"{name} cannot be made from data")
        if not _is_object(bare := object.__new__(kind)):
            raise SnapshotError(f"{name} cannot be made from data")
        return bare

    def _known(self, name: str) -> Any:
        """The class of this name, looked up where it is loaded; nothing is imported."""
        module, qualname = name.split(":")
        ours = module.startswith("gymnasium.spaces.") or module.split(".")[0] in self._packages
        if not ours or module not in sys.modules:
            raise SnapshotError(f"{name} is not the environment's own")
        scope = vars(sys.modules[module])
        *outer, last = qualname.split(".")
        for part in outer:
            scope = vars(self._class(scope.get(part), module, name))
        return self._class(scope.get(last), module, name)

    @staticmethod
    def _class(found: Any, module: str, name: str) -> Any:
        if not isinstance(found, type) or found.__module__ != module:
            raise SnapshotError(f"{name} is no class of the environment's own")
        return found

    def _enum(self, name: str, member: str) -> Any:
        kind = self._known(name)
        if not issubclass(kind, enum.Enum):
            raise SnapshotError(f"{name} is no enumeration")
        return kind.__members__[member]

    @staticmethod
    def _fixed(template: Any, kinds: Any, name: str) -> Any:
        if not isinstance(template, kinds) or _name(template) != name:
            raise SnapshotError(f"{name} is not where it was")
        return template

    def _each(self, nodes: list[Any], old: Iterable[Any]) -> list[Any]:
        old = list(old)
        old += [_NONE] * (len(nodes) - len(old))
        return [self.read(node, x) for node, x in zip(nodes, old, strict=False)]

    def _pairs(self, pairs: list[Any], old: dict[Any, Any]) -> dict[Any, Any]:
        keys = [self.read(key) for key, _ in pairs]
        return {
            key: self.read(node, old.get(key, _NONE))
            for key, (_, node) in zip(keys, pairs, strict=True)
        }

    def _bits(self, kind: str, state: Any, lineage: Any) -> Any:
        if kind not in _BIT_GENERATORS:
            raise SnapshotError(f"{kind!r} is not one of numpy's generators")
        entropy, spawn_key, children = self.read(lineage)
        seeds = np.random.SeedSequence(
            entropy, spawn_key=spawn_key, n_children_spawned=int(children)
        )
        bits = getattr(np.random, kind)(seeds)
        bits.state = self.read(state)
        return bits

    @staticmethod
    def _dtype(text: str) -> np.dtype:
        dtype = np.dtype(str(text))
        if dtype.kind not in _NUMBERS or dtype.names is not None:
            raise SnapshotError(f"an array of {dtype} is more than numbers")
        return dtype

    def _array(self, dtype: str, shape: list[int], order: str, data: str) -> np.ndarray:
        flat = np.frombuffer(base64.b64decode(data, validate=True), self._dtype(dtype))
        return flat.reshape([int(n) for n in shape], order="F" if order == "F" else "C").copy("K")
