"""Samplers: K actions of a policy, drawn with the noise of seeds.

Shapes: M rows, P parameters of the policy, K actions of D numbers or of one whole number.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from raffia.functional.constants import constant
from raffia.functional.draws import seeded_gumbel, seeded_normal


class Samples(NamedTuple):
    """Sampled actions, and how much each counts.

    >>> Samples(torch.zeros(2, 5), torch.zeros(2, 5)).mask is None
    True
    """

    actions: Tensor  # [M, K, ...]
    log_weight: Tensor  # [M, K]: with it the actions stand for the policy they were drawn from
    mask: Tensor | None = None  # [M, K] bool: legal; None: all are


class ActionSampler(Protocol):
    """A distribution over actions: draws from a policy with given parameters, and log-densities.

    >>> class Middle:  # one action, the mean
    ...     def sample(self, parameters, seed, mask=None):
    ...         return Samples(parameters.unsqueeze(1), torch.zeros(len(parameters), 1), mask)
    ...     def log_density(self, parameters, actions):
    ...         return torch.zeros(actions.shape[:2])
    >>> Middle().sample(torch.ones(2, 3), torch.tensor([0, 1])).actions.shape
    torch.Size([2, 1, 3])
    """

    def sample(self, parameters: Tensor, seed: Tensor, mask: Tensor | None = None) -> Samples:
        """K actions for each row of parameters [M, P] and seeds int64 [M]."""

    def log_density(self, parameters: Tensor, actions: Tensor) -> Tensor:
        """log pi(action) of actions [M, K, ...], float32 [M, K], with gradients."""


@dataclass(frozen=True)
class GaussianSampler:
    """Independent draws from a normal distribution, squashed into bounds if there are any.

        action = mean + std * noise, or low + (high - low) (1 + tanh(mean + std * noise)) / 2

    The parameters are means, then standard deviations [M, 2 D], or with a fixed `std` the means
    [M, D]. Both must be finite. A mask is [M, 1]: False where the episode has ended.

    >>> sampler = GaussianSampler(3, low=-2.0, high=2.0)
    >>> parameters = torch.tensor([[0.0, 0.0, 1.0, 0.5]])  # two means, two standard deviations
    >>> samples = sampler.sample(parameters, seed=torch.tensor([7]))
    >>> samples.actions.shape, bool(samples.actions.abs().max() < 2)
    (torch.Size([1, 3, 2]), True)
    >>> sampler.log_density(parameters, samples.actions).shape
    torch.Size([1, 3])
    """

    num_samples: int  # K
    std: float | Tensor | None = None  # replaces the policy's own: one number for all D, or [D]
    low: float | Tensor | None = None  # lower bound, one number for all D, or [D]
    high: float | Tensor | None = None

    def __post_init__(self) -> None:
        _check_num_samples(self.num_samples)
        if (self.low is None) != (self.high is None):
            raise ValueError(
                f"low={self.low} and high={self.high}: actions are squashed between two bounds; "
                "pass both, or neither for no bounds"
            )
        if self.low is not None and not bool((self._bounds()[1] > 0).all()):
            raise ValueError(f"low={self.low} must lie below high={self.high}")
        if self.std is not None and not bool((torch.as_tensor(self.std) > 0).all()):
            raise ValueError(f"std={self.std} must be above 0, or None: it is the policy's own")

    def sample(self, parameters: Tensor, seed: Tensor, mask: Tensor | None = None) -> Samples:
        """K actions [M, K, D], all of the same weight."""
        mean, std = self._mean_and_std(parameters)
        _check_mean_and_std(mean, std)
        rows, size = mean.shape
        noise = seeded_normal(seed, self.num_samples * size).view(rows, self.num_samples, size)
        actions = mean.unsqueeze(1) + std.unsqueeze(1) * noise
        if self.low is not None:
            low, width = self._bounds(actions)
            actions = low + width * (actions.tanh() + 1) / 2
        weight = mean.new_zeros(rows, self.num_samples)
        if mask is not None:
            if mask.shape != (rows, 1):
                raise ValueError(
                    f"the mask has shape {list(mask.shape)}; with continuous actions it is "
                    f"[rows, 1] = {[rows, 1]}, False where the episode has ended"
                )
            mask = mask.expand(rows, self.num_samples)
        return Samples(actions, weight, mask)

    def log_density(self, parameters: Tensor, actions: Tensor) -> Tensor:
        """log pi(action) [M, K]; on a bound, that of a point 5e-7 of the width within it."""
        mean, std = (part.unsqueeze(1) for part in self._mean_and_std(parameters))
        point, stretch = actions, torch.zeros_like(mean)
        if self.low is not None:
            low, width = self._bounds(actions)
            point = torch.atanh((2 * (actions - low) / width - 1).clamp(-1 + 1e-6, 1 - 1e-6))
            # log of d action / d point; 1 - tanh^2 in the form that does not cancel
            slope = 2 * (math.log(2) - point - functional.softplus(-2 * point))
            stretch = slope + (width / 2).log()
        normal = -0.5 * ((point - mean) / std) ** 2 - std.log() - 0.5 * math.log(2 * math.pi)
        return (normal - stretch).sum(-1)

    def _mean_and_std(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        if self.std is not None:
            std = constant(self.std, parameters)
            if std.shape not in ((), parameters.shape[-1:]):
                raise ValueError(
                    f"std has shape {list(std.shape)} and the policy has {parameters.shape[-1]} "
                    "parameters; with a fixed std these are means: std must be one number or "
                    f"[{parameters.shape[-1]}]"
                )
            return parameters, std.expand_as(parameters)
        if parameters.shape[-1] % 2:
            raise ValueError(
                f"the policy has {parameters.shape[-1]} parameters, an odd number: they are D "
                "means, then D standard deviations; for means alone fix "
                f"GaussianSampler({self.num_samples}, std=...)"
            )
        mean, std = parameters.chunk(2, -1)
        return mean, std

    def _bounds(self, like: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The lower bound and the width, of the dtype and device of a tensor."""
        like = torch.empty(0) if like is None else like
        low = constant(self.low, like)
        return low, constant(self.high, like) - low


