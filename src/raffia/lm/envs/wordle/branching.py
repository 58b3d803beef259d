"""Games on which one step of improvement is not enough: they begin equally and diverge later.

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

from collections.abc import Mapping

import numpy as np

from raffia.lm.envs.wordle.data import LabelledGame
from raffia.lm.envs.wordle.game import Wordle
from raffia.lm.envs.wordle.games import simulate
from raffia.lm.envs.wordle.policies import (
    InformationGain,
    Say,
    Script,
    Switch,
    information,
    start_word,
)


def first_words(wordle: Wordle) -> tuple[str, str]:
    """The most informative first word, and the one in the middle of the order.

    >>> from raffia.lm.envs.wordle.vocabulary import Vocabulary
    >>> first_words(Wordle(vocabulary=Vocabulary.built_in()))
    ('trace', 'batch')
    """
    order = np.argsort(-information(wordle.codes).round(9), kind="stable")
    if len(order) < 2:
        raise ValueError("branching games need two words at least, to begin with one or the other")
    return wordle.vocabulary[int(order[0])], wordle.vocabulary[int(order[len(order) // 2])]


def branching_scripts(
    wordle: Wordle,
    *,
    num_expert: int = 1,
    num_adversarial: int = 3,
    num_slow: int = 3,
    num_repeats: int = 3,  # of the slow games' first word
) -> dict[str, tuple[Script, int]]:
    """Who plays, and how many games of each secret.

    >>> from raffia.lm.envs.wordle.vocabulary import Vocabulary
    >>> list(branching_scripts(Wordle(vocabulary=Vocabulary.built_in())))
    ['expert', 'adversarial', 'slow']
    """
    counts = num_expert, num_adversarial, num_slow, num_repeats
    if min(counts) < 1:
        raise ValueError(f"{counts} games of each kind, and repeats: each must be 1 or more")
    if num_repeats >= wordle.num_tries:
        raise ValueError(
            f"num_repeats={num_repeats} leaves no try of {wordle.num_tries} to win with"
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
