"""TensorDictModule and TensorDictModuleBase: keys in, keys out, and everything around a call."""

import copy
import itertools
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.testing import assert_close

from raffia import NonTensorData, TensorClass, TensorDict, lazy_stack
from raffia.nn import TensorDictModule as M
from raffia.nn import TensorDictModuleBase, dispatch

from .keyed import (
    FORMS,
    WRAPPED,
    B,
    Scale,
    add,
    both,
    call,
    counting_backend,
    fail,
    leaves,
    numbers,
    plus,
)

T, A = 3, 5
one, two = torch.ones(T), torch.full((T,), 2.0)
N = ("n", "x")


def named(x, *, y, z):
    return x + 2 * y + 3 * z


def by_key(x):
    return {"a": x, "b": x + 1, ("s", "c"): x + 2}


def ones():
    return torch.ones(B)


State = namedtuple("State", "hidden cell")


@dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


class Store:
    """Not callable, but with a method."""

    def read(self, x):
        return x * 2


class Data(TensorClass):
    x: torch.Tensor
    z: torch.Tensor | None = None


class Own(TensorDictModuleBase):
    """A keyed module of a user, with keys of its class."""

    in_keys = ["x", ("n", ("x",))]
    out_keys = ["u", "v"]

    @dispatch
    def forward(self, tensordict):
        x, y = (tensordict[key] for key in self.in_keys)
        return tensordict.set("u", x + y).set("v", x - y)


class Doubled(M):
    @dispatch(auto_batch_size=False)
    def forward(self, tensordict, **kwargs):
        tensordict = super().forward(tensordict, **kwargs)
        return tensordict.set("z", tensordict["z"] * 2)


def pair():
    return M(both, ["x"], ["u", "v"])


def linear(**kwargs):
    return M(nn.Linear(T, A), ["x"], ["z"], **kwargs)


def inputs(**extra):
    return TensorDict({"x": torch.randn(B, T), "y": torch.ones(B, T), **extra}, [B])


# --- calls --------------------------------------------------------------------------------------

