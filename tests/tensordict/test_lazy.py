"""Lazy stacks: containers that stay apart and are stacked when an entry is read.

Two stacks are used throughout. `make(dim)` has alike parts, so that everything can be compared with
the dense stack of the same parts. `unlike(dim)` has an entry `h` whose shape differs from part to
part, and in each part an entry that no other has.
"""

import pickle
import warnings

import numpy as np
import pytest
import torch

from raffia import (
    LazyStackedTensorDict,
    TensorDict,
    assert_close,
    dense_stack_tds,
    is_tensor_collection,
    lazy_stack,
    maybe_dense_stack,
)

T, S = torch.tensor, slice
BATCHES = {0: (4, 3), 1: (3, 4)}  # four parts of batch size [3]


def part(i):
    return TensorDict(
        {
            "a": torch.arange(6.0).reshape(3, 2) + 10 * i,
            "b": torch.arange(3) + 10 * i,
            "n": TensorDict({"c": torch.arange(15).reshape(3, 5) + 100 * i}, [3, 5]),
        },
        [3],
    )


def make(dim=0):
    return lazy_stack([part(i) for i in range(4)], dim)


def dense(dim=0):
    return torch.stack([part(i) for i in range(4)], dim)


def unlike_part(i):
    return TensorDict(
        {
            "a": torch.full((3, 2), float(i)),
            "h": torch.arange(3.0 * (i + 2)).reshape(3, i + 2) + 100 * i,
            f"only{i}": torch.zeros(3),
        },
        [3],
    )


def unlike(dim=0):
    return lazy_stack([unlike_part(i) for i in range(4)], dim)


def is_lazy(td, dim=None):
    return isinstance(td, LazyStackedTensorDict) and (dim is None or td.stack_dim == dim)


def leaves(td):
    return dict(td.items(include_nested=True, leaves_only=True))


def check_same(got, want):
    """Same batch sizes, keys and values, whatever the class."""
    assert is_tensor_collection(got)
    assert got.batch_size == want.batch_size
    got_leaves, want_leaves = leaves(got), leaves(want)
    assert set(got_leaves) == set(want_leaves)
    for key, value in want_leaves.items():
        torch.testing.assert_close(got_leaves[key], value, rtol=0, atol=0)
    for key in want.keys(include_nested=True):
        if is_tensor_collection(want.get(key)):
            assert got.get(key).batch_size == want.get(key).batch_size, key


def call(name, *args, **options):
    """A method call, to be made on containers of several kinds."""
    return lambda td: getattr(td, name)(*args, **options)


def each(table, check):
    """Make the check of every row of a table, and name those that fail."""
    failed = []
    for name, row in table.items():
        try:
            check(row)
        except (Exception, pytest.fail.Exception) as error:
            failed.append(f"{name}: {error!r}"[:300])
    assert not failed, "\n".join(failed)


# ------------------------------------------------------------ results as those of the dense stack

# what is called on stacks along dim 0 and dim 1, and where the stack dimension stands afterwards;
# None: class and stack dimension are free
RESULTS = {
    "unsqueeze, 0": (call("unsqueeze", 0), 1, 2),
    "unsqueeze, 1": (call("unsqueeze", 1), 0, 2),
    "unsqueeze, 2": (call("unsqueeze", 2), 0, 1),
    "unsqueeze, -1": (call("unsqueeze", -1), 0, 1),
    "unsqueeze, -2": (call("unsqueeze", -2), 0, 2),
    "unsqueeze, -3": (call("unsqueeze", -3), 1, 2),
    "squeeze": (call("squeeze"), 0, 1),
    "squeeze, 0": (call("squeeze", 0), 0, 1),
    "squeeze, -1": (call("squeeze", -1), 0, 1),
    "permute, 1, 0": (call("permute", 1, 0), 1, 0),
    "permute, (-1, -2)": (call("permute", (-1, -2)), 1, 0),
    "permute, 0, 1": (call("permute", 0, 1), 0, 1),
    "transpose, 0, 1": (call("transpose", 0, 1), 1, 0),
    "transpose, -1, 0": (call("transpose", -1, 0), 1, 0),
    "transpose, 0, 0": (call("transpose", 0, 0), 0, 1),
    "swapaxes, 0, 1": (call("swapaxes", 0, 1), 1, 0),
    "movedim, 0, 1": (call("movedim", 0, 1), 1, 0),
    "reshape, 12": (call("reshape", 12), 0, 0),
    "reshape, -1": (call("reshape", -1), 0, 0),
    "flatten": (call("flatten"), 0, 0),
    "flatten, 0, 1": (call("flatten", 0, 1), 0, 0),
    "view, 12": (call("view", 12), 0, 0),
    "view, -1": (call("view", -1), 0, 0),
    "reshape, 2, 6": (call("reshape", 2, 6), None, None),
    "reshape, 6, -1": (call("reshape", 6, -1), None, None),
    "reshape, 2, 2, 3": (call("reshape", 2, 2, 3), None, None),
    "expand, 5, -1, -1": (call("expand", 5, -1, -1), None, None),
    "repeat, 2, 1": (call("repeat", 2, 1), 0, 1),
    "repeat, 1, 2": (call("repeat", 1, 2), 0, 1),
    "repeat, (2, 3)": (call("repeat", (2, 3)), 0, 1),
    "repeat_interleave, 2, dim=0": (call("repeat_interleave", 2, dim=0), 0, 1),
    "repeat_interleave, 2, dim=1": (call("repeat_interleave", 2, dim=1), 0, 1),
    "roll, 1, 0": (call("roll", 1, 0), None, None),
    "roll, -1, 1": (call("roll", -1, 1), None, None),
    "flip, 0": (call("flip", 0), None, None),
    "flip, (0, 1)": (call("flip", (0, 1)), None, None),
    "narrow, 0, 1, 2": (call("narrow", 0, 1, 2), None, None),
    "narrow, 1, 1, 2": (call("narrow", 1, 1, 2), None, None),
    "tile, (2, 1)": (call("tile", (2, 1)), None, None),
    "atleast_3d": (call("atleast_3d"), 1, 2),
    "rot90": (call("rot90"), None, None),
    "pad, [0, 1]": (call("pad", [0, 1]), None, None),
    "clone": (call("clone"), 0, 1),
    "copy": (call("copy"), 0, 1),
    "+ 1": (lambda td: td + 1, 0, 1),
    "1 +": (lambda td: 1 + td, 0, 1),
    "- itself": (lambda td: td - td, 0, 1),
    "* itself": (lambda td: td * td, 0, 1),
    "/ 2": (lambda td: td / 2, 0, 1),
    "** 2": (lambda td: td**2, 0, 1),
    "minus": (lambda td: -td, 0, 1),
    "== itself": (lambda td: td == td, 0, 1),
    "== 0": (lambda td: td == 0, 0, 1),
    "!= 0": (lambda td: td != 0, 0, 1),
    "< 3": (lambda td: td < 3, 0, 1),
    "abs": (call("abs"), 0, 1),
    "add, alpha": (lambda td: td.add(td, alpha=2), 0, 1),
    "clamp": (call("clamp", 2, 11), 0, 1),
    "exp, log": (lambda td: td.float().exp().log(), 0, 1),
    "sum": (lambda td: td.float().sum(), None, None),
    "sum(0)": (lambda td: td.float().sum(0), None, None),
    "sum(1)": (lambda td: td.float().sum(1), None, None),
    "mean": (lambda td: td.float().mean(), None, None),
    "mean(0)": (lambda td: td.float().mean(0), None, None),
    "apply": (call("apply", lambda x: x * 2 + 1), 0, 1),
    "apply two": (lambda td: td.apply(torch.add, td), 0, 1),
    "apply, no batch": (call("apply", lambda x: x.sum(), batch_size=[]), None, None),
    "named_apply": (call("named_apply", lambda name, x: x + (name == "a")), 0, 1),
    "select a": (call("select", "a"), 0, 1),
    "select a, n": (call("select", "a", "n"), 0, 1),
    "select n, c": (call("select", ("n", "c")), 0, 1),
    "select b and n, c": (call("select", "b", ("n", "c")), 0, 1),
    "select, not strict": (call("select", "zz", "a", strict=False), 0, 1),
    "exclude a": (call("exclude", "a"), 0, 1),
    "exclude a, n": (call("exclude", "a", "n"), 0, 1),
    "exclude n, c": (call("exclude", ("n", "c")), 0, 1),
    "exclude zz": (call("exclude", "zz"), 0, 1),
    "flatten_keys": (call("flatten_keys", "."), 0, 1),
    "unflatten_keys": (lambda td: td.flatten_keys(".").unflatten_keys("."), 0, 1),
    "float64": (call("to", torch.float64), 0, 1),
    "cpu": (call("to", "cpu"), 0, 1),
    "empty": (call("empty"), 0, 1),
    "empty, recurse": (call("empty", recurse=True), 0, 1),
    "detach": (call("detach"), 0, 1),
    "data": (lambda td: td.data, 0, 1),
    "to_lazystack(0)": (call("to_lazystack", 0), 0, 0),
    "to_lazystack(-1)": (call("to_lazystack", -1), 1, 1),
    "contiguous": (call("contiguous"), None, None),
    "densify": (call("densify"), None, None),
    "to_tensordict": (call("to_tensordict"), None, None),
    "n": (lambda td: td["n"], 0, 1),
    "rows of n": (lambda td: td["n"][1:, 0], None, None),
    "gather(0)": (call("gather", 0, T([[0, 1, 2], [2, 1, 0]])), None, None),
    "gather(1)": (call("gather", 1, T([[0], [2]])), None, None),
    "masked_select": (lambda td: td.masked_select(eye(td)), None, None),
    "masked_fill": (lambda td: td.masked_fill(eye(td), 0), 0, 1),
    "where 0": (lambda td: td.where(eye(td), 0), 0, 1),
    "where": (lambda td: td.where(eye(td), td * 2), 0, 1),
    "torch.where": (lambda td: torch.where(eye(td), td, td * 2), 0, 1),
    "torch.permute": (lambda td: torch.permute(td, (1, 0)), 1, 0),
    "torch.unsqueeze": (lambda td: torch.unsqueeze(td, 0), 1, 2),
    "torch.squeeze": (torch.squeeze, 0, 1),
    "torch.flatten": (torch.flatten, 0, 0),
    "torch.transpose": (lambda td: torch.transpose(td, 0, 1), 1, 0),
    "zeros_like": (torch.zeros_like, 0, 1),
    "ones_like": (torch.ones_like, 0, 1),
    "full_like": (lambda td: torch.full_like(td, 3), 0, 1),
    "torch.clone": (torch.clone, 0, 1),
    "stack(0)": (lambda td: torch.stack([td, td * 2]), 1, 2),
    "stack(1)": (lambda td: torch.stack([td, td * 2], 1), 0, 2),
    "stack(2)": (lambda td: torch.stack([td, td * 2], 2), 0, 1),
    "stack(-1)": (lambda td: torch.stack([td, td * 2], -1), 0, 1),
    "stack(-3)": (lambda td: torch.stack([td, td * 2], -3), 1, 2),
    "cat(0)": (lambda td: torch.cat([td, td * 2]), 0, 1),
    "cat(1)": (lambda td: torch.cat([td, td * 2], 1), 0, 1),
    "cat(-1)": (lambda td: torch.cat([td, td * 2], -1), 0, 1),
}


