"""Folders that are written atomically: killed at any time, the old or the new one can be read.

Each write gives its files new names, brings them to disk, and then replaces atomically the
`manifest.json`, which lists what the folder holds: the kind, the files, their sizes and sha256.
Only then the files of the write before are removed, and with them what a killed process left.
"""

import errno
import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from raffia.files.atomic import make_folder, sync, write_atomically
from raffia.files.checksums import Checksum, check_file, checksum, read_signed, signed
from raffia.files.damage import DamagedFileError, Path, foreign_reader, shown
from raffia.files.json_files import dump_json
from raffia.files.locks import locked

Loaded = TypeVar("Loaded")
MANIFEST = "manifest.json"
Content = bytes | Callable[[str], Any]  # a callable writes the file at the path that it is given

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
OURS = re.compile(r"(\.[0-9a-f]{12}\.tmp|[A-Za-z0-9_-]+\.raffia-[0-9a-f]{12}(\..*)?)")


@dataclass(frozen=True)
class Folder:
    """The result of `read_folder`: the files, verified to be as written, and the extras."""

    root: str
    files: dict[str, str]  # name -> path
    extras: dict[str, Any]
    checksums: dict[str, str] = field(default_factory=dict)  # name -> sha256

    def path(self, name: str) -> str:
        """The path of the file with this name; DamagedFileError if no such file exists."""
        if name not in self.files:
            raise DamagedFileError(self.root, f"it holds {sorted(self.files)}, but no {name!r}")
        return self.files[name]

    def read(self, name: str) -> bytes:
        """The bytes of the file of this name."""
        with open(self.path(name), "rb") as file:
            return file.read()


def write_folder(
    path: Path,
    kind: str,
    version: int,
    files: Mapping[str, Content],
    *,
    extras: dict[str, Any] | None = None,
) -> None:
    """Make `path` a folder that holds just these files, replacing an older one of this kind.

    kind, version: what the folder is, which `read_folder` asks for.
    files: under each name the bytes, or a function that writes the file at the path it is given.
    extras: what JSON can hold, stored in the manifest.
    Raises FileExistsError, and changes nothing, if the folder holds something else.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_folder(folder, "greeting", 1, {"text.txt": b"hello"}, extras={"times": 2})
    ...     found = read_folder(folder, "greeting", 1)
    ...     found.read("text.txt"), found.extras
    (b'hello', {'times': 2})
    """
    root = os.path.abspath(path)
    for name in files:
        if not NAME.fullmatch(name):
            raise ValueError(f"a file name must be plain, such as 'rows.bin', not {name!r}")
    if os.path.lexists(root):
        _refuse_others(root, kind)
    make_folder(root)
    with locked(root):
        token, listed = secrets.token_hex(6), {}
        try:
            for name, content in files.items():
                stem, dot, suffix = name.partition(".")
                stored = f"{stem}.raffia-{token}{dot}{suffix}"
                listed[name] = {"file": stored, **_store(f"{root}/{stored}", content)}
            record = {"format": "raffia", "kind": kind, "version": version, "files": listed}
            text = dump_json(signed({**record, "extras": extras or {}}))
            sync(root)
            write_atomically(f"{root}/{MANIFEST}", text)
        except BaseException:
            if not _names(root, token):
                _remove(root, [file for file in os.listdir(root) if f".raffia-{token}" in file])
            raise
        current = {entry["file"] for entry in listed.values()}
        strays = [file for file in os.listdir(root) if OURS.fullmatch(file)]
        _remove(root, [file for file in strays if file not in current])


def replace_extras(path: Path, kind: str, version: int, extras: dict[str, Any]) -> None:
    """Store other extras with the same files, which are not written again.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_folder(folder, "greeting", 1, {"text.txt": b"hello"}, extras={"times": 2})
    ...     replace_extras(folder, "greeting", 1, {"times": 3})
    ...     found = read_folder(folder, "greeting", 1)
    ...     found.read("text.txt"), found.extras
    (b'hello', {'times': 3})
    """
    root = os.path.abspath(path)
    with locked(root):
        record = _manifest(root)
        check_kind(root, record, kind, version)
        write_atomically(f"{root}/{MANIFEST}", dump_json(signed({**record, "extras": extras})))


