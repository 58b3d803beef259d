"""Keyed modules as one flat program over tensors, by `torch.fx`."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from keyword import iskeyword
from typing import Any

from torch import fx, nn

from raffia.nn.base import OutKeySelection, TensorDictModuleBase, dropped_keys
from raffia.nn.dispatch import as_entry, dispatch
from raffia.nn.module import TensorDictModule, result_container, spread
from raffia.nn.sequence import TensorDictSequential, rewritten
from raffia.nn.wrappers import TensorDictModuleWrapper
from raffia.tensordict.keys import NestedKey, unravel_key_list, unravel_key_to_tuple
from raffia.tensordict.node import Container

Path = tuple[str, ...]


def symbolic_trace(td_module: Any) -> TDGraphModule:
    """A keyed module or sequence as a flat `torch.fx` program over tensors.

    The program reads the inputs with `tensordict[key]`, hands tensors from one module to the next,
    and writes all outputs at the end. Its variables are named after the keys. Parameters are the
    module's own. Modules of `torch.nn` stay calls, other modules and functions are followed by
    `torch.fx`, with its limits: what depends on the module's state (`self.training`) is fixed.
    What `torch.fx` cannot follow stays one call.

    Raises TypeError for a module that works on the container itself, not on tensors.
    Other than in the module, a missing input is always a KeyError, and a container in the middle of
    a sequence that is not the result is not written to.

    >>> from torch import nn
    >>> from raffia.nn import TensorDictModule, TensorDictSequential, symbolic_trace
    >>> seq = TensorDictSequential(
    ...     TensorDictModule(nn.Linear(3, 4), in_keys=["obs"], out_keys=["hidden"]),
    ...     TensorDictModule(lambda h, m: h.exp() * m, ["hidden", "mask"], [("out", "y")]),
    ... )
    >>> flat = symbolic_trace(seq)
    >>> print(flat.code.strip())
    def forward(self, tensordict):
        obs = tensordict['obs']
        hidden = self.linear(obs);  obs = None
        mask = tensordict['mask'];  tensordict = None
        exp = hidden.exp()
        out_y = exp * mask;  exp = mask = None
        return (hidden, out_y)
    >>> flat(TensorDict(obs=torch.zeros(2, 3), mask=torch.ones(2, 4)))["out", "y"].shape
    torch.Size([2, 4])
    """
    steps = list(_steps(td_module, ""))
    opaque = {id(step) for _, step in steps if not _follows(step)}
    program = _Program(td_module, steps, opaque)
    graph = _Tracer().trace(program)
    root: nn.Module = program
    prefix = ""
    children = dict(program.named_children())
    if len(children) == len(steps) == 1 and not _is_leaf(*children.values()):
        [(prefix, root)] = children.items()  # a module that stands alone needs no name
    graph_module = fx.GraphModule(root, _renamed(graph, program.variables, prefix), "GraphModule")
    traced = TDGraphModule(
        graph_module,
        [_key(path) for path in program.written()],
        in_keys=td_module.in_keys,
        inplace=program.result.inplace,
        dropped=[_key(path) for path in sorted(program.result.dropped)],
    )
    chosen = [key for key in td_module.out_keys if key in traced.out_keys]
    if chosen != traced.out_keys:  # inputs may be overwritten, too
        traced.select_out_keys(*chosen)
    return traced


class TDGraphModule(TensorDictModuleBase):
    """A keyed module made of a `torch.fx.GraphModule`, whose attributes it passes on.

    graph_module: takes a container and returns a tensor or a tuple of tensors.
    out_keys: the keys that these are stored under.
    in_keys: the keys that it reads, to call it with tensors.
    inplace: True writes into the container that came in; False into a new one without batch size;
        "empty" into an empty one of the same batch size.
    dropped: keys that the result does not have.

    >>> from raffia.nn import TensorDictModule, symbolic_trace
    >>> double = symbolic_trace(TensorDictModule(lambda x: 2 * x, in_keys=["x"], out_keys=["y"]))
    >>> double(TensorDict(x=torch.ones(2)))["y"], double(torch.ones(2))
    (tensor([2., 2.]), tensor([2., 2.]))
    >>> [node.op for node in double.graph.nodes]
    ['placeholder', 'call_function', 'call_function', 'output']
    """

    _inner = "_gm"

    def __init__(
        self,
        graph_module: fx.GraphModule,
        out_keys: list[NestedKey],
        *,
        in_keys: Sequence[NestedKey] = (),
        inplace: bool | str = True,
        dropped: Sequence[NestedKey] = (),
    ) -> None:
        super().__init__()
        self.in_keys, self.out_keys = list(in_keys), list(out_keys)
        self.inplace, self.dropped = inplace, unravel_key_list(list(dropped))
        self._gm = graph_module
        self.training = graph_module.training

    @dispatch(auto_batch_size=False)
    def forward(self, tensordict: Container, tensordict_out: Container | None = None) -> Container:
        """Run the program and store its outputs; also callable with tensors, see `dispatch`."""
        outputs = self._gm(tensordict)
        if tensordict_out is None:
            tensordict_out = result_container(tensordict, self.inplace)
        if not isinstance(outputs, tuple):
            outputs = (outputs,)
        for key, value in zip(self.out_keys_source, outputs, strict=True):
            tensordict_out.set(key, as_entry(value))
        if self.dropped:
            tensordict_out.exclude(*self.dropped, inplace=True)
        return tensordict_out


# ------------------------------------------------------------------------ what can be traced


def _steps(keyed: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The modules that wrap functions of tensors, in order, with the names that dicts gave them."""
    if _runs(keyed, TensorDictModuleWrapper):
        yield from _steps(keyed.td_module, name)
    elif _runs(keyed, TensorDictSequential):
        if keyed.partial_tolerant:
            raise _untraceable(
                keyed, "with partial_tolerant=True, which modules run depends on the input"
            )
        for child_name, child in keyed.module._modules.items():  # a module may stand twice
            if not isinstance(keyed.module, nn.ModuleDict):
                child_name = ""
            yield from _steps(child, "_".join([part for part in (name, child_name) if part]))
    elif not _runs(keyed, TensorDictModule):
        raise _untraceable(keyed, "it works on the container itself, not on tensors")
    elif keyed.get_kwargs:
        raise _untraceable(keyed, f"it reads its inputs with get_kwargs={keyed.get_kwargs}")
    else:
        yield name, keyed


