"""How a page writes numbers, texts and tables: 12,345 and 1.2 M, 4 min 12 s."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence

from raffia.draw.markup import Html, el, join

NONE = "–"
MINUS = "−"


def count(value: float) -> str:
    """A whole number with separators, from ten million on in millions.

    >>> count(12345), count(12_345_678), count(float("nan"))
    ('12,345', '12.3 M', '–')
    """
    if math.isnan(value):
        return NONE
    if abs(value) >= 1e15:
        return f"{value:.3g}"
    if abs(value) >= 1e10:
        return f"{value / 1e9:,.1f} G"
    return f"{value / 1e6:,.1f} M" if abs(value) >= 1e7 else f"{value:,.0f}"


def figure(value: float) -> str:
    """A measured number with about four digits.

    >>> [figure(x) for x in (12345.6, 475.26, -12.3456, 0.25, 0.00012, 0, float("nan"))]
    ['12,346', '475.3', '−12.35', '0.25', '0.00012', '0', '–']
    """
    if math.isnan(value):
        return NONE
    size = abs(value)
    if size >= 1e7:
        text = count(value)
    elif size >= 1000 or value == int(value):
        text = f"{value:,.0f}"
    elif size >= 100:
        text = f"{value:.1f}"
    else:
        text = f"{value:.2f}".rstrip("0").rstrip(".") if size >= 1 else f"{value:.3g}"
    return text.replace("-", MINUS, 1) if text.startswith("-") else text


def column_format(values: Iterable[float]) -> Callable[[float], str]:
    """A format for the numbers of one column: all with as many decimals as the largest one has.

    >>> write = column_format([-1.08, -0.996, 22.5])
    >>> write(-1.08), write(-0.996), column_format([475.26])(9.0), column_format([0.01234])(0.01234)
    ('−1.08', '−1.00', '9.0', '0.0123')
    """
    largest = max(map(abs, values), default=0.0)
    decimals = next((n for n, least in enumerate((1000, 100, 1, 0.1)) if largest >= least), 4)

    def write(value: float) -> str:
        return NONE if math.isnan(value) else f"{value:,.{decimals}f}".replace("-", MINUS)

    return write


def percent(fraction: float, decimals: int = 1) -> str:
    """A fraction in percent.

    >>> percent(0.25), percent(0.251, 0), percent(math.nan)
    ('25.0 %', '25 %', '–')
    """
    return NONE if math.isnan(fraction) else f"{100 * fraction:.{decimals}f} %"


def between(low: float, high: float, write: Callable[[float], str] = figure) -> str:
    """An interval by its ends.

    >>> between(1.0, 2.5), between(math.nan, 2.5)
    ('1 to 2.5', '–')
    """
    return NONE if math.isnan(low + high) else f"{write(low)} to {write(high)}"


def duration(seconds: float) -> str:
    """A stretch of time in its two largest units.

    >>> [duration(x) for x in (0.25, 42.4, 252, 3600 * 26.5, float("nan"))]
    ['0.25 s', '42 s', '4 min 12 s', '1 d 2 h', '–']
    """
    if math.isnan(seconds):
        return NONE
    if seconds < 10:
        return f"{figure(round(seconds, 2))} s"
    rest = round(seconds)
    parts = []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        amount, rest = divmod(rest, size)
        parts.append((amount, unit))
    first = next(i for i, (amount, _) in enumerate(parts) if amount)
    shown = [f"{amount} {unit}" for amount, unit in parts[first : first + 2] if amount]
    return " ".join(shown)


def size(num_bytes: float) -> str:
    """Bytes in the unit that suits.

    >>> size(812), size(45_600), size(3_450_000)
    ('812 B', '45.6 kB', '3.5 MB')
    """
    for unit, least in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= least:
            return f"{num_bytes / least:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def decoding_label(decoding: str) -> str:
    """The name of a decoding, for people.

    >>> tuple(map(decoding_label, ("decode", "adv_weight=0", "adv_weight=2", "mine")))
    ('as set', 'policy alone', 'advantage × 2', 'mine')
    """
    if decoding == "decode":
        return "as set"
    name, _, weight = decoding.partition("=")
    if name != "adv_weight":
        return decoding
    return f"advantage × {weight}" if weight != "0" else "policy alone"


def shown_token(token: str) -> str:
    """A token with what it breaks or blanks made visible.

    >>> shown_token("a\\n"), shown_token("\\t")
    ('a↵', '⇥')
    """
    return token.replace("\r", "").replace("\n", "↵").replace("\t", "⇥")


def time_unit(longest: float) -> tuple[float, str]:
    """The unit of a time axis of this length in seconds: its number of seconds and its symbol.

    >>> time_unit(90), time_unit(900), time_unit(9000)
    ((1.0, 's'), (60.0, 'min'), (3600.0, 'h'))
    """
    if longest >= 7200:
        return 3600.0, "h"
    return (60.0, "min") if longest >= 180 else (1.0, "s")


def ticks(largest: float) -> Callable[[float], str]:
    """A format for the marks of an axis with such a largest mark: all in one unit.

    >>> write = ticks(25_000)
    >>> write(5000.0), write(25000.0), ticks(2.5e6)(5e5), ticks(2000)(1500.0), ticks(1)(-0.25)
    ('5 k', '25 k', '0.5 M', '1,500', '−0.25')
    """

    def write(value: float) -> str:
        value = 0.0 if abs(value) < 1e-9 * largest else value
        for unit, least, limit in (("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e3, 1e4)):
            if limit <= largest < 1e15:
                text = f"{value / least:.6g} {unit}" if value else "0"
                return text.replace("-", MINUS)
        thousands = 1000 <= abs(value) < 1e15
        text = f"{value:,.0f}" if thousands else f"{value:.6g}"
        return text.replace("-", MINUS)

    return write


def toned(tone: str, *text: str) -> Html:
    """A text behind a square of its tone.

    >>> toned("c0", "wordle")
    '<i class="chip" style="background:var(--c0)"></i>wordle'
    """
    return join([el("i.chip", style=f"background:var(--{tone})"), *text])


def legend_chip(kind: str, tone: str, text: str) -> Html:
    """An entry of a legend: a mark of this kind in the tone, and what it stands for.

    >>> print(legend_chip("line", "c0", "mean"))
    <span><i class="line" style="border-color:var(--c0)"></i>mean</span>
    """
    what = "background" if kind in ("area", "dot", "band") else "border-color"
    return el("span", el(f"i.{kind}", style=f"{what}:var(--{tone})"), text)


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    numeric: Iterable[int] = (),  # columns that hold numbers
    caption: str = "",
    without: Collection[str] = (),  # heads of columns that are left out
) -> Html:
    """An HTML table that scrolls sideways if it is too wide.

    >>> table(["a"], [["1"]], numeric=[0]).count("num")
    2
    >>> table(["run", "seed"], [["x", "3"]], without=["run"]).count("<td")
    1
    """
    right = set(numeric)
    hidden = {i for i, name in enumerate(heads) if name in without}

    def cells(kind: str, texts: Sequence[str]) -> Html:
        kinds = [f"{kind}.num" if i in right else kind for i in range(len(texts))]
        return el("tr", *[el(kinds[i], text) for i, text in enumerate(texts) if i not in hidden])

    captions = [el("caption", caption)] if caption else []
    body = el("tbody", *[cells("td", row) for row in rows])
    top = [el("thead", cells("th", heads))] if heads else []
    return el("div.wide", el("table", *captions, *top, body))
