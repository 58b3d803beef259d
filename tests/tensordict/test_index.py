"""Indexing: a container indexes as a tensor of shape `batch_size` does.

Every leaf row carries its own number, so `rows = arange(numel).reshape(batch)[index]` gives the
rows the indexed container must hold, whatever the trailing dims of the leaf are.
"""

import numpy as np
import pytest
import torch

from raffia import TensorDict, lazy_stack
from tests.tensordict.kinds import (
    BATCH,
    ROWS,
    check_rows,
    check_same,
    each,
    every_kind,
    is_lazy,
    leaves,
    make,
    refused,
)

T, I = torch.tensor, np.s_  # noqa: E741
ROW = T([True, False, True, False])
FULL = torch.eye(4, 3, dtype=torch.bool)
ARRAY = np.array([0, 2])

VIEWS = {
    "ints": [0, 3, -1, -4, np.int64(1), (2, 1), (-2, -3), (T(2), T(1))],
    "slices": [I[1:3], I[::2], I[-3:-1], I[2:2], I[2:20], I[10:20], I[1:, :2], I[:, :], ()],
    "ints and slices": [I[1, 0:2], I[:, 1], I[1:3, -1]],
    "ellipses": [..., I[..., 0], I[0, ...], I[..., :2], I[:3, ..., 1:3], I[0, 1, ...]],
    "new dims": [None, (None, 0), (None, None), I[:, None], I[:, None, 1], (..., None)],
    "new dims and ellipses": [(None, ..., None), (0, 1, ..., None)],
}
GATHERS = {
    "lists": [[0, 2], [-1, 0, -1], [], ([0, 2, 3], [1, 0, 1]), I[:, [0, 2]], I[..., [2, 0]]],
    "lists and ints": [(1, [0, 2]), (1, [0, 2], None)],
    "ranges": [range(1, 3), range(0, 4, 2), I[:, range(2)], I[range(1, 4), :1]],
    "two ranges": [(range(3), range(3))],
    "tensors": [T(2), T([0, 3]), T([-1, 0]), T([0, 3], dtype=torch.int32), T([]).long()],
    "tensors of rows": [T([[0, 3], [1, 1], [2, 2]]), I[1:3, T([[0, 2], [1, 1]])]],
    "tensors and slices": [I[T([0, 1]), :], I[:, T([0, 2])], I[:3, T([0, 1]), ...]],
    "two tensors": [(T([0, 1, 3]), T([2, 0, 1])), (T([[0], [1], [3]]), T([2, 0]))],
    "tensors and ints": [(T([0, 1]), 0), (0, T([0, 1]))],
    "tensors and new dims": [(T([0, 1]), None, T([1, 2])), (None, T([1, 0, 1]))],
    "last": [(..., T([0, 1]), None)],
    "arrays": [ARRAY, np.array([[0, 2], [3, 3], [1, 0]]), I[:, np.array([2, 1])]],
    "masks of rows": [ROW, ROW & False, I[ROW, :2], (ROW, 1), (ROW, T([0, 2])), (None, ROW)],
    "masks of columns": [I[:, T([True, False, True])], (..., T([False, False, True]))],
    "whole masks": [FULL, FULL & False, FULL | True, (FULL, None)],
    "other masks": [ROW.tolist(), ROW.numpy(), FULL.numpy(), True, T(True), (True, 0)],
    "truth values": [(True, True), (True, T(True), None), I[True, :, True], I[1:, None, True, 0]],
    "truth values and lists": [(True, [0, 2]), I[True, :, [0, 2]], I[T(True), :, T([[0], [2]])]],
    "false": [False, (False, False), (True, False), I[:, False], I[False, :, [1]]],
}
ALL = [index for row in (*VIEWS.values(), *GATHERS.values()) for index in row]


def shifted():
    """Same structure, with other values: leaf + 100 (bool leaves negated)."""
    return make().apply(lambda x: ~x if x.dtype is torch.bool else x + 100)


def check_read(td, rows):
    if is_lazy(td) and 0 in rows.shape:  # a stack of no members knows no keys
        assert td.batch_size == rows.shape
    else:
        check_rows(td, rows)


