"""Planning over sampled actions: continuous and large action spaces, K actions at each node.

What a search calls the prior logits of a state are here the parameters of a policy, from which a
sampler draws K actions with the noise of the state's seed. A child's seed is made of its parent's
and of the choice that leads to it, so the same seed gives the same tree, whatever the batch.

Shapes: M rows, P parameters of the policy, K actions of D numbers or of one whole number.

Sources: Hubert et al. (2021), "Learning and Planning in Complex Action Spaces" (Sampled MuZero);
the LightZero project for its combination with EfficientZero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from raffia.functional.constants import constant
from raffia.functional.draws import child_seed, draw_seeds, seeded_gumbel, seeded_normal
from raffia.hints import check_choice
from raffia.search import kernels
from raffia.search.base import RecurrentFn, RecurrentOutput, RootOutput, SearchMemory
from raffia.search.check import check_seed
from raffia.search.policies import PolicyOutput
from raffia.tensordict.access import leaves
from raffia.tensordict.node import Node
from raffia.tensordict.tensorclass import is_tensorclass

SEED, ACTIONS = "sampling_seed", "sampled_actions"  # further entries of the search's embeddings
Prior = Literal["sampling", "uniform", "density"]


def sampled_policy(
    root: RootOutput,  # its prior_logits are parameters of the policy [B, P]
    recurrent_fn: RecurrentFn,  # takes actions [M, ...] and gives parameters [M, P]
    *,
    sampler: ActionSampler,
    policy: Callable[[RootOutput, RecurrentFn], PolicyOutput],  # muzero_policy or gumbel_policy
    seed: Tensor | None = None,  # int64 [B]: the draws of a root's whole tree
    prior: Prior = "sampling",
    generator: torch.Generator | None = None,  # for the seeds if not given; None: torch's own
) -> PolicyOutput:
    """Plan over sampled actions; `action` is the chosen one, `action_weights` are of the K sampled.

    The K actions of the root are `tree.data["actions"][:, 0]`: with `sampler.log_density` of them
    and `action_weights` as the target, they make the loss of the policy.

    >>> import functools
    >>> from raffia.search import GaussianSampler, RecurrentOutput, RootOutput
    >>> from raffia.search import gumbel_policy, sampled_policy
    >>> def reach(embedding, action):  # the closer to 0.5 the better
    ...     rows = len(action)
    ...     reward = 1 - (action[:, 0] - 0.5).abs()
    ...     policy = torch.tensor([0.0, 1.0]).expand(rows, 2)  # mean, standard deviation
    ...     return RecurrentOutput(reward, torch.zeros(rows), policy), embedding
    >>> root = RootOutput(torch.tensor([[0.0, 1.0]] * 3), torch.zeros(3), torch.zeros(3, 1))
    >>> plan = sampled_policy(
    ...     root, reach, sampler=GaussianSampler(16), seed=torch.tensor([1, 2, 3]),
    ...     policy=functools.partial(gumbel_policy, num_simulations=32, gumbel_scale=0.0,
    ...                              discount=0.0))
    >>> plan.action.shape, bool(((plan.action - 0.5).abs() < 0.2).all())
    (torch.Size([3, 1]), True)
    """
    if seed is None:
        seed = draw_seeds(len(root.prior_logits), generator).to(root.prior_logits.device)
    return policy(*with_sampled_actions(root, recurrent_fn, sampler, seed, prior=prior))


def with_sampled_actions(
    root: RootOutput,  # its prior_logits are parameters of the policy [B, P]
    recurrent_fn: RecurrentFn,  # takes actions [M, ...] and gives parameters [M, P]
    sampler: ActionSampler,
    seed: Tensor,  # int64 [B]
    *,
    prior: Prior = "sampling",
) -> tuple[RootOutput, RecurrentFn]:
    """The root and the recurrent function of a search over K sampled actions at each node.

    prior: what the search takes for the prior of the K actions. They were drawn from the policy pi,
        so likely actions are frequent among them already; a weight of pi would count pi twice.
        "sampling": the weights with which the K stand for pi: all equal where they were drawn
        independently of each other; where they were drawn without replacement, pi over the
        probability to be among them (all of pi where all actions are).
        "uniform": 1/K. "density": pi, rescaled to the K.
    Embeddings get two further entries, "sampling_seed" [M] and "sampled_actions" [M, K, ...], which
    lie where the embedding does and which the model does not see.

    >>> from raffia.search import CategoricalSampler, RecurrentOutput, RootOutput
    >>> from raffia.search import with_sampled_actions
    >>> def model(embedding, action):
    ...     return RecurrentOutput(0 * action, 0 * action, embedding.expand(-1, 9)), embedding
    >>> root = RootOutput(torch.zeros(2, 9), torch.zeros(2), torch.zeros(2, 1))
    >>> few, few_fn = with_sampled_actions(
    ...     root, model, CategoricalSampler(4), seed=torch.tensor([3, 3]))
    >>> few.actions
    tensor([[1, 2, 5, 7],
            [1, 2, 5, 7]])
    """
    if isinstance(sampler, type) or not hasattr(sampler, "sample"):
        what = f"the class {sampler.__name__}" if isinstance(sampler, type) else repr(sampler)
        raise TypeError(f"sampler is {what}; pass an instance, such as GaussianSampler(20)")
    check_choice("prior", prior, get_args(Prior))
    if root.actions is not None:
        raise ValueError(
            "root.actions is set, so the actions of this root are sampled already; pass the "
            "model's own root, whose prior_logits are the parameters of its policy"
        )
    batch = len(root.prior_logits)
    check_seed(seed, batch)
    actions, logits, mask = _draw(sampler, root.prior_logits, seed, root.mask, prior)
    device = _device_of(root.embedding, root.prior_logits.device)
    embedding = _put(root.embedding, seed.to(device), actions.to(device))
    over_samples = root._replace(
        prior_logits=logits, mask=mask, actions=actions, embedding=embedding
    )
    return over_samples, _OverSamples(recurrent_fn, sampler, prior, root.prior_logits, device)


class _OverSamples:
    """The recurrent function over sampled actions."""

    writes_actions = True  # in the memory of a search, see `BoundModel`

    def __init__(
        self,
        recurrent_fn: RecurrentFn,
        sampler: ActionSampler,
        prior: Prior,
        parameters: Tensor,  # of the root's policy
        device: torch.device,  # of embeddings
    ) -> None:
        self._recurrent_fn, self._sampler, self._prior = recurrent_fn, sampler, prior
        self._parameters, self._device = parameters, device
        # It predicts prefixes or rewards as the model itself does.
        self.predicts_prefixes = getattr(recurrent_fn, "predicts_prefixes", False)
        self.workspace_key = id(recurrent_fn), id(sampler), prior, parameters.shape[1]

    def __call__(self, embedding: Any, action: Tensor) -> tuple[RecurrentOutput, Any]:
        own, seed, known = _take(embedding)
        output, child = self._recurrent_fn(own, action)
        _check_dtype(self._parameters, output.prior_logits)
        seed = child_seed(seed, _which(known, action.to(self._device)))
        policy = output.prior_logits, seed, output.mask
        actions, logits, mask = _draw(self._sampler, *policy, self._prior)
        output = output._replace(prior_logits=logits, mask=mask, actions=actions)
        return output, _put(child, seed, actions.to(self._device))

    def bind(self, memory: SearchMemory) -> BoundSampler | None:
        """One compiled step a simulation, of a model that has one; see `BoundModel`."""
        bind, sampler = getattr(self._recurrent_fn, "bind", None), self._sampler
        if bind is None or type(sampler) is not GaussianSampler or self._prior == "density":
            return None
        if not isinstance(memory.embeddings, Node):
            return None
        seed, actions = memory.embeddings[SEED], memory.embeddings[ACTIONS]  # of all nodes
        if actions.dim() != 3 or not all(map(_is_float32_here, (actions, memory.prior_logits))):
            return None
        chosen = actions.new_zeros(len(memory.action), actions.shape[-1])
        parameters = actions.new_zeros(len(memory.action), self._parameters.shape[1])
        model = bind(replace(memory, action=chosen, prior_logits=parameters))
        if not hasattr(model, "native"):
            return None
        record = kernels.sampling.SamplingRecord(
            **sampler.numbers(actions.shape[-1]),
            seed=seed,
            actions=actions,
            parent_row=memory.parent_row,
            node_row=memory.node_row,
            choice=memory.action,
            chosen=chosen,
            parameters=parameters,
            prior_logits=memory.prior_logits,
            num_samples=actions.shape[1],
            size=actions.shape[2],
        )
        return BoundSampler(actions, model, record)


@dataclass(frozen=True)
class BoundSampler:
    """The step of one simulation: the chosen actions for the model, its answer, the next draws."""

    actions: Tensor  # [R, K, D]: those of each node, in the search's memory
    model: Any  # what a model's `bind` returned, with `native`
    record: kernels.sampling.SamplingRecord

    def __call__(self, rows: int) -> None:
        kernels.sampling.run(self.native()[1], rows)

    def native(self) -> tuple[int, int]:
        """The step's address and context, see raffia.jit.kernel; the model's hold in one thread."""
        model, context = self.model.native()
        self.record.update(model=model, context=context)
        return kernels.sampling.step_address(), self.record.address


def _is_float32_here(array: Tensor) -> bool:
    return array.dtype == torch.float32 and array.is_cpu and array.is_contiguous()


def _check_dtype(root: Tensor, node: Tensor) -> None:
    if root.dtype != node.dtype:
        raise TypeError(
            f"root.prior_logits (the policy's parameters) has dtype {root.dtype}, but "
            f"recurrent_fn returns {node.dtype}; both must be the same: pass for example "
            f"root._replace(prior_logits=root.prior_logits.to({node.dtype}))"
        )


def _draw(
    sampler: ActionSampler, parameters: Tensor, seed: Tensor, mask: Tensor | None, prior: Prior
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw K actions for each row; return them, their prior logits and which of them are legal."""
    samples = sampler.sample(parameters, seed.to(parameters.device), mask)
    if prior == "density":
        logits = sampler.log_density(parameters, samples.actions)
    elif prior == "sampling":
        logits = samples.log_weight
    else:
        logits = torch.zeros_like(samples.log_weight)
    return samples.actions, logits, samples.mask


