"""Typed containers: `@tensorclass` and subclasses of `TensorClass`."""

import copy
import dataclasses
import inspect
import pickle
import typing
from dataclasses import field
from typing import Any, Optional

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from raffia import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorClass,
    TensorDict,
    assert_close,
    cat,
    is_tensor_collection,
    is_tensorclass,
    lazy_stack,
    load_memmap,
    maybe_dense_stack,
    pad_sequence,
    stack,
    tensorclass,
)


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

    def who(self):
        return "base"


class Child(Base):
    y: torch.Tensor = None

    def who(self):
        return "child of " + super().who()


def points(**more):
    return Point(x=torch.arange(12.0).reshape(3, 4), batch_size=[3], **more)


class TestConstruct:
    def test_keyword_and_positional(self):
        p = Point(torch.zeros(3), torch.ones(3), "z", batch_size=[3])
        assert p.x.tolist() == [0.0] * 3 and p.y.tolist() == [1.0] * 3 and p.tag == "z"
        q = Point(x=torch.zeros(3), tag="z", y=torch.ones(3), batch_size=[3])
        assert (p == q).all()

    def test_defaults(self):
        p = points()
        assert p.y is None and p.tag == "d"

    def test_batch_size(self):
        assert Point(x=torch.zeros(3)).batch_size == torch.Size([])
        assert Point(x=torch.zeros(3), batch_size=3).batch_size == torch.Size([3])
        assert points().shape == torch.Size([3]) and points().ndim == 1
        assert len(points()) == 3 and points().numel() == 3

    def test_names_and_device(self):
        assert Point(x=torch.zeros(3), batch_size=[3], names=["t"]).names == ["t"]
        assert Point(x=torch.zeros(3), batch_size=[3], device="cpu").device == torch.device("cpu")
        assert points().device is None

    def test_batch_mismatch(self):
        with pytest.raises(RuntimeError, match="batch dimension mismatch.*'x'"):
            Point(x=torch.zeros(3, 2), batch_size=[2])

    def test_missing_field(self):
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
            Point()

    def test_unknown_field(self):
        with pytest.raises((AttributeError, TypeError), match="zz"):
            Point(x=torch.zeros(3), zz=1)

    def test_field_given_twice(self):
        with pytest.raises((ValueError, TypeError), match="x"):
            Point(torch.zeros(3), x=torch.zeros(3))

    def test_values_are_made_tensors(self):
        assert Point(x=[1, 2, 3], batch_size=[3]).x.tolist() == [1, 2, 3]
        assert Point(x=1.0).x.shape == torch.Size([])

    def test_aliasing(self):
        x, par = torch.zeros(3), nn.Parameter(torch.zeros(3))
        assert Point(x=x).x is x and Point(x=par).x is par

    def test_signature(self):
        params = list(inspect.signature(Point).parameters)
        assert params[:3] == ["x", "y", "tag"]
        assert {"batch_size", "device", "names"} <= set(params)

    def test_factories(self):
        a, b = Factories(), Factories(only="z")
        assert a.x.tolist() == [1.0, 1.0] and a.x.data_ptr() != b.x.data_ptr()
        assert a.only == "kw" and b.only == "z" and a.opts is None

    def test_string_annotations(self):
        @tensorclass(autocast=True)
        class Later:
            i: "int"
            x: "torch.Tensor" = None

        assert Later(i=torch.tensor(3)).i == 3 and Later(i=1, x=[1.0]).x.tolist() == [1.0]


class TestPostInit:
    def test_runs_at_construction(self):
        assert Derived(x=torch.ones(2), batch_size=[2]).y.tolist() == [2.0, 2.0]
        assert Derived(x=torch.ones(2), y=torch.zeros(2), batch_size=[2]).y.tolist() == [0.0, 0.0]

    def test_runs_from_a_tensordict(self):
        d = Derived.from_tensordict(TensorDict(x=torch.ones(2), batch_size=[2]))
        assert d.y.tolist() == [2.0, 2.0]

    def test_results_keep_their_values(self):
        d = Derived(x=torch.ones(2), y=torch.zeros(2), batch_size=[2])
        assert d[0].y.item() == 0.0
        assert torch.stack([d, d]).y.tolist() == [[0.0] * 2] * 2

    def test_auto_batch_size(self):
        s = SelfSized(x=torch.ones(2, 3))
        assert s.batch_size == torch.Size([2, 3]) and s[0].batch_size == torch.Size([3])
        p = Point(x=torch.zeros(3, 2))
        assert p.auto_batch_size_().batch_size == torch.Size([3, 2])
        assert Point(x=torch.zeros(3, 2)).auto_batch_size_(1).batch_size == torch.Size([3])


