"""Where things stand in a drawing of a graph: in layers from top to bottom.

Modules and the values between them are boxes, in turn: a value stands on the line from the module
that writes it to those that read it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from raffia.nn.graph import Graph, GraphEdge, GraphNode
from raffia.nn.labels import key_text
from raffia.nn.placing import Box, ordered, place, text_width
from raffia.tensordict.keys import NestedKey

_GAP, _MARGIN = 30, 24  # between layers, around everything
_WRAP = 38  # characters in a line of a module's label


@dataclass
class Layout:
    """Boxes with their positions."""

    graph: Graph
    boxes: list[Box]
    width: float = 0.0
    height: float = 0.0
    layer_heights: Sequence[float] = ()

    def lines(self) -> Iterable[tuple[list[tuple[float, float]], bool]]:
        """The points of each line, and whether it ends in an arrow head."""
        for box in self.boxes:
            if not box.lines:
                continue  # a line starts at a box and goes on through places of passage
            for i, target in enumerate(_by_x(box.below)):
                x = _port(box, i, len(box.below))
                points, before = [(x, box.y + box.height)], box
                while not target.lines:
                    bottom = target.y + self.layer_heights[target.layer]
                    points += [(target.x, target.y), (target.x, bottom)]
                    before, target = target, target.below[0]
                port = _port(target, _by_x(target.above).index(before), len(target.above))
                yield [*points, (port, target.y)], target.style != "value"

    def frames(self) -> Iterable[tuple[str, float, float, float, float]]:
        """Title, x, y, width and height for each nested sequence that stands apart from the rest.

        One whose frame would go around other modules has none; names of modules still tell.
        """
        for i, group in enumerate(self.graph.groups):
            inside = [box for box in self.boxes if i in box.groups and box.lines]
            if not inside:
                continue
            depth = 1 + max([len(box.groups) - 1 - box.groups.index(i) for box in inside])
            pad = 9 * depth
            left = min([b.x - b.width / 2 for b in inside]) - pad
            right = max([b.x + b.width / 2 for b in inside]) + pad
            top = min([b.y for b in inside]) - 24 * depth
            bottom = max([b.y + b.height for b in inside]) + pad
            others = [b for b in self.boxes if i not in b.groups and b.lines]
            if any([_meets(b, left, right, top, bottom) for b in others]):
                continue
            title = f"{group.kind} ({group.name})"
            if text_width(title) > right - left - 24:
                title = group.name
            yield title, left, top, right - left, bottom - top


def laid_out(graph: Graph) -> Layout:
    """Boxes for everything in the graph, each at its place."""
    boxes = _long_lines(_boxes(graph))
    layers: list[list[Box]] = [[] for _ in range(max([b.layer for b in boxes], default=-1) + 1)]
    for box in boxes:
        layers[box.layer].append(box)
    layers = ordered(layers)
    place(layers, len(graph.groups))
    heights = [max([box.height for box in layer]) for layer in layers]
    y = float(_MARGIN + 8)
    for layer, height in zip(layers, heights, strict=True):
        y += 24 * max([_num_opened(box) for box in layer])  # room for the titles of frames
        for box in layer:
            box.y = y if not box.lines else y + (height - box.height) / 2
        y += height + _GAP
    layout = Layout(graph, boxes, height=y - _GAP + _MARGIN, layer_heights=heights)
    sides = [(b.x - b.width / 2, b.x + b.width / 2) for b in boxes]
    sides += [(x, x + width) for _, x, _, width, _ in layout.frames()]
    left, right = min([s[0] for s in sides], default=0), max([s[1] for s in sides], default=0)
    bottom = max([y + height for _, _, y, _, height in layout.frames()], default=0)
    layout.width = right - left + 2 * _MARGIN
    layout.height = max(layout.height, bottom + _MARGIN)
    for box in boxes:
        box.x += _MARGIN - left
    return layout


# ------------------------------------------------------------------------ boxes and layers


def _boxes(graph: Graph) -> list[Box]:
    """Modules and values, joined, each in the layer behind all that it depends on."""
    values: dict[tuple[str | None, NestedKey], Box] = {}
    results = {(e.source, e.key) for e in graph.edges if e.target is None}
    lost = {(name, key) for key, names in graph.lost.items() for name in names}
    for edge in graph.edges:
        if edge.source is None:
            values.setdefault((None, edge.key), Box("given", _value_lines(graph, edge)))
    boxes = list(values.values())
    top = 1 if boxes else 0  # of the modules: no layer is empty
    for position, node in enumerate(graph.nodes):
        style = "random" if node.random else "module"
        groups = tuple([i for i, g in enumerate(graph.groups) if g.start <= position < g.stop])
        module = Box(style, _module_lines(node), f"{node.name}: {node.kind}", groups)
        for edge in graph.edges:
            if edge.target == node.name:
                _join(values[edge.source, edge.key], module)
        module.layer = max([value.layer + 1 for value in module.above], default=top)
        boxes.append(module)
        for key in dict.fromkeys(node.out_keys):
            at = (node.name, key)
            look = "result" if at in results else "lost" if at in lost else "value"
            lines = _value_lines(graph, GraphEdge(key, node.name, None))
            inside = _around_all(graph, groups, at)
            values[at] = Box(look, lines, groups=inside, layer=module.layer + 1)
            _join(module, values[at])
            boxes.append(values[at])
    return boxes


def _around_all(
    graph: Graph, groups: tuple[int, ...], at: tuple[str, NestedKey]
) -> tuple[int, ...]:
    """The nested sequences that a value does not leave."""
    readers = [e.target for e in graph.edges if (e.source, e.key) == at]
    names = {node.name: i for i, node in enumerate(graph.nodes)}

    def holds(i: int) -> bool:
        start, stop = graph.groups[i].start, graph.groups[i].stop
        return all([name is not None and start <= names[name] < stop for name in readers])

    return tuple([i for i in groups if holds(i)])


def _join(upper: Box, lower: Box) -> None:
    upper.below.append(lower)
    lower.above.append(upper)


def _module_lines(node: GraphNode) -> list[tuple[str, bool]]:
    text = f"~ {node.label}" if node.random else node.label
    lines = textwrap.wrap(text, _WRAP, break_long_words=False, break_on_hyphens=False)
    return [*[(line, True) for line in lines], (f"({node.name})", False)]


def _value_lines(graph: Graph, edge: GraphEdge) -> list[tuple[str, bool]]:
    seen = graph.seen(edge)
    return [(key_text(edge.key), True), *([(str(seen), False)] if seen else [])]


def _long_lines(boxes: list[Box]) -> list[Box]:
    """The boxes, with a place of passage wherever a line crosses a layer."""
    places: list[Box] = []
    for box in boxes:
        for i, target in enumerate(box.below):
            upper = box
            for layer in range(box.layer + 1, target.layer):
                place = Box("value", layer=layer, above=[upper], below=[target])
                place.groups = tuple([g for g in box.groups if g in target.groups])
                if upper is box:
                    box.below[i] = place
                else:
                    upper.below = [place]
                target.above[target.above.index(upper)] = place
                places.append(place)
                upper = place
    return boxes + places


# ------------------------------------------------------------------------ where lines meet boxes


def _by_x(boxes: Sequence[Box]) -> list[Box]:
    return sorted(boxes, key=lambda box: box.x)


def _port(box: Box, i: int, n: int) -> float:
    """Where the i-th of n lines meets a box: side by side, around its middle."""
    step = min(28.0, (box.width - 16) / max(n, 1)) if box.style != "value" else 0.0
    return box.x + (i - (n - 1) / 2) * step


def _num_opened(box: Box) -> int:
    """How many frames open right above a box."""
    outside = [len(set(box.groups) - set(upper.groups)) for upper in box.above]
    return max(outside, default=len(box.groups))


def _meets(box: Box, left: float, right: float, top: float, bottom: float) -> bool:
    beside = box.x + box.width / 2 < left or box.x - box.width / 2 > right
    return not (beside or box.y + box.height < top or box.y > bottom)
