"""An algorithm's part of a run: `Experiment`, the contract with `TrainingSession`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from raffia.data.segment import SegmentReplayBuffer
from raffia.functional.seeds import derive_seed
from raffia.tensordict.tensordict import TensorDict
from raffia.train.checkpoint import Checkpoint
from raffia.train.evaluations import Evaluations, Outcome
from raffia.train.ledger import EndedEpisode
from raffia.train.metrics import PhaseClock
from raffia.train.nan_guard import NaNGuard
from raffia.train.run_state import Tree
from raffia.train.view import View

Stop = Callable[[], bool]


class RunError(RuntimeError):
    """A run's folder is missing, damaged or in use; the message tells what to do.

    >>> raise RunError("runs/x is not a run folder")
    Traceback (most recent call last):
    ...
    raffia.train.experiment.RunError: runs/x is not a run folder
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


class Source(Protocol):
    """The source of steps: a `Collector`, or `ActorRollouts`."""

    @property
    def num_env_steps(self) -> int:
        """The number of steps played up to now, over all environments."""

    def take_ended(self) -> list[EndedEpisode]:
        """The episodes that have ended since the last call."""


class Experiment:
    """An algorithm in a run folder: `init`, `step` and `evaluate`, as `TrainingSession` calls them.

    A subclass sets `plan`, `learner` and what it has of the other attributes in its `__init__`, and
    defines `step` and `evaluate`; the other methods have defaults.

    collector: plays the environments whose steps are learnt from, if any.
    parts: what is mutated besides the learner's state, as environments do, by name: see
        `RunState`, the tree that they are saved and restored in.
    replays: replay buffers by name; their content is saved with each checkpoint, every row once.

    >>> from raffia.train.evaluations import Evaluated
    >>> class Counts(Experiment):
    ...     plan = Plan(title="counting", num_updates=3, evaluate_every=1, save_every=1)
    ...     def init(self):
    ...         return TensorDict(step=torch.tensor(0))
    ...     def step(self, state):
    ...         return TensorDict(step=state["step"] + 1), TensorDict()
    ...     def evaluate(self, state, stop):
    ...         return Evaluated(score=0.0, values={})
    >>> counts = Counts(Path("nowhere"), view=None, seed=0)
    >>> counts.step(counts.init())[0]["step"]
    tensor(1)
    """

    plan: Plan
    # `Any`, because a subclass knows more than the contract about what it sets here
    learner: Any  # a Learner
    env: Any = None  # a BatchEnv, if there is one; closed with the experiment
    collector: Any = None  # a Source of steps, if any
    evaluations: Evaluations | None = None  # those that are played elsewhere

    # The settings that shape a state, for the error about a checkpoint of other networks.
    shaped_by = "model.*, env.*, population.size and optimizer.name"
    # What can be done with checkpoints that can't be resumed, for that error's text.
    unusable_remark = ""

    def __init__(self, folder: Path, view: View, *, seed: int) -> None:
        self.folder, self.view, self.seed = folder, view, seed
        self.guard = NaNGuard(folder / "nan_dump", seed=seed)
        self.clock = PhaseClock()
        self.parts: Tree = {}
        self.replays: Mapping[str, SegmentReplayBuffer] = {}

    def init(self) -> TensorDict:
        """The learner's state before the first update, on the CPU."""
        return self.learner.init(derive_seed(self.seed, "networks"))

    def fill_replays(self) -> dict[str, Any]:
        """Add what replays hold before the first update; values for the row of the start."""
        return {}

    def step(self, state: TensorDict) -> tuple[TensorDict, TensorDict]:
        """One update: the next state of the learner, and the update's metrics."""
        raise NotImplementedError(f"{type(self).__name__} must define step(state)")

    def learn(self, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, TensorDict]:
        """Learn from a batch, unless something is not finite; the next state, and the metrics."""
        with self.clock.phase("learn"):
            update, metrics = self.learner.grads(state, batch)
            self.guard(state, batch, update, metrics)
            return self.learner.apply(state, update), metrics

    def evaluate(self, state: TensorDict, stop: Stop) -> Outcome | None:
        """Evaluate the learner; None if `stop` asked to stop meanwhile."""
        raise NotImplementedError(f"{type(self).__name__} must define evaluate(state, stop)")

    def evaluation_begun(self, state: TensorDict) -> None:
        """Do what belongs to an evaluation of this state, which is now played elsewhere."""

    def evolve(self, state: TensorDict) -> tuple[TensorDict, dict[str, Any]] | None:
        """A new state that follows from an evaluation, and a row about it; None for no change."""
        return None

    @property
    def num_env_steps(self) -> int | None:
        """The number of steps played up to now; None if the algorithm never plays."""
        return None if self.collector is None else self.collector.num_env_steps

    def take_ended(self) -> list[EndedEpisode]:
        """The episodes that have ended since the last call."""
        return [] if self.collector is None else self.collector.take_ended()

    def counters(self) -> dict[str, int]:
        """Counts by name, in addition to updates and environment steps, whose rates are logged."""
        return {}

    def extra_metrics(self, update: int) -> dict[str, float]:
        """Further values of a row of means."""
        return {}

    def example_state(self) -> TensorDict:
        """Any state of the shapes that a checkpoint's must have."""
        return self.init()

    def whole(self, state: TensorDict) -> TensorDict:
        """The state as it is saved, including parts that other processes hold."""
        return state

    def can_save_after(self, error: Exception) -> bool:
        """Whether all mutated parts are such that a resume goes on from the newest state,
        although a step, or a task after it, raised this error; the run is then saved.
        """
        return False

    def refuse_other(self, found: Checkpoint, state: TensorDict) -> None:
        """Raise RunError for a checkpoint, with its learner's state, that can't be resumed here."""
        refuse_other_state(state, self.example_state(), found.root, keep=self.shaped_by)

    def close(self) -> None:
        """Close the environments, and stop the evaluators."""
        if self.evaluations is not None:
            self.evaluations.close()
        if self.env is not None:
            self.env.close()


def refuse_other_state(state: TensorDict, like: TensorDict, where: str, *, keep: str) -> None:
    """Raise RunError unless a saved state has the shapes of the learner that is to resume it.

    keep: the settings that shape a state.

    >>> one = TensorDict(weight=torch.ones(2))
    >>> refuse_other_state(one, TensorDict(weight=torch.ones(3)), "checkpoints/7", keep="model.*")
    Traceback (most recent call last):
    ...
    raffia.train.experiment.RunError: checkpoints/7 belongs to other networks or another ...
    """
    saved, wanted = _shapes(state), _shapes(like)
    differ = [key for key in {**wanted, **saved} if saved.get(key) != wanted.get(key)]
    if differ:
        key = differ[0]
        raise RunError(
            f"{where} belongs to other networks or another optimizer: {key} is "
            f"{saved.get(key, 'not there')} in it, but {wanted.get(key, 'not there')} here, and "
            f"{len(differ) - 1} more entries differ. Resume with the same {keep}, and with the "
            "same networks"
        )


def _shapes(state: TensorDict) -> dict[str, list[int]]:
    return {
        key if isinstance(key, str) else ".".join(key): list(value.shape)
        for key, value in state.items(True, True)
    }
