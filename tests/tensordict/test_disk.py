"""Containers on disk, as folders of memory-mapped files and as one file: round trips.

Each way of writing and reading gives back each content, bit for bit.
"""

import enum
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import threading

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake

import raffia
from raffia import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictParams,
    lazy_stack,
)
from raffia.files import DamagedFileError
from raffia.tensordict import folder_writer
from raffia.tensordict.json_values import decode, encode
from tests.tensordict.invariants import sound
from tests.tensordict.kinds import raises
from tests.tensordict.stored import (
    NESTED,
    PLAIN,
    RAGGED,
    Colour,
    Level,
    Pair,
    content,
    jagged,
    nested_tensor,
    sample,
    strided,
    with_holes,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf"),
]
load = TensorDict.load


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def pickled(value):
    return pickle.loads(pickle.dumps(value))


# -------------------------------------------------------- all ways of writing, all contents


def with_memmap(td, at):
    mapped = td.memmap(at)
    assert mapped is not td and mapped.is_locked and mapped.is_memmap() and not td.is_memmap()
    assert mapped.device == torch.device("cpu")
    back = load(str(at))
    assert type(back) is TensorDict and sound(back)
    for leaf in back._leaves([]):
        assert isinstance(leaf, MemoryMappedTensor) or leaf.layout is torch.jagged
        assert not leaf.requires_grad
    return mapped, back, TensorDict.load_memmap(at), raffia.load(at), raffia.load_memmap(at)


def in_place(td, at):
    assert td.memmap_(at) is td and td.is_memmap() and td.is_locked
    return td, load(at)


def by_threads(td, at):
    other = td.clone()
    early = td.memmap(at / "early", num_threads=2, return_early=True).result()
    assert other.memmap_(at / "_", num_threads=2, return_early=True).result() is other
    return td.memmap(at / "x", num_threads=2), load(at / "x"), early, load(at / "early"), other


def saved(td, at):
    td.save(at / "x" / "y")  # folders are made
    raffia.save(td, at / "z")
    raffia.memmap(td, at / "u")
    return load(at / "x" / "y"), load(at / "z"), load(at / "u")


def after_pickling(td, at):
    mapped = td.memmap(at)
    return pickled(mapped), pickled(td.memmap())


def refreshed(td, at):
    old = TensorDict(old=torch.zeros(td.batch_size), batch_size=td.batch_size).memmap(at)
    td.memmap(at)
    assert old.memmap_refresh_() is old and old.is_memmap() and old.is_locked
    assert old.saved_path == at
    return (old,)


def into_another(td, at):
    td.memmap(at)
    one, two = [TensorDict(batch_size=td.batch_size) for _ in range(2)]
    nested = one.set("n", TensorDict(batch_size=td.batch_size)).get("n") if "n" in td else None
    assert one.load_memmap_(at) is one and TensorDict.load_memmap(at, out=two) is two
    assert one.get("n") is nested
    return one, two


def test_entries_keep_their_order(tmp_path):
    TensorDict(b=1, n=dict(d=1, c=1), new=1, a=1).memmap(tmp_path)
    td = TensorDict(a=0, n=dict(c=0, d=0), old=0, b=0).load_memmap_(tmp_path)
    assert list(td.keys()) == ["a", "n", "b", "new"] and list(td["n"].keys()) == ["c", "d"]


def over_itself(td, at):
    mapped = td.memmap(at)
    mapped_files = [path for path in files(at) if re.fullmatch(r"[^.]*\.memmap", path)]
    inodes = {path: os.stat(at / path).st_ino for path in mapped_files}
    again = mapped.memmap(), mapped.memmap(at), mapped.memmap_(at)
    assert inodes == {path: os.stat(at / path).st_ino for path in inodes}
    return *again, load(at)


def elsewhere(td, at):
    mapped = td.memmap(at / "a")
    if any([x.numel() for x in td._leaves([])]):
        with pytest.raises(RuntimeError, match="copy_existing"):
            mapped.memmap(at / "b")
        with pytest.raises(RuntimeError, match="exists"):
            td.memmap(at / "a", existsok=False)
    mapped.memmap(at / "b", copy_existing=True)
    copy = mapped.clone()
    assert not copy.is_memmap() and not copy.is_locked
    copy.memmap(at / "c")
    td.memmap().memmap(at / "d")  # from a temporary file
    return load(at / "b"), copy, load(at / "c"), load(at / "d")


def in_one_file(td, at):
    path = at / "x" / "td.safetensors"
    td.save(path)
    first = path.read_bytes()
    td.save(path)
    assert path.read_bytes() == first and os.listdir(at / "x") == ["td.safetensors"]
    assert not td.is_locked and not td.is_memmap()
    back = load(path)
    path.unlink()  # loaded values need no file
    td.memmap().save(path)
    assert type(back) is TensorDict and sound(back)
    return back, raffia.load(str(path)), TensorDict(z=1).load_(path)