def _which(
    known: Tensor,  # [M, K, ...]
    action: Tensor,  # [M, ...]
) -> Tensor:
    """Index of the taken action among the K [M]; the first of equal ones.

    Seeds are made of it and not of the action's bits, so that a last bit changes no draw.
    """
    same = known == action.unsqueeze(1)
    return same.flatten(2).all(-1).int().argmax(-1) if same.ndim > 2 else same.int().argmax(-1)


def _device_of(embedding: Any, default: torch.device) -> torch.device:
    """Device of the embedding, which may be another than the trees'; what is carried with it
    goes along, since a search moves the rows of all of it together."""
    found = leaves(embedding) if isinstance(embedding, Node) else tree_leaves(embedding)
    return next((leaf.device for leaf in found if isinstance(leaf, Tensor)), default)


def _put(embedding: Any, seed: Tensor, actions: Tensor) -> Any:
    """The model's embedding with seeds and actions added, in a container of the same kind."""
    added = {SEED: seed, ACTIONS: actions}
    if isinstance(embedding, Node):
        # neither a tensorclass nor a container of more batch dimensions takes these entries
        if len(embedding.batch_size) > 1 or is_tensorclass(embedding):
            return embedding, seed, actions
        return embedding.copy().update(added)
    return {**embedding, **added} if isinstance(embedding, dict) else (embedding, seed, actions)


