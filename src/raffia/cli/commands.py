"""The commands of `raffia`, and the handling of their errors."""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from raffia._version import __version__
from raffia.cli.parser import UsageError
from raffia.lazy import imported

Command = Callable[[Sequence[str]], int]  # the words after its name -> exit status

GROUPS = {
    "agents": {
        "demo": "train EfficientZero on CartPole, live, and write a report",
        "train": "train an agent in a new run folder",
        "sweep": "train many agents, over seeds and settings, in worker processes",
        "resume": "continue a run or a sweep that was stopped",
        "evaluate": "play episodes without exploration: mean return, spread, recordings",
        "play": "play TicTacToe or Connect4 against a trained agent",
        "chat": "talk to an ILQL agent, or let it guess your Wordle word",
        "export": "export an ILQL agent to a folder that transformers can load",
    },
    "runs": {
        "report": "write one HTML page about one or more runs",
        "list": "list presets, environments and runs",
    },
    "checks": {
        "check-env": "check an environment against the contract, point by point",
        "doctor": "check this machine: versions, threads, extras, ROMs, GPU",
    },
}
# A command is a function of its own name, in a file of this name in cli/, but for this one.
HOMES = {"list": "list:list_all"}
FIRST_STEPS = {
    "raffia demo": "a trained agent in minutes",
    "raffia train efficientzero --preset cartpole": "the same, with a full-length run",
    "raffia train ilql --preset wordle": "learn a game from logged play",
    "raffia train efficientzero --help": "all presets and settings",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.  argv: the words after `raffia`.

    0: done; 1: it failed; 2: the call cannot be meant; 130: Ctrl-C; 143: SIGTERM; 129: SIGHUP.

    >>> main(["--version"])  # doctest: +ELLIPSIS
    raffia ...
    0
    """
    _open_what_is_closed()
    if isinstance(sys.stdout, io.TextIOWrapper):  # as stderr does: a path may have any letters
        sys.stdout.reconfigure(errors="backslashreplace")
    words = [_with_home(word) for word in (sys.argv[1:] if argv is None else argv)]
    debug = "--debug" in words
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        warnings.filterwarnings("always", "checkpoint .* is skipped", UserWarning)
        return _run(words, debug)


def _run(words: Sequence[str], debug: bool) -> int:
    try:
        _require_folder()
        status = dispatch([word for word in words if word != "--debug"])
        sys.stdout.flush()  # a reader that has gone is noticed here
        return status
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return left.code or 0
        print(left.code, file=sys.stderr)
        return 1
    except BrokenPipeError:
        return _without_reader()
    except KeyboardInterrupt:
        if debug:
            raise
        print("\nstopped", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        if debug or not _for_the_user(error):
            traceback.print_exc()
            return 1
        _print_error(error, words)
        return 2 if _is_usage(error) else 1


def _with_home(word: str) -> str:
    """A flag with a path like `--run=~/x`, in which shells leave the ~ as it is."""
    name, equals, value = word.partition("=")
    if name.startswith("--") and value.startswith("~/"):
        return f"{name}{equals}{os.path.expanduser(value)}"
    return word


def _require_folder() -> None:
    """Refuse to start where torch would end the process with a text about its libraries."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError("the folder that this shell is in was removed: cd to another") from None


def _show_warning(message: Warning | str, *position: object, **more: object) -> None:
    """Show a warning of raffia's without the line of source."""
    from raffia.cli.style import printable

    print(f"note: {printable(str(message))}", file=sys.stderr)


def dispatch(words: Sequence[str]) -> int:
    """Run the command that the first word names.

    >>> dispatch(["evalute"])
    Traceback (most recent call last):
        ...
    raffia.cli.parser.UsageError: there is no command 'evalute'; did you mean evaluate?
    """
    if not words or words[0] in ("-h", "--help", "help"):
        if words[1:2] and words[0] == "help":
            return dispatch([*words[1:], "--help"])
        print(help_text())
        return 0 if words else 2
    if words[0] in ("--version", "-V"):
        print(f"raffia {__version__}")
        return 0
    return _command(words[0])(words[1:])


def help_text() -> str:
    """The text of `raffia --help`.

    >>> print(help_text().splitlines()[2])
    usage: raffia COMMAND ...
    """
    from raffia.cli.style import columns, help_width, paint

    lines = [
        f"raffia {__version__}: reinforcement learning by planning or from logged data",
        "",
        "usage: raffia COMMAND ...",
    ]
    across = help_width()
    width = max(len(name) for group in GROUPS.values() for name in group)
    for title, group in GROUPS.items():
        rows = [[name.ljust(width), summary] for name, summary in group.items()]
        lines += ["", paint(title, "bold", sys.stdout), columns(rows, width=across)]
    rows = [
        ["--help", "after a command: what it does, its options, and examples"],
        ["--version", "print the version"],
        ["--debug", "print tracebacks of errors"],
    ]
    steps = [list(step) for step in FIRST_STEPS.items()]
    lines += ["", paint("options", "bold", sys.stdout), columns(rows, width=across)]
    lines += ["", paint("first steps", "bold", sys.stdout)]
    lines += [columns(steps, width=across)]
    return "\n".join(lines)


def _command(name: str) -> Command:
    names = [name for group in GROUPS.values() for name in group]
    if name in names:
        word = name.replace("-", "_")
        found: Command = imported(f"raffia.cli.{HOMES.get(name, f'{word}:{word}')}")
        return found
    from raffia.cli.parser import nearest

    raise UsageError(f"there is no command {name!r}{nearest(name, names)}", "raffia --help")


def _is_usage(error: Exception) -> bool:
    if isinstance(error, UsageError):
        return True
    from raffia.train.config import ConfigError

    return isinstance(error, ConfigError)


def _for_the_user(error: Exception) -> bool:
    """Whether the message is meant to be read: the files' trouble, or one that raffia worded.

    Anything else is a fault of the code, where the traceback is what helps.
    """
    if isinstance(error, OSError | ImportError) or _is_usage(error):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    home = Path(__file__).parents[1]
    worded = isinstance(error, ValueError | RuntimeError | FloatingPointError)
    return worded and Path(frames[-1].filename).is_relative_to(home)


def _print_error(error: Exception, words: Sequence[str]) -> None:
    from raffia.cli.style import call, paint, printable

    print(f"{paint('error:', 'red', sys.stderr)} {printable(str(error))}", file=sys.stderr)
    for note in getattr(error, "__notes__", []):
        print(printable(note), file=sys.stderr)
    if isinstance(error, UsageError):
        for working in error.calls:
            print(f"  {paint(printable(working), 'cyan', sys.stderr)}", file=sys.stderr)
    elif _is_usage(error):
        names = [word for word in words[:2] if word.isidentifier() or ".py:" in word]
        command = call("raffia", *names, "--help")
        print(f"  {paint(printable(command), 'cyan', sys.stderr)}", file=sys.stderr)


def _open_what_is_closed() -> None:
    """Open /dev/null where a stream is closed (`>&-`): the next file opened would get the output
    otherwise."""
    if sys.stdout is not None and sys.stderr is not None:
        return
    fd = os.open(os.devnull, os.O_RDWR)
    while fd < 3:
        fd = os.open(os.devnull, os.O_RDWR)
    os.close(fd)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)


def _without_reader() -> int:
    """Discard the rest of the output, of whose missing reader Python would complain at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE
