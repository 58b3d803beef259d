"""Typed containers: `@tensorclass` and subclasses of `TensorClass`."""

import copy
import dataclasses
import inspect
import pickle
from dataclasses import field
from typing import Any, Optional

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import raffia
from raffia import NonTensorData, TensorClass, TensorDict, is_tensorclass, lazy_stack, tensorclass
from tests.tensordict.invariants import sound
from tests.tensordict.kinds import apply_op, each, ops, raises
from tests.tensordict.stored import content


@tensorclass
class Point:
    x: torch.Tensor
    y: torch.Tensor = None
    tag: str = "d"

    def total(self):
        return self.x.sum()

    @property
    def doubled(self):
        return self.x * 2

    @classmethod
    def count(cls, n):
        return cls(x=torch.arange(n), batch_size=[n])

    @staticmethod
    def three():
        return 3


class Edge(TensorClass):
    weight: torch.Tensor
    name: str
    head: Optional[Point] = None  # noqa: UP045


class Cast(TensorClass["autocast"]):
    x: torch.Tensor
    i: int = 3
    f: float = 1.0
    s: str = ""
    b: bool = False
    other: Any = None


class NoCast(TensorClass["nocast"]):
    x: Any
    i: Any = None


class OnlyTensors(TensorClass["tensor_only"]):
    x: torch.Tensor
    y: torch.Tensor = None


class Frozen(TensorClass["frozen"]):
    x: torch.Tensor
    tag: str = "a"


class Shadowing(TensorClass["shadow"]):
    x: torch.Tensor
    items: str = "a"


class Derived(TensorClass):
    x: torch.Tensor
    y: torch.Tensor = None

    def __post_init__(self):
        if self.y is None:
            self.y = self.x * 2


class SelfSized(TensorClass):
    x: torch.Tensor

    def __post_init__(self):
        self.auto_batch_size_()


class Factories(TensorClass):
    x: torch.Tensor = field(default_factory=lambda: torch.ones(2))
    opts: dict = field(default_factory=lambda: None)
    only: str = field(default="kw", kw_only=True)


class Base(TensorClass):
    x: torch.Tensor
    const = 5

    def label(self):
        return "base"


class Child(Base):
    y: torch.Tensor = None

    def label(self):
        return "child of " + super().label()


@tensorclass
class Setting:
    obs: torch.Tensor
    count: int = 3
    rate: float | None = 0.5
    flag: "bool" = False
    anything: Any = None


def points(**more):
    return Point(x=torch.arange(12.0).reshape(3, 4), batch_size=[3], **more)


def edge():
    return Edge(torch.zeros(3), "e", points(tag="h"), batch_size=[3])


# ------------------------------------------------------------------- methods of containers

MASK = torch.tensor([True, False, True])
DOES = {
    str(op): lambda p, op=op: apply_op(p, op)
    for op in ops(view=[(-1, 1)], unsqueeze=[0], expand=[(2, 3)])
    + ops(gather=[(0, torch.tensor([0]))], repeat=[2], clone=[False], copy=[()], sum=[()])
    + ops(mean=[()], double=[()], to=[torch.float64, "cpu"], apply=[lambda x: x + 1])
    + ops(named_apply=[lambda name, x: x * 0 if name == "x" else x], memmap=[()], memmap_=[()])
    + ops(auto_batch_size_=[()])
} | {
    "row": lambda p: p[0],
    "split": lambda p: p.split([1, 2])[1],
    "unbind": lambda p: torch.unbind(p, 0)[0],
    "transposed": lambda p: p.expand(2, 3).transpose(0, 1).permute(1, 0).flatten(),
    "torch.stack": lambda p: torch.stack([p, p]),
    "torch.cat": lambda p: torch.cat([p, p]),
    "zeros_like": torch.zeros_like,
    "clone": torch.clone,
    "deepcopy": copy.deepcopy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "where": lambda p: torch.where(MASK, p, p + 1),
    "vmap": lambda p: torch.vmap(lambda row: row + 1)(p),
    "tree_map": lambda p: pytree.tree_map(lambda x: x + 1, p),
    "arithmetic": lambda p: -abs(1 + p * p) / 2,
    "eq": lambda p: p == p.clone(),
    "requires_grad_": lambda p: p.requires_grad_().detach(),
    "data": lambda p: p.data,
}
CHANGES = {  # of the fields of a point
    "select": lambda p: p.select("x"),
    "update": lambda p: p.update({"x": torch.ones(3)}),
    "update_": lambda p: p.update_({"x": torch.full((3, 4), 5.0)}),
    "set": lambda p: p.set("tag", "new").set_("x", torch.ones(3, 4)),
    "replace": lambda p: p.replace(x=torch.ones(3)),
}


