"""Values other than tensors as inputs and outputs of keyed modules."""

from collections import namedtuple
from dataclasses import dataclass

import torch
from torch import nn
from torch.testing import assert_close

from raffia import TensorDict
from raffia.nn import (
    TensorDictModule,
    TensorDictModuleBase,
    as_tensordict_module,
    dispatch,
)

B, T, A = 2, 3, 5

State = namedtuple("State", "hidden cell")


@dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


def inputs():
    return TensorDict(x=torch.arange(6.0).view(B, T), batch_size=[B])


def written(value):
    """The entry in the container after a module returned `value` as its second output."""
    return TensorDictModule(lambda x: (x, value(x)), ["x"], ["_", "y"])(inputs())["y"]


def test_tuples_and_named_fields_are_nested():
    lstm = TensorDictModule(nn.LSTM(T, A, batch_first=True), ["x"], ["out", "state"])
    out = lstm(TensorDict(x=torch.zeros(B, 4, T)))
    assert out["out"].shape == (B, 4, A) and out["state", "0"].shape == (1, B, A)
    y = written(lambda x: ((x, x + 1), "name"))
    assert isinstance(y, TensorDict) and y.batch_size == (B,) and y["1"] == "name"
    assert_close(y["0", "1"], inputs()["x"] + 1)
    for kind, names in ((State, ["hidden", "cell"]), (Pair, ["left", "right"])):
        y = written(lambda x: kind(x, -x))  # noqa: B023
        assert list(y.keys()) == names
        assert_close(y[names[1]], -inputs()["x"])


def test_lists_are_stored_as_lists():
    assert [type(v) for v in written(lambda x: [x[0], "s"])] == [torch.Tensor, str]
    module = TensorDictModule(lambda parts: [isinstance(parts, list), *parts], ["parts"], ["y"])
    parts = [torch.zeros(T), torch.ones(T)]
    for is_list, *values in (module(parts=parts), module(parts)):
        assert is_list and [v.tolist() for v in values] == [v.tolist() for v in parts]


def test_called_with_a_tuple_a_module_gets_a_container():
    class Last(TensorDictModuleBase):
        in_keys, out_keys = ["x", "state"], ["y"]

        @dispatch
        def forward(self, tensordict):
            assert tensordict.batch_size == tensordict["state"].batch_size == (B, T)
            return tensordict.set("y", tensordict["x"] + tensordict["state", "1"])

    x = torch.zeros(B, T)
    assert_close(Last()(x, (x + 1, x + 2)), x + 2)
    module = TensorDictModule(lambda state: state["0"] - state["1"], ["state"], ["y"])
    assert module((torch.ones(A), torch.zeros(A))).tolist() == [1.0] * A


def test_a_decorated_function_takes_keywords_ours():
    @as_tensordict_module(in_keys={"b": "x", "a": "y"}, out_keys="z")
    def minus(a, b):
        return a - b

    class Scaled:
        @as_tensordict_module(in_keys={"b": "x", "a": "y"}, out_keys="z")
        def minus(self, a, b):
            return 2 * (a - b)

    td = TensorDict(x=torch.tensor(1.0), y=torch.tensor(4.0))
    assert minus.in_keys == ["x", "y"] and minus.out_keys == ["z"]
    assert minus(td.copy())["z"] == 3 and Scaled().minus(td.copy())["z"] == 6
