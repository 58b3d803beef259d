"""Entries and keys: reading, writing, listing and reorganising, in every kind of container.

Every kind holds `a` [2, 3, 5], `("b", "c")` [2, 3] and `("b", "d", "e")` [2, 3, 4]; batch [2, 3].
"""

import collections
import copy

import pytest
import torch

from raffia import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictParams,
    get_defaults_to_none,
    is_leaf_nontensor,
    is_tensor_collection,
    lazy_legacy,
    lazy_stack,
    set_get_defaults_to_none,
    set_lazy_legacy,
    unravel_key,
    unravel_key_list,
)

B, T, A = 2, 3, 5
LEAVES = ["a", ("b", "c"), ("b", "d", "e")]
ALL = ["a", ("b", "c"), ("b", "d", "e"), ("b", "d"), "b"]


MISSING = ["zz", ("b", "zz"), ("zz", "c"), "b.c", "A", ""]
THROUGH_LEAF = (KeyError, ValueError)  # one class that is both is fine


def entries(batch=(B, T)):
    count = torch.Size(batch).numel()
    return {
        "a": torch.arange(count * A, dtype=torch.float32).reshape(*batch, A),
        "b": {"c": torch.zeros(batch), "d": {"e": torch.ones(*batch, 4)}},
    }


def make(**kwargs):
    return TensorDict(entries(), [B, T], **kwargs)


def dressed():
    """With all metadata, and locked once, so that anything cached under the lock would show."""
    td = make(device="cpu", names=["x", "y"]).lock_()
    list(td.keys(True, True)), list(td.values(True, True)), td.flatten_keys()
    return td.unlock_()


WRITABLE = {
    "plain": make,
    "dressed": dressed,
    "lazy0": lambda: lazy_stack(list(make().unbind(0)), 0),
    "lazy1": lambda: lazy_stack(list(make().unbind(1)), 1),
}
READABLE = {
    **WRITABLE,
    "locked": lambda: make(lock=True),
    "params": lambda: TensorDictParams(make()),
}


@pytest.fixture(params=WRITABLE)
def td(request):
    return WRITABLE[request.param]()


@pytest.fixture(params=READABLE)
def source(request):
    return READABLE[request.param]()


def keys(td, nested=True, leaves=True, **kwargs):
    return list(td.keys(nested, leaves, **kwargs))


def same(x, y):
    return x.shape == y.shape and x.dtype == y.dtype and bool((x == y).all())


class TestGet:
    def test_leaf(self, source):
        for key in (*LEAVES, ("a",), ("b", ("c",)), (("b", "d"), "e"), ("b", ("d", ("e",)))):
            flat = unravel_key(key)
            expected = make()
            for part in (flat,) if isinstance(flat, str) else flat:
                expected = expected[part]
            assert same(source.get(key), expected) and same(source[key], expected)

    def test_container(self, source):
        for key in ("b", ("b",), ("b", "d")):
            assert is_tensor_collection(source.get(key)) and source[key].batch_size == (B, T)

    @pytest.mark.parametrize("key", MISSING, ids=str)
    def test_missing_is_none(self, source, key):
        assert source.get(key) is None and source.get(key, None) is None
        assert source.get(key, 3) == 3 and source.get(key, default="x") == "x"
        with pytest.raises(KeyError):
            source[key]

    def test_through_a_leaf(self, source):
        with pytest.raises(THROUGH_LEAF, match="a"):
            source["a", "zz"]
        with pytest.raises(THROUGH_LEAF, match="a"):
            source.get(("a", "zz"))
        assert source.get(("a", "zz"), 7) == 7
        assert ("a", "zz") not in source.keys(True)

    def test_malformed(self, source):
        for key in (1, None, (), ("b", 1), ["b", "c"], 2.0, b"a"):
            with pytest.raises(KeyError):
                source.get(key)

    def test_the_object_that_was_set(self):
        x = torch.ones(B, T)
        td = make()
        td["x"] = x
        td["n", "m"] = x
        assert td["x"] is td.get("x") is x and td["n", "m"] is td["n"]["m"] is x
        assert td["b"] is td.get("b") and td["b", "d"] is td["b"]["d"]

    def test_writing_into_a_child_shows_in_the_parent(self, td):
        td.get("b")["z"] = torch.ones(B, T)
        td["b"]["d"]["y"] = torch.zeros(B, T)
        assert {("b", "z"), ("b", "d", "y")} <= set(keys(td))

    def test_brackets_unwrap_text_and_get_does_not(self):
        td = TensorDict({"s": "text", "n": None}, [B])
        assert td["s"] == "text" and td.get("s").data == "text"
        assert td["n"] is None and "n" in td and td.get("n", 5).data is None

    def test_empty_tuple_is_an_index(self):
        assert make()[()].batch_size == (B, T)


class TestGetAt:
    @pytest.mark.parametrize(
        "index, shape",
        [
            (0, (T,)),
            ((0, 1), ()),
            (slice(1), (1, T)),
            (..., (B, T)),
            (None, (1, B, T)),
            ((slice(None), 0), (B,)),
        ],
        ids=str,
    )
    def test_shape(self, source, index, shape):
        assert source.get_at("a", index).shape == (*shape, A)
        assert source.get_at(("b", "c"), index).shape == shape
        assert same(source.get_at("a", index), make()["a"][index])

    def test_container(self, source):
        assert source.get_at("b", 0).batch_size == (T,)

    def test_missing(self, source):
        assert source.get_at("zz", 0, None) is None and source.get_at("zz", 0, default=5) == 5
        assert source.get_at(("b", "zz"), 0, 5) == 5

    def test_out_of_range(self, source):
        with pytest.raises(IndexError):
            source.get_at("a", 7)


