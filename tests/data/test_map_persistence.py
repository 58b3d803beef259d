"""Maps on disk: round trips, killed while saving, damaged, read by several processes."""

import os
import shutil
import signal
import traceback

import pytest
import torch

from raffia import TensorDict
from raffia.data import MemmapStorage, QueryModule, SipHash, TensorDictMap, TensorStorage

NESTED = ["k", ("n", "k")]


def keys(*numbers):
    n = torch.tensor(numbers, dtype=torch.int64)
    return TensorDict({"k": torch.stack([n / 2, -n], 1), "n": {"k": n % 2 == 0}}, [len(numbers)])


def values(*numbers):
    n = torch.tensor(numbers, dtype=torch.int64)
    entries = {"v": n.to(torch.bfloat16), "n": {"w": n[:, None].repeat(1, 3)}}
    return TensorDict(entries, [len(numbers)])


def filled(*numbers, query=None, deleted=(), **options):
    """A map from each number to ten times as much, of which `deleted` are removed again."""
    m = TensorDictMap(query_module=query or QueryModule(NESTED), **options)
    m[keys(*numbers)] = values(*[10 * number for number in numbers])
    m.delete(keys(*deleted))
    return m


def content(m):
    found_keys, found = m.items()
    numbers = (2 * found_keys["k"][:, 0]).int().tolist()
    assert torch.equal(found_keys["n", "k"], keys(*numbers)["n", "k"])
    return dict(zip(numbers, found["n", "w"][:, 0].tolist(), strict=True))


def in_child(work):
    """Run `work()` in a forked child, which ends with 0 if it returns; gives its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def ended(pid):
    """The exit code of a child, or the negative of its signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "map"


# ------------------------------------------------------------------------------------- round trips


def hashed(*hash_modules, **options):
    return QueryModule(NESTED, hash_module=list(hash_modules) or None, **options)


def used_1(m):
    m[keys(1)]
    return m


TWO = [SipHash(key=(1, 2)), SipHash(key=(3, 4))]


def one_key(**options):
    """A map with one key, whose hash modules have these options."""
    return lambda: filled(1, query=QueryModule(NESTED, hash_module=SipHash(**options)))


MAPS = {
    "plain": lambda: filled(1, 2, 3),
    "of free rows": lambda: filled(1, 2, 3, 4, deleted=(2, 3)),
    "least recently used": lambda: used_1(filled(1, 2, 3, max_size=3, evict="lru")),
    "empty": lambda: TensorDictMap(in_keys=NESTED, max_size=9),
    "all deleted": lambda: filled(1, deleted=(1,)),
    "from a pair": lambda: TensorDictMap.from_tensordict_pair(keys(1), values(1), NESTED),
    "out_keys": lambda: filled(1, out_keys=["v"]),
    "key of a hash": one_key(key=(3, 4)),
    "rounds": one_key(rounds=(2, 4)),
    "bit by bit": one_key(normalize=False),
    "each its own": lambda: filled(1, query=hashed(*TWO, aggregator=SipHash(rounds=(2, 4)))),
}


def same(one, other):
    """Whether two maps are equal, with all state that later calls depend on."""
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(x, theirs[n]) for n, x in mine.items())


@pytest.mark.parametrize("kind", MAPS)
def test_a_loaded_map_continues_like_the_saved_one(folder, kind):
    m = MAPS[kind]()
    m.save(folder / "deep")
    other = TensorDictMap.load(str(folder / "deep"))
    assert (other.in_keys, other.max_size, other.evict) == (NESTED, m.max_size, m.evict)
    hashes = [one.query_module.hash(keys(1)) for one in (m, other)]
    assert same(m, other) and torch.equal(*hashes)
    if kind in ("all deleted", "from a pair"):
        assert other.get(keys(7), 3)["n", "w"].tolist() == [[3, 3, 3]]
    for each in (m, other):
        each.update(keys(1, 8, 9, 7), values(1, 8, 9, 7), merge="sum", accumulate=True)
    assert same(m, other) and same(MAPS[kind](), TensorDictMap.load(folder / "deep"))


def add(new, old=None):
    return new if old is None else new.apply(torch.add, old)


def first_bit(x):
    return (x.flatten(1)[:, 0] if x.dim() > 1 else x).long() & 1


