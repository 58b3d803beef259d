"""Slices of episodes: with and without replacement, and by priority."""

import pytest
import torch
from torch.testing import assert_close

from raffia import TensorDict
from raffia.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSliceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)

EPSILON = 1e-8  # added to priorities by default
STORAGES = pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])


def episodes(*lengths, first=0):
    """Steps of episodes; `at` is the position in the episode, `episode` its number."""
    at = torch.cat([torch.arange(n) for n in lengths])
    episode = torch.cat([torch.full((n,), first + i) for i, n in enumerate(lengths)])
    done = torch.cat([torch.arange(n) == n - 1 for n in lengths])[:, None]
    after = {"done": done, "terminated": done & (episode % 2 == 0)[:, None]}
    return TensorDict(at=at, episode=episode, next=after, batch_size=[len(at)])


def buffer_of(sampler, size=40, storage=LazyTensorStorage, **options):
    rng = torch.Generator().manual_seed(0)
    return TensorDictReplayBuffer(storage=storage(size), sampler=sampler, generator=rng, **options)


def without_replacement(size=40, **options):
    return buffer_of(SliceSamplerWithoutReplacement(**options), size, batch_size=6)


def prioritized(size=9, storage=LazyTensorStorage, **options):
    sampler = PrioritizedSliceSampler(size, **{"alpha": 0.7, "beta": 0.9, **options})
    return buffer_of(sampler, size, storage)


def checked(batch, length):
    """A batch as slices [B, length]; each is a run of steps of one episode, and cut at its end."""
    slices = batch.reshape(-1, length)
    assert (slices["at"].diff(dim=1) == 1).all() and (slices["index"].diff(dim=1) == 1).all()
    assert (slices["episode"] == slices["episode"][:, :1]).all()
    after = slices["next"]
    ends = (torch.arange(length) == length - 1).expand(len(slices), length)
    assert torch.equal(after["truncated"][..., 0], ends)
    assert torch.equal(after["done"], after["truncated"] | after["terminated"])
    return slices


def lengths_of(batch):
    """The lengths of the slices of a batch, if they differ."""
    ends = batch["next", "truncated"][:, 0].nonzero()[:, 0]
    return ends.diff(prepend=torch.tensor([-1])).tolist()


@pytest.mark.parametrize("by", ["num_slices", "slice_len"])
@pytest.mark.parametrize("key", [{}, {"end_key": ("next", "done")}, {"traj_key": "episode"}])
@STORAGES
def test_slices_stay_within_one_episode_and_all_starts_are_drawn(by, key, storage):
    sampler = SliceSampler(**{by: {"num_slices": 4, "slice_len": 3}[by]}, **key)
    buffer, drawn = buffer_of(sampler, 20, storage), set()
    for lengths in ((3, 5), (2, 7), (1, 4, 6)):  # goes round the ring
        data = episodes(*lengths, first=100 * buffer.write_count)
        for part in data.split(4):
            buffer.extend(part)
        for _ in range(30):
            drawn |= set(checked(buffer.sample(12), 3)["index"][:, 0].tolist())
    episode, first = buffer[:]["episode"], buffer.write_count - len(buffer)
    starts = [i for i in range(len(buffer) - 2) if episode[i] == episode[i + 2]]
    assert {first + i for i in starts} <= drawn


def test_episodes_and_the_starts_in_each_are_uniform():
    sampler = SliceSampler(slice_len=2, traj_key="episode", truncated_key=None)
    buffer = buffer_of(sampler)
    buffer.extend(episodes(2, 5))
    start = buffer.sample(16_000).reshape(8000, 2)["index"][:, 0]
    expected = torch.tensor([4, 0, 1, 1, 1, 1]) / 8
    assert_close(start.bincount(minlength=6) / 8000, expected, atol=0.02, rtol=0)


def test_shorter_episodes_are_drawn_completely_if_lengths_may_differ():
    buffer = buffer_of(SliceSampler(slice_len=4, strict_length=False))
    buffer.extend(episodes(2, 6))
    found = lengths_of(buffer.sample(40))
    assert len(found) == 10 and set(found) == {2, 4}
    buffer, found = prioritized(20, slice_len=4, strict_length=False), set()
    buffer.extend(episodes(1, 3, 6))
    for _ in range(40):
        found |= set(lengths_of(buffer.sample(8)))
    assert found == {1, 2, 3, 4}


@pytest.mark.parametrize("with_done", [True, False])
@pytest.mark.parametrize(
    ("key", "starts"),
    [("episode", [0, 5]), (("collector", "traj_ids"), [0, 5]), ("traj_ids", [4, 5])],
)
def test_episodes_are_separated_by_torchrl_s_keys(key, starts, with_done):
    data = TensorDict(at=torch.arange(10), batch_size=[10])
    data[key] = torch.arange(10) // 5
    if with_done:
        data["next", "done"] = ((data["at"] == 3) | (data["at"] == 9))[:, None]
    buffer = buffer_of(SliceSampler(slice_len=5), 10)
    buffer.extend(data)
    if key == "traj_ids" and not with_done:
        with pytest.raises(KeyError, match="next.done"):
            buffer.sample(50)
    else:
        first = buffer.sample(100)["at"].reshape(-1, 5)[:, 0]
        assert first.unique().tolist() == starts  # as TorchRL's


