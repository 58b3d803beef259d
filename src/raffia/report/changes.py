"""Changes of a member by selection, in words."""

from __future__ import annotations

_LONGEST = 200  # characters
_WORDS = {  # by kind of mutation, the words before what it changed
    "hyper": "",
    "parameters": "noise on ",
    "activation": "activation of ",
    "architecture": "",
}
_HEADS = {  # of both agents, by what stands in their networks' names
    "fc_value_head": "the value head",
    "fc_value": "the value head",
    "fc_policy_head": "the policy head",
    "fc_policy": "the policy head",
    "fc_reward_head": "the head of the value prefix",
    "v": "head V",
    "q1": "head Q1",
    "q2": "head Q2",
}


def in_words(kind: str, what: str) -> str:
    """A change, as a row of a generation has it, for the page.

    >>> in_words("architecture", "prediction_network.fc_policy_head.net: 16 nodes more in layer 0")
    'the policy head: 16 nodes more in layer 0'
    >>> in_words("activation", "q1: relu -> tanh")
    'activation of head Q1: relu → tanh'
    """
    if not what:
        return kind[:20]
    if kind in ("activation", "architecture"):
        network, colon, how = what.partition(":")
        named = [_HEADS[part] for part in network.split(".") if part in _HEADS]
        what = named[0] + colon + how if named else what
    return _WORDS.get(kind, f"{kind[:20]}: ") + what[:_LONGEST].replace("->", "→")
