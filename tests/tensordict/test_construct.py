"""Construction: values that a container accepts, their conversion, and shapes that are refused.

B=2, T=3, A=5 are all different, so that a swapped dimension shows.
"""

import collections
import dataclasses

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_flatten

from raffia import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    from_any,
    from_dataclass,
    from_dict,
    from_namedtuple,
    from_pytree,
    from_tuple,
    fromkeys,
    is_tensorclass,
    lazy_stack,
    make_tensordict,
    merge_tensordicts,
)
from tests.tensordict.invariants import sound
from tests.tensordict.kinds import check_same, each, leaves, raises

B, T, A = 2, 3, 5
CPU, META = torch.device("cpu"), torch.device("meta")


@dataclasses.dataclass
class Point:
    x: torch.Tensor
    label: str
    inner: dict


def ones(*shape):
    return torch.ones(shape)


def make(**options):
    below = {"c": torch.zeros(B, T), "d": {"e": ones(B, T, 4)}}
    return TensorDict({"a": torch.arange(30.0).reshape(B, T, A), "b": below}, [B, T], **options)


C = torch.zeros(B, T)
SOURCES = {
    "nested dict": {"a": ones(B), "b": {"c": C}},
    "tuple keys": {"a": ones(B), ("b", "c"): C},
    "nested tuple keys": {("a",): ones(B), (("b",), "c"): C},
    "same batch": {"b": TensorDict({"c": C}, [B]), "a": ones(B)},
    "shorter batch": {"b": TensorDict({"c": C}), "a": ones(B)},
    "longer batch": {"b": TensorDict({"c": C}, [B, T]), "a": ones(B)},
    "OrderedDict": collections.OrderedDict(a=ones(B), b={"c": C}),
    "UserDict": collections.UserDict({"a": ones(B), "b": {"c": C}}),
    "container": TensorDict({"a": ones(B), "b": {"c": C}}, [B]),
    "container without batch": TensorDict({"a": ones(B), "b": {"c": C}}),
}


def test_every_source_gives_the_same_container():
    def check(source):
        td = TensorDict(source, batch_size=[B])
        assert type(td) is TensorDict and td.batch_size == (B,) and sound(td)
        assert set(leaves(td)) == {"a", ("b", "c")} and td["b"].batch_size[:1] == (B,)
        assert (td["a"] == 1).all() and td["b", "c"].shape == (B, T)
        td["z"] = ones(B)
        assert "z" not in source
        if isinstance(source, dict) and isinstance(source.get("b"), dict):
            td["b", "d"] = source["b"]["later"] = ones(B)
            assert list(source["b"]) == ["c", "later"] and ("b", "later") not in td.keys(True)

    each(SOURCES, check)
    td = TensorDict(batch_size=[B], device="cpu", names=["time"], lock=True)
    assert (td.batch_size, td.device, td.names, td.is_locked) == ((B,), CPU, ["time"], True)
    td = TensorDict({"z": 1, "a": 2, "m": {"y": 3, "b": 4}})
    assert list(td.keys(True)) == ["z", "a", ("m", "y"), ("m", "b"), "m"]
    td = TensorDict({"a.b": 1, "a": {"b": 0}, ("a", "c"): 2, "e": {}})
    assert td["a.b"] == 1 and td["a", "b"] == 0 and set(td["a"].keys()) == {"b", "c"}
    assert type(td["e"]) is TensorDict and td["e"].is_empty()
    x, p = ones(B), torch.nn.Parameter(ones(B))
    td = TensorDict({"x": x, "p": p, "n": {"x": x}}, [B])
    assert td["x"] is td["n", "x"] is x and td["p"] is p