def test_functions_and_modules_are_passed_again(folder):
    m = filled(1, 2, write_fn=add, collate_fn=lambda td: td["v"])
    m.save(folder)
    with pytest.raises(ValueError, match="pass write_fn="):
        TensorDictMap.load(folder, collate_fn=None)
    with pytest.raises(ValueError, match="pass collate_fn="):
        TensorDictMap.load(folder, write_fn=None)
    other = TensorDictMap.load(folder, write_fn=add, collate_fn=lambda td: td["v"].float() + 1)
    other[keys(1, 3)] = values(5, 6)
    assert other[keys(1, 2, 3)].tolist() == [16, 21, 7]
    query = hashed(first_bit, first_bit)
    filled(*range(9), query=query).save(folder)
    with pytest.raises(ValueError, match="query_module="):
        TensorDictMap.load(folder)
    assert len(content(TensorDictMap.load(folder, query_module=query))) == 9
    filled(1, 2).save(folder)
    rounds = SipHash(rounds=(2, 4))
    for query in (QueryModule(NESTED, hash_module=rounds), QueryModule(NESTED[::-1])):
        with pytest.raises(ValueError, match="hashes differently|in_keys"):
            TensorDictMap.load(folder, query_module=query)


def test_values_stay_on_disk_and_in_other_storages(folder, tmp_path):
    m = TensorDictMap(in_keys=NESTED, storage=MemmapStorage(4, tmp_path / "rows"), evict="lru")
    m[keys(1, 2, 3)] = values(1, 2, 3)
    m.update(keys(1, 4), values(10, 4), merge="sum", accumulate=True)
    m[keys(5)] = values(5)
    assert m.max_size == 4 and content(m) == {1: 11, 3: 3, 4: 4, 5: 5}
    m.save(folder)
    m.delete(keys(1, 3))
    other = TensorDictMap.load(folder, storage=MemmapStorage(4, tmp_path / "other"))
    other[keys(6)] = values(6)
    assert content(other) == {1: 11, 4: 4, 5: 5, 6: 6}
    storage = TensorStorage(5)
    m = TensorDictMap.load(folder, storage=storage)
    assert m.storage is storage and content(m) == {1: 11, 3: 3, 4: 4, 5: 5}
    with pytest.raises(ValueError, match="4 rows.*max_size=2"):
        TensorDictMap.load(folder, storage=TensorStorage(2))


# -------------------------------------------------------------------------- killed, and concurrent

WIDTH = 500


def version(number):
    """A map whose size and every value encode its version."""
    size = 40 + number % 7
    m = TensorDictMap(in_keys=["k"], max_size=100, evict="lru")
    query = TensorDict({"k": torch.arange(size)}, [size])
    m[query] = TensorDict({"v": torch.full((size, WIDTH), number)}, [size])
    return m


def version_of(m):
    """The version of a map; fails if it is not a complete one."""
    found_keys, found = m.items()
    number = int(found["v"][0, 0])
    assert len(m) == 40 + number % 7
    assert torch.equal(found["v"], torch.full((len(m), WIDTH), number))
    assert torch.equal(found_keys["k"], torch.arange(len(m)))
    assert torch.equal(m[found_keys]["v"], found["v"])
    return number


STEPS = ("fsync", "write", "open", "replace", "rename", "unlink", "mkdir", "truncate", "ftruncate")


def dying_at(step, monkeypatch):
    """Kills the process just before its `step`-th call that reaches the disk."""
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
    read, status = [], -signal.SIGKILL
    while status == -signal.SIGKILL:
        assert len(read) < 100, "saving takes more than a hundred steps"
        shutil.rmtree(folder, ignore_errors=True)
        if not first:
            version(1).save(folder)

        step = len(read) + 1

        def save(step=step):
            dying_at(step, monkeypatch)
            version(2).save(folder)

        status = ended(in_child(save))
        if first and not (folder / "manifest.json").exists():
            read.append(None)
            with pytest.raises(FileNotFoundError):
                TensorDictMap.load(folder)
        else:
            read.append(version_of(TensorDictMap.load(folder)))
        version(3).save(folder)  # left files are no obstacle
        assert version_of(TensorDictMap.load(folder)) == 3 and len(os.listdir(folder)) == 2
    assert status == 0 and len(read) > 5 and read[0] == (None if first else 1) and read[-1] == 2
    assert read == sorted(read, key=lambda number: number == 2)  # once new, never old again
