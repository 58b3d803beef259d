"""Conversion of a module's parameters and buffers to a container, and back into the module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, Unpack, overload

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from raffia.tensordict import kinds
from raffia.tensordict.keys import MissingKeyError, nearest
from raffia.tensordict.node import Entries, HasPlain, Node, Plain
from raffia.tensordict.selection import flatten_keys
from raffia.tensordict.uninitialised import is_uninitialised_row, uninitialised_rows, wait_for_input
from raffia.tensordict.views import is_leaf_nontensor

_SCALAR = torch.Size()
Parameter = nn.Parameter
is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor
in_transform = torch._C._functorch.peek_interpreter_stack  # None outside torch.func

# ------------------------------------------------------------------------ out of modules


if TYPE_CHECKING:

    class BoundFromModule(Protocol[Plain]):
        """`from_module` of a class of containers."""

        @overload
        def __call__(
            self,
            module: nn.Module,
            as_module: Literal[False] = ...,
            lock: bool = ...,
            use_state_dict: bool = ...,
            filter_empty: bool = ...,
        ) -> Plain: ...
        @overload
        def __call__(
            self,
            module: nn.Module,
            as_module: bool,
            lock: bool = ...,
            use_state_dict: bool = ...,
            filter_empty: bool = ...,
        ) -> Any: ...

    class BoundFromModules(Protocol[Plain]):
        """`from_modules` of a class of containers."""

        @overload
        def __call__(
            self,
            *modules: nn.Module,
            as_module: Literal[False] = ...,
            lock: bool = ...,
            use_state_dict: bool = ...,
            lazy_stack: Literal[False] = ...,
            expand_identical: bool = ...,
        ) -> Plain: ...
        @overload
        def __call__(
            self,
            *modules: nn.Module,
            as_module: bool = ...,
            lock: bool = ...,
            use_state_dict: bool = ...,
            lazy_stack: bool = ...,
            expand_identical: bool = ...,
        ) -> Any: ...

    class FromModule:
        """The type of the method, for type checkers."""

        def __get__(self, td: Any, kind: type[HasPlain[Plain]]) -> BoundFromModule[Plain]: ...

    class FromModules:
        """The type of the method, for type checkers."""

        def __get__(self, td: Any, kind: type[HasPlain[Plain]]) -> BoundFromModules[Plain]: ...


def from_module(
    cls: Any,
    module: nn.Module,
    as_module: bool = False,
    lock: bool = False,
    use_state_dict: bool = False,
    filter_empty: bool = True,
) -> Node:
    """The parameters and buffers of a module, nested like its layers; the same objects, with ties.

    as_module: give a `TensorDictParams`.
    lock: lock the result.
    use_state_dict: go through `module.state_dict()` and its hooks; gives detached tensors.
    filter_empty: leave out layers that have neither.

    >>> from raffia import TensorDict
    >>> layer = nn.Linear(3, 4)
    >>> TensorDict.from_module(layer)["weight"] is layer.weight
    True
    """
    if use_state_dict:
        td = cls._plain({}, batch_size=_SCALAR)
        for name, value in module.state_dict().items():
            if isinstance(value, Tensor):
                td.set(tuple(name.split(".")), value)
    else:
        td = cls._plain._make(_tree(cls._plain, module, filter_empty), _SCALAR)
    if as_module:
        td = kinds.TensorDictParams(td, no_convert=True)
    return td.lock_() if lock else td


def _tree(plain: Any, module: Any, filter_empty: bool) -> Entries:
    if isinstance(module, Node):
        return dict(module._shallow()._entries())
    entries: Entries = {name: p for name, p in module._parameters.items() if p is not None}
    for name, buffer in module._buffers.items():
        if buffer is not None:
            entries[name] = buffer
    for name, child in module._modules.items():
        if child is not None:
            below = _tree(plain, child, filter_empty)
            if below or not filter_empty:
                entries[name] = plain._make(
                    below, child._batch_size if isinstance(child, Node) else _SCALAR
                )
    return entries


def from_modules(
    cls: Any,
    *modules: nn.Module,
    as_module: bool = False,
    lock: bool = True,
    use_state_dict: bool = False,
    lazy_stack: bool = False,
    expand_identical: bool = False,
) -> Node:
    """The parameters and buffers of several modules of one structure, stacked.

    For ensembles by `torch.vmap`.

    as_module: give a `TensorDictParams`.
    lock: lock the result.
    use_state_dict: go through `state_dict()` and its hooks; gives detached tensors.
    lazy_stack: stack the original parameters again at each access, so that gradients reach them and
        structures may differ; otherwise the result holds new parameters, which are the ones to
        optimise.
    expand_identical: a parameter that all modules share is expanded, not copied; gradients reach
        the original.
    Lazy layers may be uninitialised: the first call by `torch.vmap` initialises all of them.
    Raises RuntimeError if the structures or shapes differ.

    >>> from raffia import TensorDict
    >>> modules = [nn.Linear(3, 4) for _ in range(2)]
    >>> params = TensorDict.from_modules(*modules)
    >>> def call(params, x):
    ...     with params.to_module(modules[0]):
    ...         return modules[0](x)
    >>> torch.vmap(call, (0, None))(params, torch.zeros(3)).shape
    torch.Size([2, 4])
    """
    if not modules:
        raise RuntimeError(
            "from_modules needs at least one module: from_modules(module, module, ...)"
        )
    for module in modules:
        if not isinstance(module, (nn.Module, Node)):
            listed = isinstance(module, (list, tuple))
            raise TypeError(
                f"from_modules takes nn.Modules, got {type(module).__name__}"
                + ("; unpack it: from_modules(*modules)" if listed else "")
            )
    if lazy_stack:
        if as_module:
            raise RuntimeError(
                "LazyStackedTensorDict is not permitted as a module: "
                "TensorDictParams must own its parameters; "
                "drop as_module=True or lazy_stack=True"
            )
        if any([_is_lazy(module) for module in modules]):
            raise RuntimeError(
                "lazy modules have no parameters to stack yet; run them once, or use "
                "lazy_stack=False"
            )
        td = kinds.lazy_stack([from_module(cls, m, use_state_dict=use_state_dict) for m in modules])
    elif use_state_dict and not any([_is_lazy(module) for module in modules]):
        td = kinds.stack([from_module(cls, m, use_state_dict=True) for m in modules], 0)
    else:
        size = torch.Size((len(modules),))
        with torch.no_grad() if not expand_identical else contextlib.nullcontext():
            td = cls._plain._make(_stacked(cls._plain, modules, size, expand_identical, ""), size)
    if as_module:
        td = kinds.TensorDictParams(td, no_convert=True)
    return td.lock_() if lock else td


def _is_lazy(module: Any) -> bool:
    return any([is_lazy(p) for p in (*module.parameters(), *module.buffers())])


def _stacked(
    plain: Any, modules: Sequence[nn.Module], size: torch.Size, expand: bool, path: str
) -> Entries:
    """Stacks of the tensors and containers under each name, over all modules."""
    first = modules[0]
    if isinstance(first, Node):
        return _stacked_params(modules, size)
    entries: Entries = {}
    for store in ("_parameters", "_buffers"):
        stores = [getattr(module, store) for module in modules]
        for name, value in stores[0].items():
            values = [s.get(name) for s in stores]
            if value is not None and all([v is not None for v in values]):
                entries[name] = _stack_leaves(values, expand, path + name)
            elif any([v is not None for v in values]):
                raise _structure_mismatch(path + name, expand)
        for other in stores[1:]:
            if len(other) != len(stores[0]):
                raise _structure_mismatch(
                    path + str(sorted(other.keys() ^ stores[0].keys())), expand
                )
    children = [module._modules for module in modules]
    for name, child in children[0].items():
        below: list[Any] = [c.get(name) for c in children]
        if child is None or any([b is None for b in below]):
            if any([b is not None and (b.state_dict()) for b in below]):
                raise _structure_mismatch(path + name, expand)
            continue
        nested = _stacked(plain, below, size, expand, f"{path}{name}.")
        if nested:
            entries[name] = plain._make(nested, size)
    for other in children[1:]:
        for name in other.keys() - children[0].keys():
            extra = other[name]
            if extra is not None and extra.state_dict():
                raise _structure_mismatch(path + name, expand)
    return entries


def _stacked_params(modules: Sequence[Any], size: torch.Size) -> Entries:
    """Stacks of the entries under each name, for `TensorDictParams` and the nodes in them."""
    entries: Entries = {}
    for name, value in modules[0]._entries().items():
        values = [module._get_str(name) for module in modules]
        if isinstance(value, Node):
            below = _stacked_params(values, size)
            entries[name] = value._plain._make(below, size + value._batch_size)
        else:
            entries[name] = _stack_leaves(values, False, name)
    return entries


def _structure_mismatch(where: str, expand: bool) -> Exception:
    kind = ValueError if expand else RuntimeError
    return kind(
        f"The sets of keys in the modules are exclusive: not all of them have {where}. Modules of "
        "different structure can be stacked with lazy_stack=True."
    )


def _stack_leaves(values: list[Any], expand: bool, name: str) -> Tensor:
    first = values[0]
    lazy = [is_lazy(value) for value in values]
    if all(lazy):
        return uninitialised_rows(first, len(values))
    if any(lazy):
        raise RuntimeError(
            f"parameter {name} is initialised in some of the modules and not in the others; run "
            "all of them once before stacking them, or none"
        )
    if expand and all([value is first for value in values]):
        return first.expand(len(values), *first.shape)
    try:
        stacked = torch.stack([value.detach() for value in values] if expand else values)
    except RuntimeError as error:
        shapes = [value.shape for value in values]
        other = next((shape for shape in shapes if shape != shapes[0]), shapes[0])
        raise RuntimeError(
            f"The shapes of the tensors to stack is incompatible: {other} vs {shapes[0]} "
            f"for key {name}. {error}"
        ) from error
    if isinstance(first, nn.Parameter):
        return nn.Parameter(stacked, first.requires_grad)
    return stacked


# ------------------------------------------------------------------------ into a module

_ABSENT = object()  # marks a name that did not exist
Undo = list[tuple[dict[Any, Any], Any, Any]]  # (where, name, the previous value)


class SwapOptions(TypedDict, total=False):
    """Options of `to_module`, for type checkers."""

    inplace: bool | None
    swap_dest: Any
    use_state_dict: bool
    non_blocking: bool
    preserve_module_state: bool


@overload
def to_module(
    td: HasPlain[Plain],
    module: nn.Module,
    *,
    return_swap: Literal[True] = True,
    **options: Unpack[SwapOptions],
) -> Plain: ...
@overload
def to_module(
    td: HasPlain[Plain], module: nn.Module, *, return_swap: bool, **options: Unpack[SwapOptions]
) -> Plain | None: ...
def to_module(
    td: Any,
    module: nn.Module,
    *,
    inplace: bool | None = None,
    return_swap: bool = True,
    swap_dest: Any = None,
    use_state_dict: bool = False,
    non_blocking: bool = False,
    preserve_module_state: bool = True,
) -> Any:
    """Put the entries into a module as its parameters and buffers; `with` restores the previous
    ones.

    Returns a container with the previous tensors, whose own `to_module` restores them.

    inplace: write into the module's tensors instead of replacing them.
    return_swap: False returns None.
    swap_dest: container that receives the previous tensors.
    use_state_dict: go through `module.load_state_dict()` and its hooks.
    non_blocking: for `inplace`.
    preserve_module_state: a parameter of the module stays a parameter that requires a gradient or
        not as it did, a buffer a buffer; False puts the tensors in as they are: what is a parameter
        is one of the module's, another tensor instead of a parameter an attribute.
    Raises KeyError, before anything is changed, if the module has no such tensor for an entry.

    >>> from raffia import TensorDict
    >>> layer = nn.Linear(3, 4)
    >>> with TensorDict(weight=torch.zeros(4, 3), bias=torch.ones(4)).to_module(layer):
    ...     layer(torch.rand(3)).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"to_module takes an nn.Module, got {type(module).__name__}")
    undo: Undo = []
    if use_state_dict:
        swap, back = _through_state_dict(td, module)
    elif inplace:
        swap, back = _in_place(td, module, non_blocking)
    else:
        preserve = preserve_module_state and not torch.compiler.is_compiling()
        try:
            swap = td._plain._make(swap_in(td, module, undo, preserve, {}), td._batch_size)
            if not (preserve_module_state or torch.compiler.is_compiling()):
                _register_by_kind(module, undo)
        except BaseException:
            put_back(undo)
            raise
        back = lambda _: put_back(undo)  # noqa: E731
    if not return_swap:
        return None
    if swap_dest is not None:
        swap = swap_dest.update(swap)
    swap._origin = ("module", back, lambda error: explain_swap(error, undo))
    return swap