WAYS = {
    "memmap": with_memmap,
    "memmap_": in_place,
    "threads": by_threads,
    "save": saved,
    "temporary": lambda td, at: (td.memmap(), td.memmap_()),
    "pickled": after_pickling,
    "refreshed": refreshed,
    "into another": into_another,
    "over itself": over_itself,
    "elsewhere": elsewhere,
    "device": lambda td, at: (TensorDict.load_memmap(td.memmap(at).saved_path, device="cpu"),),
    "one file": in_one_file,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*PLAIN, *RAGGED])
def test_written_containers_are_read_back(name, way, tmp_path):
    td = (PLAIN | RAGGED)[name]()
    wanted = content(td)
    if name in RAGGED and way == "one file":
        with pytest.raises(NotImplementedError, match="is a nested tensor"):
            td.save(tmp_path / "x.safetensors")
        return
    (tmp_path / "in").mkdir()
    for found in WAYS[way](td, tmp_path / "in"):
        assert content(found) == wanted
    assert os.listdir(tmp_path) == ["in"]  # nothing outside the folder


@pytest.mark.parametrize("name", [*PLAIN, *RAGGED])
def test_memmap_like_makes_zeros(name, tmp_path):
    td = (PLAIN | RAGGED)[name]()
    zeros = td.memmap_like(tmp_path)
    wanted = zeroed(content(td))
    assert zeros.is_memmap() and zeros.is_locked
    for found in (zeros, load(tmp_path), td.memmap_like()):
        assert content(found) == wanted
    for leaf in zeros._leaves([]):
        for row in leaf.unbind() if leaf.is_nested else [leaf]:
            row.view(torch.uint8).fill_(1) if row.element_size() == 1 else row.fill_(1)
    assert content(td.memmap_like(tmp_path)) == content(zeros)  # opened unchanged


def zeroed(found):
    """The content of a container, with zeros for the bytes of its tensors."""
    if isinstance(found, tuple) and len(found) == 3 and isinstance(found[2], bytes):
        return *found[:2], bytes(len(found[2]))
    if isinstance(found, tuple) and len(found) == 4 and found[2] and found[1] is torch.jagged:
        index, *offsets, values = found[2]
        return *found[:2], (index, *offsets, zeroed(values)), zeroed(found[3])
    if isinstance(found, dict):
        return {name: zeroed(value) for name, value in found.items()}
    if isinstance(found, list):
        return [zeroed(value) for value in found]
    return tuple(map(zeroed, found)) if type(found) is tuple else found


# ------------------------------------------------------------------ values that are no tensors

numbers = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.binary()
anything = st.recursive(
    numbers
    | st.text(st.characters(codec="utf-8"))
    | st.sampled_from(Colour)
    | arrays.arrays(st.sampled_from([np.int32, np.float64, np.bool_]), arrays.array_shapes()),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.sampled_from(Level), inner)
        | st.sets(st.integers() | st.text())
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(anything)
@example(np.arange(3, dtype=">i4"))
def test_any_value_round_trips_through_json(value):
    assert content(decode(json.loads(json.dumps(encode(value, ()))))) == content(value)


class Local(enum.Enum):
    A = 1


Local.__qualname__ = "test.<locals>.Local"
REFUSED = [
    *(object(), range(2), {object()}, {1: object()}, [object()], lambda: 0, float, Colour),
    *(np.array([object()]), Local.A),
]


@pytest.mark.parametrize("key", ["oddkey", ("n", "oddkey")])
@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_a_value_that_is_refused_is_named_and_nothing_is_written(value, key, tmp_path):
    td = TensorDict({"a": torch.ones(2), ("n", "b"): torch.ones(3)}).set_non_tensor(key, value)
    for name in ("x", "x.safetensors"):
        with pytest.raises(TypeError, match="oddkey.*can't be stored on disk"):
            td.save(tmp_path / name)
    with pytest.raises(TypeError, match="oddkey"):
        td.memmap_(tmp_path / "x")
    assert not td.is_memmap() and not td.is_locked and type(td["a"]) is torch.Tensor
    assert files(tmp_path) == []
    for name in ("x", "x.safetensors"):  # the earlier file is unchanged
        sample().save(tmp_path / name)
        with pytest.raises(TypeError, match="oddkey"):
            td.save(tmp_path / name)
        assert content(load(tmp_path / name)) == content(sample())


@pytest.mark.parametrize("name", ["x", "x.safetensors"])
@pytest.mark.parametrize("leaf", [torch.zeros(2, 2).to_sparse(), torch.zeros(2, device="meta")])
def test_tensors_that_have_no_bytes_are_refused(leaf, name, tmp_path):
    with pytest.raises(TypeError, match="n.bad"):
        TensorDict(n=TensorDict(bad=leaf)).save(tmp_path / name)
    assert os.listdir(tmp_path) == []


