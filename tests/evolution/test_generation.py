"""Generations: parents, members, what is saved, what a resume repeats, and that evolution helps."""

import json
import math
from dataclasses import replace

import pytest
import torch

from raffia.evolution.config import HyperRange, MutationConfig, SelectionConfig
from raffia.evolution.generation import Evolution
from raffia.evolution.population import Population
from raffia.functional.optim import adamw
from raffia.functional.seeds import generator_for
from raffia.nn.evolvable import EvolvableMLP
from raffia.tensordict.tensordict import TensorDict
from tests.evolution.learners import Regression, by_name

NOTHING = MutationConfig(no_mutation=1.0)
HYPER = MutationConfig(no_mutation=0.5, hyper=0.5, hyper_ranges={"tau": HyperRange(0.1, 0.9)})
ALWAYS = replace(HYPER, no_mutation=0.0, hyper=1.0)


def draws(seed=0):
    return torch.Generator().manual_seed(seed)


def state_of(size):
    """Members that differ from each other."""
    tau = torch.linspace(0.2, 0.8, size)
    params = TensorDict(w=torch.arange(size * 6.0).view(size, 2, 3), batch_size=[size])
    hyper = TensorDict(tau=tau, batch_size=[size])
    return TensorDict(params=params, hyper=hyper, batch_size=[size])


def fitness_of(size, number):
    return torch.rand(size, generator=draws(100 + number)).tolist()


def run(evolution, times, first=0):
    state, reports = state_of(evolution.size), []
    for number in range(first, first + times):
        evolution.record(fitness_of(evolution.size, number))
        state, generation = evolution.step(state, draws(number))
        reports.append(generation)
    return state, reports


@pytest.mark.parametrize("method", ["tournament", "truncation"])
@pytest.mark.parametrize("elitism", [False, True])
def test_a_copy_gets_a_member_number_that_was_never_used(method, elitism):
    selection = SelectionConfig(method=method, elitism=elitism)
    evolution = Evolution(6, selection, HYPER)
    _, reports = run(evolution, 12)
    members, ever = list(range(6)), set(range(6))
    for number, generation in enumerate(reports, 1):
        assert generation.number == number
        assert len(set(generation.members)) == 6
        assert generation.parent_members == [members[p] for p in generation.parents]
        for parent in set(generation.parents):  # one keeps its number, the others are new
            heirs = [m for p, m in zip(generation.parents, generation.members, strict=True)
                     if p == parent]  # fmt: skip
            assert heirs.count(members[parent]) == 1
            new = set(heirs) - {members[parent]}
            assert not new & ever
            ever |= new
        dropped = set(range(6)) - set(generation.parents)
        assert not {members[slot] for slot in dropped} & set(generation.members)
        members = generation.members
    assert ever == set(range(max(ever) + 1))  # and none was left out


def test_the_elite_keeps_its_number_and_is_not_mutated():
    for method in ("tournament", "truncation"):
        for seed in range(8):
            evolution = Evolution(4, SelectionConfig(method=method), ALWAYS)
            state = state_of(4)
            evolution.record([0.0, 1.0, 5.0, 2.0])
            after, report = evolution.step(state, draws(seed))
            slot = report.members.index(2)
            assert slot == (0 if method == "tournament" else 2)
            assert report.kinds[slot] == "none" and report.kinds.count("none") == 1
            assert after[slot]["hyper", "tau"] == state[2]["hyper", "tau"]
            assert method == "tournament" or 0 not in report.parents  # the worst gives way
            assert after["params", "w"].equal(state["params", "w"][report.parents])
            after["params", "w"].zero_()
            assert state["params", "w"].equal(state_of(4)["params", "w"])
    changes = Evolution(4, SelectionConfig(), replace(ALWAYS, mutate_elite=True))
    changes.record([0.0, 1.0, 5.0, 2.0])
    _, report = changes.step(state_of(4), draws())
    assert report.members[0] == 2 and report.kinds == ["hyper"] * 4


def test_the_row_of_a_generation():
    evolution = Evolution(3, SelectionConfig(), HYPER)
    evolution.record([1.0, math.nan, 3.0])
    state, report = evolution.step(state_of(3), draws(4))
    row = json.loads(json.dumps(report.as_row(), allow_nan=False))
    assert row.pop("generation") == 1 and row.pop("fitness") == [1.0, None, 3.0]
    assert report.fitness == [1.0, -math.inf, 3.0]
    assert row["hyper"] == {"tau": pytest.approx(state["hyper", "tau"].tolist())}
    assert set(row) == {"parents", "members", "parent_members", "kinds", "changes", "hyper"}
    for slot, kind in enumerate(row["kinds"]):
        parent = row["parents"][slot]
        before, now = state_of(3)["hyper", "tau"][parent].item(), row["hyper"]["tau"][slot]
        change = f"tau {before:g} -> {now:g}" if kind == "hyper" else ""
        assert row["changes"][slot] == change and (before != now) == (kind == "hyper")


def test_fitness_is_the_mean_of_the_last_evaluations_and_copies_inherit_it():
    evolution = Evolution(3, SelectionConfig(eval_loop=2, tournament_size=3), NOTHING)
    for fitness in ([100.0, 0.0, 0.0], [0.0, 4.0, 2.0], last := [1.0, 2.0, 6.0]):
        evolution.record(fitness)
    _, first = evolution.step(state_of(3), draws(2))
    assert first.fitness == [0.5, 3.0, 4.0] and first.parents[0] == 2
    evolution.record([8.0, 0.0, 0.0])
    _, after = evolution.step(state_of(3), draws(2))
    both = zip(first.parents, [8.0, 0.0, 0.0], strict=True)
    assert after.fitness == [(last[parent] + new) / 2 for parent, new in both]


