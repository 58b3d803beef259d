"""A drawing made of outlines and lines of text, and its two forms: SVG of our own, and PNG."""

import importlib
import os
from dataclasses import dataclass, field
from html import escape
from pathlib import Path as FilePath
from typing import Any

from raffia.files import write_atomically
from raffia.nn.placing import text_width as width_at_12

FONT = 'ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace'

# What a drawing names its colours by: in the light, and in the dark.
TONES = {
    "card": ("#ffffff", "#0f172a"),
    "box": ("#f8fafc", "#1e293b"),
    "rim": ("#94a3b8", "#64748b"),
    "ink": ("#0f172a", "#f1f5f9"),
    "faint": ("#56637a", "#a3b1c6"),
}
_LONGEST_SIDE = 16_000  # of a PNG, in pixels: more is refused by what draws it
_SCALE = 2  # pixels of a PNG to one of the drawing

Point = tuple[float, float]
Steps = tuple[tuple[str, tuple[Point, ...]], ...]


@dataclass(frozen=True)
class Outline:
    """A line or an area: the letters of SVG's path data (M, L, C, Z) with their points."""

    steps: Steps
    fill: str = "none"  # a tone or "#rrggbb"
    stroke: str = "none"
    width: float = 1.0
    dashed: bool = False
    tip: str = ""  # shown under the mouse


@dataclass(frozen=True)
class Text:
    """One line of text on a base line."""

    x: float
    y: float
    text: str
    size: float = 12
    anchor: str = "start"  # or "middle", "end"
    tone: str = "ink"
    bold: bool = False

    @property
    def bounds(self) -> tuple[float, float, float, float]:
        """Left, top, right and bottom."""
        width = text_width(self.text, self.size)
        left = self.x - {"start": 0.0, "middle": 0.5, "end": 1.0}[self.anchor] * width
        return left, self.y - 0.76 * self.size, left + width, self.y + 0.24 * self.size