@pytest.mark.parametrize("make", [points, edge], ids=["flat", "nested"])
def test_methods_equal_those_of_the_container(make):
    def check(do):
        one, plain = make(), make().to_tensordict()
        got, want = do(one), do(plain)
        assert type(got) is type(one) and (make is points or type(got.head) is Point)
        assert content(got.to_tensordict()) == content(want)
        assert got.device == want.device and got.batch_size == want.batch_size

    each(DOES | CHANGES if make is points else DOES, check)


# ------------------------------------------------------------------------------ fields


def test_construction():
    p = Point(torch.zeros(3), torch.ones(3), "z", batch_size=[3])
    assert p.tag == "z" and p.y.tolist() == [1.0] * 3
    p = points()
    assert (p.y, p.tag, p.device) == (None, "d", None)
    assert (len(p), p.numel(), p.ndim, p.shape) == (3, 3, 1, (3,))
    assert Point(x=torch.zeros(3), batch_size=3).batch_size == (3,)
    dressed = Point(x=torch.zeros(3), batch_size=[3], names=["t"], device="cpu")
    assert dressed.names == ["t"] and dressed.device == torch.device("cpu")
    assert Point(x=[1, 2, 3], batch_size=[3]).x.tolist() == [1, 2, 3] and Point(x=1.0).x == 1
    for x in (torch.zeros(3), nn.Parameter(torch.zeros(3))):
        assert Point(x=x).x is x
    params = list(inspect.signature(Point).parameters)
    assert params == ["x", "y", "tag", "batch_size", "device", "names"]
    assert Point(x=1.0, lock=True).is_locked
    a, b = Factories(), Factories(only="z")
    assert a.x.tolist() == [1.0, 1.0] and a.x.data_ptr() != b.x.data_ptr()
    assert (a.only, b.only, a.opts) == ("kw", "z", None)


def test_fields_are_read_and_written():
    p = points()
    assert p.get("x") is p.x and p.get("tag") == "d" and p.get("y") is p.get("zz") is None
    assert p.get("zz", "dflt") == "dflt"
    assert list(p.keys()) == ["x", "tag"] and list(p.keys(True, True)) == ["x"]  # None is no key
    td = TensorDict(p=p)
    for whole in (td.to_dict(), td.to_tensordict(retain_none=True)):  # where it is one
        assert (td == whole).all() and not (td != whole).any()
    with pytest.raises(KeyError, match="'y'"):
        td == {"p": {**p.to_dict(), "y": 1.0}}  # noqa: B015 (it raises)
    assert len(list(p.values())) == 2 and isinstance(dict(p.items())["tag"], NonTensorData)
    for name, value, want in [
        ("x", torch.ones(3, 2), [[1.0] * 2] * 3),
        ("tag", "new", "new"),
        ("y", [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]),
        ("y", None, None),
        ("tag", ["a", "b", "c"], ["a", "b", "c"]),
        ("tag", torch.zeros(3), [0.0] * 3),  # a field may change its kind
    ]:
        setattr(p, name, value)
        got = getattr(p, name)
        assert (got.tolist() if isinstance(got, torch.Tensor) else got) == want
        assert p.set(name, value) is p and name in (*p.keys(), "y")
    p = points(tag=["a", "b", "c"])
    assert p[1].tag == "b"
    x = p.x
    p.update_(Point(x=torch.full((3, 4), 6.0), batch_size=[3]))
    assert p.x is x and x[0, 0] == 6
    p.update(Point(x=torch.zeros(3, 4), tag="u", batch_size=[3]))
    assert p.x.sum() == 0 and p.tag == "u" and p.x is not x
    del p.x
    assert p.x is None and "x" not in p.keys()
    e = edge()
    assert e.get(("head", "x")) is e.head.x and type(e[0].head) is Point
    e.set(("head", "x"), torch.ones(3))
    assert e.head.x.tolist() == [1.0] * 3 and e[0].head.batch_size == ()
    e.head = None
    assert e.head is None and e[0].head is None
    none = Point(x=None, y=torch.zeros(3), batch_size=[3])
    assert none.x is None and torch.stack([none, none]).x is None
    s = Setting(obs=torch.zeros(2), batch_size=[2]).update({"anything": {"a": torch.ones(2)}})
    assert s.anything.batch_size == (2,)


