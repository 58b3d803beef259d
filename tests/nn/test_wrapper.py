"""TensorDictModuleWrapper and as_tensordict_module: around keyed modules, and out of functions."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from raffia import TensorDict
from raffia.nn import (
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictModuleWrapper,
    TensorDictSequential,
    as_tensordict_module,
)

B, T, A = 2, 3, 5


def linear(ins="x", out="z"):
    return TensorDictModule(nn.Linear(T, A), [ins], [out])


def inputs():
    return TensorDict({"x": torch.arange(B * T).view(B, T).float()}, [B])


class Scaled(TensorDictModuleWrapper):
    """Ten times what the module gives."""

    def forward(self, tensordict):
        return self.td_module(tensordict).apply(lambda x: x * 10)


def pair():
    return TensorDictModule(lambda x: (x + 1, x + 2), ["x"], ["u", "v"])


# --- the wrapper --------------------------------------------------------------------------------


def test_it_has_the_keys_of_the_module():
    wrapper = TensorDictModuleWrapper(TensorDictModule(nn.Linear(T, A), [("n", "x")], ["z"]))
    assert wrapper.in_keys == [("n", "x")] and wrapper.out_keys == ["z"]
    assert wrapper.out_keys_source == ["z"]
    assert isinstance(wrapper, TensorDictModuleBase)


@pytest.mark.parametrize("form", ["container", "by name", "positional", "keyword"])
def test_it_is_called_as_the_module(form):
    module = linear()
    wrapper, td = TensorDictModuleWrapper(module), inputs()
    expected = module.module(td["x"])
    if form == "container":
        assert wrapper(td) is td
        out = td["z"]
    elif form == "by name":
        assert wrapper(tensordict=td) is td
        out = td["z"]
    else:
        out = wrapper(td["x"]) if form == "positional" else wrapper(x=td["x"])
    assert_close(out, expected)


def test_tensordict_out_reaches_the_module():
    out = TensorDict({}, [B])
    assert TensorDictModuleWrapper(linear())(inputs(), tensordict_out=out) is out
    assert list(out.keys()) == ["z"]


def test_the_module_stands_at_td_module():
    module = linear()
    wrapper = TensorDictModuleWrapper(module)
    assert wrapper.td_module is module
    assert [name for name, _ in wrapper.named_children()] == ["td_module"]
    assert list(dict(wrapper.named_parameters())) == [
        "td_module.module.weight",
        "td_module.module.bias",
    ]


def test_attributes_come_from_the_module():
    module = linear()
    module.note = "mine"
    wrapper = TensorDictModuleWrapper(module)
    assert wrapper.note == "mine" and wrapper.in_features == T
    assert wrapper.module is module.module and wrapper.inplace is True


def test_private_attributes_come_from_the_module_too():
    module = linear()
    module._note = "hidden"
    assert TensorDictModuleWrapper(module)._note == "hidden"


def test_attributes_that_are_nowhere():
    wrapper = TensorDictModuleWrapper(linear())
    with pytest.raises(AttributeError, match="nothing_here"):
        wrapper.nothing_here  # noqa: B018
    assert not hasattr(wrapper, "nothing_here")


def test_methods_of_the_module_can_be_called():
    class Counter(TensorDictModule):
        def twice(self, x):
            return x * 2

    assert TensorDictModuleWrapper(Counter(nn.Identity(), ["x"], ["z"])).twice(3) == 6


def test_own_attributes_stand_over_those_of_the_module():
    module = linear()
    module.note = "inner"
    wrapper = TensorDictModuleWrapper(module)
    wrapper.note = "outer"
    assert wrapper.note == "outer" and module.note == "inner"


def test_own_buffers_and_parameters():
    wrapper = TensorDictModuleWrapper(linear())
    wrapper.register_buffer("count", torch.zeros(()))
    wrapper.weight_of_mine = nn.Parameter(torch.ones(()))
    assert wrapper.count == 0 and wrapper.weight_of_mine == 1
    assert "count" in wrapper.state_dict() and len(list(wrapper.parameters())) == 3


def test_wrappers_nest():
    module = linear()
    outer = TensorDictModuleWrapper(TensorDictModuleWrapper(TensorDictModuleWrapper(module)))
    assert outer.in_keys == ["x"] and outer.out_keys == ["z"] and outer.in_features == T
    td = inputs()
    assert outer(td) is td
    assert_close(td["z"], module.module(td["x"]))


def test_a_subclass_with_its_own_forward():
    td = Scaled(TensorDictModule(lambda x: x + 1, ["x"], ["z"]))(inputs())
    assert_close(td["z"], (inputs()["x"] + 1) * 10)


def test_a_subclass_with_keys_of_its_own():
    class More(TensorDictModuleWrapper):
        def __init__(self, module):
            super().__init__(module)
            self.in_keys = [*module.in_keys, "more"]

    wrapper = More(linear())
    assert wrapper.in_keys == ["x", "more"] and wrapper.td_module.in_keys == ["x"]


def test_out_keys_set_on_the_wrapper_reach_the_module():
    wrapper = TensorDictModuleWrapper(linear())
    wrapper.out_keys = ["w"]
    assert wrapper.out_keys == ["w"] and wrapper.td_module.out_keys == ["w"]
    assert "w" in wrapper(inputs())


def test_a_wrapped_sequence():
    seq = TensorDictSequential(linear("x", "h"), TensorDictModule(nn.Linear(A, 1), ["h"], ["z"]))
    wrapper = TensorDictModuleWrapper(seq)
    assert wrapper.in_keys == ["x"] and wrapper.out_keys == ["h", "z"]
    assert wrapper(inputs())["z"].shape == (B, 1)
    assert wrapper.partial_tolerant is False


def test_a_wrapper_in_a_sequence():
    seq = TensorDictSequential(
        TensorDictModuleWrapper(linear("x", "h")), TensorDictModule(nn.Linear(A, 1), ["h"], ["z"])
    )
    assert seq.in_keys == ["x"] and seq.out_keys == ["h", "z"]
    assert seq(inputs())["z"].shape == (B, 1)
    assert [len(o.shape) for o in seq(x=torch.ones(B, T))] == [2, 2]


@pytest.mark.parametrize("where", ["module", "wrapper"])
def test_selections(where):
    module = pair()
    wrapper = TensorDictModuleWrapper(module)
    (module if where == "module" else wrapper).select_out_keys("v")
    assert wrapper.out_keys == ["v"]
    assert set(wrapper(inputs()).keys()) == {"x", "v"}
    assert isinstance(wrapper(x=torch.zeros(2)), torch.Tensor)
    (module if where == "module" else wrapper).reset_out_keys()
    assert wrapper.out_keys == ["u", "v"]
    assert set(wrapper(inputs()).keys()) == {"x", "u", "v"}


def test_a_selection_on_a_wrapper_leaves_the_module_as_it_is():
    module = pair()
    one, other = TensorDictModuleWrapper(module), TensorDictModuleWrapper(module)
    one.select_out_keys("u")
    assert one.out_keys == ["u"]
    assert module.out_keys == other.out_keys == ["u", "v"]
    assert set(other(inputs()).keys()) == {"x", "u", "v"}
    assert set(one(inputs()).keys()) == {"x", "u"}


def test_a_selection_before_wrapping():
    wrapper = TensorDictModuleWrapper(pair().select_out_keys("u"))
    assert wrapper.out_keys == ["u"] and wrapper.out_keys_source == ["u", "v"]
    assert set(wrapper(inputs()).keys()) == {"x", "u"}


def test_hooks_run_once():
    module = linear()
    seen = []
    module.register_forward_hook(lambda m, a, o: seen.append("module"))
    wrapper = TensorDictModuleWrapper(module)
    wrapper.register_forward_hook(lambda m, a, o: seen.append("wrapper"))
    wrapper(inputs())
    assert seen == ["module", "wrapper"]
    wrapper(x=torch.ones(B, T))
    assert seen == ["module", "wrapper"] * 2


def test_pre_hooks_with_keywords():
    module = TensorDictModule(lambda x, scale=1: x * scale, ["x"], ["z"])
    wrapper = TensorDictModuleWrapper(module)
    wrapper.register_forward_pre_hook(
        lambda m, args, kwargs: (args, {**kwargs, "scale": 3}), with_kwargs=True
    )
    assert_close(wrapper(inputs())["z"], inputs()["x"] * 3)


def test_state_dict_round_trip():
    one, other = TensorDictModuleWrapper(linear()), TensorDictModuleWrapper(linear())
    other.load_state_dict(one.state_dict())
    assert_close(other(inputs())["z"], one(inputs())["z"])


@pytest.mark.parametrize(
    "twin", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copies(twin):
    wrapper = Scaled(linear())
    again = twin(wrapper)
    assert type(again) is Scaled and again.td_module is not wrapper.td_module
    assert_close(again(inputs())["z"], wrapper(inputs())["z"])


def test_train_eval_double():
    wrapper = TensorDictModuleWrapper(TensorDictModule(nn.Dropout(0.9), ["x"], ["z"]))
    assert not wrapper.eval().td_module.module.training
    assert TensorDictModuleWrapper(linear()).double().weight.dtype == torch.double


def test_reset_parameters_recursive():
    wrapper = TensorDictModuleWrapper(linear())
    with torch.no_grad():
        wrapper.weight.fill_(7)
    wrapper.reset_parameters_recursive()
    assert (wrapper.weight != 7).any()


def test_errors_of_the_module_come_out():
    with pytest.raises(KeyError, match="x"):
        TensorDictModuleWrapper(linear())(TensorDict(y=torch.ones(T)))


def test_repr_shows_class_and_keys():
    text = repr(Scaled(linear()))
    assert text.startswith("Scaled(") and "Linear" in text and "td_module" in text
    assert "in_keys=['x']" in text and "out_keys=['z']" in text


def test_gradients():
    wrapper = TensorDictModuleWrapper(linear())
    wrapper(inputs())["z"].sum().backward()
    assert_close(wrapper.weight.grad, inputs()["x"].sum(0).expand(A, T))


# --- as_tensordict_module -----------------------------------------------------------------------


@as_tensordict_module(in_keys=["x", ("n", "y")], out_keys=["z"])
def total(x, y):
    """The sum."""
    return x + y


one, two = torch.ones(T), torch.full((T,), 2.0)


def test_a_function_takes_a_container():
    td = TensorDict({"x": one, "n": {"y": two}})
    assert total(td) is td
    assert_close(td["z"], one + two)


@pytest.mark.parametrize(
    "args, kwargs", [((one, two), {}), ((one,), {"n_y": two}), ((), {"n_y": two, "x": one})]
)
def test_a_function_takes_tensors(args, kwargs):
    assert_close(total(*args, **kwargs), one + two)


def test_name_and_docstring_stay():
    assert total.__name__ == "total" and total.__doc__ == "The sum."


@pytest.mark.parametrize("keys", ["c", ["c"], ("c",), ("n", "c"), [("n", "c")]], ids=str)
def test_forms_of_keys(keys):
    @as_tensordict_module(in_keys=keys, out_keys=keys)
    def func(c):
        return c + 1

    key = ("n", "c") if "n" in str(keys) else "c"
    assert func(TensorDict({key: torch.zeros(())}))[key] == 1


def test_several_outputs():
    @as_tensordict_module(in_keys=["x"], out_keys=["u", "v"])
    def func(x):
        return x + 1, x + 2

    u, v = func(x=torch.zeros(()))
    assert u == 1 and v == 2
    td = func(TensorDict(x=torch.zeros(())))
    assert td["u"] == 1 and td["v"] == 2


def test_keywords_reach_the_function():
    @as_tensordict_module(in_keys=["x"], out_keys=["z"])
    def func(x, scale=1.0):
        return x * scale

    assert_close(func(TensorDict(x=one), scale=2.0)["z"], two)
    assert_close(func(one, scale=2.0), two)


class Bag:
    def __init__(self, amount):
        self.amount = amount

    @as_tensordict_module(in_keys=["c"], out_keys=["d"])
    def more(self, c):
        return c + self.amount


def test_a_method_knows_its_object():
    bags = [Bag(1), Bag(10)]
    for bag in bags + bags[::-1]:
        assert bag.more(TensorDict(c=torch.zeros(())))["d"] == bag.amount
        assert bag.more(c=torch.zeros(())) == bag.amount
        assert bag.more(torch.zeros(())) == bag.amount


def test_a_method_of_a_subclass():
    class Big(Bag):
        pass

    assert Big(100).more(torch.zeros(())) == 100


def test_a_method_of_a_module():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(T, A)

        @as_tensordict_module(in_keys=["x"], out_keys=["z"])
        def encode(self, x):
            return self.layer(x)

    net = Net()
    assert_close(net.encode(inputs())["z"], net.layer(inputs()["x"]))


def test_objects_of_a_method_are_let_go():
    import gc
    import weakref

    bag = Bag(1)
    bag.more(torch.zeros(()))
    gone = weakref.ref(bag)
    del bag
    gc.collect()
    assert gone() is None


def test_keys_are_keywords():
    with pytest.raises(TypeError):
        as_tensordict_module(["x"], ["z"])


def test_threads_call_methods_of_different_objects(in_threads):
    wrong = []

    def work(i):
        bag = Bag(i)
        wrong.extend(i for _ in range(30) if bag.more(torch.zeros(())) != i)

    in_threads(work)
    assert wrong == []
