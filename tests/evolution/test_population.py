"""A population's members learn as each would by itself, whatever learner it is of."""

import dataclasses

import pytest
import torch

from raffia.algorithms.ilql.config import (
    ILQLConfig,
    ILQLModelConfig,
)
from raffia.algorithms.ilql.learner import ILQLLearner
from raffia.evolution.population import Population, with_hyper
from raffia.functional.optim import adamw
from raffia.learner import Accumulate, Learner, step_of
from raffia.nn.evolvable import EvolvableMLP
from raffia.tensordict.tensordict import TensorDict
from tests.evolution.learners import (
    LEARNERS,
    B,
    P,
    Regression,
    efficientzero,
    efficientzero_batch,
    ilql,
    ilql_batch,
    regression_batch,
)

EXACT = {"rtol": 0, "atol": 0}
CLOSE = {"rtol": 1e-9, "atol": 1e-11}  # of float64


OWN = {  # hyper-parameters of three members
    "batch_norm": {"learning_rate": [0.01, 0.1, 0.001], "scale": [1.0, 2.0, 0.5]},
    "efficientzero": {
        "learning_rate": [0.02, 0.002, 0.05],
        "weight_decay": [1e-4, 0.0, 0.1],
        "value_weight": [0.25, 1.0, 2.0],
        "entropy_weight": [0.0, 0.1, 0.3],
    },
    "ilql": {
        "learning_rate": [1e-3, 1e-2, 1e-4],
        "value_rate": [1.0, 3.0, 0.3],
        "weight_decay": [0.0, 0.1, 0.01],
        "alpha": [0.005, 0.5, 0.1],
        "gamma": [0.99, 0.5, 0.9],
        "tau": [0.7, 0.9, 0.5],
        "cql_weight": [0.2, 0.0, 1.0],
    },
}
all_learners = pytest.mark.parametrize("kind", list(LEARNERS))


def make(kind):
    learner, batch = LEARNERS[kind]
    return learner(), batch


def double(tree):
    return tree.apply(lambda x: x.double() if x.is_floating_point() else x)


def updated(learner, state, batch):
    update, metrics = learner.grads(state, batch)
    return learner.apply(state, update), metrics


def assert_equal(found, expected, **tolerance):
    assert set(found.keys(True, True)) == set(expected.keys(True, True))
    for key, value in expected.items(True, True):
        torch.testing.assert_close(
            found[key],
            value,
            **(tolerance or EXACT),
            equal_nan=True,
            msg=lambda text, key=key: f"{key}: {text}",
        )


def members_of(population, seed=0):
    """The states that a population begins with, each by itself; in float64."""
    state = double(population.init(seed))
    return [state[i].clone() for i in range(population.size)]


# --------------------------------------------------------------------------- one is as none


@all_learners
@pytest.mark.parametrize("batches", ["shared", "own"])
def test_a_population_of_one_is_plain_training_bit_for_bit(kind, batches):
    learner, batch_of = make(kind)
    population: Learner = Population(learner, 1, batches=batches)
    plain, state = learner.init(4), population.init(4)
    assert_equal(state[0], plain)
    for step in range(5):
        batch = batch_of(B, seed=step)
        plain, told = updated(learner, plain, batch)
        state, metrics = updated(population, state, batch[None] if batches == "own" else batch)
        assert_equal(state[0], plain)
        if batches == "shared" and "priority" in metrics.keys():
            assert metrics["priority"].shape == (B,)
            metrics["priority"] = metrics["priority"][None]
        assert_equal(TensorDict(dict(metrics.items()), batch_size=[1])[0], told)
    assert state["step"].tolist() == [5] and step_of(state) == 5


def test_one_of_parts_is_plain_training_in_parts_bit_for_bit():
    learner = Accumulate(Regression(), 2)
    population = Population(learner, 1)
    plain, state = learner.init(4), population.init(4)
    for step in range(3):
        plain, _ = updated(learner, plain, regression_batch(B, seed=step))
        state, _ = updated(population, state, regression_batch(B, seed=step))
    assert_equal(state[0], plain)