def test_methods_and_kinds():
    p = points()
    assert p.total() == 66 and p.doubled.sum() == 132
    assert Point.count(2).x.tolist() == [0, 1] and Point.three() == 3 == p.three()
    assert all([is_tensorclass(one) for one in (p, Point, Edge)])
    assert raffia.is_tensor_collection(p) and raffia.is_tensor_collection(Point)
    assert not is_tensorclass(TensorDict()) and not is_tensorclass(torch.zeros(1))
    assert isinstance(p, Point) and not isinstance(p, TensorDict) and tensorclass(Point) is Point
    assert issubclass(Edge, TensorClass) and isinstance(edge(), TensorClass)
    assert dataclasses.is_dataclass(Point) and dataclasses.is_dataclass(p)
    for cls, names in ((Point, "x y tag"), (Child, "x y")):
        assert [f.name for f in dataclasses.fields(cls)] == names.split()
    assert Point.__name__ == "Point" and Point.__module__ == __name__
    c = Child(x=torch.zeros(2), y=torch.ones(2), batch_size=[2])
    assert c.label() == c[0].label() == "child of base" and isinstance(c, Base) and c.const == 5
    assert type(c[0]) is Child and Base(x=torch.zeros(2)).label() == "base"

    @tensorclass
    class Quiet:
        x: torch.Tensor = field(repr=False)
        y: torch.Tensor = None

    assert "x=" not in repr(Quiet(x=1)) and "y=None" in repr(Quiet(x=1))


def test_inside_containers():
    p = points()
    td = TensorDict(p=p, batch_size=[3])
    assert td["p"] is td.get("p") is p and td["p", "x"] is p.x and td["p", "tag"] == "d"
    assert set(td.keys(True)) == {"p", ("p", "x"), ("p", "tag")}
    assert list(td.keys(True, True)) == [("p", "x")]
    for out in (td[0], td.clone(), td + 1, torch.stack([td, td]), td.select(("p", "x"))):
        assert type(out["p"]) is Point
    td.set(("p", "x"), torch.ones(3))
    assert p.x.tolist() == [1.0] * 3 and type(td.to_tensordict()["p"]) is TensorDict
    assert set(td.flatten_keys(".").keys()) == {"p.x", "p.tag"}
    assert td.to_dict()["p"]["tag"] == "d" and td.lock_()["p"].is_locked
    with pytest.raises(RuntimeError, match="locked"):
        td["p"].x = torch.ones(3)
    p = Point(x=torch.zeros(3))
    assert TensorDict(p=p, batch_size=[3])["p"].batch_size == (3,) and p.batch_size == ()
    lz = lazy_stack([TensorDict(p=Point(x=torch.zeros(3))), TensorDict(p=Point(x=torch.ones(2)))])
    assert isinstance(lz, raffia.LazyStackedTensorDict)
    assert type(lz[1]["p"]) is type(lz.get("p")) is Point and lz.get("p")[1].x.tolist() == [1, 1]
    rows = [TensorDict(i=Point(x=torch.ones(n), batch_size=[n]), batch_size=[n]) for n in (2, 3)]
    padded = raffia.pad_sequence([row.exclude(("i", "tag")) for row in rows])
    assert type(padded["i"]) is Point and padded["i"].x.shape == (2, 3)


