"""Hours of a run of the preset `atari100k` on several cards: estimates, from measured constants.

    python -m benchmarks.rates           # the table of docs/scale.md, in Markdown

A run is a pipeline: actors play, reanalyzers make batches, learners learn from them. Each stage has
the rate of one card times the cards that it has, and the run has that of its slowest stage. It
leaves out what stages take from each other: the replay's process, memory, weights and sums over
the network; so it says at best, and where the run would stop being faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from raffia.recipes.efficientzero.presets import PRESETS


@dataclass(frozen=True)
class Constants:
    """Rates of one GPU at the preset's sizes, by `python -m benchmarks.device`."""

    name: str
    act: float  # environment steps a second
    batch: float  # batches with reanalyze a second
    learn: float  # updates a second
    in_turn: float  # updates a second of the whole loop, one stage after the other
    batch_kernels: float  # seconds of a batch in which the card computes
    learn_kernels: float  # ... of an update


# One H200 with `--cudagraphs`, and `--precision bfloat16` as well: docs/benchmarks.md, "On a card".
MEASURED = (
    Constants("float32", 274.0, 5.1, 21.5, 4.2, 0.080, 0.041),
    Constants("bfloat16", 269.0, 6.0, 32.0, 5.3, 0.050, 0.025),
)
SHARED_UPDATE = 0.71  # an update of two processes / by one: `scale_gradients` of benchmarks.scale


@dataclass(frozen=True)
class Layout:
    """How cards are divided: a learner has one of its own, but where there is one card in all."""

    cards: int
    learners: int = 1
    reanalyzers_per_card: int = 2  # processes, which fill each other's pauses; 0: all in turn

    @property
    def cards_of_reanalyzers(self) -> int:
        """How many cards make batches."""
        return max(1, self.cards - self.learners)

    @property
    def reanalyzers(self) -> int:
        """How many processes make batches."""
        return self.cards_of_reanalyzers * self.reanalyzers_per_card


LAYOUTS = (
    *(Layout(1, reanalyzers_per_card=each) for each in (0, 1, 2)),
    *(Layout(2), Layout(4), Layout(8), Layout(8, learners=2)),
)


@dataclass(frozen=True)
class Estimate:
    """What a run does at best, and what it waits for."""

    updates_per_second: float
    bottleneck: str
    num_actors: int  # each with as much of a card as acting was measured with

    @property
    def hours(self) -> float:
        """Of all updates of the preset."""
        return PRESETS["atari100k"].num_updates / self.updates_per_second / 3600


def estimate(layout: Layout, of: Constants) -> Estimate:
    """The rate of a layout: that of its slowest stage.

    >>> one = Constants("x", act=10.0, batch=1.0, learn=3.0, in_turn=0.5, batch_kernels=0.5,
    ...                 learn_kernels=0.25)
    >>> found = [estimate(Layout(cards), one) for cards in (1, 2, 8)]
    >>> [(round(one.updates_per_second, 2), one.bottleneck) for one in found]
    [(1.33, 'the card'), (2.0, 'reanalyzers'), (3.0, 'learner')]
    """
    if not layout.reanalyzers:
        rates = {"all in turn": of.in_turn}
    else:
        shared = of.learn_kernels if layout.cards == 1 else 0.0
        # At most until their cards compute all the time.
        card = layout.cards_of_reanalyzers / (of.batch_kernels + shared)
        learn = of.learn if layout.learners == 1 else of.learn / SHARED_UPDATE
        batches = layout.reanalyzers * of.batch
        rates = {"reanalyzers": batches, "the card": card, "learner": learn}
    bottleneck = min(rates, key=rates.__getitem__)
    collect = PRESETS["atari100k"].collect
    steps = rates[bottleneck] / collect.updates_per_env_step
    return Estimate(rates[bottleneck], bottleneck, math.ceil(steps / of.act))


def table() -> Iterator[str]:
    """The lines of a table in Markdown."""
    yield (
        "| cards | actors | reanalyzers | learners | updates/s: float32, bfloat16 | hours | "
        "it waits for |"
    )
    yield "|---|---|---|---|---|---|---|"
    for layout in LAYOUTS:
        found = [estimate(layout, constants) for constants in MEASURED]
        rates = ", ".join(f"{one.updates_per_second:.1f}" for one in found)
        hours = ", ".join(f"{one.hours:.1f}" for one in found)
        waits = " / ".join(dict.fromkeys(one.bottleneck for one in found))
        actors = max(one.num_actors for one in found) if layout.reanalyzers else 0
        yield (
            f"| {layout.cards} | {actors} | {layout.reanalyzers} | {layout.learners} | {rates} | "
            f"{hours} | {waits} |"
        )


if __name__ == "__main__":
    print(*table(), sep="\n")
