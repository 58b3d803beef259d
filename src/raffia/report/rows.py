"""Rows of `metrics.jsonl`, and the evaluations among them.

A cut or damaged line costs that line only.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from raffia.files import open_plain

Row = dict[str, Any]

_KEY_KINDS = (b'"start"', b'"resume"', b'"evaluate"', b'"end"', b'"error"')
_BOUNDLESS = 1e60  # far above what float32 holds; sums and squares of such numbers stay finite
_MOST_ROWS = 4000  # of a kind: a page shows fewer points
_TAIL = 20  # rows of each kind, the last ones, that are there whatever is left out before
_MOST_KINDS = 40
_MOST_KEYS = 400  # of a row
_LONGEST = 4_000_000  # bytes of a line
_MOST_FAULTS = 5  # named one by one

_POSITION = ("kind", "update", "env_step", "seconds", "num_simulations")


def number(value: object) -> float:
    """A value as a number; nan for everything that is not a finite number.

    >>> number(3), number("NaN"), number(None), number(True), number(float("inf"))
    (3.0, nan, nan, nan, nan)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        found = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.nan
    return found if abs(found) < _BOUNDLESS else math.nan


def numbers(value: object) -> list[float]:
    """The numbers of a list, those that are none left out.

    >>> numbers([1, None, 2.5]), numbers("none")
    ([1.0, 2.5], [])
    """
    if not isinstance(value, list):
        return []
    return [found for found in map(number, value) if not math.isnan(found)]


def read_rows(path: Path) -> tuple[list[Row], list[str]]:
    """The rows of a file, and what is wrong with it, line by line.

    Of a kind with very many rows they are every second, every fourth ... and the last ones.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "metrics.jsonl")
    ...     _ = path.write_text('{"kind": "train", "loss": 2}\\n{"kind": "tra')
    ...     read_rows(path)
    ([{'kind': 'train', 'loss': 2}], ['metrics.jsonl: the last line, 2, is cut off'])
    """
    return counted_rows(path)[:2]


def counted_rows(path: Path) -> tuple[list[Row], list[str], dict[str, int]]:
    """The rows as `read_rows` returns them, and the total number of rows of each kind.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "metrics.jsonl")
    ...     _ = path.write_text('{"kind": "train"}\\n' * 9000)
    ...     rows, _, counts = counted_rows(path)
    >>> len(rows) < 5000, counts
    (True, {'train': 9000})
    """
    found = _Thinned()
    with open_plain(path) as file:
        faults = _parse(path.name, _lines(file), found.add)
    for kind, (step, total) in found.steps().items():
        faults.append(f"{path.name}: of {total:,} rows of {kind} only every {step}th was read")
    return found.rows(), faults, found.counts


def key_rows(path: Path) -> tuple[list[Row], list[str]]:
    """Read only the start, evaluation, error and end rows and the last one: fast on long files.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "metrics.jsonl")
    ...     _ = path.write_text('{"kind": "start"}\\n{"kind": "train"}\\n{"kind": "episode"}\\n')
    ...     key_rows(path)[0]
    [{'kind': 'start'}, {'kind': 'episode'}]
    """
    with open_plain(path) as file:
        data = file.read()
    starts = {_line_start(data, at) for word in _KEY_KINDS for at in _positions(data, word)}
    whole = data.rfind(b"\n")  # the end of the last line that was written to its end
    if whole > 0:
        starts.add(_line_start(data, whole))
    found = _Thinned()
    lines = [data[start : _line_end(data, start)] for start in sorted(starts)]
    _parse(path.name, [(at, line, True) for at, line in enumerate(lines)], found.add)
    tail = [(data.count(b"\n") + 1, data[whole + 1 :], False)]
    return found.rows(), _parse(path.name, tail, lambda line, row: "")


