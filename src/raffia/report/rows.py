"""Rows of `metrics.jsonl`, read so that a cut or damaged line costs that line only."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

_KEY_KINDS = (b'"start"', b'"resume"', b'"evaluate"', b'"end"', b'"error"')
_BOUNDLESS = 1e60  # far above what float32 holds; sums and squares of such numbers stay finite
_MOST_FAULTS = 5  # named one by one


def number(value: object) -> float:
    """What was written as a number; nan for everything else, boundless numbers among it.

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
    """All rows of a file, and what is wrong with it, line by line.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "metrics.jsonl")
    ...     _ = path.write_text('{"kind": "train", "loss": 2}\\n{"kind": "tra')
    ...     read_rows(path)
    ([{'kind': 'train', 'loss': 2}], ['metrics.jsonl: the last line, 2, is cut off'])
    """
    lines = path.read_bytes().split(b"\n")
    return _parsed(path.name, enumerate(lines, start=1), last=len(lines))


def key_rows(path: Path) -> tuple[list[Row], list[str]]:
    """Only the rows of starts, evaluations, errors and ends, and the last one: quick on long files.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "metrics.jsonl")
    ...     _ = path.write_text('{"kind": "start"}\\n{"kind": "train"}\\n{"kind": "episode"}\\n')
    ...     key_rows(path)[0]
    [{'kind': 'start'}, {'kind': 'episode'}]
    """
    data = path.read_bytes()
    starts = {_line_start(data, at) for word in _KEY_KINDS for at in _places(data, word)}
    whole = data.rfind(b"\n")  # the end of the last line that was written to its end
    if whole > 0:
        starts.add(_line_start(data, whole))
    lines = [data[start : _line_end(data, start)] for start in sorted(starts)]
    rows, _ = _parsed(path.name, enumerate(lines), last=-1)
    tail = data[whole + 1 :]
    faults = _parsed(path.name, [(data.count(b"\n") + 1, tail)], last=data.count(b"\n") + 1)[1]
    return rows, faults


def _parsed(
    name: str, lines: Iterable[tuple[int, bytes]], last: int
) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    faults: list[str] = []
    for line, text in lines:
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):  # RecursionError: brackets thousands deep
            cut = line == last
            faults.append(
                f"{name}: the last line, {line:,}, is cut off"
                if cut
                else f"{name}: line {line:,} is no JSON and was left out"
            )
            continue
        if isinstance(row, dict) and isinstance(row.get("kind"), str):
            rows.append(row)
        else:
            faults.append(f'{name}: line {line:,} is no row with a "kind" and was left out')
    if len(faults) > _MOST_FAULTS:
        more = len(faults) - _MOST_FAULTS
        faults = [*faults[:_MOST_FAULTS], f"{name}: {more:,} more such lines"]
    return rows, faults


def _places(data: bytes, word: bytes) -> Iterable[int]:
    at = data.find(word)
    while at >= 0:
        yield at
        at = data.find(word, at + 1)


def _line_start(data: bytes, at: int) -> int:
    return data.rfind(b"\n", 0, at) + 1


def _line_end(data: bytes, start: int) -> int:
    end = data.find(b"\n", start)
    return len(data) if end < 0 else end
