"""What a sequence does, in plain records: its modules, the keys between them, and their shapes.

Nothing here has a module or a tensor in it. graph.py makes them of a sequence; how they look is
written in program.py (text) and drawing.py (Mermaid, SVG).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from raffia.nn.shapes import EntryShape, Shapes, ShapesByModule
from raffia.tensordict.keys import NestedKey, is_under


@dataclass(frozen=True)
class GraphNode:
    """One module of a sequence."""

    name: str  # its path: "1", "actor", or "1.0" within a nested sequence
    kind: str  # name of its class
    label: str  # what it computes
    in_keys: tuple[NestedKey, ...]
    out_keys: tuple[NestedKey, ...]  # keys of outputs, without the "_" of dropped ones
    keywords: tuple[str, ...] = ()  # the argument that each input goes to, if given by name
    random: bool = False  # its outputs are drawn from the distribution `label`
    reads: Shapes = field(default_factory=dict, hash=False)  # shapes read, empty before a call
    writes: Shapes = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class GraphEdge:
    """A value on its way from one module to another, or from or to the outside (None)."""

    key: NestedKey  # key as its source wrote it
    source: str | None
    target: str | None


@dataclass(frozen=True)
class GraphGroup:
    """A sequence within the sequence: its modules are `graph.nodes[start:stop]`."""

    name: str
    kind: str
    start: int
    stop: int
    hidden: tuple[NestedKey, ...]  # written inside, and left out by its selection of outputs


@dataclass(frozen=True)
class GraphRecord:
    """Modules, keys and shapes of a sequence, as data; `Graph` has its drawings, too.

    `nodes` stand in the order of execution, those of nested sequences in their stead; `edges`
    are the entries read by one node from another; `groups` are the nodes of nested sequences.

    >>> edges = (GraphEdge("obs", None, "0"), GraphEdge("action", "0", None))
    >>> node = GraphNode("0", "TensorDictModule", "Linear(4, 2)", ("obs",), ("action",))
    >>> GraphRecord("TensorDictSequential", (node,), edges).in_keys
    ('obs',)
    """

    kind: str
    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]
    groups: tuple[GraphGroup, ...] = ()

    @property
    def in_keys(self) -> tuple[NestedKey, ...]:
        """Keys that must be there before the first module runs."""
        return tuple(dict.fromkeys([e.key for e in self.edges if e.source is None]))

    @property
    def results(self) -> tuple[NestedKey, ...]:
        """What the sequence is run for: the selected outputs, else those that no module reads."""
        return tuple(dict.fromkeys([e.key for e in self.edges if e.target is None]))

    @property
    def overwritten(self) -> dict[NestedKey, tuple[str, ...]]:
        """Keys that lose an earlier value -> the modules that write them, in order.

        A key that came from outside is overwritten by its first writer.
        """
        writers: dict[NestedKey, list[str]] = {key: [] for key in self.in_keys}
        overwritten = {}
        for node in self.nodes:
            for key in node.out_keys:
                writers.setdefault(key, [])
                for lost in [k for k in writers if is_under(k, key)]:
                    if writers[lost] or lost in self.in_keys:
                        overwritten[lost] = writers[lost]
                    writers[lost].append(node.name)
        return {key: tuple(names) for key, names in overwritten.items()}

    @property
    def unread(self) -> dict[NestedKey, tuple[str, ...]]:
        """Outputs that no later module reads -> the modules that write them."""
        read = {(e.source, e.key) for e in self.edges if e.target is not None}
        unread: dict[NestedKey, tuple[str, ...]] = {}
        for node in self.nodes:
            for key in node.out_keys:
                if (node.name, key) not in read:
                    unread[key] = (*unread.get(key, ()), node.name)
        return unread

    @property
    def lost(self) -> dict[NestedKey, tuple[str, ...]]:
        """Outputs that are of no use: overwritten or left out before anybody reads them."""
        selected = {(e.source, e.key) for e in self.edges if e.target is None}
        useless = {
            key: tuple([name for name in names if (name, key) not in selected])
            for key, names in self.unread.items()
        }
        return {key: names for key, names in useless.items() if names}

    @property
    def shapes(self) -> ShapesByModule:
        """The shapes that each module read and wrote; empty before a call."""
        return {n.name: {"in": n.reads, "out": n.writes} for n in self.nodes if n.reads or n.writes}

    def shape_of(self, edge: GraphEdge) -> EntryShape | None:
        """The shape of the value on an edge, if it is known."""
        for node in self.nodes:
            if node.name == edge.source:
                return node.writes.get(edge.key)
            if edge.source is None and node.name == edge.target:
                return node.reads.get(edge.key)
        return None

    def to_dict(self) -> dict[str, Any]:
        """The graph in dicts, lists and strings, for `json.dumps`; nested keys are lists."""

        def shapes(shapes_seen: Shapes) -> list[Any]:
            return [
                {"key": k, "shape": list(s.shape), "dtype": s.dtype} for k, s in shapes_seen.items()
            ]

        nodes = [
            vars(n) | {"in_keys": list(n.in_keys), "out_keys": list(n.out_keys)}
            | {"reads": shapes(n.reads), "writes": shapes(n.writes)}
            for n in self.nodes
        ]  # fmt: skip
        plain = {
            "kind": self.kind,
            "nodes": nodes,
            "edges": [dict(vars(e)) for e in self.edges],
            "groups": [dict(vars(g)) for g in self.groups],
            "in_keys": self.in_keys,
            "results": self.results,
            "overwritten": [{"key": k, "by": v} for k, v in self.overwritten.items()],
            "unread": [{"key": k, "of": v} for k, v in self.unread.items()],
            "lost": [{"key": k, "of": v} for k, v in self.lost.items()],
        }
        return {name: _listed(value) for name, value in plain.items()}


def _listed(value: Any) -> Any:
    """Tuples as lists, all the way down: as they come back from JSON."""
    if isinstance(value, dict):
        return {name: _listed(v) for name, v in value.items()}
    return [_listed(v) for v in value] if isinstance(value, (list, tuple)) else value
