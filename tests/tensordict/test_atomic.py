"""A refused change leaves the container unchanged: entries, their order, their values."""

import operator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raffia import LazyStackedTensorDict, NonTensorData, TensorDict, lazy_stack, tensorclass
from raffia.tensordict import access, build
from raffia.tensordict.node import Node

ROWS = 3
BAD = torch.zeros(ROWS + 4, 5)  # no container here takes it in
ERRORS = (RuntimeError, KeyError, ValueError, IndexError)


def leaf(value=0.0):
    return torch.full((ROWS, 2), value)


NINE = leaf(9.0)


def tree(start=0.0):
    inner = {"c": leaf(start + 2), "d": leaf(start + 3), "m": {"e": leaf(start + 4)}}
    return {"a": leaf(start), "b": leaf(start + 1), "n": inner, "f": leaf(start + 5)}


def dense():
    td = TensorDict(tree(), batch_size=[ROWS])
    td.set_non_tensor("text", "words")
    td["n", "m"].set_non_tensor("text", ["below"])
    return td


def with_lazy():
    return dense().set("lazy", lazy_stack([TensorDict(x=leaf()[0], y=leaf()[0])] * ROWS))


def lazy():
    return lazy_stack([dense()[i].clone() for i in range(ROWS)])


def state(node):
    """All that a change could affect: objects, their order, versions of tensors, values, locks."""
    if isinstance(node, LazyStackedTensorDict):
        return [state(td) for td in node.tensordicts]
    if isinstance(node, NonTensorData):
        return id(node), node.data
    if isinstance(node, Node):
        entries = [(name, id(value), state(value)) for name, value in node._entries().items()]
        return id(node), node.batch_size, node.is_locked, node.names, entries
    return node._version, node.tolist()


# Invalid changes; and whether a lazy stack refuses them too.
REFUSED = {
    "update, containers": (
        lambda td: td.update({"n": TensorDict(tree(), [ROWS]), "b": BAD}),
        False,
    ),
    "update, replaced container": (lambda td: td.update({"n": leaf(), "a": BAD}), False),
    "update, clone": (lambda td: td.update({"a": NINE, "n": {"c": BAD}}, clone=True), False),
    "update, itself": (lambda td: td.update({"a": NINE, "n": {"self": td}}), False),
    "update_": (lambda td: td.update_({"a": NINE, "n": {"c": NINE, "d": BAD}}), True),
    "update_, missing": (lambda td: td.update_({"a": NINE, "n": {"c": NINE, "none": BAD}}), True),
    "update_at_": (lambda td: td.update_at_({"a": NINE[0], "n": {"c": BAD}}, 0), False),
    "copy_at_": (lambda td: td.copy_at_(TensorDict(a=NINE[0], b=BAD[0]), 0), False),
    "set_": (lambda td: td.set_(("n", "c"), BAD), True),
    "cat_tensors": (lambda td: td.cat_tensors("a", "b", out_key="c", dim=0), False),
    "stack_tensors": (lambda td: td.stack_tensors("a", "b", out_key=("f", "x"), dim=1), False),
    "flatten_keys": (lambda td: td.flatten_keys(".", inplace=True), False),
}


@pytest.mark.parametrize("make", [dense, with_lazy, lazy])
def test_a_refused_change_changes_nothing(make):
    for name, (change, of_stacks) in REFUSED.items():
        if make is lazy and not of_stacks:
            continue
        td = make().set("n.c", leaf())
        before = state(td)
        with pytest.raises(ERRORS):
            change(td)
        assert state(td) == before, name


@settings(suppress_health_check=[HealthCheck.too_slow])  # containers are made while it draws
@given(st.data())
def test_an_update_with_one_bad_entry_anywhere_changes_nothing(data):
    td = data.draw(st.sampled_from([dense, with_lazy, lazy]))()
    known = [key for key in td.keys(True, True) if "text" not in key]
    known += ["new", ("n", "new"), ("fresh", "below")]
    keys = data.draw(st.lists(st.sampled_from(known), min_size=1, unique=True))
    bad = data.draw(st.integers(0, len(keys) - 1))
    source: dict[Any, Any] = {key: NINE for key in keys}
    source[keys[bad]] = BAD
    if data.draw(st.booleans()):
        source = TensorDict({key: NonTensorData(value) for key, value in source.items()}).to_dict()
    before = state(td)
    with pytest.raises((RuntimeError, KeyError)):
        td.update(source)
    assert state(td) == before


CHANGES = [
    lambda td: td.update({"a": [1.0] * ROWS, "new": "text", ("n", "c"): leaf()}),
    lambda td: td.update(lazy()),
    lambda td: td.rename_key_("a", ("n", "a")),
    lambda td: td.rename_key_(("n", "c"), ("new", "c")),
    lambda td: td.flatten_keys(".", inplace=True),
    lambda td: td.cat_tensors("a", "b", out_key=("n", "ab"), dim=1),
    lambda td: td.split_keys(["a", ("n", "m", "e")], inplace=True),
    lambda td: td.separates("a", ("n", "m")),
]


