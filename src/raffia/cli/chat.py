"""A talk with the agent of a run: about data, or a game of Wordle."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from raffia.cli.chat_wordle import Game
from raffia.cli.conversation import Conversation, Session
from raffia.recipes.ilql import load_agent
from raffia.recipes.ilql.chat import Chat, Guessing
from raffia.recipes.ilql.config import ILQLRun
from raffia.recipes.ilql.data import make_wordle


def talk(
    folder: Path,
    config: ILQLRun,  # the run's, with the decoding that is wanted
    *,
    checkpoint: str = "best",
    seed: int = 0,
    values: bool = False,
    notices: Sequence[str] = (),  # texts to print first
    stdin: TextIO | None = None,
    stdout: TextIO | None = None,
) -> int:
    """Talk with the agent of a run until the person has enough; the exit status."""
    policy = load_agent(folder, checkpoint, decode=config.decode, seed=seed)
    stdin, stdout = stdin or sys.stdin, stdout or sys.stdout
    weight = config.decode.adv_weight if config.decode.shifts else 1.0
    session: Session
    if config.task == "wordle":
        game = Guessing(policy, make_wordle(config.wordle))
        session = Game(game, stdin, stdout, values=values, weight=weight)
    else:
        session = Conversation(Chat(policy), stdin, stdout, values=values, weight=weight)
    for notice in notices:
        session.print_line(notice)
    session.sit()
    return 0
