"""Sampling of items in proportion to a priority that the learner assigns to them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from raffia.data.priorities import NONE, Priorities, check_exponent
from raffia.data.row_index import no_integers
from raffia.data.samplers import Draw, Sampler, too_few
from raffia.data.storage import Storage
from raffia.data.structure import check_entries
from raffia.data.torchrl_storages import refuse_others
from raffia.hints import check_choice

REDUCTIONS = {
    "max": lambda priority: priority.amax(-1),
    "min": lambda priority: priority.amin(-1),
    "mean": lambda priority: priority.mean(-1),
    "median": lambda priority: priority.median(-1).values,
}


class PrioritizedSampler(Sampler):
    """Items in proportion to their priority, with weights that undo the bias.

        P(i) = p_i^alpha / sum_k p_k^alpha,   w_i = (P(i) / min_k P(k))^-beta

    max_capacity: how many items there can be: the `max_size` of the storage, or more.
    alpha: how much priorities count; 0: not at all. Can be set at any time, unless it is 0.
    beta: how much of the bias the weights undo; 1: all of it. Can be set at any time: Schaul et al.
        raise it to 1 in the course of training.
    eps: added to every priority, so that no item is lost for good.
    dtype: TorchRL's; float32 or float64, as priorities are stored in float64.
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

    by_position = True  # as priorities are found by it

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float32,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        *,
        stratified: bool = False,
        importance: str = "buffer",
    ) -> None:
        if dtype is not torch.float64:
            refuse_others(dtype=dtype)
        check_choice("reduction", reduction, REDUCTIONS)
        self.priorities = Priorities(
            max_capacity, alpha=alpha, beta=beta, eps=eps, importance=importance
        )
        self.max_capacity: int = max_capacity
        self._max_live = max_capacity  # how many items the storage holds
        self.reduction = reduction
        self.max_priority_within_buffer = max_priority_within_buffer
        self.stratified = stratified
        self.num_ignored = 0
        self._live = range(0)

    @property
    def importance(self) -> str:
        """The set that the importance weights are relative to: "batch" or "buffer"."""
        return self.priorities.importance

    @property
    def eps(self) -> float:
        """The constant that is added to every priority."""
        return self.priorities.eps

    @property
    def alpha(self) -> float:
        """How much priorities count; setting it changes the chances of all items.

        >>> sampler = PrioritizedSampler(4, alpha=0.5, beta=0.4)
        >>> sampler.alpha = 0.6
        """
        return self.priorities.alpha

    @alpha.setter
    def alpha(self, alpha: float) -> None:
        check_exponent("alpha", alpha)
        with self.lock:
            rows = torch.arange(self._live.start, self._live.stop, device="cpu") % self.max_capacity
            tree, before = self.priorities.tree, self.alpha
            if before:
                tree.set(rows, tree.get(rows).pow_(alpha / before))
            elif len(self._live) and alpha:
                raise ValueError(
                    "with alpha=0 all items are equally likely, and their priorities are no "
                    "longer known: start with a small alpha, such as 0.001"
                )
            self.priorities.set_exponent(alpha, self.eps)
            self.version += 1

    @property
    def beta(self) -> float:
        """How much of the bias the weights undo.

        >>> sampler = PrioritizedSampler(4, alpha=0.5, beta=0.4)
        >>> sampler.beta = 1.0
        """
        return self.priorities.beta or 0.0

    @beta.setter
    def beta(self, beta: float) -> None:
        check_exponent("beta", beta)
        with self.lock:
            self.priorities.beta = beta
            self.version += 1

    @property
    def default_priority(self) -> float:
        """The priority of a new item.

        >>> PrioritizedSampler(4, alpha=0.5, beta=0.4).default_priority
        1.0
        """
        tree = self.priorities.tree
        if self.max_priority_within_buffer and self.alpha and tree.total() > 0:
            return max(0.0, tree.maximum() ** (1 / self.alpha) - self.eps)
        return self.priorities.largest

    def attach(self, storage: Storage) -> None:
        self._max_live = storage.max_size or self.max_capacity

    def added(self, items: range) -> None:
        live = self._live
        if live and items.start != live.stop:
            raise ValueError(
                f"items from {items.start} on do not follow the last known one, {live.stop - 1}"
            )
        oldest = max(live.start if live else items.start, items.stop - self._max_live)
        self.follow(range(oldest, items.stop))

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
            fill = self.priorities.tree.fill
            # Else new ones take their rows; before that they would still count in the maximum.
            if len(live) < self.max_capacity or self.max_priority_within_buffer:
                fill(gone, 0.0)
            chance = self._chance_of_new()
            for items in (before, after):
                fill(items, chance)
            self._live = live
            self.version += 1

    def _chance_of_new(self) -> float:
        tree = self.priorities.tree
        if self.max_priority_within_buffer and tree.total() > 0:
            return tree.maximum()
        return self.priorities.new

    def draw(self, n: int, live: range, generator: torch.Generator | None = None) -> Draw:
        if live != self._live:
            raise ValueError(
                f"this sampler knows the items {_span(self._live)}, but the buffer holds "
                f"{_span(live)}: use each sampler with one buffer only"
            )
        rows, weight = self.priorities.draw(n, generator, stratified=self.stratified)
        return Draw(self._items(rows), {"priority_weight": weight})

    def update_priority(self, index: Tensor | int, priority: Tensor | float) -> int:
        """Change the priorities of items; returns how many were left out, being overwritten.

        index: the numbers of items, such as the "index" of a sample; any shape [*n]. Of a number
            that occurs several times the last counts.
        priority: [*n], or [*n, ...] of which `reduction` makes one each, or one for all; finite
            and >= 0.
        Raises ValueError for another priority, IndexError for an item that there never was, or a
        mask; nothing is changed then.

        >>> sampler = PrioritizedSampler(2, alpha=1.0, beta=1.0)
        >>> sampler.added(range(3))
        >>> sampler.update_priority(torch.tensor([0, 2]), torch.tensor([5.0, 4.0]))
        1
        """
        if not isinstance(index, Tensor) or index.dtype is not torch.int64 or not index.is_cpu:
            index = torch.as_tensor(index, device="cpu")
            if index.dtype is torch.bool:
                raise no_integers("items", index.dtype)
            if index.is_floating_point() and index.numel():
                raise TypeError(f"indices must be integers; got {index.dtype}")
            index = index.long()
        if not isinstance(priority, Tensor) or priority.shape != index.shape:
            priority = self._one_each(index.shape, priority)
        with self.lock:
            num_ignored = self.priorities.update(index, priority, self._live)
            self.version += 1
            self.num_ignored += num_ignored
            return num_ignored

    def check_priority(self, shape: torch.Size, priority: Tensor | float) -> None:
        """Raise what `update_priority` of items of this shape would, ValueError; change nothing.

        >>> sampler = PrioritizedSampler(4, alpha=1.0, beta=1.0)
        >>> sampler.check_priority(torch.Size([2]), torch.tensor([1.0, 2.0]))
        """
        self.priorities.check(self._one_each(shape, priority))

    def clear(self) -> None:
        with self.lock:
            self.priorities.clear()
            self._live = range(0)
            self.version += 1

    def state_dict(self) -> dict[str, Any]:
        with self.lock:
            live, used = self._live, min(self._live.stop, self.max_capacity)
            largest = self.priorities.largest if self.priorities.given else NONE
            numbers = [self.alpha, self.beta, self.eps, largest]
            return {
                "numbers": torch.tensor(numbers, dtype=torch.float64, device="cpu"),
                "counts": torch.tensor([live.start, live.stop, self.num_ignored], device="cpu"),
                "chances": self.priorities.tree.get(torch.arange(used, device="cpu")),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_entries(state, ("chances", "counts", "numbers"), f"a {type(self).__name__}")
        chances = state["chances"]
        first, end, num_ignored = state["counts"].tolist()
        if len(chances) != min(end, self.max_capacity) or end - first > self.max_capacity:
            raise ValueError(
                f"the state belongs to a sampler with max_capacity={len(chances)}, but this one "
                f"has max_capacity={self.max_capacity}"
            )
        all_chances = torch.zeros(self.max_capacity, dtype=torch.float64, device="cpu")
        all_chances[: len(chances)] = chances
        with self.lock:
            own = self.priorities
            own.tree.load_state({"priorities": all_chances})
            alpha, own.beta, eps, own.largest = state["numbers"].tolist()
            own.set_exponent(alpha, eps)
            self._live, self.num_ignored = range(first, end), num_ignored
            self.version += 1

    def _one_each(self, shape: torch.Size, priority: Tensor | float) -> Tensor:
        """Priorities float64 [n] from [*n, ...], or [] for all."""
        priority = torch.as_tensor(priority, dtype=torch.float64, device="cpu").detach()
        if priority.ndim == 0 or priority.shape == shape:
            return priority.reshape(-1) if priority.ndim > 1 else priority
        if priority.shape[: len(shape)] != shape:
            raise ValueError(
                f"index of shape {list(shape)} needs priorities of that shape (or with more "
                f"dimensions at the end), or one for all; got shape {list(priority.shape)}"
            )
        each = priority.shape[len(shape) :].numel()
        return REDUCTIONS[self.reduction](priority.reshape(shape.numel(), each))

    def _items(self, rows: Tensor) -> Tensor:
        """The numbers of the live items in these rows."""
        if self._live.stop <= self.max_capacity:
            return rows
        first = self._live.stop - self.max_capacity
        return (rows - first) % self.max_capacity + first


def _span(items: range) -> str:
    return f"{items.start}..{items.stop - 1}" if items else "none"
