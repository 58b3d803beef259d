"""Entries that are not tensors: text, objects, None, lists of text."""

import contextlib
import copy
import json
import pickle
import warnings

import pytest
import torch
from torch.testing import assert_close as tensors_close

from raffia import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    capture_non_tensor_stack,
    is_leaf_nontensor,
    is_non_tensor,
    is_tensor_collection,
    lazy_stack,
    list_to_stack,
    make_tensordict,
    set_capture_non_tensor_stack,
    set_list_to_stack,
)


class Opaque:
    """Something with no tensor form; equal only to itself."""


def words(**more):
    """Batch of 3: a tensor, one shared text, one text per row."""
    return TensorDict(x=torch.arange(3.0), s="hi", w=["p", "q", "r"], batch_size=[3], **more)


@contextlib.contextmanager
def quietly(option, value):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the option may announce its own end
        with option(value):
            yield


class TestStore:
    @pytest.mark.parametrize("value", ["text", "", b"raw", None, object, len, {1, 2}, Opaque()])
    def test_kept_as_it_was(self, value):
        td = TensorDict(k=value, batch_size=[2])
        assert td["k"] is value or td["k"] == value
        assert isinstance(td.get("k"), NonTensorData)
        assert td.get("k").batch_size == torch.Size([2])

    def test_identity_of_an_object(self):
        o = Opaque()
        td = TensorDict(o=o, batch_size=[2])
        assert td["o"] is o
        assert td.get("o").data is o
        assert td[0]["o"] is o
        assert td.copy()["o"] is o
        assert td.to("cpu")["o"] is o

    @pytest.mark.parametrize(
        "how", ["init", "item", "set", "update", "set_non_tensor", "setdefault"]
    )
    def test_every_door(self, how):
        td = TensorDict({"k": "v"} if how == "init" else {}, batch_size=[2])
        if how == "item":
            td["k"] = "v"
        elif how == "set":
            assert td.set("k", "v") is td
        elif how == "update":
            td.update({"k": "v"})
        elif how == "set_non_tensor":
            assert td.set_non_tensor("k", "v") is td
        elif how == "setdefault":
            assert td.setdefault("k", "v").data == "v"
            assert td.setdefault("k", "other").data == "v"
        assert td["k"] == "v"
        assert td.get("k").batch_size == torch.Size([2])

    def test_numbers_become_tensors(self):
        td = TensorDict(b=True, i=1, f=2.5, li=[1, 2, 3])
        assert td["b"].dtype == torch.bool and td["i"].dtype == torch.int64
        assert td["f"].dtype == torch.get_default_dtype()
        assert td["li"].tolist() == [1, 2, 3]

    def test_set_non_tensor_forces_what_would_be_a_tensor(self):
        td = TensorDict(batch_size=[3])
        td.set_non_tensor("n", 4)
        td.set_non_tensor(("deep", "d"), {"a": 1})
        assert td["n"] == 4 and isinstance(td["n"], int)
        assert td["deep", "d"] == {"a": 1}
        assert isinstance(td["deep"], TensorDict)
        assert td["deep"].batch_size == torch.Size([3])

    def test_set_non_tensor_keeps_a_list_whole(self):
        td = TensorDict(batch_size=[3]).set_non_tensor("l", ["a", "b"])
        assert td["l"] == ["a", "b"]
        assert td[0]["l"] == ["a", "b"]

    def test_get_non_tensor(self):
        td = words()
        assert td.get_non_tensor("s") == "hi"
        assert td.get_non_tensor("w") == ["p", "q", "r"]
        assert td.get_non_tensor("no", default=5) == 5
        assert td.get_non_tensor("no", 5) == 5
        with pytest.raises(KeyError, match="no"):
            td.get_non_tensor("no")

    def test_is_non_tensor(self):
        td = words()
        assert td.is_non_tensor("s") and td.is_non_tensor("w") and not td.is_non_tensor("x")
        assert is_non_tensor(td.get("s")) and is_non_tensor(td.get("w"))
        assert not is_non_tensor(td) and not is_non_tensor("hi") and not is_non_tensor(td["x"])
        assert is_tensor_collection(td.get("s")) and is_tensor_collection(td.get("w"))

    def test_none_is_an_entry(self):
        td = TensorDict(n=None, batch_size=[2])
        assert "n" in td.keys() and "n" in td
        assert td["n"] is None
        assert td.get("n").data is None
        assert td.to_dict() == {"n": None}

    def test_get_of_a_missing_key(self):
        assert words().get("no") is None
        assert words().get("no", "dflt") == "dflt"

    def test_a_dict_is_a_nested_container(self):
        td = TensorDict(d={"a": "x"}, batch_size=[2])
        assert isinstance(td["d"], TensorDict) and td["d", "a"] == "x"

    def test_device_of_the_entry_follows(self):
        td = words()
        assert td.get("s").device is None
        assert td.to("cpu").get("s").device == torch.device("cpu")
        assert words(device="cpu").get("s").device == torch.device("cpu")

    def test_make_tensordict_and_from_dict(self):
        assert make_tensordict(s="a", x=torch.zeros(2))["s"] == "a"
        td = TensorDict.from_dict({"s": "a", "w": ["u", "v"]}, batch_size=[2])
        assert td.to_dict() == {"s": "a", "w": ["u", "v"]}
        td = TensorDict.from_dict({"s": "a", "x": torch.zeros(3)}, auto_batch_size=True)
        assert td.batch_size == torch.Size([3]) and td.get("s").batch_size == torch.Size([3])


