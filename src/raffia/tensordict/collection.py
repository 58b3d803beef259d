"""The methods of every container: a table of contents, which names the file of each method."""

from __future__ import annotations

import builtins
from collections.abc import Iterable, MutableMapping, Sequence
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Self, overload

import torch
from torch import Tensor

from raffia.tensordict import (
    build,
    collectives,
    consolidated,
    convert,
    copies,
    dim_names,
    disk,
    entries,
    folder_writer,
    forms,
    gradients,
    index,
    json_rows,
    kinds,
    lock,
    messages,
    modules,
    pickled,
    pieces,
    printing,
    selection,
    shape,
    state_dicts,
    tree,
    updates,
    views,
)
from raffia.tensordict.construct import Construction
from raffia.tensordict.keys import NestedKey, is_key
from raffia.tensordict.node import BatchSize, Container, Entries, Names, Node
from raffia.tensordict.pointwise import Pointwise
from raffia.tensordict.reductions import Reductions
from raffia.tensordict.signatures import assigned, attribute, class_method

if TYPE_CHECKING:
    from raffia.tensordict.signatures import Assigned

# attributes that tie a container to others, which a copy is not tied to
_NOT_COPIED = {"_cache", "_parents", "_kids", "_origin", "_buffer", "_exits"}
_NOT_COPIED |= {"_home", "_held", "_mark"}


