"""Collection of steps from environments that are played without pause.

Legend: T times, E environments, S frames in a stack.
"""

from __future__ import annotations

import contextlib
import warnings
import zlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from raffia.envs.env import BatchEnv, FastForwardBatch
from raffia.envs.make import require_batch
from raffia.envs.rows import row_of_error
from raffia.hints import check_range, plural
from raffia.tensordict.stack import stack
from raffia.tensordict.tensordict import TensorDict
from raffia.train.ledger import EndedEpisode, Ledger

Act = Callable[[TensorDict], TensorDict]  # states [E] -> "action" and what is stored besides, [E]


class Collector:
    """E environments and their states.

    env: the environments.
    seed: of the run; an episode's own seed is made of it, of its row and of its number there.
    first_row: the first environment's row among all of the run's, where others play other rows.
    frame_stack: S, how many observations an actor sees together; before an episode's first one
        stands the first one again.
    check: called with the environments' outputs after each step; it may raise.
    carry: what an actor carries from step to step, such as the state of an LSTM: a container [],
        which each episode begins with. The actor finds these entries among its states [E], and
        gives the next ones under "next". They are stored with the steps.

    warn: called with a text if episodes that are played again come to another state.

    Where an environment plays on behind an end ("continues", as behind a lost life), the next
    episode begins without a reset; returns and lengths in metrics are those of the whole game.

    Steps [T, E] hold the states' entries (the newest frame), what the actor gave, "reward",
    "terminated", "truncated", "continues" where the environment says so, and under "next" the state
    after each step: but for "continues" as `SegmentReplayBuffer.extend` takes them.

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
        first_row: int = 0,
        frame_stack: int = 1,
        check: Callable[[TensorDict], None] = lambda step: None,
        carry: TensorDict | None = None,
        warn: Callable[[str], object] = warnings.warn,
    ) -> None:
        require_batch(env, by="Collector")
        check_range("frame_stack", frame_stack, 1)
        self.env, self.seed, self.frame_stack, self._check = env, seed, frame_stack, check
        self.carry, self._warn = carry, warn  # []
        self.ledger = Ledger(env.num_envs, env.spec, seed=seed, first_row=first_row)
        self._state: TensorDict | None = None  # [E], the newest frames
        self._frames: Tensor | None = None  # [E, S, *O]
        self._carried: TensorDict | None = None  # [E]
        self._has_raised = False  # in the latest `collect`
        self._rows = everywhere(env)

    @property
    def num_env_steps(self) -> int:
        """The number of steps played up to now, over all environments."""
        return self.ledger.num_env_steps

    def collect(self, act: Act, num_steps: int) -> TensorDict:
        """Play this many steps in each environment; returns them: [T, E].

        If it raises, `state` is that of before: a resume, or the next call, begins there.
        """
        check_range("num_steps", num_steps, 1)
        undo, carried = self.ledger.undo(), self._carried
        try:
            if self._has_raised:  # the environments may be elsewhere than the ledger
                back = self.ledger.undo()
                self.load_state(self.state())
                back()  # what has ended is not in the state
            if self._state is None:
                self._begin(self._rows)
            return stack([self._step(act) for _ in range(num_steps)], 0)
        except BaseException:
            undo()
            self._carried, self._has_raised = carried, True
            raise

    def take_ended(self) -> list[EndedEpisode]:
        """The episodes that have ended since this was asked before."""
        return self.ledger.take_ended()

    @property
    def now(self) -> TensorDict:
        """The states [E] for the actor's next step; before the first one environments are reset."""
        if self._state is None:
            self._begin(self._rows)
        assert self._state is not None
        shown = self._state.clone(recurse=False)  # an actor may write into it, as keyed modules do
        if self._frames is not None:
            shown["observation"] = self._frames
        if self._carried is not None:
            shown.update(self._carried.clone(recurse=False))
        return shown

    def _step(self, act: Act) -> TensorDict:
        before = self._state
        assert before is not None
        chosen = choose(act, self.now)
        with self._described():
            after = self.env.step(chosen["action"])
        self._check(after)
        states = after.select(*self.env.spec.state_keys)
        flags = {name: after[name] for name in ("reward", "terminated", "truncated")}
        stored, after_it = dict(before.items()), dict(states.items())
        if self._carried is not None:
            stored |= self._carried.items()
            self._carried = next_carry(self._carried, chosen)
            after_it |= self._carried.items()
        # States as they were: an actor may have written into them.
        step = TensorDict(
            {**stored, **dict(chosen.items()), **stored, **flags, "next": after_it},
            before.batch_size,
        )
        if "continues" in after.keys():
            step["continues"] = after["continues"]
        ended = self.ledger.count(self._rows, chosen["action"], after)
        self._show(states)
        self._restart(self._rows, after)
        if len(ended):
            self._begin(ended)
        return step

    def _restart(self, rows: Tensor, after: TensorDict) -> None:
        """Replace earlier frames, and what is carried, where an episode has ended and the
        environment continues with the next.
        """
        if "continues" not in after.keys():
            return
        going_on = (after["terminated"] | after["truncated"]) & after["continues"]
        chosen = going_on.nonzero().squeeze(-1)
        if len(chosen) and self._frames is not None:
            newest = after["observation"][chosen]
            self._frames[rows[chosen]] = first_frames(newest, self.frame_stack)
        if len(chosen):
            self._begin_carry(rows[chosen])

    def _show(self, states: TensorDict) -> None:
        self._state = states
        if self._frames is not None:
            self._frames = next_frames(self._frames, states["observation"])

    def _begin(self, rows: Tensor) -> None:
        with self._described(at_reset=True):
            first = self.env.reset(self.ledger.seeds(rows), rows)
        self.ledger.begin(rows)
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
        self._begin_carry(rows)

    def _begin_carry(self, rows: Tensor) -> None:
        """What is carried in these rows is what an episode begins with."""
        if self.carry is None:
            return
        if self._carried is None:
            self._carried = first_carry(self.carry, len(self._rows))
        else:
            self._carried = self._carried.clone()  # the steps that were given out hold the old one
            self._carried[rows] = first_carry(self.carry, len(rows))

    @contextlib.contextmanager
    def _described(self, at_reset: bool = False) -> Iterator[None]:
        """Add to an error of an environment the state it was in, to reproduce the error."""
        try:
            yield
        except Exception as error:
            row = row_of_error(error)
            if row is not None:
                error.add_note(self.ledger.describe(row, at_reset))
            raise

    # -- resume

    def state(self) -> TensorDict:
        """The state as tensors: seeds by their counts, the actions since, and what is carried."""
        state = self.ledger.state()
        if self._state is not None and not self._has_raised:
            state["checksums"] = checksums(self._state["observation"])
        return state if self._carried is None else state.set("carry", self._carried)

    def load_state(self, state: TensorDict) -> None:
        """Load a state of `state`: each row's episode is started over and played again."""
        self.ledger.load_state(state)
        self._state, self._frames, self._carried, self._has_raised = None, None, None, False
        if not self.ledger.has_begun:
            return
        by_row = self.ledger.rewind()
        seeds = self.ledger.seeds(self._rows)
        self._begin(self._rows)
        knows_returns = "episode_return" in state.keys()  # else they are counted again
        if knows_returns and isinstance(self.env, FastForwardBatch):
            by_row = self._fast_forward(self.env, seeds, by_row)
        counts = torch.tensor([len(actions) for actions in by_row], device="cpu")
        for t in range(int(counts.max())):
            rows = (counts > t).nonzero().squeeze(-1)
            self._replay(rows, torch.stack([by_row[row][t] for row in rows.tolist()]))
        if knows_returns:
            self.ledger.load_state(state)
        if self.carry is not None and "carry" in state.keys():
            self._carried = state["carry"].clone()
        if "checksums" in state.keys():
            self._compare(state["checksums"])

    def _compare(self, before: Tensor) -> None:  # int64 [E]
        """Warn if the states are others than these, whose checksums are given."""
        assert self._state is not None
        differ = (checksums(self._state["observation"]) != before).nonzero().squeeze(-1).tolist()
        if differ:
            self._warn(
                f"{self.env.spec.name or 'the environment'} is not deterministic: played again "
                f"with the same seeds and actions, the episodes of {plural(len(differ), 'row')} "
                f"({', '.join(map(str, differ[:8]))}{', ...' if len(differ) > 8 else ''}) came to "
                "other observations, so that this is not exactly the run as it was: draw from a "
                "generator that `reset` makes of its seed, and from nothing else"
            )

    def _fast_forward(
        self, env: FastForwardBatch, seeds: Tensor, by_row: list[Tensor]
    ) -> list[Tensor]:
        """Play the actions of each row but those whose states a stack shows; returns these."""
        nums = [max(0, len(actions) - self.frame_stack) for actions in by_row]
        rows = torch.tensor(nums, device="cpu").nonzero().squeeze(-1)
        unseen = [by_row[row][: nums[row]] for row in rows.tolist()]
        for row, actions in zip(rows.tolist(), unseen, strict=True):
            self.ledger.fast_forward(row, actions)
        if len(rows):
            with self._described():
                env.fast_forward(seeds[rows], unseen, rows)
        return [actions[num:] for actions, num in zip(by_row, nums, strict=True)]

    def _replay(self, rows: Tensor, action: Tensor) -> None:
        assert self._state is not None
        with self._described():
            after = self.env.step(action, rows)
        states = self._state.clone()
        states[rows] = after.select(*self.env.spec.state_keys)
        frames = self._frames
        self._show(states)
        if frames is not None and self._frames is not None and len(rows) < len(frames):
            others = rows.new_ones(len(frames), dtype=torch.bool).index_fill_(0, rows, False)
            self._frames[others] = frames[others]
        self._restart(rows, after)
        self.ledger.repeat(rows, action, after)


