"""Methods of containers on tensorclasses: called on what an instance wraps, and wrapped again."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from raffia.tensordict import convert
from raffia.tensordict.collection import TensorCollection

# methods that give entries, or something else that is not the container again
RAW = """get_at pop popitem get_non_tensor keys values items non_tensor_items numpy tolist
    to_namedtuple data_ptr to_module _entries _get_str _get_lazy _peek _peek_str _entry_names
    _children _named_children _stores _leaves _spread""".split()
# methods that run on the instance: they set entries, call a function on rows, or ask for the class
GENERIC = """setdefault rename_key_ rename_keys set_non_tensor cat_tensors stack_tensors
    from_dict_instance map map_iter memmap memmap_ memmap_like memmap_refresh_ load_memmap_
    make_memmap make_memmap_from_tensor make_memmap_from_storage save dumps load_
    send isend recv irecv asend arecv init_remote broadcast all_reduce reduce all_gather
    gather_and_stack scatter
    _unwrapped _is_data __iter__ __bool__ __hash__ __copy__
    __getstate__ __setstate__""".split()
# methods that heed the class's `cast_filter`
CASTS = ["to", "type", *convert.CASTS]
# what the wrapped container knows
STATE = """_batch_size _device _names _locked _cache _parents _origin _skeleton
    _buffer _mapped_to""".split()
# members of the contract of `Node`, and of a lazy stack's, that give the container with all fields
WHOLE = "_map _batched _index _rebuild _shallow".split()
PARTIAL = "_new _of_members _apply_members".split()


def delegate(cls: Any) -> None:
    """Add to the base of tensorclasses the container methods that it does not define itself."""
    for name in STATE:
        setattr(cls, name, _property(name, True))
    for name in PARTIAL:
        setattr(cls, name, _method(name))
    for name in dir(TensorCollection):
        if name in vars(cls) or name in GENERIC:
            continue
        member = inspect.getattr_static(TensorCollection, name)
        if isinstance(member, property):
            setattr(cls, name, _property(name, member.fset is not None, member.__doc__))
        elif isinstance(member, types.FunctionType):
            method = functools.wraps(member)(_method(name))
            method.__doc__ = _first_line(name, member.__doc__)
            method.__module__ = cls.__module__
            setattr(cls, name, method)


def _method(name: str) -> Callable[..., Any]:
    """The method `name` of the wrapped container."""

    def again(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._again(getattr(self._td, name)(*args, **kwargs))

    def cast(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._cast_filter is not None:
            kwargs.setdefault("cast_filter", type(self)._cast_filter)
        return self._again(getattr(self._td, name)(*args, **kwargs))

    def raw(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._td, name)(*args, **kwargs)

    def whole(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._wrap(getattr(self._td, name)(*args, **kwargs))

    def shell(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._over(getattr(self._td, name)(*args, **kwargs))

    ways = dict.fromkeys(RAW, raw) | dict.fromkeys(CASTS, cast) | dict.fromkeys(WHOLE, whole)
    ways["empty"] = shell
    return ways.get(name, again)


def _property(name: str, is_settable: bool, doc: str | None = None) -> property:
    """The property `name` of the wrapped container."""

    def read(self: Any) -> Any:
        return getattr(self._td, name)

    def read_again(self: Any) -> Any:
        return self._again(getattr(self._td, name))

    def write(self: Any, value: Any) -> None:
        setattr(self._td, name, value)

    reads = read_again if name in ("data", "grad") else read
    return property(reads, write if is_settable else None, doc=_first_line(name, doc))


def _first_line(name: str, doc: str | None) -> str | None:
    first, _, _ = (doc or "").strip().partition("\n")
    return f"{first}\n\n        See `TensorDict.{name}`." if first else None