VALUES = [
    (1, torch.tensor(1)),
    (2.5, torch.tensor(2.5)),
    ([], torch.tensor([])),
    (True, torch.tensor(True)),
    ([1.5, 2], torch.tensor([1.5, 2.0])),
    ([[True, False]], torch.tensor([[True, False]])),
    (np.array([True, False]), torch.tensor([True, False])),
    (np.float32(3), torch.tensor(3.0)),
    (np.array(3.0), torch.tensor(3.0, dtype=torch.float64)),
    (np.ones((2, 3), dtype=np.int16), torch.ones(2, 3, dtype=torch.int16)),
    (torch.Size([2, 3]), torch.tensor([2, 3])),
    ([torch.ones(2), torch.zeros(2)], torch.tensor([[1.0, 1.0], [0.0, 0.0]])),
]


def test_values():
    for value, expected in VALUES:
        nested = TensorDict({"n": {"x": value}})["n"]
        for td in (TensorDict({"x": value}), TensorDict().set("x", value), nested):
            assert type(td["x"]) is torch.Tensor and td["x"].dtype == expected.dtype
            assert torch.equal(td["x"], expected)
    for value in ("text", b"bytes", {1, 2}, object, CPU, len, range(3), None):
        td = TensorDict({"x": value, "n": {"x": value}}, [B])
        assert td["x"] == td["n", "x"] == td.to_dict()["x"] == value and "x" in td
        assert isinstance(td.get("x"), NonTensorData) and td.get("x").data == value
        assert td.get("x").batch_size == (B,)
    td = TensorDict({"x": ["u", "v"]}, [B])
    assert isinstance(td.get("x"), NonTensorStack) and td.get("x").batch_size == (B,)
    assert td["x"] == td.to_dict()["x"] == ["u", "v"] and td[0]["x"] == "u"
    lazy = lazy_stack([TensorDict(a=ones(2)), TensorDict(a=ones(3))])
    td = TensorDict({"x": lazy})
    assert isinstance(td["x"], LazyStackedTensorDict) and td["x"].batch_size == (2,)


# -------------------------------------------------------------------------------- batch sizes


def test_forms_of_a_batch_size():
    forms = {None: (), B: (B,), (): (), (B, T): (B, T), torch.Size([B, T]): (B, T)}
    others = [[B, T], torch.tensor([B, T]), np.array([B, T])]
    for batch, expected in [*forms.items(), *[(form, (B, T)) for form in others]]:
        td = TensorDict({"a": ones(B, T)}, batch)
        assert type(td.batch_size) is torch.Size and td.batch_size == expected
        assert td.shape == td.size() == td.batch_size
        assert td.ndim == td.batch_dims == td.dim() == td.ndimension() == len(expected)
        assert td.numel() == max(1, int(np.prod(expected)))
    assert make().size(0) == B and make().size(-1) == T


R, V = RuntimeError, ValueError
NOT_BUILT = {
    "size(2)": (lambda: make().size(2), IndexError, ""),
    "another batch": (lambda: TensorDict(make(), [T]), R, "a"),
    "a list of texts": (lambda: TensorDict({"x": ["u", "v"]}, [T]), R, "x"),
    "through a leaf": (lambda: TensorDict({"a": 1, ("a", "b"): 1}), KeyError, ""),
    "from_dict": (lambda: TensorDict.from_dict(NESTED, batch_size=[7]), R, "a"),
    "dataclass": (lambda: from_dataclass(3), TypeError, ""),
    "merge one": (lambda: merge_tensordicts(make()), R, "two"),
}
LEAF = "batch dimension mismatch.*key 'leaf'"
for shape in ((3, 2), ()):
    for entries in ({"leaf": ones(*shape)}, {"n": {"leaf": ones(*shape)}}):
        NOT_BUILT[f"{shape}, {list(entries)}"] = (lambda d=entries: TensorDict(d, [B]), R, LEAF)


def test_invalid_batch_sizes_are_refused():
    each(NOT_BUILT, raises)


SETTERS = {
    "construct": lambda inner: TensorDict({"i": inner}, [B, T]),
    "set": lambda inner: TensorDict({}, [B, T]).set("i", inner),
    "update": lambda inner: TensorDict({}, [B, T]).update({"i": inner}),
}


