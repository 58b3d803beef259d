"""TensorDictSequential: keyed modules one after the other, and parts of such a sequence."""

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from raffia import LazyStackedTensorDict, TensorClass, TensorDict, lazy_stack
from raffia.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential, WrapModule

B, T, A = 2, 3, 5


def plus(*xs):
    return sum(xs) + 1


def step(ins, outs, **kwargs):
    """A module that adds its inputs and one; all its outputs are the same."""
    ins = [ins] if isinstance(ins, str) else ins
    outs = [outs] if isinstance(outs, str) else outs
    return TensorDictModule(lambda *xs: (plus(*xs),) * len(outs), ins, outs, **kwargs)


def chain(*names, **kwargs):
    """a -> b -> c -> ...: each adds one."""
    return TensorDictSequential(
        *(step(a, b) for a, b in zip(names, names[1:], strict=False)), **kwargs
    )


def start(*keys, value=0.0):
    return TensorDict({key: torch.full((B,), value) for key in keys or ("a",)}, [B])


def leaves(td):
    return set(td.keys(True, True))


def value(td, key):
    entry = td[key]
    assert (entry == entry.flatten()[0]).all()
    return entry.flatten()[0].item()


class Foreign(nn.Module):
    """A plain module with keys of its own."""

    in_keys = ["b"]
    out_keys = ["c"]

    def forward(self, tensordict):
        return tensordict.set("c", tensordict["b"] * 10)


# --- construction -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["arguments", "list", "dict", "OrderedDict"])
def test_ways_to_build(form):
    modules = [step("a", "b"), step("b", "c")]
    if form == "arguments":
        seq = TensorDictSequential(*modules)
    elif form == "list":
        seq = TensorDictSequential(modules)
    elif form == "dict":
        seq = TensorDictSequential({"first": modules[0], "second": modules[1]})
    else:
        seq = TensorDictSequential(OrderedDict(first=modules[0], second=modules[1]))
    assert len(seq) == 2 and seq.in_keys == ["a"] and seq.out_keys == ["b", "c"]
    named = "dict" in form.lower()
    assert type(seq.module) is (nn.ModuleDict if named else nn.ModuleList)
    td = start("a")
    assert seq(td) is td
    assert value(td, "b") == 1 and value(td, "c") == 2
    if named:
        assert seq["first"] is modules[0] and seq["second"] is modules[1]
    else:
        assert seq[0] is modules[0] and seq[-1] is modules[1]


def test_an_empty_sequence():
    seq = TensorDictSequential()
    assert len(seq) == 0 and seq.in_keys == [] and seq.out_keys == []
    td = start("a")
    assert seq(td) is td and leaves(td) == {"a"}


def test_one_module():
    seq = TensorDictSequential(step("a", "b"))
    assert len(seq) == 1 and value(seq(start("a")), "b") == 1


def test_the_given_list_is_not_shared():
    modules = [step("a", "b")]
    seq = TensorDictSequential(modules)
    modules.append(step("b", "c"))
    assert len(seq) == 1


def test_it_is_a_keyed_module():
    seq = chain("a", "b")
    assert isinstance(seq, TensorDictModule) and isinstance(seq, TensorDictModuleBase)


@pytest.mark.parametrize("wrong", [3, "text", None])
def test_things_that_cannot_run(wrong):
    with pytest.raises(Exception):  # noqa: B017
        TensorDictSequential(step("a", "b"), wrong)(start("a"))


def test_parameters_have_names_by_position():
    seq = TensorDictSequential(TensorDictModule(nn.Linear(T, A), ["x"], ["y"]), step("y", "z"))
    assert list(dict(seq.named_parameters())) == [
        "module.0.module.weight",
        "module.0.module.bias",
    ]


def test_parameters_have_names_by_name():
    seq = TensorDictSequential({"enc": TensorDictModule(nn.Linear(T, A), ["x"], ["y"])})
    assert list(seq.state_dict()) == ["module.enc.module.weight", "module.enc.module.bias"]


# --- callables and foreign modules --------------------------------------------------------------


def test_a_plain_callable_is_wrapped():
    seq = TensorDictSequential(step("a", "b"), lambda td: td.set("c", td["b"] * 2), step("c", "d"))
    assert isinstance(seq[1], WrapModule)
    td = seq(start("a"))
    assert value(td, "c") == 2 and value(td, "d") == 3


def test_a_plain_callable_has_no_keys():
    seq = TensorDictSequential(lambda td: td.set("b", td["a"]), step("b", "c"))
    assert seq.in_keys == ["b"] and seq.out_keys == ["c"]


def test_a_plain_callable_may_reshape():
    seq = TensorDictSequential(step("a", "b"), lambda td: td.reshape(-1))
    td = seq(TensorDict({"a": torch.zeros(B, T)}, [B, T]))
    assert td.batch_size == (B * T,) and value(td, "b") == 1


def test_a_module_without_keys_is_wrapped():
    class Select(nn.Module):
        def forward(self, td):
            return td.select("b")

    seq = TensorDictSequential(step("a", "b"), Select())
    assert isinstance(seq[1], WrapModule) and leaves(seq(start("a"))) == {"b"}


def test_a_foreign_module_with_keys_is_taken_as_it_is():
    foreign = Foreign()
    seq = TensorDictSequential(step("a", "b"), foreign)
    assert seq[1] is foreign
    assert seq.in_keys == ["a"] and seq.out_keys == ["b", "c"]
    assert value(seq(start("a")), "c") == 10


def test_a_sequence_of_foreign_modules_dispatches():
    seq = TensorDictSequential(step("a", "b"), Foreign())
    b, c = seq(a=torch.zeros(T))
    assert_close(c, torch.full((T,), 10.0))
    assert_close(b, torch.ones(T))


