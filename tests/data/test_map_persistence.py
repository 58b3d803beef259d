"""Maps on disk: there and back, killed while saving, damaged, read by several processes."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback

import pytest
import torch

from raffia import DamagedFileError, TensorClass, TensorDict
from raffia.data import (
    MemmapStorage,
    QueryModule,
    SipHash,
    TensorDictMap,
    TensorStorage,
    UnknownRowError,
)

NESTED = ["k", ("n", "k")]


def keys(*numbers):
    n = torch.tensor(numbers, dtype=torch.int64)
    return TensorDict({"k": torch.stack([n / 2, -n], 1), "n": {"k": n % 2 == 0}}, [len(numbers)])


def values(*numbers):
    n = torch.tensor(numbers, dtype=torch.int64)
    entries = {"v": n.to(torch.bfloat16), "n": {"w": n[:, None].repeat(1, 3)}}
    return TensorDict(entries, [len(numbers)])


def filled(*numbers, **options):
    """A map from each number to ten times as much."""
    m = TensorDictMap(query_module=QueryModule(NESTED), **options)
    m[keys(*numbers)] = values(*[10 * number for number in numbers])
    return m


def content(m):
    found_keys, found = m.items()
    assert torch.equal(found["n", "w"], found["n", "w"][:, :1].expand(-1, 3))
    assert torch.equal(found["v"], found["n", "w"][:, 0].to(torch.bfloat16))
    numbers = (2 * found_keys["k"][:, 0]).int().tolist()
    assert torch.equal(found_keys["n", "k"], keys(*numbers)["n", "k"])
    return dict(zip(numbers, found["n", "w"][:, 0].tolist(), strict=True))


def in_child(work):
    """Run `work()` in a forked child, which ends with 0 if it returns; gives its process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def ended(pid):
    """How the child ended: its exit code, or the negative of the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "map"


# ---------------------------------------------------------------------------------- there and back


class TestRoundTrip:
    @pytest.mark.parametrize("path_type", [str, lambda path: path], ids=["str", "Path"])
    def test_all_is_there(self, folder, path_type):
        m = filled(1, 2, 3)
        m.save(path_type(folder))
        other = TensorDictMap.load(path_type(folder))
        assert content(other) == {1: 10, 2: 20, 3: 30} and len(other) == 3
        assert other.in_keys == NESTED and set(other.out_keys) == set(m.out_keys)
        assert torch.equal(other.rows(keys(3, 1, 9)), m.rows(keys(3, 1, 9)))
        assert other[keys(2)]["v"].dtype == torch.bfloat16
        with pytest.raises(UnknownRowError):
            other[keys(4)]

    def test_neither_changes_the_other(self, folder):
        m = filled(1, 2)
        m.save(folder)
        m[keys(1, 5)] = values(7, 8)
        first, second = TensorDictMap.load(folder), TensorDictMap.load(folder)
        first[keys(2)] = values(-1)
        first.delete(keys(1))
        assert content(second) == content(TensorDictMap.load(folder)) == {1: 10, 2: 20}

    def test_goes_on_as_the_saved_one_would(self, folder):
        m = filled(1, 2, 3, 4)
        m.delete(keys(2, 3))
        m.save(folder)
        other = TensorDictMap.load(folder)
        for each in (m, other):
            each.update(keys(1, 8, 9, 7), values(1, 8, 9, 7), merge="sum", accumulate=True)
        assert content(other) == content(m) == {1: 11, 4: 40, 8: 8, 9: 9, 7: 7}
        assert torch.equal(other.rows(keys(7, 8, 9, 1)), m.rows(keys(7, 8, 9, 1)))

    def test_the_order_of_use_and_the_limit(self, folder):
        m = filled(1, 2, 3, max_size=3, evict="lru")
        m[keys(1)]
        m.save(folder)
        other = TensorDictMap.load(folder)
        assert (other.max_size, other.evict) == (3, "lru")
        other[keys(4)] = values(40)
        assert content(other) == {1: 10, 3: 30, 4: 40}
        other[keys(5)] = values(50)
        assert content(other) == {1: 10, 4: 40, 5: 50}

    def test_an_empty_map(self, folder):
        TensorDictMap(in_keys=["k"], max_size=2).save(folder)
        m = TensorDictMap.load(folder)
        assert len(m) == 0 and m.max_size == 2 and m.in_keys == ["k"]
        m[keys(1, 2)] = values(1, 2)
        assert len(m) == 2

    @pytest.mark.parametrize("how", ["from a pair", "deleted"])
    def test_an_empty_map_still_knows_its_entries(self, folder, how):
        m = TensorDictMap.from_tensordict_pair(keys(1), values(1), NESTED)
        if how == "deleted":
            m = filled(1)
            m.delete(keys(1))
        m.save(folder)
        assert TensorDictMap.load(folder).get(keys(1), 3)["n", "w"].tolist() == [[3, 3, 3]]

    @pytest.mark.parametrize(
        "dtype",
        [torch.bool, torch.uint8, torch.uint64, torch.float16, torch.complex64, torch.float8_e5m2],
        ids=str,
    )
    def test_dtypes(self, folder, dtype):
        m, x = TensorDictMap(in_keys=["x"]), torch.tensor([[0, 1], [1, 0]]).to(dtype)
        td = TensorDict({"x": x}, [2])
        m[td] = td
        m.save(folder)
        back = TensorDictMap.load(folder)[td]["x"]
        assert back.dtype == dtype and torch.equal(back.view(torch.uint8), x.view(torch.uint8))

    def test_names_of_entries_that_are_no_names_of_files(self, folder):
        names = ["a/b", "..", "a.b", "values.0", "meta", "ä ü", "x" * 300]
        m = TensorDictMap(in_keys=["k"])
        value = TensorDict({name: torch.tensor([i]) for i, name in enumerate(names)}, [1])
        query = TensorDict({"k": torch.ones(1)}, [1])
        m[query] = value
        m.save(folder)
        found = TensorDictMap.load(folder)[query]
        assert [found[name].item() for name in names] == list(range(len(names)))

    def test_values_of_a_tensorclass(self, folder):
        m = TensorDictMap(in_keys=NESTED)
        m[keys(1, 2)] = Pair(x=torch.tensor([1, 2]), y=torch.tensor([3, 4]), batch_size=[2])
        m.save(folder)
        found = TensorDictMap.load(folder)[keys(2)]
        assert type(found) is Pair and found.y.tolist() == [4]

    def test_the_functions_are_given_again(self, folder):
        add = lambda new, old=None: new if old is None else new.apply(torch.add, old)  # noqa: E731
        m = filled(1, 2, write_fn=add, collate_fn=lambda td: td["v"])
        m.save(folder)
        other = TensorDictMap.load(folder, write_fn=add, collate_fn=lambda td: td["v"].float() + 1)
        other[keys(1, 3)] = values(5, 6)
        assert other[keys(1, 2, 3)].tolist() == [16, 21, 7]

    def test_into_another_storage(self, folder):
        filled(1, 2).save(folder)
        storage = TensorStorage(5)
        m = TensorDictMap.load(folder, storage=storage)
        assert m.storage is storage and content(m) == {1: 10, 2: 20} and m.max_size == 5

    def test_into_a_storage_that_is_too_small(self, folder):
        filled(1, 2, 3).save(folder)
        with pytest.raises(ValueError, match="3 rows.*max_size=2"):
            TensorDictMap.load(folder, storage=TensorStorage(2))

    def test_values_rest_on_disk(self, folder, tmp_path):
        storage = MemmapStorage(4, tmp_path / "rows")
        m = TensorDictMap(in_keys=NESTED, storage=storage, evict="lru")
        assert m.max_size == 4
        m[keys(1, 2, 3)] = values(1, 2, 3)
        m.update(keys(1, 4), values(10, 4), merge="sum", accumulate=True)
        m[keys(5)] = values(5)
        assert content(m) == {1: 11, 3: 3, 4: 4, 5: 5}
        m.save(folder)
        m.delete(keys(1, 3))
        assert content(m) == {4: 4, 5: 5}
        other = TensorDictMap.load(folder, storage=MemmapStorage(4, tmp_path / "other"))
        other[keys(6)] = values(6)
        assert content(other) == {1: 11, 4: 4, 5: 5, 6: 6}
        assert content(TensorDictMap.load(folder)) == {1: 11, 3: 3, 4: 4, 5: 5}

    def test_with_out_keys(self, folder):
        m = TensorDictMap(in_keys=NESTED, out_keys=["v"])
        m[keys(1)] = values(1)
        m.save(folder)
        other = TensorDictMap.load(folder)
        other[keys(2)] = values(2)
        assert set(other[keys(1, 2)].keys()) == {"v"}


class Pair(TensorClass):
    x: torch.Tensor
    y: torch.Tensor


def first_bit(x):
    return (x.flatten(1)[:, 0] if x.dim() > 1 else x).long() & 1


class TestHashModules:
    @pytest.mark.parametrize(
        "options",
        [{"key": (3, -4)}, {"rounds": (2, 4)}, {"normalize": False}],
        ids=str,
    )
    def test_a_siphash_is_kept(self, folder, options):
        m = TensorDictMap(query_module=QueryModule(NESTED, hash_module=SipHash(**options)))
        m[keys(1, 2)] = values(10, 20)
        m.save(folder)
        other = TensorDictMap.load(folder)
        assert content(other) == {1: 10, 2: 20}
        assert torch.equal(other.query_module.hash(keys(1)), m.query_module.hash(keys(1)))

    def test_each_entry_has_its_own(self, folder):
        hashers = [SipHash(key=(1, 2)), SipHash(key=(3, 4))]
        query = QueryModule(NESTED, hash_module=hashers, aggregator=SipHash(rounds=(2, 4)))
        m = TensorDictMap(query_module=query)
        m[keys(1, 2)] = values(10, 20)
        m.save(folder)
        assert content(TensorDictMap.load(folder)) == {1: 10, 2: 20}

    def test_another_module_is_given_again(self, folder):
        query = QueryModule(NESTED, hash_module=[first_bit, first_bit])
        m = TensorDictMap(query_module=query)
        m[keys(*range(9))] = values(*range(9))
        m.save(folder)
        with pytest.raises(ValueError, match="query_module="):
            TensorDictMap.load(folder)
        other = TensorDictMap.load(folder, query_module=query)
        assert content(other) == {i: i for i in range(9)} and keys(3, 8) in other

    @pytest.mark.parametrize(
        "query",
        [QueryModule(NESTED, hash_module=SipHash(rounds=(2, 4))), QueryModule(NESTED[::-1])],
        ids=["hashes", "keys"],
    )
    def test_one_that_hashes_differently_is_refused(self, folder, query):
        filled(1, 2).save(folder)
        with pytest.raises(ValueError, match="hashes differently|in_keys"):
            TensorDictMap.load(folder, query_module=query)


# ----------------------------------------------------------------------------------- other folders


class TestFolder:
    def test_is_made_with_its_parents(self, folder):
        filled(1).save(folder / "deep" / "er")
        assert content(TensorDictMap.load(folder / "deep" / "er")) == {1: 10}

    def test_an_older_map_is_replaced(self, folder):
        filled(*range(9)).save(folder)
        before = len(os.listdir(folder))
        for number in range(3):
            filled(number).save(folder)
            assert content(TensorDictMap.load(folder)) == {number: 10 * number}
        assert len(os.listdir(folder)) == before and os.listdir(folder.parent) == ["map"]

    def test_a_folder_of_someone_else_is_left_alone(self, folder):
        folder.mkdir()
        (folder / "thesis.txt").write_text("years of work")
        with pytest.raises(FileExistsError, match="thesis.txt"):
            filled(1).save(folder)
        assert os.listdir(folder) == ["thesis.txt"]
        with pytest.raises(FileNotFoundError, match="manifest"):
            TensorDictMap.load(folder)

    def test_a_file(self, folder):
        folder.write_text("hello")
        with pytest.raises(OSError, match="folder|directory"):
            filled(1).save(folder)
        with pytest.raises(OSError):
            TensorDictMap.load(folder)
        assert folder.read_text() == "hello"

    def test_a_saved_storage_is_no_map(self, folder):
        storage = TensorStorage(4)
        storage.extend(values(1, 2))
        storage.save(folder)
        with pytest.raises(ValueError, match="TensorDictMap"):
            TensorDictMap.load(folder)
        with pytest.raises(FileExistsError):
            filled(1).save(folder)
        filled(1).save(folder.parent / "other")
        with pytest.raises(ValueError, match="TensorDictMap"):
            TensorStorage(4).load(folder.parent / "other")

    def test_none(self, folder):
        with pytest.raises(FileNotFoundError, match="map"):
            TensorDictMap.load(folder)
        folder.mkdir()
        with pytest.raises(FileNotFoundError, match="map"):
            TensorDictMap.load(folder)

    def test_a_disk_that_fails_leaves_the_old(self, folder, monkeypatch):
        filled(1).save(folder)
        before = sorted(os.listdir(folder))

        def fail(fd):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
            patch.setattr(os, "fsync", fail)
            filled(1, 2).save(folder)
        assert sorted(os.listdir(folder)) == before
        assert content(TensorDictMap.load(folder)) == {1: 10}


# ------------------------------------------------------------------------------------ damaged files


def flips(size):
    """Positions of a file: all of a short one; of a longer one the ends and some between."""
    if size <= 1500:
        return range(size)
    return sorted({*range(12), *range(size - 12, size), *random.Random(0).sample(range(size), 60)})


class TestDamage:
    @pytest.fixture
    def saved(self, folder):
        filled(*range(20)).save(folder)
        return folder

    def refused(self, folder):
        with pytest.raises((DamagedFileError, FileNotFoundError)) as caught:
            TensorDictMap.load(folder)
        assert str(folder) in str(caught.value)  # the message names the file or the folder
        return caught.value

    def test_a_flipped_bit_anywhere(self, saved):
        places = 0
        for file in saved.iterdir():
            data = file.read_bytes()
            for i in flips(len(data)):
                file.write_bytes(data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1 :])
                assert type(self.refused(saved)) is DamagedFileError
                places += 1
            file.write_bytes(data)
        assert places > 100 and len(TensorDictMap.load(saved)) == 20

    def test_another_length(self, saved):
        for file in saved.iterdir():
            data = file.read_bytes()
            for other in (b"", data[:1], data[:-1], data[: len(data) // 2], data + b"\0"):
                file.write_bytes(other)
                assert type(self.refused(saved)) is DamagedFileError
            file.write_bytes(data)
        assert len(TensorDictMap.load(saved)) == 20

    def test_a_missing_file(self, saved):
        for file in saved.iterdir():
            data = file.read_bytes()
            file.unlink()
            self.refused(saved)
            file.write_bytes(data)
        assert len(TensorDictMap.load(saved)) == 20

    def test_a_folder_in_the_place_of_a_file(self, saved):
        for file in list(saved.iterdir()):
            data = file.read_bytes()
            file.unlink()
            file.mkdir()
            with pytest.raises((DamagedFileError, OSError)):
                TensorDictMap.load(saved)
            file.rmdir()
            file.write_bytes(data)

    def test_files_of_two_maps_mixed(self, saved):
        other = saved.parent / "other"
        filled(*range(20, 40)).save(other)
        mine, theirs = (
            [f for f in d.iterdir() if f.name != "manifest.json"] for d in (saved, other)
        )
        shutil.copyfile(theirs[0], mine[0])
        assert type(self.refused(saved)) is DamagedFileError

    def test_a_manifest_that_was_edited(self, saved):
        manifest = saved / "manifest.json"
        text = manifest.read_text()
        record = json.loads(text)
        for name in record:
            for value in (None, 7, [], "x"):
                manifest.write_text(json.dumps({**record, name: value}))
                self.refused(saved)
        for other in ("null", "[]", "{}", '{"format": "raffia"}', text * 2, "{" * 10_000):
            manifest.write_text(other)
            self.refused(saved)

    def test_a_new_map_can_be_saved_elsewhere_and_the_old_is_not_overwritten(self, saved):
        manifest = saved / "manifest.json"
        manifest.write_text("{}")
        with pytest.raises((DamagedFileError, FileExistsError)):
            filled(1).save(saved)
        assert manifest.read_text() == "{}"


def test_a_state_that_contradicts_itself_changes_nothing():
    state = {
        name: x for name, x in filled(1, 2, 3).state_dict().items() if "query_module" not in name
    }
    for name, x in state.items():
        changes = [x[:-1], torch.cat([x, x[-1:]]), x.double(), x[None], x - 1 if len(x) else x]
        for change in changes:
            if change.dtype == x.dtype and torch.equal(change, x):
                continue
            m = filled(7)
            full = {**m.state_dict(), **state, name: change}
            try:
                m.load_state_dict(full)
            except (RuntimeError, ValueError):
                assert content(m) == {7: 70}
            else:  # numbers that are as good as others: what is there must fit together
                found, values_found = m.items()
                assert len(m) == len(values_found)
                assert sorted(m.rows(found).tolist()) == sorted(set(m.rows(found).tolist()))


# ------------------------------------------------------------------------- killed, and side by side

WIDTH = 2000


def version(number):
    """A map whose size and every value say which version it is."""
    size = 40 + number % 7
    m = TensorDictMap(in_keys=["k"], max_size=100, evict="lru")
    query = TensorDict({"k": torch.arange(size)}, [size])
    m[query] = TensorDict({"v": torch.full((size, WIDTH), number)}, [size])
    return m


def version_of(m):
    """Which version a map is; fails if it is not one of them in full."""
    found_keys, found = m.items()
    number = int(found["v"][0, 0])
    assert len(m) == 40 + number % 7
    assert torch.equal(found["v"], torch.full((len(m), WIDTH), number))
    assert torch.equal(found_keys["k"], torch.arange(len(m)))
    assert torch.equal(m[found_keys]["v"], found["v"])
    return number


@pytest.mark.slow
def test_killed_while_saving(folder):
    """Fifty times: what can be read is the last map that was reported as saved, or the next."""
    rng = random.Random(0)
    version(0).save(folder)
    number, killed_at = 0, set()
    for _ in range(50):
        out, into = os.pipe()

        def save_on(start=number, report=into):
            for i in range(start + 1, start + 10_000):
                version(i).save(folder)
                os.write(report, i.to_bytes(4, "little"))

        pid = in_child(save_on)
        os.close(into)
        os.read(out, 4)  # the first is saved
        time.sleep(rng.random() * 0.05)
        os.kill(pid, signal.SIGKILL)
        assert ended(pid) == -signal.SIGKILL
        reported = os.read(out, 1 << 16)
        os.close(out)
        last = int.from_bytes(reported[-4:], "little") if reported else number + 1
        number = version_of(TensorDictMap.load(folder))
        assert number in (last, last + 1)
        killed_at.add(len(os.listdir(folder)))
    version(0).save(folder)
    assert len(os.listdir(folder)) == min(killed_at)  # nothing is left of those that were killed
    assert os.listdir(folder.parent) == ["map"]


STEPS = ("fsync", "write", "open", "replace", "rename", "unlink", "mkdir", "truncate", "ftruncate")


def dying_at(step, monkeypatch):
    """Let the process be killed just before its `step`-th call that reaches the disk."""
    count = 0

    def before(original):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return call

    for name in STEPS:
        monkeypatch.setattr(os, name, before(getattr(os, name)))


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False], ids=["a new folder", "over an older map"])
def test_killed_before_each_step_of_saving(folder, first, monkeypatch):
    seen = []
    for step in range(1, 100):
        shutil.rmtree(folder, ignore_errors=True)
        if not first:
            version(1).save(folder)

        def save(step=step):
            dying_at(step, monkeypatch)
            version(2).save(folder)

        status = ended(in_child(save))
        if first and (not folder.exists() or not (folder / "manifest.json").exists()):
            seen.append(None)
            with pytest.raises(FileNotFoundError):
                TensorDictMap.load(folder)
        else:
            seen.append(version_of(TensorDictMap.load(folder)))
        version(3).save(folder)  # what is left is no obstacle
        assert version_of(TensorDictMap.load(folder)) == 3 and len(os.listdir(folder)) == 2
        if status == 0:
            break
        assert status == -signal.SIGKILL
    else:
        raise AssertionError("saving takes more than a hundred steps")
    assert len(seen) > 5 and seen[0] == (None if first else 1) and seen[-1] == 2
    assert seen == sorted(seen, key=lambda number: number == 2)  # once new, never old again


def test_several_processes_read_one_map(folder):
    version(5).save(folder)

    def read():
        for _ in range(5):
            m = TensorDictMap.load(folder)
            assert version_of(m) == 5
            m.clear()  # each has its own

    children = [in_child(read) for _ in range(4)]
    assert [ended(pid) for pid in children] == [0] * 4
    assert version_of(TensorDictMap.load(folder)) == 5


def test_a_map_in_memory_is_read_by_forked_children():
    m = filled(*range(100))

    def read(i):
        numbers = range(i, 100, 4)
        assert m[keys(*numbers)]["n", "w"][:, 0].tolist() == [10 * number for number in numbers]
        m[keys(5)] = values(-1)  # in its own copy

    children = [in_child(lambda i=i: read(i)) for i in range(4)]
    assert [ended(pid) for pid in children] == [0] * 4
    assert content(m) == {i: 10 * i for i in range(100)}


def test_saved_anew_while_it_is_read(folder, monkeypatch):
    """The reader has found which files there are when another process replaces them."""
    version(1).save(folder)
    load, (out, into) = TensorDict.load, os.pipe()

    def save_when_told():
        os.read(out, 1)
        version(2).save(folder)

    pid = in_child(save_when_told)

    def after_another_save(*args, **kwargs):
        os.write(into, b"!")
        time.sleep(0.5)  # it is done, or waits for us
        return load(*args, **kwargs)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(TensorDict, "load", after_another_save)
            assert version_of(TensorDictMap.load(folder)) in (1, 2)
    finally:
        os.write(into, b"!")  # also where it was not told
        assert ended(pid) == 0
        os.close(into)
        os.close(out)
    assert version_of(TensorDictMap.load(folder)) == 2


def test_readers_beside_a_writer_see_whole_maps(folder):
    version(0).save(folder)
    stop = folder.parent / "stop"

    def read():
        last = 0
        while not stop.exists():
            number = version_of(TensorDictMap.load(folder))
            assert number >= last
            last = number

    children = [in_child(read) for _ in range(2)]
    for number in range(1, 40):
        version(number).save(folder)
    stop.touch()
    assert [ended(pid) for pid in children] == [0, 0]


def test_two_writers_take_turns(folder):
    def write(start):
        for number in range(start, start + 8):
            version(number).save(folder)

    children = [in_child(lambda start=start: write(start)) for start in (0, 100)]
    assert [ended(pid) for pid in children] == [0, 0]
    assert version_of(TensorDictMap.load(folder)) in (7, 107)
    assert len(os.listdir(folder)) == 2


def test_a_first_version_that_another_writer_brings_meanwhile(folder, monkeypatch):
    """Between the look at whether there is a manifest and the look at what else there is."""
    folder.mkdir()
    looked, lexists = [], os.path.lexists

    def look(path):
        found = lexists(path)
        if str(path).endswith("manifest.json") and not looked:
            looked.append(path)
            version(1).save(folder)
        return found

    monkeypatch.setattr(os.path, "lexists", look)
    version(2).save(folder)
    assert looked and version_of(TensorDictMap.load(folder)) == 2


ELSEWHERE = """
import sys
import torch
from raffia import TensorDict
from raffia.data import TensorDictMap

m = TensorDictMap.load(sys.argv[1])
n = torch.tensor([7, 3, 99])
query = TensorDict({"k": torch.stack([n / 2, -n], 1), "n": {"k": n % 2 == 0}}, [3])
print(m.contains(query).tolist(), m.get(query, -1)["n", "w"][:, 0].tolist())
m[query] = m.get(query, 5)
m.save(sys.argv[2])
"""


@pytest.mark.slow
def test_a_fresh_process_reads_and_writes(folder):
    filled(*range(20)).save(folder)
    other = folder.parent / "other"
    run = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(folder), str(other)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "123"},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "[True, True, False] [70, 30, -1]\n"
    assert content(TensorDictMap.load(other)) == {i: 10 * i for i in range(20)} | {99: 5}
