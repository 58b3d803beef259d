"""Entries and keys: reading, writing, listing and reorganising, in every kind of container.

Every kind holds `a` [2, 3, 5], `("b", "c")` [2, 3] and `("b", "d", "e")` [2, 3, 4]; batch [2, 3].
The effect of a call is a dict of the entries that differ; None for a removed one.
"""

import collections
import operator

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
from tests.tensordict.invariants import sound
from tests.tensordict.kinds import each, is_lazy

B, T, A = 2, 3, 5
A_, C, E = LEAVES = ["a", ("b", "c"), ("b", "d", "e")]
ALL = ["a", ("b", "c"), ("b", "d", "e"), ("b", "d"), "b"]
Z = ("b", "z")
BAD = ["zz", ("b", "zz"), ("zz", "c")]
MISSING = [*BAD, "b.c", "A", ""]
ONE, WIDE = torch.ones(B, T), torch.ones(B, T, A)
OLD = {A_: torch.arange(30.0).reshape(B, T, A), C: torch.zeros(B, T), E: torch.ones(B, T, 4)}


def make(**options):
    values = {key: value.clone() for key, value in OLD.items()}
    return TensorDict(values, [B, T], **options)


def dressed():
    """With all metadata, and locked once, to find stale caches."""
    td = make(device="cpu", names=["x", "y"]).lock_()
    list(td.keys(True, True)), list(td.values(True, True)), td.flatten_keys()
    return td.unlock_()


WRITABLE = {
    "plain": make,
    "dressed": dressed,
    "along 0": lambda: lazy_stack(list(make().unbind(0)), 0),
    "along 1": lambda: lazy_stack(list(make().unbind(1)), 1),
}
READABLE = {
    **WRITABLE,
    "locked": lambda: make(lock=True),
    "parameters": lambda: TensorDictParams(make()),
}
writable = pytest.mark.parametrize("kind", WRITABLE.values(), ids=WRITABLE)
readable = pytest.mark.parametrize("kind", READABLE.values(), ids=READABLE)


def same(x, y):
    return x.shape == y.shape and x.dtype == y.dtype and bool((x == y).all())


def check(td, changes):
    """The container has the old entries with these changes, and its levels have its batch."""
    want = {key: value for key, value in {**OLD, **changes}.items() if value is not None}
    assert sound(td) and td.batch_size == (B, T)
    assert set(td.keys(True, True)) == set(want)
    for key, value in want.items():
        assert same(td[key], value), key
    levels = {key[:stop] for key in want if isinstance(key, tuple) for stop in range(1, len(key))}
    assert all(td[level].batch_size == (B, T) for level in levels)


# ------------------------------------------------------------------------------------ reading


@readable
def test_reading(kind):
    td, plain = kind(), make()
    spelled = [("a",), ("b", ("c",)), (("b", "d"), "e"), ("b", ("d", ("e",)))]
    for key in LEAVES + spelled:
        flat = unravel_key(key)
        assert same(td.get(key), OLD[flat]) and same(td[key], OLD[flat])
        assert key in td and key in td.keys(True)
    for key in ("b", ("b",), ("b", "d")):
        assert is_tensor_collection(td.get(key)) and td[key].batch_size == (B, T)
    for key in MISSING + [("a", "zz")]:
        assert td.get(key, 3) == 3 and td.get(key, default="x") == "x"
        assert key not in td and key not in td.keys(True) and key not in td.keys(True, True)
        with pytest.raises(KeyError):
            td[key]
        if key != ("a", "zz"):
            assert td.get(key) is None and td.get(key, None) is None
    with pytest.raises((KeyError, ValueError), match="a"):
        td.get(("a", "zz"))  # through a tensor
    for key in (1, None, (), ("b", 1)):
        with pytest.raises((TypeError, KeyError)):
            key in td.keys(True)  # noqa: B015
    assert "b" in td.keys() and ("b", "c") not in td.keys()
    for index in (0, (0, 1), slice(1), ..., None, (slice(None), 0)):
        assert same(td.get_at("a", index), plain["a"][index])
    assert td.get_at("b", 0).batch_size == (T,) and td.get_at("zz", 0) is None
    assert td.get_at("zz", 0, None) is None and td.get_at(("b", "zz"), 0, default=5) == 5
    assert td.get_item_shape("a") == (B, T, A) and td.get_item_shape("b") == (B, T)
    with pytest.raises(KeyError):
        td.get_item_shape("zz")
    assert td.entry_class("b") is type(td["b"]) and issubclass(td.entry_class(C), torch.Tensor)