class TestFields:
    def test_attribute_get_and_set(self):
        p = points()
        p.x = torch.ones(3, 2)
        assert p.x.shape == torch.Size([3, 2])
        p.tag = "new"
        assert p.tag == "new"
        p.y = [1.0, 2.0, 3.0]
        assert p.y.tolist() == [1.0, 2.0, 3.0]
        p.y = None
        assert p.y is None

    def test_get_and_set(self):
        p = points()
        assert p.get("x") is p.x and p.get("tag") == "d" and p.get("y") is None
        assert p.set("x", torch.ones(3)) is p
        assert p.set("tag", "new").tag == "new"
        assert p.get("zz") is None and p.get("zz", "dflt") == "dflt"

    def test_nested_keys(self):
        e = Edge(torch.zeros(3), "e", points(), batch_size=[3])
        assert e.get(("head", "x")) is e.head.x
        e.set(("head", "x"), torch.ones(3))
        assert e.head.x.tolist() == [1.0] * 3

    def test_unknown_field(self):
        p = points()
        with pytest.raises(AttributeError, match="zz"):
            p.zz = 1
        with pytest.raises(AttributeError, match="zz"):
            p.zz  # noqa: B018
        with pytest.raises(AttributeError, match="zz"):
            p.set("zz", torch.ones(3))
        with pytest.raises(ValueError, match="zz"):
            p.update({"zz": torch.ones(3)})

    def test_wrong_batch_on_set(self):
        with pytest.raises(RuntimeError, match="batch dimension mismatch"):
            points().x = torch.zeros(2)

    def test_text_index_is_not_a_field(self):
        with pytest.raises(ValueError, match="Invalid indexing"):
            points()["x"]

    def test_list_of_text_is_per_row(self):
        p = points()
        p.tag = ["a", "b", "c"]
        assert p.tag == ["a", "b", "c"] and p[1].tag == "b"

    def test_field_may_change_kind(self):
        p = points()
        p.tag = torch.zeros(3)
        assert p.tag.tolist() == [0.0] * 3
        p.x = "text"
        assert p.x == "text"

    def test_keys_items_values(self):
        p = points()
        assert list(p.keys()) == ["x", "tag"]  # what is None is not a key
        assert list(p.keys(True, True)) == ["x"]
        assert "x" in p.keys() and "y" not in p.keys()
        items = dict(p.items())
        assert items["x"] is p.x and isinstance(items["tag"], NonTensorData)
        assert len(list(p.values())) == 2

    def test_update(self):
        p = points()
        assert p.update({"x": torch.ones(3)}) is p and p.x.tolist() == [1.0] * 3
        p.update(Point(x=torch.zeros(3), tag="u", batch_size=[3]))
        assert p.x.tolist() == [0.0] * 3 and p.tag == "u"
        x = p.x
        p.update_({"x": torch.full((3,), 5.0)})
        assert p.x is x and x.tolist() == [5.0] * 3
        p.update_(Point(x=torch.full((3,), 6.0), batch_size=[3]))
        assert p.x is x and x.tolist() == [6.0] * 3

    def test_set_in_place(self):
        p = points()
        x = p.x
        p.set_("x", torch.ones(3, 4))
        assert p.x is x and x.sum() == 12

    def test_replace(self):
        p = points()
        q = p.replace(x=torch.ones(3))
        assert q.x.tolist() == [1.0] * 3 and p.x.shape == torch.Size([3, 4])
        assert dataclasses.replace(p, x=torch.ones(3)).x.tolist() == [1.0] * 3

    def test_delete(self):
        p = points()
        del p.x
        assert p.x is None and "x" not in p.keys()

    def test_methods(self):
        p = points()
        assert p.total() == 66 and p.doubled.sum() == 132
        assert Point.count(2).x.tolist() == [0, 1] and Point.three() == 3 == p.three()

    def test_fields_may_hold_none(self):
        p = Point(x=None, y=torch.zeros(3), batch_size=[3])
        assert p.x is None
        assert torch.stack([p, p]).x is None and torch.stack([p, p]).y.shape == torch.Size([2, 3])


class TestNested:
    def test_nested_class(self):
        e = Edge(torch.zeros(3), "e", points(), batch_size=[3])
        assert type(e.head) is Point and e.head.x.shape == torch.Size([3, 4])
        assert type(e[0].head) is Point and e[0].head.batch_size == torch.Size([])
        assert torch.stack([e, e]).head.x.shape == torch.Size([2, 3, 4])

    def test_optional(self):
        e = Edge(torch.zeros(3), "e", batch_size=[3])
        assert e.head is None and e[0].head is None
        e.head = points()
        assert e.head.tag == "d"
        e.head = None
        assert e.head is None

    @pytest.mark.parametrize("method", ["cat_tensors", "stack_tensors"])
    def test_joining_what_is_not_there(self, method):
        p = points()
        with pytest.raises(KeyError, match="nope"):
            getattr(p, method)("x", "nope", out_key="x")
        assert p.x.shape == (3, 4)

    def test_inside_a_tensordict(self):
        p = points()
        td = TensorDict(p=p, batch_size=[3])
        assert td["p"] is p and td.get("p") is p
        assert type(td[0]["p"]) is Point and type(td.clone()["p"]) is Point
        assert td["p", "x"] is p.x and td["p", "tag"] == "d"
        assert set(td.keys(True)) == {"p", ("p", "x"), ("p", "tag")}
        assert list(td.keys(True, True)) == [("p", "x")]
        assert type(td.apply(lambda x: x + 1)["p"]) is Point
        assert type(torch.stack([td, td])["p"]) is Point
        assert type(td.select(("p", "x"))["p"]) is Point
        td.set(("p", "x"), torch.ones(3))
        assert p.x.tolist() == [1.0] * 3
        assert type(td.to_tensordict()["p"]) is TensorDict
        assert set(td.flatten_keys(".").keys()) == {"p.x", "p.tag"}
        assert td.to_dict()["p"]["tag"] == "d"

    def test_batch_size_is_promoted_in_a_tensordict(self):
        p = Point(x=torch.zeros(3))
        td = TensorDict(p=p, batch_size=[3])
        assert td["p"].batch_size == torch.Size([3]) and p.batch_size == torch.Size([])


