"""`MemoryMappedTensor`: a tensor in a file."""

import copy
import os
import pickle

import pytest
import torch

from raffia import DamagedFileError, MemoryMappedTensor
from tests.tensordict.kinds import each, raises
from tests.tensordict.stored import content, jagged, strided


def mapped(path, shape=(2, 3)):
    values = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    return MemoryMappedTensor.from_tensor(values, filename=path)


def test_maps_of_one_file_are_one_tensor(tmp_path):
    path = tmp_path / "x.memmap"
    t = mapped(path)
    assert isinstance(t, torch.Tensor) and isinstance(t, MemoryMappedTensor)
    assert str(t.filename) == str(path) and path.stat().st_size == 24
    assert t.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    args = dict(dtype=torch.float32, shape=(2, 3))
    whole = MemoryMappedTensor.from_filename(path, **args)
    row = MemoryMappedTensor.from_filename(path, index=1, **args)
    for at, one in enumerate((t, whole, row[None], pickle.loads(pickle.dumps(t)))):
        assert isinstance(one, MemoryMappedTensor)
        one[-1].fill_(at + 7)
        assert t[1].tolist() == whole[1].tolist() == row.tolist() == [at + 7] * 3
    t[:, 1] = 1
    assert path.read_bytes() == content(t)[2] and whole[0].tolist() == [0, 1, 2]
    turned = MemoryMappedTensor.from_tensor(torch.arange(6).reshape(2, 3).T)
    assert turned.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_which_results_stay_mapped(tmp_path):
    t = mapped(tmp_path / "x")
    for view in (t[0], t[:, 1], t[0:1]):
        assert isinstance(view, MemoryMappedTensor)
    copies = t + 1, t.clone(), t[torch.tensor([0])], torch.stack([t, t]), t.double()
    for result in (*copies, copy.deepcopy(t)):
        assert type(result) is torch.Tensor
        result.zero_()
    assert t.sum() == 15 and repr(MemoryMappedTensor.ones(2)) == "MemoryMappedTensor([1., 1.])"


def test_pickled_parts_are_parts_of_the_file(tmp_path):
    x = mapped(tmp_path / "x", (2, 3, 4))
    for part in (x[1], x[:, 1:, ::2], x[1, 2, 3], x[..., None], x[:0]):
        blob = pickle.dumps(part)
        again = pickle.loads(blob)
        assert len(blob) < 500 and type(again) is MemoryMappedTensor
        assert again.filename == x.filename
        assert content(again) == content(part) and again.stride() == part.stride()
    blob = pickle.dumps(x[1])
    (tmp_path / "x").unlink()
    with pytest.raises(FileNotFoundError):
        pickle.loads(blob)


@pytest.mark.parametrize("args", [(2, 3), ((2, 3),), (torch.Size([2, 3]),)])
def test_makers(args, tmp_path):
    make = MemoryMappedTensor
    assert make.empty(*args).shape == make.empty_like(torch.ones(2, 3)).shape == (2, 3)
    for made, total in ((make.zeros(*args), 0), (make.ones(*args), 6)):
        assert type(made) is make and made.shape == (2, 3) and made.sum() == total
    assert make.full(*args, fill_value=4, dtype=torch.int8).tolist() == [[4] * 3] * 2
    t = torch.ones(2, 3, dtype=torch.int16)
    filled = make.full_like(t, 3, filename=tmp_path / "f")
    for made, total in ((make.zeros_like(t), 0), (make.ones_like(t), 6), (filled, 18)):
        assert type(made) is make and made.dtype == torch.int16 and made.sum() == total
    assert (tmp_path / "f").stat().st_size == 12


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_rows_of_different_sizes(tmp_path):
    make, sizes, int16 = MemoryMappedTensor, torch.tensor([[2, 3], [2, 4]]), torch.int16
    made = make.full(sizes, fill_value=4, dtype=int16, filename=tmp_path / "x")
    values = make.ones(14, filename=tmp_path / "v").untyped_storage()
    for x, value in {
        made: 4,
        make.from_filename(tmp_path / "x", int16, sizes): 4,
        make.from_tensor(made, filename=tmp_path / "y", copy_existing=True): 4,
        make.from_tensor(strided().transpose(1, 2).mul(0).add(5)): 5,
        make.from_tensor(torch.full((14,), 6), shape=sizes): 6,
        make.from_storage(values, shape=sizes): 1,
        make.from_handler(make.zeros(shape=sizes)._handler, torch.float32, sizes): 0,
        make.ones_like(made): 1,
        pickle.loads(pickle.dumps(made)): 4,
    }.items():
        assert type(x) is make and x.is_nested and all([(row == value).all() for row in x.unbind()])
    assert make.from_filename(tmp_path / "x", int16, sizes, index=1).shape == (2, 4)
    assert make.from_storage(values, shape=sizes, index=1).shape == (2, 4)
    assert (tmp_path / "x").stat().st_size == 28
    made[0].fill_(1)
    assert make.from_filename(tmp_path / "x", int16, (14,)).tolist() == [1] * 6 + [4] * 8
    assert make.zeros(torch.tensor([2, 3])).shape == (2, 3)


