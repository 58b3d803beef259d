"""Kills of processes and losses of power while a `MemmapStorage` is written."""

import functools
import os
import random
import select
import shutil
import signal
import time
import traceback
from contextlib import contextmanager

import pytest
import torch

from raffia.data.check_storage import numbers_in, step
from raffia.data.memmap_storage import MemmapStorage
from raffia.data.replay import ReplayBuffer
from raffia.data.storage import TensorStorage
from raffia.data.tensordict_replay import PrioritizedReplayBuffer


@pytest.fixture(autouse=True, scope="module")
def compiled(tmp_path_factory):
    """Compiles the kernels once, or each child would."""
    with MemmapStorage(2, tmp_path_factory.mktemp("warm") / "rows") as storage:
        storage.extend(step([0, 1]))


def child(work):
    """Runs `work(report)` in a forked child; gives its id and the pipe of its reports."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writes)
        return pid, reads
    try:
        work(lambda number: os.write(writes, number.to_bytes(8, "little")))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def ended(work):
    """The status, by os.waitpid, of a child that runs `work(report)`."""
    pid, pipe = child(work)
    os.close(pipe)
    return os.waitpid(pid, 0)[1]


@contextmanager
def beside(work):
    """Runs `work(report)` in a child until the block ends; gives its first report and its id."""
    pid, pipe = child(work)
    try:
        assert select.select([pipe], [], [], 60)[0]
        yield int.from_bytes(os.read(pipe, 8), "little"), pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(pipe)


def killed_after(reports, draw, work):
    """The reports of a child before it was killed, at a random time after `reports` of them."""
    pid, pipe = child(work)
    with open(pipe, "rb") as file:
        found = file.read(8 * reports)
        time.sleep(draw.random() * 0.005)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        found += file.read()
    assert os.WIFSIGNALED(status), f"the child failed by itself: {status}"
    return [int.from_bytes(found[i : i + 8], "little") for i in range(0, len(found), 8)]


def check_ring(storage, size):
    """Checks that the storage has exactly the newest items."""
    numbers = range(max(0, storage.total - size), storage.total)
    assert storage.lost == 0 and len(storage) == len(numbers)
    if numbers:
        assert numbers_in(storage.get([number % size for number in numbers])) == [*numbers]


@pytest.mark.parametrize("kills", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_while_it_appends(tmp_path, kills):
    size, draw = 700, random.Random(0)

    def work(report):
        random_ = random.Random(os.getpid())
        storage = MemmapStorage(size, tmp_path / "rows")
        check_ring(storage, size)
        report(storage.total)
        while True:
            n = random_.choice([1, 3, 50, 400, 900])
            storage.extend(step(range(storage.total, storage.total + n)))
            if random_.random() < 0.1:
                storage.flush()
            report(storage.total)  # all of it, flushed or not, survives a kill

    for _ in range(kills):
        reported = killed_after(draw.randint(1, 15), draw, work)
        with MemmapStorage(size, tmp_path / "rows") as storage:
            assert storage.total >= reported[-1]
            check_ring(storage, size)


CUTS = ["log", "hold", "leaf 0", "half a leaf", "leaf 2", "marks", "half the marks", "clear"]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("call", ["extend", "set"])
def test_killed_at_each_step_of_a_write(tmp_path, cut, call):
    """Old rows are unchanged up to the log's last step, and new from then on."""
    size = 10
    with MemmapStorage(size, tmp_path / "rows") as storage:
        storage.extend(step(range(15)))  # rows 5 to 9 hold 5 to 9, rows 0 to 4 hold 10 to 14

    def work(report):
        storage = MemmapStorage(size, tmp_path / "rows")
        die_at(storage._files, cut)
        if call == "extend":
            storage.extend(step([15, 16, 17]))
        else:
            storage.set([7, 5, 6], step([17, 15, 16]))

    assert os.WIFSIGNALED(ended(work))
    with MemmapStorage(size, tmp_path / "rows") as storage:
        new = cut not in ("log", "hold")
        assert storage.lost == 0 and len(storage) == size
        assert storage.total == (18 if new and call == "extend" else 15)
        expected = [15, 16, 17] if new else [5, 6, 7]
        assert numbers_in(storage.get(slice(5, 8))) == expected
        assert numbers_in(storage.get([0, 1, 2, 3, 4, 8, 9])) == [10, 11, 12, 13, 14, 8, 9]


