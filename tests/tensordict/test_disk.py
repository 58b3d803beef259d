"""Containers on disk: memory-mapped folders, one-file safetensors, damaged files."""

import json
import os
import pickle
import random
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

from raffia import (
    DamagedFileError,
    LazyStackedTensorDict,
    MemoryMappedTensor,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictParams,
    lazy_stack,
    load,
    load_memmap,
    memmap,
    save,
    tensorclass,
)

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
COMPLEX = [torch.complex64, torch.complex128]

AWKWARD = [
    "a.b", "a/b", "/abs", "../x", "..", ".", "a b", " ", "é木", "meta", "meta.json",
    "a.memmap", "_tensordict", "%2F", "a\\b", "a\nb", "con:", "~", "*", '"q"',
]  # fmt: skip
RESERVED = ["shape", "device", "_type", "_class", "dtype", "data", "type", "_names", "batch_size",
            "names", "stack_dim", "__metadata__", "_format_version", "non_tensor"]  # fmt: skip


@tensorclass
class Shot:
    x: torch.Tensor
    y: torch.Tensor = None
    tag: str = "d"


def sample():
    return TensorDict(
        a=torch.arange(6.0).reshape(2, 3),
        n=TensorDict(b=torch.arange(8, dtype=torch.int16).reshape(2, 4), batch_size=[2, 4]),
        s="hi",
        w=["p", "q"],
        batch_size=[2],
        names=["t"],
    )