def eye(td):
    return torch.eye(*td.batch_size, dtype=torch.bool)


@pytest.mark.parametrize("dim", [0, 1])
def test_results_are_those_of_the_dense_stack(dim):
    def check(row):
        function, *after = row
        td = make(dim)
        got = function(td)
        check_same(got, function(dense(dim)))
        assert after[dim] is None or is_lazy(got, after[dim]), type(got)
        check_same(td, dense(dim))

    each(RESULTS, check)


# the same of operations that give several containers; "dense": these are members
PARTS = {
    "split, 2": (call("split", 2), 0, 1),
    "split, 3, 1": (call("split", 3, 1), 0, 1),
    "split, 2, -1": (call("split", 2, -1), 0, 1),
    "split along the stack": (lambda td: td.split([1, 2, 1], td.shape.index(4)), 0, 1),
    "chunk, 2": (call("chunk", 2), 0, 1),
    "chunk, 2, 1": (call("chunk", 2, 1), 0, 1),
    "tensor_split, 2": (call("tensor_split", 2), 0, 1),
    "unbind, 0": (call("unbind", 0), "dense", 0),
    "unbind, 1": (call("unbind", 1), 0, "dense"),
    "unbind, -1": (call("unbind", -1), 0, "dense"),
    "unbind, -2": (call("unbind", -2), "dense", 0),
    "iteration": (list, "dense", 0),
    "torch.split": (lambda td: torch.split(td, 2), 0, 1),
    "torch.chunk": (lambda td: torch.chunk(td, 2), 0, 1),
    "torch.unbind": (lambda td: torch.unbind(td, 1), 0, "dense"),
    "split_keys": (lambda td: td.split_keys(["a"], [("n", "c")]), 0, 1),
}


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_are_those_of_the_dense_stack(dim):
    def check(row):
        function, *after = row
        got, want = function(make(dim)), function(dense(dim))
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            check_same(one, other)
            if after[dim] is not None:
                assert (
                    type(one) is TensorDict if after[dim] == "dense" else is_lazy(one, after[dim])
                )

    each(PARTS, check)


def test_cumulative_operations():
    for stack_dim in (0, 1):
        for name in ("cummax", "cummin"):
            for dim in (0, 1, -1):
                got, want = (getattr(x(stack_dim), name)(dim) for x in (make, dense))
                check_same(got.values, want.values)
                check_same(got.indices, want.indices)


# operations that unlike members take, each for itself
APART = {
    "unsqueeze(0)": call("unsqueeze", 0),
    "unsqueeze(-1)": call("unsqueeze", -1),
    "permute": call("permute", 1, 0),
    "transpose": call("transpose", 0, 1),
    "reshape(12)": call("reshape", 12),
    "reshape(2, 2, 3)": call("reshape", 2, 2, 3),
    "view": call("view", 12),
    "flatten": call("flatten"),
    "unflatten": call("unflatten", 0, (2, 2)),
    "expand": call("expand", 2, 4, 3),
    "repeat": call("repeat", 2, 1),
    "clone": call("clone"),
    "float64": call("to", torch.float64),
    "apply": call("apply", lambda x: x + 1),
    "* itself": lambda td: td * td,
    "masked_fill": call("masked_fill", torch.eye(4, 3, dtype=torch.bool), -1),
    "zeros_like": torch.zeros_like,
    "cat": lambda td: torch.cat([td, td]),
    "cat(1)": lambda td: torch.cat([td, td], 1),
    "stack": lambda td: torch.stack([td, td]),
}


def test_unlike_members_stay_apart():
    """All entries: each is what the operation makes of the members padded to one shape."""

    def padded(td):
        entries = {name: td.get(name, as_padded_tensor=True) for name in ("a", "h")}
        return TensorDict(entries, td.batch_size)

    def check(function):
        got, want = function(unlike()), function(padded(unlike()))
        assert is_lazy(got) and set(got.keys()) == {"a", "h"}
        check_same(got.select("a"), want.select("a"))
        flat, expected = got.reshape(-1), want["h"].flatten(0, got.ndim - 1)
        for row, wide in zip(flat.get("h", as_list=True), expected, strict=True):
            assert torch.equal(row, wide[..., : row.shape[-1]])

    each(APART, check)


# ------------------------------------------------------------------------------------- indexing

