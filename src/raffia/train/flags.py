"""Settings from command-line words, and the help about all of them."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from raffia.environment import environment
from raffia.train.settings import AnyConfig, ConfigError, nearest_name, one_or_none

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
WIDEST = 100  # columns: tyro sets groups side by side in more, and longer lines are hard to read
_RULE = frozenset("-─")  # of which the lines below a group's description are made


def grouped(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Flags without their hyphens, each with the words that follow it.

    >>> grouped(["--goal", "-1", "--no-quick", "--kinds=one", "two"])
    [('goal', ['-1']), ('no_quick', []), ('kinds', ['one', 'two'])]
    """
    groups: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            groups.append((name.replace("-", "_"), [value] if equals else []))
        elif groups:
            groups[-1][1].append(word)
        else:
            raise ConfigError(f"{word!r} is not a flag; settings are given as --name value")
    return groups


def read_flag(flag: str, words: Sequence[str], hints: Mapping[str, Any]) -> tuple[str, object]:
    """The setting that a flag names, and its value as JSON would have it.

    >>> read_flag("no_compile", [], {"compile": bool})
    ('compile', False)
    """
    names = {name: name for name in hints}
    opposites = {_opposite(name): name for name, hint in hints.items() if hint is bool}
    names |= opposites
    if flag not in names:
        near = nearest_name(flag, list(names))
        hint = f"; did you mean --{near}?" if near else ""
        raise ConfigError(f"there is no --{flag}{hint}")
    name = names[flag]
    kind = hints[name]
    if kind is bool:
        if words:
            raise ConfigError(
                f"--{flag} takes no value; got {' '.join(words)!r} after it. Write --{name} or "
                f"--{_opposite(name)}"
            )
        return name, flag not in opposites
    inner = one_or_none(kind)
    if get_origin(inner) is tuple and (inner is kind or not _is_none(words)):
        return name, _read_words(inner, words)
    if len(words) != 1:
        got = f"got {len(words)}: {' '.join(words)}" if words else "got none"
        raise ConfigError(f"--{flag} takes one value; {got}")
    return name, _read_word(kind, words[0])


def _opposite(name: str) -> str:
    outer, dot, last = name.rpartition(".")
    return f"{outer}{dot}no_{last}"


def _read_words(hint: Any, words: Sequence[str]) -> list[object]:
    parts = get_args(hint)
    kinds = parts[:1] * len(words) if parts[-1] is Ellipsis else parts
    kinds = (*kinds, *[str] * (len(words) - len(kinds)))  # too many are refused like in a file
    return [_read_word(kind, word) for kind, word in zip(kinds, words, strict=False)]


def _is_none(words: Sequence[str]) -> bool:
    return len(words) == 1 and words[0].lower() in ("none", "null")


def _read_word(hint: Any, word: str) -> object:
    """The word as a value of the type; unchanged where it can't be one, to be refused."""
    inner = one_or_none(hint)
    if inner is not hint:
        return None if _is_none([word]) else _read_word(inner, word)
    if get_origin(hint) is Literal:
        return next((choice for choice in get_args(hint) if str(choice) == word), word)
    if hint is bool:
        return {"true": True, "false": False}.get(word.lower(), word)
    try:
        return hint(word) if hint in (int, float) else word
    except ValueError:
        return word


def print_help(default: AnyConfig, prog: str, description: str) -> None:
    """Print all settings with types, choices, comments of the source and values.

    >>> from raffia.envs.config import EnvConfig
    >>> print_help(EnvConfig(num_envs=32), "train", "")  # doctest: +ELLIPSIS
    usage: train [-h] [OPTIONS]
    ...stepped together, with one search for all of them. (default: 32)...
    """
    from tyro import cli

    screen = _Screen(coloured=sys.stdout.isatty() and not os.environ.get("NO_COLOR"))
    width = min(shutil.get_terminal_size().columns, WIDEST)
    # tyro asks for the columns of the terminal
    columns = environment({"COLUMNS": str(width)})
    with columns, contextlib.suppress(SystemExit), contextlib.redirect_stdout(screen):
        cli(
            type(default),
            default=default,
            args=["--help"],
            prog=prog,
            description=description,
            use_underscores=True,
        )
    for line in _without_examples(screen.getvalue().splitlines()):
        plain = _COLOURS.sub("", line).rstrip()
        # tyro joins the lines of a paragraph, and leaves it to the terminal to break it
        print(line.rstrip() if len(plain) <= width else textwrap.fill(plain, width))


class _Screen(io.StringIO):
    """Text that tyro writes as to a terminal, in colours, or as to a file."""

    def __init__(self, coloured: bool) -> None:
        super().__init__()
        self._coloured = coloured

    def isatty(self) -> bool:
        return self._coloured


def _without_examples(lines: Sequence[str]) -> list[str]:
    """The help without the examples in Python that end the docstrings of configs, up to the rule
    below."""
    lines_left: list[str] = []
    inside = False
    for line in lines:
        text = _COLOURS.sub("", line).strip()
        if inside and text and set(text) <= _RULE:
            inside = False
            # The lines between text and example go, too.
            while lines_left and not _COLOURS.sub("", lines_left[-1]).strip():
                lines_left.pop()
        inside = inside or text.startswith(">>>")
        if not inside:
            lines_left.append(line)
    return lines_left
