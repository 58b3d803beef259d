"""Entries that are not tensors: text, objects, None, lists of text."""

import contextlib
import copy
import json
import pickle
import warnings

import numpy as np
import pytest
import torch

import raffia
from raffia import NonTensorData, NonTensorStack, TensorDict, capture_non_tensor_stack, lazy_stack
from tests.tensordict.invariants import sound
from tests.tensordict.kinds import apply_op, ops


def words(**more):
    """Batch of 3: a tensor, one shared text, one text per row."""
    return TensorDict(x=torch.arange(3.0), s="hi", w=["p", "q", "r"], batch_size=[3], **more)


def grid():
    rows = [["a", "b", "c"], ["d", "e", "f"]]
    return TensorDict(w=rows, s="hi", x=torch.arange(6).view(2, 3), batch_size=[2, 3])


@contextlib.contextmanager
def quietly(option, value):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the option may announce its own end
        with option(value):
            yield


# -------------------------------------------------------------------------- kinds of entries

DOORS = {
    "init": lambda value: TensorDict(k=value, batch_size=[2]),
    "item": lambda value: TensorDict(batch_size=[2]).update({"k": value}),
    "set": lambda value: TensorDict(batch_size=[2]).set("k", value),
    "from_dict": lambda value: TensorDict.from_dict({"k": value}, batch_size=[2]),
    "make_tensordict": lambda value: raffia.make_tensordict(k=value, batch_size=[2]),
    "set_non_tensor": lambda value: TensorDict(batch_size=[2]).set_non_tensor("k", value),
    "over a tensor": lambda value: TensorDict(k=[1, 2], batch_size=[2]).set("k", value),
}


ROWS = [["u", "v"], [1, "y"], [None, "a"], [["a", "b"], ["c", "d"]], [{"k": 1}, {"k": 2}]]


@pytest.mark.parametrize("door", [door for door in DOORS if door != "set_non_tensor"])
def test_a_list_is_a_value_for_each_row(door):
    for value in ROWS:
        td = DOORS[door](value)
        entry = td.get("k")
        assert isinstance(entry, NonTensorStack) and entry.tolist() == value and sound(td)
        assert td["k"] == value and [row["k"] for row in td] == value
        assert td.to_dict() == {"k": value} and type(td.to_dict()["k"]) is list
    with pytest.raises(RuntimeError, match="batch dimension mismatch.*'k'"):
        DOORS[door](["p", "q", "r"])
    td = TensorDict(w=["p", "q"])
    assert td.get("w").batch_size == (2,) and td.batch_size == ()
    assert grid().get("w").batch_size == (2, 3)


def test_options():
    assert raffia.list_to_stack() is True and capture_non_tensor_stack() is False
    with quietly(raffia.set_list_to_stack, False):
        assert raffia.list_to_stack() is False
        td = TensorDict(w=["p", "q"], i=[1, 2], batch_size=[2])
        assert isinstance(td.get("w"), NonTensorData) and list(td["w"]) == ["p", "q"]
        assert td["i"].tolist() == [1, 2]
    assert raffia.list_to_stack() is True
    with raffia.set_list_to_stack(True):
        assert isinstance(TensorDict(w=["p", "q"], batch_size=[2]).get("w"), NonTensorStack)
    equal, different = [NonTensorData("a")] * 2, [NonTensorData("a"), NonTensorData("b")]
    with quietly(raffia.set_capture_non_tensor_stack, True):
        assert capture_non_tensor_stack() is True
        one = torch.stack(equal)
        assert isinstance(one, NonTensorData) and one.batch_size == (2,)
        assert torch.stack([words(), words()])["s"] == "hi"
        assert isinstance(torch.stack(different), NonTensorStack)
    assert capture_non_tensor_stack() is False
    with raffia.set_capture_non_tensor_stack(False):
        assert isinstance(torch.stack(equal), NonTensorStack)


# --------------------------------------------------------------------- reading and listing


def test_reading():
    td = words()
    assert td.get_non_tensor("s") == "hi" and td.get_non_tensor("w") == ["p", "q", "r"]
    assert td.get_non_tensor("no", default=5) == td.get_non_tensor("no", 5) == 5
    with pytest.raises(KeyError, match="no"):
        td.get_non_tensor("no")
    assert td.get("no") is None and td.get("no", "dflt") == "dflt"
    assert [td.is_non_tensor(key) for key in "swx"] == [True, True, False]
    for value, expected in ((td.get("s"), True), (td.get("w"), True), (td, False), ("hi", False)):
        assert raffia.is_non_tensor(value) is expected
        assert raffia.is_tensor_collection(value) is (value != "hi" if value is not td else True)
    td = TensorDict(n=None, batch_size=[2])
    assert "n" in td.keys() and "n" in td and td.to_dict() == {"n": None}
    got = words()["w"]
    got[1] = "new"  # writes to the list change the entry
    td = words()
    td["w"][1] = "new"
    assert td["w"] == got == ["p", "new", "r"] and td[1]["w"] == "new"
    assert td.set_at_("w", "last", 2) is td and td["w"] == ["p", "new", "last"]
    nested = TensorDict(s="a", n=TensorDict(w=["p", "q"], o=None))
    assert json.loads(json.dumps(nested.to_dict())) == {"s": "a", "n": {"w": ["p", "q"], "o": None}}
    assert NonTensorData(max)(1, 2, key=lambda n: -n) == 1


