"""Lazy stacks: containers that stay separate and are stacked when an entry is read.

Calls that equal those of dense containers are in tables of all kinds, in the tests of shapes,
indices, keys and arithmetic. Here: the position of the stack dimension, calls of the members,
and members of different shapes. `ragged(dim)` has an entry `h` whose shape differs from member to
member, and in each member an entry that no other has.
"""

import pickle
import warnings

import numpy as np
import pytest
import torch

import raffia
from raffia import LazyStackedTensorDict, TensorDict, dense_stack_tds, lazy_stack, maybe_dense_stack
from tests.tensordict.invariants import sound
from tests.tensordict.kinds import apply_op, call, check_same, each, is_lazy, ops, raises, refused

T, I = torch.tensor, np.s_  # noqa: E741
BATCHES = {0: (4, 3), 1: (3, 4)}  # four members of batch size [3]


def part(i):
    entries = {"a": torch.arange(6.0).reshape(3, 2) + 10 * i, "b": torch.arange(3) + 10 * i}
    entries["n"] = TensorDict({"c": torch.arange(15).reshape(3, 5) + 100 * i}, [3, 5])
    return TensorDict(entries, [3])


def make(dim=0):
    return lazy_stack([part(i) for i in range(4)], dim)


def dense(dim=0):
    return torch.stack([part(i) for i in range(4)], dim)


def ragged_part(i):
    wide = torch.arange(3.0 * (i + 2)).reshape(3, i + 2) + 100 * i
    entries = {"a": torch.full((3, 2), float(i)), "h": wide, f"only{i}": torch.zeros(3)}
    return TensorDict(entries, [3])


def ragged(dim=0):
    return lazy_stack([ragged_part(i) for i in range(4)], dim)


def check(td, want, dim):
    """Equals `want`, and is lazy along this dimension; "dense": a member, None: either."""
    check_same(td, want)
    assert dim is None or (type(td) is TensorDict if dim == "dense" else is_lazy(td, dim)), type(td)


# --------------------------------------------------------------- calls passed to the members

# operations, and the stack dimension of their results, for stacks along dim 0 and 1
AFTER = {
    (0, 1): ops(unsqueeze=[2, -1], clamp=[(2, 11)], to=[torch.float64], detach=[()], empty=[()])
    + ops(select=["a", (("n", "c"),)], exclude=["a"], apply=[lambda x: x * 2 + 1])
    + ops(flatten_keys=["."], clone=[()], named_apply=[lambda name, x: x + (name == "a")]),
    (1, 2): ops(unsqueeze=[0, -3], atleast_3d=[()]),
    (0, 2): ops(unsqueeze=[1, -2]),
    (1, 0): ops(permute=[(1, 0), ((-1, -2),)], transpose=[(0, 1)], movedim=[(0, 1)]),
    (0, 0): ops(reshape=[12, -1], flatten=[(), (0, 1)], view=[12], to_lazystack=[0]),
    (1, 1): ops(to_lazystack=[-1]),
    ("dense", "dense"): ops(contiguous=[()], densify=[()], to_tensordict=[()]),
}


def pair(function, dim=0):
    return lambda td: function([td, td * 2], dim)


def rows(index):
    return lambda td: td[index]


JOINED = {
    (1, 2): (pair(torch.stack), pair(torch.stack, -3)),
    (0, 2): (pair(torch.stack, 1),),
    (0, 1): (
        *(pair(torch.stack, 2), pair(torch.cat, 1), rows(I[1:3]), rows([-1, 0, -1])),
        *(rows(I[:, [0, 2]]), rows("n"), lambda td: td.split_keys(["a"])[1]),
        *(lambda td: td.split(2, -1)[0], lambda td: td.apply(torch.add, td)),
        lambda td: torch.full_like(td, 3),
    ),
    ("dense", 0): (rows(-1), rows(I[2, 1:3]), lambda td: td.unbind(-2)[1]),
    (0, "dense"): (rows(I[:, 1]), rows(I[T([0, 1]), 0]), lambda td: td.unbind(1)[1]),
    (2, 3): (rows(I[None, None]),),
    (0, 0): (rows(I[T([0, 1]), T([1, 2])]),),
}


@pytest.mark.parametrize("dim", [0, 1])
def test_the_stack_dimension_after_operations(dim):
    for after, table in AFTER.items():
        for op in table:
            check(apply_op(make(dim), op), apply_op(dense(dim), op), after[dim])
    for after, calls in JOINED.items():
        for function in calls:
            check(function(make(dim)), function(dense(dim)), after[dim])
    three = [TensorDict({"x": torch.arange(6).reshape(2, 3) + 10 * i}, [2, 3]) for i in range(4)]
    for at in range(3):
        td, want = lazy_stack(three, at), torch.stack(three, at)
        for dims in ((2, 0, 1), (1, 2, 0), (0, 2, 1), (2, 1, 0)):
            check(td.permute(dims), want.permute(dims), dims.index(at))
        for i in range(3):
            check_same(torch.stack(td.unbind(i), i), want)
            check_same(td.unsqueeze(i).squeeze(i), want)