def explain_swap(error: BaseException, undo: Undo) -> None:
    """Note at an error, before the swap is undone, which tensors are of another shape."""
    differing: dict[str, tuple[Any, Any]] = {}
    for store, name, was in undo:
        value = store.get(name)
        if not (isinstance(value, Tensor) and isinstance(was, Tensor)) or is_lazy(was):
            continue
        if value.shape != was.shape:
            differing[name] = value.shape, was.shape
    note = mismatch_text(differing)
    if note:
        error.add_note(note)


def mismatch_text(differing: dict[str, tuple[Any, Any]]) -> str:
    """A note on parameters whose shapes differ from the module's: {name: (here, there)}."""
    if not differing:
        return ""
    shapes = [f"{name}: {tuple(here)} for {tuple(own)}" for name, (here, own) in differing.items()]
    note = f"parameters that were put into the module have other shapes: {', '.join(shapes)}"
    if all([here[1:] == own for here, own in differing.values()]):
        note += (
            "; to call the module with the parameters of several members: torch.vmap(call, "
            "in_dims=(0, None))(params, x)"
        )
    return note


def put_back(undo: Undo) -> None:
    """Restore the previous tensors; the first change to a name is undone last.

    So a layer under two names is whole again.
    """
    for store, name, value in reversed(undo):
        if value is _ABSENT:
            store.pop(name, None)
        else:
            store[name] = value


