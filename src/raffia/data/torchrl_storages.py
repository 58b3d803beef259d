"""Storages by the names and signatures of TorchRL.

`LazyTensorStorage` and `LazyMemmapStorage` are thin faces of `TensorStorage` and `MemmapStorage`;
the items of a `ListStorage` may differ in shape. Options of TorchRL's that mean something else here
are taken at their defaults, and refused else.
"""

import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raffia.data.items import rows_of, tensors_of
from raffia.data.memmap_files import HEADER
from raffia.data.memmap_storage import MemmapStorage
from raffia.data.row_index import Index, as_rows, to_index
from raffia.data.storage import TensorStorage, targets
from raffia.data.structure import RowStructure, StorageContents
from raffia.files import TemporaryFolder
from raffia.tensordict.lazy import LazyStackedTensorDict, lazy_stack
from raffia.tensordict.node import Node


class LazyTensorStorage(TensorStorage):
    """`TensorStorage` as TorchRL names it: rows in memory, allocated at the first write.

    max_size: the number of rows.
    device: where the rows are.

    >>> from raffia.data import LazyTensorStorage, ReplayBuffer
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    >>> _ = buffer.extend(torch.arange(6))
    >>> len(buffer)
    6
    """

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        compilable: bool = False,
        consolidated: bool = False,
        shared_init: bool = False,
    ) -> None:
        refuse_others(
            ndim=ndim, compilable=compilable, consolidated=consolidated, shared_init=shared_init
        )
        super().__init__(max_size, device=device)


class LazyMemmapStorage(MemmapStorage):
    """`MemmapStorage` as TorchRL names it: rows on disk, allocated at the first write.

    max_size: the number of rows.
    scratch_dir: the folder; None: a temporary one, which is removed with the storage.
    existsok: whether to continue with rows that are there already. False refuses them.

    >>> from raffia.data import LazyMemmapStorage, ReplayBuffer
    >>> buffer = ReplayBuffer(storage=LazyMemmapStorage(100), batch_size=4)
    >>> _ = buffer.extend(torch.arange(6))
    >>> len(buffer)
    6
    """

    def __init__(
        self,
        max_size: int,
        scratch_dir: str | os.PathLike[str] | None = None,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        existsok: bool = False,
        compilable: bool = False,
        shared_init: bool = False,
        mode: str = "r+",
    ) -> None:
        refuse_others(ndim=ndim, compilable=compilable, shared_init=shared_init)
        if torch.device(device).type != "cpu":
            raise ValueError(
                f"rows on disk are read on the CPU, not on {device}: to move batches there, pass "
                f"ReplayBuffer(device={str(device)!r})"
            )
        found = scratch_dir is not None and os.path.lexists(os.path.join(scratch_dir, HEADER))
        if found and not existsok and mode == "r+":
            raise FileExistsError(
                f"{scratch_dir} already holds a storage: to continue it, pass existsok=True"
            )
        if scratch_dir is None:
            self._folder = scratch_dir = TemporaryFolder()  # removed with this
        super().__init__(max_size, scratch_dir, mode=mode)


class Row(NamedTuple):
    """One item: its structure, and a separate tensor for each entry."""

    structure: RowStructure
    leaves: list[Tensor]


