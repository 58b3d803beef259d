"""MCTSForest and Tree: queries of a forest, what it stores, and errors.

Trees of any environment are those of a plain recursive walk: test_forest_properties.py.
"""

import pickle

import pytest
import torch

from raffia import DamagedFileError, TensorDict, is_tensorclass
from raffia.data.forest import MCTSForest
from raffia.data.map import TensorDictMap, UnknownRowError
from raffia.data.table import CapacityError
from raffia.data.tree import StepGraph, Tree


def rollout(*obs, actions=None, **more):
    """A path through the observations with these numbers; more: entries [T] under "next"."""
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
    """The observations of a container, by their first element."""
    return td[key][..., 0].flatten().int().tolist()


def lines(forest, number, **options):
    """The tree below an observation, a line for each vertex: its path, steps and location."""
    tree = forest.get_tree(root(number), **options)

    def line(tree):
        here, end = numbers(tree.rollout), numbers(tree.node_data)
        return "-".join(map(str, here + end)) + (" again" if tree.repeats else "")

    return tree.to_string(line).split("\n")


def published():
    """Six steps from a reset, six others from there, and six others from the fourth of these."""
    first = rollout(0, 1, 2, 3, 4, 5, 6, actions=[0, 0, 0, 0, 0, 0])
    second = rollout(0, 11, 12, 13, 14, 15, 16, actions=[1, 0, 0, 0, 0, 0])
    third = rollout(13, 21, 22, 23, 24, 25, 26, actions=[1, 0, 0, 0, 0, 0])
    return first, second, third


# ---------------------------------------------------------------------------- trees


def test_the_published_example():
    # the docstring of torchrl.data.map.tree.MCTSForest, with made-up observations
    first, second, third = published()
    forest = grown(first, second, third)
    assert len(forest) == 18
    tree = forest.get_tree(first[0])
    assert list(tree.valid_paths()) == [(0,), (1, 0), (1, 1)]
    by_hand = torch.cat([tree.subtree[1].rollout, tree.subtree[1].subtree[0].rollout])
    assert (by_hand == second).all() and (tree.rollout_from_path((1, 0)) == second).all()
    assert list(tree.vertices()) == [v.hash for v in tree.vertices(key_type="id").values()]
    assert lines(forest, 0) == [
        "(0,) 0-1-2-3-4-5-6",
        "(1,) 0-11-12-13",
        " (1, 0) 13-14-15-16",
        " (1, 1) 13-21-22-23-24-25-26",
    ]
    by_function = forest.to_string(root(0), lambda tree: str(tree.num_children))
    assert by_function.split("\n")[1] == "(1,) 2"
    plain = grown(rollout(0, 1), rollout(0, 2, actions=[1])).to_string(root(0))
    assert plain.startswith("(0,) {'observation': tensor([1.0000, 1.2500])}")


def test_a_vertex_has_the_steps_to_it_and_its_children():
    forest = grown(
        rollout(0, 1, 2, 3, actions=[4, 5, 6]),
        rollout(2, 7, actions=[8]),
        rollout(0, 1, actions=[4]),
    )
    tree = forest.get_tree(root(0))  # has no branch, so it leads to the first one
    assert numbers(tree.rollout) == [0, 1] and numbers(tree.node_data) == [2]
    assert int(tree.branching_action) == 4 and int(tree.prev_action) == 5
    assert (tree.node_observation == root(2)["observation"]).all()
    assert (tree.num_children, tree.count, tree.visits) == (2, 2, 2)
    assert (tree.hash, tree.node_id, tree.parent, tree.is_terminal) == (None, 0, None, False)
    child = tree.at((1,))
    assert child.parent is tree and child.is_terminal and child.selected_actions is None
    assert tree.get_vertex_by_id(2) is child and tree.get_vertex_by_hash(child.hash) is child
    assert repr(tree) == "Tree(3 vertices)"
    branching = grown(*published()).get_tree(root(0))  # a root that branches has no steps
    assert branching.rollout is branching.branching_action is branching.prev_action is None
    end = grown(*published()).get_tree(root(26))  # where the known ends
    assert end.rollout is None and end.rollout_from_path(()) is None
    steps, count = forest.get_child(root(7))
    assert steps.batch_size == (0,) and count.tolist() == []