def swap_in(
    node: Any, module: Any, undo: Undo, preserve: bool, done: dict[int, Entries]
) -> Entries:
    """Put the entries of `node` into one layer and what is below it; returns what it replaced.

    A layer with several names is handled once, for the first of them.
    """
    earlier = done.get(id(module))
    if isinstance(module, Node):
        if earlier is None:
            earlier = done[id(module)] = module._swap(node, undo)  # type: ignore[attr-defined]
        return earlier
    parameters, buffers, children = module._parameters, module._buffers, module._modules
    entries = node._entries()
    old: Entries = {}
    if earlier is None:
        done[id(module)] = old
    else:  # what the first name did not bring
        entries = {name: value for name, value in entries.items() if name not in earlier}
        old.update(earlier)
    for name, value in entries.items():
        if value.__class__ is not Tensor and isinstance(value, Node):
            child = children.get(name)
            if child is None:
                if value._is_data() or not value._leaves([]):
                    continue
                raise _no_such_name(name, module)
            old[name] = node._plain._make(
                swap_in(value, child, undo, preserve, done), value._batch_size
            )
        elif name in parameters and not (buffers and name in buffers):
            was = parameters[name]
            undo.append((parameters, name, was))
            if was is None:
                if name in module.__dict__:
                    was = _taken(module.__dict__, name, undo)
            elif preserve:
                value = _fitted(value, was)
            parameters[name] = value
            old[name] = was
        elif name in buffers:
            was = buffers[name]
            undo.append((buffers, name, was))
            if was is None and name in parameters:
                was = _taken(parameters, name, undo)
            if preserve and isinstance(value, Parameter):
                value = value.as_subclass(Tensor)  # over the same memory, and with its gradient
            buffers[name] = value
            old[name] = was
        else:
            raise _no_such_name(name, module)
    if isinstance(module, LazyModuleMixin) and in_transform():
        _await_lazy(module, old, undo)
    if "_flat_weights" in module.__dict__:  # recurrent layers keep a second list of their weights
        undo.append((module.__dict__, "_flat_weights", module._flat_weights))
        module.__dict__["_flat_weights"] = [parameters.get(n) for n in module._flat_weights_names]
    return old


