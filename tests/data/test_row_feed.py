"""Mirrors of an entry's rows: they follow the storage, and can be rebuilt."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raffia import TensorDict
from raffia.data.row_feed import RowFeed, RowMirror
from raffia.data.storage import TensorStorage
from tests.data.test_segment_shards import make, steps_of


class Followed:
    """A storage, whose item i is the number i, with its feed and the ring at each time step."""

    def __init__(self, num_rows, storage=None):
        self.storage = storage or TensorStorage(num_rows)
        self.feed = RowFeed(self.storage, ("x", "y"))
        self.num_rows = num_rows

    def add(self, num):
        self.feed.before_extend(num)
        first = self.storage.total
        values = torch.arange(first, first + num).unsqueeze(1) * torch.tensor([1, 10])
        self.storage.extend(TensorDict(x=TensorDict(y=values, batch_size=[num]), batch_size=[num]))

    def ring(self, total):
        """The item in each row after `total` items; -1 for an empty row."""
        rows = torch.arange(self.num_rows)
        items = total - 1 - (total - 1 - rows) % self.num_rows
        return torch.where(items < 0, -1, items)


def equals_ring(mirror, ring):
    filled = ring >= 0
    rows = torch.arange(len(ring))[filled]
    return torch.equal(mirror.read(rows), ring[filled].unsqueeze(1) * torch.tensor([1, 10]))


WHAT = st.sampled_from(["ask", "take", "lose", "-"])


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 9), st.lists(st.tuples(st.integers(1, 12), WHAT), max_size=30))
def test_a_mirror_and_a_rebuilt_one_equal_the_ring(num_rows, calls):
    """Tasks in order: a mirror survives, or is lost and is rebuilt from before the oldest task."""
    one = Followed(num_rows)
    one.add(1)
    one.feed.start()
    sent = one.storage.total
    live = RowMirror()
    live.load(one.feed.as_of(sent))
    tasks = []  # total before, rows since, total after
    for num, call in calls:
        one.add(num)
        if call == "ask":
            tasks.append((sent, one.feed.since(sent), one.storage.total))
            sent = one.storage.total
        elif call == "take" and tasks:
            _, new, total = tasks.pop(0)
            live.append(new)
            assert equals_ring(live, one.ring(total))
            one.feed.forget(tasks[0][0] if tasks else sent)
        elif call == "lose":
            live = RowMirror()
            live.load(one.feed.as_of(tasks[0][0] if tasks else sent))
        most = one.storage.total - (tasks[0][0] if tasks else sent)
        assert one.feed.num_bytes_stored <= 16 * (most + 12 + num_rows)


def test_rows_are_read_as_of_their_time():
    one = Followed(5)
    one.add(4)
    one.feed.start()
    for _ in range(3):
        one.add(3)
    rows = torch.tensor([[0, 1], [2, 4]])
    for total in (5, 8, 13):
        found = one.feed.read(rows, total)
        assert torch.equal(found[..., 0], one.ring(total)[rows])
    each = one.feed.read(rows, torch.tensor([[6], [13]]))[..., 0]
    assert torch.equal(each, torch.stack([one.ring(6)[rows[0]], one.ring(13)[rows[1]]]))
    one.feed.forget(13)
    assert one.feed.num_bytes_stored == 0
    with pytest.raises(IndexError, match="row 1 has been overwritten"):
        one.feed.read(rows, 6)
    one.add(2)
    assert one.feed.num_bytes_stored == 32
    one.feed.stop()
    one.add(2)
    assert one.feed.num_bytes_stored == 0
    with pytest.raises(IndexError, match="overwritten"):
        one.feed.as_of(13)
    with pytest.raises(ValueError, match="no rows have been added yet"):
        RowFeed(TensorStorage(4), ("x",)).as_of(0)


@pytest.mark.parametrize("stack", [1, 3])
@pytest.mark.parametrize("reuse_memory", [False, True])
def test_samples_with_rows_equal_those_with_frames(stack, reuse_memory):
    """The rows of a mirror equal the observations of the sample, each frame once."""
    options = dict(num_rows=25, frame_stack=stack, alpha=0.6, beta=0.4, replacement=None)
    plain, by_row = make(2, **options), make(2, reuse_memory=reuse_memory, **options)
    for replay in (plain, by_row):
        replay.extend(steps_of(4, 4, shape=(2,)))
        replay.sample(8)
    feeds = by_row.give_rows_of("obs")
    for round_number in range(1, 6):
        for replay in (plain, by_row):
            index = replay.extend(steps_of(4, 4, first=4 * round_number, ends=[(2, 1)], shape=(2,)))
        index = index[by_row.contains(index)]
        for call in (lambda r: r.sample(8), lambda r: r.sample(8), lambda r, i=index: r.read(i)):
            one, other = call(plain), call(by_row)
            assert set(one.keys()) == set(other.keys())
            for key in one.keys():
                if key != "obs":
                    assert torch.equal(one[key], other[key]), key
            assert other["obs"].shape == (len(one), 2 + stack - 1)
            for shard, feed in enumerate(feeds):
                mine = one["index"] % 2 == shard
                found, expected = feed.read(other["obs"][mine], feed.total), one["obs"][mine]
                if stack == 1:
                    assert torch.equal(found, expected)
                else:
                    assert torch.equal(found[:, stack - 1 :], expected[:, :, -1])
                    assert torch.equal(found[:, :stack], expected[:, 0])