@pytest.mark.parametrize("inplace", [True, False])
def test_wrap_module(inplace):
    func = lambda td: TensorDict({"b": td["a"] + 1}, td.batch_size)  # noqa: E731
    module = WrapModule(func, inplace=inplace, in_keys=["a"], out_keys=["b"])
    assert module.in_keys == ["a"] and module.out_keys == ["b"] and module.func is func
    td = start("a")
    out = module(td)
    assert (out is td) is inplace
    assert leaves(out) == ({"a", "b"} if inplace else {"b"})
    assert value(out, "b") == 1


def test_wrap_module_that_gives_its_input():
    td = start("a")
    assert WrapModule(lambda td: td, inplace=True)(td) is td


def test_wrap_module_has_no_keys_by_default():
    module = WrapModule(lambda td: td)
    assert module.in_keys == [] and module.out_keys == [] and module.inplace is False
    other = WrapModule(lambda td: td, in_keys=["a"])
    assert other.in_keys == ["a"] and module.in_keys == []


def test_wrap_module_with_a_module_has_its_parameters():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(1, 1)

        def forward(self, td):
            return td

    assert len(list(WrapModule(Net()).parameters())) == 2


# --- keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "modules, ins, outs",
    [
        ([("a", "b"), ("b", "c")], ["a"], ["b", "c"]),
        ([("a", "b"), ("a", "c")], ["a"], ["b", "c"]),
        ([("a", "b"), ("z", "c")], ["a", "z"], ["b", "c"]),
        ([("b", "c"), ("a", "b")], ["b", "a"], ["c", "b"]),
        ([("a", "a"), ("a", "a")], ["a"], ["a"]),
        ([("a", "b"), ("b", "a")], ["a"], ["b", "a"]),
        ([("a", "b"), ("b", "c"), ("c", "b")], ["a"], ["c", "b"]),
        ([(["a", "x"], ["b", "c"]), (["c", "y", "a"], ["d"])], ["a", "x", "y"], ["b", "c", "d"]),
        ([(["a", "a"], ["b"])], ["a"], ["b"]),
        ([("a", ["b", "c"]), ("a", ["c", "b"])], ["a"], ["c", "b"]),
        ([("a", [("n", "b")]), ([("n", "b")], "c")], ["a"], [("n", "b"), "c"]),
        ([([], "a"), ("a", "b")], [], ["a", "b"]),
        ([("a", []), ("b", [])], ["a", "b"], []),
        ([("a", "_"), ("a", "b")], ["a"], ["_", "b"]),
        ([("a", ["n"]), ([("n", "b")], "c")], ["a", ("n", "b")], ["n", "c"]),
    ],
    ids=str,
)
def test_keys_of_a_sequence(modules, ins, outs):
    seq = TensorDictSequential(*(step(i, o) for i, o in modules))
    assert seq.in_keys == ins and seq.out_keys == outs and seq.out_keys_source == outs


def test_keys_of_a_nested_sequence():
    seq = TensorDictSequential(chain("a", "b", "c"), step(["c", "x"], "d"))
    assert seq.in_keys == ["a", "x"] and seq.out_keys == ["b", "c", "d"]
    td = seq(start("a", "x"))
    assert value(td, "d") == 3


def test_keys_of_modules_with_a_selection():
    first = TensorDictModule(lambda a: (a, a), ["a"], ["b", "c"]).select_out_keys("c")
    seq = TensorDictSequential(first, step("c", "d"))
    assert seq.out_keys == ["c", "d"]
    assert leaves(seq(start("a"))) == {"a", "c", "d"}


def test_the_order_of_execution():
    seen = []

    def noting(name):
        return lambda x: seen.append(name) or x

    TensorDictSequential(
        *(TensorDictModule(noting(n), ["a"], ["a"]) for n in ("one", "two", "three"))
    )(start("a"))
    assert seen == ["one", "two", "three"]


def test_one_module_twice():
    module = step("a", "a")
    seq = TensorDictSequential(module, module)
    assert len(seq) == 2 and value(seq(start("a")), "a") == 2


def test_one_module_under_two_names():
    module = step("a", "a")
    assert value(TensorDictSequential({"x": module, "y": module})(start("a")), "a") == 2


# --- indexing -----------------------------------------------------------------------------------


def test_indexing_by_number():
    modules = [step("a", "b"), step("b", "c"), step("c", "d")]
    seq = TensorDictSequential(modules)
    assert [seq[i] for i in range(3)] == modules and seq[-1] is modules[2]
    assert list(seq) == modules
    with pytest.raises(IndexError):
        seq[3]


@pytest.mark.parametrize(
    "index, ins, outs",
    [
        (slice(0, 1), ["a"], ["b"]),
        (slice(1, None), ["b"], ["c", "d"]),
        (slice(None, -1), ["a"], ["b", "c"]),
        (slice(None, None, 2), ["a", "c"], ["b", "d"]),
        (slice(2, 2), [], []),
    ],
    ids=str,
)
def test_a_slice_is_a_sequence(index, ins, outs):
    seq = chain("a", "b", "c", "d", inplace="empty", partial_tolerant=True)
    part = seq[index]
    assert type(part) is TensorDictSequential
    assert part.in_keys == ins and part.out_keys == outs
    assert part.inplace == "empty" and part.partial_tolerant is True
    assert all(m is n for m, n in zip(part, list(seq)[index], strict=True))
    assert len(seq) == 3


def test_a_slice_of_a_subclass():
    class Mine(TensorDictSequential):
        pass

    assert type(Mine(step("a", "b"), step("b", "c"))[:1]) is Mine


def test_indexing_by_name():
    seq = TensorDictSequential({"x": step("a", "b")})
    assert seq["x"].out_keys == ["b"]
    with pytest.raises(KeyError):
        seq["y"]


