"""Our side of `benchmarks.population`: learners, their batches, and the steps that are timed."""

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from benchmarks.device_cost import Kernels
from benchmarks.efficientzero_ours import random_batch
from benchmarks.ilql_cases import training
from benchmarks.ilql_ours import Update
from benchmarks.population_cases import (
    ACTIONS,
    BATCH,
    GAMMA,
    HIDDEN,
    LEARNING_RATE,
    OBSERVATION,
    TAU,
    UNROLLED,
)
from raffia.algorithms.efficientzero.latent_model import LatentModel
from raffia.algorithms.efficientzero.learner import EfficientZeroLearner
from raffia.algorithms.efficientzero.planning import Planner
from raffia.algorithms.efficientzero.stacked import StackedModel, StackedPlanner
from raffia.algorithms.ilql.learner import ILQLLearner
from raffia.envs.env import Discrete, EnvSpec
from raffia.evolution.population import Population
from raffia.functional.gradients import value_and_grad
from raffia.functional.optim import adamw
from raffia.functional.trees import over_leaf
from raffia.learner import Learner
from raffia.recipes.efficientzero.presets import PRESETS
from raffia.recipes.ilql.data import make_corpus
from raffia.recipes.ilql.presets import ILQL_PRESETS
from raffia.search.policies import PolicyOutput
from raffia.tensordict.tensordict import TensorDict

RECORDED = ("cartpole", "dqn")  # whose steps are of many small operations
CALLS_BEFORE = 105  # until the operations of a population's steps are recorded
GAMES = 300  # of Wordle, of which a batch is taken


class QLearner:
    """Double Q-learning, as a learner is written: an MLP, Adam, a slow copy.

    >>> learner = QLearner()
    >>> sum(p.numel() for p in learner.init(0)["params"].values(True, True))
    4610
    """

    def __init__(self) -> None:
        self._optimizer = adamw(weight_decay=0.0)

    applies_stacks = True

    def init(self, seed: int) -> TensorDict:
        draws, params = torch.Generator().manual_seed(seed), TensorDict()
        for layer, (fan_in, fan_out) in enumerate(
            itertools.pairwise((OBSERVATION, HIDDEN, HIDDEN, ACTIONS))
        ):
            scale = fan_in**-0.5
            params[str(layer)] = TensorDict(
                weight=(2 * torch.rand(fan_out, fan_in, generator=draws) - 1) * scale,
                bias=(2 * torch.rand(fan_out, generator=draws) - 1) * scale,
            )
        hyper = {"learning_rate": LEARNING_RATE, "gamma": GAMMA, "tau": TAU}
        return TensorDict(
            params=params,
            buffers=TensorDict(),
            target=params.clone(),
            opt=self._optimizer.init(params),
            hyper=TensorDict({name: torch.tensor(number) for name, number in hyper.items()}),
            step=torch.tensor(0),
        )

    def grads(self, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, TensorDict]:
        def loss(params: TensorDict) -> tuple[Tensor, TensorDict]:
            best = values(params, batch["next_observation"]).detach().argmax(-1, keepdim=True)
            after = values(state["target"], batch["next_observation"]).gather(-1, best)[..., 0]
            target = batch["reward"] + state["hyper", "gamma"] * (1 - batch["done"]) * after
            chosen = values(params, batch["observation"]).gather(-1, batch["action"])[..., 0]
            error = chosen - target.detach()
            return error.square().mean(), TensorDict(priority=error.detach().abs())

        grads, (value, metrics) = value_and_grad(loss, state["params"])
        return TensorDict(grads=grads, buffers=state["buffers"]), metrics.set("loss", value)

    def apply(self, state: TensorDict, update: TensorDict) -> TensorDict:
        hyper = state["hyper"]
        params, opt = self._optimizer.update(
            state["params"], update["grads"], state["opt"], learning_rate=hyper["learning_rate"]
        )
        tau = hyper["tau"]
        target = state["target"].apply(
            lambda slow, fast: slow + over_leaf(tau, slow) * (fast - slow), params
        )
        return state.replace(params=params, opt=opt, target=target, step=state["step"] + 1)


def values(params: TensorDict, x: Tensor) -> Tensor:  # [B, observation] -> [B, actions]
    """Of each action."""
    for layer in ("0", "1"):
        x = torch.nn.functional.linear(x, *_weights(params, layer)).relu()
    return torch.nn.functional.linear(x, *_weights(params, "2"))


def _weights(params: TensorDict, layer: str) -> tuple[Tensor, Tensor]:
    return params[layer, "weight"], params[layer, "bias"]


# -- each kind's learner and a batch for it


def cartpole() -> tuple[Learner, TensorDict]:
    spec = EnvSpec(observation_shape=(4,), action=Discrete(2))
    config = PRESETS["cartpole"]
    learner = EfficientZeroLearner(spec, config, num_updates=10**6)
    return learner, random_batch(spec, BATCH, UNROLLED)


def dqn() -> tuple[Learner, TensorDict]:
    batch = TensorDict(
        observation=torch.rand(BATCH, OBSERVATION),
        next_observation=torch.rand(BATCH, OBSERVATION),
        action=torch.randint(ACTIONS, (BATCH, 1)),
        reward=torch.rand(BATCH),
        done=torch.zeros(BATCH),
        batch_size=[BATCH],
    )
    return QLearner(), batch


