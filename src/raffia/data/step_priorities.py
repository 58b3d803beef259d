"""The priorities of the steps of a segment buffer, which count from when segments can start there
until they cannot any more."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from raffia.data.priorities import NONE, Priorities
from raffia.data.structure import check_entries

BY_DEFAULT = -1.0  # instead of a chance that a step was given


class StepPriorities(Priorities):
    """Chances of the rows of a ring; those of rows count that were admitted.

    num_rows: rows of the ring.
    alpha, beta: both None: all admitted rows are equally likely, and all weights are 1.

    >>> from raffia.data.step_priorities import StepPriorities
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
            self._given = torch.full((self.capacity,), BY_DEFAULT, dtype=torch.float64)
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
            "largest": torch.tensor([self.largest] if self.given else [], dtype=torch.float64),
        }
        if self.beta is not None:
            state["exponents"] = torch.tensor([self.alpha, self.beta], dtype=torch.float64)
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
