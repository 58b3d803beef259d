"""Mutation of members: pure functions of a state and draws.

Legend: P members, L layers and N nodes of a network at most, D its width.

Networks whose form is data, as that of `raffia.nn.evolvable.EvolvableMLP`, can change it. They are
those with the buffers `layer_gate` [L], `width_mask` [L, N] and `activation` [], and with the
parameters `inner_weight` [L, N, D], `inner_bias` [L, N], `outer_weight` [L, D, N] and `outer_bias`
[L, D]. A state may hold target networks in its "target", with a form of theirs, or without:
then they are run with the buffers of the online networks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from raffia.evolution.config import BATCH_SIZE, HyperRange, MutationConfig, check_hyper_name
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
    """The changed states, in separate memory, and what was changed in each.

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
        changes.append(MemberChange(kind, getattr(_Mutation(state, member, config, draw), kind)()))
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
            check_hyper_name(name, [str(key) for key in state.get("hyper", TensorDict()).keys()])
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


# -- kinds of change


@dataclass(frozen=True)
class _Mutation:
    """The mutation of one member: each kind writes into the state and returns what it did."""

    state: TensorDict  # [P]
    member: int
    config: MutationConfig
    draw: torch.Generator

    def none(self) -> str:
        return ""

    def hyper(self) -> str:
        names = sorted(self.config.hyper_ranges)
        name = names[self._below(len(names))]
        span, numbers = self.config.hyper_ranges[name], self.state["hyper", name]
        before = numbers[self.member].clone()
        numbers[self.member] = _stepped(before, span, self.draw)
        return f"{name} {before.item():g} -> {numbers[self.member].item():g}"

    def parameters(self) -> str:
        leaves = [
            (key, leaf)
            for key, leaf in self.state["params"].items(True, True)
            if leaf.numel() and (leaf.is_floating_point() or leaf.is_complex())
        ]
        matrices = [(key, leaf) for key, leaf in leaves if leaf.dim() > 2]
        chosen = matrices or leaves
        picked = torch.rand(len(chosen), generator=self.draw) < 0.5
        picked[self._below(len(chosen))] = True
        total = 0
        for (key, leaf), taken in zip(chosen, picked.tolist(), strict=True):
            if taken:
                present = _present_weights(self.state, key, self.member)
                total += self._noise(leaf[self.member], present)
        return f"{total} weights of {int(picked.sum())} tensors"

    def _noise(self, leaf: Tensor, present: Tensor | None) -> int:
        """Change a fraction of a tensor's weights; returns how many.

        present: bool, which weights the network has now; None: all.
        """
        config, draw, flat = self.config, self.draw, leaf.flatten()
        everywhere = torch.arange(len(flat))
        among = everywhere if present is None else present.flatten().nonzero()[:, 0].cpu()
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

    def activation(self) -> str:
        network = self._network()
        numbers = self.state["buffers", *network.path, "activation"]
        before = int(numbers[self.member])
        after = (before + 1 + self._below(len(NAMES) - 1)) % len(NAMES)
        numbers[self.member] = after
        return f"{network.name}: {NAMES[before]} -> {NAMES[after]}"

    def architecture(self) -> str:
        network = self._network()
        of_layer, more = torch.rand(2, generator=self.draw).tolist()
        present = network.gate.nonzero().flatten().tolist()
        if of_layer < self.config.new_layer_prob:
            return f"{network.name}: {self._change_layers(network, present, more < 0.5)}"
        count = self.config.nodes[self._below(len(self.config.nodes))]
        layer = present[self._below(len(present))]
        return f"{network.name}: {network.change_nodes(layer, count, more < 0.5)}"

    def _change_layers(self, network: _Network, present: list[int], more: bool) -> str:
        free = (network.gate == 0).nonzero().flatten().tolist()
        if (more and free) or len(present) == 1 and free:
            network.add_layer(free[0], network.mask[present[-1]])  # as wide as the last one
            return f"layer {free[0]} more"
        if len(present) == 1:
            return "one layer stays"
        layer = present[self._below(len(present))]
        network.gate[layer] = 0
        network.mask[layer] = 0
        return f"layer {layer} less"

    def _network(self) -> _Network:
        """One of the networks whose form can change."""
        paths = networks_with_form(self.state)
        return _Network(self.state, paths[self._below(len(paths))], self.member)

    def _below(self, number: int) -> int:
        return int(torch.randint(number, (), generator=self.draw))


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


# -- networks whose form is data: which there are, and how they grow


