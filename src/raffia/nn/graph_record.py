"""Plain records of a sequence: its modules, the keys between them, and their shapes.

No record has a module or a tensor in it. graph.py makes them of a sequence, whose shapes are
recorded in a run without keeping a tensor; drawing.py writes how they look, with the short texts
for keys and modules that stand here.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raffia.tensordict.access import peek, value_of
from raffia.tensordict.keys import NestedKey, is_under, unravel_key, unravel_key_to_tuple
from raffia.tensordict.lazy import LazyStackedTensorDict
from raffia.tensordict.node import Container, Node


@dataclass(frozen=True)
class GraphNode:
    """One module of a sequence."""

    name: str  # its path: "1", "actor", or "1.0" within a nested sequence
    kind: str  # name of its class
    label: str  # what it computes
    in_keys: tuple[NestedKey, ...]
    out_keys: tuple[NestedKey, ...]  # keys of outputs, without the "_" of dropped ones
    keywords: tuple[str, ...] = ()  # the argument that each input goes to, if given by name
    random: bool = False  # its outputs are drawn from the distribution `label`
    reads: Shapes = field(default_factory=dict, hash=False)  # shapes read, empty before a call
    writes: Shapes = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class GraphEdge:
    """A value on its way from one module to another, or from or to the outside (None)."""

    key: NestedKey  # key as its source wrote it
    source: str | None
    target: str | None


@dataclass(frozen=True)
class GraphGroup:
    """A sequence within the sequence: its modules are `graph.nodes[start:stop]`."""

    name: str
    kind: str
    start: int
    stop: int
    hidden: tuple[NestedKey, ...]  # written inside, and left out by its selection of outputs


@dataclass(frozen=True)
class GraphRecord:
    """Modules, keys and shapes of a sequence, as data; `Graph` has its drawings, too.

    `nodes` stand in the order of execution, those of nested sequences in their stead; `edges`
    are the entries read by one node from another; `groups` are the nodes of nested sequences.

    >>> edges = (GraphEdge("obs", None, "0"), GraphEdge("action", "0", None))
    >>> node = GraphNode("0", "TensorDictModule", "Linear(4, 2)", ("obs",), ("action",))
    >>> GraphRecord("TensorDictSequential", (node,), edges).in_keys
    ('obs',)
    """

    kind: str
    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]
    groups: tuple[GraphGroup, ...] = ()

    @property
    def in_keys(self) -> tuple[NestedKey, ...]:
        """Keys that must be there before the first module runs."""
        return tuple(dict.fromkeys([e.key for e in self.edges if e.source is None]))

    @property
    def results(self) -> tuple[NestedKey, ...]:
        """The outputs of the sequence: the selected ones, else those that no module reads."""
        return tuple(dict.fromkeys([e.key for e in self.edges if e.target is None]))

    @property
    def overwritten(self) -> dict[NestedKey, tuple[str, ...]]:
        """Keys that lose an earlier value -> the modules that write them, in order.

        A key that came from outside is overwritten by its first writer.
        """
        writers: dict[NestedKey, list[str]] = {key: [] for key in self.in_keys}
        overwritten = {}
        for node in self.nodes:
            for key in node.out_keys:
                writers.setdefault(key, [])
                for lost in [k for k in writers if is_under(k, key)]:
                    if writers[lost] or lost in self.in_keys:
                        overwritten[lost] = writers[lost]
                    writers[lost].append(node.name)
        return {key: tuple(names) for key, names in overwritten.items()}

    @property
    def unread(self) -> dict[NestedKey, tuple[str, ...]]:
        """Outputs that no later module reads -> the modules that write them."""
        read = {(e.source, e.key) for e in self.edges if e.target is not None}
        unread: dict[NestedKey, tuple[str, ...]] = {}
        for node in self.nodes:
            for key in node.out_keys:
                if (node.name, key) not in read:
                    unread[key] = (*unread.get(key, ()), node.name)
        return unread

    @property
    def lost(self) -> dict[NestedKey, tuple[str, ...]]:
        """Outputs that are of no use: overwritten or left out before anybody reads them."""
        selected = {(e.source, e.key) for e in self.edges if e.target is None}
        useless = {
            key: tuple([name for name in names if (name, key) not in selected])
            for key, names in self.unread.items()
        }
        return {key: names for key, names in useless.items() if names}

    @property
    def shapes(self) -> ShapesByModule:
        """The shapes that each module read and wrote; empty before a call."""
        return {n.name: {"in": n.reads, "out": n.writes} for n in self.nodes if n.reads or n.writes}

    def shape_of(self, edge: GraphEdge) -> EntryShape | None:
        """The shape of the value on an edge, if it is known."""
        for node in self.nodes:
            if node.name == edge.source:
                return node.writes.get(edge.key)
            if edge.source is None and node.name == edge.target:
                return node.reads.get(edge.key)
        return None

    def to_dict(self) -> dict[str, Any]:
        """The graph in dicts, lists and strings, for `json.dumps`; nested keys are lists."""

        def shapes(shapes_seen: Shapes) -> list[Any]:
            return [
                {"key": k, "shape": list(s.shape), "dtype": s.dtype} for k, s in shapes_seen.items()
            ]

        nodes = [
            vars(n) | {"in_keys": list(n.in_keys), "out_keys": list(n.out_keys)}
            | {"reads": shapes(n.reads), "writes": shapes(n.writes)}
            for n in self.nodes
        ]  # fmt: skip
        plain = {
            "kind": self.kind,
            "nodes": nodes,
            "edges": [dict(vars(e)) for e in self.edges],
            "groups": [dict(vars(g)) for g in self.groups],
            "in_keys": self.in_keys,
            "results": self.results,
            "overwritten": [{"key": k, "by": v} for k, v in self.overwritten.items()],
            "unread": [{"key": k, "of": v} for k, v in self.unread.items()],
            "lost": [{"key": k, "of": v} for k, v in self.lost.items()],
        }
        return {name: _listed(value) for name, value in plain.items()}


def _listed(value: Any) -> Any:
    """Tuples as lists, all the way down: as they come back from JSON."""
    if isinstance(value, dict):
        return {name: _listed(v) for name, v in value.items()}
    return [_listed(v) for v in value] if isinstance(value, (list, tuple)) else value


_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


class EntryShape(NamedTuple):
    """The shape and dtype recorded for a key, or the class of an entry that is not a tensor.

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
    """The shape and dtype of each existing entry; nothing is read, stacked or referenced.

    >>> from raffia.nn.graph_record import shapes
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
    """The modules of a sequence by name; None if `module` is not a sequence.

    A sequence is recognised by its attribute for shapes: its class imports this file.
    """
    below = getattr(module, "_modules", {}).get("module")
    if isinstance(below, (nn.ModuleList, nn.ModuleDict)) and "_shapes" in module.__dict__:
        return below._modules
    return None


def watched(
    shapes_seen: ShapesByModule,
    name: str,
    module: Any,
    tensordict: Container,
    run: Callable[[Container], Container],
) -> Container:
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


_LONGEST = 56  # characters of a label; what is longer is abridged in the middle
# These only carry keys; the wrapped module tells what is computed.
_CARRIERS = ("TensorDictModule", "TensorDictModuleBase", "WrapModule")


def key_text(key: NestedKey) -> str:
    """A key as it reads in a program: names joined by dots, quoted where that would be ambiguous.

    >>> key_text(("input", "x")), key_text("a.b"), key_text(("a", "b c"))
    ('input.x', "'a.b'", "('a', 'b c')")
    """
    parts = (key,) if isinstance(key, str) else key
    return ".".join(parts) if all([part.isidentifier() for part in parts]) else repr(key)


def keys_text(keys: Iterable[NestedKey]) -> str:
    return ", ".join([key_text(key) for key in keys])


def label(module: Any) -> str:
    """Describe briefly what a keyed module computes: the layer, function or distribution it wraps.

    >>> from torch import nn
    >>> label(nn.Linear(4, 8))
    'Linear(4, 8)'
    >>> label(nn.Sequential(nn.Linear(4, 8), nn.Tanh()))
    'Sequential(Linear(4, 8), Tanh)'
    """
    if is_random(module):
        return _distribution_text(module)
    inner = _wrapped(module)
    if inner is None:
        return _module_text(module) if isinstance(module, nn.Module) else _callable_text(module)
    kind, method = type(module).__name__, module.__dict__.get("method")
    if isinstance(inner, (nn.ModuleList, nn.ModuleDict)):
        return _abridged(kind, [label(child) for child in inner._modules.values()])
    text = label(inner) + (f".{method}" if isinstance(method, str) else "")
    if "num_copies" in module.__dict__:  # of an ensemble
        text = f"{module.num_copies} x {text}"
    return text if kind in _CARRIERS else f"{kind}({text})"


def is_random(module: Any) -> bool:
    """Whether a keyed module draws its outputs from a distribution."""
    return getattr(module, "__dict__", {}).get("distribution_class") is not None


def keywords(module: Any) -> tuple[str, ...]:
    """The names of the arguments that a module's inputs go to; empty if the keys are enough."""
    own = getattr(module, "__dict__", {})
    if is_random(module):
        names = tuple(own.get("dist_keys", ()))
        return (
            () if names == tuple([unravel_key_to_tuple(k)[-1] for k in module.in_keys]) else names
        )
    return tuple(own.get("_keywords") or ())