def test_a_nested_container_starts_with_the_batch_of_its_parent():
    """A shorter batch size is extended in a copy."""
    for batch in ((), (B,)):
        for build in SETTERS.values():
            inner = TensorDict({"c": ones(B, T), "d": {"e": ones(B, T, A)}}, batch)
            outer = build(inner)
            assert outer["i"].batch_size == outer["i", "d"].batch_size == (B, T)
            assert inner.batch_size == inner["d"].batch_size == batch
            assert outer["i", "c"] is inner["c"]
            outer["i", "z"] = ones(B, T)
            assert "z" not in inner
    for batch in ((), (4,), (4, T)):
        inner = TensorDict({"c": ones(4, T)}, batch)
        for build in SETTERS.values():
            with pytest.raises(RuntimeError, match="c"):
                build(inner)
        assert inner.batch_size == batch
    inner = TensorDict({"c": ones(B)}).lock_()
    outer = TensorDict({"i": inner}, [B])
    assert inner.is_locked and not outer["i"].is_locked


def test_auto_batch_size():
    for dims, expected in ((None, (B, T)), (0, ()), (1, (B,)), (2, (B, T)), (9, (B, T))):
        td = TensorDict(a=ones(B, T, 4), b=ones(B, T, A), e={}, f={"g": {}})
        assert td.auto_batch_size_(dims) is td and td.batch_size == expected and sound(td)
    td = TensorDict(a=ones(B, T, 4), b={"c": ones(B, A)})
    assert td.clone().auto_batch_size_()["b"].batch_size == (B, A)
    assert td.auto_batch_size_(1).batch_size == td["b"].batch_size == (B,)
    for td in (TensorDict(a=ones(B), b=ones(T)), TensorDict(a=ones(B), b=1), TensorDict()):
        assert td.auto_batch_size_().batch_size == ()
    td = TensorDict(a=ones(B), n="text").auto_batch_size_()
    assert td.batch_size == (B,) and td["n"] == "text"
    td = TensorDict(batch_size=[B, T])
    assert td.auto_batch_size_().batch_size == (B, T) and td.auto_batch_size_(1).batch_size == (B,)
    td = TensorDict({"a": ones(B, T), "s": NonTensorStack("u", "v")}, [])
    assert td.auto_batch_size_().batch_size == (B,)
    part = TensorDict(x=ones(T), batch_size=[T])
    td = TensorDict({"a": ones(B, T), "l": lazy_stack([part, part])}, [B, T])
    assert td.auto_batch_size_(0).batch_size == () and td["l"].batch_size == (B, T)


# -------------------------------------------------------------------------- from other objects

NESTED = {"a": ones(B, T), "b": {"c": torch.zeros(B, 4)}}
AUTO = {"auto_batch_size": True}
POINT = Point(ones(B), "text", {"y": ones(B, A)})
NAMED = TensorDict(a=ones(B), b={"c": torch.zeros(B, T)}).to_namedtuple()
# a constructor, its argument, and the entries
SOURCES_OF = {
    "dict": ((from_dict, TensorDict.from_dict, make_tensordict), NESTED, {"a", ("b", "c")}),
    "namedtuple": ((from_namedtuple, TensorDict.from_namedtuple), NAMED, {"a", ("b", "c")}),
    "tuple": ((from_tuple, TensorDict.from_tuple), (ones(B), (ones(B, T),)), {"0", ("1", "0")}),
    "dataclass": ((TensorDict.from_dataclass,), POINT, {"x", ("inner", "y")}),
}


@pytest.mark.parametrize("name", SOURCES_OF)
def test_from_other_objects(name):
    builders, source, keys = SOURCES_OF[name]
    for build in (*builders, from_any, TensorDict.from_any):
        for options, batch in (({}, ()), ({"batch_size": [B]}, (B,)), (AUTO, (B,))):
            td = build(source, **options)
            assert set(leaves(td)) == keys and td.batch_size == batch, build
    assert NAMED.a.equal(ones(B)) and NAMED.b.c.equal(torch.zeros(B, T))


