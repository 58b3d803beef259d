"""What programs written for other containers do every day, and must not fail."""

import pickle

import numpy as np
import pytest
import torch

from raffia import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictParams,
    from_consolidated,
    lazy_stack,
    set_capture_non_tensor_stack,
    tensorclass,
)
from raffia.files import DamagedFileError
from tests.tensordict.invariants import sound


def rows():
    return TensorDict(a=torch.arange(3), s=["a", "b", "c"], d="x", batch_size=[3])


def stacked():
    return lazy_stack([TensorDict(a=torch.tensor(i), s=c, d="x") for i, c in enumerate("abc")])


both = pytest.mark.parametrize("make", [rows, stacked])


class TestWithTo:
    @pytest.mark.parametrize("td", [TensorDict(a=1, device="cpu"), stacked().to("cpu")])
    @pytest.mark.parametrize(
        "move",
        [
            lambda td: td.to("cpu"),
            lambda td: td.cpu(),
            lambda td: td.to(td),
            lambda td: td.to(td["a"].dtype),
        ],
    )
    def test_where_nothing_moves(self, td, move):
        with move(td) as there:
            there["b"] = torch.zeros(there.batch_size)
        assert "b" in td.keys() and sound(td)

    def test_to_nowhere(self):
        td = TensorDict(a=1)
        with td.to(None) as there:
            assert there is td


class TestWritingRows:
    @both
    @pytest.mark.parametrize(
        ("value", "index", "want"),
        [
            (np.array(7), 1, [0, 7, 2]),
            (np.int64(7), 1, [0, 7, 2]),
            (np.array([7]), 1, [0, 7, 2]),
            ([7], 1, [0, 7, 2]),
            (np.array([7, 8]), np.array([0, 1]), [7, 8, 2]),
            ([7, 8], slice(0, 2), [7, 8, 2]),
            (np.array([7.0, 8.0]), [0, 2], [7, 1, 8]),
            (True, 0, [1, 1, 2]),
        ],
    )
    def test_arrays_and_lists(self, make, value, index, want):
        td = make().set_at_("a", value, index)
        assert td["a"].tolist() == want and td["a"].dtype == torch.int64

    @both
    @pytest.mark.parametrize("method", ["update_at_", "copy_at_"])
    @pytest.mark.parametrize("locked", [False, True])
    def test_values_that_are_no_tensors(self, make, method, locked):
        td = make()
        td = td.lock_() if locked else td
        getattr(td, method)(TensorDict(a=5, s="n", d="m"), 1)
        assert td["a"].tolist() == [0, 5, 2]
        assert td["s"] == ["a", "n", "c"] and td["d"] == ["x", "m", "x"] and sound(td)
        two = TensorDict(a=[6, 7], s=["o", "p"], d="q", batch_size=[2])
        getattr(td, method)(two, slice(0, 2))
        assert td["s"] == ["o", "p", "c"] and td["d"] == ["q", "q", "x"] and sound(td)
        td.update_at_({"s": "last", "a": np.array([1])}, slice(2, 3))
        assert td["s"] == ["o", "p", "last"] and td["a"].tolist() == [6, 7, 1]

    def test_one_value_for_all_rows_of_an_entry_itself(self):
        with pytest.raises(RuntimeError, match="one value for all its rows"):
            NonTensorData("a", [2]).update_at_(NonTensorData("b"), 0)
        with pytest.raises(RuntimeError, match="Cannot update a NonTensorData"):
            NonTensorData("a", [2]).update(rows().get("s")[:2])

    def test_one_row_into_the_rows_of_a_mask(self):
        td = stacked()
        td[torch.tensor([True, False, True])] = TensorDict(a=[5], s=["n"], d="m", batch_size=[1])
        assert td["a"].tolist() == [5, 1, 5] and td["s"] == ["n", "b", "n"] and sound(td)
        td[torch.tensor([False, True, False])] = TensorDict(a=6, s="k", d="m")
        assert td["a"].tolist() == [5, 6, 5] and td["s"] == ["n", "k", "n"]
        with pytest.raises(RuntimeError, match="batch size"):
            td[:2] = TensorDict(a=[1, 2, 3], batch_size=[3])


