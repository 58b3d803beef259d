"""Containers on disk: what users call to map, save and load them; never a pickle.

A container is a folder of memory-mapped files (folder_writer.py, folder_reader.py) or one
safetensors file (safetensors_file.py); both hold the record of record.py.
"""

from __future__ import annotations

import os
import pathlib
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, Literal, Required, TypedDict, Unpack, overload

import torch
from torch import Tensor

from raffia.files import locked
from raffia.hints import check_choice
from raffia.tensordict import kinds, ragged
from raffia.tensordict.build import as_device, mismatch, shape_of
from raffia.tensordict.folder_reader import FolderReader
from raffia.tensordict.folder_writer import Job, file_name, forget, is_link, linked, mark, namer
from raffia.tensordict.future import TensorDictFuture
from raffia.tensordict.keys import NestedKey, through_leaf, unravel_key_to_tuple
from raffia.tensordict.lock import _lock, locked_error
from raffia.tensordict.memmap import (
    MODES,
    DamagedFileError,
    MemoryMappedTensor,
    Path,
    allocate,
)
from raffia.tensordict.node import Container, Device, Node
from raffia.tensordict.record import CPU, RESERVED, VALUE_CLASSES, Record, read_record, write_record
from raffia.tensordict.safetensors_file import FileReader, save_file
from raffia.tensordict.signatures import shows_options_of, with_signature_of
from raffia.tensordict.stored_values import Home


class SaveOptions(TypedDict, total=False):
    """Options of `save`, for type checkers."""

    num_threads: int
    share_non_tensor: bool
    robust_key: bool | None


class MapOptions(SaveOptions, total=False):
    """Options of `memmap`, `memmap_` and `memmap_like`, for type checkers."""

    existsok: bool


class AtOnceOptions(MapOptions, total=False):
    """Options with which the container itself is returned."""

    return_early: Literal[False]


class EarlyOptions(MapOptions, total=False):
    """Options with which a future of the container is returned."""

    return_early: Required[Literal[True]]


def write_mapped(
    td: Any,
    prefix: Path | None,
    copy_existing: bool,
    *,
    num_threads: int = 0,
    return_early: bool = False,
    share_non_tensor: bool = False,
    existsok: bool = True,
    robust_key: bool | None = True,
    **kind: bool,
) -> Any:
    """Implement `memmap` and its variants; `kind` is `inplace` or `like` of a `Job`."""
    job = Job(td, prefix, copy_existing, existsok, robust_key, share_non_tensor, **kind)
    if num_threads <= 1:
        job.write(None)
        return job.finish()

    def write() -> None:
        with ThreadPoolExecutor(num_threads) as threads:
            job.write(threads)

    if not return_early:
        write()
        return job.finish()
    return TensorDictFuture(write, lambda _: job.finish())


@overload
def memmap(
    data: Container,
    prefix: Path | None = None,
    copy_existing: bool = False,
    **options: Unpack[EarlyOptions],
) -> TensorDictFuture[Container]: ...
@overload
def memmap(
    data: Container,
    prefix: Path | None = None,
    copy_existing: bool = False,
    **options: Unpack[AtOnceOptions],
) -> Container: ...
@shows_options_of(write_mapped)
def memmap(
    data: Container, prefix: Path | None = None, copy_existing: bool = False, **options: Any
) -> Container | TensorDictFuture[Container]:
    """A locked copy whose tensors are memory-mapped files: what is written into them is on disk.

    prefix: the folder; None is the folder of a container that has one, else temporary files, which
        go with the tensors: one for each above 1 MiB, and one for all others.
    copy_existing: copy tensors that are mapped from files elsewhere, which is refused otherwise.
    num_threads: how many threads write; return_early: with more than one, return a future at once,
        whose `result()` is the container.
    share_non_tensor: share the values that are not tensors, too: what one process writes into them,
        as with `set_`, others read that got the container, or load the folder, and nobody's change
        is lost. Without it they read the values as they were when they got the container.
    existsok: write over files that are there. A file of the same length is overwritten, which
        other maps of it see; one of another length is replaced.
    robust_key: False uses keys as file names as they are, or raises ValueError.

    The folder holds `meta.json` (class, batch size, names, non-tensor values, and dtype, shape and
    file of each tensor), a file `<key>.memmap` for each tensor (its bytes, row by row) and a folder
    `<key>` of the same kind for each container; a lazy stack has one for each member. A nested
    tensor has its values in `<key>.memmap`, next to `<key>.sizes.memmap` (strided layout) or
    `<key>.offsets.memmap` and perhaps `<key>.lengths.memmap` (jagged). In the names
    of files, what is not a letter, a digit or one of `_-+=.,@~()[]{}#!$&^` becomes %XX, and so does
    a dot in front; a name that is too long is cut and gets a hash, one that differs from another by
    upper and lower case only gets a number. The keys themselves stand in `meta.json`, which is
    written last: a folder without it, from a save that was interrupted, is not loaded. When data
    goes to disk is left to the system; `td.save("name.safetensors")` waits for that, and adds a
    checksum.

    Raises TypeError, before anything is written, for a value that JSON can't hold.

    >>> import os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     td = TensorDict(a=torch.zeros(3), n=dict(text="hi")).memmap(folder)
    ...     td["a"].fill_(1)
    ...     TensorDict.load_memmap(folder)["a"], sorted(os.listdir(folder))
    MemoryMappedTensor([1., 1., 1.])
    (MemoryMappedTensor([1., 1., 1.]), ['a.memmap', 'meta.json', 'n'])
    """
    prefix = own_folder(data) if prefix is None else prefix
    return write_mapped(data, prefix, copy_existing, **options)


