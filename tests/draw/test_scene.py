"""Scenes as SVG: their elements, the width of texts, and colours for dark mode."""

from xml.etree import ElementTree

import pytest

from raffia.draw import Scene
from raffia.draw.markup import clean_svg
from raffia.draw.scene import bent, polyline, text_width

SVG = "{http://www.w3.org/2000/svg}"


def elements(scene):
    return [e for e in ElementTree.fromstring(scene.svg()) if e.tag not in (SVG + "title",)]


def test_wide_characters_have_two_columns():
    assert text_width("日本") == text_width("abcd") == 2 * text_width("abcd", size=6)


def test_boxes_lines_and_texts():
    scene = Scene("all", 60, 40)
    scene.box((1, 2, 30, 20), 50, fill="#112233", tip="<tip>")
    scene.line((*polyline((0, 0), (9, 0)), bent((9, 0), (19, 8))), stroke="#000000", dashes="4 3")
    scene.text(3, 4, "a < b", anchor="end", tone="#445566", opacity=0.5)
    box, line, text = elements(scene)
    assert (box.get("rx"), box.find(SVG + "title").text) == ("10", "<tip>")
    assert line.get("d") == "M0.0 0.0 L9.0 0.0 C14.0 0.0 14.0 8.0 19.0 8.0"
    assert (line.get("fill"), line.get("stroke-dasharray")) == ("none", "4 3")
    assert (text.text, text.get("fill"), text.get("fill-opacity")) == ("a < b", "#445566", "0.5")


def test_only_tones_need_a_style_sheet():
    scene = Scene("plain", 9, 9)
    scene.box((0, 0, 9, 9), fill="#ffffff")
    assert "<style" not in scene.svg()
    scene.text(0, 9, "i")
    assert ".raffia-ink{fill:#f1f5f9}" in scene.svg()


def test_clean_svg_leaves_a_scene_unchanged():
    scene = Scene("kept", 60, 40)
    scene.box((1, 2, 30, 20), 4, fill="box", stroke="ink", dashes="4 3", tip="tip")
    scene.line(polyline((0, 0), (9, 0)), stroke="rim", width=2)
    scene.text(3, 4, "text", anchor="middle", bold=True, opacity=0.5)

    def parts(svg):  # without the name space and XML's own attribute
        root = ElementTree.fromstring(svg)
        plain = [{k: v for k, v in e.attrib.items() if k[0] != "{"} for e in root.iter()]
        return [
            (e.tag.removeprefix(SVG), e.text, a) for e, a in zip(root.iter(), plain, strict=True)
        ]

    found, wanted = parts(clean_svg(scene.svg())), parts(scene.svg())
    assert [(tag, text) for tag, text, _ in found] == [(tag, text) for tag, text, _ in wanted]
    assert [look for _, _, look in found] == [look for _, _, look in wanted]


def test_a_png_has_twice_the_size(tmp_path):
    pytest.importorskip("matplotlib")
    scene = Scene("small", 30, 20)
    scene.box((0, 0, 30, 20), 4, fill="card", stroke="ink", dashes="4 3")
    scene.text(3, 14, "$x$", opacity=0.5)
    scene.save(tmp_path / "small.png")
    head = (tmp_path / "small.png").read_bytes()[:24]
    assert [int.from_bytes(head[i : i + 4]) for i in (16, 20)] == [60, 40]
