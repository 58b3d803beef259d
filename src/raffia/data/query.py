"""`QueryModule`: the content of some entries becomes an index of rows, which `HashToInt` gives."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raffia.data.hash import SipHash
from raffia.data.processes import Locked
from raffia.data.rows import packed, row_layout
from raffia.data.siphash import siphash
from raffia.data.table import CapacityError, HashTable
from raffia.nn.base import TensorDictModuleBase
from raffia.tensordict.functions import is_tensor_collection
from raffia.tensordict.keys import NestedKey, dotted, raise_missing, unravel_key
from raffia.tensordict.node import Container, Node
from raffia.tensordict.tensordict import TensorDict

Hasher = Callable[[Tensor], Tensor]  # [N, ...] -> int64 [N]
_INTEGERS = frozenset(
    (torch.int8, torch.int16, torch.int32, torch.int64)
    + (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
)


class QueryModule(TensorDictModuleBase):
    """Write the index of each row's content: equal content, equal index, in every process.

    The hashes of the entries (of a row of each) are mixed with the entry's dtype and row shape,
    then aggregated into one, which `hash_to_int` turns into a dense index: 0, 1, 2, ... in order of
    first appearance. Two rows of different content have the same hash with probability 2^-64; with
    `exact=True` even these are distinguished, for the memory of one copy of each distinct row.

    in_keys: what counts as content, in this order; entries [*batch, ...] of any dtype and shape.
    index_key, hash_key: where the index and the hash go, int64 [*batch].
    hash_module: maps an entry [N, ...] to int64 [N]; one for all entries (copied for each if there
        are several), or a list with one for each entry. Default: `SipHash()`.
    hash_to_int: maps hashes to indices, called with `extend=`; several modules may share one.
        Default: `HashToInt()`.
    aggregator: maps the hashes [N, K] of K entries to int64 [N]. Default: the `hash_module`, if
        one was given, else `SipHash()`.
    clone: write into a shallow copy of the container, and leave the container as it is.
    exact: also compare the content of rows whose hashes are equal.

    >>> from raffia.data.query import QueryModule
    >>> query = QueryModule(in_keys=["board", "player"], index_key="index")
    >>> positions = TensorDict(
    ...     board=torch.tensor([[1, 0], [1, 0], [0, 1], [1, 0]]),
    ...     player=torch.tensor([0, 0, 0, 1]),
    ...     batch_size=[4],
    ... )
    >>> query(positions)["index"]
    tensor([0, 0, 1, 2])
    """

    hash_to_int: Any
    aggregator: Any

    def __init__(
        self,
        in_keys: list[NestedKey],
        index_key: NestedKey = "_index",
        hash_key: NestedKey = "_hash",
        *,
        hash_module: Hasher | Sequence[Hasher] | None = None,
        hash_to_int: Callable[..., Tensor] | None = None,
        aggregator: Hasher | None = None,
        clone: bool = False,
        exact: bool = False,
    ) -> None:
        if not in_keys:
            raise ValueError(
                "`in_keys` cannot be empty: name the entries to look up by, such as "
                "QueryModule(in_keys=['obs'])"
            )
        super().__init__()
        self.in_keys = [in_keys] if isinstance(in_keys, (str, tuple)) else in_keys
        self.index_key, self.hash_key = unravel_key(index_key), unravel_key(hash_key)
        self.out_keys = [self.index_key, self.hash_key]
        self._nested = any(isinstance(key, tuple) for key in self.out_keys)
        self._hashers = _one_for_each(hash_module, self.in_keys)
        # registered, so that .to() and state_dict() reach them
        self._hash_modules = nn.ModuleDict(
            {str(i): m for i, m in enumerate(self._hashers) if isinstance(m, nn.Module)}
        )
        if aggregator is not None and len(self.in_keys) == 1:
            warnings.warn(
                "an aggregator combines the hashes of several entries, but there is only one, "
                f"{self.in_keys[0]!r}, so it has no effect: leave aggregator out",
                stacklevel=2,
            )
            aggregator = None
        given = hash_module if callable(hash_module) else None
        self.aggregator = aggregator or given or SipHash()
        self.hash_to_int = HashToInt() if hash_to_int is None else hash_to_int
        if exact and not isinstance(self.hash_to_int, HashToInt):
            raise TypeError(
                "exact=True compares the content of rows, which only HashToInt supports: leave "
                f"hash_to_int out, or pass a HashToInt, not {type(self.hash_to_int).__name__}"
            )
        self.clone = clone
        self.exact = exact

    @property
    def hash_module(self) -> dict[NestedKey, Hasher]:
        """The module that hashes each entry, by its key."""
        return dict(zip(self.in_keys, self._hashers, strict=True))

    @property
    def normalize(self) -> bool:
        """Whether -0.0 counts as 0.0 and all NaNs as one: not if a hash module is set
        otherwise."""
        return all(getattr(hasher, "normalize", True) for hasher in self._hashers)

    def forward(
        self,
        tensordict: Container,
        *,
        extend: bool = True,
        write_hash: bool = True,
        clone: bool | None = None,
    ) -> Container:
        """Write the index of each row, and its hash.

        extend: give new content the next index; otherwise all of it gets the
            number of known contents, which is no one's index.
        write_hash: write the hashes too.
        clone: overrides the constructor's.
        Raises KeyError for a missing entry and TypeError for one that is not a tensor; nothing is
        changed then.

        >>> from raffia.data.query import QueryModule
        >>> query = QueryModule(in_keys=["x"])
        >>> query(TensorDict(x=torch.tensor([5, 7]), batch_size=[2]))["_index"]
        tensor([0, 1])
        >>> query(TensorDict(x=torch.tensor([7, 9]), batch_size=[2]), extend=False)["_index"]
        tensor([1, 2])
        """
        entries = self.entries(tensordict)
        batch = tensordict.batch_size
        hashes = self.combined(entries)
        output: Any = tensordict.copy() if (self.clone if clone is None else clone) else tensordict
        written = {self.hash_key: hashes.reshape(batch)} if write_hash else {}
        if output.is_locked or self._nested:  # refuse before anything is learnt
            trial = output if output.is_locked else output.copy()
            for key in (self.index_key, *written):
                trial.set(key, hashes.reshape(batch))
        content = {"content": packed(entries, normalize=self.normalize)} if self.exact else {}
        written[self.index_key] = self.hash_to_int(hashes, extend=extend, **content).reshape(batch)
        for key in reversed(written):  # the index first
            output.set(key, written[key])
        return output

    def hash(self, tensordict: Node) -> Tensor:
        """The hash of each row's content, int64 [*batch]; nothing is written.

        >>> from raffia.data.query import QueryModule
        >>> query = QueryModule(in_keys=["x"])
        >>> ints = TensorDict(x=torch.zeros(3, 2, dtype=torch.int32), batch_size=[3])
        >>> (query.hash(ints) == query.hash(ints.float())).any()  # the same bytes
        tensor(False)
        """
        return self.combined(self.entries(tensordict)).reshape(tensordict.batch_size)

    def entries(self, tensordict: Node) -> list[Tensor]:
        """The entries of `in_keys` with all batch dimensions in one: [N, ...] each.

        >>> from raffia.data.query import QueryModule
        >>> td = TensorDict(x=torch.zeros(3, 2, 5), batch_size=[3, 2])
        >>> [x.shape for x in QueryModule(in_keys=["x"]).entries(td)]
        [torch.Size([6, 5])]
        """
        if tensordict.__class__ is not TensorDict and not is_tensor_collection(tensordict):
            raise TypeError(
                f"a query must be a container with the entries {self.in_keys}; got a "
                f"{type(tensordict).__name__}: pass TensorDict({{...}}, batch_size=[number of "
                "rows])"
            )
        ndim = len(tensordict.batch_size)
        entries = []
        for key in self._in_keys:
            x = tensordict.get(key, None)
            if x is None:
                raise_missing(key, tensordict)
            if not isinstance(x, Tensor):
                raise TypeError(
                    f'entry "{dotted(key)}" is a {type(x).__name__}, but only tensors can be '
                    "looked up: encode it as a tensor, or leave it out of in_keys"
                )
            entries.append(x if ndim == 1 else x.flatten(0, ndim - 1) if ndim else x[None])
        return entries

    def combined(self, entries: list[Tensor]) -> Tensor:
        """The hash of each row of `entries` [N, ...]: of the entries one by one, then of these.

        >>> from raffia.data.query import QueryModule
        >>> QueryModule(in_keys=["x"]).combined([torch.zeros(4, 2)]).shape
        torch.Size([4])
        """
        num_rows, device = len(entries[0]), entries[0].device
        hashes = torch.empty(num_rows, len(entries), dtype=torch.int64, device=device)
        for hasher, key, x, column in zip(
            self._hashers, self._in_keys, entries, hashes.unbind(1), strict=True
        ):
            if isinstance(hasher, SipHash) and hasher.__class__ is SipHash and hasher.as_tensor:
                siphash(
                    x,
                    key=hasher.key,
                    rounds=hasher.rounds,
                    normalize=hasher.normalize,
                    out=column,
                )
            else:
                column.copy_(_checked(hasher(x), num_rows, hasher, dotted(key)))
            column.bitwise_xor_(row_layout(x, 1).tag)
        if len(entries) == 1:
            return hashes[:, 0]
        joined = self.aggregator(hashes)
        return _checked(joined, num_rows, self.aggregator, "the hashes of all entries")


def _one_for_each(hash_module: Any, in_keys: list[NestedKey]) -> list[Hasher]:
    if hash_module is None:
        return [SipHash() for _ in in_keys]
    if callable(hash_module) and not isinstance(hash_module, nn.ModuleList):
        if len(in_keys) == 1:
            return [hash_module]
        try:
            return [copy.deepcopy(hash_module) for _ in in_keys]
        except Exception as error:
            raise RuntimeError(
                f"failed to deepcopy the hash_module for each of the {len(in_keys)} in_keys; "
                "pass a list with one hash module for each"
            ) from error
    hashers = list(hash_module)
    if len(hashers) != len(in_keys):
        raise ValueError(
            f"hash_module holds {len(hashers)} modules, but there are {len(in_keys)} in_keys "
            f"{in_keys}: pass one module for each key, or a single one for all"
        )
    return hashers


def _checked(hashes: Any, num_rows: int, hasher: Any, what: str) -> Tensor:
    """The output of a hash module, checked to be one integer for each row."""
    name = type(hasher).__name__
    if not isinstance(hashes, Tensor):
        hint = "; pass SipHash(as_tensor=True)" if isinstance(hasher, SipHash) else ""
        raise TypeError(f"{name} returned a {type(hashes).__name__} for {what}, not a tensor{hint}")
    if hashes.dtype.is_floating_point or hashes.dtype.is_complex:
        raise TypeError(
            f"{name} returned {hashes.dtype} for {what}; hashes must be integers, int64 [N]"
        )
    if hashes.shape != (num_rows,):
        raise ValueError(
            f"{name} returned {list(hashes.shape)} hashes for the {num_rows} rows of {what}; it "
            f"must return one integer for each row, [{num_rows}]"
        )
    return hashes.to(torch.int64)


class HashToInt(Locked, nn.Module):
    """A module that maps each new hash to the next index: 0, 1, 2, ... by first appearance.

    The table of the hashes is not a parameter but part of the `state_dict` all the same: one int64
    tensor, the hashes in the order of their indices (and the content, if any, in the columns after
    them). It lies on the CPU, and keys may lie anywhere. Several threads may
    call one module, but none while the process forks. `copy.copy` shares the table,
    `copy.deepcopy` and pickle give a table apart.

    max_size: how many hashes there may be; None for as many as come.

    >>> to_int = HashToInt()
    >>> to_int(torch.tensor([70, -1, 70]), extend=True)
    tensor([0, 1, 0])
    >>> to_int(torch.tensor([[-1, 5], [6, 70]])), len(to_int)  # unknown ones give the length
    (tensor([[1, 2],
            [2, 0]]), 2)
    """

    def __init__(self, *, max_size: int | None = None) -> None:
        super().__init__()
        if max_size is not None and max_size < 0:
            raise ValueError(
                f"max_size={max_size} must be a number of hashes, or None for no limit"
            )
        self.max_size = max_size
        self._table = HashTable()
        self._make_lock()

    def forward(
        self, key: Tensor, extend: bool = False, *, content: Tensor | None = None
    ) -> Tensor:
        """The index of each hash: int64, of the shape and on the device of `key`.

        key: hashes of any shape, of any integer dtype.
        extend: give unknown hashes the next indices; otherwise `len(self)` stands for all of them.
        content: int64 [*key.shape, words], what was hashed, as `rows.packed` gives it; equal hashes
            of different content then get separate indices. Either all calls give content or none
            do: the first call that extends decides, until `clear`.
        Raises CapacityError if there would be more than `max_size`; nothing is added then.

        >>> to_int = HashToInt()
        >>> to_int(torch.tensor([70, 70]), extend=True, content=torch.tensor([[1], [2]]))
        tensor([0, 1])
        """
        hashes = _hashes(key)
        words = None
        if content is not None:
            content = _content(content, key)
            words = content.shape[1]
        with self._lock:
            if words != self._table.words:
                self._change_words(words)
            table = self._table
            if extend:
                index = table.insert(hashes, content, max_size=self.max_size)
            else:
                index = table.lookup(hashes, content, missing=len(table))
        if key.dim() == 1 and index.device == key.device:
            return index
        return index.view(key.shape).to(key.device)

    def __len__(self) -> int:
        return len(self._table)

    def __bool__(self) -> bool:
        return True  # a module is something even when nothing is in it

    def clear(self) -> None:
        """Forget all hashes; indices start at 0 again.

        >>> to_int = HashToInt()
        >>> index = to_int(torch.tensor([70, -1]), extend=True)
        >>> to_int.clear()
        >>> to_int(torch.tensor([-1]), extend=True)
        tensor([0])
        """
        with self._lock:
            self._table = HashTable()

    def extra_repr(self) -> str:
        return f"len={len(self)}, max_size={self.max_size}"

    def get_extra_state(self) -> Tensor:
        """The state in `state_dict`: int64 [len], or [len, 1 + words] if there is content."""
        with self._lock:
            state = self._table.state()
        if "content" not in state:
            return state["hashes"]
        return torch.cat([state["hashes"][:, None], state["content"]], 1)

    def set_extra_state(self, state: Tensor) -> None:
        """Load what `get_extra_state` returned, or raise ValueError and change nothing."""
        if not isinstance(state, Tensor) or state.dtype != torch.int64 or state.dim() not in (1, 2):
            given = (
                f"{state.dtype} {list(state.shape)}" if isinstance(state, Tensor) else repr(state)
            )
            raise ValueError(
                "the state of HashToInt must be int64 of shape [len] or [len, 1 + words]; got "
                f"{given}"
            )
        if self.max_size is not None and len(state) > self.max_size:
            raise CapacityError(
                f"a state of {len(state)} hashes does not fit into max_size={self.max_size}: load "
                f"it into HashToInt(max_size={len(state)}) or larger"
            )
        entries = {"free": state.new_zeros(0)}
        if state.dim() == 1:
            table = HashTable()
            entries["hashes"] = state
        else:
            table = HashTable(words=state.shape[1] - 1)
            entries["hashes"], entries["content"] = state[:, 0], state[:, 1:]
        table.load_state(entries)
        with self._lock:
            self._table = table

    def _change_words(self, words: int | None) -> None:
        """Set how many content words are compared, None for no content; requires an empty table."""
        here = self._table.words
        if len(self._table):
            raise ValueError(
                f"this HashToInt holds {len(self._table)} hashes {_with_content(here)}, but was "
                f"called {_with_content(words)}: use a separate one for each, or call clear() "
                "first"
            )
        self._table = HashTable(words=words)


def _hashes(key: Tensor) -> Tensor:
    if not isinstance(key, Tensor) or key.dtype not in _INTEGERS:
        given = f"a {key.dtype} tensor" if isinstance(key, Tensor) else type(key).__name__
        raise TypeError(
            f"HashToInt accepts a tensor of integers, one hash for each row; got {given}: hash "
            "the rows first, as in HashToInt()(SipHash()(rows), extend=True)"
        )
    hashes = key if key.dtype is torch.int64 else key.to(torch.int64)
    return hashes if hashes.dim() == 1 else hashes.reshape(-1)  # torch takes 1 us to do nothing


def _content(content: Tensor, key: Tensor) -> Tensor:
    if content.dtype != torch.int64 or content.shape[:-1] != key.shape or not content.dim():
        raise ValueError(
            f"content must be int64 of shape [*key.shape, words], here {[*key.shape, 'words']}; "
            f"got {content.dtype} of shape {list(content.shape)}. rows.packed returns such tensors"
        )
    return content.reshape(key.numel(), content.shape[-1])


def _with_content(words: int | None) -> str:
    return "without content" if words is None else f"with content of {words} words"