@pytest.mark.parametrize("method", ["tournament", "truncation"])
def test_no_member_that_is_nan_survives_while_another_is_finite(method):
    selection = SelectionConfig(method=method, tournament_size=1, elitism=False)
    for finite in ([2], [0, 3], []):
        evolution = Evolution(4, selection, NOTHING)
        evolution.record([1.0 if member in finite else math.nan for member in range(4)])
        parents = set(evolution.step(state_of(4), draws())[1].parents)
        assert parents <= set(finite or range(4))
        assert len(parents) > 1 or len(finite) == 1


@pytest.mark.parametrize(("eval_loop", "worst"), [(1, math.nan), (3, math.inf), (3, -math.inf)])
def test_a_resumed_evolution_continues_with_the_same_generations(eval_loop, worst):
    selection = SelectionConfig(eval_loop=eval_loop)

    def run(evolution, state, times):
        found = []
        for number in times:
            fitness = fitness_of(5, number)
            fitness[number % 5] = worst
            evolution.record(fitness)
            if number % 2:
                draw = generator_for(7, "generation", evolution.number)
                state, generation = evolution.step(state, draw)
                found.append(generation)
        return state, found

    uninterrupted, expected = run(Evolution(5, selection, HYPER), state_of(5), range(10))
    first, second = (Evolution(5, selection, HYPER) for _ in range(2))
    halfway, before = run(first, state_of(5), range(5))  # recorded after the last generation
    saved = json.dumps(first.state(), allow_nan=False)
    first.record([0.0] * 5)  # the saved state is a copy
    second.load_state(json.loads(saved))
    end, after = run(second, halfway, range(5, 10))
    assert before + after == expected
    assert (end == uninterrupted).all()


def test_a_population_of_one_and_invalid_calls():
    def of(size, **options):
        return Evolution(size, SelectionConfig(**options), NOTHING)

    def evaluated(size):
        evolution = of(size)
        evolution.record([1.0] * size)
        return evolution

    for call, match in (
        (lambda: of(4, tournament_size=5), "=5 is larger .* of 4"),
        (lambda: of(2).step(state_of(2), draws()), r"evaluated yet: call record\(fitness\)"),
        (lambda: of(2).record([1.0, 2.0, 3.0]), "of 3 members, but the population has 2"),
        (lambda: of(4).load_state(of(3).state()), "3 members, but the population has 4"),
        (lambda: evaluated(2).step(state_of(3), draws()), r"must be \[2\], but this one is \[3\]"),
        (lambda: of(1, tournament_size=1), "so a population of one"),
        (lambda: of(1, tournament_size=1, method="truncation"), "so a population of one"),
    ):
        with pytest.raises(ValueError, match=match):
            call()
    for method in ("tournament", "truncation"):
        selection = SelectionConfig(method=method, tournament_size=1, elitism=False)
        evolution = Evolution(1, selection, ALWAYS)
        evolution.record([1.0])
        state, report = evolution.step(state_of(1), draws())
        assert report.members == [0] and report.kinds == ["hyper"]
        assert state["hyper", "tau"] != state_of(1)["hyper", "tau"]
    state, report = evaluated(2).step(state_of(2).exclude("hyper"), draws())
    assert report.hyper == {} and "hyper" not in state.keys()


class Waves(Regression):
    """A learner that fits sines by an evolvable network."""

    def __init__(self):
        network = EvolvableMLP(1, 1, width=8, num_nodes=4, max_nodes=16, max_layers=3)
        self.net = torch.nn.ModuleDict({"net": network})
        self.net.forward = network.forward
        self.optimizer = adamw(weight_decay=0.0)

    def init(self, seed):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for part in (self.net["net"].embed, self.net["net"].out, self.net["net"]):
                part.reset_parameters()
        state = super().init(seed)
        state["params"] = by_name(self.net.named_parameters())
        state["hyper", "learning_rate"].fill_(1e-4)
        return state


def waves(seed, size=64):
    x = torch.rand(size, 1, generator=draws(seed)) * 4 - 2
    return TensorDict(x=x, y=((3 * x).sin() + 0.5 * x).squeeze(1), batch_size=[size])


def losses_of(mutations, seed=0, generations=12, updates=10):
    learner = Population(Waves(), 8)
    evolution = Evolution(8, SelectionConfig(), mutations) if mutations else None
    state, best, reports = learner.init(seed), [], []
    for number in range(generations):
        for update in range(updates):
            batch = waves(1000 * number + update)
            state = learner.apply(state, learner.grads(state, batch)[0])
        loss = learner.grads(state, waves(10**6, 256))[1]["loss"]
        best.append(loss.min().item())
        if evolution:
            evolution.record(-loss)
            state, generation = evolution.step(state, generator_for(seed, "evolve", number))
            reports.append(generation)
    return best, reports


@pytest.mark.slow
def test_evolution_corrects_a_learning_rate_100_times_too_low():
    mutations = MutationConfig(
        no_mutation=0.1,
        hyper=1.0,
        activation=0.1,
        architecture=0.2,
        hyper_ranges={"learning_rate": HyperRange(1e-5, 0.1, grow=8.0, shrink=0.5, log=True)},
        nodes=(2, 4),
    )
    alone, _ = losses_of(None)
    evolved, reports = losses_of(mutations)
    assert evolved[-1] < 0.3 * alone[-1]
    assert max(reports[-1].hyper["learning_rate"]) > 10 * 1e-4
    kinds = {kind for generation in reports for kind in generation.kinds}
    assert kinds == {"none", "hyper", "activation", "architecture"}
