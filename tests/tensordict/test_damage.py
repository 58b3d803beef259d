"""Stored containers when files are changed, disks are full and programs are killed.

tests/files/test_fuzz.py has damage of any kind; here are the cases that a reader must notice, and
with what words.
"""

import errno
import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import subprocess
import sys
import time

import pytest
import safetensors
import torch

from raffia import DamagedFileError, TensorDict, lazy_stack
from raffia.tensordict import ragged
from raffia.tensordict.consolidated import described, over_block
from tests.files.damages import REPLACEMENTS, changed, put
from tests.tensordict.stored import (
    content,
    edit,
    jagged,
    nested_tensor,
    sample,
    strided,
    with_holes,
)

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
CHECKSUM = "raffia.sha256"
HUGE = 2**62
load = TensorDict.load


@pytest.fixture
def folder(tmp_path):
    td = sample().update({"j": with_holes(), "r": strided()})
    td["n2"] = TensorDict({"y": jagged()}, [2])
    td.memmap(tmp_path / "td")
    return tmp_path / "td"


@pytest.fixture
def one_file(tmp_path):
    sample().save(tmp_path / "td.safetensors")
    return tmp_path / "td.safetensors"


def tree(folder):
    return sorted([str(path.relative_to(folder)) for path in folder.rglob("*")])


def refused(path, at="", match="."):
    """Loading is refused, and the error names the damaged file and why; nothing is created."""
    before = tree(path) if path.is_dir() else None
    with pytest.raises(DamagedFileError, match=match) as caught:
        load(path)
    assert str(path / at if at else path) in caught.value.path and caught.value.why
    assert before is None or tree(path) == before


# --------------------------------------------------------------------------------- a folder

FILES = (
    *("meta.json", "a.memmap", "n", "n/meta.json", "n/b.memmap", "z/0", "z/1/meta.json"),
    *("j.memmap", "j.offsets.memmap", "j.lengths.memmap", "r.memmap", "r.sizes.memmap"),
    *("n2/y.memmap", "n2/y.offsets.memmap"),
)


@pytest.mark.parametrize("kind", [*REPLACEMENTS, "cut", "empty", "longer"])
def test_a_file_replaced_by_something_else(kind, folder, tmp_path):
    for at, name in enumerate(FILES):
        copy = tmp_path / f"{at}"
        shutil.copytree(folder, copy)
        if kind in REPLACEMENTS:
            put(kind, copy / name, tmp_path / f"outside{at}")
        elif (copy / name).is_dir() or (kind == "longer" and name.endswith(".json")):
            continue
        else:
            good = (copy / name).read_bytes()
            (copy / name).write_bytes({"cut": good[:-1], "longer": good + b"\0"}.get(kind, b""))
        refused(copy, name)


@pytest.mark.parametrize("name", ["meta.json", "n/meta.json"])
def test_other_files_are_no_record(name, folder):
    for text in (b"{bad", b"[]", b"{}", b"[" * 100_000, b'{"a": NaN}', b'{"a": "\xff\xfe"}'):
        (folder / name).write_bytes(text)
        refused(folder, "meta.json" if name == "meta.json" else "n")
    (folder / name).unlink()
    refused(folder, name)


def put_at(value, *path):
    """A change of a record: sets the value at a path; KeyError removes it."""

    def change(record):
        *above, last = path
        for part in above:
            record = record[part]
        if value is KeyError:
            del record[last]
        else:
            record[last] = value(record) if callable(value) else value

    return change


def entry(name, part, value):
    return put_at(value, "entries", name, part)


