"""`Tree`: what follows an observation, as vertices and the ways between them.

It grows out of steps: `StepGraph` has the steps that leave each node, and `Growth` tells which
vertices there are of a root, and which steps each of them holds.
"""

from __future__ import annotations

import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal, overload

import torch
from torch import Tensor

from raffia.hints import check_choice
from raffia.tensordict.keys import NestedKey
from raffia.tensordict.lazy import LazyStackedTensorDict
from raffia.tensordict.tensorclass import TensorClass
from raffia.tensordict.tensordict import TensorDict

Path = tuple[int, ...]  # which child to take at each vertex, from the root on


def shown(tree: Tree) -> str:
    """The observation at a vertex, as text.

    >>> from raffia.data.tree import Tree, shown
    >>> tree = Tree()
    >>> tree.node_data = TensorDict(observation=torch.tensor(3))
    >>> shown(tree)
    "{'observation': tensor(3)}"
    """
    return str({} if tree.node_data is None else tree.node_data.to_dict())


class UnknownVertexError(KeyError, ValueError):
    """A vertex was asked for that is not in the tree; a ValueError too, as in TorchRL.

    >>> from raffia.data.tree import Tree
    >>> Tree().get_vertex_by_id(3)
    Traceback (most recent call last):
    ...
    raffia.data.tree.UnknownVertexError: there is no vertex 3 among the 1 of this tree
    """

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class Tree(TensorClass, nocast=True):
    """A vertex: the steps that lead to a node where paths branch (or end), and the vertices below
    it. A tensorclass: `tree.subtree` is the stack of the vertices below, `tree.clone()` a copy of
    all of them.

    A vertex that several ways lead to stands below several others, as the same object; `parent` is
    the first of them. In a copy vertices have no parents until `number` gives them.

    subtree: the vertices below, in the order in which the ways were first taken: `subtree[0]`,
        `subtree.shape`, `for child in subtree`; None without any. A list is stacked.
    rollout: the steps from the vertex above to here, container [n]; None at a root that branches.
    node_data: the observation here, container [].
    count: how often the first step of the rollout was taken; 0 at a root that branches.
    hash: of the first step: observation, action and outcome; None at the root.
    node_id: the number of the vertex in this tree, level by level; 0 is the root.
    repeats: whether the way leads back to where it came from, and therefore ends here.
    action_keys: the entries of the rollout that are the action.

    >>> from raffia.data.tree import Tree
    >>> tree = Tree([Tree(), Tree([Tree()])])
    >>> list(tree.valid_paths()), tree.subtree.shape
    ([(0,), (1, 0)], torch.Size([2]))
    """

    subtree: Tree | None = None
    rollout: TensorDict | None = None
    node_data: TensorDict | None = None
    count: int = 0
    hash: int | None = None
    node_id: int = 0
    repeats: bool = False
    action_keys: tuple[NestedKey, ...] = ("action",)

    _parent: ClassVar[Any] = None  # a weak reference to a vertex, which is not an entry

    def __init__(self, subtree: list[Tree] | Tree | None = None, **fields: Any) -> None:
        if isinstance(subtree, list):
            subtree = side_by_side(subtree)
        super().__init__(subtree=subtree, **fields)

    def number(self) -> None:
        """Assign numbers and parents to this vertex and those below it.

        >>> from raffia.data.tree import Tree
        >>> tree = Tree([Tree(), Tree([Tree()])])
        >>> tree.number()
        >>> tree.edges()
        [(0, 1), (0, 2), (2, 3)]
        """
        for number, tree in enumerate(self._vertices()):
            tree.node_id = number
            for child in tree.children:
                if child._parent is None:
                    child.__dict__["_parent"] = weakref.ref(tree)

    def __getstate__(self) -> dict[str, Any]:
        """The state without the parent: a pickled tree is a copy."""
        state = super().__getstate__()
        state.pop("_parent", None)
        return state

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_vertices()} vertices)"

    # -- this vertex

    @property
    def children(self) -> list[Tree]:
        """The vertices directly below, as a list; of a stack of vertices, these."""
        if self.batch_size:
            return self.tensordicts
        return [] if self.subtree is None else self.subtree.tensordicts

    @property
    def parent(self) -> Tree | None:
        """The vertex above; None at the root, and when the vertex above is not in use any more."""
        return None if self._parent is None else self._parent()

    @property
    def num_children(self) -> int:
        """How many vertices are directly below."""
        return len(self.children)

    @property
    def is_terminal(self) -> bool:
        """Whether the tree ends here: no more is known, it `repeats`, or `max_depth` is reached."""
        return not self.children

    @property
    def visits(self) -> int:
        """How often the first step of the rollout was taken."""
        return self.count

    @property
    def node_observation(self) -> Tensor | TensorDict | None:
        """The observation here: a tensor, or a container where there are several entries."""
        entries = [] if self.node_data is None else list(self.node_data.values(True, True))
        return entries[0] if len(entries) == 1 else self.node_data

    @property
    def node_observations(self) -> TensorDict | None:
        """The observation here as a container [], also of one entry; None without any."""
        return self.node_data

    @property
    def branching_action(self) -> Tensor | TensorDict | None:
        """The action by which the way to here parted from others; None at a root that branches.

        A container where there are several entries, as of the other two.
        """
        return self._action(0)

    @property
    def prev_action(self) -> Tensor | TensorDict | None:
        """The action just before the observation here; None at a root that branches."""
        return self._action(-1)

    @property
    def selected_actions(self) -> Tensor | TensorDict | None:
        """The actions that were taken from here, [num_children, ...]; None where none was.

        One with several outcomes is there for each of them.
        """
        return None if self.subtree is None else self.subtree.branching_action

    def _action(self, at: int) -> Any:
        """The action of one step of the rollout; those of a stack of vertices, stacked."""
        if self.batch_size:
            return torch.stack([tree._action(at) for tree in self.tensordicts])
        if self.rollout is None:
            return None
        step, keys = self.rollout[at], self.action_keys
        return step[keys[0]] if len(keys) == 1 else step.select(*keys)

    # -- all vertices

    def _vertices(self) -> Iterator[Tree]:
        """Iterate over all vertices, each once, level by level."""
        queue = deque([self] if not self.batch_size else self.tensordicts)
        visited = {id(tree) for tree in queue}
        while queue:
            tree = queue.popleft()
            yield tree
            for child in tree.children:
                if id(child) not in visited:
                    visited.add(id(child))
                    queue.append(child)

    def _paths(self) -> Iterator[tuple[Path, Tree]]:
        """Iterate over all paths and the vertices that they lead to, the shortest first."""
        queue: deque[tuple[Path, Tree]] = deque([((), self)])
        while queue:
            path, tree = queue.popleft()
            yield path, tree
            queue.extend(((*path, number), child) for number, child in enumerate(tree.children))

    def _children_first(self) -> Iterator[Tree]:
        pending: list[tuple[Tree, Iterator[Tree]]] = [(self, iter(self.children))]
        visited = {id(self)}
        while pending:
            tree, children = pending[-1]
            child = next(children, None)
            if child is None:
                pending.pop()
                yield tree
            elif id(child) not in visited:
                visited.add(id(child))
                pending.append((child, iter(child.children)))

    @overload
    def vertices(self, *, key_type: Literal["hash"] = "hash") -> dict[int | None, Tree]: ...
    @overload
    def vertices(self, *, key_type: Literal["id"]) -> dict[int, Tree]: ...
    @overload
    def vertices(self, *, key_type: Literal["path"]) -> dict[Path, Tree]: ...

    def vertices(self, *, key_type: Literal["id", "hash", "path"] = "hash") -> dict[Any, Tree]:
        """All vertices by number, by hash, or by path; by path a vertex may occur several times.

        Where `max_depth` cut the tree, several may have one hash; by hash it is the uppermost.

        >>> from raffia.data.tree import Tree
        >>> list(Tree([Tree(), Tree([Tree()])]).vertices(key_type="path"))
        [(), (0,), (1,), (1, 0)]
        """
        match key_type:
            case "id":
                return {tree.node_id: tree for tree in self._vertices()}
            case "hash":
                found: dict[Any, Tree] = {}
                for tree in self._vertices():
                    found.setdefault(tree.hash, tree)
                return found
        check_choice("key_type", key_type, ("id", "hash", "path"))
        return dict(self._paths())

    def num_vertices(self, *, count_repeat: bool = False) -> int:
        """How many vertices there are; with `count_repeat` one counts for every way to it.

        >>> from raffia.data.tree import Tree
        >>> end = Tree()
        >>> both_ways = Tree([Tree([end]), Tree([end])])
        >>> both_ways.num_vertices(), both_ways.num_vertices(count_repeat=True)
        (4, 5)
        """
        if not count_repeat:
            return sum(1 for _ in self._vertices())
        ways: dict[int, int] = {}  # counted from below: there may be too many to go them
        for tree in self._children_first():
            ways[id(tree)] = 1 + sum(ways[id(child)] for child in tree.children)
        return ways[id(self)]

    def edges(self) -> list[tuple[int, int]]:
        """The numbers of each vertex and of one directly below it."""
        return [
            (tree.node_id, child.node_id) for tree in self._vertices() for child in tree.children
        ]

    def valid_paths(self) -> Iterator[Path]:
        """All paths to an end of the tree, the shortest first."""
        return (path for path, tree in self._paths() if tree.is_terminal)

    def max_length(self) -> int:
        """How many vertices the longest way leads through, not counting the root."""
        longest: dict[int, int] = {}
        for tree in self._children_first():
            below = [longest[id(child)] + 1 for child in tree.children]
            longest[id(tree)] = max(below, default=0)
        return longest[id(self)]

    def get_vertex_by_id(self, id: int) -> Tree:
        """The vertex of this number; raises UnknownVertexError for an unknown one."""
        return self._found(self.vertices(key_type="id"), id)

    def get_vertex_by_hash(self, hash: int | None) -> Tree:
        """The vertex of this hash; raises UnknownVertexError for an unknown one."""
        return self._found(self.vertices(key_type="hash"), hash)

    def _found(self, vertices: dict[Any, Tree], key: Any) -> Tree:
        if key not in vertices:
            raise UnknownVertexError(
                f"there is no vertex {key!r} among the {len(vertices)} of this tree"
            )
        return vertices[key]

    def __contains__(self, other: object) -> bool:
        """Whether a vertex is in the tree: itself, or one with the same first step.

        A root has no hash, so it is in the tree only as itself.
        """
        return isinstance(other, Tree) and any(
            tree is other or (tree.hash is not None and tree.hash == other.hash)
            for tree in self._vertices()
        )

    # -- along a path

    def at(self, path: Path) -> Tree:
        """The vertex at the end of a path; raises IndexError if the path leaves the tree.

        >>> from raffia.data.tree import Tree
        >>> Tree([Tree(), Tree([Tree()])]).at((1,)).num_children
        1
        """
        return self._along(path)[-1]

    def rollout_from_path(self, path: Path) -> TensorDict | None:
        """All steps along a path, container [n]; None if the path has no steps.

        Raises IndexError where the path leaves the tree.
        """
        held = [tree.rollout for tree in self._along(path)]
        rollouts = [rollout for rollout in held if rollout is not None]
        return TensorDict.cat(rollouts) if rollouts else None

    def _along(self, path: Path) -> list[Tree]:
        """The vertices of a path, with this one as the first."""
        trees = [self]
        for depth, number in enumerate(path):
            below = trees[-1].children
            if not 0 <= number < len(below):
                raise IndexError(
                    f"path {path} leaves the tree at position {depth}: it asks for child {number} "
                    f"of {len(below)}. tree.valid_paths() lists the paths that lead to an end"
                )
            trees.append(below[number])
        return trees

    def to_string(self, node_format_fn: Callable[[Tree], str] = shown) -> str:
        """A line for each vertex, in the order of their paths, indented by depth.

        >>> from raffia.data.tree import Tree
        >>> print(Tree([Tree(), Tree([Tree()])]).to_string(lambda tree: str(tree.num_children)))
        (0,) 0
        (1,) 1
         (1, 0) 0
        """
        lines = []
        pending: list[tuple[Path, Tree]] = [((), self)]
        while pending:
            path, tree = pending.pop()
            if path or tree.rollout is not None:
                lines.append(f"{' ' * max(len(path) - 1, 0)}{path} {node_format_fn(tree)}")
            pending += [((*path, i), child) for i, child in enumerate(tree.children)][::-1]
        return "\n".join(lines)


