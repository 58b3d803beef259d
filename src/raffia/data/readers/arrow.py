"""Columns of files of tables as arrays of numbers: Parquet, and Arrow's files and streams.

pyarrow is needed here alone. It ends the process at damaged Parquet files, so their footer, which
is a structure of Thrift's compact protocol, is read here first.
Sources: Apache Parquet, parquet.thrift; Apache Thrift, thrift-compact-protocol.md.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from raffia.data.readers.episode import MAX_DEPTH, Key, Location, NumberedLocation, leave_out
from raffia.tensordict.keys import dotted

PARQUET, ARROW = b"PAR1", b"ARROW1"  # how files begin; a stream of Arrow begins with none
CODECS = (0x184D2204, 0xFD2FB528)  # magic numbers of LZ4 frames and of Zstandard, little-endian
# Fields by their numbers in parquet.thrift.
ROW_GROUPS, COLUMNS, META_DATA = 4, 1, 3
TYPE, PATH, NUM_VALUES, UNCOMPRESSED, COMPRESSED = 1, 3, 5, 6, 7
BOOLEAN, INT32, FLOAT, BYTE_ARRAY = 0, 1, 4, 6
WIDTHS = {BOOLEAN: 1, INT32: 4, FLOAT: 4}  # bytes of a value in memory; others take 8, or more


# Run lengths make of any number of equal values a few bytes, so the stored size tells nothing about
# the memory that a column takes; this is where it is asked whether one stands for the other.
SMALL_BYTES = 2**28
SMALL_TEXT_BYTES = 2**20
MAX_INFLATION = 1000


class Table(NamedTuple):
    """An open file of a table."""

    num_rows: int
    schema: Any
    batches: Callable[..., Any]  # batches(size, columns=[...]) of at most so many rows


def pyarrow() -> ModuleType:
    """The package that reads Parquet."""
    try:
        importlib.import_module("pyarrow.parquet")
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise ImportError(
            "Parquet files are read with pyarrow, which is not installed: "
            "pip install 'raffia[parquet]'"
        ) from error


def is_list(kind: Any) -> bool:
    types = pyarrow().types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def is_flat(kind: Any) -> bool:
    """Whether a column of this type has one value in each row, whatever comes."""
    return kind is not None and not pyarrow().types.is_nested(kind)


def is_id(kind: Any) -> bool:
    """Whether a column of this type can name episodes."""
    types = pyarrow().types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return types.is_integer(kind) or types.is_string(kind) or types.is_large_string(kind)


def field_types(fields: Iterable[Any], location: Location, prefix: Key = ()) -> dict[Key, Any]:
    """The types of all columns, those of structs under the path of each field."""
    if len(prefix) >= MAX_DEPTH:
        location.fail(f"structs are nested more than {MAX_DEPTH} levels deep", dotted(prefix))
    found: dict[Key, Any] = {}
    for field in fields:
        path = (*prefix, field.name)
        below = {path: field.type}
        if pyarrow().types.is_struct(field.type):
            below = field_types(field.type, location, path)
        if found.keys() & below.keys():
            location.fail("two columns have this name", dotted(path))
        found |= below
    return found


def check_numeric(kind: Any, path: Key, location: Location) -> None:
    """Check that a column holds numbers or lists of numbers."""
    depth = 0
    while is_list(kind):
        kind = kind.value_type
        depth += 1
    types = pyarrow().types
    if not (types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)):
        location.fail(f"{kind} cannot be stored in a tensor; {leave_out(path)}", dotted(path))
    if depth > MAX_DEPTH:
        location.fail(f"lists are nested more than {MAX_DEPTH} levels deep", dotted(path))


@contextmanager
def opened_table(path: str) -> Iterator[Table]:
    """A file of a table; which of the three formats it has, its first bytes tell."""
    with open(path, "rb") as file:
        magic = file.read(6)
    package = pyarrow()
    if magic[:4] == PARQUET:
        with package.parquet.ParquetFile(path, page_checksum_verification=True) as found:
            yield Table(found.metadata.num_rows, found.schema_arrow, found.iter_batches)
        return
    with package.memory_map(path) as memory:
        refuse_inflated_buffers(memory.read_buffer(), os.path.getsize(path))
        memory.seek(0)
        read = package.ipc.open_file if magic == ARROW else package.ipc.open_stream
        table = read(memory).read_all()
        table.validate(full=True)
        # A row of numbers takes at least a bit, so there cannot be more.
        if table.num_rows > 8 * os.path.getsize(path):
            raise ValueError(
                f"it claims to have {table.num_rows} rows, more than its bytes can hold"
            )

        def batches(size: int, columns: list[str]) -> Iterator[Any]:
            return iter(table.select(columns).to_batches(size))

        yield Table(table.num_rows, table.schema, batches)


def refuse_inflated_buffers(memory: Any, size: int) -> None:
    """Check that buffers that are stored compressed do not claim a large memory.

    Each begins with its length in eight bytes, before the magic number of its codec.
    Source: Apache Arrow, Message.fbs (BodyCompression).
    """
    words = np.frombuffer(memory, np.uint32, count=memory.size // 4)
    at = np.flatnonzero(np.isin(words, CODECS))
    at = at[at >= 2]
    lengths = words[at - 2].astype(np.int64) + (words[at - 1].astype(np.int64) << 32)
    claimed = int(lengths[lengths > 0].astype(np.float64).sum())
    if claimed > SMALL_BYTES and claimed > MAX_INFLATION * size:
        raise ValueError(
            f"its buffers take {claimed} bytes, of which only {size} are stored: a small file "
            "that needs a lot of memory. If this is intended, write it again uncompressed"
        )


def read_batches(
    path: str, num_rows: int, columns: Iterable[Key], size: int
) -> Iterator[tuple[int, dict[Key, Any]]]:
    """The number of the first row and the columns at some paths, of a few rows at a time."""
    names = list(columns)
    row, location = 0, Location(path, "the file")
    with ExitStack() as stack:
        with location.foreign():
            file = stack.enter_context(opened_table(path))
        types = {field.name: field.type for field in file.schema}
        read = {name[0] for name in names}
        lists = {name for name in read if not is_flat(types.get(name))}
        refuse_inflation(path, read, lists, location)
        batches = iter(file.batches(size, columns=sorted(read)))
        while row < num_rows:
            location = Location(path, f"row {row}")
            with location.foreign():
                batch = next(batches, None)
                if batch is None or row + len(batch) > num_rows:
                    location.fail(f"the file claims to have {num_rows} rows, but does not")
                rows = NumberedLocation(path, "row", row)
                arrays = {name: column(batch, name, rows) for name in names}
            yield row, arrays
            row += len(batch)


def refuse_inflation(path: str, read: set[str], lists: set[str], location: Location) -> None:
    """Check that a small file does not ask for a large memory: a list may hold any number of
    values, and a text any number of characters.

    read: the columns that are read, the numbers of those without lists a few at a time.
    """
    with open(path, "rb") as file:
        if file.read(4) != PARQUET:
            return  # what others stores compressed is checked when they are opened
    try:
        found = _chunks(path)
    except ValueError as error:
        location.fail(str(error))
    for chunk in found:
        list_bytes = chunk.value_bytes if chunk.column in lists else 0
        text_bytes = chunk.text_bytes if chunk.column in read else 0
        for nbytes, small in ((list_bytes, SMALL_BYTES), (text_bytes, SMALL_TEXT_BYTES)):
            if nbytes > small and nbytes > MAX_INFLATION * chunk.stored_bytes:
                location.fail(
                    f"{chunk.num_values} values take {nbytes} bytes, of which only "
                    f"{chunk.stored_bytes} are stored: a small file that needs a lot of memory. "
                    "If this is intended, write it again in smaller row groups",
                    chunk.column,
                )


def column(batch: Any, path: Key, location: Location) -> Any:
    """The column at a path; a struct on the way to it must be there in each row."""
    found = batch.column(path[0])
    for name in path[1:]:
        refuse_null(found, dotted(path), location, 1)
        index = found.type.get_field_index(name)
        found = found.flatten()[index]
    return found


def refuse_null(array: Any, name: str, location: Location, rows_each: int) -> None:
    if array.null_count:
        at = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        location.fail("null, which is not a number", name, at // rows_each)


def row_of_lists(array: Any, name: str, location: Location) -> Any:
    """The list that is the only row of a column."""
    if array.null_count:
        location.fail("null, which is not an episode", name)
    with location.foreign(name):
        return array.flatten()


def to_array(array: Any, path: Key, location: Location) -> np.ndarray[Any, Any]:
    """The numbers of a column, lists becoming further dimensions; in separate memory."""
    name, shape = dotted(path), [len(array)]
    with location.foreign(name):
        while is_list(array.type):
            refuse_null(array, name, location, prod(shape[1:]))
            lengths = np.asarray(array.value_lengths())
            different = np.flatnonzero(lengths != lengths[:1])
            if different.size:
                at = int(different[0])
                location.fail(
                    f"a list of {lengths[at]}, but the ones before have {lengths[0]}",
                    name,
                    at // prod(shape[1:]),
                )
            shape.append(int(lengths[0]) if lengths.size else 0)
            array = array.flatten()
        refuse_null(array, name, location, prod(shape[1:]))
        return np.array(array.to_numpy(zero_copy_only=False)).reshape(shape)


class ParquetChunk(NamedTuple):
    """A column in one row group."""

    column: str  # the first name on its path
    num_values: int
    value_bytes: int  # in memory, of all values
    stored_bytes: int
    text_bytes: int  # of texts, each different one once; 0 of numbers


def _chunks(path: str) -> list[ParquetChunk]:
    """The columns of all row groups; ValueError if the footer cannot be read."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 8))
        tail = file.read(8)
        length = int.from_bytes(tail[:4], "little")
        if tail[4:] != PARQUET or length + 8 > size:
            raise ValueError("it does not end with a Parquet footer")
        file.seek(size - 8 - length)
        footer = file.read(length)
    try:
        groups = ThriftReader(footer).struct()[ROW_GROUPS]
        return [_chunk(column[META_DATA]) for group in groups for column in group[COLUMNS]]
    except (KeyError, IndexError, TypeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"its footer cannot be read ({type(error).__name__})") from None


