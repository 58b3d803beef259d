"""Rows of tokens one after the other in one array, in memory or mapped from a file.

A row is a run of int32 words: seven numbers (how many tokens, actions and utterances, the last
states of both kinds, whether it is terminal, whether it was cut), then its tokens, action places
and rewards, and the utterances' action places, state places and rewards; rewards are float32.

Beside it stands a summary of each row, in memory: where it begins, how long it is, what it brought.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raffia.data.folder import Content, Folder, load_folder, write_folder
from raffia.files import DamagedFileError
from raffia.lm.data.data_point import DataPoint
from raffia.tensordict.disk import dump, parse

__all__ = ["Row", "RowSummary", "StoreReport", "TokenStore"]

KIND, VERSION = "raffia.token_store", 1
WORDS, INDEX, REPORT = "rows.bin", "index.bin", "report.json"
HEADER = 7
SUMMARY = np.dtype(
    [
        ("start", "<i8"),
        ("length", "<i4"),
        ("num_actions", "<i4"),
        ("num_utterances", "<i4"),
        ("episode_return", "<f8"),
        ("terminal", "?"),
        ("was_cut", "?"),
    ]
)

Ints = NDArray[np.int32]


class Row(NamedTuple):
    """A row as views of the store's array.

    >>> store = TokenStore.of([DataPoint.from_tokens([1, 5, 3], [0, 1], [0.0, -0.5])])
    >>> row = store.row(0)
    >>> row.tokens.tolist(), row.action_idxs.tolist(), row.rewards.tolist(), row.last_state
    ([1, 5, 3], [0, 1], [0.0, -0.5], 2)
    """

    tokens: Ints  # [T]
    action_idxs: Ints  # [A]
    rewards: NDArray[np.float32]  # [A]
    last_state: int
    utterance_action_idxs: Ints  # [U]
    utterance_state_idxs: Ints  # [U], without the last
    utterance_rewards: NDArray[np.float32]  # [U]
    last_utterance_state: int
    terminal: bool
    was_cut: bool


class RowSummary(NamedTuple):
    """What can be asked of all N rows at once.

    >>> store = TokenStore.of([DataPoint.from_tokens([1, 5, 3], [0, 1], [0.0, -0.5])])
    >>> store.summary.length, store.summary.episode_return
    (array([3], dtype=int32), array([-0.5]))
    """

    start: NDArray[np.int64]  # [N] word
    length: Ints  # [N] tokens
    num_actions: Ints  # [N]
    num_utterances: Ints  # [N] of the agent
    episode_return: NDArray[np.float64]  # [N]
    terminal: NDArray[np.bool_]  # [N]
    was_cut: NDArray[np.bool_]  # [N]

    def of(self, rows: NDArray[np.int64]) -> RowSummary:
        """The same of some rows.

        >>> store = TokenStore.of([DataPoint.from_tokens([1, 5, 3], [0, 1], [0.0, -0.5])])
        >>> store.summary.of(np.array([0, 0])).length
        array([3, 3], dtype=int32)
        """
        return RowSummary(
            self.start[rows],
            self.length[rows],
            self.num_actions[rows],
            self.num_utterances[rows],
            self.episode_return[rows],
            self.terminal[rows],
            self.was_cut[rows],
        )


class StoreReport(NamedTuple):
    """What was left out when the rows were read: how many rows, and of the first ones why.

    >>> StoreReport().num_skipped
    0
    """

    num_skipped: int = 0
    reasons: Sequence[str] = ()


class TokenStore:
    """Rows of tokens in one array; `of` holds them in memory, `write` and `open` in a folder.

    >>> store = TokenStore.of([DataPoint.from_tokens([1, 5, 3], [0, 1], [0.0, 1.0])])
    >>> len(store), store.row(0).terminal
    (1, True)
    """

    def __init__(
        self, words: Ints, summary: RowSummary, report: StoreReport, checksum: str = ""
    ) -> None:
        self.words, self.summary, self.report = words, summary, report
        self._checksum = checksum

    @property
    def checksum(self) -> str:
        """The sha256 of all tokens, places and rewards; of a folder, as its manifest has it.

        >>> one, other = (DataPoint.from_tokens([1, token], [0], [0.0]) for token in (5, 6))
        >>> TokenStore.of([one]).checksum == TokenStore.of([other]).checksum
        False
        """
        if not self._checksum:
            self._checksum = hashlib.sha256(self.words.astype("<i4", copy=False).data).hexdigest()
        return self._checksum

    def __len__(self) -> int:
        return len(self.summary.start)

    @classmethod
    def of(
        cls, points: Iterable[DataPoint], report: Callable[[], StoreReport] = StoreReport
    ) -> TokenStore:
        """A store in memory.

        report: called when all points were given.

        >>> len(TokenStore.of([]))
        0
        """
        words: list[Ints] = []
        summary = _Summaries()
        for point in points:
            words.append(words_of(point))
            summary.add(point, len(words[-1]))
        joined = np.concatenate(words) if words else np.empty(0, np.int32)
        return cls(joined, summary.arrays(), report())

    @classmethod
    def write(
        cls,
        folder: str | os.PathLike[str],
        points: Iterable[DataPoint],
        *,
        key: dict[str, Any],
        report: Callable[[], StoreReport] = StoreReport,
    ) -> None:
        """Make a folder of rows, in the place of an older store; all at once, or not at all.

        points: gone through once; one of them at a time is in memory.
        key: what the rows were made from, as JSON; `open` gives it back.
        report: called when all rows are written.

        >>> import tempfile
        >>> points = [DataPoint.from_tokens([1, 5, 3], [0, 1], [0.0, 1.0])]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     TokenStore.write(folder, points, key={"source": "games"})
        ...     TokenStore.open(folder, lambda key: key == {"source": "games"}).row(0).tokens
        array([1, 5, 3], dtype=int32)
        """
        summary = _Summaries()

        def write_words(path: str) -> None:
            with open(path, "xb") as file:
                for point in points:
                    words = words_of(point)
                    summary.add(point, len(words))
                    file.write(words.astype("<i4", copy=False).tobytes())

        def write_index(path: str) -> None:
            with open(path, "xb") as file:
                file.write(summary.record().tobytes())

        def write_report(path: str) -> None:
            with open(path, "xb") as file:
                file.write(dump(report()._asdict()))

        files: dict[str, Content] = {WORDS: write_words, INDEX: write_index, REPORT: write_report}
        write_folder(folder, KIND, VERSION, files, extras={"key": key})

    @classmethod
    def open(
        cls, folder: str | os.PathLike[str], accept: Callable[[dict[str, Any]], bool]
    ) -> TokenStore | None:
        """The store in a folder, mapped to memory; None if `accept` refuses its key.

        Raises FileNotFoundError if there is none, DamagedFileError if it is not as it was written:
        all of it is read once for its checksums.

        >>> TokenStore.open("/nowhere", lambda key: True)
        Traceback (most recent call last):
        ...
        FileNotFoundError: [Errno 2] ...
        """

        def read(found: Folder) -> TokenStore | None:
            if not accept(found.extras.get("key", {})):
                return None
            record = np.frombuffer(found.read(INDEX), SUMMARY)
            path = found.path(WORDS)
            empty = not os.path.getsize(path)
            words = np.empty(0, np.int32) if empty else np.asarray(np.memmap(path, "<i4", "r"))
            report = parse(found.path(REPORT), found.read(REPORT))
            if len(record) and int(record["start"][-1]) >= len(words):
                raise DamagedFileError(path, "it ends before its last row")
            return cls(words, _columns(record), StoreReport(**report), found.checksums[WORDS])

        return load_folder(folder, KIND, VERSION, read)

    def row(self, index: int) -> Row:
        """The row of this number.

        >>> TokenStore.of([DataPoint.from_tokens([1, 5], [0], [2.0])]).row(0).rewards
        array([2.], dtype=float32)
        """
        at = int(self.summary.start[index])
        words = self.words
        header = words[at : at + HEADER].tolist()
        tokens, actions, utterances, last, last_of_utterances, terminal, was_cut = header
        at += HEADER
        parts = []
        for size in (tokens, actions, actions, utterances, utterances, utterances):
            parts.append(words[at : at + size])
            at += size
        return Row(
            parts[0],
            parts[1],
            parts[2].view(np.float32),
            last,
            parts[3],
            parts[4],
            parts[5].view(np.float32),
            last_of_utterances,
            bool(terminal),
            bool(was_cut),
        )

    def point(self, index: int) -> DataPoint:
        """The row of this number, as it came in (rewards as float32).

        >>> point = DataPoint.from_tokens([1, 5, 3], [0, 1], [0.0, -0.5])
        >>> TokenStore.of([point]).point(0) == point
        True
        """
        row = self.row(index)
        actions = row.action_idxs.tolist()
        return DataPoint(
            tokens=row.tokens.tolist(),
            action_idxs=actions,
            state_idxs=[*actions, row.last_state],
            rewards=row.rewards.tolist(),
            terminals=[0] * len(actions) + [int(row.terminal)],
            utterance_action_idxs=row.utterance_action_idxs.tolist(),
            utterance_state_idxs=[*row.utterance_state_idxs.tolist(), row.last_utterance_state],
            utterance_rewards=row.utterance_rewards.tolist(),
            episode_return=float(self.summary.episode_return[index]),
            was_cut=row.was_cut,
        )


class _Summaries:
    """The summaries of rows that are written one after the other."""

    def __init__(self) -> None:
        self._rows: list[NDArray[Any]] = []
        self._block: list[tuple[int | float, ...]] = []
        self._end = 0

    def add(self, point: DataPoint, num_words: int) -> None:
        lengths = len(point.tokens), len(point.action_idxs), len(point.utterance_action_idxs)
        last = point.episode_return, point.terminals[-1], point.was_cut
        self._block.append((self._end, *lengths, *last))
        self._end += num_words
        if len(self._block) == 4096:  # tuples take ten times the space of the array
            self._rows.append(np.array(self._block, SUMMARY))
            self._block = []

    def record(self) -> NDArray[Any]:
        return np.concatenate([*self._rows, np.array(self._block, SUMMARY)])

    def arrays(self) -> RowSummary:
        return _columns(self.record())


def _columns(record: NDArray[Any]) -> RowSummary:
    names: Sequence[str] = SUMMARY.names or ()
    return RowSummary(*(np.ascontiguousarray(record[name]) for name in names))


def words_of(point: DataPoint) -> Ints:
    """The words of a row.

    >>> words_of(DataPoint.from_tokens([1, 5], [0], [0.0])).tolist()
    [2, 1, 1, 1, 1, 1, 0, 1, 5, 0, 0, 1, 0, 0]
    """
    ends, begins = point.utterance_action_idxs, point.utterance_state_idxs
    header = [len(point.tokens), len(point.action_idxs), len(ends)]
    header += [point.state_idxs[-1], begins[-1], point.terminals[-1], int(point.was_cut)]
    rewards = np.array(point.rewards, np.float32).view(np.int32)
    of_utterances = np.array(point.utterance_rewards, np.float32).view(np.int32)
    before = np.array([*header, *point.tokens, *point.action_idxs], np.int32)
    between = np.array([*ends, *begins[:-1]], np.int32)
    return np.concatenate([before, rewards, between, of_utterances])