def test_a_tree_is_a_tensorclass_and_its_children_a_stack():
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


def test_locations_with_several_paths_are_one_vertex():
    forest = grown(rollout(0, 1, 3, 4), rollout(0, 2, 3, 5, actions=[1, 0, 1]))
    tree = forest.get_tree(root(0))
    assert tree.at((0, 0)) is tree.at((1, 0)) and tree.at((1, 0)).parent is tree.at((0,))
    assert (tree.num_vertices(), tree.num_vertices(count_repeat=True)) == (5, 7)
    assert tree.edges() == [(0, 1), (0, 2), (1, 3), (1, 4), (2, 3), (2, 4)]
    assert lines(forest, 0)[3:] == ["(1,) 0-2-3", " (1, 0) 3-4", " (1, 1) 3-5"]


@pytest.mark.parametrize("compact", [True, False])
def test_a_vertex_by_its_hash_is_the_uppermost(compact):
    # 3 is reached with one step and with two, so there is more room below it on the shorter path
    forest = grown(rollout(0, 3, 4, 5), rollout(0, 1, 3, 6, actions=[1, 0, 1]))
    for depth in range(5):
        tree = forest.get_tree(root(0), compact=compact, max_depth=depth)
        by_path = tree.vertices(key_type="path")
        for vertex in tree.vertices().values():
            same = [path for path, other in by_path.items() if other.hash == vertex.hash]
            assert vertex is tree.at(same[0])


@pytest.mark.parametrize("compact", [True, False])
def test_long_and_many_paths(compact, monkeypatch):
    n = 1500
    tree = grown(rollout(*range(n + 1))).get_tree(root(0), compact=compact)
    length = 0 if compact else n - 1
    assert tree.max_length() == length == len(tree.edges())
    assert tree.num_vertices() == tree.num_vertices(count_repeat=True) == length + 1
    assert list(tree.valid_paths()) == [(0,) * length]
    assert numbers(tree.rollout_from_path((0,) * length)) == list(range(n))
    tree = grown(rollout(*range(n), 0)).get_tree(root(1), compact=compact)
    last = tree.get_vertex_by_id(tree.num_vertices() - 1)
    assert last.repeats and numbers(last.node_data) == [1]
    n = 60  # from each number to the next in two ways: 2 ** 60 ways to the end
    forest = grown(rollout(*range(n + 1)), rollout(*range(n + 1), actions=[1] * n))
    tree = forest.get_tree(root(0), compact=compact)
    assert (tree.num_vertices(), tree.max_length(), len(tree.edges())) == (2 * n + 1, n, 4 * n - 2)
    assert tree.num_vertices(count_repeat=True) == 2 ** (n + 1) - 1
    monkeypatch.setattr("raffia.data.forest.CHUNK", 7)  # more steps than one chunk
    forest = grown(rollout(*range(24)), rollout(5, 30, 31, actions=[1, 0]))
    assert lines(forest, 3)[1] == "(0,) " + "-".join(map(str, range(5, 24)))


# ---------------------------------------------------------------------------- stored entries


