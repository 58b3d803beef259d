"""Buffers, storages, writers and maps with TorchRL's names and signatures."""

import functools
import gc
import os
import pickle
import random

import pytest
import torch
from torch.testing import assert_close

from raffia import LazyStackedTensorDict, TensorDict, lazy_stack
from raffia.data import (
    CapacityError,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    QueryModule,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMap,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorMap,
    TensorStorage,
)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def items(first, n, **entries):
    obs = torch.arange(first, first + n)
    return TensorDict(obs=obs, **entries, batch_size=[n])


STORAGES = {
    "tensor": lambda size: LazyTensorStorage(size),
    "list": lambda size: ListStorage(max_size=size),
    "disk": lambda size: LazyMemmapStorage(size),
}
STORED = pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)


@STORED
@pytest.mark.parametrize("prefetch", [None, 2])
def test_a_uniform_buffer(storage, prefetch, tmp_path):
    rows = storage(10)
    rows[0] = items(7, 1)[0]
    rows[torch.tensor([1, 2])] = items(8, 2)
    assert rows[0]["obs"] == 7 and rows.read([2, 0])["obs"].tolist() == [9, 7]
    rows.clear()
    buffer = TensorDictReplayBuffer(
        storage=rows,
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
    if not isinstance(rows, LazyMemmapStorage):
        buffer.dumps(tmp_path / "saved")
        other = TensorDictReplayBuffer(
            storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), generator=rng(5)
        )
        other.loads(tmp_path / "saved")
        assert torch.equal(other.sample(4)["obs"], buffer.sample(4)["obs"])


def test_defaults():
    assert TensorDictReplayBuffer().storage.max_size == 1000
    assert TensorDictReplayBuffer(sampler=PrioritizedSampler(5, 1.0, 1.0)).storage.max_size == 5
    buffer = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, eps=0.0, priority_key="err")
    assert isinstance(buffer.storage, ListStorage) and buffer.priorities is buffer.sampler
    buffer.extend(items(0, 4, err=torch.tensor([0.0, 1.0, 0.0, 3.0])))
    batch = buffer.sample(400)
    assert set(batch["index"].tolist()) == {1, 3}
    assert_close(batch["priority_weight"], torch.where(batch["index"] == 1, 1.0, 1 / 3))
    uniform = TensorDictReplayBuffer()
    assert uniform.priorities is None
    uniform.extend(items(0, 2, td_error=torch.tensor([-1.0, float("nan")])))  # no priority here


def buffer_of(storage, **options):
    return TensorDictReplayBuffer(storage=storage, **options)


BY_RANK = {"sampler": PrioritizedSampler(3, 1.0, 1.0), "writer": TensorDictMaxValueWriter()}
NOT_OFFERED = [
    (lambda: LazyTensorStorage(5, ndim=2), "ndim=2 is not supported.*data.reshape"),
    (lambda: LazyTensorStorage(5, consolidated=True), "consolidated=True is not supported"),
    (lambda: LazyMemmapStorage(5, shared_init=True), "shared_init=True.*mode='r'"),
    (lambda: LazyMemmapStorage(5, device="meta"), "rows on disk are read on the CPU"),
    (lambda: ListStorage(5, compilable=True), "compilable=True is not supported"),
    (lambda: TensorDictReplayBuffer(dim_extend=1), "dim_extend=1 is not supported"),
    (lambda: TensorDictReplayBuffer(shared=True), "shared=True is not supported"),
    (lambda: TensorDictPrioritizedReplayBuffer(alpha=1, beta=1, sync=False), "sync=False is not"),
    (lambda: buffer_of(LazyTensorStorage(5)).share(), "LazyMemmapStora"),
    (lambda: TensorDictMaxValueWriter(reduction="last"), "reduction='last' must be one of"),
    (lambda: buffer_of(LazyTensorStorage(3), **BY_RANK), "sampler without priorities"),
    (
        lambda: ReplayBuffer(
            sampler=SliceSampler(slice_len=2), writer=TensorDictMaxValueWriter, storage=ListStorage
        ),
        "without priorities or slices",
    ),
    (lambda: ReplayBuffer(compilable=True), "compilable=True is not supported"),
    (lambda: RoundRobinWriter(True), "compilable=True is not supported"),
    (lambda: TensorDictRoundRobinWriter(track_generations=True), "numbers of items are not used"),
    (lambda: PrioritizedSampler(3, 0.6, 0.4, 1e-8, torch.float16), "stored in float64"),
    (lambda: SliceSampler(slice_len=2, span=True), "span=True is not supported.*masks"),
    (lambda: TensorStorage(items(0, 4)), r"TensorStorage\(4\); storage.extend\(rows\)"),
]


