"""`ReplayBuffer`: a storage, a sampler and what is done with the batches in between."""

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, Literal, Self, TypedDict, overload

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import TypeVar

from raffia.data.batches import Batch, BatchMaker
from raffia.data.buffer import (
    Buffer,
    check_device,
    check_is_storage,
    check_options,
    check_same_generator,
    own_generator,
)
from raffia.data.row_index import as_rows, to_index
from raffia.data.samplers import RandomSampler, Sampler, too_few
from raffia.data.storage import Storage
from raffia.data.structure import check_entries, from_state
from raffia.data.torchrl_storages import ListStorage, refuse_others
from raffia.data.writers import RoundRobinWriter, Writer
from raffia.files.folder import Content, Folder, load_folder, write_folder
from raffia.hints import check_count
from raffia.tensordict.safetensors_file import save_file
from raffia.tensordict.tensordict import TensorDict

Items = TypeVar("Items", default=Any)  # what a batch is, as in `ReplayBuffer[TensorDict]`

KIND, VERSION = "raffia.replay", 1


class BufferOptions(TypedDict, total=False):
    """Options of `ReplayBuffer` other than its storage and sampler, documented there.

    >>> options: BufferOptions = {"batch_size": 32, "prefetch": 2}
    """

    writer: Writer | Callable[[], Writer] | None
    collate_fn: Callable[[Any], Any] | None
    transform: Callable[[Any], Any] | None
    batch_size: int | None
    pin_memory: bool
    device: torch.device | str | None
    prefetch: int | None
    generator: torch.Generator | None
    dim_extend: int | None
    shared: bool
    compilable: bool


