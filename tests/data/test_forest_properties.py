"""A forest equals a plain Python list of steps, in any environment and however it is
filled.

The model is a dictionary from steps (state, action, next state) to their counts, and a
tree is a plain recursive walk through it.
"""

import tempfile
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from raffia import TensorDict
from raffia.data.forest import MCTSForest
from raffia.data.tree import StepGraph

STATES = 6
EXAMPLES = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate, Phase.shrink),  # to explain a failure takes minutes
    suppress_health_check=list(HealthCheck),
)


# ---------------------------------------------------------------------------- the model


def leaving(steps, node):
    return [step for step in steps if step[0] == node]


def chain(steps, step, compact, above=()):
    """The steps from this one to a branch or an end, the last node, and whether that is above."""
    passed = [step]
    while True:
        node = passed[-1][2]
        if node in above or node in {s for s, _, _ in passed}:
            return passed, node, True
        following = leaving(steps, node)
        if not compact or len(following) != 1:
            return passed, node, False
        passed += following


def unfolded(steps, node, compact, max_depth=None):
    """The tree of an environment without cycles: (steps, last node, whether repeated, children)."""

    def vertex(step, depth):
        passed, node, _ = chain(steps, step, compact)
        return passed, node, False, below(node, depth)

    def below(node, depth):
        return [] if depth == max_depth else [vertex(s, depth + 1) for s in leaving(steps, node)]

    first = leaving(steps, node)
    return vertex(first[0], 0) if len(first) == 1 else ([], node, False, below(node, 0))


def unfolded_once(steps, root, compact, max_depth=None):
    """The tree of any environment: each node is expanded once, on the first path to it."""
    followed = {}

    def vertex(step, above, depth):
        passed, node, again = chain(steps, step, compact, above)
        return passed, node, again, [] if again else below(node, above, depth)

    def below(node, above, depth):
        if depth == max_depth:
            return []
        key = node, depth if max_depth is not None else 0
        if key not in followed:
            near = {*above, node}
            followed[key] = [vertex(s, near, depth + 1) for s in leaving(steps, node)]
        return followed[key]

    first = leaving(steps, root)
    if len(first) == 1:
        return vertex(first[0], {root}, 0)
    return [], root, False, below(root, set(), 0)


def paths_of(model, path=()):
    """All vertices by path, the upper ones first."""
    level = [((), model)]
    while level:
        yield from level
        level = [((*path, i), x) for path, m in level for i, x in enumerate(m[3])]


# ---------------------------------------------------------------------------- the forest


