"""TensorDictModule and TensorDictModuleBase: keys in, keys out, and everything around a call."""

import copy
import functools
import pickle
import warnings

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.testing import assert_close

from raffia import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorClass,
    TensorDict,
    TensorDictParams,
    is_tensor_collection,
    lazy_stack,
)
from raffia.nn import TensorDictModule, TensorDictModuleBase

B, T, A = 2, 3, 5


def plus(x):
    return x + 1


def add(x, y):
    return x + y


def both(x):
    return x + 1, x + 2


def inputs(**extra):
    return TensorDict(
        {"x": torch.arange(B * T).view(B, T).float(), "y": torch.ones(B, T), **extra},
        batch_size=[B],
    )


def leaves(td):
    return set(td.keys(True, True))


class Kwargs(nn.Module):
    """Keeps the arguments of its last call."""

    def forward(self, *args, **kwargs):
        self.seen = (args, kwargs)
        return torch.zeros(B)


class Methods(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(T, A)

    def forward(self, x):
        return x

    def encode(self, x, *, scale=1.0):
        return self.linear(x) * scale


# --- keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, kept",
    [
        ("a", ["a"]),
        (["a"], ["a"]),
        (["a", "b"], ["a", "b"]),
        (("a", "b"), [("a", "b")]),
        ([("a", "b")], [("a", "b")]),
        ([("a", "b"), "c"], [("a", "b"), "c"]),
        ([("a",)], ["a"]),
        (("a",), ["a"]),
        ([("a", ("b",))], [("a", "b")]),
        ([("a", ("b", ("c",)))], [("a", "b", "c")]),
        ([(("a",),)], ["a"]),
        ([((("a", "b"), "c"), "d")], [("a", "b", "c", "d")]),
        ([], []),
        (["a", "a"], ["a", "a"]),
        (["a b", "a.b", "1"], ["a b", "a.b", "1"]),
    ],
)
@pytest.mark.parametrize("side", ["in_keys", "out_keys"])
def test_keys_are_lists_of_flat_keys(side, given, kept):
    keys = {"in_keys": ["x"], "out_keys": ["y"], side: given}
    module = TensorDictModule(plus, **keys)
    assert getattr(module, side) == kept
    assert type(getattr(module, side)) is list
    if side == "out_keys":
        assert module.out_keys_source == kept


@pytest.mark.parametrize("wrong", [None, 3, {"a", "b"}, 1.5, object()])
@pytest.mark.parametrize("side", ["in_keys", "out_keys"])
def test_keys_of_a_wrong_type(side, wrong):
    keys = {"in_keys": ["x"], "out_keys": ["y"], side: wrong}
    with pytest.raises(ValueError, match=f"{side} must be"):
        TensorDictModule(plus, **keys)


@pytest.mark.parametrize("wrong", [[1], [None], [("a", 1)], [("a", None)], [["a"]]])
@pytest.mark.parametrize("side", ["in_keys", "out_keys"])
def test_keys_with_wrong_elements(side, wrong):
    keys = {"in_keys": ["x"], "out_keys": ["y"], side: wrong}
    with pytest.raises(ValueError, match=f"{side} must be"):
        TensorDictModule(plus, **keys)


def test_a_dict_of_out_keys_is_refused():
    with pytest.raises(ValueError, match="out_keys must be"):
        TensorDictModule(plus, ["x"], {"y": "z"})


def test_out_keys_are_required():
    with pytest.raises(TypeError):
        TensorDictModule(plus, ["x"])


def test_the_given_list_is_not_shared():
    ins, outs = ["x"], ["y"]
    module = TensorDictModule(plus, ins, outs)
    ins.append("more")
    outs.append("more")
    assert module.in_keys == ["x"] and module.out_keys == ["y"]


def test_keys_as_positional_arguments():
    module = TensorDictModule(plus, ["x"], ["z"])
    assert_close(module(inputs())["z"], inputs()["x"] + 1)


@pytest.mark.parametrize(
    "in_key", ["x", ("in", "x"), ("in", "deep", "x"), ("in", ("deep", ("x",)))], ids=str
)
@pytest.mark.parametrize("out_key", ["z", ("out", "z"), ("in", "z"), ("out", "deep", "z")], ids=str)
def test_nested_keys_are_read_and_written(in_key, out_key):
    td = TensorDict({}, [B])
    x = torch.randn(B, T)
    td[in_key] = x
    out = TensorDictModule(plus, [in_key], [out_key])(td)
    assert out is td
    assert_close(td[out_key], x + 1)
    assert td[out_key].shape == (B, T)


def test_a_nested_output_has_the_batch_size_of_its_parent():
    td = TensorDictModule(plus, ["x"], [("out", "z")])(inputs())
    assert td["out"].batch_size == (B,)


def test_an_input_can_be_a_container():
    td = TensorDict({"sub": {"x": torch.ones(B)}}, [B])
    TensorDictModule(lambda sub: sub["x"] * 3, ["sub"], ["z"])(td)
    assert_close(td["z"], torch.full((B,), 3.0))


def test_one_key_read_twice():
    td = TensorDictModule(add, ["x", "x"], ["z"])(inputs())
    assert_close(td["z"], inputs()["x"] * 2)


def test_an_output_replaces_its_input():
    td = inputs()
    before = td["x"]
    TensorDictModule(plus, ["x"], ["x"])(td)
    assert_close(td["x"], inputs()["x"] + 1)
    assert_close(before, inputs()["x"])  # a new tensor stands there, the old one is untouched


def test_no_in_keys():
    module = TensorDictModule(lambda: torch.ones(3), in_keys=[], out_keys=["z"])
    assert_close(module(TensorDict())["z"], torch.ones(3))


def test_no_out_keys():
    seen = []
    module = TensorDictModule(lambda x: seen.append(x), in_keys=["x"], out_keys=[])
    td = inputs()
    assert module(td) is td
    assert len(seen) == 1 and leaves(td) == {"x", "y"}


# --- keys as a dict -----------------------------------------------------------------------------


def named(x, *, y, z):
    return x + 10 * y + 100 * z


@pytest.mark.parametrize("flag", [None, True])
def test_dict_keys_name_the_arguments(flag):
    module = TensorDictModule(
        named, in_keys={"x": "a", "y": ("b", "c"), "z": "a"}, out_keys=["out"], out_to_in_map=flag
    )
    assert module.in_keys == ["a", ("b", "c"), "a"]
    td = TensorDict({"a": torch.ones(()), "b": {"c": torch.ones(()) * 2}})
    assert module(td)["out"] == 1 + 20 + 100


def test_dict_keys_in_the_other_direction():
    module = TensorDictModule(
        named,
        in_keys={"a": "x", ("b", "c"): "y", "d": "z"},
        out_keys=["out"],
        out_to_in_map=False,
    )
    assert module.in_keys == ["a", ("b", "c"), "d"]
    td = TensorDict({"a": torch.ones(()), "b": {"c": torch.ones(()) * 2}, "d": torch.zeros(())})
    assert module(td)["out"] == 21


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("keys", [["x"], "x", ("a", "x")], ids=str)
def test_the_direction_without_a_dict_warns(flag, keys):
    with pytest.warns(UserWarning, match="out_to_in_map"):
        TensorDictModule(plus, in_keys=keys, out_keys=["y"], out_to_in_map=flag)


def test_a_dict_with_wrong_values():
    with pytest.raises(ValueError, match="in_keys must be"):
        TensorDictModule(named, in_keys={"x": 1}, out_keys=["out"])


def test_dict_keys_are_passed_as_keywords_only():
    inner = Kwargs()
    TensorDictModule(inner, {"u": "x", "v": "y"}, ["z"])(inputs())
    args, kwargs = inner.seen
    assert args == () and list(kwargs) == ["u", "v"]


def test_dict_keys_with_a_missing_entry_pass_none():
    inner = Kwargs()
    TensorDictModule(inner, {"u": "x", "v": "gone"}, ["z"])(inputs())
    assert inner.seen[1]["v"] is None


def test_dict_keys_dispatch_by_key_not_by_argument():
    module = TensorDictModule(named, {"x": "a", "y": ("b", "c"), "z": "d"}, ["out"])
    assert module(a=torch.ones(()), b_c=torch.ones(()), d=torch.ones(())) == 111
    assert module(torch.ones(()), torch.ones(()) * 2, torch.zeros(())) == 21


def test_a_keyword_of_the_call_that_is_also_an_entry_is_refused_ours():
    module = TensorDictModule(named, {"x": "a", "y": "b"}, ["out"])
    td = TensorDict(a=torch.ones(()), b=torch.ones(()))
    with pytest.raises(TypeError, match="multiple values for keyword argument 'y'"):
        module(td, z=torch.ones(()), y=torch.ones(()) * 5)


def test_an_empty_dict_of_keys():
    module = TensorDictModule(lambda: torch.ones(()), {}, ["z"])
    assert module.in_keys == []
    assert module(TensorDict())["z"] == 1


# --- outputs ------------------------------------------------------------------------------------


def test_one_tensor_for_one_key():
    td = TensorDictModule(nn.Linear(T, A), ["x"], ["z"])(inputs())
    assert td["z"].shape == (B, A)


def test_a_tuple_is_spread():
    td = TensorDictModule(both, ["x"], ["u", ("v", "w")])(inputs())
    assert_close(td["u"], inputs()["x"] + 1)
    assert_close(td["v", "w"], inputs()["x"] + 2)


def test_a_list_is_not_spread():
    with pytest.raises(RuntimeError, match="more out_keys than tensors"):
        TensorDictModule(lambda x: [x, x], ["x"], ["u", "v"])(inputs())


def test_a_list_is_one_output():
    td = TensorDictModule(lambda x: ["a", "b"], ["x"], ["u"])(inputs())
    assert list(td["u"]) == ["a", "b"]


