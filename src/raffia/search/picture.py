"""A picture of a searched tree's most visited part.

Edges are ribbons, as wide as they were often taken and coloured by Q, from blue for the best to
orange for the worst; the most visited path has a rim.
"""

from collections.abc import Sequence

from raffia.draw.scene import Scene, Steps, bent, rectangle, text_width
from raffia.hints import plural
from raffia.search.colours import QScale
from raffia.search.graph import TreeEdge, TreeGraph
from raffia.search.labels import figures, percent, shown_name
from raffia.search.legend import Legend
from raffia.search.node_boxes import MARGIN, NodeBox, lay_out

_THIN, _THICK, _RIM = 1.4, 10.0, 3.5  # edges, and what is added for the rim, in pixels
_LINE = 16  # height of a line in a box
_HEADER = 34
_NAME = 28  # characters of an action's name; the tip has all of it
_LEAST_WIDTH = 560  # so that header and legend have room


def drawn(graph: TreeGraph, max_nodes: int = 40) -> Scene:
    """A drawing of a root's tree that can be had as SVG or be saved.

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
    """What the parts of the picture have in common: placement, scale of colours, drawing."""

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
        right = max([box.x + box.width for box in self.node_boxes]) + MARGIN
        width = max(right, _LEAST_WIDTH, text_width(headline, 14) + 2 * MARGIN)
        height = max([box.y + box.height / 2 for box in self.node_boxes]) + MARGIN
        self.drawing = Scene(headline, width, height)
        self.drawing.text(MARGIN, MARGIN + 8, headline, 14, bold=True)

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
        """Where each edge leaves its node: one below the other, as wide as they are."""
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
        """What the signs mean, under the tree; and the card under everything."""
        drawing = self.drawing
        legend = Legend(drawing, MARGIN, drawing.width - MARGIN, drawing.height + 6)
        if self.visible:
            legend.widths(_THIN, _THICK, self.most)
            legend.colours(self.scale, self.write)
            legend.best_path(5, _RIM)
            legend.words("N visits   V value   P prior   Q reward + discount × V")
        else:
            legend.words("N visits   V value")
        if self.graph.nodes[0].to_play is not None:
            legend.words("V for the player in the box   Q for who takes the action")
        if self.graph.meeting(self.shown):
            legend.words("N in a box counts all ways that lead to it")
        if any([box.is_mark for box in self.node_boxes]):
            legend.words("↩ the node of this number")
        drawing.height = legend.y + MARGIN
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
