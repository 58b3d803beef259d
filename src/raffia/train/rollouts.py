"""Rollouts that actors play elsewhere, instead of a collector in the loop; and their `Schedule`.

Legend: T times, E environments, k the number of a rollout, which is `rollout_length` steps of each.

A rollout is played with weights that its number names, and taken in at an update that its number
names. So neither who plays, nor how fast, nor how often a worker dies changes a bit of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from raffia.distributed.pool import Pool
from raffia.envs.env import EnvSpec
from raffia.learner import step_of
from raffia.tensordict.stack import cat
from raffia.tensordict.tensordict import TensorDict
from raffia.train.ahead import OpenTasks
from raffia.train.ledger import EndedEpisode, Ledger, rows_of


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The schedule of rollouts: when each is played, with which weights, and when it is taken in.

    Update u comes after random_env_steps + (u + 1) / updates_per_env_step steps of all environments
    together, or after num_env_steps if that is less.

    >>> schedule = Schedule(rollout_size=8, random_env_steps=16, num_env_steps=80,
    ...                     updates_per_env_step=0.5, ahead=4, weights_every=2)
    >>> schedule.steps_due(update=0)
    18
    >>> [schedule.due(rollout) for rollout in range(6)]
    [0, 0, 0, 4, 8, 12]
    >>> [schedule.version(rollout) for rollout in range(6)]
    [0, 0, 0, 0, 4, 8]
    """

    random_env_steps: int = 0  # these are played before anything is learnt
    num_env_steps: int
    updates_per_env_step: float = 1.0
    rollout_size: int = 1  # steps of all environments together
    ahead: int = 0  # updates from when a rollout is asked for to when it is taken in
    weights_every: int = 1  # updates from one version of the weights to the next

    @property
    def num_updates(self) -> int:
        """The number of updates of the whole run."""
        return round((self.num_env_steps - self.random_env_steps) * self.updates_per_env_step)

    def steps_due(self, update: int) -> int:
        """The number of steps, over all environments, that are played before this update."""
        learnt = math.ceil((update + 1) / self.updates_per_env_step)
        return min(self.num_env_steps, self.random_env_steps + learnt)

    def due(self, rollout: int) -> int | None:
        """The first update before which the rollout is played; None: before none."""
        before = rollout * self.rollout_size
        if before >= self.num_env_steps:
            return None
        behind = max(0, before - self.random_env_steps)
        update = max(0, math.floor(behind * self.updates_per_env_step) - 2)
        while self.steps_due(update) <= before:
            update += 1
        return update

    def version(self, rollout: int) -> int | None:
        """The update after which the rollout's weights are published, and it is asked for."""
        due = self.due(rollout)
        if due is None:
            return None
        return max(0, due - self.ahead) // self.weights_every * self.weights_every