def test_the_last_entries_of_each_step_are_stored():
    forest = MCTSForest(excluded_keys=["info", ("deep", "info")])
    for reward in (1.0, 2.0):
        steps = rollout(0, 1, 2, reward=torch.tensor([reward, -reward]))
        steps.update({"value": torch.tensor([reward, 3.0]), "info": torch.zeros(2)})
        steps["next", "info"] = torch.zeros(2)
        steps["next", "deep"] = TensorDict(info=torch.zeros(2), x=torch.ones(2), batch_size=[2])
        before = steps.lock_().clone()
        forest.extend(steps)
        assert (steps == before).all() and steps.keys(True) == before.keys(True)
        steps.unlock_()["observation"].fill_(9)  # and it shares nothing with the forest
    stored = forest.get_tree(root(0)).rollout
    assert stored["next", "reward"].tolist() == [2.0, -2.0]
    assert stored["value"].tolist() == [2.0, 3.0]
    required = {"action", "observation", ("next", "observation")}
    more = {"value", ("next", "reward"), ("next", "deep", "x")}
    assert {*stored.keys(True, True)} == required | more


def test_extend_can_return_the_tree():
    forest, (first, second, _) = MCTSForest(), published()
    assert (forest or MCTSForest()) is forest  # an empty one is not false
    assert forest.extend(first) is None
    tree = forest.extend(second, return_node=True)
    assert list(tree.valid_paths()) == [(0,), (1,)]
    assert list(forest.add(first[2], return_node=True).valid_paths()) == [()]
    assert root(2) in forest.nodes and root(30) not in forest.nodes and len(forest.nodes) == 13
    assert repr(forest) == "MCTSForest(12 steps between 13 observations)"


# --------------------------------------------------------------------------- errors


def changed_rollout(**changes):
    return rollout(0, 1, 2).update(changes)


def with_next(**changes):
    steps = rollout(0, 1, 2)
    steps["next"].update(changes)
    return steps


OBJECT = (TypeError, ValueError)
REFUSED = {
    "no next": (rollout(0, 1).exclude("next"), KeyError, r"no \['next.observation'\]"),
    "next is a tensor": (changed_rollout(next=torch.zeros(2)), KeyError, "under .next., the obs"),
    "no outcome": (rollout(0, 1).exclude(("next", "observation")), KeyError, "next.obs"),
    "outcome of another dtype": (
        with_next(observation=torch.ones(2, 2, dtype=torch.float64)),
        ValueError,
        r'"observation" is float32\[2\], but the entry under "next" is float64\[2\]',
    ),
    "outcome of another shape": (
        with_next(observation=torch.ones(2, 3)),
        ValueError,
        r"float32\[2\], but the entry under .next. is float32\[3\]",
    ),
    "an object as action": (changed_rollout(action="left"), TypeError, '"action" is a'),
    "an object as entry": (changed_rollout(name="Ada"), OBJECT, "'name'"),
    "the forest's own entry": (changed_rollout(_count=torch.ones(2)), ValueError, "_count"),
    "no dimension of steps": (rollout(0, 1)[0], ValueError, r"call add\(step\)"),
    "no container": (torch.zeros(3), TypeError, "container; got a Tensor"),
    "too many": (rollout(*range(9)), CapacityError, r"max_size is 6\..* a larger"),
}
REWARDS = torch.ones(2)
REFUSED_LATER = {
    "observations of another dtype": (
        rollout(0, 1, 2, reward=REWARDS).apply(lambda x: x.double()),
        ValueError,
        r"float32\[2\] as .observation., but these hold float64\[2\]",
    ),
    "an action of another dtype": (
        rollout(0, 4, 5, reward=REWARDS).set("action", torch.zeros(2)),
        ValueError,
        'as "action"',
    ),
    "a reward of another dtype": (rollout(0, 4, 5, reward=REWARDS.int()), ValueError, "reward"),
    "an entry less": (rollout(0, 4, 5), ValueError, r"it lacks \['next.reward'\]"),
    "an entry more": (
        with_next(reward=REWARDS, value=REWARDS),
        ValueError,
        r"one: this one has in addition \['next.value'\]",
    ),
    "another entry": (with_next(rewards=REWARDS), ValueError, r"it lacks \['next.reward'\], this"),
}


def same(one, other):
    """Whether two forests are equal, private state included."""
    mine, theirs = one.steps.state_dict(), other.steps.state_dict()
    assert mine.keys() == theirs.keys() and repr(one) == repr(other)
    assert all(torch.equal(x, theirs[name]) for name, x in mine.items() if torch.is_tensor(x))
    return not len(one) or (one.nodes.keys() == other.nodes.keys()).all()