def test_functions_of_tensors_skip_values():
    calls, names = [], []
    got = words().apply(lambda x: calls.append(type(x)) or x + 1)
    assert calls == [torch.Tensor] and got["x"].tolist() == [1, 2, 3]
    TensorDict(s="a", n=TensorDict(t="u", y=torch.zeros(2))).named_apply(
        lambda k, v: names.append(k), nested_keys=True
    )
    assert names == [("n", "y")]
    calls.clear()
    words().apply(lambda v: calls.append(v) or v, is_leaf=raffia.is_leaf_nontensor)
    assert len(calls) == 3
    got = torch.vmap(lambda t: t.set("y", t["x"] + 1))(words().select("x", "s"))
    assert got["y"].tolist() == [1, 2, 3] and got["s"] == "hi"


# ------------------------------------------------------------------------- rows and shapes

MASK = torch.tensor([[True, False, True], [False, False, False]])
MOVES = [
    *(lambda x: x[0], lambda x: x[-1], lambda x: x[1:], lambda x: x[:, ::2], lambda x: x[..., 0]),
    *(lambda x: x[[1, 0]], lambda x: x[MASK], lambda x: x[None], lambda x: x[MASK[:, 0]]),
    *(lambda x: x[torch.tensor([1, 0, 1])], lambda x: x[1, 2], lambda x: x[..., [2, 0]]),
    *(lambda x: x.unsqueeze(0).squeeze(0), lambda x: x.split(2, 1)[1], lambda x: x.unbind(1)[2]),
]
MOVES += [
    lambda x, op=op: apply_op(x, op)
    for op in ops(reshape=[6, (3, 2)], view=[6, (3, 2)], transpose=[(0, 1)], permute=[(1, 0)])
    + ops(unsqueeze=[1], flatten=[(0, 1)], expand=[(2, 2, 3)], flip=[0], roll=[(1, 1)])
    + ops(repeat=[(2, 1)], gather=[(1, torch.zeros(2, 1, dtype=torch.long))])
]


@pytest.mark.parametrize("move", MOVES)
def test_values_follow_the_rows(move):
    """The oracle is a tensor of the numbers of the values."""
    td, letters = grid(), np.array(list("abcdef"))
    got, moved = move(td), move(td["x"])
    want = letters[moved.numpy()].tolist()
    assert got["w"] == want and got.get("w").batch_size == got.get("s").batch_size == moved.shape
    assert got["s"] == "hi" and sound(got) and torch.equal(got["x"], moved)
    entry = td.get("w")
    assert move(entry).tolist() == want


ROW, THREE = TensorDict(x=9.0, s="o", w="Q"), TensorDict(s="n", w=["1", "2", "3"], batch_size=[3])


# ------------------------------------------------------------------------- several containers


def test_stacks():
    other = words().set("s", "ho")
    for s in (torch.stack([words(), other]), lazy_stack([words(), other])):
        assert isinstance(s.get("s"), NonTensorStack) and s.get("s").batch_size == (2, 3)
        assert s.get("s").tolist() == [["hi"] * 3, ["ho"] * 3]
        assert (s[0]["s"], s[1]["s"], s[0, 1]["w"]) == ("hi", "ho", "q")
        assert s[:, 0]["s"] == ["hi", "ho"] and s[:, 2]["w"] == ["r", "r"]
    s = torch.stack([words(), words()])
    assert s.get("s").data == s[1]["s"] == "hi"  # one value after all
    assert torch.cat([words(), other]).get("s").tolist() == ["hi"] * 3 + ["ho"] * 3
    assert torch.cat([words(), words()])["s"] == "hi"
    lz = lazy_stack([TensorDict(x=torch.zeros(2)), TensorDict(x=torch.zeros(3))])
    for value, want in ((["a", "b"], ["a", "b"]), ("c", ["c", "c"])):
        lz["s"] = value
        assert [t["s"] for t in lz.tensordicts] == want
    a, b = TensorDict(s="a", batch_size=[2]), TensorDict(s="b", batch_size=[2])
    assert torch.where(torch.tensor([True, False]), a, b)["s"] == ["a", "b"]
    out = TensorDict({"n": b.clone(), "s": "c"}, [2])
    one = TensorDict({"n": a, "s": "c"}, [2])
    assert one.where(torch.tensor([True, False]), TensorDict(out, [2]), out=out) is out
    assert out["n", "s"] == ["a", "b"] and out["s"] == "c"
    assert (words() == words()).all() and not (words() == other).all()
    assert (words() == other)["s"].tolist() == [False] * 3
    assert (words() == other)["w"].tolist() == [True] * 3


