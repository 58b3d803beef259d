"""How well a policy plays Wordle."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import numpy as np

from raffia.hints import check_range
from raffia.lm.envs.contract import LanguagePolicy
from raffia.lm.envs.draws import Draws
from raffia.lm.envs.play import DialogueReturns, play_dialogues
from raffia.lm.envs.wordle.game import Wordle, WordleEnv, WordleObservation
from raffia.lm.envs.wordle.games import game_seeds
from raffia.lm.envs.wordle.policies import NON_WORD, Positions, Script


@dataclass(frozen=True)
class WordleEvaluation(DialogueReturns):
    """The results of N games.

    >>> games = [WordleObservation((("crane", "ggggg"),)),
    ...          WordleObservation((("crown", "ggbby"), ("crane", "ggggg")))]
    >>> result = evaluation_of(games)
    >>> print(result)
    return -0.50 [-1.48, 0.48], 100 % won, 2 games
    >>> [round(nats, 3) for nats in result.guess_entropy]
    [0.693, 0.0]
    """

    won: tuple[bool, ...]
    guess_entropy: tuple[float, ...]  # nats, over the games: how diverse the first guesses are, ...

    @property
    def share_won(self) -> float:
        """The fraction of games won, 0 to 1."""
        return sum(self.won) / len(self.won)

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"return {self.mean_return:.2f} [{low:.2f}, {high:.2f}], "
            f"{self.share_won:.0%} won, {len(self.won)} games".replace("%", " %")
        )


def evaluation_of(games: Iterable[WordleObservation]) -> WordleEvaluation:
    """Compute the results of games that have ended.

    >>> evaluation_of([WordleObservation((("crane", "ggggg"),))]).share_won
    1.0
    """
    finished = list(games)
    if not finished:
        raise ValueError("there are no games; play at least one")
    if not all(game.terminal for game in finished):
        raise ValueError("a game is unfinished; play it to its end")
    guesses: list[Counter[str]] = [Counter() for _ in range(max(len(g.turns) for g in finished))]
    for game in finished:
        for counter, (guess, _) in zip(guesses, game.turns, strict=False):
            counter[guess] += 1
    return WordleEvaluation(
        returns=tuple(sum(game.rewards()) for game in finished),
        won=tuple(game.won for game in finished),
        guess_entropy=tuple(_entropy(counter) for counter in guesses),
    )


def evaluate(
    policy: LanguagePolicy,
    wordle: Wordle,
    num_games: int,
    seed: int = 0,
    *,
    batch_size: int = 256,
) -> WordleEvaluation:
    """Let a policy play this many games; for the same seed every policy meets the same chances.

    A policy that has `act_batch` plays `batch_size` games together. For a script this is a
    `Player`; quicker is `evaluation_of(simulate(wordle, script, game_seeds(seed, num_games)))`.

    >>> from raffia.lm.envs.wordle.policies import Fitting
    >>> from raffia.lm.envs.wordle.vocabulary import Vocabulary
    >>> wordle = Wordle(vocabulary=Vocabulary.built_in().subset(50))
    >>> -2.0 < evaluate(Player(Fitting(), wordle), wordle, num_games=50).mean_return < -1.0
    True
    """
    check_range("num_games", num_games, 1)
    seeds = game_seeds(seed, num_games)
    played = play_dialogues(lambda: WordleEnv(wordle), policy, seeds, batch_size=batch_size)
    # What a WordleEnv shows at the end is the whole game.
    return evaluation_of(cast(WordleObservation, dialogue.observation) for dialogue in played)


class Player:
    """A script that answers in one game after the other, like any policy.

    What it draws depends on the seed and on how many games it has begun before.

    >>> from raffia.lm.envs.wordle.policies import InformationGain
    >>> from raffia.lm.envs.wordle.vocabulary import Vocabulary
    >>> wordle = Wordle(vocabulary=Vocabulary(("crane", "crown", "slate")))
    >>> player = Player(InformationGain(), wordle)
    >>> player.act(WordleObservation((("slate", "bbbbb"),)))
    'crown'
    """

    def __init__(self, script: Script, wordle: Wordle, seed: int = 0) -> None:
        self.script, self.wordle, self.seed = script, wordle, seed
        self._num_games = 0

    def act(self, observation: WordleObservation) -> str:
        """The script's guess; "none" where it is not a word."""
        turns = observation.turns
        if not turns:
            self._num_games += 1
        numbers = [self.wordle.vocabulary.number(guess) for guess, _ in turns]
        guesses = np.array([[NON_WORD if n is None else n for n in numbers]], np.int64)
        fits = self.wordle.fitting(turns)[None]
        draws = Draws.for_rows(self.seed, [self._num_games], "player")
        (number,) = self.script.guess(Positions(self.wordle, fits, guesses), draws).tolist()
        return "none" if number == NON_WORD else self.wordle.vocabulary[number]


def _entropy(counter: Counter[str]) -> float:
    """The entropy in nats of how often each value occurs; 0 for a single value."""
    total = counter.total()
    return sum(n / total * math.log(total / n) for n in counter.values())