def networks_with_form(state: TensorDict) -> list[Path]:
    """The paths of the networks whose form can change.

    >>> buffers = TensorDict({"head": TensorDict(layer_gate=torch.ones(2, 3))})
    >>> networks_with_form(TensorDict(buffers=buffers))
    [('head',)]
    """
    return sorted(key[:-1] for key in _leaves(state, "buffers") if key[-1] == GATE)


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
    if (*path, GATE) not in _leaves(state, "buffers"):
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


class _Network:
    """A network of one member whose form can change; what is new in it adds nothing at first.

    Neither to the network's result, nor to its target network's.

    >>> from raffia.nn.evolvable import EvolvableMLP
    >>> network = EvolvableMLP(2, 1, width=1, num_nodes=2, max_layers=2, max_nodes=3)
    >>> parts = {"params": network.named_parameters(), "buffers": network.named_buffers()}
    >>> state = TensorDict({part: TensorDict(dict(named)) for part, named in parts.items()})
    >>> state = torch.stack([state.detach()])
    >>> _Network(state, (), 0).add_layer(1, torch.tensor([1.0, 0.0, 0.0]))
    >>> state["buffers", "layer_gate"], state["params", "outer_weight"][0, 1]
    (tensor([[1., 1.]]), tensor([[0., 0., 0.]]))
    >>> _Network(state, (), 0).add_nodes(0, torch.tensor([2]))
    >>> state["buffers", "width_mask"][0, 0], state["params", "outer_weight"][0, 0, 0, 2]
    (tensor([1., 1., 1.]), tensor(0.))
    """

    def __init__(self, state: TensorDict, path: Path, member: int) -> None:
        self.state, self.path, self.member = state, path, member
        self.name = ".".join(path) or "network"
        self.gate: Tensor = state["buffers", *path, GATE][member]  # [L]
        self.mask: Tensor = state["buffers", *path, MASK][member]  # [L, N]

    def change_nodes(self, layer: int, count: int, more: bool) -> str:
        mask = self.mask[layer]
        present, free = mask.nonzero().flatten(), (mask == 0).nonzero().flatten()
        if (more and len(free)) or len(present) == 1:
            self.add_nodes(layer, free[:count])
            return f"{len(free[:count])} nodes more in layer {layer}"
        gone = present[max(1, len(present) - count) :]  # one stays
        mask[gone] = 0
        return f"{len(gone)} nodes less in layer {layer}"

    def add_layer(self, layer: int, nodes: Tensor) -> None:
        """Add a layer; nodes [N]: which of them it has: 1, else 0."""
        self.mask[layer] = nodes
        self.gate[layer] = 1
        for tensor in self._with_this_form("outer_weight", "outer_bias"):
            tensor[self.member, layer] = 0
        self._forget(layer, slice(None))

    def add_nodes(self, layer: int, new: Tensor) -> None:
        """Add nodes [K] to a layer."""
        self.mask[layer, new] = 1
        for tensor in self._with_this_form("outer_weight"):
            tensor[self.member, layer, :, new] = 0
        self._forget(layer, new)

    def _with_this_form(self, *names: str) -> Iterator[Tensor]:
        """The parameters of these names; and the target network's, unless that has another form."""
        for name in names:
            yield self.state["params", *self.path, name]
        slow = {key[-1]: tensor for key, tensor in self._parts("target")}
        if GATE not in slow:
            yield from (slow[name] for name in names if name in slow)

    def _parts(self, part: str) -> Iterator[tuple[Path, Tensor]]:
        """Yield the network's entries in a part of the state, under trees of any names."""
        paths = sorted(networks_with_form(self.state), key=len, reverse=True)
        for key in _leaves(self.state, part):
            # The longest name that fits: "head" is not "policy.head"
            its = next((p for p in paths if key[:-1][len(key) - 1 - len(p) :] == p), None)
            if its == self.path:
                yield key, self.state[part, *key]

    def _forget(self, layer: int, nodes: Tensor | slice) -> None:
        """The optimiser's moments of what is new are 0."""
        for key, tensor in self._parts("opt"):
            if key[-1] in ("inner_weight", "inner_bias"):
                tensor[self.member, layer, nodes] = 0
            elif key[-1] == "outer_weight":
                tensor[self.member, layer, :, nodes] = 0
            elif key[-1] == "outer_bias" and isinstance(nodes, slice):
                tensor[self.member, layer] = 0


def _leaves(state: TensorDict, part: str) -> list[Path]:
    """The keys of all tensors in a part of the state, as tuples; none if it has no such part."""
    keys = state[part].keys(True, True) if part in state.keys() else ()
    return [key if isinstance(key, tuple) else (key,) for key in keys]
