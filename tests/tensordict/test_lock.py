"""Locking: which changes a locked container refuses, who is locked with whom, and how to unlock."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

from raffia import LazyStackedTensorDict, NonTensorData, TensorDict, lazy_stack

B, T, A = 2, 3, 5
LEAVES = ["a", ("b", "c"), ("b", "d", "e")]
NODES = ["b", ("b", "d")]
LOCKED = r"Cannot modify locked"
PART_OF_A_GRAPH = r"[Uu]nlock the root"


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
    return {k: v.clone() for k, v in td.items(True, True)}, td.batch_size, td.names, td.is_locked


def unchanged(td, before):
    leaves, *rest = before
    now, *rest_now = snapshot(td)
    return (
        rest == rest_now
        and set(now) == set(leaves)
        and all(torch.equal(now[k], leaves[k]) for k in leaves)
    )


class TestFlag:
    def test_the_whole_tree(self, td):
        assert not td.is_locked
        assert td.lock_() is td and td.is_locked
        assert all(td[k].is_locked for k in NODES)
        assert td.unlock_() is td and not td.is_locked
        assert not any(td[k].is_locked for k in NODES)

    def test_twice_is_once(self, td):
        assert td.lock_().lock_().is_locked
        assert not td.unlock_().is_locked and not td.unlock_().is_locked

    def test_property_sets(self, td):
        td.is_locked = True
        assert td.is_locked and td["b", "d"].is_locked
        td.is_locked = False
        assert not td.is_locked and not td["b", "d"].is_locked

    def test_constructor(self):
        assert make(lock=True)["b", "d"].is_locked

    def test_text_is_locked_too(self):
        td = TensorDict({"s": "x"}, [B], lock=True)
        assert isinstance(td.get("s"), NonTensorData) and td.get("s").is_locked and td["s"] == "x"

    def test_locking_a_child_leaves_the_parent_open(self):
        td = make()
        td["b"].lock_()
        assert not td.is_locked and td["b", "d"].is_locked
        td["z"] = torch.ones(B, T)
        with pytest.raises(RuntimeError, match=LOCKED):
            td["b", "n"] = torch.ones(B, T)
        with pytest.raises(RuntimeError, match=LOCKED):
            td.update({"b": {"n": torch.ones(B, T)}})
        td["b"].unlock_()["n"] = torch.ones(B, T)
        assert ("b", "n") in keys(td)


NEW = torch.ones(B, T)
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
    "update": lambda td: td.update({"a": torch.ones(B, T, A)}),
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
    "index assignment, new key": lambda td: td.__setitem__(
        0, TensorDict({"n": torch.ones(T)}, [T])
    ),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("kind", ["plain", "lazy0", "lazy1"])
def test_refused(what, kind):
    td = KINDS[kind]().lock_()
    before = snapshot(td)
    with pytest.raises(RuntimeError, match=LOCKED):
        REFUSED[what](td)
    assert unchanged(td, before) and td["b"].is_locked


IN_PLACE = {
    "set_": lambda td: td.set_("a", torch.full((B, T, A), 7.0)),
    "set inplace": lambda td: td.set("a", torch.full((B, T, A), 7.0), inplace=True),
    "update_": lambda td: td.update_({"a": torch.full((B, T, A), 7.0)}),
    "update inplace": lambda td: td.update({"a": torch.full((B, T, A), 7.0)}, inplace=True),
    "set_at_": lambda td: td.set_at_("a", 7.0, slice(None)),
    "update_at_": lambda td: td.update_at_({"a": torch.full((B, T, A), 7.0)}, slice(None)),
    "index assignment": lambda td: td.__setitem__(
        slice(None), td.clone().apply(lambda x: x * 0 + 7)
    ),
    "scalar index assignment": lambda td: td.__setitem__(..., 7.0),
    "fill_": lambda td: td.fill_("a", 7.0),
    "apply_": lambda td: td.apply_(lambda x: x.fill_(7.0)),
    "copy_": lambda td: td.copy_(td.clone().apply(lambda x: x * 0 + 7)),
    "zero_ and add_": lambda td: td.zero_().add_(7.0),
    "write into the tensor": lambda td: (
        [x.fill_(7.0) for x in td.values(True, True)] and td.set_("a", td["a"] * 0 + 7)
    ),
}


@pytest.mark.parametrize("what", IN_PLACE)
@pytest.mark.parametrize("kind", ["plain", "lazy0", "lazy1"])
def test_allowed_in_place(what, kind):
    td = KINDS[kind]().lock_()
    IN_PLACE[what](td)
    assert (td["a"] == 7).all() and keys(td) == set(LEAVES)
    assert td.is_locked and td["b"].is_locked


@pytest.mark.parametrize("kind", ["plain", "lazy0"])
class TestStillReads:
    def test_setdefault_of_a_present_key(self, kind):
        td = KINDS[kind]().lock_()
        assert (
            td.setdefault("a", NEW).shape == (B, T, A) and td["b"].setdefault("c", NEW).sum() == 0
        )

    def test_pop_of_a_missing_key(self, kind):
        td = KINDS[kind]().lock_()
        assert td.pop("zz", None) is None
        with pytest.raises(KeyError):
            td.pop("zz")

    def test_names_may_change(self, kind):
        td = KINDS[kind]().lock_()
        td.names = ["p", "q"]
        assert td.names == ["p", "q"] and td.is_locked


class TestParents:
    @pytest.mark.parametrize("key", NODES, ids=str)
    def test_a_child_is_not_unlocked_alone(self, td, key):
        td.lock_()
        with pytest.raises(RuntimeError, match=PART_OF_A_GRAPH):
            td[key].unlock_()
        assert td.is_locked and td["b"].is_locked and td["b", "d"].is_locked
        td.unlock_()
        assert not td[key].unlock_().is_locked

    def test_members_of_a_lazy_stack(self):
        td = make()
        lazy = lazy_stack([td, make()]).lock_()
        assert td.is_locked and lazy.tensordicts[1]["b"].is_locked
        with pytest.raises(RuntimeError, match=PART_OF_A_GRAPH):
            td.unlock_()
        lazy.unlock_()
        assert not td.is_locked and not td["b"].is_locked

    def test_the_parent_is_gone(self):
        td = make().lock_()
        child = td["b", "d"]
        del td
        gc.collect()
        assert child.is_locked and not child.unlock_().is_locked
        child["z"] = torch.ones(B, T)

    def test_the_lazy_parent_is_gone(self):
        td = make()
        lazy = lazy_stack([td, make()]).lock_()
        del lazy
        gc.collect()
        assert not td.unlock_().is_locked

    def test_children_do_not_keep_their_parent_alive(self):
        td = make().lock_()
        child, parent = td["b"], weakref.ref(td)
        del td
        gc.collect()
        assert parent() is None and child.is_locked

    def test_two_parents(self):
        shared = TensorDict({"c": torch.ones(B)}, [B])
        one, two = TensorDict({"s": shared}, [B]).lock_(), TensorDict({"s": shared}, [B]).lock_()
        with pytest.raises(RuntimeError, match=PART_OF_A_GRAPH):
            one.unlock_()
        assert one.is_locked and two.is_locked and shared.is_locked
        del two
        gc.collect()
        assert not one.unlock_().is_locked and not shared.is_locked

    def test_two_parents_under_one_root(self):
        shared = TensorDict({"c": torch.ones(B)}, [B])
        root = TensorDict({"one": {"s": shared}, "two": {"s": shared}}, [B]).lock_()
        assert not root.unlock_().is_locked and not shared.is_locked

    def test_an_open_parent_does_not_hold_its_child(self):
        child = TensorDict({"c": torch.ones(B)}, [B]).lock_()
        parent = TensorDict({"s": child}, [B])
        assert not parent.is_locked and parent["s"] is child and not child.unlock_().is_locked

    def test_a_parent_locked_later_does(self):
        child = TensorDict({"c": torch.ones(B)}, [B]).lock_()
        parent = TensorDict({"s": child}, [B]).lock_()
        with pytest.raises(RuntimeError, match=PART_OF_A_GRAPH):
            child.unlock_()
        assert not parent.unlock_()["s"].is_locked

    def test_a_child_taken_out(self):
        td = make().lock_()
        td.unlock_()
        child = td.pop("b")
        td.lock_()
        assert not child.is_locked and not child.lock_().unlock_().is_locked


class TestContextManagers:
    def test_unlock_relocks(self, td):
        td.lock_()
        with td.unlock_() as inside:
            assert inside is td and not td.is_locked and not td["b"].is_locked
            td["z"] = torch.ones(B, T)
            td["n"] = {"m": torch.ones(B, T)}
        assert td.is_locked and td["b", "d"].is_locked and td["n"].is_locked
        assert keys(td) == {*LEAVES, "z", ("n", "m")}
        with pytest.raises(RuntimeError, match=LOCKED):
            td["n", "o"] = torch.ones(B, T)

    def test_lock_unlocks(self, td):
        with td.lock_() as inside:
            assert inside is td and td.is_locked
            with pytest.raises(RuntimeError, match=LOCKED):
                td["z"] = torch.ones(B, T)
        assert not td.is_locked and not td["b"].is_locked
        td["z"] = torch.ones(B, T)

    def test_nothing_to_do(self, td):
        with td.unlock_():
            assert not td.is_locked
        assert not td.is_locked
        td.lock_()
        with td.lock_():
            assert td.is_locked
        assert td.is_locked

    @pytest.mark.parametrize("start", [False, True])
    def test_state_returns_after_an_error(self, td, start):
        td.is_locked = start
        with pytest.raises(ZeroDivisionError):
            with td.unlock_() if start else td.lock_():
                raise ZeroDivisionError
        assert td.is_locked == start

    def test_nested_contexts(self):
        td = make().lock_()
        with td.unlock_():
            with td.lock_():
                assert td.is_locked
            assert not td.is_locked
        assert td.is_locked


class TestCopies:
    @pytest.mark.parametrize(
        "how", ["clone", "clone(False)", "copy", "copy.copy", "deepcopy", "to_tensordict"]
    )
    def test_copies_are_open(self, td, how):
        td.lock_()
        new = {
            "clone": td.clone,
            "clone(False)": lambda: td.clone(False),
            "copy": td.copy,
            "copy.copy": lambda: copy.copy(td),
            "deepcopy": lambda: copy.deepcopy(td),
            "to_tensordict": td.to_tensordict,
        }[how]()
        assert not new.is_locked and not new["b"].is_locked and not new["b", "d"].is_locked
        new["b", "d", "z"] = torch.ones(B, T)
        del new["a"]
        assert keys(td) == set(LEAVES) and td.is_locked

    @pytest.mark.parametrize("locked", [False, True])
    def test_pickle_keeps_the_lock(self, td, locked):
        td.is_locked = locked
        new = pickle.loads(pickle.dumps(td))
        assert type(new) is type(td) and new.is_locked == new["b", "d"].is_locked == locked
        assert new.batch_size == td.batch_size and new.names == td.names and new.device == td.device
        assert keys(new) == set(LEAVES) and torch.equal(new["a"], td["a"])
        if locked:
            with pytest.raises(RuntimeError, match=PART_OF_A_GRAPH):
                new["b"].unlock_()
        assert not new.unlock_()["b", "d"].is_locked

    @pytest.mark.parametrize(
        "op",
        [
            lambda td: td.apply(lambda x: x),
            lambda td: td.select("b"),
            lambda td: td.exclude("a"),
            lambda td: td.flatten_keys(),
            lambda td: td.empty(),
            lambda td: td.replace({"a": NEW}),
            lambda td: torch.stack([td, td]),
            lambda td: torch.cat([td, td]),
        ],
        ids=["apply", "select", "exclude", "flatten_keys", "empty", "replace", "stack", "cat"],
    )
    def test_new_containers_are_open(self, op):
        td = make().lock_()
        new = op(td)
        assert not new.is_locked and td.is_locked
        new["new"] = torch.ones(new.batch_size)
        assert "new" not in td

    def test_locked_children_stay_locked_in_a_selection(self):
        td = make().lock_()
        new = td.exclude("a")
        assert new["b"] is td["b"] and new["b"].is_locked

    def test_to_the_same_place_is_the_same_object(self):
        td = make(device="cpu").lock_()
        assert td.to("cpu") is td and td.is_locked


class TestCaches:
    """Anything that is remembered while locked must be forgotten when the container changes."""

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

    @pytest.mark.parametrize("change", CHANGES)
    @pytest.mark.parametrize("kind", ["plain", "in-lazy", "holds-lazy"])
    @pytest.mark.parametrize("context", [False, True])
    def test_listing_after_a_change(self, change, kind, context):
        act, expected = self.CHANGES[change]
        td = KINDS[kind]().lock_()

        def look():
            ks = list(td.keys(True, True))
            assert set(ks) == {k for k, _ in td.items(True, True)} and len(ks) == len(
                list(td.values(True, True))
            )
            assert set(td.flatten_keys().keys(leaves_only=True)) == {
                k if isinstance(k, str) else ".".join(k) for k in ks
            }
            assert set(td.keys(True, True, sort=True)) == set(ks)
            assert all(torch.equal(td[k], v) for k, v in td.items(True, True))
            return set(ks)

        assert look() == look() == set(LEAVES)
        if context:
            with td.unlock_():
                act(td)
        else:
            act(td.unlock_())
            assert look() == expected
            td.lock_()
        assert look() == look() == expected
        if change == "replace":
            assert (td["a"] == 5).all() and td["a"].shape == (B, T)

    def test_lazy_listing_after_a_change(self):
        td = KINDS["lazy0"]().lock_()
        assert (
            set(td.keys(True, True))
            == set(td.flatten_keys().unflatten_keys().keys(True, True))
            == set(LEAVES)
        )
        with td.unlock_():
            td["b", "z"] = torch.ones(B, T)
            del td["a"]
        assert keys(td) == {k for k, _ in td.items(True, True)} == {*LEAVES[1:], ("b", "z")}
        with td.unlock_():
            td.tensordicts[0]["b"].pop("z")
        assert keys(td) == {k for k, _ in td.items(True, True)} == set(LEAVES[1:])

    def test_in_place_writes_show(self, td):
        td.lock_()
        list(td.items(True, True))
        td.set_("a", torch.zeros(B, T, A))
        assert (dict(td.items(True, True))["a"] == 0).all()
        td.set_(("b", "c"), torch.ones(B, T))
        assert (dict(td.items(True, True))["b", "c"] == 1).all()

    def test_batch_size_and_names_are_not_remembered_ours(self):
        td = make().lock_()
        td[0], td.flatten_keys(), td.clone()
        td.batch_size = [B]
        assert td[0].batch_size == td.clone()[
            0
        ].batch_size == () and td.flatten_keys().batch_size == (B,)
        td.names = ["x"]
        assert td.flatten_keys().names == td.clone().names == ["x"]


class TestLazy:
    def test_all_members_locked_means_locked(self):
        lazy = lazy_stack([make(), make()])
        lazy.tensordicts[0].lock_()
        assert not lazy.is_locked
        lazy.tensordicts[1].lock_()
        assert lazy.is_locked

    @pytest.mark.parametrize(
        "change",
        [lambda td: td.append(make()), lambda td: td.insert(0, make())],
        ids=["append", "insert"],
    )
    def test_membership_is_locked(self, change):
        lazy = lazy_stack([make(), make()]).lock_()
        with pytest.raises(RuntimeError, match=LOCKED):
            change(lazy)
        assert lazy.batch_size == (2, B, T)
        change(lazy.unlock_())
        assert lazy.batch_size == (3, B, T) and isinstance(lazy, LazyStackedTensorDict)
