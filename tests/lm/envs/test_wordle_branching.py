"""Tabular values of small data sets, and a set on which one step of improvement is not enough."""

import json
from pathlib import Path

import pytest

from raffia.lm.envs.contract import Language_Observation
from raffia.lm.envs.tabular import TabularPolicy, expectile, tabular_values
from raffia.lm.envs.wordle.data import (
    branching_games,
    branching_scripts,
    first_words,
    wordle_letter_tokenizer,
    wordle_word_tokenizer,
)
from raffia.lm.envs.wordle.game import Wordle, WordleObservation
from raffia.lm.envs.wordle.play import evaluate
from raffia.lm.envs.wordle.vocabulary import Vocabulary
from raffia.lm.tokenizers.tokenizer import character_tokenizer

EXACT = json.loads((Path(__file__).parent / "oracles" / "exact_values.json").read_text())
WORDLE = Wordle(vocabulary=Vocabulary.built_in().subset(24))


class Utterances(Language_Observation):
    def __init__(self, sequence, terminal=True):
        self.sequence, self.terminal = sequence, terminal

    def to_sequence(self):
        return [tuple(utterance) for utterance in self.sequence], self.terminal

    def __str__(self):
        return str(self.sequence)


DIALOGUES = [Utterances(sequence) for count, sequence in EXACT["dialogues"] for _ in range(count)]


@pytest.mark.parametrize(
    "case", EXACT["values"], ids=lambda c: f"gamma {c['gamma']} tau {c['tau']}"
)
def test_values_by_tokens_are_those_of_the_exact_task(case):
    tokenizer = character_tokenizer(["abghklmnqrxy012389"])
    values = tabular_values(DIALOGUES, tau=case["tau"], gamma=case["gamma"], tokenizer=tokenizer)
    assert {" ".join(state) for state in values.v} == set(case["v"])
    for state, value in values.v.items():
        assert value == pytest.approx(case["v"][" ".join(state)], abs=1e-12)
        assert values.q[state] == pytest.approx(case["q"][" ".join(state)], abs=1e-12)
        assert sum(values.fraction[state].values()) == pytest.approx(1)
    by_utterances = tabular_values(DIALOGUES, tau=case["tau"], gamma=case["gamma"])
    if case["gamma"] == 1:
        assert by_utterances.v[("q",)] == pytest.approx(values.v[("q",)], abs=1e-12)
    policy = TabularPolicy(values, otherwise=TabularPolicy(by_utterances))
    with pytest.raises(KeyError, match="data lack the state"):
        policy.act(Utterances([("x", None)], terminal=False))


@pytest.mark.parametrize("tau", [0.1, 0.5, 0.7, 0.99])
def test_an_expectile_balances_the_values_above_and_below(tau):
    values, probs = [3.0, -1.0, 0.5, 2.0, -4.0], [0.1, 0.3, 0.2, 0.15, 0.25]
    m = expectile(values, probs, tau)
    above = sum(p * max(x - m, 0) for x, p in zip(values, probs, strict=True))
    below = sum(p * max(m - x, 0) for x, p in zip(values, probs, strict=True))
    assert tau * above == pytest.approx((1 - tau) * below)


def test_wrong_arguments_are_refused():
    policy = TabularPolicy(tabular_values(DIALOGUES, tau=0.5))
    unfinished = Utterances([("a", 1.0)], terminal=False)
    one_word = Wordle(vocabulary=Vocabulary(("crane",)))
    for call, kind, message in (
        (lambda: tabular_values(DIALOGUES, tau=0), ValueError, "tau=0 must be above 0"),
        (lambda: tabular_values([unfinished], tau=0.5), ValueError, "unfinished"),
        (
            lambda: policy.act(Utterances([("x", None)], terminal=False)),
            KeyError,
            "data lack the state",
        ),
        (
            lambda: branching_scripts(WORDLE, num_repeats=6),
            ValueError,
            "=6 leaves none of the 6 tr",
        ),
        (lambda: branching_scripts(WORDLE, num_slow=0), ValueError, "must be 1 or more"),
        (lambda: first_words(one_word), ValueError, "at least two words"),
    ):
        with pytest.raises(kind, match=message):
            call()


@pytest.mark.parametrize("num_words", [24, 48])
@pytest.mark.parametrize("layout", ["utterances", "words", "letters"])
def test_on_branching_games_one_step_of_improvement_is_not_enough(num_words, layout):
    wordle = Wordle(vocabulary=Vocabulary.built_in().subset(num_words))
    tokenizer = {
        "utterances": None,
        "words": wordle_word_tokenizer(wordle.vocabulary),
        "letters": wordle_letter_tokenizer(),
    }[layout]
    games = branching_games(wordle)
    good, other = first_words(wordle)
    mean = {}
    for tau in (0.5, 0.8, 0.9, 0.99):
        values = tabular_values(games, tau=tau, gamma=0.99, tokenizer=tokenizer)
        policy = TabularPolicy(values)
        assert policy.act(WordleObservation()) == (other if tau == 0.5 else good)
        if tau in (0.5, 0.9):
            mean[tau] = evaluate(policy, wordle, 60).mean_return
    cloning = sum(sum(game.game.rewards()) for game in games) / len(games)
    assert cloning + 0.5 < mean[0.5]  # BC < one step
    assert mean[0.5] + 1.5 < mean[0.9]  # one step < ILQL
