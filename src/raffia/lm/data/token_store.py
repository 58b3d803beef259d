"""Rows of tokens one after the other in one array, in memory or mapped from a file.

A row is a run of int32 words: seven numbers (how many tokens, actions and utterances, the last
states of both kinds, whether it is terminal, whether it was cut), then its tokens, action indices
and rewards, and the utterances' action indices, state indices and rewards; rewards are float32.

Beside it is a summary of each row, in memory: where it begins, its length, its return.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raffia.files import DamagedFileError, dump_json, parse_json
from raffia.files.folder import Content, Folder, load_folder, write_folder
from raffia.lm.data.data_point import DataPoint, Decisions

KIND, VERSION = "raffia.token_store", 1
WORDS, INDEX, REPORT = "rows.bin", "index.bin", "report.json"
HEADER = 7
SUMMARY = np.dtype(
    [
        ("start", "<i8"),  # word
        ("length", "<i4"),  # tokens
        ("num_actions", "<i4"),
        ("num_utterances", "<i4"),  # of the agent
        ("episode_return", "<f8"),
        ("terminal", "?"),
        ("was_cut", "?"),
    ]
)

NUM_REASONS = 10  # so many of the rows that were left out are remembered with the reason

Ints = NDArray[np.int32]
Summary: TypeAlias = "np.recarray[Any, Any]"  # [N] of SUMMARY's fields, as attributes


@dataclass
class StoreReport:
    """The rows that were left out on reading: their number, and the reasons for the first ones.

    >>> report = StoreReport()
    >>> report.skip("line 3: it is blank")
    >>> report.num_skipped
    1
    """

    num_skipped: int = 0
    reasons: list[str] = field(default_factory=list)

    def skip(self, why: str) -> None:
        """Count a row that is left out."""
        self.num_skipped += 1
        if len(self.reasons) < NUM_REASONS:
            self.reasons.append(why)


class TokenStore:
    """Rows of tokens in one array; `of` holds them in memory, `write` and `open` in a folder.

    >>> store = TokenStore.of([DataPoint.from_tokens([1, 5, 3], [0, 1], [0.0, 1.0])])
    >>> len(store), store.row(0).terminal
    (1, True)
    """

    def __init__(
        self,
        words: Ints,
        summary: Summary,  # [N] rows
        report: StoreReport,
        *,
        origin: str = "memory",
        checksum: str = "",
    ) -> None:
        self.words, self.summary, self.report, self.origin = words, summary, report, origin
        # A record's attributes take long.
        self._starts = np.ascontiguousarray(summary.start)
        self._returns = np.ascontiguousarray(summary.episode_return)
        self._checksum = checksum

    @property
    def checksum(self) -> str:
        """The sha256 of all tokens, indices and rewards; of a folder, as its manifest has it.

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
    def of(cls, points: Iterable[DataPoint], report: StoreReport | None = None) -> TokenStore:
        """A store in memory.

        report: to which whoever gives the points adds what is left out.

        >>> len(TokenStore.of([]))
        0
        """
        index = bytearray()
        words = [np.empty(0, np.int32), *_rows(points, index)]
        report = StoreReport() if report is None else report
        return cls(np.concatenate(words), _summary(bytes(index)), report)

    @classmethod
    def write(
        cls,
        folder: str | os.PathLike[str],
        points: Iterable[DataPoint],
        *,
        key: dict[str, Any],
        report: StoreReport | None = None,
    ) -> None:
        """Make a folder of rows, replacing an older store; all of it, or nothing.

        points: gone through once; one of them at a time is in memory.
        key: what the rows were made from, as JSON; `open` gives it back.
        report: written when all rows are.

        >>> import tempfile
        >>> points = [DataPoint.from_tokens([1, 5, 3], [0, 1], [0.0, 1.0])]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     TokenStore.write(folder, points, key={"source": "games"})
        ...     TokenStore.open(folder, lambda key: key == {"source": "games"}).row(0).tokens
        array([1, 5, 3], dtype=int32)
        """
        index = bytearray()

        def write_words(path: str) -> None:
            with open(path, "xb") as file:
                for words in _rows(points, index):
                    file.write(words.astype("<i4", copy=False).tobytes())

        counts = StoreReport() if report is None else report
        files: dict[str, Content] = {  # the last two are known when the rows are written
            WORDS: write_words,
            INDEX: lambda path: Path(path).write_bytes(index),
            REPORT: lambda path: Path(path).write_bytes(dump_json(asdict(counts))),
        }
        write_folder(folder, KIND, VERSION, files, extras={"key": key})

    @classmethod
    def open(
        cls, folder: str | os.PathLike[str], accept: Callable[[dict[str, Any]], bool]
    ) -> TokenStore | None:
        """The store in a folder, mapped to memory; None if `accept` refuses its key.

        Raises FileNotFoundError if the folder has none, DamagedFileError if it is not as it was
        written: all of it is read once for its checksums.

        >>> TokenStore.open("/nowhere", lambda key: True)
        Traceback (most recent call last):
        ...
        FileNotFoundError: [Errno 2] ...
        """

        def read(found: Folder) -> TokenStore | None:
            if not accept(found.extras.get("key", {})):
                return None
            summary = _summary(found.read(INDEX))
            path = found.path(WORDS)
            empty = not os.path.getsize(path)
            words = np.empty(0, np.int32) if empty else np.asarray(np.memmap(path, "<i4", "r"))
            report = StoreReport(**parse_json(found.path(REPORT), found.read(REPORT), deepest=None))
            if len(summary) and int(summary.start[-1]) >= len(words):
                raise DamagedFileError(path, "it ends before its last row")
            checksum = found.checksums[WORDS]
            return cls(words, summary, report, origin="folder", checksum=checksum)

        return load_folder(folder, KIND, VERSION, read)

    def row(self, index: int) -> DataPoint:
        """The row of this number, as views of the store's array.

        >>> store = TokenStore.of([DataPoint.from_tokens([1, 5], [0], [2.0])])
        >>> store.row(0).rewards
        array([2.], dtype=float32)
        """
        at, words = int(self._starts[index]) + HEADER, self.words
        header = words[at - HEADER : at].tolist()
        num_tokens, num, num_utterances, last, last_of_utterances, terminal, was_cut = header
        parts: list[Any] = []
        for size in (num_tokens, num, num, num_utterances, num_utterances, num_utterances):
            parts.append(words[at : at + size])
            at += size
        tokens, actions, rewards, ends, begins, totals = parts
        return DataPoint(
            tokens,
            Decisions(actions, actions, rewards.view(np.float32), last),
            Decisions(ends, begins, totals.view(np.float32), last_of_utterances),
            terminal=bool(terminal),
            episode_return=float(self._returns[index]),
            was_cut=bool(was_cut),
        )

    def point(self, index: int) -> DataPoint:
        """The row of this number, as it came in (rewards as float32).

        >>> point = DataPoint.from_tokens([1, 5, 3], [0, 1], [0.0, -0.5])
        >>> TokenStore.of([point]).point(0) == point
        True
        """
        row: Any = self.row(index)
        own, utterances = (
            Decisions(actions.tolist(), states.tolist(), rewards.tolist(), last)
            for actions, states, rewards, last in (row.of_tokens, row.of_utterances)
        )
        return replace(row, tokens=row.tokens.tolist(), of_tokens=own, of_utterances=utterances)


