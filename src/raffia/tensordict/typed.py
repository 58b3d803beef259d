"""`TypedTensorDict`: a `TensorDict` whose entries are declared as annotations of its class."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from raffia.tensordict.class_fields import own_annotations
from raffia.tensordict.node import BatchSize, Device, Node
from raffia.tensordict.tensordict import TensorDict

FLAGS = ("frozen", "shadow")
_MISSING = dataclasses.MISSING


class TypedTensorDict(TensorDict):
    """A `TensorDict` with declared entries, which are attributes too.

    source: dict or container with the fields; or give them as keywords.
    batch_size, device, names, lock: as for `TensorDict`.
    A field may have a default; one of None is no entry. Operations give instances, which may lack
    fields: reading one is an AttributeError. Other keys may be set as in any container. Options, as
    `class A(TypedTensorDict, frozen=True)` or `TypedTensorDict["frozen"]`:

    frozen: lock what the constructor makes.
    shadow: allow fields that have the name of a method.
    Raises TypeError for fields that are missing or unknown.

    >>> class State(TypedTensorDict):
    ...     obs: torch.Tensor
    ...     reward: torch.Tensor = None
    >>> state = State(obs=torch.zeros(3, 2), batch_size=[3])
    >>> state[0].obs.shape, state.reward, list(state.keys()), type(state.clone()).__name__
    (torch.Size([2]), None, ['obs'], 'State')
    """

    _fields: ClassVar[dict[str, Any]] = {}  # name -> default
    _frozen: ClassVar[bool] = False
    _shadow: ClassVar[bool] = False

    def __class_getitem__(cls, flags: Any) -> Any:
        names = flags if isinstance(flags, tuple) else (flags,)
        for name in names:
            if name not in FLAGS:
                raise TypeError(f"the options of {cls.__name__}[...] are {FLAGS}, got {name!r}")
        return type(
            cls.__name__, (cls,), {"__module__": cls.__module__}, **dict.fromkeys(names, True)
        )

    def __init_subclass__(
        cls, *, frozen: bool | None = None, shadow: bool | None = None, **options: Any
    ) -> None:
        super().__init_subclass__(**options)
        for name, flag in dict(frozen=frozen, shadow=shadow).items():
            if flag is not None:
                setattr(cls, f"_{name}", flag)
        fields = dict(cls._fields)
        for name, kind in own_annotations(cls).items():
            if typing.get_origin(kind) is ClassVar or str(kind).startswith(
                ("ClassVar", "typing.C")
            ):
                continue
            if hasattr(TypedTensorDict, name) and not cls._shadow:
                raise AttributeError(
                    f"Field {name!r} shadows a member that containers have; "
                    f"{TypedTensorDict.__name__}['shadow'] allows that"
                )
            fields[name] = cls.__dict__.get(name, _MISSING)
            setattr(cls, name, _attribute(name))
        cls._fields = fields

    def __init__(
        self,
        source: Any = None,
        *,
        batch_size: BatchSize = None,
        device: Device = None,
        names: Sequence[str | None] | None = None,
        non_blocking: bool | None = None,
        lock: bool = False,
        **fields: Any,
    ) -> None:
        cls = type(self)
        given = dict(source._entries() if isinstance(source, Node) else source or {})
        for name in fields:
            if name in given:
                raise TypeError(f"{cls.__name__}() got multiple values for field {name!r}")
        given |= fields
        if unknown := [name for name in given if name not in cls._fields]:
            raise TypeError(f"{cls.__name__}() got unexpected field(s): {', '.join(unknown)}")
        values = cls._completed(given, f"{cls.__name__}()")
        if isinstance(source, Node) and batch_size is None:
            batch_size = source._batch_size
        super().__init__(values, batch_size, device, names, non_blocking, lock or cls._frozen)

    @classmethod
    def _completed(cls, given: Mapping[str, Any], where: str, check: bool = True) -> dict[str, Any]:
        """The values of the fields, defaults among them; TypeError for those without one."""
        missing = [
            n for n, default in cls._fields.items() if default is _MISSING and n not in given
        ]
        if missing and check:
            raise TypeError(f"{where} missing required field(s): {', '.join(missing)}")
        values = dict(given)
        for name, default in cls._fields.items():
            if name not in values and default is not _MISSING and default is not None:
                values[name] = default
        return values

    @classmethod
    def from_tensordict(cls, td: Any, *, check: bool = True) -> Self:
        """An instance with the entries of a container (same tensors).

        check: False allows missing fields.
        Raises TypeError for missing fields, and for a lazy stack, which `densify()` makes one.

        >>> class State(TypedTensorDict):
        ...     obs: torch.Tensor
        >>> State.from_tensordict(TensorDict(obs=torch.ones(2))).obs
        tensor([1., 1.])
        """
        if not isinstance(td, TensorDict):
            raise TypeError(
                f"{cls.__name__}.from_tensordict takes a TensorDict, got {type(td).__name__}"
            )
        out: Any = td._shallow()
        values = cls._completed(out._d, f"{cls.__name__}.from_tensordict()", check)
        for name in values.keys() - out._d.keys():
            out.set(name, values[name])
        out.__class__ = cls
        return out

    @classmethod
    def _from_entries(cls, entries: Any, batch_size: Any, device: Any) -> Any:
        return cls.from_tensordict(TensorDict(entries, batch_size=batch_size, device=device))

    def __getattr__(self, name: str) -> Any:
        if name in type(self)._fields:
            raise AttributeError(
                f"{type(self).__name__!r} has the field {name!r}, which is not set"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self)._fields:
            self._set_str(name, value)
        else:
            super().__setattr__(name, value)


def _attribute(name: str) -> property:
    """A property that reads a field; `__setattr__` of the class writes it."""

    def read(self: Any) -> object:
        value = self._d.get(name)
        if value is not None:
            return value._unwrapped() if isinstance(value, Node) else value
        if type(self)._fields[name] is None:
            return None
        raise AttributeError(name)  # `__getattr__` says more

    return property(read)
