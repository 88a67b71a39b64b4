"""Text for people: streams that cannot end the work, and lines that run as they are printed."""

from __future__ import annotations

import os
import re
import shlex
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

from rl_pipeline.files import working_directory
from rl_pipeline.redaction import redact

if TYPE_CHECKING:
    from rich.console import Console


class _Steady:
    """A standard stream whose reader may go away: what is shown can never end what is done."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or drop the text where nobody can read it."""
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            safe = text.encode(self._stream.encoding or "ascii", "backslashreplace")
            return self.write(safe.decode(self._stream.encoding or "ascii"))
        except (OSError, ValueError):
            self._give_up()
            return len(text)

    def writelines(self, lines: Any) -> None:
        """Write several."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush, or drop what nobody can read."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._give_up()

    def _give_up(self) -> None:
        # The buffer still holds text: without a file behind it, the interpreter would fail at exit.
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def steady_streams() -> None:
    """Make standard output and error survive a reader that goes, a full disk, a closed terminal."""
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # Closed: the next file that is opened would become the standard stream.
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            if getattr(sys, name) is None:
                setattr(sys, name, open(number, "w" if number else "r", closefd=False))
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Steady):
            setattr(sys, name, _Steady(stream))


def say(text: str) -> None:
    """One line for whoever watches."""
    print(redact(plain(text)), file=sys.stderr, flush=True)


def shown_path(path: str) -> str:
    """`path` as one types it from here."""
    relative = os.path.relpath(path, working_directory())
    if relative.startswith(".."):
        return path
    return f"./{relative}" if relative.startswith("-") else relative  # no flag


def command(module: str, *flags: str, **values: object) -> str:
    """A line to paste into a shell: `python -m rl_pipeline.<module> key=value ...` for Hydra."""
    settings = [f"{key.replace('__', '.')}={quoted(str(value))}" for key, value in values.items()]
    return shell_line(module, *flags, *settings)


def shell_line(module: str, *arguments: str) -> str:
    """A line to paste into a shell: its arguments arrive as they are."""
    return " ".join(["python", "-m", f"rl_pipeline.{module}", *map(in_shell, arguments)])


def in_shell(text: str) -> str:
    """`text` as one word of a shell's line, in the quotes that are easier to read."""
    if "'" in text and not re.search(r'["$`\\!]', text):
        return f'"{text}"'
    return shlex.quote(text)


def quoted(value: str, interpolating: bool = False) -> str:
    """`value` as Hydra and OmegaConf read it back, in quotes where their grammars need them.

    `interpolating`: what stands in ${} is meant as OmegaConf takes it.
    """
    if re.fullmatch(r"[\w./-]*[A-Za-z_./-][\w./-]*", value, re.ASCII) and not _other_word(value):
        return value
    # OmegaConf takes ${ for an interpolation, unless an odd number of backslashes is before it.
    text = value if interpolating else re.sub(r"(\\*)\$\{", lambda m: m[1] * 2 + r"\${", value)
    # Before a quote, Hydra halves backslashes; elsewhere it keeps them (its grammar, ESC_QUOTE).
    text = re.sub(r"\\+(?='|\Z)", lambda m: m[0] * 2, text).replace("'", "\\'")
    return f"'{text}'"


def _other_word(value: str) -> bool:
    """Whether Hydra reads a plain word as another kind of value."""
    if value.lower() in ("null", "true", "false", "nan", "inf"):
        return True
    with suppress(ValueError):
        float(value)
        return True
    return False


def plain(text: object) -> str:
    r"""`text` with what does not print written out, as `\x1b`; lines and tabs stay.

    So nothing steers a terminal (ANSI sequences), hides, or turns the direction of writing.
    """
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode()
        for c in str(text).replace("\r\n", "\n")
    )


def in_a_row(text: object) -> str:
    """The same on one line."""
    return " ".join(plain(text).split())


def wide_console() -> Console:
    """The terminal; elsewhere wide enough that tables in logs are not folded."""
    from rich.console import Console

    # No markup and no emoji: names, reasons and paths may hold brackets and colons.
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 160
    return console
