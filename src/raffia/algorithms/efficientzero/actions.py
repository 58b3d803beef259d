"""Encodings of actions for the dynamics network."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from raffia.hints import check_choice


class DiscreteActions(nn.Module):
    """The encoding of `size` actions: a row of numbers for each.

    encoding: "one_hot" gives `size` numbers, "not_one_hot" the one number action / size.

    >>> DiscreteActions(3)(torch.tensor([2, 0]))
    tensor([[0., 0., 1.],
            [1., 0., 0.]])
    >>> DiscreteActions(4, "not_one_hot")(torch.tensor([2, 0]))
    tensor([[0.5000],
            [0.0000]])
    """

    codes: Tensor  # [size, dim], the code of each action

    def __init__(self, size: int, encoding: str = "one_hot") -> None:
        super().__init__()
        _check_size(size)
        _check_encoding(encoding)
        codes = torch.eye(size) if encoding == "one_hot" else torch.arange(size)[:, None] / size
        self.register_buffer("codes", codes, persistent=False)  # no part of a checkpoint
        self.size, self.encoding, self.dim = size, encoding, codes.shape[1]

    def forward(self, action: Tensor) -> Tensor:
        """action: integers [B] or [B, 1] -> [B, dim]."""
        if action.is_floating_point() or action.dtype is torch.bool:
            raise TypeError(
                f"discrete actions must be integers, one for each row, from 0 to {self.size - 1}; "
                f"got {action.dtype}: pass action.long(), or build the model with "
                "continuous_action_space=True"
            )
        flat = action.squeeze(-1) if action.dim() == 2 and action.shape[1] == 1 else action
        if flat.dim() != 1:
            raise ValueError(f"discrete actions must have shape [B]; got {list(action.shape)}")
        try:
            return embedding(flat.long(), self.codes)
        except IndexError as error:  # found by the lookup itself, on the CPU
            low, high = int(action.min()), int(action.max())
            raise ValueError(
                f"actions must be from 0 to {self.size - 1}; got actions from {low} to {high}. "
                "action_space_size is the number of actions"
            ) from error

    def extra_repr(self) -> str:
        return f"{self.size}, {self.encoding!r}"


class ContinuousActions(nn.Module):
    """The encoding of continuous actions: rows of `size` numbers as they are.

    >>> ContinuousActions(2)(torch.tensor([[0.5, -1.0]]))
    tensor([[ 0.5000, -1.0000]])
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        _check_size(size)
        self.size = self.dim = size

    def forward(self, action: Tensor) -> Tensor:
        """action: floats [B, size] -> the same."""
        if action.dim() != 2 or action.shape[1] != self.size or not action.is_floating_point():
            raise ValueError(
                f"continuous actions must be floats of shape [B, {self.size}]; got {action.dtype} "
                f"of shape {list(action.shape)}"
            )
        return action

    def extra_repr(self) -> str:
        return f"{self.size}"


def action_encoding(
    size: int, continuous: bool = False, encoding: str = "one_hot"
) -> DiscreteActions | ContinuousActions:
    """The encoding of `size` actions, or of continuous actions of `size` numbers.

    >>> action_encoding(3, encoding="not_one_hot")
    DiscreteActions(3, 'not_one_hot')
    """
    _check_encoding(encoding)  # a wrong name is a mistake for continuous actions, too
    return ContinuousActions(size) if continuous else DiscreteActions(size, encoding)


def _check_size(size: int) -> None:
    if size < 1:
        raise ValueError(
            f"action_space_size={size} must be at least 1: it is the number of discrete actions, "
            "or the size of a continuous action"
        )


def _check_encoding(encoding: str) -> None:
    check_choice("discrete_action_encoding_type", encoding, ("one_hot", "not_one_hot"))
