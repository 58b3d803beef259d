"""Rows of files as dialogues: an object in one of these forms is an observation.

    {"messages": [{"role": "user", "content": "hi"},
                  {"role": "assistant", "content": "hello", "reward": 1.0}]}
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}
    {"prompt": "hi", "response": "hello", "reward": 1.0}
    {"sequence": [["hi", null], ["hello", 1.0]]}
    {"utterances": ["hi", "hello"], "rewards": [null, 1.0]}
    {"tokens": [1, 7, 2, 9, 3, 4], "action_idxs": [2, 3], "rewards": [0.0, 1.0]}

Each may have `"terminal": false`: the dialogue was not over. Messages may share one `"reward"`,
which the agent's last one gets. What is null is not there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from raffia.data.readers.episode import Location
from raffia.hints import nearest
from raffia.lm.data.utterances import Utterance, shown

__all__ = ["ROLES", "Dialogue", "TokenRow", "dialogue_of", "messages_of"]

# role -> whether it is the agent's
ROLES: Mapping[str, bool] = MappingProxyType(
    {
        "assistant": True,
        "agent": True,
        "gpt": True,
        "user": False,
        "human": False,
        "system": False,
        "tool": False,
        "environment": False,
    }
)
FORMS = {  # the entry that names the form -> the entries that it may have
    "messages": {"messages", "reward", "terminal"},
    "conversations": {"conversations", "reward", "terminal"},
    "prompt": {"prompt", "response", "reward", "terminal"},
    "sequence": {"sequence", "terminal"},
    "utterances": {"utterances", "rewards", "terminal"},
    "tokens": {"tokens", "action_idxs", "rewards", "terminal"},
}
KNOWN = sorted(set().union(*FORMS.values()))
OF_MESSAGES = ("role", "content", "reward")
OF_SHARED = {"from": "role", "value": "content"}  # what ShareGPT's files call them
NEAR = 0.8  # of difflib: "rewrad" is near "reward" (.83), "score" is near nothing


class Dialogue(NamedTuple):
    """A sequence of utterances, and whether it is over: an observation like an environment's.

    >>> Dialogue([("hi", None), ("hello", 1.0)]).to_sequence()
    ([('hi', None), ('hello', 1.0)], True)
    """

    sequence: Sequence[Utterance]
    terminal: bool = True

    def to_sequence(self) -> tuple[Sequence[Utterance], bool]:
        """The utterances, each with the agent's reward or None; whether it is over.

        >>> Dialogue([], terminal=False).to_sequence()
        ([], False)
        """
        return self.sequence, self.terminal


class TokenRow(NamedTuple):
    """A row that is tokens already.

    >>> TokenRow([1, 9, 3], [0, 1], [0.0, 1.0]).terminal
    True
    """

    tokens: list[int]
    action_idxs: list[int]
    rewards: list[float]
    terminal: bool = True


def dialogue_of(row: Mapping[str, Any], location: Location, roles: Mapping[str, bool]) -> Any:
    """The `Dialogue` or the `TokenRow` of an object; raises MalformedDataError.

    Other entries than those of the form are left alone, but for one whose name is nearly right.

    >>> row = {"utterances": ["hi", "hello"], "rewards": [None, 1]}
    >>> dialogue_of(row, Location("a.jsonl", "line 1"), ROLES).sequence
    [('hi', None), ('hello', 1.0)]
    """
    row = {name: value for name, value in row.items() if value is not None}
    forms = [form for form in FORMS if form in row]
    if len(forms) != 1:
        found = f"it has {sorted(row)}" if not forms else f"it has {' and '.join(forms)}"
        location.fail(
            f'{found}; a row has one of {sorted(FORMS)}: {{"messages": [{{"role": "user", '
            '"content": "hi"}, {"role": "assistant", "content": "hello", "reward": 1.0}]}. '
            'For a column of another name: columns={"conversation": "messages"}; to leave one out: '
            'columns={"tokens": None}'
        )
    (form,) = forms
    check_names(row, FORMS[form], location)
    terminal = row.get("terminal", True)
    if type(terminal) is not bool:
        location.fail(
            f"{_found(terminal)} where true or false is expected (was it over?)", "terminal"
        )
    match form:
        case "messages" | "conversations":
            sequence = messages_of(row[form], location, roles, row.get("reward"))
        case "prompt":
            sequence = _answered(row, location)
        case "sequence":
            sequence = _pairs(row["sequence"], location)
        case "utterances":
            sequence = _parallel(row, location)
        case _:
            return _token_row(row, location, terminal)
    return Dialogue(sequence, terminal)


def check_names(entries: Mapping[str, Any], allowed: set[str], location: Location) -> None:
    """Refuse a name that has no meaning in this form, or that is nearly one that has."""
    for name in entries:
        if name in allowed:
            continue
        if name in KNOWN:
            location.fail(f"it has no meaning beside {sorted(allowed & entries.keys())}", name)
        near = nearest(name, allowed, cutoff=NEAR)
        if near is not None and near not in entries:
            location.fail(
                f"did you mean {near!r}? To leave it out: columns={{{name!r}: None}}", name
            )


def messages_of(
    messages: Any, location: Location, roles: Mapping[str, bool], reward: Any = None
) -> list[Utterance]:
    """The utterances of a chat transcript; an agent's message without a reward has 0.

    reward: of the whole conversation, for the agent's last message.

    >>> chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    >>> messages_of(chat, Location("the list", "row 0"), ROLES, reward=0.5)
    [('hi', None), ('hello', 0.5)]
    """
    if not isinstance(messages, list):
        location.fail(f"{_found(messages)} where a list of messages is expected", "messages")
    if not messages:
        location.fail("there is no message in it", "messages")
    found: list[Utterance] = []
    rewarded = False
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            location.fail(
                f'message {number} is {_found(message)}, not {{"role": ..., "content": ...}}',
                "messages",
            )
        for theirs, ours in OF_SHARED.items():
            if ours not in message and theirs in message:
                message = {(ours if name == theirs else name): v for name, v in message.items()}
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in roles:
            location.fail(
                f"the role of message {number} is {_found(role)}, known are {sorted(roles)}; "
                'for others: roles={"bot": True, "caller": False}, True being the agent',
                "messages",
            )
        if not isinstance(content, str):
            location.fail(
                f"the content of message {number} is {_found(content)}, no text", "messages"
            )
        for name in message:
            near = nearest(name, OF_MESSAGES, cutoff=NEAR)
            if name not in OF_MESSAGES and near is not None and near not in message:
                location.fail(f"message {number} has {name!r}: did you mean {near!r}?", "messages")
        own = message.get("reward")
        if own is not None and not roles[role]:
            location.fail(
                f"message {number} has a reward and the role {role!r}: only the agent's have one. "
                "A reward for what the environment answers belongs to the message before",
                "messages",
            )
        rewarded = rewarded or own is not None
        number_of = (
            0.0 if own is None else _number(own, f"of message {number}", location, "messages")
        )
        found.append((content, number_of if roles[role] else None))
    if reward is None:
        return found
    total = _number(reward, "of the row", location, "reward")
    last = max((at for at, (_, own) in enumerate(found) if own is not None), default=None)
    if rewarded or last is None:
        why = "its messages have rewards of their own" if rewarded else "no message is the agent's"
        location.fail(f"the row has a reward, and {why}: give it one or the others", "reward")
    found[last] = found[last][0], total
    return found


def _answered(row: Mapping[str, Any], location: Location) -> list[Utterance]:
    for name in ("prompt", "response"):
        if not isinstance(row.get(name), str):
            location.fail(f"{_found(row.get(name))} where a text is expected", name)
    reward = row.get("reward")
    earned = 0.0 if reward is None else _number(reward, "of the row", location, "reward")
    return [(row["prompt"], None), (row["response"], earned)]


def _pairs(sequence: Any, location: Location) -> list[Utterance]:
    if not isinstance(sequence, list):
        location.fail(
            f"{_found(sequence)} where a list of pairs [text, reward] is expected", "sequence"
        )
    if not sequence:
        location.fail("there is no utterance in it", "sequence")
    found: list[Utterance] = []
    for number, pair in enumerate(sequence):
        if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)):
            location.fail(
                f'utterance {number} is {_found(pair)}, not a pair: ["hi", null] for the '
                "environment's, [\"hello\", 1.0] for the agent's",
                "sequence",
            )
        found.append((pair[0], _reward_or_none(pair[1], number, location, "sequence")))
    return found


def _parallel(row: Mapping[str, Any], location: Location) -> list[Utterance]:
    texts, rewards = row["utterances"], row.get("rewards")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        location.fail(f"{_found(texts)} where a list of texts is expected", "utterances")
    if not texts:
        location.fail("there is no utterance in it", "utterances")
    _check_length(rewards, len(texts), "utterances (null for the environment)", location)
    return [
        (text, _reward_or_none(reward, number, location, "rewards"))
        for number, (text, reward) in enumerate(zip(texts, rewards or [], strict=True))
    ]


def _token_row(row: Mapping[str, Any], location: Location, terminal: bool) -> TokenRow:
    tokens, actions = row["tokens"], row.get("action_idxs", [])
    rewards = row.get("rewards", [])
    for name, values in (("tokens", tokens), ("action_idxs", actions)):
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            location.fail(f"{_found(values)} where a list of whole numbers is expected", name)
    _check_length(rewards, len(actions), "action_idxs", location)
    return TokenRow(
        tokens,
        actions,
        [_number(r, str(number), location, "rewards") for number, r in enumerate(rewards)],
        terminal,
    )


def _check_length(rewards: Any, num: int, of: str, location: Location) -> None:
    if not isinstance(rewards, list):
        location.fail(f"{_found(rewards)} where a list of numbers is expected", "rewards")
    if len(rewards) != num:
        location.fail(f"{len(rewards)} rewards for {num} {of}: there is one for each", "rewards")


def _reward_or_none(value: Any, number: int, location: Location, column: str) -> float | None:
    return None if value is None else _number(value, f"of utterance {number}", location, column)


def _number(value: Any, which: str, location: Location, column: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        location.fail(f"the reward {which} is {_found(value)}, not a number", column)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        location.fail(f"the reward {which} is {_found(value)}, which is not finite", column)
    return number


def _found(value: Any) -> str:
    return "nothing" if value is None else shown(value)
