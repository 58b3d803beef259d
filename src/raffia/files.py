"""Files of all rooms: written all at once and to disk, read so that damage has one error, locked.

Whatever Raffia writes goes through `write_atomically`, or is a file that only grows or is mapped;
a test holds the source against that. Imports nothing but the standard library.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

__all__ = [
    "DamagedFileError",
    "Lock",
    "MissingFileError",
    "check_manifest",
    "dump_json",
    "foreign_reader",
    "is_deeper",
    "open_plain",
    "is_free",
    "is_unfinished",
    "make_folder",
    "parse_json",
    "replaced",
    "shown",
    "sync",
    "write_atomically",
    "write_json",
    "write_manifest",
]

Path = str | os.PathLike[str]

UNFINISHED = re.compile(r"\.[0-9a-f]{12}\.tmp")
LONGEST = 300  # characters of what another library says
MANIFEST = "raffia_manifest.json"
DEEPEST = 100  # brackets within brackets in JSON
# What file systems without locks say: some of them have none at all, or none for folders.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)


class DamagedFileError(RuntimeError, ValueError):
    """A file does not hold what it should: `path` says which, `why` what is wrong with it.

    >>> raise DamagedFileError("td/a.memmap", "it holds 4 bytes, not 12")
    Traceback (most recent call last):
    ...
    raffia.files.DamagedFileError: td/a.memmap: it holds 4 bytes, not 12
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
    raffia.files.MissingFileError: td/meta.json: it is missing
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.why)


# ------------------------------------------------------------------------------------------ written


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
    follows_links: of a symbolic link, write the file it points to; else a file in its place.
    If anything fails, the old file is as it was and no other file is left.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomically(f"{folder}/x", b"new")
    ...     pathlib.Path(folder, "x").read_bytes()
    b'new'
    """
    path = os.path.abspath(path)
    path = os.path.realpath(path) if follows_links and os.path.islink(path) else path
    folder = os.path.dirname(path)
    temporary = f"{folder}/.{secrets.token_hex(6)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    flags |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)  # each on some systems only
    try:
        fd = os.open(temporary, flags, 0o666)
        try:
            if isinstance(content, bytes):
                rest = memoryview(content)
                while rest:
                    rest = rest[os.write(fd, rest) :]
            else:
                with open(fd, "wb", closefd=False) as file:
                    content(file)
            if is_synced:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # the error above tells
            os.unlink(temporary)
        raise
    if is_synced:
        sync(folder)


@contextmanager
def replaced(path: Path) -> Iterator[str]:
    """Where to write a file that is to stand at `path`: there at the end, all at once, on disk.

    For what can only write to a path; else `write_atomically`. If anything fails, the old file is
    as it was and no other file is left.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replaced(f"{folder}/x") as there:
    ...         _ = pathlib.Path(there).write_bytes(b"new")
    ...     pathlib.Path(folder, "x").read_bytes()
    b'new'
    """
    path = os.path.realpath(path)
    folder = os.path.dirname(path)
    temporary = f"{folder}/.{secrets.token_hex(6)}.tmp"
    try:
        yield temporary
        fd = os.open(temporary, os.O_RDWR)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    sync(folder)


def is_unfinished(name: str) -> bool:
    """Whether a file of this name is what `write_atomically` left when its process was killed.

    >>> is_unfinished(".0123456789ab.tmp"), is_unfinished("config.json")
    (True, False)
    """
    return UNFINISHED.fullmatch(name) is not None


def is_free(folder: Path) -> bool:
    """Whether nothing lies at a path, or a folder with nothing but what a killed process left.

    >>> is_free("no such folder")
    True
    """
    if not os.path.isdir(folder):
        return not os.path.lexists(folder)
    return all(is_unfinished(name) for name in os.listdir(folder))


def write_json(path: Path, content: Mapping[str, Any], *, indent: int = 2) -> None:
    """Write JSON for people to read, as `write_atomically` does.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_json(f"{folder}/x.json", {"a": 1}, indent=0)
    ...     pathlib.Path(folder, "x.json").read_text()
    '{\\n"a": 1\\n}\\n'
    """
    text = json.dumps(content, ensure_ascii=False, indent=indent) + "\n"
    write_atomically(path, text.encode("utf-8", "surrogatepass"))


def make_folder(path: Path) -> None:
    """Make a folder, and those around it that lack, and bring their names to disk.

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


def sync(folder: Path) -> None:
    """Bring the names in a folder to disk.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sync(folder)
    """
    if os.name == "nt":  # no folder can be opened there
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that has no such thing for folders
            raise
    finally:
        os.close(fd)


# --------------------------------------------------------------------------------------------- read


