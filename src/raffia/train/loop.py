"""The training loop: make a step, then run the tasks that are due: `Evaluate`, `Save`, others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from raffia.learner import step_of
from raffia.tensordict.tensordict import TensorDict
from raffia.train.checkpoint import CheckpointError, Checkpoints
from raffia.train.evaluations import Evaluations, Outcome
from raffia.train.experiment import Experiment
from raffia.train.log import Log, Records
from raffia.train.run_state import RunState

Step = Callable[[TensorDict], tuple[TensorDict, TensorDict]]  # a state -> the next one, metrics


class Task(Protocol):
    """A task between updates: evaluate, log, save, evolve."""

    def __call__(self, state: TensorDict, metrics: TensorDict) -> TensorDict | None:
        """Do the task if it is due; returns a new state, or None to continue with this one.

        metrics: those of the update that gave the state.
        """


class Ended(Exception):
    """Raised by a task that ends the run; the state is the one that it was given.

    >>> Ended("target").reason
    'target'
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def train(
    state: TensorDict,
    step: Step,
    *,
    num_updates: int,
    every: Sequence[Task] = (),
    stop: Callable[[], bool] = lambda: False,
) -> tuple[TensorDict, str]:
    """Make steps until `num_updates` were made; returns the state, and the reason of the end:
    "finished", "stopped", or the reason that a task gave.

    state: a learner's; its "step" says how many updates were made.
    every: tasks, which are run after each update.

    >>> def count(state):
    ...     return TensorDict(step=state["step"] + 1), TensorDict(loss=torch.tensor(0.5))
    >>> state, reason = train(TensorDict(step=torch.tensor(0)), count, num_updates=3)
    >>> state["step"], reason
    (tensor(3), 'finished')
    """
    update = step_of(state)
    while update < num_updates:
        if stop():
            return state, "stopped"
        found = step(state)
        if not (isinstance(found, tuple) and all(isinstance(td, TensorDict) for td in found)):
            raise TypeError(
                "step(state) must return two containers, the next state and the update's metrics: "
                "return self.learn(state, batch), or return state, TensorDict(loss=loss)"
            )
        state, metrics = found
        made, update = update, step_of(state)
        if update <= made:
            raise ValueError(
                f'step(state) returned a state whose "step" is {update}, as many updates as before '
                "it, so the run would never end: return self.learn(state, batch), whose learner's "
                'apply counts: state.replace(step=state["step"] + 1, ...)'
            )
        try:
            for task in every:
                changed = task(state, metrics)
                state = state if changed is None else changed
        except Ended as ended:
            return state, ended.reason
    return state, "finished"