class TestSet:
    def test_returns_self(self, td):
        assert td.set("z", torch.ones(B, T)) is td
        assert td["z"].shape == (B, T)

    @pytest.mark.parametrize(
        "key", ["z", ("b", "z"), ("n", "m"), ("n", "m", "o"), ("b", ("d", "z"))], ids=str
    )
    @pytest.mark.parametrize("how", ["set", "setitem"])
    def test_new_key(self, td, key, how):
        value = torch.full((B, T, 7), 3.0)
        td.set(key, value) if how == "set" else td.__setitem__(key, value)
        assert same(td[key], value)
        flat = unravel_key(key)
        assert set(keys(td)) == {*LEAVES, flat}
        if isinstance(flat, tuple):
            for stop in range(1, len(flat)):
                assert td[flat[:stop]].batch_size == (B, T)

    def test_new_levels_take_device_and_names(self):
        td = make(device="cpu", names=["x", "y"])
        td["n", "m", "o"] = torch.ones(B, T)
        for level in ("n", ("n", "m")):
            assert td[level].device == torch.device("cpu") and td[level].names == ["x", "y"]

    @pytest.mark.parametrize(
        "value", [torch.ones(B, T, dtype=torch.int16), torch.ones(B, T, 9)], ids=["dtype", "shape"]
    )
    def test_replaces_with_another_shape_or_dtype(self, td, value):
        td["a"] = value
        td["b", "d", "e"] = value
        assert same(td["a"], value) and same(td["b", "d", "e"], value)

    def test_replaces_kind(self, td):
        td["a"] = {"x": torch.ones(B, T)}
        td["b"] = torch.ones(B, T)
        assert set(keys(td)) == {("a", "x"), "b"}

    def test_dict_becomes_a_container(self, td):
        td["n"] = {"m": torch.ones(B, T), "o": {"p": torch.zeros(B, T, 2)}}
        assert td["n"].batch_size == td["n", "o"].batch_size == (B, T)
        assert {("n", "m"), ("n", "o", "p")} <= set(keys(td))

    def test_numpy_and_lists(self, td):
        x = torch.arange(6.0).reshape(B, T)
        td["n"], td["l"] = x.double().numpy(), x.tolist()
        assert td["n"].dtype == torch.float64 and same(td["l"], x)

    def test_text_and_none(self):
        td = make()
        td["s"], td["n"] = "text", None
        td.set_non_tensor("o", [1, 2])
        assert td["s"] == "text" and td["n"] is None and td["o"] == td.get_non_tensor("o") == [1, 2]

    @pytest.mark.parametrize("shape", [(), (3,), (B,), (T, B), (1, T), (3, 2, 3)], ids=str)
    def test_wrong_batch(self, td, shape):
        with pytest.raises(RuntimeError, match="batch dimension mismatch.*'z'"):
            td.set("z", torch.ones(shape))
        with pytest.raises(RuntimeError, match="batch dimension mismatch"):
            td["a"] = torch.ones(shape)
        assert set(keys(td)) == set(LEAVES) and td["a"].shape == (B, T, A)

    def test_through_a_leaf(self, td):
        for key in (("a", "m"), ("a", "m", "k")):
            with pytest.raises(KeyError, match="a"):
                td[key] = torch.ones(B, T)
        assert same(td["a"], make()["a"])

    @pytest.mark.parametrize("key", [1, (), ("a", 1), None], ids=str)
    def test_malformed(self, td, key):
        with pytest.raises(KeyError):
            td.set(key, torch.ones(B, T))

    def test_inplace_flag(self, td):
        td["z"] = torch.zeros(B, T)
        before = td.to_tensordict() if isinstance(td, LazyStackedTensorDict) else td["z"]
        td.set("z", torch.ones(B, T), inplace=True)
        assert (td["z"] == 1).all()
        if isinstance(before, torch.Tensor):
            assert td["z"] is before
        td.set("y", torch.ones(B, T), inplace=True)  # a new key is created
        assert (td["y"] == 1).all()


class TestSetInPlace:
    @pytest.mark.parametrize("key", LEAVES, ids=str)
    def test_writes_into_the_tensor(self, key):
        td = make()
        old = td[key]
        assert td.set_(key, torch.full(old.shape, 3)) is td
        assert td[key] is old and old.dtype == torch.float32 and (old == 3).all()

    def test_every_kind(self, td):
        td.set_("a", torch.full((B, T, A), 3))
        td.set_(("b", "d", "e"), torch.zeros(B, T, 4))
        assert (
            (td["a"] == 3).all()
            and td["a"].dtype == torch.float32
            and (td["b", "d", "e"] == 0).all()
        )

    def test_container(self, td):
        td.set_("b", {"c": torch.ones(B, T)})
        assert (td["b", "c"] == 1).all() and set(keys(td)) == set(LEAVES)

    @pytest.mark.parametrize("key", ["zz", ("b", "zz")], ids=str)
    def test_missing(self, td, key):
        with pytest.raises(KeyError):
            td.set_(key, torch.ones(B, T))
        assert set(keys(td)) == set(LEAVES)

    def test_shape(self, td):
        with pytest.raises(RuntimeError, match="a"):
            td.set_("a", torch.ones(B, T, 6))
        assert same(td["a"], make()["a"])

    def test_text(self):
        assert TensorDict({"s": "x"}, [B]).set_("s", "y")["s"] == "y"


class TestSetAt:
    @pytest.mark.parametrize(
        "index",
        [
            0,
            (0, 1),
            slice(1, None),
            (slice(None), 1),
            torch.tensor([1]),
            torch.tensor([True, False]),
            [1],
            ...,
        ],
        ids=str,
    )
    def test_scalar(self, td, index):
        expected = make()["a"].clone()
        expected[index] = -1.0
        assert td.set_at_("a", -1.0, index) is td
        assert same(td["a"], expected)

    def test_tensor_and_nested(self, td):
        td.set_at_("a", torch.zeros(T, A), 1)
        td.set_at_(("b", "c"), torch.ones(T), 1)
        assert (td["a"][1] == 0).all() and (td["a"][0] == make()["a"][0]).all()
        assert td["b", "c"].sum() == T and (td["b", "c"][1] == 1).all()

    def test_keeps_the_tensor(self):
        td = make()
        a = td["a"]
        td.set_at_("a", 0.0, 0)
        assert td["a"] is a

    def test_errors(self, td):
        with pytest.raises(KeyError):
            td.set_at_("zz", torch.ones(T), 0)
        with pytest.raises(KeyError):
            td.set_at_(("b", "zz"), torch.ones(T), 0)
        with pytest.raises(RuntimeError):
            td.set_at_("a", torch.ones(4), 1)
        assert same(td["a"], make()["a"])


class TestSetDefault:
    def test_present(self, source):
        assert same(source.setdefault("a", torch.ones(B, T)), make()["a"])
        assert same(source.setdefault(("b", "c"), torch.ones(B, T)), torch.zeros(B, T))

    @pytest.mark.parametrize("key", ["z", ("b", "z"), ("n", "z")], ids=str)
    def test_absent(self, td, key):
        got = td.setdefault(key, torch.full((B, T), 4.0))
        assert same(got, torch.full((B, T), 4.0)) and same(td[key], got)

    def test_identity_and_checks(self):
        td, x = make(), torch.ones(B, T)
        assert td.setdefault("z", x) is td["z"] is x
        with pytest.raises(RuntimeError):
            td.setdefault("y", torch.ones(T))
        assert "y" not in td


