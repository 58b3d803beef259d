"""Networks whose form is data, within a population's state: which there are, and how they grow.

Legend: P members, L layers and N nodes of a network at most, D its width.

They are those with the buffers `layer_gate` [L], `width_mask` [L, N] and `activation` [], and with
the parameters `inner_weight` [L, N, D], `inner_bias` [L, N], `outer_weight` [L, D, N] and
`outer_bias` [L, D]: `raffia.nn.evolvable.EvolvableMLP`. A state may keep a slow copy of them in its
"target", with a form of its own, or without: then it is run with the buffers of what it follows.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from raffia.tensordict.tensordict import TensorDict

Path = tuple[str, ...]
GATE, MASK = "layer_gate", "width_mask"


def networks_with_form(state: TensorDict) -> list[Path]:
    """Where there are networks that can change their form.

    >>> buffers = TensorDict({"head": TensorDict(layer_gate=torch.ones(2, 3))})
    >>> networks_with_form(TensorDict(buffers=buffers))
    [('head',)]
    """
    buffers = state["buffers"] if "buffers" in state.keys() else TensorDict()
    keys = {k if isinstance(k, tuple) else (k,) for k in buffers.keys(True, True)}
    return sorted(key[:-1] for key in keys if key[-1] == GATE)


def there(state: TensorDict, key: str | Path, member: int) -> Tensor | None:
    """Which weights of a member's parameter its network has now, bool; None: it has them all.

    >>> from raffia.nn.evolvable import EvolvableMLP
    >>> network = EvolvableMLP(2, 1, width=1, num_nodes=2, max_layers=1, max_nodes=3)
    >>> parts = {"params": network.named_parameters(), "buffers": network.named_buffers()}
    >>> state = TensorDict({part: TensorDict(dict(named)) for part, named in parts.items()})
    >>> there(torch.stack([state.detach()]), "outer_weight", 0).tolist()
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


def add_layer(
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
    >>> add_layer(state, (), 0, 1, torch.tensor([1.0, 0.0, 0.0]))
    >>> state["buffers", "layer_gate"], state["params", "outer_weight"][0, 1]
    (tensor([[1., 1.]]), tensor([[0., 0., 0.]]))
    """
    state["buffers", *path, MASK][member, layer] = nodes
    state["buffers", *path, GATE][member, layer] = 1
    for tensor in _with_this_form(state, path, "outer_weight", "outer_bias"):
        tensor[member, layer] = 0
    _forget(state, path, member, layer, slice(None))


def add_nodes(state: TensorDict, path: Path, member: int, layer: int, new: Tensor) -> None:
    """Nodes [K] of a layer that nothing reads at first, likewise.

    >>> from raffia.nn.evolvable import EvolvableMLP
    >>> network = EvolvableMLP(2, 1, width=1, num_nodes=2, max_layers=1, max_nodes=3)
    >>> parts = {"params": network.named_parameters(), "buffers": network.named_buffers()}
    >>> state = TensorDict({part: TensorDict(dict(named)) for part, named in parts.items()})
    >>> state = torch.stack([state.detach()])
    >>> add_nodes(state, (), 0, 0, torch.tensor([2]))
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
    """What a part of the state holds of a network, in trees of any names."""
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
