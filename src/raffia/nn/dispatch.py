"""`dispatch`, by which keyed modules are called with tensors, and `set_skip_existing`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, Self, overload

import torch
from torch import Tensor

from raffia.nn.modes import Mode, Setting
from raffia.tensordict.access import unchecked
from raffia.tensordict.functions import from_any, make_tensordict
from raffia.tensordict.keys import NestedKey, nearest_key, unravel_key
from raffia.tensordict.node import Node
from raffia.tensordict.nontensor import NonTensorStack
from raffia.tensordict.signatures import Function
from raffia.tensordict.tensorclass import is_tensorclass
from raffia.tensordict.tensordict import TensorDict

_NO_BATCH = torch.Size()


class Dispatch:
    """Decorate a method of a container so that it also takes tensors, by position or keyword.

    The first argument of the method (after `self`) must be named `tensordict`. Called with a
    container it runs as it is. Called with tensors, these are put into a container under the keys
    of `source`, and the entries under the keys of `dest` are returned: one value, or a tuple.

    separator: joins the parts of a nested key into a keyword: `("a", "c")` is given as `a_c=`.
    source, dest: lists of keys, or the names of the attributes of `self` that hold them; the key
        `"_"` in `dest` is left out.
    auto_batch_size: give the container the largest batch size that all tensors share; otherwise it
        has none.
    Raises RuntimeError if an input is given both by position and by keyword.

    >>> class Double(torch.nn.Module):
    ...     in_keys, out_keys = [("obs", "x")], ["y"]
    ...     @dispatch
    ...     def forward(self, tensordict):
    ...         return tensordict.set("y", 2 * tensordict["obs", "x"])
    >>> double = Double()
    >>> double(torch.ones(2)), double(obs_x=torch.ones(2))
    (tensor([2., 2.]), tensor([2., 2.]))
    """

    DEFAULT_SEPARATOR = "_"
    DEFAULT_SOURCE = "in_keys"
    DEFAULT_DEST = "out_keys"

    def __new__(cls, separator: Any = DEFAULT_SEPARATOR, *args: Any, **kwargs: Any) -> Any:
        new = super().__new__(cls)
        if callable(separator):  # used bare: @dispatch
            new.__init__()  # type: ignore[misc]
            return new(separator)
        return new

    def __init__(
        self,
        separator: str = DEFAULT_SEPARATOR,
        source: str | Sequence[NestedKey] = DEFAULT_SOURCE,
        dest: str | Sequence[NestedKey] = DEFAULT_DEST,
        auto_batch_size: bool = True,
    ) -> None:
        self.separator = separator
        self.source = source if isinstance(source, str) else [unravel_key(key) for key in source]
        self.dest = dest if isinstance(dest, str) else [unravel_key(key) for key in dest]
        self.auto_batch_size = auto_batch_size

    def __call__(self, func: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(func).parameters)
        if names[:1] == ["tensordict"]:
            return self._function(func, getattr(func, "__self__", None))
        if names[1:2] != ["tensordict"]:
            raise RuntimeError(
                "the first argument of the wrapped function must be named 'tensordict', as in "
                f"`def {func.__name__}(self, tensordict)`; got {names[1] if names[1:] else None!r}"
            )

        @functools.wraps(func)
        def call(_self: Any, *args: Any, **kwargs: Any) -> object:
            if args and isinstance(args[0], Node):
                return func(_self, *args, **kwargs)
            source, dest = self._keys(_self)
            if "tensordict" in kwargs and _is_input(kwargs["tensordict"], source):
                return func(_self, *args, **kwargs)
            return self._spread(functools.partial(func, _self), source, dest, args, kwargs)

        call.__signature__ = _also_by_tensors(func)  # type: ignore[attr-defined]
        return call

    def _function(self, func: Callable[..., Any], owner: Any) -> Callable[..., Any]:
        """The dispatching wrapper of a bound method, or of a function without `self`."""
        if owner is None and (isinstance(self.source, str) or isinstance(self.dest, str)):
            raise RuntimeError(
                "a function has no in_keys and out_keys; pass the keys to the decorator: "
                f"@dispatch(source=[...], dest=[...]) before {func.__name__}"
            )

        @functools.wraps(func)
        def call(*args: Any, **kwargs: Any) -> object:
            source, dest = self._keys(owner)
            given = args[0] if args else kwargs.get("tensordict")
            if args and isinstance(given, Node) or _is_input(given, source):
                return func(*args, **kwargs)
            return self._spread(func, source, dest, args, kwargs)

        return call

    def _keys(self, owner: Any) -> tuple[Sequence[NestedKey], Sequence[NestedKey]]:
        """The keys of the arguments, and those of the results."""
        source, dest = self.source, self.dest
        return (
            getattr(owner, source) if isinstance(source, str) else source,
            getattr(owner, dest) if isinstance(dest, str) else dest,
        )

    def _spread(
        self,
        func: Callable[..., Any],
        source: Sequence[NestedKey],
        dest: Sequence[NestedKey],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run `func` on a container built from the arguments, and take the results out of it."""
        given = dict(zip(source, args, strict=False))
        for key in source:
            name = key if key.__class__ is str else self.separator.join(key)
            if name in kwargs:
                if key in given:
                    raise RuntimeError(
                        f"Duplicated argument in args and kwargs: {name!r} is given by position "
                        "and by keyword"
                    )
                given[key] = kwargs.pop(name)
        result = func(self._container(given), *args[len(source) :], **kwargs)
        outputs = tuple([result[key] for key in dest if key != "_"])
        return outputs[0] if len(outputs) == 1 else outputs

    def _container(self, given: dict[Any, Any]) -> TensorDict:
        if not self.auto_batch_size and all(
            [k.__class__ is str and v.__class__ is Tensor for k, v in given.items()]
        ):
            return unchecked(given, _NO_BATCH)
        entries = {key: as_entry(value) for key, value in given.items()}
        if self.auto_batch_size:
            return make_tensordict(entries, auto_batch_size=True)
        return make_tensordict(entries, batch_size=_NO_BATCH)


