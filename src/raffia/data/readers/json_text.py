"""JSON in files of episodes: lines as objects, and nested lists as tensors, with all their checks.

The shape of nested lists is found first, and an error names the one bad value. Nothing here loops
over values in Python unless one of them is wrong.
"""

from __future__ import annotations

import gzip
import json
import zlib
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, count
from math import prod
from typing import IO, Any, NamedTuple, NoReturn, cast

import numpy as np
import torch
from torch import Tensor

from raffia.data.readers.episode import (
    MAX_DEPTH,
    REWARD,
    Column,
    Key,
    Layout,
    Location,
    MalformedDataError,
    Names,
    leave_out,
    shown,
)
from raffia.tensordict.keys import NestedKey, dotted, unravel_key_to_tuple

SMALL_BYTES = 2**24  # of a line, which is read in one call
MAX_INFLATION = 200  # of longer ones by gzip; texts of numbers are made 3 to 20 times as small
GZIP = b"\x1f\x8b"  # how a gzip file begins (RFC 1952, 2.3.1); JSON never does
KINDS = {str: "a string", type(None): "null", dict: "an object", list: "a list"}
KINDS |= {bool: "true or false", int: "a number", float: "a number"}

STORED = {KINDS[one] for one in (list, bool, int)}

Entries = dict[Key, Any]  # path -> value; objects are not among the values


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, whose keys must differ."""
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter([name for name, _ in pairs]).most_common(1)
        raise ValueError(f"the key {twice[:40]!r} occurs twice in one object")
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
        if number == 1:
            text = text.removeprefix(BOM_UTF8)  # which programs of Windows put there
        entries: Entries = {}
        flatten(parse(text, location), names, location, (), entries)
        yield JsonLine(number, location, entries)


def read_line(file: IO[bytes], location: Location, max_bytes: int) -> bytes:
    """Read the next line; empty at the end of the file."""
    try:
        line = read_pieces(file, location, max_bytes)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        why = f"the compressed file is damaged or was cut off ({error})"
        raise MalformedDataError(location.path, location.where, why) from error
    if len(line) > max_bytes:
        location.fail(
            f"it is longer than {max_bytes} bytes; to read it raise max_line_bytes, which needs "
            "twenty times as much memory"
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
    """Read the rest of the line or file after `begun`, and return both; if that is too long, one
    byte more than `max_bytes`. A compressed file that grows too much is refused before memory is
    allocated.
    """
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
            "file that needs a lot of memory. If this is intended, decompress it first"
        )


def parse(line: bytes, location: Location) -> dict[str, Any]:
    """The object on a line."""
    is_whole = line.endswith(b"\n")
    cut = "" if is_whole else "; the line does not end, so the file may have been cut off"
    try:
        value = DECODER.decode(line.decode())
    except (ValueError, RecursionError) as error:
        where, why = location.where, str(error)  # an equal key, or a number of thousands of digits
        if isinstance(error, UnicodeDecodeError):
            where, why = f"{where}, byte {error.start + 1}", f"it is not UTF-8{cut}"
        elif isinstance(error, json.JSONDecodeError):
            where, why = f"{where}, character {error.pos + 1}", f"it is not JSON: {error.msg}{cut}"
        elif isinstance(error, RecursionError):
            why = "lists or objects are nested too deeply"
        raise MalformedDataError(location.path, where, why) from error
    if type(value) is not dict:
        location.fail(f'it is {kind(value)}, but must be an object: {{"obs": ...}}')
    return value


def flatten(
    value: dict[str, Any], names: Names, location: Location, prefix: Key, out: Entries
) -> None:
    """Put the entries of nested objects under their paths, but those that are left out."""
    if len(prefix) >= MAX_DEPTH:
        location.fail(f"objects are nested more than {MAX_DEPTH} levels deep")
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
            location.fail("it is missing here, but the first line has it", dotted(path))
    for path in entries:
        if path not in first:
            location.fail(f"the first line has no such entry; {leave_out(path)}", dotted(path))


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = {
    torch.uint8: np.uint8,
    torch.int8: np.int8,
    torch.uint16: np.uint16,
    torch.int16: np.int16,
    torch.uint32: np.uint32,
    torch.int32: np.int32,
    torch.uint64: np.uint64,
    torch.int64: np.int64,
}


class JsonRows(NamedTuple):
    """The values of a column, as parsed from JSON."""

    path: Key  # path in the file
    values: list[Any]  # one for each step


class Flat(NamedTuple):
    """The values of a column flattened, with their known shape."""

    name: Key  # name of the entry
    path: Key  # path in the file
    location: Location
    values: list[Any]
    shape: list[int]
    types: set[type]  # types of the values: bool alone, or int and float, or nothing

    def fail(self, why: str, at: int = 0) -> NoReturn:
        """Raise an error that names the row of the value at an index."""
        self.location.fail(why, dotted(self.path), at // prod(self.shape[1:]))


class Numbers(NamedTuple):
    """The dtypes that the columns get.

    dtypes: name -> dtype, as the caller gives them.
    float_dtype: of other numbers, unless all of a column are whole.
    """

    dtypes: dict[Key, torch.dtype]
    float_dtype: torch.dtype

    @classmethod
    def checked(cls, dtypes: Mapping[NestedKey, torch.dtype], float_dtype: torch.dtype) -> Numbers:
        if float_dtype not in FLOATS:
            raise TypeError(f"float_dtype={float_dtype} must be one of {list(FLOATS)}")
        found = {unravel_key_to_tuple(key): dtype for key, dtype in dtypes.items()}
        for key, dtype in found.items():
            if dtype not in FLOATS and dtype not in INTEGERS and dtype is not torch.bool:
                raise TypeError(
                    f"dtypes={{{shown(key)}: {dtype}}}: JSON cannot represent such numbers"
                )
        return cls(found, float_dtype)

    def dtype(self, key: Key, types: set[type], first: Layout | None) -> torch.dtype:
        """The dtype of a column; `types` are those of its values and of the column it is the `next`
        of."""
        given = self.dtypes.get(key)
        if given is None and key[0] == "next":
            given = self.dtypes.get(key[1:])
        if given is not None:
            return given
        if first is not None and key in first:
            return first[key][0]
        if key == REWARD:
            return self.float_dtype
        if types == {bool}:
            return torch.bool
        return torch.int64 if types == {int} else self.float_dtype


def to_columns(
    rows: Mapping[Key, JsonRows], location: Location, numbers: Numbers, first: Layout | None
) -> dict[Key, Column]:
    """The columns of an episode as tensors.

    first: the layout of the file's first episode, whose dtypes hold for the others.

    >>> rows = {("obs",): JsonRows(("state",), [[1, 2], [3, 0.5]])}
    >>> to_columns(rows, Location("a.jsonl", "line 1"), Numbers({}, torch.float32), None)["obs",]
    Column(name='state', values=tensor([[1.0000, 2.0000],
            [3.0000, 0.5000]]))
    """
    for key in numbers.dtypes:
        if key not in rows:
            location.fail(f"there is no {shown(key)}, which `dtypes` names")
    flats = {key: flat(key, *row, location) for key, row in rows.items()}
    columns = {}
    for key, found in flats.items():
        # An observation of whole numbers may lead to one that is not.
        pair = flats.get(key[1:] if key[0] == "next" else ("next", *key), found)
        dtype = numbers.dtype(key, found.types | pair.types, first)
        columns[key] = Column(dotted(found.path), to_tensor(found, dtype))
    return columns


def flat(name: Key, path: Key, rows: list[Any], location: Location) -> Flat:
    """Nested lists flattened, when all of a level have the same length."""
    found = Flat(name, path, location, rows, [len(rows)], set(map(type, rows)))
    while found.types == {list}:
        values, first = found.values, len(found.values[0])
        if set(map(len, values)) != {first}:
            at = next(i for i, value in enumerate(values) if len(value) != first)
            found.fail(f"a list of {len(values[at])}, but the ones before have {first}", at)
        if len(found.shape) == MAX_DEPTH:
            location.fail(f"lists are nested more than {MAX_DEPTH} levels deep", dotted(path))
        values = list(chain.from_iterable(values))
        shape, types = [*found.shape, first], set(map(type, values))
        found = found._replace(values=values, shape=shape, types=types)
    if found.types != {bool} and not found.types <= {int, float}:
        check_equal_layout(found)
    return found


def check_equal_layout(found: Flat) -> NoReturn:
    """Raise an error that names the value of another shape, or that is not a number."""
    wanted = kind(found.values[0])
    for at, value in enumerate(found.values):
        if kind(value) != wanted and wanted in STORED:
            found.fail(f"{kind(value)}, but the values before are {wanted}", at)
    found.fail(f"{wanted} cannot be stored in a tensor; {leave_out(found.path)}")


def to_tensor(found: Flat, dtype: torch.dtype) -> Tensor:
    if found.values and (found.types == {bool}) != (dtype is torch.bool):
        found.fail(f"{kind(found.values[0])}, but the column is {dtype}")
    if dtype is torch.bool:
        return torch.from_numpy(np.array(found.values, np.bool_).reshape(found.shape))
    return whole(found, dtype) if dtype in INTEGERS else real(found, dtype)


def whole(found: Flat, dtype: torch.dtype) -> Tensor:
    """A tensor of integers."""
    if float in found.types:
        at = next(i for i, value in enumerate(found.values) if type(value) is float)
        found.fail(
            f"{found.values[at]} is written as a fraction, but the column is {dtype}, because the "
            "first episode has only whole numbers or `dtypes` sets it. To read it: "
            f"dtypes={{{shown(found.name)}: torch.float32}}",
            at,
        )
    try:
        array = np.array(found.values, INTEGERS[dtype])
    except OverflowError:
        info = torch.iinfo(dtype)
        at = next(i for i, n in enumerate(found.values) if not info.min <= n <= info.max)
        refuse_size(found, at, dtype)
    return torch.from_numpy(array.reshape(found.shape))


def real(found: Flat, dtype: torch.dtype) -> Tensor:
    """A tensor of floating-point numbers."""
    try:
        exact = torch.from_numpy(np.array(found.values, np.float64))
    except OverflowError:
        at = next(i for i, n in enumerate(found.values) if abs(n) > torch.finfo(dtype).max)
        refuse_size(found, at, dtype)
    rounded = exact.to(dtype)
    lost = rounded.isinf() & exact.isfinite()
    if lost.any():
        refuse_size(found, int(lost.nonzero()[0]), dtype)
    return rounded.reshape(found.shape)


def refuse_size(found: Flat, at: int, dtype: torch.dtype) -> NoReturn:
    number = str(found.values[at])
    number = number if len(number) <= 30 else f"{number[:27]}..."
    found.fail(f"{number} does not fit {dtype}", at)
