"""The contract for a custom data set: rows by number, or rows that are drawn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from raffia.functional.seeds import generator_for
from raffia.lm.data.data_point import DataPoint
from raffia.lm.data.dialogue_batches import BatchOrder, collate_rows
from raffia.lm.data.utterances import check_tokens
from raffia.lm.tokenizers.tokenizer import Tokenizer
from raffia.tensordict.tensordict import TensorDict


class Vocabulary(NamedTuple):
    """Instead of a tokenizer, where rows are tokens already.

    >>> Vocabulary(35).pad_token_id
    0
    """

    num_tokens: int
    pad_token_id: int = 0


class RL_Dataset(ABC):
    """Rows to learn from, as batches that follow from a seed and the number of the update alone.

    tokenizer: of the rows; or a `Vocabulary`.
    max_len: tokens of the model's context; a longer row is refused.
    buckets: rising lengths to which batches are padded, so that they have few shapes; none: to the
        longest row of each.

    >>> RL_Dataset.__abstractmethods__
    frozenset({'batches'})
    """

    def __init__(
        self,
        tokenizer: Tokenizer | Vocabulary,
        *,
        max_len: int | None = None,
        buckets: Sequence[int] = (),
    ) -> None:
        if list(buckets) != sorted(set(buckets)) or any(bucket < 1 for bucket in buckets):
            raise ValueError(f"buckets={buckets}: give rising lengths, such as (64, 128, 256)")
        if max_len is not None and buckets and buckets[-1] > max_len:
            raise ValueError(
                f"the last of buckets={tuple(buckets)} is longer than max_len={max_len}, the "
                "model's context: leave it out, or raise max_len"
            )
        self.vocabulary = Vocabulary(tokenizer.num_tokens, tokenizer.pad_token_id)
        self.max_len, self.buckets = max_len, tuple(buckets)

    @abstractmethod
    def batches(
        self, seed: int, start_update: int, batch_size: int, *, per_token: bool = True
    ) -> Iterator[TensorDict]:
        """The batches of the updates from `start_update` on, as `collate` makes them."""

    def collate(
        self,
        points: Sequence[DataPoint],
        *,
        per_token: bool = True,
        device: torch.device | str | None = None,
    ) -> TensorDict:
        """A batch of some rows, padded on the right, see `dialogue_batches.collate_rows`.

        per_token: an action is a token of the agent; else it is a whole utterance.
        `index` counts the rows.

        >>> from raffia.lm.data.dialogue import DialogueDataset
        >>> short = DataPoint.from_tokens([1, 5, 3], [0, 1], [0.0, 1.0], terminal=False)
        >>> points = [short, DataPoint.from_tokens([1, 7, 2, 4], [], [])]
        >>> batch = DialogueDataset.of_points([], Vocabulary(10, pad_token_id=9)).collate(points)
        >>> batch["tokens"]
        tensor([[1, 5, 3, 9],
                [1, 7, 2, 4]])
        >>> batch["state_idxs"], batch["terminals"]
        (tensor([[0, 1, 2],
                [3, 0, 0]]), tensor([[False, False, False],
                [ True,  True,  True]]))
        """
        return collate_rows(
            list(checked_points(points, self.vocabulary, self.max_len)),
            np.arange(len(points)),
            pad_token_id=self.vocabulary.pad_token_id,
            per_token=per_token,
            buckets=self.buckets,
            device=device,
        )


class List_RL_Dataset(RL_Dataset):
    """Rows by number: `size` and `get_item` are yours; each epoch has each row once.

    >>> class Sums(List_RL_Dataset):  # 1 + 1 = ?, for a right answer 1, for a wrong one 0
    ...     def size(self):
    ...         return 2
    ...     def get_item(self, index):
    ...         right = 1.0 if index == 1 else 0.0
    ...         return DataPoint.from_tokens([0, 3, 1, 4 + index, 2], [2, 3], [0.0, right])
    >>> data = Sums(Vocabulary(7, pad_token_id=6))
    >>> batch = next(data.batches(seed=0, start_update=0, batch_size=2))
    >>> batch["rewards"].sum(), sorted(batch["index"].tolist())
    (tensor(1.), [0, 1])
    """

    @abstractmethod
    def size(self) -> int:
        """How many rows there are."""

    @abstractmethod
    def get_item(self, index: int) -> DataPoint:
        """The row of a number below `size()`."""

    def __len__(self) -> int:
        return self.size()

    def __getitem__(self, index: int) -> DataPoint:
        if not 0 <= index < self.size():
            raise IndexError(f"row {index} of {self.size()}")
        return self.get_item(index)

    def order(self, batch_size: int) -> BatchOrder:
        """Which rows are in which batch; here shuffled, whatever their lengths."""
        return BatchOrder(np.zeros(self.size(), np.int64), batch_size, sort_window=1)

    def batches(
        self, seed: int, start_update: int, batch_size: int, *, per_token: bool = True
    ) -> Iterator[TensorDict]:
        """Batches without an end; each epoch is a permutation of the rows."""
        _check_batches(start_update, batch_size)
        if not self.size():
            raise ValueError(f"{type(self).__name__} has no rows: size() is 0")
        for numbers in self.order(batch_size).from_update(seed, start_update):
            yield self.take(numbers, per_token=per_token)

    def take(self, numbers: NDArray[np.int64], *, per_token: bool = True) -> TensorDict:
        """The batch of the rows of these numbers, which are its `index`."""
        batch = self.collate([self.get_item(int(n)) for n in numbers], per_token=per_token)
        batch["index"] = torch.from_numpy(numbers.copy())
        return batch


class Iterable_RL_Dataset(RL_Dataset):
    """Rows that are drawn one by one: `sample_item` is yours, and draws from the generator alone.

    >>> class Bandit(Iterable_RL_Dataset):  # two answers, the second pays
    ...     def sample_item(self, generator):
    ...         arm = int(torch.randint(2, (), generator=generator))
    ...         return DataPoint.from_tokens([0, 2 + arm, 1], [0, 1], [0.0, float(arm)])
    >>> data = Bandit(Vocabulary(5, pad_token_id=4))
    >>> later = next(data.batches(seed=0, start_update=1, batch_size=3))
    >>> _, second = zip(range(2), data.batches(seed=0, start_update=0, batch_size=3))
    >>> torch.equal(second[1]["tokens"], later["tokens"])
    True
    """

    @abstractmethod
    def sample_item(self, generator: torch.Generator) -> DataPoint:
        """One row, drawn."""

    def batches(
        self, seed: int, start_update: int, batch_size: int, *, per_token: bool = True
    ) -> Iterator[TensorDict]:
        """Batches without an end, each with its own generator; `index` counts within it."""
        _check_batches(start_update, batch_size)
        for update in count(start_update):
            generator = generator_for(seed, "dialogue", update)
            points = [self.sample_item(generator) for _ in range(batch_size)]
            yield self.collate(points, per_token=per_token)


def checked_points(
    points: Iterable[DataPoint], vocabulary: Tokenizer | Vocabulary, max_len: int | None
) -> Iterator[DataPoint]:
    """The points; ValueError at one that has unknown tokens, or more than `max_len`.

    >>> list(checked_points([DataPoint.from_tokens([1, 9], [0], [0.0])], Vocabulary(9), None))
    Traceback (most recent call last):
    ...
    ValueError: row 0: token 1 of the row is 9, and the vocabulary has 9 tokens, 0..8: was it ...
    """
    for number, point in enumerate(points):
        try:
            check_tokens(point.tokens, vocabulary.num_tokens)
        except ValueError as error:
            raise ValueError(f"row {number}: {error}") from None
        if max_len is not None and len(point.tokens) > max_len:
            raise ValueError(
                f"row {number} has {len(point.tokens)} tokens, more than the {max_len} of the "
                f"context: point.cut({max_len}) takes the first"
            )
        yield point


def _check_batches(start_update: int, batch_size: int) -> None:
    if batch_size < 1 or start_update < 0:
        raise ValueError(
            f"batch_size={batch_size}, start_update={start_update}: a batch has at least one row, "
            "and updates are counted from 0"
        )
