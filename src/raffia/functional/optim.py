"""Optimisers as pure functions on trees of tensors, and schedules of their rates.

Leaves [P, ...] and rates [P] are P members, each with separate rates. A schedule is a factor of a
rate as a function of the number of updates, elementwise: a step [P] gives factors [P]. Products of
schedules are schedules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from raffia.functional.trees import aligned_leaves, is_traced, over_leaf
from raffia.hints import check_range

Tree = Any  # of tensors: a TensorDict, a dict, ...
Rate = float | Tensor  # the same for all, or [P] for P members
Leaves = list[Tensor]


class Update(Protocol):
    """The call of an optimiser.

    >>> update: Update = sgd(momentum=0.0).update
    >>> params, grads = {"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0])}
    >>> update(params, grads, {"count": torch.tensor(0)}, learning_rate=0.25)
    ({'w': tensor([0.5000])}, {'count': tensor(1)})
    """

    def __call__(
        self,
        params: Tree,
        grads: Tree,
        opt: Tree,
        *,
        learning_rate: Rate,
        weight_decay: Rate | None = None,
    ) -> tuple[Tree, Tree]:
        """Parameters and the optimiser's state after one step.

        A plain call writes to the memory of `params` and `opt` and gives them back; within
        `torch.vmap` and `torch.compile`, where leaves are strided views, and of `sgd` in half
        precision on a CPU, the results are new.
        Gradients are only read.

        weight_decay: `None` for the one that the optimiser was made with. A plain call looks at
            the number: best not a tensor on a GPU, which would be waited for.
        """


@dataclass(frozen=True)
class Optimizer:
    """An optimiser: `init` makes its state, a tree, and `update` a step of the parameters.

    >>> optimizer = adamw(weight_decay=0.0)
    >>> params = TensorDict(weight=torch.tensor([1.0, -1.0]))
    >>> opt = optimizer.init(params)
    >>> grads = TensorDict(weight=torch.tensor([3.0, 0.1]))
    >>> params, opt = optimizer.update(params, grads, opt, learning_rate=0.5)
    >>> params["weight"], opt["count"]
    (tensor([ 0.5000, -1.5000]), tensor(1))
    """

    init: Callable[[Tree], Tree]  # params -> opt
    update: Update


def adamw(
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> Optimizer:
    """Adam with decoupled weight decay; with a decay of 0 it is Adam.

        m <- b1 m + (1 - b1) g
        v <- b2 v + (1 - b2) g^2
        p <- p - lr wd p - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

    Equals `torch.optim.AdamW`. Source: Loshchilov & Hutter (2019), algorithm 2.

    >>> adamw().init({"w": torch.ones(2)})
    {'count': tensor(0), 'mean': {'w': tensor([0., 0.])}, 'square': {'w': tensor([0., 0.])}}
    """
    for name, value in (("beta1", beta1), ("beta2", beta2)):
        if not 0 <= value < 1:
            raise ValueError(f"adamw({name}={value}): {name} must be in 0..1, and below 1")

    def kernel(
        p: Leaves, g: Leaves, slots: list[Leaves], count: Tensor, rate: Any, decay: float
    ) -> None:
        mean, square = slots
        torch._fused_adamw_(
            p, g, mean, square, [], [count.float()] * len(p), lr=rate, beta1=beta1, beta2=beta2,
            eps=eps, weight_decay=decay, amsgrad=False, maximize=False,
        )  # fmt: skip

    def formula(
        p: Tensor, g: Tensor, slots: list[Tensor], count: Tensor, rate: Tensor, decay: Rate
    ) -> tuple[Tensor, list[Tensor]]:
        # writing to what was made here spares memory, which costs more than the arithmetic
        mean = torch.add(beta1 * slots[0], g, alpha=1 - beta1)
        square = torch.addcmul(beta2 * slots[1], g, g, value=1 - beta2)
        size = (square / _one_minus_power(beta2, count)).sqrt_().add_(eps)
        change = (mean * (rate / _one_minus_power(beta1, count))).div_(size)
        return p * (1 - rate * decay) - change, [mean, square]

    return _optimizer(("mean", "square"), kernel, formula, weight_decay)


def sgd(
    momentum: float = 0.9,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> Optimizer:
    """Gradient descent with momentum.

        g <- g + wd p
        b <- momentum b + g
        p <- p - lr b, or p - lr (g + momentum b) with `nesterov`

    Equals `torch.optim.SGD` without dampening. Source: Sutskever et al. (2013), section 2.

    >>> sgd().init({"w": torch.ones(2)})
    {'count': tensor(0), 'momentum': {'w': tensor([0., 0.])}}
    """
    if not 0 <= momentum < 1:
        raise ValueError(f"sgd(momentum={momentum}): momentum must be in 0..1, and below 1")
    if nesterov and not momentum:
        raise ValueError("sgd(nesterov=True) needs a momentum, such as sgd(0.9, nesterov=True)")

    def kernel(
        p: Leaves, g: Leaves, slots: list[Leaves], count: Tensor, rate: Any, decay: float
    ) -> None:
        torch._fused_sgd_(
            p, g, *(slots or [[]]), weight_decay=decay, momentum=momentum, lr=rate,
            dampening=0.0, nesterov=nesterov, maximize=False, is_first_step=False,
        )  # fmt: skip

    def formula(
        p: Tensor, g: Tensor, slots: list[Tensor], count: Tensor, rate: Tensor, decay: Rate
    ) -> tuple[Tensor, list[Tensor]]:
        g = g + decay * p
        slots = [momentum * slot + g for slot in slots]
        return p - rate * (g + momentum * slots[0] if nesterov else [g, *slots][-1]), slots

    # torch 2.13's kernel mixes up the elements of half precision on a CPU, from 16 of them on.
    names = ("momentum",) if momentum else ()
    return _optimizer(names, kernel, formula, weight_decay, takes_halves_on_cpu=False)


Kernel = Callable[[Leaves, Leaves, list[Leaves], Tensor, Any, float], None]
Formula = Callable[
    [Tensor, Tensor, list[Tensor], Tensor, Tensor, Rate], tuple[Tensor, list[Tensor]]
]


def _optimizer(
    names: Sequence[str],  # of the tensors stored for each parameter
    kernel: Kernel,  # writes to all leaves of one member in one pass over memory
    formula: Formula,  # the same for one leaf, as new tensors; rates broadcast over its members
    default_decay: float,
    *,
    takes_halves_on_cpu: bool = True,  # whether the kernel does
) -> Optimizer:
    width = 1 + len(names)

    def init(params: Tree) -> Tree:
        first = next(iter(pytree.tree_leaves(params)), torch.zeros(()))
        slots = {name: pytree.tree_map(torch.zeros_like, params) for name in names}
        return {"count": first.new_zeros((), dtype=torch.int64), **slots}

    def update(
        params: Tree,
        grads: Tree,
        opt: Tree,
        *,
        learning_rate: Rate,
        weight_decay: Rate | None = None,
    ) -> tuple[Tree, Tree]:
        decay = default_decay if weight_decay is None else weight_decay
        p, g, *slots = aligned_leaves(params, grads, *(opt[name] for name in names))
        _check_rates(p, learning_rate, decay)
        if is_traced():
            return by_formula(params, p, g, slots, opt["count"], learning_rate, decay)
        with torch.no_grad():
            if not _fits_kernel(p, slots) or not takes_halves_on_cpu and _is_half_on_cpu(p[0]):
                return by_formula(params, p, g, slots, opt["count"], learning_rate, decay)
            count = opt["count"].add_(1)
            g = [
                x
                if x.stride() == leaf.stride() and x.dtype == leaf.dtype
                else torch.empty_like(leaf).copy_(x)
                for x, leaf in zip(g, p, strict=True)
            ]
            for member in _members(p, g, slots, count, learning_rate, decay):
                kernel(*member)
        return params, opt

    def by_formula(
        params: Tree,
        p: Leaves,
        g: Leaves,
        slots: list[Leaves],
        count: Tensor,
        rate: Rate,
        decay: Rate,
    ) -> tuple[Tree, Tree]:
        count = count + 1
        rate = torch.as_tensor(rate, dtype=torch.float32, device=count.device)
        rows = []
        for leaf, grad, *moments in zip(p, g, *slots, strict=True):
            shrink = over_leaf(decay, leaf) if isinstance(decay, Tensor) else decay
            new, moments = formula(
                leaf, grad, moments, over_leaf(count, leaf), over_leaf(rate, leaf), shrink
            )
            rows.append([x.to(leaf.dtype) for x in (new, *moments)])  # rates [P] would widen it
        structure = pytree.tree_structure(params)
        new_params, *trees = (structure.unflatten([row[i] for row in rows]) for i in range(width))
        return new_params, {"count": count} | dict(zip(names, trees, strict=True))

    return Optimizer(init, update)


def _one_minus_power(beta: float, count: Tensor) -> Tensor:
    """1 - beta^count; the plain difference would lose 4 of 7 digits in the first steps."""
    return -torch.expm1(count * (math.log(beta) if beta else -math.inf))


def _check_rates(leaves: Leaves, *rates: Rate) -> None:
    for rate in rates:
        if isinstance(rate, Tensor) and rate.dim():
            for leaf in leaves:
                if leaf.shape[: rate.dim()] != rate.shape:
                    raise ValueError(
                        f"a rate of shape {list(rate.shape)} needs stacked parameters, whose "
                        f"shapes begin with it, got a parameter of shape {list(leaf.shape)}; one "
                        "rate for all parameters must be a number or a tensor of shape []"
                    )


def _fits_kernel(p: Leaves, slots: list[Leaves]) -> bool:
    """Whether the fused kernels, which traverse memory in storage order, can take these leaves."""
    if not p or p[0].device.type not in ("cpu", "cuda"):
        return False
    kind = p[0].dtype, p[0].device
    for leaf, *moments in zip(p, *slots, strict=True):  # a loop: each call would be one a leaf
        if (leaf.dtype, leaf.device) != kind:
            return False
        if not (leaf.is_contiguous() or _is_channels_last(leaf)):
            return False
        for moment in moments:
            if moment.dtype != leaf.dtype or moment.stride() != leaf.stride():
                return False
    return True


def _is_half_on_cpu(leaf: Tensor) -> bool:
    return leaf.dtype in (torch.float16, torch.bfloat16) and leaf.device.type == "cpu"


def _is_channels_last(leaf: Tensor) -> bool:
    return leaf.dim() == 4 and leaf.is_contiguous(memory_format=torch.channels_last)


def _members(
    p: Leaves, g: Leaves, slots: list[Leaves], count: Tensor, rate: Rate, decay: Rate
) -> Iterator[tuple[Leaves, Leaves, list[Leaves], Tensor, Any, float]]:
    """The kernel arguments for each member of a stacked state, as views of its memory."""
    if isinstance(rate, Tensor):
        rate = rate.to(count.device, torch.float32)
    # Not torch.broadcast_shapes, whose first call loads sympy: 35 MB
    numbers = (x for x in (count, rate, decay) if isinstance(x, Tensor))
    shape = torch.broadcast_tensors(*numbers)[0].shape
    if not shape:
        yield p, g, slots, count, rate, float(decay)
        return

    def each(x: Any) -> list[Any]:
        if not isinstance(x, Tensor):
            return [x] * shape.numel()
        return list(x.expand(shape).reshape(-1).unbind())

    def split(leaves: Leaves) -> list[tuple[Tensor, ...]]:
        views = [leaf.flatten(0, len(shape) - 1).unbind() for leaf in leaves]
        return list(zip(*views, strict=True))

    rows = [split(leaves) for leaves in (p, g, *slots)]
    rates = zip(each(count), each(rate), each(decay), strict=True)
    for row, (count_i, rate_i, decay_i) in zip(zip(*rows, strict=True), rates, strict=True):
        p_i, g_i, *slots_i = map(list, row)
        yield p_i, g_i, slots_i, count_i, rate_i, float(decay_i)


def warmup(
    step: Tensor,  # int64 [*], updates made before this one
    num_steps: float,
) -> Tensor:  # [*], 0..1
    """A linear warm-up: from 0 at step 0 to 1 at `num_steps`; always 1 where that is 0.

    >>> warmup(torch.tensor([0, 5, 10, 99]), 10)
    tensor([0.0000, 0.5000, 1.0000, 1.0000])
    """
    return torch.ones_like(step, dtype=torch.float32) if num_steps <= 0 else linear(step, num_steps)


def step_decay(
    step: Tensor,  # int64 [*]
    every: int,
    rate: float,
) -> Tensor:  # [*]
    """A step decay: rate^(step // every); before step 0 it is 1.

    >>> step_decay(torch.tensor([0, 99, 100, 250]), every=100, rate=0.5)
    tensor([1.0000, 1.0000, 0.5000, 0.2500])
    """
    check_range("every", every, 1)
    times = torch.div(step, every, rounding_mode="floor").clamp_min(0)
    return torch.as_tensor(rate, device=step.device).pow(times)


def linear(
    step: Tensor,  # int64 [*]
    num_steps: float,
    start: float = 0.0,
    stop: float = 1.0,
) -> Tensor:  # [*]
    """A linear schedule from `start` at step 0 to `stop` at `num_steps`, and constant after it.

    >>> linear(torch.tensor([0, 5, 10, 99]), 10, start=1.0, stop=0.2)
    tensor([1.0000, 0.6000, 0.2000, 0.2000])
    """
    fraction = _fraction(step, num_steps)
    return start * (1 - fraction) + stop * fraction  # exact at both ends


def cosine_decay(
    step: Tensor,  # int64 [*]
    num_steps: float,
    stop: float = 0.0,
) -> Tensor:  # [*]
    """A cosine decay from 1 at step 0 to `stop` at `num_steps`, and constant after it.

    Source: Loshchilov & Hutter (2017), equation 5, without restarts.

    >>> cosine_decay(torch.tensor([0, 5, 10, 99]), 10)
    tensor([1.0000, 0.5000, 0.0000, 0.0000])
    """
    fraction = _fraction(step, num_steps)
    return stop + (1 - stop) * (1 + (math.pi * fraction).cos()) / 2


def _fraction(step: Tensor, num_steps: float) -> Tensor:
    if not num_steps > 0:
        raise ValueError(f"num_steps={num_steps} must be above 0")
    return (step / num_steps).clamp(0, 1)