def test_iterating_over_a_named_sequence_gives_its_modules_ours():
    modules = {"x": step("a", "b"), "y": step("b", "c")}
    assert list(TensorDictSequential(modules)) == list(modules.values())


def test_setting_a_module():
    seq = chain("a", "b", "c")
    seq[1] = step(["b", "x"], "z")
    assert seq.in_keys == ["a", "x"] and seq.out_keys == ["b", "z"] == seq.out_keys_source
    assert value(seq(start("a", "x")), "z") == 2


def test_setting_a_plain_callable():
    seq = chain("a", "b", "c")
    seq[1] = lambda td: td.set("c", td["b"] * 5)
    assert isinstance(seq[1], WrapModule) and value(seq(start("a")), "c") == 5


def test_setting_a_named_module():
    seq = TensorDictSequential({"x": step("a", "b")})
    seq["x"] = step("a", "c")
    seq["y"] = step("c", "d")
    assert len(seq) == 2 and seq.in_keys == ["a"] and seq.out_keys == ["c", "d"]
    assert value(seq(start("a")), "d") == 2


@pytest.mark.parametrize("index", [0, -1, slice(0, 2)], ids=str)
def test_deleting_modules(index):
    modules = [step("a", "b"), step("b", "c"), step("c", "d")]
    seq = TensorDictSequential(*modules)
    del seq[index]
    del modules[index]
    assert list(seq) == modules
    expected = TensorDictSequential(*modules)
    assert seq.in_keys == expected.in_keys and seq.out_keys == expected.out_keys


def test_deleting_a_named_module():
    seq = TensorDictSequential({"x": step("a", "b"), "y": step("b", "c")})
    del seq["x"]
    assert len(seq) == 1 and seq.in_keys == ["b"] and seq.out_keys == ["c"]


@pytest.mark.parametrize("index", [5, -7])
def test_indices_out_of_range(index):
    seq = chain("a", "b", "c")
    with pytest.raises(IndexError):
        seq[index] = step("a", "b")
    with pytest.raises(IndexError):
        del seq[index]
    assert len(seq) == 2 and seq.out_keys == ["b", "c"]


def test_an_edit_that_removes_a_selected_output():
    seq = chain("a", "b", "c").select_out_keys("c")
    with pytest.raises(ValueError, match="selected"):
        del seq[1]
    assert len(seq) == 2 and value(seq(start("a")), "c") == 2


def test_an_edit_keeps_the_selection():
    seq = chain("a", "b", "c").select_out_keys("c")
    seq[0] = step("z", "b")
    assert seq.out_keys == ["c"] and seq.in_keys == ["z"]
    assert leaves(seq(start("z"))) == {"z", "c"}


# --- selected_out_keys --------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["option", "method"])
@pytest.mark.parametrize("keep", [["c"], ["b"], ["d", "b"]], ids=str)
def test_selected_out_keys(how, keep):
    if how == "option":
        seq = chain("a", "b", "c", "d", selected_out_keys=keep)
    else:
        seq = chain("a", "b", "c", "d")
        assert seq.select_out_keys(*keep) is seq
    assert seq.out_keys == keep and seq.out_keys_source == ["b", "c", "d"]
    td = start("a")
    assert seq(td) is td
    assert leaves(td) == {"a", *keep}
    out = seq(a=torch.zeros(T))
    out = out if isinstance(out, tuple) else (out,)
    assert [o[0].item() for o in out] == ["abcd".index(k) for k in keep]
    if how == "method":
        assert seq.reset_out_keys() is seq and seq.out_keys == ["b", "c", "d"]


@pytest.mark.parametrize("keep", [["z"], ["b", "z"], ["a"]], ids=str)
def test_selected_out_keys_that_are_unknown(keep):
    with pytest.raises(ValueError):
        chain("a", "b", selected_out_keys=keep)
    seq = chain("a", "b")
    with pytest.raises(ValueError):
        seq.select_out_keys(*keep)
    assert seq.out_keys == ["b"] and leaves(seq(start("a"))) == {"a", "b"}


def test_a_selection_writes_back_updated_inputs():
    seq = TensorDictSequential(step("a", "a"), step("a", "b"), step("b", "c"))
    td = seq.select_out_keys("c")(start("a"))
    assert leaves(td) == {"a", "c"} and value(td, "a") == 1 and value(td, "c") == 3


def test_entries_that_were_there_stay_with_a_selection():
    td = chain("a", "b", "c").select_out_keys("c")(start("a", "other"))
    assert leaves(td) == {"a", "other", "c"}


def test_a_nested_selection_ours():
    seq = TensorDictSequential(step("a", [("n", "b")]), step([("n", "b")], [("n", "c")]))
    td = seq.select_out_keys(("n", ("c",)))(start("a"))
    assert seq.out_keys == [("n", "c")]
    assert leaves(td) == {"a", ("n", "c")}


def test_a_selection_in_a_nested_sequence():
    inner = chain("a", "b", "c").select_out_keys("c")
    seq = TensorDictSequential(inner, step("c", "d"))
    assert seq.out_keys == ["c", "d"] and leaves(seq(start("a"))) == {"a", "c", "d"}


def test_a_selection_with_tensordict_out():
    out = TensorDict({}, [B])
    td = start("a")
    got = chain("a", "b", "c").select_out_keys("c")(td, tensordict_out=out)
    assert got is out and leaves(out) == {"c"} and leaves(td) == {"a"}


def test_reset_brings_all_outputs_back():
    seq = chain("a", "b", "c").select_out_keys("c").reset_out_keys()
    assert leaves(seq(start("a"))) == {"a", "b", "c"}


# --- where outputs go ---------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [True, False])
def test_inplace_none_leaves_it_to_the_modules(inner):
    seq = TensorDictSequential(step("a", "b", inplace=inner), step("b", "c", inplace=inner))
    td = start("a")
    out = seq(td)
    assert (out is td) is inner
    assert leaves(out) == ({"a", "b", "c"} if inner else {"c"})
    assert seq.inplace is None


