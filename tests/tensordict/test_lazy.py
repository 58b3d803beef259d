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


def run(x, op, namespace=None):
    name, *args = op
    kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
    return (
        getattr(x, name)(*args, **kwargs)
        if namespace is None
        else getattr(namespace, name)(x, *args, **kwargs)
    )


def name_of(op):
    return f"{op[0]}({', '.join(map(repr, op[1:]))})"


both_dims = pytest.mark.parametrize("dim", [0, 1])


class TestMake:
    @both_dims
    def test_batch_size_and_parts(self, dim):
        td = make(dim)
        assert is_lazy(td, dim)
        assert td.batch_size == td.shape == BATCHES[dim]
        assert td.ndim == td.batch_dims == 2 and td.numel() == 12
        assert len(td) == BATCHES[dim][0]
        assert len(td.tensordicts) == 4
        check_same(td, dense(dim))

    def test_ways_to_make_one(self):
        parts = [part(0), part(1)]
        for td in (
            lazy_stack(parts),
            lazy_stack(tuple(parts), 0),
            lazy_stack(parts, dim=0),
            LazyStackedTensorDict(*parts),
            LazyStackedTensorDict(*parts, stack_dim=0),
            LazyStackedTensorDict.lazy_stack(parts, 0),
            TensorDict.lazy_stack(parts, 0),
        ):
            assert is_lazy(td, 0)
            check_same(td, torch.stack(parts))

    def test_parts_are_not_copied(self):
        parts = [part(0), part(1)]
        td = lazy_stack(parts)
        assert all(a is b for a, b in zip(td.tensordicts, parts, strict=True))

    def test_negative_dim(self):
        assert lazy_stack([part(0), part(1)], -1).stack_dim == 1
        assert lazy_stack([part(0), part(1)], -2).stack_dim == 0

    def test_not_a_td_subclass(self):
        assert is_tensor_collection(make())
        assert not isinstance(make(), TensorDict)
        assert isinstance(make(), LazyStackedTensorDict)

    def test_dim_out_of_range(self):
        with pytest.raises((RuntimeError, IndexError), match="[Dd]im"):
            lazy_stack([part(0)], 2)

    def test_nothing_to_stack(self):
        with pytest.raises(RuntimeError, match="empty"):
            lazy_stack([])

    @pytest.mark.parametrize("other", [{}, torch.zeros(3)], ids=["dict", "tensor"])
    def test_only_containers(self, other):
        with pytest.raises(TypeError, match="Expected all inputs"):
            lazy_stack([part(0), other])

    def test_torch_stack_is_dense(self):
        assert type(torch.stack([part(0), part(1)])) is TensorDict

    def test_parts_without_batch_dims(self):
        td = lazy_stack([TensorDict(x=T(1)), TensorDict(x=T(2))])
        assert td.batch_size == (2,) and td["x"].tolist() == [1, 2]

    def test_no_truth_value_no_hash(self):
        with pytest.raises(RuntimeError, match="boolean value"):
            bool(make())
        with pytest.raises(TypeError, match="unhashable"):
            hash(make())

    def test_non_tensors(self):
        td = lazy_stack([TensorDict(text="hello"), TensorDict(text="bye")])
        assert td[0]["text"] == "hello" and td[1]["text"] == "bye"
        assert td.get("text").batch_size == (2,)
        assert list(td["text"]) == ["hello", "bye"]

    def test_pickle(self):
        td = pickle.loads(pickle.dumps(unlike(1)))
        assert is_lazy(td, 1)
        assert (td == unlike(1)).all()

    def test_repr_tells_what_only_one_part_has(self):
        assert "LazyStackedTensorDict(" in repr(unlike())
        assert "exclusive_fields" in repr(unlike())
        assert "stack_dim=0" in repr(unlike()) and "stack_dim=1" in repr(unlike(1))


class TestRead:
    @both_dims
    def test_get_stacks(self, dim):
        td = make(dim)
        assert (td["a"] == dense(dim)["a"]).all() and td["a"].shape == (*BATCHES[dim], 2)
        assert (td.get("b") == dense(dim)["b"]).all()
        assert (td["n", "c"] == dense(dim)["n", "c"]).all()
        assert (td.get(("n", "c")) == td["n"]["c"]).all()

    @both_dims
    def test_nested_is_a_lazy_stack_of_the_nested(self, dim):
        td = make(dim)
        assert is_lazy(td["n"], dim)
        assert td["n"].batch_size == (*BATCHES[dim], 5)
        assert all(a is b["n"] for a, b in zip(td["n"].tensordicts, td.tensordicts, strict=True))
        td["n"]["new"] = torch.zeros(*BATCHES[dim], 5)
        assert ("n", "new") in td.tensordicts[2].keys(True)

    def test_missing(self):
        for td in (make(), unlike()):
            assert td.get("zz") is None
            assert td.get("zz", None) is None
            assert td.get("zz", 3) == 3
            with pytest.raises(KeyError, match="zz"):
                td["zz"]

    def test_entry_of_one_part_is_missing(self):
        td = unlike()
        assert td.get("only0") is None
        assert td.get("only0", 7) == 7
        with pytest.raises(KeyError, match="only0"):
            td["only0"]
        assert "only0" not in td.keys() and "only0" not in td
        assert "only0" in td[0].keys()

    @pytest.mark.parametrize(
        "read", [lambda td: td["h"], lambda td: td.get("h"), lambda td: td.get("h", None)]
    )
    def test_unlike_shapes_tell_the_options(self, read):
        for word in ("as_list", "as_padded_tensor", "as_nested_tensor", "'h'"):
            with pytest.raises(RuntimeError, match=word):
                read(unlike())

    @both_dims
    def test_as_list(self, dim):
        got = unlike(dim).get("h", as_list=True)
        assert isinstance(got, list)
        assert [x.shape for x in got] == [(3, i + 2) for i in range(4)]
        assert all((x == unlike_part(i)["h"]).all() for i, x in enumerate(got))
        assert len(unlike(dim).get("a", as_list=True)) == 4

    def test_as_padded_tensor(self):
        got = unlike().get("h", as_padded_tensor=True)
        assert got.shape == (4, 3, 5)
        for i in range(4):
            assert (got[i, :, : i + 2] == unlike_part(i)["h"]).all()
            assert (got[i, :, i + 2 :] == 0).all()

    def test_padding_value_and_side(self):
        got = unlike().get("h", as_padded_tensor=True, padding_value=-1, padding_side="left")
        for i in range(4):
            assert (got[i, :, 3 - i :] == unlike_part(i)["h"]).all()
            assert (got[i, :, : 3 - i] == -1).all()

    def test_padded_alike_entries_are_just_stacked(self):
        td = unlike()
        assert (td.get("a", as_padded_tensor=True) == td["a"]).all()

    def test_nested_tensor_by_its_own_method_is_strided(self):
        td = unlike()
        got = td.get_nestedtensor("h", layout=torch.jagged)
        assert got.layout is torch.jagged
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, that strided ones are a prototype
            got = td.get_nestedtensor("h")
        assert got.layout is torch.strided and got.is_nested
        for row, part in zip(td.get("h", as_list=True), got.unbind(), strict=True):
            assert torch.equal(row, part)

    def test_as_nested_tensor(self):
        got = unlike().get("h", as_nested_tensor=True, layout=torch.jagged)
        assert got.is_nested and got.layout == torch.jagged and got.shape[0] == 4

    @both_dims
    def test_get_at(self, dim):
        assert (make(dim).get_at("b", 1) == dense(dim)["b"][1]).all()