class TestLists:
    def test_list_of_text_is_one_per_row(self):
        td = words()
        assert isinstance(td.get("w"), NonTensorStack)
        assert td["w"] == ["p", "q", "r"] and isinstance(td["w"], list)
        assert [td[i]["w"] for i in range(3)] == ["p", "q", "r"]
        assert isinstance(td[0].get("w"), NonTensorData)

    def test_without_batch(self):
        td = TensorDict(w=["p", "q"])
        assert isinstance(td.get("w"), NonTensorStack)
        assert td.get("w").batch_size == torch.Size([2]) and td.batch_size == torch.Size([])

    @pytest.mark.parametrize(
        "value", [[1, "y"], [None, "a"], [["a", "b"], ["c", "d"]], [{"k": 1}, {"k": 2}]]
    )
    def test_mixed_lists(self, value):
        td = TensorDict(w=value, batch_size=[2])
        assert isinstance(td.get("w"), NonTensorStack)
        assert td.get("w").tolist() == value

    def test_nested_list_is_two_dimensional(self):
        td = TensorDict(w=[["a", "b", "c"], ["d", "e", "f"]], batch_size=[2, 3])
        assert td.get("w").batch_size == torch.Size([2, 3])
        assert td[1, 2]["w"] == "f"
        assert td[:, 1]["w"] == ["b", "e"]
        assert td[1]["w"] == ["d", "e", "f"]

    def test_wrong_length(self):
        with pytest.raises(RuntimeError, match="batch dimension mismatch.*'w'"):
            TensorDict(w=["p", "q"], batch_size=[3])

    def test_tuple_of_text_is_one_value(self):
        td = TensorDict(w=("p", "q"), batch_size=[2])
        assert isinstance(td.get("w"), NonTensorData)
        assert list(td["w"]) == ["p", "q"]
        assert list(td[0]["w"]) == ["p", "q"]

    def test_list_to_stack_option(self):
        assert list_to_stack() is True
        with quietly(set_list_to_stack, False):
            assert list_to_stack() is False
            td = TensorDict(w=["p", "q"], batch_size=[2])
            assert isinstance(td.get("w"), NonTensorData)
            assert list(td["w"]) == ["p", "q"]
            assert TensorDict(i=[1, 2], batch_size=[2])["i"].tolist() == [1, 2]
        assert list_to_stack() is True
        with set_list_to_stack(True):
            assert isinstance(TensorDict(w=["p", "q"], batch_size=[2]).get("w"), NonTensorStack)

    def test_assigning_into_the_list_changes_the_entry(self):
        td = words()
        got = td["w"]
        got[1] = "new"
        assert td["w"] == ["p", "new", "r"]
        assert td[1]["w"] == "new"


