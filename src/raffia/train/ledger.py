"""`Ledger`: the state of environments, recorded from the steps that were played in them.

An environment's state is the seed of its episode and the actions since its reset. Whoever plays,
here or in another process, a ledger that is given the steps knows where to go on after them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from raffia.envs.env import EnvSpec
from raffia.functional.seeds import derive_seed
from raffia.tensordict.tensordict import TensorDict


class EndedEpisode(NamedTuple):
    """An episode that has ended.

    >>> EndedEpisode(episode_return=10.0, length=10, row=0).length
    10
    """

    episode_return: float
    length: int
    row: int


class Ledger:
    """The ledger of E environments: episodes begun, actions since each reset, returns and lengths.

    seed: of the run; an episode's seed is made of it, of its row and of its number there.
    first_row: the first environment's row among all of the run's.

    >>> from raffia.envs.env import Discrete, EnvSpec
    >>> ledger = Ledger(1, EnvSpec(observation_shape=(1,), action=Discrete(2)), seed=0)
    >>> ledger.begin(torch.tensor([0]))
    >>> no, yes = torch.tensor([False]), torch.tensor([True])
    >>> for done in (no, yes):
    ...     after = TensorDict(reward=torch.ones(1), terminated=done, truncated=no, batch_size=[1])
    ...     ended = ledger.count(torch.tensor([0]), torch.tensor([1]), after)
    >>> ledger.take_ended(), ledger.num_env_steps, ledger.state()["num_actions"]
    ([EndedEpisode(episode_return=2.0, length=2, row=0)], 2, tensor([2]))
    """

    def __init__(self, num_envs: int, spec: EnvSpec, *, seed: int, first_row: int = 0) -> None:
        self.num_envs, self.spec, self.seed, self.first_row = num_envs, spec, seed, first_row
        self.num_env_steps = 0
        self.has_begun = False
        self._episode = [0] * num_envs  # how many were begun in each row
        self._return = [0.0] * num_envs
        self._length = [0] * num_envs
        self._actions: list[list[Tensor]] = [[] for _ in range(num_envs)]  # since reset: [n, ...]
        self._ended: list[EndedEpisode] = []

    def seeds(self, rows: Tensor) -> Tensor:
        """Seeds of the episodes that come next in these rows."""
        seeds = [self._seed_of(row, self._episode[row]) for row in rows.tolist()]
        return torch.tensor(seeds, device="cpu")

    def describe(self, row: int, at_reset: bool = False) -> str:
        """A text by which an environment can be restored: row of the run, seed, actions since.

        at_reset: its next episode is about to begin.

        >>> from raffia.envs.env import Discrete, EnvSpec
        >>> spec = EnvSpec(observation_shape=(1,), action=Discrete(2))
        >>> Ledger(1, spec, seed=0).describe(0, at_reset=True)
        "the run's environment 0, at the reset with seed 8015132180683303621"
        """
        seed = self._seed_of(row, self._episode[row] - (not at_reset))
        num_actions = sum([len(actions) for actions in self._actions[row]])
        where = (
            f"at the reset with seed {seed}"
            if at_reset
            else f"after {num_actions} actions since the reset with seed {seed}"
        )
        return f"the run's environment {self.first_row + row}, {where}"

    def begin(self, rows: Tensor) -> None:
        """The next episodes of these rows begin: nothing was played in them yet."""
        self.has_begun = True
        for row in rows.tolist():
            self._begin(row)

    def _seed_of(self, row: int, number: int) -> int:
        """The seed of a row's episode of this number."""
        return derive_seed(self.seed, "episode", self.first_row + row, number)

    def _begin(self, row: int) -> None:
        self._episode[row] += 1
        self._return[row], self._length[row], self._actions[row] = 0.0, 0, []

    def count(self, rows: Tensor, action: Tensor, after: TensorDict) -> Tensor:
        """Count one step of these rows; returns the rows whose episodes it has ended, int64 [n].

        after: "reward", "terminated", "truncated" and, where an environment may play on behind an
            end, "continues".
        """
        self.num_env_steps += len(rows)
        self.repeat(rows, action, after)
        ended = rows[over(after)]
        for row in ended.tolist():
            self._ended.append(self._episode_of(row))
        return ended

    def count_all(self, steps: TensorDict) -> None:
        """Count steps [T, E] of all rows, in which the next episodes begin where one has ended.

        Before the first steps of all, the rows' first episodes begin.
        """
        if not self.has_begun:
            self.begin(torch.arange(self.num_envs, device="cpu"))
        self.num_env_steps += steps.numel()
        by_row = steps["action"].unbind(1), steps["reward"].t().tolist(), over(steps).t().tolist()
        ended: list[tuple[int, EndedEpisode]] = []  # and how many steps were left
        for row, (actions, rewards, ends) in enumerate(zip(*by_row, strict=True)):
            while True in ends:
                num = ends.index(True) + 1
                self._add(row, actions[:num], rewards[:num])
                actions, rewards, ends = actions[num:], rewards[num:], ends[num:]
                ended.append((len(ends), self._episode_of(row)))
                self._begin(row)
            if ends:
                self._add(row, actions, rewards)
        # In the order of time, and of rows at a time.
        self._ended += [episode for _, episode in sorted(ended, key=lambda pair: -pair[0])]

    def _episode_of(self, row: int) -> EndedEpisode:
        return EndedEpisode(self._return[row], self._length[row], row)

    def repeat(self, rows: Tensor, action: Tensor, after: TensorDict) -> None:
        """Repeat a step that was counted before, as a resume replays it."""
        taken, reward = action.unsqueeze(1).unbind(), after["reward"].tolist()
        for row, actions, number in zip(rows.tolist(), taken, reward, strict=True):
            self._return[row] += number
            self._length[row] += 1
            self._actions[row].append(actions)

    def _add(self, row: int, actions: Tensor, rewards: Sequence[float]) -> None:
        """Steps [n] of a row."""
        total = self._return[row]
        for reward in rewards:  # one by one: the sum has the same bits however turns divide it
            total += reward
        self._return[row] = total
        self._length[row] += len(rewards)
        self._actions[row].append(actions)

    def undo(self) -> Callable[[], None]:
        """A function that takes back the steps and the beginnings counted from now on.

        >>> from raffia.envs.env import Discrete, EnvSpec
        >>> ledger = Ledger(1, EnvSpec(observation_shape=(1,), action=Discrete(2)), seed=0)
        >>> undo = ledger.undo()
        >>> ledger.begin(torch.tensor([0]))
        >>> undo()
        >>> ledger.has_begun
        False
        """
        before = {
            name: list(value) if isinstance(value, list) else value
            for name, value in vars(self).items()
        }
        lengths = [len(actions) for actions in self._actions]

        def back() -> None:
            vars(self).update(before)
            for actions, length in zip(self._actions, lengths, strict=True):
                del actions[length:]

        return back

    def take_ended(self) -> list[EndedEpisode]:
        """The episodes that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def state(self) -> TensorDict:
        """The state as tensors: seeds by their counts, and the actions since."""
        spec = self.spec
        empty = torch.empty(0, *spec.action.shape, dtype=spec.action.dtype, device="cpu")
        numbers = [sum([len(actions) for actions in row]) for row in self._actions]
        return TensorDict(
            episode=torch.tensor(self._episode, device="cpu"),
            episode_return=torch.tensor(self._return, dtype=torch.float64, device="cpu"),
            episode_length=torch.tensor(self._length, device="cpu"),
            num_actions=torch.tensor(numbers, device="cpu"),
            actions=torch.cat([actions for row in self._actions for actions in row] or [empty]),
            num_env_steps=torch.tensor(self.num_env_steps, device="cpu"),
            begun=torch.tensor(self.has_begun, device="cpu"),
        )

    def load_state(self, state: TensorDict) -> None:
        """Load a state of `state`."""
        if len(state["episode"]) != self.num_envs:
            raise ValueError(
                f"the state has {len(state['episode'])} environments, but there are "
                f"{self.num_envs}: set env.num_envs as it was"
            )
        self.num_env_steps, self._ended = int(state["num_env_steps"]), []
        self.has_begun = bool(state["begun"])
        self._episode = state["episode"].tolist()
        by_row = state["actions"].split(state["num_actions"].tolist())
        self._actions = [[actions] for actions in by_row]
        if "episode_return" in state.keys():  # else a collector, which plays again, counts again
            self._return = state["episode_return"].tolist()
            self._length = state["episode_length"].tolist()

    def fast_forward(self, row: int, actions: Tensor) -> None:
        """Go on to after these actions [n] of a row's episode; its return is not known there."""
        self._actions[row] = [actions]

    def rewind(self) -> list[Tensor]:
        """Go back to before each row's reset; returns the actions [n] since, to be played again."""
        actions = [torch.cat(row) for row in self._actions]
        self._actions = [[] for _ in range(self.num_envs)]
        self._episode = [number - 1 for number in self._episode]
        return actions


