"""Panels as SVG, drawn by matplotlib."""

from __future__ import annotations

import math
import re
from html import escape
from io import StringIO
from typing import Any

from raffia.draw.markup import Html, el
from raffia.draw.scene import matplotlib_for
from raffia.report.markup import ticks
from raffia.report.panel import SERIES, Line, Panel

_SIZE, _WIDE = (470, 250), (970, 270)  # pixels of the page
_MARGINS = (66, 40, 6, 7)  # left, below, right and above the axes, in pixels
_TONES = ("ink", "muted", "grid", "paper", *SERIES)
# Colours that stand for tones while matplotlib draws; the page's style sheet sets the real ones.
_STAND_INS = {tone: f"#0102{i + 16:02x}" for i, tone in enumerate(_TONES)}
_SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.image_inline": True,
    "font.family": ["DejaVu Sans"],  # comes with matplotlib; room is measured by it
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _STAND_INS["grid"],
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.labelcolor": _STAND_INS["muted"],
    "axes.labelsize": 10.5,
    "axes.xmargin": 0.015,
    "axes.ymargin": 0.08,
    "axes.unicode_minus": True,
    "text.parse_math": False,
    "grid.color": _STAND_INS["grid"],
    "grid.linewidth": 0.6,
    "xtick.color": _STAND_INS["grid"],
    "ytick.color": _STAND_INS["grid"],
    "xtick.labelcolor": _STAND_INS["muted"],
    "ytick.labelcolor": _STAND_INS["muted"],
    "xtick.major.size": 3.0,
    "ytick.major.size": 0.0,
    "xtick.minor.size": 0.0,
    "ytick.minor.size": 0.0,
    "path.simplify": True,
    "path.simplify_threshold": 0.2,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
}


def draw(panel: Panel, name: str) -> str:
    """The SVG element of a panel, without a name that another figure of the page has.

    name: of the figure, letters, digits and dashes. The same panel gives the same bytes.

    >>> from raffia.report.panel import Curve
    >>> svg = draw(Panel("loss", "updates", "nats", (Line(Curve([0, 1], [2, 1])),)), "loss")
    >>> svg.startswith("<svg"), "var(--c0)" in svg
    (True, True)
    """
    matplotlib = matplotlib_for("the figures of a report need")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # without a user's own file
        matplotlib.rcParams.update({**_SETTINGS, "svg.hashsalt": name})
        width, height = _WIDE if panel.wide else _SIZE
        figure = matplotlib.figure.Figure((width / 72, height / 72), facecolor="none")
        # The same room around all panels, so that axes below one another begin at one position; a
        # layout that measures each text takes longer than all the rest.
        left, below, right, above = _MARGINS
        across, up = (width - left - right) / width, (height - below - above) / height
        axes = figure.add_axes((left / width, below / height, across, up))
        _fill(axes, panel)
        _label(matplotlib, axes, panel)
        axes.xaxis.set_label_coords(0.5, -24 / (height * up))
        axes.yaxis.set_label_coords(-52 / (width * across), 0.5)
        return _page_svg(_written(matplotlib, figure), panel.title, name)


def figure_of(panel: Panel, name: str) -> Html:
    """A panel, drawn, below its title."""
    caption = el("figcaption", el("b", panel.title), " (log scale)" if panel.log else "")
    kind = "figure.full" if panel.wide else "figure"
    return el(kind, caption, Html(draw(panel, name)))


def _fill(axes: Any, panel: Panel) -> None:
    if panel.areas:
        axes.stackplot(
            panel.area_x,
            *[area.heights for area in panel.areas],
            colors=[_STAND_INS[area.tone] for area in panel.areas],
            alpha=0.85,
            linewidth=0,
        )
        axes.margins(x=0, y=0)
    for x in panel.marks:
        axes.axvline(x, color=_STAND_INS["muted"], linewidth=1, linestyle=(0, (2, 2)))
    for level in panel.levels:
        axes.axhline(level, color=_STAND_INS["ink"], linewidth=1, linestyle=(0, (6, 3)))
    for line in panel.points:
        axes.plot(
            line.curve.x,
            line.curve.y,
            linestyle="none",
            marker="o",
            markersize=2.6,
            markeredgewidth=0,
            color=_STAND_INS[line.tone],
            alpha=line.opacity,
        )
    for line in panel.lines:
        _draw_line(axes, line)


def _draw_line(axes: Any, line: Line) -> None:
    curve, colour = line.curve, _STAND_INS[line.tone]
    if curve.low:
        axes.fill_between(
            curve.x, curve.low, curve.high, color=colour, alpha=line.band, linewidth=0
        )
    lonely = sum(not math.isnan(y) for y in curve.y) == 1  # a line of one point shows nothing
    axes.plot(
        curve.x,
        curve.y,
        color=colour,
        linewidth=line.width,
        alpha=line.opacity,
        marker="o" if line.dots or lonely else None,
        markersize=4.2 if lonely else 3.6,
        markeredgewidth=0,
    )


def _label(matplotlib: Any, axes: Any, panel: Panel) -> None:
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    if panel.log:
        axes.set_yscale("log")
    if panel.y_limits:
        axes.set_ylim(*panel.y_limits)
    elif panel.from_zero or _constant(panel):
        axes.set_ylim(bottom=0.0)
    ticker = matplotlib.ticker
    steps = [1, 2, 2.5, 5, 10]  # round numbers only
    most = 10 if panel.wide else 7
    axes.xaxis.set_major_locator(ticker.MaxNLocator(most, steps=steps, integer=panel.whole_x))
    if not panel.log:
        axes.yaxis.set_major_locator(ticker.MaxNLocator(6, steps=steps))
    for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        write = ticks(max(map(abs, limits)))
        if panel.log and axis is axes.yaxis:
            axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: ticks(value)(value)))
            axis.set_minor_formatter(ticker.NullFormatter())
            if math.log10(limits[1] / limits[0]) < 1.5:  # one mark alone tells little
                axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        else:
            axis.set_major_formatter(ticker.FuncFormatter(lambda value, _, w=write: w(value)))


def _constant(panel: Panel) -> bool:
    """Whether all lines are at one height above 0: an axis around it would show only rounding."""
    heights = {y for line in panel.lines for y in line.curve.y if not math.isnan(y)}
    return len(heights) == 1 and min(heights) > 0 and not panel.points


def _written(matplotlib: Any, figure: Any) -> str:
    canvas = matplotlib.backends.backend_svg.FigureCanvasSVG(figure)
    out = StringIO()
    canvas.print_svg(out, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return out.getvalue()


def _page_svg(text: str, title: str, name: str) -> str:
    """matplotlib's file as an element of our page: its own names, tones, and the page's font."""
    svg = text[text.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s*<(title|style)\b.*?</\1>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (?:d|x|y|transform)="[^"]*"', _rounded, svg)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    used = set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", svg))
    svg = re.sub(r' id="([^"]*)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", svg)
    for tone, colour in _STAND_INS.items():
        svg = svg.replace(colour, f"var(--{tone})")
    opening = re.match(r"<svg[^>]*>", svg)
    assert opening is not None
    box = re.search(r'viewBox="([^"]*)"', opening[0])
    assert box is not None
    head = (
        f'<svg class="figure" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="{box[1]}" '
        f'role="img" aria-label="{escape(title)}">'
    )
    body = svg[opening.end() :]
    return head + re.sub(r"\s*\n\s*", "\n", body).strip()


def _rounded(attribute: re.Match[str]) -> str:
    """Hundredths of a pixel are fine enough, and make half as long a page."""
    return re.sub(r"(\.\d\d)\d+", r"\1", attribute[0])
