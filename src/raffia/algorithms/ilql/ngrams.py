"""`TopAdvantageNGrams`: which turns of phrase the values hold for good.

Legend: A actions of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from raffia.algorithms.ilql.agent import ILQL
from raffia.algorithms.ilql.agent_inputs import Items
from raffia.algorithms.ilql.model_scorer import evaluating


@dataclass(frozen=True)
class NGram:
    """Tokens that the agent generated, and how much better than expected they were.

    >>> NGram((5, 6), 0.25, 3).tokens
    (5, 6)
    """

    tokens: tuple[int, ...]
    advantage: float  # target Q - V: the mean over its tokens, and over its occurrences
    count: int  # how many these are

    def __str__(self) -> str:
        return f"{self.advantage:+.4f}  {self.count:6d}  {self.tokens}"


class TopAdvantageNGrams:
    """Gathers the n-grams of the agent's tokens in the data by their mean advantage.

    n: how many tokens; None for whole utterances (all there is of an agent with
        `per_token=False`).
    end_of_action: the token that ends an utterance. Without one, the agent's tokens side by side
        are one utterance.

    >>> from raffia.algorithms.ilql.agent import ILQL
    >>> from raffia.lm.data.dialogue import DataPoint, DialogueDataset, Vocabulary
    >>> rows = [DataPoint.from_tokens([1, token, 2], [0, 1], [0.0, 0.0]) for token in (4, 5, 4)]
    >>> data = DialogueDataset.of_points(rows, Vocabulary(6))
    >>> agent = ILQL(data, {"vocab_size": 6, "n_layer": 1, "n_head": 2, "n_embd": 8})
    >>> best, *others = TopAdvantageNGrams(2).evaluate(agent, rows)
    >>> best.advantage >= others[0].advantage, sorted([best.count, others[0].count])
    (True, [1, 2])
    """

    def __init__(self, n: int | None = None, *, end_of_action: int | None = None) -> None:
        if n is not None and n < 1:
            raise ValueError(
                f"n={n} must be at least 1, the number of tokens of an n-gram, or None for whole "
                "utterances"
            )
        self.n, self.end_of_action = n, end_of_action
        self._sums: dict[tuple[int, ...], tuple[float, int]] = {}

    def evaluate(self, agent: ILQL, items: Items, k: int | None = None) -> list[NGram]:
        """Add these rows, and return the k best n-grams of all rows added; None for all."""
        self.add(agent, items)
        return self.top(k)

    def add(self, agent: ILQL, items: Items) -> None:
        """Add the n-grams of these rows."""
        if not agent.per_token and self.n is not None:
            raise ValueError(
                f"n={self.n} cannot be used with an agent with per_token=False, which values only "
                "whole utterances: use TopAdvantageNGrams(None)"
            )
        batch = agent.prepare_inputs(items)
        with evaluating(agent), torch.no_grad():
            advantage = agent.get_qvs(batch)["advantage"]
        rows = self._token_ngrams if agent.per_token else _utterances
        names = ("tokens", "state_idxs", "action_idxs", "action_mask")
        parts = [batch[name].tolist() for name in names]
        for row in map(_Row, *parts, advantage.tolist()):
            for tokens, mean in rows(row):
                total, count = self._sums.get(tokens, (0.0, 0))
                self._sums[tokens] = total + mean, count + 1

    def top(self, k: int | None = None) -> list[NGram]:
        """The k best n-grams of all rows added, the best first; None for all."""
        found = [
            NGram(tokens, total / count, count) for tokens, (total, count) in self._sums.items()
        ]
        return sorted(found, key=lambda gram: (-gram.advantage, gram.tokens))[:k]

    def _token_ngrams(self, row: _Row) -> Iterator[tuple[tuple[int, ...], float]]:
        """Iterate over the n-grams of a row, each with the mean of its tokens' advantages."""
        indices = [at for at, counts in zip(row.actions, row.real, strict=True) if counts]
        for start, end in self._runs(row.tokens, indices):
            n = end - start if self.n is None else self.n
            for at in range(start, end - n + 1):
                ngram = tuple(row.tokens[index + 1] for index in indices[at : at + n])
                yield ngram, sum(row.values[at : at + n]) / n

    def _runs(self, tokens: list[int], indices: list[int]) -> Iterator[tuple[int, int]]:
        """The ranges of the list of actions that belong to one utterance each."""
        if not indices:
            return
        start = 0
        for number, (index, following) in enumerate(pairwise(indices), 1):
            if following != index + 1 or tokens[index + 1] == self.end_of_action:
                yield start, number
                start = number
        yield start, len(indices)


def _utterances(row: _Row) -> Iterator[tuple[tuple[int, ...], float]]:
    for begin, end, counts, value in zip(
        row.states, row.actions, row.real, row.values, strict=False
    ):
        if counts:
            yield tuple(row.tokens[begin + 1 : end + 1]), value


class _Row(NamedTuple):
    tokens: list[int]
    states: list[int]  # [A + 1]
    actions: list[int]  # [A]
    real: list[bool]  # [A]
    values: list[float]  # [A], advantages
