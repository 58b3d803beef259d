"""MCTSForest and Tree: what a forest knows of the steps that were taken, and what it refuses.

What TorchRL 0.14.1 gets wrong here, and ours does not, is at the end.
"""

import math
import pickle

import pytest
import torch

from raffia import DamagedFileError, TensorDict, is_tensorclass, tensorclass
from raffia.data import growth
from raffia.data.forest import MCTSForest
from raffia.data.map import TensorDictMap, UnknownRowError
from raffia.data.table import CapacityError
from raffia.data.tree import Tree


def rollout(*obs, actions=None, **more):
    """A way through the observations with these numbers; more: entries [T] under "next"."""
    obs = torch.tensor(obs, dtype=torch.float32)[:, None] + torch.tensor([0.0, 0.25])
    actions = torch.zeros(len(obs) - 1) if actions is None else torch.tensor(actions)
    after = TensorDict({"observation": obs[1:], **more}, [len(actions)])
    entries = {"observation": obs[:-1], "action": actions.long(), "next": after}
    return TensorDict(entries, [len(actions)])


def root(number):
    return TensorDict(observation=torch.tensor([number, number + 0.25]))


def grown(*rollouts, **options):
    forest = MCTSForest(**options)
    for steps in rollouts:
        forest.extend(steps)
    return forest


def numbers(td, key="observation"):
    """The observations of a container, by their first number."""
    return td[key][..., 0].flatten().int().tolist()


def lines(forest, number, **options):
    """The tree from an observation on, a line for each vertex: its path, steps and place."""
    tree = forest.get_tree(root(number), **options)

    def line(tree):
        here, end = numbers(tree.rollout), numbers(tree.node_data)
        return "-".join(map(str, here + end)) + (" again" if tree.repeats else "")

    return tree.to_string(line).split("\n")


# ---------------------------------------------------------------------------- the published facts


def published():
    """Six steps from a reset, six others from there, and six others from the fourth of these."""
    first = rollout(0, 1, 2, 3, 4, 5, 6, actions=[0, 0, 0, 0, 0, 0])
    second = rollout(0, 11, 12, 13, 14, 15, 16, actions=[1, 0, 0, 0, 0, 0])
    third = rollout(13, 21, 22, 23, 24, 25, 26, actions=[1, 0, 0, 0, 0, 0])
    return first, second, third


def test_the_published_example():
    # the docstring of torchrl.data.map.tree.MCTSForest, with made-up observations
    forest, (first, second, third) = MCTSForest(), published()
    sizes = []
    for steps in (first, second, third):
        forest.extend(steps)
        sizes.append(len(forest))
    assert sizes == [6, 12, 18]

    tree = forest.get_tree(first[0])
    assert tree.max_length() == 2
    assert list(tree.valid_paths()) == [(0,), (1, 0), (1, 1)]
    by_hand = torch.cat([tree.subtree[1].rollout, tree.subtree[1].subtree[0].rollout])
    assert (by_hand == second).all() and (tree.rollout_from_path((1, 0)) == second).all()

    tree = forest.get_tree(first[0], compact=False)
    ways = [(0,) * 6, (1, *[0] * 5), (1, 0, 0, 1, *[0] * 5)]
    assert tree.max_length() == 9 and list(tree.valid_paths()) == ways
    assert (tree.rollout_from_path(ways[1]) == second).all()
    assert (tree.rollout_from_path(ways[2]) == torch.cat([second[:3], third])).all()


def test_the_vertices_of_the_published_example():
    forest = grown(*published())
    tree = forest.get_tree(root(0))
    assert tree.edges() == [(0, 1), (0, 2), (2, 3), (2, 4)]
    assert tree.num_vertices() == tree.num_vertices(count_repeat=True) == 5
    assert list(tree.vertices(key_type="path")) == [(), (0,), (1,), (1, 0), (1, 1)]
    assert list(tree.vertices(key_type="id")) == [0, 1, 2, 3, 4]
    assert list(tree.vertices()) == [v.hash for v in tree.vertices(key_type="id").values()]
    assert lines(forest, 0) == [
        "(0,) 0-1-2-3-4-5-6",
        "(1,) 0-11-12-13",
        " (1, 0) 13-14-15-16",
        " (1, 1) 13-21-22-23-24-25-26",
    ]
    by_function = forest.to_string(root(0), lambda tree: str(tree.num_children))
    assert by_function == tree.to_string(lambda tree: str(tree.num_children))
    assert by_function.split("\n")[1] == "(1,) 2"


def test_without_a_function_the_lines_show_the_observations():
    forest = grown(rollout(0, 1), rollout(0, 2, actions=[1]))
    assert forest.to_string(root(0)).split("\n") == [
        "(0,) {'observation': tensor([1.0000, 1.2500])}",
        "(1,) {'observation': tensor([2.0000, 2.2500])}",
    ]