def _runs(keyed: Any, cls: Any) -> bool:
    """Whether calling a module is what calling `cls` is; True for subclasses that add to it."""
    if not isinstance(keyed, cls) or type(keyed).forward is not cls.forward:
        return False
    hooks = [*keyed._forward_hooks.values(), *keyed._forward_pre_hooks.values()]
    return "forward" not in keyed.__dict__ and all([isinstance(h, OutKeySelection) for h in hooks])


def _untraceable(module: Any, why: str) -> TypeError:
    return TypeError(
        f"symbolic_trace can't make a flat program of {type(module).__name__}: {why}. It takes a "
        "TensorDictModule, or a TensorDictSequential made of these; for a probabilistic sequence, "
        "trace the modules before the draw: TensorDictSequential(*list(sequence)[:-1])"
    )


def _follows(step: Any) -> bool:
    """Whether `torch.fx` can follow what a module computes."""
    try:
        _Tracer().trace(_Program(step, [("", step)], set()))
    except Exception:  # whatever it was: as one call, it happens when it is called
        return False
    return True


def _is_leaf(module: nn.Module) -> bool:
    return _Tracer().is_leaf_module(module, "")


# ------------------------------------------------------------------------ tracing


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, _Call) or super().is_leaf_module(m, module_qualified_name)


class _Call(nn.Module):
    """The callable wrapped by a keyed module, as one call, where `torch.fx` cannot follow it."""

    def __init__(self, step: Any) -> None:
        super().__init__()
        self.module, self.method, self.out_keys = step.module, step.method, step.out_keys_source

    def forward(self, *args: Any, **kwargs: Any) -> object:
        call = self.module if self.method is None else getattr(self.module, self.method)
        outputs = _outputs(self, call(*args, **kwargs), self.out_keys)
        return outputs[0] if len(outputs) == 1 else outputs


def _outputs(module: Any, output: Any, out_keys: list[NestedKey]) -> tuple[Any, ...]:
    """The outputs of a module as a tuple, one value for each key."""
    if isinstance(output, fx.Proxy) and len(out_keys) > 1:
        return tuple([operator.getitem(output, i) for i in range(len(out_keys))])
    outputs = tuple(spread(output, out_keys))
    if len(outputs) != len(out_keys):
        raise RuntimeError(
            f"{type(module).__name__} returned {len(outputs)} outputs for the {len(out_keys)} "
            f"out_keys={out_keys}"
        )
    return outputs


def _key(path: Path) -> NestedKey:
    return path[0] if len(path) == 1 else path


class _Entries:
    """The entries of a container read, written and dropped while a program is traced."""

    def __init__(self, tensordict: Any, inplace: bool | str = True) -> None:
        self.tensordict = tensordict  # the input, or None for a new container
        self.inplace = inplace
        self.read_before: dict[Path, Any] = {}
        self.written: dict[Path, Any] = {}
        self.dropped: set[Path] = set()

    def copy(self) -> _Entries:
        new = _Entries(self.tensordict, self.inplace)
        new.read_before = self.read_before
        new.written, new.dropped = dict(self.written), set(self.dropped)
        return new

    def fresh(self, inplace: bool | str) -> _Entries:
        """The new container that a module writes into instead of this one."""
        return _Entries(None, False if self.inplace is False else inplace)

    def read(self, key: NestedKey, reader: Any) -> object:
        path = unravel_key_to_tuple(key)
        for i in range(len(path), 0, -1):
            if path[:i] in self.written:
                value = self.written[path[:i]]
                return value if i == len(path) else value[_key(path[i:])]
        if self.tensordict is None or path in self.dropped:
            raise _untraceable(reader, f"it reads {key!r}, which was removed before")
        if any(other[: len(path)] == path for other in self.written):
            raise _untraceable(reader, f"it reads all of {key!r}, a part of which was written")
        if path not in self.read_before:
            self.read_before[path] = self.tensordict[_key(path)]
        return self.read_before[path]

    def write(self, key: NestedKey, value: Any) -> None:
        path = unravel_key_to_tuple(key)
        for other in [other for other in self.written if other[: len(path)] == path]:
            del self.written[other]
        self.written[path] = value
        self.dropped.discard(path)

    def drop(self, key: NestedKey) -> None:
        path = unravel_key_to_tuple(key)
        self.written.pop(path, None)
        self.dropped.add(path)


