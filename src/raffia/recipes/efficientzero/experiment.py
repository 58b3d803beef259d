"""A run of EfficientZero: its parts and their connections.

environments -> collector -> replay -> segments -> targets -> learner -> planner -> environments
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from raffia.algorithms.efficientzero.actor import act, act_at_random
from raffia.algorithms.efficientzero.learner import ModelFactory
from raffia.distributed.data_parallel import DataParallel
from raffia.distributed.engine import Engine, InlineEngine, Needs, Workers
from raffia.envs.env import BatchEnv, EnvSpec
from raffia.envs.make import make_env, require_batch
from raffia.evolution.population import BATCH_SIZE
from raffia.files import make_folder, write_atomically
from raffia.functional.seeds import derive_seed
from raffia.learner import Learner, step_of
from raffia.recipes.devices import compiled, require_device
from raffia.recipes.efficientzero.actors import (
    ActorRole,
    acting_weights,
    actor_config,
    describe_actors,
    fraction_done,
    make_networks,
    make_planner,
    one_env,
    row_seeds,
)
from raffia.recipes.efficientzero.config import EfficientZeroRun
from raffia.recipes.efficientzero.data import Replays
from raffia.recipes.efficientzero.evaluation import EpisodeFilms, Evaluator, MakeEnv, save_tree
from raffia.recipes.efficientzero.evaluators import EvaluateRole, episodes_of
from raffia.recipes.efficientzero.followers import MEMBERS, make_across, make_followers
from raffia.recipes.efficientzero.reanalyzers import (
    BatchMaking,
    ReanalyzeRole,
    ShardMaking,
    batch_of,
    batch_of_shards,
    describe_reanalyzers,
    reanalyze_weights,
)
from raffia.recipes.engines import describe_evaluators, make_engine, where
from raffia.recipes.members import Members, weights_of_each
from raffia.recipes.members_across import MembersAcross
from raffia.search.errors import UnfitOutputError
from raffia.tensordict.byte_tensors import tensor_to_bytes
from raffia.tensordict.tensordict import TensorDict
from raffia.train.ahead import BatchesAhead
from raffia.train.checkpoint import Checkpoint
from raffia.train.collect import Act, Collector
from raffia.train.evaluate import Episodes
from raffia.train.evaluations import Evaluations
from raffia.train.experiment import CheckpointPayload, Experiment, Plan
from raffia.train.outcome import Evaluated, Outcome
from raffia.train.shard_batches import BatchesOfShards
from raffia.train.stream import OnlineStream
from raffia.train.turns import ActorStream, Schedule, Turns
from raffia.train.view import View

MAKE_ENV = make_env
PICTURE = 48  # pixels: games of fewer are boards, and quick


class EfficientZeroExperiment(Experiment):
    """A run of EfficientZero: learner, stream, replay, planner and evaluator."""

    env: BatchEnv
    unusable_remark = ". Where the replay alone is missing, they can still be evaluated"

    def __init__(
        self,
        config: EfficientZeroRun,
        folder: Path,
        view: View,
        make_env: MakeEnv = make_env,
        networks: ModelFactory | None = None,
    ) -> None:
        super().__init__(folder, view, seed=config.seed)
        self.config = config
        self.plan = plan_of(config)
        self._update = 0
        self._num_simulations_elsewhere = 0
        self.evaluates_elsewhere = config.evaluators.play_elsewhere
        require_device(config.device)
        with contextlib.ExitStack() as opened:  # closed if the run can't be made
            self._is_default_env = make_env is MAKE_ENV
            # Where actors play, one is made for what it says of all, and never stepped.
            elsewhere = config.actors.play_elsewhere
            self.env = make_env(one_env(config.env) if elsewhere else config.env)
            require_batch(self.env)
            opened.callback(self.env.close)
            self.evaluator = Evaluator(config, make_env, record=config.evaluate.record != "none")
            opened.callback(self.evaluator.close)
            self.evaluator.prepare(self.env.spec)
            self._require_engine(networks)
            if self._engine is not None:
                opened.callback(self._engine.close)
            self._make_parts(networks)
            if config.learners.num > 1:
                self._share_batches()
                opened.callback(self.followers.close)
            if config.population.workers:
                opened.callback(self._divide_members().close)
            if isinstance(self.collector, Turns):
                opened.callback(self.collector.close)
                view.message(describe_actors(config))
            if config.evaluators.play_elsewhere:
                self._evaluations = self.make_evaluations()
                view.message(describe_evaluators(config.engine, config.evaluators))
            opened.callback(self.close_evaluations)
            self.steps = Replays(config, self.env.spec, folder)
            opened.callback(self.steps.close)
            self.replay, self.replays = self.steps.replay, self.steps.logged
            self.ahead: BatchesAhead | None = None
            if config.reanalyzers.play_elsewhere:
                self.ahead = self._make_ahead()
                opened.callback(self.ahead.close)
                view.message(describe_reanalyzers(config))
            self.stream = self._make_stream()
            if remark := wants_a_gpu(config, self.env.spec):
                view.message(remark)
            self._opened = opened.pop_all()

    def _make_parts(self, networks: ModelFactory | None) -> None:
        config = self.config
        self.networks = make_networks(config, self.env.spec, networks)
        self.learner: Learner = compiled(self.networks) if config.compile else self.networks
        # Act and are evaluated, with the newest weights; and make targets, with the target network.
        self.actor, self.reanalyze_planner = (
            make_planner(self.networks, config, self.env.spec) for _ in range(2)
        )
        self._reanalyze_is_current = False
        self.members: Members | None = None
        self.across: MembersAcross | None = None
        if config.population.size > 1:
            # Of small networks the operations alone are two thirds of a step on a CPU.
            traced: Literal["traced"] | None = "traced" if config.device == "cpu" else None
            self.members = Members(
                config.population,
                self.networks,
                config.seed,
                batches="own",
                grads=traced,
                batch_size=config.replay.batch_size,
            )
            self.learner = self.members.learner
        self.collector: Collector | Turns
        if config.actors.play_elsewhere:
            assert self._engine is not None
            self.collector = self._turns_of(self._engine)
        else:
            self.collector = Collector(
                self.env,
                seed=config.seed,
                frame_stack=config.env.frame_stack,
                check=self._check_step,
            )

    def _share_batches(self) -> None:
        """Have other processes take their parts of each batch."""
        self.followers = make_followers(self.config)
        self.learner = DataParallel(self.learner, self.followers)
        self.view.message(f"{self.config.learners.num} processes share each batch")

    def _divide_members(self) -> MembersAcross:
        """Have the members learn in workers."""
        assert self._engine is not None and self.members is not None
        size, workers = self.config.population.size, self.config.population.workers
        population = self.members.learner
        self.learner = self.across = make_across(self.config, population, self._engine)
        self.view.message(f"{workers} workers {where(self.config.engine)} share {size} members")
        return self.across

    def _require_engine(self, networks: ModelFactory | None) -> None:
        """Make the engine of the run's workers, if it has any."""
        config = self.config
        kinds = ("actors", "reanalyzers", "evaluators")
        used = [name for name in kinds if getattr(config, name).play_elsewhere]
        if config.population.workers:
            used.append("population")
        others = [*used, *(["learners"] if config.learners.num > 1 else [])]
        if others and (networks is not None or not self._is_default_env):
            raise ValueError(
                f"{others[0]}.* with a make_env or networks of your own: {others[0]} are made from "
                "the config alone. Register the environment with Gymnasium and name it in env.id, "
                f"or leave {others[0]}.* as they are"
            )
        self._engine = make_engine(config.engine, self.view.message) if used else None
        if self._engine is not None:
            try:
                self._engine.require([self._workers(name) for name in used])
            except BaseException:
                self._engine.close()
                raise

    def _workers(self, kind: str) -> Workers:
        """The workers of one kind."""
        if kind == "population":
            cpus = float(self.config.num_threads)
            return Workers(MEMBERS, self.config.population.workers, Needs(cpus=cpus))
        roles: dict[str, type] = {
            "actors": ActorRole,
            "reanalyzers": ReanalyzeRole,
            "evaluators": EvaluateRole,
        }
        role, found = roles[kind], getattr(self.config, kind)
        needs = Needs(cpus=found.cpus, gpus=getattr(found, "gpus", 0.0))
        return Workers(f"{role.__module__}:{role.__name__}", max(1, found.num), needs)

    def _make_ahead(self) -> BatchesAhead:
        """Have batches made by workers."""
        config, workers = self.config, self.config.reanalyzers
        assert self._engine is not None
        role, num, needs = self._workers("reanalyzers")
        at = self._engine, role, actor_config(config), num
        settings: dict[str, Any] = {
            "ahead": workers.ahead,
            "num_updates": config.num_updates,
            "needs": needs,
            "max_restarts": config.engine.max_restarts,
            "patience": config.engine.patience_seconds,
        }
        self._making: BatchMaking
        if config.shards_elsewhere:
            self._making = making = ShardMaking(config, self.steps, self.guard)
            return BatchesOfShards(*at, making, **settings)
        self._making = BatchMaking(config, self.steps, self.guard)
        return BatchesAhead(*at, self._making, **settings)

    def make_evaluations(self) -> Evaluations:
        """Have evaluations played by workers; in this process, to join those of an earlier run."""
        config, evaluators = self.config, self.config.evaluators
        engine = self._engine if evaluators.play_elsewhere else None
        role, num, needs = self._workers("evaluators")
        return Evaluations(
            InlineEngine() if engine is None else engine,
            role,
            actor_config(config),
            num,
            join_after=evaluators.join_after,
            acting=acting_weights,
            outcome=self._evaluated_elsewhere,
            needs=needs,
            max_restarts=config.engine.max_restarts,
        )

    def _turns_of(self, engine: Engine) -> Turns:
        config, collect = self.config, self.config.collect
        role, num, needs = self._workers("actors")
        return Turns(
            engine,
            role,
            actor_config(config),
            num,
            Schedule(
                turn_size=config.env.num_envs * collect.rollout_length,
                random_env_steps=collect.random_env_steps,
                num_env_steps=collect.num_env_steps,
                updates_per_env_step=collect.updates_per_env_step,
                ahead=config.actors.ahead,
                weights_every=config.actors.weights_every,
            ),
            self.env.spec,
            config.env.num_envs,
            seed=config.seed,
            acting=lambda state: acting_weights(self.whole(state)),
            check=self._check_step,
            needs=needs,
            max_restarts=config.engine.max_restarts,
            patience=config.engine.patience_seconds,
        )

    def _check_step(self, step: TensorDict) -> None:
        found = self.collector
        self.guard.check(step, update=found.update if isinstance(found, Turns) else self._update)

    def _make_stream(self) -> OnlineStream:
        collect, replay = self.config.collect, self.config.replay
        stream = ActorStream if self.config.actors.play_elsewhere else OnlineStream
        return stream(
            self.collector,
            self.replay,
            begin_rollout=self._begin_rollout,
            act_first=self._act_first,
            make_batch=self._make_batch,
            ahead=self.ahead,
            batch_size=self.config.population.longest_batch(replay.batch_size),
            updates_per_env_step=collect.updates_per_env_step,
            random_env_steps=collect.random_env_steps,
            num_env_steps=collect.num_env_steps,
            rollout_length=collect.rollout_length,
            clock=self.clock,
            beta=self._beta if replay.alpha else None,
        )

    def close(self) -> None:
        """Close environments and files."""
        self._opened.close()

    def init(self) -> TensorDict:
        """The state with new networks from the run's seed; for a population with its spread of
        settings."""
        state = super().init()
        return state if self.members is None else self.members.begin(state)

    def restore(self, found: Checkpoint) -> TensorDict:
        """Restore environments, replay and population; returns the learner's state."""
        state = super().restore(found)
        if self.members is not None:
            self.members.restore(found)
        return state

    def payload(self) -> CheckpointPayload:
        """The payload of a checkpoint: environments, rows of the replay, and the population's
        history."""
        payload = super().payload()
        if self.members is None:
            return payload
        return replace(payload, extras={**payload.extras, **self.members.payload()})

    def evolve(self, state: TensorDict) -> tuple[TensorDict, dict[str, Any]] | None:
        """The next generation of a population."""
        if self.members is None:
            return None
        self._reanalyze_is_current = False
        return self.members.evolve(self.whole(state))

    def whole(self, state: TensorDict) -> TensorDict:
        """The state with what workers have of it."""
        return state if self.across is None else self.across.whole(state)

    def counters(self) -> dict[str, int]:
        """The count of simulations, of acting and of reanalyze."""
        found = self.actor.num_simulations + self.reanalyze_planner.num_simulations
        if isinstance(self.collector, Turns):
            found += self.collector.num_simulations
        if self.ahead is not None:
            found += self._making.num_simulations
        return {"simulations": found + self._num_simulations_elsewhere}

    def extra_metrics(self, update: int) -> dict[str, float]:
        """Temperature, size of the replay, and the learning rate."""
        found = {
            "temperature": self.config.search.temperature(self._fraction_done),
            "replay_steps": float(len(self.replay)),
        }
        if self.members is None:  # else each has its own, in rows of generations
            found["learning_rate"] = self.networks.learning_rate(update)
        if isinstance(self.collector, Turns):
            found |= self.collector.metrics()
        if self.ahead is not None:
            found |= self.ahead.metrics()
        if self.evaluations is not None:
            found |= self.evaluations.metrics()
        if self.across is not None:
            found |= self.across.metrics()
        return found

    # -- playing and learning

    def _begin_rollout(self, state: TensorDict) -> Act:
        self._update, state = step_of(state), self.whole(state)
        self.actor.refresh(state)
        temperature = self.config.search.temperature(self._fraction_done)

        def choose(states: TensorDict) -> TensorDict:
            seed = self._row_seeds("act")
            with self._guarded(state, states):
                return act(self.actor, states, temperature=temperature, noise=True, seed=seed)

        return choose

    def _act_first(self, states: TensorDict) -> TensorDict:
        return act_at_random(
            self.env.spec,
            states,
            num_sampled_actions=self.config.search.num_sampled_actions,
            seed=self._row_seeds("act first"),
        )

    def _make_batch(self, state: TensorDict, segments: TensorDict) -> TensorDict:
        """Make a batch. segments: [B]; of members [P, B], as the batch is then."""
        update = step_of(state)
        if update % self.config.targets.target_interval == 0 or not self._reanalyze_is_current:
            self._refresh_reanalyze(state)
        shape, flat, total = segments.batch_size, segments, self.steps.buffers[0].storage.total
        if self.members is not None:
            flat = segments.reshape(-1)
            flat["member"] = torch.arange(len(segments)).repeat_interleave(shape[1])
            total = flat["total"]
        with self._guarded(state, segments):
            if (num_shards := self.config.replay.shards) > 1:
                parts = flat.split(len(flat) // num_shards)
                batch, fresh = batch_of_shards(
                    self.config, self.reanalyze_planner, parts, update, range(num_shards)
                )
            else:
                batch, fresh = batch_of(self.config, self.reanalyze_planner, flat, update, total)
        if fresh is not None:
            self.steps.update(fresh, 0 if self.members is None else self.members.best)
        batch = batch.reshape(shape)
        if BATCH_SIZE in state["hyper"].keys():
            batch["weight"] = weights_of_each(batch["weight"], state["hyper", BATCH_SIZE])
        return batch.to(self.config.device)

    def _refresh_reanalyze(self, state: TensorDict) -> None:
        self.reanalyze_planner.refresh(reanalyze_weights(self.whole(state)))
        self._reanalyze_is_current = True

    @contextlib.contextmanager
    def _guarded(self, state: TensorDict, inputs: TensorDict) -> Iterator[None]:
        """The context of a search, in which NaN stops the run as in a loss."""
        try:
            yield
        except UnfitOutputError as error:
            self.guard.searched(state, inputs, str(error))

    def _row_seeds(self, purpose: str) -> Tensor:  # int64 [E]
        num = self.env.num_envs
        return row_seeds(self.seed, purpose, range(num), self.stream.num_env_steps // num)

    @property
    def _fraction_done(self) -> float:
        """The fraction of training that is done, in steps of the environments."""
        return fraction_done(self.config, self.stream.num_env_steps)

    def _beta(self, update: int) -> float:
        first = self.config.replay.beta
        return min(1.0, first + (1 - first) * update / max(1, self.config.num_updates))

    # -- evaluating

    def evaluate(self, state: TensorDict, stop: Callable[[], bool]) -> Outcome | None:
        """Play whole episodes; None if `stop` asked to stop meanwhile."""
        state = self.whole(state)
        with self.clock.phase("evaluate"), self._guarded(state, self.collector.now):
            if self.members is None:
                found: Outcome | None = self._play(state, stop)
            else:
                found = self._play_all(self.members, state, stop)
            if found is not None:
                self._keep_tree(self.stream.num_env_steps)
            return found

    def _play(self, state: TensorDict, stop: Callable[[], bool]) -> Episodes | None:
        """Play episodes of the one agent."""
        self.actor.refresh(state)
        return self.evaluator.play(self.actor, **self._how_to_play(state, stop))

    def evaluation_begun(self, state: TensorDict) -> None:
        """Save a tree of the weights that are evaluated."""
        self.actor.refresh(state)
        with self._guarded(state, self.collector.now):
            self._keep_tree(self.stream.num_env_steps)

    def _evaluated_elsewhere(self, update: int, env_step: int, answer: TensorDict) -> Episodes:
        """What an evaluator answered; its film is written here."""
        if "not_finite" in answer.keys():
            self.guard.check(answer["not_finite"], update=update)
        self._num_simulations_elsewhere += int(answer["num_simulations"])
        if "warning" in answer.keys():
            self.view.message(tensor_to_bytes(answer["warning"]).decode())
        if "film" in answer.keys():
            folder, kind = self.folder / "episodes", self.config.evaluate.record
            try:
                make_folder(folder)
                data = tensor_to_bytes(answer["film"])
                write_atomically(str(folder / f"{env_step:09d}.{kind}"), data)
            except OSError as error:
                self.view.message(f"an episode was not recorded: {error}")
        return episodes_of(answer)

    def _play_all(
        self, members: Members, state: TensorDict, stop: Callable[[], bool]
    ) -> Evaluated | None:
        """Play episodes of all members; the best one's are reported; the best one before is
        recorded."""
        self.actor.refresh(state)
        found = self.evaluator.play_members(
            self.actor,
            members.finite(state),
            recorded=members.best,
            **self._how_to_play(state, stop),
        )
        if found is None:
            return None
        size = len(state)
        fitness = [found[index].score if index in found else math.nan for index in range(size)]
        values = members.evaluated(fitness)
        best = found[members.best]  # the guard lets no population go on of which none is finite
        return Evaluated(best.score, {**best.values, **values})

    def _how_to_play(self, state: TensorDict, stop: Callable[[], bool]) -> dict[str, Any]:
        env_step = self.stream.num_env_steps
        recording, kind = None, self.config.evaluate.record
        if kind != "none":
            recording = EpisodeFilms(
                self.folder / "episodes",
                lambda _: f"{env_step:09d}",
                num=1,
                suffix=kind,
                warn=self.view.message,
            )
        return {
            "seed": derive_seed(self.config.seed, "evaluate", env_step),
            "recording": recording,
            "stop": stop,
            "check": lambda outputs: self.guard.check(outputs, update=step_of(state)),
        }

    def _keep_tree(self, env_step: int) -> None:
        state = self.collector.now[:1]
        if not len(state):  # resumed among actors from what one process saved, and none has played
            return
        if self.members is not None:
            state = state.copy().set("member", torch.tensor([self.members.best]))
        try:
            save_tree(self.folder / "trees", f"{env_step:09d}", self.actor, state)
        except OSError as error:  # a full disk, which the next save reports
            self.view.message(f"the searched tree of step {env_step:,} was not saved: {error}")


def plan_of(config: EfficientZeroRun) -> Plan:
    """The plan of a run: its length and intervals.

    >>> plan_of(EfficientZeroRun(seed=3)).title
    'EfficientZero on CartPole-v1, seed 3'
    """
    return Plan(
        title=f"{config.title}, seed {config.seed}",
        num_updates=config.num_updates,
        num_env_steps=config.collect.num_env_steps,
        evaluate_every=config.evaluate.every_env_steps,
        num_simulations=config.evaluate.num_simulations or config.search.num_simulations,
        target_return=config.evaluate.target_return,
        save_every=config.checkpoint.every_updates,
        keep=config.checkpoint.keep,
        device=config.device,
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
        f"pictures of {height}x{width} on a CPU: an update can take a minute, and this run has "
        f"{config.num_updates:,} of them. With a GPU: --device cuda"
    )
