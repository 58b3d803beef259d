"""Tasks of the loop between updates: log, evaluate, save.

Each task keeps what it must know after a resume in `state`, a dict for JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from raffia.learner import step_of
from raffia.tensordict.tensordict import TensorDict
from raffia.train.evaluations import Evaluations
from raffia.train.ledger import EndedEpisode
from raffia.train.loop import Ended
from raffia.train.metrics import PhaseClock, RunningMeans
from raffia.train.outcome import Outcome
from raffia.train.records import Records
from raffia.train.view import Status, View

Extra = Callable[[int], dict[str, float]]  # update -> further values of a row


class Log:
    """The log: rows about training and episodes, and the live view.

    every: updates from one row of means to the next; the view is shown at every update.
    env_steps: how many steps were played so far; gives None where none ever are.
    ended: gives the episodes that have ended since.
    extra: further values of a row.
    counters: what else is counted, by name ("simulations"), for its rate per second.
    """

    def __init__(
        self,
        records: Records,
        view: View,
        clock: PhaseClock,
        status: Status,
        *,
        every: int,
        env_steps: Callable[[], int | None],
        ended: Callable[[], list[EndedEpisode]],
        counters: Callable[[], dict[str, int]],
        extra: Extra,
    ) -> None:
        self._records, self._view, self._clock = records, view, clock
        self._every, self._env_steps, self._ended = every, env_steps, ended
        self._counters, self._extra = counters, extra
        self._means = RunningMeans()
        self.status = status
        self._before: tuple[float, dict[str, int]] | None = None  # seconds, counts

    def on_metrics(self, metrics: TensorDict) -> None:
        """Add the metrics of an update to the means; members that are not finite are left out."""
        self._means.add(
            {
                key: value[value.isfinite()] if value.dim() else value
                for key, value in metrics.items()
                if key != "priority"
            }
        )

    def __call__(self, state: TensorDict) -> None:
        """Write the rows that are due."""
        update, env_step = step_of(state), self._env_steps()
        if self._before is None:
            self._mark(update - 1)
        self.episodes(update, env_step)
        if update % self._every == 0:
            self.row(update, env_step)
        self._show(update, env_step)

    def episodes(self, update: int, env_step: int | None) -> None:
        """A row for each episode that has ended."""
        for episode in self._ended():
            values = {"return": episode.episode_return, "length": episode.length}
            self._records.write("episode", update=update, env_step=env_step, values=values)
            self.status = replace(self.status, latest_return=episode.episode_return)

    def row(self, update: int, env_step: int | None) -> None:
        """The means since the last row."""
        means = self._means.take()
        if not means:
            return
        values = {**means, **self._rates(update), **self._clock.take()}
        values |= self._extra(update)
        self._records.write("train", update=update, env_step=env_step, values=values)
        losses = {name: mean for name, mean in means.items() if name.endswith("loss")}
        self.status = replace(self.status, losses=losses)
        self._mark(update)

    def _mark(self, update: int) -> None:
        self._before = self._records.seconds, self._counts(update)

    def _counts(self, update: int) -> dict[str, int]:
        env_step = self._env_steps()
        played = {} if env_step is None else {"env_steps": env_step}
        return {"updates": update, **played, **self._counters()}

    def _rates(self, update: int) -> dict[str, float]:
        if self._before is None:  # nothing was learnt in this session
            return {}
        seconds, before = self._before
        took = max(self._records.seconds - seconds, 1e-9)
        rates = {
            f"{name}_per_second": (count - before[name]) / took
            for name, count in self._counts(update).items()
        }
        self.status = replace(
            self.status,
            updates_per_second=rates["updates_per_second"],
            env_steps_per_second=rates.get("env_steps_per_second"),
            simulations_per_second=rates.get("simulations_per_second"),
        )
        return rates

    def _show(self, update: int, env_step: int | None) -> None:
        left = None
        if self.status.updates_per_second:
            left = (self.status.num_updates - update) / self.status.updates_per_second
        self.status = replace(
            self.status,
            update=update,
            env_step=env_step,
            seconds=self._records.seconds,
            seconds_left=left,
        )
        self._view.show(self.status)

    def state(self) -> dict[str, Any]:
        """The state for a resume: values that no row has yet."""
        return {"means": self._means.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state` gave."""
        self._means.load_state(state["means"])

    def evaluated(self, mean_return: float, best: float) -> None:
        """Take the outcome of an evaluation."""
        self.status = replace(self.status, evaluated_return=mean_return, best_return=best)


