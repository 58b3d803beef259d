"""`UnbatchedTensor`: a tensor that belongs to a whole batch."""

import copy
import pickle

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import raffia
from raffia import LazyStackedTensorDict, TensorDict, TensorDictParams, UnbatchedTensor, lazy_stack
from raffia.data import TensorStorage
from tests.tensordict.stored import through_torch

TABLE = torch.arange(12.0).view(3, 4)
ROWS = torch.arange(30.0).view(2, 3, 5)


def make():
    nested = TensorDict({"u": UnbatchedTensor(torch.arange(7)), "c": ROWS + 1}, [2, 3])
    return TensorDict({"a": UnbatchedTensor(TABLE.clone()), "b": ROWS.clone(), "n": nested}, [2, 3])


METHODS = [
    *(("reshape", 6), ("view", 3, 2), ("unsqueeze", 1), ("permute", 1, 0), ("transpose", 0, 1)),
    *(("flatten", 0, 1), ("unflatten", 1, (3, 1)), ("expand", 4, 2, 3), ("repeat", 2, 1)),
    *(("flip", 0), ("roll", 1, 0), ("sum", 0), ("mean", 1), ("clone",)),
    *(("gather", 0, torch.zeros(1, 3, dtype=torch.int64)),),
    *(("masked_select", torch.eye(2, 3, dtype=torch.bool)),),
]
INDICES = [
    *(1, slice(1), None, ..., (..., 0), torch.tensor([True, False]), torch.tensor([1, 1, 0, 0])),
]
MOVES = {
    **{str(name): lambda td, n=name, a=args: getattr(td, n)(*a) for name, *args in METHODS},
    **{f"[{index}]": lambda td, index=index: td[index] for index in INDICES},
    "squeeze": lambda td: td[:1].squeeze(0),
    "repeat_interleave": lambda td: td.repeat_interleave(2, dim=0),
    "split": lambda td: td.split(2, 1)[1],
    "chunk": lambda td: td.chunk(2)[0],
    "unbind": lambda td: td.unbind(1)[2],
    "pad": lambda td: raffia.pad(td, [0, 1, 0, 0]),
    "stack": lambda td: torch.stack([td, td], 1),
    "cat": lambda td: torch.cat([td, td], 1),
    "lazy_stack": lambda td: lazy_stack([td, td.clone()], 2),
    "lazy row": lambda td: lazy_stack([td, td.clone()], 2)[0],
    "dense": lambda td: lazy_stack([td, td.clone()], 2).contiguous(),
    "apply": lambda td: td.apply(lambda x: x[0], batch_size=[3]),
}


@pytest.mark.parametrize("name", MOVES)
def test_operations_on_rows_leave_it_unchanged(name):
    moved, rest = MOVES[name](make()), MOVES[name](make().select("b", ("n", "c")))
    assert moved.batch_size == rest.batch_size and torch.equal(moved["b"], rest["b"])
    for key, value in (("a", TABLE), (("n", "u"), torch.arange(7))):
        entry = moved[key]
        assert type(entry) is UnbatchedTensor and entry.batch_size == moved.batch_size
        assert torch.equal(entry.as_subclass(Tensor), value)


def test_rows_share_it_and_stacks_need_equal_ones():
    td = make()
    assert td[0]["a"].data_ptr() == td["a"].data_ptr() == td.view(-1)["a"].data_ptr()
    for join in (torch.stack, torch.cat):
        for other in (make() + 1, make().set("a", UnbatchedTensor(torch.zeros(3)))):
            with pytest.raises(RuntimeError, match="need the same one"):
                join([make(), other])
        with pytest.raises((RuntimeError, TypeError), match="Tensor"):
            join([make(), make().set("a", ROWS)])
    stack = lazy_stack([make(), make() + 1])
    assert torch.equal(stack[1]["a"], TABLE + 1)
    with pytest.raises(RuntimeError, match="need the same one"):
        stack["a"]
    stack["a"] = UnbatchedTensor(torch.ones(4))
    assert isinstance(stack, LazyStackedTensorDict) and stack["a"].shape == (4,)
    assert stack["a"].batch_size == (2, 2, 3) and stack[0]["a"].batch_size == (2, 3)


def test_batch_sizes_and_names():
    td = make().auto_batch_size_()
    assert td.batch_size == td["n", "u"].batch_size == (2, 3, 5)
    td.batch_size = [2]
    assert td["a"].batch_size == (2,)
    with pytest.raises(RuntimeError, match="'b'"):
        td.batch_size = [3]
    assert td["a"].batch_size == (2,)
    td = make()
    td.names = ["x", "t"]
    td["z"] = UnbatchedTensor(torch.ones(2))
    assert td["n"].names == ["x", "t"] and td[0]["a"].shape == (3, 4)
    assert td.transpose(0, 1).names == ["t", "x"]
    td = TensorDict(a=UnbatchedTensor(torch.arange(6.0).view(2, 3)), batch_size=[2, 3])
    assert td[0]["a"].shape == (2, 3)  # though it looks like the batch