class TestKeys:
    @both_dims
    def test_intersection(self, dim):
        assert set(unlike(dim).keys()) == {"a", "h"}
        assert set(make(dim).keys()) == {"a", "b", "n"}
        assert set(make(dim).keys(True)) == {"a", "b", "n", ("n", "c")}
        assert set(make(dim).keys(True, True)) == {"a", "b", ("n", "c")}
        assert set(make(dim).keys(leaves_only=True)) == {"a", "b"}

    def test_live(self):
        td = unlike()
        keys = td.keys()
        td["new"] = torch.zeros(4, 3)
        assert "new" in keys
        for one in td.tensordicts:
            one["later"] = torch.zeros(3)
        assert "later" in td.keys()
        del td.tensordicts[2]["later"]
        assert "later" not in td.keys()

    def test_membership(self):
        keys = make().keys(True)
        assert "a" in keys and ("n", "c") in keys and ("n", "zz") not in keys

    @both_dims
    def test_items_and_values(self, dim):
        td = make(dim)
        assert {key: value.shape for key, value in td.items()} == {
            "a": (*BATCHES[dim], 2),
            "b": BATCHES[dim],
            "n": (*BATCHES[dim], 5),
        }
        assert [value.shape for value in td.values()] == [value.shape for _, value in td.items()]
        assert set(dict(td.items(True, True))) == {"a", "b", ("n", "c")}

    def test_values_of_unlike_shape(self):
        with pytest.raises(RuntimeError, match="as_list"):
            list(unlike().values())

    def test_is_empty(self):
        assert not make().is_empty()
        assert lazy_stack([TensorDict(batch_size=[3])] * 2).is_empty()

    def test_all_nested_unlike(self):
        parts = [
            TensorDict({"n": {"x": torch.zeros(3), f"o{i}": torch.zeros(3)}}, [3]) for i in range(2)
        ]
        td = lazy_stack(parts)
        assert set(td.keys(True)) == {"n", ("n", "x")}


class TestWrite:
    @both_dims
    def test_set_unbinds_to_the_parts(self, dim):
        td = unlike(dim)
        value = torch.arange(12.0).reshape(BATCHES[dim])
        td["new"] = value
        assert (td["new"] == value).all()
        for got, want in zip(td.tensordicts, value.unbind(dim), strict=True):
            assert (got["new"] == want).all()

    def test_set_over_unlike_shapes(self):
        td = unlike()
        td["h"] = torch.ones(4, 3, 5)
        assert td["h"].shape == (4, 3, 5)

    def test_set_what_one_part_has(self):
        td = unlike()
        td["only0"] = torch.ones(4, 3)
        assert set(td.keys()) == {"a", "h", "only0"}

    @both_dims
    def test_set_nested(self, dim):
        td = make(dim)
        td["n", "d"] = torch.ones(*BATCHES[dim], 5)
        td["p", "q"] = torch.ones(BATCHES[dim])
        assert td["n", "d"].shape == (*BATCHES[dim], 5)
        assert td.tensordicts[1]["p", "q"].shape == (3,)

    @both_dims
    def test_set_container(self, dim):
        td = make(dim)
        td["p"] = TensorDict({"q": torch.ones(*BATCHES[dim], 6)}, BATCHES[dim])
        td["r"] = make(dim)
        assert td["p"].batch_size == BATCHES[dim] and td.tensordicts[0]["p", "q"].shape == (3, 6)
        assert (td["r", "a"] == td["a"]).all()

    @pytest.mark.parametrize("shape", [(3,), (4,), (3, 4), (5, 3)], ids=str)
    def test_set_wrong_shape(self, shape):
        td = unlike()
        with pytest.raises(RuntimeError, match="batch dimension mismatch"):
            td["new"] = torch.zeros(shape)
        assert all("new" not in one.keys() for one in td.tensordicts)

    def test_set_returns_self(self):
        td = make()
        assert td.set("new", torch.zeros(4, 3)) is td
        assert td.set_("new", torch.ones(4, 3)) is td

    @both_dims
    def test_set_in_place(self, dim):
        td = unlike(dim)
        held = [one["a"] for one in td.tensordicts]
        td.set_("a", torch.ones(*BATCHES[dim], 2))
        assert all((x == 1).all() for x in held)
        td.set("a", torch.full((*BATCHES[dim], 2), 2.0), inplace=True)
        assert all((x == 2).all() for x in held)
        td.set("a", torch.zeros(*BATCHES[dim], 2))
        assert all((x == 2).all() for x in held)

    @pytest.mark.parametrize("key", ["zz", "only0"])
    def test_set_in_place_needs_the_key_in_each_part(self, key):
        with pytest.raises(KeyError):
            unlike().set_(key, torch.ones(4, 3))

    def test_write_through_a_part(self):
        td = make()
        td.tensordicts[1]["b"] = T([7, 8, 9])
        td[2]["b"].zero_()
        assert td["b"][1].tolist() == [7, 8, 9] and td["b"][2].tolist() == [0, 0, 0]

    def test_reading_gives_a_copy(self):
        td = make()
        td["b"].zero_()
        check_same(td, dense())

    @both_dims
    def test_delete(self, dim):
        td = unlike(dim)
        del td["a"]
        assert all("a" not in one.keys() for one in td.tensordicts)
        assert set(td.keys()) == {"h"}
        td = make(dim)
        del td["n", "c"]
        assert ("n", "c") not in td.tensordicts[0].keys(True) and "n" in td.keys()

    def test_delete_missing(self):
        with pytest.raises(KeyError, match="zz"):
            del unlike()["zz"]

    def test_delete_what_one_part_has(self):
        td = unlike()
        del td["only0"]
        assert "only0" not in td.tensordicts[0].keys()

    @both_dims
    def test_pop(self, dim):
        td = make(dim)
        assert (td.pop("a") == dense(dim)["a"]).all()
        assert "a" not in td.keys() and "a" not in td.tensordicts[3].keys()
        assert td.pop("zz", 3) == 3 and td.pop("only0", None) is None
        with pytest.raises(KeyError, match="zz"):
            td.pop("zz")

    @both_dims
    def test_rename(self, dim):
        td = make(dim)
        td.rename_key_("a", "z")
        assert set(td.keys()) == {"z", "b", "n"}
        assert all(set(one.keys()) == {"z", "b", "n"} for one in td.tensordicts)
        assert (td["z"] == dense(dim)["a"]).all()

    def test_rename_errors(self):
        td = make()
        with pytest.raises(KeyError, match="zz"):
            td.rename_key_("zz", "z")
        with pytest.raises(KeyError, match="already present"):
            td.rename_key_("a", "b", safe=True)
        check_same(td, dense())

    def test_ours_failed_rename_changes_nothing(self):
        td = unlike()
        with pytest.raises(KeyError):
            td.rename_key_("only0", "z")
        assert (td == unlike()).all() and "only0" in td.tensordicts[0].keys()

    @both_dims
    @pytest.mark.parametrize("source", ["dict", "dense", "lazy"])
    def test_update(self, dim, source):
        td = make(dim)
        batch = BATCHES[dim]
        new = {
            "a": torch.ones(*batch, 7),
            "q": torch.ones(batch),
            "n": {"d": torch.ones(*batch, 5)},
        }
        if source != "dict":
            new = TensorDict(new, batch)
        if source == "lazy":
            new = new.to_lazystack(dim)
        assert td.update(new) is td
        assert is_lazy(td, dim)
        assert td["a"].shape == (*batch, 7) and (td["q"] == 1).all()
        assert (td["n", "d"] == 1).all() and (td["n", "c"] == dense(dim)["n", "c"]).all()
        assert td.tensordicts[0]["a"].shape == (3, 7)

    def test_update_unlike_from_unlike(self):
        td = unlike()
        td.update(unlike() + 1)
        assert (td.get("h", as_list=True)[2] == unlike_part(2)["h"] + 1).all()
        assert (td.tensordicts[1]["only1"] == 1).all()

    @both_dims
    def test_update_in_place(self, dim):
        td = make(dim)
        held = [one["a"] for one in td.tensordicts]
        td.update_({"a": torch.ones(*BATCHES[dim], 2)})
        assert all((x == 1).all() for x in held)
        with pytest.raises(KeyError):
            td.update_({"q": torch.ones(BATCHES[dim])})

    def test_setdefault(self):
        td = make()
        assert (td.setdefault("b", torch.zeros(4, 3)) == dense()["b"]).all()
        assert (td.setdefault("q", torch.ones(4, 3)) == 1).all()
        assert "q" in td.tensordicts[0].keys()

    def test_zero_fill_copy(self):
        td = make()
        td.zero_()
        assert all((value == 0).all() for value in leaves(td).values())
        td.copy_(dense())
        check_same(td, dense())


