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
from tests.tensordict.invariants import sound
from tests.tensordict.kinds import each, leaves, raises

B, T = 2, 3
A, N_B = KEYS = ["a", ("n", "b")]
CPU, META = torch.device("cpu"), torch.device("meta")


def make(**options):
    entries = {"a": torch.arange(B * T * 1.0).reshape(B, T), "n": {"b": torch.arange(B) + 0.5}}
    return TensorDict(entries, [B], **options)


def make_lazy(dim=0):
    return lazy_stack([make() + i for i in range(3)], dim)


def ragged():
    return lazy_stack([TensorDict({"a": torch.ones(n)}) for n in (2, 3)])


def assert_leaves(result, expected):
    got, expected = leaves(result), expected if isinstance(expected, dict) else leaves(expected)
    assert sound(result) and set(got) == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value)


def more(td):
    """Ones, with one more key than the container."""
    return torch.ones_like(td).unlock_().set("z", torch.ones(td.batch_size))


# calls that give every leaf plus one, in a new container
PLUS_ONE = {
    "apply": lambda td: td.apply(lambda x: x + 1),
    "named_apply": lambda td: td.named_apply(lambda key, x: x + 1),
    "other": lambda td: td.apply(lambda x, y: x + y, torch.ones_like(td)),
    "more keys": lambda td: td.apply(lambda x, y: x + y, more(td)),
    "out": lambda td: td.apply(lambda x: x + 1, out=td.clone()),
    "pytree": lambda td: pytree.tree_map(lambda x: x + 1, td),
    "pytrees": lambda td: pytree.tree_map(torch.add, td, torch.ones_like(td).unlock_()),
}
IN_PLACE = {
    "apply_": lambda td: td.apply_(lambda x: x + 1),
    "inplace": lambda td: td.apply(lambda x: x + 1, inplace=True),
    "named": lambda td: td.named_apply(lambda key, x: x + 1, inplace=True),
    "cast": lambda td: td.apply(lambda x: x.double() + 1, inplace=True),
    "by the function": lambda td: td.apply_(lambda x: x.add_(1)),
    "other": lambda td: td.apply_(lambda x, y: x + y, torch.ones_like(td)),
}
KINDS = {
    "dense": make,
    "locked": lambda: make(lock=True),
    "along 0": make_lazy,
    "along 1": lambda: make_lazy(1),
    "ragged": ragged,
    "nested": lambda: TensorDict({"l": make_lazy(), "a": torch.ones(3)}, [3]),
}


def every_leaf(td):
    """The leaves, of lazy stacks those of each member."""
    if isinstance(td, LazyStackedTensorDict):
        return [leaf for member in td.tensordicts for leaf in every_leaf(member)]
    values = list(td.values())
    return [y for x in values for y in (every_leaf(x) if is_tensor_collection(x) else [x])]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_leaf_and_member(kind):
    def check(call):
        td = kind()
        result = call(td)
        assert type(result) is type(td) and result.batch_size == td.batch_size and sound(result)
        for got, leaf, old in zip(*map(every_leaf, (result, td, kind())), strict=True):
            torch.testing.assert_close(got, leaf + 1)
            assert torch.equal(leaf, old)  # the source is left alone

    whole = kind is not ragged  # a stack stacks values before it writes them
    each({key: call for key, call in PLUS_ONE.items() if whole or key != "out"}, check)

    def check_in_place(call):
        td = kind()
        originals = every_leaf(td)
        assert call(td) is td and td.is_locked is kind().is_locked and sound(td)
        for now, leaf, old in zip(*map(every_leaf, (td, kind())), originals, strict=True):
            assert now is old and torch.equal(now, leaf + 1)

    each(IN_PLACE, check_in_place)


