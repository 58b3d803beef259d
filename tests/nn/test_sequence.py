"""TensorDictSequential: keyed modules one after the other, and parts of such a sequence."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

from raffia import TensorDict, lazy_stack
from raffia.nn import TensorDictModule as Mod
from raffia.nn import TensorDictSequential as Seq
from raffia.nn import WrapModule
from tests.marks import refusals

from .keyed import B, call, chain, fail, leaves, numbers, read, start, step

T, A = 3, 5


class Mine(Seq):
    pass


class Foreign(nn.Module):
    """A plain module with `in_keys` and `out_keys`."""

    in_keys = ["b"]
    out_keys = ["c"]

    def forward(self, tensordict):
        return tensordict.set("c", tensordict["b"] * 10)


class Select(nn.Module):
    def forward(self, td):
        return td.select("b")


def seq_of(*keys, **kwargs):
    return Seq(*(step(i, o) for i, o in keys), **kwargs)


# --- construction -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, list, dict, OrderedDict])
def test_ways_to_build(kind):
    modules, is_named = [step("a", "b"), step("b", "c")], kind in (dict, OrderedDict)
    names = ["first", "second"] if is_named else [0, 1]
    seq = Seq(kind(zip(names, modules, strict=True)) if is_named else modules)
    seq = Seq(*modules) if kind is None else seq
    assert list(seq) == modules and len(seq) == 2
    assert type(seq.module) is (nn.ModuleDict if is_named else nn.ModuleList)
    assert all(seq[name] is module for name, module in zip(names, modules, strict=True))
    with pytest.raises((IndexError, KeyError)):
        seq["third" if is_named else 2]


# --- callables and foreign modules --------------------------------------------------------------

STEPS = {  # the step between a -> b and b -> d: its outputs, and the keys of the sequence
    "a callable": (lambda td: td.set("c", td["b"] * 2), {"b": 1, "c": 2, "d": 2}, ["b", "d"]),
    "another container": (lambda td: TensorDict(b=td["b"] + 1), {"b": 2, "d": 3}, ["b", "d"]),
    "a module": (Select(), {"b": 1, "d": 2}, ["b", "d"]),
    "a reshape": (lambda td: td.reshape(1, B), {"b": 1, "d": 2}, ["b", "d"]),
    "a foreign module": (Foreign(), {"b": 1, "c": 10, "d": 2}, ["b", "c", "d"]),
}


@pytest.mark.parametrize("name", STEPS)
def test_other_steps(name):
    between, written, outs = STEPS[name]
    seq = chain("a", "b", "d")
    seq.insert(1, between)
    placed = chain("a", "b", "b", "d")
    placed[1] = between
    for made in (Seq(step("a", "b"), between, step("b", "d")), seq, placed):
        assert (made[1] is between) is (name == "a foreign module")
        assert isinstance(made[1], WrapModule) is (name != "a foreign module")
        assert made.in_keys == ["a"] and made.out_keys == outs
        td = start("a")
        out = made(td)
        assert {key: v for key, v in read(out).items() if key != "a"} == written
        assert leaves(td) <= leaves(out) | {"a", "b"}
    if name == "a foreign module":
        assert call(seq, "keywords", {"a": 0}) == written


def test_wrap_module():
    def fresh(td):
        return TensorDict({"b": td["a"] + 1}, td.batch_size)

    made = {i: WrapModule(fresh, inplace=i, in_keys=["a"], out_keys=["b"]) for i in (True, False)}
    for inplace, module in made.items():
        td = start("a")
        out = module(td)
        assert (module.in_keys, module.out_keys, module.inplace) == (["a"], ["b"], inplace)
        assert (out is td) is inplace and leaves(out) == ({"a", "b"} if inplace else {"b"})
        assert out["b"].tolist() == [1] * B
    bare, net = WrapModule(lambda td: td), WrapModule(nn.Linear(1, 1))
    assert bare.in_keys == bare.out_keys == [] and bare(td) is td and not bare.inplace
    assert WrapModule(bare.func, inplace=True)(td) is td and len(list(net.parameters())) == 2


# --- as a list of modules -----------------------------------------------------------------------


@pytest.mark.parametrize("index", [slice(1, None), slice(None, None, 2), slice(2, 2)])
def test_a_slice_is_a_sequence(index):
    seq = Mine(*chain("a", "b", "c", "d"), inplace="empty", partial_tolerant=True)
    part, modules = seq[index], list(seq)
    expected = Seq(*modules[index])
    assert type(part) is Mine and list(part) == modules[index]
    assert (part.in_keys, part.out_keys) == (expected.in_keys, expected.out_keys)
    assert part.inplace == "empty" and part.partial_tolerant is True and seq[-1] is modules[2]
    del seq[index], modules[index]
    assert list(seq) == modules
    expected = Seq(*modules)
    assert (seq.in_keys, seq.out_keys) == (expected.in_keys, expected.out_keys)


def test_editing_by_number_and_by_name():
    seq = chain("a", "b", "c")
    named = Seq({"0": seq[0], "1": seq[1]})
    for made, at in ((seq, 1), (named, "1")):
        made[at] = step(["b", "x"], "z")
        assert made.in_keys == ["a", "x"] and made.out_keys == ["b", "z"] == made.out_keys_source
        assert call(made, "container", {"a": 0, "x": 0}) == {"b": 1, "z": 2}
    named["2"] = step("z", "d")
    assert len(named) == 3 and named.out_keys == ["b", "z", "d"]
    del named["0"]
    assert named.in_keys == ["b", "x"]
    for index in (5, -7):
        with pytest.raises(IndexError):
            seq[index] = step("a", "b")
        with pytest.raises(IndexError):
            del seq[index]
    assert len(seq) == 2 and seq.out_keys == ["b", "z"]


def test_an_edit_keeps_the_selection():
    seq = chain("a", "b", "c").select_out_keys("c")
    with pytest.raises(ValueError, match="selected"):
        del seq[1]
    assert len(seq) == 2
    seq[0] = step("z", "b")
    assert seq.out_keys == ["c"] and call(seq, "container", {"z": 0}) == {"c": 2}


@pytest.mark.parametrize("deep", [False, True])
def test_keys_follow_edits_of_the_modules(deep):
    """Keys of a sequence, dispatch, its parts and its graph, after any edit."""
    inner = chain("a", "b")
    seq = Seq(inner, step("k", "l")) if deep else inner
    assert call(seq, "tensors", {"a": 0, "k": 0})["b"] == 1
    rest = (["k"], ["l"]) if deep else ([], [])
    inner.module.append(step(["b", "q"], "c"))
    assert seq.in_keys == ["a", "q", *rest[0]]
    assert seq.out_keys == seq.out_keys_source == ["b", "c", *rest[1]]
    assert call(seq, "keywords", {"a": 0, "q": 0, "k": 0})["c"] == 2
    assert seq.select_subsequence(out_keys=["c"]).in_keys == ["a", "q"]
    assert seq.graph().in_keys == ("a", "q", *rest[0])
    inner.module[0] = step("z", "b")
    assert seq.in_keys == ["z", "q", *rest[0]]
    inner[1].in_keys = ["b"]
    assert seq.in_keys == ["z", *rest[0]]
    inner[1].select_out_keys()
    assert seq.out_keys == ["b", *rest[1]]


def test_selections_and_set_keys_after_edits_of_the_modules():
    seq = chain("a", "b", "c").select_out_keys("c")
    seq.module.insert(0, step("z", "a"))
    assert call(seq, "container", {"z": 0}) == {"c": 3} and seq.in_keys == ["z"]
    del seq.module[2]
    with pytest.raises(ValueError, match="call reset_out_keys"):
        seq(start("z"))
    assert seq.reset_out_keys().out_keys == ["a", "b"]
    seq = chain("a", "b", "c")
    seq(start())
    seq.in_keys, seq.out_keys = ["a", "q"], ["c"]
    for made in (seq, copy.deepcopy(seq)):
        assert (made.in_keys, made.out_keys) == (["a", "q"], ["c"])
    seq.module[1] = step("b", "d")
    assert (seq.in_keys, seq.out_keys) == (["a"], ["b", "d"]) and seq.graph().shapes == {}
    seq(start())
    assert seq.graph().shapes["1"]["out"]["d"].shape == (B,)


def test_expected_keys_are_stored():
    seq = chain("a", "b", expect_in_keys=["a"])
    with pytest.raises(ValueError, match="Did you mean 'b'"):
        seq.append(step("bb", "c"))
    assert len(seq) == 1 and seq.append(step("b", "c")).in_keys == ["a"]
    seq.module.append(step(["b", "q"], "d"))
    with pytest.raises(ValueError, match="q"):
        seq.in_keys  # noqa: B018 # reading looks at the modules


# --- partial_tolerant ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "present, written", [(["a"], ["b", "c"]), ([("n", "x")], ["y"]), ([("n", "z")], [])], ids=str
)
@pytest.mark.parametrize("inner", [True, False, "empty"])
def test_modules_without_inputs_are_left_out(present, written, inner):
    modules = [step("a", "b"), step("b", "c"), step([("n", "x")], "y", inplace=inner)]
    seq = Seq(modules)
    td, other = numbers({key: 0 for key in present}), start("a")
    if ("n", "x") not in present:
        with pytest.raises(KeyError):
            seq(td.copy())
    seq.partial_tolerant = True
    stack = lazy_stack([td, other])  # each member has the outputs of its inputs
    assert seq(stack) is stack
    assert leaves(td) == {*present, *written} and leaves(other) == {"a", "b", "c"}


# --- errors -------------------------------------------------------------------------------------

broken = Mod(fail, ["b"], ["c"])


def misspelt():
    return seq_of(("a", "action"), ("acton", "c"))(start())


def second_time():
    calls = []

    def func(x):
        calls.append(1)
        return x if len(calls) == 1 else fail(x)

    module = Mod(func, ["a"], ["a"])
    return Seq({"one": module, "two": module})


def picky():
    """Fails on another shape; called before, so that its program is cached."""
    module = Mod(lambda x: x if x.shape == (B,) else fail(x), ["b"], ["c"])
    seq = Seq({"x": step("a", "b"), "culprit": module})
    for _ in range(2):
        seq(start("a"))
    return seq(TensorDict(a=torch.zeros(T)))


ZEROS = torch.zeros(T)
NAMED, LOCKED = Seq({"x": step("a", "b")}), start("a").lock_()
ERRORS = [  # a call, its error, and words of its message and notes
    (lambda: Seq(step("a", "b"), 3), TypeError, "but 3 is not one"),
    (lambda: Seq(lambda td: None, broken)(start()), Exception, "got 'b'"),
    (lambda: chain("a", "b")(a=ZEROS, z=ZEROS), RuntimeError, "keyword"),
    (lambda: chain("a", "b")(ZEROS, ZEROS), ValueError, r"one for each of in_keys=\['a'\]"),
    (lambda: chain("a", "b")(LOCKED), RuntimeError, "lock"),
    (misspelt, KeyError, 'acton.*Did you mean "action".*1'),
    (lambda: Seq({"outer": Seq({"inner": broken})})(start("b")), ZeroDivisionError, "inner.*outer"),
    (picky, ZeroDivisionError, "culprit"),
    (lambda: second_time()(start()), ZeroDivisionError, "two"),
    (lambda: chain("a", "b", selected_out_keys=["z"]), ValueError, "z"),
    (lambda: chain("a", "b", inplace="no"), ValueError, "inplace='no' must be one"),
    (lambda: chain("a", "hidden").select_subsequence(out_keys=["hiden"]), ValueError, '"hidden"'),
    (lambda: NAMED.append(step("b", "c")), TypeError, "so a new one needs a name too"),
]


test_errors = refusals(ERRORS)


# --- select_subsequence -------------------------------------------------------------------------


def test_parts_of_nested_and_selected_sequences():
    """That a part has the needed modules is a property in test_properties.py."""
    whole = Seq(Mine(*chain("a", "b", "c")), step("b", "d"))  # no subclass is cut
    assert whole.select_subsequence(out_keys=["b"])[0] is whole[0]
    selected = chain("a", "b", "c", "d").select_out_keys("c")
    assert list(selected.select_subsequence()) == list(selected)[:2]
    part = Seq(chain("a", "b", "c"), chain("b", "d", "e")).select_subsequence(["b", "d"], ["e"])
    assert [m.out_keys for m in part] == [["d", "e"]]


# --- a module of torch --------------------------------------------------------------------------


def test_custom_forward_methods(monkeypatch):
    """What replaces parts of the modules inside is in a table in test_module.py."""

    class Twice(Seq):
        def forward(self, tensordict, **kwargs):
            return super().forward(super().forward(tensordict, **kwargs), **kwargs)

    def written(seq):
        return call(seq, "container", {"a": 0})

    assert written(Twice(step("a", "a"))) == {"a": 2}
    seq, other = chain("a", "b", "c"), chain("a", "b")
    assert written(seq) == {"b": 1, "c": 2} and written(other) == {"b": 1}
    seq[0].forward = lambda td: td.set("b", td["a"] + 100)
    assert written(seq) == {"b": 100, "c": 101}
    seq.forward = lambda td: td.set("w", td["a"] + 1)
    assert written(seq) == {"w": 1}
    monkeypatch.setattr(Seq, "forward", lambda self, td: td.set("v", td["a"] + 1))
    assert written(other) == {"v": 1}
