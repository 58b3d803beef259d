"""Replay and sum trees, as rows of the table in `data_operations.py`."""

import functools
import tempfile
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks import peer_extension
from benchmarks.data_parts import PEER, container, data_of, in_turn, nothing, permuted, seeded
from benchmarks.operation import Aim, Entries, Operation
from benchmarks.timing import Call

NO_SLOWER = Aim(1.0)
SAMPLE = Aim(1 / 1.5)
ALPHA, BETA = 0.6, 0.4
PRIORITIES = 8  # 1..8: whole numbers, so that the peer's float32 sums are exact too

# ---------------------------------------------------------------------------------- transitions


def transitions(num_rows: int) -> Entries:
    x = torch.rand(num_rows, 47, generator=seeded(4))
    state, goal, action, next_state, next_goal, reward = x.split([17, 3, 6, 17, 3, 1], 1)
    return {
        "obs": {"state": state.clone(), "goal": goal.clone()},
        "action": action.clone(),
        "next": {
            "obs": {"state": next_state.clone(), "goal": next_goal.clone()},
            "reward": reward.clone(),
            "terminated": reward > 0.9,
        },
    }


def td_of(package: ModuleType, num_rows: int) -> Any:
    entries = transitions(num_rows)
    obs = container(package, entries["obs"], num_rows)
    next = entries["next"]
    next["obs"] = container(package, next["obs"], num_rows)
    nested = entries | {"obs": obs, "next": container(package, next, num_rows)}
    return container(package, nested, num_rows)


def leaves(num_rows: int) -> list[Tensor]:
    def walk(entries: Entries) -> list[Tensor]:
        return [
            leaf
            for entry in entries.values()
            for leaf in (walk(entry) if isinstance(entry, dict) else [entry])
        ]

    return walk(transitions(num_rows))


def shapes(sample: Any) -> Entries:
    """What two random samples have in common; the number of a row goes by its own name in each."""
    leaf_keys = ["action", ("obs", "state"), ("next", "obs", "goal"), ("next", "terminated")]
    return {str(key): (tuple(sample[key].shape), str(sample[key].dtype)) for key in leaf_keys}


# -------------------------------------------------------------------------------------- buffers


def uniform(package: ModuleType, capacity: int, batch_size: int) -> Any:
    data = data_of(package)
    if package.__name__ == PEER:
        storage = data.LazyTensorStorage(capacity)
        return data.TensorDictReplayBuffer(storage=storage, batch_size=batch_size)
    return data.ReplayBuffer(storage=data.TensorStorage(capacity), batch_size=batch_size)


def on_disk(package: ModuleType, capacity: int, batch_size: int) -> Any:
    data, folder = data_of(package), tempfile.TemporaryDirectory()
    if package.__name__ == PEER:
        storage = data.LazyMemmapStorage(capacity, scratch_dir=folder.name, existsok=True)
        buffer = data.TensorDictReplayBuffer(storage=storage, batch_size=batch_size)
    else:
        storage = data.MemmapStorage(capacity, f"{folder.name}/replay")
        buffer = data.ReplayBuffer(storage=storage, batch_size=batch_size)
    buffer.folder = folder  # lives as long as the buffer
    return buffer


def prioritized(package: ModuleType, capacity: int, batch_size: int) -> Any:
    data = data_of(package)
    if package.__name__ == PEER:
        peer_extension.require()
        storage, make = data.LazyTensorStorage(capacity), data.TensorDictPrioritizedReplayBuffer
    else:
        storage, make = data.TensorStorage(capacity), data.PrioritizedReplayBuffer
    return make(alpha=ALPHA, beta=BETA, storage=storage, batch_size=batch_size)


MAKERS = {"uniform": uniform, "memmap": on_disk, "prioritized": prioritized}


