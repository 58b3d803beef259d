"""A population's members divided among workers: the same bits as in one program.

Legend: P members, W workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Literal

import torch

from raffia.distributed.pool import Pool
from raffia.evolution.population import Population
from raffia.learner import Learner, applies_stacks, step_of
from raffia.tensordict.stack import cat
from raffia.tensordict.tensordict import TensorDict

LONGEST = 60.0  # seconds of learning that a lost worker makes again, at most


class MembersRole:
    """Some members of a population in a worker: an update of all of them for each task.

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
        """Stand where the members stood, and make the updates since."""
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
    batches: those from an update on, made again; None: those since the last whole state are kept.
    device: where `whole` gives the state.

    >>> from raffia.distributed.check_engine import MeanLearner
    >>> from raffia.distributed.engine import InlineEngine
    >>> pool = Pool(InlineEngine(), "raffia.distributed.check_engine:Counter", "{}", 3)
    >>> population = Population(MeanLearner("{}", 0), 4)
    >>> MembersAcross(population, pool, batches=lambda update: iter([]))
    Traceback (most recent call last):
    ...
    ValueError: 4 members can't be divided among 3 workers evenly
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
                f"{population.size} members can't be divided among {num_workers} workers evenly"
            )
        self.population, self._batches = population, batches
        self._kept: list[TensorDict] = []  # batches since, where they can't be made again
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
        """Have all members make an update of this batch; the metrics of each.

        The gradients stay where they are: the update is empty.
        """
        is_new = state is not self._outline
        if is_new:
            self._stand(state)
        elif time.monotonic() - self._since > self._longest:
            self.whole(state)
        workers = range(self.pool.num_workers)
        tasks = [TensorDict(batch=self._batch_of(batch, worker)) for worker in workers]
        if is_new:
            for worker, task in enumerate(tasks):
                task["members"] = self._part(state, worker)
        answers = self._asked(tasks)
        if self._batches is None:
            self._kept.append(batch)
        names = answers[0].keys()
        metrics = {name: torch.cat([answer[name] for answer in answers]) for name in names}
        return TensorDict(), TensorDict(metrics)

    def apply(self, state: TensorDict, update: TensorDict) -> TensorDict:
        """The members' steps, one higher: what has become of the rest is in the workers."""
        self._num_since += 1
        self._outline = state.select(*(name for name in ("hyper",) if name in state.keys()))
        self._outline["step"] = state["step"] + 1
        return self._outline

    def whole(self, state: TensorDict) -> TensorDict:
        """All of the state that `apply` gave last; any other is whole already."""
        if state is not self._outline:
            return state
        if self._num_since:
            tasks = [TensorDict() for _ in range(self.pool.num_workers)]
            self._stand(cat(self._asked(tasks)).to(self._device))
        assert self._base is not None
        return self._base

    def metrics(self) -> dict[str, float]:
        """Seconds waited for workers so far, and their restarts."""
        return self.pool.metrics("members", "member")

    def close(self) -> None:
        """End the workers."""
        self.pool.close()

    def _stand(self, state: TensorDict) -> None:
        self._base, self._num_since, self._since = state, 0, time.monotonic()
        self._kept = []

    def _asked(self, tasks: list[TensorDict]) -> list[TensorDict]:
        self._key += 1
        for worker, task in enumerate(tasks):
            self.pool.ask(worker, self._key, task)
        return [self.pool.take(worker, self._key) for worker in range(len(tasks))]

    def _part(self, state: TensorDict, worker: int) -> TensorDict:
        return state[worker * self.share : (worker + 1) * self.share]

    def _batch_of(self, batch: TensorDict, worker: int) -> TensorDict:
        """What a worker learns from: the batch of all members, or of its own ones."""
        return batch if self.population.batches == "shared" else self._part(batch, worker)

    def _since_base(self) -> Iterator[TensorDict]:
        """The batches of the updates since the last whole state."""
        assert self._base is not None
        if self._batches is None:
            return iter(self._kept[: self._num_since])
        return islice(self._batches(step_of(self._base)), self._num_since)

    def _state_of(self, worker: int) -> TensorDict:
        """The last whole state, and the batches of the updates since."""
        assert self._base is not None
        batches = TensorDict()
        if self._num_since:
            for number, batch in enumerate(self._since_base()):
                batches[str(number)] = self._batch_of(batch, worker)
        return TensorDict(members=self._part(self._base, worker), batches=batches)