# ---------------------------------------------------------------------------- trees


def test_a_vertex_says_how_it_was_reached_and_what_follows():
    forest = grown(
        rollout(0, 1, 2, 3, actions=[4, 5, 6]),
        rollout(2, 7, actions=[8]),
        rollout(0, 1, actions=[4]),
    )
    tree = forest.get_tree(root(0))  # has no branch, so it leads to the first one
    assert numbers(tree.rollout) == [0, 1] and numbers(tree.node_data) == [2]
    assert int(tree.branching_action) == 4 and int(tree.prev_action) == 5
    assert tree.selected_actions.tolist() == [6, 8]
    assert (tree.node_observation == root(2)["observation"]).all()
    assert (tree.num_children, tree.count, tree.visits) == (2, 2, 2)
    assert (tree.hash, tree.node_id, tree.parent, tree.is_terminal) == (None, 0, None, False)
    child = tree.at((1,))
    assert numbers(child.rollout, ("next", "observation")) == [7]
    assert (int(child.prev_action), child.node_id, child.count) == (8, 2, 1)
    assert child.parent is tree and child.is_terminal and child.selected_actions is None
    assert tree.get_vertex_by_id(2) is child and tree.get_vertex_by_hash(child.hash) is child
    assert repr(tree) == "Tree(3 vertices)"


def test_a_root_that_branches_has_no_steps():
    tree = grown(*published()).get_tree(root(0))
    assert tree.rollout is None and tree.branching_action is None and tree.prev_action is None
    assert tree.count == 0 and tree.hash is None
    assert numbers(tree.node_data) == [0]


def test_a_tree_is_a_tensorclass_and_what_is_below_a_vertex_a_stack():
    tree = grown(*published()).get_tree(root(0))
    assert is_tensorclass(tree) and tree.batch_size == () and tree.at((0,)).subtree is None
    below = tree.subtree
    assert type(below) is Tree and below.shape == (2,) and len(below) == 2
    assert below[1] is tree.at((1,)) and [*below] == below.tensordicts and tree not in below
    assert numbers(below.node_data) == [6, 13] and below.count == [1, 1]
    assert below.rollout.shape == (2, -1) and below.branching_action.tolist() == [0, 1]
    assert (below.num_children, below.num_vertices(), below.is_terminal) == (2, 4, False)
    for copied in (tree.clone(), pickle.loads(pickle.dumps(tree)), tree.to(torch.float64)):
        assert copied.edges() == tree.edges() and type(copied.subtree[1]) is Tree
        assert numbers(copied.rollout_from_path((1, 0))) == numbers(tree.rollout_from_path((1, 0)))
        assert copied.at((1,)).parent is None and copied.at((1,)).prev_action == 0
    by_hand = Tree([Tree(count=3), Tree(count=4)], node_data=root(0))
    by_hand.subtree[0].count = 5
    assert by_hand.subtree.count == [5, 4] and by_hand.subtree.node_id == [0, 0]
    assert Tree([]).subtree is None and Tree().is_terminal


def test_a_tree_can_begin_where_the_known_ends():
    forest = grown(*published())
    tree = forest.get_tree(root(26))
    assert tree.rollout is None and list(tree.valid_paths()) == [()]
    assert tree.rollout_from_path(()) is None and tree.max_length() == 0
    assert numbers(tree.node_data) == [26]
    steps, count = forest.get_child(root(26))
    assert steps.batch_size == (0,) and count.tolist() == []


def test_a_hash_is_of_the_first_step():
    forest = grown(*published())
    compact, full = (forest.get_tree(root(0), compact=c) for c in (True, False))
    assert [v.hash for v in compact.subtree] == [v.hash for v in full.subtree]
    assert compact.at((1, 0)).hash == full.at((1, 0, 0, 0)).hash
    again = grown(*published()).get_tree(root(0))  # the same in every forest
    assert list(again.vertices()) == list(compact.vertices())


def test_places_that_several_ways_lead_to_are_one_vertex():
    forest = grown(
        rollout(0, 1, 3, 4, actions=[0, 0, 0]),
        rollout(0, 2, 3, 5, actions=[1, 0, 1]),
    )
    tree = forest.get_tree(root(0))
    assert list(tree.valid_paths()) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert tree.at((0, 0)) is tree.at((1, 0)) and tree.at((0, 1)) is tree.at((1, 1))
    assert tree.at((1, 0)).parent is tree.at((0,))
    assert (tree.num_vertices(), tree.num_vertices(count_repeat=True)) == (5, 7)
    assert tree.edges() == [(0, 1), (0, 2), (1, 3), (1, 4), (2, 3), (2, 4)]
    assert numbers(tree.rollout_from_path((1, 0))) == [0, 2, 3]
    assert lines(forest, 0)[3:] == ["(1,) 0-2-3", " (1, 0) 3-4", " (1, 1) 3-5"]


