"""apply and its relatives, map over chunks, and containers as pytree nodes."""

import os
import signal
import time
from multiprocessing.pool import ThreadPool

import pytest
import torch
from torch.utils import _pytree as pytree

from raffia import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorDict,
    is_leaf_nontensor,
    is_tensor_collection,
    lazy_stack,
)

B, T, A = 2, 3, 5


def make():
    return TensorDict(
        {"a": torch.arange(B * T * 1.0).reshape(B, T), "n": {"b": torch.arange(B) + 0.5}}, [B]
    )


def make_lazy(dim=0):
    return lazy_stack([make() + i for i in range(3)], dim)


def leaves(td):
    return dict(td.items(True, True))


def assert_leaves(result, expected):
    got = leaves(result)
    expected = expected if isinstance(expected, dict) else leaves(expected)
    assert set(got) == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value)


class TestApply:
    def test_every_leaf_once_in_order(self):
        seen = []
        result = make().apply(lambda x: seen.append(x.shape) or x + 1)
        assert seen == [(B, T), (B,)]
        assert_leaves(result, make() + 1)
        assert type(result) is TensorDict
        assert result.batch_size == torch.Size([B])

    def test_new_structure_same_leaves(self):
        td = make()
        result = td.apply(lambda x: x)
        assert result is not td
        assert result["n"] is not td["n"]
        assert result["a"] is td["a"]

    def test_source_is_left_alone(self):
        td = make()
        td.apply(lambda x: x * 0)
        assert_leaves(td, make())

    def test_several_trees_pair_by_key(self):
        other = TensorDict({"n": {"b": torch.ones(B)}, "a": torch.full((B, T), 2.0)}, [B])
        result = make().apply(lambda x, y, z: x + y * z, other, make())
        assert_leaves(result, make() + other * make())

    def test_other_may_have_more_keys(self):
        other = make().set("extra", torch.ones(B))
        assert_leaves(make().apply(lambda x, y: x + y, other), make() * 2)

    @pytest.mark.parametrize("missing", ["a", "n", ("n", "b")])
    def test_other_lacks_a_key(self, missing):
        with pytest.raises(KeyError):
            make().apply(lambda x, y: x, make().exclude(missing))

    @pytest.mark.parametrize("missing", ["a", "n", ("n", "b")])
    def test_default_stands_for_a_missing_leaf(self, missing):
        seen = []
        other = make().exclude(missing)
        result = make().apply(
            lambda x, y: seen.append(y is None) or (x if y is None else x + y), other, default=None
        )
        assert seen == ([True, False] if missing == "a" else [False, True])
        assert set(leaves(result)) == {"a", ("n", "b")}
        number = make().apply(lambda x, y: x + y, other, default=7.0)
        key = "a" if missing == "a" else ("n", "b")
        torch.testing.assert_close(number.get(key), make().get(key) + 7)

    def test_shape_must_fit_the_batch(self):
        with pytest.raises(RuntimeError, match="batch dimension mismatch.*'a'"):
            make().apply(lambda x: x.sum())

    @pytest.mark.parametrize(
        ("fn", "size"),
        [
            (torch.sum, []),
            (lambda x: x[0], []),
            (lambda x: x[:1], [1]),
            (lambda x: x[None], [1, B]),
        ],
        ids=["sum", "first", "head", "unsqueeze"],
    )
    def test_batch_size(self, fn, size):
        result = make().apply(fn, batch_size=size)
        assert result.batch_size == torch.Size(size)
        assert result["n"].batch_size == torch.Size(size)
        assert_leaves(result, {k: fn(v) for k, v in leaves(make()).items()})

    def test_names(self):
        td = TensorDict({"a": torch.ones(B)}, [B], names=["t"])
        assert td.apply(lambda x: x).names == ["t"]
        assert td.apply(lambda x: x, names=["u"]).names == ["u"]
        assert td.apply(lambda x: x, names=None).names == [None]
        assert td.apply(lambda x: x, batch_size=[B]).names == [None]
        result = td.apply(lambda x: x[None], batch_size=[1, B], names=["new", "t"])
        assert result.names == ["new", "t"]

    def test_device(self):
        td = make().to("cpu")
        assert td.apply(lambda x: x).device == torch.device("cpu")
        assert td.apply(lambda x: x, device=None).device is None
        meta = make().apply(lambda x: x, device="meta")
        assert meta.device == meta["a"].device == meta["n", "b"].device == torch.device("meta")
        assert td.apply(lambda x: x.to("meta"), device=None)["a"].device.type == "meta"

    def test_locked(self):
        td = make().lock_()
        assert not td.apply(lambda x: x).is_locked
        result = td.apply(lambda x: x, propagate_lock=True)
        assert result.is_locked and result["n"].is_locked
        assert not make().apply(lambda x: x, propagate_lock=True).is_locked

    @pytest.mark.parametrize(
        ("fn", "kind"),
        [(lambda x: {"u": x}, TensorDict), (lambda x: TensorDict({"u": x}, [B]), TensorDict)],
        ids=["dict", "td"],
    )
    def test_fn_may_return_a_tree(self, fn, kind):
        result = make().apply(fn)
        assert type(result["a"]) is kind
        assert set(leaves(result)) == {("a", "u"), ("n", "b", "u")}

    def test_fn_may_return_numbers_or_text(self):
        torch.testing.assert_close(make().apply(lambda x: x.tolist())["a"], make()["a"])
        assert make().apply(lambda x: "text")["a"] == "text"

    def test_unknown_keyword(self):
        with pytest.raises((TypeError, FutureWarning)):
            make().apply(lambda x: x, no_such_keyword=3)

    def test_exception_of_fn_comes_through(self):
        def fail(x):
            raise ZeroDivisionError("inside")

        with pytest.raises(ZeroDivisionError, match="inside"):
            make().apply(fail)

    def test_gradient(self):
        td = make().requires_grad_()
        td.apply(lambda x: x * x)["n", "b"].sum().backward()
        torch.testing.assert_close(td["n", "b"].grad, 2 * make()["n", "b"])
        assert td["a"].grad is None


