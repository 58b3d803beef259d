"""Tensorclasses: containers whose entries are the fields of a class.

An instance wraps a container, `_td`. Fields are read and written as attributes; every other method
of a container is called on what is wrapped, and its result is wrapped again. As a node of a larger
tree, an instance does the same for the members of `Node`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from raffia.tensordict import class_entries, kinds, pickled, printing, pytrees
from raffia.tensordict.build import as_device, as_size, finished
from raffia.tensordict.class_fields import (
    ARGUMENTS,
    NUMBERS,
    REQUIRED,
    TENSOR_KINDS,
    Argument,
    Factory,
    attribute,
    cast,
    is_class,
    members,
    own_annotations,
    signature,
    unbound,
)
from raffia.tensordict.class_methods import delegate
from raffia.tensordict.collection import TensorCollection, TensorDictBase
from raffia.tensordict.keys import is_key
from raffia.tensordict.lock import locked_error
from raffia.tensordict.node import REGISTRY, BatchSize, Device, Entries, Node, hold
from raffia.tensordict.nontensor import NonTensorData
from raffia.tensordict.tensordict import TensorDict

FLAGS = ("autocast", "nocast", "frozen", "tensor_only", "shadow", "skip_post_init_on_rebuild")
OPTIONS = (*FLAGS, "kw_only", "cast_filter")
_new_object = object.__new__


if typing.TYPE_CHECKING:
    Read = typing.TypeVar("Read", covariant=True)
    Given = typing.TypeVar("Given", contravariant=True)

    class _Argument(typing.Generic[Read, Given]):
        """An attribute that reads otherwise than it is given to the constructor."""

        def __get__(self, instance: Any, kind: Any) -> Read: ...
        def __set__(self, instance: Any, value: Given) -> None: ...

    _NONE: Any = None

    @typing.dataclass_transform(field_specifiers=(dataclasses.field,))
    class _Typed(TensorCollection):
        """A base by which type checkers know the fields of subclasses as constructor arguments."""

        _plain: type[TensorDict]
        _td: Any  # the container that holds the entries
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

else:
    _Typed = TensorCollection


@kinds.enter
class TensorClass(_Typed):
    """Base of classes whose annotated fields are the entries of a container.

    Arguments of an instance are its fields, then `batch_size`, `device`, `names` and `lock` as for
    `TensorDict`. Fields are read and written as attributes; a field that is None is not an entry.
    Numbers, arrays and lists become tensors, containers and tensors stay as they are, everything
    else is stored as a non-tensor value; so is a number in a field that is annotated as `int`,
    `float` or `bool`, where there are batch dimensions. All methods of a container are there, and
    give instances; `__post_init__`, methods, properties and inheritance work as for dataclasses.
    Options, as `TensorClass["autocast", "frozen"]` or as `class A(TensorClass, frozen=True)`:

    autocast: cast what is assigned to the class that the field is annotated with.
    nocast: keep numbers and arrays as they are.
    tensor_only: all fields are tensors, or containers.
    frozen: lock instances and refuse assignments.
    shadow: allow fields that have the name of a method.
    skip_post_init_on_rebuild: call `__post_init__` for what comes in (the constructor and the
        `from_...` methods) only, and not for the results of indexing, `clone`, stacking ...
    Two more go with the class or the decorator: `kw_only=True`, for fields that are given by name
    only, and `cast_filter`, that of `to` and of `float()`, `half()` ...

    >>> class Step(TensorClass):
    ...     obs: torch.Tensor
    ...     reward: torch.Tensor = None
    ...     task: str = "reach"
    >>> step = Step(obs=torch.zeros(3, 4), batch_size=[3])
    >>> step[0].obs.shape, torch.stack([step, step]).batch_size, step.reward, step.task
    (torch.Size([4]), torch.Size([2, 3]), None, 'reach')
    """

    if typing.TYPE_CHECKING:  # arguments of each subclass, after its fields
        batch_size: _Argument[torch.Size, BatchSize] = dataclasses.field(  # type: ignore[override]
            default=_NONE, kw_only=True
        )
        device: _Argument[torch.device | None, Device] = dataclasses.field(
            default=_NONE, kw_only=True
        )
        names: _Argument[list[str | None], Sequence[str | None] | None] = dataclasses.field(
            default=_NONE, kw_only=True
        )
        lock: bool = dataclasses.field(default=False, kw_only=True)

    _autocast = _nocast = _frozen = _tensor_only = _shadow = _skip_post_init_on_rebuild = False
    _cast_filter: ClassVar[Any] = None
    _fields: ClassVar[dict[str, Any]] = {}  # name -> default
    _positional: ClassVar[tuple[str, ...]] = ()  # arguments that can be given by position
    _init_only: ClassVar[dict[str, Any]] = {}  # arguments for __post_init__ only -> default
    _number_fields: ClassVar[dict[str, tuple[type, ...]]] = {}  # as found in annotations
    _types: ClassVar[dict[str, Any]] = {}  # name -> annotation, as an object where that is known
    _follows_init = False  # whether there is a __post_init__
    _follows_rebuild = False  # ... that is also called for results
    _hides_arguments = False  # whether a field is named batch_size, device or names

    def __init__(
        self,
        /,
        *args: Any,
        batch_size: BatchSize = None,
        device: Device = None,
        names: Sequence[str | None] | None = None,
        lock: bool = False,
        **values: Any,
    ) -> None:
        cls = self.__class__
        if args:
            values = cls._bound(args, values)
        if cls._hides_arguments:
            batch_size, device, names = cls._take_back(values, batch_size, device, names)
        size = as_size(batch_size)
        if device is not None:
            device = as_device(device)
        found: Entries = {}
        plain = not cls._autocast
        for name, default in cls._fields.items():
            value = values.pop(name, default)
            if value.__class__ is Tensor and plain:
                found[name] = value
            elif value is not None:
                if value is REQUIRED:
                    raise cls._missing(cls._later(name, values))
                value = cls._entry(name, value, size, device)
                if value is not None:
                    found[name] = value
        td = TensorDict._make({}, size, device)
        td._fill(found)
        if names is not None:
            td.names = names
        object.__setattr__(self, "_td", td)
        if values or cls._follows_init:
            self._finish(values)
        if lock or cls._frozen:
            td.lock_()

    @classmethod
    def _later(cls, first: str, values: Mapping[str, Any]) -> list[str]:
        """The fields without a value, the first of which is known; some of `values` are taken."""
        names = list(cls._fields)
        names = names[names.index(first) :]
        return [n for n in names if cls._fields[n] is REQUIRED and n not in values]

    @classmethod
    def _take_back(cls, values: dict[str, Any], *given: Any) -> list[Any]:
        """Arguments that are fields in a class with the option `shadow` go into `values`."""
        rest = []
        for name, value in zip(ARGUMENTS, given, strict=True):
            hidden = name in cls._fields
            if hidden and value is not None:
                values[name] = value
            rest.append(None if hidden else value)
        return rest

    def _finish(self, values: dict[str, Any]) -> None:
        """Call `__post_init__` with its arguments; refuse those that nobody takes."""
        cls = type(self)
        first = {name: values.pop(name, default) for name, default in cls._init_only.items()}
        for name in values:
            raise cls._no_field(name)
        for name, value in first.items():
            if value is REQUIRED:
                raise cls._missing([name])
        if cls._follows_init:
            self.__post_init__(*first.values())

    @classmethod
    def _bound(cls, args: tuple[Any, ...], values: dict[str, Any]) -> dict[str, Any]:
        """Arguments given by position, under their names."""
        if len(args) > len(cls._positional):
            raise TypeError(
                f"{cls.__name__}.__init__() takes {len(cls._positional) + 1} positional arguments "
                f"but {len(args) + 1} were given; batch_size and device are given by name"
            )
        bound = dict(zip(cls._positional, args, strict=False))
        for name in bound:
            if name in values:
                raise TypeError(
                    f"{cls.__name__}.__init__() got multiple values for argument {name!r}"
                )
        return bound | values

    # -- making classes

    def __class_getitem__(cls, options: Any) -> Any:
        names = options if isinstance(options, tuple) else (options,)
        generic = getattr(super(), "__class_getitem__", None)
        if generic is not None and not all([isinstance(name, str) for name in names]):
            return generic(options)
        for name in names:
            if name not in FLAGS:
                raise TypeError(f"the options of {cls.__name__}[...] are {FLAGS}, got {name!r}")
        base: Any = cls
        return _with_options(base, names)

    def __init_subclass__(cls, **options: Any) -> None:
        kw_only = bool(options.pop("kw_only", False))
        cls._choose({name: options.pop(name) for name in OPTIONS if name in options})
        super().__init_subclass__(**options)
        for base in cls.__mro__[1:]:
            if cls._frozen and base.__dict__.get("_fields") and not getattr(base, "_frozen", True):
                raise TypeError("cannot inherit frozen dataclass from a non-frozen one")
        cls._make_fields(kw_only)
        REGISTRY[f"{cls.__module__}.{cls.__qualname__}"] = cls
        pickled.class_by_name(f"{cls.__module__}.{cls.__qualname__}")
        pytrees.register(cls, _flatten, functools.partial(_unflatten, cls))

    @classmethod
    def _choose(cls, options: Mapping[str, bool]) -> None:
        for name, value in options.items():
            setattr(cls, f"_{name}", value if name == "cast_filter" else bool(value))
        if cls._autocast and cls._nocast:
            raise TypeError("autocast is exclusive with nocast.")
        if cls._tensor_only and (cls._autocast or cls._nocast):
            raise TypeError(
                "tensor_only and autocast or nocast are exclusive features: tensors need no casts"
            )

    @classmethod
    def _make_fields(cls, kw_only: bool) -> None:
        """Turn the annotations of the class into fields."""
        own = own_annotations(cls)
        inherited = getattr(cls, "__dataclass_fields__", {})
        for name in own:
            if name in _RESERVED and not cls._shadow:
                raise AttributeError(
                    f"Attribute name {name} can't be used with @tensorclass: the containers have "
                    f"a member {name!r}, which a field of {cls.__name__} would hide; "
                    'shadow=True, or the base TensorClass["shadow"], lets it'
                )
            if name not in cls.__dict__:  # else a method, or a property, would be the default
                field = copy.copy(inherited[name]) if name in inherited else dataclasses.field()
                setattr(cls, name, field)
        documented = cls.__doc__
        dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only)(cls)
        cls._types = {**cls._types, **{name: _resolved(own[name], cls) for name in own}}
        cls._fields, cls._init_only, cls._number_fields = {}, {}, {}
        positional: list[Argument] = []
        by_name: list[Argument] = []
        for field in cls.__dataclass_fields__.values():
            kind = field._field_type.name
            if kind == "_FIELD_CLASSVAR":
                continue
            default: Any = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = Factory(field.default_factory)
            elif default is dataclasses.MISSING:
                default = REQUIRED if field.init else None  # which __post_init__ may set
            (cls._init_only if kind == "_FIELD_INITVAR" else cls._fields)[field.name] = default
            if kind == "_FIELD":
                setattr(cls, field.name, attribute(field.name))
            if field.init:
                (by_name if field.kw_only else positional).append((field, default))
        cls._positional = tuple([field.name for field, _ in positional])
        cls._follows_init = hasattr(cls, "__post_init__")
        cls._follows_rebuild = cls._follows_init and not cls._skip_post_init_on_rebuild
        cls._hides_arguments = not cls._fields.keys().isdisjoint(ARGUMENTS)
        if cls._tensor_only:
            cls._check_tensors(own)
        if cls.__init__ is TensorClass.__init__:
            cls.__signature__ = signature(positional, by_name)  # type: ignore[attr-defined]
            if documented is None:
                cls.__doc__ = f"{cls.__name__}{cls.__signature__}"  # type: ignore[attr-defined]

    @classmethod
    def _check_tensors(cls, names: Mapping[str, Any]) -> None:
        for name in names:
            for kind in members(cls._types[name]):
                if not (isinstance(kind, type) and issubclass(kind, TENSOR_KINDS)):
                    raise TypeError(
                        "tensor_only requires types to be Tensor, Tensor-subtypes, containers or "
                        f"None, got {kind} for field {name!r}"
                    )

    @property
    def _tensordict(self) -> Any:  # as programs for tensordict name what is wrapped
        return self._td

    @classmethod
    def _wrap(cls, td: Any) -> Self:
        """An instance over a container that an operation gave, unchecked."""
        self = _new_object(cls)
        hold(td)
        object.__setattr__(self, "_td", td)
        if cls._follows_rebuild:
            self._follow_rebuild()
        return self

    @classmethod
    def _over(cls, td: Any) -> Self:
        """An instance over a container; `__post_init__` is not called."""
        self = _new_object(cls)
        hold(td)
        object.__setattr__(self, "_td", td)
        return self

    def _follow_rebuild(self) -> None:
        """Call `__post_init__` for the result of an operation: its fields may be set, once more."""
        td = self._td
        if td._locked:
            object.__setattr__(self, "_td", td.copy())
        self._finish({})
        if td._locked:
            self._td.lock_()

    @classmethod
    def _fitting(cls, td: Any) -> Any:
        """An instance over a container if all its keys are fields, else the container itself."""
        fields = cls._fields
        for name in td.keys():
            if name not in fields:
                return td
        return cls._wrap(td)

    @classmethod
    def from_tensordict(
        cls,
        tensordict: Any,
        non_tensordict: Mapping[str, Any] | None = None,
        safe: bool | None = None,
    ) -> Self:
        """An instance over a container, which is wrapped, not copied.

        non_tensordict: more fields, which are stored in a copy.
        safe: has no effect.
        Nested containers become tensorclasses, in a copy, where a field is annotated with one.
        Raises ValueError for keys that are not fields.

        >>> @tensorclass
        ... class Point:
        ...     x: torch.Tensor
        >>> Point.from_tensordict(TensorDict(x=torch.ones(2))).x
        tensor([1., 1.])
        """
        if not isinstance(tensordict, TensorDictBase):
            raise RuntimeError(
                f"Expected a TensorDictBase instance but got {type(tensordict)}; "
                "from_dict takes dictionaries"
            )
        cls._check_keys(tensordict.keys())
        if non_tensordict:
            cls._check_keys(non_tensordict)
            if twice := [key for key in non_tensordict if key in tensordict.keys()]:
                raise KeyError(
                    f"the field {twice[0]!r} is given twice: as a tensor, and not as one"
                )
            tensordict = tensordict.copy()
        self = cls._over(cls._typed(tensordict))
        if non_tensordict:
            for name, value in non_tensordict.items():
                self._set_str(name, value)
        if cls._follows_init:
            self._finish({})
        return self

    @classmethod
    def _check_keys(cls, names: Iterable[str]) -> None:
        fields = cls._fields
        unknown = [name for name in names if name not in fields]
        if unknown:
            raise ValueError(
                f"Keys from the tensordict must correspond to the class attributes: {cls.__name__} "
                f"has the fields {list(fields)}, not {sorted(unknown)}"
            )

    @classmethod
    def _typed(cls, td: Any) -> Any:
        """The container, or a shallow copy in which nested ones are of the class of their field."""
        if td.__class__ is not TensorDict:
            return td
        changed: Entries = {}
        for name, value in td._d.items():
            if value.__class__ is not Tensor and isinstance(value, Node):
                kind = cls._class_of(name) if value.__class__ is TensorDict else None
                if kind is not None and all([key in kind._fields for key in value._entries()]):
                    changed[name] = kind.from_tensordict(value)
                elif value._is_data() and value._unwrapped() is None:
                    changed[name] = None
        if not changed:
            return td
        fields = {name: changed.get(name, value) for name, value in td._d.items()}
        fields = {name: value for name, value in fields.items() if value is not None}
        out = TensorDict._make(fields, td._batch_size, td._device, td._names)
        return out.lock_() if td._locked else out

    @classmethod
    def _from_entries(cls, entries: Any, batch_size: Any, device: Any) -> Any:
        return cls.from_tensordict(TensorDict(entries, batch_size=batch_size, device=device))

    def _alike(self, entries: Mapping[Any, Any], **options: Any) -> Any:
        td = finished(TensorDict, entries, **options)
        for name, default in self._fields.items():
            if default is not REQUIRED and td._peek_str(name) is None:
                value = self._entry(name, default, td._batch_size, td._device)
                if value is not None:
                    td._set_str(name, value)
        return self.from_tensordict(td)

    @classmethod
    def fields(cls) -> tuple[dataclasses.Field[Any], ...]:
        """The dataclass fields of this class, as `dataclasses.fields` returns them.

        >>> class Point(TensorClass):
        ...     x: torch.Tensor
        >>> [field.name for field in Point.fields()]
        ['x']
        """
        return dataclasses.fields(cls)

    # -- annotations and casts

    @classmethod
    def _annotation(cls, name: str) -> Any:
        found = cls._types.get(name)
        if isinstance(found, str):  # not defined yet when the class was
            found = cls._types[name] = _resolved(found, cls)
        return found

    @classmethod
    def _class_of(cls, name: str) -> type[TensorClass] | None:
        """The tensorclass that a field is annotated with."""
        for kind in members(cls._annotation(name)):
            if isinstance(kind, type) and issubclass(kind, TensorClass):
                return kind
        return None

    @classmethod
    def _numbers(cls, name: str) -> tuple[type, ...]:
        """The kinds of numbers that a field with batch dimensions keeps, by its annotation."""
        found = cls._number_fields.get(name)
        if found is None:
            kinds = set(members(cls._annotation(name))) - {types.NoneType}
            kind = kinds.pop() if len(kinds) == 1 else None
            found = cls._number_fields[name] = NUMBERS.get(kind, ())
        return found

    @classmethod
    def _entry(cls, name: str, value: Any, size: torch.Size, device: Any) -> Any:
        """The stored form of a value: None, a node, or a tensor as `TensorDict` would make it."""
        if value.__class__ is Factory:
            value = value.make()
        if value is None:
            return None
        if cls._autocast:
            kind = cls._annotation(name)
            if is_class(kind) and not (isinstance(value, Node) and value._is_data()):
                value = cast(value, kind, name, size, device)
                if not isinstance(value, (Tensor, Node)):
                    return NonTensorData(value, size, device)
            elif isinstance(value, list):
                return NonTensorData(value, size, device)
        if isinstance(value, (Tensor, Node, list)) or cls._tensor_only:
            return value
        if not cls._nocast and isinstance(value, (bool, int, float, np.ndarray)):
            if not (size and isinstance(value, cls._numbers(name))):
                return value
        return NonTensorData(value, size, device)

    # -- attributes

    def __getattr__(self, name: str) -> Any:
        if name == "_td":  # an __init__ of the user's that assigns fields one by one
            object.__setattr__(self, "_td", TensorDict._make({}, torch.Size()))
            return self._td
        if name.startswith("_"):
            raise AttributeError(name)
        try:  # what only some containers have, such as `stack_dim` and `append`
            value = getattr(self._td, name)
        except AttributeError:
            raise self._no_field(name, setting=False) from None
        return functools.partial(self._call, value) if callable(value) else value

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the wrapped container with what instances among the arguments wrap."""
        return self._again(method(*_bare(args), **kwargs))

    def __setattr__(self, name: str, value: Any) -> None:
        cls = self.__class__
        if cls._frozen and not name.startswith("_"):
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        if name in cls._fields:
            self._set_str(name, value)
        elif hasattr(cls, name) or name == "_td":
            object.__setattr__(self, name, value)
        else:
            raise cls._no_field(name)

    def __delattr__(self, name: str) -> None:
        if self._frozen:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        object.__delattr__(self, name)

    @classmethod
    def _no_field(cls, name: str, setting: bool = True) -> AttributeError:
        return AttributeError(
            f"Cannot set the attribute {name!r}: {cls.__name__} has no such field; "
            f"its fields are {list(cls._fields)}"
            if setting
            else f"{cls.__name__!r} object has no attribute or field {name!r}; "
            f"its fields are {list(cls._fields)}",
            name=name,
        )

    @classmethod
    def _missing(cls, names: list[str]) -> TypeError:
        many = "argument" if len(names) == 1 else "arguments"
        listed = ", ".join(map(repr, names))
        return TypeError(
            f"{cls.__name__}.__init__() missing {len(names)} required positional {many}: {listed}"
        )

    # -- entries (class_entries.py)

    get = class_entries.get
    set = class_entries.set  # type: ignore[assignment] # arguments are named as in tensordict
    set_at_ = class_entries.set_at_  # type: ignore[assignment]
    update = class_entries.update
    replace = class_entries.replace
    create_nested = class_entries.create_nested
    select = class_entries.select  # type: ignore[assignment] # which may give a `TensorDict`
    to_dict = class_entries.to_dict
    to_tensordict = class_entries.to_tensordict

    def __getitem__(self, index: Any) -> Self:
        if index.__class__ is not int and _is_text(index):
            raise ValueError(
                f"Invalid indexing arguments: {index!r}. A tensorclass is indexed along its batch "
                f"dimensions; a field is read as an attribute, or with get({index!r})."
            )
        return self._again(self._td[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        if _is_text(index):
            raise ValueError(
                f"Invalid indexing arguments: {index!r}. A tensorclass is indexed along its batch "
                f"dimensions; a field is written as an attribute, or with set({index!r}, value)."
            )
        if isinstance(value, TensorClass):
            if value._fields.keys() != self._fields.keys():
                raise ValueError(
                    "__setitem__ is only allowed for same-class or compatible class: "
                    f"{type(value).__name__} has the fields {list(value._fields)}, "
                    f"{type(self).__name__} has {list(self._fields)}"
                )
            value = value._td
        elif isinstance(value, TensorDictBase):
            self._check_keys(value.keys())
        elif not isinstance(value, (Tensor, bool, int, float, complex, np.ndarray)):
            raise ValueError(
                "__setitem__ only supports tensorclasses, containers, numbers and tensors, "
                f"got {type(value).__name__}"
            )
        self._td[index] = value

    def __repr__(self) -> str:
        td = self._td
        options = printing.shown()
        if options is not None and options["compact"]:
            return printing.compact(self, options)
        shown = {field.name for field in dataclasses.fields(self) if field.repr}
        there = sorted([name for name in td.keys() if name in shown])
        lines = [f"{name}={printing._describe(td, name)}" for name in there]
        lines += [f"{name}=None" for name in self._fields if name in shown - {*there}]
        lines += [
            f"batch_size={td.batch_size}",
            f"device={td.device}",
            f"is_shared={td.is_shared()}",
        ]
        return f"{type(self).__name__}(\n" + textwrap.indent(",\n".join(lines), "    ") + ")"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        out = memo[id(self)] = self._wrap(copy.deepcopy(self._td, memo))
        return out

    def __reduce_ex__(self, protocol: Any) -> Any:
        return pickled.reduced_class(self)

    # -- the contract of Node

    def _again(self, out: Any) -> Any:
        """The result of a method of the wrapped container; containers that fit are wrapped."""
        if isinstance(out, Node):
            if out is self._td:
                return self
            return out if isinstance(out, TensorClass) or out._is_data() else self._fitting(out)
        if isinstance(out, (tuple, list)):
            kind = type(out)
            if kind is tuple or kind is list or hasattr(kind, "n_fields"):
                return kind([self._again(part) for part in out])
        return out

    def _set_str(self, name: str, value: Any) -> None:
        cls, td = self.__class__, self._td
        if value.__class__ is not Tensor or cls._autocast or name not in cls._fields:
            if name not in cls._fields:
                raise cls._no_field(name)
            value = cls._entry(name, value, td._batch_size, td._device)
        if td._locked:
            raise locked_error(self, name)
        if value is not None:
            td._set_str(name, value)
        elif td._peek_str(name) is not None:
            td._del_str(name)

    def _pairs(self, other: Any) -> list[tuple[Any, Any]]:
        pairs = self._td._pairs(other)
        return [(self, other)] if len(pairs) == 1 and pairs[0][0] is self._td else pairs


def _bare(args: Any) -> list[Any]:
    """Arguments, with what they wrap instead of instances."""
    out = []
    for arg in args:
        nested = isinstance(arg, (list, tuple))
        out.append(_bare(arg) if nested else arg._td if isinstance(arg, TensorClass) else arg)
    return out


def _is_text(index: Any) -> bool:
    return isinstance(index, str) or (isinstance(index, tuple) and is_key(index))


def _resolved(annotation: Any, cls: type) -> Any:
    """An annotation as an object; as it is if a name in it is not known yet."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals is globals():
        frame = frame.f_back
    holder = types.SimpleNamespace(__annotations__={"": annotation})
    names = vars(sys.modules[cls.__module__]) if cls.__module__ in sys.modules else {}
    try:
        return typing.get_type_hints(holder, names, {**frame.f_locals, cls.__name__: cls})[""]
    except (NameError, TypeError, AttributeError, SyntaxError):
        return annotation


@functools.cache
def _with_options(cls: Any, names: tuple[str, ...]) -> Any:
    """A base class with these options."""
    body = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    name, options = "_".join([cls.__name__, *names]), dict.fromkeys(names, True)
    return types.new_class(name, (cls,), options, lambda space: space.update(body))


def _flatten(self: TensorClass) -> tuple[list[Any], Any]:
    td = self._td
    return pytrees.flatten_lazy(td) if hasattr(td, "stack_dim") else pytrees.flatten(td)


def _unflatten(cls: type[TensorClass], values: Any, spec: Any) -> Any:
    values = list(values)
    whole = all([isinstance(value, (Tensor, Node)) for value in values])  # torch puts others there
    return (cls._wrap if whole else cls._over)(pytrees.unflatten(values, spec))


delegate(TensorClass)
_RESERVED = frozenset([name for name in dir(TensorClass) if not name.startswith("_")]) - {
    "data",
    "fields",
}


# -------------------------------------------------------------------------------- making and asking


Class = typing.TypeVar("Class")


@typing.overload
@typing.dataclass_transform(field_specifiers=(dataclasses.field,))
def tensorclass(cls: type[Class], /, **options: Any) -> type[Class]: ...
@typing.overload
@typing.dataclass_transform(field_specifiers=(dataclasses.field,))
def tensorclass(cls: None = None, /, **options: Any) -> Callable[[type[Class]], type[Class]]: ...
def tensorclass(cls: Any = None, /, **options: Any) -> Any:
    """Make a class whose annotated fields are the entries of a container; see `TensorClass`.

    options: `autocast`, `nocast`, `frozen`, `tensor_only`, `shadow`, as for `TensorClass`.

    >>> @tensorclass
    ... class Point:
    ...     x: torch.Tensor
    ...     name: str = "origin"
    ...     def shifted(self, by):
    ...         return self.replace(x=self.x + by)
    >>> point = Point(x=torch.zeros(3, 2), batch_size=[3])
    >>> point[0].shifted(1).x, point.name
    (tensor([1., 1.]), 'origin')
    """
    for name in options:
        if name not in OPTIONS:
            raise TypeError(f"the options of tensorclass are {OPTIONS}, got {name!r}")
    if cls is None:
        return functools.partial(tensorclass, **options)
    if issubclass(cls, TensorClass):
        cls._choose(options)
        return cls
    return _derived(cls, options)


def _derived(cls: type, options: Mapping[str, bool]) -> Any:
    """A tensorclass with the members of a plain class, or of a dataclass."""
    own = own_annotations(cls)
    body = {name: cls.__dict__[name] for name in own if name in cls.__dict__}
    bases: tuple[type, ...] = (cls, TensorClass)
    if dataclasses.is_dataclass(cls):
        if cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            bases = (TensorClass,)  # no other dataclass can derive from it
            body |= {name: value for name, value in vars(cls).items() if not name.startswith("__")}
        known = {field.name: field for field in dataclasses.fields(cls)}
        if "__dataclass_fields__" not in cls.__dict__:  # a plain class that derives from one
            known = {name: field for name, field in known.items() if name not in own}
        own = {name: field.type for name, field in known.items()} | own
        body |= {name: unbound(field) for name, field in known.items()}
        for name in ("__init__", "__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__"):
            body[name] = getattr(TensorClass, name)  # not what the dataclass has made for itself
    body |= dict(
        __annotations__=own,
        __module__=cls.__module__,
        __qualname__=cls.__qualname__,
        __doc__=cls.__doc__,
    )
    return type(cls.__name__, bases, body, **options)


def is_tensorclass(obj: Any) -> bool:
    """Whether an object, or a class, is a tensorclass.

    >>> class Point(TensorClass):
    ...     x: torch.Tensor
    >>> is_tensorclass(Point), is_tensorclass(Point(x=0)), is_tensorclass(TensorDict())
    (True, True, False)
    """
    return issubclass(obj if isinstance(obj, type) else type(obj), TensorClass)


@kinds.enter
def from_dataclass(dataclass: Any, dest_cls: Any = None, **options: bool) -> type[TensorClass]:
    """The tensorclass that has the fields of a dataclass, or of an instance of one.

    dest_cls: the tensorclass to use instead.
    options: those of `tensorclass`.

    >>> @dataclasses.dataclass
    ... class Point:
    ...     x: torch.Tensor
    >>> from_dataclass(Point)(x=torch.ones(2)).x
    tensor([1., 1.])
    """
    if dest_cls is not None:
        return dest_cls
    cls = dataclass if isinstance(dataclass, type) else type(dataclass)
    return _from_dataclass(cls, frozenset(options.items()))


@functools.cache
def _from_dataclass(cls: type, options: frozenset[tuple[str, bool]]) -> Any:
    return cls if issubclass(cls, TensorClass) else _derived(cls, dict(options))