@pytest.mark.parametrize("inner", [True, False])
def test_inplace_true(inner):
    seq = TensorDictSequential(
        step("a", "b", inplace=inner), step("b", "c", inplace=inner), inplace=True
    )
    td = start("a")
    assert seq(td) is td
    assert leaves(td) == ({"a", "b", "c"} if inner else {"a", "c"})
    assert value(td, "c") == 2


@pytest.mark.parametrize("inner", [True, "empty"])
@pytest.mark.parametrize("outer", [False, "empty"])
def test_inplace_false_and_empty(inner, outer):
    seq = TensorDictSequential(
        step("a", "b", inplace=inner), step("b", "c", inplace=inner), inplace=outer
    )
    td = start("a")
    out = seq(td)
    assert out is not td and leaves(td) == {"a"}
    assert leaves(out) == ({"b", "c"} if inner is True else {"c"})
    assert out.batch_size == ((B,) if outer == "empty" else ())


def test_inplace_false_keeps_an_overwritten_input():
    td = start("a")
    out = TensorDictSequential(step("a", "a"), inplace=False)(td)
    assert value(td, "a") == 0 and value(out, "a") == 1


@pytest.mark.parametrize("inplace", [None, True, False, "empty"])
def test_tensordict_out_wins(inplace):
    out, td = TensorDict({"old": torch.zeros(B)}, [B]), start("a")
    assert chain("a", "b", "c", inplace=inplace)(td, tensordict_out=out) is out
    assert leaves(out) == {"old", "b", "c"} and leaves(td) == {"a"}


def test_tensordict_out_by_position():
    out, td = TensorDict({}, [B]), start("a")
    assert chain("a", "b")(td, out) is out
    assert leaves(out) == {"b"}


def test_a_tensorclass_goes_through():
    class Data(TensorClass):
        a: torch.Tensor
        c: torch.Tensor | None = None

    seq = TensorDictSequential(
        step("a", "b", inplace=False), step("b", "c", inplace=False), inplace=True
    )
    data = Data(a=torch.zeros(B), batch_size=[B])
    assert seq(data) is data
    assert_close(data.c, torch.full((B,), 2.0))


def test_a_locked_container():
    with pytest.raises(RuntimeError, match="lock"):
        chain("a", "b")(start("a").lock_())
    out = chain("a", "b", inplace=False)(start("a").lock_())
    assert leaves(out) == {"b"}


def test_a_lazy_stack():
    td = lazy_stack([start("a"), start("a")])
    assert chain("a", "b", "c")(td) is td
    assert isinstance(td, LazyStackedTensorDict) and td["c"].shape == (2, B)


# --- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kwargs", [{"flag": 1}, {"x": torch.ones(2)}, {"flag": None}], ids=str)
def test_other_keywords_are_refused(kwargs):
    with pytest.raises(RuntimeError, match="does not support keyword arguments"):
        chain("a", "b")(start("a"), **kwargs)


@pytest.mark.parametrize("args, kwargs", [((torch.zeros(T),), {}), ((), {"a": torch.zeros(T)})])
def test_dispatch(args, kwargs):
    b, c = chain("a", "b", "c")(*args, **kwargs)
    assert_close(b, torch.ones(T))
    assert_close(c, torch.full((T,), 2.0))


def test_dispatch_of_nested_keys():
    seq = TensorDictSequential(step([("n", "a"), "x"], [("m", "b")]), step([("m", "b")], "c"))
    b, c = seq(n_a=torch.ones(T), x=torch.ones(T))
    assert_close(b, torch.full((T,), 3.0))
    assert_close(c, torch.full((T,), 4.0))
    assert_close(seq(torch.ones(T), x=torch.ones(T))[1], c)


def test_dispatch_leaves_out_what_is_dropped():
    seq = TensorDictSequential(TensorDictModule(lambda a: (a, a + 1), ["a"], ["_", "b"]))
    assert_close(seq(a=torch.zeros(T)), torch.ones(T))


def test_dispatch_with_an_unknown_keyword():
    with pytest.raises(RuntimeError):
        chain("a", "b")(a=torch.zeros(T), z=torch.zeros(T))


def test_dispatch_with_a_missing_input():
    seq = TensorDictSequential(step(["a", "x"], "b"))
    with pytest.raises(KeyError, match="x"):
        seq(a=torch.zeros(T))


def test_the_container_by_keyword():
    td = start("a")
    assert chain("a", "b")(tensordict=td) is td and "b" in td


# --- failures -----------------------------------------------------------------------------------


def broken(x):
    raise ZeroDivisionError("inner trouble")


def notes(caught):
    return "\n".join(getattr(caught.value, "__notes__", ()))


def test_the_failing_module_is_named_by_its_position():
    seq = TensorDictSequential(step("a", "b"), TensorDictModule(broken, ["b"], ["c"]))
    with pytest.raises(ZeroDivisionError, match="inner trouble") as caught:
        seq(start("a"))
    assert "1" in notes(caught)


def test_the_failing_module_is_named_by_its_name():
    seq = TensorDictSequential({"x": step("a", "b"), "culprit": TensorDictModule(broken, "b", "c")})
    with pytest.raises(ZeroDivisionError) as caught:
        seq(start("a"))
    assert "culprit" in notes(caught)


def test_the_failing_module_is_named_after_calls_that_worked():
    def picky(x):
        return x if x.shape == (B,) else broken(x)

    seq = TensorDictSequential({"x": step("a", "b"), "culprit": TensorDictModule(picky, "b", "c")})
    for _ in range(2):
        seq(start("a"))
    with pytest.raises(ZeroDivisionError) as caught:
        seq(TensorDict(a=torch.zeros(T)))
    assert "culprit" in notes(caught)