class _Thinned:
    """Rows of each kind, of which every second is left out whenever there are too many.

    The times of a row since the row before it, "seconds_learn" and the like, goes to the
    next one that is retained, so that sums stay.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._retained: dict[str, list[tuple[int, Row]]] = {}  # of each kind: line, row
        self._left: dict[str, list[tuple[int, Row]]] = {}  # out, since the last that was retained
        self._tails: dict[str, deque[tuple[int, Row]]] = {}
        self._step: dict[str, int] = {}

    def add(self, line: int, row: Row) -> str:
        """Add a row; return what is wrong with it, or an empty string."""
        kind = row["kind"]
        if kind not in self.counts and len(self.counts) == _MOST_KINDS:
            return "is of one kind too many and was left out"
        number = self.counts[kind] = self.counts.get(kind, 0) + 1
        retained, left = self._retained.setdefault(kind, []), self._left.setdefault(kind, [])
        wide = len(row) > _MOST_KEYS
        row = {**dict(islice(row.items(), _MOST_KEYS)), "kind": kind} if wide else row
        step = self._step.setdefault(kind, 1)
        left.append((line, row))
        if not any(key.startswith("seconds_") for key in row):  # else their times count twice
            self._tails.setdefault(kind, deque(maxlen=_TAIL)).append((line, row))
        if (number - 1) % step == 0:
            retained.append((line, _with_times(row, [before for _, before in left[:-1]])))
            left.clear()
            if len(retained) > _MOST_ROWS:
                self._halve(retained, left)
                self._step[kind] = 2 * step
        return f"has more than {_MOST_KEYS} entries; the others were left out" if wide else ""

    def _halve(self, retained: list[tuple[int, Row]], left: list[tuple[int, Row]]) -> None:
        if len(retained) % 2 == 0:
            left.append(retained.pop())
        pairs = zip(retained[1::2], retained[2::2], strict=True)
        retained[1:] = [(line, _with_times(row, [before])) for (_, before), (line, row) in pairs]

    def steps(self) -> dict[str, tuple[int, int]]:
        """Kinds that were thinned: every how many-th row was retained, and of how many."""
        return {kind: (step, self.counts[kind]) for kind, step in self._step.items() if step > 1}

    def rows(self) -> list[Row]:
        """The rows that are left, in line order, including all of the last ones of each kind."""
        found: dict[int, Row] = {}
        for kind, retained in self._retained.items():
            left = self._left[kind]
            found |= dict(retained)
            if left:
                line, last = left[-1]
                found[line] = _with_times(last, [row for _, row in left[:-1]])
        for tail in self._tails.values():
            found |= dict(tail)
        return [found[line] for line in sorted(found)]


def _with_times(row: Row, before: list[Row]) -> Row:
    """A row with the times of rows before it that were left out added."""
    times: dict[str, float] = {}
    for one in [row, *before] if before else []:
        for key in one:
            if key.startswith("seconds_") and not math.isnan(value := number(one[key])):
                times[key] = times.get(key, 0.0) + value
    return {**row, **times} if times else row


def _parse(
    name: str, lines: Iterable[tuple[int, bytes, bool]], take: Callable[[int, Row], str]
) -> list[str]:
    """Pass each row on; returns what is wrong with the lines."""
    faults: list[str] = []
    for line, text, ends in lines:
        if len(text) > _LONGEST:
            faults.append(f"{name}: line {line:,} is longer than {_LONGEST:,} bytes: left out")
            continue
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):  # RecursionError: brackets thousands deep
            faults.append(
                f"{name}: line {line:,} is not JSON and was left out"
                if ends
                else f"{name}: the last line, {line:,}, is cut off"
            )
            continue
        if isinstance(row, dict) and isinstance(row.get("kind"), str):
            if fault := take(line, row):
                faults.append(f"{name}: line {line:,} {fault}")
        else:
            faults.append(f'{name}: line {line:,} is not a row with a "kind" and was left out')
    if len(faults) > _MOST_FAULTS:
        more = len(faults) - _MOST_FAULTS
        faults = [*faults[:_MOST_FAULTS], f"{name}: {more:,} more such lines"]
    return faults


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes, bool]]:
    """Lines as number, text, and whether complete; of a long line only its beginning."""
    number, is_whole = 0, True
    while line := file.readline(_LONGEST + 1):
        if is_whole:
            number += 1
            yield number, line, line.endswith(b"\n")
        is_whole = line.endswith(b"\n")


def _positions(data: bytes, word: bytes) -> Iterable[int]:
    at = data.find(word)
    while at >= 0:
        yield at
        at = data.find(word, at + 1)


def _line_start(data: bytes, at: int) -> int:
    return data.rfind(b"\n", 0, at) + 1


def _line_end(data: bytes, start: int) -> int:
    end = data.find(b"\n", start)
    return len(data) if end < 0 else end


@dataclass(frozen=True)
class Decoding:
    """A mean return with its interval: of one decoding, over runs, or of the data.

    >>> Decoding(mean=-2.5).share_won
    nan
    """

    mean: float
    low: float = math.nan  # the 95 % interval of the mean, over its episodes
    high: float = math.nan
    share_won: float = math.nan
    returns: tuple[float, ...] = ()  # where a file has them


@dataclass(frozen=True)
class EvaluationRow:
    """One evaluation during training: of episodes, or of held-out rows.

    >>> EvaluationRow(env_step=100.0, seconds=2.0, mean=9.5, returns=(9.0, 10.0)).score
    9.5
    >>> EvaluationRow(math.nan, 2.0, 0.5, update=100.0, held_out={"loss": 0.5}).score
    -0.5
    """

    env_step: float  # nan where none are played
    seconds: float
    mean: float  # return; the loss of held-out rows
    returns: tuple[float, ...] = ()
    as_first: tuple[bool, ...] = ()  # games of two players
    update: float = math.nan
    low: float = math.nan  # the 95 % interval of the mean, where the row has it
    high: float = math.nan
    decodings: Mapping[str, Decoding] = field(default_factory=dict)  # by name of the decoding
    held_out: Mapping[str, float] = field(default_factory=dict)  # losses and other means, by name

    @property
    def of_loss(self) -> bool:
        """Whether the mean is a loss: less is better."""
        return bool(self.held_out)

    @property
    def progress(self) -> float:
        """The count that the run had reached, environment steps or updates."""
        return self.update if math.isnan(self.env_step) else self.env_step

    @property
    def unit(self) -> str:
        """The unit in which `progress` is counted."""
        return "updates" if math.isnan(self.env_step) else "env steps"

    @property
    def score(self) -> float:
        """The result as a number: the larger the better."""
        if self.of_loss:
            return self.held_out.get("score", -self.mean)
        return self.mean


def evaluations_of(rows: Iterable[Row]) -> list[EvaluationRow]:
    """The evaluations of rows that have a result and a time.

    >>> row = {"kind": "evaluate", "update": 9, "returns": [1.0, 3.0]}
    >>> [one.mean for one in evaluations_of([row, {"kind": "evaluate", "update": 12}])]
    [2.0]
    """
    found = []
    for row in rows:
        env_step, update = number(row.get("env_step")), number(row.get("update"))
        returns, mean = numbers(row.get("returns")), number(row.get("mean_return"))
        if math.isnan(mean) and returns:
            mean = sum(returns) / len(returns)
        held_out = {} if returns or "mean_return" in row else _held_out(row)
        mean = held_out.get("loss", mean)
        if math.isnan(mean) or (math.isnan(env_step) and math.isnan(update)):
            continue
        first = row.get("as_first")
        found.append(
            EvaluationRow(
                env_step=env_step,
                seconds=number(row.get("seconds")),
                mean=mean,
                returns=tuple(returns),
                as_first=tuple(map(bool, first)) if isinstance(first, list) else (),
                update=update,
                low=number(row.get("low")),
                high=number(row.get("high")),
                decodings=decodings_of(row.get("decodings")),
                held_out=held_out,
            )
        )
    return found


def decodings_of(value: object) -> dict[str, Decoding]:
    """The results of each decoding in a row, or in a file of an evaluation.

    >>> decodings_of({"decode": {"mean_return": -2, "share_won": 0.5}, "odd": 3})["decode"].mean
    -2.0
    """
    if not isinstance(value, dict):
        return {}
    found = {name: result_of(one) for name, one in value.items()}
    return {name: one for name, one in found.items() if one is not None}


def result_of(value: object) -> Decoding | None:
    """The result that an object of JSON holds; None if it has no mean return."""
    if not isinstance(value, dict) or math.isnan(number(value.get("mean_return"))):
        return None
    return Decoding(
        mean=number(value["mean_return"]),
        low=number(value.get("low")),
        high=number(value.get("high")),
        share_won=number(value.get("share_won")),
        returns=tuple(numbers(value.get("returns"))),
    )


def _held_out(row: Row) -> dict[str, float]:
    """The means of an evaluation on held-out rows; empty unless the loss is among them."""
    means = {name: number(value) for name, value in row.items() if name not in _POSITION}
    means = {name: value for name, value in means.items() if not math.isnan(value)}
    return means if "loss" in means else {}
