import os
import shutil
from pathlib import Path

import pytest
import torch

import raffia.train.replay_log
from raffia.data.memmap_storage import MemmapStorage
from raffia.data.segment import SegmentReplayBuffer
from raffia.data.storage import TensorStorage
from raffia.tensordict.memmap import DamagedFileError
from raffia.tensordict.tensordict import TensorDict
from raffia.train.checkpoint import CheckpointError, Checkpoints
from raffia.train.replay_log import ReplayLog

SIZE, ENVS, ACTIONS = 60, 3, 4


def make_buffer(storage=None, **options):
    sizes = {"unroll_steps": 2, "n_step": 1, "alpha": 0.6, "beta": 0.4}
    sizes |= {"observation_keys": ["observation", "to_play"], "frame_stack": {"observation": 2}}
    options = {**sizes, "generator": torch.Generator().manual_seed(1), **options}
    return SegmentReplayBuffer(TensorStorage(SIZE) if storage is None else storage, **options)


class Play:
    """Extends a buffer, samples from it and updates it, as a run does."""

    def __init__(self, buffer, seed=0):
        self.buffer, self.draws = buffer, torch.Generator().manual_seed(seed)

    def rand(self, *shape):
        return torch.rand(shape, generator=self.draws)

    def state(self, shape):
        observation = (self.rand(*shape, 2, 3) * 255).to(torch.uint8)
        return {"observation": observation, "to_play": self.rand(*shape) < 0.5}

    def iterate(self):
        """Returns all sampled batches."""
        buffer, times = self.buffer, int(torch.randint(1, 6, (), generator=self.draws))
        shape = (times, ENVS)
        steps = TensorDict(self.state(shape) | {"next": self.state(shape)}, shape)
        steps["action"] = (self.rand(*shape) * ACTIONS).long()
        steps["reward"], steps["policy"] = self.rand(*shape), self.rand(*shape, ACTIONS)
        steps["terminated"], steps["truncated"] = (self.rand(*shape) < p for p in (0.1, 0.05))
        buffer.extend(steps, priority=self.rand(*shape) if self.rand(1) < 0.5 else None)
        if self.rand(1) < 0.1:
            buffer.cut(env=int(self.rand(1) * ENVS))
        if not len(buffer):
            return []
        batch = buffer.sample(5)
        buffer.update_priority(batch["index"], self.rand(5))
        buffer.update_priority(torch.tensor([0]), 1.0)  # a row that is overwritten, later
        reanalyzed = TensorDict(policy=self.rand(5, 4, ACTIONS), batch_size=[5, 4])
        buffer.update(batch["step_index"], reanalyzed)
        buffer.beta = min(1.0, buffer.beta + 0.001)
        return [batch]

    def iterate_many(self, num):
        return [batch for _ in range(num) for batch in self.iterate()]


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    return one == other


def assert_same(one, other):
    assert same(one.state_dict(), other.state_dict()) and one.num_ignored == other.num_ignored


class Run:
    """A folder with checkpoints of a buffer."""

    def __init__(self, folder, keep=2):
        self.log = ReplayLog(folder / "replay", mutable=["policy"])
        self.checkpoints = Checkpoints(folder / "checkpoints", keep=keep)

    def save(self, update, buffer):
        logged = self.log.files(buffer)
        self.checkpoints.save(update, logged.parts, {"replay": logged.extras})
        self.log.prune(self.checkpoints.available())

    def restore(self, buffer, say=pytest.fail):
        found = self.checkpoints.newest(say, self.log.check)
        self.log.restore(found, buffer)
        return found.update

    @property
    def chunks(self):
        return sorted(name for name in os.listdir(self.log.folder) if name.startswith("rows-"))


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # it matters only in a loss of power


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(raffia.train.replay_log, "SMALL", 100)
    monkeypatch.setattr(raffia.train.replay_log, "LARGE", 180)  # 30 rows


