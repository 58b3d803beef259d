"""Common patterns of programs written for other containers."""

import numpy as np
import pytest
import torch

import raffia
from raffia import (
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    TensorDictParams,
    lazy_stack,
)
from tests.tensordict.invariants import sound
from tests.tensordict.kinds import apply_op, ops
from tests.tensordict.stored import nested_tensor


def rows():
    return TensorDict(a=torch.arange(3), s=["a", "b", "c"], d="x", batch_size=[3])


def stacked():
    return lazy_stack([TensorDict(a=torch.tensor(i), s=c, d="x") for i, c in enumerate("abc")])


both = pytest.mark.parametrize("make", [rows, stacked])


@both
def test_entries_set_in_a_block_that_changes_nothing(make):
    for op in ops(to=["cpu", make().to("cpu"), torch.int64, None], cpu=[()]):
        td = make().to("cpu")
        with apply_op(td, op) as inside:
            inside["b"] = torch.zeros(inside.batch_size)
        assert "b" in td.keys() and sound(td)


@both
def test_rows_are_written_from_arrays_and_lists(make):
    for value, index, want in [
        *[(value, 1, [0, 7, 2]) for value in (np.array(7), np.int64(7), np.array([7]), [7])],
        (np.array([7, 8]), np.array([0, 1]), [7, 8, 2]),
        ([7, 8], slice(0, 2), [7, 8, 2]),
        (np.array([7.0, 8.0]), [0, 2], [7, 1, 8]),
        (True, 0, [1, 1, 2]),
    ]:
        td = make().set_at_("a", value, index)
        assert td["a"].tolist() == want and td["a"].dtype == torch.int64


@both
@pytest.mark.parametrize("method", ["update_at_", "copy_at_"])
@pytest.mark.parametrize("locked", [False, True])
def test_rows_of_values_that_are_no_tensors(make, method, locked):
    td = make()
    td = td.lock_() if locked else td
    getattr(td, method)(TensorDict(a=5, s="n", d="m"), 1)
    assert td["a"].tolist() == [0, 5, 2]
    assert td["s"] == ["a", "n", "c"] and td["d"] == ["x", "m", "x"] and sound(td)
    getattr(td, method)(TensorDict(a=[6, 7], s=["o", "p"], d="q", batch_size=[2]), slice(0, 2))
    assert td["s"] == ["o", "p", "c"] and td["d"] == ["q", "q", "x"] and sound(td)
    td.update_at_({"s": "last", "a": np.array([1])}, slice(2, 3))
    assert td["s"] == ["o", "p", "last"] and td["a"].tolist() == [6, 7, 1]


def test_one_row_into_the_rows_of_a_mask():
    td = stacked()
    td[torch.tensor([True, False, True])] = TensorDict(a=[5], s=["n"], d="m", batch_size=[1])
    assert td["a"].tolist() == [5, 1, 5] and td["s"] == ["n", "b", "n"] and sound(td)
    td[torch.tensor([False, True, False])] = TensorDict(a=6, s="k", d="m")
    assert td["a"].tolist() == [5, 6, 5] and td["s"] == ["n", "k", "n"]
    with pytest.raises(RuntimeError, match="batch size"):
        td[:2] = TensorDict(a=[1, 2, 3], batch_size=[3])


def sized(size):
    inner = TensorDict(b=torch.ones(2, 3), batch_size=size)
    return TensorDict(a=torch.zeros(2, 3), n=inner, s="x", batch_size=size)


def test_comparisons_of_different_batch_sizes():
    for one, other in ((sized([2]), sized([])), (sized([]), sized([2]))):
        equal = one == other
        assert equal.batch_size == (2,) and equal.all() and sound(equal)
        assert not (one != other).any()
    equal = TensorDict(a=torch.zeros(2, 3), batch_size=[2]) == TensorDict(a=torch.zeros(3))
    assert equal.batch_size == (2,) and equal["a"].shape == (2, 3)
    plain = TensorDict(a=torch.arange(3), s=["a", "b", "c"], d="x")
    assert (stacked() == plain).batch_size == (3,)
    other = TensorDict(a=torch.zeros(2, 1), batch_size=[2])
    assert (TensorDict(a=torch.zeros(3)) == other)["a"].shape == (2, 3)
    two, rows = TensorDict(batch_size=[2]), TensorDict(a=torch.zeros(2, 3), batch_size=[2])
    for one, other, match in [
        (two, TensorDict(batch_size=[2, 3]), "can't be compared"),
        (two, TensorDict(batch_size=[3]), "can't be compared"),
        (TensorDict(a=torch.zeros(5, 2, 3)), rows, "entry 'a' has the shape"),
    ]:
        with pytest.raises(RuntimeError, match=match):
            one == other  # noqa: B015


