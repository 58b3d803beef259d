"""QueryModule: from the content of some entries to the number of a row.

Tests with `ours` in their name ask for more than TorchRL's QueryModule gives; it passes the others.
"""

import copy
import pickle
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset

from raffia import NonTensorData, TensorClass, TensorDict, lazy_stack
from raffia.data import CapacityError, HashToInt, QueryModule, RandomProjectionHash, SipHash
from raffia.nn import TensorDictModule, TensorDictSequential

A = [1.0, 1.0, 2.0, 1.0]
B = [[3, 0, 0], [3, 0, 0], [3, 0, 0], [4, 0, 0]]
INDEX = [0, 0, 1, 2]  # of (A, B), in order of first appearance


def make(**extra):
    """Four rows: float32 "a" [4], int64 "b" [4, 3], and the same nested."""
    entries = {"a": torch.tensor(A), "b": torch.tensor(B)}
    nested = {"a": torch.tensor(A), "b": torch.tensor(B)}
    return TensorDict({**entries, "n": nested, **extra}, [4])


def rows(*values, key="a"):
    return TensorDict({key: torch.tensor(values, dtype=torch.float32)}, [len(values)])


def index(query, td, **options):
    return query(td, **options)[query.index_key].tolist()


def count(query):
    """How many hashes the table knows: the answer for a row that no test has asked for."""
    td = rows(*[-77.0])
    for key in query.in_keys:
        td.set(key, torch.tensor([-77.0]))
    (number,) = query(td, extend=False, clone=True)[query.index_key].tolist()
    return number


def keys(td):
    return set(td.keys(True, True))


def state(td):
    """Which objects the container holds, and what is in them."""
    leaves = {key: td.get(key) for key in td.keys(True, True)}
    return td.batch_size, {
        key: (id(leaf), leaf.tolist() if isinstance(leaf, torch.Tensor) else repr(leaf))
        for key, leaf in leaves.items()
    }


class unchanged:
    """Neither the container nor the table of the query has changed after the block."""

    def __init__(self, query, td):
        self.query, self.td = query, td

    def __enter__(self):
        self.before = state(self.td), count(self.query)

    def __exit__(self, *error):
        assert (state(self.td), count(self.query)) == self.before


class Plus(nn.Module):
    """A hash module with a buffer: the first number of each row, plus one."""

    def __init__(self, start=1):
        super().__init__()
        self.register_buffer("start", torch.tensor(start))

    def forward(self, x):
        return x.reshape(len(x), -1)[:, 0].long() + self.start


class Uncopyable:
    def __call__(self, x):
        return SipHash()(x)

    def __deepcopy__(self, memo):
        raise ValueError("I am only one")


# ---------------------------------------------------------------------------------- the example


def test_published_example():
    query_module = QueryModule(in_keys=["key1", "key2"], index_key="index", hash_module=SipHash())
    query = TensorDict(
        {
            "key1": torch.Tensor([[1], [1], [1], [2]]),
            "key2": torch.Tensor([[3], [3], [2], [3]]),
            "other": torch.randn(4),
        },
        batch_size=(4,),
    )
    res = query_module(query)
    # the first two pairs of key1 and key2 match
    assert res["index"][0] == res["index"][1]
    # the last three pairs have at least one mismatching value
    assert res["index"][1] != res["index"][2]
    assert res["index"][2] != res["index"][3]
    # and more exactly
    assert res is query and res["index"].tolist() == [0, 0, 1, 2]


# ------------------------------------------------------------------------------------ the keys


class TestInKeys:
    @pytest.mark.parametrize(
        "given, in_keys",
        [
            ("a", ["a"]),
            ("abc", ["abc"]),
            (["a", "b"], ["a", "b"]),
            (("n", "a"), [("n", "a")]),
            ([("n", "a")], [("n", "a")]),
            (["b", ("n", "a")], ["b", ("n", "a")]),
            ([(("a",),)], ["a"]),
        ],
        ids=str,
    )
    def test_are_listed_and_unravelled(self, given, in_keys):
        assert QueryModule(given).in_keys == in_keys

    @pytest.mark.parametrize("given", [[], (), ""], ids=repr)
    def test_none_is_an_error(self, given):
        with pytest.raises(ValueError, match="`?in_keys`? cannot be empty"):
            QueryModule(given)

    @pytest.mark.parametrize(
        "in_keys, expected",
        [
            ("a", [0, 0, 1, 0]),
            ("b", [0, 0, 0, 1]),
            (["a", "b"], INDEX),
            (["b", "a"], INDEX),
            (["a", ("n", "b")], INDEX),
            ([("n", "b"), ("n", "a")], INDEX),
            (["a", "a"], [0, 0, 1, 0]),
            (["b", "a", "b"], INDEX),
        ],
        ids=str,
    )
    def test_say_what_is_compared(self, in_keys, expected):
        assert index(QueryModule(in_keys), make()) == expected

    def test_their_order_changes_the_hash(self):
        td = make()
        one, other = QueryModule(["a", "b"])(td.copy()), QueryModule(["b", "a"])(td.copy())
        assert (one["_hash"] != other["_hash"]).all()

    def test_the_same_key_twice_has_one_hash_module(self):
        assert list(QueryModule(["a", "a"]).hash_module) == ["a"]

    def test_other_entries_do_not_matter(self):
        one = QueryModule(["a", "b"])(make())
        two = QueryModule(["a", "b"])(make(c=torch.randn(4), a2=torch.zeros(4)))
        assert one["_hash"].tolist() == two["_hash"].tolist()


