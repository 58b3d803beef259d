"""The picture of a searched tree: its texts, and that nothing overlaps."""

import math
import re
import struct
import xml.etree.ElementTree as ElementTree
from itertools import combinations

import pytest
import torch

from raffia.search.picture import QScale, drawn

from .made_trees import made_tree, random_tree

SVG = "{http://www.w3.org/2000/svg}"
SMALL = [(0, 1, 6, 0.5, 0.25), (0, 3, 3, -0.25, 0.0), (1, 0, 4, 0.125, 0.0), (3, 1, 2, 1.0, 0.0)]
NAMES = ["left", "right", "jump", "wait"]


def small_tree(**entries):
    return made_tree(SMALL, num_actions=4, **entries)


def picture(tree, action_names=None, **options):
    return drawn(tree.to_graph(action_names=action_names), **options)


def parsed(svg):
    root = ElementTree.fromstring(svg)
    assert root.tag == SVG + "svg"
    return root


def texts_of(svg):
    return [text.text for text in parsed(svg).iter(SVG + "text")]


def points_on(outline):
    """Points along an outline, no more than about 3 pixels apart."""
    found, here = [], None
    for _, points in outline.steps:
        if here is None or not points:
            here = points[0] if points else here
            continue
        curve = [here, *points]
        length = sum([math.dist(a, b) for a, b in zip(curve, curve[1:], strict=False)])
        for i in range(int(length / 3) + 2):
            found.append(bezier(curve, i / (int(length / 3) + 1)))
        here = points[-1]
    return found


def bezier(points, t):
    while len(points) > 1:
        points = [
            tuple([a + (b - a) * t for a, b in zip(p, q, strict=True)])
            for p, q in zip(points, points[1:], strict=False)
        ]
    return points[0]


def bounds(outline):
    xs, ys = zip(*[point for _, points in outline.steps for point in points], strict=True)
    return min(xs), min(ys), max(xs), max(ys)


def overlap(a, b, by=0.0):
    """Whether two rectangles overlap by more than `by` pixels in both directions."""
    return (
        min(a[2], b[2]) - max(a[0], b[0]) > by + 1e-6
        and min(a[3], b[3]) - max(a[1], b[1]) > by + 1e-6
    )


def inside(a, b):
    return a[0] >= b[0] and a[1] >= b[1] and a[2] <= b[2] and a[3] <= b[3]


def collisions(drawing):
    """Overlapping elements, as text; none in a good drawing."""
    card, *outlines = drawing.outlines
    boxes = [bounds(outline) for outline in outlines if outline.fill in ("box", "card")]
    ribbons = [outline for outline in outlines if [s[0] for s in outline.steps] == ["M", "C", "L"]]
    texts = [(text.text, text.bounds) for text in drawing.texts if text.text]
    found = [f"{a} on {b}" for (a, at), (b, bt) in combinations(texts, 2) if overlap(at, bt)]
    found += [f"boxes {a} and {b}" for a, b in combinations(boxes, 2) if overlap(a, b)]
    for text, at in texts:
        if not inside(at, bounds(card)):
            found.append(f"{text} outside")
        if any([overlap(at, box) and not inside(at, box) for box in boxes]):
            found.append(f"{text} on the edge of a box")
    for ribbon in ribbons:
        half = ribbon.width / 2
        for x, y in points_on(ribbon):
            spot = (x - 0.1, y - half, x + 0.1, y + half)
            if hit := [text for text, at in texts if overlap(spot, at)]:
                found.append(f"a line through {hit}")
    return found


# ------------------------------------------------------------------------ geometry


@pytest.mark.parametrize("shared", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(6))
def test_nothing_overlaps(seed, shared):
    graph = random_tree(seed, num_rows=30, num_actions=2 + seed % 7, shared=shared).to_graph()
    for max_nodes in (3, 40):
        assert collisions(drawn(graph, max_nodes)) == []


# --------------------------------------------------------------------------- texts


def test_figures_of_nodes_and_edges():
    tree = small_tree()
    shown = texts_of(tree.to_svg(action_names=NAMES))
    assert shown[0] == "root 0: value +0.25, 9 simulations, depth 3, 5 nodes"
    for text in ("N 9", "V +0.25", "right", "P 25%  Q +0.50", "N 6", "wait", "P 25%  Q -0.25"):
        assert text in shown
    assert {"1 to 6 visits", "most visited path", "Q -1.00", "+1.00"} <= set(shown)
    svg = tree.to_svg(max_nodes=2, action_names=NAMES)  # hidden nodes are counted
    shown = texts_of(svg)
    assert shown[0].endswith("5 nodes (2 shown)") and shown.count("+1 hidden") == 2
    assert "1 action not shown, 3 visits\n2 not tried, prior 50%" in svg
    for drawing in (picture(made_tree([], num_actions=2)), picture(tree, max_nodes=1)):
        assert collisions(drawing) == []
        assert "N visits   V value" in texts_of(drawing.svg())