# index, result when stacked along dim 0 of [4, 3]: "dense", or the stack dim of a lazy result
INDEX_0 = {
    "int": (0, "dense"),
    "int-neg": (-1, "dense"),
    "np.int64": (np.int64(1), "dense"),
    "0-d tensor": (T(2), "dense"),
    "int, int": ((0, 1), "dense"),
    "int, ellipsis": ((0, ...), "dense"),
    "int, slice": ((2, S(1, 3)), "dense"),
    "int, tensor": ((0, T([0, 1])), "dense"),
    "None, int": ((None, 0), "dense"),
    "slice": (S(1, 3), 0),
    "slice-step": (S(None, None, 2), 0),
    "slice-neg": (S(-3, -1), 0),
    "slice-all": (S(None), 0),
    "ellipsis": (..., 0),
    "()": ((), 0),
    "slice, int": ((S(None), 1), 0),
    "slice, int-neg": ((S(1, 3), -1), 0),
    "ellipsis, int": ((..., 0), 0),
    "slice, slice": ((S(None), S(0, 2)), 0),
    "None": (None, 1),
    "None, None": ((None, None), 2),
    "slice, None": ((S(None), None), 0),
    "ellipsis, None": ((..., None), 0),
    "True": (True, 1),
    "list": ([0, 2], 0),
    "list-neg-repeat": ([-1, 0, -1], 0),
    "range": (range(1, 3), 0),
    "numpy": (np.array([0, 2]), 0),
    "tensor": (T([0, 3]), 0),
    "tensor-2d": (T([[0, 3], [1, 1], [2, 2]]), 0),
    "slice, list": ((S(None), [0, 2]), 0),
    "slice, range": ((S(None), range(2)), 0),
    "slice, tensor": ((S(None), T([0, 2])), 0),
    "slice, 0-d tensor": ((S(None), T(1)), 0),
    "slice, tensor-2d": ((S(None), T([[0, 2], [1, 1]])), 0),
    "tensor, slice": ((T([0, 1]), S(None)), 0),
    "tensor, slice-part": ((T([0, 1]), S(1, 3)), 0),
    "tensor, int": ((T([0, 1]), 0), 0),
    "tensor, tensor": ((T([0, 1, 3]), T([1, 2, 2])), 0),
    "tensor, None, tensor": ((T([0, 1]), None, T([1, 2])), 0),
    "tensor, tensor broadcast": ((T([[0], [1], [3]]), T([0, 2])), 0),
    "lists": (([0, 2], [1, 0]), 0),
    "mask-row": (T([True, False, True, False]), 0),
    "mask-list": ([True, False, True, False], 0),
    "mask-numpy": (np.array([True, False, False, True]), 0),
    "mask-row, int": ((T([True, False, True, False]), 1), 0),
    "None, mask-row": ((None, T([True, False, True, False])), 1),
    "slice, mask-col": ((S(None), T([True, False, True])), 0),
    "mask-full": (torch.eye(4, 3, dtype=torch.bool), 0),
    "mask-full-all": (torch.ones(4, 3, dtype=torch.bool), 0),
}
# the same for dim 1 of [3, 4]
INDEX_1 = {
    "int": (0, 0),
    "int-neg": (-1, 0),
    "0-d tensor": (T(2), 0),
    "int, int": ((0, 3), "dense"),
    "int, slice": ((0, S(1, 3)), 0),
    "int, ellipsis": ((0, ...), 0),
    "int, tensor": ((0, T([0, 1])), 0),
    "ellipsis, int": ((..., 0), "dense"),
    "slice, int": ((S(None), 1), "dense"),
    "slice, 0-d tensor": ((S(None), T(1)), "dense"),
    "slice": (S(1, 3), 1),
    "slice-step": (S(None, None, 2), 1),
    "ellipsis": (..., 1),
    "slice, slice": ((S(None), S(0, 2)), 1),
    "slice, slice-step": ((S(0, 2), S(None, None, 3)), 1),
    "None": (None, 2),
    "None, int": ((None, 0), 1),
    "slice, None": ((S(None), None), 2),
    "ellipsis, None": ((..., None), 1),
    "list": ([0, 2], 1),
    "range": (range(1, 3), 1),
    "numpy": (np.array([0, 2]), 1),
    "tensor": (T([0, 2]), 1),
    "tensor-2d": (T([[0, 2], [1, 1], [2, 2]]), 2),
    "slice, range": ((S(None), range(2)), 1),
    "slice, tensor": ((S(None), T([0, 2, 3])), 1),
    "slice, tensor-2d": ((S(None), T([[0, 2], [1, 1]])), 1),
    "tensor, slice": ((T([0, 1]), S(None)), 1),
    "tensor, int": ((T([0, 1]), 0), "dense"),
    "tensor, tensor": ((T([0, 1]), T([1, 3])), 0),
    "tensor, tensor broadcast": ((T([[0], [1]]), T([0, 2])), 0),
    "mask-row": (T([True, False, True]), 1),
    "mask-row, int": ((T([True, False, True]), 1), "dense"),
    "None, mask-row": ((None, T([True, False, True])), 2),
    "slice, mask-col": ((S(None), T([True, False, True, False])), 1),
    "mask-full": (torch.eye(3, 4, dtype=torch.bool), 0),
}
CASES = {
    f"{dim}: {name}": (dim, *case)
    for dim, cases in enumerate((INDEX_0, INDEX_1))
    for name, case in cases.items()
}


def test_rows():
    def check(case):
        dim, index, result = case
        got = make(dim)[index]
        check_same(got, dense(dim)[index])
        assert type(got) is TensorDict if result == "dense" else is_lazy(got, result)
        got = unlike(dim)[index]  # entries that all members share come out as of the dense stack
        want = torch.stack([unlike_part(i).select("a") for i in range(4)], dim)[index]
        check_same(got.select("a"), want)
        assert "h" in got.keys()

    each(CASES, check)


def test_rows_are_written():
    def check(case):
        dim, index, _ = case
        for new in (0, (dense(dim) * 2 + 1)[index], (make(dim) * 2 + 1)[index]):
            td, want = make(dim), dense(dim)
            members, held = list(td.tensordicts), [one["a"] for one in td.tensordicts]
            td[index] = new
            want[index] = new if not is_lazy(new) else new.contiguous()
            check_same(td, want)
            assert is_lazy(td, dim)
            assert all(a is b for a, b in zip(td.tensordicts, members, strict=True))
            for x, row in zip(held, want["a"].unbind(dim), strict=True):
                assert torch.equal(x, row)

    each(CASES, check)


def test_no_rows():
    nothing = torch.zeros(0, dtype=torch.long)
    for dim in (0, 1):
        masks = torch.zeros(BATCHES[dim], dtype=torch.bool)
        for index in ([], S(2, 2), S(7, 9), nothing, (S(None), S(0, 0)), masks, masks[:, 0]):
            assert make(dim)[index].batch_size == dense(dim)[index].batch_size, index


def test_rows_out_of_range():
    three = (S(None),) * 3
    for dim, index in [
        *((0, i) for i in (4, -5, (0, 3), (0, 0, 0), T([5]))),
        *((1, i) for i in (3, (0, 4), three, T([5]))),
    ]:
        with pytest.raises(IndexError):
            make(dim)[index]
        with pytest.raises(IndexError):
            make(dim)[index] = 0


def test_members_are_handed_out():
    td = make()
    assert td[0] is td.tensordicts[0] and td[-1] is td.tensordicts[3]
    assert td[1:3].tensordicts[0] is td.tensordicts[1]
    assert td[[3, 0]].tensordicts[1] is td.tensordicts[0]
    assert list(td)[2] is td.tensordicts[2]
    assert make(1)[:, 2]["b"].tolist() == part(2)["b"].tolist()
    for dim in (0, 1):
        td = make(dim)
        assert all(a is b for a, b in zip(td.unbind(dim), td.tensordicts, strict=True))
        assert td.to_lazystack(dim) is td


