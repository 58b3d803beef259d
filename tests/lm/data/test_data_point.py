"""Dialogues as rows of tokens: the numeric cases, cut rows, refused rows."""

import math

import pytest

from raffia.lm.data.data_point import DataPoint
from raffia.lm.data.dialogue import (
    ConstantTokenReward,
    Dialogue,
    SpecifiedTokenReward,
    TokenReward,
)

NAMES = ["tokens", "action_idxs", "state_idxs", "rewards", "terminals"]
FIELDS = {name: name for name in NAMES}
FIELDS |= {f"u_{name}": f"utterance_{name}" for name in NAMES[1:]}


def check(point, expected):
    for name, values in expected.items():
        if name in FIELDS:
            found = getattr(point, FIELDS[name])
            assert found == pytest.approx(values, abs=1e-12), name


def test_the_numeric_cases(cases, tokenizer):
    for case in cases["datapoints"]:
        reward = ConstantTokenReward(case["token_reward"])
        dialogue = Dialogue(case["sequence"], case["terminal"])
        point = DataPoint.from_obs(dialogue, tokenizer, reward, max_len=case["max_len"])
        check(point, case["expect"])


class Short(TokenReward):
    def get_token_reward(self, tokens):
        return [0.0]

    def settings(self):
        return {}


class Shouting(SpecifiedTokenReward):
    def get_token_reward(self, tokens):
        return [math.nan] * len(tokens)


def row_of(tokens, actions, rewards):
    return lambda _: DataPoint.from_tokens(tokens, actions, rewards)


def row_of_dialogue(*dialogue, reward=None):
    return lambda letters: DataPoint.from_obs(Dialogue(*dialogue), letters, reward)


REFUSED = [
    (row_of([], [], []), "a row must have at least one token"),
    (row_of([1, 5, 3], [0, 1], [0.0]), "1 rewards for 2 actions: pass"),
    (row_of([1, 5, 3], [2], [0.0]), "must be increasing and lie"),
    (row_of([1, 5, 3], [-1], [0.0]), "must be increasing and lie"),
    (row_of([1, 5, 3], [0, 0], [0.0, 0.0]), "must be increasing and lie"),
    (row_of([1, 5], [0], [math.nan]), "reward 0 is nan, but rewards must be fin"),
    (lambda _: DataPoint.from_tokens([1], [], []).cut(0), "max_len=0 must be at least 1"),
    (
        row_of_dialogue([("a", 1.0)], False, reward=Short()),
        "Short.get_token_reward returned 1 rewards for 3",
    ),
    (row_of_dialogue([("a", 1.0)], False, reward=Shouting({})), "reward 0 is nan"),
    (row_of_dialogue([("a", "1")]), "the reward of utterance 0 is '1', not a number or None"),
    (row_of_dialogue([("a", True)]), "the reward of utterance 0 is True"),
    (row_of_dialogue([("a", None), ("b", math.inf)]), "the reward of utterance 1 is inf"),
    (row_of_dialogue([("a", 10**400)]), "the reward of utterance 0 is 1000.*which is not finite"),
    (row_of_dialogue(["ab"]), "utterance 0 is 'ab'; a sequence must be a list of pairs"),
    (row_of_dialogue([(b"a", None)]), "utterance 0 is"),
    (row_of_dialogue("ab"), "'ab' is not a list of utterances"),
    (row_of_dialogue([], None), "its second value is None, but must be True or False"),
    (row_of_dialogue([("a</a>b", None)]), r"'a</a>b' contains the eoa token \(30\)"),
    (lambda _: SpecifiedTokenReward({"a": 1.0}), "given by token ids; got 'a'"),
]


def test_invalid_rows_are_refused(tokenizer):
    for call, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            call(tokenizer)
    for reward in (math.nan, math.inf, True, "1"):
        with pytest.raises(ValueError, match="must be a finite number; got"):
            ConstantTokenReward(reward)
        with pytest.raises(ValueError, match="the reward of token 3 must be a finite"):
            SpecifiedTokenReward({3: reward})
    with pytest.raises(TypeError, match=r"'hi' is not an obs.* no to_sequence\(\): pass"):
        DataPoint.from_obs("hi", tokenizer)


def test_tables_of_token_rewards(tokenizer):
    table = SpecifiedTokenReward({0: 1.0, 30: 0.5}, scale=2.0, shift=-0.25)
    point = DataPoint.from_obs(Dialogue([("a", None), ("ab", -3.0)]), tokenizer, table)
    assert point.rewards == [1.75, -0.25, 0.75 - 3.0]
    table = SpecifiedTokenReward({5: 1.0, 3: 0.5})
    point = DataPoint.from_tokens([1, 5, 3], [0, 1], [0.0, 2.0], token_reward=table)
    assert (point.rewards, point.utterance_rewards) == ([1.0, 2.5], [3.5])


def test_the_rows_of_the_exact_task(cases, exact_tokenizer):
    for row in cases["exact_rows"]:
        point = DataPoint.from_obs(Dialogue(row["sequence"]), exact_tokenizer)
        check(point, row)
        assert point.episode_return == pytest.approx(row["ret"])
