"""raffia doctor: the words of the command; what it looks at is in doctor.py."""

from __future__ import annotations

from collections.abc import Sequence

from raffia.cli.parser import Parser

ABOUT = """\
Look at this machine: versions, the processor and its threads, the GPU, which extras are installed
and how to install the others, Atari's ROMs, whether kernels compile. Attach it when something is
wrong. It writes nothing."""


def doctor(words: Sequence[str]) -> int:
    """`raffia doctor`

    >>> doctor(["--all"])
    Traceback (most recent call last):
        ...
    raffia.cli.errors.UsageError: raffia doctor has no --all
    """
    Parser("raffia doctor", ABOUT, ["raffia doctor", "raffia doctor > doctor.txt"]).read(words)

    from raffia.cli.doctor import print_doctor

    return print_doctor()
