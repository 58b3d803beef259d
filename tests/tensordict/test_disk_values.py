"""What else goes to disk: values of more types that are no tensors; and where none is written."""

import enum
import json
import os
import pathlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from raffia import MemoryMappedTensor, NonTensorData, TensorDict
from raffia.files import DamagedFileError
from raffia.tensordict.json_values import decode, encode
from tests.tensordict.invariants import sound


class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


VALUES = [
    np.arange(6, dtype=np.int16).reshape(2, 3),
    np.zeros((0, 2), dtype=np.float64),
    np.array(2.5),
    np.array(["text", "more"]),
    np.array([b"a", b"bc"]),
    np.array(["2020-01-02"], dtype="datetime64[D]"),
    np.arange(3, dtype=">i4"),
    np.float32(1.5),
    np.bool_(True),
    np.float64(0.1),
    {1, 2, 3},
    frozenset({"a", "b"}),
    {("a", 1), ("b", 2)},
    set(),
    {1: "one", (2, 3): [None], "text": {4: 5}},
    {None: 0, True: 1.5},
    pathlib.Path("folder/file.txt"),
    Colour.RED,
    Level.HIGH,
    b"\x00\xff",
    2 - 3j,
    {"$array": [1], "$enum": "not one"},
    {"infos": np.ones(2), "level": Level.LOW, "tags": {"x"}},
]


def alike(got, want):
    assert type(got) is type(want)
    if isinstance(want, np.ndarray):
        assert got.dtype == want.dtype and got.shape == want.shape
        assert np.array_equal(got, want) and got.flags.writeable
    elif isinstance(want, dict):
        assert list(got) == list(want)
        for key, value in want.items():
            alike(got[key], value)
    else:
        assert got == want


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", ["folder", "file.safetensors"])
def test_values_come_back_as_they_were(tmp_path, value, name):
    td = TensorDict(a=torch.zeros(2), batch_size=[2])
    td.set_non_tensor("value", value)
    td.set_non_tensor(("n", "value"), value)
    td.save(tmp_path / name)
    got = TensorDict.load(tmp_path / name)
    assert sound(got)
    alike(got.get("value").data, value)
    alike(got.get(("n", "value")).data, value)


def test_a_value_per_row(tmp_path):
    td = TensorDict(batch_size=[2])
    td["rows"] = torch.stack([NonTensorData(np.ones(1)), NonTensorData(Colour.BLUE)])
    td.memmap(tmp_path)
    first, second = TensorDict.load_memmap(tmp_path).get("rows").tolist()
    alike(first, np.ones(1))
    assert second is Colour.BLUE


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"))
    | st.binary()
    | st.sampled_from(Colour)
    | arrays.arrays(st.sampled_from([np.int32, np.float64, np.bool_]), arrays.array_shapes()),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.sampled_from(Level), inner)
        | st.sets(st.integers() | st.text())
    ),
    max_leaves=8,
)


def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return a == b


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(values)
def test_any_value_through_json(value):
    text = json.dumps(encode(value, ()))
    assert same(decode(json.loads(text)), value)


def test_the_comparison_can_fail():
    assert not same([np.ones(2)], [np.zeros(2)])
    assert not same({"a": 1}, {"a": True}) and not same((1,), [1])


@pytest.mark.parametrize("value", [object(), np.array([object()]), lambda: 0, Colour])
def test_what_is_refused(value):
    with pytest.raises(TypeError, match="can't be stored on disk"):
        encode(value, ("key",))


def test_an_enum_of_a_function_is_refused():
    class Local(enum.Enum):
        A = 1

    with pytest.raises(TypeError, match="can't be stored on disk"):
        encode(Local.A, ("key",))


@pytest.mark.parametrize(
    "content",
    [
        {"$array": ["<i4", [2], "AAAA"]},
        {"$array": ["O", [1], "AAAAAAAAAAA="]},
        {"$array": ["<i4", [-1], ""]},
        {"$array": 5},
        {"$number": ["<i4", [], "?"]},
        {"$enum": ["os", "path", "x"]},
        {"$enum": ["no.such.module", "A", "B"]},
        {"$enum": [__name__, "Colour", "GREEN"]},
        {"$enum": [__name__, "VALUES", "RED"]},
        {"$set": [[1]]},
        {"$set": 3},
        {"$items": [[1]]},
        {"$bytes": "?"},
        {"$path": 3},
        {"$complex": ["a"]},
        {"$tuple": 1},
    ],
    ids=str,
)
def test_a_damaged_value(tmp_path, content):
    TensorDict(text="x").memmap(tmp_path)
    record = json.loads((tmp_path / "meta.json").read_text())
    record["entries"]["text"]["value"] = content
    (tmp_path / "meta.json").write_text(json.dumps(record))
    with pytest.raises(DamagedFileError, match="is not a value"):
        TensorDict.load_memmap(tmp_path)


