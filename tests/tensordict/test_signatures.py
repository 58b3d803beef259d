"""`inspect.signature` and `help` of the functions that pass options on."""

import inspect
import pickle

import pytest
import torch

import raffia
from raffia import TensorDict

FUNCTIONS = "from_any from_pytree from_namedtuple from_tuple from_dict from_struct_array load "
FUNCTIONS += "load_memmap memmap save"


@pytest.mark.parametrize("name", FUNCTIONS.split())
def test_functions_show_the_options_of_their_methods(name):
    shown = list(inspect.signature(getattr(raffia, name)).parameters.values())
    static = inspect.getattr_static(TensorDict, name)
    _, *theirs = inspect.signature(getattr(static, "__func__", static)).parameters.values()
    if name in ("memmap", "save"):
        assert shown[0].name == "data" and shown[1:] == theirs
    else:
        assert shown[1:] == theirs[1:]
    assert not [p for p in shown if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


def test_quick_ways_show_all_options():
    for name in ("update", "set", "get", "keys"):
        quick = inspect.signature(getattr(TensorDict, name)).parameters
        whole = inspect.signature(getattr(raffia.TensorCollection, name)).parameters
        assert list(quick) == list(whole)
    assert "keys_to_update" in inspect.signature(TensorDict.update).parameters


@raffia.tensorclass
class Point:
    x: torch.Tensor


KINDS = "LazyStackedTensorDict MetaData NonTensorData NonTensorStack TensorDictParams"


@pytest.mark.parametrize("kind", [*[getattr(raffia, name) for name in KINDS.split()], Point])
def test_each_kind_shows_the_arguments_that_tensordict_shows(kind):
    def hidden(cls, name):
        shown = inspect.signature(getattr(cls, name)).parameters.values()
        return {p.kind for p in shown if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}

    names = [
        name for name in dir(TensorDict) if name[0] != "_" and callable(getattr(kind, name, 0))
    ]  # but for `state_dict`, which of parameters is that of torch.nn.Module
    failed = {name for name in names if hidden(kind, name) - hidden(TensorDict, name)}
    assert not failed - {"state_dict"} and len(names) > 20


def test_arguments_by_position_and_by_name(tmp_path):
    td = TensorDict(a=torch.ones(2))
    raffia.save(td, tmp_path / "a", False)
    assert raffia.load(tmp_path / "a", "cpu")["a"].sum() == 2
    assert raffia.memmap(data=td, prefix=tmp_path / "b").is_memmap()
    assert raffia.load_memmap(tmp_path / "b", "cpu", False)["a"].sum() == 2
    assert raffia.from_dict(d={"a": 1}, batch_size=[]).batch_size == ()
    assert td.copy_at_(tensordict=TensorDict(a=torch.zeros(2)), idx=())["a"].sum() == 0
    assert raffia.maybe_dense_stack(input=[td, td]).batch_size == (2,)
    assert TensorDict(a=3).sub_(TensorDict(a=2), 2)["a"] == -1
    assert TensorDict(a=3).clamp_min(TensorDict(b=5), 4).to_dict() == {"a": 4, "b": 5}
    point = Point(x=torch.zeros(2), batch_size=[2])
    assert point.set("x", value=torch.ones(2)).set_at_("x", value=2, idx=0).x.tolist() == [2, 1]
    stack = raffia.NonTensorStack("a", "b")
    assert stack.contiguous(canonical=True, inplace=True) is stack


def test_from_dataclass_takes_the_options_of_a_class():
    import dataclasses

    @dataclasses.dataclass
    class Point:
        x: torch.Tensor
        n: int = 3

    assert raffia.from_dataclass(Point, frozen=True)(x=torch.ones(1)).is_locked
    assert raffia.from_dataclass(Point, autocast=True)(x=1, n=torch.tensor(2)).n == 2
    assert raffia.from_dataclass(Point(torch.ones(1)), nocast=True).n == 3
    assert raffia.from_dataclass(Point) is raffia.from_dataclass(Point)
    with pytest.raises(ValueError, match=r"dest_cls has its options already, so \['frozen'\]"):
        raffia.from_dataclass(Point, dest_cls=raffia.from_dataclass(Point), frozen=True)


@pytest.mark.parametrize("name", ["memmap", "save", "pad"])
def test_a_function_that_calls_a_method_can_be_pickled_and_misses_its_container(name):
    function = getattr(raffia, name)
    assert pickle.loads(pickle.dumps(function)) is function
    with pytest.raises(TypeError, match="missing a required argument"):
        function()


@pytest.mark.parametrize("name", ["keys", "values", "items"])
def test_views_of_a_plain_container_have_the_names_of_its_methods(name):
    td = TensorDict(a=torch.ones(2))
    method = getattr(TensorDict, name)
    assert pickle.loads(pickle.dumps(method)) is method
    assert len(pickle.loads(pickle.dumps(getattr(td, name)))()) == 1
    compiled = torch.compile(lambda x: list(method(x)), fullgraph=True, backend="eager")
    assert compiled(td) == list(method(td))
    with pytest.raises(TypeError, match=rf"TensorDict\.{name}\(\) got an unexpected"):
        method(td, bogus=1)
