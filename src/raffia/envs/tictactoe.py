"""The exact values of all moves in all positions of TicTacToe, in one table."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from raffia.envs.board import line_masks

ILLEGAL = -2  # stands in the table where no stone may be set
_POWERS = tuple(3**cell for cell in range(9))
_FULL = 0b111111111


def position_number(own: Tensor, other: Tensor) -> Tensor:
    """The row of the table for boards of 0 and 1, each [n, 9]: int64 [n].

    A free cell counts 0, an own stone 1, one of the other 2; cell i counts 3^i times that.

    >>> own, other = torch.zeros(1, 9), torch.zeros(1, 9)
    >>> own[0, 0], other[0, 2] = 1, 1
    >>> position_number(own, other)
    tensor([19])
    """
    return ((own + 2 * other).to(torch.int64) * torch.tensor(_POWERS)).sum(-1)


@functools.cache
def move_values() -> Tensor:
    """The result of each move if both play perfectly, int8 [3^9, 9].

    1: who moves wins, 0: a draw, -1: the other wins, `ILLEGAL`: the cell is taken, the game is
    over, or the position cannot come about. Exhaustive minimax; it is done once, in some 30 ms.

    >>> move_values()[0]  # the empty board: a draw, wherever one begins
    tensor([0, 0, 0, 0, 0, 0, 0, 0, 0], dtype=torch.int8)
    """
    lines = line_masks(3, 3, 3)
    wins = [any(word & line == line for line in lines) for word in range(_FULL + 1)]
    table = [[ILLEGAL] * 9 for _ in range(3**9)]
    best: dict[tuple[int, int], int] = {}

    def solve(own: int, other: int) -> int:
        """The value of a position for the player to move."""
        if (own, other) not in best:
            best[own, other] = work_out(own, other)
        return best[own, other]

    def work_out(own: int, other: int) -> int:
        if wins[other]:
            return -1
        free = _FULL & ~(own | other)
        if not free:
            return 0
        number = sum(
            _POWERS[cell] * ((own >> cell & 1) + 2 * (other >> cell & 1)) for cell in range(9)
        )
        for cell in range(9):
            if free >> cell & 1:
                table[number][cell] = -solve(other, own | 1 << cell)
        return max(table[number])

    solve(0, 0)
    return torch.tensor(table, dtype=torch.int8)
