"""Cleaning of SVG files: harmful parts are removed, the picture is unchanged."""

import pytest

from raffia.draw.markup import clean_svg

SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 300 90" width="300" height="90">'
    "<title>root 0: value +9.50</title>"
    "<style>@media (prefers-color-scheme:dark){.raffia-ink{fill:#f1f5f9}}</style>"
    '<path d="M40 45 C100 45 120 20 200 20" fill="none" stroke="#2563eb" stroke-width="6">'
    "<title>right: 18 visits</title></path>"
    '<text x="210" y="24" font-size="12" fill="#0f172a" class="raffia-ink">right 72 %</text></svg>'
)

HEAD = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'


def test_a_harmless_drawing_is_unchanged():
    assert clean_svg(SVG) == SVG.replace(' xmlns="http://www.w3.org/2000/svg"', "")


@pytest.mark.parametrize(
    "inside",
    [
        "<script>x()</script>",
        '<g onclick="x()"/>',
        '<a href="javascript:x()"/>',
        '<image xlink:href="http://x.org/x.png"/>',
        '<use xlink:href="http://x.org/x.svg#a"/>',
        '<foreignObject><body xmlns="http://www.w3.org/1999/xhtml"/></foreignObject>',
        '<path fill="url(http://x.org/#a)"/>',
        '<path style="background:url(http://x.org)"/>',
        "<style>@import 'http://x.org'</style>",
        "<style>body{display:none}</style>",
        "<style>@media (prefers-color-scheme:dark){.raffia-ink{fill:#fff}body{x:y}}</style>",
        '<script xmlns="http://www.w3.org/1999/xhtml">x()</script>',
        "<animate attributeName='href' to='javascript:x()'/>",
        '<g id="body"/>',
    ],
)
def test_harmful_parts_are_removed(inside):
    found = clean_svg(f"{HEAD}{inside}<text>kept</text></svg>")
    assert found in (
        "<svg><text>kept</text></svg>",
        "<svg><g></g><text>kept</text></svg>",
        "<svg><path></path><text>kept</text></svg>",
    )


def test_text_stays_escaped():
    found = clean_svg(f'{HEAD}<text class="&quot;&gt;">&lt;script&gt; &amp;</text></svg>')
    assert found == '<svg><text class="&quot;&gt;">&lt;script&gt; &amp;</text></svg>'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not XML"),
        ("<svg>", "not XML"),
        ("<html></html>", "outermost element is 'html'"),
        ('<!DOCTYPE svg [<!ENTITY a "b">]><svg>&a;</svg>', "document type or entities"),
        ("<svg>" + "<g>" * 60 + "</g>" * 60 + "</svg>", "more than 50 levels deep"),
    ],
)
def test_other_texts_are_refused(text, why):
    with pytest.raises(ValueError, match=why):
        clean_svg(text)
