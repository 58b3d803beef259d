"""The game against recorded cases, and properties of any game."""

import json
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raffia.lm.envs.wordle.data import wordle_letter_tokenizer
from raffia.lm.envs.wordle.game import (
    Wordle,
    WordleEnv,
    WordleObservation,
    code_of,
    color_codes,
    colors,
    colors_of,
)
from raffia.lm.envs.wordle.vocabulary import Vocabulary

ORACLES = Path(__file__).parent / "oracles"
PAIRS = json.loads((ORACLES / "wordle_colors.json").read_text())
RECORDED = json.loads((ORACLES / "wordle_games.json").read_text())
BUILT_IN = Vocabulary.built_in()
OF_RULE = {rule: Wordle(vocabulary=BUILT_IN, rule=rule) for rule in ("newspaper", "paper")}

few_letters = st.text("abce", min_size=5, max_size=5)  # so that letters repeat
any_letters = st.text("abcdefghijklmnopqrstuvwxyz", min_size=5, max_size=5)
words = few_letters | any_letters
rules = st.sampled_from(["newspaper", "paper"])


def test_colors_of_recorded_pairs():
    for pair in PAIRS:
        assert colors(pair["secret"], pair["guess"]) == pair["nyt"], pair
        assert colors(pair["secret"], pair["guess"], "paper") == pair["paper"], pair
    assert sum(pair["nyt"] != pair["paper"] for pair in PAIRS) == 24


@given(st.lists(words, min_size=1, max_size=4), st.lists(words, min_size=1, max_size=3), rules)
@settings(max_examples=50, deadline=None)
def test_the_table_is_the_rule_for_each_pair(secrets, guesses, rule):
    codes = color_codes(tuple(secrets), tuple(guesses), rule)
    for row, guess in zip(codes, guesses, strict=True):
        for code, secret in zip(row, secrets, strict=True):
            assert colors_of(int(code)) == colors(secret, guess, rule)
            assert code_of(colors_of(int(code))) == code


@given(words, words)
def test_newspaper_colors_count_copies(secret, guess):
    row = colors(secret, guess)
    for letter in set(guess):
        marked = sum(g == letter and c != "b" for g, c in zip(guess, row, strict=True))
        assert marked == min(guess.count(letter), secret.count(letter))
    assert [c == "g" for c in row] == [g == s for g, s in zip(guess, secret, strict=True)]


@pytest.mark.parametrize("number", range(len(RECORDED["games"])))
def test_recorded_games(number):
    recorded = RECORDED["games"][number]
    wordle = Wordle.as_published(Vocabulary(tuple(RECORDED["vocab"])))
    observation, fits = WordleObservation(), wordle.fitting(())
    for step in recorded["steps"]:
        assert not observation.terminal
        row = wordle.answer(step["guess"], step["secret"])
        fits = wordle.fitting([(step["guess"], row)], fits)
        observation = observation.after(step["guess"], row)
        assert (row, fits.sum()) == (step["colors"], step["left"])
        assert (observation.rewards()[-1], observation.terminal) == (step["reward"], step["done"])
        assert fits[wordle.vocabulary.number(step["secret"])]
    utterances, terminal = observation.to_sequence()
    assert [list(utterance) for utterance in utterances] == recorded["sequence"]
    assert terminal == recorded["terminal"]
    assert len(wordle.words_left(observation.turns)) == recorded["steps"][-1]["left"]
    assert WordleObservation.from_sequence(utterances) == observation
    tokenizer = wordle_letter_tokenizer()
    row = [tokenizer.boa_token_id]
    for text, reward in recorded["sequence"]:
        end = tokenizer.eos_token_id if reward is None else tokenizer.eoa_token_id
        row += [*tokenizer.encode(text), end]
    assert [*row, tokenizer.eod_token_id] == recorded["tokens"]


