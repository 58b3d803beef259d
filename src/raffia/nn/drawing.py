"""Views of a sequence: as a program and a table of text, as a Mermaid flowchart, and as SVG."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

from raffia.draw.layered import layered
from raffia.draw.layouts import LayerBox, Look
from raffia.nn.graph_record import (
    EntryShape,
    GraphEdge,
    GraphNode,
    GraphRecord,
    Shapes,
    key_text,
    keys_text,
)
from raffia.tensordict.keys import NestedKey

_INDENT = "    "
_WIDTH = 100
_COMMENT_AT = 64  # comments of lines that are longer stand right behind them


def program(graph: GraphRecord) -> str:
    """The sequence as a program: what it is given, a line for each module, what it returns.

    Names in brackets are those of the modules, as in `seq[0]`; `~` precedes a distribution
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
        lines.append(f"never read: {key_text(key)} of {', '.join(names)}")
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


# What a Mermaid label may hold as it is; anything else could be taken for syntax or Markdown.
_SPECIAL = re.compile(r"[^\w\s.,:()\[\]=/+'-]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")

_WRAP = 38  # characters in a line of a module's label
_LOOKS = {
    "module": Look("#ffffff", "#475569", "#0f172a", padding=9, radius=6, bold=True),
    "random": Look("#fff7ed", "#ea580c", "#7c2d12", padding=9, radius=6, bold=True),
    "given": Look("#eff6ff", "#3b82f6", "#1e3a8a"),
    "result": Look("#ecfdf5", "#10b981", "#064e3b"),
    "value": Look("none", "none", "#334155", padding=2),
    "lost": Look("#f8fafc", "#cbd5e1", "#94a3b8", dashes="3 3"),
}


# ------------------------------------------------------------------------ Mermaid


def mermaid(graph: GraphRecord) -> str:
    """The graph as a Mermaid flowchart: modules, what they hand to each other, ins and outs.

    >>> from torch import nn
    >>> from raffia.nn import TensorDictModule, TensorDictSequential
    >>> layer = TensorDictModule(nn.Linear(4, 2), in_keys=["obs"], out_keys=["action"])
    >>> print(TensorDictSequential(layer).graph().mermaid())
    flowchart TD
        in0(["obs"]):::given
        m0["Linear(4, 2)<br/>(0)"]:::module
        out0(["action"]):::result
        in0 --> m0
        m0 --> out0
        ...
    """
    ids = {node.name: f"m{i}" for i, node in enumerate(graph.nodes)}
    ins = {key: f"in{i}" for i, key in enumerate(graph.in_keys)}
    lines = ["flowchart TD"]
    for key, name in ins.items():
        edge = next(e for e in graph.edges if e.source is None and e.key == key)
        lines.append(f'    {name}(["{_value(key, graph.shape_of(edge))}"]):::given')
    lines += _mermaid_modules(graph, ids)
    arrows = []
    for i, (key, node, style) in enumerate(_outward(graph)):
        lines.append(f'    out{i}(["{_value(key, node.writes.get(key))}"]):::{style}')
        arrows.append(f"    {ids[node.name]} {'-.->' if style == 'lost' else '-->'} out{i}")
    lines += [
        f"    {ins[e.key]} --> {ids[e.target]}" for e in graph.edges if not e.source and e.target
    ]
    between: dict[tuple[str, str], list[GraphEdge]] = {}
    for edge in graph.edges:
        if edge.source and edge.target:
            between.setdefault((edge.source, edge.target), []).append(edge)
    for (source, target), edges in between.items():
        text = "<br/>".join([_value(edge.key, graph.shape_of(edge), ": ") for edge in edges])
        lines.append(f'    {ids[source]} -- "{text}" --> {ids[target]}')
    lines += arrows
    for name, look in _LOOKS.items():
        if any([line.endswith(f":::{name}") for line in lines]):
            colours = f"fill:{look.fill},stroke:{look.stroke},color:{look.text}"
            lines.append(f"    classDef {name} {colours}")
    return "\n".join(lines)


def _mermaid_modules(graph: GraphRecord, ids: dict[str, str]) -> list[str]:
    """Lines that declare the modules, each within its nested sequence."""
    lines: list[str] = []
    groups = [g for g in graph.groups if g.stop > g.start]
    for position, node in enumerate(graph.nodes):
        opened = [g for g in groups if g.start <= position < g.stop]
        for depth, group in enumerate(opened, 1):
            if group.start == position:
                title = _mermaid_text(f"{group.kind} ({group.name})")
                lines.append(f'{"    " * depth}subgraph g{graph.groups.index(group)}["{title}"]')
        text = _mermaid_text(_label(node)) + "<br/>" + _mermaid_text(f"({node.name})")
        style = "random" if node.random else "module"
        lines.append(f'{"    " * (len(opened) + 1)}{ids[node.name]}["{text}"]:::{style}')
        for depth in range(len(opened), 0, -1):
            if opened[depth - 1].stop == position + 1:
                lines.append("    " * depth + "end")
    return lines


