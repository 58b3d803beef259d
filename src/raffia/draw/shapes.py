"""What drawings are made of: lines, boxes and texts, their colours, and how wide a text is."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Any

# What a drawing may name its colours by: in the light, and in the dark.
TONES = {
    "card": ("#ffffff", "#0f172a"),
    "box": ("#f8fafc", "#1e293b"),
    "rim": ("#94a3b8", "#64748b"),
    "ink": ("#0f172a", "#f1f5f9"),
    "faint": ("#56637a", "#a3b1c6"),
}
_CHAR = 7.25  # width of a character, for a monospaced font of 12 pixels

Point = tuple[float, float]
Step = tuple[str, tuple[Point, ...]]  # a letter of SVG's path data (M, L, C, Z) with its points
Steps = tuple[Step, ...]
Corners = tuple[float, float, float, float]  # x, y, width and height


@dataclass(frozen=True)
class StyledOutline:
    """A line or an area.

    >>> StyledOutline(polyline((0, 0), (4, 3)), stroke="ink").width
    1.0
    """

    steps: Steps
    fill: str = "none"  # a tone or "#rrggbb"
    stroke: str = "none"
    width: float = 1.0  # of the line
    dashes: str = ""  # lengths of dash and gap, as "4 3"
    tip: str = ""  # shown under the mouse
    rectangle: tuple[float, ...] = ()  # x, y, width, height and radius, where it is one


@dataclass(frozen=True)
class Text:
    """One line of text on a base line.

    >>> Text(10, 20, "abcd", size=12, anchor="end").bounds[::2]  # left and right
    (-19.0, 10.0)
    """

    x: float
    y: float
    text: str
    size: float = 12
    anchor: str = "start"  # or "middle", "end"
    tone: str = "ink"  # or "#rrggbb"
    bold: bool = False
    opacity: float = 1.0

    @property
    def bounds(self) -> tuple[float, float, float, float]:
        """Left, top, right and bottom."""
        width = text_width(self.text, self.size)
        left = self.x - {"start": 0.0, "middle": 0.5, "end": 1.0}[self.anchor] * width
        return left, self.y - 0.76 * self.size, left + width, self.y + 0.24 * self.size


def text_width(text: str, size: float = 12) -> float:
    """Pixels that a line of text takes; Chinese and Japanese characters count twice.

    >>> text_width("abcd"), text_width("日本"), text_width("abcd", size=6)
    (29.0, 29.0, 14.5)
    """
    wide = sum([unicodedata.east_asian_width(char) in "WF" for char in text])
    return (len(text) + wide) * _CHAR * size / 12


def light(colour: str) -> str:
    """A tone as it is in the light; other colours as they are.

    >>> light("card"), light("#112233")
    ('#ffffff', '#112233')
    """
    return TONES[colour][0] if colour in TONES else colour


def polyline(*points: Point, closed: bool = False) -> Steps:
    """Straight lines from point to point, and back to the first where they are closed.

    >>> polyline((0, 0), (4, 3))
    (('M', ((0, 0),)), ('L', ((4, 3),)))
    """
    back: Steps = (("Z", ()),) if closed else ()
    return (("M", points[:1]), *[("L", (point,)) for point in points[1:]], *back)


def bent(start: Point, end: Point, down: bool = False) -> Step:
    """A curve that leaves a point and reaches another one level, or upright if it goes down.

    >>> bent((0, 0), (10, 4))
    ('C', ((5.0, 0), (5.0, 4), (10, 4)))
    >>> bent((0, 0), (10, 4), down=True)
    ('C', ((0, 2.0), (10, 2.0), (10, 4)))
    """
    (x0, y0), (x1, y1) = start, end
    if down:
        return ("C", ((x0, (y0 + y1) / 2), (x1, (y0 + y1) / 2), end))
    return ("C", (((x0 + x1) / 2, y0), ((x0 + x1) / 2, y1), end))


def rectangle(corners: Corners, radius: float, **look: Any) -> StyledOutline:
    """A box, with round corners where the radius is not 0; `look` as in `StyledOutline`.

    >>> rectangle((0, 0, 20, 10), 0, fill="card").rectangle
    (0, 0, 20, 10, 0)
    """
    x, y, width, height = corners
    radius = min(radius, width / 2, height / 2)
    right, bottom, bend = x + width, y + height, 0.448 * radius  # a quarter of a circle
    steps: Steps = (
        ("M", ((x + radius, y),)),
        ("L", ((right - radius, y),)),
        ("C", ((right - bend, y), (right, y + bend), (right, y + radius))),
        ("L", ((right, bottom - radius),)),
        ("C", ((right, bottom - bend), (right - bend, bottom), (right - radius, bottom))),
        ("L", ((x + radius, bottom),)),
        ("C", ((x + bend, bottom), (x, bottom - bend), (x, bottom - radius))),
        ("L", ((x, y + radius),)),
        ("C", ((x, y + bend), (x + bend, y), (x + radius, y))),
        ("Z", ()),
    )
    return StyledOutline(steps, rectangle=(*corners, radius), **look)