def test_nothing_is_pickled(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("pickle was used")

    for name in ("pickle.dumps", "pickle.loads", "pickle.dump", "pickle.load"):
        monkeypatch.setattr(name, refuse)
    for name in ("torch.save", "torch.load"):
        monkeypatch.setattr(name, refuse)
    for name in ("d", "d.safetensors"):
        sample().save(tmp_path / name)
        assert content(load(tmp_path / name)) == content(sample())


# --------------------------------------------------------------- folders of memory-mapped files

TAKES = {
    "row": lambda td: td[0],
    "last": lambda td: td[-1:],
    "column": lambda td: td[..., 1],
    "unbind": lambda td: td.unbind(1)[2],
    "split": lambda td: td.split(1)[0],
    "iteration": lambda td: next(iter(td)),
}


@pytest.mark.parametrize("take", TAKES.values(), ids=TAKES)
def test_rows_are_mapped_and_locked(take, tmp_path):
    n = TensorDict(b=torch.ones(2, 3, 4), batch_size=[2, 3])
    m = TensorDict(a=torch.zeros(2, 3), n=n, batch_size=[2, 3]).memmap(tmp_path)
    row = take(m)
    assert row.is_memmap() and row.is_locked and row["n"].is_memmap()
    with pytest.raises(RuntimeError, match="locked"):
        row["new"] = torch.zeros(row.batch_size)
    row.set_("a", torch.full(row.batch_size, 7.0))
    assert (take(load(tmp_path))["a"] == 7).all()
    with pytest.raises(AttributeError, match="saved.path"):
        _ = row.saved_path
    row.unlock_()["new"] = torch.zeros(row.batch_size)
    assert not row.is_memmap() and m.is_memmap()


def test_the_folder_is_pickled_with_the_container_alone(tmp_path):
    pair = Pair(torch.ones(2), TensorDict(), batch_size=[2]).memmap(tmp_path)
    assert "_mapped_to" in vars(pair)["_td"].__getstate__() and [*pair.__getstate__()] == ["_td"]
    copy = pickle.loads(pickle.dumps(pair))
    assert copy.is_memmap() and copy.saved_path == tmp_path and copy.unlock_().is_memmap() is False


def test_which_results_are_mapped_and_which_are_copies(tmp_path):
    m = TensorDict(a=torch.zeros(3), batch_size=[3]).memmap()
    copies = [m[[0, 1]], m[torch.tensor([True, False, True])], m + 1, m.clone(), m[torch.tensor(1)]]
    assert not any([one.is_memmap() for one in copies])
    assert [one.is_locked for one in copies] == [False, False, True, False, False]
    assert {type(one["a"]) for one in copies[:-1]} == {torch.Tensor} and copies[-1]["a"] == 0
    assert lazy_stack([m, m]).is_memmap() and lazy_stack([m, m])[:, 0].is_memmap()
    assert not lazy_stack([m, m.clone().lock_()]).is_memmap()
    assert not m.clone(False).lock_().is_memmap()
    lazy = lazy_stack([TensorDict(a=torch.zeros(2), s="u"), TensorDict(a=torch.ones(3), s="v")])
    wanted, mapped = content(lazy), lazy.memmap(tmp_path)
    for one in (mapped, LazyStackedTensorDict.load_memmap(tmp_path), lazy.memmap_()):
        assert isinstance(one, LazyStackedTensorDict) and content(one) == wanted
    assert mapped.is_memmap() and mapped.is_locked and lazy.is_memmap()
    params = TensorDictParams(TensorDict(a=torch.zeros(2), p=nn.Parameter(torch.ones(3))))
    for at in (tmp_path / "d", tmp_path / "x.safetensors"):
        params.save(at)
        assert type(load(at)) is TensorDict and content(load(at)["p"]) == content(params["p"])
    nested = TensorDict(n=TensorDict(a=torch.zeros(2))).lock_()
    assert type(next(iter(nested.values(True, True)))) is torch.Tensor
    nested["n"].memmap_(tmp_path / "n")
    assert isinstance(next(iter(nested.values(True, True))), MemoryMappedTensor)
    assert nested["n"].is_memmap() and not nested.is_memmap()


WRITES = {
    "fill_": lambda td: td["a"].fill_(9),
    "a row": lambda td: td[0].zero_(),
    "a row of a tensor": lambda td: td["a"][1].fill_(9),
    "index": lambda td: td.__setitem__(0, {"a": td["a"][1] * 3}),
    "set_": lambda td: td.set_("a", torch.full((2, 3), 5.0)),
    "set_at_": lambda td: td.set_at_("a", 9.0, 1),
    "update_": lambda td: td.update_({"a": torch.full((2, 3), 6.0)}),
    "nested": lambda td: td["n"].zero_(),
    "text": lambda td: td.set_("s", {"k": (1,)}),
    "text of rows": lambda td: td.get("w").update_(NonTensorStack("r", "s")),
    "text of a row": lambda td: td.set_at_("w", "z", 0),
    "a row of nested tensors": lambda td: td["j"].unbind()[1].fill_(8),
    "rows of nested tensors": lambda td: td[1]["x"].fill_(8),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_reach_the_files(name, tmp_path):
    td = sample().update({"j": jagged(), "x": strided()}).exclude("z", "c", "f", "p")
    mapped, before = td.memmap(tmp_path), content(td)
    other, private = load(tmp_path), TensorDict.load_memmap(tmp_path, mode="r")
    twin = pickled(mapped)
    if "text" not in name:
        WRITES[name](private)
    assert content(load(tmp_path)) == before
    WRITES[name](mapped)
    changed = content(mapped)
    assert changed != before == content(td) and content(load(tmp_path)) == changed
    if "text" not in name:  # values are shared only on request
        assert content(other) == changed
        assert name == "a row of nested tensors" or content(twin) == changed


@pytest.mark.slow
def test_other_processes_read_and_write(tmp_path):
    TensorDict({"j": with_holes(), "s": strided(), "a": torch.arange(2.0)}, [2]).memmap(tmp_path)
    program = (
        "import sys; from raffia import TensorDict\n"
        "td = TensorDict.load_memmap(sys.argv[1])\n"
        "print([row.tolist() for key in 'js' for row in td[key].unbind()])\n"
        "td['j'].values()[0] = 50; td['s'].unbind()[1].fill_(60); td['a'][:] = 70\n"
    )
    td = load(tmp_path)
    want = [row.tolist() for x in (with_holes(), strided()) for row in x.unbind()]
    assert run(program, tmp_path) == f"{want}\n"
    assert td["j"].unbind()[0][0].tolist() == [50, 50] and (td["s"].unbind()[1] == 60).all()
    assert td["a"].tolist() == [70, 70]


def run(program, *args, **env):
    """The output of a program in another process."""
    command = [sys.executable, "-W", "ignore", "-c", program, *map(str, args)]
    out = subprocess.run(command, capture_output=True, text=True, env=os.environ | env)
    assert out.returncode == 0, out.stderr
    return out.stdout


def test_an_older_folder_is_replaced(tmp_path):
    def sized(n):
        return TensorDict(x=torch.full((n, 3), float(n)))

    others = [sized(5000), sized(4), sized(9), sized(2), sample()]
    nested = [TensorDict({"x": x}, [2]) for x in (jagged(), strided(), with_holes())]
    for td in (*others, *nested, TensorDict({"x": torch.arange(2.0)}, [2]), *nested):
        old = (tmp_path / "x.memmap").stat() if (tmp_path / "x.memmap").exists() else None
        td.memmap(tmp_path)
        assert content(load(tmp_path)) == content(td)
        if old and "x" in td:
            new = (tmp_path / "x.memmap").stat()  # a live map is not cut
            assert new.st_ino != old.st_ino or new.st_size == old.st_size


def test_tensors_from_the_same_files_in_another_order(tmp_path):
    rows = torch.arange(6.0).reshape(2, 3)
    entries = {"a": jagged(), "b": jagged() + 5, "s": strided(), "t": strided() * 2}
    entries |= {"x": rows, "y": rows + 10, "c": torch.arange(4.0).view(2, 2)}
    td = TensorDict(entries, [2])

    def swapped(td):
        pairs = {"a": "b", "b": "a", "s": "t", "t": "s", "x": "y", "y": "x"}
        out = TensorDict({key: td[other] for key, other in pairs.items()}, [2])
        return out.set("c", td["c"].t())

    wanted = content(swapped(td))
    swapped(td.memmap(tmp_path)).memmap(tmp_path, copy_existing=True)
    assert content(load(tmp_path)) == wanted


def test_a_map_is_opened_again_but_not_resized(tmp_path):
    row = TensorDict(a=torch.ones(3))
    buffer = row.expand(4).memmap_like(tmp_path)
    assert buffer.batch_size == (4,) and (tmp_path / "a.memmap").stat().st_size == 48
    buffer[2] = row
    assert load(tmp_path)["a"].sum(1).tolist() == [0, 0, 3, 0]
    assert row.expand(4).memmap_like(tmp_path)["a"].sum() == 3
    for size, option, match in ((5, {}, "has 48 bytes"), (4, {"existsok": False}, "exists")):
        with pytest.raises(RuntimeError, match=match):
            row.expand(size).memmap_like(tmp_path, **option)
    TensorDict({"x": jagged()}, [2]).memmap(tmp_path / "j")
    longer = nested_tensor([torch.zeros(3, 3), torch.zeros(3, 3)], layout=torch.jagged)
    for x, match in ((longer, "rows of other lengths"), (with_holes(), "72 bytes")):
        with pytest.raises(RuntimeError, match=match):
            TensorDict({"x": x}, [2]).memmap_like(tmp_path / "j")
    assert content(load(tmp_path / "j")["x"]) == content(jagged())


def test_entries_are_added(tmp_path):
    td = TensorDict({"a": torch.zeros(2), "x": jagged()}, [2]).memmap(tmp_path)
    td.make_memmap(("n", "m", "x"), (2, 3), dtype=torch.int8).fill_(1)
    td.make_memmap(("n", "y"), torch.tensor([2]))
    td.make_memmap_from_tensor("ones", torch.ones(2, 2))
    sizes, storage = torch.tensor([[2, 3], [4, 5]]), torch.arange(26.0).untyped_storage()
    td.make_memmap_from_storage(("n", "s"), storage, sizes)
    made = td.make_memmap("sizes", sizes, dtype=torch.int16)
    assert [row.shape for row in made.unbind()] == [(2, 3), (4, 5)]
    for at, make in enumerate(NESTED.values()):
        for key in (f"{at}", ("n", "m", f"{at}")):
            out = td.make_memmap_from_tensor(key, make())
            assert content(out) == content(td[key]) == content(make().detach())
        out = td.make_memmap_from_tensor(f"{at} zeros", make(), copy_data=False)
        assert content(out) == zeroed(content(make()))
    made.fill_(4)
    y = td.make_memmap_from_tensor(("n", "j"), jagged() * 2)
    back = load(tmp_path)
    assert content(back) == content(td) and back["n", "s"].unbind()[0][1, 2] == 5
    for one, other in ((td["x"], y), (back["x"], back["n", "j"])):  # of one structure
        assert content(one + other) == content(jagged() * 3)
    assert td.is_locked and td["n"].is_locked and td["n"].is_memmap()
    assert td["n", "m"].saved_path == tmp_path / "n" / "m"
    td.unlock_()
    assert not td["n"].is_memmap()


def test_entries_that_can_not_be_added(tmp_path):
    td = TensorDict({"a": torch.zeros(2), "n": {"m": {"x": jagged()}}}, [2]).memmap(tmp_path)
    sizes, before = torch.tensor([[2, 3], [4, 5]]), content(td)
    rows = nested_tensor([torch.zeros(i) for i in range(3)])
    make, copied = td.make_memmap, td.make_memmap_from_tensor
    for row in [
        *[(lambda key=key: make(key, (2,)), RuntimeError, "already exists") for key in ("a", "n")],
        (lambda: copied(("n", "m", "x"), jagged()), RuntimeError, "already exists"),
        (lambda: make(("a", "x"), (2,)), KeyError, '"a" is a MemoryMappedTensor'),
        (lambda: copied("z", rows), RuntimeError, r"batch dimension mismatch.*\[3, "),
        (lambda: make("b", torch.cat([sizes, sizes])), RuntimeError, r"mismatch.*\[4, -1, -1\]"),
        *[
            (lambda bad=bad: make("b", bad), ValueError, "sizes of the rows")
            for bad in (sizes - 3, sizes / 2, sizes[None])
        ],
        (lambda: TensorDict(a=1).make_memmap("b", (2,)), RuntimeError, "memory-mapped"),
        (lambda: td["n"].unlock_(), RuntimeError, "locked"),
    ]:
        raises(row)
    assert content(load(tmp_path)) == content(td) == before


def test_names_of_files(tmp_path):
    td = TensorDict({"a": torch.ones(3), "n": {"b": torch.ones(4)}}).memmap(tmp_path / "a")
    assert files(tmp_path / "a") == ["a.memmap", "meta.json", "n/b.memmap", "n/meta.json"]
    assert (tmp_path / "a" / "n" / "b.memmap").stat().st_size == 16
    keys = ("x.offsets", "x", "X", "x.offsets.memmap", "a/b", "y" * 300)
    entries = {key: jagged() * at for at, key in enumerate(keys)}
    td = TensorDict(entries | {"N": {"x": torch.ones(2)}, "n": {"x": torch.zeros(2)}}, [2])
    td = td.memmap(tmp_path / "b")
    names = [path.name.lower() for path in (tmp_path / "b").iterdir()]
    assert len(set(names)) == len(names) == 2 * len(keys) + 3
    for key in ("x.lengths", "X.offsets", "z"):
        td.make_memmap_from_tensor(key, with_holes())
    td.make_memmap_from_tensor("z.lengths", torch.zeros(2, dtype=torch.int64))
    assert content(load(tmp_path / "b")) == content(td)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "x.offsets.memmap").write_bytes(b"")
    with pytest.raises(RuntimeError, match="x.offsets.memmap already exists"):
        TensorDict(x=jagged()).memmap(tmp_path / "c", existsok=False)
    assert len(os.listdir(tmp_path / "c")) == 1


def test_keys_as_file_names(tmp_path):
    td = TensorDict({"a b": torch.ones(1), "é": {"x": torch.ones(1)}})
    td.memmap(tmp_path / "td", robust_key=False)
    assert {"a b.memmap", "é"} < set(os.listdir(tmp_path / "td"))
    assert content(load(tmp_path / "td")) == content(td)
    for key in ("a/b", "..", ""):
        with pytest.raises(ValueError, match="robust_key"):
            TensorDict({key: {"x": torch.ones(1)}}).memmap(tmp_path / "new", robust_key=False)
    assert os.listdir(tmp_path) == ["td"]


def test_no_rows(tmp_path):
    none = torch.nested.nested_tensor_from_jagged(torch.zeros(0, 3), torch.tensor([0]))
    TensorDict({"a": none, "b": nested_tensor([])}, [0]).memmap(tmp_path)
    back = load(tmp_path)
    assert back["a"].shape[0] == 0 and back["a"].shape[2] == 3 and back["a"].layout is torch.jagged
    assert back["b"].is_nested and back["b"].unbind() == () and back["b"].dtype is torch.float32
    assert "torch.Size([0])" in repr(back)


def test_refresh_keeps_nested_containers(tmp_path):
    td = TensorDict(a=torch.zeros(3), n=TensorDict(x=torch.zeros(1)), s="old").memmap(tmp_path)
    nested = td["n"]
    TensorDict(b=torch.ones(2), n=TensorDict(y=torch.ones(2)), s="new").memmap(tmp_path)
    assert td.memmap_refresh_() is td and td["n"] is nested
    assert content(td) == content(load(tmp_path)) and nested.saved_path == tmp_path / "n"
    td["b"].fill_(7)
    assert load(tmp_path)["b"].sum() == 14


def test_the_meta_device(tmp_path):
    TensorDict({"j": with_holes(), "n": {"k": with_holes(), "a": torch.ones(2)}}, [2]).memmap(
        tmp_path
    )
    td = TensorDict.load_memmap(tmp_path, device="meta")
    assert td["j"].is_meta and td["j"].is_nested and td["j"].shape == td["n", "k"].shape
    assert td["n", "a"].is_meta
    with pytest.raises(TypeError, match="meta device"):
        td.memmap_like()
    TensorDict(a=torch.ones(2), n=dict(b=[1, 2], s="text")).memmap(tmp_path / "fake")
    with FakeTensorMode():
        td = TensorDict.load_memmap(tmp_path / "fake")
        assert is_fake(td["a"]) and (td["n", "b"] + 1).shape == (2,) and td["n", "s"] == "text"
    TensorDict({"s": strided()}, [2]).memmap(tmp_path)
    with pytest.raises(NotImplementedError, match="no nested tensors of strided layout"):
        TensorDict.load_memmap(tmp_path, device="meta")


def test_modes_and_parts(tmp_path, monkeypatch):
    td = TensorDict(m={"0": dict(w=torch.ones(2)), "x": 1}, a=torch.zeros(3)).memmap(tmp_path)
    for subpath in (("m", "0"), "m/0", ["m", "0"]):
        assert list(TensorDict.load_memmap(tmp_path, subpath=subpath).keys()) == ["w"]
        assert list(raffia.load(tmp_path, subpath=subpath, mode="r").keys()) == ["w"]
    TensorDict(a=1).save(tmp_path / "x.safetensors")
    for options in ({"subpath": "m"}, {"mode": "r"}):
        with pytest.raises(ValueError, match="read as a whole"):
            raffia.load(tmp_path / "x.safetensors", **options)
    TensorDict.load_memmap(tmp_path, mode="r+")["a"].fill_(2)
    args = (td["a"].filename, torch.float32, (3,))
    MemoryMappedTensor.from_filename(*args, mode="r").fill_(3)
    assert td["a"].tolist() == [2, 2, 2]
    MemoryMappedTensor.from_filename(*args, mode="r+").fill_(3)
    assert td["a"].tolist() == [3, 3, 3]
    from_nowhere = "no container was saved under"
    match = r"mode='w' must be one of 'r', 'r\+', None"
    for call, error in [
        *[
            (lambda at=at: TensorDict.load_memmap(tmp_path, subpath=at), from_nowhere)
            for at in ("nothing", "a", ("m", "x"))
        ],
        (lambda: MemoryMappedTensor.from_filename(*args, mode="w"), match),
        (lambda: TensorDict.load_memmap(tmp_path, mode="w"), match),
    ]:
        raises((call, ValueError, error))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(PermissionError):
        TensorDict.load_memmap(tmp_path, mode="r+")
    shutil.rmtree(tmp_path / "m" / "0")
    (tmp_path / "m" / "0").write_bytes(b"")
    with pytest.raises(DamagedFileError, match="not a folder"):
        TensorDict.load_memmap(tmp_path, subpath="m/0")


def test_options_that_are_refused(tmp_path):
    td, small = sample(), TensorDict(a=torch.zeros(2))
    for row in [
        (lambda: td.memmap(tmp_path, archive=True), TypeError, "archive"),
        (lambda: td.save(tmp_path / "x.safetensors", num_threads=2), ValueError, "folders"),
        (lambda: small.clone().share_memory_().memmap_(tmp_path), RuntimeError, "exclusive"),
        (lambda: small.clone().memmap_(tmp_path).share_memory_(), RuntimeError, "exclusive"),
        (lambda: load(tmp_path / "nowhere"), FileNotFoundError, ""),
        (lambda: load(tmp_path / "no.safetensors"), FileNotFoundError, ""),
    ]:
        raises(row)


def test_threads_write(tmp_path, monkeypatch):
    used, allocate = set(), folder_writer.allocate
    monkeypatch.setattr(
        folder_writer, "allocate", lambda *a: (used.add(threading.get_ident()), allocate(*a))[1]
    )
    td = TensorDict({str(i): torch.full((1000,), i) for i in range(20)})
    td.memmap(tmp_path, num_threads=3)
    assert used and threading.get_ident() not in used
    monkeypatch.setattr(folder_writer, "allocate", None)
    load(tmp_path).memmap()  # nothing is written where it is
    assert content(load(tmp_path)) == content(td)


# ------------------------------------------------------------------------------ symbolic links


def precious(folder):
    """A folder in which nothing may be written; returns a function that reads its files."""
    (folder / "n").mkdir(parents=True)
    for name in ("a.memmap", "meta.json", "b.memmap", "n/b.memmap", "n/meta.json"):
        (folder / name).write_bytes(b"12 bytes 123" if name == "a.memmap" else b"precious 1234")
    return lambda: {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def linked():
    return TensorDict(a=torch.ones(3), n=TensorDict(b=torch.ones(2)), text="x")


@pytest.mark.parametrize("method", ["memmap", "memmap_", "memmap_like"])
@pytest.mark.parametrize("name", ["a.memmap", "meta.json", "n", "n/b.memmap", "n/meta.json"])
def test_links_in_a_folder_are_not_followed(tmp_path, method, name):
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    read = precious(outside)
    before = read()
    (folder / "n").mkdir(parents=True)
    if name == "n":
        (folder / "n").rmdir()
    (folder / name).symlink_to(outside / name)
    try:
        getattr(linked(), method)(folder)
    except RuntimeError as error:
        assert "already exists" in str(error) or (name == "n" and "symbolic link" in str(error))
    else:
        assert name != "n"
    assert read() == before


@pytest.mark.parametrize("name", ["n2", "meta.json", "b.memmap", "text"])
def test_links_are_not_followed_by_changes(tmp_path, name):
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    read = precious(outside)
    before, td = read(), linked().memmap(folder)
    at = folder / {"text": "meta.json"}.get(name, name)
    at.unlink(missing_ok=True)
    at.symlink_to(outside / ("n" if name == "n2" else at.name))
    if name == "b.memmap":  # the link is replaced
        td.make_memmap("b", (2,))
        assert not at.is_symlink()
    else:
        with pytest.raises((RuntimeError, DamagedFileError), match="link"):
            td.set_("text", "new") if name == "text" else td.make_memmap(("n2", "b"), (2,))
    assert read() == before


def test_the_folder_itself_may_be_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    td = linked().memmap(tmp_path / "link")
    assert content(load(tmp_path / "link")) == content(load(tmp_path / "real")) == content(td)
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "a.memmap").symlink_to(tmp_path / "real" / "a.memmap")
    td.memmap(tmp_path / "second", copy_existing=True)
    assert not (tmp_path / "second" / "a.memmap").is_symlink()
    assert content(load(tmp_path / "second")) == content(td)


# ------------------------------------------------------------------------------------ one file


def header(path):
    raw = path.read_bytes()
    return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])


