"""`Log`: the task that writes down how a run goes, and shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from raffia.learner import step_of
from raffia.tensordict.tensordict import TensorDict
from raffia.train.experiment import Experiment
from raffia.train.metrics import RunningMeans
from raffia.train.records import Records
from raffia.train.view import Status


class Log:
    """Rows about training and episodes, each `plan.log_every` updates, and the view at each one."""

    def __init__(self, experiment: Experiment, records: Records) -> None:
        self._experiment, self._records, plan = experiment, records, experiment.plan
        self._means = RunningMeans()
        self.status = Status(
            title=plan.title,
            num_updates=plan.num_updates,
            env_step=None if plan.num_env_steps is None else 0,
            num_env_steps=plan.num_env_steps,
        )
        self._before: tuple[float, dict[str, int]] | None = None  # seconds, counts
        self._waited = 0.0  # seconds for workers, up to the last row

    def __call__(self, state: TensorDict, metrics: TensorDict) -> None:
        """Take in the metrics of an update, and write the rows that are due."""
        self.add(metrics)
        update = step_of(state)
        if self._before is None:
            self._mark(update - 1)
        self._episodes(update)
        if update % self._experiment.plan.log_every == 0:
            self.row(update)
        self._show(update)

    def add(self, metrics: TensorDict) -> None:
        """Add the metrics of an update to the means; members that are not finite are left out."""
        self._means.add(
            {
                key: value[value.isfinite()] if value.dim() else value
                for key, value in metrics.items()
                if key != "priority"
            }
        )

    def _episodes(self, update: int) -> None:
        """A row for each episode that has ended."""
        for episode in self._experiment.take_ended():
            values = {"return": episode.episode_return, "length": episode.length}
            self._write("episode", update, values)
            self.status = replace(self.status, latest_return=episode.episode_return)

    def row(self, update: int) -> None:
        """The means since the last row."""
        means = self._means.take()
        if not means:
            return
        values = {**means, **self._rates(update), **self._experiment.clock.take()}
        extra = self._experiment.extra_metrics(update)
        self._write("train", update, values | extra)
        self._workers(extra)
        losses = {name: mean for name, mean in means.items() if name.endswith("loss")}
        self.status = replace(self.status, losses=losses)
        self._mark(update)

    def _workers(self, extra: Mapping[str, float]) -> None:
        """Show what workers cost: `Pool.metrics` names what is counted since the session began."""
        waits = [value for name, value in extra.items() if name.startswith("waited_for_")]
        if not waits or self._before is None:
            return
        took = max(self._records.seconds - self._before[0], 1e-9)
        waited, self._waited = sum(waits) - self._waited, sum(waits)
        restarts = [value for name, value in extra.items() if name.endswith("_restarts")]
        self.status = replace(
            self.status,
            waiting=min(1.0, max(0.0, waited / took)),
            staleness=extra.get("staleness"),
            worker_restarts=int(sum(restarts)),
        )

    def _write(self, kind: str, update: int, values: Mapping[str, Any]) -> None:
        env_step = self._experiment.num_env_steps
        self._records.write(kind, update=update, env_step=env_step, values=values)

    def _mark(self, update: int) -> None:
        self._before = self._records.seconds, self._counts(update)

    def _counts(self, update: int) -> dict[str, int]:
        env_step = self._experiment.num_env_steps
        played = {} if env_step is None else {"env_steps": env_step}
        return {"updates": update, **played, **self._experiment.counters()}

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

    def _show(self, update: int) -> None:
        left = None
        if self.status.updates_per_second:
            left = (self.status.num_updates - update) / self.status.updates_per_second
        self.status = replace(
            self.status,
            update=update,
            env_step=self._experiment.num_env_steps,
            seconds=self._records.seconds,
            seconds_left=left,
        )
        self._experiment.view.show(self.status)

    def evaluated(self, mean_return: float, best: float) -> None:
        """Take the outcome of an evaluation."""
        self.status = replace(self.status, evaluated_return=mean_return, best_return=best)

    def state(self) -> dict[str, Any]:
        """The state for a resume: values that no row has yet."""
        return {"means": self._means.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state` gave."""
        self._means.load_state(state["means"])
