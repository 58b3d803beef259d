"""What `benchmarks.population` times: learners, numbers of members, aims.

This file imports nothing but the standard library: it runs in every package's environment.
"""

from dataclasses import dataclass

from benchmarks.search_worker import Case


@dataclass(frozen=True)
class Kind:
    """A learner whose populations are measured."""

    name: str
    summary: str
    members: tuple[int, ...]
    aim: tuple[int, float] | None = None  # so many members at most so many times ...
    of_sum: bool = False  # ... as many steps one after the other, and not one step
    peer: bool = False  # AgileRL has one
    big: bool = False  # seconds a step


KINDS = [
    Kind("cartpole", "EfficientZero's networks of preset `cartpole`", (1, 2, 4, 8, 16), (8, 4.0)),
    Kind("dqn", "Q-learning with a small MLP", (1, 2, 4, 8, 16, 32), (32, 12.0), peer=True),
    Kind("wordle", "ILQL's networks of preset `wordle`", (1, 2, 4, 8, 16)),
    Kind(
        "gpt",
        "ILQL's small GPT",
        (1, 2, 4, 8),
        (4, 1.0),
        of_sum=True,
        peer=True,
        big=True,
    ),
]

BATCH = 64  # windows of EfficientZero, transitions of Q-learning, games of Wordle
UNROLLED = 5
OBSERVATION, ACTIONS, HIDDEN = 4, 2, 64  # of Q-learning: 4-64-64-2
LEARNING_RATE, GAMMA, TAU = 1e-3, 0.99, 0.01


def one_after_the_other(kind: str, members: int) -> Case:
    """A generation's step in AgileRL. Of searches' cases "batch" is the number of members here.

    >>> one_after_the_other("dqn", 8).batch
    8
    """
    return Case(kind, members, 0, 0, policy="train")
