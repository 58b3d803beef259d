"""TicTacToe by planning with its rules: against chance, and against itself.

    python examples/plan_tictactoe.py            # seconds; draws plan_tictactoe.svg

Nothing is learnt and nothing about good play is given: the model of the search is the rules. A
hundred games are planned at once, and the planner is a keyed module, which reads the board, the
legal moves and who is to move, and writes the action.
"""

import functools

import torch
from torch import Tensor

from raffia import TensorDict
from raffia.search import (
    FunctionModel,
    KeyedSearch,
    RecurrentOutput,
    RootOutput,
    muzero_policy,
    search,
    state_key,
)

LINES = torch.tensor(  # the rows, columns and diagonals of the board
    [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]]
)
SQUARES = [row + column for row in "abc" for column in "123"]
CROSS, CIRCLE = 1, 2


def to_play(board: Tensor) -> Tensor:
    """Who is to move [M]; a board is [M, 9] of 0, CROSS and CIRCLE, and cross begins."""
    return CROSS + (board != 0).sum(-1) % 2


def won(board: Tensor) -> Tensor:
    """Whether somebody has three in a line [M]."""
    line = board[:, LINES]
    return ((line != 0) & (line == line[..., :1])).all(-1).any(-1)


def legal(board: Tensor) -> Tensor:
    """Where one may play [M, 9]; nowhere once the game is over."""
    return (board == 0) & ~won(board)[:, None]


def play(board: Tensor, action: Tensor) -> Tensor:
    return board.scatter(1, action[:, None], to_play(board)[:, None])


def root(board: Tensor, mask: Tensor, to_play: Tensor) -> RootOutput:
    """What is known of a position: nothing but the rules."""
    nothing = torch.zeros(board.shape)
    return RootOutput(nothing, nothing[:, 0], board, mask, to_play)


def rules(board: Tensor, action: Tensor) -> tuple[RecurrentOutput, Tensor]:
    """Where a move leads; three in a line pay 1 to who made them."""
    board = play(board, action)
    nothing = torch.zeros(board.shape)
    output = RecurrentOutput(
        reward=won(board).float(),
        value=nothing[:, 0],
        prior_logits=nothing,
        mask=legal(board),
        to_play=to_play(board),
    )
    return output, board


def positions(board: Tensor) -> TensorDict:
    return TensorDict(
        board=board, legal=legal(board), to_play=to_play(board), batch_size=board.shape[:1]
    )


def planner(num_simulations: int) -> KeyedSearch:
    return KeyedSearch(
        FunctionModel(root, rules),
        functools.partial(
            muzero_policy,
            num_simulations=num_simulations,
            discount=1.0,
            dirichlet_fraction=0.0,
            temperature=0.0,
        ),
        in_keys=["board"],
        mask_key="legal",
        to_play_key="to_play",
    )


def against_chance(plan: KeyedSearch, num_games: int, ours: int) -> Tensor:
    """Wins, draws and losses of the planner as `ours`, against random moves."""
    draw = torch.Generator().manual_seed(ours)
    board = torch.zeros(num_games, 9, dtype=torch.int64)
    for ply in range(9):
        goes_on = legal(board).any(-1)
        states = positions(board[goes_on])
        if CROSS + ply % 2 == ours:
            action = plan(states)["action"]
        else:
            action = torch.multinomial(states["legal"].float(), 1, generator=draw)[:, 0]
        board[goes_on] = play(board[goes_on], action)
    winner = torch.where(won(board), 3 - to_play(board), 0)
    return torch.stack([(winner == ours).sum(), (winner == 0).sum(), (winner == 3 - ours).sum()])


def against_itself(plan: KeyedSearch) -> list[Tensor]:
    """The boards of a game [9] between two of the same planner."""
    board = torch.zeros(1, 9, dtype=torch.int64)
    boards = [board[0]]
    while bool(legal(board).any()):
        board = play(board, plan(positions(board))["action"])
        boards.append(board[0])
    return boards


def drawn(boards: list[Tensor]) -> str:
    """Boards side by side."""
    rows = [[board[3 * row : 3 * row + 3].tolist() for board in boards] for row in range(3)]
    return "\n".join(
        "   ".join("".join(".xo"[square] for square in squares) for squares in row) for row in rows
    )


def main() -> None:
    for num_simulations in (10, 100):
        plan = planner(num_simulations)
        for name, ours in (("first", CROSS), ("second", CIRCLE)):
            wins, draws, losses = against_chance(plan, 100, ours).tolist()
            print(
                f"{num_simulations:3d} simulations, to move {name:6s}: "
                f"{wins:3d} won, {draws:2d} drawn, {losses:2d} lost against chance"
            )

    print("\nagainst itself, 800 simulations a move:")
    print(drawn(against_itself(planner(800))))

    print("\nwhat it thinks of one position, states that are reached in many ways counted once:")
    board = torch.tensor([[CROSS, CIRCLE, 0, 0, CROSS, 0, 0, 0, CIRCLE]])
    print(drawn([board[0]]))
    start = root(board, legal(board), to_play(board))
    tree = search(start, rules, num_simulations=200, discount=1.0, transpositions=state_key())
    print(tree.summary(max_nodes=8, action_names=SQUARES))
    tree.save_picture("plan_tictactoe.svg", action_names=SQUARES)
    print("drawn: plan_tictactoe.svg")


if __name__ == "__main__":
    main()
