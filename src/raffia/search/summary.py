"""A searched tree as text: a table of its most visited part, one line a node."""

import textwrap
from collections.abc import Sequence

from raffia.hints import plural
from raffia.search.graph import TreeEdge, TreeGraph, TreeNode, figures, percent, shown_name

_WIDTH = 100  # of the whole text, in characters
_STEM = 30  # of the lines that lead to a node: ten levels
_LAST = "└─ "
_HEADS = ("visits", "share", "Q", "prior", "reward", "raw value")


def summary(graph: TreeGraph, max_nodes: int = 24) -> str:
    """The most visited nodes of a root's tree, line by line.

    >>> from raffia.search import RecurrentOutput, RootOutput, search
    >>> def bandit(embedding, action):  # the second of two arms pays 1
    ...     rows = len(action)
    ...     return RecurrentOutput(reward=(action == 1).float(), value=torch.zeros(rows),
    ...                            prior_logits=torch.zeros(rows, 2)), embedding
    >>> start = RootOutput(torch.zeros(1, 2), torch.zeros(1), torch.zeros(1, 1))
    >>> tree = search(start, bandit, num_simulations=9, discount=0.5)
    >>> print(summary(tree.to_graph(), max_nodes=4))
    root 0: value +1.36, 9 simulations, depth 5, 10 nodes (4 shown)
    best path: 1 · 1 · 1 · 1 · 0
    action                   visits  share      Q  prior  reward  raw value
    root                          9                                   +0.00
    ├─ 1                          8    89%  +1.53    50%   +1.00      +0.00
    │  ├─ 1                       6    86%  +1.42    50%   +1.00      +0.00
    │  │  ├─ 1 (+2 actions)       4    80%  +1.25    50%   +1.00      +0.00
    │  │  └─ … 1 more action, 1 visit
    │  └─ … 1 more action, 1 visit
    └─ … 1 more action, 1 visit
    """
    return "\n".join(_Table(graph, graph.most_visited(max_nodes)).lines())


class _Table:
    """The state shared by all lines of a summary."""

    def __init__(self, graph: TreeGraph, shown: Sequence[int]) -> None:
        self.graph, self.shown = graph, set(shown)
        edges = [edge for row in shown for edge in graph.edges_from(row)]
        nodes = [graph.node(row) for row in shown]
        self.write = figures(
            [node.value for node in nodes]
            + [node.raw_value for node in nodes]
            + [number for edge in edges for number in (edge.q, edge.reward)]
        )
        self.players = graph.nodes[0].to_play is not None
        self.shared = graph.shared(self.shown)

    def lines(self) -> list[str]:
        """Header, and a line for each node and for what was left out."""
        heads = [*_HEADS, "to play"] if self.players else [*_HEADS]
        rows = [("action", heads), *self._walk()]
        widths = [max([len(cells[i]) for _, cells in rows if cells]) for i in range(len(heads))]
        room = _WIDTH - sum(widths) - 2 * len(widths)
        left = min(max([len(label) for label, cells in rows if cells]), room)
        lines = self._header()
        for label, cells in rows:
            text = shown_name(label, left if cells else _WIDTH).ljust(left)
            for cell, width in zip(cells, widths, strict=False):
                text += "  " + cell.rjust(width)
            lines.append(text.rstrip())
        return lines

    def _header(self) -> list[str]:
        graph = self.graph
        headline = graph.headline(len(self.shown), self.write)
        path = " · ".join([shown_name(edge.name, 24) for edge in graph.best_path])
        wrapped = textwrap.wrap(f"best path: {path}", _WIDTH, subsequent_indent=" " * 11)
        return [headline, *wrapped, *self._notes()]

    def _notes(self) -> list[str]:
        """The notes on conventions that a reader may not expect."""
        notes = []
        if self.players:
            notes.append(
                "Q and reward: for the player who takes the action; raw value: for the "
                "player to move next"
            )
        if self.graph.has_merged_paths(self.shown):
            notes.append("visits: of the action; the root's count all ways that lead back to it")
        return notes

    def _walk(self) -> list[tuple[str, list[str]]]:
        """Label and cells of each line, from the root down; a stack, since trees may be deep."""
        rows = [("root" + self._below_it(0), self._cells(self.graph.node(0), None))]
        expanded = {0}
        waiting = self._below(0, "")
        while waiting:
            stem, branch, source, edge = waiting.pop()
            start = (stem if len(stem) <= _STEM else "…" + stem[1 - _STEM :]) + branch
            if edge is None:
                rows.append((start + self._left_out(source), []))
                continue
            cells = self._cells(self.graph.node(edge.target), edge)
            rows.append((start + self._name(edge, expanded), cells))
            if edge.target not in expanded:
                expanded.add(edge.target)
                waiting += self._below(edge.target, stem + ("   " if branch == _LAST else "│  "))
        return rows

    def _below(self, row: int, stem: str) -> list[tuple[str, str, int, TreeEdge | None]]:
        """The lines below a node, the last line first: stem, branch, the node and its edge."""
        edges = [edge for edge in self.graph.edges_from(row) if edge.target in self.shown]
        edges = sorted(edges, key=lambda edge: (-edge.visits, edge.action))
        lines: list[TreeEdge | None] = [*edges]
        if edges and self._left_out(row):
            lines.append(None)  # a line for what was left out
        branches = ["├─ "] * (len(lines) - 1) + [_LAST] * bool(lines)
        found = [(stem, branch, row, line) for branch, line in zip(branches, lines, strict=True)]
        return found[::-1]

    def _left_out(self, row: int) -> str:
        node, hidden = self.graph.node(row), self.graph.left_out(row, self.shown)
        parts = []
        if hidden:
            visits = plural(sum([edge.visits for edge in hidden]), "visit")
            parts.append(f"{plural(len(hidden), 'more action')}, {visits}")
        if node.num_untried:
            parts.append(f"{node.num_untried} not tried, prior {percent(node.untried_prior)}")
        return "… " + "; ".join(parts) if parts else ""

    def _name(self, edge: TreeEdge, expanded: set[int]) -> str:
        """The action, which node it leads to where several do, and what is not shown below."""
        name = shown_name(edge.name, 40)
        if edge.target in self.shared:
            name += f" #{edge.target}"
        if edge.target in expanded:
            return name + " (above)"
        return name + self._below_it(edge.target)

    def _below_it(self, row: int) -> str:
        """The reason why there are no lines below a node's."""
        if self.graph.node(row).ended:
            return " (ended)"
        edges = self.graph.edges_from(row)
        hidden = edges and len(self.graph.left_out(row, self.shown)) == len(edges)
        return f" (+{plural(len(edges), 'action')})" if hidden else ""

    def _cells(self, node: TreeNode, edge: TreeEdge | None) -> list[str]:
        """The figures of a line; those of an edge where it is not the root's."""
        player = [str(node.to_play)] if self.players else []
        visits, of_edge = node.visits, ("", "", "", "")
        if edge is not None:
            numbers = percent(edge.share), self.write(edge.q), percent(edge.prior)
            visits, of_edge = edge.visits, (*numbers, self.write(edge.reward))
        return [str(visits), *of_edge, self.write(node.raw_value), *player]