@pytest.mark.parametrize("case", [*REFUSED, *REFUSED_LATER])
@pytest.mark.parametrize("first", [False, True])
def test_a_rollout_that_is_refused_changes_nothing(case, first):
    wrong, error, match = (REFUSED | REFUSED_LATER)[case]
    if first and case in REFUSED_LATER:
        return
    known = rollout(0, 1, 2, 3, actions=[0, 1, 2])
    if case in REFUSED_LATER:
        known["next", "reward"] = torch.ones(3)
    before = () if first else (known,)
    forest = grown(*before, max_size=6)
    with pytest.raises(error, match=match) as caught:
        forest.extend(wrong)
    if first:
        assert len(forest) == len(forest.nodes) == 0
    else:
        assert same(forest, grown(*before, max_size=6))
    assert not any(word in str(caught.value) for word in ("lru", "delete")) or "_count" in case
    if first:  # the form of observations is unknown
        known = known.apply(lambda x: x.int())
    forest.extend(known)  # it continues as if nothing had happened
    assert len(forest) == 3 and forest.get_tree(known[0]).count == (1 if first else 2)


def test_an_interrupt_while_steps_are_linked(monkeypatch):
    forest = grown(rollout(0, 1, 2))
    assert len(forest.nodes) == 3
    forest.extend(rollout(2, 3, 4))

    def interrupted(graph, sources, targets):
        graph.source.extend(sources)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StepGraph, "extend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            forest.get_tree(root(0))
    assert lines(forest, 0) == ["() 0-1-2-3-4"] and len(forest.nodes) == 5


def tree_of(steps):
    return lambda: MCTSForest().extend(steps, return_node=True)


EMPTY, FULL = MCTSForest(), grown(*published())
TREE, DOUBLE = FULL.get_tree(root(0)), root(0).apply(torch.Tensor.double)
NOTE = r'Note: "observation" is float32\[2\] in the forest, and float64\[2\] here'
ONLY = "only other entries can be left out"
MISTAKES = [
    (lambda: EMPTY.get_tree(root(0)), UnknownRowError, "the forest is empty"),
    (lambda: EMPTY.get_child(root(0)), UnknownRowError, "the forest is empty"),
    (lambda: FULL.get_tree(root(99)), UnknownRowError, "no step in the forest starts from or"),
    (lambda: FULL.get_tree(DOUBLE), UnknownRowError, NOTE),
    (lambda: FULL.get_tree(TensorDict(obs=torch.zeros(2))), KeyError, "observation"),
    (lambda: FULL.get_tree(rollout(0, 1, 2, 3)), ValueError, r"_size \[3\]: pass rollout\[0\]"),
    (lambda: FULL.get_tree(torch.zeros(2)), TypeError, "container; got a Tensor"),
    (lambda: FULL.get_tree(root(0), max_depth=-1), ValueError, "max_depth=-1 must be at least 0"),
    (lambda: TREE.at((2,)), IndexError, r"leaves the tree at position 0: it asks for"),
    (lambda: TREE.at((1, 0, 0)), IndexError, r"leaves the tree at position 2: it asks for"),
    (lambda: TREE.rollout_from_path((-1,)), IndexError, r"leaves the tree at position 0: it asks"),
    (lambda: TREE.get_vertex_by_id(100), KeyError, "no vertex 100 among the 5 of this tree"),
    (lambda: TREE.get_vertex_by_id(100), ValueError, "no vertex 100 among the 5 of this tree"),
    (lambda: TREE.get_vertex_by_hash(12345), KeyError, "no vertex 12345"),
    (lambda: TREE.vertices(key_type="name"), ValueError, "key_type='name' must be one of 'id'"),
    (tree_of(published()[0][None]), ValueError, r"needs a single rollout \[T\]; got \[1, 6\]"),
    (tree_of(rollout(0)), ValueError, "needs a first step"),
    (lambda: MCTSForest(excluded_keys=["action"]), ValueError, ONLY),
    (lambda: MCTSForest(excluded_keys=[("next", "observation")]), ValueError, ONLY),
    (lambda: MCTSForest(excluded_keys=["next"]), ValueError, ONLY),
    (lambda: MCTSForest(observation_keys="observation"), TypeError, "list or a tuple of keys"),
]


