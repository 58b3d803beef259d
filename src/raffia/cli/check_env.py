"""raffia check-env: whether an environment can be learnt in."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from raffia.cli.parser import Parser, UsageError, whole
from raffia.cli.style import paint, verdict

ABOUT = """\
Take random actions in an environment and check, point by point, that it keeps the contract: shapes
and dtypes, the same episode from the same seed, terminated and truncated ends, masks, finite
numbers. Each failure comes with a fix. Nothing is written; the exit status is 1 on failure.

Your own environment is named by its class, or by a function that makes it."""
EXAMPLES = [
    "raffia check-env CartPole-v1",
    "raffia check-env atari/pong --steps 500",
    "raffia check-env corridor.py:Corridor",
    "raffia check-env my_envs:Corridor-v0  # importing my_envs registers it",
]


def check_env(words: Sequence[str]) -> int:
    """`raffia check-env ID`

    >>> check_env([])
    Traceback (most recent call last):
        ...
    raffia.cli.parser.UsageError: which environment?
    """
    parser = Parser("raffia check-env", ABOUT, EXAMPLES)
    parser.add_argument(
        "id", metavar="ID", nargs="?", help="name of the environment; see raffia list environments"
    )
    parser.flag("--seed N", "seed of the episodes", whole(0), 0)
    parser.flag("--steps N", "number of steps", whole(1), 200)
    args = parser.read(words)
    if args.id is None:
        raise UsageError("which environment?", "raffia check-env CartPole-v1")

    from raffia.envs import check
    from raffia.envs.config import EnvConfig
    from raffia.envs.make import make_env

    make = partial(make_env, EnvConfig(id=args.id, num_envs=2))
    found = check.check_env(make, seed=args.seed, num_steps=args.steps)
    head, *lines = found.lines()
    print(paint(head, "bold", sys.stdout))
    for line in lines:
        print(verdict(line, sys.stdout))
    return 0 if found.ok else 1
