"""The container. `TensorCollection` is the table of contents: it names the file of each method.

`TensorDict` is the container that stores its entries in one dict; it has its own way only where
that is faster.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from operator import methodcaller
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from raffia.tensordict import (
    build,
    collectives,
    consolidated,
    convert,
    dim_names,
    disk,
    entries,
    index,
    lock,
    messages,
    modes,
    modules,
    pickled,
    pointwise,
    reductions,
    shape,
    tree,
)
from raffia.tensordict.entries import UNSET, KeysView, NestedView, locked_error
from raffia.tensordict.keys import (
    NestedKey,
    is_key,
    missing,
)
from raffia.tensordict.node import Entries, Node, child_names
from raffia.tensordict.unbatched import UnbatchedTensor

_new_object = object.__new__


def _unlike(value: Tensor, batch_size: torch.Size) -> bool:
    """Whether a shape does not begin with the batch size; slices are made only where needed."""
    try:
        shape = value.shape
    except RuntimeError:
        shape = build.shape_of(value)
    if not shape or shape[0] != batch_size[0]:
        return True
    ndim = len(batch_size)
    return ndim > 1 and shape[:ndim] != batch_size


_CASTS: dict[torch.dtype, Callable[[Tensor], Tensor]] = {  # faster than `to`
    torch.float32: Tensor.float, torch.float64: Tensor.double, torch.float16: Tensor.half,
    torch.bfloat16: Tensor.bfloat16, torch.bool: Tensor.bool, torch.uint8: Tensor.byte,
    torch.int8: Tensor.char, torch.int16: Tensor.short, torch.int32: Tensor.int,
    torch.int64: Tensor.long,
}  # fmt: skip
Parameter = nn.Parameter
Method = TypeVar("Method", bound=Callable[..., Any])


def _documented_as(function: Callable[..., Any]) -> Callable[[Method], Method]:
    """Give a method the docstring and signature of the function that it is a faster way of."""

    def documented(method: Method) -> Method:
        method.__doc__ = function.__doc__
        method.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return method

    return documented


class TensorCollection(pointwise.Pointwise, reductions.Reductions, Node):
    """Everything that a container can do, written over the few members of `Node`.

    >>> from raffia import NonTensorData
    >>> isinstance(TensorDict(), TensorCollection), isinstance(NonTensorData("a"), TensorCollection)
    (True, True)
    """

    _cache: dict[Any, Any] | None = None  # results that hold while locked
    _parents: list[Any] | None = None  # weak references to the locked containers around this one
    _kids: Sequence[Any] | None = None  # the nodes right below, while locked
    _origin: tuple[Any, ...] | None = None  # how this came from another container, for `with`
    _buffer: Tensor | None = None  # what all entries lie in, from `consolidate` until unlocked
    _mapped_to: Any = None  # the folder of its files, "" if they are temporary, while locked
    _spans: list[int] | None = None  # where in it each leaf begins, to pickle it as one block
    _plain: Any = None  # the class TensorDict
    _lasting = False  # whether an entry is the same object at each read, so that listings can last
    _holds_data = False  # True for classes that stand for a non-tensor value

    # construction (build.py)
    from_dict = classmethod(build.from_dict)
    from_dict_instance = build.from_dict_instance
    from_any = classmethod(build.from_any)
    from_pytree = classmethod(build.from_pytree)
    from_namedtuple = classmethod(build.from_namedtuple)
    from_dataclass = classmethod(build.from_dataclass)
    from_tuple = classmethod(build.from_tuple)
    from_list = classmethod(build.from_list)
    from_struct_array = classmethod(build.from_struct_array)
    fromkeys = classmethod(build.fromkeys)
    from_schema = classmethod(build.from_schema)
    new_zeros = build.new_zeros
    new_ones = build.new_ones
    new_empty = build.new_empty
    new_full = build.new_full
    new_tensor = build.new_tensor

    # entries (entries.py)
    keys = entries.keys
    values = entries.values
    items = entries.items
    get = entries.get
    get_at = entries.get_at
    set = entries.set
    set_ = entries.set_
    set_at_ = entries.set_at_
    setdefault = entries.setdefault
    pop = entries.pop
    popitem = entries.popitem
    del_ = entries.del_
    rename_key_ = entries.rename_key_
    rename_keys = entries.rename_keys
    update = entries.update
    update_ = entries.update_
    update_at_ = entries.update_at_
    select = entries.select
    exclude = entries.exclude
    split_keys = entries.split_keys
    separates = entries.separates
    flatten_keys = entries.flatten_keys
    unflatten_keys = entries.unflatten_keys
    replace = entries.replace
    is_empty = entries.is_empty
    clear = entries.clear
    create_nested = entries.create_nested
    fill_ = entries.fill_
    to_dict = entries.to_dict
    get_item_shape = entries.get_item_shape
    entry_class = entries.entry_class
    depth = property(entries.depth)
    cat_tensors = entries.cat_tensors
    stack_tensors = entries.stack_tensors
    is_non_tensor = entries.is_non_tensor
    get_non_tensor = entries.get_non_tensor
    set_non_tensor = entries.set_non_tensor
    non_tensor_items = entries.non_tensor_items
    filter_non_tensor_data = entries.filter_non_tensor_data
    filter_empty_ = entries.filter_empty_
    __contains__ = entries.contains

    # rows (index.py)
    __iter__ = index.iterate
    __len__ = index.length
    where = index.where
    masked_fill = index.masked_fill
    masked_fill_ = index.masked_fill_
    masked_select = index.masked_select
    gather = index.gather
    copy_at_ = index.copy_at_

    # shape (shape.py)
    view = shape.view
    reshape = shape.reshape
    flatten = shape.flatten
    unflatten = shape.unflatten
    squeeze = shape.squeeze
    unsqueeze = shape.unsqueeze
    permute = shape.permute
    transpose = shape.transpose
    swapaxes = shape.swapaxes
    swapdims = shape.swapdims
    movedim = shape.movedim
    moveaxis = shape.moveaxis
    expand = shape.expand
    expand_as = shape.expand_as
    broadcast_to = shape.broadcast_to
    repeat = shape.repeat
    repeat_interleave = shape.repeat_interleave
    tile = shape.tile
    roll = shape.roll
    flip = shape.flip
    fliplr = shape.fliplr
    flipud = shape.flipud
    rot90 = shape.rot90
    narrow = shape.narrow
    split = shape.split
    tensor_split = shape.tensor_split
    chunk = shape.chunk
    unbind = shape.unbind
    _cut = shape.cut
    pad = shape.pad
    atleast_1d = shape.atleast_1d
    atleast_2d = shape.atleast_2d
    atleast_3d = shape.atleast_3d

    # leaves (tree.py)
    apply = tree.apply
    apply_ = tree.apply_
    named_apply = tree.named_apply
    map = tree.map
    map_iter = tree.map_iter
    to_pytree = tree.to_pytree
    __torch_function__ = classmethod(tree.torch_function)

    # dtype, device, memory (convert.py)
    to = convert.to
    cpu = convert.cpu
    cuda = convert.cuda
    type = convert.type_
    float = convert.caster("float", torch.float32)
    float16 = convert.caster("float16", torch.float16)
    float32 = convert.caster("float32", torch.float32)
    float64 = convert.caster("float64", torch.float64)
    half = convert.caster("half", torch.float16)
    double = convert.caster("double", torch.float64)
    bfloat16 = convert.caster("bfloat16", torch.bfloat16)
    complex32 = convert.caster("complex32", torch.complex32)
    complex64 = convert.caster("complex64", torch.complex64)
    complex128 = convert.caster("complex128", torch.complex128)
    int = convert.caster("int", torch.int32)
    int8 = convert.caster("int8", torch.int8)
    int16 = convert.caster("int16", torch.int16)
    int32 = convert.caster("int32", torch.int32)
    int64 = convert.caster("int64", torch.int64)
    uint8 = convert.caster("uint8", torch.uint8)
    uint16 = convert.caster("uint16", torch.uint16)
    uint32 = convert.caster("uint32", torch.uint32)
    uint64 = convert.caster("uint64", torch.uint64)
    bool = convert.caster("bool", torch.bool)
    clone = convert.clone
    copy = convert.copy
    contiguous = convert.contiguous
    is_contiguous = convert.is_contiguous
    detach = convert.detach
    detach_ = convert.detach_
    data = property(convert.data, convert.set_data)
    grad = property(convert.grad)
    requires_grad = property(convert.requires_grad)
    requires_grad_ = convert.requires_grad_
    zero_grad = convert.zero_grad
    backward = convert.backward
    zero_ = convert.zero_
    copy_ = convert.copy_
    pin_memory = convert.pin_memory
    pin_memory_ = convert.pin_memory_
    share_memory_ = convert.share_memory_
    is_shared = convert.is_shared
    record_stream = convert.record_stream
    consolidate = convert.consolidate
    is_consolidated = convert.is_consolidated
    from_consolidated = classmethod(consolidated.from_consolidated)
    data_ptr = convert.data_ptr
    numel = convert.numel
    bytes = convert.bytes_
    param_count = convert.param_count
    dtype = property(convert.dtype)
    is_floating_point = convert.is_floating_point
    is_cuda = property(convert.is_cuda)
    is_cpu = property(convert.is_cpu)
    is_meta = property(convert.is_meta)
    clear_device_ = convert.clear_device_
    auto_device_ = convert.auto_device_
    empty = convert.empty
    to_tensordict = convert.to_tensordict
    to_lazystack = convert.to_lazystack
    densify = convert.densify
    to_padded_tensor = convert.to_padded_tensor
    to_namedtuple = convert.to_namedtuple
    to_struct_array = convert.to_struct_array
    as_tensor = convert.as_tensor
    numpy = convert.numpy
    tolist = convert.tolist
    state_dict = convert.state_dict
    load_state_dict = convert.load_state_dict
    stack_from_tensordict = convert.stack_from_tensordict
    cat_from_tensordict = convert.cat_from_tensordict
    __deepcopy__ = convert.deepcopy

    # lock (lock.py)
    is_locked = property(lock.is_locked, lock.set_locked)
    lock_ = lock.lock_
    unlock_ = lock.unlock_
    __enter__ = lock.enter
    __exit__ = lock.exit_

    # between processes (messages.py, collectives.py)
    send = messages.send
    isend = messages.isend
    recv = messages.recv
    irecv = messages.irecv
    asend = collectives.asend
    arecv = collectives.arecv
    init_remote = collectives.init_remote
    from_remote_init = classmethod(collectives.from_remote_init)
    broadcast = collectives.broadcast
    all_reduce = collectives.all_reduce
    reduce = collectives.reduce
    all_gather = collectives.all_gather
    gather_and_stack = collectives.gather_and_stack
    scatter = collectives.scatter

    # names of dimensions (dim_names.py)
    names = property(dim_names.get_names, dim_names.set_names)
    refine_names = dim_names.refine_names
    rename = dim_names.rename
    rename_ = dim_names.rename_

    # modules (modules.py)
    from_module = classmethod(modules.from_module)
    from_modules = classmethod(modules.from_modules)
    to_module = modules.to_module

    # disk (disk.py)
    memmap = disk.memmap
    memmap_ = disk.memmap_
    memmap_like = disk.memmap_like
    memmap_refresh_ = disk.memmap_refresh_
    load_memmap = classmethod(disk.load_memmap)
    load_memmap_ = disk.load_memmap_
    is_memmap = disk.is_memmap
    make_memmap = disk.make_memmap
    make_memmap_from_tensor = disk.make_memmap_from_tensor
    make_memmap_from_storage = disk.make_memmap_from_storage
    saved_path = property(disk.saved_path)
    save = disk.save
    dumps = disk.save
    load = classmethod(disk.load)
    load_ = disk.load_

    def to_json(self, path: Any, *, separator: str | None = None, lines: Any = False) -> None:
        """Write a JSON file with a record for each row; see `raffia.tensordict.rows.to_json`.

        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     TensorDict(a=[1, 2], batch_size=[2]).to_json(f"{folder}/a.json", lines=True)
        ...     Path(folder, "a.json").read_text().splitlines()
        ['{"a": 1}', '{"a": 2}']
        """
        from raffia.tensordict import rows

        rows.to_json(self, path, separator=separator, lines=lines)

    @classmethod
    def from_json(
        cls,
        path: Any,
        *,
        auto_batch_size: Any = False,
        batch_dims: Any = None,
        device: Any = None,
        batch_size: Any = None,
        separator: str | None = None,
        dtype: Any = None,
        lines: Any = False,
    ) -> Any:
        """A container from a JSON file of records; see `raffia.tensordict.rows.from_json`.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     TensorDict(a=[1, 2], batch_size=[2]).to_json(f"{folder}/a.json")
        ...     TensorDict.from_json(f"{folder}/a.json")["a"]
        tensor([1, 2])
        """
        from raffia.tensordict import rows

        how = dict(batch_dims=batch_dims, batch_size=batch_size, device=device, lines=lines)
        how |= dict(auto_batch_size=auto_batch_size, separator=separator, dtype=dtype)
        return rows.from_json(cls, path, **how)

    # stacking (stack.py, lazy.py)
    @classmethod
    def stack(cls, input: list[Any] | tuple[Any, ...], dim: int = 0, *, out: Any = None) -> Any:
        """Stack containers along a new batch dimension; see `raffia.stack`.

        >>> TensorDict.stack([TensorDict(a=1), TensorDict(a=2)])["a"]
        tensor([1, 2])
        """
        return torch.stack(input, dim, out=out)

    @classmethod
    def cat(cls, input: list[Any] | tuple[Any, ...], dim: int = 0, *, out: Any = None) -> Any:
        """Concatenate containers along a batch dimension; see `raffia.cat`.

        >>> TensorDict.cat([TensorDict(a=[1], batch_size=[1])] * 2)["a"]
        tensor([1, 1])
        """
        return torch.cat(input, dim, out=out)

    @classmethod
    def lazy_stack(
        cls, input: Sequence[Any], dim: int = 0, *, out: Any = None, **kwargs: Any
    ) -> Any:
        """Stack containers without copying; see `raffia.lazy_stack`.

        >>> TensorDict.lazy_stack([TensorDict(a=1), TensorDict(a=2)]).stack_dim
        0
        """
        from raffia.tensordict.lazy import lazy_stack

        return lazy_stack(input, dim, out=out, **kwargs)

    @classmethod
    def maybe_dense_stack(
        cls, input: Sequence[Any], dim: int = 0, *, out: Any = None, **kwargs: Any
    ) -> Any:
        """Stack densely where keys and shapes allow, else lazily; see `raffia.maybe_dense_stack`.

        >>> type(TensorDict.maybe_dense_stack([TensorDict(a=1), TensorDict(b=2)])).__name__
        'LazyStackedTensorDict'
        """
        from raffia.tensordict.stack import maybe_dense_stack

        return maybe_dense_stack(input, dim, out=out, **kwargs)

    # metadata
    @property
    def batch_size(self) -> torch.Size:
        """The leading dimensions that all entries share; assign to change it.

        Raises RuntimeError if an entry does not have the new leading dimensions.

        >>> td = TensorDict(a=torch.zeros(2, 3), batch_size=[2])
        >>> td.batch_size = [2, 3]
        >>> td.batch_size
        torch.Size([2, 3])
        """
        return self._batch_size

    @batch_size.setter
    def batch_size(self, value: Any) -> None:
        if value is None:
            raise TypeError(
                "the batch_size is an int or a sequence of ints, got None; "
                "[] stands for no batch dimensions"
            )
        self._set_batch_size(build.as_size(value))

    shape = batch_size

    def size(self, dim: int | None = None) -> Any:
        """The batch size, or its dimension `dim`.

        >>> TensorDict(batch_size=[2, 3]).size(1)
        3
        """
        return self._batch_size if dim is None else self._batch_size[dim]

    @property
    def batch_dims(self) -> int:
        """How many batch dimensions there are.

        >>> TensorDict(batch_size=[2, 3]).batch_dims
        2
        """
        return len(self._batch_size)

    ndim = batch_dims

    def dim(self) -> int:
        """How many batch dimensions there are.

        >>> TensorDict(batch_size=[2, 3]).dim()
        2
        """
        return len(self._batch_size)

    ndimension = dim

    def auto_batch_size_(
        self, batch_dims: int | None = None, keep_compliant_size: bool = False
    ) -> Any:
        """Set the batch size to the longest leading dimensions that all entries share.

        batch_dims: at most so many.
        keep_compliant_size: leave nested containers their batch size where it already fits.

        >>> TensorDict(a=torch.zeros(2, 3, 4), b=torch.zeros(2, 3)).auto_batch_size_().batch_size
        torch.Size([2, 3])
        """
        build.auto_batch_size(self, batch_dims, keep_compliant_size)
        return self

    @property
    def device(self) -> torch.device | None:
        """The device of all entries, or None where it is left open.

        >>> TensorDict(device="cpu").device
        device(type='cpu')
        """
        return self._device

    @device.setter
    def device(self, value: Any) -> None:
        raise RuntimeError(
            f"device cannot be assigned: td.to({str(value)!r}) gives the container on another "
            "device"
        )

    @property
    def sorted_keys(self) -> list[str]:
        """Names of the entries in alphabetical order.

        >>> TensorDict(b=1, a=2).sorted_keys
        ['a', 'b']
        """
        return sorted(self.keys())

    # basics
    def __getitem__(self, idx: Any) -> Any:
        """Read an entry by key, or rows by index."""
        return entries.getitem_key(self, idx) if is_key(idx) else index.getitem(self, idx)

    def __getitems__(self, rows: list[int]) -> Any:
        """The rows of a batch, read at once: a `torch.utils.data.DataLoader` asks for them so."""
        return self[rows]

    def __setitem__(self, idx: Any, value: Any) -> None:
        """Write an entry by key, or rows by index."""
        if is_key(idx):
            self.set(idx, value)
        else:
            index.setitem(self, idx, value)

    def __delitem__(self, key: NestedKey) -> None:
        self.del_(key)

    def __repr__(self) -> str:
        return build.show(self)

    def __hash__(self) -> int:
        raise TypeError(f"unhashable type: {type(self).__name__!r}")

    def __bool__(self) -> bool:
        raise RuntimeError(
            f"Converting a {type(self).__name__} to a boolean value is not permitted: it is "
            "ambiguous. Use td.is_empty(), len(td.keys()), or (td == other).all()."
        )

    def __copy__(self) -> Any:
        return self.copy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._spans is not None and convert.in_spans(self):
            return convert.reduce_consolidated(self)
        if self.__class__ is TensorDict and self._mapped_to is None:
            size, device, names = tuple(self._batch_size), self._device, self._names
            return _restored, (self._d, size, device, names, self._locked)
        return pickled.reduced(self) or super().__reduce_ex__(protocol)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for name in (
            "_cache",
            "_parents",
            "_kids",
            "_origin",
            "_buffer",
            "_spans",
            "_exits",
            "_home",
        ):
            state.pop(name, None)
        if self._mapped_to is not None:
            state["_mapped_to"] = str(self._mapped_to)  # a path is no data
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        locked, folder = state.pop("_locked", False), state.pop("_mapped_to", None)
        self.__dict__.update(state)
        if folder is not None and disk.all_mapped(state):
            disk.mark(self, folder)
        if locked:
            self.lock_()

    # primitives with a default over the others
    def _peek(self) -> Entries:
        return self._entries()

    def _peek_str(self, name: str) -> Any:
        return self._get_str(name)

    def _named_children(self) -> list[Any]:
        """The nodes below this one that bear its names of dimensions."""
        return self._children()

    def _get_lazy(self, name: str, **options: Any) -> Any:
        return self._get_str(name)

    def _stores(self) -> list[Entries]:
        """The dicts in which this node keeps its entries."""
        raise NotImplementedError

    def _set_batch_size(self, batch_size: torch.Size) -> None:
        raise NotImplementedError

    def _set_device(self, device: torch.device | None) -> None:
        raise NotImplementedError

    def _write(self, data: Any) -> None:
        raise TypeError(f"{type(self).__name__} holds entries, not a value")

    def _children(self) -> list[Any]:
        """The nodes right below this one."""
        return [value for value in self._entries().values() if isinstance(value, Node)]

    def _shallow(self) -> Any:
        """A new structure over the same tensors."""
        return self._map(_same)

    def _set_index(self, idx: Any, value: Any, ndim: int) -> Any:
        """Write into rows; a node to store in place of this one, if it can't hold the result."""
        return index.set_index(self, idx, value, ndim)

    def _replace_str(self, name: str, value: Any) -> None:
        """Store another node for the same entry, also when locked."""
        raise NotImplementedError

    def _pairs(self, other: Any) -> list[tuple[Any, Any]]:
        """This node and another in pairs whose entries can be matched: a lazy stack's members."""
        return [(self, other)]

    def _cast(self, dtype: torch.dtype) -> Any:
        """The same tree with every leaf cast."""
        return self._map(methodcaller("to", dtype))

    def _spread(self, tensor: Tensor, out: list[Tensor]) -> list[Tensor]:
        """Append, for each leaf, the tensor over the batch dimensions in a form that broadcasts."""
        for value in self._entries().values():
            if isinstance(value, Node):
                value._spread(tensor, out)
            else:
                out.append(index.expand_right(tensor, value))
        return out

    def _member_wise(self, others: tuple[Any, ...], default: Any) -> bool:
        """Whether `apply` runs on the members."""
        return False

    def _extra_lines(self) -> list[str]:
        return []

    def _last_lines(self) -> list[str]:
        return []

    @classmethod
    def _from_entries(cls, entries: Any, batch_size: Any, device: Any) -> Any:
        """A container of this class over entries, for the `from_...` methods."""
        td = TensorDict(entries, batch_size=batch_size, device=device)
        if cls is not TensorDict and issubclass(cls, TensorDict):
            td.__class__ = cls
        return td

    def _set_names(self, new: list[str | None] | None) -> None:
        self._names = new


