"""`dispatch`: methods that take a container can be called with tensors."""

import inspect

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from raffia import TensorDict, lazy_stack
from raffia.nn import TensorDictModule, TensorDictModuleBase, dispatch, make_tensordict

B, T = 2, 3


class Bare(nn.Module):
    in_keys = ["a", ("n", "b")]
    out_keys = ["c"]

    @dispatch
    def forward(self, tensordict):
        self.batch_size = tensordict.batch_size
        return tensordict.set("c", tensordict["a"] + 10 * tensordict["n", "b"])


def of(cls, **attributes):
    """An instance of a class made from `cls` with other attributes."""
    return type(cls.__name__, (cls,), attributes)()


one, two = torch.ones(T), torch.full((T,), 2.0)


# --- ways to call -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args, kwargs",
    [
        ((one, two), {}),
        ((one,), {"n_b": two}),
        ((), {"a": one, "n_b": two}),
        ((), {"n_b": two, "a": one}),
    ],
    ids=["positional", "mixed", "keywords", "keywords in another order"],
)
def test_tensors_instead_of_a_container(args, kwargs):
    assert_close(Bare()(*args, **kwargs), torch.full((T,), 21.0))


def test_a_container_comes_back_as_it_is():
    td = TensorDict({"a": one, "n": {"b": two}})
    assert Bare()(td) is td
    assert_close(td["c"], torch.full((T,), 21.0))


def test_a_container_by_keyword():
    td = TensorDict({"a": one, "n": {"b": two}})
    assert Bare()(tensordict=td) is td and "c" in td


def test_a_lazy_stack_is_a_container():
    td = lazy_stack([TensorDict({"a": one, "n": {"b": two}})] * 2)
    assert Bare()(td) is td


@pytest.mark.parametrize("name, value", [("a", one), ("n_b", two)])
def test_a_key_given_twice(name, value):
    with pytest.raises(RuntimeError, match="Duplicated argument"):
        Bare()(one, two, **{name: value})


def test_a_key_that_is_left_out():
    with pytest.raises(KeyError):
        Bare()(one)


def test_nothing_given():
    with pytest.raises(KeyError):
        Bare()()


def test_too_many_positional_arguments_reach_the_function():
    with pytest.raises(TypeError):
        Bare()(one, two, one)


def test_unknown_keywords_reach_the_function():
    with pytest.raises(TypeError, match="flag"):
        Bare()(one, two, flag=1)


def test_forward_called_directly():
    assert_close(Bare().forward(one, n_b=two), torch.full((T,), 21.0))


# --- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "separator, name", [("_", "n_b"), ("__", "n__b"), ("", "nb"), ("x", "nxb")]
)
def test_separator(separator, name):
    class Named(nn.Module):
        in_keys = ["a", ("n", "b")]
        out_keys = ["c"]

        @dispatch(separator=separator)
        def forward(self, tensordict):
            return tensordict.set("c", tensordict["a"] + tensordict["n", "b"])

    assert_close(Named()(a=one, **{name: two}), one + two)
    assert_close(Named()(one, two), one + two)


def test_separator_of_deep_keys():
    class Deep(nn.Module):
        in_keys = [("a", "b", "c")]
        out_keys = [("x", "y")]

        @dispatch(".")
        def forward(self, tensordict):
            return tensordict.set(("x", "y"), tensordict["a", "b", "c"] + 1)

    assert_close(Deep()(**{"a.b.c": one}), two)


@pytest.mark.parametrize("auto, shape", [(True, (B, T)), (False, ())])
def test_auto_batch_size(auto, shape):
    class Sized(nn.Module):
        in_keys = ["a", "b"]
        out_keys = ["a"]

        @dispatch(auto_batch_size=auto)
        def forward(self, tensordict):
            self.seen = tensordict.batch_size
            return tensordict

    module = Sized()
    module(torch.ones(B, T), torch.ones(B, T, 4))
    assert module.seen == shape


def test_auto_batch_size_is_on():
    module = Bare()
    module(torch.ones(B, T), torch.ones(B, 1))
    assert module.batch_size == (B,)