def tree(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def same(got, expected):
    """Equal bit for bit: keys, shapes, dtypes, values, batch sizes, non-tensors."""
    assert set(got.keys()) == set(expected.keys())
    assert got.batch_size == expected.batch_size
    for key in expected.keys():
        want, have = expected.get(key), got.get(key)
        if isinstance(want, torch.Tensor):
            assert have.dtype == want.dtype and have.shape == want.shape, key
            assert raw(have) == raw(want), key
        elif isinstance(want, (NonTensorData, NonTensorStack)):
            assert have.tolist() == want.tolist(), key
        else:
            same(have, want)
    return True


def raw(t):
    t = t.detach().contiguous().clone().as_subclass(torch.Tensor)
    return bytes(t.reshape(-1).view(torch.uint8).tolist()) if t.numel() else b""


def numbers(dtype):
    t = torch.tensor([0, 1, 2, 3, 1, 0])
    return (t > 1 if dtype == torch.bool else t.to(dtype)).reshape(2, 3)


class TestFolder:
    def test_memmap_returns_a_mapped_copy(self, tmp_path):
        td = sample()
        m = td.memmap(tmp_path)
        assert m is not td and m.is_memmap() and m.is_locked and m["n"].is_locked
        assert isinstance(m["a"], MemoryMappedTensor) and isinstance(
            m["n", "b"], MemoryMappedTensor
        )
        assert m.device == torch.device("cpu")
        assert not td.is_memmap() and not td.is_locked and type(td["a"]) is torch.Tensor
        m["a"].fill_(9)
        assert td["a"][0, 1] == 1
        same(m.set_("a", td["a"]), td)

    @pytest.mark.parametrize(
        "take",
        [
            lambda td: td[0],
            lambda td: td[-1:],
            lambda td: td[..., 1],
            lambda td: td.unbind(1)[2],
            lambda td: td.split(1)[0],
            lambda td: list(td)[0],
        ],
    )
    def test_rows_are_mapped_and_locked(self, take, tmp_path):
        n = TensorDict(b=torch.ones(2, 3, 4), batch_size=[2, 3])
        m = TensorDict(a=torch.zeros(2, 3), n=n, batch_size=[2, 3]).memmap(tmp_path)
        row = take(m)
        assert row.is_memmap() and row.is_locked and row["n"].is_memmap()
        with pytest.raises(RuntimeError, match="locked"):
            row["new"] = torch.zeros(row.batch_size)
        row.set_("a", torch.full(row.batch_size, 7.0))
        assert (take(TensorDict.load_memmap(tmp_path))["a"] == 7).all()
        with pytest.raises(AttributeError, match="saved.path"):
            _ = row.saved_path
        row.unlock_()["new"] = torch.zeros(row.batch_size)
        assert not row.is_memmap() and m.is_memmap()

    def test_rows_that_are_copies_are_neither(self):
        m = TensorDict(a=torch.zeros(3), batch_size=[3]).memmap()
        for index in ([0, 1], torch.tensor([True, False, True])):
            assert not m[index].is_memmap() and not m[index].is_locked

    def test_lazy_stack_of_mapped_ones_is_mapped(self):
        m = TensorDict(a=torch.zeros(3), batch_size=[3]).memmap()
        assert lazy_stack([m, m]).is_memmap() and lazy_stack([m, m])[:, 0].is_memmap()
        assert not lazy_stack([m, m.clone().lock_()]).is_memmap()

    def test_files(self, tmp_path):
        sample().memmap(tmp_path)
        assert {"meta.json", "a.memmap", "n/meta.json", "n/b.memmap"} <= set(tree(tmp_path))
        assert (tmp_path / "a.memmap").stat().st_size == 24
        assert (tmp_path / "n" / "b.memmap").stat().st_size == 16
        json.loads((tmp_path / "meta.json").read_text())

    def test_memmap_in_place(self, tmp_path):
        td = sample()
        assert td.memmap_(tmp_path) is td
        assert td.is_memmap() and td.is_locked and isinstance(td["a"], MemoryMappedTensor)
        assert td.device == torch.device("cpu")
        with pytest.raises(RuntimeError, match="Cannot modify locked"):
            td["a"] = torch.zeros(2, 3)
        same(TensorDict.load_memmap(tmp_path), sample())

    def test_memmap_like(self, tmp_path):
        m = TensorDict(a=torch.ones(2, 3), s="x", batch_size=[2], names=["t"]).memmap_like(tmp_path)
        assert m.is_memmap() and m.is_locked and m["a"].shape == torch.Size([2, 3])
        assert m["a"].abs().sum() == 0 and m["s"] == "x" and m.names == ["t"]
        m["a"].fill_(3)
        assert TensorDict.load_memmap(tmp_path)["a"].unique().tolist() == [3.0]

    def test_memmap_like_of_an_expanded_row(self, tmp_path):
        row = TensorDict(a=torch.ones(3))
        m = row.expand(5).memmap_like(tmp_path)
        assert m.batch_size == torch.Size([5]) and (tmp_path / "a.memmap").stat().st_size == 60
        m[2] = row
        assert TensorDict.load_memmap(tmp_path)["a"].sum(1).tolist() == [0.0, 0.0, 3.0, 0.0, 0.0]

    def test_load(self, tmp_path):
        sample().memmap(tmp_path)
        for reader in (TensorDict.load_memmap, TensorDict.load, load_memmap, load):
            for path in (tmp_path, str(tmp_path)):
                back = reader(path)
                assert type(back) is TensorDict and same(back, sample())
        assert back.names == ["t"] and back["n"].batch_size == torch.Size([2, 4])
        assert isinstance(back["a"], MemoryMappedTensor) and back["s"] == "hi"

    def test_save_is_memmap(self, tmp_path):
        sample().save(tmp_path / "x" / "y")  # folders are made
        save(sample(), tmp_path / "z")
        memmap(sample(), tmp_path / "u")
        for p in ("x/y", "z", "u"):
            same(TensorDict.load(tmp_path / p), sample())

    def test_writes_reach_the_file(self, tmp_path):
        m = sample().memmap(tmp_path)
        other = TensorDict.load_memmap(tmp_path)
        other["a"].fill_(7)
        assert m["a"].unique().tolist() == [7.0]
        m.set_("a", torch.ones(2, 3))
        assert other["a"].sum() == 6
        other[0] = other[1] * 3
        assert m["a"][0].tolist() == [3.0] * 3
        m.set_at_("a", 9.0, 1)
        assert other["a"][1].tolist() == [9.0] * 3
        m.update_({"a": torch.full((2, 3), 6.0)})
        assert TensorDict.load_memmap(tmp_path)["a"].unique().tolist() == [6.0]
        m["n"].zero_()
        assert other["n", "b"].sum() == 0

    def test_writes_of_text_reach_the_file(self, tmp_path):
        m = sample().memmap(tmp_path)
        m.set_("s", "written")
        assert m["s"] == "written" and TensorDict.load_memmap(tmp_path)["s"] == "written"

    def test_other_processes_see_it(self, tmp_path):
        m = TensorDict(a=torch.arange(3.0)).memmap(tmp_path)
        f = str(tmp_path / "a.memmap")
        read = "import sys, struct; print(struct.unpack('3f', open(sys.argv[1], 'rb').read()))"
        write = "import sys, struct; open(sys.argv[1], 'r+b').write(struct.pack('3f', 7, 8, 9))"
        m["a"].mul_(2)
        out = subprocess.run(
            [sys.executable, "-c", read, f], capture_output=True, text=True, check=True
        )
        assert out.stdout.strip() == "(0.0, 2.0, 4.0)"
        subprocess.run([sys.executable, "-c", write, f], check=True)
        assert m["a"].tolist() == [7.0, 8.0, 9.0]

    def test_without_a_path(self):
        m = sample().memmap()
        assert m.is_memmap() and m.is_locked
        same(m, sample())

    def test_indexing_stays_mapped_computing_does_not(self, tmp_path):
        m = TensorDict(a=torch.arange(6.0).reshape(2, 3), batch_size=[2]).memmap(tmp_path)
        assert isinstance(m[0]["a"], MemoryMappedTensor)
        m[0]["a"].fill_(5)
        assert m["a"][0].tolist() == [5.0] * 3
        assert type((m + 1)["a"]) is torch.Tensor and not (m + 1).is_memmap()
        c = m.clone()
        assert type(c["a"]) is torch.Tensor and not c.is_locked and not c.is_memmap()

    def test_unlock_forgets_the_map(self, tmp_path):
        m = sample().memmap(tmp_path).unlock_()
        assert not m.is_memmap()
        m.set("b", torch.zeros(2))
        assert type(m["b"]) is torch.Tensor

    def test_saving_a_mapped_container_elsewhere(self, tmp_path):
        m = sample().memmap(tmp_path / "one")
        with pytest.raises(RuntimeError, match="copy_existing"):
            m.memmap(tmp_path / "two")
        m.memmap(tmp_path / "three", copy_existing=True)
        same(TensorDict.load_memmap(tmp_path / "three"), sample())

    def test_existsok(self, tmp_path):
        td = TensorDict(a=torch.zeros(3))
        td.memmap(tmp_path)
        TensorDict(a=torch.ones(3)).memmap(tmp_path)
        assert TensorDict.load_memmap(tmp_path)["a"].sum() == 3
        with pytest.raises(RuntimeError, match="exists"):
            td.memmap(tmp_path, existsok=False)

    def test_overwriting_drops_old_entries(self, tmp_path):
        sample().memmap(tmp_path)
        TensorDict(z=torch.ones(3)).memmap(tmp_path)
        back = TensorDict.load_memmap(tmp_path)
        assert list(back.keys()) == ["z"] and back.batch_size == torch.Size([])

    def test_overwriting_with_other_shapes(self, tmp_path):
        for n in (4, 9, 2):
            TensorDict(a=torch.full((n, 3), float(n))).memmap(tmp_path)
            same(TensorDict.load_memmap(tmp_path), TensorDict(a=torch.full((n, 3), float(n))))

    def test_saving_onto_its_own_files(self, tmp_path):
        sample().memmap(tmp_path)
        m = TensorDict.load_memmap(tmp_path)
        m.memmap(tmp_path)
        same(TensorDict.load_memmap(tmp_path), sample())

    def test_threads_and_futures(self, tmp_path):
        same(sample().memmap(tmp_path / "a", num_threads=2), sample())
        td = sample().select("a", "n")
        future = td.memmap(tmp_path / "b", num_threads=2, return_early=True)
        same(future.result(), td)
        same(TensorDict.load_memmap(tmp_path / "b"), td)

    def test_pickle_maps_the_same_file(self, tmp_path):
        m = TensorDict(a=torch.zeros(2, 3)).memmap(tmp_path)
        p = pickle.loads(pickle.dumps(m))
        assert isinstance(p["a"], MemoryMappedTensor) and p.is_locked
        p["a"].fill_(3)
        assert m["a"].sum() == 18

    def test_shared_and_mapped_exclude_each_other(self, tmp_path):
        with pytest.raises(RuntimeError, match="exclusive"):
            TensorDict(a=torch.zeros(2)).share_memory_().memmap_(tmp_path)
        with pytest.raises(RuntimeError, match="exclusive"):
            TensorDict(a=torch.zeros(2)).memmap_(tmp_path).share_memory_()

    def test_gradients_are_left_behind(self, tmp_path):
        td = TensorDict(a=torch.zeros(3, requires_grad=True), p=nn.Parameter(torch.ones(3)))
        m = td.memmap(tmp_path)
        assert isinstance(m["p"], MemoryMappedTensor) and not m["a"].requires_grad
        assert TensorDictParams(TensorDict(a=torch.zeros(2))).memmap(tmp_path / "x")["a"].sum() == 0
        assert type(TensorDict.load_memmap(tmp_path / "x")) is TensorDict

    def test_make_memmap(self, tmp_path):
        td = TensorDict(a=torch.zeros(2, 3), batch_size=[2]).memmap_(tmp_path)
        z = td.make_memmap("z", shape=(2, 5), dtype=torch.int32)
        assert (
            isinstance(z, MemoryMappedTensor)
            and td["z"].shape == torch.Size([2, 5])
            and td.is_locked
        )
        td.make_memmap_from_tensor(("n", "y"), torch.ones(2, 2))
        back = TensorDict.load_memmap(tmp_path)
        assert back["z"].dtype == torch.int32 and back["n", "y"].sum() == 4
        z.fill_(3)
        assert back["z"].sum() == 30
        with pytest.raises(RuntimeError, match="batch dimension mismatch"):
            td.make_memmap_from_tensor("bad", torch.ones(3, 2))
        with pytest.raises(RuntimeError, match="memory-mapped"):
            TensorDict(a=torch.zeros(2)).make_memmap("b", shape=(2,))

    def test_load_in_place(self, tmp_path):
        TensorDict(a=torch.full((2, 3), 4.0), batch_size=[2]).memmap(tmp_path)
        td = TensorDict(a=torch.zeros(2, 3), batch_size=[2])
        td.load_memmap_(tmp_path)
        assert td["a"].sum() == 24
        out = TensorDict(a=torch.zeros(2, 3), batch_size=[2])
        assert TensorDict.load_memmap(tmp_path, out=out)["a"].sum() == 24

    def test_device(self, tmp_path):
        TensorDict(a=torch.ones(2, 3)).memmap(tmp_path)
        assert TensorDict.load_memmap(tmp_path, device="cpu")["a"].sum() == 6
        assert TensorDict.load_memmap(tmp_path, device="meta")["a"].is_meta

    def test_missing_path(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            TensorDict.load_memmap(tmp_path / "nowhere")


class TestFolderContent:
    @pytest.mark.parametrize("dtype", [*DTYPES, *COMPLEX], ids=str)
    def test_dtypes(self, dtype, tmp_path):
        td = TensorDict(a=numbers(dtype))
        td.memmap(tmp_path)
        same(TensorDict.load_memmap(tmp_path), td)

    def test_shapes(self, tmp_path):
        td = TensorDict(
            scalar=torch.tensor(3.0),
            empty=torch.zeros(0, 4),
            turned=torch.arange(6).reshape(2, 3).T,
            wide=torch.ones(1, 3).expand(4, 3),
            strided=torch.arange(10)[::3],
        )
        td.memmap(tmp_path)
        same(TensorDict.load_memmap(tmp_path), td)

    def test_one_tensor_under_two_names(self, tmp_path):
        t = torch.arange(3.0)
        TensorDict(a=t, b=t).memmap(tmp_path)
        same(TensorDict.load_memmap(tmp_path), TensorDict(a=t, b=t))

    def test_empty_levels_and_batches(self, tmp_path):
        td = TensorDict({("b", "c"): torch.zeros(3), "e": TensorDict()}, batch_size=[3])
        td.memmap(tmp_path)
        back = TensorDict.load_memmap(tmp_path)
        same(back, td)
        assert back["e"].is_empty() and back["e"].batch_size == torch.Size([3])
        TensorDict(batch_size=[5]).memmap(tmp_path / "x")
        assert TensorDict.load_memmap(tmp_path / "x").batch_size == torch.Size([5])

    @pytest.mark.parametrize(
        "value",
        [
            1.5,
            True,
            None,
            "text",
            "é\n",
            [1, 2, "x"],
            {"a": "b"},
            ["a", ["b"]],
            {"k": [1, None]},
            7,
        ],
    )
    def test_json_values(self, value, tmp_path):
        TensorDict(x=torch.zeros(2), batch_size=[2]).set_non_tensor("o", value).memmap(tmp_path)
        back = TensorDict.load_memmap(tmp_path)
        assert back["o"] == value and type(back["o"]) is type(value)
        assert back.get("o").batch_size == torch.Size([2]) and back[0]["o"] == value

    def test_lists_of_text(self, tmp_path):
        td = TensorDict(w=[["a", "b", "c"], ["d", "e", "f"]], batch_size=[2, 3])
        td.memmap(tmp_path)
        back = TensorDict.load_memmap(tmp_path)
        assert isinstance(back.get("w"), NonTensorStack) and back.get("w").batch_size == torch.Size(
            [2, 3]
        )
        assert back[1, 2]["w"] == "f"

    def test_lazy_stack(self, tmp_path):
        lz = lazy_stack([TensorDict(a=torch.zeros(2), s="u"), TensorDict(a=torch.ones(3), s="v")])
        m = lz.memmap(tmp_path)
        assert isinstance(m, LazyStackedTensorDict) and m.is_memmap() and m.is_locked
        for back in (TensorDict.load_memmap(tmp_path), LazyStackedTensorDict.load_memmap(tmp_path)):
            assert isinstance(back, LazyStackedTensorDict) and back.batch_size == torch.Size([2])
            assert [v.shape[0] for v in back.get("a", as_list=True)] == [2, 3]
            assert back["s"] == ["u", "v"]

    def test_lazy_stack_dim_and_nesting(self, tmp_path):
        rows = [TensorDict(a=torch.full((4,), float(i)), batch_size=[4]) for i in range(2)]
        td = TensorDict(x=lazy_stack(rows, 1), batch_size=[4])
        td.memmap(tmp_path)
        back = TensorDict.load_memmap(tmp_path)["x"]
        assert isinstance(back, LazyStackedTensorDict)
        assert back.stack_dim == 1 and back.batch_size == torch.Size([4, 2])
        assert back["a"][0].tolist() == [0.0, 1.0]

    def test_lazy_stack_in_place(self, tmp_path):
        lz = lazy_stack([TensorDict(a=torch.zeros(2)), TensorDict(a=torch.ones(2))])
        assert lz.memmap_(tmp_path) is lz and lz.is_memmap() and lz.is_locked

    def test_tensorclass(self, tmp_path):
        TensorDict(p=Shot(x=torch.ones(2), tag="m", batch_size=[2]), batch_size=[2]).memmap(
            tmp_path
        )
        back = TensorDict.load_memmap(tmp_path)["p"]
        assert type(back) is Shot and back.tag == "m" and back.y is None and back.x.sum() == 2

    @pytest.mark.parametrize("key", AWKWARD)
    def test_awkward_keys(self, key, tmp_path):
        td = TensorDict({key: torch.ones(2), ("n", key): torch.zeros(3), "plain": torch.ones(1)})
        td.memmap(tmp_path / "in")
        same(TensorDict.load_memmap(tmp_path / "in"), td)
        assert os.listdir(tmp_path) == ["in"]  # nothing outside the folder

    def test_dots_do_not_nest(self, tmp_path):
        td = TensorDict(
            {"a.b": torch.ones(1), ("a", "b"): torch.zeros(2), ("a.b.c",): torch.ones(3)}
        )
        td.memmap(tmp_path)
        same(TensorDict.load_memmap(tmp_path), td)


class TestMappedTensor:
    def test_from_tensor(self, tmp_path):
        f = tmp_path / "x.memmap"
        t = MemoryMappedTensor.from_tensor(torch.arange(6.0).reshape(2, 3), filename=f)
        assert isinstance(t, torch.Tensor) and isinstance(t, MemoryMappedTensor)
        assert str(t.filename) == str(f) and f.stat().st_size == 24
        assert t.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
        turned = MemoryMappedTensor.from_tensor(torch.arange(6).reshape(2, 3).T)
        assert turned.tolist() == [[0, 3], [1, 4], [2, 5]]

    def test_two_maps_of_one_file(self, tmp_path):
        f = tmp_path / "x"
        t = MemoryMappedTensor.from_tensor(torch.zeros(2, 3), filename=f)
        u = MemoryMappedTensor.from_filename(f, dtype=torch.float32, shape=(2, 3))
        t.fill_(3)
        assert u.sum() == 18
        u[0] = 1
        assert t[0].tolist() == [1.0] * 3
        u[1].fill_(8)
        assert t[1].tolist() == [8.0] * 3
        part = MemoryMappedTensor.from_filename(f, dtype=torch.float32, shape=(2, 3), index=1)
        part.fill_(4)
        assert t[1].tolist() == [4.0] * 3

    def test_existing_files_are_respected(self, tmp_path):
        f = tmp_path / "x"
        t = MemoryMappedTensor.from_tensor(torch.ones(2), filename=f)
        with pytest.raises(RuntimeError, match="exists"):
            MemoryMappedTensor.from_tensor(torch.zeros(2), filename=f)
        MemoryMappedTensor.from_tensor(torch.zeros(2), filename=f, existsok=True)
        assert t.sum() == 0
        with pytest.raises(RuntimeError, match="copy_existing"):
            MemoryMappedTensor.from_tensor(t, filename=tmp_path / "y")
        MemoryMappedTensor.from_tensor(t, filename=tmp_path / "y", copy_existing=True)
        assert (tmp_path / "y").stat().st_size == 8

    @pytest.mark.parametrize("args", [(2, 3), ((2, 3),), (torch.Size([2, 3]),)])
    def test_makers(self, args):
        m = MemoryMappedTensor
        assert m.empty(*args).shape == torch.Size([2, 3])
        assert m.zeros(*args).sum() == 0 and m.ones(*args).sum() == 6
        assert m.full(*args, fill_value=4, dtype=torch.int8).tolist() == [[4] * 3] * 2
        assert m.ones(*args, dtype=torch.bool).dtype == torch.bool
        assert isinstance(m.zeros(*args), MemoryMappedTensor)

    def test_makers_like(self, tmp_path):
        m, t = MemoryMappedTensor, torch.ones(2, 3, dtype=torch.int16)
        for made, total in (
            (m.zeros_like(t), 0),
            (m.ones_like(t), 6),
            (m.full_like(t, 3, filename=tmp_path / "f"), 18),
        ):
            assert isinstance(made, m) and made.dtype == torch.int16 and made.sum() == total
        assert m.empty_like(t, filename=tmp_path / "e").shape == torch.Size([2, 3])
        assert (tmp_path / "f").stat().st_size == 12

    def test_makers_with_a_file(self, tmp_path):
        t = MemoryMappedTensor.zeros(2, filename=tmp_path / "z")
        t.fill_(1)
        assert (tmp_path / "z").read_bytes() == raw(torch.ones(2))
        assert MemoryMappedTensor.zeros(()).shape == torch.Size([])

    def test_what_stays_a_map(self, tmp_path):
        t = MemoryMappedTensor.from_tensor(torch.arange(6.0).reshape(2, 3), filename=tmp_path / "x")
        for view in (t[0], t[:, 1], t[0:1]):
            assert isinstance(view, MemoryMappedTensor)
        for result in (t + 1, t.clone(), t[torch.tensor([0])], torch.stack([t, t]), t.double()):
            assert type(result) is torch.Tensor
        t[:, 1].fill_(9)
        assert t.tolist() == [[0.0, 9.0, 2.0], [3.0, 9.0, 5.0]]

    def test_pickle(self, tmp_path):
        t = MemoryMappedTensor.from_tensor(torch.ones(3), filename=tmp_path / "x")
        u = pickle.loads(pickle.dumps(t))
        assert isinstance(u, MemoryMappedTensor)
        u.zero_()
        assert t.sum() == 0

    def test_refusals(self):
        with pytest.raises(RuntimeError, match="CPU"):
            MemoryMappedTensor.ones(2, device="cuda")
        with pytest.raises(RuntimeError, match="requires_grad"):
            MemoryMappedTensor.from_tensor(torch.ones(3, requires_grad=True))

    def test_repr(self):
        assert repr(MemoryMappedTensor.ones(2)) == "MemoryMappedTensor([1., 1.])"


# What follows goes beyond the published behaviour: no pickle, checked files, one-file saves.


def damaged():
    from raffia import DamagedFileError

    return DamagedFileError


def rewrite(path, change):
    """Apply `change(key_or_text_or_value)` to every key and value of a JSON file."""

    def walk(v):
        if isinstance(v, dict):
            return {change(k): walk(x) for k, x in v.items()}
        if isinstance(v, list):
            changed = change(v)
            return changed if changed is not v else [walk(x) for x in v]
        return change(v)

    before = json.loads(path.read_text())
    after = json.dumps(walk(before))
    assert after != json.dumps(before), "the record holds nothing to change"
    path.write_text(after)


def swap_value(old, new):
    return lambda v: new if type(v) is type(old) and v == old else v


@pytest.fixture
def folder(tmp_path):
    sample().memmap(tmp_path / "td")
    return tmp_path / "td"


@pytest.fixture
def one_file(tmp_path):
    f = tmp_path / "td.safetensors"
    sample().save(f)
    return f


class TestHandler:
    def test_another_tensor_over_a_temporary_file(self):
        x = MemoryMappedTensor.from_tensor(torch.arange(6))
        y = MemoryMappedTensor.from_handler(x._handler, torch.int64, (2, 3))
        path = x._handler.path
        y[0, 1] = 9
        assert x[1] == 9 and os.path.exists(path)
        part = MemoryMappedTensor.from_handler(x._handler, torch.int64, (2, 3), index=1)
        del x, y
        assert part.tolist() == [3, 4, 5] and os.path.exists(path)
        del part
        assert not os.path.exists(path)

    def test_only_of_such_a_file(self, tmp_path):
        x = MemoryMappedTensor.zeros(2, filename=tmp_path / "x")
        assert x._handler is None
        with pytest.raises(TypeError, match="from_filename"):
            MemoryMappedTensor.from_handler(x.filename, torch.float32, (2,))
        with pytest.raises(DamagedFileError, match="holds 8 bytes"):
            MemoryMappedTensor.from_handler(
                MemoryMappedTensor.zeros(2)._handler, torch.float32, (3,)
            )


class TestOursFolder:
    @pytest.mark.parametrize("dtype", FLOAT8, ids=str)
    def test_float8(self, dtype, tmp_path):
        td = TensorDict(a=torch.arange(6.0).to(dtype))
        td.memmap(tmp_path)
        same(TensorDict.load_memmap(tmp_path), td)

    @pytest.mark.parametrize("key", RESERVED)
    def test_keys_that_look_like_metadata(self, key, tmp_path):
        td = TensorDict({key: torch.ones(2), ("n", key): torch.zeros(3), ("t", key): "text"})
        td.memmap(tmp_path)
        same(TensorDict.load_memmap(tmp_path), td)

    def test_folders_and_files_do_not_collide(self, tmp_path):
        td = TensorDict({("n.memmap", "a"): torch.zeros(2), "n": torch.ones(2), "0": torch.ones(3)})
        td["meta.json"] = TensorDict(b=torch.zeros(1))
        td.memmap(tmp_path)
        same(TensorDict.load_memmap(tmp_path), td)

    def test_empty_key(self, tmp_path):
        td = TensorDict({"": torch.ones(2), ("n", ""): torch.zeros(3)})
        td.memmap(tmp_path)
        same(TensorDict.load_memmap(tmp_path), td)

    def test_a_smaller_overwrite_does_not_cut_a_live_map(self, tmp_path):
        TensorDict(a=torch.zeros(5000, 3)).memmap(tmp_path)
        before = (tmp_path / "a.memmap").stat()
        TensorDict(a=torch.zeros(2, 3)).memmap(tmp_path)
        after = (tmp_path / "a.memmap").stat()
        assert after.st_size == 24 and after.st_ino != before.st_ino

    def test_nothing_is_pickled(self, tmp_path, monkeypatch):
        def refuse(*args, **kwargs):
            raise AssertionError("pickle was used")

        for name in ("dump", "dumps", "load", "loads"):
            monkeypatch.setattr(pickle, name, refuse)
        for name in ("save", "load"):
            monkeypatch.setattr(torch, name, refuse)
        td = sample().set_non_tensor("o", {"k": [1, None]})
        td.memmap(tmp_path / "d")
        td.save(tmp_path / "d.safetensors")
        same(TensorDict.load(tmp_path / "d"), td)
        same(TensorDict.load(tmp_path / "d.safetensors"), td)

    def test_a_planted_pickle_is_not_opened(self, folder):
        class Bomb:
            def __reduce__(self):
                return (open, (str(folder / "boom"), "w"))

        blob = pickle.dumps(Bomb())
        for d in [folder, *(p for p in folder.rglob("*") if p.is_dir())]:
            (d / "other.pickle").write_bytes(blob)
        meta = folder / "s" / "meta.json"
        if meta.exists():
            record = json.loads(meta.read_text())
            record.pop("data", None)
            meta.write_text(json.dumps(record))
        try:
            TensorDict.load_memmap(folder)["s"]
        except damaged():
            pass
        assert not (folder / "boom").exists()


class TestOursRefusedValues:
    VALUES = (object(), range(2), {object()}, {1: object()}, [object()], lambda: 0, float)

    @pytest.mark.parametrize("nested", [False, True])
    @pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
    @pytest.mark.parametrize("where", ["folder", "file"])
    def test_error_names_the_key_and_nothing_is_written(self, value, nested, where, tmp_path):
        key = ("n", "oddkey") if nested else "oddkey"
        td = TensorDict({"a": torch.ones(2), ("n", "b"): torch.ones(3)}).set_non_tensor(key, value)
        target = tmp_path / ("x.safetensors" if where == "file" else "x")
        with pytest.raises((TypeError, ValueError), match="oddkey"):
            td.save(target)
        assert tree(tmp_path) == []

    def test_in_place_leaves_the_container_alone(self, tmp_path):
        td = TensorDict(a=torch.ones(2)).set_non_tensor("oddkey", object())
        with pytest.raises((TypeError, ValueError), match="oddkey"):
            td.memmap_(tmp_path)
        assert not td.is_memmap() and not td.is_locked and type(td["a"]) is torch.Tensor

    def test_an_older_save_survives(self, folder):
        bad = sample().set_non_tensor("oddkey", object())
        bad["a"] = torch.zeros(2, 3)
        with pytest.raises((TypeError, ValueError), match="oddkey"):
            bad.memmap(folder)
        same(TensorDict.load_memmap(folder), sample())


class TestOursDamagedError:
    def test_what_it_carries(self, folder):
        error = damaged()
        assert issubclass(error, RuntimeError)
        (folder / "a.memmap").unlink()
        with pytest.raises(error) as caught:
            TensorDict.load_memmap(folder)
        e = caught.value
        assert "a.memmap" in str(e.path) and isinstance(e.why, str) and e.why
        assert str(e.path) in str(e) and e.why in str(e)
        again = pickle.loads(pickle.dumps(e))  # crosses process borders
        assert type(again) is type(e) and str(again.path) == str(e.path) and again.why == e.why


class TestOursDamagedFolder:
    def fails(self, folder, part=""):
        with pytest.raises(damaged()) as caught:
            TensorDict.load_memmap(folder)
        assert part in str(caught.value.path)

    @pytest.mark.parametrize("name", ["a.memmap", "n/b.memmap"])
    @pytest.mark.parametrize("change", ["missing", "shorter", "empty", "longer"])
    def test_tensor_file(self, name, change, folder):
        f = folder / name
        size = f.stat().st_size
        if change == "missing":
            f.unlink()
        else:
            os.truncate(f, {"shorter": size - 1, "empty": 0, "longer": size + 4}[change])
        before = tree(folder)
        self.fails(folder, name.split("/")[-1])
        assert tree(folder) == before  # reading creates and grows nothing
        if change != "missing":
            assert f.stat().st_size != size

    def test_tensor_file_is_a_folder(self, folder):
        (folder / "a.memmap").unlink()
        (folder / "a.memmap").mkdir()
        self.fails(folder, "a.memmap")

    @pytest.mark.parametrize("name", ["", "n"])
    def test_missing_meta(self, name, folder):
        (folder / name / "meta.json").unlink()
        self.fails(folder, "meta.json" if not name else name)

    def test_missing_nested_folder(self, folder):
        shutil.rmtree(folder / "n")
        self.fails(folder, "n")

    def test_empty_folder(self, tmp_path):
        self.fails(tmp_path, "meta.json")

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "{bad",
            "null",
            "[]",
            "3",
            '"x"',
            "{}",
            '{"a": 1}',
            "[" * 100_000,
            "\x00",
            '{"a": NaN}',
        ],
        ids=lambda text: text[:10] or "empty",
    )
    @pytest.mark.parametrize("name", ["meta.json", "n/meta.json"])
    def test_meta_is_not_a_record(self, name, text, folder):
        (folder / name).write_text(text)
        self.fails(folder, "meta.json")

    def test_meta_is_not_utf8(self, folder):
        (folder / "meta.json").write_bytes(b'{"a": "\xff\xfe"}')
        self.fails(folder, "meta.json")

    @pytest.mark.parametrize(
        "dtype",
        ["torch.float64", "torch.int8", "torch.nope", "os.system", "float32; 1", "", "torch.nn"],
    )
    def test_wrong_dtype(self, dtype, folder):
        rewrite(folder / "meta.json", lambda v: dtype if v in ("torch.float32", "float32") else v)
        self.fails(folder)

    @pytest.mark.parametrize(
        "shape",
        [
            [3, 3],
            [2, 2],
            [2],
            [],
            [-2, -3],
            [2, -3],
            [2.0, 3],
            ["2", 3],
            [2**62, 2**62],
            [2, 10**30],
            [6, 1],
            [None, 3],
        ],
    )
    def test_wrong_shape(self, shape, folder):
        rewrite(folder / "meta.json", swap_value([2, 3], shape))
        self.fails(folder)

    @pytest.mark.parametrize("batch", [[3], [-2], [2, 4], ["2"], [10**30], [2.5]])
    def test_wrong_batch_size(self, batch, folder):
        rewrite(folder / "meta.json", swap_value([2], batch))
        self.fails(folder)

    @pytest.mark.parametrize("name", ["../outside", "../../outside", "sub/../../outside", "ABS"])
    def test_names_do_not_lead_outside(self, name, folder):
        outside = folder.parent / "outside.memmap"
        shutil.copy(folder / "a.memmap", outside)
        shutil.copytree(folder / "n", folder.parent / "outside")
        new = str(folder.parent / "outside") if name == "ABS" else name

        def change(v):
            return new + v[1:] if v in ("a", "a.memmap") else v

        rewrite(folder / "meta.json", change)
        self.fails(folder)

    def test_nested_names_do_not_lead_outside(self, folder):
        shutil.copytree(folder / "n", folder.parent / "outside")
        rewrite(folder / "meta.json", lambda v: "../outside" if v == "n" else v)
        self.fails(folder)

    @pytest.mark.parametrize(
        "cls",
        ["os.system", "<class 'os.system'>", "subprocess:Popen", "builtins.eval", "no.such.Module"],
    )
    def test_unknown_class(self, cls, folder):
        rewrite(
            folder / "meta.json", lambda v: cls if isinstance(v, str) and "TensorDict" in v else v
        )
        self.fails(folder)

    def test_class_of_a_damaged_level_is_not_imported(self, folder, monkeypatch):
        (folder.parent / "planted_module.py").write_text(
            "import pathlib; pathlib.Path('boom').touch()"
        )
        monkeypatch.syspath_prepend(str(folder.parent))
        monkeypatch.chdir(folder.parent)
        rewrite(
            folder / "meta.json",
            lambda v: "planted_module.Thing" if isinstance(v, str) and "TensorDict" in v else v,
        )
        self.fails(folder)
        assert not (folder.parent / "boom").exists() and "planted_module" not in sys.modules

    def test_lazy_stack_with_a_missing_member(self, tmp_path):
        lazy_stack([TensorDict(a=torch.zeros(2)), TensorDict(a=torch.ones(3))]).memmap(tmp_path)
        member = tmp_path / "1"
        shutil.rmtree(member)
        with pytest.raises(damaged()):
            TensorDict.load_memmap(tmp_path)

    def test_random_changes_of_the_record(self, folder):
        rng = random.Random(0)
        metas = sorted(folder.rglob("meta.json"))
        for _ in range(300):
            meta = rng.choice(metas)
            good = meta.read_bytes()
            bad = bytearray(good)
            for _ in range(rng.choice((1, 1, 3))):
                bad[rng.randrange(len(bad))] = rng.randrange(256)
            if rng.random() < 0.2:
                bad = bad[: rng.randrange(len(bad))]
            meta.write_bytes(bad)
            try:
                TensorDict.load_memmap(folder)
            except damaged():
                pass  # any other error fails the test
            finally:
                meta.write_bytes(good)
        same(TensorDict.load_memmap(folder), sample())


