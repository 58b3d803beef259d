"""How the command line looks: headings, marks and columns; colour on terminals only."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

CODES = {"bold": "1", "dim": "2", "red": "1;31", "green": "32", "yellow": "33", "cyan": "36"}


def coloured(stream: TextIO) -> bool:
    """Whether colours may be written there: a terminal, and NO_COLOR (no-color.org) is not set.

    >>> import io
    >>> coloured(io.StringIO())
    False
    """
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str, stream: TextIO) -> str:
    """The text in a colour of CODES, where `stream` shows colours.

    >>> import io
    >>> paint("error", "red", io.StringIO())
    'error'
    """
    return f"\033[{CODES[colour]}m{text}\033[0m" if coloured(stream) else text


def columns(rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), indent: int = 2) -> str:
    """Rows as aligned lines; the columns numbered in `right` are aligned there.

    >>> print(columns([["cartpole", "15,000"], ["smoke", "600"]], right=[1]))
      cartpole  15,000
      smoke        600
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((" " * indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def call(*words: str | Path) -> str:
    """A call that can be copied into a shell.

    >>> call("raffia", "resume", "runs/my run")
    "raffia resume 'runs/my run'"
    """
    return shlex.join(map(str, words))


def number(value: float | None, digits: int = 1) -> str:
    """A figure for people; "-" where there is none.

    >>> number(15000, 0), number(197.25), number(None)
    ('15,000', '197.2', '-')
    """
    return "-" if value is None else f"{value:,.{digits}f}"


def duration(seconds: float | None) -> str:
    """A time for people.

    >>> duration(7.4), duration(95), duration(3700), duration(None)
    ('7 s', '1 min 35 s', '1 h 01 min', '-')
    """
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
