"""A plain recursive tree search in Python's float64, one root at a time, with node objects.

Written from the sources (Schrittwieser et al. 2020, appendix B; Ye et al. 2021, appendix A;
Danihelka et al. 2022) and from the documentation of the options; it shares nothing with
raffia.search but the tables. It records the margin of the closest choice, since
float32 may decide otherwise if only the last digits differ.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .table import Table

ALL_BITS = 2**64 - 1


@dataclass(frozen=True)
class Options:
    simulations: int
    discount: float
    root_value: str = "exclude"
    max_depth: int | None = None
    horizon: int | None = None  # of value prefixes
    # PUCT
    c_init: float = 1.25
    c_base: float = 19652.0
    first_visit: str = "prior"
    count_own: bool = False
    normalize: str = "running"
    root_in_range: bool = False
    min_range: float = 0.01
    tie_seed: int | None = None
    # Gumbel, if given
    gumbel: list[float] | None = None
    max_considered: int = 16
    value_scale: float = 0.1
    maxvisit_init: float = 50.0


@dataclass
class Child:
    """A visited edge, and the node below it."""

    node: "Node"
    reward: float
    discount: float
    visits: int = 0

    def q(self) -> float:
        return self.reward + self.discount * self.node.value()


@dataclass
class Node:
    row: int  # the number of the simulation that made it, counted from 1; the root is 0
    state: int
    depth: int
    raw: float
    prior: list[float]  # 0 where illegal
    logits: list[float]
    legal: list[int]
    parent: "Node | None" = None
    action: int = -1
    prefix: float = 0.0
    visits: int = 0
    total: float = 0.0
    children: dict[int, Child] = field(default_factory=dict)

    def value(self) -> float:
        return self.total / self.visits if self.visits else self.raw

    def add(self, gain: float) -> None:
        self.visits += 1
        self.total += gain

    def tried(self) -> list[float]:
        return [child.q() for child in self.children.values()]

    def count(self, action: int) -> int:
        return self.children[action].visits if action in self.children else 0

    def counts(self, num: int) -> list[int]:
        return [self.count(a) for a in range(num)]

    def of_children(self, num: int, entry: Callable[["Child"], Any], untried: Any) -> list[Any]:
        return [entry(self.children[a]) if a in self.children else untried for a in range(num)]

    @property
    def edge(self) -> Child | None:
        return None if self.parent is None else self.parent.children[self.action]


class PlainSearch:
    """The searched tree of one root."""

    def __init__(self, table: Table, state: int, options: Options) -> None:
        self.table, self.options = table, options
        self.num_actions = table.next.shape[1]
        self.nodes: dict[int, Node] = {}
        self.range = (math.inf, -math.inf)
        self.closest = math.inf  # smallest margin of a best choice over one that was not equal
        self.root = self.make(state, row=0, depth=0)
        if options.root_value == "include":
            self.root.add(self.root.raw)
        if options.root_value == "zero":
            self.root.add(0.0)
        considered = min(options.max_considered, len(self.root.legal))
        self.visits_at = halving(considered, options.simulations)
        for simulation in range(options.simulations):
            self.simulation = simulation
            self.visit(self.root, None)
            self.after_simulation()

    def make(self, state: int, row: int, depth: int) -> Node:
        table = self.table
        logits = [float(x) for x in table.logits[state]]
        legal = list(range(self.num_actions))
        if table.mask is not None:
            legal = [a for a in legal if table.mask[state, a]]
        top = max((logits[a] for a in legal), default=0.0)
        weight = {a: math.exp(logits[a] - top) for a in legal}
        total = sum(weight.values())
        prior = [weight[a] / total if a in weight else 0.0 for a in range(self.num_actions)]
        node = Node(row, state, depth, float(table.value[state]), prior, logits, legal)
        self.nodes[row] = node
        return node

    def expand(self, parent: Node, action: int) -> Child:
        table, options = self.table, self.options
        label = action if table.labels is None else int(table.labels[parent.state, action])
        state = int(table.next[parent.state, label])
        node = self.make(state, self.simulation + 1, parent.depth + 1)
        node.parent, node.action = parent, action
        reward = float(table.reward[parent.state, label])
        if options.horizon is not None:
            restarts = parent.depth > 0 and parent.depth % options.horizon == 0
            node.prefix = (0.0 if restarts else parent.prefix) + reward
        discount = options.discount
        if table.discount is not None:
            discount = float(table.discount[parent.state, label])
        if table.player is not None and table.player[state] != table.player[parent.state]:
            discount = -discount
        parent.children[action] = Child(node, reward, discount)
        return parent.children[action]

    def visit(self, node: Node, mean_above: float | None) -> float:
        """One simulation from this node; the return for this node's player."""
        if self.options.gumbel is None:
            action, mean = self.puct(node, mean_above)
        else:
            action, mean = self.gumbel(node), None
        deepest = self.options.max_depth
        if action not in node.children:
            child = self.expand(node, action)
            gain = child.node.raw
            child.node.add(gain)
        else:
            child = node.children[action]
            if not child.node.legal or (deepest is not None and child.node.depth >= deepest):
                gain = child.node.raw
                child.node.add(gain)
            else:
                gain = self.visit(child.node, mean)
        gain = child.reward + child.discount * gain
        child.visits += 1
        node.add(gain)
        if self.options.normalize == "running":
            self.widen(child.q())
        return gain

    def widen(self, q: float) -> None:
        self.range = (min(self.range[0], q), max(self.range[1], q))

    def after_simulation(self) -> None:
        if self.options.normalize == "tree":
            self.range = (math.inf, -math.inf)
            for node in self.nodes.values():
                for q in node.tried():
                    self.widen(q)
        if self.options.root_in_range:
            self.widen(self.options.discount * self.root.value())

    def puct(self, node: Node, mean_above: float | None) -> tuple[int, float]:
        options, tried = self.options, node.tried()
        if mean_above is None:
            mean = sum(tried) / len(tried) if tried else 0.0
        else:
            mean = (mean_above + sum(tried)) / (1 + len(tried))
        num = sum(child.visits for child in node.children.values())
        base, own = options.c_base, 1 if options.count_own else 0
        c = options.c_init + math.log((num + own + base + 1) / base)
        c *= math.sqrt(num + 1 if options.first_visit == "prior" else num)
        scores = {}
        for a in node.legal:
            q = node.children[a].q() if a in node.children else None
            scores[a] = self.normal(q, mean, node) + c * node.prior[a] / (1 + node.count(a))
        return self.first_best(scores, node), mean

    def normal(self, q: float | None, mean: float, node: Node) -> float:
        if self.options.normalize == "siblings":
            known = [node.value(), *node.tried()]
            low, high = min(known), max(known)
            return ((low if q is None else q) - low) / max(high - low, 1e-8)
        low, high = self.range
        q = mean if q is None else q
        if high > low:
            q = (q - low) / max(high - low, self.options.min_range)
        return min(max(q, 0.0), 1.0)

    def first_best(self, scores: dict[int, float], node: Node) -> int:
        top = max(scores.values())
        best = [a for a, score in scores.items() if score == top]
        below = [score for score in scores.values() if score != top]
        if below:
            self.closest = min(self.closest, top - max(below))
        if self.options.tie_seed is None:
            return best[0]
        return max(best, key=lambda a: hashed(self.options.tie_seed, self.simulation, node.row, a))

    def sigma(self, node: Node) -> list[float]:
        counts = node.counts(self.num_actions)
        tried = [a for a in range(self.num_actions) if counts[a] > 0]
        weight = sum(node.prior[a] for a in tried)
        mixed = node.raw
        if tried:
            average = sum(node.prior[a] * node.children[a].q() for a in tried) / weight
            mixed = (node.raw + sum(counts) * average) / (1 + sum(counts))
        completed = [
            node.children[a].q() if counts[a] > 0 else mixed for a in range(self.num_actions)
        ]
        low, high = min(completed), max(completed)
        scale = (self.options.maxvisit_init + max(counts)) * self.options.value_scale
        return [scale * (q - low) / max(high - low, 1e-8) for q in completed]

    def improved(self, node: Node) -> list[float]:
        """softmax(logits + sigma) over the legal actions."""
        sigma = self.sigma(node)
        top = max(node.logits[a] + sigma[a] for a in node.legal)
        weight = {a: math.exp(node.logits[a] + sigma[a] - top) for a in node.legal}
        total = sum(weight.values())
        return [weight.get(a, 0.0) / total for a in range(self.num_actions)]

    def gumbel(self, node: Node) -> int:
        counts = node.counts(self.num_actions)
        if node is not self.root:
            pi = self.improved(node)
            return self.first_best(
                {a: pi[a] - counts[a] / (1 + sum(counts)) for a in node.legal}, node
            )
        return self.best_with(self.visits_at[self.simulation])

    def best_with(self, visits: int) -> int:
        """The root's best action by g + logits + sigma among those with this number of visits."""
        root, sigma = self.root, self.sigma(self.root)
        assert self.options.gumbel is not None
        scores = {
            a: self.options.gumbel[a] + root.logits[a] + sigma[a]
            for a in root.legal
            if root.count(a) == visits
        }
        return self.first_best(scores, root)

    def gumbel_action(self) -> int:
        return self.best_with(max(self.root.counts(self.num_actions)))


def halving(considered: int, simulations: int) -> list[int]:
    """Sequential halving (Danihelka et al. 2022, algorithm 2): in each simulation, how many visits
    the action that is to be taken has had."""
    if considered == 1:
        return list(range(simulations))
    rounds, left, done = math.ceil(math.log2(considered)), considered, 0
    visits: list[int] = []
    while len(visits) < simulations:
        each = max(1, simulations // (rounds * left))
        visits += [done + extra for extra in range(each) for _ in range(left)]
        done, left = done + each, max(2, left // 2)
    return visits[:simulations]


def hashed(seed: int, simulation: int, row: int, action: int) -> int:
    """The order of ties: SplitMix64 of seed, simulation, node and action, signed."""

    def spread(x: int) -> int:
        x &= ALL_BITS
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & ALL_BITS
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & ALL_BITS
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    base = spread(seed + simulation * golden) + row * golden
    draw = spread(base + action * golden)
    return draw - 2**64 if draw >= 2**63 else draw
