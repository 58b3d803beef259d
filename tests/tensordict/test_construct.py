"""Construction: what goes into a container, what it becomes, and which shapes are refused.

B=2, T=3, A=5 are all different, so that a swapped dimension shows.
"""

import collections
import dataclasses

import numpy as np
import pytest
import torch

from raffia import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    from_any,
    from_dataclass,
    from_dict,
    from_namedtuple,
    from_pytree,
    from_tuple,
    fromkeys,
    is_tensor_collection,
    is_tensorclass,
    lazy_stack,
    make_tensordict,
    merge_tensordicts,
)

B, T, A = 2, 3, 5


@dataclasses.dataclass
class Point:
    x: torch.Tensor
    label: str
    inner: dict


Pair = collections.namedtuple("Pair", ["first", "second"])


def leaves(td):
    return dict(td.items(include_nested=True, leaves_only=True))


def make(**kwargs):
    return TensorDict(
        {
            "a": torch.arange(30.0).reshape(B, T, A),
            "b": {"c": torch.zeros(B, T), "d": {"e": torch.ones(B, T, 4)}},
        },
        [B, T],
        **kwargs,
    )


class TestSources:
    @pytest.mark.parametrize(
        "source",
        [
            {"a": torch.ones(B), "b": {"c": torch.zeros(B, T)}},
            {"a": torch.ones(B), ("b", "c"): torch.zeros(B, T)},
            {("a",): torch.ones(B), (("b",), "c"): torch.zeros(B, T)},
            {"b": TensorDict({"c": torch.zeros(B, T)}, [B]), "a": torch.ones(B)},
            {"b": TensorDict({"c": torch.zeros(B, T)}), "a": torch.ones(B)},
            {"b": TensorDict({"c": torch.zeros(B, T)}, [B, T]), "a": torch.ones(B)},
            collections.OrderedDict(a=torch.ones(B), b={"c": torch.zeros(B, T)}),
            collections.UserDict({"a": torch.ones(B), "b": {"c": torch.zeros(B, T)}}),
            TensorDict({"a": torch.ones(B), "b": {"c": torch.zeros(B, T)}}, [B]),
            TensorDict({"a": torch.ones(B), "b": {"c": torch.zeros(B, T)}}),
        ],
        ids=[
            "nested-dict",
            "tuple-keys",
            "nested-tuple-keys",
            "same-batch",
            "shorter-batch",
            "longer-batch",
            "OrderedDict",
            "UserDict",
            "td",
            "td-without-batch",
        ],
    )
    def test_every_source_gives_the_same_container(self, source):
        td = TensorDict(source, batch_size=[B])
        assert type(td) is TensorDict
        assert td.batch_size == (B,)
        assert set(leaves(td)) == {"a", ("b", "c")}
        assert td["b"].batch_size[:1] == (B,)
        assert (td["a"] == 1).all() and td["b", "c"].shape == (B, T)

    def test_keyword_arguments_are_entries(self):
        td = TensorDict(a=torch.ones(B, T), b=TensorDict(c=torch.zeros(B)), batch_size=[B])
        assert set(leaves(td)) == {"a", ("b", "c")}
        assert td["b"].batch_size == (B,)

    def test_keywords_may_be_named_like_methods(self):
        td = TensorDict(keys=torch.ones(B), values=torch.zeros(B), items=torch.ones(B))
        assert set(td.keys()) == {"keys", "values", "items"}

    @pytest.mark.parametrize("args", [(), (None,), ({},), (None, None), ({}, [])])
    def test_empty(self, args):
        td = TensorDict(*args)
        assert td.batch_size == () and len(td.keys()) == 0 and td.device is None
        assert td.names == [] and not td.is_locked

    def test_empty_with_keywords_only(self):
        td = TensorDict(batch_size=[B], device="cpu", names=["time"], lock=True)
        assert (td.batch_size, td.device, td.names, td.is_locked) == (
            (B,),
            torch.device("cpu"),
            ["time"],
            True,
        )

    def test_positional_order_is_source_batch_size_device(self):
        td = TensorDict({"a": torch.ones(B)}, [B], "cpu")
        assert td.batch_size == (B,) and td.device == torch.device("cpu")

    def test_the_tensor_itself_is_stored(self):
        x = torch.ones(B)
        p = torch.nn.Parameter(torch.ones(B))
        td = TensorDict({"x": x, "p": p, "n": {"x": x}}, [B])
        assert td["x"] is x and td["n", "x"] is x and td["p"] is p

    def test_the_source_dict_is_copied(self):
        source = {"a": torch.ones(B), "n": {"c": torch.ones(B)}}
        td = TensorDict(source, [B])
        td["b"] = torch.ones(B)
        td["n", "d"] = torch.ones(B)
        del td["a"]
        assert list(source) == ["a", "n"] and list(source["n"]) == ["c"]

    def test_the_source_dict_may_change_afterwards(self):
        source = {"a": torch.ones(B), "n": {"c": torch.ones(B)}}
        td = TensorDict(source, [B])
        source["b"] = source["n"]["d"] = torch.ones(B)
        assert set(leaves(td)) == {"a", ("n", "c")}

    def test_insertion_order_is_kept(self):
        td = TensorDict({"z": 1, "a": 2, "m": {"y": 3, "b": 4}})
        assert list(td.keys()) == ["z", "a", "m"] and list(td["m"].keys()) == ["y", "b"]

    def test_dotted_name_is_a_plain_name(self):
        td = TensorDict({"a.b": torch.ones(B), "a": {"b": torch.zeros(B)}}, [B])
        assert (td["a.b"] == 1).all() and (td["a", "b"] == 0).all()

    def test_tuple_key_joins_a_nested_dict(self):
        td = TensorDict({"a": {"c": torch.ones(B)}, ("a", "b"): torch.zeros(B)}, [B])
        assert set(leaves(td)) == {("a", "c"), ("a", "b")}

    def test_an_empty_nested_dict_makes_an_empty_level(self):
        td = TensorDict({"a": {}}, [B])
        assert type(td["a"]) is TensorDict and td["a"].batch_size == (B,) and td.is_empty()

    def test_subclass_relations(self):
        assert isinstance(make(), TensorDictBase) and is_tensor_collection(make())
        assert is_tensor_collection(TensorDict)
        assert not is_tensor_collection({}) and not is_tensor_collection(torch.ones(1))


