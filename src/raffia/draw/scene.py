"""A drawing made of outlines and lines of text, and its two forms: SVG, and PNG."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from raffia.draw.png import matplotlib_for, write_png
from raffia.draw.shapes import TONES, Corners, Step, Steps, StyledOutline, Text, light, rectangle
from raffia.files import write_atomically

FONT = 'ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace'


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
        """Paint a line or an area on top of what is there, with the look of an `StyledOutline`."""
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
        """Write a file, whose ending says what: .svg, or .png (with matplotlib)."""
        ending = Path(path).suffix.lower()
        if ending == ".svg":
            write_atomically(path, f"{self.svg()}\n".encode())
        elif ending == ".png":
            loaded = matplotlib_for("PNG files are drawn with", "; SVG files need nothing")
            size, marks = (self.width, self.height), (self.outlines, self.texts)
            write_atomically(path, lambda file: write_png(file, *size, *marks, loaded))
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
    """Attributes say the light colours; where a style sheet counts, it says the dark ones."""
    rules = [
        f".raffia-{name}{{fill:{tone}}}.raffia-{name}-line{{stroke:{tone}}}"
        for name, (_, tone) in TONES.items()
    ]
    return f"<style>@media (prefers-color-scheme:dark){{{''.join(rules)}}}</style>"


def _outline(outline: StyledOutline) -> str:
    kind, says = "path", f'd="{path_data(outline.steps)}"'
    if outline.rectangle:
        x, y, width, height, radius = outline.rectangle
        kind, says = "rect", f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        says += f' rx="{radius:g}"' if radius else ""
    says += f' fill="{light(outline.fill)}"'
    if outline.stroke != "none":
        says += f' stroke="{light(outline.stroke)}" stroke-width="{outline.width:.1f}"'
    says += f' stroke-dasharray="{outline.dashes}"' if outline.dashes else ""
    classes = [f"raffia-{outline.fill}"] if outline.fill in TONES else []
    classes += [f"raffia-{outline.stroke}-line"] if outline.stroke in TONES else []
    says += f' class="{" ".join(classes)}"' if classes else ""
    tip = f"><title>{escape(outline.tip)}</title></{kind}>" if outline.tip else "/>"
    return f"<{kind} {says}{tip}"


def _text(text: Text) -> str:
    says = f'<text x="{text.x:.1f}" y="{text.y:.1f}" font-size="{text.size:g}"'
    says += f' text-anchor="{text.anchor}"' if text.anchor != "start" else ""
    says += ' font-weight="600"' if text.bold else ""
    says += f' fill="{light(text.tone)}"'
    says += f' fill-opacity="{text.opacity:g}"' if text.opacity != 1 else ""
    says += f' class="raffia-{text.tone}"' if text.tone in TONES else ""
    # the mouse reaches through to what the text stands on, which has more to say
    return f'{says} pointer-events="none" xml:space="preserve">{escape(text.text)}</text>'