def test_the_most_visited_path_has_a_rim_and_edges_are_wide_and_coloured_by_figures():
    drawing = picture(small_tree(), action_names=NAMES)
    rims = [o for o in drawing.outlines if o.stroke == "ink" and o.steps[1][0] == "C"]
    assert len([o for o in rims if o.steps[-1][0] == "L"]) == 3  # right, left, right
    assert len([o for o in drawing.outlines if o.fill == "box" and o.stroke == "ink"]) == 4
    bold = [text.text for text in drawing.texts if text.bold]
    assert [name for name in NAMES if name in bold] == ["left", "right"]
    ribbons = [o for o in drawing.outlines if o.tip and o.fill == "none"]
    widths = {o.tip.split(" (")[0]: o.width for o in ribbons}
    assert widths["right: 6 visits"] > widths["left: 4 visits"] > widths["wait: 3 visits"] > 1
    colours = {o.tip.splitlines()[1].split(",")[0]: o.stroke for o in ribbons}
    assert colours["Q +1"] == QScale(-1, 1).colour(1.0)
    assert colours["Q -0.25"] == QScale(-1, 1).colour(-0.25)


def test_the_picture_of_a_game_shows_players_and_ends():
    ended = torch.tensor([False, False, True, False, False])
    tree = small_tree(to_play=torch.tensor([7, 8, 8, 7, 8]), ended=ended)
    shown = texts_of(tree.to_svg())
    assert shown.count("player 7") == 2 and shown.count("player 8") == 3
    assert shown.count("ended") == 1
    assert "V for the player in the box   Q for the player who acts" in shown
    assert not any(["Q for the player" in text for text in texts_of(small_tree().to_svg())])


def test_a_shared_node_is_drawn_once_and_marked_elsewhere():
    edges = [(0, 0, 5, 0.5, 0.0), (0, 1, 4, 0.5, 0.0), (1, 0, 3, 0.5, 0.0), (2, 0, 2, 0.5, 0.0)]
    edges += [(3, 1, 1, 0.5, 0.0)]
    canonical = torch.tensor([0, 1, 2, 3, 3, 0], dtype=torch.int32)
    drawing = picture(made_tree(edges, num_actions=2, canonical=canonical))
    shown = [text.text for text in drawing.texts]
    assert shown.count("N 3  #3") == 1 and shown.count("↩ #0") == 1
    assert "N 2  P 50%  Q +0.500" in shown and "↩ the node of this number" in shown
    assert "N in a box counts all ways that lead to it" in shown
    assert not any(["all ways" in text for text in texts_of(small_tree().to_svg())])
    assert len([o for o in drawing.outlines if o.fill == "box"]) == 4
    assert len([o for o in drawing.outlines if o.dashes]) == 1


def test_colours_contrast_with_both_backgrounds():
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for i in range(21):
        shade = luminance(QScale(-1, 1).colour(i / 10 - 1))
        for background in ("#ffffff", "#0f172a"):
            bright, dark = sorted([shade, luminance(background)], reverse=True)
            assert (bright + 0.05) / (dark + 0.05) > 2.5


# ------------------------------------------------------------------------ the files


def test_svg_is_self_contained_and_has_a_dark_mode():
    svg = small_tree().to_svg()
    assert re.findall(r"https?://[^\"\s]+", svg) == ["http://www.w3.org/2000/svg"]
    assert " id=" not in svg and "@media (prefers-color-scheme:dark)" in svg
    named = set(re.findall(r"raffia-[\w-]+", svg.split("</style>")[1]))
    assert named == {name for name in named if f".{name}{{" in svg.split("</style>")[0]}
    assert {"raffia-card", "raffia-ink", "raffia-ink-line"} <= named


def test_save_png(tmp_path):
    pytest.importorskip("matplotlib")
    names, chain = ["$", "a_b^c", "\\x", "→"], [(row, 0, 90 - row, 0.5, 0.0) for row in range(89)]

    def size(path):
        start = (tmp_path / path).read_bytes()[:24]
        assert start[:8] == b"\x89PNG\r\n\x1a\n"
        return struct.unpack(">II", start[16:])

    small_tree().save_picture(str(tmp_path / "tree.png"), action_names=names)
    drawing = picture(small_tree(), action_names=names)
    assert size("tree.png") == pytest.approx((2 * drawing.width, 2 * drawing.height), abs=2)
    made_tree(chain, num_actions=2).save_picture(tmp_path / "long.png", max_nodes=90)
    assert 15_000 < size("long.png")[0] <= 16_000  # never larger than can be drawn


def test_other_endings_and_svg_files(tmp_path):
    for name, ending in (("tree.jpg", "'.jpg'"), ("tree", "''")):
        texts_of = rf"ends in {ending}; .* \.svg or \.png: .*tree\.svg"
        with pytest.raises(ValueError, match=texts_of):
            small_tree().save_picture(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    small_tree().save_picture(tmp_path / "tree.SVG", action_names=NAMES)
    text = (tmp_path / "tree.SVG").read_text(encoding="utf-8")
    assert text == small_tree().to_svg(action_names=NAMES) + "\n"


def test_without_matplotlib_the_error_names_the_extra(tmp_path, monkeypatch):
    def import_module(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr("importlib.import_module", import_module)
    with pytest.raises(ImportError, match=r"pip install 'raffia\[report\]'; SVG"):
        small_tree().save_picture(tmp_path / "tree.png")
    small_tree().save_picture(tmp_path / "tree.svg")