@pytest.mark.parametrize(
    ("chunks", "location"), [("small", "memory"), ("large", "memory"), ("small", "disk")]
)
def test_a_run_that_is_stopped_at_any_save_equals_an_uninterrupted_one(
    tmp_path, chunks, location, request
):
    """With rows in memory or on disk, closed or killed; its folder may be copied."""
    if chunks == "small":
        request.getfixturevalue("small_chunks")
    ahead = {"prefetch": 2 if chunks == "large" else 0}

    def begin(folder):
        storage = MemmapStorage(SIZE, folder / "replay" / "rows") if location == "disk" else None
        return Run(folder), Play(make_buffer(storage, **ahead))

    folder = tmp_path / "0"
    uninterrupted, (run, play) = Play(make_buffer(**ahead)), begin(folder)
    assert_same(uninterrupted.buffer, play.buffer)
    for update in range(18):
        num = (3 * update) % 7  # none, too
        expected, found = (each.iterate_many(num) for each in (uninterrupted, play))
        for one, other in zip(expected, found, strict=True):
            assert same(one.to_dict(), other.to_dict())
        run.save(update, play.buffer)
        state = play.draws.get_state()
        if update % 3 == 2:
            play.iterate_many(update % 5)  # lost by a kill; on disk, rows are overwritten
            if location == "disk":
                play.buffer.storage.close() if update % 2 else play.buffer.storage._release()
            if update == 8:
                shutil.copytree(folder, folder := tmp_path / "1")
            run, play = begin(folder)
            assert run.restore(play.buffer) == update
            play.draws.set_state(state)
        assert_same(uninterrupted.buffer, play.buffer)
    assert play.buffer.storage.total > 3 * SIZE and play.buffer.num_ignored > 0
    assert len(run.chunks) < (25 if chunks == "small" else 8)


@pytest.mark.parametrize("mutable", [["observation", "to_play"], ["observation"], []])
def test_mutable_entries_are_saved_completely(tmp_path, mutable, small_chunks):
    log, checkpoints = ReplayLog(tmp_path / "r", mutable=mutable), Checkpoints(tmp_path)
    play, other = Play(make_buffer()), make_buffer()
    for update in range(4):
        play.iterate_many(10)
        index = play.buffer.sample(4)["step_index"]
        if "observation" in mutable:
            new = torch.full((4, 4, 2, 3), update, dtype=torch.uint8)
            play.buffer.update(index, TensorDict(observation=new, batch_size=[4, 4]))
        logged = log.files(play.buffer)
        checkpoints.save(update, logged.parts, {"replay": logged.extras})
    assert bool(logged.extras["chunks"]) == (len(mutable) < 2)
    log.restore(checkpoints.newest(), other)
    assert_same(play.buffer, other)


def test_rows_are_written_once(tmp_path, small_chunks):
    run, buffer = Run(tmp_path, keep=9), make_buffer(TensorStorage(1000))
    play, before = Play(buffer), {}
    for update in range(9):
        play.iterate_many(10)
        run.save(update, buffer)
        current = {name: os.stat(f"{run.log.folder}/{name}").st_mtime_ns for name in run.chunks}
        assert len(current.keys() - before.keys()) <= 8 and before.items() <= current.items()
        before = current
    rows = [name.split("-")[1:3] for name in run.chunks]
    assert sum(int(stop) - int(first) for first, stop in rows) < 1.3 * buffer.storage.total
    columns = run.checkpoints.newest().tensors("replay")["columns"]
    assert sorted(columns.keys()) == [
        "2.action", "3.reward", "4.policy", "5.terminated", "6.truncated",
    ]  # fmt: skip


def test_chunks_are_removed_with_the_checkpoints_that_need_them(tmp_path, small_chunks):
    run, play = Run(tmp_path, keep=2), Play(make_buffer())
    for update in range(12):
        play.iterate_many(10)  # the whole ring is overwritten
        run.save(update, play.buffer)
        available = run.checkpoints.available()
        chunks = [chunk for found in available for chunk in found.extras["replay"]["chunks"]]
        assert {*run.chunks} == {chunk["file"] for chunk in chunks}
    for found in available:
        run.log.check(found)


def test_leftovers_of_a_kill_are_removed(tmp_path):
    run, play = Run(tmp_path), Play(make_buffer())
    play.iterate_many(3)
    run.save(1, play.buffer)
    play.iterate_many(3)
    run.log.files(play.buffer)  # killed here
    folder = Path(run.log.folder)
    for name in (".0123456789ab.tmp", "notes.txt"):
        (folder / name).write_text("half")
    (folder / "rows").mkdir()
    assert len(run.chunks) == 2
    run = Run(tmp_path)
    run.restore(play.buffer)
    run.log.prune(run.checkpoints.available())
    assert len(run.chunks) == 1
    assert sorted({*os.listdir(folder)} - {*run.chunks}) == ["notes.txt", "rows"]


