"""Random numbers of a search: from a generator, or from seeds for each row.

A number made here from a seed and a position is the same in any batch, on any device, in tensor
operations and in kernels: it is a mix of their bits (SplitMix64: Steele, Lea, Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014).
"""

import math

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # as the signed number with these bits
FIRST, SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x >> bits with zeros from the left."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """Hash int64 numbers (splitmix64's finaliser), so that close ones become unrelated.

    >>> mix(torch.tensor([0, 1]))
    tensor([                  0, 6238072747940578789])
    """
    x = (x ^ _shifted(x, 30)) * FIRST
    x = (x ^ _shifted(x, 27)) * SECOND
    return x ^ _shifted(x, 31)


def child_seed(seed: Tensor, choice: Tensor) -> Tensor:
    """The seed of a child by its parent's seed and the choice: int64 [M], int64 [M] -> int64 [M].

    >>> bool(child_seed(torch.tensor([7]), torch.tensor([0])) ==
    ...      child_seed(torch.tensor([7]), torch.tensor([1])))
    False
    """
    return mix(mix(seed + GOLDEN) + (choice + 1) * GOLDEN)


def seeded_uniform(seed: Tensor, num: int) -> Tensor:
    """Uniform (0, 1) numbers from seeds, `num` of each: int64 [M] -> float32 [M, num].

    >>> seeded_uniform(torch.tensor([1, 2]), 3).shape
    torch.Size([2, 3])
    >>> seeded_uniform(torch.tensor([2]), 3).equal(seeded_uniform(torch.tensor([1, 2]), 3)[1:])
    True
    """
    position = torch.arange(1, num + 1, device=seed.device)
    bits = _shifted(mix(seed.unsqueeze(-1) + position * GOLDEN), 41)  # 23 bits
    return (bits.float() + 0.5) * 2.0**-23


def seeded_gumbel(seed: Tensor, num: int) -> Tensor:
    """Gumbel(0, 1) numbers from seeds: int64 [M] -> float32 [M, num].

    >>> seeded_gumbel(torch.tensor([1]), 1000).mean().sub(0.5772).abs() < 0.1
    tensor(True)
    """
    return -(-seeded_uniform(seed, num).log()).log()


def seeded_normal(seed: Tensor, num: int) -> Tensor:
    """Normal(0, 1) numbers from seeds: int64 [M] -> float32 [M, num].

    >>> seeded_normal(torch.tensor([1]), 1000).std().sub(1).abs() < 0.1
    tensor(True)
    """
    return torch.special.ndtri(seeded_uniform(seed, num).double()).float()


def draw_seeds(num: int, generator: torch.Generator | None = None) -> Tensor:
    """Seeds int64 [num], on the generator's device; without one they are torch's own draws.

    >>> draw_seeds(2, torch.Generator().manual_seed(0)).shape
    torch.Size([2])
    """
    whole = torch.iinfo(torch.int64)
    device = None if generator is None else generator.device
    return torch.randint(
        whole.min, whole.max, (num,), generator=generator, device=device, dtype=torch.int64
    )


TRIES = 4  # all of them fail once in 300,000 numbers


def seeded_dirichlet(
    seed: Tensor,  # int64 [B]
    mask: Tensor,  # [B, A] bool: legal actions
    alpha: float = 0.3,  # concentration
) -> Tensor:  # float32 [B, A]
    """Draws from Dirichlet(alpha) over the legal actions, from seeds; rows sum to 1.

    Gamma(alpha) = Gamma(alpha + 1) U^(1 / alpha), and Gamma(alpha + 1) by the first accepted of
    four proposals of Marsaglia and Tsang (2000), "A simple method for generating gamma variables".

    >>> noise = seeded_dirichlet(torch.tensor([7]), torch.tensor([[True, True, False]]))
    >>> noise[0, 2].item(), round(noise.sum().item(), 5)
    (0.0, 1.0)
    """
    check_alpha(alpha)
    num = mask.shape[1]
    numbers = seeded_uniform(seed, (1 + 3 * TRIES) * num).double().unflatten(1, (-1, num))
    uniform, first, angle, chance = numbers[:, 0], *(numbers[:, 1 + i :: 3] for i in range(3))
    normal = (-2 * first.log()).sqrt() * (2 * math.pi * angle).cos()
    d = alpha + 2 / 3
    cube = (1 + normal / math.sqrt(9 * d)).clamp_min(1e-3) ** 3
    accepted = chance.log() < normal.square() / 2 + d * (1 - cube + cube.log())
    which = accepted.int().argmax(1, keepdim=True)
    log_gamma = (d * cube.gather(1, which).squeeze(1)).log() + uniform.log() / alpha
    return log_gamma.masked_fill(~mask, -torch.inf).softmax(-1).float().masked_fill(~mask, 0.0)


def dirichlet_noise(
    mask: Tensor,  # [B, A] bool: legal actions
    alpha: float = 0.3,  # concentration
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draws from Dirichlet(alpha) over the legal actions [B, A]; 0 where illegal, rows sum to 1.

    >>> noise = dirichlet_noise(torch.tensor([[True, True, False]]), 0.3)
    >>> noise[0, 2].item(), round(noise.sum().item(), 5)
    (0.0, 1.0)
    """
    check_alpha(alpha)
    # log Gamma(alpha) = log Gamma(alpha + 1) + log(U) / alpha: no underflow for a small alpha
    concentration = torch.full(mask.shape, alpha + 1.0, dtype=torch.float64, device=mask.device)
    gamma = torch._standard_gamma(concentration, generator=generator)
    uniform = torch.rand(mask.shape, generator=generator, dtype=torch.float64, device=mask.device)
    log_gamma = gamma.log() + uniform.clamp_min(1e-300).log() / alpha
    return log_gamma.masked_fill(~mask, -torch.inf).softmax(-1).float().masked_fill(~mask, 0.0)


def check_alpha(alpha: float) -> None:
    if not alpha > 0:
        raise ValueError(f"alpha={alpha} must be above 0; MuZero uses 0.3 for Atari and chess")


def gumbel_noise(
    shape: tuple[int, ...],
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Draws from Gumbel(0, 1), finite, float32.

    >>> gumbel_noise((2, 3), torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3])
    """
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64, device=device)
    return (-(-uniform.clamp(1e-300, 1 - 1e-16).log()).log()).float()
