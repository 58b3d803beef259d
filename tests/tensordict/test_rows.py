"""Names beside the container's methods: groups, padding undone, JSON, what is printed."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raffia import (
    MetaData,
    NonTensorStack,
    TensorDict,
    TensorDictParams,
    collate,
    expand_as_right,
    expand_right,
    get_printoptions,
    group_by,
    is_bool,
    is_floating,
    is_inexact,
    is_integer,
    load,
    pad_sequence,
    set_printoptions,
    tensorclass,
    unpad_sequence,
    utils,
)
from raffia.utils import isin, remove_duplicates


def test_expand_right_adds_dimensions_at_the_end():
    x = torch.arange(6).view(2, 3)
    assert torch.equal(expand_right(x, (2, 3, 4)), x[..., None].expand(2, 3, 4))
    assert torch.equal(
        expand_as_right(x[:, :1], torch.zeros(2, 3, 5)), x[:, :1, None].expand(2, 3, 5)
    )
    assert expand_right(x, (2, 3)).data_ptr() == x.data_ptr()
    td = TensorDict(a=torch.ones(2, 7), batch_size=[2])
    assert expand_as_right(td, torch.zeros(2, 3)).batch_size == (2, 3)
    assert expand_as_right(td, torch.zeros(2, 3))["a"].shape == (2, 3, 7)
    assert expand_as_right(x, TensorDict(batch_size=[2, 3, 4])).shape == (2, 3, 4)
    with pytest.raises(RuntimeError, match="2 dimensions, more than the shape"):
        expand_right(x, (2,))
    with pytest.raises(RuntimeError, match="longer than the shape"):
        expand_as_right(TensorDict(batch_size=[2, 3]), torch.zeros(2))
    with pytest.raises(RuntimeError):
        expand_right(x, (3, 3))


def test_kinds_of_dtypes():
    values = [torch.zeros(1, dtype=d) for d in (torch.bool, torch.int8, torch.half, torch.cfloat)]
    assert [is_bool("k", v) for v in values] == [True, False, False, False]
    assert [is_integer("k", v) for v in values] == [False, True, False, False]
    assert [is_floating(v) for v in values] == [False, False, True, False]
    assert [is_inexact(v) for v in values] == [False, False, True, True]
    assert not is_inexact("a word")


@given(st.lists(st.integers(-2, 2), min_size=1, max_size=8), st.booleans())
def test_groups_are_what_masks_select(keys, words):
    n = len(keys)
    td = TensorDict(x=torch.arange(n), n=dict(y=torch.arange(2 * n).view(n, 2)), batch_size=[n])
    td["key"] = NonTensorStack(*[f"w{key}" for key in keys]) if words else torch.tensor(keys)
    values, groups = group_by(td, "key")
    told = values if words else values.tolist()
    assert told == sorted(set([f"w{key}" for key in keys] if words else keys))
    for value, group in zip(told, groups, strict=True):
        rows = [i for i, key in enumerate(keys) if (f"w{key}" if words else key) == value]
        assert group["x"].tolist() == rows and group.batch_size == (len(rows),)
        assert group["n", "y"].tolist() == td["n", "y"][rows].tolist()


def test_group_by_rows_of_a_tensor_and_what_it_refuses():
    td = TensorDict(k=torch.tensor([[1, 2], [0, 5], [1, 2]]), x=torch.arange(3), batch_size=[3])
    values, groups = group_by(td, "k")
    assert values.tolist() == [[0, 5], [1, 2]] and [g["x"].tolist() for g in groups] == [
        [1],
        [0, 2],
    ]
    with pytest.raises(ValueError, match="first batch dimension"):
        group_by(td[0], "x")
    with pytest.raises(KeyError, match="nearest|not found"):
        group_by(td, "y")
    td["n"] = TensorDict(batch_size=[3])
    with pytest.raises(TypeError, match="is a container"):
        group_by(td, "n")
    td["odd"] = NonTensorStack("a", 1, None)
    with pytest.raises(TypeError, match="hashed and sorted"):
        group_by(td, "odd")
    assert group_by(TensorDict(x=torch.zeros(0), batch_size=[0]), "x")[1] == ()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.sampled_from(["left", "right"]))
def test_unpad_undoes_pad(lengths, side):
    rows = [
        TensorDict(a=torch.rand(n, 2), n=dict(b=torch.arange(n)), batch_size=[n]) for n in lengths
    ]
    padded = pad_sequence(rows, return_mask=True, padding_side=side)
    for samples in (
        unpad_sequence(padded),
        unpad_sequence(padded.exclude("masks"), padded["masks", "a"]),
    ):
        assert samples.batch_size[0] == len(rows)
        for row, sample in zip(rows, samples.tensordicts, strict=True):
            assert sample.batch_size == row.batch_size and sample["n"].batch_size == row.batch_size
            assert (sample == row).all() and set(sample.keys()) == {"a", "n"}
    assert samples[0]["a"].untyped_storage().data_ptr() == padded["a"].untyped_storage().data_ptr()


def test_unpad_dimensions_of_the_entries_alone():
    rows = [TensorDict(a=torch.rand(2, n), b=torch.rand(2, n, 3), batch_size=[2]) for n in (1, 3)]
    padded = pad_sequence(rows, pad_dim=1, return_mask=True)
    for row, sample in zip(rows, unpad_sequence(padded, pad_dim=1).tensordicts, strict=True):
        assert sample.batch_size == (2,) and (sample == row).all()


def test_unpad_refuses_masks_that_do_not_fit():
    padded = TensorDict(a=torch.zeros(2, 3), batch_size=[2])
    with pytest.raises(ValueError, match="no entry 'masks'"):
        unpad_sequence(padded)
    with pytest.raises(ValueError, match=r"\(2, 2\).*needs \(2, 3\)"):
        unpad_sequence(padded, torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="gap in sample 1"):
        unpad_sequence(padded, torch.tensor([[True, True, False], [True, False, True]]))
    with pytest.raises(KeyError, match="no mask for the entry 'a'"):
        unpad_sequence(padded, TensorDict(batch_size=[2]))
    with pytest.raises(ValueError, match="but this container has none"):
        unpad_sequence(padded[0])


@pytest.mark.parametrize("lines", [False, True])
def test_json_records_come_back(tmp_path, lines):
    td = TensorDict(a=torch.arange(2), n=dict(b=torch.tensor([[0.5], [1.0]])), batch_size=[2])
    td["word"] = NonTensorStack("x", "y")
    td.to_json(tmp_path / "rows", separator=".", lines=lines)
    text = (tmp_path / "rows").read_text()
    records = [json.loads(line) for line in text.splitlines()] if lines else json.loads(text)
    assert records[1] == {"a": 1, "n.b": [1.0], "word": "y"}
    back = TensorDict.from_json(tmp_path / "rows", separator=".", lines=lines)
    assert (back == td).all() and back.batch_size == (2,)
    halves = TensorDict.from_json(tmp_path / "rows", lines=lines, dtype=torch.half)
    assert halves["a"].dtype == halves["n.b"].dtype == torch.half


def test_json_refusals_leave_the_file(tmp_path):
    path = tmp_path / "rows"
    path.write_text("[]")
    with pytest.raises(ValueError, match="separator='.'"):
        TensorDict(n=dict(a=1)).to_json(path)
    with pytest.raises(TypeError):
        TensorDict(a=object()).to_json(path)
    assert path.read_text() == "[]" and [p.name for p in tmp_path.iterdir()] == ["rows"]
    path.write_text('[{"a": 1}, {"b": 2}]')
    with pytest.raises(
        ValueError, match=r"record 1 has the fields \['b'\], but record 0 has \['a'\]"
    ):
        TensorDict.from_json(path)
    path.write_text('{"a": 1}')
    with pytest.raises(ValueError, match="does not hold a list of records"):
        TensorDict.from_json(path)


def test_from_schema(tmp_path):
    schema = {"obs": ([4], torch.uint8), ("next", "reward"): ([], torch.float32)}
    td = TensorDict.from_schema(schema, batch_size=[3])
    assert td["obs"].shape == (3, 4) and td["obs"].dtype == torch.uint8
    assert td["next", "reward"].shape == (3,) and td["next"].batch_size == (3,)
    td["obs"][0] = 1
    assert td["obs"].sum() == 4
    mapped = TensorDict.from_schema(schema, batch_size=[3], storage="memmap", prefix=tmp_path / "f")
    assert mapped.is_memmap() and mapped["obs"].shape == (3, 4)
    assert TensorDict.from_schema(schema, storage="shared").is_shared()
    with pytest.raises(ValueError, match="storage='h5' must be one of None"):
        TensorDict.from_schema(schema, storage="h5")
    with pytest.raises(TypeError, match="prefix"):
        TensorDict.from_schema(schema, prefix="a")


def test_collate_stacks_pads_and_nests():
    rows = [TensorDict(a=torch.ones(n), b=torch.arange(2), k=n) for n in (1, 3)]
    assert collate(rows).batch_size == (2,)
    out = collate(rows, pad_keys={"a": -1.0}, mask_key="m")
    assert out["a"].tolist() == [[1, -1, -1], [1, 1, 1]] and out["k"].tolist() == [1, 3]
    assert out["m", "a"].tolist() == [[True, False, False], [True, True, True]]
    nested = collate(rows, nested_keys=["a"])
    assert [row.tolist() for row in nested["a"].unbind()] == [[1], [1, 1, 1]]
    (pair, labels) = collate([(row, torch.tensor(7)) for row in rows])
    assert pair.batch_size == (2,) and labels.tolist() == [7, 7]
    assert collate([{"x": 1}, {"x": 2}])["x"].tolist() == [1, 2]
    assert collate(rows[0]) is rows[0]
    with pytest.raises(KeyError, match="sample 0 has no entry 'z'"):
        collate(rows, pad_keys={"z": 0.0})
    with pytest.raises(ValueError, match="mask_key"):
        collate(rows, mask_key="m")
    with pytest.raises(ValueError, match="in both pad_keys and nested_keys"):
        collate(rows, pad_keys={"a": 0.0}, nested_keys=["a"])
    with pytest.raises(ValueError, match="without batch dimensions"):
        collate([TensorDict(a=torch.ones(2), batch_size=[2])] * 2, pad_keys={"a": 0.0})
    with pytest.raises(ValueError, match="is already an entry of the samples"):
        collate(rows, pad_keys={"a": 0.0}, mask_key="b")


def test_meta_data_is_one_object_for_the_batch(tmp_path):
    config = {"lr": 0.1}
    td = TensorDict(a=torch.zeros(3), c=MetaData(config), batch_size=[3])
    assert td["c"] is config and td[0]["c"] is config and td.unsqueeze(0)["c"] is config
    assert type(td[1:].get("c")) is MetaData
    stacked = torch.stack([td, td])
    assert type(stacked.get("c")) is MetaData and stacked["c"] is config
    assert stacked.get("c").batch_size == (2, 3)
    other = TensorDict(a=torch.zeros(3), c=MetaData(dict(config)), batch_size=[3])
    assert type(torch.stack([td, other]).get("c")) is NonTensorStack
    td.memmap(tmp_path / "td")
    assert type(load(tmp_path / "td").get("c")) is MetaData and load(tmp_path / "td")["c"] == config
    with pytest.raises(TypeError, match="Expected data of type dict, got int"):
        MetaData[dict](1)
    assert MetaData[dict] is MetaData[dict] and issubclass(MetaData[dict], MetaData)


def test_meta_data_is_pickled():
    import pickle

    for entry in (MetaData("a", [2]), MetaData[str]("a", [2])):
        back = pickle.loads(pickle.dumps(entry))
        assert type(back) is type(entry) and back.data == "a" and back.batch_size == (2,)


@tensorclass
class Point:
    x: torch.Tensor
    tag: str = "a"


def test_what_has_no_memory_or_no_shape_yet_is_printed():
    lazy = TensorDict.from_module(torch.nn.LazyLinear(2))
    embedding = torch.nn.Embedding(3, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    sparse = TensorDict(a=torch.eye(3).to_sparse(), g=embedding.weight.grad)
    for td in (lazy, TensorDictParams(lazy)):
        assert "weight: Parameter(shape=not known yet, device=cpu" in repr(td)
        assert not td.is_shared()
    assert "a: Tensor(shape=torch.Size([3, 3]), device=cpu" in repr(sparse)
    with set_printoptions(show_storage_size=True):
        assert "storage_size=0" in repr(sparse)


def test_what_is_printed():
    nested = TensorDict(b=torch.ones(2, dtype=torch.int64), s="w", batch_size=[2])
    td = TensorDict(z=torch.zeros(2, 3), n=nested, batch_size=[2])
    plain = repr(td)
    with set_printoptions(compact=True):
        assert repr(td) == ("TensorDict(batch_size=[2], fields={n: {b: i64[], s: str}, z: f32[3]})")
        with set_printoptions(sort_keys=False, show_dtype=False):
            assert repr(td).endswith("fields={z: [3], n: {b: [], s: str}})")
    assert repr(td) == plain
    with set_printoptions(verbose=False):
        assert "Tensor(shape=torch.Size([2, 3]))" in repr(td)
        assert "device" not in repr(td.select("z")) and "batch_size" in repr(td)
    with set_printoptions(show_grad=True, show_storage_size=True, show_is_view=True):
        assert "requires_grad=False, is_view=False, storage_size=24" in repr(td)

    @set_printoptions(show_batch_size=False)
    def shown():
        return repr(td)

    assert "batch_size=torch.Size([2])" not in shown().replace("NonTensorData(data=w, batch", "")
    with pytest.raises(TypeError, match="no setting .'html'.; its settings are"):
        set_printoptions(html=True)
    assert get_printoptions()["compact"] is False
    option = set_printoptions(compact=True)
    option.set()
    try:
        assert get_printoptions()["compact"] is True
    finally:
        set_printoptions(compact=False).set()
    assert repr(td) == plain


class TestByValueOfAnEntry:
    def rows(self):
        a = torch.tensor([[1, 2], [3, 4], [1, 2], [5, 6]])
        n = TensorDict(c=torch.tensor([2.0, 0.0, 2.0, 0.0]), batch_size=[4])
        return TensorDict(a=a, b=torch.arange(4), n=n, batch_size=[4])

    def test_isin(self):
        rows = self.rows()
        other = TensorDict(a=torch.tensor([[9, 9], [1, 2]]), b=torch.tensor([3, 3]), batch_size=[2])
        assert isin(rows, other, "a").tolist() == [True, False, True, False]
        assert isin(rows, other, "b", -1).tolist() == [False, False, False, True]
        assert isin(rows, rows[1:2], ("n", "c")).tolist() == [False, True, False, True]
        assert isin(rows, rows[:0], "b").tolist() == [False] * 4

    def test_isin_along_the_second_dimension(self):
        grid = TensorDict(a=torch.tensor([[1, 2, 1], [3, 4, 3]]), batch_size=[2, 3])
        assert isin(grid, grid[:, :1], "a", 1).tolist() == [True, False, True]
        with pytest.raises(RuntimeError, match=r"shapes \(2,\) and \(1,\)"):
            isin(grid, grid[:1], "a", 1)

    def test_duplicates(self):
        rows = self.rows()
        out, which = remove_duplicates(rows, "a", return_indices=True)
        assert out["b"].tolist() == [0, 1, 3] and which.tolist() == [0, 1, 0, 2]
        assert (out[which]["a"] == rows["a"]).all()
        assert remove_duplicates(rows, ("n", "c"))["b"].tolist() == [1, 0]
        assert remove_duplicates(rows[:0], "a").batch_size == (0,)
        grid = TensorDict(
            a=torch.tensor([[1, 2, 1], [3, 4, 3]]), b=torch.arange(6).view(2, 3), batch_size=[2, 3]
        )
        assert remove_duplicates(grid, "a", -1)["b"].tolist() == [[0, 1], [3, 4]]

    def test_mistakes(self):
        rows = self.rows()
        for dim in (1, -2):
            with pytest.raises(ValueError, match="dim must be one of the 1 batch dimensions"):
                isin(rows, rows, "a", dim)
            with pytest.raises(ValueError, match="dim must be one of the 1 batch dimensions"):
                remove_duplicates(rows, "a", dim)
        with pytest.raises(ValueError, match="batch dimensions, got 1 and 2"):
            isin(rows, rows[None], "a")
        for call in (lambda: isin(rows, rows, "z"), lambda: remove_duplicates(rows, "z")):
            with pytest.raises(KeyError, match="z"):
                call()


def test_indices_and_shapes():
    mask = torch.zeros(3, 2, dtype=torch.bool)
    assert utils.convert_ellipsis_to_idx((..., mask), [4, 3, 2])[0] == slice(None)
    assert utils.convert_ellipsis_to_idx(0, [4]) == 0
    assert utils.convert_ellipsis_to_idx((None, 0, ...), [4]) == (None, 0)
    for index, text in (((..., 0, ...), "one ellipsis"), ((0, ..., 0, 0), "not an index of 2")):
        with pytest.raises(RuntimeError, match=text):
            utils.convert_ellipsis_to_idx(index, [3, 4])
    for shape, numel in (([4, -1], 6), ([-1, -1], 6), ([-2, 3], 6), ([0, -1], 0), ([2, 2], 6)):
        with pytest.raises(RuntimeError):
            utils.infer_size_impl(shape, numel)
    with pytest.raises(ValueError, match="neither yes nor no"):
        utils.strtobool("maybe")
