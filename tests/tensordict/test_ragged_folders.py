"""Nested tensors in memory-mapped folders: of both layouts, saved, loaded, changed, damaged."""

from __future__ import annotations

import gc
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from raffia import DamagedFileError, MemoryMappedTensor, TensorDict, lazy_stack, tensorclass
from raffia.tensordict import folder_writer
from raffia.tensordict.memmap import DTYPES
from tests.tensordict.test_damage import changed

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
nested_tensor: Callable[..., Any] = torch.nested.nested_tensor


@tensorclass
class Ragged:
    x: Tensor
    tag: str = ""


def jagged() -> Any:
    rows = [torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)]
    return nested_tensor(rows, layout=torch.jagged)


def with_holes(offsets: Any = torch.int64) -> Any:
    return torch.nested.nested_tensor_from_jagged(
        torch.arange(20.0).view(10, 2),
        offsets=torch.tensor([0, 4, 10], dtype=offsets),
        lengths=torch.tensor([2, 5], dtype=offsets),
    )


def strided() -> Any:
    return nested_tensor([torch.arange(6.0).view(2, 3), torch.arange(20.0).view(4, 5)])


def of_a_larger_memory() -> Any:
    x = torch.arange(30.0)
    rows = torch.tensor([[2, 3], [4, 1]]), torch.tensor([[3, 1], [1, 1]]), torch.tensor([5, 20])
    return torch._nested_view_from_buffer(x, *rows)


KINDS: dict[str, Callable[[], Any]] = {
    "jagged": jagged,
    "transposed": lambda: jagged().transpose(1, 2),
    "not contiguous": lambda: torch.nested.nested_tensor_from_jagged(
        torch.arange(18.0).view(3, 6).t(), torch.tensor([0, 2, 6])
    ),
    "with holes": with_holes,
    "int32 offsets": lambda: with_holes(torch.int32),
    "with empty rows": lambda: nested_tensor(
        [torch.zeros(0, 3), torch.ones(0, 3)], layout=torch.jagged
    ),
    "one empty row": lambda: nested_tensor(
        [torch.zeros(0, 3), torch.ones(2, 3)], layout=torch.jagged
    ),
    "a gradient": lambda: jagged().requires_grad_(),
    "strided": strided,
    "strided, transposed": lambda: strided().transpose(1, 2),
    "strided, of a larger memory": of_a_larger_memory,
    "strided, in another order": lambda: torch._nested_view_from_buffer(
        torch.arange(10.0),
        *(torch.tensor([[2, 3], [4, 1]]), torch.tensor([[3, 1], [1, 1]]), torch.tensor([4, 0])),
    ),
    "strided, empty rows": lambda: nested_tensor([torch.zeros(0, 3), torch.ones(5, 0)]),
    "strided, one empty row": lambda: nested_tensor([torch.zeros(0, 3), torch.ones(2, 3)]),
    "strided, numbers": lambda: nested_tensor([torch.tensor(1.0), torch.tensor(2.0)]),
    "strided, alike": lambda: nested_tensor([torch.ones(2), torch.zeros(2)]),
    "strided, a gradient": lambda: strided().requires_grad_(),
}
kinds = pytest.mark.parametrize("kind", list(KINDS))


def content(x: Any) -> Any:
    """All of a nested tensor, as something that can be compared."""
    rows = [(tuple(row.shape), row.tolist()) for row in x.detach().unbind()]
    structure: Any = None
    if x.layout is torch.jagged:
        lengths = None if x.lengths() is None else (x.lengths().dtype, x.lengths().tolist())
        structure = x._ragged_idx, x.offsets().dtype, x.offsets().tolist(), lengths
        structure = *structure, x.dim(), x.values().tolist()
    return x.dtype, x.layout, x.is_nested, structure, rows


def sample(kind: str) -> TensorDict:
    x = KINDS[kind]()
    nested = TensorDict({"y": x * 2, "c": torch.ones(2, 3)}, [2])
    return TensorDict({"x": x, "b": torch.arange(2), "n": nested, "text": "t"}, [2])


def version(folder: Path) -> int:
    return json.loads((folder / "meta.json").read_text())["version"]


