"""A change that is refused leaves the container as it was: entries, their order, their values."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raffia import LazyStackedTensorDict, NonTensorData, TensorDict, lazy_stack, tensorclass
from raffia.tensordict import build
from raffia.tensordict.node import Node

ROWS = 3
BAD = torch.zeros(ROWS + 4, 5)  # no container here takes it in


def leaf(value: float = 0.0) -> torch.Tensor:
    return torch.full((ROWS, 2), value)


def tree(start: float = 0.0) -> dict[str, Any]:
    return {
        "a": leaf(start),
        "b": leaf(start + 1),
        "n": {"c": leaf(start + 2), "d": leaf(start + 3), "m": {"e": leaf(start + 4)}},
        "f": leaf(start + 5),
    }


def dense() -> TensorDict:
    td = TensorDict(tree(), batch_size=[ROWS])
    td.set_non_tensor("text", "words")
    td["n", "m"].set_non_tensor("text", ["below"])
    return td


def with_lazy() -> TensorDict:
    return dense().set("lazy", lazy_stack([TensorDict(x=leaf()[0], y=leaf()[0])] * ROWS))


def lazy() -> LazyStackedTensorDict:
    return lazy_stack([dense()[i].clone() for i in range(ROWS)])


def state(node: Any) -> Any:
    """All that a change could alter: objects, their order, versions of tensors, values, locks."""
    if isinstance(node, LazyStackedTensorDict):
        return [state(td) for td in node.tensordicts]
    if isinstance(node, NonTensorData):
        return id(node), node.data
    if isinstance(node, Node):
        entries = [(name, id(value), state(value)) for name, value in node._entries().items()]
        return id(node), node.batch_size, node.is_locked, node.names, entries
    return node._version, node.tolist()


def paths(td: Any) -> list[Any]:
    return [key for key in td.keys(True, True) if "text" not in key]


REFUSED: dict[str, Callable[[Any], Any]] = {
    "update": lambda td: td.update({"a": leaf(9), "new": leaf(9), "n": {"c": leaf(9), "d": BAD}}),
    "update, nested keys": lambda td: td.update({("n", "m", "e"): leaf(9), ("n", "new"): BAD}),
    "update, new levels": lambda td: td.update({("x", "y"): leaf(9), "a": BAD}),
    "update, containers": lambda td: td.update(
        {"n": TensorDict(tree(), batch_size=[ROWS]), "b": BAD}
    ),
    "update, replaced container": lambda td: td.update({"n": leaf(), "a": BAD}),
    "update, clone": lambda td: td.update({"a": leaf(9), "n": {"m": {"e": BAD}}}, clone=True),
    "update, itself": lambda td: td.update({"a": leaf(9), "n": {"self": td}}),
    "update_": lambda td: td.update_({"a": leaf(9), "n": {"c": leaf(9), "d": BAD}}),
    "update_, missing": lambda td: td.update_({"a": leaf(9), "n": {"c": leaf(9), "none": BAD}}),
    "update_at_": lambda td: td.update_at_({"a": leaf(9)[0], "n": {"c": BAD}}, 0),
    "copy_at_": lambda td: td.copy_at_(TensorDict(a=leaf(9)[0], b=BAD[0]), 0),
    "set": lambda td: td.set(("n", "new", "below"), BAD),
    "set_": lambda td: td.set_(("n", "c"), BAD),
    "rename_key_": lambda td: td.rename_key_("a", ("b", "below")),
    "rename_key_, safe": lambda td: td.rename_key_("a", "b", safe=True),
    "rename_key_, nested": lambda td: td.rename_key_(("n", "c"), ("a", "below")),
    "del_": lambda td: td.del_(("n", "none")),
    "pop": lambda td: td.pop(("n", "m", "none")),
    "select": lambda td: td.select("a", ("n", "none"), inplace=True),
    "split_keys": lambda td: td.split_keys(["a"], ["none"], inplace=True),
    "separates": lambda td: td.separates("a", ("n", "none")),
    "cat_tensors": lambda td: td.cat_tensors("a", "b", out_key="c", dim=0),
    "stack_tensors": lambda td: td.stack_tensors("a", "b", out_key=("f", "x"), dim=1),
    "flatten_keys": lambda td: td.set("n.c", leaf()).flatten_keys(".", inplace=True),
}


@pytest.mark.parametrize("make", [dense, with_lazy])
@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_change_changes_nothing(name, make):
    td = make()
    if name == "flatten_keys":
        td.set("n.c", leaf())
    before = state(td)
    with pytest.raises((RuntimeError, KeyError, ValueError, IndexError)):
        REFUSED[name](td) if name != "flatten_keys" else td.flatten_keys(".", inplace=True)
    assert state(td) == before


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in REFUSED
        if n.startswith(("update, n", "update_", "set", "rename", "del")) and n != "update_at_"
    ],
)
def test_a_refused_change_of_a_lazy_stack_changes_nothing(name):
    td = lazy()
    before = state(td)
    with pytest.raises((RuntimeError, KeyError, ValueError, IndexError)):
        REFUSED[name](td)
    assert state(td) == before


@given(st.data())
def test_an_update_with_one_bad_entry_anywhere_changes_nothing(data):
    td = data.draw(st.sampled_from([dense, with_lazy, lazy]))()
    known = [*paths(td), "new", ("n", "new"), ("fresh", "below")]
    keys = data.draw(st.lists(st.sampled_from(known), min_size=1, unique=True))
    keys = [k for k in keys if isinstance(td, TensorDict) or k not in ("lazy", ("lazy", "x"))]
    bad = data.draw(st.integers(0, len(keys) - 1))
    source: dict[Any, Any] = {key: leaf(9) for key in keys}
    source[keys[bad]] = BAD
    if data.draw(st.booleans()):
        nested: dict[str, Any] = {}
        for key, value in source.items():
            level = nested
            *above, last = (key,) if isinstance(key, str) else key
            for name in above:
                level = level.setdefault(name, {})
            level[last] = value
        source = nested
    before = state(td)
    with pytest.raises((RuntimeError, KeyError)):
        td.update(source)
    assert state(td) == before


@pytest.mark.parametrize("method", ["_set_str", "_del_str"])
@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize(
    "change",
    [
        lambda td: td.update({"a": [1.0] * ROWS, "new": "text", ("n", "c"): leaf()}),
        lambda td: td.update(lazy()),
        lambda td: td.rename_key_("a", ("n", "a")),
        lambda td: td.rename_key_(("n", "c"), ("new", "c")),
        lambda td: td.flatten_keys(".", inplace=True),
        lambda td: td.cat_tensors("a", "b", out_key=("n", "ab"), dim=1),
        lambda td: td.split_keys(["a", ("n", "m", "e")], inplace=True),
        lambda td: td.separates("a", ("n", "m")),
    ],
)
def test_an_error_at_the_kth_write_changes_nothing(change, method, at, monkeypatch):
    td, calls, original = dense(), [], getattr(TensorDict, method)
    mine = {id(node) for node in [td, *[v for v in td.values(True) if isinstance(v, Node)]]}

    def failing(self: Any, *args: Any) -> None:
        if id(self) in mine:
            calls.append(args[0])
            if len(calls) == at + 1:
                raise MemoryError("as if there were no more")
        original(self, *args)

    before = state(td)
    monkeypatch.setattr(TensorDict, method, failing)
    try:
        change(td)
    except MemoryError:
        assert state(td) == before
    else:
        assert len(calls) <= at  # there was no such write: the change is done
        assert state(td) != before


def test_the_state_sees_each_kind_of_change():
    """The oracle above can fail: each of these is a change."""
    for change in (
        lambda td: td.set("a", leaf()),
        lambda td: td["a"].zero_(),
        lambda td: td.del_(("n", "c")),
        lambda td: td.set("a", td.pop("a")),  # the same entries in another order
        lambda td: td["n"].lock_(),
        lambda td: td["n", "m"].set_non_tensor("text", "other"),
    ):
        td = dense()
        before = state(td)
        change(td)
        assert state(td) != before


def test_a_change_does_not_save_what_it_does_not_touch(monkeypatch):
    td = TensorDict({f"n{i}": {f"m{j}": tree() for j in range(3)} for i in range(4)}, [ROWS])
    num_nodes = 1 + len([value for value in td.values(True) if isinstance(value, Node)])
    saved = []
    original = TensorDict._stores
    monkeypatch.setattr(TensorDict, "_stores", lambda self: saved.append(self) or original(self))
    for change in (
        lambda: td.update({"n0": {"m0": {"a": torch.zeros(ROWS), "n": None}}}),
        lambda: td.rename_key_(("n1", "m0", "a"), ("n1", "m1", "z")),
        lambda: td.cat_tensors(("n2", "m0", "a"), ("n2", "m0", "b"), out_key="ab", dim=1),
    ):
        saved.clear()
        change()
        assert 0 < len(saved) <= 7 < num_nodes


def test_a_write_with_gradients_keeps_the_graph():
    td = TensorDict(a=torch.zeros(2), b=torch.zeros(2))
    x = torch.ones(2, requires_grad=True)
    td.update_({"a": x * 3, "b": torch.ones(2)})
    td["a"].sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3, 3]


def test_a_deep_copy_shares_within_itself_what_was_shared():
    x = torch.arange(4.0)
    td = TensorDict(a=x, n=dict(b=x), view=x[1:], whole=x.view(2, 2), other=torch.ones(2))
    out = copy.deepcopy(td)
    assert out["a"] is out["n", "b"]
    out["a"][1] = 9
    assert out["view"][0] == out["whole"][0, 1] == 9
    assert x.tolist() == [0, 1, 2, 3]
    one = TensorDict(a=torch.zeros(2), n=dict(b=torch.zeros(3)))
    pair = copy.deepcopy([one, one["a"], one["n"]])
    assert pair[0]["a"] is pair[1]
    assert pair[0]["n"] is pair[2]
    assert pair[1] is not one["a"]


def test_a_deep_copy_of_a_lazy_stack_has_memory_of_its_own():
    x = torch.ones(2)
    for td in (
        lazy_stack([TensorDict(a=torch.ones(2)), TensorDict(a=torch.zeros(2))]),
        lazy_stack([TensorDict(a=x), TensorDict(a=x, b="text")]),
    ):
        out = copy.deepcopy(td)
        assert (out == td).all()
        out[0]["a"].fill_(7)
        assert td[0]["a"].tolist() == [1, 1]
        assert (out[0]["a"] is out[1]["a"]) == (td[0]["a"] is td[1]["a"])


def test_only_a_container_put_into_an_older_one_is_searched_for_it(monkeypatch):
    searched = []
    original = build.holds
    monkeypatch.setattr(
        build, "holds", lambda value, td: searched.append(value) or original(value, td)
    )
    td = TensorDict(a=torch.zeros(2))
    for _ in range(5):
        td = TensorDict(below=td, a=torch.zeros(2))
    td = td.apply(lambda x: x + 1)
    td.set(("new", "levels"), torch.zeros(2))
    td.update({"a": torch.zeros(2), "below": {"a": torch.zeros(2)}})
    assert not searched
    td["other"] = (other := TensorDict())
    assert searched == [other]


@tensorclass
class Wrapped:
    x: Any


def test_a_container_can_not_hold_itself_in_any_way():
    td = TensorDict(a=TensorDict(b=torch.zeros(2)))
    for value in (
        td,
        TensorDict(c=TensorDict(d=td)),
        lazy_stack([td]),
        Wrapped(x=td, batch_size=[]),
        TensorDict(e=Wrapped(x=td, batch_size=[])),
    ):
        with pytest.raises(ValueError, match="can't hold itself"):
            td["loop"] = value
    wrapped = Wrapped(x=TensorDict(), batch_size=[])
    with pytest.raises(ValueError, match="can't hold itself"):
        wrapped._td["x"] = TensorDict(z=wrapped)
    locked = TensorDict(td=td).lock_()
    assert build.holds(locked, td)
    assert not build.holds(locked, TensorDict())
