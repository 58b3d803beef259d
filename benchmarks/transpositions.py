"""Does it help a search to know that two ways lead to the same state?

    python -m benchmarks.transpositions [--quick]   # two minutes; the table of docs/search.md

Games and a walk with their true rules as the model, uniform priors, and no evaluation but the end:
how often is the most visited move one that keeps the value of best play, with and without
transpositions, at equal numbers of simulations? The positions are those of random play with so many
empty squares, in which some move loses value and none wins at once. Best play is worked out by an
alpha-beta solver.
"""

import argparse
import functools
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from raffia.search import RecurrentOutput, RootOutput, search, state_key
from raffia.search.base import RecurrentFn, StateKey


@dataclass(frozen=True)
class LineGame:
    """Who first has `length` in a line wins; with `gravity` stones fall to the lowest row.

    Boards are int8 [M, rows * columns] of 1 (the first player), -1 and 0; row 0 is the lowest.
    """

    rows: int
    columns: int
    length: int
    gravity: bool

    @property
    def num_actions(self) -> int:
        return self.columns if self.gravity else self.rows * self.columns

    @functools.cached_property
    def lines(self) -> list[list[int]]:
        """The squares of each line."""
        found = []
        for r in range(self.rows):
            for c in range(self.columns):
                for dr, dc in ((0, 1), (1, 0), (1, 1), (1, -1)):
                    line = [(r + i * dr, c + i * dc) for i in range(self.length)]
                    if all(0 <= i < self.rows and 0 <= j < self.columns for i, j in line):
                        found.append([i * self.columns + j for i, j in line])
        return found

    @functools.cached_property
    def in_lines(self) -> Tensor:
        """[squares, lines]: 1 where a square belongs to a line."""
        member = torch.zeros(self.rows * self.columns, len(self.lines))
        for number, line in enumerate(self.lines):
            member[line, number] = 1
        return member

    def won(self, boards: Tensor) -> Tensor:
        """Whether somebody has a line [M]."""
        return ((boards.float() @ self.in_lines).abs() == self.length).any(-1)

    def legal(self, boards: Tensor) -> Tensor:
        """Where one may play [M, A]; nowhere once the game is won."""
        empty = boards == 0
        if self.gravity:
            empty = empty.view(-1, self.rows, self.columns)[:, -1]
        return empty & ~self.won(boards).unsqueeze(-1)

    def play(self, boards: Tensor, action: Tensor) -> Tensor:
        square = action
        if self.gravity:
            stones = (boards != 0).view(-1, self.rows, self.columns).sum(1)
            height = stones.gather(1, action.unsqueeze(-1)).squeeze(-1)
            square = height * self.columns + action
        mover = (1 - 2 * ((boards != 0).sum(-1) % 2)).to(boards.dtype)
        return boards.scatter(1, square.unsqueeze(-1), mover.unsqueeze(-1))

    def to_play(self, boards: Tensor) -> Tensor:
        return 1 + (boards != 0).sum(-1) % 2

    def root(self, boards: Tensor) -> RootOutput:
        num = len(boards)
        return RootOutput(
            prior_logits=torch.zeros(num, self.num_actions),
            value=torch.zeros(num),
            embedding=boards,
            mask=self.legal(boards),
            to_play=self.to_play(boards),
        )

    def recurrent_fn(self, boards: Tensor, action: Tensor) -> tuple[RecurrentOutput, Tensor]:
        boards = self.play(boards, action)
        num = len(boards)
        output = RecurrentOutput(
            reward=self.won(boards).float(),
            value=torch.zeros(num),
            prior_logits=torch.zeros(num, self.num_actions),
            mask=self.legal(boards),
            to_play=self.to_play(boards),
        )
        return output, boards