def test_which_vertices_are_in_a_tree():
    forest = grown(*published())
    tree, part, other = (forest.get_tree(root(number)) for number in (0, 13, 25))
    assert part.at((0,)) in tree and tree.at((1, 0)) in part
    assert tree.at((0,)) not in part and 3 not in tree
    # roots have no hash; that does not make them equal
    assert tree in tree and part not in tree and other not in part and Tree() not in tree


def test_a_path_that_leaves_the_tree():
    tree = grown(*published()).get_tree(root(0))
    for path in [(2,), (1, 0, 0), (-1,)]:
        for ask in (tree.at, tree.rollout_from_path):
            with pytest.raises(IndexError, match=r"leaves the tree at position \d: child"):
                ask(path)


def test_vertices_that_are_not_there():
    tree = grown(*published()).get_tree(root(0))
    with pytest.raises(KeyError, match="no vertex 5 among the 5 of this tree"):
        tree.get_vertex_by_id(5)
    with pytest.raises(KeyError, match="no vertex 12345"):
        tree.get_vertex_by_hash(12345)
    with pytest.raises(ValueError, match="key_type is 'id', 'hash' or 'path', got 'name'"):
        tree.vertices(key_type="name")


@pytest.mark.parametrize("compact", [True, False])
def test_max_depth_ends_all_ways_at_that_depth(compact):
    # 3 is reached with one step and with two, so there is more room below it on the shorter way
    forest = grown(
        rollout(0, 3, 4, 5),
        rollout(0, 1, 3, 6, actions=[1, 0, 1]),
        rollout(1, 7, actions=[1]),
        rollout(4, 8, actions=[1]),
    )
    every = list(forest.get_tree(root(0), compact=compact).valid_paths())
    for depth in range(5):
        tree = forest.get_tree(root(0), compact=compact, max_depth=depth)
        assert set(tree.valid_paths()) == {path[:depth] for path in every}
        assert tree.max_length() == min(depth, 4)
        for vertex in tree.vertices().values():  # of several with one hash, the uppermost
            same = [
                path
                for path, other in tree.vertices(key_type="path").items()
                if other.hash == vertex.hash
            ]
            assert vertex is tree.at(same[0])
    assert (
        tree.num_vertices() == forest.get_tree(root(0), compact=compact).num_vertices() + 4
    )  # those below 3
    with pytest.raises(ValueError, match="max_depth is 0 or more"):
        forest.get_tree(root(0), max_depth=-1)


def test_a_tree_does_not_change_with_the_forest():
    forest = grown(*published())
    tree, before = forest.get_tree(root(0)), lines(forest, 0)
    forest.extend(rollout(0, 9, actions=[2]))
    assert len(tree.subtree) == 2 and lines(forest, 0) == [*before, "(2,) 0-9"]
    tree.at((0,)).rollout["action"].fill_(77)
    tree.node_data["observation"].fill_(77)
    assert (forest.get_tree(root(0)).rollout_from_path((0,)) == published()[0]).all()


def test_children_are_steps_with_counts():
    forest = grown(rollout(0, 1), rollout(0, 2, actions=[1]), rollout(0, 1), rollout(0, 3))
    steps, count = forest.get_child(root(0))
    assert numbers(steps, ("next", "observation")) == [1, 2, 3] and count.tolist() == [2, 1, 1]
    assert steps["action"].tolist() == [0, 1, 0]


# ---------------------------------------------------------------------------- what is stored


def test_entries_are_kept_with_their_step_as_they_were_seen_last():
    forest = MCTSForest(excluded_keys=["info", ("deep", "info")])
    for reward in (1.0, 2.0):
        steps = rollout(0, 1, 2, reward=torch.tensor([reward, -reward]))
        steps.update({"value": torch.tensor([reward, 3.0]), "info": torch.zeros(2)})
        steps["next", "info"] = torch.zeros(2)
        steps["next", "deep"] = TensorDict(info=torch.zeros(2), x=torch.ones(2), batch_size=[2])
        forest.extend(steps)
    stored = forest.get_tree(root(0)).rollout
    assert stored["next", "reward"].tolist() == [2.0, -2.0]
    assert stored["value"].tolist() == [2.0, 3.0]
    assert set(stored.keys(True, True)) == {
        "action",
        "observation",
        "value",
        ("next", "observation"),
        ("next", "reward"),
        ("next", "deep", "x"),
    }


def test_the_last_of_several_in_one_rollout_counts_too():
    steps = rollout(0, 0, 0, 0, reward=torch.tensor([1.0, 2.0, 3.0]))
    found, count = grown(steps).get_child(root(0))
    assert found["next", "reward"].tolist() == [3.0] and count.tolist() == [3]


