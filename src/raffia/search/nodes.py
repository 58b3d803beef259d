"""Nodes: one node of each of M trees, as a selection sees them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False, repr=False)
class Nodes:
    """The queries that can be made about M nodes; each result is a tensor with first dimension M.

    A selection is a function `select(nodes, carry) -> (action [M], carry)`; the carry is whatever
    it wants to take from a node to the child it chose, None at the root. It must not choose an
    action where `mask` is false.

    >>> from raffia.search import RecurrentOutput, RootOutput, search
    >>> def least_tried(nodes, carry):  # breadth first
    ...     return nodes.visits.argmin(-1), carry
    >>> def model(embedding, action):
    ...     rows = len(action)
    ...     return RecurrentOutput(torch.zeros(rows), torch.zeros(rows), torch.zeros(rows, 3)
    ...                            ), embedding
    >>> root = RootOutput(torch.zeros(1, 3), torch.zeros(1), torch.zeros(1, 1))
    >>> search(root, model, num_simulations=12, select=least_tried).data["depth"][0].tolist()
    [0, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2]
    """

    _entries: dict[str, Tensor]  # of the trees
    root: Tensor  # int64 [M]
    row: Tensor  # int64 [M]
    depth: int  # the same for all
    simulation: int  # counted from 0

    def _of_rows(self, name: str) -> Tensor:
        return self._entries[name][self.root, self.row]

    @property
    def num_simulations(self) -> int:
        """The largest number of simulations of a root."""
        return int(self._entries["visits"].shape[-1]) - 1

    @property
    def visits(self) -> Tensor:
        """Visits of each action [M, A] int32."""
        return self._of_rows("children_visits")

    @property
    def q(self) -> Tensor:
        """Q of each action [M, A] float32, 0 where not tried."""
        return self._of_rows("children_q")

    @property
    def prior(self) -> Tensor:
        """Prior of each action [M, A] float32."""
        return self._of_rows("prior")

    @property
    def prior_logits(self) -> Tensor:
        """The model's logits [M, A] float32, -inf where illegal."""
        return self._of_rows("prior_logits")

    @property
    def mask(self) -> Tensor | None:
        """Legal actions [M, A] bool; None where all are."""
        return self._of_rows("mask") if "mask" in self._entries else None

    @property
    def value(self) -> Tensor:
        """Mean of the backed-up values [M] float32; the model's value before the first backup."""
        return mean_values(self._of_rows("visits"), self._of_rows("value_sum"), self.raw_value)

    @property
    def raw_value(self) -> Tensor:
        """The model's value [M] float32."""
        return self._of_rows("raw_value")

    @property
    def num_tried(self) -> Tensor:
        """The number of tried actions [M] int32."""
        return self._of_rows("num_tried")

    @property
    def q_sum(self) -> Tensor:
        """Sum of the tried actions' Q [M] float64."""
        return self._of_rows("q_sum")

    @property
    def q_range(self) -> tuple[Tensor, Tensor]:
        """Least and greatest Q of the whole tree, each [M] float32; (inf, -inf): none yet."""
        return self._entries["q_min"][self.root], self._entries["q_max"][self.root]


def mean_values(visits: Tensor, value_sum: Tensor, raw_value: Tensor) -> Tensor:
    """Mean of the backed-up values, float32; the model's value before the first backup.

    >>> mean_values(torch.tensor([2, 0]), torch.tensor([3.0, 0.0]), torch.tensor([0.0, 0.5]))
    tensor([1.5000, 0.5000])
    """
    mean = (value_sum / visits.clamp_min(1)).float()
    return torch.where(visits > 0, mean, raw_value)


def best(scores: Tensor, mask: Tensor | None) -> Tensor:
    """The action of the highest score [M], the lowest number among equals; illegal ones never.

    >>> best(torch.tensor([[1.0, 2.0, 2.0]]), torch.tensor([[True, False, True]]))
    tensor([2])
    """
    if mask is not None:
        # also where all legal scores are -inf a legal action must win
        scores = torch.where(mask, scores.clamp_min(torch.finfo(scores.dtype).min), -torch.inf)
    return scores.argmax(-1)
