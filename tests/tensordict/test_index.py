"""Indexing: a container indexes as a tensor of shape `batch_size` does.

Every leaf row carries its own number, so `rows = arange(numel).reshape(batch)[index]` says which
rows the indexed container must hold, whatever the trailing dims of the leaf are.
"""

import numpy as np
import pytest
import torch

from raffia import LazyStackedTensorDict, NonTensorData, TensorDict, is_tensor_collection

BATCH = (4, 3)
ROWS = torch.arange(12).reshape(BATCH)


def make(names=None):
    """Leaves [4, 3], [4, 3, 2]; a nested container that is one batch dim longer: [4, 3, 5]."""
    return TensorDict(
        {
            "a": torch.arange(24.0).reshape(4, 3, 2),
            "b": torch.arange(12).reshape(4, 3),
            "n": TensorDict({"c": torch.arange(120).reshape(4, 3, 5, 2)}, [4, 3, 5]),
            "m": {"k": {"d": torch.arange(12).reshape(4, 3) % 5 == 0}},
        },
        BATCH,
        names=names,
    )


def leaves(td):
    return dict(td.items(include_nested=True, leaves_only=True))


def check_rows(td, rows, source=None):
    """td holds exactly the `rows` of source, with every nested batch size following."""
    source = make() if source is None else source
    assert td.batch_size == rows.shape
    assert set(leaves(td)) == set(leaves(source))
    for key, value in leaves(source).items():
        torch.testing.assert_close(td[key], value.flatten(0, 1)[rows], rtol=0, atol=0)
    assert td["n"].batch_size == (*rows.shape, 5)
    assert td["m"].batch_size == td["m", "k"].batch_size == rows.shape


T, S = torch.tensor, slice
MASK_ROW = T([True, False, True, False])
MASK_FULL = torch.eye(4, 3, dtype=torch.bool)

VIEWS = {
    "int": 0,
    "int-last": 3,
    "int-neg": -1,
    "int-most-neg": -4,
    "np.int64": np.int64(1),
    "two ints": (2, 1),
    "two ints-neg": (-2, -3),
    "slice": S(1, 3),
    "slice-step": S(None, None, 2),
    "slice-neg": S(-3, -1),
    "slice-empty": S(2, 2),
    "slice-beyond": S(2, 20),
    "slice-all-out": S(10, 20),
    "slice, slice": (S(1, None), S(None, 2)),
    "int, slice": (1, S(0, 2)),
    "slice, int": (S(None), 1),
    "slice, int-neg": (S(1, 3), -1),
    "ellipsis, int": (..., 0),
    "int, ellipsis": (0, ...),
    "ellipsis, slice": (..., S(0, 2)),
    "slice, ellipsis, slice": (S(0, 3), ..., S(1, 3)),
    "int, int, ellipsis": (0, 1, ...),
    "None": None,
    "None, int": (None, 0),
    "None, None": (None, None),
    "slice, None": (S(None), None),
    "slice, None, int": (S(None), None, 1),
    "ellipsis, None": (..., None),
    "None, ellipsis, None": (None, ..., None),
    "int, int, ellipsis, None": (0, 1, ..., None),
    "0-d tensors": (T(2), T(1)),
}
GATHERS = {
    "0-d tensor": T(2),
    "list": [0, 2],
    "list-neg": [-1, 0, -1],
    "list-empty": [],
    "tuple of lists": ([0, 2, 3], [1, 0, 1]),
    "list in tuple": (S(None), [0, 2]),
    "ellipsis, list": (..., [2, 0]),
    "int, list": (1, [0, 2]),
    "int, list, None": (1, [0, 2], None),
    "range": range(1, 3),
    "range-step": range(0, 4, 2),
    "slice, range": (S(None), range(2)),
    "range, slice": (range(1, 4), S(1)),
    "range, range": (range(3), range(3)),
    "tensor": T([0, 3]),
    "tensor-neg": T([-1, 0]),
    "tensor-int32": T([0, 3], dtype=torch.int32),
    "tensor-empty": torch.zeros(0, dtype=torch.long),
    "tensor-2d": T([[0, 3], [1, 1], [2, 2]]),
    "tensor, slice": (T([0, 1]), S(None)),
    "slice, tensor": (S(None), T([0, 2])),
    "slice, tensor-2d": (S(1, 3), T([[0, 2], [1, 1]])),
    "slice, tensor, ellipsis": (S(0, 3), T([0, 1]), ...),
    "ellipsis, tensor, None": (..., T([0, 1]), None),
    "tensor, tensor": (T([0, 1, 3]), T([2, 0, 1])),
    "tensor, tensor broadcast": (T([[0], [1], [3]]), T([2, 0])),
    "tensor, int": (T([0, 1]), 0),
    "int, tensor": (0, T([0, 1])),
    "tensor, None, tensor": (T([0, 1]), None, T([1, 2])),
    "None, tensor": (None, T([1, 0, 1])),
    "numpy": np.array([0, 2]),
    "numpy-2d": np.array([[0, 2], [3, 3], [1, 0]]),
    "slice, numpy": (S(None), np.array([2, 1])),
    "mask-row": MASK_ROW,
    "mask-row-none": MASK_ROW & False,
    "mask-row, slice": (MASK_ROW, S(0, 2)),
    "mask-row, int": (MASK_ROW, 1),
    "mask-row, tensor": (MASK_ROW, T([0, 2])),
    "slice, mask-col": (S(None), T([True, False, True])),
    "ellipsis, mask-col": (..., T([False, False, True])),
    "None, mask-row": (None, MASK_ROW),
    "mask-full": MASK_FULL,
    "mask-full-none": MASK_FULL & False,
    "mask-full-all": MASK_FULL | True,
    "mask-full, None": (MASK_FULL, None),
    "mask-list": [True, False, True, False],
    "mask-numpy-row": np.array([True, False, True, False]),
    "mask-numpy-full": np.eye(4, 3, dtype=bool),
}
ALL = {**VIEWS, **GATHERS}