@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_a_damaged_chunk_is_named_and_the_previous_checkpoint_is_used(
    tmp_path, damage, small_chunks
):
    run, play = Run(tmp_path), Play(make_buffer())
    play.iterate_many(6)
    run.save(1, play.buffer)
    expected = play.buffer.state_dict()
    play.iterate_many(6)
    run.save(2, play.buffer)
    path = f"{run.log.folder}/{run.chunks[-1]}"
    if damage == "remove":
        os.unlink(path)
    else:
        with open(path, "rb+") as file:
            file.seek(-5, os.SEEK_END)
            file.truncate() if damage == "cut" else file.write(b"!")
    with pytest.raises(DamagedFileError, match=os.path.basename(path)):
        run.log.restore(run.checkpoints.newest(), play.buffer)
    warnings, run, other = [], Run(tmp_path), make_buffer()
    assert run.restore(other, warnings.append) == 1
    assert len(warnings) == 1 and "000000002 is skipped" in warnings[0] and path in warnings[0]
    assert same(expected, other.state_dict())
    Play(other).iterate_many(3)
    run.save(2, other)
    again = make_buffer()
    assert Run(tmp_path).restore(again) == 2
    assert_same(other, again)


def test_an_emptied_or_another_buffer_is_written_completely(tmp_path, small_chunks):
    run, play = Run(tmp_path), Play(make_buffer())
    play.iterate_many(5)
    run.save(1, play.buffer)
    before = play.buffer.storage.total
    play.buffer.empty()
    while play.buffer.storage.total <= before:
        play.iterate()
    run.save(2, play.buffer)
    other = make_buffer()
    run.restore(other)
    assert_same(play.buffer, other)
    third = Play(make_buffer(), seed=9)
    third.iterate_many(2)
    run.save(3, third.buffer)
    run.restore(other)
    assert_same(third.buffer, other)


def test_a_buffer_with_other_settings_is_refused(tmp_path):
    run, play = Run(tmp_path), Play(make_buffer())
    play.iterate_many(4)
    run.save(1, play.buffer)
    for other, match in [
        (make_buffer(TensorStorage(SIZE + 1)), "ring of 60 rows"),
        (make_buffer(n_step=2), "segments look"),
        (make_buffer(alpha=0.5), "alpha"),
        (make_buffer(generator=None), "generator"),
    ]:
        with pytest.raises(ValueError, match=match):
            run.restore(other)
        assert len(other.storage) == 0 and len(other) == 0


def test_a_full_disk_leaves_no_new_files(tmp_path, small_chunks, monkeypatch):
    run, play = Run(tmp_path), Play(make_buffer())
    play.iterate_many(4)
    run.save(1, play.buffer)
    expected, before = play.buffer.state_dict(), run.chunks
    play.iterate_many(20)
    calls = []

    def fsync(fd):
        calls.append(fd)
        if len(calls) > 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    message = "replay could not be written: No space left on device"
    with pytest.raises(CheckpointError, match=message):
        run.save(2, play.buffer)
    monkeypatch.undo()
    assert run.chunks == before
    other = make_buffer()
    assert Run(tmp_path).restore(other) == 1
    assert same(expected, other.state_dict())
    run.save(2, play.buffer)  # there is room again
    Run(tmp_path).restore(other)
    assert_same(play.buffer, other)


def of_version(version):
    def save(run, play):
        logged = run.log.files(play.buffer)
        extras = {**logged.extras, "version": version}
        if version is None:
            del extras["version"]
        run.checkpoints.save(2, logged.parts, {"replay": extras})

    return save


def erased(run, play):
    play.buffer.storage.erase(3)
    run.log.files(play.buffer)


UNFIT = [
    (of_version(None), CheckpointError, "a replay of version 1"),
    (of_version(3), CheckpointError, "a replay of version 3"),
    (lambda run, _: run.checkpoints.save(2, {}), DamagedFileError, "holds no replay buffer"),
    (erased, ValueError, "must not be erased"),
]


@pytest.mark.parametrize(("save", "error", "message"), UNFIT)
def test_states_that_cannot_be_restored_are_refused(tmp_path, save, error, message):
    run, play, other = Run(tmp_path), Play(make_buffer()), make_buffer()
    play.iterate_many(4)
    run.save(1, play.buffer)
    with pytest.raises(error, match=message):
        save(run, play)
        run.log.restore(run.checkpoints.newest(), other)
    assert other.storage.total == 0
