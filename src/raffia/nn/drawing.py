"""Drawings of a graph: the text of a Mermaid flowchart, and an SVG image."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from raffia.nn.graph import Graph, GraphEdge, GraphNode
from raffia.nn.labels import key_text
from raffia.nn.layout import laid_out
from raffia.nn.placing import Box

# What a Mermaid label may hold as it is; anything else could be taken for syntax or Markdown.
_SPECIAL = re.compile(r"[^\w\s.,:()\[\]=/+'-]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")

# fill, stroke and text of the boxes
_COLOURS = {
    "module": ("#ffffff", "#475569", "#0f172a"),
    "random": ("#fff7ed", "#ea580c", "#7c2d12"),
    "given": ("#eff6ff", "#3b82f6", "#1e3a8a"),
    "result": ("#ecfdf5", "#10b981", "#064e3b"),
    "value": ("none", "none", "#334155"),
    "lost": ("#f8fafc", "#cbd5e1", "#94a3b8"),
}


# ------------------------------------------------------------------------ Mermaid


def mermaid(graph: Graph) -> str:
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
        lines.append(f'    {name}(["{_value(graph, edge)}"]):::given')
    lines += _mermaid_modules(graph, ids)
    arrows = []
    for i, edge in enumerate(_outward(graph)):
        style = "lost" if edge.target else "result"
        lines.append(f'    out{i}(["{_value(graph, edge)}"]):::{style}')
        arrows.append(f"    {ids[edge.source or '']} {'-.->' if edge.target else '-->'} out{i}")
    lines += [
        f"    {ins[e.key]} --> {ids[e.target]}" for e in graph.edges if not e.source and e.target
    ]
    between: dict[tuple[str, str], list[GraphEdge]] = {}
    for edge in graph.edges:
        if edge.source and edge.target:
            between.setdefault((edge.source, edge.target), []).append(edge)
    for (source, target), edges in between.items():
        text = "<br/>".join([_value(graph, edge, ": ") for edge in edges])
        lines.append(f'    {ids[source]} -- "{text}" --> {ids[target]}')
    lines += arrows
    for name, (fill, stroke, text) in _COLOURS.items():
        if any([line.endswith(f":::{name}") for line in lines]):
            lines.append(f"    classDef {name} fill:{fill},stroke:{stroke},color:{text}")
    return "\n".join(lines)


def _mermaid_modules(graph: Graph, ids: dict[str, str]) -> list[str]:
    """Lines that declare the modules, each within its nested sequence."""
    lines: list[str] = []
    groups = [g for g in graph.groups if g.stop > g.start]
    for position, node in enumerate(graph.nodes):
        opened = [g for g in groups if g.start <= position < g.stop]
        for depth, group in enumerate(opened, 1):
            if group.start == position:
                title = _mermaid_text(f"{group.kind} ({group.name})")
                lines.append(f'{"    " * depth}subgraph g{graph.groups.index(group)}["{title}"]')
        text = _mermaid_text(_says(node)) + "<br/>" + _mermaid_text(f"({node.name})")
        style = "random" if node.random else "module"
        lines.append(f'{"    " * (len(opened) + 1)}{ids[node.name]}["{text}"]:::{style}')
        for depth in range(len(opened), 0, -1):
            if opened[depth - 1].stop == position + 1:
                lines.append("    " * depth + "end")
    return lines


def _mermaid_text(text: str) -> str:
    return _SPECIAL.sub(lambda match: f"#{ord(match[0])};", text)


def _value(graph: Graph, edge: GraphEdge, between: str = "<br/>") -> str:
    """A key, and its shape if one was seen."""
    seen = graph.seen(edge)
    key = _mermaid_text(key_text(edge.key))
    return key if seen is None else key + between + _mermaid_text(str(seen))


def _says(node: GraphNode) -> str:
    return f"~ {node.label}" if node.random else node.label


def _outward(graph: Graph) -> list[GraphEdge]:
    """Edges to the results, and (with their own source as target) values that are lost."""
    results = [e for e in graph.edges if e.target is None]
    return results + [GraphEdge(k, n, n) for k, names in graph.lost.items() for n in names]


# ------------------------------------------------------------------------ SVG

_FRAME = "#f8fafc"
_FONT = 'ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace'


def svg(graph: Graph) -> str:
    """The graph as an SVG image, top to bottom; opaque, so that it reads on any page.

    Blue: what must be there; green: results; grey and dashed: what nobody reads; orange: modules
    that draw samples.

    >>> from torch import nn
    >>> from raffia.nn import TensorDictModule, TensorDictSequential
    >>> layer = TensorDictModule(nn.Linear(4, 2), in_keys=["obs"], out_keys=["action"])
    >>> TensorDictSequential(layer).graph().svg().startswith("<svg xmlns=")
    True
    """
    layout = laid_out(graph)
    width, height = f"{layout.width:.0f}", f"{layout.height:.0f}"
    body = [
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        *[_frame(*frame) for frame in layout.frames()],
        *[_arrow(points, head) for points, head in layout.lines()],
        *[_title(*frame) for frame in layout.frames()],
        *[_drawn(box) for box in layout.boxes],
    ]
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" '
        f'font-family="{escape(_FONT)}" font-size="12">'
    )
    return "\n".join([opening, f"<title>{escape(graph.kind)}</title>", *body, "</svg>"])


def _frame(title: str, x: float, y: float, width: float, height: float) -> str:
    """A frame around a nested sequence."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="10" '
        f'fill="{_FRAME}" stroke="#cbd5e1" stroke-dasharray="5 4"/>'
    )