def test_a_keyed_module_takes_tensors_of_any_leading_size():
    module = TensorDictModule(lambda x, y: (x.sum() + y.sum(), y), ["x", "y"], ["z", "w"])
    z, w = module(torch.ones(B), torch.ones(T, 4))
    assert z == B + 4 * T and w.shape == (T, 4)


@pytest.mark.parametrize("how", ["names", "lists"])
def test_source_and_dest(how):
    source, dest = ("reads", "writes") if how == "names" else ([("n", "b"), "a"], ["c", ("d", "e")])

    class Other(nn.Module):
        reads = [("n", "b"), "a"]
        writes = ["c", ("d", "e")]

        @dispatch(source=source, dest=dest)
        def forward(self, tensordict):
            tensordict["c"] = tensordict["a"] + 1
            tensordict["d", "e"] = tensordict["n", "b"] + 1
            return tensordict

    c, e = Other()(two, one)
    assert_close(c, two)
    assert_close(e, two + 1)
    assert_close(Other()(a=one, n_b=two)[1], two + 1)


def test_source_and_dest_by_position():
    class Other(nn.Module):
        @dispatch("-", ["a"], ["b"], False)
        def forward(self, tensordict):
            return tensordict.set("b", tensordict["a"] + 1)

    assert_close(Other()(one), two)


def test_an_attribute_that_names_the_keys_is_not_there():
    class Other(nn.Module):
        @dispatch
        def forward(self, tensordict):
            return tensordict

    with pytest.raises(AttributeError):
        Other()(one)


def test_keys_are_read_at_each_call():
    module = Bare()
    module.in_keys = ["a", ("n", "b")]
    module.out_keys = ["a", "c"]
    assert len(module(one, two)) == 2


def test_attributes_of_dispatch():
    d = dispatch(separator=".", source="s", dest=["d"], auto_batch_size=False)
    assert (d.separator, d.source, d.dest, d.auto_batch_size) == (".", "s", ["d"], False)
    assert (dispatch.DEFAULT_SEPARATOR, dispatch.DEFAULT_SOURCE, dispatch.DEFAULT_DEST) == (
        "_",
        "in_keys",
        "out_keys",
    )


# --- results ------------------------------------------------------------------------------------


class Three(nn.Module):
    in_keys = ["a"]
    out_keys = ["u", ("n", "v"), "w"]

    @dispatch
    def forward(self, tensordict):
        a = tensordict["a"]
        return tensordict.update({"w": a + 3, "n": {"v": a + 2}, "u": a + 1})


@pytest.mark.parametrize(
    "keys, amounts",
    [
        (["u", ("n", "v"), "w"], [1, 2, 3]),
        (["w", "u"], [3, 1]),
        ([("n", "v"), "a"], [2, 0]),
        (["u", "_", "w"], [1, 3]),
        (["_", "w"], 3),
        (["u"], 1),
        ([], []),
        (["_"], []),
    ],
    ids=str,
)
def test_results_in_the_order_of_dest(keys, amounts):
    out = of(Three, out_keys=keys)(a=torch.zeros(T))
    if isinstance(amounts, int):
        assert_close(out, torch.full((T,), float(amounts)))
        return
    assert isinstance(out, tuple) and [o[0].item() for o in out] == amounts


def test_a_result_that_was_not_written():
    with pytest.raises(KeyError):
        of(Three, out_keys=["u", "gone"])(one)


def test_a_result_that_is_a_container():
    out = of(Three, out_keys=["n"])(one)
    assert isinstance(out, TensorDict) and list(out.keys()) == ["v"]


def test_results_come_from_the_returned_container():
    class Fresh(nn.Module):
        in_keys = ["a"]
        out_keys = ["a"]

        @dispatch
        def forward(self, tensordict):
            return TensorDict(a=tensordict["a"] + 5)

    assert_close(Fresh()(one), torch.full((T,), 6.0))


@pytest.mark.parametrize("value", [3, 2.5, True, [1.0, 2.0]])
def test_numbers_are_made_tensors(value):
    assert_close(of(Three, out_keys=["a"])(a=value), torch.tensor(value))


