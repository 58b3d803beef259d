"""A drawing in layers from top to bottom: boxes, lines between them, and frames around groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raffia.draw.layouts import LINE, LayerBox, assign_positions, ordered
from raffia.draw.scene import Corners, Point, Scene, Steps, bent, polyline, text_width

_GAP, _MARGIN = 30, 24  # between layers, around everything
_GREY = "#cbd5e1"

Frame = tuple[str, Corners]  # with a title


def layered(title: str, boxes: Sequence[LayerBox], groups: Sequence[tuple[str, str]] = ()) -> Scene:
    """A drawing of boxes that know their layer and what stands above and below; opaque.

    groups: title of each group that boxes stand in, and a shorter one for a narrow frame.

    >>> from raffia.draw.layouts import Look
    >>> look = Look("#ffffff", "#000000", "#000000")
    >>> upper, lower = LayerBox(look, [("upper", True)]), LayerBox(look, [("lower", True)], layer=1)
    >>> upper.below, lower.above = [lower], [upper]
    >>> scene = layered("two boxes", [upper, lower])
    >>> [text.text for text in scene.texts], upper.x == lower.x, upper.y < lower.y
    (['upper', 'lower'], True, True)
    """
    boxes = _long_lines(boxes)
    layers: list[list[LayerBox]] = [
        [] for _ in range(max([b.layer for b in boxes], default=-1) + 1)
    ]
    for box in boxes:
        layers[box.layer].append(box)
    layers = ordered(layers)
    assign_positions(layers, len(groups))
    heights = [max([box.height for box in layer]) for layer in layers]
    y = float(_MARGIN + 8)
    for layer, height in zip(layers, heights, strict=True):
        y += 24 * max([_num_opened(box) for box in layer])  # room for the titles of frames
        for box in layer:
            box.y = y if not box.lines else y + (height - box.height) / 2
        y += height + _GAP
    frames = list(_frames(boxes, groups))
    sides = [(b.x - b.width / 2, b.x + b.width / 2) for b in boxes]
    sides += [(x, x + width) for _, (x, _, width, _) in frames]
    left, right = min([s[0] for s in sides], default=0), max([s[1] for s in sides], default=0)
    bottom = max([top + height for _, (_, top, _, height) in frames], default=0)
    for box in boxes:
        box.x += _MARGIN - left
    scene = Scene(title, right - left + 2 * _MARGIN, max(y - _GAP, bottom) + _MARGIN)
    scene.box((0, 0, scene.width, scene.height), 8, fill="#ffffff")
    _paint(scene, boxes, list(_frames(boxes, groups)), heights)
    return scene


def _long_lines(boxes: Sequence[LayerBox]) -> list[LayerBox]:
    """The boxes, with a passage wherever a line crosses a layer."""
    passages: list[LayerBox] = []
    for box in boxes:
        for i, target in enumerate(box.below):
            upper = box
            for layer in range(box.layer + 1, target.layer):
                passage = LayerBox(layer=layer, above=[upper], below=[target])
                passage.groups = tuple([g for g in box.groups if g in target.groups])
                if upper is box:
                    box.below[i] = passage
                else:
                    upper.below = [passage]
                target.above[target.above.index(upper)] = passage
                passages.append(passage)
                upper = passage
    return [*boxes, *passages]


def _num_opened(box: LayerBox) -> int:
    """The number of frames that open right above a box."""
    outside = [len(set(box.groups) - set(upper.groups)) for upper in box.above]
    return max(outside, default=len(box.groups))


def _frames(boxes: Sequence[LayerBox], groups: Sequence[tuple[str, str]]) -> Iterator[Frame]:
    """A frame for each group that stands apart from the rest.

    One whose frame would go around other boxes has none.
    """
    for i, (title, short) in enumerate(groups):
        inside = [box for box in boxes if i in box.groups and box.lines]
        if not inside:
            continue
        depth = 1 + max([len(box.groups) - 1 - box.groups.index(i) for box in inside])
        pad = 9 * depth
        left = min([b.x - b.width / 2 for b in inside]) - pad
        right = max([b.x + b.width / 2 for b in inside]) + pad
        top = min([b.y for b in inside]) - 24 * depth
        bottom = max([b.y + b.height for b in inside]) + pad
        others = [b for b in boxes if i not in b.groups and b.lines]
        if not any([_meets(b, left, right, top, bottom) for b in others]):
            fits = text_width(title) <= right - left - 24
            yield title if fits else short, (left, top, right - left, bottom - top)


def _meets(box: LayerBox, left: float, right: float, top: float, bottom: float) -> bool:
    apart = box.x + box.width / 2 < left or box.x - box.width / 2 > right
    return not (apart or box.y + box.height < top or box.y > bottom)


# ------------------------------------------------------------------------ how it is painted


def _paint(
    scene: Scene, boxes: Sequence[LayerBox], frames: Sequence[Frame], heights: Sequence[float]
) -> None:
    """Frames, lines, the frames' titles as tags on their upper edges, boxes."""
    for _, corners in frames:
        scene.box(corners, 10, fill="#f8fafc", stroke=_GREY, dashes="5 4")
    for steps, has_head in _lines(boxes, heights):
        scene.line(steps, stroke="#94a3b8", width=1.4)
        if has_head:
            x, y = steps[-1][1][-1]
            tip = polyline((x - 4, y - 7), (x, y), (x + 4, y - 7), closed=True)
            scene.line(tip, fill="#64748b")
    for title, (x, y, _, _) in frames:
        tag = (x + 12, y - 9, text_width(title, 11) + 14, 18)
        scene.box(tag, 9, fill="#ffffff", stroke=_GREY)
        scene.text(x + 19, y + 3.8, title, 11, tone="#64748b")
    for box in boxes:
        look, left = box.look, box.x - box.width / 2
        if box.lines and look.framed:
            radius = box.height / 2 if look.radius is None else look.radius
            tinted = {"fill": look.fill, "stroke": look.stroke, "dashes": look.dashes}
            scene.box((left, box.y, box.width, box.height), radius, tip=box.tip, **tinted)
        for i, (text, is_main) in enumerate(box.lines):
            strength = {"bold": look.bold} if is_main else {"opacity": 0.65}
            y = box.y + look.padding + LINE * i + 11.5
            scene.text(box.x, y, text, anchor="middle", tone=look.text, **strength)


def _lines(boxes: Sequence[LayerBox], heights: Sequence[float]) -> Iterator[tuple[Steps, bool]]:
    """The smooth lines down from box to box, and whether they end in an arrow head."""
    for box in boxes:
        if not box.lines:
            continue  # a line starts at a box and continues through passages
        for i, target in enumerate(_by_x(box.below)):
            points: list[Point] = [(_port(box, i, len(box.below)), box.y + box.height)]
            before = box
            while not target.lines:
                points += [(target.x, target.y), (target.x, target.y + heights[target.layer])]
                before, target = target, target.below[0]
            port = _port(target, _by_x(target.above).index(before), len(target.above))
            points.append((port, target.y))
            curves = [bent(a, b, down=True) for a, b in zip(points, points[1:], strict=False)]
            yield (("M", (points[0],)), *curves), target.look.framed


def _by_x(boxes: Sequence[LayerBox]) -> list[LayerBox]:
    return sorted(boxes, key=lambda box: box.x)


def _port(box: LayerBox, i: int, n: int) -> float:
    """The x at which the i-th of n lines meets a box; the lines are spread around its middle."""
    step = min(28.0, (box.width - 16) / max(n, 1)) if box.look.framed else 0.0
    return box.x + (i - (n - 1) / 2) * step
