"""Views of rows of a container: reads give `parent[index]`, and writes reach the parent."""

import copy
import pickle

import pytest
import torch
from torch.utils import _pytree as pytree

import raffia
from raffia import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from raffia.tensordict.sub import SubTensorDict
from tests.tensordict.changes import NEW_ENTRIES, REMOVALS, WRITES, like, put
from tests.tensordict.invariants import sound
from tests.tensordict.kinds import apply_op, check_same, each, leaves, make, ops, raises
from tests.tensordict.stored import Pair, through_torch

I = slice  # noqa: E741

PARENTS = {
    "dense": make,
    "along 0": lambda: lazy_stack(list(make().unbind(0)), 0),
    "along 1": lambda: lazy_stack(list(make().unbind(1)), 1),
    "rows": lambda: rows_of(make((6, 3)), torch.tensor([5, 0, 3, 1])),
    "memory-mapped": lambda: make().memmap(),
}
INDICES = {
    **{"int": 1, "last": -1, "slice": I(1, 3), "step": I(0, None, 2), "column": (I(None), 2)},
    **{"ellipsis": (..., 0), "new": (None, 1), "list": [3, 1], "all": I(None)},
    **{"tensor": torch.tensor([2, 0]), "two dims": torch.tensor([[3, 1], [0, 2]])},
    "mask": torch.tensor([True, False, True, False]),
    "cells": torch.arange(12).reshape(4, 3) % 5 == 0,
    "pairs": (torch.tensor([0, 3]), torch.tensor([2, 1])),
    "mixed": (I(1, 3), torch.tensor([2, 0])),
    "none of them": torch.zeros(4, dtype=torch.bool),
}
every_parent = pytest.mark.parametrize("parent", PARENTS.values(), ids=PARENTS)


def rows_of(td, index):
    return td._get_sub_tensordict(index)


def plain(td):
    """A dense, independent copy."""
    return getattr(td, "_td", td).to_tensordict()


def view_of(td):
    """The view itself, without the tensorclass around it."""
    return getattr(td, "_td", td)


# ----------------------------------------------------------------------------------- reading


@every_parent
def test_reads_rows_of_the_parent(parent):
    def check(index):
        td = parent()
        rows = rows_of(td, index)
        assert type(view_of(rows)) is SubTensorDict and isinstance(rows, type(td) | TensorDictBase)
        assert sound(rows) and list(rows.keys()) == list(td.keys())
        want = td[index]
        check_same(rows, want)
        assert list(leaves(rows)) == list(leaves(want))
        for name in ("n", "m"):
            assert type(rows.get(name)) is SubTensorDict
        td.zero_()  # a view shows the current values of the parent
        assert not any(value.any() for value in leaves(rows).values())

    each(INDICES, check)


def test_invalid_rows_are_refused():
    for index in (4, -5, torch.tensor([4]), (0, 3), (0, 0, 0), torch.ones(3, dtype=torch.bool)):
        with pytest.raises(IndexError):
            rows_of(make(), index)
        with pytest.raises(IndexError):
            rows_of(TensorDict(), 0)
    mask = INDICES["mask"].clone()
    rows = rows_of(make(), mask)
    mask[:] = True
    assert rows.batch_size == (2, 3)  # a mask is read once


def test_lazy_stacks_of_rows_that_differ():
    td = lazy_stack([TensorDict(a=torch.ones(i, i), batch_size=[i]) for i in (1, 2, 2)])
    rows = rows_of(td, torch.tensor([1, 2]))
    assert rows.batch_size == (2, 2) and rows["a"].shape == (2, 2, 2)
    rows["a"] = torch.zeros(2, 2, 2)
    assert [member["a"].sum().item() for member in td.tensordicts] == [1, 0, 0]


# ----------------------------------------------------------------------------------- writing


def pairs(table, step):
    """Each row of a table with every `step`-th index, from another start each time."""
    return [(name, key) for i, name in enumerate(table) for key in list(INDICES)[i % step :: step]]