def test_the_rollout_is_not_changed():
    steps = rollout(0, 1, 2).lock_()
    before = steps.clone()
    forest = grown(steps)
    assert set(steps.keys(True, True)) == set(before.keys(True, True)) and (steps == before).all()
    steps.unlock_()["observation"].fill_(9)  # and it shares nothing with the forest
    assert lines(forest, 0) == ["() 0-1-2"]


def test_names_of_entries_are_free_and_may_be_nested_and_several():
    options = {
        "observation_keys": [("agent", "obs"), "clock"],
        "action_keys": ["move", ("agent", "turn")],
    }
    forest = MCTSForest(**options)
    obs, clock = torch.tensor([[1, 0], [2, 0], [3, 0]]), torch.tensor([0, 1, 2])

    def state(rows):
        batch = obs[rows].shape[:-1]
        return TensorDict(
            {"agent": TensorDict({"obs": obs[rows]}, batch), "clock": clock[rows]}, batch
        )

    steps = state(slice(2)).set("next", state(slice(1, 3)))
    steps["move"] = torch.tensor([5, 6])
    steps["agent", "turn"] = torch.tensor([True, False])
    forest.extend(steps)
    other = steps[1].clone().set("move", torch.tensor(7))
    forest.add(other)

    tree = forest.get_tree(state(0))
    assert int(tree.prev_action["move"]) == 5 and bool(tree.prev_action["agent", "turn"])
    assert tree.selected_actions["move"].tolist() == [6, 7]
    assert tree.node_observation["agent", "obs"].tolist() == [2, 0]
    assert int(tree.node_observation["clock"]) == 1
    late = state(0).set("clock", torch.tensor(1))  # the same agent at another time
    with pytest.raises(UnknownRowError):
        forest.get_tree(late)


def test_an_environment_without_actions():
    forest = grown(rollout(0, 1), rollout(0, 2, actions=[1]), rollout(0, 1), action_keys=[])
    assert len(forest) == 2 and forest.get_child(root(0))[1].tolist() == [2, 1]


@pytest.mark.parametrize("batch", [(2, 3), (1, 2, 3)])
def test_several_rollouts_at_once(batch):
    ways = [rollout(0, 1, 2, 3), rollout(0, 4, 5, 6, actions=[1, 0, 0])]
    forest = grown(torch.stack(ways).reshape(*batch))
    assert lines(forest, 0) == lines(grown(*ways), 0) == ["(0,) 0-1-2-3", "(1,) 0-4-5-6"]


def test_steps_one_by_one_or_in_a_row_are_the_same():
    forest, steps = MCTSForest(), rollout(0, 1, 2)
    for step in steps:
        forest.add(step)
    assert lines(forest, 0) == ["() 0-1-2"]
    other = MCTSForest()
    other.add(steps)
    assert lines(other, 0) == ["() 0-1-2"] and len(other) == 2


def test_what_is_under_next_may_count_more_dimensions_as_its_batch():
    steps = rollout(0, 1, 2)
    steps["next"].batch_size = [2, 2]
    assert lines(grown(steps), 0) == ["() 0-1-2"] and steps["next"].batch_size == (2, 2)


def test_the_tree_can_be_had_at_once():
    forest, (first, second, _) = MCTSForest(), published()
    assert forest.extend(first) is None
    tree = forest.extend(second, return_node=True)
    assert list(tree.valid_paths()) == [(0,), (1,)]
    assert list(forest.add(first[2], return_node=True).valid_paths()) == [()]
    with pytest.raises(ValueError, match=r"takes one rollout \[T\], not \[1, 6\]"):
        forest.extend(first[None], return_node=True)
    with pytest.raises(ValueError, match="needs a first step"):
        forest.extend(first[:0], return_node=True)


def test_zeros_with_a_sign_and_nans_are_one_observation():
    obs = torch.tensor([[0.0], [math.nan], [-0.0]])
    steps = TensorDict(
        observation=obs[:-1],
        action=torch.zeros(2),
        next=TensorDict(observation=obs[1:]),
        batch_size=[2],
    )
    tree = grown(steps).get_tree(TensorDict(observation=torch.tensor([-0.0])))
    assert tree.repeats and len(tree.rollout) == 2


@tensorclass
class Seen:
    observation: torch.Tensor


@tensorclass
class Step:
    observation: torch.Tensor
    action: torch.Tensor
    next: Seen


def test_a_rollout_may_be_a_tensorclass_or_a_lazy_stack():
    obs = torch.tensor([[0, 0.25], [1, 1.25], [2, 2.25]])
    after = Seen(observation=obs[1:], batch_size=[2])
    steps = Step(observation=obs[:-1], action=torch.zeros(2).long(), next=after, batch_size=[2])
    forest = grown(steps)
    assert lines(forest, 0) == ["() 0-1-2"]
    assert forest.get_tree(steps[1]).rollout["action"].tolist() == [0]

    lazy = TensorDict.lazy_stack(list(rollout(0, 1, 2).unbind(0)))
    assert lines(grown(lazy), 0) == ["() 0-1-2"]


