"""Data sets of scripted games."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raffia.functional.seeds import derive_seed
from raffia.lm.envs.contract import Language_Observation, Utterance
from raffia.lm.envs.draws import Draws
from raffia.lm.envs.wordle.game import Wordle, WordleObservation
from raffia.lm.envs.wordle.games import game_seeds, simulate
from raffia.lm.envs.wordle.policies import Script


@dataclass(frozen=True)
class Part:
    """So many games of one script.

    >>> from raffia.lm.envs.wordle.policies import InformationGain
    >>> Part("expert", InformationGain(), 500).num_games
    500
    """

    name: str
    script: Script
    num_games: int

    def __post_init__(self) -> None:
        if self.num_games < 0:
            raise ValueError(f"num_games={self.num_games} of {self.name!r} must be 0 or more")


@dataclass(frozen=True)
class LabelledGame(Language_Observation):
    """A game, and who played it, which is in its metadata.

    >>> LabelledGame("expert", WordleObservation((("crane", "ggggg"),))).metadata()
    {'policy': 'expert', 'won': True, 'num_guesses': 1}
    """

    policy: str
    game: WordleObservation

    def to_sequence(self) -> tuple[list[Utterance], bool]:
        """The game's."""
        return self.game.to_sequence()

    def metadata(self) -> dict[str, Any]:
        """Who played, and what is known of the game."""
        return {"policy": self.policy, **self.game.metadata()}

    def __str__(self) -> str:
        return str(self.game)


def sample_games(wordle: Wordle, parts: Sequence[Part], seed: int) -> list[LabelledGame]:
    """The games of all parts, in an order that the seed draws.

    `write_dialogues(path, games)` keeps them as JSON lines.

    >>> from raffia.lm.envs.wordle.policies import Fitting, Repeat
    >>> from raffia.lm.envs.wordle.vocabulary import Vocabulary
    >>> wordle = Wordle(vocabulary=Vocabulary.built_in().subset(50))
    >>> parts = [Part("fair", Fitting(), 3), Part("stuck", Repeat(Fitting()), 1)]
    >>> sorted(game.policy for game in sample_games(wordle, parts, seed=0))
    ['fair', 'fair', 'fair', 'stuck']
    """
    names = [part.name for part in parts]
    if len(set(names)) < len(names):
        raise ValueError(f"two parts have one name: {names}; the name makes their games differ")
    games = [
        LabelledGame(part.name, game)
        for part in parts
        for game in simulate(
            wordle, part.script, game_seeds(derive_seed(seed, "part", part.name), part.num_games)
        )
    ]
    order = Draws.for_rows(seed, range(len(games)), "order of games").uniform().argsort()
    return [games[index] for index in order.tolist()]