class TestIndexing:
    def test_read(self):
        p = points()
        assert type(p[0]) is Point and p[0].x.tolist() == [0.0, 1.0, 2.0, 3.0]
        assert p[0].tag == "d" and p[0].y is None
        assert p[1:].batch_size == torch.Size([2])
        assert p[torch.tensor([True, False, True])].batch_size == torch.Size([2])
        assert p[[0, 1]].batch_size == torch.Size([2])
        assert p[..., None].batch_size == torch.Size([3, 1])
        assert p[:2].x.data_ptr() == p.x.data_ptr()

    def test_write(self):
        p = points()
        p[0] = Point(x=torch.ones(4))
        assert p.x[0].tolist() == [1.0] * 4
        p[1] = TensorDict(x=torch.full((4,), 3.0))
        assert p.x[1].tolist() == [3.0] * 4
        p[2] = p[1]
        assert p.x[2].tolist() == [3.0] * 4

    def test_write_of_the_wrong_kind(self):
        with pytest.raises(ValueError, match="__setitem__"):
            points()[0] = "a"
        with pytest.raises(ValueError, match="same-class or compatible"):
            points()[0] = Edge(torch.ones(4), "a")

    def test_no_batch(self):
        p = Point(x=torch.zeros(3))
        with pytest.raises(RuntimeError, match="batch_dims==0"):
            p[0]
        with pytest.raises(TypeError, match="0-d"):
            iter(p).__next__()

    def test_iteration(self):
        assert [type(r) for r in points()] == [Point] * 3
        assert [r.batch_size for r in points().split(2)] == [torch.Size([2]), torch.Size([1])]
        assert [r.batch_size for r in points().split([1, 2])] == [torch.Size([1]), torch.Size([2])]
        assert [type(r) for r in points().unbind(0)] == [Point] * 3
        assert len(points().chunk(2)) == 2

    @pytest.mark.parametrize(
        ("op", "shape"),
        [
            (lambda p: p.reshape(1, 3), (1, 3)),
            (lambda p: p.view(-1, 1), (3, 1)),
            (lambda p: p.unsqueeze(0), (1, 3)),
            (lambda p: p.unsqueeze(0).squeeze(0), (3,)),
            (lambda p: p.expand(2, 3), (2, 3)),
            (lambda p: p.expand(2, 3).transpose(0, 1), (3, 2)),
            (lambda p: p.expand(2, 3).permute(1, 0), (3, 2)),
            (lambda p: p.expand(2, 3).flatten(), (6,)),
            (lambda p: p.gather(0, torch.tensor([0])), (1,)),
            (lambda p: p.repeat(2), (6,)),
        ],
    )
    def test_shape_methods(self, op, shape):
        got = op(points())
        assert type(got) is Point and got.batch_size == torch.Size(shape)
        assert got.x.shape == torch.Size((*shape, 4))

    def test_batch_size_setter(self):
        p = points()
        p.batch_size = []
        assert p.batch_size == torch.Size([])
        p.batch_size = [3, 4]
        assert p[0, 1].x.item() == 1.0
        with pytest.raises(RuntimeError, match="batch-size"):
            p.batch_size = [2]