# ------------------------------------------------------------------- slices without replacement


def test_batches_of_an_epoch():
    buffer = without_replacement(slice_len=3, drop_last=True, shuffle=False)
    buffer.extend(episodes(5, 3, 4))
    for _ in range(3):
        assert [batch["episode"][::3].tolist() for batch in buffer] == [[0, 1]]
    with pytest.raises(ValueError, match="needs 4 slices, but there are only 3"):
        buffer.sample(12)
    # 1000 steps of four episodes and slices of 32 steps: TorchRL gives 4 x 32 = 128 of 320 too
    buffer = without_replacement(1000, slice_len=32, traj_key="episode")
    buffer.extend(episodes(300, 250, 150, 300))
    assert checked(buffer.sample(320), 32)["episode"].unique().tolist() == [0, 1, 2, 3]
    buffer = without_replacement(slice_len=3, shuffle=False)
    for first, number in ((0, 3), (3, 1)):  # added steps start an epoch
        buffer.extend(episodes(*[3] * number, first=first))
        assert buffer.sample()["episode"].unique().tolist() == [0, 1]
    assert buffer.sample()["episode"].unique().tolist() == [2, 3]


# ------------------------------------------------------------------------- slices by priority


@STORAGES
def test_the_documented_example_of_slices_by_priority(storage):
    buffer = prioritized(num_slices=3, storage=storage)
    buffer.extend(episodes(3, 3, 3))
    batch, info = buffer.sample(6, return_info=True)
    assert info["priority_weight"].tolist() == [1.0] * 6
    buffer.update_priority(torch.arange(9), torch.tensor([0, 3, 3, 0, 0, 0, 1, 1, 1]))
    weights = set()
    for _ in range(30):
        batch, info = buffer.sample(6, return_info=True)
        assert set(checked(batch, 2)["index"][:, 0].tolist()) <= {1, 6, 7}
        assert torch.equal(batch["priority_weight"], info["priority_weight"])
        weights |= set(info["priority_weight"].tolist())
    # TorchRL's weight of priority 1 beside others of 0, and (p / 1)^(-alpha beta) of it
    least = EPSILON**0.63
    assert least == pytest.approx(9.120110917137936e-06)
    assert_close(sorted(weights), [least * 3**-0.63, least], rtol=1e-5, atol=0)


# --------------------------------------------------------------------------------- all samplers

SAMPLERS = {
    "with": lambda: SliceSampler(num_slices=2),
    "without": lambda: SliceSamplerWithoutReplacement(slice_len=2),
    "by priority": lambda: PrioritizedSliceSampler(40, alpha=0.7, beta=0.9, slice_len=2),
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_prefetched_preallocated_and_resumed_slices_are_the_same(kind, tmp_path):
    def started(prefetch):
        buffer = buffer_of(SAMPLERS[kind](), prefetch=prefetch, batch_size=4)
        numbers = buffer.extend(episodes(4, 3, 5, 2, 6, 3, 4))
        if kind == "by priority":
            buffer.update_priority(numbers, numbers.float())
        for _ in range(5):
            buffer.sample()
        return buffer

    plain = started(0)
    plain.save(tmp_path / "at")
    expected = [plain.sample() for _ in range(6)]
    for prefetch in (0, 2):
        stopped = buffer_of(SAMPLERS[kind](), prefetch=prefetch, batch_size=4)
        stopped.load(tmp_path / "at")
        for buffer in (stopped, started(prefetch)):
            out = buffer.sample()
            assert (out == expected[0]).all()
            for batch in expected[1:]:
                out = buffer.sample(**({"out": out} if len(out) == len(batch) else {}))
                assert (out == batch).all()


def sampled(n, sampler, *lengths):
    def call():
        buffer = buffer_of(sampler)
        buffer.extend(episodes(*lengths))
        buffer.sample(n)

    return call


BY_PRIORITY = PrioritizedSliceSampler(40, alpha=0.7, beta=0.9, slice_len=7)
MISTAKES = [
    (lambda: SliceSampler(), ValueError, "pass either num_slices.*or slice_len"),
    (lambda: SliceSampler(slice_len=2, end_key="a", traj_key="b"), ValueError, "either end_key or"),
    (lambda: SliceSampler(slice_len=0), ValueError, "slice_len=0 must be at least 1"),
    (lambda: SliceSampler(slice_len=2).draw(4, range(4)), ValueError, "works only in a buffer"),
    (sampled(6, SliceSampler(slice_len=3, traj_key="no"), 2), KeyError, 'no entry "no".*traj_key'),
    (sampled(6, SliceSampler(slice_len=3), 2, 2), ValueError, "no episode has the 3 steps of a"),
    (sampled(7, SliceSampler(slice_len=3), 2, 2), ValueError, "batch of 7 items is not a multiple"),
    (sampled(7, BY_PRIORITY, 1, 3, 6), ValueError, "no episode has the 7 steps .* longest has 6"),
]


def test_invalid_calls_are_refused():
    for call, error, match in MISTAKES:
        with pytest.raises(error, match=match):
            call()