class TestFromTensorDict:
    def test_same_entries_in_a_new_container(self):
        td = make()
        new = TensorDict(td, td.batch_size)
        assert new is not td and new.batch_size == td.batch_size
        assert all(new.get(key) is value for key, value in leaves(td).items())
        new["z"] = torch.ones(B, T)
        assert "z" not in td

    def test_batch_size_is_that_of_the_argument(self):
        assert TensorDict(make()).batch_size == ()
        shorter = TensorDict(make(), [B])
        assert shorter.batch_size == (B,) and shorter["b"].batch_size == (B, T)

    def test_longer_batch_size_grows_a_copy_of_the_children(self):
        td = TensorDict({"a": torch.ones(B, T), "b": {"c": torch.ones(B, T)}}, [B])
        new = TensorDict(td, [B, T])
        assert new.batch_size == new["b"].batch_size == (B, T)
        assert td.batch_size == td["b"].batch_size == (B,)

    def test_incompatible_batch_size(self):
        with pytest.raises(RuntimeError, match="a"):
            TensorDict(make(), [T])


class TestValues:
    @pytest.mark.parametrize(
        "value, expected",
        [
            (1, torch.tensor(1)),
            (2.5, torch.tensor(2.5)),
            (True, torch.tensor(True)),
            ([1, 2], torch.tensor([1, 2])),
            ((1, 2), torch.tensor([1, 2])),
            ([1.5, 2], torch.tensor([1.5, 2.0])),
            ([True, False], torch.tensor([True, False])),
            ([[1, 2], [3, 4]], torch.tensor([[1, 2], [3, 4]])),
            (np.arange(3), torch.arange(3)),
            (np.array([True, False]), torch.tensor([True, False])),
            (np.float32(3), torch.tensor(3.0)),
            (np.array(3.0), torch.tensor(3.0, dtype=torch.float64)),
            (np.ones((2, 3), dtype=np.int16), torch.ones(2, 3, dtype=torch.int16)),
            (torch.Size([2, 3]), torch.tensor([2, 3])),
            ([torch.ones(2), torch.zeros(2)], torch.tensor([[1.0, 1.0], [0.0, 0.0]])),
        ],
    )
    def test_numbers_become_tensors(self, value, expected):
        for td in (
            TensorDict({"x": value}),
            TensorDict().set("x", value),
            TensorDict({"n": {"x": value}})["n"],
        ):
            got = td["x"]
            assert type(got) is torch.Tensor
            assert got.dtype == expected.dtype and torch.equal(got, expected)

    @pytest.mark.parametrize(
        "value", ["text", b"bytes", {1, 2}, object, torch.device("cpu"), len, range(3)]
    )
    def test_objects_are_kept(self, value):
        td = TensorDict({"x": value, "n": {"x": value}}, [B])
        assert td["x"] == value and td["n", "x"] == value
        assert isinstance(td.get("x"), NonTensorData)
        assert td.get("x").batch_size == (B,) and td.get("x").data == value
        assert td.to_dict()["x"] == value

    def test_numpy_strings_are_kept(self):
        td = TensorDict({"x": np.array(["u", "v"])})
        assert list(td["x"]) == ["u", "v"]

    def test_none_is_kept(self):
        td = TensorDict({"x": None, "y": torch.ones(B)}, [B])
        assert td["x"] is None and "x" in td and td.to_dict()["x"] is None

    def test_list_of_strings_is_a_stack(self):
        td = TensorDict({"x": ["u", "v"]}, [B])
        assert isinstance(td.get("x"), NonTensorStack) and td.get("x").batch_size == (B,)
        assert td["x"] == ["u", "v"] and td.to_dict()["x"] == ["u", "v"]
        assert td[0]["x"] == "u"

    def test_list_of_strings_must_fit_the_batch(self):
        with pytest.raises(RuntimeError, match="x"):
            TensorDict({"x": ["u", "v"]}, [T])

    def test_container_entries_are_not_converted(self):
        lazy = lazy_stack([TensorDict(a=torch.ones(2)), TensorDict(a=torch.ones(3))])
        for batch in ([], [2]):
            td = TensorDict({"x": lazy}, batch)
            assert isinstance(td["x"], LazyStackedTensorDict) and td["x"].batch_size == (2,)