@pytest.mark.parametrize("dim", [0, 1])
def test_rows_of_ragged_members(dim):
    tensors = T([[0, 2], [1, 1]]), I[T([0, 1]), T([1, 2])]
    for index in (0, -1, I[1:3], I[:, 1], None, [0, 2], *tensors):
        got = ragged(dim)[index]  # entries that all members share equal the dense stack
        want = torch.stack([ragged_part(i).select("a") for i in range(4)], dim)[index]
        check_same(got.select("a"), want)
        assert "h" in got.keys()
    masks = torch.zeros(BATCHES[dim], dtype=torch.bool)
    empty = [[], I[2:2], I[7:9], torch.zeros(0).long(), I[:, 0:0], masks, masks[:, 0]]
    for index in (*empty, False, T(False), I[0, False], I[:, False, 1:]):
        td = make(dim)
        assert td[index].batch_size == dense(dim)[index].batch_size, index
        td[index] = 0
        check_same(td, dense(dim))


def test_truth_values_in_an_index_of_members_of_different_sizes():
    td = lazy_stack([TensorDict(a=torch.arange(n), batch_size=[n]) for n in (2, 3)])
    assert td[True].batch_size == (1, 2, -1) and td[False].batch_size == (0, 2, -1)
    assert [rows.batch_size for rows in td[:, True, 1:].tensordicts] == [(1, 1), (1, 2)]
    check(td[1, :, True], td[1][:, True], "dense")
    td[True, :, 0] = 7
    assert [member["a"].tolist() for member in td.tensordicts] == [[7, 1], [7, 1, 2]]


def test_rows_by_tensors_are_copies():
    for dim in (0, 1):
        full = torch.ones(BATCHES[dim], dtype=torch.bool)
        td = make(dim)
        lists = I[T([0, 1]), T([0, 1])], I[T([0, 1]), 0], I[T([0, 1]), 1:]
        for index in (full, *lists, True, I[:, True], I[0, True]):
            td[index].zero_()
        for mask in (full, full[:, 0]):
            td.masked_select(mask).zero_()
        check_same(td, dense(dim))


def test_indexing_returns_members():
    td = make()
    assert td[0] is td.tensordicts[0] and td[-1] is list(td)[3] is td.tensordicts[3]
    assert td[1:3].tensordicts[0] is td.tensordicts[1]
    assert td[[3, 0]].tensordicts[1] is td.tensordicts[0]
    for again in (td[[0, 0, 2]], td.repeat_interleave(torch.tensor([2, 0, 1, 0]), dim=0)):
        assert all(a is td[i] for a, i in zip(again.tensordicts, (0, 0, 2), strict=True))
    for dim in (0, 1):
        td = make(dim)
        assert all(a is b for a, b in zip(td.unbind(dim), td.tensordicts, strict=True))
        assert td.to_lazystack(dim) is td
        assert all(a is b["n"] for a, b in zip(td["n"].tensordicts, td.tensordicts, strict=True))
        td["n"]["new"] = torch.zeros(*BATCHES[dim], 5)
        assert ("n", "new") in td.tensordicts[2].keys(True)
        td["b"].zero_()  # the result is a copy
        assert torch.equal(td["b"], dense(dim)["b"])


def test_a_row_of_values_is_written_in_the_members():
    td = lazy_stack([TensorDict(a=torch.zeros(3), s=s, batch_size=[3]) for s in "uv"])
    td.set_at_("s", "x", 0)
    assert td.get("s").tolist() == [["x"] * 3, ["v"] * 3] and td[0]["s"] == "x"
    td.set_at_("s", "y", (1, 2))
    assert td[1].get("s").tolist() == ["v", "v", "y"]


# --------------------------------------------------------------------------------------- errors

R, K = RuntimeError, KeyError
V = ValueError
OTHER = TensorDict({"b": torch.zeros(2).long()}, [2])
# call on the stack of equal members, error, words of its text; none of them changes anything
REFUSED = {
    "too short a list": (lambda td: td.set("new", ["x"]), R, "list of 1 values"),
    "below a tensor": (lambda td: td.set(("a", "c"), td["b"]), K, "not a container"),
    "half an update": (lambda td: td.update({"b": td["b"] * 2, "q": T([1.0])}), R, "mismatch"),
    "rows": (lambda td: td.__setitem__(I[0:2], torch.stack([OTHER] * 3)), R, ""),
    "append a dict": (lambda td: td.append({"a": 1}), TypeError, "Expected new value"),
    "extend, all or none": (lambda td: td.extend([part(4), OTHER]), V, "[Bb]atch size"),
    "append on a device": (lambda td: td.append(part(4).to("cpu")), V, "Devices differ"),
    "a batch size": (lambda td: setattr(td, "batch_size", [4]), R, "[Bb]atch.size"),
    "to_lazystack(5)": (call("to_lazystack", 5), IndexError, ""),
}
RAGGED_REFUSED = {
    "[]": (lambda td: td["h"], R, "(?=.*as_list)(?=.*as_padded)(?=.*as_nested_tensor)(?=.*'h')"),
    "get": (lambda td: td.get("h", None), R, "(?=.*as_list)(?=.*as_padded_tensor)(?=.*'h')"),
    "values": (lambda td: list(td.values()), R, "as_list"),
    "to_tensordict": (call("to_tensordict"), R, "as_list"),
    "rename of one member's": (lambda td: td.rename_key_("only0", "z"), K, "only0"),
    "a side": (call("get", "h", as_padded_tensor=True, padding_side="top"), V, "'left', 'right'"),
}