def test_the_failing_module_of_a_nested_sequence():
    inner = TensorDictSequential({"culprit": TensorDictModule(broken, ["b"], ["c"])})
    with pytest.raises(ZeroDivisionError) as caught:
        TensorDictSequential({"x": step("a", "b"), "outer": inner})(start("a"))
    assert "culprit" in notes(caught) and "outer" in notes(caught)


def test_a_failure_names_position_keys_and_shapes_ours():
    seq = TensorDictSequential(step("a", "b"), TensorDictModule(broken, ["b"], ["c"]))
    with pytest.raises(ZeroDivisionError, match="broken") as caught:
        seq(start("a"))
    text = notes(caught)
    assert "1" in text and "'b'" in text and ("[2]" in text or "(2,)" in text)


def test_a_missing_input_names_key_and_position_ours():
    seq = TensorDictSequential(step("a", "action"), step(["acton"], "c"))
    with pytest.raises(KeyError) as caught:
        seq(start("a"))
    text = str(caught.value) + notes(caught)
    assert "acton" in text and "1" in text and 'Did you mean "action"' in text


def test_the_second_of_two_equal_modules_fails_ours():
    calls = []

    def second(x):
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError("the second time")
        return x

    module = TensorDictModule(second, ["a"], ["a"])
    with pytest.raises(ZeroDivisionError) as caught:
        TensorDictSequential({"one": module, "two": module})(start("a"))
    assert "two" in notes(caught)


def test_entries_written_before_a_failure_stay():
    td = start("a")
    with pytest.raises(ZeroDivisionError):
        TensorDictSequential(step("a", "b"), TensorDictModule(broken, ["b"], ["c"]))(td)
    assert leaves(td) == {"a", "b"}


# --- select_subsequence -------------------------------------------------------------------------


def graph(cls=TensorDictSequential):
    return cls(
        step("a", "b"),
        step("b", "c"),
        step("c", "d"),
        step("a", "e"),
        step(["b", "x"], "f"),
    )


@pytest.mark.parametrize(
    "ins, outs, kept",
    [
        (None, None, [0, 1, 2, 3, 4]),
        (["a"], None, [0, 1, 2, 3]),
        (["b"], None, [1, 2]),
        (["c"], None, [2]),
        (["b", "x"], None, [1, 2, 4]),
        (["a", "x"], None, [0, 1, 2, 3, 4]),
        (None, ["b"], [0]),
        (None, ["c"], [0, 1]),
        (None, ["d"], [0, 1, 2]),
        (None, ["e"], [3]),
        (None, ["f"], [0, 4]),
        (None, ["d", "e"], [0, 1, 2, 3]),
        (["b"], ["d"], [1, 2]),
        (["c"], ["d"], [2]),
        (["a"], ["c", "e"], [0, 1, 3]),
        (["b", "x"], ["f"], [4]),
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["list", "dict"])
def test_a_part_of_a_graph(ins, outs, kept, form):
    seq = graph()
    if form == "dict":
        seq = TensorDictSequential({f"m{i}": m for i, m in enumerate(seq)})
    part = seq.select_subsequence(in_keys=ins, out_keys=outs)
    assert type(part) is TensorDictSequential and len(seq) == 5
    if form == "list":
        assert [m for m in part] == [seq[i] for i in kept]
    else:
        assert list(part.module) == [f"m{i}" for i in kept]
        assert all(part[f"m{i}"] is seq[f"m{i}"] for i in kept)


def test_keys_of_a_part():
    part = graph().select_subsequence(out_keys=["f"])
    assert part.in_keys == ["a", "x"] and part.out_keys == ["b", "f"]
    td = part(start("a", "x"))
    assert leaves(td) == {"a", "x", "b", "f"} and value(td, "f") == 2


def test_a_part_by_position():
    assert graph().select_subsequence(["c"], ["d"]).in_keys == ["c"]


@pytest.mark.parametrize(
    "ins, outs",
    [(["z"], None), (None, ["z"]), (["x"], ["d"]), ([], None), (None, []), (["c"], ["b"])],
    ids=str,
)
def test_nothing_is_left(ins, outs):
    with pytest.raises(ValueError, match="No modules left"):
        graph().select_subsequence(in_keys=ins, out_keys=outs)


def test_a_part_by_nested_keys():
    seq = TensorDictSequential(
        step([("in", "x")], [("mid", "x")]), step([("mid", "x"), ("in", "m")], [("out", "p")])
    )
    part = seq.select_subsequence(out_keys=[("mid", ("x",))])
    assert len(part) == 1 and part.in_keys == [("in", "x")]
    part = seq.select_subsequence(in_keys=[("mid", "x"), ("in", ("m",))])
    assert len(part) == 1 and part.out_keys == [("out", "p")]


def test_a_part_keeps_options():
    seq = chain("a", "b", "c", partial_tolerant=True, inplace="empty")
    part = seq.select_subsequence(out_keys=["b"])
    assert part.partial_tolerant is True and part.inplace == "empty"


def test_a_part_shares_parameters():
    linear = nn.Linear(T, A)
    seq = TensorDictSequential(TensorDictModule(linear, ["x"], ["y"]), step("y", "z"))
    assert next(seq.select_subsequence(out_keys=["y"]).parameters()) is linear.weight


def test_the_given_lists_are_not_changed():
    ins, outs = ["a"], ["d"]
    graph().select_subsequence(in_keys=ins, out_keys=outs)
    assert ins == ["a"] and outs == ["d"]


def test_the_keys_of_the_sequence_are_not_changed():
    seq = graph()
    seq.select_subsequence(out_keys=["d"])
    seq.select_subsequence(in_keys=["c"])
    assert seq.in_keys == ["a", "x"] and seq.out_keys == ["b", "c", "d", "e", "f"]


def test_a_module_that_writes_a_key_again():
    seq = TensorDictSequential(step("a", "b"), step("b", "b"), step("b", "c"))
    part = seq.select_subsequence(out_keys=["c"])
    assert len(part) == 3


def nested():
    return TensorDictSequential(
        chain("a", "b", "c"), TensorDictSequential(step("b", "d"), step("d", "e"))
    )


@pytest.mark.parametrize(
    "ins, outs, shape",
    [
        (["b", "d"], ["e"], [["d", "e"]]),
        (None, ["b"], [["b"]]),
        (None, ["c"], [["b", "c"]]),
        (None, ["d"], [["b"], ["d"]]),
        (None, ["e"], [["b"], ["d", "e"]]),
        (["b"], None, [["c"], ["d", "e"]]),
        (["d"], None, [["e"]]),
        (["a"], ["b", "e"], [["b"], ["d", "e"]]),
    ],
    ids=str,
)
def test_a_part_of_nested_sequences(ins, outs, shape):
    seq = nested()
    part = seq.select_subsequence(in_keys=ins, out_keys=outs)
    assert [m.out_keys for m in part] == shape
    assert [m.out_keys for m in seq] == [["b", "c"], ["d", "e"]]


def test_nested_modules_are_shared_by_a_part():
    seq = nested()
    assert seq.select_subsequence(out_keys=["b"])[0][0] is seq[0][0]


def test_nested_sequences_of_a_subclass_stay_whole():
    class Mine(TensorDictSequential):
        pass

    seq = TensorDictSequential(Mine(step("a", "b"), step("b", "c")), step("b", "d"))
    part = seq.select_subsequence(out_keys=["b"])
    assert part[0] is seq[0] and len(part[0]) == 2


def test_a_part_of_a_subclass():
    class Mine(TensorDictSequential):
        pass

    assert type(graph(Mine).select_subsequence(out_keys=["b"])) is Mine


def test_a_part_of_a_sequence_with_a_selection():
    seq = graph().select_out_keys("c")
    part = seq.select_subsequence()
    assert [m for m in part] == [seq[0], seq[1]]


# --- partial_tolerant ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "there, written",
    [(["a"], ["b", "c"]), (["x"], ["y"]), (["a", "x"], ["b", "c", "y"]), ([], [])],
    ids=str,
)
def test_modules_without_inputs_are_left_out(there, written):
    seq = TensorDictSequential(
        step("a", "b"), step("b", "c"), step("x", "y"), partial_tolerant=True
    )
    td = TensorDict({k: torch.zeros(B) for k in there}, [B])
    assert seq(td) is td
    assert leaves(td) == {*there, *written}