def test_conversions(tmp_path):
    p, full = points(), {"x": torch.zeros(3, 2), "y": torch.zeros(3), "tag": "f"}
    td = p.to_tensordict()
    assert type(td) is TensorDict and set(td.keys()) == {"x", "tag"} and td.batch_size == (3,)
    assert p.to_tensordict(retain_none=True)["y"] is None
    out = p.select("x", as_tensordict=True)
    assert type(out) is TensorDict and list(out.keys()) == ["x"] and out["x"] is p.x
    q = Point.from_tensordict(td)
    assert content(q) == content(p) and q.x is td["x"]
    q.x = torch.ones(3)
    assert td["x"].tolist() == [1.0] * 3  # it wraps, it does not copy
    q = Point.from_tensordict(TensorDict(x=torch.zeros(3), batch_size=[3]), {"tag": "nt"})
    assert q.tag == "nt" and q.y is None
    d = p.to_dict()
    assert set(d) == {"x", "y", "tag"} and d["y"] is None
    assert set(p.to_dict(retain_none=False)) == {"x", "tag"}
    assert content(Point.from_dict(d, batch_size=[3])) == content(p)
    assert Point.from_dict(full).batch_size == ()
    assert Point.from_dict(full, auto_batch_size=True).batch_size == (3,)
    zeros = Point(x=torch.zeros(3, 4), batch_size=[3])
    zeros.load_state_dict(p.state_dict())
    assert content(zeros) == content(p)
    holder = TensorDict(p=p)
    assert lazy_stack([holder, holder]).state_dict()["p.x"].shape == (2, 3, 4)
    like = TensorDict(p=p, batch_size=[3]).from_dict_instance({"p": {"x": p.x}})
    assert type(like["p"]) is Point and like["p"].tag == Point(x=p.x).tag
    mapped = p.memmap(tmp_path)
    assert type(mapped) is Point and mapped.is_memmap() and mapped.is_locked
    for read in (Point.load_memmap, TensorDict.load_memmap, raffia.load_memmap):
        assert content(read(tmp_path)) == content(p)


# ---------------------------------------------------------------------------- errors

MISTAKES = [
    (lambda: Point(x=torch.zeros(3, 2), batch_size=[2]), RuntimeError, "dimension mismatch.*'x'"),
    (lambda: Point(), TypeError, "missing 1 required positional argument: 'x'"),
    (lambda: Point(x=torch.zeros(3), zz=1), (AttributeError, TypeError), "zz"),
    (lambda: Point(torch.zeros(3), x=torch.zeros(3)), (ValueError, TypeError), "x"),
    (lambda: setattr(points(), "zz", 1), AttributeError, "zz"),
    (lambda: points().zz, AttributeError, "zz"),
    (lambda: points().set("zz", torch.ones(3)), AttributeError, "zz"),
    (lambda: points()["x"], ValueError, "Invalid indexing"),
    (lambda: points().__setitem__(0, "a"), ValueError, "__setitem__"),
    (lambda: points().__setitem__(0, edge()[0]), ValueError, "same-class or compatible"),
    (lambda: torch.stack([points(), edge()]), TypeError, ""),
    (lambda: lazy_stack([Point(x=torch.zeros(3)), Point(x=torch.ones(2))]).x, RuntimeError, "x"),
    (lambda: bool(points()), RuntimeError, "boolean"),
    (lambda: Point.from_tensordict({"x": torch.zeros(3)}), RuntimeError, "TensorDictBase"),
    (lambda: Point.from_dict({"x": 1, "qq": 2}), ValueError, "qq"),
    (lambda: Cast(x="not a tensor"), TypeError, "cast"),
    (lambda: TensorClass["wrong"], (TypeError, ValueError), "wrong"),
    (lambda: setattr(Frozen(torch.zeros(2)), "x", 1), dataclasses.FrozenInstanceError, "x"),
    *[
        (lambda n=name: declared(TensorClass, x=torch.Tensor, **{n: str}), AttributeError, words)
        for name in ("clone", "device", "items", "batch_size")
        for words in (name, "shadow")
    ],
    (lambda: declared(TensorClass["autocast", "nocast"], i=int), TypeError, "exclusive"),
    (lambda: declared(TensorClass["tensor_only"], n=int), TypeError, "types to be Tensor.*'n'"),
]


