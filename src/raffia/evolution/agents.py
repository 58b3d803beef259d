"""Selection and mutation of a list of agents, by the names that users of AgileRL know.

The work is that of `generation.py` and `mutate.py`: of fitness, and of a stack of one agent's
state. Members that are to learn as one program are a `Population`; those of a list learn one by
one, and may have what cannot be stacked: networks of different shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

import torch

from raffia.evolution.config import KINDS, HyperRange, MutationConfig, SelectionConfig
from raffia.evolution.generation import mean_fitness, tournament
from raffia.evolution.mutate import MemberChange, check_mutations, draw_kind, mutate
from raffia.functional.seeds import generator_for
from raffia.hints import check_range
from raffia.tensordict.keys import nearest
from raffia.tensordict.tensordict import TensorDict


class Member(Protocol):
    """The interface of an agent for selection.

    >>> from raffia.algorithms.ilql import ILQL
    >>> agent: Member = ILQL(None, {"vocab_size": 6, "n_layer": 1, "n_head": 2, "n_embd": 8})
    >>> agent.index, agent.fitness, agent.clone(5).index
    (0, [], 5)
    """

    index: int  # index that no other of its population has
    fitness: list[float]  # fitness of each evaluation, the newest last

    def clone(self, index: int | None = None) -> Self:
        """A copy, its optimiser's state included, that shares no memory with it."""


class MutableAgent(Member, Protocol):
    """The further interface of an agent for mutation.

    >>> from raffia.algorithms.ilql import ILQL
    >>> agent: MutableAgent = ILQL(None, {"vocab_size": 6, "n_layer": 1, "n_head": 2, "n_embd": 8})
    >>> sorted(agent.learner_state().keys())[:4], "lr" in agent.hyper_names
    (['buffers', 'dropout_seed', 'hyper', 'opt'], True)
    """

    mutation: str | None  # its last change; None: nothing

    @property
    def hyper_names(self) -> Sequence[str]:
        """The names of the agent's attributes that are numbers and can be set."""

    def learner_state(self) -> TensorDict:
        """The state as in `raffia.learner.Learner`, with at least "params" and "buffers"."""

    def load_learner_state(self, state: TensorDict) -> None:
        """Load the state, which no one else uses any more."""


@runtime_checkable
class Reshapes(Protocol):
    """An agent that changes the shapes of its networks itself.

    >>> from raffia.algorithms.ilql import ILQL
    >>> agent = ILQL(None, {"vocab_size": 6, "n_layer": 1, "n_head": 2, "n_embd": 8})
    >>> isinstance(agent, Reshapes)
    True
    """

    def why_fixed(self) -> str | None:
        """The reason why the agent's networks stay unchanged; None if they can change."""

    def reshape(self, new_layer_prob: float, nodes: Sequence[int], draw: torch.Generator) -> str:
        """Add or remove a layer, else as many nodes as one of `nodes`; returns what it did.

        What has become larger computes what it did before.
        """


AnyMember = TypeVar("AnyMember", bound=Member)
AnyAgent = TypeVar("AnyAgent", bound=MutableAgent)


class TournamentSelection:
    """Tournament selection: the best member unchanged, and the winners of tournaments.

    tournament_size: members drawn for each slot, with replacement.
    elitism: the first slot is that of the best member, under the index that it has.
    population_size: slots to fill.
    eval_loop: the number of last evaluations whose mean is the fitness.
    rand_seed: of the draws; None for one from the system, which is then an attribute.

    The draws follow from `rand_seed` and `number`, the selections so far; a resumed run sets it.
    `lineage` has the index of each member that was made, and the index of its parent.

    >>> class Guess:
    ...     def __init__(self, index, fitness):
    ...         self.index, self.fitness = index, fitness
    ...     def clone(self, index=None):
    ...         return Guess(self.index if index is None else index, list(self.fitness))
    >>> tournament = TournamentSelection(2, True, population_size=3, rand_seed=0)
    >>> elite, population = tournament.select([Guess(0, [1.0]), Guess(1, [5.0]), Guess(2, [3.0])])
    >>> elite.index, [agent.index for agent in population], tournament.lineage
    (1, [1, 3, 4], {3: 2, 4: 2})
    """

    def __init__(
        self,
        tournament_size: int,
        elitism: bool,
        population_size: int,
        eval_loop: int = 1,
        *,
        rand_seed: int | None = None,
    ) -> None:
        SelectionConfig(
            tournament_size=tournament_size, elitism=elitism, eval_loop=eval_loop
        ).check(population_size)
        self.tournament_size, self.elitism = tournament_size, elitism
        self.population_size, self.eval_loop = population_size, eval_loop
        self.rand_seed = _seed(rand_seed)
        self.number = 0
        self.lineage: dict[int, int] = {}

    def select(self, population: Sequence[AnyMember]) -> tuple[AnyMember, list[AnyMember]]:
        """The best member itself, and the next population: clones all of them.

        Only the elite's clone keeps its index. No index is used twice.
        """
        _check_indices(population)
        fitness = torch.tensor([self._fitness(agent) for agent in population], dtype=torch.float64)
        parents = tournament(
            fitness,
            tournament_size=self.tournament_size,
            elitism=self.elitism,
            population_size=self.population_size,
            generator=generator_for(self.rand_seed, "selection", self.number),
        ).tolist()
        self.number += 1
        elite = population[int(fitness.argmax())]
        chosen = []
        if self.elitism:
            chosen.append(elite.clone())
            del parents[0]
        unused = 1 + max(*(agent.index for agent in population), *self.lineage, -1)
        for index, parent in enumerate(parents, unused):
            chosen.append(population[parent].clone(index))
            self.lineage[index] = population[parent].index
        return elite, chosen

    def _fitness(self, agent: Member) -> float:
        if not agent.fitness:
            raise ValueError(
                f"agent {agent.index} was never evaluated: append its result to its fitness, as "
                "ILQL.test(...) does"
            )
        history = torch.tensor(agent.fitness, dtype=torch.float64).unsqueeze(1)
        return float(mean_fitness(history, self.eval_loop))


