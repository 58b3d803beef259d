"""Saved containers when files are changed, disks are full and programs are killed."""

import copy
import errno
import gc
import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time

import pytest
import safetensors
import torch
from torch import nn

from raffia import (
    DamagedFileError,
    MemoryMappedTensor,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    lazy_stack,
    tensorclass,
)
from raffia.files import write_atomically
from raffia.tensordict import folder_writer
from tests.files.damages import PLACED, changed, put

CHECKSUM = "raffia.sha256"


@tensorclass
class Pair:
    x: torch.Tensor
    tag: str = ""


@tensorclass(frozen=True)
class Fixed:
    x: torch.Tensor


def sample(fill=1.0):
    rows = [TensorDict(v=torch.full((2, i + 1), fill), s=str(i), batch_size=[2]) for i in range(2)]
    return TensorDict(
        a=torch.full((2, 3), fill),
        n=TensorDict(b=torch.full((2, 4), fill, dtype=torch.float64), batch_size=[2, 4]),
        z=lazy_stack(rows, 1),
        c=Pair(x=torch.full((2,), fill), tag="t", batch_size=[2]),
        f=Fixed(x=torch.full((2,), fill), batch_size=[2]),
        p=nn.Parameter(torch.full((2,), fill)),
        s="hi",
        o=NonTensorData({"k": (1, [None])}, batch_size=[2]),
        w=["p", "q"],
        batch_size=[2],
        names=["t"],
    )


def content(td):
    """All that a container holds, as something that can be compared."""
    if isinstance(td, torch.Tensor):
        return td.dtype, td.tolist()
    if isinstance(td, (NonTensorData, NonTensorStack)):
        return td.batch_size, td.tolist()
    if isinstance(td, (Pair, Fixed)):
        return type(td), content(td.to_tensordict())
    if hasattr(td, "tensordicts"):
        return td.stack_dim, [content(member) for member in td.tensordicts]
    return td.batch_size, td.names, {name: content(td.get(name)) for name in td.keys()}


@pytest.fixture
def folder(tmp_path):
    sample().memmap(tmp_path / "td")
    return tmp_path / "td"


@pytest.fixture
def one_file(tmp_path):
    sample().save(tmp_path / "td.safetensors")
    return tmp_path / "td.safetensors"


@pytest.fixture
def little_memory():
    """An allocation of more than 512 MB fails."""
    if sys.platform != "linux":
        yield
        return
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 512 * 2**20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def survives(path):
    """Load what may be damaged: soon there is content, or the one error."""
    begun = time.monotonic()
    try:
        content(TensorDict.load(path))
    except DamagedFileError as error:
        assert error.why and str(error.path)
    assert time.monotonic() - begun < 1


# ------------------------------------------------------------------------------------ changed files


@pytest.mark.slow
def test_records_with_any_value_anywhere(folder, little_memory):
    rng = random.Random(0)
    metas = sorted(folder.rglob("meta.json"))
    assert len(metas) == 7
    for _ in range(600):
        meta = rng.choice(metas)
        good = meta.read_bytes()
        meta.write_text(json.dumps(changed(json.loads(good), rng)))
        survives(folder)
        meta.write_bytes(good)
    assert content(TensorDict.load(folder)) == content(sample().memmap())


@pytest.mark.parametrize(
    "name", ["meta.json", "a.memmap", "n", "n/meta.json", "n/b.memmap", "z/0", "z/1/meta.json"]
)
@pytest.mark.parametrize("what", PLACED)
def test_something_else_in_a_place(name, what, folder):
    put(what, folder / name, folder.parent / "outside")
    with pytest.raises(DamagedFileError) as caught:
        TensorDict.load(folder)
    assert str(folder / name) in caught.value.path


