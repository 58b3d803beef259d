"""TicTacToe by its true rules, on tensors: replaces a learned model in searches.

A board is int64 [9]: 0 where empty, else the player who took the square; player 1 begins.
A won game pays 1 to the player who made the last move; states that are not over have value 0.
"""

import functools

import torch
from torch import Tensor

from raffia.search import RecurrentOutput, RootOutput

LINES = torch.tensor(
    [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]]
)
POWERS = 3 ** torch.arange(9)


def player(boards: Tensor) -> Tensor:
    """Who is to move [M]: 1 or 2."""
    return 1 + (boards > 0).sum(-1) % 2


def won(boards: Tensor) -> Tensor:
    """Whether a player has three in a row [M]."""
    line = boards[:, LINES]
    return ((line > 0) & (line == line[..., :1])).all(-1).any(-1)


def legal(boards: Tensor) -> Tensor:
    """Legal squares [M, 9]; none once the game is won."""
    return (boards == 0) & ~won(boards).unsqueeze(-1)


def play(boards: Tensor, action: Tensor) -> Tensor:
    """The boards after the moves [M, 9]."""
    return boards.scatter(1, action.unsqueeze(-1), player(boards).unsqueeze(-1))


def code(boards: Tensor) -> Tensor:
    """A number for each board [M], equal only for equal boards."""
    return (boards * POWERS).sum(-1)


def rules(boards: Tensor, action: Tensor) -> tuple[RecurrentOutput, Tensor]:
    """The recurrent function."""
    boards = play(boards, action)
    output = RecurrentOutput(
        reward=won(boards).float(),
        value=torch.zeros(len(boards)),
        prior_logits=torch.zeros(len(boards), 9),
        mask=legal(boards),
        to_play=player(boards),
    )
    return output, boards


def root_of(boards: Tensor) -> RootOutput:
    """Search roots with uniform priors."""
    return RootOutput(
        prior_logits=torch.zeros(len(boards), 9),
        value=torch.zeros(len(boards)),
        embedding=boards,
        mask=legal(boards),
        to_play=player(boards),
    )


@functools.cache
def solution() -> dict[tuple[int, ...], int]:
    """The value for the player to move, 1, 0 or -1, of every reachable position."""
    found: dict[tuple[int, ...], int] = {}
    lines = LINES.tolist()

    def value(board: tuple[int, ...]) -> int:
        if board not in found:
            if any(board[i] and board[i] == board[j] == board[k] for i, j, k in lines):
                found[board] = -1
            elif 0 not in board:
                found[board] = 0
            else:
                found[board] = max(-value(after) for after in successors(board).values())
        return found[board]

    value((0,) * 9)
    return found


def successors(board: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """The board after each move of a game that is not over."""
    mover = 1 + (9 - board.count(0)) % 2
    return {a: (*board[:a], mover, *board[a + 1 :]) for a in range(9) if board[a] == 0}


@functools.cache
def positions() -> tuple[Tensor, Tensor]:
    """Every reachable board that is not over [4520, 9], and the value of each move [4520, 9]:
    1, 0 or -1 to the player who makes it, -2 where it is not legal."""
    value = solution()
    boards = torch.tensor(list(value))
    boards = boards[legal(boards).any(-1)]
    worth = torch.full((len(boards), 9), -2)
    for row, board in zip(worth, boards.tolist(), strict=True):
        for action, after in successors(tuple(board)).items():
            row[action] = -value[after]
    return boards, worth
