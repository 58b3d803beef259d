"""Locks of files and folders, which end with the process that holds them at the latest."""

from __future__ import annotations

import errno
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

from raffia.files.damage import Path

# What file systems without locks say: some of them have none at all, or none for folders.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)


class Lock:
    """A lock of an open file or folder, which ends with the process at the latest.

    Where the system or the file system has no locks, `missing` says so, and no process is excluded.

    fd: the caller closes it after `release`.
    shared: others may hold it as well.
    wait: until it is free; else BlockingIOError says that another has it.

    >>> import tempfile
    >>> with tempfile.TemporaryFile() as file:
    ...     lock = Lock(file.fileno())
    ...     lock.missing, lock.release()
    ('', None)
    """

    def __init__(self, fd: int, *, shared: bool = False, wait: bool = False) -> None:
        self._fd, self._is_held, self.missing = fd, False, ""
        try:
            # Stored, as nothing can be imported any more at the end of the process.
            self._fcntl = fcntl = importlib.import_module("fcntl")
        except ImportError:
            self.missing = "this system has no file locks"
            return
        how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        try:
            fcntl.flock(fd, how)
            self._is_held = True
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            self.missing = f"this file system has no locks ({error.strerror})"

    def release(self) -> None:
        """Release the lock for others; a second call does nothing."""
        if self._is_held:  # closing is not enough: a child that was forked meanwhile has it too
            self._is_held = False
            self._fcntl.flock(self._fd, self._fcntl.LOCK_UN)


@contextmanager
def locked(folder: Path, *, shared: bool = False, wait: bool = True) -> Iterator[str]:
    """Lock a folder against other processes; yields why that is impossible here, or "".

    shared: those are let in that share it, too.
    wait: until it is free; else BlockingIOError says that another has it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, locked(folder) as missing:
    ...     missing
    ''
    """
    if os.name == "nt":  # no folder can be opened there
        yield "this system has no folder locks"
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        lock = Lock(fd, shared=shared, wait=wait)
        try:
            yield lock.missing
        finally:
            lock.release()
    finally:
        os.close(fd)
