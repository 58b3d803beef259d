"""Readers of segments: n-step transitions, burn-in of recurrent states, goals in hindsight.

They take what a `SegmentReplayBuffer` gives, and need nothing stored for their sake.

Legend: B segments, L rows in a segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raffia.data.priorities import BELOW_ONE
from raffia.data.row_index import carried
from raffia.data.segment import SegmentReplayBuffer
from raffia.hints import check_choice, check_range
from raffia.tensordict.keys import NestedKey, unravel_key_list, unravel_key_to_tuple
from raffia.tensordict.tensordict import TensorDict

OF_SEGMENTS = ("index", "priority_weight", "total")  # entries [B], one for all rows
STRATEGIES = ("future", "final")


def n_step_transitions(
    segments: TensorDict,
    n: int,
    *,
    gamma: float,
    observation_keys: Sequence[NestedKey] = ("observation",),
    reward_key: NestedKey = "reward",
) -> TensorDict:
    """Transitions [B] over n steps, for Q-learning: of each segment the first step.

        R = sum_{k<m} (prod_{j<k} gamma d_j) r_k,   "discount" = prod_{k<m} gamma d_k

    where m is n, or fewer steps where the episode ends before, and d the segments' discount: 0 at a
    termination, after which nothing is bootstrapped; 1 at a truncation, after whose last
    observation is. So the target is R + discount * value(next observation).

    segments: a sample of at least n + 1 rows: `SegmentReplayBuffer(unroll_steps=n)`.
    Returns the entries of the first rows, reward R, "discount", and the observations m steps later
    under "next"; "index" and "priority_weight" as they are.

    Source: Sutton (1988), Learning to predict by the methods of temporal differences; Hessel et al.
    (2018), Rainbow, eq. for the truncated n-step return.

    >>> from raffia.data import SegmentReplayBuffer, TensorStorage
    >>> buffer = SegmentReplayBuffer(TensorStorage(100), unroll_steps=2)
    >>> ends = torch.tensor([False, False, True])
    >>> _ = buffer.extend(TensorDict(
    ...     observation=torch.arange(3), reward=torch.tensor([1.0, 2.0, 4.0]), terminated=ends,
    ...     truncated=ends & False, next=dict(observation=torch.arange(1, 4)), batch_size=[3]))
    >>> two = n_step_transitions(buffer.read(torch.tensor([0, 2])), 2, gamma=0.5)
    >>> two["reward"], two["discount"], two["next", "observation"]
    (tensor([2., 4.]), tensor([0.2500, 0.0000]), tensor([2, 3]))
    """
    length = segments["valid"].shape[1]
    if not 1 <= n < length:
        raise ValueError(
            f"n={n} steps and the observation after them need {n + 1} rows, but the segments have "
            f"{length}: create the buffer with unroll_steps={max(n, 1)} or more"
        )
    step = (segments["valid"] & segments["valid_step"])[:, :n]
    each = torch.where(step, gamma * segments["discount"][:, :n], 1.0)
    before = torch.cat([torch.ones_like(each[:, :1]), each[:, :-1].cumprod(1)], 1)
    reward = segments[reward_key][:, :n]  # 0 behind the end of an episode
    weight = before.view(before.shape + (1,) * (reward.dim() - 2))
    if reward.is_floating_point():  # else a discount would be rounded to 0
        weight = weight.to(reward.dtype)
    out = _rows(segments, 0)
    out.set(reward_key, (reward * weight).sum(1))
    out.set("discount", each.prod(1))
    for key in unravel_key_list(observation_keys):
        out.set(("next", *unravel_key_to_tuple(key)), segments[key][:, n])
    return out


class BurnIn(NamedTuple):
    """Segments in two parts."""

    warm_up: TensorDict  # rows [B, n, ...] that bring a recurrent state up to date
    learn: TensorDict  # the rows after them [B, L - n, ...], whose "mask" says which count


def burn_in(segments: TensorDict, n: int) -> BurnIn:
    """Segments parted into the rows that warm up a recurrent state, and those to learn from.

    A network starts from a state that was stored with the first step, or from zeros, runs over
    `warm_up` without gradients, and continues with `learn`. The first n steps of an episode only
    warm up, and of a segment that begins in its last n no step is left to learn from.

    Source: Kapturowski, Ostrovski, Quan, Munos & Dabney (2019), Recurrent experience replay in
    distributed reinforcement learning, section 3.

    >>> from raffia.data import SegmentReplayBuffer, TensorStorage
    >>> buffer = SegmentReplayBuffer(TensorStorage(100), unroll_steps=3)
    >>> no = torch.zeros(9, dtype=torch.bool)
    >>> _ = buffer.extend(TensorDict(
    ...     observation=torch.arange(9), terminated=no, truncated=no, batch_size=[9]))
    >>> parts = burn_in(buffer.read(torch.tensor([4])), 1)
    >>> parts.warm_up["observation"], parts.learn["observation"]
    (tensor([[4]]), tensor([[5, 6, 7]]))
    """
    length = segments["valid"].shape[1]
    if not 0 <= n < length:
        raise ValueError(
            f"burn-in of {n} rows leaves no rows to learn from in segments of {length}: create "
            f"the buffer with unroll_steps={n + 1} or more"
        )
    return BurnIn(_rows(segments, slice(0, n)), _rows(segments, slice(n, None)))


def _rows(segments: TensorDict, rows: int | slice) -> TensorDict:
    """The given rows of each segment; entries about whole segments stay."""
    out = TensorDict(batch_size=segments.batch_size)
    for key, value in segments.items(True, True):
        out.set(key, value if key in OF_SEGMENTS else value[:, rows])
    return out


@dataclass(eq=False, repr=False)
class HindsightReplay:
    """Segments in which some goals are replaced by what was achieved later in the episode.

    Where a task is to reach a goal, an episode that fails to reach its own has reached others. Its
    steps are as good an example of how to reach those, once the rewards are computed again.

    replay: its observations hold the goal and what is achieved, as Gymnasium's goal environments
        give them; both are among its `observation_keys`.
    compute_reward: `compute_reward(achieved, desired)` of tensors [N, ...] gives rewards [N]:
        `achieved` after the steps.
    goal_key, achieved_key, reward_key: names of these entries.
    fraction: of segments that are relabelled; 0.8 is four in five, as in the paper.
    strategy: the new goal is what was achieved at a "future" state of the episode, drawn uniformly
        from those after the segment's first step; or at its "final" one, the newest that is there.
    generator: of what is drawn here; torch's global one if None.

    A segment has one goal in all rows. The reward of its last row is 0, as the segment does not
    show what follows; as in any, it is there to bootstrap from.

    Source: Andrychowicz et al. (2017), Hindsight experience replay, algorithm 1 and section 3.4.

    >>> from raffia.data import HindsightReplay, SegmentReplayBuffer, TensorStorage
    >>> replay = SegmentReplayBuffer(
    ...     TensorStorage(100), unroll_steps=1, observation_keys=["position", "goal"])
    >>> no = torch.zeros(4, dtype=torch.bool)
    >>> _ = replay.extend(TensorDict(
    ...     position=torch.arange(4), goal=torch.full((4,), 9), reward=torch.zeros(4),
    ...     terminated=no, truncated=no, batch_size=[4]))
    >>> hindsight = HindsightReplay(
    ...     replay, lambda achieved, desired: (achieved == desired).float(), fraction=1.0,
    ...     strategy="final", goal_key="goal", achieved_key="position")
    >>> relabelled = hindsight.relabel(replay.read(torch.tensor([1, 2])))
    >>> relabelled["goal"], relabelled["reward"]
    (tensor([[3, 3],
            [3, 3]]), tensor([[0., 0.],
            [1., 0.]]))
    """

    replay: SegmentReplayBuffer
    compute_reward: Callable[[Tensor, Tensor], Tensor]
    _: KW_ONLY
    goal_key: NestedKey = ("observation", "desired_goal")
    achieved_key: NestedKey = ("observation", "achieved_goal")
    reward_key: NestedKey = "reward"
    fraction: float = 0.8
    strategy: str = "future"
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        check_range("fraction", self.fraction, 0, 1)
        check_choice("strategy", self.strategy, STRATEGIES)

    def sample(self, batch_size: int | None = None) -> TensorDict:
        """A sample of the replay, some of its segments with other goals and rewards."""
        with self.replay._lock:  # so that what was drawn is not overwritten before it is relabelled
            return self.relabel(self.replay.sample(batch_size))

    def __iter__(self) -> Iterator[TensorDict]:
        """Samples of the replay's `batch_size`, without end."""
        while True:
            yield self.sample()

    def relabel(self, segments: TensorDict) -> TensorDict:
        """The segments, some of them with new goals and rewards."""
        index = segments["index"].cpu()
        chosen = torch.rand(len(index), generator=self.generator, device="cpu") < self.fraction
        fraction = torch.full((len(index),), BELOW_ONE, dtype=torch.float64, device="cpu")
        if self.strategy == "future":
            fraction.uniform_(generator=self.generator)
        goal, reward = segments[self.goal_key].clone(), segments[self.reward_key].clone()
        later = self.replay.later(index[chosen], fraction[chosen])
        chosen = chosen.to(goal.device)
        new_goal = self.replay.entry(self.achieved_key, later).to(goal.device)
        carried(goal)[chosen] = carried(new_goal).unsqueeze(1).expand_as(carried(goal)[chosen])
        renewed = self._rewards(segments[chosen], goal[chosen])
        reward = reward.to(renewed.dtype)
        reward[chosen] = renewed.view_as(reward[chosen])
        return segments.copy().set(self.goal_key, goal).set(self.reward_key, reward)

    def _rewards(self, segments: Any, goal: Tensor) -> Tensor:
        """Rewards [n, L] for goals [n, L, ...]; 0 where there is no step, and in the last row."""
        step = segments["valid"] & segments["valid_step"]
        step[:, -1] = False
        after = step.roll(1, 1)  # the rows that steps lead to
        found = self.compute_reward(segments[self.achieved_key][after], goal[after])
        dtype = segments[self.reward_key].dtype
        if not dtype.is_floating_point:  # whole numbers could not hold fractions
            dtype = torch.promote_types(dtype, found.dtype)
        reward = found.new_zeros(step.shape, dtype=dtype)
        reward[step] = found.to(dtype).view(-1)
        return reward
