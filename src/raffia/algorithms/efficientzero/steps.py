"""The two steps of a latent model, on tensors: from an observation, and by an action."""

from __future__ import annotations

import torch
from torch import Tensor, cat, nn

from raffia.functional.trees import is_traced


class Represent(nn.Module):
    """The step from an observation to a latent state.

    network: observation [B, ...] -> latent state [B, ...].
    state_norm: whether the latent state is brought to 0 .. 1, see `min_max_normalised`.

    >>> from torch import nn
    >>> Represent(nn.Identity(), state_norm=True)(torch.tensor([[1.0, 2.0, 5.0]]))
    tensor([[0.0000, 0.2500, 1.0000]])
    """

    def __init__(self, network: nn.Module, state_norm: bool = False) -> None:
        super().__init__()
        self.network, self.state_norm = network, state_norm

    def forward(self, observation: Tensor) -> Tensor:
        return represent(self.network, observation, self.state_norm)


class Imagine(nn.Module):
    """The step from a latent state, by an action, to the next, with the sum of rewards on the way.

    network: (latent state with the action's code [B, ...], (h, c) of [1, B, L]) -> the next ones,
        and the logits of the value prefix.
    action_encoding: action [B, ...] -> code [B, E].
    state_norm: as in `Represent`.

    >>> from raffia.algorithms.efficientzero.model import EfficientZeroModelMLP
    >>> model = EfficientZeroModelMLP(4, 2, latent_state_dim=8, lstm_hidden_size=6)
    >>> step = Imagine(model.dynamics_network, model.action_encoding)
    >>> latent, h, c, value_prefix = step(
    ...     torch.zeros(3, 8), torch.tensor([0, 1, 1]), torch.zeros(3, 6), torch.zeros(3, 6)
    ... )
    >>> latent.shape, h.shape, value_prefix.shape
    (torch.Size([3, 8]), torch.Size([3, 6]), torch.Size([3, 601]))
    """

    def __init__(
        self, network: nn.Module, action_encoding: nn.Module, state_norm: bool = False
    ) -> None:
        super().__init__()
        self.network, self.action_encoding = network, action_encoding
        self.state_norm = state_norm

    def forward(
        self,
        latent_state: Tensor,  # [B, ...]
        action: Tensor,  # [B], or [B, D] of continuous actions
        h: Tensor,  # [B, L]
        c: Tensor,  # [B, L]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The next latent state, h, c, and the value prefix's logits [B, F]."""
        code = self.action_encoding(action)
        state = (h.unsqueeze(0), c.unsqueeze(0))
        latent, (h, c), prefix = imagine(self.network, latent_state, code, state, self.state_norm)
        return latent, h.squeeze(0), c.squeeze(0), prefix


def represent(network: nn.Module, observation: Tensor, state_norm: bool) -> Tensor:
    """The latent states of observations, as `Represent` computes them."""
    latent = network(for_convolutions(observation))
    return min_max_normalised(latent) if state_norm else latent


def imagine(
    network: nn.Module,
    latent_state: Tensor,  # [B, ...]
    code: Tensor,  # [B, E]
    reward_hidden_state: tuple[Tensor, Tensor],  # h, c: each [1, B, L]
    state_norm: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """The next latent state, (h, c), and the value prefix's logits."""
    if len(code) != len(latent_state):
        raise ValueError(f"{len(code)} actions for {len(latent_state)} latent states")
    x = for_convolutions(with_action(latent_state, code))
    latent, state, prefix = network(x, reward_hidden_state)
    return (min_max_normalised(latent) if state_norm else latent), state, prefix


def with_action(
    latent_state: Tensor,  # [B, C, ...]
    code: Tensor,  # [B, E]
) -> Tensor:  # [B, C + E, ...]
    """The latent state with a plane for each number of the action's code after its channels.

    >>> with_action(torch.zeros(1, 1, 1, 2), torch.tensor([[7.0]])).tolist()
    [[[[0.0, 0.0]], [[7.0, 7.0]]]]
    """
    spatial = latent_state.shape[2:]
    planes = code.reshape(*code.shape, *(1 for _ in spatial)).expand(*code.shape, *spatial)
    return cat([latent_state, planes.to(latent_state.dtype)], 1)


def for_convolutions(x: Tensor) -> Tensor:
    """Images as convolutions in half precision want them: a pixel's channels side by side.

    What follows keeps that order. Where code is traced, the compiler chooses one.

    >>> for_convolutions(torch.zeros(2, 3, 4, 4, dtype=torch.bfloat16)).stride()
    (48, 1, 12, 3)
    """
    if x.dim() != 4 or is_traced() or not _in_half_precision(x):
        return x
    return x.contiguous(memory_format=torch.channels_last)


def _in_half_precision(x: Tensor) -> bool:
    if x.dtype == torch.bfloat16:
        return True
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def min_max_normalised(latent: Tensor) -> Tensor:
    """Each sample shifted and scaled to 0 .. 1; a range below 1e-5 is first widened by 1e-5.

    >>> min_max_normalised(torch.tensor([[1.0, 2.0, 5.0], [3.0, 3.0, 3.0]]))
    tensor([[0.0000, 0.2500, 1.0000],
            [0.0000, 0.0000, 0.0000]])
    """
    flat = latent.flatten(1)
    low = flat.amin(1, keepdim=True)
    width = flat.amax(1, keepdim=True) - low
    width = torch.where(width < 1e-5, width + 1e-5, width)
    return ((flat - low) / width).reshape(latent.shape)
