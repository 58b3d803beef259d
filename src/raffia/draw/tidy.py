"""A tidy tree, which grows from left to right: how far up or down each node stands.

A node stands beside the middle of its children, and subtrees are pushed together until their
outlines touch (Reingold and Tilford, 1981, "Tidier Drawings of Trees").
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

_GAP, _COUSINS_GAP = 8, 14  # between what stands below each other: of one parent, of several

Node = TypeVar("Node", bound=Hashable)
Profile = list[tuple[float, float]]  # top and bottom in each column, from a node's own on


def tidy(
    root: Node, children: Mapping[Node, Sequence[Node]], heights: Mapping[Node, float]
) -> dict[Node, float]:
    """How far below the root's middle the middle of each node of a tree stands.

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
    """How far down a subtree goes, so that it stands below what is there."""
    gaps = [_GAP] + [_COUSINS_GAP] * len(lower)
    needed = [high[1] - low[0] + gap for high, low, gap in zip(upper, lower, gaps, strict=False)]
    return max(needed, default=0.0)


def _join(upper: Profile, lower: Profile, offset: float) -> None:
    for i, (top, bottom) in enumerate(lower):
        first = upper[i][0] if i < len(upper) else top + offset
        upper[i : i + 1] = [(first, bottom + offset)]
