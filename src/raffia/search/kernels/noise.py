"""Noise at roots, compiled: what `raffia.functional.draws` draws from the same seeds."""

import math

import numpy as np

from raffia.functional.draws import GOLDEN, TRIES
from raffia.jit.kernel import kernel, load_i64, load_u8, store_f32
from raffia.search.kernels.numbers import mix

_GOLDEN = np.uint64(GOLDEN + 2**64)


@kernel
def child_seed(seed: np.uint64, choice: int) -> np.uint64:
    return mix(mix(seed + _GOLDEN) + np.uint64(choice + 1) * _GOLDEN)


@kernel
def uniform(seed: np.uint64, number: int) -> float:
    bits = mix(seed + np.uint64(number + 1) * _GOLDEN) >> np.uint64(41)
    return (np.float64(bits) + 0.5) * 2.0**-23


@kernel
def log_gamma(seed: np.uint64, a: int, num: int, alpha: float) -> float:
    """The logarithm of a draw of Gamma(alpha), the a-th of `num` from a seed."""
    d = alpha + 2 / 3
    spread = 1 / math.sqrt(9 * d)
    found = 0.0
    for i in range(TRIES):
        first = uniform(seed, (1 + 3 * i) * num + a)
        angle = uniform(seed, (2 + 3 * i) * num + a)
        chance = uniform(seed, (3 + 3 * i) * num + a)
        normal = math.sqrt(-2 * math.log(first)) * math.cos(2 * math.pi * angle)
        cube = max(1 + normal * spread, 1e-3) ** 3
        if i == 0:
            found = cube  # that of the first try, should none be accepted
        if math.log(chance) < normal * normal / 2 + d * (1 - cube + math.log(cube)):
            found = cube
            break
    return math.log(d * found) + math.log(uniform(seed, a)) / alpha


@kernel
def gumbel(num_rows: int, num: int, seed: int, choice: int, out: int) -> None:
    """Gumbel noise float32 [num_rows, num], from the children of int64 seeds for this choice."""
    for b in range(num_rows):
        own = child_seed(np.uint64(load_i64(seed + 8 * b)), choice)
        for a in range(num):
            draw = -math.log(-math.log(uniform(own, a)))
            store_f32(out + 4 * (b * num + a), np.float32(draw))


@kernel
def dirichlet(
    num_rows: int, num: int, seed: int, choice: int, legal: int, alpha: float, out: int
) -> None:
    """Dirichlet noise float32 [num_rows, num] over the legal actions; `legal` is 0 if all are."""
    for b in range(num_rows):
        own = child_seed(np.uint64(load_i64(seed + 8 * b)), choice)
        at = out + 4 * b * num
        top = -np.inf
        for a in range(num):
            if legal == 0 or load_u8(legal + b * num + a) != 0:
                top = max(top, log_gamma(own, a, num, alpha))
        total = 0.0
        for a in range(num):
            if legal == 0 or load_u8(legal + b * num + a) != 0:
                total += math.exp(log_gamma(own, a, num, alpha) - top)
        for a in range(num):
            draw = 0.0
            if legal == 0 or load_u8(legal + b * num + a) != 0:
                draw = math.exp(log_gamma(own, a, num, alpha) - top) / total
            store_f32(at + 4 * a, np.float32(draw))