# --- indexing ----------------------------------------------------------------------------------

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
INDEX_CASES = [
    (dim, *case) for dim, cases in enumerate((INDEX_0, INDEX_1)) for case in cases.values()
]
INDEX_IDS = [f"{dim}: {name}" for dim, cases in enumerate((INDEX_0, INDEX_1)) for name in cases]
index_cases = pytest.mark.parametrize(("dim", "index", "result"), INDEX_CASES, ids=INDEX_IDS)

EMPTY_RESULTS = [[], S(2, 2), S(7, 9), torch.zeros(0, dtype=torch.long), (S(None), S(0, 0))]


class TestIndex:
    @index_cases
    def test_as_the_dense_stack(self, dim, index, result):
        got = make(dim)[index]
        check_same(got, dense(dim)[index])
        if result == "dense":
            assert type(got) is TensorDict
        else:
            assert is_lazy(got, result)

    @index_cases
    def test_unlike_parts(self, dim, index, result):
        """The entries that all parts share come out as those of the dense stack of these."""
        got = unlike(dim)[index]
        want = torch.stack([unlike_part(i).select("a") for i in range(4)], dim)[index]
        check_same(got.select("a"), want)
        assert "h" in got.keys()

    @both_dims
    @pytest.mark.parametrize("index", EMPTY_RESULTS, ids=repr)
    def test_empty_result(self, dim, index):
        got = make(dim)[index]
        assert got.batch_size == dense(dim)[index].batch_size

    @both_dims
    def test_no_row_masked(self, dim):
        mask = torch.zeros(BATCHES[dim], dtype=torch.bool)
        assert make(dim)[mask].batch_size == (0,)
        assert make(dim)[mask[:, 0]].batch_size == (0, BATCHES[dim][1])

    def test_parts_are_handed_out(self):
        td = make()
        assert td[0] is td.tensordicts[0]
        assert td[-1] is td.tensordicts[3]
        assert td[1:3].tensordicts[0] is td.tensordicts[1]
        assert td[[3, 0]].tensordicts[1] is td.tensordicts[0]
        assert list(td)[2] is td.tensordicts[2]
        assert make(1)[:, 2]["b"].tolist() == part(2)["b"].tolist()

    def test_slices_share_memory(self):
        td = make()
        td[1:3]["n"].tensordicts[0].zero_()
        td[:, 0].tensordicts[3]["b"].fill_(-1)
        assert (td["n", "c"][1] == 0).all() and (td["n", "c"][2] != 0).any()
        assert td["b"][3].tolist() == [-1, 31, 32]

    @pytest.mark.parametrize(
        ("dim", "index"),
        [
            (0, 4),
            (0, -5),
            (0, (0, 3)),
            (1, 3),
            (1, (0, 4)),
            (0, (0, 0, 0)),
            (1, (S(None),) * 3),
            (0, T([5])),
            (1, T([5])),
        ],
        ids=str,
    )
    def test_out_of_range(self, dim, index):
        with pytest.raises(IndexError):
            make(dim)[index]
        with pytest.raises(IndexError):
            make(dim)[index] = 0

    @both_dims
    def test_iteration(self, dim):
        rows = list(make(dim))
        assert len(rows) == BATCHES[dim][0]
        for got, want in zip(rows, dense(dim), strict=True):
            check_same(got, want)

    def test_string_key(self):
        assert (make()["n"][1:, 0]["c"] == dense()["n", "c"][1:, 0]).all()


