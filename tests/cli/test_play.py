"""A game in the terminal, driven by text, against a scripted agent."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raffia.cli import runs
from raffia.cli.parser import UsageError
from raffia.cli.play import Table, play_against
from raffia.envs.board import Connect4, TicTacToe
from raffia.recipes.algorithm import ALGORITHMS
from raffia.recipes.efficientzero import match as matches
from raffia.recipes.efficientzero.config import EfficientZeroRun
from raffia.report.folder import PLAYED_BY_PEOPLE
from raffia.tensordict.tensordict import TensorDict


class Scripted:
    """Plays scripted moves, then the first legal one."""

    def __init__(self, kind=TicTacToe, moves=()) -> None:
        self.spec, self.moves, self.seen_stones = kind(1).spec, list(moves), []

    def act(self, state: TensorDict) -> TensorDict:
        mask = state["action_mask"]
        assert mask.any(-1).all(), "asked after the end"
        turn = len(self.seen_stones)
        self.seen_stones.append(int(state["observation"][0, :2].sum()))
        action = self.moves[turn] if turn < len(self.moves) else int(mask[0].int().argmax())
        policy = mask.float() * 0.25
        policy[0, action] = 0.75
        found = {"action": torch.tensor([action]), "policy": policy}
        return TensorDict(**found, value=torch.tensor([-0.125]), batch_size=[1])


def play(agent, words: str, person: int = 0) -> str:
    stdout = io.StringIO()
    Table(agent, person, io.StringIO(words), stdout).run()
    return stdout.getvalue()


def test_a_game_is_shown_with_the_agent_s_policy_and_value():
    output = play(Scripted(moves=[0, 8]), "b2\n 3 \n1C\nquit\n")
    assert output.startswith("You are X, the agent is O; you begin.\n")
    assert "The agent plays a1. It values the position at -0.12 for itself" in output
    assert "     a    b    c\n1  75%  25%  25%\n2  25%    .  25%\n3  25%  25%  25%\n" in output
    assert output.count("  a b c\n1 O . X\n2 . X .\n3 . . O\n") == 1
    assert "c1 is taken. You can play b1 a2 c2 a3 b3." in output
    assert output.endswith("your move: quit\nGoodbye.\n")


def test_the_winner_is_named_and_another_game_can_follow():
    output = play(Scripted(moves=[0, 1]), "5\n3\n7\nb2\nnew\nb2\nquit\n")
    assert "You have won.\nnew, undo or quit: b2\nThis game is over." in output
    assert output.count("you begin") == 2
    assert "  a b c\n1 . . .\n2 . X .\n3 . . .\n" in output.rpartition("you begin")[2]
    assert "The agent has won." in play(Scripted(moves=[0, 1, 2]), "4\n5\n9\n")
    # X: a1 c1 b2... ends with X at 0 2 3 7 8 and O at 1 4 5 6
    draw = play(Scripted(moves=[4, 1, 6, 5]), "1\n9\n8\n3\n4\n")
    assert "A draw." in draw and draw.endswith("new, undo or quit: \nGoodbye.\n")


def test_the_agent_can_begin_and_its_first_move_is_not_taken_back():
    agent = Scripted(moves=[4])
    output = play(agent, "undo\na1\nundo\nq\n", person=1)
    assert "You are O, the agent is X; the agent begins." in output
    assert "1 O X .\n2 . X .\n3 . . .\n" in output
    assert agent.seen_stones == [0, 2] and output.count("You have no move to take back.") == 1
    assert output.endswith("1 . . .\n2 . X .\n3 . . .\n\nyour move: q\nGoodbye.\n")


def test_undo_takes_back_the_agent_s_move_too():
    agent = Scripted(moves=[0, 6, 8])
    output = play(agent, "b2\nc3\nundo\nundo\nundo\nb2\nq\n")
    assert "taken" not in output
    assert agent.seen_stones == [1, 3, 1]
    assert output.count("You have no move to take back.") == 1
    after_end = play(Scripted(moves=[0, 1]), "5\n3\n7\nundo\nq\n")
    last = after_end.rpartition("new, undo or quit: undo\n")[2]
    assert last.startswith("\n  a b c\n1 O O X\n2 . X .\n3 . . .\n\nyour move: ")


def test_invalid_input_gets_a_hint():
    output = play(Scripted(), "d4\n\n10\n?\nhelp\nb2\n")
    assert "'d4' is not a move; type help for the moves.\nYou can play a1 b1 c1 a2" in output
    assert "'10' is not a move;" in output and "plays a1" in output
    assert output.count("Put a stone on a square, a1 to c3, or 1 to 9.") == 3
    assert output.endswith("your move: \nGoodbye.\n")  # the input has ended
    assert max(map(len, output.splitlines())) < 80


def test_connect4_is_played_by_columns():
    output = play(Scripted(Connect4, moves=[0, 0, 0]), "1\n1\n1\n1\n0\n4\n", person=0)
    assert "Drop a stone into a column, 1 to 7." in output
    assert "1 is full. You can play 2 3 4 5 6 7." in output
    assert "     1    2    3    4    5    6    7\n   75%  25%" in output
    assert "'0' is not a move;" in output
    assert "O . . . . . .\n" in output


def test_play_takes_the_agent_of_a_run(monkeypatch, tmp_path):
    calls = []

    def load(*args, **options):
        calls.append((*args, options))
        return Scripted(moves=[4])

    monkeypatch.setattr("raffia.recipes.efficientzero.match.load_player", load)
    streams = {"stdin": io.StringIO("a1\n"), "stdout": io.StringIO()}
    assert play_against(tmp_path, device="cuda", num_simulations=7, second=True, **streams) == 0
    assert calls == [(tmp_path, "best", {"device": "cuda", "num_simulations": 7})]
    assert "the agent begins" in streams["stdout"].getvalue()
    assert tuple(matches.GAMES) == PLAYED_BY_PEOPLE  # a report suggests it for these


def test_a_run_of_another_algorithm_with_the_same_kind_of_settings_is_refused(monkeypatch):
    algorithm = replace(ALGORITHMS["efficientzero"], name="mine", reference="mine:algorithm")
    monkeypatch.setattr(runs, "config_of", lambda run: (algorithm, EfficientZeroRun()))
    with pytest.raises(UsageError, match="runs/mine is not a run of EfficientZero"):
        runs.config_of_kind(EfficientZeroRun, Path("runs/mine"))