INNER = {"class": "TensorDict", "batch_size": [], "entries": {}}
OUTSIDE = ("../outside", "../../outside", "sub/../../outside", "/etc/passwd", "", ".", "a\0b", 3)
CLASSES = ("os.system", "<class 'os.system'>", "subprocess:Popen", "builtins.eval", "no.Module")
CHANGES = [
    *[(entry("a", "dtype", x), "dtype|bytes") for x in ("float64", "int8", "os.system", "", None)],
    *[(entry("a", "shape", x), "holds 24 bytes") for x in ([3, 3], [2, 2], [])],
    (entry("a", "shape", [6, 1]), "begin with the batch size"),
    *[(entry("a", "shape", x), "shape|size") for x in ([-2, -3], [2.0, 3], ["2", 3], [None, 3])],
    *[(entry("a", "shape", x), "shape|size|bytes") for x in ([HUGE] * 2, [2, 10**30])],
    *[
        (put_at(x, "batch_size"), "batch|shape")
        for x in ([3], [-2], [2, 4], ["2"], [10**30], [2.5])
    ],
    *[(entry("a", "file", x), "not the name of a file|missing") for x in OUTSIDE],
    *[(entry("n", "folder", x), "not the name of a file|missing") for x in OUTSIDE],
    *[(put_at(x, "class"), "class") for x in CLASSES],
    *[(put_at(x, "version"), "version") for x in (3, None, True)],
    (put_at("other", "format"), "saved by|format"),
    # of nested tensors
    *[(entry("j", "ragged", x), "not a dimension") for x in (0, 3, True, None)],
    (entry("j", "ragged", "strided"), "sizes of a nested tensor are missing"),
    (entry("r", "ragged", 1), "offsets of a nested tensor are missing"),
    (entry("j", "values", KeyError), "values of a nested tensor are missing"),
    (entry("j", "offsets", KeyError), "offsets of a nested tensor are missing"),
    (entry("r", "sizes", KeyError), "sizes of a nested tensor are missing"),
    (entry("j", "offsets", lambda e: e["values"]), "not a vector of integers"),
    (put_at("float64", "entries", "j", "offsets", "dtype"), "not a vector of integers"),
    (put_at([1, 3], "entries", "j", "offsets", "shape"), "not a vector of integers"),
    (put_at([2, 1], "entries", "j", "lengths", "shape"), "do not fit its offsets"),
    (put_at("uint64", "entries", "r", "sizes", "dtype"), "not a matrix of non-negative integers"),
    (put_at([1, 4], "entries", "r", "sizes", "shape"), "do not fit its values"),
    (put_at([2, 13], "entries", "r", "values", "shape"), "do not fit its values"),
    # of values
    *[
        (entry("s", "value", {f"${kind}": value}), "is not a value")
        for kind, values in {
            "array": (["<i4", [2], "AAAA"], ["O", [1], "AAAAAAAAAAA="], ["<i4", [-1], ""], 5),
            "number": (["<i4", [], "?"],),
            "enum": (["os", "path", "x"], ["no.such.module", "A", "B"]),
            "set": ([[1]], 3),
            "items": ([[1]],),
            "bytes": ("?",),
            "path": (3,),
            "complex": (["a"],),
            "tuple": (1,),
        }.items()
        for value in values
    ],
    (entry("s", "value", {"$enum": ["tests.tensordict.stored", "Colour", "GREEN"]}), "not a value"),
]


def test_changed_records(folder, tmp_path):
    whole = (folder / "meta.json").read_bytes()
    shutil.copytree(folder / "n", tmp_path / "outside")
    for number, (change, words) in enumerate(CHANGES):
        (folder / "meta.json").write_bytes(whole)
        edit(folder, change)
        with pytest.raises(DamagedFileError) as caught:
            load(folder)
        assert any([word in str(caught.value) for word in words.split("|")]), (number, caught.value)
    (folder / "meta.json").write_bytes(whole)
    load(folder)


def test_a_class_in_a_damaged_record_is_not_imported(folder, monkeypatch):
    planted = "import pathlib; pathlib.Path('boom').touch()"
    (folder.parent / "planted_module.py").write_text(planted)
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.chdir(folder.parent)
    for name in ("class", "tensorclass"):
        edit(folder, put_at("planted_module.Thing", name))
        refused(folder)
    assert not (folder.parent / "boom").exists() and "planted_module" not in sys.modules


