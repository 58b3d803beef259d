"""Dialogues that a run left in `dialogues/`, read into plain records."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raffia.report.episodes import natural
from raffia.report.folder import Run, entries, read_json
from raffia.report.rows import number

_MOST_TOKENS = 2000  # of a dialogue: more makes no page


@dataclass(frozen=True)
class Other:
    """A token that the agent could have written instead.

    >>> Other("crane").q
    nan
    """

    token: str
    log_prob: float = math.nan
    q: float = math.nan


@dataclass(frozen=True)
class Action:
    """The agent's text of one decision: a token, or an utterance.

    >>> Action(3, 3).advantage
    nan
    """

    first: int  # first token
    last: int  # last token; the first again where an action is one token
    reward: float = 0.0
    log_prob: float = math.nan
    q: float = math.nan
    v: float = math.nan  # V of the state before
    advantage: float = math.nan
    others: tuple[Other, ...] = ()


@dataclass(frozen=True)
class TokenDialogue:
    """One dialogue, token by token.

    >>> TokenDialogue("own", ("<a>", "crane", "</a>"), (Action(1, 1), Action(2, 2))).own
    {1, 2}
    """

    source: str  # "own" game, "logged", "held out"
    tokens: tuple[str, ...]
    actions: tuple[Action, ...]
    marks: frozenset[int] = frozenset()  # tokens that begin and end utterances
    total: float = math.nan  # return
    ended: bool = True
    cut: bool = False  # whether it continued behind the last token
    states: tuple[tuple[int, float], ...] = ()  # first token that a state is behind, and its V

    @property
    def own(self) -> set[int]:
        """The indices of the tokens of the agent, or of the speaker in its role."""
        return {at for action in self.actions for at in range(action.first, action.last + 1)}

    @property
    def valued(self) -> bool:
        """Whether any token has a value or an advantage."""
        return any(not math.isnan(action.advantage) for action in self.actions)


@dataclass(frozen=True)
class DialogueFile:
    """The content of one file of `dialogues/`.

    >>> DialogueFile(9.0, ()).data
    {}
    """

    update: float
    dialogues: tuple[TokenDialogue, ...]
    # Figures of all logged dialogues: "num_rows", "mean_return" ...
    data: Mapping[str, Any] = field(default_factory=dict)


def files_of(run: Path) -> list[Path]:
    """All dialogue files of a run, oldest first.

    >>> files_of(Path("no such run"))
    []
    """
    return sorted(entries(run, "dialogues", "*.json"), key=natural)


def best_file(run: Run) -> Path | None:
    """The dialogue file of the best evaluation; else the newest.

    >>> best_file(Run(Path("no such run"))) is None
    True
    """
    found = files_of(run.folder)
    update = f"{run.best.update:09.0f}" if run.best else ""
    named = [path for path in found if path.stem == update]
    return (named or found)[-1] if found else None


def read_dialogues(path: Path) -> DialogueFile:
    """Read a file; a ValueError that names the reason if it cannot be read.

    >>> read_dialogues(Path("gone.json"))
    Traceback (most recent call last):
    ...
    ValueError: No such file or directory
    """
    data: Any = read_json(path)
    found = data.get("dialogues") if isinstance(data, dict) else None
    if not isinstance(found, list):
        raise ValueError('it does not contain a list "dialogues"')
    about = data.get("data")
    about = about if isinstance(about, dict) else {}
    return DialogueFile(number(data.get("update")), tuple(map(_dialogue, found)), about)


def _dialogue(data: Any) -> TokenDialogue:
    tokens = data.get("tokens") if isinstance(data, dict) else None
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ValueError('a dialogue does not contain a list "tokens" of texts')
    num = min(len(tokens), _MOST_TOKENS)
    raw = data.get("actions")
    actions = [one for one in map(_action, raw if isinstance(raw, list) else []) if one]
    v = data.get("v")
    pairs = zip(_integers(data.get("states")), v if isinstance(v, list) else [], strict=False)
    return TokenDialogue(
        source=str(data.get("source", "")),
        tokens=tuple(tokens[:num]),
        actions=tuple([one for one in actions if 0 <= one.first <= one.last < num]),
        marks=frozenset(_integers(data.get("marks"))),
        total=number(data.get("return")),
        ended=data.get("ended") is not False,
        cut=data.get("cut") is True or num < len(tokens),
        states=tuple([(at, number(value)) for at, value in pairs if 0 <= at < num]),
    )


def _action(data: Any) -> Action | None:
    if not isinstance(data, dict) or len(_integers([data.get("first"), data.get("last")])) < 2:
        return None
    others = data.get("others")
    return Action(
        first=data["first"],
        last=data["last"],
        reward=_or_zero(number(data.get("reward"))),
        log_prob=number(data.get("log_prob")),
        q=number(data.get("q")),
        v=number(data.get("v")),
        advantage=number(data.get("advantage")),
        others=tuple(
            [
                Other(str(one.get("token")), number(one.get("log_prob")), number(one.get("q")))
                for one in (others if isinstance(others, list) else [])
                if isinstance(one, dict)
            ]
        ),
    )


def _integers(value: Any) -> list[int]:
    """The list as whole numbers; empty unless all of them are."""
    fine = isinstance(value, list) and all(type(one) is int for one in value)
    return list(value) if fine else []


def _or_zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value


def largest_advantage(dialogues: Sequence[TokenDialogue]) -> float:
    """The advantage with the full colour: all but the greatest twentieth lie below.

    >>> actions = tuple(Action(i, i, advantage=float(-i)) for i in range(40))
    >>> largest_advantage([TokenDialogue("own", ("a",) * 40, actions)])
    38.0
    """
    known = [abs(one.advantage) for dialogue in dialogues for one in dialogue.actions]
    found = sorted([size for size in known if not math.isnan(size)])
    return found[19 * len(found) // 20] or found[-1] if found else 0.0
