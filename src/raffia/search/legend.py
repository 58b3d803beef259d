"""The legend of a tree's picture: what its signs mean, in as many rows as it takes."""

from collections.abc import Callable
from dataclasses import dataclass

from raffia.draw.scene import Scene, polyline, text_width
from raffia.search.colours import QScale

_SIZE, _ROW, _BETWEEN = 11, 26, 30  # of the text; of rows and items, in pixels
_SAMPLE = 36  # length of a sample of a line


@dataclass
class Legend:
    """Draws its items from a left edge on, and begins a new row at the right one."""

    drawing: Scene
    left: float
    right: float
    y: float  # middle of the row
    x: float = -1.0

    def words(self, text: str) -> None:
        """Text only."""
        self._text(self._begin(text_width(text, _SIZE)), text)

    def widths(self, thin: float, thick: float, most: int) -> None:
        """Lines from thin to thick, as wide as the visits are many."""
        text = f"1 to {most} visits" if most > 1 else "1 visit"
        x = self._begin(_SAMPLE + 8 + text_width(text, _SIZE))
        steps = polyline(
            (x, self.y - thin / 2),
            (x + _SAMPLE, self.y - thick / 2),
            (x + _SAMPLE, self.y + thick / 2),
            (x, self.y + thin / 2),
            closed=True,
        )
        self.drawing.line(steps, fill=QScale(0, 0).colour(0))
        self._text(x + _SAMPLE + 8, text)

    def colours(self, scale: QScale, write: Callable[[float], str]) -> None:
        """The colours of Q, between their least and greatest number."""
        low, high = f"Q {write(scale.low)}", write(scale.high)
        if scale.low == scale.high:
            return self.words(f"Q {low[2:]} everywhere")
        starts = text_width(low, _SIZE) + 6
        x = self._begin(starts + 2 * _SAMPLE + 6 + text_width(high, _SIZE))
        self._text(x, low)
        x += starts
        num = 24  # no gradient of SVG: those have names, which clash in a page of several pictures
        step = 2 * _SAMPLE / num
        for i in range(num):
            q = scale.low + (scale.high - scale.low) * i / (num - 1)
            # each reaches under the next one, so that no seam shows
            width = 2 * step if i < num - 1 else step
            self.drawing.box((x + i * step, self.y - 5, width, 10), fill=scale.colour(q))
        self._text(x + 2 * _SAMPLE + 6, high)

    def best_path(self, width: float, rim: float) -> None:
        """A line with a rim."""
        text = "most visited path"
        x = self._begin(_SAMPLE + 8 + text_width(text, _SIZE))
        path = polyline((x, self.y), (x + _SAMPLE, self.y))
        self.drawing.line(path, stroke="ink", width=width + rim)
        self.drawing.line(path, stroke=QScale(0, 0).colour(0), width=width)
        self._text(x + _SAMPLE + 8, text)

    def _begin(self, width: float) -> float:
        """Room for an item of this width: where it starts."""
        if self.x < 0:
            self.x = self.left
        elif self.x + width > self.right:
            self.x, self.y = self.left, self.y + _ROW
        start, self.x = self.x, self.x + width + _BETWEEN
        return start

    def _text(self, x: float, text: str) -> None:
        self.drawing.text(x, self.y + 4, text, _SIZE, tone="faint")
