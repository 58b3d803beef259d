"""Searches with a shared workspace give the same trees as without."""

import copy
import functools
import threading

import pytest
import torch

from raffia.algorithms.efficientzero.inference import fold
from raffia.algorithms.efficientzero.model import EfficientZeroModelMLP
from raffia.search import PUCT, Gumbel, ValuePrefix, gumbel_noise, search
from raffia.search import mcts as workspace_module
from raffia.search.mcts import Workspace

from .table import assert_same

SEARCHES = {  # rows, actions are 3; differences from a search by PUCT with 6 simulations
    "puct": (4, {}),
    "fewer rows": (2, {}),
    "more simulations": (4, {"num_simulations": 9}),
    "simulations of each": (4, {"num_simulations": torch.tensor([3, 6, 5, 1])}),
    "gumbel": (4, {"select": functools.partial(Gumbel, max_considered=2)}),
    "other selection": (4, {"select": lambda root_gumbel: PUCT(c_init=4.0)}),
    "ties": (4, {"select": lambda root_gumbel: PUCT(ties="random", tie_seed=torch.arange(4))}),
    "discounts": (4, {"discount": torch.tensor([0.1, 0.5, 0.9, 1.0])}),
    "horizon": (4, {"value_prefix": ValuePrefix(2)}),
    "root value": (4, {"root_value": "include"}),
    "shallow": (4, {"max_depth": 2}),
    "embeddings": (4, {"keep_embeddings": True}),
    "threads": (4, {"num_threads": 2}),
    "reference": (4, {"backend": "reference"}),
}


@functools.cache
def model(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = EfficientZeroModelMLP(
            4, 3, latent_state_dim=8, lstm_hidden_size=6, self_supervised_learning_loss=False
        )
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    return fold(network.eval())


def searched(name, draw, workspace=None, *, masked=False, model=model):
    """A search of the table, from roots and noise of a seed."""
    rows, options = SEARCHES[name]
    noise = torch.Generator().manual_seed(draw)
    root = model().root(torch.randn(rows, 4, generator=noise))
    if masked:
        mask = torch.rand(rows, 3, generator=noise) < 0.5
        mask[:, draw % 3] = True
        root = root._replace(mask=mask)
    options = {"num_simulations": 6, "value_prefix": ValuePrefix(5), **options}
    if "select" in options:
        options["select"] = options["select"](root_gumbel=gumbel_noise((rows, 3), noise))
    return search(root, model().recurrent_fn, **options, workspace=workspace)


@pytest.mark.parametrize("masked", [False, True])
def test_searches_with_a_workspace_equal_those_without(masked):
    workspace, trees = Workspace(), []
    for draw in range(3):
        for name in SEARCHES:
            one = searched(name, draw, workspace, masked=masked and draw != 1)
            trees.append((name, one, searched(name, draw, masked=masked and draw != 1)))
    for seed in (0, 1):  # models do not share
        other = functools.partial(model, seed)
        tree = searched("puct", seed, workspace, model=other)
        trees.append(("puct", tree, searched("puct", seed, model=other)))
    for name, tree, alone in trees:  # at the end: none was written over by those that came after
        assert_same(tree, alone)
        if name == "embeddings":
            for key, leaf in alone.embeddings.items(True, True):
                assert torch.equal(tree.embeddings[key], leaf), key
    assert len(workspace._cached) == workspace_module.NUM_SHAPES


def test_the_second_search_of_some_shapes_binds_no_model(monkeypatch):
    binds = []
    compiled = model().recurrent_fn.compiled
    bind = type(compiled).bind
    monkeypatch.setattr(type(compiled), "bind", lambda *args: binds.append(1) or bind(*args))
    workspace = Workspace()
    for draw in range(3):
        searched("puct", draw, workspace)
    assert len(binds) == 1
    for other in (copy.deepcopy(workspace), None):
        searched("puct", 0, other)
    assert len(binds) == 3
    monkeypatch.setattr(workspace_module, "MOST_BYTES", 100)
    for draw in range(2):
        searched("fewer rows", draw, workspace)
    assert len(binds) == 5


def test_simultaneous_searches_do_not_interfere():
    workspace, found = Workspace(), {}

    def run(draw):
        for _ in range(20):
            found[draw] = searched("more simulations", draw, workspace)

    threads = [threading.Thread(target=run, args=(draw,)) for draw in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for draw, tree in found.items():
        assert_same(tree, searched("more simulations", draw))


def test_a_search_in_inference_mode_leaves_a_workspace_that_other_searches_can_use():
    workspace, expected = Workspace(), searched("puct", 1)
    with torch.inference_mode():
        assert_same(searched("puct", 1, workspace), expected)
    assert_same(searched("puct", 1, workspace), expected)