class TestUpdate:
    SOURCES = {
        "dict": lambda d: d,
        "tuple-keys": lambda d: {"z": d["z"], ("b", "q"): d["b"]["q"], ("b", "c"): d["b"]["c"]},
        "td": lambda d: TensorDict(d, [B, T]),
        "td-short-batch": lambda d: TensorDict(d, [B]),
        "td-no-batch": lambda d: TensorDict(d),
        "locked": lambda d: TensorDict(d, [B, T]).lock_(),
        "lazy": lambda d: lazy_stack(list(TensorDict(d, [B, T]).unbind(0))),
        "items-of-td": lambda d: {"z": d["z"], "b": TensorDict(d["b"], [B, T])},
        "mapping": lambda d: collections.OrderedDict(d),
    }

    @pytest.mark.parametrize("kind", SOURCES)
    def test_merges_nested(self, td, kind):
        new = {"z": torch.ones(B, T), "b": {"q": torch.ones(B, T), "c": torch.full((B, T), 9.0)}}
        assert td.update(self.SOURCES[kind](new)) is td
        assert set(keys(td)) == {*LEAVES, "z", ("b", "q")}
        assert (td["b", "c"] == 9).all() and (td["z"] == 1).all() and (td["b", "d", "e"] == 1).all()

    def test_the_nested_container_stays(self):
        td, other = make(), make()
        other["b", "q"] = torch.ones(B, T)
        b = td["b"]
        td.update(other)
        assert td["b"] is b and td["b"] is not other["b"] and td["b", "q"] is other["b", "q"]

    def test_tensors_are_not_copied_unless_asked(self):
        x = torch.ones(B, T, A)
        assert make().update({"a": x})["a"] is x
        cloned = make().update({"a": x}, clone=True)["a"]
        assert cloned is not x and same(cloned, x)

    def test_inplace(self):
        td = make()
        a = td["a"]
        td.update({"a": torch.ones(B, T, A), "z": torch.ones(B, T)}, inplace=True)
        assert td["a"] is a and (a == 1).all() and "z" in td

    def test_may_change_shape_dtype_and_kind(self, td):
        td.update({"a": {"x": torch.ones(B, T)}, "b": torch.ones(B, T, 8, dtype=torch.int64)})
        assert set(keys(td)) == {("a", "x"), "b"} and td["b"].dtype == torch.int64

    @pytest.mark.parametrize(
        "selected, expected",
        [
            (["z"], {"z"}),
            ([("b", "c")], {("b", "c")}),
            (["z", ("b", "q")], {"z", ("b", "q")}),
            ([], set()),
        ],
    )
    def test_keys_to_update(self, td, selected, expected):
        new = {"z": torch.full((B, T), 9.0), "b": {k: torch.full((B, T), 9.0) for k in ("c", "q")}}
        td.update(new, keys_to_update=selected)
        assert {k for k in keys(td) if (td[k] == 9).all()} == expected
        assert set(keys(td)) == {*LEAVES, *expected}

    def test_itself_and_nothing(self, td):
        assert td.update(td) is td and td.update({}) is td
        assert set(keys(td)) == set(LEAVES)

    def test_text(self):
        td = make().update({"s": "x", "n": None, "b": {"t": "y"}})
        assert td["s"] == "x" and td["n"] is None and td["b", "t"] == "y"

    def test_batch_size_is_checked(self, td):
        for bad in ({"z": torch.ones(T)}, {"b": {"z": torch.ones(T)}}, {"z": 1.0}):
            with pytest.raises(RuntimeError, match="z"):
                td.update(bad)
        assert set(keys(td)) == set(LEAVES)

    @pytest.mark.parametrize("bad", [3, [("z", torch.ones(B, T))], "abc"])
    def test_not_a_mapping(self, bad):
        with pytest.raises((TypeError, AttributeError)):
            make().update(bad)

    def test_malformed_key(self, td):
        with pytest.raises(KeyError):
            td.update({1: torch.ones(B, T)})


class TestUpdateInPlace:
    @pytest.mark.parametrize("kind", ["dict", "tuple-keys", "td", "lazy"])
    def test_writes_into_the_tensors(self, td, kind):
        new = {"a": torch.ones(B, T, A, dtype=torch.int64), "b": {"c": torch.full((B, T), 9)}}
        built = {
            "dict": new,
            "tuple-keys": {"a": new["a"], ("b", "c"): new["b"]["c"]},
            "td": TensorDict(new, [B, T]),
            "lazy": lazy_stack(list(TensorDict(new, [B, T]).unbind(0))),
        }[kind]
        assert td.update_(built) is td
        assert (td["a"] == 1).all() and td["a"].dtype == torch.float32 and (td["b", "c"] == 9).all()
        assert set(keys(td)) == set(LEAVES)

    def test_keeps_the_tensors(self):
        td = make()
        old = {k: td[k] for k in LEAVES}
        td.update_(make().apply(lambda x: x * 0 + 9))
        assert all(td[k] is v and (v == 9).all() for k, v in old.items())

    def test_keys_to_update(self, td):
        td.update_({"a": torch.ones(B, T, A), "b": {"c": torch.ones(B, T)}}, keys_to_update=["a"])
        assert (td["a"] == 1).all() and (td["b", "c"] == 0).all()

    @pytest.mark.parametrize(
        "bad",
        [{"zz": torch.ones(B, T)}, {"b": {"zz": torch.ones(B, T)}}, {("b", "zz"): 1.0}],
        ids=str,
    )
    def test_missing(self, td, bad):
        with pytest.raises(KeyError, match="zz"):
            td.update_(bad)
        assert set(keys(td)) == set(LEAVES)

    def test_shape(self, td):
        with pytest.raises(RuntimeError):
            td.update_({"a": torch.ones(B, T, 6)})
        assert same(td["a"], make()["a"])

    def test_text(self):
        assert TensorDict({"s": "x"}, [B]).update_({"s": "y"})["s"] == "y"


class TestUpdateAt:
    @pytest.mark.parametrize("wrap", [dict, lambda d: TensorDict(d, [T])], ids=["dict", "td"])
    def test_row(self, td, wrap):
        new = {"a": torch.full((T, A), -1.0), "b": {"c": torch.full((T,), -2.0)}}
        assert td.update_at_(wrap(new), 1) is td
        assert (td["a"][1] == -1).all() and same(td["a"][0], make()["a"][0])
        assert (td["b", "c"][1] == -2).all() and (td["b", "c"][0] == 0).all()

    def test_column(self, td):
        td.update_at_({"a": torch.full((B, A), -1.0)}, (slice(None), 0))
        assert (td["a"][:, 0] == -1).all() and same(td["a"][:, 1:], make()["a"][:, 1:])

    def test_errors(self, td):
        with pytest.raises(KeyError):
            td.update_at_({"zz": torch.ones(T)}, 0)
        with pytest.raises(RuntimeError):
            td.update_at_({"a": torch.ones(T, 6)}, 0)
        assert same(td["a"], make()["a"]) and "zz" not in td