# --------------------------------------------------------------------------- the classes


def test_data():
    d = {"a": 1}
    assert NonTensorData(d).data is NonTensorData(data=d).data is d
    n = NonTensorData("a", batch_size=[2, 3])
    assert n.data == n.to_dict() == "a" and n.batch_size == n.shape == (2, 3)
    assert n.tolist() == [["a"] * 3] * 2 and NonTensorData("a").tolist() == "a"
    assert (len(n), n.ndim, n[0].batch_size, n[0].data) == (2, 2, (3,), "a")
    s = NonTensorData("a", batch_size=[2]).maybe_to_stack()
    assert isinstance(s, NonTensorStack) and s.tolist() == ["a", "a"]
    a, b = NonTensorData("a", batch_size=[2]), NonTensorData("b", batch_size=[2])
    assert (a == a.clone()).tolist() == [True, True] and (a == b).tolist() == [False, False]
    with pytest.raises(TypeError, match="unhashable"):
        hash(a)
    rows, on = NonTensorStack(True, False), NonTensorData(True, batch_size=[2])
    for joined in (rows ^ on, (TensorDict(x=rows, batch_size=[2]) ^ TensorDict(x=on))["x"]):
        assert joined.tolist() == [False, True]
    assert (on | on).tolist() == [True, True] and (on & rows).tolist() == [True, False]
    assert (a | b) is a and (TensorDict(x="a") ^ TensorDict(x="a"))["x"] == "a"
    assert torch.cat([a, NonTensorData("b", batch_size=[1])]).tolist() == ["a", "a", "b"]
    for change in (a.update_, a.update, lambda other: setattr(a, "data", other.data)):
        for value in "bc":
            change(NonTensorData(value, batch_size=[2]))
            assert a.data == value and a.batch_size == (2,)
    for twin in (copy.deepcopy(a), pickle.loads(pickle.dumps(a))):
        assert twin.data == "c" and twin.batch_size == (2,)
    entry = "NonTensorData(data=hi, batch_size=torch.Size([3]), device=None)"
    assert repr(NonTensorData("hi", batch_size=[3])) == entry
    assert f"        s: {entry}}},\n    batch_size=torch.Size([3])" in repr(words().select("s"))


def test_stack():
    for s in (
        NonTensorStack("a", "b"),
        NonTensorStack(NonTensorData("a"), NonTensorData("b")),
        NonTensorStack.from_list(["a", "b"]),
        torch.stack([NonTensorData("a"), NonTensorData("b")]),
        copy.deepcopy(NonTensorStack("a", "b")),
        pickle.loads(pickle.dumps(NonTensorStack("a", "b"))),
    ):
        assert s.tolist() == ["a", "b"] == [e.data for e in s] and s.batch_size == (2,)
        assert isinstance(s, NonTensorStack) and isinstance(s[0], NonTensorData)
        assert isinstance(s[0:1], NonTensorStack) and s[0:1].tolist() == ["a"]
        assert s[torch.tensor([1, 0])].tolist() == ["b", "a"]
        assert repr(s).startswith("NonTensorStack(") and "['a', 'b']" in repr(s)
        with pytest.raises(AttributeError, match="tolist"):
            _ = s.data
        s.update(NonTensorStack("c", "d"))
        assert s.tolist() == ["c", "d"]
    assert NonTensorStack("a", "a").data == "a"
    assert NonTensorStack.from_list([["a", "b", "c"], ["d", "e", "f"]]).batch_size == (2, 3)
    with pytest.raises(RuntimeError, match="one value for all its rows"):
        NonTensorData("a", [2]).update_at_(NonTensorData("b"), 0)
    with pytest.raises(RuntimeError, match="Cannot update a NonTensorData"):
        NonTensorData("a", [2]).update(words().get("w")[:2])


def test_a_stack_of_values_takes_no_entries():
    values = NonTensorStack("u", "v")
    for key in ("a", ("a", "b")):
        with pytest.raises(KeyError, match="holds values, not entries"):
            values.set(key, 1)
    assert values.tolist() == ["u", "v"]
