"""TensorDictMap: every operation, and every mistake.

Tests with `ours` in their name ask for more than TorchRL's gives; it passes the others.
"""

import copy
import itertools
import pickle
import random
import re
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from raffia import NonTensorData, TensorClass, TensorDict, lazy_stack
from raffia.data import (
    CapacityError,
    QueryModule,
    SipHash,
    TensorDictMap,
    TensorStorage,
    UnknownRowError,
)
from raffia.nn import TensorDictModule, TensorDictSequential


def make(in_keys=("k",), size=20, hash_module=None, **options):
    return TensorDictMap(
        query_module=QueryModule(list(in_keys), hash_module=hash_module),
        storage=TensorStorage(size),
        **options,
    )


def k(*numbers):
    """Keys: one row for each number."""
    return TensorDict({"k": torch.tensor(numbers, dtype=torch.float32)[:, None]}, [len(numbers)])


def v(*numbers, dtype=torch.float32):
    """Values: one row for each number."""
    return TensorDict({"v": torch.tensor(numbers, dtype=dtype)[:, None]}, [len(numbers)])


def filled(*numbers, **options):
    """A map from each number to ten times as much."""
    m = make(**options)
    m[k(*numbers)] = v(*[10 * number for number in numbers])
    return m


def read(m, *numbers):
    return m[k(*numbers)]["v"].flatten().tolist()


def content(m):
    """The map as a dict from the number of the key to that of the value."""
    keys, values = m.items()
    if not len(m):
        return {}
    return dict(zip(keys["k"].flatten().tolist(), values["v"].flatten().tolist(), strict=True))


def plain(td):
    """Everything in a container: which objects, and what they hold."""
    return td.batch_size, {
        key: (id(td.get(key)), td.get(key).tolist() if hasattr(td.get(key), "tolist") else None)
        for key in td.keys(True, True)
    }


class fails:
    """The block raises `error` with `words` in its message; the map and `tds` stay as they are."""

    def __init__(self, error, words, m, *tds):
        self.error, self.words, self.m, self.tds = error, words, m, tds

    def state(self):
        keys, values = self.m.items()
        leaves = [td.get(key).tolist() for td in (keys, values) for key in td.keys(True, True)]
        places = self.m.rows(keys).tolist() if len(self.m) else None
        return len(self.m), leaves, places, [plain(td) for td in self.tds]

    def __enter__(self):
        self.before = self.state()

    def __exit__(self, kind, error, traceback):
        assert kind is not None, f"nothing was raised instead of {self.error}"
        if not issubclass(kind, self.error):
            return False
        assert re.search(self.words, str(error)), f"{self.words!r} is not in: {error}"
        assert self.state() == self.before
        return True


def zeros(x):
    """A hash module for which all rows are the same."""
    return torch.zeros(len(x), dtype=torch.int64)


# -------------------------------------------------------------------------------- reading, writing


class TestSetAndGet:
    def test_what_is_written_is_read(self):
        m = filled(1, 2, 3)
        assert read(m, 3, 1, 2, 1) == [30, 10, 20, 10]
        assert len(m) == 3

    def test_published_example_ours(self):
        # the peer's own raises NotImplementedError
        m = TensorDictMap(
            query_module=QueryModule(in_keys=["key1", "key2"], index_key="index"),
            storage={"out": TensorStorage(1000)},
        )
        index = TensorDict(
            {
                "key1": torch.Tensor([[-1], [1], [3], [-3]]),
                "key2": torch.Tensor([[0], [2], [4], [-4]]),
            },
            batch_size=(4,),
        )
        value = TensorDict({"out": torch.Tensor([[10], [20], [30], [40]])}, batch_size=(4,))
        m[index] = value
        assert m[index]["out"].tolist() == [[10], [20], [30], [40]]
        assert torch.sum(m.contains(index)).item() == 4
        new_index = index.clone(True)
        new_index["key3"] = torch.Tensor([[4], [5], [6], [7]])
        assert (m[new_index]["out"] == value["out"]).all()

    def test_gives_the_stored_entries(self):
        m = make()
        m[k(1, 2)] = v(1, 2).set("w", torch.tensor([3, 4]))
        td = m[k(2, 1, 2)]
        assert set(td.keys()) == {"v", "w"} and td.batch_size == (3,)
        assert td["w"].tolist() == [4, 3, 4] and td["w"].dtype == torch.int64

    def test_the_last_value_of_a_key_stays(self):
        m = filled(1, 2)
        m[k(2)] = v(7)
        assert read(m, 1, 2) == [10, 7]

    def test_writing_over_a_key_adds_no_row_ours(self):
        m = filled(1, 2)
        m[k(2, 1)] = v(7, 8)
        assert len(m) == 2 and content(m) == {1: 8, 2: 7}

    def test_within_a_batch_the_last_wins(self):
        m = make()
        m[k(1, 2, 1, 1, 3)] = v(1, 2, 3, 4, 5)
        assert read(m, 1, 2, 3) == [4, 2, 5]

    def test_within_a_batch_the_last_wins_over_what_was_there_ours(self):
        m = filled(1, 2)
        m[k(2, 5, 2)] = v(1, 2, 3)
        assert content(m) == {1: 10, 2: 3, 5: 2}

    def test_entries_that_are_no_keys_do_not_matter(self):
        m = make()
        m[k(1, 2).set("noise", torch.randn(2))] = v(1, 2)
        assert read(m, 1) == [1] and bool(m.contains(k(2).set("z", torch.ones(1))))

    def test_is_a_copy_of_what_was_given_and_gives_copies(self):
        m, query, value = make(), k(1, 2), v(1, 2)
        m[query] = value
        value["v"].fill_(-1)
        query["k"].fill_(-1)
        m[k(1, 2)]["v"].fill_(-2)
        assert read(m, 1, 2) == [1, 2]

    def test_keys_and_values_are_copies_ours(self):
        m = filled(1, 2)
        m.keys()["k"].fill_(-1)
        m.values()["v"].fill_(-1)
        m.get(k(1), 0)["v"].fill_(-1)
        next(iter(m))["k"].fill_(-1)
        assert content(m) == {1: 10, 2: 20}

    def test_the_query_is_never_changed_ours(self):
        m = make()
        query = k(1, 2, 2)
        before = plain(query)
        m[query] = v(1, 2, 3)
        m.update(query, v(1, 2, 3), merge="sum", accumulate=True)
        for ask in (m.__getitem__, m.contains, m.rows, m.__contains__, m.pop):
            ask(query)
            assert plain(query) == before
        m.get(query, 0.0)
        assert plain(query) == before

    def test_the_value_is_never_changed_ours(self):
        def count(new, old=None):
            number = torch.ones(len(new)) if old is None else old["count"] + 1
            return new.set("count", number)

        m, value = make(write_fn=count), v(1, 2, 3)
        before = plain(value)
        m[k(1, 2, 2)] = value
        assert plain(value) == before

    def test_a_locked_query_and_value_ours(self):
        m = make()
        m[k(1, 2).lock_()] = v(1, 2).lock_()
        assert m[k(2).lock_()]["v"].tolist() == [[2]]

    def test_values_need_no_gradient_ours(self):
        m, x = make(), torch.ones(2, 1, requires_grad=True)
        m[k(1, 2)] = TensorDict({"v": x * 2}, [2])
        assert not m[k(1)]["v"].requires_grad and read(m, 1) == [2]

    def test_several_and_nested_in_keys(self):
        m = make(["a", ("n", "b")])
        a, b = torch.tensor([1, 1, 2]), torch.tensor([[0.5], [1.5], [0.5]])
        query = TensorDict({"a": a, "n": {"b": b, "c": b + 1}}, [3])
        m[query] = v(1, 2, 3)
        assert m[query[[2, 0, 1]]]["v"].flatten().tolist() == [3, 1, 2]
        swapped = TensorDict({"a": torch.tensor([2]), "n": {"b": torch.tensor([[1.5]])}}, [1])
        assert m.contains(swapped).tolist() == [False]

    def test_nested_values(self):
        m = make()
        value = v(1, 2).set(("n", "x"), torch.arange(6).view(2, 3))
        m[k(1, 2)] = value
        td = m[k(2, 1)]
        assert set(td.keys(True, True)) == {"v", ("n", "x")}
        assert td["n", "x"].tolist() == [[3, 4, 5], [0, 1, 2]]

    @pytest.mark.parametrize(
        "dtype",
        [
            *(torch.bool, torch.uint8, torch.int16, torch.int64, torch.uint64, torch.uint32),
            *(torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn),
        ],
        ids=str,
    )
    def test_dtypes_of_keys_and_values_ours(self, dtype):
        m, x = make(["x"]), torch.tensor([1, 0], dtype=torch.int64).to(dtype)
        td = TensorDict({"x": x}, [2])
        m[td] = td
        back = m[td[[1, 0]]]["x"]
        assert back.dtype == dtype and m.keys()["x"].dtype == dtype
        assert torch.equal(back.view(torch.uint8), x[[1, 0]].view(torch.uint8))

    def test_keys_may_be_values_too(self):
        # as in a map from observations to the next ones
        m = make()
        m[k(1, 2)] = k(5, 6)
        assert m[k(2, 1)]["k"].tolist() == [[6], [5]]

    def test_a_tensorclass_as_query_and_as_value_ours(self):
        m = make(["x", "y"])
        position = Position(x=torch.tensor([1, 2]), y=torch.tensor([3, 3]), batch_size=[2])
        m[position] = Score(score=torch.tensor([0.5, 0.25]), n=torch.tensor([4, 8]), batch_size=[2])
        found = m[position[[1]]]
        assert type(found) is Score and found.score.tolist() == [0.25] and found.n.tolist() == [8]

    def test_merging_values_of_a_tensorclass_ours(self):
        m, one = make(), Score(score=torch.ones(3), n=torch.ones(3), batch_size=[3])
        for _ in range(2):
            m.update(k(1, 2, 1), one, merge="sum", accumulate=True)
        found = m.get(k(1, 2, 9), 0)
        assert type(found) is Score and found.n.tolist() == [4, 2, 0]

    def test_lazy_stacks(self):
        m = make()
        m[lazy_stack(list(k(1, 2).unbind(0)))] = lazy_stack(list(v(5, 6).unbind(0)))
        assert read(m, 2, 1) == [6, 5]

    def test_zeros_nans_dtype_and_shape_of_keys_ours(self):
        m = make()
        m[k(0.0, float("nan"))] = v(1, 2)
        assert m.rows(k(-0.0, -float("nan"))).tolist() == [0, 1]
        one = torch.ones(1, 1)
        for other in (one.int(), one.double(), one[:, None], one[0], torch.ones(1, 2)):
            assert m.contains(TensorDict({"k": other}, [1])).tolist() == [False]

    def test_keys_are_compared_bit_by_bit_if_the_hash_module_says_so_ours(self):
        m = make(hash_module=SipHash(normalize=False))
        m[k(0.0)] = v(1)
        assert m.contains(k(0.0, -0.0)).tolist() == [True, False]

    def test_empty_batches_ours(self):
        m = make()
        m[k()] = v()
        assert len(m) == 0 and m.contains(k()).shape == (0,)
        m = filled(1)
        m[k()] = v()
        m.update(k(), v(), merge="sum", accumulate=True)
        m.delete(k())
        assert m[k()]["v"].shape == (0, 1) and m.get(k(), 0)["v"].shape == (0, 1)
        assert m.pop(k())["v"].shape == (0, 1) and content(m) == {1: 10}

    @pytest.mark.slow
    def test_rows_without_bytes_are_one_key_ours(self):
        m = make(["e"])
        m[TensorDict({"e": torch.zeros(3, 0)}, [3])] = v(1, 2, 3)
        assert len(m) == 1 and m[TensorDict({"e": torch.zeros(0)}, [])]["v"].tolist() == [3]