@every_kind
def test_rows_are_read(kind):
    td = kind(make())

    def check(index):
        got = td[index]
        check_read(got, ROWS[index])
        check_rows(td, ROWS)
        assert got.names == [None] * got.ndim

    each(ALL, check)
    check_rows(td[[[0, 2], [1, 0], [3, 3]]], ROWS[T([[0, 2], [1, 0], [3, 3]])])
    check_rows(td[None, 1:, ..., None][0, :, 1], ROWS[1:, 1, None])
    rows = list(td)
    assert len(td) == len(rows) == 4
    for i, row in enumerate(rows):
        check_rows(row, ROWS[i])


@every_kind
def test_rows_are_written(kind):
    def check(index):
        other, before = shifted(), leaves(make())
        joined = {key: torch.cat([old, other[key]]).flatten(0, 1) for key, old in before.items()}
        rows, untouched = ROWS.clone(), torch.ones(BATCH, dtype=torch.bool)
        rows[index] = ROWS[index] + 12  # 12.. are the rows of `other`
        untouched[index] = False
        for value in (other[index], kind(shifted())[index]):
            if is_lazy(value) and 0 in value.batch_size:
                continue
            td = kind(make())
            td[index] = value
            for key in before:
                assert torch.equal(leaves(td)[key], joined[key][rows]), key
        td[index] = 0
        for key in before:
            want = joined[key][rows]
            want = want.masked_fill(line_up(~untouched, want), 0)
            assert torch.equal(leaves(td)[key], want), key

    each(ALL, check)


def test_views_and_copies():
    def check(index):
        td = make()
        sub = td[index]
        sub["b"].fill_(-7)
        sub["n", "c"].fill_(-7)
        hit = torch.zeros(12, dtype=torch.bool)
        hit[ROWS[index].flatten()] = True
        assert torch.equal(td["b"] == -7, hit.reshape(BATCH))
        assert torch.equal((td["n", "c"] == -7).flatten(2).all(-1), hit.reshape(BATCH))

    check_rows(make()[False], ROWS[False])
    each([index for row in VIEWS.values() for index in row], check)
    td = make()
    for index in ([0, 2], T([0, 3]), range(1, 3), ROW, FULL):
        td[index].zero_()
    sub = td[1]
    sub["extra"] = sub["m", "k", "e"] = torch.zeros(3)
    del sub["a"]
    check_rows(td, ROWS)
    for row in td:
        row["b"].zero_()
    assert (td["b"] == 0).all()


def test_of_empty_containers_and_dims():
    with pytest.raises(IndexError, match="index -5 is out of bounds"):
        make()[-5]
    td = TensorDict({"a": torch.zeros(0, 3, 2)}, [0, 3])
    assert td[:, 1]["a"].shape == (0, 2) and td[[]]["a"].shape == (0, 3, 2)
    with pytest.raises(IndexError):
        td[0]
    td = TensorDict({"a": torch.arange(3)})
    for index in (0, I[:], I[0:1], [0], T(0), T([True])):
        with pytest.raises(RuntimeError, match="batch_dims"):
            td[index]
    with pytest.raises(TypeError, match="0-d"):
        iter(td)
    for index in (..., ()):
        td[index] = 2
        assert td["a"].tolist() == [2, 2, 2]


OUT_OF_RANGE = [4, -5, (0, 3), (0, 0, 0), I[:, :, :], T([5]), [0, 7], (0, 0, None, T([0]))]
OUT_OF_RANGE += [(0, ..., 0, 0), (..., 0, 0, 0), ([0, 1], [0, 1, 2])]
NO_INDEX = [torch.ones(3).bool(), torch.ones(4, 3, 2).bool(), 1.0, object(), T([0.0, 1.0])]
REFUSED = {
    **{
        f"two ellipses, {error.__name__}": (lambda td: td[..., 0, ...], error, "one ellipsis")
        for error in (IndexError, RuntimeError)
    },
    "set_at_ out of range": (lambda td: td.set_at_("a", 1, 9), IndexError, ""),
    "mask of rows": (
        lambda td: TensorDict(s=["u", "v"], batch_size=[2]).masked_fill(torch.ones(7).bool(), 0),
        RuntimeError,
        r"\(7,\)",
    ),
    "where": (lambda td: td.where(FULL, shifted().select("a")), KeyError, "pad"),
    "gather of 2": (lambda td: td.gather(2, T([[0]])), (RuntimeError, IndexError), ""),
    "gather beyond": (lambda td: td.gather(0, T([[5, 0, 0]])), (RuntimeError, IndexError), ""),
    "text": (lambda td: put(td, "text"), TypeError, "rows can be set to a container"),
    "a number in a dict": (lambda td: put(td, {"a": 1.0}), RuntimeError, "dimension mismatch"),
}