@readable
def test_listing(kind):
    td = kind()
    assert list(td.keys()) == ["a", "b"] and list(td.keys(False, True)) == ["a"]
    assert list(td.keys(True)) == ALL  # a nested container is listed after its content
    assert list(td.keys(True, True)) == LEAVES
    assert list(td.keys(include_nested=True, leaves_only=True)) == LEAVES
    for args in ((), (False, True), (True,), (True, True)):
        for sort in (False, True):
            keys, values = list(td.keys(*args, sort=sort)), list(td.values(*args, sort=sort))
            items = list(td.items(*args, sort=sort))
            assert {key for key, _ in items} == set(keys) and len(values) == len(keys)
            assert not sort or [key for key, _ in items] == keys
            for (key, value), other in zip(items, values, strict=True):
                assert type(value) is type(other) and value.shape == other.shape
                assert is_tensor_collection(value) or same(value, td[key])
        assert len(td.keys(*args)) == len(keys)
    assert td.depth == 2 and len(td) == B and not td.is_empty()
    rows = list(td)
    assert [row.batch_size for row in rows] == [(T,)] * B
    assert all(same(row["a"], OLD["a"][i]) for i, row in enumerate(rows))
    assert (td == td.clone()).all()
    plain = td.to_dict()
    assert type(plain["b"]) is type(plain["b"]["d"]) is dict and same(plain["b"]["d"]["e"], OLD[E])


def test_sorted_lists_leaves_and_sets_of_keys():
    td = TensorDict({"b": {"z": 1, "y": 2}, "a": 1})
    assert list(td.keys(sort=True)) == td.sorted_keys == ["a", "b"]
    td["aa", "c"] = td["b.x"] = 1
    nested = ["a", "aa", ("aa", "c"), "b", "b.x", ("b", "y"), ("b", "z")]  # as if joined by dots
    assert list(td.keys(True, sort=True)) == [k for k, _ in td.items(True, sort=True)] == nested
    leaves_only = [key for key in nested if key not in ("aa", "b")]
    assert list(td.keys(True, True, sort=True)) == leaves_only
    td = TensorDict({"s": "x", "b": {"t": "y", "u": 1}})
    assert list(td.keys(True, True)) == [("b", "u")] and list(td.keys()) == ["s", "b"]
    shown = list(td.keys(True, True, is_leaf=is_leaf_nontensor))
    assert shown == ["s", ("b", "t"), ("b", "u")] and set(td.keys(True)) == {*shown, "b"}
    assert "b" in make().keys(True, True, is_leaf=lambda cls: cls is TensorDict)
    keys = make().keys()
    assert keys == {"a", "b"} and set({**make()}) == {"a", "b"}
    nested = make().keys(True, sort=True)
    for names, keys in (({"a", "b"}, make().keys()), ({"a", C, E, *LEVELS}, nested)):
        for op in (operator.and_, operator.or_, operator.sub, operator.xor):
            for mine, other in ((keys, {"a", "q"}), ({"a", "q"}, keys)):
                left, right = (names if side is keys else side for side in (mine, other))
                assert op(mine, other) == op(left, right) and type(op(mine, other)) is set
        assert {"a"} < keys <= names <= keys and not keys.isdisjoint({"a"})
    assert "('b', 'c')" in repr(make().keys(True))
    for empty in (TensorDict(), TensorDict({"a": {"b": {}}})):
        assert empty.is_empty() and len(empty) == 0
    assert TensorDict().depth == TensorDict(a=1).depth == len(TensorDict(a=torch.ones(3))) == 0
    assert not TensorDict({"a": "text"}).is_empty()
    td = make().set("s", "text").set(("b", "t"), "deep")
    assert [key for key, _ in td.non_tensor_items()] == ["s"]
    found = dict(td.non_tensor_items(include_nested=True))
    assert found.keys() == {"s", ("b", "t")} and found["b", "t"].data == "deep"


