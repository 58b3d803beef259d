"""A generation: fitness, selection, mutation; and lineage.

Legend: P members, E evaluations of each. Selection is `state[parents]`: the slot that each member's
state comes from, chosen by fitness.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raffia.evolution.config import (
    MutationConfig,
    SelectionConfig,
    check_fraction,
    check_tournament,
)
from raffia.evolution.mutate import mutate
from raffia.hints import check_range
from raffia.tensordict.tensordict import TensorDict


@dataclass(frozen=True)
class Generation:
    """A record of one step of evolution; all lists are [P].

    >>> kinds, changes = ["none", "hyper"], ["", "x"]
    >>> generation = Generation(1, [1.0, 3.0], [1, 1], [1, 2], [1, 1], kinds, changes, {})
    >>> generation.as_row()["fitness"], generation.parents
    ([1.0, 3.0], [1, 1])
    """

    number: int  # counted from 1
    fitness: list[float]  # fitness of the members before, by slot
    parents: list[int]  # the slot that each slot's state comes from
    members: list[int]  # the member at each slot now: a number that no other ever had
    parent_members: list[int]  # the member that each comes from
    kinds: list[str]  # kinds of mutation
    changes: list[str]  # the mutations in words
    hyper: dict[str, list[float]]  # hyper-parameters after it, by name

    def as_row(self) -> dict[str, Any]:
        """The generation's row, as JSON can hold it.

        >>> Generation(1, [0.0], [0], [0], [0], ["none"], [""], {}).as_row()["generation"]
        1
        """
        row = dict(vars(self))
        row["fitness"] = [x if math.isfinite(x) else None for x in self.fitness]
        return {"generation": row.pop("number"), **row}


class Evolution:
    """Selection and mutation of a population's state, with its lineage.

    It keeps fitness, and the numbers of members, in `state()`, a dict for JSON; its draws come from
    a generator that is given for each step, so that a resumed run repeats them.

    >>> from raffia.evolution.config import *
    >>> evolution = Evolution(3, SelectionConfig(), MutationConfig())
    >>> state = TensorDict(hyper=TensorDict(tau=torch.tensor([0.5, 0.7, 0.9])), batch_size=[3])
    >>> evolution.record(torch.tensor([1.0, 5.0, 3.0]))
    >>> state, generation = evolution.step(state, torch.Generator().manual_seed(0))
    >>> generation.parents[0], generation.members[0], state["hyper", "tau"][0]
    (1, 1, tensor(0.7000))
    """

    def __init__(self, size: int, selection: SelectionConfig, mutations: MutationConfig) -> None:
        selection.check(size)
        self.size, self.selection, self.mutations = size, selection, mutations
        self.number = 0  # of generations so far
        self.members = list(range(size))
        self._next = size
        self._fitness: list[list[float]] = []  # [E][P], by slot; a copy takes its parent's along

    def record(self, fitness: Tensor | Sequence[float]) -> None:
        """Record the fitness of all members [P] from one evaluation.

        >>> Evolution(2, SelectionConfig(), MutationConfig()).record([1.0])
        Traceback (most recent call last):
        ...
        ValueError: got the fitness of 1 members, but the population has 2
        """
        row = [float(number) for number in fitness]
        if len(row) != self.size:
            raise ValueError(
                f"got the fitness of {len(row)} members, but the population has {self.size}"
            )
        self._fitness = [*self._fitness, row][-self.selection.eval_loop :]

    def step(self, state: TensorDict, generator: torch.Generator) -> tuple[TensorDict, Generation]:
        """Return the next generation's state [P], in separate memory, and a record of the step."""
        if not self._fitness:
            raise ValueError("no member has been evaluated yet: call record(fitness) first")
        if list(state.batch_size) != [self.size]:
            raise ValueError(
                f"the state of a population of {self.size} must be [{self.size}], but this one is "
                f"{list(state.batch_size)}: pass the stacked states of all of its members"
            )
        fitness = mean_fitness(
            torch.tensor(self._fitness, dtype=torch.float64), self.selection.eval_loop
        )
        parents, best = self._parents(fitness, generator)
        spared = () if best is None or self.mutations.mutate_elite else (best,)
        state, changes = mutate(state[parents], self.mutations, generator, spared=spared)
        chosen = parents.tolist()
        old, self.members = self.members, self._named(chosen, best)
        self._fitness = [[row[p] for p in chosen] for row in self._fitness]
        self.number += 1
        hyper = state.get("hyper", TensorDict())  # a learner may have none
        generation = Generation(
            self.number,
            fitness.tolist(),
            chosen,
            list(self.members),
            [old[p] for p in chosen],
            [change.kind for change in changes],
            [change.what for change in changes],
            {str(name): numbers.tolist() for name, numbers in hyper.items()},
        )
        return state, generation

    def _parents(self, fitness: Tensor, generator: torch.Generator) -> tuple[Tensor, int | None]:
        """The parents, and the slot of the elite, if there is one."""
        selection = self.selection
        if selection.method == "truncation":
            parents = truncation(
                fitness, fraction=selection.truncation_fraction, generator=generator
            )
            best = int(fitness.argmax())
        else:
            parents = tournament(
                fitness,
                tournament_size=selection.tournament_size,
                elitism=selection.elitism,
                generator=generator,
            )
            best = 0
        if fitness.max() > -torch.inf:  # of members that are NaN none learns any more
            parents[fitness[parents] == -torch.inf] = fitness.argmax()
        return parents, best if selection.elitism else None

    def _named(self, parents: list[int], best: int | None) -> list[int]:
        """The member numbers: one heir of each parent keeps the parent's; others get new ones.

        It is the elite; else the one that has stayed in its slot; else the first.
        """
        stayed = [slot for slot, parent in enumerate(parents) if slot == parent]
        first = [] if best is None else [best]
        heirs: dict[int, int] = {}
        for slot in (*first, *stayed, *range(len(parents))):
            heirs.setdefault(parents[slot], slot)
        out = []
        for slot, parent in enumerate(parents):
            if heirs[parent] == slot:
                out.append(self.members[parent])
            else:
                out.append(self._next)
                self._next += 1
        return out

    def state(self) -> dict[str, Any]:
        """The state for a resume."""
        return {
            "number": self.number,
            "members": list(self.members),
            "next": self._next,
            # JSON has no infinity
            "fitness": [[x if math.isfinite(x) else str(x) for x in row] for row in self._fitness],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state` gave."""
        if len(state["members"]) != self.size:
            raise ValueError(
                f"the saved state has {len(state['members'])} members, but the population has "
                f"{self.size}"
            )
        self.number, self._next = state["number"], state["next"]
        self.members = list(state["members"])
        self._fitness = [[float(x) for x in row] for row in state["fitness"]]


def mean_fitness(history: Tensor, last: int) -> Tensor:  # [E, P] -> [P]
    """The mean over the last evaluations; what is not a number counts as the worst, -inf.

    >>> mean_fitness(torch.tensor([[9.0, 1.0], [2.0, 1.0], [4.0, torch.nan]]), last=2)
    tensor([3., -inf])
    """
    check_range("eval_loop", last, 1)
    return _worst_if_nan(history[-last:].mean(0))


def tournament(
    fitness: Tensor,  # [P], the larger the better
    *,
    tournament_size: int = 2,
    elitism: bool = True,
    population_size: int | None = None,  # slots to fill; None: P
    generator: torch.Generator,
) -> Tensor:  # int64 [slots]
    """The parents that tournaments choose.

    With elitism the first slot is the best member's. Each other is that of the best of
    `tournament_size` members, drawn with replacement; of equals the first drawn.

    Source: Miller & Goldberg (1995), "Genetic Algorithms, Tournament Selection, and the Effects of
    Noise", section 2.

    >>> generator = torch.Generator().manual_seed(0)
    >>> tournament(torch.tensor([1.0, 5.0, 3.0]), tournament_size=3, generator=generator)[0]
    tensor(1)
    """
    size = len(fitness)
    slots = size if population_size is None else population_size
    check_tournament(tournament_size, elitism, size)
    check_range("population_size", slots, 1)
    fitness = _worst_if_nan(fitness)
    drawn = torch.randint(size, (slots, tournament_size), generator=generator)
    winners = fitness.cpu()[drawn].argmax(1, keepdim=True)
    parents = drawn.gather(1, winners).squeeze(1)
    if elitism:
        parents[0] = int(fitness.argmax())
    return parents.to(fitness.device)


def truncation(
    fitness: Tensor,  # [P], the larger the better
    *,
    fraction: float = 0.25,
    generator: torch.Generator,
) -> Tensor:  # int64 [P]
    """The parents of truncation: each of the worst fraction is replaced by one of the best.

    All others keep their slots. Which of the best is drawn.

    Source: Jaderberg et al. (2017), arXiv 1711.09846, section 4.1.1.

    >>> generator = torch.Generator().manual_seed(0)
    >>> truncation(torch.tensor([1.0, 5.0, 3.0, 4.0]), fraction=0.25, generator=generator)
    tensor([1, 1, 2, 3])
    """
    check_fraction(fraction)
    size = len(fitness)
    order = _worst_if_nan(fitness).argsort(descending=True, stable=True)
    num = max(1, int(fraction * size)) if size > 1 else 0
    parents = torch.arange(size, device=fitness.device)
    if num:
        drawn = torch.randint(num, (num,), generator=generator).to(fitness.device)
        parents[order[size - num :]] = order[:num][drawn]
    return parents


def _worst_if_nan(fitness: Tensor) -> Tensor:
    return torch.where(fitness.isnan(), -torch.inf, fitness)
