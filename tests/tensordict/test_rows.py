"""Functions beside the container's methods: groups, unpadding, JSON, printing."""

import json
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import raffia
from raffia import MetaData, TensorDict, collate, group_by, set_printoptions, unpad_sequence, utils
from raffia.utils import isin, remove_duplicates
from tests.tensordict.kinds import each, raises


def test_expand_right_adds_dimensions_at_the_end():
    x = torch.arange(6).view(2, 3)
    assert torch.equal(raffia.expand_right(x, (2, 3, 4)), x[..., None].expand(2, 3, 4))
    wide = raffia.expand_as_right(x[:, :1], torch.zeros(2, 3, 5))
    assert torch.equal(wide, x[:, :1, None].expand(2, 3, 5))
    assert raffia.expand_right(x, (2, 3)).data_ptr() == x.data_ptr()
    td = raffia.expand_as_right(TensorDict(a=torch.ones(2, 7), batch_size=[2]), torch.zeros(2, 3))
    assert td.batch_size == (2, 3) and td["a"].shape == (2, 3, 7)
    assert raffia.expand_as_right(x, TensorDict(batch_size=[2, 3, 4])).shape == (2, 3, 4)


def test_kinds_of_dtypes():
    values = [torch.zeros(1, dtype=d) for d in (torch.bool, torch.int8, torch.half, torch.cfloat)]
    assert [raffia.is_bool("k", v) for v in values] == [True, False, False, False]
    assert [raffia.is_integer("k", v) for v in values] == [False, True, False, False]
    assert [raffia.is_floating(v) for v in values] == [False, False, True, False]
    assert [raffia.is_inexact(v) for v in values] == [False, False, True, True]
    assert not raffia.is_inexact("a word")


@given(st.lists(st.integers(-2, 2), min_size=1, max_size=8), st.booleans())
def test_groups_equal_selections_by_masks(keys, words):
    n = len(keys)
    td = TensorDict(x=torch.arange(n), n=dict(y=torch.arange(2 * n).view(n, 2)), batch_size=[n])
    td["key"] = raffia.NonTensorStack(*[f"w{key}" for key in keys]) if words else torch.tensor(keys)
    values, groups = group_by(td, "key")
    names = values if words else values.tolist()
    assert names == sorted(set([f"w{key}" for key in keys] if words else keys))
    for value, group in zip(names, groups, strict=True):
        rows = [i for i, key in enumerate(keys) if (f"w{key}" if words else key) == value]
        assert group["x"].tolist() == rows and group.batch_size == (len(rows),)
        assert group["n", "y"].tolist() == td["n", "y"][rows].tolist()


def test_group_by_rows_of_a_tensor():
    td = TensorDict(k=torch.tensor([[1, 2], [0, 5], [1, 2]]), x=torch.arange(3), batch_size=[3])
    values, groups = group_by(td, "k")
    assert values.tolist() == [[0, 5], [1, 2]]
    assert [group["x"].tolist() for group in groups] == [[1], [0, 2]]
    assert group_by(TensorDict(x=torch.zeros(0), batch_size=[0]), "x")[1] == ()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.sampled_from(["left", "right"]))
def test_unpad_undoes_pad(lengths, side):
    rows = [TensorDict(a=torch.rand(n, 2), n=dict(b=torch.arange(n))) for n in lengths]
    rows = [row.auto_batch_size_(1) for row in rows]
    padded = raffia.pad_sequence(rows, return_mask=True, padding_side=side)
    bare, mask = padded.exclude("masks"), padded["masks", "a"]
    for samples in (unpad_sequence(padded), unpad_sequence(bare, mask)):
        for row, sample in zip(rows, samples.tensordicts, strict=True):
            assert sample.batch_size == row.batch_size == sample["n"].batch_size
            assert (sample == row).all() and set(sample.keys()) == {"a", "n"}
    assert samples[0]["a"].untyped_storage().data_ptr() == padded["a"].untyped_storage().data_ptr()


def test_unpad_dimensions_of_the_entries_alone():
    rows = [TensorDict(a=torch.rand(2, n), b=torch.rand(2, n, 3), batch_size=[2]) for n in (1, 3)]
    padded = raffia.pad_sequence(rows, pad_dim=1, return_mask=True)
    for row, sample in zip(rows, unpad_sequence(padded, pad_dim=1).tensordicts, strict=True):
        assert sample.batch_size == (2,) and (sample == row).all()