def test_a_planted_pickle_is_not_opened(folder):
    class Bomb:
        def __reduce__(self):
            return (open, (str(folder / "boom"), "w"))

    for parent in [folder, *[path for path in folder.rglob("*") if path.is_dir()]]:
        (parent / "other.pickle").write_bytes(pickle.dumps(Bomb()))
    edit(folder, entry("s", "value", KeyError))
    with pytest.raises(DamagedFileError):
        load(folder)
    assert not (folder / "boom").exists()


def test_infinitely_nested_containers(folder):
    path = folder / "meta.json"
    record = json.loads(path.read_text()) | {"entries": {}}
    head, tail = json.dumps(INNER | {"entries": {"n": 0}}).split("0}", 1)
    text = head * 5000 + json.dumps(INNER) + ("}" + tail) * 5000
    path.write_text(json.dumps(record).replace('"entries": {}', f'"entries": {{"n": {text}}}'))
    refused(folder)


def test_unsaved_folders_and_missing_files(tmp_path):
    """The error is a FileNotFoundError and a DamagedFileError."""
    with pytest.raises(FileNotFoundError, match="it is missing: nothing was saved here") as caught:
        load(tmp_path)
    assert isinstance(caught.value, DamagedFileError) and isinstance(caught.value, RuntimeError)
    lazy_stack([TensorDict(a=torch.zeros(2)), TensorDict(a=torch.ones(3))]).memmap(tmp_path / "td")
    (tmp_path / "td" / "0" / "a.memmap").unlink()
    with pytest.raises(FileNotFoundError, match=r"a\.memmap: it is missing") as caught:
        load(tmp_path / "td")
    error = caught.value
    again = pickle.loads(pickle.dumps(error))  # crosses process borders
    assert (type(again), again.path, again.why) == (type(error), error.path, error.why)
    assert error.path in str(error) and error.why in str(error)
    shutil.rmtree(tmp_path / "td" / "1")
    refused(tmp_path / "td")