class TestBatchSize:
    @pytest.mark.parametrize(
        "batch, expected",
        [
            (None, ()),
            ([], ()),
            (B, (B,)),
            ([B, T], (B, T)),
            ((B, T), (B, T)),
            (torch.Size([B, T]), (B, T)),
            (torch.tensor([B, T]), (B, T)),
            (np.array([B, T]), (B, T)),
        ],
        ids=str,
    )
    def test_forms(self, batch, expected):
        td = TensorDict({"a": torch.ones(B, T)}, batch)
        assert type(td.batch_size) is torch.Size and td.batch_size == expected
        assert td.shape == td.size() == td.batch_size
        assert td.ndim == td.batch_dims == td.dim() == td.ndimension() == len(expected)
        assert td.numel() == max(1, int(np.prod(expected)))

    def test_size_of_one_dimension(self):
        assert make().size(0) == B and make().size(-1) == T
        with pytest.raises(IndexError):
            make().size(2)

    @pytest.mark.parametrize("batch", ["ab", [2.5], 2.5, {"a": 1}])
    def test_not_a_shape(self, batch):
        with pytest.raises((TypeError, ValueError)):
            TensorDict({}, batch)

    @pytest.mark.parametrize(
        "shape, batch",
        [((3, 2), [2]), ((), [2]), ((2,), [2, 3]), ((2, 4), [2, 3]), ((1, 3), [2, 3])],
    )
    @pytest.mark.parametrize("nested", [False, True])
    def test_leaf_must_start_with_the_batch(self, shape, batch, nested):
        leaf = torch.ones(shape)
        with pytest.raises(RuntimeError, match="batch dimension mismatch.*key 'leaf'"):
            TensorDict({"n": {"leaf": leaf}} if nested else {"leaf": leaf}, batch)

    @pytest.mark.parametrize("value", [1, 1.0, True, np.float32(1)])
    def test_scalar_does_not_fit_a_batch(self, value):
        with pytest.raises(RuntimeError, match="batch dimension mismatch.*'x'"):
            TensorDict({"x": value}, [B])

    @pytest.mark.parametrize("kwargs", [{"a": torch.ones(B)}, {"b": 1}])
    def test_dict_and_keywords_are_exclusive(self, kwargs):
        with pytest.raises(ValueError, match="not both"):
            TensorDict({"a": torch.ones(B)}, **kwargs)

    @pytest.mark.parametrize("source", [[1, 2], torch.ones(2), "abc", [("a", torch.ones(2))], 3])
    def test_source_is_a_mapping(self, source):
        with pytest.raises((ValueError, TypeError), match=type(source).__name__):
            TensorDict(source, [2])

    @pytest.mark.parametrize("key", [1, None, (), ("a", 1), ("a", ()), 1.5, b"a"])
    def test_malformed_key(self, key):
        with pytest.raises(KeyError):
            TensorDict({key: torch.ones(B)}, [B])
        with pytest.raises(KeyError):
            TensorDict({"n": {key: torch.ones(B)}}, [B])

    def test_tuple_key_through_a_leaf(self):
        with pytest.raises(KeyError):
            TensorDict({"a": torch.ones(B), ("a", "b"): torch.ones(B)}, [B])