def _await_lazy(module: Any, names: Entries, undo: Undo) -> None:
    """Make a lazy layer initialise the parameters of several modules when it is called."""
    rows = {}
    for name in names:
        value = module._parameters.get(name, module._buffers.get(name))
        if isinstance(value, Tensor) and is_functorch_wrapped_tensor(value):
            rows[name] = value
    if any([is_uninitialised_row(row) for row in rows.values()]):
        handle = wait_for_input(module, rows).handle
        undo.append((module._forward_pre_hooks, handle.id, _ABSENT))


def _taken(store: dict[str, Any], name: str, undo: Undo) -> Any:
    """Remove and return a tensor that `_register_by_kind` put into `store`."""
    undo.append((store, name, store[name]))
    return store.pop(name)


def _register_by_kind(module: nn.Module, undo: Undo) -> None:
    """Register swapped-in parameters as such, and keep other swapped-in tensors as attributes."""

    def move(value: Any, source: dict[str, Any], dest: dict[str, Any], name: str) -> None:
        undo.append((source, name, value))
        undo.append((dest, name, _ABSENT))
        source[name], dest[name] = None, value

    for layer in module.modules():
        if isinstance(layer, Node):
            continue
        for name, value in list(layer._parameters.items()):
            if value is not None and not isinstance(value, Parameter):
                move(value, layer._parameters, layer.__dict__, name)
        for name, buffer in list(layer._buffers.items()):
            if isinstance(buffer, Parameter):
                move(buffer, layer._buffers, layer._parameters, name)


