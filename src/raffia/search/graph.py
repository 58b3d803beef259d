"""A searched tree as data: its nodes and edges in plain records, without a tensor in them."""

import heapq
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from raffia.hints import check_range, plural


@dataclass(frozen=True)
class TreeNode:
    """A state that the search reached.

    >>> node = TreeNode(row=0, depth=0, visits=9, value=0.5, raw_value=0.0, ended=False,
    ...                 num_untried=1, untried_prior=0.2)
    >>> node.to_play is None
    True
    """

    row: int  # row in the tree's arrays, 0: the root
    depth: int  # edges from the root on the way that found it
    visits: int  # over all ways that lead to it; the root may have one more than simulations
    value: float  # mean of the values backed up, from the view of the node's own player
    raw_value: float  # the model's value
    ended: bool  # the game is over here
    num_untried: int  # legal actions that were not tried
    untried_prior: float  # the prior of those together
    to_play: int | None = None  # the player to move; None: one player
    value_prefix: float | None = None  # the model's sum of rewards, where a search uses it
    key: int | None = None  # equal for transpositions


@dataclass(frozen=True)
class TreeEdge:
    """An action that was tried. Its figures are from the view of the source's player.

    >>> edge = TreeEdge(source=0, target=1, action=2, name="left", visits=3, share=0.5, q=1.0,
    ...                 prior=0.25, reward=1.0, discount=0.9)
    >>> edge.choice is None
    True
    """

    source: int  # rows of nodes
    target: int
    action: int
    name: str  # the action's name
    visits: int
    share: float  # fraction of the visits of all actions of the source
    q: float  # reward + discount * value of the target
    prior: float
    reward: float
    discount: float  # negative where the player changes
    choice: Any = None  # what the action stands for, as nested lists (sampled actions)