def test_parameters_and_shared_tensors_in_one_file(tmp_path):
    weight, t = nn.Parameter(torch.ones(2)), torch.zeros(3)
    fixed = nn.Parameter(torch.ones(1), requires_grad=False)
    nested = {"tied": weight, "plain": weight.data, "t": t}
    TensorDict(w=weight, n=nested, t=t, fixed=fixed, part=t[1:]).save(tmp_path / "x.safetensors")
    assert len(header(tmp_path / "x.safetensors")) == 1 + 4
    back = load(tmp_path / "x.safetensors")
    assert back["w"] is back["n", "tied"] and isinstance(back["w"], nn.Parameter)
    assert back["w"].requires_grad and not back["fixed"].requires_grad
    assert type(back["n", "plain"]) is torch.Tensor
    assert back["n", "plain"].data_ptr() == back["w"].data_ptr()
    back["t"].fill_(5)
    assert back["n", "t"].tolist() == [5.0] * 3 and back["part"].tolist() == [0.0, 0.0]


def test_other_programs_read_and_write_one_file(tmp_path):
    path = tmp_path / "x.safetensors"
    sample().save(path)
    found = load_file(path)
    assert {"a", "n.b", "z.0.v", "z.1.v", "c.x", "f.x", "p"} == set(found)
    assert torch.equal(found["n.b"], torch.ones(2, 4, dtype=torch.float64))
    theirs = {"a.b": torch.ones(2), "c": torch.zeros(3, dtype=torch.int8)}
    save_file(theirs, tmp_path / "y", {"format": "pt"})
    td = load(tmp_path / "y")
    assert sorted(td.keys()) == ["a.b", "c"] and td.batch_size == () and td["a.b"].sum() == 2