def test_the_folder_itself_may_be_a_link(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    assert content(TensorDict.load(tmp_path / "link")) == content(TensorDict.load(folder))


def test_a_folder_of_another_version_or_package(folder):
    record = json.loads((folder / "meta.json").read_text())
    for change in ({"version": 3}, {"version": None}, {"version": True}, {"format": "other"}):
        (folder / "meta.json").write_text(json.dumps(record | change))
        with pytest.raises(DamagedFileError, match="version|format|saved by"):
            TensorDict.load(folder)


def test_containers_nested_without_end(tmp_path):
    folder = tmp_path / "td"
    TensorDict(n=TensorDict()).memmap(folder)
    meta = folder / "meta.json"
    record = json.loads(meta.read_text())
    inner = {"class": "TensorDict", "batch_size": [], "entries": {}}
    for _ in range(5000):
        inner = {"class": "TensorDict", "batch_size": [], "entries": {"n": inner}}
    depth = sys.getrecursionlimit()
    sys.setrecursionlimit(40_000)
    try:
        text = json.dumps(record | {"entries": {"n": inner}})
    finally:
        sys.setrecursionlimit(depth)
    meta.write_text(text)
    with pytest.raises(DamagedFileError):
        TensorDict.load(folder)


def parts(file):
    """Header and data of a safetensors file."""
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def forge(file, header, data):
    """Write a safetensors file whose checksum is right, whatever it holds."""
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if isinstance(metadata, dict) and isinstance(metadata.get(CHECKSUM), str):
        metadata[CHECKSUM] = "0" * 64
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    checksum = hashlib.sha256(text + data).hexdigest().encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text.replace(b"0" * 64, checksum, 1) + data)


def test_the_forger_is_good(one_file):
    header, data = parts(one_file)
    forge(one_file, header, data)
    assert content(TensorDict.load(one_file)) == content(sample())


def test_identical_containers_make_identical_files(tmp_path):
    for name in "ab":
        sample().save(tmp_path / f"{name}.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_forged_records(one_file, little_memory):
    rng = random.Random(3)
    header, data = parts(one_file)
    record = json.loads(header["__metadata__"]["raffia"])
    for _ in range(600):
        header["__metadata__"]["raffia"] = json.dumps(changed(record, rng))
        forge(one_file, header, data)
        survives(one_file)


def test_a_name_twice_in_the_header(tmp_path):
    entry = b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    text = b"{" + entry + b"," + entry + b"}"
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + b"\0")
    with pytest.raises(DamagedFileError, match="twice"):
        TensorDict.load(tmp_path / "x")


@pytest.mark.parametrize(
    "offsets", [[0, 8], [1, 5], [4, 8], [-4, 0], [4, 0], [0, 4, 8], [0], None, [0.0, 4.0]]
)
def test_tensors_that_do_not_fill_the_file(offsets, tmp_path):
    header = {"a": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}
    header["b"] = {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}
    forge(tmp_path / "x", header, b"\0" * 8)
    with pytest.raises(DamagedFileError):
        TensorDict.load(tmp_path / "x")


def test_a_pipe_in_place_of_the_file_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "td.safetensors")
    with pytest.raises((DamagedFileError, NotADirectoryError)):
        TensorDict.load(tmp_path / "td.safetensors")


# ---------------------------------------------------------------------------- saving is interrupted

CALLS = [
    "open",
    "write",
    "fsync",
    "replace",
    "close",
    "mkdir",
    "makedirs",
    "unlink",
    "posix_fallocate",
    "lstat",
]


class Breakdown(OSError):
    pass


def break_at(monkeypatch, n, error):
    """The n-th call that touches the disk fails; returns a list with the calls until then."""
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
    """Save over what is there, with a failure at each call in turn; yields its number."""
    for n in range(1, 500):
        if target.is_dir():
            shutil.rmtree(target)
        elif target.exists():
            target.unlink()
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