REVERSED = {"x": "x", "y": "y", N: "z"}
CALLS = {  # a module, and its outputs where x is 1, y 10, (n, x) 100 and (n, d, x) 1000
    "deep keys": (M(plus, [("n", ("d", ("x",)))], [("o", "p", "z")]), {("o", "p", "z"): 1001}),
    "no outputs": (M(lambda x: None, ["x"], []), {}),
    "a container": (M(lambda x: TensorDict(a=x), ["x"], ["w"]), {("w", "a"): 1}),
    "a tuple in a tuple": (
        M(lambda x: (x, ((x, x + 1), "name")), ["x"], ["_", "v"]),
        {("v", "0", "0"): 1, ("v", "0", "1"): 2},
    ),
    "named fields": (
        M(lambda x: (x, State(x, -x), Pair(x, x + 1)), ["x"], ["_", "s", "p"]),
        {("s", "hidden"): 1, ("s", "cell"): -1, ("p", "left"): 1, ("p", "right"): 2},
    ),
    "a container as input": (M(lambda y, n: n["x"] + y, ["y", "n"], ["z"]), {"z": 110}),
    "a dict in a tuple": (M(lambda x: (x, {"a": x}), ["x"], ["u", "v"]), {"u": 1, ("v", "a"): 1}),
    "a dict by key": (M(by_key, ["x"], [("s", "c"), "b"]), {("s", "c"): 3, "b": 2}),
    "a container by key": (M(lambda x: TensorDict(by_key(x)), ["x"], ["b", "a"]), {"b": 2, "a": 1}),
    "a named tuple": (M(lambda x: x.view(B, 1).max(-1), ["x"], ["u", "v"]), {"u": 1, "v": 0}),
    "in the other direction": (M(named, REVERSED, ["z"], out_to_in_map=False), {"z": 321}),
    "a keyed module": (M(M(plus, ["x"], ["z"]), ["y"], ["w"]), {"w": 11}),
    "a method": (M(Scale(), ["y"], ["z"], method="encode"), {"z": 10}),
    "its keywords": (
        M(Scale(), ["y"], ["z"], method="encode", method_kwargs={"scale": 3.0}),
        {"z": 30},
    ),
    "a forward of a subclass": (Doubled(plus, ["x"], ["z"]), {"z": 4}),
    "a custom module": (Own(), {"u": 101, "v": -99}),
    "its selection": (Own().select_out_keys("v"), {"v": -99}),
    "a selection beside another key": (
        M(both, ["x"], [("n", "u"), ("n", "v")]).select_out_keys(("n", ("v",))),
        {("n", "v"): 3},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_outputs_of_a_call(name):
    module, written = CALLS[name]
    for wrap, form in itertools.product(WRAPPED.values(), FORMS):
        assert call(wrap(module), form) == written, (wrap, form)


@pytest.mark.parametrize("value", [3, True, "text", {"set"}, plus, 1j])
@pytest.mark.parametrize("spread", [False, True])
def test_values_of_other_kinds(value, spread):
    got = M(lambda: (value,) if spread else value, [], ["z"])(TensorDict())["z"]
    is_number = isinstance(value, int | complex)
    assert got == value and isinstance(got, torch.Tensor) is is_number


def test_tensors_and_containers_are_stored_as_they_are():
    td, received = inputs(sub={"a": torch.ones(B)}, name=NonTensorData("abc"), text=["a", "b"]), []

    def func(x, sub, name, words):
        received.extend([x, sub, name, list(words)])
        return x, TensorDict({"a": x}, [B]), nn.Parameter(x), nn.Buffer(x), [x, x + 1]

    M(func, ["x", "sub", "name", "text"], ["u", "v", "p", "b", "listed"])(td)
    assert received[0] is td["x"] is td["u"] is td["v", "a"] and received[1] is td["sub"]
    assert received[2:] == ["abc", ["a", "b"]] and td["v"].batch_size == (B,)
    assert type(td["p"]) is nn.Parameter and isinstance(td["b"], nn.Buffer)
    assert not isinstance(td["listed"], torch.Tensor) and td["listed"][0] is td["x"]


def test_lists_are_passed_and_stored_as_lists():
    td = M(lambda x: (x, [x[0], "s"]), ["x"], ["_", "y"])(inputs())
    assert [type(v) for v in td["y"]] == [torch.Tensor, str]
    module = M(lambda parts: [isinstance(parts, list), *parts], ["parts"], ["y"])
    for is_list, *values in (module(parts=[one, two]), module([one, two])):
        assert is_list and [v.tolist() for v in values] == [one.tolist(), two.tolist()]


def test_called_with_a_tuple_a_module_gets_a_container():
    class Last(TensorDictModuleBase):
        in_keys, out_keys = ["x", "state"], ["y"]

        @dispatch
        def forward(self, tensordict):
            assert tensordict.batch_size == tensordict["state"].batch_size == (T,)
            return tensordict.set("y", tensordict["x"] + tensordict["state", "1"])

    assert Last()(one, (one, two)).tolist() == [3] * T
    assert M(lambda s: s["0"] - s["1"], ["s"], ["y"])((two, one)).tolist() == [1] * T


# --- keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [None, 3, {"a", "b"}, [1], [("a", None)], [["a"]]])
def test_wrong_keys(wrong):
    for side, keys in (("in_keys", [wrong, ["y"]]), ("out_keys", [["x"], wrong])):
        with pytest.raises(ValueError, match=f"{side} must be"):
            M(plus, *keys)


def test_keys_of_classes():
    class Mine(TensorDictModuleBase):
        in_keys, out_keys = ["x", ("n", ("y",))], ["z"]

        def __init__(self, keys=None):
            super().__init__()
            if keys is not None:
                self.in_keys = keys

    class Sub(Mine):
        out_keys = ["w"]

    class Made(TensorDictModuleBase):
        in_keys = property(lambda self: ["made", "up"])
        out_keys = property(lambda self: ["z"])

    def keys(module):
        return module.in_keys, module.out_keys

    one, other = Mine(), Mine()
    assert keys(one) == (["x", ("n", "y")], ["z"]) and one.out_keys_source == ["z"]
    assert keys(Mine(["a", ("b", ("c",))])) == (["a", ("b", "c")], ["z"])
    assert keys(Sub()) == (["x", ("n", "y")], ["w"]) and keys(Made()) == (["made", "up"], ["z"])
    one.in_keys.append("more")
    one.select_out_keys()
    assert len(one.in_keys) == 3 and keys(other) == keys(Mine()) == (["x", ("n", "y")], ["z"])


def test_warnings_of_keys():
    for flag in (True, False):
        with pytest.warns(UserWarning, match="out_to_in_map"):
            M(plus, in_keys=("a", "x"), out_keys=["y"], out_to_in_map=flag)
    with pytest.warns(UserWarning, match='key "_" is for ignoring output'):
        M(plus, ["_"], ["y"])


def test_keywords_of_a_call_and_missing_inputs():
    inner = Scale()
    M(inner, {"u": "x", "v": "gone"}, ["z"])(TensorDict(x=1))
    assert list(inner.last_kwargs) == ["u", "v"] and inner.last_kwargs["v"] is None
    M(inner, ["x", "gone"], ["z"])(inputs(), flag=True, other=None)
    assert inner.last_kwargs == {"flag": True, "other": None}
    M(inner, ["x"], ["z"], method_kwargs={"flag": 1})(inputs(), flag=2)
    assert inner.last_kwargs == {"flag": 1}
    received = []
    assert M(lambda x: received.append(x) or torch.ones(2), ["x"], ["z"])().tolist() == [1, 1]
    assert received == [None]


def test_get_kwargs_reach_get():
    ragged = lazy_stack([TensorDict(x=torch.ones(n)) for n in (2, 3, 1)])
    module = M(lambda x: x.sum(-1), ["x"], ["z"], get_kwargs={"as_padded_tensor": True})
    assert module(ragged)["z"].tolist() == [2, 3, 1]


# --- errors -------------------------------------------------------------------------------------


ERRORS = [  # a call, its error, and words of its message and notes
    (lambda td: M(3, ["x"], ["z"]), ValueError, "3.* is not callable"),
    (lambda td: M(nn.Linear, ["x"], ["z"]), ValueError, "Linear.* is not callable"),
    (lambda td: M(plus, ["x"], ["z"], inplace="no"), ValueError, "inplace"),
    (lambda td: M(plus, ["x"], ["z"], inplace=1), ValueError, "inplace"),
    (lambda td: M(plus, [("x", "deep")], ["z"])(td), Exception, "deep"),
    (lambda td: M(Scale(), ["x"], ["z"], method="decode")(td), AttributeError, "decode"),
    (lambda td: M(plus, ["x"], ["z"])(td, None), ValueError, "in_keys"),
    # outputs
    (lambda td: M(lambda x: [x, x], ["x"], ["u", "v"])(td), RuntimeError, "out_keys than.*A list"),
    (lambda td: M(lambda x: {"a": x}, ["x"], ["a", "b"])(td), RuntimeError, "more out_keys than"),
    (lambda td: M(lambda x: torch.zeros(B + 1), ["x"], ["z"])(td), RuntimeError, "batch"),
    # missing inputs
    (lambda td: M(fail, ["x", "gone"], ["z"])(td), ZeroDivisionError, "inner trouble"),
    (lambda td: M(add, ["x", "y"], ["z"], strict=True)(x=td["x"]), KeyError, "y"),
    # errors of the wrapped module
    (lambda td: linear()(td["x"][:, :2]), RuntimeError, r"Linear.*'x'.*2, 2"),
    (lambda td: M(nn.Bilinear(T, T, 1), ["x"], ["z"])(td), TypeError, "Bilinear"),
    # selections
    (lambda td: pair().select_out_keys("a", "b"), ValueError, "existent keys:"),
    (lambda td: pair().select_out_keys(("u", "v")), ValueError, "in a list"),
    (lambda td: pair().select_out_keys(["u"]), ValueError, "in a list"),
    (lambda td: pair().select_out_keys("u").select_out_keys("v"), ValueError, "non existent key"),
    (lambda td: Computed().select_out_keys("u"), RuntimeError, "TensorDictSequential.module.*sel"),
]


class Computed(TensorDictModuleBase):
    """A module whose outputs are no stored list."""

    in_keys = ["x"]
    out_keys = property(lambda self: ["u", "v"])


def test_a_note_is_added_once_and_other_exceptions_pass():
    def again(x):
        raise error

    for error in (ZeroDivisionError("same object"), KeyboardInterrupt(), StopIteration()):
        with pytest.raises(type(error)):
            M(again, ["x"], ["z"])(inputs())
        assert len(getattr(error, "__notes__", [])) == (not isinstance(error, KeyboardInterrupt))


@pytest.mark.parametrize("row", range(len(ERRORS)))
def test_errors(row):
    wrong, kind, match = ERRORS[row]
    td = inputs()
    with pytest.raises(kind, match=f"(?s){match}"):
        wrong(td)
    assert {"u", "v", "w", "z"}.isdisjoint(td.keys())  # nothing was written


# --- destination of outputs, and kinds of containers --------------------------------------------


@pytest.mark.parametrize("inplace", [True, False, "empty", None])
@pytest.mark.parametrize("selected", [False, True])
def test_inplace_and_destination(inplace, selected):
    module = M(both, ["x"], ["u", "v"], inplace=inplace)
    written = {"v"} if selected else {"u", "v"}
    module.select_out_keys(*sorted(written))
    td = numbers({"x": 1}).to("cpu").refine_names("b")
    out = module(td)
    assert (out is td) is (inplace is True) and ("v" in td) is (out is td)
    if out is not td:
        assert leaves(out) == written and type(out) is TensorDict
        expected = ((B,), torch.device("cpu")) if inplace else ((), None)
        assert (out.batch_size, out.device) == expected
    else:
        assert td.names == ["b"]
    for destination in (TensorDict(old=torch.ones(B)), TensorDict({}, [B])):
        old_keys, td = leaves(destination), numbers({"x": 1})
        assert module(td, tensordict_out=destination) is destination and leaves(td) == {"x"}
        assert leaves(destination) == {*old_keys, *written} and td.batch_size == (B,)
    assert module(td, tensordict_out=td) is td and leaves(td) == {"x", *written}
    module.inplace = False
    assert module(td) is not td


def test_other_containers(tmp_path):
    td = lazy_stack([inputs(), inputs(u=torch.ones(B))], 0)
    assert linear()(td) is td and td["z"].shape == (2, B, A) and td[0]["z"].shape == (B, A)
    out = M(plus, ["x"], ["w"], inplace="empty")(td)
    assert out.batch_size == (2, B) and "w" not in td
    data = Data(x=torch.ones(B), batch_size=[B])
    out = M(plus, ["x"], ["z"], inplace="empty")(data)
    assert type(out) is Data and data.z is None and out.z.tolist() == [2, 2]
    assert M(plus, ["x"], ["z"])(data) is data and data.z.tolist() == [2, 2]
    out = M(ones, [], ["z"])(TensorDict({}, [B], device="meta"))
    assert out["z"].device.type == "meta"
    td = numbers()
    for stored in (td.memmap(tmp_path), td.lock_()):
        for inplace in (False, "empty"):
            out = M(plus, ["x"], ["z"], inplace=inplace)(stored)
            assert out["z"].tolist() == [2, 2] and not out.is_locked


# --- changes after a first call -----------------------------------------------------------------


def sets(**attributes):
    return lambda module: [setattr(module, name, value) for name, value in attributes.items()]


CHANGES = {  # of a module that writes x + 1 to z: a change, and its outputs then
    "in_keys": (sets(in_keys=[("n", ("x",))]), {"z": 101}),
    "in_keys in place": (lambda m: m.in_keys.append("y"), {"z": 12}),
    "out_keys in place": (lambda m: m.out_keys.__setitem__(0, "w"), {"w": 2}),
    "all but the inputs": (sets(module=both, out_keys=["u", "v"]), {"u": 2, "v": 3}),
    "a method": (sets(module=Store(), method="read"), {"z": 2}),
    "a selection": (lambda m: m.select_out_keys(), {}),
    "one taken back": (lambda m: m.select_out_keys().reset_out_keys(), {"z": 2}),
    "a hook": (
        lambda m: m.register_forward_hook(lambda m, a, o: o.set("z", o["z"] * 5)),
        {"z": 10},
    ),
    "forward": (sets(forward=lambda td: td.set("w", td["y"] + 1)), {"w": 11}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_after_a_first_call_take_effect(name):
    change, written = CHANGES[name]
    for wrap in WRAPPED.values():
        inner = M(plus, ["x"], ["z"])
        module = wrap(inner)
        assert call(module, "container") == {"z": 2}
        change(inner)
        assert call(module, "container") == written, wrap


def test_selections():
    module = M(both, ["x"], ["u", "v"])
    assert not module.select_out_keys("v").reset_out_keys()._forward_hooks
    module.select_out_keys("u", "v").select_out_keys("v")
    for copied in (copy.deepcopy(module), copy.copy(module)):
        assert call(copied, "container") == {"v": 3} and "out_keys=['v']" in repr(copied)
    module = M(both, ["x"], [("m", "u"), ("k", "v")]).select_out_keys(("k", ("v",)))
    assert set(module(numbers({"x": 1})).keys()) == {"x", "k"}  # no empty container is left


@pytest.mark.parametrize("wrapped", [False, True])
def test_compile_as_a_method(wrapped):
    class Twice(nn.Module):
        def forward(self, x):
            return x * 2

    module = M(Twice(), ["x"], ["z"])
    module(inputs())
    backend, graphs = counting_backend()
    outer = nn.Sequential(module)
    (module.module if wrapped else outer).compile(backend=backend)
    td = inputs()
    assert_close(outer(td)["z"], td["x"] * 2)
    assert len(graphs) == 1


# --- a module of torch --------------------------------------------------------------------------


def test_repr():
    shown = repr(M(nn.Linear(T, A), ["x", ("n", "y")], ["z"]))
    assert shown.startswith("TensorDictModule(") and "in_keys=['x', ('n', 'y')]" in shown
    for words in ("module=Linear(in_features=3, out_features=5, bias=True)", "out_keys=['z']"):
        assert words in shown
    own = Own()
    own.net = nn.Linear(T, A)
    assert repr(own).startswith("Own(") and "net=Linear" in repr(own)


def test_the_device_of_a_module():
    placed = nn.Linear(3, 4)
    placed.device = torch.device("meta")
    assert M(placed, ["x"], ["y"]).device.type == "meta"
    for module, kind in ((nn.Linear(3, 4, device="meta"), "meta"), (nn.ReLU(), "cpu")):
        with pytest.warns(DeprecationWarning, match="device is deprecated"):
            assert M(module, ["x"], ["y"]).device.type == kind


# --- hooks --------------------------------------------------------------------------------------


def call_in_form(module, form):
    x = torch.ones(B, T, requires_grad=True)
    if form == "container":
        return module(TensorDict({"x": x}, [B]))["z"]
    return module(x) if form == "tensors" else module(x=x)


@pytest.mark.parametrize("form", FORMS)
def test_hooks_run_once_in_their_order_until_they_are_removed(form):
    module, calls = linear(), []
    call_in_form(module, form)

    def note(words):
        return lambda *args: calls.append((words, args[0]))

    of_all, backward = nn.modules.module, form == "tensors"  # which have gradients to report
    handles = [
        of_all.register_module_forward_pre_hook(note("all before")),
        of_all.register_module_forward_hook(note("all after")),
    ]
    if backward:
        handles.append(of_all.register_module_full_backward_hook(note("all backward")))
    try:
        for at in (module, module.module):
            handles.append(at.register_forward_pre_hook(note("before")))
            handles.append(at.register_forward_hook(note("after")))
            if backward or at is module.module:
                handles.append(at.register_full_backward_hook(note("backward")))
        call_in_form(module, form).sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    inner = module.module
    forward = [(w, at) for at in (module, inner) for w in ("all before", "before")]
    forward += [(w, at) for at in (inner, module) for w in ("all after", "after")]
    assert calls[:8] == forward
    assert {at for w, at in calls[8:] if w == "backward"} == {inner, *[module] * backward}
    assert {at for w, at in calls[8:] if w == "all backward"} == {*[inner, module] * backward}
    ran = len(calls)
    call_in_form(module, form)
    assert len(calls) == ran


# --- custom forward and __call__ ----------------------------------------------------------------


@pytest.mark.parametrize("form", ["container", "keywords"])
def test_eight_threads_call_one_module(form, in_threads):
    module, wrong = M(lambda x, y: x @ y, ["x", ("n", "y")], [("out", "z")]), []

    def work(i):
        for j in range(30):
            x, y = torch.full((2,), float(i * 100 + j)), torch.ones(2 + j % 2)
            try:
                if form == "container":
                    got = module(TensorDict({"x": x, "n": {"y": y}}))["out", "z"]
                else:
                    got = module(x=x, n_y=y)
                right = j % 2 == 0 and got == 2 * x[0]
            except RuntimeError:
                right = j % 2 == 1
            if not right:
                wrong.append((i, j))

    in_threads(work)
    assert wrong == []


# --- reset_parameters_recursive -----------------------------------------------------------------


def net():
    last = nn.Sequential(nn.Linear(A, 2))
    return M(nn.Sequential(nn.Linear(T, A), nn.ReLU(), last), ["x"], ["z"])


@pytest.mark.parametrize("inner", [plus, Scale()])
def test_modules_that_cannot_be_reset_warn(inner):
    with pytest.warns(UserWarning, match="did not find any parameters to reset"):
        M(inner, ["x"], ["z"]).reset_parameters_recursive()
    assert inner is plus or inner.weight == 1


def test_a_tree_of_parameters_is_reset_and_the_module_is_not():
    module = net()
    own = TensorDict.from_module(module).data
    before, params = own.clone(), own.clone().apply(lambda p: torch.full_like(p, 7))
    out = module.reset_parameters_recursive(params)
    assert leaves(out) == leaves(params)
    for key, value in out.items(True, True):
        assert (value != 7).any() and value.requires_grad and value.is_leaf
        assert params[key].data_ptr() == value.data_ptr()
    assert (own == before).all()
    with pytest.raises(RuntimeError, match="batch"):
        module.reset_parameters_recursive(own.expand(4).clone())
    with pytest.raises(KeyError, match="9"):
        module.reset_parameters_recursive(TensorDict({"module": {"9": {"weight": torch.ones(1)}}}))
