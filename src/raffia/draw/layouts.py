"""Layouts: where the nodes of a tidy tree stand, and boxes in layers.

A node of a tidy tree stands beside the middle of its children, and subtrees are pushed together
until their outlines touch (Reingold and Tilford, 1981, "Tidier Drawings of Trees"). Layers follow
Sugiyama, Tagawa and Toda (1981): the order within them by barycentres, then positions by least
squares.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from raffia.draw.scene import text_width

_SIBLINGS_GAP, _COUSINS_GAP = 8, 14  # in a tidy tree, below each other: of one parent, of several
LINE = 16  # height of a line
_GAP = 26  # between boxes that stand side by side
_SWEEPS, _SWEEPS_X = 12, 120  # for the order and for the positions

Node = TypeVar("Node", bound=Hashable)
Profile = list[tuple[float, float]]  # top and bottom in each column, from a node's own on


@dataclass(frozen=True)
class Look:
    """The look of boxes of one kind; lines touch one without a frame in one point, without a head.

    >>> Look().framed
    False
    """

    fill: str = "none"
    stroke: str = "none"  # of the frame
    text: str = "none"
    padding: int = 6  # above and below the text
    radius: float | None = None  # of the corners; None: round ends
    dashes: str = ""
    bold: bool = False  # the main lines

    @property
    def framed(self) -> bool:
        """Whether there is a frame around the text."""
        return self.stroke != "none"


@dataclass(eq=False)
class LayerBox:
    """Lines of text, or (without lines) the passage of a long line through a layer.

    >>> LayerBox(Look(stroke="#000000"), [("abcd", True)]).width
    57.0
    """

    look: Look = Look()
    lines: Sequence[tuple[str, bool]] = ()  # (text, whether it is the main one)
    tip: str = ""
    groups: tuple[int, ...] = ()  # that it stands in, outermost first
    layer: int = 0
    wall_of: tuple[list[LayerBox], int] | None = None  # a group, and -1 left, 1 right of it
    x: float = 0.0  # of the middle
    y: float = 0.0  # of the upper edge
    above: list[LayerBox] = field(default_factory=list)
    below: list[LayerBox] = field(default_factory=list)

    @property
    def width(self) -> float:
        """The width of the box, in pixels."""
        sides = 28 if self.look.framed else 8
        return max([text_width(text) for text, _ in self.lines]) + sides if self.lines else 6

    @property
    def height(self) -> float:
        """The height of the box, in pixels."""
        return len(self.lines) * LINE + 2 * self.look.padding if self.lines else 0


def ordered(layers: list[list[LayerBox]]) -> list[list[LayerBox]]:
    """The layers with few crossing lines: each box near the middle of its neighbours."""
    best, fewest = layers, _num_crossings(layers)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        layers = [list(layer) for layer in layers]
        rank = _ranks(layers)
        for layer in layers[1:] if down else layers[-2::-1]:
            wanted = {
                b: _mean([rank[n] for n in (b.above if down else b.below)], rank[b]) for b in layer
            }
            layer.sort(key=lambda box: (_group_ranks(box, layer, wanted), wanted[box]))  # noqa: B023
            rank |= {box: float(i) for i, box in enumerate(layer)}
        crossings = _num_crossings(layers)
        if crossings < fewest:
            best, fewest = layers, crossings
    return best


def _group_ranks(
    box: LayerBox, layer: list[LayerBox], wanted: dict[LayerBox, float]
) -> list[float]:
    """The mean wanted rank of a box's outermost group, a sort key that keeps groups together."""
    outer = box.groups[:1]
    if not outer:
        return [wanted[box]]
    return [_mean([wanted[b] for b in layer if b.groups[:1] == outer], 0.0)]


def _ranks(layers: list[list[LayerBox]]) -> dict[LayerBox, float]:
    return {box: float(i) for layer in layers for i, box in enumerate(layer)}


def _num_crossings(layers: list[list[LayerBox]]) -> int:
    rank = _ranks(layers)
    crossings = 0
    for layer in layers:
        ends = [(rank[box], rank[lower]) for box in layer for lower in box.below]
        for i, (a, b) in enumerate(ends):
            crossings += sum([(a - c) * (b - d) < 0 for c, d in ends[:i]])
    return crossings


def assign_positions(layers: list[list[LayerBox]], num_groups: int) -> None:
    """Assign each box an x by least squares over the lengths of all lines, keeping the order.

    Layer by layer with the others held, which converges, since the problem is convex. Lines that
    neither part nor join weigh more, so that they come out straight. Walls around groups
    yield at first, and then hold.
    """
    layers = _walled(layers, num_groups)
    for layer in layers:
        _spread(layer, [(0.0, 1.0)] * len(layer))
    for sweep in range(_SWEEPS_X):
        firm = 1e6 if sweep > _SWEEPS_X // 2 else 1e-6
        for layer in layers if sweep % 2 == 0 else layers[::-1]:
            _spread(layer, [_pull(box, firm) for box in layer])
    _straighten(layers)


def _pull(box: LayerBox, firm: float) -> tuple[float, float]:
    """The x that a box is pulled towards, and the weight of the pull; for walls it is `firm`."""
    if box.wall_of is not None:
        members, side = box.wall_of
        edges = [side * member.x + member.width / 2 for member in members]
        return side * (max(edges) + 8), firm
    near = box.above + box.below
    weights = [20.0 if _is_straight(box, other) else 1.0 for other in near]
    total = sum(weights)
    return sum([n.x * w for n, w in zip(near, weights, strict=True)]) / (total or 1), total or 1e-6