@pytest.mark.parametrize("outs", [["a", "b"], ["b", "a"], ["a"], [("s", "c"), "a"]], ids=str)
@pytest.mark.parametrize("kind", ["dict", "container"])
def test_outputs_with_names_are_taken_by_key(outs, kind):
    def func(x):
        found = {"a": x, "b": x + 1, "s": {"c": x + 2}}
        return TensorDict(found, [B])

    def as_dict(x):
        return {"a": x, "b": x + 1, ("s", "c"): x + 2}

    td = TensorDictModule(func if kind == "container" else as_dict, ["x"], outs)(inputs())
    expected = {"a": 0, "b": 1, ("s", "c"): 2}
    for key in outs:
        assert_close(td[key], inputs()["x"] + expected[key])
    assert leaves(td) == {"x", "y", *outs}


@pytest.mark.parametrize("kind", ["dict", "container"])
def test_names_that_lack_a_key_are_one_nested_entry(kind):
    def func(x):
        return {"a": x} if kind == "dict" else TensorDict({"a": x}, [B])

    td = TensorDictModule(func, ["x"], ["whole"])(inputs())
    assert is_tensor_collection(td["whole"])
    assert_close(td["whole", "a"], inputs()["x"])


def test_names_that_lack_one_of_two_keys_are_too_few_outputs():
    with pytest.raises(RuntimeError, match="more out_keys than tensors"):
        TensorDictModule(lambda x: {"a": x}, ["x"], ["a", "b"])(inputs())


def test_a_dict_in_a_tuple_is_a_nested_entry():
    td = TensorDictModule(lambda x: (x, {"a": x + 1}), ["x"], ["u", "v"])(inputs())
    assert_close(td["v", "a"], inputs()["x"] + 1)


def test_a_tensorclass_is_an_output():
    class Pair(TensorClass):
        u: torch.Tensor
        v: torch.Tensor

    td = TensorDictModule(lambda x: Pair(u=x, v=x + 1, batch_size=[B]), ["x"], ["p"])(inputs())
    assert type(td["p"]).__name__ == "Pair"
    assert_close(td["p"].v, inputs()["x"] + 1)


def test_a_container_returned_without_out_keys():
    td = inputs()
    assert TensorDictModule(lambda x: TensorDict(a=x), ["x"], [])(td) is td
    assert leaves(td) == {"x", "y"}


@pytest.mark.parametrize("value", ["text", {"set"}, torch.float32, plus])
def test_other_values_become_non_tensor_data(value):
    td = TensorDict({"x": torch.ones(())})
    assert TensorDictModule(lambda x: (value,), ["x"], ["z"])(td)["z"] == value


@pytest.mark.parametrize("value", [3, 2.5, True])
def test_numbers_become_tensors(value):
    td = TensorDictModule(lambda: value, [], ["z"])(TensorDict())
    assert isinstance(td["z"], torch.Tensor) and td["z"] == value


def test_arrays_become_tensors():
    td = TensorDictModule(lambda: np.arange(3), [], ["z"])(TensorDict())
    assert_close(td["z"], torch.arange(3))


def test_non_tensor_inputs_reach_the_function():
    td = TensorDict({"name": NonTensorData("abc"), "x": torch.ones(())})
    seen = []
    TensorDictModule(lambda name, x: seen.append(name) or x, ["name", "x"], ["z"])(td)
    assert seen == ["abc"]


def test_a_named_tuple_is_spread():
    out = TensorDictModule(lambda x: torch.max(x, -1), ["x"], ["best", "where"])
    with pytest.raises(RuntimeError):
        TensorDictModule(lambda x: x, ["x"], ["best", "where"])(inputs())
    td = out(inputs())
    assert_close(td["best"], torch.tensor([2.0, 5.0]))
    assert_close(td["where"], torch.tensor([2, 2]))


def test_none_is_no_output():
    with pytest.raises(RuntimeError, match="more out_keys than tensors"):
        TensorDictModule(lambda x: None, ["x"], ["z"])(inputs())


@pytest.mark.parametrize(
    "func, outs", [(both, ["u"]), (plus, []), (lambda x: (x,) * 3, ["u", "v"])]
)
def test_more_outputs_than_keys(func, outs):
    with pytest.raises(RuntimeError, match="more tensors"):
        TensorDictModule(func, ["x"], outs)(inputs())


@pytest.mark.parametrize("func, outs", [(plus, ["u", "v"]), (both, ["u", "v", "w"])])
def test_fewer_outputs_than_keys(func, outs):
    with pytest.raises(RuntimeError, match="There are more out_keys than tensors"):
        TensorDictModule(func, ["x"], outs)(inputs())


@pytest.mark.parametrize("func, outs", [(both, ["only"]), (plus, ["one", "other"])])
def test_a_wrong_count_names_module_and_keys_ours(func, outs):
    with pytest.raises(RuntimeError) as caught:
        TensorDictModule(func, ["x"], outs)(inputs())
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert func.__name__ in text
    assert all(key in text for key in outs)


def test_a_wrong_count_writes_nothing():
    td = inputs()
    with pytest.raises(RuntimeError):
        TensorDictModule(both, ["x"], ["u"])(td)
    with pytest.raises(RuntimeError):
        TensorDictModule(both, ["x"], ["u", "v", "w"])(td)
    assert leaves(td) == {"x", "y"}


def test_an_output_that_does_not_fit_the_batch_size():
    with pytest.raises(RuntimeError):
        TensorDictModule(lambda x: torch.zeros(B + 1), ["x"], ["z"])(inputs())


@pytest.mark.parametrize(
    "outs, left",
    [
        (["_", "v"], {"v"}),
        (["u", "_"], {"u"}),
        (["_", "_"], set()),
        (["_", ("n", "v")], {("n", "v")}),
    ],
    ids=str,
)
def test_an_underscore_drops_its_output(outs, left):
    td = TensorDictModule(both, ["x"], outs)(inputs())
    assert leaves(td) == {"x", "y"} | left


def test_an_underscore_stands_in_out_keys():
    module = TensorDictModule(both, ["x"], ["_", "v"])
    assert module.out_keys == ["_", "v"]
    assert_close(module(x=torch.zeros(2)), torch.full((2,), 2.0))  # and not in the tuple


def test_all_outputs_dropped_give_an_empty_tuple():
    assert TensorDictModule(plus, ["x"], ["_"])(x=torch.zeros(2)) == ()


def test_an_underscore_is_no_input():
    with pytest.warns(UserWarning, match='key "_" is for ignoring output'):
        TensorDictModule(plus, ["_"], ["y"])


def test_the_result_keeps_its_gradient():
    linear = nn.Linear(T, A)
    TensorDictModule(linear, ["x"], ["z"])(inputs())["z"].sum().backward()
    assert_close(linear.weight.grad, inputs()["x"].sum(0).expand(A, T))


# --- where outputs go ---------------------------------------------------------------------------


def test_inplace_true_writes_into_the_input():
    td = inputs()
    assert TensorDictModule(plus, ["x"], ["z"], inplace=True)(td) is td
    assert "z" in td


def test_inplace_false_gives_a_bare_container():
    td = inputs()
    out = TensorDictModule(plus, ["x"], ["z"], inplace=False)(td)
    assert out is not td and leaves(td) == {"x", "y"}
    assert list(out.keys()) == ["z"]
    assert out.batch_size == () and out.device is None and type(out) is TensorDict


def test_inplace_empty_keeps_batch_size_and_device():
    td = inputs().to("cpu")
    out = TensorDictModule(plus, ["x"], ["z"], inplace="empty")(td)
    assert leaves(td) == {"x", "y"} and list(out.keys()) == ["z"]
    assert out.batch_size == (B,) and out.device == torch.device("cpu")


def test_inplace_none_is_accepted():
    out = TensorDictModule(plus, ["x"], ["z"], inplace=None)(inputs())
    assert "z" in out


@pytest.mark.parametrize("wrong", ["full", "True", 3, "Empty", []])
def test_other_values_of_inplace(wrong):
    with pytest.raises(ValueError, match="inplace"):
        TensorDictModule(plus, ["x"], ["z"], inplace=wrong)


@pytest.mark.parametrize("inplace", [True, False, "empty"])
def test_tensordict_out_wins(inplace):
    td, out = inputs(), TensorDict({"old": torch.ones(B)}, [B])
    got = TensorDictModule(plus, ["x"], ["z"], inplace=inplace)(td, tensordict_out=out)
    assert got is out and leaves(td) == {"x", "y"} and leaves(out) == {"old", "z"}


def test_tensordict_out_that_is_empty():
    out = TensorDict({}, [B])
    assert TensorDictModule(plus, ["x"], ["z"])(inputs(), tensordict_out=out) is out
    assert leaves(out) == {"z"}


def test_tensordict_out_with_another_batch_size():
    out = TensorDict()
    TensorDictModule(plus, ["x"], ["z"])(inputs(), tensordict_out=out)
    assert out["z"].shape == (B, T) and out.batch_size == ()


@pytest.mark.parametrize("inplace", [True, False, "empty"])
def test_dispatch_gives_tensors_whatever_inplace_says(inplace):
    module = TensorDictModule(plus, ["x"], ["z"], inplace=inplace)
    assert_close(module(x=torch.zeros(B)), torch.ones(B))


def test_dispatch_with_tensordict_out_writes_there():
    out = TensorDict()
    got = TensorDictModule(plus, ["x"], ["z"])(x=torch.zeros(B), tensordict_out=out)
    assert_close(got, torch.ones(B))
    assert_close(out["z"], torch.ones(B))


def test_inplace_can_be_changed_later():
    module = TensorDictModule(plus, ["x"], ["z"])
    module.inplace = False
    td = inputs()
    assert module(td) is not td


# --- method, method_kwargs, strict, get_kwargs, kwargs -------------------------------------------


