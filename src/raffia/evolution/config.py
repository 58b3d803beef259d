"""Settings of a population's evolution. Imports no torch, so that help is fast.

The probabilities are relative: they need not add up to 1.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from raffia.hints import check_choice, check_range, did_you_mean

BATCH_SIZE = "batch_size"  # of hyper: the only one that must be equal in one stack
KINDS = ("hyper", "parameters", "activation", "architecture")  # of changes


@dataclass(frozen=True)
class SelectionConfig:
    """The settings for selecting members.

    >>> SelectionConfig(method="truncation", truncation_fraction=0.5).eval_loop
    1
    """

    method: Literal["tournament", "truncation"] = "tournament"
    tournament_size: int = 2  # members drawn for each slot of the next generation
    elitism: bool = True  # the best member continues unchanged
    truncation_fraction: float = 0.25  # fraction of members that truncation replaces by the best
    eval_loop: int = 1  # evaluations whose mean is the fitness

    def __post_init__(self) -> None:
        check_choice("method", self.method, ("tournament", "truncation"))
        check_range("eval_loop", self.eval_loop, 1)
        check_fraction(self.truncation_fraction)

    def check(self, size: int) -> None:
        """Raise ValueError unless a population of this size can be selected in this way.

        >>> SelectionConfig(tournament_size=3).check(2)
        Traceback (most recent call last):
        ...
        ValueError: tournament_size=3 is larger than the population of 2: pass 2 or fewer
        """
        # Truncation draws no tournament; its elitism is the same.
        drawn = self.tournament_size if self.method == "tournament" else 1
        check_tournament(drawn, self.elitism, size)


def check_fraction(fraction: float) -> None:
    """Raise ValueError unless truncation with this fraction is possible.

    >>> check_fraction(0.25)
    """
    if not 0 < fraction <= 0.5:
        raise ValueError(
            f"truncation_fraction={fraction} must be above 0 and at most 0.5: the worst members "
            "are replaced by the same number of the best"
        )


def check_tournament(tournament_size: int, elitism: bool, size: int) -> None:
    """Raise ValueError unless such a tournament is possible in a population of this size.

    >>> check_tournament(1, True, 1)
    Traceback (most recent call last):
    ...
    ValueError: elitism keeps the best member of the population unchanged, so a population of one
    would never change: pass elitism=False, or more members
    """
    check_range("tournament_size", tournament_size, 1)
    if tournament_size > size:
        raise ValueError(
            f"tournament_size={tournament_size} is larger than the population of {size}: pass "
            f"{size} or fewer"
        )
    if elitism and size == 1:
        raise ValueError(
            "elitism keeps the best member of the population unchanged, so a population of one "
            "would never change: pass elitism=False, or more members"
        )


@dataclass(frozen=True)
class HyperRange:
    """The range of a hyper-parameter, and the factors of its steps.

    A step multiplies by `grow` or by `shrink`; with `log` by what lies between them, drawn evenly
    in logarithms. With probability `resample` the number is drawn from the whole range instead.

    >>> HyperRange(1e-5, 1e-2, grow=2.0, shrink=0.5).low
    1e-05
    """

    low: float
    high: float
    grow: float = 1.2
    shrink: float = 0.8
    log: bool = False
    resample: float = 0.0

    def __post_init__(self) -> None:
        if not -math.inf < self.low < self.high < math.inf:
            raise ValueError(
                f"a range from {self.low} to {self.high} is empty or endless: low must be below "
                "high, and both finite"
            )
        if not 0 < self.shrink < 1 < self.grow:
            raise ValueError(
                f"grow={self.grow} must be above 1, and shrink={self.shrink} between 0 and 1"
            )
        if self.log and self.low <= 0:
            raise ValueError(f"low={self.low} must be above 0 in a logarithmic range")
        check_range("resample", self.resample, 0, 1)


@dataclass(frozen=True)
class MutationConfig:
    """The mutation of members after selection: relative probabilities of the kinds of change.

    >>> MutationConfig(hyper=1.0, hyper_ranges={"tau": HyperRange(0.5, 0.95)}).kinds
    ('none', 'hyper')
    """

    no_mutation: float = 0.4
    hyper: float = 0.0  # a step of one hyper-parameter of `hyper_ranges`
    parameters: float = 0.0  # noise on some weights
    activation: float = 0.0  # another activation in one network that can change it
    architecture: float = 0.0  # a layer or nodes more or less, in one network that can have them
    hyper_ranges: Mapping[str, HyperRange] = field(default_factory=dict)
    new_layer_prob: float = (
        0.2  # probability that a change of architecture is of a layer, else of nodes
    )
    nodes: tuple[int, ...] = (16, 32, 64)  # numbers of nodes to add or drop
    mutation_sd: float = 0.1  # standard deviation of the noise, relative to the weight
    mutated_fraction: float = 0.1  # fraction of a tensor's weights that are changed
    strong_fraction: float = 0.05  # fraction of those with ten times the noise
    reset_fraction: float = 0.05  # fraction of those drawn again, as wide as the tensor is
    mutate_elite: bool = False

    def __post_init__(self) -> None:
        for name in ("no_mutation", *KINDS, "mutation_sd"):
            check_range(name, getattr(self, name), 0)
        if not self.kinds:
            raise ValueError("all probabilities are 0: set at least one, such as no_mutation=1.0")
        for name in ("new_layer_prob", "mutated_fraction", "strong_fraction", "reset_fraction"):
            check_range(name, getattr(self, name), 0, 1)
        if self.strong_fraction + self.reset_fraction > 1:
            raise ValueError("strong_fraction and reset_fraction must add up to at most 1")
        if self.hyper > 0 and not self.hyper_ranges:
            raise ValueError(
                "hyper-parameters should be mutated, but none has a range: pass "
                'hyper_ranges={"learning_rate": HyperRange(1e-5, 1e-2)} (to a run: '
                'population.ranges=("learning_rate=1e-5..1e-2",)), or hyper=0'
            )
        if self.architecture > 0 and (not self.nodes or min(self.nodes) < 1):
            raise ValueError(f"nodes={self.nodes} must be numbers of nodes, each at least 1")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that can be drawn."""
        return tuple([kind for kind in ("none", *KINDS) if self.probability(kind) > 0])

    def probability(self, kind: str) -> float:
        """The relative probability of a kind.

        >>> MutationConfig(no_mutation=0.5).probability("none")
        0.5
        """
        found: float = getattr(self, "no_mutation" if kind == "none" else kind)
        return found


def check_hyper_name(name: str, names: Collection[str]) -> None:
    """Raise ValueError, with the nearest name, unless a learner has this hyper-parameter.

    names: of those that it has.

    >>> check_hyper_name("tau", ["tau"])
    """
    if name in names or name == BATCH_SIZE:
        return
    meant = did_you_mean(name, [*names, BATCH_SIZE], cutoff=0.4) or "."
    known = ", ".join(sorted(names)) or "none"
    raise ValueError(f"this learner has no hyper-parameter {name!r}{meant} It has: {known}")
