"""Locking: changes that a locked container refuses, locks of nested containers, and unlocking."""

import gc
import weakref

import pytest
import torch

from raffia import LazyStackedTensorDict, NonTensorData, TensorDict, lazy_stack
from tests.tensordict.changes import NEW_ENTRIES, REMOVALS, WRITES
from tests.tensordict.invariants import sound
from tests.tensordict.kinds import KINDS, check_same, each, leaves, make

NODES = ["n", "m", ("m", "k")]
LOCKED, PART_OF_A_GRAPH = r"Cannot modify locked", r"[Uu]nlock the root"
NEW = torch.ones(4, 3)
KEYS = set(leaves(make()))

TREES = {
    "dense": make,
    "dressed": lambda: make(names=["x", "y"]).to("cpu"),
    "along 0": lambda: KINDS["along 0"](make()),
    "along 1": lambda: KINDS["along 1"](make()),
    "in a stack": lambda: lazy_stack([make(), make()])[0],
    "holds a stack": lambda: make().set("m", lazy_stack(list(make()["m"].unbind(0)))),
}
every_tree = pytest.mark.parametrize("tree", TREES.values(), ids=TREES)


def locks(td):
    return {td.is_locked, *[td[key].is_locked for key in NODES]}


def refused(call, match=LOCKED):
    with pytest.raises(RuntimeError, match=match):
        call()


@pytest.mark.parametrize("kind", ["dense", "along 0", "along 1"])
def test_which_changes_a_locked_container_refuses(kind):
    def refuse(change):
        td = TREES[kind]().lock_()
        refused(lambda: change(td), rf"{LOCKED}.*set_\(.*unlock_")  # the call that works
        check_same(td, make())
        assert locks(td) == {True}

    def take(change):
        td, want = TREES[kind]().lock_(), make()
        list(td.items(True, True))  # caches show the change, too
        change(td)
        change(want)
        check_same(td, want)
        assert locks(td) == {True}

    a_child = {
        "a child's": lambda td: td["m"].update({"new": NEW}),
        "a grandchild's": lambda td: td["m", "k"].__setitem__("new", NEW),
        "a row's": lambda td: td.__setitem__(0, TensorDict({"q": torch.ones(3)}, [3])),
        "set": lambda td: td.set("b", NEW),
        "text": lambda td: td.set_non_tensor("s", "x"),
    }
    each(NEW_ENTRIES | REMOVALS | a_child, refuse)
    each(WRITES, take)
    td = TREES[kind]().lock_()
    assert td.setdefault("a", NEW).shape == (4, 3, 2) and td.pop("zz", None) is None
    with pytest.raises(KeyError):
        td.pop("zz")
    td.names = ["p", "q"]
    assert td.names == ["p", "q"] and td.is_locked


@every_tree
def test_the_whole_tree_is_locked(tree):
    td = tree()
    assert locks(td) == {False}
    assert td.lock_() is td.lock_() is td and locks(td) == {True} and sound(td)
    for key in NODES:
        refused(td[key].unlock_, PART_OF_A_GRAPH)
    assert locks(td) == {True}
    assert td.unlock_() is td.unlock_() is td and locks(td) == {False}
    for value in (True, False):
        td.is_locked = value
        assert locks(td) == {value}
    text = TensorDict({"s": "x"}, [2], lock=True)
    assert isinstance(text.get("s"), NonTensorData) and text.get("s").is_locked
    td["m"].lock_()
    assert not td.is_locked and td["m", "k"].is_locked
    refused(lambda: td.set(("m", "new"), NEW))
    refused(lambda: td.update({"m": {"new": NEW}}))
    td["m"].unlock_()["new"] = NEW
    assert ("m", "new") in leaves(td)