class Position(TensorClass):
    x: torch.Tensor
    y: torch.Tensor


class Score(TensorClass):
    score: torch.Tensor
    n: torch.Tensor


class TestBatch:
    def test_a_single_row(self):
        m = make()
        m[k(1)[0]] = v(5)[0]
        assert len(m) == 1 and read(m, 1) == [5]
        assert m[k(1)[0]].batch_size == () and m[k(1)[0]]["v"].tolist() == [5]
        assert m.contains(k(1)[0]).item() is True and m.contains(k(2)[0]).item() is False

    @pytest.mark.parametrize("shape", [(2, 3), (6, 1), (1, 2, 3)], ids=str)
    def test_any_shape_ours(self, shape):
        m, query, value = make(), k(1, 2, 3, 4, 5, 6).reshape(shape), v(*range(6)).reshape(shape)
        m[query] = value
        td = m[query]
        assert td.batch_size == shape and torch.equal(td["v"], value["v"])
        assert m.rows(query).tolist() == torch.arange(6).view(shape).tolist()
        assert m.contains(query).shape == shape and bool(m.contains(query).all())
        assert m.get(query, 0)["v"].shape == (*shape, 1)
        assert read(m, 6, 1) == [5, 0]
        assert m(query)["v"].shape == (*shape, 1)
        gone = query[:1].numel()
        m.delete(query[:1])
        assert content(m) == {i + 1: i for i in range(gone, 6)}

    def test_batch_dims_of_values_beyond_the_query_are_row_dims_ours(self):
        m = make()
        m[k(1, 2)] = TensorDict({"v": torch.arange(6.0).view(2, 3)}, [2, 3])
        assert m[k(2)]["v"].tolist() == [[3, 4, 5]]

    def test_accumulating_these_ours(self):
        m, ones = make(), TensorDict({"v": torch.ones(3, 2)}, [3, 2])
        for _ in range(2):
            m.update(k(1, 2, 1), ones, merge="sum", accumulate=True)
        assert m[k(1, 2)]["v"].tolist() == [[4, 4], [2, 2]]

    def test_a_query_without_memory_of_its_own_ours(self):
        m = make()
        m[k(1).expand(3)] = v(1, 2, 3)
        assert m[k(1).expand(2)]["v"].tolist() == [[3], [3]] and len(m) == 1


class TestUnknown:
    @pytest.mark.parametrize("number", [1, 3])
    def test_is_a_key_error_ours(self, number):
        m = filled(1, 2)
        query = k(1, *range(8, 8 + number))
        for ask in (m.__getitem__, m.__delitem__, m.delete, m.pop, m):
            with fails(UnknownRowError, f"{number} of {number + 1} rows", m, query):
                ask(query)
        assert issubclass(UnknownRowError, KeyError)

    def test_the_message_says_which_and_what_works_ours(self):
        with pytest.raises(UnknownRowError, match=r"\[1, 3\].*get\(query, default\)"):
            filled(1, 2)[k(1, 8, 2, 9)]

    def test_of_another_dtype_the_message_says_so_ours(self):
        query = TensorDict({"k": torch.ones(1, 1, dtype=torch.float64)}, [1])
        with pytest.raises(UnknownRowError, match="float32.*float64"):
            filled(1)[query]

    def test_in_an_empty_map_ours(self):
        m = make()
        assert m.contains(k(1, 2)).tolist() == [False, False]
        assert m.rows(k(1, 2)).tolist() == [-1, -1] and k(1) not in m
        for ask in (m.__getitem__, m.delete, m.pop):
            with fails(UnknownRowError, "1 of 1", m):
                ask(k(1))

    def test_is_asked_and_still_unknown_ours(self):
        m = filled(1)
        for _ in range(2):
            assert m.contains(k(7)).tolist() == [False] and m.get(k(7), 0)["v"].item() == 0
        assert len(m) == 1 and m.rows(k(7, 1)).tolist() == [-1, 0]


class TestContains:
    def test_each_row(self):
        m = filled(1, 2, 3)
        found = m.contains(k(1, 7, 3))
        assert found.tolist() == [True, False, True] and found.dtype == torch.bool

    def test_in_asks_for_all_rows_ours(self):
        m = filled(1, 2, 3)
        assert k(1) in m and k(9) not in m and k(1)[0] in m
        assert (k(1, 3) in m) is True and (k(1, 9) in m) is False
        assert k(1, 2, 3, 1).reshape(2, 2) in m

    def test_no_row_is_in_any_map_ours(self):
        assert k() in make() and k() in filled(1)


class TestGet:
    def test_a_number_fills_unknown_rows_ours(self):
        m = make()
        m[k(1, 2)] = v(1, 2).set(("n", "x"), torch.tensor([[True, False], [False, True]]))
        td = m.get(k(2, 9, 1), 0)
        assert td["v"].tolist() == [[2], [0], [1]] and td["v"].dtype == torch.float32
        assert td["n", "x"].tolist() == [[False, True], [False, False], [True, False]]
        assert m.get(k(9), 1)["v"].tolist() == [[1.0]]
        floats = filled(1)
        assert floats.get(k(9), 0.5)["v"].tolist() == [[0.5]]
        assert floats.get(k(9), float("nan"))["v"].isnan().all()

    def test_all_known_or_none_ours(self):
        m = filled(1, 2)
        assert m.get(k(2, 1), -1)["v"].tolist() == [[20], [10]]
        assert m.get(k(8, 9), -1)["v"].tolist() == [[-1], [-1]]

    def test_a_container_of_one_row_ours(self):
        m = filled(1, 2)
        assert m.get(k(1, 9, 8), v(5)[0])["v"].tolist() == [[10], [5], [5]]

    def test_a_container_of_the_batch_ours(self):
        m = filled(1, 2)
        default = v(5, 6, 7)
        before = plain(default)
        assert m.get(k(1, 9, 8), default)["v"].tolist() == [[10], [6], [7]]
        assert plain(default) == before

    def test_other_batches_ours(self):
        m = filled(1, 2)
        td = m.get(k(1, 9, 2, 8).reshape(2, 2), v(1, 2, 3, 4).reshape(2, 2))
        assert td["v"].tolist() == [[[10], [2]], [[20], [4]]]
        assert m.get(k(9)[0], v(7)[0])["v"].tolist() == [7]
        assert m.get(k(9)[0], 7)["v"].tolist() == [7]

    def test_in_an_empty_map_the_container_says_which_entries_ours(self):
        m = make()
        assert m.get(k(1, 2), v(5)[0])["v"].tolist() == [[5], [5]]
        with fails(UnknownRowError, "does not know its entries.*from_tensordict_pair", m):
            m.get(k(1, 2), 0.0)

    def test_in_an_empty_map_made_from_a_pair_ours(self):
        m = TensorDictMap.from_tensordict_pair(k(0), v(0), ["k"])
        assert m.get(k(1, 2), 3)["v"].tolist() == [[3], [3]]

    def test_after_all_is_deleted_a_number_still_works_ours(self):
        m = filled(1)
        m.delete(k(1))
        assert m.get(k(1), 3)["v"].tolist() == [[3]]

    @pytest.mark.parametrize(
        "default",
        [v(1, 2), TensorDict({"w": torch.zeros(1)}, []), v(1, 2, 3).set("v", torch.zeros(3, 2))],
        ids=["batch", "key", "shape"],
    )
    def test_a_container_that_does_not_fit_ours(self, default):
        m, query = filled(1, 2), k(1, 9, 8)
        with fails((ValueError, KeyError, RuntimeError), "v|batch", m, query, default):
            m.get(query, default)

    @pytest.mark.parametrize("default", [None, "x", [1, 2]], ids=repr)
    def test_something_else_as_default_ours(self, default):
        m = filled(1)
        with fails(TypeError, "default.*number.*container", m):
            m.get(k(9), default)

    def test_does_not_write_ours(self):
        m = filled(1)
        m.get(k(1, 9), 0)
        assert content(m) == {1: 10} and k(9) not in m


