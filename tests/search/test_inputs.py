"""Inputs of other dtypes and layouts give the same tree."""

import functools

import pytest
import torch

from raffia.algorithms.efficientzero.inference import fold
from raffia.algorithms.efficientzero.model import EfficientZeroModelMLP
from raffia.search import GaussianSampler, ValuePrefix, gumbel_policy, sampled_policy, search
from raffia.search.policies import root_dirichlet, root_gumbel

from .table import BACKENDS, GAME, STATES, assert_same, random_table


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


def folded(**options):
    """A model in float32 that searches run as a compiled step."""
    network = EfficientZeroModelMLP(4, 3, **options).float().eval()
    draw = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=draw)
    return fold(network)


def results(table, root, states, observation):
    """Trees and noise by all kernels, of inputs in float32."""
    budget = states + 6
    yield from (search(root, table, num_simulations=budget, backend=b) for b in BACKENDS)
    yield gumbel_policy(root, table, 9, root_gumbel=root_gumbel(states, 4)).tree
    yield root_dirichlet(states, 4, 0.3)
    with torch.device("cpu"):
        discrete = folded(continuous_action_space=False)
        continuous = folded(continuous_action_space=True)
    options = {"num_simulations": 9, "value_prefix": ValuePrefix()}
    yield search(discrete.root(observation), discrete.recurrent_fn, **options)
    yield sampled_policy(
        continuous.root(observation),
        continuous.recurrent_fn,
        sampler=GaussianSampler(5, low=-1.0, high=1.0),
        policy=functools.partial(gumbel_policy, **options, root_gumbel=states.new_zeros(4, 5)),
        seed=states,
    ).tree


@pytest.mark.parametrize(
    "change",
    [
        functools.partial(torch.set_default_dtype, torch.float64),
        functools.partial(torch.set_default_device, "meta"),
    ],
    ids=["dtype", "device"],
)
def test_the_defaults_of_torch_do_not_matter(change):
    table = random_table(3, **GAME)
    arguments = table, table.root(STATES), STATES, torch.ones(4, 4)
    expected = list(results(*arguments))
    change()
    try:
        found = list(results(*arguments))
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype and one.equal(other)
        else:
            assert_same(one, other)