def test_tensors_are_aligned_to_their_dtype(tmp_path):
    dtypes = torch.int8, torch.bool, torch.float64, torch.half
    td = TensorDict({f"{i}": torch.ones(i, dtype=d) for i, d in enumerate(dtypes)})
    td.save(tmp_path / "x.safetensors")
    start = 8 + int.from_bytes((tmp_path / "x.safetensors").read_bytes()[:8], "little")
    for name, entry in header(tmp_path / "x.safetensors").items():
        if name != "__metadata__":
            assert (start + entry["data_offsets"][0]) % td[name].dtype.itemsize == 0


def test_loading_one_file_with_a_device_and_into_a_container(tmp_path):
    path = tmp_path / "x.safetensors"
    sample().save(path)
    assert TensorDict.load(path, device="meta")["n", "b"].is_meta
    assert TensorDict.load(path, device="cpu").device == torch.device("cpu")
    assert load(path).device is None
    out = TensorDict(old=torch.zeros(2), n=TensorDict(batch_size=[2]), batch_size=[2])
    nested = out["n"]
    assert TensorDict.load(path, out=out) is out and "old" not in out and out["n"] is nested
    assert content(out) == content(sample())
    with pytest.raises(RuntimeError, match="locked"):
        TensorDict().lock_().load_(path)
    TensorDict(a=torch.ones(2), device="cpu").save(path)
    assert load(path).device == torch.device("cpu")
    Pair(x=torch.ones(3), batch_size=[3]).save(path)
    assert type(load(path)) is Pair and type(Pair.load(path)) is Pair
    NonTensorData("a").memmap(tmp_path / "d").update_(NonTensorData("b"))
    assert load(tmp_path / "d").data == "b"


