"""A model bound to the search's memory gives the same tree as when it is called."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from raffia.functional.draws import child_seed
from raffia.jit.kernel import step
from raffia.search import (
    PUCT,
    CategoricalSampler,
    GaussianSampler,
    Gumbel,
    RecurrentOutput,
    RootOutput,
    SearchMemory,
    ValuePrefix,
    gumbel_noise,
    search,
    with_sampled_actions,
)
from raffia.search.kernels import sampling
from raffia.search.state import SearchState
from raffia.tensordict.tensordict import TensorDict

from .table import BACKENDS, STATES, assert_same, random_table

BUDGET = torch.tensor([15, 3, 20, 9])


class Renamed:
    """A table whose prefix has the key at which value prefixes are reset by default."""

    def __init__(self, table) -> None:
        self.table = table

    def root(self, states, mask=None):
        root = self.table.root(states, mask)
        return root._replace(embedding=renamed(root.embedding, "prefix", "reward_hidden_state"))

    def __call__(self, embedding, action):
        output, after = self.table(renamed(embedding, "reward_hidden_state", "prefix"), action)
        return output, renamed(after, "prefix", "reward_hidden_state")


def renamed(embedding, old, new):
    return {"state": embedding["state"], new: embedding[old]}


class InMemory:
    """A model that reads and writes rows of the search's memory; it cannot be called."""

    def __init__(self, model) -> None:
        self.model, self.steps, self.binds = model, [], 0

    def __call__(self, embedding, action):
        raise AssertionError("called, though it was bound")

    def bind(self, memory):
        self.binds += 1

        def step(m: int) -> None:
            self.steps.append(m)
            parent, node = memory.parent_row[:m], memory.node_row[:m]
            before = {name: leaf[parent] for name, leaf in memory.embeddings.items()}
            output, after = self.model(before, memory.action[:m])
            sums = after["reward_hidden_state"]
            after["reward_hidden_state"] = torch.where(memory.reset[:m], 0.0, sums)
            for name, leaf in memory.embeddings.items():
                leaf[node] = after[name]
            memory.reward[:m] = output.reward
            memory.value[:m] = output.value
            memory.prior_logits[:m] = output.prior_logits

        return step


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["puct", "prefix", "gumbel"])
def test_a_bound_model_gives_the_same_tree_as_a_called_one(kind, backend):
    table = Renamed(random_table(2, prefixed=kind == "prefix"))
    mask = torch.rand(4, 3, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[:, 1] = True
    noise = gumbel_noise((4, 3), torch.Generator().manual_seed(0))
    settings = {
        "num_simulations": BUDGET,
        "value_prefix": ValuePrefix(2) if kind == "prefix" else None,
        "select": Gumbel(root_gumbel=noise) if kind == "gumbel" else PUCT(),
        "keep_embeddings": True,
        "backend": backend,
    }
    model = InMemory(table)
    bound = search(table.root(STATES, mask), model, **settings)
    called = search(table.root(STATES, mask), table, **settings)
    assert_same(bound, called)
    for name, leaf in called.embeddings.items():
        assert torch.equal(bound.embeddings[name], leaf), name
    assert model.binds == 1
    assert model.steps == [4] * 3 + [3] * 6 + [2] * 6 + [1] * 5


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_of_a_bound_model_is_named(backend):
    table = Renamed(random_table(2))
    table.table.value[5] = torch.nan
    with pytest.raises(ValueError, match=r"the model's value is NaN or infinite for root \d in"):
        search(table.root(STATES), InMemory(table), num_simulations=30, backend=backend)


class Declines:
    """A table whose `bind` declines."""

    def __init__(self, table) -> None:
        self.table, self.binds = table, 0

    def __call__(self, embedding, action) -> tuple[RecurrentOutput, dict]:
        return self.table(embedding, action)

    def bind(self, memory):
        self.binds += 1
        return None


def test_a_model_that_declines_or_would_have_to_write_more_is_called():
    """Sampled actions, keys of states and resets of other entries have no rows in the memory."""
    for table, options, binds in (
        (random_table(2), {}, 1),
        (random_table(2, labels=True), {}, 0),
        (random_table(2), {"transpositions": lambda e: e["state"]}, 0),
        (random_table(2, prefixed=True), {"value_prefix": ValuePrefix(2, ("prefix",))}, 0),
    ):
        model, root = Declines(table), table.root(STATES)
        tree = search(root, model, num_simulations=9, **options)
        assert model.binds == binds
        assert_same(tree, search(root, table, num_simulations=9, **options))


def nothing(context, rows):
    """The step of a model whose outputs are in memory already."""


class Answers:
    """A model bound to memory that returns the same parameters each time."""

    def __init__(self, parameters) -> None:
        self.parameters = parameters

    def bind(self, memory):
        memory.prior_logits[:] = self.parameters
        self.action = memory.action
        return self

    def native(self):
        return step(nothing), 0


def memory_of(seed, actions, parent, node, choice):
    return SearchMemory(
        embeddings=TensorDict(sampling_seed=seed, sampled_actions=actions, batch_size=[len(seed)]),
        parent_row=parent,
        node_row=node,
        action=choice,
        reset=torch.zeros(3, dtype=torch.bool),
        reward=torch.zeros(3),
        value=torch.zeros(3),
        prior_logits=torch.full((3, actions.shape[1]), 7.0),
    )


@pytest.mark.parametrize("kind", ["bounds", "fixed", "neither"])
def test_actions_are_chosen_and_drawn_in_memory_as_by_the_sampler(kind):
    bounds = {"low": torch.tensor([-1.0, 0.0]), "high": torch.tensor([1.0, 3.0])}
    options = {"bounds": bounds, "fixed": {"std": torch.tensor([0.5, 2.0])}, "neither": {}}[kind]
    sampler, generator = GaussianSampler(4, **options), torch.Generator().manual_seed(0)
    parameters = torch.rand(3, 2 if kind == "fixed" else 4, generator=generator) + 0.1
    seed = torch.randint(2**62, (9,), generator=generator)
    actions = torch.randn(9, 4, 2, generator=generator)
    actions[1, 3] = actions[1, 2]  # the child of equal actions is that of the first of them
    parent, node, choice = torch.tensor([[0, 1, 5], [6, 7, 8], [0, 3, 2]])
    before = seed.clone(), actions.clone()
    model, memory = Answers(parameters), memory_of(seed, actions, parent, node, choice)
    root = RootOutput(parameters, torch.zeros(3), TensorDict(batch_size=[3]))
    _, recurrent_fn = with_sampled_actions(root, model, sampler, seed[:3])
    bound = recurrent_fn.bind(memory)
    bound(3)
    assert model.action.equal(before[1][parent, choice])
    children = child_seed(before[0][parent], torch.tensor([0, 2, 2]))
    assert seed[node].equal(children) and seed[:6].equal(before[0][:6])
    torch.testing.assert_close(actions[node], sampler.sample(parameters, children).actions)
    assert actions[:6].equal(before[1][:6]) and bound.actions.data_ptr() == actions.data_ptr()
    assert not memory.prior_logits.any()
    model.parameters = parameters.index_fill(1, torch.tensor([1]), torch.inf)
    recurrent_fn.bind(memory)(2)
    assert memory.prior_logits[:2].isnan().all() and not memory.prior_logits[2].any()


def test_samplers_without_a_kernel_are_not_bound():
    parameters, seed = torch.ones(3, 4), torch.arange(9)
    actions = torch.zeros(9, 4, 2)
    memory = memory_of(seed, actions, *torch.tensor([[0, 1, 5], [6, 7, 8], [0, 3, 2]]))
    doubles = replace(memory, embeddings=memory.embeddings.to(torch.float64))
    root = RootOutput(parameters, torch.zeros(3), TensorDict(batch_size=[3]))
    normal, tables = GaussianSampler(4), Renamed(random_table(2))
    for model, sampler, prior, used, is_bound in (
        (Answers(parameters), normal, "uniform", memory, True),
        (Answers(parameters), normal, "density", memory, False),
        (Answers(parameters), CategoricalSampler(4), "sampling", memory, False),
        (Answers(parameters), normal, "sampling", doubles, False),
        (Answers(parameters), normal, "sampling", replace(memory, embeddings=actions), False),
        (InMemory(tables), normal, "sampling", memory, False),  # its step is no compiled one
        (tables, normal, "sampling", memory, False),
    ):
        _, recurrent_fn = with_sampled_actions(root, model, sampler, seed[:3], prior=prior)
        assert (recurrent_fn.bind(used) is not None) == is_bound


@pytest.mark.parametrize("order", [[0, 1], [1]])
def test_sampled_actions_of_visited_nodes_come_from_the_memory(order):
    parent = torch.tensor([[-1, 0, -1], [-1, -1, -1]])  # of two roots, one of which has a child
    entries = {"parent": parent, "actions": torch.zeros(2, 3, 4, 1)}
    state = SimpleNamespace(shape=(2, 3, 4), order=torch.tensor(order), entries=entries)
    memory = torch.arange(24.0).view(6, 4, 1) + 1  # node * roots + root
    SearchState.take_actions(state, memory)
    expected = torch.zeros(2, 3, 4, 1)
    expected[1, 0] = memory[1]
    if order == [0, 1]:  # else the first root is another thread's
        expected[0, 0], expected[0, 1] = memory[0], memory[2]
    assert entries["actions"].equal(expected)


def test_normal_numbers_equal_torch():
    p = (torch.arange(0, 2**23, 997).double() + 0.5) * 2.0**-23
    p = torch.cat([p, torch.tensor([2.0**-24, 1 - 2.0**-24, 1e-30], dtype=torch.float64)])
    found = torch.tensor([sampling.normal_quantile(x) for x in p.tolist()], dtype=torch.float64)
    torch.testing.assert_close(found, torch.special.ndtri(p), rtol=1e-14, atol=1e-15)
