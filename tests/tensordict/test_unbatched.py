"""`UnbatchedTensor`: a tensor that belongs to a whole batch."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from raffia import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictParams,
    UnbatchedTensor,
    is_non_tensor,
    is_tensor_collection,
    lazy_stack,
    pad,
    set_printoptions,
    tensorclass,
)
from raffia.data import TensorStorage

TABLE = torch.arange(12.0).view(3, 4)
ROWS = torch.arange(30.0).view(2, 3, 5)


def held() -> TensorDict:
    nested = TensorDict({"u": UnbatchedTensor(torch.arange(7)), "c": ROWS + 1}, [2, 3])
    return TensorDict({"a": UnbatchedTensor(TABLE.clone()), "b": ROWS.clone(), "n": nested}, [2, 3])


def plain(td: Any) -> Any:
    return td.select("b", ("n", "c"))


MOVES: dict[str, Callable[[Any], Any]] = {
    "int": lambda td: td[1],
    "slice": lambda td: td[:1],
    "None": lambda td: td[None],
    "mask": lambda td: td[torch.tensor([True, False])],
    "rows": lambda td: td[torch.tensor([1, 1, 0, 0])],
    "ellipsis": lambda td: td[..., 0],
    "reshape": lambda td: td.reshape(6),
    "view": lambda td: td.view(3, 2),
    "unsqueeze": lambda td: td.unsqueeze(1),
    "squeeze": lambda td: td[:1].squeeze(0),
    "permute": lambda td: td.permute(1, 0),
    "transpose": lambda td: td.transpose(0, 1),
    "flatten": lambda td: td.flatten(0, 1),
    "unflatten": lambda td: td.unflatten(1, (3, 1)),
    "expand": lambda td: td.expand(4, 2, 3),
    "repeat": lambda td: td.repeat(2, 1),
    "repeat_interleave": lambda td: td.repeat_interleave(2, dim=0),
    "split": lambda td: td.split(2, 1)[1],
    "chunk": lambda td: td.chunk(2)[0],
    "unbind": lambda td: td.unbind(1)[2],
    "gather": lambda td: td.gather(0, torch.zeros(1, 3, dtype=torch.int64)),
    "masked_select": lambda td: td.masked_select(torch.eye(2, 3, dtype=torch.bool)),
    "flip": lambda td: td.flip(0),
    "roll": lambda td: td.roll(1, 0),
    "pad": lambda td: pad(td, [0, 1, 0, 0]),
    "sum": lambda td: td.sum(0),
    "mean": lambda td: td.mean(dim=1),
    "stack": lambda td: torch.stack([td, td], 1),
    "cat": lambda td: torch.cat([td, td], 1),
    "lazy_stack": lambda td: lazy_stack([td, td.clone()], 2),
    "lazy row": lambda td: lazy_stack([td, td.clone()], 2)[0],
    "dense": lambda td: lazy_stack([td, td.clone()], 2).contiguous(),
    "apply": lambda td: td.apply(lambda x: x[0], batch_size=[3]),
}


class TestShapes:
    @pytest.mark.parametrize("name", list(MOVES))
    def test_it_is_left_alone(self, name: str) -> None:
        move = MOVES[name]
        moved, rest = move(held()), move(plain(held()))
        assert moved.batch_size == rest.batch_size
        assert torch.equal(moved["b"], rest["b"])
        for key, value in ((("a",), TABLE), (("n", "u"), torch.arange(7))):
            entry = moved[key]
            assert type(entry) is UnbatchedTensor
            assert torch.equal(entry.as_subclass(Tensor), value)
            assert entry.batch_size == moved.batch_size

    def test_rows_share_it(self) -> None:
        td = held()
        assert td[0]["a"].data_ptr() == td["a"].data_ptr() == td.view(-1)["a"].data_ptr()

    @pytest.mark.parametrize("join", [torch.stack, torch.cat])
    def test_unlike_ones_are_not_joined(self, join: Callable[..., Any]) -> None:
        with pytest.raises(RuntimeError, match="need the same one"):
            join([held(), held() + 1])
        with pytest.raises(RuntimeError, match="need the same one"):
            join([held(), held().set("a", UnbatchedTensor(torch.zeros(3)))])
        with pytest.raises((RuntimeError, TypeError), match="Tensor"):
            join([held(), held().set("a", ROWS)])

    def test_of_a_lazy_stack(self) -> None:
        stack = lazy_stack([held(), held() + 1])
        assert torch.equal(stack[1]["a"], TABLE + 1)
        with pytest.raises(RuntimeError, match="need the same one"):
            stack["a"]
        stack["a"] = UnbatchedTensor(torch.ones(4))
        assert isinstance(stack, LazyStackedTensorDict)
        assert stack["a"].shape == (4,)
        assert stack["a"].batch_size == (2, 2, 3)
        assert stack[0]["a"].batch_size == (2, 3)

    def test_batch_size(self) -> None:
        td = held().auto_batch_size_()
        assert td.batch_size == (2, 3, 5)
        assert td["n", "u"].batch_size == (2, 3, 5)
        td.batch_size = [2]
        assert td["a"].batch_size == (2,)
        with pytest.raises(RuntimeError, match="'b'"):
            td.batch_size = [3]
        assert td["a"].batch_size == (2,)

    def test_names(self) -> None:
        td = held()
        td.names = ["x", "t"]
        assert td["n"].names == ["x", "t"]
        assert td[0]["a"].shape == (3, 4)
        td["z"] = UnbatchedTensor(torch.ones(2))
        assert td.transpose(0, 1).names == ["t", "x"]


class TestMaths:
    def test_it_is_reached(self) -> None:
        td = held()
        for out in (td + 1, td.apply(lambda x: x + 1), td + td.apply(torch.ones_like)):
            assert torch.equal(out["a"], TABLE + 1)
            assert type(out["a"]) is UnbatchedTensor
            assert out["a"].batch_size == (2, 3)
            assert torch.equal(out["b"], ROWS + 1)
        assert td.to(torch.float64)["a"].dtype is torch.float64
        assert td.float()["n", "u"].dtype is torch.float32
        td += 1
        assert torch.equal(td["a"], TABLE + 1)
        td.zero_()
        assert not td["a"].any()
        assert td.add(held(), default=0.0)["a"].sum() == TABLE.sum()

    def test_comparisons(self) -> None:
        assert (held() == held()).all()
        assert not (held() == held().set("a", UnbatchedTensor(TABLE + 1))).all()
        assert (held() + 1 != held()).all()

    def test_gradients(self) -> None:
        weight = torch.ones(3, requires_grad=True)
        td = TensorDict(w=UnbatchedTensor(weight), x=torch.ones(2, 3), batch_size=[2])
        (td["w"] * td["x"]).sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [2.0, 2.0, 2.0]

    def test_what_has_no_rows(self) -> None:
        mask = torch.ones(2, 3, dtype=torch.bool)
        with pytest.raises(RuntimeError, match="no rows"):
            held().masked_fill(mask, 1.0)
        with pytest.raises(RuntimeError, match="unlike UnbatchedTensors"):
            held().where(mask, held() + 1)
        assert torch.equal(held().where(mask, held())["a"], TABLE)


class TestWriting:
    def test_rows_write_the_whole(self) -> None:
        td = held()
        td[0] = held()[0] + 1
        assert torch.equal(td["a"], TABLE + 1)
        assert torch.equal(td["b"], torch.stack([ROWS[0] + 1, ROWS[1]]))
        td[:, 1] = held()[:, 1].exclude("a")
        assert torch.equal(td["a"], TABLE + 1)
        td[0] = 0
        assert torch.equal(td["a"], TABLE + 1)
        assert not td["b"][0].any()
        td.update_at_(held()[1] + 2, 1)
        assert torch.equal(td["a"], TABLE + 2)
        with pytest.raises(RuntimeError, match="as a whole"):
            td[0] = held()[0].set("a", UnbatchedTensor(torch.zeros(3)))

    def test_in_place(self) -> None:
        td = held().lock_()
        before = td["a"].data_ptr()
        td.update_(held() + 1)
        assert torch.equal(td["a"], TABLE + 1)
        td.set_("a", TABLE + 2)
        assert torch.equal(td["a"], TABLE + 2)
        td.fill_("a", 3.0)
        assert (td["a"] == 3).all()
        assert td["a"].data_ptr() == before
        with pytest.raises(RuntimeError, match="as a whole"):
            td.set_("a", torch.zeros(4))

    def test_replaced(self) -> None:
        td = held()
        td["a"] = UnbatchedTensor(torch.zeros(5))
        assert td["a"].shape == (5,)
        td["a"] = torch.zeros(2, 3, 1)
        assert type(td["a"]) is Tensor
        with pytest.raises(RuntimeError, match="batch dimension mismatch"):
            td["a"] = torch.zeros(5)
        with pytest.raises(RuntimeError, match="locked"):
            held().lock_()["a"] = UnbatchedTensor(torch.zeros(5))

    def test_shape_like_the_batch(self) -> None:
        td = TensorDict(a=UnbatchedTensor(torch.arange(6.0).view(2, 3)), batch_size=[2, 3])
        assert td[0]["a"].shape == (2, 3)


class TestKinds:
    def test_a_tensor_and_no_container(self) -> None:
        x = held().get("a")
        assert isinstance(x, Tensor)
        assert not is_tensor_collection(x)
        assert not is_non_tensor(x)
        assert not held().is_non_tensor("a")
        assert x.sum() == TABLE.sum()
        assert x[0].shape == (4,)
        assert UnbatchedTensor([1, 2]).tolist() == [1, 2]
        assert UnbatchedTensor(x, batch_size=[4]).batch_size == (4,)

    def test_keys(self) -> None:
        td = held()
        assert set(td.keys(True, True)) == {"a", "b", ("n", "u"), ("n", "c")}
        assert dict(td.items())["a"] is td["a"]
        assert set(td.filter_non_tensor_data().keys(True, True)) == set(td.keys(True, True))
        assert td.to_dict()["a"] is td["a"]
        assert td.numpy()["a"].shape == (3, 4)
        assert "shape=torch.Size([3, 4])" in repr(td)
        with set_printoptions(compact=True):
            assert "a: f32[3, 4]" in repr(td)
        assert set(td.state_dict()) == {"a", "b", "n.u", "n.c"}
        assert set(td.flatten_keys(".").keys()) == {"a", "b", "n.u", "n.c"}

    def test_copies(self) -> None:
        td = held()
        stored = io.BytesIO()
        torch.save(td, stored)
        stored.seek(0)
        for other in (
            td.clone(),
            copy.deepcopy(td),
            pickle.loads(pickle.dumps(td)),
            torch.load(stored),
            td.to_tensordict(),
            td.consolidate(),
            pickle.loads(pickle.dumps(td.consolidate())),
        ):
            assert type(other["a"]) is UnbatchedTensor
            assert other["a"].batch_size == (2, 3)
            assert (other == td).all()
            assert other["a"].data_ptr() != td["a"].data_ptr()
        assert td.clone(False)["a"].data_ptr() == td["a"].data_ptr()

    def test_locks(self) -> None:
        td = held().lock_()
        row = td[0]
        assert not row.is_locked
        td.unlock_()
        td["a"] = UnbatchedTensor(torch.zeros(1))

    def test_pytrees(self) -> None:
        out = pytree.tree_map(lambda x: x + 1, held())
        assert torch.equal(out["a"], TABLE + 1)
        assert type(out["a"]) is UnbatchedTensor
        assert out.batch_size == (2, 3)

    def test_vmap_has_no_rows_of_it(self) -> None:
        with pytest.raises(ValueError, match="same size in the mapped dimension"):
            torch.vmap(lambda td: td)(held())
        td = TensorDict(a=UnbatchedTensor(torch.ones(2, 4)), b=torch.ones(2), batch_size=[2])
        with pytest.raises(RuntimeError, match="'a', an UnbatchedTensor, which has no rows"):
            torch.vmap(lambda td: td["b"])(td)
        out = torch.vmap(lambda td, a: td["b"] + a.sum(), (0, None))(td.exclude("a"), td["a"])
        assert out.tolist() == [9.0, 9.0]

    def test_on_disk(self, tmp_path: Any) -> None:
        for write in (
            held().memmap,
            held().save,
            lambda path: held().consolidate(filename=path),
        ):
            with pytest.raises(NotImplementedError, match="'a' is an UnbatchedTensor"):
                write(tmp_path / "td")
            assert not list(tmp_path.iterdir())

    def test_in_a_class(self) -> None:
        x = Rows(table=UnbatchedTensor(TABLE), value=torch.zeros(2), batch_size=[2])
        assert torch.stack([x, x])[0, 1].table.shape == (3, 4)
        assert type(x.table) is UnbatchedTensor

    def test_in_parameters(self) -> None:
        params = TensorDictParams(TensorDict(a=UnbatchedTensor(TABLE), w=torch.ones(2)))
        assert torch.equal(params["a"], TABLE)


@tensorclass
class Rows:
    table: Tensor
    value: Tensor


def test_a_storage_refuses_it() -> None:
    storage = TensorStorage(4)
    with pytest.raises(TypeError, match="UnbatchedTensor"):
        storage.set(range(2), held())