def declared(base, **annotations):
    return type("Made", (base,), {"__annotations__": annotations})


def setting():
    return Setting(obs=torch.zeros(2, 4), batch_size=[2])


def test_errors():
    each([(call, error, f"(?s){words}") for call, error, words in MISTAKES], raises)


# ------------------------------------------------------------------------ options of a class


def test_autocast():
    c = Cast(x=[1, 2, 3], i=torch.tensor(4), f=torch.tensor(2), b=torch.tensor(True), s="q")
    assert isinstance(c.x, torch.Tensor) and c.x.tolist() == [1, 2, 3]
    assert [(type(v), v) for v in (c.i, c.f, c.b, c.s)] == [
        *((int, 4), (float, 2.0), (bool, True), (str, "q"))
    ]
    c.i = "7"
    assert c.i == 7
    for argument, want in ((2.7, 2), (True, 1), ({"b": 1}, {"b": 1})):  # a dict is no number
        field = Cast(x=torch.zeros(2), i=argument).i
        assert field == want and type(field) is type(want)
    assert Cast(x=torch.zeros(2), other=[1, 2]).other == [1, 2]
    c = Cast(x=torch.zeros(2), i=5, batch_size=[2])
    assert c[0].i == 5 and torch.stack([c, c])[1].i == 5

    @tensorclass(autocast=True)
    class Later:
        i: "int"
        x: "torch.Tensor" = None

    assert Later(i=torch.tensor(3)).i == 3 and Later(i=1, x=[1.0]).x.tolist() == [1.0]


def test_options():
    n = NoCast(x=1.0, i=2)
    assert type(n.x) is float and type(n.i) is int and NoCast(x="s").x == "s"
    assert isinstance(NoCast(x=torch.zeros(2)).x, torch.Tensor)
    t = OnlyTensors(x=[1.0, 2.0])
    assert t.x.tolist() == [1.0, 2.0] and t.y is None
    t.x = torch.zeros(2)
    assert t.x.sum() == 0 and t.to_tensordict()["x"].sum() == 0
    f = Frozen(x=torch.zeros(2))
    f.x.fill_(1)
    assert f.is_locked and f.x.sum() == 2
    s = Shadowing(torch.zeros(2))
    assert s.items == "a"
    s.items = "b"
    assert s.items == s.clone().items == "b"

    @tensorclass(shadow=True)
    class ShadowingNames:
        batch_size: torch.Tensor
        items: str = "k"

    shadowing = ShadowingNames(batch_size=torch.ones(2))
    assert shadowing.batch_size.tolist() == shadowing.clone().batch_size.tolist() == [1, 1]
    assert shadowing.shape == () and shadowing.items == "k"

    class A(TensorClass, autocast=True):
        i: int = 1

    class Both(TensorClass["autocast", "frozen"]):
        i: int = 1

    @tensorclass(nocast=True)
    class B:
        i: int = 1

    assert A(i=torch.tensor(2)).i == Both(i=torch.tensor(2)).i == 2 and type(B(i=2).i) is int
    with pytest.raises(dataclasses.FrozenInstanceError):
        Both().i = 3

    @tensorclass(tensor_only=True)
    class Nested:
        td: TensorDict
        other: Setting
        x: torch.Tensor | None = None

    other = Setting(obs=torch.zeros(2), batch_size=[2])
    nested = Nested(td=TensorDict(a=torch.ones(2)), other=other, batch_size=[2])
    assert type(nested[0].other) is Setting and nested.td.batch_size == (2,)

    class Named(TensorClass, kw_only=True):
        x: torch.Tensor = None
        y: torch.Tensor

    with pytest.raises(TypeError, match="takes 1 positional arguments but 2 were given"):
        Named(torch.ones(1))
    assert Named(y=torch.ones(1)).y == 1
    with pytest.raises(TypeError, match="cannot inherit frozen dataclass from a non-frozen one"):

        class Shut(Base, frozen=True):
            y: torch.Tensor