def _distribution_text(module: Any) -> str:
    name = _callable_text(module.distribution_class)
    parts = getattr(module, "distribution_kwargs", {}).get("distribution_map", {})
    texts = [f"{key_text(key)}={_callable_text(part)}" for key, part in parts.items()]
    return _abridged(name, texts) if texts else name


def _wrapped(module: Any) -> Any:
    """The object that a keyed module wraps, or None: `Net` for `TensorDictModule(Net(), ...)`."""
    if not (isinstance(module, nn.Module) and hasattr(module, "in_keys")):
        return None
    own = module.__dict__ | module._modules  # not getattr, which a wrapper passes on
    for name in ("module", "td_module", "func"):
        if callable(own.get(name)):
            return own[name]
    return None


def _module_text(module: nn.Module) -> str:
    name = type(module).__name__
    if isinstance(module, nn.Sequential):
        return _abridged(name, [label(child) for child in module._modules.values()])
    sizes = [getattr(module, arg, None) for arg in _required(type(module))]
    plain = [repr(size) for size in sizes if isinstance(size, (int, float, str, tuple))]
    text = f"{name}({', '.join(plain)})"
    return text if plain and len(plain) == len(sizes) and len(text) <= _LONGEST else name


def _required(cls: type) -> tuple[str, ...]:
    """Names of the constructor's arguments that have no default: the sizes of a layer."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
    return tuple(
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    )


def _abridged(name: str, parts: list[str]) -> str:
    text = f"{name}({', '.join(parts)})"
    if len(text) <= _LONGEST or len(parts) < 3:
        return text
    return f"{name}({parts[0]}, ..., {parts[-1]})"


def _callable_text(function: Any) -> str:
    if isinstance(function, functools.partial):
        return _callable_text(function.func)
    if isinstance(function, types.MethodType):
        return f"{type(function.__self__).__name__}.{function.__name__}"
    name = getattr(function, "__name__", None) or (
        function if isinstance(function, str) else type(function).__name__
    )
    return "lambda" if name == "<lambda>" else name