WAYS: dict[str, Callable[[TensorDict, Any], Any]] = {
    "memmap": lambda td, at: td.memmap(at),
    "memmap_": lambda td, at: td.memmap_(at),
    "save": lambda td, at: td.save(at),
    "threads": lambda td, at: td.memmap(at, num_threads=2),
    "early": lambda td, at: td.memmap(at, num_threads=2, return_early=True).result(),
    "early, in place": lambda td, at: td.memmap_(at, num_threads=2, return_early=True).result(),
    "file names": lambda td, at: td.memmap(at, robust_key=False),
    "temporary": lambda td, at: td.memmap(),
    "temporary, in place": lambda td, at: td.memmap_(),
}


@kinds
class TestKinds:
    @pytest.mark.parametrize("way", list(WAYS))
    def test_there_and_back(self, kind: str, way: str, tmp_path: Path) -> None:
        folder = tmp_path / "td"
        td, same = sample(kind), sample(kind)
        out = WAYS[way](td, folder)
        assert (
            out.is_locked
            and out.is_memmap()
            and (out is td) == ("in place" in way or way == "memmap_")
        )
        for back in (
            (out,)
            if "temporary" in way
            else (out, TensorDict.load_memmap(folder), TensorDict.load(folder))
        ):
            assert content(back["x"]) == content(same["x"]) and back.batch_size == (2,)
            assert content(back["n", "y"]) == content(same["n", "y"])
            assert not back["x"].requires_grad and back["text"] == "t"
            if back["x"].layout is torch.jagged:  # of one structure still
                assert content(back["x"] + back["n", "y"]) == content(same["x"] * 3)
            if back["x"].layout is torch.strided:
                assert isinstance(back["x"], MemoryMappedTensor)
        if "temporary" not in way:
            assert version(folder) == version(folder / "n") == 2

    def test_what_is_written_into_it_is_in_the_folder(self, kind: str, tmp_path: Path) -> None:
        td = sample(kind).memmap(tmp_path)
        loaded = TensorDict.load_memmap(tmp_path)
        private = TensorDict.load_memmap(tmp_path, mode="r")
        for at, row in enumerate(loaded["x"].unbind()):
            row.fill_(at + 7)
            assert (td["x"].unbind()[at] == at + 7).all()
            assert (TensorDict.load_memmap(tmp_path)["x"].unbind()[at] == at + 7).all()
        before = content(loaded["n", "y"])
        for row in private["n", "y"].unbind():
            row.fill_(-1)
        assert content(TensorDict.load_memmap(tmp_path)["n", "y"]) == before

    def test_zeros_of_the_same_rows(self, kind: str, tmp_path: Path) -> None:
        out = sample(kind).memmap_like(tmp_path)
        back = TensorDict.load_memmap(tmp_path)
        want = content(KINDS[kind]().detach() * 0)
        for one in (out, back, sample(kind).memmap_like()):
            assert content(one["x"]) == content(one["n", "y"]) == want
        out["x"].unbind()[1].fill_(3)
        again = sample(kind).memmap_like(tmp_path)  # opened as it is
        assert content(again["x"]) == content(out["x"])

    def test_refreshed_loaded_into_and_copied(self, kind: str, tmp_path: Path) -> None:
        td = sample(kind).memmap(tmp_path / "a")
        other = sample("strided").exclude("b")
        other.memmap(tmp_path / "a")
        assert content(td.memmap_refresh_()["x"]) == content(strided())
        assert "b" not in td and td.is_memmap()
        same = sample(kind)
        same.memmap(tmp_path / "b")
        out = TensorDict({"x": torch.zeros(2), "n": TensorDict(batch_size=[2])}, [2])
        nested = out["n"]
        assert content(out.load_memmap_(tmp_path / "b")["x"]) == content(same["x"])
        assert out["n"] is nested and content(nested["y"]) == content(same["n", "y"])
        out = TensorDict(batch_size=[2])
        TensorDict.load_memmap(tmp_path / "b", out=out)
        assert content(out["x"]) == content(same["x"])
        part = TensorDict.load_memmap(tmp_path / "b", subpath="n")
        assert content(part["y"]) == content(same["n", "y"])
        on_cpu = TensorDict.load_memmap(tmp_path / "b", device="cpu")
        assert content(on_cpu["x"]) == content(same["x"]) and on_cpu.device.type == "cpu"

    def test_pickled(self, kind: str, tmp_path: Path) -> None:
        for folder in (tmp_path, None):
            td = sample(kind).memmap(folder)
            again = pickle.loads(pickle.dumps(td))
            assert content(again["x"]) == content(td["x"])
            if td["x"].layout is torch.strided:
                again["x"].unbind()[1].fill_(9)
                assert content(again["x"]) == content(td["x"])  # the same file

    def test_saved_where_it_is(self, kind: str, tmp_path: Path) -> None:
        td = sample(kind).memmap(tmp_path / "a")
        inode = os.stat(tmp_path / "a" / "x.memmap").st_ino
        td["x"].unbind()[1].fill_(5)
        for again in (td.memmap(), td.memmap(tmp_path / "a"), td.memmap_(tmp_path / "a")):
            assert content(again["x"]) == content(TensorDict.load(tmp_path / "a")["x"])
        assert os.stat(tmp_path / "a" / "x.memmap").st_ino == inode
        with pytest.raises(RuntimeError, match="copy_existing"):
            td.memmap(tmp_path / "b")
        td.memmap(tmp_path / "b", copy_existing=True)
        assert content(TensorDict.load(tmp_path / "b")["x"]) == content(td["x"])
        with pytest.raises(RuntimeError, match="already exists"):
            sample(kind).memmap(tmp_path / "b", existsok=False)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("name", list(DTYPES))
