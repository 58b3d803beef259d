"""A container that is a module: its tensors are registered as parameters and buffers."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from raffia.hints import check_choice
from raffia.tensordict import entries, kinds, views
from raffia.tensordict.collection import TensorDictBase
from raffia.tensordict.convert import unmoved
from raffia.tensordict.copies import once_each
from raffia.tensordict.entries import UNSET
from raffia.tensordict.keys import MissingKeyError, dotted, is_key, nearest
from raffia.tensordict.lock import locked_error
from raffia.tensordict.node import Entries, LeafFn, Node, hold
from raffia.tensordict.registries import (
    Part,
    Registered,
    forget_listings,
    nodes_to,
    part_at,
    replace_leaves,
    shared_by_rows,
    tree_of,
)
from raffia.tensordict.signatures import documented_as, with_signature_of
from raffia.tensordict.state_dicts import flat_state, state_dict
from raffia.tensordict.tensordict import TensorDict
from raffia.tensordict.views import NestedView, entries_list

_MUTATORS = """set setdefault pop popitem del_ rename_key_ update clear create_nested
set_non_tensor cat_tensors stack_tensors separates filter_empty_""".split()

# what the tree behind the parameters knows, and what is done with it: results are plain
_STATE = ("_batch_size", "_device", "_names")
_CONTRACT = """_stores _new _map _batched _index _leaves _rebuild _set_batch_size _set_device
_set_names _replace_str""".split()


@kinds.enter
class TensorDictParams(TensorDictBase, nn.Module):  # type: ignore[misc] # `type`: the container's
    """A container that is an `nn.Module`: floating point tensors are parameters, others buffers.

    parameters: container or dict; or give the entries as keywords.
    no_convert: True keeps parameters as they are and takes everything else as buffers; "skip" also
        leaves these as they are, without marking them as `nn.Buffer`. With True, a parameter that
        was expanded over the rows (`from_modules(..., expand_identical=True)`) is registered, and
        stored in state dicts, as the one parameter that it is.
    lock: lock the container.
    Operations on it (indexing, shapes, maths, `data`) give plain `TensorDict`s. Entries are
    attributes too, unless the container has a method of that name: `params.w` is the parameter,
    `params.n` a `TensorDictParams` that shows, and changes, what is nested under "n". What is
    stored in `params["n"]`, a plain container, stays a plain tensor that no optimiser sees, until
    the next change made here.
    Raises RuntimeError for lazy stacks.

    >>> params = TensorDictParams(TensorDict(w=torch.zeros(3), n=dict(b=torch.ones(2))))
    >>> [name for name, _ in params.named_parameters()]
    ['w', 'n.b']
    >>> params.n.b is params["n", "b"]
    True
    """

    _plain: type[TensorDict]
    _part: Part[TensorDictParams]
    _shares: bool = False  # whether it has parameters that are expanded over the rows
    _views: Any = None  # path -> the container that shows that part, as long as somebody has it

    def __init__(
        self,
        parameters: Any = None,
        *,
        no_convert: bool | str = False,
        lock: bool = False,
        **entries: Any,
    ) -> None:
        check_choice("no_convert", no_convert, (True, False, "skip"))
        nn.Module.__init__(self)
        if parameters is None:
            parameters = entries
        elif entries:
            raise TypeError(
                "TensorDictParams takes a container or dict, or keyword entries, not both"
            )
        if isinstance(parameters, TensorDictParams):
            parameters = parameters._tree
        size = None
        if isinstance(parameters, Node):
            _refuse_lazy(parameters)
            parameters, size = parameters._shallow(), parameters._batch_size
        plain = type(parameters) is TensorDict
        source = parameters if plain else TensorDict(parameters, batch_size=size)
        self.no_convert = no_convert
        self._hooks: list[Callable[[Any, Any], Any]] = []
        hold(source)
        self._part = Part(source)
        self._refresh()
        if lock:
            self.lock_()

    @classmethod
    def _from_entries(cls, entries: Any, batch_size: Any, device: Any) -> TensorDictParams:
        return cls(TensorDict(entries, batch_size=batch_size, device=device))

    def _refresh(self) -> None:
        """Convert what is new in the tree and register all."""
        if self.no_convert != "skip":
            _convert(self._tree, {}, self.no_convert is False)
        self._whole()._register()

    def _register(self) -> None:
        parameters, buffers, rows = self._sorted()
        tree, whole, path = self._part.tree, self._part.root, self._part.path
        root = weakref.ref(self) if whole is None else whole.__dict__["_parameters"].root
        self.__dict__["_parameters"] = Registered(parameters, tree, root, path, rows)
        self.__dict__["_buffers"] = Registered(buffers, tree, root, path, {})
        self.__dict__["_shares"] = bool(rows)
        if self._views:
            self._register_views()

    def _sorted(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, torch.Size]]:
        """The parameters and buffers, by dotted name, and the shapes of those with equal rows."""
        rows: dict[str, torch.Size] = {}
        parameters: dict[str, Any] = {}
        buffers: dict[str, Any] = {}
        whole, path = self._whole(), self._part.path
        known = whole.__dict__["_parameters"] if path else {}  # where a plain tensor may stand in
        for key, leaf in entries_list(self._tree, True, True, None, False):
            name = dotted(key)
            shared = shared_by_rows(leaf)
            if shared is not None:
                parameters[name], rows[name] = shared, leaf.shape
            elif isinstance(leaf, nn.Parameter) or (known and ".".join((*path, name)) in known):
                parameters[name] = leaf
            else:
                buffers[name] = leaf
        return parameters, buffers, rows

    # -- parts of it, as attributes

    def __getattr__(self, name: str) -> Any:
        part = self.__dict__.get("_part")
        value = None if part is None else part.tree._d.get(name)
        if value is None:
            return nn.Module.__getattr__(self, name)
        if not isinstance(value, Node):
            return value
        return value._unwrapped() if value._is_data() else self._view(name, tree_of(value))

    def __setattr__(self, name: str, value: Any) -> None:
        part = self.__dict__.get("_part")
        entry = None if part is None else part.tree._d.get(name)
        if isinstance(entry, Node) and not (name in self.__dict__ or hasattr(type(self), name)):
            self.set(name, value)
        else:
            super().__setattr__(name, value)

    def _whole(self) -> TensorDictParams:
        root = self._part.root
        return self if root is None else root

    def _view(self, name: str, part: TensorDict) -> TensorDictParams:
        """The container that shows what is nested under `name`."""
        root, path = self._whole(), (*self._part.path, name)
        if torch.compiler.is_dynamo_compiling():  # which follows neither what is below nor weakref
            view = object.__new__(TensorDictParams)
            for key, value in self.__dict__.items():
                view.__dict__[key] = value
            view._part = Part(part, root, path)
            view._register()
            return view
        if root._views is None:
            root._views = weakref.WeakValueDictionary()
        view = root._views.get(path)
        if view is None:
            view = object.__new__(TensorDictParams)
            nn.Module.__init__(view)
            view._part, view._hooks = Part(part, root, path), []
            view._register()
            root._views[path] = view
        view.__dict__.update(no_convert=root.no_convert, training=root.training)
        return view

    def _register_views(self) -> None:
        """Register the tensors of the views; a view of a removed part becomes independent."""
        for path, view in list(self._views.items()):
            if part_at(self._tree, path) is not view._tree:
                del self._views[path]
                view._part = Part(view._tree)
            view._register()

    def _follow(self, tree: TensorDict, path: tuple[str, ...], name: str, value: Tensor) -> None:
        """Register the tensor that was put in `tree`, which is the part of this one at `path`."""
        if part_at(self._tree, path) is not tree:
            return
        for i in range(len(path)):
            forget_listings(part_at(self._tree, path[:i]))
        name = ".".join((*path, name))
        self._record(name, value)
        for at, view in list(self._views.items()) if self._views else ():
            view._record(name.removeprefix(".".join(at) + "."), value)

    def _record(self, name: str, value: Tensor) -> None:
        for store in (self.__dict__["_parameters"], self.__dict__["_buffers"]):
            if name in store:
                dict.__setitem__(store, name, value)

    # -- the contract of Node: the tree behind it

    @property
    def _tree(self) -> TensorDict:
        if self._shares and not torch.compiler.is_compiling():
            _expand_again(self._part.tree)
        return self._part.tree

    @property
    def _locked(self) -> bool:
        return self._tree._locked

    @_locked.setter
    def _locked(self, value: bool) -> None:
        """Do nothing: a node is locked or unlocked with its `_children`, here the tree."""

    def _entries(self) -> Entries:
        return self._tree._d

    def _get_str(self, name: str) -> Any:
        return self._tree._d.get(name)

    def _set_str(self, name: str, value: Any) -> None:
        self._change(lambda tree: tree._set_str(name, value))

    def _del_str(self, name: str) -> None:
        self._change(lambda tree: tree._del_str(name))

    def _change(self, change: Callable[[TensorDict], Any]) -> Any:
        """Run a change of the tree; if it fails, nothing has changed."""
        if self._locked:
            raise locked_error(self)
        tree = self._tree
        try:
            result = change(tree)
        finally:
            self._refresh()
        return self if result is tree else result

    def _children(self) -> list[Any]:
        return [self._tree]

    def _set_index(self, index: Any, value: Any, ndim: int) -> None:
        with torch.no_grad():
            self._tree._set_index(index, value, ndim)

    def _shallow(self) -> Any:
        return TensorDictParams(self._tree, no_convert=True)

    def _swap(self, node: Any, undo: list[Any]) -> Entries:
        """Swap the entries of `node` into these parameters of a module, for `to_module`."""
        whole = self._whole()
        for holder in (whole, *(whole._views.values() if whole._views else ())):
            for name in ("_parameters", "_buffers"):
                undo.append((holder.__dict__, name, holder.__dict__[name]))

        def visit(mine: TensorDict, theirs: Any) -> Entries:
            old: Entries = {}
            if mine._cache is not None:  # what is listed now holds neither while swapped nor after
                forget_listings(mine)
                undo.append((mine.__dict__, "_cache", dict(mine._cache)))
            for name, value in theirs._entries().items():
                was = mine._d.get(name)
                if was is None:
                    names = list(mine._d)
                    raise MissingKeyError(
                        f"{type(self).__name__} has no entry {name!r}; it has {names}"
                        f"{nearest(name, names)}"
                    )
                if isinstance(value, Node):
                    below = visit(tree_of(was), value)
                    old[name] = TensorDict._make(below, was._batch_size)
                else:
                    undo.append((mine._d, name, was))
                    old[name] = was
                    mine._d[name] = value
            return old

        old = visit(self._tree, node)
        whole._register()
        return old

    # -- what users read, with the hooks

    def _hooked(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            for hook in self._hooks:
                result = hook(self, value)
                value = value if result is None else result
        return value

    @documented_as(entries.get)
    def get(self, key: Any, default: Any = UNSET, **lazy_options: Any) -> Any:
        value = entries.get(self, key, default, **lazy_options)
        return self._hooked(value) if self._hooks and value is not default else value

    def __getitem__(self, idx: Any) -> Any:
        """Read an entry by key, or rows by index."""
        value = TensorDictBase.__getitem__(self, idx)
        return self._hooked(value) if self._hooks and is_key(idx) else value

    @documented_as(views.values)
    def values(self, *args: Any, **kwargs: Any) -> NestedView:
        view = views.values(self, *args, **kwargs)
        return _HookedView(self, view.flags, view.part) if self._hooks else view

    @documented_as(views.items)
    def items(self, *args: Any, **kwargs: Any) -> NestedView:
        view = views.items(self, *args, **kwargs)
        return _HookedView(self, view.flags, view.part) if self._hooks else view

    # -- module

    def get_parameter(self, target: str) -> nn.Parameter:
        """The parameter with a dotted name, as in `named_parameters`.

        >>> TensorDictParams(TensorDict(n=dict(b=torch.ones(2)))).get_parameter("n.b").shape
        torch.Size([2])
        """
        found = self._parameters.get(target)
        return nn.Module.get_parameter(self, target) if found is None else found

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            "TensorDictParams only holds parameters and computes nothing, so it cannot be called"
        )

    def _apply(self, fn: LeafFn, recurse: bool = True) -> TensorDictParams:
        """Convert the tensors: called by `to(...)`, `double()` ... of a module around this one."""

        def moved(leaf: Tensor) -> Tensor:
            with torch.no_grad():
                new = fn(leaf)
                if isinstance(leaf, nn.Parameter):
                    if torch._has_compatible_shallow_copy_type(leaf, new):
                        leaf.data = new
                        new = leaf
                    else:
                        new = nn.Parameter(new, leaf.requires_grad)
                    if leaf.grad is not None:
                        new.grad = fn(leaf.grad)
            return new

        replace_leaves(self._tree, _tied(moved))
        if self._tree._device is not None:
            self._tree.auto_device_()
        self._whole()._register()
        return self

    def state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        flatten: bool = True,
    ) -> Any:
        """The parameters and buffers by name, as in `nn.Module.state_dict`.

        flatten: names of nested keys joined by "."; else nested dicts.

        >>> list(TensorDictParams(TensorDict(n=dict(b=torch.ones(2)))).state_dict())
        ['n.b']
        """
        if not flatten:
            return state_dict(self._tree, destination, prefix, keep_vars, False)
        mine: dict[str, Tensor] = {}
        for key, leaf in entries_list(self._tree, True, True, None, False):
            name = prefix + dotted(key)
            if name in mine:
                raise KeyError(
                    f"a state dict can't hold two entries of the name {name!r}: rename one of "
                    f"them, params.rename_key_({key!r}, ...)"
                )
            leaf = _registered(leaf)
            mine[name] = leaf if keep_vars else leaf.detach()
        out = OrderedDict() if destination is None else destination
        out.update(mine)
        return out

    def load_state_dict(
        self,
        state_dict: Any,
        strict: bool = True,
        assign: bool = False,
        from_flatten: bool | None = None,
    ) -> Any:
        """Load the parameters and buffers of a state dict.

        from_flatten: whether it has flat keys; found out if not given.

        >>> params = TensorDictParams(TensorDict(w=torch.zeros(2)))
        >>> params.load_state_dict({"w": torch.ones(2)})
        <All keys matched successfully>
        """
        flat: dict[str, Any] = {}
        flat_state(state_dict, from_flatten, "", flat, {})
        return nn.Module.load_state_dict(self, flat, strict, assign)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: Any,
        unexpected_keys: Any,
        error_msgs: Any,
    ) -> None:
        assign = local_metadata.get("assign_to_params_buffers", False)
        mine = {prefix + name: leaf for name, leaf in self.state_dict(keep_vars=True).items()}
        missing_keys += [name for name in mine if name not in state_dict]
        unexpected_keys += [
            name for name in state_dict if name.startswith(prefix) and name not in mine
        ]
        found = {
            name: (leaf, state_dict[name]) for name, leaf in mine.items() if name in state_dict
        }
        differing = [
            f"{name}: {tuple(new.shape)} for {tuple(leaf.shape)}"
            for name, (leaf, new) in found.items()
            if new.shape != leaf.shape
        ]
        if differing:
            error_msgs.append(f"shapes differ: {', '.join(differing)}")
            return
        for leaf, new in found.values():
            with torch.no_grad():
                if assign:
                    leaf.data = new.data
                else:
                    leaf.copy_(new)

    def register_get_post_hook(self, hook: Callable[[Any, Any], Any]) -> None:
        """Call `hook(self, tensor)` for every tensor read by key, `values` or `items`.

        What it returns stands for the tensor, unless it is None. Operations on the container, what
        is read from a nested one taken out of it, and what a module sees use the tensor itself.

        >>> params = TensorDictParams(TensorDict(w=torch.ones(2)))
        >>> params.register_get_post_hook(lambda params, value: value * 2)
        >>> params["w"].tolist()
        [2.0, 2.0]
        """
        self._hooks.append(hook)

    # -- containers of the same kind

    def clone(self, recurse: bool = True) -> TensorDictParams:
        """A copy with new parameters (tied as before), or with `recurse=False` over the same ones.

        >>> type(TensorDictParams(TensorDict(w=torch.ones(2))).clone()["w"]).__name__
        'Parameter'
        """
        return self._renewed(lambda leaf: leaf.detach().clone()) if recurse else self._shallow()

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """A copy on another device or with another dtype; see `TensorDict.to`.

        >>> TensorDictParams(TensorDict(w=torch.ones(2))).to(torch.float64)["w"].dtype
        torch.float64
        """
        batch_size = kwargs.pop("batch_size", None)
        if batch_size is not None:
            out: Any = self.to(*args, **kwargs)
            if out is self:
                out = TensorDictParams(self._tree.copy(), no_convert=True)
            out.batch_size = batch_size
            return out
        probe = self._tree.to(*args, **kwargs)
        if probe is self._tree:
            return unmoved(self)
        out = self._renewed(lambda leaf: TensorDict({"": leaf.detach()}).to(*args, **kwargs)[""])
        out._tree._set_device(probe._device)
        out._origin = ("to", weakref.ref(self))
        return out

    def _renewed(self, fn: LeafFn) -> TensorDictParams:
        """A copy over new tensors, in which what was one parameter is one again."""

        def renew(leaf: Tensor) -> Tensor:
            new = fn(leaf)
            if not isinstance(leaf, nn.Parameter):
                return new
            real = new.is_floating_point() or new.is_complex()
            return nn.Parameter(new, leaf.requires_grad) if real else new

        out = TensorDictParams(self._tree._map(_tied(renew)), no_convert=True)
        out.no_convert = self.no_convert
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorDictParams:
        for leaf in self._leaves([]):
            shared = shared_by_rows(leaf)
            if shared is not None:  # what has been computed can't be copied deeply
                memo[id(leaf)] = copy.deepcopy(shared, memo).expand(leaf.shape)
        out = TensorDictParams(copy.deepcopy(self._tree, memo), no_convert=True)
        out.no_convert, out._hooks = self.no_convert, list(self._hooks)
        memo[id(self)] = out
        return out.lock_() if self._locked else out

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        for name in ("_parameters", "_buffers", "_part", "_views"):
            state.pop(name, None)
        shared = {
            key: base
            for key, leaf in entries_list(self._tree, True, True, None, False)
            if (base := shared_by_rows(leaf)) is not None
        }
        return {**state, "tree": self._tree, "shared": shared}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._part = Part(state.pop("tree"))
        for key, base in state.pop("shared", {}).items():
            nodes, name = nodes_to(self._tree, dotted(key))
            nodes[-1]._d[name] = base.expand(nodes[-1]._d[name].shape)
        super().__setstate__(state)
        self._register()

    def __repr__(self) -> str:
        return f"TensorDictParams(params={self._tree!r})"

    def __hash__(self) -> int:
        return id(self)

    @with_signature_of(TensorDictBase.map)
    def map(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            "map is not available for parameters, which can't be sent to other processes; "
            "use params.data.map(...)"
        )

    @with_signature_of(TensorDictBase.memmap_)
    def memmap_(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            "memmap_ is not available for parameters: a memory-mapped tensor cannot be a "
            "parameter; use params.memmap(...)"
        )

    def zero_(self) -> Self:
        for leaf in self._leaves([]):
            _registered(leaf).data.zero_()
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        for leaf in self.parameters():
            leaf.requires_grad_(requires_grad)
        return self


class _HookedView(NestedView):
    """Values or items as the hooks of `TensorDictParams` show them."""

    __slots__ = ()

    def _list(self) -> list[Any]:
        hooked = self.td._hooked  # type: ignore[attr-defined]
        return [(key, hooked(value)) for key, value in super()._list()]


def _refuse_lazy(node: Any) -> None:
    if node._lazy and not node._is_data():
        raise RuntimeError(
            "LazyStackedTensorDict is not permitted in TensorDictParams, which must own its "
            "parameters; td.contiguous() gives a dense container"
        )
    for child in node._children():
        _refuse_lazy(child)


def _tied(fn: LeafFn) -> LeafFn:
    """`fn`, called once for what is one tensor: what is tied stays so, and so do equal rows."""
    once = once_each(fn)

    def tied(leaf: Tensor) -> Tensor:
        shared = shared_by_rows(leaf)
        return once(leaf) if shared is None else tied(shared).expand(leaf.shape)

    return tied


def _registered(leaf: Tensor) -> Tensor:
    """The leaf, or the one parameter that all its rows are."""
    shared = shared_by_rows(leaf)
    return leaf if shared is None else shared


def _expand_again(node: TensorDict) -> None:
    """Re-expand shared parameters, whose `data` or `requires_grad` may have been set."""
    for name, value in node._d.items():
        if isinstance(value, Node):
            _expand_again(tree_of(value))
            continue
        shared = shared_by_rows(value)
        if shared is not None and (
            value.data_ptr() != shared.data_ptr() or (value.grad_fn is None) == shared.requires_grad
        ):
            with torch.enable_grad():
                node._d[name] = shared.expand(value.shape)
            forget_listings(node)


def _convert(td: TensorDict, memo: dict[int, Tensor], parameters: bool) -> None:
    """Replace a tree's tensors by buffers; a tied tensor becomes one.

    parameters: make parameters of those that are of floating point.
    """
    for name, value in td._d.items():
        if isinstance(value, Node):
            if type(value) is TensorDict:
                _convert(value, memo, parameters)
        elif not (isinstance(value, (nn.Parameter, nn.Buffer)) or is_lazy(value)):
            if not parameters and shared_by_rows(value) is not None:
                continue
            if id(value) not in memo:
                memo[id(value)] = _converted(value, parameters)
            td._d[name] = memo[id(value)]


def _converted(value: Tensor, parameters: bool) -> Tensor:
    if parameters and (value.is_floating_point() or value.is_complex()):
        return nn.Parameter(value.detach() if value.requires_grad else value)
    return nn.Buffer(value)


def _mutator(name: str) -> Callable[..., Any]:
    plain = getattr(TensorDict, name)

    @documented_as(plain)
    def change(self: TensorDictParams, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("inplace") or name == "setdefault" and args[0] in self:
            with torch.no_grad():
                return getattr(TensorDictBase, name)(self, *args, **kwargs)
        result = self._change(lambda tree: plain(tree, *args, **kwargs))
        return self.get(args[0]) if name == "setdefault" else result

    change.__name__ = name
    return change


def _writer(name: str) -> Callable[..., Any]:
    """A method that writes into the tensors, regardless of the gradients they need."""
    plain = getattr(TensorDict, name)

    @documented_as(plain)
    def write(self: TensorDictParams, *args: Any, **kwargs: Any) -> Any:
        plain(self.data, *args, **kwargs)
        return self

    return write


def _forward(name: str) -> Callable[..., Any]:
    """A member of the contract of `Node` that is the tree's."""
    return lambda self, *args: getattr(self._tree, name)(*args)


def _state(name: str) -> property:
    return property(lambda self: getattr(self._tree, name))


for _name in _STATE:
    setattr(TensorDictParams, _name, _state(_name))
for _name in _CONTRACT:
    setattr(TensorDictParams, _name, _forward(_name))
for _name in ("apply_", "fill_", "set_at_", "update_at_"):
    setattr(TensorDictParams, _name, _writer(_name))
for _name in _MUTATORS:
    setattr(TensorDictParams, _name, _mutator(_name))