def test_which_observations_are_known():
    forest = grown(rollout(0, 1), rollout(1, 2))
    assert root(2) in forest.nodes and root(3) not in forest.nodes
    assert len(forest.nodes) == 3
    assert repr(forest) == "MCTSForest(2 steps between 3 observations)"


# ---------------------------------------------------------------------------- what is refused


def unlike(**changes):
    return rollout(0, 1, 2).update(changes)


def with_next(**changes):
    steps = rollout(0, 1, 2)
    steps["next"].update(changes)
    return steps


REFUSED = {
    "no next": (lambda: rollout(0, 1).exclude("next"), KeyError, r"no \['next.observation'\]"),
    "next is a tensor": (lambda: unlike(next=torch.zeros(2)), KeyError, "under .next., the obs"),
    "no outcome": (lambda: rollout(0, 1).exclude(("next", "observation")), KeyError, "next.obs"),
    "no action": (lambda: rollout(0, 1).exclude("action"), KeyError, r"no \['action'\]"),
    "no observation": (
        lambda: rollout(0, 1).exclude("observation"),
        KeyError,
        r"no \['observation'\]",
    ),
    "outcome of another dtype": (
        lambda: with_next(observation=torch.ones(2, 2, dtype=torch.float64)),
        ValueError,
        r'"observation" is float32\[2\] and the one under "next" float64\[2\]',
    ),
    "outcome of another shape": (
        lambda: with_next(observation=torch.ones(2, 3)),
        ValueError,
        r"float32\[2\] and the one under .next. float32\[3\]",
    ),
    "an object as action": (lambda: unlike(action="left"), TypeError, '"action" is a'),
    "an object as entry": (lambda: unlike(name="Ada"), (TypeError, ValueError), "'name'"),
    "an object under next": (lambda: with_next(name="Ada"), (TypeError, ValueError), "'name'"),
    "the forest's own entry": (lambda: unlike(_count=torch.ones(2)), ValueError, "_count"),
    "no dimension of steps": (lambda: rollout(0, 1)[0], ValueError, r"call add\(step\)"),
    "no container": (lambda: torch.zeros(3), TypeError, "container, got a Tensor"),
    "too many": (lambda: rollout(*range(9)), CapacityError, "max_size is 6"),
}
REFUSED_LATER = {
    "observations of another dtype": (
        lambda: rollout(0, 1, reward=torch.ones(1)).apply(lambda x: x.double()),
        ValueError,
        r"float32\[2\] as .observation., and these float64\[2\]",
    ),
    "an action of another dtype": (
        lambda: rollout(0, 4, reward=torch.ones(1)).set("action", torch.zeros(1)),
        ValueError,
        'as "action"',
    ),
    "an entry more": (lambda: unlike(value=torch.zeros(2)), (ValueError, KeyError), "value"),
    "an entry of another dtype": (
        lambda: rollout(0, 4, reward=torch.ones(1, dtype=torch.int32)),
        ValueError,
        "reward",
    ),
    "an entry less": (lambda: rollout(0, 4, 5), (ValueError, KeyError), "reward"),
}


def everything(forest):
    """All that can be seen of a forest."""
    steps = forest.steps.state_dict()
    found = {name: x.clone() if torch.is_tensor(x) else x for name, x in steps.items()}
    return found, len(forest), forest.nodes.keys(), repr(forest)


def same(mine, other):
    for name, x in mine[0].items():
        if torch.is_tensor(x):
            assert torch.equal(x, other[0][name]), name
    assert mine[0].keys() == other[0].keys() and mine[1] == other[1] and mine[3] == other[3]
    assert mine[1] == 0 or (mine[2] == other[2]).all()
    return True


@pytest.mark.parametrize("case", [*REFUSED, *REFUSED_LATER])
def test_a_rollout_that_is_refused_changes_nothing(case):
    make, error, match = (REFUSED | REFUSED_LATER)[case]
    first = rollout(0, 1, 2, 3, actions=[0, 1, 2], reward=torch.ones(3))
    if case in REFUSED and case != "an entry less":
        first = first.exclude(("next", "reward"))
    forest = grown(first, max_size=6)
    before = everything(forest)
    with pytest.raises(error, match=match):
        forest.extend(make())
    assert same(everything(forest), before)
    forest.extend(first)  # it goes on as if nothing had been
    assert len(forest) == 3 and forest.get_tree(root(0)).count == 2


@pytest.mark.parametrize("case", REFUSED)
def test_a_first_rollout_that_is_refused_changes_nothing(case):
    make, error, match = REFUSED[case]
    forest = MCTSForest(max_size=6)
    with pytest.raises(error, match=match):
        forest.extend(make())
    assert len(forest) == len(forest.nodes) == 0
    # not even what observations look like
    integers = rollout(0, 1, 2).apply(lambda x: x.int())
    forest.extend(integers)
    assert forest.get_tree(integers[0]).rollout["observation"].dtype == torch.int32