def same_members(td, want):
    assert (td == want).all() and td.batch_size == want.batch_size and sound(td)
    assert [list(m.keys(True)) for m in td.tensordicts] == [
        list(m.keys(True)) for m in want.tensordicts
    ]


def test_refused_calls_change_nothing():
    each(REFUSED, refused(make, same_members))
    each(RAGGED_REFUSED, refused(ragged, same_members))


def test_a_lock_keeps_the_structure_and_lets_values_change():
    td = make().lock_()  # the rest is in test_lock.py
    assert not td.clone().is_locked and not td.clone().tensordicts[0].is_locked
    td[0] = 0
    td[:, 1] = dense()[:, 1] * 0
    assert td["b"].tolist() == [[0, 0, 0], [10, 0, 12], [20, 0, 22], [30, 0, 32]]
    td.set_("a", torch.zeros(4, 3, 2)).update({"new": torch.zeros(4, 3)}, ignore_lock=True)
    assert (td["a"] == 0).all() and td.is_locked and "new" in td.keys()
    with td.unlock_():
        td["newer"] = torch.zeros(4, 3)
    assert td.is_locked and "newer" in td.keys()
    td.unlock_()[2].lock_()  # of one member, so that the others can't be written as if nothing were
    late = torch.zeros(4, 3)
    for write in (call("set", "late", late), call("update", {"late": late})):
        with pytest.raises(RuntimeError, match="Cannot modify locked"):
            write(td)
        assert all("late" not in one.keys() for one in td.tensordicts)


# ----------------------------------------------------------------------------- making and growing

MIXED = {
    "dim": (lambda: lazy_stack([part(0)], 2), (RuntimeError, IndexError), "[Dd]im"),
    "none": (lambda: lazy_stack([]), R, "empty"),
    "a dict": (lambda: lazy_stack([part(0), {}]), TypeError, "Expected all inputs"),
    "a tensor": (lambda: lazy_stack([part(0), T(3)]), TypeError, "Expected all inputs"),
    "the class": (lambda: LazyStackedTensorDict(part(0), {}), TypeError, "Expected all inputs"),
    "strict": (lambda: lazy_stack([part(0), part(1)[:2]], strict_shape=True), R, "differs"),
    "dims": (lambda: lazy_stack([part(0), part(1)[0]]), R, "differs"),
    "no dim": (lambda: dense_stack_tds([part(0), part(1)]), V, "dim"),
}


def test_making():
    parts = [part(0), part(1)]
    for td in (
        *(lazy_stack(tuple(parts), 0), lazy_stack(parts, dim=-2), TensorDict.lazy_stack(parts)),
        LazyStackedTensorDict(*parts, stack_dim=0),
    ):
        assert is_lazy(td, 0) and not isinstance(td, TensorDict)
        assert all(a is b for a, b in zip(td.tensordicts, parts, strict=True))
        check_same(td, torch.stack(parts))
    for dim in (0, 1):
        td = make(dim)
        assert is_lazy(td, dim) and td.batch_size == td.shape == BATCHES[dim]
        assert td.ndim == td.batch_dims == 2 and td.numel() == 12
        assert len(td) == BATCHES[dim][0] and len(td.tensordicts) == 4
    assert lazy_stack(parts, 0, stack_dim_name="s").names == ["s", None]
    each(MIXED, raises)
    rows = [{"a": torch.ones(2)}, {"a": torch.ones(3)}]
    td = LazyStackedTensorDict.from_dict(rows, auto_batch_size=True, stack_dim=1)
    assert td.batch_size == (-1, 2) and td.stack_dim == 1
    td = LazyStackedTensorDict.from_dict({"0": rows[0], "1": rows[1]})
    assert [len(x) for x in td.get("a", as_list=True)] == [2, 3]


