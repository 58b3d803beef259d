"""Traced steps: the same bits as plain ones, whatever runs in between."""

import pytest
import torch

from raffia.evolution.population import Population, Traced
from raffia.learner import Accumulate
from raffia.tensordict.tensordict import TensorDict
from tests.evolution.learners import efficientzero, efficientzero_batch


def same(one, other):
    keys = set(one.keys(True, True))
    assert keys == set(other.keys(True, True)) and one.batch_size == other.batch_size
    return all(torch.equal(one[key], other[key]) for key in keys)


@pytest.mark.slow
@pytest.mark.parametrize("batches", ["shared", pytest.param("own", marks=pytest.mark.slow)])
def test_a_population_takes_the_same_steps(batches):
    learner = efficientzero()
    plain, traced = (Population(learner, 3, batches=batches, grads=g) for g in ("vmap", "traced"))
    traced._traced.after = 2
    states, size = [plain.init(0), traced.init(0)], (3, 8) if batches == "own" else (8,)
    for number in range(5):
        batch = efficientzero_batch(*size, seed=number)
        results = []
        for index, population in enumerate((plain, traced)):
            update, metrics = population.grads(states[index], batch)
            states[index] = population.apply(states[index], update)
            results.append(metrics)
        assert same(*states) and same(*results)
    assert traced._traced.num_recorded == 1


def test_results_do_not_share_memory():
    def function(x):
        total = x["a"].cumsum(0)
        return TensorDict(total=total.mul_(2), twice=x["a"] * 2, batch_size=[3])

    traced = Traced(function, after=0)
    x = TensorDict(a=torch.tensor([1.0, 2.0, 3.0]), batch_size=[3])
    first = traced(x)
    assert first["total"].tolist() == [2.0, 6.0, 12.0]
    second = traced(x * 10)
    assert first["total"].tolist() == [2.0, 6.0, 12.0] and x["a"].tolist() == [1.0, 2.0, 3.0]
    assert second["total"].tolist() == [20.0, 60.0, 120.0] and traced.num_recorded == 1


@pytest.mark.parametrize(
    "other",
    [
        TensorDict(a=torch.ones(4)),
        TensorDict(a=torch.ones(3, dtype=torch.float64)),
        TensorDict(b=torch.ones(3)),
        TensorDict(a=torch.ones(3), batch_size=[3]),
    ],
)
def test_each_input_form_is_traced_separately(other):
    traced = Traced(lambda x: x.apply(lambda leaf: leaf + 1), after=0)
    one = TensorDict(a=torch.ones(3))
    for tree in (one, other, one, other):
        assert same(traced(tree), tree.apply(lambda leaf: leaf + 1))
    assert traced.num_recorded == 2


def test_the_least_recently_used_trace_is_dropped_and_rare_forms_are_not_traced():
    traced = Traced(lambda x: x + 1, after=0, max_forms=2)
    for length in (1, 2, 1, 3, 1, 2):
        assert torch.equal(traced(torch.zeros(length)), torch.ones(length))
    assert traced.num_recorded == 4  # 1, 2, 3, and 2 again
    traced = Traced(lambda x: x + 1, after=3)
    for length in (1, 2) * 3:
        traced(torch.zeros(length))
    assert traced.num_recorded == 0
    traced(torch.zeros(1))
    assert traced.num_recorded == 1


@pytest.mark.slow
def test_parts_of_a_batch():
    learner = efficientzero()
    plain = Accumulate(Population(learner, 3, grads="vmap"), 2)
    population = Population(learner, 3, grads="traced")
    population._traced.after = 0
    traced, batch = Accumulate(population, 2), efficientzero_batch(8)
    state = plain.init(0)
    wanted, found = plain.grads(state, batch), traced.grads(state, batch)
    assert same(wanted[0], found[0]) and same(wanted[1], found[1])
    assert population._traced.num_recorded == 1