def test_errors_name_the_problem():
    for call, error, match in MISTAKES:
        with pytest.raises(error, match=match):
            call()
    assert len(EMPTY) == len(EMPTY.nodes) == 0


# ---------------------------------------------------------------------------- saved


def through_state(forest, other, tmp_path):
    other.load_state_dict(forest.state_dict())
    return other


def through_folder(forest, other, tmp_path):
    grown(rollout(0, 5)).save(tmp_path / "forest")  # which is written over
    forest.save(tmp_path / "forest")
    return MCTSForest.load(tmp_path / "forest")


@pytest.mark.parametrize("through", [through_state, through_folder])
def test_a_saved_forest_continues_like_the_original(through, tmp_path):
    rewards = torch.arange(6.0)
    first, second, third = (steps.set(("next", "reward"), rewards) for steps in published())
    forest, other = grown(first, second, first), grown(rollout(50, 51, 50, reward=rewards[:2]))
    assert lines(other, 50) == ["() 50-51-50 again"]
    other = through(forest, other, tmp_path)
    assert same(forest, other) and lines(other, 0) == lines(forest, 0)
    with pytest.raises(UnknownRowError):
        other.get_tree(root(50))
    other.extend(third)
    forest.extend(third)
    assert same(forest, other) and lines(other, 0) == lines(forest, 0)
    empty = through(MCTSForest(), grown(rollout(0, 1)), tmp_path)
    assert len(empty) == 0 and lines(through(grown(rollout(0, 1)), empty, tmp_path), 0) == [
        "() 0-1"
    ]


def test_an_invalid_state_or_folder_changes_nothing(tmp_path):
    forest = grown(rollout(0, 1, 2), max_size=4)
    for state, match in [
        (grown(rollout(0, 1, value=torch.ones(1))).state_dict(), "'value'"),
        ({}, "the state of a forest must have the entry 'steps'"),
        (MCTSForest(observation_keys=["action"]).state_dict(), "in_keys"),
        (grown(rollout(*range(6))).state_dict(), "5 rows, but this one has max_size=4"),
        ({"steps": {}}, "Missing key"),
    ]:
        with pytest.raises(RuntimeError, match=match):
            forest.load_state_dict(state)
        assert same(forest, grown(rollout(0, 1, 2), max_size=4))
    forest.save(tmp_path / "forest")
    for file in (tmp_path / "forest").iterdir():
        data = file.read_bytes()
        file.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        with pytest.raises(DamagedFileError):
            MCTSForest.load(tmp_path / "forest")
        file.write_bytes(data)
    TensorDictMap(in_keys=["x"]).save(tmp_path / "map")
    with pytest.raises(ValueError, match="needs 'raffia.MCTSForest' of version 1"):
        MCTSForest.load(tmp_path / "map")


def test_names_of_torchrl():
    forest = MCTSForest(max_size=100, reward_keys=["reward"], action_keys=["action"])
    for steps in published():
        forest.extend(steps.set(("next", "reward"), torch.ones(6)))
    assert forest.reward_keys == ["reward"] and forest.max_size == 100
    assert len(forest.data_map) == 18 and root(0) in forest.node_map
    tree = forest.get_tree(root(0))
    assert [*MCTSForest.valid_paths(tree)] == [*tree.valid_paths()]
    assert numbers(tree.at((1,)).node_observations) == [13]
    with pytest.raises(KeyError, match="reward"):
        forest.extend(rollout(0, 1))
