"""A drawing made of outlines and lines of text, and its two forms: SVG, and PNG by matplotlib."""

from __future__ import annotations

import importlib
import os
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from raffia.files import write_atomically

# What a drawing may name its colours by: in the light, and in the dark.
TONES = {
    "card": ("#ffffff", "#0f172a"),
    "box": ("#f8fafc", "#1e293b"),
    "rim": ("#94a3b8", "#64748b"),
    "ink": ("#0f172a", "#f1f5f9"),
    "faint": ("#56637a", "#a3b1c6"),
}

FONT = 'ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace'
_CHAR = 7.25  # width of a character, for a monospaced font of 12 pixels

_LONGEST_SIDE = 16_000  # in pixels: more is refused by what draws it
_SCALE = 2  # pixels of a PNG to one of the drawing

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
    """The light-theme colour of a named tone; other colours unchanged.

    >>> light("card"), light("#112233")
    ('#ffffff', '#112233')
    """
    return TONES[colour][0] if colour in TONES else colour


def polyline(*points: Point, closed: bool = False) -> Steps:
    """The steps of straight lines from point to point, and back to the first point if `closed`.

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


@dataclass
class Scene:
    """Outlines in the order in which they are painted, text above them; sizes in pixels.

    >>> Scene("a word", 60, 20, texts=[Text(4, 14, "word")]).svg().count("<text")
    1
    """

    title: str
    width: float = 0.0
    height: float = 0.0
    outlines: list[StyledOutline] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)

    def line(self, steps: Steps, **look: Any) -> None:
        """Paint a line or an area on top of the drawing so far, styled as a `StyledOutline`."""
        self.outlines.append(StyledOutline(steps, **look))

    def box(self, corners: Corners, radius: float = 0, **look: Any) -> None:
        """Paint a rectangle, as `line` does."""
        self.outlines.append(rectangle(corners, radius, **look))

    def text(self, x: float, y: float, text: str, size: float = 12, **look: Any) -> None:
        """Write a line of text, with the look of a `Text`."""
        self.texts.append(Text(x, y, text, size, **look))

    def svg(self) -> str:
        """The text of an SVG file; tones are light, or dark for readers who prefer that.

        >>> Scene("empty", width=20, height=10).svg().splitlines()[1]
        '<title>empty</title>'
        """
        width, height = f"{self.width:.0f}", f"{self.height:.0f}"
        opening = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" font-family="{escape(FONT)}">'
        )
        body = [_outline(outline) for outline in self.outlines]
        body += [_text(text) for text in self.texts]
        if any([' class="' in line for line in body]):
            body.insert(0, _dark())
        return "\n".join([opening, f"<title>{escape(self.title)}</title>", *body, "</svg>"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file in the format of its ending: .svg, or .png (with matplotlib)."""
        ending = Path(path).suffix.lower()
        if ending == ".svg":
            write_atomically(path, f"{self.svg()}\n".encode())
        elif ending == ".png":
            loaded = matplotlib_for("PNG files are drawn with", "; SVG files need nothing")
            write_atomically(path, lambda file: _write_png(file, self, loaded))
        else:
            raise ValueError(
                f"{os.fspath(path)!r} ends in {ending!r}; pictures are written as .svg or .png: "
                f"for example {str(Path(path).with_suffix('.svg'))!r}"
            )


def path_data(steps: Iterable[Step]) -> str:
    """Steps as the path data of SVG.

    >>> path_data([("M", ((0, 0),)), ("L", ((4, 3),)), ("Z", ())])
    'M0.0 0.0 L4.0 3.0 Z'
    """
    return " ".join(
        [letter + " ".join([f"{x:.1f} {y:.1f}" for x, y in points]) for letter, points in steps]
    )


def _dark() -> str:
    """The style sheet with the dark colours; the attributes of elements have the light ones."""
    rules = [
        f".raffia-{name}{{fill:{tone}}}.raffia-{name}-line{{stroke:{tone}}}"
        for name, (_, tone) in TONES.items()
    ]
    return f"<style>@media (prefers-color-scheme:dark){{{''.join(rules)}}}</style>"


def _outline(outline: StyledOutline) -> str:
    kind, markup = "path", f'd="{path_data(outline.steps)}"'
    if outline.rectangle:
        x, y, width, height, radius = outline.rectangle
        kind, markup = "rect", f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        markup += f' rx="{radius:g}"' if radius else ""
    markup += f' fill="{light(outline.fill)}"'
    if outline.stroke != "none":
        markup += f' stroke="{light(outline.stroke)}" stroke-width="{outline.width:.1f}"'
    markup += f' stroke-dasharray="{outline.dashes}"' if outline.dashes else ""
    classes = [f"raffia-{outline.fill}"] if outline.fill in TONES else []
    classes += [f"raffia-{outline.stroke}-line"] if outline.stroke in TONES else []
    markup += f' class="{" ".join(classes)}"' if classes else ""
    tip = f"><title>{escape(outline.tip)}</title></{kind}>" if outline.tip else "/>"
    return f"<{kind} {markup}{tip}"


def _text(text: Text) -> str:
    markup = f'<text x="{text.x:.1f}" y="{text.y:.1f}" font-size="{text.size:g}"'
    markup += f' text-anchor="{text.anchor}"' if text.anchor != "start" else ""
    markup += ' font-weight="600"' if text.bold else ""
    markup += f' fill="{light(text.tone)}"'
    markup += f' fill-opacity="{text.opacity:g}"' if text.opacity != 1 else ""
    markup += f' class="raffia-{text.tone}"' if text.tone in TONES else ""
    # the mouse reaches through to what the text stands on, which has more to say
    return f'{markup} pointer-events="none" xml:space="preserve">{escape(text.text)}</text>'


def _write_png(file: IO[bytes], scene: Scene, matplotlib: Any) -> None:
    """Write a drawing into an open file as PNG, with the package that draws it."""
    width, height = scene.width, scene.height
    scale = min(_SCALE, _LONGEST_SIDE / max(width, height))
    size = (width / 72, height / 72)  # inches, a pixel of the drawing being a point
    figure = matplotlib.figure.Figure(size, dpi=72 * scale)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    for outline in scene.outlines:
        axes.add_patch(_patch(matplotlib, outline))
    for text in scene.texts:
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


def matplotlib_for(what: str, instead: str = "") -> ModuleType:
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