@pytest.mark.parametrize(
    "error", [Breakdown(errno.EIO, "I/O"), Breakdown(errno.ENOSPC, "full"), KeyboardInterrupt()]
)
def test_a_file_is_the_old_or_the_new_one(error, tmp_path, monkeypatch):
    target = tmp_path / "td.safetensors"
    old, new = content(sample(1.0)), content(sample(2.0))
    seen = []
    for _ in interrupted_saves(target, monkeypatch, error):
        found = content(TensorDict.load(target))
        assert found in (old, new)
        seen.append(found == new)
        for leftover in tmp_path.glob(".*.tmp"):  # a failing close or unlink can leave one
            leftover.unlink()
    assert False in seen and True in seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", [Breakdown(errno.EIO, "I/O"), Breakdown(errno.ENOSPC, "full"), KeyboardInterrupt()]
)
def test_a_folder_is_the_old_or_the_new_one_or_none(error, tmp_path, monkeypatch):
    target = tmp_path / "td"
    old, new = content(sample(1.0).memmap()), content(sample(2.0).memmap())
    for _ in interrupted_saves(target, monkeypatch, error):
        try:
            found = content(TensorDict.load(target))
        except DamagedFileError as damaged:
            assert damaged.path.endswith("meta.json")
        else:
            assert found in (old, new)


def test_a_container_that_could_not_be_mapped_is_as_it_was(tmp_path, monkeypatch):
    for n in (1, 5, 20, 40):
        td = sample()
        with monkeypatch.context() as patch:
            break_at(patch, n, Breakdown(errno.ENOSPC, "full"))
            with pytest.raises(Breakdown):
                td.memmap_(tmp_path / str(n))
        assert not td.is_memmap() and not td.is_locked and type(td["a"]) is torch.Tensor
        assert content(td) == content(sample())


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
    with pytest.raises(DamagedFileError):
        TensorDict.load(tmp_path / "d")
    assert sorted(os.listdir(tmp_path)) == ["d", "x.safetensors"]
    assert (TensorDict.load(tmp_path / "x.safetensors")["a"] == 1).all()


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_order_of_a_durable_save(tmp_path, monkeypatch):
    events = []

    def spy(name):
        original = getattr(os, name)

        def call(*args, **kwargs):
            at = args[0]
            events.append((name, os.readlink(f"/proc/self/fd/{at}") if type(at) is int else at))
            return original(*args, **kwargs)

        monkeypatch.setattr(os, name, call)

    spy("fsync")
    spy("replace")
    sample().save(tmp_path / "td.safetensors")
    (sync, temporary), (replace, source), (sync_folder, where) = events
    assert (sync, replace, sync_folder) == ("fsync", "replace", "fsync")
    assert temporary == source and where == str(tmp_path)


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
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE
        )
        process.stdout.readline()
        time.sleep(rng.random() / 10)
        process.kill()
        process.wait()
        process.stdout.close()
        td = TensorDict.load(path)
        assert td["a"].unique().tolist() == [int(td["i"])]


def test_a_file_that_is_replaced_while_it_is_read(tmp_path, monkeypatch):
    path, opened = tmp_path / "td.safetensors", safetensors.safe_open
    TensorDict(a=torch.zeros(3)).save(tmp_path / "td.safetensors")
    TensorDict(b=torch.ones(2), a=torch.ones(5)).save(tmp_path / "new.safetensors")

    def replaced(*args, **kwargs):
        if (tmp_path / "new.safetensors").exists():
            os.replace(tmp_path / "new.safetensors", path)
        return opened(*args, **kwargs)

    monkeypatch.setattr(safetensors, "safe_open", replaced)
    assert list(TensorDict.load(path).keys()) == ["b", "a"]


def test_a_dtype_that_only_the_library_of_safetensors_knows(tmp_path):
    entries = {"a": ("F8_E8M0", [2], [0, 2]), "b": ("U8", [3], [2, 5])}
    header = {k: dict(dtype=d, shape=s, data_offsets=at) for k, (d, s, at) in entries.items()}
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + bytes([127, 128, 1, 2, 3])
    (tmp_path / "td.safetensors").write_bytes(data)
    td = TensorDict.load(tmp_path / "td.safetensors")
    assert td["a"].float().tolist() == [1.0, 2.0] and td["b"].tolist() == [1, 2, 3]


