import errno
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from raffia.files import dump_json
from raffia.files.folder import MANIFEST, read_folder, signed, write_folder
from raffia.tensordict.memmap import DamagedFileError
from raffia.tensordict.tensordict import TensorDict
from raffia.train.checkpoint import CheckpointError, Checkpoints, read_checkpoint
from tests.marks import slow_among


def state_of(update):
    generator = torch.Generator().manual_seed(update)
    weight = torch.randn(7, 5, generator=generator)
    return TensorDict(step=torch.tensor(update), params=dict(weight=weight))


def save(checkpoints, update, score=None):
    extras = {"update_again": update, "rows": [1, None, 0.5]}
    return checkpoints.save(update, {"state": state_of(update), "note": b"hello"}, extras, score)


def assert_intact(found, update):
    assert found.update == update
    assert found.extras == {"update_again": update, "rows": [1, None, 0.5]}
    assert found.read("note") == b"hello"
    state = found.tensors("state")
    assert torch.equal(state["params", "weight"], state_of(update)["params", "weight"])


def names(checkpoints):
    return sorted(os.listdir(checkpoints.folder))


def stored_path(path, name):
    return read_folder(path, "raffia.checkpoint", 1).files[name]


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "run" / "checkpoints", keep=2)


# -- saving and pruning


def test_a_round_trip(checkpoints):
    path = save(checkpoints, 12, score=0.25)
    assert path.name == "000000012"
    found = Checkpoints(checkpoints.folder).newest()
    assert_intact(found, 12)
    assert found.score == 0.25 and found.root == str(path)
    assert_intact(read_checkpoint(path), 12)


def test_a_file_may_be_written_by_a_function(checkpoints):
    for update in (999_999_999, 1_000_000_000, 1_000_000_001):
        checkpoints.save(update, {"zeros.bin": lambda path: Path(path).write_bytes(bytes(1000))})
    found = checkpoints.newest()
    assert os.path.getsize(found.path("zeros.bin")) == 1000
    with pytest.raises(DamagedFileError, match=r"holds \['zeros.bin'\], but no 'ones.bin'"):
        found.path("ones.bin")
    # Updates are ordered by number, not by name.
    assert [found.update for found in checkpoints.available()] == [1_000_000_000, 1_000_000_001]


def test_the_newest_are_kept_and_the_best(checkpoints):
    assert checkpoints.newest() is checkpoints.best() is None and checkpoints.available() == []
    for update, score in enumerate([1.0, 7.0, None, 3.0, 2.0, None]):
        save(Checkpoints(checkpoints.folder, keep=2), update, score)  # each in another process
    assert [found.update for found in checkpoints.available()] == [1, 4, 5]
    assert checkpoints.best().update == 1 and checkpoints.newest().update == 5
    save(checkpoints, 6, score=7.0)  # the same score, and newer
    assert [found.update for found in checkpoints.available()] == [5, 6]
    assert checkpoints.best().update == 6


def interrupted(path):
    Path(path).write_bytes(b"half")
    raise KeyboardInterrupt("by a person")


FAILED = [
    (lambda c: Checkpoints(c.folder, keep=0), "at least 1"),
    (lambda c: c.save(-1, {}), "0 or more"),
    (lambda c: c.save(1, {}, score=float("nan")), "finite or None"),
    (lambda c: c.save(1, {"a": TensorDict(), "a.safetensors": b""}), "two parts"),
    (lambda c: c.save(1, {"a/b": b""}), "must be plain"),
    (lambda c: c.save(1, {}, {1: 0, "1": 0}), "twice"),
    (lambda c: c.save(1, {}, {"x": {1}}), "not JSON"),
    (lambda c: c.save(1, {"state": TensorDict(x=object())}), "object, which can.t be stored"),
    (lambda c: c.save(1, {"first": b"1", "second": interrupted}), "by a person"),
]