class TestTorchFunctions:
    def test_stack_and_cat(self):
        p = points()
        for got in (torch.stack([p, p]), stack([p, p]), maybe_dense_stack([p, p])):
            assert type(got) is Point and got.x.shape == torch.Size([2, 3, 4])
            assert got[1].tag == "d" and got.y is None
        for got in (torch.cat([p, p]), cat([p, p])):
            assert type(got) is Point and got.batch_size == torch.Size([6]) and got.tag == "d"

    def test_stack_of_different_text(self):
        s = torch.stack([points(tag="a"), points(tag="b")])
        assert s[0].tag == "a" and s[1].tag == "b"

    def test_stack_with_different_fields(self):
        with pytest.raises(RuntimeError, match="exclusive"):
            torch.stack([points(), points(y=torch.zeros(3))])

    def test_stack_of_different_classes(self):
        with pytest.raises(TypeError):
            torch.stack([points(), Edge(torch.zeros(3), "a", batch_size=[3])])

    def test_lazy_stack(self):
        lz = lazy_stack([points(), points(tag="b")])
        assert type(lz) is Point and isinstance(lz, Point)
        assert lz.x.shape == torch.Size([2, 3, 4]) and lz[1].tag == "b" and lz.y is None
        assert [type(r) for r in lz] == [Point] * 2
        lz.x = torch.full((2, 3, 4), 5.0)
        assert lz[0].x.unique().item() == 5.0

    def test_lazy_stack_of_unequal_shapes(self):
        lz = lazy_stack([Point(x=torch.zeros(3)), Point(x=torch.ones(2))])
        assert lz[0].x.shape == torch.Size([3]) and lz[1].x.shape == torch.Size([2])
        with pytest.raises(RuntimeError, match="x"):
            lz.x  # noqa: B018
        assert [v.shape for v in lz.get("x", as_list=True)] == [torch.Size([3]), torch.Size([2])]

    @pytest.mark.parametrize(
        ("f", "value"),
        [(torch.zeros_like, 0.0), (torch.ones_like, 1.0), (lambda p: torch.full_like(p, 2.0), 2.0)],
    )
    def test_like(self, f, value):
        got = f(points())
        assert type(got) is Point and got.x.unique().item() == value
        assert got.x.shape == torch.Size([3, 4]) and got.tag == "d"

    def test_others(self):
        p = points()
        assert type(torch.unbind(p, 0)[0]) is Point
        assert torch.split(p, 2)[0].batch_size == torch.Size([2])
        assert torch.reshape(p, (1, 3)).batch_size == torch.Size([1, 3])
        assert torch.clone(p).x is not p.x
        got = torch.where(torch.tensor([True, False, True]), p, p + 1)
        assert got.x[:, 0].tolist() == [0.0, 5.0, 8.0]

    def test_vmap(self):
        assert torch.vmap(lambda p: p.x.sum())(points()).shape == torch.Size([3])
        got = torch.vmap(lambda p: p + 1)(points())
        assert type(got) is Point and got.batch_size == torch.Size([3]) and got.x[0, 0] == 1
        got = torch.vmap(lambda p, b: p.x + b, (0, None))(points(), torch.ones(4))
        assert got.shape == torch.Size([3, 4])
        got = torch.vmap(lambda p: Point(x=p.x + 1))(points())
        assert got.x.shape == torch.Size([3, 4])

    def test_pytree(self):
        p = points()
        leaves, spec = pytree.tree_flatten(p)
        back = pytree.tree_unflatten(leaves, spec)
        assert type(back) is Point and back.batch_size == p.batch_size and back.tag == "d"
        mapped = pytree.tree_map(lambda x: x + 1 if isinstance(x, torch.Tensor) else x, p)
        assert type(mapped) is Point and mapped.x[0, 0] == 1


class TestArithmetic:
    def test_operators(self):
        p = points()
        assert (p + 1).x[0, 0] == 1 and (1 + p).x[0, 0] == 1 and (p * p).x[0, 2] == 4
        assert (-p).x[0, 1] == -1 and abs(-p).x[0, 1] == 1 and (p / 2).x[0, 1] == 0.5
        assert type(p + 1) is Point and (p + 1).tag == "d" and (p + 1).y is None
        assert p.x[0, 0] == 0

    def test_comparison(self):
        p = points()
        assert (p == points()).all() and not (p != points()).any()
        assert not (p == p + 1).x.any()
        assert type(p == p) is Point and (p == p).x.dtype == torch.bool
        assert_close(p, p.clone())
        with pytest.raises(AssertionError, match="x"):
            assert_close(p, p + 1)

    def test_reductions_and_casts(self):
        p = points()
        assert p.sum().x == 66 and p.mean().x == 5.5
        assert p.double().x.dtype == torch.float64 and p.to(torch.float64).tag == "d"
        assert p.to("cpu").device == torch.device("cpu")

    def test_apply(self):
        got = points().apply(lambda x: x + 1)
        assert type(got) is Point and got.x[0, 0] == 1 and got.tag == "d"
        got = points().named_apply(lambda name, x: x * 0 if name == "x" else x)
        assert got.x.sum() == 0

    def test_gradient(self):
        p = points().requires_grad_()
        p.x.pow(2).sum().backward()
        assert p.grad.x[0, 1] == 2 and not p.detach().x.requires_grad
        assert p.data.x.requires_grad is False and p.data.tag == "d"

    def test_truth_and_hash(self):
        with pytest.raises(RuntimeError, match="boolean"):
            bool(points())
        with pytest.raises(TypeError, match="unhashable"):
            hash(points())