def test_reads_return_the_same_objects():
    td, x = make(), torch.ones(B, T)
    td["x"] = td["n", "m"] = x
    assert td["x"] is td.get("x") is td["n", "m"] is x
    assert all(value is td[key] for key, value in td.items(True))
    assert td.setdefault("y", x) is td["y"] is x and td.rename_key_("y", "w")["w"] is x
    a, b, e = td["a"], td["b"], td[E]
    for new in (td.copy(), td.replace({C: ONE}), td.flatten_keys().unflatten_keys()):
        assert new["a"] is a and new[E] is e and new["b"] is not b
    assert td.select("a")["a"] is a and td.exclude("a")[E] is e and td.select(E)["b"] is not b
    assert td.to_dict()["a"] is a and td.split_keys({"a": "q"})[0]["q"] is a
    assert make().update({"a": WIDE})["a"] is WIDE
    assert make().update({"a": WIDE}, clone=True)["a"] is not WIDE
    other = make()
    other["b", "q"] = x
    td.update(other)
    assert td["b"] is b and td["b"] is not other["b"] and td["b", "q"] is x
    assert td.rename_keys({"a": "x", "x": "a"})["a"] is td["x"]
    assert td.pop("a") is other["a"] and td.pop("b") is b


# ------------------------------------------------------------------------------------ writing

NO_A = {"a": None}
NONE_OF_B = dict.fromkeys([C, E])
NINE = {"z": ONE * 9, "b": {"q": ONE * 9, "c": ONE * 9}}
MERGED = {"z": ONE * 9, ("b", "q"): ONE * 9, C: ONE * 9}
SOURCES = {
    "dict": lambda d: d,
    "tuple keys": lambda d: {"z": d["z"], ("b", "q"): d["b"]["q"], C: d["b"]["c"]},
    "container": lambda d: TensorDict(d, [B, T]),
    "short batch": lambda d: TensorDict(d, [B]),
    "no batch": lambda d: TensorDict(d),
    "locked": lambda d: TensorDict(d, [B, T]).lock_(),
    "lazy": lambda d: lazy_stack(list(TensorDict(d, [B, T]).unbind(0))),
    "dict of containers": lambda d: {"z": d["z"], "b": TensorDict(d["b"], [B, T])},
    "mapping": lambda d: collections.OrderedDict(d),
}
NEW = {"a": WIDE, "z": ONE}
INTO = {"a": WIDE.long(), "b": {"c": ONE.long()}}  # written in place: the dtype is unchanged
ROW = {"a": -torch.ones(T, A), "b": {"c": -torch.ones(T)}}


def at(key, value, index):
    """The entry with a value at an index."""
    out = OLD[key].clone()
    out[index] = value
    return out


INDICES = [0, (0, 1), slice(1, None), (slice(None), 1), torch.tensor([1]), [1], ...]
INDICES.append(torch.tensor([True, False]))


def names(key):
    key = unravel_key(key)
    return key if isinstance(key, tuple) else (key,)


def moved(old, new):
    """The changes when an entry, or a level with all in it, is renamed."""
    old, new, removed, added = names(old), names(new), {}, {}
    for key, value in OLD.items():
        path = names(key)
        if path[: len(old)] == old:
            added[unravel_key((*new, *path[len(old) :]))] = value
        if path[: len(old)] == old or path[: len(new)] == new:
            removed[key] = None
    return {**removed, **added}


