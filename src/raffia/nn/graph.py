"""A sequence as data: its modules, the keys between them, and the shapes of its last call.

`seq.graph()` gives a `Graph`: plain records (graph_record.py), and how they look (drawing.py).
`check_in_keys` looks at it when a sequence is built: a misspelt key is an error there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from raffia.hints import nearest
from raffia.nn.drawing import mermaid, program, svg, table
from raffia.nn.graph_record import (
    GraphEdge,
    GraphGroup,
    GraphNode,
    GraphRecord,
    ShapesByModule,
    children,
    is_random,
    key_text,
    keywords,
    label,
    plain_keys,
    recorded_shapes,
    shapes_of_run,
)
from raffia.tensordict.keys import NestedKey, is_under, overlap, unravel_key_to_tuple


class Graph(GraphRecord):
    """Modules, keys and shapes of a sequence, as data.

    `nodes` stand in the order of execution, those of nested sequences in their stead; `edges`
    are the entries read by one node from another; `groups` are the nodes of nested sequences.

    >>> from torch import nn
    >>> from raffia.nn import TensorDictModule, TensorDictSequential
    >>> seq = TensorDictSequential(
    ...     TensorDictModule(nn.Linear(4, 8), in_keys=["obs"], out_keys=["hidden"]),
    ...     TensorDictModule(nn.Linear(8, 2), in_keys=["hidden"], out_keys=["action"]),
    ... )
    >>> graph = seq.graph(TensorDict(obs=torch.zeros(5, 4), batch_size=[5]))
    >>> graph.in_keys, graph.results
    (('obs',), ('action',))
    >>> print(graph)
    module  computes      reads             writes
    0       Linear(4, 8)  obs: f32[5, 4]    hidden: f32[5, 8]
    1       Linear(8, 2)  hidden: f32[5, 8] action: f32[5, 2]
    in: obs
    out: action
    """

    def mermaid(self) -> str:
        """The drawing as the text of a Mermaid flowchart, for Markdown pages."""
        return mermaid(self)

    def svg(self) -> str:
        """The drawing as an SVG image, without anything it needs from elsewhere."""
        return svg(self)

    def program(self) -> str:
        """The sequence as a program, one line for each module; also what `print(seq)` gives."""
        return program(self)

    def __str__(self) -> str:
        return table(self)

    def _repr_svg_(self) -> str:
        return self.svg()


# ------------------------------------------------------------------------ out of a sequence

Modules = Mapping[str, Any] | Iterable[tuple[str, Any]]  # by name, in the order of execution
Writers = dict[NestedKey, str]  # the module that wrote the current value of a key


def graph(seq: Any, example: Any = None) -> Graph:
    """The graph of a sequence; shapes are those of `example`, else of its first call.

    example: a container to run a copy of the sequence on, without gradients. Neither the example
        nor the sequence is changed: no entries, no buffers, no random state.
    """
    modules = children(seq)
    if modules is None:
        raise TypeError(f"graph takes a TensorDictSequential, got {type(seq).__name__}")
    shapes_seen = recorded_shapes(seq) if example is None else shapes_of_run(seq, example)
    return graph_of(modules, type(seq).__name__, [*seq.out_keys, *seq.in_keys], shapes_seen)


def graph_of(
    modules: Modules,
    kind: str = "TensorDictSequential",
    selected: Sequence[NestedKey] | None = None,
    shapes_seen: ShapesByModule | None = None,
) -> Graph:
    """The graph of keyed modules that run one after another.

    selected: keys that are written back if outputs were selected; None: all.
    shapes_seen: shapes by the names of the modules, such as "1.0".
    """
    nodes: list[GraphNode] = []
    edges: list[GraphEdge] = []
    groups: list[GraphGroup] = []

    def visit(modules: Modules, path: str, writers: Writers) -> Writers:
        for name, module in modules.items() if isinstance(modules, Mapping) else modules:
            below = children(module)
            if below is None:
                writers = step(path + name, module, writers)
                continue
            start, position = len(nodes), len(groups)
            after = visit(below, f"{path}{name}.", writers)
            writers, hidden = _visible(writers, after, [*module.out_keys, *module.in_keys])
            kind = type(module).__name__
            groups.insert(position, GraphGroup(path + name, kind, start, len(nodes), hidden))
        return writers

    def step(name: str, module: Any, writers: Writers) -> Writers:
        in_keys, out_keys = plain_keys(module.in_keys), plain_keys(module.out_keys)
        for key in in_keys:
            sources = _sources(key, writers) or [(key, None)]
            edges.extend([GraphEdge(written, source, name) for written, source in sources])
        there = (shapes_seen or {}).get(name, {})
        how = (type(module).__name__, label(module), in_keys, out_keys, keywords(module))
        nodes.append(
            GraphNode(name, *how, is_random(module), there.get("in", {}), there.get("out", {}))
        )
        writers = {k: w for k, w in writers.items() if not any([is_under(k, o) for o in out_keys])}
        return writers | dict.fromkeys(out_keys, name)

    writers = visit(modules, "", {})
    hidden: tuple[NestedKey, ...] = ()
    if selected is not None:
        writers, hidden = _visible({}, writers, selected)
    read = {(e.source, e.key) for e in edges}
    for key, name in writers.items():
        if hidden or (name, key) not in read:
            edges.append(GraphEdge(key, name, None))
    edges = list(dict.fromkeys(edges))  # a module may read one key twice
    return Graph(kind, tuple(nodes), tuple(edges), tuple(groups))


def _sources(key: NestedKey, writers: Writers) -> list[tuple[NestedKey, str | None]]:
    """The keys and writers of what is read under `key`: the entry, its container, or its parts."""
    above = [written for written in writers if is_under(key, written)]
    nearest = sorted(above, key=lambda k: len(unravel_key_to_tuple(k)))[-1:]
    parts = [written for written in writers if is_under(written, key) and written not in nearest]
    return [(written, writers[written]) for written in nearest + parts]


def _visible(
    before: Writers, after: Writers, selected: Sequence[NestedKey]
) -> tuple[Writers, tuple[NestedKey, ...]]:
    """Writers after a sequence that writes back `selected` only, and the keys it hides."""
    hidden = tuple(
        [k for k, w in after.items() if k not in plain_keys(selected) and before.get(k) != w]
    )
    if not hidden:
        return after, ()
    shown = {k: w for k, w in after.items() if k not in hidden}
    return before | shown, hidden


def check_in_keys(modules: Modules, expected: Sequence[NestedKey]) -> None:
    """Raise ValueError unless the keys that the modules need from outside are those expected.

    The error names the module that reads a key which nobody writes before, and the nearest key that
    is there, with the module that writes it.
    """
    modules = list(modules.items() if isinstance(modules, Mapping) else modules)
    expected = plain_keys([expected] if isinstance(expected, str) else expected)
    graph = graph_of(modules)
    for position, node in enumerate(graph.nodes):
        for key in _from_outside(graph, node):
            if not any([overlap(key, e) for e in expected]):
                raise ValueError(_unexpected(graph, position, key, expected))
    read = graph.in_keys
    for key in expected:
        if not any([overlap(key, r) for r in read]):
            raise ValueError(_not_needed(graph, key, expected))


def _from_outside(graph: Graph, node: GraphNode) -> list[NestedKey]:
    return [e.key for e in graph.edges if e.source is None and e.target == node.name]


def _module(node: GraphNode) -> str:
    return f'module "{node.name}" ({node.label})'


def _near(key: NestedKey, keys: Iterable[NestedKey]) -> NestedKey | None:
    spelt = {key_text(k): k for k in keys}
    near = nearest(key_text(key), spelt)
    return None if near is None else spelt[near]


def _unexpected(graph: Graph, position: int, key: NestedKey, expected: Sequence[NestedKey]) -> str:
    reader, earlier = graph.nodes[position], graph.nodes[:position]
    there = dict.fromkeys(expected, "which is expected from outside")
    there |= {k: f"which {_module(n)} writes" for n in earlier for k in n.out_keys}
    text = f"{_module(reader)} reads {key!r}, which is neither in expect_in_keys nor written before"
    later = [n for n in graph.nodes[position:] if any([is_under(key, k) for k in n.out_keys])]
    near = _near(key, there)
    silent = [n for n in earlier if not n.in_keys and not n.out_keys]
    if later and later[0] is not reader:
        text += f". {_module(later[0])} writes it, but runs later: put that one first."
    elif near is not None:
        text += f". Did you mean {near!r}, {there[near]}?"
    elif silent:
        text += (
            f". If {_module(silent[-1])} writes it, declare it: "
            f"WrapModule({silent[-1].label}, out_keys=[{key!r}])."
        )
    else:
        text += f"; what is there: {list(there)}."
    return f"{text} If it comes from outside: expect_in_keys={[*expected, key]}"


def _not_needed(graph: Graph, key: NestedKey, expected: Sequence[NestedKey]) -> str:
    rest = [k for k in expected if k != key]
    text = f"expect_in_keys names {key!r}, which no module reads from outside"
    readers = {k: n for n in reversed(graph.nodes) for k in n.in_keys}
    near = _near(key, readers)
    if key in readers:
        writer = next(n for n in graph.nodes if any([is_under(key, k) for k in n.out_keys]))
        text += f": {_module(writer)} writes it before {_module(readers[key])} reads it."
    elif near is not None:
        text += f". Did you mean {near!r}, which {_module(readers[near])} reads?"
    else:
        text += "."
    return f"{text} Without it: expect_in_keys={rest}"
