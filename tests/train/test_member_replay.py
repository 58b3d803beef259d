"""Replay of a population: shared, or each member's own."""

import pytest
import torch

from raffia.data.segment import SegmentReplayBuffer
from raffia.data.storage import TensorStorage
from raffia.tensordict.tensordict import TensorDict
from raffia.train.member_replay import OwnReplays, SharedReplay


@pytest.mark.parametrize("own", [False, True])
def test_segments_are_shared_or_of_the_member_s_own_envs(own):
    replay = OwnReplays([buffer() for _ in range(3)]) if own else SharedReplay(buffer(), size=3)
    assert replay.extend(steps()).shape == (5, 6) and len(replay) == (8 if own else 24)
    segments = replay.sample(40)
    assert segments.batch_size == (3, 40)
    # Ages are in rows of all members: two of six that come in at a time are a member's own.
    index, age = segments["index"], segments["total"] - segments["index"]
    assert torch.equal(age, 3 * (10 - index) if own else 30 - index)
    if not own:
        assert bool((segments["index"] == segments["index"][0]).all())
        return
    for member in range(3):
        envs = segments["obs"][member].unique().tolist()
        assert envs == [2 * member, 2 * member + 1]


def buffer(**options):
    draws = torch.Generator().manual_seed(0)
    return SegmentReplayBuffer(
        TensorStorage(100), unroll_steps=1, observation_keys=["obs"], generator=draws, **options
    )


def steps(times=5, envs=6):
    no = torch.zeros(times, envs, dtype=torch.bool)
    index = torch.arange(envs).expand(times, envs)
    entries = {"obs": index, "value": index.float(), "terminated": no, "truncated": no}
    return TensorDict(entries, [times, envs])


def test_shared_priorities_are_means_over_members_without_nan():
    nan = torch.nan
    replay = SharedReplay(buffer(alpha=1.0, beta=1.0, eps=0.0), size=2)
    numbers = replay.extend(steps(envs=2)).flatten()[:4]
    replay.update_priority(numbers.expand(2, 4), torch.full((2, 4), 4.0))
    priorities = torch.tensor([[1.0, nan, 3.0, nan], [3.0, 1.0, nan, nan]])
    replay.update_priority(numbers.expand(2, 4), priorities)
    alone = buffer(alpha=1.0, beta=1.0, eps=0.0)
    alone.extend(steps(envs=2))
    alone.update_priority(numbers, torch.tensor([2.0, 1.0, 3.0, 4.0]))
    expected, found = alone.sample(64), replay.sample(64)
    assert torch.equal(found["index"][0], expected["index"])
    assert torch.equal(found["priority_weight"][1], expected["priority_weight"])


def test_own_priorities_stay_where_a_member_gives_nan():
    buffers = [buffer(alpha=1.0, beta=1.0, eps=0.0) for _ in range(2)]
    replay = OwnReplays(buffers)
    numbers = replay.extend(steps(envs=2)).T[:, :4]
    replay.update_priority(numbers, torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 5.0, 5.0, 5.0]]))
    replay.update_priority(numbers, torch.tensor([[torch.nan] * 4, [1.0, torch.nan, 1.0, 1.0]]))
    for member, priority in enumerate([[1.0, 2.0, 3.0, 4.0], [1.0, 5.0, 1.0, 1.0]]):
        alone = buffer(alpha=1.0, beta=1.0, eps=0.0)
        alone.extend(steps(envs=1))
        alone.update_priority(numbers[member], torch.tensor(priority))
        expected = alone.sample(64)["index"]
        assert torch.equal(replay.buffers[member].sample(64)["index"], expected)


@pytest.mark.parametrize("own", [False, True])
def test_beta_is_set_for_all_buffers(own):
    buffers = [buffer(alpha=0.6, beta=0.4) for _ in range(2)]
    replay = OwnReplays(buffers) if own else SharedReplay(buffers[0], 2)
    assert replay.beta == 0.4
    replay.beta = 0.7
    assert replay.beta == 0.7 and buffers[0].beta == 0.7 and (buffers[1].beta == 0.7) == own


@pytest.mark.parametrize("own", [False, True])
def test_reanalyzed_steps_are_written_back(own):
    buffers = [buffer() for _ in range(2)]
    replay = OwnReplays(buffers) if own else SharedReplay(buffers[0], 2)
    replay.extend(steps(envs=2))
    reanalyzed = TensorDict(
        step_index=torch.tensor([0, 1, 0, 1]),
        member=torch.tensor([0, 0, 1, 1]),
        value=torch.tensor([10.0, 11.0, 20.0, 21.0]),
        batch_size=[4],
    )
    replay.update(reanalyzed, best=1)
    values = [each.read(torch.tensor([0, 1]))["value"][:, 0].tolist() for each in replay.buffers]
    assert values == ([[10.0, 11.0], [20.0, 21.0]] if own else [[20.0, 21.0]])
