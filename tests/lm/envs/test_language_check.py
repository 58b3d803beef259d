"""The contract suite passes what keeps the contract, and names what does not."""

import itertools

import pytest

from raffia.lm.envs.check import check_language_environment
from raffia.lm.envs.contract import Language_Environment, Language_Observation
from raffia.lm.envs.wordle.env import WordleEnv
from raffia.lm.envs.wordle.game import Wordle
from raffia.lm.envs.wordle.tokens import wordle_letter_tokenizer
from raffia.lm.envs.wordle.vocabulary import Vocabulary
from raffia.lm.tokenizers.tokenizer import character_tokenizer

WORDS = ("crane", "slate", "crown", "adieu")


class Dialogue(Language_Observation):
    def __init__(self, sequence, terminal):
        self.sequence, self.terminal = sequence, terminal

    def to_sequence(self):
        return self.sequence, self.terminal

    def __str__(self):
        return str(self.sequence)


class Count(Language_Environment):
    """Two turns; asks for the number that the seed says. A subclass breaks one thing each."""

    def reset(self, seed):
        self.goal = str(seed % 2)
        self.turns = 0
        self.observation = self.first(seed)
        return self.observation

    def first(self, seed):
        return Dialogue((("which?", None),), False)

    def step(self, action):
        if self.is_terminal():
            raise RuntimeError("it is over: reset(seed)")
        self.turns += 1
        reward = float(action == self.goal)
        self.observation = self.after(action, reward)
        return self.observation, reward, self.is_terminal()

    def after(self, action, reward):
        answer = (action, reward), ("good" if reward else "bad", None)
        return Dialogue((*self.observation.sequence, *answer), self.turns == 2)

    def is_terminal(self):
        return self.turns == 2


class NoEnd(Count):
    def step(self, action):
        self.turns = min(self.turns, 1)
        return super().step(action) if self.turns < 1 else (self.observation, 0.0, False)


class Forgets(Count):
    def after(self, action, reward):
        return Dialogue(((action, reward), ("so", None)), self.turns == 2)


class WithoutTheAction(Count):
    def after(self, action, reward):
        return Dialogue((*self.observation.sequence, ("so", None)), self.turns == 2)


class OtherReward(Count):
    def after(self, action, reward):
        return Dialogue((*self.observation.sequence, (action, reward - 1)), self.turns == 2)


class OtherEnd(Count):
    def after(self, action, reward):
        return Dialogue((*self.observation.sequence, (action, reward)), False)


class GoesOn(Count):
    def step(self, action):
        self.turns = min(self.turns, 1)
        return super().step(action)


class ByChance(Count):
    numbers = itertools.count()

    def first(self, seed):
        return Dialogue(((f"which, {next(self.numbers)}?", None),), False)


class InPlace(Count):
    def first(self, seed):
        return Dialogue([("which?", None)], False)

    def after(self, action, reward):
        self.observation.sequence.append((action, reward))
        return Dialogue(self.observation.sequence, self.turns == 2)


class NoText(Count):
    def first(self, seed):
        return Dialogue(((seed, None),), False)


class NotANumber(Count):
    def after(self, action, reward):
        return Dialogue((*self.observation.sequence, (action, float("nan"))), self.turns == 2)


class Broken(Count):
    def after(self, action, reward):
        raise ZeroDivisionError("of its own")


class Tensors(Count):
    def first(self, seed):
        observation = super().first(seed)
        observation.metadata = lambda: {"seed": {seed}}
        return observation


def test_an_env_that_keeps_the_contract():
    report = check_language_environment(Count, ["0", "1"])
    assert report.ok and "note" not in str(report)
    report.require()


def test_wordle_keeps_the_contract():
    for wordle in (
        Wordle(vocabulary=Vocabulary(WORDS)),
        Wordle.as_published(Vocabulary(WORDS)),
    ):
        report = check_language_environment(
            lambda wordle=wordle: WordleEnv(wordle),
            [*WORDS, "toolong", "robot"],
            tokenizer=wordle_letter_tokenizer(),
        )
        assert "note" not in str(report)
        report.require()


@pytest.mark.parametrize(
    ("env", "complaint"),
    [
        (Forgets, "growth: earlier utterances are gone"),
        (WithoutTheAction, "growth: the action was '[01]', and .*'so'"),
        (OtherReward, "rewards: step gave the reward"),
        (OtherEnd, "ends: done=True, is_terminal.*terminal=False"),
        (GoesOn, "after the end: a step after the end gave no error"),
        (ByChance, "seeds repeat: the dialogue with seed 0 was another one"),
        (NoText, "utterances: utterance 0 is"),
        (NotANumber, "utterances: the reward of utterance 1 is nan"),
        (Broken, "steps: raised ZeroDivisionError: of its own"),
        (Tensors, "metadata: .* is not JSON"),
    ],
)
def test_what_breaks_the_contract_is_named(env, complaint):
    report = check_language_environment(env, ["0", "1"])
    assert not report.ok
    with pytest.raises(AssertionError, match=complaint):
        report.require()


def test_observations_that_change_are_seen():
    report = check_language_environment(InPlace, ["0", "1"])
    assert not report.ok and "memory" in str(report) or "growth" in str(report)


def test_an_env_without_an_end_is_noted():
    report = check_language_environment(NoEnd, ["0", "1"], max_steps=1)
    assert report.ok and "note   ends: no dialogue ended in 1 steps" in str(report)


def test_a_tokenizer_that_lacks_tokens_is_seen():
    report = check_language_environment(Count, ["0", "1"], tokenizer=character_tokenizer(["01"]))
    assert not report.ok and "tokens: there is no token for" in str(report)


def test_nothing_to_say():
    with pytest.raises(ValueError, match="actions is empty"):
        check_language_environment(Count, [])
