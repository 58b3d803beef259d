"""The parts of a run of ILQL: data -> batches -> learner -> networks -> games or held-out rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from raffia.algorithms.ilql.learner import ILQLLearner
from raffia.algorithms.ilql.loss import with_row_means
from raffia.distributed.group import device_of
from raffia.evolution.population import member_seeds
from raffia.functional.seeds import derive_seed
from raffia.learner import Accumulate, Learner, step_of
from raffia.recipes.devices import accelerated
from raffia.recipes.ilql.config import ILQLRun
from raffia.recipes.ilql.data import describe_corpus, describe_template, make_corpus
from raffia.recipes.ilql.dialogues import Record, write_dialogues
from raffia.recipes.ilql.evaluation import (
    Evaluator,
    ILQLEvaluation,
    MakeLanguageEnv,
    evaluated,
    find_environment,
    fitness_of,
    with_env,
    with_estimate,
)
from raffia.recipes.ilql.evaluators import (
    evaluate_agent,
    evaluator_weights,
    outcome_of,
    process_config,
)
from raffia.recipes.ilql.networks import (
    Interrupted,
    Making,
    Networks,
    begin_making,
    keeps_model,
    making_of,
    refuse_unfit,
    with_sizes,
    with_threads,
)
from raffia.recipes.members import Members, MembersRole
from raffia.recipes.run_experiment import RunExperiment
from raffia.recipes.run_folder import LANGUAGE_MODEL, visible_here
from raffia.recipes.running import threads
from raffia.recipes.workers import RunWorkers, describe_workers
from raffia.tensordict.stack import stack
from raffia.tensordict.tensordict import TensorDict
from raffia.train.checkpoint import Checkpoint
from raffia.train.config import from_json
from raffia.train.evaluations import Evaluated
from raffia.train.experiment import RunError
from raffia.train.run_state import Recorded
from raffia.train.view import View

ROLES = {
    "evaluators": "raffia.recipes.ilql.evaluators:EvaluateRole",
    "population": "raffia.recipes.ilql.experiment:make_members",
}
MAKE_LEARNER = "raffia.recipes.ilql.experiment:make_learner"  # of another process


def settled(
    config: ILQLRun,
    like: ILQLRun | None = None,
    *,
    tell: Callable[[str], None] = lambda line: None,
    make_env: str | MakeLanguageEnv | None = None,
) -> ILQLRun:
    """The config with what it leaves open, as `Algorithm.settled`: sizes, threads, environment.

    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> settled(ILQL_PRESETS["wordle"]).num_threads
    1
    """
    return with_threads(with_sizes(with_env(config, make_env), tell, like))


class ILQLExperiment(RunExperiment):
    """A run of ILQL: what it is made of, and how that is joined."""

    config: ILQLRun
    shaped_by = "model.*, the task's tokens, population.size and optimizer.*"

    def __init__(
        self,
        config: ILQLRun,
        folder: Path,
        view: View,
        *,
        make_env: str | MakeLanguageEnv | None = None,
    ) -> None:
        every = config.evaluate.every_updates
        super().__init__(config, folder, view, evaluate_every=every, of_returns=config.plays)
        self._going: Iterator[TensorDict] | None = None
        self.num_tokens = 0  # read in this session
        with self._opening() as opened:
            can_evaluate, made_from = self._made_from(make_env)
            workers = RunWorkers(config, ROLES, made_from, view.message)
            opened.enter_context(closing(workers))
            self.corpus = make_corpus(config, folder, view.message)
            refuse_unfit(config, self.corpus.tokenizer)
            environment = find_environment(config, make_env, self.corpus.tokenizer)
            self.making = begin_making(config, folder).on(config.device)
            self.networks = make_networks(self.making)
            learner = accelerated_by(config, self.networks)
            self.learner = self._make_members(learner, batch_size=config.batch_size)
            self._divide_learner(opened, workers, MAKE_LEARNER, self._batches_again)
            self.evaluator = Evaluator(
                Networks(config, config.device, making=self.making),
                *(self.corpus, config, environment),
            )
            self.parts = {
                **self.parts,
                "data": Recorded(self._data()),
                "language_model": Recorded(self.making.checksum),
            }
            if can_evaluate:
                self.evaluations = workers.evaluations(
                    acting=self._evaluated_weights, outcome=self._evaluated_elsewhere
                )
                opened.enter_context(closing(self.evaluations))
                self.parts = {**self.parts, "evaluations": self.evaluations}
            learnt = f"learning from {describe_corpus(self.corpus)}"
            notice = describe_template(config, self.corpus.tokenizer)
            for line in [learnt, notice, *describe_workers(config)]:
                if line:
                    view.message(line)

    def init(self) -> TensorDict:
        """New networks by the run's seed, or those of the language model's folder."""
        first = self.networks.state_of(self.making.first(), self.making.seed)
        return first if self.members is None else self.members.begin(self._states(first))

    def example_state(self) -> TensorDict:
        """An example of the state, of arbitrary weights: the language model's folder may no longer
        exist.
        """
        state = self.learner.init(0)
        return state if self.members is None else self.members.begin(state)

    def _states(self, first: TensorDict) -> TensorDict:  # [P]
        """The members' states before the first update; those of a language model begin equal."""
        size = self.config.population.size
        if self.config.language_model:
            return stack([first] * size)
        others = member_seeds(self.making.seed, size)[1:]
        return stack([first, *(self.networks.init(seed) for seed in others)])

    def refuse_other(self, found: Checkpoint, state: TensorDict) -> None:
        """Raise RunError where rows or the language model are not those that it learnt from."""
        if found.extras["data"] != self._data():
            raise RunError(
                f"{found.root} was trained on other rows than the present ones: restore the files "
                "as they were, or train a new run on these in another folder"
            )
        if found.extras.get("language_model", "") != self.making.checksum:
            raise RunError(
                f"{found.root} holds changes to another language model than the one in "
                f"{self.folder / LANGUAGE_MODEL}: restore that folder as it was"
            )
        super().refuse_other(found, state)

    def step(self, state: TensorDict) -> tuple[TensorDict, TensorDict]:
        """Learn from the next batch of rows."""
        return self.learn(state, self.next_batch(state))

    def next_batch(self, state: TensorDict) -> TensorDict:
        """The batch of this update: its number is all that a resume needs to find it."""
        if self._going is None:
            self._going = self._batches(step_of(state))
        return next(self._going)

    def counters(self) -> dict[str, int]:
        """Tokens that were read."""
        return {"tokens": self.num_tokens}

    def extra_metrics(self, update: int) -> dict[str, float]:
        """The learning rate; of a population each member has its own, in rows of generations."""
        alone = self.members is None
        found = {"learning_rate": self.networks.learning_rate(update)} if alone else {}
        return found | self.worker_metrics()

    def evaluate(self, state: TensorDict, stop: Callable[[], bool]) -> Evaluated | None:
        """Games, or held-out rows; None if `stop` became true meanwhile."""
        state = self.whole(state)
        self.guard.check_state(state)
        update = step_of(state)
        with self.clock.phase("evaluate"):
            try:
                if self.members is None:
                    found = self._evaluate_one(state, update, stop)
                    outcome, dialogues = evaluated(found), found.dialogues
                else:
                    outcome, dialogues = self._evaluate_members(self.members, state, update, stop)
            except Interrupted:
                return None
            self._write_dialogues(update, dialogues)
        return outcome

    def _write_dialogues(self, update: int, dialogues: Record) -> None:
        try:
            write_dialogues(self.folder, update, dialogues)
        except OSError as error:  # nothing of the run depends on them
            self.view.message(f"update {update:,}: no dialogues were written: {error}")

    def _made_from(self, make_env: str | MakeLanguageEnv | None) -> tuple[bool, str]:
        """What other processes are made from, and whether they can evaluate: not in an environment
        that they can't import, in which an earlier session had no evaluators either.
        """
        try:
            return True, process_config(self.config, self.folder, make_env)
        except ValueError:
            if self.config.evaluators.play_elsewhere:
                raise
            return False, process_config(self.config, self.folder)

    def _evaluated_weights(self, state: TensorDict) -> TensorDict:
        state = self.whole(state)
        self.guard.check_state(state)
        return evaluator_weights(state)

    def _evaluated_elsewhere(self, update: int, count: int, answer: TensorDict) -> Evaluated:
        """Decode an evaluator's answer, and write its dialogues here."""
        outcome, dialogues = outcome_of(answer)
        self._write_dialogues(update, dialogues)
        return outcome

    def _evaluate_one(
        self, state: TensorDict, update: int, stop: Callable[[], bool]
    ) -> ILQLEvaluation:
        """Evaluate one agent; returns the result and dialogues to look at."""
        seed = derive_seed(self.config.seed, "evaluate", update)
        return evaluate_agent(replace(self.evaluator, stop=stop), state, seed)

    def _evaluate_members(
        self, members: Members, state: TensorDict, update: int, stop: Callable[[], bool]
    ) -> tuple[Evaluated, Record]:
        """Evaluate all members: the result of the best one, and the fitness of each."""
        found = {
            index: self._evaluate_one(state[index], update, stop) for index in members.finite(state)
        }
        # All by one policy, so that none can choose what it is held against.
        knowing = max(
            (one.replies for one in found.values() if one.replies is not None),
            key=lambda replies: replies.fit,
            default=None,
        )
        if knowing is not None:
            found = {index: with_estimate(one, knowing) for index, one in found.items()}
        outcome = members.outcome(
            {index: evaluated(one) for index, one in found.items()},
            {index: fitness_of(one) for index, one in found.items()},
        )
        return outcome, found[members.best].dialogues

    # -- data

    def _data(self) -> dict[str, object]:
        return {"rows": len(self.corpus.learnt), "digest": self.corpus.digest()}

    def _batches(self, update: int) -> Iterator[TensorDict]:
        batches = self._batches_again(update)
        while True:
            with self.clock.phase("data"):
                batch = next(batches)
                self.num_tokens += int(batch["attn_mask"].sum())
                batch = batch.to(self.config.device)
            yield batch

    def _batches_again(self, update: int) -> Iterator[TensorDict]:
        """The batches from an update on, on the CPU; nothing is counted."""
        config = self.config
        seed, per_token = derive_seed(config.seed, "batches"), config.model.per_token
        size = config.population.longest_batch(config.batch_size)
        for batch in self.corpus.learnt.batches(seed, update, size, per_token=per_token):
            if config.num_micro_batches * config.learners.num > 1:
                batch = with_row_means(batch, config.loss.mask)
            yield batch