def test_to_with_a_batch_size():
    with pytest.raises(TypeError, match="batch_size"):
        stacked().to(torch.float64, batch_size=[3])
    params = TensorDictParams(TensorDict(a=torch.zeros(3, 4), batch_size=[3], names=["m"]))
    for size, names in (([], []), ([3, 4], ["m", None])):
        out = params.to(torch.float64, batch_size=size)
        assert type(out) is TensorDictParams and out.batch_size == tuple(size)
        assert out.names == names and out["a"].dtype == torch.float64
    assert params.batch_size == (3,) and params.to(batch_size=[]).batch_size == ()


def with_words(i):
    inner = TensorDict(t="y", b=torch.zeros(3), batch_size=[3])
    a = torch.full((3,), float(i))
    return TensorDict(a=a, s="x", w=["a", "b", "c"], n=inner, batch_size=[3])


def test_compiled_stacks_of_containers_that_hold_strings():
    torch._dynamo.reset()
    program = torch.compile(
        lambda x, y: torch.stack([x, y]).set("q", [["u"] * 3, ["v"] * 3]),
        fullgraph=True,
        backend="eager",
    )
    out = program(with_words(0), with_words(1))
    assert sound(out) and out["s"] == [["x"] * 3] * 2 and out["w"] == [["a", "b", "c"]] * 2
    assert out["n", "t"] == [["y"] * 3] * 2 and out["q"] == [["u"] * 3, ["v"] * 3]
    torch._dynamo.reset()
    program = torch.compile(lambda x, y: torch.stack([x, y]), fullgraph=True, backend="eager")
    kinds = []
    for mode in (False, True):  # the setting is respected
        with raffia.set_capture_non_tensor_stack(mode):
            kinds.append(type(program(with_words(0), with_words(1)).get("s")))
    assert kinds == [NonTensorStack, NonTensorData]


@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.parametrize(
    "options, num", [({"chunksize": 2}, 3), ({"num_chunks": 3}, 3), ({"chunksize": 0}, 5)]
)
def test_map_of_pieces(lazily, options, num, capsys):
    td = TensorDict(a=torch.arange(10).view(2, 5), batch_size=[2, 5])
    options = {"dim": 1, "num_workers": 0, "index_with_generator": lazily, **options}
    sizes = []
    out = td.map(lambda part: sizes.append(part.batch_size) or part + 1, pbar=True, **options)
    assert torch.equal(out["a"], td["a"] + 1) and len(sizes) == num
    assert capsys.readouterr().err.endswith(f"{num - 1}/{num}\rmap: {num}/{num}\n")


class Typed(TensorClass):
    b: torch.Tensor


def of_rows(rows):
    inner = TensorDict(b=torch.ones(rows, 3), batch_size=[rows, 3])
    return TensorDict(a=torch.zeros(rows), n=inner, batch_size=[rows])


def test_update_accepts_entries_in_both_forms():
    for source in ({"a": 1, "b": 2}, TensorDict(a=1, b=2)):
        td = TensorDict(c=0)
        assert td.update(source, b=3, d=4) is td
        assert td.to_dict() == {"c": 0, "a": 1, "b": 3, "d": 4} and list(source.keys()) == [
            "a",
            "b",
        ]
        assert td.update_(source, b=5) is td and td["b"] == 5 and td["a"] == 1
    point = lazy_stack([TensorDict(a=0), TensorDict(a=1)]).update({"a": torch.ones(2)}, b="text")
    assert point["a"].tolist() == [1, 1] and point[0]["b"] == "text"