def test_arithmetic_applies_to_it():
    td = make()
    for add in (lambda td: td + 1, lambda td: td + td.apply(torch.ones_like)):
        out = pytree.tree_map(lambda x: x + 1, add(td)) - 1
        assert torch.equal(out["a"], TABLE + 1) and torch.equal(out["b"], ROWS + 1)
        assert type(out["a"]) is UnbatchedTensor and out["a"].batch_size == (2, 3)
    assert td.to(torch.float64)["n", "u"].dtype is torch.float64
    assert (td == make()).all() and (td + 1 != make()).all()
    assert not (td == make().set("a", UnbatchedTensor(TABLE + 1))).all()
    td += 1
    assert torch.equal(td["a"], TABLE + 1) and not td.zero_()["a"].any()
    assert td.add(make(), default=0.0)["a"].sum() == TABLE.sum()
    for td in (make(), lazy_stack([make(), make()])):
        assert td.apply(lambda x: x + 1, inplace=True) is td
        assert torch.equal(td[0]["a"].as_subclass(Tensor), TABLE + 1)
        assert td.detach_() is td and not td.requires_grad
    assert make().densify()["a"].equal(TABLE)
    copied = make()["a"].copy()
    assert type(copied) is UnbatchedTensor and torch.equal(copied, TABLE)
    weight = torch.ones(3, requires_grad=True)
    td = TensorDict(w=UnbatchedTensor(weight), x=torch.ones(2, 3), batch_size=[2])
    (td["w"] * td["x"]).sum().backward()
    assert weight.grad.tolist() == [2.0, 2.0, 2.0]
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="no rows"):
        make().masked_fill(mask, 1.0)
    with pytest.raises(RuntimeError, match="different UnbatchedTensors"):
        make().where(mask, make() + 1)
    assert torch.equal(make().where(mask, make())["a"], TABLE)


def test_writing_rows_writes_all_of_it():
    td = make()
    for write, want in [
        (lambda td: td.__setitem__(0, make()[0] + 1), TABLE + 1),
        (lambda td: td.__setitem__((slice(None), 1), make()[:, 1].exclude("a")), TABLE + 1),
        (lambda td: td.__setitem__(0, 0), TABLE + 1),
        (lambda td: td.update_at_(make()[1] + 2, 1), TABLE + 2),
    ]:
        write(td)
        assert torch.equal(td["a"], want)
    assert not td["b"][0].any() and torch.equal(td["b"][1], ROWS[1] + 2)
    for index in (torch.tensor([1, 0]), torch.tensor([True, False]), (slice(None), 0), [1]):
        td, other = lazy_stack([make(), make()]), lazy_stack([make() + 3, make() + 3])
        assert torch.equal(td.update_at_(other[index], index)["a"], TABLE + 3)
    with pytest.raises(RuntimeError, match="as a whole"):
        td[0] = make()[0].set("a", UnbatchedTensor(torch.zeros(3)))


@raffia.tensorclass
class Rows:
    table: Tensor
    value: Tensor


def test_it_is_a_tensor_not_a_container():
    td, x = make(), make().get("a")
    assert (
        isinstance(x, Tensor) and not raffia.is_tensor_collection(x) and not raffia.is_non_tensor(x)
    )
    assert not td.is_non_tensor("a") and x.sum() == TABLE.sum() and x[0].shape == (4,)
    assert UnbatchedTensor([1, 2]).tolist() == [1, 2]
    assert UnbatchedTensor(x, batch_size=[4]).batch_size == (4,)
    assert set(td.keys(True, True)) == {"a", "b", ("n", "u"), ("n", "c")}
    assert dict(td.items())["a"] is td.to_dict()["a"] is td["a"]
    assert set(td.filter_non_tensor_data().keys(True, True)) == set(td.keys(True, True))
    assert td.numpy()["a"].shape == (3, 4) and "shape=torch.Size([3, 4])" in repr(td)
    with raffia.set_printoptions(compact=True):
        assert "a: f32[3,4]" in repr(td)
    for names in (td.state_dict(), td.flatten_keys(".").keys()):
        assert set(names) == {"a", "b", "n.u", "n.c"}
    row = Rows(table=UnbatchedTensor(TABLE), value=torch.zeros(2), batch_size=[2])
    assert torch.stack([row, row])[0, 1].table.shape == (3, 4)
    assert type(row.table) is UnbatchedTensor
    params = TensorDictParams(TensorDict(a=UnbatchedTensor(TABLE), w=torch.ones(2)))
    assert torch.equal(params["a"], TABLE)


def test_copies_do_not_mix_up_entries():
    tables = {str(num): UnbatchedTensor(torch.arange(num)) for num in range(1, 9)}
    td = TensorDict(tables, [2])
    for copied in [copy.deepcopy, lambda td: TensorDictParams(td).clone()] * 100:
        other = copied(td)
        assert all(other[name].shape == (int(name),) for name in tables)


def test_copies():
    td = make()
    pickled = [pickle.loads(pickle.dumps(one)) for one in (td, td.consolidate())]
    copies = td.clone(), copy.deepcopy(td), through_torch(td), td.to_tensordict(), td.consolidate()
    for other in (*copies, *pickled):
        assert type(other["a"]) is UnbatchedTensor and other["a"].batch_size == (2, 3)
        assert (other == td).all() and other["a"].data_ptr() != td["a"].data_ptr()
    assert td.clone(False)["a"].data_ptr() == td["a"].data_ptr()


def test_unsupported_operations_are_refused(tmp_path):
    with pytest.raises(ValueError, match="same size in the mapped dimension"):
        torch.vmap(lambda td: td)(make())
    td = TensorDict(a=UnbatchedTensor(torch.ones(2, 4)), b=torch.ones(2), batch_size=[2])
    with pytest.raises(RuntimeError, match="'a', an UnbatchedTensor, which has no rows"):
        torch.vmap(lambda td: td["b"])(td)
    out = torch.vmap(lambda td, a: td["b"] + a.sum(), (0, None))(td.exclude("a"), td["a"])
    assert out.tolist() == [9.0, 9.0]
    for write in (make().memmap, make().save, make().consolidate):
        with pytest.raises(NotImplementedError, match="'a' is an UnbatchedTensor"):
            write(tmp_path / "td")
        assert not list(tmp_path.iterdir())
    with pytest.raises(TypeError, match="UnbatchedTensor"):
        TensorStorage(4).set(range(2), make())