# ------------------------------------------------------------------------ many are as each


WAYS = [
    *((kind, "vmap", apply) for kind in LEARNERS for apply in ("each", "vmap")),
    *((kind, "vmap", "stack") for kind in ("efficientzero", "ilql")),
    ("ilql", "each", "stack"),
]


@pytest.mark.parametrize(("kind", "grads", "apply"), WAYS)
def test_members_learn_as_each_alone_with_hyper_parameters_of_its_own(kind, grads, apply):
    # in float64: Adam makes steps of rounding errors where a gradient is zero
    learner, batch_of = make(kind)
    population = Population(learner, P, hyper=OWN[kind], grads=grads, apply=apply)
    alone = members_of(population)
    state = torch.stack([member.clone() for member in alone])
    for name, numbers in OWN[kind].items():
        torch.testing.assert_close(
            state["hyper", name].float(), torch.tensor(numbers), rtol=1e-6, atol=0
        )
    for step in range(4):
        batch = double(batch_of(B, seed=step))
        pairs = [updated(learner, member, batch) for member in alone]
        alone = [pair[0] for pair in pairs]
        state, metrics = updated(population, state, batch)
        # rates are of single precision where one program steps
        close = {"rtol": 1e-6, "atol": 1e-8} if apply != "vmap" else {"rtol": 1e-5, "atol": 2e-6}
        assert_equal(state, torch.stack(alone), **close)
        told = torch.stack([pair[1] for pair in pairs])
        if "priority" in told.keys():
            told = TensorDict({**dict(told.items()), "priority": told["priority"].mean(0)})
        assert_equal(metrics, TensorDict(dict(told.items())), **close)
    assert state["step"].tolist() == [4] * P
    params = state["params"].values(True, True)
    assert all((leaf[0] != leaf[1]).any() for leaf in params)


@all_learners
def test_batches_of_their_own(kind):
    learner, batch_of = make(kind)
    population = Population(learner, P, batches="own", hyper=OWN[kind])
    alone = members_of(population)
    state = torch.stack([member.clone() for member in alone])
    for step in range(3):
        batch = double(batch_of(P, B, seed=step))
        pairs = [updated(learner, member, batch[i]) for i, member in enumerate(alone)]
        alone = [pair[0] for pair in pairs]
        state, metrics = updated(population, state, batch)
    assert_equal(state, torch.stack(alone), rtol=1e-6, atol=1e-8)
    told = torch.stack([pair[1] for pair in pairs])
    assert_equal(metrics, TensorDict(dict(told.items())), rtol=1e-6, atol=1e-8)
    if "priority" in metrics.keys():
        assert metrics["priority"].shape == (P, B)


@pytest.mark.parametrize("apply", ["each", "vmap", "stack"])
def test_either_way_of_stepping_gives_the_same_in_single_precision(apply):
    learner = efficientzero(norm_type="LN", optimizer="sgd")
    population = Population(learner, P, hyper=OWN["efficientzero"], apply=apply)
    state = population.init(0)
    alone = [state[i].clone() for i in range(P)]
    for step in range(3):
        batch = efficientzero_batch(B, seed=step)
        alone = [updated(learner, member, batch)[0] for member in alone]
        state, _ = updated(population, state, batch)
    assert_equal(state, torch.stack(alone), rtol=1e-4, atol=1e-5)


def test_by_each_the_memory_of_the_state_is_used_again():
    population = Population(efficientzero(), P)
    state = population.init(0)
    before = {key: leaf.data_ptr() for key, leaf in state.items(True, True)}
    state, _ = updated(population, state, efficientzero_batch(B))
    after = {key: leaf.data_ptr() for key, leaf in state.items(True, True)}
    moved = {
        key[0] if isinstance(key, tuple) else key for key in after if after[key] != before[key]
    }
    assert moved <= {"buffers", "step"}


