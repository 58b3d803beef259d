"""Rows of a segment buffer that are changed where they lie."""

from __future__ import annotations

import torch
from torch import Tensor

from raffia.data.segment_batches import Path
from raffia.data.steps import StepKeys
from raffia.data.storage import Storage, TensorStorage
from raffia.tensordict.keys import unravel_key_to_tuple
from raffia.tensordict.tensordict import TensorDict


class StoredRows:
    """The rows of a storage, which are steps and closing rows.

    >>> from raffia.data.segment_rows import StoredRows
    >>> from raffia.data.steps import StepKeys
    >>> from raffia.data.storage import TensorStorage
    >>> storage = TensorStorage(5)
    >>> no = torch.tensor([False, False])
    >>> steps = TensorDict(obs=torch.ones(2), value=torch.ones(2), truncated=no, batch_size=[2])
    >>> _ = storage.extend(steps)
    >>> rows = StoredRows(storage, StepKeys(("obs",), "terminated", "truncated"))
    >>> rows.close(torch.tensor([1]), torch.tensor([0]))
    >>> storage.get(1)["obs"], storage.get(1)["value"], storage.get(slice(None))["truncated"]
    (tensor(1.), tensor(0.), tensor([True, True]))
    """

    def __init__(self, storage: Storage, keys: StepKeys) -> None:
        self.storage, self.keys = storage, keys

    def close(self, rows: Tensor, before: Tensor) -> None:
        """Make steps closing rows, and the steps before them the last ones of their episodes."""
        if len(rows):
            found = self.storage.read(rows)
            closing = found.clone().zero_().update(found.select(*self.keys.observation))
            self._truncate(rows, closing)
        if len(before):
            self._truncate(before, self.storage.read(before))

    def _truncate(self, rows: Tensor, entries: TensorDict) -> None:
        entries[self.keys.truncated].fill_(True)
        self.storage.set(rows, entries)

    def fitting(self, entries: TensorDict) -> dict[Path, Tensor]:
        """New entries [n, ...] by their paths; KeyError or ValueError if they don't fit."""
        structure = self.storage.structure
        layouts = (
            {} if structure is None else dict(zip(structure.paths, structure.layouts, strict=True))
        )
        values: dict[Path, Tensor] = {}
        for key, value in entries.items(True, True):
            path = unravel_key_to_tuple(key)
            if path not in layouts or path in self.keys.flag_paths:
                others = [path for path in layouts if path not in self.keys.flag_paths]
                why = (
                    "marks where an episode ends"
                    if path in self.keys.flag_paths
                    else "is not stored"
                )
                raise KeyError(f"entry {key!r} {why}; what can be updated: {others}")
            layout = layouts[path]
            if value.dtype is not layout.dtype or value.shape[1:] != layout.shape:
                given = f"{value.dtype} {list(value.shape[1:])}"
                raise ValueError(f"entry {key!r} has rows {given}, and {layout} is stored")
            values[path] = value.detach()
        return values

    def write(self, rows: Tensor, values: dict[Path, Tensor], is_step: Tensor) -> None:
        """Write entries of rows [n]; to closing rows only those that they have."""
        if not isinstance(self.storage, TensorStorage):
            self._write_whole(rows, values, is_step)
            return
        for path, value in values.items():
            if self.keys.is_observation(path):
                self.storage.set_entry(path, rows, value)
            else:
                self.storage.set_entry(path, rows[is_step], value[is_step.to(value.device)])

    def _write_whole(self, rows: Tensor, values: dict[Path, Tensor], is_step: Tensor) -> None:
        """Write entries on disk, where a checksum covers whole rows: all entries in one write."""
        found = self.storage.read(rows)
        everywhere = torch.ones_like(is_step)
        for path, value in values.items():
            entry = found[path]
            where = (everywhere if self.keys.is_observation(path) else is_step).to(entry.device)
            entry[where] = value.to(entry.device)[where]
        self.storage.set(rows, found)
