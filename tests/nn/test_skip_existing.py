"""`set_skip_existing`: modules whose outputs exist already need not run."""

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

from .test_interaction import in_another_thread

zero = torch.zeros(())


def counted(in_keys, out_keys, **kwargs):
    """A module that adds one, and the list of its calls."""
    calls = []

    def func(*args):
        calls.append(1)
        return ((args[0] if args else zero) + 1,) * len(out_keys)

    return TensorDictModule(func, in_keys, out_keys, **kwargs), calls


def zeros(keys):
    return TensorDict({key: zero for key in keys})


SKIPPED = [  # the mode, out_keys, existing keys, and whether the module is skipped
    (None, ["y"], ["x", "y"], False),
    (False, ["y"], ["x", "y"], False),
    (True, ["y"], ["x"], False),
    (True, ["y"], ["y"], True),  # the inputs may be missing
    (True, ["y", "w"], ["x", "w"], False),
    (True, ["y", "w"], ["x", "y", "w"], True),
    (True, [("n", "y")], ["x", ("n", "y")], True),
    (True, [("n", "y")], ["x", ("n", "z")], False),
    (True, ["x"], ["x"], False),  # an input that is written
    (True, ["_"], ["x"], False),
    (["y", "w"], ["y"], ["x", "y"], True),
    (["w"], ["y"], ["x", "y"], False),
    ([("n", ("y",))], [("n", "y")], ["x", ("n", "y")], True),
    (["n"], [("n", "y")], ["x", ("n", "y")], False),
    ([], ["y"], ["x", "y"], False),
]


@pytest.mark.parametrize("mode, out_keys, keys, skipped", SKIPPED, ids=str)
def test_modules_are_skipped_if_their_outputs_exist(mode, out_keys, keys, skipped):
    assert skip_existing() is False
    for inplace in (True, False, "empty"):
        module, calls = counted(["x"], out_keys, inplace=inplace)
        td = zeros(keys)
        if mode is None:
            out = module(td)
        else:
            with set_skip_existing(mode):
                out = module(td)
        assert len(calls) == (0 if skipped else 1)
        assert (out is td) is (skipped or inplace is True)
        assert out_keys == ["_"] or out[out_keys[0]] == len(calls)
    if mode is True and "_" not in out_keys and "x" in keys:
        for last in (False, True):  # a module after it is skipped by itself
            steps = [counted(["x"], out_keys), counted(out_keys[:1], ["z"])]
            with set_skip_existing():
                TensorDictSequential([module for module, _ in steps])(zeros([*keys, *"z" * last]))
            assert [len(calls) for _, calls in steps] == [not skipped, not last]


def test_blocks():
    mode = set_skip_existing()
    for _ in range(2):  # one may be used again
        with mode:
            for inner in (True, False, ["a", ("b", "c")]):
                with set_skip_existing(inner):
                    assert skip_existing() == inner
                assert skip_existing() is True
        assert skip_existing() is False
    with pytest.raises(ZeroDivisionError), set_skip_existing():
        raise ZeroDivisionError
    with pytest.raises(RuntimeError), set_skip_existing(None):  # which is for decorators
        pass
    with pytest.raises(TypeError, match="got 3"):
        set_skip_existing(3)
    assert skip_existing() is False
    mode = set_skip_existing(["a"], in_key_attr="i", out_key_attr="o")
    for made in (mode, mode.clone()):
        assert (made.mode, made.in_key_attr, made.out_key_attr) == (["a"], "i", "o")
    assert mode.clone() is not mode and mode.thread_local is False
    module, calls = counted(["x"], ["y"])
    with mode, set_skip_existing():  # a dispatched call has no outputs yet
        assert module(x=zero) == 1 and len(calls) == 1


# --- as a decorator -----------------------------------------------------------------------------


def made(*args, base=TensorDictModuleBase, keys=("in_keys", "out_keys"), outs=("y",), **kwargs):
    """A module whose decorated `forward` counts its calls."""

    class Made(base):
        calls = 0

        @set_skip_existing(*args, **kwargs)
        def forward(self, tensordict, shift=1, *, scale=1):
            type(self).calls += 1
            self.inside = skip_existing()
            if shift is None:
                raise ZeroDivisionError
            return tensordict.set(outs[0], tensordict["x"] * scale + shift)

    module = Made()
    for name, value in zip(keys, (["x"], list(outs)), strict=True):
        setattr(module, name, value)
    return module


DECORATED = [
    ((), False, True),
    ((False,), True, False),
    ((None,), False, False),
    ((None,), True, True),
    ((["y"],), False, True),
    ((["z"],), False, False),
]


@pytest.mark.parametrize("args, outside, skipped", DECORATED, ids=str)
def test_a_decorated_forward(args, outside, skipped):
    attributes = dict(in_key_attr="reads", out_key_attr="writes")
    for module in (
        made(*args),
        made(*(args or (True,)), base=nn.Module, keys=("reads", "writes"), **attributes),
    ):
        with set_skip_existing(outside):
            td = TensorDict(x=zero, y=zero)
            assert module(td) is td and type(module).calls == (0 if skipped else 1)
            assert module(TensorDict(x=zero), 2, scale=3)["y"] == 2
            assert module.inside == (outside if args == (None,) else args[0] if args else True)
            with pytest.raises(ZeroDivisionError):
                module(TensorDict(x=zero), None)
            assert skip_existing() is outside
        own = made(*args, outs=("x",))  # a module that reads its output runs
        assert own(TensorDict(x=zero))["x"] == 1


def test_invalid_decorations_and_an_empty_selection():
    @set_skip_existing()
    def forward(self, tensordict):
        """What it does."""

    assert forward.__name__ == "forward" and forward.__doc__ == "What it does."
    for mode in (True, None):
        with pytest.raises(RuntimeError, match="tensordict"):
            set_skip_existing(mode)(lambda self, data: data)
    module = made(None).select_out_keys()
    with set_skip_existing():
        module(TensorDict(x=zero))
    assert module.calls == 0  # no output is selected, so none is missing


# --- threads ------------------------------------------------------------------------------------


def test_modules_of_other_threads_are_skipped_unless_the_block_is_of_one_thread():
    """More on blocks and threads is in test_interaction.py."""
    module, calls = counted(["x"], ["y"])
    with set_skip_existing():
        in_another_thread(lambda: module(zeros(["x", "y"])))
    with set_skip_existing(thread_local=True):
        module(zeros(["x", "y"]))
        assert not calls
        in_another_thread(lambda: module(zeros(["x", "y"])))
    assert len(calls) == 1