def test_cast_filter_selects_the_fields_to_cast():
    class Mesh(TensorClass, cast_filter=lambda key, value: value.is_floating_point()):
        points: torch.Tensor
        cells: torch.Tensor

    mesh = Mesh(points=torch.ones(2, 3), cells=torch.ones(4, dtype=torch.int64))
    for cast in (mesh.half(), mesh.to(torch.float16), mesh.type(torch.float16)):
        assert (cast.points.dtype, cast.cells.dtype) == (torch.float16, torch.int64)
    assert mesh.to(torch.float16, cast_filter=None).cells.dtype == torch.float16
    td = TensorDict(a=torch.ones(2), n=dict(b=torch.ones(2)))
    cast = td.to("cpu", torch.float64, cast_filter=lambda key, value: key == ("n", "b"))
    assert (cast["a"].dtype, cast["n", "b"].dtype) == (torch.float32, torch.float64)
    assert td.half(cast_filter=lambda key, value: key == ("a",))["n", "b"].dtype == torch.float32


def test_a_number_is_stored_unchanged_with_batch_dimensions():
    s = setting()
    assert (s.count, s.rate, s.flag) == (3, 0.5, False)
    assert s[0].count == 3 and s.clone().view(2, 1).rate == 0.5
    assert torch.stack([s, s.replace(count=4)]).count == [[3, 3], [4, 4]]
    s.count, s.rate = 7, 2
    assert s.count == s.to_dict()["count"] == 7 and s.rate == 2
    assert Setting(obs=torch.zeros(4)).count.shape == ()  # without batch dimensions: a tensor
    td = TensorDict.from_dict({"a": 3, "n": {"b": 1.5, "c": torch.ones(2)}}, batch_size=[2])
    assert td["a"] == 3 and td["n", "b"] == 1.5 and td[1]["n", "b"] == 1.5
    assert TensorDict.from_dict({"a": 3})["a"].shape == ()
    assert Setting.from_dict({"obs": torch.zeros(2), "anything": 4}, batch_size=[2]).anything == 4


# ------------------------------------------------------------------------------ __post_init__

INITIALISED = []


@tensorclass
class Counted:
    x: torch.Tensor

    def __post_init__(self):
        INITIALISED.append(self.x.shape)


class CountedOnce(TensorClass, skip_post_init_on_rebuild=True):
    x: torch.Tensor

    def __post_init__(self):
        INITIALISED.append(self.x.shape)


OPERATIONS = [
    *(lambda m: m[0], lambda m: m + 1, lambda m: torch.stack([m, m]), lambda m: m.clone()),
    *(lambda m: m.to(torch.float64), lambda m: m.apply(lambda x: x)),
    lambda m: pytree.tree_map(lambda x: x, m),
]
REBUILDS = [
    *OPERATIONS,
    lambda a: a.replace(x=torch.ones(3)),
    lambda a: TensorDict(a=a, batch_size=[3])[0],
]


@pytest.mark.parametrize("operation", REBUILDS)
def test_post_init_is_called_for_results_unless_switched_off(operation):
    a, b = Counted(x=torch.ones(3), batch_size=[3]), CountedOnce(x=torch.ones(3), batch_size=[3])
    INITIALISED.clear()
    operation(b)
    assert not INITIALISED
    operation(a)
    assert len(INITIALISED) == 1
    a.empty()
    pytree.tree_map(lambda x: None, a)
    assert len(INITIALISED) == 1


