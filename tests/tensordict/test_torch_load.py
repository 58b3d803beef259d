"""`torch.save` and `torch.load` with its default, which reads weights only."""

import io
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, MutableMapping

import pytest
import torch
from torch import nn

import raffia
from raffia import MemoryMappedTensor, NonTensorData, TensorDict, TensorDictParams, lazy_stack
from raffia.tensordict import pickled
from tests.tensordict.stored import through_torch

CALLED = []


@raffia.tensorclass
class Plain:
    x: torch.Tensor
    name: str = "a"


class Guarded(raffia.TensorClass):
    x: torch.Tensor
    below: Plain = None

    def __post_init__(self):
        CALLED.append(self.x)


def tree():
    nested = TensorDict(b=torch.ones(2, 3), batch_size=[2, 3])
    return TensorDict(a=torch.arange(2), n=nested, s="word", batch_size=[2], names=["t"])


# test_convert.py has the round trips of containers.


def test_a_tensorclass_is_not_initialised_again():
    CALLED.clear()
    value = Guarded(x=torch.ones(2), below=Plain(x=torch.zeros(2), name="b"))
    assert len(CALLED) == 1
    back = through_torch(value)
    assert len(CALLED) == 1
    assert type(back.below) is Plain and back.below.name == "b"


class Foreign:
    def __init__(self):
        CALLED.append("foreign")


def test_other_classes_are_refused():
    with pytest.raises(pickle.UnpicklingError, match="Foreign"):
        through_torch(TensorDict(x=NonTensorData(Foreign())))
    with pytest.raises(pickle.UnpicklingError, match="Mine"):
        through_torch(Mine(a=torch.ones(2)))
    assert through_torch(Mine(a=torch.ones(2)), weights_only=False).__class__ is Mine


class Mine(TensorDict):
    pass


class Calls:
    """Pickled as a call of a function."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "call",
    [
        *((Guarded, torch.ones(2)), (Guarded.__new__, Guarded), (TensorDict, {"a": 1})),
        *((print, "a"), (MemoryMappedTensor.from_filename, "/etc/hostname", torch.uint8, (1,))),
    ],
)
def test_a_file_cannot_call_other_functions(call):
    CALLED.clear()
    with pytest.raises((pickle.UnpicklingError, TypeError)):
        through_torch(Calls(*call))
    assert not CALLED


def test_a_state_hides_no_method():
    state = {"_d": {}, "_batch_size": torch.Size(), "memmap_": torch.Size}
    of_class = pickled.restored_class
    for call, match in [
        ((pickled.restored, "TensorDict", state), "would hide its method 'memmap_'"),
        ((of_class, torch.Size, TensorDict(), {}), "not an instance of a tensorclass"),
        ((of_class, Plain, TensorDict(z=1), {}), "must correspond to the class"),
    ]:
        with pytest.raises((TypeError, ValueError, pickle.UnpicklingError), match=match):
            through_torch(Calls(*call))


def test_writes_to_a_loaded_map_do_not_reach_the_file(tmp_path):
    td = TensorDict(a=torch.arange(6.0).view(2, 3), b=torch.zeros(0, 2)).memmap(tmp_path / "td")
    back = through_torch(TensorDict(td.to_dict() | {"part": td["a"][1, 1:]}))
    assert not isinstance(back["a"], MemoryMappedTensor)
    back["a"].zero_()
    assert td["a"].sum() == 15 and back["part"].tolist() == [4, 5]
    assert through_torch(td)["a"].sum() == 15 and through_torch(td).is_locked
    assert not through_torch(td).is_memmap() and not through_torch(td).is_shared()
    with pytest.raises(AttributeError, match="saved path"):
        through_torch(td).saved_path  # noqa: B018
    trusted = through_torch(td, weights_only=False)
    assert trusted.is_memmap()
    trusted["a"].zero_()
    assert td["a"].sum() == 0


def test_a_file_that_is_no_map_is_refused(tmp_path):
    td = TensorDict(a=torch.ones(3)).memmap(tmp_path / "td")
    file = io.BytesIO()
    torch.save(td, file)
    names = [arg for _, arg, _ in pickletools.genops(_pickle_in(file)) if isinstance(arg, str)]
    path = next(name for name in names if name.endswith(".memmap"))
    with open(path, "wb") as cut:
        cut.write(b"ab")
    file.seek(0)
    with pytest.raises(Exception, match="it holds 2 bytes, but the tensor needs 12"):
        torch.load(file)


def _pickle_in(file):
    with zipfile.ZipFile(file) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        return archive.read(name)


def test_a_container_is_a_mapping():
    lazy = lazy_stack([tree(), tree()])
    for td in (tree(), lazy, TensorDictParams(TensorDict(a=torch.ones(2)))):
        assert isinstance(td, Mapping) and isinstance(td, MutableMapping)
    assert list(dict(tree())) == ["a", "n", "s"] == list(OrderedDict(tree()))
    assert not isinstance(Plain(x=torch.ones(2)), Mapping)
    match tree():
        case {"a": found}:
            assert found.tolist() == [0, 1]


def test_a_module_loads_a_container():
    one, other = (nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)) for _ in range(2))
    params = TensorDict.from_module(one)
    for td in (params, lazy_stack([params.data] * 2)[0]):
        other.load_state_dict(td.flatten_keys("."))
        assert (TensorDict.from_module(other) == params).all()
