"""HTML out of functions: text is escaped unless it was made here; and SVG made harmless."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from html import escape
from xml.etree import ElementTree

_EMPTY = frozenset({"img", "source", "br", "hr", "meta"})  # have no end tag


class Html(str):
    """Text that is HTML already.

    >>> Html("<b>").startswith("<")
    True
    """

    __slots__ = ()


def el(kind: str, *children: str, **attributes: str) -> Html:
    """An HTML element. `kind` may name classes ("td.num"); an underscore in an attribute is a dash.

    >>> el("td.num", "1 < 2", title='"one"')
    '<td class="num" title="&quot;one&quot;">1 &lt; 2</td>'
    """
    name, *classes = kind.split(".")
    given = {"class": " ".join(classes)} if classes else {}
    given |= {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    end = "" if name in _EMPTY else f"{join(children)}</{name}>"
    return Html(f"<{name}{_attributes(given)}>{end}")


def _attributes(given: Mapping[str, str]) -> str:
    return "".join([f' {key}="{escape(value)}"' for key, value in given.items()])


def join(children: Iterable[str], between: str = "") -> Html:
    """Several pieces of HTML in a row.

    >>> join([el("b", "x"), "<"])
    '<b>x</b>&lt;'
    """
    pieces = [child if isinstance(child, Html) else escape(child) for child in children]
    return Html(between.join(pieces))


_SVG = "{http://www.w3.org/2000/svg}"
_ELEMENTS = frozenset(
    "svg g path rect circle ellipse line polyline polygon text tspan title desc style".split()
)
_ATTRIBUTES = frozenset(
    "viewBox width height x y x1 y1 x2 y2 cx cy r rx ry d points dx dy transform fill stroke "
    "fill-opacity stroke-opacity opacity stroke-width stroke-dasharray stroke-linecap "
    "stroke-linejoin fill-rule font-family font-size font-weight font-style text-anchor "
    "dominant-baseline pointer-events class role".split()
)
# The one style sheet that passes: other tones for dark pages, of classes with our own prefix.
_RULE = r"\.raffia-[a-z-]+\{(?:fill|stroke):#[0-9a-fA-F]{3,8}\}"
_STYLE = re.compile(rf"@media \(prefers-color-scheme: ?dark\)\{{(?:{_RULE})*\}}")
_MOST_DEPTH = 50


def clean_svg(text: str) -> Html:
    """The harmless parts of an SVG file, for embedding in a page; ValueError if it is not SVG.

    >>> clean_svg('<svg xmlns="http://www.w3.org/2000/svg" onload="x()"><script>y()</script></svg>')
    '<svg></svg>'
    """
    if "<!DOCTYPE" in text or "<!ENTITY" in text:  # entities can grow without bound
        raise ValueError("it declares a document type or entities")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(f"it is not XML: {error}") from None
    if root.tag not in (f"{_SVG}svg", "svg"):
        raise ValueError(f"its outermost element is {root.tag!r}, not svg")
    return Html(_written(root, 0))


def _written(element: ElementTree.Element, depth: int) -> str:
    name = str(element.tag).removeprefix(_SVG)
    if name not in _ELEMENTS:
        return ""
    if depth > _MOST_DEPTH:
        raise ValueError(f"its elements are nested more than {_MOST_DEPTH} levels deep")
    if name == "style":
        style = (element.text or "").strip()
        return f"<style>{style}</style>" if _STYLE.fullmatch(style) else ""
    harmless = {
        key: value
        for key, value in element.attrib.items()
        if key in _ATTRIBUTES and "url(" not in value.lower()
    }
    inside = escape(element.text or "")
    for child in element:
        inside += _written(child, depth + 1) + escape(child.tail or "")
    return f"<{name}{_attributes(harmless)}>{inside}</{name}>"