def test_unsupported_options_are_refused():
    for make, match in NOT_OFFERED:
        with pytest.raises(ValueError, match=match):
            make()
    for wrong in ({"transform": 3}, {"collate_fn": "stack"}):
        with pytest.raises(TypeError, match="must be a function of a batch; got"):
            ReplayBuffer(**wrong)
    with pytest.raises(TypeError, match="transform must be a function"):
        ReplayBuffer().append_transform(3)


def test_options_at_their_defaults_and_parts_by_functions_that_make_them():
    priorities = PrioritizedSampler(9, 1.0, 1.0, 0.0, torch.float64, "min", True)
    assert priorities.reduction == "min" and priorities.max_priority_within_buffer
    plain = {"dim_extend": None, "shared": False, "compilable": False}
    options = {"cache_values": True, "compile": False, "use_gpu": False, "pad_output": False}
    for kind in (ReplayBuffer, TensorDictReplayBuffer):
        buffer = kind(
            storage=functools.partial(LazyTensorStorage, 9),
            sampler=lambda: SliceSampler(num_slices=2, traj_key="obs", **options),
            writer=functools.partial(RoundRobinWriter, compilable=False),
            batch_size=2,
            **plain,
        )
        buffer.extend(items(0, 4))
        assert buffer.sample().batch_size == (2,)
    assert isinstance(ReplayBuffer(sampler=SamplerWithoutReplacement).writer, RoundRobinWriter)
    best = ReplayBuffer(storage=LazyTensorStorage(2), writer=TensorDictMaxValueWriter)
    assert best.writer.chooses
    drawn = PrioritizedReplayBuffer(alpha=0.6, beta=0.4, dtype=torch.float32, **plain)
    assert drawn.storage.max_size == drawn.sampler.max_capacity == 1000
    lazily = PrioritizedReplayBuffer(0.6, 0.4, storage=lambda: LazyTensorStorage(7))
    assert lazily.sampler.max_capacity == 7


def roomy(slices):
    options = {"alpha": 1.0, "beta": 1.0, "eps": 0.0, "max_priority_within_buffer": True}
    if slices:
        return PrioritizedSliceSampler(9, **options, slice_len=1, traj_key="obs")
    return PrioritizedSampler(9, **options)


@pytest.mark.parametrize("slices", [False, True])
def test_a_sampler_may_have_a_larger_capacity_than_the_storage(slices):
    sampler = roomy(slices)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(3), sampler=sampler, batch_size=40)
    buffer.extend(items(0, 3, td_error=torch.tensor([50.0, 1.0, 2.0])))
    buffer.extend(items(3, 2))  # over those of 50 and 1, so the largest that is here is 2
    assert (buffer.sample()["priority_weight"] == 1).all()
    assert buffer.update_priority(torch.tensor([0, 2, 3]), torch.tensor([9.0, 2.0, 0.0])) == 1
    buffer.update_priority(4, 2.0)
    assert set(buffer.sample()["obs"].tolist()) == {2, 4}
    buffer.extend(items(5, 20))
    assert set(buffer.sample()["obs"].tolist()) == {22, 23, 24}
    other = TensorDictReplayBuffer(
        storage=LazyTensorStorage(3), sampler=roomy(slices), batch_size=40
    )
    other.load_state_dict(buffer.state_dict())
    assert set(other.sample()["obs"].tolist()) == {22, 23, 24}


