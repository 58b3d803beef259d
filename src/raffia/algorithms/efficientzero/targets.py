"""Make the batch that EfficientZero learns from out of segments of the replay.

Legend: B segments of L = K + n + 1 rows, K unrolled steps, n rewards before a value closes the sum,
O the shape of an observation with its frames merged, A actions or N sampled ones of D numbers.

Source: Ye, Liu, Kurutach, Abbeel & Gao (2021), "Mastering Atari Games with Limited Data", section 4
and appendix A; Schrittwieser et al. (2020), appendix F and G.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raffia.algorithms.efficientzero.config import EfficientZeroConfig
from raffia.algorithms.efficientzero.observations import (
    AUGMENTATION,
    draw_augmentation,
    frames_of,
)
from raffia.algorithms.efficientzero.planning import Planner
from raffia.algorithms.efficientzero.reanalyze import (
    MEMBER,
    distinct,
    reanalyze,
    steps_of,
    with_reanalyzed,
)
from raffia.data.segment_batches import stacked
from raffia.envs.env import Box, Discrete, EnvSpec
from raffia.functional.returns import n_step_return, value_prefix
from raffia.tensordict.tensordict import TensorDict


def make_batch(
    segments: TensorDict,  # [B], see `SegmentReplayBuffer`
    planner: Planner,  # refreshed with the target network
    *,
    generator: torch.Generator,  # of noise, of actions behind an end, of augmentation
    total: int | Tensor = 0,  # rows that the replay ever stored; of each segment [B]
    correction_interval: int = 0,  # rows of age that cost one step of the horizon; 0: none does
) -> tuple[TensorDict, TensorDict | None]:
    """The batch [B] of the learner, and the steps searched again for it [M], or None.

    The segments hold "observation", "action", "reward", "policy", "value", and where environment or
    actions need them "action_mask", "to_play" and "sampled_actions". The batch holds

        frames                [B, S + K, *observation_shape], each frame once, as stored; without a
                              loss of consistency [B, S, *observation_shape]
        augmentation          the numbers that `with_observations` shifts and brightens them by
        action                [B, K]       behind an end drawn at random
        target_policy         [B, K+1, A]  zeros behind an end
        target_value          [B, K+1]
        target_value_prefix   [B, K]
        sampled_actions       [B, K+1, N, D]  which target_policy is over, of continuous actions
        policy_mask, value_mask [B, K+1], value_prefix_mask, consistency_mask [B, K]  0.0 or 1.0
        weight, index         [B]

    Windows of a population, as many of each member, have "member" [B], and `planner` is a
    `StackedPlanner`: each is made with the networks of its member.

    It shares no memory with the segments, which may be filled again (`sample(out=...)`).

    The steps searched again are "step_index", "policy", "value" (and "sampled_actions"), each step
    once: `replay.update(reanalyzed["step_index"], reanalyzed.exclude("step_index"))` keeps it.

    >>> from raffia.algorithms.efficientzero.config import EfficientZeroConfig, TargetConfig
    >>> from raffia.algorithms.efficientzero.model import EfficientZeroModelMLP
    >>> from raffia.data.segment import SegmentReplayBuffer
    >>> from raffia.data.storage import TensorStorage
    >>> from raffia.envs.env import Discrete, EnvSpec
    >>> config = EfficientZeroConfig(targets=TargetConfig(n_step=3, reanalyze_ratio=0.0))
    >>> spec = EnvSpec(observation_shape=(4,), action=Discrete(2))
    >>> replay = SegmentReplayBuffer(
    ...     TensorStorage(100), unroll_steps=5, n_step=3, observation_keys=["observation"])
    >>> steps = TensorDict(
    ...     observation=torch.zeros(20, 4), action=torch.zeros(20, dtype=torch.int64),
    ...     reward=torch.ones(20), policy=torch.full((20, 2), 0.5), value=torch.zeros(20),
    ...     terminated=torch.arange(20) == 19, truncated=torch.zeros(20, dtype=torch.bool),
    ...     next=dict(observation=torch.zeros(20, 4)), batch_size=[20])
    >>> index = replay.extend(steps)
    >>> planner = Planner(EfficientZeroModelMLP(4, 2), spec, config)
    >>> segments = replay.read(torch.tensor([0, 17]))
    >>> batch, reanalyzed = make_batch(segments, planner, generator=torch.Generator())
    >>> batch["target_value_prefix"]
    tensor([[1., 2., 3., 4., 5.],
            [1., 2., 3., 3., 3.]])
    >>> batch["target_value"][1]
    tensor([2.9910, 1.9970, 1.0000, 0.0000, 0.0000, 0.0000])
    """
    config, spec = planner.config, planner.spec
    num_unrolled, n_step = config.loss.unroll_steps, config.targets.n_step
    _check(segments, num_unrolled + n_step + 1)
    segments = _with_observations_on(planner.device, segments, planner.frame_stack)
    reanalyzed = reanalyze(segments, planner, generator=generator)
    if reanalyzed is not None:
        segments = with_reanalyzed(segments, reanalyzed)
    n = n_step_of_age(total - segments["index"], n_step, correction_interval)
    ahead = slice(num_unrolled + 1)  # rows t .. t + K
    valid, mask = segments["valid_step"][:, ahead], segments["mask"][:, ahead]
    looks_ahead = config.loss.consistency_weight > 0
    num_rows = 1 + num_unrolled * looks_ahead
    batch = TensorDict(
        frames=frames_of(segments["observation"], num_rows, planner.frame_stack),
        action=actions(segments, spec, num_unrolled, generator),
        target_policy=segments["policy"][:, ahead] * valid.unsqueeze(-1),
        target_value=value_target(
            segments,
            bootstrap_values(segments, n, planner),
            n,
            config,
            discount=planner.number("discount", len(segments), segments.get(MEMBER, None)),
        ),
        target_value_prefix=value_prefix(
            segments["reward"][:, :num_unrolled], config.loss.lstm_horizon
        ),
        policy_mask=valid.float(),
        value_mask=mask.float(),
        value_prefix_mask=mask[:, :-1].float(),
        weight=segments["priority_weight"].clone(),
        index=segments["index"].clone(),
        batch_size=segments.batch_size,
    )
    if config.loss.augmentation:
        batch[AUGMENTATION] = draw_augmentation(
            len(segments), config.loss.augmentation, 1 + looks_ahead, generator
        )
    if isinstance(spec.action, Box):
        batch["sampled_actions"] = segments["sampled_actions"][:, ahead].clone()
    if looks_ahead:
        batch["consistency_mask"] = segments["valid"][:, 1 : num_unrolled + 1].float()
    return batch, reanalyzed


def _with_observations_on(
    device: torch.device, segments: TensorDict, frame_stack: int
) -> TensorDict:
    """The segments with their frames on the device of the networks, where each travels once."""
    observation = segments["observation"]
    if observation.device == device:
        return segments
    moved = frames_of(observation, observation.shape[1], frame_stack).to(device)
    placed = segments.copy().clear_device_()
    placed["observation"] = stacked(moved, frame_stack) if frame_stack > 1 else moved
    return placed


def n_step_of_age(
    age: Tensor,  # int64 [B], rows that came since
    n_step: int,
    interval: int,  # rows; 0: age does not count
) -> Tensor:  # int64 [B], 1..n_step
    """The number of rewards: fewer for older steps, after which another policy acted than the
    present one.

        n = clip(n_step - floor(age / interval), 1, n_step)

    Source: Ye et al. (2021), appendix A.4.

    >>> n_step_of_age(torch.tensor([0, 150, 9000]), n_step=5, interval=100)
    tensor([5, 4, 1])
    """
    if not interval:
        return torch.full_like(age, n_step)
    return (n_step - age // interval).clamp(1, n_step)


def value_target(
    segments: TensorDict,  # [B]
    values: Tensor,  # [B, L], of the observations of all rows that a sum may end in
    n: Tensor,  # int64 [B]
    config: EfficientZeroConfig,
    *,
    discount: float | Tensor | None = None,  # or of each segment [B]; None: the config's
) -> Tensor:  # [B, K+1]
    """The value target: n rewards plus the value of the state after them, from the view of the
    player to move.

        z_k = sum_{i<n} g^i r_{t+k+i} + g^n V(o_{t+k+n})

    Rewards of the other player, and values from his view, count negatively. Where the episode ends
    before, the sum does, with the value of the last observation if it was only cut short; behind
    the end z is 0.
    """
    acted = segments["valid_step"]
    rate = config.targets.discount if discount is None else discount
    if isinstance(rate, Tensor):
        rate = rate.unsqueeze(1)
    factor = rate * segments["discount"][:, :-1]
    if "to_play" in segments.keys():
        turns = segments["to_play"].diff(dim=1) != 0
        factor = torch.where(turns, -factor, factor)
    num, reward = config.loss.unroll_steps + 1, segments["reward"][:, :-1]
    target = n_step_return(reward, factor, values[:, 1:], n, ~acted[:, 1:], num)
    return torch.where(acted[:, :num], target, 0.0)


def bootstrap_values(
    segments: TensorDict,  # [B]
    n: Tensor,  # int64 [B]
    planner: Planner,
) -> Tensor:  # [B, L]
    """Values of the rows t+k+n, or of the last observation where the episode is cut short before;
    0 in rows that no sum ends in, and behind a termination.

    They are the network's, or those that were found by search; of a last observation, from which
    nothing was searched, always the network's.
    """
    config, discount = planner.config, segments["discount"]
    k = torch.arange(config.loss.unroll_steps + 1, device=n.device)
    last = segments["valid"].sum(1, keepdim=True) - 1
    row = torch.minimum(n.unsqueeze(1) + k, last)  # [B, K+1]
    acted = segments["valid_step"].gather(1, row)
    found = torch.zeros(row.shape, device=discount.device)
    wanted = discount.gather(1, row - 1) > 0  # what follows the step before counts in its value
    if config.targets.bootstrap == "search":
        found = torch.where(acted, segments["value"].gather(1, row), found)
        wanted &= ~acted
    wanted_steps = distinct(steps_of(segments).gather(1, row), wanted)
    if len(wanted_steps.first):
        segment = wanted_steps.first // len(k)
        observation = segments["observation"][segment, row.flatten()[wanted_steps.first]]
        own = [segments[MEMBER][segment]] if MEMBER in segments.keys() else []
        found[wanted] = planner.values(observation, *own)[wanted_steps.of_each].to(found)
    return torch.zeros_like(discount).scatter(1, row, found)


def actions(
    segments: TensorDict, spec: EnvSpec, num: int, generator: torch.Generator
) -> Tensor:  # [B, num] or [B, num, D]
    """The taken actions; behind an end random ones, as states there are absorbing by any action."""
    taken, acted = segments["action"][:, :num], segments["valid_step"][:, :num]
    device = generator.device
    if isinstance(spec.action, Discrete):
        drawn = torch.randint(spec.action.n, taken.shape, generator=generator, device=device)
        return torch.where(acted, taken, drawn.to(taken.device))
    low, high = (
        torch.tensor(bound, device=device) for bound in (spec.action.low, spec.action.high)
    )
    drawn = low + (high - low) * torch.rand(taken.shape, generator=generator, device=device)
    return torch.where(acted.unsqueeze(-1), taken, drawn.to(taken))


def _check(segments: TensorDict, length: int) -> None:
    found = segments["reward"].shape[1]
    if found != length:
        raise ValueError(
            f"segments must have unroll_steps + n_step + 1 = {length} rows; got {found}: build "
            "the replay with the unroll_steps and n_step of the config"
        )
