"""TicTacToe and Connect4 against a plain implementation with lists and loops only."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raffia.envs.board import BoardGame, Connect4, TicTacToe, line_masks

SHAPES = {TicTacToe: (3, 3, 3), Connect4: (6, 7, 4)}


class PlainGame:
    """A board as a list of rows of 0, 1 and None."""

    def __init__(self, rows: int, columns: int, in_line: int) -> None:
        self.cells = [[None] * columns for _ in range(rows)]
        self.rows, self.columns, self.in_line = rows, columns, in_line
        self.player, self.over, self.won = 0, False, False

    def target(self, action: int) -> tuple[int, int] | None:
        """Where an action's stone would lie; None where it is illegal."""
        if self.over:
            return None
        if self.in_line == 3:
            row, column = divmod(action, 3)
            return (row, column) if self.cells[row][column] is None else None
        free = [row for row in range(self.rows) if self.cells[row][action] is None]
        return (max(free), action) if free else None

    def play(self, action: int) -> None:
        row, column = self.target(action)
        self.cells[row][column] = self.player
        self.won = any(
            self.run(row, column, down, right) + self.run(row, column, -down, -right) - 1
            >= self.in_line
            for down, right in ((0, 1), (1, 0), (1, 1), (1, -1))
        )
        full = all(cell is not None for line in self.cells for cell in line)
        self.over = self.won or full
        self.player = 1 - self.player

    def run(self, row: int, column: int, down: int, right: int) -> int:
        """How many stones of the same player follow one another from here."""
        owner, length = self.cells[row][column], 0
        while (
            0 <= row < self.rows and 0 <= column < self.columns and self.cells[row][column] == owner
        ):
            row, column, length = row + down, column + right, length + 1
        return length

    def observation(self) -> list:
        own = [[float(cell == self.player) for cell in line] for line in self.cells]
        other = [[float(cell == 1 - self.player) for cell in line] for line in self.cells]
        return [own, other, [[float(self.player)] * self.columns] * self.rows]


def as_lists(state) -> tuple:
    return state["observation"].tolist(), state["action_mask"].tolist(), state["to_play"].tolist()


def expected(games: list[PlainGame], num_actions: int) -> tuple:
    return (
        [game.observation() for game in games],
        [[game.target(action) is not None for action in range(num_actions)] for game in games],
        [game.player for game in games],
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TicTacToe, Connect4])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_games_equal_a_plain_implementation(kind, data):
    num_envs = 3
    batch = kind(num_envs)
    num_actions = batch.spec.action.n
    games = [PlainGame(*SHAPES[kind]) for _ in range(num_envs)]
    state = batch.reset(torch.arange(num_envs))
    assert as_lists(state) == expected(games, num_actions)
    while live := [row for row, game in enumerate(games) if not game.over]:
        rows = data.draw(st.lists(st.sampled_from(live), min_size=1, unique=True), "rows")
        actions = []
        for row in rows:
            legal = [a for a in range(num_actions) if games[row].target(a) is not None]
            actions.append(data.draw(st.sampled_from(legal)))
            games[row].play(actions[-1])
        state = batch.step(torch.tensor(actions), torch.tensor(rows))
        moved = [games[row] for row in rows]
        assert as_lists(state) == expected(moved, num_actions)
        assert state["reward"].tolist() == [float(game.won) for game in moved]
        assert state["terminated"].tolist() == [game.over for game in moved]
        assert not state["truncated"].any()


def play(game: BoardGame, actions: list[int]):
    state = game.reset(torch.zeros(game.num_envs, dtype=torch.int64))
    for action in actions:
        state = game.step(torch.full((game.num_envs,), action))
    return state


def test_a_full_board_is_a_draw_and_the_last_move_may_win():
    draw = play(TicTacToe(1), [0, 1, 2, 4, 3, 5, 7, 6, 8])
    assert draw["terminated"].all() and draw["reward"].tolist() == [0.0]
    won = play(TicTacToe(1), [0, 1, 2, 4, 3, 5, 7, 8, 6])
    assert won["terminated"].all() and won["reward"].tolist() == [1.0]
    assert not won["action_mask"].any()
    # Stones at the right end of one row and the left end of the next are no line.
    assert not play(TicTacToe(1), [2, 0, 3, 1, 4, 8])["terminated"].any()
    assert line_masks(2, 2, 2) == [0b11, 0b101, 0b1001, 0b1010, 0b110, 0b1100]
    game = TicTacToe(2)
    play(game, [4])
    assert game.board_text(1) == "  a b c\n1 . . .\n2 . X .\n3 . . ."
    assert game.action_names[5] == "c2"


@pytest.mark.parametrize(("kind", "most"), [(TicTacToe, 4), (Connect4, 6)])
def test_openings_are_drawn_from_the_seed(kind, most):
    seeds = torch.arange(40)
    game = kind(40, random_openings=most)
    first = game.reset(seeds)
    assert not (first["to_play"] - most % 2).any()
    assert first["observation"][:, :2].sum((1, 2, 3)).tolist() == [most] * 40
    assert set(first.keys()) == set(game.spec.state_keys)
    assert len({str(board) for board in first["observation"].tolist()}) > 30
    again = kind(1, random_openings=most).reset(seeds[17:18])
    assert torch.equal(again["observation"][0], first["observation"][17])
    with pytest.raises(ValueError, match=rf"must be in 0\.\.{most}"):
        kind(1, random_openings=most + 1)


def test_errors_name_the_row():
    game = Connect4(2)
    with pytest.raises(RuntimeError, match=r"rows \[0, 1\] have no running episode"):
        game.step(torch.tensor([0, 0]))
    game.reset(torch.tensor([0, 1]))
    for _ in range(6):
        game.step(torch.tensor([2]), torch.tensor([1]))
    with pytest.raises(
        ValueError, match=r"action 2 is illegal in row 1; legal actions are \[0, 1, 3,"
    ):
        game.step(torch.tensor([2, 2]))
    for action in (7, -1):
        with pytest.raises(ValueError, match=r"must be in 0 \.\. 6"):
            game.step(torch.tensor([action, 0]))
    assert "X" not in game.board_text(0)  # a refused step moves nobody
    with pytest.raises(ValueError, match=r"actions must be torch.int64 \[2\]"):
        game.step(torch.tensor([0]))
    with pytest.raises(ValueError, match=r"seeds must be int64 \[2\]"):
        game.reset(torch.tensor([1]))
    with pytest.raises(IndexError, match=r"must be in 0 \.\. 1"):
        game.reset(torch.tensor([1]), torch.tensor([2]))
    with pytest.raises(ValueError, match="each row may be given only once"):
        game.step(torch.tensor([1, 1]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="num_envs=.* must be at least 1"):
        Connect4(0)
    game = TicTacToe(2)
    play(game, [0, 3, 1, 4, 2])
    game.reset(torch.tensor([1]), torch.tensor([1]))
    with pytest.raises(RuntimeError, match=r"reset\(seeds, rows=torch.tensor\(\[0\]\)\)"):
        game.step(torch.tensor([8, 8]))