def test_update_with_the_batch_size():
    td = of_rows(2)
    inner = td["n"]
    td.update(of_rows(4), update_batch_size=True)
    assert td.batch_size == (4,) and td["n"] is inner and inner.batch_size == (4, 3) and sound(td)
    td = of_rows(2)
    td.update(of_rows(2)[:, None][:, [0]], keys_to_update=["a", "n"], update_batch_size=True)
    assert td.batch_size == (2, 1) and sound(td)
    td = of_rows(2).set("other", torch.zeros(2))
    with pytest.raises(RuntimeError, match="other"):
        td.update(of_rows(4), update_batch_size=True)
    assert td.batch_size == (2,) and td["a"].shape == (2,) and sound(td)
    td = of_rows(2).set("t", Typed(b=torch.ones(2), batch_size=[2]))
    td.update(of_rows(4).set("t", Typed(b=torch.ones(4), batch_size=[4])), update_batch_size=True)
    assert td["t"].batch_size == td["t"].b.shape == (4,) and sound(td)
    td = lazy_stack([of_rows(2), of_rows(2)], 0)
    td.update(lazy_stack([of_rows(4), of_rows(4)], 0), update_batch_size=True)
    assert td.batch_size == (2, 4) and td["n"].batch_size == (2, 4, 3) and sound(td)
    td.update(of_rows(4), update_batch_size=True)
    assert td.batch_size == (4,) and td["n"].batch_size == (4, 3) and sound(td)
    with pytest.raises(RuntimeError, match="can't have the batch size"):
        td.update(TensorDict(a=1), update_batch_size=True)


def test_batch_sizes_and_names_of_nested_stacks():
    def nested(*sizes):
        rows = lazy_stack([TensorDict(b=torch.zeros(n, 4)) for n in sizes])
        return TensorDict(rows=rows, batch_size=[2], names=["t"])

    td = nested(3, 3)
    td.batch_size = [2, 3]
    assert td["rows"].batch_size == (2, 3) and td["rows"].names == ["t", None] and sound(td)
    td = nested(3, 2)
    with pytest.raises(RuntimeError, match="b"):
        td.batch_size = [2, 3]
    assert td.batch_size == td["rows"].batch_size == (2,) and sound(td)
    assert {member.batch_size for member in td["rows"].tensordicts} == {()}
    stack = lazy_stack([of_rows(2), of_rows(2)], 1)
    locked = torch.vmap(lambda row: row)(stack.clone().lock_())
    assert locked.batch_size == (2, 2) and sound(locked)
    stack.names = ["r", "t"]
    both = torch.stack([stack, stack.clone()], 0)
    assert both.names == [None, "r", "t"] and sound(both)
    params = TensorDictParams(TensorDict(a=torch.zeros(2)))
    assert TensorDictParams(params)["a"] is params["a"]


# ------------------------------------------------------------------- nested tensors as entries


def strided():
    return nested_tensor([torch.zeros(2, 3), torch.ones(4, 3)])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_entries():
    td = TensorDict({"a": strided(), "n": {"b": strided()}}, [2])
    td["c"] = strided()
    td.set("d", strided(), inplace=True).set_("d", strided())
    td.update({"e": strided()})
    assert [row["a"].shape for row in td] == [(2, 3), (4, 3)] == [row["n", "b"].shape for row in td]
    assert td[1]["e"].sum() == 12 and td.zero_()["c"][1].sum() == 0
    assert "shape=torch.Size([2, -1, 3])" in repr(td)
    for change in (
        *(lambda td: td.clone(), lambda td: td.to(torch.float32), lambda td: td.apply(torch.clone)),
        *(lambda td: td.flatten_keys().unflatten_keys(), lambda td: TensorDict(td.to_dict(), [2])),
        lambda td: TensorDict(td.to_dict(), device="cpu").auto_batch_size_(),
    ):
        out = change(TensorDict({"a": strided().double(), "n": {"b": strided()}}, [2]))
        assert out.batch_size == out["n"].batch_size == (2,)
        assert [row["a"].shape for row in out.unbind()] == [(2, 3), (4, 3)]
    for size in ([3], [2, 2], [2, 4]):
        with pytest.raises(RuntimeError, match=r"shape torch.Size\(\[2, -1, 3\]\) for key 'a'"):
            TensorDict({"a": strided()}, size)
        td = TensorDict(batch_size=size)
        for put in (td.set, td.__setitem__, td.setdefault):
            with pytest.raises(RuntimeError, match="for key 'a'"):
                put("a", strided())
        with pytest.raises(RuntimeError, match="for key 'a'"):
            td.update({"a": strided()})
