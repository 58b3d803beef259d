"""The contents of a storage as a dict of tensors and integers, and the check of that dict."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raffia.data.structure import RowStructure


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
        "structure": torch.tensor(list(text), dtype=torch.uint8),
        "rows": found.rows,
        "leaves": dict(zip(names, found.leaves, strict=True)),
        **({"others": others} if others else {}),
    }


def from_state(state: dict[str, Any], max_size: int | None) -> StorageContents:
    """The contents in a state, of a storage of this max_size; ValueError if they are not."""
    missing = [name for name in ("max_size", "total", "structure", "rows") if name not in state]
    if missing:
        raise ValueError(f"the state is not of a storage: it has no {', '.join(missing)}")
    size, total, rows = int(state["max_size"]), int(state["total"]), state["rows"]
    if size != (-1 if max_size is None else max_size):
        raise ValueError(
            f"the state is of a storage with max_size={None if size < 0 else size}, this one has "
            f"max_size={max_size}: make one of that size, and load it there"
        )
    if total < 0 or rows.dtype is not torch.int64 or rows.dim() != 1:
        raise ValueError("the state is damaged: its rows or its total are none")
    high = int(rows[-1]) + 1 if len(rows) else 0
    if len(rows) and (int(rows[0]) < 0 or 0 <= size < high or bool((rows.diff() <= 0).any())):
        raise ValueError("the state is damaged: its rows are no rows of such a storage")
    text = bytes(state["structure"].tolist())
    if not text:
        if len(rows):
            raise ValueError("the state is damaged: it has rows, and no structure")
        return StorageContents(max_size, total, None, rows, [])
    structure = RowStructure.from_json(json.loads(text))
    leaves = list(state.get("leaves", {}).values())
    found = [(leaf.dtype, tuple(leaf.shape)) for leaf in leaves]
    if found != [(x.dtype, (len(rows), *x.shape)) for x in structure.layouts]:
        raise ValueError(f"the state is damaged: {len(rows)} rows of {structure} are {found}")
    others = [from_state(other, max_size) for other in state.get("others", {}).values()]
    every = torch.cat([rows, *[other.rows for other in others]])
    if len(every.unique()) < len(every) or any(other.others for other in others):
        raise ValueError("the state is damaged: a row is there more than once")
    return StorageContents(max_size, total, structure, rows, leaves, others)


def numbers_of(rows: Tensor, total: int, max_size: int | None) -> Tensor:  # int64 [n]
    """The items that lie in rows of a ring after `total` were appended; -2 for other rows.

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