@dataclass(frozen=True)
class CategoricalSampler:
    """K distinct actions out of A, drawn without replacement: the K highest logits + Gumbel noise.

    The parameters are logits [M, A]; a mask [M, A] and logits of -inf rule actions out. The actions
    are int64 [M, min(K, A)] in rising order; with K >= A they are all of 0..A-1. The weight of an
    action is pi over the probability that it exceeds the highest score left out.

    Sources: Kool, van Hoof, Welling (2019), "Stochastic Beams and Where to Find Them", ICML (the
    draw; weights: section 4.2).

    >>> sampler = CategoricalSampler(2)
    >>> samples = sampler.sample(torch.tensor([[9.0, 0.0, 9.0, 0.0]]), torch.tensor([5]))
    >>> samples.actions
    tensor([[0, 2]])
    >>> sampler.log_density(torch.zeros(1, 4), samples.actions).exp()
    tensor([[0.2500, 0.2500]])
    """

    num_samples: int  # K

    def __post_init__(self) -> None:
        _check_num_samples(self.num_samples)

    def sample(self, parameters: Tensor, seed: Tensor, mask: Tensor | None = None) -> Samples:
        """K actions [M, min(K, A)], their weights, and whether they are legal."""
        logits = parameters if mask is None else parameters.masked_fill(~mask, -torch.inf)
        num_actions = logits.shape[-1]
        num = min(self.num_samples, num_actions)
        some = logits.isneginf().all(-1, keepdim=True)  # an ended game: no action at all
        log_pi = logits.masked_fill(some, 0.0).log_softmax(-1).masked_fill(some, -torch.inf)
        scores = log_pi + seeded_gumbel(seed, num_actions)
        best = scores.topk(min(num + 1, num_actions), -1)
        actions = best.indices[:, :num].sort(-1).values
        log_pi = log_pi.gather(-1, actions)
        legal = ~log_pi.isneginf()
        weight = log_pi
        if num < num_actions:
            # P(log pi + Gumbel > bound) = 1 - exp(-exp(log pi - bound))
            bound = best.values[:, num:].clamp_min(torch.finfo(scores.dtype).min)
            chance = -torch.expm1(-(log_pi - bound).exp())
            weight = (log_pi - chance.log()).masked_fill(~legal, -torch.inf)
        return Samples(actions, weight, None if bool(legal.all()) else legal)

    def log_density(self, parameters: Tensor, actions: Tensor) -> Tensor:
        """log pi(action) [M, K]."""
        return parameters.log_softmax(-1).gather(-1, actions)


def _check_mean_and_std(mean: Tensor, std: Tensor) -> None:
    if bool(((mean.abs() < math.inf) & (std > 0) & (std < math.inf)).all()):
        return
    positive = "they must be above 0 and finite: take the exponential or softplus of a network's"
    for name, numbers, fits, hint in (
        ("means", mean, mean.isfinite(), "the policy's parameters must be finite"),
        ("standard deviations", std, (std > 0) & std.isfinite(), positive),
    ):
        unfit = ~fits.all(-1)
        if bool(unfit.any()):
            row = int(unfit.nonzero()[0])
            raise ValueError(f"the {name} of row {row} are {numbers[row].tolist()}: {hint}")


def _check_num_samples(num: int) -> None:
    if num < 1:
        raise ValueError(f"num_samples={num} must be at least 1; 20 is common for continuous ones")