def table(cases):
    return pytest.mark.parametrize("index", list(cases.values()), ids=list(cases))


class TestGet:
    @table(ALL)
    def test_as_a_tensor_of_the_batch_shape(self, index):
        check_rows(make()[index], ROWS[index])

    @table(ALL)
    def test_source_unchanged(self, index):
        td = make()
        td[index]
        check_rows(td, ROWS)

    @table(VIEWS)
    def test_views_share_memory(self, index):
        td = make()
        sub = td[index]
        if sub.numel():
            assert sub["b"].untyped_storage().data_ptr() == td["b"].untyped_storage().data_ptr()
            sub["b"].fill_(-7)
            sub["n", "c"].fill_(-7)
        hit = torch.zeros(12, dtype=torch.bool)
        hit[ROWS[index].flatten()] = True
        assert ((td["b"] == -7) == hit.reshape(BATCH)).all()
        assert ((td["n", "c"] == -7).flatten(2).all(-1) == hit.reshape(BATCH)).all()

    @pytest.mark.parametrize("index", [[0, 2], T([0, 3]), range(1, 3), MASK_ROW, MASK_FULL])
    def test_gathers_copy(self, index):
        td = make()
        td[index].zero_()
        check_rows(td, ROWS)

    @pytest.mark.parametrize("index", [S(None), ..., (), (...,), (S(None), S(None))], ids=repr)
    def test_whole(self, index):
        check_rows(make()[index], ROWS)

    def test_nested_list_is_an_array(self):
        index = [[0, 2], [1, 0], [3, 3]]
        check_rows(make()[index], ROWS[T(index)])

    @pytest.mark.parametrize("index", [True, T(True), False, T(False), (True, 0)], ids=repr)
    def test_bool_scalar_adds_a_dim(self, index):
        check_rows(make()[index], ROWS[index])

    def test_chained_equals_tuple(self):
        td = make()
        check_rows(td[1:][:, 2], ROWS[1:][:, 2])
        check_rows(td[None, 1:, ..., None][0, :, 1], ROWS[1:, 1, None])

    def test_nested_of_result_indexes_on(self):
        sub = make()[2]["n"]
        assert sub[:, 1].batch_size == (3,)
        assert (sub[0, 4]["c"] == make()["n", "c"][2, 0, 4]).all()

    def test_structure_is_new(self):
        td = make()
        sub = td[1]
        sub["extra"] = torch.zeros(3)
        sub["m", "k", "e"] = torch.zeros(3)
        del sub["a"]
        check_rows(td, ROWS)

    def test_index_of_empty_container(self):
        td = TensorDict({}, [4, 3])
        assert td[1].batch_size == (3,)
        assert td[:, None].batch_size == (4, 1, 3)
        assert td[MASK_FULL].batch_size == (3,)
        assert td[[0, 1]].is_empty()
        assert td[-4].batch_size == (3,)
        for index in (4, -5):
            with pytest.raises(IndexError, match=f"index {index} is out of bounds"):
                td[index]

    def test_empty_nested_follows(self):
        td = TensorDict({"n": TensorDict({}, [4, 3, 5])}, [4, 3])
        assert td[1]["n"].batch_size == (3, 5)
        assert td[MASK_ROW]["n"].batch_size == (2, 3, 5)

    def test_zero_sized_dim(self):
        td = TensorDict({"a": torch.zeros(0, 3, 2)}, [0, 3])
        assert td[:, 1].batch_size == (0,)
        assert td[:, 1]["a"].shape == (0, 2)
        assert td[[]]["a"].shape == (0, 3, 2)
        with pytest.raises(IndexError):
            td[0]

    def test_device_and_class_follow(self):
        td = TensorDict({"a": torch.zeros(4)}, [4], device="cpu")
        assert td[0].device == torch.device("cpu")
        assert type(td[:2]) is TensorDict
        assert make()[0].device is None

    def test_non_tensor_entry(self):
        td = TensorDict({"a": torch.zeros(4), "text": "hello"}, [4])
        assert td[2]["text"] == "hello"
        assert td[1:3]["text"] == "hello"
        assert td.get("text").batch_size == (4,)
        assert isinstance(td[1:3].get("text"), NonTensorData)
        assert td[1:3].get("text").batch_size == (2,)

    def test_list_of_str_is_indexed(self):
        td = TensorDict({"word": ["zero", "one", "two"]}, [3])
        assert td[1]["word"] == "one"
        assert td[-1]["word"] == "two"

    def test_gradient_flows(self):
        x = torch.ones(4, 3, requires_grad=True)
        TensorDict({"a": x}, [4])[1:3]["a"].sum().backward()
        assert x.grad.sum(1).tolist() == [0, 3, 3, 0]

    def test_locked_result_is_unlocked(self):
        td = make().lock_()
        sub = td[1]
        assert not sub.is_locked
        sub["new"] = torch.zeros(3)
        assert "new" not in td.keys()