def test_without_tolerance_a_missing_input_is_an_error():
    seq = TensorDictSequential(step("a", "b"), step("x", "y"))
    assert seq.partial_tolerant is False
    with pytest.raises(KeyError, match="x"):
        seq(start("a"))


def test_a_nested_key_is_missing():
    seq = TensorDictSequential(step([("n", "a")], "b"), partial_tolerant=True)
    assert leaves(seq(TensorDict({"n": {"x": torch.ones(B)}}, [B]))) == {("n", "x")}
    assert "b" in seq(TensorDict({"n": {"a": torch.ones(B)}}, [B]))


@pytest.mark.parametrize("inner", [True, False, "empty"])
def test_members_of_a_lazy_stack_that_have_the_inputs(inner):
    one = TensorDict(a=torch.zeros(T), x=torch.zeros(T))
    other = TensorDict(a=torch.zeros(T))
    td = lazy_stack([one, other])
    seq = TensorDictSequential(step("a", "b"), step("x", "y", inplace=inner), partial_tolerant=True)
    assert seq(td) is td
    assert leaves(one) == {"a", "x", "b", "y"} and leaves(other) == {"a", "b"}
    assert value(one, "y") == 1


def test_members_of_a_lazy_stack_with_nothing_in_common():
    td = lazy_stack([TensorDict(a=torch.zeros(T)), TensorDict(x=torch.zeros(T))])
    seq = TensorDictSequential(
        step("a", "b"), step("b", "c"), step("x", "y"), partial_tolerant=True
    )
    seq(td)
    assert leaves(td[0]) == {"a", "b", "c"} and leaves(td[1]) == {"x", "y"}


def test_a_lazy_stack_without_tolerance():
    td = lazy_stack([TensorDict(a=torch.zeros(T), x=torch.zeros(T)), TensorDict(a=torch.zeros(T))])
    with pytest.raises(KeyError):
        TensorDictSequential(step("x", "y"))(td)


# --- module behaviour ---------------------------------------------------------------------------


def linear_chain():
    return TensorDictSequential(
        TensorDictModule(nn.Linear(T, A), ["x"], ["h"]),
        TensorDictModule(nn.Linear(A, 2), ["h"], ["y"]),
    )


def test_numbers_of_a_chain_of_layers():
    seq, x = linear_chain(), torch.randn(B, T)
    expected = seq[1].module(seq[0].module(x))
    assert_close(seq(TensorDict({"x": x}, [B]))["y"], expected)
    assert_close(seq(x)[1], expected)


