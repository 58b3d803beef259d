"""The population of a run: its start, evaluations, generations and checkpoints.

Legend: P members.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from raffia.evolution.generation import Evolution
from raffia.evolution.mutate import check_mutations
from raffia.evolution.population import BATCH_SIZE, Population, with_hyper
from raffia.functional.seeds import derive_seed, generator_for
from raffia.learner import Learner
from raffia.recipes.population_config import PopulationConfig
from raffia.tensordict.tensordict import TensorDict
from raffia.train.checkpoint import Checkpoint
from raffia.train.nan_guard import all_finite
from raffia.train.outcome import Evaluated, Outcome

POPULATION_KEY = "population"  # in a checkpoint's extras


class Members:
    """P members of a learner, which are selected after each evaluation.

    >>> from raffia.algorithms.ilql.config import *
    >>> from raffia.algorithms.ilql.learner import ILQLLearner
    >>> trunk = TrunkConfig(vocab_size=10, n_layer=1, n_head=2, n_embd=8, block_size=16)
    >>> learner = ILQLLearner(ILQLConfig(model=ILQLModelConfig(trunk=trunk)))
    >>> members = Members(PopulationConfig(size=4, spread=10.0), learner, seed=0)
    >>> state = members.begin(members.learner.init(0))
    >>> members.evaluated([0.0, 3.0, 1.0, 2.0])["members"], members.best
    ([0, 1, 2, 3], 1)
    >>> state, row = members.evolve(state)
    >>> row["parents"][0], members.best
    (1, 0)
    """

    def __init__(
        self,
        config: PopulationConfig,
        learner: Learner,
        seed: int,
        *,
        batches: Literal["shared", "own"] = "shared",
        grads: Literal["traced"] | None = None,  # see `Population`
        batch_size: int | None = None,  # at the start, where it has a range
    ) -> None:
        self.batch_size = batch_size
        self.config, self.seed = config, derive_seed(seed, "population")
        self.learner = Population(learner, config.size, batches=batches, grads=grads)
        self.evolution = Evolution(config.size, config.selection(), config.mutations())
        self.best = 0  # index of the best member
        self._is_evaluated = False  # whether there is an evaluation that nothing has followed from

    def begin(self, state: TensorDict) -> TensorDict:
        """The first state [P] of these members, with hyper-parameters that are spread."""
        spread: dict[str, list[float]] = {}
        ranges = self.config.hyper_ranges()
        if BATCH_SIZE in ranges and self.batch_size is not None:
            state = with_hyper(state, {BATCH_SIZE: [self.batch_size] * len(state)})
        for name, span in ranges.items():
            if self.config.spread > 1 and name in state["hyper"].keys():
                draws = generator_for(self.seed, "spread", name)
                by = torch.rand(len(state), generator=draws, dtype=torch.float64) * 2 - 1
                by[0] = 0
                factors = (by * math.log(self.config.spread)).exp().tolist()
                starts = state["hyper", name].tolist()
                spread[name] = [
                    min(max(start * factor, span.low), span.high) if i else start
                    for i, (start, factor) in enumerate(zip(starts, factors, strict=True))
                ]
                if not state["hyper", name].is_floating_point():
                    spread[name] = [round(number) for number in spread[name]]
        state = with_hyper(state, spread)
        check_mutations(state, self.config.mutations())
        return state

    def finite(self, state: TensorDict) -> list[int]:
        """The members whose weights are finite; others can't play, and have the worst fitness,
        NaN."""
        return [index for index in range(len(state)) if all_finite(state[index]["params"])]

    def evaluated(self, fitness: list[float]) -> dict[str, Any]:
        """Take the fitness of an evaluation; returns the members' values of its row."""
        self.evolution.record(fitness)
        known = [-math.inf if math.isnan(number) else number for number in fitness]
        self.best, self._is_evaluated = known.index(max(known)), True
        return {"fitness": fitness, "members": list(self.evolution.members)}

    def outcome(self, found: Mapping[int, Outcome], fitness: Mapping[int, float]) -> Evaluated:
        """The outcome of the best member, with the fitness of all in its row.

        found, fitness: of the members that were evaluated; the others have the worst, NaN.
        """
        size = self.learner.size
        values = self.evaluated([fitness.get(index, math.nan) for index in range(size)])
        best = found[self.best]  # the guard lets no population go on of which none is finite
        return Evaluated(best.score, {**best.values, **values})

    def evolve(self, state: TensorDict) -> tuple[TensorDict, dict[str, Any]] | None:
        """The next generation and its row; None where nothing was evaluated."""
        if not self._is_evaluated:
            return None
        draws = generator_for(self.seed, "generation", self.evolution.number)
        best = self.evolution.members[self.best]
        state, generation = self.evolution.step(state, draws)
        self.best = generation.members.index(best) if best in generation.members else 0
        self._is_evaluated = False
        return state, generation.as_row()

    def state(self) -> dict[str, Any]:
        """What a resume needs besides the members' tensors, as JSON holds it."""
        return {"best": self.best, "evolution": self.evolution.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Become what `state` gave."""
        self.best, self._is_evaluated = state["best"], False
        self.evolution.load_state(state["evolution"])


def best_of(found: Checkpoint, device: torch.device | None = None) -> TensorDict:
    """The learner's state of a checkpoint; of a population's, the best member's.

    >>> import tempfile
    >>> from raffia.train.checkpoint import Checkpoints
    >>> state = TensorDict(step=torch.tensor([5, 5]), w=torch.tensor([1.0, 2.0]), batch_size=[2])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Checkpoints(folder).save(5, {"state": state}, {"population": {"best": 1}})
    ...     best_of(Checkpoints(folder).newest(print))["w"]
    tensor(2.)
    """
    state = found.tensors("state") if device is None else found.tensors("state", device)
    if POPULATION_KEY in found.extras:
        return state[found.extras[POPULATION_KEY]["best"]].clone()
    return state


def weights_of_each(
    weight: Tensor,  # [P, B], importance weights
    batch_size: Tensor,  # int64 [P]
) -> Tensor:  # [P, B]
    """The weights, of which the largest is 1 among the first so many that a member learns from.

    >>> weights_of_each(torch.tensor([[0.5, 1.0], [0.5, 1.0]]), torch.tensor([1, 2]))
    tensor([[1.0000, 2.0000],
            [0.5000, 1.0000]])
    """
    taken = torch.arange(weight.shape[1]) < batch_size.cpu().unsqueeze(1)
    return weight / weight.where(taken, 0.0).amax(1, keepdim=True)