def test_dtypes(name: str, layout: Any, tmp_path: Path) -> None:
    dtype = DTYPES[name]
    data = torch.arange(18 * dtype.itemsize, dtype=torch.uint8) % 2
    values = data.view(dtype).view(6, 3)
    x = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 6]))
    if layout is torch.strided:  # some can't be made row by row
        rows = torch.tensor([[2, 3], [4, 3]]), torch.tensor([[3, 1], [3, 1]]), torch.tensor([0, 6])
        x = torch._nested_view_from_buffer(values.reshape(-1), *rows)
    TensorDict(x=x).memmap(tmp_path)
    back = TensorDict.load_memmap(tmp_path)["x"]
    assert back.dtype is dtype and back.layout is layout
    rows_of_bytes = [row.contiguous().view(torch.uint8).flatten().tolist() for row in back.unbind()]
    size = 6 * dtype.itemsize
    assert rows_of_bytes == [data[:size].tolist(), data[size:].tolist()]


def test_without_rows(tmp_path: Path) -> None:
    none = torch.nested.nested_tensor_from_jagged(torch.zeros(0, 3), torch.tensor([0]))
    TensorDict({"a": none, "b": nested_tensor([])}, [0]).memmap(tmp_path)
    back = TensorDict.load_memmap(tmp_path)
    assert back["a"].shape[0] == 0 and back["a"].shape[2] == 3 and back["a"].layout is torch.jagged
    assert back["b"].is_nested and back["b"].unbind() == () and back["b"].dtype is torch.float32
    assert "torch.Size([0])" in repr(back)


@pytest.mark.parametrize("seed", range(8))
def test_trees_of_any_form(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)

    def leaf(rows: int) -> Any:
        sizes = [rng.choice((0, 1, 3, 5)) for _ in range(rows)]
        dtype = rng.choice([torch.float32, torch.int64, torch.bool, torch.bfloat16])
        make = [torch.randint(0, 2, (n, 2)).to(dtype) for n in sizes]
        if rng.random() < 0.5:
            return nested_tensor(make, layout=torch.jagged)
        return nested_tensor([row[:, : rng.choice((1, 2))].clone() for row in make])

    def tree(depth: int, rows: int) -> Any:
        entries: dict[str, Any] = {
            "p": torch.arange(rows),
            "x": leaf(rows),
            "x.offsets": leaf(rows),
        }
        if depth:
            entries["n"] = tree(depth - 1, rows)
            entries["c"] = Ragged(x=leaf(rows), tag="t", batch_size=[rows])
            members = [TensorDict({"v": leaf(rows)}, [rows]) for _ in range(2)]
            entries["z"] = lazy_stack(members, 1)
        return TensorDict(entries, [rows])

    def all_of(td: Any) -> Any:
        if isinstance(td, Tensor):
            return content(td) if td.is_nested else td.tolist()
        if hasattr(td, "tensordicts"):
            return td.stack_dim, [all_of(member) for member in td.tensordicts]
        if isinstance(td, Ragged):
            return "Ragged", td.tag, all_of(td.x)
        return td.batch_size, {name: all_of(td.get(name)) for name in td.keys()}

    td = tree(2, rng.choice((1, 3)))
    out = td.memmap(tmp_path, num_threads=rng.choice((0, 2)))
    back = TensorDict.load_memmap(tmp_path)
    assert all_of(back) == all_of(out) == all_of(td)
    assert isinstance(back["c"], Ragged) and isinstance(back["n", "c"], Ragged)