def test_a_dtype_that_only_the_library_of_safetensors_knows(tmp_path):
    entries = {"a": ("F8_E8M0", [2], [0, 2]), "b": ("U8", [3], [2, 5])}
    head = {k: dict(dtype=d, shape=s, data_offsets=at) for k, (d, s, at) in entries.items()}
    text = json.dumps(head).encode()
    data = len(text).to_bytes(8, "little") + text + bytes([127, 128, 1, 2, 3])
    (tmp_path / "td.safetensors").write_bytes(data)
    td = load(tmp_path / "td.safetensors")
    assert td["a"].float().tolist() == [1.0, 2.0] and td["b"].tolist() == [1, 2, 3]


# ----------------------------------------------------------------------------- temporary files


def mixed():
    entries = {
        "a": torch.arange(3, dtype=torch.int8),
        "b": torch.arange(6.0, dtype=torch.float64).view(2, 3).t(),
        "none": torch.zeros(0, 2),
        "n": {"c": torch.tensor([1 + 2j, 3]), "d": torch.tensor(True)},
        "wide": torch.ones(1, 2).expand(4, 2),
    }
    return TensorDict(entries)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A function that lists the temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return lambda: sorted(tmp_path.glob("raffia-*.memmap"))


@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("method", ["memmap", "memmap_", "memmap_like"])
def test_small_tensors_share_one_temporary_file(method, num_threads, temporary):
    source = mixed()
    td = getattr(mixed(), method)(num_threads=num_threads)
    assert len([file for file in temporary() if file.stat().st_size]) == 1
    for key in source.keys(True, True):
        assert td[key].is_contiguous() and td[key].data_ptr() % td[key].dtype.itemsize == 0
    before = content(td.exclude("a"))
    td["a"].fill_(5)  # and into no other
    assert content(td.exclude("a")) == before
    leaf = td["n", "c"]
    del td
    assert len(temporary()) == 1
    del leaf
    assert temporary() == []