class Evaluate:
    """An evaluation each `plan.evaluate_every` steps of the environments, or updates without any.

    Here, or elsewhere, where the experiment has `evaluations`: then it is joined at a later update.

    stop: whether the run is to stop, which an evaluation and a wait for one look at.
    scored: called with an update and its score, the best so far, where it is joined at a later one.
    """

    def __init__(self, experiment: Experiment, records: Records, log: Log) -> None:
        self._experiment, self._records, self._log = experiment, records, log
        self.stop: Callable[[], bool] = lambda: False
        self.scored: Callable[[int, float], None] = lambda update, score: None
        self.num_done = 0
        # The update behind which all was done, where a step after it failed: steps that were played
        # for the next update make no evaluation due.
        self.done_after = -1
        self.best: float | None = None
        self.latest: float | None = None
        self._at, self._at_count = -1, -1  # update and count of the latest evaluation

    def _count(self, update: int) -> int:
        """The count that `plan.evaluate_every` is compared with."""
        env_step = self._experiment.num_env_steps
        return update if env_step is None else env_step

    @property
    def _elsewhere(self) -> Evaluations | None:
        """The evaluations that are played elsewhere, or were in an earlier session and are open."""
        found = self._experiment.evaluations
        return found if found is not None and found.is_on else None

    @property
    def open(self) -> list[int]:
        """The updates whose states are evaluated elsewhere, and not joined yet."""
        return [] if self._elsewhere is None else self._elsewhere.updates

    def score_of(self, update: int) -> float | None:
        """The score of the state after this update, if it was evaluated."""
        return self.latest if update == self._at else None

    def improved(self, update: int) -> bool:
        """Whether no state that was evaluated is better than the one after this update."""
        return update == self._at and self.latest == self.best

    def _is_best(self, score: float) -> bool:
        """Whether none was better; an equal one counts, as `Checkpoints.best` is the newest."""
        return self.best is None or score >= self.best

    def is_old(self, update: int) -> bool:
        """Whether the latest evaluation is out of date: its count moved, or more than 10 updates
        were made since.
        """
        return self._count(update) != self._at_count or update - self._at > 10

    def is_due(self, update: int) -> bool:
        """Whether an evaluation is due, or an open one is to be joined."""
        elsewhere = self._elsewhere
        is_late = elsewhere is not None and elsewhere.is_due(update)
        return update != self.done_after and (is_late or self._is_due_to_begin(update))

    def _is_due_to_begin(self, update: int) -> bool:
        return self._count(update) // self._experiment.plan.evaluate_every > self.num_done

    def __call__(self, state: TensorDict, metrics: TensorDict) -> None:
        """Evaluate if it is due, and join what is due."""
        self.done_after = -1
        self.catch_up(state)

    def catch_up(self, state: TensorDict) -> None:
        """Evaluate if it is due, and join what is due."""
        update, elsewhere = step_of(state), self._elsewhere
        if self._is_due_to_begin(update):
            if elsewhere is None:
                self.now(state)
            else:
                self._begin(elsewhere, state)
        while elsewhere is not None and elsewhere.is_due(update):
            if not self._join(elsewhere, update):
                return

    def now(self, state: TensorDict) -> None:
        """Evaluate, and wait for it; raises `Ended` if the target is reached."""
        update, elsewhere = step_of(state), self._elsewhere
        if elsewhere is not None:
            if update not in elsewhere.updates:
                self._begin(elsewhere, state)
            self.join_all(update)
            return
        found = self._experiment.evaluate(state, self.stop)
        if found is not None:  # else it was interrupted, and is due still
            self._take(found, update, self._count(update))

    def _begin(self, elsewhere: Evaluations, state: TensorDict) -> None:
        count = self._count(step_of(state))
        elsewhere.begin(state, count)
        self.num_done = count // self._experiment.plan.evaluate_every
        self._experiment.evaluation_begun(state)

    def _join(self, elsewhere: Evaluations, update: int) -> bool:
        """Wait for the oldest; whether it came."""
        with self._experiment.clock.phase("evaluate"):
            found = elsewhere.join(self.stop)
        if found is None:
            return False
        if found.update != update and self._is_best(found.outcome.score):
            self.scored(found.update, found.outcome.score)
        self._take(found.outcome, found.update, found.at)
        return True

    def join_all(self, update: int) -> bool:
        """Wait for all open evaluations; return whether they came."""
        elsewhere = self._elsewhere
        while elsewhere is not None and elsewhere.updates:
            if not self._join(elsewhere, update):
                return False
        return True

    def _take(self, found: Outcome, update: int, count: int) -> None:
        """Record the outcome of evaluating the state after an update."""
        plan = self._experiment.plan
        self.num_done = max(self.num_done, count // plan.evaluate_every)
        self.latest, self._at, self._at_count = found.score, update, count
        env_step = None if self._experiment.num_env_steps is None else count
        more = {} if plan.num_simulations is None else {"num_simulations": plan.num_simulations}
        values = {**found.values, **more}
        self._records.write("evaluate", update=update, env_step=env_step, values=values)
        self.best = self.latest if self.best is None else max(self.best, self.latest)
        if plan.of_returns:
            self._log.evaluated(self.latest, self.best)
        self.end_at_target()

    def end_at_target(self) -> None:
        """Raise `Ended` if the latest evaluation has reached the target."""
        target = self._experiment.plan.target_return
        if target is not None and self.latest is not None and self.latest >= target:
            raise Ended("target")

    def state(self) -> dict[str, Any]:
        """The state for a resume."""
        done = {} if self.done_after < 0 else {"done_after": self.done_after}
        at = [self._at, self._at_count]
        return {"best": self.best, "latest": self.latest, "at": at, **done}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state` gave, once the experiment's is loaded."""
        self.best, self.latest = state["best"], state["latest"]
        self._at, self._at_count = state["at"]
        self.done_after = state.get("done_after", -1)
        begun = None if self._elsewhere is None else self._elsewhere.latest_count
        latest = self._at_count if begun is None else begun
        # The interval may be another one now.
        self.num_done = max(0, latest) // self._experiment.plan.evaluate_every


class Save:
    """Save a checkpoint every `plan.save_every` updates, of each state that is the best up to now,
    and of each whose evaluation is open, since it may turn out to be the best.
    """

    def __init__(
        self,
        experiment: Experiment,
        checkpoints: Checkpoints,
        run_state: RunState,
        evaluate: Evaluate,
    ) -> None:
        self._experiment, self._checkpoints = experiment, checkpoints
        self._run_state, self._evaluate = run_state, evaluate
        self.last = -1  # the update of the newest checkpoint
        self._unwritten: dict[int, float] = {}  # scores that a full disk had no room for
        evaluate.scored = self._score
        checkpoints.held = lambda: [*evaluate.open, *self._unwritten]

    def __call__(self, state: TensorDict, metrics: TensorDict | None = None) -> None:
        """Save if it is due; a save that fails is reported and tried again at a later update."""
        update, evaluate = step_of(state), self._evaluate
        due = update % self._experiment.plan.save_every == 0
        if not (due or evaluate.improved(update) or update in evaluate.open) or update == self.last:
            return
        try:
            self.now(state)
        except (CheckpointError, OSError) as error:  # what was saved before is whole
            self._experiment.view.message(f"update {update:,}: {error}")

    def now(self, state: TensorDict) -> None:
        """Save; raises CheckpointError or OSError where that can't be done."""
        update, experiment = step_of(state), self._experiment
        self._write_scores()
        state = experiment.whole(state)
        experiment.guard.check_state(state)
        try:
            files, extras = self._run_state.save(state)
            score = self._evaluate.score_of(update)
            self._checkpoints.save(update, files, extras, score=score)
        except (CheckpointError, OSError):
            # Files written for it are removed immediately, or a full disk is made fuller by each
            # try.
            with contextlib.suppress(CheckpointError, OSError):  # the error above is raised
                self._run_state.prune(self._checkpoints.available())
            raise
        self._run_state.prune(self._checkpoints.available())
        self.last = update

    def _score(self, update: int, score: float) -> None:
        """Set the score of an earlier checkpoint, whose evaluation ended late."""
        self._unwritten[update] = score
        self._write_scores()

    def _write_scores(self) -> None:
        for update, score in sorted(self._unwritten.items()):
            try:
                self._checkpoints.score(update, score)
            except (CheckpointError, OSError, ValueError) as error:
                self._experiment.view.message(
                    f"the checkpoint of update {update:,} has no score: {error}"
                )
                if not isinstance(error, ValueError):
                    continue  # the next save tries again
            del self._unwritten[update]
