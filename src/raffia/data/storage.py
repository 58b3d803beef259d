"""Rows of any nested structure of tensors: `Storage`, the contract, and `TensorStorage` in memory.

Rows are read and written by their number (`get`, `set`, `erase`), or appended to a ring (`extend`,
`add`), where item number n lies in row n % max_size until item n + max_size overwrites it.
"""

import operator
import os
from abc import ABC, abstractmethod
from typing import Any, overload

import torch
from torch import Tensor

from raffia.data.items import rows_of, tensors_of
from raffia.data.processes import by_value, from_value
from raffia.data.row_index import Index, OccupiedRows, as_rows, bounds, carried, selected, to_index
from raffia.data.structure import RowStructure, StorageContents, from_state, numbers_of, to_state
from raffia.files.folder import Content, Folder, load_folder, write_folder
from raffia.hints import check_count
from raffia.tensordict.node import Node
from raffia.tensordict.safetensors_file import save_file
from raffia.tensordict.tensordict import TensorDict

KIND, VERSION = "raffia.storage", 1
FILE = "storage.safetensors"


class Storage(ABC):
    """Rows of nested tensors, whose structure is fixed by the first write.

    What a storage in memory and one on disk have in common; a subclass allocates tensors and writes
    into rows of them.

    >>> from raffia.data.storage import Storage, TensorStorage
    >>> isinstance(TensorStorage(5), Storage)
    True
    """

    in_memory = True  # of this process alone, so that a copy has rows apart
    mixes_shapes = False  # whether rows may be of different shapes
    _skips = True  # whether items that `extend` would overwrite itself need not be written

    def __init__(self, max_size: int | None, device: torch.device | str = "cpu") -> None:
        if isinstance(max_size, (Node, Tensor)):
            raise ValueError(
                "max_size must be a number of rows, not the rows: to store these, storage = "
                f"{type(self).__name__}({len(max_size) if max_size.ndim else 1}); "
                "storage.extend(rows)"
            )
        if max_size is not None:
            check_count("max_size", max_size, 1)
            max_size = operator.index(max_size)
        self._max_size = max_size
        self._device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        self._total = 0
        self._structure: RowStructure | None = None
        self._leaves: list[Tensor] = []  # [capacity, ...] each
        self._occupied = OccupiedRows(self._device)

    # -- what a subclass provides

    @abstractmethod
    def _allocate(self, structure: RowStructure, size: int) -> None:
        """Make room for rows 0..size-1 and keep the stored rows.

        Called before the first write, and then only if max_size is None.
        """

    @abstractmethod
    def _write(self, rows: Index, leaves: list[Tensor], number: int | Tensor | None) -> None:
        """Write into rows; an int stands for one row, and leaves without a dimension for rows.

        number: those of appended items, or that of the first; None if the rows are set.
        """

    @abstractmethod
    def _forget(self, rows: Tensor | None) -> None:
        """Mark rows, or all, as empty."""

    # -- public

    @property
    def max_size(self) -> int | None:
        """How many rows there can be; None if that is not limited."""
        return self._max_size

    @property
    def total(self) -> int:
        """How many items were ever appended, by `extend` and `add`, since the last `clear`."""
        return self._total

    @property
    def live(self) -> range:
        """The numbers of the items that are here, where rows were appended only."""
        total = self.total
        # Another process may have added items in between, which are not counted in the total.
        return range(max(0, total - len(self._occupied)), total)

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self._device

    @property
    def structure(self) -> RowStructure | None:
        """The structure of a row; None before the first write."""
        return self._structure

    def __len__(self) -> int:
        """How many rows hold something."""
        return len(self._occupied)

    def __bool__(self) -> bool:
        """True, of an empty storage too: `storage or TensorStorage()` must not discard it.

        >>> from raffia.data.storage import TensorStorage
        >>> bool(TensorStorage(5)), len(TensorStorage(5)) > 0
        (True, False)
        """
        return True

    def __repr__(self) -> str:
        rows = self._structure or "nothing written yet"
        return f"{type(self).__name__}({len(self)} of {self._max_size} rows: {rows})"

    def rows(self) -> Tensor:
        """The rows that hold something, ascending.

        >>> from raffia.data.storage import TensorStorage
        >>> storage = TensorStorage(5)
        >>> _ = storage.extend(torch.arange(4))
        >>> storage.erase(2)
        >>> storage.rows()
        tensor([0, 1, 3])
        """
        return self._occupied.rows()

    def extend(self, data: Any) -> Tensor:  # int64 [n]
        """Append items, whose first dimension counts them; returns their numbers.

        A list is of items without that dimension, which are stacked. Arrays of numpy are taken too.
        Numbers count up for ever. Item n lies in row n % max_size, so the oldest is overwritten
        when all rows hold something. Of more than max_size items the last ones stay.

        >>> from raffia.data.storage import TensorStorage
        >>> storage = TensorStorage(3)
        >>> storage.extend({"obs": torch.tensor([10, 11, 12, 13])})
        tensor([0, 1, 2, 3])
        >>> storage.get(slice(None)), storage.total
        ({'obs': tensor([13, 11, 12])}, 4)
        >>> storage.extend([{"obs": torch.tensor(14)}, {"obs": torch.tensor(15)}])
        tensor([4, 5])
        """
        structure, leaves, _ = self._taken(data, 1)
        return self.append(structure, leaves)

    def append(self, structure: RowStructure, leaves: list[Tensor]) -> Tensor:
        """`extend` by tensors [n, ...] that are known to be of this structure, in its order."""
        n = len(leaves[0])
        first, size = self._total, self._max_size
        if n:
            self._ready(structure, first + n)
            at = 0 if size is None or not self._skips else max(0, n - size)
            while at < n:
                row = first + at if size is None else (first + at) % size
                stop = n if size is None else min(n, at + size - row)
                part = leaves if stop - at == n else [leaf[at:stop] for leaf in leaves]
                self._write(slice(row, row + stop - at), part, first + at)
                self._occupied.add_range(row, row + stop - at)
                at = stop
            self._total = first + n
        return torch.arange(first, first + n, device="cpu")

    def add(self, item: Any) -> int:
        """Append one item, without a dimension that counts; returns its number.

        >>> from raffia.data.storage import TensorStorage
        >>> storage = TensorStorage(3)
        >>> storage.add((torch.tensor([1., 2.]), torch.tensor(True)))
        0
        """
        structure, leaves, _ = self._taken(item, 0)
        return self._append_one(structure, leaves)

    def _append_one(self, structure: RowStructure, leaves: list[Tensor]) -> int:
        number = self._total
        self._ready(structure, number + 1)
        row = number if self._max_size is None else number % self._max_size
        self._write(row, leaves, number)
        self._occupied.add_range(row, row + 1)
        self._total = number + 1
        return number

    def set(self, rows: Any, data: Any) -> None:
        """Write into rows.

        rows: an int, for one row without a dimension that counts; a slice; or integers [*batch].
        data: of batch [*batch]. Of a row that occurs several times, the last one counts.

        >>> from raffia.data.storage import TensorStorage
        >>> storage = TensorStorage(5)
        >>> storage.set(torch.tensor([4, 1]), torch.tensor([[1., 1.], [2., 2.]]))
        >>> storage.get(1), len(storage)
        (tensor([2., 2.]), 2)
        """
        limit = self._max_size
        index, batch = to_index(rows, self._stop_of(rows) if limit is None else limit, self._device)
        structure, leaves, given = self._taken(data, len(batch))
        if given != batch:
            raise ValueError(f"there are rows {list(batch)} to write, but data for {list(given)}")
        if 0 in batch:
            return
        low, high = bounds(index)
        if low < 0 or (limit is not None and high >= limit):
            raise self._out_of_range(low if low < 0 else high)
        self._ready(structure, high + 1)
        if len(batch) > 1:
            leaves = [leaf.flatten(0, len(batch) - 1) for leaf in leaves]
        self._write(index, leaves, None)
        if isinstance(index, Tensor):
            self._occupied.add(index)
        else:
            self._occupied.add_range(low, high + 1)

    def get(self, rows: Any, out: Any = None) -> Any:
        """A copy of rows, in the structure that was written.

        rows: an int, for one row without a dimension that counts; a slice of the rows up to the
            last that holds something; or integers [*batch], which become the batch of the result.
        out: such a container of this batch, which is filled and given back; nothing is allocated.
        Raises IndexError if one of the rows holds nothing.

        >>> from raffia.data.storage import TensorStorage
        >>> storage = TensorStorage(5)
        >>> _ = storage.extend(TensorDict(obs=torch.arange(6).view(3, 2), batch_size=[3]))
        >>> storage.get(torch.tensor([2, 0]))["obs"]
        tensor([[4, 5],
                [0, 1]])
        >>> storage.get(1)["obs"]
        tensor([2, 3])
        """
        structure = self.settled_structure()
        index, batch = to_index(rows, self._occupied.high, self._device)
        self._check_occupied(index)
        if out is not None:
            self._copy(index, batch, targets(out, structure, batch))
            return out
        return structure.build(self._read(index, batch), batch, self._device)

    def read(self, rows: Any, out: Any = None) -> Any:
        """Return rows as a batch, even if a subclass's `get` returns them in another form."""
        return Storage.get(self, rows, out)

    def entry(self, path: tuple[Any, ...], rows: Tensor) -> Tensor:
        """One entry of rows int64 [n], a copy [n, ...].

        >>> from raffia.data.storage import TensorStorage
        >>> storage = TensorStorage(5)
        >>> _ = storage.extend({"obs": torch.arange(4), "done": torch.zeros(4)})
        >>> storage.entry(("obs",), torch.tensor([2, 0]))
        tensor([2, 0])
        """
        structure = self.settled_structure()
        self._check_occupied(rows)
        return self._read_entry(structure.paths.index(path), rows)

    def _read_entry(self, i: int, rows: Tensor) -> Tensor:
        return selected(self._leaves[i], rows)

    def set_entry(self, path: tuple[Any, ...], rows: Tensor, values: Tensor) -> None:
        """Write one entry of rows int64 [n] that hold something, and leave the others.

        values: [n, ...], of the entry's dtype and row shape. Of a row that occurs several
            times, the last one counts.

        >>> from raffia.data.storage import TensorStorage
        >>> storage = TensorStorage(5)
        >>> _ = storage.extend({"obs": torch.arange(3), "value": torch.zeros(3)})
        >>> storage.set_entry(("value",), torch.tensor([2]), torch.tensor([0.5]))
        >>> storage.get(slice(None))["value"]
        tensor([0.0000, 0.0000, 0.5000])
        """
        structure = self.settled_structure()
        self._check_occupied(rows)
        i = structure.paths.index(path)
        layout = structure.layouts[i]
        if values.dtype is not layout.dtype or values.shape != (len(rows), *layout.shape):
            raise ValueError(
                f"entry {path!r} has rows {layout}, but the values are {values.dtype} "
                f"{list(values.shape)} for {len(rows)} rows"
            )
        if len(rows):
            self._write_entry(i, rows.to(self._device), values.detach())

    def _write_entry(self, i: int, rows: Tensor, values: Tensor) -> None:
        leaves = self._read(rows, rows.shape)
        leaves[i] = values
        self._write(rows, leaves, None)

    def __getitem__(self, rows: Any) -> Any:
        """Return the given rows, as `get` does."""
        return self.get(rows)

    def __setitem__(self, rows: Any, data: Any) -> None:
        """Write the given rows, as `set` does."""
        self.set(rows, data)

    def __contains__(self, row: object) -> bool:
        """Whether a row, or every one of several rows, holds something."""
        return bool(torch.as_tensor(self.contains(row)).all())

    @overload
    def contains(self, rows: int) -> bool: ...
    @overload
    def contains(self, rows: Tensor) -> Tensor: ...
    @overload
    def contains(self, rows: Any) -> bool | Tensor: ...

    def contains(self, rows: Any) -> bool | Tensor:
        """Whether rows hold something: a bool for an int, else a bool tensor [*batch].

        A row out of range, such as -1, holds nothing.

        >>> from raffia.data.storage import TensorStorage
        >>> storage = TensorStorage(5)
        >>> _ = storage.extend(torch.arange(2))
        >>> storage.contains(torch.tensor([0, 2, -1])), storage.contains(1)
        (tensor([ True, False, False]), True)
        """
        index, batch = to_index(rows, self._max_size or self._stop_of(rows), self._device)
        if isinstance(index, int):
            return bool(self._occupied.contains(torch.tensor(index, device=self._device)))
        return self._occupied.contains(as_rows(index, self._device)).view(batch)

    def holds_items(self, items: Tensor) -> bool:
        """Whether rows still hold these items, and no later ones that another process wrote.

        items: int64 [n], numbers of items that were there before.

        >>> from raffia.data.storage import TensorStorage
        >>> storage = TensorStorage(5)
        >>> storage.holds_items(storage.extend(torch.arange(4)))
        True
        """
        return True  # nobody else writes here

    def erase(self, rows: Any) -> None:
        """Make rows hold nothing; those that hold nothing already do not matter.

        >>> from raffia.data.storage import TensorStorage
        >>> storage = TensorStorage(5)
        >>> _ = storage.extend(torch.arange(4))
        >>> storage.erase(torch.tensor([1, 2]))
        >>> len(storage)
        2
        """
        index, _ = to_index(rows, self._occupied.high, self._device)
        found = as_rows(index, self._device)
        found = found[self._occupied.contains(found)]
        if len(found):
            self._forget(found)
            self._occupied.remove(found)

    def clear(self) -> None:
        """Make all rows hold nothing, and numbers start at 0; the structure of rows stays.

        >>> from raffia.data.storage import TensorStorage
        >>> storage = TensorStorage(5)
        >>> _ = storage.extend(torch.arange(4))
        >>> storage.clear()
        >>> len(storage), storage.total
        (0, 0)
        """
        self._forget(None)
        self._occupied.clear()
        self._total = 0

    def check(self, data: Any) -> None:
        """Raise what `extend(data)` would, ValueError or TypeError, and write nothing.

        >>> from raffia.data.storage import TensorStorage
        >>> storage = TensorStorage(5)
        >>> _ = storage.extend(torch.arange(4))
        >>> storage.check(torch.zeros(2))
        Traceback (most recent call last):
        ...
        ValueError: the data has rows float32[], but int64[] is stored: ...
        """
        self._taken(data, 1)

    def allocate(self, data: Any) -> None:
        """Fix the structure of rows from examples; nothing is written.

        >>> from raffia.data.storage import TensorStorage
        >>> storage = TensorStorage(5)
        >>> storage.allocate({"obs": torch.zeros(1, 3)})
        >>> len(storage), str(storage.structure)
        (0, 'obs float32[3]')
        """
        structure, _, _ = self._taken(data, 1)
        self._ready(structure, 1)

    def empty(self, count: int) -> Any:
        """`count` new rows of the stored structure, with nothing in them yet, as `get(out=)` takes.

        Raises IndexError before the first write.
        """
        structure = self.settled_structure()
        leaves = [
            torch.empty((count, *layout.shape), dtype=layout.dtype, device=self._device)
            for layout in structure.layouts
        ]
        return structure.build(leaves, torch.Size([count]), self._device)

    # -- reading

    def settled_structure(self) -> RowStructure:
        """The structure of a row; raises IndexError before the first write."""
        if self._structure is None:
            raise IndexError("nothing is stored yet: call storage.extend(data) first")
        return self._structure

    def ensure_whole(self, rows: Index) -> None:
        """Raise DamagedFileError if one of these rows is not as it was written, on disk."""
        return None  # in memory nothing is damaged

    def _read(self, index: Index, batch: torch.Size) -> list[Tensor]:
        if not isinstance(index, Tensor):
            return [leaf[index].clone() for leaf in self._leaves]
        found = [selected(leaf, index) for leaf in self._leaves]
        if len(batch) == 1:
            return found
        return [rows.view(batch + rows.shape[1:]) for rows in found]

    def _copy(self, index: Index, batch: torch.Size, targets: list[Tensor]) -> None:
        """Copy rows into tensors [*batch, ...]."""
        for leaf, target in zip(self._leaves, targets, strict=True):
            flat = len(batch) == 1 and target.device == leaf.device and target.is_contiguous()
            if isinstance(index, Tensor) and flat:
                torch.index_select(carried(leaf), 0, index, out=carried(target))
            elif isinstance(index, Tensor):
                target.copy_(selected(leaf, index).view(target.shape))
            else:
                target.copy_(leaf[index])

    def _check_occupied(self, index: Index) -> None:
        """Raise IndexError unless all of these rows hold something."""
        occupied = self._occupied
        if isinstance(index, Tensor) and not len(index):
            return
        low, high = bounds(index)
        if occupied.gapless and 0 <= low and high < occupied.high:
            return
        wanted = as_rows(index, self._device)
        empty = wanted[~occupied.contains(wanted)]
        if len(empty):
            raise self._no_such_rows(empty)

    def _no_such_rows(self, rows: Tensor) -> IndexError:
        first, limit = int(rows[0]), self._max_size
        if first < 0 or (limit is not None and first >= limit):
            return self._out_of_range(first)
        listed = rows[:5].tolist()
        more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
        return IndexError(
            f"row(s) {', '.join(map(str, listed))}{more} hold nothing: they were never written, or "
            f"were erased. {len(self)} row(s) are occupied; storage.contains(rows) tells which"
        )

    def _out_of_range(self, row: int) -> IndexError:
        size = self._max_size
        if size is None:
            return IndexError(f"row {row} is out of range: rows are counted from 0")
        return IndexError(
            f"row {row} is out of range: with max_size={size} the rows are 0 to {size - 1}. "
            f"An item's row is its number % {size}"
        )

    # -- writing

    def _taken(self, data: Any, batch_dims: int) -> tuple[RowStructure, list[Tensor], torch.Size]:
        """The tensors of data that is to be written, all checked."""
        if not isinstance(data, (Node, Tensor)):
            if batch_dims == 1:
                data = rows_of(data, self._structure)
            else:
                data = tensors_of(data, numbers=batch_dims == 0)
        structure = self._structure or RowStructure.of(data, batch_dims)
        return structure, *structure.leaves(data, batch_dims)

    def _ready(self, structure: RowStructure, size: int) -> None:
        """Allocate rows 0..size-1 if they do not exist yet; a failure changes nothing."""
        if self._max_size is None:
            have = len(self._leaves[0]) if self._leaves else 0
            if size > have:
                self._allocate(structure, max(size, 2 * have, 16))
        elif not self._leaves:
            self._allocate(structure, self._max_size)
        self._structure = structure

    def _stop_of(self, rows: Any) -> int:
        """The end of a slice without an end, in a storage without a limit."""
        return max(self._occupied.high, (rows.stop or 0) if isinstance(rows, slice) else 0)

    # -- state

    def __getstate__(self) -> dict[str, Any]:
        """The stored contents, by value: a pickled storage is a copy."""
        return by_value({"device": self._device, "contents": self._contents()})

    def __setstate__(self, state: dict[str, Any]) -> None:
        contents = from_value(state)["contents"]
        Storage.__init__(self, contents.max_size, state["device"])
        self._replace(contents)

    def state_dict(self) -> dict[str, Any]:
        """The complete contents of the storage: a dict of tensors (copies) and integers.

        It is that of the rows that hold something, not of the room for others.

        >>> from raffia.data.storage import TensorStorage
        >>> storage, other = TensorStorage(3), TensorStorage(3)
        >>> _ = storage.extend(torch.arange(4))
        >>> other.load_state_dict(storage.state_dict())
        >>> other.get(slice(None)), other.total
        (tensor([3, 1, 2]), 4)
        """
        found = self._contents()
        return to_state(found._replace(leaves=[leaf.clone() for leaf in found.leaves]))

    def _contents(self) -> StorageContents:
        """The stored contents, with views of the rows if they have no gaps."""
        rows = self.rows()
        if self._occupied.gapless:
            self.ensure_whole(rows)
            leaves = [leaf[: len(rows)] for leaf in self._leaves]
        else:
            leaves = self._read(rows, rows.shape)
        return StorageContents(self._max_size, self.total, self._structure, rows, leaves)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace all by what `state_dict` gave, of a storage of the same max_size.

        Raises ValueError, and changes nothing, if the state is not of such a storage.
        """
        new = from_state(state, self._max_size)
        if new.others and not self.mixes_shapes:
            raise ValueError(
                f"the state has rows of different shapes, which a {type(self).__name__} cannot "
                "hold: load it into a ListStorage"
            )
        self._replace(new)

    def _replace(self, new: StorageContents) -> None:
        """Hold these rows, and no others."""
        self.clear()
        self._unsettle()
        rows = new.rows.to(self._device)
        if new.structure is not None:
            self._ready(new.structure, int(rows[-1]) + 1 if len(rows) else 1)
            if len(rows):
                numbers = numbers_of(rows, new.total, self._max_size)
                self._write(rows, list(new.leaves), numbers)
                self._occupied.add(rows)
        self._total = new.total

    def _unsettle(self) -> None:
        """Allow the next write to set the row structure, where possible."""
        self._structure, self._leaves = None, []

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write all that is stored to a folder; killed at any time, it holds the old or the new.

        >>> import tempfile
        >>> from raffia.data.storage import TensorStorage
        >>> storage, other = TensorStorage(3), TensorStorage(3)
        >>> _ = storage.extend(torch.arange(4))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     storage.save(folder)
        ...     other.load(folder)
        >>> other.get(slice(None))
        tensor([3, 1, 2])
        """
        write_folder(folder, KIND, VERSION, self.files())

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Replace all by what `save` wrote.

        Raises DamagedFileError, and changes nothing, if it is not as it was saved.
        """
        self.load_state_dict(load_folder(folder, KIND, VERSION, self.state_in))

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """`save`, as TorchRL names it."""
        self.save(path)

    def loads(self, path: str | os.PathLike[str]) -> None:
        """`load`, as TorchRL names it."""
        self.load(path)

    def files(self) -> dict[str, Content]:
        """The files that hold the storage, for a `write_folder` that holds other things too."""
        return {FILE: lambda path: save_file(TensorDict(to_state(self._contents())), path)}

    def state_in(self, folder: Folder) -> dict[str, Any]:
        """The state in the files that `files` writes, for `load_state_dict`."""
        return TensorDict.load(folder.path(FILE)).to_dict()


class TensorStorage(Storage):
    """Rows in memory, of any nested structure: TensorDict, tensorclass, tensor, or pytree of these.

    max_size: the number of rows, for which room is made at the first write: the system gives the
        memory when it is first touched. None lets it grow, by doubling.
    device: where the rows are; data from elsewhere is moved there.

    What is written first settles the structure: keys, dtypes and shapes of later writes are the
    same, or are refused. What is read has this structure, and is always a copy.

    >>> from raffia.data.storage import TensorStorage
    >>> storage = TensorStorage(max_size=1000)
    >>> step = TensorDict(obs=torch.zeros(4, 3), next=dict(reward=torch.ones(4)), batch_size=[4])
    >>> storage.extend(step)
    tensor([0, 1, 2, 3])
    >>> storage.get(torch.tensor([3, 3, 0]))["next", "reward"]
    tensor([1., 1., 1.])
    >>> storage.extend(step.select("obs"))
    Traceback (most recent call last):
    ...
    ValueError: entry 'next' is missing: every write must have the entries of the first one, ...
    """

    def __init__(self, max_size: int | None = None, *, device: torch.device | str = "cpu") -> None:
        super().__init__(max_size, device)

    def _allocate(self, structure: RowStructure, size: int) -> None:
        leaves = []
        with torch.inference_mode(False):  # else they could only be written in this mode
            for layout in structure.layouts:
                try:
                    shape = (size, *layout.shape)
                    leaves.append(torch.empty(shape, dtype=layout.dtype, device=self._device))
                except RuntimeError as error:
                    raise MemoryError(
                        f"there is not enough memory for {size} rows of {structure.nbytes} bytes: "
                        f"{size * structure.nbytes / 2**30:.1f} GiB. Use a smaller max_size, or "
                        "MemmapStorage(max_size, folder), which stores rows on disk"
                    ) from error
        high = self._occupied.high
        for old, new in zip(self._leaves, leaves, strict=bool(self._leaves)):
            new[:high].copy_(old[:high])
        self._leaves = leaves

    def _write(self, rows: Index, leaves: list[Tensor], number: int | Tensor | None) -> None:
        if not isinstance(rows, Tensor):
            for leaf, source in zip(self._leaves, leaves, strict=True):
                leaf[rows].copy_(source)
            return
        for i, source in enumerate(leaves):
            self._write_entry(i, rows, source)

    def _write_entry(self, i: int, rows: Tensor, values: Tensor) -> None:
        target = carried(self._leaves[i])
        target.index_copy_(0, rows, values.to(target.device).view(target.dtype))

    def _forget(self, rows: Tensor | None) -> None:
        pass  # what is stored is known in memory alone


def targets(out: Any, structure: RowStructure, batch: torch.Size) -> list[Tensor]:
    """The tensors [*batch, ...] of a container that rows are read into; ValueError for another."""
    found, given = structure.leaves(out, len(batch))
    if given != batch:
        raise ValueError(f"out has the batch size {list(given)}, but the rows have {list(batch)}")
    return found