def test_fields_set_in_post_init():
    ones = torch.ones(2)
    for d, y in (
        (Derived(x=ones, batch_size=[2]), 2.0),
        (Derived(x=ones, y=torch.zeros(2), batch_size=[2]), 0.0),  # kept in results
        (Derived.from_tensordict(TensorDict(x=ones, batch_size=[2])), 2.0),
    ):
        assert d.y.tolist() == [y] * 2 and d[0].y == y
        assert torch.stack([d, d]).y.tolist() == [[y] * 2] * 2
    s = SelfSized(x=torch.ones(2, 3))
    assert s.batch_size == (2, 3) and s[0].batch_size == (3,)

    @tensorclass
    class Positive:
        x: torch.Tensor

        def __post_init__(self):
            self.x = self.x.abs()

    a = Positive(x=-ones, batch_size=[2]).lock_()
    assert a.view(2, 1).x.tolist() == [[1], [1]] and a.view(2, 1).is_locked

    @tensorclass
    class Doubled:
        x: torch.Tensor
        y: torch.Tensor = field(init=False)

        def __post_init__(self):
            self.y = 2 * self.x

    assert Doubled(ones, batch_size=[2]).y.tolist() == [2, 2]
    assert Doubled(x=ones, batch_size=[2])[0].y == 2


# --------------------------------------------------------------------- subclasses of TensorDict


class Mine(TensorDict):
    def total(self):
        return sum([leaf.sum() for leaf in self.values(True, True)])


def test_a_subclass_keeps_its_class():
    mine = Mine(a=torch.ones(2, 3), n=TensorDict(b=torch.ones(2), batch_size=[2]), batch_size=[2])
    for operation in (
        *OPERATIONS,
        *(torch.zeros_like, copy.deepcopy, lambda m: m[torch.tensor([True, False])]),
        *(lambda m: m.copy(), lambda m: m.view(2, 1), lambda m: m.unbind(0)[1], lambda m: m.data),
        *(lambda m: m.select("a"), lambda m: m.sum(dim=0), lambda m: m.empty()),
        *(lambda m: torch.cat([m, m]), lambda m: type(m).from_dict({"a": torch.ones(2)})),
    ):
        out = operation(mine)
        assert type(out) is Mine and type(mine["n"]) is TensorDict
        out.total()
    assert type(torch.stack([mine, mine.to_tensordict()])) is TensorDict


def test_rows_of_a_typed_container_make_an_entry_of_its_class():
    @tensorclass
    class Pair:
        x: torch.Tensor
        inner: "Pair" = None
        label: str = None

    inner = Pair(torch.ones(3), label="inner", batch_size=[3])
    pair = Pair(torch.ones(3), inner, "outer", batch_size=[3])
    row = TensorDict(p=pair, n={"p": pair}, batch_size=[3])
    dense = TensorDict(a=torch.zeros(2, 3), batch_size=[2, 3], names=["t", "n"], device="cpu")
    for td in (
        dense,
        lazy_stack(list(TensorDict(a=torch.zeros(2, 3), batch_size=[2, 3]).unbind(1)), 1),
    ):
        td[1] = row
        for made in (td["p"], td["n", "p"]):
            assert type(made) is type(made.inner) is Pair and made.batch_size == (2, 3)
            assert made.x.sum(1).tolist() == made.inner.x.sum(1).tolist() == [0, 3]
            assert made[1, 0].label == "outer" and made[1, 0].inner.label == "inner"
            assert made.names == td.names and made.device == td.device and sound(td)
    whole = Pair(torch.zeros(2, 3), batch_size=[2, 3])
    whole[0] = pair
    assert type(whole.inner) is Pair and whole.inner.x.sum(1).tolist() == [3, 0]
