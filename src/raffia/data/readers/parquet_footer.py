"""The columns of a Parquet file, read from its footer; pyarrow ends the process at damaged ones.

The footer is a structure of Thrift's compact protocol.
Sources: Apache Parquet, parquet.thrift; Apache Thrift, thrift-compact-protocol.md.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

MAGIC = b"PAR1"
# Fields by their numbers in parquet.thrift.
ROW_GROUPS, COLUMNS, META_DATA = 4, 1, 3
TYPE, PATH, NUM_VALUES, UNCOMPRESSED, COMPRESSED = 1, 3, 5, 6, 7
BOOLEAN, INT32, FLOAT, BYTE_ARRAY = 0, 1, 4, 6
WIDTHS = {BOOLEAN: 1, INT32: 4, FLOAT: 4}  # bytes of a value in memory; others take 8, or more


class ParquetChunk(NamedTuple):
    """A column in one row group."""

    column: str  # the first name on its path
    num_values: int
    value_bytes: int  # in memory, of all values
    stored_bytes: int
    text_bytes: int  # of texts, each different one once; 0 of numbers


def chunks(path: str) -> list[ParquetChunk]:
    """The columns of all row groups; ValueError if the footer cannot be read."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 8))
        tail = file.read(8)
        length = int.from_bytes(tail[:4], "little")
        if tail[4:] != MAGIC or length + 8 > size:
            raise ValueError("it has no footer of Parquet")
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

    def value(self, kind: int) -> Any:
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