class TestRows:
    def test_dense_in_order_of_first_appearance_ours(self):
        m = make()
        m[k(5, 3, 5, 4)] = v(1, 2, 3, 4)
        m[k(9, 3)] = v(5, 6)
        assert m.rows(k(5, 3, 4, 9, 7)).tolist() == [0, 1, 2, 3, -1]
        assert m.rows(k(5)).dtype == torch.int64

    def test_freed_rows_are_used_again_ours(self):
        m = filled(1, 2, 3, 4)
        m.delete(k(2, 3))
        m[k(8, 9)] = v(8, 9)
        assert sorted(m.rows(k(1, 4, 8, 9)).tolist()) == [0, 1, 2, 3]
        assert content(m) == {1: 10, 4: 40, 8: 8, 9: 9}


# ------------------------------------------------------------------------------------------ merging


def by_hand(merge, numbers, values, stored=None):
    """{number: merged row} in plain numpy."""
    groups = {number: [row] for number, row in (stored or {}).items()}
    for number, row in zip(numbers, values, strict=True):
        groups.setdefault(number, []).append(row)
    reduce = {
        "last": lambda x: x[-1],
        "first": lambda x: x[0],
        "sum": lambda x: x.sum(0, dtype=x.dtype),
        "mean": lambda x: x.mean(0),
        "max": lambda x: x.max(0),
    }[merge]
    return {number: reduce(np.stack(rows)) for number, rows in groups.items()}


MERGES = ["last", "first", "sum", "mean", "max"]


class TestUpdate:
    @pytest.mark.parametrize("accumulate", [False, True])
    @pytest.mark.parametrize(
        "merge, dtype",
        [
            *itertools.product(MERGES, [np.float32, np.float64]),
            *itertools.product(["last", "first", "sum", "max"], [np.int32, np.int64]),
        ],
    )
    @pytest.mark.parametrize("shape", [(), (3,), (2, 3)], ids=str)
    def test_equals_numpy_ours(self, merge, dtype, shape, accumulate):
        rng = np.random.default_rng(0)
        numbers = rng.integers(0, 6, size=14).tolist()
        values = rng.integers(-9, 9, size=(14, *shape)).astype(dtype)
        old = {number: rng.integers(-9, 9, size=shape).astype(dtype) for number in (0, 2, 4, 7)}
        m = make()
        m[k(*old)] = TensorDict({"v": torch.tensor(np.stack(list(old.values())))}, [4])
        expected = by_hand(merge, numbers, values, old if accumulate else None)
        m.update(
            k(*numbers),
            TensorDict({"v": torch.tensor(values)}, [14]),
            merge=merge,
            accumulate=accumulate,
        )
        for number, row in (old | expected).items():
            found = m[k(number)[0]]["v"].numpy()
            assert found.dtype == dtype
            np.testing.assert_allclose(found, row, rtol=1e-6)
        assert len(m) == len(old | expected)

    @pytest.mark.parametrize("merge", MERGES)
    def test_each_leaf_by_itself_ours(self, merge):
        m = make()
        value = TensorDict({"v": torch.tensor([1.0, 5.0, 3.0]), "n": {"w": torch.zeros(3, 2)}}, [3])
        value["n", "w"][1] = torch.tensor([-4.0, 4.0])
        m.update(k(1, 2, 1), value, merge=merge)
        v1 = {"last": 3, "first": 1, "sum": 4, "mean": 2, "max": 3}[merge]
        assert m[k(1, 2)]["v"].tolist() == [v1, 5]
        assert m[k(1, 2)]["n", "w"].tolist() == [[0, 0], [-4, 4]]

    def test_the_last_wins_by_default_ours(self):
        m = filled(1, 2)
        m.update(k(2, 3, 2), v(5, 6, 7))
        assert content(m) == {1: 10, 2: 7, 3: 6}

    def test_first_with_accumulate_keeps_what_is_there_ours(self):
        m = filled(1)
        m.update(k(1, 2, 2), v(5, 6, 7), merge="first", accumulate=True)
        assert content(m) == {1: 10, 2: 6}

    def test_counts_ours(self):
        m, numbers = make(), [3, 1, 3, 3, 2, 1]
        for _ in range(3):
            m.update(k(*numbers), v(*[1] * 6, dtype=torch.int64), merge="sum", accumulate=True)
        assert content(m) == {3: 9, 1: 6, 2: 3}

    def test_max_of_bools_is_any_ours(self):
        m = make()
        value = TensorDict({"v": torch.tensor([[False], [True], [False]])}, [3])
        m.update(k(1, 1, 2), value, merge="max")
        assert m[k(1, 2)]["v"].tolist() == [[True], [False]]

    @pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool], ids=str)
    def test_the_mean_of_integers_is_refused_ours(self, dtype):
        m = make()
        with fails(ValueError, "mean.*floating", m):
            m.update(k(1, 1), v(0, 1, dtype=dtype), merge="mean")

    def test_the_sum_of_bools_is_refused_ours(self):
        m = make()
        with fails(ValueError, "sum.*bool", m):
            m.update(k(1, 1), v(0, 1, dtype=torch.bool), merge="sum")

    @pytest.mark.parametrize("merge, dtype", [("mean", torch.int64), ("sum", torch.bool)])
    def test_what_is_refused_does_not_hang_on_repetitions_ours(self, merge, dtype):
        m = make()
        with fails(ValueError, merge, m):
            m.update(k(1, 2), v(0, 1, dtype=dtype), merge=merge)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("merge", ["sum", "mean"])
    def test_many_rows_of_low_precision_ours(self, dtype, merge):
        # adding ones one by one in bfloat16 stops at 256
        m, count = make(), 1000
        m.update(k(*[1] * count), v(*[1] * count, dtype=dtype), merge=merge)
        assert read(m, 1) == [1000 if merge == "sum" else 1]

    def test_nans_and_infinities_go_where_numpy_puts_them_ours(self):
        nan, inf = float("nan"), float("inf")
        m = make()
        m.update(k(1, 1, 2, 2, 3, 3), v(1, nan, -inf, 2, inf, 0), merge="max")
        assert read(m, 2, 3) == [2, inf] and m[k(1)]["v"].isnan().all()
        m.update(k(1, 1, 2, 2), v(1, nan, inf, 1), merge="sum")
        assert read(m, 2) == [inf] and m[k(1)]["v"].isnan().all()

    @pytest.mark.parametrize("merge", ["Sum", "min", "", 3], ids=repr)
    def test_another_name_is_refused_ours(self, merge):
        m = filled(1)
        with fails(ValueError, "'last', 'first', 'sum', 'mean', 'max'", m):
            m.update(k(1, 2), v(1, 2), merge=merge)

    def test_accumulate_needs_a_merge_ours(self):
        m = filled(1)
        with fails(ValueError, "accumulate.*merge", m):
            m.update(k(1), v(1), accumulate=True)

    def test_the_same_twice_is_bit_for_bit_the_same_ours(self):
        torch.manual_seed(0)
        numbers, values = torch.randint(0, 9, (500,)).tolist(), torch.randn(500).tolist()
        maps = [make(), make()]
        for m in maps:
            m.update(k(*numbers), v(*values), merge="sum")
        assert content(maps[0]) == content(maps[1])


class TestMergeFunction:
    def test_gets_the_values_and_the_group_of_each_ours(self):
        seen = []

        def median(values, group, num_groups):
            seen.append((values["v"].flatten().tolist(), group.tolist(), num_groups))
            rows = [values["v"][group == i].median(0).values for i in range(num_groups)]
            return TensorDict({"v": torch.stack(rows)}, [num_groups])

        m = filled(1, 2)
        m.update(k(5, 2, 5, 5), v(3, 8, 1, 2), merge=median)
        assert seen == [([3, 8, 1, 2], [0, 1, 0, 0], 2)]  # called once; 0 is 5, which came first
        assert content(m) == {1: 10, 2: 8, 5: 2}

    def test_with_accumulate_the_stored_value_is_the_first_ours(self):
        def joined(values, group, num_groups):
            """The values of each group as the digits of a number."""
            numbers = torch.zeros(num_groups, 1)
            for value, i in zip(values["v"], group.tolist(), strict=True):
                numbers[i] = numbers[i] * 100 + value
            return TensorDict({"v": numbers}, [num_groups])

        m = filled(1, 2, 3)
        m.update(k(5, 2, 5, 1, 2), v(3, 8, 1, 4, 9), merge=joined, accumulate=True)
        assert content(m) == {1: 1004, 2: 200809, 3: 30, 5: 301}

    @pytest.mark.parametrize(
        "merge",
        [
            lambda values, group, num_groups: values,
            lambda values, group, num_groups: values[:0],
            lambda values, group, num_groups: values["v"][:num_groups],
            lambda values, group, num_groups: None,
            lambda values, group, num_groups: values[:num_groups].exclude("v"),
            lambda values, group, num_groups: values[:num_groups].apply(lambda x: x[:, 0]),
            lambda values, group, num_groups: values[:num_groups].apply(lambda x: x.double()),
        ],
        ids=["all rows", "no row", "tensor", "None", "no entry", "shape", "dtype"],
    )
    def test_a_result_that_does_not_fit_ours(self, merge):
        m, query, value = filled(1), k(1, 2, 1), v(1, 2, 3)
        with fails((ValueError, KeyError, TypeError), "", m, query, value):
            m.update(query, value, merge=merge)

    @pytest.mark.parametrize("numbers", [(), (1,)], ids=["empty map", "filled map"])
    def test_its_error_changes_nothing_ours(self, numbers):
        def fail(values, group, num_groups):
            raise RuntimeError("no merge today")

        m, query, value = make(), k(1, 2, 1), v(1, 2, 3)
        if numbers:
            m = filled(*numbers)
        with fails(RuntimeError, "no merge today", m, query, value):
            m.update(query, value, merge=fail)
        m[k(7)] = v(7)
        assert read(m, 7) == [7]

    @pytest.mark.parametrize("accumulate", [False, True])
    def test_entries_that_it_sets_are_not_set_in_the_value_ours(self, accumulate):
        def first(values, group, num_groups):
            values.set("w", values["v"] + 1)
            return values[:num_groups]

        m, query, value = make(), k(1, 2), v(5, 6)
        before = plain(value)
        m.update(query, value, merge=first, accumulate=accumulate)
        assert plain(value) == before and m[k(1)]["w"].tolist() == [[6]]


