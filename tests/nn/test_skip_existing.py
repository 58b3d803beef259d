"""`set_skip_existing`: modules whose outputs are there already need not run."""

import threading

import pytest
import torch
from torch import nn

from raffia import TensorDict
from raffia.nn import (
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    set_skip_existing,
    skip_existing,
)

zero = torch.zeros(())


class Counted:
    """Adds one, and counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, *args):
        self.calls += 1
        return (args[0] if args else zero) + 1


def counted(in_keys, out_keys, **kwargs):
    func = Counted()
    return TensorDictModule(func, in_keys, out_keys, **kwargs), func


def test_it_is_off():
    assert skip_existing() is False
    module, func = counted(["x"], ["y"])
    assert module(TensorDict(x=zero, y=zero))["y"] == 1 and func.calls == 1


@pytest.mark.parametrize("mode, skipped", [(True, True), (False, False)])
def test_a_block(mode, skipped):
    module, func = counted(["x"], ["y"])
    td = TensorDict(x=zero, y=zero)
    with set_skip_existing(mode):
        assert skip_existing() is mode
        assert module(td) is td
    assert func.calls == (0 if skipped else 1)
    assert td["y"] == (0 if skipped else 1)
    assert skip_existing() is False


def test_a_block_without_a_mode_switches_it_on():
    with set_skip_existing():
        assert skip_existing() is True


def test_a_block_that_raises_puts_the_mode_back():
    with pytest.raises(ZeroDivisionError), set_skip_existing():
        raise ZeroDivisionError
    assert skip_existing() is False


@pytest.mark.parametrize("there", [[], ["y"], ["w"], ["y", "w"]], ids=str)
def test_all_outputs_must_be_there(there):
    calls = []
    module = TensorDictModule(lambda x: calls.append(1) or (x + 1, x + 2), ["x"], ["y", "w"])
    td = TensorDict({"x": zero, **{k: zero for k in there}})
    with set_skip_existing():
        module(td)
    assert len(calls) == (0 if there == ["y", "w"] else 1)
    assert td["y"] == len(calls)


def test_a_nested_output():
    module, func = counted(["x"], [("n", "y")])
    with set_skip_existing():
        module(TensorDict({"x": zero, "n": {"y": zero}}))
        assert func.calls == 0
        module(TensorDict({"x": zero, "n": {"z": zero}}))
        assert func.calls == 1


def test_an_output_that_is_an_input_is_written_again():
    module, func = counted(["x"], ["x"])
    with set_skip_existing():
        td = module(TensorDict(x=zero))
    assert func.calls == 1 and td["x"] == 1


def test_the_inputs_may_be_missing():
    module, func = counted(["x"], ["y"])
    with set_skip_existing():
        module(TensorDict(y=zero))
    assert func.calls == 0


def test_a_dispatched_call_has_no_outputs_yet():
    module, func = counted(["x"], ["y"])
    with set_skip_existing():
        assert module(x=zero) == 1
    assert func.calls == 1


@pytest.mark.parametrize("inplace", [True, False, "empty"])
def test_a_skipped_module_gives_its_input(inplace):
    module, _ = counted(["x"], ["y"], inplace=inplace)
    td = TensorDict(x=zero, y=zero)
    with set_skip_existing():
        assert module(td) is td


@pytest.mark.parametrize(
    "mode, out_keys, skipped",
    [
        (["y"], ["y"], True),
        (["y", "w"], ["y"], True),
        (["w"], ["y"], False),
        ([("n", "y")], [("n", "y")], True),
        ([("n", ("y",))], [("n", "y")], True),
        (["n"], [("n", "y")], False),
        ([], ["y"], False),
    ],
    ids=str,
)
def test_a_list_of_keys(mode, out_keys, skipped):
    module, func = counted(["x"], out_keys)
    with set_skip_existing(mode):
        module(TensorDict({"x": zero, "y": zero, "n": {"y": zero}}))
    assert func.calls == (0 if skipped else 1)


def test_the_list_is_what_skip_existing_gives():
    with set_skip_existing(["a", ("b", ("c",))]):
        assert skip_existing() == ["a", ("b", "c")]


def test_none_is_for_decorators():
    with pytest.raises(RuntimeError), set_skip_existing(None):
        pass
    assert skip_existing() is False


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("outer", [True, False])
def test_blocks_nest(outer, inner):
    with set_skip_existing(outer):
        with set_skip_existing(inner):
            assert skip_existing() is inner
        assert skip_existing() is outer
    assert skip_existing() is False


def test_a_mode_object_can_be_used_again():
    mode = set_skip_existing()
    for _ in range(2):
        with mode:
            assert skip_existing() is True
        assert skip_existing() is False


# --- in a sequence ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "there, ran",
    [
        ([], [1, 1]),
        (["b"], [0, 1]),
        (["c"], [1, 0]),
        (["b", "c"], [0, 0]),
    ],
    ids=str,
)
def test_a_sequence_skips_what_is_there(there, ran):
    first, one = counted(["a"], ["b"])
    second, two = counted(["b"], ["c"])
    td = TensorDict({"a": zero, **{k: zero + 10 for k in there}})
    with set_skip_existing():
        TensorDictSequential(first, second)(td)
    assert [one.calls, two.calls] == ran


def test_a_module_that_opens_a_block_leaves_the_mode_as_it_was():
    inner, func = counted(["x"], ["y"])

    def run(x):
        with set_skip_existing(False):
            inner(TensorDict(x=x, y=x))
        return x

    with set_skip_existing():
        TensorDictModule(run, ["x"], ["z"])(TensorDict(x=zero))
        assert skip_existing() is True
    assert func.calls == 1


# --- as a decorator -----------------------------------------------------------------------------


def made(*args, **kwargs):
    class Made(TensorDictModuleBase):
        in_keys = ["x"]
        out_keys = ["y"]
        calls = 0

        @set_skip_existing(*args, **kwargs)
        def forward(self, tensordict):
            type(self).calls += 1
            self.inside = skip_existing()
            return tensordict.set("y", tensordict["x"] + 1)

    return Made()


@pytest.mark.parametrize(
    "args, outside, skipped",
    [
        ((), False, True),
        ((True,), False, True),
        ((False,), False, False),
        ((False,), True, False),
        ((None,), False, False),
        ((None,), True, True),
        ((["y"],), False, True),
        ((["z"],), False, False),
    ],
    ids=str,
)
def test_a_decorated_forward(args, outside, skipped):
    module = made(*args)
    with set_skip_existing(outside):
        td = TensorDict(x=zero, y=zero)
        assert module(td) is td
    assert module.calls == (0 if skipped else 1)


@pytest.mark.parametrize("mode", [True, False])
def test_the_mode_within_a_decorated_forward(mode):
    module = made(mode)
    module(TensorDict(x=zero))
    assert module.inside is mode and skip_existing() is False


def test_a_decorated_forward_that_raises():
    class Failing(TensorDictModuleBase):
        in_keys, out_keys = ["x"], ["y"]

        @set_skip_existing()
        def forward(self, tensordict):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Failing()(TensorDict(x=zero))
    assert skip_existing() is False


def test_the_keys_stand_in_other_attributes():
    class Other(nn.Module):
        reads, writes = ["x"], ["y"]
        calls = 0

        @set_skip_existing(True, in_key_attr="reads", out_key_attr="writes")
        def forward(self, tensordict):
            type(self).calls += 1
            return tensordict.set("y", tensordict["x"] + 1)

    module = Other()
    module(TensorDict(x=zero, y=zero))
    assert module.calls == 0
    module(TensorDict(x=zero))
    assert module.calls == 1


def test_a_decorated_module_that_reads_what_it_writes_runs():
    class Step(TensorDictModuleBase):
        in_keys, out_keys = ["x"], ["x"]

        @set_skip_existing()
        def forward(self, tensordict):
            return tensordict.set("x", tensordict["x"] + 1)

    assert Step()(TensorDict(x=zero))["x"] == 1


def test_further_arguments_of_a_decorated_forward():
    class Scaled(TensorDictModuleBase):
        in_keys, out_keys = ["x"], ["y"]

        @set_skip_existing(None)
        def forward(self, tensordict, scale, *, shift=0):
            return tensordict.set("y", tensordict["x"] * scale + shift)

    assert Scaled()(TensorDict(x=zero + 1), 3, shift=2)["y"] == 5


@pytest.mark.parametrize("mode", [True, None])
def test_the_first_argument_must_be_named_tensordict(mode):
    with pytest.raises(RuntimeError, match="tensordict"):

        @set_skip_existing(mode)
        def forward(self, data):
            return data


def test_name_and_docstring_stay():
    @set_skip_existing()
    def forward(self, tensordict):
        """What it does."""

    assert forward.__name__ == "forward" and forward.__doc__ == "What it does."


def test_the_order_of_the_out_keys_selected():
    module = made(None)
    module.select_out_keys()
    with set_skip_existing():
        module(TensorDict(x=zero))
    assert module.calls == 0  # nothing is asked for, so everything is there


# --- threads ------------------------------------------------------------------------------------


def in_thread(func):
    found = []
    thread = threading.Thread(target=lambda: found.append(func()))
    thread.start()
    thread.join()
    return found[0]


def test_a_block_holds_in_all_threads():
    with set_skip_existing():
        assert in_thread(skip_existing) is True


def test_a_block_of_one_thread():
    with set_skip_existing(thread_local=True):
        assert skip_existing() is True
        assert in_thread(skip_existing) is False
    assert skip_existing() is False


def test_modules_in_another_thread_run():
    module, func = counted(["x"], ["y"])
    with set_skip_existing(True, thread_local=True):
        module(TensorDict(x=zero, y=zero))
        assert func.calls == 0
        in_thread(lambda: module(TensorDict(x=zero, y=zero)))
        assert func.calls == 1


def test_a_thread_overrides_the_mode_of_all():
    with set_skip_existing(True):
        with set_skip_existing(False, thread_local=True):
            assert skip_existing() is False
            assert in_thread(skip_existing) is True
        assert skip_existing() is True


def test_eight_threads_with_modes_of_their_own(in_threads):
    wrong = []

    def work(i):
        mode = i % 2 == 0
        for _ in range(50):
            with set_skip_existing(mode, thread_local=True):
                if skip_existing() is not mode:
                    wrong.append(i)
            if skip_existing() is not False:
                wrong.append(i)

    in_threads(work)
    assert wrong == []


# --- attributes ---------------------------------------------------------------------------------


def test_attributes():
    mode = set_skip_existing(["a"], in_key_attr="i", out_key_attr="o")
    assert (mode.mode, mode.in_key_attr, mode.out_key_attr) == (["a"], "i", "o")
    assert mode.thread_local is False
    twin = mode.clone()
    assert twin is not mode and twin.mode == ["a"]


def test_a_module_that_only_drops_its_outputs_is_not_skipped():
    seen = []
    module = TensorDictModule(lambda x: seen.append(x) or x, ["x"], ["_"])
    with set_skip_existing():
        module(TensorDict(x=zero))
    assert len(seen) == 1