class TensorCollection(Construction, Pointwise, Reductions, Node):
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
    _plain: Any = None  # the class TensorDict
    _exits: list[Any] | None = None  # of `with` blocks that are entered, what they undo
    _lasting = False  # whether an entry is the same object at each read, so that listings can last
    _holds_data = False  # True for classes that stand for a non-tensor value

    # entries (entries.py)
    keys = views.keys
    values = views.values
    items = views.items
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
    update = updates.update
    update_ = updates.update_
    update_at_ = updates.update_at_
    select = selection.select
    exclude = selection.exclude
    split_keys = selection.split_keys
    separates = selection.separates
    flatten_keys = selection.flatten_keys
    unflatten_keys = selection.unflatten_keys
    replace = selection.replace
    is_empty = entries.is_empty
    clear = entries.clear
    create_nested = entries.create_nested
    fill_ = entries.fill_
    to_dict = entries.to_dict
    get_item_shape = entries.get_item_shape
    entry_class = entries.entry_class
    depth = attribute(entries.depth)
    cat_tensors = entries.cat_tensors
    stack_tensors = entries.stack_tensors
    is_non_tensor = entries.is_non_tensor
    get_non_tensor = entries.get_non_tensor
    set_non_tensor = entries.set_non_tensor
    non_tensor_items = entries.non_tensor_items
    filter_non_tensor_data = selection.filter_non_tensor_data
    filter_empty_ = selection.filter_empty_
    __contains__ = entries.contains

    # rows (index.py)
    __iter__ = index.iterate
    __len__ = index.length
    where = index.where
    _where = index.chosen
    masked_fill = index.masked_fill
    masked_fill_ = index.masked_fill_
    masked_select = index.masked_select
    gather = index.gather
    copy_at_ = index.copy_at_
    _get_sub_tensordict = index.sub_tensordict

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
    split = pieces.split
    tensor_split = pieces.tensor_split
    chunk = pieces.chunk
    unbind = pieces.unbind
    _cut = pieces.cut
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
    if TYPE_CHECKING:  # made from the table of convert.py

        def float(self, *, cast_filter: convert.CastFilter | None = None) -> Self: ...

        float16 = float32 = float64 = half = double = bfloat16 = float
        complex32 = complex64 = complex128 = int = int8 = int16 = int32 = int64 = float
        uint8 = uint16 = uint32 = uint64 = bool = float
    clone = copies.clone
    copy = copies.copy
    contiguous = copies.contiguous
    is_contiguous = copies.is_contiguous
    detach = gradients.detach
    detach_ = gradients.detach_
    if TYPE_CHECKING:
        data: gradients.Data
        grad: gradients.Grad
    else:
        data = property(gradients.data, gradients.set_data)
        grad = property(gradients.grad)
    requires_grad = attribute(gradients.requires_grad)
    requires_grad_ = gradients.requires_grad_
    zero_grad = gradients.zero_grad
    backward = gradients.backward
    zero_ = convert.zero_
    copy_ = convert.copy_
    pin_memory = convert.pin_memory
    pin_memory_ = convert.pin_memory_
    share_memory_ = convert.share_memory_
    is_shared = convert.is_shared
    record_stream = convert.record_stream
    consolidate = consolidated.consolidate
    is_consolidated = consolidated.is_consolidated
    from_consolidated = class_method(consolidated.from_consolidated)
    data_ptr = convert.data_ptr
    numel = convert.numel
    bytes = convert.bytes_
    param_count = convert.param_count
    dtype = attribute(convert.dtype)
    is_floating_point = convert.is_floating_point
    is_cuda = attribute(convert.is_cuda)
    is_cpu = attribute(convert.is_cpu)
    is_meta = attribute(convert.is_meta)
    clear_device_ = convert.clear_device_
    auto_device_ = convert.auto_device_
    empty = copies.empty
    to_tensordict = copies.to_tensordict
    to_lazystack = copies.to_lazystack
    densify = copies.densify
    to_padded_tensor = copies.to_padded_tensor
    to_namedtuple = forms.to_namedtuple
    to_struct_array = forms.to_struct_array
    as_tensor = forms.as_tensor
    numpy = forms.numpy
    tolist = forms.tolist
    state_dict = state_dicts.state_dict
    load_state_dict = state_dicts.load_state_dict
    stack_from_tensordict = forms.stack_from_tensordict
    cat_from_tensordict = forms.cat_from_tensordict
    __deepcopy__ = copies.deepcopy

    # lock (lock.py)
    is_locked = assigned(lock.is_locked, lock.set_locked)
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
    from_remote_init = class_method(collectives.from_remote_init)
    broadcast = collectives.broadcast
    all_reduce = collectives.all_reduce
    reduce = collectives.reduce
    all_gather = collectives.all_gather
    gather_and_stack = collectives.gather_and_stack
    scatter = collectives.scatter

    # names of dimensions (dim_names.py)
    names: Assigned[list[str | None], Sequence[str | None] | None] = assigned(
        dim_names.get_names, dim_names.set_names
    )
    refine_names = dim_names.refine_names
    rename = dim_names.rename
    rename_ = dim_names.rename_

    # modules (modules.py)
    if TYPE_CHECKING:
        from_module: modules.FromModule
        from_modules: modules.FromModules
    else:
        from_module = classmethod(modules.from_module)
        from_modules = classmethod(modules.from_modules)
    to_module = modules.to_module

    # disk (disk.py)
    memmap = disk.memmap
    memmap_ = disk.memmap_
    memmap_like = disk.memmap_like
    memmap_refresh_ = disk.memmap_refresh_
    load_memmap = class_method(disk.load_memmap)
    load_memmap_ = disk.load_memmap_
    is_memmap = disk.is_memmap
    make_memmap = disk.make_memmap
    make_memmap_from_tensor = disk.make_memmap_from_tensor
    make_memmap_from_storage = disk.make_memmap_from_storage
    saved_path = attribute(disk.saved_path)
    save = disk.save
    dumps = disk.save
    load = class_method(disk.load)
    load_ = disk.load_

    # rows as JSON (json_rows.py)
    to_json = json_rows.to_json
    from_json = class_method(json_rows.from_json)

    # stacking (stack.py, lazy.py)
    @classmethod
    def stack(
        cls, input: Sequence[Container], dim: int = 0, *, out: Container | None = None
    ) -> Container:
        """Stack containers along a new batch dimension; see `raffia.stack`.

        >>> TensorDict.stack([TensorDict(a=1), TensorDict(a=2)])["a"]
        tensor([1, 2])
        """
        stacked: Any = torch.stack(input, dim, out=out)  # type: ignore[arg-type]
        return stacked

    @classmethod
    def cat(
        cls, input: Sequence[Container], dim: int = 0, *, out: Container | None = None
    ) -> Container:
        """Concatenate containers along a batch dimension; see `raffia.cat`.

        >>> TensorDict.cat([TensorDict(a=[1], batch_size=[1])] * 2)["a"]
        tensor([1, 1])
        """
        joined: Any = torch.cat(input, dim, out=out)  # type: ignore[arg-type]
        return joined

    @classmethod
    def lazy_stack(
        cls, input: Sequence[Any], dim: int = 0, *, out: Any = None, **kwargs: Any
    ) -> Any:
        """Stack containers without copying; see `raffia.lazy_stack`.

        >>> TensorDict.lazy_stack([TensorDict(a=1), TensorDict(a=2)]).stack_dim
        0
        """
        return kinds.lazy_stack(input, dim, out=out, **kwargs)

    @classmethod
    def maybe_dense_stack(
        cls, input: Sequence[Any], dim: int = 0, *, out: Any = None, **kwargs: Any
    ) -> Any:
        """Stack densely where keys and shapes allow, else lazily; see `raffia.maybe_dense_stack`.

        >>> type(TensorDict.maybe_dense_stack([TensorDict(a=1), TensorDict(b=2)])).__name__
        'LazyStackedTensorDict'
        """
        return kinds.maybe_dense_stack(input, dim, out=out, **kwargs)

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
    def batch_size(self, value: BatchSize) -> None:
        if value is None:
            raise TypeError(
                "the batch_size must be an int or a sequence of ints, got None; [] stands for no "
                "batch dimensions"
            )
        self._set_batch_size(build.as_size(value))

    shape = batch_size

    @overload
    def size(self, dim: None = None) -> torch.Size: ...
    @overload
    def size(self, dim: builtins.int) -> builtins.int: ...

    def size(self, dim: builtins.int | None = None) -> torch.Size | builtins.int:
        """The batch size, or its dimension `dim`.

        >>> TensorDict(batch_size=[2, 3]).size(1)
        3
        """
        return self._batch_size if dim is None else self._batch_size[dim]

    @property
    def batch_dims(self) -> int:
        """The number of batch dimensions.

        >>> TensorDict(batch_size=[2, 3]).batch_dims
        2
        """
        return len(self._batch_size)

    ndim = batch_dims

    def dim(self) -> int:
        """The number of batch dimensions.

        >>> TensorDict(batch_size=[2, 3]).dim()
        2
        """
        return len(self._batch_size)

    ndimension = dim

    def auto_batch_size_(
        self, batch_dims: int | None = None, keep_compliant_size: bool = False
    ) -> Self:
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
        """The device of all entries, or None if it is unspecified.

        >>> TensorDict(device="cpu").device
        device(type='cpu')
        """
        return self._device

    @device.setter
    def device(self, value: Any) -> None:
        raise RuntimeError(
            f"device cannot be assigned: td.to({str(value)!r}) returns the container on another "
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
    @overload
    def __getitem__(self, idx: str | tuple[str, ...]) -> Any: ...
    @overload
    def __getitem__(self, idx: Any) -> Self: ...

    def __getitem__(self, idx: Any) -> Any:
        """Read an entry by key, or rows by index."""
        return entries.getitem_key(self, idx) if is_key(idx) else index.getitem(self, idx)

    def __getitems__(self, rows: list[int]) -> Self:
        """The rows of a batch, read in one call: used by `torch.utils.data.DataLoader`."""
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
        return printing.show(self)

    def _ipython_key_completions_(self) -> list[NestedKey]:
        """What Jupyter and IPython offer after `td["`."""
        return list(self.keys(True))

    def __hash__(self) -> int:
        raise TypeError(f"unhashable type: {type(self).__name__!r}")

    def __bool__(self) -> bool:
        raise RuntimeError(
            f"Converting a {type(self).__name__} to a boolean value is not permitted: it is "
            "ambiguous. Use td.is_empty(), len(td.keys()), or (td == other).all()."
        )

    def __copy__(self) -> Self:
        return self.copy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        block = consolidated.reduce_consolidated(self)
        return block or pickled.reduced(self) or super().__reduce_ex__(protocol)

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in _NOT_COPIED}
        if "_mapped_to" in state:
            state["_mapped_to"] = str(state["_mapped_to"])  # a path is no data
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        locked, folder = state.pop("_locked", False), state.pop("_mapped_to", None)
        self.__dict__.update(state)
        if folder is not None and disk.all_mapped(state):
            folder_writer.mark(self, folder)
        if locked:
            self.lock_()

    # primitives with a default over the others
    def _peek(self) -> Entries:
        return self._entries()

    def _peek_str(self, name: str) -> Any:
        return self._get_str(name)

    def _entry_names(self) -> Iterable[str]:
        return self._peek()

    def _named_children(self) -> list[Any]:
        """The nodes below this one that bear its names of dimensions."""
        return self._children()

    def _get_lazy(self, name: str, **options: Any) -> Any:
        return self._get_str(name)

    def _write(self, data: Any) -> None:
        raise TypeError(f"{type(self).__name__} holds entries, not a value")

    def _children(self) -> list[Any]:
        """The nodes right below this one."""
        return [value for value in self._entries().values() if isinstance(value, Node)]

    def _shallow(self) -> Any:
        """A new structure over the same tensors."""
        return self._map(_same)

    def _set_index(self, idx: Any, value: Any, ndim: int) -> Any:
        """Write into rows; a node to store instead of this one, if it can't hold the result."""
        return index.set_index(self, idx, value, ndim)

    def _pairs(self, other: Any) -> list[tuple[Any, Any]]:
        """Pairs of this node and another with matching entries; a lazy stack pairs its members."""
        return [(self, other)]

    def _cast(self, dtype: torch.dtype) -> Any:
        """Cast every leaf of the tree."""
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
        return kinds.TensorDict(entries, batch_size=batch_size, device=device)

    def _set_names(self, new: Names) -> None:
        self._names = new

    def _emptied(self, recurse: bool, batch_size: torch.Size | None) -> Any:
        """A container without tensors; recurse: with the nested containers, empty too."""
        entries = {}
        for name, value in self._peek().items() if recurse else ():
            if isinstance(value, Node) and not value._is_data():
                entries[name] = value.empty(recurse=True)
        return self._new(entries, self._batch_size if batch_size is None else batch_size)


for _name in convert.CASTS:
    setattr(TensorCollection, _name, convert.caster(_name))


class TensorDictBase(TensorCollection):
    """The base of `TensorDict`, `LazyStackedTensorDict` and `TensorDictParams`, for `isinstance`.

    >>> isinstance(TensorDict(), TensorDictBase)
    True
    """


MutableMapping.register(TensorDictBase)  # a base class would cost each `isinstance` of a node


def _same(leaf: Tensor) -> Tensor:
    return leaf
