"""A task of two turns whose values are known exactly, for any gamma and tau.

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

# Number of games, the first utterance, the reply, the second utterance, and the reward.
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
    """Expected undiscounted return of a policy, over all utterances and replies."""
    first = {text for _, text, *_ in GAMES}

    def answered(text: str, state: State) -> float:
        games = [game for game in GAMES if game[1] == text]
        total = sum(count for count, *_ in games)
        value = 0.0
        for answer in sorted({game[2] for game in games}):
            matching = [game for game in games if game[2] == answer]
            probability = sum(count for count, *_ in matching) / total
            rewards = {second: reward for _, _, _, second, reward in matching}
            if None in rewards:
                value += probability * rewards[None]
                continue
            after = (*state, *TOKENIZER.encode(answer), TOKENIZER.eos_token_id)
            said_then = {second for second in rewards if second is not None}
            value += probability * _expected_value(
                next_token, after, said_then, lambda second, _, r=rewards: r[second]
            )
        return value

    return _expected_value(next_token, PROMPT, first, answered)


def _expected_value(
    next_token: NextToken,
    state: State,
    known: set[str],
    answered: Callable[[str, State], float],
    so_far: str = "",
) -> float:
    """The expected value within an utterance of the agent; `answered` gets the complete text."""
    value = 0.0
    for token, probability in enumerate(next_token(state)):
        if probability < 1e-12:
            continue
        more = so_far + TOKENIZER.decode([token])
        if token == TOKENIZER.eoa_token_id and so_far in known:
            value += probability * answered(so_far, (*state, token))
        elif more != so_far and any(text.startswith(more) for text in known):
            value += probability * _expected_value(
                next_token, (*state, token), known, answered, more
            )
        else:
            value += probability * ELSE
    return value


def _state(pieces: Sequence[str]) -> State:
    """The tokens of a dialogue: the environment's texts are one piece, the agent's are tokens."""
    state = [TOKENIZER.bos_token_id]
    for index, piece in enumerate(pieces):
        if piece == TOKENIZER.id_to_token(TOKENIZER.eoa_token_id):
            state.append(TOKENIZER.eoa_token_id)
            continue
        state += TOKENIZER.encode(piece)
        if index == 0 or pieces[index - 1] == TOKENIZER.id_to_token(TOKENIZER.eoa_token_id):
            state.append(TOKENIZER.eos_token_id)  # the end of the environment's text
    return tuple(state)