RENAMED = [(key, "z") for key in ("a", ("a",), C, "b", ("b", "d"))]
RENAMED += [("a", Z), ("a", ("n", "z")), (C, ("n", "z")), (C, Z), ("a", "b"), ("a", "a")]
# calls that return the container itself
CHAINED = {
    **{
        f"rename {old} to {new}": (lambda td, o=old, n=new: td.rename_key_(o, n), moved(old, new))
        for old, new in RENAMED
    },
    **{
        f"set {key}": (lambda td, key=key: td.set(key, WIDE * 3), {unravel_key(key): WIDE * 3})
        for key in ("z", ("b", "z"), ("n", "m"), ("n", "m", "o"), ("b", ("d", "z")), "a", E)
    },
    "set another dtype": (lambda td: td.set(E, ONE.short()), {E: ONE.short()}),
    "set a container": (lambda td: td.set("a", {"x": ONE}), {"a": None, ("a", "x"): ONE}),
    "set a tensor": (lambda td: td.set("b", ONE), {**NONE_OF_B, "b": ONE}),
    "set a list": (lambda td: td.set("z", ONE.tolist()), {"z": ONE}),
    "set in place": (lambda td: td.set("a", WIDE, inplace=True), {"a": WIDE}),
    "set a new one in place": (lambda td: td.set("z", ONE, inplace=True), {"z": ONE}),
    "set_": (lambda td: td.set_("a", WIDE.long()).set_(E, OLD[E] * 0), {"a": WIDE, E: OLD[E] * 0}),
    "set_ a number": (lambda td: td.set_("a", 3), {"a": OLD["a"] * 0 + 3}),
    "set_ a container": (lambda td: td.set_("b", {"c": ONE}), {C: ONE}),
    **{
        f"set_at_ {i}": (lambda td, i=i: td.set_at_("a", -1.0, i), {"a": at("a", -1.0, i)})
        for i in INDICES
    },
    "set_at_ nested": (lambda td: td.set_at_(C, torch.ones(T), 1), {C: at(C, 1.0, 1)}),
    **{
        f"update by {name}": (lambda td, source=source: td.update(source(NINE)), MERGED)
        for name, source in SOURCES.items()
    },
    "update of other kinds": (
        lambda td: td.update({"a": {"x": ONE}, "b": WIDE.long()}),
        {**NO_A, **NONE_OF_B, ("a", "x"): ONE, "b": WIDE.long()},
    ),
    "update some": (lambda td: td.update(NINE, keys_to_update=["z"]), {"z": ONE * 9}),
    "update one": (lambda td: td.update(NINE, keys_to_update=(C,)), {C: ONE * 9}),
    "update none": (lambda td: td.update(NINE, keys_to_update=[]).update({}).update(td), {}),
    "update in place": (lambda td: td.update(NEW, inplace=True), NEW),
    **{
        f"update_ by {name}": (lambda td, new=new: td.update_(new), {"a": WIDE, C: ONE})
        for name, new in {
            "dict": INTO,
            "tuple keys": {"a": WIDE, C: ONE},
            "container": TensorDict(INTO, [B, T]),
            "lazy": lazy_stack(list(TensorDict(INTO, [B, T]).unbind(0))),
        }.items()
    },
    "update_ some": (lambda td: td.update_(INTO, keys_to_update=["a"]), {"a": WIDE}),
    "update_at_": (lambda td: td.update_at_(ROW, 1), {"a": at("a", -1, 1), C: at(C, -1, 1)}),
    **{
        f"update_at_ a column {i}": (
            lambda td, i=i: td.update_at_({"a": -torch.ones(B, A)}, i),
            {"a": at("a", -1, (slice(None), 0))},
        )
        for i in ((slice(None), 0), (..., 0))
    },
    "del_": (lambda td: td.del_(("b", ("d", "e"))), {E: None}),
    "clear": (lambda td: td.clear(), dict.fromkeys(LEAVES)),
    "fill_": (lambda td: td.fill_("a", 1).fill_("b", 3.0), {"a": WIDE, C: ONE * 3, E: OLD[E] * 3}),
    "zero_": (lambda td: td.zero_(), {key: value * 0 for key, value in OLD.items()}),
    **{
        f"create_nested {key}": (lambda td, key=key: td.create_nested(key), {})
        for key in ("q", ("q", "r"), ("b", "r"), ("b", "d", "q", "r"))
    },
}
# calls that return something else
OTHERS = {
    "setitem": (lambda td: td.__setitem__(("n", "m", "o"), ONE), {("n", "m", "o"): ONE}),
    "a child": (
        lambda td: (td.get("b").set("z", ONE), td["b"]["d"].del_("e")),
        {E: None, ("b", "z"): ONE},
    ),
    "setdefault of an existing one": (lambda td: td.setdefault("a", ONE), {}),
    "setdefault": (lambda td: td.setdefault(("n", "z"), ONE), {("n", "z"): ONE}),
    "pop": (lambda td: [td.pop(key) for key in ("a", ("b", ("d", "e")))], {"a": None, E: None}),
    "pop a level": (lambda td: td.pop("b"), NONE_OF_B),
    "pop none": (lambda td: [td.pop(key, 5) for key in (*MISSING, ("a", "zz"))], {}),
    "popitem": (lambda td: td.popitem(), NONE_OF_B),
    "popitem twice": (lambda td: (td.popitem(), td.popitem()), dict.fromkeys(LEAVES)),
    "delitem": (lambda td: [td.__delitem__(key) for key in (("a",), C)], {"a": None, C: None}),
    "split_keys": (lambda td: td.split_keys(["a"], inplace=True), {"a": None}),
    "separates": (lambda td: td.separates("a", E), {"a": None, E: None}),
}


