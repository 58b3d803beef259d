"""Dialogues on a page: each token coloured by its advantage, and V along the text as a drawing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from raffia.draw.markup import Html, el, join
from raffia.report.dialogue_files import (
    Action,
    DialogueFile,
    TokenDialogue,
    best_file,
    files_of,
    largest_advantage,
    read_dialogues,
)
from raffia.report.folder import Run
from raffia.report.groups import Groups, leading
from raffia.report.markup import NONE, count, figure, shown_token, table

_MOST_SHOWN = 4  # runs of which dialogues are shown
_MOST_NUMBERS = 80  # decisions of a dialogue in its table
_WIDE = 13  # tokens from which a dialogue has the whole width
_SOURCES = {"own": "game of its own", "logged": "from the data", "held out": "held out"}
_EXPLAINED = (
    "Colours show how much better a token is than expected: its advantage, target Q − V. Hover "
    "over a token for the numbers. The plot below the text shows V as a line before each "
    "decision, and Q of the agent's text as triangles; the agent's part is shaded. In logged "
    "dialogues this part was written by somebody else."
)
_LEGEND = (-1.0, -0.5, 0.0, 0.5, 1.0)  # fractions of the full colour

_HEIGHT, _LEFT, _ABOVE = 120, 44, 18  # of the axes, and the room around them, in pixels
_WIDEST, _COLUMN = 900, (7, 40)  # of all columns; of one: at least, at most
_NAMED = 15  # pixels that a column must have for its token to be named below it
_LONGEST = 9  # characters of a name


def dialogues(groups: Groups, notes: list[str]) -> Html:
    """Dialogues of the best run of each configuration; nothing of runs that have none."""
    runs = [run for run in leading(groups) if run.of_dialogues][:_MOST_SHOWN]
    if not runs:
        return Html("")
    shown = [_of_run(run, notes) for run in runs]
    parts = [el("h2", "Dialogues"), el("p.faint", _EXPLAINED)]
    if len(groups) == len(groups[0].runs) == 1:
        return join([*parts, *shown])
    for index, (run, one) in enumerate(zip(runs, shown, strict=True)):
        named = [el("h3", run.name), one]
        parts += [el("details", el("summary", run.name), one)] if index else named
    return join(parts)


def _of_run(run: Run, notes: list[str]) -> Html:
    best = best_file(run)
    if best is None:
        return el("p.missing", "No dialogues have been written; evaluations write them.")
    found = _read(best, notes)
    parts = [_shown(found, best)] if found else []
    files = files_of(run.folder)
    other = files[-1] if files[0] == best else files[0]
    compared = _read(other, notes) if other != best else None
    if compared:
        summary = el("summary", f"The same after {count(compared.update)} updates")
        parts.append(el("details", summary, _shown(compared, other)))
    return join(parts)


def _read(path: Path, notes: list[str]) -> DialogueFile | None:
    try:
        return read_dialogues(path)
    except ValueError as error:
        notes.append(f"dialogues/{path.name} is not shown: {error}")
        return None


def _shown(found: DialogueFile, path: Path) -> Html:
    most = largest_advantage(found.dialogues)
    text = f"After {count(found.update)} updates (dialogues/{path.name})."
    if not any(one.valued for one in found.dialogues):
        text += " This agent has learnt a policy but no values, so tokens are not coloured."
    cards = [_card(one, most) for one in found.dialogues]
    legend = _legend(most) if most else Html("")
    return join([el("p.faint", text), legend, el("div.dialogues", *cards)])


def _legend(most: float) -> Html:
    swatches = [
        el("span", _coloured("i.swatch", fraction), figure(fraction * most)) for fraction in _LEGEND
    ]
    return el("div.legend", "advantage:", *swatches, el("span", "▲ better than expected, ▼ worse"))


def _card(dialogue: TokenDialogue, most: float) -> Html:
    source = _SOURCES.get(dialogue.source, dialogue.source)
    facts = [source, f"return {figure(dialogue.total)}"]
    facts += ["cut here"] if dialogue.cut else [] if dialogue.ended else ["not over"]
    head = el("div.of", el("b", facts[0]), " · " + " · ".join(facts[1:]))
    line = _value_line(dialogue, most)
    drawn = [el("div.wide", line)] if line else []
    kind = "div.dialogue.full" if len(dialogue.tokens) > _WIDE else "div.dialogue"
    return el(kind, head, *_lines(dialogue, most), *drawn, _numbers(dialogue))


def _lines(dialogue: TokenDialogue, most: float) -> list[Html]:
    """The text of a dialogue: a line for each turn."""
    own = dialogue.own
    by_token = {at: one for one in dialogue.actions for at in range(one.first, one.last + 1)}
    turns: list[tuple[bool, list[int]]] = []
    for at in range(len(dialogue.tokens)):
        if turns and (turns[-1][0] is (at in own)):
            turns[-1][1].append(at)
        else:
            turns.append((at in own, [at]))
    lines: list[Html] = []
    marks: list[Html] = []  # marks that stand before the first who speaks
    for is_own, positions in turns:
        tokens = [_token(dialogue, at, by_token.get(at), most) for at in positions]
        if not is_own and dialogue.marks.issuperset(positions) and len(turns) > 1:
            marks += tokens  # only marks: part of the next turn
            continue
        who = el("span.who", "agent" if is_own else "env")
        lines.append(el("div.turn", who, el("span", *marks, *tokens)))
        marks = []
    if marks:
        lines.append(el("div.turn", el("span.who"), el("span", *marks)))
    return lines


def _token(dialogue: TokenDialogue, at: int, action: Action | None, most: float) -> Html:
    text = shown_token(dialogue.tokens[at]).replace("↵", "↵\n")
    kind = "span.mark" if at in dialogue.marks else "span.tok"
    if action is None:
        return el(kind, text)
    # An utterance that is one decision earns its reward at its end.
    reward = action.reward if at == action.last else 0.0
    shown = [text, el("sup", f"{'+' if reward > 0 else ''}{figure(reward)}")] if reward else [text]
    title = _details(dialogue, action)
    if math.isnan(action.advantage) or not most:
        return el(kind, *shown, title=title)
    return _coloured(kind, action.advantage / most, *shown, title=title)


def _coloured(kind: str, fraction: float, *children: str, **attributes: str) -> Html:
    """fraction: of the full colour, below 0 for worse."""
    strength = min(abs(fraction), 1.0)
    tone = "up" if fraction > 0 else "down"
    return el(f"{kind}.{tone}", *children, style=f"--s:{strength:.2f}", **attributes)


def _details(dialogue: TokenDialogue, action: Action) -> str:
    """The tooltip text of a decision, with all its figures."""
    written = "".join([shown_token(one) for one in dialogue.tokens[action.first : action.last + 1]])
    parts = [
        f"{name} {figure(value)}"
        for name, value in (("advantage", action.advantage), ("Q", action.q), ("V", action.v))
        if not math.isnan(value)
    ]
    parts += [f"probability {_chance(action.log_prob)}"] if not math.isnan(action.log_prob) else []
    parts += [f"reward {figure(action.reward)}"] if action.reward else []
    lines = [f"{written}: {', '.join(parts)}"]
    if action.others:
        lines.append(f"instead: {_others(action)}")
    return "\n".join(lines)


def _others(action: Action) -> str:
    texts = []
    for other in action.others:
        known = [] if math.isnan(other.q) else [f"Q {figure(other.q)}"]
        known += [] if math.isnan(other.log_prob) else [_chance(other.log_prob)]
        texts.append(f"{shown_token(other.token)} ({', '.join(known)})")
    return ", ".join(texts)


def _chance(log_prob: float) -> str:
    if math.isnan(log_prob):
        return NONE
    fraction = math.exp(min(log_prob, 0.0))
    return f"{100 * fraction:.1f} %" if fraction > 0.001 else f"e^{figure(log_prob)}"


def _numbers(dialogue: TokenDialogue) -> Html:
    """A table of the figures in the tooltips, for readers without a pointing device."""
    shown = dialogue.actions[:_MOST_NUMBERS]
    if not shown:
        return Html("")
    rows = [
        [
            shown_token("".join(dialogue.tokens[one.first : one.last + 1])),
            figure(one.advantage),
            figure(one.q),
            figure(one.v),
            _chance(one.log_prob),
            figure(one.reward) if one.reward else "",
            _others(one),
        ]
        for one in shown
    ]
    more = len(dialogue.actions) - len(shown)
    caption = f"The first {len(shown)}; {more} more are in the file." if more else ""
    heads = ["token", "advantage", "Q", "V", "probability", "reward", "alternatives"]
    # The text of a table may be long, since it scrolls; that of a turn may not.
    return el("details", el("summary", "Numbers"), table(heads, rows, range(1, 6), caption))


def _value_line(dialogue: TokenDialogue, most: float = 1.0) -> Html:
    """V of each state, Q of the agent's text there, rewards; nothing where no values are known.

    most: the advantage that has the full colour.

    >>> actions = (Action(1, 1, v=-1.0, q=-0.5, advantage=0.5),)
    >>> svg = _value_line(TokenDialogue("own", ("<a>", "crane"), actions, states=((0, -1.0),)))
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
