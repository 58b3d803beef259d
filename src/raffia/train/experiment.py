"""An algorithm's part of a run: `Experiment`, the contract with `TrainingSession`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raffia.data.segment import SegmentReplayBuffer
from raffia.envs.env import BatchEnv
from raffia.functional.seeds import derive_seed
from raffia.learner import Learner
from raffia.tensordict.tensordict import TensorDict
from raffia.train.checkpoint import Checkpoint, Part
from raffia.train.evaluations import Evaluations
from raffia.train.ledger import EndedEpisode
from raffia.train.metrics import PhaseClock
from raffia.train.nan_guard import NaNGuard
from raffia.train.outcome import Outcome
from raffia.train.replay_log import ReplayLog
from raffia.train.stream import Stream
from raffia.train.view import View

__all__ = ["CheckpointPayload", "Experiment", "Plan", "RunError", "refuse_other_state"]

Stop = Callable[[], bool]


class RunError(RuntimeError):
    """A run's folder is missing, damaged or in use; the message tells what to do.

    >>> raise RunError("there is no run in runs/x")
    Traceback (most recent call last):
    ...
    raffia.train.experiment.RunError: there is no run in runs/x
    """


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Length of a run, and how often it is evaluated, saved and logged.

    >>> Plan(title="ILQL on data", num_updates=100, evaluate_every=10, save_every=50).log_every
    10
    """

    title: str
    num_updates: int
    num_env_steps: int | None = None  # None: no environment is played in
    evaluate_every: int  # environment steps, or updates where there are none
    num_simulations: int | None = None  # of each search of an evaluation, where there are any
    of_returns: bool = True  # whether an evaluation's score is a mean return
    target_return: float | None = None  # the run ends when one reaches it
    save_every: int = 500  # updates
    keep: int = 3  # checkpoints
    device: str = "cpu"

    @property
    def log_every(self) -> int:
        """Updates from one row of means to the next."""
        return min(50, max(10, self.num_updates // 100))


@dataclass(frozen=True)
class CheckpointPayload:
    """The content of a checkpoint besides the learner's state.

    >>> CheckpointPayload({"stream": TensorDict()}).extras
    {}
    """

    parts: Mapping[str, Part]
    extras: Mapping[str, Any] = field(default_factory=dict)  # JSON


class Experiment:
    """An algorithm in a run folder, as a `TrainingSession` trains, evaluates and saves it.

    A subclass sets `plan`, `learner` and `stream` in its `__init__` and defines `evaluate`; the
    other methods have defaults. `restore` undoes `payload`: after it the learner, the stream and
    all else are as after the same number of updates of a run that was never stopped, or a resumed
    run is another one.

    replays: replay buffers by the folder of their rows; their content is saved with each
        checkpoint, every row once.

    >>> from itertools import repeat
    >>> from raffia.train.stream import OfflineStream
    >>> from raffia.train.outcome import Evaluated
    >>> class Nothing(Experiment):
    ...     plan = Plan(title="nothing", num_updates=3, evaluate_every=1, save_every=1)
    ...     stream = OfflineStream(lambda update: repeat(TensorDict()))
    ...     def evaluate(self, state, stop):
    ...         return Evaluated(score=0.0, values={})
    >>> Nothing(Path("nowhere"), view=None, seed=0).payload().extras
    {}
    """

    plan: Plan
    learner: Learner
    stream: Stream
    env: BatchEnv | None = None  # the environment whose steps are learnt from, if any

    # The settings that shape a state, for the error about a checkpoint of other networks.
    shaped_by = "model.*, env.*, population.size and optimizer.name"
    # What can be done with checkpoints that can't be resumed, for that error's text.
    unusable_remark = ""

    evaluates_elsewhere = False  # whether `make_evaluations` plays them, not `evaluate`
    _evaluations: Evaluations | None = None

    def __init__(self, folder: Path, view: View, *, seed: int) -> None:
        self.folder, self.view, self.seed = folder, view, seed
        self.guard = NaNGuard(folder / "nan_dump", seed=seed)
        self.clock = PhaseClock()
        self.replays: list[tuple[ReplayLog, SegmentReplayBuffer]] = []

    def init(self) -> TensorDict:
        """The learner's state before the first update, on the CPU."""
        return self.learner.init(derive_seed(self.seed, "networks"))

    def example_state(self) -> TensorDict:
        """Any state of the shapes that a checkpoint's must have."""
        return self.init()

    def whole(self, state: TensorDict) -> TensorDict:
        """The state as it is saved, where the loop's lacks what is elsewhere."""
        return state

    def evaluate(self, state: TensorDict, stop: Stop) -> Outcome | None:
        """Evaluate the learner; None if `stop` asked to stop meanwhile."""
        raise NotImplementedError(f"{type(self).__name__} must define evaluate(state, stop)")

    @property
    def evaluations(self) -> Evaluations | None:
        """The evaluations that are played elsewhere, or were and are open still."""
        found = self._evaluations
        is_used = found is not None and (self.evaluates_elsewhere or found.updates)
        return found if is_used else None

    def make_evaluations(self) -> Evaluations:
        """Have evaluations played by workers; in this process, to join those of an earlier run."""
        raise NotImplementedError(f"{type(self).__name__} must define make_evaluations()")

    def evaluation_begun(self, state: TensorDict) -> None:
        """Do what belongs to an evaluation of this state, which is now played elsewhere."""

    def start_over(self, passed_over: Sequence[str]) -> None:
        """Forget what a run that was killed before its first checkpoint left.

        passed_over: checkpoints that can't be used. Raises RunError if there are any: they would
        be removed.
        """
        if passed_over:
            raise RunError(
                f"none of the {len(passed_over)} checkpoints in {self.folder} can be resumed, as "
                "described above. Nothing was changed: bring back what is missing, or start "
                f"another run{self.unusable_remark}"
            )
        for _, buffer in self.replays:
            buffer.empty()

    def check(self, found: Checkpoint) -> None:
        """Raise DamagedFileError for a checkpoint whose files outside its folder are not whole."""
        for log, _ in self.replays:
            log.check(found)

    def restore(self, found: Checkpoint) -> TensorDict:
        """Restore the run of a checkpoint; returns the learner's state.

        Raises RunError if it is another learner's, before anything is changed.
        """
        state = found.tensors("state")
        refuse_other_state(state, self.example_state(), found.root, keep=self.shaped_by)
        # A stream whose state is empty, such as an `OfflineStream`, has no part in a checkpoint.
        self.stream.load_state(found.tensors("stream") if found.has("stream") else TensorDict())
        for log, buffer in self.replays:
            log.restore(found, buffer)
        is_open = found.has("evaluations")
        if is_open and self._evaluations is None:
            self._evaluations = self.make_evaluations()
        if self._evaluations is not None:
            self._evaluations.load_state(found.tensors("evaluations") if is_open else TensorDict())
        return state

    def payload(self) -> CheckpointPayload:
        """The payload of a checkpoint: what `restore` needs besides the learner's state."""
        stream = self.stream.state()
        parts: dict[str, Part] = {} if stream.is_empty() else {"stream": stream}
        extras: dict[str, Any] = {}
        for log, buffer in self.replays:
            logged = log.files(buffer)
            parts |= logged.parts
            extras[log.name] = logged.extras
        if self.evaluations is not None and self.evaluations.updates:
            parts["evaluations"] = self.evaluations.state()
        return CheckpointPayload(parts, extras)

    def on_saved(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Remove what none of these checkpoints, all that there are, needs any more."""
        for log, _ in self.replays:
            log.prune(checkpoints)

    def evolve(self, state: TensorDict) -> tuple[TensorDict, dict[str, Any]] | None:
        """Another state that follows from an evaluation, and a row about it; None: no change."""
        return None

    def take_ended(self) -> list[EndedEpisode]:
        """The episodes that have ended since the last call."""
        return self.stream.take_ended()

    def counters(self) -> dict[str, int]:
        """Counts by name, besides updates and environment steps, whose rate is logged."""
        return {}

    def extra_metrics(self, update: int) -> dict[str, float]:
        """Further values of a row of means."""
        return {}

    def close(self) -> None:
        """Close the environments, and end those who evaluate."""
        self.close_evaluations()
        if self.env is not None:
            self.env.close()

    def close_evaluations(self) -> None:
        """End the workers that evaluate."""
        if self._evaluations is not None:
            self._evaluations.close()


def refuse_other_state(state: TensorDict, like: TensorDict, where: str, *, keep: str) -> None:
    """RunError unless a saved state has the shapes of the learner that is to resume it.

    keep: the settings that shape a state.

    >>> one = TensorDict(weight=torch.ones(2))
    >>> refuse_other_state(one, TensorDict(weight=torch.ones(3)), "checkpoints/7", keep="model.*")
    Traceback (most recent call last):
    ...
    raffia.train.experiment.RunError: checkpoints/7 is of other networks or another optimizer: ...
    """
    saved, wanted = _shapes(state), _shapes(like)
    differ = [key for key in {**wanted, **saved} if saved.get(key) != wanted.get(key)]
    if differ:
        key = differ[0]
        raise RunError(
            f"{where} is of other networks or another optimizer: {key} is "
            f"{saved.get(key, 'not there')} in it, and {wanted.get(key, 'not there')} here, and "
            f"{len(differ) - 1} more differ. Go on with {keep} as they were, and with the same "
            "networks"
        )


def _shapes(state: TensorDict) -> dict[str, list[int]]:
    return {
        key if isinstance(key, str) else ".".join(key): list(value.shape)
        for key, value in state.items(True, True)
    }