def rows_of(state: TensorDict, first: int, num: int) -> TensorDict:
    """The part of a ledger's state for the rows first .. first + num - 1.

    >>> from raffia.envs.env import Discrete, EnvSpec
    >>> ledger = Ledger(4, EnvSpec(observation_shape=(1,), action=Discrete(2)), seed=0)
    >>> ledger.begin(torch.arange(4))
    >>> rows_of(ledger.state(), 2, 2)["episode"]
    tensor([1, 1])
    """
    rows = slice(first, first + num)
    actions = state["actions"].split(state["num_actions"].tolist())[rows]
    return TensorDict(
        episode=state["episode"][rows].clone(),
        episode_return=state["episode_return"][rows].clone(),
        episode_length=state["episode_length"][rows].clone(),
        num_actions=state["num_actions"][rows].clone(),
        actions=torch.cat(actions),
        num_env_steps=state["num_env_steps"] * num // len(state["episode"]),
        begun=state["begun"].clone(),
    )


def over(after: TensorDict) -> Tensor:
    """The rows that need a reset after a step: bool [n].

    >>> no, yes = torch.tensor([False]), torch.tensor([True])
    >>> over(TensorDict(terminated=yes, truncated=no, continues=yes, batch_size=[1]))
    tensor([False])
    """
    ended = after["terminated"] | after["truncated"]
    return ended & ~after["continues"] if "continues" in after.keys() else ended