class TestPromotion:
    """A nested container starts with the parent's batch size; a shorter one is grown in a copy."""

    @pytest.mark.parametrize("how", ["construct", "set", "setitem", "update"])
    @pytest.mark.parametrize("inner_batch", [(), (B,)])
    def test_shorter_is_copied(self, how, inner_batch):
        inner = TensorDict({"c": torch.ones(B, T), "d": {"e": torch.ones(B, T, A)}}, inner_batch)
        outer = TensorDict({}, [B, T])
        if how == "construct":
            outer = TensorDict({"i": inner}, [B, T])
        elif how == "set":
            outer.set("i", inner)
        elif how == "setitem":
            outer["i"] = inner
        else:
            outer.update({"i": inner})
        assert outer["i"].batch_size == outer["i", "d"].batch_size == (B, T)
        assert inner.batch_size == inner["d"].batch_size == inner_batch  # not mutated
        assert outer["i", "c"] is inner["c"]
        outer["i", "z"] = torch.ones(B, T)
        assert "z" not in inner

    @pytest.mark.parametrize("inner_batch", [(B,), (B, T), (B, T, A)])
    def test_equal_or_longer_is_the_same_object(self, inner_batch):
        inner = TensorDict({"c": torch.ones(B, T, A)}, inner_batch)
        outer = TensorDict({"i": inner}, [B])
        assert outer["i"] is inner and inner.batch_size == inner_batch
        outer = TensorDict({}, [B]).set("j", inner)
        assert outer["j"] is inner

    @pytest.mark.parametrize("inner_batch", [(), (4,), (4, T)])
    def test_incompatible(self, inner_batch):
        inner = TensorDict({"c": torch.ones(4, T)}, inner_batch)
        with pytest.raises(RuntimeError, match="c"):
            TensorDict({"i": inner}, [B])
        with pytest.raises(RuntimeError):
            TensorDict({}, [B])["i"] = inner
        assert inner.batch_size == inner_batch

    def test_nested_dicts_take_the_parents_batch(self):
        td = make()
        assert td["b"].batch_size == td["b", "d"].batch_size == (B, T)

    def test_a_locked_child_is_copied_unlocked_when_promoted(self):
        inner = TensorDict({"c": torch.ones(B)}).lock_()
        outer = TensorDict({"i": inner}, [B])
        assert inner.is_locked and not outer["i"].is_locked

    def test_not_inside_itself(self):
        td = TensorDict({"a": torch.ones(B)}, [B])
        with pytest.raises((ValueError, RuntimeError)):
            td["me"] = td