if TYPE_CHECKING:  # to mypy a class gives its instances; this one, used bare, gives the method

    @overload
    def dispatch(method: Callable[..., Any], /) -> Callable[..., Any]: ...
    @overload
    def dispatch(
        separator: str = "_",
        source: str | Sequence[NestedKey] = "in_keys",
        dest: str | Sequence[NestedKey] = "out_keys",
        auto_batch_size: bool = True,
    ) -> Dispatch: ...

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        """Decorate a method of a container so that it also takes tensors."""
else:
    dispatch = Dispatch


def as_entry(value: object) -> object:
    """A dict, tuple or dataclass as a container, a list of tensors as the list that it is."""
    if isinstance(value, (Tensor, Node)):
        return value
    if isinstance(value, list) and any([isinstance(v, Tensor) for v in value]):
        return NonTensorStack(*value)
    if isinstance(value, (Mapping, tuple)) or is_dataclass(value) and not is_tensorclass(value):
        return from_any(value)
    return value


def _is_input(value: Any, source: Sequence[NestedKey]) -> bool:
    """Whether what is given as `tensordict=` is the container that holds the inputs."""
    return isinstance(value, Node) and "tensordict" not in source


def _also_by_tensors(func: Callable[..., Any]) -> inspect.Signature:
    """The signature of a dispatched method: the container is optional, and any keyword is allowed.

    `torch.export` binds its arguments to the signature.
    """
    signature = inspect.signature(func)
    parameters = [
        p.replace(default=None) if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty else p
        for p in list(signature.parameters.values())[1:]
    ]
    if not any([p.kind is p.VAR_KEYWORD for p in parameters]):
        parameters.append(inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD))
    return signature.replace(parameters=[*list(signature.parameters.values())[:1], *parameters])


# ------------------------------------------------------------------------ skip what is there

# False, True, or the list of the keys that need not be written again
SKIP = Setting[bool | list[NestedKey]](False)