def test_a_forest_that_is_full_says_what_goes_on():
    forest = grown(rollout(0, 1), max_size=1)
    with pytest.raises(CapacityError, match=r"MCTSForest\(max_size=") as caught:
        forest.extend(rollout(1, 2))
    assert "lru" not in str(caught.value) and "delete" not in str(caught.value)
    larger = MCTSForest(max_size=2)
    larger.load_state_dict(forest.state_dict())
    larger.extend(rollout(1, 2))
    assert lines(larger, 0) == ["() 0-1-2"]


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ({}, r"it lacks \['next.reward'\]"),
        (
            {"reward": torch.ones(2), "value": torch.ones(2)},
            r"one: this one brings besides \['next.value'\]",
        ),
        (
            {"rewards": torch.ones(2)},
            r"it lacks \['next.reward'\], this one brings besides \['next.rewards'\]",
        ),
    ],
)
def test_a_rollout_with_other_entries_is_told_which(entries, match):
    forest = grown(rollout(0, 1, 2, reward=torch.ones(2)))
    before = everything(forest)
    with pytest.raises(ValueError, match=match) as caught:
        forest.extend(rollout(0, 1, 2, **entries))
    assert "_count" not in str(caught.value)
    same(everything(forest), before)


def test_an_empty_forest_is_not_false():
    forest = MCTSForest()
    assert (forest or MCTSForest()) is forest


def test_a_step_too_much_is_refused_and_known_ones_are_not():
    forest = grown(rollout(0, 1, 2), max_size=3)
    forest.extend(rollout(0, 1, 2, 3))
    forest.extend(rollout(0, 1, 2, 3))
    with pytest.raises(CapacityError, match=r"3 are here and max_size is 3\..* A larger"):
        forest.extend(rollout(1, 2, 3, 4))
    assert forest.get_child(root(1))[1].tolist() == [3]  # not counted
    assert lines(forest, 0) == ["() 0-1-2-3"]


