"""`SumTree` draws rows in proportion to their priority, and changes priorities, in a few steps.

Every node has 16 children and is their sum; the leaves are the priorities. All levels lie in one
tensor, each padded with zeros to whole blocks of 16. Nodes are always recomputed from their
children, never corrected by a difference: the tree does not drift, and two ways to the same leaves
give the same bits. The order of additions is fixed, in the compiled loops as in the tensor
operations: a block is summed in pairs, pairs of pairs and so on; the search for a child adds from
left to right, and takes the first whose end lies beyond what is searched for. Where the two orders
differ in their rounding, it takes the last child that is not zero.
"""

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from raffia import jit
from raffia.data.by_value import by_value, from_value
from raffia.data.groups import tensor_groups

FAN_OUT = 16
NO_MINIMUM = float("inf")
NOTHING_TO_DRAW, WRONG_FRACTION = 1, 2  # as the compiled loop reports them


@functools.cache
def kernels() -> ModuleType | None:
    """The compiled loops, where there is a compiler."""
    if not jit.available():
        return None
    from raffia.data.kernels import sum_tree

    return sum_tree


class SumTree:
    """Priorities (float64) of `capacity` leaves, drawn in proportion; all zero at first.

    capacity: how many leaves.
    device: where it lives. On the CPU its loops are compiled where numba is installed; elsewhere
        they are tensor operations. The results are the same, bit for bit.

    `limit` is the largest priority: no sum of so many overflows.

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

    def __init__(self, capacity: int, *, device: torch.device | str = "cpu") -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        self.device = torch.device(device)
        self._starts = [0]  # where each level begins, from the leaves to the root
        width = capacity
        while width > 1 or len(self._starts) == 1:
            width = -(-width // FAN_OUT)
            self._starts.append(self._starts[-1] + width * FAN_OUT)
        self._sums = torch.zeros(self._starts[-1] + 1, dtype=torch.float64, device=self.device)
        # of the leaves that are not zero; the leaves themselves need none
        above = len(self._sums) - self._starts[1]
        self._minima = torch.full((above,), NO_MINIMUM, dtype=torch.float64, device=self.device)
        self.limit = torch.finfo(torch.float64).max / (2 * capacity)
        self._start_numbers = torch.tensor(self._starts)  # for the compiled loops
        self._before = torch.zeros(FAN_OUT, dtype=torch.float64)  # what they work in

    def __getstate__(self) -> dict[str, Any]:
        return by_value(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(from_value(state))

    def __len__(self) -> int:
        return self.capacity

    def __repr__(self) -> str:
        return f"SumTree({self.capacity}, total={self.total():g})"

    def total(self) -> float:
        """The sum of all priorities.

        >>> SumTree(3).total()
        0.0
        """
        return float(self._sums[-1])

    def minimum(self) -> float:
        """The least priority that is not zero; inf if all are.

        >>> SumTree(3).minimum()
        inf
        """
        return float(self._minima[-1])

    def maximum(self) -> float:
        """The largest priority, which takes a pass over all.

        >>> SumTree(3).maximum()
        0.0
        """
        return float(self._sums[: self.capacity].max())

    def get(self, index: Tensor | int) -> Tensor:
        """The priorities of leaves, in a new tensor of the shape of `index`.

        >>> SumTree(3).get(torch.tensor([[0, 2]]))
        tensor([[0., 0.]], dtype=torch.float64)
        """
        leaves = self._leaves(index)
        if leaves.numel():
            low, high = torch.aminmax(leaves)
            if low < 0 or high >= self.capacity:
                self._refuse(leaves, None)
        return self._sums[leaves]

    def set(self, index: Tensor | int, values: Tensor | float) -> None:
        """Change the priorities of leaves.

        index: any shape. Where one stands several times the last counts.
        values: one each, of the same shape, or one for all; finite and >= 0.
        Raises IndexError or ValueError, and changes nothing, if any of them is not.

        >>> tree = SumTree(3)
        >>> tree.set(torch.tensor([0, 0, 1]), torch.tensor([5.0, 0.5, 0.25]))
        >>> tree.get(torch.arange(3))
        tensor([0.5000, 0.2500, 0.0000], dtype=torch.float64)
        """
        leaves = self._leaves(index)
        values = torch.as_tensor(values, dtype=torch.float64, device=self.device)
        if values.shape != leaves.shape and values.numel() != 1:
            raise ValueError(
                f"indices of shape {list(leaves.shape)} need as many priorities, or one for all; "
                f"got values of shape {list(values.shape)}"
            )
        n = leaves.numel()
        if n == 0:
            return
        loops = self._loops()
        if loops is None:
            done = self._write(leaves.reshape(-1), values.reshape(-1))
        else:
            leaves, values = leaves.contiguous(), values.contiguous()
            nodes = torch.empty_like(leaves)
            done = loops.write(
                leaves.data_ptr(),
                values.data_ptr(),
                8 if values.numel() == n else 0,
                n,
                self.capacity,
                self.limit,
                self._sums.data_ptr(),
                self._start_numbers.data_ptr(),
                len(self._starts),
                self._minima.data_ptr(),
                nodes.data_ptr(),
            )
        if not done:
            self._refuse(leaves, values)

    def sample(self, u: Tensor) -> Tensor:
        """For each u the leaf in which u * total falls when the leaves lie end to end.

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
        """As `sample`, with the priorities of the leaves: two tensors [n].

        >>> tree = SumTree(3)
        >>> tree.set(torch.tensor([0, 2]), torch.tensor([1.0, 3.0]))
        >>> tree.draw(torch.tensor([0.2, 0.3], dtype=torch.float64))
        (tensor([0, 2]), tensor([1., 3.], dtype=torch.float64))
        """
        if u.dtype is not torch.float64 or u.ndim != 1:
            raise TypeError(
                f"u must be float64 [n], got {u.dtype} {list(u.shape)}: "
                "torch.rand(n, dtype=torch.float64)"
            )
        loops = self._loops()
        if loops is None:
            wrong, leaves, values = self._descend(u)
        else:
            u = u.contiguous()
            leaves, values = torch.empty_like(u, dtype=torch.int64), torch.empty_like(u)
            wrong = loops.draw(
                u.data_ptr(),
                len(u),
                self._sums.data_ptr(),
                self._start_numbers.data_ptr(),
                len(self._starts),
                leaves.data_ptr(),
                values.data_ptr(),
                self._before.data_ptr(),
            )
        if wrong == NOTHING_TO_DRAW:
            raise ValueError(
                "nothing can be drawn: all priorities are zero. Set one first: tree.set(index, 1.0)"
            )
        if wrong:
            raise ValueError(f"u must lie in [0, 1), got values in {u.min():g} .. {u.max():g}")
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
                f"this tree has {self.capacity} leaves, the state is of {list(priorities.shape)}"
            )
        self.set(torch.arange(self.capacity, device=self.device), priorities)

    def _loops(self) -> ModuleType | None:
        return kernels() if self.device.type == "cpu" else None

    # the same in tensor operations

    def _write(self, leaves: Tensor, values: Tensor) -> bool:
        low, high = torch.aminmax(leaves)
        least, most = torch.aminmax(values)
        if low < 0 or high >= self.capacity or not (least >= 0 and most <= self.limit):
            return False
        keep = tensor_groups(leaves).last
        nodes = leaves[keep]
        self._sums[nodes] = values[keep] if len(values) > 1 else values
        offsets = torch.arange(FAN_OUT, device=self.device)
        for level in range(1, len(self._starts)):
            nodes = torch.unique(nodes >> 4)
            at = nodes + self._starts[level]
            children = (nodes * FAN_OUT + self._starts[level - 1]).unsqueeze(-1) + offsets
            block = self._sums[children]
            if level == 1:
                low = torch.where(block > 0, block, NO_MINIMUM)
            else:
                low = self._minima[children - self._starts[1]]
            self._sums[at] = pairwise_sum(block)
            self._minima[at - self._starts[1]] = low.amin(-1)
        return True

    def _descend(self, u: Tensor) -> tuple[int, Tensor, Tensor]:
        t = u * self._sums[-1]
        node = torch.zeros(len(u), dtype=torch.int64, device=self.device)
        if not self._sums[-1] > 0:
            return NOTHING_TO_DRAW, node, t
        if not ((u >= 0) & (u < 1)).all():
            return WRONG_FRACTION, node, t
        offsets = torch.arange(FAN_OUT, device=self.device)
        for start in reversed(self._starts[:-1]):
            block = self._sums[(start + node * FAN_OUT).unsqueeze(-1) + offsets]
            upto = [block[:, 0]]
            for k in range(1, FAN_OUT):
                upto.append(upto[-1] + block[:, k])
            total = upto.pop().unsqueeze(-1)
            ends = torch.stack(upto, -1)  # of all children but the last
            passed = torch.where(t.unsqueeze(-1) < total, t.unsqueeze(-1) >= ends, ends < total)
            child = passed.sum(-1)
            before = torch.nn.functional.pad(ends, (1, 0))
            t = t - before.gather(1, child.unsqueeze(-1))[:, 0]
            node = node * FAN_OUT + child
        return 0, node, self._sums[node]

    # what is wrong

    def _leaves(self, index: Tensor | int) -> Tensor:
        if isinstance(index, Tensor) and index.dtype is torch.int64:
            return index if index.device == self.device else index.to(self.device)
        leaves = torch.as_tensor(index, device=self.device)
        if leaves.dtype is torch.bool or leaves.is_floating_point() or leaves.is_complex():
            raise TypeError(f"indices are integers, got {leaves.dtype}")
        return leaves.to(torch.int64)

    def _refuse(self, leaves: Tensor, values: Tensor | None) -> None:
        wrong = (leaves < 0) | (leaves >= self.capacity)
        if wrong.any():
            raise IndexError(
                f"index {int(leaves[wrong][0])} is out of range: the tree has {self.capacity} "
                "leaves. Nothing was changed"
            )
        assert values is not None
        wrong = ~((values >= 0) & (values <= self.limit))
        raise ValueError(
            f"a priority must be finite and >= 0 (and at most {self.limit:.0e}), got "
            f"{float(values[wrong][0])}. Nothing was changed"
        )


def pairwise_sum(block: Tensor) -> Tensor:
    """The sum over the last dimension, a power of two: of pairs, of pairs of pairs, and so on.

    >>> pairwise_sum(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    tensor([10.])
    """
    while block.shape[-1] > 1:
        block = block[..., 0::2] + block[..., 1::2]
    return block[..., 0]