class TestCompare:
    def make(self, size):
        inner = TensorDict(b=torch.ones(2, 3), batch_size=size)
        return TensorDict(a=torch.zeros(2, 3), n=inner, s="x", batch_size=size)

    def test_unlike_batch_sizes(self):
        for one, other in ((self.make([2]), self.make([])), (self.make([]), self.make([2]))):
            equal = one == other
            assert equal.batch_size == (2,) and equal.all() and sound(equal)
            assert not (one != other).any()

    def test_leaves_that_broadcast(self):
        equal = TensorDict(a=torch.zeros(2, 3), batch_size=[2]) == TensorDict(a=torch.zeros(3))
        assert equal.batch_size == (2,) and equal["a"].shape == (2, 3)

    def test_a_stack(self):
        td = stacked()
        assert (td == TensorDict(a=torch.arange(3), s=["a", "b", "c"], d="x")).batch_size == (3,)

    @pytest.mark.parametrize(("one", "other"), [([2], [2, 3]), ([2], [3])])
    def test_what_does_not_broadcast(self, one, other):
        with pytest.raises(RuntimeError, match="can't be compared"):
            TensorDict(batch_size=one) == TensorDict(batch_size=other)  # noqa: B015

    def test_a_result_that_has_not_the_batch_size(self):
        one, other = TensorDict(a=torch.zeros(3)), TensorDict(a=torch.zeros(2, 1), batch_size=[2])
        assert (one == other)["a"].shape == (2, 3)
        wide = TensorDict(a=torch.zeros(5, 2, 3))
        with pytest.raises(RuntimeError, match="entry 'a' has the shape"):
            wide == TensorDict(a=torch.zeros(2, 3), batch_size=[2])  # noqa: B015


class TestStacksOfUnlikeMembers:
    def make(self):
        return lazy_stack([TensorDict(a=torch.zeros(2, 3)), TensorDict(a=torch.ones(2, 4))])

    def test_vmap_is_refused(self):
        with pytest.raises(RuntimeError, match="lazy stack whose members differ"):
            torch.vmap(lambda row: row)(self.make())
        with pytest.raises(ValueError, match="same size in the mapped dimension"):
            torch.vmap(lambda row: row, (1,))(self.make())

    def test_tree_map_is_not(self):
        total = torch.utils._pytree.tree_map(lambda x: x.sum(), self.make())
        assert total["a"].tolist() == [0, 8]

    def test_extend_by_name(self):
        td = self.make()
        td.extend(tensordict=[TensorDict(a=torch.zeros(1, 1))])
        td.insert(index=0, tensordict=TensorDict(a=torch.zeros(1, 1)))
        assert td.batch_size == (4,)


class TestToWithABatchSize:
    def test_a_stack_refuses_it(self):
        with pytest.raises(TypeError, match="batch_size"):
            stacked().to(torch.float64, batch_size=[3])

    def test_parameters(self):
        inner = TensorDict(a=torch.zeros(3, 4), batch_size=[3], names=["m"])
        params = TensorDictParams(inner)
        for size, names in (([], []), ([3, 4], ["m", None])):
            out = params.to(torch.float64, batch_size=size)
            assert type(out) is TensorDictParams and out.batch_size == tuple(size)
            assert out.names == names and out["a"].dtype == torch.float64
        assert params.batch_size == (3,)
        assert params.to(batch_size=[]).batch_size == ()


