"""Collection of steps from environments that are played without pause.

Legend: T times, E environments, S frames in a stack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from raffia.envs.env import BatchEnv
from raffia.functional.seeds import derive_seed
from raffia.tensordict.stack import stack
from raffia.tensordict.tensordict import TensorDict

Act = Callable[[TensorDict], TensorDict]  # states [E] -> "action" and what is stored besides, [E]


class EndedEpisode(NamedTuple):
    """An episode that has ended.

    >>> EndedEpisode(episode_return=10.0, length=10, row=0).length
    10
    """

    episode_return: float
    length: int
    row: int


class Collector:
    """E environments and their states.

    env: the environments.
    seed: of the run; an episode's own seed is made of it, of its row and of its number there.
    frame_stack: S, how many observations an actor sees together; before an episode's first one
        stands the first one again.
    check: called with the environments' outputs after each step; it may raise.

    Where an environment plays on behind an end ("continues", as behind a lost life), the next
    episode begins without a reset; returns and lengths in metrics are those of the whole game.

    Steps [T, E] hold the states' entries (the newest frame), what the actor gave, "reward",
    "terminated", "truncated", and under "next" the state after each step, as
    `SegmentReplayBuffer.extend` takes them.

    What a resume needs are the seeds and the actions since: `state` and `load_state`.

    >>> from raffia.envs.batch import SerialBatch
    >>> from raffia.envs.probe import ValueProbe
    >>> collector = Collector(SerialBatch([ValueProbe(), ValueProbe()]), seed=0)
    >>> def first(state):  # always the first action
    ...     return TensorDict(action=torch.zeros(2, dtype=torch.int64), batch_size=[2])
    >>> steps = collector.collect(first, 3)
    >>> steps["reward"]
    tensor([[1., 1.],
            [1., 1.],
            [1., 1.]])
    >>> len(collector.take_ended()), collector.num_env_steps
    (6, 6)
    """

    def __init__(
        self,
        env: BatchEnv,
        *,
        seed: int,
        frame_stack: int = 1,
        check: Callable[[TensorDict], None] = lambda step: None,
    ) -> None:
        self.env, self.seed, self.frame_stack, self._check = env, seed, frame_stack, check
        num = env.num_envs
        self.num_env_steps = 0
        self._episode = torch.zeros(num, dtype=torch.int64)  # how many were begun in each row
        self._return = torch.zeros(num, dtype=torch.float64)
        self._length = torch.zeros(num, dtype=torch.int64)
        self._actions: list[list[Tensor]] = [[] for _ in range(num)]  # since each row's reset
        self._ended: list[EndedEpisode] = []
        self._state: TensorDict | None = None  # [E], the newest frames
        self._frames: Tensor | None = None  # [E, S, *O]

    def collect(self, act: Act, num_steps: int) -> TensorDict:
        """Play this many steps in each environment; returns them: [T, E]."""
        if self._state is None:
            self._begin(everywhere(self.env))
        return stack([self._step(act) for _ in range(num_steps)], 0)

    def take_ended(self) -> list[EndedEpisode]:
        """The episodes that have ended since this was asked before."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def now(self) -> TensorDict:
        """The states [E] for the actor's next step."""
        assert self._state is not None
        if self._frames is None:
            return self._state
        return self._state.clone(recurse=False).update({"observation": self._frames})

    def _step(self, act: Act) -> TensorDict:
        before = self._state
        assert before is not None
        chosen = act(self.now)
        after = self.env.step(chosen["action"])
        self._check(after)
        states = after.select(*self.env.spec.state_keys)
        flags = {name: after[name] for name in ("reward", "terminated", "truncated")}
        step = TensorDict(
            {**dict(before.items()), **dict(chosen.items()), **flags, "next": states},
            before.batch_size,
        )
        self.num_env_steps += self.env.num_envs
        self._count(everywhere(self.env), chosen["action"], after)
        self._show(states)
        self._restart_frames(everywhere(self.env), after)
        rows = over(after).nonzero().squeeze(-1)
        if len(rows):
            self._close(rows)
            self._begin(rows)
        return step

    def _restart_frames(self, rows: Tensor, after: TensorDict) -> None:
        """Where an episode has ended and the environment plays on, earlier frames are replaced."""
        if self._frames is None or "continues" not in after.keys():
            return
        going_on = (after["terminated"] | after["truncated"]) & after["continues"]
        chosen = going_on.nonzero().squeeze(-1)
        if len(chosen):
            newest = after["observation"][chosen]
            self._frames[rows[chosen]] = first_frames(newest, self.frame_stack)

    def _count(self, rows: Tensor, action: Tensor, after: TensorDict) -> None:
        self._return[rows] += after["reward"]
        self._length[rows] += 1
        for row, taken in zip(rows.tolist(), action.unbind(), strict=True):
            self._actions[row].append(taken)

    def _show(self, states: TensorDict) -> None:
        self._state = states
        if self._frames is not None:
            self._frames = next_frames(self._frames, states["observation"])

    def _close(self, rows: Tensor) -> None:
        for row in rows.tolist():
            episode = EndedEpisode(float(self._return[row]), int(self._length[row]), row)
            self._ended.append(episode)

    def _begin(self, rows: Tensor) -> None:
        first = self.env.reset(self._seeds(rows), rows)
        self._episode[rows] += 1
        if self._state is None:
            self._state = first
        else:
            self._state = self._state.clone()  # the steps that were given out hold the old one
            self._state[rows] = first
        if self.frame_stack > 1:
            frames = first_frames(first["observation"], self.frame_stack)
            if self._frames is None:
                self._frames = frames
            else:
                self._frames = self._frames.clone()
                self._frames[rows] = frames
        self._return[rows] = 0
        self._length[rows] = 0
        for row in rows.tolist():
            self._actions[row] = []

    def _seeds(self, rows: Tensor) -> Tensor:
        """Seeds of the episodes that come next in these rows."""
        pairs = zip(rows.tolist(), self._episode[rows].tolist(), strict=True)
        return torch.tensor([derive_seed(self.seed, "episode", *pair) for pair in pairs])

    # -- resume

    def state(self) -> TensorDict:
        """The state as tensors: seeds by their counts, and the actions since."""
        spec = self.env.spec
        actions = [taken for row in self._actions for taken in row]
        empty = torch.empty(0, *spec.action.shape, dtype=spec.action.dtype)
        return TensorDict(
            episode=self._episode.clone(),
            num_actions=torch.tensor([len(row) for row in self._actions]),
            actions=torch.stack(actions) if actions else empty,
            num_env_steps=torch.tensor(self.num_env_steps),
            begun=torch.tensor(self._state is not None),
        )

    def load_state(self, state: TensorDict) -> None:
        """Load a state of `state`: each row's episode is started over and played again."""
        num = self.env.num_envs
        if len(state["episode"]) != num:
            raise ValueError(
                f"the state is of {len(state['episode'])} environments, and there are {num}: take "
                "env.num_envs as it was"
            )
        self.num_env_steps = int(state["num_env_steps"])
        self._ended = []
        self._state, self._frames = None, None
        if not bool(state["begun"]):
            self._episode = state["episode"].clone()
            return
        self._episode = state["episode"] - 1
        self._begin(everywhere(self.env))
        counts = state["num_actions"]
        by_row = state["actions"].split(counts.tolist())
        for t in range(int(counts.max())):
            rows = (counts > t).nonzero().squeeze(-1)
            self._replay(rows, torch.stack([by_row[row][t] for row in rows.tolist()]))

    def _replay(self, rows: Tensor, action: Tensor) -> None:
        assert self._state is not None
        after = self.env.step(action, rows)
        states = self._state.clone()
        states[rows] = after.select(*self.env.spec.state_keys)
        frames = self._frames
        self._show(states)
        if frames is not None and self._frames is not None and len(rows) < len(frames):
            others = torch.ones(len(frames), dtype=torch.bool).index_fill_(0, rows, False)
            self._frames[others] = frames[others]
        self._restart_frames(rows, after)
        self._count(rows, action, after)