def put(td, value, index=0):
    td[index] = value


def rows_of_shape(*shape):
    return TensorDict({"b": torch.zeros(shape, dtype=torch.long)}, shape)


@every_kind
def test_refused(kind):
    for index in OUT_OF_RANGE:
        for act in (lambda td, i=index: td[i], lambda td, i=index: put(td, 0, i)):
            with pytest.raises(IndexError):
                act(kind(make()))
    td = kind(make())
    for shape in ((2,), (4,), (1, 2), (3, 3), (2, 1, 3)):
        with pytest.raises(RuntimeError, match="batch size"):
            td[0] = rows_of_shape(*shape)
    check_rows(td, ROWS)


def test_refused_by_dense_ones():
    each(REFUSED, refused(make))
    each(REFUSED, refused(lambda: make().lock_()))
    for index in NO_INDEX:
        with pytest.raises(IndexError):
            make()[index]
    td = TensorDict({"a": torch.zeros(3)}, [3])
    with pytest.raises(RuntimeError, match="batch size"):
        td[:2] = TensorDict({"a": 1.0})
    assert td["a"].tolist() == [0.0] * 3


# ---------------------------------------------------------------------- assigned values


def test_dicts_and_new_entries():
    for index, shape in ((0, (3,)), (I[1:3], (2, 3)), (I[:, 1], (4,)), (ROW, (2, 3)), (FULL, (3,))):
        td, want = make(), make()
        td[index], want[index] = shifted()[index].to_dict(), shifted()[index]
        check_same(td, want)
        for dtype in (torch.float, torch.int32, torch.bool):
            td = make()
            td[index] = TensorDict({"q": torch.ones(*shape, 7, dtype=dtype)}, shape)
            filled = torch.zeros(4, 3, 7, dtype=dtype)
            filled[index] = 1
            assert td["q"].dtype == dtype and (td["q"] == filled).all() and (td["b"] == ROWS).all()
    td = make()
    td[0] = {("n", "c"): torch.ones(3, 5, 2).long()}
    assert (td["n", "c"][0] == 1).all() and torch.equal(td["n", "c"][1:], make()["n", "c"][1:])
    td[0] = TensorDict({"p": TensorDict({"q": torch.ones(3, 6)}, [3, 6])}, [3])
    assert td["p"].batch_size == (4, 3, 6) and td["p", "q"].sum((1, 2)).tolist() == [18, 0, 0, 0]
    td[1] = {"m": {"k": {"q": torch.ones(3)}}}
    assert td["m", "k", "q"].sum(1).tolist() == [0, 3, 0, 0]
    assert (td["m", "k", "d"] == make()["m", "k", "d"]).all()


def test_assigned_values():
    td = make()
    a, c = td["a"], td["n", "c"]
    td[1] = shifted()[1]
    assert td["a"] is a and td["n", "c"] is c  # in place
    td[0] = TensorDict({"b": torch.full((3,), 2.75)}, [3])  # cast to the entry; the rest stays
    assert td["b"].dtype == torch.int64 and td["b"][0].tolist() == [2, 2, 2]
    assert (td["a"][0] == make()["a"][0]).all()
    td[0:2] = TensorDict({"a": torch.ones(2, 3, 2)}, [2])  # of a shorter batch
    td[2] = TensorDict({"a": torch.ones(3, 2)}, [])
    td[0:2] = TensorDict({"b": T([7, 8, 9])}, [3])  # broadcast over leading dims
    assert (td["a"][:3] == 1).all() and td["b"][:2].tolist() == [[7, 8, 9]] * 2
    td = make()
    td[0] = td[3]
    td[[1, 2]] = lazy_stack([shifted()[i] for i in (3, 1)])
    assert td["b"].tolist() == [[9, 10, 11], [109, 110, 111], [103, 104, 105], [9, 10, 11]]
    td = make().select("a", "b")
    td[1] += 1
    assert (td["b"] - ROWS).sum(1).tolist() == [0, 3, 0, 0]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.float8_e8m0fnu])