def test_entries_by_key_and_a_priority_that_nothing_reads(tmp_path):
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(3), batch_size=2)
    buffer.extend(items(0, 5, nested=TensorDict(x=torch.arange(5), batch_size=[5])))
    assert buffer["obs"].tolist() == buffer["nested", "x"].tolist() == [2, 3, 4]
    assert buffer["nested"].batch_size == (3,)
    with pytest.raises(KeyError, match="gone"):
        buffer["gone"]
    numbered = ReplayBuffer(storage=ListStorage(4))
    assert numbered.extend(range(6)).tolist() == [*range(6)] and numbered[:].tolist() == [
        2,
        3,
        4,
        5,
    ]
    batch = buffer.sample()
    assert buffer.update_tensordict_priority(batch) == 0  # it has no "td_error", either
    buffer.dump(tmp_path / "buffer")
    buffer.storage.dumps(tmp_path / "storage")
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(3))
    other.loads(tmp_path / "buffer")
    assert other["obs"].tolist() == [2, 3, 4]
    other.storage.clear()
    other.storage.loads(tmp_path / "storage")
    assert other["obs"].tolist() == [2, 3, 4]


def test_folders_of_rows(tmp_path):
    with LazyMemmapStorage(5, tmp_path / "rows") as storage:
        storage.extend(items(0, 3))
    with pytest.raises(FileExistsError, match="pass existsok=True"):
        LazyMemmapStorage(5, scratch_dir=tmp_path / "rows")
    with LazyMemmapStorage(5, tmp_path / "rows", existsok=True) as storage:
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=2)
        assert buffer.extend(items(3, 1)).tolist() == [3] and buffer.share() is buffer
        assert pickle.loads(pickle.dumps(buffer))[:]["obs"].tolist() == [0, 1, 2, 3]
    with LazyMemmapStorage.open(tmp_path / "rows", mode="r") as reader:
        assert len(reader) == 4
    memory = TensorDictReplayBuffer(storage=LazyTensorStorage(5))
    assert memory.share(False) is memory


@pytest.mark.slow
def test_a_temporary_folder_is_removed_with_its_storage():
    storage = LazyMemmapStorage(5)
    storage.extend(items(0, 3))
    folder = storage.folder
    assert os.path.isdir(folder)
    del storage
    gc.collect()
    assert not os.path.exists(folder)


# ----------------------------------------------------------------------------- the best items


def scored(*scores):
    score = torch.tensor(scores)
    return TensorDict(score=score, obs=10 * score, batch_size=[len(scores)])


def best(size, storage=LazyTensorStorage, **options):
    writer = TensorDictMaxValueWriter(**{"rank_key": "score", **options})
    return buffer_of(storage(size), writer=writer, generator=rng())


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_the_best_items_are_kept(storage):
    draw = random.Random(0)
    for size in range(1, 7):
        buffer, everything = best(size, storage), []
        for n in (1, 2, 0, 8, 3, 1, 1, 5):
            part = [draw.randrange(10) for _ in range(n)]
            items = scored(*part, 0)[:n]
            numbers = buffer.extend(items).tolist() if n != 1 else [int(buffer.add(items[0]))]
            everything += part
            stored, first = buffer[:], buffer.write_count - len(buffer)
            assert sorted(stored["score"].tolist()) == sorted(everything)[-size:]
            assert torch.equal(stored["obs"], 10 * stored["score"])
            for score, number in zip(part, numbers, strict=True):
                assert number == -1 or stored["score"][number - first] == score
        batch = buffer.sample(50)
        assert set(batch["score"].tolist()) <= set(sorted(everything)[-size:])


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("max", [0, 4]), ("min", [1, 2]), ("mean", [1, 4]), ("median", [1, 3]), ("sum", [1, 4])],
)
def test_a_rank_with_several_elements_is_reduced(reduction, expected):
    ranks = [[0.0, 9, 0, 0], [4, 4, 4, 1], [3, 3, 3, 3], [5, 5, -9, 6], [0, 0, 8, 8]]
    buffer = best(2, reduction=reduction)
    buffer.extend(TensorDict(score=torch.tensor(ranks), obs=torch.arange(5), batch_size=[5]))
    assert buffer[:]["obs"].sort().values.tolist() == expected  # what TorchRL keeps