class TestIndexing:
    def test_shared_value(self):
        td = words()
        assert td[0]["s"] == "hi" and td[0].get("s").batch_size == torch.Size([])
        assert td[1:]["s"] == "hi" and td[1:].get("s").batch_size == torch.Size([2])
        assert td[None].get("s").batch_size == torch.Size([1, 3])

    @pytest.mark.parametrize(
        ("index", "expected"),
        [
            (slice(1, None), ["q", "r"]),
            (slice(None, None, 2), ["p", "r"]),
            ([2, 0], ["r", "p"]),
            (torch.tensor([2, 0]), ["r", "p"]),
            (torch.tensor([True, False, True]), ["p", "r"]),
            (range(1, 3), ["q", "r"]),
            (-1, "r"),
            (None, [["p", "q", "r"]]),
            (Ellipsis, ["p", "q", "r"]),
        ],
    )
    def test_one_per_row(self, index, expected):
        got = words()[index]
        assert got["w"] == expected
        assert got.get("w").batch_size == got.batch_size

    def test_two_dimensions(self):
        td = TensorDict(w=[["a", "b", "c"], ["d", "e", "f"]], batch_size=[2, 3])
        assert td[..., 0]["w"] == ["a", "d"]
        assert td[[1, 0]]["w"] == [["d", "e", "f"], ["a", "b", "c"]]
        mask = torch.tensor([[True, False, True], [False, False, False]])
        assert td[mask]["w"] == ["a", "c"]
        assert td.masked_select(mask)["w"] == ["a", "c"]
        assert td.gather(1, torch.zeros(2, 1, dtype=torch.long))["w"] == [["a"], ["d"]]

    def test_assign_a_row(self):
        td = words()
        td[0] = TensorDict(x=torch.tensor(9.0), s="other", w="Q")
        assert td["s"] == ["other", "hi", "hi"]
        assert isinstance(td.get("s"), NonTensorStack)
        assert td["w"] == ["Q", "q", "r"]
        assert td["x"].tolist() == [9.0, 1.0, 2.0]

    def test_assign_a_dict(self):
        td = words()
        td[1] = {"x": torch.tensor(9.0), "s": "k", "w": "R"}
        assert td["s"] == ["hi", "k", "hi"] and td["w"] == ["p", "R", "r"]

    def test_set_at(self):
        td = words()
        td.set_at_("w", "Z", 2)
        td.set_at_("s", "Z", 2)
        assert td["w"] == ["p", "q", "Z"] and td["s"] == ["hi", "hi", "Z"]

    def test_changing_a_row_copy_leaves_the_source(self):
        td = words()
        td[0]["w"] = "zz"
        assert td["w"] == ["p", "q", "r"]

    def test_iteration(self):
        assert [r["w"] for r in words()] == ["p", "q", "r"]
        assert [r["s"] for r in words()] == ["hi"] * 3
        assert [r["w"] for r in words().unbind(0)] == ["p", "q", "r"]
        assert [r["w"] for r in words().split(2)] == [["p", "q"], ["r"]]
        assert [r.get("s").batch_size for r in words().split(2)] == [
            torch.Size([2]),
            torch.Size([1]),
        ]


class TestShape:
    def test_shared_value_keeps_one_datum(self):
        td = TensorDict(s="a", batch_size=[2, 3])
        assert td.transpose(0, 1).get("s").batch_size == torch.Size([3, 2])
        assert td.permute(1, 0)["s"] == "a"
        assert td.flatten()["s"] == "a" and td.flatten().get("s").batch_size == torch.Size([6])
        assert td.view(3, 2)["s"] == "a"

    @pytest.mark.parametrize(
        ("op", "expected"),
        [
            (lambda t: t.reshape(6), ["a", "b", "c", "d", "e", "f"]),
            (lambda t: t.reshape(3, 2), [["a", "b"], ["c", "d"], ["e", "f"]]),
            (lambda t: t.view(6), ["a", "b", "c", "d", "e", "f"]),
            (lambda t: t.transpose(0, 1), [["a", "d"], ["b", "e"], ["c", "f"]]),
            (lambda t: t.permute(1, 0), [["a", "d"], ["b", "e"], ["c", "f"]]),
            (lambda t: t.unsqueeze(1), [[["a", "b", "c"]], [["d", "e", "f"]]]),
            (lambda t: t.unsqueeze(0).squeeze(0), [["a", "b", "c"], ["d", "e", "f"]]),
            (lambda t: t.flatten(0, 1), ["a", "b", "c", "d", "e", "f"]),
            (lambda t: t.expand(1, 2, 3), [[["a", "b", "c"], ["d", "e", "f"]]]),
        ],
    )
    def test_grid(self, op, expected):
        td = TensorDict(
            w=[["a", "b", "c"], ["d", "e", "f"]], x=torch.zeros(2, 3, 4), batch_size=[2, 3]
        )
        got = op(td)
        assert got["w"] == expected
        assert got.get("w").batch_size == got.batch_size

    def test_expand_repeats_the_rows(self):
        td = words().expand(2, 3)
        assert td["w"] == [["p", "q", "r"]] * 2
        assert td[1, 0]["s"] == "hi"

    @pytest.mark.parametrize("dim", [0, 1, -1])
    def test_unsqueeze_and_back(self, dim):
        td = words()
        back = td.unsqueeze(dim).squeeze(dim)
        assert back["w"] == td["w"] and back[0]["s"] == "hi"
        assert back.get("s").batch_size == torch.Size([3])

    def test_unbind_and_stack_back(self):
        td = words()
        back = torch.stack(list(td.unbind(0)))
        assert back["w"] == ["p", "q", "r"]
        assert [r["s"] for r in back] == ["hi"] * 3