class set_skip_existing(Mode):
    """Set whether keyed modules are skipped if their outputs exist, in a block or as a decorator.

    A module that reads a key which it also writes is never skipped.

    mode: True; False; a list of keys: only modules whose outputs are all listed are skipped; None,
        as a decorator only: as the block around the call sets.
    in_key_attr, out_key_attr: for a decorated `forward(self, tensordict)`: where the keys stand.
    thread_local: for this thread only.
    Raises RuntimeError if a block is entered with None, or within `torch.compile`.

    >>> from raffia.nn import TensorDictModule
    >>> add = TensorDictModule(lambda x: x + 1, in_keys=["x"], out_keys=["y"])
    >>> td = TensorDict(x=torch.zeros(()), y=torch.zeros(()))
    >>> with set_skip_existing():
    ...     print(skip_existing(), add(td)["y"].item())
    True 0.0
    >>> skip_existing(), add(td)["y"].item()
    (False, 1.0)
    """

    setting = SKIP

    def __init__(
        self,
        mode: bool | list[NestedKey] | None = True,
        in_key_attr: str = "in_keys",
        out_key_attr: str = "out_keys",
        *,
        thread_local: bool = False,
    ) -> None:
        if not (mode is None or isinstance(mode, (bool, list, tuple))):
            raise TypeError(f"mode must be True, False, None or a list of keys, got {mode!r}")
        value = [unravel_key(k) for k in mode] if isinstance(mode, (list, tuple)) else mode
        super().__init__(value, thread_local=thread_local)
        self.in_key_attr, self.out_key_attr = in_key_attr, out_key_attr

    @property
    def mode(self) -> bool | list[NestedKey] | None:
        """The mode that was asked for."""
        return self.value

    def set(self) -> None:
        """Set the mode permanently; `unset()` restores the previous one."""
        if self.value is None:
            raise RuntimeError(
                "set_skip_existing(None) stands for the mode of the surrounding block: it can "
                "decorate a forward method, but `with set_skip_existing(None)` sets nothing; "
                "use True or False"
            )
        if self.value and torch.compiler.is_compiling():
            raise RuntimeError(
                "skip_existing cannot be switched on within torch.compile: which modules run would "
                "be frozen into the program. Select them before: seq.select_subsequence(...)"
            )
        super().set()

    def __enter__(self) -> Self:  # type: ignore[override]
        self.set()
        return self

    def __call__(self, func: Function) -> Function:
        names = list(inspect.signature(func).parameters)
        if names[1:2] != ["tensordict"]:
            raise RuntimeError(
                "set_skip_existing decorates methods whose first argument is named 'tensordict', "
                f"as in `def {func.__name__}(self, tensordict)`; got the arguments {names}"
            )

        @functools.wraps(func)
        def call(_self: Any, tensordict: Any, *args: Any, **kwargs: Any) -> object:
            mode = SKIP.get() if self.value is None else self.value
            if mode:
                in_keys = getattr(_self, self.in_key_attr)
                out_keys = getattr(_self, self.out_key_attr)
                if may_skip(tensordict, in_keys, out_keys, mode):
                    return tensordict
            if self.value is None:
                return func(_self, tensordict, *args, **kwargs)
            with self:
                return func(_self, tensordict, *args, **kwargs)

        decorated: Any = call
        return decorated


def skip_existing() -> bool | list[NestedKey]:
    """Whether keyed modules are skipped if their outputs exist already; see `set_skip_existing`.

    >>> skip_existing()
    False
    """
    return SKIP.get()


def may_skip(tensordict: Any, in_keys: Any, out_keys: Any, mode: Any) -> bool:
    """Whether a module with these keys has nothing to do for this container."""
    if mode is not True and not all([key in mode for key in out_keys]):
        return False
    written = [key for key in out_keys if key != "_"]
    if out_keys and not written:  # it is called for what else it does
        return False
    return not any([key in out_keys for key in in_keys]) and all(
        [key in tensordict for key in written]
    )


# ------------------------------------------------------------------------ what was missing


def missing_inputs(module: str, keys: list[NestedKey], tensordict: Any) -> str:
    """The text of an error about entries that a call needs and that are missing."""
    there = list(tensordict.keys(True))
    hints = [f"{key!r}{nearest_key(key, there)}" for key in keys]
    return (
        "Some tensors that are necessary for the module call were not found in the input: "
        f"{module} reads {', '.join(hints)} (None was passed for it). The entries are {there}"
    )