# ---------------------------------------------------------------------------------------- write_fn


def total(new, old=None):
    """A write_fn: sums the values, and counts how many there were."""
    new = new.clone()
    new["n"] = torch.ones(len(new), dtype=torch.int64)
    if old is not None:
        new["v"] += old["v"]
        new["n"] += old["n"]
    return new


class TestWriteFn:
    def test_new_rows_alone_and_others_with_the_old(self):
        seen = []

        def spy(new, old=None):
            if len(new):  # the peer also calls it with no row
                old_v = None if old is None else old["v"].flatten().tolist()
                seen.append((new["v"].flatten().tolist(), old_v))
            return new if old is None else new.apply(lambda x: x + old["v"])

        m = make(write_fn=spy)
        m[k(1, 2)] = v(1, 2)
        m[k(2, 3)] = v(10, 20)
        assert read(m, 1, 2, 3) == [1, 12, 20]
        assert seen[0] == ([1, 2], None)
        assert sorted(seen[1:], key=str) == [([10], [2]), ([20], None)]

    def test_is_not_called_for_no_rows_ours(self):
        sizes = []

        def spy(new, old=None):
            sizes.append(len(new))
            return new

        m = make(write_fn=spy)
        m[k(1, 2)] = v(1, 2)
        m[k(1, 2)] = v(1, 2)
        m[k()] = v()
        assert sizes == [2, 2]

    def test_can_add_entries(self):
        m = make(write_fn=total)
        m[k(1, 2)] = v(1, 2)
        m[k(2)] = v(5)
        assert read(m, 1, 2) == [1, 7] and m[k(1, 2)]["n"].tolist() == [1, 2]

    def test_the_old_holds_what_is_stored(self):
        seen = []

        def spy(new, old=None):
            if old is not None:
                seen.append(sorted(old.keys()))
            return new

        m = make(write_fn=spy)
        m[k(1)] = v(1)
        m[k(1)] = v(1)
        assert seen == [["v"]]

    def test_a_single_row(self):
        m = make(write_fn=total)
        m[k(1)[0]] = v(1)[0]
        m[k(1)[0]] = v(5)[0]
        assert m[k(1)[0]]["v"].tolist() == [6] and m[k(1)[0]]["n"].tolist() == 2

    def test_repeated_keys_go_through_it_in_rounds_ours(self):
        seen = []

        def spy(new, old=None):
            old_v = None if old is None else old["v"].flatten().tolist()
            seen.append((new["v"].flatten().tolist(), old_v))
            return total(new, old)

        m = make(write_fn=spy)
        m[k(1)] = v(100)
        seen.clear()
        m[k(2, 1, 2, 3, 2, 1)] = v(1, 2, 3, 4, 5, 6)
        assert content(m) == {1: 108, 2: 9, 3: 4}
        assert m[k(1, 2, 3)]["n"].tolist() == [3, 3, 1]
        # first those that come first: 2 and 3 are new; then the second ones, then the third
        assert sorted(seen[:2], key=str) == [([1, 4], None), ([2], [100])]
        assert len(seen) == 4 and sorted(zip(*seen[2], strict=True)) == [(3, 1), (6, 102)]
        assert seen[3] == ([5], [4])

    def test_rounds_equal_one_by_one_ours(self):
        rng = random.Random(0)
        batched, single = make(write_fn=total), make(write_fn=total)
        for _ in range(5):
            numbers = [rng.randrange(6) for _ in range(9)]
            batched[k(*numbers)] = v(*range(9))
            for number, value in zip(numbers, range(9), strict=True):
                single[k(number)] = v(value)
        assert content(batched) == content(single)
        keys = batched.keys()
        assert torch.equal(batched[keys]["n"], single[keys]["n"])

    def test_one_call_for_each_round_ours(self):
        calls = []

        def spy(new, old=None):
            calls.append(len(new))
            return new

        m = make(size=2000, write_fn=spy)
        m[k(*[i % 500 for i in range(2000)])] = v(*range(2000))
        assert calls == [500] * 4

    def test_after_a_merge_it_sees_one_row_for_each_key_ours(self):
        m = make(write_fn=total)
        m.update(k(1, 2, 1), v(1, 2, 3), merge="sum")
        assert content(m) == {1: 4, 2: 2} and m[k(1, 2)]["n"].tolist() == [1, 1]

    @pytest.mark.parametrize("when", ["new", "old", "second round"])
    def test_its_error_changes_nothing_ours(self, when):
        def fail(new, old=None):
            if when == "new" if old is None else when != "new":
                raise RuntimeError("no")
            return new

        m = make(write_fn=fail)
        if when == "old":
            m.write_fn = None
            m[k(1)] = v(1)
            m.write_fn = fail
        query, value = (k(1, 2, 3), v(1, 2, 3)) if when != "second round" else (k(2, 2), v(1, 2))
        with fails(RuntimeError, "no", m, query, value):
            m[query] = value

    @pytest.mark.parametrize(
        "write_fn",
        [
            lambda new, old=None: None,
            lambda new, old=None: new["v"],
            lambda new, old=None: new[:1],
            lambda new, old=None: new.exclude("v") if old is not None else new,
            lambda new, old=None: new.apply(lambda x: x.double()) if old is not None else new,
            lambda new, old=None: new.apply(lambda x: x[:, 0]) if old is not None else new,
        ],
        ids=["None", "tensor", "one row", "no entry", "dtype", "shape"],
    )
    @pytest.mark.parametrize("numbers", [(1, 2), (1, 5, 2), (1, 1, 2, 2)], ids=str)
    def test_a_result_that_does_not_fit_changes_nothing_ours(self, write_fn, numbers):
        m = filled(1, 2)
        m.write_fn = write_fn
        query, value = k(*numbers), v(*range(len(numbers)))
        with fails((ValueError, KeyError, TypeError, RuntimeError), "", m, query, value):
            m[query] = value


# ---------------------------------------------------------------------------- collate_fn, out_keys


class TestCollateFn:
    def test_makes_of_the_values_what_is_read(self):
        m = make(collate_fn=lambda values: values["v"] + 1)
        m[k(1, 2)] = v(1, 2)
        assert m[k(2, 1)].tolist() == [[3], [2]]

    def test_get_and_pop_ours(self):
        m = make(collate_fn=lambda values: values["v"] + 1)
        m[k(1, 2)] = v(1, 2)
        assert m.get(k(2, 9), 7).tolist() == [[3], [8]]
        assert m.pop(k(2)).tolist() == [[3]]

    def test_sees_the_batch_of_the_query_ours(self):
        shapes = []
        m = filled(1, 2, collate_fn=lambda values: shapes.append(values.batch_size))
        m[k(1, 2).reshape(2, 1)]
        m[k(1)[0]]
        assert shapes == [(2, 1), ()]

    def test_its_error_in_pop_takes_nothing_out_ours(self):
        def fail(values):
            raise RuntimeError("no")

        m = filled(1, 2, collate_fn=fail)
        with fails(RuntimeError, "no", m):
            m.pop(k(1))


class TestOutKeys:
    def test_say_which_entries_are_stored(self):
        m = make(out_keys=["v", ("n", "x")])
        assert m.out_keys == ["v", ("n", "x")]
        value = v(1, 2).update({"w": torch.ones(2), "n": {"x": torch.ones(2), "y": torch.ones(2)}})
        m[k(1, 2)] = value
        assert set(m[k(1)].keys(True, True)) == {"v", ("n", "x")}

    def test_by_default_are_those_of_the_first_value(self):
        m = make()
        with pytest.raises(AttributeError, match="out_keys"):
            m.out_keys  # noqa: B018
        assert not hasattr(m, "out_keys")
        m[k(1)] = v(1).set(("n", "x"), torch.ones(1))
        assert set(m.out_keys) == {"v", ("n", "x")}

    def test_in_keys_are_those_of_the_query(self):
        assert make(["k", ("n", "k")]).in_keys == ["k", ("n", "k")]

    def test_a_value_without_one_of_them_ours(self):
        m = make(out_keys=["v", "w"])
        with fails(KeyError, "w", m):
            m[k(1)] = v(1)


class TestModule:
    def test_writes_the_stored_entries_into_a_container_ours(self):
        m, td = filled(1, 2), k(2, 1).set("other", torch.zeros(2))
        out = m(td)
        assert out is td and td["v"].tolist() == [[20], [10]]
        assert set(td.keys()) == {"k", "other", "v"}

    def test_an_unknown_row_ours(self):
        m, td = filled(1, 2), k(2, 9)
        with fails(UnknownRowError, "1 of 2", m, td):
            m(td)

    def test_in_a_sequence_ours(self):
        double = TensorDictModule(lambda x: 2 * x, ["v"], ["y"])
        sequence = TensorDictSequential(filled(1, 2), double)
        assert sequence(k(2, 1))["y"].tolist() == [[40], [20]]

    def test_select_out_keys_ours(self):
        m = make()
        m[k(1)] = v(1).set("w", torch.ones(1))
        m.select_out_keys("w")
        assert set(m(k(1)).keys()) == {"k", "w"}

    def test_repr_ours(self):
        assert repr(filled(1, 2)).startswith("TensorDictMap(2 of 20 rows, ['k'] -> ['v']")

    def test_an_empty_map_is_true_ours(self):
        assert bool(make())  # else `map or default` would drop an empty one

    def test_attributes(self):
        query, storage, write = QueryModule(["k"]), TensorStorage(20), total
        m = TensorDictMap(query_module=query, storage=storage, write_fn=write)
        assert m.query_module is query and m.storage is storage and m.write_fn is write
        assert m.max_size == 20


