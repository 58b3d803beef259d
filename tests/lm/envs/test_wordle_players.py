"""Scripted players, batches of games, data sets, evaluation."""

import json
import math

import numpy as np
import pytest

from raffia.lm.envs.draws import Draws
from raffia.lm.envs.play import play_dialogues, write_dialogues
from raffia.lm.envs.wordle.data import Part, sample_games
from raffia.lm.envs.wordle.game import Wordle, WordleEnv, WordleObservation, colors
from raffia.lm.envs.wordle.games import game_seeds, simulate
from raffia.lm.envs.wordle.play import Player, evaluate, evaluation_of
from raffia.lm.envs.wordle.policies import (
    Fitting,
    InformationGain,
    Mixture,
    NonWord,
    Positions,
    RandomWord,
    Repeat,
    Say,
    Switch,
    Wrong,
    information,
    start_word,
)
from raffia.lm.envs.wordle.vocabulary import Vocabulary

WORDLE = Wordle(vocabulary=Vocabulary.built_in().subset(60, seed=1))
FIRST = WORDLE.vocabulary[0]
HALF_RANDOM = Mixture((RandomWord(), Fitting()), (1, 1), each="guess")
SCRIPTS = {
    "random": RandomWord(),
    "fitting": Fitting(),
    "wrong": Wrong(),
    "non-words": Mixture((NonWord(), Fitting()), (1, 2), each="guess"),
    "repeat": Repeat(Fitting(), num_first=2),
    "start word": start_word(FIRST, Fitting()),
    "switch": Switch(Wrong(), 3, InformationGain()),
    "best": InformationGain(),
    "mixture": Mixture((HALF_RANDOM, InformationGain()), (1, 3)),
}


class Replay:
    """Repeats a game's guesses, to play it again in an env."""

    def __init__(self, guesses):
        self.guesses = iter(guesses)

    def act(self, observation):
        return next(self.guesses)


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("wordle", [WORDLE, Wordle.as_published(WORDLE.vocabulary)])
def test_batched_games_equal_those_of_the_env_and_do_not_depend_on_each_other(name, wordle):
    seeds = game_seeds(5, 40)
    games = simulate(wordle, SCRIPTS[name], seeds)
    for seed, game in zip(seeds, games, strict=True):
        guesses = [guess for guess, _ in game.turns]
        (played,) = play_dialogues(lambda: WordleEnv(wordle), Replay(guesses), [seed])
        assert played.observation == game and played.done
        assert simulate(wordle, SCRIPTS[name], [seed])[0] == game
    assert games.returns().tolist() == [sum(game.rewards()) for game in games]
    assert games.won().tolist() == [game.won for game in games]
    assert list(simulate(wordle, SCRIPTS[name], game_seeds(6, 40))) != list(games)


def test_the_guess_with_the_most_information():
    rng = np.random.default_rng(0)
    fits = rng.random((20, 60)) < rng.random((20, 1))
    fits[:, 3] = True
    positions = Positions(WORDLE, fits, np.zeros((20, 0), np.int64))
    script = InformationGain()
    guesses = script.guess(positions, Draws.for_seeds(range(20)))
    for row, guess in zip(fits, guesses.tolist(), strict=True):
        gain = information(WORDLE.codes[:, row])
        assert gain[guess] > gain.max() - 1e-8
    only = InformationGain(only_fitting=True).guess(positions, Draws.for_seeds(range(20)))
    assert fits[np.arange(20), only].all()
    assert (script.guess(positions, Draws.for_seeds(range(20))) == guesses).all()
    other = Wordle(vocabulary=Vocabulary.built_in().subset(60, seed=2))
    start = Positions.start(other)
    expected = InformationGain().guess(start, Draws.for_seeds([0]))
    assert (
        script.guess(start, Draws.for_seeds([0])) == expected
    )  # the cache is not mixed up with the other vocabulary's


def test_data_sets_are_reproducible_and_written(tmp_path):
    parts = [Part("best", InformationGain(), 20), Part("repeat", Repeat(Fitting()), 10)]
    games = sample_games(WORDLE, parts, seed=0)
    assert games == sample_games(WORDLE, parts, seed=0)
    assert games != sample_games(WORDLE, parts, seed=1)
    more = sample_games(WORDLE, [parts[0], Part("repeat", Repeat(Fitting()), 50)], seed=0)
    best = [{str(game) for game in some if game.policy == "best"} for some in (games, more)]
    assert best[0] == best[1]  # more games of one part do not change those of others
    names = [game.policy for game in games]
    assert names.count("best") == 20 and names.count("repeat") == 10 and names != sorted(names)
    assert write_dialogues(tmp_path / "games.jsonl", games) == 30
    lines = (tmp_path / "games.jsonl").read_text().splitlines()
    for line, game in zip(lines, games, strict=True):
        row = json.loads(line)
        assert WordleObservation.from_sequence(row["sequence"]) == game.game
        assert row["terminal"] and row["metadata"]["policy"] == game.policy


