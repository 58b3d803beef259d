"""Whole episodes, played to see how good an agent is.

Legend: E environments, S frames in a stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, overload

import torch
from torch import Tensor

from raffia.envs.env import BatchEnv
from raffia.envs.make import require_batch
from raffia.envs.opponents import Opponent
from raffia.functional.seeds import derive_seed, generator_for
from raffia.hints import check_range
from raffia.tensordict.tensordict import TensorDict
from raffia.train.collect import choose, first_carry, first_frames, next_carry, next_frames
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
    num_cut: int = field(default=0, repr=False)  # episodes that were broken off at `max_steps`

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
        of_two = {"as_first": self.as_first} if self.as_first else {}
        return values | of_two | ({"num_cut": self.num_cut} if self.num_cut else {})


@overload
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
    stop: None = None,
    check: Callable[[TensorDict], None] = ...,
    carry: TensorDict | None = None,
) -> Episodes: ...


@overload
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
    stop: Callable[[], bool] | None,
    check: Callable[[TensorDict], None] = ...,
    carry: TensorDict | None = None,
) -> Episodes | None: ...


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
    stop: Callable[[], bool] | None = None,
    check: Callable[[TensorDict], None] = lambda outputs: None,
    carry: TensorDict | None = None,
) -> Episodes | None:
    """Play episodes, as many at a time as there are environments; None if `stop` asked to stop
    meanwhile.

    Episode i has the seed derive_seed(seed, "evaluate", i), whatever E is. In games of two players
    the agent begins the even episodes and `opponent` the odd ones; returns are the agent's.
    An episode of more than `max_steps` steps is broken off there. `check` is shown what the
    environments' outputs, after each reset and step; it may raise. `carry` is what the agent
    carries from step to step, as in `Collector`.

    >>> from raffia.envs.batch import SerialBatch
    >>> from raffia.envs.probe import ValueProbe
    >>> def first(state):
    ...     return TensorDict(action=torch.zeros(len(state), dtype=torch.int64),
    ...                       batch_size=[len(state)])
    >>> play_episodes(SerialBatch([ValueProbe(), ValueProbe()]), first, num_episodes=3, seed=0)
    Episodes(returns=[1.0, 1.0, 1.0], lengths=[1, 1, 1], as_first=[])
    """
    batch = EpisodeBatch(
        *(env, act, num_episodes, seed),
        frame_stack=frame_stack,
        max_steps=max_steps,
        opponent=opponent,
        watch=watch,
        stop=stop or (lambda: False),
        check=check,
        carry=carry,
    )
    played = batch.play()
    return None if played is None else played[0]


@dataclass
class EpisodeBatch:
    """Episodes of one agent, or of members of a population, that are played together.

    All play the same episodes; `play_episodes` says which.

    >>> from raffia.envs.batch import SerialBatch
    >>> from raffia.envs.probe import ActionProbe
    >>> def own(state):
    ...     return TensorDict(action=state["member"], batch_size=[len(state)])
    >>> env = SerialBatch([ActionProbe(), ActionProbe()])
    >>> found = EpisodeBatch(env, own, num_episodes=3, seed=0, members=[0, 1]).play()
    >>> found[0].lengths, found[1].lengths
    ([1, 1, 1], [1, 1, 1])
    """

    env: BatchEnv
    act: Act  # of states with "member" int64 [n], whose agent is to act in each, if there are some
    num_episodes: int  # of each
    seed: int
    members: Sequence[int] | None = None  # None: one agent, which has no number, and is 0 here
    frame_stack: int = 1
    max_steps: int = 27_000
    opponent: Opponent | None = None
    watch: Watch | None = None
    watched: int = 0  # the member whose episodes are shown to `watch`
    stop: Callable[[], bool] = lambda: False
    check: Callable[[TensorDict], None] = lambda outputs: None
    carry: TensorDict | None = None  # []

    def __post_init__(self) -> None:
        require_batch(self.env, by="play_episodes")
        check_range("num_episodes", self.num_episodes, 1)
        check_range("frame_stack", self.frame_stack, 1)
        spec, num_envs = self.env.spec, self.env.num_envs
        if spec.num_players == 2 and self.opponent is None:
            raise ValueError(
                f"{spec.name or 'this game'} has two players: pass opponent=RandomOpponent(), or "
                "another of raffia.envs.opponents"
            )
        self._member = None
        if self.members:
            self._member = torch.tensor(self.members, dtype=torch.int64, device="cpu")
        self._num_begun, self._num_all = 0, self.num_episodes * max(1, len(self.members or ()))
        self._generator = generator_for(self.seed, "opponent")
        # The index of the member that plays in each environment.
        self._slot = torch.zeros(num_envs, dtype=torch.int64, device="cpu")
        # The number of the episode among those of its member.
        self._episode = torch.zeros(num_envs, dtype=torch.int64, device="cpu")
        self._total = torch.zeros(num_envs, dtype=torch.float64, device="cpu")
        self._length = torch.zeros(num_envs, dtype=torch.int64, device="cpu")
        self._found: dict[tuple[int, int], tuple[float, int]] = {}
        self._cut: list[int] = []  # the member's index, of each episode that was broken off
        # The environments that are played.
        self._rows = torch.arange(min(num_envs, self._num_all), device="cpu")
        self._states: TensorDict  # [n] of these rows
        self._frames: Tensor | None = None  # [n, S, *O]
        self._carried: TensorDict | None = None  # [n]

    def play(self) -> dict[int, Episodes] | None:
        """Play all episodes: those of each member; None if `stop` asked to stop meanwhile."""
        self._states = self._begin(self._rows)
        if self.frame_stack > 1:
            self._frames = first_frames(self._states["observation"], self.frame_stack)
        if self.carry is not None:
            self._carried = first_carry(self.carry, len(self._rows))
        while len(self._rows):
            if self.stop():
                return None
            self._step()
        numbers = (0,) if self.members is None else self.members
        return {member: self._episodes(slot) for slot, member in enumerate(numbers)}

    def _step(self) -> None:
        """Act in all rows, and start new episodes where one has ended."""
        action_spec, turn, chosen = self.env.spec.action, self._agents_turn(), None
        if bool(turn.all()):
            chosen = choose(self.act, self._agent_states())
            action = chosen["action"]
        else:
            shape = len(self._rows), *action_spec.shape
            action = self._rows.new_zeros(shape, dtype=action_spec.dtype)
            if bool(turn.any()):
                chosen = choose(self.act, self._agent_states()[turn])
                action[turn] = chosen["action"]
            assert self.opponent is not None
            action[~turn] = self.opponent.act(self._states[~turn], self._generator)
        if self.watch is not None:
            self._show(self.watch, turn, chosen)
        if self._carried is not None and chosen is not None:
            self._carried = self._carried.clone()  # the agent may hold the old one
            self._carried[turn] = next_carry(self._carried[turn], chosen)
        after = self.env.step(action, self._rows)
        self.check(after)
        self._total[self._rows] += torch.where(turn, after["reward"], -after["reward"])
        self._length[self._rows] += 1
        self._states = after.select(*self.env.spec.state_keys)
        if self._frames is not None:
            self._frames = next_frames(self._frames, after["observation"])
        has_ended = over(after)
        ended = has_ended | (self._length[self._rows] >= self.max_steps)
        if bool(ended.any()):
            self._cut += self._slot[self._rows[ended & ~has_ended]].tolist()
            self._end(ended)

    def _show(self, watch: Watch, turn: Tensor, chosen: TensorDict | None) -> None:
        index = turn.cumsum(0) - 1
        for i, row in enumerate(self._rows.tolist()):
            if self._is_watched(row):
                own = chosen[int(index[i])] if chosen is not None and bool(turn[i]) else None
                watch.on_step(self.env, int(self._episode[row]), row, own)

    def _is_watched(self, row: int) -> bool:
        """Whether the watched member plays there; the one agent plays everywhere."""
        return self._member is None or int(self._member[self._slot[row]]) == self.watched

    def _begin(self, rows: Tensor) -> TensorDict:
        numbers = torch.arange(self._num_begun, self._num_begun + len(rows), device="cpu")
        self._num_begun += len(rows)
        self._slot[rows] = numbers // self.num_episodes
        self._episode[rows] = numbers % self.num_episodes
        self._total[rows], self._length[rows] = 0, 0
        played = self._episode[rows].tolist()
        seeds = [derive_seed(self.seed, "evaluate", number) for number in played]
        first = self.env.reset(torch.tensor(seeds, device="cpu"), rows)
        self.check(first)
        return first

    def _agent_states(self) -> TensorDict:
        """The states with their stacks of frames, and the player to act."""
        out = self._states.clone(recurse=False)
        if self._frames is not None:
            out["observation"] = self._frames
        if self._carried is not None:
            out.update(self._carried.clone(recurse=False))
        if self._member is not None:
            out["member"] = self._member[self._slot[self._rows]]
        return out

    def _agents_turn(self) -> Tensor:
        """The rows in which the agent acts, bool [n]."""
        if self.env.spec.num_players == 1:
            return torch.ones(len(self._rows), dtype=torch.bool, device="cpu")
        return self._states["to_play"] == self._episode[self._rows] % 2

    def _end(self, ended: Tensor) -> None:
        for row in self._rows[ended].tolist():
            episode, total = int(self._episode[row]), float(self._total[row])
            self._found[int(self._slot[row]), episode] = total, int(self._length[row])
            if self.watch is not None and self._is_watched(row):
                self.watch.on_step(self.env, episode, row, None)
                self.watch.ended(episode, total)
        again = ended.nonzero().squeeze(-1)[: self._num_all - self._num_begun]
        if len(again):
            first = self._begin(self._rows[again])
            self._states[again] = first
            if self._frames is not None:
                self._frames[again] = first_frames(first["observation"], self.frame_stack)
            if self._carried is not None and self.carry is not None:
                self._carried[again] = first_carry(self.carry, len(again))
        goes_on = ~ended
        goes_on[again] = True
        self._rows, self._states = self._rows[goes_on], self._states[goes_on]
        if self._frames is not None:
            self._frames = self._frames[goes_on]
        if self._carried is not None:
            self._carried = self._carried[goes_on]

    def _episodes(self, slot: int) -> Episodes:
        """The episodes of the member at this index of the list."""
        found = sorted(
            (number, *found) for (of, number), found in self._found.items() if of == slot
        )
        returns, lengths = [total for _, total, _ in found], [length for *_, length in found]
        two = self.env.spec.num_players == 2
        as_first = [number % 2 == 0 for number, *_ in found] if two else []
        return Episodes(returns, lengths, as_first, self._cut.count(slot))