class TestCompiledStacks:
    def make(self, i):
        inner = TensorDict(t="y", b=torch.zeros(3), batch_size=[3])
        return TensorDict(
            a=torch.full((3,), float(i)), s="x", w=["a", "b", "c"], n=inner, batch_size=[3]
        )

    def test_of_containers_that_hold_strings(self):
        torch._dynamo.reset()
        program = torch.compile(
            lambda x, y: torch.stack([x, y]).set("q", [["u"] * 3, ["v"] * 3]),
            fullgraph=True,
            backend="eager",
        )
        out = program(self.make(0), self.make(1))
        assert sound(out) and out["s"] == [["x"] * 3] * 2 and out["w"] == [["a", "b", "c"]] * 2
        assert out["n", "t"] == [["y"] * 3] * 2 and out["q"] == [["u"] * 3, ["v"] * 3]

    def test_the_setting_is_seen(self):
        torch._dynamo.reset()
        program = torch.compile(lambda x, y: torch.stack([x, y]), fullgraph=True, backend="eager")
        kinds = []
        for mode in (False, True, False):
            with set_capture_non_tensor_stack(mode):
                kinds.append(type(program(self.make(0), self.make(1)).get("s")))
        assert kinds == [NonTensorStack, NonTensorData, NonTensorStack]


class TestInPlace:
    def make(self):
        inner = TensorDict(b=torch.zeros(3, 4, 2), batch_size=[3, 4, 2])
        return TensorDict(a=torch.arange(12).view(3, 4), s="x", n=inner, batch_size=[3, 4])

    @pytest.mark.parametrize(
        ("method", "args"),
        [
            ("reshape", (12,)),
            ("reshape", (-1, 2)),
            ("gather", (1, torch.tensor([[0, 3], [1, 2], [3, 3]]))),
            ("pad", ([0, 1],)),
        ],
    )
    def test_is_the_other_way_round(self, method, args):
        td = self.make()
        inner, want = td["n"], getattr(td, method)(*args)
        assert getattr(td, method)(*args, inplace=True) is td
        assert td["n"] is inner and td.batch_size == want.batch_size and sound(td)
        assert (td == want).all()
        with pytest.raises(RuntimeError, match="Cannot modify locked"):
            getattr(self.make().lock_(), method)(*args, inplace=True)
        with pytest.raises(NotImplementedError, match="makes a new container"):
            getattr(self.make().to_lazystack(0), method)(*args, inplace=True)

    def test_gather_has_one_place_for_the_result(self):
        td, index = self.make(), torch.zeros(3, 1, dtype=torch.int64)
        with pytest.raises(ValueError, match="not both"):
            td.gather(1, index, out=td, inplace=True)

    def test_pad_unsafe(self):
        assert self.make().pad([0, 1], safe=False).batch_size == (4, 4)


class TestMap:
    @pytest.mark.parametrize("lazily", [False, True])
    @pytest.mark.parametrize("options", [{"chunksize": 2}, {"num_chunks": 3}, {"chunksize": 0}])
    def test_pieces_cut_at_once_or_one_by_one(self, lazily, options):
        td = TensorDict(a=torch.arange(10).view(2, 5), batch_size=[2, 5])
        options = {"dim": 1, "num_workers": 0, "index_with_generator": lazily, **options}
        seen = []
        out = td.map(lambda part: seen.append(part.batch_size) or part + 1, **options)
        assert torch.equal(out["a"], td["a"] + 1)
        assert len(seen) == {2: 3, 0: 5}.get(options.get("chunksize"), 3)

    def test_progress(self, capsys):
        td = TensorDict(a=torch.arange(4), batch_size=[4])
        td.map(lambda part: part, num_workers=0, chunksize=1, pbar=True)
        assert capsys.readouterr().err.endswith("3/4\rmap: 4/4\n")