def _is_straight(box: LayerBox, other: LayerBox) -> bool:
    """Whether the line between two boxes neither parts nor joins others."""
    upper, lower = (box, other) if other in box.below else (other, box)
    return len(upper.below) == 1 and len(lower.above) == 1


def _walled(layers: list[list[LayerBox]], num_groups: int) -> list[list[LayerBox]]:
    """The layers with walls added left and right of each group, to keep other boxes out of it."""
    layers = [list(layer) for layer in layers]
    for group in reversed(range(num_groups)):  # the inner ones first
        members: list[LayerBox] = []
        for layer in layers:
            inside = [i for i, box in enumerate(layer) if group in box.groups]
            if not inside or len(inside) != inside[-1] - inside[0] + 1:
                continue  # others stand in between: no wall could keep them out
            members += [box for box in layer if group in box.groups]
            outer = tuple([g for g in layer[inside[0]].groups if g < group])
            layer.insert(inside[-1] + 1, LayerBox(groups=outer, wall_of=(members, 1)))
            layer.insert(inside[0], LayerBox(groups=outer, wall_of=(members, -1)))
    return layers


def _straighten(layers: list[list[LayerBox]]) -> None:
    """Align boxes joined by a single line exactly below each other, where there is room."""
    locations = {box: (layer, i) for layer in layers for i, box in enumerate(layer)}
    done: set[LayerBox] = set()
    for layer in layers:
        for box in layer:
            chain = [box]
            while len(chain[-1].below) == 1 and len(chain[-1].below[0].above) == 1:
                chain.append(chain[-1].below[0])
            if len(chain) == 1 or box in done:
                continue
            done.update(chain)
            positions = [sum([b.x for b in chain]) / len(chain), *sorted([b.x for b in chain])]
            for x in positions:
                if all([_fits(*locations[b], x) for b in chain]):
                    for b in chain:
                        b.x = x
                    break


def _fits(layer: list[LayerBox], i: int, x: float) -> bool:
    """Whether the i-th box of a layer may stand at x."""
    box = layer[i]
    left = layer[i - 1].x + _distance(layer[i - 1], box) if i else x
    right = layer[i + 1].x - _distance(box, layer[i + 1]) if i + 1 < len(layer) else x
    return left - 1e-3 <= x <= right + 1e-3


def _distance(left: LayerBox, right: LayerBox) -> float:
    """The least distance between the middles of two neighbours."""
    gap = 8 if left.wall_of or right.wall_of else _GAP
    return (left.width + right.width) / 2 + gap


def _spread(layer: list[LayerBox], pulls: list[tuple[float, float]]) -> None:
    """Least squares positions near those wanted, by weight, with the gaps preserved.

    This is isotonic regression, by pooling.
    """
    offsets = [0.0]
    for left, right in zip(layer, layer[1:], strict=False):
        offsets.append(offsets[-1] + _distance(left, right))
    blocks: list[tuple[float, float, int]] = []  # (mean, weight, number of boxes)
    for (x, weight), offset in zip(pulls, offsets, strict=True):
        mean, number = x - offset, 1
        while blocks and blocks[-1][0] >= mean:
            other, more, count = blocks.pop()
            mean = (mean * weight + other * more) / (weight + more)
            weight, number = weight + more, number + count
        blocks.append((mean, weight, number))
    positions = [mean for mean, _, number in blocks for _ in range(number)]
    for box, position, offset in zip(layer, positions, offsets, strict=True):
        box.x = position + offset


def _mean(numbers: Sequence[float], default: float) -> float:
    return sum(numbers) / len(numbers) if numbers else default


def tidy(
    root: Node, children: Mapping[Node, Sequence[Node]], heights: Mapping[Node, float]
) -> dict[Node, float]:
    """A tidy tree layout: how far the middle of each node is below the middle of the root.

    children: from the top; a node that is left out has none.

    >>> tidy("root", {"root": ["a", "b"]}, {"root": 30, "a": 20, "b": 10})
    {'root': 0.0, 'a': -11.5, 'b': 11.5}
    """
    order = [root]
    for node in order:  # which grows as it is walked
        order += children.get(node, ())
    offsets: dict[Node, float] = {}  # from the parent
    profiles: dict[Node, Profile] = {}
    for node in reversed(order):
        under: Profile = []
        below = children.get(node, ())
        for child in below:
            offsets[child] = _room_below(under, profiles[child])
            _join(under, profiles.pop(child), offsets[child])
        if below:
            middle = (offsets[below[0]] + offsets[below[-1]]) / 2
            for child in below:
                offsets[child] -= middle
            under = [(top - middle, bottom - middle) for top, bottom in under]
        profiles[node] = [(-heights[node] / 2, heights[node] / 2), *under]
    positions = {root: 0.0}
    for node in order:
        positions |= {child: positions[node] + offsets[child] for child in children.get(node, ())}
    return positions


def _room_below(upper: Profile, lower: Profile) -> float:
    """The offset that moves a subtree below those already placed."""
    gaps = [_SIBLINGS_GAP] + [_COUSINS_GAP] * len(lower)
    needed = [high[1] - low[0] + gap for high, low, gap in zip(upper, lower, gaps, strict=False)]
    return max(needed, default=0.0)


def _join(upper: Profile, lower: Profile, offset: float) -> None:
    for i, (top, bottom) in enumerate(lower):
        first = upper[i][0] if i < len(upper) else top + offset
        upper[i : i + 1] = [(first, bottom + offset)]