@given(st.integers(0, 2**62), st.lists(st.sampled_from(BUILT_IN.words), max_size=6), rules)
@settings(max_examples=40, deadline=None)
def test_the_answers_of_an_env_always_leave_a_secret(seed, guesses, rule):
    wordle = OF_RULE[rule]
    env = WordleEnv(wordle)
    observation = env.reset(seed)
    for guess in guesses:
        if env.is_terminal():
            break
        before = env.words_left()
        observation, reward, done = env.step(guess)
        assert set(env.words_left()) <= set(before)
        assert done == env.is_terminal() == observation.terminal
        assert reward == (0.0 if observation.won else -1.0)
    assert env.words_left() == wordle.words_left(observation.turns)
    for word in env.words_left():  # each of them would have got the same answers
        assert all(row == colors(word, guess, rule) for guess, row in observation.turns)


def test_an_invalid_guess_costs_a_try_and_gives_no_information():
    wordle = Wordle(vocabulary=Vocabulary(("crane", "crown")))
    for guess in ("", "cran", "cranes", "slate", "CRANE", "cr ne", "crané", "<b><b><b><b><b>"):
        env = WordleEnv(wordle)
        env.reset(0)
        observation, reward, done = env.step(guess)
        assert (observation.turns, reward, done) == (((guess, "bbbbb"),), -1.0, False)
        assert env.words_left() == ("crane", "crown")
    wordle = Wordle(vocabulary=Vocabulary(("crane", "crown")), known_words_only=False)
    assert wordle.answer("nnnnn", "crane") == "bbbgb"  # any five letters, as an option
    assert wordle.words_left([("nnnnn", "bbbgb")]) == ("crane",)
    assert not any(wordle.is_valid(guess) for guess in ("CRANE", "cran1", "crané", "crane "))


def test_the_vocabulary_and_wrong_arguments():
    assert 600 <= len(BUILT_IN) <= 700 and list(BUILT_IN) == sorted(set(BUILT_IN))
    assert all(len(word) == 5 and word.isascii() and word.islower() for word in BUILT_IN)
    few, more = BUILT_IN.subset(20, seed=3), BUILT_IN.subset(60, seed=3)
    assert set(few) < set(more) and few == BUILT_IN.subset(20, seed=3)
    assert few != BUILT_IN.subset(20, seed=4)
    wordle, observation_of = (
        partial(Wordle, vocabulary=Vocabulary(("crane",))),
        WordleObservation.from_sequence,
    )
    env = WordleEnv(Wordle(vocabulary=Vocabulary(("crane", "crown")), num_tries=2))
    env.reset(0)
    assert [env.step("slate")[2], env.step("slate")[2]] == [False, True]
    for call, kind, message in (
        (lambda: BUILT_IN.subset(0), ValueError, r"num_words=0 must be in 1\.\."),
        (lambda: Vocabulary(()), ValueError, "a vocabulary must have at least one word"),
        (lambda: WordleEnv(wordle()).step("crane"), RuntimeError, "first"),
        (lambda: wordle(rule="times"), ValueError, "='times' must be one of 'newspaper', 'paper'"),
        (lambda: wordle(num_tries=0), ValueError, "num_tries=0"),
        (lambda: wordle().answer("crane", "robot"), ValueError, "'robot' is not in the vocabulary"),
        (lambda: env.step("crane"), RuntimeError, r"over; call reset\(seed\)"),
        (
            lambda: observation_of([("crane", 0.0), ("<g><g><g>", None)]),
            ValueError,
            "'ggg' is not a row of",
        ),
        (
            lambda: observation_of([("<g><g><g><g><g>", None)]),
            ValueError,
            "is not the answer to a guess",
        ),
    ):
        with pytest.raises(kind, match=message):
            call()
    assert env.reset(0).turns == () and not env.is_terminal()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("crane\n\nslates\n", r"words.txt:3: 'slates' is no word .* five|5 letters"),
        ("crane\nSlate\n", r"words.txt:2: 'Slate' is not a word"),
        ("# mine\ncrane\nslate\ncrane\n", r"words.txt:4: 'crane' .* duplicate of .*txt:2"),
        ("# nothing\n", "words.txt contains no words"),
        (b"cr\xffne\n", "words.txt is not text in UTF-8"),
    ],
)
def test_a_bad_file_of_words_is_refused_with_its_line(tmp_path, text, complaint):
    path = tmp_path / "words.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=complaint):
        Vocabulary.from_file(path)