@dataclass(frozen=True)
class TreeGraph:
    """One root's tree, as data.

    Nodes stand in the order in which they were found, each edge with its source, the lowest action
    first. With transpositions several edges may lead to one node, also back to an earlier one.

    >>> from raffia.search import RecurrentOutput, RootOutput, search
    >>> def bandit(embedding, action):  # the second of two arms pays 1
    ...     rows = len(action)
    ...     return RecurrentOutput(reward=(action == 1).float(), value=torch.zeros(rows),
    ...                            prior_logits=torch.zeros(rows, 2)), embedding
    >>> root = RootOutput(torch.zeros(1, 2), torch.zeros(1), torch.zeros(1, 1))
    >>> graph = search(root, bandit, num_simulations=9, discount=0.5).to_graph(
    ...     action_names=["left", "right"])
    >>> graph
    TreeGraph(root 0: 10 nodes, 9 edges, 9 simulations, depth 5)
    >>> [edge.name for edge in graph.best_path]
    ['right', 'right', 'right', 'right', 'left']
    >>> graph.node(0).visits, graph.edges[0].q
    (9, 0.0)
    """

    root: int  # index of the root in the tree
    nodes: tuple[TreeNode, ...]
    edges: tuple[TreeEdge, ...]

    @property
    def num_simulations(self) -> int:
        """The number of simulations of this root."""
        return sum([edge.visits for edge in self.edges_from(0)])

    @property
    def depth(self) -> int:
        """The number of edges from the root to the deepest node."""
        return max([node.depth for node in self.nodes])

    @cached_property
    def best_path(self) -> tuple[TreeEdge, ...]:
        """The most visited edges from the root down, the lowest action among equals."""
        path: list[TreeEdge] = []
        visited, row = set[int](), 0
        while row not in visited and self.edges_from(row):
            visited.add(row)
            path.append(max(self.edges_from(row), key=lambda edge: edge.visits))
            row = path[-1].target
        return tuple(path)

    def node(self, row: int) -> TreeNode:
        """The node of a row of the tree's arrays."""
        return self._by_row[row]

    def edges_from(self, row: int) -> tuple[TreeEdge, ...]:
        """The tried actions of a node."""
        return self._from.get(row, ())

    def to_dict(self) -> dict[str, Any]:
        """The tree as dictionaries, lists, numbers and strings only.

        >>> node = TreeNode(0, 0, 1, 0.5, 0.5, False, 2, 1.0)
        >>> TreeGraph(0, (node,), ()).to_dict()["nodes"][0]["value"]
        0.5
        """
        return {
            "root": self.root,
            "nodes": [asdict(node) for node in self.nodes],
            "edges": [asdict(edge) for edge in self.edges],
        }

    def to_json(self) -> str:
        """The tree as JSON.

        >>> node = TreeNode(0, 0, 1, 0.5, 0.5, False, 2, 1.0)
        >>> TreeGraph(0, (node,), ()).to_json()[:31]
        '{"root": 0, "nodes": [{"row": 0'
        """
        return json.dumps(self.to_dict(), allow_nan=False)

    def most_visited(self, max_nodes: int) -> list[int]:
        """Rows of the most visited connected part of the tree, in the order of importance.

        From the root on, the most visited edge that leads to something new is taken next; among
        equals one of the best path, then the one found first.

        >>> node = TreeNode(0, 0, 1, 0.5, 0.5, False, 2, 1.0)
        >>> TreeGraph(0, (node,), ()).most_visited(5)
        [0]
        """
        check_range("max_nodes", max_nodes, 1)
        best = {(edge.source, edge.action) for edge in self.best_path}
        chosen: dict[int, None] = {}  # a set that keeps its order
        waiting = [(0, False, 0)]
        while waiting and len(chosen) < max_nodes:
            row = heapq.heappop(waiting)[2]
            if row in chosen:
                continue
            chosen[row] = None
            for edge in self.edges_from(row):
                off_path = (edge.source, edge.action) not in best
                heapq.heappush(waiting, (-edge.visits, off_path, edge.target))
        return list(chosen)

    def left_out(self, row: int, shown: Collection[int]) -> list[TreeEdge]:
        """A node's edges to nodes that are not among `shown`.

        >>> node = TreeNode(0, 0, 1, 0.5, 0.5, False, 2, 1.0)
        >>> TreeGraph(0, (node,), ()).left_out(0, shown={0})
        []
        """
        return [edge for edge in self.edges_from(row) if edge.target not in shown]

    def shared(self, shown: Collection[int]) -> set[int]:
        """The shown nodes that several edges lead to; the root if any edge leads back to it.

        >>> node = TreeNode(0, 0, 1, 0.5, 0.5, False, 2, 1.0)
        >>> TreeGraph(0, (node,), ()).shared([0])
        set()
        """
        visible = [edge for row in shown for edge in self.edges_from(row)]
        meets = Counter([0, *[edge.target for edge in visible if edge.target in shown]])
        return {row for row, number in meets.items() if number > 1}

    def has_merged_paths(self, shown: Collection[int]) -> bool:
        """Whether several paths lead to one of the shown nodes, counting all edges of the tree.

        >>> node = TreeNode(0, 0, 1, 0.5, 0.5, False, 2, 1.0)
        >>> TreeGraph(0, (node,), ()).has_merged_paths([0])
        False
        """
        return not self.shared(self._by_row).isdisjoint(shown)

    def headline(self, num_shown: int, write: Callable[[float], str]) -> str:
        """The main figures of the tree in one line.

        >>> node = TreeNode(0, 0, 1, 0.5, 0.5, False, 2, 1.0)
        >>> TreeGraph(0, (node,), ()).headline(1, "{:.1f}".format)
        'root 0: value 0.5, 0 simulations, depth 0, 1 node'
        """
        text = (
            f"root {self.root}: value {write(self.node(0).value)}, "
            f"{plural(self.num_simulations, 'simulation')}, depth {self.depth}, "
            f"{plural(len(self.nodes), 'node')}"
        )
        return text if num_shown == len(self.nodes) else f"{text} ({num_shown} shown)"

    @cached_property
    def _by_row(self) -> dict[int, TreeNode]:
        return {node.row: node for node in self.nodes}

    @cached_property
    def _from(self) -> dict[int, tuple[TreeEdge, ...]]:
        found: dict[int, list[TreeEdge]] = {}
        for edge in self.edges:
            found.setdefault(edge.source, []).append(edge)
        return {row: tuple(edges) for row, edges in found.items()}

    def __repr__(self) -> str:
        return (
            f"TreeGraph(root {self.root}: {len(self.nodes)} nodes, {len(self.edges)} edges, "
            f"{self.num_simulations} simulations, depth {self.depth})"
        )