def read_folder(path: Path, kind: str, version: int) -> Folder:
    """The files of a folder of this kind and version, after a check that all is as it was written.

    Raises FileNotFoundError without a folder, ValueError for one of another kind or version,
    DamagedFileError if it is not as it was written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_folder(folder, "greeting", 1, {})
    ...     read_folder(folder, "storage", 1)
    Traceback (most recent call last):
    ...
    ValueError: ... holds 'greeting' of version 1, but this call needs 'storage' of version 1
    """
    root = os.path.abspath(path)
    with locked(root, shared=True):
        record = _manifest(root)
        check_kind(root, record, kind, version)
        files, extras = record.get("files"), record.get("extras")
        if type(files) is not dict or type(extras) is not dict:
            raise DamagedFileError(f"{root}/{MANIFEST}", "it lists no files")
        paths = {name: _checked(root, files[name]) for name in files}
        return Folder(root, paths, extras, {name: files[name]["sha256"] for name in files})


def load_folder(path: Path, kind: str, version: int, read: Callable[[Folder], Loaded]) -> Loaded:
    """Return the result of `read` on a folder; repeat it if another process replaced the files.

    It is not locked while `read` is at work: a child that is forked then would keep the lock.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_folder(folder, "greeting", 1, {"text.txt": b"hello"})
    ...     load_folder(folder, "greeting", 1, lambda found: found.read("text.txt"))
    b'hello'
    """
    while True:
        found = read_folder(path, kind, version)
        try:
            return read(found)
        except FileNotFoundError:
            if all(os.path.exists(file) for file in found.files.values()):
                raise  # it was another file that is not there


def check_kind(root: str, record: dict[str, Any], kind: str, version: int) -> None:
    """Raise ValueError if the record of a folder is of another kind or version."""
    found = record.get("kind"), record.get("version")
    if found != (kind, version):
        raise ValueError(
            f"{root} holds {shown(found[0])} of version {shown(found[1])}, but this call needs "
            f"{kind!r} of version {version}"
        )


def _manifest(root: str) -> dict[str, Any]:
    try:
        return read_signed(f"{root}/{MANIFEST}")
    except FileNotFoundError:
        raise FileNotFoundError(
            errno.ENOENT, "nothing was saved in this folder: it has no manifest.json", root
        ) from None


def _names(root: str, token: str) -> bool:
    """Whether the manifest names files of this token: it was replaced before something failed."""
    if not os.path.lexists(f"{root}/{MANIFEST}"):
        return False
    with open(f"{root}/{MANIFEST}", "rb") as file:
        return f".raffia-{token}".encode() in file.read()


def _refuse_others(root: str, kind: str) -> None:
    """Raise unless `root` is a folder that we may write: an empty one, or one of this kind."""
    if not os.path.isdir(root):
        raise FileExistsError(errno.EEXIST, "this is not a folder; use another path", root)
    names = os.listdir(root)  # before the look at the manifest, which another writer may bring now
    if os.path.lexists(f"{root}/{MANIFEST}"):
        found = _manifest(root).get("kind")
        if found != kind:
            raise FileExistsError(
                errno.EEXIST, f"it holds {shown(found)}, which {kind!r} does not replace", root
            )
        return
    foreign = [name for name in names if not OURS.fullmatch(name)]
    if foreign:
        raise FileExistsError(
            errno.EEXIST,
            f"this folder holds other files ({shown(sorted(foreign)[0])}): use an empty folder",
            root,
        )


def _store(path: str, content: Content) -> dict[str, Any]:
    """Write one file and sync it to disk; return its length and checksum."""
    if callable(content):
        content(path)
    else:
        with open(path, "xb") as file:
            file.write(content)
    sync(path)
    return checksum(path)._asdict()


def _checked(root: str, listed: Any) -> str:
    """The path of a file that the manifest lists, whose content was found to be unchanged."""
    stored = listed.get("file") if type(listed) is dict else None
    if type(stored) is not str or not OURS.fullmatch(stored):
        raise DamagedFileError(
            f"{root}/{MANIFEST}", (f"{shown(stored)} is not the name of a file that raffia writes")
        )
    with foreign_reader(f"{root}/{MANIFEST}", "it lists no checksum"):
        expected = Checksum(listed["bytes"], listed["sha256"])
    check_file(f"{root}/{stored}", expected)
    return f"{root}/{stored}"


def _remove(root: str, names: list[str]) -> None:
    for name in names:
        os.unlink(f"{root}/{name}")
