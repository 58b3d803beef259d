"""Tic-tac-toe solved exactly: positions that are reached in many ways are one row of a map.

    pip install matplotlib
    python examples/transpositions.py            # seconds; draws transpositions.png

The game tree is walked ply by ply, all positions of a ply at once. `TensorDictMap` merges those
that are equal (transpositions) and adds up in how many ways each is reached, so the tree of 549,946
nodes becomes 5,478 positions. Then the values are worked out from the last ply back to the first:
each position asks the map for the values of all its successors in one query.
"""

import matplotlib
import torch

from raffia import TensorDict
from raffia.data import TensorDictMap

LINES = torch.tensor(  # the rows, columns and diagonals of the board
    [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]]
)
CELLS = torch.arange(9).reshape(3, 3)
SYMMETRIES = torch.stack(  # the board turned and mirrored, as orders of its cells: [8, 9]
    [torch.rot90(side, turns).flatten() for side in (CELLS, CELLS.T) for turns in range(4)]
)


def positions(board: torch.Tensor) -> TensorDict:
    """Boards [..., 9] of 1 (who moves next), -1 (who moved last) and 0 as keys of a map."""
    return TensorDict(board=board, batch_size=board.shape[:-1])


def lost(board: torch.Tensor) -> torch.Tensor:
    """Whether the player who moves next is already beaten: [..., 9] -> [...]."""
    return (board[..., LINES].sum(-1) == -3).any(-1)


def successors(board: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The boards after each of nine moves, seen by the other player, and which moves are legal."""
    legal = (board == 0) & ~lost(board)[:, None]
    return -(board[:, None] + torch.eye(9, dtype=board.dtype)), legal


def smallest_twin(board: torch.Tensor) -> torch.Tensor:
    """Of the eight turned and mirrored boards the one that comes first: [N, 9] -> [N, 9]."""
    twins = board[:, SYMMETRIES]
    rank = ((twins + 1).long() * 3 ** torch.arange(9)).sum(-1)
    return twins[torch.arange(len(board)), rank.argmin(-1)]


def walk() -> list[TensorDictMap]:
    """For each ply a map from its positions to the number of ways in which they are reached."""
    first = TensorDictMap(in_keys=["board"])
    first[positions(torch.zeros(1, 9, dtype=torch.int8))] = TensorDict(
        ways=torch.ones(1, dtype=torch.int64), batch_size=[1]
    )
    plies = [first]
    while len(plies[-1]):
        reached, values = plies[-1].items()
        board, legal = successors(reached["board"])
        ways = values["ways"][:, None].expand_as(legal)[legal]
        ply = TensorDictMap(in_keys=["board"])
        ply.update(
            positions(board[legal]), TensorDict(ways=ways, batch_size=ways.shape), merge="sum"
        )
        plies.append(ply)
    return plies[:-1]


def solve(plies: list[TensorDictMap]) -> TensorDictMap:
    """From each position to what it is worth for who moves next: 1 won, 0 drawn, -1 lost."""
    worth = TensorDictMap(in_keys=["board"])
    for ply in reversed(plies):
        board = ply.keys()["board"]
        after, legal = successors(board)
        nothing = TensorDict(value=torch.tensor(0, dtype=torch.int8))
        value = -worth.get(positions(after), nothing)["value"]  # of all nine moves in one query
        best = value.masked_fill(~legal, -1).amax(-1)
        value = torch.where(legal.any(-1), best, -lost(board).to(torch.int8))
        worth[positions(board)] = TensorDict(value=value, batch_size=value.shape)
    return worth


def main() -> None:
    plies = walk()
    nodes = [int(ply.values()["ways"].sum()) for ply in plies]
    merged = [len(ply) for ply in plies]
    unlike = []
    for ply in plies:
        twins = TensorDictMap(in_keys=["board"])
        board = smallest_twin(ply.keys()["board"])
        twins[positions(board)] = positions(board)
        unlike.append(len(twins))
    print("ply   nodes of the tree   positions   ... up to symmetry")
    for number, row in enumerate(zip(nodes, merged, unlike, strict=True)):
        print(f"{number:3d} {row[0]:19,d} {row[1]:11,d} {row[2]:20,d}")
    print(f"sum {sum(nodes):19,d} {sum(merged):11,d} {sum(unlike):20,d}")

    worth = solve(plies)
    value = int(worth[positions(torch.zeros(9, dtype=torch.int8))]["value"])
    outcome = {1: "the first player wins", 0: "a draw", -1: "the second player wins"}[value]
    print(f"played well by both, the game is {outcome}")

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 4), layout="constrained")
    axis.semilogy(nodes, marker="o", label="nodes of the game tree")
    axis.semilogy(merged, marker="o", label="positions (transpositions merged)")
    axis.semilogy(unlike, marker="o", label="positions up to symmetry")
    axis.set(title="Tic-tac-toe", xlabel="ply", ylabel="number")
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig("transpositions.png", dpi=120)
    print("drawn: transpositions.png")


if __name__ == "__main__":
    main()
