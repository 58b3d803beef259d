"""ReplayShards: the rows of each shard, weights against the uniform mean, and resuming."""

import pytest
import torch
from torch.testing import assert_close

from raffia import TensorDict
from raffia.data.segment import SegmentReplayBuffer
from raffia.data.segment_shards import ReplayShards
from raffia.data.storage import TensorStorage


def make(num_shards=2, num_rows=200, seed=0, reuse_memory=False, **options):
    options = {"unroll_steps": 1, "observation_keys": ["obs"]} | options

    def buffer(shard):
        generator = torch.Generator().manual_seed(10 * seed + shard)
        return SegmentReplayBuffer(TensorStorage(num_rows), generator=generator, **options)

    return ReplayShards([buffer(shard) for shard in range(num_shards)], reuse_memory=reuse_memory)


def steps_of(num_steps, num_envs, first=0, ends=(), shape=()):
    """Steps [T, E]: those of environment e at time t are 1000 e + t; ends: (t, e)."""
    obs = torch.arange(first, first + num_steps + 1).unsqueeze(1) + 1000 * torch.arange(num_envs)
    obs = obs.view(*obs.shape, *[1] * len(shape)).expand(*obs.shape, *shape).contiguous()
    terminated = torch.zeros(num_steps, num_envs, dtype=torch.bool)
    for at in ends:
        terminated[at] = True
    return TensorDict(
        obs=obs[:-1],
        value=torch.zeros(num_steps, num_envs),
        terminated=terminated,
        truncated=torch.zeros_like(terminated),
        next=dict(obs=obs[1:]),
        batch_size=[num_steps, num_envs],
    )


PRIORITIES = dict(alpha=0.7, beta=1.0, importance="buffer")


@pytest.mark.parametrize("stack", [1, 3])
def test_updated_entries_are_read_and_drawn(stack):
    replay = make(2, frame_stack=stack, alpha=0.6, beta=0.4)
    replay.extend(steps_of(8, 4, ends=[(6, 3)], shape=(2,)))
    sample = replay.sample(10)
    rows = sample["step_index"]
    fresh = TensorDict(value=rows.float() + 0.5, batch_size=rows.shape)
    assert replay.update(rows, fresh) == 0
    again = replay.read(sample["index"])
    is_step = again["valid_step"]
    assert_close(again["value"][is_step], rows[is_step].float() + 0.5)
    assert_close(again["obs"], sample["obs"])


def uneven(num_shards, **options):
    """Shards of different sizes: some environments' newest steps can be drawn, others' not."""
    replay = make(num_shards, unroll_steps=4, **options)
    ends = [(8, env) for env in range(0, 6, num_shards)]  # all of shard 0
    index = replay.extend(steps_of(9, 6, ends=ends))
    index = index[replay.contains(index)]
    sizes = [len(shard) for shard in replay.shards]
    assert len(set(sizes)) > 1 and sum(sizes) == len(replay) == len(index)
    return replay, index