class TestMappedFiles:
    def test_modes(self, tmp_path):
        td = TensorDict(a=torch.zeros(3), n=dict(b=torch.zeros(2))).memmap(tmp_path)
        read = TensorDict.load_memmap(tmp_path, mode="r")
        read["a"].fill_(1)
        read["n", "b"].fill_(1)
        assert not td["a"].any() and not td["n", "b"].any()
        TensorDict.load_memmap(tmp_path, mode="r+")["a"].fill_(2)
        assert td["a"].tolist() == [2, 2, 2]
        args = (td["a"].filename, torch.float32, (3,))
        MemoryMappedTensor.from_filename(*args, mode="r").fill_(3)
        assert td["a"].tolist() == [2, 2, 2]
        MemoryMappedTensor.from_filename(*args, mode="r+").fill_(3)
        assert td["a"].tolist() == [3, 3, 3]
        for call in (
            lambda: MemoryMappedTensor.from_filename(*args, mode="w"),
            lambda: TensorDict.load_memmap(tmp_path, mode="w"),
        ):
            with pytest.raises(ValueError, match="mode is"):
                call()

    def test_a_file_that_may_not_be_written(self, tmp_path, monkeypatch):
        TensorDict(a=torch.zeros(3)).memmap(tmp_path)
        monkeypatch.setattr("os.access", lambda path, mode: False)
        with pytest.raises(PermissionError):
            TensorDict.load_memmap(tmp_path, mode="r+")

    def test_a_part(self, tmp_path):
        td = TensorDict(m={"0": dict(w=torch.ones(2)), "x": 1}, a=torch.zeros(3))
        td.memmap(tmp_path)
        for subpath in (("m", "0"), "m/0", ["m", "0"]):
            got = TensorDict.load_memmap(tmp_path, subpath=subpath)
            assert list(got.keys()) == ["w"] and sound(got)
        assert set(TensorDict.load_memmap(tmp_path, subpath="m").keys()) == {"0", "x"}
        for subpath in ("nothing", "a", ("m", "x")):
            with pytest.raises(ValueError, match="no container was saved under"):
                TensorDict.load_memmap(tmp_path, subpath=subpath)


class TestUpdateWithTheBatchSize:
    def make(self, rows):
        inner = TensorDict(b=torch.ones(rows, 3), batch_size=[rows, 3])
        return TensorDict(a=torch.zeros(rows), n=inner, batch_size=[rows])

    def test_nested(self):
        td = self.make(2)
        inner = td["n"]
        td.update(self.make(4), update_batch_size=True)
        assert td.batch_size == (4,) and td["n"] is inner and inner.batch_size == (4, 3)
        assert sound(td)

    def test_some_keys(self):
        td = self.make(2)
        td.update(self.make(2)[:, None][:, [0]], keys_to_update=["a", "n"], update_batch_size=True)
        assert td.batch_size == (2, 1) and sound(td)

    def test_refused_leaves_it_as_it_was(self):
        td = self.make(2).set("other", torch.zeros(2))
        with pytest.raises(RuntimeError, match="other"):
            td.update(self.make(4), update_batch_size=True)
        assert td.batch_size == (2,) and td["a"].shape == (2,) and sound(td)

    def test_a_stack(self):
        td = lazy_stack([self.make(2), self.make(2)], 0)
        td.update(lazy_stack([self.make(4), self.make(4)], 0), update_batch_size=True)
        assert td.batch_size == (2, 4) and td["n"].batch_size == (2, 4, 3) and sound(td)
        with pytest.raises(RuntimeError, match="can't have the batch size"):
            td.update(self.make(4), update_batch_size=True)

    def test_some_keys_of_members_of_unlike_shapes(self):
        td = lazy_stack([TensorDict(a=torch.zeros(i + 1), b=1) for i in range(2)])
        td.update((td + 1).clone(), keys_to_update=["a"])
        assert [a.tolist() for a in td.get("a", as_list=True)] == [[1.0], [1.0, 1.0]]
        assert td["b"].tolist() == [1, 1]
        assert td.entry_class("a") is torch.Tensor


class TestErrorsOfTheRightKind:
    def test_keys(self):
        td = TensorDict(a=1)
        for call in (
            lambda: td.rename_key_("a", 1),
            lambda: td.rename_key_(1, "a"),
            lambda: td.select(1),
            lambda: td.exclude(["a"]),
            lambda: td.set(1, 1),
        ):
            for kind in (KeyError, TypeError, RuntimeError):
                with pytest.raises(kind, match="Only NestedKeys are supported"):
                    call()

    def test_sizes(self):
        for kind in (TypeError, ValueError):
            with pytest.raises(kind, match="a batch_size is"):
                TensorDict({}, "a")
        for kind in (IndexError, RuntimeError):
            with pytest.raises(kind, match="out of range"):
                LazyStackedTensorDict(TensorDict(), stack_dim=3)
        with pytest.raises(ValueError, match="need 2 names"):
            TensorDict(batch_size=[2, 3]).refine_names("x")

    def test_no_gradients(self):
        assert TensorDict().grad is None and TensorDict(a=dict()).grad is None


