"""Rows of several tensors gathered and stored together: by one kernel call, or by tensor
operations."""

from array import array
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

import raffia.jit
from raffia.search import kernels
from raffia.search.plain import is_plain, plain


class RowTransfer(Protocol):
    """Copies rows of tensors `memory` [R, ...] to and from tensors [M, ...]."""

    def gather(self, rows: Tensor, beside: Sequence[Tensor]) -> None:
        """memory[rows] -> beside, which is contiguous."""

    def store(self, rows: Tensor, beside: Sequence[Tensor], reset: Tensor | None) -> None:
        """beside -> memory[rows], zeros where `reset` in the tensors that were named."""


def row_transfer(memory: Sequence[Tensor], zeroed: Sequence[int], *, compiled: bool) -> RowTransfer:
    """The row copies for these tensors; `zeroed` are the numbers of those that a reset zeroes.

    >>> memory = [torch.zeros(3, 2)]
    >>> transfer = row_transfer(memory, [0], compiled=False)
    >>> transfer.store(torch.tensor([2, 0]), [torch.ones(2, 2)], torch.tensor([True, False]))
    >>> memory[0]
    tensor([[1., 1.],
            [0., 0.],
            [0., 0.]])
    """
    on_cpu = all(tensor.device.type == "cpu" for tensor in memory)
    if compiled and on_cpu and raffia.jit.available() and 0 < len(memory) <= 62:
        return _KernelTransfer(memory, zeroed)
    return _TensorTransfer(memory, zeroed)


class _TensorTransfer:
    def __init__(self, memory: Sequence[Tensor], zeroed: Sequence[int]) -> None:
        self._memory, self._zeroed = memory, frozenset(zeroed)

    def gather(self, rows: Tensor, beside: Sequence[Tensor]) -> None:
        for stored, buffer in zip(self._memory, beside, strict=True):
            torch.index_select(stored, 0, rows, out=buffer)

    def store(self, rows: Tensor, beside: Sequence[Tensor], reset: Tensor | None) -> None:
        for number, (stored, leaf) in enumerate(zip(self._memory, beside, strict=True)):
            if reset is not None and number in self._zeroed:
                leaf = leaf.masked_fill(reset.view(-1, *[1] * (leaf.ndim - 1)), 0)
            stored.index_copy_(0, rows, leaf)


class _KernelTransfer:
    def __init__(self, memory: Sequence[Tensor], zeroed: Sequence[int]) -> None:
        self._memory = memory  # keeps alive what the table's addresses refer to
        self._num = len(memory)
        self._zeroed = sum(1 << number for number in zeroed)
        self._table = array("q", [0] * (3 * self._num))
        self._address = self._table.buffer_info()[0]
        for number, tensor in enumerate(memory):
            self._table[3 * number] = tensor.data_ptr()
            self._table[3 * number + 2] = tensor[0].numel() * tensor.element_size()
        self._gather, self._store = kernels.rows.gather, kernels.rows.store

    def gather(self, rows: Tensor, beside: Sequence[Tensor]) -> None:
        table, slot = self._table, 1
        for tensor in beside:
            table[slot] = tensor.data_ptr()
            slot += 3
        self._gather(self._address, self._num, rows.data_ptr(), rows.size(0))

    def store(self, rows: Tensor, beside: Sequence[Tensor], reset: Tensor | None) -> None:
        table, slot = self._table, 1
        plain_tensors = [
            tensor if is_plain(tensor) else plain(tensor, tensor.dtype, tensor.device)
            for tensor in beside
        ]
        for tensor in plain_tensors:
            table[slot] = tensor.data_ptr()
            slot += 3
        if reset is None:
            self._store(self._address, self._num, rows.data_ptr(), rows.size(0), 0, 0)
        else:
            self._store(
                *(self._address, self._num, rows.data_ptr(), rows.size(0)),
                *(reset.data_ptr(), self._zeroed),
            )