class _Program(nn.Module):
    """The root that is traced: runs the steps on what is known of the container."""

    keyed: Any

    def __init__(self, keyed: Any, steps: list[tuple[str, Any]], opaque: set[int]) -> None:
        super().__init__()
        self.__dict__["keyed"] = keyed  # not a child: the wrapped modules are, under short names
        self.calls: dict[int, Callable[..., Any]] = {}
        self.variables: dict[fx.Node, str] = {}
        self.result = _Entries(None)
        for name, step in steps:
            self.calls[id(step)] = self._call_of(name, step, id(step) in opaque)

    def _call_of(self, name: str, step: Any, opaque: bool) -> Callable[..., Any]:
        """The callable that runs a step; modules are registered under a name."""
        module, method = step.module, step.method
        name = name or getattr(module, "__name__", type(module).__name__).lower()
        if opaque:
            module, method = _Call(step), None
        if isinstance(module, nn.Module) and all([module is not m for m in self.children()]):
            self.add_module(self._unused(name), module)
        return module if method is None else getattr(module, method)

    def _unused(self, name: str) -> str:
        name = re.sub(r"\W+", "_", name).strip("_") or "call"
        name = f"_{name}" if name[0].isdigit() else f"{name}_" if iskeyword(name) else name
        names = itertools.chain([name], (f"{name}_{i}" for i in itertools.count(1)))
        taken = (self, fx.GraphModule)
        return next(n for n in names if n != "meta" and not any([hasattr(t, n) for t in taken]))

    def forward(self, tensordict: Any) -> tuple[Any, ...]:
        self.result = self._run(self.keyed, _Entries(tensordict))
        return tuple([self.result.written[path] for path in self.written()])

    def written(self) -> list[Path]:
        """The keys that the program writes: the module's `out_keys`, then inputs overwritten."""
        paths = [unravel_key_to_tuple(key) for key in self.keyed.out_keys if key != "_"]
        written = self.result.written
        return [*[p for p in paths if p in written], *[p for p in written if p not in paths]]

    def _run(self, keyed: Any, entries: _Entries) -> _Entries:
        if _runs(keyed, TensorDictModuleWrapper):
            return self._run(keyed.td_module, entries)
        if _runs(keyed, TensorDictSequential):
            return self._sequence(keyed, entries)
        return self._step(keyed, entries)

    def _sequence(self, sequence: Any, entries: _Entries) -> _Entries:
        apart = sequence.inplace is not None or sequence._selected is not None
        result = entries.copy() if apart else entries
        for module in sequence:
            result = self._run(module, result)
        if not apart:
            return result
        keys = list(sequence.out_keys)
        if sequence.inplace in (None, True):
            keys += rewritten(sequence)
        else:
            entries = entries.fresh(sequence.inplace)
        for path in map(unravel_key_to_tuple, keys):
            if path in result.written:
                entries.write(path, result.written[path])
        return entries

    def _step(self, step: Any, entries: _Entries) -> _Entries:
        values = [self._named(key, entries.read(key, step)) for key in step.in_keys]
        outputs = self._outputs(step, values)
        if step.inplace is not True:
            entries = entries.fresh(step.inplace)
        for key, value in zip(step.out_keys_source, outputs, strict=True):
            if key != "_":
                entries.write(key, self._named(key, value))
        for key in dropped_keys(step):
            entries.drop(key)
        return entries

    def _outputs(self, step: Any, values: list[Any]) -> tuple[Any, ...]:
        call, kwargs = self.calls[id(step)], dict(step.method_kwargs)
        if step._keywords is not None:
            kwargs |= dict(zip(step._keywords, values, strict=True))
            values = []
        return _outputs(step, call(*values, **kwargs), step.out_keys_source)

    def _named(self, key: NestedKey, value: Any) -> Any:
        """The value, whose variable is called like the key, if it has no name yet."""
        if isinstance(value, fx.Proxy):
            self.variables.setdefault(value.node, "_".join(unravel_key_to_tuple(key)))
        return value


def _renamed(graph: fx.Graph, variables: dict[fx.Node, str], prefix: str) -> fx.Graph:
    """A copy of a graph with other names of variables, and of modules without a prefix."""
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        target = node.target
        if node.op in ("call_module", "get_attr") and prefix:
            target = target.removeprefix(f"{prefix}.")
        elif node.op == "placeholder":
            copies[node] = new.placeholder(node.target)
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: copies[n])
        name = variables.get(node, node.name.removeprefix(f"{prefix}_"))
        copies[node] = new.create_node(node.op, target, args, kwargs, name)
    return new