@writable
def test_changes(kind):
    def check_row(row):
        call, changes = row
        td = kind()
        names, device = td.names, td.device
        lazy = is_lazy(td)
        before = list(td.tensordicts) if lazy else [td[key] for key in LEAVES if key not in changes]
        assert call(td) is td
        check(td, changes)
        assert (td.names, td.device) == (names, device)
        now = td.tensordicts if lazy else [td[key] for key in LEAVES if key not in changes]
        assert all(x is y for x, y in zip(before, now, strict=True))

    each(CHAINED, check_row)


@writable
def test_changes_with_another_result(kind):
    def check_row(row):
        call, changes = row
        td = kind()
        assert call(td) is not td
        check(td, changes)

    each(OTHERS, check_row)
    td = kind()
    assert same(td.pop("a"), OLD["a"]) and td.pop("zz", None) is None
    assert same(td.setdefault("y", ONE), ONE) and same(td.setdefault(C, ONE), OLD[C])
    assert td.pop("y", default="x").sum() == 6 and td.popitem()[0] == "b"
    with pytest.raises(KeyError):
        td.popitem()
    first, rest = (td := kind()).split_keys(["a"], inplace=True)
    assert rest is td and list(first.keys(True, True)) == ["a"]
    part = kind().separates("a", "zz", default=None)
    assert set(part.keys()) == {"a", "zz"} and (is_lazy(td) or part["zz"] is None)
    assert ("b", "d") in kind().del_(E).keys(True)  # the level stays
    part = kind().separates(E, filter_empty=False)
    assert set(part.keys(True)) == {"b", ("b", "d"), E}