class TestErrors:
    @pytest.mark.parametrize(
        "index",
        [
            4,
            -5,
            (0, 3),
            (0, 0, 0),
            (S(None),) * 3,
            T([5]),
            [0, 7],
            torch.ones(3, dtype=torch.bool),
            torch.ones(4, 3, 2, dtype=torch.bool),
            (0, 0, None, T([0])),
            1.0,
            object(),
            T([0.0, 1.0]),
        ],
        ids=lambda index: type(index).__name__,
    )
    def test_index_error_as_torch(self, index):
        with pytest.raises(IndexError):
            ROWS[index]
        with pytest.raises(IndexError):
            make()[index]

    def test_extra_leaf_dims_are_out_of_reach(self):
        td = make()
        assert td["a"][0, 0, 0] == 0  # the leaf has a third dim, the container has not
        with pytest.raises(IndexError, match="too many indices"):
            td[0, 0, 0]
        with pytest.raises(IndexError, match="too many indices"):
            td[0, 0, 0] = 1

    @pytest.mark.parametrize(
        "index", [0, S(None), S(0, 1), [0], T(0), T([True])], ids=lambda index: str(index)
    )
    def test_no_batch_dims(self, index):
        td = TensorDict({"a": torch.zeros(3)})
        with pytest.raises(RuntimeError, match="batch_dims"):
            td[index]

    def test_no_batch_dims_but_nothing_to_index(self):
        td = TensorDict({"a": torch.arange(3)})
        assert td[...].batch_size == td[()].batch_size == ()
        assert td[None].batch_size == (1,)
        assert td[None]["a"].tolist() == [[0, 1, 2]]
        assert td[torch.ones((), dtype=torch.bool)].batch_size == (1,)

    def test_missing_key_is_a_key_error(self):
        with pytest.raises(KeyError, match="zz"):
            make()["zz"]

    @pytest.mark.parametrize("index", [(0, "a"), ("a", 0)], ids=repr)
    def test_keys_and_positions_do_not_mix(self, index):
        with pytest.raises((TypeError, IndexError, KeyError, RuntimeError)):
            make()[index]

    @pytest.mark.parametrize("index", [(0, ..., 0, 0), (..., 0, 0, 0)], ids=repr)
    def test_ours_too_many_with_ellipsis(self, index):
        with pytest.raises(IndexError):
            make()[index]
        with pytest.raises(IndexError):
            make()[index] = 0

    def test_ours_two_ellipses(self):
        with pytest.raises((IndexError, RuntimeError), match="ellipsis"):
            make()[..., 0, ...]


