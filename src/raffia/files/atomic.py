"""Atomic writes of files to disk: after a crash either the old or the new one exists.

Whatever Raffia writes goes through `write_atomically`, or is a file that only grows or is mapped;
a test holds the source against that.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

from raffia.files.damage import Path

UNFINISHED = re.compile(r"\.[0-9a-f]{12}\.tmp")


def write_atomically(
    path: Path,
    content: bytes | Callable[[BinaryIO], Any],
    *,
    is_synced: bool = True,
    follows_links: bool = True,
) -> None:
    """Write a file such that at any time, also after a crash, there is the old one or the new one.

    content: the bytes, or a function that writes them into the file that it is given.
    is_synced: False leaves it to the system when the data goes to disk: for a crash of the process
        only.
    follows_links: write the file that a symbolic link points to; else a file instead of the link.
    If anything fails, the old file is as it was and no other file is left.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomically(f"{folder}/x", b"new")
    ...     pathlib.Path(folder, "x").read_bytes()
    b'new'
    """
    with replaced(path, is_synced=is_synced, follows_links=follows_links) as temporary:
        with open(temporary, "xb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                content(file)


@contextmanager
def replaced(path: Path, *, is_synced: bool = True, follows_links: bool = True) -> Iterator[str]:
    """Yield a temporary path, whose file replaces the one at `path` atomically at the end, on disk.

    For what can only write to a path; else `write_atomically`, whose options these are. If anything
    fails, the old file is as it was and no other file is left.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replaced(f"{folder}/x") as there:
    ...         _ = pathlib.Path(there).write_bytes(b"new")
    ...     pathlib.Path(folder, "x").read_bytes()
    b'new'
    """
    path = os.path.abspath(path)
    path = os.path.realpath(path) if follows_links and os.path.islink(path) else path
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.islink(path):
        code = errno.EISDIR if os.path.isdir(path) else errno.EEXIST
        raise OSError(code, "a file cannot replace a folder or a device", path)
    folder = os.path.dirname(path)
    temporary = f"{folder}/.{secrets.token_hex(6)}.tmp"
    try:
        yield temporary
        if is_synced:
            sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # the error above tells
            os.unlink(temporary)
        raise
    if is_synced:
        sync(folder)


@contextmanager
def new_folder(path: Path) -> Iterator[str]:
    """Yield a path for the files of a new folder, which appears at `path` atomically, on disk.

    If anything fails, nothing is left. Raises OSError if something is there, but an empty folder.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with new_folder(f"{folder}/x") as there:
    ...         _ = pathlib.Path(there, "a").write_bytes(b"new")
    ...     os.listdir(f"{folder}/x")
    ['a']
    """
    path = os.path.realpath(path)
    above, name = os.path.split(path)
    make_folder(above)
    unfinished = f"{above}/.{name}.{secrets.token_hex(6)}.tmp"
    os.mkdir(unfinished)
    try:
        yield unfinished
        for root, _, names in os.walk(unfinished):
            for one in [*names, ""]:  # "": the folder itself
                sync(os.path.join(root, one))
        os.replace(unfinished, path)
        sync(above)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def is_unfinished(name: str) -> bool:
    """Whether a file of this name is what `write_atomically` left when its process was killed.

    >>> is_unfinished(".0123456789ab.tmp"), is_unfinished("config.json")
    (True, False)
    """
    return UNFINISHED.fullmatch(name) is not None


def is_free(folder: Path) -> bool:
    """Whether a path is unused, or a folder that holds only the leftovers of a killed process.

    >>> is_free("no such folder")
    True
    """
    if not os.path.isdir(folder):
        return not os.path.lexists(folder)
    return all(is_unfinished(name) for name in os.listdir(folder))


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, and sync their names to disk.

    A name is on disk when the folder that it stands in was brought there; that of what lies in it
    does not do for all file systems.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     make_folder(f"{folder}/a/b")
    ...     os.path.isdir(f"{folder}/a/b")
    True
    """
    path = os.path.abspath(path)
    lacking = []
    above = path
    while not os.path.isdir(above) and os.path.dirname(above) != above:
        lacking.append(above)
        above = os.path.dirname(above)
    os.makedirs(path, exist_ok=True)
    for made in reversed(lacking):
        sync(os.path.dirname(made))


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to disk.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sync(folder)
    """
    if os.name == "nt" and os.path.isdir(path):  # no folder can be opened there
        return
    fd = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that has no such thing for folders
            raise
    finally:
        os.close(fd)
