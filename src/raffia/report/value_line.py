"""V along the text of a dialogue, as a small drawing: one column for each token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from raffia.draw.markup import Html, el, join
from raffia.report.dialogue_files import Action, TokenDialogue
from raffia.report.wording import figure, shown_token

_HEIGHT, _LEFT, _ABOVE = 120, 44, 18  # of the axes, and the room around them, in pixels
_WIDEST, _COLUMN = 900, (7, 40)  # of all columns; of one: at least, at most
_NAMED = 15  # pixels that a column must have for its token to be named below it
_LONGEST = 9  # characters of a name


def value_line(dialogue: TokenDialogue, most: float = 1.0) -> Html:
    """V of each state, Q of the agent's text there, rewards; nothing where no values are known.

    most: the advantage that has the full colour.

    >>> actions = (Action(1, 1, v=-1.0, q=-0.5, advantage=0.5),)
    >>> svg = value_line(TokenDialogue("own", ("<a>", "crane"), actions, states=((0, -1.0),)))
    >>> svg.startswith("<svg"), svg.count("<circle"), svg.count("<rect")
    (True, 1, 1)
    """
    heights = [v for _, v in dialogue.states] + [action.q for action in dialogue.actions]
    heights = [height for height in heights if not math.isnan(height)]
    if not heights or not dialogue.tokens:
        return Html("")
    names = [_name(token) for token in dialogue.tokens]
    axes = _Axes(names, min(heights), max(heights))
    parts = [
        *_grid(axes),
        *[_shade(axes, action) for action in dialogue.actions],
        *_names(axes, dialogue, names),
        *_line(axes, dialogue),
        *[mark for action in dialogue.actions for mark in _action(axes, dialogue, action, most)],
    ]
    return el(
        "svg.values",
        *parts,
        viewBox=f"0 0 {axes.width:.0f} {axes.height:.0f}",
        width=f"{axes.width:.0f}",
        role="img",
        aria_label="V along the text",
    )


class _Axes:
    """The scales from tokens and values to pixels."""

    def __init__(self, names: Sequence[str], low: float, high: float) -> None:
        least, most = _COLUMN
        self.num = len(names)
        self.column = min(max(_WIDEST / self.num, least), most)
        self.named = self.column >= _NAMED
        step = _step(high - low)
        self.low, self.high = step * math.floor(low / step), step * math.ceil(high / step)
        if self.low == self.high:
            self.low, self.high = self.low - step, self.high + step
        count = round((self.high - self.low) / step)
        self.marks = [self.low + i * step for i in range(count + 1)]
        self.width = _LEFT + self.column * self.num + 12
        self.bottom = _ABOVE + _HEIGHT
        longest = max(map(len, names)) if self.named else 0
        self.height = self.bottom + 16 + 7 * longest  # names lean

    def x(self, token: float) -> str:
        return f"{_LEFT + self.column * (token + 0.5):.1f}"

    def left(self, token: int) -> str:
        return f"{_LEFT + self.column * token:.1f}"

    def y(self, value: float) -> str:
        return f"{self.bottom - _HEIGHT * (value - self.low) / (self.high - self.low):.1f}"


def _step(span: float) -> float:
    """A round step, of which about four make the span."""
    if not span > 1e-12:
        return 1.0
    size = 10.0 ** math.floor(math.log10(span / 4))
    return next((f * size for f in (1, 2, 5) if 4 * f * size >= span), 10 * size)


def _grid(axes: _Axes) -> Iterator[Html]:
    right = axes.left(axes.num)
    for value in axes.marks:
        y = axes.y(value)
        yield el("line.rule", x1=f"{_LEFT}", x2=right, y1=y, y2=y)
        text = figure(0.0 if abs(value) < 1e-9 else float(f"{value:.6g}"))
        yield el("text.mark", text, x=f"{_LEFT - 7}", y=y, dy="3.5", text_anchor="end")


def _shade(axes: _Axes, action: Action) -> Html:
    """The shading of the agent's tokens."""
    width = axes.column * (action.last - action.first + 1)
    return el(
        "rect.own",
        x=axes.left(action.first),
        y=f"{_ABOVE}",
        width=f"{width:.1f}",
        height=f"{_HEIGHT}",
    )


def _name(token: str) -> str:
    name = shown_token(token).strip() or "␣"
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"


def _names(axes: _Axes, dialogue: TokenDialogue, names: Sequence[str]) -> Iterator[Html]:
    """The tokens below the axis; where they have no room, a tick for each."""
    own, bottom = dialogue.own, axes.bottom
    for at, (name, token) in enumerate(zip(names, dialogue.tokens, strict=True)):
        x = axes.x(at)
        yield el("line.tick", x1=x, x2=x, y1=f"{bottom}", y2=f"{bottom + 4}")
        if axes.named:
            turn = f"translate({x} {bottom + 13}) rotate(-55)"
            kind = "text.name.own" if at in own else "text.name"
            yield el(kind, name, el("title", shown_token(token)), transform=turn, text_anchor="end")


def _line(axes: _Axes, dialogue: TokenDialogue) -> Iterator[Html]:
    """The line of V from state to state."""
    known = [(at, v) for at, v in dialogue.states if not math.isnan(v)]
    for (at, v), (then, following) in pairwise(known):
        yield el("line.v", x1=axes.x(at), y1=axes.y(v), x2=axes.x(then), y2=axes.y(following))
    for at, v in known:
        title = el("title", f"V {figure(v)} behind {shown_token(dialogue.tokens[at])}")
        yield el("circle.v", title, cx=axes.x(at), cy=axes.y(v), r="2.6")


def _action(axes: _Axes, dialogue: TokenDialogue, action: Action, most: float) -> Iterator[Html]:
    """The mark of a decision: from V to the Q of the agent's text, and its reward."""
    if not math.isnan(action.q + action.v):
        kind = "up" if action.advantage > 0 else "down"
        x, begun = axes.x(action.last), axes.x(action.first - 1)
        y, before = axes.y(action.q), axes.y(action.v)
        token = shown_token("".join(dialogue.tokens[action.first : action.last + 1]))
        title = el("title", f"{token}: Q {figure(action.q)}, advantage {figure(action.advantage)}")
        strength = min(abs(action.advantage) / most, 1.0) if most else 0.0
        clear = f"opacity:{0.35 + 0.65 * strength:.2f}"
        yield el(f"line.q.{kind}", x1=begun, y1=before, x2=x, y2=y, style=clear)
        # A triangle that points where it goes tells better from worse without colours.
        tip = "-3.6 2.6 3.6 2.6 0 -4" if kind == "up" else "-3.6 -2.6 3.6 -2.6 0 4"
        moved = f"translate({x} {y})"
        yield el(f"polygon.q.{kind}", title, points=tip, transform=moved, style=clear)
    if action.reward:
        x = axes.x(action.last)
        sign = "+" if action.reward > 0 else ""
        title = el("title", f"reward {figure(action.reward)}")
        text = f"{sign}{figure(action.reward)}"
        yield join(
            [
                el("line.reward", x1=x, x2=x, y1=f"{_ABOVE - 4}", y2=f"{axes.bottom}"),
                el("text.reward", text, title, x=x, y=f"{_ABOVE - 7}", text_anchor="middle"),
            ]
        )
