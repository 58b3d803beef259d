"""A run of EfficientZero: its parts and their connections.

environments -> collector -> replay -> segments -> targets -> learner -> planner -> environments
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from raffia.algorithms.efficientzero.learner import ModelFactory
from raffia.envs.env import BatchEnv, EnvSpec
from raffia.envs.make import make_env, require_batch, require_env_factory
from raffia.files import make_folder, write_atomically
from raffia.functional.seeds import derive_seed
from raffia.learner import step_of
from raffia.recipes.efficientzero.actors import (
    Player,
    accelerated_by,
    acting_weights,
    fraction_done,
    make_networks,
    make_planner,
    reason_of,
)
from raffia.recipes.efficientzero.clipped import ClippedTargets
from raffia.recipes.efficientzero.config import EfficientZeroRun
from raffia.recipes.efficientzero.data import Replays, fill_replay
from raffia.recipes.efficientzero.evaluation import (
    EpisodeFilms,
    Evaluator,
    MakeEnv,
    cut_line,
    episodes_of,
    save_tree,
)
from raffia.recipes.efficientzero.reanalyzers import (
    BatchMaking,
    MembersMaking,
    ShardMaking,
    batch_of,
    batch_of_shards,
    reanalyze_weights,
)
from raffia.recipes.efficientzero.warm_start import warm_state
from raffia.recipes.efficientzero.workers import describe_workers, make_workers
from raffia.recipes.run_experiment import RunExperiment
from raffia.recipes.workers import RunWorkers
from raffia.search.base import UnfitOutputError
from raffia.tensordict.byte_tensors import tensor_to_bytes
from raffia.tensordict.stack import stack
from raffia.tensordict.tensordict import TensorDict
from raffia.train.ahead import BatchesAhead, BatchesOfShards
from raffia.train.collect import Collector
from raffia.train.evaluate import Episodes
from raffia.train.evaluations import Evaluations, Outcome
from raffia.train.nan_guard import all_finite
from raffia.train.rollouts import ActorRollouts, Schedule
from raffia.train.run_state import Stateful
from raffia.train.view import View

MAKE_ENV = make_env
MAKE_LEARNER = "raffia.recipes.efficientzero.workers:make_learner"  # of another process
PICTURE = 48  # pixels: games of fewer are boards, and quick


class EfficientZeroExperiment(RunExperiment):
    """A run of EfficientZero: learner, stream, replay, planner and evaluator."""

    config: EfficientZeroRun
    env: BatchEnv
    collector: Collector | ActorRollouts
    evaluations: Evaluations
    unusable_remark = ". If only the replay is missing, they can still be evaluated"

    def __init__(
        self,
        config: EfficientZeroRun,
        folder: Path,
        view: View,
        make_env: MakeEnv = make_env,
        networks: ModelFactory | None = None,
    ) -> None:
        require_env_factory(make_env)
        evaluate, plays = config.evaluate, not config.is_offline
        super().__init__(
            *(config, folder, view),
            num_env_steps=config.collect.num_env_steps if plays else None,
            evaluate_every=evaluate.every_env_steps if plays else evaluate.every_updates,
            num_simulations=evaluate.num_simulations or config.search.num_simulations,
        )
        self._update = 0
        self._cuts_are_told = False
        self._num_simulations_elsewhere = 0
        with self._opening() as opened:
            # Where actors play, one is made for what it says of all, and never stepped.
            elsewhere = config.actors.play_elsewhere
            self.env = make_env(config.env, num_envs=1) if elsewhere else make_env(config.env)
            require_batch(self.env)
            opened.enter_context(closing(self.env))
            self.evaluator = Evaluator(config, make_env, record=config.evaluate.record != "none")
            opened.enter_context(closing(self.evaluator)).prepare(self.env.spec)
            from_config = make_env is MAKE_ENV and networks is None
            workers = make_workers(config, view.message, from_config=from_config)
            opened.enter_context(closing(workers))

            self.networks = make_networks(config, self.env.spec, networks)
            # Act and are evaluated, with the newest weights; make targets, with the target network.
            self.actor, self.reanalyze_planner = (
                make_planner(self.networks, config, self.env.spec) for _ in range(2)
            )
            self._clipped = ClippedTargets(config, self.networks.make_model(0))
            self._reanalyze_is_current = False
            learner = self._make_members(
                self.networks,
                batches="own",
                # Of small networks the operations alone are two thirds of a step on a CPU.
                grads="traced" if config.device == "cpu" else None,
                batch_size=config.replay.batch_size,
            )
            self.learner = accelerated_by(config, learner)
            self._divide_learner(opened, workers, MAKE_LEARNER)

            self.schedule = schedule_of(config)
            self.steps = opened.enter_context(closing(Replays(config, self.env.spec, folder)))
            self.replay, self.replays = self.steps.replay, self.steps.by_name
            self.collector = self._make_collector(workers)
            if isinstance(self.collector, ActorRollouts):
                opened.enter_context(closing(self.collector))
            self._making = self._make_making()
            self.ahead: BatchesAhead | None = None
            if config.reanalyzers.play_elsewhere:
                self.ahead = opened.enter_context(closing(self._make_ahead(workers)))
            self.evaluations = workers.evaluations(
                acting=acting_weights, outcome=self._evaluated_elsewhere
            )
            opened.enter_context(closing(self.evaluations))

            stream: dict[str, Stateful] = {"collector": self.collector}
            if self.ahead is not None:
                stream["ahead"] = self.ahead
            self.parts = {**self.parts, "stream": stream, "evaluations": self.evaluations}
            for line in [*describe_workers(config), wants_a_gpu(config, self.env.spec)]:
                if line:
                    view.message(line)

    def _make_collector(self, workers: RunWorkers) -> Collector | ActorRollouts:
        """Make the collector that plays the environments whose steps are learnt from."""
        config, seed = self.config, self.config.seed
        if config.actors.play_elsewhere:
            return ActorRollouts(
                workers.pool("actors"),
                self.schedule,
                self.env.spec,
                config.env.num_envs,
                seed=seed,
                acting=lambda state: acting_weights(self.whole(state)),
                check=self._check_turn,
                refuse=lambda state, answer: self._refuse_search(state, answer["states"], answer),
            )
        rows = range(self.env.num_envs)
        self.player = Player(
            *(config, self.env, self.actor, rows), check=self._check_step, warn=self.view.message
        )
        return self.player.collector

    def _make_making(self) -> BatchMaking:
        if self.members is not None:
            return MembersMaking(self.config, self.steps, self.guard, self.members, self.whole)
        kind = ShardMaking if self.config.shards_elsewhere else BatchMaking
        return kind(self.config, self.steps, self.guard)

    def _make_ahead(self, workers: RunWorkers) -> BatchesAhead:
        """Start workers that make batches ahead."""
        config, pool = self.config, workers.pool("reanalyzers")
        length = {"ahead": config.reanalyzers.ahead, "num_updates": config.num_updates}
        if isinstance(self._making, ShardMaking):
            return BatchesOfShards(pool, self._making, **length)
        return BatchesAhead(pool, self._making, **length)

    def _check_step(self, step: TensorDict) -> None:
        self.guard.check(step, update=self._update)

    def _check_turn(self, steps: TensorDict) -> None:
        if not all_finite(steps):  # else no step needs to be looked at by itself
            for step in steps.unbind(0):
                self._check_step(step)

    def _refuse_search(self, state: TensorDict, inputs: TensorDict, answer: TensorDict) -> None:
        """Raise NonFiniteError if a worker's search met NaN or infinity."""
        if (why := reason_of(answer)) is not None:
            self.guard.searched(state, inputs, why)

    def init(self) -> TensorDict:
        """The state with new networks from the run's seed, or with the weights that the config
        names, the same for each member; for a population with its spread of settings."""
        path = self.config.init_from
        if not path:
            return self.example_state()
        state = warm_state(self.networks, path, derive_seed(self.seed, "networks"))
        self.view.message(f"starting with the weights in {path}")
        if self.members is None:
            return state
        return self.members.begin(stack([state] * self.config.population.size))

    def example_state(self) -> TensorDict:
        """The state with new networks: the weights that the config names may no longer exist."""
        state = super().init()
        return state if self.members is None else self.members.begin(state)

    def fill_replays(self) -> dict[str, Any]:
        """Add recorded episodes to the replay, if the run has any."""
        if not self.config.data.files:
            return {}
        found = fill_replay(self.steps, self.config, self.env.spec)
        self.view.message(f"the replay holds {found.describe()}")
        return {"recorded": found.row()}

    @property
    def num_env_steps(self) -> int | None:
        """The number of environment steps played; None for a run that learns from files alone."""
        return None if self.config.is_offline else super().num_env_steps

    def evolve(self, state: TensorDict) -> tuple[TensorDict, dict[str, Any]] | None:
        """The next generation of a population."""
        if self.members is None:
            return None
        self._reanalyze_is_current = False
        if isinstance(self._making, MembersMaking):
            self._making.networks_changed()
        return super().evolve(state)

    def counters(self) -> dict[str, int]:
        """The count of simulations, of acting and of reanalyze."""
        found = self.actor.num_simulations + self.reanalyze_planner.num_simulations
        if isinstance(self.collector, ActorRollouts):
            found += self.collector.num_simulations
        found += self._making.num_simulations + self._num_simulations_elsewhere
        return {"simulations": found}

    def extra_metrics(self, update: int) -> dict[str, float]:
        """Temperature, size of the replay, and the learning rate."""
        found = {"replay_steps": float(len(self.replay))}
        if not self.config.is_offline:
            done = fraction_done(self.config, self.collector.num_env_steps)
            found["temperature"] = self.config.search.temperature(done)
        if self.members is None:  # else each has its own, in rows of generations
            found["learning_rate"] = self.networks.learning_rate(update)
        if isinstance(self.collector, ActorRollouts):
            found |= self.collector.metrics()
        if self.ahead is not None:
            found |= self.ahead.metrics()
        return found | self.worker_metrics()

    # -- playing and learning

    def step(self, state: TensorDict) -> tuple[TensorDict, TensorDict]:
        """Play what is due, learn from a batch of what was stored, and store its priorities."""
        batch = self.next_batch(state)
        state, metrics = self.learn(state, batch)
        self.prioritize(batch, metrics)
        update = self._update + 1
        if update == 1 or update == self.plan.num_updates or update % self.plan.log_every == 0:
            fractions = self._clipped.fractions(batch)
            metrics = metrics.copy()
            for name, fraction in fractions.items():
                metrics[name] = torch.full(metrics.batch_size, fraction)
            for line in self._clipped.lines(batch, fractions):
                self.view.message(line)
        return state, metrics

    def next_batch(self, state: TensorDict) -> TensorDict:
        """The batch of this update, after the steps that are due before it."""
        self._update = update = step_of(state)
        if isinstance(self.collector, ActorRollouts):
            self.collector.prepare(state)
        with self.clock.phase("collect"):
            due = self.schedule.steps_due(update)
            while self.collector.num_env_steps < due or not len(self.replay):
                self.replay.extend(self._play_turn(state).exclude("continues"))
        with self.clock.phase("targets"):
            if self.ahead is not None:
                return self.ahead.next(state, self._draw)
            return self._make_batch(state, self._draw(update))

    def _play_turn(self, state: TensorDict) -> TensorDict:  # steps [T, E]
        if isinstance(self.collector, ActorRollouts):
            return self.collector.take(state)
        with self._guarded(state):
            return self.player.rollout(
                self.collector.num_env_steps, lambda: self.actor.refresh(self.whole(state))
            )

    def _draw(self, update: int) -> TensorDict:
        """The segments of an update's batch."""
        replay = self.config.replay
        if replay.alpha:
            annealed = (1 - replay.beta) * update / max(1, self.config.num_updates)
            self.replay.beta = min(1.0, replay.beta + annealed)
        return self.replay.sample(self.config.population.longest_batch(replay.batch_size))

    def prioritize(self, batch: TensorDict, metrics: TensorDict) -> None:
        """Store the priorities of the segments that a batch was made of."""
        if self.replay.beta is not None:
            self.replay.update_priority(batch["index"].cpu(), metrics["priority"].cpu())

    def _make_batch(self, state: TensorDict, segments: TensorDict) -> TensorDict:
        """Make a batch. segments: [B]; of members [P, B], as the batch is then."""
        update = step_of(state)
        if update % self.config.targets.target_interval == 0 or not self._reanalyze_is_current:
            self._refresh_reanalyze(state)
        flat = self._making.flat(segments)
        with self._guarded(state, segments):
            if (num_shards := self.config.replay.shards) > 1:
                parts = flat.split(len(flat) // num_shards)
                batch, fresh = batch_of_shards(
                    self.config, self.reanalyze_planner, parts, update, range(num_shards)
                )
            else:
                total = self.steps.buffers[0].storage.total
                total = total if self.members is None else flat["total"]
                batch, fresh = batch_of(self.config, self.reanalyze_planner, flat, update, total)
        return self._making.finished(state, batch, fresh)

    def _refresh_reanalyze(self, state: TensorDict) -> None:
        self.reanalyze_planner.refresh(reanalyze_weights(self.whole(state)))
        self._reanalyze_is_current = True

    @contextlib.contextmanager
    def _guarded(self, state: TensorDict, inputs: TensorDict | None = None) -> Iterator[None]:
        """The context of a search, in which NaN stops the run as in a loss.

        inputs: of the search; None: the states of the environments at that time.
        """
        try:
            yield
        except UnfitOutputError as error:
            inputs = self.collector.now if inputs is None else inputs
            self.guard.searched(self.whole(state), inputs, str(error))

    # -- evaluating

    def evaluate(self, state: TensorDict, stop: Callable[[], bool]) -> Outcome | None:
        """Play whole episodes; None if `stop` asked to stop meanwhile."""
        state = self.whole(state)
        with self.clock.phase("evaluate"), self._guarded(state):
            found = self._play(state, stop)
            if found is not None:
                self._keep_tree(self._count(state))
                self._tell_of_cuts(found)
            return found

    def _tell_of_cuts(self, found: Outcome) -> None:
        """Say once that episodes are broken off, of which no environment says so."""
        num, of = found.values.get("num_cut", 0), len(found.values["returns"])
        if num and not self._cuts_are_told:
            self._cuts_are_told = True
            self.view.message(cut_line(num, of, self.config.evaluate.max_steps))

    def _play(self, state: TensorDict, stop: Callable[[], bool]) -> Outcome | None:
        """Play episodes of the one agent; or of all members, of which the best one's are reported,
        and those of the best one before recorded.
        """
        members, count = self.members, self._count(state)
        self.actor.refresh(state)
        recording, kind = None, self.config.evaluate.record
        if kind != "none":
            recording = EpisodeFilms(
                self.folder / "episodes",
                lambda _: f"{count:09d}",
                num=1,
                suffix=kind,
                warn=self.view.message,
            )
        found = self.evaluator.play(
            self.actor,
            None if members is None else members.finite(state),
            seed=derive_seed(self.config.seed, "evaluate", count),
            recording=recording,
            recorded=0 if members is None else members.best,
            stop=stop,
            check=lambda outputs: self.guard.check(outputs, update=step_of(state)),
        )
        if found is None or members is None:
            return None if found is None else found[0]
        return members.outcome(found, {index: one.score for index, one in found.items()})

    def evaluation_begun(self, state: TensorDict) -> None:
        """Save a tree of the weights that are evaluated."""
        self.actor.refresh(state)
        with self._guarded(state):
            self._keep_tree(self._count(state))

    def _count(self, state: TensorDict) -> int:
        """The number of an evaluation: environment steps, or updates where none are played."""
        return step_of(state) if self.num_env_steps is None else self.num_env_steps

    def _evaluated_elsewhere(self, update: int, count: int, answer: TensorDict) -> Episodes:
        """Decode an evaluator's answer, and write its film here."""
        if "outputs" in answer.keys():
            self.guard.check(answer["outputs"], update=update)
        of_then = TensorDict(step=torch.tensor(update))
        self._refuse_search(of_then, self.collector.now, answer)
        self._num_simulations_elsewhere += int(answer["num_simulations"])
        if "warning" in answer.keys():
            self.view.message(tensor_to_bytes(answer["warning"]).decode())
        if "film" in answer.keys():
            folder, kind = self.folder / "episodes", self.config.evaluate.record
            try:
                make_folder(folder)
                data = tensor_to_bytes(answer["film"])
                write_atomically(str(folder / f"{count:09d}.{kind}"), data)
            except OSError as error:
                self.view.message(f"an episode was not recorded: {error}")
        found = episodes_of(answer)
        self._tell_of_cuts(found)
        return found

    def _keep_tree(self, count: int) -> None:
        state = self.collector.now[:1]
        if not len(state):  # resumed among actors from what one process saved, and none has played
            return
        if self.members is not None:
            state = state.copy().set("member", torch.tensor([self.members.best]))
        try:
            save_tree(self.folder / "trees", f"{count:09d}", self.actor, state)
        except OSError as error:  # a full disk, which the next save reports
            self.view.message(f"the searched tree of step {count:,} was not saved: {error}")


def schedule_of(config: EfficientZeroRun) -> Schedule:
    """The schedule of a run: when environment steps are played.

    >>> schedule_of(EfficientZeroRun()).rollout_size
    8
    """
    collect, plays = config.collect, not config.is_offline
    return Schedule(
        rollout_size=config.env.num_envs * collect.rollout_length,
        random_env_steps=collect.random_env_steps,
        num_env_steps=collect.num_env_steps if plays else 0,
        updates_per_env_step=collect.updates_per_env_step,
        ahead=config.actors.ahead,
        weights_every=config.actors.weights_every,
    )


def wants_a_gpu(config: EfficientZeroRun, spec: EnvSpec) -> str:
    """A warning for a run that would take days on a CPU; nothing for others.

    >>> from raffia.envs.env import Discrete
    >>> wants_a_gpu(EfficientZeroRun(), EnvSpec(observation_shape=(4,), action=Discrete(2)))
    ''
    """
    shape = spec.observation_shape
    pictures = len(shape) == 3 and min(shape[1:]) >= PICTURE and not config.model.flatten
    if config.device != "cpu" or not pictures:
        return ""
    height, width = shape[1:]
    return (
        f"images of {height}x{width} on a CPU: an update can take a minute, and this run has "
        f"{config.num_updates:,} updates. To use a GPU: --device cuda"
    )
