"""Target networks: copies of parameters and their hard or soft updates.

    target <- (1 - rate) target + rate online

`rate=1` is the hard update (Mnih et al. 2015, DQN), a small rate Polyak averaging (Lillicrap et al.
2016, DDPG).
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from raffia.tensordict.access import entries
from raffia.tensordict.copies import once_each
from raffia.tensordict.functions import from_module, is_non_tensor
from raffia.tensordict.keys import MissingKeyError, nearest
from raffia.tensordict.lazy import LazyStackedTensorDict
from raffia.tensordict.node import Node
from raffia.tensordict.params import TensorDictParams as TensorDictParams

Holder = TypeVar("Holder", nn.Module, Node)
Leaves = dict[str, Tensor]  # by dotted name


def target_copy(online: Holder) -> Holder:
    """A copy with separate memory that requires no gradient: the target of `update_target`.

    Of a module a deep copy, in the same mode (train or eval); of a `TensorDictParams` a
    `TensorDictParams`; both with `requires_grad=False`. Of any other container the same kind of
    container over plain tensors. What is one tensor in `online` is one tensor in the copy.

    >>> from torch import nn
    >>> from raffia.nn.params import target_copy
    >>> target = target_copy(nn.Linear(3, 2))
    >>> target.weight.requires_grad
    False
    """
    if isinstance(online, TensorDictParams):
        params: Holder = online.clone().requires_grad_(False)
        return params
    if isinstance(online, nn.Module):
        module = copy.deepcopy(online).requires_grad_(False)
        for buffer in module.buffers():
            buffer.detach_()
        return module
    _require_holder(online, "online")
    container: Any = online
    return container.apply(once_each(lambda leaf: leaf.detach().clone()))


def update_target(target: Holder, online: nn.Module | Node, rate: float | Tensor = 1.0) -> Holder:
    """Move a target, inplace, towards the trained network: the whole way, or by a rate.

        target <- (1 - rate) target + rate online

    Modules and containers may be mixed; their entries correspond by name. Buffers move like
    parameters, but integers and booleans are copied at any rate, unless it is 0. Nothing is written
    if something does not fit.

    target: module or container, such as `target_copy(online)`.
    online: what is trained; no gradient flows to it.
    rate: in [0, 1]; 1 copies. A tensor of shape [P] is one rate for each member of a population,
        for entries of shape [P, ...]; keep it on the CPU, for its range is looked at.
    Returns the target. Raises KeyError if one side lacks an entry, ValueError if shapes differ, if
    both share memory or if the rate is out of range.

    >>> from torch import nn
    >>> from raffia.nn.params import target_copy, update_target
    >>> online = TensorDict(w=torch.ones(2))
    >>> target = TensorDict(w=torch.zeros(2))
    >>> update_target(target, online, rate=0.25)["w"]
    tensor([0.2500, 0.2500])
    >>> update_target(target, online)["w"]
    tensor([1., 1.])
    """
    rate = _checked_rate(rate)
    mine, theirs = _named_leaves(target, "target"), _named_leaves(online, "online")
    _require_same(mine, theirs)
    mine, theirs = _local(mine, theirs)
    names = _unique_names(mine, theirs)
    if names:
        weights = _weights(rate, mine, names) if isinstance(rate, Tensor) else rate
        ends = isinstance(rate, Tensor) and _has_ends(rate)
        with torch.no_grad():
            _move([mine[name] for name in names], [theirs[name] for name in names], weights, ends)
    return target


def _move(
    targets: list[Tensor], values: list[Tensor], rate: float | list[Tensor], ends: bool
) -> None:
    """The update; `ends`: some of the rates in a list are 0 or 1."""
    if ends and isinstance(rate, list):
        torch._foreach_copy_(targets, list(map(_moved, targets, values, rate)))
    elif rate == 1:  # no sum: a target that is not finite becomes what is trained
        torch._foreach_copy_(targets, values)
    elif rate != 0:
        real = [i for i, leaf in enumerate(targets) if _is_real(leaf)]
        whole = [i for i, leaf in enumerate(targets) if not _is_real(leaf)]
        if real:
            torch._foreach_lerp_(
                [targets[i] for i in real],
                [_like(values[i], targets[i]) for i in real],
                [rate[i] for i in real] if isinstance(rate, list) else rate,
            )
        if whole:
            torch._foreach_copy_([targets[i] for i in whole], [values[i] for i in whole])


def _like(value: Tensor, target: Tensor) -> Tensor:
    if value.dtype is target.dtype and value.device == target.device:
        return value
    return value.to(target)


def _moved(target: Tensor, value: Tensor, rate: Tensor) -> Tensor:
    """The new target for rates of which some copy or keep, also what is not finite."""
    value = value.to(target)
    if _is_real(target):
        value = torch.where(rate == 1, value, target.lerp(value, rate))
    return torch.where(rate == 0, target, value)


def _weights(rate: Tensor, mine: Leaves, names: list[str]) -> list[Tensor]:
    """The rates on each leaf's device, in a shape that spreads over its members."""
    for name in names:
        shape = tuple(mine[name].shape)
        if rate.ndim and shape[:1] != rate.shape:
            raise ValueError(
                f"{len(rate)} rates, one for each member of a population, need entries of shape "
                f"[{len(rate)}, ...], but {name!r} has shape {list(shape)}"
            )
    cast: dict[Any, Tensor] = {}
    out = []
    for leaf in (mine[name] for name in names):
        dtype = leaf.dtype if _is_real(leaf) else rate.dtype
        kind = leaf.device, dtype, leaf.ndim
        if kind not in cast:
            shape = rate.shape + (1,) * (leaf.ndim - rate.ndim)
            cast[kind] = rate.to(leaf.device, dtype).reshape(shape)
        out.append(cast[kind])
    return out


