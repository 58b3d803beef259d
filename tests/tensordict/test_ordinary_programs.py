"""What programs written for other containers do every day, and must not fail."""

import numpy as np
import pytest
import torch

from raffia import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorDict,
    TensorDictParams,
    lazy_stack,
    tensorclass,
)
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