def test_pickled_tensors_of_temporary_files_are_the_same_ones(temporary):
    td = mixed().memmap()
    row = td["b"][1]
    parts = [*td.values(True, True), row]
    for part in parts:
        twin = pickled(part)
        part.fill_(1)
        assert torch.equal(twin, part)
        twin.fill_(0)
        assert torch.equal(twin, part)
    with pytest.raises(RuntimeError, match="no file"):
        _ = td["a"].filename
    twin = pickled(td)
    td["b"].fill_(7)
    assert (twin["b"] == 7).all() and row.tolist() == [7, 7]


@pytest.mark.slow
def test_temporary_files_are_removed_with_their_process(tmp_path):
    program = (
        "import os, torch; from raffia import TensorDict\n"
        "m = TensorDict(a=torch.ones(2)).memmap()\n"
        "if os.fork() == 0: raise SystemExit\n"
        "os.wait(); print(len([f for f in os.listdir(os.environ['TMPDIR']) if 'raffia' in f]))"
    )
    assert run(program, TMPDIR=str(tmp_path)) == "1\n"
    assert [name for name in os.listdir(tmp_path) if "raffia" in name] == []


@pytest.mark.slow
@pytest.mark.skipif(bool(os.getuid()), reason="needs root, to become nobody")
def test_files_that_may_not_be_written_are_mapped_privately():
    program = (
        "import os, sys; from raffia import TensorDict; os.setuid(65534)\n"
        "m = TensorDict.load(sys.argv[1]); m['a'].fill_(7)\n"
        "print(m['a'].sum().item())"
    )
    folder = tempfile.mkdtemp()
    try:
        os.chmod(folder, 0o755)
        TensorDict(a=torch.ones(2)).memmap(folder)
        assert run(program, folder) == "14.0\n"
        assert load(folder)["a"].sum() == 2
    finally:
        shutil.rmtree(folder)