@pytest.mark.parametrize("lines", [False, True])
def test_json_round_trip(tmp_path, lines):
    td = TensorDict(a=torch.arange(2), n=dict(b=torch.tensor([[0.5], [1.0]])), batch_size=[2])
    td["word"] = raffia.NonTensorStack("x", "y")
    td.to_json(tmp_path / "rows", separator=".", lines=lines)
    text = (tmp_path / "rows").read_text()
    records = [json.loads(line) for line in text.splitlines()] if lines else json.loads(text)
    assert records[1] == {"a": 1, "n.b": [1.0], "word": "y"}
    back = TensorDict.from_json(tmp_path / "rows", separator=".", lines=lines)
    assert (back == td).all() and back.batch_size == (2,)
    halves = TensorDict.from_json(tmp_path / "rows", lines=lines, dtype=torch.half)
    assert halves["a"].dtype == halves["n.b"].dtype == torch.half


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


def test_meta_data_is_one_object_for_the_batch(tmp_path):
    config = {"lr": 0.1}
    td = TensorDict(a=torch.zeros(3), c=MetaData(config), batch_size=[3])
    assert td["c"] is config and td[0]["c"] is config and td.unsqueeze(0)["c"] is config
    assert type(td[1:].get("c")) is MetaData
    stacked = torch.stack([td, td])
    assert type(stacked.get("c")) is MetaData and stacked["c"] is config
    assert stacked.get("c").batch_size == (2, 3)
    other = TensorDict(a=torch.zeros(3), c=MetaData(dict(config)), batch_size=[3])
    assert type(torch.stack([td, other]).get("c")) is raffia.NonTensorStack
    td.memmap(tmp_path / "td")
    entry = raffia.load(tmp_path / "td").get("c")
    assert type(entry) is MetaData and entry.data == config
    assert MetaData[dict] is MetaData[dict] and issubclass(MetaData[dict], MetaData)
    for entry in (MetaData("a", [2]), MetaData[str]("a", [2])):
        back = pickle.loads(pickle.dumps(entry))
        assert type(back) is type(entry) and back.data == "a" and back.batch_size == (2,)


