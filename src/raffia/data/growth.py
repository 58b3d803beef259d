"""How a tree grows out of steps: which vertices there are, and which steps each of them holds."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from raffia.data.tree import Tree


class StepGraph:
    """Which steps leave each node, and where they lead; nodes and steps are numbers from 0 on.

    >>> from raffia.data.growth import StepGraph
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
        """The step that leaves a node, None if there is none or another one."""
        step = self._first[node]
        return step if step >= 0 and self._next[step] < 0 else None


class Growth:
    """A tree as it grows. Each node is followed once, so each step begins one vertex at most.

    Only with `max_depth` a node is followed once for each depth at which it stands, since what
    there is room for below it differs.

    >>> from raffia.data.growth import Growth, StepGraph
    >>> graph = StepGraph()
    >>> graph.extend([0, 1, 1], [1, 2, 3])
    >>> growth = Growth(graph, max_depth=None, compact=True)
    >>> list(growth.tree(0).valid_paths()), growth.steps
    ([(0,), (1,)], [0, 1, 2])
    """

    def __init__(self, graph: StepGraph, *, max_depth: int | None, compact: bool) -> None:
        self.graph, self.max_depth, self.compact = graph, max_depth, compact
        self.vertices: list[Tree] = []
        self.nodes: list[int] = []  # where each vertex leads
        self.spans: list[range] = []  # of each vertex, which of `steps` are its
        self.steps: list[int] = []
        self._followed: dict[tuple[int, int], list[Tree]] = {}  # node, depth -> the vertices below
        self._above: set[int] = set()  # nodes on the way to where it grows just now

    def tree(self, root: int) -> Tree:
        """The tree that grows out of a node."""
        step = self.graph.only(root)
        if step is None:
            tree = self._vertex(root, start=0)
        else:  # a root without a branch is the way to the first one
            self._above.add(root)
            tree = self._way(step)
        self._grow(tree, self.nodes[-1])
        tree.number()
        return tree

    def _grow(self, tree: Tree, node: int) -> None:
        """Follow all ways from the end of a vertex; without recursion, they may be long."""
        pending = [*self._below(tree, node, 0)]
        while pending:
            node, depth, children, steps = pending[-1]
            step = next(steps, None)
            if step is None:
                pending.pop()
                self._above.discard(node)
            else:
                child = self._way(step)
                children.append(child)
                pending += self._below(child, self.nodes[-1], depth + 1)

    def _below(
        self, tree: Tree, node: int, depth: int
    ) -> list[tuple[int, int, list[Tree], Iterator[int]]]:
        """What is to be followed below a vertex: the node, its depth, where to put what is found
        and the steps; or nothing."""
        key = node, 0 if self.max_depth is None else depth
        if tree.repeats or depth == self.max_depth:
            return []
        if key in self._followed:
            tree.subtree = self._followed[key]
            return []
        self._followed[key] = tree.subtree
        self._above.add(node)
        return [(node, depth, tree.subtree, iter(self.graph.leaving(node)))]

    def _way(self, step: int) -> Tree:
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
        tree = self._vertex(node, start)
        tree.repeats = repeats
        return tree

    def _vertex(self, node: int, start: int) -> Tree:
        tree = Tree()
        self.vertices.append(tree)
        self.nodes.append(node)
        self.spans.append(range(start, len(self.steps)))
        return tree