class TestAssign:
    @index_cases
    def test_scalar(self, dim, index, result):
        td, want = make(dim), dense(dim)
        td[index] = 0
        want[index] = 0
        check_same(td, want)
        assert is_lazy(td, dim)

    @index_cases
    def test_container(self, dim, index, result):
        td, want = make(dim), dense(dim)
        new = (dense(dim) * 2 + 1)[index]
        td[index] = new
        want[index] = new
        check_same(td, want)
        assert is_lazy(td, dim)

    @index_cases
    def test_lazy_source(self, dim, index, result):
        td, want = make(dim), dense(dim)
        td[index] = (make(dim) * 2 + 1)[index]
        want[index] = (dense(dim) * 2 + 1)[index]
        check_same(td, want)

    @pytest.mark.parametrize(
        "index", [0, S(1, 3), (S(None), 1), [0, 2], torch.eye(4, 3, dtype=torch.bool)], ids=str
    )
    def test_in_place(self, index):
        td = make()
        parts, held = list(td.tensordicts), [one["a"] for one in td.tensordicts]
        td[index] = (dense() * 2)[index]
        want = dense()
        want[index] = (dense() * 2)[index]
        assert all(a is b for a, b in zip(td.tensordicts, parts, strict=True))
        assert all((x == row).all() for x, row in zip(held, want["a"], strict=True))

    def test_new_key_in_one_part(self):
        td = unlike()
        td[0] = TensorDict({"q": torch.ones(3)}, [3])
        assert "q" in td.tensordicts[0].keys() and "q" not in td.tensordicts[1].keys()
        assert "q" not in td.keys()

    def test_new_key_in_some_parts(self):
        td = unlike()
        td[:2] = TensorDict({"q": torch.ones(2, 3)}, [2, 3])
        assert ["q" in one.keys() for one in td.tensordicts] == [True, True, False, False]

    def test_new_key_in_all_parts(self):
        td = unlike()
        td[:, 1] = TensorDict({"q": torch.ones(4, 6)}, [4])
        assert td["q"].shape == (4, 3, 6)
        assert td["q"].sum((0, 2)).tolist() == [0, 24, 0]

    def test_dict(self):
        td = unlike()
        td[0] = {"a": torch.ones(3, 2)}
        assert (td["a"][0] == 1).all() and (td["a"][1] == 1).all() and (td["a"][2] == 2).all()

    def test_unlike_entries(self):
        td = unlike()
        td[:, 0] = 0
        for i, one in enumerate(td.tensordicts):
            assert (one["h"][0] == 0).all()
            assert (one["h"][1:] == unlike_part(i)["h"][1:]).all()
        td[1] = unlike_part(1) * 2
        assert (td.tensordicts[1]["h"] == unlike_part(1)["h"] * 2).all()

    def test_unlike_shapes_do_not_fit(self):
        td = unlike()
        with pytest.raises(RuntimeError, match="h"):
            td[0] = td[1].clone().exclude("only1")

    def test_wrong_batch_size(self):
        td = make()
        with pytest.raises(RuntimeError):
            td[0] = TensorDict({"b": torch.zeros(2, dtype=torch.long)}, [2])
        with pytest.raises(RuntimeError):
            td[:2] = TensorDict({"b": torch.zeros(3, 3, dtype=torch.long)}, [3, 3])
        check_same(td, dense())

    @both_dims
    def test_set_at(self, dim):
        td, want = make(dim), dense(dim)
        for index in (0, S(1, 3), (S(None), 1), (2, 2)):
            td.set_at_("b", -1, index)
            want.set_at_("b", -1, index)
        check_same(td, want)

    @both_dims
    def test_set_at_nested_key_with_tensors(self, dim):
        td, want = make(dim), dense(dim)
        for index in (0, -1, S(1, 3)):
            rows = want["n", "c"][index] * 0 - 1
            td.set_at_(("n", "c"), rows, index)
            want.set_at_(("n", "c"), rows, index)
        check_same(td, want)

    @both_dims
    def test_nested_keys_are_written_in_members(self, dim):
        for td in (make(dim), lazy_stack([make(dim), make(dim)])):
            value = td["n", "c"] + 1
            td.set_(("n", "c"), value)
            td.set(("n", "new"), value)
            td["n", "b"] = value
            for name in ("c", "new", "b"):
                assert torch.equal(td["n", name], value)
            td.set(("other", "new"), td["b"])
            assert torch.equal(td["other", "new"], td["b"])

    @both_dims
    def test_nested_keys_refused(self, dim):
        td = make(dim)
        for value in (torch.zeros(7, 7), td["b"]):  # the inner batch size is longer
            with pytest.raises(RuntimeError, match="batch dimension mismatch"):
                td.set(("n", "c"), value)
        with pytest.raises(KeyError, match="not a container"):
            td.set(("a", "c"), td["b"])
        with pytest.raises(RuntimeError, match="Cannot modify locked"):
            td.lock_().set(("n", "new"), td["n", "c"])
        check_same(td, dense(dim))

    def test_locked(self):
        td = make().lock_()
        td[0] = 0
        td[:, 1] = dense()[:, 1] * 0
        assert td["b"].tolist() == [[0, 0, 0], [10, 0, 12], [20, 0, 22], [30, 0, 32]]
        with pytest.raises(RuntimeError, match="Cannot modify locked"):
            td[0] = TensorDict({"q": torch.ones(3)}, [3])


# --- shape operations --------------------------------------------------------------------------

# op, stack dim afterwards for stacks along dim 0 and dim 1; None: class and stack dim are free
SHAPE_OPS = [
    (("unsqueeze", 0), 1, 2),
    (("unsqueeze", 1), 0, 2),
    (("unsqueeze", 2), 0, 1),
    (("unsqueeze", -1), 0, 1),
    (("unsqueeze", -2), 0, 2),
    (("unsqueeze", -3), 1, 2),
    (("squeeze",), 0, 1),
    (("squeeze", 0), 0, 1),
    (("squeeze", -1), 0, 1),
    (("permute", 1, 0), 1, 0),
    (("permute", (-1, -2)), 1, 0),
    (("permute", 0, 1), 0, 1),
    (("transpose", 0, 1), 1, 0),
    (("transpose", -1, 0), 1, 0),
    (("transpose", 0, 0), 0, 1),
    (("swapaxes", 0, 1), 1, 0),
    (("movedim", 0, 1), 1, 0),
    (("reshape", 12), 0, 0),
    (("reshape", -1), 0, 0),
    (("flatten",), 0, 0),
    (("flatten", 0, 1), 0, 0),
    (("view", 12), 0, 0),
    (("view", -1), 0, 0),
    (("reshape", 2, 6), None, None),
    (("reshape", 6, -1), None, None),
    (("reshape", 2, 2, 3), None, None),
    (("expand", 5, -1, -1), None, None),
    (("repeat", 2, 1), 0, 1),
    (("repeat", 1, 2), 0, 1),
    (("repeat", (2, 3)), 0, 1),
    (("repeat_interleave", 2, {"dim": 0}), 0, 1),
    (("repeat_interleave", 2, {"dim": 1}), 0, 1),
    (("roll", 1, 0), None, None),
    (("roll", -1, 1), None, None),
    (("flip", 0), None, None),
    (("flip", (0, 1)), None, None),
    (("narrow", 0, 1, 2), None, None),
    (("narrow", 1, 1, 2), None, None),
    (("tile", (2, 1)), None, None),
    (("atleast_3d",), 1, 2),
    (("rot90",), None, None),
    (("pad", [0, 1]), None, None),
    (("clone",), 0, 1),
    (("copy",), 0, 1),
]
shape_cases = pytest.mark.parametrize(
    ("dim", "op", "after"),
    [(dim, op, after[dim]) for op, *after in SHAPE_OPS for dim in (0, 1)],
    ids=[f"{dim}: {name_of(op)}" for op, *_ in SHAPE_OPS for dim in (0, 1)],
)