class ReplayBuffer(Buffer, Generic[Items]):
    """A buffer that stores items and draws batches of them, in any order, from any thread.

    storage: holds the items: a `TensorStorage` or `MemmapStorage`. What it holds already counts.
        `ListStorage(1000)`, or of the size of the sampler, if None.
    sampler: chooses; `RandomSampler()` if None. It belongs to this buffer from now on.
    writer: decides whether items may be added; any may if None.
        Instead of these three, functions that make them can be given, such as their classes.
    collate_fn: called on each batch as it comes out of the storage: stacked, or as a list of items
        if that is a `ListStorage`. With `prefetch` it is
        called ahead of time in the thread: it should depend on nothing but the batch.
    transform: called on each batch in the end, in the thread that asks for it.
    batch_size: of `sample` and of iteration, where none is given there.
    pin_memory: put batches into page-locked memory; needs a GPU.
    device: where to move them to, without waiting where they are pinned.
    prefetch: the number of batches that are drawn ahead, in a thread. They are those that would be
        drawn without, bit for bit: when the content, a priority or an exponent has changed, those
        drawn ahead are thrown away and drawn again. It pays where several batches come between
        changes.
    generator: where random numbers come from, on the CPU; torch's global generator if None, or,
        with `prefetch`, a separate one, which that one seeds.
    dim_extend, shared, compilable: TorchRL's; at their defaults only.

    A buffer that is pickled, as for a spawned worker, is a copy; over a `MemmapStorage` it reads
    while the original writes.

    Items are known by numbers: that of the first is 0, and those of items that were overwritten do
    not come again. A batch of TensorDicts carries the numbers as "index" (and "priority_weight",
    where the sampler gives weights); an entry of that name in the data does not come through.

    >>> from raffia.data.replay import ReplayBuffer
    >>> from raffia.data.storage import TensorStorage
    >>> rng = torch.Generator().manual_seed(0)
    >>> buffer = ReplayBuffer(storage=TensorStorage(100), batch_size=4, generator=rng)
    >>> buffer.extend(TensorDict(obs=torch.arange(6.0), batch_size=[6]))
    tensor([0, 1, 2, 3, 4, 5])
    >>> batch = buffer.sample()
    >>> batch["obs"], batch["index"]
    (tensor([2., 3., 5., 0.]), tensor([2, 3, 5, 0]))
    """

    def __init__(
        self,
        *,
        storage: Storage | Callable[[], Storage] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        batch_size: int | None = None,
        pin_memory: bool = False,
        device: torch.device | str | None = None,
        prefetch: int | None = 0,
        generator: torch.Generator | None = None,
        dim_extend: int | None = 0,
        shared: bool = False,
        compilable: bool = False,
    ) -> None:
        refuse_others(dim_extend=dim_extend or 0, shared=shared, compilable=compilable)
        prefetch = 0 if prefetch is None else prefetch
        check_options(batch_size, pin_memory, prefetch)
        generator = own_generator(generator, prefetch)
        sampler = RandomSampler() if sampler is None else made(sampler, Sampler)
        default = getattr(sampler, "max_capacity", None) or 1000
        storage = ListStorage(default) if storage is None else made(storage, Storage)
        check_is_storage(storage)
        check_device(device)
        _check_sampler(sampler, storage)
        _check_callable("transform", transform)
        _check_callable("collate_fn", collate_fn)
        self.transform: Callable[[Any], Any] | None = transform
        self.batch_size = batch_size
        self.writer: Writer = RoundRobinWriter() if writer is None else made(writer, Writer)
        _check_writer(self.writer, sampler)
        self._maker = BatchMaker(storage, generator, pin_memory, device, sampler, collate_fn)
        sampler.attach(storage)
        self._start(prefetch)
        sampler.lock = self._lock
        live = self.storage.live
        if live:
            sampler.added(live)

    def _borrowed(self) -> list[Any]:
        return [self.transform, self._maker.collate_fn]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.sampler.lock = self._lock

    @property
    def storage(self) -> Storage:
        """The storage that holds the items."""
        return self._maker.storage

    @property
    def sampler(self) -> Sampler:
        """The sampler that chooses among the items."""
        return self._maker.sampler

    def set_sampler(self, sampler: Sampler) -> None:
        """Draw with another sampler from now on; all items are new to it.

        Raises ValueError, and changes nothing, for one that does not go with storage or writer.

        >>> from raffia.data import LazyTensorStorage, SamplerWithoutReplacement
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(9), batch_size=3)
        >>> _ = buffer.extend(torch.arange(3))
        >>> buffer.set_sampler(SamplerWithoutReplacement(shuffle=False))
        >>> buffer.sample()
        tensor([0, 1, 2])
        """
        if sampler is self.sampler:
            return
        _check_sampler(sampler, self.storage)
        _check_writer(self.writer, sampler)
        with self._lock:
            self._before_change()
            sampler.attach(self.storage)
            if live := self.storage.live:
                sampler.added(live)
            self.sampler.clear()  # it may be given to another buffer
            self.sampler.lock, sampler.lock = Sampler.lock, self._lock
            self._maker.sampler = sampler

    def set_writer(self, writer: Writer) -> None:
        """Ask another writer from now on whether items may be added.

        Raises ValueError for one that moves items, where the sampler has priorities or slices.

        >>> from raffia.data import ImmutableDatasetWriter, LazyTensorStorage
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(9))
        >>> _ = buffer.extend(torch.arange(3))
        >>> buffer.set_writer(ImmutableDatasetWriter())  # it stays as it is now
        """
        _check_writer(writer, self.sampler)
        with self._lock:
            self._before_change()
            self.writer = writer

    def set_rng(self, generator: torch.Generator) -> None:
        """Set `generator`, as TorchRL names it."""
        self.generator = generator

    # -- items

    def __len__(self) -> int:
        """The number of stored items."""
        return len(self.storage)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.storage!r}, {type(self.sampler).__name__})"

    def extend(self, data: Any) -> Tensor:
        """Add items, whose first dimension counts them; returns their numbers [n].

        They are copied, and overwrite the oldest where the storage is full.
        Raises ValueError or TypeError, and changes nothing, if they differ from those here.

        >>> from raffia.data.storage import TensorStorage
        >>> buffer = ReplayBuffer(storage=TensorStorage(3))
        >>> buffer.extend(torch.arange(5)), len(buffer)
        (tensor([0, 1, 2, 3, 4]), 3)
        """
        self.writer.check()
        with self._lock:
            self._before_change()
            self._maker.follow()  # whatever can be wrong with the sampler is found before a write
            if self.writer.chooses:
                return self._extend_with_chosen(data)
            numbers = self.storage.extend(data)
            total = self.storage.total
            self.sampler.added(range(total - len(numbers), total))
        return numbers

    def _extend_with_chosen(self, data: Any) -> Tensor:
        """Add those items that the writer chooses; returns their numbers, -1 for the others."""
        n = len(data)
        data, stored = self.writer.chosen(data, self.storage)
        numbers = torch.full((n,), -1, device="cpu")
        if len(stored):
            numbers[stored] = self.storage.extend(data)
            self.sampler.clear()  # others may have moved
            self._maker.follow()
        return numbers

    def add(self, item: Any) -> int:
        """Add one item, without a dimension that counts; returns its number.

        >>> from raffia.data.storage import TensorStorage
        >>> buffer = ReplayBuffer(storage=TensorStorage(3))
        >>> buffer.add({"obs": torch.zeros(2)}), buffer.add({"obs": torch.ones(2)})
        (0, 1)
        """
        self.writer.check()
        if self.writer.chooses:
            return int(self.extend([item])[0])
        with self._lock:
            self._before_change()
            self._maker.follow()
            number = self.storage.add(item)
            self.sampler.added(range(number, number + 1))
        return number

    def __getitem__(self, index: Any) -> Any:
        """Items by age, 0 being the oldest and -1 the newest: a copy, neither collated nor changed.

        index: an int, a slice, integers [*batch], or a mask with a truth value for each item; a
            key of containers, for an entry of all of them.

        >>> from raffia.data.storage import TensorStorage
        >>> buffer = ReplayBuffer(storage=TensorStorage(3))
        >>> _ = buffer.extend(torch.arange(5))
        >>> buffer[0], buffer[-1], buffer[:]
        (tensor(2), tensor(4), tensor([2, 3, 4]))
        >>> buffer[torch.tensor([True, False, True])]
        tensor([2, 4])
        """
        if isinstance(index[0] if isinstance(index, tuple) and index else index, str):
            return self[:][index]
        with self._lock:
            return self._maker.item(lambda live: _items_at(index, live))

    def empty(self) -> None:
        """Discard all items; numbers start at 0 again.

        >>> from raffia.data.storage import TensorStorage
        >>> buffer = ReplayBuffer(storage=TensorStorage(3))
        >>> _ = buffer.extend(torch.arange(5))
        >>> buffer.empty()
        >>> len(buffer)
        0
        """
        with self._lock:
            self._before_change()
            self.storage.clear()
            self.sampler.clear()

    def update_priority(self, index: Tensor | int, priority: Tensor | float) -> int:
        """Change the priorities of items, where the sampler has any: see `PrioritizedSampler`.

        Returns how many were left out, as their items had been overwritten.

        >>> from raffia.data.storage import TensorStorage
        >>> from raffia.data.tensordict_replay import PrioritizedReplayBuffer
        >>> buffer = PrioritizedReplayBuffer(0.6, 0.4, storage=TensorStorage(3))
        >>> numbers = buffer.extend(torch.arange(5))
        >>> buffer.update_priority(numbers, 2.0)
        2
        """
        with self._lock:
            self._before_change()
            self._maker.follow()  # what another process overwrote has no priority any more
            return self.sampler.update_priority(index, priority)

    # -- batches

    @overload
    def sample(
        self,
        batch_size: int | None = None,
        return_info: Literal[False] = False,
        *,
        out: Items | None = None,
    ) -> Items: ...
    @overload
    def sample(
        self, batch_size: int | None = None, *, return_info: Literal[True], out: Items | None = None
    ) -> tuple[Items, dict[Any, Tensor]]: ...
    @overload
    def sample(
        self, batch_size: int | None, return_info: Literal[True], *, out: Items | None = None
    ) -> tuple[Items, dict[Any, Tensor]]: ...

    def sample(
        self, batch_size: int | None = None, return_info: bool = False, *, out: Any = None
    ) -> Items | tuple[Items, dict[Any, Tensor]]:
        """A batch, stacked; with `return_info` a pair of it and a dict, "index" and so on.

        batch_size: if None, that of the buffer, or of `out`.
        out: a batch such as one sampled before, which is filled and given back: no entry of it is
            allocated.
        Raises RuntimeError if the buffer is empty, ValueError without a batch size.

        >>> from raffia.data.storage import TensorStorage
        >>> rng = torch.Generator().manual_seed(0)
        >>> buffer = ReplayBuffer(storage=TensorStorage(9), generator=rng)
        >>> _ = buffer.extend(torch.arange(5) * 10)
        >>> buffer.sample(3, return_info=True)
        (tensor([40, 40, 30]), {'index': tensor([4, 4, 3])})
        >>> buffer.sample(out=torch.empty(2, dtype=torch.int64))
        tensor([ 0, 30])
        """
        room = None if out is None else _length(out)
        if batch_size is None:
            batch_size = self.batch_size or room
        if batch_size is None:
            raise _no_size()
        check_count("batch_size", batch_size, 1)
        if room is not None and room != batch_size:
            raise ValueError(f"out has room for a batch of {room}, but {batch_size} were requested")
        batch = self._next(batch_size, out)
        return (batch.data, batch.info) if return_info else batch.data

    def next(self) -> Items:
        """`sample()`, as TorchRL names it.

        >>> from raffia.data import LazyTensorStorage
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(9), batch_size=2)
        >>> _ = buffer.extend(torch.zeros(3))
        >>> buffer.next()
        tensor([0., 0.])
        """
        return self.sample()

    def __iter__(self) -> Iterator[Items]:
        """Batches of `batch_size`, without end; or to the end of the epoch, if the sampler has any.

        >>> from raffia.data.samplers import SamplerWithoutReplacement
        >>> from raffia.data.storage import TensorStorage
        >>> sampler = SamplerWithoutReplacement(shuffle=False)
        >>> buffer = ReplayBuffer(storage=TensorStorage(9), sampler=sampler, batch_size=2)
        >>> _ = buffer.extend(torch.arange(5))
        >>> list(buffer)
        [tensor([0, 1]), tensor([2, 3]), tensor([4])]
        """
        if self.batch_size is None:
            raise _no_size()
        while True:
            batch = self._next(self.batch_size, None)
            yield batch.data
            if batch.ends_epoch:
                return

    def _next(self, batch_size: int, out: Any) -> Batch:
        if self._ahead is not None:
            batch = self._ahead.next(batch_size)
        elif out is not None and self._maker.plain:
            with self._lock:
                return self._changed(self._maker.draw_into(batch_size, out))
        else:
            with self._lock:
                drawn = self._maker.draw(batch_size)
            batch = self._maker.finish(drawn)
        if out is not None:
            batch = batch._replace(data=_filled(out, batch.data))
        return self._changed(batch)

    def _changed(self, batch: Batch) -> Batch:
        if self.transform is None:
            return batch
        return batch._replace(data=self.transform(batch.data))

    def append_transform(self, transform: Callable[[Any], Any]) -> Self:
        """Call one more function on each batch, after those before; returns the buffer.

        >>> from raffia.data.storage import TensorStorage
        >>> buffer = ReplayBuffer(storage=TensorStorage(9), batch_size=2)
        >>> _ = buffer.append_transform(lambda x: x + 1).append_transform(lambda x: 10 * x)
        >>> _ = buffer.extend(torch.zeros(5))
        >>> buffer.sample()
        tensor([10., 10.])
        """
        _check_callable("transform", transform)
        if self.transform is not None:
            transform = Both(self.transform, transform)
        self.transform = transform
        return self

    def share(self, shared: bool = True) -> Self:
        """Share the buffer with other processes: it can be sent to them as it is.

        They read it while one process writes. Returns the buffer.
        Raises ValueError where the storage is in memory, of which each process would have a copy.

        >>> from raffia.data import LazyMemmapStorage
        >>> buffer = ReplayBuffer(storage=LazyMemmapStorage(9)).share()
        """
        if shared and self.storage.in_memory:
            raise ValueError(
                f"a {type(self.storage).__name__} is in the memory of one process, and other "
                "processes would get a copy. To share a buffer, with one process that writes and "
                "others that read: ReplayBuffer(storage=LazyMemmapStorage(max_size))"
            )
        return self

    # -- state

    @property
    def write_count(self) -> int:
        """How many items were ever added.

        >>> from raffia.data.storage import TensorStorage
        >>> ReplayBuffer(storage=TensorStorage(3)).write_count
        0
        """
        return self.storage.total

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """`save`, as TorchRL names it."""
        self.save(path)

    def dump(self, path: str | os.PathLike[str]) -> None:
        """`save`, by another name of TorchRL's."""
        self.save(path)

    def loads(self, path: str | os.PathLike[str]) -> None:
        """`load`, as TorchRL names it."""
        self.load(path)

    def state_dict(self, *, items: bool = True) -> dict[str, Any]:
        """The items and the state of sampling: nested dicts of tensors and numbers.

        items: False leaves them out, for a storage on disk, which persists by itself. It may be
            extended meanwhile: items that come after the state are new ones when it is loaded.

        >>> from raffia.data.storage import TensorStorage
        >>> buffer, other = (ReplayBuffer(storage=TensorStorage(3)) for _ in range(2))
        >>> _ = buffer.extend(torch.arange(5))
        >>> other.load_state_dict(buffer.state_dict())
        >>> other[:]
        tensor([2, 3, 4])
        """
        with self._lock:
            self._before_change()
            stored = {"storage": self.storage.state_dict()} if items else {}
            return {**stored, **self._sampling_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of `state_dict`: resumes bit for bit, with the generator if it has one.

        The state's sampling counts, also where this buffer was made with another
        alpha or beta. If it is without items, those in the storage that it does not know are new.
        Raises ValueError, and changes nothing, if the state is not of a buffer with such a sampler
        and such a storage, or knows of more items than the storage has.
        """
        with self._lock:
            self._before_change()
            self._load(state)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write all items, and the state of sampling, to a folder.

        Killed at any time, the folder holds the old or the new content.

        >>> import tempfile
        >>> from raffia.data.storage import TensorStorage
        >>> buffer, other = (ReplayBuffer(storage=TensorStorage(3)) for _ in range(2))
        >>> _ = buffer.extend(torch.arange(5))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     buffer.save(folder)
        ...     other.load(folder)
        >>> other[:]
        tensor([2, 3, 4])
        """
        with self._lock:
            self._before_change()
            state = TensorDict(self._sampling_state())
            files: dict[str, Content] = {
                "sampling.safetensors": lambda path: save_file(state, path)
            }
            write_folder(folder, KIND, VERSION, {**self.storage.files(), **files})

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Load a folder of `save`: resumes bit for bit, in this process or another.

        Raises DamagedFileError or ValueError, and changes nothing, if the folder does not hold what
        was saved, or not of such a buffer.
        """
        state = load_folder(folder, KIND, VERSION, self._state_in)
        with self._lock:
            self._before_change()
            self._load(state)

    def _state_in(self, found: Folder) -> dict[str, Any]:
        state = TensorDict.load(found.path("sampling.safetensors")).to_dict()
        return {**state, "storage": self.storage.state_in(found)}

    def _sampling_state(self) -> dict[str, Any]:
        live = self._maker.follow()
        name = type(self.sampler).__name__.encode()
        kind = torch.tensor(list(name), dtype=torch.uint8, device="cpu")
        state: dict[str, Any] = {
            "kind": kind,
            "total": live.stop,
            "sampler": self.sampler.state_dict(),
        }
        if self.generator is not None:
            state["generator"] = self.generator.get_state()
        return state

    def _load(self, state: Mapping[str, Any]) -> None:
        self._refuse_other(state)
        live = self.storage.live
        if "storage" in state:
            found = from_state(state["storage"], self.storage.max_size)
            live = range(max(0, found.total - found.num_rows), found.total)
        if int(state["total"]) > live.stop:
            raise too_few(int(state["total"]), live)
        before = self.sampler.state_dict()
        try:
            self.sampler.load_state_dict(state["sampler"])
            self.sampler.follow(live)
            if "storage" in state:
                self.storage.load_state_dict(state["storage"])
        except BaseException:
            self.sampler.load_state_dict(before)
            raise
        if self.generator is not None:
            self.generator.set_state(state["generator"])

    def _refuse_other(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless the state is from a buffer with the same type of sampler."""
        check_entries(state, ("kind", "total", "sampler"), "a replay buffer")
        saved, here = bytes(state["kind"].tolist()).decode(), type(self.sampler).__name__
        if saved != here:
            raise ValueError(
                f"the saved buffer has a {saved}, but this one has a {here}: load it into one "
                f"that has a {saved}"
            )
        check_same_generator(state, self.generator)


@dataclasses.dataclass(frozen=True)
class Both:
    """Two functions, one after the other.

    >>> Both(abs, float)(-3)
    3.0
    """

    first: Callable[[Any], Any]
    second: Callable[[Any], Any]

    def __call__(self, data: Any) -> Any:
        return self.second(self.first(data))


def _items_at(index: Any, live: range) -> Tensor:
    """The numbers of items by their age; IndexError for an age out of range."""
    if index is None or index is ...:
        raise IndexError(f"items are chosen by an int, a slice, integers or a mask, not by {index}")
    if type(index) is int and -len(live) <= index < len(live):
        return torch.tensor(live[index], device="cpu")
    if isinstance(index, slice):
        found = live[index]
        stop = found.start + len(found) * found.step
        return torch.arange(found.start, stop, found.step, device="cpu")
    mask = torch.as_tensor(index)
    if mask.dtype is torch.bool:
        if mask.shape != (len(live),):
            raise IndexError(
                f"a mask must have one value for each of the {len(live)} items; got shape "
                f"{tuple(mask.shape)}"
            )
        index = mask.nonzero().squeeze(1)
    cpu = torch.device("cpu")
    ages, batch = to_index(index, len(live), cpu)
    age = as_rows(ages, cpu).view(batch)
    wrong = (age < -len(live)) | (age >= len(live))
    if wrong.any():
        raise IndexError(f"there are {len(live)} items, so none at {int(age[wrong][0])}")
    return live.start + age % max(len(live), 1)


def made(part: Any, kind: type) -> Any:
    """A part of a buffer, or what a function that was given instead of it makes.

    >>> made(RandomSampler, Sampler)
    <raffia.data.samplers.RandomSampler object at 0x...>
    """
    return part() if callable(part) and not isinstance(part, kind) else part


def _check_callable(name: str, function: Any) -> None:
    """Raise TypeError for what is given as a function of batches and cannot be called."""
    if function is not None and not callable(function):
        raise TypeError(f"{name} must be a function of a batch; got {function!r}")


def _check_sampler(sampler: Any, storage: Storage) -> None:
    """Raise TypeError or ValueError unless this is a sampler, and one for this storage."""
    if not isinstance(sampler, Sampler):
        raise TypeError(f"sampler must be a Sampler, such as RandomSampler(); got {sampler!r}")
    room, size = sampler.max_capacity, storage.max_size
    if room is not None and (size is None or room < size):
        raise ValueError(
            f"the sampler has max_capacity={room}, but the storage has max_size={size}: make them "
            "equal"
        )
    if sampler.lock is not Sampler.lock:
        raise ValueError("the sampler belongs to another buffer: create a separate one for each")


def _check_writer(writer: Any, sampler: Sampler) -> None:
    """Raise TypeError or ValueError unless this is a writer, and one for this sampler."""
    if not isinstance(writer, Writer):
        raise TypeError(f"writer must be a Writer, such as RoundRobinWriter(); got {writer!r}")
    if writer.chooses and sampler.by_position:
        raise ValueError(
            f"a {type(writer).__name__} moves items, but neither their priorities nor the steps "
            "that follow them would move with them: use it with a sampler without priorities or "
            "slices, such as RandomSampler()"
        )


def _no_size() -> ValueError:
    return ValueError(
        "the number of items to draw is unknown: pass sample(batch_size), or "
        "ReplayBuffer(batch_size=...) for all calls"
    )


def _length(batch: Any) -> int:
    return len(batch) if isinstance(batch, TensorDict) else len(pytree.tree_leaves(batch)[0])


def _filled(out: Any, data: Any) -> Any:
    """`out`, with the content of `data` of the same structure."""
    if isinstance(out, TensorDict):
        return out.update(data, inplace=True)
    for target, value in zip(pytree.tree_leaves(out), pytree.tree_leaves(data), strict=True):
        target.copy_(value)
    return out