@pytest.mark.parametrize("num_shards", [2, 3])
@pytest.mark.parametrize("has_priorities", [True, False])
def test_with_beta_1_a_weighted_mean_is_in_expectation_the_uniform_mean(num_shards, has_priorities):
    replay, index = uneven(num_shards, **PRIORITIES if has_priorities else {"importance": "buffer"})
    draw = torch.Generator().manual_seed(1)
    if has_priorities:
        scale = 1 + 20 * (index % num_shards)  # the shards' sums differ much, too
        replay.update_priority(index, torch.rand(len(index), generator=draw) * scale)
    f = torch.randn(6 * 200, generator=draw) + torch.arange(1200) % num_shards
    sample = replay.sample(600_000)
    weight = sample["priority_weight"].double()
    assert float(weight.max()) == 1.0
    # By a plain sum over the steps that can be drawn: N P(i) of each step, and the least of them.
    shards = replay.shards
    chances = torch.stack([shards[i % num_shards].probability(i // num_shards) for i in index])
    scaled = len(index) * chances / num_shards
    expected = f[index].double().mean()
    found = (weight * f[sample["index"]]).mean() / scaled.min()
    assert abs(found - expected) < 0.01 < abs(f[sample["index"]].double().mean() - expected)
    lookup = dict(zip(index.tolist(), (scaled / scaled.min()).reciprocal().tolist(), strict=True))
    assert_close(weight, torch.tensor([lookup[i] for i in sample["index"].tolist()]).double())


def test_a_smaller_beta_corrects_less_and_the_largest_weight_of_a_batch_is_1():
    replay, index = uneven(2, alpha=0.5, beta=1.0, importance="batch")
    replay.update_priority(index, 1.0 + index.float() * (1 + index % 2))
    for beta in (1.0, 0.25):
        replay.beta = beta
        assert replay.beta == beta and {shard.beta for shard in replay.shards} == {beta}
        sample = replay.sample(8)
        one = [replay.shards[i % 2].probability(torch.tensor([i // 2])) for i in sample["index"]]
        chance = torch.cat(one)
        assert_close(sample["priority_weight"], ((chance.min() / chance) ** beta).float())
        assert (replay.read(sample["index"])["priority_weight"] == 1).all()


def test_nothing_is_drawn_until_each_shard_has_enough():
    replay = make(2, unroll_steps=3)
    replay.extend(steps_of(1, 2, ends=[(0, 1)]))
    assert len(replay.shards[1]) == 1 and len(replay) == 0
    state = replay.shards[1].state_dict()["buffer"]["generator"]["state"]
    with pytest.raises(ValueError, match="no step can be drawn yet from shard 0 of 2: add steps"):
        replay.sample(4)
    assert torch.equal(state, replay.shards[1].state_dict()["buffer"]["generator"]["state"])
    replay.extend(steps_of(3, 2, first=1))
    assert len(replay) == 2
    # With few steps some are drawn twice.
    other = make(2, unroll_steps=3, replacement=None)
    other.load_state_dict(replay.state_dict())
    assert len(other.sample(6)["index"].unique()) < 6


def test_a_loaded_state_continues_bit_for_bit():
    replay = make(2, num_rows=20, alpha=0.6, beta=0.4)
    replay.extend(steps_of(12, 4, ends=[(7, 2)]))
    replay.sample(4)
    other = make(2, num_rows=20, alpha=0.6, beta=0.4, seed=5)
    other.load_state_dict(replay.state_dict())
    for one in (replay, other):
        one.extend(steps_of(3, 4, first=12))
    first, second = replay.sample(8), other.sample(8)
    assert all(torch.equal(first[key], second[key]) for key in first.keys())
    other.empty()
    assert len(other) == 0 and len(replay) > 0


def test_late_updates_are_counted():
    replay = make(2, num_rows=8, alpha=0.6, beta=0.4)
    old = replay.extend(steps_of(3, 4))
    replay.extend(steps_of(6, 4, first=3))
    assert replay.update_priority(old.flatten(), 1.0) == 12
    assert replay.update(old, TensorDict(value=torch.ones(3, 4), batch_size=[3, 4])) == 12
    assert replay.num_ignored == 24


def test_invalid_calls_are_refused():
    buffer = SegmentReplayBuffer(TensorStorage(9), unroll_steps=0)
    replay, plain = make(2, alpha=0.6, beta=0.4), make(2)
    for one in (replay, plain):
        one.extend(steps_of(8, 4))
    rows = replay.sample(10)["step_index"]
    fresh = TensorDict(value=rows.float(), batch_size=rows.shape)
    one = torch.tensor([0])
    for call, error, match in [
        (lambda: ReplayShards([]), ValueError, "no shards"),
        (lambda: ReplayShards([buffer] * 2), ValueError, "some of the 2 shards are the same"),
        (lambda: replay.extend(steps_of(4, 3)), ValueError, r"\[4, 3\] cannot be divided equally"),
        (lambda: replay.extend(steps_of(4, 2)[:, 0]), ValueError, r"steps \[4\] cannot be divided"),
        (lambda: replay.sample(7), ValueError, r"7 segments cannot be divided equally"),
        (lambda: replay.sample(0), ValueError, r"sample\(2\)"),
        (lambda: replay.read(torch.tensor(3)), ValueError, "index must have shape"),
        (lambda: replay.update(rows * 0 - 2, fresh), IndexError, r"no step -2: only \[.*\] rows"),
        (lambda: replay.update(rows, fresh[:, 0]), ValueError, r"\[10"),
        (lambda: replay.update_priority(one + 999, 1.0), IndexError, "there is no step 999"),
        (lambda: replay.update_priority(rows, torch.ones(3)), ValueError, "of that shape"),
        (lambda: plain.update_priority(one, 1.0), TypeError, "this buffer has no priorities"),
        (
            lambda: plain.load_state_dict(make(3).state_dict()),
            ValueError,
            "the state has 3 shards, but here there",
        ),
    ]:
        with pytest.raises(error, match=match):
            call()
    weighted = make(2, alpha=0.6, beta=0.4)
    index = weighted.extend(steps_of(4, 2))
    before = weighted.state_dict()["0"]["buffer"]["priorities"]["chances"]
    with pytest.raises(ValueError, match="finite and >= 0 .*; got -1."):
        weighted.update_priority(index[0], torch.tensor([2.0, -1.0]))
    assert torch.equal(before, weighted.state_dict()["0"]["buffer"]["priorities"]["chances"])
