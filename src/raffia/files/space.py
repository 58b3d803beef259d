"""Files with their space on the disk, for memory that is mapped from them.

Without the space, a write to the map of a file on a full disk kills the process (SIGBUS).
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
import tempfile
import weakref
from collections.abc import Mapping
from contextlib import suppress

from raffia.files.atomic import sync

FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)


def reserve(fd: int, nbytes: int) -> None:
    """Set the length of an open file, reserving its space where the system can do so.

    >>> with tempfile.TemporaryFile() as file:
    ...     reserve(file.fileno(), 10)
    ...     os.fstat(file.fileno()).st_size
    10
    """
    if nbytes and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, nbytes)
    elif nbytes:  # macOS has no way to reserve
        os.ftruncate(fd, nbytes)


def reserve_file(filename: str, nbytes: int, existsok: bool, mode: int = 0o666) -> None:
    """Make a file of `nbytes`, with its space on the disk, so that a full disk is an OSError here.

    A file of this length stays, so that other maps of it see what is written into it. One of
    another length is replaced: to cut it would kill processes that have mapped it.
    Raises RuntimeError if it is there and may not be.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     reserve_file(f"{folder}/x", 10, False)
    ...     os.path.getsize(f"{folder}/x")
    10
    """
    made = filename  # what to remove if there is no space
    try:
        fd = os.open(filename, FLAGS | os.O_EXCL, mode)
    except FileExistsError:
        if not existsok:
            raise RuntimeError(
                f"The file {filename} already exists. To write over it, pass existsok=True"
            ) from None
        found = os.lstat(filename)
        made = ""
        if found.st_size != nbytes or not stat.S_ISREG(found.st_mode):
            made = os.path.join(os.path.dirname(filename), f".{secrets.token_hex(6)}.tmp")
        fd = os.open(made or filename, FLAGS | getattr(os, "O_NOFOLLOW", 0), mode)
    try:
        reserve(fd, nbytes)
        if made and made != filename:
            os.replace(made, filename)
    except BaseException:
        if made:
            os.unlink(made)
        raise
    finally:
        os.close(fd)


def make_files(folder: str, sizes: Mapping[str, int]) -> None:
    """Make files of zeros of these lengths, with their space on the disk, and sync them to disk.

    Raises OSError, and leaves nothing behind, if there is not enough.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     make_files(folder, {"a": 10, "b": 0})
    ...     sorted(os.listdir(folder))
    ['a', 'b']
    """
    needed, free = sum(sizes.values()), shutil.disk_usage(folder).free
    try:
        if needed > free:
            raise OSError(errno.ENOSPC, "")
        for name, nbytes in sizes.items():
            fd = os.open(f"{folder}/{name}", FLAGS | os.O_TRUNC)
            try:
                reserve(fd, nbytes)
                os.fsync(fd)
            finally:
                os.close(fd)
        sync(folder)
    except OSError as error:
        for name in sizes:
            with suppress(FileNotFoundError):
                os.unlink(f"{folder}/{name}")
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise
        why = (
            f"no space for the rows: they need {needed / 2**30:.3g} GiB, but only "
            f"{free / 2**30:.3g} GiB are free. Use a smaller max_size, or a folder on another disk"
        )
        raise OSError(error.errno, why, folder) from None


# ---------------------------------------------------------------------------------------- temporary


class TemporaryFile:
    """A file that is removed with the last tensor over it, at the latest with the process.

    >>> os.path.getsize(TemporaryFile(10))
    10
    """

    def __init__(self, nbytes: int) -> None:
        self.path = f"{tempfile.gettempdir()}/raffia-{secrets.token_hex(8)}.memmap"
        reserve_file(self.path, nbytes, False, 0o600)
        weakref.finalize(self, _remove, self.path, os.getpid())

    def __fspath__(self) -> str:
        return self.path


class TemporaryFolder:
    """A temporary folder, removed with the last object in it, at the latest with the process.

    >>> os.path.isdir(TemporaryFolder())
    True
    """

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="raffia-")
        weakref.finalize(self, _remove, self.path, os.getpid())

    def __fspath__(self) -> str:
        return self.path


def _remove(path: str, owner: int) -> None:
    if os.getpid() != owner:  # a forked child has its own copy of everything but what is on disk
        return
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(FileNotFoundError):
            os.unlink(path)