class TestNoneResults:
    def test_all_none(self):
        assert make().apply(lambda x: None) is None
        assert make().apply(lambda x: None, filter_empty=True) is None
        assert make_lazy().apply(lambda x: None) is None
        assert make().named_apply(lambda k, x: None) is None

    def test_all_none_kept(self):
        result = make().apply(lambda x: None, filter_empty=False)
        assert set(result.keys(True)) == {"n"}
        assert result.is_empty()
        assert result.batch_size == torch.Size([B])

    def test_some_none(self):
        result = make().apply(lambda x: x if x.ndim > 1 else None)
        assert list(result.keys(True)) == ["a"]
        kept = make().apply(lambda x: x if x.ndim > 1 else None, filter_empty=False)
        assert set(kept.keys(True)) == {"a", "n"}
        assert kept["n"].is_empty()

    def test_already_empty(self):
        empty = TensorDict({}, [B])
        assert empty.apply(lambda x: None).batch_size == torch.Size([B])
        assert empty.apply(lambda x: None, filter_empty=True) is None
        td = TensorDict({"a": torch.ones(B), "n": {}}, [B])
        assert set(td.apply(lambda x: x).keys(True)) == {"a", "n"}
        assert set(td.apply(lambda x: x, filter_empty=False).keys(True)) == {"a", "n"}
        assert set(td.apply(lambda x: x, filter_empty=True).keys(True)) == {"a"}

    def test_non_tensor_data_stays(self):
        td = TensorDict({"a": torch.ones(B), "s": "text"}, [B])
        for flag in (None, True, False):
            result = td.apply(lambda x: None, filter_empty=flag)
            assert list(result.keys()) == ["s"]
            assert result["s"] == "text"


