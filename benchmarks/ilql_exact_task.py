"""A task of two turns whose values are known exactly, whatever gamma and tau are.

The environment asks q. The agent may say lx, which leads to a door that pays 2 if the word that
fits the reply is said (g after 0, h after 1), and the data say it a quarter of the time; ly, which
begins like lx and is always bad; ra or rb, which pay a little; or kk, a lottery. What the data do
not have ends the game with -2. So cloning is bad, one step of improvement plays it safe, and only
many steps open the door: -0.174, 0.325, 2.

A state is the tokens of the dialogue so far, where the agent decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from raffia.lm.data.dialogue import Dialogue, DialogueDataset, ObservationDialogues
from raffia.lm.envs.tabular import tabular_values
from raffia.lm.tokenizers.tokenizer import character_tokenizer

TOKENIZER = character_tokenizer(["abghklmnqrxy012389"])
PROMPT = (TOKENIZER.bos_token_id, *TOKENIZER.encode("q"), TOKENIZER.eos_token_id)
ELSE, LONGEST = -2.0, 4  # the reward outside of the data; tokens of an utterance

# Number of games, what was said first, the answer, what was said then; the reward comes last.
GAMES: list[tuple[int, str, str, str | None, float]] = [
    (1, "lx", "0", "g", 2.0),
    (3, "lx", "0", "h", -1.0),
    (3, "lx", "1", "g", -1.0),
    (1, "lx", "1", "h", 2.0),
    (8, "ly", "0", "g", -0.5),
    (8, "ly", "0", "h", -0.8),
    (16, "ra", "2", "m", 0.25),
    (8, "ra", "2", "n", -0.15),
    (2, "rb", "2", "m", 0.1),
    (6, "rb", "2", "n", 0.3),
    (2, "rb", "3", "m", -0.2),
    (6, "rb", "3", "nn", 0.35),
    (2, "kk", "9", None, 3.0),
    (14, "kk", "8", None, -1.0),
]

State = tuple[int, ...]
NextToken = Callable[[State], Sequence[float]]  # the probability of each token


class Solution(NamedTuple):
    """V of the 28 states, and Q of the 38 actions that the data have in them."""

    v: dict[State, float]
    q: dict[State, dict[int, float]]

    @property
    def range(self) -> float:
        """From the worst to the best action."""
        values = [value for actions in self.q.values() for value in actions.values()]
        return max(values) - min(values)


def dialogues() -> list[Dialogue]:
    """The 80 games of the data, in which all frequencies are exact."""
    found = []
    for count, first, answer, second, reward in GAMES:
        sequence = [("q", None), (first, reward if second is None else 0.0), (answer, None)]
        if second is not None:
            sequence.append((second, reward))
        found += [Dialogue(sequence)] * count
    return found


def dataset() -> DialogueDataset:
    """The same as rows of tokens."""
    return DialogueDataset.build(ObservationDialogues(dialogues()), TOKENIZER)


@cache
def solution(gamma: float, tau: float) -> Solution:
    """Where every Bellman and expectile equation of the data holds."""
    found = tabular_values(dialogues(), tau=tau, gamma=gamma, tokenizer=TOKENIZER)
    number = {TOKENIZER.id_to_token(token): token for token in range(TOKENIZER.num_tokens)}
    state_of = {pieces: _state(pieces) for pieces in found.v}
    return Solution(
        {state_of[pieces]: value for pieces, value in found.v.items()},
        {
            state_of[pieces]: {number[piece]: value for piece, value in actions.items()}
            for pieces, actions in found.q.items()
        },
    )


def exact_return(next_token: NextToken) -> float:
    """Expected undiscounted return of a policy, over all that it and the environment may say."""
    first = {said for _, said, *_ in GAMES}

    def answered(said: str, state: State) -> float:
        games = [game for game in GAMES if game[1] == said]
        total = sum(count for count, *_ in games)
        value = 0.0
        for answer in sorted({game[2] for game in games}):
            here = [game for game in games if game[2] == answer]
            share = sum(count for count, *_ in here) / total
            rewards = {second: reward for _, _, _, second, reward in here}
            if None in rewards:
                value += share * rewards[None]
                continue
            after = (*state, *TOKENIZER.encode(answer), TOKENIZER.eos_token_id)
            said_then = {second for second in rewards if second is not None}
            value += share * _spoken(
                next_token, after, said_then, lambda second, _, r=rewards: r[second]
            )
        return value

    return _spoken(next_token, PROMPT, first, answered)


def _spoken(
    next_token: NextToken,
    state: State,
    known: set[str],
    answered: Callable[[str, State], float],
    said: str = "",
) -> float:
    """What is expected while the agent speaks; `answered` is told what it said."""
    value = 0.0
    for token, probability in enumerate(next_token(state)):
        if probability < 1e-12:
            continue
        more = said + TOKENIZER.decode([token])
        if token == TOKENIZER.eoa_token_id and said in known:
            value += probability * answered(said, (*state, token))
        elif more != said and any(text.startswith(more) for text in known):
            value += probability * _spoken(next_token, (*state, token), known, answered, more)
        else:
            value += probability * ELSE
    return value


def _state(pieces: Sequence[str]) -> State:
    """The tokens of what was said: the environment's texts are one piece, the agent's tokens."""
    state = [TOKENIZER.bos_token_id]
    for place, piece in enumerate(pieces):
        if piece == TOKENIZER.id_to_token(TOKENIZER.eoa_token_id):
            state.append(TOKENIZER.eoa_token_id)
            continue
        state += TOKENIZER.encode(piece)
        if place == 0 or pieces[place - 1] == TOKENIZER.id_to_token(TOKENIZER.eoa_token_id):
            state.append(TOKENIZER.eos_token_id)  # the environment said it
    return tuple(state)
