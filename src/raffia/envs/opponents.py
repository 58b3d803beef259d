"""Opponents to evaluate an agent against: random, by rules, perfect."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from raffia.envs.board import line_masks
from raffia.envs.connect4 import CELLS, column_scores
from raffia.envs.env import Box, Discrete, EnvSpec
from raffia.tensordict.tensordict import TensorDict


class Opponent(Protocol):
    """A player of the agent's game with the agent's observations.

    >>> class Leftmost:
    ...     def act(self, state, generator=None):
    ...         return state["action_mask"].int().argmax(-1)
    >>> from raffia.envs.board import Connect4
    >>> Leftmost().act(Connect4(2).reset(torch.tensor([0, 1])))
    tensor([0, 0])
    """

    def act(self, state: TensorDict, generator: torch.Generator | None = None) -> Tensor:
        """A legal action for each state [n], int64 [n].

        generator: draws among what is equally good; None: always the first, where there is a best.
        """


def _one_of(good: Tensor, generator: torch.Generator | None) -> Tensor:
    """One of the marked actions [n, A] in each row: the first, or one that is drawn."""
    stuck = ~good.any(-1)
    if stuck.any():
        raise ValueError(
            f"no action is legal in state {int(stuck.nonzero()[0])}, because its game is over: "
            "pass only states of running games"
        )
    if generator is None:
        weight = torch.arange(good.shape[-1], 0, -1, dtype=torch.float32, device="cpu")
    else:
        weight = 1.0 + torch.rand(good.shape, generator=generator, device="cpu")
    return (good * weight).argmax(-1)


class RandomOpponent:
    """Plays random legal actions, each equally likely.

    action: the actions of the game; needed where its states have no "action_mask".

    >>> from raffia.envs.board import TicTacToe
    >>> state = TicTacToe(3).reset(torch.arange(3))
    >>> RandomOpponent().act(state, torch.Generator().manual_seed(0)).shape
    torch.Size([3])
    """

    def __init__(self, action: Discrete | Box | None = None) -> None:
        self.action = action

    def act(self, state: TensorDict, generator: torch.Generator | None = None) -> Tensor:
        """A legal action for each state [n]; without a generator the first."""
        if isinstance(self.action, Box):
            bounds = [self.action.low, self.action.high]
            low, high = torch.tensor(bounds, dtype=torch.float32, device="cpu")
            drawn = torch.zeros(len(state), len(low), dtype=torch.float32, device="cpu")
            if generator is not None:
                drawn.uniform_(generator=generator)
            return torch.lerp(low, high, drawn)
        if self.action is not None and "action_mask" not in state.keys():
            legal = torch.ones(len(state), self.action.n, dtype=torch.bool, device="cpu")
            return _one_of(legal, generator)
        return _one_of(state["action_mask"], generator)


class PerfectTicTacToe:
    """Plays TicTacToe so that it never loses, and wins what can be won.

    >>> from raffia.envs.board import TicTacToe
    >>> game = TicTacToe(1)
    >>> state = game.reset(torch.tensor([0]))
    >>> state = game.step(torch.tensor([0]))  # a corner: only the middle holds
    >>> PerfectTicTacToe().act(state)
    tensor([4])
    """

    def __init__(self) -> None:
        self._values = move_values()

    def act(self, state: TensorDict, generator: torch.Generator | None = None) -> Tensor:
        """A best action for each state [n], int64 [n]; the generator draws among the best."""
        boards = state["observation"][:, :2].flatten(2)
        values = self._values[position_number(boards[:, 0], boards[:, 1])]
        best = values.amax(-1, keepdim=True)
        return _one_of((values == best) & (values != ILLEGAL), generator)


class RuleConnect4:
    """Wins if it can, else blocks, else looks `depth` plies ahead and counts open lines.

    With at most `exact_below` free cells it looks to the end of the game and plays perfectly.

    >>> from raffia.envs.board import Connect4
    >>> game = Connect4(1)
    >>> state = game.reset(torch.tensor([0]))
    >>> for column in (3, 0, 3, 0, 3):
    ...     state = game.step(torch.tensor([column]))
    >>> RuleConnect4(depth=1).act(state)  # blocks
    tensor([3])
    """

    def __init__(self, *, depth: int = 6, exact_below: int = 16) -> None:
        if depth < 1 or exact_below < 0:
            raise ValueError(
                f"depth={depth} must be 1 or more and exact_below={exact_below} 0 or more"
            )
        self.depth = depth
        self.exact_below = exact_below
        bits = [[7 * column + 5 - row for column in range(7)] for row in range(6)]
        self._bits = 1 << torch.tensor(bits, device="cpu")  # of the cells, row 0 on top

    def act(self, state: TensorDict, generator: torch.Generator | None = None) -> Tensor:
        """A good action for each state [n], int64 [n]; the generator draws among equal ones."""
        boards = (state["observation"][:, :2].to(torch.int64) * self._bits).sum((-1, -2))
        scores = boards.new_tensor([self.scores(own, other) for own, other in boards.tolist()])
        best = scores.amax(-1, keepdim=True)
        return _one_of((scores == best) & state["action_mask"], generator)

    def scores(self, own: int, other: int) -> list[int]:
        """The value of each column for the owner of `own`: see `connect4.column_scores`.

        >>> RuleConnect4(depth=2).scores(0, 0)[3]  # the middle, the best of them
        -3
        """
        free = CELLS - (own | other).bit_count()
        return column_scores(own, other, free if free <= self.exact_below else self.depth)


_OF_GAME: dict[str, dict[str, Callable[[], Opponent]]] = {
    "tictactoe": {"perfect": PerfectTicTacToe},
    "connect4": {"rule": RuleConnect4},
}


def make_opponent(name: str, spec: EnvSpec) -> Opponent:
    """The opponent of a name in a game: "random", "perfect" in TicTacToe, "rule" in Connect4.

    >>> from raffia.envs.board import TicTacToe
    >>> make_opponent("perfect", TicTacToe(1).spec).__class__.__name__
    'PerfectTicTacToe'
    """
    if spec.num_players != 2:
        raise ValueError(
            f"{spec.name or 'this environment'} has only one player, so it has no opponents"
        )
    anywhere: dict[str, Callable[[], Opponent]] = {
        "random": functools.partial(RandomOpponent, spec.action)
    }
    choices = anywhere | _OF_GAME.get(spec.name, {})
    if name not in choices:
        raise ValueError(
            f"{spec.name or 'this game'} has no opponent {name!r}, only {', '.join(choices)}, for "
            f"example make_opponent({list(choices)[-1]!r}, spec)"
        )
    return choices[name]()


ILLEGAL = -2  # stands in the table where no stone may be set
_POWERS = tuple(3**cell for cell in range(9))
_FULL = 0b111111111


def position_number(own: Tensor, other: Tensor) -> Tensor:
    """The row of the table for boards of 0 and 1, each [n, 9]: int64 [n].

    A free cell counts 0, an own stone 1, one of the other 2; cell i counts 3^i times that.

    >>> own, other = torch.zeros(1, 9), torch.zeros(1, 9)
    >>> own[0, 0], other[0, 2] = 1, 1
    >>> position_number(own, other)
    tensor([19])
    """
    return ((own + 2 * other).to(torch.int64) * torch.tensor(_POWERS, device="cpu")).sum(-1)


@functools.cache
def move_values() -> Tensor:
    """The result of each move if both play perfectly, int8 [3^9, 9].

    1: who moves wins, 0: a draw, -1: the other wins, `ILLEGAL`: the cell is taken, the game is
    over, or the position cannot come about. Exhaustive minimax; it is done once, in some 30 ms.

    >>> move_values()[0]  # the empty board: a draw, wherever one begins
    tensor([0, 0, 0, 0, 0, 0, 0, 0, 0], dtype=torch.int8)
    """
    lines = line_masks(3, 3, 3)
    wins = [any(word & line == line for line in lines) for word in range(_FULL + 1)]
    table = [[ILLEGAL] * 9 for _ in range(3**9)]
    best: dict[tuple[int, int], int] = {}

    def solve(own: int, other: int) -> int:
        """The value of a position for the player to move."""
        if (own, other) not in best:
            best[own, other] = work_out(own, other)
        return best[own, other]

    def work_out(own: int, other: int) -> int:
        if wins[other]:
            return -1
        free = _FULL & ~(own | other)
        if not free:
            return 0
        number = sum(
            _POWERS[cell] * ((own >> cell & 1) + 2 * (other >> cell & 1)) for cell in range(9)
        )
        for cell in range(9):
            if free >> cell & 1:
                table[number][cell] = -solve(other, own | 1 << cell)
        return max(table[number])

    solve(0, 0)
    return torch.tensor(table, dtype=torch.int8, device="cpu")
