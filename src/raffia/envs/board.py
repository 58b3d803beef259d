"""Two-player board games, played on many boards in parallel: TicTacToe and Connect4.

A board is two 64-bit words, one for the stones of each player; a cell is a bit of them, number
`row * columns + column` from the top left. So all boards move in a few operations on tensors [E].

After the end of a game no action is legal: its mask is all False, and its observation is what the
loser (or who would be next) sees. A search is not asked there: see `skip_ended` of KeyedSearch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raffia.envs.env import Discrete, EnvSpec
from raffia.envs.rows import checked_actions, checked_seeds, chosen_rows, refuse_ended
from raffia.functional.seeds import derive_seed
from raffia.hints import check_range
from raffia.tensordict.tensordict import TensorDict

CELL = 48  # pixels, of a picture's squares


def line_masks(rows: int, columns: int, in_line: int) -> list[int]:
    """The lines of a board, each as a word with the bits of its cells.

    >>> [bin(line) for line in line_masks(1, 4, 3)]
    ['0b111', '0b1110']
    >>> len(line_masks(3, 3, 3)), len(line_masks(6, 7, 4))
    (8, 69)
    """
    lines = []
    for row in range(rows):
        for column in range(columns):
            for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
                cells = [(row + i * down, column + i * right) for i in range(in_line)]
                if all(r < rows and 0 <= c < columns for r, c in cells):
                    lines.append(sum(1 << (r * columns + c) for r, c in cells))
    return lines


class BoardGame:
    """E boards on which two players put stones in turns; the first to have a line of them wins.

    A state's observation is float32 [3, rows, columns] from the view of the player to move: the own
    stones, the other's, and a plane of 0 or 1, which of the players that is. The reward is 1 to who
    wins by this move; a draw and every other move give 0.

    >>> game = TicTacToe(2)
    >>> state = game.reset(torch.zeros(2, dtype=torch.int64))
    >>> state["observation"].shape, state["action_mask"].shape, state["to_play"]
    (torch.Size([2, 3, 3, 3]), torch.Size([2, 9]), tensor([0, 0]))
    """

    rows: int
    columns: int
    in_line: int
    symbols = ("X", "O")  # of the players in a text
    action_names: tuple[str, ...]  # names of the actions for people
    colours: tuple[tuple[int, int, int], ...]  # colours of the ground, the lines, the two players

    def __init__(self, num_envs: int, name: str, *, random_openings: int = 0) -> None:
        check_range("num_envs", num_envs, 1)
        # With more random moves the game may be over before it is played.
        check_range("random_openings", random_openings, 0, 2 * self.in_line - 2)
        self.num_envs = num_envs
        self.random_openings = random_openings
        self.spec = EnvSpec(
            observation_shape=(3, self.rows, self.columns),
            action=Discrete(len(self.action_names)),
            num_players=2,
            masked=True,
            name=name,
        )
        self._lines = torch.tensor(line_masks(self.rows, self.columns, self.in_line), device="cpu")
        self._cells = torch.arange(self.rows * self.columns, device="cpu")
        self._full = (1 << len(self._cells)) - 1
        self._stones = torch.zeros(num_envs, 2, dtype=torch.int64, device="cpu")  # bits, by player
        self._to_play = torch.zeros(num_envs, dtype=torch.int64, device="cpu")
        self._mask = torch.zeros(num_envs, len(self.action_names), dtype=torch.bool, device="cpu")

    def _legal(self, occupied: Tensor) -> Tensor:
        """A mask of the legal actions on boards [n] in play, bool [n, A]."""
        raise NotImplementedError

    def _cell(self, occupied: Tensor, action: Tensor) -> Tensor:
        """The cell in which the stone of a legal action [n] ends up, [n]."""
        raise NotImplementedError

    def reset(self, seeds: Tensor, rows: Tensor | None = None) -> TensorDict:
        """Start games from these seeds int64 [n] in these rows int64 [n] (None: all): states [n].

        The seed decides the first `random_openings` moves, each drawn among the legal ones; without
        them all games begin equal.
        """
        index = self._index(rows)
        numbers = checked_seeds(seeds, len(index))
        self._stones[index] = 0
        self._to_play[index] = 0
        self._mask[index] = True
        state = self._state(index)
        for ply in range(self.random_openings):
            options = [row.nonzero()[:, 0].tolist() for row in state["action_mask"]]
            action = [
                legal[derive_seed(seed, "opening", ply) % len(legal)]
                for seed, legal in zip(numbers, options, strict=True)
            ]
            state = self.step(index.new_tensor(action), index).select(*self.spec.state_keys)
        return state

    def step(self, action: Tensor, rows: Tensor | None = None) -> TensorDict:
        """Move in these rows (None: all), action int64 [n]: the states after it, [n]."""
        index = self._index(rows)
        checked_actions(action, self.spec, len(index))
        self._refuse_illegal(action, index)
        stones, player = self._stones[index], self._to_play[index, None]
        occupied = stones[:, 0] | stones[:, 1]
        bit = 1 << self._cell(occupied, action)
        own = stones.gather(1, player)[:, 0] | bit
        occupied = occupied | bit
        won = ((own[:, None] & self._lines) == self._lines).any(-1)
        ended = won | (occupied == self._full)
        self._stones[index] = stones.scatter(1, player, own[:, None])
        self._to_play[index] = 1 - player[:, 0]
        self._mask[index] = self._legal(occupied) & ~ended[:, None]
        state = self._state(index)
        state["reward"] = won.float()
        state["terminated"] = ended
        state["truncated"] = torch.zeros_like(ended)
        return state

    def board_text(self, row: int) -> str:
        """One board as text: X began, a dot is free."""
        cells = self._planes(self._stones[row])
        signs = [
            self.symbols[0] if first else self.symbols[1] if second else "."
            for first, second in cells.T.tolist()
        ]
        lines = [signs[i : i + self.columns] for i in range(0, len(signs), self.columns)]
        return self._labelled([" ".join(line) for line in lines])

    def _labelled(self, lines: list[str]) -> str:
        raise NotImplementedError

    def render(self, row: int) -> Tensor:
        """A picture of one board, uint8 [48 rows, 48 columns, 3]."""
        ground, marks = self._square()
        ground_colour, line_colour, *players = (
            torch.tensor(colour, dtype=torch.float32, device="cpu") for colour in self.colours
        )
        square = torch.lerp(ground_colour, line_colour, ground[..., None])  # [CELL, CELL, 3]
        squares = square.expand(len(self._cells), CELL, CELL, 3).clone()
        for plane, mark, colour in zip(
            self._planes(self._stones[row]).bool(), marks, players, strict=True
        ):
            squares[plane] = torch.lerp(square, colour, mark[..., None])
        board = squares.unflatten(0, (self.rows, self.columns)).transpose(1, 2)
        return board.reshape(CELL * self.rows, CELL * self.columns, 3).round().to(torch.uint8)

    def _square(self) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """How much of each pixel is line, and stone of each player: [CELL, CELL] of 0..1."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the games; they hold nothing to release."""

    def _planes(self, stones: Tensor) -> Tensor:
        """Words [...] as cells of 0 and 1, [..., cells]."""
        return (stones[..., None] >> self._cells) & 1

    def _state(self, index: Tensor) -> TensorDict:
        player = self._to_play[index]
        stones = self._stones[index]
        mine_first = torch.where(player[:, None] == 0, stones, stones.flip(1))
        planes = self._planes(mine_first)
        turn = player[:, None, None].expand(-1, 1, planes.shape[-1])
        observation = torch.cat([planes, turn], 1).float()
        return TensorDict(
            observation=observation.unflatten(-1, (self.rows, self.columns)),
            action_mask=self._mask[index],
            to_play=player,
            batch_size=[len(index)],
        )

    def _index(self, rows: Tensor | None) -> Tensor:
        return torch.tensor(chosen_rows(rows, self.num_envs), dtype=torch.int64, device="cpu")

    def _refuse_illegal(self, action: Tensor, index: Tensor) -> None:
        mask = self._mask[index]
        legal = mask.gather(1, action[:, None])[:, 0]
        if not legal.all():
            refuse_ended(index[~mask.any(-1)].tolist())
            at = int((~legal).nonzero()[0])
            raise ValueError(
                f"action {int(action[at])} is illegal in row {int(index[at])}; legal actions are "
                f"{mask[at].nonzero()[:, 0].tolist()}"
            )