def graph_of(
    root: int,
    lists: dict[str, Any],  # `tree.data` of this root, and "value" [N]
    action_names: Sequence[str] | None = None,
) -> TreeGraph:
    """The tree of one root as data; of nodes that share their statistics, the one that counts."""
    lists = {"canonical": range(len(lists["parent"])), **lists}
    rows = [
        row
        for row, parent in enumerate(lists["parent"])
        if (parent >= 0 or row == 0) and lists["canonical"][row] == row
    ]
    edges = [edge for row in rows for edge in _edges(lists, row, action_names)]
    return TreeGraph(root, tuple([_node(lists, row) for row in rows]), tuple(edges))


def _node(lists: dict[str, Any], row: int) -> TreeNode:
    prior = lists["prior"][row]
    legal = lists["mask"][row] if "mask" in lists else [True] * len(prior)
    tried = lists["children"][row]
    untried = [a for a, child in enumerate(tried) if child < 0 and legal[a]]
    names = ("depth", "visits", "value", "raw_value", "ended", "to_play", "value_prefix", "key")
    own = {name: lists[name][row] for name in names if name in lists}
    untried_prior = sum([prior[a] for a in untried])
    return TreeNode(row=row, num_untried=len(untried), untried_prior=untried_prior, **own)


def _edges(lists: dict[str, Any], row: int, names: Sequence[str] | None) -> list[TreeEdge]:
    visits = lists["children_visits"][row]
    total = max(sum(visits), 1)
    edges = []
    for action, child in enumerate(lists["children"][row]):
        if child < 0:
            continue
        choice = lists["actions"][row][action] if "actions" in lists else None
        edges.append(
            TreeEdge(
                source=row,
                target=lists["canonical"][child],
                action=action,
                name=_name(action, choice) if names is None else str(names[action]),
                visits=visits[action],
                share=visits[action] / total,
                q=lists["children_q"][row][action],
                prior=lists["prior"][row][action],
                reward=lists["reward"][child],
                discount=lists["discount"][child],
                choice=choice,
            )
        )
    return edges


def _name(action: int, choice: Any) -> str:
    """The name of an action: its number, or the value of a sampled action."""
    if choice is None:
        return str(action)
    numbers = choice if isinstance(choice, list) else [choice]
    if any([isinstance(number, list) for number in numbers]):
        return str(action)  # a matrix does not fit on a line
    if all([isinstance(number, int) for number in numbers]):
        return ", ".join([str(number) for number in numbers])
    write = figures(numbers)
    return ", ".join([write(number) for number in numbers])


def figures(values: Iterable[float]) -> Callable[[float], str]:
    """A format for these numbers: three digits of the largest, as many decimals of the others.

    >>> write = figures([0.5, -12.25])
    >>> write(0.5), write(-12.25), write(-0.01)
    ('+0.5', '-12.2', '+0.0')
    """
    greatest = max([abs(value) for value in values], default=0.0)
    if greatest >= 1e6 or 0 < greatest < 1e-4:
        return lambda value: f"{value:+.2e}"
    digits = max(2 - math.floor(math.log10(greatest)), 0) if greatest else 2
    return lambda value: f"{round(value, digits) + 0.0:+.{digits}f}"  # + 0.0: no "-0.0"


def percent(share: float) -> str:
    """A fraction in percent, with two digits or more.

    >>> percent(1.0), percent(0.25), percent(0.031)
    ('100%', '25%', '3.1%')
    """
    return f"{share:.0%}" if share >= 0.0995 or share == 0 else f"{share:.1%}"


def shown_name(text: str, width: int) -> str:
    """A name on one line of at most `width` characters; what cannot be printed is a question mark.

    >>> shown_name("turn left", 6), shown_name("a" + chr(7), 6)
    ('turn …', 'a?')
    """
    text = "".join([char if char.isprintable() else "?" for char in text])
    return text if len(text) <= width else text[: width - 1] + "…"
