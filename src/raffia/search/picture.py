"""A picture of a searched tree's most visited part, with its legend.

Edges are ribbons, as wide as they were often taken and coloured by Q, from blue for the best to
orange for the worst; the most visited path has a rim.

Nodes stand as in a tidy tree, from left to right. Each depth has a column, and in it first the
labels of the edges, then the boxes of the nodes. Of several edges that lead to a node from the
column before it, each has a separate lane; one that leads back is drawn to a mark instead of the
node, so that no line crosses a label.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from raffia.draw.layouts import tidy
from raffia.draw.scene import Scene, Steps, bent, polyline, rectangle, text_width
from raffia.hints import plural
from raffia.search.graph import TreeEdge, TreeGraph, figures, percent, shown_name

_THIN, _THICK, _RIM = 1.4, 10.0, 3.5  # edges, and what is added for the rim, in pixels
_LINE = 16  # height of a line in a box
_HEADER = 34
_NAME = 28  # characters of an action's name; the tip has all of it
_LEAST_WIDTH = 560  # so that header and legend have room
_LANE = 44  # height of an edge with its label
_MARGIN = 24
_SIZE, _ROW, _BETWEEN = 11, 26, 30  # of the legend's text; of its rows and items, in pixels
_SAMPLE = 36  # length of a sample of a line
# Orange and blue stay apart in all kinds of colour vision; each stands out on white and on black.
_WORST, _MIDDLE, _BEST = (217, 104, 11), (139, 149, 165), (31, 119, 208)


def drawn(graph: TreeGraph, max_nodes: int = 40) -> Scene:
    """A drawing of a root's tree, to be shown as SVG or saved to a file.

    >>> from raffia.search.graph import TreeNode
    >>> node = TreeNode(0, 0, 1, 0.5, 0.5, False, 2, 1.0)
    >>> drawn(TreeGraph(0, (node,), ())).title
    'root 0: value +0.500, 0 simulations, depth 0, 1 node'
    """
    painter = _Painter(graph, graph.most_visited(max_nodes))
    painter.edges()
    painter.boxes()
    painter.legend()
    return painter.drawing


class _Painter:
    """The state shared by all parts of the picture: placement, colour scale and drawing."""

    def __init__(self, graph: TreeGraph, shown: Sequence[int]) -> None:
        self.graph, self.shown = graph, set(shown)
        self.visible = [e for row in shown for e in graph.edges_from(row) if e.target in self.shown]
        numbers = [number for e in self.visible for number in (e.q, graph.node(e.target).value)]
        self.write = figures([graph.node(0).value, *numbers])
        self.scale = QScale.of([edge.q for edge in self.visible])
        self.most = max([edge.visits for edge in self.visible], default=1)
        self.best = {(edge.source, edge.action) for edge in graph.best_path}
        self.on_path = {0} | {edge.target for edge in graph.best_path}
        self.shared = graph.shared(self.shown)
        self.node_boxes = lay_out(graph, shown, self._box_size, self._label_width)
        for box in self.node_boxes:
            box.y += _HEADER
        self.nodes = {box.row: box for box in self.node_boxes if not box.is_mark}
        headline = graph.headline(len(shown), self.write)
        right = max([box.x + box.width for box in self.node_boxes]) + _MARGIN
        width = max(right, _LEAST_WIDTH, text_width(headline, 14) + 2 * _MARGIN)
        height = max([box.y + box.height / 2 for box in self.node_boxes]) + _MARGIN
        self.drawing = Scene(headline, width, height)
        self.drawing.text(_MARGIN, _MARGIN + 8, headline, 14, bold=True)

    # ------------------------------------------------------------------------ texts

    def _box_lines(self, row: int, is_mark: bool) -> list[str]:
        """Lines of a node's box: visits first, then its other figures."""
        if is_mark:
            return [f"↩ #{row}"]
        node = self.graph.node(row)
        lines = [f"N {node.visits}", f"V {self.write(node.value)}"]
        if row in self.shared:
            lines[0] += f"  #{row}"
        if node.to_play is not None:
            lines.append(f"player {node.to_play}")
        if node.ended:
            lines.append("ended")
        if hidden := len(self.graph.left_out(row, self.shown)):
            lines.append(f"+{hidden} hidden")
        return lines

    def _box_size(self, row: int, is_mark: bool) -> tuple[float, float]:
        lines = self._box_lines(row, is_mark)
        return max([text_width(text, 12) for text in lines]) + 20, _LINE * len(lines) + 12

    def _edge_lines(self, edge: TreeEdge) -> tuple[str, str]:
        """Texts above and below an edge's line."""
        figures = f"P {percent(edge.prior)}  Q {self.write(edge.q)}"
        if edge.target in self.shared:
            figures = f"N {edge.visits}  {figures}"
        return shown_name(edge.name, _NAME), figures

    def _label_width(self, edge: TreeEdge) -> float:
        above, below = self._edge_lines(edge)
        return max(text_width(above, 12), text_width(below, 10.5))

    # ------------------------------------------------------------------------ how it is drawn

    def edges(self) -> None:
        """Ribbons with their labels; the most visited on top."""
        ports = self._ports()
        lanes = [(box, edge) for box in self.node_boxes for edge in box.lanes]
        lanes.sort(key=lambda lane: ((lane[1].source, lane[1].action) in self.best, lane[1].visits))
        for box, edge in lanes:
            width = self._ribbon_width(edge)
            path = self._ribbon(box, edge, ports[edge.source, edge.action])
            if (edge.source, edge.action) in self.best:
                self.drawing.line(path, stroke="ink", width=width + _RIM)
            colour = self.scale.colour(edge.q)
            self.drawing.line(path, stroke=colour, width=width, tip=self._edge_tip(edge))
            self._label(box, edge, width)

    def _label(self, box: NodeBox, edge: TreeEdge, width: float) -> None:
        x, y = box.label_x, box.lane_y(edge)
        above, below = self._edge_lines(edge)
        is_best = (edge.source, edge.action) in self.best
        away = width / 2 + 3.5 + (_RIM / 2 if is_best else 0)
        self.drawing.text(x, y - away, above, bold=is_best)
        self.drawing.text(x, y + away + 7.5, below, 10.5, tone="faint")

    def _ribbon_width(self, edge: TreeEdge) -> float:
        return _THIN + (_THICK - _THIN) * edge.visits / self.most

    def _ports(self) -> dict[tuple[int, int], float]:
        """The y coordinate at which each edge leaves its node: stacked, spaced by edge width."""
        leaving: dict[int, list[tuple[float, TreeEdge]]] = {}
        for box in self.node_boxes:
            for edge in box.lanes:
                leaving.setdefault(edge.source, []).append((box.lane_y(edge), edge))
        ports = {}
        for row, ends in leaving.items():
            source = self.nodes[row]
            widths = [self._ribbon_width(edge) + 1.5 for _, edge in ends]
            tightness = min(1.0, (source.height - 14) / sum(widths))
            y = source.y - sum(widths) * tightness / 2
            for _, edge in sorted(ends, key=lambda end: end[0]):
                half = (self._ribbon_width(edge) + 1.5) * tightness / 2
                ports[row, edge.action] = y + half
                y += 2 * half
        return ports

    def _ribbon(self, box: NodeBox, edge: TreeEdge, start_y: float) -> Steps:
        """A curve through the gap between columns, then straight along the label."""
        source, y = self.nodes[edge.source], box.lane_y(edge)
        start = (source.x + source.width, start_y)
        return (("M", (start,)), bent(start, (box.label_x - 4, y)), ("L", ((box.x, y),)))

    def boxes(self) -> None:
        """Nodes and marks."""
        for box in self.node_boxes:
            on_path = box.row in self.on_path and not box.is_mark
            self.drawing.box(
                (box.x, box.y - box.height / 2, box.width, box.height),
                radius=8,
                fill="card" if box.is_mark else "box",
                stroke="ink" if on_path else "rim",
                width=2.0 if on_path else 1.0,
                dashes="4 3" if box.is_mark else "",
                tip=self._node_tip(box.row),
            )
            lines = self._box_lines(box.row, box.is_mark)
            y = box.y - _LINE * len(lines) / 2 + 12
            for i, text in enumerate(lines):
                strong = i == 0 and not box.is_mark
                at = (box.x + box.width / 2, y + _LINE * i)
                tone = "ink" if strong else "faint"
                self.drawing.text(*at, text, anchor="middle", tone=tone, bold=strong)

    def legend(self) -> None:
        """Draw the legend under the tree, and the card under everything."""
        drawing = self.drawing
        legend = Legend(drawing, _MARGIN, drawing.width - _MARGIN, drawing.height + 6)
        if self.visible:
            legend.widths(_THIN, _THICK, self.most)
            legend.colours(self.scale, self.write)
            legend.best_path(5, _RIM)
            legend.words("N visits   V value   P prior   Q reward + discount × V")
        else:
            legend.words("N visits   V value")
        if self.graph.nodes[0].to_play is not None:
            legend.words("V for the player in the box   Q for the player who acts")
        if self.graph.has_merged_paths(self.shown):
            legend.words("N in a box counts all ways that lead to it")
        if any([box.is_mark for box in self.node_boxes]):
            legend.words("↩ the node of this number")
        drawing.height = legend.y + _MARGIN
        card = rectangle((0, 0, drawing.width, drawing.height), 10, fill="card")
        drawing.outlines.insert(0, card)

    # ------------------------------------------------------------------------ tips

    def _edge_tip(self, edge: TreeEdge) -> str:
        return (
            f"{shown_name(edge.name, 200)}: {plural(edge.visits, 'visit')} "
            f"({percent(edge.share)})\n"
            f"Q {edge.q:+.4g}, prior {edge.prior:.4g}\n"
            f"reward {edge.reward:+.4g}, discount {edge.discount:+.4g}"
        )

    def _node_tip(self, row: int) -> str:
        node = self.graph.node(row)
        tip = (
            f"node {row}: {plural(node.visits, 'visit')}, value {node.value:+.4g}, "
            f"raw value {node.raw_value:+.4g}"
        )
        if hidden := self.graph.left_out(row, self.shown):
            visits = plural(sum([edge.visits for edge in hidden]), "visit")
            tip += f"\n{plural(len(hidden), 'action')} not shown, {visits}"
        if node.num_untried:
            tip += f"\n{node.num_untried} not tried, prior {percent(node.untried_prior)}"
        return tip


