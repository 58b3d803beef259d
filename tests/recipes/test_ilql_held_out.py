"""Held-out words: guessed in the data, but never the secret; then used as secrets."""

from dataclasses import replace

import numpy as np
import pytest

from raffia.lm import character_tokenizer
from raffia.lm.envs.wordle import (
    Fitting,
    Vocabulary,
    Wordle,
    WordleEnv,
    branching_games,
    game_seeds,
    simulate,
)
from raffia.recipes.ilql import ILQL_PRESETS, train
from raffia.recipes.ilql import evaluate as evaluate_run
from raffia.recipes.ilql.config import WordleConfig
from raffia.recipes.ilql.data import describe_template, make_wordle, play_games
from raffia.train import RunError

from .runs import Quiet

CONFIG = WordleConfig(num_words=20, num_held_out=6, num_games=400)


@pytest.mark.parametrize("games", ["scripts", "branching"])
def test_held_out_words_are_guessed_and_never_the_secret(games):
    config = replace(CONFIG, games=games)
    held_out = set(make_wordle(config, held_out=True).secrets)
    training = set(make_wordle(config).secrets)
    assert len(held_out) == 6 and not held_out & training
    assert held_out | training == set(make_wordle(config).vocabulary)
    games_played = [labelled.game for labelled in play_games(config)]
    won = {game.turns[-1][0] for game in games_played if game.won}
    assert won and won <= training
    guesses = {guess for game in games_played for guess, _ in game.turns}
    assert games == "branching" or held_out <= guesses


def test_held_out_words_follow_from_the_data_seed():
    one, other = (make_wordle(replace(CONFIG, data_seed=seed)).secrets for seed in (0, 1))
    assert one == make_wordle(CONFIG).secrets != other
    for config in (WordleConfig(num_words=20), replace(CONFIG, num_words=0, num_held_out=10_000)):
        with pytest.raises(RunError, match=r"must be in 1\.\."):
            make_wordle(config, held_out=True)
    with pytest.raises(ValueError, match="leaves no secret to learn from"):
        WordleConfig(num_words=6, num_held_out=6)


def test_secrets_are_drawn_from_the_possible_ones_singly_and_in_batches():
    words = Vocabulary.built_in().subset(30)
    wordle = Wordle(vocabulary=words, secrets=words.words[::5])
    assert wordle.can_be_secret.sum() == 6
    games = simulate(wordle, Fitting(), game_seeds(0, 60))
    assert {games[n].turns[-1][0] for n in np.flatnonzero(games.won())} <= set(wordle.secrets)

    left = set()
    for seed in range(8):
        env = WordleEnv(wordle)
        env.reset(seed)
        env.step(words[1])
        left |= set(env.words_left())
    assert left - set(wordle.secrets)
    with pytest.raises(ValueError, match="leaves no word to be the secret"):
        Wordle(vocabulary=words, secrets=())
    with pytest.raises(ValueError, match="the secret 'zzzzz' is not in the vocabulary"):
        Wordle(vocabulary=words, secrets=("zzzzz",))
    secrets = np.array([words.number(word) for word in wordle.secrets])
    assert len(branching_games(wordle)) == 7 * len(secrets)


def test_an_evaluation_also_plays_games_with_held_out_secrets(tmp_path):
    smoke = ILQL_PRESETS["ilql-smoke"]
    config = replace(smoke, wordle=replace(smoke.wordle, num_held_out=4), num_updates=2)
    train(config, tmp_path / "run", view=Quiet())
    found = evaluate_run(tmp_path / "run", episodes=6, adv_weights=(0.0,)).games
    assert list(found) == ["decode", "adv_weight=0", "decode, held-out secrets"]
    assert all(len(games.returns) == 6 for games in found.values())


def test_letters_are_35_tokens_and_the_preset_is_that_of_the_paper():
    preset = ILQL_PRESETS["wordle-letters"]
    assert (preset.model.trunk.vocab_size, preset.wordle.num_words) == (35, 200)
    decode = preset.decode
    assert (decode.num_beams, decode.adv_weight, decode.adv_clip) == (1, 16.0, 0.0)
    assert preset.wordle.num_held_out == 40 and preset.wordle.scripts.expert == 0


def test_an_unused_chat_template_is_mentioned(tmp_path):
    config = replace(ILQL_PRESETS["language-model"], language_model=str(tmp_path))
    tokenizer = character_tokenizer(["a"])
    assert describe_template(config, tokenizer) == ""
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert "which is not used" in describe_template(config, tokenizer)