def test_a_method_is_called_by_name():
    inner = Methods()
    module = TensorDictModule(inner, ["x"], ["z"], method="encode")
    assert_close(module(inputs())["z"], inner.linear(inputs()["x"]))
    assert len(list(module.parameters())) == 2


def test_the_keywords_of_a_method():
    inner = Methods()
    module = TensorDictModule(inner, ["x"], ["z"], method="encode", method_kwargs={"scale": 3.0})
    assert_close(module(inputs())["z"], inner.linear(inputs()["x"]) * 3)


def test_the_keywords_of_a_method_stand_over_those_of_the_call():
    inner = Methods()
    module = TensorDictModule(inner, ["x"], ["z"], method="encode", method_kwargs={"scale": 3.0})
    assert_close(module(inputs(), scale=7.0)["z"], inner.linear(inputs()["x"]) * 3)


def test_method_kwargs_without_a_method():
    inner = Kwargs()
    TensorDictModule(inner, ["x"], ["z"], method_kwargs={"flag": 1})(inputs())
    assert inner.seen[1] == {"flag": 1}


def test_a_method_of_something_that_cannot_be_called():
    class Store:
        def read(self, x):
            return x * 2

    module = TensorDictModule(Store(), ["x"], ["z"], method="read")
    assert_close(module(inputs())["z"], inputs()["x"] * 2)


def test_a_method_that_is_not_there():
    module = TensorDictModule(Methods(), ["x"], ["z"], method="decode")
    with pytest.raises(AttributeError, match="decode"):
        module(inputs())


def test_the_settings_are_attributes():
    module = TensorDictModule(plus, ["x"], ["z"])
    assert module.inplace is True and module.strict is False
    assert module.method is None and module.method_kwargs == {}


def test_call_keywords_reach_the_module():
    inner = Kwargs()
    TensorDictModule(inner, ["x"], ["z"])(inputs(), flag=True, other=None)
    assert inner.seen[1] == {"flag": True, "other": None}


def test_unknown_keywords_fail_as_the_module_fails():
    with pytest.raises(TypeError, match="flag"):
        TensorDictModule(plus, ["x"], ["z"])(inputs(), flag=True)


@pytest.mark.parametrize("extra", [(1,), (torch.ones(2),), (TensorDict(),), (None,)])
def test_more_positional_arguments(extra):
    with pytest.raises(ValueError):
        TensorDictModule(plus, ["x"], ["z"])(inputs(), *extra)


def test_more_tensors_than_in_keys():
    with pytest.raises(ValueError):
        TensorDictModule(plus, ["x"], ["z"])(torch.ones(2), torch.ones(2))


def test_a_missing_input_is_none():
    inner = Kwargs()
    TensorDictModule(inner, ["x", "gone", ("n", "gone")], ["z"])(inputs())
    assert inner.seen[0][1:] == (None, None)


def test_a_missing_input_that_the_function_can_do_without():
    def func(x, y=None):
        return x if y is None else x + y

    module = TensorDictModule(func, ["x", "gone"], ["z"])
    assert_close(module(inputs())["z"], inputs()["x"])


@pytest.mark.parametrize("gone", ["gone", ("n", "gone"), ("x_", "deep", "gone")], ids=str)
def test_a_missing_input_that_is_needed(gone):
    with pytest.raises(KeyError, match="gone"):
        TensorDictModule(add, ["x", gone], ["z"])(inputs())


def test_a_missing_input_of_a_linear_layer():
    with pytest.raises(KeyError, match="obs"):
        TensorDictModule(nn.Linear(T, A), ["obs"], ["z"])(inputs())


def test_a_missing_input_is_named_with_the_nearest_key_ours():
    module = TensorDictModule(add, ["x", "observatoin"], ["z"])
    with pytest.raises(KeyError) as caught:
        module(inputs(observation=torch.ones(B)))
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert "add" in text and "'observatoin'" in text and 'Did you mean "observation"' in text


def test_a_nested_missing_input_is_named_with_the_nearest_key_ours():
    module = TensorDictModule(nn.Linear(T, A), [("obs", "stat")], ["z"])
    with pytest.raises(KeyError) as caught:
        module(TensorDict({"obs": {"state": torch.ones(B, T)}}, [B]))
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert "Linear" in text and "stat" in text and "Did you mean" in text


def test_an_error_that_is_not_about_the_missing_input():
    def func(x, y):
        raise ZeroDivisionError("other trouble")

    with pytest.raises(ZeroDivisionError, match="other trouble"):
        TensorDictModule(func, ["x", "gone"], ["z"])(inputs())


@pytest.mark.parametrize("gone", ["gone", ("n", "gone")], ids=str)
@pytest.mark.parametrize("form", ["list", "dict"])
def test_strict_refuses_a_missing_input(gone, form):
    keys = [gone] if form == "list" else {"x": gone}
    with pytest.raises(KeyError, match="gone|n"):
        TensorDictModule(lambda x=None: torch.ones(B), keys, ["z"], strict=True)(inputs())


def test_strict_lets_everything_else_through():
    td = TensorDictModule(add, ["x", "y"], ["z"], strict=True)(inputs())
    assert_close(td["z"], inputs()["x"] + 1)


def test_strict_of_a_dispatched_call():
    with pytest.raises(KeyError):
        TensorDictModule(add, ["x", "y"], ["z"], strict=True)(x=torch.ones(2))


def test_get_kwargs_reach_get():
    ragged = lazy_stack(
        [TensorDict(x=torch.ones(2)), TensorDict(x=torch.ones(3)), TensorDict(x=torch.ones(1))]
    )
    module = TensorDictModule(
        lambda x: x.sum(-1), ["x"], ["z"], get_kwargs={"as_padded_tensor": True}
    )
    assert_close(module(ragged)["z"], torch.tensor([2.0, 3.0, 1.0]))


def test_the_call_by_the_name_of_the_container():
    td = inputs()
    assert TensorDictModule(plus, ["x"], ["z"])(tensordict=td) is td
    assert "z" in td


# --- what can be wrapped ------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [3, "module", None, [plus], torch.ones(2)])
def test_something_that_cannot_be_called(wrong):
    with pytest.raises(ValueError, match="not callable"):
        TensorDictModule(wrong, ["x"], ["z"])


@pytest.mark.parametrize("cls", [nn.Linear, dict, Methods])
def test_a_class_is_refused(cls):
    with pytest.raises(ValueError):
        TensorDictModule(cls, ["x"], ["z"])


class Callable_:
    def __call__(self, x):
        return x + 1


@pytest.mark.parametrize(
    "func",
    [
        plus,
        lambda x: x + 1,
        functools.partial(add, torch.ones(())),
        Callable_(),
        torch.nn.Identity(),
        torch.relu,
        nn.functional.relu,
        torch.jit.ScriptModule,
    ][:-1],
    ids=["function", "lambda", "partial", "object", "module", "builtin", "functional"],
)
def test_everything_callable_can_be_wrapped(func):
    td = TensorDictModule(func, ["y"], ["z"])(inputs())
    assert_close(td["z"], func(inputs()["y"]))


def test_a_keyed_module_can_be_wrapped():
    inner = TensorDictModule(plus, ["x"], ["z"])
    outer = TensorDictModule(inner, ["x"], ["w"])
    assert_close(outer(inputs())["w"], inputs()["x"] + 1)


def test_the_wrapped_thing_stands_at_module():
    linear = nn.Linear(T, A)
    assert TensorDictModule(linear, ["x"], ["z"]).module is linear
    assert TensorDictModule(plus, ["x"], ["z"]).module is plus


def test_the_wrapped_thing_can_be_exchanged():
    module = TensorDictModule(nn.Linear(T, A), ["x"], ["z"])
    module.module = nn.Identity()
    assert_close(module(inputs())["z"], inputs()["x"])


def test_a_transformer_layer():
    layer = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    module = TensorDictModule(layer, ["src", "tgt"], ["out"]).eval()
    src, tgt = torch.randn(B, T, 8), torch.randn(B, A, 8)
    assert_close(module(src=src, tgt=tgt), layer(src, tgt))


@pytest.mark.parametrize("cell, outs", [(nn.GRUCell, ["h"]), (nn.LSTMCell, ["h", "c"])])
def test_recurrent_cells(cell, outs):
    inner = cell(T, A)
    td = TensorDictModule(inner, ["x"], outs)(inputs())
    expected = inner(inputs()["x"])
    expected = expected if isinstance(expected, tuple) else (expected,)
    for key, value in zip(outs, expected, strict=True):
        assert_close(td[key], value)


# --- input containers ---------------------------------------------------------------------------


def test_a_locked_container_is_refused_by_default():
    td = inputs().lock_()
    with pytest.raises(RuntimeError, match="lock"):
        TensorDictModule(plus, ["x"], ["z"])(td)
    assert leaves(td) == {"x", "y"} and td.is_locked


@pytest.mark.parametrize("inplace", [False, "empty"])
def test_a_locked_container_is_read(inplace):
    out = TensorDictModule(plus, ["x"], ["z"], inplace=inplace)(inputs().lock_())
    assert_close(out["z"], inputs()["x"] + 1)
    assert not out.is_locked


def test_a_lazy_stack():
    td = lazy_stack([inputs(), inputs()], 0)
    out = TensorDictModule(nn.Linear(T, A), ["x"], ["z"])(td)
    assert out is td and isinstance(out, LazyStackedTensorDict)
    assert td["z"].shape == (2, B, A) and td[0]["z"].shape == (B, A)


def test_a_lazy_stack_whose_members_differ():
    td = lazy_stack([TensorDict(x=torch.ones(2), u=torch.ones(1)), TensorDict(x=torch.ones(2))])
    TensorDictModule(plus, ["x"], ["z"])(td)
    assert_close(td["z"], torch.full((2, 2), 2.0))


