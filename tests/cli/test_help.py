"""Help fits the terminal, and speaks of settings, not of Python."""

import pytest

from raffia.cli.commands import GROUPS, main

COMMANDS = [[name] for group in GROUPS.values() for name in group]
TRAIN = [
    ["train", "efficientzero"],
    ["train", "efficientzero", "--preset", "cartpole"],
    ["train", "ilql"],
    ["train", "ilql", "--preset", "wordle"],
]


@pytest.mark.parametrize("words", [[], *COMMANDS, *TRAIN], ids=" ".join)
def test_no_line_is_wider_than_the_terminal(words, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    main([*words, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5
    assert [line for line in lines if len(line) > 80] == []


@pytest.mark.parametrize("words", TRAIN, ids=" ".join)
def test_examples_in_python_are_left_out(words, capsys):
    main([*words, "--help"])
    shown = capsys.readouterr().out
    assert ">>>" not in shown
    assert "--seed INT" in shown and "--evaluate.target_return" in shown


def test_descriptions_of_groups_stay(capsys):
    main(["train", "efficientzero", "--help"])
    shown = capsys.readouterr().out
    assert "The networks: residual convolutions for images" in shown
    assert "of Gymnasium, or" in shown
