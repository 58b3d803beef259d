"""Modules between tensorclasses, and as keyed modules."""

import copy

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

B, T, A = 2, 3, 5


class Obs(TensorClass):
    pixels: torch.Tensor
    speed: torch.Tensor


class Value(TensorClass):
    value: torch.Tensor


class Step(TensorClass):
    obs: Obs
    reward: torch.Tensor


class Critic(TensorClassModuleBase[Obs, Value]):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(T, 1)

    def forward(self, x):
        return Value(value=self.net(x.pixels) + x.speed, batch_size=x.batch_size)


class Faster(TensorClassModuleBase[Step, Step]):
    def forward(self, x):
        obs = Obs(pixels=x.obs.pixels, speed=2 * x.obs.speed, batch_size=x.batch_size)
        return Step(obs=obs, reward=x.reward - 1, batch_size=x.batch_size)


class Shift(TensorClassModuleBase[torch.Tensor, torch.Tensor]):
    def forward(self, x):
        return x + 1


def entries():
    return {"pixels": torch.arange(6.0).view(B, T), "speed": torch.tensor([[1.0], [4.0]])}


def observation():
    return Obs(**entries(), batch_size=[B])


def expected(critic):
    pixels, speed = entries().values()
    return pixels @ critic.net.weight.T + critic.net.bias + speed


# ------------------------------------------------------------------------ between tensorclasses


def test_takes_one_tensorclass_and_gives_another():
    critic = Critic()
    out = critic(observation())
    assert type(out) is Value and out.batch_size == (B,)
    assert_close(out.value, expected(critic))


def test_knows_its_types():
    assert (Critic.input_type, Critic.output_type) == (Obs, Value)
    assert (Critic().input_type, Critic().output_type) == (Obs, Value)
    assert Shift.input_type is torch.Tensor


def test_a_subclass_has_the_types_of_its_base():
    class Doubled(Critic):
        def forward(self, x):
            out = super().forward(x)
            return Value(value=2 * out.value, batch_size=out.batch_size)

    critic = Doubled()
    assert (critic.input_type, critic.output_type) == (Obs, Value)
    assert_close(critic(observation()).value, 2 * expected(critic))


def test_tensors_are_types_as_well():
    assert Shift()(torch.zeros(A)).tolist() == [1.0] * A


def test_without_types_it_runs_all_the_same():
    class Same(TensorClassModuleBase):
        def forward(self, x):
            return x

    assert Same()(A) == A


def test_forward_has_to_be_written():
    class Nothing(TensorClassModuleBase[Obs, Value]):
        pass

    with pytest.raises(TypeError, match="forward"):
        Nothing()


def test_is_a_module_with_hooks_parameters_and_modes():
    critic, seen = Critic(), []
    critic.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    out = critic(observation())
    assert [type(seen[0][0]), seen[0][1]] == [Obs, out]
    assert [name for name, _ in critic.named_parameters()] == ["net.weight", "net.bias"]
    assert not critic.eval().net.training


def test_gradients_reach_parameters_and_inputs():
    critic, obs = Critic(), observation()
    obs.pixels.requires_grad_()
    critic(obs).value.sum().backward()
    assert_close(critic.net.bias.grad, torch.tensor([float(B)]))
    assert_close(obs.pixels.grad, critic.net.weight.detach().expand(B, T))


@pytest.mark.parametrize("types", [(int, Value), (Obs, str)], ids=["input", "output"])
def test_other_types_are_refused_ours(types):
    with pytest.raises(TypeError, match="each must be a TensorClass or torch.Tensor"):

        class Wrong(TensorClassModuleBase[types]):
            pass


# ------------------------------------------------------------------------ as a keyed module


def test_as_a_keyed_module_it_has_the_fields_as_keys():
    keyed = Critic().as_td_module()
    assert type(keyed) is TensorClassModuleWrapper and isinstance(keyed, TensorDictModuleBase)
    assert keyed.in_keys == ["pixels", "speed"] and keyed.out_keys == ["value"]


def test_the_wrapper_can_be_made_directly():
    critic = Critic()
    keyed = TensorClassModuleWrapper(critic)
    assert_close(keyed(TensorDict(entries(), [B]))["value"], expected(critic))


def test_it_gives_a_new_container_of_the_output_fields():
    td = TensorDict({**entries(), "more": torch.zeros(B, A)}, [B])
    out = Critic().as_td_module()(td)
    assert type(out) is TensorDict and out.batch_size == (B,)
    assert list(out.keys()) == ["value"]
    assert set(td.keys()) == {"pixels", "speed", "more"}


