"""Names, settings and reasons of failures: shown, never obeyed by what shows them."""

from __future__ import annotations


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