@with_signature_of(memmap)
def memmap_(
    td: Container, prefix: Path | None = None, copy_existing: bool = False, **options: Any
) -> Container | TensorDictFuture[Container]:
    """Replace the tensors of this container by memory-mapped ones, lock it and return it.

    The arguments are those of `memmap`; with `return_early`, `result()` replaces the tensors.
    The device becomes the CPU. Raises RuntimeError for a container in shared memory.

    >>> td = TensorDict(a=torch.zeros(3)).memmap_()
    >>> td["a"], td.is_memmap(), td.is_locked
    (MemoryMappedTensor([0., 0., 0.]), True, True)
    """
    mapped_already = [isinstance(leaf, MemoryMappedTensor) for leaf in td._leaves([])]
    if td._locked and not all(mapped_already) and td.is_shared():
        raise RuntimeError(
            "memory-mapped files and shared memory are mutually exclusive, and this container is "
            "in shared memory: td.memmap(...) makes a copy"
        )
    prefix = own_folder(td) if prefix is None else prefix
    return write_mapped(td, prefix, copy_existing, inplace=True, **options)


@with_signature_of(memmap)
def memmap_like(
    td: Container, prefix: Path | None = None, copy_existing: bool = False, **options: Any
) -> Container | TensorDictFuture[Container]:
    """A locked container of the same keys, shapes and dtypes over new files, which hold zeros.

    No tensor is read or copied, so an expanded row reserves the files of a large buffer cheaply.
    A file that is there is opened as it is, if it has the right length (else RuntimeError): so a
    buffer is opened again; existsok=False refuses that. The other arguments are those of `memmap`;
    copy_existing changes nothing here. Non-tensor values are copied.

    >>> row = TensorDict(obs=torch.ones(4), reward=torch.ones(()))
    >>> buffer = row.expand(1000).memmap_like()
    >>> buffer[2] = row
    >>> buffer["obs"].shape, buffer["reward"].sum()
    (torch.Size([1000, 4]), tensor(1.))
    """
    return write_mapped(td, prefix, copy_existing, like=True, **options)


def is_memmap(td: Any) -> bool:
    """Whether this is a locked result of `memmap`, `memmap_` or `memmap_like`, or rows of one.

    >>> td = TensorDict(a=torch.zeros(3), batch_size=[3])
    >>> td.is_memmap(), td.memmap().is_memmap(), td.memmap().unlock_().is_memmap()
    (False, True, False)
    >>> td.memmap()[0].is_memmap(), td.memmap()[0].is_locked
    (True, True)
    """
    return td._mapped_to is not None


def all_mapped(attributes: dict[str, Any]) -> bool:
    """Whether the tensors of a container that was pickled are mapped: they may be plain ones."""
    for leaf in attributes.get("_d", {}).values():
        if leaf.__class__ is not MemoryMappedTensor:
            if not isinstance(leaf, (MemoryMappedTensor, Node)):
                return False
    return True