def checksums(observation: Tensor) -> Tensor:  # [E, *O] -> int64 [E]
    """A checksum of each row, to see whether it is the same again.

    >>> first, second, third = checksums(torch.tensor([[1.0], [2.0], [1.0]]))
    >>> bool(first == third), bool(first == second)
    (True, False)
    """
    rows = observation.cpu().contiguous().numpy()
    return torch.tensor([zlib.crc32(row.tobytes()) for row in rows], device="cpu")


def everywhere(env: BatchEnv) -> Tensor:
    """The numbers of all environments: int64 [E].

    >>> from raffia.envs.batch import SerialBatch
    >>> from raffia.envs.probe import ValueProbe
    >>> everywhere(SerialBatch([ValueProbe(), ValueProbe()]))
    tensor([0, 1])
    """
    return torch.arange(env.num_envs, device="cpu")


def choose(act: Act, states: TensorDict) -> TensorDict:
    """What an actor gives for these states; TypeError if that is a bare tensor.

    >>> choose(lambda states: torch.zeros(2), TensorDict(batch_size=[2]))
    Traceback (most recent call last):
    ...
    TypeError: an actor gives a container with "action", and maybe more, but this one gave a
    tensor: return TensorDict(action=action, batch_size=states.batch_size)
    """
    chosen = act(states)
    if isinstance(chosen, Tensor):
        raise TypeError(
            'an actor gives a container with "action", and maybe more, but this one gave a '
            "tensor: return TensorDict(action=action, batch_size=states.batch_size)"
        )
    return chosen