PART_OPS = [
    (("split", 2), 0, 1),
    (("split", 3, 1), 0, 1),
    (("split", 2, -1), 0, 1),
    (("split", [1, 2, 1], {"dim": "stack"}), 0, 1),
    (("chunk", 2), 0, 1),
    (("chunk", 2, 1), 0, 1),
    (("tensor_split", 2), 0, 1),
    (("unbind", 0), "dense", 0),
    (("unbind", 1), 0, "dense"),
    (("unbind", -1), 0, "dense"),
    (("unbind", -2), "dense", 0),
]


class TestShape:
    @shape_cases
    def test_as_the_dense_stack(self, dim, op, after):
        got = run(make(dim), op)
        check_same(got, run(dense(dim), op))
        if after is not None:
            assert is_lazy(got, after)

    @pytest.mark.parametrize(
        ("dim", "op", "after"),
        [(dim, op, after[dim]) for op, *after in PART_OPS for dim in (0, 1)],
        ids=[f"{dim}: {name_of(op)}" for op, *_ in PART_OPS for dim in (0, 1)],
    )
    def test_parts(self, dim, op, after):
        if isinstance(op[-1], dict):
            op = (*op[:-1], {"dim": dim})
        got, want = run(make(dim), op), run(dense(dim), op)
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            check_same(one, other)
            assert type(one) is TensorDict if after == "dense" else is_lazy(one, after)

    def test_unbind_along_the_stack_dim_gives_the_parts(self):
        for dim in (0, 1):
            td = make(dim)
            assert all(a is b for a, b in zip(td.unbind(dim), td.tensordicts, strict=True))

    @pytest.mark.parametrize(
        "op",
        [
            ("unsqueeze", 0),
            ("unsqueeze", -1),
            ("permute", 1, 0),
            ("transpose", 0, 1),
            ("reshape", 12),
            ("flatten",),
            ("expand", 2, 4, 3),
            ("repeat", 2, 1),
            ("clone",),
            ("view", 12),
            ("unflatten", 0, (2, 2)),
            ("reshape", 2, 2, 3),
        ],
        ids=name_of,
    )
    def test_unlike_parts_stay_apart(self, op):
        got = run(unlike(), op)
        want = run(torch.stack([unlike_part(i).select("a") for i in range(4)]), op)
        check_same(got.select("a"), want)
        assert is_lazy(got) and "h" in got.keys()

    def test_unlike_parts_cannot_be_mixed(self):
        with pytest.raises(RuntimeError):
            unlike().reshape(2, 6)

    def test_permute_back(self):
        td = unlike().permute(1, 0)
        assert td.batch_size == (3, 4) and td.stack_dim == 1
        for i, x in enumerate(td.get("h", as_list=True)):
            assert (x == unlike_part(i)["h"]).all()
        assert (td.permute(1, 0) == unlike()).all()

    def test_three_dims(self):
        parts = [
            TensorDict({"x": torch.arange(6).reshape(2, 3) + 10 * i}, [2, 3]) for i in range(4)
        ]
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
            for i in range(3):
                check_same(torch.stack(td.unbind(i), i), want)

    def test_squeeze_of_the_stack_dim(self):
        td = lazy_stack([part(0)])
        assert td.batch_size == (1, 3)
        check_same(td.squeeze(0), part(0))
        check_same(td.squeeze(), part(0))
        assert td.squeeze(1).batch_size == (1, 3)

    def test_squeeze_of_another_dim(self):
        td = make().unsqueeze(1)
        check_same(td.squeeze(1), dense())
        assert is_lazy(td.squeeze(1), 0)
        td = make().unsqueeze(0)
        assert is_lazy(td.squeeze(0), 0)

    def test_write_through_a_shape(self):
        td = make()
        td.permute(1, 0).zero_()
        assert (td["a"] == 0).all()

    @pytest.mark.parametrize(
        "op",
        [
            ("unsqueeze", 0),
            ("permute", 1, 0),
            ("transpose", 0, 1),
            ("flatten", 0, 1),
            ("unsqueeze", -1),
        ],
        ids=name_of,
    )
    def test_context_manager_writes_back(self, op):
        td = make()
        with run(td, op) as v:
            v["new"] = v["b"] * 2
        check_same(td.exclude("new"), dense())
        assert (td["new"] == td["b"] * 2).all()
        assert is_lazy(td, 0)

    @pytest.mark.parametrize("op", [("squeeze", 2), ("unbind", 2), ("split", 2, 2)], ids=name_of)
    def test_errors(self, op):
        with pytest.raises((IndexError, ValueError, RuntimeError)):
            run(make(), op)

    def test_ours_not_a_permutation(self):
        for dims in ((0, 0), (0,), (0, 1, 2)):
            with pytest.raises((IndexError, ValueError, RuntimeError)):
                make().permute(dims)

    @both_dims
    def test_gather_and_masks(self, dim):
        mask = torch.eye(*BATCHES[dim], dtype=torch.bool)
        index = T([[0, 1, 2], [2, 1, 0]])
        td, want = make(dim), dense(dim)
        check_same(td.gather(0, index), want.gather(0, index))
        check_same(td.gather(1, index[:, :1]), want.gather(1, index[:, :1]))
        check_same(td.masked_select(mask), want.masked_select(mask))
        check_same(td.masked_fill(mask, 0), want.masked_fill(mask, 0))
        check_same(td.where(mask, 0), want.where(mask, 0))
        check_same(td.where(mask, td * 2), want.where(mask, want * 2))
        check_same(torch.where(mask, td, td * 2), want.where(mask, want * 2))
        check_same(td, want)
        td.masked_fill_(mask, 0)
        check_same(td, want.masked_fill(mask, 0))

    def test_masked_fill_unlike(self):
        td = unlike().masked_fill(torch.eye(4, 3, dtype=torch.bool), -1)
        assert is_lazy(td, 0)
        for i, x in enumerate(td.get("h", as_list=True)):
            want = unlike_part(i)["h"]
            if i < 3:
                want[i] = -1
            assert (x == want).all()


class TestTorchFunctions:
    @pytest.mark.parametrize(
        "op",
        [
            ("permute", (1, 0)),
            ("unsqueeze", 0),
            ("squeeze",),
            ("flatten",),
            ("transpose", 0, 1),
            ("zeros_like",),
            ("ones_like",),
            ("full_like", 3),
            ("clone",),
        ],
        ids=name_of,
    )
    @both_dims
    def test_lazy_stays_lazy(self, dim, op):
        got = run(make(dim), op, torch)
        check_same(got, run(dense(dim), op, torch))
        assert is_lazy(got)

    @both_dims
    def test_into_parts(self, dim):
        td, want = make(dim), dense(dim)
        for op in (("split", 2), ("chunk", 2), ("unbind", 0), ("unbind", 1)):
            for one, other in zip(run(td, op, torch), run(want, op, torch), strict=True):
                check_same(one, other)

    def test_zeros_like_of_unlike(self):
        td = torch.zeros_like(unlike())
        assert is_lazy(td, 0)
        assert [x.shape for x in td.get("h", as_list=True)] == [(3, i + 2) for i in range(4)]
        assert all((x == 0).all() for x in td.get("h", as_list=True))


