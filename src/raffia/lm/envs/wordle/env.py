"""Wordle as an environment of dialogues."""

from __future__ import annotations

from raffia.lm.envs.contract import Language_Environment
from raffia.lm.envs.draws import Draws
from raffia.lm.envs.wordle.game import Wordle, WordleObservation


class WordleEnv(Language_Environment):
    """Six tries to find a secret word; the reward is 0 for the guess that wins, -1 for every other.

    Before each answer the secret is drawn again from the words that fit what is known, of those
    that can be the secret. To the player this is the game with one secret: given what is known,
    each of them is as likely as the others.

    >>> from raffia.lm.envs.wordle.vocabulary import Vocabulary
    >>> env = WordleEnv(Wordle(vocabulary=Vocabulary.built_in()))
    >>> observation = env.reset(seed=3)
    >>> for word in ("slate", "crown"):
    ...     observation, reward, done = env.step(word)
    >>> print(observation, reward, done)
    slate  bbbbb
    crown  ybbyb -1.0 False
    >>> env.words_left()
    ('twice', 'watch', 'which')
    """

    def __init__(self, wordle: Wordle) -> None:
        self.wordle = wordle
        self._observation: WordleObservation | None = None

    def reset(self, seed: int) -> WordleObservation:
        """A new game."""
        self._draws = Draws.for_seeds([seed])
        self._fits = self.wordle.fitting(())
        self._observation = WordleObservation((), self.wordle.num_tries)
        return self._observation

    def step(self, action: str) -> tuple[WordleObservation, float, bool]:
        """Guess this word."""
        game = self._running()
        among = (self._fits & self.wordle.can_be_secret)[None]
        (secret,) = self._draws.choose(among, "secret", len(game.turns)).tolist()
        row = self.wordle.answer(action, self.wordle.vocabulary[secret])
        self._fits = self.wordle.fitting([(action, row)], self._fits)
        self._observation = game.after(action, row)
        return self._observation, self._observation.rewards()[-1], self._observation.terminal

    def is_terminal(self) -> bool:
        """Whether the game is over."""
        return self._observation is not None and self._observation.terminal

    def words_left(self) -> tuple[str, ...]:
        """The words that fit what is known."""
        numbers = self._fits.nonzero()[0].tolist()
        return tuple(self.wordle.vocabulary[number] for number in numbers)

    def _running(self) -> WordleObservation:
        if self._observation is None:
            raise RuntimeError("no game has begun; call reset(seed) first")
        if self._observation.terminal:
            raise RuntimeError("the game is over; call reset(seed) for another")
        return self._observation
