"""Values of a small data set of dialogues, exactly: what a learner's values should come to.

A state is the utterances so far, an action is an utterance of the agent; or, with a tokenizer, a
token of it, and then a state has the tokens of the agent's utterance instead of the utterance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from raffia.lm.envs.contract import Language_Observation, LanguagePolicy, Utterance
from raffia.lm.tokenizers.tokenizer import Tokenizer

State = tuple[str, ...]


@dataclass
class _Action:
    num_taken: int = 0
    sum_of_rewards: float = 0.0
    next_states: dict[State | None, int] = field(default_factory=dict)  # None: it was over


@dataclass(frozen=True)
class TabularValues:
    """Values of the states and actions that a data set has.

    >>> from raffia.lm.envs.wordle.game import WordleObservation
    >>> games = [WordleObservation((("crane", "ggggg"),)),
    ...          WordleObservation((("crown", "ggbby"), ("crane", "ggggg")))]
    >>> values = tabular_values(games, tau=0.5)
    >>> values.v[()], values.q[()], values.best(())
    (-0.5, {'crane': 0.0, 'crown': -1.0}, 'crane')
    """

    v: dict[State, float]
    q: dict[State, dict[str, float]]
    fraction: dict[State, dict[str, float]]  # how often the data take each action
    tokenizer: Tokenizer | None = None  # whose tokens are the actions; None: utterances are

    def best(self, state: State) -> str:
        """The action of the data that has the largest value; of equal ones the first."""
        return max(self.q[state], key=self.q[state].__getitem__)


def tabular_values(
    dialogues: Iterable[Language_Observation],
    *,
    tau: float,
    gamma: float = 1.0,
    tokenizer: Tokenizer | None = None,
) -> TabularValues:
    """V and Q of a data set, by working back from the ends of its dialogues.

        Q(s, a) = mean over the data of r + gamma V(s'),  V(s) = expectile_tau of Q(s, a)

    tau: 0.5: the mean, so the values of whoever played (SARSA, what one-step reinforcement learning
        improves on once); towards 1: the best that the data show (ILQL); 1: their maximum
    tokenizer: each token of an utterance is an action, and the reward follows its end token; so the
        values are those that a learner over tokens comes to. None: whole utterances are actions.
        At tau 0.5 and at 1 both are the same where gamma is 1.

    The dialogues must have ended. Source: Snell et al. (2022), section 4.

    >>> from raffia.lm.envs.wordle.game import WordleObservation
    >>> from raffia.lm.envs.wordle.data import wordle_letter_tokenizer
    >>> games = [WordleObservation((("crane", "ggggg"),))]
    >>> values = tabular_values(games, tau=0.5, tokenizer=wordle_letter_tokenizer())
    >>> values.q[("c", "r", "a", "n", "e")]
    {'</a>': 0.0}
    """
    if not 0 < tau <= 1:
        raise ValueError(f"tau={tau} must be above 0 and at most 1; tau=0.5 is the mean")
    tree = _tree(dialogues, tokenizer)
    values = TabularValues({}, {}, {}, tokenizer)
    for state in sorted(tree, key=len, reverse=True):  # what follows a state is longer
        actions = tree[state]
        total = sum(action.num_taken for action in actions.values())
        fraction = {text: action.num_taken / total for text, action in actions.items()}
        q = {
            text: action.sum_of_rewards / action.num_taken
            + gamma
            * sum(
                count / action.num_taken * values.v[after]
                for after, count in action.next_states.items()
                if after is not None
            )
            for text, action in actions.items()
        }
        values.q[state], values.fraction[state] = q, fraction
        values.v[state] = expectile(list(q.values()), list(fraction.values()), tau)
    return values


def expectile(values: Sequence[float], fractions: Sequence[float], tau: float) -> float:
    """The m with tau E[max(x - m, 0)] = (1 - tau) E[max(m - x, 0)]; for tau = 1 the maximum.

    >>> expectile([0.0, 4.0], [0.75, 0.25], 0.5), expectile([0.0, 4.0], [0.75, 0.25], 0.75)
    (1.0, 2.0)
    """
    if tau == 1:
        return max(values)
    ordered = sorted(zip(values, fractions, strict=True))
    for below in range(1, len(ordered) + 1):  # guess that so many lie at or below m
        weights = [
            ((1 - tau) if i < below else tau) * fraction for i, (_, fraction) in enumerate(ordered)
        ]
        m = sum(w * x for w, (x, _) in zip(weights, ordered, strict=True)) / sum(weights)
        if below == len(ordered) or m <= ordered[below][0]:
            return m
    raise AssertionError("no values")


class TabularPolicy:
    """Acts by the largest value in the data.

    otherwise: the policy for states that the data lack; None: they are an error

    >>> from raffia.lm.envs.wordle.game import WordleObservation
    >>> values = tabular_values([WordleObservation((("crane", "ggggg"),))], tau=0.5)
    >>> TabularPolicy(values).act(WordleObservation())
    'crane'
    """

    def __init__(self, values: TabularValues, otherwise: LanguagePolicy | None = None) -> None:
        self.values, self.otherwise = values, otherwise

    def act(self, observation: Language_Observation) -> str:
        """The best utterance of the data."""
        tokenizer = self.values.tokenizer
        utterances, _ = observation.to_sequence()
        state = tuple(piece for utterance in utterances for piece in _pieces(utterance, tokenizer))
        if state not in self.values.q:
            if self.otherwise is None:
                raise KeyError(f"the data lack the state after these utterances: {state}")
            return self.otherwise.act(observation)
        if tokenizer is None:
            return self.values.best(state)
        ids: list[int] = []
        while not ids or ids[-1] != tokenizer.eoa_token_id:
            token = self.values.best(state)
            ids.append(tokenizer.token_to_id(token))
            state = (*state, token)
        return tokenizer.decode(ids)


def _pieces(utterance: Utterance, tokenizer: Tokenizer | None) -> State:
    """The parts of an utterance in a state."""
    text, reward = utterance
    if reward is None or tokenizer is None:
        return (text,)
    ids = (*tokenizer.encode(text), tokenizer.eoa_token_id)
    return tuple(tokenizer.id_to_token(number) for number in ids)


def _tree(
    dialogues: Iterable[Language_Observation], tokenizer: Tokenizer | None
) -> dict[State, dict[str, _Action]]:
    tree: dict[State, dict[str, _Action]] = {}
    for dialogue in dialogues:
        utterances, terminal = dialogue.to_sequence()
        texts: list[str] = []
        actions: list[tuple[int, float]] = []  # its index among the texts, and its reward
        for utterance in utterances:
            pieces = _pieces(utterance, tokenizer)
            if utterance[1] is not None:
                actions += [(len(texts) + number, 0.0) for number in range(len(pieces))]
                actions[-1] = actions[-1][0], utterance[1]
            texts += pieces
        if actions and not terminal:
            raise ValueError("a dialogue is unfinished; its values depend on what follows")
        ends: list[int | None] = [index for index, _ in actions[1:]]
        for (index, reward), after in zip(actions, [*ends, None], strict=bool(actions)):
            here = tree.setdefault(tuple(texts[:index]), {})
            action = here.setdefault(texts[index], _Action())
            next_state = None if after is None else tuple(texts[:after])
            action.num_taken += 1
            action.sum_of_rewards += reward
            action.next_states[next_state] = action.next_states.get(next_state, 0) + 1
    return tree
