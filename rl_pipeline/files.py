"""Files that are written whole or not at all, read without trust, and owned by one process."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import psutil

from rl_pipeline.errors import ConfigError

ROOM_BYTES = 64 * 1024
"""Kept free in a run folder for its last words on a full disk."""
_ROOM = ".room"
RUN_FILES = ("run.json", "result.json", "metrics.jsonl")
"""Files that tell a run's folder from others."""
OURS = (
    *RUN_FILES, ".hydra", "checkpoints", "replay", "tracking.json", "mlflow.json", "tracking.log",
    _ROOM,
)  # fmt: skip
"""All that a run writes into its folder."""
BEFORE_A_RUN = (".hydra", "replay", _ROOM)
"""Names of what is written before the run exists."""


def working_directory(fix: bool = False) -> Path:
    """The directory one works in.

    A door fixes it once, before anything of the run can change it: environments and Hydra do.
    """
    global _fixed
    if fix:
        _fixed = Path.cwd()
    return _fixed or Path.cwd()


_fixed: Path | None = None


# -- writing and reading --------------------------------------------------------------------------


@contextmanager
def replacing(path: Path, mode: int = 0o644, sync: bool = True) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` at the end of the block, whole.

    A reader sees the old or the new content; whatever goes wrong leaves the old one and no more.
    With `sync` it is on disk before: a power failure cannot leave half of it.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    partial.unlink(missing_ok=True)  # an earlier process of this id may have made it readable
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno:
            error.filename = str(path)  # a write that fails does not say where
        raise


def write_json(path: Path, value: Any, mode: int = 0o644, sync: bool = True) -> None:
    """Write JSON whole or not at all: others poll for such files."""
    with replacing(path, mode, sync) as file:
        file.write((json.dumps(value, indent=1) + "\n").encode())


def damage(path: Path) -> str:
    """The damage to a JSON object's file, in words; empty where there is none."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    except (ValueError, RecursionError):
        return f"{path} is damaged: it is no JSON"
    return "" if isinstance(value, dict) else f"{path} is damaged: it holds no JSON object"


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; {} where there is none or it is damaged."""
    return json.loads(path.read_bytes()) if not damage(path) else {}


# -- torn and full disks --------------------------------------------------------------------------


def of_the_disk(error: OSError) -> bool:
    """Whether it is a full, read-only or foreign disk, and no fault of a program."""
    return error.errno in (
        errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG,
    )  # fmt: skip


def why_not(error: OSError) -> str:
    """An error of the file system as a sentence that names the file and the way out."""
    where = f"{error.filename}: " if error.filename else ""
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            hint = "free some space"
        case errno.EROFS | errno.EACCES | errno.EPERM:
            hint = "choose a folder that can be written"
        case errno.ENOTDIR | errno.EEXIST | errno.EISDIR:
            hint = "choose another folder"
        case _:
            hint = "look at the disk"
    return f"{where}{error.strerror or error}; {hint}"


def keep_room(folder: Path) -> None:
    """Set bytes aside for the last words of a run; raises OSError on a disk that is full now."""
    with replacing(folder / _ROOM) as file:
        file.write(b"\0" * ROOM_BYTES)


def give_room(folder: Path) -> None:
    """Let the last words have the bytes that were set aside."""
    (folder / _ROOM).unlink(missing_ok=True)


def check_zip(path: Path) -> str:
    """The damage to a zip archive (torch.save writes one), in words; empty if there is none.

    Every member is read against its CRC-32: one flipped bit shows.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except OSError as error:
        return error.strerror or str(error)
    except Exception as error:  # zipfile raises errors of many kinds on random bytes
        return f"it is no whole checkpoint ({error})"
    return f"its part {bad} is damaged" if bad else ""


# -- ownership ------------------------------------------------------------------------------------


class Claim:
    """One process's hold on a run folder: nobody else trains in it, and what it made is known.

    The kernel drops the lock with the process, however that ends; no file tells of it.
    """

    held: ClassVar[dict[Path, Claim]] = {}
    """The claims of this process, by their folders."""

    begun = False
    """The run exists: what it writes stays."""
    also: tuple[str, ...] = ()
    """Further names that are written before a run exists."""

    def __init__(self, folder: Path) -> None:
        """Make the folder if need be, and lock it.

        Raises ConfigError where another process holds it, or where it cannot be made.
        """
        self.folder = Path(os.path.abspath(folder))
        self._made = [p for p in (self.folder, *self.folder.parents) if not p.exists()]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._before = {path.name for path in self.folder.iterdir()}
            self._composed = {path: path.read_bytes() for path in self.folder.glob(".hydra/*.yaml")}
            self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            self._remove_empty()
            raise ConfigError(f"hydra.run.dir={folder} cannot be used: {why_not(error)}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(self._lock)
            os.close(self._lock)
            raise ConfigError(
                f"{folder}: a run is being trained there{holder}; let it end first, or choose "
                "another folder"
            ) from None
        except OSError:
            pass  # a file system without locks (some network ones): the folder's files still speak
        # A worker forked later would hold the lock beyond the death of this process.
        os.register_at_fork(after_in_child=self._close)
        self.held[self.folder] = self

    def keep_room(self) -> None:
        """Set room aside; raises ConfigError on a disk that is full or cannot be written."""
        _clean(self.folder)
        try:
            keep_room(self.folder)
        except OSError as error:
            raise ConfigError(
                f"hydra.run.dir={self.folder} cannot be used: {why_not(error)}"
            ) from None

    def release(self) -> None:
        """Let others have the folder; a second call does nothing.

        A run that never began is taken back: all it wrote, and the folder if it made that too.
        """
        if not self.held.pop(self.folder, None):
            return
        with suppress(OSError):
            give_room(self.folder)
        if not self.begun:
            # The tracker of a run that exists may be writing just now: nothing of it is ours.
            mine = set() if "run.json" in self._before else {*BEFORE_A_RUN, *self.also}
            for name in mine - self._before:
                with suppress(OSError):
                    _remove(self.folder / name)
            for path, content in self._composed.items():
                with suppress(OSError):  # Hydra writes what it composed before anything is refused
                    path.write_bytes(content)
            self._remove_empty()
        self._close()

    def _close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _remove_empty(self) -> None:
        for path in self._made:
            with suppress(OSError):  # not made, or others wrote into it meanwhile
                path.rmdir()


def _clean(folder: Path) -> None:
    """Remove temporary files of processes that died while they wrote."""
    for path in (*folder.glob("*.tmp"), *folder.glob("checkpoints/*.tmp")):
        pid = path.name.split(".")[-2]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            path.unlink(missing_ok=True)


def end_claims() -> None:
    """Let go of all folders; one that no run has begun in is as it was before."""
    for claim in list(Claim.held.values()):
        claim.release()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        for inside in path.iterdir():
            _remove(inside)
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def _holder(descriptor: int) -> str:
    """The process that locks a file, in words; empty where the system does not tell (proc(5))."""
    status = os.fstat(descriptor)
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if len(fields) > 5 and fields[5] == place and fields[1] == "FLOCK":
                return f" (process {fields[4]})"
    return ""


def told(what: str, close: Callable[[], object], say: Callable[[str], object]) -> None:
    """Call a part's clean-up: what that raises is told, never taken for an error of the work."""
    try:
        close()
    except (Exception, SystemExit) as error:
        say(f"{what} did not close cleanly: {type(error).__name__}: {error}")
