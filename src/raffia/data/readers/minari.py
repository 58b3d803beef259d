"""Episodes in the layouts of Minari: a group of one HDF5 file to each, or a folder of tables.

Legend: T steps of one episode.
"""

from __future__ import annotations

import json
import operator
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
import torch

from raffia.data.readers.arrow import (
    field_types,
    opened_table,
    pyarrow,
    read_batches,
    to_array,
)
from raffia.data.readers.episode import (
    OF_STEPS,
    Column,
    Columns,
    EpisodeMaker,
    Key,
    Location,
    MalformedDataError,
    Names,
    NumberedLocation,
    Path,
    Rules,
    json_object,
)
from raffia.data.readers.hdf5 import (
    GroupLocation,
    h5py,
    member,
    member_names,
    opened_hdf5,
    plain,
    read_columns,
)
from raffia.tensordict.keys import dotted
from raffia.tensordict.tensordict import TensorDict

FILE = os.path.join("data", "main_data.hdf5")
METADATA = "metadata.json"  # next to it; older data sets have attributes of the file instead
GROUP = re.compile(r"episode_(0|[1-9][0-9]{0,17})")
TABLES = ("arrow", "parquet")
NAMES: Columns = {
    "observations": "obs",
    "actions": "action",
    "rewards": "reward",
    "terminations": "terminated",
    "truncations": "truncated",
    "infos": "info",
}


def read_minari(
    folder: Path,
    *,
    columns: Columns | None = None,
    allow_nan: bool = False,
    truncate_unfinished: bool = False,
) -> MinariEpisodes:
    """The episodes of a data set of Minari's, on HDF5 (extra `hdf5`) or tables (extra `parquet`).

    folder: its path, or the id of one that Minari has downloaded, as "D4RL/door/human-v2". It holds
        `data/main_data.hdf5`, with groups episode_0, episode_1, ... of T steps, which
        hold observations [T + 1, ...], actions, rewards, terminations and truncations [T, ...], and
        maybe infos. Groups within them are nested entries; a tuple of Minari has the entries
        _index_0, _index_1, ... Or tables of T + 1 rows, data/0/part-0.arrow or .parquet, ..., where
        a tuple has the entries 0, 1, ...
    columns: name in the file -> name here, besides obs, action, reward, terminated, truncated and
        info: {"state": ("obs", "state")}; None leaves a column out: {"infos": None}.
    allow_nan: take NaN and infinite numbers.
    truncate_unfinished: the last step of an episode counts as truncated if it is neither terminated
        nor truncated, which is an error otherwise.

    Numbers keep the file's dtypes. Infos of T + 1 rows go with the observations: the last T are
    read into `next`. The result has a length, is indexed and gone through; it reads one episode at
    a time, and holds neither the file nor an episode. Text and images that are stored compressed
    are not numbers: leave them out.

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
    folder = local_folder(os.fspath(folder))
    if os.path.isfile(folder):
        refuse_flat(folder)
    if not os.path.isdir(folder):
        found = f"{folder} is a file" if os.path.exists(folder) else f"there is no folder {folder}"
        raise FileNotFoundError(
            f"{found}; pass the folder that holds {FILE}, or the id of a dataset"
        )
    path, data = os.path.join(folder, FILE), os.path.join(folder, "data")
    names, rules = Names(columns, NAMES), Rules(allow_nan, truncate_unfinished)
    metadata = os.path.join(data, METADATA)
    if os.path.isfile(metadata) and json_object(metadata).get("data_format") in TABLES:
        pyarrow()
        return MinariTables(data, names, rules)
    h5py()
    if os.path.isfile(path):
        return MinariGroups(path, names, rules)
    found = ", ".join(sorted(os.listdir(folder))[:10]) or "nothing"
    raise FileNotFoundError(f"there is no {FILE} in {folder}; it holds {found}")


def local_folder(name: str) -> str:
    """The folder of a data set: the path itself, or where Minari keeps the one of this id."""
    root = os.environ.get("MINARI_DATASETS_PATH") or os.path.expanduser("~/.minari/datasets")
    by_id = os.path.join(root, name)
    is_id = not os.path.isabs(name) and not name.startswith(".")
    return by_id if is_id and not os.path.exists(name) and os.path.isdir(by_id) else name


class MinariEpisodes(ABC):
    """The episodes of a Minari data set, as returned by `read_minari`.

    path: the HDF5 file, or the folder of tables.
    """

    def __init__(self, path: str, names: Names, rules: Rules) -> None:
        self.path = path
        self._names, self._maker = names, EpisodeMaker(rules)
        self._metadata = self._read_metadata()
        self._length = self._count()

    @abstractmethod
    def _read_metadata(self) -> dict[str, Any]:
        """The metadata of all."""

    @abstractmethod
    def _numbers(self) -> set[int]:
        """The numbers of the episodes that the data set holds."""

    @abstractmethod
    def _columns(self, number: int) -> tuple[dict[Key, Column], Location, Any]:
        """The columns of an episode, its location, and the steps that its metadata claims."""

    @abstractmethod
    def attributes(self, index: int) -> dict[str, Any]:
        """Attributes of an episode in the file: its id, total_steps, seed, and the like."""

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r}, {len(self)} episodes)"

    def __getitem__(self, index: int) -> TensorDict:
        number = self._number(index)
        if number and self._maker.layout is None:
            self._read(0)  # the layout that the others must have
        return self._read(number)

    def __iter__(self) -> Iterator[TensorDict]:
        for number in range(len(self)):
            yield self[number]

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of the data set: metadata.json, or the attributes of the file.

        It is for reading only: nothing but `total_episodes` was checked.
        """
        return dict(self._metadata)

    def _number(self, index: int) -> int:
        number = operator.index(index)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise IndexError(f"there is no episode {index}: {self.path} holds {len(self)}")
        return number

    def _count(self) -> int:
        location, numbers = Location(self.path, "the file"), self._numbers()
        if not numbers:
            location.fail("it has no group episode_0, so it holds no episodes")
        for number in range(len(numbers)):
            if number not in numbers:
                location.fail(f"there is no group episode_{number}, but episode_{max(numbers)}")
        total = self._metadata.get("total_episodes", len(numbers))
        if total != len(numbers):
            location.fail(f"it holds {len(numbers)} episodes, but its metadata says {total}")
        return len(numbers)

    def _read(self, number: int) -> TensorDict:
        columns, location, total = self._columns(number)
        episode = self._maker.make(columns, location)
        assert episode is not None
        if total is not None and total != len(episode):
            location.fail(f"it has {len(episode)} steps, but its attribute total_steps is {total}")
        return episode


