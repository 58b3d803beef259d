"""Mutation of members: pure functions of a state and draws.

Legend: P members, L layers and N nodes of a network at most, D its width.

Networks whose form is data, as that of `raffia.nn.evolvable.EvolvableMLP`, can change it. They are
those with the buffers `layer_gate` [L], `width_mask` [L, N] and `activation` [], and with the
parameters `inner_weight` [L, N, D], `inner_bias` [L, N], `outer_weight` [L, D, N] and `outer_bias`
[L, D]. A state may keep a slow copy of them in its "target", with a form of its own, or without:
then it is run with the buffers of what it follows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from raffia.evolution.config import HyperRange, MutationConfig
from raffia.evolution.population import BATCH_SIZE, check_hyper_name
from raffia.functional.activations import ACTIVATIONS
from raffia.functional.draws import draw_seeds
from raffia.tensordict.tensordict import TensorDict

STRONG = 10.0  # times the noise
NAMES = tuple(ACTIVATIONS)
GATE, MASK = "layer_gate", "width_mask"

Path = tuple[str, ...]


class MemberChange(NamedTuple):
    """The change of a member.

    >>> MemberChange("hyper", "learning_rate 0.001 -> 0.0012").kind
    'hyper'
    """

    kind: str  # "none", "hyper", "parameters", "activation", "architecture"
    what: str = ""


def mutate(
    state: TensorDict,  # [P], of a `Population`
    config: MutationConfig,
    generator: torch.Generator,  # on the CPU
    *,
    spared: tuple[int, ...] = (),  # slots that stay unchanged, such as the elite's
) -> tuple[TensorDict, list[MemberChange]]:
    """The changed states, in memory of their own, and what was changed in each.

    Each member draws one kind. A larger architecture computes what the smaller one did; one that
    has lost a layer or nodes does not. The optimiser knows nothing of what is new: its moments are
    0 there.

    >>> from raffia.evolution.config import HyperRange
    >>> state = TensorDict(params=TensorDict(), buffers=TensorDict(),
    ...                    hyper=TensorDict(tau=torch.tensor([0.5, 0.9])), batch_size=[2])
    >>> config = MutationConfig(no_mutation=0, hyper=1, hyper_ranges={"tau": HyperRange(0.5, 0.9)})
    >>> changed, changes = mutate(state, config, torch.Generator().manual_seed(0), spared=(1,))
    >>> changed["hyper", "tau"], changes[1]
    (tensor([0.6000, 0.9000]), MemberChange(kind='none', what=''))
    """
    check_mutations(state, config)
    state = state.clone()
    changes = []
    for member, seed in enumerate(draw_seeds(len(state), generator).tolist()):
        if member in spared:
            changes.append(MemberChange("none"))
            continue
        # A generator for each member, so that what it becomes does not depend on the others.
        draw = torch.Generator().manual_seed(seed)
        kind = draw_kind(config, draw)
        changes.append(MemberChange(kind, _KINDS[kind](state, member, config, draw)))
    return state, changes


def draw_kind(config: MutationConfig, generator: torch.Generator) -> str:
    """The drawn kind of change of a member.

    >>> draw_kind(MutationConfig(no_mutation=0, parameters=1), torch.Generator())
    'parameters'
    """
    kinds = config.kinds
    weights = torch.tensor([config.probability(kind) for kind in kinds], dtype=torch.float64)
    return kinds[int(torch.multinomial(weights, 1, generator=generator))]


def check_mutations(state: TensorDict, config: MutationConfig) -> None:
    """Raise ValueError if a requested kind of mutation is not possible for this state.

    >>> state = TensorDict(hyper=TensorDict(tau=torch.tensor([0.5])), batch_size=[1])
    >>> ranges = {"tau": HyperRange(0.6, 0.9)}
    >>> check_mutations(state, MutationConfig(hyper=1, hyper_ranges=ranges))
    Traceback (most recent call last):
    ...
    ValueError: tau starts at 0.5, outside of its range from 0.6 to 0.9: widen the range, or start
    within it
    """
    if config.hyper > 0:
        for name, span in config.hyper_ranges.items():
            check_hyper_name(name, state["hyper"])
            if name == BATCH_SIZE and span.low < 1:
                raise ValueError(
                    f"the range of {name} starts at {span.low:g}, but must start at 1 or more"
                )
            if name not in state["hyper"].keys():
                raise ValueError(
                    f"{name} has a range but no start value: pass Population(..., "
                    f"hyper={{{name!r}: [...]}})"
                )
            for number in state["hyper", name].tolist():
                if not _within(number, span):
                    raise ValueError(
                        f"{name} starts at {number:g}, outside of its range from {span.low:g} to "
                        f"{span.high:g}: widen the range, or start within it"
                    )
    for kind in ("activation", "architecture"):
        if config.probability(kind) > 0 and not networks_with_form(state):
            raise ValueError(
                f"{kind}={config.probability(kind):g}, but no network of this learner can change "
                f"its {kind}: build it with raffia.nn.evolvable.EvolvableMLP, or set {kind}=0"
            )


def _within(number: float, span: HyperRange) -> bool:
    slack = 1e-6 * max(abs(span.low), abs(span.high))  # of single precision
    return span.low - slack <= number <= span.high + slack


# -- kinds of change: each writes into the state and returns what it did


def _none(state: TensorDict, member: int, config: MutationConfig, draw: torch.Generator) -> str:
    return ""


def _hyper(state: TensorDict, member: int, config: MutationConfig, draw: torch.Generator) -> str:
    names = sorted(config.hyper_ranges)
    name = names[_below(len(names), draw)]
    span, numbers = config.hyper_ranges[name], state["hyper", name]
    before = numbers[member].clone()
    numbers[member] = _stepped(before, span, draw)
    return f"{name} {before.item():g} -> {numbers[member].item():g}"


def _stepped(before: Tensor, span: HyperRange, draw: torch.Generator) -> Tensor:  # [] -> []
    chance, up, at = torch.rand(3, generator=draw, dtype=torch.float64).tolist()
    if chance < span.resample or before == 0:  # no factor leads away from 0
        if span.log:
            drawn = math.exp(math.log(span.low) + at * math.log(span.high / span.low))
        else:
            drawn = span.low + at * (span.high - span.low)
        return _near(drawn, before, span)
    factor = span.grow if up < 0.5 else span.shrink
    if span.log:
        factor = math.exp(math.log(span.shrink) + at * math.log(span.grow / span.shrink))
    after = _by(factor, before, span)
    if after == before:  # at an end: the only way is back
        after = _by(span.shrink if factor > 1 else span.grow, before, span)
    return after


def _by(factor: float, before: Tensor, span: HyperRange) -> Tensor:
    """The value times `factor`, within `span`; an integer changes by one at least, if it can."""
    after = _near(before.item() * factor, before, span)
    if after == before and not before.is_floating_point():
        after = _near(before.item() + (1 if factor > 1 else -1), before, span)
    return after


def _near(number: float, like: Tensor, span: HyperRange) -> Tensor:
    """The nearest within the range that a tensor like this can hold."""
    low, high = span.low, span.high
    if not like.is_floating_point():
        number, low, high = round(number), math.ceil(low), math.floor(high)
    return torch.full_like(like, min(max(number, low), high))


def _parameters(
    state: TensorDict, member: int, config: MutationConfig, draw: torch.Generator
) -> str:
    params = state["params"]
    leaves = [(key, params[key]) for key in params.keys(True, True)]
    chosen = [(key, leaf[member]) for key, leaf in leaves if leaf.dim() > 2] or [
        (key, leaf[member]) for key, leaf in leaves
    ]
    picked = torch.rand(len(chosen), generator=draw) < 0.5
    picked[_below(len(chosen), draw)] = True
    total = 0
    for (key, leaf), taken in zip(chosen, picked.tolist(), strict=True):
        if taken:
            total += _noise(leaf, _present_weights(state, key, member), config, draw)
    return f"{total} weights of {int(picked.sum())} tensors"


def _noise(
    leaf: Tensor, present: Tensor | None, config: MutationConfig, draw: torch.Generator
) -> int:
    """MemberChange a fraction of a tensor's weights in place; returns how many.

    present: bool, which weights the network has now; None: all.
    """
    flat = leaf.flatten()
    among = torch.arange(len(flat)) if present is None else present.flatten().nonzero()[:, 0].cpu()
    num = max(1, round(config.mutated_fraction * len(among)))
    slot = among[torch.randperm(len(among), generator=draw)[:num]].to(leaf.device)
    kind = torch.rand(num, generator=draw, dtype=torch.float64).to(leaf.device)
    normal = torch.randn(num, generator=draw, dtype=torch.float64).to(leaf.device, leaf.dtype)
    spread = (flat if present is None else leaf[present]).std(correction=0)
    old = flat[slot]
    size = torch.where(kind < config.strong_fraction, STRONG, 1.0) * config.mutation_sd
    new = old + normal * size.to(leaf.dtype) * old.abs()
    again = kind >= 1 - config.reset_fraction
    changed = flat.index_put((slot,), torch.where(again, normal * spread, new))
    leaf.copy_(changed.view(leaf.shape))  # which need not lie in memory in this order
    return num


def _activation(
    state: TensorDict, member: int, config: MutationConfig, draw: torch.Generator
) -> str:
    paths = networks_with_form(state)
    path = paths[_below(len(paths), draw)]
    numbers = state["buffers", *path, "activation"]
    before = int(numbers[member])
    after = (before + 1 + _below(len(NAMES) - 1, draw)) % len(NAMES)
    numbers[member] = after
    return f"{'.'.join(path) or 'network'}: {NAMES[before]} -> {NAMES[after]}"


def _architecture(
    state: TensorDict, member: int, config: MutationConfig, draw: torch.Generator
) -> str:
    paths = networks_with_form(state)
    path = paths[_below(len(paths), draw)]
    gate = state["buffers", *path, GATE][member]
    of_layer, more = torch.rand(2, generator=draw).tolist()
    name = ".".join(path) or "network"
    if of_layer < config.new_layer_prob:
        return f"{name}: {_change_layers(state, path, member, more < 0.5, draw)}"
    count = config.nodes[_below(len(config.nodes), draw)]
    layer = int(gate.nonzero()[_below(int(gate.sum()), draw)])
    return f"{name}: {_change_nodes(state, path, member, layer, count, more < 0.5)}"


def _change_layers(
    state: TensorDict, path: Path, member: int, more: bool, draw: torch.Generator
) -> str:
    gate, mask = (state["buffers", *path, name][member] for name in (GATE, MASK))
    present, free = gate.nonzero().flatten().tolist(), (gate == 0).nonzero().flatten().tolist()
    if (more and free) or len(present) == 1 and free:
        _add_layer(state, path, member, free[0], mask[present[-1]])  # as wide as the last one
        return f"layer {free[0]} more"
    if len(present) == 1:
        return "one layer stays"
    layer = present[_below(len(present), draw)]
    gate[layer] = 0
    mask[layer] = 0
    return f"layer {layer} less"


def _change_nodes(
    state: TensorDict, path: Path, member: int, layer: int, count: int, more: bool
) -> str:
    mask = state["buffers", *path, MASK][member, layer]
    present, free = mask.nonzero().flatten(), (mask == 0).nonzero().flatten()
    if (more and len(free)) or len(present) == 1:
        new = free[:count]
        _add_nodes(state, path, member, layer, new)
        return f"{len(new)} nodes more in layer {layer}"
    gone = present[max(1, len(present) - count) :]  # one stays
    mask[gone] = 0
    return f"{len(gone)} nodes less in layer {layer}"


def _below(number: int, draw: torch.Generator) -> int:
    return int(torch.randint(number, (), generator=draw))


_KINDS = {
    "none": _none,
    "hyper": _hyper,
    "parameters": _parameters,
    "activation": _activation,
    "architecture": _architecture,
}


# -- networks whose form is data: which there are, and how they grow


def networks_with_form(state: TensorDict) -> list[Path]:
    """The paths of the networks whose form can change.

    >>> buffers = TensorDict({"head": TensorDict(layer_gate=torch.ones(2, 3))})
    >>> networks_with_form(TensorDict(buffers=buffers))
    [('head',)]
    """
    buffers = state["buffers"] if "buffers" in state.keys() else TensorDict()
    keys = {k if isinstance(k, tuple) else (k,) for k in buffers.keys(True, True)}
    return sorted(key[:-1] for key in keys if key[-1] == GATE)


def _present_weights(state: TensorDict, key: str | Path, member: int) -> Tensor | None:
    """A mask of the weights of a parameter that a member's network has now; None: all of them.

    >>> from raffia.nn.evolvable import EvolvableMLP
    >>> network = EvolvableMLP(2, 1, width=1, num_nodes=2, max_layers=1, max_nodes=3)
    >>> parts = {"params": network.named_parameters(), "buffers": network.named_buffers()}
    >>> state = TensorDict({part: TensorDict(dict(named)) for part, named in parts.items()})
    >>> _present_weights(torch.stack([state.detach()]), "outer_weight", 0).tolist()
    [[[True, True, False]]]
    """
    *path, name = (key,) if isinstance(key, str) else key
    if (*path, GATE) not in _leaves(state["buffers"] if "buffers" in state.keys() else None):
        return None
    gate = state["buffers", *path, GATE][member] != 0  # [L]
    mask = (state["buffers", *path, MASK][member] != 0) & gate.unsqueeze(1)  # [L, N]
    found = {
        "inner_weight": mask.unsqueeze(2),
        "inner_bias": mask,
        "outer_weight": mask.unsqueeze(1),
        "outer_bias": gate.unsqueeze(1),
    }.get(name)
    return None if found is None else found.expand(state["params", *path, name][member].shape)


def _add_layer(
    state: TensorDict,  # [P], written to
    path: Path,
    member: int,
    layer: int,
    nodes: Tensor,  # [N], which of them it has: 1, else 0
) -> None:
    """A layer that adds nothing at first: neither to the network's result nor to its target
    network's.

    >>> from raffia.nn.evolvable import EvolvableMLP
    >>> network = EvolvableMLP(2, 1, width=1, num_nodes=2, max_layers=2, max_nodes=3)
    >>> parts = {"params": network.named_parameters(), "buffers": network.named_buffers()}
    >>> state = TensorDict({part: TensorDict(dict(named)) for part, named in parts.items()})
    >>> state = torch.stack([state.detach()])
    >>> _add_layer(state, (), 0, 1, torch.tensor([1.0, 0.0, 0.0]))
    >>> state["buffers", "layer_gate"], state["params", "outer_weight"][0, 1]
    (tensor([[1., 1.]]), tensor([[0., 0., 0.]]))
    """
    state["buffers", *path, MASK][member, layer] = nodes
    state["buffers", *path, GATE][member, layer] = 1
    for tensor in _with_this_form(state, path, "outer_weight", "outer_bias"):
        tensor[member, layer] = 0
    _forget(state, path, member, layer, slice(None))


def _add_nodes(state: TensorDict, path: Path, member: int, layer: int, new: Tensor) -> None:
    """Nodes [K] of a layer that nothing reads at first, likewise.

    >>> from raffia.nn.evolvable import EvolvableMLP
    >>> network = EvolvableMLP(2, 1, width=1, num_nodes=2, max_layers=1, max_nodes=3)
    >>> parts = {"params": network.named_parameters(), "buffers": network.named_buffers()}
    >>> state = TensorDict({part: TensorDict(dict(named)) for part, named in parts.items()})
    >>> state = torch.stack([state.detach()])
    >>> _add_nodes(state, (), 0, 0, torch.tensor([2]))
    >>> state["buffers", "width_mask"], state["params", "outer_weight"][0, 0, 0, 2]
    (tensor([[[1., 1., 1.]]]), tensor(0.))
    """
    state["buffers", *path, MASK][member, layer, new] = 1
    for tensor in _with_this_form(state, path, "outer_weight"):
        tensor[member, layer, :, new] = 0
    _forget(state, path, member, layer, new)


def _with_this_form(state: TensorDict, path: Path, *names: str) -> Iterator[Tensor]:
    """A network's parameters of these names; and its target network's, unless that has its own
    form."""
    for name in names:
        yield state["params", *path, name]
    slow = {key[-1]: tensor for key, tensor in _parts(state, path, "target")}
    if GATE not in slow:
        yield from (slow[name] for name in names if name in slow)


def _parts(state: TensorDict, path: Path, part: str) -> Iterator[tuple[Path, Tensor]]:
    """Yield the entries of one network in a part of the state, under trees of any names."""
    paths = sorted(networks_with_form(state), key=len, reverse=True)
    for key in _leaves(state[part] if part in state.keys() else None):
        # The longest name that fits: "head" is not "policy.head"
        its = next((p for p in paths if key[:-1][len(key) - 1 - len(p) :] == p), None)
        if its == path:
            yield key, state[part, *key]


def _leaves(tree: TensorDict | None) -> list[Path]:
    """The keys of all tensors, as tuples."""
    keys = [] if tree is None else list(tree.keys(True, True))
    return [key if isinstance(key, tuple) else (key,) for key in keys]


def _forget(state: TensorDict, path: Path, member: int, layer: int, nodes: Tensor | slice) -> None:
    """The optimiser's moments of what is new are 0."""
    for key, tensor in _parts(state, path, "opt"):
        if key[-1] in ("inner_weight", "inner_bias"):
            tensor[member, layer, nodes] = 0
        elif key[-1] == "outer_weight":
            tensor[member, layer, :, nodes] = 0
        elif key[-1] == "outer_bias" and isinstance(nodes, slice):
            tensor[member, layer] = 0