def test_slices_share_memory():
    td = make()
    td[1:3]["n"].tensordicts[0].zero_()
    td[:, 0].tensordicts[3]["b"].fill_(-1)
    assert (td["n", "c"][1] == 0).all() and (td["n", "c"][2] != 0).any()
    assert td["b"][3].tolist() == [-1, 31, 32]
    td.permute(1, 0).zero_()
    assert (td["a"] == 0).all()


# -------------------------------------------------------------------------------------- writing

B, L = "batch", "inner batch"  # in place of shapes: that of the stack, and of what is nested in it
NEW = {"a": (B, 7), "q": (B,), "n": {"d": (L,)}}


def filled(shapes, td, value=1.0):
    """A nested dict of tensors of the shapes that a table names, for one of the stacks."""
    batch = td.batch_size
    sizes = {B: batch, L: (*batch, 5)}
    if isinstance(shapes, dict):
        return {name: filled(below, td, value) for name, below in shapes.items()}
    return torch.full([n for s in shapes for n in (sizes[s] if s in sizes else (s,))], value)


def write_at(td):
    for index in (0, S(1, 3), (S(None), 1), (2, 2)):
        td.set_at_("b", -1, index)
    for index in (0, -1, S(1, 3)):
        td.set_at_(("n", "c"), td["n", "c"][index] * 0 - 1, index)


def assign(key, *shape):
    return lambda td: td.__setitem__(key, filled(shape, td))


WRITES = {
    "a new entry": assign("new", B),
    "an entry of another shape": assign("a", B, 9),
    "a nested entry": assign(("n", "d"), L),
    "new levels": assign(("p", "q", "r"), B),
    "a new level below one that is there": assign(("n", "p", "q"), L),
    "a container": lambda td: td.set("p", TensorDict(filled({"q": (B, 6)}, td), td.batch_size)),
    "a dict": lambda td: td.set("p", filled({"q": (B, 6)}, td)),
    "itself": lambda td: td.set("r", td.clone()),
    "set_": lambda td: td.set_("a", filled((B, 2), td)),
    "set_ nested": lambda td: td.set_(("n", "c"), td["n", "c"] + 1),
    "set_ a number": lambda td: td.set_("a", 3),
    "set in place": lambda td: td.set("a", filled((B, 2), td), inplace=True),
    "set_at_": write_at,
    "fill_": lambda td: td.fill_("a", 3).fill_("n", 4).fill_(("n", "c"), 5),
    "zero_": lambda td: td.zero_(),
    "copy_": lambda td: td.copy_(td * 2),
    "masked_fill_": lambda td: td.masked_fill_(eye(td), 0),
    "setdefault": lambda td: (td.setdefault("b", filled((B,), td)), td.setdefault("q", td["b"])),
    "del": lambda td: td.__delitem__("a"),
    "del nested": lambda td: td.__delitem__(("n", "c")),
    "pop": lambda td: (td.pop("a"), td.pop(("n", "c")), td.pop("zz", 3)),
    "rename_key_": lambda td: td.rename_key_("a", "z").rename_key_(("n", "c"), "b"),
    "update": lambda td: td.update(filled(NEW, td)),
    "update by a container": lambda td: td.update(TensorDict(filled(NEW, td), td.batch_size)),
    "update by a lazy stack": lambda td: td.update(
        TensorDict(filled(NEW, td), td.batch_size).to_lazystack(td.shape.index(4))
    ),
    "update, clone": lambda td: td.update(filled(NEW, td), clone=True),
    "update in place": lambda td: td.update(
        {"b": td["b"] + 1, "n": {"c": td["n", "c"]}}, inplace=True
    ),
    "update in place, new": lambda td: td.update(
        {"b": td["b"] + 1, "new": td["b"] * 1}, inplace=True
    ),
    "update some keys": lambda td: td.update(td * 2, keys_to_update=["a", ("n", "c")]),
    "update nothing": lambda td: td.update({}).update(td),
    "update_": lambda td: td.update_({"a": filled((B, 2), td), "n": {"c": td["n", "c"] + 1}}),
    "update_ by a container": lambda td: td.update_(td * 2),
    "update_ some keys": lambda td: td.update_(td * 2, keys_to_update=["a"]),
    "update_at_": lambda td: td.update_at_({"b": td["b"][0] * 0}, 0).update_at_(
        td[:2] * 0, S(0, 2)
    ),
    "select in place": lambda td: td.select("a", ("n", "c"), inplace=True),
    "exclude in place": lambda td: td.exclude("a", ("n", "c"), inplace=True),
    "flatten_keys in place": lambda td: td.flatten_keys(".", inplace=True),
    "unflatten_keys in place": lambda td: td.flatten_keys(".", inplace=True).unflatten_keys(
        ".", inplace=True
    ),
    "split_keys in place": lambda td: td.split_keys(["a"], inplace=True),
    "separates": lambda td: td.separates("a"),
    "clear": lambda td: td.clear(),
    "create_nested": lambda td: td.create_nested("z"),
    "apply_": lambda td: td.apply_(lambda x: x * 2),
    "+=": lambda td: td.__iadd__(1),
    "mul_": lambda td: td.mul_(2),
    "a view's block": lambda td: in_block(td.permute(1, 0)),
    "a transposed one's": lambda td: in_block(td.transpose(0, 1)),
    "one more dimension's": lambda td: in_block(td.unsqueeze(0)),
    "one more at the end": lambda td: in_block(td.unsqueeze(-1)),
    "a flattened one's": lambda td: in_block(td.flatten(0, 1)),
}


def in_block(view):
    with view as td:
        td["new"] = td["b"] * 2


@pytest.mark.parametrize("dim", [0, 1])
def test_writes_are_those_of_the_dense_stack(dim):
    def check(write):
        td, want = make(dim), dense(dim)
        members = list(td.tensordicts)
        write(td)
        write(want)
        check_same(td, want)
        assert is_lazy(td, dim)
        assert all(a is b for a, b in zip(td.tensordicts, members, strict=True))

    each(WRITES, check)


def test_what_is_written_in_place_keeps_its_memory():
    for dim in (0, 1):
        td = make(dim)
        held = [one["a"] for one in td.tensordicts]
        size = (*BATCHES[dim], 2)
        values = [torch.full(size, float(i)) for i in range(1, 6)]
        writes = [
            call("set_", "a", values[0]),
            call("set", "a", values[1], inplace=True),
            call("update_", {"a": values[2]}),
            call("update", {"a": values[3]}, inplace=True),
            call("copy_", td.clone().set("a", values[4])),
        ]
        for i, write in enumerate(writes, 1):
            write(td)
            assert all((x == i).all() for x in held), i
        td.set("a", torch.zeros(size))
        assert all((x == 5).all() for x in held)


def test_writes_into_unlike_members():
    td = unlike()
    td["h"] = torch.ones(4, 3, 5)  # takes the place of what could not be stacked
    assert td["h"].shape == (4, 3, 5)
    td["only0"] = torch.ones(4, 3)
    assert set(td.keys()) == {"a", "h", "only0"}
    td = unlike()
    del td["only0"]
    assert "only0" not in td.tensordicts[0].keys()
    td.update(unlike() + 1)
    assert (td.get("h", as_list=True)[2] == unlike_part(2)["h"] + 1).all()
    assert (td.tensordicts[1]["only1"] == 1).all()
    td = unlike()
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
        assert (one["h"][0] == 0).all() and (one["h"][1:] == unlike_part(i)["h"][1:]).all()
    td[1] = unlike_part(1) * 2
    assert (td.tensordicts[1]["h"] == unlike_part(1)["h"] * 2).all()
    with pytest.raises(RuntimeError, match="h"):
        td[0] = unlike_part(1).exclude("only1")


