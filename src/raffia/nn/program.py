"""A sequence as text: a program with one line for each module, and a table."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from raffia.nn.graph_record import GraphNode, GraphRecord
from raffia.nn.labels import key_text, keys_text
from raffia.nn.shapes import Shapes
from raffia.tensordict.keys import NestedKey

_INDENT = "    "
_WIDTH = 100
_COMMENT_AT = 64  # comments of lines that are longer stand right behind them


def program(graph: GraphRecord) -> str:
    """The sequence as a program: what it is given, a line for each module, what it returns.

    Names in brackets are those of the modules, as in `seq[0]`; `~` stands before a distribution
    that outputs are drawn from; comments give shapes and what is overwritten.

    >>> from torch import nn
    >>> from raffia.nn import TensorDictModule, TensorDictSequential
    >>> TensorDictSequential(
    ...     TensorDictModule(nn.Linear(4, 8), in_keys=[("input", "x")], out_keys=["hidden"]),
    ...     TensorDictModule(torch.tanh, in_keys=["hidden"], out_keys=["action"]),
    ... )
    TensorDictSequential(
        given input.x
        (0): hidden = Linear(4, 8)(input.x)
        (1): action = tanh(hidden)
        return action
    )
    """
    overwrites = _overwrites(graph)
    lines: list[tuple[str, str]] = []

    def put(depth: int, text: str, comment: str = "") -> None:
        lines.append((_INDENT * depth + text, comment))

    def visit(start: int, stop: int, groups: Sequence[int], depth: int) -> None:
        """Lines of the nodes in a range, with the nested sequences among them."""
        position = start
        while position < stop or groups:
            if groups and graph.groups[groups[0]].start == position:
                group, first = graph.groups[groups[0]], groups[0]
                inside = [i for i in groups[1:] if _inside(graph, i, first)]
                put(depth, f"({_last(group.name)}): {group.kind}(")
                visit(group.start, group.stop, inside, depth + 1)
                if group.hidden:
                    put(depth + 1, f"# hidden from here on: {keys_text(group.hidden)}")
                put(depth, ")")
                groups = groups[1 + len(inside) :]
                position = group.stop
                continue
            node = graph.nodes[position]
            put(depth, _line(node), _comment(node, overwrites.get(node.name, ())))
            position += 1

    put(0, f"{graph.kind}(")
    if graph.in_keys:
        for text in _wrapped("given ", [_typed(graph, key) for key in graph.in_keys]):
            put(1, text)
    visit(0, len(graph.nodes), range(len(graph.groups)), 1)
    if graph.results:
        for text in _wrapped("return ", [key_text(key) for key in graph.results]):
            put(1, text)
    put(0, ")")
    return _aligned(lines)


def table(graph: GraphRecord) -> str:
    """The graph as a table: a row for each module, then what goes in and out, and what is odd."""
    rows = [("module", "computes", "reads", "writes")]
    for node in graph.nodes:
        reads, writes = (
            _with_shapes(node.in_keys, node.reads),
            _with_shapes(node.out_keys, node.writes),
        )
        rows.append((node.name, node.label, reads, writes))
    widths = [max([len(row[i]) for row in rows]) for i in range(3)]
    lines = ["  ".join([*map(str.ljust, row[:3], widths), row[3]]).rstrip() for row in rows]
    lines += [f"in: {keys_text(graph.in_keys)}", f"out: {keys_text(graph.results)}"]
    for key, names in graph.overwritten.items():
        lines.append(f"overwritten: {key_text(key)} by {', '.join(names)}")
    for key, names in graph.lost.items():
        lines.append(f"read by nobody: {key_text(key)} of {', '.join(names)}")
    return "\n".join(lines)


def _inside(graph: GraphRecord, inner: int, outer: int) -> bool:
    return graph.groups[inner].name.startswith(graph.groups[outer].name + ".")


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _line(node: GraphNode) -> str:
    arguments = [key_text(key) for key in node.in_keys]
    if len(node.keywords) == len(arguments):
        arguments = [f"{n}={a}" for n, a in zip(node.keywords, arguments, strict=True)]
    call = f"{node.label}({', '.join(arguments)})"
    if not node.out_keys:
        return f"({_last(node.name)}): {call}"
    sign = "~" if node.random else "="
    return f"({_last(node.name)}): {keys_text(node.out_keys)} {sign} {call}"


def _comment(node: GraphNode, overwrites: Sequence[NestedKey]) -> str:
    shapes = [str(node.writes.get(key, "?")) for key in node.out_keys] if node.writes else []
    parts = [", ".join(shapes)] if shapes else []
    if overwrites:
        parts.append(f"overwrites {keys_text(overwrites)}")
    return "; ".join(parts)


def _overwrites(graph: GraphRecord) -> dict[str, list[NestedKey]]:
    """Module -> the keys whose earlier values it overwrites."""
    found: dict[str, list[NestedKey]] = {}
    for key, names in graph.overwritten.items():
        for name in names if key in graph.in_keys else names[1:]:
            found.setdefault(name, []).append(key)
    return found


def _typed(graph: GraphRecord, key: NestedKey) -> str:
    for edge in graph.edges:
        if edge.source is None and edge.key == key:
            shapes = graph.shape_of(edge)
            return key_text(key) if shapes is None else f"{key_text(key)}: {shapes}"
    raise AssertionError(f"{key!r} is read from outside")


def _with_shapes(keys: Sequence[NestedKey], shapes: Shapes) -> str:
    texts = [key_text(k) if k not in shapes else f"{key_text(k)}: {shapes[k]}" for k in keys]
    return ", ".join(texts)


def _wrapped(word: str, parts: Sequence[str]) -> list[str]:
    return textwrap.wrap(
        word + ", ".join(parts), _WIDTH - len(_INDENT), subsequent_indent=" " * len(word),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _aligned(lines: Sequence[tuple[str, str]]) -> str:
    """Lines with their comments in one column, where that is not far off."""
    lengths = [len(text) for text, comment in lines if comment and len(text) <= _COMMENT_AT]
    column = max(lengths, default=0)
    return "\n".join([f"{t:<{column}}  # {c}" if c else t for t, c in lines])