def test_a_copy_is_of_the_same_kind(tmp_path):
    for dim in (0, 1):
        td = ragged(dim)
        for got in (td.clone(), pickle.loads(pickle.dumps(td))):
            assert is_lazy(got, dim) and "only1" in got.tensordicts[1].keys()
            same_members(got, td)
            got.zero_()
            same_members(td, ragged(dim))
        for got in (td.clone(False), td.clone(recurse=False), td.copy()):
            assert is_lazy(got, dim) and got.tensordicts[0] is not td.tensordicts[0]
            assert got.tensordicts[0]["h"] is td.tensordicts[0]["h"]
            got["new"] = torch.zeros(BATCHES[dim])
            assert "new" not in td.keys()
        got = make(dim).to_tensordict()
        assert type(got) is type(got["n"]) is TensorDict
    ragged().memmap(tmp_path)
    td = ragged().zero_()
    members = list(td.tensordicts)
    td.load_memmap_(tmp_path)
    assert raffia.assert_close(td, ragged())
    assert all(a is b for a, b in zip(td.tensordicts, members, strict=True))


def test_growing():
    for dim in (0, 1):
        td, parts = make(dim), [part(i) for i in range(8)]
        td.append(part(4))
        td.extend(part(i) for i in (5, 6))
        td.extend(lazy_stack([part(7)], dim))
        td.extend([])
        for at in (0, 2, -1, 4, 100):
            td.insert(at, part(9))
            parts.insert(at, part(9))
            check_same(td, torch.stack(parts, dim))
    td = make()
    td.append(part(4).set("a", torch.zeros(3, 7)))
    with pytest.raises(RuntimeError, match="as_list"):
        td["a"]
    td.append(TensorDict({"a": torch.ones(3, 2)}, [3]))
    assert set(td.keys()) == {"a"} and td.batch_size == (6, 3)
    none = LazyStackedTensorDict(stack_dim=0)
    none.extend([part(0)])
    check_same(none, part(0)[None])


def test_update_can_take_over_the_number_of_members():
    for dim in (0, 1):
        for num in (2, 6):
            td, source = make(dim), lazy_stack([part(9 - i) for i in range(num)], dim)
            members = td.tensordicts[:num]
            holder = TensorDict(l=td)
            assert td.update(source, update_batch_size=True) is td
            check_same(td, source.contiguous())
            assert all(a is b for a, b in zip(td.tensordicts, members, strict=False))
            assert not {id(member) for member in td.tensordicts} & {*map(id, source.tensordicts)}
            holder.update(TensorDict(l=make(dim)), update_batch_size=True)
            check_same(holder["l"], make(dim).contiguous())
            td.update(source.contiguous(), update_batch_size=True)
            check_same(td, source.contiguous())
    td = make()
    for options in ({"inplace": True}, {"keys_to_update": ["a"]}):
        with pytest.raises(RuntimeError, match="changes the number of members"):
            td.update(make()[:2], update_batch_size=True, **options)
    with pytest.raises(RuntimeError, match="Cannot modify locked"):
        td.lock_().update(make()[:2], update_batch_size=True)
    check_same(td, make().contiguous())


def test_stacks_of_stacks():
    for to in (0, 1, 2):
        got = lazy_stack([make(), make() * 2], to)
        check(got, torch.stack([dense(), dense() * 2], to), to)
        assert len(got.tensordicts) == 2 and is_lazy(got.tensordicts[0], 0)
    turned = make(1).transpose(0, 1).clone()
    check_same(lazy_stack([make(), make(1).permute(1, 0), turned]), torch.stack([dense()] * 3))
    two = torch.stack([dense()] * 2)
    for pair in ([make(), dense()], [dense(), make()]):
        check_same(torch.stack(pair), two)
        check_same(lazy_stack(pair), two)
        check_same(torch.cat(pair).reshape(2, 4, 3), two)
    check_same(make().unsqueeze(0).expand(2, 4, 3), two)
    for dim in (0, 1):
        check(make(dim) + dense(dim), dense(dim) * 2, dim)
        check(dense(dim) + make(dim), dense(dim) * 2, "dense")
        for row in (dense(dim)[0], dense(dim)[:1], make(dim)[0], TensorDict(a=1, b=2, n=dict(c=3))):
            check(make(dim) + row, dense(dim) + row, dim)
            check(make(dim).sub_(row), dense(dim) - row, dim)
        with pytest.raises(RuntimeError, match="broadcast"):
            make(dim) + dense(dim)[:2]
    first, second = make(), make().select("a")
    out = maybe_dense_stack([first, second], 0)
    assert out.stack_dim == 0 and out[0] is first and out[1] is second
    out = dense_stack_tds([ragged(), ragged()], 0)
    assert out.batch_size == (2, 4, 3) and out.stack_dim == 1
    assert out[:, 2]["h"].shape == (2, 3, 4)
    one = lazy_stack([part(0)])
    assert one.squeeze(1).batch_size == (1, 3)
    for got in (one.squeeze(0), one.squeeze()):
        check_same(got, part(0))