def test_gradients_change_nothing_that_is_given():
    population = Population(efficientzero(), P, hyper={"batch_size": [4, B, 4]})
    state, batch = population.init(0), efficientzero_batch(B)
    kept = state.clone(), batch.clone()
    population.grads(state, batch)
    assert_equal(state, kept[0])
    assert_equal(batch, kept[1])


def test_members_begin_unlike_and_the_first_as_alone():
    population = Population(Regression(), P)
    state = population.init(5)
    assert_equal(state[0], Regression().init(5))
    assert_equal(state, population.init(5))
    weight = state["params", "0", "weight"]
    assert not weight[0].equal(weight[1]) and not weight[1].equal(weight[2])


def test_forms_of_networks_of_their_own():
    """What is data of a network, its depth, width and activation, differs between members."""
    learner = EvolvableRegression()
    states = [learner.init(seed) for seed in range(P)]
    for i, state in enumerate(states):
        state["buffers", "net", "activation"].fill_(i)
        state["buffers", "net", "layer_gate"][:] = torch.tensor([1.0, i > 0, i > 1])
        state["buffers", "net", "width_mask"][:, : 2 + i] = 1
        state.update(double(state))
    stacked, batch = torch.stack([s.clone() for s in states]), double(regression_batch(B))
    population = Population(learner, P)
    for _ in range(3):
        states = [updated(learner, state, batch)[0] for state in states]
        stacked, _ = updated(population, stacked, batch)
    assert_equal(stacked, torch.stack(states), **CLOSE)


class EvolvableRegression(Regression):
    def __init__(self):
        network = EvolvableMLP(3, 1, width=4, num_nodes=2, max_nodes=5)
        self.net = torch.nn.ModuleDict({"net": network})
        self.net.forward = network.forward
        self.optimizer = adamw()


# ------------------------------------------------------------------------------- in parts


@pytest.mark.parametrize("batches", ["shared", "own"])
@pytest.mark.parametrize("norm", [False, True])
def test_parts_of_a_population_and_a_population_of_parts(batches, norm):
    learner = Regression(norm)
    hyper = OWN["batch_norm"]
    inside = Population(Accumulate(learner, 4), P, batches=batches, hyper=hyper)
    outside = Accumulate(Population(learner, P, batches=batches, hyper=hyper), 4)
    state = double(inside.init(0))
    batch = double(regression_batch(*([P] if batches == "own" else []), B))
    alone = [Accumulate(learner, 4).grads(state[i], batch[i] if batches == "own" else batch)
             for i in range(P)]  # fmt: skip
    update, metrics = inside.grads(state, batch)
    assert_equal(update, torch.stack([pair[0] for pair in alone]), **CLOSE)
    told = torch.stack([pair[1] for pair in alone])
    if batches == "shared":
        told = TensorDict({**dict(told.items()), "priority": told["priority"].mean(0)})
    told = TensorDict(dict(told.items()))
    assert_equal(metrics, told, **CLOSE)
    update, metrics = outside.grads(state, batch)
    assert_equal(update, torch.stack([pair[0] for pair in alone]), **CLOSE)
    assert_equal(metrics, told, **CLOSE)
    assert metrics["loss"].shape == metrics["grad_norm"].shape == metrics["of", "largest"].shape
    if not norm:  # the loss is a mean over samples: parts are as the whole
        whole, _ = Population(learner, P, batches=batches).grads(state, batch)
        assert_equal(update, whole, **CLOSE)