def _mermaid_text(text: str) -> str:
    return _SPECIAL.sub(lambda match: f"#{ord(match[0])};", text)


def _value(key: NestedKey, shape: EntryShape | None, between: str = "<br/>") -> str:
    """A key, and its shape if it is known."""
    text = _mermaid_text(key_text(key))
    return text if shape is None else text + between + _mermaid_text(str(shape))


def _label(node: GraphNode) -> str:
    return f"~ {node.label}" if node.random else node.label


def _outward(graph: GraphRecord) -> Iterator[tuple[NestedKey, GraphNode, str]]:
    """Values that go out, as results or lost, and the modules that write them."""
    nodes = {node.name: node for node in graph.nodes}
    for edge in graph.edges:
        if edge.source and edge.target is None:
            yield edge.key, nodes[edge.source], "result"
    for key, names in graph.lost.items():
        yield from [(key, nodes[name], "lost") for name in names]


# ------------------------------------------------------------------------ SVG


def svg(graph: GraphRecord) -> str:
    """The graph as an SVG image, top to bottom; opaque, so that it reads on any page.

    Blue: what must be there; green: results; grey and dashed: values never read; orange: modules
    that draw samples. Modules and the values between them are boxes, in turn: a value is on
    the line from the module that writes it to those that read it.

    >>> from torch import nn
    >>> from raffia.nn import TensorDictModule, TensorDictSequential
    >>> layer = TensorDictModule(nn.Linear(4, 2), in_keys=["obs"], out_keys=["action"])
    >>> TensorDictSequential(layer).graph().svg().startswith("<svg xmlns=")
    True
    """
    groups = [(f"{group.kind} ({group.name})", group.name) for group in graph.groups]
    return layered(graph.kind, _boxes(graph), groups).svg()


def _boxes(graph: GraphRecord) -> list[LayerBox]:
    """Modules and values, joined, each in the layer behind all that it depends on."""
    values: dict[tuple[str | None, NestedKey], LayerBox] = {}
    looks = {(node.name, key): style for key, node, style in reversed([*_outward(graph)])}
    for edge in graph.edges:
        if edge.source is None and (None, edge.key) not in values:
            values[None, edge.key] = _value_box("given", edge.key, graph.shape_of(edge))
    boxes = list(values.values())
    top = 1 if boxes else 0  # of the modules: no layer is empty
    for position, node in enumerate(graph.nodes):
        groups = tuple([i for i, g in enumerate(graph.groups) if g.start <= position < g.stop])
        look = _LOOKS["random" if node.random else "module"]
        module = LayerBox(look, _module_lines(node), f"{node.name}: {node.kind}", groups)
        for edge in graph.edges:
            if edge.target == node.name:
                _join(values[edge.source, edge.key], module)
        module.layer = max([value.layer + 1 for value in module.above], default=top)
        boxes.append(module)
        for key in dict.fromkeys(node.out_keys):
            at = (node.name, key)
            value = _value_box(looks.get(at, "value"), key, node.writes.get(key))
            value.groups = _around_all(graph, groups, at)
            value.layer = module.layer + 1
            _join(module, value)
            values[at] = value
            boxes.append(value)
    return boxes


def _value_box(style: str, key: NestedKey, shape: EntryShape | None) -> LayerBox:
    return LayerBox(
        _LOOKS[style], [(key_text(key), True), *([(str(shape), False)] if shape else [])]
    )


def _module_lines(node: GraphNode) -> list[tuple[str, bool]]:
    lines = textwrap.wrap(_label(node), _WRAP, break_long_words=False, break_on_hyphens=False)
    return [*[(line, True) for line in lines], (f"({node.name})", False)]


def _around_all(
    graph: GraphRecord, groups: tuple[int, ...], at: tuple[str, NestedKey]
) -> tuple[int, ...]:
    """The nested sequences that a value does not leave."""
    readers = [e.target for e in graph.edges if (e.source, e.key) == at]
    names = {node.name: i for i, node in enumerate(graph.nodes)}

    def holds(i: int) -> bool:
        start, stop = graph.groups[i].start, graph.groups[i].stop
        return all([name is not None and start <= names[name] < stop for name in readers])

    return tuple([i for i in groups if holds(i)])


def _join(upper: LayerBox, lower: LayerBox) -> None:
    upper.below.append(lower)
    lower.above.append(upper)
