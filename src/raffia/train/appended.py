"""What files that only grow have in common: rows of metrics, points of curves."""

from __future__ import annotations

import os
from typing import Self


class AppendedFile:
    """A file that is open for appending, without a buffer; `path` says where it is.

    A subclass writes to `_file`, and cuts off what a crash has torn.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, AppendedFile(f"{folder}/log") as log:
    ...     log.position()
    0
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)
        self._file = open(self.path, "a+b", buffering=0)  # a row is one call of the system

    def position(self) -> int:
        """Bytes so far, for `rewind`."""
        return os.fstat(self._file.fileno()).st_size

    def sync(self) -> None:
        """Bring all that was written to disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; nothing can be written any more."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