def test_order_structure_and_keys():
    td, calls = make(), []
    result = td.apply(lambda x: calls.append(x.shape) or x)
    assert calls == [(B, T), (B,)] and result is not td and result["n"] is not td["n"]
    assert result["a"] is td["a"]
    for source, keys in ((td, KEYS), (make_lazy(), KEYS * 3)):  # members do not show in the key
        last, whole = [], []
        source.named_apply(lambda key, x, calls=last: calls.append(key))
        source.named_apply(lambda key, x, calls=whole: calls.append(key), nested_keys=True)
        assert whole == keys and last == [key if key == A else "b" for key in keys]
    result = td.named_apply(lambda key, x: x if key == N_B else None, nested_keys=True)
    assert list(result.keys(True, True)) == [N_B]
    calls = []
    td.named_apply(lambda key, x: calls.append((key, type(x))), call_on_nested=True)
    assert calls == [("a", torch.Tensor), ("n", TensorDict)]
    calls = []
    td.named_apply(lambda key, x: calls.append(key), is_leaf=lambda cls: True)
    assert calls == ["a", "n"]
    td, calls = make().set("s", "text"), {}
    assert td.named_apply(lambda key, x: calls.update({key: x}) or x)["s"] == "text"
    assert set(calls) == {"a", "b"}
    td.named_apply(lambda key, x: calls.update({key: x}), is_leaf=is_leaf_nontensor)
    assert isinstance(calls["s"], NonTensorData) and calls["s"].data == "text"


def test_others():
    other = TensorDict({"n": {"b": torch.ones(B)}, "a": torch.full((B, T), 2.0)}, [B])
    result = make().apply(lambda x, y, z: x + y * z, other, make())  # they pair by key
    assert_leaves(result, make() + other * make())
    for missing in ("a", "n", N_B):
        other, key = make().exclude(missing), "a" if missing == "a" else N_B
        with pytest.raises(KeyError):
            make().apply(lambda x, y: x, other)
        result = make().named_apply(lambda _, x, y: x if y is None else x * 0, other, default=None)
        assert_leaves(result, {k: v * (k == key) for k, v in leaves(make()).items()})
        number = make().apply(lambda x, y: x + y, other, default=7.0)
        torch.testing.assert_close(number.get(key), make().get(key) + 7)
    dense = TensorDict(leaves(make_lazy()), make_lazy().batch_size)
    assert_leaves(make_lazy().apply(torch.add, dense), make_lazy() * 2)


def test_batch_size_names_device_and_lock():
    for fn, size in (
        (torch.sum, ()),
        (lambda x: x[0], ()),
        (lambda x: x[:1], (1,)),
        (lambda x: x[None], (1, B)),
    ):
        result = make().apply(fn, batch_size=size)
        assert result.batch_size == result["n"].batch_size == size
        assert_leaves(result, {key: fn(value) for key, value in leaves(make()).items()})
    td = make(names=["t"])
    for options, names in (
        ({}, ["t"]),
        ({"names": ["u"]}, ["u"]),
        ({"names": None}, [None]),
        ({"batch_size": [B]}, [None]),
    ):
        assert td.apply(lambda x: x, **options).names == names
    result = td.apply(lambda x: x[None], batch_size=[1, B], names=["new", "t"], device="cpu")
    assert result.names == ["new", "t"] and result.device == CPU
    assert make_lazy().apply(lambda x: x, names=["s", "b"]).names == ["s", "b"]
    td = make(device="cpu")
    assert td.apply(lambda x: x).device == CPU and td.apply(lambda x: x, device=None).device is None
    meta = make().set("s", "text").apply(lambda x: x, device="meta")
    assert meta.device == meta["a"].device == meta["n", "b"].device == meta.get("s").device == META
    td = make(lock=True)
    for locked in (
        td.apply(lambda x: x, propagate_lock=True),
        td.named_apply(lambda key, x: x, propagate_lock=True),
    ):
        assert locked.is_locked and locked["n"].is_locked
    assert not td.apply(lambda x: x).is_locked
    assert not make().apply(lambda x: x, propagate_lock=True).is_locked