class Solver:
    """Alpha-beta with a table, on sets of squares as bits of two numbers."""

    def __init__(self, game: LineGame) -> None:
        self.game = game
        self.squares = game.rows * game.columns
        self.through: list[list[int]] = [[] for _ in range(self.squares)]
        for line in game.lines:
            for square in line:
                self.through[square].append(sum(1 << s for s in line))
        middle = (game.num_actions - 1) / 2
        self.order = sorted(range(game.num_actions), key=lambda a: abs(a - middle))
        self.known: dict[tuple[int, int], tuple[int, int]] = {}  # bounds of the value

    def moves(self, own: int, other: int) -> Iterator[tuple[int, int]]:
        """Actions and the squares they take."""
        taken, game = own | other, self.game
        for action in self.order:
            square = action
            if game.gravity:
                while square < self.squares and taken >> square & 1:
                    square += game.columns
                if square >= self.squares:
                    continue
            elif taken >> square & 1:
                continue
            yield action, square

    def wins(self, own: int, square: int) -> bool:
        own |= 1 << square
        return any(own & line == line for line in self.through[square])

    def value(self, own: int, other: int, low: int = -1, high: int = 1) -> int:
        """What the player to move gets: 1, 0 or -1, exactly if it lies between low and high."""
        least, most = self.known.get((own, other), (-1, 1))
        low, high = max(low, least), min(high, most)
        if low >= high:
            return low
        moves = list(self.moves(own, other))
        if not moves:
            return 0
        best, start = -1, low
        if any(self.wins(own, square) for _, square in moves):
            best = 1
        else:
            for _, square in moves:
                best = max(best, -self.value(other, own | 1 << square, -high, -low))
                low = max(low, best)
                if low >= high:
                    break
        if best <= start:
            self.known[own, other] = (least, best)
        else:
            self.known[own, other] = (best, most if best >= high else best)
        return best

    def wins_at_once(self, board: list[int]) -> bool:
        own, other = sides(board)
        return any(self.wins(own, square) for _, square in self.moves(own, other))

    def worth(self, board: list[int]) -> list[int]:
        """What each action is worth to the player to move; -2 where it is not legal."""
        own, other = sides(board)
        found = [-2] * self.game.num_actions
        for action, square in self.moves(own, other):
            won = self.wins(own, square)
            found[action] = 1 if won else -self.value(other, own | 1 << square)
        return found


def sides(board: list[int]) -> tuple[int, int]:
    """The squares of who is to move and of the other, as bits."""
    mover = 1 if sum(x != 0 for x in board) % 2 == 0 else -1
    own = sum(1 << s for s, x in enumerate(board) if x == mover)
    return own, sum(1 << s for s, x in enumerate(board) if x == -mover)


