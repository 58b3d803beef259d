"""The structure of a storage's rows, and its contents as a dict of tensors and integers.

`RowStructure`: the pytree around the tensors of a row, their dtypes and shapes.
`StorageContents`: what rests in a storage; `to_state` and `from_state` write and check it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raffia.data.pytree_specs import (
    Json,
    PytreeSpec,
    StructureMismatch,
    entry,
    spec_from_json,
    spec_of,
)
from raffia.data.rows import RowLayout, row_layout
from raffia.tensordict.node import Node


class RowStructure:
    """The pytree of a row, and dtype and shape of its tensors.

    >>> from raffia.data.structure import RowStructure
    >>> rows = RowStructure.of({"obs": torch.zeros(5, 3), "done": torch.zeros(5, dtype=torch.bool)})
    >>> rows.names, [str(layout) for layout in rows.layouts]
    (['obs', 'done'], ['float32[3]', 'bool[]'])
    """

    def __init__(self, spec: PytreeSpec, layouts: Sequence[RowLayout]) -> None:
        self.spec, self.layouts = spec, tuple(layouts)
        self.paths = tuple(spec.paths())
        if not self.paths:
            raise ValueError("the data contains no tensor, so there is nothing to store")
        if len(self.paths) != len(self.layouts):
            raise ValueError(f"{len(self.paths)} tensors have {len(self.layouts)} layouts")
        self._expected = [(layout.dtype, layout.shape) for layout in self.layouts]
        self._inner = spec.kind != "container" and _has_container(spec)

    @classmethod
    def of(cls, data: Any, batch_dims: int = 1) -> "RowStructure":
        """The structure of rows of `data`, whose first `batch_dims` dimensions count rows."""
        try:
            spec = spec_of(data, batch_dims)
            leaves: list[Tensor] = []
            spec.take(data, leaves)
        except StructureMismatch as mismatch:
            raise mismatch.public() from None
        paths = tuple(spec.paths())
        for path, leaf in zip(paths, leaves, strict=True):
            if leaf.dim() < batch_dims:
                raise _too_flat(path, leaf)
        return cls(spec, [row_layout(leaf, batch_dims) for leaf in leaves])

    @property
    def names(self) -> list[str]:
        """A name for each tensor: its keys with dots between them."""
        return [".".join(map(str, path)) or "data" for path in self.paths]

    @property
    def nbytes(self) -> int:
        """Bytes in a row."""
        return sum(layout.nbytes for layout in self.layouts)

    def leaves(self, data: Any, batch_dims: int = 1) -> tuple[list[Tensor], torch.Size]:
        """The tensors of `data`, and the shape [*batch] of its rows, all checked.

        Raises ValueError or TypeError, which names the entry, if rows of `data` are other rows.
        """
        leaves: list[Tensor] = []
        try:
            self.spec.take(data, leaves)
        except StructureMismatch as mismatch:
            raise mismatch.public() from None
        batch = _batch(data, leaves[0], batch_dims)
        if self._inner:
            _check_inner(self.spec, data, batch)
        for i, (dtype, shape) in enumerate(self._expected):
            leaf = leaves[i]
            if leaf.dtype is not dtype or leaf.shape != batch + shape or leaf.is_meta:
                raise self._mismatches(i, leaf, batch)
            if leaf.requires_grad:
                leaves[i] = leaf.detach()
        return leaves, batch

    def _mismatches(self, i: int, leaf: Tensor, batch: torch.Size) -> ValueError:
        path, stored = self.paths[i], self.layouts[i]
        if leaf.layout is not torch.strided or leaf.is_meta:
            return ValueError(f"{entry(path)} is {leaf.layout} on {leaf.device}: it has no rows")
        if leaf.dim() < len(batch):
            return _too_flat(path, leaf)
        if leaf.shape[: len(batch)] != batch:
            return ValueError(
                f"{entry(path)} has the shape {list(leaf.shape)}, which does not begin with "
                f"{list(batch)} like the other entries"
            )
        found = row_layout(leaf, len(batch))
        cast = f": convert it, with .to({stored.dtype})" if found.shape == stored.shape else ""
        return ValueError(f"{entry(path)} has rows {found}, but {stored} is stored{cast}")

    def build(self, leaves: Sequence[Tensor], batch: torch.Size, device: torch.device) -> Any:
        """The pytree over tensors [*batch, ...]."""
        return self.spec.build(iter(leaves).__next__, batch, device)

    def to_json(self) -> Json:
        """The structure as JSON can hold it."""
        return {
            "nest": self.spec.to_json(),
            "layouts": [layout.to_json() for layout in self.layouts],
        }

    @classmethod
    def from_json(cls, record: Any) -> "RowStructure":
        """The structure that `to_json` wrote; ValueError for another record."""
        try:
            layouts = [RowLayout.from_json(layout) for layout in record["layouts"]]
            found = cls(spec_from_json(record["nest"]), layouts)
            leaves = [
                torch.empty((0, *layout.shape), dtype=layout.dtype, device="cpu")
                for layout in layouts
            ]
            found.build(leaves, torch.Size([0]), torch.device("cpu"))
            return found
        except Exception as error:  # a record may come from elsewhere
            raise ValueError(f"the record of the rows cannot be read: {error!r}") from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowStructure) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        """One line: the entries and their layouts."""
        pairs = zip(self.names, self.layouts, strict=True)
        return ", ".join([f"{name} {layout}" for name, layout in pairs])


def _batch(data: Any, first: Tensor, batch_dims: int) -> torch.Size:
    """The shape of the rows: the first dimensions, of the batch size where there is one."""
    shape = data._batch_size if isinstance(data, Node) else first.shape
    if len(shape) < batch_dims:
        what = "a batch size" if isinstance(data, Node) else "a first tensor of the shape"
        raise ValueError(
            f"the data has {what} {list(shape)}, but its first {batch_dims} dimension(s) must "
            "count rows; to store a single item, call storage.add(item)"
        )
    return shape[:batch_dims]


def _has_container(spec: PytreeSpec) -> bool:
    return spec.kind == "container" or any(map(_has_container, spec.parts.values()))


def _check_inner(
    spec: PytreeSpec, data: Any, batch: torch.Size, path: tuple[Any, ...] = ()
) -> None:
    """Raise ValueError for a container in dicts and sequences whose batch size is of no rows.

    Else its rows would be counted by a dimension of its tensors that means something else.
    """
    if spec.kind == "container":
        if data._batch_size[: len(batch)] != batch:
            raise ValueError(
                f"{entry(path)} has the batch size {list(data._batch_size)}, which does not begin "
                f"with {list(batch)}, the rows of the data. To store items without a dimension "
                "that counts them, pass a list of items"
            )
    elif spec.parts:
        for name, value in spec.entries(data).items():
            _check_inner(spec.parts[name], value, batch, (*path, name))


def _too_flat(path: tuple[Any, ...], leaf: Tensor) -> ValueError:
    return ValueError(
        f"{entry(path)} has the shape {list(leaf.shape)}, without a dimension that counts rows; "
        "to store a single item, call storage.add(item)"
    )


class StorageContents(NamedTuple):
    """The contents of a storage: rows, their numbers and their structure."""

    max_size: int | None
    total: int  # items ever appended
    structure: RowStructure | None  # None before the first write
    rows: Tensor  # int64 [n]: those that hold something, ascending
    leaves: Sequence[Tensor]  # [n, ...] each
    others: Sequence["StorageContents"] = ()  # rows of other shapes, of a `ListStorage`

    @property
    def num_rows(self) -> int:
        """How many rows there are, of any shape."""
        return len(self.rows) + sum(other.num_rows for other in self.others)


def to_state(found: StorageContents) -> dict[str, Any]:
    """The state of a storage: tensors and integers only, so that it can go into any file."""
    text: bytes = b""
    names: list[str] = []
    if found.structure is not None:
        text = json.dumps(found.structure.to_json()).encode()
        names = [f"{i}.{name}" for i, name in enumerate(found.structure.names)]
    others = {str(i): to_state(other) for i, other in enumerate(found.others)}
    return {
        "max_size": -1 if found.max_size is None else found.max_size,
        "total": found.total,
        "structure": torch.tensor(list(text), dtype=torch.uint8, device="cpu"),
        "rows": found.rows,
        "leaves": dict(zip(names, found.leaves, strict=True)),
        **({"others": others} if others else {}),
    }


def check_entries(state: Mapping[str, Any], names: Iterable[str], what: str) -> None:
    """Raise ValueError if a state lacks one of these entries.

    >>> check_entries({"storage": 1}, ("buffer", "storage"), "a segment buffer")
    Traceback (most recent call last):
    ...
    ValueError: the state does not belong to a segment buffer: it has no buffer, only storage: ...
    """
    missing = [name for name in names if name not in state]
    if missing:
        found = ", ".join(map(str, state.keys())) or "nothing"
        raise ValueError(
            f"the state does not belong to {what}: it has no {', '.join(missing)}, only {found}: "
            "pass the result of state_dict(). Nothing was changed"
        )


def from_state(state: dict[str, Any], max_size: int | None) -> StorageContents:
    """The contents in a state, of a storage of this max_size; ValueError if they are not."""
    check_entries(state, ("max_size", "total", "structure", "rows"), "a storage")
    size, total, rows = int(state["max_size"]), int(state["total"]), state["rows"]
    if size != (-1 if max_size is None else max_size):
        raise ValueError(
            f"the state belongs to a storage with max_size={None if size < 0 else size}, but this "
            f"one has max_size={max_size}: load it into a storage of that size"
        )
    if total < 0 or rows.dtype is not torch.int64 or rows.dim() != 1:
        raise ValueError("the state is damaged: its rows or its total are missing")
    high = int(rows[-1]) + 1 if len(rows) else 0
    if len(rows) and (int(rows[0]) < 0 or 0 <= size < high or bool((rows.diff() <= 0).any())):
        raise ValueError("the state is damaged: its rows are out of range")
    text = bytes(state["structure"].tolist())
    if not text:
        if len(rows):
            raise ValueError("the state is damaged: it has rows but no structure")
        return StorageContents(max_size, total, None, rows, [])
    structure = RowStructure.from_json(json.loads(text))
    leaves = list(state.get("leaves", {}).values())
    found = [(leaf.dtype, tuple(leaf.shape)) for leaf in leaves]
    if found != [(x.dtype, (len(rows), *x.shape)) for x in structure.layouts]:
        raise ValueError(f"the state is damaged: {len(rows)} rows of {structure} are {found}")
    others = [from_state(other, max_size) for other in state.get("others", {}).values()]
    every = torch.cat([rows, *[other.rows for other in others]])
    if len(every.unique()) < len(every) or any(other.others for other in others):
        raise ValueError("the state is damaged: it contains a row more than once")
    return StorageContents(max_size, total, structure, rows, leaves, others)


def numbers_of(rows: Tensor, total: int, max_size: int | None) -> Tensor:  # int64 [n]
    """The numbers of the items in rows of a ring after `total` were appended; -2 for other rows.

    >>> numbers_of(torch.tensor([0, 1, 2]), total=4, max_size=3)
    tensor([3, 1, 2])
    >>> numbers_of(torch.tensor([0, 2]), total=1, max_size=3)
    tensor([ 0, -2])
    """
    if max_size is None:
        latest = rows
    else:
        latest = rows + (total - 1 - rows).div(max_size, rounding_mode="floor") * max_size
    return latest.masked_fill((rows >= total) | (latest < 0), -2)
