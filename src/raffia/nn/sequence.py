"""Keyed modules one after another: each reads what it needs and adds what it makes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self, overload

import torch
from torch import nn

from raffia.hints import check_choice
from raffia.nn.base import CALL, TensorDictModuleBase, listed, one_or_more
from raffia.nn.dispatch import SKIP, dispatch, may_skip
from raffia.nn.drawing import program
from raffia.nn.graph import Graph, check_in_keys, graph
from raffia.nn.graph_record import watched
from raffia.nn.module import TensorDictModule, result_container
from raffia.nn.wrappers import WrapModule
from raffia.tensordict.keys import NestedKey, is_under, nearest_key, overlap
from raffia.tensordict.lazy import LazyStackedTensorDict
from raffia.tensordict.node import Container, Node
from raffia.tensordict.tensordict import TensorDict


class TensorDictSequential(TensorDictModule):
    """Keyed modules that run one after another on one container.

    modules: keyed modules, or functions from container to container; as arguments, as one list, or
        as one dict by name. Any `nn.Module` that has `in_keys` and `out_keys` will do.
    partial_tolerant: leave out modules whose inputs are not all there; of a lazy stack, the
        members that have them go through.
    selected_out_keys: write only these outputs, as `select_out_keys` does.
    inplace: True writes the outputs into the container that came in; False into a new one without
        batch size; "empty" into an empty one of the same batch size; None leaves it to the modules.
    expect_in_keys: the keys that will be there when the sequence is called: that a module reads
        another key, or none reads one of these, is an error now, and when modules are put in later.
    Raises ValueError if `selected_out_keys` or `expect_in_keys` do not fit the modules.

    >>> from torch import nn
    >>> from raffia.nn import TensorDictModule, TensorDictSequential
    >>> encoder = TensorDictModule(nn.Linear(3, 8), in_keys=["obs"], out_keys=["hidden"])
    >>> head = TensorDictModule(nn.Linear(8, 2), in_keys=["hidden"], out_keys=["action"])
    >>> actor = TensorDictSequential(encoder, head)
    >>> actor(TensorDict(obs=torch.zeros(5, 3), batch_size=[5]))["action"].shape
    torch.Size([5, 2])
    >>> actor.in_keys, actor.out_keys
    (['obs'], ['hidden', 'action'])
    """

    module: nn.ModuleList | nn.ModuleDict
    inplace: bool | str | None = None
    partial_tolerant: bool = False
    expect_in_keys: list[NestedKey] | None = None
    _shapes: dict[str, Any] | None = None  # shapes at the first call, for `graph`
    _made_of: list[Any] | None = None  # the keys of the modules that the keys were worked out from

    def __init__(
        self,
        *modules: Any,
        partial_tolerant: bool = False,
        selected_out_keys: list[NestedKey] | None = None,
        inplace: bool | str | None = None,
        expect_in_keys: list[NestedKey] | None = None,
    ) -> None:
        check_choice("inplace", inplace, (None, True, False, "empty"))
        container = _module_container(modules)
        if _followed_by_a_mixin(self.__class__.__mro__):
            in_keys, out_keys = keys_of(container.children())
            super().__init__(module=container, in_keys=in_keys, out_keys=out_keys)
            self.inplace = None
        else:
            TensorDictModuleBase.__init__(self)
        if partial_tolerant:
            self.partial_tolerant = True
        if inplace is not None:
            self.inplace = inplace
        if expect_in_keys is not None:
            self.expect_in_keys = listed(expect_in_keys, "expect_in_keys")
        self.module = container
        self._refresh_keys()
        if selected_out_keys:
            self.select_out_keys(*listed(selected_out_keys, "selected_out_keys"))

    def _refresh_keys(self) -> None:
        """Work out the keys from the modules; a selection stays."""
        below = self._keys_below()
        in_keys, out_keys = _joined(below)
        selected = self._selected
        if selected is not None and not all([key in out_keys for key in selected]):
            raise ValueError(
                f"the outputs {selected} are selected, but the modules would only write "
                f"{out_keys}; call reset_out_keys() first"
            )
        if self.expect_in_keys is not None:
            check_in_keys(self.module._modules.items(), self.expect_in_keys)
        self._in_keys, self._out_keys, self._made_of = in_keys, out_keys, below
        self.reset_out_keys()
        self._shapes = None  # shapes of other modules
        if selected is not None:
            self.select_out_keys(*selected)

    def _keys_below(self) -> list[Any]:
        modules: Any = self._modules["module"]
        return [_keys_of_one(module) for module in modules._modules.values()]

    def _follow(self) -> None:
        """Work out the keys again if modules, or keys of modules, were changed since."""
        if self._made_of is not None and self._made_of != self._keys_below():
            self._refresh_keys()

    @staticmethod
    def _compute_in_and_out_keys(modules: Iterable[Any]) -> tuple[list[NestedKey], list[NestedKey]]:
        """The keys of a sequence of these modules, for constructors of subclasses."""
        return keys_of(modules)

    def _edit(self, change: Callable[[Any], Any]) -> Self:
        """Change the collection of modules; if the keys do not fit then, nothing has changed."""
        before = dict(self.module._modules)
        try:
            change(self.module)
            self._refresh_keys()
        except BaseException:
            self.module._modules.clear()
            self.module._modules.update(before)
            raise
        return self

    def _plan(self) -> None:
        if self._made_of is None and "module" in self.__dict__.get("_modules", ()):
            self._made_of = self._keys_below()  # the constructor was that of the keyed module
        self._quick = (
            self.inplace is None
            and self._selected is None
            and not self.partial_tolerant
            and not self._has_own_keys
        )

    # -- running

    def _run(self, tensordict: TensorDict) -> Any:
        if self.__class__.forward is not _FORWARD:
            return CALL(self, tensordict)
        return self._through(tensordict)

    def _through(self, tensordict: Any, runner: Callable[[str, Any], Any] | None = None) -> Any:
        """Run all modules on the container and return the result.

        runner: gives, for a module and its name, what is called instead of the module.
        """
        step: Callable[..., Any] | None = tolerant if self.partial_tolerant else None
        shapes_seen: dict[str, Any] | None = None
        if step is None and not torch.compiler.is_compiling() and self._shapes is None:
            shapes_seen = {}  # the shapes of the first call are recorded
            step = functools.partial(watched, shapes_seen)
        name = None
        children: Any = self._modules["module"]
        try:
            for name, module in children._modules.items():
                run = module if runner is None else runner(name, module)
                tensordict = (
                    run(tensordict) if step is None else step(name, module, tensordict, run)
                )
        except Exception as error:
            error.add_note(self._where(name))
            raise
        if shapes_seen is not None:
            self._shapes = shapes_seen
        return tensordict

    @dispatch(auto_batch_size=False)
    def forward(
        self, tensordict: Container, tensordict_out: Container | None = None, **kwargs: Any
    ) -> Container:
        """Run the modules in order; also callable with tensors, see `dispatch`.

        tensordict_out: container to write the outputs into, and only these.
        """
        if kwargs:
            raise RuntimeError(
                f"{type(self).__name__} does not support keyword arguments other than "
                f"tensordict_out and, for a call with tensors, its in_keys={self.in_keys}; "
                f"got {list(kwargs)}"
            )
        if tensordict_out is not None and not isinstance(tensordict_out, Node):
            raise ValueError(
                "tensordict_out must be a container to write to, got "
                f"{type(tensordict_out).__name__}; a call with tensors takes one for each of "
                f"in_keys={self.in_keys}"
            )
        return self._written(tensordict, tensordict_out, self._through)

    def _where(self, name: Any) -> str:
        return f"in module {name!r} of {type(self).__name__}, in_keys={self.in_keys}"

    def _written(self, tensordict: Any, tensordict_out: Any, through: Callable[[Any], Any]) -> Any:
        """Run `through` and write the requested outputs to the requested container."""
        mode = SKIP.get()
        if mode and may_skip(tensordict, self.in_keys, self.out_keys, mode):
            return tensordict
        if tensordict_out is None and self.inplace is None and self._selected is None:
            return through(tensordict)
        if tensordict_out is None:
            tensordict_out = result_container(
                tensordict, True if self.inplace is None else self.inplace
            )
        if tensordict_out is tensordict and self._selected is None:
            result = through(tensordict)
            return tensordict if result is tensordict else moved(result, tensordict, self.out_keys)
        keys = self.out_keys
        if tensordict_out is tensordict:  # inputs that were overwritten count as well
            keys = [*keys, *rewritten(self)]
        return moved(through(tensordict.copy()), tensordict_out, keys)

    # -- keys

    def select_out_keys(self, *out_keys: NestedKey) -> Self:
        """Write only these outputs from now on.

        The modules run on a shallow copy; the selected outputs and the inputs that were overwritten
         are put into the container.

        >>> from raffia.nn import TensorDictModule, TensorDictSequential
        >>> seq = TensorDictSequential(
        ...     TensorDictModule(torch.exp, in_keys=["x"], out_keys=["y"]),
        ...     TensorDictModule(torch.log, in_keys=["y"], out_keys=["z"]),
        ... )
        >>> seq.select_out_keys("z")(TensorDict(x=torch.zeros(2)))
        TensorDict(
            fields={
                x: Tensor(shape=torch.Size([2]), ...),
                z: Tensor(shape=torch.Size([2]), ...)},
            ...)
        """
        self._selected = self._selectable(out_keys)
        return self

    def select_subsequence(
        self,
        in_keys: Iterable[NestedKey] | None = None,
        out_keys: Iterable[NestedKey] | None = None,
    ) -> TensorDictSequential:
        """A sequence of just the modules that are needed, which are shared with this one.

        in_keys: what there is; modules that need more are left out. Default: what this one reads.
        out_keys: what is wanted; modules that do not contribute are left out. Default: all that
            is written.
        Raises ValueError if no module is left.

        >>> from raffia.nn import TensorDictModule, TensorDictSequential
        >>> seq = TensorDictSequential(
        ...     TensorDictModule(torch.exp, in_keys=["x"], out_keys=["y"]),
        ...     TensorDictModule(torch.log, in_keys=["y"], out_keys=["z"]),
        ... )
        >>> seq.select_subsequence(out_keys=["y"]).out_keys
        ['y']
        """
        self._follow()
        have = self._in_keys if in_keys is None else listed(one_or_more(in_keys), "in_keys")
        written = self._out_keys if self._selected is None else self._selected
        want = written if out_keys is None else listed(one_or_more(out_keys), "out_keys")
        modules = _wanted(_possible(dict(self.module._modules), have), want)
        if not modules:
            raise ValueError(
                "No modules left after selection: of the modules that can run on "
                f"in_keys={list(have)}, none contributes to out_keys={list(want)}. The sequence "
                f"reads {self.in_keys} and writes {self.out_keys}{_nearest_of(want, self.out_keys)}"
            )
        return self._like(modules)

    def _like(self, modules: dict[str, Any]) -> TensorDictSequential:
        """A sequence of these modules with the options of this one."""
        named = isinstance(self.module, nn.ModuleDict)
        return type(self)(modules if named else list(modules.values()), **self._options())

    def _options(self) -> dict[str, Any]:
        return {"partial_tolerant": self.partial_tolerant, "inplace": self.inplace}

    # -- a collection of modules

    def __len__(self) -> int:
        return len(self.module)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module._modules.values())

    @overload
    def __getitem__(self, index: slice) -> TensorDictSequential: ...
    @overload
    def __getitem__(self, index: int | str) -> Any: ...

    def __getitem__(self, index: int | slice | str) -> Any:
        """A module by its index or name; a slice gives a sequence that shares the modules."""
        if isinstance(index, slice):
            return self._like(dict(list(self.module._modules.items())[index]))
        return self.module[self._name(index)]  # type: ignore[index]

    def __setitem__(self, index: int | str, module: Any) -> None:
        name, keyed = self._name(index), _keyed(module)
        self._edit(lambda modules: modules.__setitem__(name, keyed))

    def __delitem__(self, index: int | slice | str) -> None:
        name = index if isinstance(index, slice) else self._name(index)
        self._edit(lambda modules: modules.__delitem__(name))

    def _name(self, index: int | str) -> int | str:
        """An integer also stands for an index in a sequence whose modules have names."""
        if isinstance(self.module, nn.ModuleDict) and isinstance(index, int):
            return list(self.module)[index]
        return index

    def append(self, module: Any) -> Self:
        """Add a module at the end.

        >>> from raffia.nn import TensorDictModule, TensorDictSequential
        >>> seq = TensorDictSequential(TensorDictModule(torch.exp, in_keys=["x"], out_keys=["y"]))
        >>> seq.append(TensorDictModule(torch.log, in_keys=["y"], out_keys=["z"])).out_keys
        ['y', 'z']
        """
        return self.insert(len(self), module)

    def insert(self, index: int, module: Any) -> Self:
        """Add a module before the one at `index`."""
        if isinstance(self.module, nn.ModuleDict):
            raise TypeError(
                "the modules of this sequence have names, so a new one needs a name too: "
                "seq['name'] = module adds it at the end"
            )
        keyed = _keyed(module)
        return self._edit(lambda modules: modules.insert(index, keyed))

    def extend(self, modules: Iterable[Any]) -> Self:
        """Add modules at the end."""
        for module in modules:
            self.append(module)
        return self

    # -- showing

    def graph(self, example: Any = None) -> Graph:
        """The modules, the keys that join them and their shapes, as data; it can draw itself.

        example: a container to run a copy of the sequence on, which shows the shapes; without it
            they are those of the first call.

        >>> from raffia.nn import TensorDictModule, TensorDictSequential
        >>> seq = TensorDictSequential(TensorDictModule(torch.exp, in_keys=["x"], out_keys=["y"]))
        >>> seq.graph().in_keys, seq.graph().results
        (('x',), ('y',))
        """
        return graph(self, example)

    def __repr__(self) -> str:
        return program(graph(self))


_FORWARD = TensorDictSequential.forward
_IN_KEYS, _OUT_KEYS = TensorDictModuleBase.in_keys, TensorDictModuleBase.out_keys


def _followed_by_a_mixin(order: tuple[type, ...]) -> bool:
    """Whether, in the order of bases, a class stands between the sequence and the keyed module.

    Its constructor then gets what that of the keyed module gets.
    """
    return order[order.index(TensorDictSequential) + 1] is not TensorDictModule


def _nearest_of(wanted: Iterable[NestedKey], keys: list[NestedKey]) -> str:
    """A hint for the first wanted key that is not among the keys."""
    unknown = [key for key in wanted if key not in keys]
    return nearest_key(unknown[0], keys) if unknown else ""


def _module_container(modules: tuple[Any, ...]) -> nn.ModuleList | nn.ModuleDict:
    if len(modules) == 1 and isinstance(modules[0], Mapping):
        return nn.ModuleDict({name: _keyed(module) for name, module in modules[0].items()})
    if len(modules) == 1 and isinstance(modules[0], (list, tuple, nn.ModuleList)):
        modules = tuple(modules[0])
    return nn.ModuleList([_keyed(module) for module in modules])


def _keyed(module: Any) -> nn.Module:
    """The module; a function from container to container becomes one."""
    if isinstance(module, nn.Module) and TensorDictModuleBase.is_tdmodule_compatible(module):
        return module
    if not callable(module) or isinstance(module, type):
        raise TypeError(
            f"a sequence consists of keyed modules, but {module!r} is not one: pass modules that "
            "have in_keys and out_keys, such as TensorDictModule(net, in_keys=[...], "
            "out_keys=[...]), or functions from container to container"
        )
    return WrapModule(module)


def keys_of(sequence: Iterable[Any]) -> tuple[list[NestedKey], list[NestedKey]]:
    """The keys that are read before they are written, and those that are written.

    A key that is written twice stands where it is written last.
    """
    return _joined([(module.in_keys, module.out_keys) for module in sequence])


def _keys_of_one(module: Any) -> tuple[tuple[NestedKey, ...], tuple[NestedKey, ...]]:
    """The keys that a module reads and writes.

    A nested sequence is brought up to date once for both: once for each would be twice at each
    level, and so a million times in twenty nested sequences.
    """
    kind = module.__class__
    if getattr(kind, "in_keys", None) is _IN_KEYS and kind.out_keys is _OUT_KEYS:
        module._follow()
        written = module._out_keys if module._selected is None else module._selected
        return tuple(module._in_keys), tuple(written)
    return tuple(module.in_keys), tuple(module.out_keys)


def _joined(keys: list[Any]) -> tuple[list[NestedKey], list[NestedKey]]:
    """The keys that a sequence reads and writes, from those of each module."""
    reads: dict[NestedKey, None] = {}
    writes: dict[NestedKey, None] = {}
    for in_keys, out_keys in keys:
        for key in in_keys:
            if key not in writes:
                reads[key] = None
        for key in out_keys:
            writes.pop(key, None)
            writes[key] = None
    return list(reads), list(writes)


def moved(source: Any, dest: Container, keys: list[NestedKey]) -> Container:
    """Put the entries under `keys` into another container."""
    for key in keys:
        value = source.get(key, None) if key != "_" else None
        if value is not None:
            dest.set(key, value)
    return dest


def tolerant(
    name: str, module: Any, tensordict: Container, run: Callable[[Any], Container]
) -> Container:
    """Run a module where its inputs are: on the container, on members of a stack, or not at all."""
    if all([key in tensordict for key in module.in_keys]):
        return run(tensordict)
    if isinstance(tensordict, LazyStackedTensorDict):
        for member in tensordict.tensordicts:
            result = tolerant(name, module, member, run)
            if result is not member:
                moved(result, member, module.out_keys)
    return tensordict


def _possible(modules: dict[str, Any], have: Iterable[NestedKey]) -> dict[str, Any]:
    """The modules that can run on what there is, in order; sequences are taken in part."""
    there = list(have)
    out: dict[str, Any] = {}
    for name, module in modules.items():
        part: Any = module
        if type(module) is TensorDictSequential:
            part = _part(module, _possible(dict(module.module._modules), there))
        elif not all([any([overlap(key, h) for h in there]) for key in module.in_keys]):
            part = None
        if part is not None:
            out[name] = part
            there += part.out_keys
    return out


def _wanted(modules: dict[str, Any], want: Iterable[NestedKey]) -> dict[str, Any]:
    """The modules that contribute to what is wanted, in order; sequences are taken in part."""
    needed = list(want)
    out: dict[str, Any] = {}
    for name, module in reversed(modules.items()):
        made = _left(module)
        asked = [n for n in needed if any([overlap(key, n) for key in made])]
        if not asked:
            continue
        part = module
        if type(module) is TensorDictSequential:
            part = _part(module, _wanted(dict(module.module._modules), asked))
            if part is None:
                continue
        out[name] = part
        if part is not module:
            made = _left(part)
        needed = [n for n in needed if not any([is_under(n, key) for key in made])]
        needed += part.in_keys
    return dict(reversed(out.items()))


def _left(module: Any) -> list[NestedKey]:
    """The keys that a module writes: its selected outputs, and overwritten inputs."""
    if isinstance(module, TensorDictSequential) and module._selected is None:
        return [key for child in module for key in _left(child)]
    return [*module.out_keys, *rewritten(module)]


def rewritten(module: Any) -> list[NestedKey]:
    """The inputs that a module overwrites, whatever is selected."""
    written = getattr(module, "out_keys_source", None)
    if written is None:
        written = module.out_keys
    return [key for key in module.in_keys if key in written]


def _part(sequence: TensorDictSequential, modules: dict[str, Any]) -> Any:
    """A sequence of some of the modules, which hides what the whole one hides."""
    if len(modules) == len(sequence) and all(
        [part is whole for part, whole in zip(modules.values(), sequence, strict=True)]
    ):
        return sequence
    if not modules:
        return None
    part = sequence._like(modules)
    shown = [key for key in dict.fromkeys(_left(sequence)) if key in part.out_keys]
    if len(shown) < len(part.out_keys):
        part.select_out_keys(*shown)
    return part if shown else None