@contextmanager
def foreign_reader(path: Path, what: str = "it can't be read") -> Iterator[None]:
    """Whatever another library raises at a file becomes a DamagedFileError that names the file.

    what: what is said of the file, before the library's own words.

    >>> with foreign_reader("x.json", "it is no table"):
    ...     {}["rows"]
    Traceback (most recent call last):
    ...
    raffia.files.DamagedFileError: x.json: it is no table: KeyError: 'rows'
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
    """An error of another library on a line, however much it says.

    >>> brief(TypeError("no " * 1000))
    'TypeError: no no no no no no no no no no ...'
    """
    try:
        said = " ".join(str(error).split())
    except Exception:  # some can't even be shown
        said = ""
    name = type(error).__name__
    text = f"{name}: {said}" if said else name
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def open_plain(path: Path, *, follows_links: bool = False) -> BinaryIO:
    """A file of this very name, opened for reading; DamagedFileError for links, pipes, devices.

    follows_links: a link to a file is one, too.
    Of a folder that comes from elsewhere a link may lead to whatever the reader may read, a pipe
    would block, and a device has no end.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomically(f"{folder}/x", b"new")
    ...     os.symlink(f"{folder}/x", f"{folder}/y")
    ...     open_plain(f"{folder}/y")
    Traceback (most recent call last):
    ...
    raffia.files.DamagedFileError: ...y: it is no plain file (links are not followed)
    """
    no = "it is no plain file" + ("" if follows_links else " (links are not followed)")
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


def parse_json(path: Path, text: bytes | str, *, deepest: int | None = DEEPEST) -> Any:
    """What JSON says; DamagedFileError if it is none, has a name twice, or is nested too deeply.

    path: of the file that it is from, for the error.
    deepest: brackets within brackets; None for as many as Python's own parser takes.

    >>> parse_json("x.json", b'{"a": [1]}')
    {'a': [1]}
    """
    try:
        text = text if isinstance(text, str) else bytes(text).decode()
        found = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(path, f"it is not JSON: {brief(error)}") from None
    if deepest is not None and is_deeper(found, deepest):  # so that nobody's recursion ends in it
        raise DamagedFileError(path, f"it is nested more than {deepest} deep")
    return found


def dump_json(content: Any) -> bytes:
    """JSON for programs to read, without blanks.

    >>> dump_json({"a": [1, 2]})
    b'{"a":[1,2]}'
    """
    return json.dumps(content, separators=(",", ":")).encode()


def shown(value: Any) -> str:
    """A value in the text of an error, however long it is.

    >>> shown("a" * 1000)[-6:]
    'aaa...'
    """
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def write_manifest(folder: Path, names: Iterable[str]) -> None:
    """Write down the lengths and checksums of files of a folder, for `check_manifest`.

    names: paths within the folder, with "/".

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(folder, "x").write_bytes(b"old")
    ...     write_manifest(folder, ["x"])
    ...     check_manifest(folder)
    """
    listed = {name: _length_and_checksum(os.path.join(folder, name)) for name in sorted(names)}
    record = {"format": "raffia", "files": listed}
    write_json(os.path.join(folder, MANIFEST), {**record, "sha256": _checksum_of(record)})


def check_manifest(folder: Path, names: Iterable[str] | None = None) -> None:
    """DamagedFileError if files of a folder are not as its manifest says; nothing if it has none.

    names: the files that are looked at; None: all that it lists.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(folder, "x").write_bytes(b"old")
    ...     write_manifest(folder, ["x"])
    ...     _ = pathlib.Path(folder, "x").write_bytes(b"new")
    ...     check_manifest(folder)
    Traceback (most recent call last):
    ...
    raffia.files.DamagedFileError: ...x: its content is not what raffia_manifest.json says: ...
    """
    path = os.path.join(folder, MANIFEST)
    try:
        with open(path, "rb") as file:
            record = parse_json(path, file.read())
    except FileNotFoundError:
        return
    with foreign_reader(path, "it is no manifest"):
        checksum = record.pop("sha256")
        listed = {
            name: (entry["bytes"], entry["sha256"]) for name, entry in record["files"].items()
        }
    if checksum != _checksum_of(record):
        raise DamagedFileError(path, "its content is not what was written: the checksum differs")
    for name in sorted(listed) if names is None else names:
        if name not in listed:
            continue
        there = os.path.join(folder, name)
        try:
            found = _length_and_checksum(there)
        except FileNotFoundError:
            raise DamagedFileError(there, f"it is missing, and {MANIFEST} lists it") from None
        if (found["bytes"], found["sha256"]) != listed[name]:
            raise DamagedFileError(
                there,
                f"its content is not what {MANIFEST} says: bring it back, or, if it was changed on "
                f"purpose, remove {path}",
            )


def _length_and_checksum(path: str) -> dict[str, Any]:
    with open(path, "rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": checksum}


def _checksum_of(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        raise ValueError("a name stands twice in one object")
    return out


def is_deeper(value: Any, most: int) -> bool:
    """Whether JSON is nested deeper than that; found without recursion.

    >>> is_deeper([[1]], 1), is_deeper([[1]], 2)
    (True, False)
    """
    level = [value]
    for _ in range(most):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
    return any(isinstance(one, dict | list) for one in level)


# ------------------------------------------------------------------------------------------- locked


class Lock:
    """A lock of an open file or folder, which ends with the process at the latest.

    Where the system or the file system has no locks, `missing` says so, and nobody is kept out.

    fd: stays the caller's, who closes it after `release`.
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
            # Kept: at the end of the process nothing can be imported any more.
            self._fcntl = fcntl = importlib.import_module("fcntl")
        except ImportError:
            self.missing = "this system has no locks of files"
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
        """Let others have it; a second time does nothing."""
        if self._is_held:  # closing is not enough: a child that was forked meanwhile has it too
            self._is_held = False
            self._fcntl.flock(self._fd, self._fcntl.LOCK_UN)
