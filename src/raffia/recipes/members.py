"""The population of a run: its start, evaluations, generations and checkpoints.

Its members learn as one program, or divided among workers (`MembersAcross`) with the same bits.

Legend: P members, W workers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from raffia.distributed.pool import Pool
from raffia.evolution.config import BATCH_SIZE
from raffia.evolution.generation import Evolution
from raffia.evolution.mutate import check_mutations
from raffia.evolution.population import Population, with_hyper
from raffia.functional.seeds import derive_seed, generator_for
from raffia.learner import Learner, applies_stacks, step_of
from raffia.recipes.population_config import PopulationConfig
from raffia.tensordict.stack import cat
from raffia.tensordict.tensordict import TensorDict
from raffia.train.checkpoint import Checkpoint
from raffia.train.evaluations import Evaluated, Outcome
from raffia.train.nan_guard import all_finite

POPULATION_KEY = "population"  # in a checkpoint's extras
CHAMPION_KEY = "champion"  # a file of a checkpoint
LONGEST = 60.0  # seconds of learning that a lost worker makes again, at most


@dataclass
class Champion:
    """The best member as it was evaluated, where the generation after that has changed it or left
    it out; until the next update. A checkpoint's score is that of this one.
    """

    found: TensorDict = field(default_factory=TensorDict)  # its state; empty: there is none

    def state(self) -> TensorDict:
        """The state for a checkpoint."""
        return self.found

    def load_state(self, state: TensorDict) -> None:
        """Load a state that `state` gave."""
        self.found = state


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
        self.champion = Champion()
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
        """The members whose weights are finite; others cannot play, and have the worst fitness,
        NaN.
        """
        return [index for index in range(len(state)) if all_finite(state[index]["params"])]

    def evaluated(self, fitness: list[float]) -> dict[str, Any]:
        """Record the fitness of an evaluation; returns the members' values for its row."""
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
        best, evaluated = self.evolution.members[self.best], state[self.best]
        state, generation = self.evolution.step(state, draws)
        survives = best in generation.members
        self.best = generation.members.index(best) if survives else 0
        if not survives or generation.kinds[self.best] != "none":
            self.champion.found = evaluated.clone()
        self._is_evaluated = False
        return state, generation.as_row()

    def state(self) -> dict[str, Any]:
        """The state that a resume needs besides the members' tensors, as JSON values."""
        return {"best": self.best, "evolution": self.evolution.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
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
    if found.has(CHAMPION_KEY):
        return found.tensors(CHAMPION_KEY, device)
    state = found.tensors("state", device)
    if POPULATION_KEY in found.extras:
        return state[found.extras[POPULATION_KEY]["best"]].clone()
    return state


def weights_of_each(
    weight: Tensor,  # [P, B], importance weights
    batch_size: Tensor,  # int64 [P]
) -> Tensor:  # [P, B]
    """Return importance weights whose largest value within each member's own rows is 1.

    >>> weights_of_each(torch.tensor([[0.5, 1.0], [0.5, 1.0]]), torch.tensor([1, 2]))
    tensor([[1.0000, 2.0000],
            [0.5000, 1.0000]])
    """
    taken = torch.arange(weight.shape[1]) < batch_size.cpu().unsqueeze(1)
    return weight / weight.where(taken, 0.0).amax(1, keepdim=True)


class MembersRole:
    """Some members of a population in a worker: each task is one update of all of them.

    It is given where its members stand, and makes updates in turn. A new worker is given, too, the
    batches of the updates since, and makes these again first.

    learner: of each member.
    share: how many members it has.
    batches, grads: as of `Population`.
    context: made around each update, such as a number of threads.
    device: where they learn.

    >>> from raffia.distributed.check_engine import MeanLearner
    >>> role = MembersRole(MeanLearner("{}", 0), 2)
    >>> members = TensorDict(params=TensorDict(w=torch.tensor([0.0, 1.5]), batch_size=[2]),
    ...                      buffers=TensorDict(batch_size=[2]), batch_size=[2])
    >>> batch = TensorDict(x=torch.arange(4.0), batch_size=[4])
    >>> role.do(TensorDict(members=members, batch=batch), None)["loss"]
    tensor([1.7500, 0.6250])
    """

    def __init__(
        self,
        learner: Learner,
        share: int,
        *,
        batches: Literal["shared", "own"] = "shared",
        grads: Literal["each"] | None = None,
        context: Callable[[], AbstractContextManager[object]] = nullcontext,
        device: torch.device | str = "cpu",
    ) -> None:
        # As the stack of all members steps, also where this worker has only one of them.
        apply: Literal["stack"] | None = "stack" if applies_stacks(learner) else None
        self.learner = Population(learner, share, batches=batches, grads=grads, apply=apply)
        self.state: TensorDict | None = None
        self._context, self._device = context, torch.device(device)

    def load(self, state: TensorDict) -> None:
        """Load the members' state, and make the updates since then."""
        self.state = state["members"].clone().to(self._device)
        for name in sorted(state["batches"].keys(), key=int):
            self._update(state["batches", name])

    def do(self, task: TensorDict, weights: TensorDict | None) -> TensorDict:
        """The metrics of an update, of members that the task may bring; or, without a batch, the
        members."""
        if "members" in task.keys():
            self.state = task["members"].clone().to(self._device)
        if "batch" in task.keys():
            return self._update(task["batch"])
        assert self.state is not None
        return self.state

    def _update(self, batch: TensorDict) -> TensorDict:
        assert self.state is not None
        with self._context():
            update, metrics = self.learner.grads(self.state, batch.to(self._device))
            self.state = self.learner.apply(self.state, update)
        return metrics


class MembersAcross:
    """A population whose members learn in workers, as a learner.

    Between two updates the loop holds the members' "step" and "hyper" alone; `whole(state)` gives
    all of the state, for an evaluation, a generation or a checkpoint. A state that `apply` did not
    give last, such as that of a new generation, is sent to the workers with the next batch. A
    worker that is lost is started again, given the last whole state and the batches since.

    population: of all members.
    pool: the workers, each a `MembersRole` of P / W members.
    batches: those from an update on, made again; None: those since the last
        whole state stay in memory.
    device: where `whole` gives the state.

    >>> from raffia.distributed.check_engine import MeanLearner
    >>> from raffia.distributed.engine import InlineEngine
    >>> pool = Pool(InlineEngine(), "raffia.distributed.check_engine:Counter", "{}", 3)
    >>> population = Population(MeanLearner("{}", 0), 4)
    >>> MembersAcross(population, pool, batches=lambda update: iter([]))
    Traceback (most recent call last):
    ...
    ValueError: 4 members cannot be divided equally among 3 workers
    """

    def __init__(
        self,
        population: Population,
        pool: Pool,
        *,
        batches: Callable[[int], Iterator[TensorDict]] | None,
        device: str = "cpu",
    ) -> None:
        self._device = torch.device(device)
        num_workers = pool.num_workers
        if population.size % num_workers:
            raise ValueError(
                f"{population.size} members cannot be divided equally among {num_workers} workers"
            )
        self.population, self._batches = population, batches
        self._recent_batches: list[TensorDict] = []  # batches since, where they can't be made again
        self.share = population.size // num_workers
        self.pool, pool.state_of = pool, self._state_of
        self._longest = min(LONGEST, pool.patience / 4)
        self._key = 0
        self._outline: TensorDict | None = None  # what `apply` gave last
        self._base: TensorDict | None = None  # the last state that was whole
        self._num_since = 0  # updates that were made since
        self._since = time.monotonic()

    def init(self, seed: int) -> TensorDict:
        """The state of all members."""
        return self.population.init(seed)

    def grads(self, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, TensorDict]:
        """Make one update of all members from this batch; returns the metrics of each.

        The gradients stay where they are: the update is empty.
        """
        is_new = state is not self._outline
        if is_new:
            self._hold_state(state)
        elif time.monotonic() - self._since > self._longest:
            self.whole(state)
        workers = range(self.pool.num_workers)
        tasks = [TensorDict(batch=self._batch_of(batch, worker)) for worker in workers]
        if is_new:
            for worker, task in enumerate(tasks):
                task["members"] = self._part(state, worker)
        answers = self._answers(tasks)
        if self._batches is None:
            self._recent_batches.append(batch)
        names = answers[0].keys()
        metrics = {name: torch.cat([answer[name] for answer in answers]) for name in names}
        return TensorDict(), TensorDict(metrics)

    def apply(self, state: TensorDict, update: TensorDict) -> TensorDict:
        """The members' steps, one higher; all other entries are changed in the workers."""
        self._num_since += 1
        self._outline = state.select(*(name for name in ("hyper",) if name in state.keys()))
        self._outline["step"] = state["step"] + 1
        return self._outline

    def whole(self, state: TensorDict) -> TensorDict:
        """The complete state for what `apply` returned last; any other is complete already."""
        if state is not self._outline:
            return state
        if self._num_since:
            tasks = [TensorDict() for _ in range(self.pool.num_workers)]
            self._hold_state(cat(self._answers(tasks)).to(self._device))
        assert self._base is not None
        return self._base

    def metrics(self) -> dict[str, float]:
        """Seconds spent waiting for workers since the start, and the number of their restarts."""
        return self.pool.metrics("members", "member")

    def close(self) -> None:
        """End the workers."""
        self.pool.close()

    def _hold_state(self, state: TensorDict) -> None:
        self._base, self._num_since, self._since = state, 0, time.monotonic()
        self._recent_batches = []

    def _answers(self, tasks: list[TensorDict]) -> list[TensorDict]:
        self._key += 1
        for worker, task in enumerate(tasks):
            self.pool.ask(worker, self._key, task)
        return [self.pool.take(worker, self._key) for worker in range(len(tasks))]

    def _part(self, state: TensorDict, worker: int) -> TensorDict:
        return state[worker * self.share : (worker + 1) * self.share]

    def _batch_of(self, batch: TensorDict, worker: int) -> TensorDict:
        """The part of a batch that a worker learns from: the batch of all members, or of its own
        ones.
        """
        return batch if self.population.batches == "shared" else self._part(batch, worker)

    def _since_base(self) -> Iterator[TensorDict]:
        """The batches of the updates since the last whole state."""
        assert self._base is not None
        if self._batches is None:
            return iter(self._recent_batches[: self._num_since])
        return islice(self._batches(step_of(self._base)), self._num_since)

    def _state_of(self, worker: int) -> TensorDict:
        """The last whole state, and the batches of the updates since."""
        assert self._base is not None
        batches = TensorDict()
        if self._num_since:
            for number, batch in enumerate(self._since_base()):
                batches[str(number)] = self._batch_of(batch, worker)
        return TensorDict(members=self._part(self._base, worker), batches=batches)
