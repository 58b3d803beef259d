"""Panels as data, before anything draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raffia.report.curves import Curve

# Tones are names of the page's style sheet: a figure follows the page from light to dark.
SERIES = tuple([f"c{i}" for i in range(8)])


def tone(index: int) -> str:
    """The tone of a group, or of a part of a whole.

    >>> tone(0), tone(9)
    ('c0', 'c1')
    """
    return SERIES[index % len(SERIES)]


@dataclass(frozen=True)
class Line:
    """A curve and how it looks.

    >>> Line(Curve([0.0], [1.0])).tone
    'c0'
    """

    curve: Curve
    tone: str = "c0"
    width: float = 1.6
    opacity: float = 1.0
    dots: bool = False  # a dot at each point
    band: float = 0.16  # opacity of the band


@dataclass(frozen=True)
class Area:
    """One part of a whole over x; parts are stacked in their order.

    >>> Area([1.0, 2.0], "c0").tone
    'c0'
    """

    heights: Sequence[float]
    tone: str


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    >>> Panel("loss", "updates", "nats").empty
    True
    """

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...] = ()
    points: tuple[Line, ...] = ()  # faint, not joined
    areas: tuple[Area, ...] = ()  # over area_x
    area_x: Sequence[float] = ()
    marks: tuple[float, ...] = ()  # restarts: positions on x
    levels: tuple[float, ...] = ()  # targets: heights
    log: bool = False
    y_limits: tuple[float, float] | None = None
    from_zero: bool = False  # y begins at 0
    wide: bool = False
    whole_x: bool = False  # marks on x are whole numbers

    @property
    def empty(self) -> bool:
        """Whether the panel would be blank."""
        shown = [line for line in (*self.lines, *self.points) if line.curve.x]
        return not shown and not self.areas