class TestConversion:
    def test_to_tensordict(self):
        td = points().to_tensordict()
        assert type(td) is TensorDict and td["tag"] == "d" and set(td.keys()) == {"x", "tag"}
        assert td.batch_size == torch.Size([3])
        assert points().to_tensordict(retain_none=True)["y"] is None

    def test_from_tensordict(self):
        td = TensorDict(x=torch.zeros(3), tag="q", batch_size=[3])
        p = Point.from_tensordict(td)
        assert type(p) is Point and p.tag == "q" and p.x is td["x"]
        p.x = torch.ones(3)
        assert td["x"].tolist() == [1.0] * 3  # it wraps, it does not copy
        p = Point.from_tensordict(TensorDict(x=torch.zeros(3), batch_size=[3]), {"tag": "nt"})
        assert p.tag == "nt" and p.y is None

    def test_from_tensordict_refuses(self):
        with pytest.raises(ValueError, match="zz"):
            Point.from_tensordict(TensorDict(x=torch.zeros(3), zz=torch.zeros(3)))
        with pytest.raises(RuntimeError, match="TensorDictBase"):
            Point.from_tensordict({"x": torch.zeros(3)})

    def test_dict_round_trip(self):
        d = points().to_dict()
        assert set(d) == {"x", "y", "tag"} and d["y"] is None and d["tag"] == "d"
        assert set(points().to_dict(retain_none=False)) == {"x", "tag"}
        p = Point.from_dict(d, batch_size=[3])
        assert type(p) is Point and (p == points()).all()

    def test_from_dict_batch(self):
        d = {"x": torch.zeros(3, 2), "y": torch.zeros(3), "tag": "f"}
        assert Point.from_dict(d).batch_size == torch.Size([])
        assert Point.from_dict(d, auto_batch_size=True).batch_size == torch.Size([3])
        with pytest.raises(ValueError, match="qq"):
            Point.from_dict({**d, "qq": torch.zeros(3)})

    def test_clone(self):
        p = points()
        assert type(p.clone()) is Point and p.clone().x is not p.x and p.clone().tag == "d"
        assert p.clone(False) is not p and p.clone(False).x is p.x
        assert p.copy().x is p.x and copy.copy(p).x is p.x
        q = p.clone(False)
        q.x = torch.ones(3)
        assert p.x.shape == torch.Size([3, 4])

    def test_deepcopy_and_pickle(self):
        p = Edge(torch.zeros(3), "e", points(tag="h"), batch_size=[3])
        for q in (copy.deepcopy(p), pickle.loads(pickle.dumps(p))):
            assert type(q) is Edge and type(q.head) is Point and q.name == "e" and q.head.tag == "h"
            assert q.weight.data_ptr() != p.weight.data_ptr() and q.batch_size == torch.Size([3])

    def test_state_dict(self):
        p, q = Point(x=torch.zeros(3), batch_size=[3]), Point(x=torch.ones(3), batch_size=[3])
        p.load_state_dict(q.state_dict())
        assert p.x.tolist() == [1.0] * 3

    def test_memmap(self, tmp_path):
        p = points(tag="m")
        mapped = p.memmap(tmp_path)
        assert type(mapped) is Point and mapped.is_memmap() and mapped.is_locked
        for back in (
            Point.load_memmap(tmp_path),
            TensorDict.load_memmap(tmp_path),
            load_memmap(tmp_path),
        ):
            assert type(back) is Point and back.tag == "m" and back.y is None
            assert back.x.tolist() == p.x.tolist() and back.batch_size == torch.Size([3])

    def test_memmap_inside_a_tensordict(self, tmp_path):
        TensorDict(p=points(), batch_size=[3]).memmap(tmp_path)
        back = TensorDict.load_memmap(tmp_path)
        assert type(back["p"]) is Point and back["p"].tag == "d"

    def test_memmap_in_place(self):
        p = points()
        assert p.memmap_() is p and p.is_memmap() and p.is_locked


class TestLock:
    def test_lock(self):
        p = points().lock_()
        assert p.is_locked
        for change in (
            lambda: setattr(p, "x", torch.ones(3)),
            lambda: setattr(p, "tag", "t"),
            lambda: setattr(p, "y", None),
            lambda: p.set("x", torch.ones(3)),
        ):
            with pytest.raises(RuntimeError, match="Cannot modify locked"):
                change()
        p.set_("x", torch.ones(3, 4))
        assert p.x.sum() == 12 and not p.clone().is_locked
        p.unlock_()
        p.x = torch.zeros(3)
        assert p.x.shape == torch.Size([3])

    def test_context(self):
        p = points()
        with p.lock_():
            assert p.is_locked
        assert not p.is_locked
        p.lock_()
        with p.unlock_():
            p.x = torch.zeros(3)
        assert p.is_locked

    def test_parent_locks_it(self):
        td = TensorDict(p=points(), batch_size=[3]).lock_()
        assert td["p"].is_locked
        with pytest.raises(RuntimeError, match="locked"):
            td["p"].x = torch.ones(3)