def test_values_of_dtypes_that_torch_cannot_set(dtype):
    td = TensorDict(x=T([1, 2, 4]).to(dtype), batch_size=[3])
    td[T([2, 0])] = td[:2].clone()
    td[T([False, True, False])] = 8
    assert td["x"].int().tolist() == [2, 8, 1]
    with pytest.raises(RuntimeError, match="'x' of shape"):
        td[T([0, 1])] = T([1.0, 2.0, 3.0])


def test_a_locked_container_accepts_values_but_no_entries():
    td = make().lock_()
    td[1] = 0
    td[2] = shifted()[2]
    td.set_at_("b", 1, 0)
    assert td["b"][:3].tolist() == [[1] * 3, [0] * 3, [106, 107, 108]] and td.is_locked
    td = TensorDict({"a": torch.zeros(4)}, [4]).lock_()
    with pytest.raises(RuntimeError, match="Cannot modify locked TensorDict"):
        td[1] = TensorDict(a=T(5.0), b=T(6.0))
    assert td["a"].tolist() == [0.0] * 4 and set(td.keys()) == {"a"}


# ------------------------------------------------------------------------ masks, where, gather


def line_up(mask, value):
    return mask.reshape(*mask.shape, *[1] * (value.ndim - mask.ndim))


@every_kind
def test_masks(kind):
    for mask in (FULL, ROW, FULL & False, FULL | True):
        td = kind(make())
        out = td.masked_fill(mask, 0)
        want = {key: x.masked_fill(line_up(mask, x), 0) for key, x in leaves(make()).items()}
        assert all(torch.equal(leaves(out)[key], value) for key, value in want.items())
        check_rows(td, ROWS)
        for got in (td.masked_select(mask), torch.masked_select(td, mask)):
            check_read(got, ROWS[mask])
            got if is_lazy(td) else got.zero_()
        check_rows(td, ROWS)
        assert td.masked_fill_(mask, 0) is td
        assert all(torch.equal(leaves(td)[key], value) for key, value in want.items())


@every_kind
def test_where(kind):
    td, other = kind(make()), shifted()
    for fill in (other, kind(shifted()), 0, T(0)):
        for mask in (FULL, ROW):
            for out in (td.where(mask, fill), torch.where(mask, td, fill)):
                for key, value in leaves(td).items():
                    new = leaves(fill)[key] if hasattr(fill, "keys") else fill
                    want = torch.where(line_up(mask, value), value, new)
                    assert torch.equal(leaves(out)[key], want)
                assert out.get("n").batch_size == (4, 3, 5)
    check_rows(td, ROWS)


def test_where_out_and_pads():
    out = make()
    assert make().where(FULL, shifted(), out=out) is out
    assert (out["b"] == torch.where(FULL, ROWS, ROWS + 100)).all()
    out = make().where(FULL, shifted().select("a"), pad=0)
    assert (out["b"] == torch.where(FULL, ROWS, 0)).all()
    assert (out["a"][0, 1] == T([102.0, 103.0])).all()
    back = make().select("a").where(FULL, shifted(), pad=0)
    assert (back["b"] == torch.where(FULL, 0, ROWS + 100)).all()
    first = torch.where(FULL, 0, make().select("b"))
    assert (first["b"] == torch.where(FULL, 0, ROWS)).all()


@every_kind
def test_gather(kind):
    for dim, index in (
        (0, [[0, 1, 2], [3, 2, 1]]),
        (-2, [[3, 3, 3]]),
        (1, [[0], [1], [2], [0]]),
        (-1, [[0, 2], [1, 1], [2, 0], [0, 1]]),
        (1, [[0], [1]]),
    ):
        td, index = kind(make()), T(index)
        for out in (
            td.gather(dim, index),
            torch.gather(input=td, dim=dim, index=index),
        ):
            check_rows(out, ROWS.gather(dim, index))
    out = make()[:1].clone()
    assert make().gather(0, T([[2, 1, 0]]), out=out) is out
    check_rows(out, ROWS.gather(0, T([[2, 1, 0]])))
