"""Checks that the arguments of a search fit together; errors name what was given and what is
needed."""

from typing import get_args

import torch
from torch import Tensor

from raffia.hints import check_choice, check_count, check_range
from raffia.search.base import RootOutput, RootValue, TreeRules, ValuePrefix


def check_root(root: RootOutput) -> None:
    """Check that the root's parts fit together."""
    if not isinstance(root, RootOutput):
        raise TypeError(
            f"root is a {type(root).__name__}; it must be a RootOutput(prior_logits, value, "
            "embedding)"
        )
    for name in ("prior_logits", "value", "mask", "to_play", "actions"):
        _check_tensor(name, getattr(root, name), root.prior_logits)
    logits = root.prior_logits
    if logits.ndim != 2 or 0 in logits.shape:
        raise ValueError(
            f"root.prior_logits has shape {list(logits.shape)}; it must be [roots, actions], with "
            "at least one of each: for a single state pass prior_logits.unsqueeze(0)"
        )
    batch, actions = logits.shape
    _check_shape("root.value", root.value, (batch,))
    if root.mask is not None:
        _check_shape("root.mask", root.mask, (batch, actions))
        if root.mask.dtype != torch.bool:
            raise TypeError(f"root.mask is {root.mask.dtype}; it must be bool: pass mask.bool()")
        if not bool(root.mask.any(-1).all()):
            without = (~root.mask.any(-1)).nonzero().flatten().tolist()
            raise ValueError(
                f"no legal action at roots {without}: their rows of root.mask are all False; leave "
                "states where the game has ended out of the search"
            )
    if root.to_play is not None:
        _check_shape("root.to_play", root.to_play, (batch,))
        if not bool(((root.to_play >= 0) & (root.to_play <= 2)).all()):
            raise ValueError(
                f"root.to_play holds {root.to_play.unique().tolist()}; players are 1 and 2, or 0 "
                "and 1; for one player pass to_play=None"
            )
    if root.actions is not None and root.actions.shape[:2] != (batch, actions):
        raise ValueError(
            f"root.actions has shape {list(root.actions.shape)}; it must begin with [roots, "
            f"actions] = {[batch, actions]}"
        )


def _check_tensor(name: str, tensor: object, logits: Tensor) -> None:
    if tensor is None and name not in ("prior_logits", "value"):
        return
    if not isinstance(tensor, Tensor):
        raise TypeError(f"root.{name} is a {type(tensor).__name__}; it must be a tensor")
    if tensor.device != logits.device:
        raise ValueError(
            f"root.{name} lies on {tensor.device} and root.prior_logits on {logits.device}: put "
            "both on one device (the embedding may lie elsewhere)"
        )


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}; to match root.prior_logits it must be "
            f"{list(shape)}"
        )


def check_budget(num_simulations: int | Tensor, batch: int) -> list[int]:
    """Check the numbers of simulations and return one for each root."""
    if isinstance(num_simulations, int) and not isinstance(num_simulations, bool):
        _check_least(num_simulations, num_simulations)
        return [num_simulations] * batch
    budget = torch.as_tensor(num_simulations, device="cpu")
    if budget.is_floating_point() or budget.dtype == torch.bool:
        raise TypeError(f"num_simulations has dtype {budget.dtype}; it must be an integer")
    check_of_each("num_simulations", budget, batch)
    _check_least(int(budget.min()), num_simulations)
    return [int(num) for num in budget.expand(batch).tolist()]


def check_of_each(name: str, number: float | Tensor, batch: int) -> None:
    """Check that `number` is one number for all roots or one for each root."""
    if isinstance(number, Tensor) and number.shape not in ((), (batch,)):
        raise ValueError(
            f"{name} has shape {list(number.shape)}; it must be one number, or one for each of "
            f"the {batch} roots"
        )


def check_seed(seed: Tensor, batch: int) -> None:
    """Check that there is a seed for each root, as kernels read them from memory."""
    if seed.shape != (batch,) or seed.dtype != torch.int64:
        raise ValueError(
            f"seed is {seed.dtype} {list(seed.shape)}; it must be int64 [{batch}], one for each "
            f"root: for example torch.arange({batch})"
        )


def _check_least(least: int, given: object) -> None:
    if least < 1:
        raise ValueError(
            f"num_simulations={given} gives a root no simulation; each root needs at least 1"
        )


def check_discount(discount: float | Tensor, batch: int, device: torch.device) -> Tensor:
    """Check the discount and return one for each root, float32 [B]."""
    if isinstance(discount, float | int):
        check_range("discount", discount, 0, 1)
        return torch.full((batch,), float(discount), dtype=torch.float32, device=device)
    gamma = torch.as_tensor(discount, dtype=torch.float32, device=device)
    check_of_each("discount", gamma, batch)
    if not bool(((gamma >= 0) & (gamma <= 1)).all()):
        raise ValueError(f"discount={discount} must be in 0..1")
    return gamma.expand(batch).contiguous()


def check_options(rules: TreeRules, num_threads: int, recurrent_fn: object) -> None:
    """Check a search's options, by themselves and together."""
    value_prefix, root_value, max_depth, transpositions = rules
    if value_prefix is not None and not isinstance(value_prefix, ValuePrefix):
        raise TypeError(f"value_prefix={value_prefix!r} must be a ValuePrefix(horizon=...) or None")
    counts = "'include' counts the model's value as one visit, 'zero' a visit of value 0"
    check_choice("root_value", root_value, get_args(RootValue), f"; {counts}, 'exclude' neither")
    if max_depth is not None:
        check_count("max_depth", max_depth, 1)
    if transpositions is not None and value_prefix is not None:
        raise ValueError(
            "transpositions and value_prefix cannot be combined: a value prefix belongs to a "
            "path, not to a state; pass transpositions=None"
        )
    if value_prefix is None and getattr(recurrent_fn, "predicts_prefixes", False):
        raise ValueError(
            "this model predicts value prefixes, sums of rewards, instead of rewards: pass "
            "value_prefix=ValuePrefix(horizon=...), with the horizon that it was trained with"
        )
    check_count("num_threads", num_threads, 1)
