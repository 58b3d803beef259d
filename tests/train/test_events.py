import math
import os
import random
import struct

import pytest

from raffia.train.log import EventFile, crc32c, masked_crc


def records(path):
    """The data of all records, by a reader that trusts nothing."""
    with open(path, "rb") as file:
        content = file.read()
    at = 0
    while at < len(content):
        length = int.from_bytes(content[at : at + 8], "little")
        data = content[at + 12 : at + 12 + length]
        assert content[at + 8 : at + 12] == masked_crc(content[at : at + 8])
        assert content[at + 12 + length : at + 16 + length] == masked_crc(data)
        yield data
        at += 16 + length


def fields(data):
    """The fields of a protobuf message: number -> value."""
    out, at = {}, 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        number, kind = divmod(varint(), 8)
        size = {1: 8, 5: 4}.get(kind)
        if kind == 0:
            out[number] = varint()
            continue
        size = varint() if size is None else size
        out[number] = data[at : at + size]
        at += size
    return out


def points(path):
    first, *others = [fields(data) for data in records(path)]
    assert first[3] == b"brain.Event:2"
    out = []
    for event in others:
        point = fields(fields(event[5])[1])
        (value,) = struct.unpack("<f", point[2])
        out.append((point[1].decode(), event[2], value, *struct.unpack("<d", event[1])))
    return out


def test_the_check_is_that_of_the_tables():
    # RFC 3720, appendix B.4
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(b"") == 0


def test_what_is_written_can_be_read(tmp_path):
    expected = [("train/loss", 0, 0.5, 1.25), ("a" * 300, 2**40, -3.0, 2.0), ("é", 7, 0.0, 1e9)]
    with EventFile(tmp_path) as events:
        for tag, step, value, wall_time in expected:
            events.write(tag, value, step=step, wall_time=wall_time)
        events.write("none", math.nan, step=1, wall_time=3.0)
        events.sync()
        assert points(events.path)[:-1] == expected
        assert math.isnan(points(events.path)[-1][2])


def test_tensorboard_reads_it(tmp_path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    with EventFile(tmp_path) as events:
        for step in range(5):
            events.write("train/loss", 1 / (step + 1), step=step)
            events.write("evaluate/mean_return", 100.0 * step, step=step)
        found = [*loader.EventFileLoader(events.path).Load()]
    assert found[0].file_version == "brain.Event:2"
    values = [(event.step, event.summary.value[0]) for event in found[1:]]
    assert [(step, value.tag) for step, value in values[:3]] == [
        (0, "train/loss"),
        (0, "evaluate/mean_return"),
        (1, "train/loss"),
    ]
    assert [value.tensor.float_val[0] for _, value in values[1::2]] == [0, 100, 200, 300, 400]
    assert abs(found[1].wall_time - os.path.getmtime(events.path)) < 60


def test_rewinding_leaves_what_was_written_before(tmp_path):
    with EventFile(tmp_path) as events:
        start = events.position()
        events.write("loss", 1.0, step=1)
        position = events.position()
        events.write("loss", 2.0, step=2)
        assert events.rewind(position) == position - start
        events.write("loss", 3.0, step=3)
        assert events.rewind(10**6) == 0
        assert [point[1] for point in points(events.path)] == [1, 3]
    with EventFile(tmp_path) as events:
        events.rewind(position + 3)  # no record ends there
        assert [point[1] for point in points(events.path)] == [1]
        events.rewind(0)
        assert points(events.path) == [] and events.position() == start
        events.write("loss", 4.0, step=4)
        assert [point[1] for point in points(events.path)] == [4]


def test_what_a_crash_cut_off_is_removed_when_it_is_opened(tmp_path):
    with EventFile(tmp_path) as events:
        ends = [events.position()]
        for step in range(4):
            events.write("loss", float(step), step=step)
            ends.append(events.position())
    with open(events.path, "rb") as file:
        content = file.read()
    for cut in range(len(content)):
        with open(events.path, "wb") as file:
            file.write(content[:cut])
        with EventFile(tmp_path) as events:
            whole = sum(end <= cut for end in ends[1:])
            assert [point[1] for point in points(events.path)] == [*range(whole)]


@pytest.mark.parametrize("tail", [bytes(5000), b"\xff" * 100, random.Random(0).randbytes(3000)])
def test_what_is_no_record_is_removed_too(tmp_path, tail):
    with EventFile(tmp_path) as events:
        events.write("loss", 1.0, step=1)
    with open(events.path, "ab") as file:
        file.write(tail)
    with EventFile(tmp_path) as events:
        events.write("loss", 2.0, step=2)
        assert [point[1] for point in points(events.path)] == [1, 2]


def test_another_writer_keeps_its_file(tmp_path):
    other = tmp_path / "events.out.tfevents.0000000001.host.1.0"
    other.write_bytes(b"not ours")
    with EventFile(tmp_path) as events:
        assert os.path.dirname(events.path) == str(tmp_path)
    assert other.read_bytes() == b"not ours" and len(os.listdir(tmp_path)) == 2