class TestInPlace:
    @pytest.mark.parametrize("how", ["apply_", "inplace", "named"])
    @pytest.mark.parametrize("locked", [False, True])
    def test_writes_into_the_leaves(self, how, locked):
        td = make()
        if locked:
            td.lock_()
        held, held_b = td["a"], td["n", "b"]
        if how == "apply_":
            result = td.apply_(lambda x: x + 1)
        elif how == "inplace":
            result = td.apply(lambda x: x + 1, inplace=True)
        else:
            result = td.named_apply(lambda k, x: x + 1, inplace=True)
        assert result is td
        assert td["a"] is held and td["n", "b"] is held_b
        assert td.is_locked is locked
        assert_leaves(td, make() + 1)

    def test_casts_to_the_dtype_of_the_leaf(self):
        td = make().apply(lambda x: x.double() + 1, inplace=True)
        assert td["a"].dtype is torch.float32

    def test_none_leaves_the_entry_alone(self):
        td = make()
        assert td.apply_(lambda x: x * 0 if x.ndim > 1 else None) is td
        assert_leaves(td, {"a": torch.zeros(B, T), ("n", "b"): make()["n", "b"]})
        assert td.apply_(lambda x: None) is td

    def test_with_others(self):
        td = make()
        assert_leaves(td.apply_(lambda x, y: x + y, make()), make() * 2)

    def test_in_place_function(self):
        td = make()
        held = td["a"]
        td.apply_(lambda x: x.zero_())
        assert not held.any()

    def test_lazy_stack_members_are_written(self):
        td = make_lazy()
        member = td.tensordicts[2]
        held = member["a"]
        td.apply(lambda x: x * 0, inplace=True)
        assert member["a"] is held
        assert not held.any()


class TestOut:
    def test_result_is_out(self):
        out = TensorDict({}, [B])
        result = make().apply(lambda x: x + 1, out=out)
        assert result is out
        assert_leaves(out, make() + 1)

    def test_entries_are_replaced_others_stay_nested_nodes_stay(self):
        out = make().set("extra", torch.ones(B))
        node = out["n"]
        make().apply(lambda x: x.double(), out=out)
        assert out["n"] is node
        assert out["a"].dtype is torch.float64
        assert out["extra"].dtype is torch.float32

    def test_out_is_self(self):
        td = make()
        assert td.apply(lambda x: x + 1, out=td) is td
        assert_leaves(td, make() + 1)

    def test_refusals(self):
        with pytest.raises(RuntimeError, match="Cannot modify locked TensorDict"):
            make().apply(lambda x: x, out=make().lock_())
        with pytest.raises(RuntimeError, match="batch_size"):
            make().apply(lambda x: x, out=TensorDict({}, [T]), batch_size=[B])
        with pytest.raises(RuntimeError, match="device"):
            make().apply(lambda x: x, out=TensorDict({}, [B]), device="cpu")
        with pytest.raises(RuntimeError, match="batch dimension mismatch"):
            make().apply(lambda x: x, out=TensorDict({}, [T]))

    def test_named(self):
        out = TensorDict({}, [B])
        assert make().named_apply(lambda k, x: x, out=out) is out
        assert_leaves(out, make())


class TestNamedApply:
    def test_last_name_or_whole_key(self):
        names, keys = [], []
        make().named_apply(lambda k, x: names.append(k))
        make().named_apply(lambda k, x: keys.append(k), nested_keys=True)
        assert names == ["a", "b"]
        assert keys == ["a", ("n", "b")]

    def test_select_by_key(self):
        result = make().named_apply(lambda k, x: x if k == ("n", "b") else None, nested_keys=True)
        assert list(result.keys(True, True)) == [("n", "b")]

    def test_others_default_batch_size_names_device(self):
        other = make().exclude("a")
        result = make().named_apply(
            lambda k, x, y: (x if y is None else x + y)[None] * (2 if k == "b" else 1),
            other,
            default=None,
            batch_size=[1, B],
            names=["new", None],
            device="cpu",
        )
        assert result.batch_size == torch.Size([1, B])
        assert result.names[0] == "new"
        assert result.device == torch.device("cpu")
        expected = {"a": make()["a"][None], ("n", "b"): 4 * make()["n", "b"][None]}
        assert_leaves(result, expected)

    def test_missing_key(self):
        with pytest.raises(KeyError):
            make().named_apply(lambda k, x, y: x, make().exclude("a"))

    def test_propagate_lock(self):
        td = make().lock_()
        assert td.named_apply(lambda k, x: x, propagate_lock=True).is_locked
        assert not td.named_apply(lambda k, x: x).is_locked

    @pytest.mark.parametrize("nested_keys", [False, True])
    def test_lazy_members_do_not_show_in_the_key(self, nested_keys):
        keys = []
        make_lazy().named_apply(lambda k, x: keys.append(k), nested_keys=nested_keys)
        assert keys == 3 * ["a", ("n", "b") if nested_keys else "b"]

    def test_deep_key(self):
        td = TensorDict({"x": {"y": {"z": torch.ones(B)}}}, [B])
        keys = []
        td.named_apply(lambda k, x: keys.append(k), nested_keys=True)
        assert keys == [("x", "y", "z")]


