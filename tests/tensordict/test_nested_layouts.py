"""Nested tensors: as entries; jagged ones in one block, in memory, pickled, and as a file.

test_ragged_folders.py has those in memory-mapped folders.
"""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from raffia import DamagedFileError, MemoryMappedTensor, TensorDict
from raffia.tensordict.consolidated import described, over_block


def jagged() -> Any:
    rows = [torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def with_holes() -> Any:
    return torch.nested.nested_tensor_from_jagged(
        torch.arange(10.0)[:, None], offsets=torch.tensor([0, 4, 10]), lengths=torch.tensor([2, 5])
    )


KINDS = {
    "jagged": jagged,
    "with holes": with_holes,
    "transposed": lambda: jagged().transpose(1, 2),
    "int16": lambda: jagged().to(torch.int16),
}


def same(one: Tensor, other: Any) -> bool:
    pairs = zip(one.unbind(), other.unbind(), strict=True)
    return one.dtype is other.dtype and all([torch.equal(a, b) for a, b in pairs])


def held(kind: str) -> TensorDict:
    x = KINDS[kind]()
    nested = TensorDict({"y": x + 1, "c": torch.ones(2, 3)}, [2])
    return TensorDict({"x": x, "b": torch.arange(2), "n": nested, "text": "t"}, [2])


@pytest.mark.parametrize("kind", list(KINDS))
class TestOneBlock:
    def test_in_memory(self, kind: str) -> None:
        td = held(kind)
        for options in ({}, {"metadata": True}, {"num_threads": 2}, {"inplace": True}):
            block = td.clone().consolidate(**options)
            assert block.is_consolidated()
            assert block.is_locked
            assert same(block["x"], td["x"])
            assert same(block["n", "y"], td["n", "y"])
            assert torch.equal(block["n", "c"], td["n", "c"])
            assert block["x"].values().untyped_storage().data_ptr() == block._buffer.data_ptr()
            assert same(block["x"] + block["n", "y"], td["x"] + td["n", "y"])  # of one shape still

    def test_pickled(self, kind: str) -> None:
        td = held(kind)
        for block in (td.consolidate(), td.consolidate(metadata=True)):
            back = pickle.loads(pickle.dumps(block))
            assert same(back["x"], td["x"])
            assert same(back["n", "y"], td["n", "y"])
            assert back["text"] == "t"

    def test_a_file(self, kind: str, tmp_path: Any) -> None:
        td = held(kind)
        for at, use_buffer in enumerate((False, True)):
            written = td.consolidate(tmp_path / f"{at}", use_buffer=use_buffer)
            assert same(written["x"], td["x"])
            back = TensorDict.from_consolidated(tmp_path / f"{at}")
            assert back.batch_size == (2,)
            assert same(back["x"], td["x"])
            assert same(back["n", "y"], td["n", "y"])
            assert same(back["x"] + back["n", "y"], td["x"] + td["n", "y"])
            assert back["text"] == "t"


def test_damaged_offsets(tmp_path: Any) -> None:
    held("with holes").consolidate(tmp_path / "td")
    content = (tmp_path / "td").read_bytes()
    good = torch.tensor([0, 4, 10]).numpy().tobytes()
    assert content.count(good) == 1
    for bad in ([0, 4, 11], [0, 12, 10], [-1, 4, 10]):
        (tmp_path / "td").write_bytes(content.replace(good, torch.tensor(bad).numpy().tobytes()))
        with pytest.raises(DamagedFileError, match="nested tensor"):
            TensorDict.from_consolidated(tmp_path / "td")
    for good_text, bad_text in ((b'"ragged":1', b'"ragged":9'), (b'"offsets"', b'"Offsets"')):
        assert good_text in content
        (tmp_path / "td").write_bytes(content.replace(good_text, bad_text))
        with pytest.raises(DamagedFileError, match="nested tensor"):
            TensorDict.from_consolidated(tmp_path / "td")


def test_a_block_has_no_strided_ones() -> None:
    record, _ = described(TensorDict(x=jagged()))
    changed = json.loads(record)
    changed["entries"]["x"]["ragged"] = "strided"
    changed["entries"]["x"]["sizes"] = changed["entries"]["x"]["offsets"]
    block = torch.zeros(1000, dtype=torch.uint8)
    with pytest.raises(DamagedFileError, match="in a block is a jagged one"):
        over_block("here", changed, block)


def test_no_place_in_one_file(tmp_path: Any) -> None:
    with pytest.raises(NotImplementedError, match="'x' is a nested tensor.*memmap"):
        held("jagged").save(tmp_path / "td.safetensors")
    with pytest.raises(NotImplementedError, match="nested tensor"):
        MemoryMappedTensor.from_tensor(jagged())
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
class TestStrided:
    def strided(self) -> Any:
        return torch.nested.nested_tensor([torch.zeros(2, 3), torch.ones(4, 3)])

    def test_is_an_entry(self) -> None:
        td = TensorDict({"a": self.strided(), "n": {"b": self.strided()}}, [2])
        td["c"] = self.strided()
        td.set("d", self.strided(), inplace=True).set_("d", self.strided())
        td.update({"e": self.strided()})
        assert [row["a"].shape for row in td] == [(2, 3), (4, 3)] == [r["n", "b"].shape for r in td]
        assert td[1]["e"].sum() == 12 and td.zero_()["c"][1].sum() == 0
        assert "shape=torch.Size([2, -1, 3])" in repr(td)

    @pytest.mark.parametrize(
        "change",
        [
            lambda td: td.clone(),
            lambda td: td.to(torch.float32),
            lambda td: td.apply(lambda x: x.clone()),
            lambda td: td.flatten_keys().unflatten_keys(),
            lambda td: TensorDict(td.to_dict(), [2], device="cpu"),
            lambda td: TensorDict(td.to_dict()).auto_batch_size_(),
        ],
    )
    def test_is_kept(self, change: Any) -> None:
        td = TensorDict({"a": self.strided().double(), "n": {"b": self.strided()}}, [2])
        out = change(td)
        assert out.batch_size == (2,) and out["n"].batch_size == (2,)
        assert [row["a"].shape for row in out.unbind()] == [(2, 3), (4, 3)]

    @pytest.mark.parametrize("batch_size", [[3], [2, 2], [2, 4]])
    def test_of_another_batch_size(self, batch_size: list[int]) -> None:
        with pytest.raises(RuntimeError, match=r"shape torch.Size\(\[2, -1, 3\]\) for key 'a'"):
            TensorDict({"a": self.strided()}, batch_size)
        td = TensorDict(batch_size=batch_size)
        for put in (td.set, td.__setitem__, lambda key, x: td.update({key: x})):
            with pytest.raises(RuntimeError, match="for key 'a'"):
                put("a", self.strided())
