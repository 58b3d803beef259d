"""Curves over runs and the panels that show them, as data: nothing here draws.

A curve of several runs is their interquartile mean with its bootstrap band; long ones are thinned.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

RESAMPLES = 2000  # of the bootstrap
SEED = 0  # of its generator: the same files give the same band
_GRID = 120  # points of a curve over several runs, at most


@dataclass(frozen=True)
class Curve:
    """A line, with a band around it if `low` and `high` are given.

    >>> Curve([0.0], [1.0]).low
    []
    """

    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()

    @classmethod
    def of(cls, points: Iterable[tuple[float, float]]) -> Curve:
        """The line through these points, without those that are not numbers.

        >>> Curve.of([(0.0, 1.0), (float("nan"), 2.0)])
        Curve(x=[0.0], y=[1.0], low=[], high=[])
        """
        known = [(x, y) for x, y in points if math.isfinite(x + y)]
        return cls([x for x, _ in known], [y for _, y in known])

    def __post_init__(self) -> None:
        for name in ("x", "y", "low", "high"):
            object.__setattr__(self, name, list(getattr(self, name)))


def interquartile_mean(values: Array) -> Array:
    """Mean over the first axis of what is left when a quarter is cut from either end.

    Of fewer than four values nothing is cut: it is their mean.
    Source: Agarwal et al. (2021), Deep Reinforcement Learning at the Edge of the Statistical
    Precipice.

    >>> float(interquartile_mean(np.array([0.0, 1.0, 2.0, 100.0])))
    1.5
    """
    cut = len(values) // 4
    ordered = np.sort(values, axis=0)
    return np.asarray(ordered[cut : len(values) - cut].mean(axis=0))


def bootstrap_band(values: Array) -> tuple[Array, Array]:
    """A 95 % interval of the interquartile mean.  values: [runs, ...].

    Whole runs are drawn with replacement, so a curve's points stay together; the 2.5th and 97.5th
    percentile of 2,000 draws. Each configuration is drawn for itself (they are the strata).

    >>> low, high = bootstrap_band(np.array([[1.0], [2.0], [3.0]]))
    >>> float(low[0]), float(high[0])
    (1.0, 3.0)
    """
    generator = np.random.default_rng(SEED)
    drawn = generator.integers(len(values), size=(RESAMPLES, len(values)))
    blocks = np.array_split(drawn, 20)  # all draws at once could take gigabytes
    means = np.concatenate([interquartile_mean(values[rows].swapaxes(0, 1)) for rows in blocks])
    low, high = np.percentile(means, [2.5, 97.5], axis=0)
    return low, high


def over_runs(curves: Sequence[Curve], band: bool = True) -> Curve | None:
    """Interquartile mean and band over runs, where all have points; None for fewer than two runs.

    Runs are evaluated at steps of their own; between these, values are interpolated.

    >>> curve = over_runs([Curve([0, 2], [0, 2]), Curve([1, 3], [3, 5])])
    >>> curve.x, curve.y
    ([1.0, 2.0], [2.0, 3.0])
    """
    finite = [Curve.of(zip(one.x, one.y, strict=True)) for one in curves]
    given = [curve for curve in finite if curve.x]
    if len(given) < 2:
        return None
    sides = [np.array([curve.x, curve.y], dtype=np.float64) for curve in given]
    sides = [side[:, np.argsort(side[0], kind="stable")] for side in sides]
    start, end = max(side[0, 0] for side in sides), min(side[0, -1] for side in sides)
    if start > end:
        return None
    grid = np.unique(np.concatenate([side[0] for side in sides]))
    grid = grid[(grid >= start) & (grid <= end)]
    if len(grid) > _GRID:
        grid = np.linspace(start, end, _GRID)
    values = np.stack([np.interp(grid, side[0], side[1]) for side in sides])
    middle = interquartile_mean(values).tolist()
    if not band:
        return Curve(grid.tolist(), middle)
    low, high = bootstrap_band(values)
    return Curve(grid.tolist(), middle, low.tolist(), high.tolist())


def thinned(x: Sequence[float], y: Sequence[float], most: int = 300) -> Curve:
    """Means of neighbouring points, with their least and greatest as a band, if there are too many.

    What is not a number is left out of the means.

    >>> thinned([0, 1, 2, 3], [0.0, 2.0, 5.0, 7.0], most=2)
    Curve(x=[0.5, 2.5], y=[1.0, 6.0], low=[0.0, 5.0], high=[2.0, 7.0])
    """
    if len(x) <= most:
        return Curve(x, y)
    xs, heights = np.array(x, dtype=np.float64), np.array(y, dtype=np.float64)
    fine = np.isfinite(xs) & np.isfinite(heights)
    xs, heights = xs[fine], heights[fine]
    if len(xs) <= most:
        return Curve(xs.tolist(), heights.tolist())
    pieces = list(zip(np.array_split(xs, most), np.array_split(heights, most), strict=True))
    return Curve(
        [float(px.mean()) for px, _ in pieces],
        [float(py.mean()) for _, py in pieces],
        [float(py.min()) for _, py in pieces],
        [float(py.max()) for _, py in pieces],
    )


def every(num: int, most: int) -> list[int]:
    """The evenly spaced indices of the points shown when at most `most` of `num` may be shown.

    >>> every(3, 5), every(10, 4)
    ([0, 1, 2], [0, 3, 6, 9])
    """
    if num <= most:
        return list(range(num))
    return np.linspace(0, num - 1, most).round().astype(int).tolist()


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The 25th and 75th percentile.

    >>> quartiles([0.0, 1.0, 2.0, 3.0, 4.0])
    (1.0, 3.0)
    """
    low, high = np.percentile(np.array(values), [25, 75])
    return float(low), float(high)


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
