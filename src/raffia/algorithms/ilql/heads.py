"""The heads on a trunk's hidden states: V, a number; Q, one for each next token."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

__all__ = ["Head"]


class Head(nn.Sequential):
    """Two dense layers, the inner one twice as wide as the hidden state [*, d] that they read.

    >>> head = Head(4, 10)
    >>> h = torch.randn(2, 3, 4)
    >>> head(h).shape, head.at(h, torch.tensor([[0, 1, 2], [7, 8, 9]])).shape
    (torch.Size([2, 3, 10]), torch.Size([2, 3]))
    """

    def __init__(self, n_embd: int, num_outputs: int) -> None:
        super().__init__(
            nn.Linear(n_embd, 2 * n_embd), nn.ReLU(), nn.Linear(2 * n_embd, num_outputs)
        )

    def at(
        self,
        hidden: Tensor,  # [*, d]
        index: Tensor | None = None,  # int64 [*], the output that is wanted; None: the only one
    ) -> Tensor:  # [*]
        """One output of each hidden state; the others, of which there may be 50,000, are not made.

        Equals `self(hidden).gather(-1, index.unsqueeze(-1)).squeeze(-1)`, and is precise within
        autocast, too, where a matrix product would round values to three digits.
        """
        first, activation, last = cast(tuple[nn.Linear, nn.ReLU, nn.Linear], tuple(self))
        inner = activation(first(hidden)).to(last.weight.dtype)
        if index is None:
            return (inner * last.weight[0]).sum(-1) + last.bias[0]
        flat = index.flatten()
        weight = last.weight.index_select(0, flat).view(*index.shape, last.in_features)
        return (inner * weight).sum(-1) + last.bias.index_select(0, flat).view(index.shape)