@tensorclass
class Step:
    obs: torch.Tensor
    text: str = "t"


class TestConsolidatedFile:
    def make(self):
        inner = TensorDict(c=torch.ones(2, 3, dtype=torch.bfloat16), s="x", batch_size=[2, 3])
        rows = lazy_stack([TensorDict(d=torch.tensor(i)) for i in range(2)])
        step = Step(obs=torch.zeros(2, 5), batch_size=[2])
        td = TensorDict(a=torch.arange(2), n=inner, rows=rows, step=step, batch_size=[2])
        td["none"] = torch.zeros(2, 0)
        td.names = ["t"]
        return td

    @pytest.mark.parametrize("options", [{}, {"use_buffer": True}, {"inplace": True}])
    def test_there_and_back(self, tmp_path, options):
        td, want = self.make(), self.make()
        out = td.consolidate(tmp_path / "td", **options)
        assert (out is td) is options.get("inplace", False)
        assert out.is_consolidated() and out.is_locked and sound(out) and (out == want).all()
        got = TensorDict.from_consolidated(tmp_path / "td")
        assert got.is_consolidated() and not got.is_locked and sound(got)
        assert (got == want).all() and got.names == ["t"] and got["n", "s"] == "x"
        assert type(got["step"]) is Step and isinstance(got.get("rows"), LazyStackedTensorDict)
        assert (pickle.loads(pickle.dumps(out)) == want).all()

    def test_what_is_written_into_it(self, tmp_path):
        out = self.make().consolidate(tmp_path / "td")
        out["a"].fill_(7)
        got = from_consolidated(tmp_path / "td")
        assert got["a"].tolist() == [7, 7]
        got["a"].fill_(8)
        assert from_consolidated(tmp_path / "td")["a"].tolist() == [7, 7]

    def test_a_future(self, tmp_path):
        for filename in (None, tmp_path / "td"):
            future = self.make().consolidate(filename, num_threads=2, return_early=True)
            out = future.result()
            assert out is future.result() and out.is_consolidated() and (out == self.make()).all()
        with pytest.raises(ValueError, match="return_early"):
            self.make().consolidate(num_threads=2, return_early=True, non_blocking=True)
        assert self.make().consolidate(return_early=True).is_consolidated()

    def test_a_second_time(self):
        out = self.make().consolidate()
        assert out.consolidate() is out
        again = out.consolidate(metadata=True)
        assert again is not out and again.consolidate(metadata=True) is again
        assert again.consolidate(share_memory=True) is not again

    @pytest.mark.parametrize("cut", [0, 1, 9, 30, 200])
    def test_a_damaged_file(self, tmp_path, cut):
        self.make().consolidate(tmp_path / "td")
        content = (tmp_path / "td").read_bytes()
        (tmp_path / "td").write_bytes(content[: len(content) - cut - 1])
        with pytest.raises(DamagedFileError):
            TensorDict.from_consolidated(tmp_path / "td")

    def test_a_record_that_lies(self, tmp_path):
        TensorDict(a=torch.zeros(4)).consolidate(tmp_path / "td")
        content = (tmp_path / "td").read_bytes()
        for old, new in ((b'"at":0', b'"at":8'), (b'"shape":[4]', b'"shape":[9]')):
            assert old in content
            (tmp_path / "td").write_bytes(content.replace(old, new))
            with pytest.raises(DamagedFileError, match="can't begin"):
                TensorDict.from_consolidated(tmp_path / "td")

    def test_what_is_not_one_block(self, tmp_path):
        sparse = torch.eye(2).to_sparse()
        with pytest.raises(TypeError, match="not one block of memory"):
            TensorDict(a=sparse, batch_size=[2]).consolidate()
        with pytest.raises(ValueError, match="mapped on the CPU"):
            self.make().consolidate(tmp_path / "td", device="meta")
        assert not (tmp_path / "td").exists()