@pytest.mark.parametrize("call, match", FAILED)
def test_failed_saves_change_nothing(checkpoints, call, match):
    save(checkpoints, 0)
    errors = (ValueError, TypeError, DamagedFileError, KeyboardInterrupt)
    with pytest.raises(errors, match=match):
        call(checkpoints)
    assert names(checkpoints) == ["000000000"]
    assert_intact(checkpoints.newest(), 0)


# -- damage


def cut_short(path):
    os.truncate(path, os.path.getsize(path) - 1)


def flip_a_bit(path):
    content = bytearray(Path(path).read_bytes())
    content[len(content) // 2] ^= 16
    Path(path).write_bytes(content)


def lengthen(path):
    os.truncate(path, os.path.getsize(path) + 1)


def damaged(path, name, damage):
    damage(f"{path}/{MANIFEST}" if name == MANIFEST else stored_path(path, name))


@pytest.mark.parametrize("damage", [cut_short, flip_a_bit, lengthen, os.unlink])
@pytest.mark.parametrize("name", ["state.safetensors", "note", MANIFEST])
def test_a_damaged_file_is_named_and_the_previous_checkpoint_is_used(checkpoints, damage, name):
    save(checkpoints, 1)
    damaged(save(checkpoints, 2), name, damage)
    warnings = []
    assert_intact(checkpoints.newest(warnings.append), 1)
    if name == MANIFEST and damage is os.unlink:  # as after a kill
        assert warnings == []
    else:
        assert len(warnings) == 1 and "checkpoints/000000002 is skipped" in warnings[0]
        with pytest.warns(UserWarning, match="000000002 is skipped"):
            checkpoints.newest()


@pytest.mark.parametrize("name", ["note", MANIFEST])
def test_a_run_saves_over_a_damaged_checkpoint(checkpoints, name):
    save(checkpoints, 1)
    save(checkpoints, 3)
    damaged(save(checkpoints, 4), name, flip_a_bit)
    again = Checkpoints(checkpoints.folder, keep=2)
    assert again.newest(lambda line: None).update == 3
    save(again, 4)
    assert [found.update for found in again.available()] == [3, 4]
    assert_intact(again.newest(), 4)


def test_a_damaged_later_checkpoint_does_not_replace_a_new_one(checkpoints):
    checkpoints.keep = 1
    flip_a_bit(stored_path(save(checkpoints, 7), "note"))
    again = Checkpoints(checkpoints.folder, keep=1)
    assert again.newest(lambda line: None) is None
    save(again, 5)
    assert names(again) == ["000000005"]


def test_foreign_folders_are_named_and_left_alone(checkpoints):
    save(checkpoints, 1)
    folder = Path(checkpoints.folder)
    for name in ("000000002", "000000003"):
        (folder / name).mkdir()
    (folder / "000000002/notes.txt").write_text("mine")
    write_folder(folder / "000000003", "storage", 1, {})
    (folder / "000000004").write_text("a file")
    warnings = []
    assert checkpoints.newest(warnings.append).update == 1
    assert len(warnings) == 3
    with pytest.raises(CheckpointError, match=r"000000002 was not saved: .* Available: 000000001"):
        save(checkpoints, 2)
    save(checkpoints, 5)
    assert names(checkpoints) == [f"00000000{i}" for i in range(1, 6)]
    assert os.listdir(folder / "000000002") == ["notes.txt"]


def test_foreign_files_in_a_checkpoint_stay(checkpoints):
    (save(checkpoints, 1) / "notes.txt").write_text("mine")
    assert_intact(checkpoints.newest(), 1)
    for update in (2, 3, 4):
        save(checkpoints, update)
    assert os.listdir(f"{checkpoints.folder}/000000001") == ["notes.txt"]


def test_a_later_version_is_refused_by_name(checkpoints):
    save(checkpoints, 1)
    manifest = save(checkpoints, 2) / MANIFEST
    record = json.loads(manifest.read_bytes())
    del record["sha256"]
    manifest.write_bytes(dump_json(signed({**record, "version": 2})))
    message = "000000002 was written by a later version of raffia.*version 2"
    with pytest.raises(CheckpointError, match=message):
        checkpoints.newest()
    save(Checkpoints(checkpoints.folder, keep=1), 3)
    assert names(checkpoints) == ["000000002", "000000003"]


def test_saving_an_earlier_update_is_refused(checkpoints):
    save(checkpoints, 5)
    with pytest.raises(ValueError, match="update=4 cannot be saved: .* a checkpoint of update 5"):
        save(checkpoints, 4)
    assert_intact(checkpoints.newest(), 5)


# -- full disks, and disks that fail


class Guarded:
    """A file whose writes can fail."""

    def __init__(self, file, count):
        self.file, self.count = file, count

    def write(self, data):
        self.count("write", self.file.name)
        return self.file.write(data)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)


