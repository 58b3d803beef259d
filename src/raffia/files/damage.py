"""Damaged files: one error for all kinds of damage, and safe reading of files.

Whatever is read may come from elsewhere, or have been cut off by a crash.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

Path = str | os.PathLike[str]

LONGEST = 300  # characters of what another library says


class DamagedFileError(RuntimeError, ValueError):
    """A file does not hold what it should: `path` says which, `why` what is wrong with it.

    >>> raise DamagedFileError("td/a.memmap", "it holds 4 bytes, not 12")
    Traceback (most recent call last):
    ...
    raffia.files.damage.DamagedFileError: td/a.memmap: it holds 4 bytes, not 12
    """

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{os.fspath(path)}: {why}")
        self.path = os.fspath(path)
        self.why = why


class MissingFileError(DamagedFileError, FileNotFoundError):
    """A file that should be in a folder is not there: nothing was saved, or not all of it.

    >>> raise MissingFileError("td/meta.json", "it is missing")
    Traceback (most recent call last):
    ...
    raffia.files.damage.MissingFileError: td/meta.json: it is missing
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.why)


@contextmanager
def foreign_reader(path: Path, what: str = "it cannot be read") -> Iterator[None]:
    """Convert an error that another library raises at a file to a DamagedFileError naming the file.

    what: what is wrong with the file, put before the library's own words.

    >>> with foreign_reader("x.json", "it is no table"):
    ...     {}["rows"]
    Traceback (most recent call last):
    ...
    raffia.files.damage.DamagedFileError: x.json: it is no table: KeyError: 'rows'
    """
    try:
        yield
    except (DamagedFileError, FileNotFoundError, ImportError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the system's own word: not there, no permission
        raise DamagedFileError(path, f"{what}: {brief(error)}") from error


def brief(error: BaseException) -> str:
    """Describe an error of another library in one line, shortened.

    >>> brief(TypeError("no " * 1000))
    'TypeError: no no no no no no no no no no ...'
    """
    try:
        words = " ".join(str(error).split())
    except Exception:  # some cannot even be shown
        words = ""
    name = type(error).__name__
    text = f"{name}: {words}" if words else name
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def shown(value: Any) -> str:
    """Format a value for the text of an error, shortened.

    >>> shown("a" * 1000)[-6:]
    'aaa...'
    """
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def open_plain(path: Path, *, follows_links: bool = False) -> io.BufferedReader:
    """Open a regular file for reading; raise DamagedFileError for links, pipes and devices.

    follows_links: a link to a file is one, too.
    Of a folder that comes from elsewhere a link may lead to whatever the reader may read, a pipe
    would block, and a device has no end.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     os.symlink(__file__, f"{folder}/y")
    ...     open_plain(f"{folder}/y")
    Traceback (most recent call last):
    ...
    raffia.files.damage.DamagedFileError: ...y: it is not a regular file (links are not ...
    """
    no = "it is not a regular file" + ("" if follows_links else " (links are not followed)")
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
    flags |= 0 if follows_links else getattr(os, "O_NOFOLLOW", 0)
    try:
        fd = os.open(path, flags | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        raise DamagedFileError(path, no) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise DamagedFileError(path, no)
    return open(fd, "rb")
