"""A plain function may choose the actions."""

import pytest
import torch

from raffia.search import Nodes, search

from .table import GAME, random_table

STATES = torch.arange(6)


def least_tried(nodes: Nodes, carry):
    """The last of the least visited actions; the carry counts the steps down."""
    steps = torch.zeros_like(nodes.row) if carry is None else carry + 1
    assert (steps == nodes.depth).all()
    scores = -nodes.visits.float()
    if nodes.mask is not None:
        scores = scores.masked_fill(~nodes.mask, -torch.inf)
    last = scores.shape[-1] - 1
    return last - scores.flip(-1).argmax(-1), steps


@pytest.mark.parametrize("kind", ["plain", "game"])
def test_a_function_may_select(kind):
    table = random_table(3, **(GAME if kind == "game" else {}))
    tree = search(table.root(STATES), table, num_simulations=20, select=least_tried)
    visits = tree.visits_of_root()
    legal = tree.data["mask"][:, 0] if kind == "game" else torch.ones_like(visits, dtype=torch.bool)
    for row, mask in zip(visits, legal, strict=True):
        assert row[mask].max() - row[mask].min() <= 1
        assert row[~mask].sum() == 0
    assert tree.data["depth"].max() > 1