def test_what_is_read_is_a_copy_and_what_is_nested_is_not():
    td = make()
    td["b"].zero_()
    check_same(td, dense())
    td.tensordicts[1]["b"] = T([7, 8, 9])
    td[2]["b"].zero_()
    assert td["b"][1:3].tolist() == [[7, 8, 9], [0, 0, 0]]
    for dim in (0, 1):
        td = make(dim)
        assert is_lazy(td["n"], dim) and td["n"].batch_size == (*BATCHES[dim], 5)
        assert all(a is b["n"] for a, b in zip(td["n"].tensordicts, td.tensordicts, strict=True))
        td["n"]["new"] = torch.zeros(*BATCHES[dim], 5)
        assert ("n", "new") in td.tensordicts[2].keys(True)


def test_a_row_of_values_is_written_in_the_members():
    td = lazy_stack([TensorDict(a=torch.zeros(3), s=s, batch_size=[3]) for s in "uv"])
    td.set_at_("s", "x", 0)
    assert td.get("s").tolist() == [["x"] * 3, ["v"] * 3] and td[0]["s"] == "x"
    td.set_at_("s", "y", (1, 2))
    assert td[1].get("s").tolist() == ["v", "v", "y"]


# ------------------------------------------------------------------------------ what is refused

R, K = RuntimeError, KeyError
OTHER = TensorDict({"b": torch.zeros(2).long()}, [2])
# call on the stack of alike members, error, words of its text; nothing is changed by any of them
REFUSED = {
    "no such entry": (lambda td: td["zz"], K, "zz"),
    "a wrong shape": (lambda td: td.set("new", torch.zeros(3)), R, "batch dimension mismatch"),
    "members in the rows": (lambda td: td.set("new", torch.zeros(3, 4)), R, "dimension mismatch"),
    "too many rows": (lambda td: td.set("new", torch.zeros(5, 3)), R, "batch dimension mismatch"),
    "too short a list": (lambda td: td.set("new", ["x"]), R, "list of 1 values"),
    "a nested one of a wrong shape": (
        lambda td: td.set(("n", "c"), torch.zeros(7, 7)),
        R,
        "dimension mismatch",
    ),
    "without the inner batch": (lambda td: td.set(("n", "c"), td["b"]), R, "dimension mismatch"),
    "below a tensor": (lambda td: td.set(("a", "c"), td["b"]), K, "not a container"),
    "set_ of none": (lambda td: td.set_("zz", torch.ones(4, 3)), K, "zz"),
    "set_at_ of none": (lambda td: td.set_at_("zz", 0, 0), K, "zz"),
    "fill_ of none": (lambda td: td.fill_("zz", 0), K, "zz"),
    "update_ of none": (lambda td: td.update_({"zz": torch.ones(4, 3)}), K, "zz"),
    "update of a wrong shape": (
        lambda td: td.update({"b": td["b"] * 2, "q": T([1.0])}),
        R,
        "mismatch",
    ),
    "update by one of no rows": (lambda td: td.update(OTHER), R, "mismatch"),
    "delete none": (lambda td: td.del_("zz"), K, "zz"),
    "pop none": (lambda td: td.pop("zz"), K, "zz"),
    "rename none": (lambda td: td.rename_key_("zz", "z"), K, "zz"),
    "rename onto another": (lambda td: td.rename_key_("a", "b", safe=True), K, "already present"),
    "select none": (lambda td: td.select("zz"), K, "zz"),
    "a row of a wrong size": (lambda td: td.__setitem__(0, OTHER), R, ""),
    "rows of a wrong size": (
        lambda td: td.__setitem__(S(0, 2), torch.stack([OTHER] * 3)),
        R,
        "",
    ),
    "append another size": (lambda td: td.append(OTHER), ValueError, "[Bb]atch size"),
    "append a dict": (lambda td: td.append({"a": 1}), TypeError, "Expected new value"),
    "insert another size": (lambda td: td.insert(0, OTHER), ValueError, "[Bb]atch size"),
    "extend, all or none": (lambda td: td.extend([part(4), OTHER]), ValueError, "[Bb]atch size"),
    "extend by a dict": (lambda td: td.extend([part(4), {"a": 1}]), TypeError, "Expected"),
    "append on a device": (lambda td: td.append(part(4).to("cpu")), ValueError, "Devices differ"),
    "a batch size": (lambda td: setattr(td, "batch_size", [4]), R, "[Bb]atch.size"),
    "no batch size": (lambda td: setattr(td, "batch_size", []), R, "[Bb]atch.size"),
    "squeeze(2)": (call("squeeze", 2), (IndexError, R), ""),
    "unbind(2)": (call("unbind", 2), (IndexError, ValueError, R), ""),
    "split(2, 2)": (call("split", 2, 2), (IndexError, ValueError, R), ""),
    "to_lazystack(5)": (call("to_lazystack", 5), IndexError, ""),
    "no permutation": (call("permute", (0, 0)), (IndexError, ValueError, R), ""),
    "half a permutation": (call("permute", (0,)), (IndexError, ValueError, R), ""),
    "a truth value": (bool, R, "boolean value"),
    "a hash": (hash, TypeError, "unhashable"),
    "False": (lambda td: td[T(False)], IndexError, "False can't index"),
}
LOCKED = {
    "set": lambda td: td.set("a", torch.zeros(4, 3, 2)),
    "set new": lambda td: td.set("new", torch.zeros(4, 3)),
    "set nested": lambda td: td.set(("n", "new"), torch.zeros(4, 3, 5)),
    "pop": lambda td: td.pop("a"),
    "del_": lambda td: td.del_("a"),
    "rename_key_": lambda td: td.rename_key_("a", "z"),
    "a member": lambda td: td.tensordicts[0].set("a", torch.zeros(3, 2)),
    "what is nested": lambda td: td["n"].set("new", torch.zeros(4, 3, 5)),
    "update": lambda td: td.update({"new": torch.zeros(4, 3)}),
    "exclude": lambda td: td.exclude("a", inplace=True),
    "select": lambda td: td.select("a", inplace=True),
    "flatten_keys": lambda td: td.flatten_keys(".", inplace=True),
    "append": lambda td: td.append(part(4)),
    "insert": lambda td: td.insert(0, part(4)),
    "rows with a new entry": lambda td: td.__setitem__(0, TensorDict({"q": torch.ones(3)}, [3])),
}
UNLIKE_REFUSED = {
    **{
        f"{word} of {name}": (read, R, word)
        for name, read in {"[]": lambda td: td["h"], "get": lambda td: td.get("h", None)}.items()
        for word in ("as_list", "as_padded_tensor", "as_nested_tensor", "'h'")
    },
    "values": (lambda td: list(td.values()), R, "as_list"),
    "contiguous": (call("contiguous"), R, "as_list"),
    "to_tensordict": (call("to_tensordict"), R, "as_list"),
    "reshape": (call("reshape", 2, 6), R, ""),
    "an entry of one member": (lambda td: td["only0"], K, "only0"),
    "set_ of one member's": (lambda td: td.set_("only0", torch.ones(4, 3)), K, "only0"),
    "rename of one member's": (lambda td: td.rename_key_("only0", "z"), K, "only0"),
    "select of one member's": (lambda td: td.select("only0"), K, "only0"),
}


def refused(make):
    def check(row):
        function, error, words = row
        td = make()
        with pytest.raises(error, match=words or None):
            function(td)
        assert (td == make()).all() and td.batch_size == make().batch_size
        assert [list(m.keys(True)) for m in td.tensordicts] == [
            list(m.keys(True)) for m in make().tensordicts
        ]

    return check


def test_what_is_refused_changes_nothing():
    each(REFUSED, refused(make))
    each(UNLIKE_REFUSED, refused(unlike))


