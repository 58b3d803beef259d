"""Where the nodes of a searched tree stand in a picture: a tidy tree, from left to right.

Each depth has a column, and in it first the labels of the edges, then the boxes of the nodes. Of
several edges that lead to a node from the column before it, each has a lane of its own; one that
leads back is drawn to a mark in place of the node, so that no line crosses a label.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from raffia.draw.tidy import tidy
from raffia.search.graph import TreeEdge, TreeGraph

LANE = 44  # height of an edge with its label
MARGIN = 24


@dataclass(eq=False)
class Place:
    """A node, or the mark of one that stands elsewhere, and where it is drawn."""

    row: int
    column: int
    edge: TreeEdge | None = None  # that it hangs on; None: the root
    is_mark: bool = False
    lanes: list[TreeEdge] = field(default_factory=list)  # all edges that come in, from the top
    below: list["Place"] = field(default_factory=list)
    height: float = 0.0
    width: float = 0.0  # of its column's boxes
    label_x: float = 0.0  # of the labels of edges that come in
    x: float = 0.0  # of the left edge
    y: float = 0.0  # of the middle

    def lane_y(self, edge: TreeEdge) -> float:
        """Where an edge comes in."""
        return self.y + (self.lanes.index(edge) - (len(self.lanes) - 1) / 2) * LANE


def placed(
    graph: TreeGraph,
    shown: Sequence[int],  # rows
    box_size: Callable[[int, bool], tuple[float, float]],  # of a row, or of the mark of one
    label_width: Callable[[TreeEdge], float],
) -> list[Place]:
    """A place for each of the shown nodes, the root first; what is drawn begins at (0, 0)."""
    places = _hung(graph, shown)
    for place in places:
        place.height = max(box_size(place.row, place.is_mark)[1], LANE * len(place.lanes))
    heights = {place: place.height for place in places}
    for place, y in tidy(places[0], {p: p.below for p in places}, heights).items():
        place.y = y
    top = min([place.y - place.height / 2 for place in places])
    for place in places:
        place.y += MARGIN - top
    beside = {place.row: place.y for place in places if not place.is_mark}
    for place in places:
        place.lanes.sort(key=lambda edge: (beside[edge.source], edge.action))
    x = float(MARGIN)
    for i in range(1 + max([place.column for place in places])):
        column = [place for place in places if place.column == i]
        labels = max([label_width(edge) for place in column for edge in place.lanes], default=0)
        label_x = x + (_fan(column, beside) if i else 0)
        x = label_x + (labels + 8 if labels else 0)
        width = max([box_size(place.row, place.is_mark)[0] for place in column])
        for place in column:
            place.label_x, place.x, place.width = label_x, x, width
        x += width
    return places


def _hung(graph: TreeGraph, shown: Sequence[int]) -> list[Place]:
    """Places in breadth-first order, each on its most visited edge from the column before it."""
    visible = set(shown)
    column = {0: 0}
    order = [0]
    for row in order:  # which grows as it is walked
        for edge in graph.edges_from(row):
            if edge.target in visible and edge.target not in column:
                column[edge.target] = column[row] + 1
                order.append(edge.target)
    places = {row: Place(row, column[row]) for row in order}
    marks: list[Place] = []
    for row in order:
        for edge in graph.edges_from(row):
            if edge.target not in visible:
                continue
            place = places[edge.target]
            if place.column != column[row] + 1:  # a walk in breadth leaves only edges back
                place = Place(edge.target, column[row] + 1, is_mark=True)
                marks.append(place)
            place.lanes.append(edge)
            if place.edge is None or edge.visits > place.edge.visits:
                place.edge = edge
    everything = [*places.values(), *marks]
    for place in everything:
        if place.edge is not None:
            places[place.edge.source].below.append(place)
    for place in everything:
        place.below.sort(key=_rank)
    return everything


def _rank(place: Place) -> tuple[int, int]:
    """The most visited first."""
    assert place.edge is not None
    return -place.edge.visits, place.edge.action


def _fan(column: Sequence[Place], before: dict[int, float]) -> float:
    """Room for the lines to part: more where they part further."""
    parting = [abs(place.lane_y(e) - before[e.source]) for place in column for e in place.lanes]
    return min(max(44 + 0.14 * max(parting, default=0), 56), 200)