@pytest.mark.parametrize("name, value", [("zeros", 0.0), ("ones", 1.0), ("full", 7.0)])
def test_existing_files(tmp_path, name, value):
    path = tmp_path / "x.memmap"
    before = MemoryMappedTensor.full((3,), 5.0, filename=path)
    make = getattr(MemoryMappedTensor, name)
    args = ((3,), 7.0) if name == "full" else (3,)
    for call in (
        lambda: make(*args, filename=path),
        lambda: MemoryMappedTensor.from_tensor(torch.zeros(3), filename=path),
    ):
        with pytest.raises(RuntimeError, match="exists"):
            call()
    assert before.tolist() == [5.0] * 3
    assert make(*args, filename=path, existsok=True).tolist() == [value] * 3
    assert before.tolist() == [value] * 3
    MemoryMappedTensor.from_tensor(torch.full((3,), 2.0), filename=path, existsok=True)
    assert MemoryMappedTensor.empty(3, filename=path, existsok=True).tolist() == [2.0] * 3


def test_invalid_calls_are_refused(tmp_path):
    make, path, no = MemoryMappedTensor, tmp_path / "x", tmp_path / "no"
    t, handler, f32 = mapped(path), make.zeros(2)._handler, torch.float32
    R, sizes = RuntimeError, torch.ones(2, 2)
    calls = [
        (lambda: make.ones(2, device="cuda"), R, "CPU"),
        (lambda: make.zeros(), TypeError, "shape is missing"),
        (lambda: make.from_tensor(t, filename=tmp_path / "y"), R, "copy_existing"),
        (lambda: make.from_tensor(torch.ones(3, requires_grad=True)), R, "requires_grad"),
        (lambda: make.from_tensor(jagged()), NotImplementedError, "jagged nested tensor"),
        (lambda: make.from_tensor(t, shape=sizes.int()), R, "need 2 values"),
        (lambda: make.zeros(sizes), ValueError, "sizes of the rows"),
        (lambda: make.from_filename(no, dtype=f32, shape=(2,)), FileNotFoundError, "no"),
        (lambda: make.from_filename(path, dtype=f32, shape=(2, 4)), DamagedFileError, "24 bytes"),
        (lambda: make.from_handler(t.filename, f32, (2,)), TypeError, "from_filename"),
        (lambda: make.from_handler(handler, f32, (3,)), DamagedFileError, "holds 8 bytes"),
    ]
    each(calls, raises)
    assert os.listdir(tmp_path) == ["x"] and path.stat().st_size == 24  # not made, not grown
    make.from_tensor(t, filename=tmp_path / "y", copy_existing=True)
    assert (tmp_path / "y").read_bytes() == path.read_bytes()


def test_another_tensor_over_a_temporary_file():
    x = MemoryMappedTensor.from_tensor(torch.arange(6))
    y = MemoryMappedTensor.from_handler(x._handler, torch.int64, (2, 3))
    path = x._handler.path
    y[0, 1] = 9
    assert x[1] == 9 and os.path.exists(path)
    part = MemoryMappedTensor.from_handler(x._handler, torch.int64, (2, 3), index=1)
    del x, y
    assert part.tolist() == [3, 4, 5] and os.path.exists(path)
    del part
    assert not os.path.exists(path)
