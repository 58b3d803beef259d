"""Whole episodes, played to see how good an agent is.

Legend: E environments, S frames in a stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from raffia.envs.env import BatchEnv
from raffia.envs.opponents import Opponent
from raffia.functional.seeds import derive_seed, generator_for
from raffia.tensordict.tensordict import TensorDict
from raffia.train.collect import first_frames, next_frames
from raffia.train.ledger import over

Act = Callable[[TensorDict], TensorDict]  # states [n] -> "action" [n], and what is worth showing


class Watch(Protocol):
    """An observer of episodes while they are played.

    >>> class Count:
    ...     steps = 0
    ...     def on_step(self, env, episode, row, chosen):
    ...         self.steps += 1
    ...     def ended(self, episode, episode_return):
    ...         pass
    """

    def on_step(self, env: BatchEnv, episode: int, row: int, chosen: TensorDict | None) -> None:
        """Record a step of an episode: row, number, state, and the choice []; None where the
        opponent chose, and at the episode's end.
        """

    def ended(self, episode: int, episode_return: float) -> None:
        """The episode has ended."""


@dataclass
class Episodes:
    """The results of episodes, in the order of their seeds.

    >>> Episodes([1.0, 3.0], [5, 6]).mean_return
    2.0
    """

    returns: list[float] = field(default_factory=list)  # of two players: 1 won, 0 drawn, -1 lost
    lengths: list[int] = field(default_factory=list)
    as_first: list[bool] = field(default_factory=list)  # of two players: whether the agent began

    @property
    def mean_return(self) -> float:
        """Mean return of all episodes."""
        return sum(self.returns) / len(self.returns)

    @property
    def score(self) -> float:
        """The larger the better: the mean return."""
        return self.mean_return

    @property
    def values(self) -> dict[str, Any]:
        """The values of their row in `metrics.jsonl`."""
        values = {"mean_return": self.mean_return, "returns": self.returns, "lengths": self.lengths}
        return {**values, "as_first": self.as_first} if self.as_first else values


def play_episodes(
    env: BatchEnv,
    act: Act,
    *,
    num_episodes: int,
    seed: int,
    frame_stack: int = 1,
    max_steps: int = 27_000,
    opponent: Opponent | None = None,
    watch: Watch | None = None,
    stop: Callable[[], bool] = lambda: False,
    check: Callable[[TensorDict], None] = lambda outputs: None,
) -> Episodes | None:
    """Play episodes, as many at a time as there are environments; None if `stop` asked to stop
    meanwhile.

    Episode i has the seed derive_seed(seed, "evaluate", i), whatever E is. In games of two players
    the agent begins the even episodes and `opponent` the odd ones; returns are the agent's.
    An episode of more than `max_steps` steps is broken off there. `check` is shown what the
    environments' outputs, after each reset and step; it may raise.

    >>> from raffia.envs.batch import SerialBatch
    >>> from raffia.envs.probe import ValueProbe
    >>> def first(state):
    ...     return TensorDict(action=torch.zeros(len(state), dtype=torch.int64),
    ...                       batch_size=[len(state)])
    >>> play_episodes(SerialBatch([ValueProbe(), ValueProbe()]), first, num_episodes=3, seed=0)
    Episodes(returns=[1.0, 1.0, 1.0], lengths=[1, 1, 1], as_first=[])
    """
    table = _EpisodeTable(env, num_episodes, seed, frame_stack, check)
    if not _play(table, act, max_steps, opponent, watch, stop):
        return None
    return table.episodes(0)


def play_members(
    env: BatchEnv,
    act: Act,  # of states with "member" int64 [n], whose agent is to act in each
    members: Sequence[int] | None,  # None: one agent, which has no number, and is 0 here
    *,
    num_episodes: int,  # of each
    seed: int,
    frame_stack: int = 1,
    max_steps: int = 27_000,
    opponent: Opponent | None = None,
    watch: Watch | None = None,
    watched: int = 0,  # the member whose episodes are shown to `watch`
    stop: Callable[[], bool] = lambda: False,
    check: Callable[[TensorDict], None] = lambda outputs: None,
) -> dict[int, Episodes] | None:
    """Like `play_episodes`, for all members of a population together on the same episodes.

    >>> from raffia.envs.batch import SerialBatch
    >>> from raffia.envs.probe import ActionProbe
    >>> def own(state):
    ...     return TensorDict(action=state["member"], batch_size=[len(state)])
    >>> env = SerialBatch([ActionProbe(), ActionProbe()])
    >>> found = play_members(env, own, [0, 1], num_episodes=3, seed=0)
    >>> found[0].lengths, found[1].lengths
    ([1, 1, 1], [1, 1, 1])
    """
    table = _EpisodeTable(env, num_episodes, seed, frame_stack, check, members or ())
    if not _play(table, act, max_steps, opponent, watch, stop, watched):
        return None
    numbers = (0,) if members is None else members
    return {member: table.episodes(slot) for slot, member in enumerate(numbers)}


def _play(
    table: _EpisodeTable,
    act: Act,
    max_steps: int,
    opponent: Opponent | None,
    watch: Watch | None,
    stop: Callable[[], bool],
    watched: int = 0,
) -> bool:
    """Play all episodes of the table; whether all were played."""
    env = table.env
    if env.spec.num_players == 2 and opponent is None:
        raise ValueError(
            f"{env.spec.name or 'this game'} has two players: pass opponent=RandomOpponent(), or "
            "another of raffia.envs.opponents"
        )
    table.begin()
    while len(table.rows):
        if stop():
            return False
        turn = table.agents_turn()
        action = torch.zeros(len(table.rows), *env.spec.action.shape, dtype=env.spec.action.dtype)
        chosen = None
        if bool(turn.any()):
            chosen = act(table.agent_states()[turn])
            action[turn] = chosen["action"]
        if opponent is not None and not bool(turn.all()):
            action[~turn] = opponent.act(table.states[~turn], table.generator)
        if watch is not None:
            _show(watch, table, turn, chosen, watched)
        table.step(action, turn, max_steps, watch, watched)
    return True


def _show(
    watch: Watch, table: _EpisodeTable, turn: Tensor, chosen: TensorDict | None, watched: int
) -> None:
    index = turn.cumsum(0) - 1
    for i, row in enumerate(table.rows.tolist()):
        if table.is_of(row, watched):
            own = chosen[int(index[i])] if chosen is not None and bool(turn[i]) else None
            watch.on_step(table.env, int(table.episode[row]), row, own)


class _EpisodeTable:
    """The environments in which episodes are going on."""

    def __init__(
        self,
        env: BatchEnv,
        num_episodes: int,
        seed: int,
        frame_stack: int,
        check: Callable[[TensorDict], None],
        members: Sequence[int] = (),  # none: one agent, which has no number
    ) -> None:
        self.env, self.seed, self.frame_stack, self._check = env, seed, frame_stack, check
        self.num_episodes, self.num_begun = num_episodes, 0
        self.members = torch.tensor(members, dtype=torch.int64) if members else None
        self.num_all = num_episodes * max(1, len(members))
        self.generator = generator_for(seed, "opponent")
        self.slot = torch.zeros(env.num_envs, dtype=torch.int64)  # index of the member that plays
        self.episode = torch.zeros(env.num_envs, dtype=torch.int64)  # which of its episodes
        self.total = torch.zeros(env.num_envs, dtype=torch.float64)
        self.length = torch.zeros(env.num_envs, dtype=torch.int64)
        self.found: dict[tuple[int, int], tuple[float, int]] = {}
        self.rows = torch.arange(min(env.num_envs, self.num_all))  # of environments that are played
        self.states: TensorDict  # [n] of these rows
        self.frames: Tensor | None = None  # [n, S, *O]

    def begin(self) -> None:
        """The first episodes."""
        self.states = self._begin(self.rows)
        if self.frame_stack > 1:
            self.frames = first_frames(self.states["observation"], self.frame_stack)

    def is_of(self, row: int, member: int) -> bool:
        """Whether this member plays there; the one agent plays everywhere."""
        return self.members is None or int(self.members[self.slot[row]]) == member

    def _begin(self, rows: Tensor) -> TensorDict:
        numbers = torch.arange(self.num_begun, self.num_begun + len(rows))
        self.num_begun += len(rows)
        self.slot[rows] = numbers // self.num_episodes
        self.episode[rows] = numbers % self.num_episodes
        self.total[rows], self.length[rows] = 0, 0
        played = self.episode[rows].tolist()
        seeds = [derive_seed(self.seed, "evaluate", number) for number in played]
        first = self.env.reset(torch.tensor(seeds), rows)
        self._check(first)
        return first

    def agent_states(self) -> TensorDict:
        """The states with their stacks of frames, and the player to act."""
        out = self.states.clone(recurse=False)
        if self.frames is not None:
            out["observation"] = self.frames
        if self.members is not None:
            out["member"] = self.members[self.slot[self.rows]]
        return out

    def agents_turn(self) -> Tensor:
        """The rows in which the agent acts, bool [n]."""
        if self.env.spec.num_players == 1:
            return torch.ones(len(self.rows), dtype=torch.bool)
        return self.states["to_play"] == self.episode[self.rows] % 2

    def step(
        self, action: Tensor, turn: Tensor, max_steps: int, watch: Watch | None, watched: int
    ) -> None:
        """Act in all rows, and start new episodes where one has ended."""
        after = self.env.step(action, self.rows)
        self._check(after)
        self.total[self.rows] += torch.where(turn, after["reward"], -after["reward"])
        self.length[self.rows] += 1
        self.states = after.select(*self.env.spec.state_keys)
        if self.frames is not None:
            self.frames = next_frames(self.frames, after["observation"])
        ended = over(after) | (self.length[self.rows] >= max_steps)
        if bool(ended.any()):
            self._end(ended, watch, watched)

    def _end(self, ended: Tensor, watch: Watch | None, watched: int) -> None:
        for row in self.rows[ended].tolist():
            episode, total = int(self.episode[row]), float(self.total[row])
            self.found[int(self.slot[row]), episode] = total, int(self.length[row])
            if watch is not None and self.is_of(row, watched):
                watch.on_step(self.env, episode, row, None)
                watch.ended(episode, total)
        again = ended.nonzero().squeeze(-1)[: self.num_all - self.num_begun]
        if len(again):
            first = self._begin(self.rows[again])
            self.states[again] = first
            if self.frames is not None:
                self.frames[again] = first_frames(first["observation"], self.frame_stack)
        goes_on = ~ended
        goes_on[again] = True
        self.rows, self.states = self.rows[goes_on], self.states[goes_on]
        if self.frames is not None:
            self.frames = self.frames[goes_on]

    def episodes(self, slot: int) -> Episodes:
        """The episodes of the member at this index of the list."""
        found = sorted((number, *found) for (of, number), found in self.found.items() if of == slot)
        returns, lengths = [total for _, total, _ in found], [length for *_, length in found]
        two = self.env.spec.num_players == 2
        return Episodes(returns, lengths, [number % 2 == 0 for number, *_ in found] if two else [])