class TestRemove:
    @pytest.mark.parametrize("key", [*LEAVES, ("b", ("d", "e"))], ids=str)
    def test_pop(self, td, key):
        expected = td[key].clone()
        assert same(td.pop(key), expected)
        assert set(keys(td)) == set(LEAVES) - {unravel_key(key)}

    def test_pop_gives_the_object(self):
        td = make()
        a, b = td["a"], td["b"]
        assert td.pop("a") is a and td.pop("b") is b and td.is_empty()

    def test_pop_container_and_text(self, td):
        assert set(td.pop("b").keys()) == {"c", "d"} and list(td.keys()) == ["a"]
        assert TensorDict({"s": "x"}).pop("s").data == "x"

    @pytest.mark.parametrize("key", ["zz", ("b", "zz"), ("zz", "c"), ("a", "zz")], ids=str)
    def test_pop_missing(self, td, key):
        with pytest.raises(THROUGH_LEAF):
            td.pop(key)
        assert td.pop(key, None) is None and td.pop(key, 5) == 5 and td.pop(key, default="x") == "x"
        assert set(keys(td)) == set(LEAVES)

    @pytest.mark.parametrize("how", ["statement", "method"])
    @pytest.mark.parametrize("key", [*LEAVES, ("a",)], ids=str)
    def test_del(self, td, key, how):
        if how == "statement":
            del td[key]
        else:
            assert td.del_(key) is td
        assert set(keys(td)) == set(LEAVES) - {unravel_key(key)}

    def test_del_container_and_levels_stay(self, td):
        del td["b", "d", "e"]
        assert ("b", "d") in td.keys(True)
        del td["b"]
        assert list(td.keys()) == ["a"]

    @pytest.mark.parametrize("key", ["zz", ("b", "zz"), ("zz", "c")], ids=str)
    def test_del_missing(self, td, key):
        with pytest.raises(KeyError, match="zz"):
            del td[key]
        with pytest.raises(KeyError, match="zz"):
            td.del_(key)

    def test_del_through_a_leaf(self, td):
        with pytest.raises(THROUGH_LEAF):
            del td["a", "zz"]

    def test_popitem_takes_the_last(self, td):
        key, value = td.popitem()
        assert key == "b" and is_tensor_collection(value) and list(td.keys()) == ["a"]
        key, value = td.popitem()
        assert key == "a" and value.shape == (B, T, A)
        with pytest.raises(KeyError):
            td.popitem()

    def test_clear(self, td):
        assert td.clear() is td
        assert list(td.keys()) == [] and td.batch_size == (B, T)

    def test_select_in_place_removes_all_or_nothing(self):
        td = TensorDict(a=1, n=dict(b=2, m=dict(c=3, d=4)), o=dict(e=5))
        td["n", "m"].lock_()
        with pytest.raises(RuntimeError, match="locked"):
            td.select("a", ("n", "m", "c"), inplace=True)
        assert len(list(td.keys(True, True))) == 5
        kept = td.unlock_()["n"]
        td["n", "m"].unlock_()
        assert td.select("a", ("n", "m", "c"), ("n", "m"), inplace=True) is td
        assert list(td.keys(True)) == ["a", ("n", "m", "c"), ("n", "m", "d"), ("n", "m"), "n"]
        assert td["n"] is kept

    def test_filter_empty(self):
        td = TensorDict({"a": {"b": {}}, "c": 1, "d": {"e": 1, "f": {}}})
        assert td.filter_empty_() is td
        assert set(td.keys(True)) == {"c", "d", ("d", "e")}


class TestRename:
    @pytest.mark.parametrize(
        "old, new, expected",
        [
            ("a", "z", {"z", ("b", "c"), ("b", "d", "e")}),
            ("a", "a", set(LEAVES)),
            ("a", ("b", "z"), {("b", "c"), ("b", "d", "e"), ("b", "z")}),
            ("a", ("n", "z"), {("n", "z"), ("b", "c"), ("b", "d", "e")}),
            (("b", "c"), "z", {"a", "z", ("b", "d", "e")}),
            (("b", "c"), ("b", "z"), {"a", ("b", "z"), ("b", "d", "e")}),
            (("b", "c"), ("n", "z"), {"a", ("n", "z"), ("b", "d", "e")}),
            ("b", "z", {"a", ("z", "c"), ("z", "d", "e")}),
            (("b", "d"), "z", {"a", ("b", "c"), ("z", "e")}),
            ("a", "b", {"b"}),
            (("a",), ("z",), {"z", ("b", "c"), ("b", "d", "e")}),
        ],
        ids=lambda value: "" if isinstance(value, set) else str(value),  # the order of a set varies
    )
    def test_moves_the_entry(self, td, old, new, expected):
        before = td.get(old)
        assert td.rename_key_(old, new) is td
        assert set(keys(td)) == expected
        if isinstance(before, torch.Tensor):
            assert same(td[new], before)

    def test_identity(self):
        td = make()
        a = td["a"]
        assert td.rename_key_("a", "z")["z"] is a

    def test_safe(self, td):
        for new in ("b", ("b", "c")):
            with pytest.raises(KeyError, match="already"):
                td.rename_key_("a", new, safe=True)
        assert set(keys(td)) == set(LEAVES)
        td.rename_key_("a", "z", safe=True)
        assert "z" in td

    @pytest.mark.parametrize("key", ["zz", ("b", "zz"), ("zz", "c")], ids=str)
    def test_missing(self, td, key):
        with pytest.raises(KeyError, match="zz"):
            td.rename_key_(key, "q")
        assert set(keys(td)) == set(LEAVES)

    @pytest.mark.parametrize("old, new", [("a", 1), (1, "a"), ("a", None)])
    def test_malformed(self, td, old, new):
        with pytest.raises((TypeError, KeyError)):
            td.rename_key_(old, new)
        assert set(keys(td)) == set(LEAVES)

    def test_rename_keys_gives_a_new_container(self, source):
        new = source.rename_keys({"a": "z", ("b", "c"): ("n", "c")})
        assert set(keys(new)) == {"z", ("n", "c"), ("b", "d", "e")} and new.batch_size == (B, T)
        assert set(keys(source)) == set(LEAVES)

    def test_rename_keys_swaps(self):
        td = TensorDict(a=1, b=2)
        new = td.rename_keys({"a": "b", "b": "a"})
        assert new["a"] is td["b"] and new["b"] is td["a"]

    def test_rename_keys_errors(self):
        td = make()
        with pytest.raises(KeyError, match="zz"):
            td.rename_keys({"zz": "q"})
        assert set(keys(td.rename_keys({"zz": "q"}, strict=False))) == set(LEAVES)
        for bad in ({"a": "q", "b": "q"}, {"a": "b"}, {"b": "z", ("b", "c"): "y"}):
            with pytest.raises(ValueError):
                td.rename_keys(bad)
        assert set(keys(td)) == set(LEAVES)


