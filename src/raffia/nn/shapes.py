"""The shapes that modules of a sequence read and write: recorded in a run, without keeping a
tensor."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raffia.tensordict.access import peek, value_of
from raffia.tensordict.keys import NestedKey, unravel_key, unravel_key_to_tuple
from raffia.tensordict.lazy import LazyStackedTensorDict
from raffia.tensordict.node import Node

_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


class EntryShape(NamedTuple):
    """What stood under a key: a shape and a dtype, or the class of an entry that is no tensor.

    >>> str(EntryShape((5, 4), "float32"))
    'f32[5, 4]'
    """

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        kind = self.dtype.rstrip("0123456789")
        short = _SHORT.get(kind, kind) + self.dtype[len(kind) :]
        return f"{short}[{', '.join(map(str, self.shape))}]"


Shapes = dict[NestedKey, EntryShape]
ShapesByModule = dict[str, dict[str, Shapes]]  # module -> {"in": ..., "out": ...}


def shapes(tensordict: Any, keys: Iterable[NestedKey]) -> Shapes:
    """Shape and dtype of the entries that are there; nothing is read, stacked or kept alive.

    >>> from raffia.nn.shapes import shapes
    >>> shapes(TensorDict(obs=torch.zeros(5, 4), batch_size=[5]), ["obs", "hidden"])
    {'obs': EntryShape(shape=(5, 4), dtype='float32')}
    """
    found: Shapes = {}
    for key in plain_keys(keys):
        value = holder = tensordict
        for name in unravel_key_to_tuple(key):
            holder, value = value, peek(value, name) if isinstance(value, Node) else None
        if isinstance(value, Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            found[key] = EntryShape(_shape(holder, name, value), dtype)
        elif isinstance(value, Node):
            found[key] = EntryShape(tuple(value.batch_size), type(value_of(value)).__name__)
    return found


def _shape(holder: Any, name: str, value: Tensor) -> tuple[int, ...]:
    """The shape of an entry, with -1 for dimensions that differ within it or are symbols."""
    if value.is_nested and value.layout is torch.strided:  # has no shape
        return (value.size(0), *[-1] * (value.dim() - 1))
    shape = (
        holder.get_item_shape(name) if isinstance(holder, LazyStackedTensorDict) else value.shape
    )
    return tuple([n if n.__class__ is int else -1 for n in shape])


def plain_keys(keys: Iterable[NestedKey]) -> tuple[NestedKey, ...]:
    """Keys without inner tuples, and without the "_" of what is dropped."""
    return tuple([unravel_key(key) for key in keys if key != "_"])


def children(module: Any) -> dict[str, Any] | None:
    """The modules of a sequence by name; None if `module` is no sequence.

    A sequence is recognised by its attribute for shapes: its class stands above this file.
    """
    below = getattr(module, "_modules", {}).get("module")
    if isinstance(below, (nn.ModuleList, nn.ModuleDict)) and "_shapes" in module.__dict__:
        return below._modules
    return None


def watched(
    shapes_seen: ShapesByModule, name: str, module: Any, tensordict: Any, run: Callable[[Any], Any]
) -> Any:
    """Run one module of a sequence, and record in `shapes_seen` the shapes of what it reads and
    writes."""
    before = shapes(tensordict, module.in_keys)
    tensordict = run(tensordict)
    shapes_seen[name] = {"in": before, "out": shapes(tensordict, module.out_keys)}
    return tensordict


def recorded_shapes(seq: Any, path: str = "") -> ShapesByModule:
    """The shapes of the first call, by the full names of the modules."""
    seq._follow()  # which forgets those of modules that were replaced
    found = {path + name: shapes_seen for name, shapes_seen in (seq._shapes or {}).items()}
    for name, module in _nested(seq):
        found |= recorded_shapes(module, f"{path}{name}.")
    return found


def shapes_of_run(seq: Any, example: Any) -> ShapesByModule:
    """The shapes in a run of a copy of the sequence, on a copy of `example`."""
    # Parameters are shared; but lazy ones are copied, since running gives them their shapes.
    shared = {id(p): p for p in seq.parameters() if not torch.nn.parameter.is_lazy(p)}
    twin = copy.deepcopy(seq, shared)
    for module in twin.modules():
        if children(module) is not None:
            module._shapes = None
    shapes_seen: ShapesByModule = {}
    names: dict[Any, list[str]] = {}
    for name, module in _leaves(twin):
        names.setdefault(module, []).append(name)
    for module in names:
        watch = _Watch(shapes_seen, names[module])
        module.register_forward_pre_hook(watch.before)
        module.register_forward_hook(watch.after)
    devices = {p.device for p in twin.parameters() if p.device.type == "cuda"}
    with torch.no_grad(), torch.random.fork_rng(sorted(devices, key=str)):
        twin(example.clone())
    # Hooks miss what a sequence does not call as a module.
    return recorded_shapes(twin) | shapes_seen


class _Watch:
    """Hooks that record the shapes of what a module reads and writes, under each name that it
    has."""

    def __init__(self, shapes_seen: ShapesByModule, names: list[str]) -> None:
        self.shapes_seen, self.names, self.reads = shapes_seen, names, Shapes()

    def before(self, module: Any, args: Any) -> None:
        self.reads = shapes(args[0], module.in_keys)

    def after(self, module: Any, args: Any, tensordict: Any) -> None:
        name = self.names.pop(0) if len(self.names) > 1 else self.names[0]
        self.shapes_seen[name] = {"in": self.reads, "out": shapes(tensordict, module.out_keys)}


def _nested(seq: Any) -> list[tuple[str, Any]]:
    below = children(seq) or {}
    return [(name, module) for name, module in below.items() if children(module) is not None]


def _leaves(seq: Any, path: str = "") -> list[tuple[str, Any]]:
    """The modules of a sequence and of those nested in it, in order, by their full names."""
    leaves: list[tuple[str, Any]] = []
    for name, module in (children(seq) or {}).items():
        nested = children(module) is not None
        leaves += _leaves(module, f"{path}{name}.") if nested else [(path + name, module)]
    return leaves
