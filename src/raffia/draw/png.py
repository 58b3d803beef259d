"""Drawings as PNG; and matplotlib, for whatever else is drawn with it."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import IO, Any

from raffia.draw.shapes import StyledOutline, Text, light

_LONGEST_SIDE = 16_000  # in pixels: more is refused by what draws it
_SCALE = 2  # pixels of a PNG to one of the drawing


def write_png(
    file: IO[bytes],
    width: float,
    height: float,
    outlines: Iterable[StyledOutline],
    texts: Iterable[Text],
    matplotlib: Any,
) -> None:
    """Write a drawing into an open file as PNG, with the package that draws it.

    >>> import io
    >>> file = io.BytesIO()
    >>> write_png(file, 20, 10, [], [Text(4, 8, "a")], matplotlib_for("PNG files are drawn with"))
    >>> file.getvalue()[1:4]
    b'PNG'
    """
    scale = min(_SCALE, _LONGEST_SIDE / max(width, height))
    size = (width / 72, height / 72)  # inches, a pixel of the drawing being a point
    figure = matplotlib.figure.Figure(size, dpi=72 * scale)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    for outline in outlines:
        axes.add_patch(_patch(matplotlib, outline))
    for text in texts:
        axes.text(
            text.x,
            text.y,
            text.text,
            fontsize=text.size,
            family="DejaVu Sans Mono",  # comes with matplotlib
            weight="bold" if text.bold else "normal",
            ha={"start": "left", "middle": "center", "end": "right"}[text.anchor],
            va="baseline",
            color=light(text.tone),
            alpha=text.opacity,
            parse_math=False,
        )
    figure.savefig(file, format="png", dpi=72 * scale)


def _patch(matplotlib: Any, outline: StyledOutline) -> Any:
    path = matplotlib.path.Path
    codes = {"M": path.MOVETO, "L": path.LINETO, "C": path.CURVE4}
    points = [point for _, some in outline.steps for point in some]
    letters = [codes[letter] for letter, some in outline.steps for _ in some]
    if outline.steps[-1][0] == "Z":
        points, letters = [*points, points[0]], [*letters, path.CLOSEPOLY]
    return matplotlib.patches.PathPatch(
        path(points, letters),
        facecolor=light(outline.fill),
        edgecolor=light(outline.stroke),
        linewidth=outline.width if outline.stroke != "none" else 0,
        linestyle=(0, tuple(map(int, outline.dashes.split()))) if outline.dashes else "solid",
        capstyle="butt",
    )


def matplotlib_for(what: str, instead: str = "") -> Any:
    """The package matplotlib; where it is not installed, an error that names the extra.

    what: begins the error, as in "PNG files are drawn with"; instead: ends it.

    >>> matplotlib_for("pictures are drawn by").__name__
    'matplotlib'
    """
    try:
        importlib.import_module("matplotlib.figure")  # and with it patches and path
        importlib.import_module("matplotlib.ticker")
        importlib.import_module("matplotlib.backends.backend_svg")
        return importlib.import_module("matplotlib")
    except ImportError as error:
        raise ImportError(
            f"{what} matplotlib, which is not installed: pip install 'raffia[report]'{instead}"
        ) from error
