"""The search of arrays equals a plain recursive one (plain_search.py) on random tables."""

import pytest
import torch

from raffia.search import PUCT, ValuePrefix, gumbel_noise, gumbel_policy, search

from .plain_search import Options, PlainSearch
from .table import BACKENDS, random_table

TABLES = {
    "plain": {},
    "illegal": {"illegal": 0.4, "over": 0.3, "actions": 4},
    "two_players": {"players": True},
    "game": {"players": True, "illegal": 0.3, "over": 0.3},
    "discounts": {"discounts": True},
    "sampled": {"labels": True},
    "everything": {
        **{"players": True, "illegal": 0.2, "over": 0.2},
        **{"discounts": True, "labels": True, "actions": 4},
    },
    "prefix": {"prefixed": True},
    "prefix_of_a_game": {"prefixed": True, "players": True, "illegal": 0.3, "over": 0.3},
    "one_action": {"actions": 1},
}
PUCTS = {
    "default": {},
    "value_first": {"first_visit": "value"},
    "efficientzero": {"first_visit": "value", "normalize": "tree"},
    "lightzero": {"first_visit": "value", "root_in_range": True},
    "mctx": {"count_own": True, "normalize": "siblings"},
    "curious": {"c_init": 3.0, "c_base": 10.0, "count_own": True, "min_range": 2.0},
}
GUMBELS = {
    "default": {},
    "few": {"max_considered": 2},
    "one": {"max_considered": 1},
    "scales": {"value_scale": 1.0, "maxvisit_init": 5.0},
}
CLOSE = 2e-5  # a choice with a smaller margin may differ in float32: such roots are not compared

STATES = torch.arange(5)
BUDGET = torch.tensor([24, 1, 20, 24, 13])
GAMMA = torch.tensor([0.997, 0.9, 1.0, 0.5, 0.8])
SEEDS = torch.tensor([3, -9, 2**62, 12345, 0])


def shared(kind, seed, backend, root_value, max_depth):
    """A random table, and the settings of a search over it."""
    table = random_table(seed, **TABLES[kind])
    settings = {
        "num_simulations": BUDGET,
        "discount": GAMMA,
        "value_prefix": ValuePrefix(3, ("prefix",)) if table.prefixed else None,
        "root_value": root_value,
        "max_depth": max_depth,
        "backend": backend,
    }
    return table, settings


def plain(table, b, **options) -> PlainSearch:
    options |= {"simulations": int(BUDGET[b]), "discount": float(GAMMA[b])}
    return PlainSearch(table, b, Options(horizon=3 if table.prefixed else None, **options))


def same(tree, b, expected: PlainSearch) -> bool:
    """Compares one root's tree with the plain one; False if a choice was too close."""
    if expected.closest < CLOSE:
        return False
    num, nodes = expected.num_actions, list(expected.nodes.values())
    entries = {name: tree.data[name][b] for name in tree.data.keys()}
    rows = [0, *(entries["parent"] >= 0).nonzero().flatten().tolist()]
    assert rows == list(expected.nodes)

    def exactly(name, numbers) -> None:
        assert entries[name][rows].tolist() == list(numbers), name

    def nearly(name, numbers) -> None:
        close(entries[name][rows], list(numbers))

    exactly("parent", (-1 if node.parent is None else node.parent.row for node in nodes))
    exactly("action", (node.action for node in nodes))
    exactly("depth", (node.depth for node in nodes))
    exactly("visits", (node.visits for node in nodes))
    exactly("ended", (not node.legal for node in nodes))
    exactly("children_visits", (node.counts(num) for node in nodes))
    exactly("children", (node.of_children(num, lambda child: child.node.row, -1) for node in nodes))
    nearly("children_q", (node.of_children(num, lambda child: child.q(), 0.0) for node in nodes))
    nearly("prior", (node.prior for node in nodes))
    nearly("raw_value", (node.raw for node in nodes))
    nearly("reward", (0.0 if node.edge is None else node.edge.reward for node in nodes))
    nearly("discount", (0.0 if node.edge is None else node.edge.discount for node in nodes))
    if "value_prefix" in entries:
        nearly("value_prefix", (node.prefix for node in nodes))
    if "mask" in entries:
        exactly("mask", ([a in node.legal for a in range(num)] for node in nodes))
    close(tree.node_values()[b][rows], [node.value() for node in nodes])
    close(tree.value()[b], expected.root.value())
    assert tree.visits_of_root()[b].tolist() == expected.root.counts(num)
    return True