class ActorRollouts(OpenTasks):
    """The rollouts of all actors: asked for ahead, taken in their order.

    pool: the actors. Each gets its index, and plays as many rows: its answer to a task
        {"num_env_steps": of the run before the rollout, "version"} is {"steps": [T, E of its rows],
        "num_simulations", "version" of its weights}, the steps with "continues" where environments
        may play on; the first actor's has "now", the state [1] after them.
        Where a search met NaN or infinity, its answer is {"not_finite": the error's text in bytes,
        "states": [E of its rows], which were searched}.
    acting: of a learner's state what actors need of it.
    check: is given the steps [T, E] that are taken in; it may raise.
    refuse: is given the learner's state and such an answer; it raises.
    """

    def __init__(
        self,
        pool: Pool,
        schedule: Schedule,
        spec: EnvSpec,
        num_envs: int,
        *,
        seed: int,
        acting: Callable[[TensorDict], TensorDict],
        check: Callable[[TensorDict], None] = lambda steps: None,
        refuse: Callable[[TensorDict, TensorDict], None] = lambda state, answer: None,
    ) -> None:
        super().__init__(pool)
        self.schedule, self._acting, self._check, self._refuse = schedule, acting, check, refuse
        self.ledger = Ledger(num_envs, spec, seed=seed)
        rows = num_envs // pool.num_workers
        pool.state_of = lambda actor: rows_of(self.ledger.state(), actor * rows, rows)
        self._next_taken = self._next_asked = 0
        self.staleness = 0  # updates that the last rollout's weights were behind it
        self.num_simulations = 0  # of all rollouts that were taken
        self.now = TensorDict(batch_size=[0])  # of the first environment

    @property
    def num_env_steps(self) -> int:
        """The number of steps that were taken in, over all environments."""
        return self.ledger.num_env_steps

    @property
    def num_open(self) -> int:
        """The number of rollouts that were asked for and not taken yet."""
        return self._next_asked - self._next_taken

    def prepare(self, state: TensorDict) -> None:
        """Publish the weights after this update where a rollout names them, and ask for those."""
        update = step_of(state)
        while True:
            version = self.schedule.version(self._next_asked)
            if version is None or version > update:
                return
            # Where a run was made longer, what the schedule names may never have been published:
            # then the oldest version that came after it, or this update's.
            later = [published for published in self.board.versions if published >= version]
            if version == update or not later:
                self.board.publish(update, self._acting(state))
                later = [update]
            self._ask(later[0])

    def _ask(self, version: int) -> None:
        rollout, weights = self._next_asked, self.board.ref(version)
        steps = torch.tensor(rollout * self.schedule.rollout_size, device="cpu")
        task = TensorDict(num_env_steps=steps, version=torch.tensor(version, device="cpu"))
        for actor in range(self.pool.num_workers):
            self.pool.ask(actor, rollout, task, weights)
        self._next_asked += 1

    def take(self, state: TensorDict) -> TensorDict:
        """The next rollout's steps [T, E], waited for; asked for now if it was not yet."""
        rollout = self._next_taken
        if rollout == self._next_asked:  # the replay is empty still, or it would not be due
            self.board.publish(step_of(state), self._acting(state))
            self._ask(step_of(state))
        answers = [self.pool.take(actor, rollout) for actor in range(self.pool.num_workers)]
        for answer in answers:
            if "not_finite" in answer.keys():
                self._refuse(state, answer)
        self.now = answers[0]["now"]
        self.num_simulations += sum([int(answer["num_simulations"]) for answer in answers])
        self.staleness = step_of(state) - int(answers[0]["version"])
        steps: TensorDict = cat([answer["steps"] for answer in answers], 1)
        self._next_taken += 1
        self._check(steps)
        self.ledger.count_all(steps)
        if (oldest := self.schedule.version(self._next_taken)) is not None:
            self.board.drop_below(oldest)
        return steps

    def metrics(self) -> dict[str, float]:
        """Open rollouts, staleness, seconds waited and restarts since the start."""
        return {
            "rollouts_open": float(self.num_open),
            "staleness": float(self.staleness),
            **self.pool.metrics("actors", "actor"),
        }

    def take_ended(self) -> list[EndedEpisode]:
        """The episodes that have ended since the last call."""
        return self.ledger.take_ended()

    def state(self) -> TensorDict:
        """The state of the environments, and the weights that open rollouts were asked for with."""
        state, versions = self.ledger.state(), self.board.state()
        if not versions.is_empty():
            state["board"] = versions
        if len(self.now):
            state["now"] = self.now
        state["staleness"] = torch.tensor(self.staleness, device="cpu")
        return state

    def load_state(self, state: TensorDict) -> None:
        """Continue after the rollouts that were taken in; open ones are requested again."""
        if "episode_return" not in state.keys():
            raise ValueError(
                "the checkpoint is from a version that did not save the returns of unfinished "
                "episodes: resume once with actors.num=0 and actors.ahead=0, which counts them "
                "again"
            )
        self.pool.reset()
        self.ledger.load_state(state)
        self._next_taken = self._next_asked = self.num_env_steps // self.schedule.rollout_size
        self.now = state["now"] if "now" in state.keys() else TensorDict(batch_size=[0])
        self.staleness = int(state["staleness"]) if "staleness" in state.keys() else 0
        self.board.load_state(state["board"] if "board" in state.keys() else TensorDict())
