"""Layouts: invariants for any tree and any layers."""

import random
from itertools import combinations

import pytest

from raffia.draw import layered, tidy
from raffia.draw.layouts import LayerBox, Look

PLAIN = Look("#ffffff", "#000000", "#000000")


def random_tree(seed, num_nodes=60):
    draw = random.Random(seed)
    children, depth = {}, {0: 0}
    for node in range(1, num_nodes):
        parent = draw.randrange(max(0, node - 12), node)
        children.setdefault(parent, []).append(node)
        depth[node] = depth[parent] + 1
    return children, depth, {node: draw.choice([12, 44, 90]) for node in range(num_nodes)}


@pytest.mark.parametrize("seed", range(8))
def test_nodes_of_a_tidy_tree_do_not_overlap_and_are_centred_on_their_children(seed):
    children, depth, heights = random_tree(seed)
    y = tidy(0, children, heights)
    for a, b in combinations(y, 2):
        if depth[a] == depth[b]:
            assert abs(y[a] - y[b]) >= (heights[a] + heights[b]) / 2 + 8 - 1e-6
    for node, below in children.items():
        assert y[node] == pytest.approx((y[below[0]] + y[below[-1]]) / 2)
        assert [y[child] for child in below] == sorted([y[child] for child in below])


@pytest.mark.parametrize("seed", range(6))
def test_boxes_in_layers_do_not_overlap_and_stay_inside_the_drawing(seed):
    draw = random.Random(seed)
    boxes = [LayerBox(PLAIN, [(f"box {i}", True)], layer=draw.randrange(4)) for i in range(14)]
    for upper in boxes:
        for lower in [b for b in boxes if b.layer > upper.layer and draw.random() < 0.3]:
            upper.below.append(lower)
            lower.above.append(upper)
    used = sorted({box.layer for box in boxes})
    for box in boxes:
        box.layer = used.index(box.layer)
    scene = layered("boxes", boxes)
    assert [text.text for text in scene.texts] == [f"box {i}" for i in range(14)]
    for box in boxes:
        assert 0 <= box.x - box.width / 2 and box.x + box.width / 2 <= scene.width
        assert 0 <= box.y and box.y + box.height <= scene.height
    for a, b in combinations(boxes, 2):
        if a.layer == b.layer:
            assert abs(a.x - b.x) >= (a.width + b.width) / 2
        else:
            assert (a.y < b.y) == (a.layer < b.layer)


def test_a_group_has_a_frame_with_its_title():
    inside = LayerBox(PLAIN, [("inside", True)], groups=(0,))
    outside = LayerBox(PLAIN, [("outside", True)])
    scene = layered("groups", [inside, outside], [("a title that is far too long", "short")])
    assert [text.text for text in scene.texts] == ["short", "inside", "outside"]
    assert len([outline for outline in scene.outlines if outline.dashes == "5 4"]) == 1


def test_nothing_to_draw():
    assert layered("nothing", []).svg().endswith("</svg>")
