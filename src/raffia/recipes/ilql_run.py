"""The parts of a run of ILQL: data -> batches -> learner -> networks -> games or held-out rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from raffia.algorithms.ilql.learner import ILQLLearner
from raffia.algorithms.ilql.loss import with_row_means
from raffia.functional.seeds import derive_seed
from raffia.learner import Accumulate, Learner
from raffia.recipes.ilql_config import ILQLRun
from raffia.recipes.ilql_data import Lessons, make_lessons, make_wordle
from raffia.recipes.ilql_evaluation import (
    ILQLEvaluation,
    evaluated,
    held_out_means,
    play_wordle,
)
from raffia.recipes.ilql_networks import Interrupted, Networks
from raffia.recipes.ilql_sizes import begin_with, refuse_unfit
from raffia.recipes.parts import require_device
from raffia.recipes.run_folder import RunError, refuse_other_state, refuse_to_begin_anew
from raffia.tensordict.tensordict import TensorDict
from raffia.train.checkpoint import Checkpoint
from raffia.train.collect import EndedEpisode
from raffia.train.damage import Guard
from raffia.train.metrics import PhaseClock
from raffia.train.sitting import Kept, Plan, RunResult, Sitting
from raffia.train.stream import OfflineStream
from raffia.train.tasks import Evaluated
from raffia.train.view import View

__all__ = ["DialogueRun", "evaluate_networks", "plan_of"]

SHAPES = "model.*, the task's tokens and optimizer.*"  # what a state's shapes come from


class DialogueRun:
    """ILQL's parts of a run in its folder; the rest of it is the `Sitting`."""

    def __init__(self, config: ILQLRun, folder: Path, view: View) -> None:
        self.config, self.folder = config, folder
        self.plan = plan_of(config)
        require_device(config.device)
        self.lessons = make_lessons(config, folder)
        refuse_unfit(config, self.lessons.tokenizer)
        self.networks = ILQLLearner(config, num_updates=config.num_updates)
        self.learner: Learner = self.networks
        if config.num_micro_batches > 1:
            self.learner = Accumulate(self.networks, config.num_micro_batches)
        self.seen = Networks(config, config.device)  # what is evaluated
        self.guard = Guard(folder / "damage", seed=config.seed)
        self.clock = PhaseClock()
        self.stream = OfflineStream(self._batches)
        self.num_tokens = 0  # read in this sitting
        self.sitting = Sitting(self, folder, view)

    def go(self, stop: Callable[[], bool], begun: Callable[[], None]) -> RunResult:
        """Train from the newest checkpoint on, or from the start: see `Sitting.go`."""
        return self.sitting.go(stop, begun)

    def close(self) -> None:
        """Close the files."""
        self.sitting.close()

    # -- what a sitting asks for

    def init(self) -> TensorDict:
        """Fresh networks of the run's seed, or what lies in the language model's folder."""
        seed = derive_seed(self.config.seed, "networks")
        model = self.networks.make_model(seed)
        if self.config.language_model:
            begin_with(model, Path(self.config.language_model))
        return self.networks.state_of(model, seed)

    def begin_anew(self, passed_over: Sequence[str]) -> None:
        """Nothing else was left."""
        refuse_to_begin_anew(self.folder, passed_over)

    def check(self, found: Checkpoint) -> None:
        """All of a checkpoint is in its own folder."""

    def restore(self, found: Checkpoint) -> TensorDict:
        """The learner's state, if it learns from what it has learnt from before."""
        state = found.tensors("state")
        refuse_other_state(state, self.networks.init(0), found.root, keep=SHAPES)
        if found.extras["data"] != self._data():
            raise RunError(
                f"{found.root} has learnt from other rows than those that are there now: bring "
                "back the files as they were, or train anew on these in another folder"
            )
        self.stream.load_state(TensorDict())
        return state

    def keep(self) -> Kept:
        """What was learnt from; where the stream stands is the number of the update."""
        return Kept({}, {"data": self._data()})

    def saved(self, kept: Sequence[Checkpoint]) -> None:
        """Nothing lies beside the checkpoints."""

    def take_ended(self) -> list[EndedEpisode]:
        """None are played to learn from."""
        return []

    def counters(self) -> dict[str, int]:
        """Tokens that were read."""
        return {"tokens": self.num_tokens}

    def extra(self, update: int) -> dict[str, float]:
        """What a row of means tells besides."""
        return {"learning_rate": self.networks.learning_rate(update)}

    def evaluate(self, state: TensorDict, stop: Callable[[], bool]) -> Evaluated | None:
        """Games, or held-out rows; None if `stop` said so meanwhile."""
        self.guard.check_state(state)
        update = int(state["step"])
        with self.clock.phase("evaluate"):
            self.seen.refresh(state)
            try:
                found = evaluate_networks(
                    self.seen,
                    self.lessons,
                    self.config,
                    state["hyper"],
                    seed=derive_seed(self.config.seed, "evaluate", update),
                    stop=stop,
                )
            except Interrupted:
                return None
        return evaluated(found)

    # -- data

    def _data(self) -> dict[str, object]:
        return {"rows": len(self.lessons.learnt), "digest": self.lessons.digest()}

    def _batches(self, update: int) -> Iterator[TensorDict]:
        config = self.config
        seed, per_token = derive_seed(config.seed, "batches"), config.model.per_token
        batches = self.lessons.learnt.batches(seed, update, config.batch_size, per_token=per_token)
        while True:
            with self.clock.phase("data"):
                batch = next(batches)
                self.num_tokens += int(batch["attn_mask"].sum())
                if config.num_micro_batches > 1:
                    batch = with_row_means(batch, config.loss.mask)
                batch = batch.to(config.device)
            yield batch


def plan_of(config: ILQLRun) -> Plan:
    """How long a run is, and what is done how often.

    >>> plan_of(ILQLRun(seed=3)).title
    'ILQL on wordle, seed 3'
    """
    return Plan(
        title=f"{config.title}, seed {config.seed}",
        num_updates=config.num_updates,
        evaluate_every=config.evaluate.every_updates,
        of_returns=config.task == "wordle",
        target_return=config.evaluate.target_return,
        save_every=config.checkpoint.every_updates,
        keep=config.checkpoint.keep,
        device=config.device,
        num_threads=config.num_threads,
    )


def evaluate_networks(
    networks: Networks,
    lessons: Lessons,
    config: ILQLRun,
    numbers: TensorDict,  # "hyper" of the learner's state
    *,
    seed: int,
    stop: Callable[[], bool] = lambda: False,
) -> ILQLEvaluation:
    """Games where the task has some, else held-out rows; `Interrupted` if `stop` says so."""
    if lessons.held_out is not None:
        means = held_out_means(networks, lessons.held_out, config, numbers, stop=stop)
        return ILQLEvaluation(held_out=means)
    wordle = make_wordle(config.wordle)
    played = play_wordle(networks, lessons.tokenizer, wordle, config, seed=seed, stop=stop)
    return ILQLEvaluation(games=played)
