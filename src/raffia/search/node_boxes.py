"""Where the nodes of a searched tree stand in a picture: a tidy tree, from left to right.

Each depth has a column, and in it first the labels of the edges, then the boxes of the nodes. Of
several edges that lead to a node from the column before it, each has a lane of its own; one that
leads back is drawn to a mark instead of the node, so that no line crosses a label.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from raffia.draw.layouts import tidy
from raffia.search.graph import TreeEdge, TreeGraph

LANE = 44  # height of an edge with its label
MARGIN = 24


@dataclass(eq=False)
class NodeBox:
    """The box of a node, or of the mark of one that stands elsewhere, and where it is drawn."""

    row: int
    column: int
    edge: TreeEdge | None = None  # the edge that it hangs on; None: the root
    is_mark: bool = False
    lanes: list[TreeEdge] = field(default_factory=list)  # all edges that come in, from the top
    below: list["NodeBox"] = field(default_factory=list)
    height: float = 0.0
    width: float = 0.0  # width of its column's boxes
    label_x: float = 0.0  # left edge of the labels of incoming edges
    x: float = 0.0  # left edge of the box
    y: float = 0.0  # middle of the box

    def lane_y(self, edge: TreeEdge) -> float:
        """Where an edge comes in."""
        return self.y + (self.lanes.index(edge) - (len(self.lanes) - 1) / 2) * LANE


def lay_out(
    graph: TreeGraph,
    shown: Sequence[int],  # rows
    box_size: Callable[[int, bool], tuple[float, float]],  # of a row, or of the mark of one
    label_width: Callable[[TreeEdge], float],
) -> list[NodeBox]:
    """Boxes of the shown nodes, the root first; the drawing begins at (0, 0)."""
    boxes = _hung(graph, shown)
    for box in boxes:
        box.height = max(box_size(box.row, box.is_mark)[1], LANE * len(box.lanes))
    heights = {box: box.height for box in boxes}
    for box, y in tidy(boxes[0], {p: p.below for p in boxes}, heights).items():
        box.y = y
    top = min([box.y - box.height / 2 for box in boxes])
    for box in boxes:
        box.y += MARGIN - top
    beside = {box.row: box.y for box in boxes if not box.is_mark}
    for box in boxes:
        box.lanes.sort(key=lambda edge: (beside[edge.source], edge.action))
    x = float(MARGIN)
    for i in range(1 + max([box.column for box in boxes])):
        column = [box for box in boxes if box.column == i]
        labels = max([label_width(edge) for box in column for edge in box.lanes], default=0)
        label_x = x + (_fan(column, beside) if i else 0)
        x = label_x + (labels + 8 if labels else 0)
        width = max([box_size(box.row, box.is_mark)[0] for box in column])
        for box in column:
            box.label_x, box.x, box.width = label_x, x, width
        x += width
    return boxes


def _hung(graph: TreeGraph, shown: Sequence[int]) -> list[NodeBox]:
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