class TestStack:
    def test_unlike_data(self):
        s = torch.stack([words(), words().set("s", "ho")])
        assert isinstance(s.get("s"), NonTensorStack)
        assert s.get("s").batch_size == torch.Size([2, 3])
        assert s.get("s").tolist() == [["hi"] * 3, ["ho"] * 3]
        assert s[0]["s"] == "hi" and s[1]["s"] == "ho"
        assert s[:, 0]["s"] == ["hi", "ho"] and s[0, 1]["w"] == "q"

    def test_equal_data_gives_a_stack_of_the_full_shape(self):
        s = torch.stack([words(), words()])
        assert s.get("s").batch_size == torch.Size([2, 3])
        assert s.get("s").tolist() == [["hi"] * 3] * 2
        assert s.get("s").data == "hi"  # one value after all
        assert s[1]["s"] == "hi"

    def test_bare_entries(self):
        s = torch.stack([NonTensorData("a"), NonTensorData("b")])
        assert isinstance(s, NonTensorStack) and s.tolist() == ["a", "b"]
        s = torch.stack([NonTensorData("a"), NonTensorData("a")])
        assert s.tolist() == ["a", "a"]

    def test_cat(self):
        c = torch.cat([words(), words().set("s", "ho")])
        assert c.get("s").batch_size == torch.Size([6])
        assert c["w"] == ["p", "q", "r"] * 2
        assert c.get("s").tolist() == ["hi"] * 3 + ["ho"] * 3
        assert torch.cat([words(), words()])["s"] == "hi"

    def test_lazy_stack(self):
        a, b = words(), words().set("s", "ho")
        lz = lazy_stack([a, b])
        assert isinstance(lz, LazyStackedTensorDict)
        assert isinstance(lz.get("s"), NonTensorStack)
        assert lz.get("s").tolist() == [["hi"] * 3, ["ho"] * 3]
        assert lz[1]["s"] == "ho" and lz[:, 2]["w"] == ["r", "r"]

    def test_setting_a_list_through_a_lazy_stack(self):
        lz = lazy_stack([TensorDict(x=torch.zeros(2)), TensorDict(x=torch.zeros(3))])
        lz["s"] = ["a", "b"]
        assert [t["s"] for t in lz.tensordicts] == ["a", "b"]
        lz["s"] = "c"
        assert [t["s"] for t in lz.tensordicts] == ["c", "c"]

    def test_where(self):
        a = TensorDict(s="a", x=torch.zeros(2), batch_size=[2])
        b = TensorDict(s="b", x=torch.ones(2), batch_size=[2])
        got = torch.where(torch.tensor([True, False]), a, b)
        assert got["x"].tolist() == [0.0, 1.0]
        assert got.get("s").tolist() == ["a", "b"]

    def test_capture_option(self):
        assert capture_non_tensor_stack() is False
        with quietly(set_capture_non_tensor_stack, True):
            assert capture_non_tensor_stack() is True
            one = torch.stack([NonTensorData("a"), NonTensorData("a")])
            assert isinstance(one, NonTensorData) and one.batch_size == torch.Size([2])
            assert torch.stack([words(), words()])["s"] == "hi"
            two = torch.stack([NonTensorData("a"), NonTensorData("b")])
            assert isinstance(two, NonTensorStack)
        assert capture_non_tensor_stack() is False
        with set_capture_non_tensor_stack(False):
            assert isinstance(torch.stack([NonTensorData("a")] * 2), NonTensorStack)


