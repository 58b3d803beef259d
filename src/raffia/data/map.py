"""`TensorDictMap`: a dictionary from the content of rows to rows, batched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, Self

import torch
from torch import Tensor
from typing_extensions import TypeVar

from raffia.data import map_files
from raffia.data.lru import LRUOrder
from raffia.data.map_values import (
    Merge,
    StorageByKey,
    as_number,
    filled,
    flat,
    in_rounds,
    merged,
    rows_of,
    shaped,
    with_stored,
)
from raffia.data.map_values import TensorMap as TensorMap
from raffia.data.map_values import UnknownRowError as UnknownRowError
from raffia.data.processes import Locked
from raffia.data.query import QueryModule
from raffia.data.row_index import RowGroups, groups
from raffia.data.rows import RowLayout, packed, row_layout, unpacked, words_of
from raffia.data.storage import Storage, TensorStorage
from raffia.data.table import CapacityError, HashTable
from raffia.data.torchrl_storages import ListStorage
from raffia.files.folder import load_folder
from raffia.hints import check_choice
from raffia.nn.base import Keys, TensorDictModuleBase
from raffia.tensordict.collection import TensorCollection
from raffia.tensordict.entries import UNSET
from raffia.tensordict.functions import is_tensor_collection
from raffia.tensordict.keys import NestedKey, dotted, unravel_key_list
from raffia.tensordict.node import Container
from raffia.tensordict.tensordict import TensorDict

WriteFn = Callable[..., Any]  # write(new) for keys without a value, write(new, old) for others


Value = TypeVar("Value", default=TensorDict)  # what is read: `TensorDictMap[Step]`


class TensorDictMap(Locked, TensorDictModuleBase, TensorMap[Any, Value]):
    """A dictionary whose keys are the content of some entries and whose values are other entries.

    All operations take a batch of rows of any batch shape, and none goes row by row. Rows are found
    by their hash and compared by their content, so a collision never gives another row's value;
    dtype and row shape count, -0.0 is 0.0 and NaN is NaN unless the hash module is set otherwise.
    A query is never changed. Safe under threads.

    query_module: selects the entries of the key, and hashes them. Its indices are its own: the map
        keeps its rows itself.
    in_keys: short for `query_module=QueryModule(in_keys)`.
    storage: where the values rest, one storage for all entries or a dictionary of one for each of
        them; empty. Default: in memory, growing. One on disk holds the values only: which keys they
        have is in memory, so what persists is what `save` wrote.
    collate_fn: what becomes of values that were read; called with a container, or with a list of
        one for each row if the storage is a `ListStorage`.
    out_keys: which entries of a written value are stored. Default: all.
    write_fn: `write_fn(new)` gives what is stored for keys without a value, and
        `write_fn(new, old)` for keys that have one; both batched. A key that is repeated in a
        batch goes through it once for each time.
    max_size: how many rows there may be. Default: the storage's.
    evict: "lru" makes room by dropping the rows that were read or written least recently; None
        refuses.

    >>> from raffia.data.map import TensorDictMap
    >>> values = TensorDictMap(in_keys=["obs"])
    >>> obs = TensorDict(obs=torch.tensor([[1, 2], [3, 4], [1, 2]]), batch_size=[3])
    >>> values[obs] = TensorDict(value=torch.tensor([0.5, 0.7, 0.9]), batch_size=[3])
    >>> len(values), values[obs]["value"]  # the last one wins
    (2, tensor([0.9000, 0.7000, 0.9000]))
    >>> values.contains(TensorDict(obs=torch.tensor([[3, 4], [4, 3]]), batch_size=[2]))
    tensor([ True, False])
    """

    def __init__(
        self,
        *,
        query_module: QueryModule | None = None,
        in_keys: list[NestedKey] | None = None,
        storage: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        out_keys: list[NestedKey] | None = None,
        write_fn: WriteFn | None = None,
        max_size: int | None = None,
        evict: Literal["lru"] | None = None,
    ) -> None:
        if (query_module is None) == (in_keys is None):
            raise ValueError(
                "the entries of the key must be named: pass TensorDictMap(in_keys=['obs']), or "
                "query_module=QueryModule(['obs'], ...) to choose how they are hashed"
            )
        check_choice("evict", evict, ("lru", None))
        if evict and max_size is None and getattr(storage, "max_size", None) is None:
            raise ValueError(
                "evict='lru' removes rows when max_size is reached, so it needs max_size=..."
            )
        super().__init__()
        query = QueryModule(in_keys or []) if query_module is None else query_module
        self.query_module = query
        self.in_keys = query.in_keys
        self.storage = _storage(storage, max_size)
        self.max_size = _smaller(max_size, getattr(self.storage, "max_size", None))
        self.collate_fn = collate_fn
        self.write_fn = write_fn
        self.evict = evict
        self._stored_keys = None if out_keys is None else unravel_key_list(out_keys)
        self._keeps_some = out_keys is not None  # of what is written, only these
        self._layouts: list[RowLayout] | None = None  # of the keys, from the first write on
        self._table = HashTable(device=self.device)
        self._lru = LRUOrder(self.device)
        self._make_lock()

    @classmethod
    def from_tensordict_pair(
        cls,
        source: TensorCollection,
        dest: TensorCollection,
        in_keys: list[NestedKey],
        out_keys: list[NestedKey] | None = None,
        max_size: int | None = None,
        storage_constructor: Callable[[], Any] | None = None,
        hash_module: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        write_fn: WriteFn | None = None,
        *,
        evict: Literal["lru"] | None = None,
    ) -> Self:
        """An empty map for keys like `source` and values like `dest`.

        source, dest: examples [*batch]; nothing of them is stored but dtypes and shapes, so that
            `get` knows the entries of a map that is still empty.
        storage_constructor: makes the storage, as `lambda: MemmapStorage(10**6, folder)`.
        hash_module: as in `QueryModule`. Default: the SipHash of the exact bytes, at any width.

        >>> obs = TensorDict(obs=torch.zeros(3, 2), batch_size=[3])
        >>> q_values = TensorDict(q=torch.zeros(3, 4), batch_size=[3])
        >>> q_table = TensorDictMap.from_tensordict_pair(obs, q_values, in_keys=["obs"])
        >>> len(q_table), q_table.get(obs, 0.0)["q"].shape
        (0, torch.Size([3, 4]))
        """
        new = cls(
            query_module=QueryModule(in_keys, hash_module=hash_module),
            storage=None if storage_constructor is None else storage_constructor(),
            collate_fn=collate_fn,
            out_keys=out_keys,
            write_fn=write_fn,
            max_size=max_size,
            evict=evict,
        )
        new._layouts = [row_layout(x, 1) for x in new.query_module.entries(source)]
        new._table = HashTable(words=words_of(new._layouts), device=new.device)
        value = new._value(dest, source.batch_size)
        if write_fn is not None and len(value):
            value = write_fn(value)
        new.storage.allocate(value)
        return new

    # -- what is here

    @property
    def device(self) -> torch.device:
        """The device of the values and of the table of the keys."""
        return torch.device(getattr(self.storage, "device", None) or "cpu")

    @property
    def out_keys(self) -> list[NestedKey]:
        """The keys of the stored entries: from the constructor, or of the first value written.

        Raises AttributeError before that.
        """
        if self._selected is not None:
            return self._selected
        return self.out_keys_source

    @out_keys.setter
    def out_keys(self, keys: Keys) -> None:
        self._stored_keys, self._keeps_some = unravel_key_list(list(keys)), True

    @property
    def out_keys_source(self) -> list[NestedKey]:
        """The keys of the stored entries, whatever is selected."""
        if self._stored_keys is None:
            raise AttributeError(
                "the out_keys of the map are unknown until its first value is written: pass "
                "out_keys=[...], or create it with TensorDictMap.from_tensordict_pair"
            )
        return self._stored_keys

    def __len__(self) -> int:
        return len(self._table)

    def __bool__(self) -> bool:
        return True  # a module is something even when nothing is in it

    def rows(self, query: TensorCollection) -> Tensor:
        """The storage row that holds the value of each queried row, or -1 if it has no value.

        query: container [*batch]
        returns: int64 [*batch]

        >>> values = TensorDictMap(in_keys=["x"])
        >>> xs = TensorDict(x=torch.tensor([5, 6]), batch_size=[2])
        >>> values[xs] = xs
        >>> values.rows(TensorDict(x=torch.tensor([6, 7]), batch_size=[2]))
        tensor([ 1, -1])
        """
        with self._lock:
            return self._rows(query).reshape(query.batch_size)

    def contains(self, query: TensorCollection) -> Tensor:
        """Whether each row is in the map: bool [*batch]. Does not count as a use.

        >>> TensorDictMap(in_keys=["x"]).contains(TensorDict(x=torch.zeros(2, 3), batch_size=[2]))
        tensor([False, False])
        """
        return self.rows(query) >= 0

    # -- reading

    def __getitem__(self, query: TensorCollection) -> Value:
        """The values of the queried rows, container [*batch], a copy.

        Raises UnknownRowError if one is not in the map.
        """
        with self._lock:
            rows = self._rows(query)
            self._refuse_unknown(query, rows)
            values = self._read(rows, query.batch_size)
        return self._collated(values)

    def get(self, query: TensorCollection, default: float | TensorCollection) -> Value:
        """The values of the queried rows, with `default` where a row is not in the map.

        default: a number for all entries, or a container, of the query's batch or of one row ([]).
        Raises UnknownRowError for a number while the map does not know its entries yet.

        >>> counts = TensorDictMap(in_keys=["x"])
        >>> xs = TensorDict(x=torch.tensor([5, 6]), batch_size=[2])
        >>> counts[xs] = TensorDict(n=torch.tensor([1, 2]), batch_size=[2])
        >>> counts.get(TensorDict(x=torch.tensor([6, 7]), batch_size=[2]), 0)["n"]
        tensor([2, 0])
        """
        with self._lock:
            rows = self._rows(query)
            known = rows >= 0
            fill: Any = default
            if not is_tensor_collection(fill):
                fill = as_number(fill)
                if not len(rows) and self.storage.structure is None:
                    fill = TensorDict(batch_size=query.batch_size)  # no entry is known yet
            if bool(known.all()) and len(self):
                values = self._read(rows, query.batch_size)
            else:
                values = self._filled(rows, known, fill, query.batch_size)
        return self._collated(values)

    def _collated(self, values: Any) -> Any:
        if self.collate_fn is None:
            return values
        if not isinstance(self.storage, ListStorage):
            return self.collate_fn(values)
        batch = values.batch_size
        collated = self.collate_fn(list(flat(values, batch).unbind(0)))
        return collated if len(batch) == 1 else collated.reshape(batch)

    def forward(self, tensordict: Container) -> Container:
        """Write the stored entries of each row into the container, as a keyed module does.

        Raises UnknownRowError if a row is not in the map.

        >>> double = TensorDictMap(in_keys=["x"])
        >>> xs = TensorDict(x=torch.tensor([5, 6]), batch_size=[2])
        >>> double[xs] = TensorDict(y=torch.tensor([10, 12]), batch_size=[2])
        >>> double(xs)["y"]
        tensor([10, 12])
        """
        td: Any = tensordict
        return td.update(self[td])

    # -- writing

    def __setitem__(self, query: Any, value: Any) -> None:
        self.update(query, value)

    def update(
        self,
        query: TensorCollection,
        value: Any,
        *,
        merge: str | Merge | None = None,
        accumulate: bool = False,
    ) -> None:
        """Write a value for each row; rows that are there twice are merged in one batched pass.

        query, value: containers of the same batch [*batch]
        merge: "last" (default), "first", "sum" (of integers it wraps around, as torch's do),
            "mean" or "max" of the values for one key, or a
            function `merge(values, group, num_groups)` of the values [N] and the number of the key
            of each (int64 [N], in order of first appearance), which gives [num_groups].
        accumulate: the value that is stored already takes part as the first of them.
        Raises CapacityError when full, and ValueError or KeyError for a value that does not fit
        what is stored. Nothing is changed then.

        >>> counts = TensorDictMap(in_keys=["state"])
        >>> states = TensorDict(state=torch.tensor([3, 1, 3]), batch_size=[3])
        >>> for _ in range(2):
        ...     one = TensorDict(n=torch.ones(3), batch_size=[3])
        ...     counts.update(states, one, merge="sum", accumulate=True)
        >>> counts[states]["n"]
        tensor([4., 2., 4.])
        """
        if accumulate and merge is None:
            raise ValueError("accumulate=True needs a merge, such as merge='sum'")
        if accumulate and self.write_fn is not None:
            raise ValueError(
                "accumulate=True and write_fn would both combine new values with the stored ones; "
                "leave one of them out"
            )
        with self._lock:
            layouts, hashes, content = self._asked(query)
            self._check_layouts(layouts)
            values = self._value(value, query.batch_size)
            if len(self.storage) != len(self):
                raise ValueError(
                    f"the storage holds {len(self.storage)} rows, but this map wrote {len(self)} "
                    "of them, so something else writes to it: give each map its own storage"
                )
            if not len(hashes):
                return
            hashes, content = hashes.to(self.device), content.to(self.device)
            mark, items, rows = self._inserted(hashes, content)
            # A function of the user's may ask this map, where the new rows are not yet.
            own_code = self.write_fn is not None or callable(merge)
            stays = not own_code and (self.max_size is None or len(self) <= self.max_size)
            if not stays:
                self._table.rollback(mark)
            try:
                values = self._merged(values, items, rows, merge, accumulate)
                self.storage.check(values)
                if stays:
                    self._store(items.distinct, values, items.last)
            except BaseException:
                if stays:
                    self._table.rollback(mark)
                raise
            if not stays:
                self._write(hashes, content, items, rows, values)
            self._layouts = layouts

    def _merged(
        self, values: Any, items: RowGroups, rows: Tensor, merge: Any, accumulate: bool
    ) -> Any:
        """The values to store for each group; `rows` [G] is where it is stored, -1 where it is
        new."""
        known = (rows >= 0).nonzero().squeeze(1)
        stored = self.storage.read(rows[known]) if len(known) else None
        if self.write_fn is not None and merge is None:
            return in_rounds(values, items, rows >= 0, stored, self.write_fn)
        if accumulate:
            self.storage.check(values)
            values, items = with_stored(values, items, known, stored)
        values = merged(values, items, "last" if merge is None else merge)
        if self.write_fn is not None:
            once = groups(torch.arange(len(rows), device=rows.device))
            values = in_rounds(values, once, rows >= 0, stored, self.write_fn)
        return values

    def _inserted(
        self, hashes: Tensor, content: Tensor
    ) -> tuple[tuple[int, int, int], RowGroups, Tensor]:
        """Insert the keys, to be rolled back to the mark if something fails.

        returns: the mark; which items have the same key; the row where each key was, -1 where it
            is new: int64 [G]
        """
        if self._layouts is None:  # the first write sets how wide the keys are
            self._table = HashTable(words=content.shape[1], device=self.device)
        mark = self._table.mark()
        row_N, is_new = self._table.insert_new(hashes, content)
        items = groups(row_N)
        return mark, items, items.distinct.masked_fill(is_new[items.first], -1)

    def _store(self, rows: Tensor, values: Any, last: Tensor) -> None:
        """Write into rows; `last` is when each was last used in the batch."""
        self.storage.set(rows, values)
        if self._stored_keys is None:
            self._stored_keys = list(values.keys(True, True))
        if self.evict:
            self._lru.touch(rows[last.argsort()])

    def _write(
        self, hashes: Tensor, content: Tensor, items: RowGroups, rows: Tensor, values: Any
    ) -> None:
        """Store `values` [G], making room where need be."""
        known = rows[rows >= 0]
        used = self._lru.stamps(known) if self.evict else known
        room = self._room(items, rows)
        stored, dropped = (slice(None), rows[:0]) if room is None else room
        first, last = items.first[stored], items.last[stored]
        lost = self._table.hashes_of(dropped), self._table.content_of(dropped)
        self._table.remove(dropped.flip(0))  # the first new row gets the first of them
        mark = self._table.mark()
        rows = self._table.insert(hashes[first], content[first])
        try:
            self._store(rows, values[stored], last)
        except BaseException:  # a full disk: all is as it was
            self._table.rollback(mark)
            self._table.insert(*lost)
            if self.evict:
                self._lru.restore(known, used)
            raise
        unused = dropped[~torch.isin(dropped, rows)]
        if len(unused):
            self.storage.erase(unused)
            self._lru.drop(unused)

    def _room(self, items: RowGroups, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """Groups that are written if not all fit, and the rows dropped for them."""
        if self.max_size is None:
            return None
        num_new = int((rows < 0).sum())
        if len(self) + num_new <= self.max_size:
            return None
        if self.evict is None:
            raise CapacityError(
                f"{num_new} new rows do not fit: the map holds {len(self)}, and max_size is "
                f"{self.max_size}. Raise max_size, delete rows, or create the map with evict='lru'"
            )
        by_use = items.last.argsort()
        known = rows[by_use]
        self._lru.touch(known[known >= 0])
        # Of more keys than have room, the last used.
        stored = by_use[-self.max_size :].sort().values
        too_many = len(self) + int((rows[stored] < 0).sum()) - self.max_size
        return stored, self._lru.oldest(too_many)

    # -- removal

    def delete(self, query: Any, *, missing: Literal["error", "ignore"] = "error") -> int:
        """Delete the queried rows; returns how many existed.

        missing: whether a row that is not in the map is an UnknownRowError (nothing is taken out
            then), or ignored.

        >>> values = TensorDictMap(in_keys=["x"])
        >>> xs = TensorDict(x=torch.tensor([5, 6]), batch_size=[2])
        >>> values[xs] = xs
        >>> values.delete(xs[:1]), len(values)
        (1, 1)
        """
        check_choice("missing", missing, ("error", "ignore"))
        with self._lock:
            rows = self._rows(query)
            if missing == "error":
                self._refuse_unknown(query, rows)
            found = groups(rows[rows >= 0]).distinct
            self._drop(found)
            return len(found)

    def __delitem__(self, query: Any) -> None:
        self.delete(query)

    def pop(self, query: TensorCollection) -> Value:
        """The values of the queried rows, which are taken out of the map.

        >>> values = TensorDictMap(in_keys=["x"])
        >>> xs = TensorDict(x=torch.tensor([5, 6]), batch_size=[2])
        >>> values[xs] = TensorDict(y=torch.tensor([1, 2]), batch_size=[2])
        >>> values.pop(xs)["y"], len(values)
        (tensor([1, 2]), 0)
        """
        with self._lock:
            values = self[query]
            self.delete(query)
            return values

    def clear(self) -> None:
        """Delete all rows; the structure of keys and values stays."""
        with self._lock:
            self.storage.clear()
            self._table.clear()
            self._lru.clear()

    def _drop(self, rows: Tensor) -> None:
        if len(rows):
            self.storage.erase(rows)
            self._table.remove(rows.flip(0))  # the next new row gets the first of them
            if self.evict:
                self._lru.drop(rows)

    # -- everything

    def keys(self) -> TensorDict:
        """The keys of all rows, in the order of `values()`: container [len].

        >>> values = TensorDictMap(in_keys=["x"])
        >>> xs = TensorDict(x=torch.tensor([5, 6, 5]), batch_size=[3])
        >>> values[xs] = xs
        >>> values.keys()["x"]
        tensor([5, 6])
        """
        with self._lock:
            return self._keys_at(self._table.live())

    def values(self) -> TensorCollection:
        """The values of all rows, in the order of `keys()`: container [len]."""
        with self._lock:
            if self.storage.structure is None:  # nothing was ever written
                return TensorDict(batch_size=[0])
            return self.storage.read(self._table.live())

    def items(self) -> tuple[TensorDict, TensorCollection]:
        """`keys()` and `values()` of the same moment.

        >>> values = TensorDictMap(in_keys=["x"])
        >>> xs = TensorDict(x=torch.tensor([5, 6]), batch_size=[2])
        >>> values[xs] = TensorDict(y=torch.tensor([1, 2]), batch_size=[2])
        >>> [(int(key["x"]), int(value["y"])) for key, value in zip(*values.items())]
        [(5, 1), (6, 2)]
        """
        with self._lock:
            return self.keys(), self.values()

    def at(self, rows: Tensor) -> tuple[TensorDict, TensorCollection]:
        """The keys and the values in some rows of the storage, as `rows(query)` gave them.

        rows: int64 [n]
        Raises IndexError if one of them holds nothing.

        >>> values = TensorDictMap(in_keys=["x"])
        >>> xs = TensorDict(x=torch.tensor([5, 6]), batch_size=[2])
        >>> values[xs] = TensorDict(y=torch.tensor([1, 2]), batch_size=[2])
        >>> keys, values = values.at(torch.tensor([1]))
        >>> keys["x"], values["y"]
        (tensor([6]), tensor([2]))
        """
        with self._lock:
            values = self.storage.read(rows)  # raises IndexError first, if a row is empty
            return self._keys_at(rows), values

    def _keys_at(self, rows: Tensor) -> TensorDict:
        keys = TensorDict(batch_size=[len(rows)])
        if self._layouts is not None:
            entries = unpacked(self._table.content_of(rows), self._layouts)
            for key, x in zip(self.in_keys, entries, strict=True):
                keys.set(key, x)
        return keys

    def hashes(self, rows: Tensor) -> Tensor:
        """The hash of the keys in some rows of the storage: int64 [n].

        >>> values = TensorDictMap(in_keys=["x"])
        >>> xs = TensorDict(x=torch.tensor([5, 6]), batch_size=[2])
        >>> values[xs] = xs
        >>> bool((values.hashes(torch.tensor([0, 1])) == values.query_module.hash(xs)).all())
        True
        """
        with self._lock:
            here = torch.as_tensor(self.storage.contains(rows))
            if not bool(here.all()):
                raise IndexError(
                    f"row(s) {rows[~here][:5].tolist()} hold nothing: pass the result of "
                    "rows(query), without the -1 of unknown keys"
                )
            return self._table.hashes_of(rows)

    def __iter__(self) -> Iterator[TensorDict]:
        """The keys one by one, containers []."""
        return iter(self.keys().unbind(0))

    # -- inside

    def _asked(self, query: Any) -> tuple[list[RowLayout], Tensor, Tensor]:
        """Layouts of the keys, their hashes int64 [N] and their content int64 [N, words]."""
        entries = self.query_module.entries(query)
        hashes = self.query_module.combined(entries)
        content = packed(entries, normalize=self.query_module.normalize)
        return [row_layout(x, 1) for x in entries], hashes, content

    def _rows(self, query: Any) -> Tensor:
        """The row number of each queried row, or -1 if it is missing: int64 [N]."""
        layouts, hashes, content = self._asked(query)
        if layouts != self._layouts:  # another dtype or shape: other content, whatever its bytes
            return torch.full_like(hashes, -1, device=self.device)
        return self._table.lookup(hashes, content)

    def _read(self, rows: Tensor, batch: torch.Size) -> Any:
        if not len(rows) and self.storage.structure is None:
            return TensorDict(batch_size=batch)  # whose entries are not known yet
        values = self.storage.read(rows)
        if self.evict:
            self._lru.touch(rows)
        if self._selected is not None:
            values = values.select(*self._selected)
        return values if len(batch) == 1 else shaped(values, batch)

    def _filled(self, rows: Tensor, known: Tensor, default: Any, batch: torch.Size) -> Any:
        """The result of `get` where some rows are unknown."""
        if is_tensor_collection(default):
            if default.batch_size and default.batch_size[: len(batch)] != batch:
                raise ValueError(
                    f"default has batch_size {list(default.batch_size)}, but the query has "
                    f"{list(batch)}: pass one row (batch_size []) or one for each row of the query"
                )
            given = flat(default, batch) if default.batch_size else default.expand(len(rows))
            values = given.clone().to(self.device)
            if self.storage.structure is not None:
                wanted = self.storage.empty(0)
                values = values.select(*wanted.keys(True, True))
                self.storage.check(values)
        else:
            values = filled(self.storage, len(rows), default)
        if self._selected is not None:
            values = values.select(*self._selected)
        found = known.nonzero().squeeze(1)
        if len(found):
            values[found] = self._read(rows[found], torch.Size([len(found)]))
        return shaped(values, batch)

    def _value(self, value: Any, batch: torch.Size) -> Any:
        """The value to write, as a container [N] on the same device as the rows."""
        value = rows_of(value, batch)
        if self._keeps_some and self._stored_keys is not None:
            value = value.select(*self._stored_keys)
        device = self.device
        if any(entry.device != device for entry in value.values(True, True)):
            value = value.to(device)
        return value

    def _check_layouts(self, layouts: list[RowLayout]) -> None:
        """Refuse keys of another dtype or row shape than those of the map."""
        for key, mine, other in zip(self.in_keys, self._layouts or [], layouts, strict=False):
            if mine != other:
                raise ValueError(
                    f'the keys in this map hold {mine} as "{dotted(key)}", but these hold '
                    f"{other}. Rows of different dtype or shape count as different content: "
                    "convert them, for example with "
                    f".to(torch.{str(mine.dtype).removeprefix('torch.')}), or use a second map"
                )

    def _refuse_unknown(self, query: Any, rows: Tensor) -> None:
        """Raise UnknownRowError if some of the rows of a query are -1."""
        unknown = (rows < 0).nonzero().squeeze(1)
        if not len(unknown):
            return
        other = ""
        if self._layouts is not None:
            try:
                self._check_layouts([row_layout(x, 1) for x in self.query_module.entries(query)])
            except ValueError as error:
                other = f". Note: {error}"
        more = ", ..." if len(unknown) > 5 else ""
        raise UnknownRowError(
            f"{len(unknown)} of {len(rows)} rows are not in the map, at {unknown[:5].tolist()}"
            f"{more}. Check with contains(query) first, or pass a value for them: "
            f"get(query, default){other}"
        )

    # -- on disk

    def save(self, folder: Any) -> None:
        """Write the map into a folder, atomically: killed at any time, the old or the new is there.

        >>> import tempfile
        >>> values = TensorDictMap(in_keys=["x"])
        >>> xs = TensorDict(x=torch.tensor([5, 6]), batch_size=[2])
        >>> values[xs] = TensorDict(y=torch.tensor([1, 2]), batch_size=[2])
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     values.save(parent + "/map")
        ...     TensorDictMap.load(parent + "/map")[xs]["y"]
        tensor([1, 2])
        """
        with self._lock:
            map_files.save(self, folder)

    @classmethod
    def load(
        cls,
        folder: Any,
        *,
        query_module: QueryModule | None = None,
        storage: Any = None,
        collate_fn: Callable[[Any], Any] | None = UNSET,
        write_fn: WriteFn | None = UNSET,
    ) -> Self:
        """The map that `save` wrote; later changes of either do not reach the other.

        query_module: needed where the saved one hashed with other modules than SipHash.
        storage: where the values are stored. Default: in memory.
        collate_fn, write_fn: needed where the saved one had them, as functions are not in a folder;
            None loads the map without them.
        Raises DamagedFileError for a file that is not what was written, and ValueError for a folder
        of another kind, or a query module whose hashes differ.
        """
        functions = {"collate_fn": collate_fn, "write_fn": write_fn}
        return load_folder(
            folder,
            map_files.KIND,
            map_files.VERSION,
            lambda found: map_files.loaded(cls, found, query_module, storage, functions),
        )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        with self._lock:
            for name, tensor in map_files.tensors_of(self).items():
                destination[prefix + name] = tensor

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        query = prefix + "query_module."
        of_query = {k.removeprefix(query): v for k, v in state_dict.items() if k.startswith(query)}
        mine = {
            key.removeprefix(prefix): value
            for key, value in state_dict.items()
            if key.startswith(prefix) and not key.startswith(query)
        }
        try:
            # before the rows, whose hashes are checked; torch comes to it later, and checks names
            self.query_module.load_state_dict(of_query, strict=False)
            with self._lock:
                missing_keys += [prefix + name for name in map_files.missing(mine)]
                if not map_files.missing(mine):
                    map_files.fill(self, mine)
        except (ValueError, KeyError) as error:
            error_msgs.append(f"{prefix or 'the map'}: {error}")

    def _copied(self) -> dict[str, Any]:
        if not self.storage.in_memory:
            raise TypeError(
                "a map with values on disk cannot be copied or sent to another process, because "
                "it writes other keys' values into these rows, and the copy would not know. Save "
                "it, map.save(folder), and load the copy: TensorDictMap.load(folder)"
            )
        return super()._copied()

    def _borrowed(self) -> list[Any]:
        return [self.collate_fn, self.write_fn, self.query_module]

    def __repr__(self) -> str:
        limit = "" if self.max_size is None else f" of {self.max_size}"
        stored = "nothing yet" if self._stored_keys is None else self._stored_keys
        return f"{type(self).__name__}({len(self)}{limit} rows, {self.in_keys} -> {stored})"


def _smaller(a: int | None, b: int | None) -> int | None:
    return min((x for x in (a, b) if x is not None), default=None)


def _storage(storage: Any, max_size: int | None) -> Any:
    if storage is None:
        return TensorStorage(max_size)
    if isinstance(storage, dict):
        storage = StorageByKey(storage)
    if not isinstance(storage, (Storage, StorageByKey)):
        raise TypeError(
            "storage must be a TensorStorage, a MemmapStorage, or a dictionary with one for each "
            f"entry; got a {type(storage).__name__}"
        )
    if len(storage):
        raise ValueError(
            f"the storage already holds {len(storage)} rows, whose keys a new map does not know: "
            "pass an empty one, or restore a saved map with TensorDictMap.load(folder, "
            "storage=...)"
        )
    return storage
