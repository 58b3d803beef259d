"""raffia check-env: whether an environment can be learnt in."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from raffia.cli.parser import Parser, UsageError
from raffia.cli.style import paint

ABOUT = """\
Play in an environment with random actions, and report point by point whether it keeps the contract:
shapes and types, the same episode from the same seed, terminated and truncated ends, masks, numbers
that are finite. For what fails it says how to fix it. It writes nothing; exit status 1: it fails.

An environment of your own: register it with Gymnasium in a module, and name both."""
EXAMPLES = [
    "raffia check-env CartPole-v1",
    "raffia check-env atari/pong --steps 500",
    "raffia check-env my_envs:Corridor-v0  # importing it registers",
]
COLOURS = {"ok": "green", "note": "yellow", "fails": "red"}


def check_env(words: Sequence[str]) -> int:
    """`raffia check-env ID`

    >>> check_env([])
    Traceback (most recent call last):
        ...
    raffia.cli.parser.UsageError: which environment?
    """
    parser = Parser("raffia check-env", ABOUT, EXAMPLES)
    parser.add_argument("id", metavar="ID", nargs="?", help="its name; raffia list environments")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of its episodes; 0")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="to play; 200")
    args = parser.read(words)
    if args.id is None:
        raise UsageError("which environment?", "raffia check-env CartPole-v1")

    from raffia.recipes.environments import check_env_id

    found = check_env_id(args.id, seed=args.seed, num_steps=args.steps)
    head, *lines = found.lines()
    print(paint(head, "bold", sys.stdout))
    for line in lines:
        verdict = line.partition(" ")[0]
        mark = paint(verdict, COLOURS[verdict], sys.stdout) if verdict in COLOURS else verdict
        print(mark + line.removeprefix(verdict))
    return 0 if found.ok else 1
