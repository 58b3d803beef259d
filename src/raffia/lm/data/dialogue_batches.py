"""The order in which rows are learnt from, and how some of them become one batch.

Legend: B rows of a batch, T tokens and A actions (or utterances) of its longest, N rows in all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raffia.functional.seeds import generator_for
from raffia.lm.data.data_point import DataPoint
from raffia.tensordict.tensordict import TensorDict


class BatchOrder(NamedTuple):
    """Which rows are in which batch: computed from the seed and the number of the batch alone.

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
        raise ValueError("a batch has at least one row, got none")
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