class TestKinds:
    def test_predicates(self):
        p = points()
        assert is_tensorclass(p) and is_tensorclass(Point) and is_tensorclass(Edge)
        assert is_tensor_collection(p) and is_tensor_collection(Point)
        assert not is_tensorclass(TensorDict()) and not is_tensorclass(torch.zeros(1))
        assert isinstance(p, Point) and not isinstance(p, TensorDict)
        assert issubclass(Edge, TensorClass) and isinstance(Edge(torch.zeros(2), "a"), TensorClass)
        assert tensorclass(Point) is Point

    def test_dataclass(self):
        assert dataclasses.is_dataclass(Point) and dataclasses.is_dataclass(points())
        assert [f.name for f in dataclasses.fields(Point)] == ["x", "y", "tag"]
        assert [f.name for f in dataclasses.fields(Edge)] == ["weight", "name", "head"]
        assert Point.__name__ == "Point" and Point.__module__ == __name__

    def test_inheritance(self):
        c = Child(x=torch.zeros(2), y=torch.ones(2), batch_size=[2])
        assert c.who() == "child of base" and c[0].who() == "child of base"
        assert isinstance(c, Base) and type(c[0]) is Child
        assert [f.name for f in dataclasses.fields(Child)] == ["x", "y"]
        assert c.const == 5 == Child.const
        assert Base(x=torch.zeros(2)).who() == "base"

    def test_a_taken_name_is_refused(self):
        for name in ("clone", "device", "items", "batch_size"):
            with pytest.raises(AttributeError, match=f"(?s){name}.*shadow"):
                type("Bad", (TensorClass,), {"__annotations__": {"x": torch.Tensor, name: str}})

    def test_shadow(self):
        s = Shadowing(torch.zeros(2))
        assert s.items == "a"
        s.items = "b"
        assert s.items == "b" and s.clone().items == "b"

        @tensorclass(shadow=True)
        class Also:
            x: torch.Tensor
            items: str = "k"

        assert Also(torch.zeros(2)).items == "k"


class TestOptions:
    def test_autocast(self):
        c = Cast(x=[1, 2, 3], i=torch.tensor(4), f=torch.tensor(2), b=torch.tensor(True), s="q")
        assert isinstance(c.x, torch.Tensor) and c.x.tolist() == [1, 2, 3]
        assert (c.i, c.f, c.b, c.s) == (4, 2.0, True, "q")
        assert type(c.i) is int and type(c.f) is float and type(c.b) is bool
        c.i = "7"
        assert c.i == 7
        assert Cast(x=torch.zeros(2), i=2.7).i == 2
        with pytest.raises(TypeError, match="cast"):
            Cast(x="not a tensor")

    def test_autocast_survives_indexing_and_stacking(self):
        c = Cast(x=torch.zeros(2), i=5, batch_size=[2])
        assert c[0].i == 5 and torch.stack([c, c])[1].i == 5

    def test_nocast(self):
        n = NoCast(x=1.0, i=2)
        assert type(n.x) is float and type(n.i) is int
        assert isinstance(NoCast(x=torch.zeros(2)).x, torch.Tensor)
        assert NoCast(x="s").x == "s"

    def test_tensor_only(self):
        t = OnlyTensors(x=[1.0, 2.0])
        assert t.x.tolist() == [1.0, 2.0] and t.y is None
        t.x = torch.zeros(2)
        assert t.x.sum() == 0 and t.to_tensordict()["x"].sum() == 0

    def test_frozen(self):
        f = Frozen(x=torch.zeros(2))
        assert f.is_locked
        with pytest.raises(dataclasses.FrozenInstanceError, match="x"):
            f.x = torch.ones(2)
        with pytest.raises(dataclasses.FrozenInstanceError, match="tag"):
            f.tag = "b"
        with pytest.raises(RuntimeError, match="locked"):
            f.set("x", torch.ones(2))
        f.x.fill_(1)
        assert f.x.sum() == 2

    def test_as_class_keyword_and_decorator(self):
        class A(TensorClass, autocast=True):
            i: int = 1

        @tensorclass(nocast=True)
        class B:
            i: int = 1

        assert A(i=torch.tensor(2)).i == 2 and type(B(i=2).i) is int

    def test_combined(self):
        class Both(TensorClass["autocast", "frozen"]):
            i: int = 1

        b = Both(i=torch.tensor(2))
        assert b.i == 2
        with pytest.raises(dataclasses.FrozenInstanceError):
            b.i = 3

    def test_refused(self):
        with pytest.raises(TypeError, match="exclusive"):

            class _A(TensorClass["autocast", "nocast"]):
                i: int = 1

        with pytest.raises((TypeError, ValueError), match="wrong"):
            TensorClass["wrong"]


class TestMix:
    def test_lazy_member_of_a_tensordict(self):
        lz = lazy_stack(
            [TensorDict(p=Point(x=torch.zeros(3))), TensorDict(p=Point(x=torch.ones(2)))]
        )
        assert isinstance(lz, LazyStackedTensorDict)
        assert type(lz[1]["p"]) is Point and type(lz.get("p")) is Point
        assert lz.get("p")[1].x.tolist() == [1.0, 1.0]

    def test_batch_of_rows_in_a_loop(self):
        rows = [Point(x=torch.full((4,), float(i)), tag=str(i)) for i in range(3)]
        batch = torch.stack(rows)
        assert batch.x[:, 0].tolist() == [0.0, 1.0, 2.0] and batch.tag == ["0", "1", "2"]
        assert [r.tag for r in batch] == ["0", "1", "2"]


