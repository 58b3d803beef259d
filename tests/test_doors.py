"""Import paths of programs written for tensordict, in any order of imports."""

import subprocess
import sys
import types

import pytest

import raffia
from raffia.lazy import lazy_names


def test_dir_lists_each_name_once_and_names_come_from_the_source_of_a_package(monkeypatch):
    for package in (raffia, raffia.tensordict, raffia.nn):
        names = package.__dir__() if hasattr(package, "__dir__") else dir(package)
        assert len(names) == len(set(names))
    assert {"TensorDict", "nn", "tensorclass"} <= set(dir(raffia))
    assert len(raffia.__all__) == len(set(raffia.__all__))
    monkeypatch.setitem(sys.modules, "sourceless", types.ModuleType("sourceless"))
    with pytest.raises(ImportError, match="sourceless is installed without its source"):
        lazy_names("sourceless")


FIRST = [
    "from raffia import tensorclass",
    "from raffia.tensorclass import NonTensorData, TensorClass, from_dataclass",
    "import raffia.tensorclass, raffia.memmap",
    "from raffia import memmap",
    "from raffia.memmap import MemoryMappedTensor",
    "from raffia.utils import NestedKey, _zip_strict, expand_as_right, expand_right, unravel_key",
    "from raffia.base import NO_DEFAULT, TensorDictBase, _is_leaf_nontensor, from_any, from_dict",
]
AFTER = """
import raffia, importlib, types
assert raffia.base.TensorDictBase is raffia.TensorDictBase and raffia.utils.is_tensorclass
assert raffia.nn.common.dispatch is raffia.nn.dispatch and raffia.nn.utils.set_skip_existing
assert not isinstance(raffia.tensorclass, types.ModuleType), "a module in the decorator's place"
assert not isinstance(raffia.memmap, types.ModuleType)
@raffia.tensorclass
class Point:
    x: object
from raffia import tensorclass, memmap
assert tensorclass is raffia.tensorclass and memmap is raffia.memmap
from raffia.tensorclass import tensorclass as again, TensorClass
assert again is tensorclass and issubclass(Point, TensorClass)
assert isinstance(importlib.import_module("raffia.tensorclass"), types.ModuleType)
assert raffia.tensorclass is tensorclass
from raffia.memmap import MemoryMappedTensor
assert MemoryMappedTensor is raffia.MemoryMappedTensor
memmap(raffia.TensorDict(a=1.0))
from raffia.tensorclass import from_dataclass
assert from_dataclass is raffia.from_dataclass
"""


@pytest.mark.slow
@pytest.mark.parametrize("first,second", [(0, 1), (1, 0), (2, 0), (3, 4), (4, 3), (4, 1)])
def test_a_decorator_stays_one_after_any_imports(first, second):
    code = f"{FIRST[first]}\n{FIRST[second]}\n{AFTER}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_imports_work_in_this_process_too():
    exec("".join([line + "\n" for line in FIRST]) + AFTER, {"__name__": "doors"})


def test_private_names_that_programs_use_work():
    import torch

    from raffia import NonTensorData, TensorDict
    from raffia.base import NO_DEFAULT, _default_is_leaf, _is_leaf_nontensor
    from raffia.utils import (
        Buffer,
        _getitem_batch_size,
        _is_non_tensor,
        _maybe_correct_neg_dim,
        _unravel_key_to_tuple,
        _zip_strict,
        is_seq_of_nested_key,
    )

    for index in (0, (None, ..., 1), torch.tensor([0, 1, 1]), slice(1, None)):
        size = TensorDict(batch_size=[4, 3])[index].batch_size
        assert _getitem_batch_size(torch.Size([4, 3]), index) == size
    assert _maybe_correct_neg_dim(-1, None, 3) == 2
    assert _maybe_correct_neg_dim(-3, None, 3) == 0
    with pytest.raises(IndexError, match=r"expected to be in range of \[-2, 1\], but got 2"):
        _maybe_correct_neg_dim(2, torch.Size([4, 3]))
    with pytest.raises(ValueError, match="shorter"):
        list(_zip_strict([1], []))
    assert _unravel_key_to_tuple(("a", ("b",))) == ("a", "b")
    assert is_seq_of_nested_key(["a", ("b", "c")]) and not is_seq_of_nested_key([1])
    assert _is_non_tensor(NonTensorData("a")) and not _is_leaf_nontensor(TensorDict)
    assert _default_is_leaf(torch.Tensor) and issubclass(Buffer, torch.Tensor)
    with pytest.raises(KeyError):
        TensorDict().get("a", NO_DEFAULT)
