"""A searched tree as text and as data."""

import json
import textwrap

import pytest
import torch

from raffia.search import RecurrentOutput, RootOutput, Tree, search
from raffia.search.transpositions import state_key

from .made_trees import made_tree, random_tree

# parent, action, visits, q, reward
SMALL = [
    (0, 1, 6, 0.5, 0.25),
    (0, 3, 3, -0.25, 0.0),
    (1, 0, 4, 0.125, 0.0),
    (1, 2, 1, 0.75, 0.5),
    (0, 0, 1, 0.0, -0.5),
    (3, 1, 2, 1.0, 0.0),
    (2, 3, 2, -1.5, -1.0),
]
NAMES = ["left", "right", "jump", "wait"]
PRIOR = [0.125, 0.5, 0.0625, 0.3125]


def small_tree(**entries):
    return made_tree(SMALL, num_actions=4, prior=PRIOR, **entries)


def golden(text):
    return textwrap.dedent(text).strip("\n")


def random_search(num_actions, num_simulations, num_roots=2):
    generator = torch.Generator().manual_seed(0)
    logits, value = (torch.randn(shape, generator=generator) for shape in ((32, num_actions), 32))

    def model(state, action):
        state = (5 * state + action + 1) % 32
        return RecurrentOutput(torch.zeros(len(state)), value[state], logits[state]), state

    states = torch.arange(num_roots)
    root = RootOutput(logits[states], value[states], states)
    return search(root, model, num_simulations=num_simulations, backend="reference")


# ------------------------------------------------------------------------ summary


def test_summary_golden():
    assert small_tree().summary(action_names=NAMES) == golden("""
        root 0: value +0.25, 10 simulations, depth 3, 8 nodes
        best path: right · left · right
        action          visits  share      Q  prior  reward  raw value
        root                10                                   +0.25
        ├─ right             6    60%  +0.50    50%   +0.25      +0.25
        │  ├─ left           4    80%  +0.12    25%   +0.00      +0.12
        │  │  ├─ right       2   100%  +1.00    25%   +0.00      +1.00
        │  │  └─ … 3 not tried, prior 75%
        │  ├─ jump           1    20%  +0.75    25%   +0.50      +0.25
        │  └─ … 2 not tried, prior 50%
        ├─ wait              3    30%  -0.25    31%   +0.00      -0.25
        │  ├─ wait           2   100%  -1.50    25%   -1.00      -0.50
        │  └─ … 3 not tried, prior 75%
        ├─ left              1    10%  +0.00    12%   -0.50      +0.50
        └─ … 1 not tried, prior 6.2%
        """)


def test_summary_counts_left_out_actions():
    assert small_tree().summary(max_nodes=4) == golden("""
        root 0: value +0.25, 10 simulations, depth 3, 8 nodes (4 shown)
        best path: 1 · 0 · 1
        action               visits  share      Q  prior  reward  raw value
        root                     10                                   +0.25
        ├─ 1                      6    60%  +0.50    50%   +0.25      +0.25
        │  ├─ 0 (+1 action)       4    80%  +0.12    25%   +0.00      +0.12
        │  └─ … 1 more action, 1 visit; 2 not tried, prior 50%
        ├─ 3 (+1 action)          3    30%  -0.25    31%   +0.00      -0.25
        └─ … 1 more action, 1 visit; 1 not tried, prior 6.2%
        """)
    assert "root (+3 actions)" in small_tree().summary(max_nodes=1)


def test_summary_of_a_game_shows_players_and_ends():
    ended = torch.zeros(8, dtype=torch.bool)
    ended[6] = True
    tree = small_tree(to_play=torch.tensor([1, 2, 2, 1, 1, 2, 2, 1]), ended=ended)
    lines = tree.summary(action_names=NAMES).splitlines()
    taken, moves = "the player who takes the action", "the player to move next"
    assert lines[2] == f"Q and reward: for {taken}; raw value: for {moves}"
    assert lines[3].endswith("raw value  to play")
    assert lines[4].split()[-1] == "1" and lines[5].split()[-1] == "2"
    assert lines[7].startswith("│  │  ├─ right (ended) ") and lines[7].split()[-1] == "2"


def test_summary_shows_a_shared_node_once():
    canonical = torch.arange(8, dtype=torch.int32)
    canonical[7], canonical[4] = 3, 0  # wait-wait and right-left lead to the same state; a cycle
    text = small_tree(canonical=canonical).summary(action_names=NAMES)
    assert "│  ├─ left #3 " in text and "│  ├─ wait #3 (above) " in text
    assert "│  ├─ jump #0 (above) " in text
    assert text.count("right") == 2 + 2  # in the best path and in the tree
    assert "visits: of the action; the root's count all ways that lead back to it" in text


def test_a_state_with_several_parents_may_have_more_visits_than_simulations():
    def ring(state, action):  # of three states
        state = (state + 2 * action - 1) % 3
        zeros = torch.zeros(len(state), 2)
        return RecurrentOutput((state == 1).float(), zeros[:, 0], zeros), state

    root = RootOutput(torch.zeros(1, 2), torch.zeros(1), torch.tensor([0]))
    tree = search(root, ring, num_simulations=60, discount=0.9, transpositions=state_key())
    graph = tree.to_graph()
    assert graph.num_simulations == 60 < graph.node(0).visits
    assert tree.summary().startswith(f"root 0: value {graph.node(0).value:+.2f}, 60 simulations, ")
    assert graph.has_merged_paths([0]) and "visits: of the action" in tree.summary(max_nodes=1)
    assert not random_search(3, 7).to_graph().has_merged_paths(range(8))


