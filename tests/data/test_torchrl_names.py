"""Buffers, storages, samplers and maps by the names and signatures that TorchRL's users know."""

import functools
import gc
import os
import pickle

import pytest
import torch
from torch.testing import assert_close

from raffia import LazyStackedTensorDict, TensorDict
from raffia.data import (
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    MCTSForest,
    PrioritizedSampler,
    QueryModule,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMap,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def items(first, n, **entries):
    obs = torch.arange(first, first + n)
    return TensorDict(obs=obs, **entries, batch_size=[n])


STORAGES = {
    "tensor": lambda size: LazyTensorStorage(size),
    "list": lambda size: ListStorage(size),
    "list of the default size": lambda size: ListStorage(max_size=size),
    "disk": lambda size: LazyMemmapStorage(size),
}
STORED = pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)


@STORED
@pytest.mark.parametrize("prefetch", [None, 2])
def test_a_uniform_buffer(storage, prefetch, tmp_path):
    buffer = TensorDictReplayBuffer(
        storage=storage(10),
        sampler=SamplerWithoutReplacement(),
        writer=TensorDictRoundRobinWriter(),
        batch_size=5,
        prefetch=prefetch,
        transform=lambda td: td.set("twice", 2 * td["obs"]),
        generator=rng(),
    )
    assert buffer.extend(items(0, 7)).tolist() == list(range(7))
    buffer.append_transform(lambda td: td.set("more", td["twice"] + 1))
    buffer.extend([item for item in items(7, 7).unbind(0)])
    buffer.add(items(14, 1)[0])
    assert len(buffer) == 10 and buffer.write_count == 15
    batches = list(buffer)
    assert sorted(torch.cat([td["obs"] for td in batches]).tolist()) == list(range(5, 15))
    for td in batches:
        assert torch.equal(td["index"], td["obs"]) and torch.equal(td["more"], 2 * td["obs"] + 1)
    buffer.dumps(tmp_path / "saved")
    other = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), generator=rng(5)
    )
    if not isinstance(buffer.storage, LazyMemmapStorage):
        other.loads(tmp_path / "saved")
        assert torch.equal(other[:]["obs"], buffer[:]["obs"])
        assert torch.equal(other.sample(4)["obs"], buffer.sample(4)["obs"])


@STORED
@pytest.mark.parametrize("explicit", [False, True])
def test_a_prioritized_buffer(storage, explicit):
    if explicit:
        sampler = PrioritizedSampler(10, alpha=1.0, beta=1.0, eps=0.0)
        buffer = TensorDictReplayBuffer(
            storage=storage(10), sampler=sampler, priority_key="err", generator=rng()
        )
    else:
        buffer = TensorDictPrioritizedReplayBuffer(
            alpha=1.0, beta=1.0, eps=0.0, storage=storage(10), priority_key="err", generator=rng()
        )
    buffer.extend(items(0, 4, err=torch.tensor([0.0, 1.0, 0.0, 3.0])))
    batch = buffer.sample(400)
    assert set(batch["index"].tolist()) == {1, 3}
    assert_close(batch["priority_weight"], torch.where(batch["index"] == 1, 1.0, 1 / 3))
    buffer.update_tensordict_priority(batch.set("err", (batch["index"] == 1).float()))
    assert set(buffer.sample(50)["index"].tolist()) == {1}
    buffer.update_priority(torch.arange(4), torch.tensor([0.0, 0.0, 1.0, 0.0]))
    assert set(buffer.sample(50)["index"].tolist()) == {2}


def test_defaults():
    assert TensorDictReplayBuffer().storage.max_size == 1000
    buffer = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4)
    assert isinstance(buffer.storage, ListStorage) and buffer.priorities is buffer.sampler
    uniform = TensorDictReplayBuffer()
    assert uniform.priorities is None
    uniform.extend(items(0, 2, td_error=torch.tensor([-1.0, float("nan")])))  # no priority here
    assert len(uniform) == 2


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: LazyTensorStorage(5, ndim=2), "ndim=2 is not offered.*data.reshape"),
        (lambda: LazyTensorStorage(5, consolidated=True), "consolidated=True is not offered"),
        (lambda: LazyMemmapStorage(5, shared_init=True), "shared_init=True.*mode='r'"),
        (lambda: LazyMemmapStorage(5, device="meta"), "rows on disk are read on the CPU"),
        (lambda: ListStorage(5, compilable=True), "compilable=True is not offered"),
        (lambda: TensorDictReplayBuffer(dim_extend=1), "dim_extend=1 is not offered"),
        (lambda: TensorDictReplayBuffer(shared=True), "shared=True is not offered"),
        (
            lambda: TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, sync=False),
            "sync=False is not offered",
        ),
    ],
)
def test_options_that_are_not_offered_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_writers():
    with pytest.raises(TypeError, match=r"such as RoundRobinWriter\(\)"):
        ReplayBuffer(storage=LazyTensorStorage(3), writer=RoundRobinWriter)
    storage = LazyTensorStorage(3)
    storage.extend(items(0, 3))
    for kind in (ReplayBuffer, TensorDictReplayBuffer):
        buffer = kind(storage=storage, writer=ImmutableDatasetWriter())
        for write in (lambda: buffer.extend(items(3, 1)), lambda: buffer.add(items(3, 1)[0])):  # noqa: B023
            with pytest.raises(RuntimeError, match="ImmutableDatasetWriter"):
                write()
        assert sorted(set(buffer.sample(50)["obs"].tolist())) == [0, 1, 2]