ROWS = {
    "j.offsets.memmap": (
        *([0, 4, 11], [0, 12, 10], [-1, 4, 10], [1, 0, 10], [0, -4, 10], [0, -HUGE, 10]),
        *([2**63 - 1, -(2**63), 10], [HUGE, HUGE, HUGE]),
    ),
    "j.lengths.memmap": ([2, 7], [-1, 5], [11, 0], [2, 2**63 - 1]),
    "r.sizes.memmap": (
        *([2, 3, 4, 4], [2, 3, -4, -5], [2, 3, 2**32, 2**32], [0, HUGE, 0, HUGE]),
        *([-26, -1, 0, 0], [2, 13, HUGE, 4]),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_outside_the_values(name, folder):
    for bad in ROWS[name]:
        (folder / name).write_bytes(torch.tensor(bad).numpy().tobytes())
        refused(folder, name, "nested tensor")


def test_rows_whose_sums_overflow(folder, tmp_path):
    def written(path, rows):
        path.write_bytes(torch.tensor(rows).numpy().tobytes())

    written(folder / "r.sizes.memmap", [26, 1, 0, HUGE * 2 - 1])
    assert load(folder)["r"].unbind()[0].shape == (26, 1)  # fits: the second row has nothing
    at = tmp_path / "new"
    rows = nested_tensor([torch.zeros(i, 2) for i in (1, 2, 3)], layout=torch.jagged)
    TensorDict(x=rows).memmap(at)
    written(at / "x.offsets.memmap", [5, -(2**63), -1, 6])  # whose differences are positive
    refused(at, "x.offsets.memmap", "must lie within its values")
    TensorDict(x=nested_tensor([torch.zeros(0, 2, 2), torch.zeros(0, 2, 2)])).memmap(at)
    written(at / "x.sizes.memmap", [[0, HUGE, HUGE]] * 2)
    refused(at, "x.sizes.memmap", "do not fit its values")
    TensorDict(x=nested_tensor([])).memmap(at)
    record = (at / "meta.json").read_text()
    assert "[0,0]" in record
    (at / "meta.json").write_text(record.replace("[0,0]", "[0,2]"))
    assert load(at)["x"].unbind() == ()


# -------------------------------------------------------------------------------- one file


def parts(file):
    """Header and data of a safetensors file."""
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def forge(file, header, data):
    """Writes a safetensors file with a right checksum and any content."""
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if isinstance(metadata, dict) and isinstance(metadata.get(CHECKSUM), str):
        metadata[CHECKSUM] = "0" * 64
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    checksum = hashlib.sha256(text + data).hexdigest().encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text.replace(b"0" * 64, checksum, 1) + data)


@pytest.fixture
def little_memory():
    """An allocation of more than 512 MB fails."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 512 * 2**20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def test_forged_records(one_file, little_memory):
    rng = random.Random(3)
    header, data = parts(one_file)
    forge(one_file, header, data)
    assert content(load(one_file)) == content(sample())  # the forger is good
    record = json.loads(header["__metadata__"]["raffia"])
    for _ in range(400):
        header["__metadata__"]["raffia"] = json.dumps(changed(record, rng))
        forge(one_file, header, data)
        start = time.monotonic()
        try:
            content(load(one_file))
        except DamagedFileError as error:
            assert error.why and str(error.path)
        assert time.monotonic() - start < 1


def test_other_files_are_refused(one_file):
    good = one_file.read_bytes()
    blobs = [b"", b"\0" * 8, b"not a tensor file", b"PK\x03\x04" * 9, b"\x80\x04" * 20]
    blobs += [length.to_bytes(8, "little") + good[8:] for length in (2**63, 2**64 - 1, 2**40, 0, 1)]
    blobs += [good[:n] for n in (*range(0, len(good), 97), len(good) - 1)] + [good + b"\0" * 8]
    for blob in blobs:
        one_file.write_bytes(blob)
        refused(one_file)
    entry = b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    text = b"{" + entry + b"," + entry + b"}"
    one_file.write_bytes(len(text).to_bytes(8, "little") + text + b"\0")
    refused(one_file, match="twice")
    one_file.unlink()
    os.mkfifo(one_file)  # which must not be waited for
    with pytest.raises((DamagedFileError, NotADirectoryError)):
        load(one_file)


@pytest.mark.slow
def test_every_byte_with_one_flipped_bit(one_file):
    good = one_file.read_bytes()
    for i in range(0, len(good), 5):
        bad = bytearray(good)
        bad[i] ^= 1 << (i % 8)
        one_file.write_bytes(bad)
        refused(one_file)


def test_tensors_that_do_not_fill_the_file(tmp_path):
    path = tmp_path / "x"
    for at in ([0, 8], [1, 5], [4, 8], [-4, 0], [4, 0], [0, 4, 8], [0], None, [0.0, 4.0]):
        header = {"a": {"dtype": "F32", "shape": [1], "data_offsets": at}}
        header["b"] = {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}
        forge(path, header, b"\0" * 8)
        refused(path)
    TensorDict(a=torch.zeros(2), b=torch.ones(2)).save(tmp_path / "x.safetensors")
    good = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(good[:-16] + good[-8:] + good[-16:-8])
    refused(tmp_path / "x.safetensors")


def test_a_file_that_is_replaced_while_it_is_read(tmp_path, monkeypatch):
    path, opened = tmp_path / "td.safetensors", safetensors.safe_open
    TensorDict(a=torch.zeros(3)).save(tmp_path / "td.safetensors")
    before = load(path)
    TensorDict(b=torch.ones(2), a=torch.ones(5)).save(tmp_path / "new.safetensors")

    def replaced(*args, **kwargs):
        if (tmp_path / "new.safetensors").exists():
            os.replace(tmp_path / "new.safetensors", path)
        return opened(*args, **kwargs)

    monkeypatch.setattr(safetensors, "safe_open", replaced)
    assert list(load(path).keys()) == ["b", "a"] and not before["a"].any()


# ------------------------------------------------------------------ one block, in a file of ours


def test_a_damaged_block(tmp_path):
    path = tmp_path / "td"
    td = TensorDict({"x": with_holes(), "a": torch.zeros(2, 2), "z": torch.zeros(2, 0)}, [2])
    td.consolidate(path)
    whole = path.read_bytes()
    for cut in (1, 10, 201, len(whole)):
        path.write_bytes(whole[:-cut])
        refused_block(path, ".")
    good = torch.tensor([0, 4, 10]).numpy().tobytes()
    for old, new, match in [
        (good, torch.tensor([0, 12, 10]).numpy().tobytes(), "nested tensor"),
        (b'"ragged":1', b'"ragged":9', "nested tensor"),
        (b'"offsets"', b'"Offsets"', "nested tensor"),
        (b'"shape":[2,2]', b'"shape":[2,9]', "can't begin|bytes"),
    ]:
        assert old in whole
        path.write_bytes(whole.replace(old, new))
        refused_block(path, match)
    TensorDict(a=torch.zeros(4)).consolidate(path)
    whole = path.read_bytes()
    for old, new in ((b'"at":0', b'"at":8'), (b'"shape":[4]', b'"shape":[9]')):
        assert old in whole
        path.write_bytes(whole.replace(old, new))
        refused_block(path, "can't begin")


def refused_block(path, match):
    with pytest.raises(DamagedFileError, match=match):
        TensorDict.from_consolidated(path)


def test_a_block_has_no_strided_nested_tensors():
    record = json.loads(described(TensorDict(x=jagged()))[0])
    record["entries"]["x"]["ragged"] = "strided"
    record["entries"]["x"]["sizes"] = record["entries"]["x"]["offsets"]
    with pytest.raises(DamagedFileError, match="in a block must be a jagged one"):
        over_block("here", record, torch.zeros(1000, dtype=torch.uint8))


# ---------------------------------------------------------------------------- saving is interrupted

CALLS = "open write fsync replace close mkdir makedirs unlink posix_fallocate lstat".split()


def break_at(monkeypatch, n, error):
    """Makes the n-th call that touches the disk fail; returns a list with the calls until then."""
    made = []

    def broken(name, original):
        def call(*args, **kwargs):
            made.append(name)
            if len(made) == n:
                raise error
            return original(*args, **kwargs)

        return call

    for name in CALLS:
        monkeypatch.setattr(os, name, broken(name, getattr(os, name)))
    return made


def interrupted_saves(target, monkeypatch, error):
    """Overwrites the target, with a failure at each call, one per save; yields its number."""
    for n in range(1, 500):
        remove(target)
        sample(1.0).save(target)
        with monkeypatch.context() as patch:
            made = break_at(patch, n, error)
            try:
                sample(2.0).save(target)
            except BaseException as caught:
                if caught is not error:
                    raise
        if len(made) < n:
            assert n > 5
            return
        yield n
    raise AssertionError("there is no end to the calls")


def remove(target):
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)


IO, FULL = OSError(errno.EIO, "I/O"), OSError(errno.ENOSPC, "full")
ERRORS = [IO, FULL, KeyboardInterrupt()]


@pytest.mark.parametrize("error", ERRORS)
def test_a_file_is_the_old_or_the_new_one(error, tmp_path, monkeypatch):
    target = tmp_path / "td.safetensors"
    old, new = content(sample(1.0)), content(sample(2.0))
    outcomes = []
    for _ in interrupted_saves(target, monkeypatch, error):
        found = content(load(target))
        assert found in (old, new)
        outcomes.append(found == new)
        for leftover in tmp_path.glob(".*.tmp"):  # a failing close or unlink can leave one
            leftover.unlink()
    assert False in outcomes and True in outcomes


@pytest.mark.slow
@pytest.mark.parametrize("error", ERRORS[1:])
def test_a_folder_is_the_old_or_the_new_one_or_none(error, tmp_path, monkeypatch):
    target = tmp_path / "td"
    old, new = content(sample(1.0)), content(sample(2.0))
    for _ in interrupted_saves(target, monkeypatch, error):
        try:
            found = content(load(target))
        except DamagedFileError as damaged:
            assert damaged.path.endswith("meta.json")
        else:
            assert found in (old, new)


def test_saving_again_makes_no_files_but_for_other_records(tmp_path, monkeypatch):
    def numbers():
        return {path.relative_to(tmp_path): path.stat().st_ino for path in tmp_path.rglob("*")}

    sample(1.0).memmap(tmp_path)
    before = numbers()
    sample(2.0).memmap(tmp_path)
    assert numbers() == before and content(load(tmp_path)) == content(sample(2.0))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="I/O"):
        break_at(patch, 40, IO)
        sample(3.0).memmap(tmp_path)
    refused(tmp_path, match="saving was interrupted")
    assert numbers().keys() != before.keys()  # a record is aside
    (tmp_path / ".meta.json.tmp").write_bytes(b"{}")
    sample(4.0).memmap(tmp_path)
    assert numbers().keys() == before.keys() and content(load(tmp_path)) == content(sample(4.0))
    changed = sample(4.0).set("a", torch.zeros(2, 7, dtype=torch.int64))
    changed.memmap(tmp_path)
    assert numbers().keys() == before.keys() and content(load(tmp_path)) == content(changed)


def test_a_container_that_could_not_be_mapped_is_unchanged(tmp_path, monkeypatch):
    for n in (1, 5, 20, 40):
        td = sample()
        with monkeypatch.context() as patch:
            break_at(patch, n, FULL)
            with pytest.raises(OSError, match="full"):
                td.memmap_(tmp_path / str(n))
        assert not td.is_memmap() and not td.is_locked and type(td["a"]) is torch.Tensor
        assert content(td) == content(sample())


@pytest.mark.parametrize("kind", ["plain", "nested"])
def test_a_future_brings_errors(kind, tmp_path, monkeypatch):
    def full(*args, **options):
        raise OSError(errno.ENOSPC, "full")

    sample().memmap(tmp_path)
    if kind == "plain":
        td = TensorDict(a=torch.ones(2))
        monkeypatch.setattr(os, "posix_fallocate", full)
    else:
        td = TensorDict({"j": jagged()}, [2])
        monkeypatch.setattr(ragged, "write_atomically", full)
    with pytest.raises(OSError, match="full"):
        td.memmap(tmp_path, num_threads=2, return_early=True).result()
    refused(tmp_path, match="saving was interrupted")


def test_a_full_disk_is_an_error(tmp_path):
    td = TensorDict(a=torch.ones(50_000))
    td.save(tmp_path / "x.safetensors")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # nothing longer can be written
    try:
        for target in ("d", "x.safetensors"):
            with pytest.raises(OSError) as caught:
                (td + 1).save(tmp_path / target)
            assert caught.value.errno in (errno.EFBIG, errno.ENOSPC)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    refused(tmp_path / "d")
    assert sorted(os.listdir(tmp_path)) == ["d", "x.safetensors"]
    assert (load(tmp_path / "x.safetensors")["a"] == 1).all()


@pytest.mark.slow
def test_killed_while_saving(tmp_path):
    program = (
        "import sys, torch; from raffia import TensorDict\n"
        "for i in range(10**6):\n"
        "    TensorDict(a=torch.full((10_000,), i), i=i).save(sys.argv[1])\n"
        "    if i == 1: print('begun', flush=True)\n"
    )
    path = tmp_path / "td.safetensors"
    rng = random.Random(0)
    for _ in range(2):
        command = [sys.executable, "-c", program, str(path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(rng.random() / 10)
        process.kill()
        process.wait()
        process.stdout.close()
        td = load(path)
        assert td["a"].unique().tolist() == [int(td["i"])]
