"""A board game between a person and an agent, move by move; moves can be taken back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from raffia.envs.board import BoardGame, Connect4, TicTacToe
from raffia.envs.env import EnvSpec
from raffia.recipes.efficientzero import load_agent
from raffia.recipes.efficientzero.config import EfficientZeroRun
from raffia.recipes.run_folder import read_run_of
from raffia.tensordict.tensordict import TensorDict
from raffia.train.experiment import RunError


class BoardPlayer(Protocol):
    """An opponent in a match: an agent of `raffia.recipes.efficientzero`, or a custom one.

    >>> from raffia.envs.board import TicTacToe
    >>> class First:  # always the first free square
    ...     spec = TicTacToe(1).spec
    ...     def act(self, state):
    ...         policy = torch.nn.functional.one_hot(state["action_mask"].int().argmax(-1), 9)
    ...         return TensorDict(action=policy.argmax(-1), policy=policy.float(),
    ...                           value=torch.zeros(len(policy)), batch_size=state.shape)
    >>> Match(First()).think().action
    0
    """

    @property
    def spec(self) -> EnvSpec:
        """The spec of the game that the player plays."""

    def act(self, state: TensorDict) -> TensorDict:
        """Return "action", "policy" [n, A] and "value" of states [n], from the view of the player
        to move.
        """


def load_player(
    folder: Path,
    checkpoint: str | int = "best",
    *,
    device: str = "cpu",
    num_simulations: int | None = None,
    networks: str | None = None,
) -> BoardPlayer:
    """The agent of a run of TicTacToe or Connect4.

    networks: the name of the run's own ones, as of `load_agent`.
    """
    config = read_run_of(EfficientZeroRun, folder)
    if config.env.id not in GAMES:
        raise RunError(f"{folder} plays {config.env.id}; a person can play {' and '.join(GAMES)}")
    if config.env.frame_stack != 1:
        raise RunError(
            f"{folder} was trained with frame_stack={config.env.frame_stack}, but a person shows "
            "one position at a time: train with --env.frame_stack 1"
        )
    more: dict[str, Any] = {"num_simulations": num_simulations, "networks": networks}
    return load_agent(folder, checkpoint, device=device, **more)


GAMES: dict[str, type[TicTacToe | Connect4]] = {"tictactoe": TicTacToe, "connect4": Connect4}


@dataclass(frozen=True)
class Thought:
    """A player's evaluation of a position.

    >>> Thought(action=1, policy=[0.25, 0.75], value=0.5).policy[1]
    0.75
    """

    action: int
    policy: list[float]  # fraction of the search's visits for each action
    value: float  # value from its own view: 1 it wins, -1 it loses


class Match:
    """A game in play: `play` moves for the player to move, `think` is what the agent would do.

    >>> from raffia.envs.board import TicTacToe
    >>> class Nobody:
    ...     spec = TicTacToe(1).spec
    >>> match = Match(Nobody())
    >>> for square in (4, 0, 3):
    ...     match.play(square)
    >>> match.legal, match.to_play, match.ended
    ([1, 2, 5, 6, 7, 8], 1, False)
    >>> match.take_back(2)
    >>> print(match.text())
      a b c
    1 . . .
    2 . X .
    3 . . .
    """

    def __init__(self, agent: BoardPlayer) -> None:
        name = agent.spec.name
        if name not in GAMES:
            raise RunError(
                f"a person can play {' and '.join(GAMES)}, not {name or 'this environment'}"
            )
        self.agent = agent
        self.game: BoardGame = GAMES[name](1)
        self.actions: list[int] = []
        self._begin()

    def _begin(self) -> None:
        self._state = self.game.reset(torch.tensor([0]))
        self.ended = False
        self.winner: int | None = None  # of an ended game: the player who won, None: a draw

    @property
    def to_play(self) -> int:
        """The player to move, 0 or 1."""
        return len(self.actions) % 2

    @property
    def legal(self) -> list[int]:
        """The actions that are legal now."""
        return self._state["action_mask"][0].nonzero()[:, 0].tolist()

    def play(self, action: int) -> None:
        """Make a move for the player to move."""
        after = self.game.step(torch.tensor([action]))
        self.ended = bool(after["terminated"])
        self.winner = self.to_play if bool(after["reward"] > 0) else None
        self.actions.append(action)
        self._state = after.select(*self.game.spec.state_keys)

    def think(self) -> Thought:
        """The agent's evaluation of the present position."""
        answer = self.agent.act(self._state)
        return Thought(
            int(answer["action"][0]), answer["policy"][0].tolist(), float(answer["value"][0])
        )

    def take_back(self, num_moves: int) -> None:
        """Undo the last moves."""
        rest = self.actions[: len(self.actions) - num_moves]
        self.actions = []
        self._begin()
        for action in rest:
            self.play(action)

    def text(self) -> str:
        """The board as text."""
        return self.game.board_text(0)
