"""The look of the command line: headings, marks and columns; colour on terminals only."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

WIDEST = 100  # longer lines are hard to read
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
NARROWEST = 20  # a column in less is not wrapped
VERDICTS = {"ok": "green", "note": "yellow", "fails": "red"}
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


def printable(text: str) -> str:
    """A text from a file or a model, without what a terminal would do by it.

    Lines and tabs stay; other control characters, marks that turn the direction of writing, and
    halves of surrogate pairs are written out.

    >>> printable("a\\x1b[2Jb\\n")
    'a\\\\x1b[2Jb\\n'
    """
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def width_of(stream: TextIO) -> int | None:
    """Columns of the terminal behind a stream, at most 100; None where there is none: programs want
    whole lines.

    >>> import io
    >>> width_of(io.StringIO()) is None
    True
    """
    return min(shutil.get_terminal_size().columns, WIDEST) if stream.isatty() else None


def help_width() -> int:
    """Columns of help texts: the terminal's, at most 100; 80 where there is none.

    >>> help_width() <= 100
    True
    """
    return min(shutil.get_terminal_size().columns, WIDEST)


def filled(text: str, width: int | None) -> str:
    """Paragraphs in lines of this width, at most 100; those with an indented line are unchanged.

    >>> print(filled("One two\\nthree four.\\n\\n  left as\\n  it is", 13))
    One two three
    four.
    <BLANKLINE>
      left as
      it is
    """
    most = min(width or WIDEST, WIDEST)
    parts = [
        part if part.startswith(" ") or "\n " in part else textwrap.fill(part, most)
        for part in text.split("\n\n")
    ]
    return "\n\n".join(parts)


def columns(
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[int] = (),
    indent: int = 2,
    width: int | None = None,
) -> str:
    """Rows as aligned lines; the columns numbered in `right` are aligned there.

    width: of lines; what is longer goes on below, in the last column. None: as long as it takes.

    >>> print(columns([["cartpole", "15,000"], ["smoke", "600"]], right=[1]))
      cartpole  15,000
      smoke        600
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    lines = []
    for row in rows:
        cells = [
            cell.rjust(room) if i in right else cell.ljust(room)
            for i, (cell, room) in enumerate(zip(row, widths, strict=True))
        ]
        line = (" " * indent + "  ".join(cells)).rstrip()
        begin = indent + sum(widths[:-1]) + 2 * (len(widths) - 1)  # of the last column
        if width is not None and len(line) > width >= begin + NARROWEST:
            below = textwrap.wrap(row[-1], width - begin)
            line = line[:begin] + ("\n" + " " * begin).join(below)
        lines.append(line)
    return "\n".join(lines)


def verdict(line: str, stream: TextIO) -> str:
    """A line of checks, its first word in the colour of what was found.

    >>> verdict("ok     disk: 9 GiB free", sys.stdout)
    'ok     disk: 9 GiB free'
    """
    word = line.partition(" ")[0]
    return paint(word, VERDICTS[word], stream) + line[len(word) :] if word in VERDICTS else line


def section(title: str, rows: Sequence[Sequence[str]]) -> str:
    """A titled table of a help text, as wide as the terminal.

    >>> print(section("presets", [["smoke", "tiny"], ["cartpole", "small"]]))
    presets:
      smoke     tiny
      cartpole  small
    """
    return f"{title}:\n{columns(rows, width=help_width())}"


def waiting(text: str) -> None:
    """Print to a terminal what takes a while; piped output is not mixed with it.

    >>> waiting("loading ...")  # no terminal here
    """
    if sys.stderr.isatty():
        print(paint(text, "dim", sys.stderr), file=sys.stderr, flush=True)


def call(*words: str | Path) -> str:
    """A call that can be copied into a shell.

    >>> call("raffia", "resume", "runs/my run")
    "raffia resume 'runs/my run'"
    """
    return shlex.join(map(str, words))


def number(value: float | None, digits: int | None = None) -> str:
    """A figure for people; "-" where there is none.

    digits: behind the point; None: small figures have more.

    >>> number(15000, 0), number(197.25), number(-1.5), number(0.012), number(None)
    ('15,000', '197.2', '-1.50', '0.0120', '-')
    """
    if value is None:
        return "-"
    return f"{value:,.{digits_of(abs(value)) if digits is None else digits}f}"


def digits_of(size: float) -> int:
    """The digits behind the point of figures up to this size.

    >>> digits_of(475.0), digits_of(9.5), digits_of(0.02)
    (1, 2, 4)
    """
    return 1 if size >= 10 else 2 if size >= 0.1 or not size else 4