class TensorDictBase(TensorCollection):
    """What `TensorDict`, `LazyStackedTensorDict` and `TensorDictParams` share, for `isinstance`.

    >>> isinstance(TensorDict(), TensorDictBase)
    True
    """


class TensorDict(TensorDictBase):
    """Named tensors, and nested containers, whose leading dimensions are the batch size.

    source: (nested) dict or other container; or give the entries as keywords.
    batch_size: leading dimensions shared by all entries; [] if not given.
    device: every entry is moved there.
    names: one for each batch dimension.
    lock: lock the new container.
    Raises RuntimeError if an entry does not have the leading dimensions `batch_size`.

    >>> reward = torch.ones(3)
    >>> td = TensorDict({"obs": torch.zeros(3, 4), "next": {"reward": reward}}, batch_size=[3])
    >>> td["next", "reward"].shape, td[0]["obs"].shape
    (torch.Size([3]), torch.Size([4]))
    >>> td
    TensorDict(
        fields={
            next: TensorDict(
                fields={
                    reward: Tensor(shape=torch.Size([3]), device=cpu, dtype=torch.float32,
                                   is_shared=False)},
                batch_size=torch.Size([3]),
                device=None,
                is_shared=False),
            obs: Tensor(shape=torch.Size([3, 4]), device=cpu, dtype=torch.float32,
                        is_shared=False)},
        batch_size=torch.Size([3]),
        device=None,
        is_shared=False)
    """

    _d: Entries
    _lasting = True

    def __init_subclass__(cls, **options: Any) -> None:
        """Results of a subclass's methods are of that class; `TensorDict` itself pays nothing."""
        super().__init_subclass__(**options)
        for name in ("_new", "_shallow"):
            if getattr(cls, name) is getattr(TensorDict, name):
                setattr(cls, name, _of_own_class(getattr(TensorDict, name)))
        from raffia.tensordict import pytrees

        pytrees.register_subclass(cls)

    def __init__(
        self,
        source: Any = None,
        batch_size: Any = None,
        device: Any = None,
        names: Sequence[str | None] | None = None,
        non_blocking: bool | None = None,
        lock: bool = False,
        **entries: Any,
    ) -> None:
        if source is None:
            source = entries
        elif entries:
            raise ValueError(
                "entries are given as a dict or as keywords, not both: "
                f"got {type(source).__name__} and {sorted(entries)}"
            )
        self._d = {}
        self._batch_size = (
            batch_size if batch_size.__class__ is torch.Size else build.as_size(batch_size)
        )
        self._device = None if device is None else build.as_device(device)
        if source.__class__ is dict:
            if source:
                self._fill(source)
        elif isinstance(source, (Node, Mapping)):
            self._fill(source._entries() if isinstance(source, Node) else source)
        else:
            raise ValueError(
                "a TensorDict is made from a dict or another container, got "
                f"{type(source).__name__}; TensorDict.from_any(obj) takes other structures"
            )
        if names is not None:
            self.names = names
        if lock:
            self.lock_()

    def _fill(self, source: Mapping[Any, Any]) -> None:
        """Store the entries of a dict in a container that is being made."""
        d, batch_size, device = self._d, self._batch_size, self._device
        ndim = len(batch_size)
        rows = batch_size[0] if ndim else 0
        for key, value in source.items():
            kind = value.__class__
            if key.__class__ is not str or key in d:
                self.set(key, value)
            elif kind is Tensor or kind is Parameter:
                if ndim:
                    try:
                        shape = value.shape
                    except RuntimeError:
                        shape = build.shape_of(value)
                    if not shape or shape[0] != rows or (ndim > 1 and shape[:ndim] != batch_size):
                        raise build.mismatch(batch_size, value, key)
                d[key] = value if device is None or value.device == device else value.to(device)
            elif kind is dict:
                child = _new_object(TensorDict)
                child._d, child._batch_size = {}, batch_size
                child._device = device
                child._fill(value)
                d[key] = child
            else:
                d[key] = self._accept(key, value, True)

    @staticmethod
    def _make(
        entries: Entries,
        batch_size: torch.Size,
        device: torch.device | None = None,
        names: list[str | None] | None = None,
    ) -> TensorDict:
        """A container over `entries`, unchecked."""
        td = _new_object(TensorDict)
        td._d = entries
        td._batch_size = batch_size
        td._device = device
        if names is not None:
            td._names = names
        return td

    # -- the contract of Node

    def _entries(self) -> Entries:
        return self._d

    def _get_str(self, name: str) -> Any:
        return self._d.get(name)

    _peek, _peek_str = _entries, _get_str

    def _set_str(self, name: str, value: Any) -> None:
        if self._locked:
            raise locked_error(self, name)
        kind = value.__class__
        if (kind is Tensor or kind is Parameter) and self._device is None:
            batch_size = self._batch_size
            if batch_size:
                n = len(batch_size)
                try:  # as `_unlike`, without the call
                    shape = value.shape
                except RuntimeError:
                    shape = build.shape_of(value)
                if not shape or shape[0] != batch_size[0] or n > 1 and shape[:n] != batch_size:
                    raise build.mismatch(batch_size, value, name)
            self._d[name] = value
        else:
            self._d[name] = self._accept(name, value)

    def _del_str(self, name: str) -> None:
        if self._locked:
            raise locked_error(self, name)
        del self._d[name]

    def _stores(self) -> list[Entries]:
        return [self._d]

    def _children(self) -> list[Any]:
        found = [v for v in self._d.values() if v.__class__ is not Tensor and isinstance(v, Node)]
        if found:  # of a tensorclass what it wraps
            return [v if v.__class__ is TensorDict else getattr(v, "_td", v) for v in found]
        return found

    def _shallow(self) -> TensorDict:
        entries = {
            k: v if v.__class__ is Tensor or not isinstance(v, Node) else v._shallow()
            for k, v in self._d.items()
        }
        td = _new_object(TensorDict)
        td._d = entries
        td._batch_size = self._batch_size
        td._device = self._device
        if self._names is not None:
            td._names = list(self._names)
        return td

    def _replace_str(self, name: str, value: Any) -> None:
        if self._names is not None and isinstance(value, Node):
            value = dim_names.adopt(value, self._names)
        old = self._d.get(name)
        if self._locked and old is not value and isinstance(old, Node) and old._home is not None:
            old._home.moved_to(value)
        self._d[name] = value
        if self._locked:
            lock.relink(self, old, value)

    def _new(
        self, entries: Entries, batch_size: torch.Size, names: list[str | None] | None = None
    ) -> TensorDict:
        td = _new_object(TensorDict)
        td._d = entries
        td._batch_size = batch_size
        td._device = self._device
        if names is not None:
            td._names = names
        return td

    def _map(self, fn: Any) -> TensorDict:
        entries = {
            k: fn(v) if v.__class__ is Tensor or not isinstance(v, Node) else v._map(fn)
            for k, v in self._d.items()
        }
        return self._new(entries, self._batch_size, self._names)

    def _batched(
        self, fn: Any, ndim: int, batch_size: torch.Size, names: Any = None, op: Any = ()
    ) -> TensorDict:
        entries = {
            k: fn(v)
            if v.__class__ is Tensor or not isinstance(v, Node)
            else v._batched(fn, ndim, batch_size, names, op)
            for k, v in self._d.items()
        }
        if names is not None or self._names is not None:
            names = child_names(self, ndim, batch_size, names)
        mine = self._batch_size
        return self._new(
            entries, batch_size if len(mine) == ndim else batch_size + mine[ndim:], names
        )

    def _index(self, idx: Any, ndim: int, batch_size: torch.Size | None) -> TensorDict:
        entries: Entries = {}
        nested = False
        for name, value in self._d.items():
            if value.__class__ is not Tensor and isinstance(value, Node):
                entries[name] = value
                nested = True
            else:
                row = entries[name] = value[idx]
                if batch_size is None:
                    batch_size = row.shape[: row.dim() - value.dim() + ndim]
        if batch_size is None:
            batch_size = index.indexed_size(self._batch_size[:ndim], idx)
        if nested:
            for name, value in entries.items():
                if isinstance(value, Node):
                    entries[name] = value._index(idx, ndim, batch_size)
        mine = self._batch_size
        if len(mine) == ndim:
            return self._new(entries, batch_size)
        return self._new(
            entries, batch_size + mine[ndim:], child_names(self, ndim, batch_size, None)
        )

    def _leaves(self, out: list[Tensor]) -> list[Tensor]:
        for value in self._d.values():
            if value.__class__ is Tensor or not isinstance(value, Node):
                out.append(value)
            else:
                value._leaves(out)
        return out

    def _rebuild(self, leaves: Iterator[Tensor]) -> TensorDict:
        entries = {
            k: next(leaves)
            if v.__class__ is Tensor or not isinstance(v, Node)
            else v._rebuild(leaves)
            for k, v in self._d.items()
        }
        return self._new(entries, self._batch_size, self._names)

    def _set_batch_size(self, batch_size: torch.Size) -> None:
        ndim = len(batch_size)
        for name, value in self._d.items():
            if build.shape_of(value)[:ndim] != batch_size and not (
                isinstance(value, Node)
                and (isinstance(value, Tensor) or len(value._batch_size) < ndim)
            ):
                raise RuntimeError(
                    f"entry {name!r} has shape {value.shape}, "
                    f"which is incompatible with the batch-size {batch_size}; "
                    f"the batch_size stays {self._batch_size}"
                )
        grown = [
            v
            for v in self._d.values()
            if isinstance(v, Node)
            and (v._batch_size[:ndim] != batch_size or isinstance(v, UnbatchedTensor))
        ]
        before = [v._batch_size for v in grown]
        try:
            for value in grown:
                value._set_batch_size(batch_size)
        except RuntimeError:
            for value, size in zip(grown, before, strict=True):
                value._set_batch_size(size)
            raise
        if self._names is not None:
            self._names = (self._names + [None] * ndim)[:ndim]
        self._batch_size = batch_size

    def _set_device(self, device: torch.device | None) -> None:
        self._device = device
        for value in self._d.values():
            if value.__class__ is not Tensor and isinstance(value, Node):
                value._set_device(device)

    def _accept(self, name: str, value: Any, fresh: bool = False) -> Any:
        """What is stored for `value`: a tensor or node with our leading dimensions and device.

        fresh: this container is in the making, so that no other one holds it.
        """
        if not isinstance(value, (Tensor, Node)):
            value = build.as_entry(value, self, name)
        batch_size = self._batch_size
        ndim = len(batch_size)
        if isinstance(value, UnbatchedTensor):  # has no batch dimensions
            device = self._device
            kept = value if device is None or value.device == device else value.to(device)
            return kept._like(batch_size)  # type: ignore[attr-defined]
        if ndim and build.shape_of(value)[:ndim] != batch_size:
            if not isinstance(value, Node):
                raise build.mismatch(batch_size, value, name)
            value = build.promoted(value, batch_size, name)
        if not fresh and isinstance(value, Node) and build.holds(value, self):
            raise ValueError(
                f"a container can't hold itself: the value for key {name!r} is this container "
                "or has it nested in it"
            )
        device = self._device
        if device is not None and value.device != device:
            value = value.to(device)
        if self._names is not None and isinstance(value, Node):
            value = dim_names.adopt(value, self._names)
        return value

    # -- own ways, because they are hot

    def __getitem__(self, idx: Any) -> Any:
        """Read an entry by key, or rows by index."""
        if idx.__class__ is str:
            try:
                value = self._d[idx]
            except KeyError:
                raise missing(idx, self) from None
            if value.__class__ is Tensor or not isinstance(value, Node):
                return value
            return value._unwrapped()
        if idx.__class__ is tuple and idx:
            try:  # as a nested key: no part of an index into the rows is the name of an entry
                value = self
                for name in idx:
                    value = value._d[name]
            except (KeyError, AttributeError, TypeError):
                if is_key(idx):
                    return entries.getitem_key(self, idx)
            else:
                return value._unwrapped() if isinstance(value, Node) else value
        return index.getitem(self, idx)

    def __setitem__(self, idx: Any, value: Any) -> None:
        """Write an entry by key, or rows by index."""
        if idx.__class__ is str:
            if not self._locked and value.__class__ is Tensor and self._device is None:
                batch_size = self._batch_size
                if batch_size and _unlike(value, batch_size):
                    raise build.mismatch(batch_size, value, idx)
                self._d[idx] = value
            else:
                self._set_str(idx, value)
        elif idx.__class__ is tuple and idx and idx[0].__class__ is str:
            try:  # the levels are there
                node: Any = self
                for name in idx[:-1]:
                    node = node._d[name]
                put = node.set
            except (KeyError, AttributeError, TypeError):
                self.set(idx, value)
            else:
                put(idx[-1], value)
        elif is_key(idx):
            self.set(idx, value)
        else:
            index.setitem(self, idx, value)

    @_documented_as(entries.get)
    def get(self, key: NestedKey, default: Any = UNSET, **lazy_options: Any) -> Any:
        if key.__class__ is str and not lazy_options:
            value = self._d.get(key)
            if value is None and (default is not UNSET or modes.get_raises):
                return entries.get(self, key, default)
            return value
        if key.__class__ is tuple and key and not lazy_options:
            try:
                found: Any = self
                for name in key:
                    found = found._d[name]
                return found
            except (KeyError, AttributeError, TypeError):
                pass
        return entries.get(self, key, default, **lazy_options)

    @_documented_as(entries.set)
    def set(
        self, key: NestedKey, item: Any, inplace: bool = False, *, non_blocking: bool = False
    ) -> TensorDict:
        if inplace:
            if key.__class__ is str and item.__class__ is Tensor:
                dest = self._d.get(key)
                if dest.__class__ is Tensor:
                    entries.write(dest, item, key, non_blocking)
                    return self
            return entries.set(self, key, item, True, non_blocking=non_blocking)
        if key.__class__ is str:
            if not self._locked and item.__class__ is Tensor and self._device is None:
                batch_size = self._batch_size
                if batch_size and _unlike(item, batch_size):
                    raise build.mismatch(batch_size, item, key)
                self._d[key] = item
            else:
                self._set_str(key, item)
            return self
        if key.__class__ is tuple and key:
            try:  # the levels are there
                node: Any = self
                for name in key[:-1]:
                    node = node._d[name]
                _, last = node._d, key[-1]
            except (KeyError, AttributeError, TypeError):
                return entries.set(self, key, item)
            if last.__class__ is str:
                node._set_str(last, item)
                return self
        return entries.set(self, key, item)

    @_documented_as(entries.set_)
    def set_(self, key: NestedKey, item: Any, *, non_blocking: bool = False) -> TensorDict:
        if item.__class__ is Tensor:
            dest: Any = None
            if key.__class__ is str:
                dest = self._d.get(key)
            elif key.__class__ is tuple and key:
                try:
                    dest = self
                    for name in key:
                        dest = dest._d[name]
                except (KeyError, AttributeError, TypeError):
                    dest = None
            if dest.__class__ is Tensor:
                entries.write(dest, item, key, non_blocking)
                return self
        return entries.set_(self, key, item, non_blocking=non_blocking)

    def _cast(self, dtype: torch.dtype) -> TensorDict:
        cast = _CASTS.get(dtype)
        made = {
            k: (v if v.dtype is dtype else v.to(dtype) if cast is None else cast(v))
            if v.__class__ is Tensor or not isinstance(v, Node)
            else v._cast(dtype)
            for k, v in self._d.items()
        }
        return self._new(made, self._batch_size, self._names)

    @_documented_as(convert.empty)
    def empty(self, recurse: bool = False, **options: Any) -> TensorDict:
        if recurse or options:
            return convert.empty(self, recurse, **options)
        names = self._names
        return self._new({}, self._batch_size, None if names is None else list(names))

    @_documented_as(entries.contains)
    def __contains__(self, key: NestedKey) -> bool:
        if key.__class__ is str:
            return key in self._d
        if key.__class__ is tuple and key:
            try:
                found: Any = self
                for name in key:
                    found = found._d[name]
                return True
            except (KeyError, AttributeError, TypeError):
                pass
        return entries.contains(self, key)

    @_documented_as(entries.del_)
    def del_(self, key: NestedKey) -> TensorDict:
        if not self._locked:
            node, name = entries.place(self, key)
            if node is not None and name in node._d:
                del node._d[name]
                return self
        return entries.del_(self, key)

    @_documented_as(entries.pop)
    def pop(self, key: NestedKey, default: Any = entries.NO_DEFAULT) -> Any:
        if not self._locked:
            node, name = entries.place(self, key)
            if node is not None and name in node._d:
                return node._d.pop(name)
        return entries.pop(self, key, default)

    @_documented_as(entries.popitem)
    def popitem(self) -> tuple[str, Any]:
        return entries.popitem(self) if self._locked or not self._d else self._d.popitem()

    @_documented_as(disk.is_memmap)
    def is_memmap(self) -> bool:
        return self._mapped_to is not None

    @property
    @_documented_as(disk.saved_path)
    def saved_path(self) -> Path:
        return self._mapped_to or disk.saved_path(self)

    @_documented_as(entries.is_empty)
    def is_empty(self) -> bool:
        for value in self._d.values():
            if value.__class__ is Tensor or not isinstance(value, Node):
                return False
            if value._is_data() or not value.is_empty():
                return False
        return True

    @_documented_as(entries.update_)
    def update_(
        self,
        input_dict_or_td: Any = None,
        clone: bool = False,
        *,
        non_blocking: bool = False,
        **options: Any,
    ) -> TensorDict:
        source = input_dict_or_td
        if not options and (source.__class__ is TensorDict or source.__class__ is dict):
            into: list[Tensor] = []
            values: list[Tensor] = []
            if entries.writes(self, source, into, values):
                if entries.copied(into, values, non_blocking):
                    return self
        return entries.update_(self, source, clone, non_blocking=non_blocking, **options)

    @_documented_as(entries.keys)
    def keys(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: Any = None,
        *,
        sort: bool = False,
    ) -> Any:
        if not (include_nested or leaves_only or sort):
            return self._d.keys()
        return KeysView(self, (include_nested, leaves_only, is_leaf, sort), 0)

    @_documented_as(entries.values)
    def values(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: Any = None,
        *,
        sort: bool = False,
    ) -> Any:
        if not (include_nested or leaves_only or sort):
            return self._d.values()
        return NestedView(self, (include_nested, leaves_only, is_leaf, sort), 1)

    @_documented_as(entries.items)
    def items(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: Any = None,
        *,
        sort: bool = False,
    ) -> Any:
        if not (include_nested or leaves_only or sort):
            return self._d.items()
        return NestedView(self, (include_nested, leaves_only, is_leaf, sort), None)

    @_documented_as(entries.update)
    def update(
        self,
        input_dict_or_td: Any = None,
        clone: bool = False,
        inplace: bool = False,
        **options: Any,
    ) -> TensorDict:
        source = input_dict_or_td
        kind = source.__class__
        plain = (kind is TensorDict or kind is dict) and not (clone or inplace or options)
        if plain and self._fits(source):
            self._take(source)
            return self
        return entries.update(self, source, clone, inplace, **options)

    def _fits(self, source: Any) -> bool:
        """Whether the entries of a `TensorDict` or dict can be stored without further checks."""
        if self._locked or self._names is not None:
            return False
        batch_size, device, d = self._batch_size, self._device, self._d
        checked = source.__class__ is not dict  # its tensors have its batch size and device
        if checked:
            if source._batch_size != batch_size or source is self:
                return False
            if device is not None and source._device != device:
                return False
            source = source._d
        for name, value in source.items():
            kind = value.__class__
            if kind is Tensor or not checked and kind is Parameter:
                if checked:
                    continue
                if name.__class__ is not str or batch_size and _unlike(value, batch_size):
                    return False
                if device is not None and value.device != device:
                    return False
            elif kind is TensorDict or kind is dict:
                if not checked and name.__class__ is not str:
                    return False
                mine = d.get(name)
                if mine.__class__ is TensorDict:
                    if not TensorDict._fits(mine, value):
                        return False
                elif not checked or isinstance(mine, Node) or build.holds(value, self):
                    return False
            elif isinstance(value, Node) or not checked:
                return False
        return True

    def _take(self, source: Any) -> None:
        """Store the entries of what fits; nested ones are merged."""
        mine = self._d
        for name, value in (source if source.__class__ is dict else source._d).items():
            if value.__class__ is TensorDict or value.__class__ is dict:
                below = mine.get(name)
                if below.__class__ is TensorDict:
                    below._take(value)
                    continue
            mine[name] = value

    @_documented_as(entries.rename_key_)
    def rename_key_(self, old_key: NestedKey, new_key: NestedKey, safe: bool = False) -> TensorDict:
        if not self._locked:
            node, name = entries.place(self, old_key)
            into, new = entries.place(self, new_key)
            if node is not None and node is into and name in node._d:
                d = node._d
                if not (safe and new in d):
                    if name != new:
                        d[new] = d.pop(name)
                    return self
        return entries.rename_key_(self, old_key, new_key, safe)


TensorCollection._plain = TensorDict
MutableMapping.register(TensorDictBase)  # a base class would cost each `isinstance` of a node
_NO_DIMS = torch.Size()


def _restored(
    entries: Entries, size: tuple[int, ...], device: Any, names: Any, locked: bool
) -> TensorDict:
    """A container from what it was pickled as."""
    td = TensorDict._make(entries, torch.Size(size), device, names)
    return td.lock_() if locked else td


torch.serialization.add_safe_globals([_restored])


def _of_own_class(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(self: Any, *args: Any, **kwargs: Any) -> Any:
        td = make(self, *args, **kwargs)
        td.__class__ = self.__class__
        return td

    return made


def _same(leaf: Tensor) -> Tensor:
    return leaf
