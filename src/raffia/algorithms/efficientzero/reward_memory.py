"""The LSTM that sums up the rewards of a path."""

from __future__ import annotations

from torch import Tensor

from raffia.nn.blocks import LSTMStep


def remember(
    lstm: LSTMStep,
    features: Tensor,  # [B, input_size]
    reward_hidden_state: tuple[Tensor, Tensor],  # h, c: each [1, B, L]
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The LSTM's output [B, L] and its next (h, c), shaped as they came.

    >>> output, (h, c) = remember(LSTMStep(4, 3), torch.ones(2, 4), (torch.zeros(1, 2, 3),) * 2)
    >>> bool((output == h[0]).all())
    True
    """
    h, c = reward_hidden_state
    shape = (1, len(features), lstm.hidden_size)
    if h.shape != shape or c.shape != shape:
        raise ValueError(
            f"reward_hidden_state is (h, c), each of shape {list(shape)}, got {list(h.shape)} and "
            f"{list(c.shape)}; at the start both are zeros"
        )
    h, c = lstm(features, (h.squeeze(0), c.squeeze(0)))
    return h, (h.unsqueeze(0), c.unsqueeze(0))