def test_interrupted_while_it_links_the_steps(monkeypatch):
    forest = grown(rollout(0, 1, 2))
    assert len(forest.nodes) == 3
    forest.extend(rollout(2, 3, 4))

    def interrupted(graph, sources, targets):
        graph.source.extend(sources)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(growth.StepGraph, "extend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            forest.get_tree(root(0))
    assert lines(forest, 0) == ["() 0-1-2-3-4"] and len(forest.nodes) == 5


def test_keys_that_cannot_be_left_out():
    for key in ["observation", "action", ("next", "observation"), "next"]:
        with pytest.raises(ValueError, match="only other entries can be left out"):
            MCTSForest(excluded_keys=[key])
    with pytest.raises(TypeError, match="list or a tuple of keys"):
        MCTSForest(observation_keys="observation")


# ---------------------------------------------------------------------------- long and wide


@pytest.mark.parametrize("compact", [True, False])
def test_long_ways(compact):
    n = 5000
    forest = grown(rollout(*range(n + 1)))
    tree = forest.get_tree(root(0), compact=compact)
    length = 0 if compact else n - 1
    assert tree.max_length() == length and tree.num_vertices() == length + 1
    (path,) = tree.valid_paths()
    assert path == (0,) * length and tree.num_vertices(count_repeat=True) == length + 1
    assert numbers(tree.rollout_from_path(path)) == list(range(n))
    assert tree.get_vertex_by_id(length).node_id == length and len(tree.edges()) == length


def test_more_steps_than_are_read_at_once(monkeypatch):
    monkeypatch.setattr("raffia.data.forest.CHUNK", 7)
    forest = grown(rollout(*range(24)), rollout(5, 30, 31, actions=[1, 0]))
    assert lines(forest, 3) == [
        "() 3-4-5",
        "(0,) " + "-".join(map(str, range(5, 24))),
        "(1,) 5-30-31",
    ]


def test_more_ways_than_can_be_gone():
    # from each number to the next in two ways: 2 ** 60 ways to the end
    n = 60
    forest = grown(rollout(*range(n + 1)), rollout(*range(n + 1), actions=[1] * n))
    for compact in (True, False):
        tree = forest.get_tree(root(0), compact=compact)
        assert tree.num_vertices() == 2 * n + 1
        assert tree.num_vertices(count_repeat=True) == 2 ** (n + 1) - 1
        assert tree.max_length() == n and len(tree.edges()) == 4 * n - 2
        deepest = forest.get_tree(root(0), compact=compact, max_depth=9).max_length()
        assert deepest == 9


# ---------------------------------------------------------------------------- 16 to 21


CYCLES = {
    "self loop": ((0, 0), ["() 0-0 again"], ["() 0-0 again"]),
    "there and back": ((0, 1, 0), ["() 0-1-0 again"], ["() 0-1", "(0,) 1-0 again"]),
    "a loop at the end": ((0, 1, 1), ["() 0-1-1 again"], ["() 0-1", "(0,) 1-1 again"]),
    "three": (
        (0, 1, 2, 0),
        ["() 0-1-2-0 again"],
        ["() 0-1", "(0,) 1-2", " (0, 0) 2-0 again"],
    ),
}


@pytest.mark.parametrize("case", CYCLES)
def test_16_a_cycle_ends(case):
    obs, compact, full = CYCLES[case]
    forest = grown(rollout(*obs))
    assert lines(forest, 0) == compact and lines(forest, 0, compact=False) == full
    end = forest.get_tree(root(0)).at(())
    assert end.is_terminal and list(end.valid_paths()) == [()]


def test_16_a_cycle_with_branches_ends():
    # 0 -> 1 -> 2 -> 1, 2 -> 3 -> 0, and 3 ends
    forest = grown(rollout(0, 1, 2, 1), rollout(2, 3, 0, actions=[1, 0]))
    assert lines(forest, 0) == ["() 0-1-2", "(0,) 2-1-2 again", "(1,) 2-3-0 again"]
    assert lines(forest, 0, compact=False) == [
        "() 0-1",
        "(0,) 1-2",
        " (0, 0) 2-1 again",
        " (0, 1) 2-3",
        "  (0, 1, 0) 3-0 again",
    ]
    again = forest.get_tree(root(0)).at((0,))
    assert numbers(forest.get_tree(again.node_data).node_data) == [2]  # it goes on from there


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("length", [2, 1000, 5000])
def test_16_a_long_cycle_ends(length, compact):
    forest = grown(rollout(*range(length), 0))
    tree = forest.get_tree(root(1), compact=compact)
    assert tree.num_vertices() == (1 if compact else length)
    last = tree.get_vertex_by_id(tree.num_vertices() - 1)
    assert last.repeats and numbers(last.node_data) == [1]


def test_16_everything_leads_everywhere():
    n = 12
    forest = grown(*[rollout(i, j, actions=[j]) for i in range(n) for j in range(n)])
    tree = forest.get_tree(root(0), compact=False)
    assert tree.num_vertices() == n * n + 1  # each step once
    assert len({v.hash for v in tree.vertices(key_type="id").values()}) == n * n + 1


def test_17_all_outcomes_of_an_action_are_kept():
    forest = grown(
        rollout(0, 1, reward=torch.tensor([1.0])),
        rollout(0, 2, reward=torch.tensor([2.0])),
        rollout(0, 1, reward=torch.tensor([1.0])),
    )
    assert len(forest) == 2
    steps, count = forest.get_child(root(0))
    assert numbers(steps, ("next", "observation")) == [1, 2] and count.tolist() == [2, 1]
    tree = forest.get_tree(root(0))
    assert tree.selected_actions.tolist() == [0, 0]
    assert [float(child.rollout["next", "reward"]) for child in tree.subtree] == [1.0, 2.0]
    assert tree.at((0,)).hash != tree.at((1,)).hash


def test_18_there_is_no_limit_unless_one_is_set():
    forest = MCTSForest()
    for start in range(0, 3000, 500):
        forest.extend(rollout(*range(start, start + 501)))
    assert len(forest) == 3000 and len(forest.get_tree(root(0)).rollout) == 3000
    with pytest.raises(CapacityError, match="max_size is 1000"):
        MCTSForest(max_size=1000).extend(rollout(*range(1002)))


def test_19_the_same_rollout_twice_is_stored_once_and_counted():
    first, second, _ = published()
    forest = grown(first, second, first, first)
    assert len(forest) == 12
    tree = forest.get_tree(root(0))
    assert [child.count for child in tree.subtree] == [3, 1]
    assert list(tree.valid_paths()) == [(0,), (1,)]
    assert forest.get_child(root(5))[1].tolist() == [3]


def test_20_an_empty_forest_says_so():
    forest = MCTSForest()
    assert len(forest) == 0 and len(forest.nodes) == 0
    assert repr(forest) == "MCTSForest(0 steps between 0 observations)"
    for ask in (forest.get_tree, forest.get_child, forest.to_string):
        with pytest.raises(UnknownRowError, match="the forest is empty"):
            ask(root(0))
    forest.extend(rollout(0, 1)[:0])  # of no steps
    assert len(forest) == 0


def test_20_an_unknown_root_is_a_key_error():
    forest = grown(rollout(0, 1))
    with pytest.raises(UnknownRowError, match="no step in the forest leaves or reaches"):
        forest.get_tree(root(2))
    note = r'Note: "observation" is float32\[2\] in the forest, and float64\[2\] here'
    with pytest.raises(UnknownRowError, match=note):  # other content, by its dtype
        forest.get_tree(root(0).apply(lambda x: x.double()))
    with pytest.raises(KeyError, match="observation"):
        forest.get_tree(TensorDict(obs=torch.zeros(2)))
    with pytest.raises(ValueError, match=r"batch_size \[3\]: pass rollout\[0\]"):
        forest.get_tree(rollout(0, 1, 2, 3))
    with pytest.raises(TypeError, match="container, got a Tensor"):
        forest.get_tree(torch.zeros(2))


def through_state(forest, other, tmp_path):
    other.load_state_dict(forest.state_dict())
    return other


def through_folder(forest, other, tmp_path):
    forest.save(tmp_path / "forest")
    return MCTSForest.load(tmp_path / "forest")


@pytest.mark.parametrize("through", [through_state, through_folder])
def test_21_a_forest_can_be_kept(through, tmp_path):
    rewards = torch.arange(6.0)
    first, second, third = (steps.set(("next", "reward"), rewards) for steps in published())
    forest = grown(first, second, first)
    before = lines(forest, 0)
    other = grown(rollout(50, 51, 50, reward=rewards[:2]))
    assert lines(other, 50) == ["() 50-51-50 again"]
    other = through(forest, other, tmp_path)
    assert len(other) == 12 and lines(other, 0) == lines(other, 0) == before
    assert other.get_tree(root(0)).at((0,)).count == 2
    assert other.get_tree(root(0)).at((0,)).hash == forest.get_tree(root(0)).at((0,)).hash
    assert (other.get_tree(root(0)).rollout_from_path((1,)) == second).all()
    with pytest.raises(UnknownRowError):
        other.get_tree(root(50))

    other.extend(third)  # and it goes on like the one that was never stopped
    assert len(forest) == 12 and lines(forest, 0) == before
    forest.extend(third)
    assert lines(other, 0) == lines(forest, 0) and len(other) == 18


@pytest.mark.parametrize("through", [through_state, through_folder])
def test_21_an_empty_forest_can_be_kept(through, tmp_path):
    other = through(MCTSForest(), grown(rollout(0, 1)), tmp_path)
    assert len(other) == 0
    other.extend(rollout(0, 1))
    assert lines(other, 0) == ["() 0-1"]


def test_21_a_folder_remembers_how_the_forest_was_made(tmp_path):
    options = {
        "observation_keys": [("agent", "obs")],
        "action_keys": ["move", ("agent", "turn")],
        "excluded_keys": ["info", ("agent", "info")],
    }
    MCTSForest(**options, max_size=7).save(tmp_path / "forest")
    forest = MCTSForest.load(tmp_path / "forest")
    assert {name: getattr(forest, name) for name in options} == options
    assert forest.steps.max_size == 7


def test_21_a_state_that_does_not_fit_changes_nothing():
    forest = grown(rollout(0, 1, 2), max_size=4)
    before = everything(forest)
    other_keys = MCTSForest(observation_keys=["action"]).state_dict()
    too_large = grown(rollout(*range(6))).state_dict()
    for state, match in [
        (grown(rollout(0, 1, value=torch.ones(1))).state_dict(), "'value'"),
        ({}, "the state of a forest has 'steps'"),
        (other_keys, "in_keys"),
        (too_large, "5 rows, and this one max_size=4"),
        ({"steps": {}}, "Missing key"),
    ]:
        with pytest.raises(RuntimeError, match=match):
            forest.load_state_dict(state)
        assert same(everything(forest), before)


def test_21_a_damaged_folder_says_so(tmp_path):
    grown(rollout(0, 1, 2)).save(tmp_path / "forest")
    for file in (tmp_path / "forest").iterdir():
        data = file.read_bytes()
        file.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        with pytest.raises(DamagedFileError):
            MCTSForest.load(tmp_path / "forest")
        file.write_bytes(data)
    assert lines(MCTSForest.load(tmp_path / "forest"), 0) == ["() 0-1-2"]
    TensorDictMap(in_keys=["x"]).save(tmp_path / "map")
    with pytest.raises(ValueError, match="'raffia.MCTSForest' of version 1 is wanted"):
        MCTSForest.load(tmp_path / "map")


def test_21_saved_over_an_older_one(tmp_path):
    for end in (3, 6):
        grown(rollout(*range(end))).save(tmp_path / "forest")
    assert len(MCTSForest.load(tmp_path / "forest")) == 5


def test_counts_are_filled():
    forest = grown(*[rollout(0, 1, 2)] * 3, rollout(0, 1, 3, actions=[0, 1]))
    tree = forest.get_tree(root(0), compact=False)
    assert [v.count for v in tree.vertices(key_type="path").values()] == [4, 3, 1]
    assert tree.at((0,)).visits == 3