class ListStorage(TensorStorage):
    """A storage that grows with its items, up to `max_size`, and returns several as a list.

    Items have the same entries, of the same dtypes; their shapes may differ. As long as they do
    not, rows lie side by side as in a `TensorStorage`. A buffer's batch of containers is stacked,
    lazily where shapes differ; other items of different shapes need a `collate_fn`, which gets the
    list.

    max_size: the number of rows there may be; None: as many as memory holds.
    device: where the rows are; the CPU if None.

    >>> from raffia.data import ListStorage
    >>> storage = ListStorage()
    >>> storage.extend([torch.zeros(3), torch.ones(2)])
    tensor([0, 1])
    >>> storage.get([0, 1])
    [tensor([0., 0., 0.]), tensor([1., 1.])]
    """

    mixes_shapes = True
    _apart: dict[int, Row] | None = None  # the rows, once their shapes differ
    _kinds: dict[str, RowStructure]  # the structures of these, each once
    _incoming: RowStructure | None = None  # of the rows that are written next

    def __init__(
        self,
        max_size: int | None = None,
        *,
        compilable: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        refuse_others(compilable=compilable)
        super().__init__(max_size, device="cpu" if device is None else device)
        self._kinds = {}

    # -- reading

    def get(self, rows: Any, out: Any = None) -> Any:
        """A copy of rows: one item for an int, else a list of items.

        Raises IndexError if one of the rows holds nothing.

        >>> from raffia.data import ListStorage
        >>> storage = ListStorage(5)
        >>> _ = storage.extend([{"obs": torch.zeros(2)}, {"obs": torch.ones(1)}])
        >>> storage.get(1), len(storage.get(slice(None)))
        ({'obs': tensor([1.])}, 2)
        """
        if out is not None:
            return self.read(rows, out)
        found, batch = self._found(rows)
        items = [row.structure.build(row.leaves, torch.Size(), self._device) for row in found]
        return _nested(items, batch) if batch is not None else items[0]

    def read(self, rows: Any, out: Any = None) -> Any:
        """A batch of rows: stacked, lazily where containers have different shapes.

        Raises ValueError for rows of different shapes that are not containers.
        """
        if self._apart is None:
            return super().read(rows, out)
        found, size = self._found(rows)
        if not found:
            return self.empty(0)
        batch, structure = torch.Size() if size is None else size, found[0].structure
        if all([row.structure is structure for row in found]):
            columns = [
                torch.stack(leaves) for leaves in zip(*[r.leaves for r in found], strict=True)
            ]
            columns = [column.view(batch + column.shape[1:]) for column in columns]
            if out is None:
                return structure.build(columns, batch, self._device)
            for target, column in zip(targets(out, structure, batch), columns, strict=True):
                target.copy_(column)
            return out
        if out is not None:
            raise ValueError("out= needs rows of the same shape, but these differ: leave it out")
        items = [row.structure.build(row.leaves, torch.Size(), self._device) for row in found]
        if not isinstance(items[0], Node):
            raise ValueError(
                "items of different shapes cannot form one tensor: pass "
                "ReplayBuffer(collate_fn=...), which receives a list of them, or call "
                "storage.get(rows) for that list"
            )
        return lazy_stack(items) if len(batch) == 1 else lazy_stack(items).reshape(*batch)

    def _found(self, rows: Any) -> tuple[list[Row], torch.Size | None]:
        """Copies of rows one by one, and their shape; None of one row."""
        structure = self.settled_structure()
        index, batch = to_index(rows, self._occupied.high, self._device)
        self._check_occupied(index)
        size = None if isinstance(index, int) else batch
        if self._apart is not None:
            apart = [self._apart[row] for row in as_rows(index, self._device).tolist()]
            return [
                Row(row.structure, [leaf.clone() for leaf in row.leaves]) for row in apart
            ], size
        columns = self._read(as_rows(index, self._device), torch.Size([batch.numel()]))
        cells = zip(*[column.unbind(0) for column in columns], strict=True)
        return [Row(structure, list(leaves)) for leaves in cells], size

    def _column(self, i: int, rows: Tensor) -> Tensor:
        assert self._apart is not None
        try:
            return torch.stack([self._apart[row].leaves[i] for row in rows.tolist()])
        except RuntimeError as error:
            name = self.settled_structure().names[i]
            raise ValueError(
                f"entry {name!r} has a different shape from row to row: {error}"
            ) from None

    def _read_entry(self, i: int, rows: Tensor) -> Tensor:
        return super()._read_entry(i, rows) if self._apart is None else self._column(i, rows)

    def _contents(self) -> StorageContents:
        if self._apart is None:
            return super()._contents()
        groups = []
        for structure in self._kinds.values():
            mine = [n for n in self.rows().tolist() if self._apart[n].structure is structure]
            rows = torch.tensor(mine, dtype=torch.int64, device="cpu")
            leaves = [self._column(i, rows) for i in range(len(structure.paths))] if mine else []
            groups.append(StorageContents(self._max_size, self.total, structure, rows, leaves))
        groups = [group for group in groups if len(group.rows)]
        return groups[0]._replace(others=groups[1:]) if groups else self._nothing()

    def _nothing(self) -> StorageContents:
        structure, none = self.settled_structure(), torch.empty(0, dtype=torch.int64, device="cpu")
        leaves = [
            torch.empty((0, *x.shape), dtype=x.dtype, device="cpu") for x in structure.layouts
        ]
        return StorageContents(self._max_size, self.total, structure, none, leaves)

    # -- writing

    def extend(self, data: Any) -> Tensor:
        try:
            return super().extend(data)
        except (ValueError, TypeError):
            items = _one_by_one(data)
            if items is None:
                raise
        numbers = [self._append_one(*row) for row in self._taken_one_by_one(items)]
        return torch.tensor(numbers, device="cpu")

    def check(self, data: Any) -> None:
        try:
            super().check(data)
        except (ValueError, TypeError):
            items = _one_by_one(data)
            if items is None:
                raise
            self._taken_one_by_one(items)

    def _taken_one_by_one(self, data: Sequence[Any]) -> list[Row]:
        """The items of a list, all checked; the first of all settles what the others look like."""
        settled, found = self._structure, []
        try:
            for i, item in enumerate(data):
                try:
                    structure, leaves, _ = self._taken(item, 0)
                except (ValueError, TypeError) as error:
                    raise type(error)(f"in item {i} of the list, {error}") from None
                found.append(Row(structure, leaves))
                self._structure = self._structure or structure
        finally:
            self._structure = settled
        return found

    def _taken(self, data: Any, batch_dims: int) -> tuple[RowStructure, list[Tensor], torch.Size]:
        try:
            return super()._taken(data, batch_dims)
        except ValueError:
            settled = self._structure
            if settled is None:
                raise
            if not isinstance(data, (Node, Tensor)):
                one = batch_dims == 0
                data = tensors_of(data, numbers=one) if batch_dims != 1 else rows_of(data, None)
            own = RowStructure.of(data, batch_dims)
            if own.paths != settled.paths or _dtypes(own) != _dtypes(settled):
                raise
            return own, *own.leaves(data, batch_dims)

    def _ready(self, structure: RowStructure, size: int) -> None:
        settled = self._structure
        if self._apart is None and settled is not None and settled != structure:
            rows = self.rows()
            columns = self._read(rows, rows.shape)
            cells = zip(*[column.unbind(0) for column in columns], strict=True)
            kind = self._kind(settled)
            apart = [Row(kind, [leaf.clone() for leaf in cell]) for cell in cells]
            self._apart = dict(zip(rows.tolist(), apart, strict=True))
            self._leaves = []
        if self._apart is None:
            super()._ready(structure, size)
        else:
            self._incoming = self._kind(structure)

    def _kind(self, structure: RowStructure) -> RowStructure:
        """Key of a structure: one object for all equal structures."""
        return self._kinds.setdefault(json.dumps(structure.to_json()), structure)

    def _write(self, rows: Index, leaves: list[Tensor], number: int | Tensor | None) -> None:
        if self._apart is None:
            super()._write(rows, leaves, number)
            return
        assert self._incoming is not None
        structure = self._incoming
        if isinstance(rows, int):
            self._apart[rows] = Row(
                structure, [leaf.to(self._device, copy=True) for leaf in leaves]
            )
            return
        for i, row in enumerate(as_rows(rows, self._device).tolist()):
            cells = [leaf[i].to(self._device, copy=True) for leaf in leaves]
            self._apart[row] = Row(structure, cells)

    def _write_entry(self, i: int, rows: Tensor, values: Tensor) -> None:
        if self._apart is None:
            super()._write_entry(i, rows, values)
            return
        for row, value in zip(rows.tolist(), values.unbind(0), strict=True):
            self._apart[row].leaves[i] = value.to(self._device, copy=True)

    def _forget(self, rows: Tensor | None) -> None:
        if rows is None:
            if self._apart is not None:  # rows lie side by side again
                self._allocate(self.settled_structure(), self._max_size or 1)
            self._apart, self._kinds = None, {}
        elif self._apart is not None:
            for row in rows.tolist():
                del self._apart[row]

    def _replace(self, new: StorageContents) -> None:
        super()._replace(new)
        for other in new.others:
            assert other.structure is not None
            self._ready(other.structure, 1)
            self._write(other.rows, list(other.leaves), None)
            self._occupied.add(other.rows)


def _dtypes(structure: RowStructure) -> list[torch.dtype]:
    return [layout.dtype for layout in structure.layouts]


def _one_by_one(data: Any) -> list[Any] | None:
    """The separate items of a list or of a lazy stack; None for other data."""
    if isinstance(data, LazyStackedTensorDict) and data.stack_dim == 0:
        return list(data.unbind(0))
    return data if type(data) is list and data else None


def _nested(items: list[Any], batch: Sequence[int]) -> list[Any]:
    """Items in row-major order as nested lists."""
    for n in reversed(batch[1:]):
        items = [items[at : at + n] for at in range(0, len(items), n)] if n else []
    return items


def refuse_others(**options: Any) -> None:
    """Raise ValueError for options of TorchRL's that are not at their defaults.

    >>> refuse_others(ndim=2)
    Traceback (most recent call last):
    ...
    ValueError: ndim=2 is not supported: items are counted along one dimension. ...
    """
    single_writer = (
        "only one process writes. Others can read with MemmapStorage.open(folder, mode='r')"
    )
    why = {
        "ndim": "items are counted along one dimension. Pass data.reshape(-1)",
        "dim_extend": "items are counted along the first dimension. Pass data.transpose(0, dim)",
        "compilable": (
            "buffers are not traced by torch.compile. Compile the code that uses the batches"
        ),
        "consolidated": "each entry has a separate tensor",
        "shared_init": single_writer,
        "shared": single_writer,
        "sync": "priorities are always up to date. Leave it out",
        "dtype": "priorities are stored in float64. Leave it out",
        "track_generations": "the numbers of items are not used again. Leave it out",
        "compile": "samplers are not traced by torch.compile. Leave it out",
        "use_gpu": "items are drawn on the CPU. Leave it out",
        "span": "a slice ends with its episode. SegmentReplayBuffer has masks for shorter ones",
        "pad_output": "SegmentReplayBuffer pads, with masks. strict_length=False leaves it shorter",
    }
    defaults = {"ndim": 1, "dim_extend": 0, "sync": True, "dtype": torch.float32}
    for name, value in options.items():
        if value != defaults.get(name, False):
            raise ValueError(f"{name}={value!r} is not supported: {why[name]}")