@pytest.mark.parametrize("seed", range(4))
def test_summary_fits_in_100_columns(seed):
    tree = random_tree(seed, num_rows=120, num_actions=3, shared=0.1 * (seed % 2))
    names = [("a rather long name of an action " * (i + 1)).strip() for i in range(3)]
    text = tree.summary(max_nodes=100, action_names=names)
    assert max([len(line) for line in text.splitlines()]) <= 100
    assert [line for line in text.splitlines() if line != line.rstrip()] == []


# ------------------------------------------------------------------------ graph


def test_graph_of_a_handmade_tree():
    graph = small_tree().to_graph(action_names=NAMES)
    assert graph == made_tree(SMALL, 4, 12, prior=PRIOR).to_graph(action_names=NAMES)  # free rows
    assert [node.row for node in graph.nodes] == list(range(8))
    assert [(e.source, e.action, e.target) for e in graph.edges] == [
        (0, 0, 5), (0, 1, 1), (0, 3, 2), (1, 0, 3), (1, 2, 4), (2, 3, 7), (3, 1, 6),
    ]  # fmt: skip
    edge, node = graph.edges[1], graph.node(1)
    assert (edge.name, edge.visits, edge.share, edge.q) == ("right", 6, 0.6, 0.5)
    assert (edge.prior, edge.reward, edge.discount, edge.choice) == (0.5, 0.25, 1.0, None)
    assert (node.visits, node.depth, node.value, node.raw_value) == (6, 1, 0.25, 0.25)
    assert (node.num_untried, node.untried_prior, node.to_play) == (2, 0.5, None)
    assert [e.name for e in graph.best_path] == ["right", "left", "right"]
    assert repr(graph) == "TreeGraph(root 0: 8 nodes, 7 edges, 10 simulations, depth 3)"
    alone = made_tree([], num_actions=2).to_graph()
    assert (len(alone.nodes), alone.edges, alone.best_path, alone.depth) == (1, (), (), 0)


def test_graph_agrees_with_the_arrays():
    tree = random_search(num_actions=5, num_simulations=20)
    for root in range(2):
        graph = tree.to_graph(root)
        assert len(graph.nodes) == 21 and len(graph.edges) == 20
        assert graph.num_simulations == 20 == sum([e.visits for e in graph.edges_from(0)])
        assert [e.action for e in graph.best_path] == tree.best_path(root)
        for edge in graph.edges:
            assert graph.node(edge.target).visits == edge.visits
            assert tree.data["children"][root, edge.source, edge.action] == edge.target
        values = torch.tensor([node.value for node in graph.nodes])
        assert values.equal(tree.node_values()[root])
    assert tree.summary(1) != tree.summary(0)
    first, rest = tree.summary(1).split(":", 1)
    assert (first, rest) == ("root 1", tree[1:].summary(0).split(":", 1)[1])


def test_graph_of_sampled_actions_has_their_values():
    actions = torch.tensor([[0.5, -1.0], [0.25, 0.0], [0.0, 2.0], [1.0, 1.0]]).repeat(8, 1, 1)
    graph = small_tree(actions=actions).to_graph()
    assert graph.edges[0].choice == [0.5, -1.0]
    assert graph.edges[0].name == "+0.50, -1.00"
    assert small_tree(actions=actions).to_graph(action_names=NAMES).edges[0].name == "left"
    assert small_tree(actions=actions[..., 0].long() + 7).to_graph().edges[0].name == "7"


def test_graph_as_json():
    graph = small_tree(value_prefix=torch.zeros(8)).to_graph(action_names=NAMES)
    record = json.loads(graph.to_json())
    assert record == graph.to_dict() and sorted(record) == ["edges", "nodes", "root"]
    assert record["nodes"][0]["value_prefix"] == 0.0 and record["nodes"][0]["to_play"] is None
    assert record["edges"][1]["name"] == "right"


# ------------------------------------------------------------------------ the most visited part


@pytest.mark.parametrize("seed", range(4))
def test_most_visited_part_hangs_together(seed):
    graph = random_tree(seed, num_rows=40, shared=0.3).to_graph()
    for max_nodes in (1, 2, 7, 100):
        shown = graph.most_visited(max_nodes)
        assert len(shown) == len(set(shown)) == min(max_nodes, len(graph.nodes))
        for i, row in enumerate(shown[1:], 1):
            assert any([row in [e.target for e in graph.edges_from(s)] for s in shown[:i]])


@pytest.mark.parametrize("show", [Tree.summary, Tree.to_graph, Tree.to_svg])
def test_invalid_calls_are_refused(show):
    tree = random_search(num_actions=3, num_simulations=2)
    for root in (-1, 2):
        match = rf"root={root}: .* 2 roots, so root must be in 0\.\.1"
        with pytest.raises(IndexError, match=match):
            show(tree, root)
    with pytest.raises(TypeError, match="float"):
        show(tree, 0.0)
    with pytest.raises(ValueError, match="action_names has 3 names, but the tree has 4 actions"):
        show(small_tree(), action_names=["a", "b", "c"])
    if show is not Tree.to_graph:
        with pytest.raises(ValueError, match="max_nodes=0 must be at least 1"):
            show(small_tree(), max_nodes=0)
    assert small_tree().to_graph(torch.tensor(0)).root == 0