class TestListing:
    def test_four_ways(self, source):
        assert list(source.keys()) == ["a", "b"]
        assert list(source.keys(True)) == ALL  # a nested container is listed after its content
        assert list(source.keys(True, True)) == LEAVES
        assert list(source.keys(False, True)) == ["a"]
        assert list(source.keys(include_nested=True, leaves_only=True)) == LEAVES

    @pytest.mark.parametrize(
        "nested, leaves", [(False, False), (False, True), (True, False), (True, True)]
    )
    @pytest.mark.parametrize("sort", [False, True])
    def test_items_and_values_agree_with_keys(self, source, nested, leaves, sort):
        ks = list(source.keys(nested, leaves, sort=sort))
        items = list(source.items(nested, leaves, sort=sort))
        values = list(source.values(nested, leaves, sort=sort))
        assert {k for k, _ in items} == set(ks) and len(items) == len(values) == len(ks)
        for (key, value), other in zip(items, values, strict=True):
            assert type(value) is type(other) and value.shape == other.shape
            if isinstance(value, torch.Tensor):
                assert same(value, source[key])
        if sort:
            assert [k for k, _ in items] == ks

    def test_values_are_the_entries(self):
        td = make()
        assert list(td.values())[0] is td["a"] and list(td.values())[1] is td["b"]
        assert all(v is td[k] for k, v in td.items(True))

    @pytest.mark.parametrize(
        "kwargs, expected",
        [
            ({}, ["a", "b"]),
            (
                {"include_nested": True},
                ["a", "aa", ("aa", "c"), "b", "b.x", ("b", "y"), ("b", "z")],
            ),
            (
                {"include_nested": True, "leaves_only": True},
                ["a", ("aa", "c"), "b.x", ("b", "y"), ("b", "z")],
            ),
        ],
        ids=["flat", "nested", "leaves"],
    )
    def test_sort_orders_as_if_keys_were_joined_by_dots(self, kwargs, expected):
        td = TensorDict({"b": {"z": 1, "y": 2}, "a": 1})
        if kwargs:
            td["aa", "c"] = td["b.x"] = 1
        assert list(td.keys(**kwargs, sort=True)) == expected
        assert [k for k, _ in td.items(**kwargs, sort=True)] == expected

    def test_is_leaf(self):
        td = TensorDict({"s": "x", "b": {"t": "y", "u": 1}})
        assert keys(td) == [("b", "u")]
        assert keys(td, is_leaf=is_leaf_nontensor) == ["s", ("b", "t"), ("b", "u")]
        assert list(td.keys()) == ["s", "b"]
        assert set(td.keys(True)) == {"s", "b", ("b", "t"), ("b", "u")}
        stop_at_b = make().keys(
            True, True, is_leaf=lambda cls: issubclass(cls, (torch.Tensor, TensorDict))
        )
        assert {"a", "b"} <= set(stop_at_b)

    @pytest.mark.parametrize("args", [(), (True,), (True, True), (False, True)], ids=str)
    def test_views_are_live(self, td, args):
        ks = td.keys(*args)
        before = len(list(ks))
        td["z"] = torch.ones(B, T)
        assert "z" in ks and "z" in list(ks) and len(list(ks)) == before + 1
        del td["z"]
        assert "z" not in ks and len(list(ks)) == before

    def test_items_and_values_are_live(self):
        td = make()
        items, values = td.items(), td.values()
        td["z"] = torch.ones(B, T)
        assert len(list(items)) == len(list(values)) == len(items) == len(values) == 3

    def test_keys_can_be_iterated_twice_and_counted(self, source):
        ks = source.keys(True)
        assert list(ks) == list(ks) and len(ks) == 5
        assert len(source.keys()) == 2 and len(source.keys(True, True)) == 3

    def test_set_operations(self):
        ks = make().keys()
        assert (
            ks == {"a", "b"}
            and ks & {"a", "q"} == {"a"}
            and ks | {"q"} == {"a", "b", "q"}
            and ks - {"a"} == {"b"}
        )
        assert set(ks) == {"a", "b"}

    def test_removing_while_iterating(self):
        td = make()
        with pytest.raises(RuntimeError):
            for key in td.keys():
                del td[key]
        td = make()
        for key in list(td.keys(True, True)):
            del td[key]
        assert td.is_empty()

    def test_repr_shows_the_keys(self):
        assert "'a'" in repr(make().keys()) and "('b', 'c')" in repr(make().keys(True))

    def test_sorted_keys(self):
        assert TensorDict(b=1, a=2).sorted_keys == ["a", "b"]

    def test_depth(self, source):
        assert source.depth == 2
        assert TensorDict().depth == TensorDict(a=1).depth == 0

    def test_dict_of_a_container(self):
        td = TensorDict(a=torch.ones(B), b=torch.zeros(B), batch_size=[B])
        assert dict(td.items()) == {"a": td["a"], "b": td["b"]}
        assert set({**td}) == {"a", "b"}


class TestMembership:
    def test_in_nested_keys(self, source):
        for key in (*ALL, ("a",), ("b", ("d", "e"))):
            assert key in source.keys(True) and key in source

    def test_not_in(self, source):
        for key in (*MISSING, ("a", "x")):
            assert (
                key not in source.keys(True)
                and key not in source.keys(True, True)
                and key not in source
            )

    def test_nested_keys_need_include_nested(self):
        assert "b" in make().keys() and ("b", "c") not in make().keys()

    @pytest.mark.parametrize("kind", READABLE)
    def test_nested_keys_need_include_nested_ours(self, kind):
        assert "b" in READABLE[kind]().keys() and ("b", "c") not in READABLE[kind]().keys()

    @pytest.mark.parametrize("key", [1, None, (), ("b", 1)], ids=str)
    def test_malformed(self, key):
        for args in ((True,), (True, True)):
            with pytest.raises((TypeError, KeyError)):
                key in make().keys(*args)  # noqa: B015

    @pytest.mark.parametrize("kind", READABLE)
    def test_malformed_ours(self, kind):
        for key in (1, None, (), ("b", 1)):
            with pytest.raises((TypeError, KeyError)):
                key in READABLE[kind]().keys(True)  # noqa: B015