class TestOutKeys:
    def test_by_default(self):
        query = QueryModule("a")
        assert query.out_keys == ["_index", "_hash"]
        assert (query.index_key, query.hash_key) == ("_index", "_hash")

    @pytest.mark.parametrize(
        "given, key", [("i", "i"), (("i",), "i"), (("n", "i"), ("n", "i")), (("x", "y"),) * 2]
    )
    def test_names_and_nested(self, given, key):
        query = QueryModule("a", given, ("hash", "of", "a"))
        assert query.out_keys == [key, ("hash", "of", "a")]
        assert (query.index_key, query.hash_key) == (key, ("hash", "of", "a"))
        td = query(make())
        assert td[key].tolist() == [0, 0, 1, 0]
        assert keys(td) == keys(make()) | {key, ("hash", "of", "a")}

    def test_are_int64_and_have_the_batch_size(self):
        td = QueryModule(["a", "b"])(make())
        for key in ("_index", "_hash"):
            assert td[key].dtype == torch.int64 and td[key].shape == (4,)
            assert not td[key].requires_grad

    def test_are_written_over(self):
        td = make(_index=torch.full((4,), 9), _hash=torch.zeros(4))
        assert index(QueryModule("a"), td) == [0, 0, 1, 0]
        assert td["_hash"].dtype == torch.int64


# --------------------------------------------------------------------------------- hash modules


class TestHashModule:
    def test_by_default_each_key_has_a_siphash_of_its_own(self):
        query = QueryModule(["a", ("n", "b")])
        assert isinstance(query.hash_module, dict)
        assert list(query.hash_module) == ["a", ("n", "b")]
        one, two = query.hash_module.values()
        assert isinstance(one, SipHash) and isinstance(two, SipHash) and one is not two
        assert isinstance(query.aggregator, SipHash) and isinstance(query.hash_to_int, HashToInt)
        assert query.clone is False

    def test_one_for_one_key_is_used_itself(self):
        module = SipHash()
        assert QueryModule(["a"], hash_module=module).hash_module["a"] is module

    def test_one_for_several_keys_is_copied_and_aggregates(self):
        module = Plus()
        query = QueryModule(["a", "b"], hash_module=module, aggregator=SipHash())
        one, two = query.hash_module.values()
        assert len({id(one), id(two), id(module)}) == 3
        assert QueryModule(["a", "b"], hash_module=module).aggregator is module

    def test_a_list_is_used_as_it_is(self):
        modules = [SipHash(), Plus()]
        query = QueryModule(["a", "b"], hash_module=modules)
        assert list(query.hash_module.values()) == modules
        assert isinstance(query.aggregator, SipHash)
        assert index(query, make()) == INDEX

    @pytest.mark.parametrize("number", [1, 3])
    def test_a_list_of_another_length(self, number):
        with pytest.raises(ValueError, match=rf"\b{number} .*modules.* 2 "):
            QueryModule(["a", "b"], hash_module=[SipHash() for _ in range(number)])

    def test_what_cannot_be_copied_serves_one_key_only(self):
        assert index(QueryModule("a", hash_module=Uncopyable()), make()) == [0, 0, 1, 0]
        with pytest.raises(RuntimeError, match="deepcopy.*a list"):
            QueryModule(["a", "b"], hash_module=Uncopyable())
        listed = QueryModule(["a", "b"], hash_module=[Uncopyable(), Uncopyable()])
        assert index(listed, make()) == INDEX

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
    def test_any_callable(self, dtype):
        query = QueryModule("a", hash_module=lambda x: x.to(dtype))
        assert index(query, make()) == [0, 0, 1, 0]

    def test_what_it_takes_for_equal_is_equal(self):
        query = QueryModule("a", hash_module=lambda x: torch.zeros(len(x), dtype=torch.int64))
        assert index(query, make()) == [0, 0, 0, 0]

    def test_each_is_asked_once(self):
        seen = []

        def spy(x):
            seen.append(x.shape)
            return SipHash()(x)

        QueryModule(["a", "b"], hash_module=[spy, spy])(make())
        assert seen == [(4,), (4, 3)]

    def test_sees_flat_rows_ours(self):
        seen = []

        def spy(x):
            seen.append(tuple(x.shape))
            return SipHash()(x)

        query = QueryModule("b", hash_module=spy)
        query(make().reshape(2, 2))
        query(make()[0])
        assert seen == [(4, 3), (1, 3)]

    def test_is_registered_ours(self):
        modules = [Plus(1), Plus(2)]
        query = QueryModule(["a", ("n", "b")], hash_module=modules)
        assert {id(module) for module in modules} <= {id(module) for module in query.modules()}
        starts = [value for name, value in query.state_dict().items() if name.endswith("start")]
        assert sorted(value.item() for value in starts) == [1, 2]
        other = QueryModule(["a", ("n", "b")], hash_module=[Plus(7), Plus(8)])
        other.load_state_dict(query.state_dict())
        assert [module.start.item() for module in other.hash_module.values()] == [1, 2]

    @pytest.mark.parametrize(
        "hash_module",
        [
            lambda x: torch.zeros(len(x), 2, dtype=torch.int64),
            lambda x: torch.zeros(len(x) - 1, dtype=torch.int64),
            lambda x: torch.tensor(0),
            lambda x: torch.zeros(len(x)),
            lambda x: [0] * len(x),
            SipHash(as_tensor=False),
        ],
        ids=["two columns", "too few", "0-d", "float", "list", "bytes"],
    )
    @pytest.mark.parametrize("in_keys", [["a"], ["b", "a"]], ids=str)
    def test_its_result_must_be_a_number_for_each_row_ours(self, hash_module, in_keys):
        good = [lambda x: torch.zeros(len(x), dtype=torch.int64)] * (len(in_keys) - 1)
        query, td = QueryModule(in_keys, hash_module=[*good, hash_module]), make()
        before = state(td)
        with pytest.raises((TypeError, ValueError), match=r"\ba\b"):
            query(td)
        assert state(td) == before and len(query.hash_to_int) == 0