def test_from_dict():
    one_dim = {"batch_dims": 1}
    for options, inner in ((AUTO, (B, 4)), (AUTO | one_dim, (B,)), (one_dim, (B,))):
        td = TensorDict.from_dict(NESTED, **options)
        assert td.batch_size == (B,) and td["b"].batch_size == inner
    for build in (TensorDict.from_dict, make_tensordict):
        td = build(NESTED, batch_size=[B], device="meta")
        assert td.batch_size == (B,) and td.device == td["a"].device == META
    assert TensorDict.from_dict(NESTED, batch_size=[B], names=["x"]).names == ["x"]
    td = make(device="cpu").from_dict_instance({"a": ones(B, T, A)}, batch_size=[B])
    assert type(td) is TensorDict and td.batch_size == (B,) and list(td.keys()) == ["a"]
    assert make().from_dict_instance({"a": torch.zeros(T)}).batch_size == ()
    check_same(TensorDict.from_dict(make().to_dict(), batch_size=[B, T]), make())
    assert set(leaves(make_tensordict({"a": ones(B)}, b={"c": ones(B)}))) == {"a", ("b", "c")}


def test_merge():
    one = TensorDict({"a": ones(B), "n": {"x": ones(B)}}, [B])
    two = TensorDict({"a": torch.zeros(B), "n": {"y": torch.zeros(B)}}, [B])
    merged = merge_tensordicts(one, two)
    assert set(merged.keys(True, True)) == {"a", ("n", "x"), ("n", "y")}
    assert merged["a"] is one["a"] and set(two["n"].keys()) == {"y"}
    one, two = TensorDict(a=1, b=1, s="u"), TensorDict(a=2, b=2, s="v")
    merged = merge_tensordicts(one, two, callback_exist=max)
    assert merged["a"] == 2 and merged["s"] == "u"
    merged = merge_tensordicts(one, two, TensorDict(a=3), callback_exist=max)
    assert merged["a"] == 3 and merged["b"] == 1
    assert merge_tensordicts(one, two, callback_exist={"b": torch.add})["b"] == 3


def test_from_a_dataclass():
    td = TensorDict.from_dataclass(POINT)
    assert td["label"] == "text" and td["x"] is POINT.x
    point = from_dataclass(POINT, batch_size=[])
    assert is_tensorclass(point) and point.batch_size == () and point.label == "text"
    assert torch.equal(point.x, ones(B))
    assert from_dataclass(Point(ones(B), "text", {}), batch_size=[B]).batch_size == (B,)


def test_from_trees_arrays_and_keys():
    td, x = make(), ones(B)
    assert from_any(td) is td and from_any(x) is TensorDict.from_pytree(x) is x
    assert td.to_pytree() is td
    for tree in (
        {"a": ones(B), "b": {"c": torch.zeros(B)}},
        [ones(B), torch.zeros(B)],
        (ones(B), {"x": [torch.zeros(B), ones(B)]}),
        {1: ones(B), "b": ({2: torch.zeros(B)}, ones(B))},
    ):
        td = from_pytree(tree, batch_size=[B])
        (values, spec), (back, spec_back) = tree_flatten(tree), tree_flatten(td.to_pytree())
        assert spec == spec_back and td.batch_size == (B,)
        assert all(torch.equal(x, y) for x, y in zip(values, back, strict=True))
    assert set(td.keys(True, True)) == {"1", ("b", "0", "2"), ("b", "1")}
    with pytest.raises(KeyError, match="the same name"):
        from_pytree({1: ones(B), "1": ones(B)})
    for build in (TensorDict.fromkeys, fromkeys):
        assert build(["a", "b"]).to_dict() == {"a": torch.tensor(0), "b": torch.tensor(0)}
        td = build(["a", ("b", "c")], ones(B))
        assert set(leaves(td)) == {"a", ("b", "c")} and (td["b", "c"] == 1).all()
    rows = np.array([(1, 2.0), (3, 4.0)], dtype=[("a", "i4"), ("b", "f8")])
    td = TensorDict.from_any({"r": rows})
    assert td["r"].batch_size == (2,) and td["r", "b"].tolist() == [2, 4]
    assert TensorDict.from_any(rows)["a"].tolist() == [1, 3]


