"""Locking: which changes a locked container refuses, who is locked with whom, and how to unlock."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

from raffia import LazyStackedTensorDict, NonTensorData, TensorDict, lazy_stack
from tests.tensordict.invariants import sound

B, T, A = 2, 3, 5
LEAVES = ["a", ("b", "c"), ("b", "d", "e")]
NODES = ["b", ("b", "d")]
LOCKED = r"Cannot modify locked"
PART_OF_A_GRAPH = r"[Uu]nlock the root"
NEW, SEVEN = torch.ones(B, T), torch.full((B, T, A), 7.0)


def make(**kwargs):
    return TensorDict(
        {
            "a": torch.arange(30.0).reshape(B, T, A),
            "b": {"c": torch.zeros(B, T), "d": {"e": torch.ones(B, T, 4)}},
        },
        [B, T],
        **kwargs,
    )


KINDS = {
    "plain": make,
    "dressed": lambda: make(device="cpu", names=["x", "y"]),
    "lazy0": lambda: lazy_stack(list(make().unbind(0)), 0),
    "lazy1": lambda: lazy_stack(list(make().unbind(1)), 1),
    "in-lazy": lambda: lazy_stack([make(), make()])[0],
    "holds-lazy": lambda: TensorDict(
        {**make().to_dict(), "b": lazy_stack(list(make()["b"].unbind(0)))}, [B, T]
    ),
}


@pytest.fixture(params=KINDS)
def td(request):
    return KINDS[request.param]()


def keys(td):
    return set(td.keys(True, True))


def snapshot(td):
    leaves = {key: leaf.tolist() for key, leaf in td.items(True, True)}
    return leaves, td.batch_size, td.names, td.is_locked


def locks(td):
    return [td.is_locked, *[td[key].is_locked for key in NODES]]


def refused(call, words=LOCKED):
    with pytest.raises(RuntimeError, match=words):
        call()


REFUSED = {
    "set new": lambda td: td.set("z", NEW),
    "set existing": lambda td: td.set("a", NEW),
    "set new, inplace": lambda td: td.set("z", NEW, inplace=True),
    "setitem new": lambda td: td.__setitem__("z", NEW),
    "setitem existing": lambda td: td.__setitem__("a", NEW),
    "setitem nested": lambda td: td.__setitem__(("b", "c"), NEW),
    "setitem new level": lambda td: td.__setitem__(("n", "m"), NEW),
    "setitem of a child": lambda td: td["b"].__setitem__("z", NEW),
    "setitem of a grandchild": lambda td: td["b", "d"].__setitem__("z", NEW),
    "del": lambda td: td.__delitem__("a"),
    "del nested": lambda td: td.__delitem__(("b", "c")),
    "del_": lambda td: td.del_("a"),
    "pop": lambda td: td.pop("a"),
    "pop nested": lambda td: td.pop(("b", "c")),
    "popitem": lambda td: td.popitem(),
    "clear": lambda td: td.clear(),
    "rename_key_": lambda td: td.rename_key_("a", "z"),
    "rename_key_ nested": lambda td: td.rename_key_(("b", "c"), ("b", "z")),
    "update": lambda td: td.update({"a": SEVEN}),
    "update new": lambda td: td.update({"z": NEW}),
    "update nested": lambda td: td.update({"b": {"c": NEW}}),
    "update child": lambda td: td["b"].update({"c": NEW}),
    "setdefault new": lambda td: td.setdefault("z", NEW),
    "create_nested": lambda td: td.create_nested("z"),
    "set_non_tensor": lambda td: td.set_non_tensor("s", "x"),
    "select inplace": lambda td: td.select("a", inplace=True),
    "exclude inplace": lambda td: td.exclude("a", inplace=True),
    "flatten_keys inplace": lambda td: td.flatten_keys(inplace=True),
    "separates": lambda td: td.separates("a"),
    "new key of a row": lambda td: td.__setitem__(0, TensorDict({"n": torch.ones(T)}, [T])),
}


def sevens(td):
    return td.clone().apply(lambda x: x * 0 + 7)


IN_PLACE = {
    "set_": lambda td: td.set_("a", SEVEN),
    "set inplace": lambda td: td.set("a", SEVEN, inplace=True),
    "update_": lambda td: td.update_({"a": SEVEN}),
    "update inplace": lambda td: td.update({"a": SEVEN}, inplace=True),
    "set_at_": lambda td: td.set_at_("a", 7.0, slice(None)),
    "update_at_": lambda td: td.update_at_({"a": SEVEN}, slice(None)),
    "index assignment": lambda td: td.__setitem__(slice(None), sevens(td)),
    "scalar index assignment": lambda td: td.__setitem__(..., 7.0),
    "fill_": lambda td: td.fill_("a", 7.0),
    "apply_": lambda td: td.apply_(lambda x: x.fill_(7.0)),
    "copy_": lambda td: td.copy_(sevens(td)),
    "zero_ and add_": lambda td: td.zero_().add_(7.0),
}


@pytest.mark.parametrize("kind", ["plain", "lazy0", "lazy1"])
def test_what_a_locked_container_refuses_and_takes(kind):
    for change in REFUSED.values():
        td = KINDS[kind]().lock_()
        before = snapshot(td)
        told = rf"{LOCKED}.*set_\(.*unlock_"  # what works instead
        refused(lambda td=td, change=change: change(td), told)
        assert snapshot(td) == before and td["b"].is_locked and sound(td)
    for name, change in IN_PLACE.items():
        td = KINDS[kind]().lock_()
        list(td.items(True, True))  # what is remembered shows the change, too
        change(td)
        assert (td["a"] == 7).all() and (dict(td.items(True, True))["a"] == 7).all(), name
        assert keys(td) == set(LEAVES) and locks(td) == [True] * 3 and sound(td)
    assert td.setdefault("a", NEW).shape == (B, T, A) and td["b"].setdefault("c", NEW).sum() != 6
    assert td.pop("zz", None) is None
    with pytest.raises(KeyError):
        td.pop("zz")
    td.names = ["p", "q"]
    assert td.names == ["p", "q"] and td.is_locked


def test_the_whole_tree_is_locked(td):
    assert locks(td) == [False] * 3
    assert td.lock_() is td.lock_() is td and locks(td) == [True] * 3 and sound(td)
    for key in NODES:
        refused(td[key].unlock_, PART_OF_A_GRAPH)
    assert locks(td) == [True] * 3
    assert td.unlock_() is td.unlock_() is td and locks(td) == [False] * 3
    assert not td["b"].unlock_().is_locked
    for value in (True, False):
        td.is_locked = value
        assert locks(td) == [value] * 3
    assert locks(make(lock=True)) == [True] * 3
    text = TensorDict({"s": "x"}, [B], lock=True)
    assert isinstance(text.get("s"), NonTensorData) and text.get("s").is_locked


def test_locking_a_child_leaves_the_parent_open():
    td = make()
    td["b"].lock_()
    assert locks(td) == [False, True, True]
    td["z"] = NEW
    refused(lambda: td.set(("b", "n"), NEW))
    refused(lambda: td.update({"b": {"n": NEW}}))
    td["b"].unlock_()["n"] = NEW
    assert ("b", "n") in keys(td)


class TestParents:
    def test_members_of_a_lazy_stack(self):
        td = make()
        lazy = lazy_stack([td, make()]).lock_()
        assert td.is_locked and lazy.tensordicts[1]["b"].is_locked
        refused(td.unlock_, PART_OF_A_GRAPH)
        lazy.unlock_()
        assert locks(td) == [False] * 3
        lazy.tensordicts[0].lock_()
        assert not lazy.is_locked
        lazy.tensordicts[1].lock_()
        assert lazy.is_locked  # as all its members are
        for change in (lambda td: td.append(make()), lambda td: td.insert(0, make())):
            lazy = lazy_stack([make(), make()]).lock_()
            refused(lambda change=change, lazy=lazy: change(lazy))
            assert lazy.batch_size == (2, B, T)
            change(lazy.unlock_())
            assert lazy.batch_size == (3, B, T) and isinstance(lazy, LazyStackedTensorDict)

    @pytest.mark.parametrize("wrap", [lambda td: td, lambda td: lazy_stack([td, make()])])
    def test_a_parent_that_is_gone_holds_nothing(self, wrap):
        td = make()
        child = td if wrap(td) is not td else td["b"]
        parent = wrap(td).lock_()
        gone = weakref.ref(parent)
        refused(child.unlock_, PART_OF_A_GRAPH)
        del td, parent
        gc.collect()
        assert gone() is None and child.is_locked and not child.unlock_().is_locked
        child["z"] = torch.ones(child.batch_size)

    def test_two_parents(self):
        shared = TensorDict({"c": torch.ones(B)}, [B])
        one, two = TensorDict({"s": shared}, [B]).lock_(), TensorDict({"s": shared}, [B]).lock_()
        refused(one.unlock_, PART_OF_A_GRAPH)
        assert one.is_locked and two.is_locked and shared.is_locked
        del two
        gc.collect()
        assert not one.unlock_().is_locked and not shared.is_locked
        root = TensorDict({"one": {"s": shared}, "two": {"s": shared}}, [B]).lock_()
        assert not root.unlock_().is_locked and not shared.is_locked

    def test_a_child_that_was_locked_before(self):
        child = TensorDict({"c": torch.ones(B)}, [B]).lock_()
        parent = TensorDict({"s": child}, [B])  # is open, and does not hold it
        assert not parent.is_locked and parent["s"] is child and not child.unlock_().is_locked
        parent = TensorDict({"s": child.lock_()}, [B]).lock_()
        refused(child.unlock_, PART_OF_A_GRAPH)
        assert not parent.unlock_()["s"].is_locked
        td = make().lock_().unlock_()
        child = td.pop("b")
        td.lock_()
        assert not child.is_locked and not child.lock_().unlock_().is_locked


def test_contexts(td):
    with td.lock_() as inside:
        assert inside is td and td.is_locked
        refused(lambda: td.set("z", NEW))
    assert locks(td) == [False] * 3
    with td.unlock_():  # nothing to do
        assert not td.is_locked
    assert not td.is_locked
    td.lock_()
    with td.lock_():
        assert td.is_locked
    assert td.is_locked
    with td.unlock_():
        with td.lock_():
            assert td.is_locked
        assert not td.is_locked
    for start in (False, True):
        td.is_locked = start
        with pytest.raises(ZeroDivisionError), td.unlock_() if start else td.lock_():
            raise ZeroDivisionError
        assert td.is_locked == start
    with td.unlock_() as inside:
        assert inside is td and locks(td) == [False] * 3
        td["z"], td["n"] = NEW, {"m": NEW}
    assert [*locks(td), td["n"].is_locked] == [True] * 4 and sound(td)
    assert keys(td) == {*LEAVES, "z", ("n", "m")}
    refused(lambda: td.set(("n", "o"), NEW))


def test_copies_are_open(td):
    td.lock_()
    for make_copy in (
        lambda td: td.clone(),
        lambda td: td.clone(False),
        lambda td: td.copy(),
        copy.copy,
        copy.deepcopy,
        lambda td: td.to_tensordict(),
    ):
        new = make_copy(td)
        assert locks(new) == [False] * 3
        new["b", "d", "z"] = NEW
        del new["a"]
        assert keys(td) == set(LEAVES) and td.is_locked
    for locked in (True, False):
        td.is_locked = locked
        new = pickle.loads(pickle.dumps(td))
        assert type(new) is type(td) and locks(new) == [locked] * 3
        assert snapshot(new) == snapshot(td) and new.device == td.device
        if locked:
            refused(new["b"].unlock_, PART_OF_A_GRAPH)
        assert not new.unlock_()["b", "d"].is_locked


def test_new_containers_are_open():
    for op in (
        lambda td: td.apply(lambda x: x),
        lambda td: td.select("b"),
        lambda td: td.exclude("a"),
        lambda td: td.flatten_keys(),
        lambda td: td.empty(),
        lambda td: td.replace({"a": NEW}),
        lambda td: torch.stack([td, td]),
        lambda td: torch.cat([td, td]),
    ):
        td = make().lock_()
        new = op(td)
        assert not new.is_locked and td.is_locked
        new["new"] = torch.ones(new.batch_size)
        assert "new" not in td
    assert td.exclude("a")["b"] is td["b"] and td["b"].is_locked
    td = make(device="cpu").lock_()
    assert td.to("cpu") is td and td.is_locked


CHANGES = {
    "add": (lambda td: td.set("z", NEW), {*LEAVES, "z"}),
    "add nested": (lambda td: td.set(("b", "d", "z"), NEW), {*LEAVES, ("b", "d", "z")}),
    "delete": (lambda td: td.pop("b"), {"a"}),
    "delete nested": (lambda td: td["b"].pop("d"), {"a", ("b", "c")}),
    "rename": (lambda td: td.rename_key_("a", "z"), {"z", *LEAVES[1:]}),
    "replace": (lambda td: td.set("a", NEW * 5), set(LEAVES)),
    "replace by text": (lambda td: td.set("a", "text"), set(LEAVES[1:])),
    "clear": (lambda td: td.clear(), set()),
}


@pytest.mark.parametrize("kind", ["plain", "in-lazy", "holds-lazy"])
@pytest.mark.parametrize("context", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_remembered_while_locked_is_forgotten_with_a_change(change, kind, context):
    act, expected = CHANGES[change]
    td = KINDS[kind]().lock_()

    def listed():
        found = keys(td)
        assert found == {k for k, _ in td.items(True, True)} == set(td.keys(True, True, sort=True))
        assert len(found) == len(list(td.values(True, True)))
        flat = {k if isinstance(k, str) else ".".join(k) for k in found}
        assert set(td.flatten_keys().keys(leaves_only=True)) == flat
        assert all([td[k] is v or torch.equal(td[k], v) for k, v in td.items(True, True)])
        return found

    assert listed() == listed() == set(LEAVES)
    if context:
        with td.unlock_():
            act(td)
    else:
        act(td.unlock_())
        assert listed() == expected
        td.lock_()
    assert listed() == listed() == expected
    assert change != "replace" or ((td["a"] == 5).all() and td["a"].shape == (B, T))


def test_what_else_is_not_remembered():
    td = KINDS["lazy0"]().lock_()
    assert keys(td) == keys(td.flatten_keys().unflatten_keys()) == set(LEAVES)
    with td.unlock_():
        td["b", "z"] = NEW
        del td["a"]
    assert keys(td) == {k for k, _ in td.items(True, True)} == {*LEAVES[1:], ("b", "z")}
    with td.unlock_():
        td.tensordicts[0]["b"].pop("z")
    assert keys(td) == {k for k, _ in td.items(True, True)} == set(LEAVES[1:])
    td = make().lock_()
    td[0], td.flatten_keys(), td.clone()
    td.batch_size = [B]
    assert td[0].batch_size == td.clone()[0].batch_size == ()
    assert td.flatten_keys().batch_size == (B,)
    td.names = ["x"]
    assert td.flatten_keys().names == td.clone().names == ["x"]
