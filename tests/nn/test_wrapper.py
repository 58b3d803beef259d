"""TensorDictModuleWrapper and as_tensordict_module: around keyed modules, and out of functions.

What wrapped modules write in every form of call is a table in test_module.py.
"""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from raffia import TensorDict
from raffia.nn import TensorDictModule as Mod
from raffia.nn import TensorDictModuleBase, as_tensordict_module
from raffia.nn import TensorDictModuleWrapper as Wrapper

from .keyed import Scale, both, call, numbers

T, A = 3, 5


class Scaled(Wrapper):
    """Ten times the output of the module."""

    def forward(self, tensordict):
        return self.td_module(tensordict).apply(lambda x: x * 10)


class More(Wrapper):
    def __init__(self, module):
        super().__init__(module)
        self.in_keys = [*module.in_keys, "more"]


class Counter(Mod):
    def twice(self, x):
        return x * 2


def pair():
    return Mod(both, ["x"], ["u", "v"])


# --- the wrapper --------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 3])
def test_a_wrapper_has_the_keys_and_attributes_of_the_module(depth):
    module = Counter(nn.Linear(T, A), [("n", "x")], ["z"])
    module.note, module._note = "mine", "hidden"
    wrapper = module
    for _ in range(depth):
        wrapper = Wrapper(wrapper)
    assert isinstance(wrapper, TensorDictModuleBase)
    assert wrapper.in_keys == [("n", "x")] and wrapper.out_keys == wrapper.out_keys_source == ["z"]
    assert wrapper.module is module.module and wrapper.inplace is True and wrapper.twice(3) == 6
    assert (wrapper.note, wrapper._note, wrapper.in_features) == ("mine", "hidden", T)
    prefix = "td_module." * depth + "module."
    assert list(wrapper.state_dict()) == [prefix + "weight", prefix + "bias"]
    assert [name for name, _ in wrapper.named_children()] == ["td_module"]
    with pytest.raises(AttributeError, match="nothing_here"):
        wrapper.nothing_here  # noqa: B018
    wrapper.note = "outer"
    wrapper.register_buffer("count", torch.zeros(()))
    wrapper.own = nn.Parameter(torch.ones(()))
    assert wrapper.note == "outer" and module.note == "mine" and "count" in wrapper.state_dict()
    assert len(list(wrapper.parameters())) == 3 and More(module).in_keys == [("n", "x"), "more"]
    wrapper.out_keys = ["w"]
    assert module.out_keys == wrapper.out_keys == ["w"] and More(module).td_module is module
    td = TensorDict(n=dict(x=torch.ones(T)))
    wrapper(td)["w"].sum().backward()
    assert_close(module.weight.grad, torch.ones(A, T))
    with pytest.raises(KeyError, match="x"):
        wrapper(TensorDict(y=torch.ones(T)))


def test_selections_and_hooks():
    module = pair()
    one, other = Wrapper(module), Wrapper(module)
    for selected, wrapper in ((one, one), (module, other), (module, one)):
        selected.select_out_keys("v")
        assert wrapper.out_keys == ["v"] and wrapper.out_keys_source == ["u", "v"]
        for form in ("container", "keywords"):
            assert call(wrapper, form) == {"v": 3}
        if selected is one:  # the module is unchanged
            assert module.out_keys == other.out_keys == ["u", "v"]
            assert call(other, "container") == {"u": 2, "v": 3}
        selected.reset_out_keys()
        assert call(wrapper, "container") == {"u": 2, "v": 3}
    assert Wrapper(pair().select_out_keys("u")).out_keys == ["u"]
    module, calls = Mod(Scale(), ["x"], ["z"]), []
    wrapper = Wrapper(module)
    wrapper.register_forward_hook(lambda m, a, o: calls.append("wrapper"))
    wrapper.register_forward_pre_hook(
        lambda m, args, kwargs: (args, {**kwargs, "scale": 3}), with_kwargs=True
    )
    for form in ("container", "keywords"):
        call(wrapper, form)
        assert calls.pop() == "wrapper" and not calls and module.module.last_kwargs == {"scale": 3}


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(twin):
    wrapper = Scaled(Mod(nn.Linear(T, A), ["x"], ["z"]))
    again = twin(wrapper)
    assert type(again) is Scaled and again.td_module is not wrapper.td_module
    td = TensorDict(x=torch.randn(T))
    assert_close(again(td.clone())["z"], wrapper(td)["z"])
    shown = repr(wrapper)
    assert shown.startswith("Scaled(") and "Linear" in shown and "td_module" in shown
    assert "in_keys=['x']" in shown and "out_keys=['z']" in shown


# --- as_tensordict_module -----------------------------------------------------------------------


@as_tensordict_module(in_keys=["x", ("n", "x")], out_keys=["z"])
def total(x, n, scale=1.0):
    """The sum."""
    return (x + n) * scale


class Bag:
    def __init__(self, amount):
        self.amount = amount

    @as_tensordict_module(in_keys=["c"], out_keys=["d", "e"])
    def more(self, c):
        return c + self.amount, c - self.amount


class Big(Bag):
    pass


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(T, A)

    @as_tensordict_module(in_keys=["x"], out_keys=["z"])
    def encode(self, x):
        return self.layer(x)


def test_a_function_is_called_as_a_keyed_module():
    td, x, n = numbers(), torch.ones(2), torch.full((2,), 100.0)
    for scale in (1.0, 2.0):
        assert total(td, scale=scale) is td and td["z"].tolist() == [101 * scale] * 2
        for got in (total(x, n, scale=scale), total(x, n_x=n, scale=scale)):
            assert got.tolist() == [101 * scale] * 2
    assert total(n_x=n, x=x).tolist() == [101, 101]
    assert total.__name__ == "total" and total.__doc__ == "The sum."
    with pytest.raises(TypeError):
        as_tensordict_module(["x"], ["z"])


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


def test_a_decorated_method_gets_its_object(in_threads):
    bags, zero, wrong = [Bag(1), Big(10)], torch.zeros(()), []
    for bag in bags + bags[::-1]:
        td = bag.more(TensorDict(c=zero))
        for got in ((td["d"], td["e"]), bag.more(c=zero), bag.more(zero)):
            assert got == (bag.amount, -bag.amount)
    net, x = Net(), torch.randn(T)
    assert_close(net.encode(TensorDict(x=x))["z"], net.layer(x))

    def work(i):
        own = Bag(i)
        wrong.extend(i for _ in range(30) if own.more(zero)[0] != i)

    in_threads(work)
    assert wrong == []
    ref = weakref.ref(bags[0])
    del bag, bags
    gc.collect()
    assert ref() is None