def written(make_parent, index, write):
    """The parent and the expected one, after a write into these rows and into a copy of them."""
    td = make_parent()
    want, rows = plain(td), plain(td[index])
    view = rows_of(td, index)
    got, expected = write(view), write(rows)
    assert (got is view) is (expected is rows)
    want[index] = rows
    return td, want


@pytest.mark.parametrize("parent", PARENTS)
def test_writes_reach_the_parent(parent):
    def check(row):
        name, key = row
        td, want = written(PARENTS[parent], INDICES[key], WRITES[name])
        check_same(td, want)

    each(pairs(WRITES, 1 if parent == "dense" else 3), check)


@pytest.mark.parametrize("parent", ["dense", "along 0", "along 1", "rows"])
def test_new_entries_are_zero_in_other_rows(parent):
    def check(row):
        name, key = row
        td, want = written(PARENTS[parent], INDICES[key], NEW_ENTRIES[name])
        check_same(td, want)

    each(pairs(NEW_ENTRIES, 1 if parent == "dense" else 3), check)


@pytest.mark.parametrize("parent", ["dense", "along 0", "along 1", "rows"])
def test_keys_are_removed_from_the_parent(parent):
    def check(row):
        name, key = row
        td, want = PARENTS[parent](), plain(PARENTS[parent]())
        view = rows_of(td, INDICES[key])
        got, expected = REMOVALS[name](view), REMOVALS[name](want)
        assert (got is view) is (expected is want) and (got is view or got == expected)
        check_same(td, want)

    each([(name, key) for name in REMOVALS for key in ("int", "slice", "mask")], check)


def test_writes_are_all_or_nothing():
    def check(write):
        td = make()
        with pytest.raises((RuntimeError, KeyError, TypeError, ValueError)):
            write(rows_of(td, torch.tensor([2, 0])))
        check_same(td, make())

    b = torch.ones(2, 3)
    wide = torch.ones(2, 3, 7)
    mistakes = ops(set_=[("zz", b), ("a", wide)], set=[("new", torch.ones(4, 3)), (("a", "x"), b)])
    mistakes += ops(rename_key_=[("zz", "a"), ("a", "b", {"safe": True})], del_=["zz"], pop=["zz"])
    mistakes += ops(__setitem__=[(0, torch.ones(5, 5, 5))])
    changes = [{"b": b, 3: b}, {"b": b, "a": wide}, {"b": b, ("a", "x"): b}]
    calls = [lambda td, op=op: apply_op(td, op) for op in mistakes]
    calls += [lambda td, new=new: td.update_(new) for new in (*changes, {"b": b, "zz": b})]
    calls += [lambda td, new=new: td.update(new) for new in changes[1:]]
    each(calls, check)


# ----------------------------------------------------------------------------- invalid calls


# calls on rows that are refused, some while the parent is locked, and the words of the error
REFUSED = {
    "prohibited.*td.set_": ops(set=[("b", torch.ones(2, 3)), ("n", make()["n"][[2, 0]])]),
    "call this on the container": ops(lock_=[()], make_memmap=[("q", (2, 3))]),
    "to_tensordict": ops(detach_=[()], requires_grad_=[()], share_memory_=[()], memmap_=[()])
    + ops(pin_memory_=[()], irecv=[0]),
    "names of rows": ops(rename_=[{"x": "u"}], __setattr__=[("names", ["u", "v"])]),
    "batch size of rows": ops(__setattr__=[("batch_size", [2])]),
    "device of rows": ops(auto_device_=[()]),
}
REFUSED_WHILE_LOCKED = {
    "call this on the container": ops(unlock_=[()], __setattr__=[("is_locked", False)]),
    "locked": ops(set=[("new", torch.ones(2, 3))], __setitem__=[("new", torch.ones(2, 3))])
    + ops(update=[({},)], del_=["a"], rename_key_=[("a", "z")]),
}