class TestConstructor:
    def test_storage_grows_by_default_ours(self):
        m = TensorDictMap(query_module=QueryModule(["k"]))
        assert m.max_size is None
        m[k(*range(100))] = v(*range(100))
        m[k(*range(50, 1500))] = v(*range(50, 1500))
        assert len(m) == 1500 and read(m, 0, 99, 1499) == [0, 99, 1499]

    def test_in_keys_are_the_short_way_ours(self):
        m = TensorDictMap(in_keys=["k"])
        m[k(1)] = v(5)
        assert read(m, 1) == [5]

    @pytest.mark.parametrize(
        "options, words",
        [
            ({}, "in_keys=.*query_module="),
            ({"in_keys": ["k"], "query_module": QueryModule(["k"])}, "either"),
            ({"in_keys": ["k"], "evict": "fifo", "max_size": 2}, "'lru' or None.*'fifo'"),
            ({"in_keys": ["k"], "evict": "lru"}, "max_size"),
            ({"in_keys": ["k"], "max_size": 0}, "max_size.*0"),
            ({"in_keys": ["k"], "max_size": -1}, "max_size.*-1"),
        ],
        ids=str,
    )
    def test_mistakes_ours(self, options, words):
        with pytest.raises(ValueError, match=words):
            TensorDictMap(**options)

    def test_nothing_positional(self):
        with pytest.raises(TypeError):
            TensorDictMap(QueryModule(["k"]), TensorStorage(3))

    def test_the_smaller_max_size_counts_ours(self):
        assert make(size=5, max_size=3).max_size == 3
        assert make(size=5, max_size=9).max_size == 5

    def test_two_maps_may_share_a_query_module_ours(self):
        query = QueryModule(["k"])
        one, two = (TensorDictMap(query_module=query) for _ in range(2))
        one[k(1, 2)] = v(1, 2)
        two[k(2)] = v(7)
        query(k(5, 6, 7))
        assert content(one) == {1: 1, 2: 2} and content(two) == {2: 7}
        assert two.rows(k(1, 2)).tolist() == [-1, 0]

    def test_a_storage_for_each_entry_ours(self):
        m = TensorDictMap(
            query_module=QueryModule(["k"]),
            storage={"v": TensorStorage(), ("n", "x"): TensorStorage(5)},
        )
        m[k(1, 2)] = v(1, 2).set(("n", "x"), torch.tensor([3, 4]))
        td = m[k(2, 1)]
        assert td["v"].tolist() == [[2], [1]] and td["n", "x"].tolist() == [4, 3]
        m.delete(k(1))
        assert m.contains(k(1, 2)).tolist() == [False, True] and len(m) == 1


class TestFromPair:
    def test_published_example_ours(self):
        # the peer's, with a made-up rollout: from (observation, action) to what came next. It reads
        # the row numbers from the source, into which ours writes nothing.
        torch.manual_seed(0)
        steps = 14
        observation = torch.randn(steps + 1, 4)
        rollout = TensorDict(
            {
                "action": torch.nn.functional.one_hot(torch.randint(2, (steps,)), 2),
                "observation": observation[:-1],
                "next": {
                    "observation": observation[1:],
                    "reward": torch.ones(steps, 1),
                    "done": torch.zeros(steps, 1, dtype=torch.bool),
                },
            },
            [steps],
        )
        source, dest = rollout.exclude("next"), rollout.get("next")
        m = TensorDictMap.from_tensordict_pair(source, dest, in_keys=["observation", "action"])
        assert len(m) == 0
        m[source] = dest
        assert m.rows(source).tolist() == list(range(14))
        found = m[source]
        assert set(found.keys()) == {"done", "observation", "reward"}
        for key in found.keys():
            assert torch.equal(found[key], dest[key])

    def test_source_and_dest_are_examples(self):
        m = TensorDictMap.from_tensordict_pair(k(1, 2), v(1, 2), ["k"])
        assert len(m) == 0

    def test_are_not_kept_ours(self):
        source, dest = k(1, 2), v(1, 2)
        before = plain(source), plain(dest)
        m = TensorDictMap.from_tensordict_pair(source, dest, ["k"])
        assert (plain(source), plain(dest)) == before
        assert not m.contains(source).any()

    def test_options(self):
        m = TensorDictMap.from_tensordict_pair(
            k(1),
            v(1).set("w", torch.ones(1)),
            ["k"],
            out_keys=["v"],
            max_size=7,
            hash_module=SipHash(),
            collate_fn=lambda values: values.set("more", values["v"] + 1),
            write_fn=lambda new, old=None: new,
        )
        assert m.max_size == 7 and m.out_keys == ["v"]
        m[k(1, 2)] = v(1, 2).set("w", torch.ones(2))
        assert set(m[k(1)].keys()) == {"v", "more"}

    def test_storage_constructor(self):
        m = TensorDictMap.from_tensordict_pair(
            k(1), v(1), ["k"], storage_constructor=lambda: TensorStorage(4)
        )
        assert m.max_size == 4
        m[k(1)] = v(1)
        assert read(m, 1) == [1]

    def test_grows_by_default_ours(self):
        m = TensorDictMap.from_tensordict_pair(k(1), v(1), ["k"])
        m[k(*range(1100))] = v(*range(1100))
        assert len(m) == 1100

    def test_evicts_ours(self):
        m = TensorDictMap.from_tensordict_pair(k(1), v(1), ["k"], max_size=2, evict="lru")
        m[k(1)] = v(1)
        m[k(2)] = v(2)
        m[k(3)] = v(3)
        assert content(m) == {2: 2, 3: 3}

    def test_a_write_fn_that_adds_entries_ours(self):
        m = TensorDictMap.from_tensordict_pair(k(1), v(1), ["k"], write_fn=total)
        m[k(1, 1)] = v(1, 2)
        assert m[k(1)]["n"].tolist() == [2]

    def test_wide_rows_keep_all_their_digits_ours(self):
        # the peer projects rows of more than 16 numbers to 16 bfloat16 numbers
        x = torch.zeros(2, 40)
        x[1, 3] = 1e-6
        source = TensorDict({"k": x}, [2])
        m = TensorDictMap.from_tensordict_pair(source, v(1, 2), ["k"])
        m[source] = v(1, 2)
        assert m[source]["v"].flatten().tolist() == [1, 2]

    def test_other_keys_or_values_than_the_examples_ours(self):
        m = TensorDictMap.from_tensordict_pair(k(1), v(1), ["k"])
        with fails(ValueError, "float32.*float64", m):
            m[TensorDict({"k": torch.ones(1, 1, dtype=torch.float64)}, [1])] = v(1)
        with fails((ValueError, KeyError), "v", m):
            m[k(1)] = TensorDict({"w": torch.ones(1)}, [1])


# ------------------------------------------------------------------------------------------ removal


class TestDelete:
    def test_takes_rows_out_ours(self):
        m = filled(1, 2, 3, 4)
        assert m.delete(k(2, 4)) == 2
        del m[k(1)]
        assert content(m) == {3: 30} and len(m) == 1
        assert m.contains(k(1, 2, 3, 4)).tolist() == [False, False, True, False]

    def test_a_key_that_is_there_twice_is_one_row_ours(self):
        m = filled(1, 2)
        assert m.delete(k(1, 1)) == 1 and content(m) == {2: 20}

    def test_unknown_rows_are_an_error_or_ignored_ours(self):
        m = filled(1, 2)
        with fails(UnknownRowError, r"1 of 2 rows.*\[1\]", m):
            m.delete(k(1, 9))
        assert m.delete(k(9, 1, 8), missing="ignore") == 1 and content(m) == {2: 20}
        assert m.delete(k(9), missing="ignore") == 0

    def test_another_word_for_missing_ours(self):
        m = filled(1)
        with fails(ValueError, "'error' or 'ignore'.*'skip'", m):
            m.delete(k(1), missing="skip")

    def test_a_deleted_key_can_come_back_ours(self):
        m = filled(1, 2)
        m.delete(k(1))
        m.update(k(1), v(5), merge="sum", accumulate=True)
        assert content(m) == {1: 5, 2: 20}  # nothing of the old value

    def test_the_storage_holds_as_many_rows_as_the_map_ours(self):
        m = filled(1, 2, 3, max_size=3, evict="lru")
        m.delete(k(2))
        assert len(m.storage) == len(m) == 2
        m[k(4, 5)] = v(4, 5)
        assert len(m.storage) == len(m) == 3
        m.clear()
        assert len(m.storage) == len(m) == 0

    def test_a_single_row_and_a_matrix_ours(self):
        m = filled(1, 2, 3, 4, 5)
        m.delete(k(1)[0])
        m.delete(k(2, 3, 4, 2).reshape(2, 2))
        assert content(m) == {5: 50}

    def test_all_ours(self):
        m = filled(*range(15))
        m.delete(m.keys())
        assert len(m) == 0 and content(m) == {}
        m[k(3)] = v(1)
        assert content(m) == {3: 1}


class TestPop:
    def test_gives_and_takes_out_ours(self):
        m = filled(1, 2, 3)
        assert m.pop(k(3, 1))["v"].tolist() == [[30], [10]]
        assert content(m) == {2: 20}

    def test_a_single_row_ours(self):
        m = filled(1, 2)
        td = m.pop(k(1)[0])
        assert td.batch_size == () and td["v"].tolist() == [10] and content(m) == {2: 20}

    def test_a_key_that_is_there_twice_ours(self):
        m = filled(1, 2)
        assert m.pop(k(1, 1))["v"].tolist() == [[10], [10]] and content(m) == {2: 20}