def test_dense_if_possible():
    for dim in (0, 1):
        equal, other = [part(0), part(1)], [part(0), part(1).exclude("a")]
        for got in (
            *(dense_stack_tds(equal, dim), dense_stack_tds(lazy_stack(equal, dim))),
            *(maybe_dense_stack(equal, dim), LazyStackedTensorDict.maybe_dense_stack(equal, dim)),
        ):
            check(got, torch.stack(equal, dim), "dense")
        assert is_lazy(maybe_dense_stack(other, dim), dim)
        assert dense_stack_tds(equal[0]) is equal[0]
        assert set(maybe_dense_stack(other, dim).keys()) == {"b", "n"}
        wide = [part(0), part(1).set("a", torch.zeros(3, 7))]
        assert is_lazy(maybe_dense_stack(wide, dim), dim)
    td = ragged().from_dict_instance({"a": 1, "n": {"c": 2}})
    assert td.to_dict() == {"a": T(1), "n": {"c": T(2)}}
    nested = [TensorDict({"n": {"x": torch.zeros(3, i)}}, [3]) for i in (2, 4)]
    td = maybe_dense_stack(nested)
    assert is_lazy(td["n"], 0)
    assert [x.shape for x in td["n"].get("x", as_list=True)] == [(3, 2), (3, 4)]
    td = ragged().select("a", "h").densify(layout=torch.jagged)
    assert type(td) is TensorDict and td["h"].is_nested and not td["a"].is_nested
    rows = [{"h": torch.ones(3, 2), "s": "x", "n": {"k": torch.ones(1)}}, {}]  # 1 has no entries
    td = lazy_stack([TensorDict(row) for row in rows]).densify(torch.jagged).to_padded_tensor(-1.0)
    assert td["h"].tolist() == [[[1.0, 1.0]] * 3, [[-1.0, -1.0]] * 3] and td["s"] == ["x", None]
    assert td["n", "k"].tolist() == [[1.0], [-1.0]] and sound(td)
    with pytest.raises(RuntimeError, match="only some members have the entry 'h'"):
        lazy_stack([TensorDict(h=1), TensorDict()]).densify()
    td = lazy_stack([TensorDict(a=torch.ones(2, i), batch_size=[2]) for i in (3, 4)], 1)
    with pytest.raises(NotImplementedError, match=r"td.transpose\(0, 1\).densify"):
        td.densify()
    assert [row.shape for row in td.transpose(0, 1).densify(torch.jagged)["a"].unbind()] == [
        (2, 3),
        (2, 4),
    ]


# -------------------------------------------------------------------------- ragged members

# operations that apply to each ragged member
APART = ops(unsqueeze=[0, -1], permute=[(1, 0)], transpose=[(0, 1)], reshape=[12, (2, 2, 3)])
APART += ops(flatten=[()], unflatten=[(0, (2, 2))], expand=[(2, 4, 3)], repeat=[(2, 1)], view=[12])
APART += ops(masked_fill=[(torch.eye(4, 3, dtype=torch.bool), -1)], clone=[()], add=[1])
APART += ops(to=[torch.float64], apply=[lambda x: x + 1])
APART_TOO = [torch.zeros_like, lambda td: td * td, lambda td: torch.stack([td, td])]
APART_TOO += [lambda td: torch.cat([td, td]), lambda td: torch.cat([td, td], 1)]


def test_ragged_members_stay_separate():
    """Each entry equals the operation on members padded to one shape."""

    def check_row(function):
        td = ragged()
        entries = {name: td.get(name, as_padded_tensor=True) for name in ("a", "h")}
        got, want = function(td), function(TensorDict(entries, td.batch_size))
        assert is_lazy(got) and set(got.keys()) == {"a", "h"} and sound(got)
        check_same(got.select("a"), want.select("a"))
        flat, expected = got.reshape(-1), want["h"].flatten(0, got.ndim - 1)
        for row, wide in zip(flat.get("h", as_list=True), expected, strict=True):
            assert torch.equal(row, wide[..., : row.shape[-1]])

    each([lambda td, op=op: apply_op(td, op) for op in APART] + APART_TOO, check_row)


def test_entries_of_different_shapes():
    for dim in (0, 1):
        got = ragged(dim).get("h", as_list=True)
        assert type(got) is list and [x.shape for x in got] == [(3, i + 2) for i in range(4)]
        assert all((x == ragged_part(i)["h"]).all() for i, x in enumerate(got))
    td = ragged()
    right = td.get("h", as_padded_tensor=True)
    left = td.get("h", as_padded_tensor=True, padding_value=-1, padding_side="left")
    for i in range(4):
        row = ragged_part(i)["h"]
        assert (right[i, :, : i + 2] == row).all() and (right[i, :, i + 2 :] == 0).all()
        assert (left[i, :, 3 - i :] == row).all() and (left[i, :, : 3 - i] == -1).all()
    assert (td.get("a", as_padded_tensor=True) == td["a"]).all()
    assert td.get_item_shape("h") == (4, 3, -1) and td.get_item_shape("a") == (4, 3, 2)
    jagged = td.get("h", as_nested_tensor=True, layout=torch.jagged)
    assert jagged.is_nested and jagged.layout is torch.jagged and jagged.shape[0] == 4
    assert td.get_nestedtensor("h", layout=torch.jagged).layout is torch.jagged
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that strided ones are a prototype
        strided = td.get_nestedtensor("h")
    assert strided.layout is torch.strided and strided.is_nested
    for row, one in zip(td.get("h", as_list=True), strided.unbind(), strict=True):
        assert torch.equal(row, one)
    assert not (ragged() == ragged() + 1).any()
    every = [leaf for member in td.tensordicts for leaf in member.values()]
    assert td.sum(reduce=True) == sum([leaf.sum() for leaf in every])