class TestSymbolicLinks:
    """Writing into a folder writes nothing outside of it."""

    def make(self):
        return TensorDict(a=torch.ones(3), n=TensorDict(b=torch.ones(2)), text="x")

    def victims(self, tmp_path):
        outside = tmp_path / "outside"
        (outside / "n").mkdir(parents=True)
        for name in ("a.memmap", "meta.json", "n/b.memmap", "n/meta.json"):
            (outside / name).write_bytes(b"precious 1234" if "a." not in name else b"12 bytes 123")
        return outside, {p: p.read_bytes() for p in outside.rglob("*") if p.is_file()}

    @pytest.mark.parametrize("how", ["memmap", "memmap_", "memmap_like"])
    @pytest.mark.parametrize("name", ["a.memmap", "meta.json", "n", "n/b.memmap", "n/meta.json"])
    def test_of_files_and_folders(self, tmp_path, how, name):
        outside, before = self.victims(tmp_path)
        folder = tmp_path / "folder"
        (folder / "n").mkdir(parents=True)
        if name == "n":
            (folder / "n").rmdir()
        (folder / name).symlink_to(outside / name)
        if name == "n":
            with pytest.raises(RuntimeError, match="symbolic link"):
                getattr(self.make(), how)(folder)
        else:
            try:
                getattr(self.make(), how)(folder)
            except RuntimeError as error:
                assert "already exists" in str(error)
        assert {p: p.read_bytes() for p in outside.rglob("*") if p.is_file()} == before
        assert set(os.listdir(outside)) == {"a.memmap", "meta.json", "n"}

    def test_the_folder_itself_may_be_a_link(self, tmp_path):
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        self.make().memmap(tmp_path / "link")
        assert (tmp_path / "real" / "meta.json").exists()

    @pytest.mark.parametrize("name", ["n2", "meta.json", "b.memmap"])
    def test_of_an_entry_that_is_added(self, tmp_path, name):
        outside, before = self.victims(tmp_path)
        td = self.make().memmap(tmp_path / "folder")
        (tmp_path / "folder" / name).unlink(missing_ok=True)
        (tmp_path / "folder" / name).symlink_to(outside / ("n" if name == "n2" else name))
        key = ("n2", "b") if name == "n2" else "b"
        if name == "b.memmap":  # the link is replaced
            td.make_memmap(key, (2,))
            assert not (tmp_path / "folder" / name).is_symlink()
        else:
            with pytest.raises((RuntimeError, DamagedFileError), match="link"):
                td.make_memmap(key, (2,))
        assert {p: p.read_bytes() for p in outside.rglob("*") if p.is_file()} == before

    def test_of_a_value_that_is_changed(self, tmp_path):
        outside, before = self.victims(tmp_path)
        td = self.make().memmap(tmp_path / "folder")
        (tmp_path / "folder" / "meta.json").unlink()
        (tmp_path / "folder" / "meta.json").symlink_to(outside / "meta.json")
        with pytest.raises(DamagedFileError, match="links are not followed"):
            td.set_("text", "changed")
        assert {p: p.read_bytes() for p in outside.rglob("*") if p.is_file()} == before

    def test_a_tensor_whose_file_is_a_link_is_written_anew(self, tmp_path):
        td = TensorDict(a=torch.ones(3)).memmap(tmp_path / "first")
        (tmp_path / "second").mkdir()
        (tmp_path / "second" / "a.memmap").symlink_to(tmp_path / "first" / "a.memmap")
        td.memmap(tmp_path / "second", copy_existing=True)
        assert not (tmp_path / "second" / "a.memmap").is_symlink()
        assert torch.equal(TensorDict.load_memmap(tmp_path / "second")["a"] + 0, torch.ones(3))


class TestFilesThatAreThere:
    @pytest.mark.parametrize("name, held", [("zeros", 0.0), ("ones", 1.0), ("full", 7.0)])
    def test_existsok(self, tmp_path, name, held):
        path = tmp_path / "x.memmap"
        before = MemoryMappedTensor.full((3,), 5.0, filename=path)
        make = getattr(MemoryMappedTensor, name)
        args = ((3,), 7.0) if name == "full" else (3,)
        with pytest.raises(RuntimeError, match="exists"):
            make(*args, filename=path)
        assert before.tolist() == [5.0] * 3
        assert make(*args, filename=path, existsok=True).tolist() == [held] * 3
        assert before.tolist() == [held] * 3
        before.fill_(2.0)
        assert MemoryMappedTensor.empty(3, filename=path, existsok=True).tolist() == [2.0] * 3

    def test_nothing_was_saved(self, tmp_path):
        """Both what a missing file is elsewhere, and what any damage is here."""
        for kind in (FileNotFoundError, DamagedFileError):
            with pytest.raises(kind, match="it is missing: nothing was saved here"):
                TensorDict.load_memmap(tmp_path)
        TensorDict(a=torch.ones(2)).memmap(tmp_path / "td")
        (tmp_path / "td" / "a.memmap").unlink()
        with pytest.raises(FileNotFoundError, match=r"a\.memmap: it is missing"):
            TensorDict.load_memmap(tmp_path / "td")