def own_folder(td: Any) -> str | None:
    return str(td._mapped_to) if td._mapped_to else None


def saved_path(td: Any) -> pathlib.Path:
    """The folder in which the tensors of a memory-mapped container are.

    Raises AttributeError if it is not mapped to a folder.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     str(TensorDict(a=torch.zeros(3)).memmap(folder).saved_path) == folder
    True
    """
    if not td._mapped_to:
        raise AttributeError(
            "this container has no saved path: it is not memory-mapped, or only to temporary "
            "files; td.memmap(folder) returns one that is mapped to a folder"
        )
    return td._mapped_to


def load_memmap(
    cls: type[Container],
    prefix: Path,
    device: Device = None,
    non_blocking: bool = False,
    *,
    out: Any = None,
    robust_key: bool | None = True,
    subpath: NestedKey | None = None,
    mode: str | None = None,
) -> Container:
    """Open a folder that `memmap` or `save` wrote: the tensors are mapped, data is read when used.

    device: where the tensors are copied to; None and the CPU leave them mapped, "meta" reads none.
    non_blocking: don't wait for the copies to the device.
    out: a container to load into: its nested containers stay, its tensors are replaced.
    robust_key: as for `memmap`; both ways are read, since `meta.json` names the files.
    subpath: load only the container nested under this key (names in a string are parted by "/").
    mode: "r": what is written into the tensors stays in memory; "r+": it reaches the files, and
        PermissionError if one can't be written; None: as "r+" where it can be, else as "r".
    The result is not locked. Its class is the one that was saved; a tensorclass must have been
    defined before, nothing is imported.
    Raises FileNotFoundError if there is no such folder, DamagedFileError if something in it is
    missing, too short, too long or not what it should be.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = TensorDict(a=torch.zeros(3)).memmap(folder)
    ...     td = TensorDict.load_memmap(folder)
    ...     td["a"].fill_(1)
    ...     TensorDict.load_memmap(folder)["a"]
    MemoryMappedTensor([1., 1., 1.])
    MemoryMappedTensor([1., 1., 1.])
    """
    if not os.path.isdir(prefix):
        if os.path.exists(prefix):
            raise NotADirectoryError(f"{prefix} is a file; TensorDict.load(path) reads files")
        raise FileNotFoundError(f"there is no folder {prefix}")
    check_choice("mode", mode, MODES)
    parts = subpath.split("/") if isinstance(subpath, str) else subpath
    key = () if parts is None else unravel_key_to_tuple(tuple(parts))

    def reader(path: str, device: Any, non_blocking: bool) -> FolderReader:
        return FolderReader(path, device, non_blocking, mode).at(key)

    return loaded(reader, os.path.abspath(prefix), device, non_blocking, out)


def loaded(kind: Any, path: str, device: Any, non_blocking: bool, out: Any) -> Any:
    """Read the container with a reader of this kind, into `out` if that is given."""
    if device is not None:
        device = as_device(device)
    if out is not None and out._device is not None:
        if device is not None and device != out._device:
            raise ValueError(f"`out` is on {out._device}, so nothing can be loaded on {device}")
        device = out._device
    try:
        td = kind(path, device, non_blocking).read()
    except RecursionError:
        raise DamagedFileError(path, "containers are nested too deeply in it") from None
    return td if out is None else refill(out, td)


def refill(out: Any, source: Any) -> Any:
    """Make the content of `out` that of `source`; its nested containers stay where they can."""
    if out._locked:
        raise locked_error(out)
    if hasattr(out, "tensordicts") and _same_members(out, source):
        for mine, value in zip(out.tensordicts, source.tensordicts, strict=True):
            refill(mine, value)
        return out
    entries, resized = source._entries(), out._batch_size != source._batch_size
    for name, value in list(out._entries().items()):
        if name not in entries or resized and not keeps(value, entries[name]):
            out._del_str(name)
    if resized:
        out.batch_size = source._batch_size
    if out._names != source._names:
        out.names = source._names
    for name, value in entries.items():
        mine = out._get_str(name)
        if keeps(mine, value):
            refill(mine, value)
        else:
            out._set_str(name, value)
    return out


def _same_members(mine: Any, value: Any) -> bool:
    """Whether two lazy stacks have members of the same sizes, so that one can take the other's."""
    if getattr(value, "stack_dim", None) != mine.stack_dim or mine._is_data():
        return False
    sizes = [td._batch_size for td in mine.tensordicts]
    return sizes == [td._batch_size for td in value.tensordicts]