class TestStackAndCat:
    @pytest.mark.parametrize("to", [0, 1, 2, -1, -3])
    @both_dims
    def test_stack(self, dim, to):
        got = torch.stack([make(dim), make(dim) * 2], to)
        check_same(got, torch.stack([dense(dim), dense(dim) * 2], to))
        assert is_lazy(got)

    @pytest.mark.parametrize("to", [0, 1, -1])
    @both_dims
    def test_cat(self, dim, to):
        got = torch.cat([make(dim), make(dim) * 2], to)
        check_same(got, torch.cat([dense(dim), dense(dim) * 2], to))
        assert is_lazy(got, dim)

    @pytest.mark.parametrize("to", [0, 1, 2])
    def test_lazy_stack_of_lazy_stacks(self, to):
        got = lazy_stack([make(), make() * 2], to)
        check_same(got, torch.stack([dense(), dense() * 2], to))
        assert is_lazy(got, to) and len(got.tensordicts) == 2
        assert is_lazy(got.tensordicts[0], 0)

    def test_lazy_stack_of_unlike_stack_dims(self):
        got = lazy_stack([make(0), make(1).permute(1, 0), make(1).transpose(0, 1).clone()])
        check_same(got, torch.stack([dense()] * 3))

    def test_lazy_with_dense(self):
        check_same(torch.stack([make(), dense()]), torch.stack([dense()] * 2))
        check_same(torch.stack([dense(), make()]), torch.stack([dense()] * 2))
        check_same(torch.cat([dense(), make()]), torch.cat([dense()] * 2))
        check_same(torch.cat([make(), dense()]), torch.cat([dense()] * 2))
        check_same(lazy_stack([make(), dense()]), torch.stack([dense()] * 2))

    def test_unlike(self):
        td = torch.stack([unlike(), unlike()])
        assert is_lazy(td) and td.batch_size == (2, 4, 3)
        td = torch.cat([unlike(), unlike()])
        assert is_lazy(td, 0) and td.batch_size == (8, 3)
        assert td[5]["h"].shape == (3, 3)
        td = torch.cat([unlike(), unlike()], 1)
        assert td.batch_size == (4, 6) and td[1]["h"].shape == (6, 3)

    @both_dims
    def test_dense_stack_tds(self, dim):
        check_same(dense_stack_tds(make(dim)), dense(dim))
        assert type(dense_stack_tds(make(dim))) is TensorDict
        assert type(dense_stack_tds([part(0), part(1)], dim)) is TensorDict
        check_same(dense_stack_tds([part(0), part(1)], dim), torch.stack([part(0), part(1)], dim))

    def test_dense_stack_tds_of_a_list_needs_the_dim(self):
        with pytest.raises(ValueError, match="dim"):
            dense_stack_tds([part(0), part(1)])

    @both_dims
    def test_maybe_dense_stack(self, dim):
        alike, other = [part(0), part(1)], [part(0), part(1).exclude("a")]
        assert type(maybe_dense_stack(alike, dim)) is TensorDict
        check_same(maybe_dense_stack(alike, dim), torch.stack(alike, dim))
        assert is_lazy(maybe_dense_stack(other, dim), dim)
        assert set(maybe_dense_stack(other, dim).keys()) == {"b", "n"}
        wide = [part(0), part(1).set("a", torch.zeros(3, 7))]
        assert is_lazy(maybe_dense_stack(wide, dim), dim)
        assert type(LazyStackedTensorDict.maybe_dense_stack(alike, dim)) is TensorDict

    def test_maybe_dense_stack_of_unlike_nested(self):
        nested = [TensorDict({"n": {"x": torch.zeros(3, i)}}, [3]) for i in (2, 4)]
        td = maybe_dense_stack(nested)
        assert is_lazy(td["n"], 0)
        assert [x.shape for x in td["n"].get("x", as_list=True)] == [(3, 2), (3, 4)]


class TestGrow:
    @both_dims
    def test_append(self, dim):
        td = make(dim)
        td.append(part(4))
        assert td.batch_size == ((5, 3) if dim == 0 else (3, 5))
        check_same(td, torch.stack([part(i) for i in range(5)], dim))

    @pytest.mark.parametrize(("at", "where"), [(0, 0), (2, 2), (-1, 3), (4, 4), (100, 4)])
    @both_dims
    def test_insert(self, dim, at, where):
        td = make(dim)
        new = part(9)
        td.insert(at, new)
        assert td.tensordicts[where] is new
        parts = [part(i) for i in range(4)]
        parts.insert(where, new)
        check_same(td, torch.stack(parts, dim))

    @both_dims
    def test_extend(self, dim):
        td = make(dim)
        td.extend(part(i) for i in (4, 5))
        td.extend(lazy_stack([part(6)], dim))
        td.extend([])
        check_same(td, torch.stack([part(i) for i in range(7)], dim))

    def test_extend_adds_all_or_none(self):
        for td in (make(), LazyStackedTensorDict(stack_dim=0)):
            before = len(td)
            for bad in (TensorDict(batch_size=[5]), {"a": 1}):
                with pytest.raises((ValueError, TypeError)):
                    td.extend([part(4), bad])
                assert len(td) == before

    def test_keys_shrink_to_what_all_have(self):
        td = make()
        td.append(TensorDict({"a": torch.ones(3, 2)}, [3]))
        assert set(td.keys()) == {"a"}

    def test_unlike_shape_is_fine(self):
        td = make()
        td.append(part(4).set("a", torch.zeros(3, 7)))
        with pytest.raises(RuntimeError, match="as_list"):
            td["a"]

    def test_errors(self):
        td = make()
        for grow in (td.append, lambda value: td.insert(0, value)):
            with pytest.raises(ValueError, match="[Bb]atch size"):
                grow(TensorDict({"a": torch.ones(5, 2)}, [5]))
            with pytest.raises(TypeError, match="Expected new value"):
                grow({"a": 1})
        check_same(td, dense())

    def test_locked(self):
        td = make().lock_()
        with pytest.raises(RuntimeError, match="Cannot modify locked"):
            td.append(part(4))
        with pytest.raises(RuntimeError, match="Cannot modify locked"):
            td.insert(0, part(4))


class TestNothingIsLost:
    def test_entries_of_one_member_only_are_not_dropped(self):
        td = lazy_stack([TensorDict(a=1, only=2), TensorDict(a=1)])
        for source in (td, TensorDict(n=td)):
            for method in (source.to_dict, source.state_dict):
                with pytest.raises(RuntimeError, match="only"):
                    method()
        assert td[0].to_dict()["only"] == 2


