"""A sitting of a run: begun anew or gone on with, trained, evaluated, saved, ended.

What an algorithm brings is `Parts`; what every run has in common is here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from raffia._version import __version__
from raffia.jit.compiling import compiling
from raffia.learner import Learner, step_of
from raffia.tensordict.tensordict import TensorDict
from raffia.train.checkpoint import Checkpoint, CheckpointError, Checkpoints, Part
from raffia.train.collect import EndedEpisode
from raffia.train.damage import Guard
from raffia.train.loop import Ended, train
from raffia.train.metrics import PhaseClock
from raffia.train.records import Records
from raffia.train.stream import Stream
from raffia.train.tasks import Evaluate, Log, Outcome, Save
from raffia.train.view import Status, View

__all__ = ["Kept", "Parts", "Plan", "RunResult", "Sitting"]

Stop = Callable[[], bool]
LONGEST_FAILURE = 2_000  # characters of an error's text in metrics.jsonl


@dataclass(frozen=True)
class RunResult:
    """How a run, or a sitting of it, ended.

    >>> RunResult(Path("runs/x"), "target", 500, 2_700, 201.5, 201.5, 60.0).reason
    'target'
    """

    folder: Path
    reason: str  # "finished", "target" (a mean return was reached) or "stopped"
    update: int
    env_step: int | None  # None: none are played
    mean_return: float | None  # of the latest evaluation; None also where it is of no episodes
    best_return: float | None
    seconds: float  # over all sittings
    signal: str = ""  # that stopped it, such as "SIGTERM"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long a run is, and what is done how often.

    >>> Plan(title="ILQL on data", num_updates=100, evaluate_every=10, save_every=50).log_every
    10
    """

    title: str
    num_updates: int
    num_env_steps: int | None = None  # None: no worlds are played in
    evaluate_every: int  # environment steps, or updates where there are none
    num_simulations: int | None = None  # of each search of an evaluation, where there are any
    of_returns: bool = True  # whether an evaluation's score is a mean return
    target_return: float | None = None  # the run ends when one reaches it
    save_every: int  # updates
    keep: int = 3  # checkpoints
    device: str = "cpu"
    num_threads: int = 1

    @property
    def log_every(self) -> int:
        """Updates from one row of means to the next."""
        return min(50, max(10, self.num_updates // 100))


@dataclass(frozen=True)
class Kept:
    """What a checkpoint keeps besides the learner's state.

    >>> Kept({"stream": TensorDict()}).extras
    {}
    """

    parts: Mapping[str, Part]
    extras: Mapping[str, Any] = field(default_factory=dict)  # JSON


class Parts(Protocol):
    """What an algorithm brings to a run.

    `restore` undoes `keep`. The learner, the stream and all else is as after the same number of
    updates of a run that was never stopped, or a resumed run is another one.

    >>> def name_of(parts: Parts) -> str:
    ...     return parts.plan.title
    """

    @property
    def plan(self) -> Plan:
        """How long, how often."""

    @property
    def learner(self) -> Learner:
        """What learns."""

    @property
    def stream(self) -> Stream:
        """Where its batches come from."""

    @property
    def guard(self) -> Guard:
        """What stops it at numbers that are not finite."""

    @property
    def clock(self) -> PhaseClock:
        """Whose phases are told."""

    def init(self) -> TensorDict:
        """The learner's state before the first update, on the CPU."""

    def begin_anew(self, passed_over: Sequence[str]) -> None:
        """There is no checkpoint to go on with: forget what a run that was killed left.

        passed_over: checkpoints that can't be used; raises if it is better to change nothing.
        """

    def check(self, found: Checkpoint) -> None:
        """Raises DamagedFileError for a checkpoint whose files elsewhere are not whole."""

    def restore(self, found: Checkpoint) -> TensorDict:
        """Stand where the checkpoint was saved; gives the learner's state.

        Raises if it is another learner's, before anything is changed.
        """

    def keep(self) -> Kept:
        """What `restore` needs."""

    def saved(self, kept: Sequence[Checkpoint]) -> None:
        """These are the checkpoints that there are: what no other needs may go."""

    def evaluate(self, state: TensorDict, stop: Stop) -> Outcome | None:
        """How good the learner is; None if `stop` said so meanwhile."""

    def evolve(self, state: TensorDict) -> tuple[TensorDict, dict[str, Any]] | None:
        """What follows from an evaluation: another state, and a row of its own; None: nothing."""

    def take_ended(self) -> list[EndedEpisode]:
        """The episodes that have ended since this was asked."""

    def counters(self) -> dict[str, int]:
        """What a row tells the rate of, by name; besides updates and environment steps."""

    def extra(self, update: int) -> dict[str, float]:
        """What else a row tells."""


class Sitting:
    """A run in its folder; `go` trains from the newest checkpoint on, or from the start."""

    def __init__(self, parts: Parts, folder: Path, view: View) -> None:
        self.parts, self.folder, self.view = parts, folder, view
        self._stop: Stop = lambda: False
        self._plan = plan = parts.plan
        self.checkpoints = Checkpoints(folder / "checkpoints", keep=plan.keep)
        self.records = Records(folder)
        self.log = Log(
            self.records,
            view,
            parts.clock,
            Status(
                title=plan.title,
                num_updates=plan.num_updates,
                env_step=None if plan.num_env_steps is None else 0,
                num_env_steps=plan.num_env_steps,
            ),
            every=plan.log_every,
            env_steps=self._env_steps,
            ended=parts.take_ended,
            counters=parts.counters,
            extra=parts.extra,
        )
        self.evaluate = Evaluate(
            lambda state, count: parts.evaluate(state, self._stop),
            self.records,
            self.log,
            every=plan.evaluate_every,
            env_steps=self._env_steps,
            target=plan.target_return,
            num_simulations=plan.num_simulations,
            of_returns=plan.of_returns,
        )
        self.save = Save(
            self._try_to_save,
            every=plan.save_every,
            worth=self.evaluate.improved,
        )

    def _env_steps(self) -> int | None:
        return None if self._plan.num_env_steps is None else self.parts.stream.num_env_steps

    def go(self, stop: Stop, begun: Callable[[], None]) -> RunResult:
        """Train until the end, the target, or `stop`; `begun` is called before the first update."""
        with self._compiling_told():
            return self._go(stop, begun)

    @contextlib.contextmanager
    def _compiling_told(self) -> Iterator[None]:
        """Say that kernels are compiled, which takes a while in a machine's first run; and count
        the time as a phase of its own, not as that of whoever calls them first."""
        told, phases = False, contextlib.ExitStack()

        def enter() -> None:
            nonlocal told
            if not told:
                self.view.say(
                    "compiling kernels for this machine: up to half a minute, once; later runs "
                    "find them done"
                )
            told = True
            phases.enter_context(self.parts.clock.phase("compile"))

        with compiling(enter, phases.close):
            yield

    def _go(self, stop: Stop, begun: Callable[[], None]) -> RunResult:
        self._stop, parts = stop, self.parts
        state = self._begin()
        begun()
        try:
            state = self._make_up(state)
            state, reason = train(
                parts.learner,
                state,
                parts.stream,
                num_updates=self._plan.num_updates,
                clock=parts.clock,
                check=parts.guard,
                told=self.log.told,
                tasks=[self.log, self.evaluate, self._evolve, self.save],
                stop=stop,
            )
            if reason == "finished":
                reason = self._look_at_the_end(state)
        except Ended as ended:
            reason = ended.reason
        except Exception as error:
            self._note_failure(error)
            raise
        return self._end(state, reason)

    def _note_failure(self, error: Exception) -> None:
        """Write down that the run failed, and tell with the error what was saved.

        The row goes when the run is resumed: what came after the checkpoint is done again.
        """
        update = self.log.status.update
        text = f"{type(error).__name__}: {error}"[:LONGEST_FAILURE]
        values = {"error": text}
        self.records.write("error", update=update, env_step=self._env_steps(), values=values)
        saved = self.checkpoints.kept()
        error.add_note(
            f"The run failed after update {update:,}. Saved is update {saved[-1].update:,}: "
            f"`raffia resume {self.folder}` goes on from there"
            if saved
            else f"The run failed after update {update:,}, before its first checkpoint: "
            f"`raffia resume {self.folder}` begins it again"
        )

    def _begin(self) -> TensorDict:
        found = self.checkpoints.newest(self.view.say, check=self.parts.check)
        if found is None:
            state = self.parts.init()
            self.parts.begin_anew(self.checkpoints.passed_over)
            if self.records.state()["rows"]:
                self.view.say("no checkpoint was saved yet: it begins anew")
            self.records.rewind({"seconds": 0.0, "rows": 0, "events": 0})
            self._write("start", state, **self._made_by(), **_first_members(state))
        else:
            state = self._restore(found)
            self.view.say(f"goes on after update {found.update:,}")
            self._write("resume", state, **self._made_by())
        return state.to(self._plan.device)

    def _made_by(self) -> dict[str, Any]:
        return {
            "version": __version__,
            "torch": torch.__version__,
            "num_threads": self._plan.num_threads,
        }

    def _make_up(self, state: TensorDict) -> TensorDict:
        """Evaluate if a stop broke that off, as it would have been done then."""
        update = step_of(state)
        if update and self.evaluate.is_due(update):
            self.evaluate(state)
            changed = self._evolve(state)
            state = state if changed is None else changed
            self.save(state)
        return state

    def _evolve(self, state: TensorDict) -> TensorDict | None:
        """What an evaluation at this update leads to, but at the end, where nothing comes after."""
        update = step_of(state)
        if self.evaluate.score_of(update) is None or update >= self._plan.num_updates:
            return None
        changed = self.parts.evolve(state)
        if changed is None:
            return None
        state, row = changed
        self._write("generation", state, **row)
        return state

    def _look_at_the_end(self, state: TensorDict) -> str:
        """Evaluate what the run ends with; gives its reason: "stopped" if that was broken off."""
        update = step_of(state)
        self.log.row(update, self._env_steps())
        if self.evaluate.is_old(update):
            self.save.last = -1  # what comes of it belongs into the last checkpoint, too
            self.evaluate.now(state)
        return "stopped" if self.evaluate.is_old(update) else "finished"

    def _end(self, state: TensorDict, reason: str) -> RunResult:
        update, env_step = step_of(state), self._env_steps()
        if reason != "stopped":  # else the means go on after the resume
            self.log.row(update, env_step)
        if self.save.last != update:
            self._save(state)  # before it is said to have ended, or a kill between would be final
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
            self.view.say(f"update {step_of(state):,}: {error}")
            return False
        return True

    def _save(self, state: TensorDict) -> None:
        update = step_of(state)
        self.parts.guard.check_state(state)
        try:
            kept = self.parts.keep()
            self.checkpoints.save(
                update,
                {"state": state, **kept.parts},
                {
                    "evaluate": self.evaluate.state(),
                    "log": self.log.state(),
                    "records": self.records.state(),
                    **kept.extras,
                },
                score=self.evaluate.score_of(update),
            )
        except (CheckpointError, OSError):
            # What was written for it may go at once, or a full disk is made fuller by each try.
            with contextlib.suppress(CheckpointError, OSError):  # the error above tells
                self.parts.saved(self.checkpoints.kept())
            raise
        self.parts.saved(self.checkpoints.kept())

    def _restore(self, found: Checkpoint) -> TensorDict:
        state = self.parts.restore(found)
        self.evaluate.load_state(found.extras["evaluate"])
        self.log.load_state(found.extras["log"])
        self.records.rewind(found.extras["records"])
        self.save.last = -1 if self.evaluate.is_due(found.update) else found.update
        return state


def _first_members(state: TensorDict) -> dict[str, Any]:
    """What members of a population begin with, as the rows of later generations tell it."""
    if not state.batch_size:
        return {}
    hyper = {str(name): state["hyper", name].tolist() for name in state["hyper"].keys()}
    return {"members": list(range(len(state))), "hyper": hyper}
