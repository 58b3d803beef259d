"""Rows as words: equal iff the content is; layouts differ for different dtypes and shapes."""

import random
from types import SimpleNamespace

import pytest
import torch

import raffia.data.rows
import raffia.jit
from raffia.data.rows import RowLayout, packed, row_layout, unpacked

N, A = 5, 3
NAMES = "float64 float32 float16 bfloat16 float8_e5m2 float8_e4m3fn complex64 bool uint8 int16"
DTYPES = [getattr(torch, name) for name in [*NAMES.split(), "int32", "int64"]]


@pytest.fixture(params=["kernel", "tensor"])
def version(request, monkeypatch):
    if request.param == "tensor":
        monkeypatch.setattr(raffia.data.rows, "kernels", SimpleNamespace(rows=None))
    return request.param


def randoms(dtype, *shape, generator=None):
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    bits = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    if dtype == torch.bool:
        return bits.flatten(-2).view(shape) > 127
    return bits.flatten(-2).view(dtype).view(shape)


def padded_bytes(*parts: bytes) -> bytes:
    data = b"".join(parts)
    return data + bytes(-len(data) % 8)


# Layouts


def test_a_tag_never_changes():
    assert RowLayout(torch.float32, (4,)).tag == 1750788867681415919
    assert RowLayout(torch.int64, ()).tag == -138055350484779465


def test_layouts_and_tags():
    layouts = [
        row_layout(torch.zeros(N, 2), 1),
        row_layout(torch.zeros(N, 2, dtype=torch.int32), 1),
        row_layout(torch.zeros(N, 1, dtype=torch.float64), 1),
        row_layout(torch.zeros(N, 2, 1, 1), 1),
    ]
    assert {layout.nbytes for layout in layouts} == {8}
    assert len({layout.tag for layout in layouts}) == 4
    assert len({RowLayout(dtype, (2, 3)).tag for dtype in DTYPES}) == len(DTYPES)
    with pytest.raises(ValueError, match="has no dtype 'nn'"):
        RowLayout.from_json({"dtype": "nn", "shape": [2]})
    assert all(-(2**63) <= layout.tag < 2**63 for layout in layouts)
    for dims, shape in ((1, (3, 5)), (3, ())):
        assert row_layout(torch.zeros(2, 3, 5), dims) == RowLayout(torch.float32, shape)


# Words


def test_words_and_back(version):
    draw = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(150):
        count = draw.choice([1, 2, 3, 8, 9, 11])
        values = [
            randoms(draw.choice(DTYPES), count, *shape, generator=generator)
            for shape in draw.choices([(), (1,), (3,), (2, 5), (0,), (17,), (70,)], k=3)
        ]
        layouts = [row_layout(value, 1) for value in values]
        words = packed(values, normalize=False)
        expected = [
            padded_bytes(*(bytes(value[i].clone().untyped_storage()) for value in values))
            for i in range(count)
        ]
        assert [row.numpy().tobytes() for row in words] == expected
        for value, back in zip(values, unpacked(words, layouts), strict=True):
            assert back.dtype == value.dtype and back.shape == value.shape
            assert packed([back], normalize=False).equal(packed([value], normalize=False))


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.is_floating_point])
def test_equal_numbers_are_equal_words(version, dtype):
    for width in (1, 3, 20):
        zeros = torch.zeros(N, width).to(dtype)
        minus = (-torch.zeros(N, width)).to(dtype)
        assert packed([minus]).equal(packed([zeros])), width
        assert not packed([minus], normalize=False).equal(packed([zeros], normalize=False))
        size = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        nans = torch.full((N, width), -1, dtype=size).view(dtype)
        canonical = torch.full((N, width), torch.nan).to(dtype)
        assert nans.isnan().all()
        assert packed([nans]).equal(packed([canonical])), width
        (back,) = unpacked(packed([nans]), [row_layout(nans, 1)])
        assert back.isnan().all()


# Mistakes


def test_invalid_calls_are_refused():
    out, ones = torch.zeros(N, 2), torch.ones(N, A)
    matching = r"same number of rows and be on one device; got \[2, 3\]"
    for values, options, match in [
        ([], {}, "pass at least one tensor"),
        ([torch.zeros(2, A), torch.zeros(3)], {}, matching),
        ([torch.tensor(1.0)], {}, "has no rows"),
        ([ones], {"out": out}, r"out must be int64 \[5, 2\] on cpu"),
        ([ones], {"out": out.long()[:, :1]}, r"out must be int64 \[5, 2\] on cpu"),
    ]:
        with pytest.raises(ValueError, match=match):
            packed(values, **options)
    assert not out.any()
    room = torch.full((2, N), 7).T  # strided
    assert packed([ones], out=room) is room and room.equal(packed([ones]))
    with pytest.raises(ValueError, match=r"rows of float64\[3\] are packed as int64 \[N, 3\]; got"):
        unpacked(packed([ones]), [RowLayout(torch.float64, (A,))])
