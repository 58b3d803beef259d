"""How a tree grows out of steps: which vertices there are, and which steps each of them holds."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence


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
    there is room for below it differs. Vertices are numbers, in the order in which they are found;
    the root is 0.

    >>> from raffia.data.growth import Growth, StepGraph
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
        """What is to be followed below a vertex: itself, its depth and the steps; or nothing."""
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