def test_rollouts_of_different_lengths_are_ranked():
    writer = TensorDictMaxValueWriter(rank_key="score")
    buffer, draw, everything = buffer_of(ListStorage(3), writer=writer), random.Random(0), []
    for n in (2, 1, 3, 1, 2, 3, 1, 2):
        rollouts = [scored(*draw.choices(range(9), k=draw.randint(1, 4))) for _ in range(n)]
        if n == 1:
            buffer.add(rollouts[0])
        else:
            buffer.extend(rollouts if n == 2 else lazy_stack(rollouts))
        everything += [int(one["score"].sum()) for one in rollouts]
        found = [int(one["score"].sum()) for one in buffer.storage.get(slice(None))]
        assert sorted(found) == sorted(everything)[-3:]


def test_invalid_ranks_change_nothing():
    writer = TensorDictMaxValueWriter()
    buffer, plain = best(2), ReplayBuffer(storage=LazyTensorStorage(2), writer=writer)
    buffer.extend(TensorDict(score=torch.tensor([1.0, 2.0]), batch_size=[2]))
    before = buffer[:]
    nan = TensorDict(score=torch.tensor([9.0, float("nan")]), batch_size=[2])
    for one, data, error, match in [
        (buffer, nan, ValueError, "NaN"),
        (buffer, scored(7), ValueError, None),  # of another dtype than those here
        (best(None, ListStorage), scored(1), ValueError, "needs a storage with a max_size"),
        (best(3, rank_key="other"), scored(1), KeyError, "no .*rank_key="),
        (plain, torch.ones(2), TypeError, "must be containers"),
    ]:
        with pytest.raises(error, match=match):
            one.extend(data)
    assert (buffer[:] == before).all()


# --------------------------------------------------------------------------------------- maps


def rollout(n=5, features=3):
    obs = torch.arange(n + 1.0)[:, None].expand(n + 1, features)
    after = TensorDict(observation=obs[1:], reward=torch.ones(n, 1), batch_size=[n])
    return TensorDict(
        observation=obs[:-1], action=torch.arange(n)[:, None], next=after, batch_size=[n]
    )


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
    assert pairs[torch.stack([source, source])].batch_size == (2, 5)


class OddNumbers(TensorMap):
    """A custom map that contains all odd numbers."""

    clear = __getitem__ = __setitem__ = __len__ = None

    def contains(self, item):
        return item % 2 == 1


def test_a_map_is_a_tensor_map_with_errors_like_those_of_sequences():
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
    assert torch.tensor([5, 3]) in OddNumbers() and torch.tensor([5, 4]) not in OddNumbers()


# ------------------------------------------------------------------ items of different shapes


def episode(n, reward=1.0):
    """An item of n steps: a container [n]."""
    obs = torch.arange(2.0 * n).view(n, 2)
    return TensorDict(obs=obs, reward=torch.full((n,), reward), batch_size=[n])


def lengths(items):
    return [len(item) for item in items]