def _pixels() -> tuple[Tensor, Tensor]:
    """The offsets of each pixel of a square, right of and below the centre, in -1..1."""
    at = (torch.arange(CELL, device="cpu") + 0.5) * 2 / CELL - 1
    return at.expand(CELL, CELL), at[:, None].expand(CELL, CELL)


def _inside(distance: Tensor) -> Tensor:
    """The fraction of a pixel inside a shape, 0..1, by its signed distance (negative inside)."""
    return (0.5 - distance * CELL / 2).clamp(0, 1)


class TicTacToe(BoardGame):
    """E games of TicTacToe: 3 in a line of 3 x 3; action `3 * row + column` sets a stone there.

    >>> game = TicTacToe(1)
    >>> state = game.reset(torch.tensor([0]))
    >>> for square in (4, 0, 2, 6, 3):
    ...     state = game.step(torch.tensor([square]))
    >>> print(game.board_text(0))
      a b c
    1 O . X
    2 X X .
    3 O . .
    >>> game.step(torch.tensor([4]))
    Traceback (most recent call last):
        ...
    ValueError: action 4 is illegal in row 0; legal actions are [1, 5, 7, 8]
    """

    rows, columns, in_line = 3, 3, 3
    action_names = tuple(column + row for row in "123" for column in "abc")
    colours = ((250, 248, 242), (120, 116, 108), (38, 84, 140), (201, 87, 43))

    def __init__(self, num_envs: int, *, random_openings: int = 0) -> None:
        super().__init__(num_envs, "tictactoe", random_openings=random_openings)

    def _legal(self, occupied: Tensor) -> Tensor:
        return self._planes(occupied) == 0

    def _cell(self, occupied: Tensor, action: Tensor) -> Tensor:
        return action

    def _labelled(self, lines: list[str]) -> str:
        return "\n".join(["  a b c", *(f"{i + 1} {line}" for i, line in enumerate(lines))])

    def _square(self) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x, y = _pixels()
        edge = _inside(1 - 2 / CELL - torch.maximum(x.abs(), y.abs()))
        arms = torch.minimum((x - y).abs(), (x + y).abs()) / 2**0.5 - 0.11
        cross = _inside(torch.maximum(arms, torch.maximum(x.abs(), y.abs()) - 0.6))
        ring = _inside(((x.square() + y.square()).sqrt() - 0.55).abs() - 0.11)
        return edge, (cross, ring)


