"""Opponents against exhaustive search in plain Python, and against chance."""

import functools
import random

import pytest
import torch

from raffia.envs import connect4
from raffia.envs.board import Connect4, TicTacToe, line_masks
from raffia.envs.env import Box, Discrete, EnvSpec
from raffia.envs.opponents import (
    ILLEGAL,
    PerfectTicTacToe,
    RandomOpponent,
    RuleConnect4,
    make_opponent,
    move_values,
)
from raffia.tensordict.tensordict import TensorDict


def play(game, first, second, seed=0):
    """Plays all boards together; +1, 0, -1 for the first player, [E]."""
    generator = torch.Generator().manual_seed(seed)
    state = game.reset(torch.arange(game.num_envs))
    live, result = torch.arange(game.num_envs), torch.zeros(game.num_envs)
    while len(live):
        player = int(state["to_play"][0])
        action = (first, second)[player].act(state, generator)
        state = game.step(action, live)
        result[live] += (1 - 2 * player) * state["reward"]
        unfinished = ~state["terminated"]
        live, state = live[unfinished], state[unfinished]
    return result


def test_perfect_player_never_loses_and_draws_with_itself():
    perfect, chance = PerfectTicTacToe(), RandomOpponent()
    assert (play(TicTacToe(300), perfect, chance) >= 0).all()
    assert (play(TicTacToe(300), chance, perfect, seed=1) <= 0).all()
    assert (play(TicTacToe(50), perfect, perfect) == 0).all()
    assert (play(TicTacToe(300), perfect, chance) > 0).float().mean() > 0.9


def test_values_of_moves_worked_by_hand():
    values = move_values()
    assert values.shape == (3**9, 9)
    assert (values[0] == 0).all()
    # X in a corner: the middle draws, all else loses
    answer = values[2 * 3**0]
    assert answer.tolist() == [ILLEGAL, -1, -1, -1, 0, -1, -1, -1, -1]
    # two in a row at 0, 1 against 3, 4: the player to move wins at 2; else the other wins at 5
    double = values[1 + 3 + 2 * (3**3 + 3**4)].tolist()
    assert double[2] == 1 and double[6] == double[7] == double[8] == -1 and double[5] >= 0
    # 765 positions up to symmetry are 5478, of which 958 are over (Schaefer 2002)
    assert int((values != ILLEGAL).any(-1).sum()) == 5478 - 958


def test_moves_are_drawn_from_the_generator_alone():
    state = TicTacToe(400).reset(torch.arange(400))
    for opponent in (RandomOpponent(), PerfectTicTacToe()):
        assert opponent.act(state).tolist() == [0] * 400
        counts = opponent.act(state, torch.Generator().manual_seed(3)).bincount(minlength=9)
        assert counts.min() > 20  # 44 in the mean, of each
        again = opponent.act(state, torch.Generator().manual_seed(3)).bincount(minlength=9)
        assert torch.equal(counts, again)


@pytest.mark.parametrize("action", [Discrete(3), Box((-2.0, 0.0), (-1.0, 4.0))])
def test_a_random_opponent_plays_games_without_a_mask_of_legal_actions(action):
    spec = EnvSpec(observation_shape=(1,), action=action, num_players=2)
    opponent = make_opponent("random", spec)
    state = TensorDict(observation=torch.zeros(200, 1), batch_size=[200])
    chosen = opponent.act(state, torch.Generator().manual_seed(0))
    assert chosen.shape == (200, *action.shape) and chosen.dtype is action.dtype
    low, high = (
        (0, 2) if isinstance(action, Discrete) else map(torch.tensor, (action.low, action.high))
    )
    assert bool(((low <= chosen) & (chosen <= high)).all())
    assert len(chosen.unique()) >= 3
    assert len(opponent.act(state).unique(dim=0)) == 1