@pytest.mark.parametrize("locked", [False, True])
def test_refused(locked):
    def check(row):
        td = make((4, 3), names=["x", "y"])
        rows = rows_of(td.lock_() if locked else td, torch.tensor([2, 0]))
        with pytest.raises(RuntimeError, match=row[0]):
            apply_op(rows, row[1])
        check_same(td, make())

    table = REFUSED_WHILE_LOCKED if locked else REFUSED
    each([(words, op) for words, calls in table.items() for op in calls], check)
    with pytest.raises(ValueError, match="itself"):
        td = make()
        td.set("loop", rows_of(td, I(None)))


def test_state_is_that_of_the_parent():
    td = make(names=["x", "y"])
    rows = rows_of(td, (I(None), 1))
    assert rows.names == ["x"] and rows.device is None and not rows.is_locked
    td.names = ["u", "v"]
    assert rows.names == ["u"] == rows.get("m").names
    rows.batch_size, rows.names = rows.batch_size, rows.names  # nothing new
    with rows.unlock_() as same:
        assert same is rows
    td.lock_()
    assert rows.is_locked and rows["n"].is_locked and rows.lock_() is rows and sound(rows)
    rows["b"] = torch.zeros(4)  # written in place
    rows.set_("a", rows["a"] * 0)["n"].add_(1)
    assert not td["b"][:, 1].any() and not td["a"][:, 1].any()
    td.unlock_()
    rows["new"] = torch.ones(4)
    td.clear_device_()
    on = rows_of(TensorDict(a=torch.ones(3), batch_size=[3], device="cpu"), 0)
    assert on.device == torch.device("cpu") == on.clone().device


# --------------------------------------------------------------------------------- results


def test_results_are_no_views():
    td = make()
    rows = rows_of(td, torch.tensor([2, 0]))
    calls = ops(
        clone=[()], copy=[()], to_tensordict=[()], contiguous=[()], detach=[()], double=[()]
    )
    calls += ops(select=[("a", "b", "n", "m")], exclude=["zz"], unflatten_keys=["."], to=["cpu"])
    calls += ops(replace=[{"b": rows["b"]}], apply=[lambda x: x], memmap=[()], memmap_like=[()])
    calls += ops(consolidate=[()], map=[(torch.clone, {"num_workers": 0, "chunksize": 1})])
    made = [lambda td, op=op: apply_op(td, op) for op in calls] + [
        *(copy.copy, copy.deepcopy, torch.zeros_like, lambda td: torch.cat(td.split(1))),
        *(lambda td: pytree.tree_map(lambda x: x, td), lambda td: td.reshape(3, 2).reshape(2, 3)),
        *(lambda td: torch.stack(td.unbind(1), 1), lambda td: td.expand(5, 2, 3)[0]),
    ]

    def check(make_one):
        out = make_one(rows)
        assert type(out) is type(out.get("n")) is TensorDict and out.shape == (2, 3)
        if not out.is_locked:
            out["m", "k", "new"] = torch.ones(2, 3)
        out.apply(lambda x: x * 0)
        check_same(td, make())

    each(made, check)


def test_rows_of_rows_are_views():
    td = make()
    rows = rows_of(td, torch.tensor([2, 0]))
    assert type(rows[0]) is type(rows[:1]) is type(rows[torch.tensor([0])]) is SubTensorDict
    rows[0].zero_()
    rows[torch.tensor([1])]["new"] = torch.ones(1, 3)
    want = make()
    want[2] = like(make()[2], 0)
    want[0] = TensorDict(new=torch.ones(3), batch_size=[3])
    check_same(td, want)


def test_stored_in_another_container():
    td = make()
    outer = TensorDict(rows=rows_of(td, torch.tensor([2, 0])), batch_size=[2])
    outer.update_({"rows": {"b": torch.zeros(2, 3)}})
    outer.set_(("rows", "a"), torch.zeros(2, 3, 2))
    assert not td["b"][[0, 2]].any() and not td["a"][[0, 2]].any()
    outer.lock_()
    assert td.is_locked
    outer.unlock_()
    assert not td.is_locked
    outer["rows", "new"] = torch.ones(2, 3)
    assert td["new"].sum() == 6