class Faults:
    """Makes system calls fail: the n-th, or all from the n-th on."""

    def __init__(self, monkeypatch):
        self.set(0)
        for name in ("open", "write", "fsync", "replace", "mkdir", "unlink", "rmdir"):
            monkeypatch.setattr(os, name, self.guarded(name, getattr(os, name)))
        for module in ("atomic", "folder"):
            monkeypatch.setattr(f"raffia.files.{module}.open", self.open, raising=False)

    def set(self, fail, permanently=False, number=errno.ENOSPC):
        self.calls, self.fail, self.permanently, self.number = [], fail, permanently, number

    def guarded(self, name, call):
        def guarded(*args, **kwargs):
            if name != "open" or args[1] & os.O_CREAT:
                self.count(name, args[0])
            return None if name == "fsync" else call(*args, **kwargs)  # a real fsync is slow

        return guarded

    def open(self, path, mode="r", **kwargs):
        if mode != "rb":
            self.count("open", path)
        file = open(path, mode, **kwargs)
        return file if mode == "rb" else Guarded(file, self.count)

    def count(self, name, path):
        self.calls.append(name)
        count = len(self.calls)
        if self.fail and (count == self.fail or (self.permanently and count > self.fail)):
            raise OSError(self.number, os.strerror(self.number), str(path))


FULL, BROKEN = errno.ENOSPC, errno.EIO


@pytest.mark.parametrize(
    "number, permanently", slow_among([(FULL, True), (FULL, False), (BROKEN, False)], (FULL, False))
)
@pytest.mark.parametrize("again", [False, True])
def test_a_failing_disk_leaves_the_saved_checkpoint(
    tmp_path, monkeypatch, number, permanently, again
):
    save(Checkpoints(tmp_path / "start"), 1)
    if again:
        save(Checkpoints(tmp_path / "start"), 2, score=1.0)
    faults, failed = Faults(monkeypatch), []
    for fail in range(1, 100):
        faults.set(0)
        checkpoints = Checkpoints(tmp_path / str(fail), keep=1)
        shutil.copytree(tmp_path / "start", checkpoints.folder)
        before, message = 1 + again, ""
        faults.set(fail, permanently, number)
        try:
            save(checkpoints, 2, score=2.0)
        except CheckpointError as error:
            message = str(error)
            assert f"/{fail}/000000002 was " in message and os.strerror(number) in message
            assert f"{before:09d}" in message.split("Available: ")[1] or "was saved" in message
        calls = faults.calls
        faults.set(0)
        newest = Checkpoints(checkpoints.folder).newest(pytest.fail)
        assert_intact(newest, newest.update)
        if fail > len(calls):
            break
        failed.append((calls[fail - 1], bool(message)))
        if "was not saved" in message and not permanently and not again:
            assert names(checkpoints) == ["000000001"]
        else:
            assert newest.update == 2 or (message and newest.update == before)
        path = save(checkpoints, 2)
        assert_intact(checkpoints.newest(pytest.fail), 2)
        assert names(checkpoints) == ["000000002"] and len(os.listdir(path)) == 3
    assert {("open", True), ("write", True), ("fsync", True), ("replace", True)} <= {*failed}
    assert len(failed) > 15 and newest.update == 2 and newest.score == 2.0


