"""`MemmapStorage`: its behaviour beyond the contract (crashes: test_storage_crash.py)."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import pytest
import torch

from raffia.data import memmap_files
from raffia.data.check_storage import numbers_in, step
from raffia.data.memmap_storage import MemmapStorage
from raffia.data.replay import ReplayBuffer
from raffia.data.storage import TensorStorage
from raffia.files import atomic, space
from raffia.files.folder import write_folder
from raffia.tensordict.memmap import DamagedFileError

FILES = ["leaf-0.bin", "leaf-1.bin", "leaf-2.bin", "lock", "log.bin", "rows.bin", "storage.json"]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "rows"


def filled(folder, n=4, size=5):
    storage = MemmapStorage(size, folder)
    storage.extend(step(range(n)))
    return storage


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def numbers_of(storage):
    return numbers_in(storage.get(storage.rows()))


# ----------------------------------------------------------------------------------------- reopened


def test_a_reopened_storage_continues(folder):
    with pytest.raises(FileNotFoundError, match="no storage has been written to this folder yet"):
        MemmapStorage.open(folder)
    assert not folder.exists()
    MemmapStorage(5, folder).close()
    with pytest.raises(FileNotFoundError):
        MemmapStorage.open(folder)
    storage = filled(folder, 7)
    storage.erase([3])
    del storage  # without close nothing is lost
    with MemmapStorage.open(folder) as storage:
        assert storage.max_size == 5 and storage.total == 7 and storage.lost == 0
        assert storage.rows().tolist() == [0, 1, 2, 4] and numbers_of(storage) == [5, 6, 2, 4]
        with pytest.raises(ValueError, match="'next' is missing"):  # its structure is stored
            storage.extend(step([1]).select("obs"))
        assert storage.extend(step([7])).tolist() == [7] and numbers_of(storage) == [5, 6, 7, 4]
        storage.clear()


def test_closed(folder):
    storage = filled(folder)
    storage.close()
    storage.close()
    calls = [lambda: storage.get(0), lambda: storage.extend(step([1])), lambda: storage.erase([0])]
    for call in (*calls, storage.clear, storage.flush):
        with pytest.raises(RuntimeError, match="has been closed: .*MemmapStorage.open"):
            call()


def test_rows_are_on_disk_before_the_header_counts_them(folder, monkeypatch):
    storage, calls = filled(folder), []
    monkeypatch.setattr(memmap_files.MappedFile, "flush", lambda self: calls.append(self.path))
    real = memmap_files.write_atomically
    noted = lambda path, text: (calls.append(path), real(path, text))  # noqa: E731
    monkeypatch.setattr(memmap_files, "write_atomically", noted)
    storage.flush()
    *data, header = [os.path.basename(path) for path in calls]
    assert header == "storage.json" and sorted(data) == [*FILES[:3], "rows.bin"]
    storage.flush()
    assert len(calls) == 5, "nothing was written since, and it was flushed again"


def test_headers_are_rare_and_space_is_reserved_at_the_first_write(folder, monkeypatch):
    count = []
    real = memmap_files.write_atomically
    monkeypatch.setattr(memmap_files, "write_atomically", lambda *a: (count.append(1), real(*a)))
    storage = MemmapStorage(10_000, folder)
    storage.extend(torch.zeros(100))
    found = os.stat(folder / "leaf-0.bin")
    assert found.st_size == 40_000 <= 512 * found.st_blocks
    for _ in range(100):
        storage.extend(torch.zeros(100))
    assert len(count) < 12
    for _ in range(10):  # about as much between two flushes: no header but that of the flush
        storage.flush()
        count.clear()
        storage.extend(torch.zeros(100))
    assert len(count) == 0
    storage.flush()
    count.clear()
    for row in torch.randperm(10_000)[:200]:
        storage.set([row], torch.zeros(1))
    assert len(count) < 6


# ------------------------------------------------------------------------------------ other readers


def test_a_reader_follows_the_writer_and_writes_nothing(folder):
    storage = filled(folder)
    before, reader = names(folder), MemmapStorage.open(folder, mode="r")
    storage.extend(step([4, 5, 6]))
    assert numbers_of(reader) == [5, 6, 2, 3, 4] and reader.total == 7
    storage.erase([2])
    assert len(reader) == 4
    assert reader.contains([2, 1, -1, 9]).tolist() == [False, True, False, False]
    with pytest.raises(IndexError, match="2 hold nothing"):
        reader.get([1, 2])
    for call in (
        lambda: reader.extend(step([1])),
        lambda: reader.set([0], step([1])),
        lambda: reader.erase([0]),
        reader.clear,
        reader.flush,
        lambda: reader.load_state_dict(storage.state_dict()),
    ):
        with pytest.raises(RuntimeError, match="open for reading only"):
            call()
    assert names(folder) == before
    other = TensorStorage(5)
    other.load_state_dict(reader.state_dict())
    assert numbers_of(other) == [5, 6, 3, 4]
    other.extend(step([7, 8]))
    storage.load_state_dict(other.state_dict())
    assert reader.total == 9 and numbers_of(reader) == [5, 6, 7, 8, 4]
    reader.close()


def test_torn_rows_are_never_returned_and_the_longest_run_of_items_is_kept(folder):
    storage = filled(folder, 25, size=10)  # holds 15 to 24
    storage._files.leaves[1][[6, 7]] += 1  # items 16 and 17 are torn, as by a kill
    with MemmapStorage.open(folder, mode="r") as reader:
        assert numbers_in(reader.get([0, 5])) == [20, 15]
        match = r"rows \[6, 7\] do not match their .* crash .* repairs them; if the files are"
        with pytest.raises(DamagedFileError, match=match):
            reader.get(slice(None))
    del storage
    for lost in (3, 0):
        with MemmapStorage.open(folder) as storage:
            assert storage.lost == lost and storage.total == 25 and len(storage) == 7
            assert numbers_in(storage.get([n % 10 for n in range(18, 25)])) == [*range(18, 25)]


# ---------------------------------------------------------------------------------------- refusals


def flip(path, row, num_rows):
    """Flip one bit of a row in a file."""
    data = bytearray(path.read_bytes())
    data[row * len(data) // num_rows] ^= 1
    path.write_bytes(data)


READS = {
    "row": lambda storage: storage.get(3),
    "slice": lambda storage: storage.get(slice(None)),
    "rows": lambda storage: storage.get(torch.tensor([0, 3, 3])),
    "into": lambda storage: storage.get([3], out=step([0]).clone()),
    "state": lambda storage: storage.state_dict(),
    "batch": lambda storage: ReplayBuffer(storage=storage).sample(500),
}


@pytest.mark.parametrize("name", READS)
def test_a_writer_never_gets_damaged_rows(folder, name):
    filled(folder, 8, size=10).close()
    flip(folder / "leaf-0.bin", 3, 10)
    read = READS[name]
    with MemmapStorage(10, folder) as storage:
        assert numbers_in(storage.get([0, 7, 2])) == [0, 7, 2]  # the others can be read
        with pytest.raises(DamagedFileError, match=r"rows \[3\] .* are damaged.*erase\(rows\)"):
            read(storage)
        assert numbers_in(storage.get([5])) == [5]
        storage.set(3, step([30])[0])  # written again, or erased, it is valid
        read(storage)
    flip(folder / "leaf-0.bin", 3, 10)
    with MemmapStorage(10, folder) as storage:
        storage.erase(3)
        assert numbers_of(storage) == [0, 1, 2, 4, 5, 6, 7]
        assert storage._num_unread == 0 and not storage._unread.any()


def test_rows_are_checked_once(folder, monkeypatch):
    filled(folder, 8, size=10).close()
    with MemmapStorage(10, folder) as storage:
        checked, fits = [], storage._files.fits

        def noted(rows, leaves):
            checked.extend(rows.tolist())
            return fits(rows, leaves)

        monkeypatch.setattr(storage._files, "fits", noted)
        storage.get([1, 2, 2])
        storage.get([2, 1, 5])
        storage.extend(step([8, 9, 10]))  # rows 8, 9 and, overwritten, 0
        storage.set([4, 4], step([40, 41]))
        for _ in range(2):
            storage.get(slice(None))
        assert sorted(checked) == [1, 2, 3, 5, 6, 7]


def test_a_refused_call_changes_no_file(folder, tmp_path):
    storage, other, text = filled(folder), TensorStorage(5), tmp_path / "text" / "mine.txt"
    other.extend(torch.zeros(2))
    other.save(tmp_path / "saved")
    write_folder(tmp_path / "letter", "letter", 1, {"a": b""})
    text.parent.mkdir()
    text.write_text("text")
    before = {path.name: names(path) for path in tmp_path.iterdir()}
    for call, error, match in [
        (lambda: MemmapStorage(5, folder), RuntimeError, f"in process {os.getpid()}"),
        (lambda: storage.load_state_dict(other.state_dict()), ValueError, "new folder"),
        (lambda: other.save(folder), FileExistsError, "other files"),
        (lambda: MemmapStorage(5, tmp_path / "saved"), FileExistsError, "other files"),
        (lambda: MemmapStorage(5, tmp_path / "letter"), FileExistsError, "other files"),
        (lambda: MemmapStorage(5, text.parent), FileExistsError, "no MemmapStorage .'mine.txt'"),
        (lambda: MemmapStorage(5, text), FileExistsError, "not a folder"),
        (lambda: MemmapStorage(None, folder), ValueError, "a MemmapStorage needs a max_size"),
        (lambda: MemmapStorage(5, folder, mode="w"), ValueError, "mode='w' must be one of 'r.'"),
    ]:
        with pytest.raises(error, match=match):
            call()
    assert numbers_of(storage) == [0, 1, 2, 3]
    storage.close()
    with pytest.raises(ValueError, match=r"max_size=5, not 6: open it with MemmapStorage.open\("):
        MemmapStorage(6, folder)
    assert {path.name: names(path) for path in tmp_path.iterdir()} == before
    MemmapStorage(5, folder).close()


def rewrite(folder, sign=True, **changes):
    path = folder / "storage.json"
    record = json.loads(path.read_text())
    checksum = record.pop("sha256")
    record.update(changes)
    record = memmap_files.signed(record) if sign else {**record, "sha256": checksum}
    path.write_text(json.dumps(record))


DAMAGES = [
    (lambda f: (f / "storage.json").write_text("{"), DamagedFileError, "not JSON"),
    (lambda f: (f / "leaf-1.bin").unlink(), DamagedFileError, "leaf-1.bin: the file is missi"),
    (lambda f: (f / "rows.bin").write_bytes(b"1"), DamagedFileError, "1 bytes, not 96"),
    (lambda f: rewrite(f, version=9), ValueError, "of version 9, but .* of version 1"),
    (lambda f: rewrite(f, kind="x"), ValueError, "holds 'x' of version 1"),
    (lambda f: rewrite(f, structure={}), DamagedFileError, "record of the rows"),
    (lambda f: rewrite(f, sign=False, total=3), DamagedFileError, "checksum differs"),
]


def test_damaged_files(tmp_path):
    for i, (damage, error, match) in enumerate(DAMAGES):
        folder = tmp_path / str(i)
        filled(folder).close()
        damage(folder)
        before = names(folder)
        for mode in ("r", "r+", "r+"):  # the second time: the lock was released
            with pytest.raises(error, match=match):
                MemmapStorage.open(folder, mode=mode)
        assert names(folder) == before


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def third_is_full(patch):
    reserved = []
    patch.setattr(space, "reserve", lambda *a: reserved.append(a) or len(reserved) < 3 or full())


def little_is_free(patch):
    usage = shutil.disk_usage("/")._replace(free=100)
    patch.setattr(space.shutil, "disk_usage", lambda path: usage)
    patch.setattr(space, "reserve", lambda *_: pytest.fail("it was started"))


FULL_DISKS = {
    "while files are made": (third_is_full, "no space for the rows"),
    "before": (little_is_free, "no space for the rows: they need .* GiB are free.*smaller"),
    "header": (lambda patch: patch.setattr(memmap_files, "write_atomically", full), "No space lef"),
    "name of the header": (lambda patch: patch.setattr(atomic, "sync", full), "No space left"),
}


@pytest.mark.parametrize("where", FULL_DISKS)
def test_after_a_failed_first_write_the_next_one_works(folder, monkeypatch, where):
    fill, match = FULL_DISKS[where]
    storage = MemmapStorage(5, folder)
    with monkeypatch.context() as patch:
        fill(patch)
        with pytest.raises(OSError, match=match):
            storage.extend(step([1]))
    assert names(folder) == ["lock"] and storage.structure is None and len(storage) == 0
    if where == "before":
        storage.close()
        storage = MemmapStorage(5, folder)
    storage.extend(step([1]))
    assert numbers_of(storage) == [1]


# ------------------------------------------------------------------------------------- side effects


def test_no_signal_handlers_no_temporary_files_no_output(folder, monkeypatch, tmp_path, capfd):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with filled(folder, 12) as storage:
        storage.flush()
        storage.get([0, 1])
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    assert names(temporary) == [] and capfd.readouterr() == ("", "") and names(folder) == FILES


def test_many_parts_in_a_write(folder, monkeypatch):
    monkeypatch.setattr("raffia.data.memmap_files.SIZE", 400)
    with MemmapStorage(50, folder) as storage:
        storage.extend(step(range(120)))
        storage.set(torch.arange(49, -1, -1), step(range(50)))
        assert numbers_of(storage) == [*range(49, -1, -1)] and storage.total == 120


def test_without_compiled_kernels_the_files_are_the_same(tmp_path, monkeypatch):
    def write(folder):
        with MemmapStorage(5, folder) as storage:
            storage.extend(step(range(8)))
            storage.set([1, 3], step([11, 13]))
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}

    compiled = write(tmp_path / "a")
    for module in ("siphash", "rows"):
        name = f"raffia.data.{module}"
        monkeypatch.setattr(sys.modules[name], "kernels", SimpleNamespace(rows=None))
    assert write(tmp_path / "b") == compiled


@pytest.mark.slow
def test_a_storage_left_open_at_exit_prints_nothing(folder):
    code = "import sys, torch; from raffia.data import MemmapStorage, ReplayBuffer; "
    code += "b = ReplayBuffer(storage=MemmapStorage(5, sys.argv[1])); b.extend(torch.zeros(2))"
    found = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, timeout=60)
    assert (found.returncode, found.stdout, found.stderr) == (0, b"", b"")
    with MemmapStorage.open(folder) as storage:
        assert len(storage) == 2