def test_a_container_as_a_later_input():
    class Sub(nn.Module):
        in_keys = ["a", "sub"]
        out_keys = ["c"]

        @dispatch(auto_batch_size=False)
        def forward(self, tensordict):
            return tensordict.set("c", tensordict["a"] + tensordict["sub", "x"])

    assert_close(Sub()(one, TensorDict(x=two)), one + two)
    assert_close(Sub()(a=one, sub=TensorDict(x=two)), one + two)
    assert_close(Sub()(sub=TensorDict(x=two), a=one), one + two)


# --- what is passed on --------------------------------------------------------------------------


class Extra(nn.Module):
    in_keys = ["a"]
    out_keys = ["b"]

    @dispatch
    def forward(self, tensordict, scale=1.0, *, shift=0.0, **rest):
        self.rest = rest
        return tensordict.set("b", tensordict["a"] * scale + shift)


@pytest.mark.parametrize(
    "args, kwargs, result",
    [
        ((), {}, 1.0),
        ((3.0,), {}, 3.0),
        ((), {"scale": 3.0}, 3.0),
        ((), {"shift": 2.0}, 3.0),
        ((3.0,), {"shift": 2.0}, 5.0),
    ],
)
@pytest.mark.parametrize("form", ["container", "positional", "keyword"])
def test_further_arguments(form, args, kwargs, result):
    module = Extra()
    if form == "container":
        out = module(TensorDict(a=one), *args, **kwargs)["b"]
    elif form == "positional":
        out = module(one, *args, **kwargs)
    else:
        if args:
            kwargs = {"scale": args[0], **kwargs}
        out = module(a=one, **kwargs)
    assert_close(out, torch.full((T,), result))


def test_unknown_keywords_are_passed_on():
    module = Extra()
    module(a=one, more=3, other=one)
    assert set(module.rest) == {"more", "other"}


def test_other_methods_than_forward():
    class Coder:
        ins, outs = ["x"], ["code"]

        @dispatch(source="ins", dest="outs")
        def encode(self, tensordict):
            return tensordict.set("code", tensordict["x"] * 2)

        @dispatch(source=["code"], dest=["x"])
        def decode(self, tensordict):
            return tensordict.set("x", tensordict["code"] / 2)

    coder = Coder()
    assert_close(coder.encode(x=one), two)
    assert_close(coder.decode(code=coder.encode(one)), one)
    assert isinstance(coder.encode(TensorDict(x=one)), TensorDict)


def test_a_plain_function():
    @dispatch(source=["a"], dest=["b"])
    def func(tensordict):
        return tensordict.set("b", tensordict["a"] + 1)

    assert_close(func(one), two)
    assert_close(func(a=one), two)
    assert_close(func(TensorDict(a=one))["b"], two)


def test_a_plain_function_needs_its_keys():
    with pytest.raises(RuntimeError):

        @dispatch
        def func(tensordict):
            return tensordict

        func(one)


def test_a_bound_method():
    class Plain:
        in_keys = ["a"]
        out_keys = ["b"]

        def run(self, tensordict):
            return tensordict.set("b", tensordict["a"] + 1)

    run = dispatch(Plain().run)
    assert_close(run(one), two)
    assert_close(run(a=one), two)
    assert_close(run(TensorDict(a=one))["b"], two)


@pytest.mark.parametrize(
    "func",
    [lambda self, td: td, lambda self, x, tensordict: x, lambda self, input: input],
)
def test_the_first_argument_must_be_named_tensordict(func):
    with pytest.raises(RuntimeError, match="tensordict"):
        dispatch(func)


def test_name_and_docstring_stay():
    class Told(nn.Module):
        in_keys = out_keys = ["a"]

        @dispatch
        def forward(self, tensordict):
            """What it does."""
            return tensordict

    assert Told.forward.__name__ == "forward" and Told.forward.__doc__ == "What it does."
    assert "tensordict" in inspect.signature(Told.forward).parameters


