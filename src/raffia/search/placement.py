"""Where the nodes of a searched tree stand in a picture: a tidy tree, from left to right.

Each depth has a column, and in it first the labels of the edges, then the boxes of the nodes. Of
several edges that lead to a node from the column before it, each has a lane of its own; one that
leads back is drawn to a mark in place of the node, so that no line crosses a label.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from raffia.draw import tidy
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
    x: float = 0.0  # of the left edge
    y: float = 0.0  # of the middle

    def lane_y(self, edge: TreeEdge) -> float:
        """Where an edge comes in."""
        return self.y + (self.lanes.index(edge) - (len(self.lanes) - 1) / 2) * LANE


@dataclass
class Placement:
    """Places, the root's first, and for each column where its labels and its boxes begin."""

    places: list[Place]
    label_x: list[float]
    box_x: list[float]
    box_width: list[float]
    height: float

    @property
    def width(self) -> float:
        """Of all columns, with margins."""
        return self.box_x[-1] + self.box_width[-1] + MARGIN

    def nodes(self) -> dict[int, Place]:
        """Where each node stands, by its row."""
        return {place.row: place for place in self.places if not place.is_mark}


def placed(
    graph: TreeGraph,
    shown: Sequence[int],  # rows
    box_size: Callable[[int, bool], tuple[float, float]],  # of a row, or of the mark of one
    label_width: Callable[[TreeEdge], float],
) -> Placement:
    """A place for each of the shown nodes; the top left corner of the drawing is (0, 0)."""
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
    height = max([place.y + place.height / 2 for place in places]) + MARGIN
    columns: list[list[Place]] = [[] for _ in range(1 + max([place.column for place in places]))]
    for place in places:
        columns[place.column].append(place)
    found = Placement(places, [], [], [], height)
    x = float(MARGIN)
    for i, column in enumerate(columns):
        labels = max([label_width(edge) for place in column for edge in place.lanes], default=0)
        x += 0 if i == 0 else _fan(column, beside)
        found.label_x.append(x)
        found.box_x.append(x + labels + (8 if labels else 0))
        found.box_width.append(max([box_size(p.row, p.is_mark)[0] for p in column]))
        x = found.box_x[-1] + found.box_width[-1]
        for place in column:
            place.x = found.box_x[-1]
    return found


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
