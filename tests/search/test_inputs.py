"""Inputs of other dtypes and layouts give the same tree."""

import pytest
import torch

from raffia.search import PUCT, RecurrentOutput, gumbel_policy, muzero_policy, search

from .table import BACKENDS, GAME, STATES, B, assert_same, random_table, run
from .table import root as root_of


def strided(tensor):
    """The same numbers with gaps between them."""
    return None if tensor is None else torch.stack([tensor, tensor], -1)[..., 0]


def rounded(table):
    """Rounds to numbers that bfloat16 can represent."""
    for tensor in (table.reward, table.value, table.logits, table.discount):
        tensor.copy_(tensor.bfloat16())
    return table


CHANGES = {
    "strided": strided,
    "float64": lambda t: t.double() if t is not None and t.is_floating_point() else t,
    "bfloat16": lambda t: t.bfloat16() if t is not None and t.is_floating_point() else t,
    "gradients": lambda t: (
        t.clone().requires_grad_() if t is not None and t.is_floating_point() else t
    ),
    "integers": lambda t: t.to(torch.int8) if t is not None and t.dtype == torch.int64 else t,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("change", CHANGES)
def test_layout_and_dtype_do_not_matter(change, backend):
    table, to = rounded(random_table(3, **GAME)), CHANGES[change]

    def model(embedding, action):
        output, after = table(embedding, action)
        return output._replace(**{n: to(t) for n, t in output._asdict().items()}), after

    root = table.root(STATES)
    fields = ("prior_logits", "value", "mask", "to_play")
    other = root._replace(**{name: to(getattr(root, name)) for name in fields})
    gamma = torch.tensor([0.5, 0.75, 1.0, 0.0])
    settings = {"num_simulations": 12, "backend": backend}
    tree = search(other, model, discount=to(gamma), **settings)
    assert_same(tree, search(root, table, discount=gamma, **settings))


@pytest.mark.parametrize("policy", [muzero_policy, gumbel_policy])
def test_half_precision_policies_give_weights_that_sum_to_one(policy):
    table = random_table(3)
    root = table.root(STATES)
    root = root._replace(prior_logits=root.prior_logits.bfloat16(), value=root.value.bfloat16())
    plan = policy(root, table, 9, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(plan.action_weights.sum(-1), torch.ones(4))
    assert plan.action.dtype == torch.int64
    assert plan.action_weights.dtype == plan.root_value.dtype == torch.float32


def test_actions_of_several_numbers_reach_the_model():
    """Each choice stands for two numbers that only the parent state contains."""
    table = random_table(3, states=8, actions=4)
    vectors = torch.randn(8, 4, 2, generator=torch.Generator().manual_seed(0))

    def model(embedding, action):
        assert action.shape == (len(embedding["state"]), 2)
        here = vectors[embedding["state"]]
        choice = (here == action.unsqueeze(1)).all(-1)
        assert (choice.sum(-1) == 1).all()
        output, after = table(embedding, choice.int().argmax(-1))
        return output._replace(actions=vectors[after["state"]]), after

    root = table.root(STATES)._replace(actions=vectors[STATES])
    plain = search(table.root(STATES), table, num_simulations=20)
    for backend in BACKENDS:
        tree = search(root, model, num_simulations=20, backend=backend)
        assert tree.data["actions"].shape == (4, 21, 4, 2)
        del tree.data["actions"]
        assert_same(tree, plain)
    plan = gumbel_policy(root, model, 20, gumbel_scale=0.0)
    chosen = gumbel_policy(table.root(STATES), table, 20, gumbel_scale=0.0).action
    assert torch.equal(plan.action, vectors[STATES, chosen])


@pytest.mark.parametrize("backend", BACKENDS)
def test_lazy_negations_and_conjugates_are_resolved(backend):
    turned = torch.complex(torch.zeros(B), torch.full((B,), 2.0)).conj().imag
    assert turned.is_neg()
    start = root_of(value=turned, embedding=torch.full((B, 1), 1 + 2j))

    def model(embedding, action):
        output = RecurrentOutput(turned * 0, turned, torch.zeros(B, 3))
        return output, embedding.conj()

    tree = run(start, model, backend=backend, keep_embeddings=True, root_value="include")
    assert (tree.data["raw_value"] == -2).all()
    assert (tree.embeddings[:, 1, 0] == 1 - 2j).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_embeddings_and_keys_of_states_are_read_and_stored(backend):
    table = random_table(3)

    def model(embedding, action):
        output, after = table(embedding, action)
        return output, {name: strided(leaf) for name, leaf in after.items()}

    root = table.root(STATES)
    other = root._replace(embedding={n: strided(leaf) for n, leaf in root.embedding.items()})
    settings = {"num_simulations": 12, "backend": backend}
    assert_same(search(other, model, **settings), search(root, table, **settings))
    tree = search(root, table, transpositions=lambda e: e["state"], **settings)
    other = search(root, table, transpositions=lambda e: strided(e["state"]), **settings)
    assert_same(other, tree)


def test_seeds_simulations_and_discounts_may_have_other_dtypes():
    table, seeds = random_table(3), torch.tensor([3, -9, 200, 0])
    root, budget, gamma = table.root(STATES), torch.tensor([3, 9, 1, 4]), [0.5, 0.9, 1.0, 0.0]
    for backend in BACKENDS:
        trees = [
            search(
                *(root, table),
                select=PUCT(first_visit="value", ties="random", tie_seed=tie_seed),
                num_simulations=number,
                discount=discount,
                backend=backend,
            )
            for tie_seed, number, discount in (
                (seeds, budget, torch.tensor(gamma)),
                (seeds.to(torch.int16), budget.to(torch.int16), gamma),
            )
        ]
        assert_same(*trees)
    assert_same(run(num_simulations=torch.tensor(5)), run(num_simulations=5))