class TestLeaves:
    def test_call_on_nested(self):
        seen = []
        make().named_apply(lambda k, x: seen.append((k, type(x))), call_on_nested=True)
        assert seen == [("a", torch.Tensor), ("n", TensorDict)]
        assert_leaves(make().apply(lambda x: x + 1, call_on_nested=True), make() + 1)

    def test_non_tensor_is_passed_by(self):
        td = make().set("s", "text")
        keys = []
        result = td.named_apply(lambda k, x: keys.append(k) or x)
        assert "s" not in keys
        assert result["s"] == "text"

    def test_is_leaf_nontensor(self):
        td = make().set("s", "text")
        seen = {}
        td.named_apply(lambda k, x: seen.update({k: x}), is_leaf=is_leaf_nontensor)
        assert set(seen) == {"a", "b", "s"}
        assert isinstance(seen["s"], NonTensorData)
        assert seen["s"].data == "text"

    def test_custom_is_leaf(self):
        seen = []
        make().named_apply(lambda k, x: seen.append(k), is_leaf=lambda cls: True)
        assert seen == ["a", "n"]


class TestLazy:
    @pytest.mark.parametrize("dim", [0, 1])
    def test_members_are_visited_one_by_one(self, dim):
        td, shapes = make_lazy(dim), []
        result = td.apply(lambda x: shapes.append(x.shape) or x * 2)
        assert shapes == 3 * [(B, T), (B,)]
        assert type(result) is LazyStackedTensorDict
        assert result.stack_dim == dim
        assert_leaves(result, td * 2)

    def test_heterogeneous(self):
        td = lazy_stack([TensorDict({"a": torch.ones(n)}) for n in (2, 3)])
        result = td.apply(lambda x: x + 1)
        assert [m["a"].shape[0] for m in result.unbind(0)] == [2, 3]

    @pytest.mark.parametrize("dense_other", [False, True])
    def test_others(self, dense_other):
        td, other = make_lazy(), make_lazy()
        if dense_other:
            other = TensorDict(leaves(other), other.batch_size)
        result = td.apply(lambda x, y: x + y, other)
        assert type(result) is LazyStackedTensorDict
        assert_leaves(result, td * 2)

    def test_names(self):
        assert make_lazy().apply(lambda x: x, names=["s", "b"]).names == ["s", "b"]

    def test_nested_lazy_stack(self):
        td = TensorDict({"l": make_lazy(), "a": torch.ones(3)}, [3])
        result = td.apply(lambda x: x + 1)
        assert type(result["l"]) is LazyStackedTensorDict
        assert_leaves(result, td + 1)


def double(td):
    return TensorDict({"c": td["a"] * 2}, td.batch_size)


def how_sigterm_ends(td):
    """Whether SIGTERM is left to the system, and whether it is held back, for each row."""
    default = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    held = signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    shape = td.batch_size
    return TensorDict(
        {"default": torch.full(shape, default), "held": torch.full(shape, held)}, shape
    )


class Lingering:
    """Once it was sent home, the worker that made it is not back at the queue for a while."""

    def __init__(self, td):
        self.home = os.getppid()

    def __del__(self):
        if os.getppid() == self.home:
            time.sleep(0.5)