def _rows(points: Iterable[DataPoint], index: bytearray) -> Iterator[Ints]:
    """The words of each row; its summary is appended to the index."""
    start = 0
    for point in points:
        words = words_of(point)
        lengths = len(point.tokens), len(point.rewards), len(point.utterance_rewards)
        last = point.episode_return, point.terminal, point.was_cut
        index += np.array((start, *lengths, *last), SUMMARY).tobytes()
        start += len(words)
        yield words


def _summary(index: bytes) -> Summary:
    return np.frombuffer(index, SUMMARY).view(np.recarray)


def words_of(point: DataPoint) -> Ints:
    """The words of a row.

    >>> words_of(DataPoint.from_tokens([1, 5], [0], [0.0])).tolist()
    [2, 1, 1, 1, 1, 1, 0, 1, 5, 0, 0, 1, 0, 0]
    """
    own, utterances = point.of_tokens, point.of_utterances
    header = [len(point.tokens), len(own.rewards), len(utterances.rewards), own.last_state]
    header += [utterances.last_state, int(point.terminal), int(point.was_cut)]
    rewards, totals = (
        np.array(found.rewards, np.float32).view(np.int32) for found in (own, utterances)
    )
    before = np.array([*header, *point.tokens, *own.action_idxs], np.int32)
    between = np.array([*utterances.action_idxs, *utterances.state_idxs], np.int32)
    return np.concatenate([before, rewards, between, totals])