# ------------------------------------------------------------------------------------- storages


@pytest.mark.slow
def test_a_temporary_folder_goes_with_its_storage():
    storage = LazyMemmapStorage(5)
    storage.extend(items(0, 3))
    folder = storage.folder
    assert os.path.isdir(folder)
    del storage
    gc.collect()
    assert not os.path.exists(folder)


def test_a_folder_that_holds_rows_is_gone_on_with_where_asked(tmp_path):
    with LazyMemmapStorage(5, tmp_path / "rows") as storage:
        storage.extend(items(0, 3))
    with pytest.raises(FileExistsError, match="existsok=True goes on with it"):
        LazyMemmapStorage(5, scratch_dir=tmp_path / "rows")
    with LazyMemmapStorage(5, tmp_path / "rows", existsok=True) as storage:
        assert len(storage) == 3
        buffer = TensorDictReplayBuffer(storage=storage)
        assert buffer.extend(items(3, 1)).tolist() == [3]
    with LazyMemmapStorage.open(tmp_path / "rows", mode="r") as reader:
        assert len(reader) == 4


@STORED
def test_storages_are_indexed(storage):
    rows = storage(5)
    rows[0] = items(7, 1)[0]
    rows[torch.tensor([1, 2])] = items(8, 2)
    assert rows[0]["obs"] == 7 and rows.read(slice(None))["obs"].tolist() == [7, 8, 9]
    assert rows.read([2, 0])["obs"].tolist() == [9, 7]


# --------------------------------------------------------------------------------------- slices


def episodes(*lengths, key="done"):
    """Steps of episodes; `at` says where in its episode each is, `episode` of which it is."""
    at = torch.cat([torch.arange(n) for n in lengths])
    episode = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    done = torch.cat([torch.arange(n) == n - 1 for n in lengths])[:, None]
    after = TensorDict(done=done, terminated=done & (episode % 2 == 0)[:, None])
    after.batch_size = [len(at)]
    return TensorDict(at=at, episode=episode, next=after, batch_size=[len(at)])


@pytest.mark.parametrize("by", ["num_slices", "slice_len"])
@pytest.mark.parametrize("key", [{}, {"end_key": ("next", "done")}, {"traj_key": "episode"}])
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_slices_are_of_one_episode_each(by, key, storage):
    sampler = SliceSampler(**{by: {"num_slices": 4, "slice_len": 3}[by]}, **key)
    buffer = TensorDictReplayBuffer(storage=storage(20), sampler=sampler, generator=rng())
    seen = set()
    for lengths in ((3, 5), (2, 7), (1, 4, 6)):  # goes round the ring
        data = episodes(*lengths)
        data["episode"] += 100 * buffer.write_count
        for part in data.split(4):
            buffer.extend(part)
        for _ in range(30):
            batch = buffer.sample(12)
            slices = batch.reshape(4, 3)
            assert (slices["at"].diff(dim=1) == 1).all()
            assert (slices["episode"] == slices["episode"][:, :1]).all()
            assert (slices["index"].diff(dim=1) == 1).all()
            ends = torch.tensor([False, False, True]).expand(4, 3)
            assert torch.equal(slices["next", "truncated"][..., 0], ends)
            assert torch.equal(
                slices["next", "done"], slices["next", "truncated"] | slices["next", "terminated"]
            )
            seen |= set(slices["index"][:, 0].tolist())
    stored = buffer[:]
    starts = [
        int(i) for i in range(len(buffer) - 2) if stored["episode"][i] == stored["episode"][i + 2]
    ]
    first = buffer.write_count - len(buffer)
    assert {first + i for i in starts} <= seen  # every start comes


def test_episodes_are_alike_and_so_are_the_starts_in_each():
    sampler = SliceSampler(slice_len=2, traj_key="episode", truncated_key=None)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, generator=rng())
    buffer.extend(episodes(2, 5))
    start = buffer.sample(16_000).reshape(8000, 2)["index"][:, 0]
    expected = torch.tensor([4, 0, 1, 1, 1, 1]) / 8
    assert_close(start.bincount(minlength=6) / 8000, expected, atol=0.02, rtol=0)


