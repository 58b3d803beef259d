"""`TrainingSession`: a run from its newest checkpoint, or from the start, to its end.

What an algorithm brings is an `Experiment`; what every run has in common is here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raffia._version import __version__
from raffia.hints import error_text
from raffia.jit.kernel import compiling
from raffia.learner import step_of
from raffia.tensordict.tensordict import TensorDict
from raffia.train.checkpoint import Checkpoints
from raffia.train.experiment import Experiment, RunError, Stop
from raffia.train.log import Log, OnRow, Records
from raffia.train.loop import Ended, Evaluate, Save, train
from raffia.train.run_state import LEARNER, RunState, Tree

LONGEST_FAILURE = 2_000  # characters of an error's text in metrics.jsonl


@dataclass(frozen=True)
class RunResult:
    """The result of a run, or of one session of it.

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

    on_row: called with each row of `metrics.jsonl` when it is written; an error of it ends the run
        after the update, which is saved first.
    changed: settings that are others than before a resume, as JSON, for the row about it.

    >>> def train(experiment: Experiment) -> RunResult:
    ...     with contextlib.closing(TrainingSession(experiment)) as session:
    ...         return session.run()
    """

    def __init__(
        self,
        experiment: Experiment,
        *,
        changed: Mapping[str, Any] | None = None,
        on_row: OnRow | None = None,
    ) -> None:
        self._changed = {"changed": dict(changed)} if changed else {}
        self.experiment, self.folder, self.view = experiment, experiment.folder, experiment.view
        self.checkpoints = Checkpoints(self.folder / "checkpoints", keep=experiment.plan.keep)
        self.records = Records(self.folder, on_row)
        self.log = Log(experiment, self.records)
        self.evaluate = Evaluate(experiment, self.records, self.log)
        counters: Tree = {"evaluate": self.evaluate, "log": self.log, "records": self.records}
        self.run_state = RunState(self.folder, {**experiment.parts, **counters}, experiment.replays)
        self.save = Save(experiment, self.checkpoints, self.run_state, self.evaluate)
        self._newest: TensorDict | None = None  # the state after the last update of this session
        self._is_in_step = False

    def run(
        self, stop: Stop = lambda: False, on_start: Callable[[], None] = lambda: None
    ) -> RunResult:
        """Train until the end, the target, or until `stop` asks to stop.

        on_start: called once the state is there, before the first update.
        """
        self.evaluate.stop, num_updates = stop, self.experiment.plan.num_updates
        with self._announce_compiling():
            state = self.start()
            on_start()
            try:
                self.evaluate.end_at_target()  # a kill may have come before the row of the end
                state = self._catch_up(state)
                state, reason = train(
                    state,
                    self._step,
                    num_updates=num_updates,
                    every=[self.log, self.evaluate, self._evolve, self.save, self._raise_of_caller],
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

    def _raise_of_caller(self, state: TensorDict, metrics: TensorDict) -> None:
        """Raise what `on_row` raised, once the state is saved."""
        if (error := self.records.error) is None:
            return
        try:
            if self.save.last != step_of(state):
                self.save.now(state)
        finally:
            raise error

    def _step(self, state: TensorDict) -> tuple[TensorDict, TensorDict]:
        """A step of the experiment, with a note of the newest state."""
        self._newest, self._is_in_step = state, True
        state, metrics = self.experiment.step(state)
        self._newest, self._is_in_step = state, False
        return state, metrics

    def start(self) -> TensorDict:
        """The learner's state of the newest checkpoint, with all else as it was then; or of the
        start."""
        experiment = self.experiment
        found = self.checkpoints.newest(self.view.message, check=self.run_state.check)
        if found is None:
            self._refuse_unusable()
            state = experiment.init()
            for buffer in experiment.replays.values():
                buffer.empty()
            filled = experiment.fill_replays()
            if self.records.state()["rows"]:
                self.view.message("no checkpoint has been saved yet: starting over")
            self.records.load_state({"seconds": 0.0, "rows": 0, "events": 0})
            self._write("start", state, **_made_by(), **_first_members(state), **filled)
        else:
            state = found.tensors(LEARNER)
            experiment.refuse_other(found, state)
            self.run_state.restore(found)
            self.save.last = -1 if self.evaluate.is_due(found.update) else found.update
            self.view.message(f"resuming after update {found.update:,}")
            self._write("resume", state, **_made_by(), **self._changed)
        return state.to(experiment.plan.device)

    def _refuse_unusable(self) -> None:
        """Raise RunError if unusable checkpoints exist, since a new start would remove them."""
        if passed_over := self.checkpoints.passed_over:
            raise RunError(
                f"none of the {len(passed_over)} checkpoints in {self.folder} can be resumed, for "
                "the reasons above. Nothing was changed: restore what is missing, or start "
                f"another run{self.experiment.unusable_remark}"
            )

    def _catch_up(self, state: TensorDict) -> TensorDict:
        """Make the evaluation that a stop broke off, as it would have been made then."""
        update = step_of(state)
        if update and self.evaluate.is_due(update):
            self.evaluate.catch_up(state)
            changed = self._evolve(state)
            state = state if changed is None else changed
            self.save(state)
        return state

    def _evolve(self, state: TensorDict, metrics: TensorDict | None = None) -> TensorDict | None:
        """Evolve after an evaluation at this update, but not at the end, where nothing comes
        after."""
        update = step_of(state)
        at_end = update >= self.experiment.plan.num_updates
        if self.evaluate.score_of(update) is None or at_end:
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
        update, evaluate = step_of(state), self.evaluate
        if evaluate.open:
            self.save.last = -1  # as below
            if not evaluate.join_all(update):
                return "stopped"
        if evaluate.is_old(update):
            self.save.last = -1  # what comes of it belongs into the last checkpoint, too
            evaluate.now(state)
        return "stopped" if evaluate.is_old(update) else "finished"

    def _end(self, state: TensorDict, reason: str) -> RunResult:
        update, plan = step_of(state), self.experiment.plan
        if reason != "stopped":  # else the means go on after the resume
            self.log.row(update)
        if self.save.last != update:
            self.save.now(state)  # before the row of the end, or a kill between would be final
        self._write("end", state, reason=reason)
        if self.records.error is not None and not isinstance(self.records.error, Ended):
            raise self.records.error
        latest, best = self.evaluate.latest, self.evaluate.best
        return RunResult(
            folder=self.folder,
            reason=reason,
            update=update,
            env_step=self.experiment.num_env_steps,
            mean_return=latest if plan.of_returns else None,
            best_return=best if plan.of_returns else None,
            seconds=self.records.seconds,
        )

    def _note_failure(self, error: Exception) -> None:
        """Write down that the run failed, and add to the error what was saved.

        The row goes when the run is resumed: what came after the checkpoint is done again.
        """
        update, env_step = self.log.status.update, self.experiment.num_env_steps
        if self.experiment.can_save_after(error):
            try:
                self._save_newest()
            except Exception as other:  # the first error is the one that is raised
                error.add_note(f"Its last update could not be saved: {error_text(other)}")
        text = error_text(error)[:LONGEST_FAILURE]
        self.records.write("error", update=update, env_step=env_step, values={"error": text})
        saved = self.checkpoints.available()
        error.add_note(
            f"The run failed after update {update:,}. The last checkpoint is of update "
            f"{saved[-1].update:,}: `raffia resume {self.folder}` continues from there"
            if saved
            else f"The run failed after update {update:,}, before its first checkpoint: "
            f"`raffia resume {self.folder}` starts it again"
        )

    def _save_newest(self) -> None:
        """Save after the last update, unless that was done, or none was made in this session."""
        state = self._newest
        if state is None or (update := step_of(state)) in (0, self.save.last):
            return
        if self._is_in_step:
            self.log.episodes(update + 1)  # those that have ended in it, which is made again
            self.evaluate.done_after = update
        self.save.now(state)

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
                    "compiling kernels for this machine, which takes up to half a minute; later "
                    "runs reuse them"
                )
            announced = True
            phases.enter_context(self.experiment.clock.phase("compile"))

        with compiling(enter, phases.close):
            yield

    def _write(self, kind: str, state: TensorDict, **values: Any) -> None:
        env_step = self.experiment.num_env_steps
        self.records.write(kind, update=step_of(state), env_step=env_step, values=values)

    def close(self) -> None:
        """Close the files."""
        self.records.close()


def _made_by() -> dict[str, Any]:
    return {
        "version": __version__,
        "torch": torch.__version__,
        "num_threads": torch.get_num_threads(),
    }


def _first_members(state: TensorDict) -> dict[str, Any]:
    """The first members of a population, in the form of the rows of later generations."""
    if not state.batch_size:
        return {}
    hyper = {str(name): state["hyper", name].tolist() for name in state["hyper"].keys()}
    return {"members": list(range(len(state))), "hyper": hyper}