def test_meta_and_lazy_tensors_are_printed():
    lazy = TensorDict.from_module(torch.nn.LazyLinear(2))
    embedding = torch.nn.Embedding(3, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    sparse = TensorDict(a=torch.eye(3).to_sparse(), g=embedding.weight.grad)
    for td in (lazy, raffia.TensorDictParams(lazy)):
        assert "weight: Parameter(shape=not known yet, device=cpu" in repr(td)
        assert not td.is_shared()
    assert "a: Tensor(shape=torch.Size([3, 3]), device=cpu" in repr(sparse)
    with set_printoptions(show_storage_size=True):
        assert "storage_size=0" in repr(sparse)


def test_printed_text():
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
    assert raffia.get_printoptions()["compact"] is False
    option = set_printoptions(compact=True)
    option.set()
    try:
        assert raffia.get_printoptions()["compact"] is True
    finally:
        set_printoptions(compact=False).set()
    assert repr(td) == plain


def repeated():
    a = torch.tensor([[1, 2], [3, 4], [1, 2], [5, 6]])
    n = TensorDict(c=torch.tensor([2.0, 0.0, 2.0, 0.0]), batch_size=[4])
    return TensorDict(a=a, b=torch.arange(4), n=n, batch_size=[4])


COLUMNS = TensorDict(a=torch.tensor([[1, 2, 1], [3, 4, 3]]), b=torch.arange(6).view(2, 3))
COLUMNS.batch_size = [2, 3]


def test_isin():
    rows = repeated()
    other = TensorDict(a=torch.tensor([[9, 9], [1, 2]]), b=torch.tensor([3, 3]), batch_size=[2])
    assert isin(rows, other, "a").tolist() == [True, False, True, False]
    assert isin(rows, other, "b", -1).tolist() == [False, False, False, True]
    assert isin(rows, rows[1:2], ("n", "c")).tolist() == [False, True, False, True]
    assert isin(rows, rows[:0], "b").tolist() == [False] * 4
    assert isin(COLUMNS, COLUMNS[:, :1], "a", 1).tolist() == [True, False, True]


def test_duplicates():
    rows = repeated()
    out, which = remove_duplicates(rows, "a", return_indices=True)
    assert out["b"].tolist() == [0, 1, 3] and which.tolist() == [0, 1, 0, 2]
    assert (out[which]["a"] == rows["a"]).all()
    assert remove_duplicates(rows, ("n", "c"))["b"].tolist() == [1, 0]
    assert remove_duplicates(rows[:0], "a").batch_size == (0,)
    assert remove_duplicates(COLUMNS, "a", -1)["b"].tolist() == [[0, 1], [3, 4]]


X, MASK = torch.arange(6).view(2, 3), torch.zeros(3, 2, dtype=torch.bool)
HOLE = torch.tensor([[True, True, False], [True, False, True]])
PADDED = TensorDict(a=torch.zeros(2, 3), batch_size=[2])
SAMPLES = [TensorDict(a=torch.ones(n), b=torch.arange(2)) for n in (1, 3)]
LONG = [TensorDict(a=torch.ones(2), batch_size=[2])] * 2
KEYED = repeated().update({"mixed": raffia.NonTensorStack("a", 1, None, 2), "e": {}})
SHORT = "dim must be one of the 1 batch dimensions"
A = {"a": 0.0}
R, V, K = RuntimeError, ValueError, KeyError
MISTAKES = [
    (lambda: raffia.expand_right(X, (2,)), R, "2 dimensions, more than the shape"),
    (lambda: raffia.expand_as_right(COLUMNS, torch.zeros(2)), R, "longer than the shape"),
    (lambda: raffia.expand_right(X, (3, 3)), R, ""),
    (lambda: group_by(KEYED[0], "b"), V, "first batch dimension"),
    (lambda: group_by(KEYED, "y"), K, "nearest|not found"),
    (lambda: group_by(KEYED, "e"), TypeError, "is a container"),
    (lambda: group_by(KEYED, "mixed"), TypeError, "hashed and sorted"),
    (lambda: unpad_sequence(PADDED), V, "no entry 'masks'"),
    (lambda: unpad_sequence(PADDED, HOLE[:, :2]), V, r"\(2, 2\).*needs \(2, 3\)"),
    (lambda: unpad_sequence(PADDED, HOLE), V, "gap in sample 1"),
    (lambda: unpad_sequence(PADDED, TensorDict(batch_size=[2])), K, "no mask for the entry 'a'"),
    (lambda: unpad_sequence(PADDED[0]), V, "but this container has none"),
    (lambda: TensorDict.from_schema({}, storage="h5"), V, "storage='h5' must be one of None"),
    (lambda: TensorDict.from_schema({}, prefix="a"), TypeError, "prefix"),
    (lambda: collate(SAMPLES, pad_keys={"z": 0.0}), K, "sample 0 has no entry 'z'"),
    (lambda: collate(SAMPLES, mask_key="m"), V, "mask_key"),
    (lambda: collate(SAMPLES, pad_keys=A, nested_keys=["a"]), V, "both pad_keys and nested_keys"),
    (lambda: collate(LONG, pad_keys=A), V, "without batch dimensions"),
    (lambda: collate(SAMPLES, pad_keys=A, mask_key="b"), V, "is already an entry of the samples"),
    (lambda: MetaData[dict](1), TypeError, "Expected data of type dict, got int"),
    (lambda: set_printoptions(html=True), TypeError, "no setting .'html'.; its settings are"),
    (lambda: isin(COLUMNS, COLUMNS[:1], "a", 1), R, r"shapes \(2,\) and \(1,\)"),
    (lambda: isin(PADDED, PADDED, "a", 1), V, SHORT),
    (lambda: remove_duplicates(PADDED, "a", -2), V, SHORT),
    (lambda: isin(PADDED, PADDED[None], "a"), V, "batch dimensions, got 1 and 2"),
    (lambda: isin(PADDED, PADDED, "z"), K, "z"),
    (lambda: remove_duplicates(PADDED, "z"), K, "z"),
    (lambda: utils.convert_ellipsis_to_idx((..., 0, ...), [3, 4]), R, "one ellipsis"),
    (lambda: utils.convert_ellipsis_to_idx((0, ..., 0, 0), [3, 4]), R, "not an index of 2"),
    *[
        (lambda s=shape, n=numel: utils.infer_size_impl(s, n), R, "")
        for shape, numel in (([4, -1], 6), ([-1, -1], 6), ([-2, 3], 6), ([0, -1], 0), ([2, 2], 6))
    ],
    (lambda: utils.strtobool("maybe"), V, "neither yes nor no"),
]


def test_errors():
    each(MISTAKES, raises)


def test_json_refusals_leave_the_file(tmp_path):
    path = tmp_path / "rows"
    for text, call, error, words in [
        ("[]", lambda: TensorDict(n=dict(a=1)).to_json(path), V, "separator='.'"),
        ("[]", lambda: TensorDict(a=object()).to_json(path), TypeError, ""),
        (
            '[{"a": 1}, {"b": 2}]',
            lambda: TensorDict.from_json(path),
            V,
            r"record 1 has the fields \['b'\], but record 0 has \['a'\]",
        ),
        ('{"a": 1}', lambda: TensorDict.from_json(path), V, "does not hold a list of records"),
    ]:
        path.write_text(text)
        raises((call, error, words))
        assert path.read_text() == text and list(tmp_path.iterdir()) == [path]


def test_indices():
    assert utils.convert_ellipsis_to_idx((..., MASK), [4, 3, 2])[0] == slice(None)
    assert utils.convert_ellipsis_to_idx(0, [4]) == 0
    assert utils.convert_ellipsis_to_idx((None, 0, ...), [4]) == (None, 0)