def cells_of(word: int) -> set[tuple[int, int]]:
    return {(bit // 7, bit % 7) for bit in range(49) if word >> bit & 1}


LINES = [
    {((bit % 7), 5 - bit // 7) for bit in range(42) if line >> bit & 1}
    for line in line_masks(6, 7, 4)
]


def test_lines_of_four_equal_those_of_the_board():
    draw, bits = (
        random.Random(0),
        [7 * column + height for column in range(7) for height in range(6)],
    )
    for _ in range(300):
        word = sum(1 << bit for bit in bits if draw.random() < 0.45)
        assert bool(connect4.has_four(word)) == any(line <= cells_of(word) for line in LINES)


def test_open_lines_are_counted_as_by_hand():
    draw = random.Random(1)
    weights = {1: 1, 2: 4, 3: 16}
    for _ in range(100):
        own = other = 0
        for column in range(7):
            for height in range(draw.randrange(7)):
                bit = 1 << 7 * column + height
                own, other = (own | bit, other) if draw.random() < 0.5 else (own, other | bit)
        mine, theirs = cells_of(own), cells_of(other)
        expected = sum(weights.get(len(line & mine), 0) for line in LINES if not line & theirs)
        assert connect4.open_lines(own, other) == expected


WORDS = [sum(1 << 7 * column + height for column, height in line) for line in LINES]


def plain_win(stones: int) -> bool:
    return any(word & stones == word for word in WORDS)


@functools.cache
def plain_value(own: int, other: int) -> int:
    """1, 0 or -1 for the player to move, by full search."""
    if plain_win(other):
        return -1
    moves = moves_of(own, other)
    return max((-plain_value(other, own | move) for move in moves.values()), default=0)


def moves_of(own: int, other: int) -> dict[int, int]:
    heights = [(((own | other) >> 7 * column) & 0b111111).bit_count() for column in range(7)]
    return {c: 1 << 7 * c + height for c, height in enumerate(heights) if height < 6}


def late_positions(num: int, num_free: int, seed: int) -> list[tuple[int, int]]:
    """Positions from random play with `num_free` free cells, the game not over."""
    draw, found = random.Random(seed), []
    while len(found) < num:
        own = other = 0
        while (own | other).bit_count() < 42 - num_free:
            own, other = other, own | draw.choice(list(moves_of(own, other).values()))
            if plain_win(other):
                break
        else:
            found.append((own, other))
    return found


def test_the_end_of_the_game_is_played_perfectly():
    rule = RuleConnect4(depth=1, exact_below=6)
    values = set()
    for own, other in late_positions(24, 6, seed=2):
        truth = {column: -plain_value(other, own | m) for column, m in moves_of(own, other).items()}
        scores = rule.scores(own, other)
        best = max(scores)
        assert [score == connect4.NO_MOVE for score in scores] == [c not in truth for c in range(7)]
        found = (best > connect4.WIN // 2) - (best < -connect4.WIN // 2)
        assert found == max(truth.values())
        chosen = [column for column in truth if scores[column] == best]
        assert all(truth[column] == found for column in chosen)
        values.add(found)
    assert values == {-1, 0, 1}


def test_plain_python_and_compiled_code_agree(monkeypatch):
    if not hasattr(connect4.negamax, "py_func"):
        pytest.skip("nothing is compiled here")
    positions = late_positions(4, 30, seed=5)
    compiled = [connect4.column_scores(own, other, 3) for own, other in positions]
    for name in ("num_bits", "has_four", "open_lines", "winning_cells", "negamax"):
        monkeypatch.setattr(connect4, name, getattr(connect4, name).py_func)
    assert [connect4.column_scores(own, other, 3) for own, other in positions] == compiled


def test_rules_beat_random_play_and_a_deep_search_a_shallow_one():
    rule, chance = RuleConnect4(depth=2), RandomOpponent()
    assert (play(Connect4(20), rule, chance) > 0).float().mean() >= 0.9
    assert (play(Connect4(20), chance, rule) < 0).float().mean() >= 0.9
    deep, shallow = RuleConnect4(depth=6), RuleConnect4(depth=1)
    openings = Connect4(20, random_openings=2)
    assert play(openings, deep, shallow).mean() - play(openings, shallow, deep).mean() > 0.8


def test_a_finished_game_is_refused():
    game, first = Connect4(2), torch.tensor([0])
    game.reset(torch.arange(2))
    for column in (3, 5, 3, 5, 3, 5, 3):
        state = game.step(torch.tensor([column]), first)
    for opponent in (RandomOpponent(), RuleConnect4(depth=1)):
        with pytest.raises(ValueError, match="no action is legal in state 0, because its game is"):
            opponent.act(state)


def test_opponents_by_name():
    tictactoe, connect = TicTacToe(1).spec, Connect4(1).spec
    assert isinstance(make_opponent("perfect", tictactoe), PerfectTicTacToe)
    assert isinstance(make_opponent("rule", connect), RuleConnect4)
    assert isinstance(make_opponent("random", connect), RandomOpponent)
    with pytest.raises(ValueError, match="connect4 has no opponent 'perfect', only random, rule"):
        make_opponent("perfect", connect)
    alone = EnvSpec(observation_shape=(1,), action=Discrete(2), name="corridor")
    with pytest.raises(ValueError, match="corridor has only one player"):
        make_opponent("random", alone)
    with pytest.raises(ValueError, match="depth=0 must be 1 or more"):
        RuleConnect4(depth=0)