def _chunk(meta: dict[int, Any]) -> ParquetChunk:
    count = meta[NUM_VALUES]
    name = bytes(meta[PATH][0]).decode()
    text_bytes = meta[UNCOMPRESSED] if meta[TYPE] == BYTE_ARRAY else 0
    value_bytes = count * WIDTHS.get(meta[TYPE], 8)
    return ParquetChunk(name, count, value_bytes, meta[COMPRESSED], text_bytes)


class ThriftReader:
    """Values of Thrift's compact protocol, one after the other; structs become dicts.

    >>> ThriftReader(bytes([0x15, 0x06, 0x00])).struct()  # field 1, an i32, is 3
    {1: 3}
    """

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def byte(self) -> int:
        value = self.data[self.at]
        self.at += 1
        return value

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise IndexError("longer than 64 bits")

    def zigzag(self) -> int:
        value = self.varint()
        return (value >> 1) ^ -(value & 1)

    def struct(self) -> dict[int, Any]:
        found: dict[int, Any] = {}
        number = 0
        while head := self.byte():
            number = number + (head >> 4) if head >> 4 else self.zigzag()
            kind = head & 15
            found[number] = kind == 1 if kind in (1, 2) else self.value(kind)
        return found

    def value(self, kind: int) -> object:
        if kind in (1, 2, 3):  # a bool in a list, or a byte
            return self.byte()
        if kind in (4, 5, 6):  # i16, i32, i64
            return self.zigzag()
        if kind == 7:  # a double
            self.at += 8
            return None
        if kind == 8:  # bytes or text
            length = self.varint()
            self.at += length
            if self.at > len(self.data):
                raise IndexError("cut off")
            return self.data[self.at - length : self.at]
        if kind in (9, 10):  # a list or a set
            head = self.byte()
            length = head >> 4 if head >> 4 < 15 else self.varint()
            return [self.value(head & 15) for _ in range(min(length, len(self.data)))]
        if kind == 12:
            return self.struct()
        raise KeyError(kind)
