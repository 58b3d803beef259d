"""The contract for a custom data set: rows by number, or rows that are drawn.

`BatchOrder` is the order in which rows are learnt from, `collate_rows` makes some of them a batch.

Legend: B rows of a batch, T tokens and A actions (or utterances) of its longest, N rows in all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raffia.functional.seeds import generator_for
from raffia.hints import check_range
from raffia.lm.data.data_point import DataPoint
from raffia.lm.data.utterances import check_tokens
from raffia.lm.tokenizers.tokenizer import Tokenizer
from raffia.tensordict.tensordict import TensorDict


class Vocabulary(NamedTuple):
    """A stand-in for a tokenizer, for rows that are tokens already.

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
            raise ValueError(
                f"buckets={buckets} must be increasing lengths, such as (64, 128, 256)"
            )
        if max_len is not None and buckets and buckets[-1] > max_len:
            raise ValueError(
                f"the last of buckets={tuple(buckets)} is longer than max_len={max_len}, which no "
                "row is: remove it, or raise max_len"
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
        """The assignment of rows to batches, here shuffled regardless of their lengths."""
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
        """Draw one row."""

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
    ValueError: row 0: token 1 of the row is 9, but the vocabulary has 9 tokens, 0..8: ...
    """
    for number, point in enumerate(points):
        try:
            check_tokens(point.tokens, vocabulary.num_tokens)
        except ValueError as error:
            raise ValueError(f"row {number}: {error}") from None
        if max_len is not None and len(point.tokens) > max_len:
            raise ValueError(
                f"row {number} has {len(point.tokens)} tokens, more than the {max_len} of the "
                f"context: to use only the first ones, call point.cut({max_len})"
            )
        yield point


def _check_batches(start_update: int, batch_size: int) -> None:
    check_range("batch_size", batch_size, 1)
    check_range("start_update", start_update, 0)


class BatchOrder(NamedTuple):
    """The assignment of rows to batches: a function of the seed and the batch's number alone.

    Epochs follow each other, each of them all rows once, shuffled; batches are cut from them, all
    of `batch_size` rows, so that one may hold the end of an epoch and the beginning of the next.
    With a `sort_window` above 1, each so many batches' rows of an epoch are sorted by length before
    they are cut, and then the batches are shuffled: rows of similar length meet, and little is
    padded.

    lengths: [N], by which rows are sorted.
    sort_window: batches; 1 leaves the rows as they were shuffled.

    >>> order = BatchOrder(np.array([5, 9, 5, 9, 5, 9]), batch_size=2, sort_window=3)
    >>> rows = [batch.tolist() for _, batch in zip(range(3), order.from_update(0, 0))]
    >>> sorted(sum(rows, []))  # an epoch
    [0, 1, 2, 3, 4, 5]
    >>> next(order.from_update(0, 2)).tolist() == rows[2]
    True
    """

    lengths: NDArray[np.integer]
    batch_size: int
    sort_window: int = 1

    def epoch(self, seed: int, number: int) -> NDArray[np.int64]:
        """The rows of an epoch in their order [N].

        >>> BatchOrder(np.array([7, 7, 7]), batch_size=3).epoch(0, 1).shape
        (3,)
        """
        num, size = len(self.lengths), self.batch_size
        generator = generator_for(seed, "dialogue", number)
        order = torch.randperm(num, generator=generator).numpy()
        head = -number * num % size  # rows that complete the batch which the epoch before began
        num_batches = max(0, num - head) // size
        if self.sort_window == 1 or num_batches < 2:
            return order
        whole = order[head : head + num_batches * size]
        for start in range(0, len(whole), self.sort_window * size):
            part = whole[start : start + self.sort_window * size]
            part[:] = part[np.argsort(self.lengths[part], kind="stable")]
        shuffled = torch.randperm(num_batches, generator=generator).numpy()
        whole[:] = whole.reshape(num_batches, size)[shuffled].reshape(-1)
        return order

    def from_update(self, seed: int, start_update: int) -> Iterator[NDArray[np.int64]]:
        """The rows [B] of the batches from `start_update` on, without an end.

        >>> next(BatchOrder(np.array([7]), batch_size=2).from_update(0, 5)).tolist()
        [0, 0]
        """
        num = len(self.lengths)
        number, start = divmod(start_update * self.batch_size, num)
        rows = self.epoch(seed, number)[start:]
        while True:
            pieces = [rows]
            have = len(rows)
            while have < self.batch_size:
                number += 1
                pieces.append(self.epoch(seed, number))
                have += num
            joined = np.concatenate(pieces) if len(pieces) > 1 else rows
            yield joined[: self.batch_size]
            rows = joined[self.batch_size :]


def collate_rows(
    rows: Sequence[DataPoint],
    index: NDArray[np.integer],
    *,
    pad_token_id: int,
    per_token: bool = True,
    buckets: Sequence[int] = (),
    device: torch.device | str | None = None,
) -> TensorDict:
    """A batch of rows, padded on the right.

    index: [B], their numbers.
    per_token: an action is a token; else it is an utterance, with the same names.
    buckets: T is raised to the first of these lengths that is enough, and A too, so that batches
        have few shapes; none, or none that is enough: as long as the longest row.

    Gives, for [B]: tokens [B, T] int64; attn_mask [B, T], False where padded; action_idxs [B, A];
    state_idxs [B, A + 1], 0 where padded; rewards [B, A] float32; terminals [B, A + 1], True where
    padded; action_mask [B, A]; index [B]. A is at least 1.

    >>> from raffia.lm.data.data_point import DataPoint
    >>> from raffia.lm.data.token_store import TokenStore
    >>> store = TokenStore.of([DataPoint.from_tokens([1, 5, 3], [0, 1], [0.0, -0.5])])
    >>> batch = collate_rows([store.row(0)], np.array([0]), pad_token_id=0, per_token=False)
    >>> batch["action_idxs"], batch["state_idxs"], batch["rewards"]
    (tensor([[2]]), tensor([[0, 2]]), tensor([[-0.5000]]))
    """
    if not rows:
        raise ValueError("a batch must have at least one row; got none")
    decisions = [row.decisions(per_token) for row in rows]
    length = padded_length(max(len(row.tokens) for row in rows), buckets)
    width = padded_length(max([1, *(len(found.action_idxs) for found in decisions)]), buckets)
    size = len(rows)
    tokens = np.full((size, length), pad_token_id, np.int64)
    attended = np.zeros((size, length), np.bool_)
    actions = np.zeros((size, width), np.int64)
    states = np.zeros((size, width + 1), np.int64)
    rewards = np.zeros((size, width), np.float32)
    terminals = np.ones((size, width + 1), np.bool_)
    real = np.zeros((size, width), np.bool_)
    for at, (row, found) in enumerate(zip(rows, decisions, strict=True)):
        num = len(found.action_idxs)
        tokens[at, : len(row.tokens)] = row.tokens
        attended[at, : len(row.tokens)] = True
        actions[at, :num] = found.action_idxs
        states[at, :num] = found.state_idxs
        states[at, num] = found.last_state
        rewards[at, :num] = found.rewards
        terminals[at, :num] = False
        terminals[at, num] = row.terminal
        real[at, :num] = True
    arrays = {
        "tokens": tokens,
        "attn_mask": attended,
        "action_idxs": actions,
        "state_idxs": states,
        "rewards": rewards,
        "terminals": terminals,
        "action_mask": real,
        "index": np.asarray(index, np.int64).copy(),
    }
    entries: dict[str, Tensor] = {name: torch.from_numpy(found) for name, found in arrays.items()}
    return TensorDict(entries, batch_size=[size], device=device)


def padded_length(length: int, buckets: Sequence[int]) -> int:
    """The first of some rising lengths that is enough; the length itself if none is.

    >>> padded_length(20, (16, 32, 64)), padded_length(20, ()), padded_length(70, (16, 32, 64))
    (32, 20, 70)
    """
    return next((bucket for bucket in buckets if bucket >= length), length)
