"""Files that only grow; what a crash has torn at their end is cut off when they are opened."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any, BinaryIO, Self, cast

from raffia.files.atomic import sync
from raffia.files.damage import Path

TAIL = 1 << 16  # bytes that are looked at to find the last line


class AppendLog:
    """A file of records that is open for appending, without a buffer; `path` is its path.

    A record is in the system's hands when it is written. A subclass tells where the last whole one
    ends, and what the file begins with.

    path: made if need be.

    >>> import tempfile
    >>> class Bytes(AppendLog):
    ...     def _end(self, file):
    ...         return file.seek(0, os.SEEK_END)
    >>> with tempfile.TemporaryDirectory() as folder, Bytes(f"{folder}/log") as log:
    ...     log.append(b"abc")
    ...     log.rewind(1), log.position()
    (2, 1)
    """

    def __init__(self, path: Path) -> None:
        self.path = os.path.abspath(path)
        self._is_named = os.path.exists(self.path)  # on disk, too
        self._file = open(self.path, "a+b", buffering=0)  # a record is one call of the system
        try:
            self._cut()
        except BaseException:
            self._file.close()
            raise

    def _end(self, file: BinaryIO) -> int:
        """The offset where the last complete record ends."""
        raise NotImplementedError

    def _begin(self) -> None:
        """Write what the file begins with; it is empty."""

    def _cut(self) -> None:
        self._file.truncate(self._end(cast(BinaryIO, self._file)))
        if not self.position():
            self._begin()

    def position(self) -> int:
        """The current length of the file in bytes, for `rewind`."""
        return os.fstat(self._file.fileno()).st_size

    def append(self, data: bytes) -> None:
        """Append all of `data`; if that fails, the file is restored to its previous state.

        Raises OSError if the disk is full.
        """
        before = self.position()
        try:
            rest = memoryview(data)
            while rest:  # a call may take a part, as where the disk becomes full
                rest = rest[self._file.write(rest) :]
        except BaseException as error:
            self._file.truncate(before)
            if isinstance(error, OSError):
                error.filename = self.path
            raise

    def rewind(self, position: int) -> int:
        """Remove what was written after `position`; returns how many bytes that were.

        A file that is shorter already is left as it is.
        """
        before = self.position()
        if position < before:
            self._file.truncate(position)
            self._cut()
        return before - self.position()

    def sync(self) -> None:
        """Sync all that was written to disk."""
        os.fsync(self._file.fileno())
        if not self._is_named:
            sync(os.path.dirname(self.path))
            self._is_named = True

    def close(self) -> None:
        """Close the file; nothing can be written any more."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JsonLines(AppendLog):
    """A log of JSON objects, one a line. JSON has no NaN and no infinity: both are written as null.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, JsonLines(f"{folder}/m.jsonl") as log:
    ...     log.write({"kind": "train", "update": 1, "loss": float("nan")})
    ...     position = log.position()
    ...     log.write({"kind": "train", "update": 2, "loss": 0.5})
    ...     log.rewind(position)
    ...     with open(log.path) as lines:
    ...         print(lines.read())
    44
    {"kind": "train", "update": 1, "loss": null}
    <BLANKLINE>
    """

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row of JSON values.

        Raises OSError if the disk is full; the file is as it was then.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, JsonLines(f"{folder}/m.jsonl") as log:
        ...     log.write({"loss": object()})
        Traceback (most recent call last):
        ...
        TypeError: ... the values of a row must be JSON values, such as float(loss): ...
        """
        try:
            text = json.dumps(_finite(row), allow_nan=False)
        except TypeError as error:
            raise TypeError(
                f"{error}; the values of a row must be JSON values, such as float(loss): "
                f"{dict(row)!r:.200}"
            ) from None
        self.append(f"{text}\n".encode())

    def _end(self, file: BinaryIO) -> int:
        """The offset where the last complete row ends; zeros and unterminated lines don't count."""
        end = file.seek(0, os.SEEK_END)
        while end:
            start = _start_of_line(file, end)
            file.seek(start)
            line = file.read(end - start)
            if line.endswith(b"\n") and _is_row(line):
                return end
            end = start
        return 0


def _finite(value: Any) -> Any:
    """The value with None instead of numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return value


def _start_of_line(file: BinaryIO, end: int) -> int:
    """The offset where the line starts whose last byte is before `end`."""
    stop = end - 1  # its own end does not count
    while stop > 0:
        start = max(0, stop - TAIL)
        file.seek(start)
        found = file.read(stop - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        stop = start
    return 0


def _is_row(line: bytes) -> bool:
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict)
