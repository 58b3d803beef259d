"""The protocol of selections, and plain functions as selections."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from raffia.search.nodes import Nodes
from raffia.search.puct import PUCT, Normalize

SelectFn = Callable[[Nodes, Any], tuple[Tensor, Any]]  # (nodes, carry) -> (action [M], carry)


class Selection(Protocol):
    """The protocol of selections: how a search chooses actions, and what it carries to child nodes.

    >>> from raffia.search import PUCT, Gumbel
    >>> [selection.needs_logits for selection in (PUCT(), Gumbel(root_gumbel=torch.zeros(1, 2)))]
    [False, True]
    """

    @property
    def needs_logits(self) -> bool: ...  # nodes.prior_logits
    @property
    def normalize(self) -> Normalize: ...  # which range of Q the tree tracks: nodes.q_range
    @property
    def root_in_range(self) -> bool: ...

    def prepare(
        self, num_legal: list[int], budget: list[int], num_actions: int, device: torch.device
    ) -> Self:
        """The selection prepared for one search; num_legal, budget: one number for each root."""

    def __call__(self, nodes: Nodes, carry: Any) -> tuple[Tensor, Any]:
        """Choose the actions [M]; returns them, and the carry for the children."""


@dataclass(frozen=True)
class FunctionSelection:
    """A plain function `select(nodes, carry) -> (action, carry)` as a selection.

    >>> FunctionSelection(lambda nodes, carry: (nodes.visits.argmin(-1), carry)).needs_logits
    True
    """

    function: SelectFn
    needs_logits: bool = True
    normalize: Normalize = "running"
    root_in_range: bool = False

    def prepare(
        self, num_legal: list[int], budget: list[int], num_actions: int, device: torch.device
    ) -> "FunctionSelection":
        """The selection itself: a function needs no preparation."""
        return self

    def __call__(self, nodes: Nodes, carry: Any) -> tuple[Tensor, Any]:
        """The function's actions and carry, after a check that the actions are legal."""
        answer = self.function(nodes, carry)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise TypeError(
                f"select returned a {type(answer).__name__}; it must return (action, carry)"
            )
        _check_actions(answer[0], nodes)
        return answer


def _check_actions(action: Any, nodes: Nodes) -> None:
    visits, mask = nodes.visits, nodes.mask
    if not isinstance(action, Tensor) or action.dtype != torch.int64:
        kind = action.dtype if isinstance(action, Tensor) else type(action).__name__
        raise TypeError(f"select returned {kind} as actions; they must be an int64 tensor")
    if action.shape != visits.shape[:1]:
        raise ValueError(
            f"select returned actions {list(action.shape)} for {visits.shape[0]} nodes; it must "
            "return one for each"
        )
    num_actions = visits.shape[1]
    if not bool(((action >= 0) & (action < num_actions)).all()):
        raise ValueError(
            f"select returned actions {action.tolist()}; they must be in 0..{num_actions - 1}"
        )
    if mask is None:
        return
    ends = ~mask.any(-1)  # a node that ended is not walked from, but may be asked about
    if not bool((mask.gather(1, action.unsqueeze(1)).squeeze(1) | ends).all()):
        raise ValueError(
            f"select returned actions {action.tolist()}, some of which are illegal; nodes.mask "
            "shows the legal ones"
        )


def as_selection(select: Selection | SelectFn | None) -> Any:
    """The selection itself, or one around a function; `PUCT()` for None.

    >>> as_selection(None).normalize
    'running'
    """
    if select is None:
        return PUCT()
    if isinstance(select, type):
        raise TypeError(f"select is the class {select.__name__}; pass {select.__name__}(...)")
    if hasattr(select, "prepare"):
        return select
    if not callable(select):
        raise TypeError(
            f"select is a {type(select).__name__}; it must be PUCT(), Gumbel(...) or a function "
            "select(nodes, carry) -> (action, carry)"
        )
    return FunctionSelection(select)
