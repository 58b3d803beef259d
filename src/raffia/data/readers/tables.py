"""Episodes from files of tables: Parquet, and folders of `datasets` and of LeRobot.

A row is one episode, or one step.

Legend: T steps of one episode.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch

from raffia.data.readers.arrow import (
    check_numeric,
    field_types,
    is_id,
    is_list,
    opened_table,
    pyarrow,
    read_batches,
    row_of_lists,
    to_array,
)
from raffia.data.readers.episode import (
    EPISODE,
    REWARD,
    Column,
    Columns,
    EpisodeMaker,
    Episodes,
    Key,
    Location,
    Names,
    NumberedLocation,
    Path,
    Rules,
    existing_file,
    in_episodes,
    json_object,
    leave_out,
    missing,
)
from raffia.tensordict.keys import dotted

NAMES: Columns = {"next_obs": ("next", "obs")}
STATE, SPLITS = "state.json", "dataset_dict.json"  # of `save_to_disk`
INFO = os.path.join("meta", "info.json")  # of LeRobot
LEROBOT_VERSIONS = ("v2", "v3")
# What numbers steps, and tells nothing about them.
LEROBOT_NAMES: Columns = {
    "episode_index": "episode",
    "next.reward": "reward",
    **dict.fromkeys(("next.done", "frame_index", "index", "task_index")),
}


def read_parquet(
    path: Path,
    *,
    columns: Columns | None = None,
    allow_nan: bool = False,
    truncate_unfinished: bool = False,
    complete: bool = False,
) -> TableEpisodes | TableSteps:
    """The episodes of a Parquet file or a folder of them; needs `pip install 'raffia[parquet]'`.

    The type of the column `reward` decides what a row is. If it is a list, each row is an episode
    of T steps, and the other columns are lists as well: T + 1 `obs`, or T and as many `next_obs`;
    T `action`, `reward`, `terminated` and `truncated`. The result then has a length. If it is a
    number, each row is a step, with the same columns, and one `episode`, an integer or a string,
    that holds the episode that the step belongs to; it is no part of what is read. The steps of an
    episode stand together.

    Vectors and larger arrays are lists (of lists), all of one length; structs are nested entries.
    Other columns keep their names; one of T + 1 rows goes with the observations: its last T are
    read into `next`. Numbers keep the file's dtypes. No value may be null.

    path: the file; or a folder, whose files *.parquet are read one after the other, by their names
        and the numbers in them. All have the same columns; the steps of an episode may go on in the
        next file, with rows counted on from the file that it begins in.
    columns: name in the file -> name here: {"state": "obs"}; None leaves a column out:
        {"comment": None}.
    allow_nan: take NaN and infinite numbers.
    truncate_unfinished: the last step of an episode counts as truncated if it is neither terminated
        nor truncated, which is an error otherwise.
    complete: what is missing gets its usual value: rewards are 0, no step is terminated, and the
        last one is truncated. Of T observations without next ones the last stands for the one after
        it where the episode was terminated there; elsewhere the last step is left out.

    Going through the result reads the file, as often as one likes, an episode at a time. A
    MalformedDataError names the file and the row, counted from 0.

        for episode in read_parquet("data.parquet"):
            buffer.extend(episode)

    >>> import tempfile, pyarrow, pyarrow.parquet
    >>> table = pyarrow.table({"episode": [7, 7, 8], "obs": [[0.0], [0.5], [0.0]],
    ...                        "next_obs": [[0.5], [1.0], [0.5]], "action": [1, 0, 1],
    ...                        "reward": [0.0, 1.0, 0.0], "terminated": [False, True, False],
    ...                        "truncated": [False, False, True]})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pyarrow.parquet.write_table(table, f"{folder}/data.parquet")
    ...     for episode in read_parquet(f"{folder}/data.parquet"):
    ...         print(episode["obs"].tolist(), episode["next", "obs"].tolist(), episode["action"])
    [[0.0], [0.5]] [[0.5], [1.0]] tensor([1, 0])
    [[0.0]] [[0.5]] tensor([1])
    """
    pyarrow()
    rules = Rules(allow_nan, truncate_unfinished, complete)
    return episodes_of_tables(os.fspath(path), shards(path), Names(columns, NAMES), rules)


def read_hugging_face(
    folder: Path,
    *,
    columns: Columns | None = None,
    allow_nan: bool = False,
    truncate_unfinished: bool = False,
    complete: bool = False,
) -> TableEpisodes | TableSteps:
    """The episodes in a folder of `datasets.Dataset.save_to_disk`; needs
    `pip install 'raffia[parquet]'`.

    Rows are steps or episodes, with columns as in `read_parquet`, and the same arguments.

    folder: of a `Dataset`; of a `DatasetDict` each split is one.

        for episode in read_hugging_face("dataset/train", columns={"state": "obs"}):
            buffer.extend(episode)

    >>> import json, pathlib, tempfile, pyarrow
    >>> folder = tempfile.TemporaryDirectory()
    >>> table = pyarrow.table({"episode": [0, 0], "obs": [0.0, 0.5], "action": [1, 0],
    ...                        "reward": [0.0, 1.0], "terminated": [False, True]})
    >>> with pyarrow.ipc.new_stream(f"{folder.name}/data.arrow", table.schema) as stream:
    ...     stream.write_table(table)
    >>> state = json.dumps({"_data_files": [{"filename": "data.arrow"}]})
    >>> _ = pathlib.Path(folder.name, "state.json").write_text(state)
    >>> [episode["action"].tolist() for episode in read_hugging_face(folder.name, complete=True)]
    [[1, 0]]
    >>> folder.cleanup()
    """
    pyarrow()
    folder = os.fspath(folder)
    if os.path.exists(os.path.join(folder, SPLITS)):
        splits = [os.path.dirname(one) for one in sorted(glob.glob(f"*/{STATE}", root_dir=folder))]
        raise IsADirectoryError(
            f"{folder} holds several splits; pass the folder of one of {splits}: "
            f"read_hugging_face({os.path.join(folder, *splits[:1])!r})"
        )
    state = json_object(os.path.join(folder, STATE))
    location = Location(os.path.join(folder, STATE), "the file")
    with location.foreign():
        names = [file["filename"] for file in state["_data_files"]]
    for name in names:
        if not isinstance(name, str) or not name or os.path.basename(name) != name:
            location.fail(f"{name!r} is not the name of a file in this folder")
    if not names:
        location.fail("it names no files")
    files = [os.path.join(folder, name) for name in names]
    rules = Rules(allow_nan, truncate_unfinished, complete)
    return episodes_of_tables(folder, files, Names(columns, NAMES), rules)


def read_lerobot(
    folder: Path, *, columns: Columns | None = None, allow_nan: bool = False
) -> TableSteps:
    """The episodes of a LeRobot data set of version 2 or 3; needs `pip install 'raffia[parquet]'`.

    folder: it holds `meta/info.json`, and `data/chunk-000/*.parquet` with a step in each row.
    columns: name in the file -> name here. "observation.state" is ("obs", "state") anyway,
        "episode_index" the episode, "next.reward" the reward; numbers of frames and tasks, and
        "next.done", which does not tell how an episode ended, are left out.

    Videos lie in separate files, which are not read; images in a column are not numbers: leave
    them out, as columns={"observation.images.top": None}.

    Data sets of demonstrations have no rewards and no ends: rewards are 0, no step is terminated
    and the last one is truncated. As the observation after the last step is not there, that step is
    left out.

        for episode in read_lerobot("lerobot/pusht"):
            buffer.extend(episode)

    >>> import json, pathlib, tempfile, pyarrow, pyarrow.parquet
    >>> folder = tempfile.TemporaryDirectory()
    >>> root = pathlib.Path(folder.name)
    >>> for name in ("meta", "data/chunk-000"): (root / name).mkdir(parents=True)
    >>> _ = (root / "meta/info.json").write_text(json.dumps({"codebase_version": "v3.0"}))
    >>> table = pyarrow.table({"episode_index": [0, 0, 0], "observation.state": [0.0, 0.5, 1.0],
    ...                        "action": [1, 0, 1]})
    >>> pyarrow.parquet.write_table(table, root / "data/chunk-000/file-000.parquet")
    >>> for episode in read_lerobot(folder.name):
    ...     print(episode["obs", "state"].tolist(), episode["next", "obs", "state"].tolist())
    [0.0, 0.5] [0.5, 1.0]
    >>> folder.cleanup()
    """
    pyarrow()
    folder = os.fspath(folder)
    info, location = json_object(os.path.join(folder, INFO)), Location(folder, INFO)
    version = info.get("codebase_version")
    if not str(version).startswith(LEROBOT_VERSIONS):
        location.fail(f"its codebase_version is {version!r}; supported are {LEROBOT_VERSIONS}")
    data = os.path.join(folder, "data")
    found = glob.glob("**/*.parquet", root_dir=data, recursive=True)
    if not found:
        raise FileNotFoundError(f"there is no file data/chunk-*/*.parquet in {folder}")
    files = [os.path.join(data, name) for name in sorted(found, key=by_number)]
    first = Location(files[0], "the file")
    with first.foreign(), opened_table(files[0]) as file:
        types = field_types(file.schema, first)
    usual: dict[Any, Any] = dict(LEROBOT_NAMES)
    for name, *_ in types:
        head, *rest = name.split(".")
        if head == "observation":
            usual[name] = ("obs", *rest) if rest else "obs"
    rules = Rules(allow_nan, truncate_unfinished=True, complete=True)
    episodes = episodes_of_tables(folder, files, Names(columns, usual), rules)
    assert isinstance(episodes, TableSteps)
    return episodes


ROWS_AT_ONCE = 4096  # of steps; some hundred kilobytes where observations are vectors


def episodes_of_tables(
    path: str, files: Sequence[str], names: Names, rules: Rules
) -> TableEpisodes | TableSteps:
    """The episodes of files of tables, one after the other; all have the same columns."""
    found, first = [], None
    for file in files:
        num_rows, types, paths = described(file, names, rules)
        found.append((file, num_rows))
        first = first or (types, paths)
        if (types, paths) != first:
            Location(file, "the file").fail(
                f"its columns are {listed(types)}, but those of {files[0]} are "
                f"{listed(first[0])}: the files of a folder must have the same columns"
            )
    assert first is not None
    types, paths = first
    if REWARD in paths and is_list(types[paths[REWARD]]):
        return TableEpisodes(path, found, paths, rules)
    return TableSteps(path, found, paths, rules)


def by_number(name: str) -> list[tuple[int, str]]:
    """A key to sort names by, in which numbers count as such.

    >>> sorted(["part-10", "part-9"], key=by_number)
    ['part-9', 'part-10']
    """
    return [(int(digits or 0), text) for text, digits in re.findall(r"([^0-9]*)([0-9]*)", name)]


def listed(types: Mapping[Key, Any]) -> str:
    """Columns and their types, as text."""
    return ", ".join(f"{dotted(path)} {kind}" for path, kind in types.items())


def described(path: str, names: Names, rules: Rules) -> tuple[int, dict[Key, Any], dict[Key, Key]]:
    """A file's number of rows, the types of its columns, and the column of each entry."""
    location = Location(path, "the file")
    with location.foreign(), opened_table(path) as file:
        num_rows = file.num_rows
        types = field_types(file.schema, location)
    if num_rows < 1:
        location.fail("it has no rows")
    paths = {name: path for path, name in names.of_all(types, location).items()}
    if REWARD not in paths and not rules.complete:
        location.fail(missing("reward", types))
    if REWARD not in paths or not is_list(types[paths[REWARD]]):
        if EPISODE not in paths:
            location.fail(
                "each row is a step, because its reward is not a list, so each row must name its "
                "episode; " + missing("episode", types)
            )
        for name, column in paths.items():
            if name != EPISODE:
                check_numeric(types[column], column, location)
            elif not is_id(types[column]):
                location.fail(f"{types[column]}, not integers or strings", dotted(column))
        return num_rows, types, paths
    if EPISODE in paths and is_id(types[paths[EPISODE]]):
        del paths[EPISODE]
    for column in paths.values():
        if not is_list(types[column]):
            location.fail(
                f"{types[column]}, but each row is an episode, as the list of rewards shows: it "
                f"must be a list with one value for each step; {leave_out(column)}",
                dotted(column),
            )
        check_numeric(types[column], column, location)
    return num_rows, types, paths


