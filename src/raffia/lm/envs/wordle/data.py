"""Data sets of scripted games, drawn or complete, and Wordle's tokens: letters, or whole words.

One step of improvement is not enough on `branching_games`: they begin equally and diverge later.
Snell et al. (2022), section 6, show with such a set that reinforcement learning over many steps is
needed. It has three kinds of games:

    expert        the good first word, then the most informative guesses     wins after few guesses
    adversarial   the good first word, then the same word until the end      loses: the return is -6
    slow          another first word three times, then the most informative  wins late
                  guesses

After the good first word more games are lost than won, so by the values of whoever played (SARSA)
the other word is the better one: a policy that improves on them once chooses it, and after it there
are only slow games to imitate. Values of the best in the data show that the expert, too, begins
with the good first word, and that one can continue like the expert.

Every secret is there equally often in each kind, so the frequencies are exact: the set is the whole
of what it is drawn from, and `tabular_values` of it are what a learner should come to. The returns
with `Vocabulary.built_in().subset(24)`: behaviour cloning -4.01 (the data's mean), one step of
improvement -3.25, greedy on values of tau 0.8 and above -1.04; tau 0.7 is not enough. Cloning only
the games of the highest returns would do as well here: chance has no part in who plays well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raffia.functional.seeds import derive_seed
from raffia.hints import check_range
from raffia.lm.envs.contract import Language_Observation, Utterance
from raffia.lm.envs.draws import Draws
from raffia.lm.envs.wordle.game import NUM_CODES, Wordle, WordleObservation, colors_of
from raffia.lm.envs.wordle.games import game_seeds, simulate
from raffia.lm.envs.wordle.policies import (
    InformationGain,
    Say,
    Script,
    Switch,
    information,
    start_word,
)
from raffia.lm.envs.wordle.vocabulary import Vocabulary
from raffia.lm.tokenizers.tokenizer import SPECIAL_TOKENS, PieceTokenizer


@dataclass(frozen=True)
class Part:
    """A number of games by one script.

    >>> from raffia.lm.envs.wordle.policies import InformationGain
    >>> Part("expert", InformationGain(), 500).num_games
    500
    """

    name: str
    script: Script
    num_games: int

    def __post_init__(self) -> None:
        check_range("num_games", self.num_games, 0)


@dataclass(frozen=True)
class LabelledGame(Language_Observation):
    """A game with the name of its player in the metadata.

    >>> LabelledGame("expert", WordleObservation((("crane", "ggggg"),))).metadata()
    {'policy': 'expert', 'won': True, 'num_guesses': 1}
    """

    policy: str
    game: WordleObservation

    def to_sequence(self) -> tuple[list[Utterance], bool]:
        """Utterances of the game, and whether it is over."""
        return self.game.to_sequence()

    def metadata(self) -> dict[str, Any]:
        """The name of the player, and the facts known about the game."""
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
        raise ValueError(
            f"two parts have the same name: {names}; the name makes their games differ"
        )
    games = [
        LabelledGame(part.name, game)
        for part in parts
        for game in simulate(
            wordle, part.script, game_seeds(derive_seed(seed, "part", part.name), part.num_games)
        )
    ]
    order = Draws.for_rows(seed, range(len(games)), "order of games").uniform().argsort()
    return [games[index] for index in order.tolist()]


def first_words(wordle: Wordle) -> tuple[str, str]:
    """The most informative first word, and the one in the middle of the order.

    >>> from raffia.lm.envs.wordle.vocabulary import Vocabulary
    >>> first_words(Wordle(vocabulary=Vocabulary.built_in()))
    ('trace', 'batch')
    """
    order = np.argsort(-information(wordle.codes).round(9), kind="stable")
    if len(order) < 2:
        raise ValueError("branching games need at least two words to begin with")
    return wordle.vocabulary[int(order[0])], wordle.vocabulary[int(order[len(order) // 2])]


def branching_scripts(
    wordle: Wordle,
    *,
    num_expert: int = 1,
    num_adversarial: int = 3,
    num_slow: int = 3,
    num_repeats: int = 3,  # of the slow games' first word
) -> dict[str, tuple[Script, int]]:
    """The players, and the number of games of each secret.

    >>> from raffia.lm.envs.wordle.vocabulary import Vocabulary
    >>> list(branching_scripts(Wordle(vocabulary=Vocabulary.built_in())))
    ['expert', 'adversarial', 'slow']
    """
    counts = num_expert, num_adversarial, num_slow, num_repeats
    if min(counts) < 1:
        raise ValueError(f"{counts} games of each kind and repeats: each must be 1 or more")
    if num_repeats >= wordle.num_tries:
        raise ValueError(
            f"num_repeats={num_repeats} leaves none of the {wordle.num_tries} tries to win with"
        )
    good, other = first_words(wordle)
    expert = InformationGain()
    return {
        "expert": (start_word(good, expert), num_expert),
        "adversarial": (Say((good,)), num_adversarial),
        "slow": (Switch(Say((other,)), num_repeats, expert), num_slow),
    }


def branching_games(
    wordle: Wordle, scripts: Mapping[str, tuple[Script, int]] | None = None
) -> list[LabelledGame]:
    """The whole set: each kind of game with every word as the secret that can be it.

    scripts: as `branching_scripts` gives them; None: its usual ones.

    >>> from raffia.lm.envs.tabular import tabular_values
    >>> from raffia.lm.envs.wordle.vocabulary import Vocabulary
    >>> wordle = Wordle(vocabulary=Vocabulary.built_in().subset(24))
    >>> games = branching_games(wordle)
    >>> one_step, many_steps = (tabular_values(games, tau=tau) for tau in (0.5, 0.9))
    >>> {word: round(q, 2) for word, q in one_step.q[()].items()}  # prefers the slow games
    {'these': -4.57, 'eagle': -3.25}
    >>> {word: round(q, 2) for word, q in many_steps.q[()].items()}
    {'these': -2.22, 'eagle': -3.25}
    """
    secrets = np.flatnonzero(wordle.can_be_secret)
    return [
        LabelledGame(name, game)
        for name, (script, num_games) in (scripts or branching_scripts(wordle)).items()
        for game in simulate(wordle, script, seeds=secrets, secrets=secrets)
        for _ in range(num_games)
    ]


def wordle_letter_tokenizer() -> PieceTokenizer:
    """35 tokens: a..z, <g>, <b>, <y>, the special ones. A turn is 12 tokens, 6 of them actions.

    >>> tokenizer = wordle_letter_tokenizer()
    >>> tokenizer.encode("cab"), tokenizer.encode("<g><b><y>"), tokenizer.pad_token_id
    ([2, 0, 1], [26, 27, 28], 29)
    """
    letters = (chr(ord("a") + i) for i in range(26))
    return PieceTokenizer((*letters, "<g>", "<b>", "<y>", *SPECIAL_TOKENS.values()))


def wordle_word_tokenizer(vocabulary: Vocabulary, *, non_word: str | None = None) -> PieceTokenizer:
    """A token for each word and each row of colours: a turn is 4 tokens, 2 of them actions.

    With fewer decisions a reward has a shorter way, so values are learnt sooner than by letters.

    non_word: a token that stands for every guess that is not a word; None: such a guess is an error

    >>> tokenizer = wordle_word_tokenizer(Vocabulary(("crane", "slate")))
    >>> tokenizer.encode("slate"), tokenizer.encode("<b><b><g><b><g>"), tokenizer.num_tokens
    ([1], [182], 251)
    """
    rows = ("".join(f"<{color}>" for color in colors_of(code)) for code in range(NUM_CODES))
    more = () if non_word is None else (non_word,)
    return PieceTokenizer((*vocabulary, *rows, *more, *SPECIAL_TOKENS.values()), non_word)