@pytest.mark.parametrize("method", ["_set_str", "_del_str"])
@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("change", CHANGES)
def test_an_error_at_the_kth_write_changes_nothing(change, method, at, monkeypatch):
    td, calls, original = dense(), [], getattr(TensorDict, method)
    mine = {id(node) for node in [td, *[v for v in td.values(True) if isinstance(v, Node)]]}

    def failing(self, *args):
        if id(self) in mine:
            calls.append(args[0])
            if len(calls) == at + 1:
                raise MemoryError("simulated")
        original(self, *args)

    before = state(td)
    monkeypatch.setattr(TensorDict, method, failing)
    try:
        change(td)
    except MemoryError:
        assert state(td) == before
    else:
        assert len(calls) <= at  # the change has fewer writes and succeeded
        assert state(td) != before


def test_the_state_function_notices_each_kind_of_change():
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


def test_a_change_backs_up_only_what_it_touches(monkeypatch):
    td = TensorDict({f"n{i}": {f"m{j}": tree() for j in range(3)} for i in range(4)}, [ROWS])
    num_nodes = 1 + len([value for value in td.values(True) if isinstance(value, Node)])
    saved, original = [], TensorDict._stores
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
    assert x.grad.tolist() == [3, 3]


PAIRS = {  # the target, and the new value
    "as it is": lambda x: (torch.zeros(2, 3), torch.ones(2, 3)),
    "cast": lambda x: (torch.zeros(2, 3, dtype=torch.int8), torch.full((2, 3), 1.5)),
    "broadcast": lambda x: (torch.zeros(2, 3), torch.ones(3)),
    "of another number of dimensions": lambda x: (torch.zeros(2, 3), torch.ones(1, 2, 3)),
    "of another size": lambda x: (torch.zeros(2, 3), torch.ones(3, 2)),
    "a view": lambda x: (torch.zeros(4, 3)[::2], torch.ones(3, 2).t()),
    "a row shown twice": lambda x: (torch.zeros(2, 3), torch.ones(1, 3).expand(2, 3)),
    "from a graph": lambda x: (torch.zeros(2, 3), x * 2),
    "into a graph": lambda x: (x * 2, torch.ones(2, 3)),
    "into a leaf": lambda x: (torch.zeros(2, 3, requires_grad=True), torch.ones(2, 3)),
    "into a parameter": lambda x: (torch.nn.Parameter(torch.zeros(2, 3)), torch.ones(2, 3)),
    "sparse": lambda x: (torch.eye(3).to_sparse(), torch.ones(3, 3).to_sparse()),
    "not a number": lambda x: (torch.zeros(2, 3), torch.full((2, 3), torch.nan)),
}


def written(pair, write):
    """An entry after it was written, and its gradient; or the class of the error."""
    x = torch.ones(2, 3, requires_grad=True)
    mine, value = PAIRS[pair](x)
    td = TensorDict(a=torch.zeros(2), b=mine)
    try:
        write(td, {"a": torch.ones(2), "b": value})
    except ERRORS as error:
        return type(error), td["a"].tolist()
    out = td["b"]
    assert out is mine
    assert td["a"].tolist() == [1, 1]
    if out.requires_grad and not out.is_leaf:
        out.sum().backward()
    dense = out.to_dense() if out.layout is torch.sparse_coo else out
    return [part.tolist() for part in dense.unbind()].__repr__(), out.requires_grad, str(x.grad)


@pytest.mark.parametrize("pair", PAIRS)
def test_entries_written_together_equal_those_written_one_by_one(pair):
    def one_by_one(td, source):
        for key in ("b", "a"):
            td.set_(key, source[key])

    expected = written(pair, one_by_one)
    assert written(pair, lambda td, source: td.update_(source)) == expected


def test_autograd_notices_a_write_of_many_entries_it_needs():
    td = TensorDict(a=torch.ones(2), b=torch.ones(2))
    product = (torch.ones(2, requires_grad=True) * td["a"]).sum()
    td.update_(td.clone())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_only_values_that_may_contain_a_container_are_searched(monkeypatch):
    searched, original = [], build.holds
    monkeypatch.setattr(
        build, "holds", lambda value, td: searched.append(value) or original(value, td)
    )
    td = TensorDict(a=torch.zeros(2))
    for _ in range(5):
        td = TensorDict(below=td, a=torch.zeros(2))
    td["other"] = TensorDict()  # nothing contains a new container
    td.update(TensorDict(b=TensorDict()))
    td = td.apply(lambda x: x + 1)
    td.set(("new", "levels"), torch.zeros(2))
    td.update({"a": torch.zeros(2), "below": {"a": torch.zeros(2)}})
    lazy_stack([TensorDict(), TensorDict()])["other"] = TensorDict(batch_size=[2])
    assert not searched
    td["other"] = (other := TensorDict())
    td["below"]["other"] = other
    td["below"].update(TensorDict(b=(b := TensorDict())))
    assert searched == [other, other, b]


@tensorclass
class Wrapped:
    x: Any