@pytest.mark.parametrize("kind", ["efficientzero", "ilql"])
def test_an_agent_in_parts(kind):
    learner, batch_of = make(kind)
    inside = Population(Accumulate(learner, 2), P, hyper=OWN[kind])
    outside = Accumulate(Population(learner, P, hyper=OWN[kind]), 2)
    states = [double(inside.init(0)), double(outside.init(0))]
    assert_equal(*states)
    for step in range(2):
        batch = double(batch_of(B, seed=step))
        pairs = [updated(*pair, batch) for pair in zip((inside, outside), states, strict=True)]
        states = [pair[0] for pair in pairs]
        assert_equal(*states, rtol=1e-6, atol=1e-8)
        assert_equal(pairs[1][1], pairs[0][1], rtol=1e-6, atol=1e-8)


def test_own_batches_that_can_not_be_cut_are_refused():
    learner = Accumulate(Population(Regression(), P, batches="own"), 3)
    with pytest.raises(ValueError, match=r"batch of 8 can't be cut into 3 .*\[1, 2, 4, 8\]"):
        learner.grads(learner.init(0), regression_batch(P, B))


# ---------------------------------------------------------------------- sizes of batches


@all_learners
@pytest.mark.parametrize("batches", ["shared", "own"])
def test_members_with_shorter_batches(kind, batches):
    learner, batch_of = make(kind)
    sizes = [6, B, 3, 6]
    population = Population(learner, 4, batches=batches, hyper={"batch_size": sizes})
    state = double(population.init(0))
    assert state["hyper", "batch_size"].tolist() == sizes
    batch = double(batch_of(*([4] if batches == "own" else []), B))
    alone = [learner.grads(state[i], (batch[i] if batches == "own" else batch)[:size])
             for i, size in enumerate(sizes)]  # fmt: skip
    update, metrics = population.grads(state, batch)
    assert_equal(update, torch.stack([pair[0] for pair in alone]), rtol=1e-6, atol=1e-9)
    for name in alone[0][1].keys():
        if name != "priority":
            told = torch.stack([pair[1][name] for pair in alone])
            assert_equal(
                TensorDict(found=metrics[name]), TensorDict(found=told), rtol=1e-6, atol=1e-9
            )
    if "priority" not in metrics.keys():
        return
    rows = torch.full((4, B), torch.nan, dtype=torch.float64)
    for i, size in enumerate(sizes):
        rows[i, :size] = alone[i][1]["priority"]
    wanted = rows if batches == "own" else rows.nanmean(0)
    torch.testing.assert_close(metrics["priority"], wanted, rtol=1e-6, atol=1e-9, equal_nan=True)
    after = population.apply(state.clone(), update)
    torch.testing.assert_close(after["hyper", "batch_size"], torch.tensor(sizes))
    for i in range(4):
        assert_equal(after[i], learner.apply(state[i].clone(), update[i].clone()), **CLOSE)


def test_as_long_as_the_batch_is_one_program():
    class Counting(Regression):
        calls = 0

        def grads(self, state, batch):
            self.calls += 1
            return super().grads(state, batch)

    learner = Counting()
    population = Population(learner, 4, grads="vmap", hyper={"batch_size": [B] * 4})
    state, batch = population.init(0), regression_batch(B)
    population.grads(state, batch)
    assert learner.calls == 1
    population.grads(with_hyper(state, {"batch_size": [4, B, 4, 2]}), batch)
    assert learner.calls == 4


def test_a_batch_that_is_too_short_is_refused():
    population = Population(Regression(), 2, hyper={"batch_size": [4, 9]})
    with pytest.raises(ValueError, match="batch_size is 9, and the batch has 8 samples"):
        population.grads(population.init(0), regression_batch(B))


def test_priorities_of_one_that_has_come_to_grief_are_not_asked():
    population = Population(Regression(), P)
    state, batch = population.init(0), regression_batch(B)
    alone = [Regression().grads(state[i], batch)[1]["priority"] for i in range(P)]
    state["params", "3", "weight"][1] = torch.nan
    found = population.grads(state, batch)[1]["priority"]
    torch.testing.assert_close(found, (alone[0] + alone[2]) / 2)


# ------------------------------------------------------------------------------ selection


