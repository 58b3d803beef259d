"""argparse with nearest names, calls that work, and help that keeps its lines; `UsageError`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from raffia.cli.style import filled, help_width
from raffia.hints import did_you_mean


class UsageError(Exception):
    """A wrong call: what was wrong, and the calls that work.

    >>> error = UsageError("there is no preset 'cartpol'", "raffia list presets")
    >>> print(error, error.calls)
    there is no preset 'cartpol' ('raffia list presets',)
    """

    def __init__(self, message: str, *calls: str) -> None:
        super().__init__(message)
        self.calls = calls


class Parser(argparse.ArgumentParser):
    """The words of one command.

    about: what it does, and what it writes.
    examples: calls, each with what it does behind two spaces and a #.

    >>> parser = Parser("raffia demo", "Learns.", ["raffia demo  # at once"])
    >>> _ = parser.add_argument("--num-episodes", type=int, default=10, help="to play")
    >>> parser.read(["--num_episodes", "3"]).num_episodes
    3
    """

    def __init__(self, prog: str, about: str, examples: Sequence[str] = ()) -> None:
        super().__init__(
            prog=prog,
            description=filled(about, help_width()),
            epilog="\n  ".join(["examples:", *_aligned(examples)]) if examples else None,
            formatter_class=partial(argparse.RawDescriptionHelpFormatter, width=help_width() - 2),
            allow_abbrev=False,
            add_help=False,
        )
        self.add_argument("-h", "--help", action="help", help="show this help and exit")

    def flag(
        self,
        usage: str,  # with the name of its value, such as "--seed N"
        about: str,
        kind: Callable[[str], Any] = str,
        default: Any = None,
        **more: Any,
    ) -> None:
        """Add a flag that has a value; help shows its default, unless there is none.

        >>> parser = Parser("raffia look", "looks")
        >>> parser.flag("--seed N", "seed of the episodes", int, 0)
        >>> parser.read([]).seed, parser.read(["--seed", "3"]).seed
        (0, 3)
        """
        name, _, value = usage.partition(" ")
        shown = about if default in (None, "") else f"{about} (default: {default})"
        self.add_argument(
            name, metavar=value or None, help=shown, type=kind, default=default, **more
        )

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse the words into arguments; raise UsageError if they are wrong."""
        args, unknown = self.parse_known_args([_hyphened(word) for word in words])
        if unknown:
            raise self._unknown(unknown[0])
        return args

    def error(self, message: str) -> NoReturn:
        """Raise argparse's error about a mistake, in our form."""
        raise UsageError(message.removeprefix("argument "), f"{self.prog} --help")

    def _unknown(self, word: str) -> UsageError:
        if not word.startswith("-"):
            return UsageError(f"unexpected argument {word!r}", f"{self.prog} --help")
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        hint = nearest(word.partition("=")[0], flags)
        return UsageError(f"{self.prog} has no {word}{hint}", f"{self.prog} --help")


def whole(least: int) -> Callable[[str], int]:
    """A kind of flag: whole numbers of at least this one.

    >>> whole(1)("12")
    12
    """

    def read(word: str) -> int:
        if not word.isdecimal() or int(word) < least:
            raise argparse.ArgumentTypeError(f"{word!r} is not a whole number of at least {least}")
        return int(word)

    return read


def nearest(word: str, names: Sequence[str]) -> str:
    """ "; did you mean ...?" where a name is like the word, else nothing.

    >>> nearest("cartpol", ["smoke", "cartpole"]), nearest("xyz", ["smoke"])
    ('; did you mean cartpole?', '')
    """
    return did_you_mean(word, names, "; did you mean {}?")


def _hyphened(word: str) -> str:
    """Flags with hyphens: --num_episodes is --num-episodes."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if word.startswith("--") else word


def _aligned(examples: Sequence[str]) -> list[str]:
    """The calls, with their remarks aligned."""
    pairs = [example.partition("  # ") for example in examples]
    width = max((len(call) for call, _, remark in pairs if remark), default=0)
    return [f"{call:<{width}}  # {remark}" if remark else call for call, _, remark in pairs]