def _take(carried: Any) -> tuple[Any, Tensor, Tensor]:
    """The embedding, seeds and actions that were passed to `_put`."""
    if isinstance(carried, tuple):
        return carried
    if isinstance(carried, Node):
        own: Any = carried.exclude(SEED, ACTIONS)
    else:
        own = {name: entry for name, entry in carried.items() if name not in (SEED, ACTIONS)}
    return own, carried[SEED], carried[ACTIONS]


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
        if self.std is not None and not bool((torch.as_tensor(self.std, device="cpu") > 0).all()):
            raise ValueError(f"std={self.std} must be above 0, or None for the policy's own")

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
                    f"the mask has shape {list(mask.shape)}; with continuous actions it must be "
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

    def numbers(self, size: int) -> dict[str, Tensor | None]:
        """The fixed numbers, float32 [D] each: "std", "low" and "width", between the bounds."""
        low, width = (None, None) if self.low is None else self._bounds()
        std = None if self.std is None else constant(self.std, _float32())
        return {
            name: None if number is None else number.expand(size).contiguous()
            for name, number in (("std", std), ("low", low), ("width", width))
        }

    def _mean_and_std(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        if self.std is not None:
            std = constant(self.std, parameters)
            if std.shape not in ((), parameters.shape[-1:]):
                raise ValueError(
                    f"std has shape {list(std.shape)}, but the policy has {parameters.shape[-1]} "
                    "parameters, which are means if std is fixed: std must be one number or "
                    f"[{parameters.shape[-1]}]"
                )
            return parameters, std.expand_as(parameters)
        if parameters.shape[-1] % 2:
            raise ValueError(
                f"the policy has {parameters.shape[-1]} parameters, an odd number, but they "
                "must be D means followed by D standard deviations; if they are means alone, fix "
                f"GaussianSampler({self.num_samples}, std=...)"
            )
        mean, std = parameters.chunk(2, -1)
        return mean, std

    def _bounds(self, like: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The lower bound and the width, of the dtype and device of a tensor."""
        like = _float32() if like is None else like
        low, high = constant(self.low, like), constant(self.high, like)
        width = high - low
        # An action can be low + width, and this sum must not be rounded to more than the bound.
        shorter = width * (1 - torch.finfo(width.dtype).eps)
        return low, torch.where(low + width > high, shorter, width)


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
    positive = "they must be above 0 and finite: apply exp or softplus to the network's output"
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
        raise ValueError(
            f"num_samples={num} must be at least 1; 20 is common for continuous actions"
        )


def _float32() -> Tensor:
    """An empty tensor whose dtype and device numbers are to have."""
    return torch.empty(0, dtype=torch.float32, device="cpu")