class TestBatchSizeSetter:
    @pytest.mark.parametrize("batch", [[], [B], [B, T]])
    def test_to_a_prefix_of_every_leaf(self, batch):
        td = make()
        td.batch_size = batch
        assert td.batch_size == tuple(batch) and type(td.batch_size) is torch.Size

    def test_shrinking_leaves_children_alone(self):
        td = make()
        td.batch_size = [B]
        assert td["b"].batch_size == td["b", "d"].batch_size == (B, T)

    def test_growing_grows_children(self):
        td = TensorDict(
            {"a": torch.ones(B, T), "b": {"c": torch.ones(B, T), "d": {"e": torch.ones(B, T)}}}
        )
        td.batch_size = [B, T]
        assert td["b"].batch_size == td["b", "d"].batch_size == (B, T)

    def test_growing_does_not_shrink_a_longer_child(self):
        td = TensorDict({"b": TensorDict({"c": torch.ones(B, T, A)}, [B, T, A])}, [B])
        td.batch_size = [B, T]
        assert td["b"].batch_size == (B, T, A)

    @pytest.mark.parametrize("batch, key", [([T], "a"), ([B, T, A], "e"), ([B, 4], "a")])
    def test_refused(self, batch, key):
        td = make()
        if key == "e":
            del td["b", "c"]
        with pytest.raises(RuntimeError, match=key):
            td.batch_size = batch
        assert td.batch_size == td["b"].batch_size == (B, T)

    @pytest.mark.parametrize("batch", [None, "ab", [2.5]])
    def test_not_a_shape(self, batch):
        td = make()
        with pytest.raises((TypeError, ValueError)):
            td.batch_size = batch
        assert td.batch_size == (B, T)

    def test_indexing_follows(self):
        td = make()
        td.batch_size = [B]
        assert td[0].batch_size == () and td[0]["b"].batch_size == (T,)

    def test_set_after_shrinking(self):
        td = make()
        td.batch_size = [B]
        td["z"] = torch.ones(B, 7)
        with pytest.raises(RuntimeError):
            td.batch_size = [B, T]
        assert td.batch_size == (B,)

    def test_locked_keys_do_not_fix_the_batch_size(self):
        td = make(lock=True)
        td.batch_size = [B]
        assert td.batch_size == (B,) and td.is_locked

    def test_lazy_stack_refuses(self):
        lazy = lazy_stack([make(), make()])
        with pytest.raises(RuntimeError):
            lazy.batch_size = [2]
        assert lazy.batch_size == (2, B, T)


class TestAutoBatchSize:
    @pytest.mark.parametrize(
        "dims, expected", [(None, (B, T)), (0, ()), (1, (B,)), (2, (B, T)), (9, (B, T))]
    )
    def test_longest_common_prefix_up_to_batch_dims(self, dims, expected):
        td = TensorDict(a=torch.ones(B, T, 4), b=torch.ones(B, T, A))
        assert td.auto_batch_size_(dims) is td
        assert td.batch_size == expected

    def test_keyword(self):
        assert TensorDict(a=torch.ones(B, T)).auto_batch_size_(batch_dims=1).batch_size == (B,)

    def test_children_too(self):
        td = TensorDict(a=torch.ones(B, T, 4), b={"c": torch.ones(B, A)}).auto_batch_size_()
        assert td.batch_size == (B,) and td["b"].batch_size == (B, A)

    def test_children_with_batch_dims(self):
        td = TensorDict(a=torch.ones(B, T), b={"c": torch.ones(B, T)}).auto_batch_size_(1)
        assert td.batch_size == td["b"].batch_size == (B,)

    def test_nothing_in_common(self):
        assert TensorDict(a=torch.ones(B), b=torch.ones(T)).auto_batch_size_().batch_size == ()
        assert TensorDict(a=torch.ones(B), b=1).auto_batch_size_().batch_size == ()
        assert TensorDict().auto_batch_size_().batch_size == ()

    def test_text_is_no_obstacle(self):
        td = TensorDict(a=torch.ones(B), n="text").auto_batch_size_()
        assert td.batch_size == (B,) and td["n"] == "text"


