"""Dialogues as rows of tokens: the numeric cases, what is cut off, what is refused."""

import math

import pytest

from raffia.lm.data.data_point import DataPoint
from raffia.lm.data.dialogue import (
    ConstantTokenReward,
    Dialogue,
    SpecifiedTokenReward,
    TokenReward,
)

FIELDS = {
    "tokens": "tokens",
    "action_idxs": "action_idxs",
    "state_idxs": "state_idxs",
    "rewards": "rewards",
    "terminals": "terminals",
    "u_action_idxs": "utterance_action_idxs",
    "u_state_idxs": "utterance_state_idxs",
    "u_rewards": "utterance_rewards",
    "u_terminals": "utterance_terminals",
}
COLORS = "<b><g><b><y><b>"
GAME = [("arose", -1.0), (COLORS, None), ("drunk", -1.0), ("<b><g><b><b><b>", None)]
GAME += [("crimp", 0.0), ("<g><g><g><g><g>", None)]
BATCHES = {  # the sequences behind the rows of the numeric cases: text, terminal, token reward
    "A": [
        (GAME, True, 0.0, None),
        ([("arose", 0.0), ("<g><g><g><g><g>", None)], True, 0.0, None),
        ([("<b><b>", None), ("abc", 1.5), ("<g>", None), ("zzzz", -0.7)], True, 0.05, None),
    ],
    "B": [
        (GAME, True, 0.0, None),
        ([("arose", 0.0), ("<g><g><g><g><g>", None)], True, 0.0, None),
        (GAME[:4], False, 0.0, None),
        (GAME, True, 0.0, 20),
        ([(COLORS, None)], False, 0.0, None),
    ],
}


def check(point, expected):
    for name, values in expected.items():
        if name in FIELDS:
            found = getattr(point, FIELDS[name])
            assert found == pytest.approx(values, abs=1e-12), name


def test_the_numeric_cases(cases, tokenizer):
    for case in cases["datapoints"]:
        reward = ConstantTokenReward(case["token_reward"])
        found = Dialogue(case["sequence"], case["terminal"])
        point = DataPoint.from_obs(found, tokenizer, reward, max_len=case["max_len"])
        check(point, case["expect"])


@pytest.mark.parametrize("batch", ["A", "B"])
def test_the_batches_of_the_numeric_cases(cases, tokenizer, batch):
    for row, (sequence, terminal, reward, max_len) in zip(
        cases["batches"][batch], BATCHES[batch], strict=True
    ):
        dialogue = Dialogue(sequence, terminal)
        reward = ConstantTokenReward(reward)
        check(DataPoint.from_obs(dialogue, tokenizer, reward, max_len=max_len), row)


def test_the_rows_of_the_exact_task(cases, exact_tokenizer):
    for row in cases["exact_rows"]:
        point = DataPoint.from_obs(Dialogue(row["sequence"]), exact_tokenizer)
        check(point, row)
        assert point.episode_return == pytest.approx(row["ret"])
        again = DataPoint.from_tokens(
            row["tokens"], row["action_idxs"], row["rewards"], end_of_action=3
        )
        assert again == point


def test_tokens_made_elsewhere_have_the_same_utterances(cases, tokenizer):
    for case in cases["datapoints"]:
        expected = case["expect"]
        if case["max_len"] is None:
            point = DataPoint.from_tokens(
                expected["tokens"],
                expected["action_idxs"],
                expected["rewards"],
                terminal=case["terminal"],
                end_of_action=tokenizer.eoa_token_id,
            )
            check(point, expected)


def test_fractions_of_rewards_survive(tokenizer):
    """A reward of -0.5 for an utterance became 0 in a peer."""
    point = DataPoint.from_obs(Dialogue([("ab", -0.5), ("cd", 0.75)]), tokenizer)
    assert point.utterance_rewards == [-0.5, 0.75]
    assert point.rewards == [0.0, 0.0, -0.5, 0.0, 0.0, 0.75]


def test_a_row_of_nothing_that_is_over(tokenizer):
    point = DataPoint.from_obs(Dialogue([]), tokenizer)
    assert (point.tokens, point.state_idxs, point.terminals) == ([33, 34], [1], [1])


def test_a_cut_before_the_first_decision_leaves_one_state(tokenizer):
    point = DataPoint.from_obs(Dialogue([("abcdef", None), ("g", 1.0)]), tokenizer, max_len=4)
    assert (point.state_idxs, point.action_idxs, point.terminals) == ([3], [], [0])
    assert (point.utterance_state_idxs, point.utterance_rewards) == ([3], [])
    assert point.was_cut and point.episode_return == 1.0