def test_a_lock_keeps_the_structure_and_lets_values_change():
    locked = {name: (function, R, "Cannot modify locked") for name, function in LOCKED.items()}
    each(locked, refused(lambda: make().lock_()))
    td = make().lock_()
    assert td.is_locked and td["n"].is_locked and all(m.is_locked for m in td.tensordicts)
    with pytest.raises(RuntimeError, match="Cannot unlock"):
        td.tensordicts[0].unlock_()
    assert td.is_locked and td.tensordicts[0].is_locked
    assert not td.clone().is_locked and not td.clone().tensordicts[0].is_locked
    td[0] = 0
    td[:, 1] = dense()[:, 1] * 0
    assert td["b"].tolist() == [[0, 0, 0], [10, 0, 12], [20, 0, 22], [30, 0, 32]]
    td.set_("a", torch.zeros(4, 3, 2)).zero_()
    assert (td["a"] == 0).all()
    td.update({"new": torch.zeros(4, 3)}, ignore_lock=True)
    assert td.is_locked and "new" in td.keys()
    with td.unlock_():
        td["newer"] = torch.zeros(4, 3)
    assert td.is_locked and "newer" in td.keys()
    td.unlock_()
    assert not td.is_locked and not any(one.is_locked for one in td.tensordicts)
    td[2].lock_()  # of one member, so that the others can't be written as if nothing were
    for write in (
        call("set", "late", torch.zeros(4, 3)),
        call("update", {"late": torch.zeros(4, 3)}),
    ):
        with pytest.raises(RuntimeError, match="Cannot modify locked"):
            write(td)
        assert all("late" not in one.keys() for one in td.tensordicts)


def test_entries_of_one_member_only_are_not_dropped():
    td = lazy_stack([TensorDict(a=1, only=2), TensorDict(a=1)])
    for source in (td, TensorDict(n=td)):
        for method in (source.to_dict, source.state_dict):
            with pytest.raises(RuntimeError, match="only"):
                method()
    assert td[0].to_dict()["only"] == 2


def test_the_checks_can_fail():
    for wrong in (
        make(1),
        make() + 1,
        make().exclude("b"),
        make().permute(1, 0),
        make()[:3],
        make().flatten_keys("."),
    ):
        with pytest.raises(AssertionError):
            check_same(wrong, dense())
    with pytest.raises(AssertionError, match="second: ValueError"):
        each({"first": 1, "second": 2}, lambda n: int("x" if n == 2 else "1"))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        refused(make)((len, RuntimeError, ""))


# ----------------------------------------------------------------------------- making and growing


def test_making():
    parts = [part(0), part(1)]
    for td in (
        lazy_stack(parts),
        lazy_stack(tuple(parts), 0),
        lazy_stack(parts, dim=-2),
        LazyStackedTensorDict(*parts),
        LazyStackedTensorDict(*parts, stack_dim=0),
        LazyStackedTensorDict.lazy_stack(parts, 0),
        TensorDict.lazy_stack(parts, 0),
    ):
        assert is_lazy(td, 0) and not isinstance(td, TensorDict)
        assert all(a is b for a, b in zip(td.tensordicts, parts, strict=True))
        check_same(td, torch.stack(parts))
    for dim in (0, 1):
        td = make(dim)
        assert is_lazy(td, dim) and td.batch_size == td.shape == BATCHES[dim]
        assert td.ndim == td.batch_dims == 2 and td.numel() == 12
        assert len(td) == BATCHES[dim][0] and len(td.tensordicts) == 4
    assert lazy_stack(parts, -1).stack_dim == 1
    td = lazy_stack([TensorDict(x=T(1), text="hello"), TensorDict(x=T(2), text="bye")])
    assert td.batch_size == (2,) and td["x"].tolist() == [1, 2]
    assert td[0]["text"] == "hello" and list(td["text"]) == ["hello", "bye"]
    assert td.get("text").batch_size == (2,)
    td = lazy_stack(parts, 0, stack_dim_name="s")
    assert td.names == ["s", None]
    assert type(torch.stack(parts)) is TensorDict
    for bad, error, words in (
        (lambda: lazy_stack([part(0)], 2), (RuntimeError, IndexError), "[Dd]im"),
        (lambda: lazy_stack([]), RuntimeError, "empty"),
        (lambda: lazy_stack([part(0), {}]), TypeError, "Expected all inputs"),
        (lambda: lazy_stack([part(0), torch.zeros(3)]), TypeError, "Expected all inputs"),
        (lambda: LazyStackedTensorDict(part(0), {}), TypeError, "Expected all inputs"),
        (lambda: lazy_stack([part(0), part(1)[:2]], strict_shape=True), RuntimeError, "differs"),
        (lambda: lazy_stack([part(0), part(1)[0]]), RuntimeError, "differs"),
        (lambda: dense_stack_tds(parts), ValueError, "dim"),
    ):
        with pytest.raises(error, match=words):
            bad()


def test_a_copy_is_of_the_same_kind():
    td = pickle.loads(pickle.dumps(unlike(1)))
    assert is_lazy(td, 1) and (td == unlike(1)).all()
    for dim in (0, 1):
        td = unlike(dim)
        got = td.clone()
        assert is_lazy(got, dim) and (got == td).all() and "only1" in got.tensordicts[1].keys()
        got.zero_()
        assert (td == unlike(dim)).all()
        for got in (td.clone(False), td.clone(recurse=False), td.copy()):
            assert is_lazy(got, dim) and got.tensordicts[0] is not td.tensordicts[0]
            assert got.tensordicts[0]["h"] is td.tensordicts[0]["h"]
            got["new"] = torch.zeros(BATCHES[dim])
            assert "new" not in td.keys()
        assert type(td.select("a").to_dict()) is dict
        got = make(dim).to_tensordict()
        assert type(got) is TensorDict and type(got["n"]) is TensorDict
    assert "exclusive_fields" in repr(unlike()) and "stack_dim=1" in repr(unlike(1))
    assert "LazyStackedTensorDict(" in repr(unlike()) and "[4, 3, -1]" in repr(unlike())


def test_growing():
    for dim in (0, 1):
        td, parts = make(dim), [part(i) for i in range(4)]
        td.append(part(4))
        td.extend(part(i) for i in (5, 6))
        td.extend(lazy_stack([part(7)], dim))
        td.extend([])
        parts += [part(i) for i in range(4, 8)]
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
    none.extend([part(0), part(1)])
    check_same(none, torch.stack([part(0), part(1)]))


def test_stacks_of_stacks():
    for to in (0, 1, 2):
        got = lazy_stack([make(), make() * 2], to)
        check_same(got, torch.stack([dense(), dense() * 2], to))
        assert is_lazy(got, to) and len(got.tensordicts) == 2 and is_lazy(got.tensordicts[0], 0)
    turned = make(1).transpose(0, 1).clone()
    check_same(lazy_stack([make(), make(1).permute(1, 0), turned]), torch.stack([dense()] * 3))
    two = torch.stack([dense()] * 2)
    for got in (
        torch.stack([make(), dense()]),
        torch.stack([dense(), make()]),
        lazy_stack([make(), dense()]),
        torch.cat([dense(), make()]).reshape(2, 4, 3),
        torch.cat([make(), dense()]).reshape(2, 4, 3),
        make().unsqueeze(0).expand(2, 4, 3),
    ):
        check_same(got, two)
    for dim in (0, 1):
        check_same(make(dim) + dense(dim), dense(dim) * 2)
        check_same(dense(dim) + make(dim), dense(dim) * 2)
    td = torch.cat([unlike(), unlike()])
    assert is_lazy(td, 0) and td.batch_size == (8, 3) and td[5]["h"].shape == (3, 3)
    first, second = make(), make().select("a")
    out = maybe_dense_stack([first, second], 0)
    assert out.stack_dim == 0 and out[0] is first and out[1] is second
    out = dense_stack_tds([unlike(), unlike()], 0)
    assert out.batch_size == (2, 4, 3) and out.stack_dim == 1
    assert out[:, 2]["h"].shape == (2, 3, 4)


