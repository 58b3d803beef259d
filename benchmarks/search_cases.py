"""What `benchmarks.search` measures, and what it should come to."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.search_models import NUM_ACTIONS
from benchmarks.search_row import Row
from benchmarks.search_worker import Case

BATCHES = {
    "null": (1, 8, 64, 256),
    "mlp": (1, 8, 64, 256),
    "sampled": (1, 8, 64),
    "conv": (1, 8, 64),
}
SIMULATIONS = (25, 50)
NULL_ACTIONS = (2, 18, 82)


def cases() -> Iterator[Case]:
    """
    >>> sum(1 for _ in cases())
    44
    """
    for model, batches in BATCHES.items():
        for actions in NULL_ACTIONS if model == "null" else (NUM_ACTIONS[model],):
            for simulations in SIMULATIONS:
                for batch in batches:
                    yield Case(model, batch, simulations, actions)


def rough(case: Case) -> bool:
    """Whether a rough look has it."""
    return case.simulations == 50 and case.batch in (8, 64) and case.actions < 82


@dataclass(frozen=True)
class Aim:
    name: str
    measured: Callable[[Row], float | None]  # None: the compared package is missing
    bound: float
    at_most: bool = False

    def holds(self, measured: float) -> bool:
        return measured <= self.bound if self.at_most else measured >= self.bound


def speed_of(peer: str) -> Callable[[Row], float | None]:
    return lambda row: row.speed.get(peer)


# How many times as fast as LightZero a prototype was with 50 simulations: actions -> batch -> times
NULL_SPEED = {
    2: {1: 2.4, 8: 2.7, 64: 4.1, 256: 6.4},
    18: {1: 2.5, 8: 3.0, 64: 6.0, 256: 9.7},
    82: {1: 2.7, 8: 4.3, 64: 10.9, 256: 18.5},
}
MLP_SPEED = {1: 4.0, 8: 3.0, 64: 2.0, 256: 1.5}
MCTX_SPEED = {1: 0.5, 8: 0.5, 64: 1.0, 256: 1.0}
OVERHEAD = 0.10  # of tree and glue in the search with the MLP, from 8 roots on


def aims_of(case: Case) -> list[Aim]:
    """
    >>> [aim.bound for aim in aims_of(Case("mlp", 1, 50, 2))]
    [4.0, 0.5]
    """
    if case.model == "null" and case.simulations == 50:
        bound = NULL_SPEED[case.actions][case.batch]
        return [Aim("times LightZero's speed", speed_of("lightzero"), bound)]
    if case.model != "mlp":
        return []
    aims = [
        Aim("times LightZero's speed", speed_of("lightzero"), MLP_SPEED[case.batch]),
        Aim("times mctx's speed", speed_of("mctx"), MCTX_SPEED[case.batch]),
    ]
    if case.batch >= 8:
        aims.append(Aim("tree and glue, share", Row.overhead, OVERHEAD, at_most=True))
    return aims