@pytest.mark.parametrize("max_len", range(1, 40))
def test_cut_rows_have_whole_transitions_only(tokenizer, max_len):
    whole = DataPoint.from_obs(Dialogue(GAME), tokenizer)
    part = whole.cut(max_len)
    num = len(part.action_idxs)
    assert len(part.tokens) == min(max_len, len(whole.tokens))
    assert part.action_idxs == whole.action_idxs[:num]
    assert part.rewards == whole.rewards[:num]
    assert part.state_idxs == whole.state_idxs[: num + 1]
    assert part.state_idxs[-1] < len(part.tokens)
    assert (part.terminals[-1] == 1) == (max_len >= len(whole.tokens))
    assert len(part.utterance_rewards) == len(part.utterance_action_idxs)
    assert part.utterance_state_idxs[-1] < len(part.tokens)


def test_a_table_of_token_rewards(tokenizer):
    table = SpecifiedTokenReward({0: 1.0, 30: 0.5}, scale=2.0, shift=-0.25)
    point = DataPoint.from_obs(Dialogue([("a", None), ("ab", -3.0)]), tokenizer, table)
    assert point.rewards == [1.75, -0.25, 0.75 - 3.0]
    assert point.utterance_rewards == [pytest.approx(1.75 - 0.25 + 0.75 - 3.0)]


def test_token_rewards_go_with_tokens_that_were_made_elsewhere():
    table = SpecifiedTokenReward({5: 1.0, 3: 0.5})
    point = DataPoint.from_tokens([1, 5, 3], [0, 1], [0.0, 2.0], token_reward=table)
    assert (point.rewards, point.utterance_rewards) == ([1.0, 2.5], [3.5])


class Short(TokenReward):
    def get_token_reward(self, tokens):
        return [0.0]

    def settings(self):
        return {}


class Shouting(SpecifiedTokenReward):
    def get_token_reward(self, tokens):
        return [math.nan] * len(tokens)


ROW = DataPoint.from_tokens([1, 5, 3], [0], [1.0])
OPEN = Dialogue([("a", 1.0)], terminal=False)
REFUSED = [
    (lambda _: DataPoint.from_tokens([], [], []), "a row has no tokens"),
    (lambda _: DataPoint.from_tokens([1, 5, 3], [0, 1], [0.0]), "1 rewards for 2 actions: give"),
    *(
        (
            lambda _, at=at: DataPoint.from_tokens([1, 5, 3], at, [0.0] * len(at)),
            "must rise and lie",
        )
        for at in ([2], [-1], [0, 0], [1, 0])
    ),
    (lambda _: DataPoint.from_tokens([1, 5], [0], [math.nan]), "reward 0 is nan; rewards are fin"),
    (lambda _: ROW.cut(0), "max_len=0: a row has at least its first token"),
    (
        lambda letters: DataPoint.from_obs(OPEN, letters, Short()),
        "Short.get_token_reward gave 1 rewards for 3 tokens",
    ),
    (lambda letters: DataPoint.from_obs(OPEN, letters, Shouting({})), "reward 0 is nan"),
    *(
        (lambda letters, said=said: DataPoint.from_obs(Dialogue(*said), letters), message)
        for said, message in (
            (([("a", "1")],), "the reward of utterance 0 is '1', not a number or None"),
            (([("a", True)],), "the reward of utterance 0 is True"),
            (([("a", None), ("b", math.inf)],), "the reward of utterance 1 is inf"),
            (([("a", 10**400)],), "the reward of utterance 0 is 1000.*which is not finite"),
            ((["ab"],), "utterance 0 is 'ab'; a sequence is a list of pairs"),
            (([(b"a", None)],), "utterance 0 is"),
            (("ab",), "'ab' is no list of utterances"),
            (([], None), "its second value is None, which must be True or False"),
            (([("a</a>b", None)],), r"'a</a>b' holds the eoa token \(30\)"),
        )
    ),
    *(
        (call, message)
        for reward in (math.nan, math.inf, True, "1")
        for call, message in (
            (lambda _, r=reward: ConstantTokenReward(r), "is a finite number, got"),
            (lambda _, r=reward: SpecifiedTokenReward({3: r}), "the reward of token 3 is a finite"),
        )
    ),
    (lambda _: SpecifiedTokenReward({"a": 1.0}), "given by the numbers of tokens, got 'a'"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_a_row_refuses(tokenizer, call, message):
    with pytest.raises(ValueError, match=message):
        call(tokenizer)


def test_a_text_is_no_observation(tokenizer):
    with pytest.raises(TypeError, match=r"'hi' is no observation, it has no to_sequence\(\): pass"):
        DataPoint.from_obs("hi", tokenizer)