@pytest.mark.parametrize("make", [jagged, strided, with_holes])
def test_stacks_and_classes_in_place(make: Any, tmp_path: Path) -> None:
    members = [TensorDict({"v": make() * (i + 1)}, [2]) for i in range(2)]
    td = TensorDict({"z": lazy_stack(members, 1), "c": Ragged(x=make(), batch_size=[2])}, [2])
    assert td.memmap_(tmp_path) is td and td.is_memmap() and td["z"].is_memmap()
    members[1]["v"].unbind()[0].fill_(3)
    td["c"].x.unbind()[1].fill_(4)
    out = TensorDict({"z": lazy_stack([TensorDict(batch_size=[2]) for _ in range(2)], 1)}, [2])
    for back in (
        TensorDict.load_memmap(tmp_path),
        out.load_memmap_(tmp_path),
        td.memmap_refresh_(),
    ):
        for one, other in zip(back["z"].tensordicts, members, strict=True):
            assert content(one["v"]) == content(other["v"])
        assert content(back["c"].x) == content(td["c"].x)
        assert (back["c"].x.unbind()[1] == 4).all()
    likes = td.memmap_like()
    assert content(likes["z"].tensordicts[1]["v"]) == content(make() * 0)


@pytest.mark.slow
def test_in_another_process(tmp_path: Path) -> None:
    TensorDict({"j": with_holes(), "s": strided()}, [2]).memmap(tmp_path)
    program = (
        "import sys; from raffia import TensorDict\n"
        "td = TensorDict.load_memmap(sys.argv[1])\n"
        "print([row.tolist() for key in 'js' for row in td[key].unbind()])\n"
        "td['j'].values()[0] = 50; td['s'].unbind()[1].fill_(60)\n"
    )
    td = TensorDict.load_memmap(tmp_path)
    want = [row.tolist() for x in (with_holes(), strided()) for row in x.unbind()]
    run = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path)]
    out = subprocess.run(run, capture_output=True, text=True)
    assert out.stdout == f"{want}\n", out.stderr
    assert td["j"].unbind()[0][0].tolist() == [50, 50] and (td["s"].unbind()[1] == 60).all()


def test_folders_without_one_are_as_before(tmp_path: Path) -> None:
    inner = TensorDict({"x": jagged()}, [2])
    td = TensorDict({"a": torch.zeros(2), "n": inner}, [2]).memmap(tmp_path)
    assert version(tmp_path) == 1 and version(tmp_path / "n") == 2
    td.make_memmap("b", (2,))
    assert version(tmp_path) == 1
    td.make_memmap_from_tensor("c", strided())
    assert version(tmp_path) == 2


def test_rows(tmp_path: Path) -> None:
    td = TensorDict({"s": strided(), "b": torch.arange(2)}, [2]).memmap(tmp_path / "a")
    assert td[1].is_memmap() and td[1].is_locked and td[1]["s"].shape == (4, 5)
    td[1]["s"].fill_(8)
    assert (TensorDict.load(tmp_path / "a")["s"].unbind()[1] == 8).all()
    td = TensorDict({"j": jagged(), "b": torch.arange(2)}, [2]).memmap(tmp_path / "b")
    assert td[1]["j"].shape == (4, 3)
    td[1]["j"].fill_(8)
    assert (TensorDict.load(tmp_path / "b")["j"].unbind()[1] == 8).all()


def test_copies_are_plain(tmp_path: Path) -> None:
    td = TensorDict({"j": jagged(), "s": strided()}, [2]).memmap(tmp_path / "a")
    copy = td.clone()
    assert type(copy["s"]) is Tensor
    for name in ("j", "s"):
        copy[name].unbind()[0].fill_(5)
    assert content(td["j"]) == content(jagged()) and content(td["s"]) == content(strided())
    copy.memmap(tmp_path / "b")  # is not one of another folder
    assert content(TensorDict.load(tmp_path / "b")["j"]) == content(copy["j"])