def test_inherited_and_overridden():
    class Sub(Bare):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    assert_close(Sub()(one, two), torch.full((T,), 21.0))
    td = TensorDict({"a": one, "n": {"b": two}})
    assert Sub()(td) is td


def test_an_input_key_with_the_name_tensordict():
    class Named(nn.Module):
        in_keys = ["tensordict"]
        out_keys = ["out"]

        @dispatch(auto_batch_size=False)
        def forward(self, tensordict):
            return tensordict.set("out", tensordict["tensordict"]["x"] + 1)

    assert_close(Named()(tensordict=TensorDict(x=one)), two)
    with_it = TensorDict(tensordict=TensorDict(x=one))
    assert Named()(with_it) is with_it


def test_gradients_pass_through():
    x = torch.ones(T, requires_grad=True)
    Bare()(x, two).sum().backward()
    assert_close(x.grad, torch.ones(T))


def test_vmap():
    assert_close(torch.vmap(of(Three, out_keys=["u"]))(torch.zeros(B, T)), torch.ones(B, T))


def test_hooks_of_the_module_run():
    module, seen = Bare(), []
    module.register_forward_hook(lambda m, args, out: seen.append((len(args), out)))
    out = module(one, two)
    assert seen[0][0] == 2 and seen[0][1] is out


def test_eight_threads_call_one_module(in_threads):
    module, wrong = Three(), []

    def work(i):
        for j in range(30):
            u, v, w = module(a=torch.full((T,), float(i + j)))
            if u[0] != i + j + 1 or v[0] != i + j + 2 or w[0] != i + j + 3:
                wrong.append(i)

    in_threads(work)
    assert wrong == []


# --- keyed modules ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args, kwargs",
    [((one, two), {}), ((one,), {"n_y": two}), ((), {"x": one, "n_y": two})],
)
def test_a_keyed_module_takes_tensors(args, kwargs):
    module = TensorDictModule(lambda x, y: (x + y, x - y), ["x", ("n", "y")], [("s", "u"), "v"])
    u, v = module(*args, **kwargs)
    assert_close(u, one + two)
    assert_close(v, one - two)


def test_a_keyed_module_takes_extra_keywords_when_dispatched():
    module = TensorDictModule(lambda x, scale: x * scale, ["x"], ["z"])
    assert_close(module(x=one, scale=2), two)
    assert_close(module(one, scale=2), two)


def test_a_keyed_module_that_misses_an_input():
    module = TensorDictModule(lambda x, y: x if y is None else x + y, ["x", "y"], ["z"])
    assert_close(module(x=one), one)


def test_a_keyed_module_with_a_key_given_twice():
    module = TensorDictModule(lambda x: x, ["x"], ["z"])
    with pytest.raises(RuntimeError, match="Duplicated argument"):
        module(one, x=one)


def test_a_keyed_module_reads_none():
    module = TensorDictModule(lambda x, y: x, ["x", "y"], ["z"])
    assert_close(module(x=one, y=None), one)


def test_a_keyed_module_reads_a_string():
    module = TensorDictModule(lambda x, name: x * len(name), ["x", "name"], ["z"])
    assert_close(module(x=one, name="ab"), two)


def test_a_keyed_module_without_inputs():
    module = TensorDictModule(lambda: one, [], ["z"])
    assert_close(module(), one)


def test_the_key_of_an_argument_named_like_an_option():
    module = TensorDictModule(lambda x: x + 1, ["tensordict_out"], ["z"])
    assert_close(module(one), two)


# --- make_tensordict ----------------------------------------------------------------------------


def test_make_tensordict_from_keywords():
    td = make_tensordict(a=one, b=torch.ones(T, 2))
    assert isinstance(td, TensorDict) and td.batch_size == () and set(td.keys()) == {"a", "b"}


def test_make_tensordict_from_a_dict():
    td = make_tensordict({"a": one, ("n", "b"): two, "m": {"c": one}})
    assert_close(td["n", "b"], two)
    assert_close(td["m", "c"], one)