def test_texts_and_new_levels():
    td = make(device="cpu", names=["x", "y"])
    td["n", "m", "o"] = ONE
    td.create_nested("q")
    for level in ("n", ("n", "m"), "q"):
        assert td[level].device == torch.device("cpu") and td[level].names == ["x", "y"]
    td["s"], td["n"] = "text", None
    td.set_non_tensor("o", [1, 2])
    assert td["s"] == "text" and td.get("s").data == "text" and td["n"] is None and "n" in td
    assert td["o"] == td.get_non_tensor("o") == [1, 2] and td.get("n", 5).data is None
    td.update({"s": "x", "n": None, "b": {"t": "y"}})
    assert td["n"] is None and td["b", "t"] == "y"
    assert td.set_("s", "z")["s"] == "z" and td.update_({"s": "y"})["s"] == "y"
    assert td.pop("s").data == "y" and make()[()].batch_size == (B, T)
    td = TensorDict({"a": {"b": {}}, "c": 1, "d": {"e": 1, "f": {}}})
    assert td.filter_empty_() is td and set(td.keys(True)) == {"c", "d", ("d", "e")}
    td = TensorDict({"a": {"b": {}}, "q": {"z": {}}})
    td["q"].lock_()
    with pytest.raises(RuntimeError, match="entry 'z'"):
        td.filter_empty_()
    assert ("a", "b") in td.keys(True)  # nothing was removed


def test_select_in_place_removes_all_or_nothing():
    td = TensorDict(a=1, n=dict(b=2, m=dict(c=3, d=4)), o=dict(e=5))
    td["n", "m"].lock_()
    with pytest.raises(RuntimeError, match="locked"):
        td.select("a", ("n", "m", "c"), inplace=True)
    assert len(list(td.keys(True, True))) == 5
    nested = td.unlock_()["n"]
    td["n", "m"].unlock_()
    assert td.select("a", ("n", "m", "c"), ("n", "m"), inplace=True) is td and td["n"] is nested
    assert list(td.keys(True)) == ["a", ("n", "m", "c"), ("n", "m", "d"), ("n", "m"), "n"]


# -------------------------------------------------------------------------- derived containers

LEVELS = {"b", ("b", "d")}
NONE = dict.fromkeys(LEAVES)
# method, arguments, changes, and the resulting levels
DERIVED = [
    ("select", (), NONE, set()),
    ("select", ("a", "a"), NONE_OF_B, set()),
    ("select", ("a", "b"), {}, LEVELS),
    ("select", (C,), {"a": None, E: None}, {"b"}),
    ("select", ("a", E), {C: None}, LEVELS),
    ("exclude", (), {}, LEVELS),
    ("exclude", ("b", C), NONE_OF_B, set()),
    ("exclude", (C,), {C: None}, LEVELS),
    ("exclude", (E,), {E: None}, LEVELS),  # the empty level stays
    ("exclude", ("zz", ("zz", "c"), ("a", "c")), {}, LEVELS),
    ("flatten_keys", (), {**NONE_OF_B, "b.c": OLD[C], "b.d.e": OLD[E]}, set()),
    ("flatten_keys", ("__",), {**NONE_OF_B, "b__c": OLD[C], "b__d__e": OLD[E]}, set()),
    ("unflatten_keys", (), {}, LEVELS),
    ("replace", ({"a": ONE},), {"a": ONE}, LEVELS),
    ("replace", ({C: ONE},), {C: ONE}, LEVELS),
    ("replace", (TensorDict({"a": ONE}, [B, T]),), {"a": ONE}, LEVELS),
    (
        "rename_keys",
        ({"a": "z", C: ("n", "c")},),
        moved("a", "z") | moved(C, ("n", "c")),
        {"n"} | LEVELS,
    ),
    ("empty", (), NONE, set()),
    ("empty", (True,), NONE, LEVELS),
    ("clone", (), {}, LEVELS),
    ("to_tensordict", (), {}, LEVELS),
]


