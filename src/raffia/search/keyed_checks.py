"""Checks of the arguments of `KeyedSearch`."""

from typing import Any

import torch
from torch import Tensor

from raffia.search.outputs import RootOutput
from raffia.tensordict.keys import NestedKey


def rows_going_on(mask: Tensor) -> Tensor:
    """Where there is a legal action, bool [B].

    >>> rows_going_on(torch.tensor([[True, False], [False, False]]))
    tensor([ True, False])
    """
    if mask.ndim != 2 or mask.dtype != torch.bool:
        raise ValueError(
            f"the mask is {mask.dtype} {list(mask.shape)} with the batch dimensions in one; "
            "skip_ended=True reads a bool one, [rows, actions]"
        )
    return mask.any(-1)


def check_distinct_keys(keys: list[NestedKey]) -> None:
    """Check that each written entry has a key of its own.

    >>> check_distinct_keys(["action", "_", "_"])
    """
    twice = [key for key in dict.fromkeys(keys) if key != "_" and keys.count(key) > 1]
    if twice:
        raise ValueError(
            f"{twice} would be written twice: out_keys, actions_key and tree_key must all differ; "
            "'_' drops an entry"
        )


def check_root_output(root: Any, rows: int) -> None:
    """Check that a model's `root` gave an answer for each row.

    >>> check_root_output(RootOutput(torch.zeros(2, 3), torch.zeros(2), torch.zeros(2)), rows=2)
    """
    if not isinstance(root, RootOutput):
        raise TypeError(
            f"model.root gave a {type(root).__name__}; it must give a "
            "RootOutput(prior_logits, value, embedding)"
        )
    if root.prior_logits.shape[:1] != (rows,):
        raise ValueError(
            f"model.root gave prior_logits of shape {list(root.prior_logits.shape)} for {rows} "
            f"rows of observations; it must be [{rows}, actions]"
        )


def check_model(model: Any) -> None:
    """Check that a model can be planned with.

    >>> check_model(torch.nn.Linear(1, 1))
    Traceback (most recent call last):
        ...
    TypeError: Linear has no root and no recurrent_fn: ...
    """
    if isinstance(model, type):
        raise TypeError(
            f"model is the class {model.__name__}; pass an instance of it: {model.__name__}(...)"
        )
    lacks = [name for name in ("root", "recurrent_fn") if not hasattr(model, name)]
    if lacks and hasattr(model, "initial_inference"):
        raise TypeError(
            f"{type(model).__name__} is a network to train; to plan with it pass its snapshot "
            "fold(model), from raffia.algorithms.efficientzero.inference import fold"
        )
    if lacks:
        raise TypeError(
            f"{type(model).__name__} has no {' and no '.join(lacks)}: a model to plan with has "
            "root(observation, mask=None, to_play=None) and recurrent_fn(embedding, action); pass "
            "two functions as FunctionModel(root, recurrent_fn)"
        )
