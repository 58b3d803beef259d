"""What the loop does between updates: write down how it goes, evaluate, save.

Each task keeps what it must know after a resume in `state`, a dict for JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from raffia.tensordict.tensordict import TensorDict
from raffia.train.collect import EndedEpisode
from raffia.train.evaluate import Episodes
from raffia.train.loop import Ended
from raffia.train.metrics import PhaseClock, RunningMeans
from raffia.train.records import Records
from raffia.train.view import Status, View

Extra = Callable[[int, int], dict[str, float]]  # update, env_step -> further values of a row


class Log:
    """Rows of what was learnt and played, and the live view.

    every: updates from one row of means to the next; the view is shown at every update.
    env_steps: how many steps were played so far.
    ended: gives the episodes that have ended since.
    extra: what else a row says.
    simulations: how many simulations were searched so far.
    """

    def __init__(
        self,
        records: Records,
        view: View,
        clock: PhaseClock,
        status: Status,
        *,
        every: int,
        env_steps: Callable[[], int],
        ended: Callable[[], list[EndedEpisode]],
        simulations: Callable[[], int],
        extra: Extra,
    ) -> None:
        self._records, self._view, self._clock = records, view, clock
        self._every, self._env_steps, self._ended = every, env_steps, ended
        self._simulations, self._extra = simulations, extra
        self._means = RunningMeans()
        self.status = status
        self._before: tuple[float, int, int, int] | None = None  # seconds, update, steps, searched

    def told(self, metrics: TensorDict) -> None:
        """Hear of an update."""
        self._means.add({key: value for key, value in metrics.items() if key != "priority"})

    def __call__(self, state: TensorDict) -> None:
        """Write down what is due."""
        update, env_step = int(state["step"]), self._env_steps()
        if self._before is None:
            self._mark(update - 1, env_step)
        self.episodes(update, env_step)
        if update % self._every == 0:
            self.row(update, env_step)
        self._show(update, env_step)

    def episodes(self, update: int, env_step: int) -> None:
        """A row for each episode that has ended."""
        for episode in self._ended():
            values = {"return": episode.episode_return, "length": episode.length}
            self._records.write("episode", update=update, env_step=env_step, values=values)
            self.status = replace(self.status, latest_return=episode.episode_return)

    def row(self, update: int, env_step: int) -> None:
        """The means since the last row."""
        means = self._means.take()
        if not means:
            return
        values = {**means, **self._rates(update, env_step), **self._clock.take()}
        values |= self._extra(update, env_step)
        self._records.write("train", update=update, env_step=env_step, values=values)
        losses = {name: mean for name, mean in means.items() if name.endswith("loss")}
        self.status = replace(self.status, losses=losses)
        self._mark(update, env_step)

    def _mark(self, update: int, env_step: int) -> None:
        self._before = self._records.seconds, update, env_step, self._simulations()

    def _rates(self, update: int, env_step: int) -> dict[str, float]:
        if self._before is None:  # nothing was learnt in this sitting
            return {}
        seconds, updates, steps, searched = self._before
        took = max(self._records.seconds - seconds, 1e-9)
        updates_rate = (update - updates) / took
        steps_rate = (env_step - steps) / took
        searched_rate = (self._simulations() - searched) / took
        self.status = replace(
            self.status,
            updates_per_second=updates_rate,
            env_steps_per_second=steps_rate,
            simulations_per_second=searched_rate,
        )
        return {
            "updates_per_second": updates_rate,
            "env_steps_per_second": steps_rate,
            "simulations_per_second": searched_rate,
        }

    def _show(self, update: int, env_step: int) -> None:
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
        """What a resume needs: what no row has told yet."""
        return {"means": self._means.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        self._means.load_state(state["means"])

    def evaluated(self, mean_return: float, best: float) -> None:
        """Hear of an evaluation."""
        self.status = replace(self.status, evaluated_return=mean_return, best_return=best)


class Evaluate:
    """Whole episodes each so many steps of the worlds.

    play: from the learner's state and the number of steps to what came of it; None if it was
        interrupted, in which case it is due still.
    better: is told when the mean return is the best so far.
    target: the run ends when the mean return reaches it.
    """

    def __init__(
        self,
        play: Callable[[TensorDict, int], Episodes | None],
        records: Records,
        log: Log,
        *,
        every: int,
        env_steps: Callable[[], int],
        target: float | None,
        num_simulations: int,
    ) -> None:
        self._play, self._records, self._log = play, records, log
        self._every, self._env_steps = every, env_steps
        self._target, self._num_simulations = target, num_simulations
        self.num_done = 0
        self.best: float | None = None
        self.latest: float | None = None
        self._at, self._at_step = -1, -1  # update and env step of the latest evaluation
        self._improved = False

    def score_of(self, update: int) -> float | None:
        """The mean return of the state after this update, if it was evaluated."""
        return self.latest if update == self._at else None

    def improved(self, update: int) -> bool:
        """Whether the state after this update is the best that was evaluated."""
        return self._improved and update == self._at

    def is_old(self, env_step: int, update: int) -> bool:
        """Whether much was learnt since the latest evaluation: another step, or some updates."""
        return env_step != self._at_step or update - self._at > 10

    @property
    def is_due(self) -> bool:
        """Whether enough was played since the latest evaluation."""
        return self._env_steps() // self._every > self.num_done

    def __call__(self, state: TensorDict) -> None:
        """Evaluate if it is due."""
        if self.is_due:
            self.now(state)

    def now(self, state: TensorDict) -> None:
        """Evaluate; raises `Ended` if the target is reached."""
        update, env_step = int(state["step"]), self._env_steps()
        found = self._play(state, env_step)
        if found is None:
            return
        self.num_done = env_step // self._every
        self.latest, self._at, self._at_step = found.mean_return, update, env_step
        self._improved = self.best is None or self.latest > self.best
        values: dict[str, Any] = {
            "mean_return": found.mean_return,
            "returns": found.returns,
            "lengths": found.lengths,
            "num_simulations": self._num_simulations,
        }
        if found.as_first:
            values["as_first"] = found.as_first
        self._records.write("evaluate", update=update, env_step=env_step, values=values)
        self.best = self.latest if self.best is None else max(self.best, self.latest)
        self._log.evaluated(self.latest, self.best)
        if self._target is not None and self.latest >= self._target:
            raise Ended("target")

    def state(self) -> dict[str, Any]:
        """What a resume needs."""
        return {
            "best": self.best,
            "latest": self.latest,
            "at": [self._at, self._at_step],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.best, self.latest = state["best"], state["latest"]
        self._at, self._at_step = state["at"]
        self.num_done = max(0, self._at_step) // self._every  # which may be another one now


class Save:
    """A checkpoint each so many updates, and wherever `worth` says so of an update.

    save: writes one; says whether it could.
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
        update = int(state["step"])
        if update % self._every == 0 or self._worth(update):
            self.now(state)

    def now(self, state: TensorDict) -> None:
        """Save, unless this state was saved already."""
        update = int(state["step"])
        if update != self.last and self._save(state):
            self.last = update