class TestOursRepr:
    def test_repr(self):
        assert repr(Point(x=torch.zeros(3), batch_size=[3])) == (
            "Point(\n"
            "    tag=NonTensorData(data=d, batch_size=torch.Size([3]), device=None),\n"
            "    x=Tensor(shape=torch.Size([3]), device=cpu, dtype=torch.float32,"
            " is_shared=False),\n"
            "    y=None,\n"
            "    batch_size=torch.Size([3]),\n"
            "    device=None,\n"
            "    is_shared=False)"
        )


class TestSelect:
    def test_as_tensordict(self):
        point = Point(x=torch.zeros(3), y=torch.ones(3), batch_size=[3])
        assert type(point.select("x")) is Point
        out = point.select("x", as_tensordict=True)
        assert type(out) is TensorDict and list(out.keys()) == ["x"] and out["x"] is point.x


# ---------------------------------------------------------------------- numbers beside batch dims


@tensorclass
class Setting:
    obs: torch.Tensor
    count: int = 3
    rate: float | None = 0.5
    flag: "bool" = False
    anything: typing.Any = None


def test_a_number_stays_one_beside_batch_dimensions():
    setting = Setting(obs=torch.zeros(2, 4), batch_size=[2])
    assert (setting.count, setting.rate, setting.flag) == (3, 0.5, False)
    assert setting[0].count == 3 and setting.clone().view(2, 1).rate == 0.5
    assert torch.stack([setting, setting.replace(count=4)]).count == [[3, 3], [4, 4]]
    setting.count = 7
    assert setting.count == 7 and setting.to_dict()["count"] == 7
    setting.rate = 2
    assert setting.rate == 2
    with pytest.raises(RuntimeError, match="batch dimension mismatch"):
        setting.flag = 2
    with pytest.raises(RuntimeError, match="batch dimension mismatch"):
        setting.anything = 1
    assert Setting(obs=torch.zeros(4)).count.shape == ()  # without batch dimensions: a tensor


def test_from_dict_keeps_numbers_beside_batch_dimensions():
    td = TensorDict.from_dict({"a": 3, "n": {"b": 1.5, "c": torch.ones(2)}}, batch_size=[2])
    assert td["a"] == 3 and td["n", "b"] == 1.5 and td[1]["n", "b"] == 1.5
    assert TensorDict.from_dict({"a": 3})["a"].shape == ()
    assert Setting.from_dict({"obs": torch.zeros(2), "anything": 4}, batch_size=[2]).anything == 4


def test_update_takes_dicts_for_containers():
    setting = Setting(obs=torch.zeros(2), batch_size=[2])
    setting.update({"anything": {"a": torch.ones(2)}})
    assert setting.anything.batch_size == (2,)


# ----------------------------------------------------------------------------- options of a class


def test_all_missing_arguments_are_named():
    with pytest.raises(TypeError, match="missing 2 required positional arguments: 'x', 'y'"):

        @tensorclass
        class Two:
            x: torch.Tensor
            z: torch.Tensor = None
            y: torch.Tensor = dataclasses.field(kw_only=True)

        Two()


def test_tensor_only_takes_containers():
    @tensorclass(tensor_only=True)
    class Nested:
        td: TensorDict
        other: Setting
        x: torch.Tensor | None = None

    setting = Setting(obs=torch.zeros(2), batch_size=[2])
    nested = Nested(td=TensorDict(a=torch.ones(2)), other=setting, batch_size=[2])
    assert type(nested[0].other) is Setting and nested.td.batch_size == (2,)
    with pytest.raises(TypeError, match="tensor_only requires types to be Tensor.*'n'"):

        @tensorclass(tensor_only=True)
        class Plain:
            n: int


def test_shadow_takes_a_field_named_batch_size():
    @tensorclass(shadow=True)
    class Odd:
        batch_size: torch.Tensor
        x: torch.Tensor

    odd = Odd(batch_size=torch.ones(2), x=torch.zeros(2))
    assert odd.batch_size.tolist() == [1, 1] and odd.x.tolist() == [0, 0]
    assert odd.shape == () and odd.clone().batch_size.tolist() == [1, 1]


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


@pytest.mark.parametrize(
    "operation",
    [
        lambda a: a[0],
        lambda a: a.clone(),
        lambda a: a + 1,
        lambda a: a.to(torch.float64),
        lambda a: a.replace(x=torch.ones(3)),
        lambda a: a.apply(lambda x: x),
        lambda a: torch.stack([a, a]),
        lambda a: TensorDict(a=a, batch_size=[3])[0],
        lambda a: torch.utils._pytree.tree_map(lambda x: x, a),
    ],
)
def test_post_init_is_called_for_results_unless_the_class_says_otherwise(operation):
    a, b = Counted(x=torch.ones(3), batch_size=[3]), CountedOnce(x=torch.ones(3), batch_size=[3])
    INITIALISED.clear()
    operation(b)
    assert not INITIALISED
    operation(a)
    assert len(INITIALISED) == 1
    a.empty()
    torch.utils._pytree.tree_map(lambda x: None, a)
    assert len(INITIALISED) == 1


