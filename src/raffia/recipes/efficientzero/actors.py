"""How a run's rows are played: in the loop, or by actors in other processes.

Legend: E environments, of which an actor plays some: rows first_row .. first_row + E - 1.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from raffia.algorithms.efficientzero.actor import act, act_at_random
from raffia.algorithms.efficientzero.latent_model import LatentModel
from raffia.algorithms.efficientzero.learner import EfficientZeroLearner, ModelFactory
from raffia.algorithms.efficientzero.planning import Planner
from raffia.algorithms.efficientzero.stacked import StackedPlanner
from raffia.envs.config import EnvConfig
from raffia.envs.env import BatchEnv, EnvSpec
from raffia.envs.make import make_env, require_batch
from raffia.functional.seeds import derive_seeds
from raffia.lazy import absolute
from raffia.learner import Learner
from raffia.recipes.algorithm import given_name
from raffia.recipes.devices import accelerated
from raffia.recipes.efficientzero.config import EfficientZeroRun
from raffia.recipes.running import threads
from raffia.search.base import UnfitOutputError
from raffia.tensordict.byte_tensors import bytes_to_tensor, tensor_to_bytes
from raffia.tensordict.tensordict import TensorDict
from raffia.train.collect import Collector
from raffia.train.config import ConfigError, from_json, to_json


def make_planner(
    networks: EfficientZeroLearner, config: EfficientZeroRun, spec: EnvSpec
) -> Planner:
    """A planner of one agent; or of all members, in one search."""
    size = config.population.size
    model = networks.make_model(0).to(config.device)
    settings: dict[str, Any] = {
        "frame_stack": config.env.frame_stack,
        "num_threads": config.num_threads,
        "cudagraphs": config.cudagraphs,
    }
    if size == 1:
        return Planner(model, spec, config, **settings)
    return StackedPlanner(model, spec, config, size=size, **settings)


def make_networks(
    config: EfficientZeroRun, spec: EnvSpec, factory: ModelFactory | None = None
) -> EfficientZeroLearner:
    """The learner of a run, which makes its networks.

    factory: of the networks; None: the config's.
    """
    if factory is None and config.networks:
        factory = given_name(config.networks, "a function that returns the model")
    if factory is not None:
        factory = partial(_made_by, factory, config.networks)
    return EfficientZeroLearner(
        spec,
        config,
        num_updates=config.num_updates,
        model_factory=factory,
        frame_stack=config.env.frame_stack,
    )


def _made_by(factory: ModelFactory, name: str) -> LatentModel:
    """The model of an own function; ConfigError if it makes none."""
    made: object = factory() if callable(factory) else factory
    if not isinstance(made, LatentModel) or made is factory:
        raise ConfigError(
            f"networks={name or factory!r} {'makes' if callable(factory) else 'is'} {made!r}; it "
            "must be a function without arguments that returns a LatentModel, as "
            "raffia.algorithms.efficientzero.make_model does"
        )
    return made


def accelerated_by(config: EfficientZeroRun, learner: Learner) -> Learner:
    """The learner with its gradients compiled, or recorded as a CUDA graph, as the run's config
    says."""
    reads = EfficientZeroLearner.read_by_grads
    return accelerated(learner, compile=config.compile, cudagraphs=config.cudagraphs, reads=reads)


def row_seeds(seed: int, purpose: str, rows: range, step: int) -> Tensor:  # int64 [E]
    """The seeds for the draws of each row at this step, the same whichever process plays the row.

    >>> row_seeds(0, "act", range(4), 7)[2:].equal(row_seeds(0, "act", range(2, 4), 7))
    True
    """
    return torch.tensor(derive_seeds(seed, purpose, rows, step))


def not_finite(error: UnfitOutputError) -> TensorDict:
    """The answer of a role whose search met NaN or infinity; `reason_of` reads it.

    >>> reason_of(not_finite(UnfitOutputError("a value is NaN")))
    'a value is NaN'
    """
    return TensorDict(not_finite=bytes_to_tensor(str(error).encode()))


def reason_of(answer: TensorDict) -> str | None:
    """The error of a search that a role's answer reports; None if it reports none."""
    text = answer.get("not_finite", None)
    return None if text is None else tensor_to_bytes(text).decode()


def fraction_done(config: EfficientZeroRun, num_env_steps: int) -> float:
    """The fraction of the run that is done, in environment steps.

    >>> fraction_done(EfficientZeroRun(), 25_000)
    0.25
    """
    return min(1.0, num_env_steps / max(1, config.collect.num_env_steps))


def spec_of(env: EnvConfig, make_env: Callable[..., BatchEnv] = make_env) -> EnvSpec:
    """The specification of a kind of environment.

    >>> spec_of(EfficientZeroRun().env).action.n
    2
    """
    with contextlib.closing(make_env(one_env(env), num_envs=1)) as made:
        return made.spec


def one_env(env: EnvConfig) -> EnvConfig:
    """One environment, to read the properties of its kind: it is never stepped.

    >>> one_env(EfficientZeroRun().env).num_envs
    1
    """
    return replace(env, num_envs=1, num_workers=0)


def acting_weights(state: TensorDict) -> TensorDict:
    """The part of a learner's state that actors need."""
    return state.select("params", "buffers", "hyper")


