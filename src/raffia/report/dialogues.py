"""Dialogues on a page: each token coloured by its advantage, V along the text below."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from raffia.draw.markup import Html, el, join
from raffia.report.dialogue_files import (
    Action,
    Dialogue,
    DialogueFile,
    best_file,
    files_of,
    largest_advantage,
    read_dialogues,
)
from raffia.report.folder import Run
from raffia.report.groups import Group, leading
from raffia.report.markup import table
from raffia.report.value_line import value_line
from raffia.report.wording import NONE, count, figure, shown_token

_MOST_SHOWN = 4  # runs of which dialogues are shown
_MOST_NUMBERS = 80  # decisions of a dialogue in its table
_WIDE = 13  # tokens from which a dialogue has the whole width
_SOURCES = {"own": "game of its own", "logged": "from the data", "held out": "held out"}
_EXPLAINED = (
    "Colours say how much better a token is than what was to be expected: its advantage, target "
    "Q − V. Point at a token for the numbers. Below the text the line is V before each decision, a "
    "triangle the Q of what was said there; shaded is the agent's part, which in logged dialogues "
    "somebody else has spoken."
)
_LEGEND = (-1.0, -0.5, 0.0, 0.5, 1.0)  # shares of the full colour


def dialogues(groups: Sequence[Group], notes: list[str]) -> Html:
    """Dialogues of the best run of each configuration; nothing of runs that have none."""
    runs = [run for run in leading(groups) if run.by_updates][:_MOST_SHOWN]
    if not runs:
        return Html("")
    shown = [_of_run(run, notes) for run in runs]
    parts = [el("h2", "Dialogues"), el("p.faint", _EXPLAINED)]
    if len(groups) == len(groups[0].runs) == 1:
        return join([*parts, *shown])
    for place, (run, one) in enumerate(zip(runs, shown, strict=True)):
        named = [el("h3", run.name), one]
        parts += [el("details", el("summary", run.name), one)] if place else named
    return join(parts)


def _of_run(run: Run, notes: list[str]) -> Html:
    best = best_file(run)
    if best is None:
        return el("p.missing", "No dialogues were written; an evaluation writes some.")
    found = _read(best, notes)
    parts = [_shown(found, best)] if found else []
    files = files_of(run.folder)
    other = files[-1] if files[0] == best else files[0]
    compared = _read(other, notes) if other != best else None
    if compared:
        says = el("summary", f"The same after {count(compared.update)} updates")
        parts.append(el("details", says, _shown(compared, other)))
    return join(parts)


def _read(path: Path, notes: list[str]) -> DialogueFile | None:
    try:
        return read_dialogues(path)
    except ValueError as error:
        notes.append(f"dialogues/{path.name} is not shown: {error}")
        return None


def _shown(found: DialogueFile, path: Path) -> Html:
    most = largest_advantage(found.dialogues)
    says = f"After {count(found.update)} updates (dialogues/{path.name})."
    if not any(one.valued for one in found.dialogues):
        says += " This agent has learnt a policy and no values: no token has a colour."
    cards = [_card(one, most) for one in found.dialogues]
    legend = _legend(most) if most else Html("")
    return join([el("p.faint", says), legend, el("div.dialogues", *cards)])


def _legend(most: float) -> Html:
    swatches = [el("span", _coloured("i.swatch", share), figure(share * most)) for share in _LEGEND]
    return el("div.legend", "advantage:", *swatches, el("span", "▲ better than expected, ▼ worse"))


def _card(dialogue: Dialogue, most: float) -> Html:
    source = _SOURCES.get(dialogue.source, dialogue.source)
    says = [source, f"return {figure(dialogue.total)}"]
    says += ["cut here"] if dialogue.cut else [] if dialogue.ended else ["not over"]
    head = el("div.of", el("b", says[0]), " · " + " · ".join(says[1:]))
    line = value_line(dialogue, most)
    drawn = [el("div.wide", line)] if line else []
    kind = "div.dialogue.full" if len(dialogue.tokens) > _WIDE else "div.dialogue"
    return el(kind, head, *_lines(dialogue, most), *drawn, _numbers(dialogue))


def _lines(dialogue: Dialogue, most: float) -> list[Html]:
    """The text: a line for each who speaks, in turns."""
    own = dialogue.own
    by_token = {at: one for one in dialogue.actions for at in range(one.first, one.last + 1)}
    turns: list[tuple[bool, list[int]]] = []
    for at in range(len(dialogue.tokens)):
        if turns and (turns[-1][0] is (at in own)):
            turns[-1][1].append(at)
        else:
            turns.append((at in own, [at]))
    lines: list[Html] = []
    kept: list[Html] = []  # marks that stand before the first who speaks
    for is_own, places in turns:
        tokens = [_token(dialogue, at, by_token.get(at), most) for at in places]
        if not is_own and dialogue.marks.issuperset(places) and len(turns) > 1:
            kept += tokens  # nobody says anything: part of the next turn
            continue
        who = el("span.who", "agent" if is_own else "env")
        lines.append(el("div.turn", who, el("span", *kept, *tokens)))
        kept = []
    if kept:
        lines.append(el("div.turn", el("span.who"), el("span", *kept)))
    return lines


def _token(dialogue: Dialogue, at: int, action: Action | None, most: float) -> Html:
    text = shown_token(dialogue.tokens[at]).replace("↵", "↵\n")
    kind = "span.mark" if at in dialogue.marks else "span.tok"
    if action is None:
        return el(kind, text)
    # An utterance that is one decision earns its reward at its end.
    reward = action.reward if at == action.last else 0.0
    shown = [text, el("sup", f"{'+' if reward > 0 else ''}{figure(reward)}")] if reward else [text]
    title = _told(dialogue, action)
    if math.isnan(action.advantage) or not most:
        return el(kind, *shown, title=title)
    return _coloured(kind, action.advantage / most, *shown, title=title)


def _coloured(kind: str, share: float, *children: str, **attributes: str) -> Html:
    """share: of the full colour, below 0 for worse."""
    strength = min(abs(share), 1.0)
    tone = "up" if share > 0 else "down"
    return el(f"{kind}.{tone}", *children, style=f"--s:{strength:.2f}", **attributes)


def _told(dialogue: Dialogue, action: Action) -> str:
    """All that is known of a decision."""
    said = "".join([shown_token(one) for one in dialogue.tokens[action.first : action.last + 1]])
    parts = [
        f"{name} {figure(value)}"
        for name, value in (("advantage", action.advantage), ("Q", action.q), ("V", action.v))
        if not math.isnan(value)
    ]
    parts += [f"probability {_chance(action.log_prob)}"] if not math.isnan(action.log_prob) else []
    parts += [f"reward {figure(action.reward)}"] if action.reward else []
    lines = [f"{said}: {', '.join(parts)}"]
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
    share = math.exp(min(log_prob, 0.0))
    return f"{100 * share:.1f} %" if share > 0.001 else f"e^{figure(log_prob)}"


def _numbers(dialogue: Dialogue) -> Html:
    """The same for those who can't point."""
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
    says = f"The first {len(shown)}; {more} more are in the file." if more else ""
    heads = ["said", "advantage", "Q", "V", "probability", "reward", "might have been said"]
    # Text of a table, unlike that of a turn, may be long: it scrolls.
    return el("details", el("summary", "Numbers"), table(heads, rows, range(1, 6), says))