class TestAggregator:
    def test_gets_the_hashes_of_the_keys_side_by_side(self):
        seen = []

        def spy(hashes):
            seen.append(hashes)
            return hashes.sum(-1)

        query = QueryModule(["a", "b", ("n", "a")], aggregator=spy)
        assert index(query, make()) == INDEX
        assert seen[0].shape == (4, 3) and seen[0].dtype == torch.int64
        td = make()
        assert torch.equal(query(td)["_hash"], seen[1].sum(-1))

    def test_decides_what_is_equal(self):
        aggregator = lambda hashes: hashes[:, 0]  # noqa: E731
        assert index(QueryModule(["b", "a"], aggregator=aggregator), make()) == [0, 0, 0, 1]

    def test_is_registered(self):
        module = Plus()
        query = QueryModule(["a", "b"], hash_module=[SipHash(), SipHash()], aggregator=module)
        assert query.aggregator is module and module in set(query.modules())

    def test_with_one_key_is_left_out_with_a_warning_ours(self):
        def never(hashes):
            raise AssertionError("asked for one key")

        with pytest.warns(UserWarning, match="aggregator.*one"):
            query = QueryModule("a", aggregator=never)
        assert index(query, make()) == [0, 0, 1, 0]

    def test_with_several_keys_is_no_warning(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            QueryModule(["a", "b"], aggregator=SipHash())


class TestHashToInt:
    def test_is_shared_between_modules(self):
        table = HashToInt()
        one, two = QueryModule("a", hash_to_int=table), QueryModule("a", hash_to_int=table)
        assert index(one, rows(5.0, 6.0)) == [0, 1]
        assert index(two, rows(6.0, 7.0, 5.0)) == [1, 2, 0]
        assert index(one, rows(7.0), extend=False) == [2]
        assert one.hash_to_int is table and two.hash_to_int is table

    def test_is_not_shared_by_default(self):
        index(QueryModule("a"), rows(5.0, 6.0))
        assert index(QueryModule("a"), rows(6.0)) == [0]

    def test_any_callable(self):
        seen = []

        def modulo(hashes, extend):
            seen.append(extend)
            return hashes % 7

        query = QueryModule("a", hash_to_int=modulo)
        td = query(make())
        assert torch.equal(td["_index"], td["_hash"] % 7)
        query(make(), extend=False)
        assert seen == [True, False]

    def test_a_full_table_is_an_error_ours(self):
        query = QueryModule("a", hash_to_int=HashToInt(max_size=2))
        assert index(query, rows(1.0, 2.0)) == [0, 1]
        td = rows(2.0, 3.0)
        with unchanged(query, td), pytest.raises(CapacityError, match="2"):
            query(td)
        assert index(query, td, extend=False) == [1, 2]
        assert index(query, rows(2.0, 1.0)) == [1, 0]


def zeros(x):
    return torch.zeros(len(x), dtype=torch.int64)


class TestExact:
    """With `exact=True` rows whose hashes are equal are told apart by their content."""

    def make(self, **options):
        return QueryModule(["a", "b"], hash_module=zeros, exact=True, **options)

    def test_collisions_are_told_apart_ours(self):
        query = self.make()
        assert index(query, make()) == INDEX
        assert index(query, make()[[3, 2, 0]], extend=False) == [2, 1, 0]
        assert index(query, make(a=torch.zeros(4)), extend=False) == [3] * 4
        assert index(query, make().reshape(2, 2)) == [INDEX[:2], INDEX[2:]]
        assert len(set(query.hash(make()).tolist())) == 1

    def test_state_dict_ours(self):
        query, other = self.make(), self.make()
        index(query, make())
        other.load_state_dict(query.state_dict())
        assert index(other, make()[[3, 2, 0]], extend=False) == [2, 1, 0]
        assert index(pickle.loads(pickle.dumps(query)), make()[[3]], extend=False) == [2]

    def test_needs_a_table_that_knows_content_ours(self):
        with pytest.raises(TypeError, match="exact=True.*HashToInt"):
            self.make(hash_to_int=lambda hashes, extend: hashes)


# ------------------------------------------------------------------------------ flags of forward


class TestExtend:
    def test_unknown_rows_get_the_next_numbers(self):
        query = QueryModule("a")
        assert index(query, rows(5.0, 3.0, 5.0)) == [0, 1, 0]
        assert index(query, rows(4.0, 3.0, 9.0, 4.0), extend=True) == [2, 1, 3, 2]

    def test_without_it_they_all_get_the_length(self):
        query = QueryModule("a")
        assert index(query, rows(5.0, 3.0), extend=False) == [0, 0]
        index(query, rows(5.0, 3.0))
        assert index(query, rows(7.0, 3.0, 8.0, 5.0), extend=False) == [2, 1, 2, 0]
        assert index(query, rows(8.0), extend=False) == [2]  # nothing was registered
        assert index(query, rows(8.0)) == [2]


class TestWriteHash:
    def test_can_be_left_out(self):
        td = QueryModule("a")(make(), write_hash=False)
        assert keys(td) == keys(make()) | {"_index"}

    def test_leaves_an_old_hash_alone(self):
        old = torch.zeros(4)
        td = QueryModule("a")(make(_hash=old), write_hash=False)
        assert td["_hash"] is old

    def test_equal_rows_have_equal_hashes(self):
        td = QueryModule(["a", "b"])(make(), write_hash=True)
        first, second, third, fourth = td["_hash"].tolist()
        assert first == second and len({second, third, fourth}) == 3


class TestClone:
    @pytest.mark.parametrize("constructor", [False, True])
    @pytest.mark.parametrize("call", [None, False, True])
    def test_the_call_overrides_the_constructor(self, constructor, call):
        query = QueryModule("a", clone=constructor)
        assert query.clone is constructor
        td = make()
        before = state(td)
        out = query(td, clone=call)
        if constructor if call is None else call:
            assert out is not td and state(td) == before
            assert all(out[key] is td[key] for key in before[1])  # a shallow copy
        else:
            assert out is td
        assert keys(out) == keys(make()) | {"_index", "_hash"}

    def test_is_keyword_only_like_the_other_flags(self):
        with pytest.raises(TypeError):
            QueryModule("a")(make(), False)

    def test_nested_out_keys_leave_the_input_alone(self):
        td = make()
        QueryModule("a", ("n", "i"), ("n", "h"))(td, clone=True)
        assert keys(td) == keys(make())

    def test_a_locked_container(self):
        td = make().lock_()
        out = QueryModule("a")(td, clone=True)
        assert out["_index"].tolist() == [0, 0, 1, 0] and td.is_locked

    def test_a_locked_container_is_refused_before_anything_happens_ours(self):
        query, td = QueryModule("a"), make().lock_()
        with unchanged(query, td), pytest.raises(RuntimeError, match="locked"):
            query(td)


class TestHash:
    def test_is_what_forward_writes_ours(self):
        query, td = QueryModule(["a", "b"]), make()
        with unchanged(query, td):
            hashes = query.hash(td)
        assert hashes.dtype == torch.int64
        assert torch.equal(hashes, query(td)["_hash"])

    def test_has_the_batch_size_ours(self):
        query, hashes = QueryModule(["a", "b"]), QueryModule(["a", "b"]).hash(make())
        assert torch.equal(query.hash(make().reshape(2, 2)), hashes.reshape(2, 2))
        assert torch.equal(query.hash(make()[2]), hashes[2])

    def test_says_what_is_missing_ours(self):
        with pytest.raises(KeyError, match="'?c'?"):
            QueryModule(["a", "c"]).hash(make())


# ------------------------------------------------------------------------------- kinds of batches


class TestBatch:
    @pytest.mark.parametrize("shape", [(4,), (2, 2), (1, 4), (4, 1, 1), (2, 1, 2)], ids=str)
    @pytest.mark.parametrize("in_keys", [["a"], ["a", "b"], ["a", ("n", "b")]], ids=str)
    def test_any_shape_ours(self, shape, in_keys):
        flat, query = QueryModule(in_keys)(make()), QueryModule(in_keys)
        td = query(make().reshape(shape))
        for key in ("_index", "_hash"):
            assert td[key].shape == shape
            assert torch.equal(td[key].flatten(), flat[key])

    def test_no_batch_ours(self):
        query = QueryModule(["a", "b"])
        query(make())
        for i, expected in enumerate(INDEX):
            td = make()[i]
            query(td)
            assert td["_index"].shape == td["_hash"].shape == ()
            assert td["_index"].item() == expected

    @pytest.mark.parametrize("extend", [True, False])
    def test_an_empty_batch(self, extend):
        td = QueryModule(["a", "b"])(make()[:0], extend=extend)
        assert td["_index"].shape == td["_hash"].shape == (0,)
        assert td["_index"].dtype == td["_hash"].dtype == torch.int64

    @pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
    def test_an_empty_batch_of_two_dims_ours(self, shape):
        query = QueryModule("a")
        td = query(TensorDict({"a": torch.zeros(*shape, 2)}, shape))
        assert td["_index"].shape == shape and count(query) == 0

    def test_shorter_than_the_entries(self):
        x = torch.tensor([[[1, 2], [3, 4]], [[1, 2], [3, 5]], [[1, 2], [3, 4]]])
        assert index(QueryModule("x"), TensorDict({"x": x}, [3])) == [0, 1, 0]

    def test_rows_without_elements_are_equal(self):
        assert index(QueryModule("x"), TensorDict({"x": torch.zeros(3, 0)}, [3])) == [0, 0, 0]

    def test_strides_do_not_matter(self):
        wide = torch.tensor([[1.0, 9.0, 2.0], [3.0, 9.0, 4.0]])
        query = QueryModule("x")
        query(TensorDict({"x": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, [2]))
        assert index(query, TensorDict({"x": wide[:, ::2]}, [2]), extend=False) == [0, 1]
        turned = torch.tensor([[1.0, 3.0], [2.0, 4.0]]).T
        assert index(query, TensorDict({"x": turned}, [2]), extend=False) == [0, 1]
        same = torch.tensor([3.0, 4.0]).expand(3, 2)
        assert index(query, TensorDict({"x": same}, [3]), extend=False) == [1, 1, 1]

    def test_entries_that_need_gradients(self):
        x = torch.tensor([1.0, 2.0, 1.0], requires_grad=True)
        td = QueryModule("x")(TensorDict({"x": x}, [3]))
        assert td["_index"].tolist() == [0, 1, 0] and td["x"] is x

    def test_several_queries_in_a_row(self):
        query = QueryModule(["a", "b"])
        td = query(query(make()))
        assert td["_index"].tolist() == INDEX
        assert index(query, make()[2:]) == INDEX[2:]
        assert index(query, make()[[3, 0, 2]], extend=False) == [2, 0, 1]

    def test_a_lazy_stack(self):
        td = lazy_stack([make().select("a", "b")[i] for i in range(4)])
        assert index(QueryModule(["a", "b"]), td) == INDEX

    def test_a_tensorclass(self):
        td = QueryModule(["a", "b"], "index", "hash")(
            Step(a=torch.tensor(A), b=torch.tensor(B), batch_size=[4])
        )
        assert isinstance(td, Step) and td.index.tolist() == INDEX

    def test_names_and_device_stay_ours(self):
        td = TensorDict({"a": torch.zeros(2, 3)}, [2, 3], names=["x", "t"], device="cpu")
        assert QueryModule("a")(td).names == ["x", "t"] and td.device == torch.device("cpu")


class Step(TensorClass):
    a: torch.Tensor
    b: torch.Tensor
    index: torch.Tensor | None = None
    hash: torch.Tensor | None = None


# ----------------------------------------------------------------------- what equal content is


class TestEqualContent:
    def test_zeros_and_nans_are_one_ours(self):
        nans = torch.tensor([0x7FC00000, 0x7FC00001, -0x400000]).to(torch.int32)
        zeros = torch.tensor([0.0, -0.0])
        td = rows(*zeros.tolist(), 1.0, 1.0, 1.0)
        td["a"][2:] = nans.view(torch.float32)
        assert index(QueryModule("a"), td) == [0, 0, 1, 1, 1]

    @pytest.mark.parametrize(
        "in_keys, hash_module",
        [("a", SipHash), (["a", "a"], SipHash), ("a", lambda: SipHash(rounds=(2, 4)))],
        ids=["one key", "two keys", "2-4"],
    )
    def test_dtype_and_row_shape_count_ours(self, in_keys, hash_module):
        query = QueryModule(in_keys, hash_module=hash_module())
        zeros = [
            torch.zeros(1, 2),
            torch.zeros(1, 2, dtype=torch.int32),
            torch.zeros(1, 1, dtype=torch.float64),
            torch.zeros(1, 2, 1),
            torch.zeros(1, 1, 2),
            torch.zeros(1, 8, dtype=torch.uint8),
            torch.zeros(1, 8, dtype=torch.int8),
            torch.zeros(1, 8, dtype=torch.bool),
            torch.zeros(1, dtype=torch.complex64),
            torch.zeros(1, 4, dtype=torch.bfloat16),
            torch.zeros(1, 4, dtype=torch.float16),
        ]
        found = [index(query, TensorDict({"a": zero}, [1])) for zero in zeros]
        assert found == [[i] for i in range(len(zeros))]

    def test_moving_the_border_between_keys_changes_the_row_ours(self):
        query = QueryModule(["x", "y"])
        one = TensorDict({"x": torch.tensor([[1, 2]]), "y": torch.tensor([[3]])}, [1])
        two = TensorDict({"x": torch.tensor([[1]]), "y": torch.tensor([[2, 3]])}, [1])
        assert index(query, one) == [0] and index(query, two) == [1]

    def test_swapped_keys_are_another_row(self):
        query = QueryModule(["x", "y"])
        td = TensorDict({"x": torch.tensor([1, 2]), "y": torch.tensor([2, 1])}, [2])
        assert index(query, td) == [0, 1]

    def test_a_row_alone_and_in_a_batch(self):
        torch.manual_seed(0)
        x, query = torch.randn(64, 3), QueryModule("x")
        found = index(query, TensorDict({"x": x}, [64]))
        assert found == list(range(64))
        alone = [index(query, TensorDict({"x": x[i : i + 1]}, [1]), extend=False) for i in found]
        assert alone == [[i] for i in found]

    @given(
        st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 1)), min_size=1, max_size=12),
        st.integers(1, 11),
    )
    @settings(max_examples=50, deadline=None, derandomize=True, database=None)
    def test_numbers_are_those_of_a_dict(self, pairs, cut):
        query, seen = QueryModule(["x", "y"]), {}
        for part in (pairs[:cut], pairs[cut:]):
            x = torch.tensor([pair[0] for pair in part], dtype=torch.int16)
            y = torch.tensor([pair[1] for pair in part], dtype=torch.float64)
            td = TensorDict({"x": x, "y": y[:, None]}, [len(part)])
            expected = [seen.setdefault(pair, len(seen)) for pair in part]
            assert index(query, td) == expected