def close(own, expected) -> None:
    torch.testing.assert_close(own.double(), torch.tensor(expected).double(), rtol=1e-5, atol=1e-5)


def cases(options):
    """Each kind of table with each option by the kernels, and a sample by tensor operations, whose
    equality with the kernels is tested elsewhere."""
    for k, kind in enumerate(TABLES):
        for o, option in enumerate(options):
            yield pytest.param(kind, option, "compiled", id=f"{kind}-{option}-compiled")
            if (k + 3 * o) % 10 == 0:
                yield pytest.param(kind, option, "reference", id=f"{kind}-{option}-reference")


@pytest.mark.parametrize(("kind", "option", "backend"), list(cases(PUCTS)))
def test_puct_searches_equal_the_plain_one(kind, option, backend):
    seed = 10 * list(TABLES).index(kind) + list(PUCTS).index(option)
    root_value = ("exclude", "include", "zero")[seed % 3]
    table, settings = shared(kind, seed, backend, root_value, None)
    tree = search(table.root(STATES), table, select=PUCT(**PUCTS[option]), **settings)
    compared = [
        same(tree, b, plain(table, b, root_value=root_value, **PUCTS[option])) for b in range(5)
    ]
    assert sum(compared) >= 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["illegal", "two_players"])
def test_random_ties_follow_their_seeds(kind, backend):
    table, settings = shared(kind, 1, backend, "exclude", None)
    select = PUCT(first_visit="value", ties="random", tie_seed=SEEDS)
    tree = search(table.root(STATES), table, select=select, **settings)
    trees = [plain(table, b, first_visit="value", tie_seed=int(SEEDS[b])) for b in range(5)]
    assert sum(same(tree, b, trees[b]) for b in range(5)) >= 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kind", "max_depth"), [("plain", 1), ("everything", 2), ("prefix", 3)])
def test_no_node_is_deeper_than_max_depth(kind, max_depth, backend):
    table, settings = shared(kind, 5, backend, "exclude", max_depth)
    tree = search(table.root(STATES), table, **settings)
    assert tree.data["depth"].max() == max_depth
    trees = [plain(table, b, max_depth=max_depth) for b in range(5)]
    assert sum(same(tree, b, trees[b]) for b in range(5)) >= 3


@pytest.mark.parametrize(("kind", "option", "backend"), list(cases(GUMBELS)))
def test_gumbel_searches_equal_the_plain_one(kind, option, backend):
    seed = 100 + 10 * list(TABLES).index(kind) + list(GUMBELS).index(option)
    root_value = ("include", "exclude", "zero")[seed % 3]
    table, settings = shared(kind, seed, backend, root_value, None)
    noise = gumbel_noise((5, table.next.shape[1]), torch.Generator().manual_seed(seed))
    settings |= GUMBELS[option]
    plan = gumbel_policy(table.root(STATES), table, root_gumbel=noise, **settings)
    compared = 0
    for b in range(5):
        expected = plain(
            table, b, gumbel=noise[b].tolist(), root_value=root_value, **GUMBELS[option]
        )
        action = expected.gumbel_action()
        if not same(plan.tree, b, expected):
            continue
        compared += 1
        close(plan.action_weights[b], expected.improved(expected.root))
        close(plan.root_value[b], expected.root.value())
        label = action if table.labels is None else int(table.labels[b, action])
        assert plan.action[b] == label
    assert compared >= 3