class TestWriteAtomically:
    def test_bytes_or_a_function(self, tmp_path):
        write_atomically(tmp_path / "x", b"one")
        assert (tmp_path / "x").read_bytes() == b"one"
        write_atomically(str(tmp_path / "x"), lambda file: file.write(b"two"))
        assert (tmp_path / "x").read_bytes() == b"two"

    def test_a_failure_leaves_the_old_file_and_nothing_else(self, tmp_path):
        write_atomically(tmp_path / "x", b"old")

        def fail(file):
            file.write(b"ne")
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            write_atomically(tmp_path / "x", fail)
        assert (tmp_path / "x").read_bytes() == b"old" and os.listdir(tmp_path) == ["x"]

    def test_a_link_stays_a_link(self, tmp_path):
        (tmp_path / "x").symlink_to(tmp_path / "real")
        write_atomically(tmp_path / "x", b"new")
        assert (tmp_path / "x").is_symlink() and (tmp_path / "real").read_bytes() == b"new"

    def test_others_may_read_what_the_umask_lets_them(self, tmp_path):
        before = os.umask(0o027)
        try:
            write_atomically(tmp_path / "x", b"new")
        finally:
            os.umask(before)
        assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640

    def test_writes_that_stop_short_go_on(self, tmp_path, monkeypatch):
        original = os.write
        monkeypatch.setattr(os, "write", lambda fd, data: original(fd, data[:3]))
        write_atomically(tmp_path / "x", b"a longer text")
        assert (tmp_path / "x").read_bytes() == b"a longer text"


# ---------------------------------------------------------------------- what is kept and refused


@pytest.mark.parametrize("form", ["td", "td.safetensors"])
def test_all_kinds_of_entries(form, tmp_path):
    td = sample()
    td.save(tmp_path / form)
    back = TensorDict.load(tmp_path / form)
    assert content(back) == content(td)
    assert back["o"] == {"k": (1, [None])} and back.get("z").stack_dim == 1
    assert [member["s"] for member in back["z"].tensordicts] == ["0", "1"]