class Mutations:
    """Mutation of members after selection: one kind of change for each, or none.

    no_mutation, architecture, parameters, activation, rl_hp: relative probabilities of the kinds.
    new_layer_prob: of a change of the architecture: a layer, more or less; else nodes.
    mutation_sd: of the noise on parameters, relative to the weight.
    mutate_elite: False spares the first member, where selection with elitism puts the best.
    rand_seed: of the draws; None for one from the system, which is then an attribute.
    hyper_ranges: within which attributes move, {"lr": HyperRange(1e-5, 1e-2)}; whole numbers stay
        whole.
    nodes: how many are added or removed, of which one is drawn.

    What a member becomes follows from `rand_seed`, `number` (the calls so far; a resumed run sets
    it), its slot and what it is. An agent that `Reshapes` has its layers and nodes changed by
    itself; other agents' networks are those that `raffia.evolution.mutate` knows.

    >>> from raffia.algorithms.ilql import ILQL
    >>> small = {"vocab_size": 6, "n_layer": 1, "n_head": 2, "n_embd": 8}
    >>> population = [ILQL(None, small, index=i, lr=1e-3) for i in range(2)]
    >>> ranges = {"lr": HyperRange(1e-5, 1e-2)}
    >>> mutations = Mutations(
    ...     0, 0, 0.2, 0, 0, 1, mutate_elite=False, rand_seed=0, hyper_ranges=ranges)
    >>> [(agent.lr, agent.mutation) for agent in mutations.mutation(population)]
    [(0.001, None), (0.0012, 'hyper: lr 0.001 -> 0.0012')]
    """

    def __init__(
        self,
        no_mutation: float,
        architecture: float,
        new_layer_prob: float,
        parameters: float,
        activation: float,
        rl_hp: float,
        mutation_sd: float = 0.1,
        *,
        mutate_elite: bool = True,
        rand_seed: int | None = None,
        hyper_ranges: Mapping[str, HyperRange] | None = None,
        nodes: tuple[int, ...] = (16, 32, 64),
    ) -> None:
        check_range("rl_hp", rl_hp, 0)
        if rl_hp > 0 and not hyper_ranges:
            raise ValueError(
                f'rl_hp={rl_hp:g}, but no hyper-parameter has a range: pass hyper_ranges={{"lr": '
                "HyperRange(1e-5, 1e-2)}, or rl_hp=0"
            )
        self.config = MutationConfig(
            no_mutation=no_mutation,
            architecture=architecture,
            new_layer_prob=new_layer_prob,
            parameters=parameters,
            activation=activation,
            hyper=rl_hp,
            hyper_ranges={} if hyper_ranges is None else dict(hyper_ranges),
            mutation_sd=mutation_sd,
            nodes=nodes,
            mutate_elite=mutate_elite,
        )
        self.rand_seed = _seed(rand_seed)
        self.number = 0

    def mutation(self, population: Sequence[AnyAgent]) -> list[AnyAgent]:
        """Mutate the agents; each then describes its change in its `mutation`.

        Raises ValueError, and changes none, if one cannot be changed in a requested way.
        """
        for agent in population:
            self._check(agent)
        for slot, agent in enumerate(population):
            if slot == 0 and not self.config.mutate_elite:
                continue
            draw = generator_for(self.rand_seed, "mutation", self.number, slot)
            change = self._change(agent, draw)
            agent.mutation = None if change.kind == "none" else f"{change.kind}: {change.what}"
        self.number += 1
        return list(population)

    def _change(self, agent: MutableAgent, draw: torch.Generator) -> MemberChange:
        kind = draw_kind(self.config, draw)
        if kind == "none":
            return MemberChange("none")
        if kind == "hyper":
            return _step_hyper(agent, self.config, draw)
        if kind == "architecture" and isinstance(agent, Reshapes):
            config = self.config
            return MemberChange(kind, agent.reshape(config.new_layer_prob, config.nodes, draw))
        state = agent.learner_state()
        concerned = ("params", "buffers", "target", "opt")[: 4 if kind == "architecture" else 2]
        parts = {name: state[name] for name in concerned if name in state.keys()}
        stack = TensorDict(parts).unsqueeze(0)
        after, (change,) = mutate(stack, _only(self.config, kind), draw)
        agent.load_learner_state(TensorDict({**dict(state.items()), **dict(after[0].items())}))
        return change

    def _check(self, agent: MutableAgent) -> None:
        """Raise ValueError if this agent cannot be mutated as requested."""
        config = self.config
        if config.hyper > 0:
            for name in config.hyper_ranges:
                _check_hyper(agent, name)
            check_mutations(_numbers(agent, config), _only(config, "hyper"))
            for name, span in config.hyper_ranges.items():
                _check_ends(agent, name, span)
        if config.architecture > 0 and isinstance(agent, Reshapes):
            reason = agent.why_fixed()
            if reason is not None:
                raise ValueError(
                    f"architecture={config.architecture:g}, but the networks of agent "
                    f"{agent.index} cannot be changed: {reason}. Set architecture=0"
                )
            config = replace(config, architecture=0.0, no_mutation=1.0)
        if config.activation > 0 or config.architecture > 0:
            check_mutations(agent.learner_state().unsqueeze(0), replace(config, hyper=0.0))


