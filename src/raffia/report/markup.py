"""Tables of a page, and the tones that tell its configurations apart."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from raffia.draw.markup import Html, el, join


def toned(tone: str, *text: str) -> Html:
    """A text behind a square of its tone.

    >>> toned("c0", "wordle")
    '<i class="chip" style="background:var(--c0)"></i>wordle'
    """
    return join([el("i.chip", style=f"background:var(--{tone})"), *text])


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    numeric: Iterable[int] = (),  # columns that hold numbers
    caption: str = "",
    without: Collection[str] = (),  # heads of columns that are left out
) -> Html:
    """A table that scrolls sideways where it is too wide.

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
