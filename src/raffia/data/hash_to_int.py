"""`HashToInt`: from hashes to the dense numbers 0, 1, 2, ... in order of first appearance."""

from __future__ import annotations

import copy
import threading
from typing import Any, Self

import torch
from torch import Tensor, nn

from raffia.data.processes import survives_fork
from raffia.data.table import CapacityError, HashTable

_INTEGERS = frozenset(
    (torch.int8, torch.int16, torch.int32, torch.int64)
    + (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
)


class HashToInt(nn.Module):
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
        self._lock = threading.Lock()
        survives_fork(self)

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

    def __copy__(self) -> Self:
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)  # with the lock: the table is shared, so it is as well
        return twin

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            state = {**self.__dict__, "_table": copy.copy(self._table)}
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._lock = threading.Lock()
        survives_fork(self)


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
