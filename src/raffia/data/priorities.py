"""`Priorities`: how likely each row is drawn, and the weights that undo the bias.

One set of them is behind the items of a `PrioritizedSampler` and the steps of a segment buffer.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from raffia.data import kernels
from raffia.data.processes import by_value, from_value
from raffia.data.row_index import groups
from raffia.data.structure import check_entries
from raffia.data.sum_tree import SumTree
from raffia.hints import check_choice

INFINITY = float("inf")
BELOW_ONE = 1 - 2**-53
IMPORTANCE = ("buffer", "batch")  # of what the largest importance weight is 1
NONE = -1.0  # instead of a priority
BY_DEFAULT = -1.0  # instead of a chance that a step was given


class Priorities:
    """Chances of N rows to be drawn; 0 for an empty row.

        c_i = (p_i + eps)^alpha,  P(i) = c_i / sum_k c_k,  w_i = (P(i) / min_k P(k))^-beta

    capacity: N.
    alpha: how much priorities count; 0: not at all.
    beta: how much of the bias the weights undo; None: all weights are 1.
    importance: what k runs over in the weights: "buffer", all rows; "batch", those drawn.

    Not safe under threads: hold a lock.

    Source: Schaul, Quan, Antonoglou & Silver (2016), Prioritized experience replay, section 3.3 and
    3.4, eq. 1.

    >>> from raffia.data.priorities import Priorities
    >>> priorities = Priorities(5, alpha=0.5, beta=1.0, eps=0.0)
    >>> priorities.set(torch.tensor([1, 3]), priorities.new)
    >>> priorities.update(torch.tensor([3]), torch.tensor([9.0]), range(5))
    0
    >>> rows, weights = priorities.draw(4000, torch.Generator().manual_seed(0))
    >>> rows.bincount(), set(weights[rows == 1].tolist())  # about 1 to 3
    (tensor([   0,  986,    0, 3014]), {1.0})
    """

    def __init__(
        self,
        capacity: int,
        *,
        alpha: float,
        beta: float | None,
        eps: float = 1e-8,
        importance: str = "buffer",
    ) -> None:
        exponents = {"alpha": alpha, "beta": 0.0 if beta is None else beta, "eps": eps}
        for name, value in exponents.items():
            check_exponent(name, value)
        check_choice(
            "importance", importance, IMPORTANCE, ", the set whose largest importance weight is 1"
        )
        self.capacity, self.importance = capacity, importance
        self.beta = beta
        self.tree = SumTree(capacity)
        # The largest priority that was given so far.
        self._largest = torch.full((), NONE, dtype=torch.float64, device="cpu")
        # The capacity and the memory of an update.
        self._room, self._work = 0, torch.empty(0, dtype=torch.int64, device="cpu")
        self.set_exponent(alpha, eps)

    def __getstate__(self) -> dict[str, Any]:
        return by_value({**self.__dict__, "_record": None})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(from_value(state))
        self.set_exponent(self.alpha, self.eps)

    def set_exponent(self, alpha: float, eps: float) -> None:
        """Change how priorities count; chances that were set before stay what they are."""
        self.alpha, self.eps = float(alpha), float(eps)
        # The largest priority that can be given.
        self.limit = self.tree.limit ** (1 / max(self.alpha, 1)) * 0.999 - self.eps
        self._record = kernels.priorities.PrioritiesRecord(
            tree=self.tree.address,
            alpha=self.alpha,
            eps=self.eps,
            limit=self.limit,
            largest=self._largest,
        )

    def clear(self) -> None:
        """Exclude all rows from drawing, and forget the largest priority."""
        self.tree.fill(range(self.capacity), 0.0)
        self._largest.fill_(NONE)

    # -- priorities

    @property
    def largest(self) -> float:
        """The largest priority given so far, or 1 before the first one; new rows get it.

        >>> Priorities(5, alpha=0.5, beta=0.4).largest
        1.0
        """
        largest = self._largest.item()
        return 1.0 if largest == NONE else largest

    @largest.setter
    def largest(self, priority: float) -> None:
        self._largest.fill_(priority)

    @property
    def given(self) -> bool:
        """Whether a priority was ever given."""
        return self._largest.item() != NONE

    @property
    def new(self) -> float:
        """The chance of a new row."""
        # The largest ever may be too much for an alpha that was raised since.
        return min(kernels.priorities.chance(self.largest, self.alpha, self.eps), self.tree.limit)

    def chances(self, priority: Tensor) -> Tensor:
        """(priority + eps)^alpha, float64; ValueError for an invalid priority.

        >>> Priorities(5, alpha=0.5, beta=0.4, eps=0.0).chances(torch.tensor([4.0]))
        tensor([2.], dtype=torch.float64)
        """
        self.check(priority)
        chances = (
            priority.detach().to("cpu", torch.float64).clone(memory_format=torch.contiguous_format)
        )
        kernels.priorities.raise_all(self._record.address, chances.data_ptr(), chances.numel())
        return chances

    def check(self, priority: Tensor) -> None:
        """Raise ValueError for an invalid priority."""
        priority = priority.to(torch.float64)  # in which the limit is a number
        wrong = priority[~((priority >= 0) & (priority <= self.limit))].reshape(-1)
        if len(wrong):
            raise ValueError(
                f"a priority must be finite and >= 0 (and at most {self.limit:.0e}); got "
                f"{wrong[0]:g}. For errors with a sign pass error.abs(). Nothing was changed"
            )

    def set(self, rows: Tensor, chances: Tensor | float) -> None:
        """Set the chances of rows [n]: one for each, or one for all."""
        if len(rows):
            self.tree.set(rows, chances)

    def grow(self, priority: Tensor) -> None:
        """Include given priorities in the largest of all."""
        if priority.numel():
            self._largest.clamp_(min=priority.max().to("cpu", torch.float64))

    def update(
        self, items: Tensor, priority: Tensor, live: range, drawable: Tensor | None = None
    ) -> int:
        """Change the priorities of items; returns how many were left out, as they are gone.

        items: int64, any shape. Item i lies in row i % N. Of an item that occurs twice the last
            counts.
        priority: of the same shape, or one for all; finite and >= 0.
        live: the items that are here.
        drawable: [N] bool, rows without which are left out too.
        Raises ValueError for another priority, IndexError for an item that there never was; nothing
        is changed then.

        >>> priorities = Priorities(2, alpha=1.0, beta=0.4, eps=0.0)
        >>> priorities.update(torch.tensor([0, 2]), torch.tensor([5.0, 4.0]), range(1, 3))
        1
        >>> priorities.largest
        4.0
        """
        single = priority.dtype is torch.float32
        if not (single or priority.dtype is torch.float64) or not priority.is_cpu:
            single, priority = False, priority.to("cpu", torch.float64)
        items, priority, n = items.contiguous(), priority.contiguous(), items.numel()
        if n > self._room:
            self._room, self._work = 2 * n, torch.empty(6 * n, dtype=torch.int64, device="cpu")
        ignored: int = kernels.priorities.update(
            self._record.address,
            items.data_ptr(),
            priority.data_ptr(),
            0 if not priority.ndim else 4 if single else 8,
            single,
            n,
            live.start,
            live.stop,
            0 if drawable is None else drawable.data_ptr(),
            self._work.data_ptr(),
        )
        if ignored < 0:
            self.check(priority)
            unknown = items[(items < 0) | (items >= live.stop)]
            raise IndexError(
                f"there is no item {int(unknown[0])}: only {live.stop} have been added so far. "
                'Pass the "index" of a sample. Nothing was changed'
            )
        return ignored

    # -- draws

    def draw(
        self,
        n: int,
        generator: torch.Generator | None = None,
        *,
        replacement: bool = True,
        stratified: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Rows [n] and their weights [n] float32.

        replacement: False draws different rows, one after another of those that are left.
        stratified: cut the sum of the chances into n equal parts and draw one row from each.

        >>> priorities = Priorities(5, alpha=0.0, beta=None)
        >>> priorities.set(torch.tensor([1, 3]), 1.0)
        >>> rows, weights = priorities.draw(2, replacement=False)
        >>> rows.sort().values, weights
        (tensor([1, 3]), tensor([1., 1.]))
        """
        least = self.least() if self.beta is not None else None
        if not replacement:
            rows, chances = self._draw_different(n, generator)
        else:
            u = torch.rand(n, dtype=torch.float64, generator=generator, device="cpu")
            if stratified:
                u = u.add_(torch.arange(n, device="cpu")).div_(n).clamp_(max=BELOW_ONE)
            rows, chances = self.tree.draw(u)
        if self.beta is None:
            return rows, torch.ones(n, dtype=torch.float32, device="cpu")
        return rows, importance_weights(chances, least, self.beta)

    def least(self) -> float | None:
        """The least chance of all rows, where weights are relative to it."""
        return self.tree.minimum() if self.importance == "buffer" else None

    def _draw_different(self, n: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        # To pass over what was drawn before is to draw from what is left, in proportion.
        rows = torch.empty(0, dtype=torch.int64, device="cpu")
        chances = torch.empty(0, dtype=torch.float64, device="cpu")
        try:
            while len(rows) < n:
                u = torch.rand(
                    n - len(rows), dtype=torch.float64, generator=generator, device="cpu"
                )
                found, chance = self.tree.draw(u)
                first = groups(found).first
                rows, chances = torch.cat([rows, found[first]]), torch.cat([chances, chance[first]])
                if len(rows) < n:
                    self.tree.set(found, 0.0)
        finally:
            self.tree.set(rows, chances)
        return rows, chances

    def probability(self, rows: Tensor) -> Tensor:
        """The probability of each row to be given by one draw: float64, of the shape of `rows`.

        >>> priorities = Priorities(5, alpha=0.0, beta=None)
        >>> priorities.set(torch.tensor([1, 3]), 1.0)
        >>> priorities.probability(torch.tensor([0, 1]))
        tensor([0.0000, 0.5000], dtype=torch.float64)
        """
        return self.tree.get(rows) / (self.tree.total() or 1.0)

    def least_probability(self) -> float:
        """The least of all rows' probabilities that is not 0; inf where no row can be drawn.

        >>> Priorities(5, alpha=0.0, beta=None).least_probability()
        inf
        """
        return self.tree.minimum() / (self.tree.total() or 1.0)


class StepPriorities(Priorities):
    """Chances of the rows of a ring; those of rows count that were admitted.

    num_rows: rows of the ring.
    alpha, beta: both None: all admitted rows are equally likely, and all weights are 1.

    >>> from raffia.data.priorities import StepPriorities
    >>> priorities = StepPriorities(5, alpha=0.5, beta=1.0)
    >>> priorities.admit(torch.tensor([1, 3]))
    >>> priorities.probability(torch.tensor([0, 1]))
    tensor([0.0000, 0.5000], dtype=torch.float64)
    """

    def __init__(
        self,
        num_rows: int,
        *,
        alpha: float | None,
        beta: float | None,
        eps: float = 1e-8,
        importance: str = "buffer",
    ) -> None:
        if (alpha is None) != (beta is None):
            raise ValueError(
                f"alpha={alpha} and beta={beta} must be given together: alpha sets how much "
                "priorities count, beta how much of that the weights correct. Pass both, such as "
                "alpha=0.6, beta=0.4, or neither"
            )
        super().__init__(num_rows, alpha=alpha or 0.0, beta=beta, eps=eps, importance=importance)
        self._given: Tensor | None = None  # [N] float64, chances that steps came with

    @property
    def uniform(self) -> bool:
        """Whether there are no priorities."""
        return self.beta is None

    def clear(self) -> None:
        """Withdraw all rows, and forget which priority was the largest."""
        super().clear()
        self._given = None

    def require(self) -> None:
        """Raise TypeError if the buffer has no priorities."""
        if self.uniform:
            raise TypeError(
                "this buffer has no priorities; create it with alpha and beta, such as "
                "SegmentReplayBuffer(..., alpha=0.6, beta=0.4)"
            )

    def check(self, priority: Tensor) -> None:
        """Raise ValueError for an invalid priority; TypeError without priorities."""
        self.require()
        super().check(priority)

    @property
    def expects(self) -> bool:
        """Whether any steps were given priorities before."""
        return self._given is not None

    def expect(self, rows: Tensor, priority: Tensor | None) -> None:
        """Remember the priorities of new steps until they are admitted; None: the largest there is.

        >>> priorities = StepPriorities(5, alpha=1.0, beta=0.4, eps=0.0)
        >>> priorities.expect(torch.tensor([2]), torch.tensor([4.0]))
        >>> priorities.admit(torch.tensor([2]))
        >>> priorities.tree.total()
        4.0
        """
        if self._given is None:
            if priority is None:
                return
            self._given = self._largest.new_full((self.capacity,), BY_DEFAULT)
        if priority is None:
            self._given[rows] = BY_DEFAULT
        else:
            self._given[rows] = self.chances(priority)
            self.grow(priority)

    def admit(self, rows: Tensor) -> None:
        """Make rows available for drawing from now on."""
        if self._given is None or not len(rows):
            self.set(rows, self.new)
            return
        given = self._given[rows]
        self.set(rows, torch.where(given == BY_DEFAULT, self.new, given))

    def raise_beta(self, beta: float) -> None:
        """Change beta, which is usually raised to 1 in the course of training.

        >>> StepPriorities(5, alpha=1.0, beta=0.4, eps=0.0).raise_beta(0.5)
        """
        if self.uniform:
            raise ValueError(
                f"beta={beta} has no effect: this buffer has no priorities, so samples have no "
                "weights"
            )
        self.beta = beta

    def state(self) -> dict[str, Tensor]:
        """A copy of the priorities, as tensors; beta too, which is usually raised in training.

        >>> sorted(StepPriorities(5, alpha=0.6, beta=0.4, eps=0.0).state())
        ['chances', 'exponents', 'largest']
        """
        state = {
            "chances": self.tree.state()["priorities"],
            "largest": self._largest.new_tensor([self.largest] if self.given else []),
        }
        if self.beta is not None:
            state["exponents"] = self._largest.new_tensor([self.alpha, self.beta])
        if self._given is not None:
            state["given"] = self._given.clone()
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load a state of `state()` that `check_state` accepts.

        >>> priorities = StepPriorities(5, alpha=0.6, beta=0.4)
        >>> priorities.load_state(StepPriorities(5, alpha=0.6, beta=1.0).state())
        >>> priorities.beta
        1.0
        """
        self.tree.load_state({"priorities": state["chances"]})
        self.largest = next(iter(state["largest"].tolist()), NONE)
        if not self.uniform:
            self.beta = float(state["exponents"][1])
        self._given = state["given"].clone() if "given" in state else None

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless the state is of as many rows and with the same alpha."""
        check_entries(state, ("chances", "largest"), "the priorities of a segment buffer")
        alpha = float(state["exponents"][0]) if "exponents" in state else None
        if alpha != (None if self.uniform else self.alpha):
            raise ValueError(
                f"the state has alpha={alpha}, but this buffer has "
                f"alpha={None if self.uniform else self.alpha}: create the buffer with the same "
                "settings as the saved one"
            )
        if len(state["chances"]) != self.capacity:
            raise ValueError(
                f"the state has {len(state['chances'])} rows, but here there are {self.capacity}"
            )


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
    """Raise ValueError for an invalid alpha, beta or eps."""
    if not 0 <= value < INFINITY:
        raise ValueError(f"{name} must be finite and >= 0; got {value}")