class TestParents:
    def test_members_of_a_lazy_stack(self):
        td = make()
        lazy = lazy_stack([td, make()]).lock_()
        assert td.is_locked and lazy.tensordicts[1]["m"].is_locked
        refused(td.unlock_, PART_OF_A_GRAPH)
        lazy.unlock_()
        assert locks(td) == {False}
        lazy.tensordicts[0].lock_()
        assert not lazy.is_locked
        lazy.tensordicts[1].lock_()
        assert lazy.is_locked  # as all its members are
        for change in (lambda td: td.append(make()), lambda td: td.insert(0, make())):
            lazy = lazy_stack([make(), make()]).lock_()
            refused(lambda change=change, lazy=lazy: change(lazy))
            assert lazy.batch_size == (2, 4, 3)
            change(lazy.unlock_())
            assert lazy.batch_size == (3, 4, 3) and isinstance(lazy, LazyStackedTensorDict)

    @pytest.mark.parametrize("wrap", [lambda td: td, lambda td: lazy_stack([td, make()])])
    def test_a_deleted_parent_locks_nothing(self, wrap):
        td = make()
        child = td if wrap(td) is not td else td["m"]
        parent = wrap(td).lock_()
        ref = weakref.ref(parent)
        refused(child.unlock_, PART_OF_A_GRAPH)
        del td, parent
        gc.collect()
        assert ref() is None and child.is_locked and not child.unlock_().is_locked
        child["z"] = torch.ones(child.batch_size)

    def test_two_parents(self):
        shared = TensorDict()
        one, two = TensorDict(s=shared).lock_(), TensorDict(s=shared).lock_()
        refused(one.unlock_, PART_OF_A_GRAPH)
        assert one.is_locked and two.is_locked and shared.is_locked
        del two
        gc.collect()
        assert not one.unlock_().is_locked and not shared.is_locked
        root = TensorDict({"one": {"s": shared}, "two": {"s": shared}}).lock_()
        assert not root.unlock_().is_locked and not shared.is_locked

    def test_a_child_that_was_locked_before(self):
        child = TensorDict().lock_()
        parent = TensorDict(s=child)  # is open, and does not hold it
        assert not parent.is_locked and parent["s"] is child and not child.unlock_().is_locked
        parent = TensorDict(s=child.lock_()).lock_()
        refused(child.unlock_, PART_OF_A_GRAPH)
        assert not parent.unlock_()["s"].is_locked
        td = make().lock_().unlock_()
        child = td.pop("m")
        td.lock_()
        assert not child.is_locked and not child.lock_().unlock_().is_locked


@every_tree
def test_contexts(tree):
    td = tree()
    with td.lock_() as inside:
        assert inside is td and td.is_locked
    assert locks(td) == {False}
    for start in (False, True):
        td.is_locked = start
        for change in (td.lock_, td.unlock_):
            with change():
                assert td.is_locked == (change == td.lock_)
            assert td.is_locked == start
            with pytest.raises(ZeroDivisionError), change():
                raise ZeroDivisionError
            assert td.is_locked == start
    with td.unlock_() as inside:
        with td.lock_():
            assert td.is_locked
        assert inside is td and locks(td) == {False}
        td["z"], td["new"] = NEW, {"m": NEW}
    assert {*locks(td), td["new"].is_locked} == {True} and sound(td)
    assert set(leaves(td)) == {*KEYS, "z", ("new", "m")}
    refused(lambda: td.set(("new", "o"), NEW))


CHANGES = {
    "add": (lambda td: td.set("z", NEW), {*KEYS, "z"}),
    "add nested": (lambda td: td.set(("m", "k", "z"), NEW), {*KEYS, ("m", "k", "z")}),
    "delete": (lambda td: td.pop("m"), KEYS - {("m", "k", "d")}),
    "delete nested": (lambda td: td["m"].pop("k"), KEYS - {("m", "k", "d")}),
    "rename": (lambda td: td.rename_key_("a", "z"), {"z", *KEYS} - {"a"}),
    "replace": (lambda td: td.set("a", NEW * 5), KEYS),
    "replace by text": (lambda td: td.set("a", "text"), KEYS - {"a"}),
    "clear": (lambda td: td.clear(), set()),
}


@pytest.mark.parametrize("tree", ["dense", "along 0", "in a stack", "holds a stack"])
@pytest.mark.parametrize("change", CHANGES)
def test_caches_of_a_locked_container_are_cleared_by_a_change(change, tree):
    act, expected = CHANGES[change]

    def listed(td):
        found = set(td.keys(True, True))
        assert found == {k for k, _ in td.items(True, True)} == set(td.keys(True, True, sort=True))
        assert len(found) == len(list(td.values(True, True)))
        flat = {k if isinstance(k, str) else ".".join(k) for k in found}
        assert set(td.flatten_keys().keys(leaves_only=True)) == flat
        assert all([td[k] is v or torch.equal(td[k], v) for k, v in td.items(True, True)])
        return found

    for context in (False, True):
        td = TREES[tree]().lock_()
        assert listed(td) == listed(td) == KEYS
        if context:
            with td.unlock_():
                act(td)
        else:
            act(td.unlock_())
            assert listed(td) == expected
            td.lock_()
        assert listed(td) == listed(td) == expected
        assert change != "replace" or ((td["a"] == 5).all() and td["a"].shape == (4, 3))


def test_what_was_locked_by_itself_is_unlocked_with_the_container_around_it():
    part = TensorDict(x=torch.ones(2)).lock_()
    td = TensorDict(
        n={"part": part}, rows=lazy_stack([part.clone().lock_(), TensorDict(x=torch.ones(2))])
    )
    assert td.unlock_() is td and not part.is_locked and not td["rows"][0].is_locked
    whole = TensorDict(n={"x": torch.ones(2)}).lock_()
    with pytest.raises(RuntimeError, match="part of a locked graph"):
        TensorDict(first=(free := TensorDict().lock_()), k=whole["n"]).unlock_()
    assert free.is_locked  # all or none
    assert whole["n"].is_locked