@pytest.mark.parametrize(
    "twin", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copies(twin):
    seq = linear_chain()
    seq.select_out_keys("y")
    again, x = twin(seq), torch.randn(B, T)
    assert again.out_keys == ["y"] and again.in_keys == ["x"]
    assert_close(again(x), seq(x))
    assert next(again.parameters()) is not next(seq.parameters())


def test_state_dict_round_trip():
    seq, other, x = linear_chain(), linear_chain(), torch.randn(B, T)
    other.load_state_dict(seq.state_dict())
    assert_close(other(x)[1], seq(x)[1])


def test_train_eval_double():
    seq = TensorDictSequential(TensorDictModule(nn.Dropout(0.9), ["x"], ["y"])).eval()
    assert not seq[0].module.training
    assert_close(seq(torch.ones(B)), torch.ones(B))
    assert linear_chain().double()(torch.ones(B, T).double())[1].dtype == torch.double


def test_reset_parameters_recursive():
    seq = linear_chain()
    with torch.no_grad():
        for p in seq.parameters():
            p.fill_(7)
    assert seq.reset_parameters_recursive() is None
    assert all((p != 7).any() for p in seq.parameters())


@pytest.mark.parametrize("form", ["container", "tensors"])
def test_hooks_of_every_level_run(form):
    seq, seen = linear_chain(), []
    for name, module in seq.named_modules():
        if not isinstance(module, nn.ModuleList):
            module.register_forward_hook(lambda m, a, o, name=name: seen.append(name))
    seq(TensorDict({"x": torch.ones(B, T)}, [B]) if form == "container" else torch.ones(B, T))
    assert seen == ["module.0.module", "module.0", "module.1.module", "module.1", ""]


def test_a_hook_of_a_step_changes_what_follows():
    seq = chain("a", "b", "c")
    seq[0].register_forward_hook(lambda m, args, out: out.set("b", out["b"] + 10))
    assert value(seq(start("a")), "c") == 12


def test_repr_names_modules_and_keys():
    text = repr(TensorDictSequential({"enc": TensorDictModule(nn.Linear(T, A), ["x"], ["y"])}))
    assert text.startswith("TensorDictSequential(")
    assert "enc" in text and "Linear" in text and "x" in text and "y" in text


def test_a_subclass_with_its_own_forward():
    class Twice(TensorDictSequential):
        def forward(self, tensordict, **kwargs):
            return super().forward(super().forward(tensordict, **kwargs), **kwargs)

    assert value(Twice(step("a", "a"))(start("a")), "a") == 2


def test_a_forward_put_on_a_step():
    seq = chain("a", "b", "c")
    seq(start("a"))
    seq[0].forward = lambda td: td.set("b", td["a"] + 100)
    assert value(seq(start("a")), "c") == 101


def test_a_step_exchanged_in_the_list_of_modules():
    seq = chain("a", "b", "c")
    seq(start("a"))
    seq.module[0] = step("a", "b")
    seq.module[0].module = lambda x: x + 50
    assert value(seq(start("a")), "c") == 51


def test_vmap_over_the_container():
    seq, x = linear_chain(), torch.randn(B, T)
    out = torch.vmap(seq)(TensorDict({"x": x}, [B]))
    assert_close(out["y"], seq(x)[1])


def test_eight_threads_call_one_sequence(in_threads):
    seq, wrong = chain("a", "b", "c", "d"), []

    def work(i):
        for j in range(30):
            td = TensorDict(a=torch.tensor(float(10 * i + j)))
            if seq(td)["d"] != 10 * i + j + 3:
                wrong.append(i)

    in_threads(work)
    assert wrong == []


# --- settings that change after the first call --------------------------------------------------


def test_inplace_set_later():
    seq = chain("a", "b")
    seq(start("a"))
    seq.inplace = "empty"
    td = start("a")
    assert leaves(seq(td)) == {"b"} and leaves(td) == {"a"}
    seq.inplace = None
    assert seq(td) is td


def test_partial_tolerant_set_later():
    seq = TensorDictSequential(step("a", "b"), step("x", "y"))
    with pytest.raises(KeyError):
        seq(start("a"))
    seq.partial_tolerant = True
    assert leaves(seq(start("a"))) == {"a", "b"}


def test_a_step_whose_keys_change_later():
    seq = chain("a", "b", "c")
    seq(start("a"))
    seq[0].in_keys = ["z"]
    assert value(seq(start("a", "z", value=5.0)), "c") == 7


def test_forward_of_the_class_replaced_later(monkeypatch):
    seq = chain("a", "b")
    seq(start("a"))
    monkeypatch.setattr(TensorDictSequential, "forward", lambda self, td: td.set("w", td["a"]))
    assert leaves(seq(start("a"))) == {"a", "w"}


def test_a_forward_put_on_the_sequence():
    seq = chain("a", "b")
    seq(start("a"))
    seq.forward = lambda td: td.set("w", td["a"])
    assert leaves(seq(start("a"))) == {"a", "w"}


def test_compiled_by_its_own_method():
    seq, graphs = chain("a", "b", "c"), []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    seq(start("a"))
    seq.compile(backend=backend)
    assert value(seq(start("a")), "c") == 2 and graphs


def test_a_step_that_is_compiled():
    class Twice(nn.Module):
        def forward(self, x):
            return x * 2

    seq, graphs = TensorDictSequential(TensorDictModule(Twice(), ["a"], ["b"])), []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    seq(start("a"))
    seq[0].module.compile(backend=backend)
    assert value(seq(start("a", value=3.0)), "b") == 6 and len(graphs) == 1


def test_a_deep_nest():
    seq = step("a", "a")
    for _ in range(20):
        seq = TensorDictSequential(seq, step("a", "a"))
    assert value(seq(start("a")), "a") == 21
    assert_close(seq(a=torch.zeros(T)), torch.full((T,), 21.0))


def test_a_step_that_gives_another_container():
    seq = TensorDictSequential(
        lambda td: TensorDict({"b": td["a"] + 1}, td.batch_size), step("b", "c")
    )
    td = start("a")
    out = seq(td)
    assert out is not td and leaves(td) == {"a"} and leaves(out) == {"b", "c"}


def test_a_step_that_gives_nothing_is_an_error():
    seq = TensorDictSequential(lambda td: None, step("b", "c"))
    with pytest.raises(Exception):  # noqa: B017
        seq(start("b"))


def test_no_grad_and_autocast():
    seq = linear_chain()
    with torch.no_grad():
        assert not seq(torch.ones(B, T))[1].requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert seq(torch.ones(B, T))[1].dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(), (B,), (B, T)], ids=str)