@dataclass(eq=False)
class NodeBox:
    """The box of a node, or of the mark of a node drawn elsewhere, and its position."""

    row: int
    column: int
    edge: TreeEdge | None = None  # the edge that it hangs on; None: the root
    is_mark: bool = False
    lanes: list[TreeEdge] = field(default_factory=list)  # all edges that come in, from the top
    below: list[NodeBox] = field(default_factory=list)
    height: float = 0.0
    width: float = 0.0  # width of its column's boxes
    label_x: float = 0.0  # left edge of the labels of incoming edges
    x: float = 0.0  # left edge of the box
    y: float = 0.0  # middle of the box

    def lane_y(self, edge: TreeEdge) -> float:
        """The y coordinate at which an edge enters the box."""
        return self.y + (self.lanes.index(edge) - (len(self.lanes) - 1) / 2) * _LANE


def lay_out(
    graph: TreeGraph,
    shown: Sequence[int],  # rows
    box_size: Callable[[int, bool], tuple[float, float]],  # of a row, or of the mark of one
    label_width: Callable[[TreeEdge], float],
) -> list[NodeBox]:
    """Boxes of the shown nodes, the root first; the drawing begins at (0, 0)."""
    boxes = _attached(graph, shown)
    for box in boxes:
        box.height = max(box_size(box.row, box.is_mark)[1], _LANE * len(box.lanes))
    heights = {box: box.height for box in boxes}
    for box, y in tidy(boxes[0], {p: p.below for p in boxes}, heights).items():
        box.y = y
    top = min([box.y - box.height / 2 for box in boxes])
    for box in boxes:
        box.y += _MARGIN - top
    middles = {box.row: box.y for box in boxes if not box.is_mark}
    for box in boxes:
        box.lanes.sort(key=lambda edge: (middles[edge.source], edge.action))
    x = float(_MARGIN)
    for i in range(1 + max([box.column for box in boxes])):
        column = [box for box in boxes if box.column == i]
        labels = max([label_width(edge) for box in column for edge in box.lanes], default=0)
        label_x = x + (_fan(column, middles) if i else 0)
        x = label_x + (labels + 8 if labels else 0)
        width = max([box_size(box.row, box.is_mark)[0] for box in column])
        for box in column:
            box.label_x, box.x, box.width = label_x, x, width
        x += width
    return boxes