@readable
def test_derived_containers(kind):
    def check_row(row):
        name, args, changes, levels = row
        td = kind()
        source = td.data if isinstance(td, TensorDictParams) else td
        new = getattr(source, name)(*args)
        assert new is not source
        check(new, changes)
        assert set(new.keys(True)) - set(new.keys(True, True)) == levels
        assert not new.is_locked and (new.names, new.device) == (source.names, source.device)
        assert type(new) is (TensorDict if name == "to_tensordict" else type(source))
        assert not is_lazy(new) or new.stack_dim == source.stack_dim
        new["b" if name in ("select", "exclude") else ("b", "z")] = ONE
        check(source, {})
        if name in ("clone", "to_tensordict"):
            new.zero_()
            check(source, {})
        in_place = ("select", "exclude", "flatten_keys", "unflatten_keys")
        if name in in_place and not td.is_locked and source is td:
            assert getattr(td, name)(*args, inplace=True) is td
            check(td, changes)
            assert set(td.keys(True)) - set(td.keys(True, True)) == levels
        if name == "flatten_keys":
            check(new.exclude("b").unflatten_keys(*args), {})

    each(DERIVED, check_row)


@readable
def test_selections_with_missing_keys(kind):
    td = kind()
    source = td.data if isinstance(td, TensorDictParams) else td
    parts = td.split_keys(["a"], [C])
    assert [set(part.keys(True, True)) for part in parts] == [{"a"}, {C}, {E}]
    assert all(part.batch_size == (B, T) for part in parts)
    for bad in BAD:
        assert list(td.select("a", bad, strict=False).keys(True, True)) == ["a"]
    assert td.select(("a", "zz"), strict=False).is_empty()  # there is no entry below a tensor
    assert list(td.split_keys(["zz"], default=None, strict=False)[0].keys()) == []
    assert list(td.split_keys(["zz"], default=None)[0].keys()) == ["zz"]
    parts = td.split_keys(["a"], ["zz"], strict=False)
    assert [set(part.keys(True, True)) for part in parts] == [{"a"}, set(), {C, E}]
    assert same(td.replace(a=ONE)["a"].detach(), ONE)
    assert set(td.rename_keys({"zz": "q"}, strict=False).keys(True, True)) == set(LEAVES)
    assert set(td.split_keys({"a": "q", C: ("b", "r")})[0].keys(True, True)) == {"q", ("b", "r")}
    check(source, {})


def test_options_of_derived_containers():
    td = TensorDict({"x": ONE, "s": "text", "n": None, "l": ["u", "v"], "m": {"n": None}}, [B])
    plain = td.to_dict()
    assert [plain[k] for k in "snlm"] == ["text", None, ["u", "v"], {"n": None}]
    assert set(td.to_dict(retain_none=False)) == {"x", "s", "l", "m"}
    td = make(device="cpu").empty(batch_size=[4], device="meta", names=["x"])
    assert (td.batch_size, td.device, td.names) == ((4,), torch.device("meta"), ["x"])
    flat = TensorDict({"b": {"s": "x", "e": {}}, "c": 1}).flatten_keys()
    assert flat["b.s"] == "x" and "c" in flat
    assert not any(is_tensor_collection(value) for value in flat.values(leaves_only=True))
    for source in ({"b": {"d": 2}, "b.c": 1, "x-y": 3}, {"x-y": 3, "b.c": 1, "b": {"d": 2}}):
        td = TensorDict(source).unflatten_keys()
        assert set(td.keys(True, True)) == {("b", "d"), ("b", "c"), "x-y"}
    td = TensorDict({"b": {"c": 1}, "b.c": 2})
    assert set(td.flatten_keys("_").keys()) == {"b_c", "b.c"}


# ------------------------------------------------------------------------------- joined entries


def pair(width=4):
    return TensorDict(a=torch.ones(B, 3), b=torch.zeros(B, width), batch_size=[B])