class TestDevice:
    def test_none_by_default(self):
        assert make().device is None and make()["b"].device is None

    @pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "meta", torch.device("meta")])
    def test_entries_are_moved(self, device):
        td = make(device=device)
        assert td.device == td["b"].device == td["b", "d"].device == torch.device(device)
        assert all(x.device == torch.device(device) for x in leaves(td).values())

    def test_no_copy_where_the_device_is_right(self):
        x = torch.ones(B)
        assert TensorDict({"x": x}, [B], device="cpu")["x"] is x

    def test_entries_set_later_are_moved(self):
        td = make(device="meta")
        td["z"] = torch.ones(B, T)
        td["n"] = {"m": torch.ones(B, T)}
        td["q", "r"] = torch.ones(B, T)
        td["s"] = TensorDict({"t": torch.ones(B, T)}, [B, T])
        for key in ("z", ("n", "m"), ("q", "r"), ("s", "t")):
            assert td[key].device.type == "meta"
        for key in ("n", "q", "s"):
            assert td[key].device == torch.device("meta")

    def test_a_container_of_another_device_is_copied(self):
        td = make(device="meta")
        inner = TensorDict({"t": torch.ones(B, T)}, [B, T], device="cpu")
        td["s"] = inner
        assert inner.device == inner["t"].device == torch.device("cpu")
        assert td["s"].device == td["s", "t"].device == torch.device("meta")

    def test_without_a_device_entries_may_be_mixed(self):
        td = make()
        td["z"] = torch.ones(B, T, device="meta")
        assert td.device is None and td["z"].device.type == "meta" and td["a"].device.type == "cpu"

    def test_unknown_device(self):
        with pytest.raises(RuntimeError):
            TensorDict({"x": torch.ones(B)}, [B], device="nowhere")

    def test_read_only(self):
        td = make(device="cpu")
        with pytest.raises((RuntimeError, AttributeError), match="to"):
            td.device = "meta"
        assert td.device == torch.device("cpu")

    def test_clear_device(self):
        td = make(device="cpu")
        assert td.clear_device_() is td
        assert td.device is None and td["b"].device is None and td["b", "d"].device is None

    def test_auto_device(self):
        assert make().auto_device_().device == torch.device("cpu")
        mixed = make()
        mixed["z"] = torch.ones(B, T, device="meta")
        assert mixed.auto_device_().device is None

    def test_to(self):
        td = make()
        moved = td.to("meta")
        assert moved.device == moved["b"].device == moved["a"].device == torch.device("meta")
        assert td.device is None and td["a"].device.type == "cpu"
        on_cpu = make(device="cpu")
        assert on_cpu.to("cpu") is on_cpu and on_cpu.cpu() is on_cpu
        assert td.to("cpu") is not td and td.cpu().device == torch.device("cpu")

    def test_lazy_stack_device(self):
        assert lazy_stack([make(device="cpu"), make(device="cpu")]).device == torch.device("cpu")
        assert lazy_stack([make(), make()]).device is None


class TestNamesAndLock:
    def test_names(self):
        td = make(names=["x", "y"])
        assert td.names == td["b"].names == td["b", "d"].names == ["x", "y"]
        assert make(names=[None, "y"]).names == [None, "y"]
        assert make().names == [None, None]

    @pytest.mark.parametrize("names", [["x"], ["x", "y", "z"], ["x", "x"]])
    def test_bad_names(self, names):
        with pytest.raises((ValueError, RuntimeError)):
            make(names=names)

    def test_lock(self):
        td = make(lock=True)
        assert td.is_locked and td["b"].is_locked and td["b", "d"].is_locked
        assert not make().is_locked and not make(lock=False).is_locked


NESTED = {"a": torch.ones(B, T), "b": {"c": torch.zeros(B, 4)}}


class TestFromDict:
    @pytest.mark.parametrize(
        "build", [TensorDict.from_dict, from_dict, TensorDict.from_any, from_any]
    )
    def test_nested(self, build):
        td = build(NESTED)
        assert set(leaves(td)) == {"a", ("b", "c")} and td.batch_size == ()

    @pytest.mark.parametrize(
        "kwargs, batch, inner",
        [
            ({}, (), ()),
            ({"batch_size": [B]}, (B,), (B,)),
            ({"auto_batch_size": True}, (B,), (B, 4)),
            ({"auto_batch_size": True, "batch_dims": 1}, (B,), (B,)),
            ({"batch_dims": 1}, (B,), (B,)),
            ({"auto_batch_size": False}, (), ()),
        ],
        ids=str,
    )
    def test_batch_size(self, kwargs, batch, inner):
        td = TensorDict.from_dict(NESTED, **kwargs)
        assert td.batch_size == batch and td["b"].batch_size == inner

    def test_device_and_names(self):
        td = TensorDict.from_dict(NESTED, batch_size=[B], device="meta", names=["x"])
        assert (
            td.device == torch.device("meta")
            and td.names == ["x"]
            and td["a"].device.type == "meta"
        )

    def test_values(self):
        assert TensorDict.from_dict({"a": 1, "s": "text"}).to_dict() == {
            "a": torch.tensor(1),
            "s": "text",
        }

    def test_instance(self):
        td = make().from_dict_instance({"a": torch.ones(B, T, A)}, batch_size=[B])
        assert type(td) is TensorDict and td.batch_size == (B,) and list(td.keys()) == ["a"]

    def test_mismatch(self):
        with pytest.raises(RuntimeError, match="a"):
            TensorDict.from_dict(NESTED, batch_size=[7])

    def test_round_trip(self):
        td = make()
        back = TensorDict.from_dict(td.to_dict(), batch_size=td.batch_size)
        assert set(leaves(back)) == set(leaves(td)) and (back == td).all()