class Connect4(BoardGame):
    """E games of Connect4: 4 in a line of 6 x 7; action `column` drops a stone there.

    Row 0 is the top one, so that the first stone of a column lies in row 5.

    >>> game = Connect4(1)
    >>> state = game.reset(torch.tensor([0]))
    >>> for column in (3, 3, 2, 1, 4, 4, 5):
    ...     state = game.step(torch.tensor([column]))
    >>> state["reward"], state["terminated"]
    (tensor([1.]), tensor([True]))
    >>> print(game.board_text(0))
    1 2 3 4 5 6 7
    . . . . . . .
    . . . . . . .
    . . . . . . .
    . . . . . . .
    . . . O O . .
    . O X X X X .
    """

    rows, columns, in_line = 6, 7, 4
    action_names = tuple("1234567")
    colours = ((30, 92, 168), (236, 240, 245), (214, 64, 52), (242, 196, 48))

    def __init__(self, num_envs: int, *, random_openings: int = 0) -> None:
        super().__init__(num_envs, "connect4", random_openings=random_openings)

    def _legal(self, occupied: Tensor) -> Tensor:
        return ((occupied[:, None] >> self._cells[: self.columns]) & 1) == 0  # free at the top

    def _cell(self, occupied: Tensor, action: Tensor) -> Tensor:
        column = action[:, None] + self._cells[:: self.columns]  # [n, rows], from the top
        height = ((occupied[:, None] >> column) & 1).sum(-1)
        return action + self.columns * (self.rows - 1 - height)

    def _labelled(self, lines: list[str]) -> str:
        return "\n".join([" ".join(self.action_names), *lines])

    def _square(self) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x, y = _pixels()
        disc = _inside((x.square() + y.square()).sqrt() - 0.78)
        return disc, (disc, disc)
