"""Each member of a population learns as it would alone, with any learner."""

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
from tests.algorithms.efficientzero.small import assert_close
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
from tests.marks import slow_among


def metrics_of(alone):
    """The metrics of a population of these members; priorities of shared batches are means."""
    metrics = dict(torch.stack(alone).items())
    if "priority" in metrics:
        metrics["priority"] = metrics["priority"].mean(0)
    return TensorDict(metrics)


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
    assert_close(found, expected, equal_nan=True, **(tolerance or EXACT))


def members_of(population, seed=0):
    """The initial states of the members of a population; in float64."""
    state = double(population.init(seed))
    return [state[i].clone() for i in range(population.size)]


@all_learners
@pytest.mark.parametrize("batches", ["shared", "own"])
def test_a_population_of_one_equals_plain_training_bit_for_bit(kind, batches):
    learner, batch_of = make(kind)
    population: Learner = Population(learner, 1, batches=batches)
    plain, state = learner.init(4), population.init(4)
    assert_equal(state[0], plain)
    for step in range(5):
        batch = batch_of(B, seed=step)
        plain, expected = updated(learner, plain, batch)
        state, metrics = updated(population, state, batch[None] if batches == "own" else batch)
        assert_equal(state[0], plain)
        if batches == "shared" and "priority" in metrics.keys():
            assert metrics["priority"].shape == (B,)
            metrics["priority"] = metrics["priority"][None]
        assert_equal(TensorDict(dict(metrics.items()), batch_size=[1])[0], expected)
    assert state["step"].tolist() == [5] and step_of(state) == 5


PATHS = [
    *((kind, "vmap", apply) for kind in LEARNERS for apply in ("each", "vmap")),
    *((kind, "vmap", "stack") for kind in ("efficientzero", "ilql")),
    ("ilql", "each", "stack"),
]


ALSO = [("efficientzero", "vmap", apply) for apply in ("each", "vmap")]


@pytest.mark.parametrize(("kind", "grads", "apply"), slow_among(PATHS, *ALSO))
def test_each_member_learns_as_alone_with_its_hyper_parameters(kind, grads, apply):
    # in float64: Adam makes steps of rounding errors where a gradient is zero
    learner, batch_of = make(kind)
    population = Population(learner, P, hyper=OWN[kind], grads=grads, apply=apply)
    alone = members_of(population)
    state = torch.stack([member.clone() for member in alone])
    for name, numbers in OWN[kind].items():
        hyper = state["hyper", name].float()
        torch.testing.assert_close(hyper, torch.tensor(numbers), rtol=1e-6, atol=0)
    for step in range(4):
        batch = double(batch_of(B, seed=step))
        pairs = [updated(learner, member, batch) for member in alone]
        alone = [pair[0] for pair in pairs]
        state, metrics = updated(population, state, batch)
        # rates are of single precision where one program steps
        close = {"rtol": 1e-6, "atol": 1e-8} if apply != "vmap" else {"rtol": 1e-5, "atol": 2e-6}
        assert_equal(state, torch.stack(alone), **close)
        assert_equal(metrics, metrics_of([pair[1] for pair in pairs]), **close)
    assert state["step"].tolist() == [4] * P
    before = state.clone(), batch.clone()  # gradients do not change their arguments
    population.grads(state, batch)
    assert_equal(state, before[0])
    assert_equal(batch, before[1])
    params = state["params"].values(True, True)
    assert all((leaf[0] != leaf[1]).any() for leaf in params)


def test_apply_each_reuses_the_memory_of_the_state():
    population = Population(efficientzero(), P)
    state = population.init(0)
    before = {key: leaf.data_ptr() for key, leaf in state.items(True, True)}
    state, _ = updated(population, state, efficientzero_batch(B))
    moved = [key for key, leaf in state.items(True, True) if leaf.data_ptr() != before[key]]
    assert {key[0] if isinstance(key, tuple) else key for key in moved} <= {"buffers", "step"}


def test_members_with_networks_of_different_forms():
    """Depth, width and activation are data of a network, so members may differ in them."""
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