class TestIteration:
    def test_rows(self):
        td = make()
        assert len(td) == 4
        rows = list(td)
        assert len(rows) == 4
        for i, row in enumerate(rows):
            check_rows(row, ROWS[i])

    def test_rows_are_views(self):
        td = make()
        for row in td:
            row["b"].zero_()
        assert (td["b"] == 0).all()

    def test_no_batch_dims(self):
        td = TensorDict({"a": torch.zeros(3)})
        assert len(td) == 0
        with pytest.raises(TypeError, match="0-d"):
            iter(td)

    def test_no_truth_value(self):
        for td in (make(), TensorDict()):
            with pytest.raises(RuntimeError, match="boolean value"):
                bool(td)

    def test_unhashable(self):
        with pytest.raises(TypeError, match="unhashable"):
            hash(make())

    def test_contains_only_asks_for_keys(self):
        td = make()
        assert "a" in td and ("n", "c") in td and "zz" not in td
        for value in (0, torch.tensor(0)):
            with pytest.raises((RuntimeError, TypeError), match="[Kk]ey"):
                value in td  # noqa: B015


NAMED = {
    "int": (0, ["y"]),
    "0-d tensor": (T(0), ["y"]),
    "slice, int": ((S(None), 0), ["x"]),
    "int, int": ((0, 0), []),
    "slice": (S(1, 2), ["x", "y"]),
    "ellipsis": (..., ["x", "y"]),
    "None": (None, [None, "x", "y"]),
    "slice, None": ((S(None), None), ["x", None, "y"]),
    "ellipsis, None": ((..., None), ["x", "y", None]),
    "None, int": ((None, 0), [None, "y"]),
    "list": ([0, 1], ["x", "y"]),
    "slice, list": ((S(None), [0, 1]), ["x", "y"]),
    "range": ((range(2), S(None)), ["x", "y"]),
    "numpy": (np.array([0, 1]), ["x", "y"]),
    "mask-row": (MASK_ROW, ["x", "y"]),
    "mask-full": (MASK_FULL, [None]),
    "lists": (([0, 1], [0, 1]), [None]),
    "True": (True, [None, "x", "y"]),
}


@pytest.mark.parametrize(("index", "names"), list(NAMED.values()), ids=list(NAMED))
def test_names_follow(index, names):
    sub = make(names=["x", "y"])[index]
    check_rows(sub, ROWS[index])
    assert sub.names == names
    assert sub["n"].names == [*names, None]


@table(ALL)
def test_no_names_stay_no_names(index):
    sub = make()[index]
    assert sub.names == [None] * sub.ndim


# --- assignment -----------------------------------------------------------------------------


def shifted():
    """Same structure, other values: leaf + 100 (bool leaves negated)."""
    return make().apply(lambda x: ~x if x.dtype is torch.bool else x + 100)