def test_all_is_synced_before_an_older_checkpoint_is_removed(tmp_path, monkeypatch):
    """The order of calls is safe against a loss of power at any point."""
    calls, replace, unlink = [], os.replace, os.unlink

    def record(name, path, call=lambda: None):
        calls.append((name, str(path)))
        call()

    monkeypatch.setattr(os, "fsync", lambda fd: record("fsync", os.readlink(f"/proc/self/fd/{fd}")))
    monkeypatch.setattr(os, "replace", lambda a, b: record("replace", b, lambda: replace(a, b)))
    monkeypatch.setattr(os, "unlink", lambda path: record("unlink", path, lambda: unlink(path)))
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    first = str(save(checkpoints, 1))
    assert calls[0] == ("fsync", str(tmp_path))  # the parent of the new folder
    calls.clear()
    second = str(save(checkpoints, 2))
    committed = calls.index(("replace", f"{second}/{MANIFEST}"))
    for name in ("note", "state.safetensors"):
        assert ("fsync", stored_path(second, name)) in calls[:committed]
    assert calls[committed - 2] == ("fsync", second)  # the names; then the manifest itself
    removed = calls.index(("unlink", f"{first}/{MANIFEST}"))
    assert calls[0] == ("fsync", checkpoints.folder)  # the parent of the new checkpoint
    assert calls[committed + 1 : removed] == [("fsync", second)]
    assert calls[removed + 1] == ("fsync", first)  # without power it has no manifest
    assert {call for call, _ in calls[removed + 2 :]} == {"unlink"}


# -- kills


def killed_while(run, num_reports, seconds):
    """Reports of a forked child, killed some seconds after a number of reports."""
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            run(lambda number: os.write(writes, number.to_bytes(8, "little")))
        finally:
            os._exit(1)
    os.close(writes)
    with open(reads, "rb") as file:
        found = file.read(8 * num_reports)
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        found += file.read()
    assert os.WIFSIGNALED(status), "the child ended by itself"
    return [int.from_bytes(found[i : i + 8], "little") for i in range(0, len(found), 8)]


@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_kills_during_saves_lose_at_most_the_last_one(checkpoints, kills):
    draw, done, num_leftovers = random.Random(0), -1, 0

    def work(report):
        os.fsync = lambda fd: None  # in the child: a kill is not a loss of power
        found = checkpoints.newest(pytest.fail)
        update = -1 if found is None else found.update
        report(update + 1)
        while True:
            update += 1
            save(checkpoints, update, score=float(update % 7))
            report(update + 1)

    for _ in range(kills):
        reported = killed_while(work, draw.randint(1, 5), draw.random() * 0.01)
        done = max(done, reported[-1] - 1)
        num_leftovers += len(names(checkpoints)) > 3
        found = Checkpoints(checkpoints.folder).newest(pytest.fail)
        if found is None:
            assert done == -1
        else:
            assert done <= found.update <= done + 1  # it may be killed before it reports
            assert_intact(found, found.update)
            done = found.update
    assert done > kills and (num_leftovers or kills < 50)
    save(checkpoints, done + 1)
    best = checkpoints.best(pytest.fail)
    assert best.score == 6.0
    assert 2 <= len(names(checkpoints)) <= 3  # two of the newest, and the best
    for found in checkpoints.available():
        assert_intact(found, found.update)
        assert len(os.listdir(found.root)) == 3


def test_leftovers_of_a_kill_are_skipped_and_then_removed(checkpoints):
    save(checkpoints, 1)
    path = save(checkpoints, 2)
    os.unlink(path / MANIFEST)  # as after a killed save or removal
    (path / ".0123456789ab.tmp").write_bytes(b"half a manifest")
    os.makedirs(f"{checkpoints.folder}/000000003")
    again = Checkpoints(checkpoints.folder)
    assert_intact(again.newest(pytest.fail), 1)
    assert again.best(pytest.fail) is None
    assert names(again) == ["000000001", "000000002", "000000003"]  # a reader removes nothing
    save(again, 2)
    assert names(again) == ["000000001", "000000002"] and len(os.listdir(path)) == 3
