"""Arrays of numbers in HDF5 files; h5py is needed here alone.

Only what a file itself holds is read: links to other files and into them are refused, and so is
everything that is not an array of numbers.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from types import ModuleType
from typing import Any

import numpy as np
import torch

from raffia.data.readers.episode import MAX_DEPTH, Column, Key, Location, Names, leave_out

# deflate makes at most 1032 bytes of one (zlib's "Technical Details"); a small array may do more
MAX_INFLATION = 1032
SMALL_BYTES = 2**24


class GroupLocation(Location):
    """The location of an episode; its columns are named by their path in the file."""

    def of(self, column: str | None = None, step: int | None = None) -> str:
        where = self.where if column is None else f"{self.where}/{column}"
        return where if step is None else f"{where}, step {step}"


@contextmanager
def opened_hdf5(path: str) -> Iterator[Any]:
    """A file to read. Opened again each time, so that no handle is left open, forked or pickled."""
    with Location(path, "the file").foreign():
        file = h5py().File(path, "r")
    with file:
        yield file


def h5py() -> ModuleType:
    """The package that reads HDF5."""
    try:
        return importlib.import_module("h5py")
    except ImportError as error:
        raise ImportError(
            "HDF5 files are read with h5py, which is not installed: pip install 'raffia[hdf5]'"
        ) from error


def member_names(group: Any, location: Location) -> list[str]:
    """The names in a group, in alphabetical order."""
    names = list(group)
    for name in names:
        if type(name) is not str:
            location.fail(f"the name {name!r} is not UTF-8")
    return names


def member(group: Any, name: str, location: Location, column: str) -> Any:
    """The member of a group under a name, in the same file."""
    link = group.get(name, getlink=True)
    if type(link) is not h5py().HardLink:
        location.fail("it is a link to another location, which is not followed", column)
    return group[name]


def datasets(
    group: Any, names: Names, location: Location, prefix: Key, visited: set[int]
) -> Iterator[tuple[Key, Any]]:
    """The arrays in a group and the groups below, but those that are left out."""
    if not isinstance(group, h5py().Group):
        location.fail("it is not a group", "/".join(prefix) or None)
    with location.foreign("/".join(prefix) or None):
        address = h5py().h5o.get_info(group.id).addr
        members = member_names(group, location)
    if address in visited or len(prefix) >= MAX_DEPTH:
        location.fail("groups are nested too deeply, or contain themselves", "/".join(prefix))
    visited.add(address)
    for name in members:
        path = (*prefix, name)
        if names.of(path) is None:
            continue
        column = "/".join(path)
        with location.foreign(column):
            found = member(group, name, location, column)
        if isinstance(found, h5py().Dataset):
            yield path, found
        else:
            yield from datasets(found, names, location, path, visited)


def to_tensor(
    dataset: Any, column: str, location: Location, rows: slice | None = None
) -> torch.Tensor:
    """Read an array of numbers from a file, or some rows of it, into memory."""
    dtype = native(dataset.dtype, column, location)
    if not dataset.shape or len(dataset.shape) > MAX_DEPTH:
        location.fail("it is not an array with a row for each step", column)
    if dataset.is_virtual or dataset.external:
        location.fail("its numbers are in another file, which is not read", column)
    check_size(dataset, dtype, column, location)
    array = np.ascontiguousarray(dataset[() if rows is None else rows], dtype)
    if dtype == np.bool_ and (array.view(np.uint8) > 1).any():
        location.fail("it contains bytes that are neither true nor false", column)
    return torch.from_numpy(array)


def native(dtype: np.dtype[Any], column: str, location: Location) -> np.dtype[Any]:
    """The dtype in this machine's byte order, if a tensor can have it."""
    native = dtype.newbyteorder("=")
    try:
        torch.from_numpy(np.empty(0, native))
    except TypeError:
        path = tuple(column.split("/"))
        location.fail(f"its dtype {dtype} cannot be stored in a tensor; {leave_out(path)}", column)
    return native


def check_size(dataset: Any, dtype: np.dtype[Any], column: str, location: Location) -> None:
    """Check that a small file does not ask for a large memory."""
    stored = dataset.id.get_storage_size()
    nbytes = dtype.itemsize * max(prod(dataset.shape), prod(dataset.chunks or ()))
    if not stored and dataset.size:
        location.fail("nothing has been written to it", column)
    if nbytes > SMALL_BYTES and nbytes > MAX_INFLATION * stored:
        location.fail(f"it takes {nbytes} bytes, of which only {stored} are stored", column)


def plain(value: Any, location: Location) -> object:
    """An attribute as a value of Python."""
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    if isinstance(value, h5py().Empty):
        return None
    if not isinstance(value, (str, bytes, bool, int, float, complex, list)):
        location.fail(f"an attribute is a {type(value).__name__}, not a number or text")
    return value


def read_columns(
    group: Any, names: Names, location: Location, rows: slice | None = None
) -> dict[Key, Column]:
    """The arrays of a group by the names they get; of all only some rows, if need be."""
    found = dict(datasets(group, names, location, (), set()))
    columns = {}
    for path, name in names.of_all(found, location).items():
        column = "/".join(path)
        with location.foreign(column):
            columns[name] = Column(column, to_tensor(found[path], column, location, rows))
    return columns