def _title(title: str, x: float, y: float, width: float, height: float) -> str:
    """Its title, as a tag on its upper edge."""
    return (
        f'<rect x="{x + 12:.1f}" y="{y - 9:.1f}" width="{6.65 * len(title) + 14:.1f}" height="18" '
        f'rx="9" fill="#ffffff" stroke="#cbd5e1"/><text x="{x + 19:.1f}" y="{y + 3.8:.1f}" '
        f'fill="#64748b" font-size="11">{escape(title)}</text>'
    )


def _drawn(box: Box) -> str:
    fill, stroke, colour = _COLOURS[box.style]
    left, top = box.x - box.width / 2, box.y
    parts = []
    if box.lines and stroke != "none":
        radius = box.height / 2 if box.style in ("given", "result", "lost") else 6
        dash = ' stroke-dasharray="3 3"' if box.style == "lost" else ""
        parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{box.width:.1f}" '
            f'height="{box.height:.1f}" rx="{radius:.0f}" fill="{fill}" stroke="{stroke}"{dash}/>'
        )
    for i, (text, strong) in enumerate(box.lines):
        y = top + box.padding + 16 * i + 11.5
        weight = ' font-weight="600"' if strong and box.style in ("module", "random") else ""
        look = f'fill="{colour}"{weight}' if strong else f'fill="{colour}" fill-opacity="0.65"'
        parts.append(
            f'<text x="{box.x:.1f}" y="{y:.1f}" text-anchor="middle" {look} '
            f'xml:space="preserve">{escape(text)}</text>'
        )
    tip = f"<title>{escape(box.tip)}</title>" if box.tip else ""
    return f"<g>{tip}{''.join(parts)}</g>"


def _arrow(points: Sequence[tuple[float, float]], head: bool) -> str:
    """A smooth line down through the points; segments between unequal x are curved."""
    (x, y), *rest = points
    path = f"M{x:.1f} {y:.1f}"
    for next_x, next_y in rest:
        middle = (y + next_y) / 2
        path += f" C{x:.1f} {middle:.1f} {next_x:.1f} {middle:.1f} {next_x:.1f} {next_y:.1f}"
        x, y = next_x, next_y
    line = f'<path d="{path}" fill="none" stroke="#94a3b8" stroke-width="1.4"/>'
    if not head:
        return line
    tip = f"M{x - 4:.1f} {y - 7:.1f} L{x:.1f} {y:.1f} L{x + 4:.1f} {y - 7:.1f} Z"
    return f'{line}<path d="{tip}" fill="#64748b"/>'