def test_make_tensordict_with_a_dict_and_keywords():
    td = make_tensordict({"a": one, "b": one}, b=two, c=one)
    assert set(td.keys()) == {"a", "b", "c"}
    assert_close(td["b"], one)  # the dict comes last


@pytest.mark.parametrize(
    "kwargs, shape",
    [
        ({}, ()),
        ({"auto_batch_size": True}, (B, T)),
        ({"auto_batch_size": False}, ()),
        ({"batch_size": [B]}, (B,)),
        ({"batch_size": (B, T)}, (B, T)),
        ({"batch_size": torch.Size([])}, ()),
    ],
)
def test_make_tensordict_batch_size(kwargs, shape):
    td = make_tensordict({"a": torch.ones(B, T), "b": torch.ones(B, T, 4)}, **kwargs)
    assert td.batch_size == shape


def test_make_tensordict_refuses_a_batch_size_that_does_not_fit():
    with pytest.raises(RuntimeError):
        make_tensordict(a=one, batch_size=[T + 1])


def test_make_tensordict_device():
    td = make_tensordict(a=torch.ones(2, device="meta"), device="meta")
    assert td.device == torch.device("meta")


def test_make_tensordict_of_nothing():
    assert make_tensordict().is_empty()


# --- further corners ----------------------------------------------------------------------------


def test_a_key_that_is_read_twice():
    module = TensorDictModule(lambda x, y: x + y, ["x", "x"], ["z"])
    assert_close(module(x=one), two)


def test_keys_that_are_joined_to_the_same_keyword():
    module = TensorDictModule(lambda x, y: (x, y), ["a_b", ("a", "b")], ["u", "v"])
    u, v = module(one, two)
    assert_close(u, one)
    assert_close(v, two)


def test_inputs_are_not_changed():
    x = torch.ones(T)
    TensorDictModule(lambda x: x + 1, ["x"], ["x"])(x=x)
    assert_close(x, torch.ones(T))


def test_the_keywords_given_are_not_changed():
    given = {"a": one, "n_b": two}
    Bare()(**given)
    assert set(given) == {"a", "n_b"}


@pytest.mark.parametrize("kind", [nn.Parameter, nn.Buffer])
def test_parameters_and_buffers_as_inputs(kind):
    module = TensorDictModule(lambda x: x * 2, ["x"], ["z"])
    assert_close(module(kind(torch.ones(T))).detach(), two)


def test_arrays_as_inputs():
    module = TensorDictModule(lambda x: x * 2, ["x"], ["z"])
    assert_close(module(x=one.numpy()), two)


def test_a_subclass_of_tensor_as_input_stays():
    class Marked(torch.Tensor):
        pass

    x = torch.ones(T).as_subclass(Marked)
    assert type(TensorDictModule(lambda x: x * 2, ["x"], ["z"])(x)) is Marked


def test_a_dict_as_input_is_a_container_inside():
    module = TensorDictModule(lambda d: d["a"] + d["b"], ["d"], ["z"])
    assert_close(module(d={"a": one, "b": one}), two)


def test_several_decorated_methods_of_a_subclass_of_the_base():
    class Coder(TensorDictModuleBase):
        in_keys, out_keys = ["x"], ["y"]

        @dispatch
        def forward(self, tensordict):
            return tensordict.set("y", tensordict["x"] + 1)

        @dispatch(source="out_keys", dest="in_keys")
        def back(self, tensordict):
            return tensordict.set("x", tensordict["y"] - 1)

    coder = Coder()
    assert_close(coder.back(coder(one)), one)
    assert_close(coder.back(y=two), one)


def test_selection_and_dispatch_of_ones_own_module():
    class Two(TensorDictModuleBase):
        in_keys, out_keys = ["x"], ["u", "v"]

        @dispatch
        def forward(self, tensordict):
            return tensordict.set("u", tensordict["x"] + 1).set("v", tensordict["x"] + 2)

    module = Two()
    assert len(module(one)) == 2
    assert_close(module.select_out_keys("u")(one), two)
    assert_close(module.select_out_keys("u")(x=one), two)
