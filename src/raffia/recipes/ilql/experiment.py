"""The parts of a run of ILQL: data -> batches -> learner -> networks -> games or held-out rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from raffia.algorithms.ilql.loss import with_row_means
from raffia.distributed.data_parallel import DataParallel
from raffia.distributed.engine import Engine, InlineEngine
from raffia.distributed.follow import Followers
from raffia.distributed.sharded import Sharded
from raffia.evolution.population import member_seeds
from raffia.functional.seeds import derive_seed
from raffia.learner import Accumulate, Learner, step_of
from raffia.recipes.devices import compiled, require_device
from raffia.recipes.engines import (
    describe_evaluators,
    describe_members,
    make_engine,
    make_pool,
    require_devices,
    workers_of,
)
from raffia.recipes.ilql.config import ILQLRun
from raffia.recipes.ilql.data import (
    describe_corpus,
    describe_template,
    make_corpus,
)
from raffia.recipes.ilql.dialogues import Record, write_dialogues
from raffia.recipes.ilql.environments import MakeLanguageEnv, find_environment
from raffia.recipes.ilql.evaluation import (
    ILQLEvaluation,
    evaluated,
    fitness_of,
    with_estimate,
)
from raffia.recipes.ilql.evaluators import (
    EvaluateRole,
    evaluate_agent,
    evaluator_config,
    evaluator_weights,
    outcome_of,
)
from raffia.recipes.ilql.followers import make_across, make_followers, make_networks
from raffia.recipes.ilql.language_model import begin_making
from raffia.recipes.ilql.networks import Interrupted, Networks
from raffia.recipes.ilql.sizes import refuse_unfit
from raffia.recipes.members import POPULATION_KEY, Members
from raffia.recipes.members_across import MembersAcross
from raffia.recipes.run_folder import LANGUAGE_MODEL
from raffia.tensordict.stack import stack
from raffia.tensordict.tensordict import TensorDict
from raffia.train.checkpoint import Checkpoint
from raffia.train.evaluations import Evaluations
from raffia.train.experiment import Experiment, Plan, RunError
from raffia.train.outcome import Evaluated
from raffia.train.run_state import Recorded, Stateful
from raffia.train.view import View


class ILQLExperiment(Experiment):
    """A run of ILQL: what it is made of, and how that is joined."""

    shaped_by = "model.*, the task's tokens, population.size and optimizer.*"

    def __init__(
        self,
        config: ILQLRun,
        folder: Path,
        view: View,
        *,
        make_env: str | MakeLanguageEnv | None = None,
    ) -> None:
        super().__init__(folder, view, seed=config.seed)
        self.config = config
        self.plan = plan_of(config)
        require_device(config.device)
        require_devices(config.engine, {"evaluators": config.evaluators})
        self.corpus = make_corpus(config, folder)
        refuse_unfit(config, self.corpus.tokenizer)
        self.make_env = find_environment(config, make_env, self.corpus.tokenizer)
        self.making = begin_making(config, folder).on(config.device)
        self.networks = make_networks(self.making)
        self.learner: Learner = compiled(self.networks) if config.compile else self.networks
        if config.num_micro_batches > 1:
            self.learner = Accumulate(self.learner, config.num_micro_batches)
        self.members: Members | None = None
        if config.population.size > 1:
            self.members = Members(
                config.population, self.learner, config.seed, batch_size=config.batch_size
            )
            self.learner = self.members.learner
        self.eval_networks = Networks(config, config.device, making=self.making)
        self._going: Iterator[TensorDict] | None = None
        self.num_tokens = 0  # read in this session
        view.message(f"learning from {describe_corpus(self.corpus)}")
        if template := describe_template(config):
            view.message(template)
        self.followers: Followers | None = None
        self.sharded: Sharded | None = None
        if config.learners.num > 1:
            self.followers = make_followers(config, folder)
            if config.learners.state == "sharded":
                self.learner = self.sharded = Sharded(self.learner, self.followers)
            else:
                self.learner = DataParallel(self.learner, self.followers)
            shared = "each batch and the state" if self.sharded else "each batch"
            view.message(f"{config.learners.num} processes share {shared}")
        self.engine: Engine | None = None
        if config.evaluators.play_elsewhere or config.population.workers:
            self.engine = make_engine(config.engine, view.message)
        self.evaluations = self._make_evaluations(make_env)
        if config.evaluators.play_elsewhere:
            view.message(describe_evaluators(config.engine, config.evaluators))
        self.across: MembersAcross | None = None
        if self.members is not None and config.population.workers:
            assert self.engine is not None
            population, batches = self.members.learner, self._batches_again
            self.across = make_across(config, folder, population, self.engine, batches)
            self.learner = self.across
            view.message(describe_members(config.engine, config.population))
        parts: dict[str, Stateful | None] = {
            "data": Recorded(self._data()),
            "language_model": Recorded(self.making.checksum),
            POPULATION_KEY: self.members,
            "evaluations": self.evaluations,
        }
        self.parts = {name: part for name, part in parts.items() if part is not None}

    def close(self) -> None:
        """End the processes that share batches or members."""
        super().close()
        if self.across is not None:
            self.across.close()
        if self.engine is not None:
            self.engine.close()
        if self.followers is not None:
            self.followers.close()

    def init(self) -> TensorDict:
        """New networks by the run's seed, or those of the language model's folder."""
        first = self.networks.state_of(self.making.first(), self.making.seed)
        return first if self.members is None else self.members.begin(self._states(first))

    def example_state(self) -> TensorDict:
        """Of any weights: the folder that a language model came from may be gone."""
        state = self.learner.init(0)
        return state if self.members is None else self.members.begin(state)

    def _states(self, first: TensorDict) -> TensorDict:  # [P]
        """Of the members before the first update; those of a language model begin equal."""
        size = self.config.population.size
        if self.config.language_model:
            return stack([first] * size)
        others = member_seeds(self.making.seed, size)[1:]
        return stack([first, *(self.networks.init(seed) for seed in others)])

    def refuse_other(self, found: Checkpoint, state: TensorDict) -> None:
        """Raise RunError where rows or the language model are not those that it learnt from."""
        if found.extras["data"] != self._data():
            raise RunError(
                f"{found.root} has learnt from other rows than those that are there now: bring "
                "back the files as they were, or train again on these in another folder"
            )
        if found.extras.get("language_model", "") != self.making.checksum:
            raise RunError(
                f"{found.root} has learnt changes of another language model than the one in "
                f"{self.folder / LANGUAGE_MODEL}: bring that folder back as it was"
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
        found = {}
        if self.members is None:
            found["learning_rate"] = self.networks.learning_rate(update)
        for elsewhere in (self.across, self.followers, self.evaluations):
            found |= {} if elsewhere is None else elsewhere.metrics()
        return found

    def evolve(self, state: TensorDict) -> tuple[TensorDict, dict[str, Any]] | None:
        """The next generation of a population."""
        return None if self.members is None else self.members.evolve(self.whole(state))

    def whole(self, state: TensorDict) -> TensorDict:
        """The state with what other processes have of it."""
        holder = self.across or self.sharded
        return state if holder is None else holder.whole(state)

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

    def _make_evaluations(self, make_env: str | MakeLanguageEnv | None) -> Evaluations | None:
        """Have evaluations played by workers; in this process, to join those of an earlier run.

        None where the environment can't be imported, so that an earlier run had none.
        """
        config, elsewhere = self.config, self.config.evaluators
        try:
            text = evaluator_config(config, self.folder, make_env)
        except ValueError:
            if elsewhere.play_elsewhere:
                raise
            return None
        role = f"{EvaluateRole.__module__}:{EvaluateRole.__name__}"
        engine = self.engine if elsewhere.play_elsewhere and self.engine else InlineEngine()
        return Evaluations(
            make_pool(engine, workers_of(role, elsewhere), text, config.engine),
            join_after=elsewhere.join_after,
            acting=self._evaluated_weights,
            outcome=self._evaluated_elsewhere,
            is_used=elsewhere.play_elsewhere,
        )

    def _evaluated_weights(self, state: TensorDict) -> TensorDict:
        state = self.whole(state)
        self.guard.check_state(state)
        return evaluator_weights(state)

    def _evaluated_elsewhere(self, update: int, count: int, answer: TensorDict) -> Evaluated:
        """What an evaluator answered; its dialogues are written here."""
        outcome, dialogues = outcome_of(answer)
        self._write_dialogues(update, dialogues)
        return outcome

    def _evaluate_one(
        self, state: TensorDict, update: int, stop: Callable[[], bool]
    ) -> ILQLEvaluation:
        """What one agent is worth, and dialogues to look at."""
        seed = derive_seed(self.config.seed, "evaluate", update)
        at = self.eval_networks, state, self.corpus, self.config
        return evaluate_agent(*at, seed=seed, stop=stop, make_env=self.make_env)

    def _evaluate_members(
        self, members: Members, state: TensorDict, update: int, stop: Callable[[], bool]
    ) -> tuple[Evaluated, Record]:
        """The same of all members: the best one's, and the fitness of each."""
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
        size = len(state)
        values = members.evaluated(
            [fitness_of(found[index]) if index in found else math.nan for index in range(size)]
        )
        best = evaluated(found[members.best])
        return Evaluated(best.score, {**best.values, **values}), found[members.best].dialogues

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


def plan_of(config: ILQLRun) -> Plan:
    """How long a run is, and what is done how often.

    >>> plan_of(ILQLRun(seed=3)).title
    'ILQL on wordle, seed 3'
    """
    return Plan(
        title=f"{config.title}, seed {config.seed}",
        num_updates=config.num_updates,
        evaluate_every=config.evaluate.every_updates,
        of_returns=config.plays,
        target_return=config.evaluate.target_return,
        save_every=config.checkpoint.every_updates,
        keep=config.checkpoint.keep,
        device=config.device,
    )