# ------------------------------------------------------------------------------------- mistakes


class TestMistakes:
    @pytest.mark.parametrize("in_keys", [["c"], ["a", "c"], ["c", "b"]], ids=str)
    @pytest.mark.parametrize("clone", [True, False])
    def test_a_missing_entry_ours(self, in_keys, clone):
        query, td = QueryModule(in_keys), make()
        before = state(td)
        with pytest.raises(KeyError, match="c"):
            query(td, clone=clone)
        assert state(td) == before and len(query.hash_to_int) == 0

    def test_a_misspelt_key_is_guessed_ours(self):
        td = TensorDict({"observation": torch.zeros(2)}, [2])
        with pytest.raises(KeyError, match="Did you mean .*observation"):
            QueryModule("obsevation")(td)

    @pytest.mark.parametrize(
        "entry",
        [
            "hello",
            ["p", "q", "r", "s"],
            NonTensorData({"k": 1}, batch_size=[4]),
            TensorDict({"x": torch.zeros(4)}, [4]),
        ],
        ids=["str", "list of str", "NonTensorData", "TensorDict"],
    )
    @pytest.mark.parametrize("in_keys", [["a", "s"], ["s"]], ids=str)
    def test_an_entry_that_is_no_tensor_ours(self, entry, in_keys):
        query, td = QueryModule(in_keys), make(s=entry)
        before = list(td.keys(True))
        with pytest.raises((TypeError, ValueError), match=r"\bs\b"):
            query(td)
        assert list(td.keys(True)) == before and len(query.hash_to_int) == 0

    def test_a_sparse_or_nested_entry_ours(self):
        td = TensorDict({}, [3])
        td["a"] = torch.eye(3).to_sparse()
        query = QueryModule("a")
        with pytest.raises((TypeError, ValueError, RuntimeError), match="(?i)sparse|layout"):
            query(td)
        assert "_index" not in td.keys() and len(query.hash_to_int) == 0

    def test_an_out_key_that_goes_through_a_leaf_ours(self):
        query, td = QueryModule("a", ("a", "index")), make()
        before = state(td)
        with pytest.raises(KeyError, match="a"):
            query(td)
        assert state(td) == before and len(query.hash_to_int) == 0


