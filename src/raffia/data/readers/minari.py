"""Episodes in the layout of Minari: a folder with one HDF5 file, which holds a group to an episode.

Only what a file itself holds is read: links to other files and into them are refused, and so is
everything that is not an array of numbers.

Legend: T steps of one episode.
"""

from __future__ import annotations

import importlib
import json
import operator
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np
import torch

from raffia.data.readers.episode import (
    MAX_DEPTH,
    Column,
    Columns,
    Key,
    Layout,
    Location,
    MalformedDataError,
    Names,
    Path,
    Rules,
    layout_of,
    leave_out,
    make_episode,
)
from raffia.tensordict.tensordict import TensorDict

FILE = os.path.join("data", "main_data.hdf5")
METADATA = "metadata.json"  # beside it; older data sets have attributes of the file instead
GROUP = re.compile(r"episode_(0|[1-9][0-9]{0,17})")
NAMES: Columns = {
    "observations": "obs",
    "actions": "action",
    "rewards": "reward",
    "terminations": "terminated",
    "truncations": "truncated",
    "infos": "info",
}
# deflate makes at most 1032 bytes of one (zlib's "Technical Details"); a small array may do more
MAX_INFLATION = 1032
SMALL_BYTES = 2**24


def read_minari(
    folder: Path,
    *,
    columns: Columns | None = None,
    allow_nan: bool = False,
    truncate_unfinished: bool = False,
) -> MinariEpisodes:
    """The episodes of a data set of Minari's HDF5 layout; needs `pip install 'raffia[hdf5]'`.

    folder: it holds `data/main_data.hdf5`, with groups episode_0, episode_1, ... of T steps, which
        hold observations [T + 1, ...], actions, rewards, terminations and truncations [T, ...], and
        maybe infos. Groups within them are nested entries; a tuple of Minari has the entries
        _index_0, _index_1, ...
    columns: name in the file -> name here, besides obs, action, reward, terminated, truncated and
        info: {"state": ("obs", "state")}; None leaves a column out: {"infos": None}.
    allow_nan: take NaN and infinite numbers.
    truncate_unfinished: the last step of an episode counts as truncated if it is neither terminated
        nor truncated, which is an error otherwise.

    Numbers keep the file's dtypes. Infos of T + 1 rows go with the observations: the last T are
    read into `next`. The result has a length, is indexed and gone through; it reads one episode at
    a time, and holds neither the file nor an episode. Text and images that are stored compressed
    are no numbers: leave them out.

        for episode in read_minari("datasets/D4RL/door/human-v2"):
            buffer.extend(episode)

    >>> import os, tempfile, h5py
    >>> folder = tempfile.TemporaryDirectory()
    >>> os.mkdir(f"{folder.name}/data")
    >>> with h5py.File(f"{folder.name}/data/main_data.hdf5", "w") as file:
    ...     for name, values in {"observations": [[0.0], [0.5], [1.0]], "actions": [1, 0],
    ...                          "rewards": [0.0, 1.0], "terminations": [False, True],
    ...                          "truncations": [False, False]}.items():
    ...         file[f"episode_0/{name}"] = values
    >>> episodes = read_minari(folder.name)
    >>> len(episodes), episodes[0]["obs"].tolist(), episodes[0]["next", "obs"].tolist()
    (1, [[0.0], [0.5]], [[0.5], [1.0]])
    >>> for episode in episodes:
    ...     print(episode["action"], episode["terminated"])
    tensor([1, 0]) tensor([False,  True])
    >>> folder.cleanup()
    """
    h5py()
    folder = os.fspath(folder)
    if os.path.isfile(folder):
        refuse_flat(folder)
    if not os.path.isdir(folder):
        found = f"{folder} is a file" if os.path.exists(folder) else f"there is no folder {folder}"
        raise FileNotFoundError(f"{found}; give the folder that holds {FILE}")
    path = os.path.join(folder, FILE)
    if not os.path.isfile(path):
        found = ", ".join(sorted(os.listdir(folder))[:10]) or "nothing"
        raise FileNotFoundError(f"there is no {FILE} in {folder}; it holds {found}")
    return MinariEpisodes(path, Names(columns, NAMES), Rules(allow_nan, truncate_unfinished))


