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

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from raffia.data.readers.episode import Location
from raffia.files import shown
from raffia.hints import nearest
from raffia.lm.data.utterances import Language_Observation, Utterance, check_sequence, wrong_reward
from raffia.lm.tokenizers.chat_template import chat_role

# role -> whether it is the agent's
ROLES: Mapping[str, bool] = MappingProxyType(
    {
        **dict.fromkeys(("assistant", "agent", "gpt"), True),
        **dict.fromkeys(("user", "human", "system", "tool", "environment"), False),
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


class _Utterances(NamedTuple):
    sequence: Sequence[Utterance]
    terminal: bool = True
    roles: Sequence[str] = ()


class Dialogue(_Utterances, Language_Observation):
    """A sequence of utterances, and whether it is over: an observation like an environment's.

    roles: of the utterances, for chat templates; none: "assistant" is the agent's, "user" the rest.

    >>> Dialogue([("hi", None), ("hello", 1.0)]).to_sequence()
    ([('hi', None), ('hello', 1.0)], True)
    """

    def to_sequence(self) -> tuple[Sequence[Utterance], bool]:
        """The utterances, each with the agent's reward or None; whether it is over."""
        return self.sequence, self.terminal

    def __str__(self) -> str:
        return "\n".join(text for text, _ in self.sequence)


class TokenRow(NamedTuple):
    """A row that is tokens already.

    >>> TokenRow([1, 5, 3], [0, 1], [0.0, 1.0]).terminal
    True
    """

    tokens: list[int]
    action_idxs: list[int]
    rewards: list[float]
    terminal: bool = True


def dialogue_of(
    row: Mapping[str, Any], location: Location, roles: Mapping[str, bool]
) -> Dialogue | TokenRow:
    """The dialogue of an object, or its tokens; raises MalformedDataError.

    Other entries than those of the form are left alone, but for one whose name is nearly right.

    >>> found = dialogue_of({"sequence": [["hi", None]]}, Location("a.jsonl", "line 1"), ROLES)
    >>> found.to_sequence()
    ([('hi', None)], True)
    """
    row = {name: value for name, value in row.items() if value is not None}
    form, terminal = _form_of(row, location), row.get("terminal", True)
    if type(terminal) is not bool:
        location.fail(
            f"{_found(terminal)}, but expected true or false (whether the dialogue ended)",
            "terminal",
        )
    match form:
        case "messages" | "conversations":
            found = dialogue_of_messages(row[form], location, roles, row.get("reward"))
            return found._replace(terminal=terminal)
        case "prompt":
            for name in ("prompt", "response"):
                if not isinstance(row.get(name), str):
                    location.fail(
                        f"{_found(row.get(name))}, but expected a text; the row has {sorted(row)}. "
                        f'For a column with another name: columns={{"answer": {name!r}}}',
                        name,
                    )
            sequence = [(row["prompt"], None), (row["response"], row.get("reward", 0.0))]
        case "sequence":
            sequence = row["sequence"]
        case "utterances":
            texts = _listed(row, "utterances", str, location)
            rewards = _rewards(row, len(texts), "utterances (null for the environment)", location)
            sequence = list(zip(texts, rewards, strict=True))
        case _:
            return _token_row(row, location, terminal)
    return Dialogue(_checked(sequence, location, form), terminal)


def _form_of(row: Mapping[str, Any], location: Location) -> str:
    """The form of a row, which has no unknown name, and none that nearly equals a known one."""
    forms = [form for form in FORMS if form in row]
    if len(forms) != 1:
        found = f"it has {sorted(row)}" if not forms else f"it has {' and '.join(forms)}"
        location.fail(
            f'{found}; a row must have one of {sorted(FORMS)}: {{"messages": [{{"role": "user", '
            '"content": "hi"}, {"role": "assistant", "content": "hello", "reward": 1.0}]}. For a '
            'column with another name: columns={"conversation": "messages"}; to leave one out: '
            'columns={"tokens": None}'
        )
    allowed = FORMS[forms[0]]
    for name in [name for name in row if name not in allowed]:
        if name in KNOWN:
            location.fail(f"it cannot be combined with {sorted(allowed & row.keys())}", name)
        near = nearest(name, allowed, cutoff=NEAR)
        if near is not None and near not in row:
            location.fail(
                f"did you mean {near!r}? To leave it out: columns={{{name!r}: None}}", name
            )
    return forms[0]


def dialogue_of_messages(
    messages: Any, location: Location, roles: Mapping[str, bool], reward: Any = None
) -> Dialogue:
    """The dialogue of a chat transcript, which is over; an agent's message without a reward has 0.

    reward: of the whole conversation, for the agent's last message.

    >>> chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    >>> found = dialogue_of_messages(chat, Location("the list", "row 0"), ROLES, reward=0.5)
    >>> found.sequence, found.roles
    ([('hi', None), ('hello', 0.5)], ('user', 'assistant'))
    """
    if not isinstance(messages, list):
        location.fail(f"{_found(messages)}, but expected a list of messages", "messages")
    if not messages:
        location.fail("it contains no messages", "messages")
    found: list[Utterance] = []
    of_template: list[str] = []
    rewarded = False
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            location.fail(
                f'message {number} is {_found(message)}, but must be {{"role": ..., "content": '
                "...}",
                "messages",
            )
        message = {name: value for name, value in message.items() if value is not None}
        for theirs, ours in OF_SHARED.items():
            if ours not in message and theirs in message:
                message = {(ours if name == theirs else name): v for name, v in message.items()}
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in roles:
            location.fail(
                f"the role of message {number} is {_found(role)}, but known roles are "
                f'{sorted(roles)}; to add roles: roles={{"bot": True, "caller": False}}, with '
                "True for the agent",
                "messages",
            )
        if not isinstance(content, str):
            location.fail(
                f"the content of message {number} is {_found(content)}, not a text", "messages"
            )
        for name in [name for name in message if name not in OF_MESSAGES]:
            near = nearest(name, OF_MESSAGES, cutoff=NEAR)
            if near is not None and near not in message:
                location.fail(f"message {number} has {name!r}: did you mean {near!r}?", "messages")
        own = message.get("reward")
        if own is not None and not roles[role]:
            location.fail(
                f"message {number} has a reward and the role {role!r}, but only messages of the "
                "agent can have one. A reward for the environment's answer belongs to the message "
                "before it",
                "messages",
            )
        rewarded = rewarded or own is not None
        found.append((content, (0.0 if own is None else own) if roles[role] else None))
        of_template.append(chat_role(role, roles[role]))
    if reward is not None:
        last = max((at for at, (_, own) in enumerate(found) if own is not None), default=None)
        if rewarded or last is None:
            why = "its messages have rewards" if rewarded else "none of its messages is the agent's"
            location.fail(f"the row has a reward, but {why}: give one or the other", "reward")
        found[last] = found[last][0], reward
    return Dialogue(_checked(found, location, "messages"), roles=tuple(of_template))


def _checked(sequence: Any, location: Location, column: str) -> list[Utterance]:
    """The utterances, if they are what an environment could show."""
    try:
        check_sequence(sequence, True)
    except ValueError as error:
        location.fail(str(error), column)
    if not sequence:
        location.fail("it contains no utterances", column)
    return [(text, reward) for text, reward in sequence]


def _token_row(row: Mapping[str, Any], location: Location, terminal: bool) -> TokenRow:
    actions = _listed(row, "action_idxs", int, location)
    rewards = _rewards(row, len(actions), "action_idxs", location)
    for number, reward in enumerate(rewards):
        if why := wrong_reward(reward):
            location.fail(f"the reward {number} {why}", "rewards")
    return TokenRow(_listed(row, "tokens", int, location), actions, rewards, terminal)


def _rewards(row: Mapping[str, Any], num: int, of: str, location: Location) -> list[Any]:
    rewards = row.get("rewards", [] if not num else None)
    if not isinstance(rewards, list):
        location.fail(f"{_found(rewards)}, but expected a list of numbers", "rewards")
    if len(rewards) != num:
        location.fail(
            f"there are {len(rewards)} rewards for {num} {of}; give one for each", "rewards"
        )
    return rewards


def _listed(row: Mapping[str, Any], name: str, kind: type, location: Location) -> list[Any]:
    values = row.get(name, [])
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        what = "texts" if kind is str else "whole numbers"
        location.fail(f"{_found(values)}, but expected a list of {what}", name)
    return values


def _found(value: Any) -> str:
    return "nothing" if value is None else shown(value)
