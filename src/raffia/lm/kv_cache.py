"""The key-value cache of a language model, with which each further token costs one step.

Legend: L layers, B rows, H heads, S columns (tokens, and padding among them), F of one head.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from raffia.lm.model import check_cut


class KeyValueCache:
    """Keys and values of all layers, in memory that is allocated at the start.

    All rows have as many columns; rows of different prompts have padding among theirs, where
    `attended` is False. Positions count attended columns, so padding moves nothing. It is for
    reading only: a model that writes gradients' history into it is refused.

    >>> from raffia.lm.transformer import CausalLM
    >>> model = CausalLM(11, n_layer=2, n_head=2, n_embd=8, block_size=16).eval()
    >>> cache = model.new_cache(batch_size=1)
    >>> with torch.no_grad():
    ...     first = model(torch.tensor([[3, 4, 5]]), cache=cache)
    ...     second = model(torch.tensor([[6]]), cache=cache)
    ...     whole = model(torch.tensor([[3, 4, 5, 6]]))
    >>> cache.length, torch.allclose(second, whole[:, -1:], atol=1e-6)
    (4, True)
    """

    def __init__(
        self,
        *,
        num_layers: int,
        batch_size: int,
        num_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        shape = num_layers, batch_size, num_heads, capacity, head_dim
        self._keys = torch.empty(shape, dtype=dtype, device=device)  # untouched pages cost nothing
        self._values = torch.empty_like(self._keys)
        self._layers = list(zip(self._keys, self._values, strict=True))
        self._attended: Tensor | None = None  # [B, capacity]; None: every column is a token
        # Which row wrote a column, [B, S'], S' <= S: rows of one writer have
        # all columns before it in common.
        self._writer = torch.empty(batch_size, 0, dtype=torch.int64, device=self._keys.device)
        self._length = 0

    @property
    def batch_size(self) -> int:
        return self._keys.shape[1]

    @property
    def length(self) -> int:
        """How many columns it holds; set to less, it forgets the last, which are written over."""
        return self._length

    @length.setter
    def length(self, length: int) -> None:
        check_cut(self._length, length)
        self._length = length
        self._writer = self._writer[:, :length]

    @property
    def capacity(self) -> int:
        """How many columns there is room for."""
        return self._keys.shape[3]

    @property
    def attended(self) -> Tensor | None:
        """The columns [B, length] that are tokens; None if all are."""
        return None if self._attended is None else self._attended[:, : self.length]

    def put(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's new columns [B, H, T, F] behind the old; all [B, H, length + T, F]."""
        if key.requires_grad:
            raise RuntimeError(
                "a key/value cache does not support gradients: call the model under "
                "torch.no_grad() or torch.inference_mode(), or without a cache for training"
            )
        keys, values = self._layers[layer]
        start, num_new = self._length, key.shape[2]
        keys.narrow(2, start, num_new).copy_(key)
        values.narrow(2, start, num_new).copy_(value)
        return keys.narrow(2, 0, start + num_new), values.narrow(2, 0, start + num_new)

    def memory(self) -> tuple[Tensor, Tensor]:
        """Keys and values [L, B, H, capacity, F] themselves, for kernels that write columns.

        >>> cache = KeyValueCache(num_layers=1, batch_size=2, num_heads=1, capacity=4, head_dim=8)
        >>> cache.memory()[0].shape
        torch.Size([1, 2, 1, 4, 8])
        """
        return self._keys, self._values

    def advance(self, num_columns: int, attended: Tensor | None) -> None:
        """Count columns that all layers have put; attended: [B, num_columns], None for all."""
        start, self._length = self._length, self._length + num_columns
        if self._attended is None and attended is not None:
            self._attended = torch.ones(
                self.batch_size, self.capacity, dtype=torch.bool, device=self._keys.device
            )
        if self._attended is not None:
            self._attended[:, start : self.length] = True if attended is None else attended

    def reorder(self, index: Tensor) -> KeyValueCache:
        """Row b becomes what row index[b] was; index: [B]. A step of beam search.

        Only columns after the last that rows have in common are copied: beams of one prompt mostly
        differ in their last few tokens.

        >>> cache = KeyValueCache(num_layers=1, batch_size=2, num_heads=1, capacity=4, head_dim=1)
        >>> _ = cache.put(0, torch.tensor([1.0, 2.0]).view(2, 1, 1, 1), torch.zeros(2, 1, 1, 1))
        >>> cache.advance(1, None)
        >>> cache.reorder(torch.tensor([1, 1])).keys(0).flatten()
        tensor([2., 2.])
        """
        moved = (index != torch.arange(len(index), device=index.device)).nonzero().flatten()
        if len(moved) == 0:
            return self
        source = index[moved]
        writer = self._written()
        start = int((writer[moved] == writer[source]).all(0).sum())
        for part in (self._keys, self._values):
            columns = part[:, :, :, start : self.length]
            columns.index_copy_(1, moved, columns.index_select(1, source))
        if self._attended is not None:
            self._attended[moved] = self._attended[source]
        self._writer = writer[index]
        return self

    def select(self, index: Tensor, start: int = 0) -> KeyValueCache:
        """A new cache of these rows [M]; the old stays as it is.

        start: columns before it are left out. They must be padding in all of the rows.

        >>> cache = KeyValueCache(num_layers=1, batch_size=2, num_heads=1, capacity=4, head_dim=1)
        >>> cache.select(torch.tensor([0, 0, 1])).batch_size
        3
        """
        layers, _, heads, capacity, size = self._keys.shape
        new = copy.copy(self)
        new._keys = self._keys.new_empty(layers, len(index), heads, capacity, size)
        new._values = torch.empty_like(new._keys)
        new._layers = list(zip(new._keys, new._values, strict=True))
        columns = slice(start, self.length)
        new._length = self.length - start
        for old, part in ((self._keys, new._keys), (self._values, new._values)):
            part[:, :, :, : new._length] = old[:, :, :, columns].index_select(1, index)
        if self._attended is not None:
            new._attended = torch.ones_like(self._attended[index])
            new._attended[:, : new._length] = self._attended[:, columns][index]
        new._writer = self._written()[index][:, start:]
        return new

    def _written(self) -> Tensor:
        """The row that wrote each column [B, length]: since the last call, each row its own."""
        num_new = self.length - self._writer.shape[1]
        if num_new:
            rows = torch.arange(self.batch_size, device=self._writer.device)
            own = rows[:, None].expand(-1, num_new)
            self._writer = torch.cat([self._writer, own], 1)
        return self._writer

    def expand(self, num_copies: int) -> KeyValueCache:
        """Return a new cache in which each row is repeated this many times in succession, for
        beams.

        >>> cache = KeyValueCache(num_layers=1, batch_size=2, num_heads=1, capacity=4, head_dim=1)
        >>> cache.expand(3).batch_size
        6
        """
        rows = torch.arange(self.batch_size, device=self._keys.device)
        return self.select(rows.repeat_interleave(num_copies))

    def keys(self, layer: int) -> Tensor:
        """The keys that a layer has written, [B, H, length, F]."""
        return self._keys[layer, :, :, : self.length]

    def values(self, layer: int) -> Tensor:
        """The values that a layer has written, [B, H, length, F]."""
        return self._values[layer, :, :, : self.length]