class TestSelect:
    @pytest.mark.parametrize(
        "wanted, expected",
        [
            ((), []),
            (("a",), ["a"]),
            (("a", "b"), ALL),
            ((("b", "c"),), [("b", "c"), "b"]),
            (("a", ("b", "d", "e")), ["a", ("b", "d", "e"), ("b", "d"), "b"]),
            ((("b", ("d",)),), [("b", "d", "e"), ("b", "d"), "b"]),
            (("a", "a"), ["a"]),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("inplace", [False, True])
    def test_keys(self, td, wanted, expected, inplace):
        new = td.select(*wanted, inplace=inplace)
        assert set(new.keys(True)) == set(expected) and new.batch_size == (B, T)
        assert (new is td) == inplace
        assert set(keys(td)) == (set(keys(new)) if inplace else set(LEAVES))

    def test_shares_tensors(self):
        td = make(device="cpu", names=["x", "y"])
        new = td.select("a", ("b", "c"))
        assert new["a"] is td["a"] and new["b", "c"] is td["b", "c"] and new["b"] is not td["b"]
        assert new.device == td.device and new.names == td.names

    def test_reading_kinds(self, source):
        new = source.select("a", ("b", "c"))
        assert set(keys(new)) == {"a", ("b", "c")} and not new.is_locked

    @pytest.mark.parametrize("bad", ["zz", ("b", "zz"), ("zz", "c"), ("a", "zz")], ids=str)
    def test_missing(self, td, bad):
        with pytest.raises(KeyError, match="zz"):
            td.select("a", bad)
        with pytest.raises(KeyError, match="zz"):
            td.select("a", bad, inplace=True)
        assert set(keys(td)) == set(LEAVES)

    @pytest.mark.parametrize("bad", ["zz", ("b", "zz"), ("zz", "c")], ids=str)
    def test_missing_not_strict(self, td, bad):
        assert keys(td.select("a", bad, strict=False)) == ["a"]

    @pytest.mark.parametrize("bad", [1, ["a", "b"], None])
    def test_malformed(self, bad):
        for method in (make().select, make().exclude):
            with pytest.raises((RuntimeError, KeyError, TypeError)):
                method(bad)


class TestExclude:
    @pytest.mark.parametrize(
        "unwanted, expected",
        [
            ((), ALL),
            (("a",), [("b", "c"), ("b", "d", "e"), ("b", "d"), "b"]),
            (("b",), ["a"]),
            ((("b", "c"),), ["a", ("b", "d", "e"), ("b", "d"), "b"]),
            ((("b", "d", "e"),), ["a", ("b", "c"), ("b", "d"), "b"]),  # the empty level stays
            (("zz", ("zz", "c"), ("a", "c")), ALL),
            (("b", ("b", "c")), ["a"]),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("inplace", [False, True])
    def test_keys(self, td, unwanted, expected, inplace):
        new = td.exclude(*unwanted, inplace=inplace)
        assert set(new.keys(True)) == set(expected) and new.batch_size == (B, T)
        assert (new is td) == inplace
        if not inplace:
            assert set(td.keys(True)) == set(ALL)

    def test_shares_tensors(self, source):
        new = source.exclude("a")
        assert same(new["b", "c"], source["b", "c"]) and not new.is_locked
        td = make(device="cpu", names=["x", "y"])
        new = td.exclude(("b", "c"))
        assert new["a"] is td["a"] and new["b", "d", "e"] is td["b", "d", "e"]
        assert new.device == td.device and new.names == td.names


class TestSplitKeys:
    def test_last_holds_the_rest(self, td):
        parts = td.split_keys(["a"], [("b", "c")])
        assert [set(keys(p)) for p in parts] == [{"a"}, {("b", "c")}, {("b", "d", "e")}]
        assert all(p.batch_size == (B, T) for p in parts) and set(keys(td)) == set(LEAVES)

    def test_inplace(self, td):
        first, rest = td.split_keys(["a"], inplace=True)
        assert (
            rest is td and keys(first) == ["a"] and set(keys(td)) == {("b", "c"), ("b", "d", "e")}
        )

    def test_missing(self, td):
        with pytest.raises(KeyError, match="zz"):
            td.split_keys(["a"], ["zz"])
        parts = td.split_keys(["a"], ["zz"], strict=False)
        assert [set(keys(p)) for p in parts] == [{"a"}, set(), {("b", "c"), ("b", "d", "e")}]

    def test_separates(self, td):
        out = td.separates("a", ("b", "d", "e"))
        assert set(keys(out)) == {"a", ("b", "d", "e")} and set(td.keys(True)) == {("b", "c"), "b"}

    def test_separates_missing(self, td):
        with pytest.raises(KeyError, match="zz"):
            td.separates("zz")
        assert set(keys(td)) == set(LEAVES)
        out = make().separates("a", "zz", default=None)
        assert set(out.keys()) == {"a", "zz"} and out["zz"] is None


class TestFlattenKeys:
    @pytest.mark.parametrize("separator", [None, ".", "-", "__"])
    @pytest.mark.parametrize("inplace", [False, True])
    def test_round_trip(self, td, separator, inplace):
        args = () if separator is None else (separator,)
        sep = separator or "."
        flat = td.flatten_keys(*args, inplace=inplace)
        assert list(flat.keys()) == ["a", f"b{sep}c", f"b{sep}d{sep}e"]
        assert (flat is td) == inplace and flat.batch_size == (B, T)
        nested = flat.unflatten_keys(*args, inplace=inplace)
        assert (nested is flat) == inplace and set(keys(nested)) == set(LEAVES)
        assert nested["b", "d"].batch_size == (B, T) and same(nested["a"], make()["a"])

    def test_reading_kinds(self, source):
        assert set(source.flatten_keys().keys()) == {"a", "b.c", "b.d.e"}
        assert set(keys(source)) == set(LEAVES)

    def test_shares_tensors_and_metadata(self):
        td = make(device="cpu", names=["x", "y"])
        flat = td.flatten_keys()
        assert flat["b.c"] is td["b", "c"] and flat.device == td.device and flat.names == td.names
        nested = flat.unflatten_keys()
        assert (
            nested["b", "c"] is td["b", "c"]
            and nested["b", "d"].names == td.names
            and nested["b"].device == td.device
        )

    def test_text_and_empty_levels(self):
        flat = TensorDict({"b": {"s": "x", "e": {}}, "c": 1}).flatten_keys()
        assert (
            flat["b.s"] == "x"
            and "c" in flat
            and not any(is_tensor_collection(v) for v in flat.values(leaves_only=True))
        )

    def test_collision(self):
        td = TensorDict({"b": {"c": 1}, "b.c": 2})
        for inplace in (False, True):
            with pytest.raises(KeyError, match="b.c"):
                td.flatten_keys(inplace=inplace)
        assert set(keys(td)) == {("b", "c"), "b.c"}
        assert set(td.flatten_keys("_").keys()) == {"b_c", "b.c"}

    @pytest.mark.parametrize(
        "source", [{"b.c": 1, "b": 2}, {"b": 2, "b.c": 1}, {"b.c": 1, "b.c.d": 2}], ids=str
    )
    def test_unflatten_collision(self, source):
        td = TensorDict(source)
        with pytest.raises(KeyError):
            td.unflatten_keys()
        assert set(td.keys(True)) == set(source)
        with pytest.raises(KeyError):
            td.unflatten_keys(inplace=True)

    def test_unflatten_merges(self):
        td = TensorDict({"b": {"d": 2}, "b.c": 1, "x-y": 3}).unflatten_keys()
        assert set(keys(td)) == {("b", "d"), ("b", "c"), "x-y"}


class TestReplaceAndCopy:
    @pytest.mark.parametrize(
        "args, kwargs",
        [
            (({"a": torch.ones(B, T)},), {}),
            ((), {"a": torch.ones(B, T)}),
            ((TensorDict({"a": torch.ones(B, T)}, [B, T]),), {}),
        ],
        ids=["dict", "keywords", "td"],
    )
    def test_replace(self, source, args, kwargs):
        new = source.replace(*args, **kwargs)
        assert new is not source and same(torch.as_tensor(new["a"].data), torch.ones(B, T))
        assert source["a"].shape == (B, T, A) and set(keys(new)) == set(LEAVES)

    def test_replace_nested(self):
        td = make()
        new = td.replace({("b", "c"): torch.ones(B, T)})
        assert (new["b", "c"] == 1).all() and (td["b", "c"] == 0).all() and new["a"] is td["a"]

    @pytest.mark.parametrize("how", ["copy", "clone(False)", "copy.copy"])
    def test_shallow(self, source, how):
        if isinstance(source, TensorDictParams):
            source = source.data
        new = {
            "copy": source.copy,
            "clone(False)": lambda: source.clone(False),
            "copy.copy": lambda: copy.copy(source),
        }[how]()
        assert new is not source and set(keys(new)) == set(LEAVES)
        assert (
            type(new) is type(source) and new.batch_size == source.batch_size and not new.is_locked
        )
        assert new.names == source.names and new.device == source.device
        new["b", "z"] = torch.ones(B, T)
        assert ("b", "z") not in source.keys(True)
        new["a"] += 1
        if not isinstance(source, LazyStackedTensorDict):
            assert same(source["a"], make()["a"] + 1)  # the tensor is shared

    def test_shallow_shares_tensors(self):
        td = make()
        new = td.copy()
        assert (
            new["a"] is td["a"]
            and new["b"] is not td["b"]
            and new["b", "d", "e"] is td["b", "d", "e"]
        )

    @pytest.mark.parametrize("how", ["clone", "deepcopy", "to_tensordict"])
    def test_deep(self, source, how):
        if isinstance(source, TensorDictParams):
            source = source.data
        new = {
            "clone": source.clone,
            "deepcopy": lambda: copy.deepcopy(source),
            "to_tensordict": source.to_tensordict,
        }[how]()
        assert (
            new.batch_size == source.batch_size
            and new.names == source.names
            and new.device == source.device
        )
        assert not new.is_locked
        new["a"].zero_()
        new["b", "d", "e"].zero_()
        assert same(source["a"], make()["a"]) and (source["b", "d", "e"] == 1).all()

    def test_types(self):
        lazy = WRITABLE["lazy0"]()
        assert isinstance(lazy.clone(), LazyStackedTensorDict)
        assert (
            type(lazy.to_tensordict()) is TensorDict
            and type(lazy.to_tensordict()["b"]) is TensorDict
        )

    def test_to_dict(self, source):
        d = source.to_dict()
        assert (
            set(d) == {"a", "b"}
            and set(d["b"]) == {"c", "d"}
            and type(d["b"]) is type(d["b"]["d"]) is dict
        )
        assert same(d["b"]["d"]["e"], torch.ones(B, T, 4))

    def test_to_dict_shares_and_keeps_values(self):
        td = TensorDict(
            {"x": torch.ones(B), "s": "text", "n": None, "l": ["u", "v"], "m": {"n": None}}, [B]
        )
        d = td.to_dict()
        assert d["x"] is td["x"] and (d["s"], d["n"], d["l"], d["m"]) == (
            "text",
            None,
            ["u", "v"],
            {"n": None},
        )
        assert set(td.to_dict(retain_none=False)) == {"x", "s", "l", "m"}

    def test_empty(self, source):
        if isinstance(source, TensorDictParams):
            source = source.data
        new = source.empty()
        assert list(new.keys()) == [] and new.batch_size == source.batch_size and not new.is_locked
        assert new.device == source.device and new.names == source.names
        assert set(keys(source)) == set(LEAVES)
        assert set(source.empty(recurse=True).keys(True)) == {"b", ("b", "d")}

    def test_empty_overrides(self):
        td = make(device="cpu")
        assert td.empty(batch_size=[4]).batch_size == (4,)
        assert td.empty(device="meta").device == torch.device("meta")
        assert td.empty(names=["x", "y"]).names == ["x", "y"]


class TestProtocols:
    def test_len_is_the_first_batch_dimension(self, source):
        assert len(source) == B
        assert len(TensorDict()) == len(TensorDict(a=torch.ones(3))) == 0

    def test_iteration_is_over_rows(self, source):
        rows = list(source)
        assert [r.batch_size for r in rows] == [(T,)] * B
        assert all(same(row["a"], make()["a"][i]) for i, row in enumerate(rows))

    def test_iteration_needs_a_batch(self):
        with pytest.raises(TypeError):
            list(TensorDict(a=torch.ones(3)))

    def test_no_truth_value(self, source):
        for td in (source, TensorDict()):
            with pytest.raises(RuntimeError, match="bool"):
                bool(td)

    def test_unhashable(self):
        for td in (make(), WRITABLE["lazy0"]()):
            with pytest.raises(TypeError, match="unhashable"):
                hash(td)

    def test_is_empty(self, source):
        assert not source.is_empty()
        assert TensorDict().is_empty() and TensorDict({"a": {"b": {}}}).is_empty()
        assert not TensorDict({"a": "text"}).is_empty()

    def test_equality_is_elementwise(self, source):
        equal = source == source.clone()
        assert equal.batch_size == (B, T) and equal["a"].dtype == torch.bool and equal.all()


class TestInfo:
    def test_get_item_shape(self, source):
        assert source.get_item_shape("a") == (B, T, A)
        assert source.get_item_shape(("b", "c")) == source.get_item_shape("b") == (B, T)
        with pytest.raises(KeyError):
            source.get_item_shape("zz")

    def test_get_item_shape_of_a_ragged_stack(self):
        lazy = lazy_stack([TensorDict(a=torch.ones(3)), TensorDict(a=torch.ones(4))])
        assert lazy.get_item_shape("a") == (2, -1)

    def test_entry_class(self, td):
        assert td.entry_class("a") is td.entry_class(("b", "c")) is torch.Tensor
        assert td.entry_class("b") is type(td["b"])
        assert make().entry_class("b") is TensorDict


class TestCreateNested:
    @pytest.mark.parametrize("key", ["q", ("q", "r"), ("b", "r"), ("b", "d", "q", "r")], ids=str)
    def test_creates(self, td, key):
        assert td.create_nested(key) is td
        assert is_tensor_collection(td[key]) and td[key].batch_size == (B, T) and td[key].is_empty()
        assert set(keys(td)) == set(LEAVES)

    def test_metadata(self):
        td = make(device="cpu", names=["x", "y"]).create_nested("q")
        assert td["q"].device == torch.device("cpu") and td["q"].names == ["x", "y"]


class TestFill:
    @pytest.mark.parametrize("key", LEAVES, ids=str)
    def test_leaf(self, td, key):
        assert td.fill_(key, 3.0) is td
        assert {k for k in LEAVES if (td[k] == 3).all()} == {key}

    def test_container(self, td):
        td.fill_("b", 3.0)
        assert (
            (td["b", "c"] == 3).all()
            and (td["b", "d", "e"] == 3).all()
            and not (td["a"] == 3).all()
        )

    def test_missing(self, td):
        with pytest.raises(KeyError, match="zz"):
            td.fill_("zz", 3.0)

    def test_zero(self, td):
        assert td.zero_() is td and all((td[k] == 0).all() for k in LEAVES)


class TestJoinEntries:
    def pair(self, width=4):
        return TensorDict(a=torch.ones(B, 3), b=torch.zeros(B, width), batch_size=[B])

    @pytest.mark.parametrize("out", ["c", ("n", "c")], ids=str)
    @pytest.mark.parametrize("keep", [False, True])
    def test_cat(self, out, keep):
        td = self.pair()
        assert td.cat_tensors("a", "b", out_key=out, dim=-1, keep_entries=keep) is td
        assert same(td[out], torch.cat([torch.ones(B, 3), torch.zeros(B, 4)], -1))
        assert set(keys(td)) == ({"a", "b", out} if keep else {out})

    @pytest.mark.parametrize("dim, shape", [(None, (2, B, 3)), (1, (B, 2, 3)), (-1, (B, 3, 2))])
    def test_stack(self, dim, shape):
        td = self.pair(3)
        td.stack_tensors("a", "b", out_key="c", **({} if dim is None else {"dim": dim}))
        assert td["c"].shape == shape and keys(td) == ["c"]

    def test_errors_leave_the_entries(self):
        td = self.pair()
        with pytest.raises(RuntimeError):
            td.cat_tensors("a", "b", out_key="c", dim=0)
        with pytest.raises(RuntimeError):
            td.stack_tensors("a", "b", out_key="c")
        with pytest.raises(KeyError, match="zz"):
            td.cat_tensors("a", "zz", out_key="c")
        assert keys(td) == ["a", "b"]


class TestPlainNames:
    NAMES = [
        "keys",
        "get",
        "batch_size",
        "device",
        "values",
        "update",
        "a.b",
        "",
        "self",
        "_private",
        "a b",
        "0",
        "ü",
    ]

    @pytest.mark.parametrize("name", NAMES)
    def test_any_string_is_a_name(self, name):
        x = torch.ones(B)
        td = TensorDict({name: x, "n": {name: x}}, [B])
        assert td[name] is td.get(name) is td["n", name] is x and name in td
        assert list(td.keys()) == [name, "n"] and td.batch_size == (B,) and td.device is None
        assert same(td.clone()[name], x) and same(td.to(torch.float64)[name], x.double())
        assert list(td.select(name).keys()) == [name]
        td.update({name: torch.zeros(B)})
        assert td.pop(name).sum() == 0 and name not in td

    def test_entries_are_not_attributes(self):
        with pytest.raises(AttributeError):
            make().a  # noqa: B018


class TestUnravel:
    @pytest.mark.parametrize(
        "key, expected",
        [
            ("a", "a"),
            (("a",), "a"),
            ((("a",),), "a"),
            (("a", "b"), ("a", "b")),
            (("a", ("b", "c")), ("a", "b", "c")),
            ((("a", "b"), ("c", ("d",))), ("a", "b", "c", "d")),
        ],
        ids=str,
    )
    def test_key(self, key, expected):
        assert unravel_key(key) == expected
        assert unravel_key_list([key, "z"]) == [expected, "z"] == unravel_key_list((key, "z"))

    @pytest.mark.parametrize("bad", [1, ["a"], None])
    def test_malformed(self, bad):
        with pytest.raises((KeyError, RuntimeError, TypeError)):
            unravel_key(bad)
        with pytest.raises((KeyError, RuntimeError, TypeError)):
            unravel_key_list([bad])

    def test_list_needs_a_list(self):
        with pytest.raises(TypeError):
            unravel_key_list("a")
        assert unravel_key_list([]) == []


class TestLazyMembers:
    """A lazy stack has the keys that all its members have; writing to it writes to each member."""

    def ragged(self):
        return lazy_stack([TensorDict(a=torch.ones(3), b=1), TensorDict(a=torch.ones(4), c=2)])

    def test_keys_are_the_intersection(self):
        td = self.ragged()
        assert list(td.keys()) == ["a"] and "b" not in td and td.get("b") is None
        for missing in ("b", "c"):
            with pytest.raises(KeyError):
                td[missing]
            with pytest.raises(KeyError):
                td.pop(missing)
        assert td[0]["b"] == 1 and td[1]["c"] == 2

    def test_set_unbinds(self):
        td = self.ragged()
        td["z"] = torch.arange(2)
        td["n", "m"] = torch.arange(2)
        assert (
            [m["z"].item() for m in td.tensordicts]
            == [m["n", "m"].item() for m in td.tensordicts]
            == [0, 1]
        )

    def test_a_key_set_in_every_member_appears(self):
        td = self.ragged()
        for i, member in enumerate(td.tensordicts):
            member["z"] = i
        assert "z" in td.keys() and td["z"].tolist() == [0, 1]

    def test_del_and_rename_reach_every_member(self):
        td = self.ragged()
        td.rename_key_("a", "z")
        assert [sorted(m.keys()) for m in td.tensordicts] == [["b", "z"], ["c", "z"]]
        del td["z"]
        assert [list(m.keys()) for m in td.tensordicts] == [["b"], ["c"]]


class TestOptions:
    """Less common arguments of methods about keys."""

    def test_get_at_of_a_missing_key(self):
        assert make().get_at("zz", 0) is None and make().get_at("zz", 0, 5) == 5

    def test_keys_to_update_is_any_sequence(self):
        td = make()
        td.update({"a": torch.ones(B, T), "b": torch.ones(B, T)}, keys_to_update=("a",))
        assert td["a"].shape == (B, T) and isinstance(td["b"], TensorDict)
        with pytest.raises(TypeError, match="keys_to_update"):
            td.update({"a": 1}, keys_to_update="a")

    def test_update_at_takes_idx(self):
        td = make().update_at_({"a": torch.full((A,), 7.0)}, idx=(0, 1))
        assert td["a"][0, 1].eq(7).all() and not td["a"][0, 0].eq(7).any()

    def test_non_tensor_items(self):
        td = make().set("s", "text").set(("b", "t"), "deep")
        assert [key for key, _ in td.non_tensor_items()] == ["s"]
        found = dict(td.non_tensor_items(include_nested=True))
        assert found.keys() == {"s", ("b", "t")} and found["b", "t"].data == "deep"

    def test_separates_keeps_emptied_levels_if_asked(self):
        td = make()
        part = td.separates(("b", "d", "e"), filter_empty=False)
        assert set(part.keys(True)) == {"b", ("b", "d"), ("b", "d", "e")}
        assert td["b", "d"].is_empty()
        assert make().separates("a", filter_empty=False).keys() == {"a"}

    def test_split_keys_renames(self):
        td = make()
        first, rest = td.split_keys({"a": "q", ("b", "c"): ("b", "r")})
        assert set(first.keys(True, True)) == {"q", ("b", "r")}
        assert list(rest.keys(True, True)) == [("b", "d", "e")]
        assert first["q"] is td["a"]

    @pytest.mark.parametrize("error", [RuntimeError, ValueError])
    def test_a_write_that_does_not_fit(self, error):
        with pytest.raises(error, match="Failed to update 'a'"):
            make().set_("a", torch.zeros(B, T, A + 1))
        with pytest.raises(error, match="Failed to update"):
            make().update_({"b": {"c": torch.zeros(B, T, 9)}})


class TestModes:
    @pytest.fixture(autouse=True)
    def put_back(self):
        yield
        set_get_defaults_to_none(True)

    @pytest.mark.parametrize("key", ["zz", ("b", "zz"), ("zz", "c")])
    def test_get_raises(self, key):
        set_get_defaults_to_none(False)
        assert not get_defaults_to_none()
        for td in (make(), lazy_stack([make(), make()]), TensorDictParams(make())):
            with pytest.raises(KeyError):
                td.get(key)
            assert td.get(key, None) is None and td.get("a") is not None
        set_get_defaults_to_none(True)
        assert make().get(key) is None

    def test_stacks_are_lazy(self):
        assert lazy_legacy() is False
        with set_lazy_legacy(True):
            assert lazy_legacy() and type(torch.stack([make()] * 2, 1)) is LazyStackedTensorDict
            with set_lazy_legacy(False):
                assert type(torch.stack([make()] * 2)) is TensorDict
            assert lazy_legacy()
        assert type(torch.stack([make()] * 2)) is TensorDict

        @set_lazy_legacy(True)
        def stacked():
            return torch.stack([make()] * 2)

        assert type(stacked()) is LazyStackedTensorDict and not lazy_legacy()


class TestRefusedUpdates:
    @pytest.mark.parametrize("locked", [False, True])
    def test_nothing_is_written_if_one_entry_does_not_fit(self, locked):
        td = make()
        if locked:
            td.lock_()
        before = td.clone()
        for entries in (
            {"a": torch.full((B, T), 9.0), "b": TensorDict({"c": torch.ones(7)})},
            {"a": torch.full((B, T), 9.0), ("b", "c"): torch.ones(7)},
            {"a": torch.full((B, T), 9.0), "zz": torch.ones(B, T)},
        ):
            with pytest.raises((RuntimeError, KeyError), match="c|zz"):
                td.update_(entries)
            assert (td == before).all()