class TestClear:
    def test_takes_all_out_ours(self):
        m = filled(1, 2)
        m.clear()
        assert len(m) == 0 and m.contains(k(1, 2)).tolist() == [False, False]
        assert content(m) == {}
        m[k(2)] = v(5)
        assert content(m) == {2: 5}

    def test_what_keys_and_values_look_like_stays_ours(self):
        m = filled(1, 2)
        m.clear()
        assert m.get(k(1), 3)["v"].tolist() == [[3]] and m.out_keys == ["v"]
        with fails(ValueError, "float32.*int32", m):
            m[TensorDict({"k": torch.ones(1, 1, dtype=torch.int32)}, [1])] = v(1)
        with fails((ValueError, KeyError), "v", m):
            m[k(1)] = TensorDict({"w": torch.ones(1)}, [1])

    def test_twice_and_when_empty_ours(self):
        m = make()
        m.clear()
        m.clear()
        m[k(1)] = v(1)
        assert content(m) == {1: 1}


# ----------------------------------------------------------------------------------------- all rows


class TestAllRows:
    def test_keys_and_values_stand_side_by_side_ours(self):
        m = filled(4, 2, 9, 7)
        m.delete(k(2))
        m[k(5, 1)] = v(50, 10)
        assert m.keys().batch_size == m.values().batch_size == (5,) == (len(m),)
        assert content(m) == {4: 40, 9: 90, 7: 70, 5: 50, 1: 10}
        assert torch.equal(m[m.keys()]["v"], m.values()["v"])

    def test_in_order_of_appearance_if_nothing_is_deleted_ours(self):
        m = filled(4, 2, 9)
        m[k(2, 1)] = v(0, 0)
        assert m.keys()["k"].flatten().tolist() == [4, 2, 9, 1]

    def test_keys_hold_just_the_in_keys_ours(self):
        m = make(["a", ("n", "b")])
        query = TensorDict(
            {
                "a": torch.tensor([True, False]),
                "n": {"b": torch.ones(2, 3, dtype=torch.bfloat16), "c": torch.ones(2)},
            },
            [2],
        )
        m[query] = v(1, 2)
        keys = m.keys()
        assert set(keys.keys(True, True)) == {"a", ("n", "b")}
        assert torch.equal(keys["a"], query["a"])
        assert torch.equal(keys["n", "b"], query["n", "b"])

    def test_iteration_gives_keys_row_by_row_ours(self):
        m = filled(4, 2)
        rows = list(m)
        assert [row["k"].tolist() for row in rows] == [[4], [2]]
        assert all(row.batch_size == () and row in m for row in rows)
        assert [m[row]["v"].item() for row in m] == [40, 20]

    def test_writing_while_iterating_does_not_matter_ours(self):
        m = filled(4, 2)
        for row in m:
            m[k(float(row["k"]) + 100)] = v(1)
        assert len(m) == 4

    def test_an_emptied_map_still_has_its_entries_ours(self):
        m = filled(1, 2)
        m.delete(m.keys())
        assert m.keys()["k"].shape == m.values()["v"].shape == (0, 1)
        assert m[m.keys()]["v"].shape == (0, 1) and m.delete(m.keys()) == 0

    def test_at_gives_keys_and_values_of_some_rows_ours(self):
        m = filled(4, 2, 9)
        rows = m.rows(k(9, 4, 9))
        keys, values = m.at(rows)
        assert keys["k"].tolist() == [[9], [4], [9]] and values["v"].tolist() == [[90], [40], [90]]
        assert torch.equal(m.hashes(rows), m.query_module.hash(k(9, 4, 9)))
        m.delete(k(9))
        for ask in (m.at, m.hashes):
            for row in (int(rows[0]), 17, -1):
                with fails(IndexError, str(row), m):
                    ask(torch.tensor([row]))

    def test_an_empty_map_ours(self):
        m = make()
        assert m.keys().batch_size == m.values().batch_size == (0,)
        assert list(m) == [] and len(m) == 0


# ----------------------------------------------------------------------------------------- mistakes


NARROW = torch.ones(2, 1, dtype=torch.float64)
BAD_VALUES = {
    "too few rows": (v(1), ValueError, r"\[1\].*\[2\]"),
    "too many rows": (v(1, 2, 3), ValueError, r"\[3\].*\[2\]"),
    "one row": (v(1)[0], ValueError, r"\[\].*\[2\]"),
    "missing entry": (v(1, 2), (ValueError, KeyError), "w"),
    "no entry": (TensorDict({}, [2]), (ValueError, KeyError), "v|w"),
    "other row shape": (
        v(1, 2).update({"v": torch.ones(2, 3), "w": torch.ones(2)}),
        ValueError,
        "v",
    ),
    "other dtype": (
        v(1, 2).update({"v": NARROW, "w": torch.ones(2)}),
        ValueError,
        "v.*float64|float64.*v",
    ),
    "extra entry": (v(1, 2).update({"w": torch.ones(2), "z": torch.ones(2)}), ValueError, "z"),
    "a container instead of a tensor": (
        v(1, 2).update({"w": TensorDict({"x": torch.ones(2)}, [2])}),
        (ValueError, KeyError, TypeError),
        "w",
    ),
    "string": (v(1, 2).update({"w": "hello"}), (TypeError, ValueError), "w"),
    "object": (
        v(1, 2).set("w", NonTensorData({1, 2}, batch_size=[2])),
        (TypeError, ValueError),
        "w",
    ),
    "tensor": (torch.ones(2), TypeError, "Tensor.*TensorDict"),
    "dict": ({"v": torch.ones(2, 1)}, TypeError, "dict.*TensorDict"),
    "None": (None, TypeError, "None"),
}


class TestBadValues:
    @pytest.mark.parametrize("numbers", [(1, 2), (8, 9), (1, 9), (9, 9)], ids=str)
    @pytest.mark.parametrize("kind", BAD_VALUES)
    def test_leave_the_map_as_it_is_ours(self, kind, numbers):
        value, error, words = BAD_VALUES[kind]
        m, query = make(), k(*numbers)
        m[k(1, 2)] = v(10, 20).set("w", torch.zeros(2))
        tds = [query, value] if isinstance(value, TensorDict) else [query]
        for write in (m.__setitem__, lambda q, v: m.update(q, v, merge="first", accumulate=True)):
            with fails(error, words, m, *tds):
                write(query, value)
            assert content(m) == {1: 10, 2: 20}

    @pytest.mark.parametrize(
        "kind", ["too few rows", "too many rows", "one row", "string", "object", "tensor", "None"]
    )
    def test_leave_an_empty_map_as_it_is_ours(self, kind):
        value, error, words = BAD_VALUES[kind]
        m = make()
        with fails(error, words, m):
            m[k(1, 2)] = value
        m[TensorDict({"k": torch.ones(2, 3)}, [2])] = TensorDict({"z": torch.ones(2)}, [2])
        assert len(m) == 1 and m.out_keys == ["z"]


BAD_QUERIES = {
    "missing entry": (TensorDict({"q": torch.ones(2)}, [2]), KeyError, "k"),
    "string": (TensorDict({"k": "hello"}, [2]), (TypeError, ValueError), "k"),
    "container": (TensorDict({"k": {"x": torch.ones(2)}}, [2]), (TypeError, ValueError), "k"),
    "tensor": (torch.ones(2, 1), TypeError, "Tensor.*TensorDict"),
    "dict": ({"k": torch.ones(2, 1)}, TypeError, "dict.*TensorDict"),
    "number": (3, TypeError, "int.*TensorDict"),
}


class TestBadQueries:
    @pytest.mark.parametrize("kind", BAD_QUERIES)
    @pytest.mark.parametrize("numbers", [(), (1, 2)], ids=["empty map", "filled map"])
    def test_are_refused_everywhere_ours(self, kind, numbers):
        query, error, words = BAD_QUERIES[kind]
        m = filled(*numbers) if numbers else make()
        tds = [query] if isinstance(query, TensorDict) else []
        for ask in (
            m.__getitem__,
            m.contains,
            m.__contains__,
            m.rows,
            m.delete,
            m.pop,
            lambda query: m.get(query, v(0)[0]),
            lambda query: m.__setitem__(query, v(1, 2)),
            lambda query: m.update(query, v(1, 2), merge="sum", accumulate=True),
        ):
            with fails(error, words, m, *tds):
                ask(query)

    @pytest.mark.parametrize(
        "key",
        [torch.ones(2, 1, dtype=torch.float64), torch.ones(2, 2), torch.ones(2), NARROW.int()],
        ids=["dtype", "width", "scalar", "int"],
    )
    def test_keys_of_another_kind_cannot_be_written_ours(self, key):
        m, query = filled(1, 2), TensorDict({"k": key}, [2])
        with fails(ValueError, r"float32\[1\]", m, query):
            m[query] = v(1, 2)
        assert not m.contains(query).any()

    @pytest.mark.parametrize(
        "hash_module",
        [lambda x: torch.zeros(len(x), 2), lambda x: None, lambda x: zeros(x)[1:]],
        ids=["shape", "None", "rows"],
    )
    def test_a_bad_hash_module_ours(self, hash_module):
        m = make(hash_module=hash_module)
        with fails((TypeError, ValueError), "k", m):
            m[k(1, 2)] = v(1, 2)

    def test_an_error_in_the_hash_module_changes_nothing_ours(self):
        def fail(x):
            if (x == 9).any():
                raise RuntimeError("nine")
            return zeros(x)

        m = filled(1, 2, hash_module=fail)
        with fails(RuntimeError, "nine", m):
            m[k(3, 9)] = v(3, 9)


class TestFailingStorage:
    @pytest.mark.parametrize("evict", [None, "lru"])
    def test_changes_nothing_ours(self, evict, monkeypatch):
        def fail(rows, data):
            raise MemoryError("no room for rows")

        m = filled(1, 2, 3, max_size=4, evict=evict)
        query, value = (k(1, 4, 5), v(5, 6, 7)) if evict else (k(1, 4), v(5, 6))
        with monkeypatch.context() as patch, fails(MemoryError, "no room", m, query, value):
            patch.setattr(m.storage, "set", fail)
            m[query] = value
        m[k(4)] = v(4)
        assert content(m) == {1: 10, 2: 20, 3: 30, 4: 4}


