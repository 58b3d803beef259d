"""Embeddings may be any container, and the caller's tensors are never written to."""

import collections

import pytest
import torch

from raffia.search import RecurrentOutput, RootOutput, ValuePrefix, search
from raffia.search.embeddings import Embeddings
from raffia.tensordict import TensorClass, TensorDict

from .table import BACKENDS, equal, random_table

STATES = torch.arange(6)


Pair = collections.namedtuple("Pair", "number rest")


class Numbers(TensorClass):
    number: torch.Tensor


def wrap_tensordict(number):
    inner = {"deep": number.double().unsqueeze(-1).repeat(1, 3)}
    return TensorDict({"number": number, "inner": inner}, batch_size=number.shape)


CONTAINERS = {
    "float": (
        lambda number: number.float().view(-1, 1, 1).repeat(1, 2, 3),
        lambda e: e[:, 1, 2].long(),
    ),
    "tensordict": (wrap_tensordict, lambda e: e["inner", "deep"][:, 1].long()),
    "a dict in any order": (
        lambda number: (
            {"a": [number], "b": number > 2} if number[0] % 2 else {"b": number > 2, "a": [number]}
        ),
        lambda e: e["a"][0],
    ),
    "tuple": (lambda number: (number.to(torch.int16), (number,)), lambda e: e[0].long()),
    "tensorclass": (
        lambda number: Numbers(number.float(), batch_size=number.shape),
        lambda e: e.number.long(),
    ),
    "a tensorclass in a dict": (
        lambda number: {"a": Numbers(number.float(), batch_size=number.shape)},
        lambda e: e["a"].number.long(),
    ),
    "namedtuple": (lambda number: Pair(number.to(torch.uint8), {}), lambda e: e.number.long()),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("container", CONTAINERS)
def test_an_embedding_is_any_container_of_tensors(container, backend):
    wrap, unwrap = CONTAINERS[container]
    table = random_table(6)
    kinds = []

    def model(embedding, action):
        kinds.append(type(embedding))
        state = {"state": unwrap(embedding), "prefix": torch.zeros(len(action))}
        output, after = table(state, action)
        return output, wrap(after["state"])

    root = table.root(STATES)._replace(embedding=wrap(STATES))
    budget = torch.tensor([12, 5, 12, 1, 7, 12])
    settings = {"num_simulations": budget, "backend": backend}
    tree = search(root, model, keep_embeddings=True, **settings)
    plain = search(table.root(STATES), table, keep_embeddings=True, **settings)
    assert equal(tree, plain)
    assert set(kinds) == {type(root.embedding)}
    assert type(tree.embeddings) is type(root.embedding)
    states = plain.embeddings["state"].flatten()
    flat = torch.utils._pytree.tree_map(lambda leaf: leaf.flatten(0, 1), tree.embeddings)
    assert torch.equal(unwrap(flat), states)


@pytest.mark.parametrize(
    ("embedding", "key", "leaves"),
    [
        (lambda x: TensorDict(a=x, b=dict(c=x, d=x), batch_size=[2]), ("b", "d"), [2]),
        (lambda x: TensorDict(a=x, b=dict(c=x, d=x), batch_size=[2]), "b", [1, 2]),
        (lambda x: {"a": x, "b": {"c": x, "d": x}}, "b", [1, 2]),
        (lambda x: {"a": x, "b": {"c": x, "d": x}}, ("b", "d"), [2]),
        (lambda x: (x, [x, x], x), 1, [1, 2]),
        (lambda x: Pair(x, {"a": x}), "rest", [1]),
    ],
)
def test_a_value_prefix_resets_entries_by_key_index_or_field(embedding, key, leaves):
    prefix = ValuePrefix(3, reset_keys=(key,))
    made = Embeddings(embedding(torch.zeros(2)), 2, 3, prefix, compiled=False)
    assert made.reset_leaves(prefix) == leaves


def test_a_model_may_write_into_its_input():
    def model(embedding, action):
        embedding.mul_(3).add_(action + 1).remainder_(101)
        rows = len(action)
        value = (embedding % 7).float()
        output = RecurrentOutput(torch.zeros(rows), value, torch.zeros(rows, 3))
        return output, embedding

    def polite(embedding, action):
        return model(embedding.clone(), action)

    start = torch.arange(6)
    root = RootOutput(torch.zeros(6, 3), torch.zeros(6), start)
    for backend in BACKENDS:
        settings = {"num_simulations": 20, "backend": backend, "keep_embeddings": True}
        rude_tree, tree = search(root, model, **settings), search(root, polite, **settings)
        assert equal(rude_tree, tree)
        assert torch.equal(rude_tree.embeddings, tree.embeddings)
        assert torch.equal(start, torch.arange(6))


def test_no_gradient_is_recorded_and_embeddings_are_returned_on_demand_only():
    table = random_table(6)
    weight = torch.ones((), requires_grad=True)

    def model(embedding, action):
        output, embedding = table(embedding, action)
        return output._replace(value=weight * output.value), embedding

    tree = search(table.root(STATES), model, num_simulations=4)
    assert not tree.value().requires_grad and tree.embeddings is None