def test_the_batch_size_of_a_list_is_that_of_the_stack():
    rows = [{"a": torch.zeros(3, 4)}, {"a": torch.ones(3, 4)}]
    for options, want in [
        *[(dict(batch_size=size), tuple(size)) for size in ([2], [2, 3], torch.Size([2, 3, 4]))],
        *[(dict(batch_dims=n), (2, 3, 4)[:n]) for n in (1, 2, 3)],
        (dict(auto_batch_size=True), (2, 3, 4)),
        (dict(batch_size=2), (2,)),
        ({}, (2,)),
    ]:
        for lazy in (True, False, None):
            td = TensorDict.from_list(rows, lazy=lazy, **options)
            assert td.batch_size == want and sound(td)
    assert TensorDict.from_list(rows, batch_size=[2, 3], names=["x", "y"]).names == ["x", "y"]
    for size in ([3], []):
        with pytest.raises(
            ValueError, match=r"starts with the length of the list: .*\(2, \.\.\.\)"
        ):
            TensorDict.from_list(rows, batch_size=size)


def test_names_of_a_lazy_stack_of_dicts():
    rows = [{"a": torch.zeros(3)}, {"a": torch.ones(3)}]
    for dim in (0, 1):
        options = dict(stack_dim=dim, batch_size=[3], names=["x", "y"])
        td = LazyStackedTensorDict.from_dict(rows, **options)
        assert td.names == ["x", "y"] and td.stack_dim == dim and sound(td)
    assert LazyStackedTensorDict.from_dict(rows, names=["x"]).names == ["x"]
    dense = LazyStackedTensorDict.from_dict({"a": torch.zeros(2)}, batch_size=[2], names=["x"])
    assert dense.names == ["x"]


def test_tensors_share_the_memory_of_a_struct_array_where_torch_can_view_it():
    fields = [("name", "U10"), ("age", "i4"), ("weight", "f4")]
    rows = np.array([("Rex", 9, 81.0), ("Fido", 3, 27.0)], dtype=fields)
    td = TensorDict.from_struct_array(rows)
    rows["age"] += 1
    td["weight"][0] = 5
    assert td["age"].tolist() == [10, 4] and rows["weight"].tolist() == [5, 27]
    assert (td.to_struct_array() == rows).all()
    packed = np.zeros(3, dtype=[("a", "i8"), ("b", "f4")])  # rows of 12 bytes
    constant = np.zeros(3, dtype=fields[1:])
    constant.flags.writeable = False
    for array in (packed, packed[:1], constant, rows[::-1], packed[["b"]]):
        copied = TensorDict.from_struct_array(array)
        assert copied.batch_size == array.shape
        for name in copied.keys():
            assert copied[name].tolist() == array[name].tolist()


def test_named_results_of_torch_and_lists_of_numbers_are_structure():
    found = torch.tensor([[2, 0, 1]]).max(dim=1)
    for td in (from_namedtuple(found), TensorDict.from_any(found)):
        assert td["values"].tolist() == [2] and td["indices"].tolist() == [0]
    tree = ([ones(2), ones(3)], {"list": [1, 2.5, True], "pair": (1, 2)})
    again = from_pytree(tree).to_pytree()
    assert torch.utils._pytree.tree_structure(again) == torch.utils._pytree.tree_structure(tree)
    assert [x.tolist() for x in again[1]["list"]] == [1, 2.5, True]