# ---------------------------------------------------------------------------------- as a module


class TestModule:
    def test_in_a_sequence(self):
        double = TensorDictModule(lambda a: a * 2, ["a"], ["d"])
        sequence = TensorDictSequential(double, QueryModule(["d", "b"]))
        assert sequence.in_keys == ["a", "b"]
        assert set(sequence.out_keys) == {"d", "_index", "_hash"}
        assert sequence(make())["_index"].tolist() == INDEX

    def test_two_in_a_sequence(self):
        # merges rows of equal "a", then pairs of that and "b"
        sequence = TensorDictSequential(
            QueryModule("a", "i", "h"), QueryModule(["i", "b"], "j", ("n", "h"))
        )
        td = sequence(make())
        assert td["i"].tolist() == [0, 0, 1, 0] and td["j"].tolist() == INDEX

    @pytest.mark.parametrize("key", ["_index", "_hash"])
    def test_select_out_keys(self, key):
        query = QueryModule("a").select_out_keys(key)
        assert query.out_keys == [key]
        assert keys(query(make())) == keys(make()) | {key}

    def test_forward_hooks_are_called(self):
        seen = []
        query = QueryModule("a")
        query.register_forward_hook(lambda module, args, out: seen.append(out["_index"].tolist()))
        query(make())
        assert seen == [[0, 0, 1, 0]]

    def test_repr_names_the_keys(self):
        assert "in_keys=['a', ('n', 'b')]" in repr(QueryModule(["a", ("n", "b")]))

    def test_deepcopy(self):
        query = QueryModule(["a", "b"])
        index(query, make())
        other = copy.deepcopy(query)
        assert index(other, make()[[3, 2]], extend=False) == [2, 1]
        index(other, make(a=torch.zeros(4)))
        assert index(query, make(a=torch.zeros(4)), extend=False) == [3] * 4  # not shared

    def test_pickle(self):
        query = QueryModule(["a", "b"], ("n", "i"))
        index(query, make())
        other = pickle.loads(pickle.dumps(query))
        assert other.out_keys == query.out_keys
        assert index(other, make()[[3, 2]], extend=False) == [2, 1]

    @pytest.mark.parametrize("to", [torch.float64, torch.float16, "cpu"], ids=str)
    def test_to(self, to):
        query = QueryModule("a")
        index(query, rows(1.5, 2.5))
        assert query.to(to) is query
        td = query(rows(2.5, 3.5, 1.5), extend=False)
        assert td["_index"].tolist() == [1, 2, 0] and td["_hash"].dtype == torch.int64

    def test_state_dict_ours(self):
        query = QueryModule(["a", "b"])
        index(query, make())
        state_dict = query.state_dict()
        assert all(isinstance(value, torch.Tensor) for value in state_dict.values())
        other = QueryModule(["a", "b"])
        other.load_state_dict(state_dict)
        assert index(other, make()[[3, 2, 0]], extend=False) == [2, 1, 0]
        assert index(other, make(a=torch.zeros(4))) == [3, 3, 3, 4]
        assert count(query) == 3  # the state was copied, not shared
        other.load_state_dict(state_dict)  # and replaces what is there
        assert count(other) == 3

    def test_state_dict_of_a_fresh_one_ours(self):
        query = QueryModule("a")
        fresh = QueryModule("a").state_dict()
        index(query, rows(1.0, 2.0))
        query.load_state_dict(fresh)
        assert count(query) == 0 and index(query, rows(2.0)) == [0]

    def test_state_dict_inside_another_module_ours(self):
        make_sequence = lambda: TensorDictSequential(  # noqa: E731
            TensorDictModule(nn.Linear(1, 1), ["x"], ["y"]), QueryModule("a")
        )
        one, two = make_sequence(), make_sequence()
        td = rows(1.0, 2.0).set("x", torch.zeros(2, 1))
        one(td)
        two.load_state_dict(one.state_dict())
        assert index(two[1], rows(3.0, 2.0), extend=False) == [2, 1]

    def test_a_damaged_state_dict_changes_nothing_ours(self):
        query = QueryModule("a")
        index(query, rows(1.0, 2.0))
        full = query.state_dict()
        other = QueryModule("a")
        index(other, rows(5.0))
        for name in full:
            with pytest.raises(RuntimeError, match="(?i)missing|unexpected"):
                other.load_state_dict({key: full[key] for key in full if key != name})
        assert index(other, rows(6.0, 5.0), extend=False) == [1, 0]

    def test_a_random_projection_comes_along_ours(self):
        query = QueryModule("a", hash_module=RandomProjectionHash(n_components=2))
        x = torch.randn(5, 20, generator=torch.Generator().manual_seed(0))
        hashes = query(TensorDict({"a": x}, [5]))["_hash"]
        other = QueryModule("a", hash_module=RandomProjectionHash(n_components=2))
        other.load_state_dict(query.state_dict())
        td = other(TensorDict({"a": x}, [5]), extend=False)
        assert torch.equal(td["_hash"], hashes) and td["_index"].tolist() == list(range(5))