def test_keys_of_ragged_members():
    td = ragged()
    keys = td.keys()
    assert set(keys) == {"a", "h"} and td.get("only0", 7) == 7
    assert "only0" not in td and "only0" in td[0].keys() and td.pop("only0", None) is None
    for one in td.tensordicts:
        assert "later" not in keys
        one["later"] = torch.zeros(3)
    assert "later" in keys
    parts = [TensorDict({"n": {"x": torch.zeros(3), f"o{i}": T([0] * 3)}}, [3]) for i in range(2)]
    assert set(lazy_stack(parts).keys(True)) == {"n", ("n", "x")}
    assert not make().is_empty() and lazy_stack([TensorDict(n={})] * 2).is_empty()
    td = lazy_stack([TensorDict(a=1, only=2), TensorDict(a=1)])
    for source in (td, TensorDict(n=td)):
        for method in (source.to_dict, source.state_dict):
            with pytest.raises(RuntimeError, match="only"):
                method()  # an entry of one member is not dropped
    assert td[0].to_dict()["only"] == 2
    td = lazy_stack([TensorDict(a=dict(b=1), c=1), TensorDict(a=dict(b=1, d=2))])
    assert td.entry_class(("a", "b")) is torch.Tensor
    assert td.entry_class("a") is LazyStackedTensorDict
    for key in ("c", ("a", "d"), ("a", "b", "x"), ("x", "y")):
        with pytest.raises(KeyError):
            td.entry_class(key)
    with pytest.raises(KeyError):
        lazy_stack([TensorDict()])[:0].entry_class("a")


def test_a_value_that_one_member_refuses_is_stored_in_none():
    td = lazy_stack([TensorDict(a=torch.zeros(n), batch_size=[n]) for n in (3, 2)])
    for value in (torch.zeros(2, 3), [torch.zeros(3), torch.zeros(3)]):
        for key in ("z", ("n", "z")):
            with pytest.raises(RuntimeError, match="mismatch"):
                td[key] = value
            assert [list(member.keys()) for member in td.tensordicts] == [["a"], ["a"]]


def test_writes_into_ragged_members():
    td = ragged()
    td["h"] = torch.ones(4, 3, 5)  # replaces entries that could not be stacked
    td["only0"] = torch.ones(4, 3)
    assert td["h"].shape == (4, 3, 5) and set(td.keys()) == {"a", "h", "only0"}
    td = ragged()
    del td["only0"]
    assert "only0" not in td.tensordicts[0].keys()
    td = ragged()
    td[0] = TensorDict({"q": torch.ones(3)}, [3])
    td[:2] = TensorDict({"r": torch.ones(2, 3)}, [2, 3])
    td[:, 1] = TensorDict({"s": torch.ones(4, 6)}, [4])
    assert ["q" in one.keys() for one in td.tensordicts] == [True, False, False, False]
    assert ["r" in one.keys() for one in td.tensordicts] == [True, True, False, False]
    assert td["s"].shape == (4, 3, 6) and td["s"].sum((0, 2)).tolist() == [0, 24, 0]
    td[0] = {"a": torch.ones(3, 2)}
    assert (td["a"][:2] == 1).all() and (td["a"][2] == 2).all()
    td[:, 0] = 0
    for i, one in enumerate(td.tensordicts):
        assert (one["h"][0] == 0).all() and (one["h"][1:] == ragged_part(i)["h"][1:]).all()
    td[1] = ragged_part(1) * 2
    assert (td.tensordicts[1]["h"] == ragged_part(1)["h"] * 2).all()
    with pytest.raises(RuntimeError, match="h"):
        td[0] = ragged_part(1).exclude("only1")
    td = ragged()
    td.update_at_(td[0].clone().zero_(), 0)
    assert (td[0]["h"] == 0).all() and (td[1]["h"] == ragged()[1]["h"]).all()
    more = ragged() + 1
    for td in (
        ragged().update_at_(more, slice(None)),
        ragged().update_(more, keys_to_update=["h", "a"]),
        ragged().update_(more, keys_to_update=["h"]).update_({"a": more["a"]}),
        ragged().apply(lambda leaf: leaf + 1, out=ragged()),
        more.rename_keys({"h": "z"}).rename_keys({"z": "h"}),
    ):
        assert all((td[i]["h"] == ragged_part(i)["h"] + 1).all() for i in range(4))
    with pytest.raises(KeyError, match="only1"):
        ragged().update_(ragged(), keys_to_update=["only0"]).update_at_(more[1:3], slice(2))