class MinariEpisodes:
    """The episodes of a data set of Minari's HDF5 layout, as `read_minari` gives them.

    path: the HDF5 file.
    """

    def __init__(self, path: str, names: Names, rules: Rules) -> None:
        self.path = path
        self._names = names
        self._rules = rules
        self._layout: Layout | None = None  # of episode 0, once it was read
        self._metadata = self._read_metadata()
        self._length = self._count()

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r}, {len(self)} episodes)"

    def __getitem__(self, index: int) -> TensorDict:
        number = self._number(index)
        with self._opened() as file:
            return self._read(file, number)

    def __iter__(self) -> Iterator[TensorDict]:
        for number in range(len(self)):
            yield self[number]

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of the data set: metadata.json, or the attributes of the file.

        It is for reading only: nothing but `total_episodes` was checked.
        """
        return dict(self._metadata)

    def attributes(self, index: int) -> dict[str, Any]:
        """Attributes of an episode in the file: its id, total_steps, seed, and the like."""
        number = self._number(index)
        with self._opened() as file:
            group, location = self._group(file, number)
            with location.foreign():
                return {name: plain(value, location) for name, value in group.attrs.items()}

    def _number(self, index: int) -> int:
        number = operator.index(index)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise IndexError(f"there is no episode {index}: {self.path} holds {len(self)}")
        return number

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        # Opened again for each episode, so that no handle is left open, forked or pickled.
        with Location(self.path, "the file").foreign():
            file = h5py().File(self.path, "r")
        with file:
            yield file

    def _read_metadata(self) -> dict[str, Any]:
        path = os.path.join(os.path.dirname(self.path), METADATA)
        if not os.path.exists(path):
            location = Location(self.path, "the attributes of the file")
            with self._opened() as file, location.foreign():
                return {name: plain(value, location) for name, value in file.attrs.items()}
        location = Location(path, "the file")
        with open(path, "rb") as text, location.foreign():
            found = json.loads(text.read().decode())
        if type(found) is not dict:
            location.fail("it is not an object of JSON")
        return found

    def _count(self) -> int:
        location = Location(self.path, "the file")
        with self._opened() as file, location.foreign():
            matches = [GROUP.fullmatch(name) for name in member_names(file, location)]
        numbers = {int(match[1]) for match in matches if match}
        if not numbers:
            location.fail("it holds no group episode_0: there is no episode in it")
        for number in range(len(numbers)):
            if number not in numbers:
                location.fail(f"there is no group episode_{number}, but episode_{max(numbers)}")
        total = self._metadata.get("total_episodes", len(numbers))
        if total != len(numbers):
            location.fail(f"it holds {len(numbers)} episodes, and its metadata has {total}")
        return len(numbers)

    def _group(self, file: Any, number: int) -> tuple[Any, Location]:
        name = f"episode_{number}"
        location = MinariLocation(self.path, name)
        with location.foreign():
            return member(file, name, location, name), location

    def _read(self, file: Any, number: int) -> TensorDict:
        if number and self._layout is None:
            self._read(file, 0)  # what the others must look like
        group, location = self._group(file, number)
        columns = self._columns(group, location)
        episode = make_episode(columns, location, self._rules, self._layout)
        with location.foreign():
            total = plain(group.attrs.get("total_steps", len(episode)), location)
        if total != len(episode):
            location.fail(f"it has {len(episode)} steps, and its attribute total_steps is {total}")
        if not number:
            self._layout = layout_of(columns)
        return episode

    def _columns(self, group: Any, location: Location) -> dict[Key, Column]:
        found = dict(datasets(group, self._names, location, (), set()))
        columns = {}
        for path, name in self._names.of_all(found, location).items():
            column = "/".join(path)
            with location.foreign(column):
                columns[name] = Column(column, to_tensor(found[path], column, location))
        return columns


class MinariLocation(Location):
    """The location of an episode; its columns are named by their path in the file."""

    def of(self, column: str | None = None, step: int | None = None) -> str:
        where = self.where if column is None else f"{self.where}/{column}"
        return where if step is None else f"{where}, step {step}"


def refuse_flat(path: str) -> None:
    """Raise MalformedDataError for a file of D4RL's, which has all steps in one array."""
    try:
        with h5py().File(path, "r") as file:
            flat = isinstance(file.get("observations"), h5py().Dataset)
    except OSError:
        return  # no HDF5
    if flat:
        raise MalformedDataError(
            path,
            "the file",
            "it is in D4RL's flat layout, with the steps of all episodes in one array, and mostly "
            "without the observation after the last step of each. Minari has D4RL's data sets with "
            "a group for each episode (D4RL/...): read_minari(folder) reads those",
        )


def h5py() -> Any:
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
        location.fail("it is a link to elsewhere, which is not followed", column)
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
        location.fail("groups are nested without end, or too deeply", "/".join(prefix))
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


def to_tensor(dataset: Any, column: str, location: Location) -> torch.Tensor:
    """The array of numbers in a file, in memory."""
    dtype = native(dataset.dtype, column, location)
    if not dataset.shape or len(dataset.shape) > MAX_DEPTH:
        location.fail("it is not an array with a row for each step", column)
    if dataset.is_virtual or dataset.external:
        location.fail("its numbers are in another file, which is not read", column)
    check_size(dataset, dtype, column, location)
    array = np.ascontiguousarray(dataset[()], dtype)
    if dtype == np.bool_ and (array.view(np.uint8) > 1).any():
        location.fail("it holds bytes that are neither true nor false", column)
    return torch.from_numpy(array)


def native(dtype: np.dtype[Any], column: str, location: Location) -> np.dtype[Any]:
    """The dtype in this machine's byte order, if a tensor can have it."""
    native = dtype.newbyteorder("=")
    try:
        torch.from_numpy(np.empty(0, native))
    except TypeError:
        path = tuple(column.split("/"))
        location.fail(f"its dtype {dtype} can't be in a tensor; {leave_out(path)}", column)
    return native


def check_size(dataset: Any, dtype: np.dtype[Any], column: str, location: Location) -> None:
    """Check that a small file does not ask for a large memory."""
    stored = dataset.id.get_storage_size()
    nbytes = dtype.itemsize * max(prod(dataset.shape), prod(dataset.chunks or ()))
    if not stored and dataset.size:
        location.fail("nothing was ever written into it", column)
    if nbytes > SMALL_BYTES and nbytes > MAX_INFLATION * stored:
        location.fail(f"it takes {nbytes} bytes, of which only {stored} are stored", column)


def plain(value: Any, location: Location) -> Any:
    """An attribute as a value of Python."""
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    if isinstance(value, h5py().Empty):
        return None
    if not isinstance(value, (str, bytes, bool, int, float, complex, list)):
        location.fail(f"an attribute is a {type(value).__name__}, not a number or text")
    return value