class Rows(Dataset):
    """A data set whose items are numbered by a query module, in the worker."""

    def __init__(self, query, td):
        self.query, self.td = query, td

    def __len__(self):
        return len(self.td)

    def __getitem__(self, i):
        td = self.query(self.td[i : i + 1], extend=False, clone=True)
        return td["_index"], td["_hash"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_in_the_workers_of_a_data_loader(num_workers):
    query = QueryModule(["a", "b"])
    hashes = query(make())["_hash"]
    loader = DataLoader(Rows(query, make()), batch_size=2, num_workers=num_workers)
    batches = list(loader)
    assert torch.cat([batch[0] for batch in batches]).flatten().tolist() == INDEX
    assert torch.equal(torch.cat([batch[1] for batch in batches]).flatten(), hashes)


ELSEWHERE = """
import pickle, sys
import torch
from safetensors.torch import load_file
from raffia import TensorDict
from raffia.data import QueryModule

folder = sys.argv[1]
td = TensorDict(
    {
        "a": torch.tensor([1.0, 1.0, 2.0, 1.0, 5.0]),
        "b": torch.tensor([[3, 0, 0], [3, 0, 0], [3, 0, 0], [4, 0, 0], [3, 0, 0]]),
    },
    [5],
)
loaded = QueryModule(["a", "b"])
loaded.load_state_dict(load_file(folder + "/state.safetensors"))
with open(folder + "/query.pickle", "rb") as file:
    pickled = pickle.load(file)
for query in (loaded, pickled):
    out = query(td, extend=False, clone=True)
    print(out["_index"].tolist(), out["_hash"].tolist(), sep=";")
"""


@pytest.mark.slow
def test_in_a_fresh_process_ours(tmp_path):
    from safetensors.torch import save_file

    query = QueryModule(["a", "b"])
    td = query(make())
    save_file(query.state_dict(), tmp_path / "state.safetensors")
    (tmp_path / "query.pickle").write_bytes(pickle.dumps(query))
    run = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(tmp_path)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    for line in run.stdout.splitlines():
        found, hashes = line.split(";")
        assert found == str([*INDEX, 3])
        assert hashes.startswith(str(td["_hash"].tolist())[:-1])
    assert len(run.stdout.splitlines()) == 2


def test_threads_agree_ours():
    query = QueryModule("x")
    x = torch.arange(300).remainder(100)

    def ask(seed):
        order = torch.randperm(300, generator=torch.Generator().manual_seed(seed))
        td = query(TensorDict({"x": x[order]}, [300]))
        return dict(zip(td["x"].tolist(), td["_index"].tolist(), strict=True))

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(24)))
    assert all(answer == answers[0] for answer in answers)
    assert sorted(answers[0].values()) == list(range(100))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_on_a_gpu_ours(shape):
    td = make().reshape(shape)
    here = QueryModule(["a", "b"])(td.clone())
    query = QueryModule(["a", "b"]).cuda()
    there = query(td.to("cuda"))
    for key in ("_index", "_hash"):
        assert there[key].is_cuda and torch.equal(there[key].cpu(), here[key])
    assert index(query.cpu(), td.flatten()[2:], extend=False) == INDEX[2:]