def test_pickled(tmp_path):
    for index in (1, I(0, 2), torch.tensor([2, 0])):
        rows = rows_of(make(), index)
        for same in (pickle.loads(pickle.dumps(rows)), through_torch(rows, weights_only=False)):
            check_same(same, rows)
            same.zero_()  # the parent came with it
            assert not any(value.any() for value in leaves(same).values())
    rows.save(tmp_path)
    check_same(raffia.load_memmap(tmp_path), rows)


# ----------------------------------------------------------------------- entries of all kinds


def test_values_that_are_no_tensors():
    td = TensorDict(s="hi", w=["p", "q", "r"], batch_size=[3])
    rows = rows_of(td, torch.tensor([2, 0]))
    assert rows["s"] == "hi" and rows["w"] == ["r", "p"] and rows.get("s").batch_size == (2,)
    rows["w"] = ["x", "y"]
    assert td["w"] == ["y", "q", "x"]
    rows.zero_()
    assert td.get("s").data == "hi" and type(td.get("s")) is NonTensorData
    rows["s"] = "ho"
    assert td.get("s").tolist() == ["ho", "hi", "ho"]
    rows.set("new", "text")
    assert td.get("new").tolist() == ["text"] * 3  # a text has no zero
    rows.set_non_tensor("w", "all")
    assert td["w"] == ["all", "q", "all"] and rows.get_non_tensor("w") == ["all"] * 2


def test_tensorclasses():
    td = TensorDict(p=Pair(x=torch.zeros(3), tag="n", batch_size=[3]), batch_size=[3])
    rows = rows_of(td, torch.tensor([2, 0]))
    assert type(rows["p"]) is Pair and rows["p"].tag == "n"
    rows["p"].x = torch.ones(2)
    assert td["p"].x.tolist() == [1, 0, 1]
    pair = rows_of(Pair(x=torch.zeros(3), batch_size=[3]), I(1, None))
    assert type(pair) is Pair and pair.batch_size == (2,)
    pair.x += 1
    pair.zero_()
    assert type(pair.clone()) is Pair and "SubTensorDict" not in repr(pair.clone())


def test_arithmetic_with_rows_of_a_lazy_stack():
    row = TensorDict(a=torch.arange(3.0), n=TensorDict(b=torch.ones(3)), batch_size=[3])
    stack = lazy_stack([row, row + 1, row + 2, row + 3], 0)
    rows, own = rows_of(stack, torch.tensor([2, 0])), stack[torch.tensor([2, 0])].clone()
    for other in (rows, own, own.to_tensordict(), row):
        for out in (rows + other, other + rows, rows.add(other), rows.lerp(other, 1) + rows):
            assert (out == own + other).all() and type(out) is not SubTensorDict
        assert ((rows >= other) == (own >= other)).all() and (rows - other == own - other).all()
    assert (rows.add_(own) == own + own).all() and (stack[2] == (own + own)[0]).all()


def test_errors_name_the_problem():
    td = TensorDict(a=torch.ones(3), n=TensorDict(), batch_size=[3])
    rows = rows_of(td, torch.tensor([2, 0]))
    a_tensor = "entry 'a' is a tensor; its rows can't be set to a"
    calls = [
        (lambda: rows.set_non_tensor("a", "text"), TypeError, a_tensor),
        (lambda: rows.create_nested("a"), TypeError, a_tensor),
        (lambda: put(td, 0, TensorDict(a=TensorDict())), TypeError, a_tensor),
        (lambda: rows.update({(): torch.ones(2)}), KeyError, "nested tuple of strings"),
        (
            lambda: rows.update([("a", 1)]),
            TypeError,
            "takes a container, a dict or keyword entries",
        ),
    ]
    each(calls, raises)
    assert td["a"].sum() == 3 and rows.update({}) is rows and rows.update(a=torch.zeros(2)) is rows
    assert td["a"].sum() == 1