@pytest.mark.parametrize(
    "index",
    [I[0], I[1:3], I[[0, 2]], I[torch.tensor([3, 0])], I[torch.arange(4) > 1], I[torch.tensor(2)]]
    + [I[1, 0], I[:, 1], I[...], I[range(2), 1], I[[1, 2], [0, 1]], I[:2, None, :1], I[None, 3]],
    ids=str,
)
def test_rows_of_members_that_differ_are_updated(index):
    td, want, source = ragged(), ragged(), (ragged() * 0 + 7)[index]
    want[index] = source.clone()
    source = source.clone()
    assert td.update_at_(source, index) is td and sound(td)
    for mine, theirs in zip(td.tensordicts, want.tensordicts, strict=True):
        assert (mine == theirs).all() and list(mine.keys()) == list(theirs.keys())
    td, before = ragged(), ragged()
    with pytest.raises(KeyError, match="q"):
        td.update_at_(source.replace({"q": torch.ones(source.batch_size)}), index)
    for mine, theirs in zip(td.tensordicts, before.tensordicts, strict=True):
        assert (mine == theirs).all()


def test_lists_of_tensors_in_other_forms():
    one, two = torch.zeros(2), torch.ones(3)
    assert lazy_stack([one, two], as_list=True) == [one, two]
    padded = lazy_stack([one, two], as_padded_tensor=True, padding_value=7, padding_side="left")
    assert padded.tolist() == [[7, 0, 0], [1, 1, 1]]
    assert lazy_stack([one, two], 1, as_padded_tensor=True).tolist() == [[0, 1], [0, 1], [0, 1]]
    for layout in (None, torch.jagged):
        rows = TensorDict.lazy_stack([one, two], as_nested_tensor=True, layout=layout)
        assert rows.layout is torch.jagged and torch.equal(rows.unbind()[1], two)
    with pytest.raises(TypeError, match="one of as_list, as_padded"):
        lazy_stack([one, two], as_list=True, as_padded_tensor=True)
    with pytest.raises(TypeError, match=r"td\.get\(key, as_list=True\)"):
        lazy_stack([TensorDict(a=one), TensorDict(a=two)], as_list=True)


def test_new_levels_below_levels_that_some_members_lack():
    one, two = TensorDict(a=dict(b=1)), TensorDict(a=dict(b=1, n=dict(c=2)))
    td = lazy_stack([one, two])
    td["a", "m", "x"] = torch.arange(2)
    assert one["a", "m", "x"] == 0 and two["a", "m", "x"] == 1 and two["a", "n", "c"] == 2
    td["a", "n", "x"] = torch.arange(2)  # "n" is a level of the second member only
    assert one["a", "n", "x"] == 0 and two["a", "n", "x"] == 1 and two["a", "n", "c"] == 2
    dense = TensorDict(stack=td)
    dense["stack", "a", "k"] = TensorDict(y=torch.arange(2), batch_size=[2])
    del one["a", "k"]
    dense["stack", "a", "k", "z"] = ["u", "v"]
    assert one["a", "k", "z"] == "u" and two["a", "k", "z"] == "v" and two["a", "k", "y"] == 1
    del td["a", "n", "c"]  # an entry of the second member only
    assert "c" not in two["a", "n"].keys()
    with pytest.raises(KeyError):
        del td["a", "n", "c"]
    two["a", "m"].lock_()
    with pytest.raises(RuntimeError, match="locked"):
        td["a", "m", "y"] = torch.arange(2)
    assert "y" not in one["a", "m"].keys()
    with pytest.raises(KeyError):
        td["a", "b", "x"] = torch.arange(2)
    names = lazy_stack([TensorDict(batch_size=[3], names=["t"]) for _ in range(2)])
    names["n", "m", "x"] = torch.zeros(2, 3)
    assert names["n", "m"].names == [None, "t"] and names[0]["n", "m"].names == ["t"]
    td = make()
    td["n", "p", "q"] = td["n", "c"]  # of a longer batch size than the members
    assert td[2]["n", "p"].batch_size == (3, 5) and torch.equal(td["n", "p", "q"], td["n", "c"])


def test_pruning_texts_and_depth():
    td = ragged()
    assert td.depth == 0 and td.non_tensor_items(include_nested=True) == ()
    first, rest = td.split_keys(["a"])
    assert list(first.keys()) == ["a"] and "a" not in rest[0].keys()
    for i, member in enumerate(td.tensordicts):
        member.update({"n": {"s": str(i)}, "e": {}})
    assert td.depth == 1 and "e" not in td.filter_empty_().keys()
    ((key, entry),) = td.non_tensor_items(include_nested=True)
    assert key == ("n", "s") and [row[0] for row in entry.tolist()] == ["0", "1", "2", "3"]
    assert list(td.separates("a").keys()) == ["a"] and "a" not in td.keys()
    td = lazy_stack([TensorDict(n=dict(a=1), e=dict()), TensorDict(n=dict(b=dict()), e=dict())])
    assert td.filter_empty_() is td
    assert [list(member.keys(True)) for member in td.tensordicts] == [[("n", "a"), "n"], []]
    td = TensorDict(l=lazy_stack([TensorDict(a=1), TensorDict(b=1)]), e=lazy_stack([td[1]] * 2))
    assert list(td.filter_empty_().keys()) == ["l"] and td["l"][1]["b"] == 1
    td = ragged()
    td[1].set("s", "text")
    out = td.filter_non_tensor_data()
    assert is_lazy(out) and "s" not in out[1].keys() and "s" in td[1].keys()
    assert out[1]["h"] is td[1]["h"]


