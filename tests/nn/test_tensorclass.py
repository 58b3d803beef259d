"""Modules between tensorclasses, and as keyed modules."""

import copy
import types

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from raffia import TensorClass, TensorDict
from raffia.nn import (
    TensorClassModuleBase,
    TensorClassModuleWrapper,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from tests.marks import refusals

B, T, A = 2, 3, 5


class Obs(TensorClass):
    pixels: torch.Tensor
    speed: torch.Tensor


class Value(TensorClass):
    value: torch.Tensor


class Named(TensorClass):
    x: torch.Tensor
    name: str


class Step(TensorClass):
    obs: Obs
    reward: torch.Tensor


class Critic(TensorClassModuleBase[Obs, Value]):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(T, 1)

    def forward(self, x):
        return Value(value=self.net(x.pixels) + x.speed, batch_size=x.batch_size)


class Doubled(Critic):
    """Has the types of its base."""

    def forward(self, x):
        out = super().forward(x)
        return Value(value=2 * out.value, batch_size=out.batch_size)


class Faster(TensorClassModuleBase[Step, Step]):
    def forward(self, x):
        obs = Obs(pixels=x.obs.pixels, speed=2 * x.obs.speed, batch_size=x.batch_size)
        return Step(obs=obs, reward=x.reward - 1, batch_size=x.batch_size)


class Louder(TensorClassModuleBase[Named, Named]):
    def forward(self, x):
        return Named(x=x.x, name=x.name.upper(), batch_size=x.batch_size)


class Shift(TensorClassModuleBase[torch.Tensor, torch.Tensor]):
    def forward(self, x):
        return x + 1


class ToValue(TensorClassModuleBase[torch.Tensor, Value]):
    def forward(self, x):
        return x


class Untyped(TensorClassModuleBase):
    def forward(self, x):
        return x


class Nothing(TensorClassModuleBase[Obs, Value]):
    pass


def entries():
    return {"pixels": torch.arange(6.0).view(B, T), "speed": torch.tensor([[1.0], [4.0]])}


@pytest.mark.parametrize("make, factor", [(Critic, 1), (Doubled, 2)])
def test_between_tensorclasses_and_as_a_keyed_module(make, factor):
    critic, calls, td = make(), [], TensorDict({**entries(), "more": torch.zeros(B, A)}, [B])
    obs = Obs(**entries(), batch_size=[B])
    obs.pixels.requires_grad_()
    pixels, speed = entries().values()
    expected = factor * (pixels @ critic.net.weight.T + critic.net.bias + speed)
    assert (make.input_type, make.output_type) == (Obs, Value)
    assert (critic.input_type, critic.output_type) == (Obs, Value)
    critic.register_forward_hook(lambda module, args, out: calls.append((type(args[0]), out)))
    out = critic(obs)
    assert type(out) is Value and out.batch_size == (B,) and calls == [(Obs, out)]
    assert_close(out.value, expected)
    out.value.sum().backward()
    assert_close(critic.net.bias.grad, torch.tensor([float(B * factor)]))
    assert_close(obs.pixels.grad, factor * critic.net.weight.detach().expand(B, T))
    assert [name for name, _ in critic.named_parameters()] == ["net.weight", "net.bias"]
    for keyed in (critic.as_td_module(), TensorClassModuleWrapper(critic)):
        assert type(keyed) is TensorClassModuleWrapper and isinstance(keyed, TensorDictModuleBase)
        assert keyed.in_keys == ["pixels", "speed"] and keyed.out_keys == ["value"]
        out = keyed(td)
        assert type(out) is TensorDict and out.batch_size == (B,) and list(out.keys()) == ["value"]
        assert set(td.keys()) == {"pixels", "speed", "more"}
        for got in (out["value"], keyed(pixels, speed), keyed(pixels=pixels, speed=speed)):
            assert_close(got, expected)
        assert [id(p) for p in keyed.parameters()] == [id(p) for p in critic.parameters()]
        assert all(name.endswith((".net.weight", ".net.bias")) for name in keyed.state_dict())
        assert "TensorClassModuleWrapper" in repr(keyed) and make.__name__ in repr(keyed)
    assert {kind for kind, _ in calls} == {Obs} and not critic.eval().net.training
    double = TensorDictModule(lambda value: 2 * value, ["value"], ["twice"])
    seq = TensorDictSequential(keyed, double)
    assert seq.in_keys == ["pixels", "speed"] and seq.out_keys == ["value", "twice"]
    assert_close(seq(td)["twice"], 2 * expected)
    twin = copy.deepcopy(keyed)
    assert_close(twin(td)["value"], expected)


def test_fields_that_are_tensorclasses_have_nested_keys():
    keyed = Faster().as_td_module()
    keys = [("obs", "pixels"), ("obs", "speed"), "reward"]
    assert keyed.in_keys == keys and keyed.out_keys == keys
    td = TensorDict(obs=TensorDict(entries(), [B]), reward=torch.zeros(B), batch_size=[B])
    out, (pixels, speed) = keyed(td), entries().values()
    assert out["obs", "speed"].tolist() == [[2.0], [8.0]] and out["reward"].tolist() == [-1.0, -1.0]
    assert_close(keyed(obs_pixels=pixels, obs_speed=speed, reward=torch.zeros(B))[1], 2 * speed)
    keyed.select_out_keys("reward")
    assert keyed.out_keys == ["reward"]
    assert keyed(pixels, speed, torch.ones(B)).tolist() == [0.0, 0.0]


def test_tensors_other_fields_and_no_types():
    assert Shift.input_type is torch.Tensor and Shift()(torch.zeros(A)).tolist() == [1.0] * A
    assert Untyped()(A) == A
    out = Louder().as_td_module()(TensorDict(x=torch.zeros(B), name="puck", batch_size=[B]))
    assert out["name"] == "PUCK"


def subclass(*types_):
    return types.new_class("Wrong", (TensorClassModuleBase[types_],))


ERRORS = [
    (lambda: subclass(int, Value), TypeError, "each must be a TensorClass or torch.T"),
    (lambda: subclass(Obs, str), TypeError, "each must be a TensorClass or torch.T"),
    (Nothing, TypeError, "forward"),
    (lambda: Shift().as_td_module(), ValueError, "its input and output types are Tensor, Tensor"),
    (lambda: ToValue().as_td_module(), ValueError, "TensorClass"),
    (lambda: Untyped().as_td_module(), ValueError, "TensorClassModuleBase"),
]


test_errors = refusals(ERRORS)