@pytest.mark.parametrize("make", [jagged, strided])
def test_what_is_mapped_is_copied_only_if_that_is_wanted(make: Any, tmp_path: Path) -> None:
    td = TensorDict(x=make()).memmap(tmp_path / "a")
    for one in (td, TensorDict.load_memmap(tmp_path / "a")):
        with pytest.raises(RuntimeError, match="copy_existing"):
            one.memmap(tmp_path / "b")
        one.memmap(tmp_path / "b", copy_existing=True)
        one.clone().memmap(tmp_path / "b")
    assert content(TensorDict.load(tmp_path / "b")["x"]) == content(make())
    TensorDict(x=make()).memmap().memmap(tmp_path / "c")  # from a temporary file


def test_nothing_is_written_where_it_is(tmp_path: Path, monkeypatch: Any) -> None:
    td = TensorDict({"x": jagged(), "y": strided()}, [2]).memmap(tmp_path)
    monkeypatch.setattr(folder_writer, "allocate", None)
    td.memmap()
    td.memmap_()
    assert content(TensorDict.load(tmp_path)["x"]) == content(jagged())


def test_a_file_of_the_structure_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "x.offsets.memmap").write_bytes(b"")
    with pytest.raises(RuntimeError, match="x.offsets.memmap already exists"):
        TensorDict(x=jagged()).memmap(tmp_path, existsok=False)
    assert len(os.listdir(tmp_path)) == 1


def test_the_structure_does_not_change(tmp_path: Path) -> None:
    x, y = with_holes(), strided()
    td = TensorDict({"x": x, "y": y}, [2]).memmap(tmp_path)
    x.offsets().zero_()
    x.lengths().zero_()
    loaded = TensorDict.load_memmap(tmp_path)
    for name in ("x.offsets", "x.lengths", "y.sizes"):
        with open(tmp_path / f"{name}.memmap", "r+b") as file:
            file.write(b"\0" * 8)
    for one in (td, loaded):
        assert content(one["x"]) == content(with_holes()) and content(one["y"]) == content(y)


def test_saving_over_its_own_files_in_another_order(tmp_path: Path) -> None:
    a, b = jagged(), jagged() + 5
    m = TensorDict({"a": a, "b": b, "s": strided(), "t": strided() * 2}, [2]).memmap(tmp_path)
    swapped = {"a": m["b"], "b": m["a"], "s": m["t"], "t": m["s"]}
    TensorDict(swapped, [2]).memmap(tmp_path, copy_existing=True)
    back = TensorDict.load(tmp_path)
    assert content(back["a"]) == content(b) and content(back["b"]) == content(a)
    assert content(back["s"]) == content(strided() * 2) and content(back["t"]) == content(strided())


def test_other_rows_in_the_place_of_some(tmp_path: Path) -> None:
    for x in (jagged(), strided(), with_holes(), torch.arange(2.0), jagged()):
        TensorDict({"x": x}, [2]).memmap(tmp_path)
        back = TensorDict.load(tmp_path)["x"]
        assert content(back) == content(x) if x.is_nested else torch.equal(back, x)
    longer = nested_tensor([torch.zeros(3, 3), torch.zeros(3, 3)], layout=torch.jagged)
    with pytest.raises(RuntimeError, match="rows of other lengths"):
        TensorDict({"x": longer}, [2]).memmap_like(tmp_path)
    assert content(TensorDict.load(tmp_path)["x"]) == content(jagged())
    with pytest.raises(RuntimeError, match="72 bytes"):
        TensorDict({"x": with_holes()}, [2]).memmap_like(tmp_path)


