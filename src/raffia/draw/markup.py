"""HTML out of functions: text is escaped unless it was made here."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

_EMPTY = frozenset({"img", "source", "br", "hr", "meta"})  # have no end tag


class Html(str):
    """Text that is HTML already.

    >>> Html("<b>").startswith("<")
    True
    """

    __slots__ = ()


def el(kind: str, *children: str, **attributes: str) -> Html:
    """An element. `kind` may name classes, as in "td.num"; an underscore in an attribute is a dash.

    >>> el("td.num", "1 < 2", title='"one"')
    '<td class="num" title="&quot;one&quot;">1 &lt; 2</td>'
    """
    name, *classes = kind.split(".")
    given = {"class": " ".join(classes)} if classes else {}
    given |= {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    says = "".join([f' {key}="{escape(value)}"' for key, value in given.items()])
    return Html(f"<{name}{says}>" + ("" if name in _EMPTY else f"{join(children)}</{name}>"))


def join(children: Iterable[str], between: str = "") -> Html:
    """Several pieces after one another.

    >>> join([el("b", "x"), "<"])
    '<b>x</b>&lt;'
    """
    pieces = [child if isinstance(child, Html) else escape(child) for child in children]
    return Html(between.join(pieces))
