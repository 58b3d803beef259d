"""`StorageByKey`: one storage for each entry of the values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from raffia.tensordict.keys import NestedKey, dotted, unravel_key
from raffia.tensordict.tensordict import TensorDict


class StorageByKey:
    """Rows whose entries rest in different storages, each of tensors: for example on disk and in
    memory.

    storages: entry -> storage; the entries of what is written must be these.

    >>> from raffia.data.storage import TensorStorage
    >>> from raffia.data.storage_by_key import StorageByKey
    >>> rows = StorageByKey({"x": TensorStorage(9), "y": TensorStorage(7)})
    >>> data = TensorDict(x=torch.zeros(2), y=torch.ones(2, 3), batch_size=[2])
    >>> rows.set(torch.tensor([2, 0]), data)
    >>> rows.read(torch.tensor([0]))["y"], rows.max_size
    (tensor([[1., 1., 1.]]), 7)
    """

    def __init__(self, storages: Mapping[NestedKey, Any]) -> None:
        if not storages:
            raise ValueError("no storage: pass {'value': TensorStorage(), ...}, one for each entry")
        self._storages = {unravel_key(key): storage for key, storage in storages.items()}
        devices = {torch.device(storage.device) for storage in self._storages.values()}
        if len(devices) > 1:
            raise ValueError(f"the storages lie on {sorted(map(str, devices))}: choose one device")
        self.device = devices.pop()
        limits = [s.max_size for s in self._storages.values() if s.max_size is not None]
        self.max_size: int | None = min(limits, default=None)

    def __len__(self) -> int:
        return min(len(storage) for storage in self._storages.values())

    @property
    def structure(self) -> dict[NestedKey, Any] | None:
        """What the entries of a row look like; None before the first write."""
        found = {key: storage.structure for key, storage in self._storages.items()}
        return None if None in found.values() else found

    def allocate(self, data: Any) -> None:
        """Learn the shape of rows from examples [n], and store nothing."""
        for storage, x in self._matched(data):
            storage.allocate(x)

    def check(self, data: Any) -> None:
        """Raise what `set` would for such rows."""
        for storage, x in self._matched(data):
            storage.check(x)

    def set(self, rows: Tensor, data: Any) -> None:
        """Write rows, all or none."""
        self.check(data)
        self._change(rows, [(s, partial(s.set, rows, x)) for s, x in self._matched(data)])

    def _change(self, rows: Tensor, changes: Sequence[tuple[Any, Callable[[], None]]]) -> None:
        """Change these rows of each storage; where one fails, those before it are as they were."""
        *others, (_, last) = changes
        done: list[tuple[Any, Tensor, Any]] = []
        try:
            for storage, change in others:
                there = rows[storage.contains(rows)]
                before = storage.read(there) if len(there) else None
                change()
                done.append((storage, there, before))
            last()
        except BaseException:
            for storage, there, before in done:
                storage.erase(rows)
                if before is not None:
                    storage.set(there, before)
            raise

    def read(self, rows: Any) -> TensorDict:
        """Read rows, as copies."""
        entries = {key: storage.read(rows) for key, storage in self._storages.items()}
        return TensorDict({}, batch_size=rows.shape).update(_nested(entries))

    def empty(self, count: int) -> TensorDict:
        """Rows of the stored shapes, with nothing in them yet."""
        entries = {key: storage.empty(count) for key, storage in self._storages.items()}
        return TensorDict({}, batch_size=[count]).update(_nested(entries))

    def contains(self, rows: Any) -> Tensor:
        """Whether rows hold something."""
        return torch.stack([s.contains(rows) for s in self._storages.values()]).all(0)

    def erase(self, rows: Tensor) -> None:
        """Rows hold nothing any more, or all are as they were."""
        self._change(rows, [(s, partial(s.erase, rows)) for s in self._storages.values()])

    def clear(self) -> None:
        """No row holds anything any more."""
        for storage in self._storages.values():
            storage.clear()

    def _matched(self, data: Any) -> list[tuple[Any, Tensor]]:
        here, there = set(self._storages), set(data.keys(True, True))
        if here != there:
            raise KeyError(
                f"the values have the entries {sorted(map(dotted, there))}, and there are storages "
                f"for {sorted(map(dotted, here))}: pass one storage for each, or out_keys"
            )
        return [(storage, data[key]) for key, storage in self._storages.items()]


def _nested(entries: dict[Any, Any]) -> TensorDict:
    td = TensorDict({}, batch_size=[])
    for key, value in entries.items():
        td.set(key, value)
    return td
