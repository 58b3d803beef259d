"""Tables of a page."""

from __future__ import annotations

from collections.abc import Iterable

from raffia.draw.markup import Html, el


def table(
    heads: Iterable[str],
    rows: Iterable[Iterable[str]],
    numeric: Iterable[int] = (),  # columns that hold numbers
    caption: str = "",
) -> Html:
    """A table that scrolls sideways where it is too wide.

    >>> table(["a"], [["1"]], numeric=[0]).count("num")
    2
    """
    right = set(numeric)

    def cells(kind: str, texts: Iterable[str]) -> Html:
        kinds = [f"{kind}.num" if i in right else kind for i in range(1000)]
        return el("tr", *[el(k, text) for k, text in zip(kinds, texts, strict=False)])

    captions = [el("caption", caption)] if caption else []
    body = el("tbody", *[cells("td", row) for row in rows])
    head = cells("th", heads)
    top = [el("thead", head)] if "<th" in head else []
    return el("div.wide", el("table", *captions, *top, body))
