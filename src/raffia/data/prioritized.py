"""Items drawn in proportion to a priority that the learner gives them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from raffia.data.row_index import no_integers
from raffia.data.samplers import Draw, Sampler, refuse_other_state, too_few
from raffia.data.sum_tree import SumTree, kernels

INFINITY = float("inf")
BELOW_ONE = 1 - 2**-53
IMPORTANCE = ("buffer", "batch")  # of what the largest importance weight is 1
NONE = -1.0  # instead of a priority

REDUCTIONS = {
    "max": lambda priority: priority.amax(-1),
    "min": lambda priority: priority.amin(-1),
    "mean": lambda priority: priority.mean(-1),
    "median": lambda priority: priority.median(-1).values,
}


class PrioritizedSampler(Sampler):
    """Items in proportion to their priority, with weights that undo the bias.

        P(i) = p_i^alpha / sum_k p_k^alpha,   w_i = (P(i) / min_k P(k))^-beta

    max_capacity: how many items there can be; the `max_size` of the storage.
    alpha: how much priorities count; 0: not at all. Can be set at any time, unless it is 0.
    beta: how much of the bias the weights undo; 1: all of it. Can be set at any time: Schaul et al.
        raise it to 1 in the course of training.
    eps: added to every priority, so that no item is lost for good.
    reduction: "max", "min", "mean" or "median": makes one priority of several, where an item has
        one for each of its steps.
    max_priority_within_buffer: a new item has the largest priority given so far, or 1.0 before any
        was given. True counts only those of items that are still there, which takes a pass over
        all priorities at each addition.
    stratified: cut the sum of the priorities into n equal parts and draw one item from each, so
        that batches differ less from each other, as Schaul et al. do.
    importance: what k runs over in the weights. "batch": the batch, so that its largest weight is
        1, as Schaul et al. do. "buffer": all items that are here, as TorchRL does; a single item
        of priority 0 then makes the weights of all batches tiny, and with them the learning rate.

    `num_ignored` counts the priorities that came too late: for items that had been overwritten.

    A state that is loaded brings its alpha, beta and eps along, as they may have been changed in
    the course of training: they count, and those given here no longer do.

    Source: Schaul, Quan, Antonoglou & Silver (2016), Prioritized experience replay, section 3.3 and
    3.4, eq. 1.

    >>> from raffia.data.prioritized import PrioritizedSampler
    >>> sampler = PrioritizedSampler(4, alpha=0.5, beta=1.0, eps=0.0)
    >>> sampler.added(range(2))
    >>> sampler.update_priority(torch.tensor([0, 1]), torch.tensor([1.0, 9.0]))
    0
    >>> draw = sampler.draw(4000, range(2), torch.Generator().manual_seed(0))
    >>> draw.items.bincount()  # about 1 to 3
    tensor([ 986, 3014])
    >>> sorted(set(draw.info["priority_weight"].tolist()))
    [0.3333333432674408, 1.0]
    """

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        *,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        stratified: bool = False,
        importance: str = "buffer",
    ) -> None:
        for name, value in (("alpha", alpha), ("beta", beta), ("eps", eps)):
            check_exponent(name, value)
        check_importance(importance)
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction is one of {sorted(REDUCTIONS)}, got {reduction!r}")
        self.max_capacity: int = max_capacity
        self.eps = eps
        self.reduction = reduction
        self.max_priority_within_buffer = max_priority_within_buffer
        self.stratified = stratified
        self.importance = importance
        self.num_ignored = 0
        self._alpha, self._beta = alpha, beta
        self._tree = SumTree(max_capacity)  # of (p + eps)^alpha
        self._largest = NONE  # priority, of all that were given
        self._live = range(0)
        self._new, self._new_of = torch.empty(0), (NONE, NONE, NONE)  # see _chance_of_new

    @property
    def alpha(self) -> float:
        """How much priorities count; setting it changes the chances of all items.

        >>> sampler = PrioritizedSampler(4, alpha=0.5, beta=0.4)
        >>> sampler.alpha = 0.6
        """
        return self._alpha

    @alpha.setter
    def alpha(self, alpha: float) -> None:
        check_exponent("alpha", alpha)
        with self.lock:
            rows = self._rows_of(self._live)
            if self._alpha:
                self._tree.set(rows, self._tree.get(rows).pow_(alpha / self._alpha))
            elif len(self._live) and alpha:
                raise ValueError(
                    "with alpha=0 all items are equally likely, and their priorities are not "
                    "known any more: start with a small alpha, such as 0.001"
                )
            self._alpha = alpha
            self.version += 1

    @property
    def beta(self) -> float:
        """How much of the bias the weights undo.

        >>> sampler = PrioritizedSampler(4, alpha=0.5, beta=0.4)
        >>> sampler.beta = 1.0
        """
        return self._beta

    @beta.setter
    def beta(self, beta: float) -> None:
        check_exponent("beta", beta)
        with self.lock:
            self._beta = beta
            self.version += 1

    @property
    def default_priority(self) -> float:
        """The priority of a new item.

        >>> PrioritizedSampler(4, alpha=0.5, beta=0.4).default_priority
        1.0
        """
        if self.max_priority_within_buffer and self._alpha and self._tree.total() > 0:
            return max(0.0, float(self._tree.maximum()) ** (1 / self._alpha) - self.eps)
        return 1.0 if self._largest == NONE else self._largest

    def added(self, items: range) -> None:
        live = self._live
        if live and items.start != live.stop:
            raise ValueError(
                f"items {items.start}.. do not follow on {live.stop - 1}, the last one known"
            )
        oldest = max(live.start if live else items.start, items.stop - self.max_capacity)
        rows = self._rows_of(range(max(items.start, oldest), items.stop))
        if self.max_priority_within_buffer:
            self._tree.set(rows, 0.0)  # those that are overwritten no longer count
        self._tree.set(rows, self._chance_of_new())
        self._live = range(oldest, items.stop)
        self.version += 1

    def follow(self, live: range) -> None:
        """Forget the items that are gone; unknown ones are new, with the largest priority."""
        known = self._live
        if live == known:
            return
        if live.stop < known.stop:
            raise too_few(known.stop, live)
        before = range(live.start, min(known.start, live.stop) if known else live.start)
        gone = range(known.start, min(known.stop, max(known.start, live.start)))
        after = range(max(known.stop, live.start) if known else live.start, live.stop)
        with self.lock:
            self._tree.set(self._rows_of(gone), 0.0)
            chance = self._chance_of_new()
            for items in (before, after):
                self._tree.set(self._rows_of(items), chance)
            self._live = live
            self.version += 1

    def _chance_of_new(self) -> Tensor | float:
        if self.max_priority_within_buffer and self._tree.total() > 0:
            return self._tree.maximum()
        of = self._largest, self._alpha, self.eps
        if self._new_of != of:
            largest = torch.tensor(1.0 if of[0] == NONE else of[0], dtype=torch.float64)
            chance = largest.add_(self.eps).pow_(self._alpha)
            # The largest ever may be too much for an alpha that was raised since.
            self._new, self._new_of = chance.clamp_(max=self._tree.limit), of
        return self._new

    def draw(self, n: int, live: range, generator: torch.Generator | None = None) -> Draw:
        if live != self._live:
            raise ValueError(
                f"this sampler knows of items {_span(self._live)}, the buffer holds {_span(live)}: "
                "a sampler belongs to one buffer, which tells it of every item"
            )
        u = torch.rand(n, dtype=torch.float64, generator=generator)
        if self.stratified:
            u = u.add_(torch.arange(n)).div_(n).clamp_(max=BELOW_ONE)
        rows, chances = self._tree.draw(u)
        least = self._tree.minimum() if self.importance == "buffer" else None
        weight = importance_weights(chances, least, self._beta)
        return Draw(self._items(rows), {"priority_weight": weight})

    def update_priority(self, index: Tensor | int, priority: Tensor | float) -> int:
        """Change the priorities of items; returns how many were left out, being overwritten.

        index: the numbers of items, such as the "index" of a sample; any shape [*n]. Where one
            stands several times the last counts.
        priority: [*n], or [*n, ...] of which `reduction` makes one each, or one for all; finite
            and >= 0.
        Raises ValueError for another priority, IndexError for an item that there never was, or a
        mask; nothing is changed then.

        >>> sampler = PrioritizedSampler(2, alpha=1.0, beta=1.0)
        >>> sampler.added(range(3))
        >>> sampler.update_priority(torch.tensor([0, 2]), torch.tensor([5.0, 4.0]))
        1
        """
        index = torch.as_tensor(index, device="cpu")
        if index.dtype is torch.bool:
            raise no_integers("items", index.dtype)
        priority = self._one_each(index.shape, priority)
        with self.lock:
            index = index.reshape(-1)
            rows, num_ignored, largest = self._located(index, priority)
            if num_ignored:
                known = index >= self._live.start
                rows, priority = rows[known], priority[known] if priority.ndim else priority
                largest = float(priority.max()) if len(rows) else NONE
            if len(rows):
                self._tree.set(rows, priority.add(self.eps).pow_(self._alpha))
                self._largest = max(self._largest, largest)
                self.version += 1
            self.num_ignored += num_ignored
            return num_ignored

    def check_priority(self, shape: torch.Size, priority: Tensor | float) -> None:
        """Raise what `update_priority` of items of this shape would, ValueError; change nothing.

        >>> sampler = PrioritizedSampler(4, alpha=1.0, beta=1.0)
        >>> sampler.check_priority(torch.Size([2]), torch.tensor([1.0, 2.0]))
        """
        priority = self._one_each(shape, priority)
        self._refuse_wrong(priority)

    def clear(self) -> None:
        with self.lock:
            self._tree.set(torch.arange(self.max_capacity), 0.0)
            self._live = range(0)
            self._largest = NONE
            self.version += 1

    def state_dict(self) -> dict[str, Any]:
        with self.lock:
            live, used = self._live, min(self._live.stop, self.max_capacity)
            numbers = [self._alpha, self._beta, self.eps, self._largest]
            return {
                "numbers": torch.tensor(numbers, dtype=torch.float64),
                "counts": torch.tensor([live.start, live.stop, self.num_ignored]),
                "chances": self._tree.get(torch.arange(used)),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        refuse_other_state(self, state, "chances", "counts", "numbers")
        chances = state["chances"]
        first, end, num_ignored = state["counts"].tolist()
        if len(chances) != min(end, self.max_capacity) or end - first > self.max_capacity:
            raise ValueError(
                f"the state is of a sampler with room for {len(chances)} items, this one has room "
                f"for {self.max_capacity}"
            )
        all_chances = torch.zeros(self.max_capacity, dtype=torch.float64)
        all_chances[: len(chances)] = chances
        with self.lock:
            self._tree.load_state({"priorities": all_chances})
            self._alpha, self._beta, self.eps, self._largest = state["numbers"].tolist()
            self._live, self.num_ignored = range(first, end), num_ignored
            self.version += 1

    def _located(self, index: Tensor, priority: Tensor) -> tuple[Tensor, int, float]:
        """The rows of items, how many of these are overwritten, and the largest priority.

        Raises IndexError or ValueError if one of them can't be.
        """
        n, live, loops = len(index), self._live, kernels()
        if n == 0:
            return index, 0, NONE
        if loops is None or index.dtype is not torch.int64:
            low, high = (int(end) for end in torch.aminmax(index))
            self._refuse_unknown(low, high)
            self._refuse_wrong(priority)
            num_old = int((index < live.start).sum())
            return index % self.max_capacity, num_old, float(priority.max())
        rows, largest = torch.empty_like(index), torch.empty((), dtype=torch.float64)
        index, priority = index.contiguous(), priority.contiguous()
        num_old = loops.locate(
            index.data_ptr(),
            priority.data_ptr(),
            8 if priority.ndim else 0,
            n,
            live.start,
            live.stop,
            self.max_capacity,
            self._limit(),
            rows.data_ptr(),
            largest.data_ptr(),
        )
        if num_old < 0:
            self._refuse_unknown(int(index.min()), int(index.max()))
            self._refuse_wrong(priority)
        return rows, num_old, largest.item()

    def _refuse_unknown(self, low: int, high: int) -> None:
        if low < 0 or high >= self._live.stop:
            raise IndexError(
                f"there never was an item {low if low < 0 else high}: {self._live.stop} were added "
                'so far. Pass the "index" of a sample. Nothing was changed'
            )

    def _refuse_wrong(self, priority: Tensor) -> None:
        wrong = priority[~((priority >= 0) & (priority <= self._limit()))].reshape(-1)
        if len(wrong):
            raise ValueError(
                f"a priority must be finite and >= 0 (and at most {self._limit():.0e}), got "
                f"{wrong[0]:g}; for errors with a sign pass error.abs(). Nothing was changed"
            )

    def _limit(self) -> float:
        """The largest priority, of which the tree takes (p + eps)^alpha."""
        return self._tree.limit ** (1 / max(self._alpha, 1)) * 0.999 - self.eps

    def _one_each(self, shape: torch.Size, priority: Tensor | float) -> Tensor:
        """Priorities float64 [n] from [*n, ...], or [] for all."""
        priority = torch.as_tensor(priority, dtype=torch.float64, device="cpu").detach()
        if priority.ndim == 0 or priority.shape == shape:
            return priority.reshape(-1) if priority.ndim > 1 else priority
        if priority.shape[: len(shape)] != shape:
            raise ValueError(
                f"index of shape {list(shape)} needs priorities of that shape (or with more "
                f"dimensions behind), or one for all; got shape {list(priority.shape)}"
            )
        return REDUCTIONS[self.reduction](priority.reshape(shape.numel(), -1))

    def _rows_of(self, items: range) -> Tensor:
        """The rows of up to `max_capacity` items in a sequence."""
        size = self.max_capacity
        first = items.start % size
        rows = torch.arange(first, first + len(items))
        return rows if first + len(items) <= size else rows % size

    def _items(self, rows: Tensor) -> Tensor:
        """The numbers of the live items in these rows."""
        if self._live.stop <= self.max_capacity:
            return rows
        first = self._live.stop - self.max_capacity
        return (rows - first) % self.max_capacity + first


def importance_weights(chances: Tensor, least: float | None, beta: float) -> Tensor:
    """(P(i) / min_k P(k))^-beta of drawn items: float32 [n]; `chances` float64 [n] is used up.

    least: the least of all chances; None: the least of these.

    >>> importance_weights(torch.tensor([8.0, 2.0], dtype=torch.float64), least=0.5, beta=0.5)
    tensor([0.2500, 0.5000])
    >>> importance_weights(torch.tensor([8.0, 2.0], dtype=torch.float64), least=None, beta=0.5)
    tensor([0.5000, 1.0000])
    """
    if least is None:
        least = float(chances.min()) if len(chances) else 1.0
    return chances.div_(least).pow_(-beta).to(torch.float32)


def check_exponent(name: str, value: float) -> None:
    """Raise ValueError for what cannot be alpha, beta or eps."""
    if not 0 <= value < INFINITY:
        raise ValueError(f"{name} must be finite and >= 0, got {value}")


def check_importance(importance: str) -> None:
    """Raise ValueError for what is no rule of importance weights.

    >>> check_importance("max")
    Traceback (most recent call last):
    ...
    ValueError: importance is "batch" (the largest weight of each batch is 1) or "buffer" ...
    """
    if importance not in IMPORTANCE:
        raise ValueError(
            'importance is "batch" (the largest weight of each batch is 1) or "buffer" (that of '
            f"all items is), got {importance!r}"
        )


def _span(items: range) -> str:
    return f"{items.start}..{items.stop - 1}" if items else "none"