@pytest.mark.parametrize("batches", ["shared", "own"])
@pytest.mark.parametrize("norm", [False, True])
def test_accumulating_a_population_equals_a_population_of_accumulating_learners(batches, norm):
    learner, options = Regression(norm), {"batches": batches, "hyper": OWN["batch_norm"]}
    inside = Population(Accumulate(learner, 4), P, **options)
    outside = Accumulate(Population(learner, P, **options), 4)
    state = double(inside.init(0))
    assert_equal(inside.init(0), outside.init(0))
    weight = state["params", "0", "weight"]
    assert not weight[0].equal(weight[1]) and not weight[1].equal(weight[2])
    own = [P] if batches == "own" else []
    batch = double(regression_batch(*own, B))
    alone = [Accumulate(learner, 4).grads(state[i], batch[i] if own else batch) for i in range(P)]
    expected = [pair[1] for pair in alone]
    expected = TensorDict(dict(torch.stack(expected).items())) if own else metrics_of(expected)
    for population in (inside, outside):
        update, metrics = population.grads(state, batch)
        assert_equal(update, torch.stack([pair[0] for pair in alone]), **CLOSE)
        assert_equal(metrics, expected, **CLOSE)
    assert metrics["loss"].shape == metrics["grad_norm"].shape == metrics["of", "largest"].shape
    if not norm:  # the loss is a mean over samples: parts are as the whole
        whole, _ = Population(learner, P, batches=batches).grads(state, batch)
        assert_equal(update, whole, **CLOSE)


@all_learners
@pytest.mark.parametrize("batches", ["shared", "own"])
def test_members_with_shorter_batches(kind, batches):
    learner, batch_of = make(kind)
    sizes, close = [6, B, 3, 6], {"rtol": 1e-6, "atol": 1e-9}
    population = Population(learner, 4, batches=batches, hyper={"batch_size": sizes})
    state = double(population.init(0))
    assert state["hyper", "batch_size"].tolist() == sizes
    own = [4] if batches == "own" else []
    batch = double(batch_of(*own, B))
    alone = [learner.grads(state[i], (batch[i] if own else batch)[:size])
             for i, size in enumerate(sizes)]  # fmt: skip
    update, metrics = population.grads(state, batch)
    assert_equal(update, torch.stack([pair[0] for pair in alone]), **close)
    expected = [pair[1].exclude("priority") for pair in alone]
    assert_equal(metrics.exclude("priority"), metrics_of(expected), **close)
    if "priority" not in metrics.keys():
        return
    rows = torch.full((4, B), torch.nan, dtype=torch.float64)
    for i, size in enumerate(sizes):
        rows[i, :size] = alone[i][1]["priority"]
    wanted = rows if own else rows.nanmean(0)
    torch.testing.assert_close(metrics["priority"], wanted, **close, equal_nan=True)
    after = population.apply(state.clone(), update)
    torch.testing.assert_close(after["hyper", "batch_size"], torch.tensor(sizes))
    for i in range(4):
        assert_equal(after[i], learner.apply(state[i].clone(), update[i].clone()), **CLOSE)


def test_full_batches_are_one_program_and_a_diverged_member_has_no_priorities():
    class Counting(Regression):
        calls = 0

        def grads(self, state, batch):
            self.calls += 1
            return super().grads(state, batch)

    learner, batch = Counting(), regression_batch(B)
    population = Population(learner, 4, grads="vmap", hyper={"batch_size": [B] * 4})
    state = population.init(0)
    population.grads(state, batch)
    assert learner.calls == 1
    population.grads(with_hyper(state, {"batch_size": [4, B, 4, 2]}), batch)
    assert learner.calls == 4
    population = Population(Regression(), P)
    state = population.init(0)
    alone = [Regression().grads(state[i], batch)[1]["priority"] for i in range(P)]
    state["params", "3", "weight"][1] = torch.nan
    found = population.grads(state, batch)[1]["priority"]
    torch.testing.assert_close(found, (alone[0] + alone[2]) / 2)


@pytest.mark.parametrize("grads", [None, "traced", "vmap"])
def test_what_one_program_cannot_compute_each_member_does(grads):
    class Normed(Regression):
        def grads(self, state, batch):
            torch.nn.functional.normalize(state["params", "3", "weight"], out=torch.zeros(0))
            return super().grads(state, batch)

    population, batch = Population(Normed(), P, grads=grads), regression_batch(B)
    state = population.init(0)
    if grads == "vmap":
        with pytest.raises(RuntimeError, match="div.out"):
            population.grads(state, batch)
        return
    with pytest.warns(UserWarning, match="one after the other, since .*div.out"):
        found = population.grads(state, batch)
    expected = Population(Regression(), P, grads="each").grads(state, batch)
    for one, other in zip(found, expected, strict=True):
        assert_equal(one, other)
    assert_equal(population.grads(state, batch)[0], found[0])  # without another warning


