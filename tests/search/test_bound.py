"""A model that works in the search's memory gives the tree that it gives when called."""

import pytest
import torch

from raffia.search import PUCT, Gumbel, RecurrentOutput, ValuePrefix, gumbel_noise, search

from .table import BACKENDS, STATES, assert_same, random_table

BUDGET = torch.tensor([15, 3, 20, 9])


class Renamed:
    """A table whose prefix stands where a value prefix is reset by default."""

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
    """A model that reads and writes rows of the search's memory; being called is refused."""

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
def test_a_bound_model_gives_the_tree_of_the_called_one(kind, backend):
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
    """A table whose `bind` says that it cannot, here."""

    def __init__(self, table) -> None:
        self.table, self.binds = table, 0

    def __call__(self, embedding, action) -> tuple[RecurrentOutput, dict]:
        return self.table(embedding, action)

    def bind(self, memory):
        self.binds += 1
        return None


def test_a_model_that_declines_is_called():
    table = random_table(2)
    model = Declines(table)
    tree = search(table.root(STATES), model, num_simulations=9)
    assert model.binds == 1
    assert_same(tree, search(table.root(STATES), table, num_simulations=9))


def test_a_model_is_not_bound_where_it_would_have_to_write_more():
    """Sampled actions, keys of states and resets of other entries have no place in it."""
    model = Declines(random_table(2, labels=True))
    search(model.table.root(STATES), model, num_simulations=9)
    assert model.binds == 0
    model = Declines(random_table(2))
    root = model.table.root(STATES)
    search(root, model, num_simulations=9, transpositions=lambda e: e["state"])
    assert model.binds == 0
    model = Declines(random_table(2, prefixed=True))
    prefix = ValuePrefix(2, ("prefix",))
    search(model.table.root(STATES), model, num_simulations=9, value_prefix=prefix)
    assert model.binds == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_players_of_a_bound_model_take_turns(backend):
    table, settings = Renamed(random_table(2)), {"num_simulations": 15, "backend": backend}
    root = table.root(STATES)._replace(to_play=torch.tensor([1, 2, 2, 1]))
    bound = search(root, InMemory(table), **settings)
    assert_same(bound, search(root, table, **settings))
    assert set(bound.data["to_play"][bound.data["visits"] > 0].tolist()) == {1, 2}
    assert (bound.data["discount"][:, 1:] < 0).all()