class TestOursMappedTensor:
    def test_missing_file_is_not_created(self, tmp_path):
        with pytest.raises((FileNotFoundError, damaged())):
            MemoryMappedTensor.from_filename(tmp_path / "no", dtype=torch.float32, shape=(2,))
        assert tree(tmp_path) == []

    def test_short_file_is_not_grown(self, tmp_path):
        f = tmp_path / "x"
        MemoryMappedTensor.from_tensor(torch.zeros(2, 3), filename=f)
        with pytest.raises(damaged(), match="x"):
            MemoryMappedTensor.from_filename(f, dtype=torch.float32, shape=(2, 4))
        assert f.stat().st_size == 24

    @pytest.mark.parametrize("shape", [(0, 3), (0,)])
    def test_empty(self, shape, tmp_path):
        assert MemoryMappedTensor.zeros(*shape).shape == torch.Size(shape)
        t = MemoryMappedTensor.from_tensor(torch.zeros(shape), filename=tmp_path / "x")
        assert t.shape == torch.Size(shape)


class TestOursSafetensors:
    def test_one_file(self, one_file):
        assert os.listdir(one_file.parent) == ["td.safetensors"] and one_file.is_file()
        for reader in (TensorDict.load, load):
            for path in (one_file, str(one_file)):
                back = reader(path)
                assert type(back) is TensorDict and same(back, sample())
        assert back.names == ["t"] and back.device is None
        assert back["n"].batch_size == torch.Size([2, 4]) and back["w"] == ["p", "q"]

    def test_other_readers_can_open_it(self, one_file):
        from safetensors.torch import load_file

        found = list(load_file(str(one_file)).values())
        assert sorted(t.numel() for t in found if t.dtype in (torch.float32, torch.int16)) == [6, 8]

    def test_saving_twice_gives_equal_bytes(self, one_file):
        first = one_file.read_bytes()
        sample().save(one_file)
        assert one_file.read_bytes() == first

    def test_folders_are_made_and_function_form(self, tmp_path):
        save(sample(), str(tmp_path / "x" / "y" / "z.safetensors"))
        same(load(tmp_path / "x" / "y" / "z.safetensors"), sample())

    def test_saving_leaves_the_container_alone(self, tmp_path):
        td = sample()
        td.save(tmp_path / "x.safetensors")
        assert not td.is_locked and not td.is_memmap() and type(td["a"]) is torch.Tensor

    def test_loaded_values_are_independent_of_the_file(self, one_file):
        back = TensorDict.load(one_file)
        one_file.unlink()
        same(back, sample())

    @pytest.mark.parametrize("dtype", [*DTYPES, *FLOAT8], ids=str)
    def test_dtypes(self, dtype, tmp_path):
        td = TensorDict(a=numbers(torch.float32).to(dtype) if dtype in FLOAT8 else numbers(dtype))
        td.save(tmp_path / "x.safetensors")
        same(TensorDict.load(tmp_path / "x.safetensors"), td)

    @pytest.mark.parametrize("dtype", COMPLEX, ids=str)
    def test_complex_is_kept_or_refused(self, dtype, tmp_path):
        td = TensorDict({("n", "wave"): torch.tensor([1 + 2j, -3j], dtype=dtype)})
        try:
            td.save(tmp_path / "x.safetensors")
        except (TypeError, ValueError) as e:
            assert "wave" in str(e) and "complex" in str(e) and tree(tmp_path) == []
        else:
            same(TensorDict.load(tmp_path / "x.safetensors"), td)

    def test_bits_of_special_values(self, tmp_path):
        bits = torch.tensor([0x7FC00001, 0x7F800000, -1, -(2**31), 1, 0], dtype=torch.int32)
        td = TensorDict(a=bits.view(torch.float32))
        td.save(tmp_path / "x.safetensors")
        assert (
            TensorDict.load(tmp_path / "x.safetensors")["a"].view(torch.int32).tolist()
            == bits.tolist()
        )

    def test_shapes_views_and_ties(self, tmp_path):
        t = torch.arange(12.0).reshape(3, 4)
        td = TensorDict(
            scalar=torch.tensor(3.0),
            empty=torch.zeros(0, 4),
            turned=t.T,
            wide=torch.ones(1, 3).expand(4, 3),
            strided=t[:, ::2],
            row=t[1],
            whole=t,
            again=t,
            n=TensorDict(tied=t, grad=nn.Parameter(t)),
        )
        td.save(tmp_path / "x.safetensors")
        same(TensorDict.load(tmp_path / "x.safetensors"), td)

    def test_no_tensors_at_all(self, tmp_path):
        for i, td in enumerate(
            (
                TensorDict(),
                TensorDict(batch_size=[3]),
                TensorDict(s="x"),
                TensorDict(n=TensorDict(e=TensorDict())),
            )
        ):
            td.save(tmp_path / f"{i}.safetensors")
            same(TensorDict.load(tmp_path / f"{i}.safetensors"), td)

    @pytest.mark.parametrize("key", [*AWKWARD, *RESERVED, ""])
    def test_awkward_keys(self, key, tmp_path):
        td = TensorDict({key: torch.ones(2), ("n", key): torch.zeros(3), ("t", key): "text"})
        td.save(tmp_path / "x.safetensors")
        same(TensorDict.load(tmp_path / "x.safetensors"), td)

    def test_flat_and_nested_names_do_not_collide(self, tmp_path):
        keys = [
            "a.b",
            ("a", "b"),
            "a/b",
            ("a.b.c", "d"),
            ("a", "b.c", "d"),
            ("a", "c", "d"),
            "a.c.d",
        ]
        td = TensorDict({key: torch.ones(i + 1) for i, key in enumerate(keys)})
        td.save(tmp_path / "x.safetensors")
        same(TensorDict.load(tmp_path / "x.safetensors"), td)

    @pytest.mark.parametrize(
        "value", [1.5, True, None, "é\n\0", [1, "x"], {"a": {"b": [None]}}, 7, ""]
    )
    def test_json_values(self, value, tmp_path):
        TensorDict(x=torch.zeros(2), batch_size=[2]).set_non_tensor("o", value).save(
            tmp_path / "x.safetensors"
        )
        back = TensorDict.load(tmp_path / "x.safetensors")
        assert back["o"] == value and type(back["o"]) is type(value)
        assert back.get("o").batch_size == torch.Size([2])

    def test_classes(self, tmp_path):
        f = tmp_path / "x.safetensors"
        rows = [
            TensorDict(a=torch.full((4,), float(i)), s=str(i), batch_size=[4]) for i in range(2)
        ]
        td = TensorDict(
            p=Shot(x=torch.ones(4), tag="m", batch_size=[4]),
            lz=lazy_stack(rows, 1),
            uneven=lazy_stack([TensorDict(v=torch.zeros(i + 1), batch_size=[]) for i in range(4)]),
            batch_size=[4],
        )
        td.save(f)
        back = TensorDict.load(f)
        assert type(back["p"]) is Shot and back["p"].tag == "m" and back["p"].y is None
        assert isinstance(back["lz"], LazyStackedTensorDict) and back["lz"].stack_dim == 1
        assert back["lz"]["a"][0].tolist() == [0.0, 1.0]
        assert [len(v) for v in back["uneven"].get("v", as_list=True)] == [1, 2, 3, 4]
        Shot(x=torch.ones(3), batch_size=[3]).save(f)
        assert type(TensorDict.load(f)) is Shot and type(Shot.load(f)) is Shot

    def test_params(self, tmp_path):
        TensorDictParams(TensorDict(w=torch.ones(2), n=TensorDict(b=torch.zeros(3)))).save(
            tmp_path / "x.safetensors"
        )
        back = TensorDict.load(tmp_path / "x.safetensors")
        assert back["w"].sum() == 2 and back["n", "b"].shape == torch.Size([3])

    def test_mapped_containers_can_be_saved(self, folder, tmp_path):
        TensorDict.load_memmap(folder).save(tmp_path / "x.safetensors")
        back = TensorDict.load(tmp_path / "x.safetensors")
        same(back, sample())
        assert not isinstance(back["a"], MemoryMappedTensor)

    def test_missing_file(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            TensorDict.load(tmp_path / "no.safetensors")


class TestOursAtomicSave:
    @pytest.mark.parametrize("old", [True, False])
    def test_a_crash_before_the_rename(self, old, tmp_path, monkeypatch):
        f = tmp_path / "x.safetensors"
        if old:
            sample().save(f)

        def crash(*args, **kwargs):
            raise OSError("power cut")

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", crash)
            patch.setattr(os, "rename", crash)
            with pytest.raises(OSError, match="power cut"):
                TensorDict(a=torch.zeros(50)).save(f)
        assert tree(tmp_path) == (["x.safetensors"] if old else [])  # no debris either
        if old:
            same(TensorDict.load(f), sample())
        TensorDict(a=torch.zeros(50)).save(f)
        assert TensorDict.load(f)["a"].shape == torch.Size([50])

    def test_data_is_synced_before_the_rename(self, tmp_path, monkeypatch):
        events = []

        def spy(name, event):
            original = getattr(os, name)
            monkeypatch.setattr(
                os, name, lambda *a, **k: (events.append(event), original(*a, **k))[1]
            )

        spy("fsync", "sync")
        spy("replace", "rename")
        spy("rename", "rename")
        sample().save(tmp_path / "x.safetensors")
        assert events.index("sync") < events.index("rename")

    def test_a_failing_save_leaves_the_old_file(self, one_file):
        with pytest.raises((TypeError, ValueError), match="oddkey"):
            sample().set_non_tensor("oddkey", object()).save(one_file)
        same(TensorDict.load(one_file), sample())
        assert tree(one_file.parent) == ["td.safetensors"]

    def test_readers_of_the_old_file_are_not_disturbed(self, one_file):
        back = TensorDict.load(one_file)
        TensorDict(a=torch.zeros(500)).save(one_file)
        same(back, sample())


class TestOursDamagedSafetensors:
    def fails(self, f):
        with pytest.raises(damaged()) as caught:
            TensorDict.load(f)
        assert str(caught.value.path) == str(f) and caught.value.why

    def test_every_length(self, one_file):
        good = one_file.read_bytes()
        for n in (*range(0, len(good), 7), len(good) - 1):
            one_file.write_bytes(good[:n])
            self.fails(one_file)

    def test_longer(self, one_file):
        one_file.write_bytes(one_file.read_bytes() + b"\0" * 8)
        self.fails(one_file)

    @pytest.mark.slow
    def test_every_byte_with_one_flipped_bit(self, one_file):
        good = one_file.read_bytes()
        for i in range(len(good)):
            bad = bytearray(good)
            bad[i] ^= 1 << (i % 8)
            one_file.write_bytes(bad)
            self.fails(one_file)
        one_file.write_bytes(good)
        same(TensorDict.load(one_file), sample())

    @pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**40, 0, 1])
    def test_header_length(self, length, one_file):
        one_file.write_bytes(length.to_bytes(8, "little") + one_file.read_bytes()[8:])
        self.fails(one_file)

    @pytest.mark.parametrize(
        "blob", [b"", b"\0" * 8, b"not a tensor file", b"PK\x03\x04" * 9, b"\x80\x04" * 20]
    )
    def test_something_else(self, blob, one_file):
        one_file.write_bytes(blob)
        self.fails(one_file)

    def test_swapped_tensors(self, tmp_path):
        f = tmp_path / "x.safetensors"
        TensorDict(a=torch.zeros(2), b=torch.ones(2)).save(f)
        good = f.read_bytes()
        f.write_bytes(good[:-16] + good[-8:] + good[-16:-8])
        self.fails(f)

    def test_random_changes(self, one_file):
        rng = random.Random(0)
        good = one_file.read_bytes()
        for _ in range(200):
            bad = bytearray(good)
            start, n = rng.randrange(len(bad)), rng.choice((1, 2, 8))
            bad[start : start + n] = bytes(
                rng.randrange(256) for _ in range(rng.choice((0, n, n + 3)))
            )
            if bytes(bad) == good:
                continue
            one_file.write_bytes(bad)
            self.fails(one_file)