class MinariGroups(MinariEpisodes):
    """The episodes in an HDF5 file of Minari's."""

    def _read_metadata(self) -> dict[str, Any]:
        path = os.path.join(os.path.dirname(self.path), METADATA)
        if os.path.exists(path):
            return json_object(path)
        location = Location(self.path, "the attributes of the file")
        with opened_hdf5(self.path) as file, location.foreign():
            return {name: plain(value, location) for name, value in file.attrs.items()}

    def _numbers(self) -> set[int]:
        location = Location(self.path, "the file")
        with opened_hdf5(self.path) as file, location.foreign():
            matches = [GROUP.fullmatch(name) for name in member_names(file, location)]
        return {int(match[1]) for match in matches if match}

    def attributes(self, index: int) -> dict[str, Any]:
        number = self._number(index)
        with opened_hdf5(self.path) as file:
            group, location = self._group(file, number)
            with location.foreign():
                return {name: plain(value, location) for name, value in group.attrs.items()}

    def _group(self, file: Any, number: int) -> tuple[Any, Location]:
        name = f"episode_{number}"
        location = GroupLocation(self.path, name)
        with location.foreign():
            return member(file, name, location, name), location

    def _columns(self, number: int) -> tuple[dict[Key, Column], Location, Any]:
        with opened_hdf5(self.path) as file:
            group, location = self._group(file, number)
            columns = read_columns(group, self._names, location)
            with location.foreign():
                total = group.attrs.get("total_steps")
                return columns, location, None if total is None else plain(total, location)


class MinariTables(MinariEpisodes):
    """The episodes in a folder of Minari's tables: of each a folder of its number.

    A table has T + 1 rows; the last one holds an observation and nothing of a step. Arrays lie in
    it flat: the spaces in the metadata tell their shapes.
    """

    def _read_metadata(self) -> dict[str, Any]:
        return json_object(os.path.join(self.path, METADATA))

    def _numbers(self) -> set[int]:
        folders = [name for name in os.listdir(self.path) if GROUP.fullmatch(f"episode_{name}")]
        return {int(name) for name in folders}

    def attributes(self, index: int) -> dict[str, Any]:
        path = os.path.join(self.path, str(self._number(index)), METADATA)
        return json_object(path) if os.path.exists(path) else {}

    def _columns(self, number: int) -> tuple[dict[Key, Column], Location, Any]:
        folder = os.path.join(self.path, str(number))
        files = sorted(name for name in os.listdir(folder) if name.endswith(TABLES))
        location = NumberedLocation(folder, "row", 0)
        if len(files) != 1:
            location.fail(f"it holds {files or 'no table'}, but should hold one table")
        path = os.path.join(folder, files[0])
        location = NumberedLocation(path, "row", 0)
        with location.foreign(), opened_table(path) as file:
            num_rows, types = file.num_rows, field_types(file.schema, location)
            fields = {field.name: field for field in file.schema}
        names = self._names.of_all(types, location)
        parts: dict[Key, list[Any]] = {}
        for row, arrays in read_batches(path, num_rows, names, max(num_rows, 1)):
            for column, array in arrays.items():
                rows = NumberedLocation(path, "row", row)
                parts.setdefault(column, []).append(torch.from_numpy(to_array(array, column, rows)))
        columns = {}
        for column, name in names.items():
            values = torch.cat(parts[column]) if column in parts else torch.empty(0, device="cpu")
            shape = self._shape(column, fields)
            if shape is not None and values[:1].numel() == prod(shape):
                values = values.reshape(len(values), *shape)
            if name[0] in OF_STEPS:
                values = values[:-1]
            columns[name] = Column(dotted(column), values)
        return columns, location, self.attributes(number).get("total_steps")

    def _shape(self, column: Key, fields: dict[str, Any]) -> list[int] | None:
        """The shape of a row of a column; None if nothing tells it."""
        if column[0] == "infos":
            field = fields[column[0]]
            for name in column[1:]:
                field = field.type.field(name)
            text = (field.metadata or {}).get(b"shape")
            return None if text is None else [int(n) for n in text.split(b",") if n]
        spaces = {"observations": "observation_space", "actions": "action_space"}
        if column[0] not in spaces:
            return None
        try:
            found = json.loads(self._metadata[spaces[column[0]]])
            for name in column[1:]:
                below = found["subspaces"]
                found = below[int(name)] if isinstance(below, list) else below[name]
            kind = found.get("type")
            if kind == "Discrete":
                return []
            if kind == "MultiDiscrete":
                return list(np.shape(found["nvec"]))
            return [int(n) for n in found["n" if kind == "MultiBinary" else "shape"]]
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):
            return None


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
            "it is in D4RL's flat layout, with the steps of all episodes in one array: read it "
            "with read_d4rl(file)",
        )