def test_results_of_the_function():
    for fn in (lambda x: {"u": x}, lambda x: TensorDict({"u": x}, [B])):
        result = make().apply(fn)
        assert type(result["a"]) is TensorDict
        assert set(leaves(result)) == {("a", "u"), ("n", "b", "u")}
    assert make().apply(lambda x: "text")["a"] == "text"
    nothing = [make().apply(lambda x: None), make().apply(lambda x: None, filter_empty=True)]
    nothing += [make_lazy().apply(lambda x: None), make().named_apply(lambda key, x: None)]
    assert nothing == [None] * 4
    result = make().apply(lambda x: None, filter_empty=False)
    assert set(result.keys(True)) == {"n"} and result.batch_size == (B,)
    empty = TensorDict({}, [B])
    assert empty.apply(lambda x: None).batch_size == (B,)
    assert empty.apply(lambda x: None, filter_empty=True) is None
    td = TensorDict({"a": torch.ones(B), "n": {}, "s": "text"}, [B])
    for flag, keys in ((None, {"a", "n", "s"}), (False, {"a", "n", "s"}), (True, {"a", "s"})):
        assert set(td.apply(lambda x: x, filter_empty=flag).keys(True)) == keys
        assert td.apply(lambda x: None, filter_empty=flag)["s"] == "text"
    td = make()
    assert td.apply_(lambda x: x * 0 if x.ndim > 1 else None) is td.apply_(lambda x: None) is td
    assert_leaves(td, {"a": torch.zeros(B, T), N_B: make()["n", "b"]})


def fail(x):
    raise ZeroDivisionError("inside")


def identity(x):
    return x


R, WIDE = RuntimeError, TensorDict({}, [T])
REFUSED = {
    "shape": (lambda: make().apply(lambda x: x.sum()), R, "batch dimension mismatch.*'a'"),
    "keyword": (lambda: make().apply(identity, no_such=3), (TypeError, FutureWarning), ""),
    "inside": (lambda: make().apply(fail), ZeroDivisionError, "inside"),
    "locked out": (lambda: make().apply(identity, out=make(lock=True)), R, "modify locked"),
    "batch": (lambda: make().apply(identity, out=WIDE, batch_size=[B]), R, "batch_size"),
    "device": (lambda: make().apply(identity, out=make(), device="cpu"), R, "device"),
    "out": (lambda: make().apply(identity, out=WIDE), R, "batch dimension mismatch"),
    "map": (lambda: make().map(identity, dim=3, num_workers=1), (IndexError, ValueError, R), ""),
}


def test_refused():
    each(REFUSED, raises)


# ------------------------------------------------------------------------------ map over chunks


def double(td):
    return TensorDict({"c": td["a"] * 2}, td.batch_size)


def sigterm_state(td):
    """Whether SIGTERM has its default handler, and whether the mask blocks it, for each row."""
    default = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    mask = signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    rows = td.batch_size
    return TensorDict({"default": torch.full(rows, default), "mask": torch.full(rows, mask)}, rows)


class Lingering:
    """Its deletion keeps the worker that made it away from the queue for a while."""

    def __init__(self, td):
        self.home = os.getppid()

    def __del__(self):
        if os.getppid() == self.home:
            time.sleep(0.5)


def pool(**options):
    return {"num_workers": 1, "generator": torch.Generator(), **options}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        *({"chunksize": 2}, {"num_chunks": 3}, {"chunksize": 0}),
        {"chunksize": 2, "max_tasks_per_child": 1},  # a worker ends before its result is fetched
    ],
    ids=str,
)
def test_chunks_are_joined_in_order(options):
    td = TensorDict({"a": torch.arange(6.0)}, [6])
    result = td.map(double, 0, **pool(**options))
    assert_leaves(result, {"c": td["a"] * 2})
    assert result.batch_size == (6,)