def everywhere(env: BatchEnv) -> Tensor:
    """The numbers of all environments: int64 [E].

    >>> from raffia.envs.batch import SerialBatch
    >>> from raffia.envs.probe import ValueProbe
    >>> everywhere(SerialBatch([ValueProbe(), ValueProbe()]))
    tensor([0, 1])
    """
    return torch.arange(env.num_envs)


def first_frames(observation: Tensor, frame_stack: int) -> Tensor:
    """The stacks [n, S, *O] at the first observations [n, *O] of episodes: these, repeated.

    >>> first_frames(torch.tensor([[7.0]]), 3).flatten()
    tensor([7., 7., 7.])
    """
    return observation.unsqueeze(1).repeat_interleave(frame_stack, 1)


def next_frames(frames: Tensor, observation: Tensor) -> Tensor:
    """The stacks [n, S, *O] after these, with the newest observations [n, *O] last.

    >>> next_frames(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([4.0]))
    tensor([[2., 3., 4.]])
    """
    return torch.cat([frames[:, 1:], observation.unsqueeze(1)], 1)


def over(after: TensorDict) -> Tensor:
    """Where a reset is due after a step: bool [n].

    >>> no, yes = torch.tensor([False]), torch.tensor([True])
    >>> over(TensorDict(terminated=yes, truncated=no, continues=yes, batch_size=[1]))
    tensor([False])
    """
    ended = after["terminated"] | after["truncated"]
    return ended & ~after["continues"] if "continues" in after.keys() else ended