def test_a_lazy_stack_made_empty():
    td = lazy_stack([inputs(), inputs()], 0)
    out = TensorDictModule(plus, ["x"], ["z"], inplace="empty")(td)
    assert out.batch_size == (2, B) and "z" not in td


class Data(TensorClass):
    x: torch.Tensor
    z: torch.Tensor | None = None


def test_a_tensorclass():
    data = Data(x=torch.ones(B, T), batch_size=[B])
    out = TensorDictModule(plus, ["x"], ["z"])(data)
    assert out is data
    assert_close(data.z, torch.full((B, T), 2.0))


def test_a_tensorclass_made_empty():
    data = Data(x=torch.ones(B, T), batch_size=[B])
    out = TensorDictModule(plus, ["x"], ["z"], inplace="empty")(data)
    assert type(out) is Data and data.z is None
    assert_close(out.z, torch.full((B, T), 2.0))


def test_a_container_of_parameters():
    params = TensorDictParams(TensorDict(x=torch.ones(T)))
    out = TensorDictModule(nn.Linear(T, A), ["x"], ["z"], inplace=False)(params)
    assert out["z"].shape == (A,)
    out["z"].sum().backward()
    assert params["x"].grad is not None


def test_a_container_of_parameters_is_written():
    params = TensorDictParams(TensorDict(x=torch.ones(T)))
    with torch.no_grad():
        out = TensorDictModule(plus, ["x"], ["z"])(params)
    assert out is params and isinstance(params["z"], nn.Parameter)


def test_a_container_with_another_device_of_its_own():
    td = inputs().to("meta")
    out = TensorDictModule(nn.Linear(T, A, device="meta"), ["x"], ["z"])(td)
    assert out["z"].device.type == "meta" and out["z"].shape == (B, A)


def test_a_memory_mapped_container(tmp_path):
    td = inputs().memmap(tmp_path)
    out = TensorDictModule(plus, ["x"], ["z"], inplace=False)(td)
    assert_close(out["z"], inputs()["x"] + 1)


def test_a_plain_dict_is_no_container():
    with pytest.raises(Exception):  # noqa: B017
        TensorDictModule(nn.Linear(T, A), ["x"], ["z"])({"x": torch.ones(B, T)})


# --- attributes ---------------------------------------------------------------------------------


def test_unknown_attributes_come_from_the_wrapped_module():
    module = TensorDictModule(nn.Linear(T, A), ["x"], ["z"])
    assert module.in_features == T and module.out_features == A
    assert module.weight is module.module.weight


def test_attributes_fall_through_several_layers():
    inner = TensorDictModule(nn.Linear(T, A), ["x"], ["z"])
    assert TensorDictModule(inner, ["x"], ["w"]).in_features == T


@pytest.mark.parametrize("name", ["nothing_here", "_private"])
def test_attributes_that_are_nowhere(name):
    module = TensorDictModule(nn.Linear(T, A), ["x"], ["z"])
    with pytest.raises(AttributeError, match=name):
        getattr(module, name)
    assert not hasattr(module, name)


def test_private_attributes_do_not_fall_through():
    inner = nn.Linear(T, A)
    inner._secret = 3
    module = TensorDictModule(inner, ["x"], ["z"])
    assert not hasattr(module, "_secret")


def test_a_wrapped_function_has_no_attribute_of_a_module():
    assert not hasattr(TensorDictModule(plus, ["x"], ["z"]), "weight")


def test_an_attribute_can_be_set():
    module = TensorDictModule(nn.Linear(T, A), ["x"], ["z"])
    module.note = "mine"
    assert module.note == "mine" and not hasattr(module.module, "note")


def test_in_keys_can_be_set_later():
    module = TensorDictModule(plus, ["x"], ["z"])
    module.in_keys = ["y"]
    assert module.in_keys == ["y"]
    assert_close(module(inputs())["z"], torch.full((B, T), 2.0))


def test_in_keys_set_later_are_unravelled():
    module = TensorDictModule(plus, ["x"], ["z"])
    module.in_keys = [("n", ("y",))]
    assert module.in_keys == [("n", "y")]
    assert_close(module(n_y=torch.ones(2)), torch.full((2,), 2.0))


def test_in_keys_of_another_length_set_later():
    module = TensorDictModule(lambda *xs: sum(xs), ["x"], ["z"])
    module.in_keys = ["x", "y", "y"]
    assert_close(module(inputs())["z"], inputs()["x"] + 2)


def test_out_keys_can_be_set_later():
    module = TensorDictModule(plus, ["x"], ["z"])
    module.out_keys = [("n", ("w",))]
    assert module.out_keys == module.out_keys_source == [("n", "w")]
    assert leaves(module(inputs())) == {"x", "y", ("n", "w")}


def test_out_keys_set_later_as_a_tuple_of_keys():
    module = TensorDictModule(both, ["x"], ["u", "v"])
    module.out_keys = ("a", "b")
    assert module.out_keys == ["a", "b"]


def test_out_keys_source_cannot_be_set():
    module = TensorDictModule(plus, ["x"], ["z"])
    with pytest.raises(AttributeError):
        module.out_keys_source = ["w"]


@pytest.mark.parametrize(
    "thing, yes",
    [
        (TensorDictModule(plus, ["x"], ["z"]), True),
        (nn.Linear(2, 2), False),
        (plus, False),
        (type("Both", (), {"in_keys": [], "out_keys": []})(), True),
        (type("One", (), {"in_keys": []})(), False),
        (type("Other", (), {"out_keys": []})(), False),
        (None, False),
    ],
)
def test_is_tdmodule_compatible(thing, yes):
    assert TensorDictModule.is_tdmodule_compatible(thing) is yes
    assert TensorDictModuleBase.is_tdmodule_compatible(thing) is yes


def test_it_is_a_module():
    module = TensorDictModule(nn.Linear(T, A), ["x"], ["z"])
    assert isinstance(module, nn.Module) and isinstance(module, TensorDictModuleBase)
    assert [name for name, _ in module.named_parameters()] == ["module.weight", "module.bias"]
    assert [name for name, _ in module.named_children()] == ["module"]


# --- repr ---------------------------------------------------------------------------------------


def test_repr_shows_class_module_and_keys():
    text = repr(TensorDictModule(nn.Linear(T, A), ["x", ("n", "y")], ["z"]))
    assert text.startswith("TensorDictModule(")
    assert "module=Linear(in_features=3, out_features=5, bias=True)" in text
    assert "in_keys=['x', ('n', 'y')]" in text and "out_keys=['z']" in text


def test_repr_of_a_function():
    assert "plus" in repr(TensorDictModule(plus, ["x"], ["z"]))


def test_repr_after_a_selection():
    module = TensorDictModule(both, ["x"], ["u", "v"]).select_out_keys("v")
    assert "out_keys=['v']" in repr(module)


def test_repr_of_a_subclass():
    class Mine(TensorDictModule):
        pass

    assert repr(Mine(plus, ["x"], ["z"])).startswith("Mine(")


def test_repr_of_a_base_subclass_lists_children():
    class Mine(TensorDictModuleBase):
        in_keys = ["x"]
        out_keys = ["z"]

        def __init__(self):
            super().__init__()
            self.net = nn.Linear(T, A)

    text = repr(Mine())
    assert "net=Linear" in text and "in_keys=['x']" in text


# --- module behaviour ---------------------------------------------------------------------------


def test_deepcopy_has_its_own_parameters():
    module = TensorDictModule(nn.Linear(T, A), ["x"], ["z"], inplace=False)
    twin = copy.deepcopy(module)
    assert twin.module is not module.module and twin.inplace is False
    with torch.no_grad():
        twin.module.weight.zero_()
    assert module.module.weight.abs().sum() > 0
    twin.in_keys = ["y"]
    assert module.in_keys == ["x"]


def test_deepcopy_of_a_selection():
    module = TensorDictModule(both, ["x"], ["u", "v"]).select_out_keys("v")
    twin = copy.deepcopy(module)
    assert twin.out_keys == ["v"] and leaves(twin(inputs())) == {"x", "y", "v"}


def test_copy_shares_parameters():
    module = TensorDictModule(nn.Linear(T, A), ["x"], ["z"])
    assert copy.copy(module).module is module.module


@pytest.mark.parametrize("inner", [nn.Linear(T, A), plus], ids=["module", "function"])
def test_pickling(inner):
    module = TensorDictModule(inner, ["x", ("n", "y")][:1], ["z"], inplace="empty")
    again = pickle.loads(pickle.dumps(module))
    assert again.in_keys == ["x"] and again.out_keys == ["z"] and again.inplace == "empty"
    assert_close(again(inputs())["z"], module(inputs())["z"])


def test_state_dict_round_trip():
    module = TensorDictModule(nn.Linear(T, A), ["x"], ["z"])
    other = TensorDictModule(nn.Linear(T, A), ["x"], ["z"])
    assert list(module.state_dict()) == ["module.weight", "module.bias"]
    other.load_state_dict(module.state_dict())
    assert_close(other(inputs())["z"], module(inputs())["z"])


def test_dtype_and_device_moves():
    module = TensorDictModule(nn.Linear(T, A), ["x"], ["z"])
    assert module.double() is module
    assert module.module.weight.dtype == torch.double
    assert module.to(torch.float32).module.weight.dtype == torch.float32
    assert module.to("meta").module.weight.device.type == "meta"


def test_train_and_eval_reach_the_inner_module():
    module = TensorDictModule(nn.Dropout(0.5), ["x"], ["z"])
    assert module.training and module.module.training
    module.eval()
    assert not module.module.training
    assert_close(module(inputs())["z"], inputs()["x"])
    module.train()
    assert module.module.training


