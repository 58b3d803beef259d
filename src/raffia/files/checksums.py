"""Checksums of files and of records: they find any change of what was written."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from raffia.files.damage import DamagedFileError, Path, foreign_reader, open_plain
from raffia.files.json_files import dump_json, parse_json, write_json

MANIFEST = "raffia_manifest.json"


class Checksum(NamedTuple):
    """The length of a file, and the sha256 of its content.

    >>> Checksum(3, "ba7816bf").bytes
    3
    """

    bytes: int
    sha256: str


def checksum(path: Path) -> Checksum:
    """The checksum of an existing file.

    >>> checksum(os.devnull)
    Traceback (most recent call last):
    ...
    raffia.files.damage.DamagedFileError: ...null: it is not a regular file
    """
    with open_plain(path, follows_links=True) as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        return Checksum(os.fstat(file.fileno()).st_size, found)


def check_file(path: Path, expected: Checksum, hint: str = "") -> None:
    """Raise DamagedFileError if a file is missing or its content does not have this checksum.

    hint: what to do about it, for the error.

    >>> check_file(__file__, Checksum(3, ""))
    Traceback (most recent call last):
    ...
    raffia.files.damage.DamagedFileError: ...: it holds ... bytes, not 3
    """
    try:
        size = os.stat(path).st_size
        if size != expected.bytes:
            raise DamagedFileError(path, f"it holds {size} bytes, not {expected.bytes}{hint}")
        if checksum(path) != expected:
            raise DamagedFileError(path, f"its content is not what was saved{hint}")
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedFileError(path, f"it is missing{hint}") from None


# --------------------------------------------------------------------- records with their checksum


def signed(record: dict[str, Any]) -> dict[str, Any]:
    """The record with a checksum of itself.

    >>> sorted(signed({"a": 1}))
    ['a', 'sha256']
    """
    return {**record, "sha256": hashlib.sha256(dump_json(record)).hexdigest()}


def read_signed(path: Path) -> dict[str, Any]:
    """A record that was written `signed`; DamagedFileError if it is not as it was written.

    >>> from raffia.files import write_json
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_json(f"{folder}/x", signed({"format": "raffia", "a": 1}))
    ...     read_signed(f"{folder}/x")
    {'format': 'raffia', 'a': 1}
    """
    with open_plain(path, follows_links=True) as file:
        record = parse_json(path, file.read(), deepest=None)
    if type(record) is not dict or record.get("format") != "raffia":
        raise DamagedFileError(path, "it is not a record written by raffia")
    found = record.pop("sha256", None)
    if found != signed(record)["sha256"]:
        raise DamagedFileError(path, "its content is not what was written: the checksum differs")
    return record


# ------------------------------------------------------- a manifest of files that others name


def write_manifest(folder: Path, names: Iterable[str]) -> None:
    """Write down the lengths and checksums of files of a folder, for `check_manifest`.

    names: paths within the folder, with "/".

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(folder, "x").write_bytes(b"old")
    ...     write_manifest(folder, ["x"])
    ...     check_manifest(folder)
    """
    listed = {name: checksum(os.path.join(folder, name))._asdict() for name in sorted(names)}
    record = {"format": "raffia", "files": listed}
    write_json(os.path.join(folder, MANIFEST), {**record, "sha256": _sorted_checksum(record)})


def check_manifest(folder: Path, names: Iterable[str] | None = None) -> None:
    """Raise DamagedFileError if files of a folder differ from its manifest; do nothing if it has
    none.

    names: the files that are looked at; None: all that it lists.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(folder, "x").write_bytes(b"old")
    ...     write_manifest(folder, ["x"])
    ...     _ = pathlib.Path(folder, "x").write_bytes(b"new")
    ...     check_manifest(folder)
    Traceback (most recent call last):
    ...
    raffia.files.damage.DamagedFileError: ...x: its content is not what was saved: restore it, ...
    """
    path = os.path.join(folder, MANIFEST)
    try:
        with open_plain(path, follows_links=True) as file:
            record = parse_json(path, file.read())
    except FileNotFoundError:
        return
    with foreign_reader(path, "it is not a manifest"):
        found = record.pop("sha256")
        listed = {name: Checksum(**entry) for name, entry in record["files"].items()}
    if found != _sorted_checksum(record):
        raise DamagedFileError(path, "its content is not what was written: the checksum differs")
    hint = f": restore it, or, if the change was intended, delete {path}"
    for name in sorted(listed) if names is None else names:
        if name in listed:
            check_file(os.path.join(folder, name), listed[name], hint)


def _sorted_checksum(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