def test_a_selection_is_an_index():
    population = Population(efficientzero(), P, hyper=OWN["efficientzero"])
    state, _ = updated(population, population.init(0), efficientzero_batch(B))
    parents = torch.tensor([2, 0, 2])
    chosen = state[parents]
    for i, parent in enumerate(parents.tolist()):
        assert_equal(chosen[i], state[parent])
    kept = state.clone()
    updated(population, chosen, efficientzero_batch(B, seed=2))
    assert_equal(state, kept)  # memory of its own


# ------------------------------------------------------------------------------ mistakes


def test_what_can_not_be_is_refused():
    learner = Regression()
    with pytest.raises(ValueError, match="size=0: a population has at least one member"):
        Population(learner, 0)
    with pytest.raises(ValueError, match="batches='each': they are 'shared' or 'own'"):
        Population(learner, 2, batches="each")
    with pytest.raises(ValueError, match="apply='own': it is 'stack', 'each', 'vmap' or None"):
        Population(learner, 2, apply="own")
    with pytest.raises(ValueError, match="grads='own': it is 'each', 'vmap', 'traced' or None"):
        Population(learner, 2, grads="own")
    with pytest.raises(ValueError, match="Regression takes no stack of members"):
        Population(learner, 2, apply="stack")
    with pytest.raises(ValueError, match=r"'learning_rat'; did you mean 'learning_rate'\?"):
        Population(learner, 2, hyper={"learning_rat": [0.1, 0.2]}).init(0)
    with pytest.raises(ValueError, match=r"'batchsize'; did you mean 'batch_size'\?"):
        Population(learner, 2, hyper={"batchsize": [1, 2]}).init(0)
    with pytest.raises(ValueError, match=r"no hyper-parameter 'xyz'\. It has: learning_rate, sc"):
        Population(learner, 2, hyper={"xyz": [1, 2]}).init(0)
    with pytest.raises(ValueError, match=r"scale is for 2 members and has shape \[3\]"):
        Population(learner, 2, hyper={"scale": [1.0, 2.0, 3.0]}).init(0)
    with pytest.raises(ValueError, match=r"batch_size=\[4, 0\]: each is at least 1"):
        Population(learner, 2, hyper={"batch_size": [4, 0]}).init(0)


def test_states_and_batches_of_other_shapes_are_refused():
    learner = Regression()
    population = Population(learner, 2)
    with pytest.raises(ValueError, match=r"state is \[P\] and this one is \[\]"):
        population.grads(learner.init(0), regression_batch(B))
    own = Population(learner, 2, batches="own")
    with pytest.raises(ValueError, match=r"batches='own' a batch is \[2, B\], got .* \[8\]"):
        own.grads(own.init(0), regression_batch(B))
    with pytest.raises(ValueError, match=r"a batch is \[2, B\], got .* \[3, 8\]"):
        own.grads(own.init(0), regression_batch(3, B))


def test_draws_within_a_program_are_refused():
    """Dropout's draws can't be repeated for each member."""
    trunk = dataclasses.replace(ilql().config.model.trunk, dropout=0.1)
    learner = ILQLLearner(ILQLConfig(model=ILQLModelConfig(trunk=trunk)))
    population = Population(learner, 2, grads="vmap")
    with pytest.raises(ValueError, match=r"set dropout=0\.0"):
        population.grads(population.init(0), ilql_batch(B))


def test_with_hyper_leaves_the_state_alone():
    state = Population(Regression(), 2).init(0)
    changed = with_hyper(state, {"scale": torch.tensor([2, 3]), "batch_size": [4, 5]})
    assert state["hyper", "scale"].tolist() == [1, 1] and "batch_size" not in state["hyper"].keys()
    assert changed["hyper", "scale"].tolist() == [2, 3]
    assert changed["hyper", "scale"].dtype == torch.float32
    assert changed["hyper", "batch_size"].dtype == torch.int64
