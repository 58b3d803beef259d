"""`TypedTensorDict`: declared entries."""

from typing import ClassVar

import pytest
import torch

from raffia import TensorDict, TypedTensorDict, lazy_stack


class State(TypedTensorDict):
    kinds: ClassVar[int] = 2
    obs: torch.Tensor
    n: TensorDict
    reward: torch.Tensor = None


class Longer(State):
    time: torch.Tensor = 0.5


def state(**more):
    return State(obs=torch.ones(3, 2), n={"a": torch.zeros(3)}, batch_size=[3], **more)


def test_fields_are_attributes_and_entries():
    s = state()
    assert s.obs is s["obs"] and s.reward is None and list(s.keys()) == ["obs", "n"]
    s.obs = torch.zeros(3)
    s["reward"] = torch.ones(3)
    assert s["obs"].sum() == 0 and s.reward.sum() == 3 and s.n["a"].shape == (3,)
    assert dict(**s).keys() == {"obs", "n", "reward"} and isinstance(s, TensorDict)
    with pytest.raises(RuntimeError, match="batch dimension mismatch"):
        s.obs = torch.zeros(2)
    del s["obs"]
    with pytest.raises(AttributeError, match="the field 'obs', which is not set"):
        s.obs  # noqa: B018
    assert State.kinds == 2


def test_operations_keep_the_class():
    for operation in (
        *(lambda s: s[0], lambda s: s.clone(), lambda s: s + 1, lambda s: s.to(torch.float64)),
        *(lambda s: torch.stack([s, s]), lambda s: s.select("obs")),
        lambda s: torch.utils._pytree.tree_map(lambda x: x, s),
    ):
        out = operation(state())
        assert type(out) is State and out.obs.shape == out["obs"].shape
    assert type(state().to_tensordict()) is TensorDict


def test_arguments_are_checked():
    with pytest.raises(TypeError, match=r"State\(\) missing required field\(s\): n"):
        State(obs=torch.ones(1))
    with pytest.raises(TypeError, match=r"got unexpected field\(s\): other"):
        state(other=1)
    with pytest.raises(TypeError, match="multiple values for field 'obs'"):
        State({"obs": 1, "n": {}}, obs=2)
    assert State({"obs": 1, "n": {}}).obs == 1
    longer = Longer(obs=1, n={}, reward=2)
    assert list(longer.keys()) == ["obs", "n", "reward", "time"] and longer.time == 0.5


def test_from_other_containers():
    td = TensorDict(obs=torch.ones(2), n={}, extra=torch.zeros(2), batch_size=[2])
    s = State.from_tensordict(td)
    assert type(s) is State and s.obs is td["obs"] and "extra" in s
    s.obs = torch.zeros(2)
    assert td["obs"].sum() == 2 and type(td) is TensorDict
    assert type(State.from_dict({"obs": [1], "n": {}}, batch_size=[1])) is State
    with pytest.raises(TypeError, match=r"from_tensordict\(\) missing required field\(s\): n"):
        State.from_tensordict(td.select("obs"))
    part = State.from_tensordict(td=td.select("obs"), check=False)
    assert type(part) is State and list(part.keys()) == ["obs"]
    with pytest.raises(TypeError, match="takes a TensorDict, got LazyStackedTensorDict"):
        State.from_tensordict(lazy_stack([td, td]))


def test_options():
    class Shut(TypedTensorDict["frozen"]):
        a: torch.Tensor

    shut = Shut(a=torch.ones(2))
    assert shut.is_locked and not shut.clone().is_locked
    with pytest.raises(RuntimeError, match="locked"):
        shut.a = torch.zeros(2)

    class Hiding(TypedTensorDict, shadow=True):
        sum: torch.Tensor

    assert Hiding(sum=torch.ones(2)).sum.tolist() == [1, 1]
    with pytest.raises(AttributeError, match="Field 'keys' shadows a member"):

        class Bad(TypedTensorDict):
            keys: torch.Tensor

    with pytest.raises(TypeError, match="the options of"):
        TypedTensorDict["autocast"]