class Replay:
    """Operations on one kind of buffer of `capacity` transitions, of which a tenth is there."""

    def __init__(self, kind: str, capacity: int, extend: int, batch_size: int):
        self.kind, self.capacity = kind, capacity
        self.num_new, self.batch_size = extend, batch_size

    def filled(self, package: ModuleType) -> Any:
        buffer = MAKERS[self.kind](package, self.capacity, self.batch_size)
        buffer.extend(td_of(package, self.capacity // 10))
        return buffer

    def add(self, package: ModuleType) -> Call:
        buffer, row = self.filled(package), td_of(package, 1)[0]
        return lambda: buffer.add(row)

    def extend(self, package: ModuleType) -> Call:
        buffer, new = self.filled(package), td_of(package, self.num_new)
        return lambda: buffer.extend(new)

    def sample(self, package: ModuleType) -> Call:
        buffer = self.filled(package)
        return lambda: buffer.sample()

    def from_scratch(self, package: ModuleType) -> Call:
        """A new buffer, through all that is done with one."""
        new = td_of(package, self.num_new)
        priority = torch.rand(self.num_new, generator=seeded(5))

        def call() -> Any:
            buffer = MAKERS[self.kind](package, self.capacity, self.batch_size)
            buffer.update_priority(buffer.extend(new), priority)
            return buffer.sample()

        return call

    def update(self, package: ModuleType) -> Call:
        buffer = self.filled(package)
        index = in_turn(permuted(self.capacity // 10), self.batch_size)
        priority = torch.rand(self.batch_size, generator=seeded(5))
        return lambda: nothing(buffer.update_priority(index(), priority))

    # by hand

    def stored(self) -> list[Tensor]:
        num_rows = self.capacity // 10
        return [leaf.new_empty(self.capacity, *leaf.shape[1:]) for leaf in leaves(num_rows)]

    def write_floor(self, num_rows: int) -> Call:
        """Copies into a slice of each entry."""
        store, new = self.stored(), leaves(num_rows)

        def call() -> None:
            for at, x in zip(store, new, strict=True):
                at[:num_rows] = x

        return call

    def sample_floor(self) -> Call:
        """Random rows of each entry."""
        store = leaves(self.capacity // 10)

        def call() -> None:
            index = torch.randint(self.capacity // 10, (self.batch_size,))
            for x in store:
                x[index]

        return call

    def update_floor(self) -> Call:
        """Priorities into random positions of an array."""
        priorities = torch.zeros(self.capacity)
        index = in_turn(permuted(self.capacity // 10), self.batch_size)
        new = torch.rand(self.batch_size)

        def call() -> None:
            priorities[index()] = new

        return call


def replay(kind: str, capacity: int, extend: int, batch_size: int) -> list[Operation]:
    buffer = Replay(kind, capacity, extend, batch_size)
    operation = functools.partial(Operation, read=nothing)
    add_floor, extend_floor = (functools.partial(buffer.write_floor, n) for n in (1, extend))
    rows = [
        operation(f"{kind} replay, extend 1000", buffer.extend, extend_floor),
        operation(
            f"{kind} replay, sample 256",
            buffer.sample,
            buffer.sample_floor,
            SAMPLE,
            compared=shapes,
        ),
    ]
    if kind == "prioritized":
        rows += [
            operation(f"{kind} replay, add 1", buffer.add, add_floor, NO_SLOWER),
            operation(f"{kind} replay, update 256", buffer.update, buffer.update_floor, NO_SLOWER),
        ]
    return rows


# ------------------------------------------------------------------------------------- segments


class Segments:
    """Windows of consecutive steps. The peer's are slices, and it keeps where episodes end.

    Ours also masks what lies behind an episode's end, and stores each observation once.
    """

    windows, length, episode = 32, 6, 100

    def __init__(self, num_steps: int, num_new: int):
        self.num_steps, self.num_new = num_steps, num_new

    def steps(self, package: ModuleType, num_steps: int) -> Any:
        x = torch.rand(num_steps, 17, generator=seeded(8))
        end = torch.arange(1, num_steps + 1) % self.episode == 0
        flags = {"reward": x[:, 0].clone(), "terminated": end, "truncated": end & False}
        entries = {"obs": x, "action": torch.arange(num_steps)}
        after = {"obs": x + 1}
        if package.__name__ == PEER:
            after |= {name: flag.unsqueeze(-1) for name, flag in (flags | {"done": end}).items()}
        else:
            entries |= flags
        entries["next"] = container(package, after, num_steps)
        return container(package, entries, num_steps)

    def filled(self, package: ModuleType) -> Any:
        data, batch_size = data_of(package), self.windows * self.length
        capacity = 2 * self.num_steps
        if package.__name__ == PEER:
            peer_extension.load()
            buffer = data.TensorDictReplayBuffer(
                storage=data.LazyTensorStorage(capacity),
                sampler=data.SliceSampler(
                    slice_len=self.length, end_key=("next", "done"), cache_values=True
                ),
                batch_size=batch_size,
            )
        else:
            buffer = data.SegmentReplayBuffer(
                data.TensorStorage(capacity),
                observation_keys=["obs"],
                unroll_steps=self.length - 1,
                batch_size=self.windows,
            )
        buffer.extend(self.steps(package, self.num_steps))
        return buffer

    def sample(self, package: ModuleType) -> Call:
        buffer = self.filled(package)
        return lambda: buffer.sample()

    def extend_and_sample(self, package: ModuleType) -> Call:
        buffer, new = self.filled(package), self.steps(package, self.num_new)

        def call() -> Any:
            buffer.extend(new)
            return buffer.sample()

        return call

    def floor(self) -> Call:
        store = [torch.rand(self.num_steps, width) for width in (17, 1, 1, 1, 1)]

        def call() -> None:
            start = torch.randint(self.num_steps - self.length, (self.windows, 1))
            index = start + torch.arange(self.length)
            for x in store:
                x[index]

        return call


def num_drawn(sample: Any) -> Entries:
    return {key: sample[key].numel() for key in ("obs", "action")}


def segments(num_steps: int, num_new: int) -> list[Operation]:
    buffer = Segments(num_steps, num_new)
    operation = functools.partial(Operation, read=nothing, compared=num_drawn)
    return [
        operation("segments, sample 32 of 6 steps", buffer.sample, buffer.floor),
        operation("segments, extend 100, then sample", buffer.extend_and_sample, buffer.floor),
    ]


# ------------------------------------------------------------------------------------ sum trees


class PeerTree:
    """The two trees, of sums and of minima, that the peer's sampler writes to."""

    def __init__(self, capacity: int):
        module = peer_extension.require()
        self.sums, self.minima = (
            module.SumSegmentTreeFp32(capacity),
            module.MinSegmentTreeFp32(capacity),
        )

    def set(self, index: Tensor, values: Tensor) -> None:
        self.sums[index] = values
        self.minima[index] = values


class Trees:
    """Operations on a sum tree alone. Priorities are whole numbers, so float32 sums are exact."""

    def __init__(self, capacity: int, num: int):
        self.capacity, self.num = capacity, num

    def priorities(self, num: int, package: ModuleType) -> Tensor:
        values = torch.randint(1, PRIORITIES + 1, (num,), generator=seeded(6))
        return values.to(torch.float32 if package.__name__ == PEER else torch.float64)

    def somewhere(self) -> Tensor:
        """Leaves for several calls, each of `num`."""
        num_calls = min(1024, self.capacity // self.num)
        return permuted(self.capacity)[: self.num * num_calls]

    def empty(self, package: ModuleType) -> Any:
        is_peer = package.__name__ == PEER
        return PeerTree(self.capacity) if is_peer else data_of(package).SumTree(self.capacity)

    def full(self, package: ModuleType) -> Any:
        tree = self.empty(package)
        tree.set(torch.arange(self.capacity), self.priorities(self.capacity, package))
        return tree

    def fill(self, package: ModuleType) -> Call:
        tree, everywhere = self.empty(package), torch.arange(self.capacity)
        values = self.priorities(self.capacity, package)
        return lambda: tree.set(everywhere, values)

    def update(self, package: ModuleType) -> Call:
        tree, index = self.full(package), in_turn(self.somewhere(), self.num)
        values = self.priorities(self.num, package)
        return lambda: tree.set(index(), values)

    def sample(self, package: ModuleType) -> Call:
        """Ours scales shares of 1; the peer is given masses, which saves it that."""
        tree = self.full(package)
        total = int(self.priorities(self.capacity, package).double().sum())
        mass = torch.randint(total, (self.somewhere().numel(),), generator=seeded(7)) + 0.5
        if package.__name__ == PEER:
            masses = in_turn(mass, self.num)
            return lambda: tree.sums.scan_lower_bound(masses())
        shares = in_turn(mass.double() / total, self.num)
        return lambda: tree.sample(shares())

    # by hand, on a plain array

    def fill_floor(self) -> Call:
        array, values = torch.empty(self.capacity), torch.rand(self.capacity)
        return lambda: nothing(array.copy_(values))

    def update_floor(self) -> Call:
        array, index = torch.empty(self.capacity), in_turn(self.somewhere(), self.num)
        values = torch.rand(self.num)

        def call() -> None:
            array[index()] = values

        return call

    def sample_floor(self) -> Call:
        array, index = torch.rand(self.capacity), in_turn(self.somewhere(), self.num)
        return lambda: nothing(array[index()])


def trees(capacity: int, nums: dict[str, int]) -> list[Operation]:
    operation = functools.partial(Operation, read=nothing)
    rows = [operation("SumTree, fill 1e6", Trees(capacity, 0).fill, Trees(capacity, 0).fill_floor)]
    for label, num in nums.items():
        tree = Trees(capacity, num)
        aim = NO_SLOWER if num > 1 else None  # one leaf is not the tree's time, but a call's
        rows += [
            operation(f"SumTree, update {label}", tree.update, tree.update_floor, aim),
            operation(f"SumTree, sample {label}", tree.sample, tree.sample_floor, aim),
        ]
    return rows