def _has_ends(rate: Tensor) -> bool:
    return torch.compiler.is_compiling() or bool(((rate == 0) | (rate == 1)).any())


def _checked_rate(rate: float | Tensor) -> float | Tensor:
    if not isinstance(rate, Tensor):
        inside = 0 <= rate <= 1
    elif rate.ndim > 1:
        raise ValueError(
            "rate must be a number, or one number for each member of a population, got shape "
            f"{list(rate.shape)}"
        )
    elif torch.compiler.is_compiling():  # a compiled program cannot branch on values
        torch._assert_async(((rate >= 0) & (rate <= 1)).all(), "rate must be in 0..1")
        return rate.detach()
    else:
        inside = bool(((rate >= 0) & (rate <= 1)).all())
        rate = rate.detach() if rate.ndim else rate.item()
    if not inside:
        raise ValueError(f"rate={rate} must be in 0..1; 1 copies, 0 leaves the target as it is")
    return rate


def _named_leaves(holder: Any, name: str) -> Leaves:
    """All tensors of a module or container, by name."""
    _require_holder(holder, name)
    if not isinstance(holder, Node):
        holder = from_module(holder, lock=False)
    leaves: Leaves = {}
    _collect(holder, "", leaves)
    return leaves


def _collect(node: Any, prefix: str, leaves: Leaves) -> None:
    if isinstance(node, LazyStackedTensorDict):  # its entries are made at each access
        below = {str(i): member for i, member in enumerate(node.tensordicts)}
    else:
        below = entries(node)
    for name, value in below.items():
        if isinstance(value, Tensor) or not isinstance(value, Node):
            leaves[prefix + name] = value
        elif not is_non_tensor(value):
            _collect(value, f"{prefix}{name}.", leaves)


def _require_same(mine: Leaves, theirs: Leaves) -> None:
    for here, there, who, other in (
        (theirs, mine, "target", "online"),
        (mine, theirs, "online", "target"),
    ):
        for name in here:
            if name not in there:
                raise MissingKeyError(
                    f"{who} has no entry {name!r}, which {other} has{nearest(name, there)}. "
                    "Nothing was updated; target_copy(online) has the same entries"
                )
    differing = [
        f"{name!r}: {list(leaf.shape)} and {list(theirs[name].shape)}"
        for name, leaf in mine.items()
        if leaf.shape != theirs[name].shape
    ]
    if differing:
        raise ValueError(f"shapes of target and online differ: {'; '.join(differing)}")


def _local(mine: Leaves, theirs: Leaves) -> tuple[Leaves, Leaves]:
    """The leaves with this process's part of each DTensor, since updates are elementwise."""
    if {type(leaf) for leaf in (*mine.values(), *theirs.values())} <= {Tensor, nn.Parameter}:
        return mine, theirs
    for name, leaf in mine.items():
        here, there = _placements(leaf), _placements(theirs[name])
        if here != there:
            raise ValueError(
                f"{name!r} is placed as {here} in the target and as {there} in online, so that "
                "processes hold different parts; target_copy(online) is placed as online is"
            )
    with torch.no_grad():
        own, others = ({k: _part(leaf) for k, leaf in leaves.items()} for leaves in (mine, theirs))
    return own, others


def _part(leaf: Any) -> Tensor:
    """This process's part of a DTensor; another tensor as it is."""
    part: Tensor = leaf.to_local() if _placements(leaf) else leaf
    return part


def _placements(leaf: Any) -> Any:
    """The division of a DTensor among processes; None for an ordinary tensor."""
    return (leaf.placements, leaf.device_mesh) if hasattr(leaf, "placements") else None


def _unique_names(mine: Leaves, theirs: Leaves) -> list[str]:
    """Names of the tensors to update, each tensor once."""
    expanded = [n for n, t in mine.items() if not t.is_contiguous() and _is_expanded(t)]
    if expanded:
        raise ValueError(
            f"entry {expanded[0]!r} of the target is expanded, so that its rows share memory; "
            "target_copy(online) gives one to write to"
        )
    compiling = torch.compiler.is_compiling()
    if not compiling:  # most often nothing is tied or shared, and the starts of the memory show it
        starts = [leaf.data_ptr() for leaf in mine.values()]
        others = [leaf.data_ptr() for leaf in theirs.values()]
        if len({*starts, *others}) == 2 * len(starts):
            return list(mine)
    first: dict[Any, tuple[str, Any]] = {}
    for name, leaf in mine.items():
        memory, source = _memory_of(leaf, compiling), _memory_of(theirs[name], compiling)
        if memory == source and leaf.numel():
            raise ValueError(
                f"target and online share the memory of {name!r}: a target needs memory of its "
                "own, target_copy(online)"
            )
        tied, follows = first.setdefault(memory, (name, source))
        if source != follows:
            raise ValueError(
                f"{tied!r} and {name!r} are one tensor in the target but two in online, so the "
                "target cannot follow both"
            )
    return [name for name, _ in first.values()]


def _is_expanded(leaf: Tensor) -> bool:
    return any(
        [step == 0 and size > 1 for step, size in zip(leaf.stride(), leaf.shape, strict=True)]
    )


def _memory_of(leaf: Tensor, compiling: bool) -> Any:
    """Equal for two tensors that are the same piece of memory."""
    if compiling or leaf.is_meta or not leaf.numel():
        return id(leaf)
    return leaf.data_ptr(), leaf.device, leaf.shape, leaf.stride()


def _is_real(leaf: Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()


def _require_holder(holder: Any, name: str) -> None:
    if not isinstance(holder, (nn.Module, Node)):
        raise TypeError(f"{name} must be an nn.Module or a container, got {type(holder).__name__}")