def test_batch_sizes_of_any_depth(shape):
    seq = chain("a", "b", "c")
    td = seq(TensorDict({"a": torch.zeros(*shape, 2)}, shape))
    assert td["c"].shape == (*shape, 2) and td.batch_size == shape


def test_changing_shapes_between_calls():
    seq = chain("a", "b")
    for n in (2, 3, 1, 0):
        assert seq(TensorDict({"a": torch.zeros(n)}, [n]))["b"].shape == (n,)


def test_a_sequence_in_a_module():
    inner = chain("a", "b")
    module = TensorDictModule(inner, ["x"], ["z"])
    assert_close(module(TensorDict(x=torch.zeros(T)))["z"], torch.ones(T))


def test_sequences_in_plain_containers_of_modules():
    net = nn.Sequential(chain("a", "b"), chain("b", "c"))
    assert value(net(start("a")), "c") == 2


def test_settings_of_a_module_are_attributes_of_a_sequence():
    seq = chain("a", "b")
    assert (seq.inplace, seq.strict, seq.method, seq.partial_tolerant) == (None, False, None, False)


def test_an_empty_list_of_selected_out_keys_selects_nothing():
    seq = chain("a", "b", selected_out_keys=[])
    assert seq.out_keys == ["b"] and leaves(seq(start("a"))) == {"a", "b"}


def test_a_selection_of_no_output():
    seq = chain("a", "b", "c").select_out_keys()
    assert seq.out_keys == [] and leaves(seq(start("a"))) == {"a"}


def test_an_empty_sequence_dispatches():
    assert TensorDictSequential()() == ()


def test_a_list_of_modules_of_torch():
    modules = nn.ModuleList([step("a", "b"), step("b", "c")])
    seq = TensorDictSequential(*modules)
    assert seq[0] is modules[0] and value(seq(start("a")), "c") == 2


# --- mistakes -----------------------------------------------------------------------------------


def test_a_tensor_too_many_ours():
    with pytest.raises(ValueError, match=r"one for each of in_keys=\['a'\]"):
        chain("a", "b")(torch.zeros(T), torch.zeros(T))


def test_a_sequence_remembers_what_it_expects_ours():
    seq = TensorDictSequential(step("a", "b"), expect_in_keys=["a"])
    with pytest.raises(ValueError, match="Did you mean 'b'"):
        seq.append(step("bb", "c"))
    assert len(seq) == 1 and seq.append(step("b", "c")).in_keys == ["a"]


def test_a_wanted_key_that_is_misspelt_ours():
    with pytest.raises(ValueError, match='Did you mean "hidden"'):
        chain("a", "hidden").select_subsequence(out_keys=["hiden"])


# ------------------------------------------------------------------------ edits of `.module`


@pytest.mark.parametrize("deep", [False, True])
def test_keys_follow_edits_of_the_modules(deep):
    """What a sequence reads and writes, dispatch, its parts and its graph, after any edit."""
    inner = chain("a", "b")
    seq = TensorDictSequential(inner, step("k", "l")) if deep else inner
    assert seq(torch.zeros(B), torch.zeros(B))[0].tolist() == [1] * B if deep else True
    inner.module.append(step(["b", "q"], "c"))
    rest = (["k"], ["l"]) if deep else ([], [])
    assert seq.in_keys == ["a", "q", *rest[0]]
    assert seq.out_keys == seq.out_keys_source == ["b", "c", *rest[1]]
    out = seq(**{key: torch.zeros(B) for key in seq.in_keys})
    assert out[1].tolist() == [2] * B
    assert seq.select_subsequence(out_keys=["c"]).in_keys == ["a", "q"]
    assert seq.graph().in_keys == ("a", "q", *rest[0])
    inner.module[0] = step("z", "b")
    assert seq.in_keys == ["z", "q", *rest[0]]
    inner[1].in_keys = ["b"]
    assert seq.in_keys == ["z", *rest[0]]
    inner[1].select_out_keys()
    assert seq.out_keys == ["b", *rest[1]]


def test_a_selection_holds_after_an_edit_of_the_modules():
    seq = chain("a", "b", "c").select_out_keys("c")
    seq.module.insert(0, step("z", "a"))
    assert seq.in_keys == ["z"] and seq.out_keys == ["c"]
    assert leaves(seq(start("z"))) == {"z", "c"}
    del seq.module[2]
    with pytest.raises(ValueError, match="call reset_out_keys"):
        seq(start("z"))
    assert seq.reset_out_keys().out_keys == ["a", "b"]


def test_shapes_of_replaced_modules_are_forgotten():
    seq = chain("a", "b", "c")
    seq(start())
    seq.module[1] = step("b", "d")
    assert seq.graph().shapes == {}
    seq(start())
    assert seq.graph().shapes["1"]["out"]["d"].shape == (B,)


def test_keys_that_were_set_stay_until_the_modules_change():
    seq = chain("a", "b", "c")
    seq.in_keys, seq.out_keys = ["a", "q"], ["c"]
    assert (seq.in_keys, seq.out_keys) == (["a", "q"], ["c"])
    assert copy.deepcopy(seq).in_keys == ["a", "q"]
    seq.module.append(step("c", "d"))
    assert (seq.in_keys, seq.out_keys) == (["a"], ["b", "c", "d"])


def test_modules_are_checked_against_expected_keys_after_an_edit_of_the_modules():
    seq = chain("a", "b", expect_in_keys=["a"])
    seq.module.append(step(["b", "q"], "c"))
    with pytest.raises(ValueError, match="q"):
        seq.in_keys  # noqa: B018 # reading looks at the modules