def test_names_of_files(tmp_path: Path) -> None:
    keys = ("x.offsets", "x", "X", "x.offsets.memmap", "a/b", "y" * 300)
    td = TensorDict({key: jagged() * at for at, key in enumerate(keys)}, [2]).memmap(tmp_path)
    files = [path.name.lower() for path in tmp_path.iterdir()]
    assert len(set(files)) == len(files) == 2 * len(keys) + 1
    td.make_memmap_from_tensor("x.lengths", with_holes())
    td.make_memmap_from_tensor("X.offsets", jagged())
    td.make_memmap_from_tensor("z", with_holes())
    td.make_memmap_from_tensor("z.lengths", torch.zeros(2, dtype=torch.int64))
    back = TensorDict.load(tmp_path)
    for key in td.keys():
        assert key == "z.lengths" or content(back[key]) == content(td[key])


@pytest.mark.slow
def test_temporary_files_go_with_the_tensors(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    td = TensorDict({"j": jagged(), "s": strided()}, [2]).memmap()
    assert len(os.listdir(tmp_path)) == 2
    j, s = td["j"], td["s"]
    del td
    gc.collect()
    assert len(os.listdir(tmp_path)) == 2 and content(j) == content(jagged())
    del j, s
    gc.collect()
    assert os.listdir(tmp_path) == []


def test_meta_device(tmp_path: Path) -> None:
    TensorDict({"j": with_holes(), "n": TensorDict({"s": strided()}, [2])}, [2]).memmap(tmp_path)
    with pytest.raises(NotImplementedError, match="no nested tensors of strided layout"):
        TensorDict.load_memmap(tmp_path, device="meta")
    TensorDict({"j": with_holes(), "n": {"k": with_holes()}}, [2]).memmap(tmp_path)
    td = TensorDict.load_memmap(tmp_path, device="meta")
    assert td["j"].is_meta and td["j"].is_nested and td["j"].shape == td["n", "k"].shape
    with pytest.raises(TypeError, match="meta device"):
        td.memmap_like()


class TestAdded:
    def test_from_a_tensor(self, tmp_path: Path) -> None:
        td = TensorDict({"a": torch.zeros(2), "x": jagged()}, [2]).memmap(tmp_path)
        for at, kind in enumerate(KINDS):
            x = KINDS[kind]()
            for key in (f"{at}", ("n", "m", f"{at}")):
                out = td.make_memmap_from_tensor(key, x)
                assert content(out) == content(td[key]) == content(x.detach())
            out = td.make_memmap_from_tensor(f"{at} zeros", x, copy_data=False)
            assert content(out) == content(x.detach() * 0)
        y = td.make_memmap_from_tensor(("n", "y"), jagged() * 2)
        back = TensorDict.load(tmp_path)
        for one, other in ((td["x"], y), (back["x"], back["n", "y"])):
            assert content(one + other) == content(jagged() * 3)
        for key in td.keys(True, True):
            if td[key].is_nested:
                assert content(back[key]) == content(td[key])
        with pytest.raises(RuntimeError, match="already exists"):
            td.make_memmap_from_tensor("x", jagged())
        with pytest.raises(RuntimeError, match=r"batch dimension mismatch.*\[3, "):
            td.make_memmap_from_tensor("z", nested_tensor([torch.zeros(i) for i in range(3)]))

    def test_of_sizes(self, tmp_path: Path) -> None:
        sizes = torch.tensor([[2, 3], [4, 5]])
        for folder in (tmp_path, None):
            td = TensorDict({"a": torch.zeros(2)}, [2]).memmap(folder)
            out = td.make_memmap("z", sizes, dtype=torch.int16)
            assert [row.shape for row in out.unbind()] == [
                (2, 3),
                (4, 5),
            ] and out.dtype is torch.int16
            storage = torch.arange(26.0).untyped_storage()
            out = td.make_memmap_from_storage(("n", "s"), storage, sizes)
            assert out.unbind()[1].flatten().tolist() == [*range(6, 26)]
            with pytest.raises(RuntimeError, match=r"batch dimension mismatch.*\[3, -1, 3\]"):
                td.make_memmap("b", torch.tensor([[2, 3], [4, 3], [1, 3]]))
            for bad in (sizes - 3, sizes / 2, sizes[None]):
                with pytest.raises(ValueError, match="sizes of the rows"):
                    td.make_memmap("b", bad)
        out.fill_(4)
        back = TensorDict.load(tmp_path)
        assert back["z"].unbind()[1].shape == (4, 5) and back["n", "s"].unbind()[0][1, 2] == 5


# ------------------------------------------------------------------------------------------ damage


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    nested = TensorDict({"y": jagged()}, [2])
    TensorDict({"j": with_holes(), "s": strided(), "n": nested}, [2]).memmap(tmp_path / "td")
    return tmp_path / "td"


FILES = (
    *("j.memmap", "j.offsets.memmap", "j.lengths.memmap", "s.memmap", "s.sizes.memmap"),
    *("n/y.memmap", "n/y.offsets.memmap"),
)


@pytest.mark.parametrize("what", ["cut", "empty", "longer", "gone", "pipe", "folder", "link"])
@pytest.mark.parametrize("name", FILES)
def test_something_else_in_the_place_of_a_file(name: str, what: str, folder: Path) -> None:
    place = folder / name
    good = place.read_bytes()
    place.unlink()
    if what in ("cut", "empty", "longer"):
        place.write_bytes({"cut": good[:-1], "empty": b"", "longer": good + b"\0"}[what])
    elif what == "pipe":
        os.mkfifo(place)
    elif what == "folder":
        place.mkdir()
    elif what == "link":
        (folder.parent / "outside").write_bytes(good)
        place.symlink_to(folder.parent / "outside")
    with pytest.raises(DamagedFileError) as caught:
        TensorDict.load_memmap(folder)
    assert str(place) == caught.value.path


HUGE = 2**62
BAD: list[tuple[str, list[list[int]]]] = [
    ("j.offsets.memmap", [[0, 4, 11], [0, 12, 10], [-1, 4, 10], [1, 0, 10], [0, -4, 10]]),
    ("j.offsets.memmap", [[0, -HUGE, 10], [2**63 - 1, -(2**63), 10], [HUGE, HUGE, HUGE]]),
    ("j.lengths.memmap", [[2, 7], [-1, 5], [11, 0], [2, 2**63 - 1]]),
    ("s.sizes.memmap", [[2, 3, 4, 4], [2, 3, -4, -5], [2, 3, 2**32, 2**32], [0, HUGE, 0, HUGE]]),
    ("s.sizes.memmap", [[26, 1, 0, HUGE * 2 - 1], [-26, -1, 0, 0], [2, 13, HUGE, 4]]),
]


@pytest.mark.parametrize(("name", "bad"), [(name, row) for name, rows in BAD for row in rows])
def test_rows_that_do_not_lie_in_the_values(name: str, bad: list[int], folder: Path) -> None:
    (folder / name).write_bytes(torch.tensor(bad).numpy().tobytes())
    if bad == [26, 1, 0, HUGE * 2 - 1]:  # fits: the second row has nothing
        assert TensorDict.load_memmap(folder)["s"].unbind()[0].shape == (26, 1)
        return
    with pytest.raises(DamagedFileError, match="nested tensor") as caught:
        TensorDict.load_memmap(folder)
    assert caught.value.path == str(folder / name)


def test_offsets_that_overflow(tmp_path: Path) -> None:
    rows = [torch.zeros(i, 2) for i in range(4)]
    TensorDict(x=nested_tensor(rows[1:], layout=torch.jagged)).memmap(tmp_path)
    bad = torch.tensor([5, -(2**63), -1, 6])
    assert (bad.diff() > 0).all()
    (tmp_path / "x.offsets.memmap").write_bytes(bad.numpy().tobytes())
    with pytest.raises(DamagedFileError, match="do not lie in its values"):
        TensorDict.load_memmap(tmp_path)


def test_sizes_that_overflow(tmp_path: Path) -> None:
    TensorDict(x=nested_tensor([torch.zeros(0, 2, 2), torch.zeros(0, 2, 2)])).memmap(tmp_path)
    bad = torch.tensor([[0, HUGE, HUGE]] * 2)
    (tmp_path / "x.sizes.memmap").write_bytes(bad.numpy().tobytes())
    with pytest.raises(DamagedFileError, match="do not fit its values"):
        TensorDict.load_memmap(tmp_path)


def test_no_rows_of_some_dimensions(tmp_path: Path) -> None:
    TensorDict(x=nested_tensor([])).memmap(tmp_path)
    record = (tmp_path / "meta.json").read_text()
    assert "[0,0]" in record
    (tmp_path / "meta.json").write_text(record.replace("[0,0]", "[0,2]"))
    assert TensorDict.load_memmap(tmp_path)["x"].unbind() == ()


def without(part: str) -> Callable[[Any], Any]:
    return lambda entry: entry.pop(part)


@pytest.mark.parametrize(
    ("key", "change", "why"),
    [
        ("j", lambda entry: entry.update(ragged=0), "no dimension"),
        ("j", lambda entry: entry.update(ragged=3), "no dimension"),
        ("j", lambda entry: entry.update(ragged=True), "no dimension"),
        ("j", lambda entry: entry.update(ragged=None), "no dimension"),
        ("j", lambda entry: entry.update(ragged="strided"), "sizes of a nested tensor are missing"),
        ("s", lambda entry: entry.update(ragged=1), "offsets of a nested tensor are missing"),
        ("j", without("values"), "values of a nested tensor are missing"),
        ("j", without("offsets"), "offsets of a nested tensor are missing"),
        ("s", without("sizes"), "sizes of a nested tensor are missing"),
        ("j", lambda entry: entry.update(offsets=entry["values"]), "no row of integers"),
        ("j", lambda entry: entry.update(values=entry), "values of a nested tensor are missing"),
        ("j", lambda entry: entry["offsets"].update(dtype="float64"), "no row of integers"),
        ("j", lambda entry: entry["offsets"].update(shape=[1, 3]), "no row of integers"),
        ("j", lambda entry: entry["lengths"].update(file=3), "not the name of a file"),
        ("j", lambda entry: entry["lengths"].update(shape=[2, 1]), "do not fit its offsets"),
        ("s", lambda entry: entry["sizes"].update(dtype="uint64"), "no rows of integers"),
        ("s", lambda entry: entry["sizes"].update(shape=[4]), "no rows of integers"),
        ("s", lambda entry: entry["sizes"].update(shape=[1, 4]), "do not fit its values"),
        ("s", lambda entry: entry["values"].update(shape=[2, 13]), "do not fit its values"),
        ("s", lambda entry: entry["values"].update(file="../x"), "not the name of a file"),
    ],
)
def test_changed_records(key: str, change: Any, why: str, folder: Path) -> None:
    record = json.loads((folder / "meta.json").read_text())
    change(record["entries"][key])
    if record["entries"][key].get("values") is record["entries"][key]:
        record["entries"][key]["values"] = {"ragged": 1}
    (folder / "meta.json").write_text(json.dumps(record))
    with pytest.raises(DamagedFileError, match=why):
        TensorDict.load_memmap(folder)


def test_rows_of_another_number_than_the_batch(folder: Path) -> None:
    record = json.loads((folder / "meta.json").read_text())
    record["batch_size"] = [3]
    (folder / "meta.json").write_text(json.dumps(record))
    with pytest.raises(DamagedFileError, match="does not begin with the batch size"):
        TensorDict.load_memmap(folder)


def test_any_bytes_and_any_value_of_a_record(folder: Path) -> None:
    rng = random.Random(4)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for turn in range(400):
        file = rng.choice(files)
        good = file.read_bytes()
        if file.suffix == ".json" and turn % 4:
            file.write_text(json.dumps(changed(json.loads(good), rng)))
        else:
            bad = bytearray(good)
            start = rng.randrange(len(bad))
            bad[start : start + rng.choice((1, 1, 4))] = rng.randbytes(rng.choice((0, 1, 1, 4)))
            file.write_bytes(bad if rng.random() < 0.7 else bad[:start])
        begun = time.monotonic()
        try:
            td = TensorDict.load_memmap(folder)
            for key in td.keys(True, True):
                content(td[key]) if td[key].is_nested else td[key].tolist()
        except DamagedFileError as error:
            assert error.why and str(error.path)
        assert time.monotonic() - begun < 1
        file.write_bytes(good)
    assert content(TensorDict.load(folder)["j"]) == content(with_holes())


def test_an_interrupted_save_is_not_loaded(folder: Path, monkeypatch: Any) -> None:
    from raffia.tensordict import ragged

    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "full")

    monkeypatch.setattr(ragged, "write_atomically", full)
    future = TensorDict({"j": jagged()}, [2]).memmap(folder, num_threads=2, return_early=True)
    with pytest.raises(OSError, match="full"):
        future.result()
    with pytest.raises(DamagedFileError, match="saving was interrupted"):
        TensorDict.load_memmap(folder)