def make_networks(making: Making) -> ILQLLearner:
    """The learner of a run, which makes its networks.

    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> int(make_networks(Making(ILQL_PRESETS["ilql-smoke"])).init(0)["step"])
    0
    """
    config = making.config
    return ILQLLearner(
        config,
        num_updates=config.num_updates,
        model_factory=making.fresh,
        fixed=making.fixed,
    )


def accelerated_by(config: ILQLRun, learner: Learner) -> Learner:
    """The learner with its gradients compiled, and summed over parts of a batch, as the run's
    config says.
    """
    learner = accelerated(learner, compile=config.compile)
    num = config.num_micro_batches
    return Accumulate(learner, num) if num > 1 else learner


def make_learner(config: str, index: int) -> Learner:
    """The learner of a process that shares batches.

    config: JSON of the run, and of the folder where what its language model keeps is read.

    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> settings = process_config(ILQL_PRESETS["ilql-smoke"], Path("nowhere"))
    >>> int(make_learner(settings, 0).init(0)["step"])
    0
    """
    settings = json.loads(config)
    run = from_json(ILQLRun, settings["run"])
    folder = visible_here(settings["folder"]) if keeps_model(run) else settings["folder"]
    making = making_of(run, folder).on(str(device_of(run.device, index + 1)))
    return accelerated_by(run, make_networks(making))


def make_members(config: str, index: int) -> MembersRole:
    """The role of a worker that some members of a population learn in.

    config: as of `make_learner`.

    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> from raffia.recipes.population_config import PopulationConfig
    >>> from dataclasses import replace
    >>> run = replace(ILQL_PRESETS["ilql-smoke"], population=PopulationConfig(size=4, workers=2))
    >>> make_members(process_config(run, Path("nowhere")), 0).learner.size
    2
    """
    run = from_json(ILQLRun, json.loads(config)["run"])
    return MembersRole(
        make_learner(config, index),
        run.population.size // run.population.workers,
        context=partial(threads, run.num_threads),
        device=device_of(run.device, index + 1),
    )
