"""`Terminal`: lines that a person types, or that come through a pipe, until the person leaves."""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO


class Terminal:
    """Asks for lines, one by one; subclasses define what they mean.

    >>> import io
    >>> class Echo(Terminal):
    ...     def on_line(self, line):
    ...         self.leave() if line == "quit" else self.print_line(line.upper())
    >>> output = io.StringIO()
    >>> Echo(io.StringIO("hello\\nquit\\nmore\\n"), output).run()
    >>> print(output.getvalue())
    you: hello
    HELLO
    you: quit
    Goodbye.
    """

    question = "you: "

    def __init__(self, stdin: TextIO, stdout: TextIO) -> None:
        self._stdin, self._stdout = stdin, stdout
        self._is_open = True

    def run(self) -> None:
        """Take turns, until the person leaves or the input ends."""
        self.begin()
        while self._is_open:
            self.turn()

    def begin(self) -> None:
        """Print a text before the first line is read."""

    def turn(self) -> None:
        """Ask for a line, and handle it."""
        line = self._read()
        if line is None:  # the end of the file, or Ctrl-D
            self.print_line("")
            self.leave()
        else:
            self.on_line(line.strip())

    def on_line(self, line: str) -> None:
        """Handle a line; it may be empty."""
        raise NotImplementedError

    def leave(self) -> None:
        """End it."""
        self._is_open = False
        self.print_line("Goodbye.")

    def print_line(self, text: str) -> None:
        """Print a line."""
        print(text, file=self._stdout, flush=True)

    def _read(self) -> str | None:
        """The next line; None at the end."""
        if self._stdin is sys.stdin and self._stdin.isatty() and self._stdout is sys.stdout:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401, gives `input` its editing and the lines before
            try:
                return input(self.question)
            except EOFError:
                return None
        print(self.question, end="", file=self._stdout, flush=True)
        line = self._stdin.readline()
        if line and not self._stdin.isatty():  # the terminal shows what is typed, a pipe does not
            self.print_line(line.rstrip("\n"))
        return line.rstrip("\n") if line else None