def test_post_init_may_set_fields_of_a_locked_result():
    @tensorclass
    class Positive:
        x: torch.Tensor

        def __post_init__(self):
            self.x = self.x.abs()

    a = Positive(x=-torch.ones(2), batch_size=[2]).lock_()
    assert a.view(2, 1).x.tolist() == [[1], [1]] and a.view(2, 1).is_locked


def test_fields_that_are_given_by_name_only():
    class Named(TensorClass, kw_only=True):
        x: torch.Tensor = None
        y: torch.Tensor

    with pytest.raises(TypeError, match="takes 1 positional arguments but 2 were given"):
        Named(torch.ones(1))
    assert Named(y=torch.ones(1)).y == 1


def test_a_class_says_what_casts_leave_alone():
    class Mesh(TensorClass, cast_filter=lambda key, value: value.is_floating_point()):
        points: torch.Tensor
        cells: torch.Tensor

    mesh = Mesh(points=torch.ones(2, 3), cells=torch.ones(4, dtype=torch.int64))
    for cast in (mesh.half(), mesh.to(torch.float16), mesh.type(torch.float16)):
        assert cast.points.dtype == torch.float16 and cast.cells.dtype == torch.int64
    assert mesh.to(torch.float16, cast_filter=None).cells.dtype == torch.float16
    td = TensorDict(a=torch.ones(2), n=dict(b=torch.ones(2)))
    cast = td.to("cpu", torch.float64, cast_filter=lambda key, value: key == ("n", "b"))
    assert (cast["a"].dtype, cast["n", "b"].dtype) == (torch.float32, torch.float64)
    assert td.half(cast_filter=lambda key, value: key == ("a",))["n", "b"].dtype == torch.float32


def test_a_frozen_class_derives_from_frozen_ones_only():
    class Open(TensorClass):
        x: torch.Tensor

    with pytest.raises(TypeError, match="cannot inherit frozen dataclass from a non-frozen one"):

        class Shut(Open, frozen=True):
            y: torch.Tensor


def test_autocast_keeps_what_it_can_not_cast():
    class Cast(TensorClass["autocast"]):
        n: int
        a: typing.Any = None

    assert Cast(n={"b": 1}).n == {"b": 1}  # a dict is no number; it is kept
    assert Cast(n=True).n == 1 and type(Cast(n=True).n) is int
    assert Cast(n=1, a=[1, 2]).a == [1, 2]


def test_repr_leaves_fields_out():
    @tensorclass
    class Quiet:
        x: torch.Tensor = dataclasses.field(repr=False)
        y: torch.Tensor = None

    assert "x=" not in repr(Quiet(x=1)) and "y=None" in repr(Quiet(x=1))


def test_pad_sequence_keeps_nested_classes():
    @tensorclass
    class Inner:
        x: torch.Tensor

    rows = [TensorDict(i=Inner(x=torch.ones(n), batch_size=[n]), batch_size=[n]) for n in (2, 3)]
    padded = pad_sequence(rows)
    assert type(padded["i"]) is Inner and padded["i"].x.shape == (2, 3)


# --------------------------------------------------------------------- subclasses of TensorDict


class Mine(TensorDict):
    def total(self):
        return sum([leaf.sum() for leaf in self.values(True, True)])


@pytest.mark.parametrize(
    "operation",
    [
        lambda m: m[0],
        lambda m: m[torch.tensor([True, False])],
        lambda m: m.clone(),
        lambda m: m.copy(),
        lambda m: m + 1,
        lambda m: m.to(torch.float64),
        lambda m: m.view(2, 1),
        lambda m: m.unbind(0)[1],
        lambda m: m.select("a"),
        lambda m: m.apply(lambda x: x),
        lambda m: m.sum(dim=0),
        lambda m: m.empty(),
        lambda m: m.data,
        lambda m: torch.stack([m, m]),
        lambda m: torch.cat([m, m]),
        lambda m: torch.zeros_like(m),
        lambda m: torch.utils._pytree.tree_map(lambda x: x, m),
        lambda m: copy.deepcopy(m),
        lambda m: type(m).from_dict({"a": torch.ones(2)}),
    ],
)
def test_a_subclass_keeps_its_class(operation):
    mine = Mine(a=torch.ones(2, 3), n=TensorDict(b=torch.ones(2), batch_size=[2]), batch_size=[2])
    out = operation(mine)
    assert type(out) is Mine and type(mine["n"]) is TensorDict
    out.total()
    assert type(torch.stack([mine, mine.to_tensordict()])) is TensorDict


def test_post_init_sets_a_field_that_is_no_argument():
    @tensorclass
    class Doubled:
        x: torch.Tensor
        y: torch.Tensor = dataclasses.field(init=False)

        def __post_init__(self):
            self.y = 2 * self.x

    assert Doubled(torch.ones(2), batch_size=[2]).y.tolist() == [2, 2]
    assert Doubled(x=torch.ones(2), batch_size=[2])[0].y == 2