class TestFromOthers:
    @pytest.mark.parametrize(
        "build", [TensorDict.from_any, from_any, TensorDict.from_namedtuple, from_namedtuple]
    )
    def test_namedtuple(self, build):
        td = build(Pair(torch.ones(B), torch.zeros(T)))
        assert set(td.keys()) == {"first", "second"} and td["second"].shape == (T,)

    def test_namedtuple_batch_size(self):
        pair = Pair(torch.ones(B, T), torch.zeros(B, T))
        assert from_namedtuple(pair, batch_size=[B]).batch_size == (B,)
        assert from_namedtuple(pair, auto_batch_size=True).batch_size == (B, T)

    def test_namedtuple_round_trip(self):
        td = TensorDict(a=torch.ones(B), b={"c": torch.zeros(T)})
        named = td.to_namedtuple()
        assert torch.equal(named.a, td["a"]) and torch.equal(named.b.c, td["b", "c"])
        assert set(leaves(from_namedtuple(named))) == {"a", ("b", "c")}

    @pytest.mark.parametrize("build", [TensorDict.from_any, from_any, TensorDict.from_dataclass])
    def test_dataclass(self, build):
        td = build(Point(torch.ones(B), "text", {"y": torch.zeros(T)}))
        assert set(td.keys()) == {"x", "label", "inner"}
        assert td["label"] == "text" and td["inner", "y"].shape == (T,)

    def test_dataclass_becomes_a_tensorclass(self):
        point = from_dataclass(Point(torch.ones(B), "text", {"y": torch.zeros(T)}), batch_size=[])
        assert is_tensorclass(point) and point.batch_size == ()
        assert torch.equal(point.x, torch.ones(B)) and point.label == "text"

    def test_dataclass_batch_size(self):
        assert from_dataclass(Point(torch.ones(B), "text", {}), batch_size=[B]).batch_size == (B,)
        with pytest.raises(TypeError):
            from_dataclass(3)

    @pytest.mark.parametrize(
        "build", [TensorDict.from_any, from_any, TensorDict.from_tuple, from_tuple]
    )
    def test_tuple(self, build):
        td = build((torch.ones(B), (torch.zeros(T),)))
        assert td["0"].shape == (B,) and td["1", "0"].shape == (T,)

    def test_tuple_batch_size(self):
        assert from_tuple((torch.ones(B), torch.zeros(B)), batch_size=[B]).batch_size == (B,)

    def test_any_passes_leaves_and_containers_through(self):
        td, x = make(), torch.ones(B)
        assert from_any(td) is td and from_any(x) is x

    @pytest.mark.parametrize(
        "tree",
        [
            {"a": torch.ones(B), "b": {"c": torch.zeros(B)}},
            [torch.ones(B), torch.zeros(B)],
            (torch.ones(B), {"x": [torch.zeros(B), torch.ones(B)]}),
        ],
        ids=["dict", "list", "mixed"],
    )
    def test_pytree_round_trip(self, tree):
        from torch.utils._pytree import tree_flatten

        for td in (from_pytree(tree), TensorDict.from_pytree(tree, batch_size=[B])):
            leaves_in, spec_in = tree_flatten(tree)
            leaves_out, spec_out = tree_flatten(td.to_pytree())
            assert spec_in == spec_out
            assert all(torch.equal(x, y) for x, y in zip(leaves_in, leaves_out, strict=True))
        assert td.batch_size == (B,)

    @pytest.mark.parametrize("build", [TensorDict.fromkeys, fromkeys])
    def test_fromkeys(self, build):
        assert build(["a", "b"]).to_dict() == {"a": torch.tensor(0), "b": torch.tensor(0)}
        td = build(["a", ("b", "c")], torch.ones(B))
        assert set(leaves(td)) == {"a", ("b", "c")} and (td["b", "c"] == 1).all()