def gpt() -> tuple[Learner, TensorDict]:
    update = Update(training("small", "shared"))
    return update.learner, update.batch


def wordle() -> tuple[Learner, TensorDict]:
    config = ILQL_PRESETS["wordle"]
    few = replace(config, wordle=replace(config.wordle, num_games=GAMES))
    games = make_corpus(few, None).learnt
    batch = next(games.batches(0, 0, BATCH, per_token=config.model.per_token))
    return ILQLLearner(config, num_updates=config.num_updates), batch


SUBJECTS: dict[str, Callable[[], tuple[Learner, TensorDict]]] = {
    "cartpole": cartpole,
    "dqn": dqn,
    "gpt": gpt,
    "wordle": wordle,
}


def subject(kind: str) -> tuple[Learner, TensorDict]:
    """The learner, and noise or games to learn from: the same at each call."""
    torch.manual_seed(0)
    return SUBJECTS[kind]()


# -- timed calls


class Took(NamedTuple):
    """Seconds of a step."""

    cpu: float  # of all threads
    wall: float
    grads: float = 0.0  # of the wall time: the rest is the optimiser's step


class Steps:
    """Steps of a learner, plain or a population, that go on from one another."""

    def __init__(self, learner: Learner, states: list[TensorDict], batch: TensorDict) -> None:
        self.learner, self.states, self.batch = learner, states, batch
        self.grads_seconds = 0.0

    def __call__(self) -> None:
        """A step of each state, one after the other."""
        for i, state in enumerate(self.states):
            start = time.perf_counter()
            update, _ = self.learner.grads(state, self.batch)
            self.grads_seconds += time.perf_counter() - start
            self.states[i] = self.learner.apply(state, update)

    def timed(self, num: int) -> Took:
        """The mean of so many calls."""
        self.grads_seconds = 0.0
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(num):
            self()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        return Took(cpu / num, wall / num, self.grads_seconds / num)


def steps_of(kind: str, members: int) -> dict[str, Steps]:
    """One learner alone; so many, one after the other; a population as runs have it, whose steps
    are recorded where they are small; and all by vmap."""
    learner, batch = subject(kind)

    def population(way: Literal["vmap"] | None) -> Steps:
        grads: Literal["vmap", "traced"] | None = "traced" if kind in RECORDED else None
        joined = Population(learner, members, grads=way or grads, apply=way)
        steps = Steps(joined, [joined.init(0)], batch)
        if way is None and kind in RECORDED:
            for _ in range(CALLS_BEFORE):
                steps()
        return steps

    return {
        "one": Steps(learner, [learner.init(0)], batch),
        "steps": Steps(learner, [learner.init(seed) for seed in range(members)], batch),
        "ours": population(None),
        "vmap": population("vmap"),
    }


def count_kernels(steps: Steps) -> int:
    """Of one call.

    >>> learner, batch = subject("dqn")
    >>> count_kernels(Steps(learner, [learner.init(0)], batch)) > 20
    True
    """
    with Kernels() as kernels:
        steps()
    return kernels.found.total()


# -- acting


class Searches:
    """A move of all members of `cartpole`: by one search, by one each, and by one that is vmapped.

    rows: environments of each member.
    cudagraphs: record what the vmapped one computes in a simulation, on a GPU.

    >>> Searches(members=2, rows=3).one_search().action.shape
    torch.Size([6])
    """

    def __init__(
        self,
        members: int,
        rows: int,
        device: torch.device | str | None = None,
        *,
        cudagraphs: bool = False,
    ) -> None:
        spec, config = EnvSpec(observation_shape=(4,), action=Discrete(2)), PRESETS["cartpole"]
        learner = EfficientZeroLearner(spec, config, num_updates=10**6)
        states = torch.stack([learner.init(seed) for seed in range(members)]).to(device)

        def model() -> LatentModel:
            return learner.make_model(0).to(device)

        self._together, self._vmapped = (
            StackedPlanner(model(), spec, config, size=members) for _ in range(2)
        )
        self._vmapped._snapshot = StackedModel(model(), members, "vmap", cudagraphs=cudagraphs)
        self._alone = [Planner(model(), spec, config) for _ in range(members)]
        for planner in (self._together, self._vmapped):
            planner.refresh(states)
        for planner, state in zip(self._alone, states.unbind(0), strict=True):
            planner.refresh(state)
        num = members * rows
        self._state = TensorDict(observation=torch.rand(num, 4), batch_size=[num]).to(device)
        self._rows = rows

    def one_search(self) -> PolicyOutput:
        """All roots at once, each row by its member's compiled network."""
        return self._together.plan(self._state, noise=False, temperature=0.0)

    def vmapped(self) -> PolicyOutput:
        """All roots at once, by one vmapped function, as on a GPU."""
        return self._vmapped.plan(self._state, noise=False, temperature=0.0)

    def searches(self) -> None:
        """One member's after the other's."""
        for planner, state in zip(self._alone, self._state.split(self._rows), strict=True):
            planner.plan(state, noise=False, temperature=0.0)

    def alone(self) -> None:
        """One member's."""
        self._alone[0].plan(self._state[: self._rows], noise=False, temperature=0.0)