def test_dense_where_that_can_be():
    for dim in (0, 1):
        alike, other = [part(0), part(1)], [part(0), part(1).exclude("a")]
        for got in (
            dense_stack_tds(alike, dim),
            dense_stack_tds(lazy_stack(alike, dim)),
            maybe_dense_stack(alike, dim),
            LazyStackedTensorDict.maybe_dense_stack(alike, dim),
        ):
            assert type(got) is TensorDict
            check_same(got, torch.stack(alike, dim))
        assert is_lazy(maybe_dense_stack(other, dim), dim)
        assert set(maybe_dense_stack(other, dim).keys()) == {"b", "n"}
        wide = [part(0), part(1).set("a", torch.zeros(3, 7))]
        assert is_lazy(maybe_dense_stack(wide, dim), dim)
    nested = [TensorDict({"n": {"x": torch.zeros(3, i)}}, [3]) for i in (2, 4)]
    td = maybe_dense_stack(nested)
    assert is_lazy(td["n"], 0)
    assert [x.shape for x in td["n"].get("x", as_list=True)] == [(3, 2), (3, 4)]
    td = unlike().densify(layout=torch.jagged)
    assert type(td) is TensorDict and td.batch_size == (4, 3)
    assert td["h"].is_nested and not td["a"].is_nested


# ------------------------------------------------------------------------- keys, shapes and names


def test_keys():
    for dim in (0, 1):
        td = make(dim)
        assert set(unlike(dim).keys()) == {"a", "h"} and set(td.keys()) == {"a", "b", "n"}
        assert set(td.keys(True)) == {"a", "b", "n", ("n", "c")}
        assert set(td.keys(True, True)) == {"a", "b", ("n", "c")}
        assert set(td.keys(leaves_only=True)) == {"a", "b"}
        sizes = {"a": (*BATCHES[dim], 2), "b": BATCHES[dim], "n": (*BATCHES[dim], 5)}
        assert {key: value.shape for key, value in td.items()} == sizes
        assert [value.shape for value in td.values()] == [*sizes.values()]
        assert set(dict(td.items(True, True))) == {"a", "b", ("n", "c")}
        assert (td.get_at("b", 1) == dense(dim)["b"][1]).all()
    keys = make().keys(True)
    assert "a" in keys and ("n", "c") in keys and ("n", "zz") not in keys
    td = unlike()
    assert td.get("only0") is None and td.get("only0", 7) == 7 and td.get("zz", 3) == 3
    assert "only0" not in td and "only0" in td[0].keys() and td.pop("only0", None) is None
    keys = td.keys()
    td["new"] = torch.zeros(4, 3)
    assert "new" in keys
    for one in td.tensordicts:
        one["later"] = torch.zeros(3)
    assert "later" in keys
    del td.tensordicts[2]["later"]
    assert "later" not in keys
    parts = [TensorDict({"n": {"x": torch.zeros(3), f"o{i}": T([0] * 3)}}, [3]) for i in range(2)]
    assert set(lazy_stack(parts).keys(True)) == {"n", ("n", "x")}
    assert not make().is_empty() and lazy_stack([TensorDict(n={})] * 2).is_empty()
    assert not lazy_stack([TensorDict(n={"x": 1})] * 2).is_empty()


def test_entries_of_unlike_shape():
    for dim in (0, 1):
        got = unlike(dim).get("h", as_list=True)
        assert type(got) is list and [x.shape for x in got] == [(3, i + 2) for i in range(4)]
        assert all((x == unlike_part(i)["h"]).all() for i, x in enumerate(got))
        assert len(unlike(dim).get("a", as_list=True)) == 4
    td = unlike()
    right = td.get("h", as_padded_tensor=True)
    left = td.get("h", as_padded_tensor=True, padding_value=-1, padding_side="left")
    for i in range(4):
        row = unlike_part(i)["h"]
        assert (right[i, :, : i + 2] == row).all() and (right[i, :, i + 2 :] == 0).all()
        assert (left[i, :, 3 - i :] == row).all() and (left[i, :, : 3 - i] == -1).all()
    with pytest.raises(ValueError, match="'left' or 'right'"):
        td.get("h", as_padded_tensor=True, padding_side="top")
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
    assert (unlike() == unlike()).all() and not (unlike() == unlike() + 1).any()
    leaves_of_all = [leaf for member in td.tensordicts for leaf in member.values()]
    assert td.sum(reduce=True) == sum([leaf.sum() for leaf in leaves_of_all])


def test_three_dims():
    parts = [TensorDict({"x": torch.arange(6).reshape(2, 3) + 10 * i}, [2, 3]) for i in range(4)]
    for dim in range(3):
        td, want = lazy_stack(parts, dim), torch.stack(parts, dim)
        for dims in ((2, 0, 1), (1, 2, 0), (0, 2, 1), (2, 1, 0)):
            got = td.permute(dims)
            check_same(got, want.permute(dims))
            assert got.stack_dim == dims.index(dim)
        for a, b in ((0, 2), (1, 2), (0, 1)):
            check_same(td.transpose(a, b), want.transpose(a, b))
            check_same(td.flatten(a, b), want.flatten(a, b))
        for i in range(4):
            check_same(td.unsqueeze(i), want.unsqueeze(i))
            check_same(td.unsqueeze(i).squeeze(i), want)
        for i in range(3):
            check_same(torch.stack(td.unbind(i), i), want)


def test_squeeze():
    td = lazy_stack([part(0)])
    assert td.batch_size == (1, 3) and td.squeeze(1).batch_size == (1, 3)
    check_same(td.squeeze(0), part(0))
    check_same(td.squeeze(), part(0))
    for at in (0, 1):
        td = make().unsqueeze(at).squeeze(at)
        check_same(td, dense())
        assert is_lazy(td, 0)


def test_names_and_device():
    td = make()
    assert td.names == [None, None] and td.device is None
    td.names = ["x", "y"]
    for got, names in (
        (td, ["x", "y"]),
        (td[0], ["y"]),
        (td[:, 0], ["x"]),
        (td.permute(1, 0), ["y", "x"]),
        (td.unsqueeze(0), [None, "x", "y"]),
        (td.clone(), ["x", "y"]),
        (td.split(2)[1], ["x", "y"]),
        (td["n"], ["x", "y", None]),
    ):
        assert got.names == names
    td = make(1)
    td.names = ["x", "y"]
    assert td.tensordicts[0].names == ["x"] and td[0].names == ["y"]
    parts = [TensorDict({"x": torch.zeros(2)}, [2], device="cpu") for _ in range(2)]
    cpu = torch.device("cpu")
    assert lazy_stack(parts).device == lazy_stack(parts)[:, 0].device == cpu
    td = make().to("cpu")
    assert td.device == cpu and all(one.device == cpu for one in td.tensordicts)
    assert td.clear_device_().device is None and td.tensordicts[0].device is None
    td = make().float().requires_grad_()
    assert td["a"].requires_grad and not td.detach()["a"].requires_grad
    assert not td.data["a"].requires_grad