class Evaluate:
    """An evaluation each so many steps of the environments, or each so many updates.

    play: from the learner's state and the number of steps (or updates) to what came of it; None if
        it was interrupted, in which case it is due still.
    env_steps: how many steps were played so far; gives None where none ever are.
    target: the run ends when the score reaches it.
    num_simulations: of each search, where there are any; for the row.
    elsewhere: gives the evaluations that are played elsewhere; None where `play` plays them.
    begun: called with a state whose evaluation was asked for elsewhere.
    scored: called with an update and its score, the best so far, where it is joined at a later one.
    stop: whether the run is to stop, which a wait for an evaluation looks at.
    waiting: the context of such a wait.
    of_returns: whether the score is a mean return, which the view then shows.
    """

    def __init__(
        self,
        play: Callable[[TensorDict, int], Outcome | None],
        records: Records,
        log: Log,
        *,
        every: int,
        env_steps: Callable[[], int | None],
        target: float | None,
        num_simulations: int | None = None,
        elsewhere: Callable[[], Evaluations | None] = lambda: None,
        begun: Callable[[TensorDict], None] = lambda state: None,
        scored: Callable[[int, float], None] = lambda update, score: None,
        stop: Callable[[], bool] = lambda: False,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        of_returns: bool = True,
    ) -> None:
        self._elsewhere, self._begun, self._scored, self._stop = elsewhere, begun, scored, stop
        self._waiting = waiting
        self._play, self._records, self._log = play, records, log
        self._every, self._env_steps = every, env_steps
        self._target, self._of_returns = target, of_returns
        self._more = {} if num_simulations is None else {"num_simulations": num_simulations}
        self.num_done = 0
        self.best: float | None = None
        self.latest: float | None = None
        self._at, self._at_count = -1, -1  # update and count of the latest evaluation
        self._improved = False

    def _count(self, update: int) -> int:
        """The count that `every` is compared with."""
        env_step = self._env_steps()
        return update if env_step is None else env_step

    def score_of(self, update: int) -> float | None:
        """The score of the state after this update, if it was evaluated."""
        return self.latest if update == self._at else None

    def improved(self, update: int) -> bool:
        """Whether the state after this update is the best that was evaluated."""
        return self._improved and update == self._at

    def is_open(self, update: int) -> bool:
        """Whether the state after this update is evaluated elsewhere, and not joined yet."""
        return update in self.open

    @property
    def open(self) -> list[int]:
        """The updates whose states are evaluated elsewhere, and not joined yet."""
        elsewhere = self._elsewhere()
        return [] if elsewhere is None else elsewhere.updates

    def is_old(self, update: int) -> bool:
        """Whether much was learnt since the latest evaluation: the count moved, or some updates."""
        return self._count(update) != self._at_count or update - self._at > 10

    def is_due(self, update: int) -> bool:
        """Whether enough went by since the latest evaluation, or one is to be joined."""
        elsewhere = self._elsewhere()
        is_late = elsewhere is not None and elsewhere.is_due(update)
        return is_late or self._is_due_to_begin(update)

    def _is_due_to_begin(self, update: int) -> bool:
        return self._count(update) // self._every > self.num_done

    def __call__(self, state: TensorDict) -> None:
        """Evaluate if it is due, and join what is due."""
        update, elsewhere = step_of(state), self._elsewhere()
        if self._is_due_to_begin(update):
            if elsewhere is None:
                self.now(state)
            else:
                self._begin(elsewhere, state)
        while elsewhere is not None and elsewhere.is_due(update):
            if not self._join(elsewhere, update):
                return

    def _begin(self, elsewhere: Evaluations, state: TensorDict) -> None:
        count = self._count(step_of(state))
        elsewhere.begin(state, count)
        self.num_done = count // self._every
        self._begun(state)

    def _join(self, elsewhere: Evaluations, update: int) -> bool:
        """Wait for the oldest; whether it came."""
        with self._waiting():
            found = elsewhere.join(self._stop)
        if found is None:
            return False
        if found.update != update and (self.best is None or found.outcome.score > self.best):
            self._scored(found.update, found.outcome.score)
        self._take(found.outcome, found.update, found.at)
        return True

    def join_all(self, update: int) -> bool:
        """Wait for all that are open; whether they came."""
        elsewhere = self._elsewhere()
        while elsewhere is not None and elsewhere.updates:
            if not self._join(elsewhere, update):
                return False
        return True

    def now(self, state: TensorDict) -> None:
        """Evaluate, and wait for it; raises `Ended` if the target is reached."""
        update, elsewhere = step_of(state), self._elsewhere()
        if elsewhere is not None:
            if update not in elsewhere.updates:
                self._begin(elsewhere, state)
            self.join_all(update)
            return
        found = self._play(state, self._count(update))
        if found is not None:
            self._take(found, update, self._count(update))

    def _take(self, found: Outcome, update: int, count: int) -> None:
        """Take what came of the state after an update."""
        self.num_done = max(self.num_done, count // self._every)
        self.latest, self._at, self._at_count = found.score, update, count
        self._improved = self.best is None or self.latest > self.best
        env_step = None if self._env_steps() is None else count
        values = {**found.values, **self._more}
        self._records.write("evaluate", update=update, env_step=env_step, values=values)
        self.best = self.latest if self.best is None else max(self.best, self.latest)
        if self._of_returns:
            self._log.evaluated(self.latest, self.best)
        if self._target is not None and self.latest >= self._target:
            raise Ended("target")

    def state(self) -> dict[str, Any]:
        """The state for a resume."""
        return {
            "best": self.best,
            "latest": self.latest,
            "at": [self._at, self._at_count],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state` gave."""
        self.best, self.latest = state["best"], state["latest"]
        self._at, self._at_count = state["at"]
        elsewhere = self._elsewhere()
        begun = None if elsewhere is None else elsewhere.latest_count
        latest = self._at_count if begun is None else begun
        self.num_done = max(0, latest) // self._every  # which may be another one now


class Save:
    """A checkpoint each so many updates, and at each update that `worth` selects.

    save: writes one; returns whether it could.
    """

    def __init__(
        self,
        save: Callable[[TensorDict], bool],
        *,
        every: int,
        worth: Callable[[int], bool] = lambda update: False,
    ) -> None:
        self._save, self._every, self._worth = save, every, worth
        self.last = -1  # the update of the newest checkpoint

    def __call__(self, state: TensorDict) -> None:
        """Save if it is due."""
        update = step_of(state)
        if update % self._every == 0 or self._worth(update):
            self.now(state)

    def now(self, state: TensorDict) -> None:
        """Save, unless this state was saved already."""
        update = step_of(state)
        if update != self.last and self._save(state):
            self.last = update
