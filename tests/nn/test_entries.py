"""What becomes of values that are no tensors, on their way in and out of a container."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from raffia import TensorDict
from raffia.nn import (
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
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
    """What stands in the container after a module gave `value` as its second output."""
    return TensorDictModule(lambda x: (x, value(x)), ["x"], ["_", "y"])(inputs())["y"]


def test_the_state_of_a_recurrent_layer_is_nested():
    lstm = TensorDictModule(nn.LSTM(T, A, batch_first=True), ["x"], ["out", "state"])
    out = lstm(TensorDict(x=torch.zeros(B, 4, T)))
    assert out["out"].shape == (B, 4, A)
    assert sorted(out["state"].keys()) == ["0", "1"]
    assert out["state", "0"].shape == (1, B, A)


def test_a_tuple_inside_a_tuple_is_nested():
    y = written(lambda x: ((x, x + 1), x + 2))
    assert isinstance(y, TensorDict) and y.batch_size == (B,)
    assert_close(y["0", "1"], inputs()["x"] + 1)
    assert_close(y["1"], inputs()["x"] + 2)


def test_a_tuple_may_hold_what_is_no_tensor():
    y = written(lambda x: (x, "name"))
    assert y["1"] == "name" and y["0"].shape == (B, T)


@pytest.mark.parametrize("kind, names", [(State, ("hidden", "cell")), (Pair, ("left", "right"))])
def test_named_fields_are_keys(kind, names):
    y = written(lambda x: kind(x, -x))
    assert set(y.keys()) == set(names)
    assert_close(y[names[1]], -inputs()["x"])


def test_a_list_stays_a_list():
    assert [type(v) for v in written(lambda x: [x[0], "s"])] == [torch.Tensor, str]


@pytest.mark.parametrize("named", [False, True])
def test_called_with_a_list_the_module_gets_the_list(named):
    module = TensorDictModule(lambda parts: [isinstance(parts, list), *parts], ["parts"], ["y"])
    parts = [torch.zeros(T), torch.ones(T)]
    is_list, *values = module(parts=parts) if named else module(parts)
    assert is_list and [v.tolist() for v in values] == [v.tolist() for v in parts]


def test_called_with_a_tuple_the_module_gets_a_container():
    module = TensorDictModule(lambda state: state["0"] - state["1"], ["state"], ["y"])
    assert module((torch.ones(A), torch.zeros(A))).tolist() == [1.0] * A


def test_a_dispatched_method_gets_them_the_same_way():
    class Last(TensorDictModuleBase):
        in_keys, out_keys = ["x", "state"], ["y"]

        @dispatch
        def forward(self, tensordict):
            assert tensordict.batch_size == tensordict["state"].batch_size == (B, T)
            return tensordict.set("y", tensordict["x"] + tensordict["state", "1"])

    x = torch.zeros(B, T)
    assert_close(Last()(x, (x + 1, x + 2)), x + 2)


def test_inplace_none_is_a_new_container():
    td = inputs()
    out = TensorDictModule(torch.exp, ["x"], ["y"], inplace=None)(td)
    assert out is not td and list(out.keys()) == ["y"] and "y" not in td


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


def test_keys_may_be_set_before_the_constructor_of_the_base():
    class Early(TensorDictModuleBase):
        def __init__(self, key):
            self.in_keys, self.out_keys = [key], ["y"]
            super().__init__()

        @dispatch
        def forward(self, tensordict):
            return tensordict.set("y", tensordict[self.in_keys[0]] + 1)

    module = Early("x")
    assert module(torch.zeros(A)).tolist() == [1.0] * A
    assert TensorDictSequential(module).in_keys == ["x"]
    assert module.select_out_keys("y").out_keys == ["y"]