class TestClasses:
    def test_data(self):
        n = NonTensorData("a", batch_size=[2, 3])
        assert n.data == "a" and n.batch_size == n.shape == torch.Size([2, 3])
        assert n.tolist() == [["a"] * 3] * 2
        assert NonTensorData("a").tolist() == "a"
        assert len(n) == 2 and n.ndim == 2
        assert n[0].batch_size == torch.Size([3]) and n[0].data == "a"
        assert NonTensorData(data={"k": 1}).data == {"k": 1}
        assert n.to_dict() == "a"

    def test_data_is_not_copied_in(self):
        d = {"a": 1}
        assert NonTensorData(d).data is d

    def test_stack(self):
        s = NonTensorStack("a", "b")
        assert s.tolist() == ["a", "b"] and s.batch_size == torch.Size([2]) and len(s) == 2
        assert isinstance(s[0], NonTensorData) and s[0].data == "a"
        assert isinstance(s[0:1], NonTensorStack) and s[0:1].tolist() == ["a"]
        assert s[torch.tensor([1, 0])].tolist() == ["b", "a"]
        assert [e.data for e in s] == ["a", "b"]
        assert NonTensorStack(NonTensorData("a"), NonTensorData("b")).tolist() == ["a", "b"]

    def test_stack_from_list(self):
        assert NonTensorStack.from_list(["a", "b"]).tolist() == ["a", "b"]
        s = NonTensorStack.from_list([["a", "b", "c"], ["d", "e", "f"]])
        assert s.batch_size == torch.Size([2, 3])
        assert s.tolist() == [["a", "b", "c"], ["d", "e", "f"]]

    def test_stack_data_needs_one_value(self):
        assert NonTensorStack("a", "a").data == "a"
        with pytest.raises(AttributeError, match="tolist"):
            NonTensorStack("a", "b").data  # noqa: B018

    def test_maybe_to_stack(self):
        s = NonTensorData("a", batch_size=[2]).maybe_to_stack()
        assert isinstance(s, NonTensorStack) and s.tolist() == ["a", "a"]

    def test_cat_of_entries(self):
        c = torch.cat([NonTensorData("a", batch_size=[2]), NonTensorData("b", batch_size=[1])])
        assert c.tolist() == ["a", "a", "b"]

    def test_equality_is_elementwise(self):
        a, b = NonTensorData("a", batch_size=[2]), NonTensorData("b", batch_size=[2])
        assert (a == NonTensorData("a", batch_size=[2])).tolist() == [True, True]
        assert (a == b).tolist() == [False, False]
        assert bool(NonTensorData("a") == NonTensorData("a"))
        with pytest.raises(TypeError, match="unhashable"):
            hash(a)

    def test_update_in_place(self):
        n = NonTensorData("a", batch_size=[3])
        n.update_(NonTensorData("b", batch_size=[3]))
        assert n.data == "b"
        n.update(NonTensorData("c", batch_size=[3]))
        assert n.data == "c"
        n.data = "d"
        assert n.data == "d" and n.batch_size == torch.Size([3])
        s = NonTensorStack("a", "b")
        s.update(NonTensorStack("c", "d"))
        assert s.tolist() == ["c", "d"]

    def test_repr(self):
        assert repr(NonTensorData("a", batch_size=[3])) == (
            "NonTensorData(data=a, batch_size=torch.Size([3]), device=None)"
        )
        text = repr(NonTensorStack("a", "b"))
        assert text.startswith("NonTensorStack(") and "['a', 'b']" in text
        assert "batch_size=torch.Size([2])" in text

    @pytest.mark.parametrize("round_trip", [lambda v: pickle.loads(pickle.dumps(v)), copy.deepcopy])
    def test_copies(self, round_trip):
        n = round_trip(NonTensorData({"a": [1]}, batch_size=[2]))
        assert n.data == {"a": [1]} and n.batch_size == torch.Size([2])
        assert round_trip(NonTensorStack("a", "b")).tolist() == ["a", "b"]
        td = round_trip(words())
        assert (
            td["s"] == "hi" and td["w"] == ["p", "q", "r"] and td["x"].tolist() == [0.0, 1.0, 2.0]
        )