class TestAssign:
    def test_a_new_entry_of_a_locked_container_is_refused_before_anything_is_written(self):
        td = TensorDict({"a": torch.zeros(4)}, [4]).lock_()
        with pytest.raises(RuntimeError, match="locked"):
            td[1] = TensorDict(a=torch.tensor(5.0), b=torch.tensor(6.0))
        assert td["a"].tolist() == [0.0] * 4 and set(td.keys()) == {"a"}

    @table(ALL)
    def test_container(self, index):
        td, other = make(), shifted()
        td[index] = other[index]
        rows = ROWS.clone()
        rows[index] = ROWS[index] + 12  # 12.. are the rows of `other`
        for key, old in leaves(make()).items():
            assert (td[key] == torch.cat([old, other[key]]).flatten(0, 1)[rows]).all(), key

    @table(ALL)
    def test_scalar(self, index):
        td = make()
        td[index] = 0
        hit = torch.zeros(BATCH, dtype=torch.bool)
        hit[index] = True
        for key, value in leaves(make()).items():
            want = torch.where(hit.reshape(4, 3, *[1] * (value.ndim - 2)), 0, value)
            assert (td[key] == want).all(), key
            assert td[key].dtype == value.dtype

    @pytest.mark.parametrize(
        "index", [0, S(1, 3), (S(None), 1), [0, 2], MASK_ROW, MASK_FULL], ids=str
    )
    def test_nested_dict(self, index):
        td, source = make(), shifted()[index]
        td[index] = source.to_dict()
        wanted = make()
        wanted[index] = source
        assert (td == wanted).all()

    def test_in_place(self):
        td = make()
        a, c = td["a"], td["n", "c"]
        td[1] = shifted()[1]
        assert td["a"] is a and td["n", "c"] is c
        assert (a[1] == torch.arange(6.0, 12).reshape(3, 2) + 100).all()

    def test_scalar_tensor(self):
        td = make()
        td[0] = torch.tensor(3)
        assert (td["a"][0] == 3).all() and (td["b"][0] == 3).all() and td["a"].dtype == torch.float
        assert (td["b"][1:] == ROWS[1:]).all()

    @pytest.mark.parametrize("value", [2, 2.0, True, torch.tensor(2.0)], ids=repr)
    def test_scalar_kinds(self, value):
        td = TensorDict({"a": torch.zeros(4, 3)}, [4])
        td[1] = value
        assert td["a"].sum(1).tolist() == [0, 3 * float(value), 0, 0]

    def test_casts_to_the_entry(self):
        td = make()
        td[0] = TensorDict({"b": torch.full((3,), 2.75)}, [3])
        assert td["b"].dtype == torch.int64
        assert td["b"][0].tolist() == [2, 2, 2]

    def test_partial_source_leaves_the_rest(self):
        td = make()
        td[0] = TensorDict({"b": torch.full((3,), 50)}, [3])
        assert td["b"][0].tolist() == [50] * 3
        assert (td["a"] == make()["a"]).all()

    def test_tuple_key_in_dict(self):
        td = make()
        td[0] = {("n", "c"): torch.ones(3, 5, 2, dtype=torch.long)}
        assert (td["n", "c"][0] == 1).all() and (td["n", "c"][1:] == make()["n", "c"][1:]).all()

    @pytest.mark.parametrize(
        ("index", "shape"),
        [
            (0, (3,)),
            (S(1, 3), (2, 3)),
            ((S(None), 1), (4,)),
            (MASK_ROW, (2, 3)),
            (MASK_FULL, (3,)),
            ([3, 1], (2, 3)),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("dtype", [torch.float, torch.int32, torch.bool])
    def test_new_key_is_created_zero_filled(self, index, shape, dtype):
        td = make()
        td[index] = TensorDict({"q": torch.ones(*shape, 7, dtype=dtype)}, shape)
        want = torch.zeros(4, 3, 7, dtype=dtype)
        want[index] = 1
        assert td["q"].dtype == dtype
        assert (td["q"] == want).all()
        assert (td["b"] == ROWS).all()

    def test_new_nested_key(self):
        td = make()
        td[0] = TensorDict({"p": TensorDict({"q": torch.ones(3, 6)}, [3, 6])}, [3])
        assert td["p"].batch_size == (4, 3, 6)
        assert td["p", "q"].sum((1, 2)).tolist() == [18, 0, 0, 0]
        td[1] = {"m": {"k": {"q": torch.ones(3)}}}
        assert td["m", "k", "q"].sum(1).tolist() == [0, 3, 0, 0]
        assert (td["m", "k", "d"] == make()["m", "k", "d"]).all()

    def test_source_of_shorter_batch_is_promoted(self):
        td = make()
        td[0:2] = TensorDict({"a": torch.ones(2, 3, 2)}, [2])
        td[2] = TensorDict({"a": torch.ones(3, 2)}, [])
        assert (td["a"][:3] == 1).all() and (td["a"][3] != 1).all()

    def test_source_without_batch_dims_is_no_row(self):
        td = TensorDict({"a": torch.zeros(3)}, [3])
        with pytest.raises(RuntimeError, match="batch size"):
            td[:2] = TensorDict({"a": 1.0})
        assert td["a"].tolist() == [0.0] * 3

    def test_source_broadcasts_over_leading_dims(self):
        td = make()
        td[0:2] = TensorDict({"b": torch.tensor([7, 8, 9])}, [3])
        assert td["b"][:2].tolist() == [[7, 8, 9]] * 2

    @pytest.mark.parametrize("shape", [(2,), (4,), (1, 2)], ids=str)
    def test_wrong_batch_size(self, shape):
        td = make()
        with pytest.raises(RuntimeError, match="batch size"):
            td[0] = TensorDict({"b": torch.zeros(shape, dtype=torch.long)}, shape)
        check_rows(td, ROWS)

    @pytest.mark.parametrize("shape", [(3, 3), (2, 1, 3)], ids=str)
    def test_ours_batch_size_too_long(self, shape):
        td = make()
        with pytest.raises(RuntimeError, match="batch size"):
            td[0] = TensorDict({"b": torch.zeros(shape, dtype=torch.long)}, shape)
        check_rows(td, ROWS)

    def test_wrong_leaf_shape(self):
        td = make()
        with pytest.raises(RuntimeError):
            td[0] = TensorDict({"a": torch.zeros(3, 5)}, [3])
        check_rows(td, ROWS)

    @pytest.mark.parametrize("index", [4, -5, (0, 3), (0, 0, 0), T([9])], ids=str)
    def test_index_error(self, index):
        td = make()
        with pytest.raises(IndexError):
            td[index] = 0
        check_rows(td, ROWS)

    def test_dict_leaf_must_have_the_indexed_shape(self):
        td = make()
        with pytest.raises(RuntimeError, match="batch dimension mismatch"):
            td[0] = {"a": 1.0}
        check_rows(td, ROWS)

    @pytest.mark.parametrize("index", [S(None), ..., (), None, True], ids=repr)
    def test_whole(self, index):
        td = make()
        td[index] = 0
        assert all((value == 0).all() for value in leaves(td).values())

    def test_whole_without_batch_dims(self):
        td = TensorDict({"a": torch.zeros(3)})
        td[...] = 2.0
        assert td["a"].tolist() == [2, 2, 2]
        td[()] = 3.0
        assert td["a"].tolist() == [3, 3, 3]

    def test_locked_in_place_is_fine(self):
        td = make().lock_()
        td[1] = 0
        assert (td["b"][1] == 0).all()
        td[2] = shifted()[2]
        assert td["b"][2].tolist() == [106, 107, 108]
        assert td.is_locked

    def test_locked_new_key(self):
        td = make().lock_()
        with pytest.raises(RuntimeError, match="Cannot modify locked TensorDict"):
            td[0] = TensorDict({"q": torch.ones(3)}, [3])
        assert "q" not in td.keys()

    def test_self_overlap(self):
        td = make()
        td[0] = td[3]
        assert td["b"][0].tolist() == [9, 10, 11]

    def test_augmented(self):
        td = make().select("a", "b")
        td[1] += 1
        want = ROWS.clone()
        want[1] += 1
        assert (td["b"] == want).all()

    def test_through_a_lazy_source(self):
        td = make()
        rows = [shifted()[i] for i in (3, 1)]
        td[[0, 2]] = LazyStackedTensorDict(*rows, stack_dim=0)
        assert td["b"].tolist() == [[109, 110, 111], [3, 4, 5], [103, 104, 105], [9, 10, 11]]

    def test_ours_useless_value_is_refused(self):
        for value in ("text", object()):
            td = make()
            with pytest.raises((TypeError, ValueError, RuntimeError)):
                td[0] = value
            check_rows(td, ROWS)


class TestAt:
    def test_get_at(self):
        td = make()
        assert (td.get_at("a", 1) == td["a"][1]).all()
        assert (td.get_at("a", (1, S(None), 0)) == td["a"][1, :, 0]).all()
        assert td.get_at(("n", "c"), (3, 2, 4, 1)) == 119
        assert td.get_at("a", T([0, 2, 2])).shape == (3, 3, 2)
        assert td.get_at("n", 0).batch_size == (3, 5)

    def test_get_at_views(self):
        td = make()
        td.get_at("b", 2).zero_()
        assert td["b"][2].tolist() == [0, 0, 0]

    def test_get_at_default(self):
        td = make()
        assert td.get_at("zz", 0, None) is None
        assert td.get_at("zz", 0, default=5) == 5

    def test_get_at_out_of_range(self):
        with pytest.raises(IndexError):
            make().get_at("b", 4)
        with pytest.raises(IndexError):
            make().get_at("b", (0, 0, 0))

    @pytest.mark.parametrize(
        "index", [0, S(1, 3), (S(None), 1), MASK_ROW, MASK_FULL, [0, 2]], ids=str
    )
    def test_set_at_(self, index):
        td = make()
        b = td["b"]
        want = ROWS.clone()
        want[index] = -1
        assert td.set_at_("b", -1, index) is td
        assert td["b"] is b
        assert (b == want).all()
        assert (td["a"] == make()["a"]).all()

    def test_set_at_tensor_and_nested(self):
        td = make()
        td.set_at_("a", T([5.0, 6.0]), (0, S(None)))
        assert td["a"][0].tolist() == [[5, 6]] * 3
        td.set_at_(("n", "c"), torch.zeros(3, 5, 2, dtype=torch.long), 2)
        assert (td["n", "c"][2] == 0).all() and (td["n", "c"][3] != 0).all()

    def test_set_at_errors(self):
        td = make()
        with pytest.raises(KeyError, match="zz"):
            td.set_at_("zz", 1, 0)
        with pytest.raises(RuntimeError):
            td.set_at_("a", torch.ones(7), 0)
        with pytest.raises(IndexError):
            td.set_at_("a", 1, 9)
        check_rows(td, ROWS)

    def test_set_at_when_locked(self):
        td = make().lock_()
        td.set_at_("b", 0, 0)
        assert td["b"][0].tolist() == [0, 0, 0]


# --- masks, where, gather ---------------------------------------------------------------------


def broadcast(mask, value):
    return mask.reshape(*mask.shape, *[1] * (value.ndim - mask.ndim))


class TestMask:
    @pytest.mark.parametrize(
        "mask", [MASK_FULL, MASK_ROW, MASK_FULL & False, MASK_FULL | True], ids=str
    )
    def test_masked_fill(self, mask):
        td = make()
        out = td.masked_fill(mask, 0)
        for key, value in leaves(make()).items():
            assert (out[key] == torch.where(broadcast(mask, value), 0, value)).all()
            assert out[key].dtype == value.dtype
        check_rows(td, ROWS)
        assert out["n"].batch_size == (4, 3, 5)

    @pytest.mark.parametrize("mask", [MASK_FULL, MASK_ROW], ids=str)
    def test_masked_fill_(self, mask):
        td = make()
        b = td["b"]
        assert td.masked_fill_(mask, 0) is td
        assert td["b"] is b
        for key, value in leaves(make()).items():
            assert (td[key] == torch.where(broadcast(mask, value), 0, value)).all()

    @pytest.mark.parametrize("shape", [(3,), (7,), (4, 3, 2)], ids=str)
    def test_masked_fill_wrong_shape(self, shape):
        with pytest.raises(RuntimeError):
            make().masked_fill(torch.ones(shape, dtype=torch.bool), 0)

    @pytest.mark.parametrize("mask", [MASK_FULL, MASK_ROW, MASK_FULL & False], ids=str)
    def test_masked_select_is_mask_indexing(self, mask):
        check_rows(make().masked_select(mask), ROWS[mask])
        check_rows(torch.masked_select(make(), mask), ROWS[mask])

    def test_masked_select_copies(self):
        td = make()
        td.masked_select(MASK_FULL).zero_()
        check_rows(td, ROWS)


class TestWhere:
    def test_two_containers(self):
        td, other = make(), shifted()
        for out in (td.where(MASK_FULL, other), torch.where(MASK_FULL, td, other)):
            for key, value in leaves(td).items():
                assert (
                    out[key] == torch.where(broadcast(MASK_FULL, value), value, other[key])
                ).all()
            assert out["n"].batch_size == (4, 3, 5)
            assert is_tensor_collection(out)
        check_rows(td, ROWS)

    @pytest.mark.parametrize("fill", [0, torch.tensor(0)], ids=repr)
    def test_scalar_other(self, fill):
        td = make()
        for out in (td.where(MASK_FULL, fill), torch.where(MASK_FULL, td, fill)):
            for key, value in leaves(td).items():
                assert (out[key] == torch.where(broadcast(MASK_FULL, value), value, 0)).all()

    def test_scalar_first(self):
        td = make().select("b")
        assert (torch.where(MASK_FULL, 0, td)["b"] == torch.where(MASK_FULL, 0, ROWS)).all()

    def test_row_mask_is_read_from_the_left(self):
        out = make().where(MASK_ROW, shifted())
        assert out["b"].tolist() == [[0, 1, 2], [103, 104, 105], [6, 7, 8], [109, 110, 111]]

    def test_missing_key(self):
        with pytest.raises(KeyError, match="pad"):
            make().where(MASK_FULL, shifted().select("a"))

    def test_missing_key_padded(self):
        out = make().where(MASK_FULL, shifted().select("a"), pad=0)
        assert (out["b"] == torch.where(MASK_FULL, ROWS, 0)).all()
        assert (out["a"][0, 1] == torch.tensor([102.0, 103.0])).all()
        back = make().select("a").where(MASK_FULL, shifted(), pad=0)
        assert (back["b"] == torch.where(MASK_FULL, 0, ROWS + 100)).all()

    def test_out(self):
        td = make()
        out = td.clone()
        assert td.where(MASK_FULL, shifted(), out=out) is out
        assert (out["b"] == torch.where(MASK_FULL, ROWS, ROWS + 100)).all()
        check_rows(td, ROWS)

    def test_names(self):
        assert make(names=["x", "y"]).where(MASK_FULL, shifted()).names == ["x", "y"]


GATHER_CASES = [
    (0, [[0, 1, 2], [3, 2, 1]]),
    (-2, [[3, 3, 3]]),
    (1, [[0], [1], [2], [0]]),
    (-1, [[0, 2], [1, 1], [2, 0], [0, 1]]),
    (1, [[0], [1]]),
]


class TestGather:
    @pytest.mark.parametrize(("dim", "index"), GATHER_CASES, ids=str)
    def test_as_torch(self, dim, index):
        index = T(index)
        rows = ROWS.gather(dim, index)
        check_rows(make().gather(dim, index), rows)
        check_rows(torch.gather(make(), dim, index), rows)
        check_rows(torch.gather(input=make(), dim=dim, index=index), rows)
        check_rows(make().gather(index=index, dim=dim), rows)

    def test_out(self):
        out = make()[:1].clone()
        index = T([[2, 1, 0]])
        assert make().gather(0, index, out=out) is out
        check_rows(out, ROWS.gather(0, index))

    @pytest.mark.parametrize("dim", [2, -3])
    def test_dim_out_of_range(self, dim):
        with pytest.raises((RuntimeError, IndexError), match="[Cc]annot gather|out of range"):
            make().gather(dim, T([[0]]))

    def test_index_out_of_range(self):
        with pytest.raises((RuntimeError, IndexError)):
            make().gather(0, T([[5, 0, 0]]))

    def test_names(self):
        assert make(names=["x", "y"]).gather(0, T([[0, 1, 2]])).names == ["x", "y"]
