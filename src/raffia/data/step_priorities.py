"""The probability of each step of a segment buffer to be drawn, and the weights that undo the
bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from raffia.data.by_value import by_value, from_value
from raffia.data.groups import groups
from raffia.data.prioritized import INFINITY, check_exponent, check_importance, importance_weights
from raffia.data.sum_tree import SumTree

TOO_LARGE = 1e290  # for a chance: sums of all of them stay finite
BY_DEFAULT = -1.0  # instead of a chance that a step was given


class StepPriorities:
    """Draws of rows in proportion to priority^alpha; of rows only that were admitted.

        P(i) = p_i^alpha / sum_k p_k^alpha,   w_i = (P(i) / min_k P(k))^-beta

    num_rows: rows of the ring.
    alpha, beta: both None: all admitted rows are equally likely, and all weights are 1.
    eps: added to every priority.
    importance: what k runs over in the weights: "buffer", all admitted rows; "batch", those drawn.

    Steps come in before they can be drawn, and go out long before the ring overwrites them all;
    so this differs from `PrioritizedSampler` in when a row counts, not in how it is drawn.

    Source: Schaul, Quan, Antonoglou & Silver (2016), Prioritized experience replay, section 3.3 and
    3.4, eq. 1.

    >>> from raffia.data.step_priorities import StepPriorities
    >>> priorities = StepPriorities(5, alpha=0.5, beta=1.0, eps=0.0)
    >>> priorities.admit(torch.tensor([1, 3]))
    >>> priorities.update(torch.tensor([3]), torch.tensor([9.0]))
    >>> rows, weights = priorities.draw(4000, torch.Generator().manual_seed(0))
    >>> rows.bincount(), set(weights[rows == 1].tolist())  # about 1 to 3
    (tensor([   0,  986,    0, 3014]), {1.0})
    """

    def __init__(
        self,
        num_rows: int,
        *,
        alpha: float | None,
        beta: float | None,
        eps: float,
        importance: str = "buffer",
    ) -> None:
        check_importance(importance)
        if (alpha is None) != (beta is None):
            raise ValueError(
                f"alpha={alpha} and beta={beta} go together: alpha sets how much priorities count, "
                "beta how much of that the weights undo. Pass both, such as alpha=0.6, beta=0.4, "
                "or neither"
            )
        self.num_rows = num_rows
        self.alpha = None if alpha is None else _exponent("alpha", alpha)
        self.beta = None if beta is None else _exponent("beta", beta)
        self.eps = _exponent("eps", eps)
        self.importance = importance
        self._tree = SumTree(num_rows)
        self.clear()

    def clear(self) -> None:
        """Withdraw all rows, and forget which priority was the largest.

        >>> StepPriorities(5, alpha=None, beta=None, eps=0.0).clear()
        """
        self._tree.set(torch.arange(self.num_rows), 0.0)
        self._set_largest(None)
        self._given: Tensor | None = None  # [N] float64, chances that steps came with

    def __getstate__(self) -> dict[str, Any]:
        return by_value(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(from_value(state))

    @property
    def default_priority(self) -> float:
        """The priority of a new step: the largest that was given so far, or 1 before any was.

        >>> StepPriorities(5, alpha=0.5, beta=0.4, eps=0.0).default_priority
        1.0
        """
        return 1.0 if self._largest is None else self._largest

    def chances(self, priority: Tensor) -> Tensor:
        """(priority + eps)^alpha; ValueError for what is no priority.

        >>> StepPriorities(5, alpha=0.5, beta=0.4, eps=0.0).chances(torch.tensor([4.0]))
        tensor([2.], dtype=torch.float64)
        """
        if self.alpha is None:
            raise TypeError(
                "this buffer has no priorities; make it with alpha and beta, such as "
                "SegmentReplayBuffer(..., alpha=0.6, beta=0.4)"
            )
        priority = priority.detach().to("cpu", torch.float64)
        chance = (priority + self.eps) ** self.alpha
        good = (priority >= 0) & (priority < INFINITY) & (chance < TOO_LARGE)
        if not good.all():
            raise ValueError(
                f"a priority must be finite and >= 0, got {float(priority[~good][0])}; for errors "
                "with a sign pass error.abs(). Nothing was changed"
            )
        return chance

    def expect(self, rows: Tensor, priority: Tensor | None) -> None:
        """Keep the priorities of new steps until they are admitted; None: the largest there is.

        >>> priorities = StepPriorities(5, alpha=1.0, beta=0.4, eps=0.0)
        >>> priorities.expect(torch.tensor([2]), torch.tensor([4.0]))
        """
        if self._given is None:
            if priority is None:
                return
            self._given = torch.full((self.num_rows,), BY_DEFAULT, dtype=torch.float64)
        if priority is None:
            self._given[rows] = BY_DEFAULT
        else:
            self._given[rows] = self.chances(priority)
            self._grow(priority)

    def admit(self, rows: Tensor) -> None:
        """Let rows be drawn from now on.

        >>> priorities = StepPriorities(5, alpha=1.0, beta=0.4, eps=0.0)
        >>> priorities.admit(torch.tensor([2]))
        """
        if not len(rows):
            return
        if self._given is None:
            self._tree.set(rows, self._by_default)
            return
        given = self._given[rows]
        self._tree.set(rows, torch.where(given == BY_DEFAULT, self._by_default, given))

    def withdraw(self, rows: Tensor) -> None:
        """Draw these rows no more.

        >>> priorities = StepPriorities(5, alpha=1.0, beta=0.4, eps=0.0)
        >>> priorities.withdraw(torch.tensor([2]))
        """
        if len(rows):
            self._tree.set(rows, 0.0)

    def update(self, rows: Tensor, priority: Tensor) -> None:
        """Change the priorities of admitted rows [n]; of one that stands twice the last counts.

        >>> priorities = StepPriorities(5, alpha=1.0, beta=0.4, eps=0.0)
        >>> priorities.update(torch.tensor([2]), torch.tensor([4.0]))
        >>> priorities.default_priority
        4.0
        """
        self._tree.set(rows, self.chances(priority))
        self._grow(priority)

    def raise_beta(self, beta: float) -> None:
        """Change beta, which is usually raised to 1 in the course of training.

        >>> StepPriorities(5, alpha=1.0, beta=0.4, eps=0.0).raise_beta(0.5)
        """
        if self.beta is None:
            raise ValueError(f"beta={beta}: there are no weights, as this buffer has no priorities")
        self.beta = _exponent("beta", beta)

    def probability(self, rows: Tensor) -> Tensor:
        """The probability of each row to be given by one draw: float64, of the shape of `rows`.

        >>> priorities = StepPriorities(5, alpha=None, beta=None, eps=0.0)
        >>> priorities.admit(torch.tensor([1, 3]))
        >>> priorities.probability(torch.tensor([0, 1]))
        tensor([0.0000, 0.5000], dtype=torch.float64)
        """
        total = self._tree.total()
        return self._tree.get(rows) / (total if total > 0 else 1.0)

    def least_probability(self) -> float:
        """The least of all rows' probabilities that is not 0; inf where no row is admitted.

        >>> StepPriorities(5, alpha=None, beta=None, eps=0.0).least_probability()
        inf
        """
        total = self._tree.total()
        return self._tree.minimum() / (total if total > 0 else 1.0)

    def _grow(self, priority: Tensor) -> None:
        if priority.numel():
            largest = float(priority.max())
            self._set_largest(largest if self._largest is None else max(self._largest, largest))

    def _set_largest(self, largest: float | None) -> None:
        self._largest = largest
        self._by_default = 1.0  # chance of a new step
        if self.alpha is not None:
            self._by_default = float(
                self.chances(torch.tensor(self.default_priority, dtype=torch.float64))
            )

    def draw(
        self, n: int, generator: torch.Generator | None = None, *, replacement: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Rows [n] and their weights [n] float32.

        replacement: False draws different rows, one after another of those that are left.

        >>> priorities = StepPriorities(5, alpha=None, beta=None, eps=0.0)
        >>> priorities.admit(torch.tensor([1, 3]))
        >>> rows, weights = priorities.draw(2, replacement=False)
        >>> rows.sort().values, weights
        (tensor([1, 3]), tensor([1., 1.]))
        """
        least = self._tree.minimum() if self.importance == "buffer" else None
        if replacement:
            rows, chances = self._tree.draw(_uniform(n, generator))
        else:
            rows, chances = self._draw_different(n, generator)
        if self.beta is None:
            return rows, torch.ones(n)
        return rows, importance_weights(chances, least, self.beta)

    def _draw_different(self, n: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        # To pass over what was drawn before is to draw from what is left, in proportion.
        rows, chances = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float64)
        try:
            while len(rows) < n:
                found, chance = self._tree.draw(_uniform(n - len(rows), generator))
                first = groups(found).first
                rows, chances = torch.cat([rows, found[first]]), torch.cat([chances, chance[first]])
                if len(rows) < n:
                    self._tree.set(found, 0.0)
        finally:
            self._tree.set(rows, chances)
        return rows, chances

    ENTRIES = ("chances", "largest")  # of any state

    def state(self) -> dict[str, Tensor]:
        """A copy of the priorities, as tensors; beta too, which is usually raised in training.

        >>> sorted(StepPriorities(5, alpha=0.6, beta=0.4, eps=0.0).state())
        ['chances', 'exponents', 'largest']
        """
        state = {
            "chances": self._tree.state()["priorities"],
            "largest": torch.tensor(
                [] if self._largest is None else [self._largest], dtype=torch.float64
            ),
        }
        if self.alpha is not None:
            state["exponents"] = torch.tensor([self.alpha, self.beta], dtype=torch.float64)
        if self._given is not None:
            state["given"] = self._given.clone()
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load a state of `state()`, of as many rows and with the same alpha.

        >>> priorities = StepPriorities(5, alpha=0.6, beta=0.4, eps=0.0)
        >>> priorities.load_state(StepPriorities(5, alpha=0.6, beta=1.0, eps=0.0).state())
        >>> priorities.beta
        1.0
        """
        self.check_state(state)
        self._tree.load_state({"priorities": state["chances"]})
        self._set_largest(next(iter(state["largest"].tolist()), None))
        if self.alpha is not None:
            self.beta = float(state["exponents"][1])
        self._given = state["given"].clone() if "given" in state else None

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless `load_state(state)` is possible."""
        alpha = float(state["exponents"][0]) if "exponents" in state else None
        if alpha != self.alpha:
            raise ValueError(
                f"the state is of a buffer with alpha={alpha}, this one has alpha={self.alpha}: "
                "make the buffer as the saved one was made"
            )
        if len(state["chances"]) != self.num_rows:
            raise ValueError(
                f"the state is of {len(state['chances'])} rows, here they are {self.num_rows}"
            )


def _uniform(n: int, generator: torch.Generator | None) -> Tensor:
    return torch.rand(n, dtype=torch.float64, generator=generator)


def _exponent(name: str, value: float) -> float:
    check_exponent(name, value)
    return float(value)