def keeps(mine: Any, value: Any) -> bool:
    """Whether a nested container can take the content of its loaded counterpart."""
    return isinstance(mine, Node) and type(mine) is type(value) and hasattr(mine, "_d")


def load_memmap_(td: Container, prefix: Path, robust_key: bool | None = True) -> Container:
    """Load a folder into this container, and return it: entries are replaced, or removed.

    Raises RuntimeError if it is locked; one that is memory-mapped is mapped to the folder then.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = TensorDict(a=torch.ones(3)).memmap(folder)
    ...     TensorDict(b=torch.zeros(2)).load_memmap_(folder)["a"]
    MemoryMappedTensor([1., 1., 1.])
    """
    return load_(td, prefix)


def memmap_refresh_(td: Container) -> Container:
    """Load again what is in the folder of this memory-mapped container, and return the container.

    For when another process has added, removed or resized entries; what it wrote into the tensors
    is visible without.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     td = TensorDict(a=torch.zeros(3)).memmap(folder)
    ...     _ = TensorDict(a=torch.ones(3), b=torch.ones(2)).memmap(folder)
    ...     sorted(td.memmap_refresh_().keys())
    ['a', 'b']
    """
    folder = own_folder(td)
    if folder is None:
        raise RuntimeError(
            "Cannot refresh a TensorDict that is not memory mapped or has no path associated."
        )
    return load_(td, folder)


def make_memmap(
    td: Any,
    key: NestedKey,
    shape: Any,
    *,
    dtype: torch.dtype | None = None,
    robust_key: bool | None = True,
) -> MemoryMappedTensor:
    """Add a memory-mapped tensor of zeros to a memory-mapped container, locked though it is.

    shape: or a tensor with the size of each row, for a nested tensor of strided layout.
    Raises RuntimeError if the container is not memory-mapped, the key is taken or the shape does
    not begin with the batch size.

    >>> td = TensorDict(a=torch.zeros(3)).memmap()
    >>> td.make_memmap("b", (2,)).fill_(1), "b" in td
    (MemoryMappedTensor([1., 1.]), True)
    """
    dtype = dtype or torch.get_default_dtype()
    shape, structure, size = ragged.as_shape(shape)

    def make(file: str | None) -> Any:
        return allocate(file, size, dtype, True).zero_()

    return add(td, unravel_key_to_tuple(key), shape, make, robust_key is not False, structure)


def make_memmap_from_tensor(
    td: Any,
    key: NestedKey,
    tensor: Tensor,
    *,
    copy_data: bool = True,
    existsok: bool = True,
    robust_key: bool | None = True,
) -> MemoryMappedTensor:
    """Copy a tensor to a file of a memory-mapped container, as a new entry.

    tensor: also a nested one of either layout, which is one again, of the same rows.
    copy_data: False makes a tensor of zeros of the same shape and dtype.
    existsok: write over a file that is there.
    Raises RuntimeError as `make_memmap`.

    >>> td = TensorDict(a=torch.zeros(3)).memmap()
    >>> td.make_memmap_from_tensor("b", torch.ones(2))
    MemoryMappedTensor([1., 1.])
    """
    shape, structure, values = shape_of(tensor), None, tensor.detach()
    if tensor.is_nested:
        values, structure = ragged.parted(tensor, like=not copy_data)
        structure = ragged.shared(structure, ragged.known_in(td._leaves([])))

    def make(file: str | None) -> Any:
        out = allocate(file, values.shape, values.dtype, existsok)
        return out.copy_(values) if copy_data else out.zero_()

    return add(td, unravel_key_to_tuple(key), shape, make, robust_key is not False, structure)


def make_memmap_from_storage(
    td: Any,
    key: NestedKey,
    storage: torch.UntypedStorage,
    shape: Any,
    *,
    dtype: torch.dtype | None = None,
    robust_key: bool | None = True,
) -> MemoryMappedTensor:
    """Add a tensor over a storage as a new entry of a memory-mapped container.

    shape: or a tensor with the size of each row, as for `make_memmap`.
    The storage is that of the file of this entry; one that has no file is copied to it.
    Raises RuntimeError as `make_memmap`, or if the storage is mapped from another file.

    >>> td = TensorDict(a=torch.zeros(3)).memmap()
    >>> td.make_memmap_from_storage("b", torch.ones(2).untyped_storage(), (2,))
    MemoryMappedTensor([1., 1.])
    """
    shape, structure, size = ragged.as_shape(shape)

    def make(file: str | None) -> MemoryMappedTensor:
        return MemoryMappedTensor.from_storage(storage, shape=size, dtype=dtype, filename=file)

    return add(td, unravel_key_to_tuple(key), shape, make, robust_key is not False, structure)


