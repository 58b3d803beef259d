"""Random shifts and intensities of images [B, C, H, W]; the random numbers are arguments.

The planes of a sample (colours, stacked frames) share its draw, so motion between frames stays.
"""

import torch
from torch import Tensor


def random_shift(
    images: Tensor,  # [B, *, H, W], of any type
    shift: Tensor,  # int64 [B, 2], rows and columns, 0..2 * pad; `pad` moves nothing
    pad: int = 4,
) -> Tensor:  # like images, uint8 too
    """Shift images: pad them with copies of their border, and crop them to the old size.

    Row i of the crop is row i + shift - pad of the image, or the nearest one that it has.
    Source: Yarats et al. (2021), section 3.1, there of 84x84 images; a pad of 4.

    >>> image = torch.arange(9, dtype=torch.uint8).reshape(1, 1, 3, 3)
    >>> random_shift(image, torch.tensor([[1, 2]]), pad=1)
    tensor([[[[1, 2, 2],
              [4, 5, 5],
              [7, 8, 8]]]], dtype=torch.uint8)
    """
    batch, height, width = images.shape[0], *images.shape[-2:]
    if shift.shape != (batch, 2):
        raise ValueError(
            f"images of shape {list(images.shape)} need a shift of shape [{batch}, 2], one for each"
            f" sample, got {list(shift.shape)}; draw_shift({batch}, {pad}, generator) makes one"
        )
    # reading rows and columns of the nearest pixels needs no widened copy of the images
    row = _nearest(shift[:, 0], pad, height)  # [B, H]
    column = _nearest(shift[:, 1], pad, width)  # [B, W]
    position = (row * width).unsqueeze(-1) + column.unsqueeze(-2)  # [B, H, W]
    planes = images.reshape(batch, -1, height * width)
    position = position.reshape(batch, 1, height * width).expand_as(planes)
    return planes.gather(-1, position).reshape(images.shape)


def _nearest(shift: Tensor, pad: int, size: int) -> Tensor:  # [B] -> [B, size]
    at = torch.arange(-pad, size - pad, device=shift.device)
    return (at + shift.unsqueeze(-1)).clamp(0, size - 1)


def intensity(
    images: Tensor,  # [B, *, H, W]; integers 0..255 or floats
    factor: Tensor,  # float [B]
) -> Tensor:  # float32 for integers, which are not rescaled; else of the type of images
    """Scale the intensity of whole images: x * factor.

    Nothing is clipped: white may come out above its old maximum.
    Source: Kostrikov et al. (2021), appendix E.

    >>> images = torch.full((2, 1, 1, 1), 100, dtype=torch.uint8)
    >>> intensity(images, torch.tensor([0.5, 1.5])).flatten()
    tensor([ 50., 150.])
    """
    if factor.shape != images.shape[:1]:
        raise ValueError(
            f"images of shape {list(images.shape)} need a factor of shape [{images.shape[0]}], one "
            f"for each sample, got {list(factor.shape)}"
        )
    dtype = images.dtype if images.is_floating_point() else torch.float32
    return images * factor.to(dtype).reshape(-1, *[1] * (images.dim() - 1))


def draw_shift(
    batch_size: int,
    pad: int = 4,
    generator: torch.Generator | None = None,
) -> Tensor:  # int64 [B, 2], 0..2 * pad
    """Draw shifts for `random_shift`, uniformly, on the generator's device.

    >>> shift = draw_shift(100, pad=1, generator=torch.Generator().manual_seed(0))
    >>> shift.shape, shift.unique()
    (torch.Size([100, 2]), tensor([0, 1, 2]))
    """
    device = None if generator is None else generator.device
    return torch.randint(2 * pad + 1, (batch_size, 2), generator=generator, device=device)


def draw_intensity(
    batch_size: int,
    scale: float = 0.05,
    generator: torch.Generator | None = None,
) -> Tensor:  # [B]
    """Draw factors for `intensity`: 1 + scale * clip(N(0, 1), -2, 2), on the generator's device.

    >>> factor = draw_intensity(1000, generator=torch.Generator().manual_seed(0))
    >>> bool(0.9 <= factor.min() and factor.max() <= 1.1)
    True
    """
    device = None if generator is None else generator.device
    noise = torch.randn(batch_size, generator=generator, device=device)
    return 1 + scale * noise.clamp(-2, 2)