class Tables(Episodes):
    """The episodes of files of tables.

    files: each with its number of rows.
    paths: the column of each entry.
    """

    def __init__(
        self, path: str, files: list[tuple[str, int]], paths: dict[Key, Key], rules: Rules
    ) -> None:
        super().__init__(path, rules)
        self._files, self._paths = files, paths
        self._num_rows = sum(num_rows for _, num_rows in files)


class TableEpisodes(Tables):
    """The episodes of tables that have one in each row."""

    def __len__(self) -> int:
        return self._num_rows

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r}, {len(self)} episodes)"

    def _read(self, maker: EpisodeMaker) -> Iterator[tuple[dict[Key, Column], Location]]:
        for file, num_rows in self._files:
            for row, arrays in read_batches(file, num_rows, self._paths.values(), 1):
                location = Location(file, f"row {row}")
                columns = {}
                for name, path in self._paths.items():
                    column = dotted(path)
                    values = to_array(row_of_lists(arrays[path], column, location), path, location)
                    columns[name] = Column(column, torch.from_numpy(values))
                yield columns, location


class TableSteps(Tables):
    """The episodes of tables that have a step in each row."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r}, {self._num_rows} steps)"

    def _read(self, maker: EpisodeMaker) -> Iterator[tuple[dict[Key, Column], Location]]:
        for location, parts in in_episodes(self._steps(), dotted(self._paths[EPISODE])):
            yield (
                {
                    name: joined([part[path] for part in parts], path, location)
                    for name, path in self._paths.items()
                    if name != EPISODE
                },
                location,
            )

    def _steps(self) -> Iterator[tuple[int | str, Location, dict[Key, np.ndarray[Any, Any]]]]:
        """Steps of one episode side by side: its id, their location, and their columns."""
        naming = self._paths[EPISODE]
        for file, num_rows in self._files:
            for begin, arrays in read_batches(file, num_rows, self._paths.values(), ROWS_AT_ONCE):
                location = NumberedLocation(file, "row", begin)
                episodes = arrays.pop(naming).to_pylist()
                if None in episodes:
                    why = "null, which names no episode"
                    location.fail(why, dotted(naming), episodes.index(None))
                values = {path: to_array(arrays[path], path, location) for path in arrays}
                stop = 0
                for episode, steps in groupby(episodes):
                    start, stop = stop, stop + len(list(steps))
                    part = {path: array[start:stop] for path, array in values.items()}
                    yield episode, NumberedLocation(file, "row", begin + start), part


def joined(parts: list[np.ndarray[Any, Any]], path: Key, location: Location) -> Column:
    """The parts of an episode's column as one, if the shapes of their rows are equal."""
    row, wanted = 0, parts[0].shape[1:]
    for part in parts:
        if part.shape[1:] != wanted:
            why = f"rows of {list(part.shape[1:])}, but the ones before are {list(wanted)}"
            location.fail(why, dotted(path), row)
        row += len(part)
    return Column(dotted(path), torch.from_numpy(np.concatenate(parts)))


def shards(path: Path) -> list[str]:
    """The file of a path, or those of a folder in their order."""
    path = os.fspath(path)
    if not os.path.isdir(path):
        return [existing_file(path)]
    found = [name for name in os.listdir(path) if name.endswith(".parquet") and name[0] not in "._"]
    if not found:
        raise IsADirectoryError(
            f"{path} is a folder; pass the file that holds the episodes, or a folder with files "
            "*.parquet in it"
        )
    return [os.path.join(path, name) for name in sorted(found, key=by_number)]