def test_requires_grad_and_zero_grad():
    module = TensorDictModule(nn.Linear(T, A), ["x"], ["z"])
    module(inputs())["z"].sum().backward()
    module.zero_grad()
    assert module.module.weight.grad is None
    module.requires_grad_(False)
    assert not module(inputs())["z"].requires_grad


def test_no_grad_and_inference_mode():
    module = TensorDictModule(nn.Linear(T, A), ["x"], ["z"])
    with torch.no_grad():
        assert not module(inputs())["z"].requires_grad
    with torch.inference_mode():
        assert module(inputs())["z"].is_inference()


def test_autocast():
    module = TensorDictModule(nn.Linear(T, A), ["x"], ["z"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(inputs())["z"].dtype == torch.bfloat16
        assert module(x=torch.ones(B, T)).dtype == torch.bfloat16
    assert module(inputs())["z"].dtype == torch.float32


def test_the_inner_module_can_be_compiled():
    class Twice(nn.Module):
        def forward(self, x):
            return x * 2

    module = TensorDictModule(Twice(), ["x"], ["z"])
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    module(inputs())
    module.module.compile(backend=backend)
    assert_close(module(inputs())["z"], inputs()["x"] * 2)
    assert len(graphs) == 1


def test_add_module_and_buffers_on_a_keyed_module():
    module = TensorDictModule(nn.Linear(T, A), ["x"], ["z"])
    module.register_buffer("count", torch.zeros(()))
    module.extra = nn.Linear(2, 2)
    assert "count" in dict(module.named_buffers())
    assert "extra.weight" in dict(module.named_parameters())
    assert module.count == 0 and module.extra.in_features == 2


def test_apply_reaches_the_inner_module():
    seen = []
    TensorDictModule(nn.Sequential(nn.Linear(T, A)), ["x"], ["z"]).apply(
        lambda m: seen.append(type(m).__name__)
    )
    assert seen == ["Linear", "Sequential", "TensorDictModule"]


# --- hooks --------------------------------------------------------------------------------------


def target(module, where):
    return module if where == "keyed" else module.module


@pytest.fixture(params=["keyed", "wrapped"])
def hooked(request):
    module = TensorDictModule(nn.Linear(T, A), ["x"], ["z"])
    return module, target(module, request.param), request.param


@pytest.mark.parametrize("form", ["container", "tensors", "keywords"])
def test_forward_hooks_run_once(hooked, form):
    module, place, _ = hooked
    seen = []
    place.register_forward_hook(lambda m, args, out: seen.append(m))
    call_in_form(module, form)
    assert seen == [place]


def call_in_form(module, form):
    td = inputs()
    if form == "container":
        return module(td)["z"]
    return module(td["x"]) if form == "tensors" else module(x=td["x"])


@pytest.mark.parametrize("form", ["container", "tensors", "keywords"])
def test_pre_hooks_run_once(hooked, form):
    module, place, _ = hooked
    seen = []
    place.register_forward_pre_hook(lambda m, args: seen.append(m))
    call_in_form(module, form)
    assert seen == [place]


def test_what_a_forward_hook_of_the_keyed_module_sees():
    module = TensorDictModule(nn.Linear(T, A), ["x"], ["z"])
    seen = []
    module.register_forward_hook(lambda m, args, out: seen.append((args, out)))
    td = inputs()
    module(td)
    ((args, out),) = seen
    assert len(args) == 1 and args[0] is td and out is td
    module(td["x"])
    args, out = seen[1]
    assert args[0] is td["x"] and isinstance(out, torch.Tensor)


def test_a_forward_hook_of_the_keyed_module_changes_the_result():
    module = TensorDictModule(nn.Linear(T, A), ["x"], ["z"])
    module.register_forward_hook(lambda m, args, out: out.select("z"))
    assert list(module(inputs()).keys()) == ["z"]


def test_a_forward_hook_of_the_wrapped_module_changes_the_result():
    module = TensorDictModule(nn.Linear(T, A), ["x"], ["z"])
    module.module.register_forward_hook(lambda m, args, out: out * 0)
    assert_close(module(inputs())["z"], torch.zeros(B, A))


def test_pre_hooks_with_keywords():
    module = TensorDictModule(Kwargs(), ["x"], ["z"])
    module.register_forward_pre_hook(
        lambda m, args, kwargs: (args, {**kwargs, "flag": 1}), with_kwargs=True
    )
    module(inputs())
    assert module.module.seen[1] == {"flag": 1}


def test_pre_hooks_with_keywords_on_the_wrapped_module():
    module = TensorDictModule(Kwargs(), {"u": "x"}, ["z"])
    seen = []
    module.module.register_forward_pre_hook(
        lambda m, args, kwargs: seen.append(list(kwargs)), with_kwargs=True
    )
    module(inputs())
    assert seen == [["u"]]


def test_a_pre_hook_of_the_keyed_module_changes_the_input():
    module = TensorDictModule(plus, ["x"], ["z"])
    module.register_forward_pre_hook(lambda m, args: (args[0].clone(),))
    td = inputs()
    assert module(td) is not td and "z" not in td


def test_forward_hooks_with_keywords():
    module = TensorDictModule(Kwargs(), ["x"], ["z"])
    seen = []
    module.register_forward_hook(
        lambda m, args, kwargs, out: seen.append(list(kwargs)), with_kwargs=True
    )
    module(inputs(), flag=2)
    assert seen == [["flag"]]


def test_hooks_called_when_the_call_fails():
    module = TensorDictModule(lambda x: 1 / 0, ["x"], ["z"])
    seen = []
    module.register_forward_hook(lambda m, args, out: seen.append(out), always_call=True)
    with pytest.raises(ZeroDivisionError):
        module(inputs())
    assert seen == [None]


@pytest.mark.parametrize("form", ["container", "tensors"])
def test_backward_hooks_of_the_wrapped_module(form):
    module = TensorDictModule(nn.Linear(T, A), ["x"], ["z"])
    seen = []
    module.module.register_full_backward_hook(lambda m, gin, gout: seen.append(gout[0].shape))
    x = torch.ones(B, T, requires_grad=True)
    z = module(TensorDict({"x": x}, [B]))["z"] if form == "container" else module(x)
    z.sum().backward()
    assert seen == [(B, A)]


def test_backward_hooks_of_the_keyed_module():
    module = TensorDictModule(nn.Linear(T, A), ["x"], ["z"])
    seen = []
    module.register_full_backward_hook(lambda m, gin, gout: seen.append(gout[0].shape))
    module(torch.ones(B, T, requires_grad=True)).sum().backward()
    assert seen == [(B, A)]


@pytest.mark.parametrize("form", ["container", "tensors", "keywords"])
def test_global_hooks_see_both_modules(form):
    module = TensorDictModule(nn.Linear(T, A), ["x"], ["z"])
    before, after = [], []
    first = nn.modules.module.register_module_forward_pre_hook(lambda m, args: before.append(m))
    second = nn.modules.module.register_module_forward_hook(lambda m, args, out: after.append(m))
    try:
        call_in_form(module, form)
    finally:
        first.remove()
        second.remove()
    assert before == [module, module.module]
    assert after == [module.module, module]
    call_in_form(module, form)
    assert len(before) == 2


@pytest.mark.parametrize("form", ["container", "tensors"])
@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook"])
def test_one_global_hook_alone(kind, form):
    module, seen = TensorDictModule(nn.Linear(T, A), ["x"], ["z"]), []
    register = getattr(nn.modules.module, f"register_module_{kind}")
    handle = register(lambda m, *rest: seen.append(m))
    try:
        call_in_form(module, form)
    finally:
        handle.remove()
    assert len(seen) == 2 and set(seen) == {module, module.module}


def test_global_backward_hooks():
    module = TensorDictModule(nn.Linear(T, A), ["x"], ["z"])
    seen = []
    handle = nn.modules.module.register_module_full_backward_hook(
        lambda m, gin, gout: seen.append(m)
    )
    try:
        module(torch.ones(B, T, requires_grad=True)).sum().backward()
    finally:
        handle.remove()
    assert set(seen) == {module, module.module}


def test_a_removed_hook_does_not_run(hooked):
    module, place, _ = hooked
    seen = []
    place.register_forward_hook(lambda m, args, out: seen.append(m)).remove()
    module(inputs())
    assert seen == []


def test_hooks_added_after_a_call_run(hooked):
    module, place, _ = hooked
    module(inputs())
    seen = []
    place.register_forward_pre_hook(lambda m, args: seen.append(m))
    module(inputs())
    assert seen == [place]


def test_hooks_run_in_their_order():
    module = TensorDictModule(nn.Linear(T, A), ["x"], ["z"])
    seen = []
    module.register_forward_pre_hook(lambda m, a: seen.append("keyed before"))
    module.module.register_forward_pre_hook(lambda m, a: seen.append("inner before"))
    module.module.register_forward_hook(lambda m, a, o: seen.append("inner after"))
    module.register_forward_hook(lambda m, a, o: seen.append("keyed after"))
    module(inputs())
    assert seen == ["keyed before", "inner before", "inner after", "keyed after"]


# --- replaced and inherited forwards -------------------------------------------------------------


def test_a_forward_put_on_the_keyed_instance():
    module = TensorDictModule(plus, ["x"], ["z"])
    module.forward = lambda td: td.set("z", torch.zeros(B))
    assert_close(module(inputs())["z"], torch.zeros(B))


def test_a_forward_put_on_the_wrapped_instance():
    module = TensorDictModule(nn.Linear(T, A), ["x"], ["z"])
    module(inputs())
    module.module.forward = lambda x: x * 0
    assert_close(module(inputs())["z"], torch.zeros(B, T))


def test_a_forward_put_on_the_class_of_the_wrapped_module(monkeypatch):
    module = TensorDictModule(Methods(), ["x"], ["z"])
    module(inputs())
    monkeypatch.setattr(Methods, "forward", lambda self, x: x * 0)
    assert_close(module(inputs())["z"], torch.zeros(B, T))


def test_the_wrapped_module_has_its_own_call():
    class Own(nn.Linear):
        def __call__(self, x):
            return super().__call__(x) * 0

    module = TensorDictModule(Own(T, A), ["x"], ["z"])
    assert_close(module(inputs())["z"], torch.zeros(B, A))


def test_a_subclass_with_its_own_forward():
    class Double(TensorDictModule):
        def forward(self, tensordict, **kwargs):
            tensordict = super().forward(tensordict, **kwargs)
            return tensordict.set("z", tensordict["z"] * 2)

    td = Double(plus, ["x"], ["z"])(inputs())
    assert_close(td["z"], (inputs()["x"] + 1) * 2)


def test_a_subclass_with_its_own_call():
    class Loud(TensorDictModule):
        def __call__(self, *args, **kwargs):
            self.calls = getattr(self, "calls_made", 0)
            self.calls_made = self.calls + 1
            return super().__call__(*args, **kwargs)

    module = Loud(plus, ["x"], ["z"])
    module(inputs())
    module(x=torch.ones(2))
    assert module.calls_made == 2


def test_forward_can_be_called_directly():
    module = TensorDictModule(plus, ["x"], ["z"])
    td = inputs()
    assert module.forward(td) is td
    assert_close(module.forward(torch.ones(2)), torch.full((2,), 2.0))
    assert_close(module.forward(x=torch.ones(2)), torch.full((2,), 2.0))


def test_forward_called_directly_runs_no_hooks_of_the_keyed_module():
    module = TensorDictModule(plus, ["x"], ["z"])
    seen = []
    module.register_forward_hook(lambda m, a, o: seen.append(m))
    module.forward(inputs())
    assert seen == []


def test_keys_as_class_attributes():
    class Mine(TensorDictModuleBase):
        in_keys = ["x", ("n", ("y",))]
        out_keys = ["z"]

        def forward(self, tensordict):
            return tensordict.set("z", tensordict["x"] + 1)

    module = Mine()
    assert module.in_keys == ["x", ("n", "y")] and module.out_keys == ["z"]
    assert module.out_keys_source == ["z"]
    assert_close(module(inputs())["z"], inputs()["x"] + 1)


def test_keys_of_an_instance_stand_over_those_of_the_class():
    class Mine(TensorDictModuleBase):
        in_keys = ["x"]
        out_keys = ["z"]

        def __init__(self, keys=None):
            super().__init__()
            if keys is not None:
                self.in_keys = keys

    assert Mine(["a", ("b", ("c",))]).in_keys == ["a", ("b", "c")]
    assert Mine().in_keys == ["x"]


def test_keys_set_in_the_constructor():
    class Mine(TensorDictModuleBase):
        def __init__(self):
            super().__init__()
            self.in_keys = ["x"]
            self.out_keys = ["z"]

    assert Mine().in_keys == ["x"] and Mine().out_keys_source == ["z"]


def test_keys_as_properties_of_a_subclass():
    class Mine(TensorDictModuleBase):
        @property
        def in_keys(self):
            return ["made", "up"]

        @property
        def out_keys(self):
            return ["z"]

        def forward(self, tensordict):
            return tensordict

    assert Mine().in_keys == ["made", "up"] and Mine().out_keys == ["z"]


def test_a_subclass_of_a_subclass_inherits_keys():
    class One(TensorDictModuleBase):
        in_keys = ["x"]
        out_keys = ["z"]

    class Two(One):
        out_keys = ["w"]

    assert One().out_keys == ["z"]
    assert Two().in_keys == ["x"] and Two().out_keys == ["w"]


def test_selections_of_one_instance_do_not_reach_its_class():
    class Mine(TensorDictModuleBase):
        in_keys = ["x"]
        out_keys = ["u", "v"]

        def forward(self, tensordict):
            return tensordict.set("u", tensordict["x"]).set("v", tensordict["x"])

    one, other = Mine(), Mine()
    one.select_out_keys("u")
    assert one.out_keys == ["u"] and other.out_keys == ["u", "v"] and Mine().out_keys == ["u", "v"]
    assert leaves(other(inputs())) == {"x", "y", "u", "v"}


# --- select_out_keys ----------------------------------------------------------------------------


def three(x):
    return x + 1, x + 2, x + 3


@pytest.mark.parametrize("keep", [["u"], ["v"], ["u", "w"], ["w", "u"], ["u", "v", "w"]], ids=str)
def test_select_out_keys(keep):
    module = TensorDictModule(three, ["x"], ["u", "v", "w"])
    assert module.select_out_keys(*keep) is module
    assert module.out_keys == keep and module.out_keys_source == ["u", "v", "w"]
    assert leaves(module(inputs())) == {"x", "y", *keep}
    amounts = {"u": 1.0, "v": 2.0, "w": 3.0}
    got = module(x=torch.zeros(()))
    got = got if isinstance(got, tuple) else (got,)
    assert [g.item() for g in got] == [amounts[k] for k in keep]
    assert module.reset_out_keys() is module
    assert module.out_keys == ["u", "v", "w"]
    assert leaves(module(inputs())) == {"x", "y", "u", "v", "w"}


def test_select_a_nested_out_key():
    module = TensorDictModule(both, ["x"], [("n", "u"), ("n", "v")])
    module.select_out_keys(("n", ("u",)))
    assert module.out_keys == [("n", "u")]
    assert leaves(module(inputs())) == {"x", "y", ("n", "u")}


def test_nothing_is_left_of_a_nested_output_that_is_not_selected():
    module = TensorDictModule(both, ["x"], ["u", ("n", "v")]).select_out_keys("u")
    assert set(module(inputs()).keys()) == {"x", "y", "u"}


def test_select_no_out_key():
    module = TensorDictModule(both, ["x"], ["u", "v"]).select_out_keys()
    assert module.out_keys == [] and leaves(module(inputs())) == {"x", "y"}
    assert module(x=torch.zeros(2)) == ()


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
@pytest.mark.parametrize("keys", [["gone"], ["gone", "other"], ["u", "gone"]], ids=str)
def test_select_an_unknown_out_key(keys, error):
    module = TensorDictModule(both, ["x"], ["u", "v"])
    with pytest.raises(error, match="non existent key"):
        module.select_out_keys(*keys)
    assert module.out_keys == ["u", "v"]
    assert leaves(module(inputs())) == {"x", "y", "u", "v"}


def test_select_keys_given_as_one_tuple():
    module = TensorDictModule(both, ["x"], ["u", "v"])
    with pytest.raises(ValueError, match="Are you passing the keys in a list"):
        module.select_out_keys(("u", "v"))


def test_a_selection_within_a_selection():
    module = TensorDictModule(three, ["x"], ["u", "v", "w"]).select_out_keys("u", "v")
    module.select_out_keys("v")
    assert module.out_keys == ["v"]
    assert leaves(module(inputs())) == {"x", "y", "v"}
    module.reset_out_keys()
    assert module.out_keys == ["u", "v", "w"]


def test_a_selection_does_not_widen():
    module = TensorDictModule(three, ["x"], ["u", "v", "w"]).select_out_keys("u")
    with pytest.raises(ValueError):
        module.select_out_keys("v")


def test_a_selected_output_that_is_an_input_stays():
    module = TensorDictModule(both, ["x"], ["x", "v"]).select_out_keys("v")
    td = module(inputs())
    assert leaves(td) == {"x", "y", "v"}
    assert_close(td["x"], inputs()["x"] + 1)


def test_a_selection_when_called_by_name():
    module = TensorDictModule(both, ["x"], ["u", "v"]).select_out_keys("v")
    td = inputs()
    assert module(tensordict=td) is td and leaves(td) == {"x", "y", "v"}


@pytest.mark.parametrize("inplace", [False, "empty"])
def test_a_selection_with_a_fresh_container(inplace):
    module = TensorDictModule(both, ["x"], ["u", "v"], inplace=inplace).select_out_keys("v")
    assert leaves(module(inputs())) == {"v"}


def test_a_selection_with_tensordict_out():
    module = TensorDictModule(both, ["x"], ["u", "v"]).select_out_keys("v")
    out = TensorDict({"old": torch.ones(B)}, [B])
    module(inputs(), tensordict_out=out)
    assert leaves(out) == {"old", "v"}


def test_reset_without_a_selection():
    module = TensorDictModule(both, ["x"], ["u", "v"])
    assert module.reset_out_keys() is module and module.out_keys == ["u", "v"]


def test_select_on_a_module_of_ones_own():
    class Mine(TensorDictModuleBase):
        in_keys = ["x"]
        out_keys = ["u", "v"]

        def forward(self, tensordict):
            return tensordict.set("u", tensordict["x"]).set("v", tensordict["x"])

    module = Mine()
    module.select_out_keys("u")
    assert leaves(module(inputs())) == {"x", "y", "u"}
    module.reset_out_keys()
    assert leaves(module(inputs())) == {"x", "y", "u", "v"}


def test_repeated_selection_and_reset():
    module = TensorDictModule(three, ["x"], ["u", "v", "w"])
    for key in ("u", "v", "w"):
        module.select_out_keys(key)
        assert leaves(module(inputs())) == {"x", "y", key}
        module.reset_out_keys()
    assert len(module._forward_hooks) == 0


# --- reset_parameters_recursive -----------------------------------------------------------------


def net():
    return nn.Sequential(nn.Linear(T, A), nn.ReLU(), nn.Sequential(nn.Linear(A, 2)))


def test_parameters_are_reset_in_place():
    module = TensorDictModule(net(), ["x"], ["z"])
    objects = list(module.parameters())
    with torch.no_grad():
        for p in objects:
            p.fill_(7)
    assert module.reset_parameters_recursive() is None
    assert all(a is b for a, b in zip(objects, module.parameters(), strict=True))
    assert all((p != 7).any() for p in objects)


def test_a_keyed_module_without_parameters_warns():
    module = TensorDictModule(plus, ["x"], ["z"])
    with pytest.warns(UserWarning, match="did not find any parameters to reset"):
        module.reset_parameters_recursive()


def test_modules_that_cannot_be_reset_warn():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

    module = TensorDictModule(Own(), ["x"], ["z"])
    with pytest.warns(UserWarning, match="did not find any parameters"):
        module.reset_parameters_recursive()
    assert (module.module.weight == 1).all()


def test_a_tree_of_parameters_is_reset_and_the_module_is_not():
    module = TensorDictModule(net(), ["x"], ["z"])
    before = TensorDict.from_module(module).data.clone()
    params = TensorDict.from_module(module).data.clone().apply(lambda p: torch.full_like(p, 7))
    out = module.reset_parameters_recursive(params)
    assert set(out.keys(True, True)) == set(params.keys(True, True))
    for key, value in out.items(True, True):
        assert (value != 7).any() and value.requires_grad and value.is_leaf
        assert params[key].data_ptr() == value.data_ptr()
    for key, value in before.items(True, True):
        assert_close(TensorDict.from_module(module)[key].data, value)


def test_a_batched_tree_of_parameters_is_refused():
    module = TensorDictModule(net(), ["x"], ["z"])
    params = TensorDict.from_module(module).data.expand(4).clone()
    with pytest.raises(RuntimeError, match="batch"):
        module.reset_parameters_recursive(params)


def test_a_tree_of_another_structure_is_refused():
    module = TensorDictModule(net(), ["x"], ["z"])
    params = TensorDict({"module": {"9": {"weight": torch.ones(A, T)}}})
    with pytest.raises(Exception):  # noqa: B017
        module.reset_parameters_recursive(params)
    assert list(dict(module.named_parameters())) == [
        "module.0.weight",
        "module.0.bias",
        "module.2.0.weight",
        "module.2.0.bias",
    ]


def test_modules_with_parameters_are_there_after_a_reset_with_a_tree():
    module = TensorDictModule(net(), ["x"], ["z"])
    objects = list(module.parameters())
    module.reset_parameters_recursive(TensorDict.from_module(module).data.clone())
    assert all(a is b for a, b in zip(objects, module.parameters(), strict=True))


def test_own_reset_parameters_are_called():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def reset_parameters(self):
            nn.init.constant_(self.weight, 4.0)

        def forward(self, x):
            return x * self.weight

    module = TensorDictModule(nn.Sequential(Own()), ["x"], ["z"])
    module.reset_parameters_recursive()
    assert_close(module.module[0].weight.data, torch.full((2,), 4.0))


# --- failures -----------------------------------------------------------------------------------


class Boom(RuntimeError):
    pass


def fail(x):
    raise Boom("inner trouble")


@pytest.mark.parametrize("form", ["container", "tensors", "keywords"])
def test_the_error_of_the_function_comes_out(form):
    with pytest.raises(Boom, match="inner trouble"):
        call_in_form(TensorDictModule(fail, ["x"], ["z"]), form)


def test_a_failed_call_writes_nothing_and_works_again():
    module = TensorDictModule(nn.Linear(T, A), ["x"], ["z"])
    td = TensorDict({"x": torch.ones(B, T + 1)}, [B])
    with pytest.raises(RuntimeError):
        module(td)
    assert leaves(td) == {"x"}
    assert module(inputs())["z"].shape == (B, A)


def told(caught):
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def test_a_failure_names_module_keys_and_shapes_ours():
    module = TensorDictModule(nn.Linear(T, A), [("obs", "state")], ["z"])
    with pytest.raises(RuntimeError) as caught:
        module(TensorDict({"obs": {"state": torch.ones(B, T + 1)}}, [B]))
    text = told(caught)
    assert "Linear" in text and "state" in text
    assert "[2, 4]" in text or "(2, 4)" in text


def test_a_failure_of_a_function_names_it_ours():
    with pytest.raises(Boom) as caught:
        TensorDictModule(fail, ["x"], ["z"])(inputs())
    text = told(caught)
    assert "fail" in text and "'x'" in text and ("[2, 3]" in text or "(2, 3)" in text)


def test_a_failure_shows_all_inputs_ours():
    module = TensorDictModule(torch.matmul, ["x", "y"], ["z"])
    with pytest.raises(RuntimeError, match=r"mat1 and mat2|size|shape") as caught:
        module(inputs())
    text = told(caught)
    assert "'x'" in text and "'y'" in text and "matmul" in text


def test_pytest_match_sees_the_note_ours():
    with pytest.raises(Boom, match=r"in_keys=\['x'\]"):
        TensorDictModule(fail, ["x"], ["z"])(inputs())


def test_notes_are_added_once_for_each_failure_ours():
    error = Boom("same object")

    def again(x):
        raise error

    module = TensorDictModule(again, ["x"], ["z"])
    with pytest.raises(Boom):
        module(inputs())
    first = len(getattr(error, "__notes__", ()))
    assert first == 1


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration])
def test_other_exceptions_pass(kind):
    def stop(x):
        raise kind()

    with pytest.raises(kind):
        TensorDictModule(stop, ["x"], ["z"])(inputs())