class TestFull:
    @pytest.mark.parametrize("where", ["map", "storage"])
    def test_is_an_error_and_nothing_is_written_ours(self, where):
        m = filled(1, 2, max_size=3) if where == "map" else filled(1, 2, size=3)
        assert m.max_size == 3
        query, value = k(2, 3, 4), v(7, 8, 9)
        with fails(CapacityError, "2 new rows.*2 are here.*max_size is 3", m, query, value):
            m[query] = value
        with fails(CapacityError, "", m, query, value):
            m.update(query, value, merge="sum", accumulate=True)
        assert content(m) == {1: 10, 2: 20} and m.rows(k(3, 4)).tolist() == [-1, -1]
        m[k(2, 3)] = v(7, 8)
        assert content(m) == {1: 10, 2: 7, 3: 8}
        with fails(CapacityError, "1 new row.*3 are here", m):
            m[k(4)] = v(1)

    def test_what_is_there_can_still_be_written_ours(self):
        m = filled(1, 2, max_size=2)
        m[k(2, 1, 2)] = v(1, 2, 3)
        assert content(m) == {1: 2, 2: 3}

    def test_repeated_keys_need_one_row_ours(self):
        m = make(max_size=2)
        m[k(1, 2, 1, 2, 1)] = v(1, 2, 3, 4, 5)
        assert content(m) == {1: 5, 2: 4}

    def test_deleting_makes_room_ours(self):
        m = filled(1, 2, max_size=2)
        m.delete(k(1))
        m[k(3)] = v(3)
        assert content(m) == {2: 20, 3: 3}

    def test_the_first_batch_ours(self):
        m = make(max_size=2)
        with fails(CapacityError, "3 new rows", m):
            m[k(1, 2, 3)] = v(1, 2, 3)
        m[k(5, 6)] = v(5, 6)
        assert content(m) == {5: 5, 6: 6}


class TestLeastRecentlyUsed:
    def lru(self, *numbers, size=3):
        return filled(*numbers, max_size=size, evict="lru")

    def test_the_oldest_goes_ours(self):
        m = self.lru(1, 2, 3)
        m[k(4)] = v(40)
        assert content(m) == {2: 20, 3: 30, 4: 40} and k(1) not in m
        m[k(5, 6)] = v(50, 60)
        assert content(m) == {4: 40, 5: 50, 6: 60}

    @pytest.mark.parametrize(
        "use",
        [
            lambda m: m[k(1)],
            lambda m: m.get(k(9, 1), 0),
            lambda m: m(k(1)),
            lambda m: m.__setitem__(k(1), v(10)),
            lambda m: m.update(k(1), v(0), merge="sum", accumulate=True),
        ],
        ids=["[]", "get", "call", "[]=", "update"],
    )
    def test_reading_and_writing_is_using_ours(self, use):
        m = self.lru(1, 2, 3)
        use(m)
        m[k(4)] = v(40)
        assert content(m) == {1: 10, 3: 30, 4: 40}

    @pytest.mark.parametrize(
        "look",
        [
            lambda m: m.contains(k(1)),
            lambda m: k(1) in m,
            lambda m: m.rows(k(1)),
            lambda m: m.items(),
            lambda m: list(m),
            lambda m: m.state_dict(),
            lambda m: repr(m),
            lambda m: pytest.raises(UnknownRowError, m.__getitem__, k(1, 9)),
            lambda m: pytest.raises(ValueError, m.update, k(1), v(1), merge="no"),
            lambda m: pytest.raises(ValueError, m.update, k(1, 9), v(1)),
        ],
        ids="contains in rows items iter state_dict repr unknown failed-merge bad-batch".split(),
    )
    def test_looking_and_failing_is_not_ours(self, look):
        m = self.lru(1, 2, 3)
        look(m)
        m[k(4)] = v(40)
        assert content(m) == {2: 20, 3: 30, 4: 40}

    def test_within_a_batch_the_last_use_counts_ours(self):
        m = self.lru(1, 2, 3)
        m[k(2, 1, 3, 2)]  # now 1 is the oldest, then 3
        m[k(4)] = v(40)
        assert content(m) == {2: 20, 3: 30, 4: 40}
        m[k(5)] = v(50)
        assert content(m) == {2: 20, 4: 40, 5: 50}

    def test_a_batch_does_not_evict_its_own_rows_ours(self):
        m = self.lru(1, 2, 3)
        m.update(k(4, 1), v(4, 5), merge="sum", accumulate=True)
        assert content(m) == {3: 30, 4: 4, 1: 15}

    def test_of_a_batch_that_is_too_large_the_last_stay_ours(self):
        m = self.lru(1, 2, 3)
        m[k(1, 4, 5, 6, 4)] = v(1, 4, 5, 6, 7)
        assert content(m) == {5: 5, 6: 6, 4: 7}

    def test_size_of_one_ours(self):
        m = make(max_size=1, evict="lru")
        for number in (1, 2, 2, 3):
            m[k(number)] = v(number)
            assert content(m) == {number: number}

    def test_failed_writes_evict_nothing_ours(self):
        m = self.lru(1, 2, 3)
        with fails(ValueError, "v", m):
            m[k(4)] = TensorDict({"v": torch.ones(1, 5)}, [1])

    def test_clear_forgets_the_uses_ours(self):
        m = self.lru(1, 2, 3)
        m.clear()
        m[k(3, 2, 1)] = v(3, 2, 1)
        m[k(4)] = v(4)
        assert content(m) == {2: 2, 1: 1, 4: 4}
        m.clear()
        m[k(9)] = v(9)
        other = make(max_size=3, evict="lru")
        other.load_state_dict(m.state_dict())  # in which are no rows of old
        assert content(other) == {9: 9}

    @pytest.mark.parametrize("seed", range(3))
    def test_exactly_as_an_ordered_dict_ours(self, seed):
        rng, size = random.Random(seed), 6
        m, model = make(max_size=size, evict="lru"), OrderedDict()
        for step in range(150):
            numbers = [rng.randrange(12) for _ in range(rng.choice([1, 1, 2, 4, 9]))]
            action = rng.choice(["set", "set", "get", "read", "delete"])
            if action == "set":
                m[k(*numbers)] = v(*range(step, step + len(numbers)))
                for i, number in enumerate(numbers):
                    model[number] = step + i
                    model.move_to_end(number)
                while len(model) > size:
                    model.popitem(last=False)
            elif action == "get":
                found = m.get(k(*numbers), -1)["v"].flatten().tolist() if model else None
                if model:
                    assert found == [model.get(number, -1) for number in numbers]
                for number in numbers:
                    if number in model:
                        model.move_to_end(number)
            elif action == "read" and model:
                numbers = [rng.choice(list(model)) for _ in numbers]
                assert read(m, *numbers) == [model[number] for number in numbers]
                for number in numbers:
                    model.move_to_end(number)
            elif action == "delete" and rng.random() < 0.3:
                assert m.delete(k(*numbers), missing="ignore") == len(set(numbers) & set(model))
                for number in numbers:
                    model.pop(number, None)
            assert content(m) == dict(model)


# --------------------------------------------------------------------------------------- collisions


class TestCollisions:
    """With a hash for which all rows are the same nothing but the content tells them apart."""

    def test_never_give_the_value_of_another_row_ours(self):
        m = filled(*range(12), hash_module=zeros)
        assert read(m, *range(11, -1, -1)) == [10 * i for i in range(11, -1, -1)]
        assert m.contains(k(3, 99)).tolist() == [True, False]
        assert m.rows(k(99)).tolist() == [-1]
        with fails(UnknownRowError, "1 of 1", m):
            m[k(99)]
        assert m.get(k(99, 3), -1)["v"].tolist() == [[-1], [30]]

    def test_within_one_batch_ours(self):
        m = make(hash_module=zeros)
        m.update(k(1, 2, 1, 3, 2), v(1, 2, 3, 4, 5), merge="sum")
        assert content(m) == {1: 4, 2: 7, 3: 4}

    def test_deleting_one_leaves_the_others_ours(self):
        m = filled(1, 2, 3, 4, hash_module=zeros)
        m.delete(k(2, 1))
        assert content(m) == {3: 30, 4: 40}
        m[k(5, 2)] = v(5, 2)
        assert content(m) == {3: 30, 4: 40, 5: 5, 2: 2}

    def test_with_two_keys_of_which_one_collides_ours(self):
        m = TensorDictMap(
            query_module=QueryModule(["a", "b"], hash_module=[zeros, zeros], aggregator=SipHash())
        )
        query = TensorDict({"a": torch.tensor([1, 1, 2]), "b": torch.tensor([1, 2, 1])}, [3])
        m[query] = v(1, 2, 3)
        assert m[query]["v"].flatten().tolist() == [1, 2, 3]

    def test_evicting_ours(self):
        m = filled(1, 2, 3, hash_module=zeros, max_size=3, evict="lru")
        m[k(1)]
        m[k(4)] = v(40)
        assert content(m) == {1: 10, 3: 30, 4: 40}


# ---------------------------------------------------------------------------------- copies of a map