def side_by_side(trees: Sequence[Tree]) -> Tree | None:
    """The stack of some vertices, which stay the objects that they are; None of none.

    >>> from raffia.data.tree import Tree, side_by_side
    >>> leaf = Tree()
    >>> side_by_side([leaf, Tree()])[0] is leaf
    True
    """
    return Tree.from_tensordict(LazyStackedTensorDict(*trees)) if trees else None


class StepGraph:
    """The steps that leave each node and where they lead; nodes and steps are numbered from 0.

    >>> from raffia.data.tree import StepGraph
    >>> graph = StepGraph()
    >>> graph.extend([0, 1, 0], [1, 2, 2])  # step 0 leads from node 0 to node 1, and so on
    >>> graph.leaving(0), graph.only(1), graph.only(0)
    ([0, 2], 1, None)
    """

    def __init__(self) -> None:
        self.source = array("q")  # of each step
        self.target = array("q")
        self._next = array("q")  # the step after it that leaves the same node, or -1
        self._first = array("q")  # of each node, the first step that leaves it, or -1
        self._last = array("q")

    def __len__(self) -> int:
        """How many steps there are."""
        return len(self.source)

    def extend(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Add steps that lead from these nodes to those."""
        start, num_nodes = len(self), max([*sources, *targets], default=-1) + 1
        self.source.extend(sources)
        self.target.extend(targets)
        self._next.extend([-1] * len(sources))
        self._first.extend([-1] * (num_nodes - len(self._first)))
        self._last.extend([-1] * (num_nodes - len(self._last)))
        for step, source in enumerate(sources, start):
            before = self._last[source]
            if before < 0:
                self._first[source] = step
            else:
                self._next[before] = step
            self._last[source] = step

    def leaving(self, node: int) -> list[int]:
        """The steps that leave a node, in the order in which they came."""
        steps, step = [], self._first[node]
        while step >= 0:
            steps.append(step)
            step = self._next[step]
        return steps

    def only(self, node: int) -> int | None:
        """The only step that leaves a node, or None if no step does, or several do."""
        step = self._first[node]
        return step if step >= 0 and self._next[step] < 0 else None


class Growth:
    """A tree as it grows. Each node is followed once, so each step begins one vertex at most.

    Only with `max_depth` a node is followed once for each depth at which it stands, since what
    there is room for below it differs. Vertices are numbers, in the order in which they are found;
    the root is 0.

    >>> from raffia.data.tree import Growth, StepGraph
    >>> graph = StepGraph()
    >>> graph.extend([0, 1, 1], [1, 2, 3])
    >>> growth = Growth(graph, 0, max_depth=None, compact=True)
    >>> growth.below, growth.lengths, growth.steps
    ([[1, 2], [], []], [1, 1, 1], [0, 1, 2])
    """

    def __init__(
        self, graph: StepGraph, root: int, *, max_depth: int | None, compact: bool
    ) -> None:
        self.graph, self.max_depth, self.compact = graph, max_depth, compact
        self.nodes: list[int] = []  # where each vertex leads
        self.below: list[list[int]] = []  # the vertices below each; the same list for one node
        self.repeats: list[bool] = []
        self.lengths: list[int] = []  # how many of `steps` are of each vertex, one after the other
        self.steps: list[int] = []
        self.ended: list[int] = []  # the vertices, those below one before it
        self._followed: dict[tuple[int, int], list[int]] = {}  # node, depth -> the vertices below
        self._above: set[int] = set()  # nodes on the way to where it grows just now
        step = graph.only(root)
        if step is None:
            self._vertex(root, 0, False)
        else:  # a root without a branch is the way to the first one
            self._above.add(root)
            self._way(step)
        self._grow()

    def _grow(self) -> None:
        """Follow all ways from the end of the root; without recursion, they may be long."""
        pending = self._following(0, 0)
        while pending:
            vertex, depth, steps = pending[-1]
            step = next(steps, None)
            if step is None:
                pending.pop()
                self._above.discard(self.nodes[vertex])
                self.ended.append(vertex)
            else:
                child = self._way(step)
                self.below[vertex].append(child)
                pending += self._following(child, depth + 1)

    def _following(self, vertex: int, depth: int) -> list[tuple[int, int, Iterator[int]]]:
        """A branch below a vertex: the vertex, its depth and its steps; or an empty list."""
        node = self.nodes[vertex]
        key = node, 0 if self.max_depth is None else depth
        if not self.repeats[vertex] and depth != self.max_depth:
            if key not in self._followed:
                self._followed[key] = self.below[vertex]
                self._above.add(node)
                return [(vertex, depth, iter(self.graph.leaving(node)))]
            self.below[vertex] = self._followed[key]
        self.ended.append(vertex)
        return []

    def _way(self, step: int) -> int:
        """A vertex of a step, and if compact of those after it up to a branch or an end."""
        graph, start = self.graph, len(self.steps)
        passed = {graph.source[step]}
        while True:
            self.steps.append(step)
            node = graph.target[step]
            repeats = node in passed or node in self._above
            following = graph.only(node) if self.compact and not repeats else None
            if following is None:
                break
            passed.add(node)
            step = following
        return self._vertex(node, len(self.steps) - start, repeats)

    def _vertex(self, node: int, length: int, repeats: bool) -> int:
        self.nodes.append(node)
        self.below.append([])
        self.repeats.append(repeats)
        self.lengths.append(length)
        return len(self.nodes) - 1