def test_fields_that_are_tensorclasses_have_nested_keys():
    keyed = Faster().as_td_module()
    keys = [("obs", "pixels"), ("obs", "speed"), "reward"]
    assert keyed.in_keys == keys and keyed.out_keys == keys
    td = TensorDict(obs=TensorDict(entries(), [B]), reward=torch.zeros(B), batch_size=[B])
    out = keyed(td)
    assert out["obs", "speed"].tolist() == [[2.0], [8.0]] and out["reward"].tolist() == [-1.0, -1.0]


def test_can_be_called_with_tensors():
    critic = Critic()
    keyed = critic.as_td_module()
    pixels, speed = entries().values()
    assert_close(keyed(pixels, speed), expected(critic))
    assert_close(keyed(pixels=pixels, speed=speed), expected(critic))
    nested = Faster().as_td_module()(obs_pixels=pixels, obs_speed=speed, reward=torch.zeros(B))
    assert_close(nested[1], 2 * speed)


def test_outputs_can_be_selected():
    keyed = Faster().as_td_module().select_out_keys("reward")
    assert keyed.out_keys == ["reward"]
    pixels, speed = entries().values()
    assert keyed(pixels, speed, torch.ones(B)).tolist() == [0.0, 0.0]


def test_stands_in_a_sequence():
    critic = Critic()
    double = TensorDictModule(lambda value: 2 * value, ["value"], ["twice"])
    seq = TensorDictSequential(critic.as_td_module(), double)
    assert seq.in_keys == ["pixels", "speed"] and seq.out_keys == ["value", "twice"]
    assert_close(seq(TensorDict(entries(), [B]))["twice"], 2 * expected(critic))


def test_hooks_of_the_module_run_in_the_wrapper():
    critic, seen = Critic(), []
    critic.register_forward_hook(lambda module, args, out: seen.append(type(out)))
    critic.as_td_module()(TensorDict(entries(), [B]))
    assert seen == [Value]


def test_the_wrapper_shares_the_parameters():
    critic = Critic()
    keyed = critic.as_td_module()
    mine, theirs = dict(critic.named_parameters()), list(keyed.parameters())
    assert [id(p) for p in theirs] == [id(p) for p in mine.values()]
    assert all(name.endswith((".net.weight", ".net.bias")) for name in keyed.state_dict())


def test_a_copy_has_parameters_of_its_own():
    keyed = Critic().as_td_module()
    twin = copy.deepcopy(keyed)
    td = TensorDict(entries(), [B])
    assert_close(twin(td)["value"], keyed(td)["value"])
    with torch.no_grad():
        next(twin.parameters()).add_(1)
    assert not torch.equal(twin(td)["value"], keyed(td)["value"])


def test_fields_that_are_no_tensors_pass_through():
    class Named(TensorClass):
        x: torch.Tensor
        name: str

    class Louder(TensorClassModuleBase[Named, Named]):
        def forward(self, x):
            return Named(x=x.x, name=x.name.upper(), batch_size=x.batch_size)

    out = Louder().as_td_module()(TensorDict(x=torch.zeros(B), name="puck", batch_size=[B]))
    assert out["name"] == "PUCK"


@pytest.mark.parametrize("outcome", [torch.Tensor, Value])
def test_a_module_of_tensors_cannot_become_keyed(outcome):
    class Plain(TensorClassModuleBase[torch.Tensor, outcome]):
        def forward(self, x):
            return x

    with pytest.raises(ValueError, match="TensorClass"):
        Plain().as_td_module()


def test_a_module_without_types_cannot_become_keyed():
    class Same(TensorClassModuleBase):
        def forward(self, x):
            return x

    with pytest.raises(ValueError, match="TensorClassModuleBase"):
        Same().as_td_module()


def test_what_cannot_become_keyed_shows_its_types_ours():
    with pytest.raises(ValueError, match="its input and output types are Tensor, Tensor"):
        Shift().as_td_module()


def test_repr_shows_module_and_keys():
    text = repr(Critic().as_td_module())
    assert "TensorClassModuleWrapper" in text and "Critic" in text


def test_compiles_whole():
    critic = Critic()
    compiled = torch.compile(critic.as_td_module(), backend="eager", fullgraph=True)
    assert_close(compiled(TensorDict(entries(), [B]))["value"], expected(critic))
