"""BatchNorm for rows of several steps of a segment, with statistics of each step.

The segments of a batch are drawn at random, whereas the steps of one follow from each other and
behind each other go further from the observations. So statistics are taken over the segments, for
each step apart, as if the network were called step by step; but the layers before and behind see
all rows at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from raffia.functional.constants import constant


class Steps:
    """The number of steps of each segment that rows are, which all layers of a network read.

    >>> steps = Steps()
    >>> with steps.of(3):
    ...     steps.num
    3
    """

    def __init__(self) -> None:
        self.num = 1

    @contextmanager
    def of(self, num: int) -> Iterator[None]:
        """Set the number of steps to `num` within the context."""
        self.num = num
        try:
            yield
        finally:
            self.num = 1


class StepBatchNorm(_BatchNorm):
    """BatchNorm of rows [B * T, C, ...] in which the T steps of a segment stand together.

    layer: whose parameters and buffers it is from now on.

    >>> torch.manual_seed(0)
    <torch._C.Generator ...>
    >>> x, steps = torch.randn(4, 3, 2), Steps()
    >>> layer = StepBatchNorm(nn.BatchNorm1d(2), steps)
    >>> with steps.of(3):
    ...     found = layer(x.flatten(0, 1)).unflatten(0, (4, 3))
    >>> torch.testing.assert_close(found[:, 1], nn.BatchNorm1d(2)(x[:, 1]))
    """

    def __init__(self, layer: _BatchNorm, steps: Steps) -> None:
        super().__init__(layer.num_features, layer.eps, layer.momentum)
        self.weight, self.bias = layer.weight, layer.bias
        for name, buffer in layer.named_buffers():
            setattr(self, name, buffer)
        self.steps = steps
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B * T, C, ...] -> the same."""
        if not self.training:
            return super().forward(x)
        num = self.steps.num
        # T steps of C channels are T * C channels of B rows: the same memory
        wide = x.reshape(len(x) // num, num * self.num_features, *x.shape[2:])
        mean, var = _times(self.running_mean, num), _times(self.running_var, num)
        weight, bias = _times(self.weight, num), _times(self.bias, num)
        if num == 1:
            mean, var = mean.clone(), var.clone()
        # with a momentum of 1 the statistics of these rows replace what stood there; the running
        # ones themselves would be saved for backward, and the next call writes into them
        out = batch_norm(wide, mean, var, weight, bias, True, 1.0, self.eps)
        self._remember(mean, var, num)
        return out.reshape(x.shape)

    @torch.no_grad()
    def _remember(self, mean: Tensor, var: Tensor, num: int) -> None:
        """Move the running statistics by those of T steps, one after the other."""
        assert self.momentum is not None and self.num_batches_tracked is not None
        assert self.running_mean is not None and self.running_var is not None
        keep = 1 - self.momentum
        if num == 1:
            self.running_mean.mul_(keep).add_(mean, alpha=self.momentum)
            self.running_var.mul_(keep).add_(var, alpha=self.momentum)
        else:
            weights = [self.momentum * keep**k for k in reversed(range(num))]
            weight = constant(weights, mean)
            self.running_mean.mul_(keep**num).add_(weight @ mean.view(num, -1))
            self.running_var.mul_(keep**num).add_(weight @ var.view(num, -1))
        self.num_batches_tracked.add_(num)

    def _check_input_dim(self, input: Tensor) -> None:
        """Allow any number of dimensions."""


def _times(channels: Tensor | None, num: int) -> Tensor:  # [C] -> [num * C]
    assert channels is not None
    return channels if num == 1 else channels.expand(num, -1).reshape(-1)


def step_norms(model: nn.Module) -> Steps | None:
    """Replace each BatchNorm by `StepBatchNorm`, under the same names; returns the number of steps
    to set.

    None, and nothing is changed, if there is one that can't be replaced: without parameters or
    running statistics, or of another kind.

    >>> model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    >>> names = list(model.state_dict())
    >>> step_norms(model) is not None, list(model.state_dict()) == names
    (True, True)
    """
    found = {name: layer for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)}
    if not all(map(_is_plain, found.values())):
        return None
    steps = Steps()
    for name, layer in found.items():
        model.set_submodule(name, StepBatchNorm(layer, steps))
    return steps


def _is_plain(layer: _BatchNorm) -> bool:
    known = type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d)
    return known and bool(layer.affine and layer.track_running_stats) and layer.momentum is not None