class TestNestedStacks:
    """A lazy stack of lazy stacks of unlike parts."""

    def make(self):
        rows = [
            lazy_stack(
                [
                    TensorDict(
                        {
                            "x": torch.full((2, i + j + 1), 10 * i + j),
                            "y": torch.full((2,), 10 * i + j),
                        },
                        [2],
                    )
                    for j in range(3)
                ]
            )
            for i in range(4)
        ]
        return lazy_stack(rows)

    def test_shape(self):
        td = self.make()
        assert td.batch_size == (4, 3, 2)
        assert td["y"].shape == (4, 3, 2) and td["y"][:, :, 0].tolist() == [
            [10 * i + j for j in range(3)] for i in range(4)
        ]

    def test_index(self):
        td = self.make()
        assert td[1, 2]["x"].shape == (2, 4)
        assert is_lazy(td[1]) and is_lazy(td[:, 2]) and is_lazy(td[..., 0])
        assert td[:, 2][1]["x"].shape == (2, 4)
        assert td[..., 0].batch_size == (4, 3) and td[1, 2, 0]["x"].shape == (4,)
        assert td[1:, :2, 1][2, 1]["y"] == 31
        assert td[[0, 3], [1, 2]]["y"].tolist() == [[1, 1], [32, 32]]

    def test_write(self):
        td = self.make()
        td[2, 1] = 0
        assert (
            (td["y"][2, 1] == 0).all()
            and (td[2, 1]["x"] == 0).all()
            and (td[2, 2]["x"] == 22).all()
        )
        td["z"] = torch.arange(24).reshape(4, 3, 2)
        assert td[3, 2]["z"].tolist() == [22, 23]
        td[:, 1] = TensorDict({"y": torch.full((4, 2), -1)}, [4, 2])
        assert (td["y"][:, 1] == -1).all() and (td["y"][:, 0] >= 0).all()

    def test_shape_operations(self):
        td = self.make()
        assert td.permute(1, 0, 2).batch_size == (3, 4, 2)
        assert td.permute(1, 0, 2)[2, 1]["x"].shape == (2, 4)
        assert td.transpose(0, 2)[0, 2, 1]["x"].shape == (4,)
        assert (td.permute(2, 1, 0)["y"] == td["y"].permute(2, 1, 0)).all()
        assert (td.reshape(12, 2)["y"] == td["y"].reshape(12, 2)).all()
        assert (td.flatten(0, 1)["y"] == td["y"].flatten(0, 1)).all()
        assert (td.unsqueeze(1)["y"] == td["y"].unsqueeze(1)).all()
        assert [one.batch_size for one in td.unbind(1)] == [(4, 2)] * 3

    def test_get_options(self):
        td = self.make()
        with pytest.raises(RuntimeError, match="as_list"):
            td["x"]
        got = td.get("x", as_list=True)
        assert [[x.shape for x in row] for row in got] == [
            [(2, i + j + 1) for j in range(3)] for i in range(4)
        ]

    def test_arithmetic_and_clone(self):
        td = self.make()
        assert ((td + td)[3, 2]["x"] == 64).all()
        assert (td.clone() == td).all()
        td.lock_()
        assert td[0].is_locked and td[0, 0].is_locked


class TestMembersOfUnlikeShape:
    """What asks for keys and classes only does not stack."""

    def test_depth(self):
        td = unlike()
        assert td.depth == 0
        for member in td.tensordicts:
            member["n"] = {"x": torch.zeros(3)}
        assert td.depth == 1

    def test_non_tensor_items(self):
        td = unlike()
        assert td.non_tensor_items(include_nested=True) == ()
        for i, member in enumerate(td.tensordicts):
            member["n"] = {"s": str(i)}
        ((key, entry),) = td.non_tensor_items(include_nested=True)
        assert key == ("n", "s") and [row[0] for row in entry.tolist()] == ["0", "1", "2", "3"]

    def test_apply_in_place_reaches_each_member(self):
        td = unlike()
        assert td.apply_(lambda leaf: leaf.zero_()) is td
        assert all((leaf == 0).all() for member in td.tensordicts for leaf in member.values())
        nested = TensorDict({"l": unlike()}, [4, 3])
        nested.apply_(lambda leaf: leaf + 1)
        assert (nested["l"][2]["h"] == unlike()[2]["h"] + 1).all()

    def test_split_and_prune(self):
        td = unlike()
        first, rest = td.split_keys(["a"])
        assert list(first.keys()) == ["a"] and "a" not in rest[0].keys()
        for member in td.tensordicts:
            member["n"] = {}
        assert "n" not in td.filter_empty_().keys()
        assert list(td.separates("a").keys()) == ["a"] and "a" not in td.keys()

    def test_prune_leaves_what_some_members_have(self):
        td = lazy_stack([TensorDict(n=dict(a=1), e=dict()), TensorDict(n=dict(b=dict()), e=dict())])
        assert td.filter_empty_() is td
        assert [list(member.keys(True)) for member in td.tensordicts] == [[("n", "a"), "n"], []]
        td = TensorDict(l=lazy_stack([TensorDict(a=1), TensorDict(b=1)]), e=lazy_stack([td[1]] * 2))
        assert list(td.filter_empty_().keys()) == ["l"] and td["l"][1]["b"] == 1

    def test_class_of_an_entry_that_not_all_have(self):
        td = lazy_stack([TensorDict(a=dict(b=1), c=1), TensorDict(a=dict(b=1, d=2))])
        assert td.entry_class(("a", "b")) is torch.Tensor
        assert td.entry_class("a") is LazyStackedTensorDict
        for key in ("c", ("a", "d"), ("a", "b", "x"), ("x", "y")):
            with pytest.raises(KeyError):
                td.entry_class(key)
        with pytest.raises(KeyError):
            lazy_stack([TensorDict()])[:0].entry_class("a")

    def test_new_levels_below_levels_that_not_all_have(self):
        one, two = TensorDict(a=dict(b=1)), TensorDict(a=dict(b=1, n=dict(c=2)))
        td = lazy_stack([one, two])
        td["a", "m", "x"] = torch.arange(2)
        assert one["a", "m", "x"] == 0 and two["a", "m", "x"] == 1 and two["a", "n", "c"] == 2
        two["a", "m"].lock_()
        with pytest.raises(RuntimeError, match="locked"):
            td["a", "m", "y"] = torch.arange(2)
        assert "y" not in one["a", "m"].keys()
        with pytest.raises(KeyError):
            td["a", "b", "x"] = torch.arange(2)
        names = lazy_stack([TensorDict(batch_size=[3], names=["t"]) for _ in range(2)])
        names["n", "m", "x"] = torch.zeros(2, 3)
        assert names["n", "m"].names == [None, "t"] and names[0]["n", "m"].names == ["t"]

    def test_filter_non_tensor_data(self):
        td = unlike()
        td[1].set("s", "text")
        out = td.filter_non_tensor_data()
        assert isinstance(out, LazyStackedTensorDict) and "s" not in out[1].keys()
        assert out[1]["h"] is td[1]["h"] and "s" in td[1].keys()

    def test_one_member_written_at(self):
        td = unlike()
        td.update_at_(td[0].clone().zero_(), 0)
        assert (td[0]["h"] == 0).all() and (td[1]["h"] == unlike()[1]["h"]).all()

    def test_where(self):
        td, mask = unlike(), torch.arange(12).reshape(4, 3) % 2 == 0
        out = td.clone()
        assert td.where(mask, td.clone().zero_(), out=out) is out
        nested = TensorDict({"l": unlike()}, [4, 3])
        chosen = nested.where(mask, nested.clone().zero_())["l"]
        for i in range(4):
            want = torch.where(mask[i, :, None], td[i]["h"], torch.zeros(()))
            assert (out[i]["h"] == want).all() and (chosen[i]["h"] == want).all()

    def test_assert_close(self):
        assert assert_close(unlike(), unlike())
        other = unlike()
        other[3]["h"].add_(1)
        with pytest.raises(AssertionError, match="h"):
            assert_close(unlike(), other)
        nested = TensorDict({"l": unlike()}, [4, 3])
        assert assert_close(nested, nested.clone())
        with pytest.raises(AssertionError, match="h"):
            assert_close(nested, TensorDict({"l": other}, [4, 3]))
        assert assert_close(TensorDict({"l": make()}, [4, 3]), TensorDict({"l": dense()}, [4, 3]))

    def test_load_into(self, tmp_path):
        unlike().memmap(tmp_path)
        td = unlike().zero_()
        members = list(td.tensordicts)
        td.load_memmap_(tmp_path)
        assert assert_close(td, unlike())
        assert all(a is b for a, b in zip(td.tensordicts, members, strict=True))

    def test_from_dict(self):
        rows = [{"a": torch.ones(2)}, {"a": torch.ones(3)}]
        td = LazyStackedTensorDict.from_dict(rows, auto_batch_size=True, stack_dim=1)
        assert td.batch_size == (-1, 2) and td.stack_dim == 1
        td = LazyStackedTensorDict.from_dict({"0": rows[0], "1": rows[1]})
        assert [len(x) for x in td.get("a", as_list=True)] == [2, 3]
