"""`RunExperiment`: the parts that runs of either algorithm share: members, workers, a divided
learner.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from raffia.distributed.data_parallel import DataParallel
from raffia.distributed.engine import TaskError
from raffia.distributed.follow import Followers
from raffia.distributed.sharded import Sharded
from raffia.envs.rows import row_of_error
from raffia.learner import Learner
from raffia.recipes.devices import require_compiler, require_device
from raffia.recipes.members import CHAMPION_KEY, POPULATION_KEY, Members, MembersAcross
from raffia.recipes.workers import RunWorkers
from raffia.tensordict.tensordict import TensorDict
from raffia.train.experiment import Experiment, Plan
from raffia.train.view import View


class RunExperiment(Experiment):
    """An experiment by settings that may ask for a population, and for other processes to learn in.

    members: of a population; None: one agent.
    across, sharded: have what the loop's state lacks, where members learn in workers, and where
        processes share the state.
    followers: the processes that share batches with this one.
    """

    members: Members | None = None
    across: MembersAcross | None = None
    followers: Followers | None = None
    sharded: Sharded | None = None

    def __init__(self, config: Any, folder: Path, view: View, **intervals: Any) -> None:
        """intervals: further entries of the plan, in which algorithms differ."""
        super().__init__(folder, view, seed=config.seed)
        self.config = config
        self.plan = Plan(
            title=f"{config.title}, seed {config.seed}",
            num_updates=config.num_updates,
            target_return=config.evaluate.target_return,
            save_every=config.checkpoint.every_updates,
            keep=config.checkpoint.keep,
            device=config.device,
            **intervals,
        )
        require_device(config.device)
        if config.compile:
            require_compiler(config.device)
        self._opened = ExitStack()

    @contextlib.contextmanager
    def _opening(self) -> Iterator[ExitStack]:
        """A stack that is closed with the run, or immediately if the run can't be made."""
        with ExitStack() as opened:
            yield opened
            self._opened = opened.pop_all()

    def _make_members(self, learner: Learner, **more: Any) -> Learner:
        """The learner of all members, where the settings ask for a population; else the one given.

        more: as of `Members`.
        """
        if self.config.population.size == 1:
            return learner
        self.members = Members(self.config.population, learner, self.seed, **more)
        self.parts = {POPULATION_KEY: self.members, CHAMPION_KEY: self.members.champion}
        return self.members.learner

    def _divide_learner(
        self,
        opened: ExitStack,
        workers: RunWorkers,
        learner: str,
        batches: Callable[[int], Iterator[TensorDict]] | None = None,
    ) -> None:
        """Move members to workers, or share batches with other processes, where the settings ask
        for it.

        learner: what makes the learner of another process, "package.module:name".
        batches: see `MembersAcross`.
        """
        config = self.config
        if self.members is not None and config.population.workers:
            population, pool = self.members.learner, workers.pool("population")
            self.across = MembersAcross(population, pool, batches=batches, device=config.device)
            self.learner = opened.enter_context(closing(self.across))
        if config.learners.num > 1:
            self.followers = opened.enter_context(closing(workers.followers(learner)))
            if config.learners.state == "sharded":
                self.learner = self.sharded = Sharded(self.learner, self.followers)
            else:
                self.learner = DataParallel(self.learner, self.followers)

    def whole(self, state: TensorDict) -> TensorDict:
        """The complete state, including the parts that other processes hold."""
        holder = self.across or self.sharded
        return state if holder is None else holder.whole(state)

    def can_save_after(self, error: Exception) -> bool:
        """Whether a worker failed at a task, or an environment raised here: nothing was taken of
        it, nor learnt from it.

        Members in workers may have made different numbers of updates by then.
        """
        is_of_env = row_of_error(error) is not None
        return (isinstance(error, TaskError) or is_of_env) and self.across is None

    def learn(self, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, TensorDict]:
        """Learn from a batch; see `Experiment.learn`."""
        if self.members is not None:
            self.members.champion.load_state(TensorDict())
        return super().learn(state, batch)

    def evolve(self, state: TensorDict) -> tuple[TensorDict, dict[str, Any]] | None:
        """The next generation of a population."""
        return None if self.members is None else self.members.evolve(self.whole(state))

    def worker_metrics(self) -> dict[str, float]:
        """Waiting times, restarts and open tasks of members, batches and evaluations in other
        processes.
        """
        found: dict[str, float] = {}
        for elsewhere in (self.across, self.followers, self.evaluations):
            found |= {} if elsewhere is None else elsewhere.metrics()
        return found

    def close(self) -> None:
        """Close environments and files, and end workers."""
        self._opened.close()