def test_a_list_storage_accepts_items_of_different_shapes(tmp_path):
    storage = ListStorage(4)
    storage.extend([episode(2), episode(2)])  # still side by side
    assert type(storage.get([0, 1])) is list and lengths(storage.get([0, 1])) == [2, 2]
    assert storage.extend([episode(3), episode(1)]).tolist() == [2, 3]
    assert storage.extend(torch.stack([episode(5)])).tolist() == [4]  # over the oldest
    assert storage.add(episode(2)) == 5 and lengths(storage.get(slice(None))) == [5, 2, 3, 1]
    assert [lengths(row) for row in storage.get([[0, 1], [2, 3]])] == [[5, 2], [3, 1]]
    assert torch.equal(storage.get(2)["obs"], episode(3)["obs"])
    storage.get(2)["obs"].zero_()  # a copy
    assert storage.get(2)["obs"].sum() == 15
    storage.set(1, episode(4))
    storage.erase(3)
    assert len(storage) == 3 and lengths(storage.get([0, 1, 2])) == [5, 4, 3]
    with pytest.raises(IndexError, match=r"row\(s\) 3 hold nothing"):
        storage.get([0, 3])
    storage.save(tmp_path / "saved")
    loaded, state = ListStorage(4), ListStorage(4)
    loaded.load(tmp_path / "saved")
    state.load_state_dict(storage.state_dict())
    for other in (loaded, state, pickle.loads(pickle.dumps(storage))):
        assert other.total == 6 and other.rows().tolist() == [0, 1, 2]
        assert (other.read([2, 0, 1]) == storage.read([2, 0, 1])).all()
    with pytest.raises(ValueError, match="load it into a ListStorage"):
        LazyTensorStorage(4).load(tmp_path / "saved")
    storage.clear()
    assert len(storage.read([])) == 0
    state.load_state_dict(storage.state_dict())
    assert len(state) == 0
    assert len(storage) == 0 and storage.extend(torch.stack([episode(7)] * 2)).tolist() == [0, 1]
    assert lengths(storage.get([0, 1])) == [7, 7]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_batch_of_items_of_different_shapes_is_a_lazy_stack(prefetch):
    buffer = buffer_of(ListStorage(9), batch_size=8, prefetch=prefetch, generator=rng())
    buffer.extend([episode(n) for n in (1, 2, 3)])
    batch = buffer.sample()
    assert type(batch) is LazyStackedTensorDict and batch.batch_size == (8, -1)
    for item in batch.unbind(0):
        assert set(item["index"].tolist()) == {len(item) - 1}
        assert torch.equal(item["obs"], episode(len(item))["obs"])
    assert buffer[:].batch_size == (3, -1) and buffer[-1].batch_size == (3,)
    assert type(buffer[[1, 1]]) is TensorDict  # of one shape
    other = buffer_of(ListStorage(9), batch_size=8, generator=rng(5))
    other.load_state_dict(buffer.state_dict())
    assert len(other) == 3 and (other.sample() == buffer.sample()).all()


def test_items_of_different_shapes_have_priorities():
    sampler = PrioritizedSampler(9, alpha=1.0, beta=1.0, eps=0.0)
    buffer = TensorDictReplayBuffer(storage=ListStorage(9), sampler=sampler, batch_size=4)
    found = [TensorDict(obs=torch.zeros(n), td_error=torch.tensor(n - 1.0)) for n in (1, 2)]
    assert buffer.extend(found).tolist() == [0, 1] and buffer.sample()["index"].tolist() == [1] * 4
    with pytest.raises(ValueError, match="in item 1"):
        buffer.extend([found[0], found[1].clone().set("obs", torch.zeros(2).long())])
    assert len(buffer) == 2


def test_tensors_of_different_shapes_need_a_collate_fn():
    buffer = ReplayBuffer(storage=ListStorage(), batch_size=3, collate_fn=list, generator=rng())
    buffer.extend([torch.ones(1), torch.ones(2)])
    assert {len(x) for x in buffer.sample()} == {1, 2}
    plain, integers = ReplayBuffer(storage=buffer.storage), torch.ones(3).long()
    with pytest.raises(ValueError, match=r"pass ReplayBuffer\(collate_fn="):
        plain[:]
    for wrong in (integers, [torch.ones(3), integers], {"x": torch.ones(3)}):
        add = buffer.extend if isinstance(wrong, list) else buffer.add
        with pytest.raises((ValueError, TypeError)):
            add(wrong)
    assert len(buffer) == 2
