"""Slices without replacement and by priority, a writer that keeps the best, and shared buffers."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from raffia import TensorDict
from raffia.data import (
    CapacityError,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    MCTSForest,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSamplerWithoutReplacement,
    TensorDictMap,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorMap,
)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def episodes(*lengths, first=0):
    """Steps of episodes; `at` says where in its episode each is, `episode` of which it is."""
    at = torch.cat([torch.arange(n) for n in lengths])
    episode = torch.cat([torch.full((n,), first + i) for i, n in enumerate(lengths)])
    done = torch.cat([torch.arange(n) == n - 1 for n in lengths])[:, None]
    after = TensorDict(done=done, batch_size=[len(at)])
    return TensorDict(at=at, episode=episode, next=after, batch_size=[len(at)])


# ------------------------------------------------------------------- slices without replacement


def without_replacement(size=40, **options):
    sampler = SliceSamplerWithoutReplacement(**options)
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(size), sampler=sampler, batch_size=6, generator=rng()
    )


@pytest.mark.parametrize("key", [{}, {"traj_key": "episode"}])
def test_an_epoch_has_one_slice_of_each_episode(key):
    buffer = without_replacement(slice_len=3, **key)
    buffer.extend(episodes(5, 3, 2, 4, 6, 7))  # the third is too short
    starts = set()
    for _ in range(60):
        batches = list(buffer)
        assert [len(batch) for batch in batches] == [6, 6, 3]
        slices = torch.cat(batches).reshape(5, 3)
        assert sorted(slices["episode"][:, 0].tolist()) == [0, 1, 3, 4, 5]
        assert (slices["at"].diff(dim=1) == 1).all()
        assert (slices["episode"] == slices["episode"][:, :1]).all()
        starts |= set(slices["index"][:, 0].tolist())
    assert starts == {0, 1, 2, 5, 10, 11, 14, 15, 16, 17, 20, 21, 22, 23, 24}


def test_the_last_batch_can_be_left_out_and_the_order_kept():
    buffer = without_replacement(slice_len=3, drop_last=True, shuffle=False)
    buffer.extend(episodes(5, 3, 4))
    for _ in range(3):
        assert [batch["episode"][::3].tolist() for batch in buffer] == [[0, 1]]
    with pytest.raises(ValueError, match="has 4 slices, there are 3 episodes.*drop_last=False"):
        buffer.sample(12)


def test_no_more_slices_than_episodes_in_a_batch():
    # 1000 steps of four episodes and slices of 32 steps: TorchRL gives 4 x 32 = 128 of 320 too
    buffer = without_replacement(1000, slice_len=32, traj_key="episode")
    buffer.extend(episodes(300, 250, 150, 300))
    batch = buffer.sample(320)
    assert len(batch) == 128 and batch["episode"].unique().tolist() == [0, 1, 2, 3]


def test_what_is_added_begins_an_epoch():
    buffer = without_replacement(slice_len=3, shuffle=False)
    buffer.extend(episodes(3, 3, 3))
    assert buffer.sample()["episode"].unique().tolist() == [0, 1]
    buffer.extend(episodes(3, first=3))
    assert buffer.sample()["episode"].unique().tolist() == [0, 1]
    assert buffer.sample()["episode"].unique().tolist() == [2, 3]


@pytest.mark.parametrize("prefetch", [0, 3])
def test_an_epoch_of_slices_goes_on_after_a_stop(prefetch, tmp_path):
    def new():
        return TensorDictReplayBuffer(
            storage=LazyTensorStorage(40),
            sampler=SliceSamplerWithoutReplacement(slice_len=2),
            batch_size=4,
            prefetch=prefetch,
            generator=rng(),
        )

    buffer, other = new(), new()
    buffer.extend(episodes(4, 3, 5, 2, 6, 3, 4))
    for _ in range(5):
        buffer.sample()
    buffer.save(tmp_path / "at")
    expected = [buffer.sample() for _ in range(9)]
    other.load(tmp_path / "at")
    for batch in expected:
        assert (other.sample() == batch).all()
    plain = TensorDictReplayBuffer(
        storage=LazyTensorStorage(40),
        sampler=SliceSamplerWithoutReplacement(slice_len=2),
        batch_size=4,
        generator=rng(),
    )
    plain.extend(episodes(4, 3, 5, 2, 6, 3, 4))
    for _ in range(5):
        plain.sample()
    for batch in expected:
        assert (plain.sample() == batch).all()


# ------------------------------------------------------------------------- slices by priority


def prioritized(size=9, storage=LazyTensorStorage, **options):
    sampler = PrioritizedSliceSampler(size, **{"alpha": 0.7, "beta": 0.9, **options})
    return TensorDictReplayBuffer(storage=storage(size), sampler=sampler, generator=rng())


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_the_documented_example_of_slices_by_priority(storage):
    buffer = prioritized(num_slices=3, storage=storage)
    buffer.extend(episodes(3, 3, 3))
    batch, info = buffer.sample(6, return_info=True)
    assert info["priority_weight"].tolist() == [1.0] * 6
    buffer.update_priority(torch.arange(9), torch.tensor([0, 3, 3, 0, 0, 0, 1, 1, 1]))
    weights = set()
    for _ in range(30):
        batch, info = buffer.sample(6, return_info=True)
        slices = batch.reshape(3, 2)
        assert (slices["at"].diff(dim=1) == 1).all()
        assert (slices["episode"] == slices["episode"][:, :1]).all()
        assert set(slices["index"][:, 0].tolist()) <= {1, 6, 7}
        assert torch.equal(batch["priority_weight"], info["priority_weight"])
        weights |= set(info["priority_weight"].tolist())
    # TorchRL's weight of priority 1 beside others of 0, and (p / 1)^(-alpha beta) of it
    assert_close(
        sorted(weights),
        [9.120110917137936e-06 * 3**-0.63, 9.120110917137936e-06],
        rtol=1e-5,
        atol=0,
    )


def test_slices_begin_by_the_priority_of_their_first_step():
    buffer = prioritized(20, alpha=1.0, beta=0.5, eps=0.0, slice_len=3, importance="batch")
    numbers = buffer.extend(episodes(5, 4, 2))
    priority = torch.tensor([1.0, 2, 3, 9, 9, 4, 0, 9, 9, 9, 9])
    buffer.update_priority(numbers, priority)
    batch = buffer.sample(30_000)
    start = batch["index"].reshape(-1, 3)[:, 0]
    expected = torch.tensor([1.0, 2, 3, 0, 0, 4, 0]) / 10
    assert_close(start.bincount(minlength=7) / 10_000, expected, atol=0.02, rtol=0)
    weight = batch["priority_weight"].reshape(-1, 3)
    assert_close(weight, (1 / priority[start]).sqrt()[:, None].expand(-1, 3))
    assert torch.equal(batch["next", "truncated"].reshape(-1, 3)[0], torch.arange(3) == 2)


def test_slices_by_priority_go_round_the_ring_and_leave_priorities_alone():
    buffer = prioritized(10, alpha=1.0, eps=0.0, slice_len=2)
    for i in range(8):
        numbers = buffer.extend(episodes(3 + i % 3, first=i))
        buffer.update_priority(numbers, torch.full((len(numbers),), 1.0 + i))
        before = buffer.sampler.state_dict()["chances"]
        for _ in range(10):
            slices = buffer.sample(12).reshape(6, 2)
            assert (slices["index"].diff(dim=1) == 1).all()
            assert (slices["episode"][:, 0] == slices["episode"][:, 1]).all()
        assert torch.equal(buffer.sampler.state_dict()["chances"], before)


def test_slices_by_priority_may_be_shorter():
    buffer = prioritized(20, slice_len=4, strict_length=False)
    buffer.extend(episodes(1, 3, 6))
    lengths = set()
    for _ in range(40):
        batch = buffer.sample(8)
        ends = batch["next", "truncated"][:, 0].nonzero()[:, 0]
        lengths |= set(ends.diff(prepend=torch.tensor([-1])).tolist())
    assert lengths == {1, 2, 3, 4}
    with pytest.raises(ValueError, match="no episode has 7 steps yet.*longest has 6"):
        strict = prioritized(20, slice_len=7)
        strict.extend(episodes(1, 3, 6))
        strict.sample(7)


def test_slices_by_priority_go_on_after_a_stop(tmp_path):
    buffer, other = (prioritized(20, slice_len=2) for _ in range(2))
    numbers = buffer.extend(episodes(5, 6))
    buffer.update_priority(numbers, torch.arange(11.0))
    buffer.sample(4)
    buffer.dumps(tmp_path / "at")
    other.loads(tmp_path / "at")
    assert (buffer.sample(40) == other.sample(40)).all()


# ------------------------------------------------------------------------------- the best ones


def scored(*scores):
    score = torch.tensor(scores)
    return TensorDict(score=score, obs=10 * score, batch_size=[len(scores)])


def best(size, storage=LazyTensorStorage, **options):
    return TensorDictReplayBuffer(
        storage=storage(size),
        writer=TensorDictMaxValueWriter(**{"rank_key": "score", **options}),
        generator=rng(),
    )


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_the_best_items_are_kept(storage):
    buffer = best(3, storage)
    for scores, kept, new in [  # what TorchRL keeps
        ((2, 7, 1, 8), [2, 7, 8], [True, True, False, True]),
        ((2, 8, 1), [7, 8, 8], [False, True, False]),
        ((8, 2, 9), [8, 8, 9], [False, False, True]),
        ((9, 0), [8, 9, 9], [True, False]),
    ]:
        numbers = buffer.extend(scored(*scores))
        assert sorted(buffer[:]["score"].tolist()) == kept
        if scores[0] != 8:  # it lets one of 8 take the place of the 7 before it is left out
            assert (numbers >= 0).tolist() == new
        batch = buffer.sample(50)
        assert torch.equal(batch["obs"], 10 * batch["score"])
        assert set(batch["score"].tolist()) == set(kept)
    assert buffer.add(scored(1)[0]) == -1
    assert buffer.add(scored(11)[0]) == buffer.write_count - 1
    assert sorted(buffer[:]["score"].tolist()) == [9, 9, 11]


@pytest.mark.parametrize(
    ("reduction", "kept"),
    [("max", [0, 4]), ("min", [1, 2]), ("mean", [1, 4]), ("median", [1, 3]), ("sum", [1, 4])],
)
def test_a_rank_of_several_is_reduced(reduction, kept):
    ranks = [[0.0, 9, 0, 0], [4, 4, 4, 1], [3, 3, 3, 3], [5, 5, -9, 6], [0, 0, 8, 8]]
    buffer = best(2, reduction=reduction)
    buffer.extend(TensorDict(score=torch.tensor(ranks), obs=torch.arange(5), batch_size=[5]))
    assert buffer[:]["obs"].sort().values.tolist() == kept  # what TorchRL keeps


@given(st.integers(1, 6), st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=8), max_size=6))
def test_the_best_of_any_sequence_are_kept(size, parts):
    buffer, everything = best(size), []
    for part in parts:
        numbers = buffer.extend(scored(*part))
        everything += part
        stored = buffer[:]
        assert sorted(stored["score"].tolist()) == sorted(everything)[-size:]
        assert torch.equal(stored["obs"], 10 * stored["score"])
        first = buffer.write_count - len(buffer)
        for score, number in zip(part, numbers.tolist(), strict=True):
            assert number == -1 or stored["score"][number - first] == score


def test_an_epoch_over_the_best_is_over_those_that_are_here():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(1),
        sampler=SamplerWithoutReplacement(),
        batch_size=1,
        writer=TensorDictMaxValueWriter(rank_key="score"),
    )
    for scores, kept in ((range(10), 9), (range(10, 20), 19), (range(10), 19)):
        buffer.extend(scored(*scores))
        assert buffer.sample()["obs"].item() == 10 * kept


def test_mistakes_with_ranks():
    with pytest.raises(ValueError, match="reduction is one of"):
        TensorDictMaxValueWriter(reduction="last")
    with pytest.raises(ValueError, match="sampler that has none"):
        TensorDictReplayBuffer(
            storage=LazyTensorStorage(3),
            sampler=PrioritizedSampler(3, 1.0, 1.0),
            writer=TensorDictMaxValueWriter(),
        )
    with pytest.raises(ValueError, match="needs a max_size"):
        best(None, ListStorage).extend(scored(1))
    with pytest.raises(KeyError, match="no .*rank_key="):
        best(3, rank_key="other").extend(scored(1))
    buffer = best(2)
    buffer.extend(TensorDict(score=torch.tensor([1.0, 2.0]), batch_size=[2]))
    before = buffer[:]
    with pytest.raises(ValueError, match="NaN"):
        buffer.extend(TensorDict(score=torch.tensor([9.0, float("nan")]), batch_size=[2]))
    with pytest.raises(ValueError):  # of another dtype than those here
        buffer.extend(scored(7))
    assert (buffer[:] == before).all()
    with pytest.raises(TypeError, match="are containers"):
        ReplayBuffer(storage=LazyTensorStorage(2), writer=TensorDictMaxValueWriter()).extend(
            torch.ones(2)
        )


# -------------------------------------------------------------------------------------- others


def test_a_buffer_on_disk_can_be_shared():
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(5), batch_size=2)
    assert buffer.share() is buffer
    buffer.extend(scored(1, 2, 3))
    reader = pickle.loads(pickle.dumps(buffer))
    assert reader[:]["score"].tolist() == [1, 2, 3]
    memory = TensorDictReplayBuffer(storage=LazyTensorStorage(5))
    assert memory.share(False) is memory
    with pytest.raises(ValueError, match="LazyMemmapStorage"):
        memory.share()


def test_a_map_is_a_tensor_map_and_its_errors_are_those_of_sequences_too():
    with pytest.raises(TypeError, match="abstract"):
        TensorMap()
    key = TensorDict(x=torch.tensor([1, 2]), batch_size=[2])
    full = TensorDictMap(in_keys=["x"], max_size=1)
    assert isinstance(full, TensorMap)
    for error in (KeyError, IndexError):
        with pytest.raises(error, match="2 of 2 rows are not in the map"):
            full[key]
    for error in (ValueError, IndexError, CapacityError):
        with pytest.raises(error, match="do not fit"):
            full[key] = key

    class Listed(TensorMap):
        def __init__(self):
            self.rows = []

        def clear(self):
            self.rows = []

        def __getitem__(self, item):
            return torch.tensor([dict(self.rows)[k] for k in item.tolist()])

        def __setitem__(self, key, value):
            self.rows += zip(key.tolist(), value.tolist(), strict=True)

        def __len__(self):
            return len(self.rows)

        def contains(self, item):
            return torch.tensor([k in dict(self.rows) for k in item.tolist()])

    listed = Listed()
    listed[torch.tensor([3, 5])] = torch.tensor([30, 50])
    assert torch.tensor([5, 3]) in listed and torch.tensor([5, 4]) not in listed


def test_trees_by_the_names_of_torchrl():
    def rollout(*obs, actions):
        obs = torch.tensor(obs)
        after = TensorDict(observation=obs[1:], batch_size=[len(actions)])
        return TensorDict(
            observation=obs[:-1],
            action=torch.tensor(actions),
            next=after,
            batch_size=[len(actions)],
        )

    forest = MCTSForest(max_size=100)
    for obs, actions in (
        ((0, 1, 2, 3), (0, 0, 0)),
        ((0, 1, 2, 4, 5), (0, 0, 1, 0)),
        ((0, 6, 7), (1, 0)),
        ((2, 8, 9), (2, 0)),
    ):
        forest.extend(rollout(*obs, actions=actions))
    root = rollout(0, 1, actions=(0,))[0]
    tree = forest.get_tree(root)
    assert forest.max_size == 100 and len(forest.data_map) == 9
    assert root in forest.node_map
    assert list(MCTSForest.valid_paths(tree)) == [(1,), (0, 0), (0, 1), (0, 2)]
    found = [child.node_observations["observation"].item() for child in tree.subtree]
    assert found == [2, 7]
    for error in (KeyError, ValueError):
        with pytest.raises(error, match="no vertex 100"):
            tree.get_vertex_by_id(100)
        with pytest.raises(error, match="no vertex 1234"):
            tree.get_vertex_by_hash(1234)