class TestConvert:
    @pytest.mark.parametrize("name", ["contiguous", "densify", "to_tensordict"])
    @both_dims
    def test_to_dense(self, name, dim):
        td = make(dim)
        got = getattr(td, name)()
        assert type(got) is TensorDict and type(got["n"]) is TensorDict
        check_same(got, dense(dim))
        got.zero_()
        check_same(td, dense(dim))

    @pytest.mark.parametrize("name", ["contiguous", "to_tensordict"])
    def test_unlike_cannot(self, name):
        with pytest.raises(RuntimeError, match="as_list"):
            getattr(unlike(), name)()

    def test_densify_makes_nested_tensors(self):
        td = unlike().densify(layout=torch.jagged)
        assert type(td) is TensorDict and td.batch_size == (4, 3)
        assert td["h"].is_nested and not td["a"].is_nested

    @both_dims
    def test_clone(self, dim):
        td = unlike(dim)
        got = td.clone()
        assert is_lazy(got, dim) and (got == td).all()
        assert got.tensordicts[0] is not td.tensordicts[0]
        got.zero_()
        assert (td == unlike(dim)).all()
        assert "only1" in got.tensordicts[1].keys()

    @both_dims
    def test_shallow_clone(self, dim):
        td = unlike(dim)
        for got in (td.clone(False), td.clone(recurse=False), td.copy()):
            assert is_lazy(got, dim)
            assert got.tensordicts[0] is not td.tensordicts[0]
            assert got.tensordicts[0]["h"] is td.tensordicts[0]["h"]
            got["new"] = torch.zeros(BATCHES[dim])
            assert "new" not in td.keys()

    @both_dims
    def test_to_dict(self, dim):
        got = make(dim).to_dict()
        assert type(got) is dict and type(got["n"]) is dict
        assert (got["n"]["c"] == dense(dim)["n", "c"]).all()

    def test_to_dtype_and_device(self):
        td = make()
        got = td.to(torch.float64)
        assert is_lazy(got, 0) and got["b"].dtype == got["n", "c"].dtype == torch.float64
        got = td.to("cpu")
        assert is_lazy(got, 0) and got.device == torch.device("cpu")
        assert all(one.device == torch.device("cpu") for one in got.tensordicts)
        assert td.device is None
        assert is_lazy(unlike().to(torch.float64), 0)

    @pytest.mark.parametrize("dim", [0, 1, -1])
    def test_to_lazystack(self, dim):
        got = dense().to_lazystack(dim)
        assert is_lazy(got, dim % 2)
        check_same(got, dense())
        check_same(make().to_lazystack(dim), dense())
        assert is_lazy(make().to_lazystack(dim), dim % 2)

    def test_to_lazystack_of_itself(self):
        td = make(1)
        assert td.to_lazystack(1) is td

    def test_to_lazystack_out_of_range(self):
        with pytest.raises(IndexError):
            dense().to_lazystack(5)

    @both_dims
    def test_empty(self, dim):
        got = make(dim).empty()
        assert is_lazy(got, dim) and got.is_empty() and got.batch_size == BATCHES[dim]

    def test_detach_data_requires_grad(self):
        td = make().float().requires_grad_()
        assert td["a"].requires_grad
        for got in (td.detach(), td.data):
            assert is_lazy(got, 0) and not got["a"].requires_grad

    def test_flatten_and_unflatten_keys(self):
        got = make().flatten_keys(".")
        assert is_lazy(got, 0) and set(got.keys()) == {"a", "b", "n.c"}
        assert (got["n.c"] == dense()["n", "c"]).all()
        back = got.unflatten_keys(".")
        assert is_lazy(back, 0) and set(back.keys(True, True)) == {"a", "b", ("n", "c")}


class TestSelect:
    @both_dims
    def test_select(self, dim):
        td = make(dim)
        for keys in (["a"], ["a", "n"], [("n", "c")], ["b", ("n", "c")]):
            got = td.select(*keys)
            assert is_lazy(got, dim)
            check_same(got, dense(dim).select(*keys))
        check_same(td, dense(dim))

    @both_dims
    def test_exclude(self, dim):
        td = make(dim)
        for keys in (["a"], ["a", "n"], [("n", "c")], ["zz"]):
            got = td.exclude(*keys)
            assert is_lazy(got, dim)
            check_same(got, dense(dim).exclude(*keys))
        check_same(td, dense(dim))

    def test_strict(self):
        with pytest.raises(KeyError, match="zz"):
            make().select("zz")
        assert set(make().select("zz", "a", strict=False).keys()) == {"a"}
        with pytest.raises(KeyError, match="only0"):
            unlike().select("only0")
        assert not set(unlike().select("only0", strict=False).keys())

    def test_in_place(self):
        td = make()
        assert td.select("a", inplace=True) is td
        assert all(set(one.keys()) == {"a"} for one in td.tensordicts)
        td = make()
        assert td.exclude("a", inplace=True) is td
        assert all(set(one.keys()) == {"b", "n"} for one in td.tensordicts)


class TestApply:
    @both_dims
    def test_apply(self, dim):
        got = make(dim).apply(lambda x: x * 2 + 1)
        assert is_lazy(got, dim)
        check_same(got, dense(dim).apply(lambda x: x * 2 + 1))

    def test_apply_to_unlike(self):
        got = unlike().apply(lambda x: x + 1)
        assert is_lazy(got, 0)
        assert (got.get("h", as_list=True)[3] == unlike_part(3)["h"] + 1).all()
        assert (got.tensordicts[2]["only2"] == 1).all()

    @both_dims
    def test_named_apply(self, dim):
        got = make(dim).named_apply(lambda name, x: x + 1 if name == "a" else x)
        assert is_lazy(got, dim)
        check_same(got.exclude("a"), dense(dim).exclude("a"))
        assert (got["a"] == dense(dim)["a"] + 1).all()

    def test_apply_with_others(self):
        check_same(make().apply(torch.add, make()), dense() * 2)

    def test_apply_in_place(self):
        td = make()
        held = td.tensordicts[0]["a"]
        assert td.apply_(lambda x: x * 2) is td
        assert (held == part(0)["a"] * 2).all()

    def test_apply_with_new_batch_size(self):
        got = make().apply(lambda x: x.sum(), batch_size=[])
        assert got.batch_size == ()

    @both_dims
    @pytest.mark.parametrize(
        "function",
        [
            lambda td: td + 1,
            lambda td: 1 + td,
            lambda td: td * 2,
            lambda td: td - td,
            lambda td: td * td,
            lambda td: td / 2,
            lambda td: td**2,
            lambda td: -td,
            lambda td: td == td,
            lambda td: td == 0,
            lambda td: td != 0,
            lambda td: td < 3,
            lambda td: td.abs(),
            lambda td: td.add(td, alpha=2),
            lambda td: td.clamp(2, 11),
            lambda td: td.float().exp().log(),
        ],
    )
    def test_arithmetic(self, dim, function):
        got = function(make(dim))
        assert is_lazy(got, dim)
        check_same(got, function(dense(dim)))

    @both_dims
    def test_mixed_arithmetic(self, dim):
        want = dense(dim) * 2
        check_same(make(dim) + dense(dim), want)
        check_same(dense(dim) + make(dim), want)

    def test_unlike_arithmetic(self):
        got = unlike() * unlike()
        assert is_lazy(got, 0)
        assert (got.get("h", as_list=True)[3] == unlike_part(3)["h"] ** 2).all()
        assert (unlike() == unlike()).all()
        assert not (unlike() == unlike() + 1).any()

    @both_dims
    def test_in_place_arithmetic(self, dim):
        td = make(dim)
        held = td.tensordicts[0]["a"]
        td += 1
        assert is_lazy(td, dim) and (held == part(0)["a"] + 1).all()
        td.mul_(2)
        check_same(td, (dense(dim) + 1) * 2)

    @both_dims
    def test_reductions(self, dim):
        td, want = make(dim).float(), dense(dim).float()
        for reduce in (
            lambda x: x.sum(0),
            lambda x: x.sum(1),
            lambda x: x.sum(),
            lambda x: x.mean(0),
            lambda x: x.mean(),
        ):
            check_same(reduce(td), reduce(want))
        assert (td == want).all() and (td + 1 > want).all() and not (td < want).any()


