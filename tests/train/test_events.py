import math
import os
from pathlib import Path

import pytest

from raffia.train.log import EventFile, crc32c

loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")


def points(path):
    """Records as TensorBoard reads and checks them: tag, step, value, time."""
    first, *events = loader.EventFileLoader(str(path)).Load()
    assert first.file_version == "brain.Event:2"
    pairs = [(event, event.summary.value[0]) for event in events]
    return [(v.tag, e.step, v.tensor.float_val[0], e.wall_time) for e, v in pairs]


def test_the_checksum_is_that_of_the_rfc():
    # RFC 3720, appendix B.4
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(b"") == 0


def test_written_records_can_be_read(tmp_path):
    expected = [("train/loss", 0, 0.5, 1.25), ("a" * 300, 2**40, -3.0, 2.0), ("é", 7, 0.0, 1e9)]
    with EventFile(tmp_path) as events:
        for tag, step, value, wall_time in expected:
            events.write(tag, value, step=step, wall_time=wall_time)
        events.write("none", math.nan, step=1)
        events.sync()
        *found, (*_, value, now) = points(events.path)
    assert found == expected and math.isnan(value)
    assert abs(now - os.path.getmtime(events.path)) < 60


def test_rewinding_leaves_earlier_records(tmp_path):
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


def test_a_truncated_record_is_removed_on_opening(tmp_path):
    with EventFile(tmp_path) as events:
        ends = [events.position()]
        for step in range(4):
            events.write("loss", float(step), step=step)
            ends.append(events.position())
    content = Path(events.path).read_bytes()
    for cut in range(len(content)):
        Path(events.path).write_bytes(content[:cut])
        with EventFile(tmp_path) as events:
            num_complete = sum(end <= cut for end in ends[1:])
            assert [point[1] for point in points(events.path)] == [*range(num_complete)]


def test_files_of_other_writers_stay(tmp_path):
    other = tmp_path / "events.out.tfevents.0000000001.host.1.0"
    other.write_bytes(b"not ours")
    with EventFile(tmp_path) as events:
        assert os.path.dirname(events.path) == str(tmp_path)
    assert other.read_bytes() == b"not ours" and len(os.listdir(tmp_path)) == 2