# --- many threads, many calls -------------------------------------------------------------------


@pytest.mark.parametrize("form", ["container", "keywords"])
def test_eight_threads_call_one_module(form, in_threads):
    module = TensorDictModule(add, ["x", ("n", "y")], [("out", "z")])
    wrong = []

    def work(i):
        for j in range(50):
            value = torch.full((), float(i * 100 + j))
            if form == "container":
                td = TensorDict({"x": value, "n": {"y": value}})
                got = module(td)["out", "z"]
            else:
                got = module(x=value, n_y=value)
            if got != 2 * value:
                wrong.append((i, j))

    in_threads(work)
    assert wrong == []


def test_threads_that_fail_do_not_disturb_others(in_threads):
    module = TensorDictModule(nn.Linear(T, A), ["x"], ["z"])
    wrong = []

    def work(i):
        for _ in range(30):
            try:
                out = module(x=torch.ones(B, T + i % 2))
                ok = i % 2 == 0 and out.shape == (B, A)
            except RuntimeError:
                ok = i % 2 == 1
            if not ok:
                wrong.append(i)

    in_threads(work)
    assert wrong == []


def test_a_module_that_calls_itself():
    def countdown(n, td):
        return td["n"] * 0 if n <= 0 else module(TensorDict(n=n - 1, td=td))["out"]

    module = TensorDictModule(countdown, ["n", "td"], ["out"])
    td = TensorDict(n=torch.tensor(3))
    assert module(TensorDict(n=torch.tensor(3), td=td))["out"] == 0


