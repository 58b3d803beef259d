"""The heads on a trunk's hidden states: V, a number; Q, one for each next token."""

from __future__ import annotations

from typing import TypeAlias, cast

from torch import Tensor, nn

from raffia.nn.evolvable import EvolvableMLP


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

    @property
    def last(self) -> nn.Linear:
        """The layer that makes the outputs."""
        return cast(nn.Linear, self[2])

    def inner(self, hidden: Tensor) -> Tensor:
        """What the last layer reads, of hidden states [*, d].

        >>> Head(4, 10).inner(torch.zeros(2, 3, 4)).shape
        torch.Size([2, 3, 8])
        """
        found: Tensor = self[1](self[0](hidden))
        return found

    def at(
        self,
        hidden: Tensor,  # [*, d]
        index: Tensor | None = None,  # int64 [*], the output that is wanted; None: the only one
    ) -> Tensor:  # [*]
        """One output of each hidden state; the others, of which there may be 50,000, are not made.

        Equals `self(hidden).gather(-1, index.unsqueeze(-1)).squeeze(-1)`, and is precise within
        autocast, too, where a matrix product would round values to three digits.
        """
        return _one_output(self.last, self.inner(hidden), index)


class EvolvableHead(EvolvableMLP):
    """A head whose form can change: it begins with one layer, twice as wide as the hidden state.

    max_layers, max_nodes: of the largest that it may become; None: 4 d nodes in each layer.

    >>> head = EvolvableHead(4, 10)
    >>> h = torch.randn(2, 3, 4)
    >>> head(h).shape, head.at(h, torch.tensor([[0, 1, 2], [7, 8, 9]])).shape, head.num_nodes
    (torch.Size([2, 3, 10]), torch.Size([2, 3]), [8, 0, 0])
    """

    def __init__(
        self, n_embd: int, num_outputs: int, *, max_layers: int = 3, max_nodes: int | None = None
    ) -> None:
        nodes = 2 * n_embd
        if max_nodes is not None and max_nodes < nodes:
            raise ValueError(
                f"max_head_nodes={max_nodes}: a head on hidden states of n_embd={n_embd} begins "
                f"with {nodes} nodes; take max_head_nodes={nodes} or more, or None"
            )
        super().__init__(
            n_embd,
            num_outputs,
            width=n_embd,
            num_nodes=nodes,
            max_layers=max_layers,
            max_nodes=2 * nodes if max_nodes is None else max_nodes,
        )

    @property
    def last(self) -> nn.Linear:
        """The layer that makes the outputs."""
        return self.out

    def inner(self, hidden: Tensor) -> Tensor:
        """What the last layer reads, of hidden states [*, d].

        >>> EvolvableHead(4, 10).inner(torch.zeros(2, 3, 4)).shape
        torch.Size([2, 3, 4])
        """
        return self.features(hidden)

    def at(
        self,
        hidden: Tensor,  # [*, d]
        index: Tensor | None = None,  # int64 [*]
    ) -> Tensor:  # [*]
        """As `Head.at`."""
        return _one_output(self.last, self.inner(hidden), index)


AnyHead: TypeAlias = Head | EvolvableHead


def _one_output(last: nn.Linear, inner: Tensor, index: Tensor | None) -> Tensor:
    inner = inner.to(last.weight.dtype)
    if index is None:
        return (inner * last.weight[0]).sum(-1) + last.bias[0]
    flat = index.flatten()
    weight = last.weight.index_select(0, flat).view(*index.shape, last.in_features)
    return (inner * weight).sum(-1) + last.bias.index_select(0, flat).view(index.shape)
