"""Matrix products whose bits do not depend on the memory addresses of the matrices.

By default MKL chooses the order of a sum by the alignment of what is added, on some processors: one
row gives other last bits at another index of a batch, or in another process. Its mode of
conditional numerical reproducibility does not, and costs nothing measurable. MKL reads the mode
once, at the first product of a process.
"""

from __future__ import annotations

import os

import torch


def request_exact_products() -> bool:
    """Ask MKL for products that do not depend on memory; False if it was too late to ask.

    What MKL_CBWR says in the environment stays. Too late: the process has multiplied matrices
    already, and this processor is one on which it matters.

    Source: Intel, oneMKL Developer Guide, "Conditional Numerical Reproducibility Control".

    >>> request_exact_products()
    True
    """
    os.environ.setdefault("MKL_CBWR", "AUTO")
    return products_are_exact()


def products_are_exact() -> bool:
    """Whether products appear to have the same bits wherever their factors are in memory.

    >>> products_are_exact()
    True
    """
    size = 11  # odd, so that rows have all alignments; squares of this size show it
    values = torch.arange(2 * size * size, dtype=torch.float32, device="cpu").mul(0.7).sin()
    x, weight = values.view(2, size, size)
    expected = torch.nn.functional.linear(x, weight)
    for offset in range(1, 8):
        memory = x.new_empty(size * size + offset)
        moved = memory[offset:].view(size, size).copy_(x)
        if not torch.nn.functional.linear(moved, weight).equal(expected):
            return False
    return True
