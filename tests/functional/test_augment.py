"""raffia.functional.augment: the oracle of a shift is pad and crop, one sample at a time."""

import pytest
import torch
from torch.nn.functional import pad as widen

from raffia.functional.augment import draw_intensity, draw_shift, intensity, random_shift


def images(*shape, dtype=torch.uint8):
    g = torch.Generator().manual_seed(0)
    return torch.randint(256, shape, generator=g, dtype=torch.uint8).to(dtype)


def pad_and_crop(x, shift, pad):
    height, width = x.shape[-2:]
    rows = []
    for sample, (i, j) in zip(x, shift.tolist(), strict=True):
        planes = sample.reshape(-1, height, width).float()
        wide = widen(planes, [pad] * 4, mode="replicate")
        rows.append(wide[:, i : i + height, j : j + width].reshape(sample.shape))
    return torch.stack(rows).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("shape", [(25, 3, 6, 8), (25, 2, 4, 5, 7), (25, 9, 9)])
def test_shift_equals_pad_and_crop(shape, dtype):
    x = images(*shape, dtype=dtype)
    shift = torch.cartesian_prod(torch.arange(5), torch.arange(5))  # all possible shifts
    got = random_shift(x, shift, pad=2)
    assert got.dtype == dtype and torch.equal(got, pad_and_crop(x, shift, 2))


def test_a_central_crop_is_the_identity_and_a_pad_wider_than_the_image_works():
    x = images(3, 2, 5, 4)
    assert torch.equal(random_shift(x, torch.full((3, 2), 4)), x)
    shift = torch.tensor([[0, 0], [12, 12], [3, 9]])
    assert torch.equal(random_shift(x, shift, pad=6), pad_and_crop(x, shift, 6))


def test_shift_leaves_its_input_and_works_on_views():
    x = images(4, 6, 8, 3).movedim(-1, 1)
    before, shift = x.clone(), draw_shift(4, generator=torch.Generator().manual_seed(1))
    assert torch.equal(random_shift(x, shift), pad_and_crop(x, shift, 4))
    assert torch.equal(x, before)


def test_intensity_scales_samples_as_a_whole():
    x, factor = images(2, 3, 4, 5), torch.tensor([1.1, 0.5])
    got = intensity(x, factor)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.stack([x[0] * 1.1, x[1] * 0.5]))
    assert intensity(x.bfloat16(), factor).dtype == torch.bfloat16


def test_draws_repeat_with_their_generator_and_lie_in_range():
    g = [torch.Generator().manual_seed(7) for _ in range(2)]
    assert torch.equal(draw_shift(30, generator=g[0]), draw_shift(30, generator=g[1]))
    assert torch.equal(draw_intensity(30, generator=g[0]), draw_intensity(30, generator=g[1]))
    shift, factor = draw_shift(4000, 3, g[0]), draw_intensity(4000, 0.1, g[0])
    counts = shift.flatten().bincount()
    assert len(counts) == 7 and counts.min() > 1000 and shift.dtype == torch.int64
    assert factor.min() == pytest.approx(0.8) and factor.max() == pytest.approx(1.2)
    assert factor.mean().item() == pytest.approx(1, abs=0.01)
    assert factor.std().item() == pytest.approx(0.096, abs=0.005)  # of a normal cut off at 2 sigma


def test_draws_of_the_wrong_shape_are_refused():
    with pytest.raises(ValueError, match=r"shape \[3, 2\].*draw_shift\(3, 4, generator\)"):
        random_shift(images(3, 1, 4, 4), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"factor of shape \[3\]"):
        intensity(images(3, 1, 4, 4), torch.ones(3, 1))


def test_under_vmap():
    x, shift = images(2, 4, 3, 5, 6), draw_shift(8).reshape(2, 4, 2)
    want = torch.stack([random_shift(*pair) for pair in zip(x, shift, strict=True)])
    assert torch.equal(torch.vmap(random_shift)(x, shift), want)
