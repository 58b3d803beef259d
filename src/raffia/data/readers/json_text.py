"""Lines of a file as objects of JSON: the checks before their meaning is known."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import IO, Any, NamedTuple, cast

from raffia.data.readers.episode import (
    MAX_DEPTH,
    Key,
    Location,
    MalformedDataError,
    Names,
    leave_out,
)
from raffia.tensordict.keys import dotted

SMALL_BYTES = 2**24  # of a line, which is read at once
MAX_INFLATION = 200  # of longer ones by gzip; texts of numbers are made 3 to 20 times as small
GZIP = b"\x1f\x8b"  # how a gzip file begins (RFC 1952, 2.3.1); JSON never does
KINDS = {str: "a string", type(None): "null", dict: "an object", list: "a list"}
KINDS |= {bool: "true or false", int: "a number", float: "a number"}

Entries = dict[Key, Any]  # path -> value; objects are not among the values


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, whose keys must differ."""
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter([name for name, _ in pairs]).most_common(1)
        raise ValueError(f"the key {twice[:40]!r} stands twice in one object")
    return found


DECODER = json.JSONDecoder(object_pairs_hook=distinct)


class JsonLine(NamedTuple):
    """The object on a line, nested objects flattened."""

    number: int  # from 1
    location: Location
    entries: Entries


def kind(value: Any) -> str:
    """The name of a value's type in JSON.

    >>> kind(0.5), kind(True), kind([])
    ('a number', 'true or false', 'a list')
    """
    return KINDS[type(value)]


@contextmanager
def opened(path: str) -> Iterator[IO[bytes]]:
    """A file to read lines from, decompressed if need be."""
    with open(path, "rb") as file:
        if file.peek(2)[:2] == GZIP:
            with gzip.GzipFile(fileobj=file, mode="rb") as decompressed:
                yield cast(IO[bytes], decompressed)
        else:
            yield file


def read_objects(
    file: IO[bytes], path: str, names: Names, max_line_bytes: int
) -> Iterator[JsonLine]:
    """The objects of a file, without the entries that `names` leaves out."""
    for number in count(1):
        location = Location(path, f"line {number}")
        text = read_line(file, location, max_line_bytes)
        if not text:
            return
        entries: Entries = {}
        flatten(parse(text, location), names, location, (), entries)
        yield JsonLine(number, location, entries)


def read_line(file: IO[bytes], location: Location, max_bytes: int) -> bytes:
    """The next line, empty if there is none."""
    try:
        line = read_pieces(file, location, max_bytes)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        why = f"the compressed file is damaged or was cut off ({error})"
        raise MalformedDataError(location.path, location.where, why) from error
    if len(line) > max_bytes:
        location.fail(
            f"it is longer than {max_bytes} bytes; to read it give max_line_bytes, and twenty "
            "times as much memory"
        )
    if line.isspace():
        location.fail("it is blank")
    return line


def read_pieces(
    file: IO[bytes],
    location: Location,
    max_bytes: int,
    *,
    begun: bytes = b"",
    is_line: bool = True,
) -> bytes:
    """What was begun and the rest of the line, or of the file; if that is too long, a byte more
    than `max_bytes`. A compressed file that grows too much is refused before memory is taken."""
    text = begun
    while len(text) <= max_bytes and not (is_line and text.endswith(b"\n")):
        if len(text) > SMALL_BYTES:
            refuse_inflation(file, len(text), location)
        size = min(max(len(text), SMALL_BYTES + 1), max_bytes + 1 - len(text))
        more = file.readline(size) if is_line else file.read(size)
        if not more:
            break
        text += more
    return text


def refuse_inflation(file: IO[bytes], num_bytes: int, location: Location) -> None:
    """Check that a small compressed file does not ask for a large memory."""
    if not isinstance(file, gzip.GzipFile):
        return
    stored = file.fileobj.tell()
    if num_bytes > MAX_INFLATION * stored:
        location.fail(
            f"it takes more than {num_bytes} bytes, of which only {stored} are stored: a small "
            "file that asks for a large memory. If that is as it should be, decompress it before"
        )


def parse(line: bytes, location: Location) -> dict[str, Any]:
    """The object on a line."""
    cut = "" if line.endswith(b"\n") else "; the line has no end, the file may have been cut off"
    try:
        value = DECODER.decode(line.decode())
    except UnicodeDecodeError as error:
        where = f"{location.where}, byte {error.start + 1}"
        raise MalformedDataError(location.path, where, f"it is not UTF-8{cut}") from error
    except json.JSONDecodeError as error:
        where = f"{location.where}, character {error.pos + 1}"
        why = f"it is not JSON: {error.msg}{cut}"
        raise MalformedDataError(location.path, where, why) from error
    except RecursionError as error:
        why = "lists or objects are nested too deeply"
        raise MalformedDataError(location.path, location.where, why) from error
    except ValueError as error:  # an equal key, or a number with thousands of digits
        raise MalformedDataError(location.path, location.where, str(error)) from error
    if type(value) is not dict:
        location.fail(f'it is {kind(value)}, not an object: {{"obs": ...}}')
    return value


def flatten(
    value: dict[str, Any], names: Names, location: Location, prefix: Key, out: Entries
) -> None:
    """Put the entries of nested objects under their paths, but those that are left out."""
    if len(prefix) >= MAX_DEPTH:
        location.fail(f"objects are nested more than {MAX_DEPTH} deep")
    for name, entry in value.items():
        path = (*prefix, name)
        if names.of(path) is None:
            continue
        if type(entry) is dict:
            flatten(entry, names, location, path, out)
        else:
            out[path] = entry


def check_same_entries(entries: Entries, first: Entries, location: Location) -> None:
    """Check that a step has the entries of the file's first one."""
    if entries.keys() == first.keys():
        return
    for path in first:
        if path not in entries:
            location.fail("it is missing, and the first line has it", dotted(path))
    for path in entries:
        if path not in first:
            location.fail(f"the first line has no such entry; {leave_out(path)}", dotted(path))
