"""Tensors whose data is a file: `MemoryMappedTensor`, and how its file is made and mapped."""

from __future__ import annotations

import errno
import math
import os
import re
import stat
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from raffia.files import DamagedFileError as DamagedFileError
from raffia.files import TemporaryFile, reserve_file
from raffia.hints import check_choice
from raffia.tensordict.nested_rows import checked_sizes, sum_of_rows, view_of_rows
from raffia.tensordict.node import Container

MODES = ("r", "r+", None)
Path = str | os.PathLike[str]
Shape = Sequence[int] | Tensor  # as a tensor of two dimensions: the sizes of nested rows

# all that can stand in a file; other names are refused
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex32, torch.complex64, torch.complex128),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
        *(torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
    )
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class MemoryMappedTensor(Tensor):
    """A tensor whose data is in a file: writes to it change the file, for every process.

    Indexing with integers and slices, `split`, `chunk` and `unbind` give mapped tensors over the
    same file; other operations give plain tensors. It is pickled as the name of its file.
    Without `filename` the file is a temporary one, removed with the tensor.
    The shape may be a tensor with the size of each row: of a nested tensor of strided layout.

    >>> x = MemoryMappedTensor.zeros(2, 3)
    >>> x[0].fill_(1)
    MemoryMappedTensor([1., 1., 1.])
    >>> x + 1
    tensor([[2., 2., 2.],
            [1., 1., 1.]])
    """

    _file: Path | None = None  # its name, or the temporary file, which it keeps alive

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(
        cls, source: Any, *, dtype: torch.dtype | None = None, filename: Path | None = None
    ) -> MemoryMappedTensor:
        return cls.from_tensor(torch.as_tensor(source, dtype=dtype), filename=filename)

    def __init__(self, source: Any, **options: Any) -> None:
        pass

    @classmethod
    def from_tensor(
        cls,
        input: Tensor,
        *,
        filename: Path | None = None,
        existsok: bool = False,
        copy_existing: bool = False,
        copy_data: bool = True,
        shape: Shape | None = None,
    ) -> MemoryMappedTensor:
        """Copy a tensor to a file and map it.

        existsok: write over a file that is there.
        copy_existing: copy a tensor that is mapped from another file, which is refused otherwise.
        copy_data: False leaves the file as it is, zeros if it is new.
        shape: expand `input` to this shape; or part it into rows of these sizes.
        Raises RuntimeError if the file exists, or if `input` requires a gradient.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     x = MemoryMappedTensor.from_tensor(torch.arange(3), filename=f"{folder}/x")
        ...     os.path.getsize(x.filename)
        24
        """
        if not isinstance(input, Tensor):
            raise TypeError(
                "MemoryMappedTensor.from_tensor takes a tensor, such as "
                f"torch.as_tensor(input), got {type(input).__name__}"
            )
        if input.is_nested and input.layout is not torch.strided:
            raise NotImplementedError(
                "MemoryMappedTensor.from_tensor: a jagged nested tensor needs more than one file; "
                "store it as an entry: TensorDict(x=input).memmap(folder)"
            )
        if input.requires_grad:
            raise RuntimeError(
                "MemoryMappedTensor.from_tensor is incompatible with tensor.requires_grad; "
                "pass tensor.detach()"
            )
        if shape is not None:
            shape = as_shape(shape)
            input = rows_of(input, shape) if isinstance(shape, Tensor) else input.expand(shape)
        if isinstance(input, MemoryMappedTensor):
            if filename is None or is_whole(input, filename):
                return input
            refuse_copy(input, copy_existing)
        out = allocate(filename, shape_of(input), input.dtype, existsok)
        if copy_data:
            nested = input.is_nested
            rows = zip(out.unbind(), input.unbind(), strict=True) if nested else [(out, input)]
            for row, given in rows:
                row.copy_(given)
        return out

    @classmethod
    def from_filename(
        cls,
        filename: Path,
        dtype: torch.dtype,
        shape: Shape,
        index: Any = None,
        mode: str | None = None,
    ) -> MemoryMappedTensor:
        """Map a file that holds a tensor of this dtype and shape, or only its part `index`.

        mode: "r": what is written into the tensor stays in memory; "r+": it reaches the file, and
            PermissionError if that can't be written; None: as "r+" where it can be, else as "r".
        Raises FileNotFoundError if there is no such file, DamagedFileError if it is too short.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = MemoryMappedTensor.ones(2, 3, filename=f"{folder}/x")
        ...     MemoryMappedTensor.from_filename(f"{folder}/x", torch.float32, (2, 3), index=0)
        MemoryMappedTensor([1., 1., 1.])
        """
        filename, shape = os.fspath(filename), as_shape(shape)
        check_choice("mode", mode, MODES)
        check_length(filename, numel_of(shape) * dtype.itemsize)
        out = map_shape(filename, dtype, shape, mode)
        return out if index is None else out[index]

    @classmethod
    def from_handler(
        cls, handler: TemporaryFile, dtype: torch.dtype, shape: Shape, index: Any = None
    ) -> MemoryMappedTensor:
        """Map the temporary file of another mapped tensor, or only the part `index` of it.

        handler: that file, `x._handler`; it lasts as long as a tensor over it.

        >>> x = MemoryMappedTensor.ones(4)
        >>> MemoryMappedTensor.from_handler(x._handler, torch.float32, (2, 2), index=0)
        MemoryMappedTensor([1., 1.])
        """
        if not isinstance(handler, TemporaryFile):
            raise TypeError(
                "handler must be the temporary file of a mapped tensor, x._handler, got "
                f"{handler!r}; from_filename takes the name of a file"
            )
        out = cls.from_filename(handler.path, dtype, shape)
        out._file = handler
        return out if index is None else out[index]

    @classmethod
    def from_storage(
        cls,
        storage: torch.UntypedStorage,
        *,
        shape: Shape | None = None,
        dtype: torch.dtype | None = None,
        index: Any = None,
        filename: Path | None = None,
    ) -> MemoryMappedTensor:
        """View a storage that is mapped from a file; one that is not is copied to a file.

        shape: one dimension that covers the storage if not given.
        index: only this part of it.
        Raises RuntimeError if the storage is mapped from a file other than `filename`.

        >>> storage = MemoryMappedTensor.ones(4).untyped_storage()
        >>> MemoryMappedTensor.from_storage(storage, shape=(2, 2))
        MemoryMappedTensor([[1., 1.],
                            [1., 1.]])
        """
        dtype = dtype or torch.get_default_dtype()
        shape = as_shape((storage.nbytes() // dtype.itemsize,) if shape is None else shape)
        view = torch.empty(0, dtype=dtype)
        view.set_(storage, 0, (numel_of(shape),))  # type: ignore[call-overload]
        view = rows_of(view, shape) if isinstance(shape, Tensor) else view.view(shape)
        if storage.filename is None:
            out = cls.from_tensor(view, filename=filename)
            return out if index is None else out[index]
        if filename is not None and not same_path(filename, storage.filename):
            raise RuntimeError(
                "Providing a storage with an associated filename that differs from the filename "
                f"argument is not permitted. Got filename={os.fspath(filename)}, storage.filename="
                f"{storage.filename}; from_tensor(..., copy_existing=True) makes a copy"
            )
        out = mapped(view, storage.filename)
        return out if index is None else out[index]

    @classmethod
    def empty(
        cls,
        *size: Any,
        shape: Shape | None = None,
        dtype: torch.dtype | None = None,
        device: Any = None,
        filename: Path | None = None,
        existsok: bool = False,
    ) -> MemoryMappedTensor:
        """A mapped tensor over a new file, whose space is reserved on the disk.

        size: the shape, as integers or as one sequence; `shape` is another way to give it.
        existsok: take a file that is there; one of this length keeps its content.
        Raises RuntimeError if the file exists.

        >>> MemoryMappedTensor.empty(2, 3).shape
        torch.Size([2, 3])
        """
        if device is not None and torch.device(device).type != "cpu":
            raise RuntimeError(f"a mapped tensor is on the CPU, it can't be on {device}")
        if shape is None:
            if not size:
                raise TypeError("the shape is missing, such as MemoryMappedTensor.zeros(2, 3)")
            shape = size if isinstance(size[0], int) else size[0]
        dtype = dtype or torch.get_default_dtype()
        return allocate(filename, as_shape(shape), dtype, existsok)

    @classmethod
    def zeros(cls, *size: Any, **options: Any) -> MemoryMappedTensor:
        """Zeros in a new file; the options are those of `empty`.

        >>> MemoryMappedTensor.zeros(2)
        MemoryMappedTensor([0., 0.])
        """
        out = cls.empty(*size, **options)  # new files hold zeros
        return out.zero_() if options.get("existsok") else out  # type: ignore[return-value]

    @classmethod
    def ones(cls, *size: Any, **options: Any) -> MemoryMappedTensor:
        """Ones in a new file; the options are those of `empty`.

        >>> MemoryMappedTensor.ones(2, dtype=torch.int64)
        MemoryMappedTensor([1, 1])
        """
        return cls.empty(*size, **options).fill_(1)  # type: ignore[return-value]

    @classmethod
    def full(cls, *size: Any, fill_value: Any = None, **options: Any) -> MemoryMappedTensor:
        """One value everywhere in a new file; the options are those of `empty`.

        >>> MemoryMappedTensor.full((2,), 3.5), MemoryMappedTensor.full(2, fill_value=3.5)
        (MemoryMappedTensor([3.5000, 3.5000]), MemoryMappedTensor([3.5000, 3.5000]))
        """
        if fill_value is None:
            *size, fill_value = size  # type: ignore[assignment]
        return cls.empty(*size, **options).fill_(fill_value)  # type: ignore[return-value]

    @classmethod
    def empty_like(cls, input: Tensor, *, filename: Path | None = None) -> MemoryMappedTensor:
        """A new file for a tensor of the shape and dtype of `input`.

        >>> MemoryMappedTensor.empty_like(torch.ones(2, 3)).shape
        torch.Size([2, 3])
        """
        return allocate(filename, shape_of(input), input.dtype, False)

    @classmethod
    def zeros_like(cls, input: Tensor, *, filename: Path | None = None) -> MemoryMappedTensor:
        """Zeros of the shape and dtype of `input` in a new file.

        >>> MemoryMappedTensor.zeros_like(torch.ones(2))
        MemoryMappedTensor([0., 0.])
        """
        return cls.empty_like(input, filename=filename)

    @classmethod
    def ones_like(cls, input: Tensor, *, filename: Path | None = None) -> MemoryMappedTensor:
        """Ones of the shape and dtype of `input` in a new file.

        >>> MemoryMappedTensor.ones_like(torch.zeros(2))
        MemoryMappedTensor([1., 1.])
        """
        return cls.empty_like(input, filename=filename).fill_(1)  # type: ignore[return-value]

    @classmethod
    def full_like(
        cls, input: Tensor, fill_value: Any, *, filename: Path | None = None
    ) -> MemoryMappedTensor:
        """One value everywhere, with the shape and dtype of `input`, in a new file.

        >>> MemoryMappedTensor.full_like(torch.zeros(2), 3)
        MemoryMappedTensor([3., 3.])
        """
        return cls.empty_like(input, filename=filename).fill_(fill_value)  # type: ignore[return-value]

    @property
    def filename(self) -> str:
        """The file that holds the data; RuntimeError if it is a temporary one."""
        if self._file is None or isinstance(self._file, TemporaryFile):
            raise RuntimeError(
                "The MemoryMappedTensor has no file associated. Its data is in a temporary file; "
                "to keep it, pass `filename=`, or a folder to `td.memmap`"
            )
        return os.fspath(self._file)

    @property
    def _handler(self) -> TemporaryFile | None:
        """The temporary file that holds the data; None if it has a name, or is none."""
        return self._file if isinstance(self._file, TemporaryFile) else None

    def __getitem__(self, index: Any) -> Any:
        return self._same_file(super().__getitem__(index))

    def split(self, split_size: Any, dim: int = 0) -> tuple[Tensor, ...]:
        return tuple([self._same_file(part) for part in super().split(split_size, dim)])

    def split_with_sizes(self, split_sizes: Any, dim: int = 0) -> tuple[Tensor, ...]:
        return tuple([self._same_file(p) for p in super().split_with_sizes(split_sizes, dim)])

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
        return tuple([self._same_file(part) for part in super().chunk(chunks, dim)])

    def unbind(self, dim: int = 0) -> tuple[Tensor, ...]:
        return tuple([self._same_file(part) for part in super().unbind(dim)])

    def _same_file(self, part: Tensor) -> Tensor:
        return mapped(part, self._file) if part._is_view() else part

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._file is None:
            return super().__reduce_ex__(protocol)
        length = self.untyped_storage().nbytes() // self.dtype.itemsize
        whole = os.fspath(self._file), self.dtype, length
        if self.is_nested:
            rows: Any = self
            sizes, strides = rows._nested_tensor_size(), rows._nested_tensor_strides()
            offsets = rows._nested_tensor_storage_offsets()
            return _reopen_rows, (*whole, sizes.tolist(), strides.tolist(), offsets.tolist())
        return _reopen, (*whole, tuple(self.shape), self.stride(), self.storage_offset())


def _reopen(filename: str, dtype: torch.dtype, length: int, *view: Any) -> MemoryMappedTensor:
    """A tensor over a file; view: its shape, its strides and where it begins."""
    whole = MemoryMappedTensor.from_filename(filename, dtype, (length,))
    return mapped(torch.as_strided(whole, *view), filename)


def _reopen_rows(
    filename: str, dtype: torch.dtype, length: int, *view: list[Any]
) -> MemoryMappedTensor:
    """A nested tensor of strided layout over a file; view: the same of each row, as lists."""
    whole = MemoryMappedTensor.from_filename(filename, dtype, (length,))
    rows = [torch.tensor(numbers, dtype=torch.int64) for numbers in view]
    return mapped(torch._nested_view_from_buffer(whole.as_subclass(Tensor), *rows), filename)


def mapped(view: Tensor, file: Path | None) -> MemoryMappedTensor:
    """Wrap `view`, which is within the map of `file`, as a memory-mapped tensor."""
    out = view.as_subclass(MemoryMappedTensor)
    out._file = file
    return out


def keep_mapped(out: Container, td: Any) -> Container:
    """Lock rows of a locked memory-mapped container if their tensors are in its files."""
    if td.is_memmap():
        leaves = out._leaves([])
        if leaves and all([isinstance(leaf, MemoryMappedTensor) for leaf in leaves]):
            out.lock_()
            out._origin = None  # made by an index, not by `lock_`
            nodes: list[Any] = [out]
            for node in nodes:  # grows on the way
                node.__dict__["_mapped_to"] = ""
                nodes.extend(node._children())
    return out


def map_file(
    filename: str, dtype: torch.dtype, shape: Sequence[int], mode: str | None = None
) -> MemoryMappedTensor:
    """Map a file that is known to be long enough; one that may only be read is mapped privately."""
    numel = math.prod(shape)
    if mode == "r+" and not os.access(filename, os.W_OK):
        raise PermissionError(errno.EACCES, "the file can't be written", filename)
    if not numel:  # nothing can be mapped
        return mapped(torch.empty(shape, dtype=dtype, device="cpu"), filename)
    try:
        flat = torch.from_file(filename, shared=mode != "r", size=numel, dtype=dtype)
    except RuntimeError as error:
        if found := re.search(r"(?:unable to|[Ee]rror) .*\((\d+)\)$", str(error)):
            code = int(found[1])
            if code in (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE):
                raise OSError(code, os.strerror(code), filename) from error
        if os.access(filename, os.W_OK):
            raise
        flat = torch.from_file(filename, shared=False, size=numel, dtype=dtype)
    return mapped(flat if len(shape) == 1 else flat.view(shape), filename)


def as_shape(shape: Shape) -> torch.Size | Tensor:
    """A shape; or, of a nested tensor, the sizes of its rows."""
    if isinstance(shape, Tensor):
        return checked_sizes(shape) if shape.dim() > 1 else torch.Size(shape.tolist())
    return torch.Size(shape)


def shape_of(x: Any) -> torch.Size | Tensor:
    """`as_shape` of a tensor."""
    sizes: torch.Size | Tensor = x._nested_tensor_size() if x.is_nested else x.shape
    return sizes


def numel_of(shape: torch.Size | Tensor) -> int:
    return sum_of_rows(shape) if isinstance(shape, Tensor) else math.prod(shape)


def rows_of(values: Tensor, sizes: Tensor) -> Tensor:
    """The nested tensor that has all of `values` in rows of these sizes; mapped if they are."""
    if values.numel() != sum_of_rows(sizes):
        raise RuntimeError(
            f"rows of the sizes {sizes.tolist()} need {sum_of_rows(sizes)} values, got a tensor "
            f"of shape {tuple(values.shape)}"
        )
    rows = view_of_rows(values.as_subclass(Tensor).reshape(-1), sizes)
    return mapped(rows, values._file) if isinstance(values, MemoryMappedTensor) else rows


def map_shape(
    filename: str, dtype: torch.dtype, shape: torch.Size | Tensor, mode: str | None = None
) -> MemoryMappedTensor:
    """`map_file` for a shape that may be that of a nested tensor."""
    if not isinstance(shape, Tensor):
        return map_file(filename, dtype, shape, mode)
    return mapped(rows_of(map_file(filename, dtype, (sum_of_rows(shape),), mode), shape), filename)


def allocate(
    filename: Path | None, shape: torch.Size | Tensor, dtype: torch.dtype, existsok: bool
) -> MemoryMappedTensor:
    """Map a file for a tensor of this shape: a new one of zeros, or one that has this length."""
    nbytes = numel_of(shape) * dtype.itemsize
    if filename is not None:
        filename = os.fspath(filename)
        reserve_file(filename, nbytes, existsok)
        return map_shape(filename, dtype, shape)
    file = TemporaryFile(nbytes)
    out = map_shape(file.path, dtype, shape)
    out._file = file
    return out


SMALL = 1 << 20  # bytes; a tensor that is larger gets a separate temporary file
ALIGNMENT = 64  # bytes


def allocate_together(tensors: Sequence[Tensor]) -> list[MemoryMappedTensor]:
    """Map one temporary file, of zeros, for tensors of these shapes and dtypes."""
    ends = [0]
    for x in tensors:
        ends.append(ends[-1] + -(-x.numel() * x.dtype.itemsize // ALIGNMENT) * ALIGNMENT)
    file = TemporaryFile(ends[-1])
    memory = map_file(file.path, torch.uint8, (ends[-1],)).untyped_storage()
    out = []
    for start, x in zip(ends, tensors, strict=False):
        view = torch.empty(0, dtype=x.dtype, device="cpu")
        view.set_(memory, start // x.dtype.itemsize, x.shape)  # type: ignore[call-overload]
        out.append(mapped(view, file))
    return out


def check_length(filename: str, nbytes: int) -> None:
    """Refuse a file that is shorter than `nbytes`: mapping it would grow it, or fail later."""
    found = os.stat(filename)
    if not stat.S_ISREG(found.st_mode):
        raise DamagedFileError(filename, "it is not a file")
    if found.st_size < nbytes:
        raise DamagedFileError(
            filename, (f"it holds {found.st_size} bytes, but the tensor needs {nbytes}")
        )


def is_whole(x: MemoryMappedTensor, filename: Path) -> bool:
    """Whether `x` is the whole content of the file `filename`."""
    file = x._file
    if file is None or isinstance(file, TemporaryFile) or not same_path(file, filename):
        return False
    nbytes = x.numel() * x.dtype.itemsize
    if x.untyped_storage().nbytes() != nbytes or not x.is_contiguous():
        return False
    return os.path.exists(filename) and os.path.getsize(filename) == nbytes


def refuse_copy(x: MemoryMappedTensor, copy_existing: bool) -> None:
    """Raise RuntimeError if data in a file would be copied to another without `copy_existing`."""
    if not copy_existing and x._file is not None and not isinstance(x._file, TemporaryFile):
        raise RuntimeError(
            "A filename was provided but the tensor already has a file associated "
            f"({os.fspath(x._file)}). To copy the tensor onto the new location, "
            "pass copy_existing=True."
        )


def same_path(a: Path, b: Path) -> bool:
    a, b = os.fspath(a), os.fspath(b)
    return a == b or os.path.realpath(a) == os.path.realpath(b)