class TestCopies:
    def test_state_dict_ours(self):
        m = filled(1, 2, 3)
        m.delete(k(2))
        state_dict = m.state_dict()
        assert all(isinstance(value, torch.Tensor) for value in state_dict.values())
        other = make()
        other.load_state_dict(state_dict)
        assert content(other) == {1: 10, 3: 30}
        other[k(1, 7)] = v(5, 6)
        assert content(other) == {1: 5, 3: 30, 7: 6} and content(m) == {1: 10, 3: 30}
        other.load_state_dict(state_dict)  # replaces what is there
        assert content(other) == {1: 10, 3: 30}

    def test_state_dict_is_no_view_ours(self):
        m = filled(1, 2)
        state_dict = m.state_dict()
        m[k(1, 5)] = v(7, 8)
        m.delete(k(2))
        other = make()
        other.load_state_dict(state_dict)
        assert content(other) == {1: 10, 2: 20}

    def test_state_dict_of_an_empty_map_ours(self):
        m = filled(1)
        m.load_state_dict(make().state_dict())
        assert len(m) == 0 and k(1) not in m

    def test_state_dict_keeps_the_order_of_use_ours(self):
        options = {"max_size": 3, "evict": "lru"}
        m, other = filled(1, 2, 3, **options), make(**options)
        m[k(1)]
        other.load_state_dict(m.state_dict())
        for each in (m, other):
            each[k(4)] = v(40)
            assert content(each) == {1: 10, 3: 30, 4: 40}

    def test_state_dict_within_another_module_ours(self):
        agents = [nn.ModuleDict({"net": nn.Linear(1, 1), "memory": make()}) for _ in range(2)]
        agents[0]["memory"][k(1, 2)] = v(1, 2)
        agents[1].load_state_dict(agents[0].state_dict())
        assert content(agents[1]["memory"]) == {1: 1, 2: 2}

    def test_state_dict_brings_the_state_of_the_hash_module_ours(self):
        one, two = make(hash_module=Shifted(1)), make(hash_module=Shifted(2))
        one[k(1, 2)] = v(1, 2)
        two.load_state_dict(one.state_dict())
        assert content(two) == {1: 1, 2: 2} and read(two, 2) == [2]

    def test_state_dict_of_storages_for_each_entry_ours(self):
        storage = {"v": TensorStorage(), ("n", "x"): TensorStorage()}
        m = TensorDictMap(query_module=QueryModule(["k"]), storage=storage)
        m[k(1, 2)] = v(1, 2).set(("n", "x"), torch.tensor([3, 4]))
        other = make()
        other.load_state_dict(m.state_dict())
        assert content(other) == {1: 1, 2: 2} and other[k(2)]["n", "x"].tolist() == [4]

    def test_state_dict_of_another_map_is_refused_ours(self):
        m = filled(1, 2)
        others = {
            "more in_keys": make(["k", "j"]),
            "too small": make(max_size=1),
        }
        for other in others.values():
            with pytest.raises((RuntimeError, ValueError)):
                other.load_state_dict(m.state_dict())
            assert len(other) == 0

    def test_an_incomplete_state_dict_changes_nothing_ours(self):
        state_dict, other = filled(1, 2).state_dict(), filled(7)
        for name in state_dict:
            if name.startswith("query_module."):
                continue
            with fails(RuntimeError, "(?i)missing", other):
                other.load_state_dict({key: x for key, x in state_dict.items() if key != name})

    def test_deepcopy_and_pickle(self):
        m = filled(1, 2)
        for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
            other[k(5)] = v(5)
            assert read(other, 1, 2, 5) == [10, 20, 5] and len(other) == 3
        assert len(m) == 2 and m.contains(k(5)).tolist() == [False]

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_is_read_by_the_workers_of_a_data_loader(self, num_workers):
        loader = DataLoader(Numbers(filled(*range(8))), batch_size=3, num_workers=num_workers)
        assert torch.cat(list(loader)).flatten().tolist() == [10 * i for i in range(8)]


class Shifted(nn.Module):
    """A hash module with a state."""

    def __init__(self, shift):
        super().__init__()
        self.register_buffer("shift", torch.tensor(shift))

    def forward(self, x):
        return x[:, 0].long() + self.shift


class Numbers(Dataset):
    def __init__(self, m):
        self.m = m

    def __len__(self):
        return len(self.m)

    def __getitem__(self, i):
        return self.m[k(i)[0]]["v"]


class TestThreads:
    def test_write_at_once_ours(self):
        m, size = TensorDictMap(in_keys=["k"]), 40

        def work(i):
            for start in range(0, 400, size):
                numbers = range(400 * i + start, 400 * i + start + size)
                m[k(*numbers)] = v(*numbers)
                assert read(m, *numbers) == list(numbers)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        assert len(m) == 3200 and content(m) == {i: i for i in range(3200)}

    def test_count_the_same_keys_ours(self):
        m = TensorDictMap(in_keys=["k"])

        def work(i):
            for _ in range(25):
                m.update(k(1, 2, 1), v(1, 1, 1), merge="sum", accumulate=True)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        assert content(m) == {1: 400, 2: 200}

    def test_a_function_may_ask_the_map_ours(self):
        m = make()
        m.write_fn = lambda new, old=None: new.apply(lambda x: x + len(m))
        m.collate_fn = lambda values: values.set(
            "has", m.contains(k(1, 2)).sum().expand(len(values))
        )
        m[k(1)] = v(0)
        m[k(2, 3)] = v(0, 0)
        td = m[k(1, 2, 3)]
        assert td["v"].flatten().tolist() == [0, 1, 1] and td["has"].tolist() == [2, 2, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("query_device", ["cpu", "cuda"])
def test_on_a_gpu_ours(device, query_device):
    m = TensorDictMap(in_keys=["k"], storage=TensorStorage(device=device), max_size=4, evict="lru")
    ask = lambda *numbers: k(*numbers).to(query_device)  # noqa: E731
    m[ask(1, 2, 1)] = v(1, 2, 3).to(query_device)
    m.update(ask(2, 3), v(5, 6).to(query_device), merge="sum", accumulate=True)
    assert m[ask(3, 2, 1)]["v"].flatten().tolist() == [6, 7, 3]
    assert m.contains(ask(1, 9)).tolist() == [True, False]
    m[ask(7, 8)] = v(7, 8).to(query_device)
    assert m.contains(ask(3, 2)).tolist() == [False, True]
    m.delete(ask(1))
    assert sorted(m.values()["v"].flatten().tolist()) == [7, 7, 8]
    assert m[ask(7)]["v"].device.type == device


class TestMistakesOfSetUp:
    def test_two_maps_on_one_storage_are_refused_ours(self):
        storage = TensorStorage(5)
        first, second = (TensorDictMap(in_keys=["x"], storage=storage) for _ in range(2))
        one = TensorDict(x=torch.tensor([9]), batch_size=[1])
        first[one] = TensorDict(v=torch.tensor([9.0]), batch_size=[1])
        other = TensorDict(x=torch.tensor([5]), batch_size=[1])
        with pytest.raises(ValueError, match="a storage of its own"):
            second[other] = TensorDict(v=torch.tensor([5.0]), batch_size=[1])
        assert first[one]["v"].tolist() == [9.0] and len(second) == 0

    def test_a_storage_that_holds_rows_is_refused_ours(self):
        storage = TensorStorage(5)
        storage.extend(TensorDict(v=torch.ones(2), batch_size=[2]))
        with pytest.raises(ValueError, match="holds 2 rows"):
            TensorDictMap(in_keys=["x"], storage=storage)

    def test_a_storage_of_another_kind_is_refused_ours(self):
        with pytest.raises(TypeError, match="TensorStorage.*got a int"):
            TensorDictMap(in_keys=["x"], storage=100)

    def test_accumulate_beside_write_fn_is_refused_ours(self):
        m = TensorDictMap(in_keys=["x"], write_fn=lambda new, old=None: new)
        one = TensorDict(x=torch.tensor([9]), batch_size=[1])
        with pytest.raises(ValueError, match="write_fn"):
            m.update(one, one, merge="sum", accumulate=True)

    @pytest.mark.parametrize("name", ["write_fn", "collate_fn"])
    def test_functions_are_asked_for_when_it_is_loaded_ours(self, tmp_path, name):
        def add(new, old=None):
            return new if old is None else new + old

        m = TensorDictMap(in_keys=["x"], **{name: add})
        one = TensorDict(x=torch.tensor([9]), batch_size=[1])
        m[one] = TensorDict(v=torch.tensor([1.0]), batch_size=[1])
        m.save(tmp_path / "m")
        with pytest.raises(ValueError, match=f"pass {name}="):
            TensorDictMap.load(tmp_path / "m")
        assert getattr(TensorDictMap.load(tmp_path / "m", **{name: add}), name) is add
        assert getattr(TensorDictMap.load(tmp_path / "m", **{name: None}), name) is None

    @pytest.mark.parametrize(
        ("dtype", "default"),
        [
            (torch.uint8, -1),
            (torch.int64, 0.5),
            (torch.int64, float("nan")),
            (torch.bool, 2),
            (torch.float32, 1j),
        ],
    )
    def test_a_default_that_the_entry_cannot_hold_is_refused_ours(self, dtype, default):
        m = TensorDictMap(in_keys=["x"])
        one = TensorDict(x=torch.tensor([9]), batch_size=[1])
        m[one] = TensorDict(n=torch.ones(1, dtype=dtype), batch_size=[1])
        with pytest.raises(ValueError, match='default=.*"n"'):
            m.get(TensorDict(x=torch.tensor([8]), batch_size=[1]), default)

    def test_a_default_of_another_kind_is_refused_also_where_all_is_known_ours(self):
        m = TensorDictMap(in_keys=["x"])
        one = TensorDict(x=torch.tensor([9]), batch_size=[1])
        m[one] = TensorDict(n=torch.ones(1), batch_size=[1])
        with pytest.raises(TypeError, match="default is a number"):
            m.get(one, "zero")


@pytest.mark.parametrize("batch", [[0], [0, 3], [2, 0]])
@pytest.mark.parametrize("by_key", [False, True])
def test_a_query_of_no_rows_of_an_empty_map(batch, by_key):
    m = TensorDictMap(in_keys=["x"], storage={"v": TensorStorage(5)} if by_key else None)
    query = TensorDict(x=torch.zeros(*batch, 2), batch_size=batch)
    for found in (m[query], m.get(query, 0.5), m.pop(query), m(query)):
        assert found.batch_size == torch.Size(batch)
    default = TensorDict(v=torch.zeros(batch), batch_size=batch)
    assert m.get(query, default)["v"].shape == torch.Size(batch)
    m[query] = default
    assert len(m) == 0 and m.delete(query) == 0
    with pytest.raises(TypeError, match="default is a number"):
        m.get(query, "nothing")
    one = TensorDict(x=torch.zeros(1, 2), batch_size=[1])
    m[one] = TensorDict(v=torch.ones(1), batch_size=[1])
    assert m[query]["v"].shape == torch.Size(batch)
