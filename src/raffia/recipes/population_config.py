"""Settings of a population. Imports no torch, so that `--help` is fast."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from raffia.envs.checked import (
    Checked,
    Fraction,
    NonNegativeInt,
    PositiveInt,
    at_least,
)
from raffia.evolution.config import (
    HyperRange,
    MutationConfig,
    SelectionConfig,
    check_hyper_name,
)

# Settings of runs of earlier versions, by section and name: what they are called now.
RENAMED = {("population", "share"): "truncation_fraction"}
FRACTIONS = ("alpha", "dirichlet_fraction", "discount", "gamma", "tau")


@dataclass(frozen=True, kw_only=True)
class PopulationConfig(Checked):
    """Members that learn side by side; after each evaluation the better ones continue, with
    changes.

    >>> PopulationConfig(size=8, ranges=("tau=0.5..0.95",)).hyper_ranges()["tau"].high
    0.95
    >>> PopulationConfig(size=8, ranges={"tau": (0.5, 0.95)})
    Traceback (most recent call last):
    ...
    ValueError: ranges={'tau': (0.5, 0.95)} must be texts: ranges=('learning_rate=1e-4..1e-2',)
    """

    size: PositiveInt = 1  # number of members; 1: a single agent without selection
    # Tournament selection, or truncation: the best replace the worst.
    method: Literal["tournament", "truncation"] = "tournament"
    tournament_size: PositiveInt = 2  # members drawn for each slot of the next generation
    elitism: bool = True  # keep the best member unchanged
    # EfficientZero: members learn from the steps of all members, or only from their own.
    replay: Literal["shared", "own"] = "shared"
    # Fraction of the members that truncation replaces by the best.
    truncation_fraction: float = 0.25
    eval_loop: int = 1  # number of latest evaluations whose mean is the fitness
    no_mutation: float = 0.2  # relative probability of no change
    hyper: float = 0.8  # relative probability of a changed hyper-parameter
    parameters: float = 0.0  # relative probability of noise on some weights
    activation: float = 0.0  # relative probability of another activation in a head
    architecture: float = 0.0  # relative probability of another architecture of a head
    # Probability that a change of architecture adds or removes a layer.
    new_layer_prob: Fraction = 0.2
    # Numbers of nodes to add or remove, of which one is drawn.
    nodes: tuple[PositiveInt, ...] = (16, 32, 64)
    mutation_sd: float = 0.1  # standard deviation of the noise on weights, relative to the weights
    # Hyper-parameters that can change, each as NAME=LOW..HIGH.
    ranges: tuple[str, ...] = ("learning_rate=1e-6..1",)
    grow: float = 2.0  # largest factor by which a mutation changes a hyper-parameter
    shrink: float = 0.5  # smallest factor by which a mutation changes a hyper-parameter
    # Probability that a hyper-parameter is redrawn from its whole range instead.
    resample: Fraction = 0.0
    # Largest factor on the initial hyper-parameters of all members but the first.
    spread: Annotated[float, at_least(1)] = 1.0
    # Workers that the members are divided among (see engine); 0: one batched program of all.
    # EfficientZero's members then learn separately, which differs from 0 in the last bits.
    workers: NonNegativeInt = 0

    def __post_init__(self) -> None:
        if isinstance(self.ranges, Mapping):
            raise ValueError(
                f"ranges={self.ranges} must be texts: ranges=('learning_rate=1e-4..1e-2',)"
            )
        super().__post_init__()
        if self.workers and (self.size == 1 or self.size % self.workers):
            raise ValueError(
                f"population.size={self.size} members cannot be divided equally among "
                f"population.workers={self.workers}: set "
                f"population.size={max(2, self.workers * -(-self.size // self.workers))}"
            )
        selection = self.selection()
        self.mutations()
        if self.size > 1:
            selection.check(self.size)

    def check(self, *, compile: bool, evolvable: bool, numbers: Collection[str]) -> None:
        """Raise ValueError for what a population cannot be combined with, or cannot change.

        compile: whether gradients are compiled.
        evolvable: whether the shape of the heads can change.
        numbers: the names of those that members may differ in.

        >>> PopulationConfig(size=2, architecture=0.5).check(
        ...     compile=False, evolvable=False, numbers=["learning_rate"])
        Traceback (most recent call last):
        ...
        ValueError: population.architecture=0.5 changes the shape of networks, but the heads of this
        run have a fixed shape: set model.evolvable_heads=True (on the command line
        --model.evolvable_heads), or population.architecture=0
        """
        if self.size == 1:
            return
        if compile:
            raise ValueError(
                "compile cannot be combined with a population, which is already one program of "
                "all members and would not become faster: leave compile out"
            )
        for name in ("activation", "architecture"):
            if getattr(self, name) > 0 and not evolvable:
                raise ValueError(
                    f"population.{name}={getattr(self, name):g} changes the shape of networks, "
                    "but the heads of this run have a fixed shape: set model.evolvable_heads=True "
                    f"(on the command line --model.evolvable_heads), or population.{name}=0"
                )
        for name in self.hyper_ranges():
            check_hyper_name(name, numbers)

    def longest_batch(self, batch_size: int) -> int:
        """The largest batch size that mutation can give a member that begins with this one.

        >>> PopulationConfig(size=2, ranges=("batch_size=32..128",)).longest_batch(64)
        128
        """
        if not self.changes_batch_size:
            return batch_size
        return math.floor(self.hyper_ranges()["batch_size"].high)

    @property
    def changes_batch_size(self) -> bool:
        """Whether members can have batches of different sizes."""
        return self.size > 1 and "batch_size" in self.hyper_ranges()

    def selection(self) -> SelectionConfig:
        """The selection: which members survive a generation."""
        return SelectionConfig(**self._for(SelectionConfig))

    def mutations(self) -> MutationConfig:
        """The mutations: how survivors are changed."""
        return MutationConfig(**self._for(MutationConfig), hyper_ranges=self.hyper_ranges())

    def _for(self, config: type[Any]) -> dict[str, Any]:
        """The settings that a config of `raffia.evolution` has, too."""
        own = {one.name for one in fields(self)}
        return {one.name: getattr(self, one.name) for one in fields(config) if one.name in own}

    def hyper_ranges(self) -> dict[str, HyperRange]:
        """The ranges of hyper-parameters, by name.

        >>> PopulationConfig(ranges=("tau",)).hyper_ranges()
        Traceback (most recent call last):
        ...
        ValueError: ranges: 'tau' must have the form NAME=LOW..HIGH, such as
        learning_rate=1e-5..1e-2
        """
        found = {}
        for text in self.ranges:
            name, _, span = text.partition("=")
            low, _, high = span.partition("..")
            try:
                numbers = float(low), float(high)
            except ValueError:
                raise ValueError(
                    f"ranges: {text!r} must have the form NAME=LOW..HIGH, such as "
                    "learning_rate=1e-5..1e-2"
                ) from None
            least = 1 if name == "batch_size" else 0
            if numbers[0] < least:
                raise ValueError(f"ranges: {text!r} must start at {least} or more")
            if name in FRACTIONS and not 0 <= min(numbers) <= max(numbers) <= 1:
                raise ValueError(f"ranges: {text!r} must be in 0..1")
            found[name] = HyperRange(
                *numbers,
                grow=self.grow,
                shrink=self.shrink,
                log=numbers[0] > 0,
                resample=self.resample,
            )
        return found
