"""The categorical distribution over one-hot vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical
from torch.distributions.utils import clamp_probs


class OneHotCategorical(Categorical):
    """A categorical distribution whose values are one-hot vectors of integers.

    logits, probs: [*batch, categories], unnormalised; one of the two. A logit may be -inf. A last
        dimension of size 1 is dropped first.
    validate_args: check arguments and samples.
    As in `tensordict`, `batch_shape` lacks the categories and `event_shape` is empty. `rsample` is
    straight-through: one-hot values with the gradient of a relaxed sample at temperature 1.
    `has_rsample` is False all the same, because the values of `rsample` are floats.
    Source of the relaxed sample: Jang et al. (2017), Categorical Reparameterization with
    Gumbel-Softmax.

    >>> dist = OneHotCategorical(logits=torch.tensor([0.0, 2.0, 1.0]))
    >>> dist.mode
    tensor([0, 1, 0])
    >>> dist.log_prob(torch.tensor([0, 1, 0]))
    tensor(-0.4076)
    """

    num_params: int = 1

    def __init__(
        self,
        logits: Tensor | None = None,
        probs: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        logits, probs = _without_single_dim(logits), _without_single_dim(probs)
        super().__init__(probs=probs, logits=logits, validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> OneHotCategorical:
        """This distribution with a larger batch shape."""
        new = self._get_checked_instance(OneHotCategorical, _instance)
        return super().expand(batch_shape, _instance=new)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log of the probability of one-hot `value`; the largest element counts, [*batch]."""
        if self._validate_args and value.shape[-1:] != self.param_shape[-1:]:
            raise ValueError(
                f"a one-hot value has {self._num_events} elements in its last dimension, one for "
                f"each category; got shape {list(value.shape)}. For indices use "
                f"torch.distributions.Categorical"
            )
        if value.dtype is torch.bool:
            value = value.long()
        return super().log_prob(value.argmax(-1))

    @property
    def mean(self) -> Tensor:
        """The probabilities, [*batch, categories]."""
        return self.probs

    @property
    def variance(self) -> Tensor:
        """Variance of each element, [*batch, categories]."""
        return self.probs * (1 - self.probs)

    @property
    def mode(self) -> Tensor:
        """The most likely value; of several the first, [*batch, categories]."""
        return _one_hot(self._param.argmax(-1), self._num_events)

    @property
    def deterministic_sample(self) -> Tensor:
        """The mode, [*batch, categories]."""
        return self.mode

    def sample(self, sample_shape: Sequence[int] | None = None) -> Tensor:
        """One-hot draws of integers, [*sample_shape, *batch, categories]."""
        return _one_hot(super().sample(torch.Size(sample_shape or ())), self._num_events)

    def rsample(self, sample_shape: Sequence[int] | None = None) -> Tensor:
        """One-hot draws of floats with a gradient, [*sample_shape, *batch, categories]."""
        logits = self.logits
        shape = torch.Size(sample_shape or ()) + logits.shape
        uniform = clamp_probs(torch.rand(shape, dtype=logits.dtype, device=logits.device))
        relaxed = (logits - torch.log(-torch.log(uniform))).softmax(-1)
        hard = _one_hot(relaxed.argmax(-1), self._num_events)
        return hard + (relaxed - relaxed.detach())

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """Every one-hot value, [categories, *batch, categories]."""
        return _one_hot(super().enumerate_support(expand), self._num_events)


def rand_one_hot(values: Tensor, do_softmax: bool = True) -> Tensor:
    """Draw a one-hot vector along the last dimension.

    values: logits, [..., categories].
    do_softmax: False takes `values` for probabilities; they need not sum to 1.

    >>> rand_one_hot(torch.tensor([0.0, 1.0, 0.0]), do_softmax=False)
    tensor([0, 1, 0])
    """
    probs = values.softmax(-1) if do_softmax else values
    cumulated = probs.cumsum(-1)
    uniform = torch.rand_like(probs[..., :1])
    # Strictly below the sum in spite of rounding, so that a last category of probability 0 is safe.
    level = uniform.clamp(max=1 - torch.finfo(probs.dtype).eps) * cumulated[..., -1:]
    return _one_hot((cumulated <= level).sum(-1), probs.shape[-1])


def _one_hot(index: Tensor, num_categories: int) -> Tensor:
    """One-hot vectors as torch's `one_hot`, also in vmap; an index out of range becomes zeros."""
    categories = torch.arange(num_categories, device=index.device)
    return (index.unsqueeze(-1) == categories).long()


def _without_single_dim(values: Tensor | None) -> Tensor | None:
    return values.squeeze(-1) if values is not None and values.shape[-1:] == (1,) else values