def test_shorter_episodes_come_whole_where_slices_need_not_be_alike():
    sampler = SliceSampler(slice_len=4, strict_length=False)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, generator=rng())
    buffer.extend(episodes(2, 6))
    batch = buffer.sample(40)
    ends = batch["next", "truncated"][:, 0].nonzero()[:, 0]
    lengths = ends.diff(prepend=torch.tensor([-1]))
    assert len(lengths) == 10 and set(lengths.tolist()) == {2, 4}


def test_slices_with_prefetch_and_into_a_batch_are_the_same():
    def drawn(prefetch, into):
        sampler = SliceSampler(num_slices=2)
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(30), sampler=sampler, prefetch=prefetch, generator=rng()
        )
        buffer.extend(episodes(9, 8))
        found, out = [], None
        for i in range(6):
            out = buffer.sample(8, **({"out": out} if into and out is not None else {}))
            found.append(out.clone())
            if i == 3:
                buffer.extend(episodes(4))
        return torch.stack(found)

    plain = drawn(0, False)
    for prefetch in (0, 2):
        for into in (False, True):
            assert (drawn(prefetch, into) == plain).all()


def test_mistakes_with_slices():
    with pytest.raises(ValueError, match="pass num_slices.*or slice_len"):
        SliceSampler()
    with pytest.raises(ValueError, match="end_key or by traj_key"):
        SliceSampler(slice_len=2, end_key="done", traj_key="episode")
    with pytest.raises(ValueError, match="slice_len is at least 1"):
        SliceSampler(slice_len=0)
    with pytest.raises(ValueError, match="belongs to a buffer"):
        SliceSampler(slice_len=2).draw(4, range(4))
    buffer = TensorDictReplayBuffer(sampler=SliceSampler(slice_len=3, traj_key="no"))
    buffer.extend(episodes(2, 2))
    with pytest.raises(KeyError, match='no entry "no".*traj_key'):
        buffer.sample(6)
    buffer = TensorDictReplayBuffer(sampler=SliceSampler(slice_len=3))
    buffer.extend(episodes(2, 2))
    with pytest.raises(ValueError, match="no episode has 3 steps yet.*the longest has 2"):
        buffer.sample(6)
    with pytest.raises(ValueError, match="batch of 7 items is no multiple of slice_len=3"):
        buffer.sample(7)


# --------------------------------------------------------------------------------------- maps


def rollout(n=5, features=3):
    obs = torch.arange(n + 1.0)[:, None].expand(n + 1, features)
    return TensorDict(
        observation=obs[:-1],
        action=torch.arange(n)[:, None],
        next=TensorDict(observation=obs[1:], reward=torch.ones(n, 1), batch_size=[n]),
        batch_size=[n],
    )


@pytest.mark.parametrize("storage", [None, functools.partial(LazyTensorStorage, 50), ListStorage])
@pytest.mark.parametrize("features", [3, 20])
def test_a_map_from_a_pair(storage, features):
    source, dest = rollout(features=features).exclude("next"), rollout(features=features)["next"]
    pairs = TensorDictMap.from_tensordict_pair(
        source, dest, in_keys=["observation", "action"], storage_constructor=storage
    )
    pairs[source] = dest
    assert (pairs[source] == dest).all() and (pairs[source[2]] == dest[2]).all()
    assert pairs.contains(source).all() and len(pairs) == 5
    assert {*pairs.out_keys} == {"observation", "reward"}


@pytest.mark.parametrize(
    "collate, kind", [(torch.stack, TensorDict), (TensorDict.lazy_stack, LazyStackedTensorDict)]
)
def test_values_out_of_a_list_are_collated_as_a_list(collate, kind):
    query = QueryModule(in_keys=["observation"], index_key="index")
    pairs = TensorDictMap(query_module=query, storage=ListStorage(), collate_fn=collate)
    source, dest = rollout().exclude("next"), rollout()["next"]
    pairs[source] = dest
    assert isinstance(pairs[source], kind) and (pairs[source] == dest).all()
    assert pairs[source[3]].batch_size == () and pairs[source[3]]["reward"] == 1
    grid = torch.stack([source, source])
    assert pairs[grid].batch_size == (2, 5)


def test_keys_of_a_forest():
    forest = MCTSForest(action_keys=["action"], reward_keys=["reward"])
    assert forest.action_keys == ["action"] and forest.reward_keys == ["reward"]
    forest.extend(rollout())
    with pytest.raises(KeyError, match="reward"):
        forest.extend(rollout().exclude(("next", "reward")))
    assert len(forest) == 5


# ----------------------------------------------------------------- items of unlike shapes


