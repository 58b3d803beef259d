"""The loop of `raffia.envs.resize.area`, which documents what it computes."""

from typing import Any

import numpy as np

from raffia.jit.kernel import kernel


@kernel
def area(
    picture: Any,  # uint8 [H, W * C]
    channels: int,
    first: Any,  # int64 [w], the first old column that lies in each new one
    weights: Any,  # int32 [taps, w], how much of it and of those behind it
    target: Any,  # uint8 [C, h, w], is filled
) -> None:
    """Weigh old lines into one line, and its columns into new ones, in whole numbers."""
    height, length = picture.shape
    new_height, new_width = target.shape[1], target.shape[2]
    taps = len(weights)
    whole = height * (length // channels)
    # Sums are whole numbers of 1 / (2 * whole); the little more undoes the rounding of the product.
    scale, little = 1.0 / (2 * whole), 0.25 / whole
    line = np.zeros(length + taps * channels, np.int32)  # weights behind the last column are 0
    total = np.empty(new_width, np.int32)
    for y in range(new_height):
        line[:] = 0
        low, high = y * height, (y + 1) * height  # in lines / new_height
        for i in range(low // new_height, (high - 1) // new_height + 1):
            weight = np.int32(min(high, (i + 1) * new_height) - max(low, i * new_height))
            old = picture[i]
            for k in range(length):
                line[k] += np.int32(weight * np.int32(old[k]))
        for c in range(channels):
            total[:] = 0
            for tap in range(taps):
                of_tap, shift = weights[tap], tap * channels + c
                for x in range(new_width):
                    total[x] += np.int32(of_tap[x] * line[first[x] * channels + shift])
            for x in range(new_width):
                mean = (2 * np.int64(total[x]) + whole) * scale + little
                target[c, y, x] = np.uint8(np.int32(mean))
