"""Pictures made smaller: both ways against a sum done pixel by pixel, in fractions."""

from fractions import Fraction
from math import floor

import pytest
import torch

from raffia.envs.resize import area, overlaps


def tensor_area(picture, height, width):
    """`area` in tensor operations: the simple version that the compiled loop must equal."""
    rows, columns = overlaps(picture.shape[0], height), overlaps(picture.shape[1], width)
    total = rows @ picture.permute(2, 0, 1).double() @ columns.T  # whole numbers: exact
    whole = picture.shape[0] * picture.shape[1]
    return ((2 * total + whole) / (2 * whole)).floor().to(torch.uint8)


BOTH = pytest.mark.parametrize("resize", [area, tensor_area])


def by_hand(picture, height, width):
    old_height, old_width, channels = picture.shape
    rows, columns = Fraction(old_height, height), Fraction(old_width, width)
    out = torch.zeros(channels, height, width, dtype=torch.uint8)
    for y in range(height):
        for x in range(width):
            for c in range(channels):
                total = Fraction(0)
                for i in range(old_height):
                    tall = min((y + 1) * rows, Fraction(i + 1)) - max(y * rows, Fraction(i))
                    for j in range(old_width):
                        wide = min((x + 1) * columns, Fraction(j + 1)) - max(
                            x * columns, Fraction(j)
                        )
                        if tall > 0 and wide > 0:
                            total += tall * wide * int(picture[i, j, c])
                out[c, y, x] = floor(total / (rows * columns) + Fraction(1, 2))
    return out


@BOTH
@pytest.mark.parametrize("size", [(3, 2), (5, 7), (1, 1), (7, 9)])
def test_means_of_areas(resize, size):
    picture = torch.randint(
        0, 256, (5, 7, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    assert torch.equal(resize(picture, *size), by_hand(picture, *size))
    flat = resize(picture.transpose(0, 1), *size)  # a view is read by its strides
    assert torch.equal(flat, by_hand(picture.transpose(0, 1), *size))
    half = torch.tensor([[[size[0]], [size[0] + 1]]], dtype=torch.uint8)
    assert resize(half, 1, 1).item() == size[0] + 1  # halves are rounded up
    white = torch.full((1500, 1000, 1), 255, dtype=torch.uint8)  # too much for 32 bits
    assert (resize(white, *size) == 255).all()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [64, 84, 96])
@pytest.mark.parametrize("height", [210, 250])
def test_loop_and_tensors_agree(height, size, channels):
    draws = torch.Generator().manual_seed(size)
    for low, high in [(0, 256), (0, 2), (254, 256)]:
        shape = (height, 160, channels)
        picture = torch.randint(low, high, shape, dtype=torch.uint8, generator=draws)
        assert torch.equal(area(picture, size, size), tensor_area(picture, size, size))


@pytest.mark.parametrize(
    ("picture", "size", "message"),
    [
        (torch.zeros(3, 4, dtype=torch.uint8), (1, 1), r"uint8 \[H, W, C\]; got .* \[3, 4\]"),
        (torch.zeros(3, 4, 1), (1, 1), r"got torch.float32 \[3, 4, 1\]"),
        (torch.zeros(3, 4, 1, dtype=torch.uint8), (0, 1), "height=0 must be at least 1"),
    ],
)
def test_errors(picture, size, message):
    with pytest.raises(ValueError, match=message):
        area(picture, *size)