def first_carry(carry: TensorDict, num: int) -> TensorDict:
    """What is carried [n] at the beginning of as many episodes: copies of the same.

    >>> first_carry(TensorDict(hidden=torch.zeros(3)), 2)["hidden"].shape
    torch.Size([2, 3])
    """
    return carry.expand(num, *carry.batch_size).clone()


def next_carry(carried: TensorDict, chosen: TensorDict) -> TensorDict:
    """What an actor carries on [n], of what it gave, after what it carried.

    >>> chosen = TensorDict(action=torch.zeros(1), next=dict(h=torch.ones(1)), batch_size=[1])
    >>> next_carry(TensorDict(h=torch.zeros(1), batch_size=[1]), chosen)["h"]
    tensor([1.])
    """
    given = chosen.get("next", None)
    shapes = {} if given is None else {key: value.shape for key, value in given.items(True, True)}
    for key, value in carried.items(True, True):
        if shapes.get(key) != value.shape:
            found = "nothing" if key not in shapes else f"the shape {list(shapes[key])}"
            raise ValueError(
                f"carry has an entry {key!r} of the shape {list(value.shape)} for these rows, of "
                f"which the actor must give the next under 'next'; it gave {found} there: return "
                "TensorDict(action=..., next=TensorDict(...))"
            )
    out: TensorDict = given.select(*carried.keys()).detach()
    return out


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