def _only(config: MutationConfig, kind: str) -> MutationConfig:
    """A copy of `config` in which every member changes by this kind of mutation."""
    never: dict[str, Any] = dict.fromkeys(("no_mutation", *KINDS), 0.0)
    return replace(config, **{**never, kind: 1.0})


def _numbers(agent: MutableAgent, config: MutationConfig) -> TensorDict:
    """A stack of one, of the attributes that have a range."""
    hyper = {
        name: torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)
        for name in config.hyper_ranges
        for value in (getattr(agent, name),)
    }
    return TensorDict(hyper=TensorDict(hyper)).unsqueeze(0)


def _step_hyper(agent: MutableAgent, config: MutationConfig, draw: torch.Generator) -> MemberChange:
    before = _numbers(agent, config)
    after, (change,) = mutate(before, _only(config, "hyper"), draw)
    for name in config.hyper_ranges:
        if after["hyper", name] != before["hyper", name]:
            setattr(agent, name, after["hyper", name].item())
    return change


def _check_hyper(agent: MutableAgent, name: str) -> None:
    if name not in agent.hyper_names:
        raise ValueError(
            f"agent {agent.index} has no hyper-parameter {name!r}"
            f"{nearest(name, agent.hyper_names) or '.'} It has: "
            f"{', '.join(sorted(agent.hyper_names))}"
        )
    value = getattr(agent, name)
    if value is None or not math.isfinite(value):
        raise ValueError(
            f"{name} of agent {agent.index} is {value}, which is not a number that a range can "
            "contain: set it to a number first"
        )


def _check_ends(agent: MutableAgent, name: str, span: HyperRange) -> None:
    """Raise ValueError unless the agent accepts both ends of a range; its value stays as it is."""
    before = getattr(agent, name)
    whole = isinstance(before, int)
    ends = (math.ceil(span.low), math.floor(span.high)) if whole else (span.low, span.high)
    try:
        for end in ends:
            setattr(agent, name, end)
    except ValueError as error:
        raise ValueError(
            f"the range of {name} from {span.low:g} to {span.high:g} holds values that agent "
            f"{agent.index} refuses: {error}. Give a narrower range"
        ) from error
    finally:
        setattr(agent, name, before)


def _check_indices(population: Sequence[Member]) -> None:
    if not population:
        raise ValueError("a population must have at least one member, but this one is empty")
    indices = [agent.index for agent in population]
    for index in indices:
        if indices.count(index) > 1:
            raise ValueError(
                f"two members have the index {index}, so no lineage can be recorded: create them "
                "with index=0, index=1, ..."
            )


def _seed(given: int | None) -> int:
    """The given seed, or one from the operating system; torch's global generator is unchanged."""
    return torch.Generator().seed() if given is None else given