def _attached(graph: TreeGraph, shown: Sequence[int]) -> list[NodeBox]:
    """Boxes in breadth-first order, each on its most visited edge from the column before it."""
    visible = set(shown)
    column = {0: 0}
    order = [0]
    for row in order:  # which grows as it is walked
        for edge in graph.edges_from(row):
            if edge.target in visible and edge.target not in column:
                column[edge.target] = column[row] + 1
                order.append(edge.target)
    boxes = {row: NodeBox(row, column[row]) for row in order}
    marks: list[NodeBox] = []
    for row in order:
        for edge in graph.edges_from(row):
            if edge.target not in visible:
                continue
            box = boxes[edge.target]
            if box.column != column[row] + 1:  # a breadth-first search leaves only edges back
                box = NodeBox(edge.target, column[row] + 1, is_mark=True)
                marks.append(box)
            box.lanes.append(edge)
            if box.edge is None or edge.visits > box.edge.visits:
                box.edge = edge
    everything = [*boxes.values(), *marks]
    for box in everything:
        if box.edge is not None:
            boxes[box.edge.source].below.append(box)
    for box in everything:
        box.below.sort(key=_rank)
    return everything


def _rank(box: NodeBox) -> tuple[int, int]:
    """The most visited first."""
    assert box.edge is not None
    return -box.edge.visits, box.edge.action