def observed(states):
    """States as observations of several numbers."""
    s = torch.tensor(states)
    return torch.stack([s // 2, s % 2, -s], -1).float()


def read(x):
    return [int(-number) for number in x[..., 2].flatten()]


def rollout(walk, start):
    """Steps as a container; "order" counts them from `start`, to find the last one."""
    s, a, t = (list(column) for column in zip(*walk, strict=True))
    after = TensorDict({"observation": observed(t)}, [len(walk)])
    entries = {"observation": observed(s), "action": torch.tensor(a)[:, None], "next": after}
    return TensorDict({**entries, "order": torch.arange(start, start + len(walk))}, [len(walk)])


def root(state):
    return TensorDict(observation=observed(state))


def as_model(tree):
    """A tree in the form of the model."""
    steps = [] if tree.rollout is None else steps_of(tree.rollout)
    (node,) = read(tree.node_data["observation"])
    return steps, node, tree.repeats, [as_model(child) for child in tree.children]


def steps_of(td):
    actions, after = td["action"].flatten().tolist(), td["next", "observation"]
    return list(zip(read(td["observation"]), actions, read(after), strict=True))


def filled(walks, ways):
    """A forest of these walks, added in these ways, and the model."""
    forest, counts, last, num_steps = MCTSForest(), Counter(), {}, 0
    for number, walk in enumerate(walks):
        td = rollout(walk, num_steps)
        for step in walk:
            counts[step] += 1
            last[step] = num_steps
            num_steps += 1
        match ways[number % len(ways)]:
            case "rollout":
                forest.extend(td)
            case "cut":
                forest.extend(td[: len(walk) // 2])
                forest.extend(td[len(walk) // 2 :])
            case "batch":
                forest.extend(td[None])
            case "steps":
                for step in td:
                    forest.add(step)
            case "look":  # between two writes
                forest.extend(td)
                forest.get_tree(td[0])
            case "reload":
                forest.extend(td)
                other = MCTSForest()
                other.load_state_dict(forest.state_dict())
                forest = other
            case "save":
                forest.extend(td)
                with tempfile.TemporaryDirectory() as folder:
                    forest.save(folder + "/forest")
                    forest = MCTSForest.load(folder + "/forest")
    return forest, counts, last


WAYS = ["rollout", "cut", "batch", "steps", "look", "reload", "save"]
WAYS_LISTS = st.lists(st.sampled_from(WAYS), min_size=1)


@st.composite
def walks(draw, cycles):
    """Walks from any state to any states; without cycles, only upwards."""
    found = []
    for _ in range(draw(st.integers(1, 6))):
        state, walk = draw(st.integers(0, STATES - 2)), []
        for _ in range(draw(st.integers(1, 6))):
            if not cycles and state == STATES - 1:
                break
            after = draw(st.integers(0 if cycles else state + 1, STATES - 1))
            walk.append((state, draw(st.integers(0, 1)), after))
            state = after
        found.append(walk)
    return found


DEPTH = st.sampled_from([None, None, 0, 1, 2, 3])


@EXAMPLES
@given(walks(cycles=False), WAYS_LISTS, st.booleans(), DEPTH)
def test_an_environment_without_cycles(walks, ways, compact, max_depth):
    forest, counts, last = filled(walks, ways)
    known = {state for s, _, t in counts for state in (s, t)}
    assert len(forest) == len(counts) and len(forest.nodes) == len(known)
    for state in range(STATES):
        if state not in known:
            assert root(state) not in forest.nodes
            continue
        steps, count = forest.get_child(root(state))
        assert steps_of(steps) == leaving(counts, state)
        assert count.tolist() == [counts[step] for step in leaving(counts, state)]
        assert steps["order"].tolist() == [last[step] for step in leaving(counts, state)]

        tree = forest.get_tree(root(state), compact=compact, max_depth=max_depth)
        model = unfolded(counts, state, compact, max_depth)
        assert as_model(tree) == model
        check_questions(tree, model, counts)


def check_questions(tree, model, counts):
    """All queries of a tree, against the paths of the model."""
    by_path = dict(paths_of(model))
    vertices = tree.vertices(key_type="path")
    assert list(vertices) == list(by_path)
    assert list(tree.valid_paths()) == [path for path, m in by_path.items() if not m[3]]
    assert tree.max_length() == max(map(len, by_path))
    assert tree.num_vertices(count_repeat=True) == len(by_path)
    assert tree.num_vertices() == len({id(vertex) for vertex in vertices.values()})
    ids = {path: vertex.node_id for path, vertex in vertices.items()}
    assert sorted({*ids.values()}) == list(range(tree.num_vertices()))
    assert set(tree.edges()) == {(ids[path[:-1]], ids[path]) for path in by_path if path}
    assert len(tree.edges()) == len(set(tree.edges()))
    for path, (steps, _, _, below) in by_path.items():
        vertex = vertices[path]
        assert tree.at(path) is vertex and tree.get_vertex_by_id(ids[path]) is vertex
        along = [step for i in range(len(path) + 1) for step in by_path[path[:i]][0]]
        found = tree.rollout_from_path(path)
        assert ([] if found is None else steps_of(found)) == along
        assert vertex.count == (counts[steps[0]] if steps else 0)
        assert (vertex.hash is None) == (path == ())
        assert path == () or vertex in vertex.parent.subtree
        if below:
            actions = [m[0][0][1] for m in below]
            assert vertex.selected_actions.flatten().tolist() == actions
        if steps:
            ends = int(vertex.branching_action), int(vertex.prev_action)
            assert ends == (steps[0][1], steps[-1][1])


@EXAMPLES
@given(walks(cycles=True), WAYS_LISTS, st.booleans(), DEPTH)
def test_an_environment_with_cycles(walks, ways, compact, max_depth):
    check_forest(walks, ways, compact, max_depth)


def check_forest(walks, ways, compact, max_depth):
    forest, counts, _ = filled(walks, ways)
    assert len(forest) == len(counts)
    for state in sorted({s for step in counts for s in step[::2]}):
        assert steps_of(forest.get_child(root(state))[0]) == leaving(counts, state)
        tree = forest.get_tree(root(state), compact=compact, max_depth=max_depth)
        model = unfolded_once(counts, state, compact, max_depth)
        assert as_model(tree) == model
        check_questions(tree, model, counts)
        if max_depth is None:
            check_cycles(tree, state, counts, compact)


def check_cycles(tree, state, counts, compact):
    """Invariants of a tree of any environment, in whatever order it grew."""
    vertices = list(tree.vertices(key_type="id").values())
    stored = [step for v in vertices if v.rollout is not None for step in steps_of(v.rollout)]
    starts = [steps_of(v.rollout)[0] for v in vertices if v.rollout is not None]
    assert set(stored) == reachable(counts, state)  # nothing is lost
    assert len(starts) == len(set(starts))
    if not compact:
        assert len(stored) == len(set(stored))
    by_path = tree.vertices(key_type="path")
    for vertex in vertices:
        (node,) = read(vertex.node_data["observation"])
        if vertex.repeats:
            assert vertex.subtree is None
            own = {s for s, _, _ in steps_of(vertex.rollout)}
            paths = [path for path, other in by_path.items() if other is vertex]
            nodes = [by_path[path[:i]].node_data for path in paths for i in range(len(path))]
            above = {read(one["observation"])[0] for one in nodes}
            assert node in own | above | {state}
        else:
            below = [steps_of(child.rollout)[0] for child in vertex.children]
            assert below == leaving(counts, node)


def reachable(counts, state):
    found, pending = set(), [state]
    while pending:
        new = {*leaving(counts, pending.pop())} - found
        found |= new
        pending += [t for _, _, t in new]
    return found


# ------------------------------------------------------------------- the tests can fail


def last_first(graph, node):
    return StepGraph_leaving(graph, node)[::-1]


StepGraph_leaving = StepGraph.leaving
LIES = {
    "children in another order": (StepGraph, "leaving", last_first),
    "one child less": (StepGraph, "leaving", lambda g, n: StepGraph_leaving(g, n)[:3]),
    "chains are cut": (StepGraph, "only", lambda g, n: None),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_wrong_tree_is_noticed(lie, monkeypatch):
    monkeypatch.setattr(*LIES[lie])
    wrong = given(walks(cycles=True), WAYS_LISTS, st.booleans(), DEPTH)(check_forest)
    with pytest.raises(AssertionError):
        settings(EXAMPLES, phases=[Phase.generate])(wrong)()
