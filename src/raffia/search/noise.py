"""Noise of a search's roots from the seeds of their rows: a row's is the same in any batch."""

from __future__ import annotations

import torch
from torch import Tensor

from raffia import jit
from raffia.functional.draws import child_seed, seeded_dirichlet, seeded_gumbel
from raffia.search import kernels


def root_gumbel(
    seed: Tensor,  # int64 [B]
    num_actions: int,  # A
    choice: int = 0,  # draws for different uses have different numbers
) -> Tensor:  # float32 [B, A]
    """Gumbel noise of each row, from the child of its seed.

    >>> seed = torch.tensor([7, 8])
    >>> root_gumbel(seed, 3)[1:].equal(root_gumbel(seed[1:], 3))
    True
    """
    if not jit.available():
        return seeded_gumbel(child_seed(seed, torch.tensor(choice)), num_actions)
    seed = seed.contiguous()
    out = torch.empty(len(seed), num_actions)
    kernels.noise.gumbel(len(seed), num_actions, seed.data_ptr(), choice, out.data_ptr())
    return out


def root_dirichlet(
    seed: Tensor,  # int64 [B]
    num_actions: int,  # A
    alpha: float,  # concentration
    mask: Tensor | None = None,  # bool [B, A], True where the action is legal; None: all are
    choice: int = 0,  # draws for different uses have different numbers
) -> Tensor:  # float32 [B, A]
    """Dirichlet noise over the legal actions of each row, from the child of its seed.

    >>> noise = root_dirichlet(torch.tensor([7]), 3, 0.3)
    >>> round(noise.sum().item(), 5)
    1.0
    """
    if not alpha > 0 or not jit.available():
        legal = torch.ones(len(seed), num_actions).bool() if mask is None else mask
        return seeded_dirichlet(child_seed(seed, torch.tensor(choice)), legal, alpha)
    seed, out = seed.contiguous(), torch.empty(len(seed), num_actions)
    legal_actions = None if mask is None else mask.cpu().contiguous()
    kernels.noise.dirichlet(
        *(len(seed), num_actions, seed.data_ptr(), choice),
        *(0 if legal_actions is None else legal_actions.data_ptr(), float(alpha), out.data_ptr()),
    )
    return out
