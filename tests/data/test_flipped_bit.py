"""A row that does not fit its checksum: a reader can't tell a cut write from a flipped bit."""

import pytest
import torch

from raffia.data.memmap_storage import MemmapStorage
from raffia.files import DamagedFileError
from raffia.tensordict.tensordict import TensorDict


def test_a_flipped_bit_is_not_called_a_crash_alone(tmp_path):
    with MemmapStorage(4, tmp_path / "rows") as storage:
        storage.set(range(4), TensorDict(x=torch.arange(4), batch_size=[4]))
    (path,) = [one for one in (tmp_path / "rows").iterdir() if one.stat().st_size == 4 * 8]
    data = bytearray(path.read_bytes())
    data[2 * 8] ^= 1
    path.write_bytes(data)
    reader = MemmapStorage.open(tmp_path / "rows", mode="r")
    with pytest.raises(DamagedFileError, match=r"rows \[2\] .* crash .* if the files are damaged"):
        reader.get([2])
    with MemmapStorage.open(tmp_path / "rows") as storage:
        with pytest.raises(DamagedFileError, match=r"rows \[2\] .* are damaged"):
            storage.get([2])
        storage.erase([2])
    assert MemmapStorage.open(tmp_path / "rows", mode="r").get([0, 3])["x"].tolist() == [0, 3]