class TestKeys:
    def test_plain_keys_list_them_leaves_only_does_not(self):
        td = TensorDict(x=torch.zeros(2), s="a", n=TensorDict(t="u", y=torch.zeros(2)))
        assert set(td.keys()) == {"x", "s", "n"}
        assert set(td.keys(True)) == {"x", "s", "n", ("n", "t"), ("n", "y")}
        assert set(td.keys(leaves_only=True)) == {"x"}
        assert set(td.keys(True, True)) == {"x", ("n", "y")}
        assert ("n", "t") in td.keys(True)

    def test_is_leaf_nontensor_asks_for_them(self):
        td = TensorDict(x=torch.zeros(2), s="a", n=TensorDict(t="u", y=torch.zeros(2)))
        every = {"x", "s", ("n", "t"), ("n", "y")}
        assert set(td.keys(True, True, is_leaf=is_leaf_nontensor)) == every
        got = dict(td.items(True, True, is_leaf=is_leaf_nontensor))
        assert set(got) == every and got["s"].data == "a"
        assert len(list(td.values(True, True, is_leaf=is_leaf_nontensor))) == 4

    def test_items_and_values_give_the_entry(self):
        td = TensorDict(s="a")
        assert [(k, type(v)) for k, v in td.items()] == [("s", NonTensorData)]
        assert [v.data for v in td.values()] == ["a"]
        assert list(td.items(True, True)) == []

    def test_empty_or_not(self):
        assert not TensorDict(s="a").is_empty()
        assert TensorDict(s="a").filter_non_tensor_data().is_empty()

    def test_key_operations(self):
        td = TensorDict(s="a", n=TensorDict(t="u", y=torch.zeros(2)))
        assert td.select("s").to_dict() == {"s": "a"}
        assert "s" not in td.exclude("s") and td.exclude("s")["n", "t"] == "u"
        flat = td.flatten_keys(".")
        assert flat["n.t"] == "u" and flat.unflatten_keys(".")["n", "t"] == "u"
        td.rename_key_("s", "r")
        assert td["r"] == "a" and "s" not in td
        del td["r"]
        assert "r" not in td

    def test_pop(self):
        td = TensorDict(s="a", x=torch.zeros(2))
        popped = td.pop("s")
        assert (popped.data if is_non_tensor(popped) else popped) == "a"
        assert list(td.keys()) == ["x"]

    def test_filter(self):
        td = TensorDict(s="a", n=TensorDict(t="u", y=torch.zeros(2)))
        got = td.filter_non_tensor_data()
        assert set(got.keys(True)) == {"n", ("n", "y")}


class TestComputation:
    def test_apply_leaves_them_alone(self):
        seen = []

        def f(x):
            seen.append(type(x))
            return x + 1

        got = words().apply(f)
        assert got["x"].tolist() == [1.0, 2.0, 3.0]
        assert got["s"] == "hi" and got["w"] == ["p", "q", "r"]
        assert seen == [torch.Tensor]

    def test_named_apply_does_not_name_them(self):
        names = []
        TensorDict(s="a", n=TensorDict(t="u", y=torch.zeros(2))).named_apply(
            lambda k, v: names.append(k), nested_keys=True
        )
        assert names == [("n", "y")]

    def test_apply_can_be_asked_to_visit_them(self):
        seen = []
        words().apply(lambda v: seen.append(v) or v, is_leaf=is_leaf_nontensor)
        assert len(seen) == 3

    @pytest.mark.parametrize(
        "op",
        [
            lambda t: t + 1,
            lambda t: t + t,
            lambda t: -t,
            lambda t: t.clone(),
            lambda t: t.clone(False),
            lambda t: t.detach(),
            lambda t: t.data,
            lambda t: t.double(),
            lambda t: t.contiguous(),
            lambda t: t.to_tensordict(),
            torch.zeros_like,
            lambda t: t.clone().zero_(),
            lambda t: t.to("cpu"),
        ],
    )
    def test_carried_through(self, op):
        got = op(words())
        assert got["s"] == "hi" and got["w"] == ["p", "q", "r"]
        assert got.get("s").batch_size == torch.Size([3])

    def test_to_dict(self):
        got = words().to_dict()
        assert got["s"] == "hi" and got["w"] == ["p", "q", "r"]
        assert type(got["w"]) is list
        tensors_close(got["x"], torch.arange(3.0))
        nested = TensorDict(n=TensorDict(o=None, t="u")).to_dict()
        assert nested == {"n": {"o": None, "t": "u"}}

    def test_comparison(self):
        a, b = words(), words().set("s", "ho")
        assert (a == words()).all() and not (a == b).all()
        assert (a == b)["s"].tolist() == [False] * 3
        assert (a == b)["w"].tolist() == [True] * 3

    def test_vmap_carries_it(self):
        got = torch.vmap(lambda t: t.set("y", t["x"] + 1))(words().select("x", "s"))
        assert got["y"].tolist() == [1.0, 2.0, 3.0]