def add(
    td: Any,
    path: tuple[str, ...],
    shape: torch.Size,
    make: Callable[[str | None], MemoryMappedTensor],
    robust: bool,
    structure: ragged.Structure | None = None,
) -> Any:
    """Add to a memory-mapped container, at the end of `path`, what `make` makes of a file name.

    structure: it makes the values of a nested tensor that has this one.
    """
    if isinstance(td, kinds.TensorClass) and path[0] in td._fields:
        td = td._td
    if not td.is_memmap() or type(td) is not td._plain:
        raise RuntimeError(
            "Can only make a memmap tensor within a memory-mapped TensorDict; this is a "
            f"{type(td).__name__}, memory-mapped: {td.is_memmap()}"
        )
    name, *rest = path
    child, size = td._get_str(name), td._batch_size
    if rest and child is not None:
        if not isinstance(child, Node):
            raise through_leaf(name, child, rest[0])
        return add(child, tuple(rest), shape, make, robust, structure)
    if child is not None:
        raise RuntimeError(
            f"The key {name!r} already exists within the target tensordict. "
            "Delete that entry before overwriting it."
        )
    if shape[: len(size)] != size:
        raise mismatch(size, shape, path[-1])
    folder = own_folder(td)
    with nullcontext() if folder is None else locked(folder):
        child, out = added(td, folder, path, make, robust, structure, shape)
    td._d[name] = child
    if rest:
        _lock(child, weakref.ref(td))
        td._kids = None  # they are remembered when a container is locked
    forget(td)
    return out


def added(
    td: Any,
    folder: str | None,
    path: tuple[str, ...],
    make: Callable[[str | None], MemoryMappedTensor],
    robust: bool,
    structure: ragged.Structure | None,
    shape: torch.Size,
) -> tuple[Any, Any]:
    """The new entry of a container, written to its folder; and the tensor at the end of `path`."""
    (name, *rest), record, used = path, {}, {*RESERVED}
    at = file = None
    if folder is not None:
        record = read_record(folder)
        for held in record["entries"].values():
            stored = ragged.parts_of(held) if "ragged" in held else [held]
            used |= {str(one.get("file", one.get("folder"))).lower() for one in stored}
        file = file_name(name, "" if rest else ".memmap", used, robust, path)
        at = f"{folder}/{file}"
    if rest:
        if at is not None and is_link(at):
            raise linked(at)
        names = None if td._names is None else list(td._names)
        child = memmap(td._plain._make({}, td._batch_size, CPU, names), at)
        out = add(child, tuple(rest), shape, make, robust, structure)
        entry: Record = {"folder": file}
    else:
        child = out = make(at)
        entry = {**ragged.described(out), "file": file}
        if structure is not None:
            if folder is not None:
                entry = ragged.record(structure, entry, namer(name, used, robust, path[:-1]))
                ragged.write(structure.files(folder, entry))
            child = out = ragged.joined(out, structure)
    if folder is not None:
        record["entries"][name] = entry
        write_record(folder, record)
    return child, out