def _fan(column: Sequence[NodeBox], before: dict[int, float]) -> float:
    """Width of the gap in which lines part: more where they part further."""
    parting = [abs(box.lane_y(e) - before[e.source]) for box in column for e in box.lanes]
    return min(max(44 + 0.14 * max(parting, default=0), 56), 200)


@dataclass
class Legend:
    """Draws its items from a left edge on, and begins a new row at the right one."""

    drawing: Scene
    left: float
    right: float
    y: float  # middle of the row
    x: float = -1.0

    def words(self, text: str) -> None:
        """Draw a row of text only."""
        self._text(self._begin(text_width(text, _SIZE)), text)

    def widths(self, thin: float, thick: float, most: int) -> None:
        """Lines from thin to thick, as wide as the visits are many."""
        text = f"1 to {most} visits" if most > 1 else "1 visit"
        x = self._begin(_SAMPLE + 8 + text_width(text, _SIZE))
        steps = polyline(
            (x, self.y - thin / 2),
            (x + _SAMPLE, self.y - thick / 2),
            (x + _SAMPLE, self.y + thick / 2),
            (x, self.y + thin / 2),
            closed=True,
        )
        self.drawing.line(steps, fill=QScale(0, 0).colour(0))
        self._text(x + _SAMPLE + 8, text)

    def colours(self, scale: QScale, write: Callable[[float], str]) -> None:
        """The colours of Q, between their least and greatest number."""
        low, high = f"Q {write(scale.low)}", write(scale.high)
        if scale.low == scale.high:
            return self.words(f"Q {low[2:]} everywhere")
        starts = text_width(low, _SIZE) + 6
        x = self._begin(starts + 2 * _SAMPLE + 6 + text_width(high, _SIZE))
        self._text(x, low)
        x += starts
        num = 24  # no gradient of SVG: those have names, which clash in a page of several pictures
        step = 2 * _SAMPLE / num
        for i in range(num):
            q = scale.low + (scale.high - scale.low) * i / (num - 1)
            # each reaches under the next one, so that no seam shows
            width = 2 * step if i < num - 1 else step
            self.drawing.box((x + i * step, self.y - 5, width, 10), fill=scale.colour(q))
        self._text(x + 2 * _SAMPLE + 6, high)

    def best_path(self, width: float, rim: float) -> None:
        """A line with a rim."""
        text = "most visited path"
        x = self._begin(_SAMPLE + 8 + text_width(text, _SIZE))
        path = polyline((x, self.y), (x + _SAMPLE, self.y))
        self.drawing.line(path, stroke="ink", width=width + rim)
        self.drawing.line(path, stroke=QScale(0, 0).colour(0), width=width)
        self._text(x + _SAMPLE + 8, text)

    def _begin(self, width: float) -> float:
        """Room for an item of this width: where it starts."""
        if self.x < 0:
            self.x = self.left
        elif self.x + width > self.right:
            self.x, self.y = self.left, self.y + _ROW
        start, self.x = self.x, self.x + width + _BETWEEN
        return start

    def _text(self, x: float, text: str) -> None:
        self.drawing.text(x, self.y + 4, text, _SIZE, tone="faint")


@dataclass(frozen=True)
class QScale:
    """The range of Q that the colours span.

    >>> scale = QScale.of([-0.5, 0.25])
    >>> scale
    QScale(low=-0.5, high=0.5)
    >>> scale.colour(-0.5), scale.colour(0.0), scale.colour(0.5)
    ('#d9680b', '#8b95a5', '#1f77d0')
    """

    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> QScale:
        """The scale from the smallest to the largest value; if signs differ, grey represents 0.

        >>> QScale.of([2.0, 5.0])
        QScale(low=2.0, high=5.0)
        """
        low, high = min(values, default=0.0), max(values, default=0.0)
        if low < 0 < high:
            low, high = -max(-low, high), max(-low, high)
        return cls(low, high)

    def colour(self, q: float) -> str:
        """The colour of one Q, "#rrggbb"; grey where all are the same.

        >>> QScale(2.0, 2.0).colour(2.0)
        '#8b95a5'
        """
        position = (q - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        side, end = abs(2 * position - 1), _BEST if position > 0.5 else _WORST
        mixed = [round(m + (e - m) * side) for m, e in zip(_MIDDLE, end, strict=True)]
        return "#" + "".join([f"{part:02x}" for part in mixed])
