"""The contract suite passes a valid environment and names each violation."""

import itertools

import pytest

from raffia.lm.data import dialogue as data
from raffia.lm.envs.check import check_language_environment
from raffia.lm.envs.contract import Language_Environment, Language_Observation
from raffia.lm.envs.play import dialogue_row
from raffia.lm.envs.wordle.data import wordle_letter_tokenizer
from raffia.lm.envs.wordle.game import Wordle, WordleEnv
from raffia.lm.envs.wordle.vocabulary import Vocabulary
from raffia.lm.tokenizers.tokenizer import character_tokenizer


def test_a_valid_env_passes_with_notes():
    report = check_language_environment(Count, ["0", "1"])
    assert report.ok and "note" not in str(report)
    report.require()
    report = check_language_environment(Count, ["0", "1"], max_steps=1)
    assert report.ok and "note   ends: no dialogue ended within 1 steps" in str(report)
    report = check_language_environment(Count, ["0", "1"], tokenizer=character_tokenizer(["01"]))
    assert not report.ok and "tokens: there is no token for" in str(report)
    with pytest.raises(ValueError, match="actions is empty"):
        check_language_environment(Count, [])


def test_the_dialogue_of_data_sets_is_a_valid_observation():
    class Desk(Count):
        def first(self, seed):
            return data.Dialogue([("which?", None)], terminal=False)

        def after(self, action, reward):
            sequence = [*self.observation.sequence, (action, reward)]
            return data.Dialogue(sequence, terminal=self.is_terminal())

    check_language_environment(Desk, ["0", "1"]).require()
    played = Desk().reset(0)
    assert str(played) == "which?" and dialogue_row(played)["metadata"] == {}
    assert list(played) == [[("which?", None)], False, ()] and played == tuple(played)


WORDS = ("crane", "slate", "crown", "adieu")


class Dialogue(Language_Observation):
    def __init__(self, sequence, terminal):
        self.sequence, self.terminal = sequence, terminal

    def to_sequence(self):
        return self.sequence, self.terminal

    def __str__(self):
        return str(self.sequence)


class Count(Language_Environment):
    """Two turns; asks for the number given by the seed. Each subclass breaks one rule."""

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


def replies_with(*utterances, terminal=None):
    """Returns these utterances after an action, in place of the whole dialogue and the answer."""

    def after(self, action, reward):
        before = self.observation.sequence
        sequence = [u(before, action, reward) if callable(u) else u for u in utterances]
        flat = [x for u in sequence for x in (u if u and isinstance(u[0], tuple) else (u,))]
        return Dialogue(tuple(flat), self.turns == 2 if terminal is None else terminal)

    return {"after": after}


def before(sequence, action, reward):
    return sequence


def answer(sequence, action, reward):
    return action, reward


def continues(self, action):
    self.turns = min(self.turns, 1)
    return Count.step(self, action)


def in_place(self, action, reward):
    self.observation.sequence.append((action, reward))
    return Dialogue(self.observation.sequence, self.turns == 2)


def fails(self, action, reward):
    raise ZeroDivisionError("of its own")


def first(*utterances):
    return {"first": lambda self, seed: Dialogue(list(utterances), False)}


def with_tensors(self, seed):
    observation = Count.first(self, seed)
    observation.metadata = lambda: {"seed": {seed}}
    return observation


def of_kind(**overrides):
    return type("Other", (Count,), overrides)


NUMBERS = itertools.count()
BROKEN = {  # the overridden methods and the complaint
    "forgets": (replies_with(answer, ("so", None)), "growth: earlier utterances are gone"),
    "no action": (replies_with(before, ("so", None)), "growth: the action was '[01]', but .*'so'"),
    "wrong reward": (
        replies_with(before, lambda _, action, reward: (action, reward - 1)),
        "rewards: step returned the reward",
    ),
    "wrong end": (
        replies_with(before, answer, terminal=False),
        "ends: done=True, is_terminal.*terminal=False",
    ),
    "continues": ({"step": continues}, "after the end: a step after the end raised no error"),
    "random": (
        {"first": lambda self, seed: Dialogue(((f"which, {next(NUMBERS)}?", None),), False)},
        "seeds repeat: the dialogue with seed 0 was different",
    ),
    "no text": (first((0, None)), "utterances: utterance 0 is"),
    "no number": (
        replies_with(before, lambda _, action, reward: (action, float("nan"))),
        "utterances: the reward of utterance 1 is nan",
    ),
    "broken": ({"after": fails}, "steps: raised ZeroDivisionError: of its own"),
    "tensors": ({"first": with_tensors}, "metadata: .* is not JSON"),
    "in place": ({**first(("which?", None)), "after": in_place}, "memory|growth"),
}


def test_wordle_passes():
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


@pytest.mark.parametrize("name", BROKEN)
def test_violations_of_the_contract_are_named(name):
    overrides, complaint = BROKEN[name]
    report = check_language_environment(of_kind(**overrides), ["0", "1"])
    assert not report.ok
    with pytest.raises(AssertionError, match=complaint):
        report.require()