def _fitted(value: Tensor, was: Tensor) -> Tensor:
    """The tensor as a parameter that requires a gradient if the module's own does.

    Only where that loses nothing.
    """
    if in_transform() and is_functorch_wrapped_tensor(value):
        return value
    kind = value.__class__
    if kind is Parameter or kind is not Tensor and isinstance(value, Parameter):
        same = value.requires_grad == was.requires_grad
        return value if same else Parameter(value.data, was.requires_grad)
    if value.requires_grad or not (was.__class__ is Parameter or isinstance(was, Parameter)):
        return value
    requires_grad = was.requires_grad and (value.is_floating_point() or value.is_complex())
    if kind is Tensor:  # what `Parameter` comes down to
        return Tensor._make_subclass(Parameter, value, requires_grad)
    return Parameter(value.detach(), requires_grad)  # such as of a memory-mapped tensor


def _no_such_name(name: str, module: nn.Module) -> MissingKeyError:
    names = [*module._parameters, *module._buffers, *module._modules]
    return MissingKeyError(
        f"{type(module).__name__} has no parameter, buffer or layer {name!r}; "
        f"it has {sorted(names)}{nearest(name, names)}"
    )


def _in_place(td: Any, module: nn.Module, non_blocking: bool) -> tuple[Any, Callable[[Any], None]]:
    """Write the entries into the module's tensors; if one can't be written, none is.

    A tensor with several names is written once, for the first of them.
    """
    mine = from_module(type(td), module)
    pairs = [(key, mine.get(key), value) for key, value in td.items(True, True)]
    for key, there, _ in pairs:
        if there is None:
            raise KeyError(
                f"the module has no parameter or buffer {key!r}; "
                f"it has {list(mine.keys(True, True))}"
            )
    before = {id(there): there.detach().clone() for _, there, _ in pairs}
    swap = td._plain({}, batch_size=td._batch_size)
    first: dict[int, tuple[Any, Tensor, Tensor]] = {}
    for key, there, value in pairs:
        swap.set(key, before[id(there)])
        first.setdefault(id(there), (key, there, value))
    try:
        for _, there, value in first.values():
            there.data.copy_(value.detach(), non_blocking=non_blocking)
    except BaseException:
        for _, there, _ in first.values():
            there.data.copy_(before[id(there)])
        raise

    def back(swapped: Any) -> None:
        for key, there, _ in first.values():
            there.data.copy_(swapped.get(key).detach())

    return swap, back


def _through_state_dict(td: Any, module: nn.Module) -> tuple[Any, Callable[[Any], None]]:
    """Load the entries as a state dict."""
    swap = from_module(type(td), module, use_state_dict=True).clone()

    def load(source: Any) -> None:
        flat = flatten_keys(source, ".", is_leaf=is_leaf_nontensor)
        module.load_state_dict(
            {name: value for name, value in flat.items() if isinstance(value, Tensor)}, strict=False
        )

    unknown = [key for key in td.keys(True, True) if key not in swap.keys(True, True)]
    if unknown:
        raise KeyError(
            f"the module's state dict has no {unknown}; it has {list(swap.keys(True, True))}"
        )
    load(td)
    return swap, load
