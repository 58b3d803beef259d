"""Files that only grow: rows of metrics, points of curves."""

from __future__ import annotations

import os
from typing import Self

from raffia.files import sync


class AppendedFile:
    """A file that is open for appending, without a buffer; `path` is its path.

    A subclass writes to `_file`, and cuts off what a crash has torn.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, AppendedFile(f"{folder}/log") as log:
    ...     log.position()
    0
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)
        self._is_named = os.path.exists(self.path)  # on disk, too
        self._file = open(self.path, "a+b", buffering=0)  # a row is one call of the system

    def position(self) -> int:
        """Bytes so far, for `rewind`."""
        return os.fstat(self._file.fileno()).st_size

    def sync(self) -> None:
        """Bring all that was written to disk."""
        os.fsync(self._file.fileno())
        if not self._is_named:
            sync(os.path.dirname(self.path))
            self._is_named = True

    def append(self, data: bytes) -> None:
        """Write bytes at the end, all of them; if that fails, the file is as it was."""
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

    def close(self) -> None:
        """Close the file; nothing can be written any more."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