def test_evaluation_of_games_equals_values_by_hand():
    row = "bbbbb"
    lost = WordleObservation(tuple(("crane", row) for _ in range(6)))
    won = WordleObservation((("slate", row), ("crane", "ggggg")))
    result = evaluation_of([lost, won, won])
    assert result.returns == (-6.0, -1.0, -1.0) and result.won == (False, True, True)
    assert math.isclose(result.mean_return, -8 / 3) and math.isclose(result.share_won, 2 / 3)
    error = 1.959964 * math.sqrt(25 / 3) / math.sqrt(3)  # the variance of -6, -1, -1 is 25 / 3
    assert np.allclose(result.interval, (-8 / 3 - error, -8 / 3 + error))
    first = -(1 / 3) * math.log(1 / 3) - (2 / 3) * math.log(2 / 3)
    assert np.allclose(result.guess_entropy, [first, 0, 0, 0, 0, 0])
    assert evaluation_of([won]).interval == (-math.inf, math.inf)
    with pytest.raises(ValueError, match="unfinished"):
        evaluation_of([WordleObservation((("slate", row),))])
    with pytest.raises(ValueError, match="no game"):
        evaluation_of([])


def test_policies_that_answer_in_batches_play_the_same_games():
    class Batched:
        def __init__(self):
            self.sizes = []
            self.player = Player(InformationGain(), WORDLE)

        def act_batch(self, observations):
            self.sizes.append(len(observations))
            return [self.player.act(observation) for observation in observations]

    class Short(Batched):
        def act_batch(self, observations):
            return ["crane"]

    with pytest.raises(ValueError, match="returned 1 texts for 3 dialogues"):
        evaluate(Short(), WORDLE, 3)
    (played,) = play_dialogues(lambda: WordleEnv(WORDLE), Replay(["x"] * 9), [0], max_steps=3)
    assert played.actions == ("x",) * 3 and played.rewards == (-1.0,) * 3 and not played.done
    batched, games = Batched(), simulate(WORDLE, InformationGain(), game_seeds(3, 50))
    result = evaluate(batched, WORDLE, 50, seed=3, batch_size=32)
    assert result == evaluate(Player(InformationGain(), WORDLE), WORDLE, 50, seed=3)
    assert result == evaluation_of(games)
    assert batched.sizes[:2] == [32, 32 - sum(len(game.turns) == 1 for game in list(games)[:32])]
    assert 18 in batched.sizes and len(batched.sizes) <= 12


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: Mixture((Fitting(),), (1, 2)), "1 scripts but 2 weights"),
        (lambda: Mixture((Fitting(),), (0,)), "must be 0 or more, with at least one above 0"),
        (
            lambda: Mixture((Fitting(),), (1,), each="day"),
            "each='day' must be one of 'game', 'guess'",
        ),
        (lambda: Repeat(Fitting(), 0), "num_first=0"),
        (lambda: Say("crane"), r"Say\(\('crane',\)\)"),
        (lambda: simulate(WORDLE, Say(("xyzzy",)), [0]), "'xyzzy' is not in the vocabulary"),
        (lambda: simulate(WORDLE, Fitting(), [0, 1], secrets=[0]), "1 secrets for 2 seeds"),
        (lambda: simulate(WORDLE, Fitting(), [0], secrets=[60]), "60 is not the number of a word"),
        (lambda: sample_games(WORDLE, [Part("a", Fitting(), 1)] * 2, 0), "two parts"),
        (lambda: Part("a", Fitting(), -1), "num_games=-1"),
        (lambda: evaluate(Replay([]), WORDLE, 0), "num_games=0"),
        (lambda: Draws.for_seeds([1]).choose(np.zeros((1, 3), bool)), "row 0 of the mask"),
    ],
)
def test_wrong_arguments_are_refused(call, complaint):
    with pytest.raises(ValueError, match=complaint):
        call()


def test_the_information_gain_is_the_entropy_of_the_colors():
    secrets = WORDLE.vocabulary.words[:17]
    gain = information(WORDLE.codes[:, :17])
    for number in (0, 5, 30):
        guess = WORDLE.vocabulary[number]
        counts = np.unique([colors(s, guess) for s in secrets], return_counts=True)[1] / 17
        assert math.isclose(gain[number], -(counts * np.log(counts)).sum(), rel_tol=1e-12)