def test_a_wrapped_and_a_locked_container_are_searched():
    td, wrapped = TensorDict(), Wrapped(x=TensorDict(), batch_size=[])
    with pytest.raises(ValueError, match="can't hold itself"):
        wrapped._td["x"] = TensorDict(z=wrapped)
    locked = TensorDict(td=td).lock_()
    assert build.holds(locked, td) and not build.holds(locked, TensorDict())


def afterwards(holder, store):
    store(holder)
    return holder


HOLDERS = {  # values of an entry that contain the container themselves
    "made of it": lambda td: TensorDict(x=td),
    "made of a dict": lambda td: TensorDict({"x": {"y": td}}),
    "of another class": lambda td: type("Own", (TensorDict,), {})({"x": td}),
    "set": lambda td: TensorDict().set("x", td),
    "set below": lambda td: TensorDict().set(("x", "y"), td),
    "set by index": lambda td: afterwards(TensorDict(), lambda out: operator.setitem(out, "x", td)),
    "setdefault": lambda td: afterwards(TensorDict(), lambda out: out.setdefault("x", td)),
    "update": lambda td: TensorDict().update({"x": td}),
    "update by keyword": lambda td: TensorDict().update(x=td),
    "update, nested": lambda td: TensorDict(x=TensorDict()).update({"x": {"y": td}}),
    "replace": lambda td: TensorDict(x=1).replace({"x": td}),
    "from_dict": lambda td: TensorDict.from_dict({"x": td}),
    "from_any": lambda td: TensorDict.from_any({"x": td}),
    "from_tuple": lambda td: TensorDict.from_tuple((td,)),
    "from_pytree": lambda td: TensorDict.from_pytree([td]),
    "fromkeys": lambda td: TensorDict.fromkeys(["x"], td),
    "apply": lambda td: TensorDict(x=1).apply(lambda leaf: td),
    "apply, out": lambda td: TensorDict(x=1).apply(lambda leaf: td, out=TensorDict()),
    "named_apply": lambda td: TensorDict(x=1).named_apply(lambda key, leaf: td),
    "apply of a stack": lambda td: lazy_stack([TensorDict(x=1)]).apply(lambda leaf: td),
    "tree_map": lambda td: torch.utils._pytree.tree_map(lambda leaf: td, TensorDict(x=1)),
    "unchecked": lambda td: access.unchecked({"x": td}, torch.Size()),
    "lazy_stack": lambda td: lazy_stack([td]),
    "a stack, and another": lambda td: (lazy_stack([td]), TensorDict(x=lazy_stack([td])))[1],
    "a stack's class": lambda td: LazyStackedTensorDict(td, stack_dim=0),
    "a stack below": lambda td: TensorDict(x=lazy_stack([td])),
    "a stack in a stack": lambda td: lazy_stack([lazy_stack([td])]),
    "append": lambda td: afterwards(lazy_stack([TensorDict()]), lambda stack: stack.append(td)),
    "insert": lambda td: afterwards(lazy_stack([TensorDict()]), lambda stack: stack.insert(0, td)),
    "extend": lambda td: afterwards(lazy_stack([TensorDict()]), lambda stack: stack.extend([td])),
    "from_list": lambda td: TensorDict(x=LazyStackedTensorDict.from_dict([{"y": td}])),
    "tensorclass": lambda td: Wrapped(x=td, batch_size=[]),
    "instance_over": lambda td: access.instance_over(Wrapped, td.set("x", 1)),
    "tensorclass around it": lambda td: Wrapped.from_tensordict(td.set("x", 1)),
    "tensorclass, set": lambda td: setattr(out := Wrapped(x=1, batch_size=[]), "x", td) or out,
    "tensorclass below": lambda td: TensorDict(y=Wrapped(x=td, batch_size=[])),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_container_cannot_store_a_value_that_contains_it(name):
    td = TensorDict()
    holder = HOLDERS[name](td)
    assert build.holds(holder, td)
    for value in (holder, TensorDict(below=holder)):
        with pytest.raises(ValueError, match="can't hold itself"):
            td["loop"] = value
        with pytest.raises(ValueError, match="can't hold itself"):
            td.update(TensorDict(loop=value))


@pytest.mark.parametrize(
    "loop",
    [
        lambda stack, member: stack,
        lambda stack, member: TensorDict(x=stack, batch_size=[1]),
        lambda stack, member: lazy_stack([stack])[0],
        lambda stack, member: lazy_stack([TensorDict(x=member)]),
        lambda stack, member: lazy_stack([TensorDict(x=lazy_stack([member]))]),
        lambda stack, member: lazy_stack([lazy_stack([member]), TensorDict(batch_size=[1])])[:1, 0],
    ],
)
def test_a_stack_cannot_store_a_value_that_contains_it_or_a_member(loop):
    member = TensorDict()
    stack = lazy_stack([member])
    value = loop(stack, member)
    with pytest.raises(ValueError, match="can't hold itself"):
        stack["loop"] = value
    assert member.is_empty()
