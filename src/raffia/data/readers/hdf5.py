"""Arrays of numbers in HDF5 files, and the episodes of D4RL's; h5py is needed here alone.

Only what a file itself holds is read: links to other files and into them are refused, and so is
everything that is not an array of numbers.

Legend: N steps in all.
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

from raffia.data.readers.episode import (
    FLAGS,
    MAX_DEPTH,
    Column,
    Columns,
    EpisodeMaker,
    Episodes,
    Key,
    Location,
    Names,
    Path,
    Rules,
    existing_file,
    leave_out,
    missing,
)

# deflate makes at most 1032 bytes of one (zlib's "Technical Details"); a small array may do more
MAX_INFLATION = 1032
SMALL_BYTES = 2**24
D4RL_NAMES: Columns = {
    "observations": "obs",
    "next_observations": ("next", "obs"),
    "actions": "action",
    "rewards": "reward",
    "terminals": "terminated",
    "timeouts": "truncated",
    "infos": "info",
    "metadata": None,  # of the policy that acted
}


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


def read_d4rl(
    path: Path, *, columns: Columns | None = None, allow_nan: bool = False
) -> D4RLEpisodes:
    """The episodes of an HDF5 file of D4RL's; needs `pip install 'raffia[hdf5]'`.

    path: the file: observations, actions, rewards, terminals and maybe timeouts,
        next_observations and infos, arrays of N steps. An episode ends with a step that is
        terminal or a timeout, and with the last of the file. Without `timeouts` no step is one.
    columns: name in the file -> name here, besides obs, action, reward, terminated, truncated and
        info; None leaves a column out: {"infos": None}. The group `metadata` is left out.

    Mostly the observation after the last step of an episode is not in the file. Where that step is
    terminal its own observation stands for it, from which nothing is bootstrapped; elsewhere the
    step is left out, and the one before it is truncated.

        for episode in read_d4rl("hopper_medium-v2.hdf5"):
            buffer.extend(episode)

    >>> import os, tempfile, h5py
    >>> folder = tempfile.TemporaryDirectory()
    >>> with h5py.File(f"{folder.name}/data.hdf5", "w") as file:
    ...     for name, values in {"observations": [[0.0], [0.5], [2.0], [2.5]],
    ...                          "actions": [1, 0, 1, 1], "rewards": [0.0, 1.0, 0.0, 0.0],
    ...                          "terminals": [False, True, False, False],
    ...                          "timeouts": [False, False, False, True]}.items():
    ...         file[name] = values
    >>> for episode in read_d4rl(f"{folder.name}/data.hdf5"):
    ...     print(episode["action"].tolist(), episode["next", "obs"].tolist())
    [1, 0] [[0.5], [0.5]]
    [1] [[2.5]]
    >>> folder.cleanup()
    """
    h5py()
    return D4RLEpisodes(
        existing_file(path), Names(columns, D4RL_NAMES), Rules(allow_nan, True, True)
    )


class D4RLEpisodes(Episodes):
    """The episodes of a D4RL file, as returned by `read_d4rl`."""

    def __init__(self, path: str, names: Names, rules: Rules) -> None:
        super().__init__(path, rules)
        self._names = names
        self._spans = self._find()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r}, {len(self._spans)} episodes)"

    def _find(self) -> list[slice]:
        """The steps of each episode."""
        location = GroupLocation(self.path, "the file")
        with opened_hdf5(self.path) as file, location.foreign():
            found = dict(datasets(file, self._names, location, (), set()))
            paths = {name: path for path, name in self._names.of_all(found, location).items()}
            if FLAGS[0] not in paths:
                location.fail(missing("terminated", found))
            flags = []
            for path in [paths[flag] for flag in FLAGS if flag in paths]:
                flags.append(to_tensor(found[path], "/".join(path), location).bool())
                if flags[-1].shape != flags[0].shape[:1]:
                    location.fail("it must have one value for each step", "/".join(path))
            ends = torch.stack(flags).any(0).numpy()
            for path in paths.values():
                if found[path].shape[:1] != ends.shape:
                    location.fail(
                        f"it has {found[path].shape[:1]} rows, but there are {len(ends)} steps",
                        "/".join(path),
                    )
        if not len(ends):
            location.fail("it has no steps")
        ends[-1] = True
        stops = (np.flatnonzero(ends) + 1).tolist()
        return [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]

    def _read(self, maker: EpisodeMaker) -> Iterator[tuple[dict[Key, Column], Location]]:
        for span in self._spans:
            where = f"the episode of steps {span.start} to {span.stop - 1}"
            location = GroupLocation(self.path, where)
            with opened_hdf5(self.path) as file:
                columns = read_columns(file, self._names, location, span)
            for flag in FLAGS:  # old files have numbers there
                if flag in columns:
                    columns[flag] = columns[flag]._replace(values=columns[flag].values.bool())
            yield columns, location