@dataclass
class Drawing:
    """Outlines in the order in which they are painted, text above them; sizes in pixels."""

    title: str
    width: float = 0.0
    height: float = 0.0
    outlines: list[Outline] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)

    def svg(self) -> str:
        """The text of an SVG file: light, or dark for readers who prefer that; never transparent.

        >>> Drawing("empty", width=20, height=10).svg().splitlines()[1]
        '<title>empty</title>'
        """
        width, height = f"{self.width:.0f}", f"{self.height:.0f}"
        opening = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" font-family="{escape(FONT)}">'
        )
        # Attributes say the light colours; where a style sheet counts, it says the dark ones.
        dark = "".join(
            [
                f".raffia-{name}{{fill:{tone}}}.raffia-{name}-line{{stroke:{tone}}}"
                for name, (_, tone) in TONES.items()
            ]
        )
        style = f"<style>@media (prefers-color-scheme:dark){{{dark}}}</style>"
        body = [_svg_outline(outline) for outline in self.outlines]
        body += [_svg_text(text) for text in self.texts]
        return "\n".join([opening, f"<title>{escape(self.title)}</title>", style, *body, "</svg>"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file, whose ending says what: .svg, or .png (with matplotlib)."""
        ending = FilePath(path).suffix.lower()
        if ending == ".svg":
            write_atomically(path, f"{self.svg()}\n".encode())
        elif ending == ".png":
            self._save_png(path)
        else:
            raise ValueError(
                f"{os.fspath(path)!r} ends in {ending!r}; pictures are written as .svg or .png: "
                f"for example {str(FilePath(path).with_suffix('.svg'))!r}"
            )

    def _save_png(self, path: str | os.PathLike[str]) -> None:
        matplotlib = _matplotlib()
        scale = min(_SCALE, _LONGEST_SIDE / max(self.width, self.height))
        size = (self.width / 72, self.height / 72)  # inches, a pixel of the drawing being a point
        figure = matplotlib.figure.Figure(size, dpi=72 * scale)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, self.width), ylim=(self.height, 0))
        axes.axis("off")
        for outline in self.outlines:
            axes.add_patch(_patch(matplotlib, outline))
        for text in self.texts:
            axes.text(
                text.x,
                text.y,
                text.text,
                fontsize=text.size,
                family="DejaVu Sans Mono",  # comes with matplotlib
                weight="bold" if text.bold else "normal",
                ha={"start": "left", "middle": "center", "end": "right"}[text.anchor],
                va="baseline",
                color=_light(text.tone),
                parse_math=False,
            )
        write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=72 * scale))


def text_width(text: str, size: float) -> float:
    """Width of a line of text in pixels.

    >>> text_width("abcd", 12)
    29.0
    """
    return width_at_12(text) * size / 12


def polyline(*points: Point) -> Steps:
    """Straight lines from point to point."""
    return (("M", points[:1]), *[("L", (point,)) for point in points[1:]])


def rounded(x: float, y: float, width: float, height: float, radius: float) -> Steps:
    """A rectangle with round corners."""
    radius = min(radius, width / 2, height / 2)
    right, bottom, bend = x + width, y + height, 0.448 * radius  # a quarter of a circle
    return (
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


def _svg_outline(outline: Outline) -> str:
    data = " ".join(
        [
            letter + " ".join([f"{x:.1f} {y:.1f}" for x, y in points])
            for letter, points in outline.steps
        ]
    )
    classes = [f"raffia-{outline.fill}"] if outline.fill in TONES else []
    classes += [f"raffia-{outline.stroke}-line"] if outline.stroke in TONES else []
    says = f'<path d="{data}" fill="{_light(outline.fill)}"'
    if outline.stroke != "none":
        says += f' stroke="{_light(outline.stroke)}" stroke-width="{outline.width:.1f}"'
    says += ' stroke-dasharray="4 3"' if outline.dashed else ""
    says += f' class="{" ".join(classes)}"' if classes else ""
    return says + (f"><title>{escape(outline.tip)}</title></path>" if outline.tip else "/>")


def _svg_text(text: Text) -> str:
    says = f'<text x="{text.x:.1f}" y="{text.y:.1f}" font-size="{text.size:g}"'
    says += f' text-anchor="{text.anchor}"' if text.anchor != "start" else ""
    says += ' font-weight="600"' if text.bold else ""
    look = f'fill="{_light(text.tone)}" class="raffia-{text.tone}"'
    # the mouse reaches through to what the text stands on, which has more to say
    return f'{says} {look} pointer-events="none" xml:space="preserve">{escape(text.text)}</text>'


def _patch(matplotlib: Any, outline: Outline) -> Any:
    path = matplotlib.path.Path
    codes = {"M": path.MOVETO, "L": path.LINETO, "C": path.CURVE4}
    points = [point for _, some in outline.steps for point in some]
    letters = [codes[letter] for letter, some in outline.steps for _ in some]
    if outline.steps[-1][0] == "Z":
        points, letters = [*points, points[0]], [*letters, path.CLOSEPOLY]
    return matplotlib.patches.PathPatch(
        path(points, letters),
        facecolor=_light(outline.fill),
        edgecolor=_light(outline.stroke),
        linewidth=outline.width if outline.stroke != "none" else 0,
        linestyle=(0, (4, 3)) if outline.dashed else "solid",
        capstyle="butt",
    )


def _matplotlib() -> Any:
    """The package that draws PNG."""
    try:
        importlib.import_module("matplotlib.figure")  # and with it patches and path
        return importlib.import_module("matplotlib")
    except ImportError as error:
        raise ImportError(
            "PNG files are drawn with matplotlib, which is not installed: "
            "pip install 'raffia[report]'; SVG files need nothing"
        ) from error


def _light(colour: str) -> str:
    return TONES[colour][0] if colour in TONES else colour