def test_ragged_members_inside_a_container():
    td, mask = ragged(), torch.arange(12).reshape(4, 3) % 2 == 0
    out = td.clone()
    assert td.where(mask, td.clone().zero_(), out=out) is out
    nested = TensorDict({"l": ragged()}, [4, 3])
    chosen = nested.where(mask, nested.clone().zero_())["l"]
    for i in range(4):
        want = torch.where(mask[i, :, None], td[i]["h"], torch.zeros(()))
        assert (out[i]["h"] == want).all() and (chosen[i]["h"] == want).all()
    other = ragged()
    other[3]["h"].add_(1)
    wrap = {"plain": lambda x: x, "nested": lambda x: TensorDict({"l": x}, [4, 3])}
    for name in wrap:
        assert raffia.assert_close(wrap[name](ragged()), wrap[name](ragged()))
        with pytest.raises(AssertionError, match="h"):
            raffia.assert_close(wrap[name](ragged()), wrap[name](other))
    assert raffia.assert_close(
        TensorDict({"l": make()}, [4, 3]), TensorDict({"l": dense()}, [4, 3])
    )
    nested.apply_(lambda leaf: leaf + 1)
    assert (nested["l"][2]["h"] == ragged()[2]["h"] + 1).all()


def test_stacks_of_stacks_of_ragged_members():
    def one(i, j):
        return TensorDict(x=torch.full((2, i + j + 1), 10 * i + j), y=torch.full((2,), 10 * i + j))

    td = lazy_stack(
        [lazy_stack([one(i, j).auto_batch_size_(1) for j in range(3)]) for i in range(4)]
    )
    want = torch.stack([torch.stack([one(i, j)["y"] for j in range(3)]) for i in range(4)])
    assert td.batch_size == (4, 3, 2) and torch.equal(td["y"], want) and sound(td)
    for index in (1, I[:, 2], I[..., 0], I[1, 2], I[1:, :2, 1], I[[0, 3], [1, 2]]):
        assert torch.equal(td[index]["y"], want[index])
    assert is_lazy(td[1]) and is_lazy(td[:, 2]) and is_lazy(td[..., 0])
    assert td[1, 2]["x"].shape == td.permute(1, 0, 2)[2, 1]["x"].shape == (2, 4)
    assert td[1, 2, 0]["x"].shape == td.transpose(0, 2)[0, 2, 1]["x"].shape == (4,)
    moves = ops(permute=[(1, 0, 2), (2, 1, 0)], transpose=[(0, 2)], reshape=[(12, 2)])
    for op in moves + ops(flatten=[(0, 1)], unsqueeze=[1]):
        assert torch.equal(apply_op(td, op)["y"], apply_op(want, op))
    with pytest.raises(RuntimeError, match="as_list"):
        td["x"]
    got = [[x.shape for x in row] for row in td.get("x", as_list=True)]
    assert got == [[(2, i + j + 1) for j in range(3)] for i in range(4)]
    assert ((td + td)[3, 2]["x"] == 64).all() and (td.clone() == td).all()
    td[2, 1] = 0
    assert not td["y"][2, 1].any() and not td[2, 1]["x"].any() and (td[2, 2]["x"] == 22).all()
    td["z"] = torch.arange(24).reshape(4, 3, 2)
    assert td[3, 2]["z"].tolist() == [22, 23]
    td[:, 1] = TensorDict({"y": torch.full((4, 2), -1)}, [4, 2])
    assert (td["y"][:, 1] == -1).all() and (td["y"][:, 0] >= 0).all()
    td.lock_()
    assert td[0].is_locked and td[0, 0].is_locked


def test_padding_gives_rows_one_length_again():
    rows = [TensorDict(a=torch.full((n,), float(n)), batch_size=[n]) for n in (3, 4)]
    td = lazy_stack(rows).densify(layout=torch.jagged)
    assert td.batch_size == (2, -1)
    for padded in (td.to_padded_tensor(-1.0), td.to_padded_tensor(-1.0, mask_key="mask")):
        assert padded.batch_size == padded["a"].shape == (2, 4) and sound(padded)
        assert padded["a"].tolist() == [[3, 3, 3, -1], [4, 4, 4, 4]]
    assert padded["mask"].tolist() == [[True, True, True, False], [True] * 4]
