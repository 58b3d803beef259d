"""`TrainingSession`: a run from its newest checkpoint, or from the start, to its end.

What an algorithm brings is an `Experiment`; what every run has in common is here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raffia._version import __version__
from raffia.jit.compiling import compiling
from raffia.learner import step_of
from raffia.tensordict.tensordict import TensorDict
from raffia.train.checkpoint import Checkpoint, CheckpointError, Checkpoints
from raffia.train.experiment import Experiment, Stop
from raffia.train.loop import Ended, train
from raffia.train.records import Records
from raffia.train.tasks import Evaluate, Log, Save
from raffia.train.view import Status

__all__ = ["RunResult", "TrainingSession"]

LONGEST_FAILURE = 2_000  # characters of an error's text in metrics.jsonl


@dataclass(frozen=True)
class RunResult:
    """The end of a run, or of a session of it.

    >>> RunResult(Path("runs/x"), "target", 500, 2_700, 201.5, 201.5, 60.0).reason
    'target'
    """

    folder: Path
    reason: str  # "finished", "target" (a mean return was reached) or "stopped"
    update: int
    env_step: int | None  # None: none are played
    mean_return: float | None  # of the latest evaluation; None also where it is of no episodes
    best_return: float | None
    seconds: float  # over all sessions
    signal: str = ""  # the signal that stopped it, such as "SIGTERM"


class TrainingSession:
    """An experiment in its folder, from its newest checkpoint, or from the start, to its end.

    >>> def train(experiment: Experiment) -> RunResult:
    ...     with contextlib.closing(TrainingSession(experiment)) as session:
    ...         return session.run()
    """

    def __init__(self, experiment: Experiment) -> None:
        self.experiment, self.folder, self.view = experiment, experiment.folder, experiment.view
        self._stop: Stop = lambda: False
        self._plan = plan = experiment.plan
        self.checkpoints = Checkpoints(self.folder / "checkpoints", keep=plan.keep)
        self.records = Records(self.folder)
        self.log = Log(
            self.records,
            self.view,
            experiment.clock,
            Status(
                title=plan.title,
                num_updates=plan.num_updates,
                env_step=None if plan.num_env_steps is None else 0,
                num_env_steps=plan.num_env_steps,
            ),
            every=plan.log_every,
            env_steps=self._env_steps,
            ended=experiment.take_ended,
            counters=experiment.counters,
            extra=experiment.extra_metrics,
        )
        self.evaluate = Evaluate(
            lambda state, count: experiment.evaluate(state, self._stop),
            self.records,
            self.log,
            every=plan.evaluate_every,
            env_steps=self._env_steps,
            target=plan.target_return,
            num_simulations=plan.num_simulations,
            elsewhere=lambda: experiment.evaluations,
            begun=experiment.evaluation_begun,
            scored=self._score,
            stop=lambda: self._stop(),
            waiting=lambda: experiment.clock.phase("evaluate"),
            of_returns=plan.of_returns,
        )
        # Whose evaluation is open may turn out to be the best.
        self.checkpoints.held = lambda: [*self.evaluate.open, *self._unwritten]
        self._unwritten: dict[int, float] = {}  # scores that a full disk had no room for
        self.save = Save(
            self._try_to_save,
            every=plan.save_every,
            worth=lambda update: self.evaluate.improved(update) or self.evaluate.is_open(update),
        )

    def _env_steps(self) -> int | None:
        return None if self._plan.num_env_steps is None else self.experiment.stream.num_env_steps

    def run(
        self, stop: Stop = lambda: False, on_start: Callable[[], None] = lambda: None
    ) -> RunResult:
        """Train until the end, the target, or until `stop` asks to stop.

        on_start: called once the state is there, before the first update.
        """
        with self._announce_compiling():
            return self._run(stop, on_start)

    @contextlib.contextmanager
    def _announce_compiling(self) -> Iterator[None]:
        """Announce that kernels are compiled, which takes a while in a machine's first run.

        The time counts as a phase of its own, not as that of whoever calls them first.
        """
        announced, phases = False, contextlib.ExitStack()

        def enter() -> None:
            nonlocal announced
            if not announced:
                self.view.message(
                    "compiling kernels for this machine: up to half a minute, once; later runs "
                    "find them done"
                )
            announced = True
            phases.enter_context(self.experiment.clock.phase("compile"))

        with compiling(enter, phases.close):
            yield

    def _run(self, stop: Stop, on_start: Callable[[], None]) -> RunResult:
        self._stop, experiment = stop, self.experiment
        state = self._begin()
        on_start()
        try:
            state = self._evaluate_if_missed(state)
            state, reason = train(
                experiment.learner,
                state,
                experiment.stream,
                num_updates=self._plan.num_updates,
                clock=experiment.clock,
                check=experiment.guard,
                on_metrics=self.log.on_metrics,
                tasks=[self.log, self.evaluate, self._evolve, self.save],
                stop=stop,
            )
            if reason == "finished":
                reason = self._evaluate_at_end(state)
        except Ended as ended:
            reason = ended.reason
        except Exception as error:
            self._note_failure(error)
            raise
        return self._end(state, reason)

    def _note_failure(self, error: Exception) -> None:
        """Write down that the run failed, and add to the error what was saved.

        The row goes when the run is resumed: what came after the checkpoint is done again.
        """
        update = self.log.status.update
        text = f"{type(error).__name__}: {error}"[:LONGEST_FAILURE]
        values = {"error": text}
        self.records.write("error", update=update, env_step=self._env_steps(), values=values)
        saved = self.checkpoints.available()
        error.add_note(
            f"The run failed after update {update:,}. Saved is update {saved[-1].update:,}: "
            f"`raffia resume {self.folder}` goes on from there"
            if saved
            else f"The run failed after update {update:,}, before its first checkpoint: "
            f"`raffia resume {self.folder}` begins it again"
        )

    def _begin(self) -> TensorDict:
        found = self.checkpoints.newest(self.view.message, check=self.experiment.check)
        if found is None:
            state = self.experiment.init()
            self.experiment.start_over(self.checkpoints.passed_over)
            if self.records.state()["rows"]:
                self.view.message("no checkpoint was saved yet: it starts over")
            self.records.rewind({"seconds": 0.0, "rows": 0, "events": 0})
            self._write("start", state, **self._made_by(), **_first_members(state))
        else:
            state = self._restore(found)
            self.view.message(f"resumes after update {found.update:,}")
            self._write("resume", state, **self._made_by())
        return state.to(self._plan.device)

    def _made_by(self) -> dict[str, Any]:
        return {
            "version": __version__,
            "torch": torch.__version__,
            "num_threads": torch.get_num_threads(),
        }

    def _evaluate_if_missed(self, state: TensorDict) -> TensorDict:
        """Make the evaluation that a stop broke off, as it would have been made then."""
        update = step_of(state)
        if update and self.evaluate.is_due(update):
            self.evaluate(state)
            changed = self._evolve(state)
            state = state if changed is None else changed
            self.save(state)
        return state

    def _evolve(self, state: TensorDict) -> TensorDict | None:
        """Evolve after an evaluation at this update, but not at the end, where nothing comes
        after."""
        update = step_of(state)
        if self.evaluate.score_of(update) is None or update >= self._plan.num_updates:
            return None
        changed = self.experiment.evolve(state)
        if changed is None:
            return None
        state, row = changed
        self._write("generation", state, **row)
        return state

    def _evaluate_at_end(self, state: TensorDict) -> str:
        """Evaluate the run's last state; returns the reason of the end: "stopped" if that was
        broken off."""
        update = step_of(state)
        self.log.row(update, self._env_steps())
        if self.evaluate.open:
            self.save.last = -1  # as below
            if not self.evaluate.join_all(update):
                return "stopped"
        if self.evaluate.is_old(update):
            self.save.last = -1  # what comes of it belongs into the last checkpoint, too
            self.evaluate.now(state)
        return "stopped" if self.evaluate.is_old(update) else "finished"

    def _end(self, state: TensorDict, reason: str) -> RunResult:
        update, env_step = step_of(state), self._env_steps()
        if reason != "stopped":  # else the means go on after the resume
            self.log.row(update, env_step)
        if self.save.last != update:
            self._save(state)  # before the row of the end, or a kill between would be final
        self._write("end", state, reason=reason)
        latest, best = self.evaluate.latest, self.evaluate.best
        return RunResult(
            folder=self.folder,
            reason=reason,
            update=update,
            env_step=env_step,
            mean_return=latest if self._plan.of_returns else None,
            best_return=best if self._plan.of_returns else None,
            seconds=self.records.seconds,
        )

    def _write(self, kind: str, state: TensorDict, **values: Any) -> None:
        self.records.write(kind, update=step_of(state), env_step=self._env_steps(), values=values)

    def close(self) -> None:
        """Close the files."""
        self.records.close()

    # -- saving

    def _try_to_save(self, state: TensorDict) -> bool:
        try:
            self._save(state)
        except (CheckpointError, OSError) as error:
            # What is full now may have room later, and what was saved before is whole.
            self.view.message(f"update {step_of(state):,}: {error}")
            return False
        return True

    def _score(self, update: int, score: float) -> None:
        self._unwritten[update] = score
        self._write_scores()

    def _write_scores(self) -> None:
        for update, score in sorted(self._unwritten.items()):
            try:
                self.checkpoints.score(update, score)
            except (CheckpointError, OSError, ValueError) as error:
                self.view.message(f"the checkpoint of update {update:,} has no score: {error}")
                if not isinstance(error, ValueError):
                    continue  # the next save tries again
            del self._unwritten[update]

    def _save(self, state: TensorDict) -> None:
        update = step_of(state)
        self._write_scores()
        state = self.experiment.whole(state)
        self.experiment.guard.check_state(state)
        try:
            payload = self.experiment.payload()
            self.checkpoints.save(
                update,
                {"state": state, **payload.parts},
                {
                    "evaluate": self.evaluate.state(),
                    "log": self.log.state(),
                    "records": self.records.state(),
                    **payload.extras,
                },
                score=self.evaluate.score_of(update),
            )
        except (CheckpointError, OSError):
            # Files written for it are removed immediately, or a full disk is made fuller by each
            # try.
            with contextlib.suppress(CheckpointError, OSError):  # the error above is raised
                self.experiment.on_saved(self.checkpoints.available())
            raise
        self.experiment.on_saved(self.checkpoints.available())

    def _restore(self, found: Checkpoint) -> TensorDict:
        state = self.experiment.restore(found)
        self.evaluate.load_state(found.extras["evaluate"])
        self.log.load_state(found.extras["log"])
        self.records.rewind(found.extras["records"])
        self.save.last = -1 if self.evaluate.is_due(found.update) else found.update
        return state


def _first_members(state: TensorDict) -> dict[str, Any]:
    """The first members of a population, in the form of the rows of later generations."""
    if not state.batch_size:
        return {}
    hyper = {str(name): state["hyper", name].tolist() for name in state["hyper"].keys()}
    return {"members": list(range(len(state))), "hyper": hyper}