@pytest.mark.slow
def test_chunks_of_another_dim_and_one_by_one():
    td = TensorDict({"a": torch.arange(6.0).reshape(2, 3)}, [2, 3])
    assert_leaves(td.map(double, dim=1, **pool(chunksize=1)), {"c": td["a"] * 2})
    chunks = td.map_iter(double, **pool(chunksize=1, shuffle=False))
    torch.testing.assert_close(torch.cat([chunk["c"] for chunk in chunks]), td["a"] * 2)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_pool_can_end_its_workers_whatever_handles_sigterm():
    """A training run handles SIGTERM and continues; if its forks did so, their pool would hang."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        td = TensorDict({"a": torch.arange(2.0)}, [2])
        found = td.map(sigterm_state, **pool(num_chunks=2))
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        td = TensorDict({"a": torch.arange(6.0)}, [6])  # a worker misses its last message
        assert len(list(td.map_iter(Lingering, **pool(num_chunks=3)))) == 3
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGTERM, before)
    assert found["default"].all() and not found["mask"].any()


def test_map_into_out_and_arguments_of_the_pool(monkeypatch):
    """Each worker starts with another seed."""
    td, received = TensorDict(a=torch.arange(6).reshape(3, 2), batch_size=[3]), []
    for chunksize in (0, 1, 2):
        out = td.clone().zero_()
        assert td.map(lambda x: x + 1, num_workers=0, chunksize=chunksize, out=out) is out
        assert (out == td + 1).all()
    wide = TensorDict(td, [3, 2])
    out = wide.clone().zero_()
    wide.map(lambda x: x + 1, dim=1, num_workers=0, chunksize=1, out=out)
    assert (out == wide + 1).all()

    class Context:
        Value = staticmethod(torch.multiprocessing.Value)

        def Pool(self, num_workers, first_act, arguments):
            received.extend([num_workers, first_act, *arguments])
            return ThreadPool(num_workers)

    def context(method):
        received.append(method)
        return Context()

    monkeypatch.setattr(torch.multiprocessing, "get_context", context)
    options = {"worker_threads": 7, "mp_start_method": "spawn"}
    options |= {"max_tasks_per_child": 1, "chunksize": 1}  # 3 tasks: a pool of 2 workers, another
    assert (td.map(lambda x: x + 1, num_workers=2, **options) == td + 1).all()
    method, num_workers, first_act, seed, threads, *second = received
    assert (method, num_workers, threads) == ("spawn", 2, 7)
    assert second == [num_workers, first_act, seed, threads]
    drawn, state, used = [], torch.get_rng_state(), torch.get_num_threads()
    for _ in range(2):
        first_act(seed, used)
        drawn.append(torch.initial_seed())
    torch.set_rng_state(state)
    assert drawn[1] == drawn[0] + 1


# ----------------------------------------------------------------- torch.utils._pytree


def test_paths_specs_and_other_trees():
    td = make()
    assert all(x is y for x, y in zip(pytree.tree_leaves(td), leaves(td).values(), strict=True))
    paths = [path for path, _ in pytree.tree_flatten_with_path(td)[0]]
    assert paths == [(pytree.MappingKey("a"),), (pytree.MappingKey(N_B),)]
    one, other = pytree.tree_structure(td), make().rename_key_("a", "z")
    assert one == pytree.tree_structure(make() + 1) and one != pytree.tree_structure(other)
    result = pytree.tree_map(lambda x: x * 0, {"x": [make(), torch.ones(1)], "y": (make(),)})
    assert not result["x"][0].any() and not result["y"][0].any()
    sums = pytree.tree_map(lambda x: x.sum(), td)  # leaves of another shape
    assert_leaves(sums, {key: value.sum() for key, value in leaves(td).items()})
    assert sums.batch_size == ()
    found = pytree.tree_leaves([make(), torch.ones(1)], is_leaf=is_tensor_collection)
    assert isinstance(found[0], TensorDict) and len(found) == 2