def shared(batch, state=None, **options):
    """Gradients of two members."""
    return grads_of(Population(Regression(), 2, **options), batch, state)


def grads_of(population, batch, state=None):
    return population.grads(population.init(0) if state is None else state, batch)


def starts(**hyper):
    return Population(Regression(), 2, hyper=hyper).init(0)


def with_dropout():
    """Dropout's draws cannot be repeated for each member."""
    trunk = dataclasses.replace(ilql().config.model.trunk, dropout=0.1)
    learner = ILQLLearner(ILQLConfig(model=ILQLModelConfig(trunk=trunk)))
    grads_of(Population(learner, 2, grads="vmap"), ilql_batch(B))


REFUSED = [
    (lambda of: of(0), "size=0 must be at least 1"),
    (lambda of: of(2, batches="each"), "batches='each' must be one of 'shared', 'own'"),
    (lambda of: of(2, apply="own"), "apply='own' must be one of 'stack', 'each', 'vmap', None"),
    (lambda of: of(2, grads="own"), "grads='own' must be one of 'each', 'vmap', 'traced', None"),
    (lambda of: of(2, apply="stack"), "not supported by Regression"),
    (lambda of: starts(learning_rat=[0.1, 0.2]), r"'learning_rat'; did you mean 'learning_rate'"),
    (lambda of: starts(batchsize=[1, 2]), r"'batchsize'; did you mean 'batch_size'\?"),
    (lambda of: starts(xyz=[1, 2]), r"no hyper-parameter 'xyz'\. It has: learning_rate, sc"),
    (lambda of: starts(scale=[1.0, 2.0, 3.0]), r"scale has shape \[3\], but there are 2 members"),
    (lambda of: starts(batch_size=[4, 0]), r"batch_size=\[4, 0\] must be .* of at least 1"),
    (lambda of: starts(batch_size=[4, 2.5]), r"batch_size=\[4, 2.5\] must be whole numbers"),
    (lambda of: shared(ROWS, Regression().init(0)), r"must be \[P\], but this one is \[\]"),
    (lambda of: shared(ROWS, batches="own"), r"'own' a batch must be \[2, B\]; got .* \[8\]"),
    (
        lambda of: shared(regression_batch(3, B), batches="own"),
        r"must be \[2, B\]; got .* \[3, 8\]",
    ),
    (lambda of: shared(ROWS, hyper={"batch_size": [4, 9]}), "is 9, but the batch has 8 samples"),
    (
        lambda of: grads_of(Accumulate(of(P, batches="own"), 3), regression_batch(P, B)),
        r"batch of 8 cannot be split into 3 .*\[1, 2, 4, 8\]",
    ),
    (lambda of: with_dropout(), r"set dropout=0\.0"),
]


ROWS = regression_batch(B)


class Plain:
    """A learner of one number, without hyper-parameters and buffers."""

    def init(self, seed):
        return TensorDict(params=TensorDict(w=torch.tensor(float(seed % 7))), step=torch.tensor(0))

    def grads(self, state, batch):
        error = state["params", "w"] - batch["x"].mean()
        return TensorDict(grads=TensorDict(w=error)), TensorDict(loss=error.square())

    def apply(self, state, update):
        return TensorDict(params=state["params"] - update["grads"], step=state["step"] + 1)


def test_a_learner_may_have_no_hyper_parameters():
    population, batch = Population(Plain(), 3), TensorDict(x=torch.full((4,), 2.0), batch_size=[4])
    state, metrics = updated(population, population.init(seed=0), batch)
    assert state["params", "w"].tolist() == [2.0] * 3 and metrics["loss"].shape == (3,)
    with pytest.raises(ValueError, match="no hyper-parameter 'w'. It has: none"):
        with_hyper(state, {"w": [1.0] * 3})


def test_invalid_calls_are_refused():
    for call, match in REFUSED:
        with pytest.raises(ValueError, match=match):
            call(lambda *args, **options: Population(Regression(), *args, **options))
    state = starts()
    changed = with_hyper(state, {"scale": torch.tensor([2, 3]), "batch_size": [4, 5]})
    assert state["hyper", "scale"].tolist() == [1, 1] and "batch_size" not in state["hyper"].keys()
    assert changed["hyper", "scale"].tolist() == [2, 3]
    assert changed["hyper", "scale"].dtype == torch.float32
    assert changed["hyper", "batch_size"].dtype == torch.int64