class PlannerRole:
    """The base of roles that search: networks with the weights of a task, and the answer's counts.

    spec: of the environments.
    device: of the searches, as in the settings of the workers of this kind.
    """

    def __init__(self, run: EfficientZeroRun, spec: EnvSpec, device: str) -> None:
        self.config = run
        self.planner = make_planner(make_networks(run, spec), run.on(device), spec)
        self._version = -1

    def load(self, state: TensorDict) -> None:
        """Load nothing: the role has no state."""

    def do(self, task: TensorDict, weights: TensorDict | None) -> TensorDict:
        """The answer to a task, or why a search met NaN or infinity."""
        before = self.planner.num_simulations
        try:
            with threads(self.config.num_threads):
                answer = self._answer(task, weights)
        except UnfitOutputError as error:
            return not_finite(error)
        simulations = torch.tensor(self.planner.num_simulations - before)
        return answer.set("num_simulations", simulations)

    def _answer(self, task: TensorDict, weights: TensorDict | None) -> TensorDict:
        raise NotImplementedError

    def _refresh(self, version: int, weights: TensorDict | None) -> None:
        """Load the weights of a version, unless the planner has them."""
        if version != self._version:
            assert weights is not None
            self.planner.refresh(weights)
            self._version = version

    def close(self) -> None:
        """Release nothing: the role holds no resources."""


class Player:
    """Plays rollouts in some rows of a run's environments: at random first, then by searches.

    The loop has one for all rows, and each actor one for its own.
    check, warn: called with each step, and with a text; see `Collector`.
    """

    def __init__(
        self,
        config: EfficientZeroRun,
        env: BatchEnv,
        planner: Planner,
        rows: range,
        *,
        check: Callable[[TensorDict], None] = lambda step: None,
        warn: Callable[[str], object] = warnings.warn,
    ) -> None:
        self.config, self.planner, self.rows = config, planner, rows
        self.collector = Collector(
            env,
            seed=config.seed,
            first_row=rows.start,
            frame_stack=config.env.frame_stack,
            check=check,
            warn=warn,
        )

    def rollout(self, num_env_steps: int, refresh: Callable[[], None]) -> TensorDict:  # [T, E]
        """Play a rollout.

        num_env_steps: of the whole run up to now. refresh: loads the weights into the planner.
        """
        config, act_now = self.config, self.act_first
        if num_env_steps >= config.collect.random_env_steps:
            refresh()
            temperature = config.search.temperature(fraction_done(config, num_env_steps))
            act_now = partial(self.act, temperature=temperature)
        return self.collector.collect(act_now, config.collect.rollout_length)

    def act(self, states: TensorDict, temperature: float) -> TensorDict:
        """Act by a search with the weights that the planner has."""
        return act(
            self.planner,
            self._with_member(states),
            temperature=temperature,
            noise=True,
            seed=self._seeds("act"),
        )

    def _with_member(self, states: TensorDict) -> TensorDict:
        """The states with the numbers of the members that these rows belong to; those of all rows
        need none.
        """
        size, num = self.config.population.size, self.config.env.num_envs
        if size == 1 or len(self.rows) == num:
            return states
        member = torch.tensor([row // (num // size) for row in self.rows])
        return states.copy().set("member", member)

    def act_first(self, states: TensorDict) -> TensorDict:
        """Act at random, as in the first steps of a run."""
        return act_at_random(
            self.collector.env.spec,
            states,
            num_sampled_actions=self.config.search.num_sampled_actions,
            seed=self._seeds("act first"),
        )

    def _seeds(self, purpose: str) -> Tensor:
        step = self.collector.num_env_steps // len(self.rows)
        return row_seeds(self.config.seed, purpose, self.rows, step)


class ActorRole(PlannerRole):
    """Plays some of a run's environments, a rollout for each task.

    See `raffia.train.rollouts.ActorRollouts`.

    >>> from raffia.recipes.efficientzero.presets import PRESETS
    >>> role = ActorRole(process_config(PRESETS["smoke"]), 0)
    >>> task = TensorDict(num_env_steps=torch.tensor(0), version=torch.tensor(0))
    >>> role.do(task, None)["steps"].batch_size
    torch.Size([1, 4])
    >>> role.close()
    """

    def __init__(self, config: str, index: int) -> None:
        run = configured_run(config)
        num_actors = max(1, run.actors.num)
        num_envs = run.env.num_envs // num_actors
        rows = range(index * num_envs, (index + 1) * num_envs)
        self._is_first = index == 0
        workers = -(-run.env.num_workers // num_actors)
        self.env = make_env(replace(run.env, num_workers=workers), num_envs=num_envs)
        require_batch(self.env)
        super().__init__(run, self.env.spec, run.actors.device)
        self.player = Player(run, self.env, self.planner, rows)
        self.collector = self.player.collector

    def load(self, state: TensorDict) -> None:
        """Play the rows' episodes again up to a ledger's state."""
        self.collector.load_state(state)

    def do(self, task: TensorDict, weights: TensorDict | None) -> TensorDict:
        """Play a rollout."""
        answer = super().do(task, weights)
        if "not_finite" in answer.keys():
            answer["states"] = self.collector.now
        return answer

    def _answer(self, task: TensorDict, weights: TensorDict | None) -> TensorDict:
        refresh = partial(self._refresh, int(task["version"]), weights)
        steps = self.player.rollout(int(task["num_env_steps"]), refresh)
        self.collector.take_ended()  # the leader's ledger has them
        answer = TensorDict(steps=steps, version=task["version"])
        return answer.set("now", self.collector.now[:1]) if self._is_first else answer

    def close(self) -> None:
        """Close the environments."""
        self.env.close()


def process_config(run: EfficientZeroRun) -> str:
    """The JSON config that workers, and processes which share batches, are made from."""
    data = to_json(run)
    data["env"]["id"], data["networks"] = absolute(run.env.id), absolute(run.networks)
    return json.dumps({"run": data})


def configured_run(config: str) -> EfficientZeroRun:
    """The run that `process_config` wrote.

    >>> configured_run(process_config(EfficientZeroRun(seed=3))).seed
    3
    """
    return from_json(EfficientZeroRun, json.loads(config)["run"])