class TestUpdate:
    def test_update_replaces(self):
        td = words()
        td.update({"s": "new"})
        assert td["s"] == "new"
        td.update(TensorDict(s="newer", w=["1", "2", "3"], batch_size=[3]))
        assert td["s"] == "newer" and td["w"] == ["1", "2", "3"]

    def test_tensor_to_text_and_back(self):
        td = words()
        td["s"] = torch.zeros(3)
        assert isinstance(td["s"], torch.Tensor)
        td["s"] = "text"
        assert td["s"] == "text"

    def test_in_place_under_lock(self):
        td = words().lock_()
        with pytest.raises(RuntimeError, match="Cannot modify locked"):
            td["s"] = "no"
        with pytest.raises(RuntimeError, match="Cannot modify locked"):
            td.set_non_tensor("s", "no")
        td.set_("s", "one")
        assert td["s"] == "one"
        td.update_({"s": "two"})
        assert td["s"] == "two"
        td.update_(TensorDict(s="three", batch_size=[3]))
        assert td["s"] == "three"

    def test_clone_is_independent(self):
        td = words()
        other = td.clone()
        other.set_("s", "changed")
        other["w"][0] = "changed"
        assert td["s"] == "hi" and td["w"] == ["p", "q", "r"]

    def test_empty_keeps_nothing(self):
        assert list(words().empty().keys()) == []


class TestDisk:
    def test_memory_mapped_folder(self, tmp_path):
        words().memmap(tmp_path)
        back = TensorDict.load_memmap(tmp_path)
        assert back["s"] == "hi" and back["w"] == ["p", "q", "r"]
        assert isinstance(back.get("s"), NonTensorData) and isinstance(
            back.get("w"), NonTensorStack
        )

    def test_in_place_change_reaches_the_folder(self, tmp_path):
        td = words()
        td.memmap_(tmp_path)
        td.set_("s", "written")
        assert TensorDict.load_memmap(tmp_path)["s"] == "written"


class TestOursRepr:
    def test_entry_in_the_container(self):
        text = repr(TensorDict(s="hi", batch_size=[3]))
        assert text == (
            "TensorDict(\n"
            "    fields={\n"
            "        s: NonTensorData(data=hi, batch_size=torch.Size([3]), device=None)},\n"
            "    batch_size=torch.Size([3]),\n"
            "    device=None,\n"
            "    is_shared=False)"
        )


class TestOursJson:
    def test_to_dict_of_json_values_is_plain_json(self):
        td = TensorDict(s="a", n=TensorDict(w=["p", "q"], o=None))
        assert json.loads(json.dumps(td.to_dict())) == {"s": "a", "n": {"w": ["p", "q"], "o": None}}


def test_a_value_with_a_batch_size_bounds_the_one_that_is_found():
    td = TensorDict(a=torch.zeros(2, 3, 4), s=NonTensorData("x", batch_size=[2]))
    assert td.auto_batch_size_().batch_size == (2,)
    assert TensorDict(a=torch.zeros(2, 3), s="x").auto_batch_size_().batch_size == (2, 3)
    td = TensorDict(dict(a=torch.zeros(2, 3), n=dict(b=torch.zeros(2, 3, 5), s="x")), [2, 3])
    assert td.auto_batch_size_()["n"].batch_size == td["n"].get("s").batch_size == (2, 3)