def test_a_call_gives_no_warning():
    module = TensorDictModule(nn.Linear(T, A), ["x"], ["z"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(inputs())
        module(x=torch.ones(B, T))
        repr(module)
        module.select_out_keys("z").reset_out_keys()


# --- vmap ---------------------------------------------------------------------------------------


def test_vmap_over_the_container():
    linear = nn.Linear(T, A)
    module = TensorDictModule(linear, ["x"], ["z"])
    out = torch.vmap(module)(inputs())
    assert_close(out["z"], linear(inputs()["x"]))
    assert out.batch_size == (B,)


def test_vmap_over_tensors():
    linear = nn.Linear(T, A)
    module = TensorDictModule(linear, ["x"], ["z"])
    assert_close(torch.vmap(module)(inputs()["x"]), linear(inputs()["x"]))


# --- settings that change after the first call --------------------------------------------------


def test_strict_set_later():
    module = TensorDictModule(lambda x=None: torch.ones(B), ["gone"], ["z"])
    assert "z" in module(inputs())
    module.strict = True
    with pytest.raises(KeyError, match="gone"):
        module(inputs())


def test_a_method_set_later():
    module = TensorDictModule(Methods(), ["x"], ["z"])
    module(inputs())
    module.method = "encode"
    module.method_kwargs = {"scale": 2.0}
    assert_close(module(inputs())["z"], module.module.linear(inputs()["x"]) * 2)


def test_keywords_for_every_call_added_later():
    module = TensorDictModule(Kwargs(), ["x"], ["z"])
    module(inputs())
    module.method_kwargs["flag"] = 1
    module(inputs())
    assert module.module.seen[1] == {"flag": 1}


def test_the_list_of_in_keys_changed_in_place():
    module = TensorDictModule(lambda *xs: sum(xs), ["x"], ["z"])
    module(inputs())
    module.in_keys.append("y")
    assert_close(module(inputs())["z"], inputs()["x"] + 1)


def test_the_list_of_out_keys_changed_in_place():
    module = TensorDictModule(plus, ["x"], ["z"])
    module(inputs())
    module.out_keys[0] = "w"
    assert leaves(module(inputs())) == {"x", "y", "w"}


def test_out_keys_set_to_another_number():
    module = TensorDictModule(both, ["x"], ["u", "v"])
    module(inputs())
    module.module = None
    del module.module
    module.module = plus
    module.out_keys = ["z"]
    assert leaves(module(inputs())) == {"x", "y", "z"}


def test_forward_of_the_class_replaced_later(monkeypatch):
    class Mine(TensorDictModule):
        pass

    module = Mine(plus, ["x"], ["z"])
    module(inputs())
    monkeypatch.setattr(Mine, "forward", lambda self, td: td.set("w", td["x"]))
    assert leaves(module(inputs())) == {"x", "y", "w"}


def test_forward_of_tensordictmodule_replaced_later(monkeypatch):
    module = TensorDictModule(plus, ["x"], ["z"])
    module(inputs())
    monkeypatch.setattr(TensorDictModule, "forward", lambda self, td: td.set("w", td["x"]))
    assert leaves(module(inputs())) == {"x", "y", "w"}


def test_a_forward_put_on_the_instance_and_taken_away():
    module = TensorDictModule(plus, ["x"], ["z"])
    module.forward = lambda td: td
    assert leaves(module(inputs())) == {"x", "y"}
    del module.forward
    assert leaves(module(inputs())) == {"x", "y", "z"}


def test_in_keys_as_a_property_of_a_subclass():
    class Mine(TensorDictModule):
        @property
        def in_keys(self):
            return ["y"]

        @in_keys.setter
        def in_keys(self, keys):
            pass

    assert_close(Mine(plus, ["x"], ["z"])(inputs())["z"], torch.full((B, T), 2.0))


def test_a_selection_after_a_first_call():
    module = TensorDictModule(both, ["x"], ["u", "v"])
    module(inputs())
    module.select_out_keys("v")
    assert leaves(module(inputs())) == {"x", "y", "v"}


def test_a_selection_of_the_only_output_set_empty():
    module = TensorDictModule(plus, ["x"], ["z"])
    module(inputs())
    module.select_out_keys()
    assert leaves(module(inputs())) == {"x", "y"}
    module.reset_out_keys()
    assert leaves(module(inputs())) == {"x", "y", "z"}


@pytest.mark.parametrize("wrapped", [False, True])
def test_compiled_by_its_own_method(wrapped):
    module = TensorDictModule(plus, ["x"], ["z"])
    if wrapped:
        module = nn.Sequential(module)
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    module(inputs())
    module.compile(backend=backend)
    assert_close(module(inputs())["z"], inputs()["x"] + 1)
    assert graphs


def test_no_tensordict_out_given_by_name():
    td = inputs()
    assert TensorDictModule(plus, ["x"], ["z"])(td, tensordict_out=None) is td


def test_the_input_as_tensordict_out():
    td = inputs()
    module = TensorDictModule(plus, ["x"], ["z"], inplace="empty")
    assert module(td, tensordict_out=td) is td and "z" in td


# --- kinds of inputs and outputs ----------------------------------------------------------------


def test_an_output_that_is_the_input():
    td = inputs()
    TensorDictModule(lambda x: x, ["x"], ["z"])(td)
    assert td["z"] is td["x"]


@pytest.mark.parametrize("kind", [nn.Parameter, nn.Buffer])
def test_outputs_that_are_parameters_or_buffers(kind):
    value = kind(torch.ones(B))
    td = TensorDictModule(lambda: value, [], ["z"])(TensorDict({}, [B]))
    assert td["z"] is value


def test_a_subclass_of_tensor_passes_both_ways():
    class Marked(torch.Tensor):
        pass

    td = TensorDict({"x": torch.ones(B).as_subclass(Marked)}, [B])
    seen = []
    TensorDictModule(lambda x: seen.append(type(x)) or x * 2, ["x"], ["z"])(td)
    assert seen == [Marked] and type(td["z"]) is Marked


def test_outputs_are_moved_to_the_device_of_the_container():
    td = TensorDict({"x": torch.ones(B)}, [B], device="meta")
    TensorDictModule(lambda x: torch.ones(B), ["x"], ["z"])(td)
    assert td["z"].device.type == "meta"


def test_an_output_container_takes_the_batch_size_of_its_parent():
    td = inputs()
    TensorDictModule(lambda x: TensorDict(a=x), ["x"], ["sub"])(td)
    assert td["sub"].batch_size == (B,)


def test_an_output_container_is_stored_without_a_copy_of_its_tensors():
    td = inputs()
    TensorDictModule(lambda x: TensorDict({"a": x}, [B]), ["x"], ["sub"])(td)
    assert td["sub", "a"] is td["x"]


def test_a_dict_of_dicts():
    td = TensorDictModule(lambda x: {"a": {"b": x}}, ["x"], ["sub"])(inputs())
    assert_close(td["sub", "a", "b"], inputs()["x"])


def test_names_of_dimensions_stay():
    td = TensorDict({"x": torch.ones(B, T)}, [B, T], names=["b", "t"])
    assert TensorDictModule(plus, ["x"], ["z"])(td).names == ["b", "t"]
    out = TensorDictModule(plus, ["x"], ["z"], inplace="empty")(td)
    assert out.batch_size == (B, T)


def test_an_entry_through_a_tensor_is_refused():
    with pytest.raises(Exception):  # noqa: B017
        TensorDictModule(plus, ["x"], [("x", "deep")])(inputs())


def test_a_sub_container_is_not_unpacked():
    td = TensorDict({"obs": {"a": torch.ones(B), "b": torch.ones(B)}}, [B])
    seen = []
    TensorDictModule(lambda obs: seen.append(obs) or obs["a"], ["obs"], ["z"])(td)
    assert seen[0] is td["obs"]


def test_a_large_number_of_keys():
    keys = [f"k{i}" for i in range(50)]
    module = TensorDictModule(lambda *xs: tuple(x + 1 for x in xs), keys, keys)
    td = module(TensorDict({k: torch.full((B,), float(i)) for i, k in enumerate(keys)}, [B]))
    assert [td[k][0].item() for k in keys] == [i + 1.0 for i in range(50)]


def test_state_of_the_inner_module_changes_in_place():
    module = TensorDictModule(nn.BatchNorm1d(T), ["x"], ["z"])
    module(inputs())
    module(x=inputs()["x"])
    assert module.module.num_batches_tracked == 2


def test_parametrized_weights_are_seen():
    linear = torch.nn.utils.parametrizations.weight_norm(nn.Linear(T, A))
    module = TensorDictModule(linear, ["x"], ["z"])
    assert_close(module(inputs())["z"], linear(inputs()["x"]))


def test_lazy_layers_take_their_shapes_at_the_first_call():
    module = TensorDictModule(nn.LazyLinear(A), ["x"], ["z"])
    assert module(inputs())["z"].shape == (B, A)
    assert module.module.weight.shape == (A, T)
    assert module(inputs())["z"].shape == (B, A)


def test_scripted_and_traced_modules():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(nn.Linear(T, A), torch.ones(B, T))
    module = TensorDictModule(traced, ["x"], ["z"])
    assert_close(module(inputs())["z"], traced(inputs()["x"]))


def test_checkpointing():
    linear = nn.Linear(T, A)

    def func(x):
        return torch.utils.checkpoint.checkpoint(linear, x, use_reentrant=False)

    TensorDictModule(func, ["x"], ["z"])(inputs())["z"].sum().backward()
    assert_close(linear.weight.grad, inputs()["x"].sum(0).expand(A, T))


def test_a_tensorclass_is_stored_whole_also_under_the_name_of_a_field():
    class Pair(TensorClass):
        u: torch.Tensor
        v: torch.Tensor

    def func(x):
        return Pair(u=x, v=x + 1, batch_size=[B])

    td = TensorDictModule(func, ["x"], ["u"])(inputs())
    assert_close(td["u"].v, inputs()["x"] + 1)
    with pytest.raises(RuntimeError, match="more out_keys than tensors"):
        TensorDictModule(func, ["x"], ["u", "v"])(inputs())


def test_a_list_of_tensors_stays_a_list():
    td = TensorDictModule(lambda x: [x, x + 1], ["x"], ["u"])(inputs())
    assert len(td["u"]) == 2
    assert_close(td["u"][1], inputs()["x"] + 1)
    assert not isinstance(td["u"], torch.Tensor)


def test_a_lazy_stack_with_the_out_keys_is_picked_by_key():
    stack = lazy_stack([TensorDict(u=torch.ones(1)), TensorDict(u=torch.zeros(1), w=torch.ones(1))])
    td = TensorDictModule(lambda x: stack, ["x"], ["u"])(inputs())
    assert_close(td["u"], torch.tensor([[1.0], [0.0]]))


@pytest.mark.parametrize("value", [slice(1, 2), "abc", b"abc", 1 + 2j])
def test_values_of_other_kinds_alone(value):
    td = TensorDictModule(lambda: value, [], ["z"])(TensorDict())
    assert td["z"] == value


def test_an_input_below_a_tensor_is_an_error():
    with pytest.raises(Exception, match="deep"):
        TensorDictModule(plus, [("x", "deep")], ["z"])(inputs())


def test_a_list_of_strings_as_input():
    td = TensorDict({"text": ["a", "b"]}, [B])
    seen = []
    TensorDictModule(lambda text: seen.extend(text) or torch.ones(B), ["text"], ["z"])(td)
    assert seen == ["a", "b"]


def test_no_input_at_all():
    seen = []
    module = TensorDictModule(lambda x: seen.append(x) or torch.ones(2), ["x"], ["z"])
    assert_close(module(), torch.ones(2))
    assert seen == [None]


def test_a_locked_tensordict_out():
    with pytest.raises(RuntimeError, match="lock"):
        TensorDictModule(plus, ["x"], ["z"])(inputs(), tensordict_out=inputs().lock_())


def test_it_has_the_name_of_its_class():
    assert TensorDictModule(plus, ["x"], ["z"]).__name__ == "TensorDictModule"


def test_key_lists_of_a_class_are_not_shared_by_its_instances_ours():
    class Mine(TensorDictModuleBase):
        in_keys = ["x"]
        out_keys = ["y"]

    one, other = Mine(), Mine()
    one.in_keys.append("more")
    assert one.in_keys == ["x", "more"] and other.in_keys == ["x"] == Mine().in_keys


def test_the_device_of_a_module():
    for module in (nn.Linear(3, 4, device="meta"), nn.ReLU()):
        with pytest.warns(DeprecationWarning, match="device is deprecated"):
            device = TensorDictModule(module, ["x"], ["y"]).device
        assert device.type == ("cpu" if isinstance(module, nn.ReLU) else "meta")
    placed = nn.Linear(3, 4)
    placed.device = torch.device("meta")
    assert TensorDictModule(placed, ["x"], ["y"]).device.type == "meta"
