"""Curves for TensorBoard: a writer of its event files, of scalars only.

A file is a row of records, each an Event message; the formats are those of TensorFlow's
`tfrecord` and `event.proto`:

    record    length uint64, masked crc of it uint32, data, masked crc of the data uint32
    Event     1 wall_time double, 2 step int64, 3 file_version string, 5 summary Summary
    Summary   1 value, repeated: 1 tag string, 2 simple_value float

Source: Castagnoli, Braeuer & Herrmann (1993), for the crc (crc32c, polynomial 0x1EDC6F41).
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from typing import BinaryIO

from raffia.files import AppendLog

PREFIX, SUFFIX = "events.out.tfevents.", ".raffia"
TAIL = 1 << 16  # bytes that a crash can have spoilt
VERSION = b"brain.Event:2"
POLYNOMIAL = 0x82F63B78  # with its bits in reverse order


class EventFile(AppendLog):
    """Scalars for `tensorboard --logdir FOLDER`; a file that is there already is resumed.

    What a crash cut off at its end is removed; the first record, which names the kind of file, is
    there always. A TensorBoard that looks at the file needs to be started again after a rewind.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, EventFile(folder) as events:
    ...     events.write("train/loss", 0.5, step=10)
    ...     position = events.position()
    ...     events.write("train/loss", 0.25, step=20)
    ...     events.rewind(position)
    48
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        names = sorted([n for n in os.listdir(folder) if n.startswith(PREFIX)])
        names = [name for name in names if name.endswith(SUFFIX)]
        name = names[-1] if names else f"{PREFIX}{int(time.time()):010d}{SUFFIX}"
        super().__init__(f"{os.fspath(folder)}/{name}")

    def write(self, tag: str, value: float, *, step: int, wall_time: float | None = None) -> None:
        """Append a point of the curve `tag`.

        wall_time: seconds since 1970; without it now.
        Raises OSError if the disk is full; the file is as it was then.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, EventFile(folder) as events:
        ...     events.write("evaluate/mean_return", 200.0, step=3000)
        """
        point = _bytes(1, tag.encode()) + b"\x15" + struct.pack("<f", value)
        now = time.time() if wall_time is None else wall_time
        event = b"\x09" + struct.pack("<d", now) + b"\x10" + _varint(step)
        self._append(event + _bytes(5, _bytes(1, point)))

    def _end(self, file: BinaryIO) -> int:
        return _end_of_records(file)

    def _begin(self) -> None:
        self._append(b"\x09" + struct.pack("<d", time.time()) + _bytes(3, VERSION))

    def _append(self, data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        self.append(length + masked_crc(length) + data + masked_crc(data))


def masked_crc(data: bytes) -> bytes:
    """The crc32c of the data, turned such that a crc of data with crcs in it is a good one.

    >>> masked_crc(b"123456789").hex()
    'e5b08ac7'
    """
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def crc32c(data: bytes) -> int:
    """The cyclic redundancy check by Castagnoli's polynomial.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _table() -> Iterator[int]:
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ (POLYNOMIAL if crc & 1 else 0)
        yield crc


TABLE = tuple(_table())


def _bytes(field: int, data: bytes) -> bytes:
    """A field of a message that holds bytes, a string or a message."""
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    """A number of 64 bits, seven at a time, the lowest first."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _end_of_records(file: BinaryIO) -> int:
    """Where the last whole record ends."""
    size, end = file.seek(0, os.SEEK_END), 0
    file.seek(0)
    while True:
        head = file.read(12)
        if len(head) < 12 or masked_crc(head[:8]) != head[8:]:
            return end
        length = int.from_bytes(head[:8], "little")
        rest = file.read(length + 4)
        is_near_end = end + TAIL > size
        if len(rest) < length + 4 or (is_near_end and masked_crc(rest[:length]) != rest[length:]):
            return end
        end += 12 + length + 4