@pytest.mark.parametrize("form", ["td", "td.safetensors"])
@pytest.mark.parametrize(
    "dtype",
    ["complex32", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"],
)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_rare_dtypes(dtype, form, tmp_path):
    dtype = getattr(torch, dtype)
    bits = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
    td = TensorDict(a=bits.view(dtype).reshape(2, 3), e=torch.empty(0, 2, dtype=dtype))
    td.save(tmp_path / form)
    back = TensorDict.load(tmp_path / form)
    assert back["a"].dtype is dtype and back["a"].shape == (2, 3) and back["e"].shape == (0, 2)
    assert back["a"].clone().reshape(-1).view(torch.uint8).tolist() == bits.tolist()


@pytest.mark.parametrize("form", ["td", "td.safetensors"])
def test_conjugate_and_negative_views(form, tmp_path):
    x = torch.tensor([1 + 2j, 3 - 4j])
    td = TensorDict(x=x, c=x.conj(), n=x.conj().imag)
    td.save(tmp_path / form)
    back = TensorDict.load(tmp_path / form)
    assert back["x"].tolist() == x.tolist()
    assert back["c"].tolist() == [1 - 2j, 3 + 4j] and back["n"].tolist() == [-2.0, 4.0]


@pytest.mark.parametrize("form", ["td", "td.safetensors"])
@pytest.mark.parametrize(
    "value",
    [
        (),
        (1, ("a",)),
        {"$tuple": [1]},
        {"$dict": {}},
        {"$a": 1, "b": ()},
        [{"$tuple": ()}],
        2**70,
        -0.0,
    ],
)
def test_values_come_back_with_their_types(value, form, tmp_path):
    TensorDict().set_non_tensor("v", value).save(tmp_path / form)
    back = TensorDict.load(tmp_path / form)["v"]
    assert repr(back) == repr(value)


@pytest.mark.parametrize("form", ["td", "td.safetensors"])
@pytest.mark.parametrize(
    "leaf",
    [torch.zeros(2, 2).to_sparse(), torch.zeros(2, device="meta")],
    ids=["sparse", "meta"],
)
def test_tensors_that_have_no_bytes_are_refused(leaf, form, tmp_path):
    with pytest.raises(TypeError, match="n.odd"):
        TensorDict(n=TensorDict(odd=leaf)).save(tmp_path / form)
    assert os.listdir(tmp_path) == []


def test_keys_that_differ_by_case_only_have_files_that_differ_by_more(tmp_path):
    td = TensorDict(
        {
            "a": torch.zeros(1),
            "A": torch.ones(1),
            "N": {"x": torch.ones(2)},
            "n": {"x": torch.zeros(2)},
        }
    )
    td.memmap(tmp_path)
    files = [path.name.lower() for path in tmp_path.iterdir()]
    assert len(set(files)) == len(files) == 5
    assert content(TensorDict.load(tmp_path)) == content(td.memmap())


@pytest.mark.parametrize(
    "key", ["x" * 250, "é" * 200, "x" * 200 + "/", "\ud800", "." * 250, "CON", "a" * 4000]
)
def test_keys_that_are_no_file_names(key, tmp_path):
    for form in ("td", "td.safetensors"):
        td = TensorDict({key: torch.ones(1), key + "2": {key: torch.ones(2)}})
        td.save(tmp_path / form)
        assert set(TensorDict.load(tmp_path / form).keys(True, True)) == set(td.keys(True, True))


def test_keys_as_file_names(tmp_path):
    TensorDict({"a b": torch.ones(1), "é": {"x": torch.ones(1)}}).memmap(
        tmp_path / "td", robust_key=False
    )
    assert {"a b.memmap", "é"} < set(os.listdir(tmp_path / "td"))
    assert TensorDict.load(tmp_path / "td")["é", "x"] == 1
    for key in ("a/b", "..", ""):
        with pytest.raises(ValueError, match="robust_key"):
            TensorDict({key: {"x": torch.ones(1)}}).memmap(tmp_path / "new", robust_key=False)
    assert os.listdir(tmp_path) == ["td"]


class TestOneFile:
    def test_parameters_and_shared_tensors(self, tmp_path):
        weight, t = nn.Parameter(torch.ones(2)), torch.zeros(3)
        fixed = nn.Parameter(torch.ones(1), requires_grad=False)
        td = TensorDict(
            w=weight, n={"tied": weight, "plain": weight.data, "t": t}, t=t, fixed=fixed, part=t[1:]
        )
        td.save(tmp_path / "x.safetensors")
        assert len(parts(tmp_path / "x.safetensors")[0]) == 1 + 4
        back = TensorDict.load(tmp_path / "x.safetensors")
        assert back["w"] is back["n", "tied"] and isinstance(back["w"], nn.Parameter)
        assert back["w"].requires_grad and not back["fixed"].requires_grad
        assert type(back["n", "plain"]) is torch.Tensor
        assert back["n", "plain"].data_ptr() == back["w"].data_ptr()
        back["t"].fill_(5)
        assert back["n", "t"].tolist() == [5.0] * 3 and back["part"].tolist() == [0.0, 0.0]

    def test_files_of_other_programs_are_flat(self, tmp_path):
        from safetensors.torch import save_file

        save_file(
            {"a.b": torch.ones(2), "c": torch.zeros(3, dtype=torch.int8)},
            tmp_path / "x",
            {"format": "pt"},
        )
        td = TensorDict.load(tmp_path / "x")
        assert sorted(td.keys()) == ["a.b", "c"] and td.batch_size == () and td["a.b"].sum() == 2

    def test_other_programs_see_the_keys(self, one_file):
        from safetensors.torch import load_file

        found = load_file(one_file)
        assert {"a", "n.b", "z.0.v", "z.1.v", "c.x", "f.x", "p"} == set(found)
        assert torch.equal(found["n.b"], torch.ones(2, 4, dtype=torch.float64))

    def test_tensors_lie_where_their_dtype_wants_them(self, tmp_path):
        td = TensorDict(
            {
                f"{i}": torch.ones(i, dtype=d)
                for i, d in enumerate([torch.int8, torch.bool, torch.float64, torch.half])
            }
        )
        td.save(tmp_path / "x.safetensors")
        raw = (tmp_path / "x.safetensors").read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        for name, entry in parts(tmp_path / "x.safetensors")[0].items():
            if name != "__metadata__":
                assert (start + entry["data_offsets"][0]) % td[name].dtype.itemsize == 0

    def test_device(self, one_file):
        assert TensorDict.load(one_file, device="meta")["n", "b"].is_meta
        assert TensorDict.load(one_file, device="cpu").device == torch.device("cpu")
        TensorDict(a=torch.ones(2), device="cpu").save(one_file)
        assert TensorDict.load(one_file).device == torch.device("cpu")

    def test_into_another_container(self, one_file):
        out = TensorDict(
            a=torch.zeros(2, 3), gone=torch.zeros(2), n=TensorDict(batch_size=[2]), batch_size=[2]
        )
        nested = out["n"]
        assert TensorDict.load(one_file, out=out) is out and "gone" not in out
        assert out["n"] is nested and content(out) == content(sample())
        with pytest.raises(RuntimeError, match="locked"):
            TensorDict().lock_().load_(one_file)

    def test_options_of_folders_are_refused(self, one_file):
        with pytest.raises(ValueError, match="folders"):
            sample().save(one_file, num_threads=2)


class TestMapped:
    def test_options_that_do_nothing_are_refused(self, tmp_path):
        for option in ("archive", "compression", "atomic"):
            with pytest.raises(TypeError, match=option):
                sample().memmap(tmp_path, **{option: True})

    def test_saving_over_its_own_files_in_another_order(self, tmp_path):
        a, b = torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(2, 3) + 10
        m = TensorDict(a=a, b=b, c=torch.arange(4.0).reshape(2, 2)).memmap(tmp_path)
        TensorDict(a=m["b"], b=m["a"], c=m["c"].t()).memmap(tmp_path, copy_existing=True)
        back = TensorDict.load(tmp_path)
        assert torch.equal(back["a"], b) and torch.equal(back["b"], a)
        assert back["c"].tolist() == [[0.0, 2.0], [1.0, 3.0]]

    def test_a_buffer_is_opened_again_but_not_resized(self, tmp_path):
        row = TensorDict(a=torch.ones(3))
        row.expand(4).memmap_like(tmp_path)["a"].fill_(2)
        assert row.expand(4).memmap_like(tmp_path)["a"].sum() == 24
        with pytest.raises(RuntimeError, match="has 48 bytes"):
            row.expand(5).memmap_like(tmp_path)
        with pytest.raises(RuntimeError, match="exists"):
            row.expand(4).memmap_like(tmp_path, existsok=False)
        assert TensorDict.load(tmp_path)["a"].sum() == 24

    def test_locked_views_show_the_mapped_tensors(self, tmp_path):
        td = TensorDict(n=TensorDict(a=torch.zeros(2))).lock_()
        assert type(list(td.values(True, True))[0]) is torch.Tensor
        td["n"].memmap_(tmp_path)
        assert isinstance(list(td.values(True, True))[0], MemoryMappedTensor)
        assert td["n"].is_memmap() and not td.is_memmap()

    def test_added_entries(self, tmp_path):
        td = TensorDict(a=torch.zeros(2), batch_size=[2]).memmap(tmp_path)
        assert len(list(td.keys(True))) == 1
        td.make_memmap(("n", "m", "x"), (2, 3), dtype=torch.int8).fill_(1)
        td.make_memmap(("n", "y"), torch.tensor([2]))
        assert (
            td["n"].is_locked
            and td["n"].is_memmap()
            and td["n", "m"].saved_path == tmp_path / "n" / "m"
        )
        assert len(list(td.keys(True, True))) == 3
        assert content(TensorDict.load(tmp_path)) == content(td)
        for key in ("a", ("n", "m"), ("n", "m", "x")):
            with pytest.raises(RuntimeError, match="already exists"):
                td.make_memmap(key, (2,))
        with pytest.raises(KeyError):
            td.make_memmap(("a", "x"), (2,))
        with pytest.raises(RuntimeError, match="locked"):
            td["n"].unlock_()
        td.unlock_()
        assert not td["n"].is_memmap()

    def test_refresh(self, tmp_path):
        td = TensorDict(
            a=torch.zeros(3), n=TensorDict(x=torch.zeros(1)), gone=torch.ones(1), s="old"
        ).memmap(tmp_path)
        nested = td["n"]
        TensorDict(a=torch.ones(4), b=torch.ones(2), n=TensorDict(y=torch.ones(2)), s="new").memmap(
            tmp_path
        )
        assert td.memmap_refresh_() is td and td["n"] is nested
        assert content(td) == content(TensorDict.load(tmp_path))
        assert td.is_memmap() and td.is_locked and td.saved_path == tmp_path
        assert td["n"].is_memmap() and td["n"].saved_path == tmp_path / "n"
        td["b"].fill_(7)
        assert TensorDict.load(tmp_path)["b"].sum() == 14

    def test_a_future_brings_errors(self, tmp_path, monkeypatch):
        def full(*args):
            raise OSError(errno.ENOSPC, "full")

        monkeypatch.setattr(os, "posix_fallocate", full)
        future = TensorDict(a=torch.ones(2)).memmap(tmp_path, num_threads=2, return_early=True)
        with pytest.raises(OSError, match="full"):
            future.result()
        with pytest.raises(DamagedFileError, match="interrupted"):
            TensorDict.load(tmp_path)

    def test_threads_write(self, tmp_path, monkeypatch):
        import threading

        used = set()
        allocate = folder_writer.allocate
        monkeypatch.setattr(
            folder_writer, "allocate", lambda *a: (used.add(threading.get_ident()), allocate(*a))[1]
        )
        td = TensorDict({str(i): torch.full((1000,), i) for i in range(20)})
        td.memmap(tmp_path, num_threads=3)
        assert threading.get_ident() not in used
        assert content(TensorDict.load(tmp_path)) == content(td.memmap())

    @pytest.mark.slow
    def test_files_that_may_not_be_written_are_mapped_privately(self, tmp_path):
        program = (
            "import os, sys; from raffia import TensorDict; os.setuid(65534)\n"
            "m = TensorDict.load(sys.argv[1]); m['a'].fill_(7)\n"
            "print(m['a'].sum().item())"
        )
        if os.getuid():
            pytest.skip("needs root, to become nobody")
        folder = tempfile.mkdtemp()
        try:
            os.chmod(folder, 0o755)
            TensorDict(a=torch.ones(2)).memmap(folder)
            out = subprocess.run(
                [sys.executable, "-c", program, folder], capture_output=True, text=True
            )
            assert out.stdout == "14.0\n", out.stderr
            assert TensorDict.load(folder)["a"].sum() == 2
        finally:
            shutil.rmtree(folder)

    @pytest.mark.slow
    def test_temporary_files_go_with_the_tensors(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        m = TensorDict(a=torch.arange(3.0), n=TensorDict(b=torch.ones(2))).memmap()
        assert len(os.listdir(tmp_path)) == 1  # small tensors share a file
        row = m["a"][1:]
        again = pickle.loads(pickle.dumps(row))
        again.fill_(9)
        assert m["a"].tolist() == [0.0, 9.0, 9.0]
        with pytest.raises(RuntimeError, match="no file"):
            m["a"].filename  # noqa: B018
        del m, again
        gc.collect()
        assert len(os.listdir(tmp_path)) == 1 and row.tolist() == [9.0, 9.0]
        del row
        gc.collect()
        assert os.listdir(tmp_path) == []

    @pytest.mark.slow
    def test_temporary_files_go_with_the_process_that_made_them(self, tmp_path):
        program = (
            "import os, torch; from raffia import TensorDict\n"
            "m = TensorDict(a=torch.ones(2)).memmap()\n"
            "if os.fork() == 0: raise SystemExit\n"
            "os.wait(); print(len([f for f in os.listdir(os.environ['TMPDIR']) if 'raffia' in f]))"
        )
        env = os.environ | {"TMPDIR": str(tmp_path)}
        out = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=env
        )
        assert out.stdout == "1\n", out.stderr
        assert [name for name in os.listdir(tmp_path) if "raffia" in name] == []

    def test_pickled_parts(self, tmp_path):
        x = MemoryMappedTensor.from_tensor(
            torch.arange(24.0).reshape(2, 3, 4), filename=tmp_path / "x"
        )
        for part in (x[1], x[:, 1:, ::2], x[1, 2, 3], x[..., None], x[:0]):
            blob = pickle.dumps(part)
            assert len(blob) < 500
            again = pickle.loads(blob)
            assert type(again) is MemoryMappedTensor and again.filename == x.filename
            assert again.tolist() == part.tolist() and again.stride() == part.stride()
        (tmp_path / "x").unlink()
        with pytest.raises(FileNotFoundError):
            pickle.loads(blob if part.numel() else pickle.dumps(x[1]))

    def test_shape_by_name(self):
        assert MemoryMappedTensor.zeros(shape=(2, 3)).shape == (2, 3)
        with pytest.raises(TypeError, match="shape is missing"):
            MemoryMappedTensor.zeros()

    def test_unlocking_and_changing_ends_the_map(self, tmp_path):
        td = TensorDict(n=TensorDict(a=torch.ones(1), s="x"), z=lazy_stack([TensorDict(s="u")] * 2))
        td.memmap_(tmp_path)
        nodes = td, td["n"], td["z"], td["z"].tensordicts[0], td["n"].get("s")
        assert all(node.is_memmap() for node in nodes)
        td.unlock_()
        assert not any(node.is_memmap() for node in nodes)
        td["b"] = torch.ones(1)
        assert not td.lock_().is_memmap()
        td["n"].set_("s", "not stored")
        assert TensorDict.load(tmp_path)["n", "s"] == "x"

    def test_pickled_containers_are_mapped(self, tmp_path):
        td = TensorDict(n=TensorDict(a=torch.ones(1), s="x")).memmap(tmp_path)
        again = pickle.loads(pickle.dumps(td))
        assert again.is_memmap() and again["n"].saved_path == tmp_path / "n"
        again["n", "a"].fill_(5)
        assert td["n", "a"] == 5 and not td.clone(False).lock_().is_memmap()

    def test_values_reach_the_record(self, tmp_path):
        td = TensorDict(s="a", n=TensorDict(w=["p", "q"], batch_size=[2])).memmap(tmp_path)
        td.set_("s", {"k": (1,)})
        td["n"].get("w").update_(NonTensorStack("r", "s"))
        back = TensorDict.load(tmp_path)
        assert back["s"] == {"k": (1,)} and back["n", "w"] == ["r", "s"]
        NonTensorData("a").memmap(tmp_path / "d").update_(NonTensorData("b"))
        assert TensorDict.load(tmp_path / "d").data == "b"

    def test_copies_are_plain(self, tmp_path):
        x = MemoryMappedTensor.from_tensor(torch.arange(3.0), filename=tmp_path / "x")
        y = copy.deepcopy(x)
        y.fill_(0)
        assert type(y) is torch.Tensor and x.tolist() == [0.0, 1.0, 2.0]