@overload
def save(
    data: Container,
    prefix: Path | None = None,
    copy_existing: bool = False,
    *,
    return_early: Literal[True],
    **options: Unpack[SaveOptions],
) -> TensorDictFuture[Container]: ...
@overload
def save(
    data: Container,
    prefix: Path | None = None,
    copy_existing: bool = False,
    *,
    return_early: Literal[False] = False,
    **options: Unpack[SaveOptions],
) -> Container: ...
def save(
    data: Container,
    prefix: Path | None = None,
    copy_existing: bool = False,
    *,
    num_threads: int = 0,
    return_early: bool = False,
    share_non_tensor: bool = False,
    robust_key: bool | None = True,
) -> Container | TensorDictFuture[Container]:
    """Write this container to disk: to one safetensors file, or to a folder as `memmap` does.

    prefix: a path that ends in `.safetensors` is the file, any other path is the folder.

    The file is written atomically: under another name, synced to disk, and then renamed, so that an
    older one is replaced as a whole. A checksum finds any bit of it that changes later. A tensor
    under two keys is stored once, and shared again when loaded; parameters become parameters again.
    Other readers of safetensors see the tensors under their keys, with dots between names. Returns
    the container.

    For a folder the other arguments and the result are those of `memmap`.
    Raises TypeError, before anything is written, for a value that JSON can't hold.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = TensorDict(a=torch.ones(2), n=dict(text="hi")).save(f"{folder}/td.safetensors")
    ...     TensorDict.load(f"{folder}/td.safetensors").to_dict()
    {'a': tensor([1., 1.]), 'n': {'text': 'hi'}}
    """
    if prefix is None or not os.fspath(prefix).endswith(".safetensors"):
        options: Any = dict(num_threads=num_threads, return_early=return_early)
        return memmap(
            data,
            prefix,
            copy_existing,
            share_non_tensor=share_non_tensor,
            robust_key=robust_key,
            **options,
        )
    if num_threads > 1 or return_early or share_non_tensor:
        raise ValueError(
            "num_threads, return_early and share_non_tensor are only for folders, but the "
            "container is saved to one file: save to a folder, or leave them out"
        )
    save_file(data, prefix)
    return data


def load(
    cls: type[Container],
    prefix: Path,
    device: Device = None,
    non_blocking: bool = False,
    *,
    out: Any = None,
    robust_key: bool | None = True,
    subpath: NestedKey | None = None,
    mode: str | None = None,
) -> Container:
    """Read what `save` wrote: a safetensors file, or a folder as `load_memmap` does.

    The arguments are those of `load_memmap`. Of a file all is read and checked. A safetensors file
    from elsewhere gives a flat container: its names are the keys, the batch size is [].
    Raises FileNotFoundError if there is nothing, DamagedFileError if it is not as it was saved.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = TensorDict(a=torch.ones(2)).save(f"{folder}/td.safetensors")
    ...     with open(f"{folder}/td.safetensors", "r+b") as file:
    ...         _ = file.seek(-1, os.SEEK_END), file.write(b"!")
    ...     try:
    ...         TensorDict.load(f"{folder}/td.safetensors")
    ...     except DamagedFileError as error:
    ...         error.why
    'its content is not what was saved: the checksum differs'
    """
    if not os.path.isfile(prefix):
        return load_memmap(cls, prefix, device, non_blocking, out=out, subpath=subpath, mode=mode)
    if subpath is not None or mode is not None:
        raise ValueError(
            f"{os.fspath(prefix)} is a file, which is read as a whole into memory; subpath and "
            "mode are only for folders"
        )
    return loaded(FileReader, os.fspath(prefix), device, non_blocking, out)


def load_(td: Container, prefix: Path, robust_key: bool | None = True) -> Container:
    """Load what `save` wrote, a file or a folder, into this container: see `load_memmap_`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = TensorDict(a=torch.ones(3)).save(f"{folder}/td.safetensors")
    ...     TensorDict(b=torch.zeros(2)).load_(f"{folder}/td.safetensors")["a"]
    tensor([1., 1., 1.])
    """
    mapped = td.is_memmap()
    if td._locked and not mapped:
        raise locked_error(td)
    source = load(type(td), prefix, td._device)  # before anything is changed
    if mapped:
        td.unlock_()
    refill(td, source)
    if mapped:
        td.lock_()
        if os.path.isdir(prefix):
            mark_folder(td, os.path.abspath(prefix))
    return td


def mark_folder(node: Any, folder: str) -> None:
    """Note in what was loaded from a folder, and is locked now, that it is mapped from there."""
    mark(node, folder)
    record = read_record(folder)
    if record["class"] in VALUE_CLASSES:
        Home(folder, None, record.get("shared") is True).give_to(node)
    members = node._children() if record["class"] == "LazyStackedTensorDict" else None
    for i, (name, entry) in enumerate(record.get("entries", {}).items()):
        child = node._get_str(name) if members is None else members[i]
        if "folder" in entry:
            mark_folder(child, f"{folder}/{entry['folder']}")
        elif "class" in entry:
            Home(folder, name, entry.get("shared") is True).give_to(child)
