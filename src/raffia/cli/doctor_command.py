"""raffia doctor: the words of the command; what it looks at is in doctor.py."""

from __future__ import annotations

from collections.abc import Sequence

from raffia.cli.parser import Parser

ABOUT = """\
Look at this machine: versions, the processor and its threads, the GPU, which extras are installed
and how to install the others, Atari's ROMs, whether kernels compile. Attach it when something is
wrong. It writes nothing.

With --engine.name it looks at where workers would run instead: a worker is started there, and
called."""


def doctor(words: Sequence[str]) -> int:
    """`raffia doctor`

    >>> doctor(["--all"])
    Traceback (most recent call last):
        ...
    raffia.cli.errors.UsageError: raffia doctor has no --all
    """
    examples = [
        "raffia doctor",
        "raffia doctor > doctor.txt",
        "raffia doctor --engine.name process",
        "raffia doctor --engine.name ray --engine.address auto",
    ]
    parser = Parser("raffia doctor", ABOUT, examples)
    names = ("inline", "process", "ray")
    parser.add_argument("--engine.name", dest="engine", choices=names, help="where workers run")
    parser.add_argument("--engine.address", dest="address", default="", help="of a Ray cluster")
    args = parser.read(words)

    from raffia.cli.doctor import print_doctor

    if args.engine is None:
        return print_doctor()

    from raffia.cli.doctor_engine import engine_checks

    return print_doctor(look=lambda: engine_checks(args.engine, args.address))