@pytest.mark.slow
class TestMap:
    """Chunks go to a pool of processes and come back joined, in order."""

    @pytest.mark.parametrize("kwargs", [{"chunksize": 2}, {"num_chunks": 3}, {"chunksize": 0}])
    def test_map(self, kwargs):
        td = TensorDict({"a": torch.arange(6.0)}, [6])
        if kwargs == {"chunksize": 0}:  # single rows, without the dim
            result = td.map(double, 0, num_workers=1, generator=torch.Generator(), **kwargs)
        else:
            result = td.map(double, num_workers=1, generator=torch.Generator(), **kwargs)
        assert_leaves(result, {"c": torch.arange(6.0) * 2})
        assert result.batch_size == torch.Size([6])

    def test_map_along_second_dim(self):
        td = TensorDict({"a": torch.arange(6.0).reshape(2, 3)}, [2, 3])
        result = td.map(double, dim=1, num_workers=1, generator=torch.Generator(), chunksize=1)
        assert_leaves(result, {"c": td["a"] * 2})

    def test_map_iter(self):
        td = TensorDict({"a": torch.arange(6.0)}, [6])
        chunks = list(
            td.map_iter(
                double, num_workers=1, generator=torch.Generator(), chunksize=2, shuffle=False
            )
        )
        torch.testing.assert_close(torch.cat([c["c"] for c in chunks]), td["a"] * 2)

    def test_a_pool_can_end_its_workers_wherever_it_is_made(self):
        """A training notes SIGTERM and goes on: were its forks to do so, their pool would hang."""
        before = signal.signal(signal.SIGTERM, lambda number, frame: None)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            td = TensorDict({"a": torch.arange(2.0)}, [2])
            found = td.map(
                how_sigterm_ends, num_workers=1, num_chunks=2, generator=torch.Generator()
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            signal.signal(signal.SIGTERM, before)
        assert found["default"].all() and not found["held"].any()

    @pytest.mark.timeout(30)
    def test_a_pool_ends_though_a_worker_misses_its_last_message(self):
        before = signal.signal(signal.SIGTERM, lambda number, frame: None)
        try:
            td = TensorDict({"a": torch.arange(6.0)}, [6])
            options = {"num_workers": 1, "num_chunks": 3, "generator": torch.Generator()}
            assert len(list(td.map_iter(Lingering, **options))) == 3
        finally:
            signal.signal(signal.SIGTERM, before)


class TestMapArguments:
    def test_dim_out_of_range(self):
        with pytest.raises((IndexError, ValueError, RuntimeError)):
            make().map(double, dim=3, num_workers=1, generator=torch.Generator())


class TestPytree:
    """torch.utils._pytree sees the leaves of a container."""

    def test_tree_map_keeps_the_structure(self):
        td = make()
        result = pytree.tree_map(lambda x: x + 1, td)
        assert type(result) is TensorDict
        assert result.batch_size == td.batch_size
        assert_leaves(result, td + 1)

    def test_flatten_unflatten(self):
        td = TensorDict(make().to_dict(), [B], names=["t"], device="cpu")
        flat, spec = pytree.tree_flatten(td)
        assert len(flat) == 2
        assert flat[0] is td["a"] and flat[1] is td["n", "b"]
        back = pytree.tree_unflatten(flat, spec)
        assert back["a"] is td["a"]
        assert back.batch_size == td.batch_size
        assert back.names == ["t"]
        assert back.device == torch.device("cpu")
        assert set(back.keys(True)) == set(td.keys(True))

    def test_leaves_and_paths(self):
        td = make()
        assert all(x is y for x, y in zip(pytree.tree_leaves(td), leaves(td).values(), strict=True))
        paths = [p for p, _ in pytree.tree_flatten_with_path(td)[0]]
        assert paths == [
            (pytree.MappingKey("a"),),
            (pytree.MappingKey(("n", "b")),),
        ]

    def test_inside_other_trees(self):
        tree = {"x": [make(), torch.ones(1)], "y": (make(),)}
        result = pytree.tree_map(lambda x: x * 0, tree)
        assert isinstance(result["x"][0], TensorDict)
        assert not result["x"][0].any() and not result["y"][0].any()

    def test_other_leaf_types(self):
        """Leaves that are no tensors, as specs and shapes are, come through a tree_map."""
        shapes = pytree.tree_map(lambda x: x.sum(), make())
        assert_leaves(shapes, {"a": make()["a"].sum(), ("n", "b"): make()["n", "b"].sum()})
        assert shapes.batch_size == torch.Size([])

    def test_two_trees(self):
        result = pytree.tree_map(torch.add, make(), make())
        assert_leaves(result, make() * 2)

    def test_specs_compare(self):
        one, two = pytree.tree_structure(make()), pytree.tree_structure(make() + 1)
        assert one == two
        assert one != pytree.tree_structure(make().rename_key_("a", "z"))

    def test_non_tensor_entries(self):
        td = TensorDict({"a": torch.ones(B), "s": "text"}, [B])
        flat, spec = pytree.tree_flatten(td)
        assert [x for x in flat if isinstance(x, torch.Tensor)][0] is td["a"]
        back = pytree.tree_unflatten(flat, spec)
        assert back["s"] == "text"
        result = pytree.tree_map_only(torch.Tensor, lambda x: x + 1, td)
        assert result["s"] == "text"
        torch.testing.assert_close(result["a"], torch.full((B,), 2.0))

    @pytest.mark.parametrize("dim", [0, 1])
    def test_lazy_stack(self, dim):
        td = make_lazy(dim)
        flat, spec = pytree.tree_flatten(td)
        back = pytree.tree_unflatten(flat, spec)
        assert type(back) is LazyStackedTensorDict
        assert back.stack_dim == dim
        assert back.batch_size == td.batch_size
        assert_leaves(back, td)
        result = pytree.tree_map(lambda x: x + 1, td)
        assert_leaves(result, td + 1)

    def test_heterogeneous_lazy_stack(self):
        td = lazy_stack([TensorDict({"a": torch.ones(n)}) for n in (2, 3)])
        result = pytree.tree_map(lambda x: x + 1, td)
        assert [m["a"].shape[0] for m in result.unbind(0)] == [2, 3]

    def test_empty(self):
        td = TensorDict({}, [B])
        flat, spec = pytree.tree_flatten(td)
        assert flat == []
        assert pytree.tree_unflatten(flat, spec).batch_size == torch.Size([B])

    def test_locked_flattens(self):
        td = make().lock_()
        assert_leaves(pytree.tree_map(lambda x: x, td), td)

    def test_is_leaf_keeps_containers_whole(self):
        found = pytree.tree_leaves([make(), torch.ones(1)], is_leaf=is_tensor_collection)
        assert isinstance(found[0], TensorDict) and len(found) == 2

    def test_axis_of_leaves_can_grow(self):
        result = pytree.tree_map(lambda x: x[None], make())
        assert_leaves(result, {k: v[None] for k, v in leaves(make()).items()})


class TestDevice:
    def test_the_source_keeps_its_own(self):
        """Non-tensor entries are shared with the result, unless it is on another device."""
        td = make().set("s", "text")
        out = td.apply(lambda x: x, device="meta")
        assert out.get("s").device == torch.device("meta") and td.get("s").device is None

    def test_lazy_stacks_stay(self):
        for options in ({"device": "cpu"}, {"names": ["x", "y"]}):
            assert type(make_lazy().apply(lambda x: x + 1, **options)) is LazyStackedTensorDict


class TestMapOptions:
    def test_out(self):
        td = TensorDict(a=torch.arange(6).reshape(3, 2), batch_size=[3])
        for chunksize in (0, 1, 2):
            out = td.clone().zero_()
            assert td.map(lambda x: x + 1, num_workers=0, chunksize=chunksize, out=out) is out
            assert (out == td + 1).all()

    def test_out_along_another_dim(self):
        td = TensorDict(a=torch.arange(6).reshape(3, 2), batch_size=[3, 2])
        out = td.clone().zero_()
        td.map(lambda x: x + 1, dim=1, num_workers=0, chunksize=1, out=out)
        assert (out == td + 1).all()

    def test_workers(self, monkeypatch):
        """What is asked for reaches the pool, and each worker starts with a seed of its own."""
        asked = []

        class Context:
            Value = staticmethod(torch.multiprocessing.Value)

            def Pool(self, num_workers, first_act, arguments, max_tasks):
                asked.extend([num_workers, max_tasks, first_act, *arguments])
                return ThreadPool(num_workers)

        def context(method):
            asked.append(method)
            return Context()

        monkeypatch.setattr(torch.multiprocessing, "get_context", context)
        td = TensorDict(a=torch.arange(6).reshape(3, 2), batch_size=[3])
        options = {"worker_threads": 7, "mp_start_method": "spawn", "max_tasks_per_child": 5}
        assert (td.map(lambda x: x + 1, num_workers=2, **options) == td + 1).all()
        method, num_workers, max_tasks, first_act, seed, threads = asked
        assert (method, num_workers, max_tasks, threads) == ("spawn", 2, 5, 7)
        drawn, state, used = [], torch.get_rng_state(), torch.get_num_threads()
        for _ in range(2):
            first_act(seed, used)
            drawn.append(torch.initial_seed())
        torch.set_rng_state(state)
        assert drawn[1] == drawn[0] + 1