def test_killed_in_the_middle_of_more_items_than_there_are_rows(tmp_path):
    with MemmapStorage(7, tmp_path / "rows") as storage:
        storage.extend(step(range(10)))

    def work(report):
        storage = MemmapStorage(7, tmp_path / "rows")
        put = storage._files._put
        storage._files._put = lambda *arguments: (put(*arguments), die_at(storage._files, "hold"))
        storage.extend(step(range(10, 30)))

    assert os.WIFSIGNALED(ended(work))
    with MemmapStorage(7, tmp_path / "rows") as storage:
        assert 10 < storage.total < 30
        check_ring(storage, 7)


def die_at(files, cut):
    """Make this process kill itself in the middle of a write into these files."""
    log = files._log

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def put(index, marks, leaves):
        rows = torch.arange(index.start, index.stop) if isinstance(index, slice) else index
        steps = {"leaf 0": 0, "half a leaf": 0.5, "leaf 2": 2, "marks": 3, "half the marks": 3.5}
        last = steps[cut]
        for i, leaf in enumerate(leaves):
            n = len(rows) if i + 1 <= last else int(len(rows) * max(0, last - i))
            files.leaves[i][rows[:n]] = leaf[:n]
            if n < len(rows):
                die()
        if last == 3.5:
            files.marks[rows[: len(rows) // 2], 0] = marks[: len(rows) // 2, 0]
        die()

    if cut in ("log", "hold", "clear"):
        setattr(log, {"log": "write"}.get(cut, cut), die)
    else:
        files._put = put


# ----------------------------------------------------------------------------------- loss of power


def image(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


def image_within(storage, folder, images):
    """Makes each write into a storage add an image of the folder half-way."""
    put = storage._files._put

    def halfway(index, marks, leaves):
        rows = torch.arange(index.start, index.stop) if isinstance(index, slice) else index
        half = len(rows) // 2
        put(rows[:half], marks[:half], [leaf[:half] for leaf in leaves])
        images.append(image(folder))
        put(index, marks, leaves)

    storage._files._put = halfway


def crash(folder, images, sector, draw):
    """Writes a folder as it may be after a crash; `images` are those since the last flush.

    The header was synced; each sector of the rest may be that of any image.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, latest in images[-1].items():
        content = bytearray(latest)
        versions = [earlier[name] for earlier in images if name in earlier]
        if name != "storage.json":
            for at in range(0, len(content), sector):
                content[at : at + sector] = draw.choice(versions)[at : at + sector]
        (folder / name).write_bytes(content)


class Trials:
    """Storages that lose power in the middle of a write."""

    def __init__(self, folder, size, sector, seed):
        self.live, self.after = folder / "live", folder / "after"
        self.size, self.sector, self.draw, self.dropped = size, sector, random.Random(seed), 0

    def storages(self, write):
        """Six storages after a loss of power, three times each: `write`'s result, and the storage.

        write: storage -> an iterator; what it does before the first step is flushed, and of what
            it does from then on any part may be lost.
        """
        for _ in range(6):
            shutil.rmtree(self.live, ignore_errors=True)
            storage = MemmapStorage(self.size, self.live)
            steps = write(storage)
            state = next(steps)
            storage.flush()
            images = [image(self.live)]
            image_within(storage, self.live, images)
            for _ in steps:
                images.append(image(self.live))
            storage.close()
            for _ in range(3):
                some = images[: self.draw.randint(2, len(images))]
                crash(self.after, some, self.sector, self.draw)
                with MemmapStorage(self.size, self.after) as found:
                    self.dropped += found.lost
                    yield state, found
                with MemmapStorage(self.size, self.after) as again:
                    assert again.lost == 0


@pytest.mark.parametrize("sector", [512, 4096])
def test_loss_of_power_while_it_appends(tmp_path, sector):
    trials = Trials(tmp_path, size := 600, sector, sector)

    def write(storage):
        storage.extend(step(range(trials.draw.randint(1, 1500))))
        state = [storage.total, 0]
        yield state
        for _ in range(trials.draw.randint(1, 6)):
            n = trials.draw.choice([1, 10, 90, 400])
            storage.extend(step(range(storage.total, storage.total + n)))
            state[1] = storage.total
            yield

    for (flushed, total), found in trials.storages(write):
        assert flushed <= found.total <= total
        numbers = range(found.total - len(found), found.total)  # without a gap
        if numbers:
            assert numbers_in(found.get([n % size for n in numbers])) == [*numbers]
        assert {n for n in range(flushed) if n + size >= total} <= {*numbers}
        number = found.total
        found.extend(step([number]))
        assert numbers_in(found.get([number % size])) == [number]
    assert trials.dropped > 50, "nothing was torn in these trials"


def test_loss_of_power_while_it_overwrites_rows_at_random(tmp_path):
    trials = Trials(tmp_path, 2000, 512, 3)
    draw = trials.draw

    def write(storage):
        values = {row: [row] for row in draw.sample(range(2000), 1500)}
        storage.set([*values], step(values))
        yield values
        for number in range(draw.randint(1, 5)):
            rows = draw.sample(range(2000), draw.choice([1, 5, 60]))
            if draw.random() < 0.3:
                storage.erase(rows)
            else:
                storage.set(rows, step([10_000 * (number + 1) + row for row in rows]))
            for row in rows:
                values.setdefault(row, []).append(10_000 * (number + 1) + row)
            yield

    for values, found in trials.storages(write):
        rows = found.rows()
        stored = dict(zip(rows.tolist(), numbers_in(found.get(rows)), strict=True))
        assert all(value in values[row] for row, value in stored.items())
        untouched = {row for row, (first, *more) in values.items() if not more and first < 10_000}
        assert untouched <= {*stored}
    assert trials.dropped > 10, "nothing was torn in these trials"


def test_the_log_from_before_a_flush_is_not_used(tmp_path):
    """Its rows may be older than those flushed since."""
    live, after = tmp_path / "live", tmp_path / "after"
    storage = MemmapStorage(4, live)
    storage.set([0, 1, 2, 3], step(range(4)))
    earlier = image(live)

    def stop(*_):
        raise SystemExit  # keeps the log of an unfinished write

    put, storage._files._put = storage._files._put, stop
    storage._files.redo = lambda epoch: None
    with pytest.raises(SystemExit):
        storage.set([1], step([11]))
    earlier["log.bin"] = (live / "log.bin").read_bytes()
    storage._files._put = put
    storage.set([1], step([21]))
    storage.flush()
    now = image(live)
    for name, expected in [("now", 21), ("earlier", 11)]:
        shutil.rmtree(after, ignore_errors=True)
        after.mkdir()
        for file, content in {"now": now, "earlier": earlier}[name].items():
            (after / file).write_bytes(earlier[file] if file == "log.bin" else content)
        with MemmapStorage(4, after) as found:
            assert numbers_in(found.get([1])) == [expected]


# ----------------------------------------------------------------------------------- saved folders


def test_killed_while_it_saves(tmp_path):
    size, draw, known = 50, random.Random(5), 0

    def work(report):
        storage = TensorStorage(size)
        for number in range(known, 10**9):
            storage.extend(step([number] * size))
            storage.save(tmp_path / "saved")
            report(number)

    for _ in range(8):
        reported = killed_after(draw.randint(1, 4), draw, work)
        storage = TensorStorage(size)
        storage.load(tmp_path / "saved")
        [number] = {*numbers_in(storage.get(slice(None)))}
        assert number in (reported[-1], reported[-1] + 1)
        known = number


# ----------------------------------------------------------------------------------- two processes


def writes_on(folder, size, pause):
    """The work of a child: appends 5 or 25 items at a time."""

    def work(report):
        storage = MemmapStorage(size, folder)
        report(1)
        while True:
            n = 5 if pause else 25
            storage.extend(step(range(storage.total, storage.total + n)))
            time.sleep(pause)

    with MemmapStorage(size, folder) as storage:
        storage.extend(step(range(size)))
    return work


def test_reading_beside_a_writing_process(tmp_path):
    size = 60
    with beside(writes_on(tmp_path / "rows", size, 0)):
        reader = MemmapStorage.open(tmp_path / "rows", mode="r")
        rows, out = torch.arange(size), step(range(size)).clone()
        newest = set()
        for _ in range(200):
            numbers = numbers_in(reader.get(rows))
            assert [number % size for number in numbers] == rows.tolist()
            assert reader.total + 25 > max(numbers) and len(reader) == size
            assert numbers_in(reader.get(rows, out=out)) == numbers_in(out)
            newest.add(max(numbers))
        assert len(newest) > 5, "the writer did next to nothing"


@pytest.mark.parametrize("by_priority", [False, True])
def test_batches_beside_a_writing_process_contain_the_items_of_their_index(tmp_path, by_priority):
    """The writer overwrites items between the draw and the read."""
    size = 60  # and rests a little, else no batch of all items can be whole
    with beside(writes_on(tmp_path / "rows", size, 0.001)):
        storage = MemmapStorage.open(tmp_path / "rows", mode="r")
        make = functools.partial(PrioritizedReplayBuffer, 0.6, 0.4) if by_priority else ReplayBuffer
        buffer, newest, out = make(storage=storage), set(), None
        for _ in range(100):
            out = buffer.sample(32) if out is None else buffer.sample(out=out)
            assert numbers_in(out) == out["index"].tolist()
            newest.add(int(out["index"].max()))
            numbers = numbers_in(buffer[:])
            assert numbers == list(range(numbers[0], numbers[0] + size))
            if by_priority:  # of items that were overwritten meanwhile: they are left out
                late = buffer.update_priority(out["index"], torch.ones(32))
                assert late == int((out["index"] < buffer.priorities._live.start).sum())
        assert len(newest) > 5, "the writer did next to nothing"


def test_a_second_writer_is_refused_until_the_first_is_dead(tmp_path):
    def work(report):
        storage = MemmapStorage(5, tmp_path / "rows")
        storage.extend(torch.arange(2))
        report(1)
        time.sleep(60)

    with beside(work) as (_, pid):
        with pytest.raises(RuntimeError, match=f"in process {pid}: .*mode='r'"):
            MemmapStorage(5, tmp_path / "rows")
        reader = MemmapStorage(5, tmp_path / "rows", mode="r")
        assert reader.get(slice(None)).tolist() == [0, 1]
    with MemmapStorage(5, tmp_path / "rows") as storage:
        assert storage.total == 2


def test_a_forked_child_neither_writes_nor_holds_the_lock(tmp_path):
    storage = MemmapStorage(5, tmp_path / "rows")
    storage.extend(torch.arange(2))

    def work(report):
        try:
            storage.extend(torch.arange(2))
        except RuntimeError as error:
            assert storage.get(1) == 1
            report(int("child" in str(error)))
        time.sleep(60)

    with beside(work) as (refused, _):
        assert refused == 1
        storage.extend(torch.arange(2))
        storage.close()
        with MemmapStorage.open(tmp_path / "rows") as other:  # while the child lives
            assert other.get(slice(None)).tolist() == [0, 1, 0, 1]


def test_the_lock_of_a_dead_writer_is_free_though_its_child_lives(tmp_path):
    def work(report):
        storage = MemmapStorage(5, tmp_path / "rows")
        storage.extend(torch.arange(2))
        if not os.fork():
            report(os.getpid())
        time.sleep(60)
        os._exit(0)

    with beside(work) as (grandchild, _):
        pass
    try:
        with MemmapStorage.open(tmp_path / "rows") as storage:
            assert storage.total == 2
    finally:
        os.kill(grandchild, signal.SIGKILL)