def test_join_entries():
    for out in ("c", ("n", "c")):
        for keep in (False, True):
            td = pair()
            assert td.cat_tensors("a", "b", out_key=out, dim=-1, keep_entries=keep) is td
            assert same(td[out], torch.cat([torch.ones(B, 3), torch.zeros(B, 4)], -1))
            assert set(td.keys(True, True)) == ({"a", "b", out} if keep else {out})
    for options, shape in (({}, (2, B, 3)), ({"dim": 1}, (B, 2, 3)), ({"dim": -1}, (B, 3, 2))):
        td = pair(3).stack_tensors("a", "b", out_key="c", **options)
        assert td["c"].shape == shape and list(td.keys()) == ["c"]


def test_unravel():
    for key, flat in {
        "a": "a",
        ("a",): "a",
        (("a",),): "a",
        ("a", "b"): ("a", "b"),
        ("a", ("b", "c")): ("a", "b", "c"),
        (("a", "b"), ("c", ("d",))): ("a", "b", "c", "d"),
    }.items():
        assert unravel_key(key) == flat
        assert unravel_key_list([key, "z"]) == [flat, "z"] == unravel_key_list((key, "z"))
    with pytest.raises(TypeError):
        unravel_key_list("a")
    assert unravel_key_list([]) == []


def test_modes():
    try:
        set_get_defaults_to_none(False)
        assert not get_defaults_to_none()
        for td in (make(), lazy_stack([make(), make()]), TensorDictParams(make())):
            for key in BAD:
                with pytest.raises(KeyError):
                    td.get(key)
                assert td.get(key, None) is None and td.get("a") is not None
    finally:
        set_get_defaults_to_none(True)
    assert make().get("zz") is None and lazy_legacy() is False
    with set_lazy_legacy(True):
        assert lazy_legacy() and is_lazy(torch.stack([make()] * 2, 1))
        with set_lazy_legacy(False):
            assert type(torch.stack([make()] * 2)) is TensorDict
        assert lazy_legacy()
    stacked = set_lazy_legacy(True)(lambda: torch.stack([make()] * 2))
    assert type(stacked()) is LazyStackedTensorDict and not lazy_legacy()


def test_the_check_can_fail():
    for wrong in ({"z": ONE}, {"a": WIDE}, {"a": None}):
        with pytest.raises(AssertionError):
            check(make(), wrong)


# --- selections by a function, and emptied levels ------------------------------------------------


def test_a_set_of_keys_may_be_selected_by_a_function():
    for td in (make(), lazy_stack([make(), make()])):
        td["text"] = "a string"
        ndim, calls = td.ndim, []

        def chooses(key, value, ndim=ndim, calls=calls):
            calls.append(key)
            return value.ndim == ndim

        one, two, rest = td.split_keys([("b", "d")], chooses)
        assert list(one.keys(True, True)) == [E] and list(two.keys(True, True)) == [C]
        assert set(rest.keys(True, True, is_leaf=is_leaf_nontensor)) == {"a", "text"}
        assert calls == [("a",), C]  # each tensor once, none that is taken, and no text
        mine, left = td.split_keys(lambda key, value: key[0] == "b", inplace=True)
        assert left is td and set(mine.keys(True, True)) == {C, E} and "b" not in td


def test_renaming_removes_an_emptied_nested_container():
    td = make()
    td["empty"] = TensorDict()
    for got in (td, lazy_stack([td, td])):
        got = got.rename_keys({C: "c", E: "e"})
        assert set(got.keys(True)) == {"a", "c", "e", "empty"} and sound(got)
    assert set(td.rename_keys({C: "c", E: Z}).keys(True)) == {"a", "b", Z, "c", "empty"}
    assert set(td.rename_keys({E: "e"}).keys(True)) == {"a", "b", C, "e", "empty"}


def test_notebooks_complete_the_keys():
    td = TensorDict({"a": torch.zeros(2), "b": {"c": torch.zeros(2)}}, [2])
    for kind in (td, lazy_stack([td, td]), TensorDictParams(td)):
        assert sorted(kind._ipython_key_completions_(), key=str) == [("b", "c"), "a", "b"]
