"""Compiled kernels and tensor operations give the same tree, bit for bit, whatever the options."""

import itertools

import pytest
import torch

from raffia.search import PUCT, Gumbel, ValuePrefix, gumbel_noise, search

from .table import STATES, assert_same, random_table

BUDGET = torch.tensor([9, 1, 16, 12])
GAMMA = torch.tensor([0.997, 0.9, 1.0, 0.5])
SEEDS = torch.tensor([5, -1, 2**63 - 1, -(2**63)])

TABLES = {
    "plain": {},
    "game": {"players": True, "illegal": 0.3, "over": 0.3},
    "discounts": {"discounts": True, "illegal": 0.3, "actions": 5},
    "sampled": {"labels": True, "players": True, "discounts": True, "over": 0.2},
}
PUCTS = [
    dict(zip(("first_visit", "normalize", "count_own"), choice, strict=True))
    for choice in itertools.product(
        ("prior", "value"), ("running", "tree", "siblings"), (False, True)
    )
]
WAYS = ("states", "shared", "prefix")  # one node a way, one node a state, value prefixes


def of_state(embedding):
    return embedding["state"]


def both(root, model, **settings):
    """The trees of the two back ends; settings may be functions, called for each."""
    return [search(root, model, backend=name, **settings) for name in ("reference", "compiled")]


def settings_of(way, number):
    """Settings that differ from case to case, so that each option meets each."""
    return {
        "num_simulations": BUDGET,
        "discount": GAMMA if number % 2 else 0.9,
        "root_value": ("exclude", "include", "zero")[number % 3],
        "max_depth": (None, None, None, 2, 4)[number % 5],
        "transpositions": of_state if way == "shared" else None,
        "value_prefix": ValuePrefix(1 + number % 3, ("prefix",)) if way == "prefix" else None,
    }


def assert_puct_equal(kind, way, numbers) -> None:
    for number in numbers:
        options = PUCTS[number]
        table = random_table(number, **TABLES[kind], prefixed=way == "prefix", states=10)
        if options["normalize"] == "running":
            options = options | {"root_in_range": number % 4 < 2, "c_init": 0.3 + number % 4}
        if number % 3 == 0:
            options = options | {"ties": "random", "tie_seed": SEEDS}
        settings = settings_of(way, number)
        assert_same(*both(table.root(STATES), table, select=PUCT(**options), **settings))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", TABLES)
def test_puct_trees_are_equal_bit_for_bit(kind, way):
    """A third of the options for each kind of table, all of them over the four kinds."""
    assert_puct_equal(kind, way, range((list(TABLES).index(kind) + WAYS.index(way)) % 3, 12, 3))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", TABLES)
def test_puct_trees_of_all_options_are_equal_bit_for_bit(kind, way):
    assert_puct_equal(kind, way, range(12))


GUMBELS = [(16, 0.1, 50.0), (2, 1.0, 5.0), (1, 0.01, 200.0), (3, 0.1, 0.0)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", TABLES)
def test_gumbel_trees_are_equal_bit_for_bit(kind, way):
    """Half of the options for each kind of table, all of them over two kinds."""
    assert_gumbel_equal(kind, way, range((list(TABLES).index(kind) + WAYS.index(way)) % 2, 4, 2))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", TABLES)
def test_gumbel_trees_of_all_options_are_equal_bit_for_bit(kind, way):
    assert_gumbel_equal(kind, way, range(4))


def assert_gumbel_equal(kind, way, numbers) -> None:
    for number in numbers:
        considered, value_scale, maxvisit_init = GUMBELS[number]
        table = random_table(50 + number, **TABLES[kind], prefixed=way == "prefix", states=10)
        noise = gumbel_noise((4, table.next.shape[1]), torch.Generator().manual_seed(number))
        select = Gumbel(
            root_gumbel=noise,
            max_considered=considered,
            value_scale=value_scale,
            maxvisit_init=maxvisit_init,
        )
        assert_same(*both(table.root(STATES), table, select=select, **settings_of(way, number)))


@pytest.mark.parametrize("gumbel", [False, True])
def test_trees_of_extreme_numbers_are_equal_bit_for_bit(gumbel):
    """Very different logits, tiny priors, values of all sizes and 0, ties everywhere."""
    draw = torch.Generator().manual_seed(0)
    for seed in range(4):
        table = random_table(seed, actions=7)
        table.logits.mul_(50)
        table.logits[torch.rand(table.logits.shape, generator=draw) < 0.2] = -torch.inf
        table.logits[:, 3] = 1e30
        table.logits[[1, 4], :6] = -torch.inf  # one action has all of the prior
        table.logits[[1, 4], 6] = 1e-20
        table.value.mul_(10.0 ** torch.arange(-20, 22, 3)[: len(table.value)])
        table.reward[torch.rand(table.reward.shape, generator=draw) < 0.5] = 0.0
        noise = gumbel_noise((4, 7), torch.Generator().manual_seed(seed))
        select = Gumbel(root_gumbel=noise) if gumbel else PUCT(c_init=20.0)
        trees = both(table.root(STATES), table, num_simulations=20, select=select)
        assert_same(*trees)


@pytest.mark.slow  # tracing the loop takes most of it
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_the_reference_is_the_same_under_torch_compile():
    table = random_table(4, illegal=0.3, over=0.2, players=True)
    settings = {"num_simulations": 3, "backend": "reference"}
    root = table.root(STATES)
    compiled = torch.compile(search, backend="aot_eager")
    try:
        assert_same(search(root, table, **settings), compiled(root, table, **settings))
    finally:
        torch.compiler.reset()