class TestMakeTensorDict:
    def test_dict_and_keywords(self):
        assert set(leaves(make_tensordict(NESTED))) == {"a", ("b", "c")}
        assert set(leaves(make_tensordict(a=torch.ones(B), b={"c": torch.ones(B)}))) == {
            "a",
            ("b", "c"),
        }
        assert set(make_tensordict({"a": torch.ones(B)}, b=torch.ones(T)).keys()) == {"a", "b"}

    @pytest.mark.parametrize(
        "kwargs, batch",
        [
            ({}, ()),
            ({"batch_size": [B]}, (B,)),
            ({"auto_batch_size": True}, (B,)),
            ({"batch_size": ()}, ()),
        ],
        ids=str,
    )
    def test_batch_size(self, kwargs, batch):
        assert make_tensordict(NESTED, **kwargs).batch_size == batch

    def test_positional_batch_size(self):
        assert make_tensordict(NESTED, [B]).batch_size == (B,)

    def test_device(self):
        td = make_tensordict(a=torch.ones(B, T), batch_size=[B], device="meta")
        assert td.device == torch.device("meta") and td["a"].device.type == "meta"


class TestMerge:
    def test_the_first_that_has_a_key_wins(self):
        one = TensorDict({"a": torch.ones(B), "n": {"x": torch.ones(B)}}, [B])
        two = TensorDict({"a": torch.zeros(B), "n": {"y": torch.zeros(B)}}, [B])
        merged = merge_tensordicts(one, two)
        assert set(merged.keys(True, True)) == {"a", ("n", "x"), ("n", "y")}
        assert merged["a"] is one["a"] and set(two["n"].keys()) == {"y"}

    def test_a_function_decides(self):
        one, two = TensorDict(a=1, b=1), TensorDict(a=2, b=2)
        assert merge_tensordicts(one, two, callback_exist=max)["a"] == 2
        merged = merge_tensordicts(one, two, callback_exist={"b": torch.add})
        assert merged["a"] == 1 and merged["b"] == 3
        with pytest.raises(RuntimeError, match="two"):
            merge_tensordicts(one)


class TestAutoBatchSizeOfSpecialEntries:
    def test_empty_containers_have_no_say(self):
        td = TensorDict({"a": torch.zeros(B, T), "e": {}, "f": {"g": {}}}, [B])
        assert td.auto_batch_size_().batch_size == (B, T)
        td = TensorDict(batch_size=[B, T])
        assert td.auto_batch_size_().batch_size == (B, T)
        assert td.auto_batch_size_(1).batch_size == (B,)

    def test_stacks_keep_theirs(self):
        td = TensorDict({"a": torch.zeros(B, T), "s": NonTensorStack("u", "v")}, [])
        assert td.auto_batch_size_().batch_size == (B,)
        part = TensorDict(x=torch.zeros(T), batch_size=[T])
        td = TensorDict({"a": torch.zeros(B, T), "l": lazy_stack([part, part])}, [B, T])
        assert td.auto_batch_size_(0).batch_size == () and td["l"].batch_size == (B, T)


def test_from_dict_instance_takes_the_batch_size_from_its_arguments():
    td = TensorDict(batch_size=[B], device="cpu")
    assert td.from_dict_instance({"a": torch.zeros(T)}).batch_size == ()


class TestFromAnyOfOtherThings:
    def test_structured_array(self):
        rows = np.array([(1, 2.0), (3, 4.0)], dtype=[("a", "i4"), ("b", "f8")])
        td = TensorDict.from_any({"r": rows})
        assert td["r"].batch_size == (2,) and td["r", "b"].tolist() == [2, 4]
        assert TensorDict.from_any(rows)["a"].tolist() == [1, 3]

    def test_a_tensor_is_a_pytree(self):
        leaf = torch.zeros(B)
        assert TensorDict.from_pytree(leaf) is leaf
