"""`SumTree` draws rows in proportion to their priority, and changes priorities, in a few steps.

Every node has 16 children and is their sum; the leaves are the priorities. All levels lie in one
tensor, each padded with zeros to whole blocks of 16. Nodes are always recomputed from their
children, never corrected by a difference: the tree does not drift, and two ways to the same leaves
give the same bits. The order of additions is fixed: a block is summed in pairs, pairs of pairs and
so on; the search for a child adds from left to right, and takes the first whose end lies beyond
what is searched for. Where the two orders differ in their rounding, it takes the last child that is
not zero.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from raffia.data import kernels
from raffia.data.processes import by_value, from_value
from raffia.hints import check_count

FAN_OUT = 16
NO_MINIMUM = float("inf")


class SumTree:
    """Priorities (float64) of `capacity` leaves, drawn in proportion; all zero at first.

    capacity: how many leaves.

    `limit` is the largest priority: no sum of `capacity` such numbers overflows.

    Not safe under threads: hold a lock, as `raffia.data.ReplayBuffer` does.

    Source: Schaul, Quan, Antonoglou & Silver (2016), Prioritized experience replay, appendix B.2.1.

    >>> from raffia.data.sum_tree import SumTree
    >>> tree = SumTree(5)
    >>> tree.set(torch.tensor([0, 2, 4]), torch.tensor([1.0, 2.0, 5.0]))
    >>> tree.total(), tree.minimum()
    (8.0, 1.0)
    >>> tree.sample(torch.tensor([0.0, 0.124, 0.125, 0.5], dtype=torch.float64))
    tensor([0, 0, 2, 4])
    """

    def __init__(self, capacity: int) -> None:
        check_count("capacity", capacity, 1)
        self.capacity = capacity
        starts = [0]  # where each level begins, from the leaves to the root
        width = capacity
        while width > 1 or len(starts) == 1:
            width = -(-width // FAN_OUT)
            starts.append(starts[-1] + width * FAN_OUT)
        self._sums = torch.zeros(starts[-1] + 1, dtype=torch.float64, device="cpu")
        # of the leaves that are not zero; the leaves themselves need none
        above = len(self._sums) - starts[1]
        self._minima = torch.full((above,), NO_MINIMUM, dtype=torch.float64, device="cpu")
        self.limit = torch.finfo(torch.float64).max / (2 * capacity)
        self._nodes = torch.empty(0, dtype=torch.int64, device="cpu")  # what a write works in
        self._record = kernels.priorities.TreeRecord(
            sums=self._sums,
            minima=self._minima,
            starts=torch.tensor(starts, device="cpu"),
            before=torch.zeros(FAN_OUT, dtype=torch.float64, device="cpu"),
            levels=len(starts),
            capacity=capacity,
            sums_at=self._sums.data_ptr(),
            limit=self.limit,
        )
        self.address: int = self._record.address  # for kernels

    def __getstate__(self) -> dict[str, Any]:
        return by_value({"priorities": self.state()["priorities"]})

    def __setstate__(self, state: dict[str, Any]) -> None:
        found = from_value(state)
        self.__init__(len(found["priorities"]))  # type: ignore[misc]
        self.load_state(found)

    def __len__(self) -> int:
        return self.capacity

    def __repr__(self) -> str:
        return f"SumTree({self.capacity}, total={self.total():g})"

    def total(self) -> float:
        """The sum of all priorities.

        >>> SumTree(3).total()
        0.0
        """
        return self._sums[-1].item()

    def minimum(self) -> float:
        """The least priority that is not zero; inf if all are.

        >>> SumTree(3).minimum()
        inf
        """
        return self._minima[-1].item()

    def maximum(self) -> float:
        """The largest priority, which takes a pass over all.

        >>> SumTree(3).maximum()
        0.0
        """
        return self._sums[: self.capacity].max().item()

    def get(self, index: Tensor | int) -> Tensor:
        """A copy of the priorities of leaves, of the shape of `index`.

        >>> SumTree(3).get(torch.tensor([[0], [2]]))
        tensor([[0.],
                [0.]], dtype=torch.float64)
        """
        leaves = self._leaves(index)
        if leaves.numel():
            low, high = torch.aminmax(leaves)
            if low < 0 or high >= self.capacity:
                raise self._wrong(leaves, None)
        return self._sums[leaves]

    def set(self, index: Tensor | int, values: Tensor | float) -> None:
        """Change the priorities of leaves.

        index: any shape. Of an index that occurs several times the last counts.
        values: one each, of the same shape, or one for all; finite and >= 0.
        Raises IndexError or ValueError, and changes nothing, if any of them is not.

        >>> tree = SumTree(3)
        >>> tree.set(torch.tensor([0, 0, 1]), torch.tensor([5.0, 0.5, 0.25]))
        >>> tree.get(torch.arange(3))
        tensor([0.5000, 0.2500, 0.0000], dtype=torch.float64)
        """
        leaves = self._leaves(index).contiguous()
        values = torch.as_tensor(values, dtype=torch.float64, device="cpu").contiguous()
        n, num_values = leaves.numel(), values.numel()
        if num_values != 1 and values.shape != leaves.shape:
            raise ValueError(
                f"indices of shape {list(leaves.shape)} need priorities of that shape, or one for "
                f"all; got values of shape {list(values.shape)}"
            )
        step = 8 if num_values == n else 0
        given = leaves.data_ptr(), values.data_ptr(), step, n, self._room(n)
        if n and not kernels.priorities.write(self.address, *given):
            raise self._wrong(leaves, values)

    def fill(self, items: range, value: float) -> None:
        """Change the priorities of items of a ring to one: item i is leaf i % capacity.

        value: at least 0 and at most `limit`.

        >>> tree = SumTree(3)
        >>> tree.fill(range(2, 4), 0.5)
        >>> tree.get(torch.arange(3))
        tensor([0.5000, 0.0000, 0.5000], dtype=torch.float64)
        """
        n = len(items)
        kernels.priorities.fill(self.address, items.start, n, float(value), self._room(n))

    def _room(self, n: int) -> int:
        """The address of n numbers to work in."""
        if n > self._nodes.numel():
            self._nodes = torch.empty(2 * n, dtype=torch.int64, device="cpu")
        return self._nodes.data_ptr()

    def sample(self, u: Tensor) -> Tensor:
        """For each u, the leaf in which u * total falls if the leaves are laid end to end.

        u: float64 [n] in [0, 1). Uniform numbers give leaves in proportion to their priority; a
            leaf of priority zero is never given.
        Raises ValueError if there is nothing to draw: all priorities are zero.

        >>> tree = SumTree(3)
        >>> tree.set(torch.tensor([0, 2]), torch.tensor([1.0, 3.0]))
        >>> tree.sample(torch.tensor([0.2, 0.3], dtype=torch.float64))
        tensor([0, 2])
        """
        return self.draw(u)[0]

    def draw(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Like `sample`, but also return the priorities of the leaves: two tensors [n].

        >>> tree = SumTree(3)
        >>> tree.set(torch.tensor([0, 2]), torch.tensor([1.0, 3.0]))
        >>> tree.draw(torch.tensor([0.2, 0.3], dtype=torch.float64))
        (tensor([0, 2]), tensor([1., 3.], dtype=torch.float64))
        """
        if u.dtype is not torch.float64 or u.ndim != 1:
            raise TypeError(
                f"u must be float64 [n]; got {u.dtype} {list(u.shape)}: torch.rand(n, "
                "dtype=torch.float64)"
            )
        u = u.contiguous()
        leaves, values = torch.empty_like(u, dtype=torch.int64), torch.empty_like(u)
        found = leaves.data_ptr(), values.data_ptr()
        wrong = kernels.priorities.draw(self.address, u.data_ptr(), len(u), *found)
        if wrong == kernels.priorities.NOTHING_TO_DRAW:
            raise ValueError(
                "nothing can be drawn, because all priorities are zero: set one first, "
                "tree.set(index, 1.0)"
            )
        if wrong:
            raise ValueError(f"u must be in [0, 1); got values in {u.min():g} .. {u.max():g}")
        return leaves, values

    def state(self) -> dict[str, Tensor]:
        """A copy of what it holds: the priorities [capacity].

        >>> SumTree(2).state()
        {'priorities': tensor([0., 0.], dtype=torch.float64)}
        """
        return {"priorities": self._sums[: self.capacity].clone()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load a state of `state()`, of a tree with as many leaves.

        >>> tree = SumTree(2)
        >>> tree.load_state({"priorities": torch.tensor([1.0, 2.0])})
        >>> tree.total()
        3.0
        """
        priorities = state["priorities"]
        if priorities.shape != (self.capacity,):
            raise ValueError(
                f"this tree has {self.capacity} leaves, but the state has {list(priorities.shape)}"
            )
        self.set(torch.arange(self.capacity, device="cpu"), priorities)

    def _leaves(self, index: Tensor | int) -> Tensor:
        leaves = torch.as_tensor(index, device="cpu")
        if leaves.dtype is torch.int64:
            return leaves
        if leaves.dtype is torch.bool or leaves.is_floating_point() or leaves.is_complex():
            raise TypeError(f"indices must be integers; got {leaves.dtype}")
        return leaves.to(torch.int64)

    def _wrong(self, leaves: Tensor, values: Tensor | None) -> Exception:
        """The error about leaves or values that can't be."""
        wrong = (leaves < 0) | (leaves >= self.capacity)
        if wrong.any():
            return IndexError(
                f"index {int(leaves[wrong][0])} is out of range: the tree has {self.capacity} "
                "leaves. Nothing was changed"
            )
        assert values is not None
        wrong = ~((values >= 0) & (values <= self.limit))
        return ValueError(
            f"a priority must be finite and >= 0 (and at most {self.limit:.0e}); got "
            f"{float(values[wrong][0])}. Nothing was changed"
        )
