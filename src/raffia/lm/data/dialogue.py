"""Logged dialogues as batches for offline learning: the data sets, and the contract for more.

A custom data set is a `List_RL_Dataset` (rows by number) or an `Iterable_RL_Dataset` (rows
drawn one by one, without an end); `DialogueDataset` is that of files, chats and played games.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raffia.data.readers.episode import Path
from raffia.files import shown
from raffia.hints import check_range
from raffia.lm.data.data_point import ConstantTokenReward as ConstantTokenReward
from raffia.lm.data.data_point import DataPoint as DataPoint
from raffia.lm.data.data_point import SpecifiedTokenReward as SpecifiedTokenReward
from raffia.lm.data.data_point import TokenReward as TokenReward
from raffia.lm.data.dialogue_building import Malformed, RowRules, TooLong, build_store
from raffia.lm.data.dialogue_rows import Dialogue as Dialogue
from raffia.lm.data.dialogue_sources import DialogueSource
from raffia.lm.data.dialogue_sources import JsonLineDialogues as JsonLineDialogues
from raffia.lm.data.dialogue_sources import ObservationDialogues as ObservationDialogues
from raffia.lm.data.dialogue_sources import ParquetDialogues as ParquetDialogues
from raffia.lm.data.dialogue_sources import TranscriptDialogues as TranscriptDialogues
from raffia.lm.data.dialogue_sources import read_dialogues as read_dialogues
from raffia.lm.data.rl_dataset import BatchOrder, checked_points, collate_rows
from raffia.lm.data.rl_dataset import Iterable_RL_Dataset as Iterable_RL_Dataset
from raffia.lm.data.rl_dataset import List_RL_Dataset as List_RL_Dataset
from raffia.lm.data.rl_dataset import RL_Dataset as RL_Dataset
from raffia.lm.data.rl_dataset import Vocabulary as Vocabulary
from raffia.lm.data.token_store import TokenStore
from raffia.lm.data.utterances import Observation as Observation
from raffia.lm.tokenizers.tokenizer import Tokenizer, check_tokenizer
from raffia.tensordict.tensordict import TensorDict

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


@dataclass(frozen=True, kw_only=True)
class DialogueStatistics:
    """Statistics of a data set; printed as a table.

    >>> point = DataPoint.from_tokens([1, 5, 3], [0, 1], [0.0, -0.5])
    >>> print(DialogueDataset.of_points([point], Vocabulary(9)).statistics())
    rows                1 (1 finished, 0 cut, 0 left out)
    tokens              3 (mean 3.0, longest 3)
    actions             2 in 1 utterances
    return              mean -0.5; quantiles 0: -0.5, .05: -0.5, .25: -0.5, .5: -0.5, .75: ...
    """

    num_rows: int
    num_tokens: int
    num_actions: int
    num_utterances: int  # of the agent
    num_finished: int  # rows that end where the dialogue did
    num_cut: int  # rows that were longer than the context
    num_skipped: int  # rows that were left out when the source was read
    longest: int  # tokens
    mean_return: float
    return_quantiles: dict[float, float] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = f"{self.num_finished} finished, {self.num_cut} cut, {self.num_skipped} left out"
        mean = self.num_tokens / max(1, self.num_rows)
        quantiles = ", ".join(
            f"{f'{level:g}'.removeprefix('0') or '0'}: {value:.4g}"
            for level, value in self.return_quantiles.items()
        )
        lines = {
            "rows": f"{self.num_rows} ({rows})",
            "tokens": f"{self.num_tokens} (mean {mean:.1f}, longest {self.longest})",
            "actions": f"{self.num_actions} in {self.num_utterances} utterances",
            "return": f"mean {self.mean_return:.4g}; quantiles {quantiles}",
        }
        return "\n".join(f"{name:<20}{text}" for name, text in lines.items())


class DialogueDataset(List_RL_Dataset):
    """Logged dialogues, tokenised once; `build` makes it from a file, chats or games.

    store: the rows.
    rows: the numbers of those that belong to it; None is all.
    sort_window: so many batches' rows are sorted by length together; 1 is not at all, for where
        length goes with the return, sorted batches alternate between good dialogues and bad ones,
        and V, which follows upwards faster than downwards, comes out too high. Each epoch has each
        row once in any case.

    `index` of a batch, as `point`, counts the rows of the store, also where some are left out.

    >>> from types import SimpleNamespace
    >>> ascii = SimpleNamespace(num_tokens=134, pad_token_id=128, bos_token_id=129,
    ...     eos_token_id=130, boa_token_id=131, eoa_token_id=132, eod_token_id=133,
    ...     encode=lambda text: list(text.encode("ascii")))
    >>> user = {"role": "user", "content": "A"}
    >>> chats = TranscriptDialogues([
    ...     [user, {"role": "assistant", "content": "B", "reward": -0.5}],
    ...     [user, {"role": "assistant", "content": "CD", "reward": 1.5}],
    ... ])
    >>> data = DialogueDataset.build(chats, ascii)
    >>> batch = next(data.batches(seed=0, start_update=0, batch_size=2))
    >>> batch["rewards"].sum(0), data.best(0.5)[0].tokens
    (tensor([ 0.0000, -0.5000,  1.5000]), [129, 65, 130, 67, 68, 132, 133])
    """

    def __init__(
        self,
        store: TokenStore,
        tokenizer: Tokenizer | Vocabulary,
        *,
        rows: NDArray[np.int64] | None = None,
        max_len: int | None = None,
        buckets: Sequence[int] = (),
        sort_window: int = 1,
    ) -> None:
        super().__init__(tokenizer, max_len=max_len, buckets=buckets)
        check_range("sort_window", sort_window, 1)
        self.store, self.sort_window = store, sort_window
        self.rows = np.arange(len(store)) if rows is None else rows

    @classmethod
    def build(
        cls,
        source: DialogueSource,
        tokenizer: Tokenizer,
        *,
        token_reward: TokenReward | None = None,
        max_len: int | None = None,
        too_long: TooLong = "refuse",
        malformed: Malformed = "refuse",
        folder: Path | None = None,
        buckets: Sequence[int] = (),
        sort_window: int = 1,
        progress: Callable[[int], None] | None = None,
    ) -> DialogueDataset:
        """The rows of a source as tokens.

        source: `read_dialogues("chats.jsonl")`, `TranscriptDialogues(chats)` or
            `ObservationDialogues(games)`.
        max_len: tokens, the model's context.
        too_long: a longer row is an error; "cut" takes its first tokens, "skip" leaves it out.
        malformed: a row that means nothing is an error with its location; "skip" leaves it
            out, and `statistics()` counts it.
        folder: keep the tokens there, mapped to memory, so that they need not fit into it; they are
            made again when the source, the tokenizer or a setting is another one.
        progress: called with the number of rows that were read, for each.

        >>> DialogueDataset.build(TranscriptDialogues([]), Vocabulary(9))
        Traceback (most recent call last):
        ...
        ValueError: this Vocabulary as a tokenizer has no eoa_token_id, the id of the token that
        ends an utterance of the agent: HFTokenizer(folder, add_missing=True) of ...
        """
        if not hasattr(source, "rows"):
            raise TypeError(
                f"{shown(source)} is not a source of dialogues: pass read_dialogues(path), "
                "ObservationDialogues(dialogues) or TranscriptDialogues(chats), or make rows with "
                "DialogueDataset.of_points(points, tokenizer)"
            )
        check_tokenizer(tokenizer)
        rules = RowRules(
            token_reward=token_reward, max_len=max_len, too_long=too_long, malformed=malformed
        )
        store = build_store(source, tokenizer, rules, folder, progress)
        return cls(store, tokenizer, max_len=max_len, buckets=buckets, sort_window=sort_window)

    @classmethod
    def of_points(
        cls,
        points: Iterable[DataPoint],
        tokenizer: Tokenizer | Vocabulary,
        *,
        max_len: int | None = None,
        buckets: Sequence[int] = (),
        sort_window: int = 1,
    ) -> DialogueDataset:
        """Rows that were made already, in memory.

        >>> point = DataPoint.from_tokens([1, 5, 3], [0, 1], [0.0, 1.0])
        >>> len(DialogueDataset.of_points([point, point], Vocabulary(9)))
        2
        """
        store = TokenStore.of(checked_points(points, tokenizer, max_len))
        return cls(store, tokenizer, max_len=max_len, buckets=buckets, sort_window=sort_window)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} rows, {self.vocabulary.num_tokens} tokens)"

    def size(self) -> int:
        """The number of rows."""
        return len(self.rows)

    def get_item(self, index: int) -> DataPoint:
        """The row of a number below `size()`."""
        return self.store.point(int(self.rows[index]))

    def order(self, batch_size: int) -> BatchOrder:
        """The assignment of rows to batches, in which rows of similar length meet."""
        return BatchOrder(self.store.summary.length[self.rows], batch_size, self.sort_window)

    def take(self, numbers: NDArray[np.int64], *, per_token: bool = True) -> TensorDict:
        """The batch of the rows of these numbers; its `index` are their numbers in the store."""
        rows = self.rows[numbers]
        return collate_rows(
            [self.store.row(row) for row in rows],
            rows,
            pad_token_id=self.vocabulary.pad_token_id,
            per_token=per_token,
            buckets=self.buckets,
        )

    @property
    def origin(self) -> str:
        """Origin of the store: "memory", "folder" (an existing one), or "made: " with the
        reason.

        >>> DialogueDataset.of_points([], Vocabulary(9)).origin
        'memory'
        """
        return self.store.origin

    def select(self, numbers: NDArray[np.int64]) -> DialogueDataset:
        """The data set of the rows of these numbers, of the same store.

        >>> points = [DataPoint.from_tokens([1, token], [0], [0.0]) for token in (5, 6)]
        >>> DialogueDataset.of_points(points, Vocabulary(9)).select(np.array([1]))[0].tokens
        [1, 6]
        """
        found = copy.copy(self)
        found.rows = self.rows[numbers]
        return found

    def best(self, fraction: float) -> DialogueDataset:
        """The rows with the highest returns, for filtered behaviour cloning.

        fraction: of the rows, above 0 and at most 1; at least one row is taken. Of rows with the
            same return those that come first are.

        >>> points = [DataPoint.from_tokens([1, 5], [0], [reward]) for reward in (0.5, 2.0, 1.0)]
        >>> DialogueDataset.of_points(points, Vocabulary(9)).best(0.67).rows
        array([1, 2])
        """
        if not 0 < fraction <= 1:
            raise ValueError(
                f"fraction={fraction} must be above 0 and at most 1; best(0.1) selects a tenth"
            )
        num = max(1, round(fraction * self.size()))
        returns = self.store.summary.episode_return[self.rows]
        return self.select(np.sort(np.argsort(-returns, kind="stable")[:num]))

    def statistics(self) -> DialogueStatistics:
        """How many rows, tokens and actions there are, and what they brought (undiscounted).

        >>> point = DataPoint.from_tokens([1, 5, 3], [0, 1], [0.0, 1.0])
        >>> DialogueDataset.of_points([point, point], Vocabulary(9)).statistics().num_actions
        4
        """
        found: Any = self.store.summary[self.rows]
        values = np.quantile(found.episode_return, QUANTILES) if self.size() else np.empty(0)
        return DialogueStatistics(
            num_rows=self.size(),
            num_tokens=int(found.length.sum(dtype=np.int64)),
            num_actions=int(found.num_actions.sum(dtype=np.int64)),
            num_utterances=int(found.num_utterances.sum(dtype=np.int64)),
            num_finished=int(found.terminal.sum()),
            num_cut=int(found.was_cut.sum()),
            num_skipped=self.store.report.num_skipped,
            longest=int(found.length.max(initial=0)),
            mean_return=float(found.episode_return.mean()) if self.size() else float("nan"),
            return_quantiles=dict(zip(QUANTILES, map(float, values), strict=False)),
        )