class TestTemporaryFiles:
    """Small tensors without a folder share one temporary file, which goes with the last of them."""

    def container(self):
        entries = {
            "a": torch.arange(3, dtype=torch.int8),
            "b": torch.arange(6.0, dtype=torch.float64).view(2, 3).t(),
            "none": torch.zeros(0, 2),
            "n": {"c": torch.tensor([1 + 2j, 3]), "d": torch.tensor(True)},
            "wide": torch.ones(1, 2).expand(4, 2),
        }
        return TensorDict(entries)

    def files(self, folder):
        return sorted(folder.glob("raffia-*.memmap"))

    @pytest.fixture
    def temporary(self, tmp_path, monkeypatch):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        return tmp_path

    @pytest.mark.parametrize("num_threads", [0, 2])
    @pytest.mark.parametrize("how", ["memmap", "memmap_", "memmap_like"])
    def test_one_file_for_all_small_ones(self, how, num_threads, temporary):
        source = self.container()
        td = getattr(self.container(), how)(num_threads=num_threads)
        assert len([f for f in self.files(temporary) if f.stat().st_size]) == 1
        expected = source.apply(torch.zeros_like) if how == "memmap_like" else source
        assert (td == expected).all()
        for key in source.keys(True, True):
            assert td[key].dtype == source[key].dtype
            assert td[key].is_contiguous()
            assert td[key].data_ptr() % td[key].dtype.itemsize == 0
        td["a"].fill_(5)  # and into no other
        td["n", "d"].fill_(False)
        assert (td.exclude("a", "n") == expected.exclude("a", "n")).all()
        assert (td["n", "c"] == expected["n", "c"]).all()
        kept = td["n", "c"]
        del td
        assert len(self.files(temporary)) == 1
        del kept
        assert self.files(temporary) == []

    def test_large_ones_have_their_own(self, temporary, monkeypatch):
        monkeypatch.setattr("raffia.tensordict.folder_writer.SMALL", 16)
        td = TensorDict(a=torch.ones(4), b=torch.ones(5), c=torch.ones(4)).memmap()
        assert [f.stat().st_size for f in self.files(temporary)].count(20) == 1
        assert len(self.files(temporary)) == 2
        assert (td == 1).all()
        del td
        assert self.files(temporary) == []

    def test_pickled_entries_see_what_is_written(self, temporary):
        td = self.container().memmap()
        for key in td.keys(True, True):
            twin = pickle.loads(pickle.dumps(td[key]))
            assert torch.equal(twin, td[key])
            td[key].fill_(1)
            assert torch.equal(twin, td[key])
        twin = pickle.loads(pickle.dumps(td))
        td["b"].fill_(7)
        assert (twin["b"] == 7).all()

    def test_a_row_that_is_indexed_is_in_the_file(self, temporary):
        td = self.container().memmap()
        row = td["b"][1]
        row.fill_(9)
        assert td["b"][1].tolist() == [9, 9]
        assert pickle.loads(pickle.dumps(row)).tolist() == [9, 9]