class TestLock:
    def test_locks_the_parts(self):
        td = make().lock_()
        assert td.is_locked and all(one.is_locked for one in td.tensordicts)
        assert td["n"].is_locked
        td.unlock_()
        assert not td.is_locked and not any(one.is_locked for one in td.tensordicts)

    @pytest.mark.parametrize(
        "change",
        [
            lambda td: td.set("a", torch.zeros(4, 3, 2)),
            lambda td: td.set("new", torch.zeros(4, 3)),
            lambda td: td.set(("n", "new"), torch.zeros(4, 3, 5)),
            lambda td: td.pop("a"),
            lambda td: td.del_("a"),
            lambda td: td.rename_key_("a", "z"),
            lambda td: td.tensordicts[0].set("a", torch.zeros(3, 2)),
            lambda td: td["n"].set("new", torch.zeros(4, 3, 5)),
            lambda td: td.update({"new": torch.zeros(4, 3)}),
            lambda td: td.exclude("a", inplace=True),
        ],
    )
    def test_no_change_of_structure(self, change):
        td = make().lock_()
        with pytest.raises(RuntimeError, match="Cannot modify locked"):
            change(td)
        check_same(td, dense())

    def test_in_place_is_fine(self):
        td = make().lock_()
        td.set_("a", torch.zeros(4, 3, 2))
        td.zero_()
        assert (td["a"] == 0).all()

    def test_part_cannot_be_unlocked_alone(self):
        td = make().lock_()
        with pytest.raises(RuntimeError, match="Cannot unlock"):
            td.tensordicts[0].unlock_()
        assert td.is_locked and td.tensordicts[0].is_locked

    def test_clone_is_unlocked(self):
        td = make().lock_()
        assert not td.clone().is_locked and not td.clone().tensordicts[0].is_locked

    def test_context(self):
        td = make().lock_()
        with td.unlock_():
            td["new"] = torch.zeros(4, 3)
        assert td.is_locked and "new" in td.keys()


class TestMeta:
    def test_names(self):
        td = make()
        assert td.names == [None, None]
        td.names = ["x", "y"]
        assert td.names == ["x", "y"] and td[0].names == ["y"] and td[:, 0].names == ["x"]
        assert td.permute(1, 0).names == ["y", "x"]
        assert td.unsqueeze(0).names == [None, "x", "y"]
        assert td.clone().names == ["x", "y"]
        td = make(1)
        td.names = ["x", "y"]
        assert td.tensordicts[0].names == ["x"] and td[0].names == ["y"]

    def test_stack_dim_name(self):
        td = LazyStackedTensorDict.lazy_stack([part(0), part(1)], 0, stack_dim_name="s")
        assert td.names == ["s", None]

    @pytest.mark.parametrize("batch", [[4], [], [3, 4], [4, 3, 2]], ids=str)
    def test_batch_size_is_fixed(self, batch):
        td = make()
        with pytest.raises(RuntimeError, match="[Bb]atch.size"):
            td.batch_size = batch
        check_same(td, dense())

    def test_device(self):
        assert make().device is None
        parts = [TensorDict({"x": torch.zeros(2)}, [2], device="cpu") for _ in range(2)]
        assert lazy_stack(parts).device == torch.device("cpu")
        assert lazy_stack(parts)[:, 0].device == torch.device("cpu")
        td = make().to("cpu")
        assert td.clear_device_().device is None and td.tensordicts[0].device is None


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


def test_the_comparison_can_fail():
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

    def test_dense_stack_keeps_them_apart(self):
        out = dense_stack_tds([unlike(), unlike()], 0)
        assert out.batch_size == (2, 4, 3) and out.stack_dim == 1
        assert out[:, 2]["h"].shape == (2, 3, 4)

    def test_stack_of_stacks_with_unlike_keys(self):
        first, second = make(), make().select("a")
        out = maybe_dense_stack([first, second], 0)
        assert out.stack_dim == 0 and out[0] is first and out[1] is second

    def test_from_dict(self):
        rows = [{"a": torch.ones(2)}, {"a": torch.ones(3)}]
        td = LazyStackedTensorDict.from_dict(rows, auto_batch_size=True, stack_dim=1)
        assert td.batch_size == (-1, 2) and td.stack_dim == 1
        td = LazyStackedTensorDict.from_dict({"0": rows[0], "1": rows[1]})
        assert [len(x) for x in td.get("a", as_list=True)] == [2, 3]


def test_a_row_of_values_is_written_in_the_members():
    td = lazy_stack([TensorDict(a=torch.zeros(3), s=s, batch_size=[3]) for s in "uv"])
    td.set_at_("s", "x", 0)
    assert td.get("s").tolist() == [["x"] * 3, ["v"] * 3] and td[0]["s"] == "x"
    td.set_at_("s", "y", (1, 2))
    assert td[1].get("s").tolist() == ["v", "v", "y"]


class TestCumulative:
    @pytest.mark.parametrize("name", ["cummax", "cummin"])
    @pytest.mark.parametrize("dim", [0, 1, -1])
    @pytest.mark.parametrize("stack_dim", [0, 1])
    def test_as_the_dense_stack(self, name, dim, stack_dim):
        got = getattr(make(stack_dim), name)(dim)
        want = getattr(dense(stack_dim), name)(dim)
        for part_of_result in ("values", "indices"):
            check_same(getattr(got, part_of_result), getattr(want, part_of_result))


def test_one_number_of_members_of_unlike_shape():
    leaves = [leaf for td in unlike().tensordicts for leaf in td.values()]
    shared = [leaf for td in unlike().tensordicts for leaf in (td["a"], td["h"])]
    got = unlike().sum(reduce=True)
    assert got == sum([leaf.sum() for leaf in shared]) == sum([leaf.sum() for leaf in leaves])