def episode(n, reward=1.0):
    """An item of n steps: a container [n]."""
    return TensorDict(
        obs=torch.arange(2.0 * n).view(n, 2), reward=torch.full((n,), reward), batch_size=[n]
    )


def lengths(items):
    return [len(item) for item in items]


def test_a_list_storage_holds_items_of_unlike_shapes(tmp_path):
    storage = ListStorage(4)
    storage.extend([episode(2), episode(2)])  # still side by side
    assert type(storage.get([0, 1])) is list and lengths(storage.get([0, 1])) == [2, 2]
    assert storage.extend([episode(3), episode(1)]).tolist() == [2, 3]
    assert storage.extend(torch.stack([episode(5)])).tolist() == [4]  # over the oldest
    assert storage.add(episode(2)) == 5 and lengths(storage.get(slice(None))) == [5, 2, 3, 1]
    assert [[len(item) for item in row] for row in storage.get([[0, 1], [2, 3]])] == [
        [5, 2],
        [3, 1],
    ]
    assert torch.equal(storage.get(2)["obs"], episode(3)["obs"])
    storage.get(2)["obs"].zero_()  # a copy
    assert storage.get(2)["obs"].sum() == 15
    storage.set(1, episode(4))
    storage.erase(3)
    assert len(storage) == 3 and lengths(storage.get([0, 1, 2])) == [5, 4, 3]
    with pytest.raises(IndexError, match=r"row\(s\) 3 hold nothing"):
        storage.get([0, 3])
    for made in (ListStorage(4), ListStorage(4), pickle.loads(pickle.dumps(storage))):
        if not len(made):
            made.load_state_dict(storage.state_dict())
        assert made.total == 6 and made.rows().tolist() == [0, 1, 2]
        assert (made.read([0, 1, 2]) == storage.read([0, 1, 2])).all()
    storage.save(tmp_path / "saved")
    other = ListStorage(4)
    other.load(tmp_path / "saved")
    assert (other.read([2, 0]) == storage.read([2, 0])).all()
    with pytest.raises(ValueError, match="load it into a ListStorage"):
        LazyTensorStorage(4).load(tmp_path / "saved")
    storage.clear()
    assert len(storage) == 0 and storage.extend(torch.stack([episode(7)] * 2)).tolist() == [0, 1]
    assert lengths(storage.get([0, 1])) == [7, 7]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_batch_of_unlike_items_is_a_lazy_stack(prefetch):
    buffer = TensorDictReplayBuffer(
        storage=ListStorage(9), batch_size=8, prefetch=prefetch, generator=rng()
    )
    buffer.extend([episode(n) for n in (1, 2, 3)])
    batch = buffer.sample()
    assert type(batch) is LazyStackedTensorDict and batch.batch_size == (8, -1)
    for item in batch.unbind(0):
        assert set(item["index"].tolist()) == {len(item) - 1}
        assert torch.equal(item["obs"], episode(len(item))["obs"])
    assert buffer[:].batch_size == (3, -1) and buffer[-1].batch_size == (3,)
    assert type(buffer[[1, 1]]) is TensorDict  # of one shape
    other = TensorDictReplayBuffer(storage=ListStorage(9), batch_size=8, generator=rng(5))
    other.load_state_dict(buffer.state_dict())
    assert len(other) == 3 and (other.sample() == buffer.sample()).all()


def test_unlike_items_come_with_their_priorities():
    sampler = PrioritizedSampler(9, alpha=1.0, beta=1.0, eps=0.0)
    buffer = TensorDictReplayBuffer(storage=ListStorage(9), sampler=sampler, batch_size=4)
    found = [TensorDict(obs=torch.zeros(n), td_error=torch.tensor(n - 1.0)) for n in (1, 2)]
    assert buffer.extend(found).tolist() == [0, 1]
    assert buffer.sample()["index"].tolist() == [1] * 4
    with pytest.raises(ValueError, match="in item 1"):
        buffer.extend([found[0], found[1].clone().set("obs", torch.zeros(2).long())])
    assert len(buffer) == 2


def test_unlike_tensors_are_collated_by_the_user():
    buffer = ReplayBuffer(storage=ListStorage(), batch_size=3, collate_fn=list, generator=rng())
    buffer.extend([torch.ones(1), torch.ones(2)])
    assert {len(x) for x in buffer.sample()} == {1, 2}
    plain = ReplayBuffer(storage=buffer.storage)
    with pytest.raises(ValueError, match=r"pass ReplayBuffer\(collate_fn="):
        plain[:]
    for wrong in (
        torch.ones(3).long(),
        [torch.ones(3), torch.ones(3).long()],
        {"x": torch.ones(3)},
    ):
        add = buffer.extend if isinstance(wrong, list) else buffer.add
        with pytest.raises((ValueError, TypeError)):
            add(wrong)
    assert len(buffer) == 2