def positions(game: LineGame, empty: int, num: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Unlike positions of random play in which some move loses value, and what moves are worth."""
    draw, solver = random.Random(seed), Solver(game)
    found: dict[tuple[int, ...], list[int]] = {}
    squares = game.rows * game.columns
    for _ in range(50 * num):  # fewer may exist
        if len(found) == num:
            break
        board = torch.zeros(1, squares, dtype=torch.int8)
        while int((board == 0).sum()) > empty and bool(game.legal(board).any()):
            moves = game.legal(board)[0].nonzero().flatten().tolist()
            board = game.play(board, torch.tensor([draw.choice(moves)]))
        if not bool(game.legal(board).any()):
            continue
        worth = solver.worth(board[0].tolist())
        if len({w for w in worth if w > -2}) > 1 and not solver.wins_at_once(board[0].tolist()):
            found[tuple(board[0].tolist())] = worth
    return torch.tensor(list(found), dtype=torch.int8), torch.tensor(list(found.values()))


STEPS = torch.tensor([[1, 0], [0, 1], [-1, 0], [0, -1]])
SIDE = 15


def walk(embedding: Tensor, action: Tensor) -> tuple[RecurrentOutput, Tensor]:
    """One step on a board of 15 x 15 [M, (place, treasure)]; 1 on reaching the treasure."""
    after = (embedding[:, :2] + STEPS[action]).clamp(0, SIDE - 1)
    arrived, num = (after == embedding[:, 2:]).all(-1), len(action)
    output = RecurrentOutput(
        reward=arrived.float(),
        value=torch.zeros(num),
        prior_logits=torch.zeros(num, 4),
        mask=~arrived.unsqueeze(-1).expand(num, 4),
    )
    return output, torch.cat([after, embedding[:, 2:]], -1)


@dataclass(frozen=True)
class Case:
    """Roots, their model, and what each action of a root is worth."""

    name: str
    root: RootOutput
    recurrent_fn: RecurrentFn
    worth: Tensor  # [B, A]
    discount: float = 1.0


def game_case(name: str, game: LineGame, empty: int, num: int) -> Case:
    boards, worth = positions(game, empty, num)
    return Case(f"{name}, {empty} empty", game.root(boards), game.recurrent_fn, worth)


def walk_case(distance: int, num: int) -> Case:
    ends = torch.randint(0, SIDE, (400 * num, 4), generator=torch.Generator().manual_seed(0))
    ends = ends[(ends[:, :2] - ends[:, 2:]).abs().sum(-1) == distance][:num]
    after = (ends[:, None, :2] + STEPS).clamp(0, SIDE - 1)
    away = (after - ends[:, None, 2:]).abs().sum(-1)
    rows = len(ends)
    root = RootOutput(torch.zeros(rows, 4), torch.zeros(rows), ends)
    return Case(f"treasure {distance} steps away", root, walk, -away, discount=0.95)


@dataclass(frozen=True)
class Found:
    """What a search of all roots came to."""

    best: float  # fraction of roots whose most visited action is a best one
    nodes: float  # mean number
    num_distinct: float  # distinct states among them, mean number
    seconds: float  # CPU time of the process


def plan(case: Case, simulations: int, key: StateKey | None) -> Found:
    start = time.process_time()
    tree = search(
        case.root,
        case.recurrent_fn,
        num_simulations=simulations,
        discount=case.discount,
        transpositions=key,
    )
    seconds = time.process_time() - start
    action = tree.visits_of_root().argmax(-1, keepdim=True)
    best = case.worth.gather(1, action) == case.worth.amax(-1, keepdim=True)
    made = tree.data["parent"] >= 0
    made[:, 0] = True
    nodes = made.sum(-1).float().mean().item()
    num_distinct = nodes
    if "key" in tree.data:
        pairs = zip(tree.data["key"], made, strict=True)
        num_distinct = statistics.mean(len(keys[rows].unique()) for keys, rows in pairs)
    return Found(best.float().mean().item(), nodes, num_distinct, seconds)


def row(case: Case, simulations: int, rounds: int) -> str:
    pairs = [
        (plan(case, simulations, None), plan(case, simulations, state_key())) for _ in range(rounds)
    ]
    without, shared = pairs[0]
    num = len(case.worth)
    ratio = statistics.median(b.seconds / a.seconds for a, b in pairs)
    each = statistics.median(a.seconds for a, _ in pairs) / num * 1e3
    cells = [
        f"{case.name} ({num})",
        str(simulations),
        f"{without.best:.0%}",
        f"{shared.best:.0%}",
        f"{shared.num_distinct:.0f} of {shared.nodes:.0f}",
        f"{each:.2f}",
        f"{ratio:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


HEADER = (
    "| positions (how many) | simulations | best move | ... shared | unlike states | ms | times |\n"
    "|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Searches with and without transpositions.")
    parser.add_argument("--quick", action="store_true", help="a rough look")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    num, rounds = (10, 1) if quick else (60, 3)
    tictactoe, connect4 = LineGame(3, 3, 3, False), LineGame(6, 7, 4, True)
    print(HEADER)
    for case, budgets in (
        (game_case("TicTacToe", tictactoe, 6, num), (50, 200, 800)),
        (game_case("Connect4", connect4, 14, num), (50, 200, 800)),
        (game_case("Connect4", connect4, 16, num), (50, 200, 800)),
        (walk_case(4, num), (50, 200, 800)),
        (walk_case(6, num), (200, 800, 1600)),
    ):
        plan(case, 2, state_key())  # loads or compiles the kernels
        for simulations in budgets:
            print(row(case, simulations, rounds), flush=True)


if __name__ == "__main__":
    main()
