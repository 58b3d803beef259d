"""torch.export of keyed modules, called with tensors or with a container."""

import io
from functools import partial

import pytest
import torch
from torch.export import Dim, export
from torch.testing import assert_close

from raffia import TensorDict
from raffia.nn import (
    EnsembleModule,
    TensorDictModule,
    TensorDictModuleWrapper,
    TensorDictSequential,
    symbolic_trace,
)

from .keyed import linear, policy, tree

B, T, A = 2, 3, 5


def chain(**options):
    return TensorDictSequential(
        linear(("obs", "x"), "h"),
        TensorDictModule(lambda h, z: (h * z, h + z), ["h", "z"], ["y", ("n", "w")]),
        **options,
    )


def x():
    return torch.randn(B, T)


def z():
    return torch.randn(B, A)


def inputs():
    return TensorDict({"obs": {"x": x()}, "z": z()}, batch_size=[B])


def same(module, args=(), kwargs=None, **options):
    """Exports a module, and compares both on fresh arguments; returns the program."""
    program = export(
        module, tuple([m() for m in args]), {k: m() for k, m in (kwargs or {}).items()}, **options
    )
    args, kwargs = [m() for m in args], {k: m() for k, m in (kwargs or {}).items()}
    result = program.module()(
        *[a.clone() for a in args], **{k: v.clone() for k, v in kwargs.items()}
    )
    expected = module(*args, **kwargs)
    if isinstance(expected, TensorDict):
        assert isinstance(result, TensorDict)
        assert result.batch_size == expected.batch_size
        result, expected = tree(result), tree(expected)
    assert_close(result, expected)
    return program


both = pytest.mark.parametrize("strict", [False, True])
slow = partial(pytest.param, marks=pytest.mark.slow)


SEQUENCES = [
    chain,
    slow(lambda: chain(inplace="empty")),
    slow(lambda: chain(selected_out_keys=["y"])),
    slow(lambda: TensorDictModuleWrapper(chain())),
    lambda: symbolic_trace(chain()),
]


@both
@pytest.mark.parametrize("make", SEQUENCES)
def test_sequence_called_with_tensors(make, strict):
    same(make(), [x, z], strict=strict)


@both
def test_sequence_called_with_keywords_or_a_container(strict):
    same(chain(), [x], {"z": z}, strict=strict)
    same(chain(), [inputs], strict=strict)
    same(chain(inplace="empty"), [], {"tensordict": inputs}, strict=strict)


@both
def test_any_number_of_rows(strict):
    rows = Dim("rows", min=2, max=64)
    program = same(chain(), [x, z], strict=strict, dynamic_shapes=({0: rows}, {0: rows}))
    assert program.module()(torch.randn(7, T), torch.randn(7, A))[0].shape == (7, A)


def test_program_of_a_container_is_saved_and_loaded_ours():
    module = chain()
    program, file = export(module, (inputs(),)), io.BytesIO()
    assert list(program.state_dict) == list(module.state_dict())
    program.example_inputs = None  # torch would pickle the container, and refuse to load it
    torch.export.save(program, file)
    file.seek(0)
    td = inputs()
    assert_close(tree(torch.export.load(file).module()(td.clone())), tree(module(td)))


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")
@both
def test_policy_ours(strict):
    same(policy(), [x], strict=strict)
    if not strict:
        same(policy(), [lambda: TensorDict({"x": x()}, batch_size=[B])], strict=False)


def test_ensemble():
    module = EnsembleModule(linear(), 4)
    parameters = list(module.parameters())
    same(module, [x], strict=False)
    assert [a is b for a, b in zip(module.parameters(), parameters, strict=True)] == [True, True]
    assert module.params_td["module", "weight"] is parameters[0]
